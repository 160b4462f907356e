"""What a network would answer, and how well, if it refused the inputs it is most unsure of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from covary.report.reading import Part, Results
from covary.runs.predictions import Array
from covary.uncertainty import metrics
from covary.uncertainty.scores import about

POINTS = 500  # of a curve; more cannot be told apart on a screen
_OWN_TITLES = {"calibrated": "calibrated probability", "stddev": "standard deviation"}


@dataclass(frozen=True, eq=False)
class Curve:
    """Answering every input whose score is at most ``threshold``, for rising thresholds.

    Arrays have one entry for each threshold (m <= 501); the last threshold answers everything.
    """

    score: str
    label: str
    target: int  # of a regression, whose errors are summed
    threshold: Array
    answered: Array  # inputs answered
    loss: Array  # summed over the answered: errors, or squared errors
    ood: tuple[Array, ...]  # answered inputs of each out-of-distribution set
    recommended: float | None  # threshold that held-out inputs gave

    @property
    def coverage(self) -> Array:
        """(m,) the part of the inputs that is answered."""
        return np.asarray(self.answered / self.answered[-1])

    @property
    def risk(self) -> Array:
        """(m,) error rate of the answered inputs, or their RMSE."""
        mean = self.loss / self.answered
        return np.asarray(mean if self.loss.dtype.kind == "i" else np.sqrt(mean))

    def to_json(self) -> dict[str, Any]:
        """As page.js draws it; JSON knows no infinity, which becomes null."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, np.ndarray):
        return [each if np.isfinite(each) else None for each in value.tolist()]
    return value


def curves(results: Results) -> list[Curve]:
    """A curve for each score that all parts have, of each target in turn."""
    found = []
    for target in range(results.targets):
        scores = {part.name: _scores(results, part, target) for part in results.parts.values()}
        loss = ~results.test.right
        if not results.is_classification:
            loss = results.test.calibrated.error[:, target] ** 2
        for name, own in scores["test"].items():
            if all(name in each for each in scores.values()):
                ood = [scores[part.name][name] for part in results.ood]
                found.append(_curve(results, name, target, own, loss, ood))
    return found


def _scores(results: Results, part: Part, target: int) -> dict[str, Array]:
    """The calibrated score first, then entropy and the others, by name."""
    if not results.is_classification:
        own = {"stddev": part.calibrated.stddev[:, target], "entropy": part.entropy}
    else:
        own = {"calibrated": part.calibrated.doubt} if results.is_calibrated else {}
        own |= {"entropy": part.entropy, "max_softmax": part.doubt}
    # What has no score is refused first.
    every = own | dict(part.scores)
    return {name: np.where(np.isnan(x), np.inf, x).astype(float) for name, x in every.items()}


def _curve(
    results: Results, name: str, target: int, score: Array, loss: Array, ood: list[Array]
) -> Curve:
    ordered, _, risk = metrics.risk_coverage(score, loss)
    answered = np.arange(1, len(ordered) + 1)
    # A threshold cannot tell equal scores apart: the last of them stands for all.
    kept = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    recommended = results.threshold(name, target)
    if len(kept) > POINTS:
        chosen = set(np.linspace(0, len(kept) - 1, POINTS).round().astype(int).tolist())
        if recommended is not None:
            chosen.add(max(0, int((ordered[kept] <= recommended).sum()) - 1))
        kept = kept[sorted(chosen)]
    total = risk[kept] * answered[kept]
    title = _OWN_TITLES.get(name, about(name).title)
    return Curve(
        score=name,
        label=title,
        target=target,
        threshold=ordered[kept],
        answered=answered[kept],
        loss=total.round().astype(int) if loss.dtype == bool else total,
        ood=tuple(np.searchsorted(np.sort(own), ordered[kept], side="right") for own in ood),
        recommended=recommended,
    )
