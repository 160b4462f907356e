"""A tracked covariance: estimated variances, and the recipe that gives the rest by a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from covary import linalg
from covary.covariance.base import Covariance, Selection, register_value
from covary.covariance.exact import Full
from covary.covariance.sweep import CHANGED_WEIGHTS
from covary.settings import without_autocast
from covary.tracing import is_exported, is_traced

# A layer of more units has its variances swept in blocks, without the covariances in between.
_FEW_UNITS = 64


class Probe(NamedTuple):
    """How corrections are measured during a forward pass."""

    samples: int  # of the batch, the first so many
    units: int  # of each layer, at most
    momentum: float  # weight of the new measurement in the running average


class Gram:
    """W diag(var) W^T: what a first weight (m, n) makes of the noise of inputs, of variance (1, n).

    It is kept for as long as the weight lives and stays the same, so that only the first batch pays
    for it; outside of modules and values, so that nothing of it is ever copied or saved.

    Attributes:
        diagonal: (1, m).
        half: (m, m) as ``linalg.lower_half``, once it was formed.
    """

    def __init__(self, weight: Tensor, var: Tensor) -> None:
        self.half: Tensor | None = None
        self._state = _state(weight)
        # Not as tensors of inference mode: what is kept may meet gradients later.
        with torch.inference_mode(False), torch.no_grad():
            self._weight, self._var = weight.detach(), var.clone()
            self.diagonal = F.linear(self._var, self._weight.square())

    def form(self) -> Tensor:
        """The lower half, formed if it is not there yet."""
        if self.half is None:
            with torch.inference_mode(False), torch.no_grad():
                half = linalg.lower_half_of_gram(self._weight * self._var, self._weight)
                # Changes through .data are not counted, but they show in sums of the weights: other
                # ones for each input, where norms would miss a change of sign or of order.
                self._tally = torch.linspace(1, 2, self._weight.shape[1]).to(self._weight)
                self._sums = self._weight @ self._tally
                self.diagonal = F.linear(self._var, self._weight.square())  # of the same weights
            self.half = half
        return self.half

    def is_of(self, weight: Tensor, var: Tensor) -> bool:
        """Whether it was formed, and weight and variances are still the same."""
        return (
            self.half is not None
            and self._state == _state(weight)
            and torch.equal(self._sums, weight @ self._tally)
            and torch.equal(self._var, var)
        )


_grams = WeakTensorKeyDictionary()


def gram_of(weight: Tensor, var: Tensor) -> Gram:
    """The ``Gram`` that is kept, or a new one if weight or variances have changed since."""
    # To compare would wait for a device; in inference tensors, torch counts no changes.
    can_be_kept = weight.device.type == "cpu" and version_of(weight) is not None
    gram: Gram | None = _grams[weight] if can_be_kept and weight in _grams else None
    if gram is None or not gram.is_of(weight, var):
        gram = Gram(weight, var)
        if can_be_kept:
            _grams[weight] = gram
    return gram


def version_of(weight: Tensor | None) -> int | None:
    """How often the content was changed; None where torch does not count (compiled, inference)."""
    # Within a pytree that is taken apart, anything may stand in the place of a tensor.
    if is_traced() or not isinstance(weight, Tensor) or weight.is_inference():
        return None
    return weight._version


def _state(weight: Tensor) -> tuple[Any, ...]:
    return version_of(weight), weight.data_ptr(), weight.dtype


def _check_weight(cov: Tracked) -> None:
    """Refuse a weight that was changed since the forward pass, as an optimizer does."""
    if cov.version is not None and version_of(cov.weight) != cov.version:
        raise RuntimeError(CHANGED_WEIGHTS)


@partial(
    register_value, constants=["exact_width"], derived=["version", "gram"], check=_check_weight
)
@dataclass(frozen=True, eq=False, repr=False)
class Tracked(Covariance):
    """``gain_i gain_j (W C W^T)_ij`` plus ``excess`` on the diagonal, for a C that is a recipe too.

    Activations take each unit's variance as an ``estimate``: what the squares of the weights make
    of the estimates before them, times a measured correction (docs/theory.md, eq. 28). No matrix
    is formed on the way. Whoever asks for the covariance gets it by one sweep back through the
    recipe: as many backward passes as there are units here, instead of a forward pass for every
    hidden unit. With exact estimates the result is exact (eq. 27).

    Attributes:
        before: what the weight is applied to, Tracked; without a weight, the exact covariance
            at which the recipe starts, Full.
        weight: W (m, n), or None for 1.
        gain: (1 | B, m), or None for 1.
        excess: (1 | B, 1 | m), or None for 0.
        estimate: (1 | B, m) the variance of each unit.
        exact_width: layers of up to so many units form their covariance at once, so that their
            variances are exact, given those before.
        version: of the weight's content; an optimizer may have changed it before the sweep.
        gram: W C W^T of a first weight, where all samples have it in common.
    """

    before: Covariance
    weight: Tensor | None
    gain: Tensor | None
    excess: Tensor | None
    estimate: Tensor
    exact_width: int = 0
    version: int | None = None
    gram: Gram | None = None

    def __post_init__(self) -> None:
        if self.version is None:
            object.__setattr__(self, "version", version_of(self.weight))

    def __getstate__(self) -> dict[str, Any]:
        _check_weight(self)
        return {**self.__dict__, "gram": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy has a weight of its own, whose changes are counted anew.
        self.__dict__.update(state | {"version": version_of(state["weight"])})

    @classmethod
    def of(cls, inputs: Covariance, exact_width: int = 0) -> Tracked:
        return cls(inputs, None, None, None, inputs.variance, exact_width)

    @property
    def variance(self) -> Tensor:
        units = self.estimate.shape[-1]
        if self.is_diagonal:
            return self.estimate.clone()
        if units <= _FEW_UNITS or "_known" in self.__dict__:
            return self.dense().diagonal(dim1=-2, dim2=-1)
        blocks = torch.split(torch.arange(units), _FEW_UNITS)
        return torch.cat([self.variance_of(block) for block in blocks], -1)

    @property
    def unit_variance(self) -> Tensor:
        return self.estimate

    def dense(self) -> Tensor:
        # Variance, entropy and covariance are often wanted together, and one sweep gives them all.
        known: Tensor | None = self.__dict__.get("_known")
        wants_grad = torch.is_grad_enabled() and linalg.may_have_gradients(self.estimate)
        if known is None or (wants_grad and not linalg.may_have_gradients(known)):
            with self._looking():
                known = self._formed(slice(None)).dense()
            if not is_traced():
                self.__dict__["_known"] = known
        # A copy, small beside the sweep: whoever changes it in place must not change this value.
        return known.clone() if wants_grad else known.detach().clone()

    def linear(self, weight: Tensor) -> Tracked:
        if len(weight) <= self.exact_width:
            return Tracked.of(Full(self.quadratic(weight[None])), self.exact_width)
        gram = None
        if self.is_diagonal and linalg.is_plain(weight, self.estimate) and len(self.estimate) == 1:
            gram = gram_of(weight, self.estimate)
        if not torch.is_grad_enabled():
            weight = weight.detach()  # the sweep comes later, when gradients may be on again
        estimate = F.linear(self.estimate, weight.square()) if gram is None else gram.diagonal
        return Tracked(self, weight, None, None, estimate, self.exact_width, gram=gram)

    def add_noise(self, var: float) -> Tracked:
        before = self.estimate.new_zeros(1, 1) if self.excess is None else self.excess
        return self._with(excess=before + var, estimate=self.estimate + var)

    def gate(self, gain: Tensor, variance: Tensor) -> Tracked:
        # Never negative but for round-off: eq. (7).
        excess = torch.addcmul(variance, gain * self.estimate, gain, value=-1).clamp(min=0)
        if self.excess is not None:
            excess = torch.addcmul(excess, gain * self.excess, gain)
        gain = gain if self.gain is None else self.gain * gain
        return self._with(gain=gain, excess=excess, estimate=variance.expand_as(excess))

    def scale(self, factor: Tensor) -> Tracked:
        gain = factor if self.gain is None else self.gain * factor
        excess = None if self.excess is None else factor * self.excess * factor
        return self._with(gain=gain, excess=excess, estimate=self.estimate * factor.square())

    def select(self, samples: Selection) -> Tracked:
        selected = self._with(
            before=self.before.select(samples),
            gain=linalg.select(self.gain, samples),
            excess=linalg.select(self.excess, samples),
            estimate=linalg.select(self.estimate, samples),
        )
        if "_known" in self.__dict__:
            selected.__dict__["_known"] = linalg.select(self.__dict__["_known"], samples, dim=-3)
        return selected

    @property
    def is_exact(self) -> bool:
        """Whether the estimates are exact: formed, or of weights on units that share no noise."""
        return self.weight is None or self.before.is_diagonal

    @property
    def is_diagonal(self) -> bool:
        return self.weight is None and self.before.is_diagonal

    def corrected(self, factor: Tensor) -> Tracked:
        """The same with estimates times a factor (1 | B, m), unless they are exact."""
        return self if self.is_exact else self._with(estimate=self.estimate * factor)

    def variance_of(self, units: Tensor) -> Tensor:
        """(1 | B, u) variances of some units (u,), by a sweep of u rows."""
        with self._looking():
            return self._formed(units).variance

    def quadratic(self, rows: Tensor) -> Tensor:
        """R C R^T: the sweep, some samples at a time. docs/theory.md, eq. (27)."""
        nodes = self._chain()
        with self._looking(rows):
            if rows.dim() > 3:  # what vmap stacked
                return _swept(nodes, rows, slice(None), None)
            batch = linalg.batch_of(self.estimate, rows)
            half = _half_in_common(nodes[-2], rows, batch) if len(nodes) > 1 else None
            # Inputs do not count: they are met by what is formed in common, if at all.
            widest = max(node.estimate.shape[-1] for node in nodes[:-1] or nodes)
            return linalg.in_chunks(
                lambda samples: _swept(nodes, rows, samples, half),
                batch,
                rows.shape[-2] * widest,
                rows.device,
            )

    def _formed(self, units: Tensor | slice) -> Full:
        """The exact covariance of some units (u,), by a sweep of u rows."""
        if self.weight is None:
            swept = self.before.dense()[..., units, :][..., units]
        else:
            _check_weight(self)
            swept = self.before.quadratic(self.weight[..., units, :].unsqueeze(-3))
        gain, excess = self.gain, self.excess
        if isinstance(units, Tensor):
            gain = None if gain is None else gain.expand_as(self.estimate)[..., units]
            excess = None if excess is None else excess.expand_as(self.estimate)[..., units]
        return Full(swept, excess, gain)

    def _chain(self) -> list[Tracked]:
        """The nodes from here back; the last has no weight, and is where the recipe starts."""
        nodes = [self]
        while isinstance(before := nodes[-1].before, Tracked):
            _check_weight(nodes[-1])
            nodes.append(before)
        return nodes

    @contextmanager
    def _looking(self, *rows: Tensor) -> Iterator[None]:
        """Sweep in full precision, and with gradients if there are any to follow."""
        has_grad = any(map(linalg.may_have_gradients, (self.estimate, *rows)))
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and has_grad),
            without_autocast(self.estimate.device),
        ):
            yield

    def _with(self, **changes: Any) -> Tracked:
        """``dataclasses.replace``, at a fraction of its cost; without what was swept."""
        changed = object.__new__(Tracked)
        changed.__dict__.update(self.__dict__)
        changed.__dict__.pop("_known", None)
        changed.__dict__.update(changes)
        return changed


def _half_in_common(first: Tracked, rows: Tensor, batch: int) -> Tensor | None:
    """What samples have in common of W C W^T for the first weight, if it is known or pays.

    It is (m, m), and half of it is multiplied by every row, instead of the (m, n) weight.
    """
    before = first.before
    is_common = before.is_diagonal and before.shape[-2] == 1
    if is_common and is_exported():  # of weights that stay, it is computed once
        assert first.weight is not None
        var = before.unit_variance
        return linalg.lower_half((first.weight * var) @ first.weight.mT)
    if not is_common or not linalg.is_plain(rows, first.estimate):
        return None
    if batch * rows.shape[-2] > first.shape[-1] and first.shape[-1] < 2 * before.shape[-1]:
        assert first.weight is not None
        return (first.gram or Gram(first.weight, before.unit_variance)).form()
    return None if first.gram is None else first.gram.half


def _swept(nodes: list[Tracked], rows: Tensor, samples: slice, half: Tensor | None) -> Tensor:
    """R C R^T of some samples: rows pulled back from node to node, which meet noise on the way."""
    rows = linalg.select(rows, samples, dim=-3)
    total: Tensor | float = 0.0
    for node in nodes:
        gain, excess = linalg.select(node.gain, samples), linalg.select(node.excess, samples)
        if half is not None and node is nodes[-2]:
            return total + linalg.gated_quadratic(rows, None, gain, excess, half)
        if excess is not None:
            total = total + linalg.row_products(rows * excess[..., None, :], rows)
        if gain is not None:
            rows = rows * gain[..., None, :]
        if node.weight is not None:
            rows = linalg.times_matrices(rows, node.weight.unsqueeze(-3))
    return total + nodes[-1].before.select(samples).quadratic(rows)
