"""Numbers as a reader expects them, and sentences made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from covary.report.reading import Results
from covary.uncertainty.metrics import METRICS

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"

# name of a measure of agreement with exact moments -> its column
FIDELITY = {
    "mean": "mean error",
    "variance": "variance error",
    "covariance": "covariance error",
    "rank": "entropy rank",
    "argmax": "other class",
}


def number(value: Any) -> str:
    """A number with four significant digits, or a dash where there is none.

    Examples:
        >>> number(1234567), number(0.051234), number(3.0)
        ('1,234,567', '0.05123', '3.000')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, (list, tuple)):
        return ", ".join(number(item) for item in value)
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        text = f"{int(value):,}"
    elif isinstance(value, (float, np.floating)):
        size = abs(float(value))
        if value == 0 or 1e-3 <= size < 1e5:
            decimals = 3 if size == 0 else max(0, 3 - math.floor(math.log10(size)))
            text = f"{float(value):,.{min(decimals, 5)}f}"
        else:
            text = f"{float(value):.3g}".replace("e-0", "e-").replace("e+0", "e")
    else:
        return str(value)
    return text.replace("-", MINUS)


def plus_minus(mean: float, stddev: float) -> str:
    """A prediction with its standard deviation, to two digits of the latter.

    Examples:
        >>> plus_minus(21.0731, 0.7366), plus_minus(1234.6, 250.0)
        ('21.07 ± 0.74', '1,235 ± 250')
    """
    if not (math.isfinite(stddev) and stddev > 0):
        return f"{number(mean)} \N{PLUS-MINUS SIGN} {number(stddev)}"
    decimals = max(0, 1 - math.floor(math.log10(stddev)))
    text = f"{mean:,.{decimals}f} \N{PLUS-MINUS SIGN} {stddev:,.{decimals}f}"
    return text.replace("-", MINUS)


def percent(part: float, whole: float = 1.0, *, decimals: int = 1) -> str:
    """``part`` of ``whole``; never says 100% (or 0%) of what is not quite all (or nothing).

    Examples:
        >>> percent(9712, 10000), percent(9999, 10000), percent(1, 1), percent(1, 10**6)
        ('97.1%', '>99.9%', '100%', '<0.1%')
    """
    if not whole or math.isnan(part):
        return NOTHING
    share = 100 * part / whole
    if share in (0, 100):
        return f"{share:.0f}%"
    least = 10**-decimals
    if share > 100 - least / 2:
        return f">{100 - least:.{decimals}f}%"
    if share < least / 2:
        return f"<{least:.{decimals}f}%"
    return f"{share:.{decimals}f}%"


def relative_error(error: float | None) -> str:
    """An error in units of what is exact, to two digits; it may be larger than that.

    Examples:
        >>> relative_error(0.0312), relative_error(2.5), relative_error(1e-6), relative_error(0.0)
        ('3.1%', '250%', '<0.01%', '0%')
    """
    if error is None:
        return NOTHING
    if error == 0:
        return "0%"
    share = 100 * error
    if share < 0.01:
        return "<0.01%"
    decimals = 2 if share < 0.995 else 1 if share < 9.95 else 0
    return f"{share:,.{decimals}f}%"


def rank(value: float | None) -> str:
    """A rank correlation; never says 1.000 of what is not quite 1.

    Examples:
        >>> rank(0.98765), rank(0.99999), rank(1.0)
        ('0.988', '>0.999', '1')
    """
    if value is None or value == 1:
        return NOTHING if value is None else "1"
    return ">0.999" if value >= 0.9995 else f"{value:.3f}".replace("-", MINUS)


def fidelity(name: str, value: float | None) -> str:
    """The value of a measure of agreement."""
    return rank(value) if name == "rank" else relative_error(value)


def amount(value: float | None) -> str:
    """A time or a size, to as many digits as it is worth.

    Examples:
        >>> amount(2.345), amount(150.4), amount(2048.0)
        ('2.3', '150', '2,048')
    """
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def short(text: str, limit: int = 26) -> str:
    """A name that fits into a figure."""
    return text if len(text) <= limit else f"{text[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def metric(name: str, value: Any) -> str:
    """The value of a metric, as a percentage if it is a share of inputs."""
    if name in METRICS and METRICS[name].is_share and isinstance(value, (int, float)):
        return percent(float(value), decimals=2)
    return number(value)


def title_and_meaning(name: str) -> tuple[str, str]:
    """Of a metric; a metric that is not known has its name as a title."""
    known = METRICS.get(name)
    return (known.title, known.meaning) if known else (name.replace("_", " "), "")


