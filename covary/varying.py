"""Varying: a tensor whose elements vary, on which unmodified models run.

To a model it is a tensor; it hands every torch function to the pass that it belongs to, and
``covary.rules`` says what becomes of it. ``Located`` tells a pass which module is running.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from covary.activations import MomentActivation
from covary.covariance.samples import Samples

_FILE_OF_CUSTOM_FUNCTIONS = str(Path("torch", "autograd", "function.py"))
# The pass that is running in this thread or task.
running: ContextVar[Any] = ContextVar("covary_running_pass", default=None)


class ConversionError(RuntimeError):
    """A model does something to values that vary for which there is no rule."""

    # Not a TypeError: Python's operators would go on and try the other operand.


class Lazy:
    """A tensor that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> Tensor:
        """The tensor."""
        with torch.no_grad():
            found = self._compute()
        del self._compute  # and what it refers to
        return found


class Varying(Tensor):
    """A tensor that varies: its mean (or, in a pass of draws, one draw), and where it comes from.

    Attributes:
        numbers: the mean or the draw, a plain tensor of the same shape.
        run: the pass that it belongs to.
        node: its index on the tape of the pass; -1 for a value that does not vary, such as
            integers before an embedding, and -2 for one that was chosen by the means.
        samples: which sample each element belongs to.
        spread: the variance of each element, for each sample, where it can be estimated without a
            sweep: right behind a nonlinearity, or in passes that estimate it everywhere.
        before_scaling: of a convolution, what it was applied to (with its index and numbers then),
            and how rows go back through both it and a scale of each channel, which is yet to come:
            rows, scale -> rows.
        into_activation: of what an increasing activation gave, what went into it, noise included,
            and the activation.
    """

    numbers: Tensor
    run: Any
    node: int
    samples: Samples
    spread: Lazy | None = None
    before_scaling: tuple[Varying, int, Tensor, Callable[[Tensor, Tensor], Tensor]] | None = None
    into_activation: Callable[[], tuple[Varying, MomentActivation]] | None = None
    _memory: list[int]
    _writes: int

    @staticmethod
    def __new__(
        cls, numbers: Tensor, run: Any, node: int, samples: Samples, view_of: Varying | None = None
    ) -> Varying:
        """Wrap a plain tensor, which may share its memory with that of another."""
        self: Varying = Tensor._make_wrapper_subclass(
            cls, numbers.shape, dtype=numbers.dtype, device=numbers.device
        )
        self.numbers, self.run, self.node, self.samples = numbers, run, node, samples
        # One list for all values that share memory, to count what is written into it.
        self._memory = [0] if view_of is None else view_of._memory
        self._writes = self._memory[0]
        return self

    def become(self, other: Varying) -> Varying:
        """Take the place of another value, as in-place functions do."""
        self.numbers, self.node, self.samples = other.numbers, other.node, other.samples
        self.spread, self.before_scaling = other.spread, None
        self.into_activation = other.into_activation
        self._memory[0] += 1
        self._writes = self._memory[0]
        return self

    def estimate(self, variances: Callable[[], Tensor]) -> Varying:
        """Set how the variance of each element is estimated, once it is asked for."""
        self.spread = Lazy(variances)
        return self

    @property
    def is_stale(self) -> bool:
        """Whether its memory was written into through another value."""
        return bool(self._writes != self._memory[0])

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if not isinstance(first, Varying):
            first = varying_in([*args, *(kwargs or {}).values()])[0]
        return first.run.call(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Reached by what goes around torch functions; the wrapper itself holds no numbers.
        raise ConversionError(
            f"covary cannot convert {function}: it was called in a way that no rule can see, for "
            "example by a scripted function. Start behind it: covary.convert(model, start=...)."
        )


# Made once: these are asked for some thousand times in a pass.
_SEQUENCES = (list, tuple)
_HOLD_NOTHING = {Tensor, nn.Parameter, int, float, bool, str, type(None)}


def varying_in(values: Sequence[Any]) -> list[Varying]:
    """The values that vary among these and in the lists, tuples and dicts among them, in order."""
    found: list[Varying] = []
    for value in values:
        if type(value) in _HOLD_NOTHING:
            continue
        if isinstance(value, Varying):
            found.append(value)
        elif isinstance(value, _SEQUENCES):
            found += varying_in(value)
        elif isinstance(value, dict):
            found += varying_in(list(value.values()))
    return found


def plain(value: Any) -> Any:
    """The same with the inner tensor in place of each Varying, also in lists, tuples and dicts."""
    if isinstance(value, Varying):
        return value.numbers
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, _SEQUENCES) and not isinstance(value, torch.Size):
        inside = [plain(each) for each in value]
        return type(value)(*inside) if hasattr(value, "_fields") else type(value)(inside)
    return value


def name_of(function: Any) -> str:
    """A torch function's name as people write it: ``relu``, ``__getitem__``, ``T``."""
    name: str = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


class Located:
    """The forward of a module of a converted model, which tells the running pass where it is."""

    def __init__(self, module: nn.Module, path: str) -> None:
        self.module = module
        self.path = path
        # Of a module whose forward was replaced on the instance, that one.
        self.replaced: Callable[..., Any] | None = vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, by way of the running pass."""
        run = running.get()
        return self.forward(*args, **kwargs) if run is None else run.enter(self, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


class CheckedHook:
    """A hook of a module of a converted model, which must not lose what varies."""

    def __init__(self, hook: Callable[..., Any], path: str) -> None:
        self.hook = hook
        self.path = path

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        """What the hook gives, if it varies as what it replaces did."""
        found = self.hook(module, *args)
        if found is not None and varying_in(args[-1:]) and not varying_in([found]):
            name = getattr(self.hook, "__name__", type(self.hook).__name__)
            raise ConversionError(
                f"covary cannot convert hook {name!r} of module {self.path!r}: it replaces a value "
                "that varies by one that does not. Remove the hook before covary.convert, or let "
                "it compute its result from what it is given, by torch functions."
            )
        return found


def in_custom_function() -> bool:
    """Whether a ``torch.autograd.Function`` runs, within the module that runs."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Located.__call__.__code__:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith(_FILE_OF_CUSTOM_FUNCTIONS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
