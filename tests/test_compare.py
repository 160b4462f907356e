"""``covary compare``: what it trains once, measures alike, keeps, and says."""

from __future__ import annotations

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scoringrules
import torch
from scipy.stats import uniform
from typer.testing import CliRunner

from covary import report, runs
from covary.cli import app
from covary.cli.compare import _covariance, _listed, _shown
from covary.compare import (
    CompareConfig,
    Comparison,
    Prediction,
    Summary,
    compare,
    comparing,
    method_names,
    trained_networks,
)
from covary.compare.groups import groups
from covary.compare.methods import rows_of
from covary.compare.table_models import TABLE_MODELS
from covary.compare.trained_networks import TrainedNetworks, member_seed
from covary.data import DataError
from covary.files import FileError, read_tensors
from covary.runs import Choices, DataConfig, Run, RunError
from covary.runs.results import TrackedFidelity
from covary.runs.row_model import row_model
from covary.runs.training import resolve
from covary.training import Silent
from covary.uncertainty import metrics

QUICK = CompareConfig(members=2, samples=3, attacked=30)
TINY = Choices(hidden=(8,), epochs=1, batch_size=128)


@pytest.fixture(scope="module", autouse=True)
def quick_timing():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def classified(tmp_path_factory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("classified") / "it"
    data = DataConfig(name="digits")
    result = compare(data, out=out, seeds=(0, 1), chosen=TINY, settings=QUICK, ood=("digits",))
    return out, result


@pytest.fixture(scope="module")
def regressed(tmp_path_factory) -> tuple[Path, Comparison]:
    out = tmp_path_factory.mktemp("regressed") / "it"
    return out, compare(
        DataConfig(name="diabetes"), out=out, seeds=(0,), chosen=TINY, settings=QUICK
    )


@pytest.fixture
def untrained(monkeypatch):
    """Nothing may be trained any more."""

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("trained again")

    for name in ("fit", "train"):
        monkeypatch.setattr(trained_networks, name, fail)


def again(out: Path, data: str = "digits", **more: Any) -> Comparison:
    known: dict[str, Any] = {"seeds": (0, 1), "chosen": TINY, "settings": QUICK}
    known["existing"] = "resume"
    return compare(DataConfig(name=data), out=out, **known | more)


def test_every_method_has_its_rows(classified, regressed):
    found = [(row.method, row.score) for row in classified[1].rows]
    assert found == [
        ("MNN", "entropy"),
        ("MNN", "max_softmax"),
        ("MNN, fitted", "fitted"),
        ("MNN, calibrated", "expected_max"),
        ("plain", "max_probability"),
        ("plain, fitted", "fitted"),
        ("plain, calibrated", "expected_max"),
        ("MC dropout", "max_probability"),
        ("MC dropout", "mutual_information"),
        ("MC dropout, calibrated", "expected_max"),
        ("dropout without masks", "max_probability"),
        ("dropout without masks", "mutual_information"),
        ("dropout without masks, calibrated", "expected_max"),
        ("deep ensemble", "max_probability"),
        ("deep ensemble", "mutual_information"),
        ("deep ensemble, calibrated", "expected_max"),
        ("last-layer Laplace", "expected_max"),
        ("posterior", "expected_max"),
        ("posterior, trained with dropout", "max_probability"),
        ("posterior, trained with dropout", "mutual_information"),
    ]
    assert [row.method for row in regressed[1].rows] == [
        "MNN",
        "MNN, calibrated",
        "MNN, distribution",
        "plain, constant variance",
        "MC dropout",
        "MC dropout, calibrated",
        "dropout without masks",
        "dropout without masks, calibrated",
        "mean and variance",
        "mean and variance, calibrated",
        "deep ensemble",
        "deep ensemble, calibrated",
        "MNN, SMSC",
        "MNN, SMSC, calibrated",
        "last-layer Laplace",
        "last-layer Laplace, calibrated",
        "posterior",
        "posterior, calibrated",
        "posterior, trained with dropout",
        "posterior, trained with dropout, calibrated",
        "quantile boosting",
        "Gaussian process",
        "random forest",
        "NGBoost",
    ]
    for result in (classified[1], regressed[1]):
        assert all(row.summary["fit_seconds"].mean > 0 for row in result.rows)


def test_posteriors_are_kept_beside_their_networks(classified, regressed):
    for out, _ in (classified, regressed):
        for kind in ("plain", "dropout"):
            net = read_tensors(out / f"seed-0/{kind}-0/model.safetensors")[0]
            kept = read_tensors(out / f"seed-0/{kind}-0/posterior.safetensors")[0]
            for name, value in net.items():
                assert torch.equal(kept[f"model.{name}"], value)
            assert any(name.startswith("posterior.variance") for name in kept)


def test_numbers_are_averages_over_seeds(classified):
    out, result = classified
    assert Comparison.read(out / "compare.json") == result
    assert result.seeds == (0, 1)
    assert result.config.model.hidden == (8,)
    assert result.versions["torch"]
    for row in result.rows:
        assert set(row.by_seed) == {"0", "1"}
        for key, found in row.summary.items():
            values = [one[key] for one in row.by_seed.values()]
            assert found.mean == pytest.approx(np.mean(values))
            assert found.stddev == pytest.approx(np.std(values, ddof=1))
        # The test set itself is not foreign.
        assert row.summary["auroc_ood_digits"].mean == 0.5
        for key in ("accuracy", "auroc_errors", "attack_awareness", "attack_accuracy"):
            assert 0 <= row.summary[key].mean <= 1


def test_a_network_has_the_same_accuracy_whatever_its_score(classified):
    rows = {(row.method, row.score): row.summary for row in classified[1].rows}
    one, other = rows["MNN", "entropy"], rows["MNN", "max_softmax"]
    for key in ("accuracy", "nll", "ece", "attack_accuracy"):
        assert one[key] == other[key]
    assert (
        rows["plain", "max_probability"]["accuracy"]
        == (rows["last-layer Laplace", "expected_max"]["accuracy"])
    )


def test_costs_count_networks(classified):
    out, result = classified
    costs = {row.group: row.training_cost for row in result.rows}
    assert costs["plain"] == 1
    assert costs["laplace"] == 1
    assert costs["ensemble"] == 2
    assert all(row.inference_cost > 0 for row in result.rows)
    assert json.loads((out / "costs.json").read_text())["batch"] == 128


def test_nothing_is_done_twice(classified, untrained):
    out, result = classified
    assert again(out, ood=("digits",)).rows == result.rows
    fewer = again(out, seeds=(1,), methods=("plain",))
    assert {row.group for row in fewer.rows} == {"mnn", "plain"}
    assert fewer.rows[0].summary["accuracy"].stddev is None


def test_the_moment_network_tracks_its_covariance_unless_told_otherwise(
    classified, untrained, tmp_path
):
    out, result = classified
    assert result.covariance == "tracked"
    assert set(result.fidelity) == {"0", "1"}
    for found in result.fidelity.values():
        assert found.rank > 0.9
        assert 0 <= found.error < 0.25
    copy = tmp_path / "copy"
    shutil.copytree(out, copy)
    said: list[str] = []
    full = again(copy, ood=("digits",), covariance="full", say=said.append)
    # Only what depends on it is measured again, and nothing is trained.
    assert said == [
        "seed 0: measuring mnn",
        "measuring what they cost",
        "seed 1: measuring mnn",
    ]
    assert (full.covariance, full.fidelity) == ("full", {})
    for before, after in zip(result.rows, full.rows, strict=True):
        if before.group != "mnn":
            assert before.by_seed == after.by_seed
    entropy = [rows[0].summary["auroc_errors"].mean for rows in (result.rows, full.rows)]
    assert entropy[0] == pytest.approx(entropy[1], abs=0.05)
    with pytest.raises(ValueError, match="covariance of its own: full, tracked, diagonal"):
        again(copy, covariance="shared")


def test_how_good_tracked_covariances_are_is_said(classified):
    _, result = classified
    assert _covariance(result).startswith("MNN: tracked covariances; against exact ones")
    good, better = (TrackedFidelity("tracked:0", rank=0.98, error=error) for error in (0.2, 0.1))
    said = _covariance(replace(result, fidelity={"0": better, "1": good}))
    assert said.endswith(
        "worst of 2 seeds: rank correlation of entropies 0.980, covariance off by 20%."
    )
    poor = {"0": TrackedFidelity("tracked:0", rank=0.5, error=0.4)}
    said = _covariance(replace(result, fidelity=poor))
    assert said.endswith("0.500, covariance off by 40%. That is poor: take --covariance full.")
    assert _covariance(replace(result, fidelity={}, covariance="full")) == "MNN: full covariances."


def test_a_result_is_read_back(classified, tmp_path):
    _, result = classified
    assert Comparison.from_json(json.loads(json.dumps(result.to_json()))) == result
    older = {key: v for key, v in result.to_json().items() if key not in ("covariance", "fidelity")}
    assert Comparison.from_json(older) == replace(result, covariance=None, fidelity={})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("rows"), "key 'rows': missing; expected a list"),
        (lambda c: c.update(seeds=["0"]), r"key 'seeds\[0\]': expected a whole number, got '0'"),
        (lambda c: c.update(task="ranking"), "key 'task': expected 'classification' or 'regress"),
        (
            lambda c: c["rows"][1]["summary"]["nll"].update(mean="low"),
            r"key 'rows\[1\].summary.nll.mean': expected a number, got 'low'",
        ),
        (lambda c: c["config"]["model"].update(trunk="oak"), "key 'config.model': Unknown trunk"),
        (lambda c: c["settings"].update(members=0), "key 'settings': A comparison needs members"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(classified, tmp_path, change, said):
    content = classified[1].to_json()
    change(content)
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=said) as caught:
        Comparison.read(path)
    assert str(caught.value).startswith(str(path))
    assert str(caught.value).endswith("with --resume: only what is missing is measured.")


