"""What the estimators share: the choice of noise, calibration, training, prediction."""

from __future__ import annotations

import itertools
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from covary import activations
from covary.activations import MomentActivation
from covary.budget import Budget
from covary.convert import convert
from covary.estimators.data import (
    Fold,
    Rows,
    Standardized,
    checked_errors,
    cross_validation,
    one_part,
)
from covary.inputs import in_batches
from covary.models import Network, mlp, with_covariance
from covary.moments import Moments
from covary.nn.fidelity import TrackingWarning
from covary.training import Display, Epoch, TrainingConfig, fit, terminal_or_lines
from covary.training.objectives import measured
from covary.training.replicas import ReplicaBatches, ReplicaLoss, Replicas
from covary.uncertainty.agreement import gathered
from covary.uncertainty.calibration import Mixture, combined

# What noise="auto" chooses from: standard deviations, in those of the standardised inputs.
NOISES = (0.05, 0.1, 0.2, 0.3, 0.5)
# What it is where there are too few samples to choose.
_USUAL_NOISE = 0.1
# What training takes if nobody says how long: few samples need many epochs, many need few.
_USUAL_STEPS = 3000
_LEAST_EPOCHS = 10
# Fewer samples than this say nothing when they are held out.
_LEAST_VALIDATION = 5
# Numbers in the covariances that are computed at a time: 128 MB in double precision.
_NUMBERS_AT_A_TIME = 2**24


class _Task(NamedTuple):
    """What is to be learnt: raw inputs (n, d), their errors, and targets (n, t) or labels (n,)."""

    x: Tensor
    y: Tensor
    std: Tensor | None
    outputs: int
    seed: int

    def inputs(self, rows: Rows) -> Tensor | Moments:
        """Some inputs, with errors if they have any."""
        return measured(self.x[rows], self.errors(rows))

    def errors(self, rows: Rows) -> Tensor | None:
        """Standard deviations of the errors of some inputs."""
        return None if self.std is None else self.std[rows]


class _Job(NamedTuple):
    """A network to train: its noise, the part of the data, and which of the ensemble it is."""

    noise: float
    part: int
    member: int


class EarlyStopping:
    """Keeps, for each replica, the state of the epoch with the lowest loss on held-out data.

    ``replicas`` are of objectives, and share their parameters with what is trained. Held-out data,
    inputs (m, d), labels or targets and, if there are any, errors of the inputs, are the same for
    all. Training stops when each replica has waited ``patience`` epochs for a lower loss.
    """

    def __init__(
        self, replicas: Replicas, held_out: Sequence[Tensor], *, rows_at_a_time: int, patience: int
    ) -> None:
        self.replicas, self.patience = replicas, patience
        size = replicas.size
        split = (torch.split(each, rows_at_a_time) for each in held_out)
        self.parts = [
            tuple(each.expand(size, *each.shape) for each in batch)
            for batch in zip(*split, strict=True)
        ]
        self.lowest = torch.full((size,), torch.inf)
        self.waited = torch.zeros(size)
        self.kept: dict[str, Tensor] = {}

    def validate(self) -> dict[str, float]:
        """Losses now, averaged over replicas for the record; remembers the best states."""
        self.replicas.eval()
        with torch.no_grad():
            losses = [self.replicas(*batch)[0] * batch[0].shape[1] for batch in self.parts]
        loss = torch.stack(losses).sum(0) / sum(batch[0].shape[1] for batch in self.parts)
        better = loss < self.lowest
        for name, value in self.replicas.state_dict().items():
            choice = better.view(-1, *[1] * (value.dim() - 1))
            self.kept[name] = torch.where(choice, value, self.kept.get(name, value))
        self.lowest = torch.where(better, loss, self.lowest)
        self.waited = torch.where(better, 0, self.waited + 1)
        return {"validation_loss": float(loss.mean())}

    def stop(self, _epoch: Epoch) -> bool:
        """Whether every replica has waited long enough."""
        return bool((self.waited >= self.patience).all())

    def restore(self) -> None:
        """Back to the best, each to its own."""
        self.replicas.load_state_dict(self.kept)


