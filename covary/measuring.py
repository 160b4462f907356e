"""Variances at the calls of a model, measured by a few draws of its noise, and kept as buffers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from covary.passes import Call
from covary.sources import Kept


class DrawnVariances:
    """Variances and covariances of values at one call, over draws, averaged over samples.

    Values are taken relative to their first draw, so that nothing cancels where means are large.

    Args:
        axes: the dimensions of the batch, in the broadcast shape of the values.
    """

    def __init__(self, axes: Sequence[int]) -> None:
        self._axes = axes
        self._count = 0
        self._first: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._products: dict[str, Tensor] = {}

    def add(self, values: Sequence[Tensor]) -> None:
        """Take in a draw: what goes into an activation, or both factors of a product."""
        if not self._count:
            # Copies: what is drawn goes on in the same memory where functions are in-place.
            self._first = [value.clone() for value in values]
            self._sums = [torch.zeros_like(value) for value in values]
        self._count += 1
        apart = [value - first for value, first in zip(values, self._first, strict=True)]
        for total, more in zip(self._sums, apart, strict=True):
            total += more
        for suffix, i, j in _pairs(len(values)):
            self._products[suffix] = self._products.get(suffix, 0.0) + apart[i] * apart[j]

    def measured(self) -> dict[str, Tensor]:
        """What was found, by suffix of the call's name; of size 1 along the batch."""
        found = {}
        for suffix, i, j in _pairs(len(self._sums)):
            of_means = self._sums[i] * self._sums[j] / self._count
            value = (self._products[suffix] - of_means) / (self._count - 1)
            missing = max(part.dim() for part in self._sums) - value.dim()
            axes = [axis - missing for axis in self._axes if axis >= missing]
            found[suffix] = value.mean(axes, keepdim=True) if axes else value
        return found


def _pairs(count: int) -> tuple[tuple[str, int, int], ...]:
    return (("", 0, 0),) if count == 1 else ((":x", 0, 0), (":y", 1, 1), (":xy", 0, 1))


class Average:
    """The average of measurements on several batches, weighted by their numbers of samples."""

    def __init__(self) -> None:
        self._total: dict[str, Tensor] = {}
        self._weight: Counter[str] = Counter()

    def add(self, measured: Mapping[str, Tensor], samples: int) -> None:
        """Take in what was measured on so many samples.

        Dimensions in which sizes differ (images of several sizes) are averaged over.
        """
        for name, value in measured.items():
            known = self._total.get(name, torch.zeros_like(value))
            for axis in range(value.dim()):
                if known.shape[axis] != value.shape[axis]:
                    known, value = known.mean(axis, keepdim=True), value.mean(axis, keepdim=True)
            self._total[name] = known + value * samples
            self._weight[name] += samples

    def value(self) -> dict[str, Tensor]:
        """The averages by name."""
        return {name: total / self._weight[name] for name, total in self._total.items()}


class Measurements(Kept):
    """What was measured at the calls of a converted network, as buffers saved with its weights."""

    def known(self) -> dict[str, Tensor]:
        """Variances and covariances by the name of the call."""
        return self.named("measured/")

    def shares(self) -> dict[str, float]:
        """The part that each source had in the variance of the output, on average."""
        return {name: float(share) for name, share in self.named("share/").items()}

    @property
    def is_tracked(self) -> bool:
        """Whether ``covary.track`` has run, even if there was nothing to measure."""
        return any(name == "tracked" or name.startswith("measured/") for name in self._buffers)

    @property
    def with_errors(self) -> bool:
        """Whether it was measured on inputs that have errors of their own."""
        return "with_errors" in self._buffers

    def set_with_errors(self, wanted: bool) -> None:
        """Remember whether inputs had errors of their own."""
        self._buffers.pop("with_errors", None)
        if wanted:
            self._buffers["with_errors"] = torch.tensor(True)

    @property
    def propagates(self) -> bool:
        """Whether variances are estimated for each sample, or the same for all."""
        return "propagates" in self._buffers

    def set_propagates(self, wanted: bool) -> None:
        """Choose whether variances are estimated for each sample from now on."""
        self._buffers.pop("propagates", None)
        if wanted:
            self._buffers["propagates"] = torch.tensor(True)

    def replace(
        self, measured: Mapping[str, Tensor], shares: Mapping[str, float] | None = None
    ) -> None:
        """Forget what was measured before, and keep this; with the part of each source."""
        self.forget()
        self.keep("measured/", measured)
        self.keep("share/", {name: torch.tensor(share) for name, share in (shares or {}).items()})
        self._buffers["tracked"] = torch.tensor(True)

    def forget(self) -> None:
        """Forget what was measured."""
        for name in [name for name in self._buffers if name not in ("propagates", "with_errors")]:
            del self._buffers[name]

    def blend(self, measured: Mapping[str, Tensor], momentum: float) -> None:
        """Move what is known towards what was measured now, by this fraction."""
        known = self.known()
        moved = {
            name: torch.lerp(known[name], value, momentum)
            for name, value in measured.items()
            if name in known and known[name].shape == value.shape
        }
        self.keep("measured/", {**measured, **moved})


def described(head: str, calls: Sequence[Call], shares: Mapping[str, float]) -> str:
    """The table that ``print(net)`` shows."""
    if not calls:
        return f"{head}\n  (run or track it to see how each call is treated)"
    rows: Counter[tuple[str, str, str, str]] = Counter()
    exact: Counter[str] = Counter()
    for name, kind in calls:
        path, _, function = name.rpartition(":")
        if kind == "exact":
            exact[function] += 1
        else:
            share = f"{100 * shares[name]:.1f}%" if name in shares else ""
            rows[path or "(model)", function, kind, share] += 1
    table = [("module", "function", "how it is treated", "share of variance")]
    for (path, function, kind, share), count in rows.items():
        table.append((path, function if count == 1 else f"{function} (x{count})", kind, share))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    counts = ", ".join(f"{count} {each}" for each, count in exact.items())
    return "\n".join([head, *lines, f"  exact: {counts or 'nothing'}"])
