"""Results of every experiment -> a page of Markdown, and one of HTML that needs nothing else."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from covary.report.drawing import Drawing, inline_svg, save
from reproduction.catalogue import EXPERIMENTS
from reproduction.experiment import HOLDS, Experiment
from reproduction.figures import FIGURES, TABLES
from reproduction.figures.layout import ShownTable
from reproduction.store import configuration, load, sittings
from reproduction.words import GLOSSARY, Judged, duration, judged
from reproduction.workshop import networks_in

FIGURE_FOLDER = "figures/reproduction"


@dataclass(frozen=True)
class Section:
    """An experiment on the page."""

    experiment: Experiment
    record: Mapping[str, Any] | None
    verdict: str
    claims: tuple[Judged, ...]
    drawing: Drawing | None
    table: ShownTable | None

    @property
    def command(self) -> str:
        """What makes its results."""
        record = self.record
        measured = sorted({part["label"] for part in record["parts"]}) if record else []
        return self._command(measured if self._missing else [])

    @property
    def rest(self) -> str:
        """What measures the parts that are missing."""
        return self._command(sorted(set(self._missing)))

    def _command(self, labels: Sequence[str]) -> str:
        """What measures the parts of these labels, or all."""
        record = self.record
        scale = record["scale"] if record else "quick"
        words = ["python", "-m", "reproduction", "run", self.experiment.name, "--scale", scale]
        if record and (jobs := max((each["jobs"] for each in sittings(record)), default=1)) > 1:
            words += ["--jobs", str(jobs)]
        for label in labels:
            words += ["--only", label]
        return shlex.join(words)

    @property
    def _missing(self) -> list[str]:
        """The labels of parts that the experiment has and the results have not."""
        if self.record is None:
            return []
        there = {(part["label"], part["seed"]) for part in self.record["parts"]}
        wanted = self.experiment.parts[self.record["scale"]]
        return [part.label for part in wanted if (part.label, part.seed) not in there]

    @property
    def outdated(self) -> bool:
        """Whether the experiment has other settings now than its results were made with."""
        return self.record is not None and _is_outdated(self.experiment, self.record)

    @property
    def plain_verdict(self) -> str:
        """The verdict without numbers."""
        plain = re.split(r" \(|, |;", self.verdict)[0]
        return f"{plain} so far" if "not tested" in self.verdict and plain == HOLDS else plain

    @property
    def missing(self) -> str:
        """Parts that were not measured, in words."""
        counted = Counter(label or "parts" for label in self._missing)
        return ", ".join(f"{label} ({count})" for label, count in counted.items())

    @property
    def facts(self) -> dict[str, str]:
        """Scale, seeds, time and origin."""
        record = self.record
        if record is None:
            return {"scale": "none yet", "over": "", "time": ""}
        days = sorted(part.get("measured", record["started"])[:10] for part in record["parts"])
        return {
            "scale": record["scale"],
            "over": _repeats(self.experiment, record),
            "time": duration(record["seconds"] + record["training_seconds"]) + _at_a_time(record),
            "date": " to ".join(sorted({days[0], days[-1]})),
            "commit": ", ".join(
                dict.fromkeys(_short(part["git_commit"]) for part in record["parts"])
            ),
            "torch": record["versions"].get("torch", "unknown"),
        }


def _repeats(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """Over what the numbers that claims are about vary: seeds, or splits of a set."""
    splits = {each["settings"].get("splits", 0) for each in record["config"]}
    if max(splits, default=0):
        return " to ".join(map(str, sorted({min(splits), max(splits)}))) + " splits"
    counted = [claim.labels for claim in experiment.claims if not claim.ours]
    labels = {label for each in counted for label in each}
    every = Counter(part["label"] for part in record["parts"])
    counts = every if () in counted else {key: every[key] for key in every if key in labels}
    numbers = sorted({min(counts.values(), default=0), max(counts.values(), default=0)})
    said = " to ".join(map(str, numbers)) + (" seed" if numbers == [1] else " seeds")
    beside = sum(every.values()) - sum(counts.values())
    return f"{said}, and {beside} parts of ours" if beside else said


def _at_a_time(record: Mapping[str, Any]) -> str:
    """How long it took by the clock, where all of it was measured by several processes at once."""
    times = [each for each in sittings(record) if each["parts"]]
    whole = sum(each["parts"] for each in times) >= len(record["parts"])
    jobs = min((each["jobs"] for each in times), default=1)
    if jobs == 1 or not whole or record["training_seconds"]:
        return ""
    by_clock = sum(each["seconds"] for each in times)
    return f" ({duration(by_clock)} by the clock with {jobs} processes)"


def _short(commit: str | None) -> str:
    if commit is None:
        return "unknown"
    return commit[:7] + (", changed" if commit.endswith("-dirty") else "")


def sections(results: Path) -> list[Section]:
    """Every experiment with what a folder of results has of it, in the paper's order."""
    return [_section(each, load(results, each.name)) for each in EXPERIMENTS]


