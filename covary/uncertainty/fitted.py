"""One score of all layers, fitted to held-out data of the kind the network was trained on.

A few numbers from each layer, the features of a sample (``FEATURES``), and their density.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary.convert import Converted
from covary.files import FileError, read_tensors, write_tensors
from covary.models import noise_of, with_covariance, with_noise
from covary.moments import Moments, mean_of
from covary.nn import Lift
from covary.nn.protocol import activation_of, plain_of

# Of the margin beside the density, both divided by their spread over held-out data. Among 0.5, 1,
# 2 and 4 it is the least that finds errors as well as any in held-out digits, whatever the network.
_MARGIN_WEIGHT = 2.0
# Fewer samples give no covariance to speak of.
_LEAST_SAMPLES = 50
_FOLDS = 5
# Nothing may be infinitely far from what is usual: logarithms of 0 stop here.
_TINY = 1e-30
_LEAST_ENTROPY = -1e4
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH = 128
_FORMAT = "covary-fitted-score-1"

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


def moment_features(net: nn.Module, x: Tensor | Moments) -> tuple[Tensor, Moments]:
    """(B, 3 E + 3 L + 3 or 4) float64, of E tensors at the entrance, L activations, the output.

    At the entrance (what each convolution gives, and what ``Lift`` takes): log-norm, the fraction
    of numbers above 0, log of their average size. Of each activation: log-trace of what comes out,
    log-norm of its mean, and the log of ``mean_i |mu_i| / s_i`` of what goes in: how far units are
    from their threshold, in standard deviations of their own. Of the output: log-trace and entropy,
    log-norm of the mean, and, of two outputs or more, the log-margin. Also what the network gives.
    """
    seen, out = _watched(
        net, x, lambda layer: isinstance(layer, Lift) or activation_of(layer) is not None
    )
    entrance = [mean_of(before) for layer, before, _ in seen if isinstance(layer, Lift)]
    columns = _of_entrance(seen, entrance)
    for layer, before, after in seen:
        if activation_of(layer) is not None:
            # What activations take: of tracked covariances, variances that need no sweep.
            deviation = before.cov.unit_variance.double().clamp(min=_TINY).sqrt()
            columns += [
                _log(after.cov.unit_variance.double().sum(-1).expand(len(out.mean))),
                _log_norm(after.mean),
                _log((before.mean.double().abs() / deviation).mean(-1)),
            ]
    columns.append(_log(out.variance.double().sum(-1)))
    columns.append(out.entropy().double().clamp(min=_LEAST_ENTROPY))
    return torch.stack([*columns, *_of_mean(out.mean)], -1), out


def plain_features(net: nn.Module, x: Tensor) -> tuple[Tensor, Moments | Tensor]:
    """(B, 3 E + 4 L + 1 or 2) float64: what the network has without noise and covariance.

    Layers are those between linear ones: what one gives goes into an activation, what the next
    takes came out of it. The same at the entrance (of the first linear layer in place of ``Lift``).
    Of each activation: log-norm of what comes out, the fraction of units above their threshold, and
    log-norm and log of the average size of what goes in. Of the output: log-norm and, of two
    outputs or more, the log-margin. Also what the network gives.
    """
    if noise_of(net):
        net = with_covariance(with_noise(net, 0.0), "diagonal").eval()
    seen, out = _watched(net, x, lambda layer: isinstance(plain_of(layer), nn.Linear))
    linear = [each for each in seen if not isinstance(each[0], _CONVOLUTIONS)]
    columns = _of_entrance(seen, [mean_of(before) for _, before, _ in linear[:1]])
    for (_, _, given), (_, taken, _) in pairwise(linear):
        before, after = mean_of(given).double(), mean_of(taken)
        share, size = (before > 0).double().mean(-1), before.abs().mean(-1)
        columns += [_log_norm(after), share, _log_norm(before), _log(size)]
    return torch.stack([*columns, *_of_mean(mean_of(out))], -1), out


# Network and inputs (B, ...) -> features (B, d), and what the network gives.
FEATURES: dict[str, Callable[[nn.Module, Tensor], tuple[Tensor, Any]]] = {
    "moments": moment_features,
    "plain": plain_features,
}


def log_margin(mean: Tensor) -> Tensor:
    """(B,) log of the distance between the two largest outputs (B, n)."""
    largest = mean.double().topk(2, dim=-1).values
    return _log(largest[..., 0] - largest[..., 1])


class FittedScore(nn.Module):
    """(B,) how unlike held-out data a sample is in all layers, and how close its decision.

    Features of all layers (``FEATURES``), each divided by its spread over held-out data, have one
    Gaussian per predicted class: with means m_k and covariances S_k, the score of a sample
    predicted as class k is (docs/uncertainty.md)

        standardised(1/2 (f - m_k)^T S_k^-1 (f - m_k) + 1/2 log det S_k)
        - 2 standardised(log-margin)

    Standardised means: minus the average over held-out data, over the standard deviation. Where
    there are no classes there is one Gaussian and no margin. Inputs that are out of distribution
    are far from all that was seen; errors are where the margin is small. Made by
    ``covary.uncertainty.fit``.

    Attributes:
        features: ``"moments"``, or ``"plain"`` for what the same weights show without covariance.
        classes: how many there are; 1 where there are none to tell apart.
        samples: how many held-out samples it was fitted to.
    """

    center: Tensor  # (d,) of the features
    spread: Tensor  # (d,)
    means: Tensor  # (K, d) of each class
    factors: Tensor  # (K, d, d) inverse Cholesky factors of the covariances: S_k^-1 = F^T F
    log_determinants: Tensor  # (K,)
    scales: Tensor  # (2, 2) average and deviation of the density's part, and of the margin's

    def __init__(self, features: str, classes: int, width: int, samples: int = 0) -> None:
        super().__init__()
        self.features, self.classes, self.samples = features, classes, samples
        d, k = width, classes
        shapes = {"center": (d,), "spread": (d,), "means": (k, d), "factors": (k, d, d)}
        for name, shape in {**shapes, "log_determinants": (k,), "scales": (2, 2)}.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    @torch.no_grad()
    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """(n,) of inputs (n, ...), higher is less sure; in float64 on the CPU."""
        _checked_features(self.features, net)
        return self.of(*features_of(self.features, net, torch.split(x, _BATCH)))

    def of(self, features: Tensor, mean: Tensor) -> Tensor:
        """(B,) from features (B, d) and the output's mean (B, n)."""
        outputs = mean.shape[-1] if self.classes > 1 else 1
        for what, fitted, got in (
            ("features of a network's layers", self.center.numel(), features.shape[-1]),
            ("classes", self.classes, outputs),
        ):
            if fitted != got:
                raise ValueError(
                    f"The score was fitted to {fitted} {what}, and this network has {got}. Fit one "
                    "to it: covary.uncertainty.fit(net, held_out)."
                )
        score: Tensor = (self.surprise(features, mean) - self.scales[0, 0]) / self.scales[0, 1]
        if self.classes > 1:
            margin = (log_margin(mean) - self.scales[1, 0]) / self.scales[1, 1]
            score = score - _MARGIN_WEIGHT * margin
        return score

    def surprise(self, features: Tensor, mean: Tensor) -> Tensor:
        """(B,) minus the log-density of the features in the predicted class, up to a constant."""
        predicted = _predicted(mean, self.classes)
        gap = (features - self.center) / self.spread - self.means[predicted]
        white = torch.einsum("bij,bj->bi", self.factors[predicted], gap)
        return 0.5 * (white.square().sum(-1) + self.log_determinants[predicted])

    def save(self, path: Path | str, **about: str) -> None:
        """Write it as safetensors, whole or not at all."""
        metadata = {"format": _FORMAT, "features": self.features, "samples": str(self.samples)}
        write_tensors(Path(path), self.state_dict(), metadata | {"about": json.dumps(about)})

    @classmethod
    def load(cls, path: Path | str) -> FittedScore:
        """Read what ``save`` wrote."""
        return cls.load_with(path)[0]

    @classmethod
    def load_with(cls, path: Path | str) -> tuple[FittedScore, dict[str, str]]:
        """The score, and what was said about it when it was saved."""
        tensors, metadata = read_tensors(Path(path))
        if metadata.get("format") != _FORMAT or metadata.get("features") not in FEATURES:
            raise FileError(f"{path} holds no fitted score.")
        try:
            classes, width = tensors["means"].shape
            score = cls(metadata["features"], classes, width, int(metadata["samples"]))
            score.load_state_dict(tensors)
            about: dict[str, str] = json.loads(metadata["about"])
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            problem = " ".join(str(error).split())
            raise FileError(f"{path} is not as a fitted score is saved: {problem}.") from error
        broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
        if broken:
            raise FileError(f"{path} is damaged: {broken[0]} has numbers that are not finite.")
        return score, about


