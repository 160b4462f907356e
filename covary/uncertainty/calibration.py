"""Calibration: the few numbers that held-out data say about a network's uncertainty.

A calibration is one more layer, Moments -> Moments, put behind a network that stays as it is. It
never changes a mean, or the order of the classes' means, only how sure that is. (The largest
*expected* probability may be another class's, where two are close and their variances differ.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from covary.covariance import Full
from covary.inputs import in_batches
from covary.models import noise_of, with_noise
from covary.moments import Moments
from covary.uncertainty.agreement import gathered
from covary.uncertainty.scores import expected_softmax

# What ``choose_noise`` tries: standard deviations, in those of the network's input.
CANDIDATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
# The least offset, in mean squared errors: without it, an exact hit may have infinite density.
_LEAST_OFFSET = 1e-8
# The least error to reckon with, in the size of the targets: below it is round-off.
_LEAST_ERROR = 1e-6
# How far logarithms of temperatures, scales and offsets are searched.
_WIDEST = 18.0
# Added to the diagonal of a covariance of several targets, in rounding errors of its variances.
_ROUND_OFF = 100
# How often choose_noise goes through the layers.
_ROUNDS = 5


class _Calibration(nn.Module):
    """A layer whose buffers are the numbers of the calibration, in float64."""

    names: ClassVar[tuple[str, ...]]

    def __init__(self, *numbers: float | Sequence[float]) -> None:
        super().__init__()
        for name, number in zip(self.names, numbers, strict=True):
            values = torch.tensor(number, dtype=torch.float64)
            least = "> 0" if name == "temperature" else ">= 0"
            allowed = values > 0 if name == "temperature" else values >= 0
            if not (values.numel() and (values.isfinite() & allowed).all()):
                raise ValueError(
                    f"{type(self).__name__} needs a finite {name} {least}, got {number}."
                )
            self.register_buffer(name, values)

    def extra_repr(self) -> str:
        """Its numbers."""
        shown = {name: x.flatten().tolist() for name, x in self.named_buffers()}
        return ", ".join(
            f"{name}={', '.join(f'{x:.4g}' for x in numbers)}" for name, numbers in shown.items()
        )


class VarianceCalibration(_Calibration):
    """C -> scale C + diag(offset): for regression. The mean stays.

    ``scale`` makes up for a level of noise that says nothing about the size of errors, ``offset``
    adds what every target has of its own: noise that no network can predict. An offset alone
    (scale 0) is a constant variance.

    Both are 0 or more; there is one offset, or one for each target, a variance on its scale.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 1], noise=0.2)
        >>> calibrated = torch.nn.Sequential(net, VarianceCalibration(2.0, 0.1))
        >>> x = torch.ones(3, 4)
        >>> torch.allclose(calibrated(x).variance, 2 * net(x).variance + 0.1)
        True
    """

    names = ("scale", "offset")
    scale: Tensor
    offset: Tensor

    def __init__(self, scale: float, offset: float | Sequence[float]) -> None:
        super().__init__(scale, [offset] if isinstance(offset, int | float) else list(offset))

    def forward(self, moments: Moments) -> Moments:
        """The calibrated moments of t targets."""
        matrix = moments.cov.dense()
        t = matrix.shape[-1]
        if len(self.offset) not in (1, t):
            raise ValueError(
                f"This calibration is for {len(self.offset)} targets, got moments of {t}."
            )
        offset = self.offset.to(matrix).expand(t)
        return Moments(moments.mean, Full(self.scale.to(matrix) * matrix + torch.diag(offset)))


class LogitCalibration(_Calibration):
    """Mean / T, and C scale / T^2: for classification. The class of the largest mean stays.

    ``temperature`` T > 0 sharpens or softens all predictions alike, as is usual; ``scale`` >= 0
    says how much of the covariance is to be believed.
    """

    names = ("temperature", "scale")
    temperature: Tensor
    scale: Tensor

    def __init__(self, temperature: float, scale: float) -> None:
        super().__init__(temperature, scale)

    def forward(self, moments: Moments) -> Moments:
        """The calibrated moments of the logits."""
        return _tempered(moments, self.temperature, self.scale)


def fit_variance(moments: Moments, target: Tensor) -> VarianceCalibration:
    """The calibration under which targets (n, t) are most likely: one scale, t offsets.

    Maximises the average of log N(target; mean, scale C + diag(offset)), with the whole covariance
    of several targets. Take data that the network was not trained on: errors are too small where it
    was. Where there is no covariance to scale, the scale is 1 and the offsets are mean squared
    errors. Offsets are at least 1e-8 mean squared errors.

    Args:
        moments: of n samples, 2 or more.
        target: (n, t), on the scale of the moments.
    """
    mean, matrix = _known(moments, "fit_variance")
    target = target.detach().to(mean)
    if target.shape != mean.shape:
        raise ValueError(
            f"fit_variance needs targets of the mean's shape {tuple(mean.shape)}, got "
            f"{tuple(target.shape)}."
        )
    if not target.isfinite().all():
        raise ValueError(
            f"fit_variance got {int((~target.isfinite()).sum())} targets that are not finite. "
            "Leave these samples out."
        )
    size = torch.maximum(target.std(0), target.abs().mean(0))
    size = torch.where(size > 0, size, 1.0)
    error = (target - mean).square().mean(0).sqrt()
    # On the scale of the errors, where all numbers are of the order of 1.
    error_scale = torch.maximum(error, _LEAST_ERROR * size)
    residual, matrix = (target - mean) / error_scale, matrix / (error_scale[:, None] * error_scale)
    level = matrix.diagonal(dim1=-2, dim2=-1).mean().item()
    if level == 0:
        return VarianceCalibration(1.0, error_scale.square().tolist())

    def calibrated(logs: Tensor) -> tuple[Tensor, Tensor]:
        return logs[0].exp() / level, logs[1:].exp() + _LEAST_OFFSET

    def loss(logs: Tensor) -> Tensor:
        scale, offset = calibrated(logs)
        return -_log_density(residual, scale * matrix, offset).mean()

    # Nearly all of it from the network, half, or none; or as the network has it.
    starts = [[0.0, -8.0], [-0.7, -0.7], [-8.0, 0.0], [math.log(level), -2.0]]
    best = _minimum(loss, [[scale, *[offset] * mean.shape[-1]] for scale, offset in starts])
    scale, offset = calibrated(best)
    return VarianceCalibration(scale.item(), (offset * error_scale.square()).tolist())


def fit_logits(moments: Moments, labels: Tensor) -> LogitCalibration:
    """The calibration under which labels (n,) are most likely, or nearly so.

    Minimises the average negative log-probability of the labels under
    ``covary.uncertainty.scores.expected_softmax`` (deterministic), on data that the network was not
    trained on. A standard normal prior on the logarithms of temperature and scale, which weighs
    as much as one sample, keeps both finite where all labels are right, and near 1 where samples
    are few. Where there is no covariance to scale, the scale is 1.

    Args:
        moments: of the logits of n samples, 2 or more.
        labels: (n,) the index of each sample's class.
    """
    mean, matrix = _known(moments, "fit_logits")
    labels = labels.detach().cpu()
    if labels.shape != mean.shape[:1] or labels.is_floating_point():
        raise ValueError(
            f"fit_logits needs {len(mean)} labels (whole numbers, one for each sample), got "
            f"{tuple(labels.shape)} of {labels.dtype}."
        )
    if labels.min() < 0 or labels.max() >= mean.shape[-1]:
        raise ValueError(
            f"fit_logits needs labels from 0 to {mean.shape[-1] - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}."
        )
    known = Moments(mean, Full(matrix))
    varies = bool(matrix.diagonal(dim1=-2, dim2=-1).max() > 0)

    def loss(logs: Tensor) -> Tensor:
        temperature, scale = logs[0].exp(), (logs[1].exp() if varies else logs.new_ones(()))
        likely = _log_probability(_tempered(known, temperature, scale), labels)
        return logs.square().sum() / (2 * len(labels)) - likely

    # As the network has it, and with little of its covariance or much.
    starts = [[0.0, 0.0], [0.0, -3.0], [0.5, 2.0]] if varies else [[0.0, 0.0]]
    best = _minimum(loss, starts)
    return LogitCalibration(best[0].exp().item(), best[1].exp().item() if varies else 1.0)


class NoiseChoice(NamedTuple):
    """The noise of each noisy layer, the input's first, and the score of all that were tried."""

    noise: tuple[float, ...]
    scores: dict[tuple[float, ...], float]


