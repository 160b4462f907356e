"""Moments: entropy, draws and densities, singular covariances included."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

import covary
from covary import covariance, linalg
from covary.covariance import Diagonal, Full, Shared
from covary.moments import Moments
from covary.training.replicas import Replicas

# Networks here are made to be looked at, and never measured.
pytestmark = pytest.mark.filterwarnings("ignore::covary.nn.fidelity.TrackingWarning")


def full(matrix: torch.Tensor) -> Full:
    return Full(matrix, torch.zeros(1, 1, dtype=matrix.dtype))


def random_psd(batch: int, n: int, rank: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    root = torch.randn(batch, n, rank, dtype=torch.float64)
    return (root @ root.mT).to(dtype)


def moments(matrix: torch.Tensor) -> Moments:
    return Moments(torch.randn(matrix.shape[:-1], dtype=matrix.dtype), full(matrix))


def subspace_entropy(matrix: torch.Tensor, rank: int) -> float:
    """By definition: the entropy of the Gaussian within the span of its largest eigenvectors."""
    eigenvalues = torch.linalg.eigvalsh(matrix.double())[-rank:]
    return 0.5 * (rank * (1 + math.log(2 * math.pi)) + eigenvalues.log().sum().item())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", covariance.names())
def test_shapes_and_names(name):
    out = covary.mlp([6, 5, 4, 3], covariance=name)(torch.randn(4, 6))
    assert out.mean.shape == out.variance.shape == out.stddev.shape == (4, 3)
    assert out.covariance_matrix.shape == (4, 3, 3)
    assert out.entropy().shape == (4,)
    assert out.sample((7, 2)).shape == (7, 2, 4, 3)
    assert out.sample(7).shape == (7, 4, 3)
    assert out.distribution().batch_shape == (4,)
    torch.testing.assert_close(out.stddev**2, out.variance)
    torch.testing.assert_close(out.covariance_matrix.diagonal(dim1=1, dim2=2), out.variance)


def test_entropy_is_that_of_the_gaussian():
    matrix = random_psd(3, 5, rank=9)
    entropy = moments(matrix).entropy()
    for i in range(3):
        assert entropy[i].item() == pytest.approx(
            stats.multivariate_normal(None, matrix[i]).entropy()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_entropy_of_a_singular_covariance_is_that_of_its_subspace(dtype, rank):
    matrix = random_psd(4, 5, rank, dtype)
    for i, entropy in enumerate(moments(matrix).entropy().tolist()):
        assert entropy == pytest.approx(subspace_entropy(matrix[i], rank), abs=1e-3)


def test_one_singular_sample_does_not_change_the_others():
    matrix = random_psd(6, 4, rank=8)
    alone = moments(matrix).entropy()
    matrix[2] = random_psd(1, 4, rank=2)[0]
    together = moments(matrix).entropy()
    kept = [0, 1, 3, 4, 5]
    assert torch.equal(together[kept], alone[kept])
    assert together[2].item() == pytest.approx(subspace_entropy(matrix[2], 2))


def test_entropy_tolerance_is_relative():
    """Scaling by s adds n log s and leaves the rank alone; an absolute tolerance would not."""
    matrix = random_psd(3, 4, rank=3)
    for scale in (1e-12, 1e12):
        expected = moments(matrix).entropy() + 0.5 * 3 * math.log(scale)
        torch.testing.assert_close(moments(matrix * scale).entropy(), expected)


def test_entropy_rtol_decides_what_counts():
    matrix = torch.diag_embed(torch.tensor([[1.0, 1e-3, 1e-9]], dtype=torch.float64))
    out = moments(matrix)
    assert out.entropy().item() == pytest.approx(subspace_entropy(matrix[0], 2))
    assert out.entropy(rtol=1e-2).item() == pytest.approx(subspace_entropy(matrix[0], 1))
    assert out.entropy(rtol=0).item() == pytest.approx(subspace_entropy(matrix[0], 3))
    with pytest.raises(ValueError, match=r"in \[0, 1\), got 10"):
        out.entropy(rtol=10)


def test_entropy_without_any_variance_is_minus_infinity():
    out = moments(torch.stack([torch.zeros(3, 3), torch.eye(3)]))
    assert out.entropy()[0] == -math.inf
    assert out.entropy()[1] == pytest.approx(1.5 * (1 + math.log(2 * math.pi)))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("hold", [full, lambda matrix: Diagonal(matrix.diagonal(dim1=1, dim2=2))])
def test_a_sample_that_is_not_finite_has_no_entropy_and_spoils_no_other(bad, hold):
    matrix = torch.eye(3).repeat(3, 1, 1)
    matrix[1, 0, 0] = bad
    out = Moments(torch.zeros(3, 3), hold(matrix))
    assert out.entropy().isnan().tolist() == [False, True, False]
    assert torch.isfinite(out.sample((5,))[:, [0, 2]]).all()


@pytest.mark.parametrize("rank", [2, 4])
def test_entropy_has_gradients(rank):
    root = torch.randn(3, 4, rank, dtype=torch.float64, requires_grad=True)

    def entropy(root: torch.Tensor) -> torch.Tensor:
        return Moments(torch.zeros(3, 4, dtype=torch.float64), full(root @ root.mT)).entropy()

    assert torch.autograd.gradcheck(entropy, root)


def test_gradients_of_regular_samples_survive_a_singular_one():
    matrix = random_psd(3, 4, rank=8)
    matrix[1] = 0
    matrix.requires_grad_()
    entropy = moments(matrix).entropy()
    (gradient,) = torch.autograd.grad(entropy[[0, 2]].sum(), matrix)
    torch.testing.assert_close(gradient[[0, 2]], 0.5 * torch.linalg.inv(matrix[[0, 2]]))
    assert (gradient[1] == 0).all()


@pytest.mark.parametrize(
    "cov",
    [
        Full.independent(torch.full((1, 1), 0.3), 4),
        Full(None, torch.rand(3, 4)),
        Diagonal(torch.rand(1, 4)),
        Shared(Full.independent(torch.full((1, 1), 0.3), 4)),
    ],
    ids=lambda cov: type(cov).__name__,
)
def test_entropy_of_diagonal_covariances_is_that_of_the_matrix(cov):
    out = Moments(torch.zeros(3, 4), cov)
    dense = moments(out.covariance_matrix)
    assert out.entropy().shape == (3,)
    torch.testing.assert_close(out.entropy(), dense.entropy())


@pytest.mark.parametrize("rank", [2, 6])
def test_samples_have_the_moments(rank):
    out = moments(random_psd(2, 4, rank))
    draws = out.sample((200_000,), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.mean(0), out.mean, rtol=0, atol=0.05)
    for i in range(2):
        found = torch.cov(draws[:, i].T)
        torch.testing.assert_close(found, out.covariance_matrix[i], rtol=0, atol=0.1)


def test_samples_repeat_with_a_generator_and_carry_no_gradient():
    out = covary.mlp([6, 5, 3])(torch.randn(4, 6))
    first, second = (out.sample((2,), generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad


def test_distribution_has_the_moments_and_the_entropy():
    out = moments(random_psd(3, 4, rank=8))
    gaussian = out.distribution()
    torch.testing.assert_close(gaussian.mean, out.mean)
    torch.testing.assert_close(gaussian.covariance_matrix, out.covariance_matrix)
    torch.testing.assert_close(gaussian.entropy(), out.entropy())


def test_distribution_of_a_singular_covariance_says_what_to_do():
    matrix = random_psd(3, 4, rank=8)
    matrix[1] = 0
    matrix[1, 0, 0] = 1
    out = moments(matrix)
    with pytest.raises(ValueError, match=r"singular for 1 of 3 .*first at index 1\).*jitter"):
        out.distribution()
    jittered = out.distribution(jitter=1e-4)
    assert torch.isfinite(jittered.log_prob(out.mean)).all()
    torch.testing.assert_close(jittered.covariance_matrix[[0, 2]], matrix[[0, 2]])


@pytest.mark.parametrize(
    "use",
    [
        lambda out: F.cross_entropy(out, torch.zeros(4, dtype=torch.long)),
        lambda out: torch.nn.Linear(3, 2)(out),
        lambda out: torch.softmax(out, -1),
    ],
)
def test_moments_where_a_tensor_belongs_say_so(use):
    out = covary.mlp([6, 5, 3])(torch.randn(4, 6))
    with pytest.raises(TypeError, match=r"takes a Tensor and got Moments\. Pass \.mean"):
        use(out)


@pytest.mark.parametrize(
    "use",
    [
        lambda out: torch.nn.BatchNorm1d(3)(out),
        lambda out: torch.nn.Flatten()(out),
        lambda out: out.argmax(-1),
    ],
)
def test_tensor_methods_of_moments_say_so(use):
    out = covary.mlp([6, 5, 3])(torch.randn(4, 6))
    with pytest.raises(AttributeError, match=r"Moments have no \w+, which Tensors have\. Pass"):
        use(out)
    with pytest.raises(AttributeError, match="'Moments' object has no attribute 'mu'"):
        out.mu  # noqa: B018


def test_many_samples_take_little_more_memory_than_they_are():
    out = Moments(torch.zeros(4, 50), full(random_psd(4, 50, 60, torch.float32)))
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        draws = out.sample((1000,))
    assert largest <= draws.numel()


def test_moments_are_immutable_and_print_well():
    out = covary.mlp([6, 5, 3])(torch.randn(4, 6))
    with pytest.raises(AttributeError):
        out.mean = torch.zeros(4, 3)
    assert repr(out) == "Moments(mean=(4, 3), cov=Full)"


def test_moments_need_a_covariance():
    with pytest.raises(TypeError, match=r"got a Tensor\. Wrap .*Full\(matrix"):
        Moments(torch.zeros(2, 3), torch.eye(3))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda out: pickle.loads(pickle.dumps(out))])
@pytest.mark.parametrize("name", covariance.names())
def test_moments_copy_and_pickle(copier, name):
    net = covary.mlp([6, 5, 4, 3], covariance=name)
    with torch.no_grad():
        for _ in range(3):  # as training does
            net.linear2.weight.mul_(0.9)
        out = net(torch.randn(4, 6))
    again = copier(out)
    assert torch.equal(again.mean, out.mean)
    assert torch.equal(again.covariance_matrix, out.covariance_matrix)


def test_dead_units_leave_no_dust_for_the_eigenvalues():
    """Subnormal numbers beside ordinary ones, which can keep LAPACK from converging."""
    scales = torch.logspace(0, -22, 60)
    factor = torch.randn(60, 60, generator=torch.Generator().manual_seed(0))
    matrix = (factor @ factor.mT / 60) * scales[:, None] * scales
    assert ((matrix != 0) & (matrix.abs() < torch.finfo(torch.float32).tiny)).any()
    kept = linalg._without_dust(matrix[None])
    assert not ((kept != 0) & (kept.abs() < 1e-15)).any()
    value, rank = linalg.log_determinant(matrix[None], 1e-6)
    exact = torch.linalg.eigvalsh(matrix.double())
    expected, expected_rank = linalg.spectrum_log_determinant(exact, 1e-6)
    assert rank.item() == expected_rank.item()
    torch.testing.assert_close(value[0].double(), expected, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("says_so", [True, False])
@pytest.mark.parametrize("name", ["eigvalsh", "eigh"])
def test_decompositions_that_fail_in_float32_are_made_in_float64(monkeypatch, name, says_so):
    """LAPACK gives up on rare matrices, and torch then on the whole batch; or it gives NaN."""
    decompose, tried = getattr(torch.linalg, name), []

    def fragile(matrices):
        tried.append(matrices.dtype)
        if matrices.dtype == torch.float64:
            return decompose(matrices)
        if says_so:
            raise torch.linalg.LinAlgError("failed to converge")
        values, vectors = torch.full(matrices.shape[:-1], math.nan), matrices
        return values if name == "eigvalsh" else (values, vectors)

    monkeypatch.setattr(torch.linalg, name, fragile)
    matrix = torch.diag_embed(torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]))
    moments = Moments(torch.zeros(2, 3), Full(matrix, torch.zeros(1, 1)))
    if name == "eigvalsh":
        one = 1 + math.log(2 * math.pi)
        expected = torch.tensor([one + 0.5 * math.log(2), 0.5 * (one + math.log(3))])
        torch.testing.assert_close(moments.entropy(), expected)
    else:
        generator = torch.Generator().manual_seed(0)
        drawn = moments.sample(20_000, generator=generator)
        torch.testing.assert_close(drawn.var(0), matrix.diagonal(dim1=1, dim2=2), rtol=0.05, atol=0)
    assert tried == [torch.float32, torch.float64]


# ---- projections, events, samples


@pytest.mark.parametrize("name", covariance.names())
def test_project_gives_the_moments_of_products(name):
    net = covary.mlp([6, 9, 5, 3], covariance=name).double().eval()
    x = torch.randn(4, 6, dtype=torch.float64)
    for shape in ((2, 3), (4, 2, 3), (1, 3)):
        rows = torch.randn(shape, dtype=torch.float64)
        for mode in (torch.no_grad, torch.enable_grad):
            with mode():
                out = net(x)
                found = out.project(rows)
                assert isinstance(found.cov, Full)
                expected = (rows @ out.mean[..., None]).squeeze(-1)
                matrix = rows @ out.covariance_matrix @ rows.mT
            torch.testing.assert_close(found.mean, expected)
            torch.testing.assert_close(found.covariance_matrix, matrix)
            assert found.sample((2,)).shape == (2, *expected.shape)


def test_a_projection_has_the_moments_of_projected_draws():
    out = moments(random_psd(2, 4, rank=6))
    rows = torch.randn(2, 3, 4, dtype=torch.float64)
    draws = (rows @ out.sample(200_000)[..., None]).squeeze(-1)
    found = out.project(rows)
    torch.testing.assert_close(draws.mean(0), found.mean, rtol=0, atol=0.1)
    for i in range(2):
        matrix = torch.cov(draws[:, i].T)
        torch.testing.assert_close(found.covariance_matrix[i], matrix, rtol=0.02, atol=0.2)


def test_projections_have_gradients_through_their_rows_alone():
    net = covary.mlp([6, 9, 3], covariance="tracked").double().eval()
    x, rows = torch.randn(4, 6, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)

    def variance(rows: torch.Tensor) -> torch.Tensor:
        return net(x).project(rows).variance

    assert torch.autograd.gradcheck(variance, rows.requires_grad_())
    variance(rows).sum().backward()
    assert all(parameter.grad is None for parameter in net.parameters())


def event_moments() -> Moments:
    return Moments(torch.randn(5, 2, 3, dtype=torch.float64), Full(random_psd(5, 6, rank=8)))


def test_units_of_a_sample_may_have_any_shape():
    out = event_moments()
    flat = Moments(out.mean.flatten(1), out.cov)
    assert out.event_shape == (2, 3)
    assert flat.event_shape == (6,)
    assert out.variance.shape == out.stddev.shape == (5, 2, 3)
    assert torch.equal(out.variance.flatten(1), flat.variance)
    assert torch.equal(out.covariance_matrix, flat.covariance_matrix)
    assert torch.equal(out.entropy(), flat.entropy())
    first, second = (
        moments.sample((7, 2), generator=torch.Generator().manual_seed(0))
        for moments in (out, flat)
    )
    assert first.shape == (7, 2, 5, 2, 3)
    assert torch.equal(first.flatten(3), second)
    assert torch.equal(out.distribution().mean, flat.mean)
    rows = torch.randn(4, 2, 3, dtype=torch.float64)
    expected = flat.project(rows.flatten(1))
    for found in (out.project(rows), out.project(rows.flatten(1))):
        assert torch.equal(found.mean, expected.mean)
        assert torch.equal(found.covariance_matrix, expected.covariance_matrix)
    own = torch.randn(5, 4, 2, 3, dtype=torch.float64)
    assert torch.equal(out.project(own).mean, flat.project(own.flatten(2)).mean)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 1, 6), (4, 3, 2), (5, 4, 7)])
def test_rows_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"\(r, 6\) or \(5, r, 6\) or \(r, 2, 3\) here, got"):
        event_moments().project(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize("name", covariance.names())
def test_what_vmap_stacks_stands_in_front_of_the_batch(name):
    nets = [covary.mlp([6, 9, 3], noise=sigma, covariance=name).eval() for sigma in (0.1, 0.4)]
    x, rows = torch.randn(5, 6), torch.randn(2, 3)
    out = Replicas(nets)(x.expand(2, 5, 6))
    assert len(out) == 5
    assert out.event_shape == (3,)
    for index, net in enumerate(nets):
        alone = net(x)
        projected, some = out.project(rows), out[[3, 1]]
        torch.testing.assert_close(projected.mean[index], alone.project(rows).mean)
        torch.testing.assert_close(
            projected.covariance_matrix[index], alone.project(rows).covariance_matrix
        )
        torch.testing.assert_close(some.mean[index], alone[[3, 1]].mean)
        torch.testing.assert_close(some.entropy()[index], alone[[3, 1]].entropy())


SAMPLES = {
    "one": 2,
    "the last": -1,
    "numpy's": np.int64(3),
    "of a tensor": torch.tensor(1),
    "slice": slice(2, 5),
    "mask": torch.tensor([True, False, True, False, False, True]),
    "numpy mask": np.array([True, False, True, False, False, True]),
    "list": [4, 0],
    "tensor": torch.tensor([1, 1, 5]),
    "nothing": slice(0, 0),
}


@pytest.mark.parametrize("samples", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize("name", covariance.names())
def test_indexing_selects_samples_and_keeps_the_batch_dimension(name, samples):
    out = covary.mlp([6, 9, 5, 3], covariance=name).eval()(torch.randn(6, 6))
    rows = np.arange(6)[samples].reshape(-1)
    found = out[samples]
    assert isinstance(found, Moments)
    assert len(found) == len(rows)
    assert torch.equal(found.mean, out.mean[rows])
    torch.testing.assert_close(found.covariance_matrix, out.covariance_matrix[rows])
    torch.testing.assert_close(found.entropy(), out.entropy()[rows])


def test_a_loop_goes_through_batches_of_one():
    out = covary.mlp([6, 9, 3])(torch.randn(4, 6))
    assert torch.equal(torch.cat([one.mean for one in out]), out.mean)
    assert torch.equal(torch.cat([one.variance for one in out]), out.variance)


@pytest.mark.parametrize("index", [(0, 1), None, ..., "a", torch.zeros(2, 2, dtype=torch.bool)])
def test_units_are_not_indexed(index):
    with pytest.raises(TypeError, match=r"(?s)indexed by samples: .*For units, index \.mean"):
        event_moments()[index]


def test_samples_that_are_not_there_are_refused():
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"of 5 samples have no sample {index}"):
            event_moments()[index]


@pytest.mark.parametrize("name", covariance.names())
def test_moments_are_converted_as_tensors_are(name):
    net = covary.mlp([6, 9, 5, 3], covariance=name).eval()
    with covary.supervise_covariance():
        out = net(torch.randn(4, 6))
    double = out.double()
    assert double.mean.dtype == double.covariance_matrix.dtype == torch.float64
    torch.testing.assert_close(double.float().covariance_matrix, out.covariance_matrix)
    assert out.covariance_matrix.requires_grad
    assert not out.detach().covariance_matrix.requires_grad
    assert not out.detach().mean.requires_grad
    assert torch.equal(out.cpu().mean, out.mean)
    assert out.to("meta").mean.is_meta


def test_conversion_notices_weights_that_were_changed():
    net = covary.mlp([6, 9, 5, 3], covariance="tracked").eval()
    out = net(torch.randn(4, 6))
    with torch.no_grad():
        net.linear2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="weights were changed"):
        out.double()


def test_numpy_is_told_to_take_a_tensor():
    with pytest.raises(TypeError, match=r"numpy takes a Tensor and got Moments\. Pass"):
        np.asarray(event_moments())


def test_a_single_row_needs_a_dimension_more():
    out = covary.mlp([4, 5, 3])(torch.zeros(2, 4))
    with pytest.raises(ValueError, match=r"got \(3,\)\. Give a single row another dimension"):
        out.project(torch.ones(3))
    assert out.project(torch.ones(1, 3)).mean.shape == (2, 1)
