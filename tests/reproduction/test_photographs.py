"""Detectors of foreign photographs against brute force, the network they look at, and the rows."""

from __future__ import annotations

import json
import math
import os

import mpmath
import numpy as np
import pytest
import torch

from covary import data
from covary.data import Dataset
from covary.files import read_tensors
from covary.uncertainty import scores
from reproduction.experiment import SCALES, Claim, seeds
from reproduction.experiments import photographs, photographs_measures, residual
from reproduction.experiments.corruptions import CORRUPTIONS, corrupted, tiles
from reproduction.experiments.detectors import (
    NearestFeatures,
    VirtualLogit,
    energy,
    generalised_entropy,
)
from reproduction.figures.photographs import FIGURES, TABLES
from reproduction.running import reproduce
from reproduction.workshop import Workshop
from tests.reproduction.trials import trial

(ROW,) = photographs.EXPERIMENTS
with_files = pytest.mark.skipif(
    "COVARY_DATA" not in os.environ, reason="needs CIFAR-10 and SVHN in $COVARY_DATA"
)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def bytes_of(*shape, seed=0):
    return torch.randint(256, shape, generator=seeded(seed), dtype=torch.uint8)


# Scores


def test_energy_is_minus_the_log_of_summed_exponentials():
    logits = 5 * torch.randn(7, 4, generator=seeded())
    for row, found in zip(logits.tolist(), energy(logits).tolist(), strict=True):
        assert found == pytest.approx(-math.log(sum(map(math.exp, row))))


@pytest.mark.parametrize("top", [2, 10])
def test_generalised_entropy_is_that_of_exact_arithmetic(top):
    """Of confident samples too, whose largest probability is 1 in double precision."""
    logits = torch.randn(6, 5, generator=seeded()).double()
    logits[-2:, 0] = torch.tensor([50.0, 60.0]).double()
    found = generalised_entropy(logits, top=top).tolist()
    with mpmath.workdps(60):
        for row, value in zip(logits.tolist(), found, strict=True):
            weights = sorted((mpmath.exp(each) for each in row), reverse=True)
            p = [each / sum(weights) for each in weights][:top]
            expected = sum((each * (1 - each)) ** mpmath.mpf("0.1") for each in p)
            assert value == pytest.approx(float(expected), rel=1e-9)
    assert found[-1] < found[-2]


@pytest.mark.parametrize("k", [1, 3, 50])
def test_neighbours_are_those_of_all_pairs(k):
    known, asked = (torch.randn(n, 5, generator=seeded(n)) for n in (20, 300))
    found = NearestFeatures.of(known, k).distance(asked)
    for row, distance in zip(asked[::37], found[::37], strict=True):
        each = sorted(
            math.dist((row / row.norm()).tolist(), (other / other.norm()).tolist())
            for other in known
        )
        assert distance.item() == pytest.approx(each[min(k, 20) - 1], abs=1e-3)


def test_the_virtual_logit_is_that_of_one_more_class():
    """By a singular value decomposition, projections and a softmax, one step at a time."""
    n, d, classes, dimensions = 200, 8, 3, 5
    generator = seeded()
    features = torch.randn(n, d, generator=generator) @ torch.randn(d, d, generator=generator)
    weight, bias = (torch.randn(classes, *each, generator=generator) for each in ((d,), ()))
    logits = features @ weight.mT + bias
    fitted = VirtualLogit.of(features, logits, weight, bias, dimensions)
    f, w, b = (each.double().numpy() for each in (features, weight, bias))
    origin = -np.linalg.pinv(w) @ b
    np.testing.assert_allclose(w @ origin + b, 0, atol=1e-9)  # fewer classes than features
    _, _, rows = np.linalg.svd(f - origin)
    principal = rows[:dimensions]
    rest = (f - origin) - (f - origin) @ principal.T @ principal
    length = np.linalg.norm(rest, axis=1)
    np.testing.assert_allclose(fitted.norm(features), length, rtol=1e-4, atol=1e-4)
    scale = logits.double().numpy().max(1).mean() / length.mean()
    assert fitted.scale == pytest.approx(scale, rel=1e-5)
    widened = torch.cat([torch.from_numpy(scale * length)[:, None], logits.double()], 1)
    virtual = widened.softmax(1)[:, 0]
    np.testing.assert_allclose(
        fitted.score(features, logits), virtual.logit(), rtol=1e-3, atol=1e-3
    )


