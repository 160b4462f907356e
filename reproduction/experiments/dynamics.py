"""One input of a trained network: its moments beside a simulation of the stochastic network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from covary.runs import SteadyVerification, verify
from covary.runs.verify import OU
from reproduction.experiment import SEEDS, Claim, Experiment, Measured, Part, by_scale, seeds
from reproduction.experiments import networks
from reproduction.experiments.classification import SHARED_TOO
from reproduction.workshop import Workshop

# Of the trace that is shown, so many points in time.
_TIMES = 300


def measure(part: Part, workshop: Workshop) -> Measured:
    """Mean, variance and covariance of the output: moments, and what was sampled.

    Settings: ``network``, ``copies`` of the steady state, ``duration``, ``method`` and ``dt`` of
    the network in time.
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
    defined = {name: math.nan if value is None else value for name, value in numbers.items()}
    return Measured(defined, _shown(result.arrays, result.output.name))


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


def _parts(scale: str, activation: str) -> Sequence[Part]:
    return seeds(
        "",
        SEEDS[scale],
        network=networks.mnist(scale, activation, "shared").to_dict(),
        copies={"smoke": 1024, "quick": 16_384, "paper": 65_536}[scale],
        duration=60.0,
        method="euler-maruyama",
        # Its noise has a variance that is too large by half a step.
        dt={"smoke": 0.05, "quick": 0.02, "paper": 0.02}[scale],
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


def _experiment(activation: str, why: str = "") -> Experiment:
    return Experiment(
        name=f"network-{activation}",
        about=f"One test digit for each of the networks of mnist-{activation} whose label is "
        f"shared. {_IN_TIME}",
        proviso=SHARED_TOO,
        measure=measure,
        parts=by_scale(lambda scale: _parts(scale, activation)),
        claims=_claims(why),
        revision=2,
        earlier={1: "of the network in time, figure b shows the output alone"},
    )


EXPERIMENTS = (
    _experiment("relu"),
    _experiment(
        "heaviside",
        "A trained Heaviside network is saturated: many units hardly ever switch, and first-order "
        "response to their strongly correlated inputs is far off.",
    ),
)
