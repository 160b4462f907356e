"""Attacks on a trained classifier, and on the same network without its first noises."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from covary.attacks import Bounds, input_gradient, pgd, signed_step, square
from covary.data import Dataset
from covary.models import noise_of, with_covariance, with_noise
from covary.moments import Moments
from covary.runs.config import PER_SAMPLE, check_covariance
from covary.runs.directory import Run, environment
from covary.runs.measuring import Progress
from covary.runs.results import (
    Attack,
    AttackedNetwork,
    AttackRow,
    PgdSettings,
    Spread,
    SquareSettings,
)
from covary.runs.tracking import Held, chosen, quietly
from covary.settings import supervise_covariance
from covary.uncertainty import metrics
from covary.uncertainty import scores as uncertainty_scores

TRAINED = "as trained"
DEFENDED = "sigma_1 = sigma_2 = 0"
TITLES = {
    "fgsm": "FGSM",
    "pgd": "PGD",
    "transfer-fgsm": "FGSM",
    "transfer-pgd": "PGD",
    "square": "Square",
}
# An accuracy that has fallen by less is not called broken.
_DROP = 0.05
ATTACKS = ("fgsm", "pgd", "square")
EPSILONS = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
# A score of inputs by a network, (B, *shape) -> (B,), higher where it is less sure.
Score = Callable[[nn.Module, Tensor], Tensor]
_BATCH = 128
# Entropies of one row to keep for drawing.
_KEPT = 1000


class _Units(NamedTuple):
    """What an epsilon of 1 is, in the units of the network's input, and what limits inputs."""

    scale: float | Tensor
    bounds: Bounds | None
    words: str


@dataclass(frozen=True, eq=False)
class _Setting:
    """What is the same for every attack."""

    units: _Units
    steps: int  # of pgd
    queries: int  # of square
    confidence: float  # of square
    scores: Mapping[str, Score]
    seed: int


class _Looked(NamedTuple):
    """What a network makes of inputs: class, confidence and scores of each, (n,)."""

    classes: np.ndarray
    confidence: np.ndarray
    scores: dict[str, np.ndarray]

    def first(self, n: int) -> _Looked:
        """Of the first inputs."""
        scores = {name: values[:n] for name, values in self.scores.items()}
        return _Looked(self.classes[:n], self.confidence[:n], scores)


@dataclass(frozen=True, eq=False)
class _Target:
    """A network to be attacked."""

    name: str
    net: nn.Module  # what numbers are of
    search: nn.Module  # cheaper, what attacks of many steps ask
    clean: _Looked  # what it makes of the inputs as they are
    gradient: Tensor | None  # of each input, if an attack needs it


