"""A Gaussian posterior of the weights of a trained network: ``covary.posterior.fit``.

Laplace's approximation: around the trained weights, the precision of the posterior is the
generalised Gauss-Newton matrix of the training data plus the precision of the prior. Of each layer
it is taken as diagonal in the basis of its Kronecker factors (the second moments of what goes into
the layer, and of gradients that come back to it), with the curvature along each axis of that basis
measured from gradients (docs/theory.md, eqs. 44-47).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from covary.budget import kind_of
from covary.convert import Converted, convert
from covary.covariance import Full
from covary.covariance.terms import WEIGHTS
from covary.inputs import Inputs, arguments, batch_of, some
from covary.models import left_alone
from covary.moments import Moments
from covary.nn import Lift
from covary.nn.fidelity import TrackingWarning
from covary.passes import MomentPass, WeightUse
from covary.progress import Steps, shown
from covary.rules import MATCHED
from covary.sources import Positions, UncertainWeights
from covary.tracking import track
from covary.uncertainty import scores
from covary.varying import Varying, plain, varying_in

STRUCTURES = ("kronecker", "diagonal")
LIKELIHOODS = ("classification", "regression")
# Samples in one backward pass.
_AT_ONCE = 128
# Of more outputs than this, gradients are those of random labels: one backward pass for all.
_MOST_EXACT = 16
# A basis is found for layers up to this width, and a variance kept of up to so many weights.
_WIDEST, _MOST_WEIGHTS = 8192, 2**27
# Numbers of the largest tensor while gradients are made: 64 MB in single precision.
_NUMBERS_AT_A_TIME = 2**24
# Precisions of a prior are looked for between these.
_PRECISIONS = 1e-8, 1e12
# On so many held-out samples, these factors of the prior and these temperatures are tried.
_HELD_OUT = 2048
_FACTORS = tuple(10 ** (k / 2) for k in range(-8, 4))
_TEMPERATURES = tuple(10 ** (k / 4) for k in range(-20, 5))


def fit(
    net: nn.Module,
    data: Any,
    *,
    layers: str | Sequence[str] = "all",
    structure: str = "kronecker",
    likelihood: str | None = None,
    prior_precision: str | float = "marginal",
    held_out: Any = None,
    noise_variance: float | Tensor | None = None,
    linearised: bool = True,
    progress: bool = True,
) -> Converted:
    """A converted network whose weights vary by their posterior, given the training data.

    The network has to be trained already: the posterior is a Gaussian around its weights. They add
    their variance to every output, as ``weights of ...`` in ``out.budget()``. It is saved with the
    weights, and refused once these have changed.

    Args:
        net: what ``covary.convert`` gave, or what it takes: a module in evaluation mode (without
            noise then), or a chain of ``covary.nn`` layers. It is not changed; weights are shared.
        data: the training data, as a loader of ``(inputs, targets)`` or a pair of tensors.
        layers: ``"all"`` linear layers and convolutions of one or two dimensions, the ``"last"``
            of them, or a list of paths of modules. Others stay fixed, as print(net) shows.
        structure: ``"kronecker"``: correlated within a layer, in the basis of its Kronecker
            factors. ``"diagonal"``: independent, for layers that are too wide for that.
        likelihood: ``"classification"`` (logits, labels) or ``"regression"`` (Gaussian noise around
            the outputs); None goes by the type of the targets.
        prior_precision: of the Gaussian prior of the weights around 0. ``"marginal"``: for each
            layer that of the largest marginal likelihood of the data. ``"held-out"``: these times
            the smallest factor that ``held_out`` cannot tell from the best. Or a number, for all.
        held_out: data that the network was not trained on, as ``data``. By their likelihood, a
            temperature is chosen that all variances of weights are multiplied by: layers are taken
            as independent, and so vary too much. In regression the noise comes from them, too.
        noise_variance: in regression, the variance of targets around outputs: a number, or one for
            each output; None estimates it by the average squared error on ``held_out`` or ``data``.
            It is added to the output as ``noise at targets``.
        linearised: whether outputs are taken as linear in how the weights vary, which is the model
            that this posterior belongs to. If not, means and gains at nonlinearities take the
            variance of weights in front of them into account, which is for narrow posteriors.
        progress: whether to show progress on a terminal.

    Returns:
        A new network, tracked and ready to use. ``net.posterior`` has the prior precision of each
        layer and the logarithm of the marginal likelihood.

    Examples:
        >>> import covary, torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
        >>> net = covary.posterior.fit(model, (x, y))
        >>> list(net(x).budget())
        ['weights of 2', 'weights of 0']
    """
    _check_options(structure, likelihood, prior_precision, held_out)
    new = _fresh(net)
    with shown(progress) as steps, left_alone(new.model):
        first = next(iter(_Data(data, new)), None)
        if first is None:
            raise ValueError("A posterior needs training data, and got no batch of them.")
        how = likelihood or ("regression" if first[1].is_floating_point() else "classification")
        chosen, left_out, axis = _chosen(new, first[0], layers, structure)
        task = _Task(how, axis)
        if how == "regression":
            others = data if held_out is None else held_out
            task = replace(task, noise=_noise(new, task, noise_variance, others, steps))
        elif noise_variance is not None:
            raise ValueError("noise_variance= is for regression, and this is classification.")
        log_likelihood, count = _log_likelihood(new, data, task, steps)
        if structure == "kronecker":
            chosen = _bases(new, data, task, chosen, count, steps)
        curvatures = _curvatures(new, data, task, chosen, steps)
        found = _Found(new, chosen, curvatures, task, log_likelihood, linearised)
        precisions = (
            dict.fromkeys(chosen, float(prior_precision))
            if not isinstance(prior_precision, str)
            else found.best_precisions()
        )
        temperature = 1.0
        if held_out is not None:
            factors = _FACTORS if prior_precision == "held-out" else (1.0,)
            choice = _by_held_out(found, precisions, factors, data, held_out, steps)
            precisions, temperature = dict(choice.precisions), choice.temperature
        found.use(precisions, temperature)
        track(new, _inputs_of(data), progress=False)
    if left_out and layers == "all":
        warnings.warn(
            f"These weights stay fixed: {', '.join(left_out)}. Posteriors are for linear layers "
            "and for convolutions of one or two dimensions without groups.",
            UserWarning,
            stacklevel=2,
        )
    return new


def _fresh(net: nn.Module) -> Converted:
    """The same network without a posterior, as an object of its own."""
    if not isinstance(net, Converted):
        has_moments = any(isinstance(module, Converted) for module in net.modules())
        if has_moments:
            raise ValueError("fit takes a converted network itself, not a module around it.")
        is_chain = any(isinstance(module, Lift) for module in net.modules())
        return convert(net) if is_chain else convert(net, noise=0.0)
    training = [path for path, module in net.model.named_modules() if module.training]
    if training:
        raise ValueError(
            f"fit needs a network in evaluation mode, and module {training[0]!r} is in training "
            "mode. Call net.eval() first."
        )
    plan = net.plan.with_posterior()
    return Converted(plan.model, plan, net.start, net.batch_dim, net.variances)


def _check_options(
    structure: str, likelihood: str | None, prior_precision: str | float, held_out: Any
) -> None:
    if structure not in STRUCTURES:
        raise ValueError(f"structure is one of {', '.join(STRUCTURES)}, got {structure!r}.")
    if likelihood is not None and likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood is one of {', '.join(LIKELIHOODS)}, got {likelihood!r}.")
    if isinstance(prior_precision, str):
        if prior_precision not in ("marginal", "held-out"):
            raise ValueError(
                f"prior_precision is 'marginal', 'held-out' or a number, got {prior_precision!r}."
            )
        if prior_precision == "held-out" and held_out is None:
            raise ValueError("prior_precision='held-out' needs held_out=, data not trained on.")
    elif not (math.isfinite(prior_precision) and prior_precision > 0):
        raise ValueError(
            "prior_precision needs a finite number > 0: it keeps directions that the data say "
            f"nothing about from varying without bounds. Got {prior_precision}."
        )


class _Data:
    """Batches as inputs of the model and targets, at most so many samples at a time."""

    def __init__(self, data: Any, net: Converted, most: int | None = None) -> None:
        if _is_pair(data):
            data = [tuple(data)]
        if isinstance(data, Tensor | Dataset | str) or not hasattr(data, "__iter__"):
            raise TypeError(
                "Training data are a loader of (inputs, targets) or a pair of tensors; got "
                f"{type(data).__name__}. Wrap a Dataset: torch.utils.data.DataLoader(dataset, 256)."
            )
        if iter(data) is data:
            raise TypeError(
                "Training data are gone through several times, and a generator gives them once. "
                "Give a DataLoader, a list of batches or a pair of tensors."
            )
        self.data, self.net, self.most = data, net, most

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        dim, count = self.net.batch_dim, 0
        for batch in self.data:
            if not isinstance(batch, tuple | list) or not isinstance(batch[-1], Tensor):
                raise TypeError(
                    "Batches of training data are (inputs, targets) with a tensor of targets; got "
                    f"{type(batch).__name__}."
                )
            inputs = arguments(self.net.model, batch, has_labels=True)
            size = batch_of(inputs, dim)
            if len(batch) < 2 or len(batch[-1]) != size:
                raise ValueError(
                    f"A batch of {size} inputs has targets of shape {tuple(batch[-1].shape)}; it "
                    "needs one target for each input, in the first dimension."
                )
            for low in range(0, size, _AT_ONCE):
                if self.most is not None and count >= self.most:
                    return
                part = slice(low, low + _AT_ONCE)
                target = batch[-1][part].to(next(self.net.model.parameters()).device)
                count += len(target)
                yield some(inputs, part, dim), target


def _is_pair(data: Any) -> bool:
    """Whether data are inputs and targets themselves, not batches of them."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    return is_pair and all(isinstance(each, Tensor) for each in data)


