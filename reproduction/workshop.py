"""Where experiments are made: networks that several of them use are trained there once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from covary import data as sets
from covary.data.download import file_sha256
from covary.files import without_nan, write_atomically
from covary.runs import Choices, DataConfig, DeviceConfig, Run, RunConfig, RunError
from covary.runs.directory import weights_digest
from covary.runs.samples import load_data
from covary.runs.training import resolve, train
from covary.training import Display, log
from reproduction.published import weights

Progress = Callable[[Sequence[Any], str], Iterator[Any]]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network to train, as data: presets of the data for all that is not said.

    Attributes:
        name: of its folder, without the seed.
        data: a name that ``covary.data`` knows.
        settings: fields of ``covary.runs.Choices``.
        keep: epochs after which weights are put aside.
        limit: train on so many samples at most, and test on so many; 0 for all.
        augment: random crop and horizontal flip.
        validation: fraction of the training samples that is held out to watch training with.
        trunk_of: the network whose trained trunk is taken, and not trained further.
        published: weights that the paper's authors published, by the name of their file; they are
            taken as they are, and not trained.
    """

    name: str
    data: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    keep: tuple[int, ...] = ()
    limit: int = 0
    augment: bool = False
    validation: float = DataConfig.validation
    trunk_of: Network | None = None
    published: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, for the settings of a part."""
        values = asdict(self) | {"settings": dict(self.settings), "keep": list(self.keep)}
        if self.trunk_of is None:
            del values["trunk_of"]
        else:
            values["trunk_of"] = self.trunk_of.to_dict()
        if not self.published:
            del values["published"]
        # Results say so only where it is not what it is for all others.
        if self.validation == DataConfig.validation:
            del values["validation"]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Network:
        """Back from the settings of a part."""
        settings = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in values["settings"].items()
        }
        trunk_of = values.get("trunk_of")
        return cls(
            **{
                **values,
                "settings": settings,
                "keep": tuple(values["keep"]),
                "trunk_of": None if trunk_of is None else cls.from_dict(trunk_of),
            }
        )


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A folder for networks, and how to show what goes on.

    Attributes:
        folder: networks of one scale, each in a folder of its own.
        data_dir: where data are looked for first.
        display: makes what shows the progress of a training.
        progress: wraps what is done step by step, given a name; shows nothing by default.
        say: tells the person at the terminal.
        revision: of the experiment that is measured; what was remembered of another is not used.
        spent: seconds of each training so far, which are not those of the measurement it is for.
        reused: seconds that measurements took which were found and not made again.
    """

    folder: Path
    data_dir: str | None = None
    display: Callable[[], Display | None] = lambda: None
    progress: Progress = lambda items, _name: iter(items)
    say: Callable[[str], None] = lambda _sentence: None
    revision: int = 0
    spent: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)

    def trained(self, network: Network | Mapping[str, Any], seed: int) -> Run:
        """The network, trained: now, further if it was cut short, before, or or by the authors."""
        if not isinstance(network, Network):
            network = Network.from_dict(network)
        run = Run(self.folder / f"{network.name}-{seed}", data_dir=self.data_dir)
        data = DataConfig(
            name=network.data,
            limit=network.limit,
            augment=network.augment,
            validation=network.validation,
        )
        dataset, _ = load_data(data, data_dir=self.data_dir, seed=seed)
        chosen = Choices(**network.settings, seed=seed)
        if network.published:
            return self._taken(network.published, run, resolve(data, dataset, chosen))
        trunk = None if network.trunk_of is None else self.trained(network.trunk_of, seed)
        if trunk is not None:
            chosen = replace(chosen, trunk_from=str(trunk.path.resolve()))
        config = resolve(data, dataset, chosen)
        same = run.exists() and not _differences(config, run.config)
        begun = run.checkpoint_path.exists()
        if same and begun:
            # All that a trunk was needed for is in the checkpoint, wherever the trunk was then.
            config = run.config
        if not (same and run.model_path.exists()):
            self.say(f"Training {network.name}, seed {seed}, into {run.path}.")
            began = time.perf_counter()
            train(
                config,
                dataset,
                run,
                # Cut short before there was anything to keep, it is begun anew.
                existing="overwrite" if same and not begun else "resume",
                devices=DeviceConfig(keep=network.keep),
                display=self.display(),
            )
            self.spent.append(time.perf_counter() - began)
        if trunk is not None and _trunk_digest(run) != _trunk_digest(trunk):
            raise RunError(
                f"{run.path} was trained behind another trunk than {trunk.path} has now. Remove "
                "that folder, to have it trained again."
            )
        lacking = sorted(set(network.keep) - set(run.kept_epochs()))
        if lacking:
            raise RunError(
                f"{run.path} is trained, but has not kept its weights after epochs "
                f"{', '.join(map(str, lacking))}. Remove that folder, to have it trained again."
            )
        return run

    def _taken(self, name: str, run: Run, config: RunConfig) -> Run:
        """The run of weights that were published, which is written if it is not there."""
        if run.exists() and run.model_path.exists() and not config.differences(run.config):
            return run
        tensors = weights.read(name, self.data_dir)
        net = config.model.build()
        if set(tensors) != {each for each, _ in net.named_parameters()}:
            raise RunError(f"The weights {name} are not those of a network {config.model.widths}.")
        net.load_state_dict(net.state_dict() | tensors)
        write_atomically(run.config_path, config.to_toml().encode())
        run.save_network(net)
        return run

    def lacking(self, settings: Mapping[str, Any]) -> str:
        """Why a part cannot be measured here; else empty.

        Which published weights are not there, and which of the sets that it ``needs``: those are
        not fetched on the way.
        """
        names = dict.fromkeys(each.get("published", "") for each in networks_in(settings))
        found = [weights.lacking(name, self.data_dir) for name in names if name]
        for name in settings.get("needs", ()):
            if sets.status(name, self.data_dir).state == "missing":
                found.append(f"The set {name} is not there: covary data fetch {name}.")
        return " ".join(found).strip()

    def training_seconds(self, settings: Mapping[str, Any], seed: int) -> dict[str, float]:
        """How long each network that a part's settings name was trained, by its folder."""
        found = {}
        for values in networks_in(settings):
            run = Run(self.folder / f"{values['name']}-{seed}")
            # Epoch by epoch: a training that was cut short and went on has no other sum.
            if run.metrics_path.exists():
                found[run.path.name] = sum((row.seconds for row in log.read(run.metrics_path)), 0.0)
        return found

    def weights(self, settings: Mapping[str, Any], seed: int) -> dict[str, str]:
        """SHA-256 of the trained networks that a part's settings name, by their folders."""
        runs = [Run(self.folder / f"{each['name']}-{seed}") for each in networks_in(settings)]
        return {
            run.path.name: file_sha256(run.model_path) for run in runs if run.model_path.exists()
        }

    def remembered(
        self, run: Run, name: str, settings: Mapping[str, Any], measure: Callable[[], Any]
    ) -> Any:
        """What was measured of a trained network, in its folder; measured now if it was not.

        Several experiments look at the same network in the same way.
        """
        path = run.path / "measured" / f"{name}.json"
        key = {
            "settings": json.loads(json.dumps(settings)),
            "weights": run.weights,
            **({"revision": self.revision} if self.revision else {}),
        }
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["key"] == key:
                self.reused.append(float(found["seconds"]))
                return found["measured"]
        except (OSError, ValueError, KeyError):
            pass  # not there, or cut short: measured again
        began = time.perf_counter()
        measured = without_nan(measure())
        seconds = round(time.perf_counter() - began, 1)
        content = {"key": key, "seconds": seconds, "measured": measured}
        write_atomically(path, json.dumps(content).encode())
        return measured


def _differences(config: RunConfig, other: RunConfig) -> list[str]:
    """Where a trunk lies does not matter: what is in it is compared."""
    found = config.differences(other)
    return [each for each in found if not each.startswith("model.trunk_from:")]


def _trunk_digest(run: Run) -> str:
    return weights_digest(run.network().get_submodule("trunk"))


def networks_in(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every network that settings hold, at whatever depth."""
    if {"name", "data", "settings"} <= set(settings):
        yield settings
    for value in settings.values():
        if isinstance(value, Mapping):
            yield from networks_in(value)
