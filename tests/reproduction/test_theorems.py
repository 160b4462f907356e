"""The three theorems: teachers and students, against brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice, repeat

import numpy as np
import pytest
import torch

from covary.covariance import Full
from covary.moments import Moments
from covary.nn import Activation, Linear, Noise
from reproduction.experiment import Part
from reproduction.experiments import deviation, learned_moments, riemannian, teacher_student
from reproduction.experiments.teacher_student import DTYPE, Lesson, Stepwise, normal
from reproduction.workshop import Workshop


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def posed(seed=0, *, widths=(5, 6, 4), readout=False, start="random"):
    settings = {
        "widths": list(widths),
        "readout": readout,
        "start": start,
        "input_variance": [0.3, 0.05],
        "noise": [0.3, 0.5],
    }
    generator = seeded(seed)
    return *teacher_student.posed(settings, generator), generator


# Teacher and student


@pytest.mark.parametrize("readout", [False, True])
def test_layers_are_those_of_covary(readout):
    teacher, _, generator = posed(widths=(5, 7, 6, 3), readout=readout)
    x = normal((9, 5), generator)
    moments = Moments(x, Full(teacher.input_cov[None], added=torch.zeros(1, 1, dtype=DTYPE)))
    for i, layer in enumerate(teacher.layers(x)):
        linear = Linear(teacher.weights[i].shape[1], len(teacher.weights[i]), dtype=DTYPE)
        linear.load_state_dict({"weight": teacher.weights[i], "bias": teacher.biases[i]})
        moments = linear(moments)
        if not (readout and i == 2):
            moments = Activation("heaviside")(Noise(teacher.noise)(moments))
        torch.testing.assert_close(layer.mean, moments.mean)
        torch.testing.assert_close(layer.cov, moments.covariance_matrix, rtol=1e-9, atol=1e-12)


def test_gradients_hold_second_cumulants_constant():
    """By finite differences of the means, with variances frozen where they are."""
    _, student, generator = posed()
    x = normal((7, 5), generator)
    target = normal((7, 4), generator)
    variances = [layer.var for layer in student.layers(x)]

    def frozen(weight):
        mean = x
        for w, b, var in zip((weight, student.weights[1]), student.biases, variances, strict=True):
            mean = torch.special.ndtr((mean @ w.mT + b) / var.sqrt())
        return teacher_student.loss_of(mean, target).item()

    _, gradient = teacher_student.smuc_gradient(student, x, target)
    for i, j in ((0, 0), (3, 2), (5, 4)):
        step = torch.zeros_like(student.weights[0])
        step[i, j] = 1e-6
        slope = (frozen(student.weights[0] + step) - frozen(student.weights[0] - step)) / 2e-6
        assert gradient[0][i, j].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


def test_random_covariances_are_positive_definite_with_the_trace_asked_for():
    matrix = teacher_student.random_covariance(6, seeded(), trace=1.8)
    assert torch.linalg.eigvalsh(matrix).min() > 0
    assert matrix.trace().item() == pytest.approx(1.8)


def test_lessons_are_the_same_inputs_or_fresh_ones():
    teacher, _, _ = posed(widths=(5, 4))
    settings = {"widths": [5, 4]}
    for how, fresh in (("inputs", False), ("batch", True)):
        given = teacher_student.lessons({**settings, how: 7}, teacher, seeded(1))
        first, second = islice(given, 2)
        assert first.x.shape == (7, 5)
        assert torch.equal(first.x, second.x) is not fresh
        for x, target in (first, second):
            torch.testing.assert_close(target, teacher.output(x))


# The first theorem


@pytest.mark.parametrize("arbitrary", [False, True])
def test_one_step_on_the_manifold_is_one_step_of_smuc(arbitrary):
    teacher, student, generator = posed(widths=(5, 4))
    x = normal((20, 5), generator)
    labels = normal((20, 4), generator)
    target = teacher.layers(x)[0].var[0]
    if arbitrary:
        target = target * normal((4,), generator).exp()
    rate = 0.7
    start = torch.cat([student.weights[0], student.biases[0][:, None]], 1)
    own = student.layers(x)[0].var[0]
    at = riemannian.onto_manifold(
        riemannian.ScaledWeight(start, torch.ones(4, dtype=DTYPE)),
        target,
        student.input_cov,
        student.noise,
    )
    torch.testing.assert_close(at.scale, (target / own).sqrt())
    after = riemannian.riemannian_step(at, x, labels, target=target, student=student, rate=rate)
    gradient = riemannian.library_gradient(student, x, labels)
    moved = student.with_parameters(
        [p - rate * g for p, g in zip(student.parameters, gradient, strict=True)]
    )
    weight = after.weight / after.scale[:, None]
    torch.testing.assert_close(weight[:, :-1], moved.weights[0], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weight[:, -1], moved.biases[0], rtol=1e-12, atol=1e-13)
    # It is on the manifold, and the paper's manifold is not where it was.
    inputs = after.weight[:, :-1]
    variance = torch.einsum("ij,jk,ik->i", inputs, student.input_cov, inputs)
    torch.testing.assert_close(variance + (after.scale * student.noise) ** 2, target)
    assert ((after.scale / at.scale - 1).abs() > 1e-4).any()


def test_gradients_of_the_library_are_smuc():
    _, student, generator = posed(widths=(5, 6, 6, 3), readout=True)
    x, labels = normal((8, 5), generator), normal((8, 3), generator)
    _, expected = teacher_student.smuc_gradient(student, x, labels)
    found = riemannian.library_gradient(student, x, labels)
    assert riemannian.difference(found, expected) < 1e-12


@pytest.mark.parametrize(("batch", "equal"), [(1, True), (16, False)])
def test_rescaling_is_exact_for_one_input_alone_behind_the_first_layer(batch, equal):
    teacher, student, generator = posed(widths=(5, 6, 6, 3), readout=True)
    x, labels = normal((batch, 5), generator), normal((batch, 3), generator)
    variances = [layer.var for layer in teacher.layers(x)]
    found = riemannian.rescaled_gradient(student, variances, x, labels)
    apart = riemannian.difference(found, riemannian.library_gradient(student, x, labels))
    assert (apart < 1e-12) if equal else (apart > 1e-3)


def test_noisy_labels_have_the_moments_of_the_teacher():
    teacher, _, generator = posed(widths=(5, 3))
    layer = teacher.layers(normal((1, 5), generator).expand(100_000, -1))[0]
    layer = layer._replace(cov=layer.cov.expand(100_000, -1, -1))
    labels = riemannian.noisy_labels(layer, generator)
    torch.testing.assert_close(labels.mean(0), layer.mean[0], rtol=0, atol=0.01)
    torch.testing.assert_close(torch.cov(labels.mT), layer.cov[0], rtol=0, atol=0.01)


def test_the_gradient_left_is_that_of_the_last_looks(tmp_path):
    settings = {
        "widths": [3, 4, 2],
        "readout": True,
        "start": "random",
        "input_variance": [0.3, 0.05],
        "noise": [0.3, 0.5],
        "rate": 0.1,
        "horizon": 20,
        "noisy": True,
        "batch": 1,
        "steps": 240,
    }
    found = riemannian.measure(Part("", 0, settings), Workshop(folder=tmp_path))
    norms = found.series["gradient"]
    assert found.series["step"] == list(range(0, 240, 4))
    assert found.metrics["gradient_left"] == pytest.approx(np.mean(norms[-10:]) / norms[0])
    assert max(found.series["difference"]) <= found.metrics["difference"] < 1e-10


# The second theorem


def test_matching_undoes_permutations_and_flips():
    teacher, _, generator = posed(widths=(5, 6, 4), readout=True)
    x = normal((40, 5), generator)
    order = torch.tensor([3, 0, 5, 1, 2, 4])
    sign = torch.tensor([1.0, -1, 1, -1, -1, 1], dtype=DTYPE)
    first, second = teacher.weights
    # v -> 1 - v where the sign is -1: Theta(-x) = 1 - Theta(x).
    other = teacher.with_parameters(
        [
            sign[:, None] * first[order],
            sign * second[:, order],
            sign * teacher.biases[0][order],
            teacher.biases[1] + (second[:, order] * (sign < 0)).sum(1),
        ]
    )
    found = learned_moments.errors(teacher, other, x)
    for name, values in found.items():
        np.testing.assert_allclose(values, 0, atol=1e-10, err_msg=name)
    raw = (teacher.layers(x)[0].mean - other.layers(x)[0].mean).norm()
    assert raw > 0.1


def test_one_layer_reaches_its_teacher_and_its_weights_are_known():
    teacher, student, generator = posed(widths=(4, 3))
    x = normal((60, 4), generator)
    squared = learned_moments.attainable(teacher, student)
    assert (squared > 0).all()
    known = student.with_parameters(
        [squared.sqrt()[:, None] * teacher.weights[0], squared.sqrt() * teacher.biases[0]]
    )
    torch.testing.assert_close(known.output(x), teacher.output(x), rtol=1e-12, atol=1e-13)
    given = repeat(Lesson(x, teacher.output(x)))
    result = teacher_student.trained(student, given, steps=600, lr=0.05)
    torch.testing.assert_close(result.student.weights[0], known.weights[0], rtol=0.02, atol=0.02)
    assert result.gradients[-1] < 1e-3 * result.gradients[0]


def test_what_a_loud_student_cannot_have():
    teacher, student, _ = posed(widths=(4, 3))
    loud = replace(student, input_cov=5 * torch.eye(4, dtype=DTYPE))
    assert (learned_moments.attainable(teacher, loud) < 0).all()
    assert learned_moments.scale_spread(teacher, loud, torch.zeros(2, 4, dtype=DTYPE)) is None


def test_the_second_layer_needs_a_scale_for_each_input():
    teacher, student, generator = posed(widths=(5, 6, 6, 3), readout=True)
    x = normal((50, 5), generator)
    spread = learned_moments.scale_spread(teacher, student, x)
    assert spread is not None
    assert spread > 0.01
    informed = replace(student, input_cov=teacher.input_cov, noise=teacher.noise)
    same = learned_moments.scale_spread(teacher, informed, x)
    assert same == pytest.approx(0, abs=1e-12)


# The third theorem


def test_deviations_are_differences_of_covariances():
    """D' = off-diagonal part of J D J^T, against two covariances that are propagated whole."""
    teacher, _, generator = posed(widths=(5, 6))
    x = normal((7, 5), generator)
    layer = teacher.layers(x)[0]
    assumed = 0.2 * torch.eye(5, dtype=DTYPE)
    jacobian = layer.gain[:, :, None] * teacher.weights[0]
    own = teacher_student.with_diagonal(jacobian @ assumed @ jacobian.mT, layer.variance)
    found = deviation.idealised(teacher, x, assumed)
    torch.testing.assert_close(found.deviation[1], (layer.cov - own).abs().amax((1, 2)))
    torch.testing.assert_close(
        found.deviation[0], (teacher.input_cov - assumed).abs().max().expand(7)
    )


