"""``fit``: a trained network and its training data -> a network whose weights vary."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from covary.convert import Converted, convert
from covary.inputs import Inputs, some
from covary.models import left_alone
from covary.moments import Moments
from covary.nn import Lift
from covary.posterior.curvature import bases, curvatures_of, run_of
from covary.posterior.likelihood import Data, Task, inputs_of, log_likelihood_of, noise_of
from covary.posterior.prior import FACTORS, Found, by_held_out
from covary.progress import Steps, shown
from covary.sources import UncertainWeights
from covary.tracking import track
from covary.uncertainty import scores

STRUCTURES = ("kronecker", "diagonal")
LIKELIHOODS = ("classification", "regression")
# A basis is found for layers up to this width, and a variance kept of up to so many weights.
_WIDEST, _MOST_WEIGHTS = 8192, 2**27
_FIXED = (
    "These weights stay fixed: {}. Only those of linear layers vary, and of convolutions of one or "
    "two dimensions without groups, which are used once on the way to the output."
)


def fit(
    net: nn.Module,
    data: Any,
    *,
    layers: str | Sequence[str] = "all",
    structure: str = "kronecker",
    likelihood: str | None = None,
    prior_precision: str | float = "marginal",
    held_out: Any = None,
    probabilities: Callable[[Moments], Tensor] = scores.expected_softmax,
    total: int | None = None,
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
        probabilities: of classes, (B, K) of Moments (B, K), by whose likelihood held-out data
            choose: those that you will take, such as ``scores.averaged_softmax``.
        total: how many training samples there are, if ``data`` are a part of them: a few thousand
            tell as much about the curvature, in less time.
        noise_variance: in regression, the variance of targets around outputs: a number, or one for
            each output; None estimates it by the average squared error on ``held_out`` or ``data``.
            It is added to the output as ``noise at targets``.
        linearised: whether outputs are taken as linear in how the weights vary. If not, means and
            gains at nonlinearities see the variance of weights, which is for narrow posteriors.
        progress: whether to show progress on a terminal.

    Returns:
        A new network, tracked and ready to use. ``net.posterior`` has the prior precision of each
        layer and the logarithm of the marginal likelihood.

    Examples:
        >>> import covary, torch
        >>> x, y = torch.randn(64, 3), torch.randint(0, 2, (64,))
        >>> model = torch.nn.Linear(3, 2).eval()
        >>> net = covary.posterior.fit(model, (x, y))
        >>> list(net(x).budget())
        ['weights of model']
    """
    _check_options(structure, likelihood, prior_precision, held_out)
    new = _fresh(net)
    first = _first(Data(data, new))
    with shown(progress) as steps, left_alone(new.model):
        weights, fixed, axis = _chosen(new, first[0], layers, structure)
        how = likelihood or ("regression" if first[1].is_floating_point() else "classification")
        others = data if held_out is None else held_out
        task = _task(new, Task(how, axis, probabilities), noise_variance, others, steps)
        log_likelihood, count = log_likelihood_of(new, data, task, steps)
        if structure == "kronecker":
            weights = bases(new, data, task, weights, count, steps)
        more = 1.0 if total is None else _checked_total(total, count) / count
        part = curvatures_of(new, data, task, weights, steps)
        curvatures = {path: each * more for path, each in part.items()}
        found = Found(new, weights, curvatures, task, log_likelihood * more, linearised)
        _use_prior(found, prior_precision, data, held_out, steps)
        track(new, inputs_of(data), progress=False)
    if fixed and layers == "all":
        warnings.warn(_FIXED.format(", ".join(fixed)), UserWarning, stacklevel=2)
    return new


def _first(data: Data) -> tuple[Inputs, Tensor]:
    for batch in data:
        return batch
    raise ValueError("A posterior needs training data, and got no batch of them.")


def _checked_total(total: int, count: int) -> int:
    if isinstance(total, bool) or not isinstance(total, int) or total < count:
        raise ValueError(
            f"total is the number of all training samples, {count} or more here, got {total!r}."
        )
    return total


def _task(
    net: Converted, task: Task, noise_variance: float | Tensor | None, data: Any, steps: Steps
) -> Task:
    """The same, in regression with the noise of targets."""
    if task.likelihood == "regression":
        return replace(task, noise=noise_of(net, task, noise_variance, data, steps))
    if noise_variance is not None:
        raise ValueError("noise_variance= is for regression, and this is classification.")
    return task


def _use_prior(
    found: Found, prior_precision: str | float, data: Any, held_out: Any, steps: Steps
) -> None:
    """Give the network its posterior, by this prior and what held-out data say."""
    if isinstance(prior_precision, str):
        precisions = found.best_precisions()
    else:
        precisions = dict.fromkeys(found.weights, float(prior_precision))
    if held_out is None:
        found.use(precisions, 1.0)
        return
    factors = FACTORS if prior_precision == "held-out" else (1.0,)
    choice = by_held_out(found, precisions, factors, data, held_out, steps)
    found.use(choice.precisions, choice.temperature)


def _fresh(net: nn.Module) -> Converted:
    """The same network without a posterior, as an object of its own."""
    if not any(True for _ in net.parameters()):
        raise ValueError("A posterior is of weights, and this network has none.")
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
    out, run, axis = run_of(net, some(inputs, slice(0, 2), net.batch_dim), blank)
    probes = [met.probe for met in run.met.values()]
    arrive = torch.autograd.grad(out.sum(), probes, allow_unused=True) if probes else []
    arrived = zip(run.met, arrive, strict=True)
    met = [path for path, grad in arrived if grad is not None and path not in run.met_again]
    missing = [path for path in possible if path not in met]
    if not met or (missing and not isinstance(layers, str)):
        raise ValueError(
            f"No posterior can be found of {', '.join(missing) or 'this model, without weights'}: "
            "no linear layer or convolution without groups uses them as they are, and once, on the "
            "way to the output, behind start=. Leave them out: layers=[...]."
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
