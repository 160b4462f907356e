"""A run's moments against the spiking network that they describe, and how fast that decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import with_covariance
from covary.moments import Moments
from covary.recording import record
from covary.runs.directory import Run, environment
from covary.runs.measuring import Progress, numbered
from covary.runs.results import Decisions, RelativeError, SpikingEntropy, SpikingVerification
from covary.runs.results import SpikingLayer as Layer
from covary.stochastic import Chain
from covary.stochastic.comparison import (
    Comparison,
    Error,
    compare,
    correlations,
    inputs_of,
    moments_of_inputs,
    relative_error,
    some_pairs,
    top_pairs,
)
from covary.stochastic.counts import SpikingLayer
from covary.stochastic.spiking import Spiking, layers_of_neurons, neuron_of, simulate_spikes

# Relative errors above these are poor.
LIMIT = 0.05  # of rates
LIMITS = {"rate": LIMIT, "fano": 0.1, "covariance": 0.1}
BURN_IN = 100.0
WINDOW = 200.0
DT = 0.25
# Networks for each input whose decision is looked at, and times, in ms, at which it is.
_JURY = 3
TIMES = (5.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 150.0, 200.0, 300.0, 400.0, 500.0, 750.0, 1000.0)
# Spike counts of a neuron that fires so rarely have no Fano factor to speak of.
_LEAST_COUNT = 0.2
_PAIRS = 300
# A Fano factor below which a neuron counts as firing by the clock.
_REGULAR = 0.6


Pair = tuple[float, float, float]  # two units, and the correlation of their inputs


class _Seen(NamedTuple):
    """All of one input."""

    inputs: tuple[Tensor, Tensor]  # mean (n,) and covariance (n, n)
    analytic: list[tuple[Tensor, Tensor]]  # the same of each layer
    output: Moments
    spiking: Spiking
    compared: list[Comparison]
    fano: list[Error]


def verify_spikes(
    run: Run,
    net: nn.Module,
    chain: Chain,
    rows: np.ndarray,
    *,
    copies: int,
    duration: float,
    decided: int,
    seed: int,
    progress: Progress | None,
) -> SpikingVerification:
    """Simulate the spiking network for some test inputs, and compare with it layer by layer.

    Rates, Fano factors and covariances of spike counts, with Monte-Carlo error bars; the entropy of
    what has come out so far as time goes on, and, in classification, how often it is right for
    ``decided`` test inputs (those of ``rows`` are the first of them). Numbers go to ``spikes.json``
    in the run's folder, what figures show to ``spikes.npz``.
    """
    started = datetime.now(timezone.utc)
    config, dataset = run.config, run.data
    hidden, _ = layers_of_neurons(chain)
    if duration < WINDOW:
        raise ValueError(
            f"Spikes are counted in windows of {WINDOW:g} ms, so a spiking network takes a "
            f"duration of as much at least (and {BURN_IN:g} ms before); got {duration:g} ms."
        )
    x = dataset.x_test[torch.from_numpy(rows)]
    layers, entropy, arrays = _compared(net, chain, x, copies, duration, seed, progress)
    decisions = None
    if run.classifies and decided:
        order = np.random.default_rng(seed).permutation(len(dataset.x_test))[:decided]
        some = torch.from_numpy(order)
        decisions = _decisions(
            net,
            chain,
            dataset.x_test[some],
            dataset.y_test[some],
            duration=duration,
            seed=seed,
            progress=progress,
        )
    found = SpikingVerification(
        dataset=config.data.name,
        task=config.model.task,  # type: ignore[arg-type]
        activation=config.model.activation,
        noise=(chain.noise, *(stage.noise for stage in hidden)),
        weights=run.weights,
        inputs=tuple(rows.tolist()),
        copies=copies,
        duration=duration,
        burn_in=BURN_IN,
        window=WINDOW,
        dt=DT,
        limit=LIMIT,
        layers=tuple(layers),
        entropy=entropy,
        decisions=decisions,
        arrays=arrays,
        **environment(started, seed=seed),
    )
    return replace(found, notes=tuple(sentences(found))).write(run.spikes_path)


def percent(value: float | None) -> str:
    """A part as people read it.

    Examples:
        >>> percent(0.123), percent(0.0123), percent(0.00001), percent(0.0)
        ('12%', '1.2%', '<0.1%', '0%')
    """
    if value is None:
        return "undefined"
    if 0 < value < 0.001:
        return "<0.1%"
    return f"{100 * value:.{1 if 0 < value < 0.0995 else 0}f}%"


def relative(errors: Sequence[Error]) -> RelativeError:
    """An error on average over inputs, as results have it."""
    average = Error.average(errors)
    return RelativeError(average.value, average.bar, average.floor)


def _compared(
    net: nn.Module,
    chain: Chain,
    x: Tensor,
    copies: int,
    duration: float,
    seed: int,
    progress: Progress | None,
) -> tuple[list[Layer], SpikingEntropy, dict[str, np.ndarray]]:
    """Layers, entropies in time, and arrays for figures."""
    hidden, _ = layers_of_neurons(chain)
    seeds = np.random.default_rng(seed).integers(2**31, size=len(x)).tolist()
    seen = [
        _look(net, chain, one[None], copies, duration, seeds[i], numbered(progress, i, len(x)))
        for i, one in enumerate(x)
    ]
    layers = []
    for i, stage in enumerate(hidden):
        neuron = neuron_of(stage)
        rates = torch.stack([one.spiking.layers[stage.name].rate[0] for one in seen])
        errors = {
            "rate": [one.compared[i].mean for one in seen],
            "variance": [one.compared[i].variance for one in seen],
            "fano": [one.fano[i] for one in seen],
            "covariance": [one.compared[i].covariance for one in seen],
            "off_diagonal": [one.compared[i].off_diagonal for one in seen],
        }
        averages = {key: Error.average(values) for key, values in errors.items()}
        analytic = [one.analytic[i] for one in seen]
        fano = torch.stack([cov.diagonal() / mean.clamp_min(1e-12) for mean, cov in analytic])
        firing = torch.stack([mean for mean, _ in analytic]) * WINDOW > _LEAST_COUNT
        layers.append(
            Layer(
                name=stage.name,
                units=len(stage.weight),
                neuron=vars(neuron),
                poor=tuple(key for key, most in LIMITS.items() if averages[key].is_above(most)),
                pairs=tuple(_correlated_inputs(chain, i, seen)),
                jump=float(stage.weight.square().mean().sqrt()) if i or chain.poisson else None,
                mean_rate=float(rates.mean()),
                mean_fano=float(fano[firing].mean()) if firing.any() else None,
                silent=float((rates == 0).double().mean()),
                saturated=float((rates * neuron.t_ref > 0.9).double().mean()),
                errors={key: relative(values) for key, values in errors.items()},
            )
        )
    return layers, _entropies(seen), _arrays([stage.name for stage in hidden], seen, seed)


def _correlated_inputs(chain: Chain, i: int, seen: Sequence[_Seen]) -> list[Pair]:
    """The most correlated inputs of a layer's neurons, of all inputs, as (unit, unit, rho)."""
    stage = layers_of_neurons(chain)[0][i]
    tops = []
    for one in seen:
        before = one.analytic[i - 1] if i else one.inputs
        tops.append(top_pairs(correlations(inputs_of(stage, *before)[1])))
    most = max(tops, key=lambda pairs: abs(pairs[0][2]) if pairs else 0.0)
    return [(float(i), float(j), rho) for i, j, rho in most]