def test_a_damaged_file_of_a_seed_is_named(classified, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(classified[0], out)
    path = out / "seed-0" / "plain.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"methods": {}}))
    with pytest.raises(FileError, match=r"plain.json, key 'methods': expected a list, got an obj"):
        again(out)
    path.write_text("{")
    with pytest.raises(FileError, match=r"plain.json is not JSON"):
        again(out)
    path.write_text(json.dumps(good))
    (out / "costs.json").write_text('{"batch": 128}')
    with pytest.raises(FileError, match=r"costs.json, key 'threads': missing"):
        again(out)


def test_more_foreign_data_are_measured_without_training(classified, untrained, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(classified[0], out)
    kept = json.loads((out / "seed-0" / "plain.json").read_text())
    (out / "seed-0" / "plain.json").write_text(json.dumps(kept | {"ood": []}))
    result = again(out, ood=("digits",), seeds=(0,), methods=("plain",))
    assert json.loads((out / "seed-0" / "plain.json").read_text()) == kept
    assert result.ood == ("digits",)


def test_what_was_cut_short_is_trained_to_the_same_weights(classified, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(classified[0], out)
    weights = (out / "seed-0" / "plain-1" / "model.safetensors").read_bytes()
    (out / "seed-0" / "plain-1" / "model.safetensors").unlink()
    (out / "seed-0" / "ensemble.json").unlink()
    said = []
    again(out, seeds=(0,), methods=("ensemble",), say=said.append)
    assert said == ["seed 0: training plain-1", "seed 0: measuring ensemble"]
    assert (out / "seed-0" / "plain-1" / "model.safetensors").read_bytes() == weights


def test_networks_begin_with_the_weights_of_the_run(classified):
    out, _ = classified
    run = Run(out / "seed-1" / "mnn")
    dataset, _ = runs.samples.load_data(run.config.data, seed=1)
    nets = TrainedNetworks(run, dataset, QUICK, covariance="full", say=print, display=Silent)
    torch.manual_seed(1)
    begun = run.config.model.build()
    first, other = nets.build("plain"), nets.build("plain", 1)
    assert torch.equal(first[2].weight, begun.linear1.weight)
    assert not torch.equal(other[2].weight, begun.linear1.weight)
    assert any(isinstance(layer, torch.nn.Dropout) for layer in nets.build("dropout"))
    assert member_seed(7, 0) == 7
    assert len({member_seed(seed, member) for seed in range(9) for member in range(9)}) == 81


def test_another_comparison_is_not_touched(classified, tmp_path):
    out, _ = classified
    with pytest.raises(RunError, match="holds a comparison already"):
        again(out, existing="refuse")
    with pytest.raises(RunError, match="another choice of epochs: "):
        again(out, chosen=replace(TINY, epochs=2))
    with pytest.raises(RunError, match="another choice of members"):
        again(out, settings=CompareConfig(members=3, samples=3, attacked=30))
    (tmp_path / "mine.txt").write_text("")
    with pytest.raises(RunError, match="not empty and holds no comparison"):
        again(tmp_path)


def test_overwriting_leaves_what_is_not_its_own(classified, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(classified[0], out)
    (out / "seed-0" / "notes.txt").write_text("mine")
    comparing._clear(out)
    left = [path.relative_to(out) for path in out.rglob("*") if path.is_file()]
    assert left == [Path("seed-0/notes.txt")]


def test_what_cannot_be_done_is_said_before_training(tmp_path, monkeypatch):
    monkeypatch.setattr(trained_networks, "train", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(DataError, match="no data set 'digit'"):
        again(tmp_path / "a", ood=("digit",))
    with pytest.raises(ValueError, match="Unknown schedule 'slow'"):
        again(tmp_path / "a", chosen=replace(TINY, schedule="slow"))
    with pytest.raises(ValueError, match=r"rel.*relu"):
        again(tmp_path / "a", chosen=replace(TINY, activation="rel"))
    with pytest.raises(ValueError, match=r"10 held-out rows.* makes 9 of 898.*--validation"):
        compare(DataConfig(name="digits", validation=0.01), out=tmp_path / "a")
    with pytest.raises(ValueError, match="Unknown method 'smsc'; for classification"):
        again(tmp_path / "b", methods=("smsc",))
    with pytest.raises(ValueError, match="seeds, each once"):
        again(tmp_path / "c", seeds=(1, 1))
    with pytest.raises(ValueError, match="held-out rows"):
        compare(DataConfig(name="digits", validation=0.0), out=tmp_path / "d")
    with pytest.raises(ValueError, match="members >= 1"):
        CompareConfig(members=0)
    assert not list(tmp_path.iterdir())  # nothing that would refuse the right choice


def test_what_cannot_be_done_replaces_nothing(classified):
    out, _ = classified
    before = sorted(out.rglob("*"))
    with pytest.raises(ValueError, match="Unknown schedule"):
        again(out, chosen=replace(TINY, schedule="slow"), existing="overwrite")
    assert sorted(out.rglob("*")) == before


def test_regression_on_the_scale_of_the_target(regressed):
    rows = {row.method: row.summary for row in regressed[1].rows}
    for name, summary in rows.items():
        assert summary["rmse"].mean > 10  # of a target with a deviation of 77
        if "calibrated" in name or name == "plain, constant variance":
            assert -12 < summary["log_likelihood"].mean < -4
        assert 0 <= summary["coverage_90"].mean <= 1
    # The same mean, and the same order of doubt.
    for name in ("MNN", "MC dropout"):
        for key in ("rmse", "spearman_error", "aurc"):
            assert rows[name][key] == rows[f"{name}, calibrated"][key]
    assert rows["MC dropout"]["coverage_90"] != rows["MC dropout, calibrated"]["coverage_90"]
    # Of one variance for all, there is no order.
    assert rows["plain, constant variance"]["spearman_error"].mean is None


def test_the_network_of_the_likelihood_is_that_of_covary_train(regressed):
    """An ordinary run, with the noise and training of that command and the widths of the other."""
    out, _ = regressed
    own, other = Run(out / "seed-0" / "smsc-0").config, Run(out / "seed-0" / "mnn").config
    assert (own.loss, other.loss) == ("likelihood", "mean")
    assert own.model.hidden == other.model.hidden
    assert own.model.noise[0] == 0
    assert own.training.schedule == "one-cycle"


def test_regression_numbers_by_hand():
    mean = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64)
    variance = torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64)
    test = Prediction({"stddev": variance}, mean=mean, covariance=variance[:, None, None])
    foreign = Prediction({"stddev": variance + 100}, mean=mean, covariance=variance[:, None, None])
    target = torch.tensor([[0.5], [3.0], [12.0]])
    row = rows_of(test, target, {"far": foreign})["stddev"]
    gaps, deviations = np.array([0.5, 2.0, 10.0]), np.array([1.0, 2.0, 3.0])
    density = -0.5 * ((gaps / deviations) ** 2 + np.log(2 * np.pi * deviations**2))
    assert row["rmse"] == pytest.approx(np.sqrt((gaps**2).mean()))
    assert row["log_likelihood"] == pytest.approx(density.mean())
    assert row["coverage_90"] == pytest.approx(2 / 3)
    assert row["width_90"] == pytest.approx(2 * 1.6448536 * deviations.mean())
    assert row["crps"] == pytest.approx(
        scoringrules.crps_normal(target[:, 0].numpy(), mean[:, 0].numpy(), deviations).mean()
    )
    assert row["spearman_error"] == pytest.approx(1)
    assert row["auroc_ood_far"] == 1


def test_numbers_of_two_targets_that_are_not_gaussian():
    """Log-likelihoods of the targets add up; the other numbers are averages over them."""
    each = uniform(np.zeros(4), 2.0), uniform(np.zeros(4), 4.0)
    mean = torch.tensor([[1.0, 2.0]]).expand(4, 2).double()
    variance = torch.tensor([4 / 12, 16 / 12]).double()
    test = Prediction(
        {"stddev": torch.arange(4.0)},
        mean=mean,
        covariance=torch.diag(variance).expand(4, 2, 2),
        distributions=each,
    )
    target = torch.tensor([[1.0, 2.0], [1.95, 0.1], [0.5, 3.0], [1.0, 1.0]])
    row = rows_of(test, target, {})["stddev"]
    assert row["log_likelihood"] == pytest.approx(-np.log(2) - np.log(4))
    assert row["coverage_90"] == pytest.approx((3 / 4 + 3 / 4) / 2)
    assert row["width_90"] == pytest.approx((1.8 + 3.6) / 2)
    first, second = target.double().numpy().T
    expected = scoringrules.crps_uniform(first, 0, 2), scoringrules.crps_uniform(second, 0, 4)
    assert row["crps"] == pytest.approx(np.mean(expected), rel=1e-4)


def test_what_is_undefined_for_a_seed_is_left_out():
    found = Summary.of([1.0, None, 3.0])
    assert found == Summary(mean=2.0, stddev=pytest.approx(np.sqrt(2)), seeds=2)
    assert Summary.of([float("-inf")]) == Summary(mean=None, stddev=None, seeds=0)


def test_a_step_is_compared_with_relu(tmp_path):
    run = Run(tmp_path)
    data = DataConfig(name="digits")
    dataset, _ = runs.samples.load_data(data)
    config = resolve(data, dataset, replace(TINY, activation="heaviside"))
    run.config_path.write_text(config.to_toml())
    run.save_network(config.model.build())
    nets = TrainedNetworks(run, dataset, QUICK, covariance="full", say=print, display=Silent)
    assert nets.notes == [
        "A conventional heaviside network has no gradient: the conventional networks have ReLU."
    ]
    assert repr(nets.build("plain")[3]) == "Function(relu)"


def test_the_command(classified, untrained):
    out, result = classified
    options = ["--members", "2", "--samples", "3", "--hidden", "8", "--epochs", "1"]
    command = ["compare", "digits", "--out", str(out), "--seeds", "0,1", "--batch-size", "128"]
    refused = CliRunner().invoke(app, [*command, *options, "--resume"])
    assert refused.exit_code == 1  # 1000 attacked images are another choice
    assert "another choice of attacked" in refused.stderr
    settings = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps(settings | {"attacked": 1000}))
    try:
        more = ["--resume", "--ood", "digits", "--methods", "plain,dropout", "--methods", "laplace"]
        shown = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*command, *options, *more])
        assert shown.exit_code == 0, shown.stderr
        assert "deep ensemble" not in shown.stdout
        assert "last-layer Laplace" in shown.stdout
        assert "±" in shown.stdout
        assert "max-softmax" in shown.stdout  # the title of a score, not its name
        assert "max_softmax" not in shown.stdout
        assert "Written to" in shown.stderr
        as_json = CliRunner().invoke(app, [*command, *options, *more, "--json"])
        chosen = ("mnn", "plain", "dropout", "laplace")
        rows = [row for row in result.rows if row.group in chosen]
        assert list(Comparison.from_json(json.loads(as_json.stdout)).rows) == rows
        assert "MNN: tracked covariances; against exact ones" in shown.stderr
    finally:
        (out / "settings.json").write_text(json.dumps(settings))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--methods", "magic"], "Unknown method 'magic'"),
        (["digits", "--resume", "--overwrite"], "choose one"),
        (["energy", "--split", "20"], "splits 0 to 19"),
        (["houses.csv"], "--target NAME"),
        (["digits", "--mc-dropout", "0"], "between 0 and 1"),
    ],
)
def test_wrong_use(arguments, said):
    found = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["compare", *arguments])
    assert found.exit_code == 2
    assert said in found.stderr


