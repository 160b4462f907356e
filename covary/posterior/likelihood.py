"""Training data, and the likelihood of their targets given the outputs of a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from covary.convert import Converted
from covary.inputs import Inputs, arguments, batch_of, some
from covary.moments import Moments
from covary.progress import Steps

# Samples in one backward pass.
_AT_ONCE = 128
# Of more outputs than this, gradients are those of random labels: one backward pass for all.
_MOST_EXACT = 16


class Data:
    """Batches as inputs of the model and targets, at most so many samples at a time."""

    def __init__(self, data: Any, net: Converted, most: int | None = None) -> None:
        if _is_pair(data):
            data = [tuple(data)]
        if isinstance(data, Tensor | Dataset | str) or not hasattr(data, "__iter__"):
            raise TypeError(
                "Training data are a loader of (inputs, targets) or a pair of tensors; got "
                f"{type(data).__name__}. Wrap a Dataset: torch.utils.data.DataLoader(dataset, 256)."
            )
        if iter(data) is data:
            raise TypeError(
                "Training data are gone through several times, and a generator gives them once. "
                "Give a DataLoader, a list of batches or a pair of tensors."
            )
        self.data, self.net, self.most = data, net, most

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[tuple[Inputs, Tensor]]:
        dim, count = self.net.batch_dim, 0
        for batch in self.data:
            if not isinstance(batch, tuple | list) or not isinstance(batch[-1], Tensor):
                raise TypeError(
                    "Batches of training data are (inputs, targets) with a tensor of targets; got "
                    f"{type(batch).__name__}."
                )
            inputs = arguments(self.net.model, batch, has_labels=True)
            size = batch_of(inputs, dim)
            if len(batch) < 2 or len(batch[-1]) != size:
                raise ValueError(
                    f"A batch of {size} inputs has targets of shape {tuple(batch[-1].shape)}; it "
                    "needs one target for each input, in the first dimension."
                )
            for low in range(0, size, _AT_ONCE):
                if self.most is not None and count >= self.most:
                    return
                part = slice(low, low + _AT_ONCE)
                target = batch[-1][part].to(next(self.net.model.parameters()).device)
                count += len(target)
                yield some(inputs, part, dim), target


def _is_pair(data: Any) -> bool:
    """Whether data are inputs and targets themselves, not batches of them."""
    is_pair = isinstance(data, tuple | list) and len(data) == 2
    return is_pair and all(isinstance(each, Tensor) for each in data)


def inputs_of(data: Any) -> Any:
    """Inputs to track with: tensors as they are, loaders with their labels."""
    return data[0] if _is_pair(data) else data


@dataclass(frozen=True, eq=False)
class Task:
    """What outputs are for.

    Attributes:
        likelihood: classification or regression.
        axis: the dimension of the batch in what the model gives.
        probabilities: (B, K) of classes, from the moments of their logits.
        noise: (*event) in regression, the variance of targets around outputs.
    """

    likelihood: str
    axis: int
    probabilities: Callable[[Moments], Tensor]
    noise: Tensor | None = None

    def checked(self, out: Tensor, target: Tensor) -> Tensor:
        """Targets that belong to outputs (B, *event)."""
        if self.likelihood == "regression":
            return _real_targets(out, target)
        if out.dim() != 2 or target.dim() != 1 or target.is_floating_point():
            raise ValueError(
                "Classification needs logits (B, K) and labels (B,) of whole numbers; got outputs "
                f"{tuple(out.shape)} and targets {tuple(target.shape)} of {target.dtype}."
            )
        if (
            target.dtype == torch.bool
            or not 0 <= int(target.min()) <= int(target.max()) < out.shape[1]
        ):
            raise ValueError(
                f"Labels are 0 to {out.shape[1] - 1} for {out.shape[1]} outputs, got "
                f"{target.min().item()} to {target.max().item()} of {target.dtype}."
            )
        return target.long()

    def log_likelihood(self, out: Tensor, target: Tensor) -> float:
        """The sum over samples of the logarithm of the likelihood of targets."""
        if self.noise is None:
            return -float(F.cross_entropy(out.double(), target, reduction="sum"))
        noise = self.noise.to(out.device)
        parts = (target - out).double().square() / noise + (2 * math.pi * noise).log()
        return -0.5 * float(parts.sum())

    def columns(self, out: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        """(B, *event) columns s of the likelihood's curvature, the sum of s s^T (eq. 45).

        For many outputs one random column, of which that is the expectation.
        """
        out = out.detach()
        count = out[0].numel()
        if self.noise is None:
            p = out.softmax(-1)
            if count > _MOST_EXACT:
                label = torch.multinomial(p, 1, generator=generator)
                yield torch.zeros_like(p).scatter_(1, label, 1.0) - p
                return
            for k, one in enumerate(torch.eye(count).to(p)):
                yield p[:, k, None].sqrt() * (one - p)
            return
        scale = self.noise.rsqrt().to(out)
        if count > _MOST_EXACT:
            signs = torch.randint(0, 2, out.shape, generator=generator, device=out.device)
            yield (2 * signs - 1).to(out) * scale
            return
        for one in torch.eye(count).to(out):
            yield (one.reshape(out.shape[1:]) * scale).expand_as(out)


def _real_targets(out: Tensor, target: Tensor) -> Tensor:
    if not target.is_floating_point() or target.numel() != out.numel():
        raise ValueError(
            "Regression needs a real target for each output; got outputs "
            f"{tuple(out.shape)} and targets {tuple(target.shape)} of {target.dtype}."
        )
    return target.reshape(out.shape).to(out)


@torch.no_grad()
def _outputs(
    net: Converted, data: Any, task: Task, steps: Steps, what: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """(B, *event) what the model gives, and targets."""
    every: Any = Data(data, net)
    for (args, named), target in steps(every, what):
        out: Tensor = net.plan.model(*args, **named)
        yield out.movedim(task.axis, 0), target


def noise_of(
    net: Converted, task: Task, given: float | Tensor | None, data: Any, steps: Steps
) -> Tensor:
    """In regression, the variance of targets around each output, in float64."""
    squares, count, shape = torch.zeros(()).double(), 0, torch.Size()
    for out, target in _outputs(net, data, task, steps, "residuals"):
        error = (_real_targets(out, target) - out).double()
        squares, count, shape = (
            squares + error.square().sum(0).cpu(),
            count + len(out),
            out.shape[1:],
        )
        if given is not None:
            break
    found = squares / max(1, count)
    if given is not None:
        found = torch.as_tensor(given, dtype=torch.float64).expand(shape).clone()
    if not bool(((found > 0) & found.isfinite()).all()):
        raise ValueError(
            "The variance of targets around outputs has to be finite and > 0 for each output, and "
            f"is {found.min().item():.3g} to {found.max().item():.3g}. If the network fits its "
            "data without error, give noise_variance= or held_out=."
        )
    return found


def log_likelihood_of(net: Converted, data: Any, task: Task, steps: Steps) -> tuple[float, int]:
    """The sum over training data, and how many there are."""
    total, count = 0.0, 0
    for out, target in _outputs(net, data, task, steps, "likelihood"):
        total += task.log_likelihood(out, task.checked(out, target))
        count += len(out)
    if not math.isfinite(total):
        raise ValueError(
            "The likelihood of the training data is not finite: outputs or targets have NaN or "
            "infinite values. Clean the data, or train the network again."
        )
    return total, count
