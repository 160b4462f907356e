"""A function of tensors as a graph of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from covary.tracing import tracing


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

    trace = make_fx(fixed, tracing_mode="symbolic", _allow_non_fake_inputs=True)
    with torch.no_grad(), tracing():
        found: fx.GraphModule = trace(*inputs)
        _fold(found)
    return found


# Of these the first argument decides type and device alone.
_NEW = {"new_zeros", "new_ones", "new_full"}
# What only looks at the same numbers is not kept beside them.
_VIEWS = {"view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "detach", "unbind"}
_VIEWS |= {"slice", "select", "diagonal", "alias", "getitem", "split"}


def _fold(module: fx.GraphModule) -> None:
    """Put numbers in the place of what does not depend on the inputs of a graph."""
    for name, value in list(module.named_parameters()):
        delattr(module, name)  # of the graph, which shares it with the network
        module.register_buffer(name, value.detach())
    known: dict[fx.Node, Any] = {}
    written = {base for node in module.graph.nodes for base in _written_into(node)}
    for node in module.graph.nodes:
        if node in written:
            continue
        if node.op == "get_attr" and type(getattr(module, node.target)) is Tensor:
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


def _written_into(node: fx.Node) -> Iterator[fx.Node]:
    """What a call writes into: its first argument, and what that is a part of."""
    is_part = node.op == "call_function" and _name(node).endswith("_")
    while is_part and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        yield node
        is_part = _name(node) in _VIEWS or _name(node).endswith("_")


def _is_fixed(node: fx.Node, known: Mapping[fx.Node, Any]) -> bool:
    """Whether a call depends on numbers alone that are known."""
    args = node.args[1:] if _name(node) in _NEW else node.args
    inputs: list[fx.Node] = []
    fx.node.map_arg((args, node.kwargs), inputs.append)
    return all(each in known for each in inputs)
