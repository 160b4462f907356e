"""What tracked covariances cost in use, and how close they come to exact ones.

    python -m benchmarks.tracked

On the networks of ``benchmarks.parity`` that were trained with tracked covariance (which are
trained first if they are not there: some minutes), and on wide networks without training.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import covary
from benchmarks import memory, parity, tables
from benchmarks.steps import BATCH, NOISE, batch_of, build, training_step
from covary import data
from covary.models import plain
from covary.nn.fidelity import Fidelity, TrackingWarning
from covary.runs import costs
from covary.uncertainty.agreement import agreement, gathered

# What the project promises: forward passes of the plain network, and Spearman's correlation.
MOST_OVER_PLAIN = {"relu": 9.0, "heaviside": 40.0}
MOST_ON_TWO_THREADS = {"relu": 10.0}
MOST_FOR_ONE_ROW = {"relu": 4.0}
ONE_ROW = "tracked, one projected row"
LEAST_RANK = {"relu": 0.99, "heaviside": 0.95}
LEAST_OVER_FULL = 10.0
MOST_MEMORY_MB = 2000.0
DROPOUT_SAMPLES, DROPOUT = 12, 0.1
SAMPLES, FOREIGN = 1000, "notmnist"
ROUNDS, PASSES, SECONDS_AT_MOST = 15, 200, 5.0
WIDTHS = (256, 512, 1024, 2048, 4096)
WIDE_BATCH, WIDEST = 32, (4096, 256)
# Beyond this, a pass with full covariances takes a minute and gigabytes.
WIDEST_FULL = 2048


def inference(net: nn.Sequential, x: Tensor) -> dict[str, float]:
    """Times of a forward pass with the output's covariance over one of the plain network.

    Medians of passes that take turns. One projected row is the lead of the best class over the
    second, with its variance.
    """
    lifted = nn.Sequential(*list(net.children())[2:])  # behind Standardize and Flatten
    x = net[1](net[0](x))
    ordinary = plain(lifted)
    dropped = plain(lifted, dropout=DROPOUT).train()
    tracked, full, diagonal = (
        covary.with_covariance(lifted, kind).eval() for kind in ("tracked", "full", "diagonal")
    )
    dropout = f"MC dropout, {DROPOUT_SAMPLES} samples"
    ways = {
        "plain": lambda: ordinary(x),
        "diagonal": lambda: diagonal(x).covariance_matrix,
        "tracked": lambda: tracked(x).covariance_matrix,
        ONE_ROW: lambda: lead(tracked(x)).variance,
        dropout: lambda: torch.stack([dropped(x) for _ in range(DROPOUT_SAMPLES)]),
        "full": lambda: full(x).covariance_matrix,
    }
    with torch.no_grad():
        times = medians(ways)
    return {name: seconds / times["plain"] for name, seconds in times.items()}


def lead(out: covary.Moments) -> covary.Moments:
    """(B, 1) by how much the best class is ahead of the second."""
    best = out.mean.topk(2).indices
    signs = out.mean.new_tensor([[1, -1]]).expand_as(best)
    return out.project(torch.zeros_like(out.mean).scatter(1, best, signs)[:, None, :])


def medians(
    ways: dict[str, Callable[[], Any]], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Seconds of a pass, the median of many that take turns; slow ways take fewer turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(PASSES):
        for name, one_pass in ways.items():
            if sum(seconds[name]) > SECONDS_AT_MOST and turn >= ROUNDS:
                continue
            one_pass()  # what the pass of another way left in the cache is not its own
            before = clock()
            one_pass()
            seconds[name].append(clock() - before)
    return {name: statistics.median(found) for name, found in seconds.items()}


def fidelity(net: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Any]:
    """Agreement of every way of storing the covariance with exact ones."""
    kinds = [*(row.covariance for row in Fidelity.of(_table(net)).rows), "diagonal"]
    found: dict[str, Any] = {kind: {} for kind in kinds}
    for part, x in inputs.items():
        batches = torch.split(x, BATCH)
        exact = covary.with_covariance(net, "full").eval()
        truth = gathered([exact(batch) for batch in batches])
        for kind in kinds:
            approximate = covary.with_covariance(net, kind).eval()
            other = gathered([approximate(batch) for batch in batches])
            found[kind][part] = agreement(truth, other)._asdict()
    return found


def _table(net: nn.Module) -> Tensor:
    table = net.get_buffer("lift.fidelity")
    assert table is not None
    return table


def trained_networks() -> dict[str, Any]:
    mnist, foreign = data.load("mnist"), data.load(FOREIGN)
    some = torch.randperm(len(foreign.x_test), generator=torch.Generator().manual_seed(0))
    inputs = {"test": mnist.x_test[:SAMPLES], FOREIGN: foreign.x_test[some[:SAMPLES]]}
    measured = {}
    for activation in parity.ACTIVATIONS:
        net = parity.trained(activation, "tracked", parity.SEEDS[0], mnist).network()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # what it takes, however well small operations run in parallel
        times = inference(net, mnist.x_test[:BATCH])
        torch.set_num_threads(threads)
        parallel = inference(net, mnist.x_test[:BATCH])
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", TrackingWarning)  # of the widths that are not chosen
            agrees = fidelity(net, inputs)
        chosen = Fidelity.of(_table(net)).named("tracked")
        measured[activation] = {
            "over plain": times,
            f"over plain, {threads} threads": parallel,
            "chosen": chosen,
            "agreement": agrees,
        }
        print(activation, chosen, times, agrees[chosen], flush=True)
    return measured


def by_width(prepare: Callable[[str, int], Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Times over the plain network's, of a net w-w-w-10."""
    measured = {}
    for width in WIDTHS:
        ways = {kind: prepare(kind, width) for kind in ("plain", "diagonal", "tracked")}
        times = costs.fastest(ways, range(ROUNDS))
        if width <= WIDEST_FULL:
            times |= costs.fastest({"full": prepare("full", width)}, range(2))
        ratios = {kind: times[kind] / times["plain"] for kind in times if kind != "plain"}
        measured[str(width)] = {"weights": 2 * width**2 + 10 * width, **ratios}
        print(width, measured[str(width)], flush=True)
    return measured