def test_a_student_that_has_learned_is_the_idealised_one():
    """With the weights that have its teacher's means, only covariances of pairs are others."""
    teacher, student, generator = posed(widths=(5, 6))
    x = normal((7, 5), generator)
    scale = learned_moments.attainable(teacher, student).sqrt()
    student = student.with_parameters(
        [scale[:, None] * teacher.weights[0], scale * teacher.biases[0]]
    )
    found = deviation.observed(teacher, student, x)
    expected = deviation.idealised(teacher, x, student.input_cov)
    assert (expected.deviation[1] > 1e-3).all()
    for name, value in expected._asdict().items():
        torch.testing.assert_close(getattr(found, name), value, msg=name)


def test_deviations_of_a_student_leave_variances_out():
    """As those of the idealised one do, and as the covariances do that they are compared with."""
    teacher, student, generator = posed(widths=(5, 6, 4))
    x = normal((3, 5), generator)
    found = deviation.observed(teacher, student, x)
    for i, (true, own) in enumerate(zip(teacher.layers(x), student.layers(x), strict=True)):
        apart = (true.cov - own.cov).abs()
        variances = apart.diagonal(dim1=1, dim2=2).amax(1)
        pairs = torch.stack([apart[:, a, b] for a in range(apart.shape[1]) for b in range(a)])
        torch.testing.assert_close(found.deviation[i + 1], pairs.amax(0))
        assert (variances > pairs.amax(0)).any()


