"""Analytic moments against draws of the same model with the same noise."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from covary.convert import Converted, check_has_moments, convert
from covary.covariance.sweep import Swept
from covary.inputs import arguments, batch_of, leaves, repeated
from covary.linalg import is_finite
from covary.models import left_alone
from covary.moments import Moments
from covary.nn import Dropout
from covary.nn.fidelity import frames_to_caller
from covary.passes import has_errors
from covary.progress import Steps, shown
from covary.stochastic.comparison import Error, LayerComparison, compare
from covary.stochastic.sampling import sample_steady
from covary.stochastic.statistics import GROUPS, Estimate, StreamingMoments

# Samples that are drawn at a time, and outputs that are compared at most.
_AT_ONCE, _MOST_OUTPUTS = 512, 128
# Of large networks, fewer: no tensor of draws or of a sweep has more numbers than this, unless a
# draw for each group, or two outputs, have.
_NUMBERS = 2**26


class OutputErrors(NamedTuple):
    """Relative errors of one output's moments, over inputs (root mean square).

    Each has a ``value`` with the scatter of the draws taken out of it, a standard error ``bar``,
    and a ``floor``, the error that the draws alone would show of exact moments.
    """

    mean: Error
    variance: Error
    covariance: Error

    @classmethod
    def average(cls, found: Iterable[OutputErrors | LayerComparison]) -> OutputErrors:
        """The root mean square of several."""
        errors = zip(*[(each.mean, each.variance, each.covariance) for each in found], strict=True)
        return cls(*map(Error.average, errors))


@dataclass(frozen=True)
class Verification:
    """What ``covary.verify`` found: how far moments are off; of several outputs, on average."""

    draws: int
    inputs: int
    outputs: Mapping[str, OutputErrors]  # by name
    mean: Error
    variance: Error
    covariance: Error  # of the matrix, in Frobenius norm

    def __str__(self) -> str:
        lines = [f"{self.inputs} inputs, {self.draws} draws each; errors relative to the draws"]
        for name, found in self.outputs.items():
            errors = found._asdict().items()
            parts = [f"{what} {error.value:.1%} ± {error.bar:.1%}" for what, error in errors]
            lines.append(f"  {name}: {', '.join(parts)}")
        return "\n".join(lines)


@torch.no_grad()
def verify(
    net: nn.Module, x: Any, *, draws: int = 2000, seed: int = 0, progress: bool = True
) -> Verification:
    """Draw the same model with the same noise, and compare mean, variance and covariance.

    Args:
        net: a network that ``covary.convert`` made, or a chain of ``covary.nn`` layers; in
            evaluation mode.
        x: (B, ...) inputs as the network takes them, Moments if they have errors; for models of
            several inputs a tuple of all positional ones, or a dict whose keys are names of
            parameters of ``forward``.
        draws: for each input; rounded up to a multiple of 16.
        seed: decides the draws.
        progress: show a bar, on a terminal that has ``rich``.

    Returns:
        Relative errors of the output's moments, with the scatter of the draws taken out of them and
        with standard errors. Of outputs with more than 128 numbers, 128 are compared; of those of
        large networks, as many as memory takes (rows of a sweep are as large as its values).

    Examples:
        >>> import covary, torch
        >>> net = covary.mlp([4, 32, 3], noise=0.1).eval()
        >>> covary.verify(net, torch.randn(4, 4), draws=1600).covariance.value < 0.1
        True
    """
    if isinstance(draws, bool) or draws != int(draws):
        raise ValueError(f"draws are a whole number, got {draws!r}.")
    draws = int(draws)
    if draws < 2 * GROUPS:
        raise ValueError(f"verify needs {2 * GROUPS} draws at least, got {draws}.")
    if net.training:
        raise ValueError("verify needs a network in evaluation mode: net.eval().")
    check_has_moments(net, "verify")
    several = isinstance(net, Converted) and isinstance(x, tuple | list | Mapping)
    if not (several or isinstance(x, Tensor | Moments)):
        raise TypeError(
            "verify takes inputs as the network does: a tensor, or of converted networks a tuple "
            f"or dict of several; got {type(x).__name__}. Of a loader take a batch: "
            "next(iter(loader))[0]."
        )
    each = -(-draws // GROUPS)
    with shown(progress) as steps:
        if isinstance(net, Converted):
            with left_alone(net.model):
                found = _drawn(net, net, x, each, seed, steps)
        elif isinstance(x, Moments) or _has_dropout_noise(net):
            found = _drawn(net, convert(net), x, each, seed, steps)
        else:
            estimates = sample_steady(
                net, x, copies=each * GROUPS, groups=GROUPS, seed=seed, progress=steps
            )
            found = {"output": (list(estimates.values())[-1], net(x))}
    inputs = next(iter(found.values()))[0].mean.shape[0]
    outputs = {name: compared(*pair) for name, pair in found.items()}
    overall = OutputErrors.average(outputs.values())
    return Verification(each * GROUPS, inputs, outputs, *overall)


def _has_dropout_noise(net: nn.Module) -> bool:
    return any(isinstance(layer, Dropout) and layer.as_noise for layer in net.modules())


def _drawn(
    net: nn.Module, drawing: Converted, x: Any, each: int, seed: int, steps: Steps
) -> dict[str, tuple[Estimate, Moments]]:
    """By the name of an output, what draws of a converted network say of it, and its moments."""
    args, named = arguments(drawing.model, x, has_labels=False)
    batch = batch_of((args, named), drawing.batch_dim)
    if not batch:
        raise ValueError("verify needs one sample at least, got an empty batch.")
    axes = leaves(drawing.batch_axes((args, named)))
    outputs = leaves(net(*args, **named))
    outputs = {name: out for name, out in outputs.items() if isinstance(out, Moments)}
    if drawing.plan.is_none and not has_errors((args, named)):
        raise ValueError(
            "Nothing varies in this network, so there is nothing to verify: it has no noise, "
            "dropout or uncertain weights, and its inputs have no errors."
        )
    if drawing.posterior.is_linearised:
        warnings.warn(
            "Outputs of this network are taken as linear in how its weights vary, and draws are of "
            "the network itself: they agree for narrow posteriors alone.",
            UserWarning,
            stacklevel=frames_to_caller(),
        )
    most = min(_AT_ONCE, batch * _NUMBERS // max(map(_widest, outputs.values())))
    moments = {name: _some_outputs(out) for name, out in outputs.items()}
    del outputs  # and what the forward pass kept for them
    streams = {
        name: StreamingMoments(GROUPS, batch, out.mean[0].numel(), device=out.mean.device)
        for name, (out, _) in moments.items()
    }
    generator = torch.Generator(next(iter(moments.values()))[0].mean.device).manual_seed(seed)
    copies = max(1, most // (GROUPS * batch))
    for low in steps(range(0, each, copies), "draws"):
        count = min(copies, each - low)
        many, options = repeated((args, named), count * GROUPS, drawing.batch_dim)
        drawn = leaves(drawing.draw(*many, generator=generator, **options))
        for name, (_, units) in moments.items():
            front = drawn[name].movedim(axes[name], 0)
            flat = front.reshape(batch, GROUPS, count, -1).transpose(0, 1)
            if not is_finite(flat):
                raise ValueError(
                    f"The model gives NaN or infinite draws ({name}): its noise leaves the domain "
                    "of a function (sqrt, log, 1 / x), or overflows. Take less noise there: "
                    "noise={'path of the module': 0.01, ...}."
                )
            streams[name].add(flat if units is None else flat[..., units])
    return {name: (streams[name].estimate(), out) for name, (out, _) in moments.items()}


def compared(estimate: Estimate, moments: Moments) -> OutputErrors:
    """Moments (B, n) against what draws say of them."""
    count, means, scatters = estimate.count, estimate.group_mean, estimate.group_scatter
    matrix, mean = moments.covariance_matrix, moments.flat_mean
    return OutputErrors.average(
        compare(Estimate(count, means[:, i : i + 1], scatters[:, i : i + 1]), mean[i], matrix[i])
        for i in range(len(mean))
    )


def _some_outputs(out: Moments) -> tuple[Moments, Tensor | None]:
    """The moments of at most so many units, evenly spaced, and which they are."""
    n = out.mean[0].numel()
    most = min(_MOST_OUTPUTS, max(2, _NUMBERS // _widest(out)))
    if n <= most:
        return out, None
    units = torch.arange(most, device=out.mean.device) * n // most
    return out.project(torch.nn.functional.one_hot(units, n)), units


def _widest(out: Moments) -> int:
    """The number of elements of the largest value on the way to an output, for the batch."""
    return out.cov.tape.widest if isinstance(out.cov, Swept) else out.mean.numel()
