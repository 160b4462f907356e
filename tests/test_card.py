"""What a run's folder says of itself: the card of its model, and the metadata of its weights."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open

from covary import runs
from covary.files import FileError, read_tensors, write_tensors
from covary.runs import Run, evaluate
from covary.runs.card import write_card
from tests.commands import covary, trained_run


@pytest.fixture
def run(tmp_path) -> Run:
    return trained_run(tmp_path / "moons", "two-moons", epochs=2, hidden=(8,))


def test_weights_say_what_they_are(run):
    with safe_open(run.model_path, "pt") as file:
        about = file.metadata()
    assert about == {
        "format": "1",
        "covary": about["covary"],
        "widths": "2-8-2",
        "activation": "relu",
        "weights": run.weights,
    }
    assert run.save_tracking(run.network())  # which keeps it
    assert Run(run.path).metadata == about


def test_weights_of_another_format_are_refused_with_the_remedy(run):
    tensors, about = read_tensors(run.model_path)
    write_tensors(run.model_path, tensors, {**about, "format": "2", "covary": "9.1"})
    said = covary("evaluate", run.path, code=1)
    told = "has format '2' of covary 9.1, and this covary reads format '1'. Update covary, or"
    assert told in " ".join(said.split())
    assert said.count("error:") == 1
    write_tensors(run.model_path, tensors)  # as before metadata were written
    assert Run(run.path).weights


def test_weights_that_are_not_those_of_the_metadata_are_refused(run):
    tensors, about = read_tensors(run.model_path)
    tensors["linear1.weight"] = tensors["linear1.weight"] + 1
    write_tensors(run.model_path, tensors, about)
    with pytest.raises(FileError, match="other weights than its metadata says"):
        _ = Run(run.path).weights


def test_the_card_has_data_metrics_limits_and_how_to_load(run):
    card = run.card_path.read_text()
    assert "## Data" in card
    assert "widths 2-8-2 (relu) for classification of `two-moons`" in card
    assert run.weights in card
    assert "None yet: `covary evaluate moons`" in card
    assert str(run.path.parent) not in card
    found = evaluate(run, covariance="full")
    card = run.card_path.read_text()
    assert f"| Accuracy | {found.parts['test']['accuracy']:.4g} |" in card
    assert "None yet" not in card
    assert write_card(run)
    assert run.card_path.read_text() == card  # from stored files alone
    with torch.no_grad():
        net = run.network()
        next(net.parameters()).mul_(2)
    run.save_network(net)  # what was measured is of other weights now
    assert write_card(Run(run.path))
    assert "None yet" in run.card_path.read_text()


def test_a_readme_of_somebody_else_is_left_alone(tmp_path):
    run = trained_run(tmp_path / "moons", "two-moons", epochs=1, hidden=(8,))
    mine = "# My notes\n"
    run.card_path.write_text(mine)
    evaluate(run, covariance="full")
    assert run.card_path.read_text() == mine
    covary("train", "two-moons", "--epochs", 1, "--out", run.path, "--overwrite")
    assert run.card_path.read_text() == mine
    run.clear()
    assert [path.name for path in run.path.iterdir() if path.name[0] != "."] == ["README.md"]


def test_training_again_writes_the_card_again(run):
    before = run.card_path.read_text()
    covary("train", "two-moons", "--hidden", 9, "--epochs", 1, "--out", run.path, "--overwrite")
    after = runs.open(run.path).card_path.read_text()
    assert "2-9-2" in after
    assert after != before
