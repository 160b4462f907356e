"""Spiking networks out to, and in from, the Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from covary import activations
from covary.activations.neuron import LIF
from covary.data.dataset import needed
from covary.files import write_atomically
from covary.nn import Activation, Flatten, Lift, Linear, Noise
from covary.stochastic.chain import Chain, Stage
from covary.stochastic.spiking import layers_of_neurons, neuron_of

if TYPE_CHECKING:
    import nir

# NIR fixes no unit of time; those who use it take seconds.
SECOND = 1000.0
# Constants of the neurons of a layer agree if they do so to this.
_RTOL = 1e-5
# What NIR has no place for stands in the metadata of nodes under these names.
_T_REF, _NOISE, _POISSON, _DT, _UNIT = (
    f"covary_{name}" for name in ("t_ref_ms", "noise", "poisson", "spike_width", "ms_per_unit")
)


def to_nir(
    net: nn.Module | Chain, *, spike_width: float | None = None, ms_per_unit: float = SECOND
) -> nir.NIRGraph:
    """The spiking network behind a moment neural network as a graph of NIR.

    Input, Affine, LIF, ..., Affine, Output; batch norm is folded into the weights. A LIF node obeys
    tau dv/dt = v_leak - v + r I, with tau = 1 / leak in seconds, r = tau and v_leak = 0, so that I
    is a current in mV per second and a weight is the jump that a spike causes, in mV, if spikes are
    Dirac pulses (of integral 1, as in the continuous time of NIR). Inputs are what ``net`` takes:
    currents, or spikes if ``Lift`` has ``poisson``; the average over time of the output is its
    mean.

    NIR knows no refractory period and no noise. They are kept in the metadata of nodes, for
    ``from_nir``; whoever else reads the graph has deterministic neurons that fire faster: intervals
    are shorter by ``t_ref``.

    Args:
        net: a moment neural network whose activations are all ``lif``, or its ``Chain``.
        spike_width: for simulators in which a spike is 1 for a step and not 1 / step (snnTorch,
            Norse): their step, in the graph's unit of time. Weights are larger by its inverse.
        ms_per_unit: the graph's unit of time; 1000 for seconds.

    Examples:
        >>> import covary
        >>> graph = to_nir(covary.mlp([4, 8, 3], activation="lif"))
        >>> list(graph.nodes)
        ['input', 'linear1', 'activation1', 'linear2', 'output']
    """
    nir = _library()
    unit, width = _checked_unit(ms_per_unit), _checked_width(spike_width)
    chain = net if isinstance(net, Chain) else Chain.of(net)
    hidden, last = layers_of_neurons(chain)
    if any(not isinstance(layer, Flatten | nn.Flatten) for layer in chain.trunk):
        raise ValueError(
            "NIR takes the layers behind covary.nn.Lift; this network has "
            f"{', '.join(type(layer).__name__ for layer in chain.trunk)} in front of it. Export "
            "the rest: nn.Sequential(*layers from Lift on)."
        )
    about: dict[str, Any] = {_NOISE: chain.noise, _POISSON: int(chain.poisson), _UNIT: unit}
    if width is not None:
        about[_DT] = width
    inputs = np.array([hidden[0].weight.shape[1]])
    nodes: dict[str, Any] = {"input": nir.Input(inputs, metadata=about)}
    pulse = 1.0 if width is None else 1 / width
    for number, stage in enumerate(hidden, start=1):
        is_current = number == 1 and not chain.poisson
        scale = unit if is_current else pulse
        nodes[f"linear{number}"] = nir.Affine(
            _array(stage.weight * scale), _array(stage.bias * unit)
        )
        nodes[f"activation{number}"] = _lif_node(nir, stage, unit)
    if last is not None:
        nodes[f"linear{len(hidden) + 1}"] = nir.Affine(
            _array(last.weight * (pulse / unit)), _array(last.bias)
        )
    nodes["output"] = nir.Output(np.array([len(chain.stages[-1].weight)]))
    names = list(nodes)
    return nir.NIRGraph(nodes, list(pairwise(names)))


def save_nir(
    net: nn.Module | Chain,
    path: Path | str,
    *,
    spike_width: float | None = None,
    ms_per_unit: float = SECOND,
) -> None:
    """Write ``to_nir`` of a network to a file, whole or not at all."""
    nir = _library()
    graph = to_nir(net, spike_width=spike_width, ms_per_unit=ms_per_unit)
    content = io.BytesIO()
    nir.write(content, graph)
    write_atomically(Path(path), content.getvalue())


def from_nir(
    source: nir.NIRGraph | Path | str,
    *,
    noise: float | Sequence[float] | None = None,
    t_ref: float = 0.0,
    poisson: bool | None = None,
    spike_width: float | None = None,
    ms_per_unit: float | None = None,
    covariance: str = "full",
) -> nn.Sequential:
    """A moment neural network of a spiking network in NIR, which gives its covariance by formula.

    A graph must be a chain of Affine or Linear and LIF nodes; ``to_nir`` says what they mean. What
    NIR does not know (noise, refractory periods, the unit of time) is taken from the arguments,
    or, in a graph that ``to_nir`` made, from what is kept there. Weights are of torch's default
    type.

    Voltages are measured from ``v_leak``, the resistance is made part of the weights. Neurons of a
    layer may differ in what scales with the voltage, which is made part of the weights too: all
    then have the threshold of the first one. They may not differ in their time constant, or in how
    far from threshold their reset is.

    Args:
        source: a graph, or a file that contains one.
        noise: sigma of the inputs and of each layer's background, one for all or a list; in the
            units of the inputs, and in voltage per sqrt(ms). Needed if the graph knows of none:
            moments without noise are those of a network that has nothing to be unsure of.
        t_ref: refractory period in ms, of layers that know of none.
        poisson: whether inputs are spikes, given by their rate per ms, and not currents.
        spike_width: as in ``to_nir``; None for Dirac pulses.
        ms_per_unit: as in ``to_nir``; 1000 if the graph does not tell.
        covariance: how it is stored; see ``covary.nn.Lift``.

    Examples:
        >>> import covary
        >>> net = covary.mlp([4, 8, 3], activation="lif", noise=0.5).eval()
        >>> again = from_nir(to_nir(net))
        >>> x = torch.ones(1, 4)
        >>> bool(torch.allclose(again(x).variance, net(x).variance, rtol=1e-4))
        True
    """
    nir = _library()
    graph = source if isinstance(source, nir.NIRGraph) else _read(nir, Path(source))
    chain = list(_chain(nir, graph))
    about = graph.nodes[chain[0]].metadata
    unit = _checked_unit(float(about.get(_UNIT, SECOND)) if ms_per_unit is None else ms_per_unit)
    known_width = float(about[_DT]) if _DT in about else None
    width = _checked_width(known_width if spike_width is None else spike_width)
    poisson = bool(about.get(_POISSON, False)) if poisson is None else poisson
    imported = _Import(nir, graph, unit, 1.0 if width is None else width, t_ref)
    stages = list(imported.stages(chain[1:-1], spikes=poisson))
    known = [about.get(_NOISE), *(stage.noise for stage in stages if stage.neuron)]
    lift, *noises = _noises(noise, known)
    layers: OrderedDict[str, nn.Module] = OrderedDict(lift=Lift(lift, covariance, poisson=poisson))
    for number, stage in enumerate(stages, start=1):
        layers[f"linear{number}"] = _linear(stage.weight, stage.bias)
        if stage.neuron is not None:
            layers[f"noise{number}"] = Noise(noises[number - 1])
            constants = vars(stage.neuron)
            layers[f"activation{number}"] = Activation(activations.lif(**constants))
    return nn.Sequential(layers).eval()


@dataclass(frozen=True)
class _Imported:
    """Weights and, but for those that read the output, the neurons behind them."""

    weight: np.ndarray
    bias: np.ndarray
    neuron: LIF | None
    noise: float | None


class _Import:
    """Nodes in mV and ms; ``pulse`` is the integral of a spike in the graph's time."""

    def __init__(
        self, nir: Any, graph: nir.NIRGraph, unit: float, pulse: float, t_ref: float
    ) -> None:
        self.nir, self.graph, self.unit, self.pulse, self.t_ref = nir, graph, unit, pulse, t_ref

    def stages(self, names: Sequence[str], *, spikes: bool) -> Iterator[_Imported]:
        """One after another; ``spikes`` says whether these are the inputs of the first."""
        weight: np.ndarray | None = None
        bias: np.ndarray | None = None
        for name in names:
            node = self.graph.nodes[name]
            if isinstance(node, self.nir.LIF):
                if weight is None or bias is None:
                    raise _unknown(name, node, "neurons need weights (Affine, Linear) before them")
                yield self._neurons(name, node, weight, bias, spikes=spikes)
                weight, bias, spikes = None, None, True
                continue
            if not isinstance(node, self.nir.Affine | self.nir.Linear):
                raise _unknown(name, node, "only Affine, Linear and LIF have moments here")
            if node.weight.ndim != 2:
                raise _unknown(name, node, f"its weights have the shape {node.weight.shape}")
            shift = node.bias if isinstance(node, self.nir.Affine) else np.zeros(len(node.weight))
            if np.shape(shift) != (len(node.weight),):
                raise _unknown(name, node, f"its bias has the shape {np.shape(shift)}")
            if weight is not None and bias is not None:  # two in a row are one
                _check_width(name, node, len(weight))
                weight, bias = node.weight @ weight, node.weight @ bias + shift
            else:
                weight, bias = node.weight, np.asarray(shift)
        if weight is None or bias is None:
            return
        if not any(isinstance(self.graph.nodes[name], self.nir.LIF) for name in names):
            raise ValueError("This graph has no LIF node: it is no spiking network.")
        yield _Imported(weight * (self.pulse * self.unit), bias, None, None)

    def _neurons(
        self, name: str, node: Any, weight: np.ndarray, bias: np.ndarray, *, spikes: bool
    ) -> _Imported:
        n = len(weight)
        tau, r, leak, threshold, reset = (
            self._of_each(name, node, what, n)
            for what in ("tau", "r", "v_leak", "v_threshold", "v_reset")
        )
        if not (tau > 0).all():
            raise _unknown(name, node, f"its tau must be above 0, and is {tau.min():g}")
        threshold, reset = threshold - leak, reset - leak
        if not (threshold > reset).all():
            raise _unknown(name, node, "its threshold must be above its reset")
        scale = np.ones(n)
        if not np.allclose(threshold, threshold[0], rtol=_RTOL, atol=0):
            scale = threshold[0] / threshold
        if not (np.isfinite(scale).all() and (scale > 0).all()):
            raise _unknown(name, node, "thresholds are on both sides of v_leak")
        alike = np.allclose(tau, tau[0], rtol=_RTOL, atol=0)
        if not alike or not np.allclose(reset * scale, reset[0], rtol=_RTOL, atol=_RTOL):
            raise _unknown(
                name,
                node,
                "its neurons differ in tau or in (v_reset - v_leak) / (v_threshold - v_leak), "
                "which no weights can make up for. Split it into layers of equal neurons",
            )
        about = node.metadata
        tau_ms = float(tau[0]) * self.unit
        neuron = LIF(
            v_th=float(threshold[0]),
            v_res=float(reset[0]),
            t_ref=float(about.get(_T_REF, self.t_ref)),
            leak=1 / tau_ms,
        )
        to_current = scale * r / tau_ms  # what I does in a ms
        to_jump = to_current * self.pulse * self.unit  # what a spike does
        noise = about.get(_NOISE)
        return _Imported(
            weight * (to_jump if spikes else to_current)[:, None],
            bias * to_current,
            neuron,
            None if noise is None else float(noise),
        )

    def _of_each(self, name: str, node: Any, what: str, n: int) -> np.ndarray:
        """(n,) constants of the neurons."""
        values = np.asarray(getattr(node, what), dtype=np.float64)
        if values.ndim > 1 or values.size not in (1, n):
            raise _unknown(
                name, node, f"{what} has the shape {values.shape}, behind {n} rows of weights"
            )
        if not np.isfinite(values).all():
            raise _unknown(name, node, f"{what} is not finite")
        return np.broadcast_to(values.reshape(-1), (n,))