def _inputs_of(data: Any) -> Any:
    """Inputs to track with: tensors as they are, loaders with their labels."""
    return data[0] if _is_pair(data) else data


class _Met(NamedTuple):
    """What a pass met at a layer."""

    use: WeightUse
    inputs: Tensor  # (B, T, n) what goes in, in the basis of its weights
    probe: Tensor  # of the shape of what comes out, where gradients arrive
    positions: Positions


class _GradientPass(MomentPass):
    """A pass of plain means, which remembers what goes into layers and where gradients arrive."""

    def __init__(self, net: Converted, weights: Mapping[str, UncertainWeights]) -> None:
        super().__init__(net.plan, None, start=net.start, batch_dim=net.batch_dim)
        self.is_still = True
        parameters = dict(net.plan.model.named_parameters())
        self._weights = {id(parameters[path]): (path, each) for path, each in weights.items()}
        self.met: dict[str, _Met] = {}

    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """The same value, with a place where its gradient arrives."""
        if use.options.get("groups", 1) != 1:
            return found
        positions = use.positions(x)
        probe = torch.zeros_like(found.numbers).requires_grad_()
        with torch.no_grad():
            inputs = use.weights.inputs(positions.patches(x.numbers))
        self.met[use.name.removesuffix(":weights")] = _Met(use, inputs, probe, positions)
        return self.write(
            MATCHED, found.numbers + probe, [found], lambda rows: (rows,), found.samples
        )


