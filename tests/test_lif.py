"""The LIF moment activation against integrals of 30 digits, its limits, and bad constants."""

from __future__ import annotations

import itertools
import pickle

import mpmath as mp
import numpy as np
import pytest
import torch

import covary
from covary import activations
from covary.activations import LIF, dawson, lif
from tests import reference_lif

NEURONS = [LIF(), LIF(v_th=15.0, v_res=5.0, t_ref=2.0, leak=0.1), LIF(1.0, 0.0, 0.0, 1.0)]
LEAST_RATE = 1e-12
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-9}


def points(neuron: LIF, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """mu in [-10, 10] and sigma in [1e-3, 20] where neurons fire, (N,); half near threshold.

    float64 tensors of float32 numbers, on the scale of the neuron's input.
    """
    random = np.random.default_rng(0)
    drive = neuron.drive_at_threshold
    sigma = 10 ** random.uniform(-3, np.log10(20), count)
    anywhere = random.uniform(-10, 10, count)
    near = drive + random.uniform(-5, 3, count) * np.sqrt(neuron.leak) * sigma
    mu = np.where(np.arange(count) % 2, anywhere, near.clip(-10, 10))
    # The ends of the range, and neurons exactly at threshold.
    corners = itertools.product([-10.0, 0.0, drive, 10.0], [1e-3, 0.2, 20.0])
    more_mu, more_sigma = zip(*corners, strict=True)
    mu, sigma = np.append(mu, more_mu), np.append(sigma, more_sigma)
    fires = (drive - mu) / (np.sqrt(neuron.leak) * sigma) < 5.5
    as_float32 = [torch.tensor(values[fires]).float().double() for values in (mu, sigma**2)]
    return as_float32[0], as_float32[1]


@pytest.mark.parametrize("neuron", NEURONS, ids=repr)
def test_moments_against_30_digits(neuron):
    mu, var = points(neuron, 200)
    expected = [
        reference_lif.moments(m, v, neuron) for m, v in zip(mu.tolist(), var.tolist(), strict=True)
    ]
    firing = [i for i, true in enumerate(expected) if true.mean > LEAST_RATE]
    assert len(firing) > 100
    activation = lif(**vars(neuron))
    for dtype, tolerance in TOLERANCES.items():
        out = activation(mu.to(dtype), var.to(dtype))
        for name, i in itertools.product(out._fields, firing):
            true = getattr(expected[i], name)
            error = abs(mp.mpf(getattr(out, name)[i].item()) / true - 1)
            where = f"{name} at mu={mu[i].item()}, var={var[i].item()} in {dtype}"
            assert error < tolerance, f"{where}: {float(error)}"


@pytest.mark.parametrize(("mu", "var"), [(0.5, 1.0), (2.0, 4.0), (1.1, 0.01)])
def test_the_reference_is_the_integrals_of_the_paper(mu, var):
    mean, variance = reference_lif.integrated(mu, var, LIF())
    reference = reference_lif.moments(mu, var, LIF())
    assert abs(reference.mean / mean - 1) < 1e-10
    assert abs(reference.variance / variance - 1) < 1e-10


@pytest.mark.parametrize("neuron", NEURONS, ids=repr)
def test_derivatives_against_30_digits(neuron):
    mu, var = points(neuron, 24)
    mu.requires_grad_()
    var.requires_grad_()
    out = lif(**vars(neuron))(mu, var)
    for name in out._fields:
        slopes = torch.autograd.grad(getattr(out, name).sum(), (mu, var), retain_graph=True)
        for by, slope in zip(("mu", "var"), slopes, strict=True):
            for i, (m, v) in enumerate(zip(mu.tolist(), var.tolist(), strict=True)):
                true = reference_lif.derivative(name, by, m, v, neuron)
                # Derivatives go through 0, near which only their absolute size means something.
                size = getattr(out, name)[i].item() / (v**0.5 if by == "mu" else v)
                error = abs(slope[i].item() - true)
                # Where noise is strong the ends are close, and differences lose two digits.
                assert error < 1e-7 * abs(true) + 1e-10 * abs(size), (name, by, m, v)


def test_gradcheck():
    mu = torch.tensor([-1.0, 0.5, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    var = torch.tensor([4.0, 0.3, 1.0, 0.01], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda m, v: tuple(lif()(m, v)), (mu, var), atol=1e-7)


@pytest.mark.parametrize("neuron", NEURONS, ids=repr)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_without_noise_it_fires_regularly(neuron, dtype):
    drive = neuron.drive_at_threshold
    mu = torch.tensor([-1e6, 0.0, drive, 1.001 * drive, 2 * drive, 50 * drive], dtype=dtype)
    activation = lif(**vars(neuron))
    out = activation(mu, torch.zeros_like(mu))
    assert torch.equal(out.variance, torch.zeros_like(mu))
    assert (out.mean[:3] == 0).all()
    digits = 2e-4 if dtype == torch.float32 else 1e-12  # 1.001 - 1 has few of them
    for m, rate, gain in zip(mu[3:].tolist(), out.mean[3:], out.gain[3:], strict=True):
        ratio = (m - neuron.v_res * neuron.leak) / (m - drive)
        interval = neuron.t_ref + np.log(ratio) / neuron.leak
        assert rate.item() == pytest.approx(1 / interval, rel=digits)
        climb = (neuron.v_th - neuron.v_res) / (m - neuron.v_res * neuron.leak) / (m - drive)
        assert gain.item() == pytest.approx(climb / interval**2, rel=digits)
    # And noise that is next to nothing changes next to nothing.
    almost = activation(mu[3:], torch.full_like(mu[3:], 1e-20))
    torch.testing.assert_close(almost.mean, out.mean[3:])
    torch.testing.assert_close(almost.gain, out.gain[3:], rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nothing_overflows_anywhere(dtype):
    finfo = torch.finfo(dtype)
    mu = torch.tensor([0.0, 1e-3, 1.0, 30.0, 1e4, 1e10, finfo.max / 4], dtype=dtype)
    var = torch.tensor([0.0, finfo.tiny, 1e-30, 1e-6, 1.0, 1e6, 1e30], dtype=dtype)
    mu, var = torch.cartesian_prod(torch.cat([-mu, mu]), var).unbind(1)
    mu.requires_grad_()
    out = lif()(mu, var)
    for name, values in out._asdict().items():
        assert not values.isnan().any(), name
        if name != "gain":  # infinite for a neuron at threshold without noise
            assert torch.isfinite(values).all(), name
            assert (values >= 0).all(), name
    assert (out.mean <= 1 / LIF().t_ref * (1 + 1e-6)).all()
    (slope,) = torch.autograd.grad(out.variance.sum(), mu)
    assert not slope.isnan().any()


def test_rates_that_hardly_count_are_those_of_a_poisson_process():
    mu = torch.tensor([-2.5, -4.0, -8.0], dtype=torch.float64)
    out = lif()(mu, torch.full_like(mu, 4.0))
    assert (out.mean > 0).all()
    assert (out.mean < 1e-12).all()
    torch.testing.assert_close(out.variance, out.mean, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("neuron", NEURONS, ids=repr)
def test_linear_response_never_exceeds_the_variance(neuron):
    """So that covariances are positive semidefinite; coherence of spikes and input is at most 1."""
    mu = torch.linspace(-10, 30, 200, dtype=torch.float64)[:, None] * neuron.drive_at_threshold
    var = torch.logspace(-6, 3, 100, dtype=torch.float64)[None] * neuron.drive_at_threshold**2
    out = lif(**vars(neuron))(mu, var)
    coherence = out.gain.square() * var / out.variance.clamp(min=torch.finfo(torch.float64).tiny)
    assert coherence.max() <= 1 + 1e-9


def test_tables_join_where_their_formulas_change():
    """At x = 0, at the start of the asymptotic series, and at the end of the table."""
    edges = [0.0, float(dawson._line(np.array(dawson._FAR)))]
    for edge, name in itertools.product(edges, dawson.FAMILIES):
        near = dawson.place(torch.tensor([edge - 1e-9, edge + 1e-9], dtype=torch.float64))
        below, above = near.look_up(name).tolist()
        assert below == pytest.approx(above, rel=3e-8, abs=1e-8), (edge, name)


def test_a_network_of_spiking_neurons_starts_where_they_respond():
    torch.manual_seed(0)
    net = covary.mlp([20, 50, 30, 3], activation="lif", batch_norm=True)
    neuron = net.activation1.activation.neuron
    assert covary.models.noise_of(net) == [0.2, neuron.irregular_noise, neuron.irregular_noise]
    assert torch.equal(net.batch_norm1.bias, torch.full((50,), neuron.drive_at_threshold / 2))
    with covary.record(net) as layers:
        out = net(torch.randn(64, 20))
    for name in ("activation1", "activation2"):
        rates, variances = layers[name].mean, layers[name].variance
        # Neither silent nor at the limit of 1 / t_ref: neurons pass gradients on.
        assert ((rates > 5e-3) & (rates < 0.15)).float().mean() > 0.9
        # By chance, not by the clock: what arrives is nearly white noise.
        assert (variances / rates).mean() > 0.7
    # What the readout makes of rates is neither nothing nor much.
    assert 0.05 < out.mean.std() < 5


def test_other_networks_start_as_they_did():
    plain = covary.mlp([20, 50, 3], activation="relu", batch_norm=True)
    assert covary.models.noise_of(plain) == [0.2, 0.2]
    assert torch.equal(plain.batch_norm1.bias, torch.zeros(50))
    assert plain.linear2.weight.abs().max() <= 50**-0.5


@pytest.mark.parametrize("covariance", covary.covariance.names())
def test_poisson_inputs_have_their_mean_as_variance(covariance):
    x = torch.rand(5, 4)
    out = covary.nn.Lift(0.5, covariance, poisson=True)(x)
    expected = x + 0.25
    if covariance == "shared":
        expected = expected.mean(0, keepdim=True).expand(5, 4)
    torch.testing.assert_close(out.variance, expected)
    weights = covary.nn.Linear(4, 3)
    made = weights(out).covariance_matrix
    dense = weights.weight @ torch.diag_embed(expected) @ weights.weight.mT
    if covariance == "diagonal":
        dense = torch.diag_embed(dense.diagonal(dim1=1, dim2=2))
    torch.testing.assert_close(made.expand(5, 3, 3), dense)


def test_poisson_inputs_are_not_negative():
    with pytest.raises(ValueError, match=r"takes rates, 0 or more, and got -0\.5"):
        covary.nn.Lift(0.0, poisson=True)(torch.tensor([[0.1, -0.5]]))


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"v_th": 0.0}, "v_th > v_res, got 0.0 and 0.0"),
        ({"v_res": 25.0}, "threshold above its reset"),
        ({"leak": 0.0}, "conductance leak > 0"),
        ({"leak": -1.0}, "conductance leak > 0"),
        ({"t_ref": -1.0}, "0 ms or more, got t_ref=-1"),
        ({"v_th": float("nan")}, "finite number as v_th"),
        ({"t_ref": "5"}, "finite number as t_ref"),
    ],
)
def test_constants_that_no_neuron_has(constants, message):
    with pytest.raises(ValueError, match=message):
        lif(**constants)


def test_names_of_neurons():
    assert repr(lif()) == "lif"
    assert repr(lif(t_ref=2)) == "lif(v_th=20, v_res=0, t_ref=2, leak=0.05)"
    assert repr(lif(t_ref=5.0000001)) != "lif"
    assert LIF(v_th=np.float32(20)) == LIF()
    assert activations.get("lif").neuron == LIF()
    assert activations.get("relu").neuron is None


@pytest.mark.parametrize("covariance", ["full", "tracked", "diagonal", "shared"])
@pytest.mark.parametrize("poisson", [False, True])
def test_networks_have_covariances_and_gradients(covariance, poisson):
    torch.manual_seed(0)
    net = covary.mlp(
        [6, 9, 7, 3], activation="lif", covariance=covariance, batch_norm=True, poisson=poisson
    )
    x = torch.rand(16, 6)
    out = net(x)
    eigenvalues = torch.linalg.eigvalsh(out.covariance_matrix.double())
    assert (eigenvalues[..., 0] >= -1e-6 * eigenvalues[..., -1]).all()
    out.mean.square().sum().backward()
    gradient = net.linear1.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().sum() > 0


def test_supervised_covariances_have_gradients():
    torch.manual_seed(0)
    net = covary.mlp([3, 5, 4, 2], activation="lif", noise=0.7).double()
    for layer in (net.linear1, net.linear2):
        torch.nn.init.constant_(layer.bias, 1.2)  # or they would be silent
    x = torch.randn(4, 3, dtype=torch.float64)

    def objective(weight: torch.Tensor) -> torch.Tensor:
        with covary.supervise_covariance():
            out = torch.func.functional_call(net, {"linear1.weight": weight}, (x,))
            return (1e6 * out.covariance_matrix).sum()

    weight = net.linear1.weight.detach().requires_grad_()
    assert objective(weight).abs() > 1e-3
    assert torch.autograd.gradcheck(objective, (weight,), eps=1e-6, atol=1e-5)


def test_many_networks_as_one():
    torch.manual_seed(0)
    mu, var = torch.randn(3, 4, 5) + 1, torch.rand(3, 1, 5)
    together = torch.func.vmap(lambda m, v: tuple(lif()(m, v)))(mu, var)
    for i in range(3):
        for stacked, alone in zip(together, lif()(mu[i], var[i]), strict=True):
            torch.testing.assert_close(stacked[i], alone)


def test_in_training_gradients_by_the_mean_are_gains():
    mu = torch.tensor([[0.3, 1.2, 2.5]], requires_grad=True)
    cov = covary.covariance.Diagonal(torch.tensor([[0.5, 0.2, 3.0]]))
    out = covary.nn.Activation("lif")(covary.Moments(mu, cov))
    (slope,) = torch.autograd.grad(out.mean.sum(), mu)
    torch.testing.assert_close(slope, lif()(mu, cov.variance).gain)


def test_tables_are_made_where_an_activation_arrives_without_them(monkeypatch):
    """As in a process that unpickles a network."""
    mu, var = torch.tensor([[0.5, 2.0]]), torch.ones(1, 1)
    activation = pickle.loads(pickle.dumps(lif()))
    expected = activation(mu, var)
    monkeypatch.setattr(dawson, "_TABLES", {})
    dawson._kept_rows.cache_clear()
    torch.testing.assert_close(activation(mu, var), expected, rtol=0, atol=0)


def test_a_neuron_that_was_not_called_is_pointed_at():
    with pytest.raises(ValueError, match=r"did you mean lif\(\), called\?"):
        covary.mlp([2, 3, 2], activation=lif)


def test_nan_stays_nan():
    out = lif()(torch.tensor([[torch.nan, 1.0]]), torch.ones(1, 2))
    for values in out:
        assert values[0, 0].isnan()
        assert values[0, 1].isfinite()


def test_networks_can_be_planned_without_memory():
    with torch.device("meta"):
        net = covary.mlp([5, 4, 3, 2], activation="lif", batch_norm=True)
    assert net.linear2.weight.is_meta


def test_batch_norm_behind_neurons_starts_with_what_it_will_see():
    torch.manual_seed(0)
    net = covary.mlp([100, 200, 150, 3], activation="lif", batch_norm=True)
    x = torch.randn(500, 100)
    with covary.record(net) as layers:
        net(x)  # in training mode: by statistics of the batch
    expected = layers["linear2"].mean.var(0).mean()
    fresh = covary.mlp([100, 200, 150, 3], activation="lif", batch_norm=True).batch_norm2
    assert 0.5 < fresh.running_var.mean() / expected < 2
