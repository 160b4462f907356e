"""What the estimators share: the choice of noise, training, prediction in bounded memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from covary.activations import MomentActivation
from covary.covariance import Full
from covary.estimators.standardized import Standardized
from covary.estimators.stopping import EarlyStopping
from covary.models import Network, mlp, with_covariance
from covary.moments import Moments
from covary.replicas import ReplicaBatches, ReplicaLoss
from covary.training import Display, TrainingConfig, fit, terminal_or_lines

# What noise="auto" chooses from: standard deviations, in those of the standardised inputs.
NOISES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
# What it is where there are too few samples to choose.
_USUAL_NOISE = 0.3
# A validation part of fewer samples than this says nothing.
_LEAST_VALIDATION = 5
# Numbers in the covariances that are computed at a time: 128 MB in double precision.
_NUMBERS_AT_A_TIME = 2**24


class MomentEstimator(BaseEstimator):  # type: ignore[misc]
    """What regression and classification have in common.

    The network that is kept has seen all data, unless ``early_stopping``: what stopped early is
    kept as it is, and has not seen the validation part. So ``noise="auto"`` alone trains twice, all
    candidates at once on the training part and then the best on everything.

    Attributes:
        network_: raw inputs (n, n_features_in_) -> ``covary.Moments`` of the targets in their
            units, or of a logit for each class; in double precision.
        noise_: the noise it has.
        noise_scores_: the score of each noise that was tried on the validation part, higher is
            better; empty if there was no such part.
        n_iter_: epochs that it was trained for.
        history_: loss and more of each of these epochs; where several noises stopped early
            together, averages over them.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (50,),
        *,
        activation: str | MomentActivation = "relu",
        noise: float | str = "auto",
        covariance: str = "shared",
        epochs: int = 200,
        batch_size: int = 128,
        lr: float = 1e-2,
        weight_decay: float = 0.3,
        schedule: str = "one-cycle",
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        patience: int = 20,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        """Take the parameters; ``fit`` looks at them.

        Args:
            hidden: units of each hidden layer.
            activation: one for all hidden layers, by name (``covary.activations.names()``) or as
                given by ``covary.activations``.
            noise: the standard deviation sigma of the noise on the inputs and before each
                activation, in units of the standardised inputs (1 is one standard deviation of a
                column). With ``"auto"`` it is the one of ``covary.estimators.NOISES`` that does
                best on a validation part: regression by the average log density of its targets,
                each under a Gaussian with the mean and variance that are predicted for it;
                classification by the log-probability that is predicted for its labels. Of equally
                good ones the least noise wins.
            covariance: how covariances are held in training: ``"shared"`` (one for each
                mini-batch, which is fastest), ``"tracked"``, ``"full"`` or ``"diagonal"``.
                Predictions have one for each sample, diagonal if that was chosen and full if not.
            epochs: passes over the training data.
            batch_size: samples in a step.
            lr: learning rate of AdamW, at its highest where it has a schedule.
            weight_decay: how strongly weights are pulled to zero, per step and unit of ``lr``.
            schedule: of the learning rate: ``"one-cycle"`` (up for 30% of the steps, then down to
                0), ``"cosine"`` (down to 0) or ``"constant"``.
            early_stopping: stop when the loss on a validation part has not fallen for ``patience``
                epochs, and go back to the weights with which it was lowest. Goes best with a
                ``"constant"`` schedule, which does not depend on ``epochs``.
            validation_fraction: the part of the data that is set aside where ``noise="auto"`` or
                ``early_stopping`` need it. Where that is less than 5 samples there is nothing to
                choose or to stop by: the noise is then 0.3, and training takes all its epochs.
            patience: epochs to wait for a lower validation loss.
            random_state: decides initial weights, the order of samples and the validation part.
            verbose: show progress.
        """
        self.hidden = hidden
        self.activation = activation
        self.noise = noise
        self.covariance = covariance
        self.epochs = epochs
        self.batch_size = batch_size
        self.lr = lr
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.random_state = random_state
        self.verbose = verbose

    @abstractmethod
    def _objective(self, net: nn.Module) -> nn.Module:
        """The loss of a network of standardised units."""

    @abstractmethod
    def _scores(self, out: Moments, y: Tensor) -> Tensor:
        """(..., m) how well such a network does on each sample, for the choice of noise."""

    def _fit(self, x: Tensor, y: Tensor, outputs: int, strata: NDArray[Any] | None) -> None:
        """Choose the noise, and train ``network_``, on inputs (n, d) and labels or targets."""
        self._check_parameters()
        self._widest = max(outputs, *self.hidden, 1)
        random = check_random_state(self.random_state)
        seed, split_seed = (int(number) for number in random.randint(2**31 - 1, size=2))
        training, validation = self._parts(len(x), split_seed, strata)
        self.noise_ = _USUAL_NOISE if self.noise == "auto" else float(self.noise)
        self.noise_scores_: dict[float, float] = {}
        best = 0
        if validation is not None:
            noises = NOISES if self.noise == "auto" else (self.noise_,)
            data = Standardized(x[training], y[training])
            held_out = data.standardize(x[validation]), data.targets(y[validation])
            nets, history = self._train(noises, data, outputs, seed, held_out)
            scores = [self._score_of(net, *held_out) for net in nets]
            self.noise_scores_ = dict(zip(noises, scores, strict=True))
            # The first of equals, which has the least noise; what is no number is never the best.
            best = int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))
            self.noise_ = noises[best]
        if validation is None or not self.early_stopping:
            data, best = Standardized(x, y), 0
            nets, history = self._train((self.noise_,), data, outputs, seed, None)
        self.history_, self.n_iter_ = history, len(history)
        layers = [data.standardize, *nets[best].children(), *data.back]
        self.network_ = self._as_predicting(nn.Sequential(*layers)).double().eval()

    def _check_parameters(self) -> None:
        if isinstance(self.noise, str) and self.noise != "auto":
            raise ValueError(f"noise must be a number or 'auto', got {self.noise!r}.")
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, got {self.validation_fraction}."
            )
        if isinstance(self.hidden, int):
            raise ValueError(f"hidden must be a sequence such as (50,), got {self.hidden}.")
        if self.patience < 1:
            raise ValueError(f"patience must be 1 epoch or more, got {self.patience}.")
        if self.epochs < 1:
            raise ValueError(f"epochs must be 1 or more, got {self.epochs}.")

    def _parts(
        self, n: int, seed: int, strata: NDArray[Any] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        """Rows to train on and rows to validate on, if they are needed and enough."""
        size = round(self.validation_fraction * n)
        wanted = self.early_stopping or self.noise == "auto"
        if not wanted or size < _LEAST_VALIDATION or n - size < _LEAST_VALIDATION:
            return np.arange(n), None
        if strata is not None:
            members = np.bincount(strata)
            if members.min() < 2 or min(size, n - size) < len(members):
                strata = None
        parts = train_test_split(np.arange(n), test_size=size, random_state=seed, stratify=strata)
        return parts[0], parts[1]

    def _network(self, inputs: int, outputs: int, noise: float, seed: int) -> nn.Module:
        """The same initial weights for every noise, so that noise makes the difference."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return mlp(
                [inputs, *(int(width) for width in self.hidden), outputs],
                activation=self.activation,
                noise=noise,
                covariance=self.covariance,
            )

    def _train(
        self,
        noises: Sequence[float],
        data: Standardized,
        outputs: int,
        seed: int,
        held_out: tuple[Tensor, Tensor] | None,
    ) -> tuple[list[nn.Module], list[dict[str, Any]]]:
        """A network for each noise, all trained at once; with the metrics of every epoch."""
        config = TrainingConfig(
            epochs=self.epochs,
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.weight_decay,
            optimizer="adamw",
            schedule=self.schedule,
            seed=seed,
        )
        nets = [self._network(data.x.shape[1], outputs, noise, seed) for noise in noises]
        loss = ReplicaLoss([self._objective(net) for net in nets])
        rows = torch.arange(len(data.x)).expand(len(nets), -1)
        batches = ReplicaBatches(data.x, data.y, rows, self.batch_size, seeds=[seed] * len(nets))
        stopping = None
        if held_out is not None and self.early_stopping:
            predicting = self._as_predicting(loss.replicas)
            rows_at_a_time = self._rows_at_a_time()
            stopping = EarlyStopping(
                predicting, *held_out, rows_at_a_time=rows_at_a_time, patience=self.patience
            )
        history = fit(
            loss,
            batches,
            config,
            validate=stopping.validate if stopping else None,
            stop=stopping.stop if stopping else None,
            display=_progress() if self.verbose else None,
        )
        if stopping:
            stopping.restore()
        return [cast(nn.Module, objective.net) for objective in loss.unstack()], history

    def _as_predicting(self, net: Network) -> Network:
        return with_covariance(net, "diagonal" if self.covariance == "diagonal" else "full")

    def _rows_at_a_time(self) -> int:
        return max(1, _NUMBERS_AT_A_TIME // (len(NOISES) * self._widest**2))

    def _score_of(self, net: nn.Module, x: Tensor, y: Tensor) -> float:
        predicting = self._as_predicting(net).eval()
        size = self._rows_at_a_time()
        with torch.no_grad():
            pairs = zip(torch.split(x, size), torch.split(y, size), strict=True)
            scores = torch.cat([self._scores(predicting(some), target) for some, target in pairs])
        return float(scores.double().mean())

    def _outputs(self, X: ArrayLike) -> Iterator[Moments]:  # noqa: N803
        """What the network gives, as many rows at a time as memory should hold."""
        check_is_fitted(self)
        x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        for some in torch.split(x, self._rows_at_a_time()):
            with torch.no_grad():
                out = self.network_(some)
            yield out

    def moments(self, X: ArrayLike) -> Moments:  # noqa: N803
        """Mean (n, outputs) and covariance of the network's output, in double precision."""
        parts = [(out.mean, out.covariance_matrix) for out in self._outputs(X)]
        means, matrices = zip(*parts, strict=True)
        mean = torch.cat(means)
        return Moments(mean, Full(torch.cat(matrices), added=mean.new_zeros(1, 1)))

    def _mean(self, X: ArrayLike) -> Tensor:  # noqa: N803
        return torch.cat([out.mean for out in self._outputs(X)])


def _progress() -> Display:
    from rich.console import Console

    return terminal_or_lines(Console())
