"""Tables of the page: what was measured, as rows of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from markupsafe import Markup

from covary.compare import Comparison
from covary.compare.methods import CLASSIFICATION, REGRESSION
from covary.report import words
from covary.report.reading import Results
from covary.runs.results import Attack, FidelityResult, SpikingVerification, SteadyVerification
from covary.uncertainty.metrics import METRICS
from covary.uncertainty.scores import about

# measure -> its column
_SECOND = {"variance": "variance error", "covariance": "covariance error"}
_PAIRS = {"off_diagonal": "error of pairs"}
_MOMENTS = {"mean": "mean error", **_SECOND, **_PAIRS}
_SPIKES = {"rate": "rate error", "fano": "Fano factor error", **_SECOND, **_PAIRS}
_FIDELITY = {"mean": "mean error", **_SECOND, "rank": "entropy rank", "argmax": "other class"}


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its name, a mark beside it, cells, and what it means."""

    name: str
    cells: Sequence[str]
    mark: str = ""
    meaning: str = ""
    metric: str = ""


@dataclass(frozen=True)
class Table:
    """Columns of words, and a row for each thing that has them.

    ``groups`` are titles above so many columns each; ``meaning`` is that of a last column of words.
    """

    label: str
    first: str
    columns: Sequence[str]
    rows: Sequence[TableRow]
    groups: Sequence[tuple[str, int]] = ()
    meaning: str = ""

    @property
    def begins(self) -> set[int]:
        """The columns that stand first in their group."""
        return {0, *accumulate(columns for _, columns in self.groups)} if self.groups else set()


def scores(results: Results) -> Table | None:
    """A row for each score: what it finds among test inputs, and of each OOD set."""
    by_part = results.evaluation.scores
    if not by_part:
        return None
    kind, first = "auroc", "errors"
    if not results.is_classification:
        kind, first = "spearman_error", "size of errors (rank correlation)"
    ood = [name for name in by_part if name != "test"]
    columns = [{name: row[kind] for name, row in by_part["test"].items()}]
    columns += [{name: row["auroc"] for name, row in by_part[part].items()} for part in ood]
    rows = []
    for score in map(about, by_part["test"]):
        cells = [_or_best(column, score.name) for column in columns]
        rows.append(TableRow(score.title, cells, meaning=score.meaning))
    return Table("What each score finds", "Score", [first, *ood], rows, meaning="What it is")


def _or_best(column: Mapping[str, float | None], name: str) -> str:
    """A number of a column, bold if it is the largest."""
    text, value = words.number(column[name]), column[name]
    known = [other for other in column.values() if other is not None]
    return Markup("<b>{}</b>").format(text) if known and value == max(known) else text


def calibration(results: Results) -> Table | None:
    """The test set's numbers with calibration, and before."""
    found, before = results.evaluation.calibration, results.evaluation.parts["test"]
    if found is None:
        return None
    shared = [name for name in METRICS if name in found.test and name in before]
    rows = [
        TableRow(
            METRICS[name].title, [words.metric(name, part[name]) for part in (found.test, before)]
        )
        for name in shared
        if name != "samples"
    ]
    columns = ("calibrated", "before calibration")
    if not results.is_classification:
        columns = ("distributions", "network alone")
    return Table("With calibration, and without", "Test inputs", columns, rows)


def metrics(results: Results) -> Table:
    """A row for each metric: its title, its value for each part, its meaning."""
    parts = results.evaluation.parts
    given = dict.fromkeys(name for values in parts.values() for name in values)
    rows = []
    for name in dict.fromkeys([*(name for name in METRICS if name in given), *given]):
        title, meaning = words.title_and_meaning(name)
        cells = [words.metric(name, part[name]) if name in part else "" for part in parts.values()]
        rows.append(TableRow(title, cells, meaning=meaning, metric=name))
    return Table("All metrics", "Metric", list(parts), rows, meaning="What it means")


