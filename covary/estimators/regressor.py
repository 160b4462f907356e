"""Regression."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor, nn

from covary.estimators.base import MomentEstimator
from covary.moments import Moments
from covary.training import RegressionLoss
from covary.uncertainty.calibration import VarianceCalibration, fit_variance


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

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: ArrayLike, y: ArrayLike) -> MomentRegressor:  # noqa: N803
        """Train on inputs (n, d) and targets (n,) or (n, t)."""
        x, target = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        self._one_dimensional = target.ndim == 1
        columns = torch.tensor(target.reshape(len(x), -1), dtype=torch.float64)
        self._fit(torch.tensor(x), columns, columns.shape[1], None)
        return self

    def predict(
        self,
        X: ArrayLike,  # noqa: N803
        return_std: bool = False,
        return_cov: bool = False,
        calibrated: bool | None = None,
    ) -> Any:
        """Means, and if wanted a measure of how sure they are, in the units of the targets.

        Args:
            X: inputs (n, d).
            return_std: give standard deviations too.
            return_cov: give covariances too.
            calibrated: with the calibration or without; by default with it if there is one. The
                mean is the same.

        Returns:
            The mean, (n,) or (n, t) as the targets were; or the mean and its standard deviation,
            of the same shape; or the mean and the covariance of a sample's targets, (n, t, t).
        """
        if return_std and return_cov:
            raise ValueError("predict gives a standard deviation or a covariance, not both.")
        if return_cov:
            out = self.moments(X, calibrated)
            return self._shaped(out.mean), out.covariance_matrix.numpy()
        parts = [(out.mean, out.stddev) for out in self._outputs(X, calibrated)]
        mean, std = (torch.cat(part) for part in zip(*parts, strict=True))
        return (self._shaped(mean), self._shaped(std)) if return_std else self._shaped(mean)

    def uncertainty(
        self,
        X: ArrayLike,  # noqa: N803
        calibrated: bool | None = None,
    ) -> NDArray[np.float64]:
        """(n,) higher is less sure: the standard deviation, or the entropy of several targets."""
        scores = [
            out.stddev[:, 0] if out.mean.shape[-1] == 1 else out.entropy()
            for out in self._outputs(X, calibrated)
        ]
        return torch.cat(scores).numpy()

    def _shaped(self, values: Tensor) -> NDArray[np.float64]:
        return values.numpy()[:, 0] if self._one_dimensional else values.numpy()

    def _objective(self, net: nn.Module) -> nn.Module:
        return RegressionLoss(net)

    def _scores(self, out: Moments, y: Tensor, *, calibrated: bool) -> Tensor:
        # A variance of 0, which a network without live units has, must not win by a lucky hit.
        least = 1e-8 * y.var(0, correction=0)
        var = torch.maximum(out.variance, torch.where(least > 0, least, 1e-8))
        densities = -0.5 * ((out.mean - y).square() / var + var.log() + math.log(2 * math.pi))
        return densities.mean(-1)

    def _calibration(self, out: Moments, y: Tensor) -> VarianceCalibration:
        return fit_variance(out, y)
