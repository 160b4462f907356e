"""Parts of experiments measured by several processes at a time."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest

from covary.training import StoppedError
from reproduction import EXPERIMENTS, SCALES, Claim, Experiment, Part, Workshop, page, reproduce
from reproduction.experiment import seeds
from reproduction.measuring import by_networks
from tests.reproduction.measured_elsewhere import number

NETWORK = {"name": "net", "data": "mnist", "settings": {}}


def trial(*parts: Part) -> Experiment:
    return Experiment(
        name="trial",
        title="A trial",
        paper="Fig. 0",
        about="Nothing.",
        measure=number,
        parts=dict.fromkeys(SCALES, parts),
        claims=(Claim(says="It is large.", metric="number", least=11.0),),
    )


def test_results_are_those_of_one_process(tmp_path):
    said: list[str] = []
    workshop = Workshop(folder=tmp_path / "work", say=said.append)
    experiment = trial(
        *seeds("small", 1, size=1, network=NETWORK),
        *seeds("large", 1, size=2, inner={"network": NETWORK}),
        *seeds("alone", 1, size=3),
    )
    record = reproduce(experiment, "quick", workshop, results=tmp_path, jobs=4)
    assert [part["metrics"]["number"] for part in record["parts"]] == [10.0, 20.0, 30.0]
    small, large, alone = [part["metrics"]["process"] for part in record["parts"]]
    assert small == large
    assert os.getpid() not in (small, alone)
    assert sum("is measured" in line for line in said) == 3
    (sitting,) = record["sittings"]
    assert (sitting["parts"], sitting["jobs"]) == (3, 2)
    assert "by the clock with 2 processes" in page._section(experiment, record).facts["time"]
    again = reproduce(experiment, "quick", workshop, results=tmp_path, jobs=4)
    assert again["parts"] == record["parts"]
    assert again["sittings"] == record["sittings"]  # nothing was measured, that is how it was
    assert "--jobs 2" in page._section(experiment, again).command
    (tmp_path / "work" / "parts" / "trial" / "alone-0.json").unlink()
    one_more = reproduce(experiment, "quick", workshop, results=tmp_path)
    assert [each["parts"] for each in one_more["sittings"]] == [3, 1]
    (tmp_path / "trial.json").unlink()
    from_parts = reproduce(experiment, "quick", workshop, results=tmp_path)
    assert "by the clock" not in page._section(experiment, from_parts).facts["time"]


def test_after_an_error_nothing_else_is_begun(tmp_path):
    experiment = trial(
        *seeds("bad", 1, fails=True, begun=str(tmp_path)),
        *seeds("slow", 5, size=1, waits=True, begun=str(tmp_path)),
    )
    with pytest.raises(ValueError, match="cannot be measured") as caught:
        reproduce(experiment, "quick", Workshop(folder=tmp_path), results=tmp_path, jobs=2)
    assert "in number" in str(caught.value.__cause__)  # where it was raised, in another process
    assert (tmp_path / "bad-0").exists()
    assert not [path.name for path in tmp_path.glob("slow-*") if path.name != "slow-0"]
    assert multiprocessing.active_children() == []


def test_whoever_ends_the_command_ends_its_processes(tmp_path):
    parts = seeds("slow", 2, size=1, waits=True, begun=str(tmp_path))

    def end() -> None:
        while len(list(Path(tmp_path).glob("slow-*"))) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(StoppedError, match="on request"):
        reproduce(trial(*parts), "quick", Workshop(folder=tmp_path), results=tmp_path, jobs=2)
    assert multiprocessing.active_children() == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_parts_about_one_network_are_together():
    other = {**NETWORK, "name": "other"}
    parts = [
        Part("a", 0, {"network": NETWORK}),
        Part("b", 0, {"network": other}),
        Part("c", 1, {"network": NETWORK}),  # another seed is another network
        Part("d", 0, {}),
        # A network whose trunk is of the first, beside the second.
        Part("e", 0, {"with": {**NETWORK, "name": "head", "trunk_of": NETWORK}, "without": other}),
    ]
    groups = [[part.label for part in group] for group in by_networks(parts)]
    assert sorted(map(sorted, groups)) == [["a", "b", "e"], ["c"], ["d"]]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_every_experiment_can_be_sent_to_another_process(experiment):
    assert pickle.loads(pickle.dumps(experiment)) == experiment
