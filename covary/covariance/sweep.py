"""The sweep: rows pulled back through linear maps, meeting every source of noise on the way.

A tape records what a forward pass did: values as linear functions of values before them, and the
noise that entered each. The covariance of a value is the sum over sources s of J_s D_s J_s^T, where
the rows of J_s are those of the value pulled back to the source (docs/theory.md, eq. 27). A value
that is used twice is one entry of the tape: what comes back from both uses is added first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from covary.covariance.base import Covariance, Selection
from covary.covariance.exact import Full
from covary.covariance.samples import Samples

# Rows (r, *shape) of a value -> rows of each of its parents, or None where nothing comes back.
Pull = Callable[[Tensor], Sequence[Tensor | None]]
# Numbers of the largest tensor in a sweep: 128 MB in single precision, of which a few are alive.
_NUMBERS_AT_A_TIME = 2**25
# A covariance matrix that takes more memory than this is not computed unasked.
_MOST_BYTES = 2 * 2**30
# Of so few units the whole matrix takes hardly longer than the variances; it is kept for later.
_CHEAP = 64
CHANGED_WEIGHTS = (
    "The weights were changed after the forward pass, before its covariance was looked at. "
    "Look first (out.covariance_matrix, out.entropy()), then step the optimizer."
)


class Entry(NamedTuple):
    """Noise that enters a value, independent of all that happened before."""

    name: str  # of the call that it belongs to, as ``print(net)`` shows it
    var: Tensor  # of each element, (1 | B, ...) to be broadcast to the value's shape
    samples: Samples  # which sample each element belongs to


class Node(NamedTuple):
    """A value as a linear function of values before it, plus noise.

    Where each element is one of the only parent's times a factor, ``gain`` is that factor.
    """

    parents: tuple[int, ...]
    pull: Pull
    noise: Entry | None
    gain: Tensor | None


class Tape:
    """What happened in a forward pass over B samples, in the order in which it happened.

    Attributes:
        batch: the number B of samples.
        is_supervised: whether gradients may flow through the sweep (SMSC).
        widest: the number of elements of the largest value.
    """

    def __init__(self, batch: int, *, is_supervised: bool = False) -> None:
        self.batch = batch
        self.is_supervised = is_supervised
        self.widest = 1
        self._nodes: list[Node] = []
        self._used: dict[int, tuple[Tensor, int]] = {}

    def add(
        self,
        parents: Sequence[int],
        pull: Pull,
        noise: Entry | None = None,
        gain: Tensor | None = None,
    ) -> int:
        """Write down a value, and give its index."""
        self._nodes.append(Node(tuple(parents), pull, noise, gain))
        return len(self._nodes) - 1

    def set_noise(self, at: int, noise: Entry) -> None:
        """Let other noise enter a value."""
        self._nodes[at] = self._nodes[at]._replace(noise=noise)

    def branch(self) -> Tape:
        """A tape that goes on from here: what is added to it, this one does not keep alive."""
        tape = copy.copy(self)
        tape._nodes = list(self._nodes)
        return tape

    def uses(self, tensor: Tensor) -> None:
        """Remember that maps use this tensor: it must not change before the sweep."""
        if not tensor.is_inference():
            self._used.setdefault(id(tensor), (tensor, tensor._version))

    def sweep(self, at: int, rows: Tensor, meet: Callable[[Entry, Tensor], None]) -> None:
        """Call ``meet`` for each entry of noise that value ``at`` depends on, with the rows there.

        Args:
            at: the index of the value.
            rows: (r, *shape) of the value.
            meet: takes an entry and rows (r, *shape) of what it enters, which may be overwritten
                afterwards.
        """
        if any(tensor._version != version for tensor, version in self._used.values()):
            raise RuntimeError(CHANGED_WEIGHTS)
        waiting = {at: rows}
        own: set[int] = set()  # values whose rows nobody else has: they may be written into
        may_write = not torch.is_grad_enabled()
        for index in range(at, -1, -1):
            here = waiting.pop(index, None)
            if here is None:
                continue
            parents, pull, noise, gain = self._nodes[index]
            if noise is not None:
                meet(noise, here)
            is_own = index in own
            pulled = pull(here) if gain is None or not is_own else [here.mul_(gain)]
            for parent, part in zip(parents, pulled, strict=True):
                if part is None:
                    continue
                is_met = parent in waiting
                is_new = False
                if may_write and (is_met or self._nodes[parent].gain is not None):
                    is_new = len(parents) == 1 and _is_own(part, here, is_own=is_own)
                if not is_met:
                    waiting[parent] = part
                elif is_new:
                    waiting[parent] = part.add_(waiting[parent])
                else:
                    waiting[parent] = waiting[parent] + part
                if is_new or (is_met and may_write):
                    own.add(parent)
            del here, pulled  # their memory is the next to be used, while it is in the cache

    def quadratic(self, at: int, rows: Tensor) -> Tensor:
        """(B, r, r) R C R^T for rows (r, *shape) of value ``at``, of covariance C."""
        total = rows.new_zeros(self.batch, len(rows), len(rows))

        def meet(noise: Entry, here: Tensor) -> None:
            flat, var = noise.samples.flattened(here, noise.var)
            if noise.var.numel() == 1:  # one variance for all elements
                product = (flat @ flat.mT) * noise.var.reshape(())
            else:
                product = (flat * var[:, None]) @ flat.mT
            total.add_(noise.samples.add_up(product))

        self.sweep(at, rows, meet)
        return total

    def variances(self, at: int, rows: Tensor) -> dict[str, Tensor]:
        """(B, r) the diagonal of R C R^T, as one summand for each name of noise."""
        found: dict[str, Tensor] = {}

        def meet(noise: Entry, here: Tensor) -> None:
            flat, var = noise.samples.flattened(here.square(), noise.var)
            part = noise.samples.add_up((flat @ var.expand(len(flat), -1)[..., None])[..., 0])
            found[noise.name] = found.get(noise.name, 0.0) + part

        self.sweep(at, rows, meet)
        return found


def _is_own(part: Tensor, here: Tensor, *, is_own: bool) -> bool:
    """Whether rows that were pulled back from others have memory of their own, without overlap.

    If they are a view of the others, these must be nobody else's (``is_own``).
    """
    memory = part.untyped_storage()
    if part.numel() * part.element_size() != memory.nbytes():
        return False
    return is_own or memory.data_ptr() != here.untyped_storage().data_ptr()


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
    def of(cls, inputs: Covariance) -> Swept:
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
            self._check_cost()
            eye = torch.eye(self._units, dtype=self.mean.dtype, device=self.mean.device)
            known = Full(self.quadratic(eye[None])).dense()
            self.__dict__["_matrix"] = known
        return known.clone()

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T for rows (1 | B, r, n), (B, r, r): as many rows of a sweep."""
        every = rows.expand(self.tape.batch, -1, -1) if self.chosen is None else self._spread(rows)
        shaped = every.transpose(0, 1).reshape(rows.shape[1], *self.mean.shape)
        with torch.set_grad_enabled(self._has_gradients):
            found = self.tape.quadratic(self.at, shaped)
        return found if self.chosen is None else found[self.chosen]

    def linear(self, weight: Tensor) -> Covariance:
        def pull(rows: Tensor) -> tuple[Tensor]:
            return ((rows @ weight).reshape(len(rows), *self.mean.shape),)

        return self._behind(pull, self.mean.new_empty(len(self.mean), len(weight)))

    def add_noise(self, var: float) -> Covariance:
        added = torch.as_tensor(var, dtype=self.mean.dtype)
        return self._behind(lambda rows: (rows,), self.mean, "noise", added)

    def scale(self, factor: Tensor) -> Covariance:
        factor = self._shaped(factor)
        return self._behind(lambda rows: (rows * factor,), self.mean)

    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        excess = self._shaped((variance - gain * self.variance * gain).clamp(min=0))
        shaped = self._shaped(gain)
        return self._behind(lambda rows: (rows * shaped,), self.mean, "activation", excess)

    def select(self, samples: Selection) -> Covariance:
        known = self._known("_matrix")
        if known is not None:
            return Full(known[samples])
        chosen = torch.arange(len(self.mean), device=self.mean.device)
        chosen = (chosen if self.chosen is None else self.chosen)[samples]
        return Swept(self.tape, self.at, self.mean, chosen)

    @property
    def _units(self) -> int:
        return self.mean.shape[1:].numel()

    @property
    def _has_gradients(self) -> bool:
        return self.tape.is_supervised and torch.is_grad_enabled()

    def _known(self, name: str) -> Tensor | None:
        """What was computed before, unless gradients are wanted that it does not have."""
        known: Tensor | None = self.__dict__.get(name)
        lacks = known is not None and self._has_gradients and not known.requires_grad
        return None if lacks else known

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

    def _shaped(self, value: Tensor) -> Tensor:
        """(1 | b, n) of the chosen samples -> (1 | B, *event) of all."""
        if self.chosen is not None and len(value) > 1:
            value = self._spread(value)
        return value.expand(len(value), self._units).reshape(len(value), *self.mean.shape[1:])

    def _behind(self, pull: Pull, mean: Tensor, name: str = "", var: Tensor | None = None) -> Swept:
        """A value that is pulled back to this one, with noise of this variance if there is any."""
        noise = None if var is None else Entry(name, var, Samples.along(self.mean))
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

    def _check_cost(self) -> None:
        n = self._units
        largest = n * max(self.tape.widest, self.tape.batch * n)
        cost = 3 * largest * self.mean.element_size()  # what a sweep has alive at a time
        if cost > _MOST_BYTES:
            raise MemoryError(
                f"The covariance of {n} outputs for a batch of {self.tape.batch} would take about "
                f"{cost / 2**30:.0f} GB and {n} rows of a sweep, each about as long as a backward "
                "pass. Use out.project(rows) for the outputs that matter, out.variance, or a "
                "smaller batch."
            )
