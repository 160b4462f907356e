"""A run's moments against a simulation of the stochastic network that they describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from covary.progress import Steps
from covary.runs.directory import Run
from covary.runs.results import (
    InTime,
    MeasuredNumber,
    SimulatedLayer,
    SpikingVerification,
    SteadyVerification,
    VerifiedLayer,
)
from covary.runs.spikes import verify_spikes
from covary.runs.subject import (
    Moments,
    OneInput,
    Subject,
    arrays_of,
    input_correlations,
    percent,
    relative,
    to_numpy,
)
from covary.runs.tracking import quietly
from covary.stochastic import (
    Chain,
    Dynamics,
    Estimate,
    Stage,
    comparison,
    sample_steady,
    simulate_ou,
)
from covary.stochastic.comparison import ERRORS, Error, compare

# A layer that makes so much of its error itself does not owe it to those before it.
_MOSTLY = 0.7
# What may make covariances of a layer poor, on average over inputs.
_REASONS = ("strong_pairs", "error_at_strong_pairs", "saturated", "error_at_saturated")
# Relative errors of covariances above this are poor.
LIMIT = 0.1
# name -> ratio of time constants of a layer and the one before it
OU = {"ou-0": 0.0, "ou-1": 1.0}
STEADY = "steady"
_OU_COPIES = 64
# What figures show of each input and layer: pairs of units; of the first, units in time.
_PAIRS = 300
_TRACED = 6
_TRACE_DURATION = 15.0


@quietly()
def verify(
    run: Run,
    *,
    samples: int = 4,
    copies: int | None = None,
    duration: float | None = None,
    method: str = "exponential",
    dt: float | None = None,
    decisions: int = 500,
    seed: int = 0,
    progress: Steps | None = None,
) -> SteadyVerification | SpikingVerification:
    """Simulate the network behind a run on test inputs, and compare moments layer by layer.

    Networks of spiking neurons are simulated spike by spike (``verify_spikes``); numbers are
    written to ``spikes.json`` in the run's folder, what figures show to ``spikes.npz``. Of others,
    the steady state is drawn, and the network is simulated in time as well: with layers that follow
    at once (``ou-0``), which has the same moments, and with the equal time constants of the paper's
    equation (``ou-1``), which has not; files are ``verification.json`` and ``verification.npz``.

    Args:
        run: a trained run.
        samples: test inputs.
        copies: draws of the steady state for each of them, 65,536 if None; or spiking networks, 64.
        duration: of networks in time, in time constants, 60 if None; or ms of spikes, 1,000.
        method, dt: how networks in time are integrated, as ``covary.stochastic.simulate_ou`` takes
            them; spikes need neither.
        decisions: test inputs to see how fast a spiking network classifies them.
        seed: decides which inputs, and all noise.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    net = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    chain = Chain.of(net)
    path = run.spikes_path if chain.is_spiking else run.verification_path
    run.check_replaceable(path, path.with_suffix(".npz"))
    if duration is not None and duration <= 0:
        raise ValueError(f"A simulation takes a duration above 0, got {duration:g}.")
    rows = np.random.default_rng(seed).permutation(len(run.data.x_test))[:samples]
    stages = chain.neurons_and_readout()[0] if chain.is_spiking else chain.stages
    subject = Subject(run, net, chain, stages, rows, seed, progress, started)
    if chain.is_spiking:
        many = 64 if copies is None else copies
        return verify_spikes(subject, many, duration or 1000.0, decisions).write(path)
    copies, duration = 65_536 if copies is None else copies, duration or 60.0
    in_time = {"duration": duration, "method": method, "dt": dt}
    seen = [_look(subject, one, copies, in_time) for one in subject.inputs()]
    result = SteadyVerification(
        copies=copies,
        duration=duration,
        limit=LIMIT,
        simulations=(STEADY, *OU),
        ou={
            name: InTime(OU[name], method, _OU_COPIES, one.time_constants, one.dt, one.burn_in)
            for name, one in seen[0].dynamics.items()
        },
        layers=tuple(_layer(stage, i, seen) for i, stage in enumerate(chain.stages)),
        arrays=_arrays(subject, seen),
        **subject.about(),
    )
    return replace(result, notes=tuple(sentences(result))).write(path)


