"""Results of every experiment -> a page of Markdown, and one of HTML that needs nothing else."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup, escape

from covary.report.drawing import Drawing, inline_svg, save
from reproduction import reading
from reproduction.catalogue import EXPERIMENTS
from reproduction.experiment import FAILS, HOLDS, PARTLY, UNDECIDED, Experiment
from reproduction.figures import FIGURES, TABLES
from reproduction.figures.layout import ShownTable
from reproduction.store import configuration, sittings
from reproduction.summary import UNTESTED, InShort, summary
from reproduction.words import GLOSSARY, Judged, duration, judged
from reproduction.workshop import networks_in

FIGURE_FOLDER = "figures/reproduction"
# Verdicts on claims in the order in which they can be asked for.
KINDS = (HOLDS, PARTLY, FAILS, UNDECIDED, UNTESTED, "not measured", "not judged", "shown")


class Unfinished(NamedTuple):
    """What results leave open, and the command that would settle it."""

    what: str
    command: str


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
        scale = record["scale"] if record else "quick"
        words = self._words(scale)
        if record and (jobs := max((each["jobs"] for each in sittings(record)), default=1)) > 1:
            words += ["--jobs", str(jobs)]
        if record and self._missing:
            labels = {part["label"] for part in record["parts"]}
            words += _only(labels) if all(labels) else []
        return shlex.join(words)

    def _words(self, scale: str) -> list[str]:
        return ["python", "-m", "reproduction", "run", self.experiment.name, "--scale", scale]

    @property
    def unfinished(self) -> list[Unfinished]:
        """What is lacking, or shorter than in the paper."""
        record = self.record
        if record is None:
            return [Unfinished(self.verdict, shlex.join(self._words("paper")))]
        again = self._words(record["scale"])
        found = []
        if self._missing:
            found.append(
                Unfinished(
                    f"not measured: {self.missing}", shlex.join(again + _only(self._missing))
                )
            )
        if self.lacks:
            found.append(Unfinished(self.lacks, shlex.join(again)))
        known = {each.command for each in found}
        for command in dict.fromkeys(row.command for row in self.claims if row.command):
            if command not in known:
                found.append(Unfinished("lacks what a claim compares with", command))
        if self.outdated:
            found.append(Unfinished("of other settings than it has now", shlex.join(again)))
        if record["scale"] != "paper":
            words = shlex.join(self._words("paper"))
            found.append(Unfinished("shorter or of fewer networks than in the paper", words))
        return found

    @property
    def lacks(self) -> str:
        """What results of an earlier revision lack; nothing if they are of the one of now."""
        if self.record is None:
            return ""
        estimated = any(
            value
            for part in self.record["parts"]
            for name, value in part["metrics"].items()
            if name.endswith("_estimated")
        )
        earlier = self.experiment.earlier
        # Parts that were not measured again stay as they were.
        every = "; ".join(earlier.values()) if estimated else ""
        return earlier.get(self.record.get("revision") or 0, every)

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
        is_open = any(each in self.verdict for each in (UNTESTED, UNDECIDED))
        return f"{plain} so far" if is_open and plain == HOLDS else plain

    @property
    def missing(self) -> str:
        """Parts that were not measured, in words."""
        counted = Counter(label or "parts" for label in self._missing)
        return ", ".join(f"{label} ({count})" for label, count in counted.items())

    @property
    def time(self) -> str:
        """How long it took to measure it and to train its networks."""
        record = self.record
        return duration(record["seconds"] + record["training_seconds"]) if record else ""

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
            "time": self.time + _at_a_time(record),
            "date": " to ".join(sorted({days[0], days[-1]})),
            "commit": ", ".join(
                dict.fromkeys(_short(part["git_commit"]) for part in record["parts"])
            ),
            "torch": record["versions"].get("torch", "unknown"),
        }


def _only(labels: Iterable[str]) -> list[str]:
    return [word for label in sorted(set(labels)) for word in ("--only", label)]


def _repeats(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """Over what the numbers that claims are about vary: seeds, or splits of a set."""
    splits = {count for each in record["config"] if (count := each["settings"].get("splits", 0))}
    if splits:
        return " to ".join(map(str, sorted({min(splits), max(splits)}))) + " splits"
    about = [
        Counter(part["label"] for part in claim.parts(record))
        for claim in experiment.counted
        if not claim.of
    ]
    counts = {label: count for each in about for label, count in each.items()}
    every = Counter(part["label"] for part in record["parts"])
    numbers = sorted({min(counts.values(), default=0), max(counts.values(), default=0)})
    said = " to ".join(map(str, numbers)) + (" seed" if numbers == [1] else " seeds")
    beside = sum(every.values()) - sum(counts.values())
    return f"{said}, and {beside} part{'s' * (beside > 1)} of ours" if beside else said


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
    return [_section(each, reading.read(results, each)) for each in EXPERIMENTS]


def _section(experiment: Experiment, record: Mapping[str, Any] | None) -> Section:
    if record is None:
        return Section(experiment, None, "not run", (), None, None)
    if not experiment.shows(record.get("revision") or 0):
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
        + _against(experiment, record)
        + _rests(experiment, record),
        tuple(judged(claim, record) for claim in experiment.claims),
        FIGURES[name](record) if name in FIGURES else None,
        TABLES[name](record) if name in TABLES else None,
    )


def _is_outdated(experiment: Experiment, record: Mapping[str, Any]) -> bool:
    """Whether any of its parts has other settings now; parts that are new are only missing."""
    now = configuration(experiment, record["scale"])
    return any(each not in now for each in record["config"])


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
    counted = experiment.counted
    ours = [claim for claim in experiment.claims if claim.ours and not claim.goal]
    beside = [claim for claim in ours if claim not in counted]
    verdicts = [claim.verdict(record) for claim in beside]
    known = [verdict for verdict in verdicts if verdict is not None]
    agree = known.count(HOLDS)
    return f"; of ours {agree} of {len(known)} hold" if agree < len(known) else ""


def _rests(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """That it rests on one seed, or on less than the paper has, where it does."""
    if record["scale"] == "smoke":
        return ""
    alone = _repeats(experiment, record).startswith("1 seed")
    quick = record["scale"] == "quick"
    found = [*(["one seed"] if alone else []), *(["quick"] if quick else [])]
    return f"; {', '.join(found)}" if found else ""


def write(results: Path, *, markdown: Path, html: Path, readme: Path | None = None) -> None:
    """Write what the experiments gave beside what the paper says, as two pages.

    Args:
        results: folder of ``<name>.json`` files; experiments that it lacks are named as not run.
        markdown: the page to write, with figures beside it, in ``figures/reproduction``.
        html: the same as one file, which holds its figures.
        readme: what to write on how each experiment is run, and how long it takes; nothing if None.

    Raises:
        ResultError: if one of the files is not as ``python -m reproduction run`` writes it.
    """
    found = sections(results)
    for section in found:
        if section.drawing is not None:
            save(section.drawing, markdown.parent / FIGURE_FOLDER, svg=False)
    pages = {markdown: "page.md.j2", html: "page.html.j2"}
    if readme is not None:
        pages[readme] = "readme.md.j2"
    for target, template in pages.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_render(template, found, results), encoding="utf-8")


def _render(template: str, found: list[Section], results: Path) -> str:
    here = Path(__file__).parent
    environment = jinja2.Environment(
        autoescape=template.endswith(".html.j2"),
        loader=jinja2.FileSystemLoader(here),
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
        short=_in_short(found),
        verdicts={"holds": HOLDS, "partly": PARTLY, "fails": FAILS},
        counted=Counter(row.kind for section in found for row in section.claims),
        kinds=KINDS,
        style=Markup((files("covary.report") / "page.css").read_text(encoding="utf-8")),
        script=Markup((here / "page.js").read_text(encoding="utf-8")),
        folder=FIGURE_FOLDER,
        glossary=GLOSSARY,
        results=_place(results),
    )


def _in_short(found: Sequence[Section]) -> InShort:
    return summary((section.experiment, section.record) for section in found)


def _place(results: Path) -> str:
    """The folder of results as the page names it: from the root of the repository, if it is there.

    Where that root is on this machine says nothing to a reader.
    """
    root, folder = Path(__file__).parents[1], results.resolve()
    return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else folder.name


def _with_code(text: str) -> Markup:
    """Words of Markdown for HTML, in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))
