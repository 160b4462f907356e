"""Where tracked covariances could go wrong unnoticed: stale knowledge, aliases, odd weights."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import covary
from covary import covariance, linalg, tracking
from covary.covariance import tracked as remembered
from covary.nn.fidelity import Fidelity, FidelityRow, TrackingWarning
from tests.spies import calls_of

unmeasured = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")
GOOD = Fidelity((FidelityRow(0, 1.0, 0.01),))
POOR = Fidelity((FidelityRow(0, 0.5, 0.9),))
POOR_BUT_FOR_15 = Fidelity((FidelityRow(0, 0.5, 0.9), FidelityRow(15, 1.0, 0.0)))
# More inputs than units: what the first weight makes of their noise is formed once for a batch.
WIDTHS = (30, 20, 15, 4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def network(*widths: int, covariance: str = "tracked", **options: Any) -> nn.Sequential:
    """In double precision and evaluation mode, with weights that make units share much noise."""
    net = covary.mlp(widths or WIDTHS, covariance=covariance, noise=0.4, **options)
    for layer in linears(net):
        layer.weight.data += 0.1
    return net.double().eval()


def linears(net: nn.Module) -> list[covary.nn.Linear]:
    return [layer for layer in net.modules() if isinstance(layer, covary.nn.Linear)]


def inputs(size: int = 50, n: int = WIDTHS[0]) -> Tensor:
    return torch.randn(size, n, dtype=torch.float64)


def exact(net: nn.Module, x: Tensor) -> Tensor:
    return covary.with_covariance(net, "full")(x).covariance_matrix


def said(net: nn.Module) -> list[str]:
    """What is warned of when the network is used."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net(inputs())
    return [str(warning.message) for warning in caught]


# ---- what is known does not outlive the weights it is known of


@pytest.mark.parametrize("name", covariance.names())
def test_a_training_pass_forgets_the_fidelity_however_covariances_are_stored(name):
    net = network(covariance="full")
    covary.track(net, inputs(), progress=False)
    fast = covary.with_covariance(net, "tracked").eval()
    training = covary.with_covariance(net, name).train()
    with torch.no_grad():
        training(inputs())
    assert net.lift.fidelity is not None, "without gradients no step follows"
    assert said(fast) == []
    training(inputs())
    assert net.lift.fidelity is None
    assert "never measured since it was last trained" in said(fast)[0]


@pytest.mark.parametrize("where", ["agreement", "gathered", "_measure"])
def test_an_interrupted_track_leaves_no_fidelity(monkeypatch, where):
    net = network()
    covary.track(net, inputs(), progress=False)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking, where, interrupt)
        with pytest.raises(KeyboardInterrupt):
            covary.track(net, 3 * inputs(), progress=False)
    assert net.lift.fidelity is None
    assert "never measured" in said(net)[0]
    covary.track(net, inputs(), progress=False)
    assert said(net) == []


# ---- warnings


def test_another_width_than_the_good_one_is_warned_of():
    net = network()
    net.lift.set_fidelity(POOR_BUT_FOR_15)
    assert said(net) == []
    poor = covary.with_covariance(net, "tracked:0")
    assert "poor when stored as tracked:0" in said(poor)[0]
    assert said(poor) == [], "once"
    assert said(covary.with_covariance(poor, "tracked")) == []


def test_every_new_table_is_judged_anew_and_by_every_network():
    net = network(covariance="full")
    fast = covary.with_covariance(net, "tracked").eval()
    assert "never measured" in said(fast)[0]
    for table, message in [(POOR, "are poor"), (GOOD, ""), (POOR, "are poor")]:
        net.lift.set_fidelity(table)
        also = covary.with_covariance(net, "tracked").eval()
        for twin in (fast, also):
            found = said(twin)
            assert [message in warning for warning in found] == [True] * bool(message)
            assert said(twin) == [], "once"


def test_a_network_in_use_warns_when_another_trains_its_weights():
    net = network(covariance="shared")
    net.lift.set_fidelity(GOOD)
    fast = covary.with_covariance(net, "tracked").eval()
    assert said(fast) == []
    net.train()(inputs())
    assert "never measured since it was last trained" in said(fast)[0]
    assert said(fast) == [], "once"


