"""What first weights make of the noise of inputs, W diag(var) W^T, kept from batch to batch.

Kept for each weight for as long as it lives, outside of modules and values: so nothing of it is
ever copied or saved. It spares every batch but the first the product W W^T.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from covary import linalg


class Gram:
    """The lower half of W diag(var) W^T, computed when asked for, and again after a change."""

    def __init__(self) -> None:
        # Version of the weight; sums that show its other changes, and var; the half. One tuple,
        # so that threads see all of it or nothing.
        self._kept: tuple[Any, Tensor, Tensor] | None = None

    def is_known(self, weight: Tensor) -> bool:
        """Whether there is something of this weight, as far as its version tells."""
        return self._kept is not None and self._kept[0] == _state(weight)

    def half(self, weight: Tensor, var: Tensor) -> Tensor:
        """(m, m) of a weight (m, n) and variances (1, n), as ``linalg.lower_half``."""
        kept, state = self._kept, _state(weight)
        # Changes through .data are not counted, but they show in sums of the weights: other ones
        # for each input, where norms would miss a change of sign or of order.
        tally = torch.linspace(1, 2, weight.shape[1], dtype=weight.dtype)
        values = torch.cat([weight @ tally, var[0]])
        if kept is None or kept[0] != state or not torch.equal(kept[1], values):
            half = linalg.lower_half_of_gram(weight * var, weight)
            self._kept = kept = state, values, half
        return kept[2]


_grams = WeakTensorKeyDictionary()
_lock = threading.Lock()


def gram_of(weight: Tensor) -> Gram | None:
    """What is kept for this weight; None where nothing can be.

    That is where nobody counts changes, and on other devices, where comparing would wait for them.
    """
    if version_of(weight) is None or weight.device.type != "cpu":
        return None
    if is_functorch_wrapped_tensor(weight):
        return None
    with _lock:
        gram: Gram | None = _grams.get(weight)
        if gram is None:
            gram = _grams[weight] = Gram()
    return gram


def version_of(weight: Tensor | None) -> int | None:
    """How often the content was changed; None where nobody counts (compiled, inference mode)."""
    # Within a pytree that is taken apart, anything may stand in the place of a tensor.
    if torch.compiler.is_compiling() or not isinstance(weight, Tensor) or weight.is_inference():
        return None
    return weight._version


def _state(weight: Tensor) -> tuple[Any, ...]:
    return version_of(weight), weight.data_ptr(), weight.dtype
