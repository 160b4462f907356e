"""MomentRegressor: means, and distributions of what will be observed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import RegressorMixin
from torch import Tensor

from covary.activations import MomentActivation
from covary.budget import Budget
from covary.covariance import Full
from covary.estimators.base import Effort, Floats, MomentEstimator
from covary.estimators.data import level_of_user
from covary.estimators.members import Architecture, Outputs, TrainedMembers, TrainingTable
from covary.estimators.neighbours import MOST_REFERENCES, Local, Neighbours, shares
from covary.moments import Moments
from covary.training import GaussianLikelihood, RegressionLoss, TrainingConfig
from covary.training.objectives import LOSSES
from covary.uncertainty.predictive import Predictive
from covary.uncertainty.residuals import (
    FAMILIES,
    LEAST_ROWS,
    PARTS,
    Evidence,
    Scales,
    VariancePart,
    correlation_of,
    distributions,
    fit_residuals,
)

VARIANCES = ("learned", "emergent")
# Of the likelihood. Weight decay would make variances small, as they come through weights. To learn
# a variance takes more steps than to learn a mean, but many epochs learn the rows by heart.
_LIKELIHOOD_NOISE, _LIKELIHOOD_STEPS, _LIKELIHOOD_EPOCHS = 0.2, 2, 80
# Of the neighbours' average residual, what is right of it at least for there to be neighbours.
_LEAST_NEIGHBOUR_SHARE = 0.2
# Parts of a variance that are less than this on average are said to be thrown away.
_LEAST_SHARE = 0.01


class MomentRegressor(RegressorMixin, MomentEstimator):  # type: ignore[misc]
    """Regression with a distribution for each row, of one target or several.

    Networks are trained on squared error alone (SMUC), or by the likelihood (SMSC). The variance of
    a prediction adds what emerges within the networks, how much they differ, and a learned function
    of the inputs, all fitted to residuals of rows that the networks have not seen; far from the
    training data it grows with the distance (docs/table.md).

    Args:
        effort: ``"quick"``, ``"default"`` or ``"thorough"``: how much is trained
            (``covary.estimators.EFFORTS``); single choices are made by the other arguments.
        variance: ``"learned"``, or ``"emergent"`` for the variance that emerges in the networks
            alone, times one number and plus another, both fitted to the same residuals.
        loss: of each network: ``"mean"``, the squared error of its mean; or ``"likelihood"``, the
            Gaussian one of the targets, which trains the covariance that emerges too (SMSC).
        distribution: ``"normal"``, ``"student"``, ``"mixture"`` (of several modes), or ``"auto"``
            for that under which held-out rows are likeliest. Of fewer than 40 rows there is no
            mixture, of fewer than 10 it is normal.
        neighbours: training rows that are looked at near a new one. Their residuals correct means
            as far as that helped held-out rows (``neighbour_shares_``), and the learned variance
            sees them; not at all if that is less than a fifth of what they say. 0 for networks
            alone. With ``variance="emergent"``, and of fewer than 10 rows, there are none.
        resolution: the least step between targets that are rounded, as 1 for whole numbers.
            Variances are at least ``resolution**2 / 12``, so that no density grows without end at
            the values that targets can have. It is the same for all targets.
        hidden: units of each hidden layer.
        activation: of all hidden layers: a name of ``covary.activations.names()``, or a
            ``MomentActivation``. None is ``"gelu"``; with the loss ``"likelihood"`` it is
            ``"relu"``, whose variances have the quickest gradients.
        noise: the standard deviation sigma of the noise on the inputs and before each activation,
            in standard deviations of the inputs' columns; or several, which are weighted. None is
            0.1. With the loss ``"likelihood"`` it is not on the inputs, and None is 0.2.
        weight_decay: how strongly weights are pulled to zero, per step, times ``lr``; or several,
            which are weighted by held-out rows. None is what ``effort`` says; with the loss
            ``"likelihood"`` it is 0.
        covariance: how covariances are stored in training: ``"shared"`` (one for each mini-batch,
            which is fastest), ``"tracked"``, ``"full"`` or ``"diagonal"``. None is ``"shared"``;
            with the loss ``"likelihood"``, which needs one for each row, it is ``"tracked"``.
            Predictions have one for each row, diagonal if that was chosen and full if not.
        folds: of the cross-validation.
        members: networks for each fold.
        epochs: passes over the training data.
        batch_size: samples in a step.
        lr: learning rate of AdamW, at its highest: it goes up for 30% of the steps, then down to 0.
        missing: ``"error"``, or ``"indicator"``: missing values are filled with the average of
            their column (categories with none), and marked in a column of their own. Data frames
            may have categories, texts, truth values and dates (``covary.estimators.frames``).
        unseen: of a row with a category that ``fit`` did not see: ``"flag"`` gives it a ``novelty``
            of 1 at least, so that its variance is larger by that of the targets; ``"error"``
            refuses it, and names the column and the value.
        random_state: decides initial weights, the order of samples and the folds.
        verbose: show progress, on standard error: True, False, or ``"auto"``, a bar on a terminal
            or in a notebook (with ipywidgets), once training has taken 5 seconds.

    Attributes:
        variance_parts_: of ``"emergent"``, ``"spread"`` and ``"learned"``, the ``VariancePart``:
            its share of the variance, and by how much it makes held-out rows likelier; averages
            over targets. Empty for fewer than 10 rows.
        neighbour_shares_: (t,) how much of the neighbours' average residual is added to means.
        held_out_loss_: negative log density of a target of a held-out row, in nats, on its own
            scale; the average over targets. NaN for fewer than 10 rows.
        distribution_: that of each target.

    Examples:
        >>> from sklearn.datasets import make_regression
        >>> x, y = make_regression(60, 3, random_state=0)
        >>> model = MomentRegressor("quick", epochs=5, random_state=0).fit(x, y)
        >>> mean, std = model.predict(x[:5], return_std=True)
        >>> low, high = model.predict_interval(x[:5], level=0.9)
        >>> mean.shape, std.shape, bool((low < high).all())
        ((5,), (5,), True)
    """

    _objective = RegressionLoss
    _neighbours: Neighbours | None

    # scikit-learn reads the parameters of an estimator off this signature, so it stands here whole.
    def __init__(
        self,
        effort: str = "default",
        *,
        variance: str = "learned",
        loss: str = "mean",
        distribution: str = "auto",
        neighbours: int = 16,
        resolution: float = 0.0,
        hidden: Sequence[int] = (64, 64),
        activation: str | MomentActivation | None = None,
        noise: float | Sequence[float] | None = None,
        weight_decay: float | Sequence[float] | None = None,
        covariance: str | None = None,
        folds: int | None = None,
        members: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float = 1e-2,
        missing: str = "error",
        unseen: str = "flag",
        random_state: Any = None,
        verbose: bool | str = "auto",
    ) -> None:
        super().__init__(
            effort, hidden=hidden, activation=activation, noise=noise, weight_decay=weight_decay,
            covariance=covariance, folds=folds, members=members, epochs=epochs,
            batch_size=batch_size, lr=lr, missing=missing, unseen=unseen,
            random_state=random_state, verbose=verbose,
        )  # fmt: skip
        self.variance, self.distribution, self.neighbours = variance, distribution, neighbours
        self.loss, self.resolution = loss, resolution

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @staticmethod
    def _loss(mean: Tensor, y: Tensor) -> Tensor:
        return (mean - y).square().mean()

    def _activation(self) -> str | MomentActivation:
        return self.activation or ("relu" if self.loss == "likelihood" else "gelu")

    def _noises(self) -> tuple[float, ...]:
        usual = _LIKELIHOOD_NOISE if self.loss == "likelihood" else 0.1
        noises = self._several("noise", usual if self.noise is None else self.noise)
        if self.loss == "likelihood" and 0 in noises:
            raise ValueError(
                "loss='likelihood' needs noise, of which variances are made: choose noise > 0."
            )
        return noises

    def _architecture(self) -> Architecture:
        usual = super()._architecture()
        if self.loss == "mean":
            return usual
        covariance = self.covariance or "tracked"
        return replace(
            usual, covariance=covariance, objective=GaussianLikelihood, has_noisy_inputs=False
        )

    def _checked_effort(self) -> Effort:
        effort = super()._checked_effort()
        if self.loss == "mean":
            return effort
        decays = (0.0,) if self.weight_decay is None else effort.weight_decays
        return replace(effort, weight_decays=decays, steps=_LIKELIHOOD_STEPS * effort.steps)

    def _config(self, rows: int, effort: Effort, seed: int) -> TrainingConfig:
        config = super()._config(rows, effort, seed)
        if self.loss == "mean" or self.epochs is not None:
            return config
        return replace(config, epochs=min(config.epochs, _LIKELIHOOD_EPOCHS))

    def fit(self, X: ArrayLike, y: ArrayLike, *, X_std: ArrayLike | None = None) -> MomentRegressor:
        """Train on inputs (n, d) and targets (n,) or (n, t).

        ``X_std`` are standard deviations of the errors of the inputs, (d,) or (n, d), in their
        units. With ``covariance="shared"`` they are averaged over a mini-batch in training; choose
        ``"full"`` where rows differ much.
        """
        for name, known in (("variance", VARIANCES), ("loss", LOSSES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}."
                )
        if self.loss == "likelihood" and self.covariance == "shared":
            raise ValueError(
                "loss='likelihood' needs a covariance for each row, and covariance='shared' is one "
                "for each mini-batch: choose 'full', 'tracked' or 'diagonal'."
            )
        if self.distribution not in ("auto", *FAMILIES):
            raise ValueError(
                f"distribution must be auto or one of {', '.join(FAMILIES)}, got "
                f"{self.distribution!r}."
            )
        is_whole = isinstance(self.neighbours, Integral) and not isinstance(self.neighbours, bool)
        if not is_whole or self.neighbours < 0:
            raise ValueError(f"neighbours must be 0 or more, got {self.neighbours!r}.")
        is_number = isinstance(self.resolution, Real) and not isinstance(self.resolution, bool)
        if not is_number or not np.isfinite(self.resolution) or self.resolution < 0:
            raise ValueError(f"resolution must be a number >= 0, got {self.resolution!r}.")
        x, target = self._validated(X, y, multi_output=True, y_numeric=True)
        if target.dtype.kind not in "fiub":
            raise ValueError("The targets are no numbers. MomentClassifier predicts classes.")
        self._one_dimensional = target.ndim == 1
        columns = torch.tensor(target.reshape(len(x), -1), dtype=torch.float64)
        trained, task = self._train(torch.tensor(x), columns, X_std, columns.shape[1])
        self._fit_residuals(trained, task)
        self.n_iter_ = len(self.history_)
        return self

    def _fit_residuals(self, trained: TrainedMembers, task: TrainingTable) -> None:
        """Fit the distribution of each target to residuals of rows that networks have not seen."""
        rescale = self.network_.rescale
        assert rescale is not None
        y, inputs = (task.y - rescale.shift) / rescale.scale, self.network_.standardize(task.x)
        self._rounding = (self.resolution / rescale.scale).square() / 12  # (t,)
        given = FAMILIES if self.distribution == "auto" else (self.distribution,)
        rows = trained.rows
        local = self._fit_neighbours(trained, task.x, y, inputs)
        found = _corrected(trained.held_out, local, self.neighbour_shares_)
        residual = y[rows] - found.mean
        self._residuals = [
            fit_residuals(
                _evidence(inputs[rows], found, local, self._rounding, column),
                residual[:, column],
                parts=PARTS if self.variance == "learned" else ("emergent",),
                families=given,
                seed=task.seed,
            )
            for column in range(y.shape[1])
        ]
        levels = torch.stack([each.levels for each in self._residuals], 1)
        self._far = np.sort((levels - 0.5).abs().numpy(), 0)  # (n, t)
        self._correlation: Floats = correlation_of(levels).numpy()
        self.distribution_ = [each.model.family for each in self._residuals]
        units = rescale.scale.log().tolist()
        self.held_out_loss_ = float(
            np.mean([each.model.loss + u for each, u in zip(self._residuals, units, strict=True)])
        )
        self.variance_parts_ = self._parts_worth()

    def _fit_neighbours(
        self, trained: TrainedMembers, x: Tensor, y: Tensor, inputs: Tensor
    ) -> Local | None:
        """Remember residuals of training rows; what they say of held-out ones.

        How much of it is added to means is what held-out rows say. Where that is little there are
        no neighbours: what else they tell is mostly noise.
        """
        self._neighbours, self.neighbour_shares_ = None, np.zeros(y.shape[1])
        if self.neighbours == 0 or self.variance == "emergent" or len(x) < LEAST_ROWS:
            return None
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        kept = order[:MOST_REFERENCES].sort().values
        residuals = (y[kept] - self.network_.means_of_folds(x[kept])).numpy()
        fold = trained.fold.numpy()
        self._neighbours = Neighbours(
            inputs[kept].numpy(), residuals, fold[kept.numpy()], self.neighbours
        )
        rows = trained.rows
        local = self._neighbours(inputs[rows].numpy(), fold[rows.numpy()])
        found = shares(local.residual, (y[rows] - trained.held_out.mean).numpy())
        if found.max() < _LEAST_NEIGHBOUR_SHARE:
            self._neighbours = None
            return None
        self.neighbour_shares_ = found
        return local

    def _parts_worth(self) -> dict[str, VariancePart]:
        """The share and the gain of each part of the variance, averaged over targets."""
        every = [each.worth for each in self._residuals]
        found = {
            name: VariancePart(*np.mean([worth[name] for worth in every], 0).tolist())
            for name in PARTS
            if all(name in worth for worth in every)
        }
        is_noisy = any(recipe.noise for recipe in self.recipes_)
        if is_noisy and "emergent" in found and found["emergent"].share < _LEAST_SHARE:
            self._warn("covariance that emerges in the networks", found["emergent"].share)
        if "spread" in found and any(each.throws_spread_away for each in self._residuals):
            self._warn("disagreement of the members", found["spread"].share)
        return found

    def _warn(self, what: str, share: float) -> None:
        warnings.warn(
            f"Held-out rows give the {what} {share:.1%} of the variance: it says nothing of the "
            "errors here (variance_parts_). Off the data standard deviations grow all the same.",
            UserWarning,
            stacklevel=level_of_user(),
        )

    def _taken_apart(
        self, X: ArrayLike, X_std: ArrayLike | None
    ) -> tuple[Predictive, dict[str, Floats]]:
        """The distributions of n rows, and what their variances (n, t) are made of."""
        x, is_strange = self._inputs(X)
        out = self.network_.outputs(self._with_errors(x, X_std))
        inputs = self.network_.standardize(x)
        rescale = self.network_.rescale
        assert rescale is not None
        local = None if self._neighbours is None else self._neighbours(inputs.numpy())
        out = _corrected(out, local, self.neighbour_shares_)
        every = [
            each.model(_evidence(inputs, out, local, self._rounding, column))
            for column, each in enumerate(self._residuals)
        ]
        near = distributions(every, self._correlation)
        # Off the data, a target may be as far from what networks say as it varies over the data.
        doubt = self._novelty(x, is_strange).square().numpy()[:, None]
        unit = rescale.scale.numpy()
        mean = (rescale.shift + rescale.scale * out.mean).numpy()
        centred = near.placed(mean, unit, doubt, is_one_target=self._one_dimensional)
        parts = _parts(every, out, near.var(), self._rounding.numpy())
        parts["doubt of the model"] = parts["doubt of the model"] + doubt
        return centred, {name: part * unit**2 for name, part in parts.items()}

    def predict_distribution(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Predictive:
        """What may be observed at inputs (n, d): a distribution for each row.

        It has ``mean``, ``std``, ``logpdf(y)``, ``cdf(y)``, ``ppf(q)``, ``interval(level)`` and
        ``rvs(size)``, as scipy's distributions; for several targets ``cov`` too.
        """
        return self._taken_apart(X, X_std)[0]

    def predict(
        self,
        X: ArrayLike,
        return_std: bool = False,
        return_cov: bool = False,
        *,
        X_std: ArrayLike | None = None,
    ) -> Any:
        """Means, and if wanted a measure of how sure they are, on the scale of the targets.

        Args:
            X: inputs (n, d).
            return_std: give standard deviations too.
            return_cov: give covariances too.
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.

        Returns:
            The mean, (n,) or (n, t) as the targets were; or the mean and its standard deviation,
            of the same shape; or the mean and the covariance of a sample's targets, (n, t, t).
        """
        if return_std and return_cov:
            raise ValueError("predict gives a standard deviation or a covariance, not both.")
        found = self.predict_distribution(X, X_std=X_std)
        if return_cov:
            return found.mean(), found.cov()
        return (found.mean(), found.std()) if return_std else found.mean()

    def predict_interval(
        self,
        X: ArrayLike,
        level: float = 0.9,
        *,
        conformal: bool = False,
        X_std: ArrayLike | None = None,
    ) -> tuple[Floats, Floats]:
        """Ends of the intervals in which targets lie with this probability, (n,) or (n, t) each.

        Args:
            X: inputs (n, d).
            level: the share of the targets that is to be inside.
            conformal: correct the level by held-out rows: so that it would have held for them, each
                predicted without itself (cross-conformal; of few rows the ends may be infinite).
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        found = self.predict_distribution(X, X_std=X_std)
        if not conformal:
            return found.interval(level)
        return found.conformal_interval(level, self._far)

    def uncertainty(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Floats:
        """(n,) higher is less sure: the standard deviation; of several targets, of all together.

        That is the root of the determinant of their covariance, to the power of one target.
        """
        found = self.predict_distribution(X, X_std=X_std)
        t = len(found.df)
        _, logarithm = np.linalg.slogdet(found.cov())
        return cast(Floats, np.exp(logarithm / (2 * t)))

    def moments(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Moments:
        """Mean (n, t) and covariance (n, t, t) of the distributions, in double precision."""
        found = self.predict_distribution(X, X_std=X_std)
        mean = (found.weights * found.locations).sum(-1)
        return Moments(torch.tensor(mean), Full(torch.tensor(found.cov())))

    def budget(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Budget:
        """What the variance is made of: parts (n, t) that add up to it.

        ``noise of the data`` is what residuals of held-out rows have shown; ``doubt of the model``
        is how far its members differ, and the distance from the training data; ``errors of the
        inputs`` are those that ``X_std`` gives.
        """
        _, parts = self._taken_apart(X, X_std)
        return Budget({name: torch.tensor(part) for name, part in parts.items()})


def _corrected(found: Outputs, local: Local | None, share: Floats) -> Outputs:
    """The same with a share (t,) of the neighbours' average residuals added to means."""
    if local is None:
        return found
    added = torch.tensor(share * local.residual)
    return found._replace(mean=found.mean + added, exact=found.exact + added)


def _evidence(
    inputs: Tensor, found: Outputs, local: Local | None, rounding: Tensor, column: int
) -> Evidence:
    """What is known of rows for one target; ``rounding`` (t,) are variances at least."""
    if local is not None:
        inputs = torch.cat([inputs, torch.tensor(local.features(column))], 1)
    emergent, spread, errors = (
        each[:, column, column] for each in (found.emergent, found.spread, found.errors)
    )
    known = errors.clamp(min=0) + rounding[column]
    return Evidence(inputs, found.exact[:, column], emergent, spread, known)


def _parts(
    every: Sequence[Scales], out: Outputs, var: Floats, rounding: Floats
) -> dict[str, Floats]:
    """Parts (n, t) of variances: known ones, and the rest in proportion to squared scales.

    Rounding (t,) is noise of the data.
    """
    noise, doubt, errors = [], [], []
    for column, found in enumerate(every):
        parts = {name: part.mean(0).double().numpy() for name, part in found.parts.items()}
        noise.append(parts["emergent"] + parts["learned"])
        doubt.append(parts["spread"])
        errors.append(out.errors[:, column, column].clamp(min=0).numpy())
    own, apart, known = (np.stack(part, 1) for part in (noise, doubt, errors))
    unit = (var - known - rounding) / (own + apart)
    named = {"noise of the data": own * unit + rounding, "doubt of the model": apart * unit}
    return named | {"errors of the inputs": known} if known.any() else named