@torch.no_grad()
def fit(
    net: nn.Module,
    held_out: Tensor,
    *,
    features: str | None = None,
    classify: bool | None = None,
    progress: Progress | None = None,
) -> FittedScore:
    """Fit a score to held-out inputs of the kind the network was trained on; no labels are needed.

    Args:
        net: a network, in evaluation mode, with one covariance per sample; or a conventional one.
        held_out: inputs (n, ...) that it was not trained on: on those it was, it is surer than on
            any others. Some hundreds for each class; no out-of-distribution ones.
        features: ``"moments"``, or ``"plain"`` for those that the same weights have without noise
            and covariance, which is all that a conventional network has.
        classify: whether outputs are logits of classes; by default if there are two or more.
        progress: wraps the batches, given a name, to show how far it is.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 16, 3], noise=0.3).eval()
        >>> score = fit(net, torch.randn(300, 4))
        >>> usual, strange = score(net, torch.randn(50, 4)), score(net, 9 * torch.randn(50, 4))
        >>> bool(strange.mean() > usual.mean())
        True
    """
    features = _checked_features(features, net)
    if not isinstance(held_out, Tensor):
        raise TypeError(
            f"fit takes held-out inputs as one tensor (n, ...), got {type(held_out).__name__}. "
            "Of a loader: torch.cat([x for x, _ in loader])."
        )
    batches: Iterable[Tensor] = torch.split(held_out, _BATCH)
    batches = progress(batches, "held-out data") if progress else batches
    values, means = features_of(features, net, batches)
    classes = means.shape[-1] if classify or (classify is None and means.shape[-1] > 1) else 1
    return fit_features(values, means, classes=classes, features=features)


