"""The paper's regression cells one by one: all are there, and each is judged by its own number."""

import copy
import math

import numpy as np
import pytest
import torch

from covary.training import TrainingConfig
from reproduction.experiments import uci_printed, uci_training
from reproduction.experiments.uci_standardized import MIN_MAX, STANDARDISED, Standardized
from reproduction.figures.uci_printed import shared_table, table, verdict
from reproduction.published import uci as published
from reproduction.store import load
from tests.reproduction.trials import RESULTS

ROWS = {"uci-printed": published.OWN, "uci-shared": published.SHARED}
TABLES = {"uci-printed": table, "uci-shared": shared_table}
CELLS = [
    (name, key, cell) for name, rows in ROWS.items() for key in rows for cell in published.SETS
]


def record_of(name, gap=0.0, error=0.0):
    """Results in which ours is so far from every printed cell, on two splits."""
    parts = []
    for scaling in uci_printed.SCALINGS:
        for cell in published.SETS:
            ours = {key: row.cells[cell].mean + gap for key, row in ROWS[name].items()}
            series = {
                key: {
                    "log-likelihood": [mean - error, mean + error],
                    "noise": [0.1, 0.05],
                    "tried on test": [[mean + 9] * 3] * 2,
                }
                for key, mean in ours.items()
            }
            about = {"label": uci_printed.label(cell, scaling), "seed": 0, "metrics": ours}
            parts.append({**about, "series": series})
    return {"experiment": name, "scale": "paper", "parts": parts}


def place(record, cell, scaling):
    """The part of a cell."""
    label = uci_printed.label(cell, scaling)
    return next(part for part in record["parts"] if part["label"] == label)


@pytest.mark.parametrize(("name", "count"), [("uci-printed", 32), ("uci-shared", 16)])
@pytest.mark.parametrize("record", [record_of, lambda name: load(RESULTS, name)])
def test_every_published_cell_has_a_row(name, count, record):
    shown = TABLES[name](record(name))
    assert len(shown.rows) == len({row[0] for row in shown.rows}) == count
    printed = sorted(
        f"{mean:.2f} ({bracket:.2f})"
        for row in ROWS[name].values()
        for mean, bracket in row.cells.values()
    )
    assert sorted(row[1] for row in shown.rows) == printed
    assert all(len(row) == len(shown.columns) for row in shown.rows)


@pytest.mark.parametrize(("name", "key", "cell"), CELLS, ids=str)
def test_a_wrong_number_changes_the_verdict_on_its_cell_alone(name, key, cell):
    record = record_of(name)
    rows = [(each, other) for each in ROWS[name] for other in published.SETS]

    def verdicts(record):
        return {at: verdict(record, at[0], ROWS[name][at[0]], at[1]) for at in rows}

    def agreeing(scaling):
        return uci_printed.cells(key, ROWS[name][key], scaling).decided(record).count(True)

    assert set(verdicts(record).values()) == {"holds"}
    for scaling, left in ((STANDARDISED, "holds by min-max"), (MIN_MAX, "does not hold")):
        assert agreeing(scaling) == 8
        place(record, cell, scaling)["metrics"][key] += 0.06
        assert agreeing(scaling) == 7
        found = verdicts(record)
        assert found.pop((key, cell)) == left
        assert set(found.values()) == {"holds"}


def test_what_chance_explains_is_told_from_what_it_does_not():
    near, far = (record_of("uci-printed", 0.2, error) for error in (0.15, 0.05))
    assert {row[-1] for row in table(near).rows} == {"does not hold; within 2 errors"}
    assert {row[-1] for row in table(far).rows} == {"does not hold"}
    assert "of 32 cells, does not hold: 32)" in table(far).caption
    for part in far["parts"]:
        for column in part["series"].values():
            column["tried on test"] = [[-9.0, column["log-likelihood"][0] - 0.15, 9.0]] * 2
    said = "does not hold; 0.05 standardised gives it; 0.05 min-max gives it"
    assert {row[-1] for row in table(far).rows} == {said}


def test_splits_that_failed_make_no_cell_near():
    failed = record_of("uci-printed", 0.2, error=5.0)
    assert {row[-1] for row in table(failed).rows} == {"does not hold"}


def test_cells_that_were_not_measured_are_said_to_be():
    record = record_of("uci-printed")
    record["parts"] = [part for part in record["parts"] if part["label"].startswith("boston")]
    assert sum(row[-1] == "not run" for row in table(record).rows) == 28


