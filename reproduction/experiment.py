"""What an experiment is: a row that says what to measure, and what the paper claims of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reproduction.workshop import Workshop

SCALES = ("smoke", "quick", "paper")
# How many, where nothing else asks for more or fewer.
SEEDS = {"smoke": 1, "quick": 1, "paper": 3}
HOLDS, PARTLY, FAILS = "holds", "holds partly", "does not hold"


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

    metrics: Mapping[str, float | None]
    series: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says about a number, and when we take that to hold.

    Attributes:
        says: the claim, in a sentence.
        metric: the number's name in ``Measured.metrics``.
        minus: what is taken off it: another of those numbers, by name; of several, the largest;
            or one for each label.
        label: of which parts, or labels of which; of all of them if empty.
        instead: label of a part -> label of one that stands in for it until it is measured.
        published: the number as printed, with what the paper compares it with; empty if it has
            none.
        least, most: bounds within which a measured number is in accord with the claim.
        majority: it is about most parts and not about each; it holds if more than half agree, and
            else does not.
        why: what is known of the reason, where a claim does not hold.
        untested: by scale, why what is measured there cannot decide it. It is shown, not judged.
        ours: the paper does not say this, or not so; shown beside its claims, but not counted. It
            may be without bounds.
        goal: what we set out to reach by means of our own. To miss it says nothing of the paper.
    """

    says: str
    metric: str
    minus: str | tuple[str, ...] | Mapping[str, float] = ""
    label: str | tuple[str, ...] = ""
    instead: Mapping[str, str] = field(default_factory=dict)
    published: str = ""
    least: float | None = None
    most: float | None = None
    majority: bool = False
    why: str = ""
    untested: Mapping[str, str] = field(default_factory=dict)
    ours: bool = False
    goal: bool = False

    def __post_init__(self) -> None:
        if self.least is None and self.most is None and not self.ours:
            raise ValueError(f"A claim needs a bound that it can fail by: {self.says}")

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the parts that it is about; none if of all of them."""
        if isinstance(self.label, str):
            return (self.label,) if self.label else ()
        return self.label

    def agrees(self, value: float | None) -> bool:
        """Whether one measured number is in accord with the claim; an undefined one is not."""
        if value is None or value != value:
            return False
        above = self.least is None or value >= self.least
        return above and (self.most is None or value <= self.most)

    def values(self, parts: Sequence[Mapping[str, Any]]) -> list[float | None]:
        """Its number in each of the parts that it is about, as they are stored."""
        measured = {part["label"] for part in parts}
        replaced = {self.instead[label] for label in measured & set(self.instead)}
        return [
            self._value(part)
            for part in parts
            if self.metric in part["metrics"]
            and (not self.labels or part["label"] in self.labels)
            and part["label"] not in replaced
        ]

    def _value(self, part: Mapping[str, Any]) -> float | None:
        value: float | None = part["metrics"][self.metric]
        if not self.minus:
            return value
        if isinstance(self.minus, str):
            off: float | None = part["metrics"].get(self.minus)
        elif isinstance(self.minus, tuple):
            known = [each for name in self.minus if (each := part["metrics"].get(name)) is not None]
            off = max(known) if len(known) == len(self.minus) else None
        else:
            off = self.minus.get(part["label"])
        return None if value is None or off is None else value - off

    def agreeing(self, parts: Sequence[Mapping[str, Any]]) -> int:
        """In how many of the parts it holds."""
        return sum(self.agrees(value) for value in self.values(parts))

    def verdict(self, record: Mapping[str, Any]) -> str | None:
        """Whether it holds: in all parts, or partly, in half of them; None if it is not tested."""
        count = len(self.values(record["parts"]))
        bounded = self.least is not None or self.most is not None
        if not count or not bounded or record["scale"] in self.untested:
            return None
        share = self.agreeing(record["parts"]) / count
        if self.majority:
            return HOLDS if share > 1 / 2 else FAILS
        return HOLDS if share == 1 else PARTLY if share >= 1 / 2 else FAILS


def overall(verdicts: Sequence[str]) -> str | None:
    """The verdict on several together, by the rule for parts of a claim; None of none.

    It holds if all do, and partly if at least half do, where one that holds partly is half of one.
    """
    if not verdicts:
        return None
    share = (verdicts.count(HOLDS) + verdicts.count(PARTLY) / 2) / len(verdicts)
    return HOLDS if share == 1 else PARTLY if share >= 1 / 2 else FAILS


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
        title, paper: what the page calls it, and where it is in the paper: by the catalogue.
    """

    name: str
    about: str
    measure: Callable[[Part, Workshop], Measured]
    parts: Mapping[str, Sequence[Part]]
    claims: Sequence[Claim]
    proviso: str = ""
    revision: int = 0
    title: str = ""
    paper: str = ""

    def __post_init__(self) -> None:
        if set(self.parts) != set(SCALES):
            raise ValueError(f"{self.name} needs parts at scales {', '.join(SCALES)}.")
        for scale, parts in self.parts.items():
            places = [(part.label, part.seed) for part in parts]
            if len(set(places)) < len(places):
                raise ValueError(f"{self.name} has a part twice at scale {scale}.")

    def verdict(self, record: Mapping[str, Any]) -> str:
        """Whether its claims hold, all of them or half, of those that were measured.

        Results at scale smoke show that it runs, and nothing about claims.
        """
        if record["scale"] == "smoke":
            return "not judged (smoke)"
        claims = [claim for claim in self.claims if not claim.ours]
        found = [claim.verdict(record) for claim in claims]
        known = [each for each in found if each is not None]
        verdict = overall(known) or "not measured"
        if verdict == PARTLY or len(set(known)) > 1:
            partly = known.count(PARTLY)
            some = f", {partly} partly" if partly else ""
            verdict += f" ({known.count(HOLDS)} of {len(known)} claims hold{some})"
        if known and len(known) < len(found):
            verdict += f", {len(found) - len(known)} of {len(found)} not tested"
        return verdict


def by_scale(make: Callable[[str], Iterable[Part]]) -> dict[str, Sequence[Part]]:
    """What is measured at each scale."""
    return {scale: tuple(make(scale)) for scale in SCALES}


def seeds(label: str, count: int, **settings: Any) -> tuple[Part, ...]:
    """The same part with seeds 0, 1, ..."""
    return tuple(Part(label, seed, settings) for seed in range(count))
