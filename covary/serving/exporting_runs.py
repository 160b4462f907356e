"""A trained run as a file that other programs load: what ``covary export`` does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary import runs
from covary.covariance import Full
from covary.moments import Moments
from covary.nn import Standardize
from covary.progress import Steps
from covary.runs.records import to_json
from covary.serving.exporting import OUTPUTS, Exported, check_path, named_moments, write
from covary.serving.predictor import Predictor

RUN_OUTPUTS = ("predictions", *OUTPUTS)
_EXAMPLES = 64
_MEANINGS = {
    "mean": "what the network gives: targets in their units, or logits",
    "covariance": "of the mean",
    "std": "standard deviation of the prediction, or of the mean",
    "prediction": "targets in their units",
    "probability": "of each class, calibrated",
    "uncertainty": "higher is less sure: the probability of another class, or the std",
    "novelty": "distance from the training data in standard deviations; 0 is inside",
}


def export_run(
    run: Path | str,
    path: Path | str,
    *,
    outputs: str = "",
    overwrite: bool = False,
    latency: Sequence[int] = (),
    data_dir: str | None = None,
    progress: Steps | None = None,
) -> Exported:
    """Write a run to a file ``.onnx`` or ``.pt2``: inputs as raw as the run takes them.

    These are bytes of images (B, C, H, W), or encoded features (B, d) in the order of the schema,
    which stands in the metadata; of a table with columns of errors, ``error`` (B, d) is a second
    input, the standard deviations.

    Args:
        run: the folder.
        path: ends in ``.onnx`` or ``.pt2``.
        outputs: ``"predictions"``, what ``covary predict`` has of plain numbers, with mean and
            covariance of the network that it uses; or ``"covariance"`` or ``"std"``, mean and
            one of them of the run's own network. By default predictions, where the run has them.
        overwrite: replace a file that is there.
        latency: batch sizes at which to measure how long network and file take.
        data_dir: where data are looked for first.
        progress: wraps batches where predictions are fitted first.
    """
    check_path(Path(path), overwrite=overwrite)
    opened = runs.open(run, data_dir=data_dir)
    if not opened.model_path.exists():
        raise runs.RunError(
            f"{opened.path} is not trained to its end. Go on with it first: the same covary train "
            "command, with --resume."
        )
    can_predict = opened.schema is not None or opened.images is not None
    outputs = outputs or ("predictions" if can_predict else "covariance")
    if outputs not in RUN_OUTPUTS:
        raise ValueError(f"Outputs are one of {', '.join(RUN_OUTPUTS)}, got {outputs!r}.")
    about = _about(opened)
    net: nn.Module
    if outputs == "predictions":
        predictor = Predictor.load(run, data_dir=data_dir, progress=progress)
        net, function = predictor.model.net, predictor.model.tensors
        about |= {"answer_up_to": {"uncertainty": predictor.threshold, "novelty": predictor.limit}}
        about |= {"covariance": predictor.model.covariance}
    else:
        net = opened.network()
        function = partial(named_moments, net, outputs=outputs)
        about |= {"covariance": opened.config.model.covariance}
    inputs = _examples(opened, net)
    with_errors = (lambda x, error: function(_measured(x, error))) if len(inputs) > 1 else function
    return write(with_errors, Path(path), inputs, about=about, latency=latency)


def _measured(x: Tensor, error: Tensor) -> Moments:
    """Values with independent errors; not by ``Moments.of``, which looks at them."""
    return Moments(x, Full(None, error.square()))


def _examples(run: runs.Run, net: nn.Module) -> dict[str, Tensor]:
    """Inputs such as the run may get, without its data: by the scale that it has learned."""
    shape, generator = run.config.model.input_shape, torch.Generator().manual_seed(0)
    if run.config.model.is_image:
        images = torch.randint(0, 256, (_EXAMPLES, *shape), generator=generator)
        return {"x": images.to(torch.uint8)}
    x = torch.randn(_EXAMPLES, *shape, generator=generator, dtype=torch.float64)
    scale = next((layer for layer in net.modules() if isinstance(layer, Standardize)), None)
    if scale is not None:
        x = x * scale.scale + scale.shift
    if run.schema is None or not run.schema.errors:
        return {"x": x}
    unit = 1.0 if scale is None else scale.scale
    known = [float(name in run.schema.errors) for name in run.schema.features]
    return {"x": x, "error": (0.1 * unit * torch.tensor(known)).double().expand_as(x).clone()}


def _about(run: runs.Run) -> dict[str, Any]:
    """What a program that loads the file should know of the run."""
    config, schema = run.config, run.schema
    classes = schema.classes if schema else run.images.classes if run.images else ()
    found: dict[str, Any] = {
        "model_digest": run.weights,
        "data": Path(config.data.name).name,  # of a table its file, wherever it lay
        "task": config.model.task,
        "meanings": _MEANINGS,
    }
    found |= {"classes": list(classes)} if classes else {}
    if schema is not None:
        found |= {"features": list(schema.features), "schema": to_json(schema)}
        found |= {} if classes else {"targets": list(schema.targets)}
    return found
