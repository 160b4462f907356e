"""``torchrun ... -m covary train``: two nodes, simulated on the loopback of this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from covary.runs.training import _fabric
from tests.commands import trained_run

ROOT = Path(__file__).parents[1]
TRAIN = ["two-moons", "--hidden", "8", "--covariance", "full", "--accelerator", "cpu"]


def node(rank: int, port: int, *arguments: object) -> subprocess.Popen[str]:
    """One launch of torchrun, with one process on the node."""
    launch = ["--nnodes", 2, "--node-rank", rank, "--nproc-per-node", 1, "--max-restarts", 0]
    launch += ["--master-addr", "127.0.0.1", "--master-port", port]
    command = [*launch, "-m", "covary", "train", *TRAIN, *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def nodes(*arguments: object) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [node(rank, port, *arguments) for rank in (0, 1)]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses_of_one_process(folder: Path, epochs: int) -> list[float]:
    chosen = {"hidden": (8,), "covariance": "full", "epochs": epochs}
    return losses(trained_run(folder / "one", "two-moons", **chosen).path)


def finished(running: list[subprocess.Popen[str]]) -> str:
    """What they say, all with success."""
    said = [each.communicate(timeout=100)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0], "\n".join(said)
    return "".join(said)


def test_two_nodes_give_the_losses_of_one_process(tmp_path):
    run = tmp_path / "two"
    said = finished(nodes("--epochs", 4, "--out", run))
    assert said.count("Done. Measure it") == 1  # the first process alone prints
    assert losses(run) == pytest.approx(losses_of_one_process(tmp_path, 4), rel=1e-4)
    environment = json.loads((run / "environment.json").read_text())
    assert environment["processes"] == 2
    assert (run / "model.safetensors").exists()


@pytest.mark.slow
def test_two_nodes_resume_when_one_is_killed(tmp_path):
    run, epochs = tmp_path / "two", 25
    running = nodes("--epochs", epochs, "--out", run)
    log = run / "metrics.jsonl"
    while not log.exists() or log.read_text().count("\n") < 3:
        assert running[0].poll() is None, running[0].communicate()
        time.sleep(0.002)
    number = running[1].pid
    (worker,) = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    for each in running:
        each.communicate(timeout=60)
        assert each.returncode != 0
    assert not (run / "model.safetensors").exists()
    assert 3 <= len(losses(run)) < epochs
    finished(nodes("--epochs", epochs, "--out", run, "--resume"))
    assert losses(run) == pytest.approx(losses_of_one_process(tmp_path, epochs), rel=1e-4)


def test_devices_are_said_to_torchrun(tmp_path, monkeypatch):
    from covary.runs import DeviceConfig

    run = trained_run(tmp_path / "one", "two-moons", hidden=(8,), epochs=1)
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": 1, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match=r"torchrun started 1 processes on this node, and --dev"):
        _fabric(run.config, DeviceConfig(devices=3))
