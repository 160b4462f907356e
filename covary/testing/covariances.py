"""The contract of a covariance: whatever it stores, it does what its dense matrix does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from covary.covariance import Covariance, Selection
from covary.testing.contract import Contract

rand = partial(torch.rand, dtype=torch.float64)
randn = partial(torch.randn, dtype=torch.float64)
eye = partial(torch.eye, dtype=torch.float64)


class CovarianceContract(Contract):
    """Compares a covariance of 4 units, float64, with its ``dense()`` matrix.

    Attributes:
        cases: name -> function without arguments that makes a covariance of 4 units for 1 sample
            or 5, of full rank.
    """

    cases: ClassVar[Mapping[str, Callable[[], Covariance]]] = {}
    samples, units, outputs = 5, 4, 3
    selections: ClassVar[Mapping[str, Selection]] = {
        "slice": slice(1, 3),
        "mask": torch.tensor([True, False, True, True, False]),
        "indices": torch.tensor([4, 0, 0]),
        "list": [3, -1],
        "none": slice(0, 0),
    }

    def after_linear(self, cov: Covariance, matrix: Tensor) -> Tensor:
        """What ``cov.linear(weight)`` has of ``W C W^T``: all, unless it is an approximation."""
        return matrix

    def exact(self, cov: Covariance) -> Covariance:
        """The same with exact ``unit_variance``, where that is an estimate."""
        return cov

    def rows(self, cov: Covariance) -> int:
        """For how many samples gains and factors are given: 1 if all share the covariance."""
        return self.samples

    def make(self, name: str) -> Covariance:
        """The covariance of this case, from the same random numbers each time."""
        torch.manual_seed(0)
        return self.cases[name]()

    @pytest.fixture
    def cov(self, name: str) -> Covariance:
        """What each test starts with."""
        return self.make(name)

    def factors(self, cov: Covariance) -> Tensor:
        """(1 | 5, 4) random numbers in (0, 1), as a layer would give to this covariance."""
        return rand(self.rows(cov), self.units)

    def test_dense_is_symmetric_and_positive_semidefinite(self, cov: Covariance) -> None:
        dense = cov.dense()
        assert torch.equal(dense, dense.mT)
        assert torch.linalg.eigvalsh(dense).min() > -1e-12

    def test_changing_a_dense_matrix_in_place_changes_nothing_else(self, cov: Covariance) -> None:
        """A covariance is immutable: ``dense()`` gives a matrix of its own."""
        variance, (log_determinant, _) = cov.variance.clone(), cov.log_determinant(1e-9)
        given = cov.dense()
        kept = given.clone()
        given.mul_(3)
        assert torch.equal(cov.dense(), kept)
        assert_close(cov.variance, variance, rtol=1e-12, atol=0)
        assert_close(cov.log_determinant(1e-9)[0], log_determinant)

    def test_variance_is_the_diagonal(self, cov: Covariance) -> None:
        assert_close(cov.variance, diagonal(cov.dense()))

    def test_linear(self, cov: Covariance) -> None:
        weight, factor = randn(self.outputs, self.units), rand(1, self.units)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                self._assert_linear(cov, cov.dense(), weight)
                self._assert_linear(cov.scale(factor), gate(cov.dense(), factor), weight)

    def test_gains_that_samples_share(self, cov: Covariance) -> None:
        gain = rand(1, self.units)
        variance = gain**2 * cov.variance + self.factors(cov)
        expected = with_diagonal(gate(cov.dense().expand(len(variance), -1, -1), gain), variance)
        weight = randn(2 * self.units, self.units)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                activated = cov.gate(gain, variance)
                assert_close(activated.dense(), expected)
                self._assert_linear(activated, expected, weight)

    def test_add_noise(self, cov: Covariance) -> None:
        assert_close(cov.add_noise(0.7).dense(), cov.dense() + 0.7 * eye(self.units))

    def test_gate(self, cov: Covariance) -> None:
        """gain_i gain_j C_ij off the diagonal, a given variance on it; twice, too."""
        first, second = self.factors(cov), self.factors(cov)
        variance = first**2 * cov.variance + self.factors(cov)
        expected = with_diagonal(gate(cov.dense(), first), variance)
        activated = cov.gate(first, variance)
        assert_close(activated.dense(), expected)
        after = second**2 * variance + self.factors(cov)
        expected = with_diagonal(gate(expected, second), after)
        assert_close(activated.gate(second, after).dense(), expected)

    def test_gate_forgives_round_off_in_the_variance(self, cov: Covariance) -> None:
        gain = self.factors(cov)
        variance = gain**2 * cov.variance * (1 - 1e-15)
        activated = cov.gate(gain, variance)
        assert_close(activated.variance.expand(len(variance), self.units), variance)
        assert torch.linalg.eigvalsh(activated.dense()).min() > -1e-12

    def test_scale(self, cov: Covariance) -> None:
        factor = self.factors(cov)
        assert_close(cov.scale(factor).dense(), gate(cov.dense(), factor))

    def test_layers_follow_each_other(self, cov: Covariance) -> None:
        expected = cov.dense()
        for width in (6, 2, 3):
            weight = randn(width, expected.shape[-1])
            cov = self.exact(cov.linear(weight)).add_noise(0.3)
            expected = weight @ expected @ weight.mT + 0.3 * eye(width)
            expected = self.after_linear(cov, expected)
            samples = cov.variance.shape[0]
            gain, factor = rand(samples, width), rand(samples, width)
            variance = gain**2 * cov.variance + rand(samples, width)
            cov = cov.gate(gain, variance).scale(factor).add_noise(0.1)
            expected = gate(with_diagonal(gate(expected, gain), variance), factor)
            expected = expected + 0.1 * eye(width)
        assert_close(cov.dense(), expected)

    def test_log_determinant(self, cov: Covariance) -> None:
        value, rank = cov.log_determinant(1e-9)
        assert_close(value, torch.linalg.slogdet(cov.dense()).logabsdet)
        assert (rank == self.units).all()

    def test_color_gives_noise_of_this_covariance(self, cov: Covariance) -> None:
        noise = cov.color(randn(400, 500, self.samples, self.units)).flatten(0, 1)
        expected = cov.dense().expand(self.samples, -1, -1)
        for sample in range(self.samples):
            found = torch.cov(noise[:, sample].T)
            assert_close(found, expected[sample], rtol=0.05, atol=0.05)

    def test_batch_dimension_grows_only_where_samples_differ(self, cov: Covariance) -> None:
        batch, one = cov.dense().shape[0], rand(1, self.units)
        weight = randn(self.outputs, self.units)
        for after in (cov.linear(weight), cov.add_noise(0.1), cov.scale(one), cov.gate(one, one)):
            assert after.variance.shape[0] <= batch

    def test_quadratic_is_the_product_with_the_dense_matrix(self, cov: Covariance) -> None:
        for batch in (1, cov.dense().shape[0]):
            rows = randn(batch, self.outputs, self.units)
            assert_close(cov.quadratic(rows), rows @ cov.dense() @ rows.mT)

    def test_select_takes_samples(self, name: str) -> None:
        """Before and after it was looked at, and it goes on from there."""
        for looked_at in (False, True):
            for samples in self.selections.values():
                cov = self.make(name)
                expected = self.make(name).dense().expand(self.samples, -1, -1)[samples]
                if looked_at:
                    cov.dense()
                selected = cov.select(samples)
                assert_close(selected.dense().expand_as(expected), expected)
                self._assert_linear(selected, expected, randn(self.outputs, self.units))

    def test_is_a_pytree(self, cov: Covariance) -> None:
        """Its leaves are tensors; put together again, or copied one by one, they are the same."""
        leaves, spec = pytree.tree_flatten(cov)
        assert leaves
        assert all(isinstance(leaf, Tensor) for leaf in leaves)
        assert_close(pytree.tree_unflatten(leaves, spec).dense(), cov.dense())
        copied = pytree.tree_map(torch.clone, cov)
        assert_close(copied.dense(), cov.dense())
        assert repr(copied) == repr(cov)

    def _assert_linear(self, cov: Covariance, matrix: Tensor, weight: Tensor) -> None:
        expected = self.after_linear(cov, weight @ matrix @ weight.mT)
        assert_close(cov.linear(weight).dense().expand_as(expected), expected)


def diagonal(matrix: Tensor) -> Tensor:
    """(B, n) of matrices (B, n, n)."""
    return matrix.diagonal(dim1=-2, dim2=-1)


def gate(matrix: Tensor, factor: Tensor) -> Tensor:
    """factor_i factor_j C_ij."""
    return factor[:, :, None] * matrix * factor[:, None, :]


def with_diagonal(matrix: Tensor, values: Tensor) -> Tensor:
    """The matrix with these values (B, n) on its diagonal."""
    return matrix - torch.diag_embed(diagonal(matrix)) + torch.diag_embed(values)
