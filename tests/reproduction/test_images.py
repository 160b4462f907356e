"""Accuracy on images: what the rows say, what is measured, and why three trainings are one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from covary.models import with_covariance
from covary.runs import ModelConfig
from covary.runs.samples import load_data
from reproduction.experiment import SCALES, Part
from reproduction.experiments.images import (
    ACTIVATIONS,
    EXPERIMENTS,
    KINDS,
    label_of,
    measure,
    network,
)
from reproduction.figures.images import FIGURES, TABLES
from reproduction.published import images as published
from reproduction.running import reproduce
from reproduction.workshop import Network, Workshop
from tests.reproduction.trials import with_mnist

OWN, SHARED = EXPERIMENTS


def gradients(covariance, hidden, activation):
    torch.manual_seed(0)
    net = ModelConfig(
        hidden=hidden,
        trunk="lenet5",
        activation=activation,
        noise=(0.4472136,),
        covariance=covariance,
        input_shape=(1, 13, 13),
        outputs=3,
    ).build()
    net = net.double()
    x = torch.rand(6, 1, 13, 13, dtype=torch.float64) * 255
    loss = F.cross_entropy(net(x).mean, torch.arange(6) % 3)
    return torch.autograd.grad(loss, list(net.parameters()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_with_one_hidden_layer_covariances_do_not_reach_the_gradient(activation):
    """The table's networks: MNN, dMNN and shared covariances are one training."""
    full = gradients("full", (12,), activation)
    for covariance in ("diagonal", "shared"):
        torch.testing.assert_close(gradients(covariance, (12,), activation), full)


@pytest.mark.parametrize("covariance", ["diagonal", "shared"])
def test_with_two_hidden_layers_they_do(covariance):
    """So the agreement above is one of the architecture and not of the code."""
    full = gradients("full", (12, 8), "relu")
    other = gradients(covariance, (12, 8), "relu")
    assert max((a - b).abs().max() / a.abs().max() for a, b in zip(full, other, strict=True)) > 1e-6


def test_networks_are_the_modified_lenet5():
    for data, widths in (("mnist", [800, 500, 10]), ("cifar10", [4800, 1000, 10])):
        made = Network.from_dict(network("quick", data, "relu", "full").to_dict())
        shape = (3, 32, 32) if data == "cifar10" else (1, 28, 28)
        model = ModelConfig(
            hidden=made.settings["hidden"],
            trunk=made.settings["trunk"],
            input_shape=shape,
            outputs=10,
        )
        assert model.widths == widths
        assert made.augment == (data == "cifar10")  # digits are not to be mirrored


def test_every_cell_of_the_paper_has_a_part_at_its_scale():
    every = {part.label for part in OWN.parts["paper"]}
    labels = {label for label in every if "as they are" not in label}
    assert every - labels == {
        label_of(data, "MNN", activation, as_they_are=True)
        for data in ("cifar10", "cifar100")
        for activation in ACTIVATIONS
    }
    cells = {f"{data} {name}" for data, row in published.OWN.items() for name in row}
    assert labels == cells
    shared = {part.label for part in SHARED.parts["paper"]}
    assert shared == {f"{data} {name}" for data, row in published.SHARED.items() for name in row}
    assert len(labels) == len(published.OWN) * len(KINDS) * len(ACTIVATIONS)
    # Its files may have to be fetched, which is not for a quick look.
    assert not any("cifar100" in part.label for part in OWN.parts["quick"])


def test_every_claim_is_about_parts_that_there_are():
    for experiment in EXPERIMENTS:
        about = {label for claim in experiment.claims for label in claim.labels}
        assert about <= {part.label for part in experiment.parts["paper"]}
        quick = {part.label for part in experiment.parts["quick"]}
        # Networks of CIFAR-10 are trained once, in full; those of CIFAR-100 at scale paper.
        absent = "cifar100" if experiment is OWN else "cifar10"
        assert about - quick == {label for label in about if absent in label}


def test_images_as_they_are_are_trained_on_without_crops_and_flips():
    parts = {p.label: p.settings for p in OWN.parts["quick"] if p.label.startswith("cifar10 MNN")}
    augmented = parts["cifar10 MNN relu"]["network"]
    plain = parts["cifar10 MNN relu, as they are"]["network"]
    assert augmented | {"name": "", "augment": False} == plain | {"name": ""}
    assert augmented["name"] != plain["name"]


def test_the_best_that_the_paper_cites():
    assert published.best_cited("mnist") == 99.15
    assert published.best_cited("fashion-mnist") == 89.90
    assert published.best_cited("cifar10") == 68.67
    assert set(published.CITED) == set(published.OWN)


