"""Sources of noise: where noise enters a model, its variance there, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# A noise for all places, or one by the path or the type of a module.
NoiseOption = float | Mapping[str | type[nn.Module], float]
INPUT = "input"


@dataclass(frozen=True)
class Noise:
    """Independent Gaussian noise of one standard deviation on every element of a value."""

    sigma: float

    def variance(self, value: Tensor) -> Tensor:
        """The variance that it adds to each element, (1, ..., 1) to be broadcast."""
        return value.detach().new_full([1] * value.dim(), self.sigma**2)

    def draw(self, value: Tensor, generator: torch.Generator) -> Tensor:
        """The value with a draw of the noise added; a new tensor."""
        if not self.sigma:
            return value.clone()
        return value + torch.empty_like(value).normal_(0.0, self.sigma, generator=generator)


class NoisePlan:
    """Where noise enters a model: at its input, and before every elementwise nonlinearity.

    Args:
        noise: the standard deviation everywhere; or a mapping from ``"input"``, from paths of
            modules (with all that is in them) and from types of modules. The longest path counts,
            then the type of the module that calls the nonlinearity; what is named nowhere has none.
        model: whose modules the mapping speaks of.
    """

    def __init__(self, noise: NoiseOption, model: nn.Module) -> None:
        by = dict(noise) if isinstance(noise, Mapping) else {"": noise}
        modules = dict(model.named_modules(remove_duplicate=False))
        self._paths: dict[str, Noise] = {}
        for key, sigma in by.items():
            found = Noise(_checked(sigma, key))
            if isinstance(key, str):
                if key not in modules and key != INPUT:
                    raise ValueError(
                        f"noise names {key!r}, and this model has no module of that path. It has "
                        f"{', '.join(map(repr, list(modules)[1:9]))} ... and takes {INPUT!r}."
                    )
                self._paths[key] = found
        for kind, sigma in by.items():
            if isinstance(kind, str):
                continue
            paths = [path for path, module in modules.items() if isinstance(module, kind)]
            if not paths:
                raise ValueError(f"noise names {kind.__name__}, and this model has none of them.")
            for path in paths:
                self._paths.setdefault(path, Noise(_checked(sigma, kind)))

    def at(self, path: str) -> Noise:
        """The noise at ``"input"``, or before a nonlinearity in the module of this path."""
        if path == INPUT and INPUT in self._paths:
            return self._paths[INPUT]
        while path and path not in self._paths:
            path = path.rpartition(".")[0]
        return self._paths.get(path, NO_NOISE)

    @property
    def sigmas(self) -> dict[str, float]:
        """The standard deviation by path; the empty path is that of the model."""
        return {path: noise.sigma for path, noise in self._paths.items()}

    @classmethod
    def of(cls, sigmas: Mapping[str, float]) -> NoisePlan:
        """The plan with these sigmas, as ``sigmas`` gave them."""
        plan = cls.__new__(cls)
        plan._paths = {path: Noise(sigma) for path, sigma in sigmas.items()}
        return plan

    @property
    def is_none(self) -> bool:
        """Whether there is no noise anywhere."""
        return not any(self.sigmas.values())

    def __repr__(self) -> str:
        sigmas = self.sigmas
        return f"{sigmas['']:g}" if set(sigmas) == {""} else repr(sigmas)


NO_NOISE = Noise(0.0)


def _checked(sigma: float, place: object) -> float:
    if isinstance(sigma, str) or not isinstance(sigma, int | float):
        raise TypeError(f"noise is a number or a dict of numbers, got {sigma!r} for {place!r}.")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(
            f"noise needs a finite number >= 0 (a standard deviation), got {sigma} for {place!r}."
        )
    return float(sigma)