@pytest.mark.parametrize("wrap", [lambda net: net, nn.Sequential], ids=["bare", "wrapped"])
def test_a_warning_names_the_line_that_used_the_network(wrap):
    net = wrap(network())
    with warnings.catch_warnings(record=True) as caught, covary.record(net):
        warnings.simplefilter("always")
        line = sys._getframe().f_lineno + 1
        net(inputs())
    assert [(warning.filename, warning.lineno) for warning in caught] == [(__file__, line)]


def test_files_beside_the_library_are_not_in_it():
    beside = f"{Path(covary.__file__).parent}_experiments/use.py"
    scope = {}
    exec(compile("def use(net, x):\n    net(x)", beside, "exec"), scope)
    with pytest.warns(TrackingWarning) as caught:
        scope["use"](network(), inputs())
    assert (caught[0].filename, caught[0].lineno) == (beside, 2)


def test_two_networks_both_warn_where_python_shows_each_line_once():
    one, other = network(), network()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            one(inputs())
            other(inputs())
    assert len(caught) == 2


# ---- what track looks at


def test_of_a_tensor_track_takes_even_parts_and_compares_between_them():
    """Data may be sorted; both halves see all of it."""
    net, seen = network(3, 8, 6, 2), {"measured": [], "compared": []}
    rows = torch.arange(1000.0, dtype=torch.float64)[:, None].expand(-1, 3) / 1000

    def see(lift: covary.nn.Lift, given: tuple[Tensor]) -> None:
        # Exact covariances are only computed to compare with, and after all was measured.
        if lift.covariance == "full":
            seen["compared"] += given[0][:, 0].tolist()
        elif not seen["compared"]:
            seen["measured"] += given[0][:, 0].tolist()

    net.lift.register_forward_pre_hook(see)
    covary.track(net, rows, samples=100, progress=False)
    every = torch.arange(0, 1000, 10) / 1000
    assert sorted({*seen["measured"]}) == pytest.approx(every[::2].tolist())
    assert seen["compared"] == pytest.approx(every[1::2].tolist())


@pytest.mark.parametrize("size", [2, 31, 33, 101])
def test_a_tensor_of_any_length_is_seen_to_its_end(size):
    x = torch.arange(float(size))[:, None]
    (found,) = tracking._taken(x, 32, lambda batch: batch[:, 0])
    assert len(found) == min(size, 32)
    assert found[0] == 0
    assert found[-1] >= size - 1 - size / 32
    assert (found.diff() > 0).all(), "none twice"


@pytest.mark.parametrize(
    "layers", [[], [covary.nn.ReLU()], [covary.nn.BatchNorm1d(30)]], ids=["none", "ReLU", "norm"]
)
def test_track_needs_weights(layers):
    net = nn.Sequential(covary.nn.Lift(0.2), *layers)
    with pytest.raises(ValueError, match=r"with a covary\.nn\.Linear; this has none"):
        covary.track(net, torch.randn(40, 30))


@unmeasured
def test_a_layer_in_evaluation_mode_keeps_its_corrections():
    net = network(30, 20, 15, 12, 4).train()
    net(inputs())
    net.linear2.eval()  # as those of a part that is frozen are
    before = [layer.get_buffer("log_correction").clone() for layer in linears(net)]
    counted = [layer.get_buffer("probed").item() for layer in linears(net)]
    net(inputs())
    now = [layer.get_buffer("log_correction") for layer in linears(net)]
    assert torch.equal(now[1], before[1])
    assert not torch.equal(now[2], before[2])
    assert [layer.get_buffer("probed").item() for layer in linears(net)] == [
        counted[0],
        counted[1],
        2 * counted[2],
        2 * counted[3],
    ]


# ---- weights of all kinds


