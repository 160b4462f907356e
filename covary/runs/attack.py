"""Attacks on a trained classifier, and on the same network without its first noises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.attacks import Bounds, input_gradient, pgd, signed_step, square
from covary.covariance import class_name
from covary.data import Dataset
from covary.models import noise_of, with_covariance, with_noise
from covary.moments import Moments
from covary.progress import Steps
from covary.runs.config import PER_SAMPLE_HELP, check_covariance
from covary.runs.directory import Run
from covary.runs.predictions import joined
from covary.runs.results import Attack, AttackedNetwork, AttackRow, Quartiles
from covary.runs.tracking import chosen, quietly
from covary.settings import supervise_covariance
from covary.training.config import option
from covary.uncertainty import metrics
from covary.uncertainty import scores as uncertainty_scores

TRAINED = "as trained"
DEFENDED = "sigma_1 = sigma_2 = 0"
TITLES = {"fgsm": "FGSM", "pgd": "PGD", "square": "Square"}
ATTACKS = tuple(TITLES)
# Before the name of an attack that was made on the network as trained, and given to another.
_TRANSFER = "transfer-"
# An accuracy that has fallen by less is not called broken.
_DROP = 0.05
_NO_GRADIENT = "Its gradient is zero for every input"
_HOLDS = (
    f"None of these costs more than {_DROP:g} of accuracy: the defence holds against what was "
    "tried, which is no proof against what was not."
)
# A score of inputs by a network, (B, *shape) -> (B,), higher where it is less sure.
Score = Callable[[nn.Module, Tensor], Tensor]
_BATCH = 128
# Entropies of one row to keep for drawing.
_KEPT = 1000


def _setting(default: Any, help_text: str, **more: Any) -> Any:
    return field(default=default, metadata=option(help_text, "Options", **more))


@dataclass(frozen=True, kw_only=True)
class AttackConfig:
    """Which attacks, how strong, on which network; the help of an option explains its field.

    ``pgd`` and ``square`` ask a network whose covariance is stored as ``search`` says: they attack
    the mean, of which variances alone give a close estimate at a small part of the cost. What they
    find is then put to the network itself, which stores it as ``covariance`` says.
    """

    epsilons: tuple[float, ...] = _setting(
        (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
        "How far inputs are moved at most, with commas. Images: in parts of the range of a pixel "
        "(0.1 is 25.5 of 255). Tables: in standard deviations of each column.",
        flag="--epsilon",
    )
    attacks: tuple[str, ...] = _setting(
        ATTACKS, f"Which: {', '.join(ATTACKS)}; with commas.", flag="--attack", commas=True
    )
    samples: int = _setting(1000, "Test inputs, at most.", min=1)
    square_samples: int = _setting(200, "Of them, for square, at most.", min=1)
    steps: int = _setting(20, "Gradients that pgd follows.", min=1)
    queries: int = _setting(300, "How often square asks about an input.", min=1)
    clip: bool = _setting(
        True,
        "Keep pixels in their range, and columns of tables between their extremes.",
        flag="--clip/--no-clip",
    )
    covariance: str | None = _setting(
        None,
        f"How it is stored: {PER_SAMPLE_HELP}.",
        show_default="tracked if it was so in training, else full",
    )
    search: str = _setting(
        "diagonal",
        "The same for the network that pgd and square ask on their way.",
        flag="--search-covariance",
    )
    whole_gradient: bool = _setting(
        False,
        "Let fgsm and pgd also follow how means depend on variances: stronger. Training and the "
        "paper leave that out.",
        flag="--whole-gradient",
    )
    seed: int = 0  # decides which inputs, and all that is random in attacks

    def __post_init__(self) -> None:
        wrong = [value for value in self.epsilons if not (math.isfinite(value) and value >= 0)]
        if wrong or not self.epsilons:
            got = ", ".join(map(str, wrong)) or "none"
            raise ValueError(f"Strengths of attacks (epsilon) are finite and >= 0, got {got}.")
        unknown = [name for name in self.attacks if name not in ATTACKS]
        if unknown or not self.attacks:
            got = ", ".join(map(repr, unknown)) or "none"
            raise ValueError(f"Known attacks are {', '.join(ATTACKS)}; got {got}.")
        for name in ("samples", "square_samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is a whole number >= 1, got {getattr(self, name)}.")
        for kind in (self.covariance, self.search):
            if kind is not None:
                check_covariance(kind)


class _Looked(NamedTuple):
    """What a network makes of inputs: arrays (n,)."""

    answers: Mapping[str, np.ndarray]  # right, confidence
    scores: Mapping[str, np.ndarray]


class _Target(NamedTuple):
    """A network to be attacked."""

    name: str
    net: nn.Module  # what numbers are of
    search: nn.Module  # cheaper, what attacks of many steps ask
    clean: _Looked  # what it makes of the inputs as they are
    gradient: Tensor | None  # of each input, if an attack needs it

    def described(self) -> AttackedNetwork:
        with_gradient = None
        if self.gradient is not None:
            with_gradient = float((self.gradient != 0).flatten(1).any(1).double().mean())
        accuracy = float(self.clean.answers["right"].mean())
        return AttackedNetwork(self.name, tuple(noise_of(self.net)), accuracy, with_gradient)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """Inputs to attack, how far an epsilon of 1 moves them, and how they are attacked."""

    x: Tensor
    y: Tensor
    scale: float | Tensor
    bounds: Bounds | None
    epsilon_scale: str
    config: AttackConfig
    scores: Mapping[str, Score]

    @classmethod
    def of(cls, data: Dataset, config: AttackConfig, scores: Mapping[str, Score]) -> _Inputs:
        """Some of the test inputs, chosen by the seed."""
        order = np.random.default_rng(config.seed).permutation(len(data.x_test))[: config.samples]
        x, y = data.x_test[order], data.y_test[order]
        scale: float | Tensor = 255.0
        bounds: Bounds = (0.0, 255.0)
        named = "parts of the range of a pixel (0.1 is 25.5 of 255)"
        if not data.is_image:
            known = torch.cat([data.x, data.x_test])
            scale, bounds = data.x.std(0, correction=0), (known.amin(0), known.amax(0))
            named = "standard deviations of each column"
        x = x if x.is_floating_point() else x.float()
        return cls(x, y, scale, bounds if config.clip else None, named, config, scores)

    @torch.no_grad()
    def looked_at(self, net: nn.Module, moved: Tensor) -> _Looked:
        """What a network makes of these inputs after an attack has moved them."""
        device, answers, scores = next(net.parameters()).device, [], []
        for rows in torch.split(torch.arange(len(moved)), _BATCH):
            some = moved[rows].to(device)
            out: Moments = net(some)
            right = out.mean.argmax(-1).cpu() == self.y[rows]
            confidence = out.mean.double().softmax(-1).amax(-1)
            answers.append({"right": right, "confidence": confidence})
            own = {name: score(net, some) for name, score in self.scores.items()}
            scores.append(
                {
                    "entropy": uncertainty_scores.entropy(out),
                    "max_softmax": uncertainty_scores.max_softmax(out),
                    **own,
                }
            )
        return _Looked(joined(answers), joined(scores))

    def moved(self, attack: str, epsilon: float, target: _Target) -> Tensor:
        """The inputs as an attack on a network moves them."""
        config, far = self.config, epsilon * self.scale
        if epsilon == 0:
            return self.x
        if attack == "fgsm":
            assert target.gradient is not None
            return signed_step(self.x, target.gradient, far, bounds=self.bounds)
        more: dict[str, Any] = {
            "bounds": self.bounds,
            # The same random numbers for each strength, so that curves do not jump by chance.
            "generator": torch.Generator().manual_seed(config.seed),
            "batch_size": _BATCH,
        }
        if attack == "pgd":
            return pgd(target.search, self.x, self.y, far, steps=config.steps, **more)
        # The network that is asked is not quite the one that is attacked: no near misses.
        more["confidence"] = 0.0 if config.search == config.covariance else 1.0
        return square(target.search, self.x, self.y, far, queries=config.queries, **more)


def attack_run(
    run: Run,
    config: AttackConfig | None = None,
    *,
    scores: Mapping[str, Score] | None = None,
    progress: Steps | None = None,
) -> Attack:
    """Attack a run's network on its test data, with more and more strength.

    A Heaviside network is attacked as trained and with ``sigma_1 = sigma_2 = 0``, the paper's
    defence: without noise its first layers are steps, which have no slope. That hides the gradient
    from attacks on this network itself, so it is also given what was made on the network as trained
    (``transfer-fgsm``, ``transfer-pgd``), and attacked by ``square``, which needs no gradient.

    Numbers are also written to ``attack.json`` in the run's folder, entropies of each attack's
    inputs to ``attack.npz``.

    Args:
        run: a trained run of a classifier.
        config: which attacks, and how strong.
        scores: more scores to tell attacked inputs from clean ones by, beside ``entropy`` and
            ``max_softmax``: name -> function of network and inputs, higher where less sure.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started, model = datetime.now(timezone.utc), run.config.model
    config = config or AttackConfig()
    if model.task != "classification":
        raise ValueError(f"Attacks are on classifiers; {run.path} is a {model.task}.")
    run.check_replaceable(run.attack_path, run.attack_path.with_suffix(".npz"))
    if config.covariance is None:
        trained = class_name(model.covariance) == "tracked"
        config = replace(config, covariance="tracked" if trained else "full")
    inputs = _Inputs.of(run.data, config, scores or {})
    net: nn.Module = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    asked = (config.covariance, config.search)
    hows = [chosen(run, net, kind, progress=progress is not None) for kind in asked]
    pair = [with_covariance(net, how.covariance) for how in hows]
    networks = {TRAINED: pair}
    if model.activation == "heaviside":
        networks[DEFENDED] = [with_noise(one, [0.0, 0.0]) for one in pair]
    # The notes have what a tracked network would warn of.
    with quietly(), supervise_covariance(config.whole_gradient):
        targets = [_target(inputs, name, *pair) for name, pair in networks.items()]
        rows = list(_rows(targets, inputs, progress))
    found = Attack(
        activation=model.activation,
        covariance=hows[0].covariance,
        search_covariance=hows[1].covariance,
        samples=len(inputs.x),
        epsilons=tuple(sorted(set(config.epsilons))),
        epsilon_scale=inputs.epsilon_scale,
        clip=config.clip,
        gradient="means and variances" if config.whole_gradient else "means",
        pgd={"steps": config.steps, "step_size": 2.5 / config.steps, "random_start": True},
        square={
            "queries": config.queries,
            "samples": min(config.square_samples, len(inputs.x)),
        },
        networks=tuple(target.described() for target in targets),
        rows=tuple(row for row, _ in rows),
        notes=tuple(dict.fromkeys(note for how in hows for note in how.notes)),
        arrays={row.key: entropy[:_KEPT] for row, entropy in rows},
        **run.about(started, config.seed),
    )
    return replace(found, verdict=tuple(verdict(found))).write(run.attack_path)


