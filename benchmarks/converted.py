"""What a converted network costs, in time and memory, and how close it comes to draws.

    python -m benchmarks.converted

Speed and fidelity on the residual network of ``benchmarks.residual_cnn`` (trained first if its
weights are not there: five minutes), memory on ResNet-18 without training.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import covary
from benchmarks import memory, residual_cnn, results, tables
from benchmarks.tracked import lead
from covary import data
from covary.convert import Converted
from covary.covariance import Full
from covary.report import drawing
from covary.stochastic.statistics import StreamingMoments
from covary.uncertainty.metrics import rank_correlation
from tests.architectures_images import resnet18

# What the project promises: passes of the plain network on one thread, Spearman's correlation of
# entropies with those of draws, and peak memory.
ONE_ROW, TEN_ROWS = "mean and one projected row", "mean and covariance of ten outputs"
MOST_PASSES = {ONE_ROW: 5.0, TEN_ROWS: 18.0}
LEAST_RANK = {"test": 0.99, "mnist": 0.98, "notmnist": 0.98}
MOST_MEMORY_MB = {"10 outputs, covariance": 3000, "1,000 outputs, five best": 4000,
                  "1,000 outputs, variances": 4000}  # fmt: skip
NOISE, LOUD = 0.05, 0.2
WAYS = ("averaged", "propagated")
BATCH, ROUNDS, THREADS = 128, 15, (1, 2)
TRACKED_ON, IMAGES, DRAWS = 256, 250, 2000
VERIFIED_ON, VERIFYING_DRAWS = 16, 10_000
SHOWN = 60  # images of each set in the picture
FIGURES = results.ROOT / "docs" / "figures"
RESNET_BATCH, RESNET_VARIANCE_BATCH, BEST = 32, 4, 5


def converted(model: nn.Module, x: Tensor, noise: float, variances: str) -> Converted:
    """The model with moments, tracked on the inputs x."""
    net = covary.convert(model, noise=noise, variances=variances)
    covary.track(net, x, samples=len(x), progress=False)
    return net


def speed(model: nn.Module, nets: dict[str, Converted], x: Tensor) -> dict[str, dict[str, float]]:
    """Times of each way of ``variances`` in passes of the plain model; of one draw, too.

    Medians of passes that take turns. Autograd needs a backward pass for each row.
    """
    ways: dict[str, Any] = {"plain": lambda: model(x)}
    for name, net in nets.items():
        ways[f"{name}: mean"] = lambda net=net: net(x).mean
        ways[f"{name}: {ONE_ROW}"] = lambda net=net: lead(net(x)).variance
        ways[f"{name}: {TEN_ROWS}"] = lambda net=net: net(x).covariance_matrix
        ways[f"{name}: ten rows by autograd"] = lambda net=net: backward_rows(net, x)
    generator = torch.Generator().manual_seed(0)
    net = nets[WAYS[0]]
    ways["one draw"] = lambda: net.draw(x, generator=generator)
    with torch.no_grad():
        times = medians(ways)
    passes = {name: seconds / times["plain"] for name, seconds in times.items()}
    found = {
        name: {
            way.removeprefix(f"{name}: "): each
            for way, each in passes.items()
            if way.startswith(f"{name}: ")
        }
        for name in nets
    }
    for row in found.values():
        row["one draw"] = passes["one draw"]
    return found


def backward_rows(net: Converted, x: Tensor) -> Tensor:
    """(n, B, ...) derivatives of the mean by the input: one backward pass for each output."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        sums = net(x).mean.sum(0)
        rows = [torch.autograd.grad(each, x, retain_graph=True)[0] for each in sums]
    return torch.stack(rows)


