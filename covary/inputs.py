"""Inputs of a model, in which each tensor has a batch, and its outputs by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from covary.moments import Moments

# Positional and named arguments.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def batch_of(inputs: Any, batch_dim: int) -> int:
    """The number of samples in inputs."""
    for value in _leaves(inputs):
        if isinstance(value, Moments):
            return len(value)
        if isinstance(value, Tensor) and value.dim() > batch_dim:
            return value.shape[batch_dim]
    raise ValueError(
        f"There is no tensor with a batch dimension (dimension {batch_dim}) among the inputs of "
        "this network. Of a single sample make a batch of one: x[None]."
    )


def in_batches(x: Tensor | Moments, size: int) -> list[Any]:
    """So many samples at a time, of a tensor or of Moments."""
    return [x[low : low + size] for low in range(0, len(x), size)]


def some(inputs: Any, which: slice, batch_dim: int) -> Any:
    """The same inputs of these samples alone."""
    return _each(
        inputs,
        lambda value: value[(slice(None),) * batch_dim + (which,)],
        lambda moments: moments[which],
        batch_dim,
    )


def repeated(inputs: Any, times: int, batch_dim: int) -> Any:
    """The same inputs with every sample so many times, one copy behind the other."""
    return _each(
        inputs,
        lambda value: value.repeat_interleave(times, batch_dim),
        lambda moments: moments[torch.arange(len(moments)).repeat_interleave(times)],
        batch_dim,
    )


def _each(
    inputs: Any,
    change: Callable[[Tensor], Tensor],
    change_moments: Callable[[Moments], Moments],
    batch_dim: int,
) -> Any:
    """The same with all Moments changed, and every tensor that has a batch dimension."""

    def one(value: Any) -> Any:
        if isinstance(value, Moments):
            return change_moments(value)
        has_batch = isinstance(value, Tensor) and value.dim() > batch_dim
        return change(value) if has_batch else value

    return pytree.tree_map(one, inputs, is_leaf=lambda value: isinstance(value, Moments))


def _leaves(inputs: Any) -> list[Any]:
    """Tensors and Moments of nested inputs."""
    return pytree.tree_leaves(inputs, is_leaf=lambda value: isinstance(value, Moments))


def leaves(outputs: Any) -> dict[str, Any]:
    """Tensors or Moments of nested outputs by the path to them."""
    found, _ = pytree.tree_flatten_with_path(
        outputs, is_leaf=lambda value: isinstance(value, Moments)
    )
    return {pytree.keystr(path) or "output": value for path, value in found}


def device_of(model: nn.Module) -> torch.device:
    """Where the parameters of a model are."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def arguments(model: nn.Module, batch: Any, *, has_labels: bool) -> Inputs:
    """What a model is called with for a batch, on the model's device.

    A tensor is the one input. A dict whose keys are names of parameters of ``forward`` gives these
    by name; any other dict is the one input. A tuple gives positional arguments: all of it, or,
    where labels may follow (batches of a loader), as many as ``forward`` requires.
    """
    parameters = _parameters(model)
    args: tuple[Any, ...] = (batch,)
    named: dict[str, Any] = {}
    if isinstance(batch, tuple | list):
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        needed = sum(p.default is p.empty and p.kind in by_place for p in parameters)
        args = tuple(batch)[: max(1, needed) if has_labels else None]
    elif isinstance(batch, Mapping) and set(batch) <= {each.name for each in parameters}:
        args, named = (), dict(batch)
    device = device_of(model)
    moved: Inputs = pytree.tree_map_only(Tensor, lambda value: value.to(device), (args, named))
    if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(moved)):
        raise TypeError(
            "A batch is a tensor, a tuple of inputs, or a dict of them; got "
            f"{type(batch).__name__} without a tensor."
        )
    return moved


def in_order(model: nn.Module, named: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, in the order in which ``forward`` has them."""
    if len(named) < 2:
        return dict(named)
    names = [each.name for each in _parameters(model)]
    place = {name: names.index(name) if name in names else len(names) for name in named}
    return {name: named[name] for name in sorted(named, key=place.__getitem__)}


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a model's ``forward``."""
    # Of a forward that was replaced on the instance, its own.
    own = getattr(vars(model).get("forward"), "replaced", None)
    parameters = list(inspect.signature(own or type(model).forward).parameters.values())
    return parameters if own else parameters[1:]
