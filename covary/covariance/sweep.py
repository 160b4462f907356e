"""The sweep: rows pulled back through linear maps, meeting every source of noise on the way.

A tape records what a forward pass did: values as linear functions of values before them, and the
noise that entered each. The covariance of a value is the sum over sources s of J_s D_s J_s^T, where
the rows of J_s are those of the value pulled back to the source (docs/theory.md, eq. 27). A value
that is used twice is one entry of the tape: what comes back from both uses is added first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from covary.covariance.samples import Samples

# Rows (r, *shape) of a value -> rows of each of its parents, or None where nothing comes back.
Pull = Callable[[Tensor], Sequence[Tensor | None]]


class Entry(NamedTuple):
    """Noise that enters a value, independent of all that happened before.

    Attributes:
        name: of the call that it belongs to, as ``print(net)`` shows it.
        var: the variance of each element, (1 | B, ...) to be broadcast to the value's shape.
        samples: which sample each element belongs to.
    """

    name: str
    var: Tensor
    samples: Samples


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
        for tensor, version in self._used.values():
            if tensor._version != version:
                raise RuntimeError(
                    "The weights were changed after the forward pass, before its covariance was "
                    "looked at. Look first (out.covariance_matrix, out.entropy()), then step the "
                    "optimizer."
                )
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
