"""SMUC as gradient descent on a manifold of constant variance: the first theorem.

For Heaviside units the mean is a function of z = w x / sqrt(C) alone. So a step of SMUC in the
student's weights w is a step in the scaled weights w' = a w, with a = sqrt(target / C): the
variance is the target's there. The paper's two steps (eqs. start_update_alpah, end_update_alpah),
without noise of their own, are

    moved = w' - rate a^2 dL/dw',        w' <- (a_next / a) moved.

The second is a projection, though not onto the paper's M = {w': w' C_in w' + a^2 sigma^2 =
target}, which changes with a. It is the radial one onto the ellipsoid of all pairs (w', a) with
that equation, in the space that has a coordinate more: a is the weight of the unit's own noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor, nn

from covary import linalg
from covary.covariance import Full
from covary.moments import Moments
from covary.nn import Activation, Linear, Noise
from reproduction.experiment import Measured, Part
from reproduction.experiments.teacher_student import (
    DTYPE,
    Layer,
    Stepwise,
    loss_of,
    norm,
    normal,
    posed,
    smuc_gradient,
)
from reproduction.workshop import Workshop

# Inputs that the expected gradient is taken over, and how often that is done.
_INPUTS = 1000
_LOOKS = 60
# Steps of few samples make the gradient go up and down: it is averaged over the last looks.
_LAST_LOOKS = 10


def library_gradient(student: Stepwise, x: Tensor, target: Tensor) -> list[Tensor]:
    """The SMUC gradient by the layers of covary: weights, then biases."""
    layers: list[nn.Module] = []
    for i, (weight, bias) in enumerate(zip(student.weights, student.biases, strict=True)):
        linear = Linear(weight.shape[1], weight.shape[0], dtype=DTYPE)
        linear.load_state_dict({"weight": weight, "bias": bias})
        layers.append(linear)
        if not (student.readout and i == len(student.weights) - 1):
            layers += [Noise(student.noise), Activation("heaviside")]
    net = nn.Sequential(*layers)
    given = Moments(x, Full(student.input_cov[None], added=x.new_zeros(1, 1)))
    linears = [layer for layer in layers if isinstance(layer, Linear)]
    parameters = [layer.weight for layer in linears] + [
        layer.bias for layer in linears if layer.bias is not None
    ]
    return list(torch.autograd.grad(loss_of(net(given).mean, target), parameters))


class ScaledWeight(NamedTuple):
    """Weights of one layer on the manifold."""

    weight: Tensor  # (n, m + 1) with the bias as a last column
    scale: Tensor  # (n,) sqrt(target / variance), the weight of the unit's own noise


def onto_manifold(
    moved: ScaledWeight, target: Tensor, input_cov: Tensor, noise: float
) -> ScaledWeight:
    """Radially onto the pairs for which each unit has the variance ``target`` (n,)."""
    inputs = moved.weight[:, :-1]  # a bias has no variance
    variance = ((inputs @ input_cov) * inputs).sum(1) + (moved.scale * noise) ** 2
    factor = (target / variance).sqrt()
    return ScaledWeight(moved.weight * factor[:, None], moved.scale * factor)


def riemannian_step(
    at: ScaledWeight, x: Tensor, labels: Tensor, *, target: Tensor, student: Stepwise, rate: float
) -> ScaledWeight:
    """Both steps for a network of one layer, whose variances no input changes.

    The gradient of half the squared error is written out; nothing here looks at the weights of
    the student, only at the noise that it assumes.
    """
    extended = torch.cat([x, torch.ones_like(x[:, :1])], 1)
    z = extended @ at.weight.mT / target.sqrt()
    density = torch.exp(-z.square() / 2) / (2 * torch.pi) ** 0.5
    slope = (torch.special.ndtr(z) - labels) * density / target.sqrt()
    gradient = slope.mT @ extended / len(x)
    moved = at.weight - rate * at.scale[:, None] ** 2 * gradient
    return onto_manifold(ScaledWeight(moved, at.scale), target, student.input_cov, student.noise)


def rescaled_gradient(
    student: Stepwise, variances: Sequence[Tensor], x: Tensor, labels: Tensor
) -> list[Tensor]:
    """a dL/dw' for networks of any depth, in the order of ``smuc_gradient``, which it should equal.

    ``variances`` are those that each layer should have, (1 | B, n). The scale of a unit is one
    number: from variances averaged over inputs. The equality is exact if their ratio is the same
    for all of them, as it is for one layer, or one input.
    """
    own = [layer.var for layer in student.layers(x)]
    scales = [
        (target.mean(0) / var.mean(0)).sqrt()
        for target, var in zip(variances, own, strict=False)
        if len(var)
    ]
    if student.readout:  # which is linear: nothing is scaled
        scales.append(torch.ones(len(student.weights[-1]), dtype=DTYPE))
    hidden = len(scales) - student.readout
    weights = [
        (scale[:, None] * weight).requires_grad_()
        for scale, weight in zip(scales, student.weights, strict=True)
    ]
    biases = [
        (scale * bias).requires_grad_() for scale, bias in zip(scales, student.biases, strict=True)
    ]
    mean = x
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        mean = mean @ weight.mT + bias
        if i < hidden:
            mean = torch.special.ndtr(mean / variances[i].sqrt())
    gradients = torch.autograd.grad(loss_of(mean, labels), [*weights, *biases])
    factors = [scale[:, None] for scale in scales] + scales
    return [gradient * factor for gradient, factor in zip(gradients, factors, strict=True)]


def noisy_labels(layer: Layer, generator: torch.Generator) -> Tensor:
    """(B, n) Gaussian with the moments of the teacher's output, as the paper's proof has them."""
    root = linalg.root(layer.cov)
    white = normal(layer.mean.shape, generator)
    return layer.mean + (root @ white[..., None])[..., 0]


def difference(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Norm of the difference, over that of the second."""
    return norm([a - b for a, b in zip(first, second, strict=True)]) / norm(second)


