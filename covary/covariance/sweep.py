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

from covary import linalg
from covary.covariance.base import Covariance, Selection
from covary.covariance.exact import Full
from covary.covariance.samples import Samples
from covary.covariance.terms import IndependentTerm, Response, Term, added_up, deviation_of
from covary.tracing import is_traced

# Rows (r, *shape) of a value -> rows of each of its parents, or None where nothing comes back.
Pull = Callable[[Tensor], Sequence[Tensor | None]]
# What a sweep calls for terms on its way, with the rows that all of them meet.
Meet = Callable[[Sequence[Term], Tensor], Sequence[Tensor] | None]
# A budget takes so many rows of random signs.
_RANDOM_ROWS = 8
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


class Node(NamedTuple):
    """A value as a linear function of values before it, plus what a source adds.

    Without a ``pull`` it is its only parent itself. Where each element is one of the only parent's
    times a factor, ``gain`` is that factor.
    """

    parents: tuple[int, ...]
    pull: Pull | None
    term: Term | None
    gain: Tensor | None


class Tape:
    """What happened in a forward pass over B samples, in the order in which it happened.

    Attributes:
        batch: the number B of samples.
        is_supervised: whether gradients may flow through the sweep (SMSC).
        widest: the number of elements of the largest value.
        axes: which dimension of an input is the batch, by the name of the input.
    """

    def __init__(self, batch: int, *, is_supervised: bool = False) -> None:
        self.batch = batch
        self.is_supervised = is_supervised
        self.widest = 1
        self.axes: dict[str, int] = {}
        self._nodes: list[Node] = []
        self._varies: list[bool] = []  # whether any source enters a value, or one before it
        self._used: dict[int, tuple[Tensor, int]] = {}

    def add(
        self,
        parents: Sequence[int],
        pull: Pull | None,
        term: Term | None = None,
        gain: Tensor | None = None,
    ) -> int:
        """Write down a value, and give its index."""
        self._nodes.append(Node(tuple(parents), pull, term, gain))
        self._varies.append(term is not None or any(self._varies[parent] for parent in parents))
        return len(self._nodes) - 1

    def set_term(self, at: int, term: Term) -> None:
        """Let another source add to a value."""
        self._nodes[at] = self._nodes[at]._replace(term=term)
        self._varies[at] = True  # as all values behind it do: it is asked of those that have terms

    def branch(self) -> Tape:
        """A tape that goes on from here: what is added to it, this one does not keep alive."""
        tape = copy.copy(self)
        tape._nodes, tape._varies = list(self._nodes), list(self._varies)
        return tape

    def uses(self, tensor: Tensor) -> None:
        """Remember that maps use this tensor: it must not change before the sweep."""
        if not tensor.is_inference():
            self._used.setdefault(id(tensor), (tensor, tensor._version))

    def sweep(self, at: int, rows: Tensor, meet: Meet) -> None:
        """Call ``meet`` for all terms that value ``at`` depends on, with the rows there.

        Args:
            at: the index of the value.
            rows: (r, *shape) of the value.
            meet: takes terms and rows (r, *shape) of what they are added to, which may be
                overwritten afterwards. Of several terms, all but the last are added behind it.
                What it gives is added to the rows of each parent of the last, if not None.
        """
        if any(tensor._version != version for tensor, version in self._used.values()):
            raise RuntimeError(CHANGED_WEIGHTS)
        waiting = {at: rows}
        own: set[int] = set()  # values whose rows nobody else has: they may be written into
        may_write = not (torch.is_grad_enabled() or is_traced())
        terms: list[Term] = []
        for index in range(at, -1, -1):
            here = waiting.pop(index, None)
            if here is None:
                continue
            parents, pull, term, gain = self._nodes[index]
            if term is not None:
                terms.append(term)
            is_own = index in own
            if pull is None and all(other < parents[0] for other in waiting):
                waiting[parents[0]] = here  # to which nobody adds: its term meets the same rows
                if is_own:
                    own.add(parents[0])
                continue
            more = meet(terms, here) if terms else None
            terms = []
            if not any(self._varies[parent] for parent in parents):
                continue
            pulled: Sequence[Tensor | None]
            if gain is not None and is_own:
                pulled = [here.mul_(gain)]
            else:
                pulled = [here] if pull is None else pull(here)
            if more is not None:
                pulled = [_added(part, extra) for part, extra in zip(pulled, more, strict=True)]
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

        def meet(terms: Sequence[Term], here: Tensor) -> None:
            for term in added_up(terms):
                total.add_(term.products(here))

        self.sweep(at, rows, meet)
        return total

    def variances(self, at: int, rows: Tensor) -> dict[str, Tensor]:
        """(B, r) the diagonal of R C R^T, as one summand for each name of a call."""
        found: dict[str, Tensor] = {}

        def meet(terms: Sequence[Term], here: Tensor) -> None:
            for term in terms:
                found[term.name] = found.get(term.name, 0.0) + term.variances(here)

        self.sweep(at, rows, meet)
        return found

    def elements(self, at: int, rows: Tensor, label: str) -> Tensor | None:
        """(r, *shape) the part of each element of the value that this source is added to.

        As ``budget`` has it, before sums over elements; None if no such source is met.
        """
        parts: list[Tensor] = []

        def look(term: Term, here: Tensor) -> None:
            if term.label == label:
                parts.append(term.by_element(here))

        _, rate = self._shared_out(at, rows, matrices=False, look=look)
        if not parts:
            return None
        found, r = torch.stack(parts).sum(0), len(rows)
        random = found[r:].reshape(-1, *found[:r].shape).sum(0)
        shape = [r, *[1] * (found.dim() - 1)]
        shape[self.axes.get(label, 0) + 1] = self.batch
        return found[:r] + rate.mT.reshape(shape) * random

    def budget(self, at: int, rows: Tensor, *, matrices: bool = False) -> dict[str, Tensor]:
        """(B, r) the diagonal of R C R^T, as one summand for each source; or (B, r, r) all of it.

        What nonlinearities add has no source of its own: it is shared out among the sources of the
        variance that arrives there, in proportion (docs/theory.md, eq. 41). These proportions come
        from rows of random signs that start at each nonlinearity and are pulled back along with
        ``rows``: eight of them, or one for each of more rows.
        """
        return self._shared_out(at, rows, matrices=matrices)[0]

    def _shared_out(
        self,
        at: int,
        rows: Tensor,
        *,
        matrices: bool,
        look: Callable[[Term, Tensor], None] = lambda term, here: None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The budget, and (B, r) by how much the parts of random rows were scaled for it.

        ``look`` sees the rows that meet each source: those given, then the random ones.
        """
        r = len(rows)
        copies = max(1, _RANDOM_ROWS // r)
        generator = torch.Generator(rows.device).manual_seed(0)
        known: dict[str, Tensor] = {}
        guessed: dict[str, Tensor] = {}
        excess: list[Tensor] = []

        def spend(term: Term, here: Tensor, own: Tensor | float = 0.0) -> None:
            look(term, here)
            part = term.products(here[:r]) if matrices else term.variances(here[:r])
            if term.is_linearised:
                random = part.new_zeros(self.batch, r)
            else:
                random = (term.variances(here[r:]) + own).reshape(self.batch, copies, r).sum(1)
            known[term.label] = known[term.label] + part if term.label in known else part
            guessed[term.label] = guessed.get(term.label, 0.0) + random

        def meet(terms: Sequence[Term], here: Tensor) -> list[Tensor] | None:
            return [share(term, here) for term in terms][-1]

        def share(term: Term, here: Tensor) -> list[Tensor] | None:
            if not isinstance(term, IndependentTerm) or term.response is None:
                spend(term, here)
                return None
            rest, response = term.without_noise(), term.response
            excess.append(rest.products(here[:r]) if matrices else rest.variances(here[:r]))
            random = _random_rows(rest.var, here, r, copies, generator)
            starts = [random / deviation for deviation in response.deviations]
            if response.is_split:
                starts[1] = starts[1] * _other_signs(random, copies, generator)
            if response.noise:
                source = term.noise_alone()
                own = source.weighted(starts[0], response.noise)
                spend(source, here, own)
            zeros = random.new_zeros(r, *random.shape[1:])
            return [torch.cat([zeros, start]) for start in starts]

        self.sweep(at, torch.cat([rows, rows.new_zeros(copies * r, *rows.shape[1:])]), meet)
        if not excess or not known:
            return known, rows.new_zeros(self.batch, r)
        added = torch.stack(excess).sum(0)
        total = torch.stack(list(guessed.values())).sum(0)
        if matrices:  # one set of proportions for all elements of the matrix
            guessed = {label: part.sum(-1)[:, None, None] for label, part in guessed.items()}
            total = total.sum(-1)[:, None, None]
        rate = torch.where(total > 0, added / total, 0.0)
        return {label: part + rate * guessed[label] for label, part in known.items()}, rate


def _random_rows(
    excess: Tensor, here: Tensor, r: int, copies: int, generator: torch.Generator
) -> Tensor:
    """(copies r, *shape) random signs times the root of what the excess adds to each row there.

    Random row k of row i takes what is added to row i, and to random row k itself.
    """
    weight = excess * here.square()
    weight = weight[r:] + weight[:r].repeat(copies, *[1] * (here.dim() - 1))
    return weight.sqrt() * _signs(weight, generator)


def _other_signs(rows: Tensor, copies: int, generator: torch.Generator) -> Tensor:
    """Signs for a second parent, so that products of both parents cancel on average."""
    if copies == 1:
        return _signs(rows, generator)
    signs = rows.new_ones(copies, len(rows) // copies)
    signs[1::2] = -1  # of every other copy: they cancel exactly
    return signs.reshape(-1, *[1] * (rows.dim() - 1))


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, 1 or -1, of this shape and type."""
    ones = torch.randint(0, 2, like.shape, generator=generator, device=like.device)
    return (2 * ones - 1).to(like)


def _added(part: Tensor | None, extra: Tensor) -> Tensor:
    """Rows of a parent with others added, which may be of a shape that broadcasts it."""
    return extra if part is None else part + linalg.summed_to(extra, part.shape[1:])


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
        """(B, n) variances as one summand for each call where noise enters."""
        found = self._in_blocks(lambda rows: self.tape.variances(self.at, rows))
        return found or {"": self.mean.new_zeros(self.shape)}

    def budget(self, rows: Tensor | None = None, *, matrices: bool = False) -> dict[str, Tensor]:
        if rows is not None or matrices:
            if rows is None:
                self._check_cost()
            eye = torch.eye(self._units, dtype=self.mean.dtype, device=self.mean.device)
            shaped = self._shaped_rows(eye[None] if rows is None else rows)
            found = self.tape.budget(self.at, shaped, matrices=matrices)
            return {name: self._of_chosen(part) for name, part in found.items()}
        # As many random rows go along as there are rows, or some more.
        return self._in_blocks(lambda block: self.tape.budget(self.at, block), share=2)

    def elements(self, source: str, rows: Tensor | None = None) -> Tensor:
        if rows is None:
            self._check_cost()
        eye = torch.eye(self._units, dtype=self.mean.dtype, device=self.mean.device)
        shaped = self._shaped_rows(eye[None] if rows is None else rows)
        found = self.tape.elements(self.at, shaped, source)
        if found is None:
            raise KeyError(f"no source {source!r} enters here")
        return self._of_chosen(found.movedim(self.tape.axes.get(source, 0) + 1, 0))

    def _in_blocks(
        self, parts_of: Callable[[Tensor], dict[str, Tensor]], share: int = 1
    ) -> dict[str, Tensor]:
        """(B, n) parts of the variances, computed for some units at a time."""
        found: dict[str, list[Tensor]] = {}
        with torch.set_grad_enabled(self._has_gradients):
            for rows in self._blocks(share):
                for name, part in parts_of(rows).items():
                    found.setdefault(name, []).append(part)
        return {name: self._of_chosen(torch.cat(parts, -1)) for name, parts in found.items()}

    def _of_chosen(self, value: Tensor) -> Tensor:
        return value if self.chosen is None else value[self.chosen]

    def _shaped_rows(self, rows: Tensor) -> Tensor:
        """(1 | B, r, n) of the chosen samples -> (r, B, *event) of all."""
        every = rows.expand(self.tape.batch, -1, -1) if self.chosen is None else self._spread(rows)
        return every.transpose(0, 1).reshape(rows.shape[1], *self.mean.shape)

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
        with torch.set_grad_enabled(self._has_gradients):
            return self._of_chosen(self.tape.quadratic(self.at, self._shaped_rows(rows)))

    def linear(self, weight: Tensor) -> Covariance:
        def pull(rows: Tensor) -> tuple[Tensor]:
            return ((rows @ weight).reshape(len(rows), *self.mean.shape),)

        return self._behind(pull, self.mean.new_empty(len(self.mean), len(weight)))

    def add_noise(self, var: float) -> Covariance:
        added = torch.as_tensor(var, dtype=self.mean.dtype)
        term = IndependentTerm("noise", Samples.along(self.mean), var=added)
        return self._behind(None, self.mean, term)

    def scale(self, factor: Tensor) -> Covariance:
        factor = self._shaped(factor)
        return self._behind(lambda rows: (rows * factor,), self.mean)

    def gate(self, gain: Tensor, variance: Tensor) -> Covariance:
        before = self.variance
        excess = self._shaped((variance - gain * before * gain).clamp(min=0))
        shaped = self._shaped(gain)
        response = Response((deviation_of(self._shaped(before)),))
        samples = Samples.along(self.mean)
        term = IndependentTerm("activation", samples, var=excess, response=response)
        return self._behind(lambda rows: (rows * shaped,), self.mean, term)

    def select(self, samples: Selection) -> Covariance:
        chosen = torch.arange(len(self.mean), device=self.mean.device)
        chosen = (chosen if self.chosen is None else self.chosen)[samples]
        selected = Swept(self.tape, self.at, self.mean, chosen)
        known = self._known("_matrix")
        if known is not None:
            selected.__dict__["_matrix"] = known[samples]
        return selected

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

    def _behind(self, pull: Pull | None, mean: Tensor, term: Term | None = None) -> Swept:
        """A value that is pulled back to this one, with what a source adds."""
        tape = self.tape.branch()
        return Swept(tape, tape.add((self.at,), pull, term), mean, self.chosen)

    def _blocks(self, share: int) -> Iterator[Tensor]:
        """Rows (r, B, *event) of the identity, as many at a time as a share of the memory takes."""
        n, step = self._units, max(1, _NUMBERS_AT_A_TIME // (share * max(1, self.tape.widest)))
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
