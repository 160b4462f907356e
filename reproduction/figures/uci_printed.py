"""The paper's own regression cells, each beside ours, with a verdict on each."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping

from reproduction.experiments.uci_printed import (
    GRID,
    MIN_MAX,
    SCALINGS,
    STANDARDISED,
    WITHIN,
    cells,
    first_splits,
    label,
)
from reproduction.figures.layout import Record, ShownTable
from reproduction.figures.uci import NOT_RUN, TITLES, part_of, standard_error
from reproduction.published.uci import LOG_TARGETS, OWN, SETS, SHARED, PublishedRow

BOTH, NEITHER = "holds", "does not hold"
_ALONE = {STANDARDISED: "holds standardised", MIN_MAX: "holds by min-max"}
_IN_ERROR = "within 2 errors"
# Errors larger than this are of splits that failed, and make everything near.
_USUAL_ERROR = 0.25


def table(record: Record) -> ShownTable:
    """The cells of the paper's own rows."""
    return _cell_table(record, OWN)


def shared_table(record: Record) -> ShownTable:
    """The cells of the paper's rows with shared covariances."""
    found = _cell_table(record, SHARED)
    gaps = [
        gap
        for part in record["parts"]
        for metric, gap in part["metrics"].items()
        if metric.startswith("weights, ")
    ]
    if not gaps:
        return found
    return found._replace(
        caption=f"{found.caption} Networks that were trained for a while on the first split with "
        "full, shared and diagonal covariances differ in no weight by more than "
        f"{max(gaps):.0e} of the largest one: it is rounding."
    )


def verdict(record: Record, key: str, row: PublishedRow, name: str) -> str:
    """Whether ours is the printed cell of a set, for either scaling, by the bounds of the claims.

    Where it is not, it is said if it is within two standard errors of ours over the splits, and
    which noise of which scaling gives it.
    """
    agreeing, measured, remarks = [], [], []
    for scaling in SCALINGS:
        part = _measured(record, name, scaling)
        if part is None:
            continue
        claim = cells(key, row, scaling)
        (gap,) = claim.values({"parts": [part]})
        measured.append(scaling)
        if claim.agrees(gap):
            agreeing.append(scaling)
        error = standard_error(part["series"][key]["log-likelihood"])
        if gap is not None and abs(gap) <= 2 * error <= 2 * _USUAL_ERROR:
            remarks.append(_IN_ERROR)
        remarks += [
            f"{noise:g} {scaling} gives it"
            for noise, each in zip(GRID, _tried(part, key), strict=True)
            if abs(each - row.cells[name].mean) <= WITHIN
        ]
    if not measured:
        return NOT_RUN
    if len(agreeing) == len(SCALINGS):
        return BOTH
    if agreeing:
        return _ALONE[agreeing[0]]
    return "; ".join(dict.fromkeys([NEITHER, *remarks]))


def _tried(part: Record, key: str) -> list[float]:
    """What each noise gives on test parts, on average."""
    column = part["series"][key]
    tried = column.get("tried on test, whole", column["tried on test"])
    return [statistics.fmean(same) for same in zip(*tried, strict=True)]


def _cell_table(record: Record, rows: Mapping[str, PublishedRow]) -> ShownTable:
    """A row for each cell: the printed number, ours for both scalings, and the verdict."""
    shown, verdicts = [], []
    for name in SETS:
        title = f"log {TITLES[name]}" if name in LOG_TARGETS else TITLES[name]
        for key, row in rows.items():
            found = verdict(record, key, row, name)
            verdicts.append(found)
            ours = [text for scaling in SCALINGS for text in _ours(record, key, name, scaling)]
            mean, bracket = row.cells[name]
            shown.append([f"{title}, {row.method}", f"{mean:.2f} ({bracket:.2f})", *ours, found])
    noises = ", ".join(f"{noise:g}" for noise in GRID)
    head = ["cell", "published"]
    for scaling in SCALINGS:
        head += [scaling, f"{scaling}, at {noises}"]
    return ShownTable(
        [*head, "verdict"],
        shown,
        "Log-likelihood per sample (nats), on the scale of the target; log: of its logarithm. "
        "Published: mean and the number in brackets as printed. Ours: mean and standard error over "
        f"the published splits{_fewer(record)}, with the noise that held-out data chose on each; "
        f"then what each noise gives for the same test parts{_of_what(record)}, by which nothing "
        f"is chosen. A cell holds if ours is within {WITHIN} of it ({_counted(verdicts)}). "
        f"'{_IN_ERROR}' (of {_USUAL_ERROR} at most): by chance, two means over random splits can "
        "be so far apart. 'gives it': that noise on every split is within the bound, which only "
        "the test score tells." + _chosen(record, rows),
    )


def _ours(record: Record, key: str, name: str, scaling: str) -> tuple[str, str]:
    """What the noise that was chosen gives, and what each one gives."""
    part = _measured(record, name, scaling)
    if part is None:
        return NOT_RUN, NOT_RUN
    error = standard_error(part["series"][key]["log-likelihood"])
    each = (_text(mean) for mean in _tried(part, key))
    return f"{_text(part['metrics'][key])} ({_text(error)})", ", ".join(each)


def _text(value: float) -> str:
    """Two digits; of what is far off, how far."""
    return f"{value:.2f}" if abs(value) < 1000 else f"{value:.0e}"


def _counted(verdicts: list[str]) -> str:
    """How many cells have which verdict, in words."""
    counts = Counter(words.split("; ")[0] for words in verdicts)
    said = "; ".join(f"{words}: {count}" for words, count in sorted(counts.items()))
    return f"of {len(verdicts)} cells, {said}"


def _measured(record: Record, name: str, scaling: str) -> Record | None:
    """The part of a set, or what stands in for it; None if there is neither."""
    part = part_of(record, label(name, scaling))
    return part_of(record, first_splits(name, scaling)) if part is None else part


def _fewer(record: Record) -> str:
    """Of how many splits cells are, and which sets have fewer, in words."""
    counts = {
        name: len(next(iter(part["series"].values()))["log-likelihood"])
        for scaling in SCALINGS
        for name in SETS
        if (part := _measured(record, name, scaling)) is not None
    }
    most = max(counts.values(), default=0)
    fewer = (f"; {TITLES[name]}: {count}" for name, count in counts.items() if count < most)
    return f" ({most}{''.join(fewer)})"


def _of_what(record: Record) -> str:
    whole = all(
        "tried on test, whole" in column
        for part in record["parts"]
        for column in part["series"].values()
    )
    return "" if whole else ", of networks that have not seen the held-out fifth"


def _chosen(record: Record, rows: Mapping[str, PublishedRow]) -> str:
    """How often held-out data chose the largest of the noises."""
    said = []
    for scaling in SCALINGS:
        noises = [
            noise
            for name in SETS
            if (part := _measured(record, name, scaling)) is not None
            for key in rows
            for noise in part["series"][key]["noise"]
        ]
        if noises:
            largest = sum(noise == max(GRID) for noise in noises)
            said.append(f"{largest} of {len(noises)} times {scaling}")
    return f" Held-out data chose the largest noise {', '.join(said)}." if said else ""


TABLES: dict[str, Callable[[Record], ShownTable]] = {
    "uci-printed": table,
    "uci-shared": shared_table,
}
