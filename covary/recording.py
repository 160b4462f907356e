"""Look at the moments of every layer during a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from covary.convert import Converted
from covary.moments import Moments


@contextmanager
def record(net: nn.Module) -> Iterator[dict[str, Moments]]:
    """Collect what each layer gives, by the layer's name in ``net.named_modules()``.

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 8, 3], noise=0.2)
        >>> with covary.record(net) as layers:
        ...     out = net(torch.ones(2, 4))
        >>> list(layers)
        ['lift', 'linear1', 'noise1', 'activation1', 'linear2']
        >>> layers["activation1"].entropy().shape
        torch.Size([2])

    Only layers that give Moments appear, in the order they ran; a layer that runs again replaces
    what it gave before. The dictionary stays valid after the block. A compiled network runs
    without its layers, so record the original one.
    """
    if isinstance(net, Converted):
        raise TypeError(
            "record takes a network of covary.nn layers: within one that covary.convert made, "
            "values have no Moments of their own. Let the model give those that matter, or "
            "print(net) for the sources of its variance."
        )
    layers: dict[str, Moments] = {}

    def keep(module: nn.Module, _inputs: Any, output: Any, *, name: str, owner: nn.Module) -> None:
        # A copy of the network made within the block has copies of these hooks.
        if not isinstance(output, Moments) or module is not owner:
            return
        # A container gives the very object that its last layer gave: one layer, not two.
        inside = f"{name}." if name else ""
        if any(kept is output and key.startswith(inside) for key, kept in layers.items()):
            return
        layers.pop(name, None)
        layers[name] = output

    with ExitStack() as hooks:
        for name, module in net.named_modules():
            hook = partial(keep, name=name, owner=module)
            hooks.enter_context(module.register_forward_hook(hook))
        yield layers
    if not layers:
        raise RuntimeError(
            "record saw no layer that gives Moments. Was the network called within the block, "
            "uncompiled, and has it a covary.nn.Lift?"
        )
