"""A run: a folder with everything that made a trained network, and what was measured of it."""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from covary.data import Dataset, Schema
from covary.data.locking import held
from covary.files import FileError, read_json, read_tensors, read_text, write_json, write_tensors
from covary.models import with_covariance
from covary.nn import Noisy
from covary.nn.fidelity import Fidelity as TrackingFidelity
from covary.runs import held_out, predictions
from covary.runs.config import RunConfig
from covary.runs.held_out import Calibration, HeldOut, KeptCalibration
from covary.runs.predictions import Predictions
from covary.runs.records import Numbers, Record, decoded
from covary.runs.results import (
    Attack,
    Environment,
    Evaluation,
    Fidelity,
    Result,
    SpikingVerification,
    Verification,
    check_belongs,
)
from covary.runs.samples import foreign_sets, load_data
from covary.training import log
from covary.training.checkpoint import load_weights, snapshot_path
from covary.uncertainty.fitted import FittedScore

Value = TypeVar("Value")
Kept = TypeVar("Kept", bound=Record)
_LIBRARIES = ("covary", "torch", "numpy", "lightning-fabric", "safetensors")
# They change how a covariance is found, not what the network is.
_TRACKING_BUFFERS = ("log_correction", "probed", "fidelity")

_FILES = (
    "config.toml",
    "schema.json",
    "environment.json",
    "metrics.jsonl",
    "checkpoint.safetensors",
    "model.safetensors",
    "evaluation.json",
    "predictions.npz",
    "fidelity.json",
    "fidelity.npz",
    "verification.json",
    "verification.npz",
    "spikes.json",
    "spikes.npz",
    "calibration.json",
    "score.safetensors",
    "score-plain.safetensors",
    "attack.json",
    "attack.npz",
    "report.html",
)


_FOLDERS = ("tensorboard", "figures", "epochs")


class RunError(ValueError):
    """A folder that is no run, or not in the state that was asked for."""