@torch.no_grad()
def fit_features(values: Tensor, mean: Tensor, *, classes: int, features: str) -> FittedScore:
    """The same from features (n, d) and the output's means (n, outputs) that are known already."""
    n, width = values.shape
    if n < max(_LEAST_SAMPLES, 2 * width):
        more = " for each class" if classes > 1 else ""
        raise ValueError(
            f"A score of {width} features needs {max(_LEAST_SAMPLES, 2 * width)} held-out samples "
            f"at least, and some hundreds{more} to be good; got {n}."
        )
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values).all(-1)).sum())
        raise ValueError(f"The moments of {bad} of {n} held-out samples are not finite.")
    score = FittedScore(features, classes, width, samples=n)
    score.center = values.mean(0)
    score.spread = _spread(values)
    white = (values - score.center) / score.spread
    predicted = _predicted(mean, classes)
    groups = [white[predicted == k] for k in range(classes)]
    # A class that was never predicted has the average of all.
    score.means = torch.stack([group.mean(0) if len(group) else white.mean(0) for group in groups])
    gaps = white - score.means[predicted]
    common = gaps.mT @ gaps / n
    for k, group in enumerate(groups):
        gap = group - score.means[k]
        # As if so many samples as there are features had the covariance that classes have in
        # common, and a thousandth of independent noise: so few samples give no false directions.
        covariance = (gap.mT @ gap + width * common) / (len(group) + width)
        covariance = covariance + 1e-3 * torch.eye(width, dtype=covariance.dtype)
        factor = torch.linalg.cholesky(covariance)
        score.factors[k] = torch.linalg.inv(factor)
        score.log_determinants[k] = 2 * factor.diagonal().log().sum()
    parts = [score.surprise(values, mean)]
    if classes > 1:
        parts.append(log_margin(mean))
    for row, part in zip(score.scales, parts, strict=False):
        row[0], row[1] = part.mean(), _spread(part)
    return score