def test_tables_have_the_options_of_training(tmp_path):
    """What errors recommend, missing values and columns to drop, can be said here too."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 2))
    rows = [f"{a:.3f},{b:.3f},n{i},{a + b:.3f}" for i, (a, b) in enumerate(x)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,name,y", ",0.5,n,1.0", *rows]))
    command = ["compare", str(table), "--target", "y", "--out", str(tmp_path / "out")]
    command += ["--hidden", "4", "--epochs", "1", "--seeds", "0,", "--methods", "plain"]
    refused = CliRunner().invoke(app, [*command, "--drop", "name"])
    assert refused.exit_code == 1
    assert "--missing" in refused.stderr
    shown = CliRunner().invoke(app, [*command, "--drop", "name", "--missing", "mean", "--json"])
    assert shown.exit_code == 0, shown.stderr
    found = Comparison.from_json(json.loads(shown.stdout)).config.data
    assert (found.missing, found.drop) == ("mean", ("name",))


def test_lists_have_commas_or_are_repeated():
    assert _listed(["a,b", " c ", ""]) == ("a", "b", "c")
    assert _listed(None) == ()
    assert _shown(Summary(mean=0.98765, stddev=0.001, seeds=2)) == "0.988 ± 0.001"
    assert _shown(Summary(mean=123.4, stddev=None, seeds=2)) == "123.4"
    assert _shown(Summary(mean=None, stddev=None, seeds=2)) == "undefined"


def test_names_are_known_by_task():
    assert set(method_names("classification")) < set(method_names("regression"))
    on_images = method_names("regression", is_table=False)
    assert set(method_names("regression")) - set(on_images) == set(TABLE_MODELS["regression"])
    with pytest.raises(ValueError, match=r"Unknown method 'boosting'.*others are for tables"):
        groups("classification", ("boosting",), is_table=False)


@pytest.fixture
def table(tmp_path) -> Path:
    """Rows of two inputs and a class of three, of which the last is not in every part."""
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 2))
    labels = np.where(np.arange(120) == 60, "rare", np.where(x[:, 0] > 0, "high", "low"))
    rows = [f"{a:.3f},{b:.3f},{label}" for (a, b), label in zip(x, labels, strict=True)]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(["a,b,kind", *rows]) + "\n")
    return path


def test_classes_of_a_table_beside_trees(table, tmp_path):
    command = ["compare", str(table), "--target", "kind", "--out", str(tmp_path / "it")]
    command += ["--hidden", "4", "--epochs", "1", "--seeds", "0,", "--methods", "boosting,forest"]
    shown = CliRunner().invoke(app, [*command, "--json"])
    assert shown.exit_code == 0, shown.stderr
    rows = {row.method: row for row in Comparison.from_json(json.loads(shown.stdout)).rows}
    for name in ("gradient boosting", "random forest"):
        assert rows[name].summary["accuracy"].mean > 0.7
        assert rows[name].training_cost > 0
        assert rows[name].inference_cost > 0


def test_a_model_without_its_library_is_left_out_with_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr("covary.compare.groups.find_spec", lambda name: None)
    found = compare(
        DataConfig(name="diabetes"), out=tmp_path / "it", chosen=TINY, methods=("ngboost",)
    )
    assert {row.group for row in found.rows} == {"mnn"}
    note = "ngboost is left out, as it needs ngboost: pip install 'covary[compare]'"
    assert note in found.notes


def test_a_process_of_few_rows_says_so(tmp_path, monkeypatch):
    model = replace(TABLE_MODELS["regression"]["gp"], rows=100)
    monkeypatch.setitem(TABLE_MODELS["regression"], "gp", model)
    data, out = DataConfig(name="diabetes"), tmp_path / "it"
    found = compare(data, out=out, chosen=TINY, methods=("gp",))
    (note,) = (note for note in found.notes if note.startswith("Gaussian process takes 100 of "))
    assert "at random" in note
    again = compare(data, out=out, chosen=TINY, methods=("gp",), existing="resume")
    assert (again.notes, again.rows) == (found.notes, found.rows)


def test_numbers_that_an_older_comparison_lacks_are_measured(regressed, tmp_path, untrained):
    out = tmp_path / "it"
    shutil.copytree(regressed[0], out)
    path = out / "seed-0" / "plain.json"
    stored = json.loads(path.read_text())
    for method in stored["methods"]:
        for row in method["scores"].values():
            del row["crps"]
    path.write_text(json.dumps(stored))
    found = again(out, "diabetes", seeds=(0,), methods=("plain",))
    (row,) = (row for row in found.rows if row.group == "plain")
    assert row.summary["crps"].mean > 0


def test_distributions_are_those_that_covary_predict_gives(regressed):
    out, found = regressed
    (row,) = [row for row in found.rows if row.method == "MNN, distribution"]
    run = Run(out / "seed-0" / "mnn")
    model, data = row_model(run), run.data
    expected = metrics.of_distribution(model.distribution(data.x_test), data.y_test[:, 0].numpy())
    for name in ("rmse", "log_likelihood", "crps", "coverage_90", "width_90", "spearman_error"):
        assert row.by_seed["0"][name] == pytest.approx(expected[name], rel=1e-6)
    (own,) = [row for row in found.rows if row.method == "MNN"]
    extra = row.by_seed["0"]["fit_seconds"] - own.by_seed["0"]["fit_seconds"]
    assert extra == pytest.approx(model.seconds)
    assert model.seconds > 0


def test_the_report_of_a_compared_run_shows_the_other_methods(regressed, tmp_path):
    out = tmp_path / "it"
    shutil.copytree(regressed[0], out)
    run = out / "seed-0" / "mnn"
    assert CliRunner().invoke(app, ["evaluate", str(run)]).exit_code == 0
    page = report.write(run).read_text(encoding="utf-8")
    section = page.partition('<section id="comparison">')[2].partition("</section>")[0]
    for row in regressed[1].rows:
        assert f'<th scope="row">{row.method}</th>' in section
        assert html.escape(row.description).replace("&#x27;", "&#39;") in section
    caption = section.partition("<figcaption>")[2].partition("</figcaption>")[0]
    for title, key in (
        ("NLL", "log_likelihood"),
        ("CRPS", "crps"),
        ("90% coverage", "coverage_90"),
    ):
        known = {row.method: row.summary[key].mean for row in regressed[1].rows}
        known = {name: value for name, value in known.items() if value is not None}
        goal = {"NLL": np.inf, "CRPS": 0.0}.get(title, 0.9)
        losses = {name: abs(x - goal) if goal < np.inf else -x for name, x in known.items()}
        best = min(losses, key=losses.__getitem__)
        assert re.search(rf"{title} [^;]* \({re.escape(best)}\)[;.]", caption)
    # Of a network that was trained differently since, the comparison says nothing.
    config = (run / "config.toml").read_text()
    assert "epochs = 1\n" in config
    comparison = json.loads((out / "compare.json").read_text())
    comparison["config"]["training"]["epochs"] = 2
    (out / "compare.json").write_text(json.dumps(comparison))
    assert 'id="comparison"' not in report.write(run).read_text(encoding="utf-8")
