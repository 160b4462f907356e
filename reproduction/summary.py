"""What holds, what does not and what is open, in a few lines: claims put together by topic."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from reproduction.experiment import FAILS, HOLDS, PARTLY, UNDECIDED, Claim, Experiment, overall
from reproduction.words import Judged, judged

UNTESTED = "not tested"


class Topic(NamedTuple):
    """Something that the paper says in several places.

    Attributes:
        says: it, in a few plain words.
        of: experiments, and the metrics of their claims that belong to it; of all if empty.
        shows: a claim by its experiment and metric, and words with a place for its number.
    """

    says: str
    of: Mapping[str, tuple[str, ...]]
    shows: tuple[str, str, str] | None = None


_CLASSIFIERS = (
    *("mnist-relu", "cifar10-relu", "mnist-lif", "shared-mnist", "shared-cifar10"),
    *("mnist-heaviside", "cifar10-heaviside"),
)


def _of_classifiers(*metrics: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(_CLASSIFIERS, metrics)


_SHORT = 60  # characters of a sentence that says little alone
# In the order of the paper; a claim belongs to the first that takes it. Experiments that none of
# them names are topics of their own.
TOPICS = (
    Topic(
        "Networks of moments are about as accurate as ordinary ones",
        _of_classifiers("accuracy"),
        ("mnist-relu", "accuracy", "by {:points} of accuracy on MNIST"),
    ),
    Topic(
        "Entropy is higher where the network errs",
        _of_classifiers("entropy_gap", "entropy_gap_last_hidden"),
        ("mnist-relu", "entropy_gap", "by {} nats on MNIST"),
    ),
    Topic(
        "Later layers tell errors better than earlier ones",
        _of_classifiers("separability_rise", "layers_fallen"),
        ("mnist-relu", "separability_rise", "separability rises by {} on MNIST"),
    ),
    Topic(
        "Through training, separability grows with accuracy",
        _of_classifiers("correlation", "r_squared_if_positive"),
        ("mnist-relu", "correlation", "correlation {} on MNIST"),
    ),
    Topic(
        "Entropy finds errors and strange inputs better than the softmax does",
        {
            "ood-notmnist": (),
            "shared-ood": tuple(
                f"separability_{pair}_entropy"
                for pair in ("wrong_right", "foreign_right", "foreign_wrong")
            ),
        },
        ("ood-notmnist", "separability_foreign_right_entropy", "for letters by {} in separability"),
    ),
    Topic(
        "Under attack accuracy falls and entropy rises; without its first noises it does not fall",
        {"fgsm": (), "shared-ood": ()},
        ("fgsm", "accuracy_attacked", "accuracy falls to {}"),
    ),
    Topic(
        "Error bars of regression are as good as published",
        {"uci": (), "uci-printed": (), "uci-shared": ()},
    ),
    Topic(
        "Entropy is high near the boundary between classes",
        {"mechanism": (), "sensitivity": ()},
    ),
    Topic(
        "Without correlations uncertainty is worse, on MNIST more than on CIFAR-10",
        {"correlation": (), "correlation-cifar10": ()},
        (
            "correlation",
            "separability_drop_of_layers",
            "separability falls by {} on MNIST, on average over layers",
        ),
    ),
    Topic(
        "Moments are those of the stochastic network in time, and means and covariances are enough",
        {"activations": (), "network-relu": (), "network-heaviside": (), "second-order": ()},
        ("network-relu", "covariance_error_ou-1", "error of the ReLU network's covariance: {}"),
    ),
    Topic(
        "Accuracy on images is as published",
        {"image-accuracy": (), "image-accuracy-shared": ()},
    ),
    Topic(
        "SMUC is Riemannian gradient descent, and its students learn moments (theorems 1 to 3)",
        {"theorem-1": (), "theorem-2": (), "theorem-3": (), "general-activations": ()},
    ),
    Topic("Covariances need no supervision (SMUC beside SMSC)", {"supervision": ()}),
)


class Told(NamedTuple):
    """A claim of the paper, where it is, and what came of it."""

    experiment: Experiment
    claim: Claim
    row: Judged


@dataclass(frozen=True)
class TopicLine:
    """A topic and what came of it.

    Attributes:
        says: the topic.
        verdict: on its claims together.
        told: its claims.
        shown: a number that stands for them, in words.
    """

    says: str
    verdict: str
    told: tuple[Told, ...]
    shown: str

    @property
    def counts(self) -> str:
        """How many of its claims hold, and what came of the others."""
        found = Counter(each.row.kind for each in self.told)
        kinds = {PARTLY: "partly", UNDECIDED: UNDECIDED, UNTESTED: UNTESTED}
        rest = [f"{found[kind]} {said}" for kind, said in kinds.items() if found[kind]]
        held = f"{found[HOLDS]} of {len(self.told)} claims hold"
        return "; ".join(filter(None, (held, ", ".join(rest), self.shown)))

    @property
    def experiments(self) -> list[str]:
        """The names of those that it is of."""
        return list(dict.fromkeys(each.experiment.name for each in self.told))

    @property
    def why(self) -> str:
        """The reason that is given for most of what does not hold; none if there is none.

        Its first sentence, or two if that is short: the table of claims has all of it.
        """
        for kind in (FAILS, PARTLY):
            found = Counter(row.why for _, _, row in self.told if row.kind == kind and row.why)
            if found:
                sentences = re.split(r"(?<=\.)\s+", found.most_common(1)[0][0])
                return " ".join(sentences[: 1 if len(sentences[0]) > _SHORT else 2])
        return ""


@dataclass(frozen=True)
class InShort:
    """Everything in short.

    Attributes:
        lines: all topics.
        counted: how many claims of the paper have each verdict.
        alone, quick: how many judged claims rest on one seed, and on less training or fewer
            networks than in the paper.
    """

    lines: tuple[TopicLine, ...]
    counted: Mapping[str, int]
    alone: int
    quick: int

    def of(self, *verdicts: str) -> list[TopicLine]:
        """Topics with one of these verdicts."""
        return [line for line in self.lines if line.verdict in verdicts]

    @property
    def open(self) -> list[Told]:
        """Claims that are not tested, or that noise leaves open."""
        every = [each for line in self.lines for each in line.told]
        return [each for each in every if each.row.kind in (UNDECIDED, UNTESTED)]


def told_of(experiment: Experiment, record: Mapping[str, Any] | None) -> list[Told]:
    """The paper's claims of an experiment; without results, or at scale smoke, not tested."""
    found = []
    for claim in experiment.claims:
        if claim.ours:
            continue
        if record is None or record["scale"] == "smoke":
            row = Judged(claim, claim.says, "", "", UNTESTED, "", "")
        else:
            row = judged(claim, record)
            if row.verdict == "not measured":
                row = Judged(claim, row.says, row.counts, row.ours, UNTESTED, "", "")
        found.append(Told(experiment, claim, row))
    return found