def _target(inputs: _Inputs, name: str, net: nn.Module, search: nn.Module) -> _Target:
    gradient = None
    if {"fgsm", "pgd"} & set(inputs.config.attacks):
        gradient = input_gradient(net, inputs.x, inputs.y, batch_size=_BATCH)
    return _Target(name, net, search, inputs.looked_at(net, inputs.x), gradient)


_Row = tuple[AttackRow, np.ndarray]  # with the entropies of its inputs (n,)


def _rows(targets: Sequence[_Target], inputs: _Inputs, progress: Steps | None) -> Iterator[_Row]:
    """Each attack of each strength: on each network itself, and from the first on the others."""
    config = inputs.config
    few = replace(inputs, x=inputs.x[: config.square_samples], y=inputs.y[: config.square_samples])
    names = [name for name in ATTACKS if name in config.attacks]
    plan = list(itertools.product(names, sorted(set(config.epsilons))))
    for attack, epsilon in progress(plan, "attacks") if progress else plan:
        used = few if attack == "square" else inputs
        made = [used.moved(attack, epsilon, target) for target in targets]
        for target, own in zip(targets, made, strict=True):
            yield _row(attack, epsilon, target, own, used)
            if target is not targets[0] and attack != "square":
                yield _row(_TRANSFER + attack, epsilon, target, made[0], used)


