"""Spiking networks out to, and in from, the Neuromorphic Intermediate Representation (NIR)."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from covary import activations
from covary.activations import LIF
from covary.data.dataset import needed
from covary.files import write_atomically
from covary.nn import Activation, Flatten, Lift, Linear, Noise
from covary.stochastic.chain import Chain, Stage

if TYPE_CHECKING:
    import nir

# NIR does not say in what time is measured; those who use it take seconds.
SECOND = 1000.0
# Constants of the neurons of a layer agree if they do so to this.
_RTOL = 1e-5
# What NIR has no place for stands in the metadata of nodes under these names, in files too.
_T_REF, _NOISE, _POISSON, _DT, _TIME = (
    f"covary_{name}" for name in ("t_ref_ms", "noise", "poisson", "spike_width", "ms_per_unit")
)


def to_nir(
    net: nn.Module | Chain, *, spike_width: float | None = None, time_scale: float = SECOND
) -> nir.NIRGraph:
    """The spiking network behind a moment neural network as a graph of NIR.

    Input, Affine, LIF, ..., Affine, Output; batch norm is folded into the weights. A LIF node obeys
    tau dv/dt = v_leak - v + r I, with tau = 1 / leak in seconds, r = tau and v_leak = 0, so that I
    is a current in mV per second and a weight is the jump in mV that a spike causes, if spikes are
    Dirac pulses. Inputs are currents, or spikes if ``Lift`` has ``poisson``; the average over time
    of the output is the network's mean.

    NIR knows no refractory period and no noise. They are kept in the metadata of nodes, for
    ``from_nir``; for other readers neurons are deterministic, and intervals shorter by ``t_ref``.

    Args:
        net: a moment neural network whose activations are all ``lif``, or its ``Chain``.
        spike_width: for simulators in which a spike is 1 for a step and not 1 / step (snnTorch,
            Norse): their step, in the graph's time. Weights are larger by its inverse.
        time_scale: ms in 1 of the graph's time; 1000 for seconds.

    Examples:
        >>> import covary
        >>> graph = to_nir(covary.mlp([4, 8, 3], activation="lif"))
        >>> list(graph.nodes)
        ['input', 'linear1', 'activation1', 'linear2', 'output']
    """
    nir = _library()
    _check_times(time_scale, spike_width)
    chain = Chain.of(net)
    hidden, last = chain.neurons_and_readout()
    if any(not isinstance(layer, Flatten | nn.Flatten) for layer in chain.trunk):
        raise ValueError(
            "NIR takes the layers behind covary.nn.Lift; this network has "
            f"{', '.join(type(layer).__name__ for layer in chain.trunk)} in front of it. Export "
            "the rest: nn.Sequential(*layers from Lift on)."
        )
    about = {_NOISE: chain.noise, _POISSON: int(chain.poisson), _TIME: time_scale}
    if spike_width is not None:
        about[_DT] = spike_width
    inputs, outputs = hidden[0].weight.shape[1], chain.stages[-1].units
    nodes: dict[str, Any] = {"input": nir.Input(np.array([inputs]), metadata=about)}
    pulse = 1.0 if spike_width is None else 1 / spike_width
    for number, stage in enumerate(hidden, start=1):
        scale = time_scale if number == 1 and not chain.poisson else pulse
        nodes[f"linear{number}"] = _affine(nir, stage, scale, time_scale)
        nodes[f"activation{number}"] = _lif(nir, stage, time_scale)
    if last is not None:
        nodes[f"linear{len(hidden) + 1}"] = _affine(nir, last, pulse / time_scale, 1.0)
    nodes["output"] = nir.Output(np.array([outputs]))
    return nir.NIRGraph(nodes, list(pairwise(nodes)))


def _affine(nir: Any, stage: Stage, scale: float, bias_scale: float) -> Any:
    values = (stage.weight * scale, stage.bias * bias_scale)
    return nir.Affine(*(value.detach().cpu().numpy() for value in values))


def _lif(nir: Any, stage: Stage, ms: float) -> Any:
    neuron, ones = stage.neuron, np.ones(stage.units)
    tau = ones / (neuron.leak * ms)
    return nir.LIF(
        tau=tau,
        r=tau.copy(),
        v_leak=0 * ones,
        v_threshold=neuron.v_th * ones,
        v_reset=neuron.v_res * ones,
        metadata={_T_REF: neuron.t_ref, _NOISE: stage.noise},
    )


def save_nir(
    net: nn.Module | Chain,
    path: Path | str,
    *,
    spike_width: float | None = None,
    time_scale: float = SECOND,
) -> None:
    """Write ``to_nir`` of a network to a file, whole or not at all."""
    graph, content = to_nir(net, spike_width=spike_width, time_scale=time_scale), io.BytesIO()
    _library().write(content, graph)
    write_atomically(Path(path), content.getvalue())


def from_nir(
    source: nir.NIRGraph | Path | str,
    *,
    noise: float | Sequence[float] | None = None,
    t_ref: float = 0.0,
    poisson: bool | None = None,
    spike_width: float | None = None,
    time_scale: float | None = None,
    covariance: str = "full",
) -> nn.Sequential:
    """A moment neural network of a spiking network in NIR, which gives its covariance by formula.

    A graph must be a chain of Affine or Linear and LIF nodes; ``to_nir`` says what they mean. What
    NIR does not know (noise, refractory periods, the scale of time) is taken from the arguments,
    or, in a graph that ``to_nir`` made, from its metadata.

    Voltages are measured from ``v_leak``; resistances and what scales with the voltage become part
    of the weights, so that all neurons of a layer have the threshold of the first one. They may not
    differ in their time constant, or in how far from threshold their reset is.

    Args:
        source: a graph, or a file that contains one.
        noise: sigma of the inputs and of each layer's background, one for all or a list; on the
            scale of the inputs, and in voltage per sqrt(ms). Needed if the graph knows of none:
            moments without noise are those of a network that has nothing to be unsure of.
        t_ref: refractory period in ms, of layers that know of none.
        poisson: whether inputs are spikes, given by their rate per ms, and not currents.
        spike_width: as in ``to_nir``; None for Dirac pulses.
        time_scale: as in ``to_nir``; 1000 if the graph does not tell.
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
    first, *between, _ = _chain(nir, graph)
    about = graph.nodes[first].metadata
    ms = float(about.get(_TIME, SECOND)) if time_scale is None else time_scale
    width = about.get(_DT) if spike_width is None else spike_width
    _check_times(ms, width)
    poisson = bool(about.get(_POISSON, False)) if poisson is None else poisson
    pulse = 1.0 if width is None else float(width)  # the integral of a spike in the graph's time
    stages = list(_stages(nir, graph, between))
    known = [stage.node.metadata.get(_NOISE) for stage in stages if stage.node is not None]
    lift, *noises = _noises(noise, [about.get(_NOISE), *known])
    layers: OrderedDict[str, nn.Module] = OrderedDict(lift=Lift(lift, covariance, poisson=poisson))
    for number, stage in enumerate(stages, start=1):
        if stage.node is None:
            layers[f"linear{number}"] = _linear(stage.weight * (pulse * ms), stage.bias)
            break
        neuron, current = _neurons(stage, ms, t_ref)
        # What a spike does, or I in a ms.
        effect = current * pulse * ms if number > 1 or poisson else current
        layers[f"linear{number}"] = _linear(stage.weight * effect[:, None], stage.bias * current)
        layers[f"noise{number}"] = Noise(noises[number - 1])
        layers[f"activation{number}"] = Activation(activations.lif(**vars(neuron)))
    return nn.Sequential(layers).eval()


