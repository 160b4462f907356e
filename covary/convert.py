"""Give a trained network a mean and a covariance, without retraining or rewriting it."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from covary.covariance.swept import Swept
from covary.measuring import Spread
from covary.models import twin_of
from covary.moments import Moments
from covary.nn import Lift
from covary.nn.fidelity import TrackingWarning, frames_to_caller
from covary.passes import Call, DrawPass, MomentPass, Pass
from covary.settings import values_are_checked, without_autocast
from covary.sources import NoiseOption, NoisePlan
from covary.varying import CheckedHook, Located, Varying, running

VARIANCES = ("auto", "averaged", "propagated")
# In training, each step measures variances on so many of its samples, by so many draws of each.
_STEP_SAMPLES, _STEP_DRAWS, _STEP_MOMENTUM = 8, 4, 0.1
# A network that was never tracked measures them on the batch itself, by so many draws in all.
_LEAST_DRAWS = 256


def convert(
    model: nn.Module,
    noise: NoiseOption = 0.05,
    *,
    start: str | None = None,
    batch_dim: int = 0,
    variances: str = "auto",
) -> Converted:
    """The same model with moments: inputs as before, outputs ``covary.Moments``.

    Gaussian noise enters at the input and before every elementwise nonlinearity, and the model
    itself runs on values that carry their mean and where their covariance comes from. Nothing is
    traced or rewritten. Parameters and buffers are shared; the model is not changed.

    Args:
        model: any module in evaluation mode, of float32 or float64 parameters.
        noise: the standard deviation of the noise, everywhere; or a mapping from ``"input"``, from
            paths of modules or from types of modules.
        start: the path of a module: noise enters at its inputs and behind, and all before it runs
            as it is (the paper's mixed network).
        batch_dim: which dimension of the inputs is the batch. Moments have it in front.
        variances: how the variance before each nonlinearity is known. ``"averaged"``: as it was
            measured, on average over inputs, the same for all. ``"propagated"``: estimated for each
            input on the way, times a measured factor; more accurate, for about one more pass.
            ``"auto"``: the first, unless ``covary.track`` finds that it makes a difference.

    Returns:
        A module. ``covary.track(net, inputs)`` measures the variances that it needs; then
        ``net(x)`` gives Moments in place of each tensor that the model gives.

    Examples:
        >>> import covary, torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
        >>> net = covary.convert(model, noise=0.1)
        >>> _ = covary.track(net, torch.randn(64, 4))
        >>> net(torch.ones(2, 4)).covariance_matrix.shape
        torch.Size([2, 3, 3])
    """
    _check_model(model)
    return Converted(model, noise, start=start, batch_dim=batch_dim, variances=variances)


class Converted(nn.Module):
    """A model that runs on moments; made by ``covary.convert``.

    ``print(net)`` shows a line for each call that matters: the module's path, the function, how it
    is treated, and, once tracked, its share of the output's variance.
    """

    def __init__(
        self,
        model: nn.Module,
        noise: NoiseOption,
        *,
        start: str | None,
        batch_dim: int,
        variances: str,
    ) -> None:
        super().__init__()
        paths = dict(model.named_modules())
        if start is not None and start not in paths:
            near = ", ".join(repr(path) for path in list(paths)[1:9])
            raise ValueError(
                f"start names {start!r}, and this model has no such module: {near} ..."
            )
        if variances not in VARIANCES:
            raise ValueError(f"variances are one of {', '.join(VARIANCES)}, got {variances!r}.")
        self.noise = NoisePlan(noise, model)
        self.variances = variances
        self.start = start
        self.batch_dim = batch_dim
        self.model = twin_of(model)
        self.sites = Measurements()
        self.sites.set_propagates(variances == "propagated")
        self._calls: tuple[Call, ...] = ()
        for path, module in list(self.model.named_modules()):
            module.__dict__["forward"] = Located(module, path)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.update({key: CheckedHook(hook, path) for key, hook in hooks.items()})
        self.eval()  # as the model is

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Moments in place of each tensor that the model gives for these inputs."""
        # A tape is made of Python functions, which a compiler would only take apart. It is asked to
        # leave this alone if it is there; importing it would take longer than importing torch.
        compiler = sys.modules.get("torch._dynamo")
        run = self._forward if compiler is None else compiler.disable(self._forward)
        return run(*inputs, **named)

    def _forward(self, *inputs: Any, **named: Any) -> Any:
        self._check_inputs((inputs, named))
        known = self._measured((inputs, named))
        run = self.moment_pass(known)
        outputs = self._run(run, inputs, named)
        self._calls = tuple(run.calls)
        return outputs

    def moment_pass(
        self, known: Mapping[str, Tensor] | None, levels: dict[str, Tensor] | None = None
    ) -> MomentPass:
        """A pass with these measurements; see there."""
        return MomentPass(
            self.noise,
            known,
            propagates=self.sites.propagates,
            levels=levels,
            start=self.start,
            batch_dim=self.batch_dim,
        )

    def draw(self, *inputs: Any, generator: torch.Generator, **named: Any) -> Any:
        """One draw of the model with noise, as tensors in place of Moments; no gradients."""
        run = DrawPass(self.noise, generator, start=self.start, batch_dim=self.batch_dim)
        with torch.no_grad():
            return self._run(run, inputs, named)

    def _run(self, run: Pass, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        before = running.set(run)
        try:
            if self.start is not None:
                outputs = self.model(*inputs, **named)
            else:
                with without_autocast(self._device()):
                    inputs, named = run.lifted((inputs, named))
                    outputs = self.model(*inputs, **named)
        finally:
            running.reset(before)
        outputs = self._finished(run, outputs)
        if isinstance(run, MomentPass):
            # Values know their pass: if it knew the tape, where they are, nothing would be freed
            # before Python looks for cycles.
            run.tape = None
        return outputs

    def _finished(self, run: Pass, outputs: Any) -> Any:
        found = [value for value in pytree.tree_leaves(outputs) if isinstance(value, Varying)]
        if not any(value.node >= 0 for value in found):
            place = "its inputs" if self.start is None else f"module {self.start!r}"
            raise ValueError(
                f"Nothing that this model gives depends on {place}, where noise enters. Was the "
                "module called, and does a hook or the model replace its output by a constant?"
            )
        return pytree.tree_map(lambda value: self._outcome(run, value), outputs)

    def _outcome(self, run: Pass, value: Any) -> Any:
        if not isinstance(value, Varying):
            return value
        if isinstance(run, DrawPass) or value.node < 0:
            return value.numbers
        assert isinstance(run, MomentPass)
        assert run.tape is not None
        if value.dim() == 0 or not value.samples.is_one_axis:
            raise ValueError(
                f"The model gives a tensor of shape {tuple(value.shape)} in which samples of the "
                "batch are mixed, so it has no covariance for each."
            )
        axis = value.samples.axes[0] if value.samples.axes else 0
        token = running.set(run)
        try:
            if axis:
                value = value.movedim(axis, 0)
            if value.dim() == 1:
                value = value[:, None]
        finally:
            running.reset(token)
        return Moments(value.numbers, Swept(run.tape, value.node, value.numbers))

    def _measured(self, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Mapping[str, Tensor]:
        """The variances at all calls that need them, measured now where they are not known."""
        if self.noise.is_none:
            return {}
        known = self.sites.known()
        if self.training and torch.is_grad_enabled():
            if not known:
                self.sites.replace(self.measure(inputs, draws=_draws(inputs, self.batch_dim)))
            else:
                some = _first_samples(inputs, _STEP_SAMPLES, self.batch_dim)
                self.sites.blend(self.measure(some, draws=_STEP_DRAWS), _STEP_MOMENTUM)
            return self.sites.known()
        if known:
            return known
        warnings.warn(
            "This network was never tracked, so the variances at its nonlinearities are measured "
            "on this batch alone, at the cost of several passes for each call. Measure them once, "
            "on some training inputs: covary.track(net, loader).",
            TrackingWarning,
            stacklevel=frames_to_caller(),
        )
        return self.measure(inputs, draws=_draws(inputs, self.batch_dim))

    @torch.no_grad()
    def measure(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]], *, draws: int, seed: int = 0
    ) -> dict[str, Tensor]:
        """Variances before every nonlinearity (and of factors), by so many draws of these inputs.

        They are averaged over samples, and kept for each unit. In evaluation mode, always.

        Args:
            inputs: arguments of the model, positional and named.
            draws: how often each input is drawn, 2 or more.
            seed: decides the draws.
        """
        args, named = inputs
        generator = torch.Generator(self._device()).manual_seed(seed)
        with _evaluating(self.model):
            look = self.moment_pass(None)
            self._run(look, args, named)
            spreads = {name: Spread(axes) for name, axes in look.axes.items()}
            for _ in range(draws):
                run = DrawPass(
                    self.noise,
                    generator,
                    observe=lambda name, values: spreads[name].add(values),
                    start=self.start,
                    batch_dim=self.batch_dim,
                )
                self._run(run, args, named)
            found = {
                name + suffix: value
                for name, spread in spreads.items()
                for suffix, value in spread.measured().items()
            }
            return found | self.levels(inputs, found)

    @torch.no_grad()
    def levels(
        self, inputs: tuple[tuple[Any, ...], dict[str, Any]], known: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Averages over these inputs of the variances that are estimated for each sample."""
        found: dict[str, Tensor] = {}
        with _evaluating(self.model):
            self._run(self.moment_pass(known, levels=found), *inputs)
        return found

    def _device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def _check_inputs(self, inputs: Any) -> None:
        for value in pytree.tree_leaves(inputs, is_leaf=lambda each: isinstance(each, Moments)):
            if isinstance(value, Moments):
                raise TypeError("A converted network takes plain tensors and got Moments.")
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if self.start is None and value.dtype not in (torch.float32, torch.float64):
                raise TypeError(
                    f"A converted network needs float32 or float64 inputs, got {value.dtype}. "
                    "Convert them first: x.float()."
                )
            if values_are_checked() and not bool(torch.isfinite(value).all()):
                raise ValueError(
                    f"An input of shape {tuple(value.shape)} has NaN or infinite values. Clean the "
                    "data, or skip this check within `with covary.check_values(False):`."
                )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for path, sigma in self.noise.sigmas.items():
            key = f"{prefix}noise/{path.replace('.', '/')}"
            destination[key] = torch.tensor(sigma, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        start = f"{prefix}noise/"
        saved = {
            key.removeprefix(start).replace("/", "."): float(value)
            for key, value in state_dict.items()
            if key.startswith(start)
        }
        if saved and saved != self.noise.sigmas:
            # What was measured belongs to this noise, as do the error bars that people saw.
            own, self.noise = self.noise, NoisePlan.of(saved)
            warnings.warn(
                f"This network had noise={own} and takes noise={self.noise}, which was saved with "
                "the weights. For other noise, convert the model again and track it.",
                UserWarning,
                stacklevel=frames_to_caller(),
            )
        others = {key: value for key, value in state_dict.items() if not key.startswith(start)}
        super()._load_from_state_dict(others, prefix, *rest)

    def __repr__(self) -> str:
        return described(self)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of the last forward pass on values that vary, in order."""
        return self._calls


def described(net: Converted) -> str:
    """The table that ``print(net)`` shows."""
    start = "" if net.start is None else f", start={net.start!r}"
    head = f"Converted({type(net.model).__name__}, noise={net.noise}{start})"
    if not net.calls:
        return f"{head}\n  (run or track it to see how each call is treated)"
    shares = net.sites.shares()
    rows, exact = [], []
    for name, kind in net.calls:
        path, _, function = name.rpartition(":")
        if kind == "exact":
            exact.append(function)
            continue
        share = shares.get(name)
        shown = "" if share is None else f"{100 * share:.1f}%"
        rows.append((path or "(model)", function, kind, shown))
    title = ("module", "function", "how it is treated", "share of variance")
    widths = [max(len(row[i]) for row in [title, *rows]) for i in range(4)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [title, *rows]
    ]
    counts = ", ".join(f"{exact.count(each)} {each}" for each in dict.fromkeys(exact))
    return "\n".join([head, *lines, f"  exact: {counts or 'nothing'}"])


class Measurements(nn.Module):
    """What was measured at the calls of a converted network, as buffers saved with its weights."""

    def known(self) -> dict[str, Tensor]:
        """Variances and covariances by the name of the call."""
        return self._of("measured/")

    def shares(self) -> dict[str, float]:
        """The part that each source had in the variance of the output, on average."""
        return {name: float(share) for name, share in self._of("share/").items()}

    @property
    def propagates(self) -> bool:
        """Whether variances are estimated for each sample, or the same for all."""
        return "propagates" in self._buffers

    def set_propagates(self, wanted: bool) -> None:
        """Estimate variances for each sample from now on, or no more."""
        if wanted:
            self._buffers["propagates"] = torch.tensor(True)
        else:
            self._buffers.pop("propagates", None)

    def replace(self, measured: Mapping[str, Tensor]) -> None:
        """Forget what was measured before."""
        for name in [name for name in self._buffers if name != "propagates"]:
            del self._buffers[name]
        for name, value in measured.items():
            self._set("measured/", name, value)

    def blend(self, measured: Mapping[str, Tensor], momentum: float) -> None:
        """Move what is known towards what was measured now, by this fraction."""
        known = self.known()
        for name, value in measured.items():
            before = known.get(name)
            fits = before is not None and before.shape == value.shape
            self._set(
                "measured/",
                name,
                torch.lerp(before, value, momentum) if fits else value,  # type: ignore[arg-type]
            )

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Keep the part of each source."""
        for name, share in shares.items():
            self._set("share/", name, torch.tensor(share, dtype=torch.float32))

    def _of(self, prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix).replace("/", "."): value
            for name, value in self._buffers.items()
            if name.startswith(prefix) and value is not None
        }

    def _set(self, prefix: str, name: str, value: Tensor) -> None:
        self._buffers[prefix + name.replace(".", "/")] = value.detach()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # What was measured belongs to the weights: all of it is replaced by what the file has.
        self._buffers.clear()
        for key, value in state_dict.items():
            if key.startswith(prefix):
                self._buffers[key.removeprefix(prefix)] = torch.empty_like(value)
        super()._load_from_state_dict(state_dict, prefix, *rest)


def _draws(inputs: Any, batch_dim: int) -> int:
    """How often to draw a batch, so that each variance is known to some percent."""
    return 1 + max(2, math.ceil(_LEAST_DRAWS / max(1, batch_of(inputs, batch_dim))))


def batch_of(inputs: Any, batch_dim: int) -> int:
    """The number of samples in inputs."""
    for value in pytree.tree_leaves(inputs):
        if isinstance(value, Tensor) and value.dim() > batch_dim:
            return value.shape[batch_dim]
    raise ValueError("There is no tensor among the inputs of this network.")


def _first_samples(inputs: Any, count: int, batch_dim: int) -> Any:
    def some(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > batch_dim:
            return value.narrow(batch_dim, 0, min(count, value.shape[batch_dim]))
        return value

    return pytree.tree_map(some, inputs)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Within this block the model is in evaluation mode, whatever modes its modules have."""
    modes = [(module, module.training) for module in model.modules() if module.training]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes a torch.nn.Module, got {type(model).__name__}.")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("convert needs the model before torch.jit, not a scripted or traced one.")
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise ValueError("convert needs a model before torch.compile, not after it.")
        if isinstance(module, Lift | Converted):
            raise ValueError(
                f"This network has moments already ({path or 'the model'} is a "
                f"{type(module).__name__}). Convert ordinary torch modules."
            )
        if module.training:
            where = f"module {path!r} of the model" if path else "the model"
            raise ValueError(
                f"convert needs a model in evaluation mode, and {where} is in training mode. Call "
                "model.eval() first; to fine-tune, call net.train() on what convert gives."
            )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"The parameters of the model are on several devices ({', '.join(map(str, devices))}). "
            "Move it to one: model.to(device)."
        )
    for path, value in [*model.named_parameters(), *model.named_buffers()]:
        if not value.is_floating_point():
            continue
        if value.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{path} is {value.dtype}, which has neither the range nor the digits for "
                "variances. Convert the model in single precision: covary.convert(model.float())."
            )
        if not value.is_meta and not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{path} has NaN or infinite values, so every output would be NaN. Load good "
                "weights before convert."
            )