@unmeasured
@pytest.mark.parametrize("exact_width", [0, 15, 100])
@pytest.mark.parametrize("position", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 50], ids=lambda size: f"batch {size}")
def test_a_weight_need_not_be_contiguous(position, exact_width, size):
    net = network(covariance=f"tracked:{exact_width}")
    other = copy.deepcopy(net)
    layer = other.get_submodule(f"linear{position}")
    layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)
    assert not layer.weight.is_contiguous()
    x = inputs(size)
    for mode in (torch.no_grad, covary.supervise_covariance):
        with mode(), covary.record(net) as expected, covary.record(other) as found:
            net(x), other(x)
        for name, moments in expected.items():
            matrix = found[name].covariance_matrix
            torch.testing.assert_close(matrix, moments.covariance_matrix, msg=name)
            torch.testing.assert_close(found[name].variance, moments.variance, msg=name)


def test_a_decoder_may_have_the_weight_of_its_encoder():
    encoder, decoder = covary.nn.Linear(30, 12), covary.nn.Linear(12, 30)
    decoder.weight = nn.Parameter(encoder.weight.T)
    net = nn.Sequential(covary.nn.Lift(0.3), encoder, covary.nn.Noise(0.3), covary.nn.ReLU())
    net = nn.Sequential(*net, decoder, covary.nn.ReLU(), covary.nn.Linear(30, 2)).double()
    assert not decoder.weight.is_contiguous()
    covary.track(net, inputs(), progress=False)
    fast = covary.with_covariance(net, "tracked:100")
    with torch.no_grad():
        x = inputs()
        torch.testing.assert_close(fast.eval()(x).covariance_matrix, exact(net, x))
        covary.with_covariance(net, "tracked").train()(x)
    assert torch.isfinite(decoder.get_buffer("log_correction")).all()


# ---- values that stay what they are


@unmeasured
@pytest.mark.parametrize("exact_width", [0, 15, 100])
@pytest.mark.parametrize("supervised", [False, True], ids=["SMUC", "SMSC"])
def test_changing_in_place_what_was_looked_at_changes_no_later_look(supervised, exact_width):
    net = network(30, 70, 15, 4, covariance=f"tracked:{exact_width}")
    with covary.supervise_covariance(supervised), covary.record(net) as layers:
        net(inputs(5))
    for name, moments in layers.items():
        matrix, variance = moments.covariance_matrix, moments.variance
        before = [value.detach().clone() for value in (matrix, variance, moments.entropy())]
        matrix[0].mul_(3)
        variance[0].add_(1)
        after = [moments.covariance_matrix, moments.variance, moments.entropy()]
        torch.testing.assert_close(after, before, rtol=1e-12, atol=0, msg=name)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
}
copied_both_ways = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@unmeasured
@copied_both_ways
@pytest.mark.parametrize("looked_at", [False, True])
def test_a_copy_of_an_output_has_its_covariance_or_is_refused(copied, looked_at):
    net, x = network(), inputs()
    with torch.no_grad():
        net.linear2.weight.mul_(1.5)  # so that changes were counted before, as after training
        expected = net(x).covariance_matrix
        out = net(x)
        if looked_at:
            out.entropy()
        early = copied(out)
        net.linear2.weight.mul_(3)
        with pytest.raises(RuntimeError, match="weights were changed"):
            copied(out)
    assert torch.equal(early.covariance_matrix, expected), "a copy has weights of its own"
    assert torch.equal(copied(early).covariance_matrix, expected)


@unmeasured
@pytest.mark.parametrize("training", [True, False])
def test_outputs_of_equal_networks_are_alike_as_trees(training):
    net = network(covariance="tracked:15").train(training)
    other = network(covariance="tracked:15").train(training)
    other(inputs()).entropy()
    leaves, structure = pytree.tree_flatten(net(inputs()))
    assert pytree.tree_structure(other(inputs())) == structure
    assert all(isinstance(leaf, Tensor) for leaf in leaves)


# ---- what is remembered of the first weight


def half_its_weight(net: Any) -> None:
    net.linear1.weight.data.mul_(0.5)  # which no counter of changes sees


def turn_one_unit_around(net: Any) -> None:
    net.linear1.weight.data[0].neg_()  # which no norm sees


def give_other_weight(net: Any) -> None:
    net.linear1.weight.data = torch.rand_like(net.linear1.weight)


