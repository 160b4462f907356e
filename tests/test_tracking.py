"""Corrections of tracked variances: measured in training and by covary.track, saved, judged."""

from __future__ import annotations

import copy
import math
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import covary
from covary import covariance, tracking
from covary.covariance import Full
from covary.moments import Moments
from covary.nn.fidelity import Fidelity, FidelityRow, TrackingWarning
from covary.tracking import track
from covary.uncertainty.agreement import agreement, gathered
from covary.uncertainty.metrics import rank_correlation
from tests import digits

unmeasured = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
GOOD, FAIR, POOR = (1.0, 0.01), (0.97, 0.2), (0.5, 0.9)  # rank, error


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network(*widths: int, covariance: str = "tracked", **options: object) -> nn.Sequential:
    """In double precision, with weights that make units share much noise."""
    net = covary.mlp(widths or (5, 20, 15, 4), covariance=covariance, noise=0.4, **options)  # type: ignore[arg-type]
    for layer in linears(net):
        layer.weight.data += 0.1
    return net.double()


def linears(net: nn.Module) -> list[covary.nn.Linear]:
    return [layer for layer in net.modules() if isinstance(layer, covary.nn.Linear)]


def inputs(size: int = 40, n: int = 5) -> Tensor:
    return torch.randn(size, n, dtype=torch.float64)


def log_ratio(net: nn.Module, x: Tensor) -> Tensor:
    """(B, n) by what the second layer's variances differ from those of the diagonal network."""
    variances = []
    for name in ("full", "diagonal"):
        twin = covary.with_covariance(net, name).eval()
        with torch.no_grad(), covary.record(twin) as layers:
            twin(x)
        variances.append(layers["linear2"].variance)
    return variances[0].log() - variances[1].log()


def corrections(net: nn.Module) -> list[Tensor]:
    return [layer.get_buffer("log_correction").clone() for layer in linears(net)]


# ---- in training


def test_training_averages_what_it_measures_then_follows_it():
    net = network()
    expected = torch.zeros(15, dtype=torch.float64)
    for step in range(14):
        x = inputs(6)
        net(x)
        # Of four samples; the first counts fully, and none less than a tenth.
        weight = max(1 / (step + 1), 0.1)
        expected += weight * (log_ratio(net, x[:4]).mean(0) - expected)
        torch.testing.assert_close(net.linear2.log_correction, expected)
    assert expected.abs().max() > 0.3
    assert net.linear2.probed.item() == 14 * 15
    assert net.linear1.probed.item() == 0, "its variances are exact"


@unmeasured
def test_evaluation_leaves_corrections_alone_and_uses_them():
    net = network()
    net(inputs())
    before = copy.deepcopy(net.state_dict())
    with covary.record(net.eval()) as layers:
        net(inputs())
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    diagonal = covary.with_covariance(net, "diagonal")
    net.eval()
    x = inputs()
    with covary.record(net) as layers, covary.record(diagonal) as uncorrected:
        net(x), diagonal(x)
    ratio = layers["linear2"].cov.unit_variance / uncorrected["linear2"].variance
    expected = net.linear2.log_correction.exp().expand(40, 15)
    torch.testing.assert_close(ratio, expected)


def test_units_take_turns():
    net, x = network(5, 20, 70, 4), inputs()
    expected = log_ratio(net, x[:4]).mean(0)
    for step in range(1, 4):
        net(x)
        seen = min(32 * step, 70)
        assert net.linear2.probed.item() == 32 * step
        torch.testing.assert_close(net.linear2.log_correction[:seen], expected[:seen])
        assert not net.linear2.log_correction[seen:].any()


def test_training_steps_in_every_precision_keep_corrections_in_that_of_the_network():
    net = covary.mlp([5, 8, 6, 4], covariance="tracked")
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(3):
        net(torch.randn(6, 5)).mean.square().sum().backward()
        optimizer.step()
    assert net.linear2.log_correction.dtype == torch.float32
    assert not net.linear2.log_correction.requires_grad
    net.double()(inputs(6))
    assert net.linear2.log_correction.dtype == torch.float64
    assert net.linear2.probed.dtype == torch.int64


