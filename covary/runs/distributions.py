"""What the distributions that a run predicts are worth on its test rows, and where they fail."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from covary.moments import Moments
from covary.nn import Rescale
from covary.progress import Steps
from covary.runs import columns
from covary.runs.columns import LEVEL, table_columns
from covary.runs.directory import Run
from covary.runs.predictions import Array, Predictions
from covary.runs.results import DistributionResult, HeldOut, TargetDistribution
from covary.runs.row_model import RowModel, TargetHead, row_model
from covary.runs.samples import LEAST, validation_rows
from covary.runs.uncertainty import ANSWERED
from covary.uncertainty import metrics
from covary.uncertainty.predictive import Predictive
from covary.uncertainty.slices import expected_unusual


def model_of(run: Run, progress: Steps | None) -> RowModel | None:
    """What ``covary predict`` has of a regression; None if too few rows were held out."""
    held_out, _ = validation_rows(len(run.data.x), run.config)
    return row_model(run, progress=progress) if len(held_out) >= LEAST else None


def added(part: Predictions, model: RowModel, x: Tensor | Moments) -> Predictions:
    """The predictions of inputs (n, ...) with what the distributions say of them."""
    said = replace(model.distribution(x), is_one_target=False)
    low, high = said.interval(LEVEL)
    return replace(
        part,
        calibrated_mean=said.mean(),
        calibrated_variance=said.var(),
        calibrated_low=low,
        calibrated_high=high,
        calibrated_level=None if part.target is None else said.cdf(part.target),
    )


def measured(
    run: Run, model: RowModel, held_out: HeldOut, test: Predictions, *, seed: int
) -> DistributionResult:
    """Metrics of the test rows, of each target; coverage by slice, and what columns do."""
    data, head = run.data, model.head
    assert isinstance(head, TargetHead)
    assert test.target is not None
    said = replace(model.distribution(data.test_inputs), is_one_target=False)
    inside = test.calibrated.holds(LEVEL)
    names = data.features or [f"column {i + 1}" for i in range(data.x.shape[1])]
    known = [] if data.is_image else table_columns(run.schema, names)
    stds = partial(_stds, run, model)
    effects, moved = columns.effects_on_std(known, data.x.numpy(), stds, seed)
    targets = []
    for column, residuals in enumerate(head.models):
        slices = columns.coverage_by_slice(known, data.x_test.numpy(), inside[:, column])
        y = test.target[:, column]
        worth, usual = head.worth[column], columns.usual_coverage(inside[:, column])
        targets.append(
            TargetDistribution(
                name=data.targets[column] if data.targets else f"target {column + 1}",
                family=str(residuals.family),
                shares={name: part.share for name, part in worth.items()},
                gains={name: part.gain for name, part in worth.items()},
                test={"samples": len(test), **metrics.of_distribution(said.of_target(column), y)},
                slices=slices,
                usual=usual,
                unusual_by_chance=expected_unusual([one.samples for one in slices], usual),
                effects=tuple(effects[column]) if effects else (),
            )
        )
    rows, _ = validation_rows(len(data.x), run.config)
    seen = model.distribution(data.inputs[rows[: len(model.seen_error)]]).std()
    found = np.quantile(seen.reshape(len(seen), -1), ANSWERED, axis=0, method="lower")
    return DistributionResult(
        held_out_samples=len(model.seen_error),
        thresholds={
            **held_out.thresholds,
            **{f"stddev_{i + 1}": float(value) for i, value in enumerate(found)},
        },
        test=_all_metrics(model, said, test.target),
        level=LEVEL,
        effect_rows=moved,
        targets=tuple(targets),
    )


def _all_metrics(model: RowModel, said: Predictive, target: Array) -> dict[str, float]:
    """Of all targets together, whose likelihood is the joint one."""
    each = [said.of_target(column) for column in range(target.shape[1])]
    found = metrics.of_moments(said.mean(), said.cov(), target)
    found |= metrics.of_distributions(each, target)
    found["log_likelihood"] = float(said.logpdf(target).mean())
    rescale = model.net[-1]
    assert isinstance(rescale, Rescale)
    standardised = metrics.standardised_log_likelihood(
        found["log_likelihood"], rescale.scale.double().numpy()
    )
    return {"samples": len(target), **found, "log_likelihood_standardised": float(standardised)}


def _stds(run: Run, model: RowModel, x: Array, rows: Array) -> Array:
    """(m, t) standard deviations of inputs that were these training rows, and have their errors."""
    known, values = run.data.x_std, torch.from_numpy(x)
    inputs = values if known is None else Moments.of(values, std=known[rows])
    return model.distribution(inputs, near=True).std().reshape(len(x), -1)
