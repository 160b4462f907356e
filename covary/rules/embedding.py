"""Embeddings: whole numbers cannot vary, so noise enters behind them."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from covary.rules.registry import Rule, register
from covary.varying import Varying, plain


def embedding(x: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of a table: a constant input, which noise enters as it enters other inputs."""
    if isinstance(weight, Varying):
        raise weight.run.refusal("Its table varies.")
    run = x.run
    found: Tensor = run.function(plain(x), weight, *args, **kwargs)
    if x.node == -2:  # chosen by the means, not an input
        return run.constant(found, [x])
    samples = x.samples
    if samples is not None and found.dim() > x.dim():
        samples = samples.moved(lambda index: index[..., None], x.shape)
    return run.lift(found, run.named(), samples)


# Those of torch itself have another order of arguments.
register((F.embedding, F.embedding_bag), Rule(embedding, is_composed=True, lifts=True))
