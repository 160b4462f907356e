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
        """(n,) the label of the highest mean."""
        highest = self._mean(X).argmax(-1).numpy()
        return cast("NDArray[Any]", self.classes_[highest])

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """(n, classes) the softmax of the mean, which does not look at the covariance."""
        return self._mean(X).softmax(-1).numpy()

    def uncertainty(self, X: ArrayLike) -> NDArray[np.float64]:  # noqa: N803
        """(n,) the entropy of the logits' covariance in nats; higher is less sure."""
        return torch.cat([out.entropy() for out in self._outputs(X)]).numpy()

    def _objective(self, net: nn.Module) -> nn.Module:
        return ClassificationLoss(net)

    def _scores(self, out: Moments, y: Tensor) -> Tensor:
        return -F.cross_entropy(out.mean, y, reduction="none")
