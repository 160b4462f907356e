"""Give a trained network a mean and a covariance, without retraining or rewriting it."""

from __future__ import annotations

import math
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from covary.covariance.sweep import Swept
from covary.inputs import Inputs, batch_of, device_of, in_order, repeated, some
from covary.linalg import is_finite
from covary.measuring import DrawnVariances, Measurements, described
from covary.models import evaluating, left_alone, twin_of
from covary.moments import Moments
from covary.nn import Dropout, Lift
from covary.nn.fidelity import TrackingWarning, frames_to_caller
from covary.nn.layers import Function
from covary.nn.protocol import Noisy, leaves_of_chain, plain_of
from covary.passes import Call, DrawPass, MomentPass, Pass, has_errors
from covary.settings import values_are_checked, without_autocast
from covary.sources import (
    DropoutOption,
    GaussianNoise,
    NoiseOption,
    NoisePlan,
    Plan,
    Source,
    SourceOption,
    by_name,
)
from covary.varying import (
    CheckedHook,
    ConversionError,
    Located,
    Varying,
    plain,
    running,
    varying_in,
)

VARIANCES = ("auto", "averaged", "propagated")
REAL = (torch.float32, torch.float64)
# In training, each step measures variances on so many of its samples, by so many draws of each.
_STEP_SAMPLES, _STEP_DRAWS, _STEP_MOMENTUM = 8, 4, 0.1
# A network that was never tracked measures them on the batch itself, by so many draws in all.
_LEAST_DRAWS = 256
_DRAWS_SEED = 0x5EED
# Means of two passes over the same inputs differ by less than this, relative to the largest.
_EQUAL = 1e-4


