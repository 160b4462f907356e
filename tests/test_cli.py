"""The command line, as a person and as a program uses it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from covary.cli import app
from covary.report.words import contradictions

QUICK = ["--hidden", "8", "--epochs", "2"]


def covary(*arguments: object, code: int = 0) -> str:
    """Run a command in this process; its output, errors included."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def process(*arguments: object, **more) -> subprocess.Popen[str]:
    """Run a command in a process of its own, on one thread so that sums come out alike."""
    return subprocess.Popen(
        [sys.executable, "-m", "covary", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **more,
    )


def finished(running: subprocess.Popen[str], code: int = 0) -> str:
    out, err = running.communicate(timeout=300)
    assert running.returncode == code, err
    return out


def strict_json(text: str):
    """As others than Python read it: NaN is no JSON."""
    return json.loads(text, parse_constant=pytest.fail)


def write_table(path: Path, rows: int = 60, seed: int = 0) -> Path:
    rng = np.random.default_rng(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "district", "price", "sold"])
        for size in rng.uniform(30, 200, rows):
            district = rng.choice(["north", "south"])
            price = 1000 * size * (2 if district == "north" else 1) * rng.normal(1, 0.1)
            writer.writerow([round(size, 1), district, round(price), rng.choice(["yes", "no"])])
    return path


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["evaluate"],
        ["calibrate"],
        ["attack"],
        ["compare"],
        ["fidelity"],
        ["verify"],
        ["export"],
        ["report"],
        ["demo"],
        ["data"],
        ["data", "list"],
        ["data", "fetch"],
    ],
    ids=" ".join,
)
def test_every_command_has_help_with_an_example(command):
    text = covary(*command, "--help")
    assert "covary" in text
    if command and command != ["data"]:
        assert "Example" in text


def test_from_data_to_page(tmp_path):
    run = tmp_path / "run"
    covary("train", "digits", "--out", run, *QUICK)
    table = covary("evaluate", run)
    assert "Accuracy" in table
    assert "max-softmax" in table
    covary("report", run)
    assert (run / "report.html").stat().st_size > 10_000


def test_a_tracked_covariance_from_training_to_evaluation(tmp_path):
    run, tracked = tmp_path / "run", ["--covariance", "tracked"]
    said = covary("train", "digits", "--out", run, "--hidden", "12,8", "--epochs", "2", *tracked)
    assert said.count("Tracked covariances (tracked:") == 1
    assert "rank correlation of entropies" in said
    said = covary("evaluate", run)
    assert "tracked" in said.partition("┏")[0]  # the title
    assert "never measured" not in said
    assert "full" in covary("evaluate", run, "--covariance", "full").partition("┏")[0]
    evaluation = strict_json(covary("evaluate", run, "--covariance", "tracked:8", "--json"))
    assert evaluation["covariance"] == "tracked:8"
    for wrong in (["--covariance", "shared"], ["--covariance", "full:8"]):
        assert "Invalid value" in covary("evaluate", run, *wrong, code=2)


def test_training_tells_a_program_how_well_it_tracks(tmp_path):
    tracked = ["--covariance", "tracked:8"]
    for options, rows in ((tracked, 1), ([], 0)):
        out = tmp_path / str(rows)
        said = covary("train", "two-moons", "--json", "--out", out, *QUICK, *options)
        found = strict_json(said[said.index("{") :])  # the rest is not on standard output
        assert found["config"]["model"]["covariance"] == ("tracked:8" if rows else "shared")
        assert len(found["fidelity"] or []) == rows


def test_tracking_of_another_run_is_measured_and_said(tmp_path):
    covary("train", "digits", "--out", tmp_path, *QUICK)
    assert "never measured here" in covary("evaluate", tmp_path, "--covariance", "tracked")
    assert "never measured here" not in covary("evaluate", tmp_path, "--covariance", "tracked")


def test_a_table_of_ones_own(tmp_path):
    table, run = write_table(tmp_path / "houses.csv"), tmp_path / "a [b] run"
    said = covary("train", table, "--target", "price", "--out", run, *QUICK)
    assert "Regression" in said
    assert "rmse" in covary("evaluate", run, "--json")
    ood = write_table(tmp_path / "other.csv", seed=1)
    parts = json.loads(covary("evaluate", run, "--ood", ood, "--json"))["parts"]
    assert parts["other.csv"]["samples"] == 60
    said = covary("train", table, "--target", "sold", "--out", tmp_path / "sold", *QUICK)
    assert "Classification" in said


