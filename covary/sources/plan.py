"""The plan of a model: which sources enter it, and where."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from numbers import Real

from torch import nn

from covary.covariance.terms import INPUT
from covary.sources.kept import Posterior
from covary.sources.source import NO_NOISE, GaussianNoise, Source, Targets
from covary.sources.weights import DropConnect, UncertainWeights

# A noise for all places, or one by the path or the type of a module.
NoiseOption = float | Mapping[str | type[nn.Module], float]
# A source or several, by the path of a module, or "input".
SourceOption = Mapping[str, Source | DropConnect | Sequence[Source | DropConnect]]
# All dropout layers of a model, none, or those in the modules of these paths.
DropoutOption = bool | Sequence[str]


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


class Plan:
    """All sources of a model: noise, dropout, sources at modules, and weights that vary.

    Attributes:
        noise: noise at the input and before nonlinearities.
        sources: by the path of the module at whose output they enter, or ``"input"``.
        posterior: how weights vary, as ``covary.posterior.fit`` found.
        model: whose modules and parameters are meant.
    """

    def __init__(
        self,
        model: nn.Module,
        noise: NoiseOption,
        sources: SourceOption | None = None,
        dropout: DropoutOption = False,
    ) -> None:
        self.noise = NoisePlan(noise, model)
        self.sources = _by_path(sources or {}, model)
        self._dropout = _dropping(dropout, model)
        # Weights that are dropped, by the path of the parameter.
        self._connections, self._places = _connections(self.sources, model)
        self.posterior = Posterior()
        self.model = model
        self._used: set[str] = set()
        self._dropped: set[str] = set()

    @property
    def has_sources(self) -> bool:
        """Whether anything varies, whatever the inputs are; weights are not known before."""
        return not self.noise.is_none or bool(self.sources) or self._dropout is not None

    @property
    def is_none(self) -> bool:
        """Whether nothing varies but for errors of the inputs."""
        return not self.has_sources and not self.has_weights

    @property
    def has_weights(self) -> bool:
        """Whether any weights vary."""
        return bool(self._connections) or not self.posterior.is_empty

    def with_posterior(self) -> Plan:
        """The same sources, with a posterior of its own, which is empty."""
        plan = copy.copy(self)
        plan.posterior, plan._used = Posterior(), set()
        return plan

    def enters_at(self, path: str) -> bool:
        """Whether any source enters at the output of the module of this path."""
        return _module(path) in self.sources or (not path and self.posterior.noise is not None)

    @property
    def depends_on_values(self) -> bool:
        """Whether a source adds more where values are larger, so that samples differ."""
        every = [source for each in self.sources.values() for source in each]
        is_relative = any(isinstance(s, DropConnect) or s.needs_variance for s in every)
        return is_relative or self._dropout is not None or self.has_weights

    @property
    def at_input(self) -> Sequence[Source]:
        """The sources that enter at the input of the model, beside its noise."""
        return [each for each in self.sources.get(INPUT, ()) if isinstance(each, Source)]

    def at(self, path: str) -> Sequence[Source]:
        """The sources that enter at the output of the module of this path."""
        found = [each for each in self.sources.get(_module(path), ()) if isinstance(each, Source)]
        if found:
            self._used.add(_module(path))
        noise = None if path else self.posterior.noise
        return found if noise is None else [*found, Targets(noise)]

    def drops(self, path: str) -> bool:
        """Whether dropout in the module of this path is a source."""
        if self._dropout is None:
            return False
        found = self._dropout.intersection([*_around(path), ""])
        self._dropped |= found
        return bool(found)

    @property
    def is_linear(self) -> bool:
        """Whether nothing varies but weights that outputs are taken as linear in."""
        alone = not self.has_sources and not self._connections
        return alone and self.posterior.is_linearised

    @property
    def linearised(self) -> set[str]:
        """Names of the calls of layers whose outputs are linear in how their weights vary."""
        paths = self.posterior.prior_precision if self.posterior.is_linearised else ()
        return {f"{_layer(path)}:weights" for path in paths}

    def weights_by_identity(self) -> dict[int, tuple[str, UncertainWeights]]:
        """The path of the layer and how its weights vary, by the identity of the parameter."""
        if not self.has_weights:
            return {}
        self.posterior.check(self.model)
        parameters = dict(self.model.named_parameters())
        found = self.posterior.weights
        for path, source in self._connections.items():
            found[path] = source.weights(parameters[path])
        return {id(parameters[path]): (_layer(path), weights) for path, weights in found.items()}

    @property
    def dropped_weights(self) -> set[str]:
        """Paths of the parameters that DropConnect drops."""
        return set(self._connections)

    def note_use(self, path: str) -> None:
        """Remember that weights of the module of this path were used."""
        self._used.add(self._places.get(path, path))

    def check_all_used(self) -> None:
        """Raise an error for a source that was asked for and entered nowhere so far."""
        self.noise.check_all_used()
        unused = [path for path in self.sources if path not in self._used and path != INPUT]
        if unused:
            raise ValueError(
                f"sources name module {unused[0]!r}, and nothing that varies came out of it: it "
                "was not called, or runs before start=. Name a module that is called behind it."
            )
        if missing := (self._dropout or frozenset()) - self._dropped:
            place = f"module {sorted(missing)[0]!r}" if "" not in missing else "this model"
            raise ValueError(
                f"dropout is to be a source, and {place} drops nothing that varies: it has no "
                "dropout layer, or one that was not called or runs before start=. Leave dropout "
                "out, or name the modules that have one."
            )

    @property
    def settings(self) -> dict[str, float]:
        """The sources and dropout as numbers, to be saved with the weights and compared."""
        found = {
            f"{name} of {type(source).__name__} {number} at {path or 'output'}": value
            for path, every in self.sources.items()
            for number, source in enumerate(every, 1)
            for name, value in _numbers(source).items()
        }
        return found | {f"dropout in {path or 'all modules'}": 1.0 for path in self._dropout or ()}


def _by_path(
    sources: SourceOption, model: nn.Module
) -> dict[str, tuple[Source | DropConnect, ...]]:
    """The sources by path, checked."""
    if not isinstance(sources, Mapping):
        raise TypeError(
            "sources are a mapping from 'input' or the path of a module to a source, such as "
            f"{{'input': covary.sources.Relative(0.01)}}, got {type(sources).__name__}."
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    # A module that has several paths runs under the first of them.
    first = {module: path for path, module in model.named_modules()}
    found: dict[str, tuple[Source | DropConnect, ...]] = {}
    for path, given in sources.items():
        every = tuple(given) if isinstance(given, list | tuple) else (given,)
        wrong = [each for each in every if not isinstance(each, Source | DropConnect)]
        if wrong:
            raise TypeError(
                f"sources at {path!r} are GaussianNoise, Relative, Rounding or DropConnect of "
                f"covary.sources, got {wrong[0]!r}."
            )
        if path not in modules and path != INPUT:
            raise ValueError(
                f"sources name {path!r}, and this model has no module of that path. It has "
                f"{', '.join(map(repr, list(modules)[1:9]))} ..., and takes {INPUT!r}."
            )
        place = path if path == INPUT else _module(first[modules[path]])
        found[place] = (*found.get(place, ()), *every)
    return found


def _numbers(source: Source | DropConnect) -> dict[str, float]:
    """What tells a source from others of its class; of one without any number, that it is there."""
    found = {name: float(value) for name, value in vars(source).items() if isinstance(value, Real)}
    return found or {"presence": 1.0}


def _layer(path: str) -> str:
    """The path of the layer whose weight has this path; of another parameter, its own."""
    return "" if path == "weight" else path.removesuffix(".weight")


def _connections(
    sources: Mapping[str, Sequence[Source | DropConnect]], model: nn.Module
) -> tuple[dict[str, DropConnect], dict[str, str]]:
    """By the path of the parameter, how weights are dropped; by that of its layer, who said so."""
    found, places = {}, {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for place, every in sources.items():
        path = place.removesuffix(".")  # of a module that is called as the input is
        for source in every:
            if not isinstance(source, DropConnect):
                continue
            weight = None if place == INPUT else getattr(model.get_submodule(path), "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() not in (2, 3, 4):
                raise ValueError(
                    f"DropConnect at {path!r} needs a linear layer or a convolution of one or two "
                    "dimensions, whose weight it drops. Name such a module."
                )
            if names[id(weight)] in found:
                raise ValueError(f"DropConnect drops the weights at {path!r} twice. Name it once.")
            found[names[id(weight)]] = source
            places[_layer(names[id(weight)])] = place
    return found, places


def _dropping(dropout: DropoutOption, model: nn.Module) -> frozenset[str] | None:
    """Paths of the modules whose dropout is a source; None without any."""
    if isinstance(dropout, bool):
        return frozenset([""]) if dropout else None
    paths = dict(model.named_modules())
    wanted = [dropout] if isinstance(dropout, str) else dropout
    if not isinstance(wanted, Sequence):
        raise TypeError(
            "dropout is True for all dropout layers, or a list of paths of modules; the "
            f"probabilities are those of the layers. Got {dropout!r}."
        )
    for path in wanted:
        if path not in paths:
            raise ValueError(
                f"dropout names {path!r}, and this model has no module of that path. It is True "
                "for all dropout layers, or a list of paths of modules."
            )
    return frozenset(wanted) or None
