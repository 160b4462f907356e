"""Results -> one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from covary.files import write_atomically
from covary.report import (
    figures,
    figures_attack,
    figures_fidelity,
    figures_regression,
    figures_spikes,
    figures_verify,
    tables,
    trust,
    words,
)
from covary.report.curves import Curve, curves
from covary.report.drawing import Drawing, inline_svg, save
from covary.report.gallery import galleries
from covary.report.reading import Results
from covary.runs.predictions import Array
from covary.runs.results import SpikingVerification
from covary.uncertainty.metrics import METRICS


@dataclass(frozen=True)
class Section:
    """Figures under one heading."""

    key: str
    title: str
    text: str
    drawings: tuple[Drawing, ...]


def write(results: Results, target: Path) -> Path:
    """Write the page to ``target`` and its figures beside it, to ``figures/``."""
    found = curves(results)
    sections = _sections(results)
    fidelity = _fidelity(results)
    verification = _verification(results)
    attacks = _attacks(results)
    static = _static_curves(results, found)
    html = _render(results, found, sections, fidelity, verification, attacks, static)
    shown = [*sections, *(section for section in (fidelity, verification, attacks) if section)]
    for drawing in (*static, *(drawing for section in shown for drawing in section.drawings)):
        save(drawing, target.parent / "figures")
    write_atomically(target, html.encode())
    return target


def _render(
    results: Results,
    found: list[Curve],
    sections: list[Section],
    fidelity: Section | None,
    verification: Section | None,
    attacks: Section | None,
    static: list[Drawing],
) -> str:
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FunctionLoader(_packaged),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(svg=lambda drawing: Markup(inline_svg(drawing)), number=words.number)
    measured = results.fidelity if results.is_current(results.fidelity) else None
    simulated = results.simulated if results.is_current(results.simulated) else None
    attacked = results.attacks if results.is_current(results.attacks) else None
    return environment.get_template("page.html.j2").render(
        results=results,
        style=Markup(_packaged("page.css")),
        script=Markup(_packaged("page.js")),
        data=Markup(embeddable(_curve_data(results, found))),
        facts=_facts(results),
        notes=_notes(results),
        summary=words.summary(results),
        contradictions=list(words.contradictions(results.metrics)),
        sections=sections,
        fidelity=fidelity,
        fidelity_table=None if measured is None else tables.fidelity(measured),
        verification=verification,
        verified=None if simulated is None else tables.simulated(simulated),
        verified_notes=() if simulated is None else simulated.notes,
        score_table=trust.score_table(results),
        calibration_table=trust.calibration_table(results),
        attacks=attacks,
        attacked=attacked,
        attack_table=() if attacked is None else tables.attack(attacked),
        static=static,
        scores=found,
        galleries=galleries(results),
        metrics=_metric_rows(results),
        commands=_commands(results),
        environment=_environment(results),
    )


def _packaged(name: str) -> str:
    return (files("covary.report") / name).read_text(encoding="utf-8")


def embeddable(value: Any) -> str:
    """JSON that may stand within a script element, whatever strings it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _sections(results: Results) -> list[Section]:
    sections = [
        Section(
            "training",
            "Training",
            "" if results.history else "No training history was recorded for this run.",
            tuple(figures.histories(results)) if results.history else (),
        )
    ]
    entropies = [figures.entropy_histogram(results)]
    if results.is_classification:
        entropies.append(figures.softmax_histogram(results))
        text = (
            "Entropy measures how much the output varies when the noise of the network does. "
            "Max-softmax is the probability of the predicted class; any network has it, so "
            "it is what entropy has to be compared with."
        )
    else:
        text = "Entropy measures how much the output varies when the noise of the network does."
        columns = range(results.test.mean.shape[1])
        entropies += [figures.stddev_histogram(results, column) for column in columns]
    if results.layers and len(figures.groups(results)) > 1:
        entropies.append(figures.entropy_by_layer(results))
    if any(value is not None for values in results.separability.values() for value in values):
        entropies.append(figures.separability_by_layer(results))
    sections.append(Section("uncertainty", "Uncertainty", text, tuple(entropies)))
    if results.is_classification:
        text = (
            "If a network says 80%, it should be right four times out of five. This is about the "
            "probabilities; entropy is not one and has no such scale."
        )
        drawings = [figures.reliability(results), figures.accuracy_by_tenth(results)]
    else:
        text = (
            "Predicted standard deviations should be as large as errors turn out to be. They come "
            "from the noise put into the network, so nothing makes sure that they are."
        )
        drawings = _regression_calibration(results)
    sections.append(Section("calibration", "Calibration", text, tuple(drawings)))
    return sections