def test_jacobians_are_those_of_the_means():
    teacher, _, generator = posed(widths=(5, 6, 4))
    x = normal((1, 5), generator)
    found = deviation.idealised(teacher, x, torch.eye(5, dtype=DTYPE)).response
    jacobian = torch.autograd.functional.jacobian(lambda value: teacher.output(value)[0], x)[:, 0]
    expected = torch.linalg.matrix_norm(jacobian, 2).square()
    assert found[-1].item() == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_the_corrected_rate_bounds_any_deviation(seed):
    """Also the worst: every element of the deviation at its largest, with the sign that hurts."""
    teacher, _, generator = posed(seed, widths=(4, 5))
    scale = 0.2 + 6 * torch.rand(1, generator=generator, dtype=DTYPE)
    teacher = teacher.with_parameters([scale * teacher.weights[0], teacher.biases[0]])
    layer = teacher.layers(normal((3, 4), generator))[0]
    rates = deviation.rates(teacher.input_cov[None], teacher.weights[0], layer, teacher.noise)
    sign = teacher.weights[0][0].sign()
    for worst in (sign[:, None] * sign, normal((4, 4), generator)):
        symmetric = (worst + worst.mT) / 2
        grown = deviation.largest(
            deviation.propagated(symmetric[None], teacher.weights[0], layer)
        ) / deviation.largest(symmetric)
        assert (grown <= rates.corrected * (1 + 1e-12)).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_paper_rate_is_broken_and_the_corrected_one_is_reached(seed):
    teacher, assumed = deviation.counterexample(seeded(seed))
    depth = deviation.idealised(teacher, torch.zeros(1, 10, dtype=DTYPE), assumed)
    grown = depth.deviation[1] / depth.deviation[0]
    assert torch.linalg.eigvalsh(assumed).min() > 0
    assert grown.item() > 1.05 * depth.paper[0].item()
    assert grown.item() == pytest.approx(depth.corrected[0].item(), rel=1e-9)


