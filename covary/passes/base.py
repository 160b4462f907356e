"""What passes of moments and of draws share: places, names of calls, where sources enter."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary.covariance import Full
from covary.covariance.samples import Samples
from covary.covariance.sweep import Swept
from covary.covariance.terms import INPUT
from covary.moments import Moments
from covary.rules import RULES, Rule
from covary.settings import is_autocast, without_autocast
from covary.sources import (
    NO_NOISE,
    GaussianNoise,
    InputErrors,
    Kernel,
    Plan,
    Positions,
    Source,
    UncertainWeights,
)
from covary.varying import (
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
    "it a rule (docs/own-rule.md)."
)
_NOT_IN_PLACE = "Write the in-place function without its underscore."
_READS_VALUES = {
    "item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__",
    "__complex__", "__contains__", "equal", "allclose", "nonzero", "is_nonzero", "unique",
    "masked_select",
}  # fmt: skip
_RANDOM = {
    "rand_like", "randn_like", "randint_like", "bernoulli", "bernoulli_", "normal_", "uniform_",
    "multinomial", "poisson", "rrelu", "rrelu_",
}  # fmt: skip
_WRITES = {"__setitem__", "copy_", "index_copy_", "scatter_", "index_add_", "fill_"}
# Functions that have no rule: why, and what to do.
_WITHOUT_RULE = (
    (
        _READS_VALUES,
        "It reads the numbers of a value that varies, and what a model does with a number (a "
        "Python if, a numpy function) has no moments.",
        _REMEDY,
    ),
    (
        _WRITES,
        "It writes into a value that varies.",
        "Make a new tensor instead: torch.cat, torch.stack, torch.where.",
    ),
    (_RANDOM, "It draws random numbers of its own, whose variance would be lost.", _REMEDY),
)
# A constant in the type or shape of a value that varies.
_AS_ANOTHER = {
    Tensor.to, Tensor.type_as, Tensor.expand_as, Tensor.view_as, Tensor.reshape_as,
}  # fmt: skip
_ONE_NAME = {"axis": "dim", "keepdims": "keepdim"}
# Arguments that rules take by place, or by another name, or not at all.
_NAMES_TO_CHANGE = {*_ONE_NAME, "input", "other", "mat2", "out"}
# Of functions without a rule, which may be used on what does not vary.
_OF_CONSTANTS = Rule(lambda *args, **kwargs: None)
# A pass of draws needs not know which element belongs to which sample.
NO_SAMPLES: Any = None


class Call(NamedTuple):
    """A call of a torch function on values that vary."""

    name: str  # path of the module, function, and which of several calls
    kind: str  # how it is treated


class Pass(ABC):
    """What both kinds of passes share: where they are, how calls are named, where sources enter.

    Args:
        plan: which sources enter, and where.
        start: the path of the module before which noise enters; None for the inputs.
        batch_dim: the dimension of the inputs that is the batch.
    """

    is_drawing = False

    def __init__(self, plan: Plan, *, start: str | None, batch_dim: int) -> None:
        self.plan = plan
        self.is_still = plan.is_none  # whether nothing varies, errors of the inputs included
        self.is_linear = plan.is_linear  # whether no nonlinearity sees any variance
        self._weights = plan.weights_by_identity()
        self.batch_dim = batch_dim
        self._start = start
        self.function: Any = None
        self._where: list[Located] = []
        self._composed: list[str] = []
        self._counts: Counter[str] = Counter()

    @abstractmethod
    def lift(
        self,
        value: Tensor,
        name: str,
        samples: Samples | None = None,
        errors: InputErrors | None = None,
    ) -> Varying:
        """A plain tensor that noise enters; without ``samples``, it lies as inputs do.

        ``errors`` are those of an input that has a covariance already.
        """

    @abstractmethod
    def entered(self, x: Varying, source: Source) -> Varying:
        """A value with a source in it, at the call or the module that runs."""

    @abstractmethod
    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """What a layer gives for x, with the variance of its weights."""

    @abstractmethod
    def constant_start(self, x: Varying) -> Varying:
        """A value that does not vary yet, as the beginning of values that do."""

    @abstractmethod
    def noisy(self, x: Varying) -> Varying:
        """A value with the noise that enters before the nonlinearity that is being called."""

    @abstractmethod
    def follow(self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a rule makes of arguments, of which some vary."""

    def lifted(self, inputs: Any) -> Any:
        """Inputs as they go into the model: real tensors vary, whole numbers do not yet."""

        def one(value: Any) -> Any:
            if isinstance(value, Moments):
                # They have their batch in front, whatever inputs of the model have.
                axis = self._axis(value.mean)
                # The tape of another network would be swept again for each row.
                is_swept = isinstance(value.cov, Swept)
                cov = Full(value.cov.dense()) if is_swept else value.cov
                return self.lift(value.mean.movedim(0, axis), INPUT, errors=InputErrors(cov, axis))
            if not isinstance(value, Tensor) or isinstance(value, Varying) or not value.dim():
                return value
            if not value.is_floating_point():
                return Varying(value, self, -1, Samples.along(value, self._axis(value)))
            # What comes before may run in half precision, moments never do.
            return self.lift(value if value.dtype == torch.float64 else value.float(), INPUT)

        if has_errors(inputs):
            self.is_still = self.is_linear = False
        return pytree.tree_map(one, inputs, is_leaf=lambda each: isinstance(each, Moments))

    def _at_input(self, errors: InputErrors | None) -> list[Source]:
        """The sources that enter an input: its own errors, noise and others."""
        noise = self.plan.noise.at_input
        own = [*([] if errors is None else [errors]), *([noise] if noise.sigma else [])]
        return [*own, *self.plan.at_input]

    def enter(self, module: Located, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a module, whose path stands in the names of calls and in messages."""
        self._where.append(module)
        try:
            if module.path == self._start:
                args, kwargs = self.lifted((tuple(args), dict(kwargs)))
            result = module.forward(*args, **kwargs)
            if self.plan.enters_at(module.path):
                result = self._with_sources(result)
            values = [result] if isinstance(result, Varying) else varying_in([result])
            if any(value.is_stale for value in values):
                raise self.refusal(
                    "It gives a value into which another view of the same memory has written.",
                    _NOT_IN_PLACE,
                )
            return result
        except Exception as error:
            add_note = getattr(error, "add_note", None)  # from Python 3.11 on
            is_told = isinstance(error, ConversionError) or getattr(error, "__notes__", None)
            if add_note is not None and module.path and not is_told:
                add_note(f"(in module {module.path!r} of the converted model)")
            raise
        finally:
            self._where.pop()

    def _with_sources(self, result: Any) -> Any:
        """What a module gives, with the sources that enter at its output."""
        if not any(value.node >= 0 for value in varying_in([result])):
            return result
        for source in self.plan.at(self._path):
            result = pytree.tree_map(
                lambda each, source=source: (
                    self.entered(each, source)
                    if isinstance(each, Varying) and each.node >= 0
                    else each
                ),
                result,
            )
        return result

    def call(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """What a torch function makes of arguments, some of which are Varying."""
        if kwargs and not _NAMES_TO_CHANGE.isdisjoint(kwargs):
            args, kwargs = self._by_place(function, args, kwargs)
        rule = RULES.get(function)
        if rule is not None and rule.apply is None and rule.activation is None:
            if len(args) == 1 and not kwargs:  # a shape, some ten times in a pass
                return function(plain(args[0]))
            return function(*plain(list(args)), **plain(dict(kwargs)))
        if "inplace" in kwargs:  # torch gives it by name, always
            kwargs = dict(kwargs)
            if kwargs.pop("inplace") and rule is not None:
                rule = rule._replace(in_place=True)
        outer, self.function = self.function, function
        try:
            values = varying_in([*args, *kwargs.values()] if kwargs else args)
            if rule is None:
                name = name_of(function)
                if name in _READS_VALUES or any(value.node >= 0 for value in values):
                    reasons = (advice for names, *advice in _WITHOUT_RULE if name in names)
                    raise self.refusal(*next(reasons, ["There is no rule for it."]))
                rule = _OF_CONSTANTS
            device = values[0].numbers.device
            if not is_autocast(device):
                return self._checked_call(rule, args, kwargs, values)
            with without_autocast(device):
                return self._checked_call(rule, args, kwargs, values)
        finally:
            self.function = outer

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
        for place, name in ((0, "input"), (1, "other"), (1, "mat2")):
            if len(args) == place and name in given:
                args.append(given.pop(name))
        return args, given

    def _checked_call(
        self, rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
        if any(value.is_stale for value in values):
            raise self.refusal(
                "It takes a value into which another view of the same memory has written since.",
                _NOT_IN_PLACE,
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
        if not rule.in_place or not isinstance(result, Varying):
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
        uses = rule.has_weights and len(args) > 1 and id(args[1]) in self._weights
        if uses and isinstance(args[0], Varying) and args[0].node < 0:
            args = [self.constant_start(args[0]), *args[1:]]  # from here on, values vary
            values = [args[0], *values[1:]]
        varies = [value.node >= 0 for value in values]
        if self.function in _AS_ANOTHER and not isinstance(args[0], Varying):
            return self.function(*plain(list(args)), **plain(dict(kwargs)))
        if not rule.lifts and not all(varies):
            if not any(varies):
                if rule.is_moving and not self.is_drawing and isinstance(args[0], Varying):
                    return self.follow(rule, args, kwargs)
                return self._of_constants(args, kwargs, values)
            args, kwargs = pytree.tree_map(_unless_constant, (list(args), dict(kwargs)))
        if rule.is_composed:
            assert rule.apply is not None
            self._composed.append(name_of(self.function))
            try:
                return rule.apply(*args, **kwargs)
            finally:
                self._composed.pop()
        if rule.in_place and rule.is_choice:
            raise self.refusal(
                "It writes what holds for the means into a value that varies.", _NOT_IN_PLACE
            )
        if rule.in_place and rule.is_moving:
            raise self.refusal("It changes the shape of a value in place.", _NOT_IN_PLACE)
        if rule.in_place and not self.is_drawing:  # rules make new values
            name = name_of(self.function).rstrip("_")
            self.function = getattr(Tensor, name, self.function)
        found = self.follow(rule, args, kwargs)
        if rule.has_weights and self._weights:
            use = self._use_of_weights(args, kwargs)
            return found if use is None else self.with_weights(args[0], found, use)
        return found

    def meet_again(self, path: str) -> None:
        """Weights that vary, of this path, are used a second time."""
        raise self.refusal(
            "Its weights vary, and are used a second time: both uses would have to vary alike.",
            "Leave them out: covary.posterior.fit(net, data, layers=[...]), or no DropConnect.",
        )

    def _use_of_weights(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WeightUse | None:
        """How the layer that is called uses weights that vary; None if they do not."""
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        known = self._weights.get(id(weight))
        if known is None or not isinstance(args[0], Varying):
            return None
        path, weights = known
        self.plan.note_use(path)
        self._counts[f"{path}:weights"] += 1
        if self._counts[f"{path}:weights"] > 1:
            self.meet_again(path)
        names = ("bias", "stride", "padding", "dilation", "groups")
        options = dict(zip(names, args[2:], strict=False)) | dict(kwargs)
        assert isinstance(weight, Tensor)
        return WeightUse(f"{path}:weights", weights, weight, options)

    def _of_constants(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], values: Sequence[Varying]
    ) -> Any:
        """The function itself, of values none of which varies."""
        try:
            found = self.function(*plain(list(args)), **plain(dict(kwargs)))
        except RuntimeError as error:
            if all(value.is_floating_point() for value in values):
                raise
            raise self.refusal(
                f"Its inputs are whole numbers ({error}).",
                "Give real ones (x.float()); only embeddings take whole numbers.",
            ) from error
        if self.function is Tensor.__iter__:
            found = list(found)
        first = args[0] if args else None
        if isinstance(first, Tensor) and found is plain(first):
            return first  # written in place
        found = pytree.tree_map(lambda part: self.constant(part, values), found)
        return iter(found) if self.function is Tensor.__iter__ else found

    def constant(self, found: Any, values: Sequence[Varying]) -> Any:
        """What was found from these values, as a value of the same samples that does not vary."""
        if not isinstance(found, Tensor):
            return found
        node = -1 if all(value.node == -1 for value in values) else -2
        return Varying(found, self, node, NO_SAMPLES if self.is_drawing else _behind(found, values))

    def refusal(self, why: str, remedy: str = _REMEDY) -> ConversionError:
        """The error that names the module, the function that was called and what to do."""
        place = f"module {self._path!r}" if self._path else "the model's own forward"
        name = "" if self.function is None else f"{name_of(self.function)} in "
        return ConversionError(f"covary cannot convert {name}{place}: {why} {remedy}")

    def named(self, name: str | None = None) -> str:
        """The name of this call: path of the module, function, and which of several there."""
        name = self._label() if name is None else name
        self._counts[name] += 1
        count = self._counts[name]
        return name if count == 1 else f"{name}#{count}"

    def source(self) -> GaussianNoise:
        """The noise that enters before the activation that is being called."""
        return self.plan.noise.at(self._path) if RULES[self.function].has_noise else NO_NOISE

    def drops(self) -> bool:
        """Whether dropout in the module that runs is a source."""
        return self.plan.drops(self._path)

    @property
    def is_training(self) -> bool:
        """Whether the module that runs is in training mode."""
        return bool(self._where) and self._where[-1].module.training

    @property
    def _path(self) -> str:
        return self._where[-1].path if self._where else ""

    def _label(self) -> str:
        """Path of the module and function; of one that is made of others, its own name."""
        return _label_of(self._path, self._composed[0] if self._composed else self.function)

    def _label_of_source(self, source: Source) -> str:
        """The name of a source: that of dropout is the call's, that of others is the module's."""
        if self.function is not None:
            return self._label()
        return f"{self._path}:{source.word or source.kind}"

    def _axis(self, value: Tensor) -> int:
        return self.batch_dim if value.dim() > self.batch_dim else 0


class WeightUse(NamedTuple):
    """How a layer uses weights that vary."""

    name: str  # of the parameter, as a call
    weights: UncertainWeights
    weight: Tensor
    options: Mapping[str, Any]  # of the call

    def positions(self, x: Varying) -> Positions:
        """Where it applies them to what goes into the layer."""
        if self.weight.dim() > 4 or self.options.get("groups", 1) != 1:
            raise x.run.refusal(
                "Its weights vary, and it has groups or three dimensions.",
                "Weights of linear layers and of convolutions of one or two dimensions may vary.",
            )
        kernel = None if self.weight.dim() == 2 else Kernel.of(self.weight, self.options)
        found = Positions.of(x.samples, x.numbers.shape, kernel)
        if found is None:
            raise x.run.refusal(
                "Its weights vary, and samples of the batch have unequal parts of its input.",
                "Leave its weights out, or run samples one by one.",
            )
        return found


def has_errors(inputs: Any) -> bool:
    """Whether any of these inputs has a covariance of its own."""
    found = pytree.tree_leaves(inputs, is_leaf=lambda each: isinstance(each, Moments))
    return any(isinstance(value, Moments) for value in found)


@lru_cache(maxsize=4096)
def _label_of(path: str, function: Callable[..., Any] | str) -> str:
    name = function if isinstance(function, str) else name_of(function)
    return f"{path}:{name.strip('_')}"


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


def _takes(rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the function that a rule is made of has parameters for these arguments."""
    function, given = (rule.apply, args) if rule.apply else (rule.activation, args[1:])
    assert function is not None
    try:
        inspect.signature(function).bind(*given, **kwargs)
    except TypeError:
        return False
    return True
