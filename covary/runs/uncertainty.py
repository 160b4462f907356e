"""What held-out data of a run say about its uncertainty: a calibration, and a fitted score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from covary import activations
from covary.covariance import Full
from covary.models import with_covariance, with_noise
from covary.moments import Moments
from covary.runs import held_out
from covary.runs.directory import Run, RunError
from covary.runs.held_out import Calibration, HeldOut
from covary.runs.samples import validation_rows
from covary.runs.tracking import Held, chosen, quietly
from covary.uncertainty.calibration import choose_noise, fit_logits, fit_variance
from covary.uncertainty.features import FEATURES
from covary.uncertainty.fidelity import gathered
from covary.uncertainty.fitted import FittedScore, fit, fit_features

Progress = Callable[[Sequence[Any], str], Iterator[Any]]
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


def known_or_fitted(
    run: Run, net: nn.Module, how: Held, *, progress: Progress | None = None
) -> HeldOut:
    """What is in the run's folder if it is of these weights and covariances; else fit it now.

    What is there for other covariances of the same weights stays there: the noise that it has may
    have been chosen with care, and is taken here too.

    Args:
        run: whose network it is.
        net: the network, which holds its covariance in this way.
        how: covariances are held.
        progress: wraps the batches, given a name, to show how far it is.
    """
    before, covariance = run.kept_calibration, _named(how)
    same = before is not None and before.weights == run.weights
    if before is not None and same and before.covariance == covariance:
        known = run.held_out
        if known is not None:
            return known
    rows = _held_out(run)
    if len(rows) < _LEAST:
        return HeldOut(None, {}, len(rows), [_TOO_FEW.format(len(rows))])
    if before is not None and same and before.covariance != covariance:
        noise = before.noise
        return _fitted(run, net, rows, progress, lambda *_: noise)
    fitted = _fitted(run, net, rows, progress)
    held_out.write(run.path, fitted, weights=run.weights, covariance=covariance)
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
        progress: wraps the batches, given a name, to show how far it is.
    """
    if noise != "keep" and activations.get(run.config.model.activation).neuron is not None:
        raise ValueError(
            "Noise is chosen among values for standardised inputs, which spiking neurons do not "
            "fire by; keep theirs (--noise keep)."
        )
    if noise not in NOISE:
        raise ValueError(f"Unknown choice of noise {noise!r}; known are {', '.join(NOISE)}.")
    files = (held_out.CALIBRATION, *(file for _, file in held_out.SCORES.values()))
    run.check_replaceable(*(run.path / name for name in files))
    rows = _held_out(run)
    if len(rows) < _LEAST:
        raise RunError(_TOO_FEW.format(len(rows)))
    net: nn.Module = run.network()
    how = chosen(run, net, covariance, progress=progress is not None)
    net = with_covariance(net, how.covariance, exact_width=how.exact_width)
    choose: Choice = _as_it_is
    if noise != "keep":
        choose = partial(_chosen, per_layer=noise == "per-layer")
    with quietly():
        fitted = _fitted(run, net, rows, progress, choose)
    held_out.write(run.path, fitted, weights=run.weights, covariance=_named(how))
    return fitted


def _held_out(run: Run) -> Tensor:
    """In random order, so that the first of them stand for all."""
    return validation_rows(len(run.data.x), run.config)[0][:_MOST]


def _named(how: Held) -> str:
    width = "" if how.exact_width is None else f", exact_width {how.exact_width}"
    return how.covariance + width


def _as_it_is(_net: nn.Module, _x: Tensor, _y: Tensor) -> None:
    """Keep the noise."""


def _chosen(net: nn.Module, x: Tensor, y: Tensor, *, per_layer: bool) -> tuple[float, ...]:
    some, device = slice(_TO_CHOOSE_NOISE), next(net.parameters()).device
    choice = choose_noise(net, x[some].to(device), y[some].to(device), per_layer=per_layer)
    return choice.noise


def _fitted(
    run: Run,
    net: nn.Module,
    rows: Tensor,
    progress: Progress | None,
    choose: Choice = _as_it_is,
) -> HeldOut:
    """Calibration and scores of a network; ``choose`` says which noise is to be calibrated."""
    x, y, classify = run.data.x[rows], run.data.y[rows], run.classifies
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
