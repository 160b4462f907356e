"""What the estimators share: parameters, folds, training, and distance from the data."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from numbers import Integral
from threading import current_thread, main_thread
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.data.rows import UNSEEN
from covary.estimators.data import checked_errors, cross_validation
from covary.estimators.frames import Frame, is_needed
from covary.estimators.members import (
    Architecture,
    Ensemble,
    Recipe,
    TrainedMembers,
    TrainingTable,
    train,
)
from covary.moments import Moments
from covary.training import Display, TrainingConfig
from covary.training.display import Shown, has_bars
from covary.training.objectives import measured
from covary.uncertainty.novelty import Novelty

Floats = NDArray[np.float64]

# What is kept for all data sets: batches of so many samples, and steps for so many rows.
_LEAST_BATCH, _MOST_BATCH = 32, 512
_ROWS_OF_A_BATCH = 32  # rows of the table for each sample of a batch
_USUAL_ROWS = 2000
PATIENCE = 5.0  # seconds of training without a progress bar
_MORE_STEPS = 0.3  # steps grow with this power of the rows


@dataclass(frozen=True)
class Effort:
    """How much work goes into a fit: what ``effort`` stands for.

    Attributes:
        folds: of the cross-validation.
        members: networks for each fold.
        weight_decays: that are tried, and weighted by held-out rows.
        steps: of the training, for up to 2000 rows.
    """

    folds: int
    members: int
    weight_decays: tuple[float, ...]
    steps: int


EFFORTS = {
    "quick": Effort(3, 2, (0.1, 2.0), 400),
    "default": Effort(5, 2, (0.02, 0.4, 2.0), 1000),
    "thorough": Effort(10, 2, (0.02, 0.4, 2.0), 2000),
}


class MomentEstimator(BaseEstimator):  # type: ignore[misc]
    """What regression and classification have in common.

    All networks are trained at once: for each fold ``members`` of them, which do not see its rows,
    with each weight decay and noise. What they say of the rows they have not seen decides how much
    each weight decay counts, and how large errors are. All together are the model.

    Attributes:
        network_: raw inputs (n, n_features_in_) -> ``covary.Moments`` of the targets on their
            scale, or of a logit for each class: the average of all members, in double precision,
            with the covariance that emerges and the spread of the members.
        recipes_: the share of each (noise, weight decay) in it.
        recipe_errors_: the loss of each on held-out rows.
        novelty_: standardised inputs -> how far they are from the training data.
        n_iter_: epochs that it was trained for.
        history_: each ``covary.training.Epoch``, averaged over networks.
    """

    def __init__(
        self,
        effort: str = "default",
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str | MomentActivation | None = "gelu",
        noise: float | Sequence[float] | None = 0.1,
        weight_decay: float | Sequence[float] | None = None,
        covariance: str | None = "shared",
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
        self.effort, self.hidden, self.activation, self.noise = effort, hidden, activation, noise
        self.weight_decay, self.covariance = weight_decay, covariance
        self.folds, self.members, self.epochs = folds, members, epochs
        self.batch_size, self.lr, self.missing, self.unseen = batch_size, lr, missing, unseen
        self.random_state, self.verbose = random_state, verbose

    _objective: Callable[[nn.Module], nn.Module]  # the loss of a network of standardised data

    @staticmethod
    @abstractmethod
    def _loss(mean: Tensor, y: Tensor) -> Tensor:
        """() how bad held-out means (n, t) are, for the weights of recipes."""

    def _train(
        self, x: Tensor, y: Tensor, X_std: ArrayLike | None, outputs: int, strata: Any = None
    ) -> tuple[TrainedMembers, TrainingTable]:
        """Train all networks on inputs (n, d) and labels or targets."""
        effort = self._checked_effort()
        self.__dict__.pop("n_iter_", None)  # not fitted until ``fit`` comes to its end
        self._scale = x.std(0, correction=0)
        self._first, self._is_constant = x[0], (x == x[0]).all(0)
        std = self._errors(x, X_std)
        random = check_random_state(self.random_state)
        seed, split_seed = (int(number) for number in random.randint(2**31 - 1, size=2))
        folds = cross_validation(len(x), min(effort.folds, len(x)), split_seed, strata)
        task = TrainingTable(x, y, std, outputs, seed)
        noises = self._noises()
        trained = train(
            task,
            self._architecture(),
            folds,
            [Recipe(noise, decay) for noise in noises for decay in effort.weight_decays],
            members=effort.members,
            config=self._config(len(folds[0].training), effort, seed),
            loss_of=self._loss,
            display=_progress(self.verbose),
        )
        self.recipes_, self.recipe_errors_ = trained.weights, trained.errors
        self.history_ = trained.history
        self.network_: Ensemble = trained.ensemble.eval()
        self.novelty_ = Novelty.fit(self.network_.standardize(x))
        return trained, task

    def _activation(self) -> str | MomentActivation:
        return "gelu" if self.activation is None else self.activation

    def _noises(self) -> tuple[float, ...]:
        return self._several("noise", self.noise)

    def _architecture(self) -> Architecture:
        return Architecture(
            hidden=tuple(int(width) for width in self.hidden),
            activation=self._activation(),
            covariance="shared" if self.covariance is None else self.covariance,
            objective=self._objective,
        )

    def _config(self, rows: int, effort: Effort, seed: int) -> TrainingConfig:
        batch = self.batch_size
        if batch is None:
            wanted = 2 ** int(math.log2(max(1, rows / _ROWS_OF_A_BATCH)))
            batch = min(_MOST_BATCH, max(_LEAST_BATCH, wanted))
        steps = effort.steps * max(1.0, (rows / _USUAL_ROWS)) ** _MORE_STEPS
        epochs = self.epochs
        if epochs is None:
            epochs = max(1, round(steps / math.ceil(rows / batch)))
        return TrainingConfig(
            epochs=epochs,
            batch_size=batch,
            lr=self.lr,
            weight_decay=1.0,  # times that of a recipe
            optimizer="adamw",
            schedule="one-cycle",
            seed=seed,
        )

    def _checked_effort(self) -> Effort:
        """The effort, with what is given in place of its own choices."""
        activation = self._activation()
        if activations.get(activation).neuron is not None:
            raise ValueError(
                "Estimators give noise on the scale of standardised inputs, which spiking "
                f"neurons ({activation}) do not fire by. Train them with covary.mlp(..., "
                "activation='lif', batch_norm=True) or covary train --activation lif."
            )
        if self.effort not in EFFORTS:
            raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, got {self.effort!r}.")
        if isinstance(self.hidden, int):
            raise ValueError(f"hidden must be a sequence such as (64,), got {self.hidden}.")
        preset = EFFORTS[self.effort]
        least = {"folds": 2, "members": 1, "epochs": 1, "batch_size": 1}
        for name, fewest in least.items():
            value = getattr(self, name)
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            if value is not None and not (is_whole and value >= fewest):
                raise ValueError(
                    f"{name} must be {fewest} or more (a whole number), or None, got {value!r}."
                )
        decays = preset.weight_decays
        if self.weight_decay is not None:
            decays = self._several("weight_decay", self.weight_decay)
        return Effort(
            self.folds or preset.folds, self.members or preset.members, decays, preset.steps
        )

    def _several(self, name: str, given: Any) -> tuple[float, ...]:
        """One number or several, the least first."""
        values = given if isinstance(given, Sequence | np.ndarray) else [given]
        wrong = isinstance(given, str) or len(values) == 0
        if wrong or not all(np.isfinite(value) and value >= 0 for value in values):
            raise ValueError(f"{name} must be a number >= 0, or several, got {given!r}.")
        return tuple(sorted({float(value) for value in values}))

    def _validated(self, X: ArrayLike, y: ArrayLike, **checks: Any) -> tuple[Floats, NDArray[Any]]:
        """Inputs (n, d) as numbers, and targets; remembers the columns."""
        if self.unseen not in UNSEEN:
            raise ValueError(f"unseen must be one of {', '.join(UNSEEN)}, got {self.unseen!r}.")
        self._frame = Frame.fit(X, missing=self.missing) if is_needed(X, self.missing) else None
        numbers = X if self._frame is None else self._frame(X)
        x, target = validate_data(
            self, numbers, y, dtype=np.float64, ensure_min_samples=2, **checks
        )
        if self._frame is not None:  # the columns of the table, not what was made of them
            validate_data(self, X, skip_check_array=True)
        return x, target

    def _inputs(self, X: ArrayLike) -> tuple[Tensor, Tensor]:
        """(n, d) checked, and (n,) whether a row has what training never had.

        That is an unseen category, a missing value where there was none, or another value of a
        column that did not vary; such a column is put back to its value, as no weight knows of it.
        """
        check_is_fitted(self)
        if self._frame is not None:
            if self.unseen == "error":
                self._frame.check_seen(X)
            x, is_strange = torch.tensor(self._frame(X)), torch.tensor(self._frame.unusual(X))
        else:
            x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
            is_strange = torch.zeros(len(x), dtype=torch.bool)
        differs = (x != self._first) & self._is_constant
        return torch.where(differs, self._first, x), is_strange | differs.any(1)

    def _with_errors(self, x: Tensor, X_std: ArrayLike | None) -> Tensor | Moments:
        return measured(x, self._errors(x, X_std))

    def _errors(self, x: Tensor, X_std: ArrayLike | None) -> Tensor | None:
        """(n, d) standard deviations of the errors of inputs; None without any."""
        if X_std is not None and self._frame is not None:
            raise ValueError(
                "X_std are errors of numbers, and X has categories, dates or missing values. "
                "Encode these first (ColumnTransformer), with errors of 0 in their columns."
            )
        return checked_errors(X_std, x, self._scale, getattr(self, "feature_names_in_", None))

    def novelty(self, X: ArrayLike) -> Floats:
        """(n,) how far inputs are outside of the training data, in standard deviations of a column.

        0 is inside: within the range of every column, and no stranger as a combination of columns
        than training rows are beside each other (``covary.uncertainty.novelty``). It is 1 at least
        where a category was not seen in training, a value is missing that never was, or a column
        has another value that had one alone.
        """
        return cast(Floats, self._novelty(*self._inputs(X)).numpy())

    def _novelty(self, x: Tensor, is_strange: Tensor) -> Tensor:
        """The same of what ``_inputs`` gives."""
        found: Tensor = self.novelty_(self.network_.standardize(x))
        return torch.maximum(found, is_strange.to(found))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "n_iter_")


def _progress(verbose: bool | str) -> Display | None:
    """What shows progress on standard error; one bar alone, of one process, if it is not asked."""
    from rich.console import Console

    console = Console(stderr=True)
    if not isinstance(verbose, str):
        return Shown(console) if verbose else None
    if verbose != "auto":
        raise ValueError(f"verbose must be True, False or 'auto', got {verbose!r}.")
    is_worker = parent_process() is not None or current_thread() is not main_thread()
    is_seen = has_bars(console) and (console.is_jupyter or console.file.isatty())
    return Shown(console, after=PATIENCE) if is_seen and not is_worker else None
