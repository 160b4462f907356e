"""What an experiment is: a row that says what to measure, and what the paper claims of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reproduction.workshop import Workshop

SCALES = ("smoke", "quick", "paper")
# How many, where nothing else asks for more or fewer.
SEEDS = {"smoke": 1, "quick": 1, "paper": 3}
HOLDS, PARTLY, FAILS = "holds", "holds partly", "does not hold"
# Of a claim whose numbers are too close to its bound for their noise.
UNDECIDED = "within noise"

Metrics = Mapping[str, float | None]


class Part(NamedTuple):
    """One measurement of an experiment.

    Attributes:
        label: what is measured, such as ``"shared"``; parts that differ in seed alone share it.
        seed: decides everything that is random.
        settings: all else that decides it, as JSON has it.
    """

    label: str
    seed: int
    settings: Mapping[str, Any]


class Measured(NamedTuple):
    """What a part gave.

    Attributes:
        metrics: numbers that claims are about, by name; None where one is not defined.
        series: what figures and tables show, as JSON has it.
    """

    metrics: Metrics
    series: Mapping[str, Any]


@dataclass(frozen=True)
class Elsewhere:
    """A number of the results of another experiment: the average over its parts that have it.

    Attributes:
        experiment: whose results.
        metric: the number's name there.
        label: of which parts, or labels of which; of all that have it if empty.
        any_scale: results of another scale are compared with, too.
    """

    experiment: str
    metric: str
    label: str | tuple[str, ...] = ""
    any_scale: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """Of which parts; none if of all that have it."""
        return _labels(self.label)


class Number(NamedTuple):
    """What is held against a claim's bounds, and by how much it may be off by chance.

    The noise is half of a 95% interval; None if it is not known.
    """

    value: float | None
    noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says about a number, and when we take that to hold.

    Attributes:
        says: the claim, in a sentence.
        metric: the number's name in ``Measured.metrics``.
        minus: what is taken off it: another of those numbers, by name; of several, the largest;
            one for each label; or a number of other results.
        label: of which parts, or labels of which; of all of them if empty.
        of: the experiment whose results it is about, if that is another one.
        instead: label of a part -> label of one that stands in for it until it is measured.
        published: the number as printed, with what the paper compares it with; empty if it has
            none.
        least, most: bounds within which a measured number is in accord with the claim.
        noise: ``"beyond"``: a number that misses a bound by less than its noise decides nothing.
            ``"around"``: nor does one that keeps it by less. The noise of a metric is another one,
            ``<metric>_noise``. Without either, numbers are taken as they are.
        majority: it is about most parts and not about each; it holds if more than half agree, and
            else does not.
        why: what is known of the reason, where a claim does not hold.
        untested: by scale, why what is measured there cannot decide it. It is shown, not judged.
        ours: the paper does not say this, or not so; shown beside its claims, and counted only
            where an experiment has no others. It may be without bounds.
        goal: what we set out to reach by means of our own. To miss it says nothing of the paper.
    """

    says: str
    metric: str
    minus: str | tuple[str, ...] | Mapping[str, float] | Elsewhere = ""
    label: str | tuple[str, ...] = ""
    of: str = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    published: str = ""
    least: float | None = None
    most: float | None = None
    noise: str = ""
    majority: bool = False
    why: str = ""
    untested: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False
    goal: bool = False

    def __post_init__(self) -> None:
        if not self.bounded and not self.ours:
            raise ValueError(f"A claim needs a bound that it can fail by: {self.says}")
        if self.noise not in ("", "beyond", "around"):
            raise ValueError(f"Noise is looked at beyond or around a bound, not {self.noise!r}.")

    @property
    def bounded(self) -> bool:
        """Whether it is judged, and not only shown."""
        return self.least is not None or self.most is not None

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the parts that it is about; none if of all of them."""
        return _labels(self.label)

    @property
    def needs(self) -> tuple[str, ...]:
        """Other experiments without whose results it cannot be judged."""
        other = self.minus.experiment if isinstance(self.minus, Elsewhere) else ""
        return tuple(name for name in (self.of, other) if name)

    def agrees(self, value: float | None, noise: float | None = None) -> bool | None:
        """Whether a number is in accord with the claim; None if its noise leaves that open.

        A number that is not defined is not in accord; one whose noise is not known, where that is
        asked for, leaves it open.
        """
        if value is None or math.isnan(value):
            return False
        inside = [value - self.least] if self.least is not None else []
        inside += [self.most - value] if self.most is not None else []
        margin = min(inside, default=math.inf)
        if not self.noise or (self.noise == "beyond" and margin >= 0):
            return margin >= 0
        if noise is None or math.isnan(noise) or abs(margin) <= noise:
            return None
        return margin > 0

    def parts(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Those of the results that it is about; none where what it is compared with is lacking."""
        if self.of:
            record = record.get("beside", {}).get(self.of) or {"parts": ()}
        measured = {part["label"] for part in record["parts"]}
        replaced = {self.instead[label] for label in measured & set(self.instead)}
        found = [
            part
            for part in record["parts"]
            if self.metric in part["metrics"]
            and (not self.labels or part["label"] in self.labels)
            and part["label"] not in replaced
        ]
        return [] if isinstance(self.minus, Elsewhere) and not self.others(record) else found

    def others(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The parts of other results whose average is taken off."""
        assert isinstance(self.minus, Elsewhere)
        beside = record.get("beside", {}).get(self.minus.experiment)
        if beside is None or (beside["scale"] != record["scale"] and not self.minus.any_scale):
            return []
        return [
            part
            for part in beside["parts"]
            if part["metrics"].get(self.minus.metric) is not None
            and (not self.minus.labels or part["label"] in self.minus.labels)
        ]

    def numbers(self, record: Mapping[str, Any]) -> list[Number]:
        """Its number in each of the parts that it is about, and their noise."""
        off = None
        if isinstance(self.minus, Elsewhere):
            off = _average(self.minus.metric, self.others(record))
        return [self._number(part, off) for part in self.parts(record)]

    def values(self, record: Mapping[str, Any]) -> list[float | None]:
        """The numbers alone."""
        return [number.value for number in self.numbers(record)]

    def _number(self, part: Mapping[str, Any], elsewhere: Number | None) -> Number:
        metrics: Metrics = part["metrics"]
        own = _with_noise(metrics, self.metric)
        if elsewhere is not None:
            return _difference(own, elsewhere)
        if not self.minus:
            return own
        if isinstance(self.minus, str):
            return _difference(own, _with_noise(metrics, self.minus))
        if isinstance(self.minus, tuple):
            every = [_with_noise(metrics, name) for name in self.minus]
            known = [each for each in every if each.value is not None]
            if len(known) < len(every):
                return Number(None)
            return _difference(own, max(known, key=lambda each: each.value or 0.0))
        assert isinstance(self.minus, Mapping)
        return _difference(own, Number(self.minus.get(part["label"]), 0.0))

    def decided(self, record: Mapping[str, Any]) -> list[bool | None]:
        """Of each of the parts whether it holds there; None where noise leaves it open."""
        return [self.agrees(*number) for number in self.numbers(record)]

    def verdict(self, record: Mapping[str, Any]) -> str | None:
        """Whether it holds: in all parts, or partly, in half of them; None if it is not tested.

        Where parts are left open, it is judged as they all may turn out: it is within noise if
        they could make it hold, in half of the parts, or not.
        """
        decided = self.decided(record)
        if not decided or not self.bounded or record["scale"] in self.untested:
            return None
        low = decided.count(True) / len(decided)
        high = low + decided.count(None) / len(decided)
        if self.majority:
            return HOLDS if low > 1 / 2 else FAILS if high <= 1 / 2 else UNDECIDED
        if low == 1:
            return HOLDS
        return PARTLY if low >= 1 / 2 else FAILS if high < 1 / 2 else UNDECIDED


def _labels(label: str | tuple[str, ...]) -> tuple[str, ...]:
    """Labels of parts, where no label is that of all; parts without one are ``("",)``."""
    if isinstance(label, str):
        return (label,) if label else ()
    return label


def _with_noise(metrics: Metrics, name: str) -> Number:
    return Number(metrics.get(name), metrics.get(f"{name}_noise"))


def _average(metric: str, parts: Sequence[Mapping[str, Any]]) -> Number | None:
    """The average of a metric, and of its noise; what seeds differ by is not taken off that."""
    numbers = [_with_noise(part["metrics"], metric) for part in parts]
    if not numbers:
        return None
    noises = [each.noise for each in numbers if each.noise is not None]
    noise = statistics.fmean(noises) if noises else None
    return Number(statistics.fmean(each.value or 0.0 for each in numbers), noise)


def _difference(one: Number, other: Number) -> Number:
    """With the noise of two that are independent: more than that of two that rise together."""
    if one.value is None or other.value is None:
        return Number(None)
    known = one.noise is not None and other.noise is not None
    noise = math.hypot(one.noise or 0.0, other.noise or 0.0) if known else None
    return Number(one.value - other.value, noise)


def overall(verdicts: Sequence[str]) -> str | None:
    """The verdict on several together, by the rule for parts of a claim; None of none.

    It holds if all do, and partly if at least half do, where one that holds partly is half of one.
    Those within noise count as they may turn out: as long as half hold, and no other fails, it
    holds so far; if they could decide, it is within noise.
    """
    if not verdicts:
        return None
    known = [each for each in verdicts if each != UNDECIDED]
    low = (known.count(HOLDS) + known.count(PARTLY) / 2) / len(verdicts)
    high = low + verdicts.count(UNDECIDED) / len(verdicts)
    if low >= 1 / 2:
        return HOLDS if known.count(HOLDS) == len(known) else PARTLY
    return FAILS if high < 1 / 2 else UNDECIDED


def _nothing_more(_part: Mapping[str, Any], _settings: Mapping[str, Any]) -> Metrics:
    """What follows from a part of which all is stored."""
    return {}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A figure or table of the paper.

    Attributes:
        name: what the command line calls it.
        about: what is done, and where that is not what the paper did.
        measure: takes a part and gives its numbers.
        parts: what is measured, by scale.
        claims: what the paper says of it.
        proviso: in which way what is judged is not what the paper has; said with the verdict.
        revision: goes up when ``measure`` gives something else for the same settings; what was
            kept of another revision is measured again.
        earlier: revisions before whose results lack something, and are shown until they are
            measured again; by revision, what they lack.
        derived: numbers that follow from a stored part and its settings, such as the noise of
            others; claims are about them as about those that were stored.
        beside: other experiments that its figure shows some of.
        title, paper: what the page calls it, and where it is in the paper: by the catalogue.
    """

    name: str
    about: str
    measure: Callable[[Part, Workshop], Measured]
    parts: Mapping[str, Sequence[Part]]
    claims: Sequence[Claim]
    proviso: str = ""
    revision: int = 0
    earlier: Mapping[int, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any], Mapping[str, Any]], Metrics] = _nothing_more
    beside: tuple[str, ...] = ()
    title: str = ""
    paper: str = ""

    def __post_init__(self) -> None:
        if set(self.parts) != set(SCALES):
            raise ValueError(f"{self.name} needs parts at scales {', '.join(SCALES)}.")
        for scale, parts in self.parts.items():
            places = [(part.label, part.seed) for part in parts]
            if len(set(places)) < len(places):
                raise ValueError(f"{self.name} has a part twice at scale {scale}.")

    @property
    def others(self) -> list[str]:
        """Experiments whose results are needed to judge and to draw its own."""
        every = [*self.beside, *(name for claim in self.claims for name in claim.needs)]
        return list(dict.fromkeys(every))

    @property
    def counted(self) -> list[Claim]:
        """What its verdict is on: claims of the paper; ours where it goes beyond the paper."""
        theirs = [claim for claim in self.claims if not claim.ours]
        return theirs or [claim for claim in self.claims if claim.bounded and not claim.goal]

    def shows(self, revision: int) -> bool:
        """Whether results of that revision are still shown."""
        return revision == self.revision or revision in self.earlier

    def read(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Results with the numbers that follow from what is stored."""
        settings = {each["label"]: each["settings"] for each in record["config"]}
        parts = [
            {
                **part,
                "metrics": {
                    **part["metrics"],
                    **self.derived(part, settings.get(part["label"], {})),
                },
            }
            for part in record["parts"]
        ]
        return {**record, "parts": parts}

    def verdict(self, record: Mapping[str, Any]) -> str:
        """Whether its claims hold, all of them or half, of those that were measured.

        Results at scale smoke show that it runs, and nothing about claims.
        """
        if record["scale"] == "smoke":
            return "not judged (smoke)"
        found = [claim.verdict(record) for claim in self.counted]
        tested = [each for each in found if each is not None]
        verdict = overall(tested) or "not measured"
        if verdict == PARTLY or len(set(tested)) > 1:
            beside = [(PARTLY, "partly"), (UNDECIDED, UNDECIDED)]
            counted = ((tested.count(each), words) for each, words in beside)
            rest = "".join(f", {count} {words}" for count, words in counted if count)
            verdict += f" ({tested.count(HOLDS)} of {len(tested)} claims hold{rest})"
        if tested and len(tested) < len(found):
            verdict += f", {len(found) - len(tested)} of {len(found)} not tested"
        return verdict


def by_scale(make: Callable[[str], Iterable[Part]]) -> dict[str, Sequence[Part]]:
    """What is measured at each scale."""
    return {scale: tuple(make(scale)) for scale in SCALES}


def seeds(label: str, count: int, **settings: Any) -> tuple[Part, ...]:
    """The same part with seeds 0, 1, ..."""
    return tuple(Part(label, seed, settings) for seed in range(count))
