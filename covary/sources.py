"""Sources of noise: where noise enters a model, its variance there, and how it is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

# A noise for all places, or one by the path or the type of a module.
NoiseOption = float | Mapping[str | type[nn.Module], float]
INPUT = "input"


@dataclass(frozen=True)
class GaussianNoise:
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


NO_NOISE = GaussianNoise(0.0)


class NoisePlan:
    """Where noise enters a model: at its input, and before every elementwise nonlinearity.

    Args:
        noise: the standard deviation everywhere; or a mapping from ``"input"`` (of the model), from
            paths of modules (with all that is in them) and from types of modules. Before a
            nonlinearity counts the longest path that leads to it; then the type of the innermost
            module around it; then the empty path, which is the whole model. What is named nowhere
            has none.
        model: whose modules the mapping speaks of.
    """

    def __init__(self, noise: NoiseOption, model: nn.Module) -> None:
        by: dict[str | type[nn.Module], float] = (
            dict(noise) if isinstance(noise, Mapping) else {"": noise}
        )
        modules = dict(model.named_modules(remove_duplicate=False))
        # A module that has several paths runs under the first of them.
        first = {module: path for path, module in model.named_modules()}
        self._paths: dict[str, GaussianNoise] = {}
        # What the mapping names, and the paths at which it gives the noise.
        self._named: dict[str, set[str]] = {}
        self._used: set[str] = set()
        for key in [key for key in by if isinstance(key, str)]:
            if key not in modules and key != INPUT:
                raise ValueError(
                    f"noise names {key!r}, and this model has no module of that path. It has "
                    f"{', '.join(map(repr, list(modules)[1:9]))} ... and takes {INPUT!r}."
                )
            path = key if key == INPUT else _module(first[modules[key]])
            found = _checked(by[key], key)
            if self._paths.setdefault(path, found) != found:
                raise ValueError(f"noise names the module at {path!r} twice: it also is {key!r}.")
            self._named[repr(key)] = {path}
        by_path = set(self._paths) - {"", INPUT}
        for kind in [key for key in by if not isinstance(key, str)]:
            if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
                raise TypeError(
                    "noise is given by paths of modules (texts), types of modules (nn.ReLU) or "
                    f"{INPUT!r}, got {kind!r}."
                )
            paths = [path for module, path in first.items() if isinstance(module, kind)]
            if not paths:
                raise ValueError(f"noise names {kind.__name__}, and this model has none of them.")
            given = {_module(path) for path in paths if not by_path & set(_around(path))}
            given -= set(self._paths)
            self._paths |= dict.fromkeys(given, _checked(by[kind], kind))
            self._named[kind.__name__] = given

    @property
    def at_input(self) -> GaussianNoise:
        """The noise at the input of the model."""
        return self._at(INPUT if INPUT in self._paths else "")

    def at(self, path: str) -> GaussianNoise:
        """The noise before a nonlinearity in the module of this path."""
        if len(self._paths) == 1 and "" in self._paths:
            return self._at("")
        return self._at(next((key for key in _around(path) if key in self._paths), ""))

    def _at(self, key: str) -> GaussianNoise:
        self._used.add(key)
        return self._paths.get(key, NO_NOISE)

    def check_all_used(self) -> None:
        """Raise an error for noise that was asked for and entered nowhere in the passes so far."""
        for name, paths in self._named.items():
            wanted = any(self._paths[path].sigma for path in paths) or not paths
            if name != "''" and wanted and not paths & self._used:
                raise ValueError(
                    f"noise names {name}, and no noise enters there: it calls no elementwise "
                    "nonlinearity (ReLU, tanh ...) on what varies, or another key counts before "
                    "it. Name the module of the nonlinearity, 'input', or a module around it."
                )

    @property
    def sigmas(self) -> dict[str, float]:
        """The standard deviation by path; the empty path is that of the model."""
        return {path: noise.sigma for path, noise in self._paths.items()}

    @classmethod
    def of(cls, sigmas: Mapping[str, float]) -> NoisePlan:
        """The plan with these sigmas, as ``sigmas`` gave them."""
        plan = cls({}, nn.Module())
        plan._paths = {path: GaussianNoise(sigma) for path, sigma in sigmas.items()}
        return plan

    @cached_property
    def is_none(self) -> bool:
        """Whether there is no noise anywhere."""
        return not any(self.sigmas.values())

    def __repr__(self) -> str:
        sigmas = self.sigmas
        return f"{sigmas['']:g}" if set(sigmas) == {""} else repr(sigmas)


def _module(path: str) -> str:
    """The key of a module: its path, but for one that is called as the input of the model is."""
    return f"{INPUT}." if path == INPUT else path


def _around(path: str) -> Iterator[str]:
    """The keys of a module and of those around it, but for the model itself."""
    while path:
        yield _module(path)
        path = path.rpartition(".")[0]


def _checked(sigma: float, key: object) -> GaussianNoise:
    place = f" for {key!r}" if key else ""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float):
        raise TypeError(f"noise is a number or a dict of numbers, got {sigma!r}{place}.")
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ValueError(
            f"noise needs a finite number >= 0 (a standard deviation), got {sigma}{place}."
        )
    return GaussianNoise(float(sigma))
