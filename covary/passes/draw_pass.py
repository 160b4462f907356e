"""A pass of draws: the model as it is, with noise added where it enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary.covariance.samples import Samples
from covary.passes.base import NO_SAMPLES, Pass, is_in_place
from covary.rules import Rule
from covary.sources import NoisePlan
from covary.varying import Varying, plain, varying_in


class DrawPass(Pass):
    """A pass of draws: the model as it is, with noise added where it enters.

    Args:
        noise: where noise enters, and how much.
        generator: of the draws.
        observe: takes the name of each call that needs measured numbers, and the values there:
            what goes into an activation (before its noise), or both factors of a product.
        start: the path of the module before which noise enters; None for the inputs.
        batch_dim: the dimension of the inputs that is the batch.
    """

    is_drawing = True

    def __init__(
        self,
        noise: NoisePlan,
        generator: torch.Generator,
        *,
        observe: Callable[[str, Sequence[Tensor]], None] | None = None,
        start: str | None = None,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(noise, start=start, batch_dim=batch_dim)
        self.generator = generator
        self.observe = observe

    def lift(self, value: Tensor, name: str, samples: Samples | None = None) -> Varying:
        """A draw around a plain tensor."""
        return self.wrapped(self.noise.at_input.draw(value, self.generator))

    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function itself, of draws."""
        if rule.activation is not None:
            return self._activated(rule, args, kwargs)
        if rule.is_pair:
            values = [v for v in varying_in([*args, *kwargs.values()]) if v.node >= 0]
            if len(values) == 2:
                name = self.named()
                if self.observe is not None:
                    self.observe(name, [value.numbers for value in values])
        result = self.function(*plain(list(args)), **plain(dict(kwargs)))
        if rule.is_choice:
            return self.constant(result, varying_in(args))
        first = args[0] if args else None
        if isinstance(first, Varying) and result is first.numbers:
            return first
        return pytree.tree_map(self._rewrapped, result)

    def _activated(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Varying:
        """An elementwise nonlinearity of a draw with its noise."""
        assert rule.activation is not None
        x, *rest = args
        name, source = self.named(), self.source()
        if self.observe is not None:
            self.observe(name, [x.numbers])
        noisy = source.draw(x.numbers, self.generator)
        if is_in_place(rule, args, kwargs):
            # Written where it was, so that the function changes what it has to.
            value: Varying = x
            value.numbers.copy_(noisy)
            self.function(value.numbers, *rest, **kwargs)
        else:
            value = self.wrapped(self.function(noisy, *rest, **kwargs))
        if rule.increasing is not None and rule.increasing(*rest, **kwargs):
            activation = rule.activation(*rest, **kwargs)
            value.into_activation = lambda: (self.wrapped(noisy), activation)
        return value

    def noisy(self, x: Varying) -> Varying:
        """The draw and a draw of the noise that enters here."""
        return self.wrapped(self.source().draw(x.numbers, self.generator))

    def _rewrapped(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return self.wrapped(value) if is_real else value

    def wrapped(self, value: Tensor) -> Varying:
        """A draw as a value in flight."""
        return Varying(value, self, 0, NO_SAMPLES)