def fidelity(measured: FidelityResult) -> Table:
    """Each way of storing the covariance against the exact one, and what it costs."""
    columns = [name for name in _FIDELITY if name != "argmax" or measured.task == "classification"]
    marks = {measured.chosen: "chosen", "full": "exact"}
    groups, rows = [("cost", 2)], []
    for part in measured.parts:
        samples = [way.of(part, "samples") for way in measured.representations][:1]
        counted = f" ({words.number(samples[0])} inputs)" if any(samples) else ""
        groups.append((part + counted, len(columns)))
    for way in measured.representations:
        cells = [words.amount(way.time_over_plain), words.amount(way.peak_memory_mb)]
        cells += [
            words.fidelity(name, way.of(part, name)) for part in measured.parts for name in columns
        ]
        rows.append(TableRow(way.name, cells, marks.get(way.name, "")))
    titles = ["time, \N{MULTIPLICATION SIGN}\N{NO-BREAK SPACE}plain", "memory, MB"]
    titles += [_FIDELITY[name] for _ in measured.parts for name in columns]
    return Table("Fidelity and cost of each covariance", "Covariance", titles, rows, groups)


def simulated(measured: SteadyVerification | SpikingVerification) -> Table:
    """Each layer's moments against a simulation."""
    rows = []
    if isinstance(measured, SpikingVerification):
        columns = ["units", "spikes/s", "Fano factor", *_SPIKES.values(), "noise of rates"]
        for neurons in measured.layers:
            fano = neurons.mean_fano
            cells = [f"{neurons.units:,}", f"{1000 * neurons.mean_rate:.1f}"]
            cells += [words.NOTHING if fano is None else f"{fano:.2f}"]
            cells += [words.measured(neurons.errors[key]) for key in _SPIKES]
            cells += [words.tenths(neurons.errors["rate"].floor)]
            rows.append(TableRow(neurons.name, cells, "poor" if neurons.poor else ""))
    else:
        columns = ["units", *_MOMENTS.values(), "noise of covariance", "entropy gap, nats"]
        columns += ["variance, at once", "variance, equal \N{GREEK SMALL LETTER TAU}"]
        for layer in measured.layers:
            steady, in_time = layer.steady, [layer.simulations[name] for name in ("ou-0", "ou-1")]
            cells = [f"{layer.units:,}"]
            cells += [words.measured(getattr(steady, key)) for key in _MOMENTS]
            cells += [words.tenths(steady.covariance.floor), words.measured(steady.entropy)]
            cells += [words.measured(each.variance_share) for each in in_time]
            rows.append(TableRow(layer.name, cells, "poor" if layer.poor else ""))
    return Table("Moments against a simulation", "Layer", columns, rows)


def comparison(measured: Comparison) -> Table:
    """Each method's predictions, and what it costs, on average over seeds."""
    names = CLASSIFICATION if measured.task == "classification" else REGRESSION
    names = (*names, "fit_seconds")
    rows = []
    for row in {row.method: row for row in reversed(measured.rows)}.values():
        found = [(name, row.summary.get(name)) for name in names]
        cells = [words.metric(name, None if one is None else one.mean) for name, one in found]
        cells.append(words.amount(row.inference_cost))
        rows.append(TableRow(row.method, cells, meaning=row.description))
    columns = [*(METRICS[name].short for name in names), "inference"]
    return Table("Beside other methods", "Method", columns, rows[::-1], meaning="What it is")


def attacks(measured: Attack) -> Table:
    """Accuracy of each network under each attack, at each epsilon where it was measured."""
    rows = []
    for network in measured.networks:
        for name in measured.names(network.name):
            known = {row.epsilon: f"{row.accuracy:.3f}" for row in measured.of(name, network.name)}
            cells = [network.name, *(known.get(epsilon, "") for epsilon in measured.epsilons)]
            rows.append(TableRow(words.attack_title(name), cells))
    groups = [("", 1), ("accuracy at epsilon", len(measured.epsilons))]
    columns = ["network", *(f"{epsilon:g}" for epsilon in measured.epsilons)]
    return Table("Accuracy under attack", "Attack", columns, rows, groups)