def summary(read: Iterable[tuple[Experiment, Mapping[str, Any] | None]]) -> InShort:
    """What came of all claims of the paper, by topic.

    Args:
        read: experiments with their results as ``reading.read`` gives them; None of none.
    """
    pairs = list(read)
    topics = [*TOPICS, *(Topic(each.title, {each.name: ()}) for each, _ in pairs)]
    by_topic: list[list[Told]] = [[] for _ in topics]
    for experiment, record in pairs:
        for told in told_of(experiment, record):
            place = next(i for i, topic in enumerate(topics) if _takes(topic, told))
            by_topic[place].append(told)
    records = {experiment.name: (experiment, record) for experiment, record in pairs}
    lines = tuple(
        TopicLine(topic.says, _together(told), tuple(told), _shown(topic, records))
        for topic, told in zip(topics, by_topic, strict=True)
        if told
    )
    every = [each.row for line in lines for each in line.told]
    tested = [row for row in every if row.kind != UNTESTED]
    return InShort(
        lines,
        Counter(row.kind for row in every),
        alone=sum("one seed" in row.rests.split(", ") for row in tested),
        quick=sum("quick" in row.rests.split(", ") for row in tested),
    )


def _takes(topic: Topic, told: Told) -> bool:
    metrics = topic.of.get(told.experiment.name)
    return metrics is not None and (not metrics or told.claim.metric in metrics)


def _together(told: Sequence[Told]) -> str:
    known = [each.row.kind for each in told if each.row.kind != UNTESTED]
    return overall(known) or UNTESTED


def _shown(topic: Topic, records: Mapping[str, tuple[Experiment, Mapping[str, Any] | None]]) -> str:
    """The number that stands for a topic: the average over parts."""
    if topic.shows is None:
        return ""
    name, metric, words = topic.shows
    experiment, record = records.get(name, (None, None))
    if experiment is None or record is None:
        return ""
    for claim in experiment.claims:
        if claim.metric == metric and not claim.ours:
            known = [value for value in claim.values(record) if value is not None]
            if known:
                return words.format(_Shown(statistics.fmean(known)))
    return ""


class _Shown(float):
    """A number in two digits, or as points of a hundred with their sign."""

    def __format__(self, spec: str) -> str:
        return f"{100 * float(self):+.2f} points" if spec == "points" else f"{float(self):.2g}"
