"""Measure, on some inputs, the variances that a converted network takes at its nonlinearities."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary.convert import Converted, batch_of
from covary.covariance.swept import Swept
from covary.measuring import Average
from covary.moments import Moments

# How often each input is drawn, and how many inputs at a time.
_DRAWS, _AT_ONCE = 8, 32
# Variances are estimated for each sample if that changes the output's covariance by more than this.
_NEGLIGIBLE = 0.03
# Shares of sources are averaged over so many inputs and random rows of the output.
_SHARE_SAMPLES, _SHARE_ROWS = 32, 8

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Steps = Callable[[Sequence[Any], str], Iterable[Any]]


class Tracking(NamedTuple):
    """What ``covary.track`` measured of a converted network."""

    samples: int  # inputs that it was measured on
    shares: dict[str, float]  # of the variance of the output, by where the noise enters
    propagates: bool  # whether variances are estimated for each sample
    difference: float  # that it makes to the covariance of the output, relative; NaN if not tried


@torch.no_grad()
def track_converted(
    net: Converted, batches: Iterable[Any] | Any, *, samples: int, steps: Steps
) -> Tracking:
    """Measure variances on up to so many inputs, and what share of the output's comes from where.

    Both become buffers of the network. See ``covary.track``.
    """
    chunks = list(_chunks(net, batches, samples))
    counts = [batch_of(chunk, net.batch_dim) for chunk in chunks]
    if sum(counts) < 2:
        raise ValueError(f"track needs 2 samples at least, and got {sum(counts)}.")
    average = Average()
    for number, chunk in enumerate(steps(chunks, "variances")):
        average.add(net.measure(chunk, draws=_DRAWS, seed=number), counts[number])
    measured = average.value()
    ways = {"averaged": [False], "propagated": [True]}.get(net.variances, [False, True])
    was_training = net.training
    net.eval()
    try:
        found = {}
        for propagates in steps(ways, "levels"):
            net.sites.set_propagates(propagates)
            level = Average()
            for chunk, count in zip(chunks, counts, strict=True):
                level.add(net.levels(chunk, measured), count)
            net.sites.replace(measured | level.value())
            found[propagates] = net.sites.known(), _shares(net, chunks[0])
        difference = math.nan
        propagates = ways[-1]
        if len(ways) > 1:
            (_, (_, plain)), (_, (_, fine)) = found[False], found[True]
            difference = ((plain - fine).norm() / fine.norm()).item() if fine.numel() else 0.0
            propagates = difference > _NEGLIGIBLE
        known, (shares, _) = found[propagates]
        net.sites.set_propagates(propagates)
        net.sites.replace(known)
        net.sites.set_shares(shares)
    finally:
        net.train(was_training)
    return Tracking(sum(counts), shares, propagates, difference)


def _shares(net: Converted, inputs: Inputs) -> tuple[dict[str, float], Tensor]:
    """Of the sum of all variances of the output, by source, on average over inputs.

    Besides, covariances (N, r, r) of some random rows of the output.
    """
    args, named = _some(inputs, slice(0, _SHARE_SAMPLES), net.batch_dim)
    generator = torch.Generator().manual_seed(0)
    total: dict[str, float] = {}
    covariances = []
    outputs = net(*args, **named)
    for out in pytree.tree_leaves(outputs, is_leaf=lambda value: isinstance(value, Moments)):
        if not isinstance(out, Moments):
            continue
        assert isinstance(out.cov, Swept)
        # Rows of random signs: what they have of a variance is, on average, the sum over outputs.
        shape = (_SHARE_ROWS, *out.mean.shape)
        signs = torch.randint(0, 2, shape, generator=generator).to(out.mean) * 2 - 1
        parts = out.cov.tape.variances(out.cov.at, signs)
        covariances.append(out.cov.tape.quadratic(out.cov.at, signs))
        whole = sum(parts.values())
        for name, part in parts.items():
            share = torch.where(part > 0, part / whole, 0.0)
            total[name] = total.get(name, 0.0) + share.mean().item()
    every = sum(total.values())
    shares = {name: share / every for name, share in total.items()} if every else {}
    return shares, torch.cat(covariances) if covariances else torch.zeros(0)


def _chunks(net: Converted, batches: Any, samples: int) -> Iterable[Inputs]:
    """Arguments for the model, some samples at a time, until there are so many."""
    if samples < 2:
        raise ValueError(f"track needs 2 samples at least, got samples={samples}.")
    if isinstance(batches, Tensor):
        # Evenly spaced ones: data often come sorted.
        size = batches.shape[net.batch_dim]
        count = min(samples, size)
        every = torch.arange(count, device=batches.device) * size // max(1, count)
        batches = [batches.index_select(net.batch_dim, every)]
    left = samples
    for batch in batches:
        inputs = arguments(net, batch)
        size = batch_of(inputs, net.batch_dim)
        for low in range(0, min(size, left), _AT_ONCE):
            high = min(low + _AT_ONCE, size, left)
            yield _some(inputs, slice(low, high), net.batch_dim)
        left -= min(size, left)
        if left <= 0:
            return


def arguments(net: Converted, batch: Any) -> Inputs:
    """What the model is called with for a batch of a loader, on the model's device.

    A tensor or a dict is the one input. Of a tuple, as many first elements are inputs as the model
    needs; what follows are labels.
    """
    device = next((p.device for p in net.model.parameters()), torch.device("cpu"))
    if isinstance(batch, tuple | list):
        parameters = list(inspect.signature(type(net.model).forward).parameters.values())[1:]
        needed = sum(
            each.default is each.empty
            and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
            for each in parameters
        )
        args = tuple(batch[: max(1, needed)])
    else:
        args = (batch,)
    moved = pytree.tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, args)
    if not any(isinstance(value, Tensor) for value in pytree.tree_leaves(moved)):
        raise TypeError(
            "track takes a tensor, or batches of inputs or of (inputs, ...); got a batch of "
            f"{type(batch).__name__} without a tensor."
        )
    return moved, {}


def _some(inputs: Inputs, which: slice, batch_dim: int) -> Inputs:
    def some(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dim() > batch_dim:
            return value[(slice(None),) * batch_dim + (which,)]
        return value

    found: Inputs = pytree.tree_map(some, inputs)
    return found
