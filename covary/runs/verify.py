"""A run's moments against a simulation of the stochastic network that they describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import with_covariance
from covary.recording import record
from covary.runs.directory import Run, environment
from covary.runs.measuring import Progress, numbered
from covary.runs.results import (
    EntropyGap,
    InTime,
    PoorReasons,
    SimulatedLayer,
    SpikingVerification,
    Verification,
    VerifiedLayer,
    WithBar,
)
from covary.runs.spikes import percent, relative, verify_spikes
from covary.runs.tracking import quietly
from covary.stochastic import Chain, Dynamics, Estimate, Stage, sample_steady, simulate_ou
from covary.stochastic.comparison import (
    ERRORS,
    Comparison,
    Error,
    Reasons,
    compare,
    correlations,
    inputs_of,
    moments_of_inputs,
    reasons,
    some_pairs,
    variance_share,
)

# A layer that makes so much of its error itself does not owe it to those before it.
_MOSTLY = 0.7
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

Moments = tuple[Tensor, Tensor]  # (n,), (n, n)


class _Seen(NamedTuple):
    """All of one input, layer by layer."""

    analytic: list[Moments]
    before: list[Moments]  # of what goes into each layer
    steady: list[Estimate]
    dynamics: dict[str, Dynamics]
    compared: dict[str, list[Comparison]]  # by simulation
    shares: dict[str, list[tuple[float, float]]]  # variance in time, of that of the steady state
    reasons: list[Reasons]


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
    progress: Progress | None = None,
) -> Verification | SpikingVerification:
    """Simulate the network behind a run on test inputs, and compare moments layer by layer.

    Networks of spiking neurons are simulated spike by spike, and what comes out is written to
    ``spikes.json`` and ``spikes.npz`` in the run's folder (``verify_spikes``). Of others, the
    steady state is drawn, and the network is simulated in time as well: with layers that follow
    at once (``ou-0``), which has the same moments, and with the equal time constants of the paper's
    equation (``ou-1``), which has not. What comes out is also written to the run's folder: numbers
    to ``verification.json``, what figures show to ``verification.npz``.

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
    config = run.config
    net = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    chain = Chain.of(net)
    path = run.spikes_path if chain.is_spiking else run.verification_path
    run.check_replaceable(path, path.with_suffix(".npz"))
    if duration is not None and duration <= 0:
        raise ValueError(f"A simulation takes a duration above 0, got {duration:g}.")
    dataset = run.data
    rows = np.random.default_rng(seed).permutation(len(dataset.x_test))[:samples]
    if chain.is_spiking:
        return verify_spikes(
            run,
            net,
            chain,
            rows,
            copies=64 if copies is None else copies,
            duration=1000.0 if duration is None else duration,
            decided=decisions,
            seed=seed,
            progress=progress,
        )
    copies = 65_536 if copies is None else copies
    duration = 60.0 if duration is None else duration
    x = dataset.x_test[torch.from_numpy(rows)]
    in_time = {"duration": duration, "method": method, "dt": dt}
    seen = [
        _look(net, chain, one[None], copies, in_time, (seed, i), numbered(progress, i, len(x)))
        for i, one in enumerate(x)
    ]
    found = Verification(
        dataset=config.data.name,
        task=config.model.task,  # type: ignore[arg-type]
        activation=config.model.activation,
        noise=(chain.noise, *(stage.noise for stage in chain.stages)),
        weights=run.weights,
        inputs=tuple(rows.tolist()),
        copies=copies,
        duration=duration,
        limit=LIMIT,
        simulations=(STEADY, *OU),
        ou={name: _in_time(name, one, method) for name, one in seen[0].dynamics.items()},
        layers=tuple(_layer(stage, i, seen) for i, stage in enumerate(chain.stages)),
        arrays=_arrays(chain, x, seen, seed),
        **environment(started, seed=seed),
    )
    return replace(found, notes=tuple(sentences(found))).write(run.verification_path)


