"""Smooth activations without closed forms, by quadrature: tanh, sigmoid, SiLU, softplus and others.

Errors of the mean (relative to max(|mean|, sigma)), the variance and the gain (relative) are below
1e-5 in float32 and 1e-9 in float64 up to sigma = 3, and grow beyond. Where a function is all but
constant (tanh at 8), gains and variances are exact to rounding errors of its values only.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from covary.activations.activation import Function, MomentActivation
from covary.activations.hermite import SHARP, SMOOTH, Rules, between, quadrature_moments


def _made(
    name: str, function: Function, slope: Function, rules: Rules = SMOOTH
) -> MomentActivation:
    moments = partial(quadrature_moments, function=function, derivative=slope, rules=rules)
    return MomentActivation(name, function, slope, moments)


def _tanh_slope(x: Tensor) -> Tensor:
    # Not 1 - tanh(x)^2, which in float32 has lost every digit by x = 9.
    return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)


def _sigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * torch.sigmoid(-x)


def _silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def _softplus_slope(x: Tensor, *, beta: float) -> Tensor:
    return torch.sigmoid(beta * x)


@lru_cache
def softplus(beta: float = 1.0, threshold: float = 20.0) -> MomentActivation:
    """``log(1 + exp(beta x)) / beta``, and x where beta x > threshold, as in ``torch.nn.Softplus``.

    For beta > 1 the errors named above hold up to sigma = 6 / beta.
    """
    if not (math.isfinite(beta) and beta > 0):
        raise ValueError(f"softplus needs a finite beta > 0, got {beta}.")
    standard = (beta, threshold) == (1.0, 20.0)
    return _made(
        "softplus" if standard else f"softplus({beta:g}, {threshold:g})",
        partial(F.softplus, beta=beta, threshold=threshold),
        partial(_softplus_slope, beta=beta),
        SMOOTH if beta <= 1 else SHARP,
    )


def _logsigmoid_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(-x)


def _mish_slope(x: Tensor) -> Tensor:
    soft = F.softplus(x)
    return torch.tanh(soft) + x * torch.sigmoid(x) * _tanh_slope(soft)


def _tanhshrink_slope(x: Tensor) -> Tensor:
    return torch.tanh(x).square()


def _softsign_slope(x: Tensor) -> Tensor:
    return (1 + x.abs()).pow(-2)


# Beyond this the exponent of gelu_tanh, which grows like x^3, is far from mattering.
_GELU_REACH = 100.0


def _gelu_exponent(x: Tensor) -> Tensor:
    x = x.clamp(-_GELU_REACH, _GELU_REACH)
    return math.sqrt(8 / math.pi) * (x + 0.044715 * x.pow(3))


def _gelu_tanh(x: Tensor) -> Tensor:
    # (1 + tanh(u)) / 2 = sigmoid(2 u) keeps its digits in the negative tail.
    return x * torch.sigmoid(_gelu_exponent(x))


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    exponent, near = _gelu_exponent(x), x.clamp(-_GELU_REACH, _GELU_REACH)
    bend = math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * near.square())
    return torch.sigmoid(exponent) * (1 + near * torch.sigmoid(-exponent) * bend)


TANH = _made("tanh", torch.tanh, _tanh_slope, SHARP)
SIGMOID = _made("sigmoid", torch.sigmoid, _sigmoid_slope)
SILU = _made("silu", F.silu, _silu_slope)
MISH = _made("mish", F.mish, _mish_slope)
LOGSIGMOID = _made("logsigmoid", F.logsigmoid, _logsigmoid_slope)
GELU_TANH = _made("gelu_tanh", _gelu_tanh, _gelu_tanh_slope)
TANHSHRINK = _made("tanhshrink", F.tanhshrink, _tanhshrink_slope, SHARP)
SOFTSIGN = _made("softsign", F.softsign, _softsign_slope, between([0.0]))
