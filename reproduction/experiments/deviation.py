"""How far a student's covariance is from its teacher's, deeper and deeper: the third theorem.

After convergence, as the paper has it, the student has its teacher's z, gain g and variance in
every layer; what is left is the deviation D = C - C~ of the pairs' covariances, for which

    D' = off-diagonal part of (g W) D (g W)^T

from one layer to the next: it is multiplied from both sides by the Jacobian g W of the means. The
paper bounds the largest element of D' by r times that of D, with

    r = n max(chi)^2 / sqrt(lambda^2 + 2 lambda sigma^2)                          (eq. dev_rate)

and lambda the least eigenvalue of C. Its last step bounds the product of two factors
lambda + sigma^2 / |W_i|^2 from below, and takes 1 / |W_i|^2 + 1 / |W_j|^2 >= 2 for granted (it
writes the sum of |W_i|^2 / |W_j|^2 and its inverse, which is not what stands there). That fails for
rows longer than 1. What does follow is, with the longest row A,

    r' = n max(chi)^2 / (lambda + sigma^2 / A^2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reproduction.experiment import Measured, Part
from reproduction.experiments.teacher_student import (
    DTYPE,
    Layer,
    Stepwise,
    drawn,
    lessons,
    normal,
    off_diagonal,
    posed,
    random_covariance,
    trained,
)
from reproduction.workshop import Workshop

_FRESH = 16


class Rates(NamedTuple):
    """Of one layer, each (B,)."""

    paper: Tensor  # eq. dev_rate
    corrected: Tensor  # the one that follows


def rates(before: Tensor, weight: Tensor, layer: Layer, noise: float) -> Rates:
    """The factors by which the deviation grows at most, of a layer behind covariance ``before``.

    Args:
        before: (1 | B, m, m) covariance of the layer's input, the teacher's.
        weight: (n, m).
        layer: the teacher's.
        noise: the teacher's sigma.
    """
    chi = layer.gain * layer.var.sqrt()
    # Round-off can leave -1e-19 of a positive eigenvalue.
    least = torch.linalg.eigvalsh(before)[:, 0].clamp(min=torch.finfo(DTYPE).tiny)
    above = weight.shape[1] * chi.amax(1).square()
    longest = weight.square().sum(1).max()
    paper = above / (least.square() + 2 * least * noise**2).sqrt()
    return Rates(paper, above / (least + noise**2 / longest))


def propagated(deviation: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """(B, n, n) the deviation behind a layer, from that in front of it (1 | B, m, m)."""
    jacobian = layer.gain[:, :, None] * weight
    return off_diagonal(jacobian @ deviation @ jacobian.mT)


def largest(matrix: Tensor) -> Tensor:
    """(B,) the largest element of matrices: the paper's infinity norm."""
    return matrix.abs().amax((-2, -1))


class Depth(NamedTuple):
    """By layer, the input first, each (L + 1, B); rates are (L, B)."""

    deviation: Tensor  # largest element: of all at the input, of pairs behind it
    covariance: Tensor  # largest element of the teacher's, off the diagonal
    response: Tensor  # largest singular value of the Jacobian from the input, squared
    paper: Tensor
    corrected: Tensor


def through(teacher: Stepwise, layers: list[Layer], deviations: list[Tensor]) -> Depth:
    """Sizes and rates, given the deviation in front of the first layer and behind every one."""
    count = len(layers[0].mean)
    befores = [teacher.input_cov[None].expand(count, -1, -1), *(layer.cov for layer in layers)]
    product = torch.eye(len(teacher.input_cov), dtype=DTYPE).expand(count, -1, -1)
    responses, found = [torch.ones(count, dtype=DTYPE)], []
    for before, weight, layer in zip(befores, teacher.weights, layers, strict=False):
        product = layer.gain[:, :, None] * (weight @ product)
        responses.append(torch.linalg.matrix_norm(product, 2).square())
        found.append(rates(before, weight, layer, teacher.noise))
    return Depth(
        torch.stack([largest(each).expand(count) for each in deviations]),
        torch.stack([largest(off_diagonal(each)) for each in befores]),
        torch.stack(responses),
        torch.stack([each.paper for each in found]),
        torch.stack([each.corrected for each in found]),
    )


def idealised(teacher: Stepwise, x: Tensor, input_cov: Tensor) -> Depth:
    """A student that has learned all but covariances, and takes those of its input to be others."""
    layers = teacher.layers(x)
    deviations = [(teacher.input_cov - input_cov)[None]]
    for weight, layer in zip(teacher.weights, layers, strict=True):
        deviations.append(propagated(deviations[-1], weight, layer))
    return through(teacher, layers, deviations)


def observed(teacher: Stepwise, student: Stepwise, x: Tensor) -> Depth:
    """A student as it is; like the theorem this looks at pairs, and not at variances."""
    taught = teacher.layers(x)
    deviations = [(teacher.input_cov - student.input_cov)[None]]
    for true, own in zip(taught, student.layers(x), strict=True):
        deviations.append(off_diagonal(true.cov - own.cov))
    return through(teacher, taught, deviations)


