"""The covariance of a value on a tape, computed by sweeps when it is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from covary.covariance.base import Covariance, Selection, as_covariance
from covary.covariance.exact import Full
from covary.covariance.samples import Samples
from covary.covariance.sweep import Entry, Pull, Tape

# Numbers of the largest tensor in a sweep: 128 MB in single precision, of which a few are alive.
_NUMBERS_AT_A_TIME = 2**25
# A covariance matrix that takes more memory than this is not computed unasked.
_MOST_BYTES = 2 * 2**30
# Of so few units the whole matrix takes hardly longer than the variances; it is kept for later.
_CHEAP = 64


@dataclass(frozen=True, eq=False, repr=False)
class Swept(Covariance):
    """The covariance of a value (B, *event) on a tape; its units are the flat event.

    Variances, the matrix and projections cost as many rows of a sweep as they have rows. With exact
    variances at every nonlinearity the result would be exact (docs/theory.md, eq. 27).

    Attributes:
        tape: what the forward pass wrote down.
        at: the index of the value.
        mean: (B, *event) its mean, for shape and type.
        chosen: the samples that are looked at, if not all.
    """

    tape: Tape
    at: int
    mean: Tensor
    chosen: Tensor | None = None

    @classmethod
    def start(cls, var: Tensor, n: int) -> Swept:
        raise TypeError("A Swept covariance comes from covary.convert, not from a Lift.")

    @property
    def variance(self) -> Tensor:
        is_cheap = self._units <= _CHEAP and self._units * self.tape.widest <= _NUMBERS_AT_A_TIME
        if self._known("_matrix") is not None or (is_cheap and not self._has_gradients):
            return self.dense().diagonal(dim1=-2, dim2=-1)
        known = self._known("_variance")
        if known is None:
            known = torch.stack(list(self.by_source().values())).sum(0)
            if not self._has_gradients:  # or else a second backward pass would find no graph
                self.__dict__["_variance"] = known
        return known.clone()

    @property
    def _has_gradients(self) -> bool:
        return self.tape.is_supervised and torch.is_grad_enabled()

    def _known(self, name: str) -> Tensor | None:
        """What was computed before, unless gradients are wanted that it does not have."""
        known: Tensor | None = self.__dict__.get(name)
        lacks = known is not None and self._has_gradients and not known.requires_grad
        return None if lacks else known

    @property
    def shape(self) -> torch.Size:
        return torch.Size([len(self.mean if self.chosen is None else self.chosen), self._units])

    def each(self, change: Callable[[Tensor], Tensor]) -> Covariance:
        if change is Tensor.detach and not self.tape.is_supervised:
            return self
        return Full(change(self.dense()))

    def __reduce__(self) -> tuple[type[Full], tuple[Tensor]]:
        return Full, (self.dense(),)  # a tape is made of functions, which are not for files

    def by_source(self) -> dict[str, Tensor]:
        """(B, n) variances as one summand for each source of noise."""
        found: dict[str, list[Tensor]] = {}
        with torch.set_grad_enabled(self._has_gradients):
            for rows in self._blocks():
                for name, part in self.tape.variances(self.at, rows).items():
                    found.setdefault(name, []).append(part)
        if not found:
            return {"": self.mean.new_zeros(self.shape)}
        every = slice(None) if self.chosen is None else self.chosen
        return {name: torch.cat(parts, -1)[every] for name, parts in found.items()}

    def dense(self) -> Tensor:
        known = self._known("_matrix")
        if known is None:
            n = self._units
            self._check_cost(n)
            eye = torch.eye(n, dtype=self.mean.dtype, device=self.mean.device)
            known = as_covariance(self.quadratic(eye[None]))
            self.__dict__["_matrix"] = known
        return known.clone()

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T for rows (1 | B, r, n), (B, r, r): as many rows of a sweep."""
        every = rows.expand(self.tape.batch, -1, -1) if self.chosen is None else self._spread(rows)
        shaped = every.transpose(0, 1).reshape(rows.shape[1], *self.mean.shape)
        with torch.set_grad_enabled(self._has_gradients):
            found = self.tape.quadratic(self.at, shaped)
        return found if self.chosen is None else found[self.chosen]

    def _spread(self, values: Tensor) -> Tensor:
        """Values (1 | b, ...) of the chosen samples as (B, ...) of all, 0 for the others."""
        assert self.chosen is not None
        if len(values) > 1 and len(set(self.chosen.tolist())) < len(self.chosen):
            raise IndexError(
                "A sample that was selected twice takes one set of rows or factors, not two. "
                "Select each sample once, or look at out.covariance_matrix first."
            )
        every = values.new_zeros(self.tape.batch, *values.shape[1:])
        every[self.chosen] = values.expand(len(self.chosen), *values.shape[1:])
        return every

    def linear(self, weight: Tensor) -> Covariance:
        def pull(rows: Tensor) -> tuple[Tensor]:
            return ((rows @ weight).reshape(len(rows), *self.mean.shape),)

        return self._behind(pull, self.mean.new_empty(len(self.mean), len(weight)))

    def add_noise(self, var: float) -> Covariance:
        noise = Entry("noise", torch.as_tensor(var, dtype=self.mean.dtype), self._samples)
        return self._behind(lambda rows: (rows,), self.mean, noise)

    def scale(self, factor: Tensor) -> Covariance:
        factor = self._shaped(factor)
        return self._behind(lambda rows: (rows * factor,), self.mean)

    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        excess = (variance - gain * self.variance * gain).clamp(min=0)
        shaped = self._shaped(gain)
        noise = Entry("activation", self._shaped(excess), self._samples)
        return self._behind(lambda rows: (rows * shaped,), self.mean, noise)

    def select(self, samples: Selection) -> Covariance:
        known = self._known("_matrix")
        if known is not None:
            return Full(known[samples])
        chosen = torch.arange(len(self.mean), device=self.mean.device)
        chosen = (chosen if self.chosen is None else self.chosen)[samples]
        return Swept(self.tape, self.at, self.mean, chosen)

    @property
    def _units(self) -> int:
        return self.mean[0].numel() if len(self.mean) else self.mean.shape[1:].numel()

    @property
    def _samples(self) -> Samples:
        return Samples.along(self.mean)

    def _shaped(self, value: Tensor) -> Tensor:
        """(1 | b, n) of the chosen samples -> (1 | B, *event) of all."""
        if self.chosen is not None and len(value) > 1:
            value = self._spread(value)
        return value.expand(len(value), self._units).reshape(len(value), *self.mean.shape[1:])

    def _behind(self, pull: Pull, mean: Tensor, noise: Entry | None = None) -> Swept:
        tape = self.tape.branch()
        return Swept(tape, tape.add((self.at,), pull, noise), mean, self.chosen)

    def _blocks(self) -> Iterator[Tensor]:
        """Rows (r, B, *event) of the identity, as many at a time as memory takes."""
        n, step = self._units, max(1, _NUMBERS_AT_A_TIME // max(1, self.tape.widest))
        for low in range(0, n, step):
            count = min(step, n - low)
            rows = self.mean.new_zeros(count, self.tape.batch, n)
            rows[torch.arange(count), :, torch.arange(low, low + count)] = 1.0
            yield rows.reshape(count, *self.mean.shape)

    def _check_cost(self, n: int) -> None:
        largest = n * max(self.tape.widest, self.tape.batch * n)
        cost = 3 * largest * self.mean.element_size()  # what a sweep has alive at a time
        if cost > _MOST_BYTES:
            raise MemoryError(
                f"The covariance of {n} outputs for a batch of {self.tape.batch} would take about "
                f"{cost / 2**30:.0f} GB and {n} rows of a sweep, each about as long as a backward "
                "pass. Use out.project(rows) for the outputs that matter, out.variance, or a "
                "smaller batch."
            )
