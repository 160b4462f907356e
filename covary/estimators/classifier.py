"""MomentClassifier: calibrated probabilities, prediction sets, and when to ask someone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from torch import Tensor

from covary.covariance import Full
from covary.estimators.base import Floats, MomentEstimator
from covary.estimators.members import Outputs
from covary.moments import Moments
from covary.training import ClassificationLoss
from covary.uncertainty import metrics, scores
from covary.uncertainty.answering import prediction_sets, threshold_of_risk, with_doubt
from covary.uncertainty.calibration import fit_logits

# What ``uncertainty`` may be, by name: scores of ``covary.uncertainty.scores``.
ERROR_SCORES: dict[str, Callable[[Moments], Tensor]] = {
    score.__name__: score for score in (scores.expected_max, scores.max_softmax, scores.entropy)
}
# Fewer held-out errors do not say which score finds errors best.
_LEAST_ERRORS = 10


class MomentClassifier(ClassifierMixin, MomentEstimator):  # type: ignore[misc]
    """Classification with calibrated probabilities, and an uncertainty that finds its errors.

    Networks are trained on cross-entropy of the mean alone (SMUC). Temperature and size of their
    covariance are fitted to rows that they have not seen. Off the training data logits are smaller
    and doubted, so that probabilities come closer to each other the farther a row is away. The
    parameters are those of ``MomentRegressor``, but for ``variance`` and ``distribution``.

    Attributes:
        classes_: the labels, in the order of the network's outputs.
        calibration_: the layer that calibrates logits, ``covary.uncertainty.calibration``.
        score_: the name of the score that ``uncertainty`` gives: of
            ``covary.estimators.ERROR_SCORES`` the one that finds most errors of held-out rows.
        score_aurocs_: of each score, how well it finds them (area under the ROC curve).

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> model = MomentClassifier("quick", epochs=5, random_state=0).fit(x, y)
        >>> model.predict_proba(x[:5]).shape, model.predict_set(x[:5], level=0.9).shape
        ((5, 3), (5, 3))
    """

    _objective = ClassificationLoss

    @staticmethod
    def _loss(mean: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(mean, y)

    def fit(
        self, X: ArrayLike, y: ArrayLike, *, X_std: ArrayLike | None = None
    ) -> MomentClassifier:
        """Train on inputs (n, d) and labels (n,) of two or more classes.

        ``X_std`` are standard deviations of the errors of the inputs, (d,) or (n, d), in their
        units. With ``covariance="shared"`` they are averaged over a mini-batch in training; choose
        ``"full"`` where rows differ much.
        """
        x, target = self._validated(X, _as_labels(y))
        check_classification_targets(target)
        self.classes_, labels = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "MomentClassifier needs labels of 2 classes or more, got 1 class: "
                f"{self.classes_[0]!r}."
            )
        truth = torch.tensor(labels)
        trained, _ = self._train(torch.tensor(x), truth, X_std, len(self.classes_), labels)
        truth = truth[trained.rows]
        out = _logits(trained.held_out)
        self.calibration_ = fit_logits(out, truth)
        out = self.calibration_(out)
        self._variance = out.mean.var(0, correction=0).mean()
        self._choose_score(out, truth)
        chance = scores.expected_softmax(out).gather(1, truth[:, None])[:, 0]
        self._strange = np.sort(1 - chance.numpy())
        self.n_iter_ = len(self.history_)
        return self

    def _choose_score(self, out: Moments, truth: Tensor) -> None:
        """Which score finds errors of held-out rows best, and what it is for them."""
        predicted = scores.expected_softmax(out).argmax(-1)
        wrong = (predicted != truth).numpy()
        values = {name: score(out).double().numpy() for name, score in ERROR_SCORES.items()}
        self.score_aurocs_ = {}
        self.score_ = next(iter(ERROR_SCORES))
        if _LEAST_ERRORS <= wrong.sum() < len(wrong):
            self.score_aurocs_ = {
                name: metrics.auroc(value[wrong], value[~wrong]) for name, value in values.items()
            }
            self.score_ = max(self.score_aurocs_, key=self.score_aurocs_.__getitem__)
        self._held_out = values[self.score_], wrong

    def moments(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Moments:
        """Mean and covariance (n, classes) of the calibrated logits, in double precision."""
        x, is_strange = self._inputs(X)
        out: Moments = self.calibration_(
            _logits(self.network_.outputs(self._with_errors(x, X_std)))
        )
        return with_doubt(out, self._novelty(x, is_strange), self._variance)

    def predict(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> NDArray[Any]:
        """(n,) the most probable label."""
        most_probable = self.predict_proba(X, X_std=X_std).argmax(-1)
        return cast("NDArray[Any]", self.classes_[most_probable])

    def predict_proba(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Floats:
        """(n, classes) probabilities: the softmax averaged over the Gaussian of the logits.

        Args:
            X: inputs (n, d).
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        return cast(Floats, scores.expected_softmax(self.moments(X, X_std=X_std)).numpy())

    def predict_set(
        self, X: ArrayLike, level: float = 0.9, *, X_std: ArrayLike | None = None
    ) -> NDArray[np.bool_]:
        """(n, classes) which classes to reckon with, so that this share of rows has its own.

        Cross-conformal: a class belongs to the set if held-out rows of as low a probability for
        their own class are more than a share 1 - level. The most probable class always does.
        """
        return prediction_sets(self.predict_proba(X, X_std=X_std), self._strange, level)

    def uncertainty(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Floats:
        """(n,) higher is less sure: the score ``score_``, which held-out rows chose."""
        return cast(
            Floats, ERROR_SCORES[self.score_](self.moments(X, X_std=X_std)).double().numpy()
        )

    def threshold(self, *, risk: float) -> float:
        """The uncertainty up to which rows may be answered with at most this share of errors.

        As held-out rows have it: as many of them as possible are below, and at most this share of
        those is wrong. Minus infinity where no threshold keeps the risk.
        """
        return threshold_of_risk(*self._held_out, risk)

    def decide(
        self, X: ArrayLike, costs: ArrayLike, *, ask: float, X_std: ArrayLike | None = None
    ) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """(n,) the labels of the least expected cost, and (n,) whether asking someone costs less.

        Args:
            X: inputs (n, d).
            costs: (classes, classes) of predicting the second where the first is true.
            ask: the cost of asking someone.
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        matrix = np.asarray(costs, dtype=np.float64)
        k = len(self.classes_)
        if matrix.shape != (k, k) or not np.isfinite(matrix).all():
            raise ValueError(f"costs are ({k}, {k}) finite numbers, got shape {matrix.shape}.")
        expected = self.predict_proba(X, X_std=X_std) @ matrix
        return self.classes_[expected.argmin(-1)], expected.min(-1) > ask


def _as_labels(y: Any) -> Any:
    """Truth values and whole numbers that pandas keeps in a type of its own, as those of numpy.

    scikit-learn would make floating point numbers of them. All else, and what has missing values,
    stays as it is.
    """
    dtype = getattr(y, "dtype", None)
    if isinstance(y, np.ndarray) or dtype is None or not hasattr(y, "tolist"):
        return y
    try:
        found = np.array(y.tolist())
    except ValueError:
        return y
    return found if found.ndim == 1 and found.dtype.kind in "biu" else y


def _logits(found: Outputs) -> Moments:
    """Moments of logits, before their calibration."""
    return Moments(found.mean, Full(found.emergent + found.errors + found.spread))