def _run(
    net: Converted, inputs: Inputs, weights: Mapping[str, UncertainWeights]
) -> tuple[Tensor, _GradientPass, int]:
    """(B, *event) what the model gives, the pass, and which dimension was the batch."""
    run = _GradientPass(net, weights)
    with torch.enable_grad():
        outputs = net.run(run, inputs)
        values = varying_in([outputs])
        if not isinstance(outputs, Varying) or len(values) != 1:
            raise ValueError(
                f"A posterior needs a model that gives one tensor, this gives "
                f"{type(outputs).__name__}. Wrap it in a module that gives the logits or targets."
            )
        axis = net.output_axis(outputs)
        out = plain(outputs).movedim(axis, 0)
    run.tape = None
    return out, run, axis


def _chosen(
    net: Converted, inputs: Inputs, layers: str | Sequence[str], structure: str
) -> tuple[dict[str, UncertainWeights], list[str], int]:
    """The weights that are to vary, without any variance yet; and those of matrices that stay.

    And which dimension of the output is the batch.
    """
    parameters = dict(net.plan.model.named_parameters())
    real = [path for path, each in parameters.items() if each.dim() >= 2]
    possible = [
        path
        for path in real
        if parameters[path].dim() <= 4 and path not in net.plan.dropped_weights
    ]
    if isinstance(layers, str) and layers not in ("all", "last"):
        layers = [layers]
    if not isinstance(layers, str):
        for layer in layers:
            if not any(path == layer or path.startswith(f"{layer}.") for path in possible):
                raise ValueError(
                    f"layers names {layer!r}, which has no weights that may vary. There are "
                    f"{', '.join(possible)}."
                )
        possible = [
            path
            for path in possible
            if any(path == layer or path.startswith(f"{layer}.") for layer in layers)
        ]
    blank = {path: _blank(parameters[path], has_bias=False) for path in possible}
    out, run, axis = _run(net, some(inputs, slice(0, 2), net.batch_dim), blank)
    probes = [met.probe for met in run.met.values()]
    arrive = torch.autograd.grad(out.sum(), probes, allow_unused=True) if probes else []
    met = [path for path, grad in zip(run.met, arrive, strict=True) if grad is not None]
    missing = [path for path in possible if path not in met]
    if not met or (missing and not isinstance(layers, str)):
        raise ValueError(
            f"No posterior can be found of {', '.join(missing) or 'this model, without weights'}: "
            "no linear layer or convolution without groups uses them as they are on the way to the "
            "output, behind start=. Leave them out: layers=[...]."
        )
    met = met[-1:] if layers == "last" else met
    weights = {}
    for path in met:
        bias = run.met[path].use.options.get("bias")
        weights[path] = _blank(parameters[path], has_bias=isinstance(bias, nn.Parameter))
        _check_size(path, weights[path].variance, structure)
    return weights, [path for path in real if path not in weights], axis


