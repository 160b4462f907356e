"""Rows: what the paper proves of Heaviside units, and says of all activations, tried with ReLU.

Two properties that its proofs rest on are the Heaviside step's alone. The mean of a step does not
change when mean and deviation of its input are scaled together (eq. scalar_property), so that a
student can make up for any noise by the length of its weights; that of ReLU is scaled as well, and
where its input is far above the threshold the mean is mu: a student has no length to choose. And
the variance of a step is m (1 - m), a function of the mean m; that of ReLU is not.

A sum of steps that stands for ReLU (``staircases``) has edges where they are: a scale would have to
move them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from reproduction.experiment import SEEDS, Claim, Experiment, Measured, Part, by_scale, seeds
from reproduction.experiments import deviation, learned_moments, staircases
from reproduction.experiments.teacher_student import (
    DTYPE,
    HEAVISIDE,
    Stepwise,
    lessons,
    norm,
    normal,
    posed,
    smuc_gradient,
    trained,
)
from reproduction.workshop import Workshop

# Functions of the sequence: with a kink, without bound, without, and one that falls and rises.
FUNCTIONS = ("relu", "tanh", "sigmoid", "silu")
# Where moments are compared: means up to this, and variances between these.
_MEAN, _VARIANCES = 3.0, (0.2, 4.0)
_FRESH = 300
_DEEP_INPUTS = 16
# Sums are looked at so many times, and their exponents found from the last part of the steps.
_LOOKS, _LAST_PART = 60, 10.0


def activation_of(name: str) -> MomentActivation:
    """An activation of covary, or ``"staircase N"`` of ReLU, or ``"network N"``: its Heavisides."""
    kind, _, n = name.partition(" ")
    if not n:
        return HEAVISIDE if kind == "heaviside" else activations.get(name)
    return staircases.activation("relu", int(n), network=kind == "network")


# The sequence


def off(found: Tensor, true: Tensor) -> float:
    """Norm of the difference, over the norm of what is true."""
    return float(torch.dist(found, true) / torch.linalg.norm(true))


def _sequence(settings: Mapping[str, Any], generator: torch.Generator) -> Measured:
    """Moments of staircases against those of the functions, for random means and variances."""
    uniform = torch.rand(2, settings["points"], generator=generator, dtype=DTYPE)
    mu = _MEAN * (2 * uniform[0] - 1)
    var = _VARIANCES[0] + (_VARIANCES[1] - _VARIANCES[0]) * uniform[1]
    x = 2 * _MEAN * normal((20_000,), generator)
    above, series = -math.inf, {}
    for name in FUNCTIONS:
        function = activations.get(name)
        true = function(mu, var)
        rows: dict[str, list[float]] = {}
        for n in range(settings["most"] + 1):
            stairs = staircases.staircase(function.function, n)
            own = staircases.moments(mu, var, stairs=stairs)
            network = staircases.network_moments(mu, var, stairs=stairs).variance
            found = {
                "mean": off(own.mean, true.mean),
                "gain": off(own.gain, true.gain),
                "variance": off(own.variance, true.variance),
                "network_variance": off(network, true.variance),
                "network_to_response": off(network, true.gain.square() * var),
            }
            for key, value in found.items():
                rows.setdefault(key, []).append(value)
            above = max(above, (stairs(x).abs() - function.function(x).abs()).max().item())
        series[name] = rows
    last = {key: [rows[key][-1] for rows in series.values()] for key in series["relu"]}
    numbers = {f"{key}_error": max(values) for key, values in last.items()}
    # Of Heaviside networks the smallest counts, as one function would do.
    numbers["network_variance_error_least"] = min(last["network_variance"])
    numbers["above"] = above
    return Measured(numbers, {"sequence": series, "steps": list(range(settings["most"] + 1))})


# Training with the sequence


def _training(settings: Mapping[str, Any], generator: torch.Generator) -> Measured:
    """Students with staircases for ReLU, beside one with ReLU: the same start, the same lessons."""
    teacher, student = posed(settings, generator, activation=activation_of("relu"))
    fresh = normal((_FRESH, settings["widths"][0]), generator)
    lesson_seed = int(torch.randint(2**31, (1,), generator=generator))

    def taught(name: str) -> tuple[list[Tensor], Tensor, Tensor]:
        own = replace(student, activation=activation_of(name))
        given = lessons(settings, teacher, torch.Generator().manual_seed(lesson_seed))
        first = smuc_gradient(own, *next(given))[1]
        result = trained(own, given, steps=settings["steps"], lr=settings["lr"]).student
        last = result.layers(fresh)[-1]
        return first, last.mean, last.variance

    gradient, mean, variance = taught("relu")
    numbers: dict[str, float] = {}
    series: dict[str, Any] = {"n": settings["n"]}
    for kind in ("staircase", "network"):
        rows: dict[str, list[float]] = {"gradient": [], "output": [], "output_variance": []}
        for n in settings["n"]:
            other, own_mean, own_variance = taught(f"{kind} {n}")
            apart = [a - b for a, b in zip(other, gradient, strict=True)]
            rows["gradient"].append(norm(apart) / norm(gradient))
            spread = (mean - mean.mean(0)).norm()
            rows["output"].append(((own_mean - mean).norm() / spread).item())
            rows["output_variance"].append(off(own_variance, variance))
        series[kind] = rows
        numbers |= {f"{kind}_{key}": values[-1] for key, values in rows.items()}
    return Measured(numbers, series)


# The theorems


def _learned(settings: Mapping[str, Any], generator: torch.Generator) -> Measured:
    """As ``learned_moments.measure``, with another activation."""
    teacher, student = posed(settings, generator, activation=activation_of(settings["activation"]))
    given = lessons(settings, teacher, generator)
    fresh = normal((_FRESH, settings["widths"][0]), generator)
    before = learned_moments.errors(teacher, student, fresh)
    result = trained(student, given, steps=settings["steps"], lr=settings["lr"])
    after = learned_moments.errors(teacher, result.student, fresh)
    numbers: dict[str, float] = {}
    for when, values in (("", after), ("_before", before)):
        numbers |= {f"{name}_error{when}": max(values[name]) for name in ("mean", "variance")}
        numbers |= {f"output_{name}_error{when}": each[-1] for name, each in values.items()}
    if settings["readout"]:
        apart = learned_moments.errors(teacher, result.student, fresh, scales=True)
        numbers |= {f"{name}_error_scaled": max(apart[name]) for name in ("mean", "variance")}
    return Measured(numbers, {"before": before, "after": after})


def _deep(settings: Mapping[str, Any], generator: torch.Generator) -> Measured:
    """The idealised student of ``deviation``, with another activation."""
    teacher, x, input_cov = deviation.drawn_teacher(
        settings,
        generator,
        _DEEP_INPUTS,
        gain=settings["gain"],
        activation=activation_of(settings["activation"]),
    )
    depth = deviation.idealised(teacher, x, input_cov)
    return Measured(deviation.numbers_of(depth), deviation.series_of(depth))


# The condition on learning rates


def variances(net: Stepwise) -> Tensor:
    """(n,) before the activation of the one layer, the same for all inputs."""
    weight = net.weights[0]
    return ((weight @ net.input_cov) * weight).sum(1) + net.noise**2


def decay(step: np.ndarray, values: np.ndarray) -> np.ndarray:
    """(n,) the p of t^-p for columns of values (T, n): a line through logarithms."""
    x = np.log(step) - np.log(step).mean()
    slope: np.ndarray = -(x @ np.log(values)) / (x @ x)
    return slope


def _condition(settings: Mapping[str, Any], generator: torch.Generator) -> Measured:
    """Train one layer of Heaviside units by SMUC, and follow both sums of eq. usu_cond.

    alpha_k^2 is the teacher's variance of unit k over the student's. Where rate times alpha^2 falls
    like t^-p, its sum is infinite for p <= 1, and that of its square finite for p > 1/2.
    """
    teacher, student = posed(settings, generator)
    true = variances(teacher)
    sums = torch.zeros(2, len(true), dtype=DTYPE)
    steps = settings["steps"]
    looks = set(np.unique(np.geomspace(1, steps, _LOOKS).round().astype(int)).tolist())
    rows: dict[str, list[Any]] = {"step": [], "alpha": [], "product": [], "first": [], "second": []}
    for step in range(1, steps + 1):
        rate = settings["rate"] * (1 + step / settings["horizon"]) ** -settings["power"]
        x = normal((settings["batch"], teacher.weights[0].shape[1]), generator)
        _, gradient = smuc_gradient(student, x, teacher.output(x))
        student = student.with_parameters(
            [p - rate * g for p, g in zip(student.parameters, gradient, strict=True)]
        )
        squared = true / variances(student)
        sums += torch.stack([(rate * squared).square(), rate * squared])
        if step in looks:
            rows["step"].append(step)
            rows["alpha"].append(squared.numpy())
            rows["product"].append((rate * squared).numpy())
            rows["second"].append(sums[0].numpy().copy())
            rows["first"].append(sums[1].numpy().copy())
    seen = np.array(rows["step"], dtype=np.float64)
    late = seen >= steps / _LAST_PART
    exponents = decay(seen[late], np.array(rows["product"])[late])
    alpha = np.array(rows["alpha"])
    numbers = {
        "least_exponent": float(exponents.min()),
        "largest_exponent": float(exponents.max()),
        "alpha_squared_least": float(alpha[-1].min()),
        "alpha_squared_most": float(alpha[-1].max()),
    }
    series = {"step": rows["step"]} | {
        key: np.array(rows[key]).T.tolist() for key in ("alpha", "first", "second")
    }
    return Measured(numbers, series)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], torch.Generator], Measured]] = {
    "sequence": _sequence,
    "training": _training,
    "learned": _learned,
    "deep": _deep,
    "condition": _condition,
}


def measure(part: Part, _workshop: Workshop) -> Measured:
    """One of the kinds above. Settings: ``kind``, and what that needs."""
    generator = torch.Generator().manual_seed(part.seed)
    return _KINDS[part.settings["kind"]](part.settings, generator)


# Teacher, student: as for the theorems.
_WRONG_NOISE = {"input_variance": [0.3, 0.05], "noise": [0.3, 0.5]}
_HE = math.sqrt(2)


def _steps_at(scale: str, paper: int) -> int:
    return {"smoke": max(20, paper // 200), "quick": paper // 4, "paper": paper}[scale]


def _parts(scale: str) -> tuple[Part, ...]:
    count = SEEDS[scale]
    small = scale == "smoke"
    one: dict[str, Any] = {
        **_WRONG_NOISE,
        "kind": "learned",
        "widths": [10, 8],
        "readout": False,
        "start": "random",
        "activation": "relu",
        "inputs": 160,
        "lr": 0.02,
        "steps": _steps_at(scale, 3000),
    }
    several = {key: value for key, value in one.items() if key != "inputs"} | {
        "widths": [6, 8, 8, 3],
        "readout": True,
        "gain": _HE,
        "batch": 128,
        "start": "near",
        "steps": _steps_at(scale, 4000),
    }
    taught = several | {"kind": "training", "start": "random", "steps": _steps_at(scale, 1000)}
    del taught["activation"]
    deep = {"widths": [20] * (5 if small else 21), "input_variance": [0.3, 0.05], "noise": 0.3}
    rates = {**_WRONG_NOISE, "kind": "condition", "widths": [10, 8], "readout": False}
    rates |= {"start": "random", "batch": 64, "rate": 2.0, "horizon": 100}
    rates |= {"steps": _steps_at(scale, 10_000)}
    return (
        *seeds(
            "sequence", count, kind="sequence", points=40 if small else 200, most=4 if small else 8
        ),
        *seeds("training", count, n=[1, 2] if small else [1, 3, 5], **taught),
        *seeds("one-layer", count, **one),
        *seeds("one-layer-informed", count, **{**one, "start": "random-informed"}),
        *seeds("one-layer-steps", count, **{**one, "activation": "staircase 3"}),
        *seeds("layers-near", count, **several),
        *seeds("layers-informed", count, **{**several, "start": "near-informed"}),
        *seeds("deep", count, kind="deep", activation="relu", gain=_HE, **deep),
        *seeds("rates", count, power=0.75, **rates),
        *seeds("rates-constant", count, power=0.0, **{**rates, "rate": 0.5}),
    )


_FIXED_STEPS = (
    "The mean of a step stays as it is when its input is scaled; that of ReLU is scaled too, and a "
    "sum of steps has its edges where they are. So a unit has its teacher's means only with its "
    "teacher's mean and variance of the input, and another noise makes that another variance."
)
_NO_FUNCTION = (
    "The variance of a Heaviside unit is m (1 - m), a function of the mean m, which is learned. "
    "That of ReLU is not: above its threshold it is the variance of the input, which the student "
    "takes to be what its own noise makes it."
)
_NO_SIZE = (
    "Hidden units of ReLU have a size that the output does not know: one of twice the size, read "
    "by half the weight, makes nearly the same output. A Heaviside unit has no size."
)
_WEAK_CORRELATION = (
    "The covariance activation takes two units to be weakly correlated, and steps of one unit have "
    "one input. With more and lower steps the Heaviside network has the linear response, gain^2 "
    "var, and lacks what ReLU adds by being bent."
)


def _theorem_2() -> tuple[Claim, ...]:
    moments = ("mean", "variance")
    why = {"mean": _FIXED_STEPS, "variance": _NO_FUNCTION}
    return (
        *(
            Claim(
                says=f"Theorem 2 holds of ReLU: with one layer the student learns the teacher's "
                f"{name}s.",
                metric=f"{name}_error",
                label="one-layer",
                most=1e-3,
                why=why[name],
            )
            for name in moments
        ),
        *(
            Claim(
                says=f"It holds of the sum of Heaviside steps that stands for ReLU: with one layer "
                f"the student learns the teacher's {name}s.",
                metric=f"{name}_error",
                label="one-layer-steps",
                most=1e-3,
                why=_FIXED_STEPS if name == "mean" else "As of ReLU, and for the same reason.",
            )
            for name in moments
        ),
        *(
            Claim(
                says=f"With several layers of ReLU it learns the {name} at each layer (from a "
                "start near the teacher).",
                metric=f"{name}_error",
                label="layers-near",
                most=0.05,
                why=_NO_SIZE if name == "mean" else _NO_FUNCTION,
            )
            for name in moments
        ),
        *(
            Claim(
                says=f"Control: it learns the {name}s if it knows the teacher's noise ({words}).",
                metric=f"{name}_error",
                label=label,
                most=most,
                ours=True,
                why=_NO_SIZE,
            )
            for label, words, most in (
                ("one-layer-informed", "one layer", 1e-3),
                ("layers-informed", "several layers", 0.05),
            )
            for name in moments
        ),
        *(
            Claim(says=f"{words} ({of}).", metric=metric, label=label, ours=True)
            for label, of in (
                ("layers-near", "several layers, another noise"),
                ("layers-informed", "several layers, the teacher's noise"),
            )
            for words, metric in (
                ("The error of means, each hidden unit scaled to fit", "mean_error_scaled"),
                ("The error of the output's means alone", "output_mean_error"),
                ("The error of the output's variances alone", "output_variance_error"),
            )
        ),
    )


EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="general-activations",
        about=(
            "The theorems are proved of Heaviside units, and carried over to others by sums of "
            "shifted Heaviside steps g_n that come near to an activation g. Label sequence: g_n of "
            "ReLU, tanh, sigmoid and SiLU with steps of width 2^-n, n up to 8, never larger than "
            "g; its mean, slope of the mean and variance at random means up to 3 and variances "
            "from 0.2 to 4, by norms of differences; and the variance of the Heaviside network "
            "that g_n is, a unit for each step, all of which see one noise. training: students "
            "with g_n, n up to 5, beside one with ReLU, from the same start and on the same "
            "lessons of a ReLU teacher (6-8-8-3, SMUC), compared by their first gradient and by "
            "their outputs after training. The theorems themselves, as theorem-2 and theorem-3 "
            "have them, with ReLU in place of Heaviside: one layer of 8 units from random weights, "
            "two hidden layers near the teacher's weights, students with another noise than the "
            "teacher's and informed ones as a control; and an idealised student through 20 layers "
            "of 20 ReLU units (deep; random weights whose variance is 2 over the width, 16 "
            "inputs). rates: both sums of the condition on learning rates (usu_cond), which "
            "theorem 1 needs, along SMUC of one layer of Heaviside units, with rates that go down "
            "as t^-3/4, and a constant one. Sums to infinity are judged by the power of t with "
            "which their terms fall in the last nine tenths of 10,000 steps."
        ),
        measure=measure,
        parts=by_scale(_parts),
        claims=(
            Claim(
                says="There are sums of Heaviside steps that are nowhere larger than the "
                "activation, Eq. (g_abs_g_n) (largest excess).",
                metric="above",
                most=1e-12,
            ),
            *(
                Claim(
                    says=f"They have its {words} in the limit (relative error at n = 8, of the "
                    "worst of four activations).",
                    metric=f"{name}_error",
                    label="sequence",
                    most=0.01,
                )
                for name, words in (
                    ("mean", "mean, the zero-order approximation"),
                    ("gain", "mean's slope, the first-order approximation, Eq. (first_appro)"),
                    ("variance", "variance: cumulants up to any order"),
                )
            ),
            Claim(
                says="A Heaviside network approximates the network of another activation, up to "
                "its second cumulants (relative error of variances at n = 8, of the best of four "
                "activations).",
                metric="network_variance_error_least",
                most=0.01,
                why=_WEAK_CORRELATION,
            ),
            Claim(
                says="It comes to the linear response in place of the variance (relative "
                "difference at n = 8, of the worst of four).",
                metric="network_to_response_error",
                most=0.02,
                ours=True,
            ),
            *(
                Claim(
                    says=f"The approximation holds true for {words} (n = 5; relative difference).",
                    metric=f"staircase_{name}",
                    label="training",
                    most=0.05,
                )
                for name, words in (
                    ("gradient", "training: the first gradient"),
                    ("output", "the model's output after training: means"),
                    ("output_variance", "the model's output after training: variances"),
                )
            ),
            *(
                Claim(
                    says=f"So it does with the variances of the Heaviside network: {words}.",
                    metric=f"network_{name}",
                    label="training",
                    most=0.05,
                    why=_WEAK_CORRELATION,
                )
                for name, words in (
                    ("output", "means after training"),
                    ("output_variance", "variances after training"),
                )
            ),
            *_theorem_2(),
            Claim(
                says="Theorem 3 of ReLU: the deviation grows from a layer to the next by the rate "
                "r at most (largest growth over r).",
                metric="ratio_over_rate",
                label="deep",
                most=1.0,
            ),
            Claim(
                says="Its condition is met: the sum of -log r grows to infinity with depth "
                "(positive after 20 layers).",
                metric="sum_of_minus_log_rate",
                label="deep",
                least=0.0,
                why="r is far above 1 in every layer, more so than of Heaviside units: the "
                "susceptibility of ReLU has no bound.",
            ),
            Claim(
                says="The output covariance of deep ReLU networks converges to the teacher's (20 "
                "layers; deviation, as a part of the largest covariance).",
                metric="relative_deviation",
                label="deep",
                most=0.01,
                why="It falls, but slowly: a ReLU unit hands on more of what it gets than a "
                "Heaviside unit does, and 20 layers are not enough for all of these networks.",
            ),
            Claim(
                says="Learning rates can be chosen so that the sum of their squares times alpha^4 "
                "is finite, Eq. (usu_cond) (least power over units; above 1/2).",
                metric="least_exponent",
                label="rates",
                least=0.5,
            ),
            Claim(
                says="With these the sum of rates times alpha^2 is infinite (largest power over "
                "units; 1 at most).",
                metric="largest_exponent",
                label="rates",
                most=1.0,
            ),
            Claim(
                says="A constant learning rate, as the paper trains with, meets the first (least "
                "power over units).",
                metric="least_exponent",
                label="rates-constant",
                least=0.5,
                ours=True,
                why="alpha settles, and terms that do not fall have no finite sum. The theorem is "
                "about other rates than those that networks are trained with.",
            ),
        ),
    ),
)