def wide_inference(kind: str, width: int) -> Callable[[], Any]:
    net, (x, _) = build(kind, [width, width, width, 10]).eval(), batch_of(WIDE_BATCH, width)

    @torch.no_grad()
    def forward() -> Any:
        out = net(x)
        return out if isinstance(out, Tensor) else out.covariance_matrix

    return forward


def wide_step(kind: str, width: int) -> Callable[[], Any]:
    return training_step(build(kind, [width, width, width, 10]), *batch_of(WIDE_BATCH, width))


def peak_of_the_widest() -> float:
    """Peak memory of a process that trains the widest net a step, and looks at its covariance."""
    command = [sys.executable, "-m", "benchmarks.tracked", "peak"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _peak() -> float:
    width, batch = WIDEST
    net = covary.mlp([width, width, width, 10], noise=NOISE, covariance="tracked")
    x, y = batch_of(batch, width)
    training_step(net, x, y)()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        net.eval()(x).entropy()
    return memory.most_used()


def broken_promises(measured: dict[str, Any]) -> list[str]:
    """Which of the promises above a measurement does not keep."""
    broken = []
    for activation, row in measured["networks"].items():
        times = row["over plain"]
        rank = min(part["rank"] for part in row["agreement"][row["chosen"]].values())
        if times["tracked"] > MOST_OVER_PLAIN[activation]:
            broken.append(f"{activation}: {times['tracked']:.1f} plain forward passes")
        one_row = times.get(ONE_ROW, math.inf)
        if one_row > MOST_FOR_ONE_ROW.get(activation, math.inf):
            broken.append(f"{activation}: {one_row:.1f} plain forward passes for one row")
        parallel = row.get("over plain, 2 threads", {"tracked": 0.0})["tracked"]
        if parallel > MOST_ON_TWO_THREADS.get(activation, math.inf):
            broken.append(f"{activation}: {parallel:.1f} plain forward passes on two threads")
        if rank < LEAST_RANK[activation]:
            broken.append(f"{activation}: rank correlation {rank:.3f}")
        if activation != "relu":
            continue  # its exact layers make it dearer, which its own limit allows
        if times["full"] / times["tracked"] < LEAST_OVER_FULL:
            broken.append(f"{activation}: full is {times['full'] / times['tracked']:.1f} times it")
        dropout = times[f"MC dropout, {DROPOUT_SAMPLES} samples"]
        if times["tracked"] > dropout:
            broken.append(f"{activation}: MC dropout takes {dropout:.1f} plain forward passes")
    if measured["peak memory of the widest, MB"] > MOST_MEMORY_MB:
        broken.append(f"the widest takes {measured['peak memory of the widest, MB']} MB")
    return broken


def main() -> None:
    if sys.argv[1:] == ["peak"]:
        print(_peak())
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # wide networks are not trained
        measured: dict[str, Any] = {
            "networks": trained_networks(),
            "inference by width": by_width(wide_inference),
            "training step by width": by_width(wide_step),
            "peak memory of the widest, MB": round(peak_of_the_widest()),
        }
    broken, shown = broken_promises(measured), [tables.tracked]
    tables.publish("tracked", "make bench", 0, measured, shown=shown, broken=broken)


if __name__ == "__main__":
    main()
