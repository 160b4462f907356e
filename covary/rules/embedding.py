"""Whole numbers become real ones: noise enters behind an embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from covary.rules.registry import Rule, register
from covary.varying import Varying, plain


def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of a table: a constant input, which noise enters as it enters other inputs."""
    if isinstance(weight, Varying):
        raise weight.run.refusal("Its table varies.")
    run = x.run
    found: Tensor = run.function(plain(x), weight, *args, **kwargs)
    samples = x.samples
    if samples is not None and found.dim() > x.dim():
        samples = samples.moved(lambda index: index[..., None], x.shape)
    return run.lift(found, run.named(), samples)


register(("embedding", "embedding_bag"), Rule(embedding, is_composed=True, lifts=True))