def _row(attack: str, epsilon: float, target: _Target, moved: Tensor, inputs: _Inputs) -> _Row:
    n, found = len(moved), target.clean  # attacks on fewer inputs take the first of them
    if not torch.equal(moved, inputs.x):
        found = inputs.looked_at(target.net, moved)
    entropy = found.scores["entropy"][:n]
    row = AttackRow(
        attack=attack,
        network=target.name,
        epsilon=epsilon,
        samples=n,
        accuracy=float(found.answers["right"][:n].mean()),
        entropy=_spread(entropy),
        max_softmax=_spread(found.answers["confidence"][:n]),
        auroc={
            name: metrics.auroc(values[:n], target.clean.scores[name][:n])
            for name, values in found.scores.items()
        },
    )
    return row, entropy.astype(np.float32)


def _spread(values: np.ndarray) -> Quartiles:
    # A network without any variance has entropy -inf, and no average can take that in.
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return Quartiles(None, None, None, None)
    lower, median, upper = np.quantile(finite, (0.25, 0.5, 0.75)).tolist()
    return Quartiles(float(finite.mean()), median, lower, upper)


# What the numbers say, in sentences.


def verdict(result: Attack) -> list[str]:
    """What survives the attacks, in sentences made of the numbers alone."""
    if not any(result.epsilons):
        return ["Nothing was attacked: epsilon is 0 throughout."]
    clean, attacks = result.network(TRAINED).accuracy, result.names(TRAINED)
    falls = "; ".join(_fall(result, attack, TRAINED) for attack in attacks)
    sentences = [f"As trained, accuracy is {clean:.3f} on clean inputs; {falls}."]
    for attack in attacks:
        sentences += [_entropy(result, attack), _awareness(result, attack)]
    if result.names(DEFENDED):
        sentences += _defended(result)
    return [sentence for sentence in sentences if sentence]