def _blank(weight: Tensor, *, has_bias: bool) -> UncertainWeights:
    """Weights of no variance, which take no memory."""
    shape = len(weight), weight[0].numel() + has_bias
    return UncertainWeights(weight.new_zeros(()).detach().expand(shape))


def _check_size(path: str, variance: Tensor, structure: str) -> None:
    m, n = variance.shape
    widest = max(m, n)
    if structure == "kronecker" and widest > _WIDEST:
        raise ValueError(
            f"{path} is {m} x {n}, and the basis of {widest} dimensions would take too long (at "
            f"most {_WIDEST}). Take structure='diagonal', or other layers: layers='last' or a list."
        )
    if m * n > _MOST_WEIGHTS:
        raise ValueError(
            f"{path} has {m * n:,} weights, and a posterior is kept of at most {_MOST_WEIGHTS:,}. "
            "Take other layers: layers='last' or a list of paths."
        )


@dataclass(frozen=True, eq=False)
class _Task:
    """What outputs are for.

    Attributes:
        likelihood: classification or regression.
        axis: the dimension of the batch in what the model gives.
        noise: (*event) in regression, the variance of targets around outputs.
    """

    likelihood: str
    axis: int
    noise: Tensor | None = None

    def checked(self, out: Tensor, target: Tensor) -> Tensor:
        """Targets that belong to outputs (B, *event)."""
        if self.likelihood == "regression":
            return _real_targets(out, target)
        if out.dim() != 2 or target.dim() != 1 or target.is_floating_point():
            raise ValueError(
                "Classification needs logits (B, K) and labels (B,) of whole numbers; got outputs "
                f"{tuple(out.shape)} and targets {tuple(target.shape)} of {target.dtype}."
            )
        if (
            target.dtype == torch.bool
            or not 0 <= int(target.min()) <= int(target.max()) < out.shape[1]
        ):
            raise ValueError(
                f"Labels are 0 to {out.shape[1] - 1} for {out.shape[1]} outputs, got "
                f"{target.min().item()} to {target.max().item()} of {target.dtype}."
            )
        return target.long()

    def log_likelihood(self, out: Tensor, target: Tensor) -> float:
        """The sum over samples of the logarithm of the likelihood of targets."""
        if self.noise is None:
            return -float(F.cross_entropy(out.double(), target, reduction="sum"))
        parts = (target - out).double().square() / self.noise + (2 * math.pi * self.noise).log()
        return -0.5 * float(parts.sum())

    def columns(self, out: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """(B, *event) columns s of the likelihood's curvature, the sum of s s^T (eq. 45).

        For many outputs one random column, of which that is the expectation.
        """
        out = out.detach()
        count = out[0].numel()
        if self.noise is None:
            p = out.softmax(-1)
            if count > _MOST_EXACT:
                label = torch.multinomial(p, 1, generator=generator)
                yield torch.zeros_like(p).scatter_(1, label, 1.0) - p
                return
            for k, one in enumerate(torch.eye(count).to(p)):
                yield p[:, k, None].sqrt() * (one - p)
            return
        scale = self.noise.rsqrt().to(out)
        if count > _MOST_EXACT:
            signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device)
            yield (2 * signs - 1).to(out) * scale
            return
        for one in torch.eye(count).to(out):
            yield (one.reshape(out.shape[1:]) * scale).expand_as(out)


