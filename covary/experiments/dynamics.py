"""One input of a trained network: its moments beside a simulation of the stochastic network."""

from __future__ import annotations

from typing import Any

import numpy as np

from covary.experiments.experiment import Measured, Part
from covary.experiments.workshop import Workshop
from covary.runs import verify
from covary.runs.verify import OU

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
        data_dir=workshop.data_dir,
        seed=part.seed,
        progress=workshop.progress,
    )
    layers = result["layers"]
    numbers: dict[str, float] = {}
    for simulation in result["simulations"]:
        found = layers[-1]["simulations"][simulation]
        for key in ("mean", "variance", "covariance"):
            numbers[f"{key}_error_{simulation}"] = found[key]["value"]
        numbers[f"entropy_off_{simulation}"] = found["entropy"]["value"]
        numbers[f"variance_share_{simulation}"] = found["variance_share"]["value"]
    with np.load(run.path / "verification.npz") as arrays:
        series = _shown({name: arrays[name] for name in arrays.files}, layers)
    return Measured(numbers, series)


def _shown(arrays: dict[str, np.ndarray], layers: list[dict[str, Any]]) -> dict[str, Any]:
    output = layers[-1]["name"]
    first = layers[0]["name"]
    step = max(1, len(arrays["times"]) // _TIMES)
    errors = [
        {
            "name": layer["name"],
            **{
                key: layer["simulations"]["steady"][key]["value"]
                for key in ("mean", "variance", "covariance")
            },
        }
        for layer in layers
    ]
    return {
        "input": arrays["input"][0].squeeze().round().astype(int).tolist(),
        "times": arrays["times"][::step].tolist(),
        "traces": {name: arrays[f"{name}/trace"][::step].T.tolist() for name in (first, output)},
        **{
            key: arrays[f"{output}/{key}"][0].tolist()
            for key in ("mean", "variance", "sampled_mean", "sampled_variance")
        },
        "mean_error": arrays[f"{output}/mean_error"][0].tolist(),
        "variance_error": arrays[f"{output}/variance_error"][0].tolist(),
        "covariance": arrays["output/covariance"].tolist(),
        "sampled_covariance": arrays["output/sampled_covariance"].tolist(),
        "in_time": {
            name: {key: arrays[f"output/{name}/{key}"].tolist() for key in ("mean", "covariance")}
            for name in OU
        },
        "errors_by_layer": errors,
    }