def balanced(teacher: Stepwise, x: Tensor, ratio: float, generator: torch.Generator) -> Stepwise:
    """Other biases, with which every unit has |z| = ``ratio`` for the one input x (1, m)."""
    biases = list(teacher.biases)
    for i, weight in enumerate(teacher.weights):
        layer = teacher.with_parameters([*teacher.weights, *biases]).layers(x)[i]
        sign = normal((len(weight),), generator).sign()
        biases[i] = biases[i] + (sign * ratio - layer.z[0]) * layer.var[0].sqrt()
    return teacher.with_parameters([*teacher.weights, *biases])


def counterexample(generator: torch.Generator, *, units: int = 10) -> tuple[Stepwise, Tensor]:
    """A layer whose deviation grows by more than r, and the input covariance of its student.

    Two units with the same long weights, at their threshold for the input 0, and inputs without
    correlation, which the student takes to be somewhat correlated: every inequality but the last
    is an equality.
    """
    low, high = torch.tensor([0.05, 0.2, 2.0], dtype=DTYPE), torch.tensor([0.5, 1.0, 5.0])
    uniform = torch.rand(3, generator=generator, dtype=DTYPE)
    variance, noise, length = (low + (high - low) * uniform).tolist()
    ones = torch.ones(2, units, dtype=DTYPE)
    teacher = Stepwise(
        (ones * length / units**0.5,),
        (torch.zeros(2, dtype=DTYPE),),
        variance * torch.eye(units, dtype=DTYPE),
        noise,
    )
    shift = 0.5 * variance / units
    return teacher, teacher.input_cov - shift * torch.ones(units, units, dtype=DTYPE)


def measure(part: Part, _workshop: Workshop) -> Measured:
    """Deviations by depth, and rates that bound them.

    Settings: ``kind`` is ``"random"`` or ``"balanced"`` (``widths``, ``inputs``, ``noise``,
    ``input_variance`` of teacher and student; ``ratio``), ``"counterexample"`` (nothing else), or
    ``"trained"`` (as ``learned_moments``).
    """
    settings = part.settings
    kind = settings["kind"]
    generator = torch.Generator().manual_seed(part.seed)
    before: Depth | None = None
    if kind == "trained":
        before, depth = _trained(settings, generator)
    elif kind == "counterexample":
        teacher, input_cov = counterexample(generator)
        depth = idealised(teacher, torch.zeros(1, len(input_cov), dtype=DTYPE), input_cov)
    else:
        teacher, x, input_cov = drawn_teacher(settings, generator, settings["inputs"])
        if kind == "balanced":
            teacher = balanced(teacher, x, settings["ratio"], generator)
        depth = idealised(teacher, x, input_cov)
    return Measured(numbers_of(depth, before), series_of(depth))


def drawn_teacher(
    settings: Mapping[str, Any], generator: torch.Generator, inputs: int, **more: Any
) -> tuple[Stepwise, Tensor, Tensor]:
    """A random teacher, inputs (inputs, n), and the covariance (n, n) of inputs that its student
    assumes; ``more`` goes to the teacher."""
    width = settings["widths"][0]
    known, assumed = settings["input_variance"]
    teacher = drawn(
        settings["widths"],
        generator,
        input_cov=random_covariance(width, generator, trace=known * width),
        noise=settings["noise"],
        **more,
    )
    x = normal((inputs, width), generator)
    return teacher, x, assumed * torch.eye(width, dtype=DTYPE)


def _trained(settings: Any, generator: torch.Generator) -> tuple[Depth, Depth]:
    """Deviations of a student before and after training."""
    teacher, student = posed(settings, generator)
    given = lessons(settings, teacher, generator)
    fresh = normal((_FRESH, settings["widths"][0]), generator)
    result = trained(student, given, steps=settings["steps"], lr=settings["lr"])
    return observed(teacher, student, fresh), observed(teacher, result.student, fresh)


def numbers_of(depth: Depth, before: Depth | None = None) -> dict[str, float]:
    """What claims are about, of all inputs."""
    grown = depth.deviation[1:] / depth.deviation[:-1]
    numbers = {
        "ratio_over_rate": (grown / depth.paper).max().item(),
        "ratio_over_corrected_rate": (grown / depth.corrected).max().item(),
        "average_ratio": grown.log().mean().exp().item(),
        "largest_rate": depth.paper.max().item(),
        "smallest_rate": depth.paper.min().item(),
        # Of the input for which it is the least; layers to infinity need it to grow without end.
        "sum_of_minus_log_rate": -depth.paper.log().sum(0).max().item(),
        "deviation_left": (depth.deviation[-1] / depth.deviation[0]).max().item(),
        "relative_deviation": (depth.deviation[-1] / depth.covariance[-1]).max().item(),
        "relative_deviation_first": (depth.deviation[1] / depth.covariance[1]).max().item(),
        "response_left": depth.response[-1].max().item(),
    }
    if before is not None:
        numbers["relative_deviation_before"] = (
            (before.deviation[-1] / before.covariance[-1]).max().item()
        )
    return numbers


def series_of(depth: Depth) -> dict[str, list[float]]:
    """Medians over inputs, by layer."""
    relative = depth.deviation[1:] / depth.covariance[1:]
    curves = {
        "deviation": depth.deviation,
        "relative": relative,
        "ratio": depth.deviation[1:] / depth.deviation[:-1],
        "response": depth.response,
        "rate": depth.paper,
        "corrected_rate": depth.corrected,
        "sum_of_minus_log_rate": -depth.paper.log().cumsum(0),
    }
    return {name: np.median(curve.numpy(), axis=1).tolist() for name, curve in curves.items()}