def test_what_the_text_says_counts_and_what_the_code_can_do_is_shown():
    for experiment in uci_printed.EXPERIMENTS:
        counted = [claim for claim in experiment.claims if not claim.ours]
        rows = ROWS[experiment.name]
        assert [claim.metric for claim in counted] == list(rows)
        for claim in counted:
            assert all(STANDARDISED in label for label in claim.labels)
            for name, cell in rows[claim.metric].cells.items():
                assert claim.minus[uci_printed.label(name, STANDARDISED)] == cell.mean
        holding = record_of(experiment.name)
        assert experiment.verdict(holding) == "holds"
        assert experiment.verdict(record_of(experiment.name, 1.0)) == "does not hold"


def test_the_stored_verdicts_are_those_of_the_stored_numbers():
    for name, rows in ROWS.items():
        record = copy.deepcopy(load(RESULTS, name))
        for key, row in rows.items():
            for scaling in uci_printed.SCALINGS:
                claim = uci_printed.cells(key, row, scaling)
                expected = sum(
                    abs(part["metrics"][key] - row.cells[cell].mean) <= uci_printed.WITHIN
                    for cell in published.SETS
                    for part in record["parts"]
                    if part["label"] == uci_printed.label(cell, scaling)
                )
                assert claim.decided(record).count(True) == expected


def test_the_noises_are_the_printed_ones():
    for experiment in uci_printed.EXPERIMENTS:
        for part in experiment.parts["paper"]:
            assert part.settings["noises"] == [0.02, 0.05, 0.1]
            assert part.settings["hidden"] == [50]
            assert (part.settings["targets"] == "raw") != ("log targets" in part.label)


def test_data_go_from_0_to_1():
    x = torch.from_numpy(np.random.default_rng(0).normal(3.0, 2.0, (9, 2)))
    x[:, 1] = 4.0  # a constant
    known = Standardized(x, x[:, :1], MIN_MAX)
    low, high = x.numpy().min(0), x.numpy().max(0)
    np.testing.assert_allclose(known.x[:, 0], (x[:, 0] - low[0]) / (high - low)[0], rtol=1e-6)
    assert known.x[:, 1].abs().max() == 0
    np.testing.assert_allclose(known.y, known.x[:, :1])
    (back,) = known.back
    np.testing.assert_allclose(back(known.y.double()), x[:, :1], rtol=1e-6)
    with pytest.raises(ValueError, match="min-max"):
        Standardized(x, x[:, :1], "other")


@pytest.mark.parametrize("scaling", uci_printed.SCALINGS)
def test_likelihoods_are_on_the_scale_of_the_target(scaling):
    """Those on the scale of the network, less the logarithm of what one unit of it is."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, dtype=torch.float64, generator=random)
    y = 5 + 3 * x[:, :1].sin()
    known = Standardized(x, y, scaling)
    config = TrainingConfig(epochs=2, batch_size=16, lr=1e-2, weight_decay=0.0)
    (net,) = uci_training.train([uci_training.Job(known, (1.0, 0.0), 1)], [5], "relu", config)
    raw = uci_training.densities(uci_training.predicted(net, x), y)
    inner = net[1:-1]
    scaled = uci_training.densities(
        uci_training.predicted(inner, known.x.double()), known.y.double()
    )
    unit = {STANDARDISED: y.std(correction=0), MIN_MAX: y.max() - y.min()}[scaling].item()
    np.testing.assert_allclose(raw, scaled - math.log(unit), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scaling", uci_printed.SCALINGS)
def test_the_first_splits_of_a_set_count_until_all_are_measured(scaling):
    record, row = record_of("uci-printed"), published.OWN["MNN relu"]
    claim = uci_printed.cells("MNN relu", row, scaling)
    whole = place(record, "kin8nm", scaling)
    first = {**whole, "label": uci_printed.first_splits("kin8nm", scaling)}
    first["metrics"] = {key: value + 1 for key, value in whole["metrics"].items()}
    record["parts"].append(first)
    assert claim.decided(record).count(True) == len(claim.values(record)) == 8
    record["parts"].remove(whole)
    assert len(claim.values(record)) == 8
    assert claim.decided(record).count(True) == 7
    (cell,) = [row for row in table(record).rows if row[0] == "kin8nm, MNN (R)"]
    assert cell[-1] != "holds"