class _Seen(NamedTuple):
    """Moments and simulations of one input; lists have an entry for each stage."""

    analytic: list[Moments]  # of the inputs first, then of each stage
    estimates: dict[str, list[Estimate]]  # by simulation
    dynamics: dict[str, Dynamics]

    def sampled_before(self, i: int) -> Moments:
        """Moments of what goes into a stage, as the steady state has them."""
        if i == 0:
            return self.analytic[0]
        before = self.estimates[STEADY][i - 1]
        return before.mean[0], before.covariance_matrix[0]


@torch.no_grad()
def _look(subject: Subject, one: OneInput, copies: int, in_time: dict[str, Any]) -> _Seen:
    chain, (i, x, progress) = subject.chain, one
    _, analytic = subject.analytic(x)
    # An input's noise depends on no other input.
    seeds = np.random.default_rng((subject.seed, i)).integers(2**31, size=1 + len(OU)).tolist()
    steady = sample_steady(chain, x, copies=copies, seed=seeds[0], progress=progress)
    liveliest = {
        stage.name: covariance.diagonal().argsort(descending=True)[:_TRACED].tolist()
        for stage, (_, covariance) in zip(chain.stages, analytic[1:], strict=True)
    }
    dynamics = {
        name: simulate_ou(
            chain,
            x,
            **in_time,
            copies=_OU_COPIES,
            ratio=ratio,
            seed=noise,
            progress=progress,
            record_trace=liveliest if ratio == 1 and i == 0 else None,
            trace_duration=_TRACE_DURATION,
        )
        for (name, ratio), noise in zip(OU.items(), seeds[1:], strict=True)
    }
    estimates = {STEADY: steady} | {name: one.stages for name, one in dynamics.items()}
    return _Seen(analytic, {name: list(one.values()) for name, one in estimates.items()}, dynamics)


def _layer(stage: Stage, i: int, seen: Sequence[_Seen]) -> VerifiedLayer:
    compared = {
        name: [compare(one.estimates[name][i], *one.analytic[i + 1]) for one in seen]
        for name in (STEADY, *OU)
    }
    steady, simulations = compared[STEADY], {}
    judged = {key: [one.errors[key] for one in steady] for key in ("covariance", "off_diagonal")}
    for name, listed in compared.items():
        dimensions = [one.entropy.dimensions for one in listed]
        estimates = [(one.estimates[name][i], one.estimates[STEADY][i]) for one in seen]
        simulations[name] = SimulatedLayer(
            **{key: relative([one.errors[key] for one in listed]) for key in ERRORS},
            entropy=_mean([one.entropy[:2] for one in listed]),
            entropy_dimensions=(min(dimensions), max(dimensions)),
            effective_samples=float(np.mean([one.samples for one in listed])),
            variance_share=_mean([comparison.variance_share(*pair) for pair in estimates]),
        )
    why = [
        comparison.reasons(
            stage,
            one.estimates[STEADY][i],
            one.analytic[i + 1][1],
            one.analytic[i],
            one.sampled_before(i),
        )
        for one in seen
    ]
    return VerifiedLayer(
        name=stage.name,
        units=stage.units,
        activation=stage.activation.name,
        poor=tuple(key for key, errors in judged.items() if Error.average(errors).is_above(LIMIT)),
        simulations=simulations,
        by_input=tuple(
            {key: error.value for key, error in one.errors.items()} | {"entropy": one.entropy.value}
            for one in steady
        ),
        pairs=max(why, key=lambda one: abs(one.pairs[0][2]) if one.pairs else 0.0).pairs,
        reasons={
            **{key: float(np.mean([getattr(one, key) for one in why])) for key in _REASONS},
            "own": float(np.sqrt(np.mean([one.own**2 for one in why]))),
        },
    )


def _mean(values: Sequence[tuple[float, float]]) -> MeasuredNumber:
    """The mean of values with standard errors, and its own standard error."""
    found, bars = np.array(values).T
    return MeasuredNumber(float(found.mean()), float(np.linalg.norm(bars) / len(bars)))