def load_others(net: Any) -> None:
    net.load_state_dict(network(covariance="full").state_dict())


def assign_others(net: Any) -> None:
    net.load_state_dict(network().state_dict(), assign=True)


def round_to_single(net: Any) -> None:
    net.float()(inputs().float()).entropy()
    net.double()


def make_noisier(net: Any) -> None:
    net.lift.noise = 0.9


CHANGES = [
    half_its_weight,
    turn_one_unit_around,
    give_other_weight,
    load_others,
    assign_others,
    round_to_single,
    make_noisier,
]


@pytest.fixture
def grams(monkeypatch) -> list[tuple[Tensor, ...]]:
    """Grows by one with every W W^T that is computed."""
    return calls_of(monkeypatch, linalg, "lower_half_of_gram")


@unmeasured
@pytest.mark.parametrize("change", CHANGES)
def test_entropies_are_right_whatever_changed_since_the_last_batch(change, grams):
    net, x = network(covariance="tracked:15"), inputs()
    with torch.no_grad():
        before = net(x).entropy()
        torch.testing.assert_close(net(x).entropy(), before)
        assert len(grams) == 1, "remembered"
        change(net)
        expected = covary.with_covariance(net, "full")(x).entropy()
        # Closer than what single precision leaves of weights.
        torch.testing.assert_close(net(x).entropy(), expected, rtol=1e-11, atol=0)
        assert not torch.equal(expected, before)


@unmeasured
def test_weights_changed_unseen_before_the_look_leave_nothing_wrong_behind():
    net, x = network(covariance="tracked:0"), inputs()
    with torch.no_grad():
        out = net(x)
        half_its_weight(net)
        out.entropy()
        with covary.record(net) as layers:
            net(x)
        fresh = net.linear1.weight.square() @ layers["lift"].cov.unit_variance[0]
        torch.testing.assert_close(layers["linear1"].cov.unit_variance[0], fresh)


@unmeasured
@copied_both_ways
def test_copies_of_a_layer_do_not_carry_what_it_remembers(copied, grams):
    net, x = network(covariance="tracked:15"), inputs()
    size = len(pickle.dumps(net))
    with torch.no_grad():
        expected = net(x).covariance_matrix
        assert len(pickle.dumps(net)) < size + 200
        assert torch.equal(copied(net)(x).covariance_matrix, expected)
    assert len(grams) == 2


@unmeasured
def test_what_is_remembered_goes_with_the_weight(grams):
    net, x = network(covariance="tracked:15"), inputs()
    with torch.no_grad():
        net(x).entropy()
    kept = weakref.ref(remembered._grams[net.linear1.weight].half)
    assert kept() is not None
    del net, grams[:]
    gc.collect()
    assert kept() is None


@unmeasured
def test_single_rows_use_what_is_remembered(grams):
    net, x = network(), inputs(5)
    rows = torch.randn(5, 1, 4, dtype=torch.float64)
    with torch.no_grad():
        pulled = net(x).cov.quadratic(rows)
        assert not grams, "too few rows to make up for it"
        net(inputs(50)).entropy()
        torch.testing.assert_close(net(x).cov.quadratic(rows), pulled)
        torch.testing.assert_close(net(x).project(rows).covariance_matrix, pulled)
    assert len(grams) == 1


@unmeasured
def test_what_inference_mode_leaves_serves_gradients_too():
    net, x = covary.with_noise(network(), [0.4, 0.0, 0.0]), inputs()
    with torch.inference_mode():
        expected = net(x).covariance_matrix
    out = net(x)
    torch.testing.assert_close(out.covariance_matrix, expected.clone())
    out.mean.sum().backward()
    assert net.linear1.weight.grad.any()


@unmeasured
def test_threads_share_what_is_remembered():
    net, batches = network(covariance="tracked:15"), [inputs() for _ in range(24)]

    def look(x: Tensor) -> Tensor:
        with torch.no_grad():
            return net(x).covariance_matrix

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(look, batches))
    torch.testing.assert_close(found, [look(x) for x in batches])
