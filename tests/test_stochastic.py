"""Sampled and simulated networks: their statistics, and what is known of them exactly.

Standard errors come from 16 groups, so a value over its error has a t distribution with 15 degrees
of freedom: beyond 6 once in 40,000, and of mean square 15 / 13.
"""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from scipy import linalg as dense
from torch import Tensor, nn

import covary
from covary.stochastic import (
    Chain,
    StreamingMoments,
    relaxation_time,
    sample_steady,
    simulate_ou,
)
from covary.stochastic.statistics import wishart_bias

TAIL = 6.0
X = torch.tensor([[0.4, -0.3, 1.0], [-1.0, 0.2, 0.1]])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def streamed(values: Tensor, *, chunks: int = 3):
    """The estimate from (groups, B, c, n), taken in piece by piece."""
    moments = StreamingMoments(values.shape[0], values.shape[1], values.shape[3])
    for chunk in values.split(-(-values.shape[2] // chunks), dim=2):
        moments.add(chunk)
    return moments.estimate()


def assert_agree(found: Tensor, error: Tensor, truth: Tensor) -> None:
    """Within Monte-Carlo errors: none far off, and all together neither too far nor too close."""
    scores = (found - truth) / error
    assert scores.abs().max() < TAIL
    # Values are few and correlated, so their mean square spreads far.
    assert 0.1 < scores.square().mean() < 4


def linear_net(widths=(3, 4, 3, 2), noise=(0.5, 0.3, 0.7), seed=0) -> nn.Sequential:
    torch.manual_seed(seed)
    return covary.mlp(list(widths), activation="identity", noise=list(noise))


# Statistics


def test_moments_in_pieces_are_those_of_the_whole():
    """A mean far from 0 costs no digits."""
    values = 1e4 + torch.randn(4, 2, 50, 3, generator=generator(), dtype=torch.float64)
    found = streamed(values, chunks=7)
    covariances = torch.stack([one.T.cov() for one in values.flatten(0, 1)]).view(4, 2, 3, 3)
    torch.testing.assert_close(found.group_mean, values.mean(2))
    torch.testing.assert_close(found.group_scatter / 49, covariances, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.mean, values.mean((0, 2)))
    within = covariances.mean(0) * 49 / 50
    between = torch.stack([means.cov() for means in values.mean(2).permute(1, 2, 0)])
    torch.testing.assert_close(found.covariance_matrix, within + between, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.variance, found.covariance_matrix.diagonal(dim1=1, dim2=2))


def test_leaving_out_a_group_is_as_if_it_had_not_been_there():
    values = torch.randn(4, 1, 10, 2, generator=generator(), dtype=torch.float64)
    values += 3 * torch.arange(4.0)[:, None, None, None]
    for i, (mean, covariance) in enumerate(streamed(values).without_each()):
        rest = streamed(values[[j for j in range(4) if j != i]])
        torch.testing.assert_close(mean, rest.mean)
        torch.testing.assert_close(covariance, rest.covariance_matrix)


def test_standard_errors_are_how_far_estimates_are_off():
    mix = torch.tensor([[1.0, 0.0, 0.0], [0.8, 0.6, 0.0], [0.0, -0.5, 2.0]], dtype=torch.float64)
    values = torch.randn(16, 40, 25, 3, generator=generator(), dtype=torch.float64) @ mix.T
    found, truth = streamed(values), mix @ mix.T
    assert_agree(found.mean, found.mean_error, torch.zeros(3, dtype=torch.float64))
    assert_agree(found.covariance_matrix, found.covariance_error, truth)
    n = 16 * 25
    # Of 40 inputs: the average of estimated variances of estimates, each sure to sqrt(2 / 15).
    torch.testing.assert_close(
        found.mean_error.square().mean(0), truth.diagonal() / n, rtol=0.25, atol=0.0
    )
    squares = (truth.diagonal()[:, None] * truth.diagonal() + truth.square()) / n
    torch.testing.assert_close(
        found.covariance_error.square().mean(0), squares, rtol=0.35, atol=0.0
    )


def autoregressive(rho: float, steps: int, *, batch: int = 1, units: int = 20) -> Tensor:
    """(16, batch, steps, units) of variance 1, that remember; each input is an experiment."""
    noise = generator(3)
    state = torch.randn(16, batch, units, generator=noise, dtype=torch.float64)
    seen = []
    for _ in range(steps):
        fresh = torch.randn(state.shape, generator=noise, dtype=torch.float64)
        state = rho * state + math.sqrt(1 - rho**2) * fresh
        seen.append(state)
    return torch.stack(seen, 2)


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_covariances_have_no_bias_though_values_remember(rho):
    """About the mean of what was seen, values of rho = 0.9 would vary less: by 1 / 84."""
    found = streamed(autoregressive(rho, 100, batch=1600, units=1))
    error = found.variance.std().item() / 1600**0.5
    assert found.variance.mean().item() == pytest.approx(1, abs=3.5 * error)
    assert rho == 0 or 3.5 * error < 1 / 84
    claimed = found.variance_error.square().mean().sqrt() / 1600**0.5
    assert claimed.item() == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_effective_samples_of_a_process_that_remembers(rho):
    """(1 - rho) / (1 + rho) of them for a mean; for second moments rho^2 takes rho's place."""
    steps = 1600
    found = streamed(autoregressive(rho, steps))
    total = 16 * steps
    expected = total * (1 - rho) / (1 + rho)
    # 20 units with 15 degrees of freedom each: sure to sqrt(2 / 300) = 8%.
    assert found.effective_samples_of_all.item() == pytest.approx(expected, rel=0.3)
    assert found.effective_samples.median().item() == pytest.approx(expected, rel=0.4)
    of_products = total * (1 - rho**2) / (1 + rho**2)
    assert found.degrees_of_freedom.item() == pytest.approx(of_products, rel=0.2)


def test_units_that_never_change_have_no_effective_samples():
    values = torch.randn(4, 1, 10, 2, generator=generator())
    values[..., 0] = 1.0
    found = streamed(values)
    assert found.effective_samples[0, 0].isnan()
    assert found.effective_samples_of_all.isfinite().all()


@pytest.mark.parametrize("n", [1, 5, 12])
def test_entropy_is_freed_of_its_bias(n):
    """Without correction it would be low by about n (n + 1) / 4 N: many standard errors."""
    torch.manual_seed(n)
    mix = torch.randn(n, n, dtype=torch.float64)
    values = torch.randn(16, 150, 8, n, generator=generator(), dtype=torch.float64) @ mix.T
    entropy, error = streamed(values, chunks=2).entropy()
    truth = 0.5 * (n * (1 + math.log(2 * math.pi)) + torch.logdet(mix @ mix.T))
    of_average = error.square().mean().sqrt() / math.sqrt(150)
    assert (entropy.mean() - truth).abs() < 3.5 * of_average
    assert entropy.std().item() == pytest.approx(error.square().mean().sqrt().item(), rel=0.2)
    low = -0.5 * wishart_bias(16 * 8 - 1, n)
    assert low == pytest.approx(n * (n + 1) / 4 / 128, rel=0.15)
    if n > 1:
        assert low > 5 * of_average


def test_entropy_of_values_that_remember_counts_those_that_are_independent():
    steps, units = 100, 6
    values = autoregressive(0.9, steps, batch=150, units=units)
    entropy, error = streamed(values).entropy()
    truth = units * 0.5 * (1 + math.log(2 * math.pi))
    of_average = error.square().mean().sqrt() / math.sqrt(len(error))
    assert (entropy.mean() - truth).abs() < 3.5 * of_average
    as_if_independent = -0.5 * wishart_bias(16 * steps - 1, units)
    as_it_is = -0.5 * wishart_bias(16 * steps * (1 - 0.81) / (1 + 0.81), units)
    assert as_it_is - as_if_independent > 5 * of_average


def test_entropy_is_that_of_the_subspace_that_varies():
    values = torch.randn(16, 1, 500, 3, generator=generator(), dtype=torch.float64)
    values[..., 2] = values[..., 0] - values[..., 1]
    entropy, error = streamed(values).entropy()
    truth = 0.5 * (2 * (1 + math.log(2 * math.pi)) + math.log(3))
    assert (entropy - truth).abs() < 4 * error
    nothing, _ = streamed(torch.ones(4, 1, 10, 3)).entropy()
    assert nothing.item() == -math.inf
    few, _ = streamed(torch.randn(3, 1, 2, 8, generator=generator()), chunks=1).entropy()
    assert few.isnan().all()


def test_an_estimate_through_weights_is_that_of_what_they_give():
    values = torch.randn(4, 2, 10, 3, generator=generator(), dtype=torch.float64)
    weight = torch.randn(2, 3, generator=generator(), dtype=torch.float64)
    direct, mapped = streamed(values @ weight.T), streamed(values).linear(weight)
    torch.testing.assert_close(direct.mean_error, mapped.mean_error)
    torch.testing.assert_close(direct.covariance_matrix, mapped.covariance_matrix)


def test_one_value_is_no_covariance():
    moments = StreamingMoments(3, 1, 1)
    moments.add(torch.zeros(3, 1, 1, 1))
    with pytest.raises(ValueError, match="2 values of each group, got 1"):
        moments.estimate()


# The steady state


def exact(net: nn.Module, x: Tensor) -> dict[str, covary.Moments]:
    twin = covary.with_covariance(net, "full").eval()
    with torch.no_grad(), covary.record(twin) as layers:
        twin(x)
    return layers


def test_a_linear_network_is_as_its_moments_say():
    net = linear_net()
    found, truth = sample_steady(net, X, copies=8000), exact(net, X)
    assert list(found) == ["activation1", "activation2", "linear3"]
    for name, estimate in found.items():
        assert_agree(estimate.mean, estimate.mean_error, truth[name].mean.double())
        covariance = truth[name].covariance_matrix.double()
        assert_agree(estimate.covariance_matrix, estimate.covariance_error, covariance)
        entropy, error = estimate.entropy()
        assert ((entropy - truth[name].entropy()).abs() < TAIL * error).all()


@pytest.mark.parametrize("activation", ["relu", "heaviside", "tanh"])
def test_a_layer_of_independent_inputs_is_as_its_moments_say(activation):
    """Where nothing is correlated before the activation, moments are exact."""
    net = covary.mlp([3, 3, 2], activation=activation, noise=[0.5, 0.3])
    net.linear1.weight.data = torch.diag(torch.tensor([1.0, -2.0, 0.5]))
    found, truth = sample_steady(net, X, copies=8000), exact(net, X)
    for name in ("activation1", "linear2"):
        estimate = found[name]
        assert_agree(estimate.mean, estimate.mean_error, truth[name].mean.double())
        covariance = truth[name].covariance_matrix.double()
        assert_agree(estimate.covariance_matrix, estimate.covariance_error, covariance)


def test_layers_that_scale_are_part_of_the_weights():
    """Batch norm, scale of the output, a trunk before the moments: first-order moments agree."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Tanh(),
        nn.Flatten(),
        covary.nn.Lift(0.3),
        covary.nn.Linear(8, 5),
        covary.nn.BatchNorm1d(5),
        covary.nn.Noise(0.2),
        covary.nn.Activation("identity"),
        covary.nn.Dropout(0.3),
        covary.nn.Linear(5, 2, bias=False),
        covary.nn.Rescale(torch.tensor([100.0, -3.0]), torch.tensor([7.0, 0.5])),
    ).eval()
    nn.init.uniform_(net[5].running_mean)
    nn.init.uniform_(net[5].running_var, 0.5, 2.0)
    x = torch.randn(2, 1, 4, 4, generator=generator())
    truth = exact(net, x)["10"]
    for estimate in (
        sample_steady(net, x, copies=8000)["10"],
        simulate_ou(net, x, duration=70.0, copies=96, method="exponential").stages["10"],
    ):
        assert_agree(estimate.mean, estimate.mean_error, truth.mean.double())
        covariance = truth.covariance_matrix.double()
        assert_agree(estimate.covariance_matrix, estimate.covariance_error, covariance)


def test_heaviside_units_in_time_are_those_of_the_steady_state():
    torch.manual_seed(1)
    net = covary.mlp([3, 6, 5, 2], activation="heaviside", noise=0.4)
    steady = sample_steady(net, X, copies=8000)
    moving = simulate_ou(net, X, duration=70.0, copies=96, method="exponential").stages
    for name, one in steady.items():
        other = moving[name]
        for key in ("mean", "covariance"):
            value = "covariance_matrix" if key == "covariance" else key
            errors = [getattr(each, f"{key}_error") for each in (one, other)]
            error = (errors[0] ** 2 + errors[1] ** 2).sqrt()
            # A unit that fires once in a thousand draws has no error to speak of.
            assert_agree(getattr(one, value), error.clamp_min(1e-4), getattr(other, value))


def test_inputs_of_poisson_processes_vary_by_their_rate():
    net = linear_net()
    net.lift.poisson = True
    rates = torch.tensor([[2.0, 0.0, 5.0]])
    weight = net.linear1.weight.detach()
    variance = (weight.square() @ (rates[0] + 0.5**2)) + 0.3**2
    for estimate in (
        sample_steady(net, rates, copies=8000)["activation1"],
        simulate_ou(net, rates, duration=70.0, copies=96, method="exponential").stages[
            "activation1"
        ],
    ):
        assert_agree(estimate.variance, estimate.variance_error, variance[None].double())


def test_the_seed_decides_all():
    net = covary.mlp([3, 4, 2])
    one, same, other = (sample_steady(net, X, copies=64, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one["linear2"].mean, same["linear2"].mean)
    assert not torch.equal(one["linear2"].mean, other["linear2"].mean)
    runs = [simulate_ou(net, X, duration=9, copies=16, seed=seed) for seed in (1, 1, 2)]
    one, same, other = (run.stages["linear2"].mean for run in runs)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_neither_gradients_nor_the_network_change():
    net = covary.mlp([3, 4, 2])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = sample_steady(Chain.of(net), X, copies=32)
    assert not found["linear2"].mean.requires_grad
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())


# Networks in time


def factor(m: int) -> float:
    """What m more equal filters leave of the variance of noise that was filtered once."""
    return math.comb(2 * m, m) / 4**m


def system(net: nn.Sequential, time_constants) -> tuple[Tensor, Tensor, list[slice]]:
    """A linear network as dz = A z dt + noise of covariance Q dt; and where its layers are."""
    chain = Chain.of(copy.deepcopy(net).double())
    weights = [stage.weight for stage in chain.stages]
    widths = [weights[0].shape[1], *(len(weight) for weight in weights)]
    ends = torch.tensor([0, *widths]).cumsum(0).tolist()
    places = [slice(low, high) for low, high in itertools.pairwise(ends)]
    drift, noise = torch.zeros(2, ends[-1], ends[-1], dtype=torch.float64)
    sigmas = [chain.noise, *(stage.noise for stage in chain.stages)]
    for i, (place, tau, sigma) in enumerate(zip(places, time_constants, sigmas, strict=True)):
        drift[place, place] = -torch.eye(widths[i], dtype=torch.float64) / tau
        noise[place, place] = 2 * sigma**2 / tau * torch.eye(widths[i], dtype=torch.float64)
        if i:
            drift[place, places[i - 1]] = weights[i - 1] / tau
    return drift, noise, places


def test_equal_filters_leave_central_binomials_of_the_variance():
    """The closed form, layer by layer, against the Lyapunov equation, which is exact."""
    net = linear_net()
    drift, noise, places = system(net, [1.0] * 4)
    lyapunov = torch.as_tensor(dense.solve_continuous_lyapunov(drift, -noise))
    chain = Chain.of(copy.deepcopy(net).double())
    sigmas = [chain.noise, *(stage.noise for stage in chain.stages)]
    for layer, place in enumerate(places):
        expected = torch.zeros(place.stop - place.start, place.stop - place.start).double()
        for source in range(layer + 1):
            through = torch.eye(len(drift[places[source]])).double()
            for stage in chain.stages[source:layer]:
                through = stage.weight @ through
            expected += factor(layer - source) * sigmas[source] ** 2 * through @ through.T
        torch.testing.assert_close(lyapunov[place, place], expected)


@pytest.mark.parametrize(("ratio", "method"), [(1.0, "euler-maruyama"), (0.5, "exponential")])
def test_a_linear_network_in_time_solves_the_lyapunov_equation(ratio, method):
    net = linear_net()
    time_constants = [ratio**layer for layer in range(4)]
    dt = 0.05 * time_constants[-1]
    found = simulate_ou(net, X, duration=35.0, copies=64, ratio=ratio, method=method)
    assert found.time_constants == pytest.approx(time_constants)
    assert found.dt == pytest.approx(dt)
    drift, noise, places = system(net, time_constants)
    if method == "euler-maruyama":  # the step itself is a linear system, solved exactly
        step = torch.eye(len(drift)) + drift * dt
        covariance = torch.as_tensor(dense.solve_discrete_lyapunov(step, noise * dt))
    else:  # to the order of dt
        covariance = torch.as_tensor(dense.solve_continuous_lyapunov(drift, -noise))
    fixed = exact(covary.with_noise(net, 0.0), X)
    for place, (name, estimate) in zip(places[1:], found.stages.items(), strict=True):
        assert_agree(estimate.mean, estimate.mean_error, fixed[name].mean.double())
        truth = covariance[place, place]
        assert_agree(estimate.covariance_matrix, estimate.covariance_error, truth)


@pytest.mark.parametrize(("method", "larger"), [("euler-maruyama", 0.2), ("exponential", 0.0)])
def test_steps_of_euler_maruyama_make_noise_larger(method, larger):
    """sigma^2 / (1 - dt / 2 tau), everywhere, where layers follow at once."""
    net = linear_net()
    dt, tau = 0.2 * 3.0, 3.0
    found = simulate_ou(net, X, duration=300.0, dt=dt, tau=tau, copies=64, method=method)
    for name, estimate in found.stages.items():
        truth = exact(net, X)[name].covariance_matrix.double() / (1 - larger / 2)
        assert_agree(estimate.covariance_matrix, estimate.covariance_error, truth)


def test_a_simulation_tells_how_little_it_saw():
    """A mean over a time T of an OU process is as good as T / 2 tau independent values."""
    net = covary.mlp([3, 40, 2], activation="identity", noise=[0.0, 0.5])
    found = simulate_ou(net, X, duration=60.0, copies=32, method="exponential")
    span = found.looks * 0.5
    assert span == pytest.approx(60.0 - found.burn_in, abs=1.0)
    expected = 32 * span / 2
    samples = found.stages["activation1"].effective_samples_of_all
    # 40 units with 15 degrees of freedom each: 6%; looks half a tau apart tell 2% less.
    torch.testing.assert_close(samples, torch.full_like(samples, expected), rtol=0.3, atol=0.0)
    assert found.stages["activation1"].count == 2 * found.looks


def test_burning_in_takes_longer_the_deeper_a_network_is():
    for depth in (1, 2, 6):
        time = relaxation_time([2.0] * depth, left=1e-3)
        left = torch.special.gammaincc(torch.tensor(float(depth)), torch.tensor(time / 2))
        assert left.item() == pytest.approx(1e-3, rel=1e-4)
    # Fast layers cost their time constants; those that follow at once, nothing.
    assert relaxation_time([1.0, 0.1]) == pytest.approx(math.log(1000 / 0.9), rel=1e-6)
    assert relaxation_time([1.0, 0.0]) == pytest.approx(math.log(1000))
    net = covary.mlp([3, 4, 4, 2])
    run = simulate_ou(net, X, duration=30.0, copies=16, ratio=1.0)
    assert run.burn_in == pytest.approx(relaxation_time([1.0] * 4), abs=run.dt)
    short = simulate_ou(net, X, duration=30.0, copies=16, burn_in=5.0)
    assert (short.burn_in, short.looks) == (pytest.approx(5.0), 51)


def test_what_is_recorded_too_early_still_knows_of_the_start():
    net = linear_net(noise=(1.0, 0.0, 0.0))
    early = simulate_ou(net, X, duration=1.5, burn_in=0.0, copies=320, ratio=1.0)
    late = simulate_ou(net, X, duration=25.0, copies=320, ratio=1.0)
    ratios = early.stages["linear3"].variance / late.stages["linear3"].variance
    assert ratios.max() < 0.2


def test_traces_are_of_the_units_that_were_chosen():
    net = covary.mlp([3, 4, 2], noise=0.3)
    chosen = {"activation1": [3, 0], "linear2": [1]}
    run = simulate_ou(net, X, duration=160.0, copies=16, record_trace=chosen, trace_duration=150.0)
    assert run.trace["activation1"].shape == (len(run.times), 2, 2)
    assert run.trace["linear2"].shape == (len(run.times), 2, 1)
    assert run.times[0] == 0
    assert run.times[1] == pytest.approx(run.dt)
    assert run.times[-1] == pytest.approx(150.0, abs=0.1)
    expected = exact(net, X)["activation1"].mean[:, [3, 0]]
    # 75 independent values: a mean of units of variance 0.3 is sure to 0.06.
    torch.testing.assert_close(run.trace["activation1"].mean(0), expected, atol=0.25, rtol=0.0)
    short = simulate_ou(net, X, duration=30.0, copies=16, record_trace=chosen)
    assert len(short.times) == pytest.approx(20 / short.dt)
    assert not simulate_ou(net, X, duration=9.0, copies=16).trace


def test_progress_is_told_of_every_step():
    seen = []

    def progress(items, name):
        seen.append((len(items), name))
        yield from items

    net = covary.mlp([3, 4, 2])
    simulate_ou(net, X, duration=10.0, copies=16, ratio=1.0, burn_in=1.0, progress=progress)
    sample_steady(net, X, copies=4096, progress=progress)
    assert seen == [(200, "ou, ratio 1"), (2, "steady state")]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dt": 0.0}, "above 0, got dt=0"),
        ({"dt": -1.0}, "above 0, got dt=-1"),
        ({"dt": 0.3}, r"dt=0.3 is inaccurate for a time constant of 1. Take 0.2 at most"),
        ({"dt": 2.5}, "dt=2.5 diverges for a time constant of 1"),
        ({"dt": 0.05, "ratio": 0.2}, "diverges for a time constant of 0.008"),
        ({"tau": -1.0}, "A time constant is above 0, got tau=-1"),
        ({"ratio": 1.5}, r"from 0 .* to 1 .* got 1.5"),
        ({"method": "heun"}, "Unknown method 'heun'; known are euler-maruyama and exponential"),
        ({"burn_in": -1.0}, "0 or more, got burn_in=-1"),
        ({"duration": 5.0}, "Burning in takes 6.908 .* too little of 5 .* longer: 33.8 or more"),
        ({"duration": math.inf}, "too little of inf"),
        ({"ratio": 0.01, "duration": 100.0}, "2,000,000,000 steps .* ratio=0, the limit"),
        ({"copies": 20}, "multiple of 16; got 20. Take 32"),
        ({"groups": 2}, "3 or more, got 2"),
        ({"thin": 0}, "1 step or more apart, got thin=0"),
        ({"record_trace": {"lift": [0]}}, "no stage 'lift' .* activation1, activation2, linear3"),
        ({"record_trace": {"linear3": [2]}}, r"units 0 to 1 to trace, got \[2\]"),
    ],
)
def test_what_cannot_be_simulated_is_said(wrong, said):
    net = covary.mlp([3, 4, 3, 2])
    with pytest.raises(ValueError, match=said):
        simulate_ou(net, X, **({"duration": 20.0, "copies": 16} | wrong))


def test_inputs_must_fit():
    net = covary.mlp([3, 4, 2])
    with pytest.raises(ValueError, match=r"take inputs \(B, 3\), got \(2, 2\)"):
        sample_steady(net, X[:, :2])
    with pytest.raises(ValueError, match=r"multiple of 16; got 5\. Take 16"):
        sample_steady(net, X, copies=5)


def test_a_rate_of_spikes_is_no_function_of_a_noisy_input():
    net = covary.mlp([3, 4, 2], activation="lif")
    for simulate in (sample_steady, simulate_ou):
        more = {"duration": 20.0} if simulate is simulate_ou else {}
        with pytest.raises(ValueError, match=r"activation1 .* fires.*Use simulate_spikes"):
            simulate(net, X, copies=16, **more)