@torch.no_grad()
def _look(
    net: nn.Module,
    chain: Chain,
    x: Tensor,
    copies: int,
    duration: float,
    seed: int,
    progress: Progress | None,
) -> _Seen:
    """Everything about one input (1, ...)."""
    exact = with_covariance(net, "full")
    with record(exact) as found:
        output: Moments = exact(x.to(chain.stages[0].weight.device))
    hidden, _ = layers_of_neurons(chain)
    names = [stage.name for stage in hidden]
    analytic = [
        (found[name].mean[0].double(), found[name].covariance_matrix[0].double()) for name in names
    ]
    spiking = simulate_spikes(
        chain,
        x,
        duration=BURN_IN + duration,
        burn_in=BURN_IN,
        window=WINDOW,
        copies=copies,
        dt=DT,
        covariance=names,
        times=[time for time in TIMES if time <= duration],
        seed=seed,
        progress=progress,
    )
    layers = [spiking.layers[name] for name in names]
    compared = [
        # Counts of a window, and moments per ms.
        compare(layer.counts, mean * layer.window, covariance * layer.window)
        for layer, (mean, covariance) in zip(layers, analytic, strict=True)
    ]
    fano = [_fano(layer, *moments) for layer, moments in zip(layers, analytic, strict=True)]
    return _Seen(moments_of_inputs(chain, x), analytic, output, spiking, compared, fano)