# ---- saved and loaded


def measured(*, batch_norm: bool = False) -> nn.Sequential:
    net = network(batch_norm=batch_norm)
    track(net, inputs(), progress=False)
    return net.eval()


@pytest.mark.parametrize("options", [{}, {"batch_norm": True}], ids=str)
def test_state_dict_keeps_corrections_and_fidelity(tmp_path, options):
    net, other = measured(**options), network(**options).eval()
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    x = inputs()
    assert torch.equal(other(x).covariance_matrix, net(x).covariance_matrix)
    assert torch.equal(other.lift.fidelity, net.lift.fidelity)
    copied = copy.deepcopy(net)
    assert torch.equal(copied(x).covariance_matrix, net(x).covariance_matrix)


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_networks_that_do_not_track_fit_those_that_do(assign):
    plain, net = network(covariance="full"), measured()
    assert "linear2.log_correction" not in plain.state_dict()
    net.load_state_dict(plain.state_dict(), strict=True, assign=assign)
    assert torch.equal(net.linear2.weight, plain.linear2.weight)
    assert not any(correction.any() for correction in corrections(net))
    assert net.linear2.probed.item() == 0
    assert net.lift.fidelity is None
    with pytest.warns(TrackingWarning, match="never measured"):
        net(inputs())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["full", "diagonal", "shared"])
def test_weights_of_networks_that_track_fit_those_that_do_not(name, assign):
    net, plain = measured(), network(covariance=name).eval()
    plain.load_state_dict(net.state_dict(), strict=True, assign=assign)
    x = inputs()
    expected = covary.with_covariance(net, name)(x)
    assert torch.equal(plain(x).covariance_matrix, expected.covariance_matrix)
    tracked = covary.with_covariance(plain, "tracked")
    assert torch.equal(tracked(x).covariance_matrix, net(x).covariance_matrix)


def test_what_does_not_fit_is_still_refused():
    state = measured().state_dict()
    with pytest.raises(RuntimeError, match="size mismatch for linear2"):
        network(5, 20, 16, 4).load_state_dict(state)
    del state["linear2.probed"]
    with pytest.raises(RuntimeError, match=r"Missing key.*linear2\.probed"):
        network().load_state_dict(state)


# ---- covary.track


@pytest.mark.parametrize("name", covariance.names())
def test_track_measures_what_brute_force_does(name):
    """Behind the second weight, where what stands before is exact."""
    net, x = network(covariance=name), inputs(64)
    track(net, x, progress=False)
    expected = log_ratio(net, x[::2]).mean(0)
    torch.testing.assert_close(net.linear2.log_correction, expected)


@pytest.mark.parametrize("trunk", [False, True])
def test_after_track_no_layer_is_off_on_average(trunk):
    net, x = network(5, 20, 15, 12, 4, batch_norm=True), inputs(64)
    if trunk:
        net = nn.Sequential(nn.Linear(5, 5).double(), nn.Tanh(), net)
    covary.with_covariance(net, "full").train()(x)  # statistics of batch norm
    track(net, x, progress=False)
    tracked = covary.with_covariance(net, "tracked:0").eval()
    with torch.no_grad(), covary.record(tracked) as layers:
        tracked(x[::2])
    for name, layer in layers.items():
        if "linear" in name:
            off = (layer.variance / layer.cov.unit_variance).log().mean(0)
            torch.testing.assert_close(off, torch.zeros_like(off), rtol=0, atol=1e-9, msg=name)


def as_loader(x: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, torch.zeros(len(x))), batch_size=16)


