"""How far the uncertainty is to be trusted: what scores find, and what calibration changes."""

from __future__ import annotations

from typing import Any

from covary.report import words
from covary.report.reading import Results
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import about


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
            "name": about(name).title,
            "meaning": about(name).meaning,
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
    for name in (name for name in METRICS if name in found.test and name in before):
        if name == "samples":
            continue
        title, _ = words.title_and_meaning(name)
        values = [words.metric(name, numbers[name]) for numbers in (found.test, before)]
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
