"""Classification."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from covary.estimators.base import MomentEstimator
from covary.moments import Moments
from covary.training import ClassificationLoss
from covary.uncertainty.calibration import LogitCalibration, fit_logits
from covary.uncertainty.scores import expected_softmax


class MomentClassifier(ClassifierMixin, MomentEstimator):  # type: ignore[misc]
    """Classification with an uncertainty that emerges from noise within the network.

    Trained on cross-entropy of the mean alone (SMUC).

    Attributes:
        classes_: the labels, in the order of the network's outputs.

    Examples:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> model = MomentClassifier(noise=0.1, epochs=20, random_state=0).fit(x, y)
        >>> model.predict_proba(x[:5]).shape, model.uncertainty(x[:5]).shape
        ((5, 3), (5,))
    """

    def fit(self, X: ArrayLike, y: ArrayLike) -> MomentClassifier:  # noqa: N803
        """Train on inputs (n, d) and labels (n,) of two or more classes."""
        x, target = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(target)
        self.classes_, labels = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "MomentClassifier needs labels of 2 classes or more, got 1 class: "
                f"{self.classes_[0]!r}."
            )
        y_labels = torch.tensor(labels)
        self._fit(torch.tensor(x), y_labels, len(self.classes_), labels)
        return self

    def predict(self, X: ArrayLike) -> NDArray[Any]:  # noqa: N803
        """(n,) the most probable label: that of the highest mean, or, calibrated, probability."""
        most_probable = self.predict_proba(X).argmax(-1)
        return cast("NDArray[Any]", self.classes_[most_probable])

    def predict_proba(
        self,
        X: ArrayLike,  # noqa: N803
        calibrated: bool | None = None,
    ) -> NDArray[np.float64]:
        """(n, classes) probabilities.

        Args:
            X: inputs (n, d).
            calibrated: if so, the softmax averaged over the calibrated Gaussian of the logits
                (``covary.uncertainty.scores.expected_softmax``); if not, the softmax of the mean,
                which does not look at the covariance. By default calibrated if there is a
                calibration.
        """
        wanted = self._calibrated(calibrated)
        outputs = self._outputs(X, wanted)
        return torch.cat([_probabilities(out, wanted) for out in outputs]).numpy()

    def uncertainty(
        self,
        X: ArrayLike,  # noqa: N803
        calibrated: bool | None = None,
    ) -> NDArray[np.float64]:
        """(n,) the entropy of the logits' covariance in nats; higher is less sure.

        A calibration adds the same to all.
        """
        return torch.cat([out.entropy() for out in self._outputs(X, calibrated)]).numpy()

    def _objective(self, net: nn.Module) -> nn.Module:
        return ClassificationLoss(net)

    def _scores(self, out: Moments, y: Tensor, *, calibrated: bool) -> Tensor:
        return F.nll_loss(-_probabilities(out, calibrated).log(), y, reduction="none")

    def _calibration(self, out: Moments, y: Tensor) -> LogitCalibration:
        return fit_logits(out, y)


def _probabilities(out: Moments, calibrated: bool) -> Tensor:
    return expected_softmax(out) if calibrated else out.mean.softmax(-1)