@pytest.mark.parametrize(
    "given",
    [lambda x: x.split(7), lambda x: list(x.split(7)), lambda x: iter(x.split(7)), as_loader],
    ids=["tuple of batches", "list of batches", "iterator", "loader of tuples"],
)
def test_track_takes_batches_as_they_come(given):
    net, x = network(), inputs(100)
    expected = track(net, x[:64], progress=False)
    before = corrections(net)
    assert track(net, given(x), samples=64, progress=False) == expected
    torch.testing.assert_close(corrections(net), before)


def test_track_replaces_what_was_measured_before():
    net, x = network(), inputs(64)
    track(net, 5 * inputs(64), progress=False)
    track(net, x, progress=False)
    torch.testing.assert_close(net.linear2.log_correction, log_ratio(net, x[::2]).mean(0))


def test_track_leaves_the_rest_of_the_network_alone(capsys):
    net = network(batch_norm=True, dropout=0.3)
    net.activation1.eval()
    modes = [module.training for module in net.modules()]
    before = copy.deepcopy(net.state_dict())
    gradients = []
    net.linear2.register_forward_hook(lambda *_: gradients.append(torch.is_grad_enabled()))
    with covary.supervise_covariance():
        track(net, inputs())
    assert [module.training for module in net.modules()] == modes
    assert all(parameter.grad is None for parameter in net.parameters())
    assert len(gradients) >= 3, "to measure, exact, and tracked"
    assert not any(gradients)
    for name, value in before.items():
        if "log_correction" not in name and "probed" not in name:
            assert torch.equal(net.state_dict()[name], value), name
    assert capsys.readouterr() == ("", "")


def test_twins_made_before_see_what_track_found():
    net = network(covariance="shared")
    twin = covary.with_covariance(net, "tracked").eval()
    fidelity = track(net, inputs(), progress=False)
    assert Fidelity.of(twin.lift.fidelity) == fidelity
    after = covary.with_covariance(net, "tracked").eval()
    x = inputs()
    assert torch.equal(twin(x).covariance_matrix, after(x).covariance_matrix)
    assert f"tracked:{twin(x).cov.exact_width}" == fidelity.named("tracked")


@pytest.mark.parametrize(
    ("numbers", "tolerance"),
    [(20 * 20 * 3, 0.05), (20 * 20, 1e-9), (20 * 10, 1e-9), (20 * 3, 0.05)],
    ids=["3 samples", "1 sample", "10 units", "3 units"],
)
def test_units_and_samples_may_take_turns(monkeypatch, numbers, tolerance):
    net, x = network(5, 20, 20, 12, 4), inputs(40)
    track(net, x, progress=False)
    expected = corrections(net)
    monkeypatch.setattr(tracking, "_NUMBERS_AT_A_TIME", numbers)
    track(net, x, progress=False)
    found = corrections(net)
    # Behind corrections that are still being measured, others are not quite the same.
    torch.testing.assert_close(found[2:], expected[2:], rtol=0, atol=0.1)
    # The second layer has none before it; but 20 samples, or units, do not divide by three.
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=tolerance)
    assert expected[2].abs().max() > 0.3


@pytest.mark.parametrize(
    ("batches", "options", "error", "message"),
    [
        (torch.zeros(0, 5), {}, ValueError, "2 samples at least, and got 0"),
        ([], {}, ValueError, "and got 0"),
        (torch.zeros(1, 5), {}, ValueError, "and got 1"),
        (torch.zeros(9, 5), {"samples": 1}, ValueError, "2 samples at least, got samples=1"),
        ([{"x": torch.zeros(9, 5)}], {}, TypeError, "got a batch of dict"),
        ([np.zeros((9, 5))], {}, TypeError, "got a batch of ndarray"),
        (torch.zeros(9, 4), {}, ValueError, "Linear expects 5 features, got 4"),
    ],
    ids=str,
)
def test_bad_batches_are_named(batches, options, error, message):
    net = covary.mlp([5, 4, 3])
    with pytest.raises(error, match=message):
        track(net, batches, progress=False, **options)
    assert net.lift.fidelity is None
    assert all(getattr(layer, "probe", None) is None for layer in net)


