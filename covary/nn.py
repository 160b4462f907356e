"""Layers that take Moments and give Moments, to be chained in ``torch.nn.Sequential``.

One value goes in and one comes out of every layer, so ordinary modules may stand in front of
``Lift`` (a mixed network) and anything that takes a tensor may follow ``out.mean``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.covariance import check_name, start
from covary.moments import Moments
from covary.settings import (
    covariance_grad,
    covariance_is_supervised,
    is_autocast,
    values_are_checked,
    without_autocast,
)

__all__ = [
    "GELU",
    "Activation",
    "BatchNorm1d",
    "Dropout",
    "Flatten",
    "Heaviside",
    "LeakyReLU",
    "Lift",
    "Linear",
    "Noise",
    "Probit",
    "ReLU",
    "Rescale",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Standardize",
    "Tanh",
]


def _check_noise(noise: float, layer: str) -> float:
    try:
        sigma = float(noise)
    except (TypeError, ValueError):
        sigma = None
    # float() reads strings, but "0.2" where a number belongs is a mistake all the same.
    if sigma is None or isinstance(noise, str):
        raise TypeError(f"{layer} needs a number as noise, got {noise!r}.")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"{layer} needs a finite noise >= 0 (a standard deviation), got {noise}.")
    return sigma


def _check_liftable(x: Tensor) -> None:
    if isinstance(x, Moments):
        raise TypeError("Lift takes a plain Tensor and got Moments. Remove the second Lift.")
    if not isinstance(x, Tensor):
        raise TypeError(f"Lift takes a Tensor, got {type(x).__name__}. Try torch.as_tensor(x).")
    if x.dtype not in (torch.float32, torch.float64):
        # Half precision has neither the range nor the digits for variances of small noise.
        pixels = "" if x.is_floating_point() else ", and divide pixel values by 255"
        raise TypeError(
            f"Lift needs float32 or float64 input, got {x.dtype}. Convert it first: "
            f"x.float(){pixels}."
        )
    if x.dim() != 2:
        raise ValueError(
            f"Lift expects input of shape (batch, features), got {tuple(x.shape)}. "
            + (
                "Put a covary.nn.Flatten before it."
                if x.dim() > 2
                else "Give a single sample a batch dimension: x[None]."
            )
        )
    if values_are_checked():
        _check_finite(x)


def _check_finite(x: Tensor) -> None:
    if x.device.type == "meta":
        return  # a shape without values
    finite = torch.isfinite(x)
    try:
        if finite.all():
            return
    except RuntimeError as error:
        if "vmap" in str(error):  # where there are no values to look at
            return
        raise
    bad = (~finite).nonzero()
    raise ValueError(
        f"Lift got {len(bad)} NaN or infinite values in an input of shape {tuple(x.shape)}, the "
        f"first at {bad[0].tolist()}. Clean the data, or skip this check within "
        "`with covary.check_values(False):`."
    )


def _check_moments(moments: Moments, layer: nn.Module, features: int | None = None) -> None:
    name = type(layer).__name__
    if not isinstance(moments, Moments):
        got = (
            f"a Tensor of shape {tuple(moments.shape)}"
            if isinstance(moments, Tensor)
            else type(moments).__name__
        )
        raise TypeError(f"{name} takes Moments and got {got}. Put a covary.nn.Lift before it.")
    if features is not None and moments.mean.shape[-1] != features:
        got_features = moments.mean.shape[-1]
        raise ValueError(
            f"{name} expects {features} features, got {got_features}. Check the width of the layer "
            "before it, or, if it comes right after Lift, whether a Flatten is missing."
        )


class Lift(nn.Module):
    """Plain tensor (B, n) -> Moments with covariance ``noise**2 * I``; docs/theory.md, eq. (2).

    Args:
        noise: the standard deviation sigma_1 of the input.
        covariance: how the network holds its covariance from here on: ``"full"`` (one matrix per
            sample), ``"diagonal"`` (variances only) or ``"shared"`` (one matrix per mini-batch, in
            evaluation mode too, so that samples depend on their neighbours; see
            ``covary.with_covariance``).
    """

    def __init__(self, noise: float, covariance: str = "full") -> None:
        super().__init__()
        self.noise = _check_noise(noise, "Lift")
        self.covariance = check_name(covariance)

    def forward(self, x: Tensor) -> Moments:
        if isinstance(x, Tensor) and is_autocast(x.device):
            x = x.float()  # a trunk may run in half precision; moments never do
        _check_liftable(x)
        # Not torch.full: where replicas of a network differ in noise, it is a tensor under vmap.
        var = x.new_zeros(1, 1) + self.noise**2
        return Moments(x, start(self.covariance, var, x.shape[-1]))

    def extra_repr(self) -> str:
        return f"noise={self.noise:g}, covariance={self.covariance!r}"


class Linear(nn.Module):
    """mean -> W mean + b, C -> W C W^T, with the parameters and initialisation of ``nn.Linear``."""

    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        plain = nn.Linear(in_features, out_features, bias, device, dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.weight = plain.weight
        self.register_parameter("bias", plain.bias)

    def forward(self, moments: Moments) -> Moments:
        _check_moments(moments, self, self.in_features)
        if moments.mean.dtype != self.weight.dtype:
            raise TypeError(
                f"Linear has {self.weight.dtype} weights and got {moments.mean.dtype} input. "
                "Convert either: x.float(), or net.double()."
            )
        with without_autocast(self.weight.device):
            mean = F.linear(moments.mean, self.weight, self.bias)
            with covariance_grad():
                return Moments(mean, moments.cov.linear(self.weight))

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"


class Noise(nn.Module):
    """Independent noise of standard deviation ``noise`` on every unit: C -> C + noise^2 I."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = _check_noise(noise, "Noise")

    def forward(self, moments: Moments) -> Moments:
        _check_moments(moments, self)
        with covariance_grad():
            return Moments(moments.mean, moments.cov.add_noise(self.noise**2))

    def extra_repr(self) -> str:
        return f"noise={self.noise:g}"