def convert(
    model: nn.Module,
    noise: NoiseOption | None = None,
    *,
    dropout: DropoutOption = False,
    sources: SourceOption | None = None,
    start: str | None = None,
    batch_dim: int = 0,
    variances: str = "auto",
) -> Converted:
    """The same model with moments: inputs as before, outputs ``covary.Moments``.

    Inputs may have errors of their own: ``covary.Moments``, the batch in front, in place of any
    tensor. Gaussian noise enters at the input and before every elementwise nonlinearity (but for
    roots, logarithms, reciprocals and powers, which are not defined for all numbers), and the model
    itself runs on values that carry their mean and where their covariance comes from. Nothing is
    traced or rewritten. Parameters and buffers are shared; the model is not changed.

    Args:
        model: any module in evaluation mode, of float32 or float64 parameters. A chain of
            ``covary.nn`` layers will do too: it keeps its own noise, if none is given here, and
            dropout that is noise (``covary.with_dropout``) is a source.
        noise: the standard deviation of the noise, everywhere (0.05 if None); or a mapping from
            ``"input"``, from paths of modules (``""`` is the model) or from types of modules, whose
            nonlinearities get it. The longest path counts, then the type, then ``""``.
        dropout: whether the model's dropout layers are sources of noise, as in MC dropout: True
            for all, or a list of paths of modules. Else they do nothing, as in evaluation.
        sources: more sources, by the path of the module at whose output they enter, or by
            ``"input"``: ``Relative(0.01)``, ``Rounding(step)`` or ``GaussianNoise(sigma)`` of
            ``covary.sources``, or a list of them; ``DropConnect(p)`` at a layer drops its weights.
        start: the path of a module: noise enters at its inputs and behind, and all before it runs
            as it is (the paper's mixed network).
        batch_dim: which dimension of the inputs is the batch. Moments have it in front.
        variances: how the variance before each nonlinearity is known. ``"averaged"``: as it was
            measured, on average over inputs, the same for all. ``"propagated"``: estimated for each
            input on the way, times a measured factor; more accurate, for about one more pass.
            ``"auto"``: the first, unless ``covary.track`` finds that it makes a difference, or
            sources depend on values (errors of inputs, relative ones, dropout, weights).

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
    if isinstance(model, nn.Module) and any(isinstance(m, Lift) for m in model.modules()):
        model, own, entering, drops = _from_chain(model)
        dropout = dropout or drops
        if noise is None:
            noise, sources = own, _both(entering, sources or {})
    noise = 0.05 if noise is None else noise
    _check_model(model)
    _check_options(model, start, batch_dim, variances)
    return Converted(model, Plan(model, noise, sources, dropout), start, batch_dim, variances)


class Converted(nn.Module):
    """A model that runs on moments; made by ``covary.convert``.

    ``print(net)`` shows a line for each call that matters: the module's path, the function, how it
    is treated, and, once tracked, its share of the output's variance.

    Attributes:
        plan: which sources enter, and where.
        calls: the calls of the last forward pass on values that vary, in order.
        sites: what was measured.
        posterior: how the weights vary, as ``covary.posterior.fit`` found; empty before.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        start: str | None,
        batch_dim: int,
        variances: str,
    ) -> None:
        super().__init__()
        self.plan = plan
        self.variances = variances
        self.start = start
        self.batch_dim = batch_dim
        self._place: dict[str, Any] = {"start": start, "batch_dim": batch_dim}
        self.model = twin_of(model)
        self.posterior = plan.posterior
        self.sites = Measurements()
        self.sites.set_propagates(variances == "propagated")
        self.calls: tuple[Call, ...] = ()
        for path, module in list(self.model.named_modules()):
            module.__dict__["forward"] = Located(module, path)
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.update({key: CheckedHook(hook, path) for key, hook in hooks.items()})
        self.register_load_state_dict_post_hook(_check_posterior)  # type: ignore[no-untyped-call]
        self.eval()  # as the model is

    @property
    def noise(self) -> NoisePlan:
        """The noise at the input and before nonlinearities."""
        return self.plan.noise

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Moments in place of each tensor that the model gives for these inputs."""
        # A tape is made of Python functions, which a compiler would only take apart. It is asked to
        # leave this alone if it is there; importing it would take longer than importing torch.
        compiler = sys.modules.get("torch._dynamo")
        run = self._forward if compiler is None else compiler.disable(self._forward)
        return run((inputs, named))

    def _forward(self, inputs: Inputs) -> Any:
        self._check_inputs(inputs)
        known = self._measured(inputs)
        try:
            return self._moments(known, inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.training or batch_of(inputs, self.batch_dim) != 1:
                raise
            # Of one sample nobody can tell which dimension of size 1 is the batch, nor whether the
            # model dropped it (squeeze): of two equal ones it is seen.
            twice = repeated(inputs, 2, self.batch_dim)
            try:
                return self._moments(known, twice, only_first=True)
            except (RuntimeError, ValueError, IndexError):
                raise error from None

    def _moments(
        self, known: Mapping[str, Tensor], inputs: Inputs, *, only_first: bool = False
    ) -> Any:
        """Moments in place of tensors; of all samples, or of the first alone."""
        run = self._moment_pass(known)
        outputs = self.run(run, inputs)
        found = pytree.tree_map(lambda value: _outcome(run, value, only_first), outputs)
        self.calls = tuple(run.calls)
        # Values know their pass: if it knew the tape, where they are, nothing would be freed
        # before Python looks for cycles.
        run.tape = None
        return found

    def _moment_pass(
        self, known: Mapping[str, Tensor] | None, levels: dict[str, Tensor] | None = None
    ) -> MomentPass:
        propagates = self.sites.propagates
        return MomentPass(self.plan, known, propagates=propagates, levels=levels, **self._place)

    def draw(self, *inputs: Any, generator: torch.Generator, **named: Any) -> Any:
        """One draw of the model with noise, as tensors in place of Moments; no gradients.

        The batch is in the dimension that the model gives it; see ``batch_axes``.
        """
        given: Inputs = (inputs, named)
        with torch.no_grad(), left_alone(self.model):
            positions = None
            if self.plan.has_weights:  # which sample an element belongs to, a pass of moments knows
                look = self._moment_pass(None)
                self.run(look, given)
                positions = look.positions
            run = DrawPass(self.plan, generator, positions=positions, **self._place)
            return plain(self.run(run, given))

    @torch.no_grad()
    def batch_axes(self, inputs: Inputs) -> Any:
        """The dimension of the batch in place of each tensor that the model gives and that varies.

        Moments have it in front, draws do not.
        """
        two = repeated(some(inputs, slice(0, 1), self.batch_dim), 2, self.batch_dim)
        with evaluating(self.model), left_alone(self.model):
            outputs = self.run(self._moment_pass(None), two)
        return pytree.tree_map(
            lambda each: _batch_axis(each, 2) if _varies(each) else None, outputs
        )

    def run(self, run: Pass, inputs: Inputs) -> Any:
        """What the model gives in this pass: Varying values in place of tensors that vary."""
        args, named = inputs
        named = in_order(self.model, named)  # so that inputs have the same names in any call
        before = running.set(run)
        try:
            if self.start is not None:
                outputs = self.model(*args, **named)
            else:
                with without_autocast(device_of(self.model)):
                    args, named = run.lifted((args, named))
                    outputs = self.model(*args, **named)
        except RuntimeError as error:
            advice = self._advice(str(error), inputs)
            if not advice:
                raise
            raise type(error)(f"{error} {advice}") from error
        finally:
            running.reset(before)
        leaves = pytree.tree_leaves(outputs)
        if not any(map(_varies, leaves)):
            place = "its inputs" if self.start is None else f"module {self.start!r}"
            kinds = dict.fromkeys(type(value).__name__ for value in leaves)
            raise ValueError(
                f"Nothing that this model gives ({', '.join(kinds) or 'nothing'}) varies with "
                f"{place}, where noise enters. Was the module called? Does a hook or the model "
                "replace its output by a constant, or by a choice (sign, argmax)? Are its inputs "
                "whole numbers that no embedding takes? Give real ones: x.float(). Does it give "
                "an object of its own? Let it give tensors, in tuples, lists or dicts."
            )
        return outputs

    def output_axis(self, value: Varying) -> int:
        """The dimension of the batch in a value that the model gives."""
        return _batch_axis(value, value.samples.batch)

    def _advice(self, message: str, inputs: Inputs) -> str:
        """What may be wrong with the inputs of a model that failed with this message, or ''."""
        given = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor)]
        real, own = (
            {str(v.dtype).removeprefix("torch.") for v in tensors if v.is_floating_point()}
            for tensors in (given, self.model.parameters())
        )
        if "type" in message and real and own and real != own:
            return (
                f"The inputs are {', '.join(sorted(real))} and the parameters "
                f"{', '.join(sorted(own))}: convert the inputs, x.float() or x.double()."
            )
        if given and all(value.dim() <= 1 for value in given):
            return (
                f"An input of shape {tuple(given[0].shape)} has no batch dimension, or nothing but "
                "it. Of one sample make a batch of one: x[None]."
            )
        return ""

    def _measured(self, inputs: Inputs) -> Mapping[str, Tensor]:
        """The variances at all calls that need them, measured now where they are not known."""
        with_errors = has_errors(inputs)
        if self.plan.is_none and not with_errors:
            return {}
        is_training = self.training and torch.is_grad_enabled()
        known = self.sites.known()
        if is_training and known:
            few = some(inputs, slice(0, _STEP_SAMPLES), self.batch_dim)
            found = self.measure(few, draws=_STEP_DRAWS, checks=False)
            self.sites.blend(found, _STEP_MOMENTUM)
            return self.sites.known()
        if self.sites.is_tracked and self.sites.with_errors >= with_errors:
            return known
        batch = batch_of(inputs, self.batch_dim)
        if batch == 1:
            inputs, batch = repeated(inputs, 2, self.batch_dim), 2
        # So many draws that each variance is known to some percent.
        found = self.measure(inputs, draws=1 + max(2, math.ceil(_LEAST_DRAWS / max(1, batch))))
        self.plan.check_all_used()
        if is_training:
            self.sites.replace(found)
        elif found:
            tracked = (
                "tracked on inputs without errors" if self.sites.is_tracked else "never tracked"
            )
            warnings.warn(
                f"This network was {tracked}, so the variances at its nonlinearities are "
                "measured on this batch alone, at the cost of several passes for each call. "
                "Measure them once, on some training inputs: covary.track(net, loader).",
                TrackingWarning,
                stacklevel=frames_to_caller(),
            )
        return found

    def measure(self, inputs: Inputs, *, draws: int, checks: bool = True) -> dict[str, Tensor]:
        """All that a pass needs to know, by so many draws of these inputs."""
        found = self.drawn_variances(inputs, draws=draws, checks=checks)
        return found | self.levels(inputs, found)

    @torch.no_grad()
    def drawn_variances(
        self,
        inputs: Inputs,
        *,
        draws: int,
        seed: int = 0,
        checks: bool = True,
        watch: Callable[[Any], None] | None = None,
    ) -> dict[str, Tensor]:
        """Variances before every nonlinearity (and of factors), by so many draws of these inputs.

        They are averaged over samples, and kept for each unit. In evaluation mode, always.

        Args:
            inputs: arguments of the model, positional and named.
            draws: how often each input is drawn, 2 or more.
            seed: decides the draws.
            checks: whether to look if the model itself is random, which costs one more pass.
            watch: takes what the model gives in each draw.
        """
        if self.plan.is_none and not has_errors(inputs):
            return {}
        # Not the seed itself: inputs are often made by the same one, and would be drawn again.
        generator = torch.Generator(device_of(self.model)).manual_seed(_DRAWS_SEED + seed)
        with evaluating(self.model), left_alone(self.model):
            look = self._moment_pass(None)
            outputs = self.run(look, inputs)
            if checks:
                _check_equal(outputs, self.run(self._moment_pass(None), inputs))
            spreads = {name: DrawnVariances(axes) for name, axes in look.axes.items()}

            def observe(name: str, values: Sequence[Tensor]) -> None:
                if name in spreads:  # nonlinearities that see no variance need none
                    spreads[name].add(values)

            for _ in range(draws if spreads or watch is not None else 0):
                run = DrawPass(
                    self.plan,
                    generator,
                    observe=observe,
                    positions=look.positions,
                    draws_all=False,
                    **self._place,
                )
                drawn = plain(self.run(run, inputs))
                if watch is not None:
                    watch(drawn)
        return {
            name + suffix: value
            for name, spread in spreads.items()
            for suffix, value in spread.measured().items()
        }

    @torch.no_grad()
    def levels(self, inputs: Inputs, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Averages over these inputs of the variances that are estimated for each sample."""
        found: dict[str, Tensor] = {}
        with evaluating(self.model), left_alone(self.model):
            self.run(self._moment_pass(known, levels=found), inputs)
        return found

    def _check_inputs(self, inputs: Inputs) -> None:
        given = pytree.tree_leaves(inputs, is_leaf=lambda each: isinstance(each, Moments))
        if self.start is not None and any(isinstance(value, Moments) for value in given):
            raise TypeError(
                f"This network has moments from module {self.start!r} on, and takes plain tensors: "
                "what is before it would lose the errors of Moments. Convert it without start=."
            )
        given = [value.mean if isinstance(value, Moments) else value for value in given]
        if not any(isinstance(value, Tensor) for value in given):
            kinds = ", ".join(dict.fromkeys(type(value).__name__ for value in given)) or "nothing"
            raise TypeError(
                f"A converted network takes tensors (B, ...) and got {kinds}. Make one of an array "
                "or a list: torch.as_tensor(x, dtype=torch.float32)."
            )
        for value in given:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            if self.start is None and value.dtype not in REAL:
                raise TypeError(
                    f"A converted network needs float32 or float64 inputs, got {value.dtype}. "
                    "Convert them first: x.float()."
                )
            if values_are_checked() and not is_finite(value):
                raise ValueError(
                    f"An input of shape {tuple(value.shape)} has NaN or infinite values. Clean the "
                    "data, or skip this check within `with covary.check_values(False):`."
                )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        settings = {f"noise/{path}": sigma for path, sigma in self.plan.noise.sigmas.items()}
        settings |= {f"source/{name}": value for name, value in self.plan.settings.items()}
        if self.start is not None:
            settings[f"start/{self.start}"] = 1.0
        for name, value in settings.items():
            destination[prefix + name.replace(".", "/")] = torch.tensor(value, dtype=torch.float64)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        settings = f"{prefix}noise/", f"{prefix}source/", f"{prefix}start/"
        noise, sources, start = (by_name(state_dict, each) for each in settings)
        saved = {path: float(sigma) for path, sigma in noise.items()}
        if saved and saved != self.plan.noise.sigmas:
            # What was measured belongs to this noise, as do the error bars that people saw.
            own, self.plan.noise = self.plan.noise, NoisePlan.of(saved)
            warnings.warn(
                f"This network had noise={own} and takes noise={self.plan.noise}, which was saved "
                "with the weights. For other noise, convert the model again and track it.",
                UserWarning,
                stacklevel=frames_to_caller(),
            )
        theirs = {name: float(value) for name, value in sources.items()}
        if saved and theirs != self.plan.settings:
            told = [
                ", ".join(f"{name}: {value:g}" for name, value in each.items()) or "none"
                for each in (theirs, self.plan.settings)
            ]
            raise ValueError(
                f"These measurements are of a network with other sources or dropout ({told[0]}) "
                f"than this one ({told[1]}). Convert the model with the same, or track it again."
            )
        place = next(iter(start), None)
        if saved and place != self.start:
            raise ValueError(
                f"These measurements are of a network with start={place!r}, and this one has "
                f"start={self.start!r}. Convert the model with the same start, or track it again."
            )
        if any(key.startswith(f"{prefix}model.") for key in state_dict):
            # What is known belongs to the weights: what comes with others replaces it.
            self.sites.forget()
            self.posterior.clear()
        others = {key: value for key, value in state_dict.items() if not key.startswith(settings)}
        super()._load_from_state_dict(others, prefix, *rest)

    def __repr__(self) -> str:
        start = "" if self.start is None else f", start={self.start!r}"
        head = f"Converted({type(self.model).__name__}, noise={self.plan.noise}{start})"
        return "\n".join([described(head, self.calls, self.sites.shares()), *self._about_weights()])

    def _about_weights(self) -> list[str]:
        """Which weights vary by a posterior, and which do not."""
        if self.posterior.is_empty:
            return []
        varying = self.posterior.prior_precision
        paths = [path for path, _ in self.plan.model.named_parameters()]
        biases = {_bias_of(path) for path in varying}
        others = [path for path in paths if path not in varying and path not in biases]
        return [
            f"  posterior of: {', '.join(varying)}",
            *([f"  fixed: {', '.join(others)}"] if others else []),
        ]


