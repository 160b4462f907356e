"""Layers without weights between units: noise, activation, normalisation, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.covariance import Rows
from covary.moments import Moments
from covary.nn.checks import check_flat, check_moments, check_noise
from covary.nn.protocol import Drawn, Noisy, each_row, share
from covary.settings import covariance_grad, covariance_is_supervised, without_autocast


class Noise(Noisy):
    """Independent noise of standard deviation ``noise`` on every unit: C -> C + noise^2 I.

    The noise is saved with the weights (``state_dict``), and loaded with them.
    """

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = check_noise(noise, "Noise")

    @each_row
    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self)
        with covariance_grad():
            return Moments(moments.mean, moments.cov.add_noise(self.noise**2))

    def extra_repr(self) -> str:
        return f"noise={self.noise:g}"


class Activation(nn.Module):
    """Layer of a moment activation, given by name or by ``covary.activations``.

    mean -> E h(x), C -> covariance of h(x), for x of these moments; docs/theory.md, eq. (3).
    """

    def __init__(self, activation: str | MomentActivation) -> None:
        super().__init__()
        self.activation = activations.get(activation)

    @each_row
    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self)
        mu, cov = moments.mean, moments.cov
        with without_autocast(mu.device), covariance_grad():
            out, activated = cov.activate(self.activation, mu)
        if covariance_is_supervised() or not torch.is_grad_enabled():
            return Moments(out.mean, activated)
        var = cov.unit_variance.detach()
        mean = mean_of_constant_variance(mu, var, out.mean, out.gain, self.activation)
        return Moments(mean, activated)

    def plain(self) -> Function:
        """h itself, unit by unit."""
        return Function(self.activation)

    def drawn(self) -> Drawn:
        """h(v)."""
        return Drawn(activation=self.activation)

    def extra_repr(self) -> str:
        return repr(self.activation)


class Function(nn.Module):
    """The conventional layer of an activation: tensors (B, n) -> h(x), unit by unit."""

    def __init__(self, activation: MomentActivation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation.function(x)

    def extra_repr(self) -> str:
        return repr(self.activation)


def mean_of_constant_variance(
    mu: Tensor, var: Tensor, mean: Tensor, gain: Tensor, activation: MomentActivation
) -> Tensor:
    """The mean of an activation, whose gradient is its gain unless covariances are supervised."""
    if covariance_is_supervised() or not torch.is_grad_enabled():
        return mean
    found: Tensor = _MeanOfConstantVariance.apply(  # type: ignore[no-untyped-call]
        mu, var, mean, gain, activation
    )
    return found


class _MeanOfConstantVariance(torch.autograd.Function):
    """Gives ``mean`` back; its gradient with respect to mu is ``gain``. docs/theory.md, eq. (23).

    The gain comes with the covariance, so the backward pass of SMUC costs one product and keeps
    none of the activation's intermediate results.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        mu: Tensor, var: Tensor, mean: Tensor, gain: Tensor, activation: MomentActivation
    ) -> Tensor:
        return mean.view_as(mean)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        mu, var, _, gain, ctx.activation = inputs
        ctx.save_for_backward(mu, var, gain)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mu, var, gain = ctx.saved_tensors
        if torch.is_grad_enabled():
            # A second derivative is wanted, so the gain has to remember that it depends on mu.
            gain = ctx.activation(mu, var).gain
        return grad * gain, None, None, None, None


class BatchNorm1d(nn.Module):
    """Normalises the mean as ``nn.BatchNorm1d`` does, and scales the covariance alike.

    In training the statistics are those of the batch's means, otherwise the running ones; the
    covariance is multiplied by the *same* scale, ``weight / sqrt(var + eps)``.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.momentum = momentum
        plain = nn.BatchNorm1d(num_features, affine=affine, device=device, dtype=dtype)
        self.register_parameter("weight", plain.weight)
        self.register_parameter("bias", plain.bias)
        for name, buffer in plain.named_buffers():
            self.register_buffer(name, buffer)

    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self, self.num_features)
        check_flat(moments, self)
        mean, var = moments.mean, self.running_var
        if self.training:
            var = mean.var(0, correction=0)
            self.num_batches_tracked.add_(1)
        normalised = F.batch_norm(
            mean,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        with covariance_grad():
            scale = torch.rsqrt(var + self.eps)
            if self.weight is not None:
                scale = scale * self.weight
            return Moments(normalised, moments.cov.scale(scale[None]))

    def plain(self) -> nn.BatchNorm1d:
        """``nn.BatchNorm1d`` of the same parameters and running statistics."""
        affine = self.weight is not None
        plain = nn.BatchNorm1d(self.num_features, self.eps, self.momentum, affine, device="meta")
        return share(self, plain)

    def drawn(self) -> Drawn:
        """(v - running mean) weight / sqrt(running variance + eps) + bias."""
        scale = torch.rsqrt(self.running_var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -self.running_mean * scale
        return Drawn(scale=scale, shift=shift if self.bias is None else shift + self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class Dropout(nn.Module):
    """Drops units in training, mean and covariance by the same mask, and scales up the rest."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout needs a probability in [0, 1), got {p}.")
        self.p = p

    @each_row
    def forward(self, moments: Moments) -> Moments:
        check_moments(moments, self)
        if not self.training or self.p == 0:
            return moments
        mask = F.dropout(torch.ones_like(moments.mean), self.p)
        mean = moments.mean * mask
        with without_autocast(mean.device), covariance_grad():
            return Moments(mean, moments.cov.scale(mask))

    def plain(self) -> nn.Dropout:
        """``nn.Dropout`` of the same probability."""
        return nn.Dropout(self.p)

    def drawn(self) -> Drawn:
        """v: nothing is dropped in evaluation."""
        return Drawn()

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Flatten(nn.Module):
    """(B, ...) -> (B, n), for plain tensors before a Lift and for Moments behind it."""

    def forward(self, x: Tensor | Moments) -> Tensor | Moments:
        if not isinstance(x, Moments):
            return x.flatten(1)
        return Moments(x.flat_mean, x.cov.flattened() if isinstance(x.cov, Rows) else x.cov)

    def plain(self) -> Flatten:
        """Itself."""
        return self

    def drawn(self) -> Drawn:
        """v: draws are of flat units."""
        return Drawn()
