"""Runs that track their covariance: what training leaves, and what evaluation makes of it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import covary
from covary.nn.fidelity import Fidelity, FidelityRow
from covary.runs import Choices, DataConfig, DeviceConfig, Run, evaluate
from covary.runs import tracking as run_tracking
from covary.runs.directory import weights_digest
from covary.runs.samples import load_data, validation_rows
from covary.runs.tracking import fidelity_of, summary
from covary.runs.training import resolve, train
from covary.training import Silent

QUICK = Choices(epochs=3, hidden=(24, 16, 12), batch_size=128, activation="relu")


def configured(name: str, **chosen):
    data = DataConfig(name=name)
    dataset, _ = load_data(data)
    return resolve(data, dataset, replace(QUICK, **chosen)), dataset


def trained(path, name: str = "digits", **chosen) -> Run:
    config, dataset = configured(name, **chosen)
    train(config, dataset, Run(path))
    return Run(path)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Run:
    return trained(tmp_path_factory.mktemp("runs") / "tracked", covariance="tracked")


@pytest.fixture
def shared(tmp_path) -> Run:
    return trained(tmp_path / "shared", covariance="shared")


class Cut(Silent):
    """Training is cut in its nth step, as a power failure would."""

    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, loss, name, statistic, samples) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def assert_same_weights(one, other) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


def test_training_leaves_a_network_that_knows_how_well_it_tracks(tracked):
    known = fidelity_of(tracked.network())
    assert known is not None
    assert [row.units for row in known.rows] == [0, 12, 16]
    dataset, _ = load_data(DataConfig(name="digits"))
    exact = covary.with_covariance(tracked.network(), "full")
    with torch.no_grad():
        found, expected = tracked.network()(dataset.x_test), exact(dataset.x_test)
    error = (found.covariance_matrix - expected.covariance_matrix).norm()
    assert error < 0.1 * expected.covariance_matrix.norm()


def test_it_is_measured_on_rows_that_were_trained_on(tmp_path, monkeypatch):
    seen = []

    def spy(net, x, **more):
        seen.append(x)
        return covary.track(net, x, **more)

    monkeypatch.setattr(run_tracking, "track", spy)
    for seed in (0, 0, 1):
        run = trained(tmp_path / str(len(seen)), covariance="tracked", epochs=1, seed=seed)
    config, dataset = run.config, load_data(DataConfig(name="digits"))[0]
    _, rows = validation_rows(len(dataset.x), config)
    allowed = {sample.numpy().tobytes() for sample in dataset.x[rows]}
    assert {sample.numpy().tobytes() for sample in seen[-1]} <= allowed
    assert len(seen[0]) == 256
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])


def test_a_run_that_was_cut_within_an_epoch_ends_alike(tmp_path):
    config, dataset = configured("digits", covariance="tracked", dropout=0.1)
    whole, cut = Run(tmp_path / "whole"), Run(tmp_path / "cut")
    train(config, dataset, whole)
    with pytest.raises(KeyboardInterrupt):
        train(config, dataset, cut, devices=DeviceConfig(checkpoint_minutes=0), display=Cut(10))
    assert not cut.model_path.exists()
    train(config, dataset, cut, existing="resume")
    assert cut.model_path.read_bytes() == whole.model_path.read_bytes()


def test_a_finished_run_stays_as_it_is_until_more_epochs_are_done(tmp_path):
    run = trained(tmp_path / "run", covariance="tracked", epochs=1)
    kept = {path: path.read_bytes() for path in (run.model_path, run.config_path)}
    more, dataset = configured("digits", covariance="tracked", epochs=3)
    often = DeviceConfig(checkpoint_minutes=0)
    with pytest.raises(KeyboardInterrupt):
        train(more, dataset, run, existing="resume", devices=often, display=Cut(5))
    assert {path: path.read_bytes() for path in kept} == kept
    train(more, dataset, run, existing="resume")
    long = trained(tmp_path / "long", covariance="tracked", epochs=3)
    assert run.model_path.read_bytes() == long.model_path.read_bytes()
    assert run.config_path.read_bytes() == long.config_path.read_bytes()


def test_weights_of_an_unfinished_run_are_those_of_its_checkpoint(tmp_path):
    run = Run(tmp_path / "run")
    config, dataset = configured("digits", covariance="tracked", epochs=3)
    with pytest.raises(KeyboardInterrupt):
        train(config, dataset, run, devices=DeviceConfig(checkpoint_minutes=0), display=Cut(5))
    now = run.network().state_dict()
    stored = load_file(run.checkpoint_path)
    assert torch.equal(now["linear1.weight"], stored["objective/net.linear1.weight"])
    evaluation = evaluate(run)
    assert "not kept, since training is not finished" in " ".join(evaluation.notes)
    assert not run.model_path.exists()


def test_a_finished_run_without_its_model_gets_it_back(tracked, tmp_path):
    copy = Run(tmp_path)
    for path in (tracked.config_path, tracked.checkpoint_path):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    dataset, _ = load_data(DataConfig(name="digits"))
    assert train(tracked.config, dataset, copy, existing="resume") == []
    assert copy.model_path.read_bytes() == tracked.model_path.read_bytes()


def test_covariances_are_tracked_unless_they_are_poor(shared, tmp_path, monkeypatch):
    run = Run(shutil.copytree(shared.path, tmp_path / "run"))
    found = evaluate(run)
    assert found.covariance.startswith("tracked:")
    assert found.fidelity.rank > 0.95
    assert found.fidelity.covariance == found.covariance
    assert "Tracked covariances (tracked:" in found.notes[1]
    poor = Fidelity((FidelityRow(0, 0.5, 0.9),))
    monkeypatch.setattr(run_tracking, "fidelity_of", lambda _: poor)
    again = evaluate(run)
    assert (again.covariance, again.fidelity) == ("full", None)
    assert "poor (rank correlation of entropies 0.500" in again.notes[0]
    assert evaluate(run, covariance="tracked").covariance == "tracked:0"


def test_a_tracked_run_is_evaluated_as_it_was_trained(tracked):
    evaluation = evaluate(tracked)
    assert evaluation.covariance == fidelity_of(tracked.network()).named("tracked")
    dataset, _ = load_data(DataConfig(name="digits"))
    with torch.no_grad():
        out = tracked.network()(dataset.x_test)
    stored = np.load(tracked.predictions_path)
    np.testing.assert_allclose(stored["test/entropy"], out.entropy(), rtol=1e-3, atol=1e-3)
    assert tracked.evaluation == evaluation


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_another_covariance_can_be_asked_for(tracked, covariance):
    assert evaluate(tracked, covariance=covariance).covariance == covariance
    dataset, _ = load_data(DataConfig(name="digits"))
    with torch.no_grad():
        out = covary.with_covariance(tracked.network(), covariance)(dataset.x_test)
    stored = np.load(tracked.predictions_path)
    np.testing.assert_allclose(stored["test/variance"], out.variance, rtol=1e-3)


def test_covariances_that_evaluation_has_no_use_for(tracked):
    with pytest.raises(ValueError, match=r"full, tracked, diagonal, or tracked:N.* Got 'shared'"):
        evaluate(tracked, covariance="shared")
    with pytest.raises(ValueError, match="Unknown covariance 'full:12'"):
        evaluate(tracked, covariance="full:12")


def test_tracking_is_measured_when_it_is_first_asked_for(shared):
    weights = load_file(shared.model_path)
    first = evaluate(shared, covariance="tracked")
    assert "kept in model.safetensors" in " ".join(first.notes)
    assert fidelity_of(shared.network()) is not None
    after = load_file(shared.model_path)
    assert_same_weights(weights, {name: after[name] for name in weights})
    again = evaluate(shared, covariance="tracked")
    assert "never measured" not in " ".join(again.notes)
    assert again.parts == first.parts
    # Nothing is left to train, so what was measured stays.
    dataset, _ = load_data(DataConfig(name="digits"))
    assert train(shared.config, dataset, shared, existing="resume") == []
    assert fidelity_of(shared.network()) is not None


def test_tracking_does_not_make_it_another_network(shared):
    digest = weights_digest(shared.network())
    evaluate(shared)
    covary.track(net := shared.network(), load_data(DataConfig(name="digits"))[0].x, progress=False)
    assert shared.save_tracking(net)
    assert weights_digest(shared.network()) == digest
    assert shared.is_current(shared.evaluation)


def test_keeping_what_was_measured_keeps_double_precision(tmp_path):
    run = trained(tmp_path / "run", precision="64-true", epochs=1)
    weights = load_file(run.model_path)
    assert weights["linear1.weight"].dtype == torch.float64
    evaluate(run, covariance="tracked")
    after = load_file(run.model_path)
    assert_same_weights(weights, {name: after[name] for name in weights})


def test_the_exact_layers_are_those_of_the_run_unless_another_is_asked_for(tmp_path):
    run = trained(tmp_path / "run", covariance="tracked:16", epochs=1)
    assert run.config.model.covariance == "tracked:16"
    assert evaluate(run).covariance == "tracked:16"
    assert evaluate(run, covariance="tracked:0").covariance == "tracked:0"


def test_regression_tracks_too(tmp_path):
    run = trained(tmp_path / "run", "diabetes", covariance="tracked", batch_norm=True)
    assert fidelity_of(run.network()) is not None
    assert evaluate(run).parts["test"]["rmse"] > 0


def test_a_summary_says_what_is_better():
    poor, fair, good = (
        FidelityRow(0, 0.5, 0.6),
        FidelityRow(8, 0.96, 0.2),
        FidelityRow(16, 0.999, 0.01),
    )
    known = Fidelity((poor, fair, good))
    assert summary(known, "tracked").endswith(f"on training inputs: {good}.")
    assert "(tracked:12)" in summary(known, "tracked:12")
    assert str(fair) in summary(known, "tracked:12")
    assert "Better: covary evaluate with --covariance tracked:16" in summary(known, "tracked:0")
    assert "Better: covary evaluate with --covariance full" in summary(Fidelity((poor,)), "tracked")
