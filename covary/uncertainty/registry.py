"""What a score and a metric are, and the words for each: terminal, page and docs take them here.

The entries stand where the functions are: ``scores.SCORES`` and ``metrics.METRICS``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from torch import Tensor

from covary.moments import Moments

Needs = Literal["covariance", "mean", "mean and covariance", "held-out data"]


@dataclass(frozen=True)
class Score:
    """One number per sample, higher where the network is less sure.

    Attributes:
        name: in results, ``max_softmax``.
        meaning: what it is, as the rest of the sentence "The score is ...".
        needs: what it looks at. Scores of the covariance alone serve regression too; those that
            need a mean take outputs for logits of classes; the fitted ones need held-out data.
        of: moments (B, n) -> (B,); None if it has to be fitted first.
        formula: in LaTeX; what its symbols are says docs/uncertainty.md.
        title: for a reader; by default the name in words.
    """

    name: str
    meaning: str
    needs: Needs
    of: Callable[..., Tensor] | None = None
    formula: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        if not self.title:
            object.__setattr__(self, "title", self.name.replace("_", " "))

    def __call__(self, moments: Moments) -> Tensor:
        """(B,) the score of each sample."""
        if self.of is None:
            raise TypeError(
                f"The score {self.name} is fitted to held-out data first: "
                "covary.uncertainty.fit(net, held_out)."
            )
        return self.of(moments)


@dataclass(frozen=True)
class Metric:
    """One number per data set: how good predictions or scores are.

    Attributes:
        name: in results, ``brier``.
        title: for a reader.
        best: ``"higher"``, ``"lower"``, the value that it should have (``"90%"``), or ``""``.
        needs: ``"probabilities"`` (n, classes) and labels (n,), ``"moments"`` (means, covariances
            and targets), or ``"scores"`` of samples of two groups.
        of: computes it, from what it needs; None where that takes more, such as a score.
        meaning: what it is, in a sentence or two.
        short: for a column of a narrow table; by default the title.
        is_share: whether it is shown as a percentage.
    """

    name: str
    title: str
    best: str = ""
    needs: Literal["probabilities", "moments", "scores"] = "scores"
    of: Callable[..., float] | None = None
    _: KW_ONLY
    meaning: str
    short: str = ""
    is_share: bool = False

    def __post_init__(self) -> None:
        if not self.short:
            object.__setattr__(self, "short", self.title)
