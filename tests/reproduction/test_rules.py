"""Rules by which claims are judged: noise, orders of layers, and results of other experiments."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from covary.uncertainty import metrics
from reproduction import page, store, words
from reproduction.catalogue import get
from reproduction.experiment import FAILS, HOLDS, PARTLY, UNDECIDED, Claim, Elsewhere, Measured
from reproduction.experiments import classification, classifiers, out_of_distribution
from reproduction.experiments.statistics import (
    correlation_interval,
    deviation_by_shares,
    deviation_by_sizes,
    falls,
    histograms,
    resampled_separabilities,
)
from reproduction.reading import read
from reproduction.running import reproduce
from reproduction.store import load
from tests.reproduction.trials import RESULTS, trial, workshop

# Small statistics


def two_groups(generator, sizes=(150, 400), skew=True):
    """Entropies of three layers that have much in common, of wrong and of right samples."""
    wrong = np.arange(sum(sizes)) < sizes[0]
    common = generator.gamma(2.0, size=sum(sizes)) if skew else generator.normal(size=sum(sizes))
    own = generator.normal(size=(sum(sizes), 3))
    return common[:, None] + 0.5 * own + wrong[:, None] * np.array([0.5, 1.0, 1.5]), wrong


def separabilities(values, wrong):
    return [metrics.separability(each[wrong], each[~wrong]) for each in values.T]


def test_the_bootstrap_is_that_of_drawing_samples_again():
    generator = np.random.default_rng(0)
    values, wrong = two_groups(generator)
    values[3, 1] = -math.inf  # left out of its layer alone
    drawn = []
    for _ in range(2000):
        rows = [generator.choice(np.flatnonzero(each), each.sum()) for each in (wrong, ~wrong)]
        again = np.concatenate(rows)
        drawn.append(separabilities(values[again], wrong[again]))
    ours = resampled_separabilities(values, wrong, seed=1, draws=2000)
    np.testing.assert_allclose(ours, np.cov(drawn, rowvar=False), rtol=0.15)
    same = resampled_separabilities(values, wrong, seed=1, draws=2000)
    np.testing.assert_array_equal(ours, same)
    # What layers have in common cancels in their difference.
    difference = ours[0, 0] + ours[1, 1] - 2 * ours[0, 1]
    assert difference < 0.5 * (ours[0, 0] + ours[1, 1])


def test_the_bootstrap_of_groups_without_samples_is_undefined():
    values, wrong = two_groups(np.random.default_rng(0), sizes=(1, 20))
    assert np.isnan(resampled_separabilities(values, wrong, seed=0)).all()


def test_deviations_are_those_of_fresh_samples():
    """Of skewed groups by their histograms, of Gaussian ones by their sizes."""
    generator = np.random.default_rng(2)
    sizes = (150, 400)
    found = {True: [], False: []}
    for skew in found:
        for _ in range(1500):
            values, wrong = two_groups(generator, sizes, skew=skew)
            found[skew].append(separabilities(values, wrong)[1])
    values, wrong = two_groups(generator, (15_000, 40_000))
    entropy = values[:, 1]
    counted = histograms({"wrong": entropy[wrong], "right": entropy[~wrong]})
    shares = counted["shares"]
    ours = deviation_by_shares(counted["edges"], shares["wrong"], shares["right"], sizes)
    assert ours == pytest.approx(np.std(found[True]), rel=0.1)
    by_sizes = deviation_by_sizes(np.mean(found[False]), sizes)
    assert by_sizes == pytest.approx(np.std(found[False]), rel=0.1)
    assert math.isnan(deviation_by_sizes(1.0, (1, 100)))
    assert math.isnan(deviation_by_shares([], [], [], sizes))
    assert math.isnan(deviation_by_shares([0.0, 1.0], [1.0], [1.0], sizes))


def test_an_interval_of_a_correlation_has_it_as_often_as_it_says():
    generator = np.random.default_rng(3)
    true, inside = 0.8, 0
    for _ in range(1000):
        x, noise = generator.normal(size=(2, 17))
        y = true * x + math.sqrt(1 - true**2) * noise
        low, high = correlation_interval(np.corrcoef(x, y)[0, 1], 17)
        inside += low < true < high
    assert inside / 1000 == pytest.approx(0.95, abs=0.02)
    assert all(map(math.isnan, correlation_interval(0.9, 3)))
    assert all(map(math.isnan, correlation_interval(1.0, 9)))


# An order of layers


@pytest.mark.parametrize(
    ("levels", "count"),
    [
        ([0.1, 0.5, 1.0], 0),
        ([0.1, 0.55, 0.5], 0),  # lower, within noise
        ([0.1, 0.8, 0.4], 1),  # lower by more
        ([1.0, 0.9, 0.8, 0.7, 0.6], 3),  # a slow fall: each step is within noise, all are not
    ],
)
def test_an_order_is_broken_where_intervals_say_so(levels, count):
    deviation = 0.08
    assert falls(levels, np.eye(len(levels)) * deviation**2 / 2) == count


def network(levels, covariance=None, **more):
    """A stored part of a classifier with these separabilities of layers."""
    series = {
        "epochs": [1, 2, 3, 4],
        "accuracy": [0.5, 0.8, 0.9, 0.98],
        "separability": [0.1, 0.5, 0.6, 0.9],
        "separability_by_layer": levels,
    }
    if covariance is not None:
        series["separability_covariance"] = np.asarray(covariance).tolist()
    numbers = {
        "accuracy": 0.98,
        "entropy_gap": 1.0,
        "entropy_gap_last_hidden": 1.0,
        "separability_rise": None if None in levels else levels[-1] - levels[0],
        "correlation": 0.99,
        "r_squared_if_positive": 0.98,
        "auroc_entropy": 0.9,
        "auroc_max_softmax": 0.8,
    }
    return {"label": "", "seed": 0, "metrics": numbers | more, "series": series}


def judged(*parts, name="mnist-lif", metric="layers_fallen"):
    experiment = get(name)
    config = store.configuration(experiment, "paper")
    record = {"experiment": name, "scale": "paper", "config": config, "parts": list(parts)}
    complete = experiment.read(record)
    claim = next(each for each in experiment.claims if each.metric == metric and not each.ours)
    return words.judged(claim, complete)


def test_an_order_of_layers_holds_within_noise_and_fails_beyond_it():
    small = np.eye(3) * 0.03**2
    assert judged(network([0.1, 0.62, 0.60], small)).verdict == HOLDS
    assert judged(network([0.1, 0.95, 0.60], small)).verdict == FAILS
    # The same difference, where layers err together: it is beyond the noise.
    together = 0.03**2 * (0.01 * np.eye(3) + 0.99)
    assert judged(network([0.1, 0.62, 0.60], together)).verdict == FAILS


def test_without_a_bootstrap_noise_is_estimated_and_said_to_be():
    """Twenty wrong samples in a thousand are few: a fall of 0.2 is nothing that they tell."""
    row = judged(network([0.1, 0.8, 0.6]))
    assert row.verdict == HOLDS
    assert row.rests == "one seed, noise estimated"
    assert judged(network([0.1, 1.9, 0.6])).verdict == FAILS
    assert judged(network([0.1, 0.8, 0.6], np.eye(3) * 1e-4)).rests == "one seed"


def test_a_rise_is_one_beyond_the_noise():
    small = np.eye(3) * 0.03**2
    for top, verdict in ((0.6, HOLDS), (0.15, UNDECIDED), (0.05, UNDECIDED), (-0.4, FAILS)):
        row = judged(network([0.1, 0.3, top], small), metric="separability_rise")
        assert row.verdict == verdict
        assert "+-" in row.ours


def test_layers_without_separability_are_left_out_of_an_order():
    part = network([0.1, None, 0.6], np.diag([1e-4, np.nan, 1e-4]))
    assert judged(part).verdict == HOLDS
    nothing = network([None, None, 0.6], np.diag([np.nan, np.nan, 1e-4]))
    assert judged(nothing).verdict == FAILS


def test_r_squared_may_stay_behind_what_is_printed_by_what_seeds_differ_by():
    """The constant is that of the stored results."""
    squares = []
    for name in ("mnist-lif", "shared-mnist"):
        parts = [each for each in load(RESULTS, name)["parts"] if "printed" not in each["label"]]
        found = [part["metrics"]["r_squared"] for part in parts]
        squares.append(statistics.variance(found))
    spread = math.sqrt(statistics.fmean(squares))
    assert spread == pytest.approx(classification._R_SQUARED_SPREAD, abs=0.02)


def test_drops_have_the_noise_of_both_networks():
    record = read(RESULTS, get("correlation-cifar10"))
    series, found = record["parts"][0]["series"], record["parts"][0]["metrics"]
    deviations = []
    for each in series.values():
        histogram = each["last_two"]["output"]
        wrong = round(1e4 * (1 - each["accuracy"][-1]))
        shares = histogram["shares"]
        sizes = wrong, 10_000 - wrong
        deviations.append(
            deviation_by_shares(histogram["edges"], shares["wrong"], shares["right"], sizes)
        )
    noise = 1.96 * math.hypot(*deviations)
    assert found["separability_drop_noise"] == pytest.approx(noise, rel=1e-3)
    pair = [np.array(each["accuracy"]) for each in series.values()]
    error = (pair[0] - pair[1]).std(ddof=1) / math.sqrt(len(pair[0]))
    assert found["accuracy_drop_on_the_way_noise"] == pytest.approx(1.96 * error, rel=1e-3)


def test_separabilities_of_strange_inputs_have_noise():
    record = load(RESULTS, "ood-notmnist")
    found = out_of_distribution.derived(record["parts"][0], {})
    pairs, indicators = out_of_distribution.PAIRS, out_of_distribution.INDICATORS
    assert len(found) == len(pairs) * len(indicators)
    # Few errors decide how well a pair with errors in it is known.
    assert (
        found["separability_foreign_right_entropy_noise"]
        < 0.05
        < found["separability_foreign_wrong_entropy_noise"]
    )


# Noise in verdicts


@pytest.mark.parametrize(
    ("noise", "value", "spread", "agrees"),
    [
        ("", 0.1, 5.0, True),
        ("", -0.1, 5.0, False),
        ("beyond", 0.1, 5.0, True),
        ("beyond", -0.1, 0.2, None),
        ("beyond", -0.1, 0.05, False),
        ("beyond", -0.1, None, None),
        ("around", 0.1, 0.2, None),
        ("around", 0.3, 0.2, True),
        ("around", -0.1, 0.2, None),
        ("around", -0.3, 0.2, False),
        ("around", 0.3, float("nan"), None),
        ("around", None, 0.2, False),
    ],
)
def test_noise_leaves_open_what_is_close_to_a_bound(noise, value, spread, agrees):
    assert Claim(says="", metric="x", least=0.0, noise=noise).agrees(value, spread) is agrees


def test_between_two_bounds_the_nearer_one_counts():
    claim = Claim(says="", metric="x", least=0.0, most=1.0, noise="around")
    assert [claim.agrees(value, 0.2) for value in (-0.5, 0.1, 0.5, 0.9, 1.5)] == [
        *(False, None, True, None, False)
    ]


@pytest.mark.parametrize(
    ("values", "verdict", "most"),
    [
        ([1.0, 1.0, 1.0], HOLDS, HOLDS),
        ([1.0, 1.0, 0.0], PARTLY, HOLDS),
        ([1.0, 0.0, 0.0], UNDECIDED, UNDECIDED),
        ([0.0, 0.0, 0.0], UNDECIDED, UNDECIDED),
        ([0.0, -1.0, -1.0], FAILS, FAILS),
        ([0.0, 0.0, -1.0], UNDECIDED, UNDECIDED),
        ([1.0, 1.0, -1.0], PARTLY, HOLDS),
    ],
)
def test_parts_that_are_left_open_count_as_they_may_turn_out(values, verdict, most):
    parts = [
        {"label": "", "seed": i, "metrics": {"x": value, "x_noise": 0.5}}
        for i, value in enumerate(values)
    ]
    record = {"scale": "paper", "config": [], "parts": parts}
    claim = Claim(says="", metric="x", least=0.0, noise="around")
    assert claim.verdict(record) == verdict
    assert replace(claim, majority=True).verdict(record) == most
    assert words.judged(claim, record).ours.endswith("+- 0.5")


def test_the_noise_of_a_difference_is_that_of_both():
    part = {"label": "", "metrics": {"a": 1.0, "a_noise": 0.3, "b": 0.2, "b_noise": 0.4, "c": 0.1}}
    record = {"scale": "paper", "parts": [part]}
    claim = Claim(says="", metric="a", minus="b", least=0.0, noise="around")
    ((value, noise),) = claim.numbers(record)
    assert (value, noise) == (pytest.approx(0.8), pytest.approx(0.5))
    largest = replace(claim, minus=("b", "c"))
    assert largest.numbers(record)[0].noise == pytest.approx(0.5)
    unknown = replace(claim, minus="c")
    assert unknown.verdict(record) == UNDECIDED
    with pytest.raises(ValueError, match="beyond or around"):
        replace(claim, noise="sometimes")


def test_what_is_within_noise_does_not_count(tmp_path):
    def measure(part, _):
        return Measured({"clear": 1.0, "x": 0.1, "x_noise": 1.0}, {})

    claims = (
        Claim(says="It is clear.", metric="clear", least=0.0),
        Claim(says="It is not.", metric="x", least=0.0, noise="around"),
    )
    record = reproduce(trial(measure), "quick", workshop(tmp_path), results=tmp_path)
    assert trial(measure, claims).verdict(record) == "holds (1 of 2 claims hold, 1 within noise)"
    assert trial(measure, claims[1:]).verdict(record) == UNDECIDED
    assert page._section(trial(measure, claims), record).plain_verdict == "holds so far"


# Results of other experiments


def test_a_number_is_compared_with_the_average_of_other_results():
    plain = [{"label": "", "seed": i, "metrics": {"theirs": 0.9 + 0.02 * i}} for i in range(3)]
    beside = {"other": {"scale": "paper", "config": [], "parts": plain}}
    parts = [{"label": "", "seed": 0, "metrics": {"ours": 0.9}}]
    record = {"scale": "paper", "config": [], "parts": parts, "beside": beside}
    claim = Claim(says="", metric="ours", minus=Elsewhere("other", "theirs"), least=-0.02)
    assert claim.values(record) == [pytest.approx(-0.02)]
    assert claim.needs == ("other",)
    assert words.judged(replace(claim, least=-0.1), record).rests == "one seed"
    # Networks that were trained for less are no measure, unless they are said to be one.
    shorter = {**record, "scale": "quick"}
    row = words.judged(claim, shorter)
    assert (row.verdict, row.command) == (
        "not tested",
        "python -m reproduction run other --scale quick",
    )
    anyway = replace(claim, minus=Elsewhere("other", "theirs", any_scale=True), least=-0.1)
    assert words.judged(anyway, shorter).verdict == HOLDS
    assert words.judged(claim, {**record, "beside": {}}).verdict == "not tested"


def test_comparable_accuracy_is_that_of_the_plain_network_that_is_stored():
    """On MNIST there is one; on CIFAR-10 there is none, and it is said how to get it."""
    record = read(RESULTS, get("mnist-relu"))
    claim = next(each for each in get("mnist-relu").claims if each.metric == "accuracy")
    every = [part["metrics"] for part in load(RESULTS, "fgsm")["parts"]]
    plain = [found["accuracy_ann"] for found in every if "accuracy_ann" in found]
    own = next(part for part in record["parts"] if part["label"] == "full")
    expected = own["metrics"]["accuracy"] - statistics.fmean(plain)
    assert claim.values(record)[0] == pytest.approx(expected)
    experiment = get("cifar10-relu")
    record = read(RESULTS, experiment)
    claim = next(each for each in experiment.claims if each.metric == "accuracy")
    row = words.judged(claim, record)
    if any(part["label"] == "plain" for part in record["parts"]):
        assert row.verdict != "not tested"
    else:
        assert row.verdict == "not tested"
        assert row.command.endswith("run cifar10-relu --scale quick --only plain")


def test_a_claim_may_be_about_the_results_of_another_experiment():
    record = read(RESULTS, get("shared-ood"))
    claim = next(each for each in get("shared-ood").claims if each.of == "fgsm")
    parts = load(RESULTS, "fgsm")["parts"]
    stored = [part["metrics"][claim.metric] for part in parts if part["label"] in claim.labels]
    assert claim.values(record) == stored
    assert claim.values({**record, "beside": {}}) == []


def test_correlations_are_judged_by_which_data_set_loses_more():
    experiment = get("correlation")
    record = read(RESULTS, experiment)
    claim = next(each for each in experiment.claims if isinstance(each.minus, Elsewhere))
    there = load(RESULTS, "correlation-cifar10")["parts"]
    off = statistics.fmean(part["metrics"][claim.metric] for part in there)
    own = [p["metrics"][claim.metric] for p in record["parts"] if p["label"] == claim.label]
    assert claim.values(record) == [pytest.approx(value - off) for value in own]
    assert "one seed" in words.judged(claim, record).rests
    assert "quick of correlation-cifar10" in words.judged(claim, record).rests


# What verdicts rest on, and what earlier results lack


def test_verdicts_say_that_they_rest_on_one_seed_or_on_little(tmp_path):
    one = trial(quick=(trial().parts["quick"][0],))
    record = reproduce(one, "quick", workshop(tmp_path), results=tmp_path)
    assert words.judged(one.claims[0], record).rests == "one seed, quick"
    assert page._section(one, record).verdict.endswith("; one seed, quick")
    full = reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path)
    assert words.judged(trial().claims[0], full).rests == ""
    # Splits of a set are as good as seeds.
    split = {**record, "scale": "paper", "config": [{"label": "small", "settings": {"splits": 5}}]}
    assert words.judged(one.claims[0], split).rests == ""


def test_results_of_an_earlier_revision_are_shown_with_what_they_lack(tmp_path):
    reproduce(trial(), "paper", workshop(tmp_path), results=tmp_path)
    later = replace(trial(), revision=1, earlier={0: "they have no intervals"})
    section = page._section(later, load(tmp_path, "trial"))
    assert section.verdict.startswith("holds partly")
    (unfinished,) = section.unfinished
    assert unfinished.what == "they have no intervals"
    assert unfinished.command == "python -m reproduction run trial --scale paper"
    # Measured again in part, the rest stays.
    elsewhere = replace(workshop(tmp_path), folder=tmp_path / "elsewhere")
    record = reproduce(later, "paper", elsewhere, results=tmp_path, only=["small"])
    assert (record["revision"], len(record["parts"])) == (1, 6)
    assert page._section(later, record).unfinished == []
    gone = replace(trial(), revision=2, earlier={1: "nothing"})
    stale = replace(trial(), revision=2)
    assert page._section(gone, record).record is not None
    assert page._section(stale, record).record is None


def test_a_network_has_the_noise_of_its_layers(tmp_path):
    """Measured as experiments do, of entropies that are given."""
    generator = np.random.default_rng(0)
    values, wrong = two_groups(generator)
    covariance = resampled_separabilities(values, wrong, seed=0)
    series = {"separability_by_layer": separabilities(values, wrong), "accuracy": [0.9]}
    measured = classifiers.Errors.of({**series, "separability_covariance": covariance}, {})
    few = {**series, "tested": 550, "accuracy": [400 / 550]}
    guessed = classifiers.Errors.of(few, {"samples": 550})
    assert not measured.estimated
    assert guessed.estimated
    ratio = np.sqrt(guessed.covariance.diagonal() / measured.covariance.diagonal())
    assert (abs(np.log(ratio)) < 0.3).all()
    assert guessed.deviation() == pytest.approx(np.sqrt(guessed.covariance.diagonal()).mean())
    assert measured.deviation() == pytest.approx(math.sqrt(measured.covariance.mean()))
