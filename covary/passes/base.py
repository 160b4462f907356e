"""What passes of moments and of draws share: where they are, how calls are named and checked.

Both run the model itself on ``Varying`` values. A pass of moments follows ``covary.rules``. A pass
of draws knows next to nothing of them: it applies every torch function to the draws, and adds noise
before the elementwise nonlinearities. It is what moments are measured with and compared to.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from covary.activations import MomentActivation
from covary.covariance.samples import Samples
from covary.rules import RULES, Rule
from covary.settings import is_autocast, without_autocast
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

_REMEDY = (
    "Let moments begin behind it (covary.convert(model, start='path of a later module')), or give "
    f"it a rule ({HELP})."
)
_READS_VALUES = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__contains__", "equal", "allclose", "nonzero", "is_nonzero", "unique",
    "masked_select",
}  # fmt: skip
_RANDOM = {
    "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal_", "uniform_",
    "multinomial", "poisson", "rrelu", "rrelu_",
}  # fmt: skip
# A constant in the type or shape of a value that varies.
_AS_ANOTHER = {
    Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as,
}  # fmt: skip
_ONE_NAME = {"axis": "dim", "keepdims": "keepdim"}
# Arguments that rules take by place, or by another name, or not at all.
_NAMES_TO_CHANGE = {*_ONE_NAME, "input", "other", "mat2", "out"}
_WRITES = {"__setitem__", "copy_", "index_copy_", "scatter_", "index_add_", "fill_"}


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
        self._modules: list[nn.Module] = []
        self._composed: list[str] = []
        self._counts: Counter[str] = Counter()
        self.started = False

    @abstractmethod
    def lift(self, value: Tensor, name: str, samples: Samples | None = None) -> Varying:
        """A plain tensor that noise enters; without ``samples``, it lies as inputs do."""

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
            if not isinstance(value, Tensor) or isinstance(value, Varying) or not value.dim():
                return value
            if not value.is_floating_point():
                return Varying(value, self, -1, Samples.along(value, self._axis(value)))
            # What comes before may run in half precision, moments never do.
            return self.lift(value if value.dtype == torch.float64 else value.float(), INPUT)

        args, named = inputs
        if not named and all(isinstance(value, Tensor) for value in args):
            return tuple(map(one, args)), named  # sooner than through a tree
        return pytree.tree_map(one, inputs)

    def enter(self, module: Located, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module, whose path stands in the names of calls and in messages."""
        self._where.append(module.path)
        self._modules.append(module.module)
        try:
            if module.path == self._start:
                args, kwargs = self.lifted((tuple(args), dict(kwargs)))
            result = module.forward(*args, **kwargs)
            values = [result] if isinstance(result, Varying) else varying_in([result])
            if any(value.is_stale for value in values):
                raise self.refusal(
                    "It gives a value into which another view of the same memory has written.",
                    "Write the in-place function without its underscore.",
                )
            return result
        except Exception as error:
            if module.path and not isinstance(error, ConversionError):
                _tell_place(error, module.path)
            raise
        finally:
            self._where.pop()
            self._modules.pop()

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a torch function makes of arguments, some of which are Varying."""
        if kwargs and not _NAMES_TO_CHANGE.isdisjoint(kwargs):
            args, kwargs = self._by_place(function, args, kwargs)
        rule = RULES.get(function)
        if rule is not None and rule.apply is None and rule.activation is None:
            if len(args) == 1 and not kwargs:
                return function(plain(args[0]))
            return function(*plain(list(args)), **plain(dict(kwargs)))
        outer, self.function = self.function, function
        try:
            values = varying_in([*args, *kwargs.values()] if kwargs else args)
            if rule is None:
                name = name_of(function)
                if name in _READS_VALUES or any(value.node >= 0 for value in values):
                    raise self._no_rule(name)
                rule = _OF_CONSTANTS
            device = values[0].numbers.device
            if not is_autocast(device):
                return self._checked_call(rule, args, kwargs, values)
            # Half precision has neither the range nor the digits for variances.
            with without_autocast(device):
                return self._checked_call(rule, args, kwargs, values)
        finally:
            self.function = outer

    def _checked_call(
        self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
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
        try:
            result = self._result(rule, args, kwargs, values)
        except TypeError as error:
            if _takes(rule, args, kwargs):
                raise
            raise self.refusal(f"Its rule does not take these arguments ({error}).") from error
        writes = rule.in_place or (rule.activation and is_in_place(rule, args, kwargs))
        if not writes or not isinstance(result, Varying):
            return result
        if not isinstance(args[0], Varying):
            raise self.refusal(
                "It writes a value that varies into a plain tensor.",
                "Make a new tensor instead (torch.cat, torch.stack, or the function without its "
                "underscore).",
            )
        return args[0] if result is args[0] else args[0].become(result)

    def _by_place(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """Arguments as rules take them: the first ones by place, and each by one name."""
        given = {_ONE_NAME.get(name, name): value for name, value in kwargs.items()}
        if given.pop("out", None) is not None:
            self.function = function
            raise self.refusal("It writes into out=.", "Take what it returns instead.")
        # Not the first ones by place: of torch.where and torch.addmm.
        if "condition" in given or "mat1" in given or (args and "input" in given):
            return args, given
        args = [*args]
        for place, names in enumerate((("input",), ("other", "mat2"))):
            for name in names:
                if len(args) == place and name in given:
                    args.append(given.pop(name))
        return args, given

    def _result(
        self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
        varies = [value.node >= 0 for value in values]
        if self.function in _AS_ANOTHER and not isinstance(args[0], Varying):
            return self.function(*plain(list(args)), **plain(dict(kwargs)))
        if not any(varies) and not rule.lifts:
            return self._of_constants(rule, args, kwargs, values)
        if not all(varies) and not rule.lifts:
            args, kwargs = pytree.tree_map(_unless_constant, (list(args), dict(kwargs)))
        if rule.is_composed:
            assert rule.apply is not None
            self._composed.append(name_of(self.function))
            try:
                return rule.apply(*args, **kwargs)
            finally:
                self._composed.pop()
        if rule.is_choice and rule.in_place:
            raise self.refusal(
                "It writes what holds for the means into a value that varies.",
                "Write the function without its underscore.",
            )
        if rule.is_moving and rule.in_place:
            raise self.refusal(
                "It changes the shape of a value in place.",
                "Write the function without its underscore.",
            )
        if rule.in_place and not self.is_drawing:  # rules make new values
            name = name_of(self.function).rstrip("_")
            self.function = getattr(Tensor, name, self.function)
        return self.follow(rule, args, kwargs)

    def _of_constants(
        self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
        """The function itself, of values none of which varies."""
        if self.function is Tensor.__iter__:
            return iter(args[0].unbind(0))
        try:
            found = self.function(*plain(list(args)), **plain(dict(kwargs)))
        except RuntimeError as error:
            if all(value.is_floating_point() for value in values):
                raise
            raise self.refusal(
                f"Its inputs are whole numbers ({error}).",
                "Give real ones (x.float()); only embeddings take whole numbers.",
            ) from error
        first = args[0] if args else None
        if isinstance(first, Tensor) and found is plain(first):
            return first  # written in place
        if rule.is_moving and isinstance(first, Varying) and first.samples is not NO_SAMPLES:
            others, options = plain(list(args[1:])), plain(dict(kwargs))
            samples = first.samples.moved(
                lambda index: self.function(index.contiguous(), *others, **options), first.shape
            )
            node = min(value.node for value in values)
            if isinstance(found, Tensor):
                return Varying(found, self, node, samples)
            pairs = zip(found, samples, strict=True)
            return type(found)(Varying(part, self, node, owner) for part, owner in pairs)
        return pytree.tree_map(lambda part: self.constant(part, values), found)

    def constant(self, found: Any, values: Sequence[Varying]) -> Any:
        """What was found from these values, as a value of the same samples that does not vary."""
        if not isinstance(found, Tensor):
            return found
        node = -1 if all(value.node == -1 for value in values) else -2
        return Varying(found, self, node, NO_SAMPLES if self.is_drawing else _behind(found, values))

    def refusal(self, why: str, remedy: str = _REMEDY) -> ConversionError:
        """The error that names the module, the function that was called and what to do."""
        path = self._path()
        place = f"module {path!r}" if path else "the model's own forward"
        name = "" if self.function is None else f"{name_of(self.function)} in "
        return ConversionError(f"covary cannot convert {name}{place}: {why} {remedy}")

    def named(self) -> str:
        """The name of this call: path of the module, function, and which of several there."""
        name = self._label()
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}#{count}"

    def source(self) -> Noise:
        """The noise that enters before the activation that is being called."""
        return self.noise.at(self._path()) if RULES[self.function].has_noise else NO_NOISE

    @property
    def is_training(self) -> bool:
        """Whether the module that runs is in training mode."""
        return bool(self._modules) and self._modules[-1].training

    def _label(self) -> str:
        """Path of the module and function; of one that is made of others, its own name."""
        if self._composed:
            return _label_of(self._path(), self._composed[0])
        return _label_of(self._path(), self.function)

    def _path(self) -> str:
        return self._where[-1] if self._where else ""

    def _axis(self, value: Tensor) -> int:
        return self.batch_dim if value.dim() > self.batch_dim else 0

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
        if name in _RANDOM:
            return self.refusal("It draws random numbers of its own, whose variance would be lost.")
        return self.refusal("There is no rule for it.")


@lru_cache(maxsize=4096)
def _label_of(path: str, function: Callable[..., Any] | str) -> str:
    name = function if isinstance(function, str) else name_of(function)
    return f"{path}:{name.strip('_')}"


# A pass of draws needs not know which element belongs to which sample.
NO_SAMPLES: Any = None
# Of functions without a rule, which may be used on what does not vary.
_OF_CONSTANTS = Rule(lambda *args, **kwargs: None)


def _behind(found: Tensor, values: Sequence[Varying]) -> Samples:
    """Which sample each element belongs to, behind an elementwise function or a reduction."""
    shape = found.shape
    for value in sorted(values, key=lambda value: -value.samples.index.numel()):
        samples = value.samples
        for dim in range(value.dim()) if found.dim() < value.dim() else ():
            if value.shape[:dim] + value.shape[dim + 1 :] == shape:
                samples = value.samples.without([dim])
                if samples.index.dim() == found.dim():
                    break
        sizes = samples.of_dim(found.dim()).index.shape
        if len(sizes) == len(shape) and all(
            size in (1, whole) for size, whole in zip(sizes, shape, strict=True)
        ):
            return samples.of_dim(found.dim())
    if not shape:
        return Samples(torch.zeros((), dtype=torch.int64, device=found.device), 1)
    return Samples.along(found, 0)


def _unless_constant(value: Any) -> Any:
    return value.numbers if isinstance(value, Varying) and value.node < 0 else value


@cache
def _place_of_inplace(activation: Callable[..., MomentActivation]) -> int | None:
    """Which argument of the torch function is ``inplace``; it has one more than the activation."""
    names = list(inspect.signature(activation).parameters)
    return 1 + names.index("inplace") if "inplace" in names else None


def is_in_place(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an activation writes into its first argument, by its name or by ``inplace=True``."""
    if rule.in_place:
        return True
    assert rule.activation is not None
    place = _place_of_inplace(rule.activation)
    if place is None:
        return False
    return bool(kwargs.get("inplace", args[place] if place < len(args) else False))


def _takes(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the function that a rule is made of has parameters for these arguments."""
    function, given = (rule.apply, args) if rule.apply else (rule.activation, args[1:])
    assert function is not None
    try:
        inspect.signature(function).bind(*given, **kwargs)
    except TypeError:
        return False
    return True


def _tell_place(error: Exception, path: str) -> None:
    """Add the path of the innermost module to an error of the model's own."""
    add_note = getattr(error, "add_note", None)  # from Python 3.11 on
    if add_note is not None and not getattr(error, "__notes__", None):
        add_note(f"(in module {path!r} of the converted model)")
