"""Rows: the three theorems on supervised means and unsupervised covariances (SMUC)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from reproduction.experiment import SEEDS, Claim, Experiment, Part, by_scale, seeds
from reproduction.experiments import deviation, learned_moments, riemannian

# Teacher, student: average variance of the input, and sigma of each layer.
_WRONG_NOISE = {"input_variance": [0.3, 0.05], "noise": [0.3, 0.5]}
_ONE_LAYER = {"widths": [10, 8], "readout": False, "start": "random", **_WRONG_NOISE}
_SEVERAL_LAYERS = {"widths": [6, 8, 8, 3], "readout": True, **_WRONG_NOISE}
_TEACHER = (
    "Teacher and student are networks of Heaviside units with the same widths, in float64. The "
    "teacher's input has a random covariance, which the student takes to be a multiple of the "
    "identity, and its units have another sigma than the student thinks. "
)


def _steps(scale: str, paper: int) -> int:
    return {"smoke": max(5, paper // 250), "quick": paper // 4, "paper": paper}[scale]


def _first(scale: str) -> tuple[Part, ...]:
    count = SEEDS[scale]
    one = {**_ONE_LAYER, "rate": 2.0, "horizon": 200, "noisy": False, "batch": 64}
    noisy = {**_ONE_LAYER, "rate": 1.0, "horizon": 100, "noisy": True, "batch": 256}
    several = {**_SEVERAL_LAYERS, "start": "random", "rate": 0.1, "horizon": 200, "noisy": True}
    return (
        *seeds("one-layer", count, steps=_steps(scale, 2000), **one),
        *seeds("one-layer-noisy", count, steps=_steps(scale, 3000), **noisy),
        *seeds("layers-one-sample", count, steps=_steps(scale, 20000), batch=1, **several),
        *seeds("layers-batches", count, steps=_steps(scale, 1000), batch=32, **several),
    )


def _second(scale: str) -> tuple[Part, ...]:
    count = SEEDS[scale]
    one: dict[str, Any] = {**_ONE_LAYER, "inputs": 160, "lr": 0.02, "steps": _steps(scale, 3000)}
    loud = {**one, "input_variance": [0.1, 1.0]}
    # 155 parameters would fit 160 inputs and miss others: every step has fresh ones.
    several = {**_SEVERAL_LAYERS, "batch": 128, "lr": 0.02, "steps": _steps(scale, 6000)}
    return (
        *seeds("one-layer", count, **one),
        *seeds("one-layer-loud", count, **loud),
        *seeds("layers-near", count, start="near", **several),
        *seeds("layers-informed", count, start="near-informed", **several),
        *seeds("layers-random", count, start="random", **several),
        *seeds("layers-random-informed", count, start="random-informed", **several),
    )


def _third(scale: str) -> tuple[Part, ...]:
    count = SEEDS[scale]
    depth = 4 if scale == "smoke" else 20
    deep = {"widths": [20] * (depth + 1), "input_variance": [0.3, 0.05], "noise": 0.3}
    hidden = 2 if scale == "smoke" else 6
    student = {
        **_WRONG_NOISE,
        "widths": [10] * (hidden + 1),
        "readout": False,
        "start": "near",
        "batch": 128,
        "lr": 0.02,
        "steps": _steps(scale, 2000),
    }
    return (
        *seeds("random", count, kind="random", inputs=16, **deep),
        *seeds("balanced", count, kind="balanced", inputs=1, ratio=2.2, **deep),
        *seeds("counterexample", count, kind="counterexample"),
        *seeds("trained", count, kind="trained", **student),
    )


def _of_labels(
    says: str, metric: str, most: float, *cases: tuple[str, str, str]
) -> Iterator[Claim]:
    """One claim of several cases: the label of each, what it is in words, why it does not hold."""
    for label, words, why in cases:
        yield Claim(says=says.format(words=words), metric=metric, label=label, most=most, why=why)


_SLOWLY = "It goes down as the rate does, and so far in these steps"
_NOT_ONE_SCALE = (
    "Behind the first layer variances depend on the input, and the teacher's and the student's do "
    "so in different ways. The proof needs one scale of a unit's weights for all inputs; there is "
    "one for each."
)
EXPERIMENTS: tuple[Experiment, ...] = (
    Experiment(
        name="theorem-1",
        about=(
            f"{_TEACHER}Each step of SMUC, by the layers of covary, is compared with the paper's "
            "two steps in scaled weights, written out apart from them: a step of gradient descent "
            "where all variances are the teacher's, and a projection that brings them back there. "
            "Learning rates go down as 1 / t. With one layer the scaled weights go their own way "
            "from the start, and the two paths are compared; with several layers each step is. "
            "Labels are the teacher's means, or Gaussian about them with its covariance, as in the "
            "proof. Four details of the proof are not so. The paper's manifold moves with the "
            "scale of the weights; the one that stays is in a space with a coordinate more, for "
            "the unit's own noise. With a bias, which has no variance, it is not bounded. "
            "Spheres are not Hadamard manifolds, which the cited theorem on convergence is about. "
            "And the form is a change of variables that holds for any variances in place of the "
            "teacher's: it says nothing about being drawn to those."
        ),
        measure=riemannian.measure,
        parts=by_scale(_first),
        claims=(
            *(
                Claim(
                    says="With one layer a SMUC step equals the two-step Riemannian form to "
                    "rounding (largest relative distance of the two paths).",
                    metric="difference",
                    label=label,
                    most=1e-10,
                )
                for label in ("one-layer", "one-layer-noisy")
            ),
            Claim(
                says="With several layers as well (relative difference of steps, one input each).",
                metric="difference",
                label="layers-one-sample",
                most=1e-10,
            ),
            Claim(
                says="With several layers as well (mini-batches).",
                metric="difference",
                label="layers-batches",
                most=1e-10,
                why=_NOT_ONE_SCALE,
            ),
            Claim(
                says="With one layer it equals the form to rounding with arbitrary variances in "
                "place of the teacher's (largest relative distance).",
                metric="difference_arbitrary",
                most=1e-10,
                ours=True,
            ),
            Claim(
                says="The projected weights stay on a manifold, the iso-variance sphere (relative "
                "change of its size in training).",
                metric="manifold_shift",
                most=1e-6,
                why="The noise within a unit is scaled along with its weights, so the part of the "
                "variance that is left for the weights changes; with a coordinate for that noise "
                "the manifold stays.",
            ),
            *_of_labels(
                "The gradient vanishes with proper learning rates (its norm, averaged over the "
                "last sixth of the steps, of that at the start; {words}).",
                "gradient_left",
                0.1,
                ("one-layer", "one layer, labels without noise", ""),
                ("one-layer-noisy", "one layer, noisy labels", f"{_SLOWLY}."),
                (
                    "layers-one-sample",
                    "several layers, one noisy sample a step",
                    f"{_SLOWLY}: those of one sample are loud.",
                ),
                ("layers-batches", "several layers, noisy labels", f"{_SLOWLY}."),
            ),
        ),
        revision=1,
    ),
    Experiment(
        name="theorem-2",
        about=(
            f"{_TEACHER}The student is trained by SMUC on the teacher's output means (Adam, its "
            "rate going down to 0), and all layers are compared on fresh inputs. Errors are "
            "relative: of means, 1 is what constants would have. Hidden units are put in the order "
            "and sign that fit best, as neither is known. With one layer the student starts from "
            "random weights; in one-layer-loud it takes its input to be far noisier than the "
            "teacher's. With two hidden layers and a linear readout it starts from random weights, "
            "or near the teacher's (near); informed students, the controls, have the teacher's "
            "noise. Every step has fresh inputs there: what is not learned is not for want of "
            "them. The error of the output, which it is trained on, is shown beside the largest of "
            "all layers. Of a Heaviside unit the variance is m (1 - m): it is learned with the "
            "mean m, whatever the covariance."
        ),
        measure=learned_moments.measure,
        parts=by_scale(_second),
        claims=(
            *(
                Claim(
                    says=f"With one layer the student learns the teacher's {name}s.",
                    metric=f"{name}_error",
                    label="one-layer",
                    most=1e-3,
                )
                for name in ("mean", "variance")
            ),
            Claim(
                says="The choice of the student's input covariance is arbitrary (means, when it is "
                "much too large).",
                metric="mean_error",
                label="one-layer-loud",
                most=1e-3,
                why="A unit cannot have a larger ratio of signal to noise than its input, whatever "
                "its weights: the noise that the student assumes of its input must be less than "
                "all that the teacher has there.",
            ),
            *(
                Claim(
                    says=f"With several layers it learns the {name} at each layer ({words}).",
                    metric=f"{name}_error",
                    label=label,
                    most=0.05,
                    why=why,
                )
                for label, words, why in (
                    ("layers-near", "from a start near the teacher", _NOT_ONE_SCALE),
                    (
                        "layers-random",
                        "from a random start",
                        "Training ends at hidden layers that are not the teacher's, where the "
                        "output nearly is; so it does with the teacher's noise (control). "
                        + _NOT_ONE_SCALE,
                    ),
                )
                for name in ("mean", "variance")
            ),
            *(
                Claim(
                    says=f"Of these layers, the error of the output's means alone ({words}).",
                    metric="output_mean_error",
                    label=label,
                    ours=True,
                )
                for label, words in (
                    ("layers-near", "from a start near the teacher"),
                    ("layers-random", "from a random start"),
                    ("layers-random-informed", "from a random start, with the teacher's noise"),
                )
            ),
            *(
                Claim(
                    says="With several layers it learns the mean at each layer (control: it knows "
                    f"the teacher's noise, and starts {words}).",
                    metric="mean_error",
                    label=label,
                    most=0.05,
                    ours=True,
                    why=why,
                )
                for label, words, why in (
                    (
                        "layers-informed",
                        "near",
                        "The output is learned first; hidden layers follow slowly.",
                    ),
                    (
                        "layers-random-informed",
                        "at random",
                        "There are other hidden layers with nearly the same output.",
                    ),
                )
            ),
        ),
    ),
    Experiment(
        name="theorem-3",
        about=(
            f"{_TEACHER}The proof takes the student to have the teacher's means and variances in "
            "every layer, and bounds the deviation of its covariance from one layer to the next by "
            "the rate r. That idealised student is followed through 20 layers of 20 units: with "
            "random weights (16 inputs), and with biases set so that every unit has the same ratio "
            "of signal to noise for one input (balanced). The deviation is the largest difference "
            "of a covariance, between two units, given as a part of the teacher's largest such "
            "covariance too. A layer that breaks the bound is constructed (counterexample): the "
            "last step of its proof needs rows of weights no longer than 1, and a rate without "
            "that need is given beside it. Last, a real student of six layers is trained "
            "(trained), on fresh inputs at every step, starting near its teacher. The deviation is "
            "multiplied from both sides by the Jacobian of the means, so it is forgotten with "
            "depth as the input is; the squared response to the input is shown beside it."
        ),
        measure=deviation.measure,
        parts=by_scale(_third),
        claims=(
            *_of_labels(
                "The deviation grows from a layer to the next by the rate r at most ({words}; "
                "largest growth over r).",
                "ratio_over_rate",
                1.0,
                ("random", "random networks", ""),
                ("balanced", "balanced networks", ""),
                (
                    "counterexample",
                    "any network: one made to break it",
                    "The proof uses the inequality of means on a sum that does not stand there; "
                    "for rows of weights longer than 1 its result is false.",
                ),
            ),
            Claim(
                says="By a rate that does without that step of the proof it grows at most (all of "
                "these; largest growth over that rate, 1 but for rounding where it is reached).",
                metric="ratio_over_corrected_rate",
                label=("random", "balanced", "counterexample"),
                most=1.0 + 1e-9,
                ours=True,
            ),
            Claim(
                says="The condition, which the paper calls mild, is met: the sum of -log r grows "
                "to infinity with depth (random networks; positive after 20 layers).",
                metric="sum_of_minus_log_rate",
                label="random",
                least=0.0,
                why="r is far above 1 in every layer: it has the largest susceptibility and the "
                "least eigenvalue, of different units, and the width as a factor. The bound is "
                "vacuous, and does not explain that the deviation shrinks.",
            ),
            Claim(
                says="It is met in networks that we balanced for it (the same sum).",
                metric="sum_of_minus_log_rate",
                label="balanced",
                least=0.0,
                ours=True,
            ),
            *(
                Claim(
                    says="The output covariance of deep networks converges to the teacher's "
                    f"({words}; deviation, as a part of the largest covariance).",
                    metric="relative_deviation",
                    label=label,
                    most=0.01,
                )
                for label, words in (
                    ("random", "random networks, 20 layers"),
                    ("balanced", "balanced networks, 20 layers"),
                )
            ),
            Claim(
                says="A trained student of six layers has its teacher's output covariance, though "
                "the theorem is about infinitely many and its condition is not met (deviation, as "
                "a part of the largest covariance).",
                metric="relative_deviation",
                label="trained",
                most=0.1,
                ours=True,
                why="Its hidden means are not the teacher's (theorem 2), and every layer adds to "
                "the deviation what that changes.",
            ),
        ),
        revision=1,
    ),
)