@torch.no_grad()
def cross_fitted(values: Tensor, mean: Tensor, *, classes: int, features: str) -> Tensor:
    """(n,) scores of samples by fits to others, as new samples have them.

    Samples that a score was fitted to have lower scores than new ones: thresholds want these.
    Features (n, d) and means (n, outputs) are in random order.
    """
    found = values.new_empty(len(values))
    fold = torch.arange(len(values)) % _FOLDS
    for k in range(_FOLDS):
        rest, here = fold != k, fold == k
        score = fit_features(values[rest], mean[rest], classes=classes, features=features)
        found[here] = score.of(values[here], mean[here]).to(found)
    return found


def _checked_features(name: str | None, net: nn.Module) -> str:
    """Which features to take of this network, if it can have a score; by default all it has."""
    if isinstance(net, Converted):
        raise TypeError(
            "A fitted score takes a network of covary.nn layers or a plain one, and got one that "
            "covary.convert made. Fit it to the plain model: fit(model, held_out)."
        )
    if net.training:
        raise ValueError("A fitted score needs a network in evaluation mode: net.eval().")
    if any(isinstance(part, Lift) and part.covariance == "shared" for part in net.modules()):
        raise ValueError(
            "A fitted score needs a covariance per sample; shared by a batch, each sample's score "
            "would depend on its neighbours: covary.with_covariance(net, 'full')."
        )
    if name is None:
        return "moments" if noise_of(net) else "plain"
    if name not in FEATURES:
        raise ValueError(f"Unknown features {name!r}; known are {', '.join(FEATURES)}.")
    if name == "moments" and not noise_of(net):
        raise ValueError(
            "A network without covary.nn.Lift has no moments to look at: features='plain'."
        )
    return name


@torch.no_grad()
def features_of(features: str, net: nn.Module, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Features (n, d) of all batches, and the output's means, on the CPU."""
    values, means = [], []
    for x in batches:
        found, out = FEATURES[features](net, x)
        values.append(found.cpu())
        means.append(mean_of(out).cpu())
    return torch.cat(values), torch.cat(means)


def _watched(
    net: nn.Module, x: Tensor | Moments, is_watched: Callable[[nn.Module], bool]
) -> tuple[list[tuple[nn.Module, Any, Any]], Any]:
    """Layers and what went in and came out, in the order of the pass; and the network's output.

    Of these layers, and of convolutions.
    """
    seen: list[tuple[nn.Module, Any, Any]] = []

    def keep(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen.append((layer, inputs[0], output))

    handles = [
        layer.register_forward_hook(keep)
        for layer in net.modules()
        if isinstance(layer, _CONVOLUTIONS) or is_watched(layer)
    ]
    try:
        return seen, net(x)
    finally:
        for handle in handles:
            handle.remove()


def _of_entrance(
    seen: Sequence[tuple[nn.Module, Any, Any]], entrance: Sequence[Tensor]
) -> list[Tensor]:
    """Columns from what convolutions gave, and from what the layers behind them took."""
    columns = []
    convolved = [output for layer, _, output in seen if isinstance(layer, _CONVOLUTIONS)]
    for values in (each.double().flatten(1) for each in (*convolved, *entrance)):
        share, size = (values > 0).double().mean(-1), values.abs().mean(-1)
        columns += [_log_norm(values), share, _log(size)]
    return columns


def _of_mean(mean: Tensor) -> list[Tensor]:
    return [_log_norm(mean)] if mean.shape[-1] < 2 else [_log_norm(mean), log_margin(mean)]


def _log_norm(values: Tensor) -> Tensor:
    return _log(values.double().norm(dim=-1))


def _log(value: Tensor) -> Tensor:
    return value.clamp(min=_TINY).log()


def _predicted(mean: Tensor, classes: int) -> Tensor:
    if classes == 1:
        return torch.zeros(mean.shape[:-1], dtype=torch.int64)
    return mean.argmax(-1)


def _spread(values: Tensor) -> Tensor:
    """Standard deviations along the first dimension, 1 where nothing varies."""
    spread = values.std(0, correction=0)
    return torch.where(spread > 1e-9 * (1 + values.mean(0).abs()), spread, math.nan).nan_to_num(1.0)