class Run:
    """A folder with a trained network, and what is in it.

    Everything in it is text, JSON, safetensors or numpy; nothing is pickled. Each file is read when
    it is first asked for, checked once, and read again only if it has changed. What was never
    measured is None.

    Args:
        path: the folder.
        data_dir: where data are looked for first.
    """

    def __init__(self, path: Path | str, *, data_dir: str | None = None) -> None:
        self.path = Path(path)
        self.data_dir = data_dir
        self._kept: dict[str, tuple[object, Any]] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        """Which data, network and training: ``config.toml``."""
        return self.path / "config.toml"

    @property
    def model_path(self) -> Path:
        """The weights of a finished training: ``model.safetensors``."""
        return self.path / "model.safetensors"

    @property
    def checkpoint_path(self) -> Path:
        """All that ``--resume`` needs: ``checkpoint.safetensors``."""
        return self.path / "checkpoint.safetensors"

    @property
    def metrics_path(self) -> Path:
        """A row per epoch: ``metrics.jsonl``."""
        return self.path / "metrics.jsonl"

    @property
    def evaluation_path(self) -> Path:
        """What ``covary evaluate`` measured: ``evaluation.json``."""
        return self.path / "evaluation.json"

    @property
    def predictions_path(self) -> Path:
        """Mean, variance and entropy of every sample: ``predictions.npz``."""
        return self.path / "predictions.npz"

    @property
    def fidelity_path(self) -> Path:
        """What ``covary fidelity`` measured: ``fidelity.json``."""
        return self.path / "fidelity.json"

    @property
    def attack_path(self) -> Path:
        """What ``covary attack`` measured: ``attack.json``."""
        return self.path / "attack.json"

    @property
    def verification_path(self) -> Path:
        """What ``covary verify`` measured: ``verification.json``."""
        return self.path / "verification.json"

    @property
    def spikes_path(self) -> Path:
        """What ``covary verify`` measured of spiking neurons: ``spikes.json``."""
        return self.path / "spikes.json"

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_path.exists()

    @property
    def config(self) -> RunConfig:
        """The configuration, or an error that says what is missing."""
        if not self.exists():
            hint = "Train one first: covary train DATA --out " + str(self.path)
            raise RunError(f"{self.path} holds no run (there is no config.toml in it). {hint}")
        return self._once(
            "config", [self.config_path], lambda: RunConfig.from_toml(self.config_path)
        )

    @property
    def config_text(self) -> str:
        """``config.toml`` as it is."""
        return self._once("text", [self.config_path], lambda: read_text(self.config_path))

    @property
    def classifies(self) -> bool:
        """Whether it predicts classes, and not numbers."""
        return self.config.model.task == "classification"

    @property
    def schema(self) -> Schema | None:
        """How the columns of a table became numbers; None for other data."""
        path = self.path / "schema.json"
        if not path.exists():
            return None
        return self._once("schema", [path, self.config_path], lambda: _schema(path, self.config))

    @property
    def environment(self) -> Environment | None:
        """How it was trained: command, versions, machine."""
        return self._result(Environment, self.path / "environment.json", "train")

    @property
    def history(self) -> tuple[Numbers, ...]:
        """Numbers of each epoch of the training that the configuration has, in order."""
        path = self.metrics_path
        if not path.exists():
            return ()
        return self._once("history", [path, self.config_path], lambda: _history(path, self.config))

    @property
    def data(self) -> Dataset:
        """The data that it was trained on, and is tested on."""
        config = self.config
        table = [Path(config.data.name)] if config.data.is_table else []
        return self._once(
            "data",
            [self.config_path, *(path for path in table if path.exists())],
            lambda: load_data(config.data, data_dir=self.data_dir, seed=config.training.seed)[0],
        )

    def foreign(self, names: Sequence[str], *, seed: int) -> tuple[dict[str, Tensor], list[str]]:
        """Out-of-distribution inputs, by what they are called in results; notes on reading them."""
        return foreign_sets(
            self.config.data, self.schema, self.data, names, data_dir=self.data_dir, seed=seed
        )

    def network(
        self,
        covariance: str | None = None,
        *,
        exact_width: int | None = None,
        epoch: int | None = None,
    ) -> nn.Sequential:
        """A new copy of the network, in evaluation mode: raw inputs in, raw outputs out.

        As far as training has come: a run that is not finished has its weights in the checkpoint.

        Args:
            covariance: how it is held; as in training if None.
            exact_width: of tracked covariances, as in ``covary.with_covariance``.
            epoch: as it was after an epoch whose weights were put aside (``covary train --keep``).
        """
        model = self.config.model
        try:
            net = model.build()
        except (ValueError, TypeError, RuntimeError) as error:
            raise FileError(
                f"{self.config_path} names a network that cannot be built: {error}"
            ) from error
        path, tensors = self._weights(epoch)
        load_weights(net, tensors, path, f"the network of {self.config_path.name}")
        net.eval()
        if covariance is None:
            return net
        width = model.exact_width if exact_width is None else exact_width
        return with_covariance(
            net, covariance, exact_width=width if covariance == "tracked" else None
        )

    @property
    def weights(self) -> str:
        """Digest of the network, to know it by."""
        return self._once("digest", self._weight_files(), lambda: weights_digest(self.network()))

    @property
    def tracking(self) -> TrackingFidelity | None:
        """How well tracked covariances of the network are known to agree; None if unknown."""
        _, tensors = self._weights()
        tables = [value for name, value in tensors.items() if name.endswith("fidelity")]
        return TrackingFidelity.of(tables[0]) if tables else None

    def _weights(self, epoch: int | None = None) -> tuple[Path, dict[str, Tensor]]:
        """A file of weights, and the tensors of the network in it."""
        path, prefix = self.model_path, ""
        if epoch is not None:
            path, prefix = snapshot_path(self.checkpoint_path, epoch), "objective/net."
            if not path.exists():
                raise RunError(
                    f"{self.path} has not kept its weights after epoch {epoch}, only after "
                    f"{', '.join(map(str, self.kept_epochs())) or 'none'}."
                )
        elif not path.exists():
            path, prefix = self.checkpoint_path, "objective/net."
        if not path.exists():
            raise RunError(
                f"{self.path} has no weights yet: its training ended before the first checkpoint. "
                "Go on with it: the same covary train command, with --resume in place of "
                "--overwrite. (A run that it was to replace is in .replaced there.)"
            )
        tensors, _ = self._once(f"tensors {path.name}", [path], lambda: read_tensors(path))
        return path, {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    def _weight_files(self) -> list[Path]:
        files = (self.config_path, self.model_path, self.checkpoint_path)
        return [path for path in files if path.exists()]

    def kept_epochs(self) -> list[int]:
        """Epochs whose weights were put aside, in order."""
        folder = snapshot_path(self.checkpoint_path, 0).parent
        return sorted(int(path.stem) for path in folder.glob("[0-9]*.safetensors"))

    @property
    def evaluation(self) -> Evaluation | None:
        """What ``covary evaluate`` measured."""
        return self._result(Evaluation, self.evaluation_path, "evaluate")

    @property
    def predictions(self) -> Mapping[str, Predictions] | None:
        """What the network said to each input when it was evaluated, by part."""
        evaluation, path = self.evaluation, self.predictions_path
        if evaluation is None or not path.exists():
            return None
        remedy = self._remedy("evaluate")

        def read() -> dict[str, Predictions]:
            if evaluation.predictions_sha256:
                check_belongs(path, evaluation.predictions_sha256, self.evaluation_path, remedy)
            return predictions.read(path, task=evaluation.task, remedy=remedy)

        return self._once("predictions", [path, self.evaluation_path], read)

    @property
    def fidelity(self) -> Fidelity | None:
        """What ``covary fidelity`` measured."""
        return self._result(Fidelity, self.fidelity_path, "fidelity")

    @property
    def attack(self) -> Attack | None:
        """What ``covary attack`` measured."""
        return self._result(Attack, self.attack_path, "attack")

    @property
    def verification(self) -> Verification | None:
        """What ``covary verify`` measured."""
        return self._result(Verification, self.verification_path, "verify")

    @property
    def spikes(self) -> SpikingVerification | None:
        """What ``covary verify`` measured of a network of spiking neurons."""
        return self._result(SpikingVerification, self.spikes_path, "verify")

    def is_current(self, result: Result | None) -> bool:
        """Whether there is a result, and it is of the weights in the folder."""
        return result is not None and result.weights == self.weights

    @property
    def kept_calibration(self) -> KeptCalibration | None:
        """``calibration.json``, of whatever weights."""
        path = self.path / held_out.CALIBRATION
        if not path.exists():
            return None
        return self._once("calibration", [path], lambda: held_out.read_calibration(path))

    @property
    def held_out(self) -> HeldOut | None:
        """What held-out data gave for the weights in the folder."""
        kept = self.kept_calibration
        if kept is None or kept.weights != self.weights:
            return None
        scores = [self.path / file for _, file in held_out.SCORES.values()]
        files = [self.path / held_out.CALIBRATION, *(path for path in scores if path.exists())]
        return self._once("held out", files, lambda: held_out.read(self.path, kept))

    @property
    def calibration(self) -> Calibration | None:
        """The layer that calibrates the output's moments."""
        found = self.held_out
        return None if found is None else found.calibration

    @property
    def score(self) -> FittedScore | None:
        """The score of all layers' moments that was fitted to held-out data."""
        found = self.held_out
        return None if found is None else found.scores.get("fitted")

    def clear(self) -> None:
        """Remove all that a run has made here, and nothing else."""
        files = [self.path / name for name in _FILES]
        self.check_replaceable(*files)
        for path in [*files, *self.path.glob(".*.unfinished")]:
            path.unlink(missing_ok=True)
        for folder in _FOLDERS:
            shutil.rmtree(self.path / folder, ignore_errors=True)

    def put_aside(self) -> None:
        """Move all that a run has made here to a folder of its own, until another is in place."""
        self.check_replaceable(*(self.path / name for name in _FILES))
        # The configuration goes last: without it a process was killed on the way, and goes on here.
        if (self._aside / self.config_path.name).exists():
            if not self.model_path.exists():
                self.put_back()  # what was to replace it did not come to its end
            self.drop_aside()
        for path in (self.path / name for name in (*_FOLDERS, *reversed(_FILES))):
            if path.exists():
                self._aside.mkdir(exist_ok=True)
                path.replace(self._aside / path.name)

    def put_back(self) -> None:
        """Undo ``put_aside``; what was made since is removed."""
        if self._aside.exists():
            self.clear()
            for path in self._aside.iterdir():
                path.replace(self.path / path.name)
            self._aside.rmdir()

    def drop_aside(self) -> None:
        """Remove what was put aside."""
        shutil.rmtree(self._aside, ignore_errors=True)

    @property
    def _aside(self) -> Path:
        return self.path / ".replaced"

    @contextmanager
    def held_for_training(self) -> Iterator[None]:
        """Keep other processes from training into the same folder meanwhile."""
        with ExitStack() as stack:
            try:
                stack.enter_context(held(self.path, wait=False))
            except BlockingIOError:
                raise RunError(
                    f"{self.path} is being trained by another process. Wait for it, stop it, or "
                    "choose another folder (--out)."
                ) from None
            yield

    def check_replaceable(self, *paths: Path) -> None:
        """Refuse at once what could not be written in the end: a folder in the place of a file."""
        for path in paths:
            if path.is_dir():
                raise FileError(f"{path} is a folder, where a file is expected. Move it away.")

    def save_network(self, net: nn.Module) -> None:
        """Write the weights, whole or not at all."""
        write_tensors(self.model_path, net.state_dict())

    def save_tracking(self, net: nn.Module) -> bool:
        """Add what ``covary.track`` measured to the weights, if training is finished."""
        if not self.model_path.exists():
            return False
        weights, metadata = read_tensors(self.model_path)
        state = net.state_dict()
        tracking = {name: state[name] for name in state if _is_tracking(name)}
        write_tensors(self.model_path, weights | tracking, metadata or None)
        return True

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of JSON, whole or not at all."""
        write_json(self.path / name, content)

    def _result(self, kind: type[Kept], path: Path, command: str) -> Kept | None:
        if not path.exists():
            return None
        beside = path.with_suffix(".npz")
        files = [path, beside] if beside.exists() else [path]
        return self._once(path.name, files, lambda: kind.read(path, self._remedy(command)))

    def _remedy(self, command: str) -> str:
        if command == "train":
            return "Nothing needs that file: remove it."
        return f"Run `covary {command} {self.path}` again, or remove the file."

    def _once(self, name: str, files: Sequence[Path], read: Callable[[], Value]) -> Value:
        """What was read before, unless one of the files is another one now."""
        stamps = [(s.st_mtime_ns, s.st_size, s.st_ino) for s in map(Path.stat, files)]
        kept = self._kept.get(name)
        if kept is not None and kept[0] == (files, stamps):
            value: Value = kept[1]
            return value
        value = read()
        self._kept[name] = ((files, stamps), value)
        return value


def open_run(path: Path | str, *, data_dir: str | None = None) -> Run:
    """The run in a folder.

    Args:
        path: the folder, as ``covary train`` left it.
        data_dir: where data are looked for first.

    Raises:
        RunError: if there is no run.
    """
    run = Run(path, data_dir=data_dir)
    _ = run.config
    return run


def _schema(path: Path, config: RunConfig) -> Schema:
    remedy = "It was written by covary train: train again, or take it from a copy of the run."
    schema = decoded(Schema, read_json(path), str(path), remedy)
    if config.data.is_table and (len(schema.features),) != config.model.input_shape:
        raise FileError(
            f"{path} has columns for {len(schema.features)} inputs, and the network of config.toml "
            f"takes {config.model.input_shape}. {remedy}"
        )
    return schema


def _history(path: Path, config: RunConfig) -> tuple[Numbers, ...]:
    epochs: dict[int, Numbers] = {}
    for row in log.read(path):
        if row.get("kind") != "epoch":
            continue
        epoch = row.get("epoch")
        if not isinstance(epoch, int):
            raise FileError(f"{path}, step {row['step']}, has no whole number as 'epoch'.")
        numbers = {
            key: value for key, value in row.items() if isinstance(value, int | float | None)
        }
        epochs[epoch] = numbers
    return tuple(epochs[epoch] for epoch in sorted(epochs) if epoch <= config.training.epochs)


def _is_tracking(name: str) -> bool:
    return name.rpartition(".")[2] in _TRACKING_BUFFERS


def weights_digest(net: nn.Module) -> str:
    """SHA-256 of a network's parameters and buffers, to know it by; not of how it tracks.

    Nor of its noise, which the configuration of a run has.
    """
    noises = {
        f"{path}.{key}".lstrip(".")
        for path, layer in net.named_modules(remove_duplicate=False)
        if isinstance(layer, Noisy)
        for key in ("noise", "poisson")
    }
    digest = hashlib.sha256()
    for name, value in net.state_dict().items():
        if _is_tracking(name) or name in noises:
            continue
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(started: datetime, *, code: Sequence[Path] = (), **more: Any) -> dict[str, Any]:
    """What a result depends on besides its configuration: command, versions, commit, machine.

    Args:
        started: when the work began.
        code: folders beside covary's own whose code decides the result; changes there mark the
            commit, too.
        **more: further entries.
    """
    return {
        "command": command_line(),
        "versions": versions(),
        "git_commit": _git_commit(code),
        "platform": f"{platform.system()} {platform.machine()}",
        "started": started.isoformat(timespec="seconds"),
        **elapsed(started),
        **more,
    }


def elapsed(started: datetime) -> dict[str, float]:
    """How long it has taken until now."""
    return {"seconds": round((datetime.now(timezone.utc) - started).total_seconds(), 1)}


def command_line() -> str:
    """The command that is running, to be pasted into a shell again."""
    program = Path(sys.argv[0])
    words = ["python", "-m", program.parent.name] if program.stem == "__main__" else [program.name]
    if "covary" in (program.stem, words[-1]):
        words = ["covary"]
    return shlex.join([*words, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Python and the libraries that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git_commit(code: Sequence[Path]) -> str | None:
    """The commit of covary's own source, if it runs from a clone; marked if files of it differ.

    It is also marked if files in folders of other ``code`` differ.
    """
    folders = [".", *map(str, code)]
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", *folders)
    return f"{commit}-dirty" if commit and changes else commit


def _git(*arguments: str) -> str | None:
    try:
        ran = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()
