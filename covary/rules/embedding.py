"""Whole numbers become real ones: noise enters behind an embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from covary.rules.registry import composed
from covary.varying import Varying, plain


@composed("embedding", "embedding_bag")
def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of a table: a constant input, which noise enters as it enters other inputs."""
    value = x if isinstance(x, Varying) else weight
    if isinstance(weight, Varying):
        raise value.run.refusal("Its table varies.")
    run = value.run
    found: Tensor = run.function(plain(x), weight, *args, **kwargs)
    return run.lift(found, run.named())