class _Imported(NamedTuple):
    """Weights, and the LIF node behind them: None, where they read the output."""

    weight: np.ndarray
    bias: np.ndarray
    name: str
    node: Any


def _stages(nir: Any, graph: nir.NIRGraph, names: Sequence[str]) -> Iterator[_Imported]:
    """Nodes of a chain as pairs of weights and neurons; several weights in a row are one."""
    weight: np.ndarray | None = None
    bias = np.zeros(())
    for name in names:
        node = graph.nodes[name]
        if isinstance(node, nir.LIF):
            if weight is None:
                raise _unknown(name, node, "neurons need weights (Affine, Linear) before them")
            yield _Imported(weight, bias, name, node)
            weight = None
            continue
        if not isinstance(node, nir.Affine | nir.Linear):
            raise _unknown(name, node, "only Affine, Linear and LIF have moments here")
        if node.weight.ndim != 2:
            raise _unknown(name, node, f"its weights have the shape {node.weight.shape}")
        rows, columns = node.weight.shape
        shift = np.asarray(node.bias if isinstance(node, nir.Affine) else np.zeros(rows))
        if shift.shape != (rows,):
            raise _unknown(name, node, f"its bias has the shape {shift.shape}")
        if weight is None:
            weight, bias = node.weight, shift
        elif columns != len(weight):
            raise _unknown(name, node, f"it takes {columns} numbers and gets {len(weight)}")
        else:
            weight, bias = node.weight @ weight, node.weight @ bias + shift
    if not any(isinstance(graph.nodes[name], nir.LIF) for name in names):
        raise ValueError("This graph has no LIF node: it is no spiking network.")
    if weight is not None:
        yield _Imported(weight, bias, "output", None)