def test_sums_with_the_margin_are_standardised_on_held_out_data():
    net = residual.ResidualNetwork([4, 8, 8]).eval()
    subject = photographs_measures.NetworkForms(net, net, net, residual.inputs, ("plain",))
    images = bytes_of(260, 3, 16, 16)
    looks = ["mean", "plain"]
    seen = photographs_measures.look(subject, images, looks)
    training = photographs_measures.look(subject, images[:200], ["mean"])
    assert torch.equal(
        seen["features"] @ net.head.weight.mT + net.head.bias, seen["logits"].float()
    )
    held_out = {name: value[60:] for name, value in seen.items()}
    fits = photographs_measures.fit(subject, training, held_out, 5)
    part = fits.neighbours.distance(held_out["features"])
    largest = held_out["logits"].sort(-1).values
    margin = (largest[:, -1] - largest[:, -2]).log()
    expected = sum(
        factor * (each - each.mean()) / each.std(correction=0)
        for factor, each in ((1, part), (-2, margin))
    )
    found = photographs_measures.SCORES["knn_margin"].of(fits, held_out)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # In the features of layers each image is its own nearest neighbour.
    near = photographs_measures.SCORES["layers_margin"]
    nearest = torch.cdist(fits.near, fits.near).sort(1).values[:, 9]
    expected = (nearest - nearest.mean()) / nearest.std(correction=0) - 2 * (
        margin - margin.mean()
    ) / margin.std(correction=0)
    torch.testing.assert_close(near.of(fits, held_out), expected, rtol=1e-4, atol=1e-4)


def test_groups_are_compared_pair_by_pair():
    rng = np.random.default_rng(0)
    test, foreign = ({name: rng.integers(0, 9, n) for name in "ab"} for n in (40, 30))
    wrong = rng.random(40) < 0.3
    found = photographs_measures.told_apart(test, foreign, wrong)
    for name in "ab":
        for pair, positive, negative in (
            ("errors", test[name][wrong], test[name][~wrong]),
            ("foreign", foreign[name], test[name]),
        ):
            gaps = positive[:, None] - negative[None]
            assert found[f"auroc {pair}, {name}"] == pytest.approx(
                np.mean((gaps > 0) + 0.5 * (gaps == 0))
            )
            threshold = max(each for each in positive if np.mean(positive >= each) >= 0.95)
            assert found[f"fpr95 {pair}, {name}"] == np.mean(negative >= threshold)


def test_the_choice_is_by_corrupted_images_alone():
    found = {f"auroc {pair}, {name}": number for pair, name, number in (
        ("foreign", "a", 0.7), ("foreign", "b", 0.9), ("errors", "a", 0.6), ("errors", "b", 0.5),
    )}  # fmt: skip
    chosen = photographs_measures.choice({"a": 0.8, "b": 0.6}, found)
    assert chosen["auroc foreign, chosen"] == 0.7
    assert chosen["auroc errors, chosen"] == 0.6
    assert chosen["auroc foreign, best"] == 0.9
    assert chosen["rank of corrupted and foreign"] == pytest.approx(-1)


# Corrupted images


