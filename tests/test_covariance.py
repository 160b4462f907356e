"""One contract for every way of holding a covariance: agree with the dense matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from covary import covariance, linalg
from covary.covariance import Covariance, Diagonal, Full, Gated, Independent, Isotropic, Shared

B, N, M = 5, 4, 3


def rand(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64)


def psd(batch: int) -> Tensor:
    root = torch.randn(batch, N, N, dtype=torch.float64)
    return root @ root.mT


def zero() -> Tensor:
    return torch.zeros(1, 1, dtype=torch.float64)


# name -> a covariance with batch dimension 1 or B
CASES = {
    "isotropic": lambda: Isotropic(rand(1, 1), N),
    "independent, one": lambda: Independent(rand(1, N)),
    "independent": lambda: Independent(rand(B, N)),
    "diagonal, one": lambda: Diagonal(rand(1, N)),
    "diagonal": lambda: Diagonal(rand(B, N)),
    "full, one": lambda: Full(psd(1), zero()),
    "full": lambda: Full(psd(B), zero()),
    "full, noise added": lambda: Full(psd(B), rand(1, 1)),
    "gated, one": lambda: Gated(psd(1), rand(1, N), rand(1, N)),
    "gated, one matrix": lambda: Gated(psd(1), rand(B, N), rand(B, N)),
    "gated": lambda: Gated(psd(B), rand(B, N), rand(B, N)),
    "shared isotropic": lambda: Shared(Isotropic(rand(1, 1), N)),
    "shared full": lambda: Shared(Full(psd(1), rand(1, 1))),
    "shared gated": lambda: Shared(Gated(psd(1), rand(1, N), rand(1, N))),
}


@pytest.fixture(params=CASES, ids=str)
def cov(request: pytest.FixtureRequest) -> Covariance:
    torch.manual_seed(0)
    made: Covariance = CASES[request.param]()
    return made


def diagonal(matrix: Tensor) -> Tensor:
    return matrix.diagonal(dim1=-2, dim2=-1)


def gate(matrix: Tensor, factor: Tensor) -> Tensor:
    return factor[:, :, None] * matrix * factor[:, None, :]


def with_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    return matrix - torch.diag_embed(diagonal(matrix)) + torch.diag_embed(values)


def factors(cov: Covariance) -> Tensor:
    """(1 | B, N), as a layer would give to this covariance."""
    return rand(1 if isinstance(cov, Shared) else B, N)


def test_dense_is_symmetric_and_positive_semidefinite(cov):
    dense = cov.dense()
    assert torch.equal(dense, dense.mT)
    assert torch.linalg.eigvalsh(dense).min() > -1e-12


def test_variance_is_the_diagonal(cov):
    torch.testing.assert_close(cov.variance, diagonal(cov.dense()))


def test_linear(cov):
    weight = torch.randn(M, N, dtype=torch.float64)
    expected = weight @ cov.dense() @ weight.mT
    if isinstance(cov, Diagonal):  # the approximation that this class stands for
        expected = torch.diag_embed(diagonal(expected))
    torch.testing.assert_close(cov.linear(weight).dense(), expected)


def test_add_noise(cov):
    expected = cov.dense() + 0.7 * torch.eye(N, dtype=torch.float64)
    torch.testing.assert_close(cov.add_noise(0.7).dense(), expected)


def test_activate(cov):
    gain = factors(cov)
    variance = gain**2 * cov.variance + factors(cov)
    expected = with_diagonal(gate(cov.dense(), gain), variance)
    torch.testing.assert_close(cov.activate(gain, variance).dense(), expected)


def test_activate_forgives_round_off_in_the_variance(cov):
    gain = factors(cov)
    variance = gain**2 * cov.variance * (1 - 1e-15)
    activated = cov.activate(gain, variance)
    torch.testing.assert_close(activated.variance.expand(len(variance), N), variance)
    assert torch.linalg.eigvalsh(activated.dense()).min() > -1e-12


def test_scale(cov):
    factor = factors(cov)
    torch.testing.assert_close(cov.scale(factor).dense(), gate(cov.dense(), factor))


def test_operations_chain(cov):
    """What one layer leaves behind, the next can take: three layers against the dense matrix."""
    expected = cov.dense()
    for width in (6, 2, 3):
        weight = torch.randn(width, expected.shape[-1], dtype=torch.float64)
        cov = cov.linear(weight).add_noise(0.3)
        expected = weight @ expected @ weight.mT + 0.3 * torch.eye(width, dtype=torch.float64)
        if isinstance(cov, Diagonal):
            expected = torch.diag_embed(diagonal(expected))
        rows = cov.variance.shape[0]
        gain, factor = rand(rows, width), rand(rows, width)
        variance = gain**2 * cov.variance + rand(rows, width)
        cov = cov.activate(gain, variance).scale(factor).add_noise(0.1)
        expected = gate(with_diagonal(gate(expected, gain), variance), factor)
        expected = expected + 0.1 * torch.eye(width, dtype=torch.float64)
    torch.testing.assert_close(cov.dense(), expected)


def test_activations_follow_each_other(cov):
    rows = 1 if isinstance(cov, Shared) else B
    first, second = rand(rows, N), rand(rows, N)
    variance = first**2 * cov.variance + rand(rows, N)
    variance_after = second**2 * variance + rand(rows, N)
    expected = with_diagonal(gate(gate(cov.dense(), first), second), variance_after)
    twice = cov.activate(first, variance).activate(second, variance_after)
    torch.testing.assert_close(twice.dense(), expected)


def test_log_determinant(cov):
    value, rank = cov.log_determinant(1e-9)
    torch.testing.assert_close(value, torch.linalg.slogdet(cov.dense()).logabsdet)
    assert (rank == N).all()


def test_color_gives_noise_of_this_covariance(cov):
    white = torch.randn(400, 500, B, N, dtype=torch.float64)
    noise = cov.color(white).flatten(0, 1)
    for sample in range(B):
        expected = cov.dense().expand(B, N, N)[sample]
        torch.testing.assert_close(torch.cov(noise[:, sample].T), expected, rtol=0.05, atol=0.05)


def test_batch_dimension_grows_only_where_samples_differ(cov):
    batch = cov.dense().shape[0]
    one = rand(1, N)
    weight = torch.randn(M, N, dtype=torch.float64)
    for after in (cov.linear(weight), cov.add_noise(0.1), cov.scale(one), cov.activate(one, one)):
        assert after.variance.shape[0] <= batch


def test_no_negative_variance_comes_out_of_cancellation():
    torch.manual_seed(0)
    root = torch.randn(50, 1, 3).expand(50, 2, 3) + 1e-5 * torch.randn(50, 2, 3)
    cov = Full(root @ root.mT, torch.zeros(1, 1)).linear(torch.tensor([[30.0, -30.0]]))
    assert (cov.matrix < 0).any(), "the case this test is about"
    assert (cov.variance >= 0).all()
    assert (cov.dense().diagonal(dim1=1, dim2=2) >= 0).all()
    activated = cov.activate(torch.ones(50, 1), torch.zeros(50, 1))
    assert (activated.variance >= 0).all()


def test_many_samples_in_chunks_are_as_all_at_once(monkeypatch, cov):
    weight = torch.randn(M, N, dtype=torch.float64)
    at_once = cov.linear(weight).dense()
    monkeypatch.setattr(linalg, "_CHUNK_ELEMENTS", {"cpu": 2 * weight.numel()})
    monkeypatch.setattr(linalg, "_BLOCK", 3)
    torch.testing.assert_close(cov.linear(weight).dense(), at_once)
    with torch.no_grad():
        torch.testing.assert_close(cov.linear(weight).dense(), at_once)


def test_shared_takes_the_average_of_what_masks_make():
    torch.manual_seed(0)
    cov = Shared(Full(psd(1), zero()))
    mask = (rand(B, N) > 0.5).double() * 2
    expected = gate(cov.dense().expand(B, N, N), mask).mean(0, keepdim=True)
    torch.testing.assert_close(cov.scale(mask).dense(), expected)


def test_is_a_pytree(cov):
    leaves, spec = pytree.tree_flatten(cov)
    assert leaves
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    torch.testing.assert_close(pytree.tree_unflatten(leaves, spec).dense(), cov.dense())


def test_unknown_name_lists_what_exists():
    with pytest.raises(ValueError, match="'fulll'; known are full, diagonal, shared"):
        covariance.start("fulll", zero(), N)
