"""Analytic moments against draws of the same model with the same noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from covary.convert import Converted
from covary.covariance.swept import Swept
from covary.inputs import arguments, batch_of, leaves, repeated
from covary.models import left_alone
from covary.moments import Moments
from covary.nn import Lift
from covary.progress import Steps, shown
from covary.stochastic.comparison import Error, compare
from covary.stochastic.statistics import Estimate, StreamingMoments
from covary.stochastic.steady import sample_steady

# Standard errors come from the spread between so many groups of draws.
_GROUPS = 16
# Samples that are drawn at a time, and outputs that are compared at most.
_AT_ONCE, _MOST_OUTPUTS = 512, 128
# Of networks that are large, fewer: no tensor of draws or of a sweep has more numbers than this,
# unless a draw for each group, or two outputs, have.
_NUMBERS = 2**26


@dataclass(frozen=True)
class Agreement:
    """Relative errors of one output's moments, over inputs (root mean square).

    Each has a ``value`` with the scatter of the draws taken out of it, a standard error ``bar``,
    and a ``floor``, the error that the draws alone would show of exact moments.
    """

    mean: Error
    variance: Error
    covariance: Error


@dataclass(frozen=True)
class Verification:
    """What ``covary.verify`` found: for each output by its name, how far moments are off."""

    draws: int
    inputs: int
    outputs: Mapping[str, Agreement]

    @property
    def mean(self) -> Error:
        """Error of the mean; of several outputs, their root mean square."""
        return Error.average([each.mean for each in self.outputs.values()])

    @property
    def variance(self) -> Error:
        """Error of the variances."""
        return Error.average([each.variance for each in self.outputs.values()])

    @property
    def covariance(self) -> Error:
        """Error of the covariance matrix, in Frobenius norm."""
        return Error.average([each.covariance for each in self.outputs.values()])

    def __str__(self) -> str:
        lines = [f"{self.inputs} inputs, {self.draws} draws each; errors relative to the draws"]
        for name, each in self.outputs.items():
            parts = [
                f"{what} {error.value:.1%} ± {error.bar:.1%}"
                for what, error in (
                    ("mean", each.mean),
                    ("variance", each.variance),
                    ("covariance", each.covariance),
                )
            ]
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
        x: (B, ...) inputs as the network takes them; for models of several inputs a tuple of all
            positional ones, or a dict whose keys are names of parameters of ``forward``.
        draws: for each input; rounded up to a multiple of 16.
        seed: decides the draws.
        progress: show a bar, on a terminal that has ``rich``.

    Returns:
        Relative errors of the output's moments, with the scatter of the draws taken out of them and
        with standard errors. Of outputs with more than 128 numbers, 128 are compared; of those of
        large networks, as many as memory takes (rows of a sweep are as large as its values).

    Examples:
        >>> import covary, torch
        >>> from torch import nn
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
        >>> net = covary.convert(model, noise=0.1)
        >>> _ = covary.track(net, torch.randn(64, 4))
        >>> found = covary.verify(net, torch.randn(4, 4), draws=1600)
        >>> found.covariance.value < 0.1
        True
    """
    if isinstance(draws, bool) or draws != int(draws):
        raise ValueError(f"draws are a whole number, got {draws!r}.")
    draws = int(draws)
    if draws < 2 * _GROUPS:
        raise ValueError(f"verify needs {2 * _GROUPS} draws at least, got {draws}.")
    if net.training:
        raise ValueError("verify needs a network in evaluation mode: net.eval().")
    if not any(isinstance(module, Converted | Lift) for module in net.modules()):
        raise ValueError(
            "verify takes a network that covary.convert made, or one of covary.nn layers, and this "
            f"{type(net).__name__} has no moments yet. Convert it first: net = "
            "covary.convert(model, noise=0.05)."
        )
    several = isinstance(net, Converted) and isinstance(x, tuple | list | Mapping)
    if not (several or isinstance(x, Tensor)):
        raise TypeError(
            "verify takes inputs as the network does: a tensor, or of converted networks a tuple "
            "or dict of several; got "
            f"{type(x).__name__}. Of a loader take a batch: next(iter(loader))[0]."
        )
    each = -(-draws // _GROUPS)
    with shown(progress) as steps:
        if isinstance(net, Converted):
            with left_alone(net.model):
                found = _drawn(net, x, each, seed, steps)
        else:
            found = _steady(net, x, each * _GROUPS, seed, steps)
    inputs = next(iter(found.values()))[0].mean.shape[0]
    return Verification(
        each * _GROUPS, inputs, {name: _compared(*pair) for name, pair in found.items()}
    )


Found = dict[str, tuple[Estimate, Moments]]


def _drawn(net: Converted, x: Any, each: int, seed: int, steps: Steps) -> Found:
    args, named = arguments(net.model, x, has_labels=False)
    batch = batch_of((args, named), net.batch_dim)
    if not batch:
        raise ValueError("verify needs one sample at least, got an empty batch.")
    axes = leaves(net.batch_axes((args, named)))
    outputs = _moments(net(*args, **named))
    most = min(_AT_ONCE, batch * _NUMBERS // max(map(_widest, outputs.values())))
    moments = {name: _some_outputs(out) for name, out in outputs.items()}
    del outputs  # and what the forward pass kept for them
    streams = {
        name: StreamingMoments(_GROUPS, batch, out.mean[0].numel(), device=out.mean.device)
        for name, (out, _) in moments.items()
    }
    generator = torch.Generator(next(iter(moments.values()))[0].mean.device).manual_seed(seed)
    copies = max(1, most // (_GROUPS * batch))
    many, options = repeated((args, named), copies * _GROUPS, net.batch_dim)
    for low in steps(range(0, each, copies), "draws"):
        count = min(copies, each - low)
        if count < copies:
            many, options = repeated((args, named), count * _GROUPS, net.batch_dim)
        drawn = leaves(net.draw(*many, generator=generator, **options))
        for name, (_, units) in moments.items():
            front = drawn[name].movedim(axes[name], 0)
            flat = front.reshape(batch, _GROUPS, count, -1).transpose(0, 1)
            if not bool(torch.isfinite(flat).all()):
                raise ValueError(
                    f"The model gives NaN or infinite draws ({name}): its noise leaves the domain "
                    "of a function (sqrt, log, 1 / x), or overflows. Take less noise there: "
                    "noise={'path of the module': 0.01, ...}."
                )
            streams[name].add(flat if units is None else flat[..., units])
    return {name: (streams[name].estimate(), out) for name, (out, _) in moments.items()}


def _steady(net: nn.Module, x: Tensor, copies: int, seed: int, steps: Steps) -> Found:
    estimates = sample_steady(net, x, copies=copies, groups=_GROUPS, seed=seed, progress=steps)
    return {"output": (list(estimates.values())[-1], net(x))}


def _compared(estimate: Estimate, moments: Moments) -> Agreement:
    found = []
    matrix = moments.covariance_matrix
    mean = moments.mean.reshape(len(moments), -1)
    for i in range(len(mean)):
        one = Estimate(
            estimate.count, estimate.group_mean[:, i : i + 1], estimate.group_scatter[:, i : i + 1]
        )
        found.append(compare(one, mean[i], matrix[i]))
    return Agreement(
        Error.average([each.mean for each in found]),
        Error.average([each.variance for each in found]),
        Error.average([each.covariance for each in found]),
    )


def _some_outputs(out: Moments) -> tuple[Moments, Tensor | None]:
    """The moments of at most so many units, evenly spaced, and which they are."""
    n = out.mean[0].numel()
    most = min(_MOST_OUTPUTS, max(2, _NUMBERS // _widest(out)))
    if n <= most:
        return out, None
    units = torch.arange(most, device=out.mean.device) * n // most
    rows = torch.nn.functional.one_hot(units, n).to(out.mean.dtype)
    return out.project(rows), units


def _widest(out: Moments) -> int:
    """The number of elements of the largest value on the way to an output, for the batch."""
    return out.cov.tape.widest if isinstance(out.cov, Swept) else out.mean.numel()


def _moments(outputs: Any) -> dict[str, Moments]:
    return {name: out for name, out in leaves(outputs).items() if isinstance(out, Moments)}