@torch.no_grad()
def _look(
    net: nn.Module,
    chain: Chain,
    x: Tensor,
    copies: int,
    in_time: Mapping[str, Any],
    key: tuple[int, int],
    progress: Progress | None,
) -> _Seen:
    """Everything about one input (1, ...)."""
    exact = with_covariance(net, "full")
    with record(exact) as found:
        exact(x.to(chain.stages[0].weight.device))
    analytic = [
        (found[stage.name].mean[0].double(), found[stage.name].covariance_matrix[0].double())
        for stage in chain.stages
    ]
    # An input's noise depends on no other input.
    seeds = np.random.default_rng(key).integers(2**31, size=1 + len(OU)).tolist()
    steady = list(sample_steady(chain, x, copies=copies, seed=seeds[0], progress=progress).values())
    traced = {
        stage.name: _liveliest(covariance)
        for stage, (_, covariance) in zip(chain.stages, analytic, strict=True)
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
            record_trace=traced if ratio == 1 and key[1] == 0 else None,
            trace_duration=_TRACE_DURATION,
        )
        for (name, ratio), noise in zip(OU.items(), seeds[1:], strict=True)
    }
    estimates = {STEADY: steady} | {
        name: list(one.stages.values()) for name, one in dynamics.items()
    }
    compared = {
        name: [compare(one, *moments) for one, moments in zip(listed, analytic, strict=True)]
        for name, listed in estimates.items()
    }
    shares = {
        name: [variance_share(one, other) for one, other in zip(listed, steady, strict=True)]
        for name, listed in estimates.items()
    }
    first = moments_of_inputs(chain, x)
    before = [first, *analytic[:-1]]
    sampled = [first, *((one.mean[0], one.covariance_matrix[0]) for one in steady[:-1])]
    why = [
        reasons(stage, steady[i], analytic[i][1], before[i], sampled[i])
        for i, stage in enumerate(chain.stages)
    ]
    return _Seen(analytic, before, steady, dynamics, compared, shares, why)


def _in_time(name: str, one: Dynamics, method: str) -> InTime:
    times = tuple(one.time_constants)
    return InTime(OU[name], method, _OU_COPIES, times, one.dt, one.burn_in)


def _liveliest(covariance: Tensor) -> list[int]:
    """The units that vary most, to be shown in time."""
    order: list[int] = covariance.diagonal().argsort(descending=True)[:_TRACED].tolist()
    return order


def _layer(stage: Stage, i: int, seen: Sequence[_Seen]) -> VerifiedLayer:
    compared = {name: [one.compared[name][i] for one in seen] for name in (STEADY, *OU)}
    averages = {key: Error.average([one.errors[key] for one in compared[STEADY]]) for key in ERRORS}
    why = [one.reasons[i] for one in seen]
    most = max(why, key=lambda one: abs(one.pairs[0][2]) if one.pairs else 0.0)
    parts = ("strong_pairs", "error_at_strong_pairs", "saturated", "error_at_saturated")
    return VerifiedLayer(
        name=stage.name,
        units=len(stage.weight),
        activation=stage.activation.name,
        poor=tuple(key for key in ("covariance", "off_diagonal") if averages[key].is_above(LIMIT)),
        simulations={
            name: _averaged(listed, [one.shares[name][i] for one in seen])
            for name, listed in compared.items()
        },
        by_input=tuple(
            {key: error.value for key, error in one.errors.items()} | {"entropy": one.entropy.value}
            for one in compared[STEADY]
        ),
        reasons=PoorReasons(
            pairs=tuple(most.pairs),
            **{key: float(np.mean([getattr(one, key) for one in why])) for key in parts},
            own=float(np.sqrt(np.mean([one.own**2 for one in why]))),
        ),
    )


def _averaged(
    compared: Sequence[Comparison], shares: Sequence[tuple[float, float]]
) -> SimulatedLayer:
    """Of one layer and simulation, over inputs."""
    dimensions = [one.entropy.dimensions for one in compared]
    gap = _mean([one.entropy[:2] for one in compared])
    return SimulatedLayer(
        **{key: relative([one.errors[key] for one in compared]) for key in ERRORS},
        entropy=EntropyGap(gap.value, gap.bar, (min(dimensions), max(dimensions))),
        effective_samples=float(np.mean([one.samples for one in compared])),
        variance_share=_mean(shares),
    )


def _mean(values: Sequence[tuple[float, float]]) -> WithBar:
    """Of values with standard errors."""
    bars = [bar for _, bar in values]
    return WithBar(
        float(np.mean([value for value, _ in values])),
        float(np.linalg.norm(bars) / len(bars)),
    )


def _arrays(chain: Chain, x: Tensor, seen: Sequence[_Seen], seed: int) -> dict[str, np.ndarray]:
    """What figures show."""
    first = seen[0]
    arrays = {"input": x.numpy()}
    for i, stage in enumerate(chain.stages):
        estimates = [one.steady[i] for one in seen]
        arrays |= {
            f"{stage.name}/mean": _stacked([one.analytic[i][0] for one in seen]),
            f"{stage.name}/variance": _stacked([one.analytic[i][1].diagonal() for one in seen]),
            f"{stage.name}/pairs": _stacked(
                [_pairs(stage, i, one, (seed, i, j)) for j, one in enumerate(seen)]
            ),
        }
        for key in ("mean", "variance"):
            arrays[f"{stage.name}/sampled_{key}"] = _stacked(
                [getattr(one, key)[0] for one in estimates]
            )
            arrays[f"{stage.name}/{key}_error"] = _stacked(
                [getattr(one, f"{key}_error")[0] for one in estimates]
            )
    output = first.steady[-1]
    arrays |= {
        "output/covariance": _numpy(first.analytic[-1][1]),
        "output/sampled_covariance": _numpy(output.covariance_matrix[0]),
        "output/covariance_error": _numpy(output.covariance_error[0]),
    }
    for name, dynamics in first.dynamics.items():
        last = list(dynamics.stages.values())[-1]
        arrays |= {
            f"output/{name}/mean": _numpy(last.mean[0]),
            f"output/{name}/covariance": _numpy(last.covariance_matrix[0]),
        }
        if dynamics.trace:
            arrays["times"] = _numpy(dynamics.times)
            arrays |= {
                f"{stage}/trace": _numpy(trace[:, 0]) for stage, trace in dynamics.trace.items()
            }
    return arrays


