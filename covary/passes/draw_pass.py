"""A pass of draws: the model itself, with sources drawn where they enter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary.covariance.samples import Samples
from covary.passes.base import NO_SAMPLES, Pass, WeightUse
from covary.rules import Rule
from covary.sources import (
    InputErrors,
    Plan,
    Positions,
    Source,
)
from covary.varying import (
    Varying,
    plain,
    varying_in,
)

# What goes into a layer whose weights vary is measured at about so many of its positions.
_POSITIONS = 64


class DrawPass(Pass):
    """A pass of draws: the model as it is, with sources drawn where they enter.

    Args:
        plan: which sources enter, and where.
        generator: of the draws.
        positions: of layers whose weights vary, as a pass of moments of the same inputs found them.
        draws_all: whether weights vary whose effect is taken as linear, and which therefore have no
            part in what is measured.
        observe: takes the name of each call that needs measured numbers, and the values there:
            what goes into an activation (before its noise), or both factors of a product.
        place: ``start`` and ``batch_dim`` of ``Pass``.
    """

    is_drawing = True

    def __init__(
        self,
        plan: Plan,
        generator: torch.Generator,
        *,
        positions: Mapping[str, Positions] | None = None,
        draws_all: bool = True,
        observe: Callable[[str, Sequence[Tensor]], None] = lambda name, values: None,
        **place: Any,
    ) -> None:
        super().__init__(plan, **place)
        self.generator = generator
        self.positions = positions or {}
        self.draws_all = draws_all
        self.observe = observe

    def lift(
        self,
        value: Tensor,
        name: str,
        samples: Samples | None = None,
        errors: InputErrors | None = None,
    ) -> Varying:
        """A draw around a plain tensor."""
        drawn = value.clone()
        for source in self._at_input(errors):
            drawn = source.draw(drawn, self.generator)
        return self.wrapped(drawn)

    def constant_start(self, x: Varying) -> Varying:
        """The value itself."""
        return self.wrapped(x.numbers)

    def entered(self, x: Varying, source: Source) -> Varying:
        """A draw of the value with the source in it."""
        name = self.named(self._label_of_source(source))
        if source.needs_variance:
            self.observe(name, [x.numbers])
        return self.wrapped(source.draw(x.numbers, self.generator))

    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """What the layer gives with a draw of its weights, another one for each sample."""
        if use.weights.linearised and not self.draws_all:
            return found
        positions = self.positions[use.name]
        inputs = positions.inputs(x.numbers, use.weights)
        if not use.weights.linearised:
            self.observe(use.name, [inputs[:, :: max(1, inputs.shape[1] // _POSITIONS)]])
        added = use.weights.draw(inputs, self.generator)
        return self.wrapped(found.numbers + positions.restore(added, found.numbers.shape))

    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function itself, of draws."""
        if rule.activation is not None:
            return self._activated(rule, args, kwargs)
        if rule.is_observed:
            self.observe(self.named(), [args[0].numbers])
        if rule.is_pair:
            values = varying_in([*args, *kwargs.values()])
            if len(values) == 2:
                self.observe(self.named(), [value.numbers for value in values])
        result = self.function(*plain(list(args)), **plain(dict(kwargs)))
        if rule.is_choice:
            return self.constant(result, varying_in(args))
        first = args[0] if args else None
        if isinstance(first, Varying) and result is first.numbers:
            return first
        return pytree.tree_map_only(
            Tensor, lambda v: self.wrapped(v) if v.is_floating_point() else v, result
        )

    def _activated(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Varying:
        """An elementwise nonlinearity of a draw with its noise."""
        assert rule.activation is not None
        x, *rest = args
        self.observe(self.named(), [x.numbers])
        noisy = self.noisy(x).numbers
        if rule.in_place:  # written where it was, so that all views of it change
            value: Varying = x
            value.numbers.copy_(noisy)
            value.numbers.copy_(self.function(value.numbers, *rest, **kwargs))
        else:
            value = self.wrapped(self.function(noisy, *rest, **kwargs))
        if rule.increasing is not None and rule.increasing(*rest, **kwargs):
            activation = rule.activation(*rest, **kwargs)
            value.into_activation = lambda: (self.wrapped(noisy), activation)
        return value

    def noisy(self, x: Varying) -> Varying:
        """The draw and a draw of the noise that enters here."""
        return self.wrapped(self.source().draw(x.numbers, self.generator))

    def wrapped(self, value: Tensor) -> Varying:
        """A draw as a value in flight."""
        return Varying(value, self, 0, NO_SAMPLES)
