"""What the variance of a run's output is made of, and its error bars with perfect measurements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from covary import activations
from covary.budget import REMOVABLE, Budget
from covary.convert import Converted, convert
from covary.inputs import in_batches
from covary.moments import Moments, mean_of
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
    converted = convert(run.network().to(device))
    inputs, seed = run.data.test_inputs, run.config.training.seed
    if converted.plan.is_none and isinstance(inputs, Tensor):
        return None, [
            "There is no budget of the variance: nothing varies in this network, as its noise is 0."
        ]
    count = _IMAGES if model.is_image else _ROWS
    _, rows = validation_rows(len(run.data.x), run.config)
    # Keys beyond any epoch; the first is that of tracking.
    some = rows[shuffled(len(rows), seed, 2**31 + 1)[:count]]
    few = shuffled(len(inputs), seed, 2**31 + 2)[:count]
    with torch.no_grad(), quietly():
        found = track(converted, _real(run.data.inputs[some]), samples=count, progress=False)
        average, columns = _budget(converted, _real(inputs[few]).to(device), run.data.features)
        gallery, _ = _budget(converted, _real(inputs[test.input_index]).to(device), ())
        bars = None
        if isinstance(inputs, Moments):
            exact = torch.cat(
                [net(x.to(device)).stddev.cpu() for x in in_batches(mean_of(inputs), _BATCH)]
            )
            bars = _bars(
                torch.from_numpy(test.stddev),
                exact,
                test.input_index.tolist(),
                classify=run.classifies,
            )
    kinds = average.by_kind().average_shares()
    shares = {
        kind: share.flatten(1).mean(1).tolist()
        for kind, share in gallery.by_kind().shares().items()
    }
    return BudgetResult(
        samples=len(few),
        sources=average.average_shares(),
        kinds=kinds,
        removable=kinds.get(REMOVABLE, 0.0),
        columns=columns,
        ratio=found.ratio,
        gallery=tuple(
            BudgetOfInput(int(index), {kind: share[i] for kind, share in shares.items()})
            for i, index in enumerate(test.input_index)
        ),
        errors=bars,
    ), []


def _real(x: Tensor | Moments) -> Tensor | Moments:
    """Pixels as numbers that can vary."""
    return x if isinstance(x, Moments) or x.is_floating_point() else x.float()


def _budget(
    net: Converted, x: Tensor | Moments, features: Sequence[str]
) -> tuple[Budget, dict[str, float]]:
    """The budget of the output, and the average share of each input column that has errors."""
    out: Moments = net(x)
    budget = out.budget()
    if not isinstance(x, Moments) or not features:
        return budget, {}
    parts = out.budget("input") / budget.total[..., None]
    shares = parts.double().nan_to_num().mean((0, 1)).tolist()
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
