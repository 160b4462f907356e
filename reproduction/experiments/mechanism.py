"""The quadrant task: entropy against the distance to the boundary between two classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from covary.models import with_covariance
from covary.moments import Moments
from covary.runs import DataConfig
from covary.runs.samples import load_data
from covary.uncertainty import metrics
from reproduction.experiment import Claim, Experiment, Measured, Part, seeds
from reproduction.experiments.statistics import Line, line
from reproduction.workshop import Network, Workshop

Floats = NDArray[np.float64]
# Of distance: as wide as this, and of no fewer samples than these, or their average says little.
_BIN_WIDTH = 0.1
_LEAST_SAMPLES = 10
# Bins of as many samples each, beside those of equal width.
_EQUAL_BINS = 20
# Beyond this from the origin, where the two boundaries cross, a sample has one boundary nearby.
_AWAY = 1.0
# Near a boundary: within one sigma of the noise.
_NEAR = 0.5
# For the figure, of seed 0: samples, and a square with so many points on a side.
_POINTS = 400
_SIDE, _REACH = 41, 3.0


def measure(part: Part, workshop: Workshop) -> Measured:
    """Accuracy on fresh samples, and how their entropy goes with the distance to the boundary.

    Settings: ``network``.
    """
    run = workshop.trained(part.settings["network"], part.seed)
    net = with_covariance(run.network(), "full")
    config = DataConfig(name="quadrants", limit=run.config.data.limit)
    dataset, _ = load_data(config, data_dir=workshop.data_dir, seed=part.seed)
    out = _moments(net, dataset.x_test)
    entropy = out.entropy().double().numpy()
    wrong = (out.mean.argmax(1) != dataset.y_test).numpy()
    x = dataset.x_test.double().numpy()
    distance = np.abs(x).min(1)
    away = np.abs(x).max(1) > _AWAY
    bins = by_distance(distance, entropy)
    binned = line(bins["distance"], bins["entropy"])
    each = line(distance.tolist(), entropy.tolist())
    trained_on = _moments(net, dataset.x).mean.argmax(1) == dataset.y
    numbers = {
        "accuracy": float(1 - wrong.mean()),
        "training_accuracy": trained_on.double().mean().item(),
        "binned_correlation": binned.correlation,
        "binned_r_squared": binned.r_squared,
        "near_correlation": _near(bins).correlation,
        "equal_bins_correlation": _of_equal_bins(distance, entropy).correlation,
        "sample_correlation": each.correlation,
        "sample_r_squared": each.r_squared,
        "away_correlation": line(distance[away].tolist(), entropy[away].tolist()).correlation,
        "wrong_distance": _ratio(distance[wrong], distance),
        "wrong_separability": metrics.separability(entropy[wrong], entropy[~wrong]),
        "wrong_auroc": metrics.auroc(entropy[wrong], entropy[~wrong]),
    }
    series: dict[str, Any] = {"bins": bins}
    if part.seed == 0:  # one stands for all in the figure; the others would say the same
        series |= {"samples": _some(x, entropy, wrong), "square": _square(net)}
    return Measured(numbers, series)


def by_distance(distance: Floats, entropy: Floats) -> dict[str, list[float]]:
    """Average entropy, its deviation and the average distance in bins of equal width."""
    place = np.floor(distance / _BIN_WIDTH).astype(int)
    found: dict[str, list[float]] = {"distance": [], "entropy": [], "deviation": [], "samples": []}
    for i in range(place.max() + 1):
        within = place == i
        if within.sum() < _LEAST_SAMPLES:
            continue
        found["distance"].append(float(distance[within].mean()))
        found["entropy"].append(float(entropy[within].mean()))
        found["deviation"].append(float(entropy[within].std()))
        found["samples"].append(float(within.sum()))
    return found


def _near(bins: Mapping[str, Sequence[float]]) -> Line:
    """The line through averages of the bins nearest to the boundary."""
    pairs = zip(bins["distance"], bins["entropy"], strict=True)
    near = [(distance, entropy) for distance, entropy in pairs if distance < _NEAR]
    return line([distance for distance, _ in near], [entropy for _, entropy in near])


def _of_equal_bins(distance: Floats, entropy: Floats) -> Line:
    """The line through averages of bins of as many samples each."""
    chunks = np.array_split(np.argsort(distance), min(_EQUAL_BINS, len(distance)))
    return line([distance[c].mean() for c in chunks], [entropy[c].mean() for c in chunks])


def _ratio(some: Floats, every: Floats) -> float | None:
    return float(some.mean() / every.mean()) if some.size else None


@torch.no_grad()
def _moments(net: nn.Module, x: Tensor) -> Moments:
    out: Moments = net(x.float())
    return out


def _some(x: Floats, entropy: Floats, wrong: NDArray[np.bool_]) -> dict[str, list[Any]]:
    """Samples to be shown: all that are wrong, and as many of the others as there is room for."""
    rows = np.concatenate([np.flatnonzero(wrong), np.flatnonzero(~wrong)])[:_POINTS]
    return {
        "x1": x[rows, 0].tolist(),
        "x2": x[rows, 1].tolist(),
        "entropy": entropy[rows].tolist(),
        "wrong": wrong[rows].tolist(),
    }


def _square(net: nn.Module) -> dict[str, Any]:
    """Entropy, and by how much class B leads, on a square about the origin; rows go with x2."""
    ticks = torch.linspace(-_REACH, _REACH, _SIDE)
    x2, x1 = torch.meshgrid(ticks, ticks, indexing="ij")
    out = _moments(net, torch.stack([x1, x2], -1).reshape(-1, 2))
    lead = out.mean[:, 1] - out.mean[:, 0]
    return {
        "reach": _REACH,
        "entropy": out.entropy().reshape(_SIDE, _SIDE).tolist(),
        "lead": lead.reshape(_SIDE, _SIDE).tolist(),
    }


def network(schedule: str, *, epochs: int = 20, limit: int = 0) -> dict[str, Any]:
    """What is trained, for the settings of a part."""
    # Widths, noise, learning rate and weight decay of the paper are the preset of these data.
    settings = {"covariance": "full", "schedule": schedule, "epochs": epochs}
    name = f"quadrants-{schedule}"
    return Network(name=name, data="quadrants", settings=settings, limit=limit).to_dict()


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="mechanism",
        about=(
            "Points of the plane from a standard Gaussian, of class A if both coordinates have one "
            "sign and of class B if not; a ReLU network 2-64-32-16-8-2 with sigma = 0.5 in each "
            "layer, covariances per sample, 20 epochs of batches of 128, learning rate 5e-4, "
            "weight decay 1e-5. Of the 10,000 training points a tenth is held out. With the "
            "constant rate of the paper the accuracy jumps from epoch to epoch, so there is a "
            "second network whose rate goes down to 0 in the last tenth of the training, chosen on "
            "the held-out points. Numbers are of 10,000 fresh points (the paper's seem to be of "
            "those that it trained on; that accuracy is here too). The distance to the boundary is "
            "min(|x1|, |x2|). Entropy is averaged in bins of distance of width 0.1 with 10 points "
            "or more, and correlated with distance; the paper does not say its bins, so bins of as "
            "many points each are here too, and the correlation without bins."
        ),
        measure=measure,
        parts={
            "smoke": seeds("cooldown", 1, network=network("cooldown", epochs=2, limit=600)),
            "quick": seeds("cooldown", 2, network=network("cooldown")),
            "paper": (
                *seeds("cooldown", 5, network=network("cooldown")),
                *seeds("constant", 5, network=network("constant")),
            ),
        },
        claims=(
            Claim(
                says="The network learns the class of most samples (in each of five seeds).",
                metric="accuracy",
                label="cooldown",
                published="0.9948",
                least=0.98,
            ),
            Claim(
                says="So it does with the paper's constant learning rate.",
                metric="accuracy",
                label="constant",
                published="0.9948",
                least=0.98,
                why="At a constant rate the boundary moves a little with every step, and the "
                "accuracy with it; where it stands at the last one is chance.",
            ),
            Claim(
                says="Average entropy decreases with the distance to the boundary (correlation in "
                "bins of equal width).",
                metric="binned_correlation",
                published="-0.85",
                most=-0.85,
            ),
            Claim(
                says="A line explains that relation (coefficient of determination, bins of equal "
                "width).",
                metric="binned_r_squared",
                published="0.7196",
                least=0.7,
            ),
            Claim(
                says="The closer a sample is to the boundary, the higher its entropy: also of "
                "those near it (correlation in bins nearer than sigma = 0.5).",
                metric="near_correlation",
                published="the closer, the higher",
                most=0.0,
                why="Average entropy rises with the distance for half a sigma or so, and falls "
                "from there on. What is nearest to a boundary is more often near where the two "
                "cross than what is farther away, and there entropy is low, as the last row says; "
                "along the rest of the boundary it is highest on it (a of the figure).",
            ),
            Claim(
                says="Entropy decreases with the distance, over all distances, of samples farther "
                "than 1 from where the boundaries cross (correlation over single samples).",
                metric="away_correlation",
                most=0.0,
                ours=True,
            ),
            Claim(
                says="The correlation in bins that hold equally many samples.",
                metric="equal_bins_correlation",
                ours=True,
            ),
            Claim(
                says="The correlation of distance and entropy over single samples.",
                metric="sample_correlation",
                ours=True,
            ),
            Claim(
                says="Accuracy on the samples that it was trained on.",
                metric="training_accuracy",
                ours=True,
            ),
            Claim(
                says="Misclassified samples are typically close to the boundary (their average "
                "distance over that of all samples).",
                metric="wrong_distance",
                most=0.25,
            ),
            Claim(
                says="Misclassified samples have larger entropy (separability of wrong from right "
                "ones above 0).",
                metric="wrong_separability",
                least=0.0,
                why="Mistakes are made where the boundaries cross. There the output is a saddle: "
                "it hardly changes with the input, so the same sensitivity that makes entropy high "
                "along the boundaries makes it low at the origin.",
            ),
        ),
        revision=1,
    ),
)
