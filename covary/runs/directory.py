"""The folder of a run: what is in it, and who may write there."""

from __future__ import annotations

import hashlib
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from covary.data import Schema
from covary.data.locking import held
from covary.files import (
    read_json,
    write_arrays,
    write_json,
    write_tensors,
)
from covary.files import read_tensors as read
from covary.nn import Noisy
from covary.runs.config import RunConfig
from covary.training.checkpoint import load_weights, position_in, snapshot_path

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


class RunError(ValueError):
    """A folder that is no run, or not in the state that was asked for."""


class Run:
    """A run's folder. Everything in it is text, JSON, safetensors or numpy; nothing is pickled.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

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

    def config(self) -> RunConfig:
        """The configuration, or an error that says what is missing."""
        if not self.exists():
            hint = "Train one first: covary train DATA --out " + str(self.path)
            raise RunError(f"{self.path} holds no run (there is no config.toml in it). {hint}")
        return RunConfig.from_toml(self.config_path)

    def schema(self) -> Schema | None:
        """How the columns of a table became numbers; None for other data."""
        path = self.path / "schema.json"
        if not path.exists():
            return None
        return Schema.from_dict(read_json(path))

    def network(self, epoch: int | None = None) -> nn.Sequential:
        """The network, in evaluation mode: raw inputs in, raw outputs out.

        As far as training has come: a run that is not finished has its weights in the checkpoint.
        Or as it was after an epoch whose weights were put aside (``covary train --keep``).
        """
        net = self.config().model.build()
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
                "Go on with it: the same covary train command and --resume."
            )
        tensors, _ = read(path)
        found = {
            name.removeprefix(prefix): value
            for name, value in tensors.items()
            if name.startswith(prefix)
        }
        load_weights(net, found, path)
        return net.eval()

    def kept_epochs(self) -> list[int]:
        """Epochs whose weights were put aside, in order."""
        folder = snapshot_path(self.checkpoint_path, 0).parent
        return sorted(int(path.stem) for path in folder.glob("[0-9]*.safetensors"))

    def epochs_done(self) -> int:
        """How many epochs are complete, as the checkpoint has it."""
        if not self.checkpoint_path.exists():
            return 0
        _, metadata = read(self.checkpoint_path)
        return position_in(metadata, self.checkpoint_path).epoch

    def clear(self) -> None:
        """Remove all that a run has made here, and nothing else."""
        for path in [*(self.path / name for name in _FILES), *self.path.glob(".*.unfinished")]:
            path.unlink(missing_ok=True)
        for folder in ("tensorboard", "figures", "epochs"):
            shutil.rmtree(self.path / folder, ignore_errors=True)

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

    def evaluation_is_current(self) -> bool:
        """Whether the evaluation in the folder is of the weights in the folder."""
        if not self.evaluation_path.exists():
            return False
        evaluation = read_json(self.evaluation_path)
        return bool(evaluation.get("weights") == weights_digest(self.network()))

    def save_network(self, net: nn.Module) -> None:
        """Write the weights, whole or not at all."""
        write_tensors(self.model_path, net.state_dict())

    def save_tracking(self, net: nn.Module) -> bool:
        """Add what ``covary.track`` measured to the weights, if training is finished."""
        if not self.model_path.exists():
            return False
        weights, _ = read(self.model_path)
        state = net.state_dict()
        tracking = {name: state[name] for name in state if _is_tracking(name)}
        write_tensors(self.model_path, weights | tracking)
        return True

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of JSON, whole or not at all."""
        write_json(self.path / name, content)

    def write_arrays(self, name: str, arrays: dict[str, Any]) -> None:
        """Write arrays as compressed ``.npz``, whole or not at all."""
        write_arrays(self.path / name, arrays)


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