def test_several_targets_keep_their_scales_apart(tmp_path):
    table, run = write_table(tmp_path / "t.csv"), tmp_path / "run"
    covary("train", table, "--target", "price", "--target", "size", "--out", run, *QUICK)
    by_target = strict_json(covary("evaluate", run, "--json"))["by_target"]
    assert by_target["price"]["rmse"] > 100 * by_target["size"]["rmse"]
    stored = np.load(run / "predictions.npz")
    gap = stored["test/target"] - stored["test/mean"]
    assert by_target["size"]["mae"] == pytest.approx(np.abs(gap[:, 1]).mean())
    assert "on its own scale" in covary("evaluate", run)


def test_doubt_that_points_the_wrong_way_is_said():
    said = list(
        contradictions({"test": {"auroc_entropy": 0.7}, "letters": {"auroc_entropy": 0.27}})
    )
    assert len(said) == 1
    assert "surer of inputs of letters" in said[0]
    assert list(contradictions({"test": {"spearman_error": -0.2}}))
    assert not list(contradictions({"test": {"spearman_error": 0.2, "auroc_entropy": None}}))


def test_a_report_evaluates_first_if_nobody_did(tmp_path):
    covary("train", "diabetes", "--out", tmp_path / "run", *QUICK)
    said = covary("report", tmp_path / "run")
    assert "measuring it on its test data first" in said
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Mean absolute error" in page  # through training, as a really trained run has it
    assert "measuring" not in covary("report", tmp_path / "run")


def test_json_is_json_and_nothing_else(tmp_path):
    out = finished(process("train", "two-moons", "--out", tmp_path / "run", "--json", *QUICK))
    assert len(strict_json(out)["epochs"]) == 2
    out = finished(process("evaluate", tmp_path / "run", "--json"))
    assert 0.5 < strict_json(out)["parts"]["test"]["accuracy"] <= 1
    listed = strict_json(finished(process("data", "list", "--json")))
    assert {"digits", "mnist", "yacht"} <= {row["name"] for row in listed}