def test_bad_networks_are_named():
    x = torch.zeros(9, 5)
    with pytest.raises(ValueError, match=r"or one of covary\.nn layers with a Lift"):
        track(nn.Linear(5, 3), x)
    with pytest.raises(ValueError, match=r"before torch\.compile"):
        track(torch.compile(covary.mlp([5, 4, 3])), x)

    class Mean(nn.Module):
        def forward(self, out: Moments) -> Tensor:
            return out.mean

    with pytest.raises(TypeError, match="that gives Moments, this gave Tensor"):
        track(nn.Sequential(covary.mlp([5, 4, 3]), Mean()), x)


# ---- how good they are


def fidelity(**rows: tuple[float, float]) -> Fidelity:
    return Fidelity(tuple(FidelityRow(int(width[1:]), *values) for width, values in rows.items()))


@pytest.mark.parametrize(
    ("known", "chosen"),
    [
        (fidelity(_0=GOOD, _8=GOOD), "tracked:0"),
        (fidelity(_0=FAIR, _8=GOOD, _16=GOOD), "tracked:8"),
        (fidelity(_0=POOR, _8=(1.0, 0.11), _16=(0.989, 0.01)), "tracked:16"),
        (fidelity(_0=FAIR, _8=POOR), "tracked:0"),
        (fidelity(_0=(math.nan, 0.0), _8=GOOD), "tracked:0"),
        (fidelity(), "tracked"),
    ],
)
def test_the_least_that_is_good_is_chosen_or_else_the_best(known, chosen):
    assert known.named("tracked") == chosen
    assert known.named("tracked:12") == "tracked:12", "who asks gets"
    table = torch.tensor(known.rows, dtype=torch.float64).reshape(-1, 3)
    assert Fidelity.of(table).named("tracked") == chosen


@pytest.mark.parametrize(
    ("known", "asked", "message"),
    [
        (fidelity(), "tracked", r"never measured since .*covary\.track\(net, loader\)"),
        (
            fidelity(_0=POOR, _8=GOOD),
            "tracked:0",
            r"poor when stored as tracked:0 .*0\.500, .*off by 90%",
        ),
        (fidelity(_0=POOR, _8=GOOD), "tracked:7", r"as tracked:7 .*'tracked:8'\) .*1\.000"),
        (fidelity(_0=POOR, _8=FAIR), "tracked:0", r"Better: .*\(net, 'tracked:8'\)"),
        (
            fidelity(_0=POOR, _8=POOR),
            "tracked",
            r"Better: .*with_covariance\(net, 'full'\) \(exact\)",
        ),
        (fidelity(_0=(math.nan, 0.3)), "tracked", r"rank correlation of entropies undefined"),
        (fidelity(_0=(1.0, math.nan)), "tracked", r"'full'"),
    ],
)
def test_poor_ones_are_warned_of_once(known, asked, message):
    net = covary.mlp([5, 20, 8, 3], covariance=asked)
    net.lift.fidelity = torch.tensor(known.rows, dtype=torch.float64) if known.rows else None
    x = torch.randn(4, 5)
    net.eval()
    with pytest.warns(TrackingWarning, match=message) as caught:
        net(x).mean, net(x).mean
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("known", "asked"),
    [
        (fidelity(_0=GOOD), "tracked"),
        (fidelity(_0=FAIR), "tracked"),
        (fidelity(_0=POOR, _8=GOOD), "tracked"),
        (fidelity(_0=POOR, _8=GOOD), "tracked:9"),
        (fidelity(_0=(math.nan, 0.0)), "tracked"),
    ],
)
def test_good_ones_are_not_warned_of(known, asked):
    net = covary.mlp([5, 20, 8, 3], covariance=asked)
    net.lift.set_fidelity(known)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = net.eval()(torch.randn(4, 5))
    assert f"tracked:{out.cov.exact_width}" == known.named(asked)


