"""Networks of digits trained as the paper's text says, word for word."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from covary.runs import Choices, DataConfig
from covary.runs.presets import PAPER_MNIST
from reproduction import page, words
from reproduction.catalogue import get
from reproduction.experiment import SCALES, Elsewhere
from reproduction.experiments import networks
from reproduction.figures import FIGURES
from reproduction.reading import completed
from reproduction.running import reproduce
from reproduction.workshop import Network, Workshop
from tests.reproduction.trials import with_mnist

SHARED = "printed, shared"
NAMES = ("mnist-relu", "mnist-heaviside", "mnist-lif", "shared-mnist")


@pytest.mark.parametrize(
    ("activation", "layers", "epochs", "decay"),
    [("relu", 6, 50, 1e-3), ("heaviside", 6, 50, 1e-3), ("lif", 3, 15, 1e-4)],
)
def test_the_recipe_is_the_printed_one(activation, layers, epochs, decay):
    """Sigma and not its square, the rate to the end, and all digits."""
    network = networks.printed("paper", activation, "shared")
    assert network.settings["noise"] == (0.2,) * layers
    found = Choices(**network.settings)
    assert (found.lr, found.batch_size, found.optimizer) == (5e-4, 128, "adam")
    assert (found.schedule, found.weight_decay, found.epochs) == ("constant", decay, epochs)
    assert network.validation == 0.0
    assert network.keep[-1] == epochs
    usual = networks.mnist("paper", activation, "shared")
    assert usual.validation == DataConfig(name="mnist").validation == 0.1
    if activation != "lif":
        assert found.hidden == PAPER_MNIST.hidden == (392, 196, 96, 48, 24)
        assert usual.settings["noise"][0] == pytest.approx(0.2**0.5)


def test_networks_that_hold_something_out_are_stored_as_before():
    network = networks.mnist("paper", "relu", "shared")
    assert "validation" not in network.to_dict()
    printed = networks.printed("paper", "relu", "shared")
    stored = json.loads(json.dumps(printed.to_dict()))
    assert stored["validation"] == 0.0
    assert Network.from_dict(stored) == printed


def test_a_network_is_trained_on_all_there_is(tmp_path):
    """And trained again, not gone on with, where something is held out."""
    shop = Workshop(folder=tmp_path)
    settings = {"hidden": (4,), "epochs": 2}
    network = Network(
        name="all", data="digits", settings=settings, keep=(1, 2), limit=50, validation=0.0
    )
    run = shop.trained(network, 0)
    environment = json.loads((run.path / "environment.json").read_text())
    assert (environment["training_samples"], environment["validation_samples"]) == (50, 0)
    assert run.config.data.validation == 0.0
    assert "validation_loss" not in run.metrics_path.read_text()
    assert shop.trained(network, 0).weights == run.weights
    held_out = shop.trained(replace(network, name="some", validation=0.5), 0)
    environment = json.loads((held_out.path / "environment.json").read_text())
    assert (environment["training_samples"], environment["validation_samples"]) == (25, 25)


def test_parts_and_claims_are_of_both_recipes():
    for name in NAMES:
        experiment = get(name)
        for scale in SCALES:
            for part in experiment.parts[scale]:
                is_printed = part.label.startswith("printed")
                network = part.settings["network"]
                assert network["name"].endswith("-printed") == is_printed
                assert part.settings["covariance"] == "full"  # one per sample in evaluation
                shared = network["settings"]["covariance"] == "shared"
                assert shared == (part.label in ("", "shared", SHARED))
        printed = [each for each in experiment.claims if SHARED in each.labels]
        assert {each.says.startswith("As printed: ") for each in printed} == {True}
        assert all(each.labels for each in experiment.claims)  # none is about both recipes
        # The figure's own networks count, others are rows of ours.
        counts = any(not each.ours for each in printed)
        assert counts == (name in ("mnist-lif", "shared-mnist"))


@with_mnist
@pytest.mark.parametrize("name", ["mnist-relu", "mnist-heaviside", "mnist-lif"])
def test_the_printed_recipe_runs_and_is_drawn_beside_the_other(name, tmp_path):
    experiment, shop = get(name), Workshop(folder=tmp_path / "work")
    labels = {part.label for part in experiment.parts["smoke"]} - {"full", "printed"}
    record = reproduce(experiment, "smoke", shop, results=tmp_path, only=[SHARED])
    assert {part["label"] for part in record["parts"]} == {SHARED}
    section = page._section(experiment, completed(experiment, record, tmp_path))
    assert "--only" in section.unfinished[0].command
    record = reproduce(experiment, "smoke", shop, results=tmp_path, only=labels)
    complete = completed(experiment, record, tmp_path)
    drawn = FIGURES[name](complete)
    shown = [text.get_text() for text in drawn.figure.legends[0].get_texts()]
    assert shown[2:] == ["shared" if "shared" in labels else "no label", SHARED]
    mine = {part["label"]: part["metrics"]["accuracy"] for part in record["parts"]}
    difference = next(
        claim
        for claim in experiment.claims
        if isinstance(claim.minus, Elsewhere) and claim.minus.experiment == name
    )
    other = next(label for label in labels if label != SHARED)
    assert difference.values(complete) == [pytest.approx(mine[SHARED] - mine[other])]


def test_a_stand_in_gives_way_to_what_it_stands_for():
    claim = next(each for each in get("mnist-relu").claims if "printed" in each.labels)
    parts = [
        {"label": label, "metrics": {"accuracy": 0.9}} for label in ("full", "printed", SHARED)
    ]
    plain = {"scale": "paper", "parts": [{"label": "", "metrics": {"accuracy_ann": 0.9}}]}
    record = {"scale": "paper", "beside": {"fgsm": plain}}
    for some, label in ((parts[::2], SHARED), (parts, "printed")):
        assert [part["label"] for part in claim.parts({**record, "parts": some})] == [label]


def test_numbers_may_be_compared_with_parts_without_a_label():
    """Those of a label are then none of them."""
    command = words._run(Elsewhere("mnist-lif", "accuracy", (SHARED,)), "paper")
    assert command.endswith("run mnist-lif --scale paper --only 'printed, shared'")
    difference = next(
        each
        for each in get("mnist-lif").claims
        if each.metric == "accuracy" and each.minus and each.minus.experiment == "mnist-lif"
    )
    parts = [
        {"label": label, "metrics": {"accuracy": value}}
        for label, value in (("", 0.5), (SHARED, 0.75))
    ]
    record = {"scale": "paper", "parts": parts}
    assert difference.values({**record, "beside": {"mnist-lif": record}}) == [0.25]
    assert difference.values(record) == []
    lacking = words.judged(difference, record)
    assert lacking.verdict == "not tested"
    assert lacking.command.endswith("--only ''")
    # Where it is the part itself that lacks, no other command would help.
    other = {**record, "parts": parts[:1]}
    lacking = words.judged(difference, {**other, "beside": {"mnist-lif": other}})
    assert (lacking.verdict, lacking.command) == ("not measured", "")


def test_intervals_that_are_estimated_are_named():
    from reproduction.figures.classifiers import _estimated

    old = {"label": "full", "series": {}}
    new = {"label": SHARED, "series": {"separability_covariance": []}}
    assert _estimated([new]) == ""
    assert _estimated([old]) == " (estimated from the numbers of right and wrong ones)"
    assert "(full: estimated" in _estimated([old, new])
