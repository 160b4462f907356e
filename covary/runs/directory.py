"""A run: a folder with everything that made a trained network, and what was measured of it."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from covary.data import Dataset, ImageSchema, Schema, describe
from covary.data.locking import locked
from covary.files import FileError, read_json, read_tensors, read_text, write_tensors
from covary.models import with_covariance, with_noise
from covary.moments import Moments
from covary.nn import Linear, Noisy
from covary.nn.fidelity import Fidelity as TrackingFidelity
from covary.nn.protocol import activation_of
from covary.runs import predictions, results
from covary.runs.config import RunConfig
from covary.runs.predictions import Predictions
from covary.runs.records import Provenance, Stored, decoded
from covary.runs.results import HeldOut, KeptCalibration
from covary.runs.samples import load_data, ood_sets
from covary.training import Epoch, log
from covary.training.checkpoint import load_weights, snapshot_path
from covary.uncertainty.fitted import FittedScore

Value = TypeVar("Value")
Kept = TypeVar("Kept", bound=Stored)
_LIBRARIES = ("covary", "torch", "numpy", "lightning-fabric", "safetensors")
# They change how a covariance is found, not what the network is.
_TRACKING_BUFFERS = ("log_correction", "probed", "fidelity")
_CALIBRATION = "calibration.json"
# The name of each fitted score in results, and its file.
_SCORES = {"fitted": "score.safetensors", "fitted_plain": "score-plain.safetensors"}
HELD_OUT = (_CALIBRATION, *_SCORES.values())
_MEASURED = ("fidelity", "verification", "spikes", "attack")
_FILES = (
    "config.toml",  # first, and therefore the last one that is put aside
    "schema.json",
    "environment.json",
    "metrics.jsonl",
    "checkpoint.safetensors",
    "model.safetensors",
    "evaluation.json",
    "predictions.npz",
    *HELD_OUT,
    "predictor.safetensors",
    *(name + suffix for name in _MEASURED for suffix in (".json", ".npz")),
    "report.html",
)
_FOLDERS = ("tensorboard", "figures", "epochs")
# Of model.safetensors, in its metadata; files from before it was written are read as they are.
FORMAT = "1"
# The first line of a README.md that covary wrote, and may therefore replace.
CARD_MARK = "<!-- Written by covary. It is written again when the run is trained or evaluated. -->"


class RunError(ValueError):
    """A folder that is no run, or not in the state that was asked for."""


class _File(Generic[Kept]):
    """A file of JSON that a command left in a run's folder, with its type; None if it is absent."""

    def __init__(self, kind: type[Kept], file: str, command: str) -> None:
        self.kind, self.file, self.command = kind, file, command

    def __get__(self, run: Run | None, _: type[Run]) -> Kept | None:
        if run is None:
            raise AttributeError(f"{self.file} belongs to a run: covary.runs.open(folder).")
        path = run.path / self.file
        if not path.exists():
            return None
        remedy, files = run.remedy(self.command), (path, path.with_suffix(".npz"))
        return run.once(self.file, lambda: self.kind.read(path, remedy), *files)