def _fidelity(results: Results) -> Section | None:
    """Cheaper covariances against the exact one; None if they were not compared."""
    measured = results.fidelity
    if measured is None:
        return None
    if not results.is_current(measured):
        text = (
            "Fidelity was measured of other weights than this page is about, so it is left out. "
            f"Measure it again: {measured.command}"
        )
        return Section("fidelity", "Fidelity", text, ())
    text = "How close each way of holding the covariance comes to the exact one, and what it costs."
    return Section("fidelity", "Fidelity", text, tuple(figures_fidelity.drawings(measured)))


def _verification(results: Results) -> Section | None:
    """Moments against simulations; None if there were none."""
    measured = results.simulated
    if measured is None:
        return None
    if not results.is_current(measured):
        text = (
            "Other weights than those this page is about were simulated, so that is left out. "
            f"Simulate these: {measured.command}"
        )
        return Section("verification", "Verification", text, ())
    kind = "spiking" if isinstance(measured, SpikingVerification) else "stochastic"
    text = (
        f"Moments are an approximation: here the {kind} network that they describe was simulated, "
        f"{words.number(measured.copies)} times for each of {words.number(len(measured.inputs))} "
        "test inputs, and each layer's moments are held against what came out."
    )
    drawings = (
        figures_spikes.drawings(measured)
        if isinstance(measured, SpikingVerification)
        else figures_verify.drawings(measured)
    )
    return Section("verification", "Verification", text, tuple(drawings))


def _attacks(results: Results) -> Section | None:
    """What attacks do to the network; None if there were none."""
    measured = results.attacks
    if measured is None:
        return None
    if not results.is_current(measured):
        text = (
            "Other weights than those this page is about were attacked, so that is left out. "
            f"Attack these: {measured.command}"
        )
        return Section("attacks", "Attacks", text, ())
    text = (
        "Inputs moved a little, on purpose, so that the network errs: how accurate it stays, and "
        "whether it notices. epsilon, how far an input is moved at most, is in "
        f"{measured.epsilon_unit}."
    )
    return Section("attacks", "Attacks", text, tuple(figures_attack.drawings(measured)))


def _regression_calibration(results: Results) -> list[Drawing]:
    """Figures in pairs: of two targets side by side, or two of the only one."""
    columns = range(results.test.mean.shape[1])
    predictions = [figures_regression.predicted_against_true(results, i) for i in columns]
    coverage = [figures_regression.interval_coverage(results)]
    rest = [figures_regression.residuals(results, i) for i in columns]
    rest += [figures_regression.spread_against_error(results, i) for i in columns]
    odd = len(columns) % 2
    return [*predictions, *coverage, *rest] if odd else [*predictions, *rest, *coverage]


def _static_curves(results: Results, found: list[Curve]) -> list[Drawing]:
    """What stands for the slider on paper."""
    if results.is_classification:
        return [figures.risk_coverage(results, found)]
    return [
        figures_regression.risk_coverage(results, curve, column)
        for column, curve in enumerate(found)
    ]


def _curve_data(results: Results, found: list[Curve]) -> dict[str, Any]:
    """The curves as page.js draws them."""
    return {
        "task": results.task,
        "samples": len(results.test),
        "foreign": [{"name": part.name, "samples": len(part)} for part in results.foreign],
        "scores": [
            {
                "key": curve.key,
                "label": curve.label,
                "rule": curve.rule,
                "threshold": _plain(curve.threshold),
                "answered": _plain(curve.answered),
                "loss": _plain(curve.loss),
                "foreign": [_plain(answered) for answered in curve.foreign],
            }
            for curve in found
        ],
    }


