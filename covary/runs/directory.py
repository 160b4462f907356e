"""The folder of a run: what is in it, and who may write there."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from covary.data import Schema
from covary.runs.config import RunConfig
from covary.training.checkpoint import read, write_atomically

_LIBRARIES = ("covary", "torch", "numpy", "lightning-fabric", "safetensors")


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
        """The weights after the last complete epoch: ``model.safetensors``."""
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
        return Schema.from_dict(json.loads(path.read_text(encoding="utf-8")))

    def network(self) -> nn.Sequential:
        """The trained network, in evaluation mode: raw inputs in, raw outputs out."""
        net = self.config().model.build()
        if not self.model_path.exists():
            raise RunError(
                f"{self.path} has no weights yet: its training was stopped before the first epoch "
                "was complete. Go on with it: the same covary train command and --resume."
            )
        tensors, _ = read(self.model_path)
        try:
            net.load_state_dict(tensors)
        except RuntimeError as error:
            raise RunError(f"{self.model_path} does not fit {self.config_path}: {error}") from error
        return net.eval()

    def save_network(self, net: nn.Module) -> None:
        """Write the weights, whole or not at all."""
        from safetensors.torch import save

        whole = {
            name: value.detach().cpu().contiguous() for name, value in net.state_dict().items()
        }
        write_atomically(self.model_path, save(whole))

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a file of JSON, whole or not at all."""
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
        write_atomically(self.path / name, text.encode())


def environment(started: datetime, **more: Any) -> dict[str, Any]:
    """What a result depends on besides its configuration: command, versions, commit, machine."""
    return {
        "command": command_line(),
        "versions": versions(),
        "git_commit": _git_commit(),
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
    if Path(sys.argv[0]).stem in ("covary", "__main__"):
        return shlex.join(["covary", *sys.argv[1:]])
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def versions() -> dict[str, str]:
    """Python and the libraries that numbers depend on."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _git_commit() -> str | None:
    """The commit of covary's own source, if it runs from a clone; marked if files differ."""
    source = Path(__file__).parent
    try:
        ran = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=source,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()
