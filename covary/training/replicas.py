"""Many small networks trained as one: other seeds, other splits of the data, other noise.

A step of a small network costs more in Python and kernel launches than in arithmetic, so replicas
of one architecture make every step together. They share no numbers: each ends where it would have
ended alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from covary.activations.activation import positive_variances
from covary.models import have_tracking_buffers, noisy_layers
from covary.nn import Activation, Lift, Noise, Noisy
from covary.nn.protocol import taken
from covary.settings import covariance_is_supervised, is_autocast
from covary.training.batches import count, divided, shuffled

# Parameters and buffers by name, and the noise of each noisy layer.
State = tuple[dict[str, Tensor], Tensor]
# Recording takes as long as a few steps that are not recorded, so the first of a shape is not.
_STEPS_BEFORE_RECORDING = 1
_LEAST_NOISE = 1e-12  # of which a variance can be divided by in float32


class Replicas(nn.Module):
    """R modules of one architecture as one: inputs (R, ...) give outputs (R, ...).

    Parameters, buffers and the noise of ``covary.nn.Lift`` and ``covary.nn.Noise`` may differ
    between replicas, and nothing else. They are copied; ``state_dict`` has them stacked.

    Args:
        modules: the replicas, be they networks, which map inputs (R, B, *shape) to Moments with
            R in front, or whatever else is made of tensors, such as a network with its loss.

    Examples:
        >>> import covary, torch
        >>> replicas = Replicas([covary.mlp([4, 8, 3], noise=sigma) for sigma in (0.1, 0.2)])
        >>> replicas(torch.ones(2, 5, 4)).covariance_matrix.shape
        torch.Size([2, 5, 3, 3])
    """

    noises: Tensor

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        if len(modules) == 0:
            raise ValueError("Replicas need one module at least, got none.")
        for module in modules:
            have_tracking_buffers(module)  # none can be made within vmap
        _check_alike(modules)
        self.size = len(modules)
        tensors = [_tensors(module) for module in modules]
        self.stacked = _replaced(
            modules[0], lambda name, _: torch.stack([each[name].detach() for each in tensors])
        )
        for layer in self.stacked.modules():
            if isinstance(layer, Lift):
                layer.fidelity = None  # theirs, not of what they are trained to
        sigmas = [[layer.noise for layer in noisy_layers(module)] for module in modules]
        # float64, whatever the network has: unstack() gives the very numbers back.
        noises = torch.tensor(sigmas, dtype=torch.float64).reshape(self.size, -1)
        self.register_buffer("noises", noises, persistent=False)

    def forward(self, *inputs: Tensor) -> Any:
        """What each replica makes of its part of the inputs, each (R, ...)."""
        for given in inputs:
            if given.shape[:1] != (self.size,):
                raise ValueError(
                    f"{self.size} replicas take inputs of shape ({self.size}, batch, ...), got "
                    f"{tuple(given.shape)}. The same for all: x.expand({self.size}, *x.shape)."
                )
        return self.call(self.state(), *inputs)

    def state(self) -> State:
        """All in which replicas differ, each (R, ...)."""
        named = *self.stacked.named_parameters(), *self.stacked.named_buffers()
        return dict(named), self.noises

    def call(self, state: State, *inputs: Tensor) -> Any:
        """What replicas of this state make of the inputs: a function of its arguments."""

        def one(state: State, *inputs: Tensor) -> Any:
            tensors, noises = state
            with _noise_of(self.stacked, noises):
                return functional_call(self.stacked, tensors, inputs)

        return vmap(one, randomness="different")(state, *inputs)

    def unstack(self) -> list[nn.Module]:
        """The replicas one by one, as modules of their own that share nothing with these."""
        return [self._replica(index) for index in range(self.size)]

    def _replica(self, index: int) -> nn.Module:
        replica = _replaced(self.stacked, lambda _, value: value.detach()[index].clone())
        for layer, noise in zip(noisy_layers(replica), self.noises[index].tolist(), strict=True):
            layer.noise = noise
        return replica

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Parameters, buffers and noises of all replicas, (R, *shape), by their usual names."""
        with _noise_of(self.stacked, self.noises.T):
            return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        named = self.stacked.named_modules(prefix=f"{prefix}stacked")
        noisy = [(path, layer) for path, layer in named if isinstance(layer, Noisy)]
        for index, (path, layer) in enumerate(noisy):
            saved = state_dict.get(f"{path}.noise")
            if saved is not None and saved.shape == (self.size,):
                taken(saved.tolist(), self.noises[:, index].tolist(), path)
                self.noises[:, index] = saved
                # The layer's own number is not used, but it loads one.
                layer.noise, state_dict[f"{path}.noise"] = saved[0].item(), saved[0]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """How many there are."""
        return f"size={self.size}"