def _quoted(result: Attack, attack: str, network: str) -> list[AttackRow]:
    """Rows of one strength that is moderate for the sweep, and of the largest."""
    positive = [epsilon for epsilon in result.epsilons if epsilon > 0]
    strengths = (positive[(len(positive) - 1) // 3], positive[-1])
    return [row for row in result.of(attack, network) if row.epsilon in strengths]


def _changes(result: Attack, attack: str, network: str) -> list[float]:
    """How much accuracy the attack costs, at each epsilon."""
    rows = result.of(attack, network)
    # Attacks on fewer inputs start from another accuracy, if they were tried with epsilon 0.
    before = rows[0].accuracy if rows[0].epsilon == 0 else result.network(network).accuracy
    return [before - row.accuracy for row in rows]


def _fall(result: Attack, attack: str, network: str, how: str = "") -> str:
    found = _quoted(result, attack, network)
    values = " and ".join(f"{row.accuracy:.3f} at {row.epsilon:g}" for row in found)
    samples = found[0].samples
    of_fewer = attack == "square" and any(row.samples != samples for row in result.rows)
    counted = f" (of {samples:,} inputs)" if of_fewer else ""
    return f"{TITLES[attack.removeprefix(_TRANSFER)]}{how} leaves {values}{counted}"


def _entropy(result: Attack, attack: str) -> str:
    """Whether the network's doubt grows with the attack, by its median entropy."""
    # As they are quoted: what rounds to the same has not moved.
    medians = [
        (round(row.entropy.median, 1), f"{row.entropy.median:.1f} nats at {row.epsilon:g}")
        for row in result.of(attack, TRAINED)
        if row.entropy.median is not None
    ]
    if len(medians) < 2:
        return ""
    about = f"Under {TITLES[attack]} the median entropy"
    (first, start), (last, end) = medians[0], medians[-1]
    rises = [b - a for (a, _), (b, _) in itertools.pairwise(medians)]
    if min(rises) > 0:
        return f"{about} rises with every step of epsilon, from {start} to {end}."
    if max(rises) <= 0:
        return f"{about} never rises: from {start} to {end}."
    peak = max(range(len(medians)), key=lambda i: (medians[i][0], i))
    if 0 < peak < len(medians) - 1:
        steps = "" if min(rises[:peak]) >= 0 else ", though not with every step,"
        return f"{about} rises{steps} from {start} to {medians[peak][1]}, and falls again to {end}."
    trend = "rises, though not with every step" if last > first else "falls"
    return f"{about} {trend}, from {start} to {end}."


def _awareness(result: Attack, attack: str) -> str:
    """How well each score tells attacked inputs from clean ones."""
    rows = _quoted(result, attack, TRAINED)
    parts, low = [], []
    for score in rows[0].auroc:
        values = [value for row in rows if (value := row.auroc[score]) is not None]
        name = score.replace("_", "-")
        if len(values) == len(rows):
            parts.append(f"{name} {' and '.join(f'{value:.2f}' for value in values)}")
        if any(value < 0.5 for value in values):
            low.append(name)
    if not parts:
        return ""
    where = " and ".join(f"{row.epsilon:g}" for row in rows)
    told = f"AUROC of {TITLES[attack]}'s inputs against clean ones, at {where}: {', '.join(parts)}."
    if not low:
        return told
    names = " and ".join(low)
    return f"{told} Below 0.5 the network is surer of them than of clean inputs (by {names})."


def _defended(result: Attack) -> list[str]:
    """How the defended network does under attacks on itself, and under others."""
    network = result.network(DEFENDED)
    sentences = [
        f"With {DEFENDED}, accuracy is {network.accuracy:.3f} on clean inputs "
        f"({result.network(TRAINED).accuracy:.3f} as trained)."
    ]
    attacks = result.names(DEFENDED)
    direct = [attack for attack in attacks if attack in ("fgsm", "pgd")]
    others = [attack for attack in attacks if attack not in direct]
    if direct:
        left = network.with_gradient or 0.0
        found = "; ".join(_direct(result, attack, with_gradient=bool(left)) for attack in direct)
        gradient = f"A gradient is left for {left:.3f} of inputs" if left else _NO_GRADIENT
        sentences.append(f"{gradient}: {found}.")
    if not others:
        return sentences
    told = []
    moved = [_fall(result, attack, DEFENDED) for attack in others if attack != "square"]
    if moved:
        told.append(f"of attacks made on the network as trained, {', '.join(moved)}")
    if "square" in others:
        told.append(f"{_fall(result, 'square', DEFENDED)}, and needs no gradient")
    listed = "; ".join(told)
    sentences.append(f"{listed[0].upper()}{listed[1:]}.")
    if max(max(_changes(result, attack, DEFENDED)) for attack in others) <= _DROP:
        return [*sentences, _HOLDS]
    hides = "hides gradients; it " if network.with_gradient == 0 else ""
    return [*sentences, f"So the defence {hides}does not remove the weakness."]


def _direct(result: Attack, attack: str, *, with_gradient: bool) -> str:
    """What an attack that follows the defended network's own gradient finds."""
    if not any(_changes(result, attack, DEFENDED)):
        return f"{TITLES[attack]} leaves accuracy unchanged at every epsilon"
    how = ", from its random start alone," if attack == "pgd" and not with_gradient else ""
    return _fall(result, attack, DEFENDED, how)