class Run:
    """A folder with a trained network, and what is in it.

    Everything in it is text, JSON, safetensors or numpy; nothing is pickled. Each file is read when
    it is first asked for, checked once, and read again only if it has changed. What was never
    measured is None: ``evaluation``, ``fidelity``, ``attack``, ``verification`` and ``spikes`` (of
    spiking neurons) are what the commands of these names measured, ``environment`` is how it was
    trained.

    Args:
        path: the folder.
        data_dir: where data are looked for first.
    """

    environment = _File(results.Environment, "environment.json", "")
    evaluation = _File(results.Evaluation, "evaluation.json", "evaluate")
    fidelity = _File(results.FidelityResult, "fidelity.json", "fidelity")
    attack = _File(results.Attack, "attack.json", "attack")
    verification = _File(results.SteadyVerification, "verification.json", "verify")
    spikes = _File(results.SpikingVerification, "spikes.json", "verify")
    kept_calibration = _File(KeptCalibration, _CALIBRATION, "calibrate")  # of whatever weights

    def __init__(self, path: Path | str, *, data_dir: str | None = None) -> None:
        self.path = Path(path)
        self.data_dir = data_dir
        self.config_path = self.path / "config.toml"
        self.schema_path = self.path / "schema.json"  # of a table
        self.environment_path = self.path / "environment.json"  # how it was trained
        self.model_path = self.path / "model.safetensors"  # of a finished training
        self.checkpoint_path = self.path / "checkpoint.safetensors"  # all that --resume needs
        self.metrics_path = self.path / "metrics.jsonl"  # a row per epoch
        self.predictor_path = self.path / "predictor.safetensors"  # fitted for covary predict
        self.evaluation_path = self.path / "evaluation.json"
        self.predictions_path = self.path / "predictions.npz"  # of every sample
        self.fidelity_path = self.path / "fidelity.json"
        self.attack_path = self.path / "attack.json"
        self.verification_path = self.path / "verification.json"
        self.spikes_path = self.path / "spikes.json"
        self.card_path = self.path / "README.md"  # about the model, for people
        self._aside = self.path / ".replaced"
        self._kept: dict[str, tuple[object, Any]] = {}

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def once(self, name: str, read: Callable[[], Value], *files: Path) -> Value:
        """What was read before; it is read again if one of the files has changed since."""
        found = [path.stat() if path.exists() else None for path in files]
        stamps = [stat and (stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found]
        if name not in self._kept or self._kept[name][0] != (files, stamps):
            self._kept[name] = ((files, stamps), read())
        value: Value = self._kept[name][1]
        return value

    def remedy(self, command: str) -> str:
        """What to do about a damaged file that a command wrote."""
        if not command:
            return "Nothing needs that file: remove it."
        return f"Run `covary {command} {self.path}` again, or remove the file."

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.config_path.exists()

    @property
    def is_writable(self) -> bool:
        """Whether what is found out can be kept in the folder."""
        return os.access(self.path, os.W_OK)

    @property
    def config(self) -> RunConfig:
        """The configuration, or an error that says what is missing."""
        if not self.exists():
            inner = sorted(self.path.glob("seed-*/mnn/config.toml"))
            if inner:
                raise RunError(
                    f"{self.path} holds a comparison (covary compare), which has a run for each "
                    f"seed. Name one of them, such as {inner[0].parent}."
                )
            raise RunError(
                f"{self.path} holds no run (there is no config.toml in it). Train one first: "
                f"covary train DATA --out {self.path}"
            )
        return self.once("config", lambda: RunConfig.from_toml(self.config_path), self.config_path)

    @property
    def config_text(self) -> str:
        """``config.toml`` as it is."""
        return read_text(self.config_path)

    @property
    def classifies(self) -> bool:
        """Whether it predicts classes, and not numbers."""
        return self.config.model.task == "classification"

    @property
    def schema(self) -> Schema | None:
        """How the columns of a table became numbers; None for other data."""
        path = self.schema_path
        if not path.exists():
            return None
        return self.once("schema", lambda: _schema(path, self.config), path, self.config_path)

    @property
    def images(self) -> ImageSchema | None:
        """What images it takes, and its classes; None for other data."""
        model, name = self.config.model, self.config.data.name
        if not model.is_image:
            return None
        channels, height, width = model.input_shape
        return ImageSchema((channels, height, width), describe(name).classes)

    @property
    def history(self) -> tuple[Epoch, ...]:
        """Each epoch of the training that the configuration has, in order."""
        path = self.metrics_path
        if not path.exists():
            return ()
        return self.once("history", lambda: _history(path, self.config), path, self.config_path)

    @property
    def data(self) -> Dataset:
        """The data that it was trained on, and is tested on."""
        config, seed = self.config.data, self.config.training.seed
        return self.once(
            "data",
            lambda: load_data(config, data_dir=self.data_dir, seed=seed)[0],
            self.config_path,
            *([Path(config.name)] if config.is_table else []),
        )

    def ood(
        self, names: Sequence[str], *, seed: int
    ) -> tuple[dict[str, Tensor | Moments], list[str]]:
        """Out-of-distribution inputs, by what results call them, and notes on reading them."""
        return ood_sets(
            self.config.data, self.schema, self.data, names, data_dir=self.data_dir, seed=seed
        )

    def network(self, covariance: str | None = None, *, epoch: int | None = None) -> nn.Sequential:
        """A new copy of the network, in evaluation mode: raw inputs in, raw outputs out.

        As far as training has come: a run that is not finished has its weights in the checkpoint.

        Args:
            covariance: how it is stored; as in training if None.
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
        return with_covariance(net, model.tracked if covariance == "tracked" else covariance)

    @property
    def weights(self) -> str:
        """Digest of the network, to know it by."""
        files = (self.config_path, self.model_path, self.checkpoint_path)
        return self.once("digest", self._digest, *files)

    def _digest(self) -> str:
        with torch.random.fork_rng(devices=[]):  # a new network draws weights that nobody needs
            found, kept = weights_digest(self.network()), self.metadata.get("weights")
        if kept not in (None, found):
            raise FileError(
                f"{self.model_path} has other weights than its metadata says (digest "
                f"{kept[:8]}): it was changed or damaged. Take it from a copy, or train again."
            )
        return found

    @property
    def metadata(self) -> dict[str, str]:
        """What ``model.safetensors`` says of itself; empty before training is finished."""
        path = self.model_path
        if not path.exists():
            return {}
        found = self.once(f"tensors {path.name}", lambda: read_tensors(path), path)[1]
        if found.get("format", FORMAT) != FORMAT:
            raise FileError(
                f"{path} has format {found['format']!r} of covary {found.get('covary', '')}, and "
                f"this covary reads format {FORMAT!r}. Update covary, or train again."
            )
        return found

    @property
    def has_card(self) -> bool:
        """Whether its README.md is one that covary wrote, and not somebody else's."""
        if not self.card_path.is_file():
            return False
        with self.card_path.open("rb") as file:
            return file.readline().strip() == CARD_MARK.encode()

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
        tensors, _ = self.once(f"tensors {path.name}", lambda: read_tensors(path), path)
        _ = self.metadata  # of a version that can be read
        return path, {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    def kept_epochs(self) -> list[int]:
        """Epochs whose weights were put aside, in order."""
        folder = snapshot_path(self.checkpoint_path, 0).parent
        return sorted(int(path.stem) for path in folder.glob("[0-9]*.safetensors"))

    @property
    def predictions(self) -> Mapping[str, Predictions] | None:
        """What the network said to each input when it was evaluated, by part."""
        evaluation, path = self.evaluation, self.predictions_path
        if evaluation is None or not path.exists():
            return None
        remedy = self.remedy("evaluate")

        def read() -> dict[str, Predictions]:
            if evaluation.predictions_sha256:
                results.check_belongs(
                    path, evaluation.predictions_sha256, self.evaluation_path, remedy
                )
            return predictions.read(path, task=evaluation.task, remedy=remedy)

        return self.once("predictions", read, path, self.evaluation_path)

    def about(self, started: datetime, seed: int) -> dict[str, Any]:
        """Fields that all results have: what was measured, and how that came about."""
        return {
            "dataset": self.config.data.name,
            "task": self.config.model.task,
            "weights": self.weights,
            **vars(environment(started)),
            "seed": seed,
        }

    def is_current(self, result: results.Result | None) -> bool:
        """Whether there is a result, and it is of the weights in the folder."""
        return result is not None and result.weights == self.weights

    @property
    def held_out(self) -> HeldOut | None:
        """What held-out data gave for the weights in the folder; None if a score of it is gone."""
        kept = self.kept_calibration
        if kept is None or kept.weights != self.weights:
            return None
        files = (self.path / name for name in HELD_OUT)
        return self.once("held out", lambda: _held_out(self.path, kept), *files)

    def save_held_out(self, found: HeldOut, covariance: str) -> None:
        """Keep what was fitted, if the folder is writable; other scores are kept no longer."""
        if not self.is_writable:
            return
        for name, score in found.scores.items():
            score.save(self.path / _SCORES[name], weights=self.weights, covariance=covariance)
        KeptCalibration(
            **vars(found.numbers()),
            samples=found.samples,
            notes=tuple(found.notes),
            weights=self.weights,
            covariance=covariance,
            scores=tuple(found.scores),
        ).write(self.path / _CALIBRATION)
        for name in _SCORES.keys() - found.scores.keys():
            (self.path / _SCORES[name]).unlink(missing_ok=True)

    def calibrated_network(self) -> nn.Sequential:
        """The network as held-out data calibrated it, in evaluation mode: raw inputs -> Moments.

        With the covariance and the noise that the calibration is of, which it goes with alone, and
        with the calibration as its last layer.
        """
        found, kept = self.held_out, self.kept_calibration
        if found is None or found.calibration is None or kept is None:
            raise RunError(
                f"{self.path} has no calibration of its weights. Run `covary calibrate "
                f"{self.path}`."
            )
        net = self.network(kept.covariance)
        net = net if found.noise is None else with_noise(net, found.noise)
        return nn.Sequential(net, found.calibration).eval()

    @property
    def score(self) -> FittedScore | None:
        """The score of all layers' moments that was fitted to held-out data."""
        found = self.held_out
        return None if found is None else found.scores.get("fitted")

    def clear(self) -> None:
        """Remove all that a run has made here, and nothing else."""
        files = [self.path / name for name in _FILES]
        self.check_replaceable(*files)
        files += [self.card_path] * self.has_card
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
        card = (self.card_path.name,) * self.has_card
        for path in (self.path / name for name in (*_FOLDERS, *card, *reversed(_FILES))):
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

    @contextmanager
    def locked_for_training(self) -> Iterator[None]:
        """Keep other processes from training into the same folder meanwhile."""
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path, wait=False))
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
        """Write the weights, and in the metadata what they are of, whole or not at all."""
        layers = [layer for layer in net.modules() if isinstance(layer, Linear)]
        widths = [*(layer.in_features for layer in layers[:1]), *(x.out_features for x in layers)]
        names = (activation_of(layer) for layer in net.modules())
        kept = net
        if self.config_path.exists():  # networks that are compared have none
            with torch.random.fork_rng(devices=[]):
                kept = self.config.model.build()  # of the precision in which it will be opened
            kept.load_state_dict(net.state_dict())
        metadata = {
            "format": FORMAT,
            "covary": versions().get("covary", ""),
            "widths": "-".join(map(str, widths)),
            "activation": ", ".join(dict.fromkeys(str(name) for name in names if name)),
            "weights": weights_digest(kept),
        }
        write_tensors(self.model_path, net.state_dict(), metadata)

    def save_tracking(self, net: nn.Module) -> bool:
        """Add what ``covary.track`` measured to the weights, if training is finished."""
        if not (self.model_path.exists() and self.is_writable):
            return False
        weights, metadata = read_tensors(self.model_path)
        tracking = {name: value for name, value in net.state_dict().items() if _is_tracking(name)}
        write_tensors(self.model_path, weights | tracking, metadata or None)
        return True


