"""Bayesian last layers: the weights before the outputs get a Gaussian posterior, all others none.

Classification has Laplace's approximation, with the curvature that the Fisher information gives;
regression is linear in its last weights, and so exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.covariance import Diagonal, Full
from covary.moments import Moments
from covary.nn.units import Rescale, before_units
from covary.uncertainty import scores

# Up to so many weights their whole curvature is taken, beyond it a Kronecker product.
_MOST_WEIGHTS = 4096
_PRECISIONS = tuple(10 ** (k / 4) for k in range(-12, 17))
_BATCH = 512
_STEPS = 1000


class LaplaceHead(nn.Module):
    """Features (B, n) -> Moments of logits (B, K): docs of ``fit_classifier`` say which.

    Args:
        weight: (K, n + 1) of the last layer, the bias as the last column.
        precision: () of the prior on every weight.
        values: eigenvalues of the curvature: (K (n + 1),), or (K, n + 1) of a Kronecker product.
        vectors: eigenvectors of the whole curvature, or of the features' factor of the product.
        outer: (K, K) eigenvectors of the classes' factor; None for the whole curvature.
    """

    weight: Tensor
    precision: Tensor
    values: Tensor
    vectors: Tensor
    outer: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        precision: Tensor,
        values: Tensor,
        vectors: Tensor,
        outer: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("precision", precision)
        self.register_buffer("values", values)
        self.register_buffer("vectors", vectors)
        self.register_buffer("outer", outer)

    def forward(self, features: Tensor) -> Moments:
        """The network's logits, with the covariance that unsure weights give them."""
        features = _with_one(features)
        mean = features @ self.weight.mT
        with torch.no_grad():
            matrix = self._covariance(features)
        return Moments(mean, Full(matrix, torch.zeros_like(mean[:1, :1])))

    def _covariance(self, features: Tensor) -> Tensor:
        """(B, K, K): features' weights have the covariance (curvature + precision)^-1."""
        classes, n = self.weight.shape
        variances = 1 / (self.values.clamp(min=0) + self.precision)
        if self.outer is None:
            along = torch.einsum("bf,kfp->bkp", features, self.vectors.view(classes, n, -1))
            return (along * variances) @ along.mT
        spread = (features @ self.vectors).square() @ variances.mT
        return (self.outer * spread[:, None, :]) @ self.outer.mT


