"""Whether what runs is being made into a graph, and graphs of functions for ``covary.export``.

A graph has to fit all values, and batches of all sizes: what runs must not look at either then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, fx

_is_tracing: ContextVar[bool] = ContextVar("covary makes a graph", default=False)


def is_traced() -> bool:
    """Whether ``torch.compile``, ``torch.export`` or ``graph_of`` makes a graph of what runs."""
    return torch.compiler.is_compiling() or _is_tracing.get()


def is_exported() -> bool:
    """The same for ``torch.export`` and ``graph_of`` alone: weights will stay as they are."""
    if torch.compiler.is_compiling():  # which cannot follow ContextVar.get
        return torch.compiler.is_exporting()
    return _is_tracing.get()


@contextmanager
def _tracing() -> Iterator[None]:
    before = _is_tracing.set(True)
    try:
        yield
    finally:
        _is_tracing.reset(before)


def graph_of(
    function: Callable[..., Any], inputs: Sequence[Tensor], axes: Sequence[int]
) -> fx.GraphModule:
    """A function as a graph of torch's own operations, for a batch of any size.

    What depends on weights alone is computed now, and kept.

    Derivatives, ``vmap`` and tensors of other classes within the function end up as operations like
    all others. Weights become constants of the graph. No gradients.

    Args:
        function: of tensors, gives tensors, also in a dictionary or a tuple.
        inputs: examples of a batch of 2 or more, a number that no other dimension has; all sizes
            but the batch's are fixed.
        axes: which dimension of each input is the batch.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    shapes = [list(value.shape) for value in inputs]

    def fixed(*values: Tensor) -> Any:
        given = []
        for value, shape, axis in zip(values, shapes, axes, strict=True):
            sizes = [*shape[:axis], value.shape[axis], *shape[axis + 1 :]]
            given.append(value.reshape(sizes))
        return function(*given)

    functional = torch.func.functionalize(fixed)  # nothing in it writes into anything
    trace = make_fx(functional, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    with torch.no_grad(), _tracing():
        found: fx.GraphModule = trace(*inputs)
        _fold(found)
    return found


# Of these the first argument decides type and device alone.
_NEW = {"new_zeros", "new_ones", "new_full"}
# What only looks at the same numbers is not kept beside them.
_VIEWS = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "detach", "unbind"}


def _fold(module: fx.GraphModule) -> None:
    """Put numbers in the place of what does not depend on the inputs of a functional graph."""
    known: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif node.op == "call_function" and _is_fixed(node, known):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: known.get(each))
            if _name(node) in _NEW:
                example = node.meta["val"]
                args = (torch.empty(0, dtype=example.dtype, device=example.device), *args[1:])
            known[node] = node.target(*args, **kwargs)
    for count, (node, value) in enumerate(known.items()):
        is_used = any(user not in known or _name(user) in _VIEWS for user in node.users)
        is_kept = node.op != "get_attr" and _name(node) not in _VIEWS and isinstance(value, Tensor)
        if is_used and is_kept:
            module.register_buffer(f"folded{count}", value.clone())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"folded{count}"))
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _is_fixed(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether a call depends on numbers alone that are known."""
    args = node.args[1:] if _name(node) in _NEW else node.args
    inputs: list[fx.Node] = []
    fx.node.map_arg((args, node.kwargs), inputs.append)
    return all(each in known for each in inputs)