def open_run(path: Path | str, *, data_dir: str | None = None) -> Run:
    """The run in a folder, as ``covary train`` left it; a ``RunError`` if there is none.

    Data are looked for in ``data_dir`` first.
    """
    run = Run(path, data_dir=data_dir)
    _ = run.config
    return run


def _schema(path: Path, config: RunConfig) -> Schema:
    remedy = "It was written by covary train: train again, or take it from a copy of the run."
    schema = decoded(Schema, read_json(path, remedy), str(path), remedy)
    if config.data.is_table and (len(schema.features),) != config.model.input_shape:
        raise FileError(
            f"{path} has columns for {len(schema.features)} inputs, and the network of config.toml "
            f"takes {config.model.input_shape}. {remedy}"
        )
    return schema


def _history(path: Path, config: RunConfig) -> tuple[Epoch, ...]:
    epochs = {row.epoch: row for row in log.read(path)}
    return tuple(epochs[epoch] for epoch in sorted(epochs) if epoch <= config.training.epochs)


def _held_out(folder: Path, kept: KeptCalibration) -> HeldOut | None:
    """All that belongs to a calibration; None if a score is gone, or is of another network."""
    scores = {}
    for name, file in _SCORES.items():
        if (folder / file).exists():
            scores[name], about = FittedScore.load_with(folder / file)
            if about != {"weights": kept.weights, "covariance": kept.covariance}:
                return None
    if set(kept.scores) != set(scores):
        return None
    found = (kept.samples, list(kept.notes), kept.noise, kept.thresholds)
    return HeldOut(kept.layer(), scores, *found)


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
        if not _is_tracking(name) and name not in noises:
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def environment(started: datetime, *, code: Sequence[Path] = ()) -> Provenance:
    """Where and how a result comes about, now.

    Changes in folders of other ``code`` that decides the result mark the commit, too.
    """
    return Provenance(
        command=command_line(),
        versions=versions(),
        git_commit=_git_commit(code),
        platform=f"{platform.system()} {platform.machine()}",
        started=started.isoformat(timespec="seconds"),
        seconds=elapsed(started),
    )


def elapsed(started: datetime) -> float:
    """Seconds until now."""
    return round((datetime.now(timezone.utc) - started).total_seconds(), 1)


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
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git_commit(code: Sequence[Path]) -> str | None:
    """The commit of covary's clone, if it is one; marked if files of it or of ``code`` differ."""
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
