"""What a student learns of its teacher's means and variances, layer by layer: the second theorem.

A Heaviside unit has the variance m (1 - m) whatever made its mean m: where means are learned, so
are variances. That leaves the question which means a student can have. With one layer a unit has
its teacher's means if z is the teacher's for all inputs, and it can choose its weights c w so that

    c w x / sqrt(c^2 w C_s w + sigma_s^2) = w x / sqrt(w C_t w + sigma_t^2)

for student (s) and teacher (t) if and only if w C_s w < w C_t w + sigma_t^2: the noise that it
takes to be in its input alone must not exceed all that the teacher has. Deeper, the right-hand side
has a denominator that changes with the input, and in another way than the left one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from reproduction.experiment import Measured, Part
from reproduction.experiments.teacher_student import (
    HEAVISIDE,
    Layer,
    Stepwise,
    lessons,
    normal,
    off_diagonal,
    posed,
    trained,
)
from reproduction.workshop import Workshop

_FRESH = 300


def matched(teacher: Layer, student: Layer, *, flips: bool = True) -> Layer:
    """The student's units in the order, and with the sign, that makes them most like the teacher's.

    Hidden units have no names: they can change places, and, if ``flips``, 1 - v of a Heaviside unit
    does what v does if the weights that read it change their signs.
    """
    same = torch.cdist(teacher.mean.mT, student.mean.mT)  # (n, n)
    flipped = torch.cdist(teacher.mean.mT, 1 - student.mean.mT) if flips else same + math.inf
    _, order = linear_sum_assignment(torch.minimum(same, flipped).numpy())
    columns = torch.from_numpy(order)
    rows = torch.arange(len(columns))
    turn = flipped[rows, columns] < same[rows, columns]
    mean, sign = student.mean[:, columns], 1.0 - 2.0 * turn
    cov = student.cov[:, columns][:, :, columns] * sign[:, None] * sign
    return student._replace(mean=torch.where(turn, 1 - mean, mean), cov=cov)


def scaled(teacher: Layer, student: Layer) -> Layer:
    """The student's units, each times the number that makes its means most like the teacher's."""
    factor = (teacher.mean * student.mean).sum(0) / student.mean.square().sum(0)
    return student._replace(mean=factor * student.mean, cov=factor[:, None] * student.cov * factor)


def errors(
    teacher: Stepwise, student: Stepwise, x: Tensor, *, scales: bool = False
) -> dict[str, list[float]]:
    """Relative errors of means, variances and covariances of pairs, by layer.

    Of means, 1 is what constants would have. ``scales``: hidden units are scaled as fits best.
    """
    found: dict[str, list[float]] = {"mean": [], "variance": [], "covariance": []}
    flips = teacher.activation is HEAVISIDE
    both = list(zip(teacher.layers(x), student.layers(x), strict=True))
    for i, (true, own) in enumerate(both):
        seen = matched(true, own, flips=flips) if i < len(both) - 1 else own
        if scales and i < len(both) - 1:
            seen = scaled(true, seen)
        pairs, seen_pairs = off_diagonal(true.cov), off_diagonal(seen.cov)
        spread = true.mean - true.mean.mean(0)
        for name, difference, size in (
            ("mean", true.mean - seen.mean, spread),
            ("variance", true.variance - seen.variance, true.variance),
            ("covariance", pairs - seen_pairs, pairs),
        ):
            found[name].append((difference.norm() / size.norm()).item())
    return found


def measure(part: Part, _workshop: Workshop) -> Measured:
    """Train a student on its teacher's output means; compare all layers, on fresh inputs.

    Settings: those of ``posed`` and ``lessons``, ``steps``, ``lr``.
    """
    settings = part.settings
    generator = torch.Generator().manual_seed(part.seed)
    teacher, student = posed(settings, generator)
    given = lessons(settings, teacher, generator)
    fresh = normal((_FRESH, settings["widths"][0]), generator)
    before = errors(teacher, student, fresh)
    result = trained(student, given, steps=settings["steps"], lr=settings["lr"])
    after = errors(teacher, result.student, fresh)
    numbers: dict[str, float | None] = {
        "loss_left": result.losses[-1] / result.losses[0],
        "gradient_left": result.gradients[-1] / result.gradients[0],
        "attainable_units": (attainable(teacher, student) > 0).double().mean().item(),
        "scale_spread": scale_spread(teacher, student, fresh),
    }
    for when, values in (("", after), ("_before", before)):
        numbers |= {f"{name}_error{when}": max(values[name]) for name in ("mean", "variance")}
        numbers |= {f"output_{name}_error{when}": each[-1] for name, each in values.items()}
    series: dict[str, Any] = {"before": before, "after": after}
    return Measured(numbers, series)


def attainable(teacher: Stepwise, student: Stepwise) -> Tensor:
    """(n,) the square of the c with which a unit of the first layer has its teacher's means.

    See the top of this file; negative or infinite where there is none.
    """
    weight = teacher.weights[0]
    own, there = (((weight @ net.input_cov) * weight).sum(1) for net in (student, teacher))
    return student.noise**2 / (there + teacher.noise**2 - own)


def scale_spread(teacher: Stepwise, student: Stepwise, x: Tensor) -> float | None:
    """By how much the scale that a unit of the second layer needs differs between inputs.

    Its relative standard deviation, in a student whose first layer has its teacher's means, for
    the unit where it is largest: 0 if a multiple of the teacher's weights will do. None where there
    is no such student, or no second layer of units.
    """
    squared = attainable(teacher, student)
    if len(teacher.weights) - teacher.readout < 2 or not bool(
        ((squared > 0) & squared.isfinite()).all()
    ):
        return None
    first = squared.sqrt()
    knowing = student.with_parameters(
        [
            first[:, None] * teacher.weights[0],
            *teacher.weights[1:],
            first * teacher.biases[0],
            *teacher.biases[1:],
        ]
    )
    scale = (teacher.layers(x)[1].var / knowing.layers(x)[1].var).sqrt()
    return (scale.std(0) / scale.mean(0)).max().item()
