"""Bayesian last layers: the weights before the outputs get a Gaussian posterior, all others none.

Classification has Laplace's approximation, with the curvature that the Fisher information gives;
regression is linear in its last weights, and so exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.compare.networks import divided
from covary.covariance import Full
from covary.moments import Moments
from covary.uncertainty import scores

# Up to so many weights their whole curvature is taken, beyond it a Kronecker product.
_MOST_WEIGHTS = 4096
_PRECISIONS = tuple(10 ** (k / 4) for k in range(-12, 17))
_BATCH = 512
_STEPS = 1000


class BayesianHead(nn.Module):
    """Features (B, n) -> Moments of outputs (B, K), whose last weights have a posterior.

    Its covariance is (curvature + precision)^-1, with the curvature as eigenvalues and -vectors.
    """

    weight: Tensor  # (K, n + 1) the posterior's mean, the bias as the last column
    precision: Tensor  # () or (K, 1) of the prior on every weight
    values: Tensor  # of the curvature: (K (n + 1),), or (K, n + 1) of a Kronecker product
    vectors: Tensor  # of the whole curvature, or of the product's factor of features
    outer: Tensor | None  # (K, K) vectors of the outputs' factor; None for the whole curvature
    noise: Tensor | None  # (K,) variance of the targets around the outputs, in regression

    def __init__(
        self,
        weight: Tensor,
        precision: Tensor,
        values: Tensor,
        vectors: Tensor,
        outer: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> None:
        super().__init__()
        kept = {"weight": weight, "precision": precision, "values": values.clamp(min=0)}
        for name, value in (kept | {"vectors": vectors, "outer": outer, "noise": noise}).items():
            self.register_buffer(name, value)

    def forward(self, features: Tensor) -> Moments:
        """The outputs, with the covariance that unsure weights, and noise, give them."""
        features = _with_one(features)
        with torch.no_grad():
            matrix = self._covariance(features)
        return Moments(features @ self.weight.mT, Full(matrix))

    def _covariance(self, features: Tensor) -> Tensor:
        """(B, K, K)."""
        outputs, n = self.weight.shape
        variances = 1 / (self.values + self.precision)
        if self.outer is None:
            along = torch.einsum("bf,kfp->bkp", features, self.vectors.view(outputs, n, -1))
            return (along * variances) @ along.mT
        spread = (features @ self.vectors).square() @ variances.mT
        matrix = (self.outer * spread[:, None, :]) @ self.outer.mT
        return matrix if self.noise is None else matrix + torch.diag(self.noise)


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
    trunk, last, _ = divided(net)
    classes, n = last.out_features, last.in_features + 1
    weight = _weights(last)
    whole = classes * n <= most_weights
    curvature = torch.zeros((classes, n, classes, n) if whole else (n, n)).to(weight)
    between_classes = torch.zeros(classes, classes).to(weight)
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
    outer = None
    if whole:
        values, vectors = torch.linalg.eigh(curvature.view(classes * n, classes * n))
    else:
        inner_values, vectors = torch.linalg.eigh(curvature / len(x))
        outer_values, outer = torch.linalg.eigh(between_classes)
        values = outer_values[:, None] * inner_values
    inputs, labels = held_out
    known = torch.cat(list(_features(trunk, inputs)))[:, :-1]
    heads = [BayesianHead(weight, weight.new_tensor(p), values, vectors, outer) for p in precisions]
    head = min(heads, key=lambda head: _loss(head, known, labels.to(known.device)))
    return nn.Sequential(*trunk, head).eval()


@torch.no_grad()
def _loss(head: BayesianHead, features: Tensor, y: Tensor) -> float:
    """Negative log-likelihood of the expected softmax, of features (n, m) and labels (n,)."""
    loss = 0.0
    for some, labels in zip(torch.split(features, _BATCH), torch.split(y, _BATCH), strict=True):
        p = scores.expected_softmax(head(some)).double()
        loss += float(F.nll_loss(p.clamp(min=1e-300).log(), labels, reduction="sum"))
    return loss


@torch.no_grad()
def fit_regressor(net: nn.Sequential, x: Tensor, y: Tensor) -> nn.Sequential:
    """The conventional regressor with a posterior of its last weights, as a net of ``Moments``.

    Bayesian linear regression on the features before the last layer: exact. Noise and the prior's
    precision are those of the largest marginal likelihood, for each target by itself.

    Args:
        net: ends with an ``nn.Linear``, and what rescales outputs, if anything; shared.
        x: (n, ...) the inputs that it was trained on.
        y: (n, t) their targets.
    """
    trunk, _, rescale = divided(net)
    features = torch.cat(list(_features(trunk, x)))
    target = y.to(features)
    for layer in rescale:
        target = (target - layer.shift) / layer.scale
    values, vectors = torch.linalg.eigh(features.mT @ features)
    values = values.clamp(min=0)
    along = (vectors.mT @ (features.mT @ target)).mT  # (t, n)
    prior, noise = _evidence(values, along, target.square().sum(0), len(features))
    precision, curvature = prior[:, None], values / noise[:, None]
    weight = (along / noise[:, None] / (curvature + precision)) @ vectors.mT
    outer = torch.eye(len(noise)).to(weight)  # targets are independent
    head = BayesianHead(weight, precision, curvature, vectors, outer, noise)
    return nn.Sequential(*trunk, head, *rescale).eval()


def _evidence(
    values: Tensor, along: Tensor, squares: Tensor, samples: int
) -> tuple[Tensor, Tensor]:
    """(t,) prior precision and noise variance where the marginal likelihood is stationary.

    MacKay's fixed point, from eigenvalues (n,) of the features' second moments, what they have in
    common with the targets (t, n) and the targets' sums of squares (t,).
    """
    prior, noise = torch.ones_like(squares), squares / samples
    tiny = torch.finfo(squares.dtype).tiny
    for _ in range(_STEPS):
        precision = prior[:, None] + values / noise[:, None]
        mean = along / noise[:, None] / precision
        determined = (values / noise[:, None] / precision).sum(-1)
        left = squares - 2 * (mean * along).sum(-1) + (mean.square() * values).sum(-1)
        # Round-off can leave what is explained larger than what there is.
        left = left.clamp(min=1e-12 * squares + tiny)
        before = torch.stack([prior, noise])
        prior = determined / mean.square().sum(-1).clamp(min=tiny)
        noise = left / (samples - determined).clamp(min=1e-3 * samples)
        if torch.allclose(torch.stack([prior, noise]), before, rtol=1e-8):
            return before[0], before[1]
    return prior, noise


def head_state(net: nn.Sequential) -> dict[str, Tensor]:
    """What the Bayesian last layer adds to the network, to be kept."""
    for layer in net:
        if isinstance(layer, BayesianHead):
            return dict(layer.state_dict())
    raise ValueError("This network has no Bayesian last layer.")


def with_head(net: nn.Sequential, state: Mapping[str, Tensor]) -> nn.Sequential:
    """The conventional network with the last layer that ``head_state`` kept."""
    trunk, _, rescale = divided(net)
    return nn.Sequential(*trunk, BayesianHead(**state), *rescale).eval()


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
