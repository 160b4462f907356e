"""Curvature of the likelihood along the weights of each layer, from gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from covary.convert import Converted
from covary.inputs import Inputs
from covary.passes import MomentPass, WeightUse
from covary.posterior.likelihood import Data, Task
from covary.progress import Steps
from covary.rules import MATCHED
from covary.sources import Positions, UncertainWeights
from covary.varying import Varying, plain, varying_in

# Numbers of the largest tensor while gradients are made: 64 MB in single precision.
_NUMBERS_AT_A_TIME = 2**24


class _Met(NamedTuple):
    """What a pass met at a layer."""

    use: WeightUse
    inputs: Tensor  # (B, T, n) what goes in, in the basis of its weights
    probe: Tensor  # of the shape of what comes out, where gradients arrive
    positions: Positions


class GradientPass(MomentPass):
    """A pass of plain means, which remembers what goes into layers and where gradients arrive."""

    def __init__(self, net: Converted, weights: Mapping[str, UncertainWeights]) -> None:
        super().__init__(net.plan, None, start=net.start, batch_dim=net.batch_dim)
        self.is_still = True
        parameters = dict(net.plan.model.named_parameters())
        self._weights = {id(parameters[path]): (path, each) for path, each in weights.items()}
        self.met: dict[str, _Met] = {}
        self.met_again: set[str] = set()

    def meet_again(self, path: str) -> None:
        """Remember weights that are used twice, and so cannot vary."""
        self.met_again.add(path)

    def with_weights(self, x: Varying, found: Varying, use: WeightUse) -> Varying:
        """The same value, with a place where its gradient arrives."""
        if use.options.get("groups", 1) != 1:
            return found
        positions = use.positions(x)
        probe = torch.zeros_like(found.numbers).requires_grad_()
        with torch.no_grad():
            inputs = positions.inputs(x.numbers, use.weights)
        self.met[use.name.removesuffix(":weights")] = _Met(use, inputs, probe, positions)
        return self.write(MATCHED, found.numbers + probe, [found], None, found.samples)


def run_of(
    net: Converted, inputs: Inputs, weights: Mapping[str, UncertainWeights]
) -> tuple[Tensor, GradientPass, int]:
    """(B, *event) what the model gives, the pass, and which dimension was the batch."""
    run = GradientPass(net, weights)
    with torch.enable_grad():
        outputs = net.run(run, inputs)
        values = varying_in([outputs])
        if not isinstance(outputs, Varying) or len(values) != 1:
            raise ValueError(
                f"A posterior needs a model that gives one tensor, this gives "
                f"{type(outputs).__name__}. Wrap it in a module that gives the logits or targets."
            )
        axis = net.output_axis(outputs)
        out = plain(outputs).movedim(axis, 0)
    run.tape = None
    return out, run, axis


def _gradients(
    net: Converted,
    data: Any,
    task: Task,
    weights: Mapping[str, UncertainWeights],
    steps: Steps,
    what: str,
    seed: int,
) -> Iterator[tuple[dict[str, Tensor], list[dict[str, Tensor]]]]:
    """Of each batch, inputs (B, T, n) of each layer, and by column its gradients (B, T, m).

    Both are in the bases of the weights. Random labels are by the seed: bases that were found by
    some would make too much of the same ones.
    """
    every: Any = Data(data, net)
    generator = torch.Generator(next(net.model.parameters()).device).manual_seed(seed)
    for inputs, _ in steps(every, what):
        out, run, _ = run_of(net, inputs, weights)
        probes = [met.probe for met in run.met.values()]
        columns = []
        for column in task.columns(out, generator):
            found = torch.autograd.grad(out, probes, column, retain_graph=True)
            columns.append(
                {
                    path: _turned(met.positions.arrange(grad[None])[0], weights[path].left)
                    for (path, met), grad in zip(run.met.items(), found, strict=True)
                }
            )
        yield {path: met.inputs for path, met in run.met.items()}, columns


def _turned(values: Tensor, basis: Tensor | None) -> Tensor:
    return values if basis is None else values @ basis


def bases(
    net: Converted,
    data: Any,
    task: Task,
    weights: Mapping[str, UncertainWeights],
    count: int,
    steps: Steps,
) -> dict[str, UncertainWeights]:
    """The same weights in the bases of their Kronecker factors (eq. 46)."""
    inner = {path: torch.zeros((), dtype=torch.float64) for path in weights}
    outer = dict(inner)
    for inputs, columns in _gradients(net, data, task, weights, steps, "factors", 0):
        for path, value in inputs.items():
            inner[path] = inner[path].to(value.device) + _second_moment(value)
            for column in columns:
                outer[path] = outer[path].to(value.device) + _second_moment(column[path])
    found = {}
    for path, each in weights.items():
        left, right = (
            torch.linalg.eigh(factor / count).eigenvectors.to(each.variance.dtype)
            for factor in (outer[path], inner[path])
        )
        found[path] = replace(each, left=left, right=right)
    return found


def _second_moment(values: Tensor) -> Tensor:
    """(n, n) the sum of v v^T over all but the last dimension, in float64."""
    flat = values.reshape(-1, values.shape[-1])
    return (flat.mT @ flat).double()


def curvatures_of(
    net: Converted,
    data: Any,
    task: Task,
    weights: Mapping[str, UncertainWeights],
    steps: Steps,
) -> dict[str, Tensor]:
    """(m, n) of each layer, the sum of squared gradients along each axis of its basis (eq. 47)."""
    found = {
        path: torch.zeros_like(each.variance, dtype=torch.float64) for path, each in weights.items()
    }
    for inputs, columns in _gradients(net, data, task, weights, steps, "curvature", 1):
        for path, value in inputs.items():
            for column in columns:
                found[path] += _squared_gradients(column[path], value).double()
    return found


def _squared_gradients(gradients: Tensor, inputs: Tensor) -> Tensor:
    """(m, n) sums over samples of (sum over positions of g a^T)^2."""
    if inputs.shape[1] == 1:
        return gradients[:, 0].square().mT @ inputs[:, 0].square()
    step = max(1, _NUMBERS_AT_A_TIME // (gradients.shape[-1] * inputs.shape[-1]))
    pairs = zip(torch.split(gradients, step), torch.split(inputs, step), strict=True)
    return torch.stack([(g.mT @ a).square().sum(0) for g, a in pairs]).sum(0)