class Activation(nn.Module):
    """A moment activation, by name or as given by ``covary.activations``."""

    def __init__(self, activation: str | MomentActivation) -> None:
        super().__init__()
        self.activation = activations.get(activation)

    def forward(self, moments: Moments) -> Moments:
        _check_moments(moments, self)
        mu, cov = moments.mean, moments.cov
        with without_autocast(mu.device), covariance_grad():
            var = cov.variance
            out = self.activation(mu, var)
            reference = cov.reference(mu)
            at_reference = out if reference is mu else self.activation(reference, var)
            activated = cov.activate(at_reference.gain, at_reference.variance)
        if covariance_is_supervised():
            return Moments(out.mean, activated)
        mean: Tensor = _MeanOfConstantVariance.apply(  # type: ignore[no-untyped-call]
            mu, var, out.mean, out.gain, self.activation
        )
        return Moments(mean, activated)

    def extra_repr(self) -> str:
        return repr(self.activation)


class _MeanOfConstantVariance(torch.autograd.Function):
    """Gives ``mean`` back; its gradient with respect to mu is ``gain``. docs/theory.md, eq. (18).

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
        _check_moments(moments, self, self.num_features)
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

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class Dropout(nn.Module):
    """Drops units in training, mean and covariance by the same mask, and scales up the rest."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"Dropout needs a probability in [0, 1), got {p}.")
        self.p = p

    def forward(self, moments: Moments) -> Moments:
        _check_moments(moments, self)
        if not self.training or self.p == 0:
            return moments
        mask = F.dropout(torch.ones_like(moments.mean), self.p)
        mean = moments.mean * mask
        with without_autocast(mean.device), covariance_grad():
            return Moments(mean, moments.cov.scale(mask))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class Standardize(nn.Module):
    """Plain tensor (B, *shape) of any type -> ``(x - shift) / scale`` as floating point numbers.

    Put in front of ``Lift``, it lets a network take data as they come. It computes in the type of
    its buffers (float64 keeps small differences in a column of values around 1e9) and gives the
    type of the network (float32, or what ``net.double()`` makes it). A scale of 0, as a constant
    column has, counts as 1.
    """

    shift: Tensor
    scale: Tensor
    like: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", _usable(scale, "Standardize"))
        # No value at all, but of the type that its network is converted to.
        self.register_buffer("like", torch.empty(0), persistent=False)

    @classmethod
    def of(cls, x: Tensor) -> Standardize:
        """What brings these data (n, *shape) to average 0 and standard deviation 1."""
        return cls(x.mean(0), x.std(0, correction=0))

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.shift) / self.scale).to(self.like.dtype)


class Rescale(nn.Module):
    """mean -> mean * scale + shift, C -> scale_i scale_j C_ij: outputs in their original units.

    What comes out is of the type of the buffers if that is the wider one: float64 keeps small
    differences between values around 1e9.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("shift", shift)
        self.register_buffer("scale", _usable(scale, "Rescale"))

    @classmethod
    def of(cls, y: Tensor) -> Rescale:
        """What brings numbers of average 0 and deviation 1 to the units of these targets (n, t)."""
        return cls(y.mean(0), y.std(0, correction=0))

    def forward(self, moments: Moments) -> Moments:
        _check_moments(moments, self)
        mean = moments.mean * self.scale + self.shift
        with covariance_grad():
            return Moments(mean, moments.cov.scale(self.scale.expand(1, mean.shape[-1])))


def _usable(scale: Tensor, layer: str) -> Tensor:
    if not bool((torch.isfinite(scale) & (scale >= 0)).all()):
        raise ValueError(f"{layer} needs finite scales >= 0, got {scale}.")
    return torch.where(scale == 0, 1.0, scale).to(scale.dtype)


class Flatten(nn.Module):
    """(B, ...) -> (B, n) for plain tensors before a Lift; Moments are flat and pass unchanged."""

    def forward(self, x: Tensor | Moments) -> Tensor | Moments:
        return x if isinstance(x, Moments) else x.flatten(1)


def Heaviside() -> Activation:
    """The Heaviside step: 1 for x >= 0, else 0."""
    return Activation("heaviside")


def ReLU() -> Activation:
    """The rectified linear unit."""
    return Activation("relu")


def LeakyReLU(negative_slope: float = 0.01) -> Activation:
    """The leaky rectified linear unit."""
    return Activation(activations.leaky_relu(negative_slope))


def GELU() -> Activation:
    """x Phi(x), exactly (not its tanh approximation)."""
    return Activation("gelu")


def Probit() -> Activation:
    """Phi(x), the standard normal distribution function."""
    return Activation("probit")


def Tanh() -> Activation:
    """tanh(x), by quadrature."""
    return Activation("tanh")


def Sigmoid() -> Activation:
    """The logistic function, by quadrature."""
    return Activation("sigmoid")


def SiLU() -> Activation:
    """x sigmoid(x), by quadrature."""
    return Activation("silu")


def Softplus() -> Activation:
    """log(1 + exp(x)), by quadrature."""
    return Activation("softplus")