def _chain(nir: Any, graph: nir.NIRGraph) -> Iterator[str]:
    """Names from the input to the output, one after another."""
    after: dict[str, list[str]] = {name: [] for name in graph.nodes}
    before: dict[str, list[str]] = {name: [] for name in graph.nodes}
    for source, target in graph.edges:
        after[source].append(target)
        before[target].append(source)
    ends = {
        kind: [name for name, node in graph.nodes.items() if isinstance(node, kind)]
        for kind in (nir.Input, nir.Output)
    }
    for kind, found in ends.items():
        if len(found) != 1:
            raise ValueError(
                f"A chain has one {kind.__name__} node; this graph has {len(found)}"
                f"{': ' if found else ''}{', '.join(found)}."
            )
    for name, node in graph.nodes.items():
        if isinstance(node, nir.NIRGraph):
            raise _unknown(name, node, "graphs within graphs (recurrent layers) are no chain")
        wanted = (not isinstance(node, nir.Input), not isinstance(node, nir.Output))
        if (len(before[name]), len(after[name])) != wanted:
            raise _unknown(
                name,
                node,
                f"it has {len(before[name])} edges in and {len(after[name])} out, and a chain has "
                "one node after another, without branches or recurrence",
            )
    (name,) = ends[nir.Input]
    seen = 0
    while True:
        seen += 1
        yield name
        if not after[name]:
            break
        (name,) = after[name]
    if seen != len(graph.nodes):
        raise ValueError("This graph has nodes in a circle apart from its chain.")