def test_evaluation_is_per_sample_and_training_as_the_label_says():
    for scale in SCALES:
        for part in OWN.parts[scale]:
            kind = part.label.split()[1]
            covariance = part.settings["network"]["settings"]["covariance"]
            assert part.settings["covariance"] == KINDS[kind]
            # Where none is trained without correlations, those with them stand in.
            assert covariance == KINDS[kind] or (scale == "quick" and covariance == "full")
        quick = {p.label: p.settings["network"]["settings"] for p in OWN.parts["quick"]}
        assert quick["mnist dMNN relu"]["covariance"] == "diagonal"
        for part in SHARED.parts[scale]:
            assert part.settings["network"]["settings"]["covariance"] == "shared"
            assert part.settings["per_sample"]["settings"]["covariance"] == "full"
            assert part.settings["covariance"] == "full"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    workshop = Workshop(folder=folder)
    return workshop, [reproduce(each, "smoke", workshop, results=folder) for each in EXPERIMENTS]


@with_mnist
def test_numbers_are_those_of_the_trained_network(smoke):
    """Against probabilities, and pairs of entropies counted one by one."""
    workshop, (record, _) = smoke
    part, settings = record["parts"][0], record["config"][0]["settings"]
    assert part["label"] == label_of("mnist", "MNN", "relu")
    run = workshop.trained(settings["network"], part["seed"])
    dataset, _ = load_data(run.config.data)
    with torch.no_grad():
        out = with_covariance(run.network(), "full")(dataset.x_test)
    label = dataset.y_test
    right = (out.mean.argmax(-1) == label).numpy()
    found = part["metrics"]
    assert found["accuracy"] == pytest.approx(100 * right.mean())
    assert found["lead"] == pytest.approx(found["accuracy"] - 99.15)
    expected = F.log_softmax(out.mean.double(), -1).gather(1, label[:, None]).mean().item()
    assert found["log_likelihood"] == pytest.approx(expected, rel=1e-5)
    entropy = out.entropy().double().numpy()
    pairs = entropy[~right][:, None] - entropy[right][None]
    counted = np.mean((pairs > 0) + 0.5 * (pairs == 0))
    assert found["auroc_entropy"] == pytest.approx(counted, abs=1e-3)
    assert found["changed_by_correlations"] == 0
    assert len(part["series"]["validation"]) == settings["network"]["settings"]["epochs"]


@with_mnist
def test_shared_covariances_are_set_against_those_of_samples(smoke):
    _, (own, shared) = smoke
    beside = own["parts"][0]["metrics"]["accuracy"]
    found = shared["parts"][0]["metrics"]
    assert found["accuracy_per_sample"] == beside
    assert found["degradation"] == pytest.approx(beside - found["accuracy"])


@with_mnist
def test_the_same_part_gives_the_same_numbers(smoke, tmp_path):
    _, (record, _) = smoke
    before = record["parts"][1]
    settings = record["config"][1]["settings"]
    again = measure(Part(before["label"], 0, settings), Workshop(folder=tmp_path))
    assert dict(again.metrics) == before["metrics"]


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda each: each.name)
def test_the_table_and_the_figure_show_what_was_stored(experiment):
    """One cell of two runs, and nothing else measured."""
    label = label_of("cifar10", "MNN", "relu")
    numbers = {"accuracy": 70.0, "accuracy_per_sample": 71.5, "log_likelihood": -0.8}
    parts = [
        {"label": label, "seed": seed, "metrics": numbers | {"accuracy": 70.0 + seed}, "series": {}}
        for seed in range(2)
    ]
    config = [
        {"label": part.label, "settings": part.settings} for part in experiment.parts["quick"]
    ]
    record = {"experiment": experiment.name, "scale": "quick", "config": config, "parts": parts}
    table = TABLES[experiment.name](record)
    assert all(len(row) == len(table.columns) for row in table.rows)
    rows = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert rows["CIFAR-10, ours"]["MNN (R)"] == "70.50 (0.71), 2 runs"
    assert rows["CIFAR-10, ours"]["MNN (H)"] == "not run"
    if experiment is OWN:
        assert rows["CIFAR-10, ours"]["dMNN (R)"] == "not run"
    printed = published.SHARED if experiment is SHARED else published.OWN
    assert rows["CIFAR-10, published"]["MNN (H)"] == printed["cifar10"]["MNN heaviside"]
    assert rows["MNIST, ours"]["MNN (R)"] == "not run"
    drawing = FIGURES[experiment.name](record)
    assert "CIFAR-10 MNN relu 70.50" in drawing.alt
    assert len(drawing.figure.axes) == 1  # no panel without a measurement


def test_networks_of_another_cell_are_not_drawn_as_if_they_were_more_of_them():
    labels = [label_of("cifar10", kind, "relu") for kind in ("MNN", "dMNN")]
    parts = [{"label": each, "seed": 0, "metrics": {"accuracy": 70.0}} for each in labels]
    config = [{"label": part.label, "settings": part.settings} for part in OWN.parts["quick"]]
    drawing = FIGURES[OWN.name]({"experiment": OWN.name, "config": config, "parts": parts})
    ours = [line for line in drawing.figure.axes[0].lines if list(line.get_xdata()) == [70.0]]
    assert [line.get_markerfacecolor() == "none" for line in ours] == [False, True]
    assert "Hollow: no networks of their own" in drawing.caption
    assert "dMNN relu 70.00 (MNN's networks)" in drawing.alt
