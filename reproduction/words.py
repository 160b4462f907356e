"""Numbers and verdicts in words, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.experiment import FAILS, PARTLY, Claim

# What readers of the page may not know, or know otherwise.
GLOSSARY = {
    "entropy": "of the Gaussian with a layer's covariance, in nats: half the logarithm of its "
    "determinant and a constant, over the directions in which it varies.",
    "separability": "of two groups of numbers, the paper's measure: the difference of their "
    "averages over the square root of the sum of their variances.",
    "right, wrong, OOD": "test samples that the network classifies as their labels say, those it "
    "does not, and out-of-distribution inputs, of another kind than it was trained on.",
    "AUROC": "the chance that a sample that should be flagged scores higher than one that should "
    "not; 0.5 is guessing, 1 is perfect.",
    "MNN, dMNN": "networks with covariances in full, and with variances alone.",
    "shared": "in training all samples of a mini-batch have one covariance; in evaluation each has "
    "its own.",
    "sigma_l": "standard deviation of the noise of layer l: sigma_1 at the input, sigma_2 in the "
    "first hidden layer.",
    "SMUC, SMSC": "supervised mean, unsupervised covariance: gradients go through the mean alone; "
    "supervised mean, supervised covariance: they go through both.",
    "MSP, SE": "one minus the largest softmax probability, and the entropy of all of them.",
    "R^2": "of a straight line through epochs: the share of variance that it explains.",
}


def number(value: float | None) -> str:
    """Four significant digits, or what stands for none."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def spread(values: Sequence[float | None]) -> str:
    """The average over seeds, the least and the largest, and of how many."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return "not measured"
    if not known:
        return "undefined"
    undefined = len(values) - len(known)
    tail = f"; undefined in {undefined}" if undefined else ""
    if len(values) == 1:
        return number(known[0])
    low, high = number(min(known)), number(max(known))
    middle = number(statistics.fmean(known))
    return f"{middle} ({low} to {high}; n = {len(values)}{tail})"


def said(claim: Claim) -> str:
    """The claim, whose it is, and of which parts if that is one label."""
    label = claim.label if isinstance(claim.label, str) else ""
    if claim.says.startswith(label.split(",")[0]):  # it says so itself
        label = ""
    return ("Ours: " if claim.ours else "") + claim.says + (f" ({label})" if label else "")


def bounds(claim: Claim) -> str:
    """When a number is taken to be in accord with the claim; nothing if it only is shown."""
    if claim.least is None and claim.most is None:
        return ""
    of_most = " in most" if claim.majority else ""
    if claim.least is not None and claim.most is not None:
        return f"{number(claim.least)} to {number(claim.most)}{of_most}"
    if claim.least is not None:
        return f">= {number(claim.least)}{of_most}"
    assert claim.most is not None  # it has a bound
    return f"<= {number(claim.most)}{of_most}"


@dataclass(frozen=True)
class Judged:
    """A claim beside what was measured, in words."""

    claim: Claim
    says: str
    counts: str
    ours: str
    verdict: str
    why: str


def judged(claim: Claim, record: Mapping[str, Any]) -> Judged:
    """What results say of a claim, and why where it does not hold or cannot be told."""
    scale, values = record["scale"], claim.values(record["parts"])
    verdict, agreeing = claim.verdict(record), claim.agreeing(record["parts"])
    why = claim.why if verdict in (PARTLY, FAILS) and scale != "smoke" else ""
    if scale in claim.untested:
        verdict, why = "not tested", claim.untested[scale]
    elif verdict is None:
        verdict = "shown" if values else "not measured"
    elif scale == "smoke":
        verdict = "not judged"
    elif verdict == PARTLY or claim.majority or (verdict == FAILS and agreeing):
        verdict = f"{verdict}, {agreeing} of {len(values)}"
    return Judged(claim, said(claim), bounds(claim), spread(values), verdict, why)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