@pytest.mark.parametrize(("length", "holds"), [(0.5, True), (1.0, True), (3.0, False)])
def test_the_step_that_fails_is_right_for_short_rows(length, holds):
    """n a b / sqrt((l a^2 + s^2)(l b^2 + s^2)) <= n / sqrt(l^2 + 2 l s^2), for a = b = length."""
    least, noise = 0.1, 0.4
    exact = length**2 / (least * length**2 + noise**2)
    assert (exact <= 1 / math.sqrt(least**2 + 2 * least * noise**2)) is holds


def test_balanced_networks_have_one_ratio_of_signal_to_noise():
    generator = seeded(2)
    covariance = teacher_student.random_covariance(6, generator, trace=1.0)
    net = teacher_student.drawn([6, 6, 6], generator, input_cov=covariance, noise=0.3)
    x = normal((1, 6), generator)
    for layer in deviation.balanced(net, x, 2.2, generator).layers(x):
        torch.testing.assert_close(layer.z.abs(), torch.full_like(layer.z, 2.2))


def test_rates_of_a_layer_by_hand():
    """One unit, z = 0: chi = phi(0), lambda of a diagonal covariance is its least element."""
    net = Stepwise(
        (torch.tensor([[2.0, 0.0]], dtype=DTYPE),),
        (torch.zeros(1, dtype=DTYPE),),
        torch.diag(torch.tensor([0.5, 0.1], dtype=DTYPE)),
        0.3,
    )
    layer = net.layers(torch.zeros(1, 2, dtype=DTYPE))[0]
    rates = deviation.rates(net.input_cov[None], net.weights[0], layer, net.noise)
    above = 2 / (2 * math.pi)
    assert rates.paper.item() == pytest.approx(above / math.sqrt(0.01 + 0.2 * 0.09))
    assert rates.corrected.item() == pytest.approx(above / (0.1 + 0.09 / 4))