def fit_classifier(
    net: nn.Sequential,
    x: Tensor,
    held_out: tuple[Tensor, Tensor],
    *,
    precisions: Sequence[float] = _PRECISIONS,
    most_weights: int = _MOST_WEIGHTS,
) -> nn.Sequential:
    """The conventional classifier with a posterior of its last weights, as a net of ``Moments``.

    Laplace's approximation: the inverse of the Fisher information of the training inputs plus the
    prior's precision. The mean stays that of the network.

    Args:
        net: ends with an ``nn.Linear``; shared.
        x: (n, ...) the inputs that it was trained on.
        held_out: inputs and labels; the precision is chosen by the likelihood of the expected
            softmax on them.
        precisions: of the prior, to choose from.
        most_weights: of the last layer, beyond which its curvature is a Kronecker product.
    """
    trunk, last, _ = _divided(net)
    classes, n = last.out_features, last.in_features + 1
    weight = _weights(last)
    whole = classes * n <= most_weights
    curvature = torch.zeros((classes, n, classes, n) if whole else (n, n)).to(weight)
    between_classes, samples = torch.zeros(classes, classes).to(weight), 0
    for features in _features(trunk, x):
        p = torch.softmax(features @ weight.mT, -1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # (B, K, K)
        if whole:
            for k in range(classes):
                scaled = fisher[:, k, :, None] * features[:, None, :]
                curvature[k] += (features.mT @ scaled.flatten(1)).view(n, classes, n)
        else:
            curvature += features.mT @ features
            between_classes += fisher.sum(0)
        samples += len(features)
    found: dict[str, Tensor] = {}
    if whole:
        found["values"], found["vectors"] = torch.linalg.eigh(
            curvature.view(classes * n, classes * n)
        )
    else:
        inner, found["vectors"] = torch.linalg.eigh(curvature / samples)
        outer, found["outer"] = torch.linalg.eigh(between_classes)
        found["values"] = outer[:, None] * inner
    heads = (LaplaceHead(weight, weight.new_tensor(value), **found) for value in precisions)
    inputs, labels = held_out
    known = torch.cat(list(_features(trunk, inputs)))[:, :-1]
    head = min(heads, key=lambda head: _loss(head, known, labels.to(known.device)))
    return nn.Sequential(*trunk, head).eval()


@torch.no_grad()
def _loss(head: LaplaceHead, features: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of the expected softmax, of features (n, m) and labels (n,)."""
    loss = 0.0
    for some, labels in zip(torch.split(features, _BATCH), torch.split(y, _BATCH), strict=True):
        p = scores.expected_softmax(head(some)).double()
        loss += float(F.nll_loss(p.clamp(min=1e-300).log(), labels, reduction="sum"))
    return loss


class BayesianHead(nn.Module):
    """Features (B, n) -> Moments of t targets, by Bayesian linear regression.

    Args:
        weight: (t, n + 1) the posterior's mean, the constant's weight as the last column.
        noise: (t,) variance of the targets around it.
        variances: (t, n + 1) of the posterior, along ``vectors``.
        vectors: (n + 1, n + 1) of the features' second moments.
    """

    weight: Tensor
    noise: Tensor
    variances: Tensor
    vectors: Tensor

    def __init__(self, weight: Tensor, noise: Tensor, variances: Tensor, vectors: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("noise", noise)
        self.register_buffer("variances", variances)
        self.register_buffer("vectors", vectors)

    def forward(self, features: Tensor) -> Moments:
        """Moments (B, t) without correlations, of targets and not of their expectation."""
        features = _with_one(features)
        spread = (features @ self.vectors).square() @ self.variances.mT
        return Moments(features @ self.weight.mT, Diagonal(spread + self.noise))


@torch.no_grad()
def fit_regressor(net: nn.Sequential, x: Tensor, y: Tensor) -> nn.Sequential:
    """The conventional regressor with a posterior of its last weights, as a net of ``Moments``.

    Bayesian linear regression on the features before the last layer: exact. Noise and the prior's
    precision are those of the largest marginal likelihood, for each target by itself.

    Args:
        net: ends with an ``nn.Linear``, and what gives outputs their units, if anything; shared.
        x: (n, ...) the inputs that it was trained on.
        y: (n, t) their targets.
    """
    trunk, _, units = _divided(net)
    features = torch.cat(list(_features(trunk, x)))
    target = y.to(features)
    if units is not None:
        target = (target - units.shift) / units.scale
    values, vectors = torch.linalg.eigh(features.mT @ features)
    values = values.clamp(min=0)
    along = (vectors.mT @ (features.mT @ target)).mT  # (t, n)
    prior, noise = _evidence(values, along, target.square().sum(0), len(features))
    variances = 1 / (prior[:, None] + values / noise[:, None])
    weight = (variances * along / noise[:, None]) @ vectors.mT
    head = BayesianHead(weight, noise, variances, vectors)
    return nn.Sequential(*trunk, head, *([] if units is None else [units])).eval()


def _evidence(
    values: Tensor, along: Tensor, squares: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """(t,) prior precision and noise variance where the marginal likelihood is stationary.

    MacKay's fixed point, from eigenvalues (n,) of the features' second moments, what they have in
    common with the targets (t, n) and the targets' sums of squares (t,).
    """
    prior = torch.ones_like(squares)
    noise = squares / samples
    tiny = torch.finfo(squares.dtype).tiny
    for _ in range(_STEPS):
        precision = prior[:, None] + values / noise[:, None]
        mean = along / noise[:, None] / precision
        determined = (values / noise[:, None] / precision).sum(-1)
        # Round-off can leave what is explained larger than what there is.
        left = (squares - 2 * (mean * along).sum(-1) + (mean.square() * values).sum(-1)).clamp(
            min=1e-12 * squares + tiny
        )
        new_prior = determined / mean.square().sum(-1).clamp(min=tiny)
        new_noise = left / (samples - determined).clamp(min=1e-3 * samples)
        if torch.allclose(new_prior, prior, rtol=1e-8) and torch.allclose(
            new_noise, noise, rtol=1e-8
        ):
            break
        prior, noise = new_prior, new_noise
    return prior, noise


def head_state(net: nn.Sequential) -> dict[str, Tensor]:
    """What the Bayesian last layer adds to the network, to be kept."""
    for layer in net:
        if isinstance(layer, LaplaceHead | BayesianHead):
            return dict(layer.state_dict())
    raise ValueError("This network has no Bayesian last layer.")


def with_head(net: nn.Sequential, state: Mapping[str, Tensor]) -> nn.Sequential:
    """The conventional network with the last layer that ``head_state`` kept."""
    trunk, _, units = _divided(net)
    head = BayesianHead(**state) if "noise" in state else LaplaceHead(**state)
    return nn.Sequential(*trunk, head, *([] if units is None else [units])).eval()


def _divided(net: nn.Sequential) -> tuple[nn.Sequential, nn.Linear, Rescale | None]:
    """The layers that make features, the last weights, and the units of the outputs, if any."""
    layers, units = before_units(net)
    last = layers.pop()
    if not isinstance(last, nn.Linear):
        raise ValueError(
            f"A Bayesian last layer needs a conventional network that ends with an nn.Linear; this "
            f"ends with {type(last).__name__}."
        )
    return nn.Sequential(*layers).eval(), last, units


@torch.no_grad()
def _weights(last: nn.Linear) -> Tensor:
    """(out, in + 1), in float64."""
    bias = torch.zeros_like(last.weight[:, 0]) if last.bias is None else last.bias
    return torch.cat([last.weight, bias[:, None]], 1).double()


def _features(trunk: nn.Sequential, x: Tensor) -> Iterator[Tensor]:
    """(B, n + 1) what comes before the last layer, batch by batch, in float64."""
    parameter = next(trunk.parameters(), None)
    device = x.device if parameter is None else parameter.device
    with torch.no_grad():
        for some in torch.split(x, _BATCH):
            yield _with_one(trunk(some.to(device)))


def _with_one(features: Tensor) -> Tensor:
    """The bias as one more weight, of a feature that is always 1."""
    return F.pad(features.double(), (0, 1), value=1.0)
