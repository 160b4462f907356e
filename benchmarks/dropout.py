"""Dropout without masks: variances by moments against those of many masks, and what each costs.

    python -m benchmarks.dropout

ReLU networks of the paper's widths, trained on MNIST with dropout on their hidden units. The
moments of 20,000 masks are the truth, for 64 test digits. Networks and moments of masks go to
out/dropout/ and are not made again while they are there (two minutes for each rate). Times are of a
batch of 128 on one thread, in passes of the plain network, all of which take turns in one process;
they are times of the processor, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import statistics
import time
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from benchmarks import results, tables
from benchmarks.steps import BATCH, WIDTHS
from covary import data
from covary.convert import Converted
from covary.files import read_tensors, write_tensors
from covary.models import plain
from covary.nn.fidelity import TrackingWarning
from covary.stochastic.statistics import GROUPS, Estimate, StreamingMoments
from covary.stochastic.verification import compared
from covary.training.batches import shuffled

# What the project promises: the relative error of variances, and that tracked covariances take
# less time than so many masks.
MOST_ERROR = {"full": 0.03, "tracked": 0.06}
MASKS, FEW = 30, 12
RATES = (0.1, 0.2, 0.3)
DIGITS, DRAWS, AT_ONCE = 64, 20_000, 32  # masks for each digit, and of them in a pass
TRACKED_ON, EPOCHS, LEARNING_RATE = 256, 6, 1e-3
ROUNDS = 40
FOLDER = results.ROOT / "out" / "dropout"


def inputs(images: Tensor) -> Tensor:
    """Bytes (n, 1, 28, 28) as numbers (n, 784) between -1 and 1."""
    return images.flatten(1).float() / 127.5 - 1


def trained(rate: float) -> nn.Sequential:
    """The network with the stored weights, trained now if they are not there yet."""
    path = FOLDER / f"{rate:g}.safetensors"
    torch.manual_seed(0)
    net = covary.mlp(WIDTHS, noise=0.0, dropout=rate).eval()
    if not path.exists():
        mnist = data.load("mnist")
        train(plain(net, dropout=rate), inputs(mnist.x), mnist.y)
        write_tensors(path, net.state_dict(), {})
    net.load_state_dict(read_tensors(path)[0])
    return net


def train(conventional: nn.Module, x: Tensor, y: Tensor) -> None:
    """Train with masks, as is usual: Adam, one cycle."""
    optimizer = torch.optim.Adam(conventional.parameters())
    steps = EPOCHS * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    conventional.train()
    for epoch in range(EPOCHS):
        order = shuffled(len(x), 0, epoch)
        for batch in order[: len(x) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(conventional(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()
    conventional.eval()


def drawn(rate: float, conventional: nn.Module, x: Tensor) -> Estimate:
    """Moments of the outputs over masks."""
    path = FOLDER / f"{rate:g}-masks.safetensors"
    if not path.exists():
        torch.manual_seed(0)
        found = _drawn(conventional, x)
        count = torch.tensor(found.count)
        tensors = {"count": count, "mean": found.group_mean, "scatter": found.group_scatter}
        write_tensors(path, tensors, {})
    kept = read_tensors(path)[0]
    return Estimate(int(kept["count"]), kept["mean"], kept["scatter"])


def _drawn(conventional: nn.Module, x: Tensor) -> Estimate:
    stream = StreamingMoments(GROUPS, len(x), WIDTHS[-1])
    conventional.train()
    for _ in range(-(-DRAWS // AT_ONCE)):
        out = conventional(x.repeat(AT_ONCE, 1)).view(GROUPS, AT_ONCE // GROUPS, len(x), -1)
        stream.add(out.transpose(1, 2))
    conventional.eval()
    return stream.estimate()


def error_of_masks(conventional: nn.Module, x: Tensor, truth: Estimate, masks: int) -> float:
    """The relative error of a variance from so many masks (root mean square over digits)."""
    conventional.train()
    found = torch.stack([conventional(x) for _ in range(masks)]).double().var(0)
    conventional.eval()
    sampled = truth.covariance_matrix.diagonal(dim1=-2, dim2=-1)
    relative = (found - sampled).norm(dim=1) / sampled.norm(dim=1)
    return relative.square().mean().sqrt().item()


def networks(net: nn.Sequential, x: Tensor) -> dict[str, nn.Module]:
    """The ways to have moments of dropout, by name; measured on the training inputs x."""
    with_noise = covary.with_dropout(net).eval()
    covary.track(with_noise, x, progress=False)
    rate = next(each.p for each in net if isinstance(each, covary.nn.Dropout))
    converted: Converted = covary.convert(plain(net, dropout=rate), noise=0.0, dropout=True)
    covary.track(converted, x, progress=False)
    return {
        "full": covary.with_covariance(with_noise, "full").eval(),
        "tracked": covary.with_covariance(with_noise, "tracked").eval(),
        "converted": converted,
    }


def errors(truth: Estimate, out: covary.Moments) -> dict[str, dict[str, float]]:
    """Relative errors of mean, variances and covariance, the masks' own scatter taken out."""
    found = compared(truth, out)._asdict()
    return {name: {"value": each.value, "bar": each.bar} for name, each in found.items()}


