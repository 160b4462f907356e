"""Teacher and student: two networks that differ in the noise they know of, of Heaviside units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation

HEAVISIDE = activations.get("heaviside")
DTYPE = torch.float64


class Layer(NamedTuple):
    """What a layer makes of B inputs; n units. Of a linear readout ``z`` and ``gain`` are empty."""

    z: Tensor  # (B, n) mean over standard deviation, before the activation
    var: Tensor  # (1 | B, n) variance before the activation
    gain: Tensor  # (B, n) slope of the mean
    mean: Tensor  # (B, n)
    cov: Tensor  # (1 | B, n, n)

    @property
    def variance(self) -> Tensor:
        """(1 | B, n) the diagonal of the covariance."""
        return self.cov.diagonal(dim1=-2, dim2=-1)


@dataclass(frozen=True)
class Stepwise:
    """A moment network, of Heaviside units unless told otherwise, with the noise that it assumes.

    Attributes:
        weights: (n, m) of each layer.
        biases: (n,) of each layer.
        input_cov: (m, m) covariance of the input.
        noise: sigma before each activation.
        readout: whether the last layer is linear; it then has no noise.
        activation: of all units but those of a readout.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    input_cov: Tensor
    noise: float
    readout: bool = False
    activation: MomentActivation = HEAVISIDE

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Weights and biases."""
        return (*self.weights, *self.biases)

    def with_parameters(self, parameters: Sequence[Tensor]) -> Stepwise:
        """The same noise with other weights and biases."""
        count = len(self.weights)
        return replace(
            self, weights=tuple(parameters[:count]), biases=tuple(parameters[count : 2 * count])
        )

    def layers(self, x: Tensor) -> list[Layer]:
        """Moments after every layer for inputs (B, m).

        Gradients go through means alone (SMUC), in the way of ``covary.nn``: docs/theory.md,
        eqs. (2) and (3). Written out here because the theorems are about what is in between.
        """
        mean, cov = x, self.input_cov[None]
        found = []
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            mu = mean @ weight.mT + bias
            with torch.no_grad():
                before = weight @ cov @ weight.mT
            if self.readout and i == len(self.weights) - 1:
                nothing = mu.new_zeros(0)
                found.append(Layer(nothing, nothing, nothing, mu, before))
                break
            with torch.no_grad():
                before = before + self.noise**2 * torch.eye(len(weight), dtype=DTYPE)
                var = before.diagonal(dim1=-2, dim2=-1)
            mean, variance, gain = self.activation(mu, var)
            with torch.no_grad():
                cov = with_diagonal(gain[:, :, None] * before * gain[:, None, :], variance)
                found.append(Layer(mu / var.sqrt(), var, gain, mean, cov))
            found[-1] = found[-1]._replace(mean=mean)
        return found

    def output(self, x: Tensor) -> Tensor:
        """(B, n) means of the last layer."""
        return self.layers(x)[-1].mean


def with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """(B, n, n) with another diagonal (B, n)."""
    return matrix + torch.diag_embed(diagonal - matrix.diagonal(dim1=-2, dim2=-1))


def off_diagonal(matrix: Tensor) -> Tensor:
    """(B, n, n) with nothing on the diagonal."""
    return matrix - torch.diag_embed(matrix.diagonal(dim1=-2, dim2=-1))


def drawn(
    widths: Sequence[int],
    generator: torch.Generator,
    *,
    input_cov: Tensor,
    noise: float,
    readout: bool = False,
    gain: float = 2.0,
    offset: float = 0.5,
    activation: MomentActivation = HEAVISIDE,
) -> Stepwise:
    """Random weights of deviation ``gain / sqrt(m)``, and biases of deviation ``offset``.

    Behind Heaviside units, whose signals are 0 or 1, biases are centred on signals of one half:
    units would be on or off for all inputs otherwise.
    """
    centre = 0.5 if activation is HEAVISIDE else 0.0
    weights, biases = [], []
    for i, (before, after) in enumerate(pairwise(widths)):
        weight = normal((after, before), generator) * gain / math.sqrt(before)
        bias = normal((after,), generator) * offset
        weights.append(weight)
        biases.append(bias - centre * weight.sum(1) if i else bias)
    return Stepwise(tuple(weights), tuple(biases), input_cov, noise, readout, activation)


def normal(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(tuple(shape), generator=generator, dtype=DTYPE)


def random_covariance(size: int, generator: torch.Generator, *, trace: float) -> Tensor:
    """(m, m) positive definite, with correlations; its average variance is ``trace / m``."""
    factor = normal((size, size), generator) / math.sqrt(size)
    matrix = factor @ factor.mT + 0.1 * torch.eye(size, dtype=DTYPE)
    return matrix * (trace / matrix.trace())


def posed(
    settings: Mapping[str, Any],
    generator: torch.Generator,
    *,
    activation: MomentActivation = HEAVISIDE,
) -> tuple[Stepwise, Stepwise]:
    """A teacher and a student of the same widths that take other noise to be there.

    The teacher's input covariance is random, the student's is a multiple of the identity. Settings:
    ``widths``, ``readout``, ``input_variance`` (average, of both), ``noise`` (of both) and
    ``start``: ``"random"``, or ``"near"`` for the teacher's parameters with a tenth of their spread
    added; ``"random-informed"`` and ``"near-informed"`` students have the teacher's noise. ``gain``
    is that of ``drawn``, and its default if it is not there.
    """
    widths, readout = settings["widths"], settings["readout"]
    known, assumed = settings["input_variance"]
    covariance = random_covariance(widths[0], generator, trace=known * widths[0])
    teacher, student = (
        drawn(
            widths,
            generator,
            input_cov=input_cov,
            noise=noise,
            readout=readout,
            gain=settings.get("gain", 2.0),
            activation=activation,
        )
        for input_cov, noise in zip(
            (covariance, assumed * torch.eye(widths[0], dtype=DTYPE)),
            settings["noise"],
            strict=True,
        )
    )
    start, _, informed = settings["start"].partition("-")
    if start == "near":
        student = student.with_parameters(
            [each + 0.1 * each.std() * normal(each.shape, generator) for each in teacher.parameters]
        )
    if informed:
        student = replace(student, input_cov=teacher.input_cov, noise=teacher.noise)
    return teacher, student


class Lesson(NamedTuple):
    """What a student is shown at a step."""

    x: Tensor  # (B, m)
    target: Tensor  # (B, n) the teacher's output means


def lessons(
    settings: Mapping[str, Any], teacher: Stepwise, generator: torch.Generator
) -> Iterator[Lesson]:
    """Without end: the same ``inputs`` at each step, or ``batch`` fresh ones.

    A student that sees no input twice cannot fit those it has seen and miss others.
    """
    width = settings["widths"][0]

    def lesson(size: int) -> Lesson:
        x = normal((size, width), generator)
        return Lesson(x, teacher.output(x))

    if "batch" in settings:
        return (lesson(settings["batch"]) for _ in count())
    return repeat(lesson(settings["inputs"]))


class Trained(NamedTuple):
    """A student after training, and how it went."""

    student: Stepwise
    losses: list[float]  # of each step's lesson
    gradients: list[float]  # norms of the SMUC gradient


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """Half the squared distance of means (B, n), averaged over inputs."""
    return (output - target).square().sum(-1).mean() / 2


def smuc_gradient(student: Stepwise, x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss, and its gradient with all second cumulants kept constant, by parameter."""
    parameters = [each.detach().requires_grad_() for each in student.parameters]
    loss = loss_of(student.with_parameters(parameters).output(x), target)
    return loss.detach(), list(torch.autograd.grad(loss, parameters))


def norm(gradient: Sequence[Tensor]) -> float:
    """The Euclidean norm over all parameters."""
    return math.sqrt(sum(each.square().sum().item() for each in gradient))


def trained(student: Stepwise, given: Iterable[Lesson], *, steps: int, lr: float) -> Trained:
    """Train by SMUC, a lesson at each step: Adam, its rate going down to 0 along a cosine."""
    parameters = [each.clone().requires_grad_() for each in student.parameters]
    optimizer = torch.optim.Adam(parameters, lr=lr)
    losses, gradients = [], []
    for step, (x, target) in enumerate(islice(given, steps)):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = loss_of(student.with_parameters(parameters).output(x), target)
        grads = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, grads, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(loss.item())
        gradients.append(norm(grads))
    return Trained(
        student.with_parameters([each.detach() for each in parameters]), losses, gradients
    )