class ReplicaLoss(nn.Module):
    """The losses of R networks as one objective for ``covary.training.fit``.

    The loss is the *sum* over replicas of what each one's objective gives, so every parameter gets
    the gradient that it would get if its network were alone, and Adam takes the same step. (A limit
    on the norm of the gradient would count all replicas together.) The statistic is the average.

    The operations of a step are recorded once for each shape, mode, covariance and switch, and run
    from then on, since what finds them (vmap, autograd, modules) takes longer than they do. Other
    settings of layers, such as a dropout rate, are taken as they are when they are recorded.

    Args:
        objectives: such as ``covary.training.RegressionLoss(net)``, of one architecture.
        decays: of each replica, by how much its weight decay is multiplied; 1 by default.
    """

    def __init__(
        self, objectives: Sequence[nn.Module], *, decays: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.replicas = Replicas(objectives)
        self.decays = None if decays is None else torch.tensor(decays)
        self.statistic = objectives[0].statistic
        self._parts = tuple(self.replicas.modules())  # without itself, so that it is freed
        self._noises_before = _noises_before_activations(self.replicas)
        self._seen: dict[Hashable, int] = {}
        self._steps: dict[Hashable, Callable[..., Any]] = {}

    def forward(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and statistic, scalars, of inputs (B, R, ...) and labels or targets (B, R, ...).

        And of errors of the inputs, where they are known. Samples come first, so that the training
        loop counts and divides them as ever.
        """
        inputs = tuple(each.transpose(0, 1) for each in batch)
        step = self._step(inputs) if torch.is_grad_enabled() else None
        if step is None:
            losses, statistics = self.replicas(*inputs)
            return losses.sum(), statistics.detach().mean()
        tensors, noises = self.replicas.state()
        values = [tensor.detach() for tensor in tensors.values()]
        with torch.no_grad():
            loss, statistic, *gradients = step(noises, *values, *inputs)
        trained = [tensor for tensor in tensors.values() if tensor.requires_grad]
        loss = _LossOfGradients.apply(loss, gradients, *trained)  # type: ignore[no-untyped-call]
        return loss, statistic

    def unstack(self) -> list[nn.Module]:
        """The objectives one by one; ``objective.net`` are the networks."""
        return self.replicas.unstack()

    def _step(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any] | None:
        """The recorded step for such tensors, once it is worth its recording."""
        # All that decides which operations a step has.
        key = (
            *((value.shape, value.dtype, value.device) for value in inputs),
            covariance_is_supervised(),
            self._is_always_noisy(),
            is_autocast(inputs[0].device),
            *(
                one is not None and one.requires_grad
                for part in self._parts
                for one in part._parameters.values()
            ),
            *((part.training, getattr(part, "covariance", "")) for part in self._parts),
        )
        if key not in self._steps:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] <= _STEPS_BEFORE_RECORDING:
                return None
            self._steps[key] = self._record(inputs)
        return self._steps[key]

    def _record(self, inputs: tuple[Tensor, ...]) -> Callable[..., Any]:
        """The operations of a step: noises, other state and batch -> loss, statistic, gradients."""
        tensors, noises = self.replicas.state()
        trained = [name for name, tensor in tensors.items() if tensor.requires_grad]

        def step(noises: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
            values, inputs = dict(zip(tensors, given, strict=False)), given[len(tensors) :]
            with torch.enable_grad():
                leaves = {name: values[name].requires_grad_() for name in trained}
                losses, statistics = self.replicas.call((values | leaves, noises), *inputs)
                loss = losses.sum()
                gradients = torch.autograd.grad(loss, list(leaves.values()))
            return loss.detach(), statistics.detach().mean(), *gradients

        # Recording runs the step, which must update no buffer and take no random number.
        copies = [tensor.detach().clone() for tensor in tensors.values()]
        device = inputs[0].device
        certain = positive_variances() if self._is_always_noisy() else nullcontext()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), certain:
            recorded = make_fx(step)(noises, *copies, *inputs)
            # The covariance of the output, for one, which no loss of the mean looks at.
            recorded.graph.eliminate_dead_code()
            recorded.recompile()
            return _without_python(recorded, noises, *copies, *inputs)

    def _is_always_noisy(self) -> bool:
        """Whether noise is added right before each activation, by all replicas."""
        before = self._noises_before
        return before is not None and bool((self.replicas.noises[:, before] > _LEAST_NOISE).all())


def _without_python(recorded: torch.fx.GraphModule, *given: Tensor) -> Callable[..., Any]:
    """The same operations, called by TorchScript: the same numbers in two thirds of the time.

    Those of batch norm it does not take; they stay as they are. ``torch.jit.trace`` would keep what
    it makes, megabytes for each network, until the process ends; this is gone with its last use.
    """
    with torch.no_grad():
        try:
            graph, _ = torch._C._create_graph_by_tracing(
                lambda *inputs: recorded(*inputs), given, lambda _: "", True, False
            )
        except (AttributeError, RuntimeError):  # it is not public, and may be gone one day
            return recorded
    made: Callable[..., Any] = torch._C.CompilationUnit().create_function("step", graph)
    return made


class _LossOfGradients(torch.autograd.Function):
    """Gives ``loss`` back, whose gradients with respect to the parameters are known already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad * gradient for gradient in ctx.gradients)


class ReplicaBatches:
    """Batches (B, R, *shape) for R replicas, each with rows of its own in an order of its own.

    Replica r gets what ``TensorBatches(x[rows[r]], y[rows[r]], batch_size, seed=seeds[r])`` gives.

    Args:
        x: inputs (n, *shape) of all replicas together.
        y: labels or targets (n, ...).
        rows: (R, m) which of them each replica trains on.
        batch_size: samples of each replica in a batch; the last of an epoch may have fewer.
        seeds: R whole numbers that decide the orders.
        std: standard deviations of the inputs' errors, of their shape, where they are known.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        rows: Tensor,
        batch_size: int,
        *,
        seeds: Sequence[int],
        std: Tensor | None = None,
    ) -> None:
        if len(x) != len(y):
            raise ValueError(f"Batches need as many targets as inputs, got {len(x)} and {len(y)}.")
        if rows.dim() != 2 or len(rows) != len(seeds):
            raise ValueError(
                f"{len(seeds)} replicas (seeds) need rows of shape ({len(seeds)}, samples), got "
                f"{tuple(rows.shape)}."
            )
        if rows.numel() == 0:
            raise ValueError("There is nothing to train on: 0 samples.")
        self.tensors = (x, y) if std is None else (x, y, std)
        self.rows = rows
        self.batch_size, self.seeds = batch_size, list(seeds)

    def __len__(self) -> int:
        return count(self.rows.shape[1], self.batch_size)

    def epoch(self, epoch: int, *, skip: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """The batches of this epoch but for the first ``skip``."""
        samples = self.rows.shape[1]
        orders = torch.stack([shuffled(samples, seed, epoch) for seed in self.seeds])
        for rows in divided(self.rows.gather(1, orders), self.batch_size, dim=1)[skip:]:
            yield tuple(each[rows].transpose(0, 1) for each in self.tensors)


def _noises_before_activations(replicas: Replicas) -> list[int] | None:
    """Which noisy layers stand right before an activation, if one does before each of them."""
    layers = noisy_layers(replicas.stacked)
    every = [part for _, part in replicas.named_modules(remove_duplicate=False)]
    activations = sum(isinstance(part, Activation) for part in every)
    before = [
        layer
        for chain in every
        if isinstance(chain, nn.Sequential)
        for layer, after in pairwise(chain)
        if isinstance(layer, Noise) and isinstance(after, Activation)
    ]
    if len(before) != activations:
        return None
    return [index for index, layer in enumerate(layers) if any(layer is one for one in before)]


@contextmanager
def _noise_of(module: nn.Module, noises: Tensor) -> Iterator[None]:
    """Within this block the layers have these noises, (layers,), in place of their own."""
    layers = noisy_layers(module)
    own = [layer.noise for layer in layers]
    try:
        for index, layer in enumerate(layers):
            # Under vmap this is a number for each replica, which float does not say.
            layer.noise = noises[index]  # type: ignore[assignment]
        yield
    finally:
        for layer, noise in zip(layers, own, strict=True):
            layer.noise = noise


def _replaced(module: nn.Module, new: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy whose parameters and buffers are what ``new`` makes of their names and values."""
    twin = copy.deepcopy(module)
    made: dict[Tensor, Tensor] = {}  # a tensor that a module has in several places stays one
    for name, value in _tensors(twin).items():
        path, _, last = name.rpartition(".")
        owner = twin.get_submodule(path)
        if value not in made:
            made[value] = new(name, value)
            if isinstance(value, nn.Parameter):
                made[value] = nn.Parameter(made[value], value.requires_grad)
        place: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
        place[last] = made[value]
    return twin


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def _check_alike(modules: Sequence[nn.Module]) -> None:
    first = _architecture(modules[0])
    for index, module in enumerate(modules[1:], start=1):
        for ours, theirs in zip_longest(first, _architecture(module), fillvalue="nothing"):
            if ours != theirs:
                raise ValueError(
                    f"Replicas may differ in parameters, buffers and noise alone, but replica "
                    f"{index} has {theirs} where replica 0 has {ours}."
                )


def _architecture(module: nn.Module) -> list[str]:
    """All of a module but the numbers in it, as lines to compare and to show."""
    lines = []
    for path, part in module.named_modules():
        says = part.extra_repr()
        if isinstance(part, Noisy):
            # Their noise is theirs to choose.
            says = says.replace(f"noise={part.noise:g}", "").removeprefix(", ")
        lines.append(f"{path} = {type(part).__name__}({says})")
    tensors = _tensors(module).items()
    return lines + [f"{name} of shape {tuple(x.shape)} and type {x.dtype}" for name, x in tensors]
