"""Products, of which one factor or both vary, and quotients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from covary.covariance.samples import Samples
from covary.rules.helpers import MIXING, differentiated, estimated, merged, summed_to
from covary.rules.linear import scaled
from covary.rules.registry import EXACT, LINEARISED, Rule, composed, register, rule
from covary.varying import Varying, plain


def multiply(x: Any, y: Any) -> Varying:
    """x y; exact if one of them is constant.

    Of two that vary, E[x y] = E[x] E[y] + Cov(x, y), and the covariance follows each factor at the
    other's mean; what both do together adds Var x Var y + Cov(x, y)^2 to each element's variance.
    """
    if not isinstance(y, Varying) or y.node < 0:
        return scaled(x, plain(y))
    if not isinstance(x, Varying) or x.node < 0:
        return scaled(y, plain(x))
    mx, my = x.numbers, y.numbers
    if not x.run.tape.is_supervised:
        mx, my = mx.detach(), my.detach()

    def pull(rows: Tensor) -> list[Tensor]:
        return [summed_to(rows * b, a.shape) for a, b in ((mx, my), (my, mx))]

    product: Varying = x.run.product(x, y, merged([x, y]), pull)
    return product


register(("mul", "multiply", Tensor.__rmul__), Rule(multiply, is_pair=True))


def divide(x: Any, y: Any, *, rounding_mode: str | None = None) -> Varying:
    """x / y; exact if y is constant, linearised at the means if it varies."""
    value = x if isinstance(x, Varying) else y
    if rounding_mode is not None:
        raise value.run.refusal("It rounds, and what is rounded has no slope.")
    if not isinstance(y, Varying) or y.node < 0:
        return scaled(x, 1 / plain(y))
    values = [each for each in (x, y) if isinstance(each, Varying)]
    return differentiated(torch.div, [x, y], merged(values), LINEARISED)


rule("div", "divide", "true_divide")(divide)


@rule(Tensor.__rdiv__, Tensor.__rtruediv__)
def rdivide(x: Varying, y: Any) -> Varying:
    """``y / x``."""
    return divide(y, x)


@composed("addcmul")
def addcmul(x: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    """x + value tensor1 tensor2."""
    return x + value * (tensor1 * tensor2)


@rule("matmul", "bmm", "mm", Tensor.__rmatmul__)
def matmul(x: Any, y: Any) -> Varying:
    """Matrix product; exact if one factor is constant, linearised at the means if both vary."""
    run = _run(x, y)
    if run.function is Tensor.__rmatmul__:
        x, y = y, x
    if y.dim() == 1 and not isinstance(y, Varying):
        return torch.matmul(x, y[:, None]).squeeze(-1)  # type: ignore[return-value]
    if x.dim() == 1 and not isinstance(x, Varying):
        return torch.matmul(x[None], y).squeeze(-2)  # type: ignore[return-value]
    if min(x.dim(), y.dim()) < 2:
        raise run.refusal(
            "It takes a vector without batch dimension.", "Give it a dimension: [:, None]."
        )
    index = []
    # Along the sum the batch would mix; the other dimension of a matrix may be the batch.
    for value, summed in ((x, -1), (y, -2)):
        if isinstance(value, Varying):
            if value.samples.index.shape[summed] > 1:
                raise run.refusal("It brings different samples of the batch together.", MIXING)
            index.append(value.samples)
    dim = max(x.dim(), y.dim())
    samples = [each.of_dim(dim) for each in index]
    if len(samples) == 2 and not samples[0].agrees(samples[1]):
        raise run.refusal("It brings different samples of the batch together.", MIXING)
    both = isinstance(x, Varying) and isinstance(y, Varying)
    largest = max(samples, key=lambda each: each.index.numel())
    value = differentiated(torch.matmul, [x, y], largest, LINEARISED if both else EXACT)

    mx, my = plain(x), plain(y)

    def spread(vx: Tensor, vy: Tensor) -> Tensor:
        found: Tensor = vx @ my.square() + mx.square() @ vy
        return found

    return estimated(value, [x, y], spread)


@composed("addmm", "baddbmm")
def addmm(x: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """``beta * x + alpha * (mat1 @ mat2)``."""
    return beta * x + alpha * torch.matmul(mat1, mat2)


@rule("einsum")
def einsum(equation: str, *operands: Any) -> Varying:
    """Sums of products; exact if one operand varies, linearised at the means if more do."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    run = _run(*operands)
    if "..." in equation or not isinstance(equation, str):
        raise run.refusal("Its equation has an ellipsis.", "Write out all its indices.")
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        letters = "".join(terms)
        right = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    found: Samples | None = None
    for term, operand in zip(terms, operands, strict=True):
        if not isinstance(operand, Varying):
            continue
        index = operand.samples.index
        if any(index.shape[i] > 1 and c not in right for i, c in enumerate(term)):
            raise run.refusal("It brings different samples of the batch together.", MIXING)
        # The sample of each result: dimensions of the batch at their new places.
        sizes = [index.shape[term.index(c)] if c in term else 1 for c in right]
        batch = [i for i, c in enumerate(term) if index.shape[i] > 1]
        order = [term[i] for i in batch]
        flat = index.permute(*batch, *[i for i in range(index.dim()) if i not in batch])
        flat = flat.reshape([index.shape[i] for i in batch] or [1])
        wanted = [c for c in right if c in order]
        if batch:
            flat = flat.permute([order.index(c) for c in wanted])
        samples = Samples(flat.reshape(sizes), operand.samples.batch)
        if found is not None and not found.agrees(samples):
            raise run.refusal("It brings different samples of the batch together.", MIXING)
        if found is None or samples.index.numel() > found.index.numel():
            found = samples
    assert found is not None
    vary = sum(isinstance(operand, Varying) for operand in operands)
    kind = EXACT if vary == 1 else LINEARISED
    return differentiated(lambda *args: torch.einsum(equation, *args), list(operands), found, kind)


def _run(*values: Any) -> Any:
    return next(value for value in values if isinstance(value, Varying)).run
