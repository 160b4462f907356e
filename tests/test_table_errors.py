"""Columns with errors: read, refused, trained on, and what the errors make of the output."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import covary
from covary.compare import compare
from covary.data import DataError, read_table
from covary.files import FileError
from covary.report import write
from covary.report.figures_budget import average, by_input
from covary.report.words import removable
from covary.runs import Choices, DataConfig, Run, evaluate, train
from covary.runs.budget import measure
from covary.runs.predictions import Predictions
from covary.runs.records import decoded, to_json
from covary.runs.results import BudgetOfInput, BudgetResult
from covary.runs.samples import load_data
from covary.runs.training import resolve
from tests import commands

ROWS = 80
QUICK = Choices(epochs=2, hidden=(8, 6), lr=1e-2)
ERRORS = {"heat": "heat_std"}


def frame(rows: int = ROWS) -> pd.DataFrame:
    random = np.random.default_rng(0)
    heat, load = random.standard_normal((2, rows)) * 10
    return pd.DataFrame(
        {
            "heat": heat,
            "heat_std": random.uniform(0.5, 3, rows),
            "load": load,
            "city": random.choice(["Oslo", "Bonn"], rows),
            "price": 2 * heat + load,
        }
    )


def written(folder, table: pd.DataFrame | None = None):
    path = folder / "table.csv"
    (frame() if table is None else table).to_csv(path, index=False)
    return path


def problem(path, errors, **options) -> str:
    with pytest.raises(DataError) as caught:
        read_table(path, target="price", errors=errors, **options)
    return str(caught.value)


def changed(name: str, row: int, value: float) -> pd.DataFrame:
    table = frame()
    table.loc[row, name] = value
    return table


def test_a_column_of_errors_is_no_feature_and_belongs_to_its_column(tmp_path):
    path = written(tmp_path)
    dataset, schema = read_table(path, target="price", errors=ERRORS)
    assert dataset.features == ("heat", "load", "city=Bonn", "city=Oslo")
    assert schema.errors == ERRORS
    assert "column 'heat_std' holds the errors of 'heat' and is no input" in dataset.notes
    std = dataset.x_std
    assert std is not None
    assert std.shape == dataset.x.shape
    assert (std[:, 0] > 0).all()
    assert not std[:, 1:].any()
    table = frame().set_index("heat")["heat_std"]
    expected = [table[value] for value in dataset.x[:, 0].tolist()]
    assert std[:, 0].tolist() == expected
    assert isinstance(dataset.inputs, covary.Moments)
    torch.testing.assert_close(dataset.test_inputs.stddev, dataset.x_test_std)
    again = decoded(type(schema), to_json(schema), "schema.json")
    rows, _ = read_table(path, schema=again)
    assert rows.x_test_std is not None
    assert rows.x_test_std[:, 0].tolist() == frame()["heat_std"].tolist()


def test_without_errors_inputs_are_tensors(tmp_path):
    dataset, schema = read_table(written(tmp_path), target="price")
    assert "heat_std" in dataset.features
    assert dataset.x_std is None
    assert dataset.inputs is dataset.x
    assert dataset.test_inputs is dataset.x_test
    assert schema.errors == {}


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ({"heat": "heat_sdt"}, "there is no column 'heat_sdt' (did you mean 'heat_std'?)"),
        ({"haet": "heat_std"}, "there is no column 'haet' (did you mean 'heat'?); it has"),
        ({"price": "heat_std"}, "column 'price' is the target; --error is for columns to predict"),
        ({"heat": "price"}, "column 'price' is the target and cannot be the errors of 'heat'"),
        ({"city": "heat_std"}, "column 'city' holds texts, which have no errors ('heat_std')"),
        ({"heat": "city"}, "column 'city' holds 0 numbers and 80 texts"),
        ({"heat": "heat"}, "column 'heat' is said to hold the errors of 'heat', so it is no input"),
        (ERRORS | {"heat_std": "load"}, "so it is no input and has no errors of its own"),
    ],
)
def test_errors_of_or_in_the_wrong_column(tmp_path, errors, expected):
    assert expected in problem(written(tmp_path), errors)


def test_errors_that_are_no_standard_deviations(tmp_path):
    negative = problem(written(tmp_path, changed("heat_std", 7, -0.5)), ERRORS)
    assert "column 'heat_std' is negative in 1 of 80 rows, first in line 9" in negative
    absent = problem(written(tmp_path, changed("heat_std", 7, np.nan)), ERRORS)
    assert "column 'heat_std' has no error for 1 of 80 rows; fill them (0 is an exact" in absent
    dropped, _ = read_table(tmp_path / "table.csv", target="price", errors=ERRORS, missing="drop")
    assert len(dropped.x) + len(dropped.x_test) == ROWS - 1
    infinite = problem(written(tmp_path, changed("heat_std", 7, np.inf)), ERRORS)
    assert "column 'heat_std' is infinite or beyond" in infinite
    both = changed("heat_std", 7, -0.5)
    both["load_std"] = np.nan
    everything = problem(written(tmp_path, both), {**ERRORS, "load": "load_std"}, drop=["city"])
    assert "has 2 problems" in everything
    dropped_too = problem(written(tmp_path), ERRORS, drop=["heat_std"])
    assert "column 'heat_std' is left out and cannot be the errors of 'heat'" in dropped_too


def test_a_number_that_is_filled_in_has_no_error(tmp_path):
    table = changed("heat", 7, np.nan)
    table.loc[7, "heat_std"] = np.nan
    dataset, _ = read_table(written(tmp_path, table), target="price", errors=ERRORS, missing="mean")
    assert dataset.x_std is not None
    assert dataset.x_test_std is not None
    x, std = torch.cat([dataset.x, dataset.x_test]), torch.cat([dataset.x_std, dataset.x_test_std])
    marked = x[:, dataset.features.index("heat missing")] == 1
    assert marked.sum() == 1
    assert std[marked].sum() == 0
    assert (std[~marked, 0] > 0).all()


def test_errors_larger_than_the_data_are_a_note(tmp_path):
    table = frame()
    table["heat_std"] *= 100
    dataset, _ = read_table(written(tmp_path, table), target="price", errors=ERRORS)
    assert any(
        "larger than the spread of 'heat' in 100% of the training" in n for n in dataset.notes
    )


def test_the_option_names_a_column_and_its_errors(tmp_path):
    path = str(written(tmp_path))
    for said, expected in (
        (("heat",), "--error takes NAME=COLUMN"),
        (("=heat_std",), "--error takes NAME=COLUMN"),
        (("heat=a", "heat=b"), "names 'heat' twice"),
    ):
        with pytest.raises(ValueError, match=expected):
            DataConfig(name=path, target=("price",), errors=said)
    with pytest.raises(ValueError, match="does not take errors, which is for tables"):
        DataConfig(name="digits", errors=("a=b",))
    config = DataConfig(name=path, target=("price",), errors=("heat=heat_std",))
    with pytest.raises(ValueError, match="takes inputs without errors"):
        compare(config, out=tmp_path / "c", chosen=Choices())


def run_of(folder, **more) -> Run:
    config = DataConfig(
        name=str(written(folder)), target=("price",), errors=("heat=heat_std",), validation=0.2
    )
    dataset, schema = load_data(config)
    run = Run(folder / "run")
    train(resolve(config, dataset, replace(QUICK, **more)), dataset, run, schema=schema)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return run_of(tmp_path_factory.mktemp("errors"))


def test_a_run_takes_errors_row_by_row(run):
    assert run.config.model.covariance == "full"  # a shared one would average them
    assert run.config.data.errors == ("heat=heat_std",)
    assert run.schema is not None
    assert run.schema.errors == ERRORS
    evaluate(run, covariance="full")
    assert run.predictions is not None
    found = run.predictions["test"].variance
    net, data = run.network("full"), run.data
    with torch.no_grad():
        expected, without = net(data.test_inputs).variance, net(data.x_test).variance
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
    assert (expected > without).all()


def test_training_sees_the_errors_and_resumes(run, tmp_path):
    (tmp_path / "other").mkdir()
    exact = frame()
    exact["heat_std"] = 0.0
    config = DataConfig(
        name=str(written(tmp_path / "other", exact)),
        target=("price",),
        errors=("heat=heat_std",),
        validation=0.2,
    )
    dataset, schema = load_data(config)
    other = Run(tmp_path / "run")
    constant = replace(QUICK, schedule="constant")
    train(resolve(config, dataset, constant), dataset, other, schema=schema)
    weights = [each.network().state_dict()["linear1.weight"] for each in (run, other)]
    assert not torch.equal(*weights)
    more = resolve(config, dataset, replace(constant, epochs=3))
    train(more, dataset, other, schema=schema, existing="resume")
    whole = Run(tmp_path / "whole")
    train(more, dataset, whole, schema=schema)
    for name, value in whole.network().state_dict().items():
        torch.testing.assert_close(other.network().state_dict()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("more", [{"covariance": "tracked"}, {"precision": "64-true"}])
def test_tracked_covariances_and_double_precision_take_errors(tmp_path, more):
    run = run_of(tmp_path, **more)
    assert evaluate(run).parts["test"]["samples"] == len(run.data.x_test)


def test_new_rows_need_their_errors_too(run, tmp_path):
    path = tmp_path / "new.csv"
    frame().head(12).drop(columns=["price"]).to_csv(path, index=False)
    found = evaluate(run, ood=[str(path)])
    assert found.parts["new.csv"]["samples"] == 12
    frame().head(12).drop(columns=["heat_std"]).to_csv(path, index=False)
    with pytest.raises(DataError, match="there is no column 'heat_std'"):
        evaluate(run, ood=[str(path)])


def test_the_evaluation_says_what_the_variance_is_made_of(run):
    budget = evaluate(run, covariance="full").budget
    assert budget is not None
    assert run.evaluation is not None
    assert run.evaluation.budget == budget
    noise = ("noise on scaled inputs", "noise at activation1", "noise at activation2")
    weights = {f"weights of linear{layer}" for layer in (1, 2, 3)}
    assert set(budget.sources) == {"input", *noise, *weights}
    for shares in (budget.sources, budget.kinds, *(one.sources for one in budget.gallery)):
        assert sum(shares.values()) == pytest.approx(1)
    assert set(budget.kinds) == {"input", "noise", "weights"}
    assert budget.removable == budget.kinds["weights"] > 0
    assert budget.columns == {"heat": pytest.approx(budget.kinds["input"])}
    assert run.predictions is not None
    test, errors = run.predictions["test"], budget.errors
    assert [one.index for one in budget.gallery] == test.input_index.tolist()
    assert errors is not None
    assert errors.stddev[0] == pytest.approx(test.stddev.mean(), rel=1e-4)
    with torch.no_grad():
        exact = run.network("full")(run.data.x_test).stddev
    assert errors.exact[0] == pytest.approx(exact.mean().item(), rel=1e-4)
    index = int(test.input_index[3])
    assert errors.gallery[str(index)][1][0] == pytest.approx(exact[index].item(), rel=1e-4)
    # What the share of the input says and what leaving the errors out gives agree.
    rest = 1 - (np.array(errors.exact[0]) / errors.stddev[0]) ** 2
    share = budget.kinds["input"] / (1 - budget.removable)
    assert rest == pytest.approx(share, abs=0.15)


def test_the_terminal_and_the_page_show_the_budget(run):
    told = " ".join(commands.covary("evaluate", run.path).split())
    assert "errors of heat" in told
    assert "With perfect measurements the standard deviation would be" in told
    page = write(run).read_text(encoding="utf-8")
    assert '<section id="budget">' in page
    assert "“Input” are the errors of heat (" in page
    assert "With perfect measurements the standard deviation would be" in page
    figures = {path.stem for path in (run.path / "figures").glob("*.png")}
    assert {"budget", "budget-inputs", "budget-errors"} <= figures


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"noise": (0.0,)}, "nothing varies in this network, as its noise is 0"),
        ({"activation": "lif"}, "covary.convert takes no spiking neurons"),
    ],
)
def test_networks_without_a_budget_say_why(tmp_path, settings, expected):
    config = DataConfig(name="two-moons", limit=40)
    dataset, _ = load_data(config)
    made = Run(tmp_path / "run")
    train(resolve(config, dataset, Choices(epochs=0, hidden=(4,), **settings)), dataset, made)
    rows = np.arange(5)
    nothing = np.zeros((40, 2))
    test = Predictions(
        name="test",
        mean=nothing,
        variance=nothing,
        entropy=nothing[:, 0],
        layer_entropy=nothing,
        input=nothing[rows],
        input_index=rows,
    )
    found, notes = measure(made, made.network("full"), test)
    assert found is None
    assert expected in notes[0]


def test_weights_are_what_more_data_could_remove():
    shares = {"weights": 0.25, "noise": 0.75}
    budget = BudgetResult(samples=9, sources=shares, kinds=shares, removable=0.25)
    assert removable(budget) == "More training data could remove 25.0% (weights), and 75.0% not."
    assert average(budget, 1).alt.endswith("noise 75.0%; weights 25.0%.")


def test_a_budget_that_nobody_measured_is_refused():
    whole = {"samples": 9, "sources": {"noise at a": 1.0}, "kinds": {"noise": 1.0}, "removable": 0}
    assert decoded(BudgetResult, whole, "x").sources == {"noise at a": 1.0}
    bars = {"stddev": [1.0], "exact": [0.5], "gallery": {"3": [[1.0], [0.5]]}}
    row = {"index": 4, "sources": {"noise at a": 1.0}}
    for wrong, expected in (
        ({"sources": {"magic": 1.0}}, "'magic' is no source"),
        ({"sources": {}}, "'sources' is empty"),
        ({"errors": bars, "gallery": [row]}, "not of the same outputs and inputs"),
        ({"errors": {**bars, "exact": []}}, "not of the same outputs and inputs"),
    ):
        with pytest.raises(FileError, match=expected):
            decoded(BudgetResult, whole | wrong, "x")


def test_small_sources_are_drawn_as_one():
    shares = {f"noise at {i}": 0.1 for i in range(10)}
    rows = tuple(BudgetOfInput(i, shares) for i in range(3))
    budget = BudgetResult(
        samples=9, sources=shares, kinds={"noise": 1.0}, removable=0.0, gallery=rows
    )
    assert average(budget, 2).alt.endswith("noise at 6 10.0%; all others 30.0%.")
    assert "all others 30.0% to 30.0%" in by_input(budget, [2, 0]).alt
