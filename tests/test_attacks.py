"""Attacks on classifiers: what they may do, what they leave alone, and that they work."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import covary
from covary import attacks
from covary.attacks import fgsm, input_gradient, pgd, square
from covary.moments import Moments
from tests import digits

EPSILON = 0.1
GRADIENT = {"fgsm": fgsm, "pgd": pgd}
ALL = GRADIENT | {"square": partial(square, queries=60)}
every = pytest.mark.parametrize("attack", ALL.values(), ids=ALL)
clipping = pytest.mark.parametrize("bounds", [None, (0.0, 1.0)], ids=["free", "clipped"])


@pytest.fixture(scope="module")
def heaviside() -> nn.Sequential:
    # Diagonal, which is quick: the attacks ask for means.
    return covary.with_covariance(digits.trained("heaviside", 0.2, epochs=12), "diagonal")


@pytest.fixture(scope="module")
def samples() -> tuple[Tensor, Tensor]:
    """(60, 1, 8, 8) in [0, 1], and their labels."""
    _, _, x, y = digits.data()
    return x[:60].view(-1, 1, 8, 8), y[:60]


@pytest.fixture
def image_net(heaviside) -> nn.Sequential:
    return nn.Sequential(covary.nn.Flatten(), heaviside)


def accuracy(net, x, y) -> float:
    with torch.no_grad():
        out = net(x)
    mean = out.mean if isinstance(out, Moments) else out
    return (mean.argmax(1) == y).float().mean().item()


class Logits(nn.Module):
    """The mean of a moment network, for those who know nothing of Moments."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean


def plain_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 10))


@pytest.mark.parametrize("kind", ["moments", "plain"])
@clipping
def test_agrees_with_art(kind, bounds, image_net, samples):
    evasion = pytest.importorskip("art.attacks.evasion")
    from art.estimators.classification import PyTorchClassifier

    x, y = samples
    net = image_net if kind == "moments" else plain_net()
    classifier = PyTorchClassifier(
        Logits(net) if kind == "moments" else net,
        loss=nn.CrossEntropyLoss(),
        input_shape=(1, 8, 8),
        nb_classes=10,
        clip_values=bounds,
        device_type="cpu",
    )
    theirs = evasion.FastGradientMethod(classifier, eps=EPSILON).generate(x.numpy(), y.numpy())
    ours = fgsm(net, x, y, EPSILON, bounds=bounds)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-6)
    assert np.abs(theirs - x.numpy()).max() > 0.09
    theirs = evasion.ProjectedGradientDescentPyTorch(
        classifier, eps=EPSILON, eps_step=0.03, max_iter=8, verbose=False
    ).generate(x.numpy(), y.numpy())
    ours = pgd(net, x, y, EPSILON, steps=8, step_size=0.03, bounds=bounds, random_start=False)
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-6)


@every
@clipping
def test_stays_within_epsilon_and_bounds(attack, bounds, image_net, samples):
    x, y = samples
    before = x.clone()
    attacked = attack(image_net, x, y, EPSILON, bounds=bounds)
    assert torch.equal(x, before)
    assert attacked.shape == x.shape
    assert attacked.dtype == x.dtype
    assert not attacked.requires_grad
    assert (attacked - x).abs().max() <= EPSILON + 1e-6
    if bounds:
        assert attacked.min() >= 0
        assert attacked.max() <= 1
    else:
        assert attacked.min() < 0
        assert attacked.max() > 1


@every
def test_lowers_accuracy_and_more_with_more_room(attack, image_net, samples):
    x, y = samples
    found = [
        accuracy(image_net, attack(image_net, x, y, epsilon, bounds=(0, 1)), y)
        for epsilon in (0.0, 0.1, 0.3)
    ]
    assert found[0] == accuracy(image_net, x, y) > 0.8
    assert found[0] > found[1] > found[2]


def test_pgd_is_stronger_than_one_step(image_net, samples):
    x, y = samples
    one, many = (attack(image_net, x, y, EPSILON, bounds=(0, 1)) for attack in (fgsm, pgd))
    assert accuracy(image_net, many, y) < accuracy(image_net, one, y)


def test_the_gradient_is_that_of_the_mean(heaviside, samples):
    x, y = samples[0].flatten(1), samples[1]
    wanted = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(heaviside(wanted).mean, y), wanted)
    found = input_gradient(heaviside, x, y, batch_size=7)
    torch.testing.assert_close(found, expected * len(x), rtol=1e-4, atol=1e-6)
    with covary.supervise_covariance():
        assert not torch.allclose(input_gradient(heaviside, x, y), found, rtol=1e-2)


