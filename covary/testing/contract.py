"""What contracts have in common: tests that pytest runs on every case of a subclass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch


class Contract:
    """Tests that take the name of a case; pytest runs each on every name in ``cases``.

    Attributes:
        cases: name -> what is tested.
    """

    cases: ClassVar[Mapping[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Tell pytest which cases there are."""
        if not self.cases:
            raise TypeError(
                f"{type(self).__name__} has no cases. Give it some: cases = {{'mine': ...}}."
            )
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", list(self.cases))


def seeded(seed: int = 0) -> torch.Generator:
    """A generator that always gives the same random numbers."""
    return torch.Generator().manual_seed(seed)