def _arrays(subject: Subject, seen: Sequence[_Seen]) -> dict[str, np.ndarray]:
    """What figures show."""
    arrays = {"input": np.concatenate([x.numpy() for _, x, _ in subject.inputs()])}
    for i, stage in enumerate(subject.chain.stages):
        estimates = [one.estimates[STEADY][i] for one in seen]
        found = {
            "mean": [one.analytic[i + 1][0] for one in seen],
            "variance": [one.analytic[i + 1][1].diagonal() for one in seen],
            "sampled_mean": [one.mean[0] for one in estimates],
            "mean_error": [one.mean_error[0] for one in estimates],
            "sampled_variance": [one.variance[0] for one in estimates],
            "variance_error": [one.variance_error[0] for one in estimates],
            "pairs": [_pairs(stage, i, one, (subject.seed, i, j)) for j, one in enumerate(seen)],
        }
        arrays |= arrays_of(stage.name, found)
    first = seen[0]
    output = first.estimates[STEADY][-1]
    shown = {
        "output/covariance": first.analytic[-1][1],
        "output/sampled_covariance": output.covariance_matrix[0],
        "output/covariance_error": output.covariance_error[0],
    }
    for name, dynamics in first.dynamics.items():
        last = first.estimates[name][-1]
        shown[f"output/{name}/mean"] = last.mean[0]
        shown[f"output/{name}/covariance"] = last.covariance_matrix[0]
        if dynamics.trace:
            shown["times"] = dynamics.times
            shown |= {f"{stage}/trace": trace[:, 0] for stage, trace in dynamics.trace.items()}
    return arrays | {name: to_numpy(value) for name, value in shown.items()}


def _pairs(stage: Stage, i: int, one: _Seen, key: tuple[int, int, int]) -> Tensor:
    """(p, 4) covariance, sampled one, its error and rho of the inputs, of some pairs of units."""
    covariance, estimate = one.analytic[i + 1][1], one.estimates[STEADY][i]
    rho = input_correlations(stage, one.analytic[i])
    where = comparison.some_pairs(covariance, _PAIRS, key)
    tables = (covariance, estimate.covariance_matrix[0], estimate.covariance_error[0], rho)
    return torch.stack([table[where] for table in tables], 1)


# What the numbers say: where linear response is poor, and why.


def sentences(result: SteadyVerification) -> list[str]:
    """One for each layer whose covariances are poor, and one on networks in time."""
    limit = result.limit
    found = [_poor(layer) for layer in result.layers if layer.poor]
    unclear = [
        layer.name
        for layer in result.layers
        if not layer.poor and layer.steady.covariance.may_reach(limit)
    ]
    if unclear:
        found.append(
            f"Of {', '.join(unclear)} it cannot be told whether covariances are more than "
            f"{limit:.0%} off: the simulation is too short. Take more --copies."
        )
    if not found:
        found = [
            f"No layer's covariances are more than {limit:.0%} off beyond doubt: linear response "
            "describes this network on these inputs."
        ]
    shares = [result.output.simulations[name].variance_share for name in OU]
    at_once, equal = (
        "an unknown part"
        if share.value is None or share.bar is None
        else f"{share.value:.2f} \N{PLUS-MINUS SIGN} {share.bar:.2f}"
        for share in shares
    )
    in_time = (
        "In time, with the equal time constants of the paper's equation, each layer averages over "
        f"the noise of those before it: the output has {equal} of its variance. Moments are those "
        f"of layers that follow at once, where it has {at_once} of it."
    )
    return [*found, in_time]


def _poor(layer: VerifiedLayer) -> str:
    """How far covariances are off, and what is the cause of it: at most two, the larger first."""
    whole, why = layer.steady.covariance.value, layer.reasons
    text = [
        f"{layer.name}: covariances are {percent(whole)} off "
        f"({percent(layer.steady.off_diagonal.value)} between different units)."
    ]
    if whole is not None and why["own"] < _MOSTLY * whole:
        text.append(
            f"Of its own the layer would add {percent(why['own'])}: it inherits the rest from the "
            "layers before it."
        )
        if layer.activation == "identity":
            return " ".join(text)
    strong, saturated = why["error_at_strong_pairs"], why["error_at_saturated"]
    causes = []
    if layer.pairs:
        i, j, rho = layer.pairs[0]
        causes.append(
            f"Its inputs are correlated by up to |rho| = {abs(rho):.2f} (units {i} and {j}), and "
            "linear response keeps the first power of rho alone: the "
            f"{percent(why['strong_pairs'])} of pairs with |rho| above 0.5 have {percent(strong)} "
            "of the squared error."
        )
    if saturated > 0.5:
        causes.append(
            f"{percent(why['saturated'])} of its units are saturated (less than a fifth of their "
            "variance is linear in their noise); pairs with such a unit have "
            f"{percent(saturated)} of the squared error."
        )
    return " ".join(text + (causes[::-1] if saturated > strong else causes))
