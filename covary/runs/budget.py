"""What the variance of a run's output is made of, and its error bars with perfect measurements."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from covary import activations, posterior
from covary.budget import REMOVABLE, Budget
from covary.convert import Converted, convert
from covary.inputs import in_batches
from covary.models import has_slope
from covary.moments import Moments, mean_of
from covary.nn import Flatten
from covary.runs.directory import Run
from covary.runs.predictions import Predictions
from covary.runs.results import BudgetOfInput, BudgetResult, ErrorBars
from covary.runs.samples import validation_rows
from covary.runs.tracking import quietly
from covary.tracking import track
from covary.training.batches import shuffled

# Inputs to measure on: a few seconds, for rows of tables and for images.
_ROWS, _IMAGES = 128, 64
_BATCH = 128
# Training data that the posterior of weights is fitted to, at most.
_FITTED = 2048
# Noise that enters behind these layers, which stand before the first moments.
_NAMES = {
    "noise at standardize": "noise on scaled inputs",
    "noise at flatten": "noise on scaled inputs",
    "noise at trunk": "noise behind the trunk",
}


def measure(run: Run, net: nn.Module, test: Predictions) -> tuple[BudgetResult | None, list[str]]:
    """The budget on some test inputs and on those of the gallery; or None, and why there is none.

    Args:
        run: a trained run.
        net: its network, which holds covariances as the evaluation does.
        test: what it said to the test inputs.
    """
    model = run.config.model
    if activations.get(model.activation).neuron is not None or model.poisson:
        what = "Poisson inputs" if model.poisson else "spiking neurons"
        return None, [f"There is no budget of the variance: covary.convert takes no {what}."]
    device = next(net.parameters()).device
    front, behind = _divided(run.network().to(device))
    converted = convert(behind)
    inputs, seed = run.data.test_inputs, run.config.training.seed
    if converted.plan.is_none and isinstance(inputs, Tensor):
        return None, [
            "There is no budget of the variance: nothing varies in this network, as its noise is 0."
        ]
    notes: list[str] = []
    if has_slope(behind):  # or else no gradient says how well weights are known
        converted, notes = _with_weights(run, front, converted)
    count = _IMAGES if model.is_image else _ROWS
    _, rows = validation_rows(len(run.data.x), run.config)
    # Keys beyond any epoch; the first is that of tracking.
    some = rows[shuffled(len(rows), seed, 2**31 + 1)[:count]]
    few = shuffled(len(inputs), seed, 2**31 + 2)[:count]
    with torch.no_grad(), quietly():
        known, average, gallery = (
            front(each.to(device))
            for each in (run.data.inputs[some], inputs[few], inputs[test.input_index])
        )
        found = track(converted, known, samples=count, progress=False)
        budget, columns = _budget(converted, average, run.data.features)
        of_gallery, _ = _budget(converted, gallery, ())
        bars = None
        if isinstance(inputs, Moments):
            parts = in_batches(mean_of(inputs), _BATCH)
            exact = torch.cat([net(x.to(device)).stddev.cpu() for x in parts])
            given, chosen = torch.from_numpy(test.stddev), test.input_index.tolist()
            bars = _bars(given, exact, chosen, classify=run.classifies)
    kinds = budget.by_kind().average_shares()
    shares = {name: part.flatten(1).mean(1).tolist() for name, part in of_gallery.shares().items()}
    return BudgetResult(
        samples=len(few),
        sources=budget.average_shares(),
        kinds=kinds,
        removable=kinds.get(REMOVABLE, 0.0),
        columns=columns,
        ratio=found.ratio,
        gallery=tuple(
            BudgetOfInput(int(index), {name: share[i] for name, share in shares.items()})
            for i, index in enumerate(test.input_index)
        ),
        errors=bars,
    ), notes


def _with_weights(
    run: Run, front: Callable[[Any], Any], net: Converted
) -> tuple[Converted, list[str]]:
    """The network with a posterior of its weights, by some of its training data.

    Where there is none, the network as it is, and why.
    """
    _, rows = validation_rows(len(run.data.x), run.config)
    seed, device = run.config.training.seed, next(net.parameters()).device
    some = rows[shuffled(len(rows), seed, 2**31 + 3)[:_FITTED]]
    with torch.no_grad():
        data = front(run.data.x[some].to(device)), run.data.y[some].to(device)
    try:
        # No held-out data: where noise of the network explains them already, they want no more.
        with quietly():
            fitted = posterior.fit(net, data, total=len(rows), progress=False)
    except ValueError as error:
        return net, [f"In the budget of the variance, weights are taken as known: {error}"]
    return fitted, []


def _divided(net: nn.Sequential) -> tuple[Callable[[Any], Any], nn.Sequential]:
    """What runs as it is, and what is converted: all of it, or what is behind a trunk.

    Nothing varies in a trunk, and what is in it would be drawn in vain.
    """
    layers = OrderedDict(net.named_children())
    if "trunk" not in layers:
        return _real, net
    front = nn.Sequential(layers.pop("standardize"), layers["trunk"])
    layers["trunk"] = Flatten()  # a layer of this name, at which the noise of the inputs enters
    return front, nn.Sequential(layers).eval()


def _real(x: Tensor | Moments) -> Tensor | Moments:
    """Pixels as numbers that can vary."""
    return x if isinstance(x, Moments) or x.is_floating_point() else x.float()


def _budget(
    net: Converted, x: Tensor | Moments, features: Sequence[str]
) -> tuple[Budget, dict[str, float]]:
    """The budget of the output, and the average share of each input column that has errors."""
    out: Moments = net(x)
    parts = {_NAMES.get(name, name): part for name, part in out.budget().items()}
    # What targets vary by around the output is no part of the variance of the output itself.
    parts.pop("noise at targets", None)
    budget = Budget(parts)
    if not isinstance(x, Moments) or not features:
        return budget, {}
    by_feature = out.budget("input") / budget.total[..., None]
    shares = by_feature.double().nan_to_num().mean((0, 1)).tolist()
    with_errors = x.variance.amax(0).tolist()
    named = zip(features, shares, with_errors, strict=True)
    return budget, {name: share for name, share, error in named if error}


def _bars(given: Tensor, exact: Tensor, gallery: Sequence[int], *, classify: bool) -> ErrorBars:
    """Standard deviations with the errors of the inputs and without, on average and of some."""
    if classify:  # logits have one unit
        given, exact = (each.mean(-1, keepdim=True) for each in (given, exact))
    given, exact = given.double(), exact.double()
    return ErrorBars(
        stddev=tuple(given.mean(0).tolist()),
        exact=tuple(exact.mean(0).tolist()),
        gallery={
            str(index): (tuple(given[index].tolist()), tuple(exact[index].tolist()))
            for index in gallery
        },
    )