def _from_chain(
    net: nn.Module,
) -> tuple[nn.Module, dict[str | type[nn.Module], float], dict[str, list[Source]], list[str]]:
    """The conventional network of a chain, its noise before activations, its other noise.

    And the paths of dropout that is noise. What stands in front of ``Lift`` gets moments as well.
    """
    layers: dict[str, nn.Module] = {}
    noise: dict[str | type[nn.Module], float] = {}
    entering: dict[str, list[Source]] = {}
    waiting = 0.0  # the variance of noise since the last layer that is not noise
    drops: list[str] = []

    def enter(var: float) -> None:
        """Noise behind the last layer, or at the input."""
        if var:
            place = next(reversed(layers), "input")
            entering.setdefault(place, []).append(GaussianNoise(math.sqrt(var)))

    for path, layer in leaves_of_chain(net):
        name = path.replace(".", "_")
        if isinstance(layer, Lift):
            if layer.poisson:
                raise ValueError("convert takes no network of Poisson inputs: use covary.nn alone.")
            noise["input"] = 0.0 if layers else layer.noise
            enter(layer.noise**2 if layers else 0.0)
        elif isinstance(layer, Noisy):
            waiting += layer.noise**2
        else:
            found = plain_of(layer)
            if found is None:
                continue
            if isinstance(found, Function):
                noise[name] = math.sqrt(waiting)
            else:
                enter(waiting)
            layers[name], waiting = found, 0.0
            if isinstance(layer, Dropout) and layer.as_noise:
                drops.append(name)
    enter(waiting)
    return nn.Sequential(OrderedDict(layers)).eval(), noise, entering, drops