def test_dry_run_prints_the_whole_configuration_and_does_nothing(tmp_path):
    text = covary("train", "quadrants", "--lr", "0.25", "--out", tmp_path / "run", "--dry-run")
    assert "lr = 0.25" in text
    assert "hidden = [64, 32, 16, 8]" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "mnits"], "Did you mean 'mnist'"),
        (["train", "digits", "--noise", "-1"], "noise"),
        (["train", "digits", "--noise", "0.1,0.2"], "one noise for all layers or 4 of them"),
        (["train", "digits", "--hidden", "8,x"], "not a number"),
        (["train", "digits", "--activation", "rleu"], "relu"),
        (["train", "digits", "--covariance", "none"], "full, diagonal, shared, tracked"),
        (["train", "digits", "--optimizer", "sgd"], "adam, adamw"),
        (["train", "digits", "--epochs", "-3"], "epochs"),
        (["train", "digits", "--validation", "1.5"], "fraction"),
        (["train", "digits", "--seed", "-1"], "seed"),
        (["train", "digits", "--target", "y"], "for tables"),
        (["train", "digits", "--missing", "drop"], "for tables"),
        (["train", "yacht", "--split", "99"], "splits 0 to 19"),
        (["train", "t.csv", "--target", "y", "--split", "3"], "for known sets"),
        (["train", "t.csv", "--target", "y", "--missing", "maybe"], "error, mean, drop"),
        (["train", "t.csv"], "--target NAME"),
        (["train", "digits", "--precision", "8"], "32-true"),
        (["train", "digits", "--loss", "likelihood"], "and this is a classification"),
        (["train", "digits", "--loss", "nll"], "mean, likelihood"),
        (["train", "digits", "--resume", "--overwrite"], "choose one"),
        (["data", "fetch", "nope"], "no data set"),
        (["train"], "Missing argument"),
        (["train", "digits", "--covariance", "tracked:-1"], "tracked:N"),
        (["evaluate"], "Missing argument"),
        (["fidelity"], "Missing argument"),
        (["nonsense"], "No such command"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_exit_code_2(arguments, words):
    said = " ".join(covary(*arguments, code=2).replace("│", " ").split())
    assert words in said
    assert "Traceback" not in said


def test_failure_is_one_sentence_and_exit_code_1(tmp_path):
    for arguments, words in (
        (["evaluate", tmp_path], "holds no run"),
        (["fidelity", tmp_path], "holds no run"),
        (["report", tmp_path], "holds no run"),
        (["train", tmp_path / "no.csv", "--target", "y"], "no.csv"),
        (["train", write_table(tmp_path / "t.csv"), "--target", "prize"], "price"),
    ):
        said = covary(*arguments, code=1)
        assert said.startswith("error: ")
        assert words in said
        assert "Traceback" not in said


def test_a_folder_of_a_comparison_is_not_a_run_but_has_some(tmp_path):
    run = tmp_path / "seed-0" / "mnn"
    covary("train", "two-moons", "--out", run, *QUICK)
    for command in ("evaluate", "report", "calibrate"):
        said = covary(command, tmp_path, code=1)
        assert said.startswith("error: ")
        assert "holds a comparison" in said
        assert f"such as {run}." in said.replace("\n", "")


def test_debug_shows_the_traceback(tmp_path):
    result = CliRunner().invoke(app, ["evaluate", str(tmp_path), "--debug"])
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "RunError"


def test_demo_is_the_three_commands(tmp_path):
    said = covary("demo", "--out", tmp_path / "demo", "--epochs", "1")
    for command in ("covary train digits", "covary evaluate", "covary report"):
        assert f"$ {command}" in said
    assert (tmp_path / "demo" / "report.html").as_uri() in said.replace("\n", "")
    covary("train", "two-moons", "--out", tmp_path / "mine", *QUICK)
    assert "run on other data" in covary("demo", "--out", tmp_path / "mine", code=1)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


SLOWLY = ["two-moons", "--hidden", "8", "--epochs", "60", "--dropout", "0.1"]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    """kill -9 of a real process, twice, at moments that nobody chose."""
    finished(process("train", *SLOWLY, "--out", tmp_path / "whole"))
    for rows in (2, 20):
        running = process("train", *SLOWLY, "--out", tmp_path / "cut", "--resume")
        log = tmp_path / "cut" / "metrics.jsonl"
        while not log.exists() or log.read_text().count("\n") < rows:
            assert running.poll() is None, running.communicate()
            time.sleep(0.005)
        running.send_signal(signal.SIGKILL)
        running.communicate()
    finished(process("train", *SLOWLY, "--out", tmp_path / "cut", "--resume"))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    for name in whole:
        torch.testing.assert_close(cut[name], whole[name], rtol=0, atol=0)
    epochs = [json.loads(line)["epoch"] for line in log.read_text().splitlines()]
    assert epochs == list(range(1, 61))


def test_ctrl_c_leaves_a_run_to_resume(tmp_path):
    running = process("train", *SLOWLY, "--out", tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    while not log.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "--resume" in said
    assert "Traceback" not in said
    assert (tmp_path / "run" / "checkpoint.safetensors").exists()


def test_two_processes_give_the_loss_of_one(tmp_path):
    """DDP on two CPU processes against one process on the same batches (the last is uneven)."""
    command = ["train", "digits", "--covariance", "full", "--hidden", "12", "--epochs", "3"]
    command += ["--accelerator", "cpu", "--activation", "relu"]
    one = finished(process(*command, "--out", tmp_path / "one", "--json"))
    two = finished(
        process(
            *command, "--devices", "2", "--strategy", "ddp", "--out", tmp_path / "two", "--json"
        )
    )
    losses = [[row["loss"] for row in json.loads(out)["epochs"]] for out in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    single, double = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name in single:
        torch.testing.assert_close(double[name], single[name], rtol=1e-3, atol=1e-4)
    environment = json.loads((tmp_path / "two" / "environment.json").read_text())
    assert environment["processes"] == 2


def test_a_signal_to_one_process_stops_both(tmp_path):
    command = ["train", *SLOWLY, "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp"]
    running = process(*command, "--epochs", "500", "--out", tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    while not log.exists():
        assert running.poll() is None, running.communicate()
        time.sleep(0.005)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "--resume" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.skipif("COVARY_DATA" not in os.environ, reason="needs MNIST in $COVARY_DATA")
def test_three_epochs_of_mnist(tmp_path):
    finished(
        process("train", "mnist", "--covariance", "shared", "--epochs", "3", "--out", tmp_path)
    )
    out = finished(process("evaluate", tmp_path, "--json"))
    assert strict_json(out)["parts"]["test"]["accuracy"] >= 0.95
