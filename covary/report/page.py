"""Results -> one HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from covary.files import escaped, write_atomically
from covary.report import figures, gallery, tables, words
from covary.report.drawing import Drawing, inline_svg, save
from covary.report.figures_attack import drawings as of_attacks
from covary.report.figures_budget import drawings as of_budget
from covary.report.figures_compare import drawings as of_comparison
from covary.report.figures_fidelity import drawings as of_fidelity
from covary.report.figures_rows import TARGETS
from covary.report.figures_rows import drawings as of_rows
from covary.report.figures_verify import drawings as of_verification
from covary.report.reading import Results
from covary.report.refusing import Curve, curves
from covary.runs.columns import LEAST_ROWS
from covary.runs.uncertainty import ANSWERED


def write(results: Results, target: Path) -> Path:
    """Write the page to ``target`` and its figures beside it, to ``figures/``."""
    found = curves(results)
    sections = drawings(results, found)
    html = _render(results, found, sections)
    for drawing in (drawing for section in sections.values() for drawing in section):
        save(drawing, target.parent / "figures")
    write_atomically(target, html.encode())
    return target


def drawings(results: Results, found: list[Curve]) -> dict[str, list[Drawing]]:
    """The figures of each section of the page."""
    columns = range(results.targets)
    uncertainty = [figures.entropy_histogram(results)]
    if results.is_classification:
        uncertainty.append(figures.probability_histogram(results))
        calibration = [figures.reliability(results), figures.accuracy_by_tenth(results)]
    else:
        uncertainty += [figures.stddev_histogram(results, column) for column in columns]
        calibration = [figures.predicted_against_true(results, column) for column in columns]
        calibration += [figures.residuals(results, column) for column in columns]
        calibration += [figures.spread_against_error(results, column) for column in columns]
        # In pairs: of two targets side by side, or two of the only one.
        place = 1 if len(columns) == 1 else len(calibration)
        calibration.insert(place, figures.interval_coverage(results))
    if results.evaluation.layers and len(figures.groups(results)) > 1:
        uncertainty.append(figures.entropy_by_layer(results))
    known = results.evaluation.separability.values()
    if any(value is not None for values in known for value in values):
        uncertainty.append(figures.separability_by_layer(results))
    sections = {
        "training": figures.histories(results),
        "uncertainty": uncertainty,
        "refusing": [
            figures.risk_coverage(results, [curve for curve in found if curve.target == column])
            for column in columns
        ],
        "calibration": calibration,
    }
    if results.distribution is not None and not results.evaluation.image_shape:
        sections["columns"] = of_rows(results.distribution)
    if results.evaluation.budget is not None:
        sections["budget"] = of_budget(results)
    fidelity, simulated, attacks = results.run.fidelity, results.simulated, results.run.attack
    if fidelity is not None and results.is_current(fidelity):
        sections["fidelity"] = of_fidelity(fidelity)
    if simulated is not None and results.is_current(simulated):
        sections["verification"] = of_verification(simulated)
    if results.comparison is not None:
        sections["comparison"] = of_comparison(results.comparison)
    if attacks is not None and results.is_current(attacks):
        sections["attacks"] = of_attacks(attacks)
    return sections


def _render(results: Results, found: list[Curve], sections: Mapping[str, list[Drawing]]) -> str:
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.FunctionLoader(_packaged),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    evaluation = results.evaluation
    shown = [(part, gallery.items(results, part)) for part in results.parts.values()]
    return environment.get_template("page.html.j2").render(
        results=results,
        evaluation=evaluation,
        drawings=sections,
        tables=tables,
        words=words,
        svg=lambda drawing: Markup(inline_svg(drawing)),
        style=Markup(_packaged("page.css")),
        script=Markup(_packaged("page.js")),
        data=Markup(embeddable(_curve_data(results, found))),
        scores=[curve.label for curve in found if curve.target == 0],
        contradictions=list(words.contradictions(evaluation.told)),
        gallery=gallery,
        shown_targets=TARGETS,
        slice_rows=LEAST_ROWS,
        galleries=[(part, found) for part, found in shown if found],
        commands=_commands(results),
        environment=_environment(results),
    )


def _packaged(name: str) -> str:
    return (files("covary.report") / name).read_text(encoding="utf-8")


def embeddable(value: Any) -> str:
    """JSON that may stand within a script element, whatever strings it has."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return escaped(text, "[<\u2028\u2029]")


def _curve_data(results: Results, found: list[Curve]) -> dict[str, Any]:
    """The curves as page.js draws them."""
    calibration = results.evaluation.calibration
    return {
        "held_out": 0 if calibration is None else calibration.held_out_samples,
        "answered": ANSWERED,
        "task": results.evaluation.task,
        "samples": len(results.test),
        "ood": [{"name": part.name, "samples": len(part)} for part in results.ood],
        "scores": [curve.to_json() for curve in found],
    }


def _commands(results: Results) -> list[str]:
    """What to type to get this run and what was measured of it again."""
    measured = (results.run.fidelity, results.simulated, results.run.attack)
    made = [results.run.environment, results.evaluation, *filter(results.is_current, measured)]
    commands = [one.command for one in made if one is not None and one.command]
    return list(dict.fromkeys(commands))  # a script may have done both at once


def _environment(results: Results) -> dict[str, str]:
    """Where and with what the run was made; what differs where it was evaluated, too."""
    trained, evaluated = results.run.environment, results.evaluation
    rows = {} if trained is None else _flat(vars(trained))
    kept = ("versions", "git_commit", "platform", "seed")
    for name, value in _flat({key: getattr(evaluated, key) for key in kept}).items():
        rows[f"{name} (evaluation)" if rows.get(name, value) != value else name] = value
    return rows


def _flat(entries: dict[str, Any]) -> dict[str, str]:
    """Entries that say something, in words, with versions among them."""
    flat = entries | entries["versions"]
    if flat.get("started"):
        flat["started"] = flat["started"].replace("T", " ")
    if flat.get("seconds") is not None:
        flat["duration"] = f"{flat['seconds']:,.1f} s"
    elsewhere = ("versions", "command", "notes", "seconds")  # on the page
    return {
        name.replace("_", " "): str(value)
        for name, value in flat.items()
        if name not in elsewhere and value not in (None, "")
    }
