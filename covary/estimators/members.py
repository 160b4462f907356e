"""The networks of an estimator: recipes, folds and members, all trained as one batched model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from covary.activations import MomentActivation
from covary.covariance import Full
from covary.estimators.data import Fold
from covary.inputs import in_batches
from covary.models import mlp, with_covariance
from covary.moments import Moments
from covary.nn import Rescale, Standardize
from covary.training import Display, Epoch, TrainingConfig, fit
from covary.training.batches import filling
from covary.training.objectives import measured
from covary.training.replicas import ReplicaBatches, ReplicaLoss

# Numbers in the covariances that are computed at a time: 128 MB in double precision.
_NUMBERS_AT_A_TIME = 2**24
# A recipe of less of the largest weight is left out: it costs as much and says little.
_LEAST_WEIGHT = 0.1
# Held-out rows that are looked at: more say little more.
_MOST_HELD_OUT = 20_000
_ROWS_THAT_SHARE = 4096  # a covariance, where the means of training rows are wanted alone


class Recipe(NamedTuple):
    """In what networks of an estimator differ: noise, and how weights are pulled to 0."""

    noise: float
    weight_decay: float


@dataclass(frozen=True, eq=False)
class TrainingTable:
    """What is to be learnt.

    Attributes:
        x: raw inputs (n, d).
        y: raw targets (n, t), or labels (n,).
        std: (n, d) standard deviations of the errors of the inputs, if they have any.
        outputs: of a network: targets, or classes.
        seed: of initial weights and orders.
    """

    x: Tensor
    y: Tensor
    std: Tensor | None
    outputs: int
    seed: int

    def inputs(self, rows: Tensor) -> Tensor | Moments:
        """Some inputs, with errors if they have any."""
        return measured(self.x[rows], None if self.std is None else self.std[rows])


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What all networks of an estimator have in common.

    Attributes:
        hidden: units of each hidden layer.
        activation: of all hidden layers.
        covariance: how covariances are stored in training.
        objective: the loss of a network of standardised data.
        has_noisy_inputs: whether noise is on the inputs too, or before activations alone.
    """

    hidden: tuple[int, ...]
    activation: str | MomentActivation
    covariance: str
    objective: Callable[[nn.Module], nn.Module]
    has_noisy_inputs: bool = True

    def network(self, inputs: int, outputs: int, noise: float, seed: int) -> nn.Module:
        """The same initial weights for every noise, so that noise makes the difference."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return mlp(
                [inputs, *self.hidden, outputs],
                activation=self.activation,
                noise=[noise * self.has_noisy_inputs, *[noise] * len(self.hidden)],
                covariance=self.covariance,
            )

    def predicting(self, net: nn.Module) -> nn.Module:
        """The network with a covariance for each sample."""
        name = "diagonal" if self.covariance == "diagonal" else "full"
        return with_covariance(net, name).eval()


class Member(nn.Module):
    """Networks of several recipes as one: standardised inputs -> weighted averages of Moments."""

    weights: Tensor

    def __init__(self, nets: Sequence[nn.Module], weights: Tensor) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.register_buffer("weights", weights)

    def forward(self, x: Tensor | Moments) -> Moments:
        """(B, d) -> Moments (B, t)."""
        found = [net(x) for net in self.nets]
        mean = sum(w * each.mean for w, each in zip(self.weights, found, strict=True))
        matrix = sum(
            w * each.covariance_matrix for w, each in zip(self.weights, found, strict=True)
        )
        return Moments(cast(Tensor, mean), Full(cast(Tensor, matrix)))


class Outputs(NamedTuple):
    """What members say of n rows, on the standardised scale.

    Attributes:
        mean: (n, t) the average of their means.
        emergent: (n, t, t) the average of their covariances.
        spread: (n, t, t) the covariance of the means of members that saw the same rows, as of a
            draw of one more of them; averaged over folds.
        errors: (n, t, t) what errors of the inputs add to ``emergent``; 0 without any.
        exact: (n, t) the average of their means for the same inputs without errors.

    ``emergent`` and ``spread`` are those of inputs without errors, too.
    """

    mean: Tensor
    emergent: Tensor
    spread: Tensor
    errors: Tensor
    exact: Tensor


class Ensemble(nn.Module):
    """Raw inputs -> Moments of raw targets or of logits, by all members.

    The covariance is the average of the members' own, plus their spread.

    Args:
        standardize: raw inputs -> standardised ones.
        members: standardised inputs -> Moments; one fold after the other.
        folds: how many there are.
        rescale: Moments of standardised targets -> those of raw ones; None for logits.
    """

    def __init__(
        self,
        standardize: Standardize,
        members: Sequence[nn.Module],
        folds: int,
        rescale: Rescale | None,
    ) -> None:
        super().__init__()
        self.standardize, self.members = standardize, nn.ModuleList(members)
        self.folds, self.rescale = folds, rescale

    def forward(self, x: Tensor | Moments) -> Moments:
        """(B, d) -> Moments (B, t)."""
        found = self.outputs(x)
        moments = Moments(found.mean, Full(found.emergent + found.errors + found.spread))
        return moments if self.rescale is None else self.rescale(moments)

    @torch.no_grad()
    def outputs(self, x: Tensor | Moments) -> Outputs:
        """What members say of raw inputs (n, d), as many rows at a time as fit into memory."""
        parts = []
        for some in in_batches(x, _rows_at_a_time(self.members)):
            given = self.standardize(some)
            means, matrices = _of_each(self.members, given)
            exact_means, exact = means, matrix = means, matrices.mean(0)
            if isinstance(given, Moments):
                exact_means, matrices = _of_each(self.members, given.mean)
                exact = matrices.mean(0)
            parts.append(_outputs(means, matrix, exact_means, exact, self.folds))
        return Outputs(*(torch.cat(each) for each in zip(*parts, strict=True)))

    @torch.no_grad()
    def means_of_folds(self, x: Tensor) -> Tensor:
        """(folds, n, t) standardised means of raw inputs (n, d), averaged over a fold's members.

        Rows share covariances, as in training, which costs far less than one for each.
        """
        shared = [with_covariance(member, "shared") for member in self.members]
        some = self.standardize(x).split(_ROWS_THAT_SHARE)
        means = torch.stack([torch.cat([net(each).mean for each in some]) for net in shared])
        return means.view(self.folds, -1, *means.shape[1:]).mean(1)


class TrainedMembers(NamedTuple):
    """Trained members, and what they say of rows that they have not seen.

    Attributes:
        ensemble: all members.
        fold: (n,) by whose members each row is held out.
        rows: (m,) those whose held-out predictions are looked at: all, or many.
        held_out: of these rows, by the members of their folds.
        weights: of the recipes.
        errors: of each recipe, the loss of its held-out predictions.
        history: each epoch, averaged over networks.
    """

    ensemble: Ensemble
    fold: Tensor
    rows: Tensor
    held_out: Outputs
    weights: dict[Recipe, float]
    errors: dict[Recipe, float]
    history: list[Epoch]


def train(
    task: TrainingTable,
    architecture: Architecture,
    folds: Sequence[Fold],
    recipes: Sequence[Recipe],
    *,
    members: int,
    config: TrainingConfig,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    display: Display | None = None,
) -> TrainedMembers:
    """Networks of all recipes, ``members`` for each fold, that are trained without its rows.

    Recipes are weighted so that the loss of held-out rows, ``loss_of`` the mean (n, t) and targets
    of the network's scale, is least.
    """
    standardize = Standardize.of(task.x)
    rescale = Rescale.of(task.y) if task.y.is_floating_point() else None
    x, y = standardize(task.x), task.y
    if rescale is not None:
        y = ((y - rescale.shift) / rescale.scale).float()
    seeds = [task.seed + number for number in range(len(folds) * members)]
    nets = [
        architecture.network(x.shape[1], task.outputs, recipe.noise, seed)
        for seed in seeds
        for recipe in recipes
    ]
    loss = ReplicaLoss(
        [architecture.objective(net) for net in nets],
        decays=[recipe.weight_decay for _ in seeds for recipe in recipes],
    )
    batches = ReplicaBatches(
        x,
        y,
        _rows_of_each(folds, members, config.batch_size, task.seed).repeat_interleave(
            len(recipes), 0
        ),
        config.batch_size,
        seeds=[seed for seed in seeds for _ in recipes],
        std=None if task.std is None else (task.std / standardize.scale).float(),
    )
    history = fit(loss, batches, config, display=display)
    trained = iter(architecture.predicting(cast(Any, one).net) for one in loss.unstack())
    table = [[next(trained) for _ in recipes] for _ in seeds]  # members, then recipes
    looked_at = _held_out(folds, task.seed)
    rows = torch.cat(looked_at).sort().values
    means, matrices = _unseen(task, standardize, looked_at, table)
    y = (y.to(means) if y.is_floating_point() else y)[rows]
    averages = means.mean(1)
    weights = _weights(averages, y, loss_of)
    kept = [c for c, weight in enumerate(weights.tolist()) if weight > 0]
    mixed, matrix = torch.tensordot(weights, means, 1), torch.tensordot(weights, matrices, 1)
    held_out = _outputs(mixed, matrix, mixed, matrix)
    if task.std is not None:
        without = _unseen(replace(task, std=None), standardize, looked_at, table)
        held_out = _outputs(mixed, matrix, *(torch.tensordot(weights, e, 1) for e in without))
    # Of new inputs, which may be far from all these, in double precision.
    standardize = standardize.double()
    chosen = [Member([row[c].double() for c in kept], weights[kept]) for row in table]
    fold_of = torch.zeros(len(task.x), dtype=torch.long)
    for number, fold in enumerate(folds):
        fold_of[fold.held_out] = number
    return TrainedMembers(
        Ensemble(standardize, chosen, len(folds), rescale),
        fold_of,
        rows,
        held_out,
        {recipes[c]: float(weights[c]) for c in kept},
        {recipe: float(loss_of(mean, y)) for recipe, mean in zip(recipes, averages, strict=True)},
        history,
    )


def _rows_of_each(folds: Sequence[Fold], members: int, batch: int, seed: int) -> Tensor:
    """(folds * members, rows) what each member is trained on.

    Those of its fold, but for a few that are left out, other ones for each member, so that all
    batches have the same size.
    """
    kept = filling(len(folds[0].training), batch)
    random = np.random.default_rng(seed)
    chosen = [random.permutation(fold.training)[:kept] for fold in folds for _ in range(members)]
    return torch.as_tensor(np.stack(chosen))


def _held_out(folds: Sequence[Fold], seed: int) -> list[Tensor]:
    """The held-out rows of each fold, or as many of them as are looked at."""
    random = np.random.default_rng(seed)
    most = math.ceil(_MOST_HELD_OUT / len(folds))
    return [torch.as_tensor(random.permutation(fold.held_out)[:most]) for fold in folds]


@torch.no_grad()
def _unseen(
    task: TrainingTable,
    standardize: Standardize,
    held_out: Sequence[Tensor],
    table: Sequence[Sequence[nn.Module]],
) -> tuple[Tensor, Tensor]:
    """What networks say of rows that they have not seen, by recipe: means (c, m, n, t), and
    covariances (c, n, t, t) averaged over the m members of the fold that holds a row out.

    Computed in single precision, in which they were trained: these rows are like those.
    """
    members = len(table) // len(held_out)
    means, matrices = [], []
    for number, rows in enumerate(held_out):
        own = table[number * members : (number + 1) * members]
        for some in in_batches(task.inputs(rows), _rows_at_a_time(own[0][0])):
            given = standardize(some)
            found = [_of_each(row, given) for row in own]
            means.append(torch.stack([each for each, _ in found]))
            matrices.append(torch.stack([each for _, each in found]).mean(0))
    order = torch.cat(list(held_out)).argsort()
    mean, matrix = torch.cat(means, 2)[:, :, order], torch.cat(matrices, 1)[:, order]
    return mean.transpose(0, 1).double(), matrix.double()


def _rows_at_a_time(net: nn.Module) -> int:
    """How many rows of covariances of the widest layer fit into memory."""
    widest = max([1, *(value.shape[-1] for value in net.parameters())])
    return max(1, _NUMBERS_AT_A_TIME // widest**2)


def _of_each(nets: Iterable[nn.Module], x: Tensor | Moments) -> tuple[Tensor, Tensor]:
    """Means (m, n, t) and covariances (m, n, t, t) of networks."""
    found = [net(x) for net in nets]
    means = torch.stack([each.mean for each in found])
    return means, torch.stack([each.covariance_matrix for each in found])


def _outputs(
    means: Tensor, matrix: Tensor, exact_means: Tensor, exact_matrix: Tensor, folds: int = 1
) -> Outputs:
    """Of means (m, n, t) and an average covariance, with errors of the inputs and without them."""
    of_folds = exact_means.unflatten(0, (folds, -1))  # type: ignore[no-untyped-call]
    gap = of_folds - of_folds.mean(1, keepdim=True)
    spread = torch.einsum("fmni,fmnj->nij", gap, gap) / (folds * max(1, gap.shape[1] - 1))
    errors = matrix - exact_matrix
    return Outputs(means.mean(0), exact_matrix, spread, errors, exact_means.mean(0))


def _weights(means: Tensor, y: Tensor, loss_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """(c,) shares of recipes, of held-out means (c, n, t), under which the loss is least."""
    logs = torch.zeros(len(means), dtype=means.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=50, line_search_fn="strong_wolfe")

    def mixed(shares: Tensor) -> Tensor:
        return loss_of(torch.tensordot(shares, means, 1), y)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mixed(logs.softmax(0)).log() + 1e-4 * logs.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    shares = logs.detach().softmax(0)
    shares = torch.where(shares < _LEAST_WEIGHT * shares.max(), 0.0, shares)
    return shares / shares.sum()