@every
def test_moments_logits_and_functions_are_attacked_alike(attack, image_net, samples):
    x, y = samples
    made = []
    for net in (image_net, Logits(image_net), lambda x: image_net(x).mean):
        torch.manual_seed(0)
        made.append(attack(net, x, y, EPSILON))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@every
def test_leaves_the_network_as_it_was(attack, samples):
    x, y = samples
    net = nn.Sequential(
        covary.nn.Flatten(),
        covary.mlp([64, 12, 10], activation="relu", batch_norm=True, dropout=0.5),
    ).train()
    net[1][-1].eval()
    modes = [layer.training for layer in net.modules()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net[1][-1].weight.grad = marker = torch.ones_like(net[1][-1].weight)
    first = attack(net, x, y, EPSILON, generator=seeded()) if attack is not fgsm else None
    attack(net, x, y, EPSILON)
    assert [layer.training for layer in net.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    gradients = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    assert len(gradients) == 1
    assert gradients[0] is marker
    assert (marker == 1).all()
    if first is not None:  # dropout would make a difference
        assert torch.equal(first, attack(net.eval(), x, y, EPSILON, generator=seeded()))


def test_the_mode_comes_back_after_an_error(samples):
    x, y = samples
    net = plain_net().train()
    with pytest.raises(ValueError, match="has 10 classes"):
        fgsm(net, x, y + 5, EPSILON)
    assert net.training


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every
def test_works_where_gradients_are_off(attack, mode, image_net, samples):
    x, y = samples
    torch.manual_seed(0)
    expected = attack(image_net, x, y, EPSILON)
    torch.manual_seed(0)
    with mode():
        found = attack(image_net, x.clone(), y.clone(), EPSILON)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("attack", [pgd, ALL["square"]], ids=["pgd", "square"])
def test_a_generator_decides_what_is_random(attack, image_net, samples):
    x, y = samples
    one, same, other = (
        attack(image_net, x, y, EPSILON, generator=seeded(seed)) for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@every
def test_nothing_moves_without_room(attack, image_net, samples):
    x, y = samples
    assert torch.equal(attack(image_net, x, y, 0.0), x)
    some = torch.zeros(8, 8)
    some[2:4] = 0.2
    moved = (attack(image_net, x, y, some) - x).abs()
    assert moved[:, :, 2:4].max() == pytest.approx(0.2, abs=1e-6)
    assert moved[:, :, :2].max() == 0
    assert attack(image_net, x[:0], y[:0], 0.1).shape == (0, 1, 8, 8)


def test_batches_are_shown_and_make_no_difference(image_net, samples):
    x, y = samples
    shown = []

    def progress(batches, name):
        for batch in batches:
            shown.append((name, len(batch)))
            yield batch

    some = pgd(image_net, x, y, EPSILON, random_start=False, batch_size=25, progress=progress)
    assert shown == [("pgd", 25), ("pgd", 25), ("pgd", 10)]
    whole = pgd(image_net, x, y, EPSILON, random_start=False)
    torch.testing.assert_close(some, whole, atol=1e-6, rtol=0)


def test_steps_hide_the_gradient_and_nothing_else(image_net, samples):
    """The paper's defence: no slope to follow, but the same weakness."""
    x, y = samples
    defended = covary.with_noise(image_net, [0.0, 0.0])
    clean = accuracy(defended, x, y)
    assert clean > 0.8
    assert (input_gradient(defended, x, y) == 0).all()
    assert torch.equal(fgsm(defended, x, y, 0.3), x)
    assert torch.equal(pgd(defended, x, y, 0.3, random_start=False), x)
    for transferred in (fgsm(image_net, x, y, 0.3), pgd(image_net, x, y, 0.3)):
        assert accuracy(defended, transferred, y) < clean - 0.3
    searched = square(defended, x, y, 0.3, queries=200, generator=seeded())
    assert accuracy(defended, searched, y) < clean - 0.3


def test_square_goes_on_until_it_is_confident(image_net, samples):
    x, y = samples

    def margins(confidence):
        attacked = square(
            image_net, x, y, 0.3, queries=60, confidence=confidence, generator=seeded()
        )
        with torch.no_grad():
            out = image_net(attacked).mean
        true = out.gather(1, y[:, None]).squeeze(1)
        return true - out.scatter(1, y[:, None], -torch.inf).max(1).values

    barely, clearly, most = map(margins, (0.0, 1.0, torch.inf))
    assert most.mean() < clearly.mean() < barely.mean()
    assert (barely >= -1.0).sum() > (clearly >= -1.0).sum()


def test_square_leaves_alone_what_is_wrong(image_net, samples):
    x, y = samples
    wrong = (y + 1) % 10
    with torch.no_grad():
        fooled = image_net(x).mean.argmax(1) != wrong
    attacked = square(image_net, x, wrong, EPSILON, queries=5)
    assert fooled.any()
    assert torch.equal(attacked[fooled], x[fooled])


def test_square_asks_as_often_as_it_may(samples):
    x, y = samples
    asked = []

    def never_wrong(some: Tensor) -> Tensor:
        asked.append(len(some))
        return F.one_hot(y[: len(some)], 10).float()

    attacked = square(never_wrong, x, y, EPSILON, queries=12)
    assert asked == [60] * 13  # and once about the inputs themselves
    # A corner of the room, in columns: nothing was better than where it began.
    torch.testing.assert_close((attacked - x).abs(), torch.full_like(x, EPSILON))
    assert (((attacked - x) > 0).float().std(dim=2) == 0).all()


def test_square_takes_inputs_that_are_no_images(heaviside, samples):
    x, y = samples[0].flatten(1), samples[1]
    quiet = covary.with_noise(heaviside, [0.0, 0.0])
    attacked = square(quiet, x, y, 0.3, queries=200, bounds=(0, 1), generator=seeded())
    assert accuracy(quiet, attacked, y) < accuracy(quiet, x, y) - 0.2


X, Y = torch.rand(6, 4), torch.arange(6) % 3


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"epsilon": -0.1}, ValueError, "finite and >= 0, got -0.1"),
        ({"epsilon": float("nan")}, ValueError, "finite and >= 0, got nan"),
        ({"epsilon": float("inf")}, ValueError, "finite and >= 0"),
        ({"epsilon": torch.ones(3)}, ValueError, r"shape \(4,\); got \(3,\)"),
        ({"bounds": (0.5, 1)}, ValueError, "outside of the bounds"),
        ({"bounds": (1, 0)}, ValueError, "low <= high"),
        ({"bounds": (float("nan"), 1)}, ValueError, "low <= high"),
        ({"y": F.one_hot(Y)}, ValueError, "argmax"),
        ({"y": Y[:3]}, ValueError, r"shape \(6,\); got \(3,\)"),
        ({"y": Y.float()}, TypeError, "integers, got torch.float32"),
        ({"y": Y - 1}, ValueError, "count from 0"),
        ({"y": Y + 3}, ValueError, "3 classes"),
        ({"x": (X * 255).byte()}, TypeError, r"x.float\(\)"),
        ({"x": X / 0}, ValueError, "finite inputs"),
        ({"x": X[0], "y": Y[0]}, ValueError, "a batch of inputs"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"net": lambda x: x.sum()}, ValueError, r"\(batch, classes\)"),
        ({"net": lambda _: "dog"}, TypeError, "gives str"),
    ],
)
@every
def test_errors_name_what_is_wrong(attack, change, error, words):
    net = covary.mlp([4, 5, 3], activation="relu")
    given = {"net": net, "x": X, "y": Y, "epsilon": 0.1} | change
    with pytest.raises(error, match=words):
        attack(**given)


@pytest.mark.parametrize(
    ("attack", "change", "words"),
    [
        (pgd, {"steps": 0}, "steps"),
        (pgd, {"step_size": -1.0}, "step_size"),
        (square, {"queries": 0}, "queries"),
        (square, {"share": 0.0}, "share"),
        (square, {"confidence": float("nan")}, "confidence"),
        (fgsm, {"net": lambda x: x.detach()}, "square, which needs none"),
    ],
)
def test_errors_of_each_attack(attack, change, words):
    net = covary.mlp([4, 5, 4], activation="relu")
    with pytest.raises(ValueError, match=words):
        attack(**{"net": net, "x": X, "y": Y, "epsilon": 0.1} | change)


def test_the_public_names_are_there():
    assert set(ALL) <= set(attacks.__all__)
