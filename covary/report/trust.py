"""How far the uncertainty is to be trusted: what scores find, and what calibration changes."""

from __future__ import annotations

from typing import Any

from covary.report import words
from covary.report.reading import Results

# name of a score -> what it is
_SCORES = {
    "entropy": "entropy of the covariance",
    "trace": "sum of the variances",
    "largest_eigenvalue": "variance along the direction that has most",
    "max_softmax": "one minus the largest probability, of the mean alone",
    "softmax_entropy": "entropy of the probabilities, of the mean alone",
    "energy": "minus the log of the summed exponentials, of the mean alone",
    "expected_max": "one minus the largest expected probability",
    "predictive_entropy": "entropy of the expected probabilities",
    "expected_entropy": "expected entropy of the probabilities",
    "mutual_information": "the former less the latter: doubt that is due to the covariance",
    "change_probability": "probability that noise changes the predicted class",
    "margin": "distance of the two best classes, in its own standard deviations",
    "fitted": "density of all layers' moments, and margin, fitted to held-out data",
    "fitted_plain": "the same of the plain network of these weights: no covariance",
}


def score_table(results: Results) -> dict[str, Any] | None:
    """A row for each score: what it finds among test inputs, and of each foreign set."""
    by_part = results.evaluation.scores
    if not by_part:
        return None
    test = by_part["test"]
    kind = "auroc" if results.is_classification else "spearman_error"
    first = "errors" if results.is_classification else "size of errors (rank correlation)"
    foreign = [name for name in by_part if name != "test"]
    columns = [[row[kind] for row in test.values()]]
    columns += [[by_part[part][name]["auroc"] for name in test] for part in foreign]
    best = [max((v for v in column if v is not None), default=None) for column in columns]
    rows = [
        {
            "name": name.replace("_", " "),
            "meaning": _SCORES.get(name, ""),
            "cells": [
                {"text": words.number(column[i]), "best": column[i] == top and top is not None}
                for column, top in zip(columns, best, strict=True)
            ],
        }
        for i, name in enumerate(test)
    ]
    return {"columns": [first, *foreign], "rows": rows}


def calibration_table(results: Results) -> dict[str, Any] | None:
    """What was fitted to held-out data, and the test set's numbers before and after."""
    found = results.evaluation.calibration
    if found is None:
        return None
    before = results.metrics["test"]
    rows = []
    for name in (name for name in words.METRICS if name in found.test and name in before):
        if name == "samples":
            continue
        title, _ = words.title_and_meaning(name)
        values = [words.metric(name, numbers[name]) for numbers in (before, found.test)]
        rows.append({"title": title, "values": values})
    held_out = words.number(found.held_out_samples)
    scale = words.number(found.scale)
    if found.kind == "logits":
        fitted = f"temperature {words.number(found.temperature)}, covariance times {scale}"
    else:
        fitted = f"variance times {scale} plus {words.number(found.offset)}"
    if found.noise:
        fitted += f", noise {words.number(found.noise)}"
    text = f"Fitted to {held_out} held-out training inputs: {fitted}."
    return {"text": text, "rows": rows}
