"""A run's moments against the spiking network that they describe, and how fast that decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from covary import moments
from covary.models import with_covariance
from covary.runs.predictions import numbered
from covary.runs.results import Decisions, SpikingEntropy, SpikingVerification
from covary.runs.results import VerifiedSpikingLayer as Layer
from covary.runs.subject import Moments, Subject, arrays_of, input_correlations, percent, relative
from covary.stochastic import Chain, Spiking, SpikingLayer, comparison, simulate_spikes
from covary.stochastic.comparison import Error, compare

# Relative errors above these are poor.
LIMIT = 0.05  # of rates
LIMITS = {"rate": LIMIT, "fano": 0.1, "covariance": 0.1}
BURN_IN = 100.0
WINDOW = 200.0
DT = 0.25
# Networks for each input whose decision is looked at, inputs at a time, and times in ms.
_JURY, _BATCH = 3, 100
TIMES = (5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 400.0, 500.0, 750.0, 1000.0)
# Spike counts of a neuron that fires so rarely have no Fano factor to speak of.
_LEAST_COUNT = 0.2
_PAIRS = 300
# A Fano factor below which a neuron counts as firing by the clock.
_REGULAR = 0.6


class _SpikingInput(NamedTuple):
    """Moments and simulated spikes of one input."""

    output: moments.Moments
    analytic: list[Moments]  # of the inputs first, then of each layer
    spiking: Spiking


@torch.no_grad()
def verify_spikes(
    subject: Subject, copies: int, duration: float, decided: int
) -> SpikingVerification:
    """Simulate the spiking network for some test inputs, and compare with it layer by layer.

    Rates, Fano factors and covariances of spike counts, with Monte-Carlo error bars; the entropy of
    the output so far as time goes on, and, in classification, how often it is right for ``decided``
    test inputs (those of the subject are the first of them).
    """
    if duration < WINDOW:
        raise ValueError(
            f"Spikes are counted in windows of {WINDOW:g} ms, so a spiking network takes a "
            f"duration of as much at least (and {BURN_IN:g} ms before); got {duration:g} ms."
        )
    seeds = np.random.default_rng(subject.seed).integers(2**31, size=len(subject.rows)).tolist()
    seen = []
    for i, x, progress in subject.inputs():
        spiking = simulate_spikes(
            subject.chain,
            x,
            duration=BURN_IN + duration,
            burn_in=BURN_IN,
            window=WINDOW,
            copies=copies,
            dt=DT,
            covariance=[stage.name for stage in subject.stages],
            times=[time for time in TIMES if time <= duration],
            seed=seeds[i],
            progress=progress,
        )
        seen.append(_SpikingInput(*subject.analytic(x), spiking))
    found = SpikingVerification(
        copies=copies,
        duration=duration,
        burn_in=BURN_IN,
        window=WINDOW,
        dt=DT,
        limit=LIMIT,
        layers=tuple(_layer(subject.chain, i, seen) for i in range(len(subject.stages))),
        entropy=_entropies(seen),
        decisions=_decisions(subject, decided, duration) if subject.run.classifies else None,
        arrays=_arrays(subject, seen),
        **subject.about(),
    )
    return replace(found, notes=tuple(sentences(found)))


def _layer(chain: Chain, i: int, seen: Sequence[_SpikingInput]) -> Layer:
    stage = chain.stages[i]
    layers = [one.spiking.layers[stage.name] for one in seen]
    analytic = [one.analytic[i + 1] for one in seen]
    compared = [
        # Counts of a window, and moments per ms.
        compare(layer.counts, mean * layer.window, covariance * layer.window)
        for layer, (mean, covariance) in zip(layers, analytic, strict=True)
    ]
    errors = {
        "rate": [one.mean for one in compared],
        "variance": [one.variance for one in compared],
        "fano": [_fano_error(*pair) for pair in zip(layers, analytic, strict=True)],
        "covariance": [one.covariance for one in compared],
        "off_diagonal": [one.off_diagonal for one in compared],
    }
    averages = {key: Error.average(values) for key, values in errors.items()}
    rates = torch.stack([layer.rate[0] for layer in layers])
    fano = torch.stack([_fano(*one) for one in analytic])
    firing = torch.stack([mean for mean, _ in analytic]) * WINDOW > _LEAST_COUNT
    pairs = [comparison.top_pairs(input_correlations(stage, one.analytic[i])) for one in seen]
    most = max(pairs, key=lambda found: abs(found[0][2]) if found else 0.0)
    return Layer(
        name=stage.name,
        units=stage.units,
        neuron=vars(stage.neuron),
        poor=tuple(key for key, limit in LIMITS.items() if averages[key].is_above(limit)),
        pairs=most,
        jump=float(stage.weight.square().mean().sqrt()) if i or chain.poisson else None,
        mean_rate=float(rates.mean()),
        mean_fano=float(fano[firing].mean()) if firing.any() else None,
        silent=float((rates == 0).double().mean()),
        saturated=float((rates * stage.neuron.t_ref > 0.9).double().mean()),
        errors={key: relative(values) for key, values in errors.items()},
    )


def _fano(mean: Tensor, covariance: Tensor) -> Tensor:
    return covariance.diagonal() / mean.clamp_min(1e-12)


def _fano_error(layer: SpikingLayer, analytic: Moments) -> Error:
    """The error of Fano factors, of neurons that fire often enough to have one."""
    firing = analytic[0] * layer.window > _LEAST_COUNT

    def pick(sampled_mean: Tensor, sampled: Tensor) -> Tensor:
        variance = sampled.diagonal(dim1=-2, dim2=-1)
        # Jackknifed as it is: where nobody fired, there is nothing to divide by.
        return torch.where(firing, variance / sampled_mean.clamp_min(1 / layer.window), 0.0)

    return comparison.relative_error(layer.counts, pick, torch.where(firing, _fano(*analytic), 0.0))


def _entropies(seen: Sequence[_SpikingInput]) -> SpikingEntropy:
    """Entropy of the output over time and its limit, averaged over inputs."""
    found = [one.spiking.readout.entropy() for one in seen]
    values, bars = (torch.cat(each) for each in zip(*found, strict=True))  # (inputs, T)
    return SpikingEntropy(
        times=tuple(seen[0].spiking.readout.times.tolist()),
        simulated=tuple(values.mean(0).tolist()),
        bar=tuple(float(np.linalg.norm(column) / len(bars)) for column in bars.T.tolist()),
        moments=float(np.mean([one.output.entropy().item() for one in seen])),
    )


def _decisions(subject: Subject, decided: int, duration: float) -> Decisions | None:
    """How often the spiking network is right as time goes on, and how often the moments are.

    Time begins with the input, not after burning in: potentials are anywhere from reset to
    threshold.
    """
    if not decided:
        return None
    chain, data = subject.chain, subject.run.data
    order = np.random.default_rng(subject.seed).permutation(len(data.x_test))[:decided]
    batches = torch.split(torch.from_numpy(order), _BATCH)
    exact, device = with_covariance(subject.net, "full"), chain.stages[0].weight.device
    times = [time for time in TIMES if time <= duration]
    right, agrees, analytic = [], [], 0
    for i, rows in enumerate(batches):
        x, labels = data.x_test[rows], data.y_test[rows]
        classes = exact(x.to(device)).mean.argmax(-1).cpu()
        analytic += int((classes == labels).sum())
        spiking = simulate_spikes(
            chain,
            x,
            duration=times[-1],
            burn_in=0.0,
            window=times[-1] / 2,  # two of them: variances, which nobody looks at here
            copies=_JURY,
            groups=_JURY,
            dt=2 * DT,
            times=times,
            seed=subject.seed + i,
            progress=numbered(subject.progress, i, len(batches)),
        )
        chosen = spiking.readout.decisions.cpu()
        right.append((chosen == labels[:, None, None]).double().mean((0, 2)))
        agrees.append((chosen == classes[:, None, None]).double().mean((0, 2)))
    accuracy, agreement = torch.cat(right), torch.cat(agrees)
    return Decisions(
        inputs=len(order),
        networks=_JURY,
        dt=2 * DT,
        times=tuple(times),
        accuracy=tuple(accuracy.mean(0).tolist()),
        # Of drawing other inputs, whose networks are not independent of each other.
        bar=tuple((accuracy.std(0) / math.sqrt(len(accuracy))).tolist()),
        agreement=tuple(agreement.mean(0).tolist()),
        moments=analytic / len(order),
    )


def _arrays(subject: Subject, seen: Sequence[_SpikingInput]) -> dict[str, np.ndarray]:
    """What figures show."""
    arrays: dict[str, np.ndarray] = {}
    for i, stage in enumerate(subject.stages):
        layers = [one.spiking.layers[stage.name] for one in seen]
        analytic = [one.analytic[i + 1] for one in seen]
        found = {
            "rate": [mean for mean, _ in analytic],
            "fano": [_fano(*one) for one in analytic],
            "sampled_rate": [layer.rate[0] for layer in layers],
            "rate_error": [layer.rate_error[0] for layer in layers],
            "sampled_fano": [layer.fano[0] for layer in layers],
            "fano_error": [layer.fano_error[0] for layer in layers],
            "pairs": [
                _pairs(layer, covariance, (subject.seed, i, j))
                for j, (layer, (_, covariance)) in enumerate(zip(layers, analytic, strict=True))
            ],
        }
        arrays |= arrays_of(stage.name, found)
    return arrays


def _pairs(layer: SpikingLayer, covariance: Tensor, key: tuple[int, int, int]) -> Tensor:
    """(p, 3) correlation, sampled one and its error, of some pairs of neurons that fire."""
    rho = comparison.correlations(covariance)
    firing = layer.rate[0] * layer.window > _LEAST_COUNT
    where = comparison.some_pairs(rho, _PAIRS, key, among=firing)
    sampled, error = layer.covariance[0], layer.covariance_error[0]
    deviation = sampled.diagonal().clamp_min(0).sqrt()
    scale = (deviation[where[0]] * deviation[where[1]]).clamp_min(1e-12)
    table = torch.stack([rho[where], sampled[where] / scale, error[where] / scale], 1)
    empty = table.new_full((_PAIRS - len(table), 3), torch.nan)  # fewer pairs, the same shape
    return torch.cat([table, empty])


# What the numbers say.


def sentences(result: SpikingVerification) -> list[str]:
    """One for each layer whose moments are poor, and one on decisions."""
    layers = result.layers
    senders = [None, *(layer.mean_fano for layer in layers[:-1])]
    found = [
        _poor(layer, sender, result.window)
        for layer, sender in zip(layers, senders, strict=False)
        if layer.poor
    ]
    names = {"rate": "rates", "fano": "Fano factors", "covariance": "covariances"}
    unclear = [
        f"{layer.name} ({names[key]} more than {limit:.0%} off?)"
        for layer in layers
        for key, limit in LIMITS.items()
        if not layer.poor and layer.errors[key].may_reach(limit)
    ]
    if unclear:
        found.append(
            f"Of {', '.join(unclear)} it cannot be told: too few spikes were counted. Simulate for "
            "longer (--duration), or more networks (--copies)."
        )
    if not found:
        found.append(
            f"No layer's rates are more than {LIMIT:.0%} off beyond doubt, and no Fano factors or "
            "covariances more than 10%: moments describe this network on these inputs."
        )
    if result.decisions is not None:
        found.append(_decided(result.decisions))
    return found


def _poor(layer: Layer, sender: float | None, window: float) -> str:
    off = {key: percent(error.value) for key, error in layer.errors.items()}
    if "rate" in layer.poor:
        text = (
            f"{layer.name}: rates are {off['rate']} off. Moments take what comes in for white "
            "noise, which spikes are if those who send them fire by chance and each moves a "
            "membrane by little. "
        )
        if sender is not None and sender < _REGULAR:
            return text + (
                f"The layer before fires by the clock (Fano factor {sender:.2f}), and regular "
                "trains shake a membrane more than their count varies. Train with more noise "
                "(--noise)."
            )
        if layer.jump is None:
            return text + "Simulate for longer: neurons take a while to forget where they began."
        way = (layer.neuron["v_th"] or 0.0) - (layer.neuron["v_res"] or 0.0)
        return text + (
            f"A spike moves it by {layer.jump:.1f} mV here, of {way:g} mV from reset to "
            "threshold. Use more neurons or smaller weights (--weight-decay, "
            "less --noise)."
        )
    text = (
        f"{layer.name}: rates are right, but Fano factors are {off['fano']} and covariances of "
        f"spike counts {off['covariance']} off."
    )
    if layer.pairs:
        i, j, rho = layer.pairs[0]
        text += (
            f" Inputs are correlated by up to |rho| = {abs(rho):.2f} (neurons {i} and {j}), "
            "of which linear response keeps the first power."
        )
    return text + (
        f" Moments are those of long windows; in {window:g} ms a neuron that fires by the clock "
        "has a variance of up to 1/4 of a spike that is no error of theirs."
    )


def _decided(decided: Decisions) -> str:
    timed = zip(decided.times, decided.accuracy, strict=True)
    reached = [time for time, accuracy in timed if accuracy >= decided.moments - 0.02]
    text = (
        f"After {decided.times[-1]:g} ms the spiking network is right for "
        f"{decided.accuracy[-1]:.1%} of {decided.inputs} inputs, the moments for "
        f"{decided.moments:.1%}"
    )
    if reached:
        return f"{text}; it comes within 2 points of them after {reached[0]:g} ms."
    return f"{text}; it does not come within 2 points of them. Simulate for longer (--duration)."