def test_corruptions_change_images_and_leave_the_originals():
    images = bytes_of(6, 3, 32, 32)
    before = images.clone()
    found = corrupted(images, seed=0)
    assert set(found) == set(CORRUPTIONS)
    for changed in found.values():
        assert changed.dtype == torch.uint8
        assert changed.shape == images.shape
        assert not torch.equal(changed, images)
    assert torch.equal(images, before)
    again = corrupted(images, seed=0)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_tiles_change_places_and_stay_whole():
    images = bytes_of(4, 3, 32, 32)
    changed = tiles(images, seeded())

    def cut(image):
        return sorted(
            image[:, i : i + 8, j : j + 8].flatten().tolist()
            for i in range(0, 32, 8)
            for j in range(0, 32, 8)
        )

    for one, other in zip(images, changed, strict=True):
        assert cut(one) == cut(other)


# The network


def few_images(count=48):
    labels = torch.arange(count) % 10
    return Dataset(
        "few", "classification", bytes_of(count, 3, 8, 8), labels, bytes_of(9, 3, 8, 8), labels[:9]
    )


NETWORK = {
    "name": "few",
    "data": "few",
    "settings": {
        "widths": [4, 6],
        "epochs": 3,
        "batch_size": 16,
        "lr": 1e-2,
        "weight_decay": 1e-2,
        "validation": 0.25,
        "limit": 0,
    },
}


def test_training_that_is_cut_short_goes_on_to_the_same_weights(tmp_path, monkeypatch):
    whole = residual.trained(NETWORK, 0, few_images(), Workshop(folder=tmp_path / "whole"))
    shop, asked = Workshop(folder=tmp_path / "cut"), []
    own = residual.accuracy

    def stops(*arguments):
        asked.append(1)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return own(*arguments)

    monkeypatch.setattr(residual, "accuracy", stops)
    with pytest.raises(KeyboardInterrupt):
        residual.trained(NETWORK, 0, few_images(), shop)
    resumed = residual.trained(NETWORK, 0, few_images(), shop)
    assert len(asked) == 4  # the first epoch is not trained again
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    seconds = shop.training_seconds({"residual": NETWORK}, 0)
    assert seconds["few-0"] > 0
    assert set(shop.weights({"residual": NETWORK}, 0)) == {"few-0"}


def test_a_network_is_trained_once_and_anew_with_other_settings(tmp_path):
    shop = Workshop(folder=tmp_path)
    first = residual.trained(NETWORK, 0, few_images(), shop)
    again = residual.trained(NETWORK, 0, few_images(), shop)
    assert len(shop.spent) == 1
    assert torch.equal(first.head.weight, again.head.weight)
    other = {**NETWORK, "settings": {**NETWORK["settings"], "epochs": 1}}
    residual.trained(other, 0, few_images(), shop)
    assert len(shop.spent) == 2
    _, metadata = read_tensors(tmp_path / "few-0" / "model.safetensors")
    assert json.loads(metadata["about"])[0] == other


def test_held_out_images_are_not_trained_on():
    held_out, rows = residual.held_out_rows(100, {"validation": 0.1}, 3)
    assert sorted([*held_out.tolist(), *rows.tolist()]) == list(range(100))
    assert len(held_out) == 10


# The rows


def test_every_network_meets_every_set_at_every_scale_but_smoke():
    for scale in SCALES[1:]:
        labels = {part.label for part in ROW.parts[scale]}
        assert labels == {
            photographs.label_of(network, foreign)
            for network in photographs.NETWORKS
            for foreign in photographs.FOREIGN
        }


def test_a_set_that_is_fetched_on_request_is_missing_and_not_tested(tmp_path, monkeypatch):
    """Its part is left out, and named as missing."""
    there = data.status

    def status(name, data_dir=None):
        return data.Status(name, "missing") if name == "cifar100" else there("quadrants")

    monkeypatch.setattr(data, "status", status)
    said = []
    shop = Workshop(folder=tmp_path / "work", say=said.append)
    parts = (*seeds("small", 1, size=1), *seeds("large", 1, size=2, needs=["cifar100"]))
    record = reproduce(
        trial(**dict.fromkeys(SCALES, parts)), "quick", shop, results=tmp_path / "results"
    )
    assert record["missing"] == [{"label": "large", "seed": 0}]
    assert any("covary data fetch cifar100" in each for each in said)