def summary(results: Results) -> list[str]:
    """What was found, in sentences."""
    return _classified(results) if results.is_classification else _regressed(results)


def contradictions(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Where the network's doubt says the opposite of what it should, in sentences.

    Args:
        parts: metrics of each part, as in ``evaluation.json``.
    """
    for name, part in parts.items():
        what = "wrong predictions" if name == "test" else f"inputs of {name}"
        for key, score in (("auroc_entropy", "entropy"), ("auroc_max_softmax", "max-softmax")):
            auroc = part.get(key)
            if auroc is not None and auroc < 0.5:
                yield f"Note: by {score} it is surer of {what} than of the rest (AUROC below 0.5)."
    correlation = parts.get("test", {}).get("spearman_error")
    if correlation is not None and correlation < 0:
        yield "Note: deviations are larger where errors are smaller (negative rank correlation)."


def _classified(results: Results) -> list[str]:
    metrics, test = results.metrics.get("test", {}), results.test
    right, samples = int(test.right.sum()), len(test)
    sentences = []
    if right == samples:
        sentences.append(
            f"All {number(samples)} test inputs are right, so nothing can be said about telling "
            "mistakes from right answers."
        )
    else:
        sentences.append(
            f"{number(right)} of {number(samples)} test inputs are right "
            f"({percent(right, samples)})."
        )
    calibration = results.evaluation.calibration
    errors = [each.get("ece") for each in (calibration.test if calibration else {}, metrics)]
    if all(isinstance(error, float) for error in errors):
        after, before = errors
        sentences.append(
            f"Calibrated probabilities are off by {after:.3f} on average (ECE), {before:.3f} "
            "before calibration."
        )
    if right not in (0, samples):
        finite = np.isfinite(test.entropy)
        wrong, fine = (test.entropy[finite & chosen] for chosen in (~test.right, test.right))
        higher = wrong.size and fine.size and wrong.mean() > fine.mean()
        sentences.append(
            f"Entropy of wrong predictions is {'higher' if higher else 'not higher'} than of right "
            f"ones on average: {_aurocs(metrics)}."
        )
    sentences += [
        f"Telling {part.name} from the test inputs: {_aurocs(results.metrics.get(part.name, {}))}."
        for part in results.foreign
    ]
    return sentences


def _coverage(intervals: str, found: float, targets: int) -> str:
    """Whether 90% intervals hold as many of so many targets as they should."""
    # Two standard errors of a share that is 90% in truth: what chance alone explains.
    slack = 2 * math.sqrt(0.9 * 0.1 / targets)
    hold = f"{intervals} meant to hold 90% of the targets hold {percent(found)}"
    if abs(found - 0.9) <= slack:
        return f"{hold}, about as they should."
    return f"{hold}: they are too {'narrow' if found < 0.9 else 'wide'}."


def _aurocs(metrics: Mapping[str, Any]) -> str:
    entropy, softmax = metrics.get("auroc_entropy"), metrics.get("auroc_max_softmax")
    return f"AUROC {_two(entropy)} by entropy, {_two(softmax)} by max-softmax"


def _two(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.2f}"


def _regressed(results: Results) -> list[str]:
    metrics, test = results.metrics.get("test", {}), results.test
    rmse = [
        f"{number(float(np.sqrt((test.error[:, column] ** 2).mean())))} for "
        f"{results.target_name(column)}"
        for column in range(test.mean.shape[1])
    ]
    sentences = [f"The RMSE on {number(len(test))} test inputs is {' and '.join(rmse)}."]
    raw, calibration = metrics.get("coverage_90"), results.evaluation.calibration
    calibrated = None if calibration is None else calibration.test.get("coverage_90")
    if isinstance(calibrated, float):
        sentences.append(_coverage("Calibrated intervals", calibrated, test.error.size))
        if isinstance(raw, float):
            sentences.append(f"Before calibration they hold {percent(raw)}.")
    elif isinstance(raw, float):
        sentences.append(_coverage("Intervals, which are not calibrated,", raw, test.error.size))
    rank = metrics.get("spearman_error")
    if isinstance(rank, float):
        sentences.append(
            "Rank correlation of the predicted standard deviation with the size of the error: "
            f"{rank:.2f}".replace("-", MINUS)
            + "."
        )
    sentences += [
        f"Telling {part.name} from the test inputs: AUROC {_two(found)} by entropy."
        for part in results.foreign
        if (found := results.metrics.get(part.name, {}).get("auroc_entropy")) is not None
    ]
    return sentences