def _both(own: Mapping[str, list[Source]], others: SourceOption) -> SourceOption:
    """Sources by path, those of a chain before those that are given."""
    found: dict[str, list[Any]] = {path: [*every] for path, every in own.items()}
    for path, given in others.items():
        found.setdefault(path, []).extend(given if isinstance(given, list | tuple) else [given])
    return found


def check_has_moments(net: nn.Module, function: str) -> None:
    """Refuse a network that neither is converted nor has a Lift, on behalf of a function."""
    if not any(isinstance(module, Converted | Lift) for module in net.modules()):
        raise ValueError(
            f"{function} takes a network that covary.convert made, or one of covary.nn layers with "
            f"a Lift, and this {type(net).__name__} has no moments yet. Convert it first: "
            "net = covary.convert(model.eval(), noise=0.05)."
        )


def _bias_of(path: str) -> str:
    """The path of the bias that belongs to a weight."""
    return path.removesuffix("weight") + "bias"


def _check_posterior(net: nn.Module, _: object) -> None:
    """After loading: the posterior must be of the weights that are there now."""
    assert isinstance(net, Converted)
    net.posterior.check(net.plan.model)


def _varies(value: Any) -> bool:
    return isinstance(value, Varying) and value.node >= 0


def _outcome(run: MomentPass, value: Any, only_first: bool) -> Any:
    """Moments in place of a value that varies, of all samples or of the first alone."""
    if not isinstance(value, Varying):
        return value
    if value.node < 0:
        if only_first and value.dim() and value.samples.is_one_axis:
            return value.numbers.narrow(value.samples.axes[0], 0, 1)
        return value.numbers
    assert run.tape is not None
    axis = _batch_axis(value, run.tape.batch)
    if axis:
        value = value.movedim(axis, 0)
    moments = Moments(value.numbers, Swept(run.tape, value.node, value.numbers))
    return moments[:1] if only_first else moments


