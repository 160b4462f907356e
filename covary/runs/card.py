"""The card of a run's model: a README.md beside it, for whoever finds the folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from covary.data.columns import shortened
from covary.files import write_atomically
from covary.runs.directory import CARD_MARK, Run
from covary.uncertainty.metrics import METRICS

_CARD = """{mark}
# {name}

A moment neural network of the widths {widths} ({activation}) for {task} of {data}.
It gives each prediction with its uncertainty, from one forward pass.
Trained with covary {version}. Digest of the weights: `{digest}`.

## Data

{about_data}

## Metrics

{metrics}

## Limits

{limits}

## How to load it

    covary predict {name} NEW --out predictions.csv  # {new}

    import covary
    predictor = covary.Predictor.load("{name}")  # new rows or images -> predictions, and how sure
    net = covary.runs.open("{name}").network()   # the torch module: raw inputs -> covary.Moments

The weights are `model.safetensors`, whose metadata says which format it has. Nothing is pickled.
"""


def write_card(run: Run) -> bool:
    """Write the README.md of a trained run from its stored files; leave one that is not ours."""
    if run.card_path.exists() and not run.has_card:
        return False
    config = run.config
    text = _CARD.format(
        mark=CARD_MARK,
        name=run.path.resolve().name,
        widths="-".join(map(str, config.model.widths)),
        activation=config.model.activation,
        task=config.model.task,
        data=_code(Path(config.data.name).name),
        version=run.metadata.get("covary", ""),
        digest=run.weights,
        about_data=_lines(_about_data(run)),
        metrics=_metrics(run),
        limits=_lines(_limits(run)),
        new="a table with the same columns" if run.schema else "images of the same size",
    )
    write_atomically(run.card_path, text.encode())
    return True


def _about_data(run: Run) -> Iterable[str]:
    trained, schema, model = run.environment, run.schema, run.config.model
    if trained is not None:
        counts = trained.training_samples, trained.validation_samples, trained.test_samples
        used = ("trained on", "held out to watch training and to fit error bars", "to test on")
        yield "; ".join(f"{n or 0:,} samples {what}" for n, what in zip(counts, used, strict=True))
    if run.config.data.sha256:
        yield f"SHA-256 of the table: `{run.config.data.sha256}`"
    if schema is not None:
        yield f"Columns: {shortened(map(_code, schema.inputs), 25)}"
        yield f"Target: {shortened(map(_code, schema.targets), 25)}"
        if schema.classes:
            yield f"Classes: {shortened(map(_code, schema.classes), 25)}"
    elif model.is_image:
        channels, height, width = model.input_shape
        yield f"Images of {width} x {height} pixels, channels: {channels}; classes: {model.outputs}"
    yield from () if trained is None else trained.notes


def _metrics(run: Run) -> str:
    found = run.evaluation
    if found is None or not run.is_current(found):
        return f"None yet: `covary evaluate {run.path.resolve().name}` measures them."
    parts = found.told
    rows = [
        [METRICS[key].title, *(_number(part.get(key)) for part in parts.values())]
        for key in METRICS
        if any(key in part for part in parts.values())
    ]
    header = ["", *map(_code, parts)]
    lines = [header, ["---", *["---:"] * len(parts)], *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{table}\n\nWith {found.covariance} covariances, {found.started[:10]}."


def _limits(run: Run) -> Iterable[str]:
    yield (
        "Error bars are fitted to held-out data, and hold for data like these. covary predict flags"
        " what is not"
    )
    noise = ", ".join(f"{sigma:g}" for sigma in run.config.model.noise)
    yield (
        f"The covariance is that of noise of standard deviation {noise} on inputs and hidden layers"
        ", passed on by the weights. It is no posterior of the weights."
    )
    found = run.evaluation
    if found is not None and run.is_current(found):
        yield from found.notes


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _code(text: str) -> str:
    """A name of other people, so that nothing in it acts as markup."""
    return f"`{' '.join(text.replace('`', chr(39)).replace('|', '/').split())}`"


def _lines(points: Iterable[str]) -> str:
    return "\n".join(f"- {point.rstrip('.')}." for point in points)