def _lif_node(nir: Any, stage: Stage, unit: float) -> Any:
    neuron = neuron_of(stage)
    ones = np.ones(len(stage.weight))
    tau = ones / (neuron.leak * unit)
    return nir.LIF(
        tau=tau,
        r=tau.copy(),
        v_leak=0 * ones,
        v_threshold=neuron.v_th * ones,
        v_reset=neuron.v_res * ones,
        metadata={_T_REF: neuron.t_ref, _NOISE: stage.noise},
    )


def _linear(weight: np.ndarray, bias: np.ndarray) -> Linear:
    rows, columns = weight.shape
    layer = Linear(columns, rows)
    for parameter, values in ((layer.weight, weight), (layer.bias, bias)):
        assert parameter is not None
        parameter.data.copy_(torch.from_numpy(np.ascontiguousarray(values)))
    return layer


def _noises(given: float | Sequence[float] | None, known: Sequence[float | None]) -> list[float]:
    if given is None:
        missing = [value for value in known if value is None]
        if missing:
            raise ValueError(
                "NIR knows no noise, and a network without noise has no covariance. Give one: "
                "from_nir(..., noise=sigma), of the inputs and of each layer, in voltage per "
                "sqrt(ms)."
            )
        return [float(value) for value in known if value is not None]
    noises = list(given) if isinstance(given, Sequence) else [given] * len(known)
    if len(noises) != len(known):
        raise ValueError(
            f"from_nir needs one noise for all or {len(known)} of them (the input's and each "
            f"layer's), got {len(noises)}."
        )
    return noises