class MomentEstimator(BaseEstimator):  # type: ignore[misc]
    """What regression and classification have in common.

    To choose a noise or to ``calibrate`` it trains twice: first all candidates at once, each
    without the data that are held out from it, then the best on all data. With ``early_stopping``
    the network that stopped is kept, which has not seen the validation part.

    Attributes:
        network_: raw inputs (n, n_features_in_) -> ``covary.Moments`` of the targets on their
            scale, or of a logit for each class; in double precision and without the calibration.
        calibration_: the layer that calibrates what it gives, Moments -> Moments; None without
            ``calibrate``, or where there were too few samples.
        noise_: the noise it has.
        noise_scores_: the score of each noise that was tried on held-out data, higher is better.
        n_iter_: epochs that it was trained for.
        history_: each ``covary.training.Epoch``, averaged over networks trained together.
    """

    def __init__(
        self,
        hidden: Sequence[int] = (50, 50),
        *,
        activation: str | MomentActivation = "relu",
        noise: float | Sequence[float] | str = "auto",
        covariance: str = "shared",
        members: int = 1,
        calibrate: bool = True,
        folds: int = 5,
        epochs: int | None = None,
        batch_size: int = 32,
        lr: float = 1e-2,
        weight_decay: float = 0.03,
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
            activation: of all hidden layers: a name of ``covary.activations.names()``, or a
                ``MomentActivation``.
            noise: the standard deviation sigma of the noise on the inputs and before each
                activation, in standard deviations of the inputs' columns. Of several, or with
                ``"auto"`` of ``covary.estimators.NOISES``, the one under which held-out targets
                have the highest Gaussian log density, or held-out labels the highest
                log-probability, calibrated if they are; of equally good ones the least.
            covariance: how covariances are stored in training: ``"shared"`` (one for each
                mini-batch, which is fastest), ``"tracked"``, ``"full"`` or ``"diagonal"``.
                Predictions have one for each sample, diagonal if that was chosen and full if not.
            members: networks in an ensemble, trained together from other initial weights. Their
                means are averaged, and the spread of these is added to their covariance.
            calibrate: fit the size of covariances to the errors on held-out data, by
                ``covary.uncertainty.calibration.fit_variance`` or ``fit_logits``.
            folds: of the cross-validation that holds out data to choose the noise and to
                ``calibrate``; 0 takes a single validation part of ``validation_fraction`` instead,
                which is quicker, and which ``early_stopping`` always takes.
            epochs: passes over the training data; None: as make 3000 steps, and 10 at least.
            batch_size: samples in a step.
            lr: learning rate of AdamW, at its highest where it has a schedule.
            weight_decay: how strongly weights are pulled to zero, per step, times ``lr``.
            schedule: of the learning rate: ``"one-cycle"`` (up for 30% of the steps, then down to
                0), ``"cosine"`` (down to 0) or ``"constant"``.
            early_stopping: stop when the loss on a validation part has not fallen for ``patience``
                epochs, and go back to the weights with which it was lowest. Goes best with a
                ``"constant"`` schedule, which does not depend on ``epochs``.
            validation_fraction: of the data, set aside where ``early_stopping`` or ``folds=0`` need
                it. With less than 5 such samples, or less than 10 for cross-validation, nothing is
                chosen, calibrated or stopped: the noise is 0.1, and training takes all its epochs.
            patience: epochs to wait for a lower validation loss.
            random_state: decides initial weights, the order of samples and what is held out.
            verbose: show progress.
        """
        self.hidden, self.activation, self.noise = hidden, activation, noise
        self.covariance, self.members, self.calibrate = covariance, members, calibrate
        self.folds, self.epochs, self.batch_size = folds, epochs, batch_size
        self.lr, self.weight_decay, self.schedule = lr, weight_decay, schedule
        self.early_stopping, self.validation_fraction = early_stopping, validation_fraction
        self.patience, self.random_state, self.verbose = patience, random_state, verbose

    _objective: Callable[[nn.Module], nn.Module]  # the loss of a network of standardised data
    _calibration: Callable[[Moments, Tensor], nn.Module]  # that held-out samples ask for

    @abstractmethod
    def _scores(self, out: Moments, y: Tensor, *, calibrated: bool) -> Tensor:
        """(n,) how well each sample is predicted, for the choice of noise."""

    def _fit(
        self,
        x: Tensor,
        y: Tensor,
        X_std: ArrayLike | None,
        outputs: int,
        strata: NDArray[Any] | None,
    ) -> None:
        """Choose the noise, calibrate and train, on inputs (n, d) and labels or targets."""
        self._check_parameters()
        self._spread = x.std(0, correction=0)
        std = self._errors(X_std, x)
        self._widest = max(outputs, *self.hidden, 1)
        random = check_random_state(self.random_state)
        seed, split_seed = (int(number) for number in random.randint(2**31 - 1, size=2))
        task = _Task(x, y, std, outputs, seed)
        self._noises = self._candidates()
        self.noise_ = self._noises[0] if len(self._noises) == 1 else _USUAL_NOISE
        self.noise_scores_: dict[float, float] = {}
        self.calibration_: nn.Module | None = None
        parts = self._parts(len(x), split_seed, strata)
        nets = self._hold_out(task, parts) if parts else []
        if not (parts and self.early_stopping):
            everything = np.arange(len(x))
            jobs = [_Job(self.noise_, 0, member) for member in range(self.members)]
            nets = self._train(task, jobs, [Fold(everything, everything[:0])])
        self.network_ = (nets[0] if self.members == 1 else Mixture(nets)).eval()

    def _hold_out(self, task: _Task, parts: Sequence[Fold]) -> list[nn.Module]:
        """Choose the noise and calibrate on what is held out; the networks of that noise."""
        target = torch.cat([task.y[part.held_out] for part in parts])
        noises, trained = self._noises, dict[_Job, nn.Module]()

        def train(noises: Sequence[float], members: range) -> None:
            jobs = [_Job(*job) for job in itertools.product(noises, range(len(parts)), members)]
            if jobs:
                trained.update(zip(jobs, self._train(task, jobs, parts), strict=True))

        def held_out(noise: float, members: range) -> Moments:
            """What an ensemble says of samples that it has not seen, part after part."""
            found = []
            for i, part in enumerate(parts):
                nets = [trained[_Job(noise, i, member)] for member in members]
                inputs = task.inputs(part.held_out)
                found.append(combined([self._moments(net, inputs) for net in nets]))
            return gathered(found)

        # The noise is chosen by one network for each fold; the rest of the ensemble follows.
        first = range(1 if len(noises) > 1 else self.members)
        train(noises, first)
        scores = [self._score_of(held_out(noise, first), target) for noise in noises]
        self.noise_scores_ = dict(zip(noises, scores, strict=True))
        # The first of equals, which has the least noise; what is no number is never the best.
        self.noise_ = noises[int(np.argmax(np.nan_to_num(scores, nan=-np.inf)))]
        if self.calibrate or self.early_stopping:
            train([self.noise_], range(len(first), self.members))
        if self.calibrate:
            self.calibration_ = self._calibration(
                held_out(self.noise_, range(self.members)), target
            )
        return [trained[job] for job in trained if job.noise == self.noise_ and job.part == 0]

    def _check_parameters(self) -> None:
        if activations.get(self.activation).neuron is not None:
            raise ValueError(
                "Estimators choose noise on the scale of standardised inputs, which spiking "
                f"neurons ({self.activation}) do not fire by. Train them with covary.mlp(..., "
                "activation='lif', batch_norm=True) or covary train --activation lif."
            )
        if not 0 < self.validation_fraction < 1:
            raise ValueError(
                f"validation_fraction must be between 0 and 1, got {self.validation_fraction}."
            )
        if isinstance(self.hidden, int):
            raise ValueError(f"hidden must be a sequence such as (50,), got {self.hidden}.")
        least = {"epochs": "1 or more, or None", "patience": "1 epoch or more"}
        for name in ("patience", "epochs", "batch_size", "members"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be {least.get(name, '1 or more')}, got {value}.")
        if self.folds < 0 or self.folds == 1:
            raise ValueError(
                f"folds must be 2 or more, or 0 for a single validation part, got {self.folds}."
            )

    def _candidates(self) -> tuple[float, ...]:
        """The noises to choose from, the least first."""
        if isinstance(self.noise, str) and self.noise == "auto":
            return NOISES
        noises = self.noise if isinstance(self.noise, Sequence | np.ndarray) else [self.noise]
        if isinstance(noises, str) or len(noises) == 0:
            raise ValueError(
                f"noise must be a number, several to choose from, or 'auto', got {self.noise!r}."
            )
        return tuple(sorted({float(noise) for noise in noises}))

    def _parts(self, n: int, seed: int, strata: NDArray[Any] | None) -> list[Fold]:
        """The folds by which something is chosen or fitted; none if nothing is, or rows are few."""
        if not (self.early_stopping or self.calibrate or len(self._noises) > 1):
            return []
        if self.folds and not self.early_stopping:
            folds = min(self.folds, n // 2)
            return cross_validation(n, folds, seed, strata) if n >= 2 * _LEAST_VALIDATION else []
        size = round(self.validation_fraction * n)
        if size < _LEAST_VALIDATION or n - size < _LEAST_VALIDATION:
            return []
        return [one_part(n, size, seed, strata)]

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

    def _train(self, task: _Task, jobs: Sequence[_Job], parts: Sequence[Fold]) -> list[nn.Module]:
        """A network for each job, raw inputs -> moments of raw targets, all trained at once."""
        x, y, _, outputs, first_seed = task
        data = [
            Standardized(x[rows], y[rows], task.errors(rows))
            for rows in (part.training for part in parts)
        ]
        samples = len(data[0].x)
        seeds = [first_seed + job.member for job in jobs]
        nets = [
            self._network(x.shape[1], outputs, job.noise, seed)
            for job, seed in zip(jobs, seeds, strict=True)
        ]
        loss = ReplicaLoss([self._objective(net) for net in nets])
        batches = ReplicaBatches(
            torch.cat([part.x for part in data]),
            torch.cat([part.y for part in data]),
            torch.stack([torch.arange(samples) + job.part * samples for job in jobs]),
            self.batch_size,
            seeds=seeds,
            std=None if task.std is None else torch.cat([cast(Tensor, part.std) for part in data]),
        )
        config = TrainingConfig(
            epochs=self.epochs or max(_LEAST_EPOCHS, round(_USUAL_STEPS / len(batches))),
            batch_size=self.batch_size,
            lr=self.lr,
            weight_decay=self.weight_decay,
            optimizer="adamw",
            schedule=self.schedule,
            seed=first_seed,
        )
        stopping = None
        if self.early_stopping and len(parts[0].held_out):
            rows = parts[0].held_out
            held_out = [data[0].standardize(x[rows]), data[0].targets(y[rows])]
            if task.std is not None:
                held_out.append((task.std[rows] / data[0].standardize.scale).float())
            stopping = EarlyStopping(
                self._as_predicting(loss.replicas),
                held_out,
                rows_at_a_time=self._rows_at_a_time(),
                patience=self.patience,
            )
        self.history_ = fit(
            loss,
            batches,
            config,
            validate=stopping.validate if stopping else None,
            stop=stopping.stop if stopping else None,
            display=_progress() if self.verbose else None,
        )
        self.n_iter_ = len(self.history_)
        if stopping:
            stopping.restore()
        trained = [cast(nn.Module, objective.net) for objective in loss.unstack()]
        return [
            self._as_predicting(nn.Sequential(data[job.part].around(net))).double()
            for job, net in zip(jobs, trained, strict=True)
        ]

    def _as_predicting(self, net: Network) -> Network:
        return with_covariance(net, "diagonal" if self.covariance == "diagonal" else "full")

    def _rows_at_a_time(self) -> int:
        together = max(len(self._noises), self.members)
        return max(1, _NUMBERS_AT_A_TIME // (together * self._widest**2))

    def _moments(self, net: nn.Module, x: Tensor | Moments) -> Moments:
        net.eval()
        with torch.no_grad():
            return gathered([net(some) for some in in_batches(x, self._rows_at_a_time())])

    def _score_of(self, out: Moments, y: Tensor) -> float:
        if not self.calibrate:
            return float(self._scores(out, y, calibrated=False).mean())
        if not (out.mean.isfinite().all() and out.variance.isfinite().all()):
            return -np.inf
        calibrated = self._calibration(out, y)(out)
        return float(self._scores(calibrated, y, calibrated=True).mean())

    def _calibrated(self, calibrated: bool | None) -> bool:
        """Whether to calibrate predictions: as asked for, by default if there is a calibration."""
        check_is_fitted(self)
        if calibrated and self.calibration_ is None:
            raise ValueError(
                "There is no calibration to apply: fit with calibrate=True, and 10 samples or more."
            )
        return self.calibration_ is not None if calibrated is None else calibrated

    def _errors(self, X_std: ArrayLike | None, x: Tensor) -> Tensor | None:
        """Checked errors of inputs (n, d), of their shape; None without any."""
        names = getattr(self, "feature_names_in_", None)
        return checked_errors(X_std, x, self._spread, names)

    def _inputs(self, X: ArrayLike, X_std: ArrayLike | None) -> Tensor | Moments:
        """Inputs as the network takes them: with errors, if they are given."""
        x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        return measured(x, self._errors(X_std, x))

    def _outputs(
        self, X: ArrayLike, calibrated: bool | None, X_std: ArrayLike | None
    ) -> Iterator[Moments]:
        """What the network gives, as many rows at a time as fit into memory."""
        wanted = self._calibrated(calibrated)
        for some in in_batches(self._inputs(X, X_std), self._rows_at_a_time()):
            with torch.no_grad():
                out = self.network_(some)
                if wanted and self.calibration_ is not None:
                    out = self.calibration_(out)
            yield out

    def moments(
        self, X: ArrayLike, calibrated: bool | None = None, *, X_std: ArrayLike | None = None
    ) -> Moments:
        """Mean (n, outputs) and covariance of the network's output, in double precision.

        Args:
            X: inputs (n, d).
            calibrated: with the calibration or without; by default with it if there is one.
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        return gathered(list(self._outputs(X, calibrated, X_std)))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "network_")

    def budget(self, X: ArrayLike, *, X_std: ArrayLike | None = None) -> Budget:
        """What the variance of the output is made of: a part (n, outputs) for each source.

        Sources are noise of the network, and errors of the inputs (``"input"``). The parts add up
        to the variance without the calibration. Variances at nonlinearities are measured by draws
        of these inputs.

        Args:
            X: inputs (n, d).
            X_std: standard deviations of the errors of the inputs, (d,) or (n, d), on their scale.
        """
        check_is_fitted(self)
        inputs = self._inputs(X, X_std)
        if self.members > 1:
            raise ValueError(
                f"budget takes apart one network, and this ensemble has {self.members}: fit with "
                "members=1."
            )
        if self.noise_ == 0 and X_std is None:
            raise ValueError(
                "Nothing varies here, so there is no budget: the noise is 0, and the inputs have "
                "no errors. Pass X_std, or fit with noise."
            )
        net = convert(self.network_, variances="propagated")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", TrackingWarning)  # measured on these inputs: as meant
            out: Moments = net(inputs)
            return out.budget()


def _progress() -> Display:
    from rich.console import Console

    return terminal_or_lines(Console())
