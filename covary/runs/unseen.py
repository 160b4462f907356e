"""Training rows as new ones: seen by networks like a run's own that were trained without them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from covary import training
from covary.covariance import class_name
from covary.models import noisy_layers, with_covariance
from covary.nn import Lift
from covary.progress import Steps
from covary.runs.directory import Run
from covary.runs.training import objective_of
from covary.training.batches import filling, shuffled
from covary.training.replicas import ReplicaBatches, ReplicaLoss

_FOLDS = 5


def without_a_fold(
    run: Run, net: nn.Sequential, rows: Tensor, progress: Steps | None
) -> list[tuple[nn.Sequential, Tensor]]:
    """Networks trained as a run's was, each without a fifth of its training rows; and those rows.

    All are trained as one, on the processor and in 32 bits. Their initial weights are others than
    those of the run's network; the scales, the noise and how covariances are stored are the same,
    but that they are exact where its own are tracked, with corrections that hold for its weights
    alone. There are none if training diverges.

    Args:
        run: of a table.
        net: its network, as it predicts.
        rows: (n,) training rows.
        progress: shows how far training is.
    """
    config, data = run.config, run.data
    # A limit on the norm of the gradient is one of all together.
    how = replace(config.training, compile=False, clip=config.training.clip * math.sqrt(_FOLDS))
    # A key beyond any epoch, and not that of the validation rows, nor of those that are tracked.
    dealt = [shuffled(len(rows), how.seed, 2**31 + 2)[fold::_FOLDS] for fold in range(_FOLDS)]
    seeds = [how.seed + 1 + fold for fold in range(_FOLDS)]
    size = filling(len(rows) - len(dealt[0]), how.batch_size)
    others = [torch.cat([*dealt[:fold], *dealt[fold + 1 :]])[:size] for fold in range(_FOLDS)]
    batches = ReplicaBatches(
        data.x[rows],
        data.y[rows],
        torch.stack(others),
        how.batch_size,
        seeds=seeds,
        std=None if data.x_std is None else data.x_std[rows],
    )
    steps = how.epochs * len(batches)
    display = None if progress is None else _Bar(progress(range(steps), "errors"))
    with torch.random.fork_rng(devices=[]):
        loss = ReplicaLoss([objective_of(_alike(run, net, seed), config) for seed in seeds])
        torch.manual_seed(how.seed)  # of dropout masks
        try:
            training.fit(loss, batches, how, display=display)
        except training.DivergedError:
            return []
        except training.StoppedError as stopped:
            raise KeyboardInterrupt from stopped
    nets = [_predicting(one.get_submodule("net"), net) for one in loss.unstack()]
    return [(one, rows[fold]) for one, fold in zip(nets, dealt, strict=True)]


def covariance_of(net: nn.Sequential) -> str:
    """How a network stores its covariances."""
    return str(next(layer.covariance for layer in net if isinstance(layer, Lift)))


def _alike(run: Run, net: nn.Sequential, seed: int) -> nn.Sequential:
    """A network of the same configuration and scales, newly initialised."""
    torch.manual_seed(seed)
    found = run.config.model.build()
    for name in ("standardize", "rescale"):
        found.get_submodule(name).load_state_dict(net.get_submodule(name).state_dict())
    return found


def _predicting(trained: nn.Module, net: nn.Sequential) -> nn.Sequential:
    """The trained network with noise and covariances as another one has them."""
    covariance = covariance_of(net)
    name = "full" if class_name(covariance) == "tracked" else covariance
    found = with_covariance(trained, name).eval()
    for layer, other in zip(noisy_layers(found), noisy_layers(net), strict=True):
        layer.noise = other.noise
    assert isinstance(found, nn.Sequential)
    return found


class _Bar(training.Silent):
    """Goes on with a progress bar at each step."""

    def __init__(self, steps: Iterator[int]) -> None:
        self._steps = steps

    def step(self, *_: object) -> None:
        next(self._steps, None)
