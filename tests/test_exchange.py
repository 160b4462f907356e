"""Spiking networks in NIR: out, in, and in another simulator."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import covary
from covary import activations
from covary.activations import LIF
from covary.nn import Activation, Lift, Linear, Noise
from covary.stochastic.exchange import from_nir, save_nir, to_nir
from covary.stochastic.membrane import Arrivals, Membranes

nir = pytest.importorskip("nir")


def network(*, poisson=False, constants=None, seed=0):
    """Two layers of neurons and a readout, with batch norm that has something to fold in."""
    torch.manual_seed(seed)
    activation = activations.lif(**(constants or {}))
    net = covary.mlp(
        [4, 6, 5, 3], activation=activation, noise=[0.3, 0.7, 0.9], batch_norm=True
    ).eval()
    net.lift.poisson = poisson
    with torch.no_grad():
        for norm in (net.batch_norm1, net.batch_norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
            norm.weight.uniform_(1.0, 2.0)
            norm.bias.uniform_(0.5, 1.5)
    return net


def foreign(n=3, **constants):
    """Somebody else's graph: no metadata, voltages of order 1, seconds."""
    rng = np.random.default_rng(0)
    neuron = {
        "tau": np.full(n, 0.02),
        "r": np.ones(n),
        "v_leak": np.zeros(n),
        "v_threshold": np.ones(n),
        "v_reset": np.zeros(n),
    } | constants
    nodes = {
        "input": nir.Input(np.array([2])),
        "fc1": nir.Affine(rng.normal(size=(n, 2)), rng.uniform(0.5, 1.5, n)),
        "lif1": nir.LIF(**neuron),
        "fc2": nir.Linear(rng.normal(size=(2, n))),
        "output": nir.Output(np.array([2])),
    }
    return chain_of(nodes)


def chain_of(nodes, *more, check=True):
    names = list(nodes)
    edges = list(pairwise(names))
    return nir.NIRGraph(nodes, [*edges, *more], type_check=check)


