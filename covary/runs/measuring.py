"""Every number of every sample: what a network makes of inputs, and how unsure it is of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from covary.models import noise_of, with_noise
from covary.moments import Moments
from covary.nn import Activation, Linear
from covary.recording import record
from covary.runs.held_out import HeldOut
from covary.runs.predictions import Predictions
from covary.uncertainty import scores
from covary.uncertainty.features import FEATURES

Progress = Callable[[Sequence[Any], str], Iterator[Any]]
_BATCH = 128
# The entropy of a wide hidden layer takes its eigenvalues: for so many samples, not for all.
LAYER_SAMPLES = 500
# Inputs that the report shows, of each of four kinds.
_GALLERY = 12


def layer_names(net: nn.Module) -> list[str]:
    """The layers that entropies are taken of: every activation, and the output."""
    activations = [name for name, layer in net.named_modules() if isinstance(layer, Activation)]
    linears = [name for name, layer in net.named_modules() if isinstance(layer, Linear)]
    return [*activations, linears[-1]]


def numbered(progress: Progress | None, i: int, count: int) -> Progress | None:
    """The same for one of several inputs or parts, whose names say which."""
    if progress is None:
        return None
    return lambda items, name: progress(items, f"{i + 1}/{count}, {name}")


@torch.no_grad()
def measure(
    net: nn.Module,
    x: Tensor,
    y: Tensor | None,
    name: str,
    *,
    held_out: HeldOut,
    classify: bool,
    seed: int,
    progress: Progress | None,
) -> Predictions:
    """Moments, scores and calibrated predictions of every sample, layers' entropies of some."""
    device = next(net.parameters()).device
    batches = torch.split(torch.arange(len(x)), _BATCH)
    fields, found = _Collected(), _Collected()
    for rows in progress(batches, name) if progress else batches:
        _measured(net, x[rows].to(device), held_out, fields, found, classify=classify)
    arrays = fields.joined()
    mean, entropy = arrays["mean"], arrays["entropy"]
    wrong = np.zeros(len(x), dtype=bool)
    label = target = None
    if y is not None and y.is_floating_point():
        target = y.numpy()
    elif y is not None:
        label = y.numpy()
        wrong = mean.argmax(1) != label
    rows = some_of_each(wrong, LAYER_SAMPLES, seed)
    layer_entropy = np.full((len(x), len(layer_names(net))), np.nan, dtype=np.float32)
    chunks = np.array_split(rows, max(1, len(rows) // _BATCH))
    for some in progress(chunks, f"{name}, by layer") if progress else chunks:
        with record(net) as layers:
            net(x[some].to(device))
        chosen = {layer: layers[layer] for layer in layer_names(net)}
        entropies = scores.layer_entropies(chosen).values()
        layer_entropy[some] = np.stack([each.cpu().numpy() for each in entropies], 1)
    gallery = _gallery(entropy, wrong)
    return Predictions(
        **arrays,
        name=name,
        layer_entropy=layer_entropy,
        label=label,
        target=target,
        input=x[gallery].numpy(),
        input_index=gallery,
        scores=found.joined(),
    )


class _Collected(dict[str, list[np.ndarray]]):
    """Arrays of one batch after the other, by name."""

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.setdefault(name, []).append(value.cpu().numpy())

    def joined(self) -> dict[str, Any]:
        return {name: np.concatenate(values) for name, values in self.items()}


def _measured(
    net: nn.Module,
    x: Tensor,
    held_out: HeldOut,
    fields: _Collected,
    found: _Collected,
    *,
    classify: bool,
) -> None:
    """Add fields of ``Predictions``, and scores, of one batch."""
    kind = FEATURES["moments"]
    with kind.watch(net) as seen:
        out: Moments = net(x)
    fields.add(mean=out.mean, variance=out.variance, entropy=out.entropy())
    if not classify:
        fields.add(covariance=out.covariance_matrix)
    known = scores.SCORES if classify else scores.COVARIANCE_SCORES
    found.add(**{name: score(out) for name, score in known.items()})
    for name, fitted in held_out.scores.items():
        moments = fitted.features == "moments"
        own = fitted.of(kind.of(seen, out).cpu(), out.mean.cpu()) if moments else fitted(net, x)
        found.add(**{name: own})
    if held_out.calibration is None:
        return
    quiet = held_out.noise
    if quiet is not None and list(quiet) != noise_of(net):
        out = with_noise(net, quiet)(x)
    calibrated = held_out.calibration.to(x.device)(out)
    if classify:
        fields.add(calibrated_probabilities=scores.expected_softmax(calibrated).float())
    else:
        fields.add(
            calibrated_mean=calibrated.mean,
            calibrated_variance=calibrated.variance,
            calibrated_covariance=calibrated.covariance_matrix,
        )


def some_of_each(wrong: np.ndarray, count: int, seed: int) -> np.ndarray:
    """(k,) rows to look at closely: half of them wrong predictions if there are so many."""
    order = np.random.default_rng(seed).permutation(len(wrong))
    few = order[wrong[order]][: count // 2]
    rest = order[~wrong[order]][: count - len(few)]
    return np.sort(np.concatenate([few, rest]))


def _gallery(entropy: np.ndarray, wrong: np.ndarray) -> np.ndarray:
    """Rows of the least and most certain samples, of the surest wrong and least sure right ones."""
    order = np.argsort(entropy, kind="stable")
    right_order, wrong_order = order[~wrong[order]], order[wrong[order]]
    chosen = [
        order[:_GALLERY],
        order[-_GALLERY:],
        wrong_order[:_GALLERY],
        right_order[-_GALLERY:],
    ]
    return np.unique(np.concatenate(chosen))
