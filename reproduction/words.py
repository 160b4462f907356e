"""Numbers and verdicts in words, the same on the terminal, in Markdown and on the page."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reproduction.experiment import FAILS, PARTLY, UNDECIDED, Claim, Elsewhere, Number

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
    "as printed": "trained as the paper's text says, word for word, where the authors' code (and "
    "ours elsewhere) is otherwise.",
    "sigma_l": "standard deviation of the noise of layer l: sigma_1 at the input, sigma_2 in the "
    "first hidden layer.",
    "SMUC, SMSC": "supervised mean, unsupervised covariance: gradients go through the mean alone; "
    "supervised mean, supervised covariance: they go through both.",
    "MSP, SE": "one minus the largest softmax probability, and the entropy of all of them.",
    "R^2": "of a straight line through epochs: the share of variance that it explains.",
    "noise": "how far a number may be off by chance: half of its 95% interval over test samples, "
    "by drawing them again (bootstrap), or over epochs. Behind +- where a claim is judged by it; "
    "within noise: too close to its bound to tell.",
}


def number(value: float | None) -> str:
    """Four significant digits, or what stands for none."""
    if value is None or not math.isfinite(value):
        return "undefined"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2e}"


def with_noise(numbers: Sequence[Number]) -> str:
    """The numbers, and the largest of their noises if they have any."""
    noises = [each.noise for each in numbers if each.noise is not None and each.noise == each.noise]
    said = spread([each.value for each in numbers])
    return f"{said} +- {number(max(noises))}" if noises and said != "undefined" else said


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
    """A claim beside what was measured, in words.

    Attributes:
        claim: what it is about.
        says, counts, ours: the claim, its bounds and the measured numbers.
        verdict: with how many parts agree, where they do not all.
        rests: what the verdict rests on, where that is little: one seed, scale quick, noise that is
            estimated.
        why: the reason, where it does not hold or cannot be told.
        command: what makes the results that it lacks to be judged.
    """

    claim: Claim
    says: str
    counts: str
    ours: str
    verdict: str
    rests: str
    why: str
    command: str = ""

    @property
    def kind(self) -> str:
        """The verdict without numbers."""
        return self.verdict.split(",")[0]


def judged(claim: Claim, record: Mapping[str, Any]) -> Judged:
    """What results say of a claim, and why where it does not hold or cannot be told."""
    scale, numbers = record["scale"], claim.numbers(record)
    verdict, agreeing = claim.verdict(record), claim.decided(record).count(True)
    why = claim.why if verdict in (PARTLY, FAILS) and scale != "smoke" else ""
    command = ""
    if scale in claim.untested:
        verdict, why = "not tested", claim.untested[scale]
    elif isinstance(claim.minus, Elsewhere) and not claim.others(record):
        command = _run(claim.minus, scale)
        verdict, why = "not tested", "What it is to be compared with is not among the results."
    elif verdict is None:
        verdict = "shown" if numbers else "not measured"
    elif scale == "smoke":
        verdict = "not judged"
    elif verdict == PARTLY or claim.majority or (verdict in (FAILS, UNDECIDED) and agreeing):
        verdict = f"{verdict}, {agreeing} of {len(numbers)}"
    shown = with_noise(numbers) if claim.noise else spread([each.value for each in numbers])
    judged_at_all = claim.verdict(record) is not None and scale != "smoke"
    rests = _rests(claim, record) if judged_at_all else ""
    return Judged(claim, said(claim), bounds(claim), shown, verdict, rests, why, command)


def _run(needed: Elsewhere, scale: str) -> str:
    words = ["python", "-m", "reproduction", "run", needed.experiment, "--scale", scale]
    return shlex.join([*words, *(word for label in needed.labels for word in ("--only", label))])


def _rests(claim: Claim, record: Mapping[str, Any]) -> str:
    """What is to be known of the numbers that a verdict rests on, where they are few or short."""
    home = record["beside"][claim.of] if claim.of else record
    found = _short(home, claim.parts(record))
    if any(part["metrics"].get(f"{claim.metric}_estimated") for part in claim.parts(record)):
        found.append("noise estimated")
    if isinstance(claim.minus, Elsewhere):
        name = claim.minus.experiment
        found += [
            f"{each} of {name}"
            for each in _short(record["beside"][name], claim.others(record))
            if each not in found
        ]
    return ", ".join(found)


def _short(record: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether parts of results are of one seed, without splits of a set, and shorter than asked."""
    labels = {part["label"] for part in parts}
    config = [each["settings"] for each in record["config"] if each["label"] in labels]
    alone = len({part["seed"] for part in parts}) == 1 and not any("splits" in s for s in config)
    return [*(["one seed"] if alone else []), *(["quick"] if record["scale"] == "quick" else [])]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
