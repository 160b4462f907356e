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
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary import activations
from covary.activations import MomentActivation
from covary.covariance import Full
from covary.covariance.samples import Samples
from covary.covariance.sweep import Pull, Swept, Tape
from covary.covariance.terms import INPUT, IndependentTerm, Response, Term
from covary.linalg import summed_to
from covary.moments import Moments
from covary.nn.layers import mean_of_constant_variance
from covary.rules import EXACT, LINEARISED, MATCHED, PRODUCT, RULES, Rule
from covary.settings import covariance_grad, covariance_is_supervised, is_autocast, without_autocast
from covary.sources import (
    NO_NOISE,
    GaussianNoise,
    InputErrors,
    Kernel,
    Plan,
    Positions,
    Source,
    UncertainWeights,
    WeightTerm,
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
_RELU = activations.get("relu")
# Behind the name of a call: the average of what was estimated there.
LEVEL = ":level"
# Numbers of the patches of a layer that are kept from a pass to its sweep: 16 MB.
_FEW_PATCHES = 2**22
# What goes into a layer whose weights vary is measured at about so many of its positions.
_POSITIONS = 64


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
        return [*own, *self.plan.at(INPUT)]

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
            raise self.refusal(
                "Its weights vary, and are used a second time: both uses would have to vary alike.",
                "Leave them out: covary.posterior.fit(net, data, layers=[...]).",
            )
        names = ("bias", "stride", "padding", "dilation", "groups")
        options = dict(zip(names, args[2:], strict=False)) | dict(kwargs)
        return WeightUse(f"{path}:weights", weights, args[1], options)

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
        self.tape.axes[name] = self._axis(value)
        var = value.new_zeros([1] * value.dim())
        terms: list[Term] = []
        for source in self._at_input(errors):
            term = source.term(name, samples, INPUT, value, var)
            var = var + source.variance(value, var)
            last = terms[-1] if terms else None
            if isinstance(last, IndependentTerm) and isinstance(term, IndependentTerm):
                terms[-1] = replace(last, var=last.var + term.var)  # one term costs less than two
            else:
                terms.append(term)
        node = self.tape.add((), lambda _: (), terms[0] if terms else None)
        for term in terms[1:]:
            node = self.tape.add((node,), lambda rows: (rows,), term)
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
        if source.needs_variance:
            self.axes[name] = x.samples.axes
            var = self.variance(name, x)
        term = source.term(name, x.samples, source.kind, x.numbers, var)
        value = self.write(MATCHED, x.numbers, [x], lambda rows: (rows,), x.samples, term)
        mean, spread = x.numbers, x.spread
        if spread is not None:
            value.estimate(lambda: spread.value + source.variance(mean, var))
        return value

    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """The same mean, and the covariance that the weights add."""
        positions = use.positions(x)
        self.positions[use.name] = positions
        numbers, weights = x.numbers.detach(), use.weights

        def taken() -> Tensor:
            with torch.no_grad():
                return weights.inputs(positions.patches(numbers))

        # Patches of large images are made when they are looked at: they take far more than images.
        size = found.numbers[:, :1].numel() * weights.variance.shape[1]
        inputs = cache(taken) if positions.kernel is None or size < _FEW_PATCHES else taken
        more = numbers.new_zeros(1, 1, 1)
        if not weights.linearised:
            self.axes[use.name] = [0, 1]
            with torch.no_grad():
                more = weights.spread(self._input_variance(use.name, x, positions, weights))
        term = WeightTerm(
            use.name, found.samples, weights.kind, weights=weights, inputs=inputs, more=more,
            arrange=positions.arrange,
        )  # fmt: skip
        self.calls.append(Call(use.name, "weights vary"))
        value = self.write(
            MATCHED, found.numbers, [found], lambda rows: (rows,), found.samples, term
        )
        spread, shape = found.spread, found.numbers.shape
        if spread is not None and weights.linearised:
            value.estimate(lambda: spread.value)
        elif spread is not None:

            def spreads() -> Tensor:
                own = weights.spread(inputs().square()) + more
                if weights.left is not None:
                    own = own @ weights.left.square().mT
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
        level = positions.patches(spread).mean((1, 2), keepdim=True)
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
        pull: Pull,
        samples: Samples,
        term: Term | None = None,
        *,
        view_of: Varying | None = None,
    ) -> Varying:
        """A new value, a function of its parents that is linear as far as covariances go."""
        assert self.tape is not None
        types = [parent.numbers.dtype for parent in parents]
        if types != [mean.dtype] * len(types):
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
            response = Response((_deviation(var),), source.sigma**2, gain)
            term = IndependentTerm(name, x.samples, var=own, response=response)
        mean = mean_of_constant_variance(mu, var, mean, gain, activation)
        # A place of its own for what goes into the activation, to which the noise may move.
        assert self.tape is not None
        before = self.tape.add([x.node], lambda rows: (rows,))
        node = self.tape.add([before], lambda rows: (rows * gain,), term, gain)
        self.tape.widest = max(self.tape.widest, mean.numel())
        value = Varying(mean, self, node, x.samples)
        samples, spread = x.samples, x.spread

        def into_activation() -> tuple[Varying, MomentActivation]:
            assert self.tape is not None
            noise = source.variance(mu, mu)
            self.tape.set_term(before, IndependentTerm(name, samples, var=noise))
            rest = Response(response.deviations)
            self.tape.set_term(node, IndependentTerm(name, samples, var=excess, response=rest))
            noisy = Varying(mu, self, before, samples)
            if spread is not None:
                noisy.estimate(lambda: spread.value + source.sigma**2)
            return noisy, activation

        value.into_activation = into_activation
        return value.estimate(lambda: torch.addcmul(own, gain * known, gain).detach())

    def noisy(self, x: Varying) -> Varying:
        """The same mean, and the noise that enters here."""
        var = self.source().variance(x.numbers, x.numbers)
        term = IndependentTerm(self._label(), x.samples, var=var)
        return self.write(EXACT, x.numbers, [x], lambda rows: (rows,), x.samples, term)

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
        response = Response((_deviation(2 * vx), _deviation(2 * vy)), is_split=True)
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
            apart_by = _deviation(var)
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
        inputs = use.weights.inputs(positions.patches(x.numbers))
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


def has_errors(inputs: Any) -> bool:
    """Whether any of these inputs has a covariance of its own."""
    found = pytree.tree_leaves(inputs, is_leaf=lambda each: isinstance(each, Moments))
    return any(isinstance(value, Moments) for value in found)


def _deviation(var: Tensor) -> Tensor:
    """The root of a variance, never 0: what is divided by it is 0 there."""
    return var.detach().clamp(min=torch.finfo(var.dtype).tiny).sqrt()


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


def _in_types(inner: Pull, types: Sequence[torch.dtype]) -> Pull:
    """The same pull, in the type of each parent."""
    return lambda rows: [
        part if part is None else part.to(each)
        for part, each in zip(inner(rows), types, strict=True)
    ]
