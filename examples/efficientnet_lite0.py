"""A trained ImageNet network with moments: cost, agreement with draws, corrupted photographs.

    pip install -e '.[examples,report]'
    python -m examples.efficientnet_lite0

EfficientNet-Lite0 is converted as it is. For 20 photographs, clean and corrupted in three ways, the
probability that noise changes the predicted class stands beside the largest softmax probability of
the plain network. Takes about 5 minutes on one core and 3 GB of memory. Numbers and a figure go to
results/benchmarks/efficientnet_lite0.json and .png, the figure to the documentation, too.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import results, tables
from covary.convert import Converted
from covary.uncertainty import metrics
from covary.uncertainty.scores import change_probability
from examples.efficientnet_lite0_network import photographs, pretrained

NOISE = 0.05  # the default of covary.convert; pixels lie between -1 and 1. Not tuned.
CLASSES, BATCH, DRAWS, REPEATS, SEED = 5, 4, 240, 3, 0
SHIFT_DRAWS = 16
STRENGTHS = {
    "Gaussian noise (standard deviation)": (0.1, 0.3, 0.6),
    "blur (standard deviation, pixels)": (1.0, 2.0, 4.0),
    "occlusion (side of a grey square)": (0.25, 0.5, 0.75),
}


def best_classes(out: covary.Moments, count: int = CLASSES) -> covary.Moments:
    """The moments (B, count) of each photograph's classes of largest mean."""
    best = out.mean.topk(count).indices
    return out.project(F.one_hot(best, out.mean.shape[1]).to(out.mean.dtype))


def corrupted(x: Tensor, kind: str, strength: float) -> Tensor:
    """Photographs (B, 3, H, W) with noise, blurred, or with a square at a random place grey."""
    generator = torch.Generator().manual_seed(SEED)
    if kind.startswith("Gaussian"):
        noise = torch.randn(x.shape, generator=generator)
        return (x + strength * noise).clamp(-1, 1)
    if kind.startswith("blur"):
        reach = int(3 * strength)
        weight = torch.exp(-0.5 * (torch.arange(-reach, reach + 1.0) / strength) ** 2)
        weight = (weight / weight.sum()).expand(3, 1, 1, -1)
        x = F.pad(x, [reach] * 4, mode="reflect")
        return F.conv2d(F.conv2d(x, weight, groups=3), weight.mT, groups=3)
    side = round(strength * x.shape[-1])
    x = x.clone()
    for image in x:
        top, left = torch.randint(x.shape[-1] - side + 1, (2,), generator=generator).tolist()
        image[:, top : top + side, left : left + side] = 0
    return x


def doubts(model: nn.Module, net: nn.Module, x: Tensor, y: Tensor) -> dict[str, list[Any]]:
    """For each photograph: both scores, and whether the model, plain and with noise, is wrong."""
    found: dict[str, list[Any]] = {"change": [], "softmax": [], "wrong": [], "wrong with noise": []}
    for images, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        probability, predicted = model(images).softmax(1).max(1)
        out = net(images)
        found["change"] += change_probability(best_classes(out)).tolist()
        found["softmax"] += (1 - probability.double()).tolist()
        found["wrong"] += (predicted != labels).tolist()
        found["wrong with noise"] += (out.mean.argmax(1) != labels).tolist()
    return found


def shifts(model: nn.Module, net: Converted, x: Tensor) -> dict[str, float]:
    """How far averages of draws are from the plain outputs, and from the means; relative norms."""
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.stack([net.draw(x, generator=generator) for _ in range(SHIFT_DRAWS)])
    average = drawn.mean(0)
    size = average.norm().item()
    return {
        "plain": (model(x) - average).norm().item() / size,
        "means": (net(x).mean - average).norm().item() / size,
        "scatter": drawn.std(0).norm().item() / SHIFT_DRAWS**0.5 / size,
    }