def choose_noise(
    net: nn.Module,
    x: Tensor | Moments,
    y: Tensor,
    *,
    candidates: Sequence[float] = CANDIDATES,
    per_layer: bool = False,
    score: Callable[[Moments, Tensor], float] | None = None,
    batch_size: int = 128,
) -> NoiseChoice:
    """The noise with which a trained network does best on held-out data; it is not trained again.

    Noise moves the mean too, if less, so a network does best near the noise that it was trained
    with; its own noise is therefore always among those tried.

    Args:
        net: with ``covary.nn.Lift``, in whatever mode; it stays as it is.
        x: held-out inputs (n, ...).
        y: their targets (n, t), or labels (n,).
        candidates: sigmas to try, the same for all layers.
        per_layer: after the best common noise, try them layer by layer, from the input on, until a
            whole round changes nothing (at most 5 rounds).
        score: moments and y -> how good they are, higher is better. By default the average log
            density of targets after ``fit_variance``, or the average log-probability of labels
            after ``fit_logits``.
        batch_size: samples to compute at a time.

    Returns:
        The noise for ``covary.with_noise``; of equally good ones, the least.
    """
    own = tuple(noise_of(net))
    if not candidates:
        raise ValueError("choose_noise needs one candidate at least, got none.")
    sigmas = [float(sigma) for sigma in candidates]
    scores: dict[tuple[float, ...], float] = {}

    def quality(noise: tuple[float, ...]) -> tuple[bool, float]:
        """What is no number is never the best."""
        if noise not in scores:
            quiet = with_noise(net, noise).eval()
            with torch.no_grad():
                out = gathered([quiet(some) for some in in_batches(x, batch_size)])
                scores[noise] = float((score or _calibrated_score)(out, y))
        return not math.isnan(scores[noise]), scores[noise]

    best = max(sorted([own, *((sigma,) * len(own) for sigma in sigmas)]), key=quality)
    for _ in range(_ROUNDS if per_layer else 0):
        before = best
        for layer in range(len(own)):
            others = [(*best[:layer], sigma, *best[layer + 1 :]) for sigma in sigmas]
            best = max(sorted([best, *others]), key=quality)
        if best == before:
            break
    return NoiseChoice(best, scores)