def test_an_experiment_beyond_the_paper_is_judged_by_claims_of_ours(tmp_path):
    claims = (
        Claim(says="", metric="number", least=20.0, label="large", ours=True),
        Claim(says="", metric="number", least=99.0, ours=True),
        Claim(says="", metric="number", ours=True),
    )
    record = reproduce(
        trial(), "quick", Workshop(folder=tmp_path / "work"), results=tmp_path / "results"
    )
    assert trial(claims=claims).verdict(record) == "holds partly (1 of 2 claims hold)"
    paper = Claim(says="", metric="number", least=10.0)
    assert trial(claims=(*claims, paper)).verdict(record) == "holds"
    assert all(claim.ours for claim in ROW.claims)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smoke")
    shop = Workshop(folder=folder / "work")
    return shop, reproduce(ROW, "smoke", shop, results=folder / "results")


@with_files
def test_all_scores_of_both_networks_are_measured(smoke):
    _, record = smoke
    by_label = {part["label"]: part for part in record["parts"]}
    for label, lacks in (("residual, svhn", {"fitted"}), ("lenet5, svhn", set())):
        part = by_label[label]
        assert set(part["series"]["scores"]) == set(photographs_measures.SCORES) - lacks
        for name in part["series"]["scores"]:
            for key in ("auroc errors", "fpr95 foreign", "auroc corrupted", "time", "megabytes"):
                assert math.isfinite(part["metrics"][f"{key}, {name}"])
        assert part["metrics"]["auroc foreign, best"] == max(
            part["metrics"][f"auroc foreign, {name}"] for name in part["series"]["scores"]
        )
        assert part["metrics"]["megabytes, max_softmax"] == 0 < part["metrics"]["megabytes, knn"]
    # One pass and hardly more; a fitted score adds up numbers of all layers.
    assert by_label["residual, svhn"]["metrics"]["time, energy"] < 3


@with_files
def test_numbers_are_those_of_the_network_in_the_workshop(smoke):
    """Max-softmax of house numbers and of test images, from the beginning."""
    shop, record = smoke
    (part,) = (each for each in ROW.parts["smoke"] if each.label == "residual, svhn")
    (found,) = (each for each in record["parts"] if each["label"] == part.label)
    subject, images = photographs_measures._subject(part, shop)
    with torch.no_grad():
        probabilities, strange = (
            subject.net(residual.inputs(each)).double().softmax(1)
            for each in (images.test, images.foreign)
        )
    right = probabilities.argmax(1) == images.labels
    assert found["metrics"]["accuracy"] == pytest.approx(100 * right.double().mean().item())
    gaps = (1 - strange.amax(1))[:, None] - (1 - probabilities.amax(1))[None]
    counted = ((gaps > 0) + 0.5 * (gaps == 0)).double().mean().item()
    assert found["metrics"]["auroc foreign, max_softmax"] == pytest.approx(counted, abs=1e-6)
    seen = photographs_measures.look(subject, images.test[:20], ["covariance"])
    with torch.no_grad():
        out = subject.with_moments(residual.inputs(images.test[:20]))
        fits = None
        entropy = photographs_measures.SCORES["entropy"].of(fits, seen)
        torch.testing.assert_close(entropy, scores.entropy(out).double(), rtol=1e-4, atol=1e-4)


@with_files
def test_the_table_and_the_figure_show_what_was_stored(smoke):
    _, record = smoke
    table = TABLES[ROW.name](record)
    assert all(len(row) == len(table.columns) for row in table.rows)
    rows = {row[0]: row for row in table.rows}
    metrics = {part["label"]: part["metrics"] for part in record["parts"]}["lenet5, svhn"]
    assert rows["mixed LeNet5, SVHN: KNN"][3] == f"{metrics['auroc foreign, knn']:.3f}"
    drawing = FIGURES[ROW.name](record)
    assert f"foreign images {metrics['auroc foreign, gen']:.3f}" in drawing.alt
    assert len(drawing.figure.axes) == 4
