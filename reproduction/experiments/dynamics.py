"""One input of a trained network: its moments beside a simulation of the stochastic network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from covary.runs import SteadyVerification, verify
from covary.runs.verify import OU
from covary.stochastic import Chain
from reproduction.experiment import SEEDS, Claim, Experiment, Measured, Part, by_scale, seeds
from reproduction.experiments import behind, networks
from reproduction.workshop import Network, Workshop

# Of the trace that is shown, so many points in time.
_TIMES = 300


def measure(part: Part, workshop: Workshop) -> Measured:
    """Mean, variance and covariance of the output: moments, and what was sampled.

    Settings: ``network``, ``copies`` of the steady state, ``duration``, ``method`` and ``dt`` of
    the network in time; and ``behind``, the ``steps`` and ``dt`` of the network with noise behind
    its activations, if that is drawn as well.
    """
    settings = part.settings
    run = workshop.trained(settings["network"], part.seed)
    result = verify(
        run,
        samples=1,
        copies=settings["copies"],
        duration=settings["duration"],
        method=settings["method"],
        dt=settings["dt"],
        seed=part.seed,
        progress=workshop.progress,
    )
    assert isinstance(result, SteadyVerification)
    numbers: dict[str, float | None] = {}
    for simulation, found in result.output.simulations.items():
        for key in ("mean", "variance", "covariance"):
            numbers[f"{key}_error_{simulation}"] = getattr(found, key).value
        numbers[f"entropy_off_{simulation}"] = found.entropy.value
        numbers[f"variance_share_{simulation}"] = found.variance_share.value
    shown = _shown(result.arrays, result.output.name)
    if "behind" in settings:
        x, mean, covariance = (
            torch.from_numpy(result.arrays[name])
            for name in ("input", f"{result.output.name}/mean", "output/covariance")
        )
        chain, about = Chain.of(run.network()), settings["behind"]
        numbers |= behind.errors(
            chain, x, (mean[0], covariance), copies=settings["copies"], **about
        )
    defined = {name: math.nan if value is None else value for name, value in numbers.items()}
    return Measured(defined, shown)


def _shown(arrays: Mapping[str, np.ndarray], output: str) -> dict[str, Any]:
    step = max(1, len(arrays["times"]) // _TIMES)
    return {
        "input": arrays["input"][0].squeeze().round().astype(int).tolist(),
        "times": arrays["times"][::step].tolist(),
        "trace_by_layer": {
            key.removesuffix("/trace"): values[::step].T.tolist()
            for key, values in arrays.items()
            if key.endswith("/trace")
        },
        **{key: arrays[f"{output}/{key}"][0].tolist() for key in ("mean", "variance")},
        "covariance": arrays["output/covariance"].tolist(),
        "in_time": {
            name: {key: arrays[f"output/{name}/{key}"].tolist() for key in ("mean", "covariance")}
            for name in OU
        },
    }


# Parts: ours of six layers, whose label is empty or full; and of the widths of the figure.
_FULL = "full"
SMALL = "full, 784-196-48-10"
# What tells depth and noise apart, of Heaviside networks.
_QUIET = {variance: f"{SMALL}, variance {variance:g}" for variance in (0.2, 0.04)}
_DEEPER = "full, 784-196-96-48-24-10"
_DEEP = f"{networks.AUTHORS}, six layers"


def _part(
    scale: str, label: str, network: Network, count: int = 1, **more: Any
) -> tuple[Part, ...]:
    return seeds(
        label,
        count,
        network=network.to_dict(),
        copies={"smoke": 1024, "quick": 16_384, "paper": 65_536}[scale],
        duration=60.0,
        method="euler-maruyama",
        # Its noise has a variance that is too large by half a step.
        dt={"smoke": 0.05, "quick": 0.02, "paper": 0.02}[scale],
        **more,
    )


def _parts(scale: str, activation: str) -> Sequence[Part]:
    count, file = SEEDS[scale], f"mnist_{activation[:4]}_mlp"
    theirs = networks.published(activation, scale, file, activation, (0.4, 0.4, 0.4))
    small = networks.other(scale, activation, "full", hidden=networks.SMALL, variance=0.4)
    # The step is what the authors' script has where nothing is said.
    simulated = {"steps": {"smoke": 200}.get(scale, 4000), "dt": 0.5}
    return (
        *_part(scale, "", networks.mnist(scale, activation, "shared"), count),
        *_part(scale, _FULL, networks.mnist(scale, activation, "full")),
        *_part(scale, networks.AUTHORS, theirs, count, behind=simulated),
        *_part(scale, SMALL, small),
    )


def _heaviside_parts(scale: str) -> Sequence[Part]:
    """Those of either activation, and others that differ in depth or noise alone."""
    deep = networks.published(
        "deep", scale, "mnist_attack_demo", "heaviside", (0.5, 0.1, 0.1, 0.1, 0.1, 0.1)
    )
    deeper = networks.other(scale, "heaviside", "full", hidden=(196, 96, 48, 24), variance=0.4)
    quiet = {
        label: networks.other(scale, "heaviside", "full", hidden=networks.SMALL, variance=variance)
        for variance, label in _QUIET.items()
    }
    return (
        *_parts(scale, "heaviside"),
        *(part for label, network in quiet.items() for part in _part(scale, label, network)),
        *_part(scale, _DEEPER, deeper),
        *_part(scale, _DEEP, deep, SEEDS[scale]),
    )


_NETWORKS = (
    "One test digit for each network. What counts are 784-196-48-10 networks with noise of "
    "variance 0.4, which the authors' script for this figure has: the one whose weights they "
    "published (on three digits), and one of ours (label full, 784-196-48-10: a covariance per "
    "sample in training, 15 epochs). Six layers are the networks of mnist-{activation} with "
    "noise of variance 0.2, which the authors' code has for MNIST: those trained with one "
    "covariance per mini-batch (no label), and full if it was measured. The authors' code adds "
    "noise behind activations, where the paper's equations and their moments have it before; what "
    "that makes of the moments is in rows of ours."
)
_BEHIND = (
    "Moments have noise before activations, as the paper's equations do. Noise behind them is "
    "neither squashed by a step nor cut off by a rectifier, so the output has more variance than "
    "that. In time, filters and the length of a step add errors of the other and of the same sign."
)
_SATURATED = (
    "Depth decides: units of the last layers are saturated and hardly ever switch, and "
    "first-order response to their strongly correlated inputs is far off. The authors' network of "
    "six layers is as far off as ours; networks of the figure's widths are not."
)
_DEEPER_TOO = (
    "Depth decides: but for two more hidden layers it is as that of the figure's widths, with the "
    "same noise and the same training."
)
_LITTLE_NOISE = (
    "Less noise saturates units, too; it is little beyond the bound, and deep networks are far."
)
_IN_TIME = (
    "The stochastic network is simulated in time (Euler-Maruyama, a step of 0.02 time constants, "
    "64 copies) in two ways: with the equal time constants of the paper's equation, and with "
    "layers that follow the noise at once; and its steady state is drawn without any time. Errors "
    "are norms of differences over norms of what was sampled, the sampling's own noise taken out "
    "in quadrature: 0 is no error that can be told from it. A tenth counts as well."
)
_WELL = 0.1


_FILTERED = (
    "Layers with the same time constant filter the fluctuations of those before them, so variance "
    "is lost from layer to layer. Moments describe layers that follow at once."
)


def _claims(why: str = "") -> tuple[Claim, ...]:
    return (
        Claim(
            says="The moment network has the mean of the network in time, Eq. (stoc_network), "
            "whose layers have equal time constants (relative error at the output).",
            metric="mean_error_ou-1",
            published="well",
            most=_WELL,
            why=f"{_FILTERED} Less variance before a unit that bends is another mean behind it.",
        ),
        Claim(
            says="It has its covariance.",
            metric="covariance_error_ou-1",
            published="well",
            most=_WELL,
            why=_FILTERED,
        ),
        *(
            Claim(
                says=f"It has the {moment} {of}.",
                metric=f"{moment}_error_{simulation}",
                most=_WELL,
                ours=True,
                why=why,
            )
            for simulation, of in (
                ("ou-0", "of the network in time if layers follow at once"),
                ("steady", "of draws of the steady state"),
            )
            for moment in ("mean", "covariance")
        ),
    )


_STEADY = "It has the covariance of draws of the steady state."


def _behind_claims() -> tuple[Claim, ...]:
    """How the moments agree with the stochastic network as the authors' code has it."""
    return tuple(
        Claim(
            says=f"It has the {moment} of the network as the authors' code has it, with noise "
            f"behind activations, {how}.",
            metric=f"{moment}_error_{name}",
            label=networks.AUTHORS,
            most=_WELL,
            ours=True,
            why=_BEHIND,
        )
        for name, how in (
            ("behind", "in its steady state"),
            ("behind_in_time", "in time with equal time constants and steps of a half"),
        )
        for moment in ("mean", "covariance")
    )


