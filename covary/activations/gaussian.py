"""Tail integrals of the standard normal: the special functions of the closed forms.

Every closed form in this package is built from the density at ``a = |mu| / sigma`` and the first
three iterated tail integrals there (docs/theory.md, eq. 8),

    mass   = P(x > a),    first = E[(x - a)+],    second = E[(x - a)+^2],

each of which keeps its *relative* accuracy as far out as it can be represented.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

# Beyond this many standard deviations the density underflows, and with it everything below.
_FAR = {torch.float32: 16.0, torch.float64: 40.0}

# second / (2 first) on [0, 16] as a ratio of polynomials in a (lowest power first), fitted to its
# relative error (1.3e-8) by `benchmarks/fit_tail_ratio.py`. All coefficients are positive, so
# nothing cancels.
_NUMERATOR = (
    0.6266570766653896,
    0.346986745915682,
    0.10308939424624684,
    0.017133563395674737,
    0.0013835503711101692,
)
_DENOMINATOR = (
    1.0,
    0.8961663419744925,
    0.40060232286550956,
    0.10710280045320783,
    0.017138483872372195,
    0.001383473685191438,
)
# Of second / first, both polynomials, highest power first.
_TWICE_RATIO = [*(2 * above for above in reversed(_NUMERATOR)), *reversed(_DENOMINATOR)]


class Tail(NamedTuple):
    """Density and iterated tail integrals of N(0, 1) at ``a = |mu| / sigma``, of mu's shape."""

    a: Tensor
    density: Tensor
    mass: Tensor
    first: Tensor
    second: Tensor


def tail(mu: Tensor, sigma: Tensor) -> Tail:
    """Density and tail integrals of N(0, 1) beyond a = |mu| / sigma; docs/theory.md, eqs. (8), (9).

    What is made of them is smooth, also at mu = 0, though |mu| is not: there, its derivative is
    taken from the left, as in ``F.relu`` and ``below``. (That of ``abs`` is 0, neither side's.)
    """
    a = (F.leaky_relu(mu, -1.0) / sigma).clamp(max=_FAR.get(mu.dtype, 16.0))
    density = torch.exp(_plus_product(-0.5 * math.log(2 * math.pi), a, a, factor=-0.5))
    # The integrals divided by the density vary slowly: g0, g1 and g2 = second / 2 are R_0, R_1 and
    # R_2 of the theory, and obey 1 = g1 + a g0 and g0 = 2 g2 + a g1.
    if mu.dtype == torch.float64:
        g0 = math.sqrt(math.pi / 2) * torch.special.erfcx(a * math.sqrt(0.5))
        g1 = 1 - a * g0
        twice_g2 = g0 - a * g1
        return Tail(a, density, density * g0, density * g1, density * twice_g2)
    # The differences above lose a^4 / 2 units in the last place: nothing in float64, all of
    # float32. Starting from the ratio g2 / g1 the same relations only add and multiply.
    coefficients = _coefficients(a)
    above, below = coefficients[: len(_NUMERATOR)], coefficients[len(_NUMERATOR) :]
    twice_ratio = _horner(above, a) / _horner(below, a)
    slope = a + twice_ratio
    first = density / _plus_product(1.0, a, slope)
    return Tail(a, density, first * slope, first, first * twice_ratio)


def below(mu: Tensor, beyond: Tail) -> Tensor:
    """P(x > 0) for x ~ N(mu, var), from the tail beyond; of mu, its sign counts alone."""
    # |1 - mass| or |0 - mass|. A torch.where on signs that come at random is far slower: no
    # processor guesses them; and so is a comparison, whose result has to be converted.
    return (mu.detach().sign().relu() - beyond.mass).abs()


_kept: dict[tuple[torch.dtype, torch.device], tuple[Tensor, ...]] = {}


def _coefficients(a: Tensor) -> tuple[Tensor, ...]:
    """The numbers above as tensors of a's type, on its device; made once for each."""
    if torch.compiler.is_compiling():
        return torch.tensor(_TWICE_RATIO, dtype=a.dtype, device=a.device).unbind()
    key = a.dtype, a.device
    if key in _kept and type(a) is Tensor:
        return _kept[key]
    with torch.inference_mode(False):
        made = torch.tensor(_TWICE_RATIO, dtype=a.dtype, device=a.device).unbind()
    # Tensors that stand for others, such as those of vmap, are not for later use.
    if type(made[0]) is Tensor and not is_functorch_wrapped_tensor(made[0]):
        _kept[key] = made
    return made


def _horner(coefficients: Sequence[Tensor], a: Tensor) -> Tensor:
    """The polynomial with these coefficients, highest power first, at ``a``."""
    special = torch.compiler.is_compiling() or is_functorch_wrapped_tensor(a)
    in_place = not torch.is_grad_enabled() and not special
    highest, second, *rest = coefficients
    value = torch.addcmul(second, highest, a)  # one pass over memory
    for coefficient in rest:
        value = torch.addcmul(coefficient, value, a, out=value if in_place else None)
    return value


def _plus_product(constant: float, x: Tensor, y: Tensor, *, factor: float = 1.0) -> Tensor:
    """``constant + factor * x * y`` in one pass over memory, which is what these formulas cost."""
    return torch.addcmul(x.new_full((), constant), x, y, value=factor)