def combined(members: Moments | Sequence[Moments]) -> Moments:
    """The moments of an ensemble: of a draw from a member that is drawn itself.

    The mean of the means; the mean of the covariances, and on top of it the covariance of the
    means: where members disagree, none is sure.

    Args:
        members: Moments with R in front, as ``covary.training.replicas`` gives them, or R Moments.
    """
    if isinstance(members, Moments):
        means, matrices = members.mean, members.covariance_matrix
        if means.dim() < 3:
            raise ValueError(
                f"combined needs means of shape (members, batch, units), got {tuple(means.shape)}; "
                "or a list of Moments."
            )
    else:
        if len(members) == 0:
            raise ValueError("combined needs one member at least, got none.")
        means = torch.stack([member.mean for member in members])
        matrices = torch.stack([member.covariance_matrix for member in members])
    mean = means.mean(0)
    gap = means - mean
    spread = torch.einsum("r...i,r...j->...ij", gap, gap) / len(means)
    return Moments(mean, Full(matrices.mean(0) + spread))


class Mixture(nn.Module):
    """An ensemble of networks that give ``Moments`` as one: ``combined`` of what they give."""

    def __init__(self, nets: Sequence[nn.Module]) -> None:
        super().__init__()
        if not nets:
            raise ValueError("An ensemble needs at least one network, got none.")
        self.nets = nn.ModuleList(nets)

    def forward(self, x: Tensor) -> Moments:
        """Inputs (B, ...) -> Moments (B, n)."""
        return combined([net(x) for net in self.nets])


