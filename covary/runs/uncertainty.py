"""What held-out data of a run say about its uncertainty: a calibration, and a fitted score."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covary import activations
from covary.covariance import Full
from covary.data import Dataset
from covary.models import with_covariance, with_noise
from covary.moments import Moments
from covary.runs.config import RunConfig, check_covariance
from covary.runs.directory import Run, RunError, weights_digest
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import known_or_measured, quietly
from covary.uncertainty.calibration import (
    LogitCalibration,
    VarianceCalibration,
    choose_noise,
    fit_logits,
    fit_variance,
    from_dict,
)
from covary.uncertainty.features import FEATURES
from covary.uncertainty.fidelity import gathered
from covary.uncertainty.fitted import FittedScore, fit, fit_features

Progress = Callable[[Sequence[Any], str], Iterator[Any]]
Calibration = LogitCalibration | VarianceCalibration
# Network, held-out inputs and labels or targets -> noise of the layers, None to keep it.
Choice = Callable[[nn.Module, Tensor, Tensor], tuple[float, ...] | None]
# Held-out samples that are looked at: as many as a score of some dozens of features can use.
_MOST = 6000
_LEAST = 10
_TO_CHOOSE_NOISE = 2000
# Fewer than so many are worth a warning.
_FEW = 200
_TOO_FEW = (
    "There are too few held-out samples ({}) to calibrate or fit a score with; train with "
    "--validation 0.1."
)
NOISE = ("keep", "one", "per-layer")
_BATCH = 128
CALIBRATION = "calibration.json"
# The name of each score in results, the features it has, and its file.
SCORES = {
    "fitted": ("moments", "score.safetensors"),
    "fitted_plain": ("plain", "score-plain.safetensors"),
}


class HeldOut(NamedTuple):
    """What was found on held-out data; empty if there were none."""

    calibration: Calibration | None
    scores: dict[str, FittedScore]
    samples: int
    notes: list[str]
    noise: tuple[float, ...] | None = None  # of the layers, if it was chosen anew


def known_or_fitted(
    run: Run,
    net: nn.Module,
    dataset: Dataset,
    *,
    covariance: str,
    exact_width: int | None = None,
    progress: Progress | None = None,
) -> HeldOut:
    """What is in the run's folder if it is of these weights and covariances; else fit it now.

    What is there for other covariances of the same weights stays there: the noise that it has may
    have been chosen with care, and is taken here too.
    """
    about = _about(net, covariance, exact_width)
    known = _known(run, about)
    if known is not None:
        return known
    rows = _held_out(run.config(), dataset)
    if len(rows) < _LEAST:
        return HeldOut(None, {}, len(rows), [_TOO_FEW.format(len(rows))])
    before = _content(run)
    if before and before.get("weights") == about["weights"]:
        noise = None if before["noise"] is None else tuple(before["noise"])
        return _fitted(net, dataset, rows, _classifies(run), progress, lambda *_: noise)
    fitted = _fitted(net, dataset, rows, _classifies(run), progress)
    _write(run, fitted, about)
    return fitted


def uncertainty_of(run: Run) -> HeldOut:
    """The calibration and the scores that are kept with a run, to use on inputs of one's own.

    They are of the covariances that ``evaluate`` or ``calibrate`` had, ``"full"`` by default; where
    ``noise`` is not None, calibration is of ``covary.with_noise(net, noise)``.
    """
    content = _content(run)
    if content is None or content["weights"] != weights_digest(run.network()):
        raise RunError(
            f"{run.path} has no calibration of its weights yet: run covary evaluate or calibrate."
        )
    known = _known(run, {key: content[key] for key in ("weights", "covariance")})
    assert known is not None
    return known


def calibrate(
    run: Run,
    *,
    covariance: str | None = None,
    noise: str = "keep",
    data_dir: str | None = None,
    progress: Progress | None = None,
) -> HeldOut:
    """Fit a run's calibration and scores anew, and keep them in its folder.

    Only training data that were held out from training are looked at, with their labels for the
    calibration.

    Args:
        run: a trained run.
        covariance: how it is held, as in ``evaluate``.
        noise: of the calibrated network. ``"keep"`` that of training, or choose by the likelihood
            of held-out data: ``"one"`` for all layers, or ``"per-layer"``.
        data_dir: where data are looked for first.
        progress: wraps the batches, given a name, to show how far it is.
    """
    if noise != "keep" and activations.get(run.config().model.activation).neuron is not None:
        raise ValueError(
            "Noise is chosen among values for standardised inputs, which spiking neurons do not "
            "fire by; keep theirs (--noise keep)."
        )
    if noise not in NOISE:
        raise ValueError(f"Unknown choice of noise {noise!r}; known are {', '.join(NOISE)}.")
    config = run.config()
    kind = check_covariance(covariance, None, config.model)
    dataset, _ = load_data(config.data, data_dir=data_dir, seed=config.training.seed)
    rows = _held_out(config, dataset)
    if len(rows) < _LEAST:
        raise RunError(_TOO_FEW.format(len(rows)))
    net: nn.Module = run.network()
    width = None
    if kind == "tracked":
        known, _ = known_or_measured(run, net, dataset, progress=progress is not None)
        width = known.width(config.model.exact_width)
    net = with_covariance(net, kind, exact_width=width)
    choose: Choice = _as_it_is
    if noise != "keep":
        choose = partial(_chosen, per_layer=noise == "per-layer")
    with quietly():
        fitted = _fitted(net, dataset, rows, _classifies(run), progress, choose)
    _write(run, fitted, _about(net, kind, width))
    return fitted


def _held_out(config: RunConfig, dataset: Dataset) -> Tensor:
    """In random order, so that the first of them stand for all."""
    return validation_rows(len(dataset.x), config)[0][:_MOST]


def _about(net: nn.Module, covariance: str, exact_width: int | None) -> dict[str, str]:
    held = covariance if exact_width is None else f"{covariance}, exact_width {exact_width}"
    return {"weights": weights_digest(net), "covariance": held}


def _classifies(run: Run) -> bool:
    return run.config().model.task == "classification"


def _as_it_is(_net: nn.Module, _x: Tensor, _y: Tensor) -> None:
    """Keep the noise."""


def _chosen(net: nn.Module, x: Tensor, y: Tensor, *, per_layer: bool) -> tuple[float, ...]:
    some, device = slice(_TO_CHOOSE_NOISE), next(net.parameters()).device
    choice = choose_noise(net, x[some].to(device), y[some].to(device), per_layer=per_layer)
    return choice.noise


def _fitted(
    net: nn.Module,
    dataset: Dataset,
    rows: Tensor,
    classify: bool,
    progress: Progress | None,
    choose: Choice = _as_it_is,
) -> HeldOut:
    """Calibration and scores of a network; ``choose`` says which noise is to be calibrated."""
    x, y = dataset.x[rows], dataset.y[rows]
    values, moments = _looked_at(net, x, progress)
    classes = moments.mean.shape[-1] if classify else 1
    makers: dict[str, Callable[[], FittedScore]] = {
        "fitted": lambda: fit_features(values, moments.mean, classes=classes, features="moments"),
        "fitted_plain": lambda: fit(
            net, x.to(next(net.parameters()).device), features="plain", classify=classify
        ),
    }
    scores: dict[str, FittedScore] = {}
    missing = {}
    for name, make in makers.items():
        try:
            scores[name] = make()
        except ValueError as error:  # too few samples for so many features
            missing[name] = str(error)
    notes = [f"There is no {name.replace('_', ' ')} score: {missing[name]}" for name in missing][:1]
    noise = choose(net, x, y)
    if noise is not None:
        moments = _looked_at(with_noise(net, noise), x, progress)[1]
    calibration: Calibration = fit_logits(moments, y) if classify else fit_variance(moments, y)
    if len(x) < _FEW:
        notes.append(
            f"Calibration was fitted to only {len(x)} held-out samples: on others it may do no "
            "good. Hold out more with --validation, if there are more."
        )
    if not classify and _is_constant(calibration(moments).stddev):
        notes.append(
            "Calibration found no use for the covariance: calibrated standard deviations are the "
            "same for all inputs, to a percent."
        )
    return HeldOut(calibration, scores, len(x), notes, noise)


def _is_constant(stddev: Tensor) -> bool:
    return bool((stddev.std(0) < 0.01 * stddev.mean(0)).all())


@torch.no_grad()
def _looked_at(net: nn.Module, x: Tensor, progress: Progress | None) -> tuple[Tensor, Moments]:
    """Features (n, d) of all layers, and the moments of the output, on the CPU."""
    kind = FEATURES["moments"]
    device = next(net.parameters()).device
    outs, values = [], []
    batches = torch.split(x, _BATCH)
    with kind.watch(net) as seen:
        for some in progress(batches, "held-out data") if progress else batches:
            out: Moments = net(some.to(device))
            values.append(kind.of(seen, out).cpu())
            outs.append(gathered([out]))
    whole = gathered(outs)
    matrix = whole.covariance_matrix.cpu()
    return torch.cat(values), Moments(whole.mean.cpu(), Full(matrix, matrix.new_zeros(1, 1)))


def _write(run: Run, fitted: HeldOut, about: dict[str, str]) -> None:
    assert fitted.calibration is not None
    content = {
        **fitted.calibration.to_dict(),
        "noise": None if fitted.noise is None else list(fitted.noise),
        "samples": fitted.samples,
        "notes": fitted.notes,
        **about,
    }
    run.write_json(CALIBRATION, content)
    for name, (_, file) in SCORES.items():
        if name in fitted.scores:
            fitted.scores[name].save(run.path / file, **about)
        else:
            (run.path / file).unlink(missing_ok=True)


def _content(run: Run) -> dict[str, Any] | None:
    path = run.path / CALIBRATION
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _known(run: Run, about: dict[str, str]) -> HeldOut | None:
    content = _content(run)
    if content is None or any(content.get(key) != value for key, value in about.items()):
        return None
    scores = {}
    for name, (_, file) in SCORES.items():
        if (run.path / file).exists():
            score, told = FittedScore.load_with(run.path / file)
            if told != about:
                return None
            scores[name] = score
    noise = None if content["noise"] is None else tuple(content["noise"])
    return HeldOut(from_dict(content), scores, content["samples"], content["notes"], noise)