def _real_targets(out: Tensor, target: Tensor) -> Tensor:
    if not target.is_floating_point() or target.numel() != out.numel():
        raise ValueError(
            "Regression needs a real target for each output; got outputs "
            f"{tuple(out.shape)} and targets {tuple(target.shape)} of {target.dtype}."
        )
    return target.reshape(out.shape).to(out)


@torch.no_grad()
def _outputs(
    net: Converted, data: Any, task: _Task, steps: Steps, what: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """(B, *event) what the model gives, and targets."""
    every: Any = _Data(data, net)
    for (args, named), target in steps(every, what):
        out: Tensor = net.plan.model(*args, **named)
        yield out.movedim(task.axis, 0), target


def _noise(
    net: Converted, task: _Task, given: float | Tensor | None, data: Any, steps: Steps
) -> Tensor:
    """In regression, the variance of targets around each output, in float64."""
    squares, count, shape = torch.zeros(()).double(), 0, torch.Size()
    for out, target in _outputs(net, data, task, steps, "residuals"):
        error = (_real_targets(out, target) - out).double()
        squares, count, shape = (
            squares + error.square().sum(0).cpu(),
            count + len(out),
            out.shape[1:],
        )
        if given is not None:
            break
    found = squares / max(1, count)
    if given is not None:
        found = torch.as_tensor(given, dtype=torch.float64).expand(shape).clone()
    if not bool(((found > 0) & found.isfinite()).all()):
        raise ValueError(
            "The variance of targets around outputs has to be finite and > 0 for each output, and "
            f"is {found.min().item():.3g} to {found.max().item():.3g}. If the network fits its "
            "data without error, give noise_variance= or held_out=."
        )
    return found


def _log_likelihood(net: Converted, data: Any, task: _Task, steps: Steps) -> tuple[float, int]:
    """The sum over training data, and how many there are."""
    total, count = 0.0, 0
    for out, target in _outputs(net, data, task, steps, "likelihood"):
        total += task.log_likelihood(out, task.checked(out, target))
        count += len(out)
    if not math.isfinite(total):
        raise ValueError(
            "The likelihood of the training data is not finite: outputs or targets have NaN or "
            "infinite values. Clean the data, or train the network again."
        )
    return total, count


def _gradients(
    net: Converted,
    data: Any,
    task: _Task,
    weights: Mapping[str, UncertainWeights],
    steps: Steps,
    what: str,
    seed: int,
) -> Iterator[tuple[dict[str, Tensor], list[dict[str, Tensor]]]]:
    """Of each batch, inputs (B, T, n) of each layer, and by column its gradients (B, T, m).

    Both are in the bases of the weights. Random labels are by the seed: bases that were found by
    some would make too much of the same ones.
    """
    every: Any = _Data(data, net)
    generator = torch.Generator(next(net.model.parameters()).device).manual_seed(seed)
    for inputs, _ in steps(every, what):
        out, run, _ = _run(net, inputs, weights)
        probes = [met.probe for met in run.met.values()]
        columns = []
        for column in task.columns(out, generator):
            found = torch.autograd.grad(out, probes, column, retain_graph=True)
            columns.append(
                {
                    path: _turned(met.positions.arrange(grad[None])[0], weights[path].left)
                    for (path, met), grad in zip(run.met.items(), found, strict=True)
                }
            )
        yield {path: met.inputs for path, met in run.met.items()}, columns


def _turned(values: Tensor, basis: Tensor | None) -> Tensor:
    return values if basis is None else values @ basis


def _bases(
    net: Converted,
    data: Any,
    task: _Task,
    weights: Mapping[str, UncertainWeights],
    count: int,
    steps: Steps,
) -> dict[str, UncertainWeights]:
    """The same weights in the bases of their Kronecker factors (eq. 46)."""
    inner = {path: torch.zeros((), dtype=torch.float64) for path in weights}
    outer = dict(inner)
    for inputs, columns in _gradients(net, data, task, weights, steps, "factors", 0):
        for path, value in inputs.items():
            inner[path] = inner[path].to(value.device) + _second_moment(value)
            for column in columns:
                outer[path] = outer[path].to(value.device) + _second_moment(column[path])
    found = {}
    for path, each in weights.items():
        left, right = (
            torch.linalg.eigh(factor / count).eigenvectors.to(each.variance.dtype)
            for factor in (outer[path], inner[path])
        )
        found[path] = replace(each, left=left, right=right)
    return found


def _second_moment(values: Tensor) -> Tensor:
    """(n, n) the sum of v v^T over all but the last dimension, in float64."""
    flat = values.reshape(-1, values.shape[-1])
    return (flat.mT @ flat).double()


def _curvatures(
    net: Converted,
    data: Any,
    task: _Task,
    weights: Mapping[str, UncertainWeights],
    steps: Steps,
) -> dict[str, Tensor]:
    """(m, n) of each layer, the sum of squared gradients along each axis of its basis (eq. 47)."""
    found = {
        path: torch.zeros_like(each.variance, dtype=torch.float64) for path, each in weights.items()
    }
    for inputs, columns in _gradients(net, data, task, weights, steps, "curvature", 1):
        for path, value in inputs.items():
            for column in columns:
                found[path] += _squared_gradients(column[path], value).double()
    return found


def _squared_gradients(gradients: Tensor, inputs: Tensor) -> Tensor:
    """(m, n) sums over samples of (sum over positions of g a^T)^2."""
    if inputs.shape[1] == 1:
        return gradients[:, 0].square().mT @ inputs[:, 0].square()
    step = max(1, _NUMBERS_AT_A_TIME // (gradients.shape[-1] * inputs.shape[-1]))
    pairs = zip(torch.split(gradients, step), torch.split(inputs, step), strict=True)
    return torch.stack([(g.mT @ a).square().sum(0) for g, a in pairs]).sum(0)


@dataclass(frozen=True, eq=False)
class _Found:
    """What the data say about the weights; a prior makes a posterior of it.

    Attributes:
        net: the network.
        weights: their bases.
        curvatures: (m, n) of each layer, in these bases.
        task: the likelihood.
        log_likelihood: of the training data.
        linearised: whether outputs are taken as linear in how weights vary.
    """

    net: Converted
    weights: Mapping[str, UncertainWeights]
    curvatures: Mapping[str, Tensor]
    task: _Task
    log_likelihood: float
    linearised: bool

    def size(self, path: str) -> float:
        """The sum of squares of a layer's weights, and of its bias if that varies."""
        parameters = dict(self.net.plan.model.named_parameters())
        weight = parameters[path].detach().double()
        total = float(weight.square().sum())
        if self.curvatures[path].shape[1] > weight[0].numel():
            bias = parameters[path.removesuffix("weight") + "bias"]
            total += float(bias.detach().double().square().sum())
        return total

    def best_precisions(self) -> dict[str, float]:
        """Of each layer, the precision of the largest marginal likelihood (eq. 48)."""
        return {
            path: _most_likely(curvature, self.size(path))
            for path, curvature in self.curvatures.items()
        }

    def use(self, precisions: Mapping[str, float], temperature: float) -> None:
        """Give the network the posterior with these precisions of the prior."""
        total = self.log_likelihood
        weights = {}
        for path, curvature in self.curvatures.items():
            prior = precisions[path]
            precision = curvature + prior
            total += 0.5 * (
                curvature.numel() * math.log(prior)
                - prior * self.size(path)
                - float(precision.log().sum())
            )
            each = self.weights[path]
            variance = (temperature / precision).to(each.variance.dtype)
            weights[path] = replace(each, variance=variance)
        noise = self.task.noise
        if noise is not None:
            device = next(self.net.model.parameters()).device
            noise = noise.to(device).unsqueeze(self.task.axis)
        model = self.net.plan.model
        self.net.posterior.replace(
            weights,
            precisions,
            model,
            linearised=self.linearised,
            temperature=temperature,
            log_marginal=total,
            noise=noise,
        )


def _most_likely(curvature: Tensor, size: float) -> float:
    """The precision d where sum c / (d (c + d)) is the size of the weights; it falls with d."""
    low, high = map(math.log, _PRECISIONS)
    for _ in range(60):
        middle = math.exp((low + high) / 2)
        is_low = float((curvature / (curvature + middle)).sum()) > middle * size
        low, high = (math.log(middle), high) if is_low else (low, math.log(middle))
    return math.exp((low + high) / 2)


class _Choice(NamedTuple):
    """A prior and a temperature, and how likely they make held-out data."""

    precisions: Mapping[str, float]
    temperature: float
    losses: Tensor  # (n,) negative log-likelihood of each sample


def _by_held_out(
    found: _Found,
    precisions: Mapping[str, float],
    factors: Sequence[float],
    data: Any,
    held_out: Any,
    steps: Steps,
) -> _Choice:
    """The temperature that makes held-out data most likely, and these precisions times a factor.

    With the temperature, the likelihood hardly depends on the factor. Of all factors that held-out
    data cannot tell from the best (by the standard error of the difference), it is the smallest:
    what the training data do not determine is left open.
    """
    temperatures = _TEMPERATURES if found.linearised else (1.0,)
    choices = []
    for number, factor in enumerate(steps(factors, "prior")):
        chosen = {path: each * factor for path, each in precisions.items()}
        found.use(chosen, 1.0)
        if not number or not found.linearised:
            _track_quietly(found.net, data, samples=64)
        losses = _held_out_losses(found.net, held_out, found.task, temperatures)
        at = int(losses.mean(-1).argmin())
        choices.append(_Choice(chosen, temperatures[at], losses[at]))
    best = min(choices, key=lambda choice: float(choice.losses.mean()))
    for choice in sorted(choices, key=lambda choice: sum(choice.precisions.values())):
        apart = choice.losses - best.losses
        if float(apart.mean()) <= float(apart.std()) / math.sqrt(len(apart)):
            return choice
    return best


@torch.no_grad()
def _held_out_losses(
    net: Converted, held_out: Any, task: _Task, temperatures: Sequence[float]
) -> Tensor:
    """(temperatures, n) negative log-likelihood of the expected softmax, or of the Gaussian."""
    found = []
    classify = task.noise is None
    for (args, named), target in _Data(held_out, net, _HELD_OUT):
        out: Moments = net(*args, **named)
        target = task.checked(out.mean, target)
        parts = out.cov.budget(matrices=classify)
        weights = torch.stack([part for name, part in parts.items() if kind_of(name) == WEIGHTS])
        others = [part for name, part in parts.items() if kind_of(name) != WEIGHTS]
        rest = torch.stack(others).sum(0) if others else torch.zeros_like(weights[0])
        found.append(
            torch.stack(
                [
                    _losses(out.mean, rest + each * weights.sum(0), target, classify=classify)
                    for each in temperatures
                ]
            )
        )
    if not found:
        raise ValueError("held_out= has no data.")
    return torch.cat(found, 1)


def _losses(mean: Tensor, cov: Tensor, target: Tensor, *, classify: bool) -> Tensor:
    """(B,) negative log-likelihood, of a covariance (B, K, K), or of variances (B, *event)."""
    if classify:
        p = scores.expected_softmax(Moments(mean, Full(cov))).double().clamp(min=1e-300)
        return F.nll_loss(p.log(), target, reduction="none")
    error = (target - mean).double().square().flatten(1)
    var = cov.double().flatten(1)
    return 0.5 * (error / var + var.log()).sum(-1)


def _track_quietly(net: Converted, data: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)
        track(net, _inputs_of(data), progress=False, **options)