def attack_run(
    run: Run,
    *,
    epsilons: Sequence[float] = EPSILONS,
    attacks: Sequence[str] = ATTACKS,
    samples: int = 1000,
    square_samples: int = 200,
    steps: int = 20,
    queries: int = 300,
    covariance: str | None = None,
    search: str = "diagonal",
    whole_gradient: bool = False,
    clip: bool = True,
    scores: Mapping[str, Score] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Attack:
    """Attack a run's network on its test data, with more and more strength.

    A Heaviside network is attacked as trained and with ``sigma_1 = sigma_2 = 0``, the paper's
    defence: without noise its first layers are steps, which have no slope. That hides the gradient
    from attacks on this network itself, so it is also given what was made on the network as trained
    (``transfer-fgsm``, ``transfer-pgd``), and attacked by ``square``, which needs no gradient.

    What comes out is also written to the run's folder: numbers to ``attack.json``, entropies of
    each attack's inputs to ``attack.npz``.

    Args:
        run: a trained run of a classifier.
        epsilons: how far inputs are moved at most (maximum norm). Images: in parts of the range of
            a pixel, so that 0.1 is 25.5 of 255; where pixels are taken to go from -1 to 1, as in
            the paper's code, the same step has twice the number. Tables: in standard deviations of
            each column.
        attacks: of ``"fgsm"``, ``"pgd"`` and ``"square"``.
        samples: test inputs, at most, chosen by the seed.
        square_samples: of them, how many at most for ``square``, which is dear.
        steps: gradients that ``pgd`` follows, from a random start.
        queries: how often ``square`` asks about each input.
        covariance: of the network that all numbers, and the gradient of ``fgsm``, are of:
            ``"full"``, ``"tracked"`` or ``"diagonal"``; tracked by default if it was so in
            training, else full.
        search: how the network that ``pgd`` and ``square`` ask on their way holds its covariance.
            They attack the mean, of which variances alone give a close estimate at a small part of
            the cost; what they find is then put to the network itself.
        whole_gradient: let ``fgsm`` and ``pgd`` also follow how means depend on variances, which
            makes them stronger. Training (SMUC) and the paper leave that out.
        clip: keep inputs within what they can be: pixels in their range, columns of tables between
            their least and largest value.
        scores: more scores to tell attacked inputs from clean ones by, beside ``entropy`` and
            ``max_softmax``: name -> function of network and inputs, higher where less sure.
        seed: decides which inputs, and all that is random in attacks.
        progress: wraps what is done step by step, given a name, to show how far it is.
    """
    started = datetime.now(timezone.utc)
    config = run.config
    if config.model.task != "classification":
        raise ValueError(f"Attacks are on classifiers; {run.path} is a {config.model.task}.")
    run.check_replaceable(run.attack_path, run.attack_path.with_suffix(".npz"))
    strengths = check_epsilons(epsilons)
    names = check_attacks(attacks)
    for name, count in (("samples", samples), ("square_samples", square_samples)):
        if count < 1:
            raise ValueError(f"{name} is a whole number >= 1, got {count}.")
    covariance = check_covariance(covariance, None, config.model)
    check_search(search)
    net: nn.Module = run.network().to("cuda" if torch.cuda.is_available() else "cpu")
    dataset, how = run.data, Held(covariance)
    if "tracked" in (covariance, search):
        how = chosen(run, net, "tracked", progress=progress is not None)
    rows = np.random.default_rng(seed).permutation(len(dataset.x_test))[:samples]
    x, y = dataset.x_test[rows], dataset.y_test[rows]
    x = x if x.is_floating_point() else x.float()
    units = _units(dataset, clip=clip)
    held = [
        with_covariance(net, kind, exact_width=how.exact_width if kind == "tracked" else None)
        for kind in (covariance, search)
    ]
    follow = not {"fgsm", "pgd"}.isdisjoint(names)
    noises: dict[str, list[float] | None] = {TRAINED: None}
    if config.model.activation == "heaviside":
        noises[DEFENDED] = [0.0, 0.0]
    # The notes have what a tracked network would warn of.
    with quietly(), supervise_covariance(whole_gradient):
        targets = [
            _target(name, held, noise, x, y, scores or {}, follow=follow)
            for name, noise in noises.items()
        ]
        few = slice(min(square_samples, len(x)))
        setting = _Setting(
            units=units,
            steps=steps,
            queries=queries,
            # The network that is asked is not quite the one that is attacked: take no near misses.
            confidence=0.0 if search == covariance else 1.0,
            scores=scores or {},
            seed=seed,
        )
        made: list[_Row] = []
        plan = [(attack, epsilon) for attack in names for epsilon in strengths]
        for attack, epsilon in progress(plan, "attacks") if progress else plan:
            used = few if attack == "square" else slice(None)
            made += _attacked(attack, epsilon, targets, x[used], y[used], setting)
    found = Attack(
        dataset=config.data.name,
        activation=config.model.activation,
        weights=run.weights,
        covariance=covariance,
        exact_width=how.exact_width,
        search_covariance=search,
        samples=len(x),
        epsilons=strengths,
        epsilon_unit=units.words,
        clip=clip,
        gradient="means and variances" if whole_gradient else "means",
        pgd=PgdSettings(steps, 2.5 / steps, random_start=True),
        square=SquareSettings(queries, len(x[few])),
        networks=tuple(
            AttackedNetwork(
                target.name,
                tuple(noise_of(target.net)),
                _accuracy(target.clean, y),
                None if target.gradient is None else _nonzero(target.gradient),
            )
            for target in targets
        ),
        rows=tuple(row for row, _ in made),
        notes=how.notes,
        arrays={row.key: entropy[:_KEPT] for row, entropy in made},
        **environment(started, seed=seed),
    )
    return replace(found, verdict=tuple(verdict(found))).write(run.attack_path)


def check_epsilons(epsilons: Sequence[float]) -> tuple[float, ...]:
    """In order, each once."""
    wrong = [value for value in epsilons if not (math.isfinite(value) and value >= 0)]
    if wrong or not epsilons:
        got = ", ".join(map(str, wrong)) or "none"
        raise ValueError(f"Strengths of attacks (epsilon) are finite and >= 0, got {got}.")
    return tuple(sorted(set(epsilons)))


def check_attacks(attacks: Sequence[str]) -> tuple[str, ...]:
    """In their usual order, each once."""
    wrong = [name for name in attacks if name not in ATTACKS]
    if wrong or not attacks:
        got = ", ".join(map(repr, wrong)) or "none"
        raise ValueError(f"Known attacks are {', '.join(ATTACKS)}; got {got}.")
    return tuple(name for name in ATTACKS if name in attacks)


def check_search(search: str) -> None:
    """What an attack asks about one input must not depend on others."""
    if search not in PER_SAMPLE:
        raise ValueError(
            f"Attacks ask a network whose covariance is one of {', '.join(PER_SAMPLE)}, got "
            f"{search!r}."
        )


def _units(dataset: Dataset, *, clip: bool) -> _Units:
    if dataset.is_image:
        words = "parts of the range of a pixel (0.1 is 25.5 of 255)"
        return _Units(255.0, (0.0, 255.0) if clip else None, words)
    rows = torch.cat([dataset.x, dataset.x_test])
    bounds = (rows.amin(0), rows.amax(0)) if clip else None
    return _Units(dataset.x.std(0, correction=0), bounds, "standard deviations of each column")


def _target(
    name: str,
    held: Sequence[nn.Module],
    noise: Sequence[float] | None,
    x: Tensor,
    y: Tensor,
    scores: Mapping[str, Score],
    *,
    follow: bool,
) -> _Target:
    net, search = (one if noise is None else with_noise(one, noise) for one in held)
    gradient = input_gradient(net, x, y, batch_size=_BATCH) if follow else None
    return _Target(name, net, search, _look(net, x, scores), gradient)


@torch.no_grad()
def _look(net: nn.Module, x: Tensor, scores: Mapping[str, Score]) -> _Looked:
    device = next(net.parameters()).device
    classes, confidence = [], []
    by_score: dict[str, list[np.ndarray]] = {}
    for some in torch.split(x.to(device), _BATCH):
        out: Moments = net(some)
        classes.append(out.mean.argmax(-1).cpu().numpy())
        confidence.append(out.mean.double().softmax(-1).amax(-1).cpu().numpy())
        found = {
            "entropy": uncertainty_scores.entropy(out),
            "max_softmax": uncertainty_scores.max_softmax(out),
            **{name: score(net, some) for name, score in scores.items()},
        }
        for key, value in found.items():
            by_score.setdefault(key, []).append(value.cpu().numpy())
    return _Looked(
        np.concatenate(classes),
        np.concatenate(confidence),
        {key: np.concatenate(values) for key, values in by_score.items()},
    )


_Row = tuple[AttackRow, np.ndarray]  # with the entropies of its inputs (n,)


def _attacked(
    attack: str,
    epsilon: float,
    targets: Sequence[_Target],
    x: Tensor,
    y: Tensor,
    setting: _Setting,
) -> list[_Row]:
    """One attack of one strength: on each network itself, and from the first on the others."""
    made = [_make(attack, epsilon, target, x, y, setting) for target in targets]
    rows = []
    for target, own in zip(targets, made, strict=True):
        rows.append(_row(attack, epsilon, target, own, x, y, setting))
        if target is not targets[0] and attack != "square":
            rows.append(_row(f"transfer-{attack}", epsilon, target, made[0], x, y, setting))
    return rows


def _make(
    attack: str, epsilon: float, target: _Target, x: Tensor, y: Tensor, setting: _Setting
) -> Tensor:
    """Attacked inputs, of the shape of x."""
    if epsilon == 0:
        return x
    far, bounds = epsilon * setting.units.scale, setting.units.bounds
    if attack == "fgsm":
        assert target.gradient is not None  # the same for every strength
        return signed_step(x, target.gradient, far, bounds=bounds)
    # The same random numbers for each strength, so that curves do not jump by chance.
    generator = torch.Generator().manual_seed(setting.seed)
    if attack == "pgd":
        return pgd(
            target.search,
            x,
            y,
            far,
            steps=setting.steps,
            bounds=bounds,
            generator=generator,
            batch_size=_BATCH,
        )
    return square(
        target.search,
        x,
        y,
        far,
        queries=setting.queries,
        confidence=setting.confidence,
        bounds=bounds,
        generator=generator,
        batch_size=_BATCH,
    )


def _row(
    attack: str,
    epsilon: float,
    target: _Target,
    attacked: Tensor,
    x: Tensor,
    y: Tensor,
    setting: _Setting,
) -> _Row:
    clean = target.clean.first(len(x))  # attacks on fewer inputs take the first of them
    same = torch.equal(attacked, x)
    found = clean if same else _look(target.net, attacked, setting.scores)
    row = AttackRow(
        attack=attack,
        network=target.name,
        epsilon=epsilon,
        samples=len(y),
        accuracy=_accuracy(found, y),
        entropy=_spread(found.scores["entropy"]),
        max_softmax=_spread(found.confidence),
        auroc={
            name: metrics.auroc(values, clean.scores[name]) for name, values in found.scores.items()
        },
    )
    return row, found.scores["entropy"].astype(np.float32)


def _accuracy(found: _Looked, y: Tensor) -> float:
    return float((found.classes[: len(y)] == y.numpy()).mean())


def _nonzero(gradient: Tensor) -> float:
    """The part of inputs where there is a direction to follow."""
    return float((gradient != 0).flatten(1).any(1).double().mean())


def _spread(values: np.ndarray) -> Spread:
    # A network without any variance has entropy -inf, and no average can take that in.
    finite = values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        return Spread(None, None, None, None)
    lower, median, upper = np.quantile(finite, (0.25, 0.5, 0.75)).tolist()
    return Spread(float(finite.mean()), median, lower, upper)


# What the numbers say, in sentences.


class _Numbers:
    """The rows of a result, by attack and network, in order of epsilon."""

    def __init__(self, result: Attack) -> None:
        self.rows, self.of, self.attacks = result.rows, result.of, result.names
        self.networks = {network.name: network for network in result.networks}
        positive = [epsilon for epsilon in result.epsilons if epsilon > 0]
        # What is quoted: one strength that is moderate for the sweep, and the largest.
        self.quoted = sorted({positive[(len(positive) - 1) // 3], positive[-1]}) if positive else []

    def quotes(self, attack: str, network: str) -> list[AttackRow]:
        return [row for row in self.of(attack, network) if row.epsilon in self.quoted]

    def clean(self, attack: str, network: str) -> float:
        """Accuracy before the attack, on the inputs of this attack if it is known."""
        first = self.of(attack, network)[0]
        return first.accuracy if first.epsilon == 0 else self.networks[network].accuracy

    def drop(self, attack: str, network: str) -> float:
        """How much accuracy the attack costs at its worst."""
        worst = min(row.accuracy for row in self.of(attack, network))
        return self.clean(attack, network) - worst


def verdict(result: Attack) -> list[str]:
    """What survives the attacks, in sentences made of the numbers alone."""
    numbers = _Numbers(result)
    if not numbers.quoted:
        return ["Nothing was attacked: epsilon is 0 throughout."]
    sentences = [_trained(numbers)]
    for attack in numbers.attacks(TRAINED):
        sentences += [_entropy(numbers, attack), _awareness(numbers, attack)]
    if DEFENDED in numbers.networks:
        sentences += _defended(numbers)
    return [sentence for sentence in sentences if sentence]


def _trained(numbers: _Numbers) -> str:
    clean = numbers.networks[TRAINED].accuracy
    falls = [_fall(numbers, attack, TRAINED) for attack in numbers.attacks(TRAINED)]
    return f"As trained, accuracy is {_share(clean)} on clean inputs; {'; '.join(falls)}."


def _fall(numbers: _Numbers, attack: str, network: str) -> str:
    found = numbers.quotes(attack, network)
    values = " and ".join(f"{_share(row.accuracy)} at {row.epsilon:g}" for row in found)
    samples = found[0].samples
    of_fewer = any(row.samples != samples for row in numbers.rows)
    counted = f" (of {samples:,} inputs)" if of_fewer and attack == "square" else ""
    return f"{TITLES[attack]} leaves {values}{counted}"


def _entropy(numbers: _Numbers, attack: str) -> str:
    """Whether the network's doubt grows with the attack, by its median entropy."""
    rows = [row for row in numbers.of(attack, TRAINED) if _is_known(row.entropy.median)]
    if len(rows) < 2:
        return ""
    # As they are quoted: what rounds to the same has not moved.
    medians = [round(_median(row), 1) for row in rows]
    first, last = rows[0], rows[-1]
    peak = max(range(len(rows)), key=lambda i: (medians[i], i))
    about = f"Under {TITLES[attack]} the median entropy"
    ends = f"from {_at(first)} to {_at(last)}"
    rises = [b - a for a, b in itertools.pairwise(medians)]
    if min(rises) > 0:
        return f"{about} rises with every step of epsilon, {ends}."
    if max(rises) <= 0:
        return f"{about} never rises: {ends}."
    if 0 < peak < len(rows) - 1:
        steps = "" if min(rises[:peak]) >= 0 else ", though not with every step,"
        rest = f"and falls again to {_at(last)}"
        return f"{about} rises{steps} from {_at(first)} to {_at(rows[peak])}, {rest}."
    trend = "rises, though not with every step" if medians[-1] > medians[0] else "falls"
    return f"{about} {trend}, {ends}."


def _at(row: AttackRow) -> str:
    return f"{_median(row):.1f} nats at {row.epsilon:g}"


def _awareness(numbers: _Numbers, attack: str) -> str:
    """How well each score tells attacked inputs from clean ones."""
    rows = numbers.quotes(attack, TRAINED)
    parts = []
    for score in rows[0].auroc:
        values = [row.auroc[score] for row in rows]
        if all(map(_is_known, values)):
            listed = " and ".join(f"{value:.2f}" for value in values)
            parts.append(f"{score.replace('_', '-')} {listed}")
    if not parts:
        return ""
    where = " and ".join(f"{row.epsilon:g}" for row in rows)
    told = f"AUROC of {TITLES[attack]}'s inputs against clean ones, at {where}: {', '.join(parts)}."
    lows = [score for score in rows[0].auroc if any(_is_low(row, score) for row in rows)]
    if lows:
        names = " and ".join(score.replace("_", "-") for score in lows)
        told += f" Below 0.5 the network is surer of them than of clean inputs (by {names})."
    return told


def _is_low(row: AttackRow, score: str) -> bool:
    value = row.auroc[score]
    return value is not None and value < 0.5


def _defended(numbers: _Numbers) -> list[str]:
    network, attacks = numbers.networks[DEFENDED], numbers.attacks(DEFENDED)
    trained = numbers.networks[TRAINED].accuracy
    sentences = [
        f"With {DEFENDED}, accuracy is {_share(network.accuracy)} on clean inputs "
        f"({_share(trained)} as trained)."
    ]
    direct = [attack for attack in attacks if attack in ("fgsm", "pgd")]
    if direct:
        sentences.append(_direct(numbers, direct, network.with_gradient))
    others = [attack for attack in attacks if attack not in ("fgsm", "pgd")]
    if not others:
        return sentences
    moved = [attack for attack in others if attack != "square"]
    told = []
    if moved:
        falls = ", ".join(_fall(numbers, attack, DEFENDED) for attack in moved)
        told.append(f"of attacks made on the network as trained, {falls}")
    if "square" in others:
        told.append(f"{_fall(numbers, 'square', DEFENDED)}, and needs no gradient")
    listed = "; ".join(told)
    sentences.append(f"{listed[0].upper()}{listed[1:]}.")
    hidden = network.with_gradient == 0
    if max(numbers.drop(attack, DEFENDED) for attack in others) > _DROP:
        sentences.append(
            "So the defence hides gradients; it does not remove the weakness."
            if hidden
            else "So the defence does not remove the weakness."
        )
    else:
        sentences.append(
            f"None of these costs more than {_DROP:g} of accuracy: the defence holds against what "
            "was tried, which is no proof against what was not."
        )
    return sentences


def _direct(numbers: _Numbers, attacks: Sequence[str], with_gradient: float | None) -> str:
    """What attacks that follow the defended network's own gradient find."""
    parts = []
    for attack in attacks:
        changes = [
            abs(row.accuracy - numbers.clean(attack, DEFENDED))
            for row in numbers.of(attack, DEFENDED)
        ]
        if max(changes) == 0:
            parts.append(f"{TITLES[attack]} leaves accuracy unchanged at every epsilon")
        else:
            start = (
                ", from its random start alone," if attack == "pgd" and not with_gradient else ""
            )
            fall = _fall(numbers, attack, DEFENDED).replace(" leaves", f"{start} leaves", 1)
            parts.append(fall)
    if with_gradient == 0:
        return f"Its gradient is zero for every input: {'; '.join(parts)}."
    return f"A gradient is left for {_share(with_gradient or 0.0)} of inputs: {'; '.join(parts)}."


def _median(row: AttackRow) -> float:
    return math.nan if row.entropy.median is None else row.entropy.median


def _share(value: float) -> str:
    return f"{value:.3f}"


def _is_known(value: float | None) -> bool:
    return value is not None and value == value
