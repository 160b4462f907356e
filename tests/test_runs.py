"""Runs: what is in their folder, that it is enough to repeat them, and what they measure."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import covary
from covary import covariance
from covary.data import DataError, Dataset
from covary.files import FileError
from covary.runs import (
    Choices,
    DataConfig,
    DeviceConfig,
    ModelConfig,
    Run,
    RunConfig,
    RunError,
    directory,
    evaluate,
)
from covary.runs.evaluation import classification_metrics
from covary.runs.predictions import LAYER_SAMPLES, Predictions, layer_names
from covary.runs.samples import load_data, validation_rows
from covary.runs.training import resolve, train
from covary.training import Silent, TrainingConfig
from covary.uncertainty import metrics, scores

QUICK = Choices(epochs=3, hidden=(12, 8), batch_size=128)


def trained(path, name: str, **chosen) -> Run:
    config = DataConfig(name=name)
    dataset, schema = load_data(config)
    run = Run(path)
    train(resolve(config, dataset, replace(QUICK, **chosen)), dataset, run, schema=schema)
    return run


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "digits"
    run = trained(folder, "digits", activation="relu", epochs=12, hidden=(32, 16))
    evaluate(run, covariance="full")
    return run


@pytest.fixture(scope="module")
def regressor(tmp_path_factory) -> Run:
    run = trained(tmp_path_factory.mktemp("runs") / "diabetes", "diabetes", epochs=30)
    evaluate(run, covariance="full")
    return run


def test_the_folder_holds_all_that_made_the_run(classifier):
    names = {path.name for path in classifier.path.iterdir()}
    texts = {"config.toml", "environment.json", "metrics.jsonl", "evaluation.json"}
    assert texts | {"checkpoint.safetensors", "model.safetensors", "predictions.npz"} <= names
    environment = json.loads((classifier.path / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["seed"] == 0
    assert {"git_commit", "command", "training_samples"} <= environment.keys()
    assert RunConfig.from_toml(classifier.config_path) == classifier.config


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/usr/bin/covary", "covary report 'a b'"),
        ("/clone/covary/__main__.py", "covary report 'a b'"),
        ("/clone/reproduction/__main__.py", "python -m reproduction report 'a b'"),
        ("/clone/script.py", "script.py report 'a b'"),
    ],
)
def test_results_name_the_command_that_made_them(monkeypatch, program, said):
    monkeypatch.setattr("sys.argv", [program, "report", "a b"])
    assert directory.command_line() == said


def test_changed_code_marks_the_commit_of_a_result(monkeypatch):
    other = Path("reproduction").resolve()

    def git(command: str, *arguments: str) -> str:
        return "abc" if command == "rev-parse" else " M cli.py" * (str(other) in arguments)

    monkeypatch.setattr(directory, "_git", git)
    now = datetime.now(timezone.utc)
    assert directory.environment(now).git_commit == "abc"
    assert directory.environment(now, code=[other]).git_commit == "abc-dirty"


def test_a_configuration_survives_its_file(tmp_path):
    config = RunConfig(
        data=DataConfig(name='a, "b".csv', target=("x", "y'"), drop=("π",), delimiter="\t"),
        model=ModelConfig(
            hidden=(3,), noise=(0.1, 0.0), input_shape=(4,), outputs=2, covariance="tracked:7"
        ),
        training=TrainingConfig(lr=1e-7),
    )
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    assert RunConfig.from_toml(path) == config
    path.write_text("data = 3")
    with pytest.raises(ValueError, match=r"config\.toml is not the configuration of a run"):
        RunConfig.from_toml(path)


def test_a_trained_network_takes_raw_data_and_gives_the_raw_scale(regressor):
    dataset, _ = load_data(DataConfig(name="diabetes"))
    out = regressor.network()(dataset.x_test)
    error = (out.mean - dataset.y_test).square().mean().sqrt()
    spread = dataset.y_test.std()
    assert 0.4 * spread < error < spread  # better than guessing the average, on the target's scale


def test_numbers_are_those_of_the_network(classifier):
    dataset, _ = load_data(DataConfig(name="digits"))
    net = covary.with_covariance(classifier.network(), "full")
    with torch.no_grad():
        out = net(dataset.x_test)
    wrong = (out.mean.argmax(-1) != dataset.y_test).numpy()
    found = classifier.evaluation.parts["test"]
    assert found["accuracy"] == pytest.approx(1 - wrong.mean())
    expected = roc_auc_score(wrong, out.entropy().numpy())
    assert found["auroc_entropy"] == pytest.approx(expected, abs=1e-3)
    stored = np.load(classifier.predictions_path, allow_pickle=False)
    np.testing.assert_allclose(stored["test/mean"], out.mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(stored["test/variance"], out.variance, rtol=1e-3)


def test_layers_are_measured_on_some_of_each_kind(classifier):
    evaluation = classifier.evaluation
    stored = np.load(classifier.predictions_path, allow_pickle=False)
    entropy, label = stored["test/layer_entropy"], stored["test/label"]
    assert evaluation.layers == ("activation1", "activation2", "linear3")
    measured = ~np.isnan(entropy[:, 0])
    assert measured.sum() == LAYER_SAMPLES
    wrong = stored["test/mean"].argmax(1) != label
    assert 10 < wrong.sum() < LAYER_SAMPLES / 2
    assert measured[wrong].all()
    np.testing.assert_allclose(
        entropy[measured, -1], stored["test/entropy"][measured], rtol=1e-3, atol=1e-3
    )
    expected = metrics.separability(entropy[wrong & measured, 1], entropy[~wrong & measured, 1])
    assert evaluation.separability["test"][1] == pytest.approx(expected)


def test_the_gallery_has_the_most_and_least_certain(classifier):
    stored = np.load(classifier.predictions_path, allow_pickle=False)
    order = np.argsort(stored["test/entropy"], kind="stable")
    assert {*order[:12], *order[-12:]} <= set(stored["test/input_index"])
    dataset, _ = load_data(DataConfig(name="digits"))
    np.testing.assert_array_equal(
        stored["test/input"], dataset.x_test[stored["test/input_index"]].numpy()
    )


def test_regression_is_measured_on_the_targets_scale(regressor):
    found = regressor.evaluation.parts["test"]
    stored = np.load(regressor.predictions_path, allow_pickle=False)
    gap = stored["test/target"] - stored["test/mean"]
    assert found["rmse"] == pytest.approx(np.sqrt((gap**2).mean()))
    var = stored["test/variance"].astype(float)
    expected = -0.5 * (gap**2 / var + np.log(2 * np.pi * var))
    assert found["log_likelihood"] == pytest.approx(expected.mean(), rel=1e-4)
    assert 0 <= found["coverage_50"] <= found["coverage_90"] <= found["coverage_95"] <= 1


def test_ood_data_of_the_same_shape(classifier, monkeypatch):
    dataset, _ = load_data(DataConfig(name="digits"))
    ood = replace(dataset, name="noise", x_test=torch.randint(0, 256, (300, 1, 8, 8)).byte())
    monkeypatch.setattr(covary.data, "load", lambda name, **_: ood if name == "noise" else dataset)
    evaluation = evaluate(classifier, ood=["noise"])
    assert evaluation.parts["noise"]["samples"] == 300
    stored = np.load(classifier.predictions_path, allow_pickle=False)
    expected = metrics.auroc(stored["noise/entropy"], stored["test/entropy"])
    assert evaluation.parts["noise"]["auroc_entropy"] == pytest.approx(expected)
    assert "noise/label" not in stored
    assert len(evaluation.separability["noise"]) == 3
    with pytest.raises(DataError, match="named twice"):
        evaluate(classifier, ood=["noise", "noise"])


def test_ood_data_of_another_shape_are_refused(classifier):
    with pytest.raises(DataError, match=r"shape \(2,\), the network takes \(1, 8, 8\)"):
        evaluate(classifier, ood=["two-moons"])
    with pytest.raises(DataError, match="is a table"):
        evaluate(classifier, ood=["other.csv"])


def test_a_folder_with_a_run_is_not_touched_unasked(classifier):
    dataset, _ = load_data(DataConfig(name="digits"))
    config, before = classifier.config, classifier.model_path.read_bytes()
    with pytest.raises(RunError, match="holds a run already"):
        train(config, dataset, classifier)
    other = replace(config, training=replace(config.training, lr=0.5))
    with pytest.raises(RunError, match=r"training\.lr: 0\.5, not 0\.002"):
        train(other, dataset, classifier, existing="resume")
    assert train(config, dataset, classifier, existing="resume") == []
    assert classifier.model_path.read_bytes() == before


def test_a_folder_is_trained_into_by_one_process_at_a_time(classifier):
    dataset, _ = load_data(DataConfig(name="digits"))
    with (
        classifier.locked_for_training(),
        pytest.raises(RunError, match="being trained by another process"),
    ):
        train(classifier.config, dataset, classifier, existing="overwrite")
    assert classifier.model_path.exists()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    dataset, _ = load_data(DataConfig(name="digits"))
    config = resolve(DataConfig(name="digits"), dataset, QUICK)
    for existing in ("refuse", "resume", "overwrite"):
        with pytest.raises(RunError, match="not empty and holds no run"):
            train(config, dataset, Run(tmp_path), existing=existing)


@pytest.mark.parametrize("covariance", ["shared", "tracked"])
def test_more_epochs_of_a_run_equal_a_longer_run(tmp_path, covariance):
    short = trained(tmp_path / "short", "two-moons", epochs=2, covariance=covariance)
    long = trained(tmp_path / "long", "two-moons", epochs=4, covariance=covariance)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    train(long.config, dataset, short, existing="resume")
    assert short.model_path.read_bytes() == long.model_path.read_bytes()
    assert short.metrics_path.read_text().count("\n") == 4


def test_what_is_no_run_is_said(tmp_path, classifier):
    with pytest.raises(RunError, match="holds no run"):
        Run(tmp_path).network()
    Run(tmp_path).path.joinpath("config.toml").write_text(classifier.config_path.read_text())
    with pytest.raises(RunError, match="has no weights yet"):
        Run(tmp_path).network()
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        Run(tmp_path).network()


def test_weights_of_another_network_are_refused(tmp_path, classifier, regressor):
    (tmp_path / "config.toml").write_text(classifier.config_path.read_text())
    (tmp_path / "model.safetensors").write_bytes(regressor.model_path.read_bytes())
    with pytest.raises(FileError, match=r"model\.safetensors does not fit the network"):
        Run(tmp_path).network()


def test_a_set_without_a_training_part_is_refused():
    empty = torch.empty(0, 1, 8, 8, dtype=torch.uint8)
    dataset = Dataset(
        name="notmnist",
        task="classification",
        x=empty,
        y=torch.empty(0, dtype=torch.int64),
        x_test=torch.zeros(5, 1, 8, 8, dtype=torch.uint8),
        y_test=torch.zeros(5, dtype=torch.int64),
    )
    with pytest.raises(DataError, match=r"no training part.*--ood notmnist"):
        resolve(DataConfig(name="notmnist"), dataset, Choices())


def test_all_that_decides_a_network_and_its_training_can_be_chosen():
    sections = (ModelConfig, TrainingConfig, RunConfig)
    options = {f.name for each in sections for f in fields(each) if "help" in f.metadata}
    assert {field.name for field in fields(Choices)} == options | {"seed"}
    with pytest.raises(TypeError, match="epoch"):
        Choices(epoch=3)


def test_presets_are_those_of_the_paper():
    dataset, _ = load_data(DataConfig(name="quadrants"))
    config = resolve(DataConfig(name="quadrants"), dataset, Choices())
    assert config.model.widths == [2, 64, 32, 16, 8, 2]
    assert config.model.noise == (0.5,) * 5
    assert (config.training.epochs, config.training.batch_size) == (20, 128)
    assert (config.training.lr, config.training.weight_decay) == (5e-4, 1e-5)


def test_double_precision_and_augmentation(tmp_path):
    config = DataConfig(name="digits", augment=True)
    dataset, _ = load_data(config)
    run = Run(tmp_path)
    chosen = replace(QUICK, precision="64-true")
    history = train(resolve(config, dataset, chosen), dataset, run)
    assert history[-1].loss < history[0].loss
    moons = DataConfig(name="two-moons", augment=True)
    dataset, _ = load_data(moons)
    with pytest.raises(DataError, match="for images"):
        train(resolve(moons, dataset, QUICK), dataset, Run(tmp_path / "moons"))
    assert not (tmp_path / "moons").exists()


def test_a_table_that_changed_is_refused(tmp_path):
    """Its rows would be divided anew, and training rows would be tested on."""
    table = tmp_path / "t.csv"
    rows = np.random.default_rng(0).normal(size=(80, 3)).round(4)
    np.savetxt(table, rows, delimiter=",", header="a,b,y", comments="")
    config = DataConfig(name=str(table), target=("y",))
    dataset, schema = load_data(config)
    run, resolved = Run(tmp_path / "run"), resolve(config, dataset, QUICK)
    train(resolved, dataset, run, schema=schema)
    evaluate(run)
    with table.open("a") as file:
        file.write("1,2,3\n")
    with pytest.raises(DataError, match="not the file that this run was trained on"):
        evaluate(run)
    grown, _ = load_data(config)
    with pytest.raises(RunError, match=r"data\.sha256"):
        train(resolve(config, grown, QUICK), grown, run, existing="resume")


def test_overwriting_leaves_nothing_of_the_run_before(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=1)
    evaluate(run)
    assert run.is_current(run.evaluation)
    (run.path / "mine.txt").write_text("kept")
    dataset, _ = load_data(DataConfig(name="two-moons"))
    more = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, epochs=2))
    train(more, dataset, run, existing="resume")
    assert not run.is_current(run.evaluation)
    train(more, dataset, run, existing="overwrite")
    assert not run.evaluation_path.exists()
    assert (run.path / "mine.txt").read_text() == "kept"


def test_a_run_is_never_resumed_to_fewer_epochs(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=3)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    fewer = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, epochs=2))
    with pytest.raises(RunError, match=r"training\.epochs: 2, not 3"):
        train(fewer, dataset, run, existing="resume")


def test_a_run_that_was_stopped_can_be_looked_at(tmp_path):
    run = trained(tmp_path / "run", "two-moons")
    whole = run.network().state_dict()
    run.model_path.unlink()
    for name, value in run.network().state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=0)


def test_wrong_options_leave_no_folder(tmp_path):
    config = DataConfig(name="digits")
    dataset, _ = load_data(config)
    with pytest.raises(ValueError, match="precision"):
        resolve(config, dataset, replace(QUICK, precision="bf16-true"))
    with pytest.raises(ValueError, match="strategy"):
        train(
            resolve(config, dataset, QUICK),
            dataset,
            Run(tmp_path / "run"),
            devices=DeviceConfig(strategy="nonsense"),
        )
    assert not (tmp_path / "run").exists()


def test_a_preset_of_noise_fits_any_number_of_layers():
    dataset, _ = load_data(DataConfig(name="diabetes"))
    named = replace(dataset, name="yacht")
    config = resolve(DataConfig(name="yacht"), named, Choices(hidden=(50, 40)))
    assert config.model.noise == (0.3, 0.0, 0.0)
    config.model.build()


def test_equally_confident_samples_are_told_apart():
    """Gaps of logits above 37 all have a max-softmax of exactly 1 in float64."""
    gaps = np.r_[np.linspace(60, 80, 20), np.linspace(38, 50, 10)]
    mean = np.c_[gaps, np.zeros(30)].astype(np.float32)
    label = np.r_[np.zeros(20), np.ones(10)].astype(int)
    moments = covary.Moments(torch.tensor(mean), covariance.Diagonal(torch.zeros(30, 2)))
    doubt = scores.max_softmax(moments).numpy()
    part = Predictions(
        name="test",
        mean=mean,
        variance=np.zeros_like(mean),
        entropy=-gaps,
        layer_entropy=np.empty((30, 0)),
        label=label,
        input=np.empty(0),
        input_index=np.empty(0, dtype=int),
        scores={"max_softmax": doubt},
    )
    found = classification_metrics(part)
    assert found["auroc_max_softmax"] == found["auroc_entropy"] == 1


def test_layer_names():
    assert layer_names(covary.mlp([3, 4, 5, 2])) == ["activation1", "activation2", "linear3"]


def _files(run: Run) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.path.iterdir() if path.is_file()}


@pytest.mark.parametrize("epochs", [2, 4])
def test_a_finished_run_without_its_checkpoint_is_left_alone(tmp_path, epochs):
    run = trained(tmp_path / "run", "two-moons", epochs=2)
    run.checkpoint_path.unlink()
    before = _files(run)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    config = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, epochs=epochs))
    with pytest.raises(RunError, match=r"checkpoint\.safetensors.* is not there.*--overwrite"):
        train(config, dataset, run, existing="resume")
    assert _files(run) == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: content.replace(b'"position"', b'"positron"'),
        lambda content: content.replace(b"random/cpu", b"random/gpu"),
        lambda content: content.replace(b"optimizer/", b"optimiser/", 1),
        lambda content: content.replace(b"exp_avg_sq", b"exp_avg/sq", 1),
        lambda content: content.replace(b"objective/net.linear1", b"objective/net.linear9"),
    ],
)
def test_a_damaged_checkpoint_costs_nothing_else(tmp_path, damage):
    run = trained(tmp_path / "run", "two-moons", epochs=2)
    run.checkpoint_path.write_bytes(damage(run.checkpoint_path.read_bytes()))
    before = _files(run)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    config = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, epochs=4))
    with pytest.raises(ValueError, match=r"checkpoint\.safetensors"):
        train(config, dataset, run, existing="resume")
    assert _files(run) == before


class Fails(Silent):
    """Ends training at a step, as a full disk or too little memory does."""

    def __init__(self, step: int) -> None:
        self.left = step

    def step(self, *_) -> None:
        self.left -= 1
        if not self.left:
            raise MemoryError("no memory left")


def test_what_is_replaced_stays_until_there_is_something_in_its_place(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=1)
    evaluate(run)
    before = _files(run)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    config = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, hidden=(5,)))
    with pytest.raises(MemoryError):
        train(config, dataset, run, existing="overwrite", display=Fails(1))
    assert _files(run) == before
    assert not (run.path / ".replaced").exists()
    last = config.training.epochs * -(-len(validation_rows(len(dataset.x), config)[1]) // 128)
    with pytest.raises(MemoryError):
        train(config, dataset, run, existing="overwrite", display=Fails(last))
    assert run.checkpoint_path.exists()
    assert (run.path / ".replaced" / "model.safetensors").read_bytes() == before[
        "model.safetensors"
    ]
    train(config, dataset, run, existing="resume")
    assert run.network().get_submodule("linear1").weight.shape == (5, 2)
    assert not (run.path / ".replaced").exists()
    assert not run.evaluation_path.exists()


def test_a_process_that_is_killed_while_it_replaces_a_run_loses_nothing(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=1)
    before = _files(run)
    run.put_aside()
    dataset, _ = load_data(DataConfig(name="two-moons"))
    config = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, epochs=1))
    with pytest.raises(RunError, match="holds a run already"):
        train(config, dataset, run)
    assert _files(run) == before
    (run.path / ".replaced").mkdir()
    run.model_path.replace(run.path / ".replaced" / "model.safetensors")
    run.put_aside()
    run.put_back()
    assert _files(run) == before


def test_a_second_run_that_is_to_replace_another_leaves_the_finished_one_aside(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=1)
    good = run.model_path.read_bytes()
    run.put_aside()
    # A run that was to replace it came to a checkpoint, not to its end; and another begins.
    run.config_path.write_bytes((run.path / ".replaced" / "config.toml").read_bytes())
    run.checkpoint_path.write_bytes(b"of an unfinished run")
    run.put_aside()
    assert (run.path / ".replaced" / "model.safetensors").read_bytes() == good


def test_what_cannot_be_built_replaces_nothing(tmp_path):
    run = trained(tmp_path / "run", "two-moons", epochs=1)
    before = _files(run)
    dataset, _ = load_data(DataConfig(name="two-moons"))
    config = resolve(DataConfig(name="two-moons"), dataset, replace(QUICK, hidden=(3, -1)))
    with pytest.raises((ValueError, RuntimeError)):
        train(config, dataset, run, existing="overwrite")
    assert _files(run) == before


def noisy_sine(n: int) -> Dataset:
    """Noise of 0.1 on the left and of 0.5 on the right."""
    random = np.random.default_rng(0)
    x = random.uniform(-3, 3, (2 * n, 1))
    noise = np.where(x < 0, 0.1, 0.5) * random.standard_normal((2 * n, 1))
    inputs, y = torch.tensor(x), torch.tensor(np.sin(2 * x) + noise)
    parts = inputs[:n], y[:n], inputs[n:], y[n:]
    return Dataset("sine", "regression", *parts, targets=("y",))


def test_the_likelihood_teaches_a_run_where_noise_is(tmp_path):
    dataset = noisy_sine(600)
    config = resolve(DataConfig(name="sine"), dataset, Choices(loss="likelihood"))
    run = Run(tmp_path / "sine")
    train(config, dataset, run)
    assert run.config == config
    with torch.no_grad():
        out = covary.with_covariance(run.network(), "full")(dataset.x_test)
    error = (out.mean - dataset.y_test).abs().numpy()[:, 0]
    assert spearmanr(out.stddev.numpy()[:, 0], error).statistic > 0.35
    loss = -out.distribution().log_prob(dataset.y_test).mean()
    assert loss < 0.35, "of one variance for all it is 0.47 at least"


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"covariance": "shared"}, "a covariance for each sample"),
        ({"noise": (0.0,)}, "needs noise in the network"),
        ({"loss": "nll"}, "known are mean, likelihood"),
    ],
)
def test_likelihoods_that_cannot_be_trained_are_refused(chosen, words):
    chosen = Choices(**{"loss": "likelihood", **chosen})
    with pytest.raises(ValueError, match=words):
        resolve(DataConfig(name="sine"), noisy_sine(20), chosen)
