"""Measure how far a network's tracked variances are off, correct them, and see what is left."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, overload

import torch
from torch import Tensor, nn

from covary.convert import Converted
from covary.covariance import Probe
from covary.graph_tracking import Tracking, track_converted
from covary.models import left_alone, with_covariance
from covary.moments import Moments
from covary.nn import Lift, Linear
from covary.nn.fidelity import Fidelity, Row, TrackingWarning
from covary.progress import Steps, shown
from covary.uncertainty.fidelity import agreement, gathered

# Numbers in the largest tensor of a pass: 128 MB in single precision.
_NUMBERS_AT_A_TIME = 2**25
# Multiplications that exact covariances may take: some seconds on two cores of a CPU.
_AFFORDABLE = 1e12
_LEAST_SAMPLES = 16
# Wider layers than this are not tried as ``exact_width``: exact covariances would be as cheap.
_WIDEST_EXACT = 128


@overload
def track(  # type: ignore[overload-overlap]
    net: Converted, batches: Iterable[Any] | Tensor, *, samples: int = ..., progress: bool = ...
) -> Tracking: ...


@overload
def track(
    net: nn.Module, batches: Iterable[Any] | Tensor, *, samples: int = ..., progress: bool = ...
) -> Fidelity: ...


def track(
    net: nn.Module, batches: Iterable[Any] | Tensor, *, samples: int = 256, progress: bool = True
) -> Fidelity | Tracking:
    """Measure, on some inputs, what a network needs to compute its covariance.

    A network that ``covary.convert`` made needs the variances before its nonlinearities. They are
    measured by a few draws of its noise, and become buffers, saved with its weights; print(net)
    then shows where the variance of its output comes from. A ``TrackingWarning`` tells if variances
    of draws and computed ones disagree.

    A chain of ``covary.nn`` layers needs corrections if it is to track its covariance, however it
    was trained. Half of the samples serve to measure by what factor each unit's estimated variance
    is off (docs/theory.md, eq. 28). The other half serve to compare tracked covariances with exact
    ones, for several values of ``exact_width``. Both results are buffers of the network, saved with
    its weights; what was measured before is replaced. Afterwards
    ``covary.with_covariance(net, "tracked")`` uses the least ``exact_width`` that was good enough,
    and warns if none was.

    Args:
        net: a network that ``covary.convert`` made, or one with a ``covary.nn.Lift``, of any
            covariance.
        batches: inputs like those the network was trained on: a tensor (N, ...), or what gives
            batches of them, such as a ``DataLoader`` (of tuples, the first is taken). For a
            converted network, of tuples as many first elements are taken as its ``forward``
            requires, since labels may follow; a dict whose keys are names of parameters of
            ``forward`` gives these, optional ones too. A single tuple or dict is one batch.
        samples: how many inputs to take, at most: of a tensor, evenly spaced ones; of batches, the
            first. Of fewer than 32, all serve for both purposes, and the comparison says little.
        progress: show a bar, on a terminal that has ``rich``.

    Returns:
        Of a converted network a ``Tracking``: the shares of its sources of noise, and by what
        ratio variances of draws differ from computed ones. Of a chain a ``Fidelity``, with a row
        for every ``exact_width`` tried: rank correlation of entropies with exact ones, and relative
        error of the covariance.

    Examples:
        >>> import covary, torch
        >>> _ = torch.manual_seed(0)
        >>> net = covary.mlp([4, 8, 6, 3], activation="heaviside", noise=0.2)
        >>> fidelity = covary.track(net, torch.randn(64, 4))
        >>> [row.exact_width for row in fidelity.rows]
        [0, 6]
        >>> fast = covary.with_covariance(net, "tracked").eval()
        >>> fast(torch.ones(2, 4)).entropy().shape
        torch.Size([2])
    """
    if isinstance(net, Converted):
        with shown(progress) as steps, left_alone(net.model):
            return track_converted(net, batches, samples=samples, steps=steps)
    if not any(isinstance(layer, Lift) for layer in net.modules()):
        raise ValueError(
            "track takes a network that covary.convert made, or one of covary.nn layers with a "
            f"Lift, and this {type(net).__name__} has no moments yet. Convert it first: "
            "net = covary.convert(model.eval(), noise=0.05)."
        )
    # A network of its own, but for parameters and buffers; exact nowhere, so all is measured.
    tracked = with_covariance(net, "tracked", exact_width=0).eval()
    exact = with_covariance(net, "full").eval()
    linears = [layer for layer in tracked.modules() if isinstance(layer, Linear)]
    if not linears:
        raise ValueError("track needs a network with a covary.nn.Linear; this has none.")
    inputs = _inputs(batches, samples, next(net.parameters()).device)
    # What serves for both purposes says less, but of so few nothing is left to set aside.
    few = len(inputs) < 2 * _LEAST_SAMPLES
    to_measure, to_compare = (inputs, inputs) if few else (inputs[::2], inputs[1::2])
    widths = _candidates(linears)
    lifts = [layer for layer in net.modules() if isinstance(layer, Lift)]
    for lift in lifts:
        lift.fidelity = None  # of corrections that are about to go, should this be interrupted
    with torch.no_grad(), shown(progress) as steps, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrackingWarning)  # it is just being found out how good
        _measure(tracked, linears, to_measure, steps)
        rows = tuple(_compare(exact, tracked, to_compare, linears, widths, steps))
    fidelity = Fidelity.of(torch.tensor(rows))  # rounded, as it is kept
    for lift in lifts:
        lift.set_fidelity(fidelity)
    return fidelity


def _measure(net: nn.Module, linears: list[Linear], inputs: Tensor, steps: Steps) -> None:
    for layer in linears:
        layer.begin_tracking(anew=True)
    widest = max(max(layer.in_features, layer.out_features) for layer in linears)
    at_once = max(1, min(len(inputs), _NUMBERS_AT_A_TIME // widest**2))
    units = max(1, _NUMBERS_AT_A_TIME // (widest * at_once))
    probe = Probe(samples=at_once, units=units, momentum=0.0)
    chunks = torch.split(inputs, at_once)
    # One layer after the other, each behind layers that are corrected already.
    for number, layer in enumerate(linears, start=1):
        # Turn after turn with the same samples, so that every unit sees all of them.
        todo = [chunk for chunk in chunks for _ in range(math.ceil(layer.out_features / units))]
        layer.probe = probe
        for chunk in steps(todo, f"corrections, {number} of {len(linears)}"):
            net(chunk)
        layer.probe = None


def _compare(
    exact: nn.Module,
    tracked: nn.Module,
    inputs: Tensor,
    linears: list[Linear],
    widths: list[int],
    steps: Steps,
) -> Iterator[Row]:
    price = sum(float(layer.out_features) * layer.in_features**2 for layer in linears[1:]) or 1.0
    inputs = inputs[: max(_LEAST_SAMPLES, int(_AFFORDABLE / price))]
    widest = max(layer.out_features for layer in linears)
    chunks = torch.split(inputs, max(1, _NUMBERS_AT_A_TIME // widest**2))
    truth = gathered([_plain(exact(chunk)) for chunk in steps(chunks, "exact covariances")])
    for width in widths:
        net = with_covariance(tracked, "tracked", exact_width=width)
        found = gathered([_plain(net(c)) for c in steps(chunks, f"exact_width={width}")])
        agrees = agreement(truth, found)
        yield Row(width, agrees.rank, agrees.covariance)


def _plain(out: Any) -> Moments:
    if not isinstance(out, Moments):
        raise TypeError(
            f"track needs a network that gives Moments, this gave {type(out).__name__}."
        )
    return out


def _candidates(linears: list[Linear]) -> list[int]:
    """Widths of the layers whose estimates matter: the first is exact, the last is the output."""
    hidden = {layer.out_features for layer in linears[1:-1]}
    return [0, *sorted(width for width in hidden if width <= _WIDEST_EXACT)]


def _inputs(batches: Iterable[Any] | Tensor, samples: int, device: torch.device) -> Tensor:
    """(N, ...) the first inputs there are, up to so many."""
    if samples < 2:
        raise ValueError(f"track needs 2 samples at least, got samples={samples}.")
    if isinstance(batches, Tensor):
        every = torch.arange(min(samples, len(batches))) * len(batches)
        batches = [batches[every // max(1, len(every))]]
    found: list[Tensor] = []
    for batch in batches:
        x = batch[0] if isinstance(batch, (tuple, list)) else batch
        if not isinstance(x, Tensor):
            raise TypeError(
                f"track takes a tensor, or batches of inputs or of (inputs, ...); got a batch of "
                f"{type(batch).__name__}."
            )
        found.append(x[: samples - sum(map(len, found))])
        if sum(map(len, found)) >= samples:
            break
    count = sum(map(len, found))
    if count < 2:
        raise ValueError(f"track needs 2 samples at least, and got {count}.")
    return torch.cat(found).to(device)
