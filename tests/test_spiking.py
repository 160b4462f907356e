"""The spiking network, against formulas for single neurons and against moments of networks."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from scipy import integrate, special

import covary
from covary import activations
from covary.nn import Activation, Lift, Linear, Noise
from covary.stochastic.membrane import Arrivals, Membranes, time_of_crossing
from covary.stochastic.spiking import SaturationWarning, SilenceWarning, simulate_spikes

LIF = activations.LIF


def siegert(mu: float, var: float, neuron: LIF) -> tuple[float, float]:
    """Rate and Fano factor by integration, eqs. (mu_lif) and (sigma_lif) of the paper."""
    scale = math.sqrt(neuron.leak * var)
    low, high = ((v * neuron.leak - mu) / scale for v in (neuron.v_res, neuron.v_th))

    def g(x):
        return math.sqrt(math.pi) / 2 * special.erfcx(-x)

    def h(x):
        return integrate.quad(lambda u: math.exp(x * x - u * u) * g(u) ** 2, x - 12, x)[0]

    rate = 1 / (neuron.t_ref + 2 / neuron.leak * integrate.quad(g, low, high)[0])
    variance = 8 / neuron.leak**2 * rate**3 * integrate.quad(h, low, high)[0]
    return rate, variance / rate


def single(noise, neuron=None):
    """One neuron, whose input is the current, and whose output is its rate."""
    constants = vars(neuron or LIF())
    net = torch.nn.Sequential(
        Lift(0.0), Linear(1, 1), Noise(noise), Activation(activations.lif(**constants))
    )
    torch.nn.init.ones_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    return net


def network():
    """Random weights that keep neurons where they respond: around the threshold."""
    torch.manual_seed(0)
    net = covary.mlp([6, 40, 30, 3], activation="lif", noise=1.0).eval()
    # Few spikes beside noise of their own: those of neurons that fire regularly are no white noise.
    for i, std in enumerate((0.25, 0.5), start=1):
        layer = getattr(net, f"linear{i}")
        torch.nn.init.normal_(layer.weight, std=std)
        torch.nn.init.constant_(layer.bias, 1.0)
    torch.nn.init.normal_(net.linear3.weight, std=3.0)
    return net


# Noise-driven, at threshold, above it, and almost regular.
@pytest.mark.parametrize(
    ("drives", "noise", "dt"),
    [
        ((0.6, 1.0, 1.5, 3.0), 1.0, 0.25),
        ((0.6, 1.0, 1.5, 3.0), 1.0, 0.5),
        ((2.0, 3.0), 0.2, 0.5),
        ((0.0, 2.0), 2.5, 0.5),
    ],
)
def test_a_neuron_fires_as_theory_says(drives, noise, dt):
    x = torch.tensor(drives)[:, None]
    found = simulate_spikes(
        single(noise), x, duration=360, burn_in=60, window=300, copies=1600, dt=dt, groups=32
    )
    (layer,) = found.layers.values()
    expected = torch.tensor([siegert(mu, noise**2, LIF()) for mu in drives]).double()
    rate, fano = expected[:, :1], expected[:, 1:]
    # 4.5 standard errors, whose own error is 1/8; and 0.3% for what is left of the start.
    assert ((layer.rate - rate).abs() <= 4.5 * layer.rate_error + 3e-3 * rate).all()
    # A finite window adds 1/6 to the variance of the count, 1/4 at most, in regular neurons.
    assert ((layer.fano - fano).abs() <= 4.5 * layer.fano_error + 0.25 / (300 * rate)).all()
    assert (layer.rate_error < 0.05 * rate).all()
    assert (layer.fano_error < 0.1 * fano + 0.01).all()


def test_the_grid_misses_spikes_and_the_bridge_does_not():
    x, rate = torch.tensor([[1.0]]), siegert(1.0, 1.0, LIF())[0]
    off = {}
    for crossing in ("grid", "bridge"):
        found = simulate_spikes(
            single(1.0), x, crossing=crossing, duration=360, burn_in=60, window=300, copies=1600,
            dt=0.5,
        )  # fmt: skip
        off[crossing] = found.layers["3"].rate.item() / rate - 1
    # -6% and 0, with a standard error of 0.4%.
    assert off["grid"] < -0.04
    assert abs(off["bridge"]) < 0.016


@pytest.mark.parametrize(("before", "after"), [(0.5, -0.8), (0.4, 0.3), (1.0, -0.2)])
def test_bridges_cross_when_they_do(before, after):
    """Against bridges step by step: from 0 to before - after, a level at ``before``."""
    generator = torch.Generator().manual_seed(0)
    steps, paths = 2000, 4000
    walk = torch.randn(paths, steps, generator=generator).div_(steps**0.5).cumsum(1)
    part = torch.arange(1, steps + 1) / steps
    bridge = walk + part * (before - after - walk[:, -1:])
    # Looked at in steps it gets there a little late: as if the level were higher.
    reached = bridge >= before - 0.5826 / steps**0.5
    crossed = reached.any(1)
    if after > 0:
        expected = math.exp(-2 * before * after)
        assert crossed.double().mean().item() == pytest.approx(expected, abs=0.035)
    times = part[reached[crossed].int().argmax(1)]
    ends = (torch.full((paths,), value) for value in (before, after, 1.0))
    drawn = time_of_crossing(*ends, generator)
    # 4.5 standard errors of 0.25 / sqrt(4000) and of its like for fewer.
    for power in (1, 2):
        one, other = (values.double().pow(power).mean().item() for values in (times, drawn))
        assert one == pytest.approx(other, abs=0.03)
    assert drawn.min() >= 0
    assert drawn.max() <= 1


def spike_times(membranes: Membranes, target: float, dt: float, steps: int) -> list[float]:
    """Of a single neuron without noise."""
    generator, times = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        _, fired = membranes.advance(torch.tensor(target), None, 0.0, None, generator)
        if len(fired):
            times.append(dt * (step - (membranes.refractory - membranes.resting.item())))
    return times


@pytest.mark.parametrize(
    "neuron", [LIF(), LIF(t_ref=3.3), LIF(t_ref=0), LIF(v_res=-5, leak=0.1)], ids=str
)
@pytest.mark.parametrize(("dt", "drive"), [(0.25, 1.1), (0.5, 1.7), (0.5, 6.0)])
def test_without_noise_intervals_are_exact(neuron, dt, drive):
    drive *= neuron.drive_at_threshold
    membranes = Membranes(neuron, torch.zeros(1, 1, dtype=torch.float64), dt)
    times = torch.tensor(spike_times(membranes, drive / neuron.leak, dt, round(200 / dt)))
    intervals = times.diff().double()
    expected = 1 / neuron.rate(torch.tensor(drive, dtype=torch.float64))
    assert len(intervals) >= 2
    # Where V crosses in a step is taken from a straight line, off by leak dt^2 / 8 at most; by four
    # times as much if what was left of one step is lived through with the next one.
    assert (intervals - expected).abs().max() < neuron.leak * dt**2 / 2


def test_a_refractory_period_need_not_be_a_number_of_steps():
    neuron, dt, steps = LIF(t_ref=4.9), 0.5, 2000
    membranes = Membranes(neuron, torch.zeros(50, 1), dt)
    generator, spikes = torch.Generator().manual_seed(0), 0
    drive = 10.0
    for _ in range(steps):
        noise = membranes.kick * torch.randn(50, 1, generator=generator)
        target = torch.tensor(drive / neuron.leak)
        spikes += len(membranes.advance(target, noise, dt, None, generator)[1])
    rate = spikes / 50 / (steps * dt)
    # Half a spike in 1000 ms, as all start together, is 0.35%; a period of 5 ms would make 1.4%.
    assert rate == pytest.approx(siegert(drive, 1.0, neuron)[0], rel=4e-3)


def test_a_network_fires_as_its_moments_say():
    net, x = network(), torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), covary.record(net) as moments:
        out = net(x)
    found = simulate_spikes(
        net, x, duration=250, burn_in=50, window=200, copies=320, dt=0.5,
        covariance=["activation1"],
    )  # fmt: skip
    for name, layer in found.layers.items():
        rate = moments[name].mean.double()
        # The first layer's noise is Gaussian, the other's is spikes in part, and not quite white.
        slack = 0.005 if name == "activation1" else 0.06
        assert ((layer.rate - rate).abs() <= 5 * layer.rate_error + slack * rate).all()
    first = found.layers["activation1"].covariance
    others = ~torch.eye(first.shape[-1], dtype=torch.bool)
    sampled = first[:, others]
    predicted = moments["activation1"].covariance_matrix.double()[:, others]
    # Sure to 2%; linear response and the finite window are good for a few.
    slope = (sampled * predicted).sum() / predicted.square().sum()
    assert slope == pytest.approx(1.0, abs=0.12)
    readout = found.readout
    spread = readout.outputs[:, :, :, -1].double().std((0, 2)) / 320**0.5
    assert ((readout.mean[:, -1] - out.mean).abs() <= 5 * spread + 0.05).all()
    entropy, error = readout.entropy()
    assert ((entropy[:, -1] - out.entropy()).abs() <= 5 * error[:, -1] + 0.2).all()


def test_neurons_that_share_noise_fire_together():
    net = torch.nn.Sequential(Lift(0.5), Linear(1, 2), Noise(1.0), Activation("lif"))
    torch.nn.init.ones_(net[1].weight)
    torch.nn.init.zeros_(net[1].bias)
    x = torch.tensor([[0.9], [1.3]])
    with torch.no_grad():
        expected = net(x).covariance_matrix.double()[:, 0, 1]  # gain_1 gain_2 C_12
    found = simulate_spikes(
        net, x, duration=650, burn_in=50, window=200, copies=1600, dt=0.5, covariance=["3"]
    )
    layer = found.layers["3"]
    assert layer.covariance.shape == (2, 2, 2)
    error = layer.covariance_error[:, 0, 1]
    # Linear response is the first order in the correlation of the inputs, which is 1/5 here; a
    # membrane of 20 ms takes a tenth of the window to respond.
    assert ((layer.covariance[:, 0, 1] - expected).abs() <= 4 * error + 0.15 * expected).all()
    assert (error < 0.2 * expected).all()


def test_poisson_inputs_are_noise_of_their_rate():
    torch.manual_seed(0)
    net = torch.nn.Sequential(Lift(0.0, poisson=True), Linear(100, 2), Activation("lif"))
    torch.nn.init.normal_(net[1].weight, mean=0.05, std=0.15)
    torch.nn.init.constant_(net[1].bias, 0.3)
    x = torch.full((1, 100), 0.2)
    with torch.no_grad():
        expected = net(x).mean.double()
    common = {"duration": 200, "burn_in": 50, "window": 150}
    fine = simulate_spikes(net, x, copies=320, dt=0.25, **common).layers["2"]
    # Spikes are jumps of 0.15 mV, by half of which they overshoot: a little more to climb.
    assert ((fine.rate - expected).abs() <= 4 * fine.rate_error + 0.03 * expected).all()
    assert (expected > 0.01).all()
    # A longer step is as good, though 10 spikes come in it: they are not all at once.
    coarse = simulate_spikes(net, x, copies=320, dt=0.5, seed=1, **common).layers["2"]
    error = (fine.rate_error**2 + coarse.rate_error**2).sqrt()
    assert ((fine.rate - coarse.rate).abs() <= 4 * error + 0.01 * expected).all()


def test_spikes_make_potentials_jump():
    neuron, dt = LIF(), 0.25
    generator = torch.Generator().manual_seed(0)
    for crossing in ("bridge", "grid"):
        membranes = Membranes(neuron, torch.zeros(1, 3), dt, crossing=crossing)
        jumps = torch.tensor([[5.0, 25.0, -3.0]])
        arrivals = Arrivals(jumps, jumps.square(), torch.ones(1, 1))
        spikes, _ = membranes.advance(torch.zeros(()), None, 0.0, arrivals, generator)
        assert spikes.tolist() == [[0.0, 1.0, 0.0]]
        left = math.exp(-neuron.leak * dt / 2) if crossing == "bridge" else 1.0
        expected = torch.tensor([[5.0 * left, 0.0, -3.0 * left]])
        torch.testing.assert_close(membranes.potential, expected, rtol=1e-4, atol=0)


def test_several_jumps_cross_in_any_order():
    """20 up and 20 down, of 1 mV each, from 16 mV."""
    neuron, n = LIF(), 20_000
    membranes = Membranes(neuron, torch.zeros(1, n), 0.01)
    membranes.potential.fill_(16.0)
    jumps, squares = torch.zeros(1, n), torch.full((1, n), 40.0)
    _, fired = membranes.advance(
        torch.tensor(16.0),
        None,
        0.0,
        Arrivals(jumps, squares, torch.full((1, 1), 40.0)),
        torch.Generator().manual_seed(0),
    )
    # Reflected at the threshold, orders that reach it are those of 24 up and 16 down; jumps on a
    # lattice hit it without overshooting, as they would on average by 0.58 of one.
    exact = math.comb(40, 24) / math.comb(40, 20)
    continuous = math.exp(-2 * 4**2 / 40)
    overshooting = math.exp(-2 * 4.58**2 / 40)
    assert exact == pytest.approx(continuous, abs=0.01)
    assert len(fired) / n == pytest.approx(overshooting, abs=0.02)


def test_the_readout_is_what_spikes_say():
    net, x = network(), torch.rand(2, 6, generator=torch.Generator().manual_seed(1))
    found = simulate_spikes(
        net, x, duration=100, burn_in=0, window=100, copies=32, times=[25, 50, 100], dt=0.5,
        covariance=["activation2"],
    )  # fmt: skip
    layer, readout = found.layers["activation2"], found.readout
    assert readout.times.tolist() == [25, 50, 100]
    assert readout.outputs.shape == (16, 2, 2, 3, 3)
    weight, bias = net.linear3.weight.detach().double(), net.linear3.bias.detach().double()
    torch.testing.assert_close(
        readout.mean[:, -1].double(), layer.rate @ weight.mT + bias, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(
        readout.covariance()[:, -1], weight @ layer.covariance @ weight.mT, rtol=1e-3, atol=1e-5
    )
    labels = readout.mean[:, -1].argmax(-1)
    accuracy, error = readout.accuracy(labels)
    by_hand = (readout.outputs.argmax(-1) == labels[:, None, None]).double().mean((0, 1, 2))
    torch.testing.assert_close(accuracy, by_hand)
    assert error.shape == (3,)
    assert (readout.accuracy((labels + 1) % 3)[0] < accuracy).all()


def test_a_network_that_ends_in_neurons_gives_their_rates():
    found = simulate_spikes(
        single(1.0), torch.tensor([[1.5]]), duration=100, burn_in=0, window=50, copies=48, dt=0.5
    )
    rate = found.layers["3"].rate
    assert found.readout.mean[0, -1].item() == pytest.approx(rate.item(), rel=1e-5)


def test_the_seed_decides_all_and_inputs_do_not_depend_on_each_other():
    net, x = network(), torch.rand(3, 6, generator=torch.Generator().manual_seed(1))
    common = {"duration": 80, "burn_in": 20, "window": 30, "copies": 48, "dt": 0.5}
    first, again, other = (
        simulate_spikes(net, x, seed=seed, **common).readout.outputs for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    alone = simulate_spikes(net, x[1:2], seed=2, **common)
    together = simulate_spikes(net, x, seed=3, **common)
    for name, layer in alone.layers.items():
        rest = together.layers[name]
        error = (layer.rate_error[0] ** 2 + rest.rate_error[1] ** 2).sqrt()
        off = layer.rate[0] - rest.rate[1]
        # 70 neurons: the largest of as many is 2.5 or so; errors from 16 groups have tails.
        assert (off.abs() <= 6 * error + 1e-9).all()


def test_progress_is_told_of_every_step():
    told = []

    def progress(items, name):
        told.append((len(items), name))
        yield from items

    simulate_spikes(
        single(1.0), torch.ones(1, 1), duration=20, burn_in=0, window=20, copies=48, dt=0.5,
        progress=progress,
    )  # fmt: skip
    assert told == [(40, "spikes")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dt": 0.0}, "above 0 ms"),
        ({"dt": -1.0}, "above 0 ms"),
        ({"dt": 3.0}, "Take 2 ms at most"),
        ({"duration": -5.0}, "duration above 0"),
        ({"burn_in": -5.0}, "burn_in=-5"),
        ({"window": 0.0}, "window above 0"),
        ({"duration": 50.0, "burn_in": 40.0, "window": 20.0}, "leaves no window"),
        ({"copies": 17}, "Take 32"),
        ({"copies": 16}, "one window of one copy"),
        ({"crossing": "euler"}, "bridge and grid"),
        ({"covariance": ["activation9"]}, "there are 3"),
        ({"times": [50.0]}, "0.5 to 20 ms"),
        ({"times": []}, "0.5 to 20 ms"),
    ],
)
def test_what_cannot_be_simulated_is_said(wrong, said):
    options = {"duration": 20.0, "burn_in": 0.0, "window": 20.0, "copies": 32, "dt": 0.5} | wrong
    with pytest.raises(ValueError, match=said):
        simulate_spikes(single(1.0), torch.ones(1, 1), **options)


def test_a_step_is_no_longer_than_the_refractory_period():
    net = single(1.0, LIF(t_ref=0.2))
    with pytest.raises(ValueError, match=r"Take 0\.2 ms at most"):
        simulate_spikes(net, torch.ones(1, 1), dt=0.25)


def test_only_spiking_networks_spike():
    with pytest.raises(ValueError, match=r"--activation lif"):
        simulate_spikes(covary.mlp([2, 3, 2]), torch.ones(1, 2))
    mixed = torch.nn.Sequential(
        Lift(0.1), Linear(2, 3), Activation("lif"), Linear(3, 3), Activation("relu"), Linear(3, 2)
    )
    with pytest.raises(ValueError, match="4 has activation relu among layers that spike"):
        simulate_spikes(mixed, torch.ones(1, 2))
    noisy = torch.nn.Sequential(
        Lift(0.1), Linear(2, 3), Activation("lif"), Linear(3, 2), Noise(0.1)
    )
    with pytest.raises(ValueError, match=r"got noise 0\.1"):
        simulate_spikes(noisy, torch.ones(1, 2))


def test_inputs_must_fit():
    net = single(1.0)
    with pytest.raises(ValueError, match=r"take inputs \(B, 1\), got \(1, 2\)"):
        simulate_spikes(net, torch.ones(1, 2))
    with pytest.raises(ValueError, match="NaN"):
        simulate_spikes(net, torch.full((1, 1), torch.nan))
    rates = torch.nn.Sequential(Lift(0.0, poisson=True), Linear(1, 1), Activation("lif"))
    with pytest.raises(ValueError, match="lowest is -1"):
        simulate_spikes(rates, torch.full((1, 1), -1.0))


def test_covariances_that_were_not_asked_for_are_not_there():
    found = simulate_spikes(
        single(1.0), torch.ones(1, 1), duration=20, burn_in=0, window=20, copies=48, dt=0.5
    )
    with pytest.raises(ValueError, match=r"covariance=\['3'\]"):
        _ = found.layers["3"].covariance


def test_neurons_at_either_end_are_said():
    common = {"duration": 60, "burn_in": 0, "window": 60, "copies": 48, "dt": 0.5}
    with pytest.warns(SaturationWarning, match="100% of the neurons of 3 fire within 10%"):
        simulate_spikes(single(1.0), torch.full((1, 1), 100.0), **common)
    with pytest.warns(SilenceWarning, match="3 is silent"):
        simulate_spikes(single(0.1), torch.full((1, 1), -1.0), **common)
    with pytest.warns(SaturationWarning, match="Use a smaller dt"):
        simulate_spikes(single(1.0, LIF(t_ref=0)), torch.full((1, 1), 10.0), **common)


def test_a_refractory_period_is_rounded_on_the_grid():
    net = single(1.0, LIF(t_ref=4.9))
    common = {"duration": 20, "burn_in": 0, "window": 20, "copies": 48, "dt": 0.5}
    with pytest.warns(UserWarning, match=r"9\.8 steps of 0\.5 ms, rounded to 10"):
        simulate_spikes(net, torch.full((1, 1), 2.0), crossing="grid", **common)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        simulate_spikes(net, torch.full((1, 1), 2.0), **common)