def medians(ways: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Seconds of a pass, the median over rounds in which all take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, one_pass in ways.items():
            one_pass()  # what the pass of another way left in the cache is not its own
            before = time.perf_counter()
            one_pass()
            seconds[name].append(time.perf_counter() - before)
    return {name: statistics.median(found) for name, found in seconds.items()}


class Sampled:
    """Moments of draws of a network, for N inputs, in two halves that are independent."""

    def __init__(self, net: Converted, x: Tensor, *, draws: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        units = net.draw(x[:1], generator=generator).shape[1]
        stream = StreamingMoments(groups=2, batch=len(x), units=units)
        for _ in range(draws // 2):
            halves = [net.draw(x, generator=generator) for _ in range(2)]
            stream.add(torch.stack(halves)[:, :, None])
        self._estimate = stream.estimate()

    @property
    def all(self) -> covary.Moments:
        """Moments (N, n) of all draws."""
        return covary.Moments(self._estimate.mean, Full(self._estimate.covariance_matrix))

    @property
    def halves(self) -> list[covary.Moments]:
        """Moments (N, n) of either half."""
        each = self._estimate
        return [
            covary.Moments(mean, Full(scatter / (each.count - 1)))
            for mean, scatter in zip(each.group_mean, each.group_scatter, strict=True)
        ]


def fidelity(nets: dict[str, Converted], inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """Rank correlations of entropies with sampled ones, and variances to be drawn as a picture.

    Draws do not depend on how variances are known, so all ways are compared with the same.
    """
    ranks: dict[str, dict[str, float]] = {name: {} for name in [*nets, "two halves of the draws"]}
    variances: dict[tuple[str, str], Any] = {}
    with torch.no_grad():
        for part, x in inputs.items():
            sampled = Sampled(nets[WAYS[0]], x, draws=DRAWS)
            truth = entropies(sampled.all)
            ranks["two halves of the draws"][part] = rank_correlation(
                *(entropies(half) for half in sampled.halves)
            )
            for name, net in nets.items():
                out = net(x)
                ranks[name][part] = rank_correlation(entropies(out), truth)
                variances[name, part] = out.variance.numpy(), sampled.all.variance.numpy()
            print(part, {name: row[part] for name, row in ranks.items()}, flush=True)
    return ranks, variances


def entropies(out: covary.Moments) -> np.ndarray[Any, Any]:
    return out.entropy().numpy()


def errors(net: Converted, x: Tensor) -> dict[str, dict[str, float]]:
    """Relative errors of mean, variances and covariance by ``covary.verify``."""
    found = covary.verify(net, x, draws=VERIFYING_DRAWS, progress=False)
    named = {"mean": found.mean, "variance": found.variance, "covariance": found.covariance}
    return {name: {"value": each.value, "bar": each.bar} for name, each in named.items()}


def network() -> dict[str, Any]:
    """Speed and fidelity of the residual network."""
    model = residual_cnn.trained()
    fashion = data.load("fashion-mnist")
    some = torch.arange(TRACKED_ON) * len(fashion.x) // TRACKED_ON
    x_train, x_test = residual_cnn.inputs(fashion.x[some]), residual_cnn.inputs(fashion.x_test)
    nets = {name: converted(model, x_train, NOISE, name) for name in WAYS}
    auto = converted(model, x_train, NOISE, "auto")
    chosen = WAYS[auto.sites.propagates]
    measured: dict[str, Any] = {"chosen": chosen, "over plain": {}}
    before = torch.get_num_threads()
    for threads in THREADS:
        torch.set_num_threads(threads)
        name = f"{threads} thread{'s' * (threads > 1)}"
        measured["over plain"][name] = speed(model, nets, x_test[:BATCH])
        print(name, measured["over plain"][name], flush=True)
    torch.set_num_threads(before)
    inputs = {"test": x_test[:IMAGES]}
    for foreign in ("mnist", "notmnist"):
        images = data.load(foreign).x_test
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        inputs[foreign] = residual_cnn.inputs(images[order[:IMAGES]])
    measured["rank of entropy"], variances = fidelity(nets, inputs)
    measured["variances of outputs"] = {
        part: dict(zip(("analytic", "sampled"), map(shown, variances[chosen, part]), strict=True))
        for part in ("test", "notmnist")
    }
    measured["errors"] = {}
    for noise in (NOISE, LOUD):
        row: dict[str, Any] = {}
        for name in WAYS:
            net = nets[name] if noise == NOISE else converted(model, x_train, noise, name)
            row[name] = errors(net, x_test[:VERIFIED_ON])
        row["chosen"] = WAYS[converted(model, x_train, noise, "auto").sites.propagates]
        measured["errors"][f"{noise:g}"] = row
        print(noise, row, flush=True)
    measured["test accuracy"] = {
        "plain": residual_cnn.accuracy(model, fashion.x_test, fashion.y_test),
        "mean of the converted": residual_cnn.accuracy(Means(auto), fashion.x_test, fashion.y_test),
    }
    measured["sampling"] = found = sampling(measured)
    print(f"test accuracy {measured['test accuracy']}")
    print(
        f"variances are {found['error of the variance']:.1%} off: sampling needs "
        f"{found['passes']:.0f} passes for that, {found['times as many']:.0f} times as many"
    )
    return measured


class Means(nn.Module):
    """The mean of what a converted network gives."""

    def __init__(self, net: Converted) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.net(x).mean
        return mean


def sampling(measured: dict[str, Any]) -> dict[str, float]:
    """How many draws a variance needs to be as close: its relative error is sqrt(2 / draws)."""
    chosen = measured["chosen"]
    error = measured["errors"][f"{NOISE:g}"][chosen]["variance"]["value"]
    passes = 2 / error**2
    times = measured["over plain"]["1 thread"][chosen][TEN_ROWS]
    return {"error of the variance": error, "passes": passes, "times as many": passes / times}


@drawing.house_style()
def picture(found: dict[str, dict[str, list[float]]]) -> drawing.Drawing:
    """Analytic variances of outputs against sampled ones."""
    (axes,) = drawing.canvas(4.6)
    looks = {
        "test": ("test images", drawing.BLUE, "o"),
        "notmnist": ("notMNIST", drawing.ORANGE, "^"),
    }
    every = np.concatenate([values for part in found.values() for values in part.values()])
    ends = [every.min() / 1.3, every.max() * 1.3]
    axes.plot(ends, ends, color=drawing.INK, linewidth=0.9, label="equal")
    for part, values in found.items():
        label, colour, marker = looks[part]
        axes.plot(
            values["sampled"],
            values["analytic"],
            marker,
            label=label,
            color=colour,
            markersize=3,
            markeredgewidth=0,
            alpha=0.6,
        )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"variance of {DRAWS:,} draws")
    axes.set_ylabel("variance by moments")
    drawing.head(axes, "Variance of each output", columns=3)
    figure = axes.get_figure(root=True)
    assert figure is not None
    return drawing.Drawing("converted-variances", "", "", figure)


def shown(values: np.ndarray[Any, Any]) -> list[float]:
    """The numbers of some images, with as many digits as one sees."""
    return [float(f"{value:.4g}") for value in values[:SHOWN].ravel()]


def resnet(what: str) -> dict[str, Any]:
    """Peak memory and time of one way to look at what a converted ResNet-18 gives."""
    outputs, look = what.split(" outputs, ")
    torch.manual_seed(0)
    model = resnet18(width=64, classes=int(outputs.replace(",", ""))).eval()
    batch = RESNET_VARIANCE_BATCH if look == "variances" else RESNET_BATCH
    x = torch.randn(batch, 3, 32, 32)
    net = converted(model, torch.randn(32, 3, 32, 32), NOISE, "auto")
    began = time.perf_counter()
    refused = None
    with torch.no_grad():
        out = net(x)
        if look == "covariance":
            out.covariance_matrix  # noqa: B018
        elif look == "variances":
            out.variance  # noqa: B018
        else:
            best = out.mean.topk(BEST).indices
            out.project(nn.functional.one_hot(best, out.mean.shape[1]).float()).covariance_matrix  # noqa: B018
            try:
                out.covariance_matrix  # noqa: B018
            except MemoryError as error:
                refused = str(error)
    seconds = time.perf_counter() - began
    found = {"batch": batch, "MB": round(memory.most_used()), "seconds": round(seconds, 1)}
    return found | ({} if refused is None else {"covariance refused": refused})


def in_fresh_process(what: str) -> dict[str, Any]:
    """The same in a process of its own, whose peak nothing else has raised."""
    command = [sys.executable, "-m", "benchmarks.converted", what]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    print(what, found, flush=True)
    return found


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Which of the promises above a measurement does not keep."""
    chosen = measured["chosen"]
    broken = [
        f"{way}: {passes:.1f} passes of the plain network"
        for way, most in MOST_PASSES.items()
        if (passes := measured["over plain"]["1 thread"][chosen][way]) > most
    ]
    broken += [
        f"rank correlation {rank:.4f} on {part}"
        for part, least in LEAST_RANK.items()
        if not (rank := measured["rank of entropy"][chosen][part]) >= least
    ]
    broken += [
        f"ResNet-18, {what}: {found} MB"
        for what, most in MOST_MEMORY_MB.items()
        if (found := measured["memory"][what]["MB"]) > most
    ]
    if "GB" not in measured["memory"]["1,000 outputs, five best"].get("covariance refused", ""):
        broken.append("the covariance of 1,000 outputs is computed unasked")
    return broken


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(resnet(sys.argv[1])))
        return
    measured = network()
    measured["memory"] = {what: in_fresh_process(what) for what in MOST_MEMORY_MB}
    drawing.save(picture(measured["variances of outputs"]), FIGURES, svg=False)
    tables.publish("converted", "make bench", 0, measured, broken=broken_promises(measured))


if __name__ == "__main__":
    main()