def _of_all(why: str = "") -> tuple[Claim, ...]:
    """What counts is of the figure's widths and noise, the authors' weights and ours."""
    of_six_layers = tuple(
        replace(claim, label=("", _FULL), published="", ours=True, says=f"Six layers: {claim.says}")
        for claim in _claims(why)
    )
    return (
        *(replace(claim, label=networks.AUTHORS) for claim in _claims()),
        *(replace(claim, label=SMALL) for claim in _claims()),
        *_behind_claims(),
        *of_six_layers,
    )


def _experiment(activation: str, parts: Callable[[str], Sequence[Part]], **more: Any) -> Experiment:
    return Experiment(
        name=f"network-{activation}",
        about=f"{_NETWORKS.format(activation=activation)} {_IN_TIME}",
        measure=measure,
        parts=by_scale(parts),
        revision=2,
        earlier={1: "of the network in time, figure b shows the output alone"},
        **more,
    )


EXPERIMENTS = (
    _experiment("relu", lambda scale: _parts(scale, "relu"), claims=_of_all()),
    _experiment(
        "heaviside",
        _heaviside_parts,
        claims=(
            *_of_all(_SATURATED),
            *(
                Claim(
                    says=_STEADY,
                    metric="covariance_error_steady",
                    label=label,
                    most=_WELL,
                    ours=True,
                    why=why,
                )
                for label, why in (
                    *((label, _LITTLE_NOISE) for label in _QUIET.values()),
                    (_DEEPER, _DEEPER_TOO),
                    (_DEEP, _SATURATED),
                )
            ),
        ),
    ),
)