def times(net: nn.Sequential, ways: dict[str, nn.Module], x: Tensor) -> dict[str, float]:
    """Passes of the plain network that the variances of all ten outputs take."""
    rate = next(each.p for each in net if isinstance(each, covary.nn.Dropout))
    ordinary, masked = plain(net), plain(net, dropout=rate).train()
    timed: dict[str, Any] = {"plain": lambda: ordinary(x)}
    for name, way in ways.items():
        timed[name] = lambda way=way: way(x).variance
    for masks in (FEW, MASKS):
        timed[f"{masks} masks"] = lambda masks=masks: torch.stack(
            [masked(x) for _ in range(masks)]
        ).var(0)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, one_pass in timed.items():
            one_pass()  # what the pass of another way left in the cache is not its own
            before = time.process_time()
            one_pass()
            seconds[name].append(time.process_time() - before)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {name: each / medians["plain"] for name, each in medians.items() if name != "plain"}


def measured(rate: float) -> dict[str, Any]:
    """Errors and times of a network that was trained with dropout of this rate."""
    mnist, net = data.load("mnist"), trained(rate)
    some = torch.arange(TRACKED_ON) * len(mnist.x) // TRACKED_ON
    x, x_test = inputs(mnist.x[some]), inputs(mnist.x_test)
    conventional = plain(net, dropout=rate)
    accuracy = (conventional(x_test).argmax(1) == mnist.y_test).float().mean().item()
    digits = x_test[:: len(x_test) // DIGITS][:DIGITS]
    truth = drawn(rate, conventional, digits)
    torch.manual_seed(1)
    ways = networks(net, x)
    without = compared(truth, net(digits))
    row = {
        "test accuracy": accuracy,
        "errors": {name: errors(truth, way(digits)) for name, way in ways.items()},
        "error of the mean without masks": without.mean.value,
        "error of the variance": {
            f"{masks} masks": error_of_masks(conventional, digits, truth, masks)
            for masks in (FEW, MASKS)
        },
        "over plain": times(net, ways, x_test[:BATCH]),
    }
    # A variance from n masks has the relative error sqrt(2 / n), if outputs are Gaussian.
    row["masks for the same error"] = {
        name: 2 / each["variance"]["value"] ** 2 for name, each in row["errors"].items()
    }
    print(rate, row, flush=True)
    return row


def broken_promises(found: dict[str, Any]) -> list[str]:
    """Which of the promises above a measurement does not keep."""
    broken = []
    for rate, row in found["networks"].items():
        for name, most in MOST_ERROR.items():
            error = row["errors"][name]["variance"]["value"]
            if not error <= most:
                broken.append(f"dropout {rate}, {name}: variances are {error:.1%} off")
        passes = row["over plain"]
        if passes["tracked"] > passes[f"{FEW} masks"]:
            broken.append(f"dropout {rate}: {passes['tracked']:.1f} passes of the plain network")
    return broken


def main() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        nets = {rate: trained(rate) for rate in RATES}
        with torch.no_grad():
            rows = {f"{rate:g}": measured(rate) for rate in nets}
    torch.set_num_threads(threads)
    found = {"masks": DRAWS, "digits": DIGITS, "networks": rows}
    broken = broken_promises(found)
    tables.publish(
        "dropout", "python -m benchmarks.dropout", 0, found, shown=[tables.dropout], broken=broken
    )


if __name__ == "__main__":
    main()