def test_training_forgets_what_is_known_and_warns_of_nothing():
    net = measured()
    net(inputs())
    assert net.lift.fidelity is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        net.train()(inputs())
    assert net.lift.fidelity is None
    assert "lift.fidelity" not in net.state_dict()
    with pytest.warns(TrackingWarning, match="never measured since it was last trained"):
        covary.with_covariance(net, "tracked").eval()(inputs())


def test_the_table_is_what_comparing_gives():
    net, x = network(5, 20, 15, 12, 4), inputs(80)
    found = track(net, x, progress=False)
    assert [row.units for row in found.rows] == [0, 12, 15]
    with torch.no_grad():
        exact = covary.with_covariance(net, "full").eval()(x[1::2])
        for width, rank, error in found.rows:
            twin = covary.with_covariance(net, f"tracked:{width}").eval()
            agrees = agreement(exact, twin(x[1::2]))
            assert (agrees.rank, agrees.covariance) == pytest.approx((rank, error), abs=1e-7)
    assert found.rows[-1].error < 1e-9, "every layer formed"
    assert found.rows[0].error > 1e-3


@cache
def trained() -> nn.Sequential:
    return digits.trained("relu", 0.2, epochs=10)


def test_a_trained_relu_network_tracks_its_entropies():
    net = trained()
    x, _, test, _ = digits.data()
    found = track(net, as_loader(x), progress=False)
    assert found.rows[0].is_good
    tracked = covary.with_covariance(net, "tracked").eval()
    with torch.no_grad():
        exact, out = net(test), tracked(test)
        for layer in linears(copied := copy.deepcopy(tracked)):
            layer.log_correction.zero_()
        uncorrected = copied(test)
    assert rank_correlation(exact.entropy(), out.entropy()) > 0.99
    agrees = agreement(exact, out)
    assert agrees.covariance < agreement(exact, uncorrected).covariance / 2
    assert agrees.covariance < 0.1
    assert agrees.mean < 0.01
    assert agrees.argmax < 0.01


# ---- agreement


def test_agreement_has_the_values_it_should():
    eye = torch.eye(2, dtype=torch.float64)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    mean = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    exact = Moments(mean, Full(torch.stack([eye, 2 * eye, 3 * eye]), zero))
    other_mean = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    off = torch.stack([1.5 * eye, 2 * eye, eye])
    off[1, 0, 1] = off[1, 1, 0] = 1.0
    agrees = agreement(exact, Moments(other_mean, Full(off, zero)))
    assert agrees.mean == pytest.approx((0 + math.sqrt(2) + 0) / 3)
    assert agrees.variance == pytest.approx((0.5 + 0 + 2 / 3) / 3)
    assert agrees.covariance == pytest.approx((0.5 + 0.5 + 2 / 3) / 3)
    # Entropies by determinant: exact 1, 4, 9, and 2.25, 3, 1.
    assert agrees.rank == pytest.approx(-0.5)
    assert agrees.argmax == pytest.approx(1 / 3)
    same = agreement(exact, exact)
    assert same == pytest.approx((0, 0, 0, 1, 0))


def test_agreement_where_there_is_no_covariance():
    mean = torch.ones(3, 2)
    nothing = Moments(mean, Full(torch.zeros(3, 2, 2), torch.zeros(1, 1)))
    agrees = agreement(nothing, nothing)
    assert agrees[:3] == (0, 0, 0)
    assert math.isnan(agrees.rank)
    something = Moments(mean, Full(torch.eye(2).expand(3, 2, 2), torch.zeros(1, 1)))
    assert agreement(nothing, something).covariance == math.inf
    assert agreement(something, nothing).covariance == 1


@unmeasured
@pytest.mark.parametrize("name", covariance.names())
def test_gathered_batches_are_one(name):
    net, x = network(covariance=name).eval(), inputs(9)
    parts = [net(part) for part in x.split(4)]
    whole = gathered(parts)
    torch.testing.assert_close(whole.mean, torch.cat([part.mean for part in parts]))
    expected = torch.cat([part.covariance_matrix for part in parts])
    torch.testing.assert_close(whole.covariance_matrix, expected)
