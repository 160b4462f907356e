"""Numbers as a reader expects them, and sentences made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from covary.runs.predictions import Predictions
from covary.runs.records import Numbers
from covary.runs.results import BudgetResult, DistributionResult, ErrorBars, MeasuredNumber
from covary.uncertainty.metrics import METRICS

MINUS = "\N{MINUS SIGN}"
NOTHING = "\N{EN DASH}"
PLUS_MINUS = "\N{PLUS-MINUS SIGN}"


def number(value: Any) -> str:
    """A number with four significant digits, or a dash where there is none.

    Examples:
        >>> number(1234567), number(0.051234), number(3.0)
        ('1,234,567', '0.05123', '3.000')
    """
    if isinstance(value, (list, tuple)):
        return ", ".join(number(item) for item in value)
    if value is None or value != value:
        return NOTHING
    if isinstance(value, (int, np.integer)):
        text = f"{int(value):,}"
    elif value == 0 or 1e-3 <= abs(value) < 1e5:
        decimals = 3 if value == 0 else max(0, 3 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{min(decimals, 5)}f}"
    else:
        text = f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    return text.replace("-", MINUS)


def plus_minus(mean: float, stddev: float) -> str:
    """A prediction with its standard deviation, to two digits of the latter.

    Examples:
        >>> plus_minus(21.0731, 0.7366), plus_minus(1234.6, 250.0)
        ('21.07 ± 0.74', '1,235 ± 250')
    """
    if not (math.isfinite(stddev) and stddev > 0):
        return f"{number(mean)} {PLUS_MINUS} {number(stddev)}"
    decimals = max(0, 1 - math.floor(math.log10(stddev)))
    return f"{mean:,.{decimals}f} {PLUS_MINUS} {stddev:,.{decimals}f}".replace("-", MINUS)


def percent(part: float, whole: float = 1.0, *, decimals: int = 1) -> str:
    """``part`` of ``whole``; never says 100% (or 0%) of what is not quite all (or nothing).

    Examples:
        >>> percent(9712, 10000), percent(9999, 10000), percent(1, 1), percent(1, 10**6)
        ('97.1%', '>99.9%', '100%', '<0.1%')
    """
    if not whole or math.isnan(part):
        return NOTHING
    share, least = 100 * part / whole, 10**-decimals
    if share in (0, 100):
        return f"{share:.0f}%"
    if share > 100 - least / 2:
        return f">{100 - least:.{decimals}f}%"
    return f"<{least}%" if share < least / 2 else f"{share:.{decimals}f}%"


def relative_error(error: float | None) -> str:
    """An error relative to what is exact, to two digits; it may be larger than that.

    Examples:
        >>> relative_error(0.0312), relative_error(2.5), relative_error(1e-6), relative_error(0.0)
        ('3.1%', '250%', '<0.01%', '0%')
    """
    if error is None or error == 0:
        return NOTHING if error is None else "0%"
    if error < 0.0001:
        return "<0.01%"
    decimals = 2 if error < 0.00995 else 1 if error < 0.0995 else 0
    return f"{100 * error:,.{decimals}f}%"


def rank(value: float | None) -> str:
    """A rank correlation; never says 1.000 of what is not quite 1.

    Examples:
        >>> rank(0.98765), rank(0.99999), rank(1.0)
        ('0.988', '>0.999', '1')
    """
    if value is None or value == 1:
        return NOTHING if value is None else "1"
    return ">0.999" if value >= 0.9995 else f"{value:.3f}".replace("-", MINUS)


def amount(value: float | None) -> str:
    """A time or a size, to as many digits as it is worth.

    Examples:
        >>> amount(2.345), amount(150.4), amount(2048.0)
        ('2.3', '150', '2,048')
    """
    if value is None:
        return NOTHING
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def fidelity(name: str, value: float | None) -> str:
    """The value of a measure of agreement with exact moments."""
    return rank(value) if name == "rank" else relative_error(value)


def measured(found: MeasuredNumber) -> str:
    """What a simulation found, with its standard error; relative errors in percent."""
    if found.value is None or found.bar is None:
        return NOTHING
    scale, decimals, unit = 1.0, 2, ""
    if found.floor is not None:
        scale, unit = 100.0, "%"
        decimals = 2 if found.bar < 0.0005 else 1 if found.bar < 0.05 else 0
    value, bar = (f"{scale * each:.{decimals}f}" for each in (found.value, found.bar))
    return f"{value} {PLUS_MINUS} {bar}{unit}".replace("-", MINUS)


def tenths(value: float | None, nothing: str = NOTHING) -> str:
    """A share in percent, whatever its size."""
    return nothing if value is None else f"{100 * value:.1f}%"


def attack_title(name: str) -> str:
    """The name of an attack as one writes it, such as ``FGSM, transferred``."""
    base = name.removeprefix("transfer-")
    title = base.upper() if base in ("fgsm", "pgd") else base.capitalize()
    return title if base == name else f"{title}, transferred"


def squeezed(text: str, limit: int) -> str:
    """A name that fits: its beginning and its end, which tell it from others.

    Examples:
        >>> squeezed("posterior, trained with dropout", 20)
        'posterior,…h dropout'
    """
    head = (limit - 1) - (limit - 1) // 2
    end = len(text) - (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:head]}\N{HORIZONTAL ELLIPSIS}{text[end:]}"


def shown_of(shown: int, total: int) -> str:
    """How many of all are in a figure, at the beginning of a sentence."""
    return f"{number(shown)} of {number(total)}" if shown < total else "All"


def short(text: str, limit: int = 26) -> str:
    """A name that fits into a figure."""
    return text if len(text) <= limit else f"{text[: limit - 1]}\N{HORIZONTAL ELLIPSIS}"


def metric(name: str, value: Any) -> str:
    """The value of a metric, as a percentage if it is a share of inputs."""
    if name in METRICS and METRICS[name].is_share and value is not None:
        return percent(float(value), decimals=2)
    return number(value)


def title_and_meaning(name: str) -> tuple[str, str]:
    """Title and meaning of a metric; one that is not known has its name as a title."""
    known = METRICS.get(name)
    return (known.title, known.meaning) if known else (name.replace("_", " "), "")


def aurocs(metrics: Numbers) -> str:
    """How well entropy and max-softmax tell two groups apart; empty if that was not measured."""
    named = {"auroc_entropy": "entropy", "auroc_max_softmax": "max-softmax"}
    found = [(metrics[key], score) for key, score in named.items() if key in metrics]
    said = [f"{'undefined' if v is None else f'{v:.2f}'} by {score}" for v, score in found]
    return f"AUROC {', '.join(said)}" if said else ""


def wrong_ones_have_more_entropy(test: Predictions) -> bool:
    """Whether wrong predictions have the higher entropy, on average over finite ones."""
    finite = np.isfinite(test.entropy)
    wrong, right = (test.entropy[finite & chosen] for chosen in (~test.right, test.right))
    return bool(wrong.size and right.size and wrong.mean() > right.mean())


def judged_coverage(share: float, meant: float, count: int) -> str:
    """How a sentence ends that says which share of so many targets intervals hold.

    Examples:
        >>> judged_coverage(0.905, 0.9, 1000), judged_coverage(0.7, 0.9, 1000)
        (', about as they should', ': they are too narrow')
    """
    # Two standard errors: what chance alone explains.
    if abs(share - meant) <= 2 * math.sqrt(meant * (1 - meant) / count):
        return ", about as they should"
    return f": they are too {'narrow' if share < meant else 'wide'}"


def removable(budget: BudgetResult) -> str:
    """Which part of the variance more training data could remove, and which it could not."""
    if "weights" not in budget.kinds:
        return "Weights are taken as known: what more training data could remove is not told here."
    share, rest = budget.removable, 1 - budget.removable
    return f"More training data could remove {percent(share)} (weights), and {percent(rest)} not."


def perfect_measurements(errors: ErrorBars, targets: Sequence[str]) -> Iterator[str]:
    """What standard deviations would be without errors of the inputs, for each target."""
    for i, (given, exact) in enumerate(zip(errors.stddev, errors.exact, strict=True)):
        of = f" of {targets[i]}" if len(targets) > 1 else ""
        less = "" if not given or exact is None else f", {percent(1 - exact / given)} less"
        yield (
            f"With perfect measurements the standard deviation{of} would be {number(exact)} on "
            f"average, not {number(given)}{less} (before calibration, without weights)."
        )


def family(name: str) -> str:
    """What a family of distributions is called."""
    names = {"student": "Student's t", "mixture": "mixtures of several modes"}
    return f"{names.get(name, name)}{' distributions' if name != 'mixture' else ''}"


def failing(found: DistributionResult, most: int = 3) -> Iterator[str]:
    """Where intervals hold too few targets or too many, beyond chance; for each target."""
    level = f"{100 * found.level:.0f}%"
    for target in found.targets:
        of = f" of {target.name}" if len(found.targets) > 1 else ""
        what = f"{level} intervals{of}"
        beyond, count = [one for one in target.slices if one.is_beyond], len(target.slices)
        usual, than = found.level, "they should"
        if target.usual is not None and target.usual != found.level:
            usual, than = target.usual, "elsewhere"
            how = "narrow" if usual < found.level else "wide"
            yield f"{what} hold {percent(usual)} of all test rows: too {how}, beyond chance."
        if count and not beyond:
            rest = " in particular" if usual != found.level else ""
            slices = f"{number(count)} slices of the test rows"
            yield f"{what}: none of {slices} is off{rest}, beyond chance."
        for how in ("fewer", "more"):
            own = [one for one in beyond if (one.share < usual) == (how == "fewer")]
            told = [f"{one.column} {one.label} ({percent(one.share)})" for one in own[:most]]
            more = f"; and {number(len(own) - most)} more" if len(own) > most else ""
            if own:
                yield (
                    f"{what} hold {how} targets than {than} in {number(len(own))} of "
                    f"{number(count)} slices of the test rows, beyond chance: "
                    f"{'; '.join(told)}{more}."
                )


def contradictions(parts: Mapping[str, Numbers]) -> Iterator[str]:
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
