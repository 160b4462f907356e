"""Layers without weights between units: noise, activations, normalisation, dropout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from covary import activations
from covary.activations import MomentActivation
from covary.covariance import Rows, Shared
from covary.moments import Moments
from covary.nn.protocol import (
    Drawn,
    Noisy,
    check_features,
    check_moments,
    check_noise,
    each_row,
    share,
    taken,
)
from covary.settings import covariance_grad, covariance_is_supervised, without_autocast


class Noise(Noisy):
    """Independent noise of standard deviation ``noise`` on every unit: C -> C + noise^2 I."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = check_noise(noise, "Noise")

    @each_row
    def forward(self, moments: Moments) -> Moments:
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
        mu, cov = moments.mean, moments.cov
        with without_autocast(mu.device), covariance_grad():
            mean, gain, activated = cov.activate(self.activation, mu)
        if covariance_is_supervised() or not torch.is_grad_enabled():
            return Moments(mean, activated)
        var = cov.unit_variance.detach()
        return Moments(mean_of_constant_variance(mu, var, mean, gain, self.activation), activated)

    def plain(self) -> Function:
        return Function(self.activation)

    def drawn(self) -> Drawn:
        return Drawn(activation=self.activation)

    def extra_repr(self) -> str:
        return repr(self.activation)


class Function(nn.Module):
    """The conventional layer of an activation: tensors (B, n) -> h(x), unit by unit."""

    def __init__(self, activation: MomentActivation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return applied(x, self.activation)

    def extra_repr(self) -> str:
        return repr(self.activation)


def applied(x: Tensor, activation: MomentActivation) -> Tensor:
    """h(x), unit by unit; a torch function, for which ``covary.rules`` has a rule."""
    if has_torch_function_unary(x):
        found: Tensor = handle_torch_function(applied, (x,), x, activation)
        return found
    return activation.function(x)


class _Named(Activation):
    """An activation without options, of this name in ``covary.activations``."""

    name: str

    def __init_subclass__(cls, name: str | None = None) -> None:
        cls.name = name or cls.name

    def __init__(self) -> None:
        super().__init__(self.name)

    def extra_repr(self) -> str:
        return ""


class Heaviside(_Named, name="heaviside"):
    """The Heaviside step: 1 for x >= 0, else 0."""


class ReLU(_Named, name="relu"):
    """The rectified linear unit: max(x, 0)."""


class GELU(_Named, name="gelu"):
    """x Phi(x), exactly (not its tanh approximation)."""


class Probit(_Named, name="probit"):
    """Phi(x), the standard normal distribution function."""


class Tanh(_Named, name="tanh"):
    """tanh(x), by quadrature."""


class Sigmoid(_Named, name="sigmoid"):
    """The logistic function, by quadrature."""


class SiLU(_Named, name="silu"):
    """x sigmoid(x), by quadrature."""


class Softplus(_Named, name="softplus"):
    """log(1 + exp(x)), by quadrature."""


class LeakyReLU(Activation):
    """The leaky rectified linear unit: x for x >= 0, else ``negative_slope`` x."""

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__(activations.leaky_relu(negative_slope))
        self.negative_slope = negative_slope

    def extra_repr(self) -> str:
        return f"negative_slope={self.negative_slope}"


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
        check_moments(moments, self)
        check_features(moments, self, self.num_features)
        mean, var = moments.mean, self.running_var
        if mean.dim() > 2:
            raise ValueError(
                f"BatchNorm1d takes Moments of shape (batch, features), got {tuple(mean.shape)}. "
                "Put a covary.nn.Flatten before it."
            )
        if self.training:
            var = mean.var(0, correction=0)
            self.num_batches_tracked.add_(1)
        state = self.running_mean, self.running_var, self.weight, self.bias
        normalised = F.batch_norm(mean, *state, self.training, self.momentum, self.eps)
        with covariance_grad():
            return Moments(normalised, moments.cov.scale(self._scale(var)[None]))

    def _scale(self, var: Tensor) -> Tensor:
        scale = torch.rsqrt(var + self.eps)
        return scale if self.weight is None else scale * self.weight

    def plain(self) -> nn.BatchNorm1d:
        affine = self.weight is not None
        plain = nn.BatchNorm1d(self.num_features, self.eps, self.momentum, affine, device="meta")
        return share(self, plain)

    def drawn(self) -> Drawn:
        """(v - running mean) weight / sqrt(running variance + eps) + bias."""
        scale = self._scale(self.running_var)
        shift = -self.running_mean * scale
        return Drawn(scale=scale, shift=shift if self.bias is None else shift + self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class Dropout(nn.Module):
    """Drops units in training, mean and covariance by the same mask, and scales up the rest.

    In evaluation it does nothing; or, ``as_noise``, it is the noise of masks that nobody draws
    (MC dropout): C -> C + diag(p / (1 - p) (mean^2 + variance)), docs/theory.md, eq. (42). Which of
    the two is saved with the weights, and taken from there.
    """

    def __init__(self, p: float = 0.5, *, as_noise: bool = False) -> None:
        super().__init__()
        self.as_noise = as_noise
        if not 0 <= p < 1:
            raise ValueError(f"Dropout needs a probability in [0, 1), got {p}.")
        self.p = p

    @each_row
    def forward(self, moments: Moments) -> Moments:
        if self.p == 0 or not (self.training or self.as_noise):
            return moments
        if not self.training:
            return self._with_noise(moments)
        mask = F.dropout(torch.ones_like(moments.mean), self.p)
        mean = moments.mean * mask
        with without_autocast(mean.device), covariance_grad():
            return Moments(mean, moments.cov.scale(mask))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.as_noise:  # a key that is there or not
            destination[f"{prefix}as_noise"] = torch.tensor(True)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        key = f"{prefix}as_noise"
        if key in state_dict:
            self.as_noise = taken(True, self.as_noise, prefix, "as_noise")
        others = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(others, prefix, *rest)

    def _with_noise(self, moments: Moments) -> Moments:
        """The moments of units that are dropped at random: their mean stays."""
        mean, cov = moments.mean, moments.cov
        with without_autocast(mean.device), covariance_grad():
            at = mean if covariance_is_supervised() else mean.detach()
            variance = cov.unit_variance
            added = (at.square() + variance) * (self.p / (1 - self.p))
            if isinstance(cov, Shared):  # one covariance for all: that of the average sample
                added = added.mean(0, keepdim=True)
            return Moments(mean, cov.gate(torch.ones_like(added), variance + added))

    def plain(self) -> nn.Dropout:
        return nn.Dropout(self.p)

    def drawn(self) -> Drawn:
        """v: nothing is dropped in evaluation."""
        if self.as_noise and self.p:
            raise ValueError(
                "Dropout as noise is drawn by covary.verify, or by covary.convert(net, "
                "dropout=True), and not by simulations of chains."
            )
        return Drawn()

    def extra_repr(self) -> str:
        return f"p={self.p}, as_noise=True" if self.as_noise else f"p={self.p}"


class Flatten(nn.Module):
    """(B, ...) -> (B, n), for plain tensors before a Lift and for Moments behind it."""

    def forward(self, x: Tensor | Moments) -> Tensor | Moments:
        if not isinstance(x, Moments):
            return x.flatten(1)
        return Moments(x.flat_mean, x.cov.flattened() if isinstance(x.cov, Rows) else x.cov)

    def plain(self) -> Flatten:
        return self

    def drawn(self) -> Drawn:
        """v: draws are of flat units."""
        return Drawn()
