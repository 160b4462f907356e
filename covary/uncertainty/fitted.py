"""One score of all layers, fitted to held-out data of the kind the network was trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary.convert import Converted
from covary.files import FileError, read_tensors, write_tensors
from covary.moments import mean_of
from covary.nn import Lift
from covary.uncertainty.features import FEATURES, check_features, log_margin

# Of the margin beside the density, both divided by their spread over held-out data. Among 0.5, 1,
# 2 and 4 it is the least that finds errors as well as any in held-out digits, whatever the network.
_MARGIN_WEIGHT = 2.0
# Fewer samples give no covariance to speak of.
_LEAST_SAMPLES = 50
_BATCH = 128
_FORMAT = "covary-fitted-score-1"

Progress = Callable[[Iterable[Any], str], Iterable[Any]]


class FittedScore(nn.Module):
    """(B,) how unlike held-out data a sample is in all layers, and how close its decision.

    Features of all layers (``covary.uncertainty.features``), each divided by its spread over
    held-out data, have one Gaussian per predicted class: with means m_k and covariances S_k, the
    score of a sample predicted as class k is (docs/uncertainty.md)

        standardised(1/2 (f - m_k)^T S_k^-1 (f - m_k) + 1/2 log det S_k)
        - 2 standardised(log-margin)

    Standardised means: minus the average over held-out data, over the standard deviation. Where
    there are no classes there is one Gaussian and no margin. Inputs that are out of distribution
    are far from all that was seen; errors are where the margin is small. Made by
    ``covary.uncertainty.fit``.

    Attributes:
        features: ``"moments"``, or ``"plain"`` for what the same weights show without covariance.
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
        self.features, self.samples = features, samples
        shapes = {
            "center": (width,),
            "spread": (width,),
            "means": (classes, width),
            "factors": (classes, width, width),
            "log_determinants": (classes,),
            "scales": (2, 2),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape, dtype=torch.float64))

    @property
    def classes(self) -> int:
        """How many classes there are; 1 where there are none to tell apart."""
        return len(self.means)

    @torch.no_grad()
    def forward(self, net: nn.Module, x: Tensor) -> Tensor:
        """(n,) of inputs (n, ...), higher is less sure; in float64 on the CPU."""
        _check_per_sample(net)
        watched = FEATURES[check_features(self.features, net)].network(net)
        return torch.cat([self.of(*_look(watched, self.features, some)) for some in _batches(x)])

    def of(self, features: Tensor, mean: Tensor) -> Tensor:
        """(B,) from features (B, d) and the output's mean (B, n)."""
        if features.shape[-1] != self.center.numel():
            raise ValueError(
                f"The score was fitted to {self.center.numel()} features of a network's layers, "
                f"and this network has {features.shape[-1]}. Fit one to it: "
                "covary.uncertainty.fit(net, held_out)."
            )
        if self.classes > 1 and mean.shape[-1] != self.classes:
            raise ValueError(
                f"The score was fitted to {self.classes} classes, and this network has "
                f"{mean.shape[-1]}."
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
    _check_per_sample(net)
    features = check_features(features, net)
    watched = FEATURES[features].network(net)
    batches = _batches(held_out)
    looked = [
        _look(watched, features, some)
        for some in (progress(batches, "held-out data") if progress else batches)
    ]
    values, means = (torch.cat(parts) for parts in zip(*looked, strict=True))
    classes = means.shape[-1] if classify or (classify is None and means.shape[-1] > 1) else 1
    return fit_features(values, means, classes=classes, features=features)


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


def _check_per_sample(net: nn.Module) -> None:
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


def _look(net: nn.Module, features: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features (B, d) of a batch, and the output's mean."""
    kind = FEATURES[features]
    with kind.watch(net) as seen:
        out = net(x)
    return kind.of(seen, out).cpu(), mean_of(out).cpu()


def _batches(x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, _BATCH)


def _predicted(mean: Tensor, classes: int) -> Tensor:
    if classes == 1:
        return torch.zeros(mean.shape[:-1], dtype=torch.int64)
    return mean.argmax(-1)


def _spread(values: Tensor) -> Tensor:
    """Standard deviations along the first dimension, 1 where nothing varies."""
    spread = values.std(0, correction=0)
    return torch.where(spread > 1e-9 * (1 + values.mean(0).abs()), spread, math.nan).nan_to_num(1.0)