def passes(model: nn.Module, net: nn.Module, x: Tensor) -> dict[str, float]:
    """Times in passes of the plain model: medians of runs that take turns."""
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: model(x),
        "forward": lambda: net(x),
        "forward and five classes": lambda: best_classes(net(x)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    plain = median(times["plain"])
    return {name: median(each) / plain for name, each in times.items() if name != "plain"}


def separation(found: dict[str, list[Any]], photographs: int) -> dict[str, Any]:
    """AUROC of wrong against right predictions, with intervals from resampled photographs.

    Corrupted copies of a photograph are alike, so photographs are drawn with replacement, each with
    all of its copies.
    """
    arrays = {name: np.array(values).reshape(-1, photographs) for name, values in found.items()}

    def aurocs(which: Any) -> dict[str, float]:
        some = {name: values[:, which] for name, values in arrays.items()}

        def of(score: str, wrong: str) -> float:
            return metrics.auroc(some[score][some[wrong]], some[score][~some[wrong]])

        change, softmax = of("change", "wrong"), of("softmax", "wrong")
        own = of("change", "wrong with noise")
        return {
            "change": change, "softmax": softmax, "difference": change - softmax, "own": own
        }  # fmt: skip

    random = np.random.default_rng(SEED)
    again = [aurocs(random.integers(photographs, size=photographs)) for _ in range(1000)]
    intervals = {
        name: np.nanquantile([each[name] for each in again], [0.025, 0.975]) for name in again[0]
    }
    return {
        name: {"value": value, "low": intervals[name][0], "high": intervals[name][1]}
        for name, value in aurocs(slice(None)).items()
    }


def averages(found: dict[str, list[Any]]) -> dict[str, float]:
    return {name: float(np.mean(values)) for name, values in found.items()}


def draw_figure(measured: dict[str, Any]) -> None:
    """Averages of both scores and the share of wrong predictions, against strength."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots(1, len(STRENGTHS), sharey=True)
    lines = {
        "change": ("probability that noise changes the class", "o-"),
        "softmax": ("1 - largest softmax probability", "s--"),
        "wrong": ("share of wrong predictions", "^:"),
    }
    for ax, (kind, rows) in zip(axes, measured["corruptions"].items(), strict=True):
        every = {"0": measured["clean"], **rows}
        for key, (label, style) in lines.items():
            ax.plot([float(s) for s in every], [row[key] for row in every.values()], style,
                    label=label, markersize=4)  # fmt: skip
        ax.set_xlabel(kind)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("average over 20 photographs")
    axes[0].set_ylim(0, 1)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3,
                  frameon=False)  # fmt: skip
    for folder in (results.FOLDER, results.ROOT / "docs" / "figures"):
        figure.savefig(folder / "efficientnet_lite0.png", dpi=110)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - begin:4.0f} s] {text}", flush=True)

    model, (x, y) = pretrained(), photographs()
    right = int((model(x).argmax(1) == y).sum())
    say(f"{right} of {len(y)} photographs are classified rightly")
    difference = (covary.convert(model, noise=0.0)(x[:BATCH]).mean - model(x[:BATCH])).abs().max()
    say(f"without noise, outputs differ from the model's by {difference:.1e} at most")

    net = covary.convert(model, noise=NOISE)
    tracking = covary.track(net, x.split(BATCH), samples=len(x))
    say(f"variances are measured, on these {tracking.samples} photographs alone (few)")
    times = passes(model, net, x[:BATCH])
    say("in passes of the plain model: " + ", ".join(f"{k} {v:.1f}" for k, v in times.items()))

    clean = doubts(model, net, x, y)
    pooled = {key: list(values) for key, values in clean.items()}
    corruptions: dict[str, dict[str, dict[str, float]]] = {}
    for kind, strengths in STRENGTHS.items():
        for strength in strengths:
            found = doubts(model, net, corrupted(x, kind, strength), y)
            for key, values in found.items():
                pooled[key] += values
            corruptions.setdefault(kind, {})[f"{strength:g}"] = row = averages(found)
            say(f"{kind} {strength:g}: " + ", ".join(f"{k} {v:.3f}" for k, v in row.items()))
    aurocs = separation(pooled, len(x))
    for name, each in aurocs.items():
        say(f"AUROC, {name}: {each['value']:.3f} ({each['low']:.3f} to {each['high']:.3f})")

    few = x[:BATCH]
    moved = {"none": shifts(model, net, few)}
    for kind, strengths in STRENGTHS.items():
        moved[f"{kind}, {strengths[-1]:g}"] = shifts(
            model, net, corrupted(few, kind, strengths[-1])
        )
    for name, each in moved.items():
        say(f"{name}: draws are off by " + ", ".join(f"{k} {v:.2f}" for k, v in each.items()))
    agreement = covary.verify(net, x[:2], draws=DRAWS, progress=False)
    say(f"against draws: {agreement}")
    errors = {}
    for key in ("mean", "variance", "covariance"):
        error = getattr(agreement, key)
        errors[key] = {"value": error.value, "bar": error.bar}
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in kB
    say(f"peak memory {memory:.1f} GB")
    measured = {
        "noise": NOISE,
        "photographs": len(x),
        "right": right,
        "difference without noise": difference.item(),
        "variances for each sample": tracking.propagates,
        "share of the input's noise": tracking.shares["input"],
        "passes": times,
        "batch": BATCH,
        "peak memory, GB": memory,
        "draws": DRAWS,
        "errors against draws": errors,
        "clean": averages(clean),
        "corruptions": corruptions,
        "images": len(pooled["wrong"]),
        "wrong": sum(pooled["wrong"]),
        "wrong with noise": sum(pooled["wrong with noise"]),
        "auroc": aurocs,
        "shift draws": SHIFT_DRAWS,
        "shifts": moved,
    }
    results.save("efficientnet_lite0", "python -m examples.efficientnet_lite0", SEED, measured)
    draw_figure(measured)
    tables.main()
    say("saved")


if __name__ == "__main__":
    main()