def _tempered(moments: Moments, temperature: Tensor, scale: Tensor) -> Moments:
    temperature, scale = temperature.to(moments.mean), scale.to(moments.mean)
    matrix = moments.cov.dense() * (scale / temperature.square())
    return Moments(moments.mean / temperature, Full(matrix))


def _known(moments: Moments, name: str) -> tuple[Tensor, Tensor]:
    """Mean (n, t) and covariance (n, t, t) in double precision on the CPU, if they are numbers."""
    mean = moments.mean.detach().double().cpu()
    if mean.dim() != 2 or len(mean) < 2:
        raise ValueError(
            f"{name} needs a mean of shape (samples, units) with 2 samples or more, got "
            f"{tuple(mean.shape)}."
        )
    matrix = moments.covariance_matrix.detach().double().cpu()
    finite = mean.isfinite().all(-1) & matrix.isfinite().all(-1).all(-1)
    if not finite.all():
        first = int((~finite).nonzero()[0])
        raise ValueError(
            f"{name} got moments that are not finite for {int((~finite).sum())} of {len(mean)} "
            f"samples (the first at index {first}). Leave these samples out."
        )
    if mean.shape[-1] > 1:
        # Round-off, of the network's own precision, leaves singular matrices with eigenvalues < 0.
        average = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
        least = _ROUND_OFF * torch.finfo(moments.mean.dtype).eps * average
        matrix = matrix + torch.diag_embed(least[:, None].expand(mean.shape))
    return mean, matrix


def _log_density(residual: Tensor, matrix: Tensor, offset: Tensor) -> Tensor:
    """(n,) log N(residual; 0, matrix + diag(offset)) of (n, t), (n, t, t), (t,)."""
    t = residual.shape[-1]
    if t == 1:
        var = matrix[..., 0].clamp(min=0) + offset
        total = (residual.square() / var + var.log()).sum(-1)
    else:
        factor = torch.linalg.cholesky(matrix + torch.diag_embed(offset))
        white = torch.linalg.solve_triangular(factor, residual[..., None], upper=False)[..., 0]
        total = (white.square() + 2 * factor.diagonal(dim1=-2, dim2=-1).log()).sum(-1)
    return -0.5 * (total + t * math.log(2 * math.pi))


def _log_probability(moments: Moments, labels: Tensor) -> Tensor:
    """() average log of the labels' expected probabilities."""
    chosen = expected_softmax(moments).gather(-1, labels[:, None].long())
    return chosen.clamp(min=torch.finfo(chosen.dtype).tiny).log().mean()


def _calibrated_score(moments: Moments, y: Tensor) -> float:
    """How likely targets or labels are once the moments are calibrated on them."""
    if not y.is_floating_point():
        return _log_probability(fit_logits(moments, y)(moments), y).item()
    mean, matrix = _known(fit_variance(moments, y)(moments), "choose_noise")
    return _log_density(y.to(mean) - mean, matrix, mean.new_zeros(mean.shape[-1])).mean().item()


def _minimum(function: Callable[[Tensor], Tensor], starts: Sequence[Sequence[float]]) -> Tensor:
    """Where a smooth function of logarithms is lowest, by L-BFGS from each of the starts."""
    best, lowest = torch.tensor(starts[0], dtype=torch.float64), math.inf
    for start in starts:
        place = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [place],
            max_iter=100,
            tolerance_grad=1e-8,
            tolerance_change=1e-11,
            line_search_fn="strong_wolfe",
        )

        def closure(place: Tensor = place, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            value = function(place.clamp(-_WIDEST, _WIDEST))
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            found = place.detach().clamp(-_WIDEST, _WIDEST)
            value = function(found).item()
        if value < lowest:
            best, lowest = found, value
    return best