def _section(experiment: Experiment, record: Mapping[str, Any] | None) -> Section:
    if record is None:
        return Section(experiment, None, "not run", (), None, None)
    if record.get("revision", 0) != experiment.revision:
        # What there is of it may not be what the figure shows.
        return Section(experiment, None, "measured in another way before", (), None, None)
    name = experiment.name
    return Section(
        experiment,
        record,
        experiment.verdict(record)
        + (f"; {experiment.proviso}" if experiment.proviso else "")
        + ("; on a trunk that was trained before" if _borrows(record) else "")
        + ("; of other settings than it has now" if _is_outdated(experiment, record) else "")
        + _against(experiment, record),
        tuple(judged(claim, record) for claim in experiment.claims),
        FIGURES[name](record) if name in FIGURES else None,
        TABLES[name](record) if name in TABLES else None,
    )


def _is_outdated(experiment: Experiment, record: Mapping[str, Any]) -> bool:
    return bool(record["config"] != configuration(experiment, record["scale"]))


def _borrows(record: Mapping[str, Any]) -> bool:
    """Whether networks took their convolutions from another one, and trained what is behind."""
    return any(
        "trunk_of" in network
        for each in record["config"]
        for network in networks_in(each["settings"])
    )


def _against(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """How much of what we looked at besides holds, in words, where not all of it does."""
    if record["scale"] == "smoke":
        return ""
    beside = [claim for claim in experiment.claims if claim.ours and not claim.goal]
    verdicts = [claim.verdict(record) for claim in beside]
    known = [verdict for verdict in verdicts if verdict is not None]
    agree = known.count(HOLDS)
    return f"; of ours {agree} of {len(known)} hold" if agree < len(known) else ""


def unknown(found: Sequence[Section]) -> dict[str, list[Section]]:
    """Experiments whose results leave something open, by what that is."""
    return {
        "not run, or not with the settings of now": [
            each for each in found if each.record is None or each.outdated
        ],
        "shorter than in the paper": [
            each for each in found if each.record and each.facts["scale"] != "paper"
        ],
        "of one seed": [each for each in found if each.facts["over"].startswith("1 seed")],
        "with claims not tested": [each for each in found if "not tested" in each.verdict],
    }


def write(results: Path, *, markdown: Path, html: Path) -> None:
    """Write what the experiments gave beside what the paper says, as two pages.

    Args:
        results: folder of ``<name>.json`` files; experiments that it lacks are named as not run.
        markdown: the page to write, with figures beside it, in ``figures/reproduction``.
        html: the same as one file, which holds its figures.

    Raises:
        ResultError: if one of the files is not as ``python -m reproduction run`` writes it.
    """
    found = sections(results)
    for section in found:
        if section.drawing is not None:
            save(section.drawing, markdown.parent / FIGURE_FOLDER, svg=False)
    for target, template in ((markdown, "page.md.j2"), (html, "page.html.j2")):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_render(template, found, results), encoding="utf-8")


def _render(template: str, found: list[Section], results: Path) -> str:
    environment = jinja2.Environment(
        autoescape=template.endswith(".html.j2"),
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(svg=lambda drawing: Markup(inline_svg(drawing)))
    environment.filters["code"] = _with_code
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|").replace("\n", " ")
    return environment.get_template(template).render(
        sections=found,
        counted=Counter(section.plain_verdict for section in found),
        unknown=unknown(found),
        style=Markup((files("covary.report") / "page.css").read_text(encoding="utf-8")),
        folder=FIGURE_FOLDER,
        glossary=GLOSSARY,
        results=_place(results),
    )


def _place(results: Path) -> str:
    """The folder of results as the page names it: from the root of the repository, if it is there.

    Where that root is on this machine says nothing to a reader.
    """
    root, folder = Path(__file__).parents[1], results.resolve()
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name


def _with_code(text: str) -> Markup:
    """Words of Markdown for HTML, in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