def _read(nir: Any, path: Path) -> nir.NIRGraph:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path} to read a NIR graph from.")
    try:
        graph = nir.read(path)
    except Exception as error:  # whatever HDF5 and NIR make of a file that is not theirs
        raise ValueError(f"{path} is no NIR graph that can be read: {error}") from error
    if not isinstance(graph, nir.NIRGraph):
        raise ValueError(f"{path} holds a single {type(graph).__name__}, and no NIR graph.")
    return graph


def _library() -> Any:
    with needed("nir", "Exchanging spiking networks", "nir"):
        import nir
    return nir


def _array(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().cpu().numpy()
    return array


def _check_width(name: str, node: Any, width: int) -> None:
    if node.weight.shape[1] != width:
        raise _unknown(name, node, f"it takes {node.weight.shape[1]} numbers and gets {width}")


def _checked_unit(ms_per_unit: float) -> float:
    if not (np.isfinite(ms_per_unit) and ms_per_unit > 0):
        raise ValueError(f"A unit of time has a length above 0 ms, got ms_per_unit={ms_per_unit}.")
    return ms_per_unit


def _checked_width(width: float | None) -> float | None:
    if width is not None and not (np.isfinite(width) and width > 0):
        raise ValueError(f"A spike lasts for a time above 0, got spike_width={width}.")
    return width


def _unknown(name: str, node: Any, why: str) -> ValueError:
    return ValueError(f"Node {name!r} ({type(node).__name__}) has no moments: {why}.")