def assert_same_moments(first, second, x):
    with torch.no_grad():
        one, other = first(x), second(x)
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(one.covariance_matrix, other.covariance_matrix, rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("poisson", [False, True])
@pytest.mark.parametrize(
    "constants", [{}, {"v_th": 15.0, "v_res": -3.0, "t_ref": 2.5, "leak": 0.1}]
)
@pytest.mark.parametrize("time", [{}, {"spike_width": 1e-4}, {"time_scale": 1.0}])
def test_what_goes_out_comes_back(tmp_path, poisson, constants, time):
    net = network(poisson=poisson, constants=constants)
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    save_nir(net, tmp_path / "net.nir", **time)
    again = from_nir(tmp_path / "net.nir")
    assert again.lift.poisson == poisson
    neuron = net.activation2.activation.neuron
    assert vars(again.activation2.activation.neuron) == pytest.approx(vars(neuron))
    assert covary.models.noise_of(again) == pytest.approx([0.3, 0.7, 0.9])
    assert_same_moments(again, net, x)


def test_neurons_are_in_seconds_and_spikes_are_jumps_in_millivolts():
    net = covary.mlp([4, 6, 5, 3], activation="lif").eval()
    graph = to_nir(net)
    assert list(graph.nodes) == [
        "input", "linear1", "activation1", "linear2", "activation2", "linear3", "output",
    ]  # fmt: skip
    node = graph.nodes["activation1"]
    np.testing.assert_allclose(node.tau, 0.02)
    np.testing.assert_allclose(node.r / node.tau, 1.0)
    np.testing.assert_allclose(node.v_threshold, 20.0)
    np.testing.assert_allclose(graph.nodes["linear2"].weight, net.linear2.weight.detach())
    # Currents are per second, as rates are that the output reads.
    np.testing.assert_allclose(
        graph.nodes["linear1"].weight, 1000 * net.linear1.weight.detach(), rtol=1e-6
    )
    np.testing.assert_allclose(
        graph.nodes["linear3"].weight, net.linear3.weight.detach() / 1000, rtol=1e-6
    )


def test_a_foreign_network_gets_moments():
    graph = foreign()
    net = from_nir(graph, noise=[0.0, 0.1], t_ref=2.0)
    neuron = net.activation1.activation.neuron
    assert vars(neuron) == pytest.approx({"v_th": 1.0, "v_res": 0.0, "t_ref": 2.0, "leak": 0.05})
    x = torch.tensor([[0.3, -0.2]])
    with torch.no_grad(), covary.record(net) as layers:
        out = net(x)
    fc1 = graph.nodes["fc1"]
    weight, bias = torch.from_numpy(fc1.weight).float(), torch.from_numpy(fc1.bias).float()
    # tau dv/dt = -v + I in ms: I / 20 is the current.
    current = (x @ weight.mT + bias) / 20
    torch.testing.assert_close(layers["linear1"].mean, current)
    # Outputs are per second.
    rate = layers["activation1"].mean
    read = torch.from_numpy(graph.nodes["fc2"].weight).float()
    torch.testing.assert_close(out.mean, 1000 * rate @ read.mT)
    assert (out.variance > 0).all()


def test_voltages_are_measured_from_the_leak():
    plain = from_nir(foreign(), noise=0.1)
    shifted = from_nir(
        foreign(v_leak=np.full(3, -65.0), v_threshold=np.full(3, -64.0), v_reset=np.full(3, -65.0)),
        noise=0.1,
    )
    assert_same_moments(plain, shifted, torch.rand(4, 2))
    below = from_nir(foreign(v_leak=np.full(3, 0.5)), noise=0.1)
    neuron = below.activation1.activation.neuron
    assert (neuron.v_th, neuron.v_res) == (0.5, -0.5)


def test_neurons_that_differ_in_scale_are_made_alike():
    scale = np.array([1.0, 2.0, 5.0])
    graph = foreign(v_threshold=scale, v_reset=-0.5 * scale, r=scale)
    alike = foreign(v_reset=np.full(3, -0.5))
    # With r and voltages of twice the size all is of twice the size.
    assert_same_moments(from_nir(graph, noise=0.1), from_nir(alike, noise=0.1), torch.rand(4, 2))


@pytest.mark.parametrize(
    ("constants", "said"),
    [
        ({"tau": np.array([0.02, 0.02, 0.03])}, r"'lif1' \(LIF\).*differ in tau"),
        ({"v_reset": np.array([0.0, 0.0, 0.3])}, r"'lif1' \(LIF\).*differ in tau or in"),
        ({"v_threshold": np.array([1.0, 1.0, -0.1]), "v_reset": np.full(3, -1.0)}, "both sides"),
        ({"v_reset": np.full(3, 2.0)}, "threshold must be above its reset"),
        ({"tau": np.zeros(3)}, "tau must be above 0"),
        ({"r": np.full(3, np.nan)}, "r is not finite"),
    ],
)
def test_neurons_that_cannot_be_made_alike_are_named(constants, said):
    with pytest.raises(ValueError, match=said):
        from_nir(foreign(**constants), noise=0.1)


def test_graphs_that_are_no_chain_are_refused():
    ends = {"input": nir.Input(np.array([3])), "output": nir.Output(np.array([3]))}
    ones = np.ones(3)
    fc, lif = nir.Linear(np.eye(3)), nir.LIF(ones, ones, 0 * ones, ones, 0 * ones)

    def graph(middle, *more):
        return chain_of(
            {"input": ends["input"]} | middle | {"output": ends["output"]}, *more, check=False
        )

    cases = [
        (graph({"fc": fc, "if": nir.IF(ones, ones)}), r"'if' \(IF\) has no moments: only Affine"),
        (graph({"lif": lif}), r"'lif' \(LIF\).*need weights"),
        (graph({"fc": fc, "lif": lif}, ("lif", "fc")), r"'(fc|lif)'.*edges in and"),
        (graph({"fc": fc}), "no LIF node"),
        (graph({"sub": graph({"fc": fc, "lif": lif})}), "'sub' .*graphs within graphs"),
    ]
    for wrong, said in cases:
        with pytest.raises(ValueError, match=said):
            from_nir(wrong, noise=0.1, poisson=True)


def test_two_weights_in_a_row_are_one():
    nodes = dict(foreign().nodes)
    fc1 = nodes["fc1"]
    half = {"half": nir.Affine(0.5 * np.eye(2), np.array([0.1, 0.2]))}
    longer = chain_of(
        {"input": nodes["input"]} | half | {k: v for k, v in nodes.items() if k != "input"}
    )
    nodes["fc1"] = nir.Affine(0.5 * fc1.weight, fc1.bias + fc1.weight @ [0.1, 0.2])
    assert_same_moments(
        from_nir(longer, noise=[0, 0.1]),
        from_nir(chain_of(nodes), noise=[0, 0.1]),
        torch.rand(3, 2),
    )


def test_a_graph_without_noise_asks_for_it():
    with pytest.raises(ValueError, match=r"from_nir\(\.\.\., noise=sigma\)"):
        from_nir(foreign())
    with pytest.raises(ValueError, match="one noise for all or 2"):
        from_nir(foreign(), noise=[0.1, 0.1, 0.1])


def test_only_what_spikes_goes_out():
    with pytest.raises(ValueError, match="'lif'"):
        to_nir(covary.mlp([2, 3, 2]))
    behind = nn.Sequential(nn.Linear(2, 2), Lift(0.1), Linear(2, 2), Activation("lif"))
    with pytest.raises(ValueError, match="has Linear in front of it"):
        to_nir(behind)
    flat = nn.Sequential(covary.nn.Flatten(), Lift(0.1), Linear(2, 2), Activation("lif"))
    assert list(to_nir(flat).nodes) == ["input", "linear1", "activation1", "output"]
    for wrong in ({"spike_width": 0.0}, {"time_scale": -1.0}):
        with pytest.raises(ValueError, match="above 0"):
            to_nir(network(), **wrong)


def test_files_that_are_none_are_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no file"):
        from_nir(tmp_path / "none.nir")
    text = tmp_path / "text.nir"
    text.write_text("not HDF5")
    with pytest.raises(ValueError, match=r"text\.nir is no NIR graph"):
        from_nir(text)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.nir", "w") as file:
        file.create_dataset("numbers", data=np.ones(3))
    with pytest.raises(ValueError, match=r"other\.nir is no NIR graph"):
        from_nir(tmp_path / "other.nir")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "net.nir"
    save_nir(network(), path)
    before = path.read_bytes()

    def fails(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fails)
        with pytest.raises(OSError, match="no space"):
            save_nir(network(seed=1), path)
    assert path.read_bytes() == before
    save_nir(network(seed=1), path)
    assert path.read_bytes() != before
    assert [file.name for file in tmp_path.iterdir()] == ["net.nir"]


def test_without_nir_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nir", None)
    with pytest.raises(ImportError, match=r"pip install 'covary\[nir\]'"):
        to_nir(network())


def in_snntorch(graph, currents, dt):
    """Spikes (T, B, n) of each layer, as snnTorch has them, step by step of ``dt`` seconds.

    V -> beta V + input, then a spike and a reset if V is above threshold. The input of the first
    layer is what a constant current of the step adds to V; a spike adds its weight at once.
    """
    snntorch = pytest.importorskip("snntorch")
    neurons, weights = [], []
    for name in ("activation1", "activation2"):
        node = graph.nodes[name]
        tau = float(node.tau[0])
        neurons.append(
            snntorch.Leaky(
                beta=float(np.exp(-dt / tau)),
                threshold=float(node.v_threshold[0]),
                reset_mechanism="zero",
                reset_delay=False,
            )
        )
        affine = graph.nodes[name.replace("activation", "linear")]
        weights.append((torch.from_numpy(affine.weight), torch.from_numpy(affine.bias)))
        per_step = float(node.r[0]) * (1 - np.exp(-dt / tau))
    spikes = [[], []]
    potentials = [torch.zeros(currents.shape[1], len(weight)) for weight, _ in weights]
    (w1, b1), (w2, b2) = weights
    for current in currents:
        first, potentials[0] = neurons[0]((current @ w1.mT + b1) * per_step, potentials[0])
        second, potentials[1] = neurons[1](first @ w2.mT + b2 * per_step, potentials[1])
        spikes[0].append(first.detach())
        spikes[1].append(second.detach())
    return [torch.stack(layer) for layer in spikes]


def in_covary(net, currents, dt):
    """The same on the grid: no bridge, no refractory period; ``dt`` in ms."""
    generator = torch.Generator().manual_seed(0)
    layers = [net.linear1, net.linear2]
    neuron = net.activation1.activation.neuron
    membranes = [
        Membranes(neuron, torch.zeros(currents.shape[1], len(layer.weight)), dt, crossing="grid")
        for layer in layers
    ]
    spikes = [[], []]
    for current in currents:
        arrivals = None
        for number, (layer, one) in enumerate(zip(layers, membranes, strict=True)):
            drive = layer.bias if number else current @ layer.weight.mT + layer.bias
            fired, _ = one.advance(drive / neuron.leak, None, 0.0, arrivals, generator)
            spikes[number].append(fired.clone())
            if number == 0:
                jumps = fired @ layers[1].weight.mT
                arrivals = Arrivals(jumps, jumps, fired.sum(-1, keepdim=True))
    return [torch.stack(layer) for layer in spikes]


@pytest.mark.parametrize("noise", [0.0, 3.0], ids=["steady", "noisy"])
def test_another_simulator_has_the_same_spikes(tmp_path, noise):
    torch.manual_seed(0)
    net = covary.mlp([4, 10, 8, 3], activation=activations.lif(t_ref=0.0), noise=0.0).eval()
    with torch.no_grad():
        net.linear1.weight.normal_(std=1.0)
        net.linear1.bias.fill_(1.0)
        net.linear2.weight.normal_(std=6.0)
        net.linear2.bias.fill_(0.8)
    save_nir(net, tmp_path / "net.nir")
    graph = nir.read(tmp_path / "net.nir")
    dt, steps = 0.5, 800
    currents = 0.5 + noise * torch.randn(steps, 3, 4)
    with torch.no_grad():
        theirs = in_snntorch(graph, currents, dt / 1000)
        ours = in_covary(net, currents, dt)
    for one, other in zip(ours, theirs, strict=True):
        assert one.sum() > 200
        # The same model, step by step; round-off may put a spike in another step, and from there
        # on a neuron is shifted. What is the same is nearly all, then, and counts are to one.
        same = (one == other).all(0).double().mean()
        assert same >= 0.9
        assert (one.sum(0) - other.sum(0)).abs().max() <= 1


def test_the_defaults_are_those_of_a_neuron():
    """Nothing of a network of one layer is lost, noise and refractory period included."""
    net = nn.Sequential(Lift(0.2), Linear(2, 3), Noise(0.4), Activation("lif"))
    again = from_nir(to_nir(net))
    assert vars(again.activation1.activation.neuron) == pytest.approx(vars(LIF()))
    assert covary.models.noise_of(again) == pytest.approx([0.2, 0.4])
    # Arguments come before what is kept.
    assert covary.models.noise_of(from_nir(to_nir(net), noise=1.0)) == [1.0, 1.0]