def _fano(layer: SpikingLayer, mean: Tensor, covariance: Tensor) -> Error:
    """The error of Fano factors, of neurons that fire often enough to have one."""
    firing = mean * layer.window > _LEAST_COUNT

    def pick(sampled_mean: Tensor, sampled: Tensor) -> Tensor:
        variance = sampled.diagonal(dim1=-2, dim2=-1)
        # Jackknifed as it is: where nobody fired, there is nothing to divide by.
        return torch.where(firing, variance / sampled_mean.clamp_min(1 / layer.window), 0.0)

    truth = torch.where(firing, covariance.diagonal() / mean.clamp_min(1e-12), 0.0)
    return relative_error(layer.counts, pick, truth)


def _entropies(seen: Sequence[_Seen]) -> SpikingEntropy:
    """Of the output, as spikes come in, and where it is to end: averages over inputs."""
    readout = [one.spiking.readout for one in seen]
    values = [one.entropy() for one in readout]
    return SpikingEntropy(
        times=tuple(readout[0].times.tolist()),
        simulated=tuple(torch.stack([value[0] for value, _ in values]).mean(0).tolist()),
        bar=tuple(
            float(np.linalg.norm(column) / len(values))
            for column in torch.stack([error[0] for _, error in values]).T.tolist()
        ),
        moments=float(np.mean([one.output.entropy().item() for one in seen])),
    )


@torch.no_grad()
def _decisions(
    net: nn.Module,
    chain: Chain,
    x: Tensor,
    y: Tensor,
    *,
    duration: float,
    seed: int,
    progress: Progress | None,
    batch: int = 100,
) -> Decisions:
    """How often the spiking network is right as time goes on, and how often the moments are.

    Time begins with the input, not after burning in: potentials are anywhere from reset to
    threshold.
    """
    exact = with_covariance(net, "full")
    device = chain.stages[0].weight.device
    times = [time for time in TIMES if time <= duration]
    right, agrees, analytic = [], [], 0
    parts = list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))
    for i, (inputs, labels) in enumerate(parts):
        classes = exact(inputs.to(device)).mean.argmax(-1).cpu()
        analytic += int((classes == labels).sum())
        readout = simulate_spikes(
            chain,
            inputs,
            duration=times[-1],
            burn_in=0.0,
            window=times[-1] / 2,  # two of them: variances, which nobody looks at here
            copies=_JURY,
            groups=_JURY,
            dt=2 * DT,
            times=times,
            seed=seed + i,
            progress=numbered(progress, i, len(parts)),
        ).readout
        decided = readout.decisions.cpu()
        right.append((decided == labels[:, None, None]).double().mean((0, 2)))
        agrees.append((decided == classes[:, None, None]).double().mean((0, 2)))
    accuracy, agreement = torch.cat(right), torch.cat(agrees)
    return Decisions(
        inputs=len(x),
        networks=_JURY,
        dt=2 * DT,
        times=tuple(times),
        accuracy=tuple(accuracy.mean(0).tolist()),
        # Of drawing other inputs, whose networks are not independent of each other.
        bar=tuple((accuracy.std(0) / math.sqrt(len(accuracy))).tolist()),
        agreement=tuple(agreement.mean(0).tolist()),
        moments=analytic / len(x),
    )


