"""A pass of moments: means, and a tape of how covariances come about, by ``covary.rules``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.covariance.samples import Samples
from covary.covariance.sweep import Pull, Tape
from covary.covariance.terms import (
    INPUT,
    CorrelatedTerm,
    IndependentTerm,
    Response,
    Term,
    deviation_of,
)
from covary.linalg import significant, summed_to
from covary.nn.layers import mean_of_constant_variance
from covary.passes.base import Call, Pass, WeightUse
from covary.rules import EXACT, LINEARISED, MATCHED, PRODUCT, Rule
from covary.settings import covariance_grad, covariance_is_supervised
from covary.sources import (
    InputErrors,
    Plan,
    Positions,
    Source,
    UncertainWeights,
    WeightTerm,
)
from covary.tracing import is_traced
from covary.varying import (
    Varying,
    varying_in,
)

_RELU = activations.get("relu")
# Behind the name of a call: the average of what was estimated there.
LEVEL = ":level"
# Numbers of the patches of a layer that are kept from a pass to its sweep: 16 MB.
_FEW_PATCHES = 2**22


class MomentPass(Pass):
    """A pass of means, which writes down how covariances come about.

    Args:
        plan: which sources enter, and where.
        known: variances measured at each call, by its name; None takes all for 0, to see which
            calls there are.
        propagates: whether variances are estimated for each sample, to scale the measured ones.
        levels: where the averages of these estimates are put, to be known next time.
        place: ``start`` and ``batch_dim`` of ``Pass``.
    """

    def __init__(
        self,
        plan: Plan,
        known: Mapping[str, Tensor] | None,
        *,
        propagates: bool = False,
        levels: dict[str, Tensor] | None = None,
        **place: Any,
    ) -> None:
        super().__init__(plan, **place)
        self.known = known
        self.propagates = propagates
        self.levels = levels
        self.tape: Tape | None = None
        self.calls: list[Call] = []
        self.axes: dict[str, list[int]] = {}  # of the batch, at calls that need measured numbers
        self.positions: dict[str, Positions] = {}  # of layers whose weights vary

    def lift(
        self,
        value: Tensor,
        name: str,
        samples: Samples | None = None,
        errors: InputErrors | None = None,
    ) -> Varying:
        """A plain tensor that the sources of the input enter, or of ``name``."""
        samples = samples or Samples.along(value, self._axis(value))
        if self.tape is None:
            self.tape = Tape(samples.batch, is_supervised=covariance_is_supervised())
        elif samples.batch != self.tape.batch:
            raise ValueError(
                f"Inputs of one batch have the same number of samples, got {self.tape.batch} and "
                f"{samples.batch}. The batch is dimension {self.batch_dim} of each input."
            )
        name = self.named(name) if name == INPUT else name
        value = value.clone()  # what the caller does with his tensor is his own
        var = value.new_zeros([1] * value.dim())
        terms: list[Term] = []
        mean = _at(value)
        for source in self._at_input(errors):
            term = source.term(name, samples, INPUT, mean, var)
            var = var + _added_by(term, source, mean, var)
            last = terms[-1] if terms else None
            # One term costs less than two.
            if isinstance(last, IndependentTerm) and isinstance(term, IndependentTerm):
                terms[-1] = replace(last, var=last.var + term.var)
            elif isinstance(last, CorrelatedTerm) and isinstance(term, IndependentTerm):
                terms[-1:] = last.plus(term, value.shape)
            else:
                terms.append(term)
        if terms:
            self.tape.axes[terms[0].label] = self._axis(value)
        node = self.tape.add((), lambda _: (), terms[0] if terms else None)
        for term in terms[1:]:
            node = self.tape.add((node,), None, term)
        self.calls.append(Call(name, "noise enters"))
        lifted = Varying(value, self, node, samples)
        return lifted.estimate(lambda: var) if self.propagates else lifted

    def constant_start(self, x: Varying) -> Varying:
        """The same mean, without any covariance yet."""
        if self.tape is None:
            self.tape = Tape(x.samples.batch, is_supervised=covariance_is_supervised())
        node = self.tape.add((), lambda _: ())
        value = Varying(x.numbers, self, node, x.samples)
        zero = x.numbers.new_zeros([1] * x.numbers.dim())
        return value.estimate(lambda: zero) if self.propagates else value

    def entered(self, x: Varying, source: Source) -> Varying:
        """The same mean, and the covariance that the source adds."""
        name = self.named(self._label_of_source(source))
        self.calls.append(Call(name, f"{source.kind} enters"))
        var = x.numbers.new_zeros([1] * x.numbers.dim())
        with covariance_grad():
            if source.needs_variance:
                self.axes[name] = x.samples.axes
                var = self.variance(name, x)
            mean = _at(x.numbers)
            term = source.term(name, x.samples, source.kind, mean, var)
        value = self.write(MATCHED, x.numbers, [x], None, x.samples, term)
        spread = x.spread
        if spread is not None:
            value.estimate(lambda: spread.value + _added_by(term, source, mean, var))
        return value

    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """The same mean, and the covariance that the weights add."""
        positions = use.positions(x)
        self.positions[use.name] = positions
        numbers, weights = _at(x.numbers), use.weights

        def taken() -> Tensor:
            with torch.set_grad_enabled(numbers.requires_grad):
                return positions.inputs(numbers, weights)

        # Patches of large images are made when they are looked at: they take far more than images.
        size = found.numbers[:, :1].numel() * weights.variance.shape[1]
        inputs = cache(taken) if positions.kernel is None or size < _FEW_PATCHES else taken
        more = numbers.new_zeros(1, 1, 1)
        if not weights.linearised:
            self.axes[use.name] = [0, 1]
            with torch.no_grad():
                arriving = self._input_variance(use.name, x, positions, weights)
                more = weights.spread(arriving)
        term = WeightTerm(
            use.name, found.samples, weights.kind, weights=weights, inputs=inputs, more=more,
            arrange=positions.arrange,
        )  # fmt: skip
        self.calls.append(Call(use.name, "weights vary"))
        value = self.write(MATCHED, found.numbers, [found], None, found.samples, term)
        spread, shape = found.spread, found.numbers.shape
        if spread is not None and weights.linearised:
            value.estimate(lambda: spread.value)
        elif spread is not None:

            def spreads() -> Tensor:
                own = weights.spread_out(inputs().square()) + weights.spread_out(arriving)
                return spread.value + positions.restore(own, shape)

            value.estimate(spreads)
        return value

    def _input_variance(
        self, name: str, x: Varying, positions: Positions, weights: UncertainWeights
    ) -> Tensor:
        """(1 | B, 1, n) the variance of what goes into a layer, in the basis of its weights.

        As it was measured, on average; times the sample's own level where that is estimated.
        """
        columns = weights.variance.shape[1]
        value = x.numbers.new_zeros(positions.batch, 1, columns)
        measured = self.measured(name, value, Samples.along(value)).expand(-1, -1, columns)
        if x.spread is None or not self.known:
            return measured
        spread = x.spread.value.expand(x.numbers.shape)
        level = positions.level(spread)
        if self.levels is not None:
            self.levels[name + LEVEL] = level.mean(0, keepdim=True)
        elif name + LEVEL in self.known:
            usual = self.measured(name + LEVEL, level, Samples.along(level))
            return measured * (level / usual.clamp(min=torch.finfo(level.dtype).tiny))
        return measured

    def note(self, kind: str) -> None:
        """Remember how this call is treated, for ``print(net)``."""
        if self._composed and kind == EXACT:
            return  # a part of a function that has a line of its own
        self.calls.append(Call(self._label(), kind))

    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Mean and covariance by the rule."""
        if rule.activation is None:
            assert rule.apply is not None
            return rule.apply(*args, **kwargs)
        x, *rest = args
        if not isinstance(x, Varying) or varying_in([*rest, *kwargs.values()]):
            raise self.refusal("More than its first argument varies.")
        activation = rule.activation(*rest, **kwargs)
        if self.is_still:  # the function itself: nothing varies, and nothing is rounded anew
            value = x.numbers.clone() if rule.in_place else x.numbers
            mean = self.function(value, *rest, **kwargs)
            return self.write(MATCHED, mean, [x], lambda _: (None,), x.samples)
        if self.is_linear and activation.neuron is None:
            return self._linear_site(
                x, activation, self.function(x.numbers.clone(), *rest, **kwargs)
            )
        value = self.site(x, activation)
        if rule.increasing is None or not rule.increasing(*rest, **kwargs):
            value.into_activation = None
        return value

    def write(
        self,
        kind: str,
        mean: Tensor,
        parents: Sequence[Varying],
        pull: Pull | None,
        samples: Samples,
        term: Term | None = None,
        *,
        view_of: Varying | None = None,
    ) -> Varying:
        """A new value, a function of its parents that is linear as far as covariances go."""
        assert self.tape is not None
        types = [parent.numbers.dtype for parent in parents]
        if pull is not None and types != [mean.dtype] * len(types):
            pull = _in_types(pull, types)
        node = self.tape.add([parent.node for parent in parents], pull, term)
        self.tape.widest = max(self.tape.widest, mean.numel())
        if kind != MATCHED and kind != PRODUCT:
            self.note(kind)
        return Varying(mean, self, node, samples, view_of)

    def _linear_site(self, x: Varying, activation: MomentActivation, mean: Tensor) -> Varying:
        """An elementwise nonlinearity at no variance: its slope is all that rows see."""
        self.calls.append(Call(self.named(), LINEARISED))
        assert self.tape is not None
        gain = activation.slope(x.numbers.detach())
        node = self.tape.add([x.node], lambda rows: (rows * gain,), None, gain)
        self.tape.widest = max(self.tape.widest, mean.numel())
        return Varying(mean, self, node, x.samples)

    def site(self, x: Varying, activation: MomentActivation) -> Varying:
        """An elementwise nonlinearity: mean, gain and excess at the variance measured there."""
        if activation.neuron is not None:
            raise self.refusal("Spiking neurons live in chains of covary.nn layers.")
        name = self.named()
        self.calls.append(Call(name, MATCHED))
        self.axes[name] = x.samples.axes
        mu, source = x.numbers, self.source()
        with covariance_grad():
            known = self.variance(name, x)
            var = known + source.sigma**2
            at = mu if covariance_is_supervised() else mu.detach()
            mean, gain, excess = activation.respond(at, var, least=source.sigma**2)
            own = torch.addcmul(excess, gain, gain, value=source.sigma**2)
            response = Response((deviation_of(var),), source.sigma**2, gain)
            term = IndependentTerm(name, x.samples, var=own, response=response)
        mean = mean_of_constant_variance(mu, var, mean, gain, activation)
        # A place of its own for what goes into the activation, to which the noise may move.
        assert self.tape is not None
        before = self.tape.add([x.node], None)
        node = self.tape.add([before], lambda rows: (rows * gain,), term, gain)
        self.tape.widest = max(self.tape.widest, mean.numel())
        value = Varying(mean, self, node, x.samples)
        samples, spread = x.samples, x.spread

        def into_activation() -> tuple[Varying, MomentActivation]:
            assert self.tape is not None
            if source.sigma:
                noise = source.variance(mu, mu)
                self.tape.set_term(before, IndependentTerm(name, samples, var=noise))
            rest = Response(response.deviations)
            self.tape.set_term(node, IndependentTerm(name, samples, var=excess, response=rest))
            noisy = Varying(mu, self, before, samples)
            if spread is not None:
                noisy.estimate(lambda: spread.value + source.sigma**2)
            return noisy, activation

        value.into_activation = into_activation
        return value.estimate(lambda: significant(torch.addcmul(own, gain * known, gain).detach()))

    def noisy(self, x: Varying) -> Varying:
        """The same mean, and the noise that enters here."""
        var = self.source().variance(x.numbers, x.numbers)
        term = IndependentTerm(self._label(), x.samples, var=var)
        return self.write(EXACT, x.numbers, [x], None, x.samples, term)

    def product(self, x: Varying, y: Varying, samples: Samples, pull: Pull) -> Varying:
        """x y of two values that vary: the mean takes their covariance, which is measured."""
        name = self.named()
        self.calls.append(Call(name, PRODUCT))
        mx, my = x.numbers, y.numbers
        mean = mx * my
        with torch.no_grad():
            vx, vy, c = self._pair(name, x, y, mean, samples)
            both = vx * vy + c * c

        def spread() -> Tensor:
            return (vx * my * my + vy * mx * mx + 2 * c * mx * my + both).clamp(min=0).detach()

        # Half of what both do together is each one's.
        response = Response((deviation_of(2 * vx), deviation_of(2 * vy)), is_split=True)
        term = IndependentTerm(name, samples, var=both, response=response)
        value = self.write(PRODUCT, mean + c, [x, y], pull, samples, term)
        return value.estimate(spread) if self.propagates else value

    def larger(self, x: Varying, y: Varying, samples: Samples) -> Varying:
        """max(x, y) = y + relu(x - y), for a Gaussian difference of measured correlation."""
        name = self.named()
        self.calls.append(Call(name, MATCHED))
        shapes = x.numbers.shape, y.numbers.shape
        with covariance_grad():
            apart = x.numbers - y.numbers
            if not covariance_is_supervised():
                apart = apart.detach()
            vx, vy, c = self._pair(name, x, y, apart, samples)
            var = (vx + vy - 2 * c).clamp(min=0)
            mean, gain, excess = _RELU.respond(apart, var)
            rest = 1 - gain
            apart_by = deviation_of(var)
            response = Response((apart_by, -apart_by))
            term = IndependentTerm(name, samples, var=excess, response=response)
        moved = mean_of_constant_variance(x.numbers - y.numbers, var, mean, gain, _RELU)

        def pull(rows: Tensor) -> list[Tensor]:
            first = rows * gain
            return [summed_to(first, shapes[0]), summed_to(rows - first, shapes[1])]

        def spread() -> Tensor:
            both = gain * vx * gain + rest * vy * rest + 2 * gain * c * rest
            return (excess + both).clamp(min=0).detach()

        value = self.write(MATCHED, y.numbers + moved, [x, y], pull, samples, term)
        return value.estimate(spread)

    def _pair(
        self, name: str, x: Varying, y: Varying, both: Tensor, samples: Samples
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Variances of two values, and their covariance where they meet in a value ``both``.

        The covariance is the measured one, scaled as the variances are.
        """
        self.axes[name] = samples.axes
        vx, vy = self.variance(f"{name}:x", x), self.variance(f"{name}:y", y)
        c = self.measured(f"{name}:xy", both, samples)
        if x.spread is not None or y.spread is not None:
            least = torch.finfo(c.dtype).tiny
            mx = self.measured(f"{name}:x", x.numbers, x.samples).clamp(min=least)
            my = self.measured(f"{name}:y", y.numbers, y.samples).clamp(min=least)
            c = (c * mx.rsqrt() * my.rsqrt()).clamp(-1, 1) * (vx.sqrt() * vy.sqrt())
        return vx, vy, c

    def variance(self, name: str, x: Varying) -> Tensor:
        """The variance of each element before its noise, as it was measured on average.

        Where it can be estimated for each sample, the estimate, with the factor by which the
        measured average exceeds the average of estimates (docs/theory.md, eq. 31).
        """
        measured = self.measured(name, x.numbers, x.samples)
        if x.spread is None or not self.known:
            return measured
        spread = x.spread.value
        if self.levels is not None:
            axes = x.samples.axes
            level = spread.expand(x.numbers.shape).mean(axes, keepdim=True) if axes else spread
            self.levels[name + LEVEL] = level
        elif name + LEVEL in self.known:
            level = self.measured(name + LEVEL, x.numbers, x.samples)
        else:
            return measured
        return spread * (measured / level.clamp(min=torch.finfo(level.dtype).tiny))

    def observed(self, x: Varying) -> Tensor:
        """The variance of each element that goes into a call whose rule ``is_observed``."""
        name = self.named()
        self.axes[name] = x.samples.axes
        with torch.no_grad():
            return self.variance(name, x)

    def measured(self, name: str, value: Tensor, samples: Samples) -> Tensor:
        """(1 along the batch, else as the value or 1) what was measured at a call."""
        if not self.known:
            return value.detach().new_zeros([1] * value.dim())
        found = self.known.get(name)
        if found is None:
            raise self.refusal(
                "This call did not occur on the inputs that the network was tracked with.",
                "Track it with inputs for which it does: covary.track(net, inputs).",
            )
        if found.dim() != value.dim():
            raise self.refusal(
                f"It has {value.dim()} dimensions here and had {found.dim()} when the network was "
                "tracked.",
                "Track it with inputs like these: covary.track(net, inputs).",
            )
        for axis, size in enumerate(value.shape):
            # Images or sequences of another size: what is typical of a channel.
            if found.shape[axis] != 1 and (found.shape[axis] != size or axis in samples.axes):
                found = found.mean(axis, keepdim=True)
        return _laid_out_as(value, found.to(value.dtype))


def _at(mean: Tensor) -> Tensor:
    """Where covariances are taken: at the mean, with its gradient if they are supervised."""
    return mean if covariance_is_supervised() else mean.detach()


def _added_by(term: Term, source: Source, mean: Tensor, var: Tensor) -> Tensor:
    """The variance that a source adds to each element, which its term may know already."""
    return term.var if isinstance(term, IndependentTerm) else source.variance(mean, var)


def _laid_out_as(value: Tensor, small: Tensor) -> Tensor:
    """The same small tensor, its dimensions in memory in the order of those of a value.

    Functions of both then go through memory in one direction: in a third of the time.
    """
    if is_traced() or value.is_contiguous():
        return small
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return small.contiguous(memory_format=torch.channels_last)
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    back = [order.index(dim) for dim in range(value.dim())]
    return small.permute(order).contiguous().permute(back)


def _in_types(inner: Pull, types: Sequence[torch.dtype]) -> Pull:
    """The same pull, in the type of each parent."""
    return lambda rows: [
        part if part is None else part.to(each)
        for part, each in zip(inner(rows), types, strict=True)
    ]
