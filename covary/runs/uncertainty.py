"""Calibration and scores of a run's network, fitted to held-out training data."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from covary import activations
from covary.covariance import Full
from covary.inputs import in_batches
from covary.models import with_covariance, with_noise
from covary.moments import Moments, mean_of
from covary.progress import Steps
from covary.runs.directory import HELD_OUT, Run, RunError
from covary.runs.results import Calibration, HeldOut
from covary.runs.samples import LEAST, enough, validation_rows
from covary.runs.tracking import Chosen, chosen, quietly
from covary.uncertainty.agreement import gathered
from covary.uncertainty.calibration import choose_noise, fit_logits, fit_variance
from covary.uncertainty.fitted import (
    FittedScore,
    cross_fitted,
    features_of,
    fit_features,
    moment_features,
)
from covary.uncertainty.scores import expected_max, of_moments

# Held-out samples that are looked at: as many as a score of some dozens of features can use.
_MOST = 6000
_TO_CHOOSE_NOISE = 2000
# Fewer than so many are worth a warning.
_FEW = 200
ANSWERED = 0.85  # the part of held-out inputs that a recommended threshold answers
NOISE = ("keep", "one", "per-layer")
_BATCH = 128


def _told_too_few(run: Run, rows: int) -> str:
    return (
        f"There are too few held-out samples ({rows}) to calibrate or fit a score with; train with "
        f"{enough(len(run.data.x))}."
    )


def known_or_fitted(
    run: Run, net: nn.Module, how: Chosen, *, progress: Steps | None = None
) -> HeldOut:
    """What is in the run's folder if it is of these weights and covariances; else fit it now.

    What is there for other covariances of the same weights stays there: the noise that it has may
    have been chosen with care, and is taken here too. ``net`` is the run's network, which stores
    its covariances as ``how`` says.
    """
    kept, covariance = run.kept_calibration, how.covariance
    if kept is not None and kept.weights != run.weights:
        kept = None
    if kept is not None and kept.covariance == covariance and run.held_out is not None:
        return run.held_out
    rows = _held_out(run)
    if len(rows) < LEAST:
        return HeldOut(None, {}, len(rows), [_told_too_few(run, len(rows))])
    if kept is not None and kept.covariance != covariance:
        return _fitted(run, net, rows, progress, kept.noise)
    fitted = _fitted(run, net, rows, progress)
    run.save_held_out(fitted, covariance)
    return fitted


def uncertainty_of(run: Run) -> HeldOut:
    """The calibration and the scores that are kept with a run, to use on inputs of one's own.

    They are of the covariances that ``evaluate`` or ``calibrate`` had, which
    ``run.kept_calibration`` names; where ``noise`` is not None, calibration is of
    ``covary.with_noise(net, noise)``.
    """
    known = run.held_out
    if known is None:
        raise RunError(
            f"{run.path} has no calibration of its weights yet: run covary evaluate or calibrate."
        )
    return known


def calibrate(
    run: Run,
    *,
    covariance: str | None = None,
    noise: str = "keep",
    progress: Steps | None = None,
) -> HeldOut:
    """Fit a run's calibration and scores anew, and keep them in its folder.

    Only training data that were held out from training are looked at, with their labels for the
    calibration.

    Args:
        run: a trained run.
        covariance: how it is stored, as in ``evaluate``.
        noise: of the calibrated network. ``"keep"`` that of training, or choose by the likelihood
            of held-out data: ``"one"`` for all layers, or ``"per-layer"``.
        progress: wraps the batches, given a name, to show how far it is.
    """
    if noise not in NOISE:
        raise ValueError(f"Unknown choice of noise {noise!r}; known are {', '.join(NOISE)}.")
    if noise != "keep" and activations.get(run.config.model.activation).neuron is not None:
        raise ValueError(
            "Noise is chosen among values for standardised inputs, which spiking neurons do not "
            "fire by; keep theirs (--noise keep)."
        )
    run.check_replaceable(*(run.path / name for name in HELD_OUT))
    rows = _held_out(run)
    if len(rows) < LEAST:
        raise RunError(_told_too_few(run, len(rows)))
    net: nn.Module = run.network()
    how = chosen(run, net, covariance, progress=progress is not None)
    net = with_covariance(net, how.covariance)
    with quietly():
        fitted = _fitted(run, net, rows, progress, None if noise == "keep" else noise)
    run.save_held_out(fitted, how.covariance)
    return fitted


def _held_out(run: Run) -> Tensor:
    """Held-out rows in random order, so that the first of them stand for all."""
    return validation_rows(len(run.data.x), run.config)[0][:_MOST]


def _fitted(
    run: Run,
    net: nn.Module,
    rows: Tensor,
    progress: Steps | None,
    noise: str | tuple[float, ...] | None = None,
) -> HeldOut:
    """Calibration and scores of a network, with other noise if it is given or to be chosen."""
    x, y, classify = run.data.inputs[rows], run.data.y[rows], run.classifies
    device = next(net.parameters()).device
    values, as_trained = _looked_at(net, x, progress)
    mean, moments = as_trained.mean, as_trained
    classes = mean.shape[-1] if classify else 1
    batches = (some.to(device) for some in torch.split(mean_of(x), _BATCH))
    plain_values, plain_mean = features_of("plain", net, batches)
    known = {
        "fitted": (values, mean, "moments"),
        "fitted_plain": (plain_values, plain_mean, "plain"),
    }
    scores: dict[str, FittedScore] = {}
    notes = []
    for name, (seen, outputs, kind) in known.items():
        try:
            scores[name] = fit_features(seen, outputs, classes=classes, features=kind)
        except ValueError as error:  # too few samples for so many features
            notes.append(f"There is no {name.replace('_', ' ')} score: {error}")
    notes = notes[:1]
    if isinstance(noise, str):
        few, known_y = x[:_TO_CHOOSE_NOISE].to(device), y[:_TO_CHOOSE_NOISE].to(device)
        noise = choose_noise(net, few, known_y, per_layer=noise == "per-layer").noise
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
            "A scale and a constant (covary calibrate) find no use for the covariance: standard "
            "deviations that they calibrate are the same for all inputs, to a percent."
        )
    thresholds = _thresholds(as_trained, calibration(moments), classify=classify)
    for name in scores:
        seen, outputs, kind = known[name]
        with suppress(ValueError):  # too few samples to fit to four fifths of them
            own = cross_fitted(seen, outputs, classes=classes, features=kind)
            thresholds[name] = _answering(own)
    return HeldOut(calibration, scores, len(x), notes, noise, thresholds)


@torch.no_grad()
def _thresholds(moments: Moments, calibrated: Moments, *, classify: bool) -> dict[str, float]:
    """By score, the value up to which a network would answer ``ANSWERED`` of these inputs."""
    batches = torch.split(torch.arange(len(moments)), _BATCH)
    scored = [of_moments(moments[rows], classify=classify) for rows in batches]
    found = {name: torch.cat([batch[name] for batch in scored]) for name in scored[0]}
    if classify:
        found["calibrated"] = torch.cat([expected_max(calibrated[rows]) for rows in batches])
    else:
        stddevs = calibrated.stddev.unbind(-1)
        found |= {f"stddev_{i + 1}": stddev for i, stddev in enumerate(stddevs)}
    return {name: _answering(score) for name, score in found.items()}


def _answering(score: Tensor) -> float:
    """One of the scores (n,) that ``ANSWERED`` of them do not exceed; NaN if none is a number."""
    return torch.nanquantile(score.double(), ANSWERED, interpolation="lower").item()


def _is_constant(stddev: Tensor) -> bool:
    return bool((stddev.std(0) < 0.01 * stddev.mean(0)).all())


@torch.no_grad()
def _looked_at(
    net: nn.Module, x: Tensor | Moments, progress: Steps | None
) -> tuple[Tensor, Moments]:
    """Features (n, d) of all layers, and the moments of the output, on the CPU."""
    device = next(net.parameters()).device
    outs, values = [], []
    batches = in_batches(x, _BATCH)
    for some in progress(batches, "held-out data") if progress else batches:
        features, out = moment_features(net, some.to(device))
        values.append(features.cpu())
        outs.append(gathered([out]))
    whole = gathered(outs)
    matrix = whole.covariance_matrix.cpu()
    return torch.cat(values), Moments(whole.mean.cpu(), Full(matrix))