def sentences(result: SpikingVerification) -> list[str]:
    """What the numbers say."""
    layers = result.layers
    senders = [None, *(layer.mean_fano for layer in layers[:-1])]
    found = [
        _poor(layer, sender, result.window)
        for layer, sender in zip(layers, senders, strict=False)
        if layer.poor
    ]
    unclear = [words for layer in result.layers for words in _unclear(layer)]
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


def _unclear(layer: Layer) -> list[str]:
    """What may be more than so much off, or not."""
    names = {"rate": "rates", "fano": "Fano factors", "covariance": "covariances"}
    return [
        f"{layer.name} ({names[key]} more than {limit:.0%} off?)"
        for key, limit in LIMITS.items()
        if not layer.poor and layer.errors[key].may_reach(limit)
    ]


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
            f" Inputs are correlated by up to |rho| = {abs(rho):.2f} (neurons {i:.0f} and "
            f"{j:.0f}), of which linear response keeps the first power."
        )
    return text + (
        f" Moments are those of long windows; in {window:g} ms a neuron that fires by the clock "
        "has a variance of up to 1/4 of a spike that is no error of theirs."
    )


def _decided(decided: Decisions) -> str:
    aim, last = decided.moments - 0.02, decided.accuracy[-1]
    reached = [
        time
        for time, accuracy in zip(decided.times, decided.accuracy, strict=True)
        if accuracy >= aim
    ]
    text = (
        f"After {decided.times[-1]:g} ms the spiking network is right for {last:.1%} of "
        f"{decided.inputs} inputs, the moments for {decided.moments:.1%}"
    )
    if reached:
        return f"{text}; it comes within 2 points of them after {reached[0]:g} ms."
    return f"{text}; it does not come within 2 points of them. Simulate for longer (--duration)."


def _arrays(names: Sequence[str], seen: Sequence[_Seen], seed: int) -> dict[str, np.ndarray]:
    """What figures show."""
    arrays: dict[str, np.ndarray] = {}
    for i, name in enumerate(names):
        layers = [one.spiking.layers[name] for one in seen]
        means = [one.analytic[i][0] for one in seen]
        covariances = [one.analytic[i][1] for one in seen]
        found = {
            "rate": torch.stack(means),
            "fano": torch.stack(
                [
                    covariance.diagonal() / mean.clamp_min(1e-12)
                    for mean, covariance in zip(means, covariances, strict=True)
                ]
            ),
            "sampled_rate": torch.cat([layer.rate for layer in layers]),
            "rate_error": torch.cat([layer.rate_error for layer in layers]),
            "sampled_fano": torch.cat([layer.fano for layer in layers]),
            "fano_error": torch.cat([layer.fano_error for layer in layers]),
            "pairs": torch.stack(
                [
                    _pairs(layer, covariance, (seed, i, j))
                    for j, (layer, covariance) in enumerate(zip(layers, covariances, strict=True))
                ]
            ),
        }
        arrays |= {f"{name}/{key}": value.float().cpu().numpy() for key, value in found.items()}
    return arrays


def _pairs(layer: SpikingLayer, covariance: Tensor, key: tuple[int, int, int]) -> Tensor:
    """(p, 3) correlation, sampled one and its error, of some pairs of neurons that fire."""
    rho = correlations(covariance)
    firing = layer.rate[0] * layer.window > _LEAST_COUNT
    where = some_pairs(rho, _PAIRS, key, among=firing)
    sampled, error = layer.covariance[0], layer.covariance_error[0]
    deviation = sampled.diagonal().clamp_min(0).sqrt()
    scale = (deviation[where[0]] * deviation[where[1]]).clamp_min(1e-12)
    table = torch.stack([rho[where], sampled[where] / scale, error[where] / scale], 1)
    empty = table.new_full((_PAIRS - len(table), 3), torch.nan)  # fewer pairs, the same shape
    return torch.cat([table, empty])