def _pairs(stage: Stage, i: int, one: _Seen, key: tuple[int, int, int]) -> Tensor:
    """(p, 4) covariance, sampled one, its error and rho of the inputs, of some pairs of units."""
    covariance, estimate = one.analytic[i][1], one.steady[i]
    rho = correlations(inputs_of(stage, *one.before[i])[1])
    where = some_pairs(covariance, _PAIRS, key)
    tables = (covariance, estimate.covariance_matrix[0], estimate.covariance_error[0], rho)
    return torch.stack([table[where] for table in tables], 1)


def _stacked(values: Sequence[Tensor]) -> np.ndarray:
    return _numpy(torch.stack(list(values)))


def _numpy(value: Tensor) -> np.ndarray:
    array: np.ndarray = value.float().cpu().numpy()
    return array


# What the numbers say: where linear response is poor, and why.


def sentences(result: Verification) -> list[str]:
    """One for each layer whose covariances are poor, and one on networks in time."""
    found = [_poor(layer) for layer in result.layers if layer.poor]
    unclear = [layer.name for layer in result.layers if _is_unclear(layer, result.limit)]
    if unclear:
        found.append(
            f"Of {', '.join(unclear)} it cannot be told whether covariances are more than "
            f"{result.limit:.0%} off: the simulation is too short. Take more --copies."
        )
    if not found:
        found = [
            f"No layer's covariances are more than {result.limit:.0%} off beyond doubt: linear "
            "response describes this network on these inputs."
        ]
    return [*found, _of_time(result)]


def _is_unclear(layer: VerifiedLayer, limit: float) -> bool:
    return not layer.poor and layer.steady.covariance.may_reach(limit)


def _poor(layer: VerifiedLayer) -> str:
    errors, why = layer.steady, layer.reasons
    off = f"{percent(errors.covariance.value)} off"
    text = f"{layer.name}: covariances are {off} ({percent(errors.off_diagonal.value)} "
    text += "between different units). "
    own, whole = why.own, errors.covariance.value
    if whole is not None and own < _MOSTLY * whole:
        text += (
            f"Of its own the layer would add {percent(own)}: it inherits the rest from the layers "
            "before it."
        )
        if layer.activation == "identity":
            return text
    correlated, saturated = _correlated(why), _saturated(why)
    if why.error_at_saturated > max(why.error_at_strong_pairs, 0.5):
        return " ".join([text.rstrip(), saturated, correlated]).rstrip()
    shown = [correlated, saturated] if why.error_at_saturated > 0.5 else [correlated]
    return " ".join([text.rstrip(), *shown]).rstrip()


def _correlated(why: PoorReasons) -> str:
    if not why.pairs:
        return ""
    i, j, rho = why.pairs[0]
    return (
        f"Its inputs are correlated by up to |rho| = {abs(rho):.2f} (units {i} and {j}), and "
        f"linear response keeps the first power of rho alone: the {percent(why.strong_pairs)} "
        f"of pairs with |rho| above 0.5 have {percent(why.error_at_strong_pairs)} of the "
        "squared error."
    )


def _saturated(why: PoorReasons) -> str:
    return (
        f"{percent(why.saturated)} of its units are saturated (less than a fifth of their "
        f"variance is linear in their noise); pairs with such a unit have "
        f"{percent(why.error_at_saturated)} of the squared error."
    )


def _of_time(result: Verification) -> str:
    output = result.output.simulations
    at_once, equal = (output[name].variance_share for name in ("ou-0", "ou-1"))
    return (
        "In time, with the equal time constants of the paper's equation, each layer averages over "
        f"the noise of those before it: the output has {_as_share(equal)} of its variance. Moments "
        f"are those of layers that follow at once, where it has {_as_share(at_once)} of it."
    )


def _as_share(share: WithBar) -> str:
    if share.value is None or share.bar is None:
        return "an unknown part"
    return f"{share.value:.2f} \N{PLUS-MINUS SIGN} {share.bar:.2f}"