def _batch_axis(value: Varying, batch: int) -> int:
    """Which dimension of a value is the batch."""
    if value.dim() and value.samples.is_one_axis:
        axis = value.samples.axes[0] if value.samples.axes else 0
        if value.shape[axis] == batch:
            return axis
    raise ValueError(
        f"The model gives a tensor of shape {tuple(value.shape)} in which samples of the batch are "
        "mixed, so it has no covariance for each."
    )


def _check_equal(outputs: Any, again: Any) -> None:
    """Refuse a model that gives something else for the same inputs when it runs again."""
    for one, other in zip(varying_in([outputs]), varying_in([again]), strict=True):
        a, b = one.numbers, other.numbers
        if a.shape != b.shape or bool((a - b).abs().gt(_EQUAL * a.abs().amax()).any()):
            raise ConversionError(
                "This model gives something else each time for the same inputs: it draws random "
                "numbers itself (torch.rand, F.dropout(x, training=True)), which have no moments "
                "here. Take them out in evaluation mode (if self.training: ...), and let noise "
                "enter by covary.convert(model, noise=...) instead."
            )


def _check_options(model: nn.Module, start: object, batch_dim: object, variances: object) -> None:
    paths = list(dict(model.named_modules()))
    if start is not None and not isinstance(start, str):
        raise TypeError(
            f"start is the path of a module, such as {paths[-1]!r}, got a {type(start).__name__}."
        )
    if start is not None and start not in paths:
        near = ", ".join(map(repr, paths[1:9]))
        raise ValueError(f"start names {start!r}, and this model has no such module: {near} ...")
    if isinstance(batch_dim, bool) or not isinstance(batch_dim, int) or batch_dim < 0:
        raise ValueError(
            "batch_dim is the number of the dimension that is the batch, counted from 0, got "
            f"{batch_dim!r}."
        )
    if variances not in VARIANCES:
        raise ValueError(f"variances are one of {', '.join(VARIANCES)}, got {variances!r}.")


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
        if value.is_floating_point() and value.dtype not in REAL:
            raise TypeError(
                f"{path} is {value.dtype}, which has neither the range nor the digits for "
                "variances. Convert the model in single precision: covary.convert(model.float())."
            )
        numbers = value if value.layout is torch.strided else value.coalesce().values()
        if not value.is_meta and not bool(torch.isfinite(numbers).all()):
            raise ValueError(
                f"{path} has NaN or infinite values, so every output would be NaN. Load good "
                "weights before convert."
            )