class _Follower:
    """The manifold form of a student of one layer, which goes its own way beside it."""

    def __init__(self, student: Stepwise, target: Tensor) -> None:
        self.target = target
        start = torch.cat([student.weights[0], student.biases[0][:, None]], 1)
        one = torch.ones(len(start), dtype=DTYPE)
        self.at = onto_manifold(ScaledWeight(start, one), target, student.input_cov, student.noise)
        self.level = self._level(student.noise)
        self.apart = self.furthest = self.shift = 0.0

    def step(self, x: Tensor, labels: Tensor, after: Stepwise, rate: float) -> None:
        """Follow a step; ``after`` is the student after its own."""
        self.at = riemannian_step(self.at, x, labels, target=self.target, student=after, rate=rate)
        weight = self.at.weight / self.at.scale[:, None]
        other = [after.weights[0], after.biases[0]]
        self.apart = difference([weight[:, :-1], weight[:, -1]], other)
        self.furthest = max(self.furthest, self.apart)
        change = (self._level(after.noise) / self.level - 1).abs().max().item()
        self.shift = max(self.shift, change)

    def _level(self, noise: float) -> Tensor:
        """(n,) which of the paper's manifolds this is on: w' C_in w' there."""
        return self.target - (self.at.scale * noise) ** 2


def measure(part: Part, workshop: Workshop) -> Measured:
    """Train by SMUC with decreasing rates; compare with the manifold form at each step.

    The ``difference`` is that of the weights for one layer, whose manifold form has a path of its
    own, and that of the steps from the same weights for several.

    Settings: those of ``posed``, ``batch``, whether labels are ``noisy``, ``steps``, ``rate`` and
    ``horizon``: the learning rate of step t is ``rate / (1 + t / horizon)``.
    """
    settings = part.settings
    generator = torch.Generator().manual_seed(part.seed)
    teacher, student = posed(settings, generator)
    inputs = teacher.weights[0].shape[1]
    looked_at = normal((_INPUTS, inputs), generator)
    expected = teacher.output(looked_at)
    followers: dict[str, _Follower] = {}
    if len(student.weights) == 1:
        true = teacher.layers(looked_at[:1])[0].var[0]
        arbitrary = true * normal(true.shape, generator).exp()
        followers = {
            "teacher": _Follower(student, true),
            "arbitrary": _Follower(student, arbitrary),
        }
    steps, largest, apart = settings["steps"], 0.0, 0.0
    looks: dict[str, list[float]] = {"step": [], "gradient": [], "difference": []}
    for step in workshop.progress(range(steps), "steps"):
        if step % max(1, steps // _LOOKS) == 0:
            looks["step"].append(step)
            looks["gradient"].append(norm(smuc_gradient(student, looked_at, expected)[1]))
        rate = settings["rate"] / (1 + step / settings["horizon"])
        x = normal((settings["batch"], inputs), generator)
        with torch.no_grad():
            taught = teacher.layers(x)
        labels = noisy_labels(taught[-1], generator) if settings["noisy"] else taught[-1].mean
        gradient = library_gradient(student, x, labels)
        if not followers:
            variances = [layer.var for layer in taught]
            apart = difference(rescaled_gradient(student, variances, x, labels), gradient)
        student = student.with_parameters(
            [p - rate * g for p, g in zip(student.parameters, gradient, strict=True)]
        )
        for follower in followers.values():
            follower.step(x, labels, student, rate)
        if followers:
            apart = followers["teacher"].apart
        largest = max(largest, apart)
        if len(looks["difference"]) < len(looks["step"]):
            looks["difference"].append(apart)
    last = fmean(looks["gradient"][-_LAST_LOOKS:])
    numbers: dict[str, float] = {
        "difference": largest,
        "gradient_left": last / looks["gradient"][0],
        "gradient_first": looks["gradient"][0],
        "gradient_last": last,
    }
    if followers:
        numbers |= {
            "difference_arbitrary": followers["arbitrary"].furthest,
            "manifold_shift": followers["teacher"].shift,
        }
    return Measured(numbers, looks)
