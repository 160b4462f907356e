"""A pass of means through a model, which writes down how covariances come about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from covary import activations
from covary.activations import MomentActivation
from covary.covariance.samples import Samples
from covary.covariance.sweep import Entry, Pull, Tape
from covary.nn.layers import mean_of_constant_variance
from covary.passes.base import Call, Pass, is_in_place
from covary.rules import EXACT, MATCHED, PRODUCT, Rule, summed_to
from covary.settings import covariance_grad, covariance_is_supervised
from covary.sources import INPUT, NoisePlan
from covary.varying import Varying, plain, varying_in

_RELU = activations.get("relu")
# Behind the name of a call: the average of what was estimated there.
LEVEL = ":level"


class MomentPass(Pass):
    """A pass of means, which writes down how covariances come about.

    Args:
        noise: where noise enters, and how much.
        known: what was measured at each call that needs it (variances), by the call's name; None
            takes all of them for 0, to see which calls there are.
        propagates: whether variances are estimated for each sample on the way, to scale what was
            measured; or else what was measured holds for all samples.
        levels: where the averages of these estimates are put, to be known next time.
        start: the path of the module before which noise enters; None for the inputs.
        batch_dim: the dimension of the inputs that is the batch.
    """

    def __init__(
        self,
        noise: NoisePlan,
        known: Mapping[str, Tensor] | None,
        *,
        propagates: bool = False,
        levels: dict[str, Tensor] | None = None,
        start: str | None = None,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(noise, start=start, batch_dim=batch_dim)
        self.known = known
        self.propagates = propagates
        self.levels = levels
        self.tape: Tape | None = None
        self.calls: list[Call] = []
        # Calls that need measured numbers, and the dimensions of the batch there.
        self.axes: dict[str, list[int]] = {}

    def lift(self, value: Tensor, name: str, samples: Samples | None = None) -> Varying:
        """A plain tensor that noise enters, of the sigma that ``name`` has."""
        samples = samples or Samples.along(value, self._axis(value))
        if self.tape is None:
            self.tape = Tape(samples.batch, is_supervised=covariance_is_supervised())
        elif samples.batch != self.tape.batch:
            raise ValueError(
                f"Inputs of one batch have the same number of samples, got {self.tape.batch} and "
                f"{samples.batch}. The batch is dimension {self.batch_dim} of each input."
            )
        if name == INPUT:
            self._counts[name] += 1
            name = name if self._counts[name] == 1 else f"{name}#{self._counts[name]}"
        value = value.clone()  # what the caller does with his tensor is his own
        source = self.noise.at_input
        entry = Entry(name, source.variance(value), samples) if source.sigma else None
        node = self.tape.add((), lambda _: (), entry)
        self.calls.append(Call(name, "noise enters"))
        lifted = Varying(value, self, node, samples)
        return lifted.estimate(lambda: source.variance(value)) if self.propagates else lifted

    def on_means(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the function that is called makes of the means."""
        found: Tensor = self.function(*plain(args), **plain(kwargs))
        return found

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
        x, *rest = args if args else [kwargs["input"]]
        options = {name: value for name, value in kwargs.items() if name != "input"}
        if not isinstance(x, Varying) or varying_in([*rest, *options.values()]):
            raise self.refusal("More than its first argument varies.")
        activation = rule.activation(*rest, **options)
        if self.noise.is_none:  # the function itself: nothing varies, and nothing is rounded anew
            value = x.numbers.clone() if is_in_place(rule, args, kwargs) else x.numbers
            mean = self.function(value, *rest, **options)
            return self.write(MATCHED, mean, [x], lambda _: (None,), x.samples)
        value = self.site(x, activation)
        if rule.increasing is None or not rule.increasing(*rest, **options):
            value.into_activation = None
        return value

    def write(
        self,
        kind: str,
        mean: Tensor,
        parents: Sequence[Varying],
        pull: Pull,
        samples: Samples,
        noise: Entry | None = None,
        *,
        view_of: Varying | None = None,
    ) -> Varying:
        """A new value, a function of its parents that is linear as far as covariances go."""
        assert self.tape is not None
        for each in parents:
            if each.node < 0 or each.numbers.dtype != mean.dtype:
                pull, parents = _of_what_varies(pull, parents)
                break
        node = self.tape.add([parent.node for parent in parents], pull, noise)
        self.tape.widest = max(self.tape.widest, mean.numel())
        if kind != MATCHED and kind != PRODUCT:
            self.note(kind)
        return Varying(mean, self, node, samples, view_of)

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
            entry = Entry(name, own, x.samples)
        mean = mean_of_constant_variance(mu, var, mean, gain, activation)
        # A place of its own for what goes into the activation, to which the noise may move.
        assert self.tape is not None
        before = self.tape.add([x.node], lambda rows: (rows,))
        node = self.tape.add([before], lambda rows: (rows * gain,), entry, gain)
        self.tape.widest = max(self.tape.widest, mean.numel())
        value = Varying(mean, self, node, x.samples)
        samples, spread = x.samples, x.spread

        def into_activation() -> tuple[Varying, MomentActivation]:
            assert self.tape is not None
            self.tape.set_noise(before, Entry(name, source.variance(mu), samples))
            self.tape.set_noise(node, Entry(name, excess, samples))
            noisy = Varying(mu, self, before, samples)
            if spread is not None:
                noisy.estimate(lambda: spread.value + source.sigma**2)
            return noisy, activation

        value.into_activation = into_activation
        return value.estimate(lambda: torch.addcmul(own, gain * known, gain).detach())

    def noisy(self, x: Varying) -> Varying:
        """The same mean, and the noise that enters here."""
        entry = Entry(self._label(), self.source().variance(x.numbers), x.samples)
        return self.write(EXACT, x.numbers, [x], lambda rows: (rows,), x.samples, entry)

    def product(self, x: Varying, y: Varying, samples: Samples, pull: Pull) -> Varying:
        """x y of two values that vary: the mean takes their covariance, which is measured."""
        name = self.named()
        self.calls.append(Call(name, PRODUCT))
        mean = x.numbers * y.numbers
        with torch.no_grad():
            vx, vy, c = self._pair(name, x, y, mean, samples)
            both = vx * vy + c * c
            entry = Entry(name, both, samples)
            mx, my = x.numbers, y.numbers

        def spread() -> Tensor:
            return (vx * my * my + vy * mx * mx + 2 * c * mx * my + both).clamp(min=0).detach()

        value = self.write(PRODUCT, mean + c, [x, y], pull, samples, entry)
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
            entry = Entry(name, excess, samples)
        moved = mean_of_constant_variance(x.numbers - y.numbers, var, mean, gain, _RELU)

        def pull(rows: Tensor) -> list[Tensor]:
            first = rows * gain
            return [summed_to(first, shapes[0]), summed_to(rows - first, shapes[1])]

        def spread() -> Tensor:
            both = gain * vx * gain + rest * vy * rest + 2 * gain * c * rest
            return (excess + both).clamp(min=0).detach()

        value = self.write(MATCHED, y.numbers + moved, [x, y], pull, samples, entry)
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

    def measured(self, name: str, value: Tensor, samples: Samples) -> Tensor:
        """(1 along the batch, else as the value or 1) what was measured at a call."""
        one = [1 if axis in samples.axes else size for axis, size in enumerate(value.shape)]
        if self.known is None or not self.known:
            return value.detach().new_zeros([1] * value.dim())
        found = self.known.get(name)
        if found is None:
            raise self.refusal(
                "This call did not occur on the inputs that the network was tracked with.",
                "Track it with inputs for which it does: covary.track(net, inputs).",
            )
        if list(found.shape) == one and found.dtype == value.dtype:
            return _laid_out_as(value, found)
        if found.dim() != value.dim():
            raise self.refusal(
                f"It has {value.dim()} dimensions here and had {found.dim()} when the network was "
                "tracked.",
                "Track it with inputs like these: covary.track(net, inputs).",
            )
        for axis, size in enumerate(one):
            if found.shape[axis] not in (1, size) and size != 1:
                # Images or sequences of another size: what is typical of a channel.
                found = found.mean(axis, keepdim=True)
            elif found.shape[axis] != size and size == 1 and axis not in samples.axes:
                found = found.mean(axis, keepdim=True)
        return _laid_out_as(value, found.to(value.dtype))


def _laid_out_as(value: Tensor, small: Tensor) -> Tensor:
    """The same small tensor, its dimensions in memory in the order of those of a value.

    Functions of both then go through memory in one direction: in a third of the time.
    """
    if value.is_contiguous():
        return small
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last):
        return small.contiguous(memory_format=torch.channels_last)
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    back = [order.index(dim) for dim in range(value.dim())]
    return small.permute(order).contiguous().permute(back)


def _of_what_varies(inner: Pull, parents: Sequence[Varying]) -> tuple[Pull, Sequence[Varying]]:
    """How rows go back to the parents that vary, in the type of each; and these parents."""
    varies = [i for i, parent in enumerate(parents) if parent.node >= 0]
    types = [parents[i].numbers.dtype for i in varies]

    def pull(rows: Tensor) -> list[Tensor | None]:
        pulled = inner(rows)
        return [
            None if part is None else part.to(each)
            for part, each in zip([pulled[i] for i in varies], types, strict=True)
        ]

    return pull, [parents[i] for i in varies]