def _neurons(stage: _Imported, ms: float, t_ref: float) -> tuple[LIF, np.ndarray]:
    """Constants of a layer's neurons in mV and ms; and (n,) what I does to each in a ms."""
    name, node, n = stage.name, stage.node, len(stage.weight)
    tau, r, leak, threshold, reset = (
        _of_each(name, node, what, n) for what in ("tau", "r", "v_leak", "v_threshold", "v_reset")
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
            "its neurons differ in tau or in (v_reset - v_leak) / (v_threshold - v_leak), which no "
            "weights can make up for. Split it into layers of equal neurons",
        )
    tau_ms = float(tau[0]) * ms
    t_ref = float(node.metadata.get(_T_REF, t_ref))
    neuron = LIF(v_th=float(threshold[0]), v_res=float(reset[0]), t_ref=t_ref, leak=1 / tau_ms)
    return neuron, scale * r / tau_ms


def _of_each(name: str, node: Any, what: str, n: int) -> np.ndarray:
    """(n,) constants of the neurons."""
    values = np.asarray(getattr(node, what), dtype=np.float64)
    if values.ndim > 1 or values.size not in (1, n):
        raise _unknown(
            name, node, f"{what} has the shape {values.shape}, behind {n} rows of weights"
        )
    if not np.isfinite(values).all():
        raise _unknown(name, node, f"{what} is not finite")
    return np.broadcast_to(values.reshape(-1), (n,))


def _chain(nir: Any, graph: nir.NIRGraph) -> list[str]:
    """Names from the input to the output, one after another."""
    for kind in (nir.Input, nir.Output):
        ends = [name for name, node in graph.nodes.items() if isinstance(node, kind)]
        if len(ends) != 1:
            raise ValueError(
                f"A chain has one {kind.__name__} node; this graph has {len(ends)}"
                f"{': ' if ends else ''}{', '.join(ends)}."
            )
    for name, node in graph.nodes.items():
        if isinstance(node, nir.NIRGraph):
            raise _unknown(name, node, "graphs within graphs (recurrent layers) are no chain")
        into = sum(target == name for _, target in graph.edges)
        out = sum(source == name for source, _ in graph.edges)
        if (into, out) != (not isinstance(node, nir.Input), not isinstance(node, nir.Output)):
            raise _unknown(
                name,
                node,
                f"it has {into} edges in and {out} out, and a chain has one node after another, "
                "without branches or recurrence",
            )
    after = dict(graph.edges)
    names = [name for name, node in graph.nodes.items() if isinstance(node, nir.Input)]
    while names[-1] in after:
        names.append(after[names[-1]])
    if len(names) != len(graph.nodes):
        raise ValueError("This graph has nodes in a circle apart from its chain.")
    return names


def _linear(weight: np.ndarray, bias: np.ndarray) -> Linear:
    layer = Linear(*reversed(weight.shape))
    assert layer.bias is not None
    layer.weight.data.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
    layer.bias.data.copy_(torch.from_numpy(np.ascontiguousarray(bias)))
    return layer


def _noises(given: float | Sequence[float] | None, known: Sequence[float | None]) -> list[float]:
    if given is None:
        found = [float(value) for value in known if value is not None]
        if len(found) < len(known):
            raise ValueError(
                "NIR knows no noise, and a network without noise has no covariance. Give one: "
                "from_nir(..., noise=sigma), of the inputs and of each layer, in voltage per "
                "sqrt(ms)."
            )
        return found
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


def _check_times(time_scale: float, spike_width: float | None) -> None:
    if not (np.isfinite(time_scale) and time_scale > 0):
        raise ValueError(f"A scale of time is above 0 ms, got time_scale={time_scale}.")
    if spike_width is not None and not (np.isfinite(spike_width) and spike_width > 0):
        raise ValueError(f"A spike lasts for a time above 0, got spike_width={spike_width}.")


def _unknown(name: str, node: Any, why: str) -> ValueError:
    return ValueError(f"Node {name!r} ({type(node).__name__}) has no moments: {why}.")
