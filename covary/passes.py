"""Passes of varying values through a model: one of moments, one of draws.

Both run the model itself on ``Varying`` values. A pass of moments follows ``covary.rules``. A pass
of draws knows next to nothing of them: it applies every torch function to the draws, and adds noise
before the elementwise nonlinearities. It is what moments are measured with and compared to.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary import activations
from covary.activations import MomentActivation
from covary.covariance.samples import Samples
from covary.covariance.sweep import Entry, Pull, Tape
from covary.nn.layers import mean_of_constant_variance
from covary.response import respond
from covary.rules import EXACT, MATCHED, PRODUCT, RULES, Rule, summed_to
from covary.settings import covariance_grad, covariance_is_supervised
from covary.sources import INPUT, NO_NOISE, Noise, NoisePlan
from covary.varying import (
    HELP,
    ConversionError,
    Located,
    Varying,
    in_custom_function,
    name_of,
    plain,
    varying_in,
)

_RELU = activations.get("relu")
_REMEDY = (
    "Let moments begin behind it (covary.convert(model, start='path of a later module')), or give "
    f"it a rule ({HELP})."
)
_READS_VALUES = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__contains__", "equal", "allclose", "nonzero", "is_nonzero", "unique",
    "masked_select",
}  # fmt: skip
_WRITES = {"__setitem__", "copy_", "masked_fill_", "index_copy_", "scatter_", "index_add_", "fill_"}


class Call(NamedTuple):
    """A call of a torch function on values that vary."""

    name: str  # path of the module, function, and which of several calls
    kind: str  # how it is treated


class Pass(ABC):
    """What both kinds of passes share: where they are, how calls are named, where noise enters."""

    is_drawing = False

    def __init__(self, noise: NoisePlan, *, start: str | None, batch_dim: int) -> None:
        self.noise = noise
        self.batch_dim = batch_dim
        self._start = start
        self.function: Any = None
        self._where: list[str] = []
        self._composed: list[str] = []
        self._counts: Counter[str] = Counter()
        self.started = False

    @abstractmethod
    def lift(self, value: Tensor, name: str) -> Varying:
        """A plain tensor that noise enters."""

    @abstractmethod
    def noisy(self, x: Varying) -> Varying:
        """A value with the noise that enters before the nonlinearity that is being called."""

    @abstractmethod
    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a rule makes of arguments, of which some vary."""

    def lifted(self, inputs: Any) -> Any:
        """Inputs as they go into the model: real tensors vary, whole numbers do not yet."""
        self.started = True

        def one(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, Varying):
                return value
            if not value.is_floating_point():
                return Varying(value, self, -1, Samples.along(value, self._axis(value)))
            return self.lift(value, INPUT)

        return pytree.tree_map(one, inputs)

    def enter(self, module: Located, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module, whose path stands in the names of calls and in messages."""
        self._where.append(module.path)
        try:
            if module.path == self._start:
                args, kwargs = self.lifted((tuple(args), dict(kwargs)))
            return module.forward(*args, **kwargs)
        except Exception as error:
            if module.path and not isinstance(error, ConversionError):
                _tell_place(error, module.path)
            raise
        finally:
            self._where.pop()

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a torch function makes of arguments, some of which are Varying."""
        rule = RULES.get(function)
        if rule is not None and rule.apply is None and rule.activation is None:
            return function(*plain(list(args)), **plain(dict(kwargs)))
        outer, self.function = self.function, function
        try:
            if rule is None:
                raise self._no_rule(name_of(function))
            return self._checked_call(rule, args, kwargs)
        finally:
            self.function = outer

    def _checked_call(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        values = varying_in([*args, *kwargs.values()])
        if any(value.is_stale for value in values):
            raise self.refusal(
                "It takes a value into which another view of the same memory has written since.",
                "Write that in-place function without its underscore.",
            )
        if in_custom_function():
            raise self.refusal(
                "It is called by a torch.autograd.Function, whose own derivative would be lost.",
                "Write that function with torch functions alone, or let moments begin behind it "
                "(covary.convert(model, start=...)).",
            )
        result = self._result(rule, args, kwargs, values)
        writes = rule.in_place or (rule.activation and _is_in_place(rule, args, kwargs))
        if not writes or not isinstance(result, Varying):
            return result
        if not isinstance(args[0], Varying):
            raise self.refusal(
                "It writes a value that varies into a plain tensor.",
                "Make a new tensor instead (torch.cat, torch.stack, or the function without its "
                "underscore).",
            )
        return args[0] if result is args[0] else args[0].become(result)

    def _result(
        self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
        if rule.is_composed:
            assert rule.apply is not None
            self._composed.append(name_of(self.function))
            try:
                return rule.apply(*args, **kwargs)
            finally:
                self._composed.pop()
        varies = [value.node >= 0 for value in values]
        if not any(varies):
            found = self.function(*plain(list(args)), **plain(dict(kwargs)))
            return pytree.tree_map(self._still_whole, found)
        if not all(varies):
            args, kwargs = pytree.tree_map(_unless_constant, (list(args), dict(kwargs)))
        return self.follow(rule, args, kwargs)

    def refusal(self, why: str, remedy: str = _REMEDY) -> ConversionError:
        """The error that names the module, the function that was called and what to do."""
        path = self._path()
        place = f"module {path!r}" if path else "the model's own forward"
        name = name_of(self.function)
        return ConversionError(f"covary cannot convert {name} in {place}: {why} {remedy}")

    def named(self) -> str:
        """The name of this call: path of the module, function, and which of several there."""
        name = self._label()
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}#{count}"

    def source(self) -> Noise:
        """The noise that enters before the activation that is being called."""
        return self.noise.at(self._path()) if RULES[self.function].has_noise else NO_NOISE

    def _label(self) -> str:
        """Path of the module and function; of one that is made of others, its own name."""
        name = self._composed[0] if self._composed else name_of(self.function)
        return f"{self._path()}:{name.strip('_')}"

    def _path(self) -> str:
        return self._where[-1] if self._where else ""

    def _axis(self, value: Tensor) -> int:
        return self.batch_dim if value.dim() > self.batch_dim else 0

    def _still_whole(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_floating_point():
            return Varying(value, self, -1, Samples.along(value, 0) if value.dim() else _NONE)
        return value

    def _no_rule(self, name: str) -> ConversionError:
        if name in _READS_VALUES:
            return self.refusal(
                "It reads the numbers of a value that varies, and what a model does with a number "
                "(a Python if, a numpy function) has no moments."
            )
        if name in _WRITES:
            return self.refusal(
                "It writes into a value that varies.",
                "Make a new tensor instead: torch.cat, torch.stack, torch.where.",
            )
        return self.refusal("There is no rule for it.")


_NONE: Any = None


class MomentPass(Pass):
    """A pass of means, which writes down how covariances come about.

    Args:
        noise: where noise enters, and how much.
        known: what was measured at each call that needs it (variances), by the call's name; None
            takes all of them for 0, to see which calls there are.
        start: the path of the module before which noise enters; None for the inputs.
        batch_dim: the dimension of the inputs that is the batch.
    """

    def __init__(
        self,
        noise: NoisePlan,
        known: Mapping[str, Tensor] | None,
        *,
        start: str | None = None,
        batch_dim: int = 0,
    ) -> None:
        super().__init__(noise, start=start, batch_dim=batch_dim)
        self.known = known
        self.tape: Tape | None = None
        self.calls: list[Call] = []
        # Calls that need measured numbers, and the dimensions of the batch there.
        self.axes: dict[str, list[int]] = {}

    def lift(self, value: Tensor, name: str) -> Varying:
        """A plain tensor that noise enters, of the sigma that ``name`` has."""
        samples = Samples.along(value, self._axis(value))
        if self.tape is None:
            self.tape = Tape(samples.batch, is_supervised=covariance_is_supervised())
        elif samples.batch != self.tape.batch:
            raise ValueError(
                f"Inputs of one batch have the same number of samples, got {self.tape.batch} and "
                f"{samples.batch}. The batch is dimension {self.batch_dim} of each input."
            )
        source = self.noise.at(INPUT)
        entry = Entry(name, source.variance(value), samples) if source.sigma else None
        node = self.tape.add((), lambda _: (), entry)
        self.calls.append(Call(name, "noise enters"))
        return Varying(value, self, node, samples)

    def uses(self, tensor: Any) -> None:
        """Remember a tensor that covariances will need: it must not change before the sweep."""
        if isinstance(tensor, Tensor):
            assert self.tape is not None
            self.tape.uses(tensor)

    def on_means(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the function that is called makes of the means."""
        found: Tensor = self.function(*plain(args), **plain(kwargs))
        return found

    def note(self, kind: str) -> None:
        """Remember how this call is treated, for ``print(net)``."""
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
            value = x.numbers.clone() if _is_in_place(rule, args, kwargs) else x.numbers
            mean = self.function(value, *rest, **options)
            return self.write(MATCHED, mean, [x], lambda _: (None,), x.samples)
        return self.site(x, activation)

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
        varies = [i for i, parent in enumerate(parents) if parent.node >= 0]
        if len(varies) < len(parents):
            inner = pull

            def pull(rows: Tensor) -> list[Tensor | None]:
                pulled = inner(rows)
                return [pulled[i] for i in varies]

        node = self.tape.add([parents[i].node for i in varies], pull, noise)
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
            known = self.measured(name, mu, x.samples) if x.spread is None else x.spread
            var = known + source.sigma**2
            at = mu if covariance_is_supervised() else mu.detach()
            mean, gain, excess = respond(activation, at, var)
            own = torch.addcmul(excess, gain, gain, value=source.sigma**2)
            entry = Entry(name, own, x.samples)
            spread = torch.addcmul(own, gain * known, gain)
        mean = mean_of_constant_variance(mu, var, mean, gain, activation)
        value = self.write(MATCHED, mean, [x], lambda rows: (rows * gain,), x.samples, entry)
        value.spread = spread
        return value

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
            entry = Entry(name, vx * vy + c * c, samples)
        return self.write(PRODUCT, mean + c, [x, y], pull, samples, entry)

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
            mean, gain, excess = respond(_RELU, apart, var)
            rest = 1 - gain
            entry = Entry(name, excess, samples)
            spread = excess + gain * vx * gain + rest * vy * rest + 2 * gain * c * rest
        moved = mean_of_constant_variance(x.numbers - y.numbers, var, mean, gain, _RELU)

        def pull(rows: Tensor) -> list[Tensor]:
            first = rows * gain
            return [summed_to(first, shapes[0]), summed_to(rows - first, shapes[1])]

        value = self.write(MATCHED, y.numbers + moved, [x, y], pull, samples, entry)
        value.spread = spread.clamp(min=0)
        return value

    def _pair(
        self, name: str, x: Varying, y: Varying, both: Tensor, samples: Samples
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Variances of two values, and their covariance where they meet in a value ``both``.

        Variances that are known for each sample take the place of measured ones; the correlation
        is always the measured one.
        """
        self.axes[name] = samples.axes
        vx = self.measured(f"{name}:x", x.numbers, x.samples)
        vy = self.measured(f"{name}:y", y.numbers, y.samples)
        c = self.measured(f"{name}:xy", both, samples)
        if x.spread is None and y.spread is None:
            return vx, vy, c
        least = torch.finfo(c.dtype).tiny
        correlation = c * torch.rsqrt(vx.clamp(min=least)) * torch.rsqrt(vy.clamp(min=least))
        vx, vy = vx if x.spread is None else x.spread, vy if y.spread is None else y.spread
        return vx, vy, correlation.clamp(-1, 1) * (vx.sqrt() * vy.sqrt())

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
        return found.to(value.dtype)


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

    def lift(self, value: Tensor, name: str) -> Varying:
        """A draw around a plain tensor."""
        return self.wrapped(self.noise.at(INPUT).draw(value, self.generator))

    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The function itself, of draws."""
        function = self.function
        if rule.activation is not None:
            x = args[0] if args else kwargs["input"]
            name, source = self.named(), self.source()
            if self.observe is not None:
                self.observe(name, [x.numbers])
            if source.sigma:
                noisy = source.draw(x.numbers, self.generator)
                # Written where it was, so that an in-place function changes what it has to.
                if _is_in_place(rule, args, kwargs):
                    x.numbers.copy_(noisy)
                else:
                    x = self.wrapped(noisy)
                args, kwargs = ([x, *args[1:]], kwargs) if args else (args, {**kwargs, "input": x})
        elif rule.is_pair:
            values = [v for v in varying_in([*args, *kwargs.values()]) if v.node >= 0]
            if len(values) == 2:
                name = self.named()
                if self.observe is not None:
                    self.observe(name, [value.numbers for value in values])
        result = function(*plain(list(args)), **plain(dict(kwargs)))
        first = args[0] if args else None
        if isinstance(first, Varying) and result is first.numbers:
            return first
        return pytree.tree_map(self._rewrapped, result)

    def noisy(self, x: Varying) -> Varying:
        """The draw and a draw of the noise that enters here."""
        return self.wrapped(self.source().draw(x.numbers, self.generator))

    def _rewrapped(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return self.wrapped(value) if is_real else value

    def wrapped(self, value: Tensor) -> Varying:
        """A draw as a value in flight."""
        return Varying(value, self, 0, _NONE)


def _unless_constant(value: Any) -> Any:
    return value.numbers if isinstance(value, Varying) and value.node < 0 else value


@cache
def _parameters(activation: Callable[..., MomentActivation]) -> inspect.Signature:
    return inspect.signature(activation)


def _is_in_place(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an activation writes into its first argument, by its name or by ``inplace=True``."""
    if rule.in_place:
        return True
    assert rule.activation is not None
    signature = _parameters(rule.activation)
    if "inplace" not in signature.parameters:
        return False
    options = {name: value for name, value in kwargs.items() if name != "input"}
    return bool(signature.bind(*args[1:], **options).arguments.get("inplace", False))


def _tell_place(error: Exception, path: str) -> None:
    """Add the path of the innermost module to an error of the model's own."""
    add_note = getattr(error, "add_note", None)  # from Python 3.11 on
    if add_note is not None and not getattr(error, "__notes__", None):
        add_note(f"(in module {path!r} of the converted model)")
