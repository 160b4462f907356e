"""The estimators: regression and classification."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data
from torch import Tensor

from covary.estimators.base import MomentEstimator
from covary.moments import Moments
from covary.training import ClassificationLoss, RegressionLoss
from covary.uncertainty.calibration import fit_logits, fit_variance
from covary.uncertainty.scores import expected_softmax

Floats = NDArray[np.float64]


class MomentRegressor(RegressorMixin, MomentEstimator):  # type: ignore[misc]
    """Regression that says how sure it is, of one target or several.

    Trained on squared error alone; the standard deviations are what noise within the network makes
    of its input (SMUC), not a fit to the spread of the residuals. ``calibrate`` fits two numbers to
    that spread, ``scale * variance + offset``, which makes them comparable to errors. Put a
    conformal method on top where intervals must cover.

    Examples:
        >>> from sklearn.datasets import make_regression
        >>> x, y = make_regression(60, 3, random_state=0)
        >>> model = MomentRegressor(noise=0.1, epochs=20, random_state=0).fit(x, y)
        >>> mean, std = model.predict(x[:5], return_std=True)
        >>> mean.shape, std.shape
        ((5,), (5,))
    """

    _objective, _calibration = RegressionLoss, staticmethod(fit_variance)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike, *, X_std: ArrayLike | None = None) -> MomentRegressor:
        """Train on inputs (n, d) and targets (n,) or (n, t).

        ``X_std`` are standard deviations of the errors of the inputs, (d,) or (n, d), in their
        units. With ``covariance="shared"`` they are averaged over a mini-batch in training; choose
        ``"full"`` where rows differ much.
        """
        x, target = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        self._one_dimensional = target.ndim == 1
        columns = torch.tensor(target.reshape(len(x), -1), dtype=torch.float64)
        self._fit(torch.tensor(x), columns, X_std, columns.shape[1], None)
        return self

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
        return_cov: bool = False,
        calibrated: bool | None = None,
        *,
        X_std: ArrayLike | None = None,
    ) -> Any:
        """Means, and if wanted a measure of how sure they are, on the scale of the targets.

        Args:
            X: inputs (n, d).
            return_std: give standard deviations too.
            return_cov: give covariances too.
            calibrated: with the calibration or without; by default with it if there is one. The
                mean is the same.
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.

        Returns:
            The mean, (n,) or (n, t) as the targets were; or the mean and its standard deviation,
            of the same shape; or the mean and the covariance of a sample's targets, (n, t, t).
        """
        if return_std and return_cov:
            raise ValueError("predict gives a standard deviation or a covariance, not both.")
        if return_cov:
            out = self.moments(X, calibrated, X_std=X_std)
            return self._shaped(out.mean), out.covariance_matrix.numpy()
        parts = [(out.mean, out.stddev) for out in self._outputs(X, calibrated, X_std)]
        mean, std = (self._shaped(torch.cat(part)) for part in zip(*parts, strict=True))
        return (mean, std) if return_std else mean

    def uncertainty(
        self, X: ArrayLike, calibrated: bool | None = None, *, X_std: ArrayLike | None = None
    ) -> Floats:
        """(n,) higher is less sure: the standard deviation, or the entropy of several targets."""
        scores = [
            out.stddev[:, 0] if out.mean.shape[-1] == 1 else out.entropy()
            for out in self._outputs(X, calibrated, X_std)
        ]
        return torch.cat(scores).numpy()

    def _shaped(self, values: Tensor) -> Floats:
        return values.numpy()[:, 0] if self._one_dimensional else values.numpy()

    def _scores(self, out: Moments, y: Tensor, *, calibrated: bool) -> Tensor:
        # A variance of 0, which a network without live units has, must not win by a lucky hit.
        least = 1e-8 * y.var(0, correction=0)
        var = torch.maximum(out.variance, torch.where(least > 0, least, 1e-8))
        densities = -0.5 * ((out.mean - y).square() / var + var.log() + math.log(2 * math.pi))
        return densities.mean(-1)


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

    _objective, _calibration = ClassificationLoss, staticmethod(fit_logits)

    def fit(
        self, X: ArrayLike, y: ArrayLike, *, X_std: ArrayLike | None = None
    ) -> MomentClassifier:
        """Train on inputs (n, d) and labels (n,) of two or more classes.

        ``X_std`` are standard deviations of the errors of the inputs, (d,) or (n, d), in their
        units. With ``covariance="shared"`` they are averaged over a mini-batch in training; choose
        ``"full"`` where rows differ much.
        """
        x, target = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(target)
        self.classes_, labels = np.unique(target, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                "MomentClassifier needs labels of 2 classes or more, got 1 class: "
                f"{self.classes_[0]!r}."
            )
        self._fit(torch.tensor(x), torch.tensor(labels), X_std, len(self.classes_), labels)
        return self

    def predict(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> NDArray[Any]:
        """(n,) the most probable label: that of the highest mean, or, calibrated, probability."""
        most_probable = self.predict_proba(X, X_std=X_std).argmax(-1)
        return cast("NDArray[Any]", self.classes_[most_probable])

    def predict_proba(
        self, X: ArrayLike, calibrated: bool | None = None, *, X_std: ArrayLike | None = None
    ) -> Floats:
        """(n, classes) probabilities.

        Args:
            X: inputs (n, d).
            calibrated: if so, the softmax averaged over the calibrated Gaussian of the logits
                (``covary.uncertainty.scores.expected_softmax``); if not, the softmax of the mean,
                which does not look at the covariance. By default calibrated if there is a
                calibration.
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        wanted = self._calibrated(calibrated)
        outputs = self._outputs(X, wanted, X_std)
        return torch.cat([_probabilities(out, wanted) for out in outputs]).numpy()

    def uncertainty(
        self, X: ArrayLike, calibrated: bool | None = None, *, X_std: ArrayLike | None = None
    ) -> Floats:
        """(n,) the entropy of the logits' covariance in nats; higher is less sure.

        A calibration adds the same to all.
        """
        return torch.cat([out.entropy() for out in self._outputs(X, calibrated, X_std)]).numpy()

    def _scores(self, out: Moments, y: Tensor, *, calibrated: bool) -> Tensor:
        return F.nll_loss(-_probabilities(out, calibrated).log(), y, reduction="none")


def _probabilities(out: Moments, calibrated: bool) -> Tensor:
    return expected_softmax(out) if calibrated else out.mean.softmax(-1)
