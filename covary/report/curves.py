"""What a network would answer, and how well, if it refused the inputs it is most unsure of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from covary.report.reading import Part, Results
from covary.runs.predictions import Array
from covary.uncertainty import metrics

POINTS = 500  # of a curve; more cannot be told apart on a screen


@dataclass(frozen=True, eq=False)
class Curve:
    """Answering every input whose score is at most ``threshold``, for rising thresholds.

    Arrays have one entry for each threshold (m <= 500); the last threshold answers everything.
    """

    key: str
    label: str  # of the score
    rule: str  # what the threshold is compared with
    threshold: Array
    answered: Array  # inputs answered
    loss: Array  # summed over the answered: errors, or squared errors
    foreign: tuple[Array, ...]  # answered inputs of each foreign set

    @property
    def samples(self) -> int:
        """All inputs, answered or not."""
        return int(self.answered[-1])

    @property
    def coverage(self) -> Array:
        """(m,) the part of the inputs that is answered."""
        return np.asarray(self.answered / self.samples)

    @property
    def risk(self) -> Array:
        """(m,) mean loss of the answered inputs."""
        return np.asarray(self.loss / self.answered)


def curves(results: Results) -> list[Curve]:
    """One curve for each score: entropy, max-softmax, fitted; or each target's stddev."""
    test = results.test
    if results.is_classification:
        wrong = ~test.right
        found = [
            _curve("entropy", "Entropy", "entropy", results, lambda part: part.entropy, wrong),
            _curve("max-softmax", "Max-softmax", "doubt", results, lambda part: part.doubt, wrong),
        ]
        if all(part.fitted is not None for part in results.parts.values()):
            found.append(_curve("fitted", "Fitted score", "score", results, _fitted, wrong))
        return found
    return [
        _curve(
            f"stddev-{column}",
            results.target_name(column),
            "stddev",
            results,
            partial(_stddev, column=column),
            test.error[:, column] ** 2,
        )
        for column in range(test.mean.shape[1])
    ]


def _fitted(part: Part) -> Array:
    assert part.fitted is not None
    return part.fitted


def _stddev(part: Part, *, column: int) -> Array:
    return np.asarray(part.stddev[:, column])


def _curve(
    key: str,
    label: str,
    rule: str,
    results: Results,
    score_of: Callable[[Part], Array],
    loss: Array,
) -> Curve:
    def score(part: Part) -> Array:
        # What has no score is refused first.
        own = np.asarray(score_of(part), dtype=float)
        return np.where(np.isnan(own), np.inf, own)

    ordered, _, risk = metrics.risk_coverage(score(results.test), loss)
    answered = np.arange(1, len(ordered) + 1)
    # A threshold cannot tell equal scores apart: the last of them stands for all.
    kept = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    if len(kept) > POINTS:
        kept = kept[np.unique(np.linspace(0, len(kept) - 1, POINTS).round().astype(int))]
    total = risk[kept] * answered[kept]
    return Curve(
        key=key,
        label=label,
        rule=rule,
        threshold=ordered[kept],
        answered=answered[kept],
        loss=total.round().astype(int) if loss.dtype == bool else total,
        foreign=tuple(
            np.searchsorted(np.sort(score(part)), ordered[kept], side="right")
            for part in results.foreign
        ),
    )
