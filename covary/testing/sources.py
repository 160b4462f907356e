"""The contract of a source: what it says it adds is what its draws add."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.testing import assert_close

from covary.covariance.samples import Samples
from covary.covariance.terms import Term
from covary.sources import Source
from covary.testing.contract import Contract, seeded

# Draws of each value, and by how many standard errors their moments may be off.
DRAWS, BARS = 4_000, 5.0
SAMPLES, UNITS, ROWS = 2, 5, 3


class SourceContract(Contract):
    """The term of a source against draws of it around values that vary, and against itself.

    Attributes:
        cases: name -> a source that takes values of two dimensions, the batch and units.
    """

    cases: ClassVar[Mapping[str, Source]] = {}

    def test_its_term_is_what_draws_add(self, name: str) -> None:
        """In mean, and in the variance of random rows."""
        source, mean, deviation, rows = self.cases[name], _values(), 0.3, _rows()
        values = mean + deviation * torch.randn(DRAWS, *mean.shape, generator=seeded(1)).double()
        drawn = torch.stack([source.draw(value, seeded(i)) for i, value in enumerate(values)])
        assert_close(drawn.mean(0), mean, rtol=0, atol=BARS * drawn.std().item() / DRAWS**0.5)
        both = torch.einsum("rbn,dbn->dbr", rows, drawn).var(0)
        before = deviation**2 * rows.square().sum(-1).mT
        expected = before + self._term(name, deviation**2).variances(rows)
        assert_close(both, expected, rtol=BARS * (3 / DRAWS) ** 0.5, atol=0)

    def test_variances_are_those_of_products(self, name: str) -> None:
        """And products are symmetric and positive semidefinite."""
        term, rows = self._term(name, 0.1), _rows()
        products = term.products(rows)
        assert_close(products, products.mT)
        assert_close(products.diagonal(dim1=1, dim2=2), term.variances(rows))
        assert_close(term.by_element(rows).sum(-1).mT, term.variances(rows))
        assert bool((torch.linalg.eigvalsh(products) > -1e-9 * products.abs().max()).all())

    def test_elements_have_the_variance_of_their_term(self, name: str) -> None:
        """The variance of each element is that of a row that has 1 in its place."""
        mean, var = _values(), torch.full((1, 1), 0.2, dtype=torch.float64)
        rows = torch.eye(UNITS, dtype=torch.float64)[:, None].expand(UNITS, SAMPLES, UNITS)
        found = self._term(name, 0.2).variances(rows)
        assert_close(found, self.cases[name].variance(mean, var).expand_as(mean))

    def _term(self, name: str, var: float) -> Term:
        mean = _values()
        given = torch.full((1, 1), var, dtype=torch.float64)
        return self.cases[name].term(name, Samples.along(mean), "noise", mean, given)


def _values() -> Tensor:
    return torch.randn(SAMPLES, UNITS, generator=seeded()).double()


def _rows() -> Tensor:
    return torch.randn(ROWS, SAMPLES, UNITS, generator=seeded(2)).double()