def _plain(values: Array) -> list[float | int | None]:
    """JSON knows no infinity; an entropy of minus infinity becomes null."""
    return [
        None if isinstance(value, float) and not math.isfinite(value) else value
        for value in values.tolist()
    ]


def _facts(results: Results) -> list[tuple[str, str]]:
    """The network and its training in a few words."""
    evaluation, model = results.evaluation, results.config.model
    widths = " \N{EN DASH} ".join(map(str, model.widths))
    held = evaluation.held
    if evaluation.fidelity is not None:
        rank, error = evaluation.fidelity.rank, evaluation.fidelity.error
        held += (
            f"; against exact ones: entropy rank {words.rank(rank)}, "
            f"off by {words.relative_error(error)}"
        )
    if model.covariance != evaluation.covariance:
        held += f" ({model.covariance} in training)"
    return [
        ("Dataset", results.dataset),
        ("Test inputs", words.number(len(results.test))),
        ("Network", f"{widths} behind a {model.trunk} trunk" if model.trunk else widths),
        ("Activation", model.activation),
        ("Noise \N{GREEK SMALL LETTER SIGMA}", ", ".join(f"{each:.3g}" for each in model.noise)),
        ("Covariance", held),
        ("Seed", str(results.config.training.seed)),
    ]


def _notes(results: Results) -> list[str]:
    """What is to be known of the data, and of how they were measured."""
    data = results.environment.notes if results.environment is not None else ()
    return [
        f"Note on the {kind}: {note.rstrip('.')}."
        for kind, notes in (("data", data), ("evaluation", results.evaluation.notes))
        for note in notes
    ]


def _metric_rows(results: Results) -> list[dict[str, Any]]:
    """A row for each metric: its title, its value for each part, its meaning."""
    given = dict.fromkeys(name for values in results.metrics.values() for name in values)
    known = [name for name in METRICS if name in given]
    rows = []
    for name in [*known, *(name for name in given if name not in known)]:
        title, meaning = words.title_and_meaning(name)
        values = [
            words.metric(name, part[name]) if name in part else ""
            for part in results.metrics.values()
        ]
        rows.append({"name": name, "title": title, "values": values, "meaning": meaning})
    return rows


def _commands(results: Results) -> list[str]:
    """What to type to get this run and what was measured of it again."""
    measured = (results.fidelity, results.simulated, results.attacks)
    made = [results.environment, results.evaluation, *filter(results.is_current, measured)]
    commands = [one.command for one in made if one is not None and one.command]
    return list(dict.fromkeys(commands))  # a script may have done both at once


def _environment(results: Results) -> list[tuple[str, str]]:
    """Where and with what the run was made, nested entries in a line each."""
    trained = {} if results.environment is None else results.environment.to_json()
    shown = ("command", "notes")  # elsewhere on the page
    rows = dict(_flat({key: value for key, value in trained.items() if key not in shown}))
    evaluated = results.evaluation.to_json()
    for key in ("versions", "git_commit", "platform", "seed"):
        for name, value in _flat({key: evaluated[key]}):
            if rows.get(name, value) != value:
                name = f"{name} (evaluation)"
            rows[name] = value
    return [(name, value) for name, value in rows.items() if value]


def _flat(entries: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in entries.items():
        name = f"{prefix}{key}".replace("_", " ").removeprefix("versions ")
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name} ")
        elif value is None:
            continue
        elif isinstance(value, list):
            yield name, ", ".join(map(str, value))
        elif key == "seconds" and isinstance(value, (int, float)):
            yield "duration", f"{value:,.1f} s"
        elif key == "started" and isinstance(value, str):
            yield name, _moment(value)
        else:
            yield name, str(value)


def _moment(text: str) -> str:
    try:
        return datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M %Z").strip().lstrip("0")
    except ValueError:
        return text
