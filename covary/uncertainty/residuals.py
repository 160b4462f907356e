"""Residuals of held-out rows: how large errors are, where, and of what distribution.

The covariance that emerges within a network is one thing that an error bar is made of. Residuals
are another: noise of the data, which differs from place to place. A ``ResidualModel`` takes both.
In units of its targets' standard deviation, the squared scale of a prediction is

    a * emergent + b * spread + exp(h(inputs, mean, log emergent))

with a network h; a, b and h have the highest likelihood of the residuals (docs/theory.md, eq. 49).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from covary.uncertainty.predictive import Floats, Predictive

# What a residual may be distributed as: with one scale, with heavy tails, with several modes.
FAMILIES = ("normal", "student", "mixture")
# The parts of a squared scale.
PARTS = ("emergent", "spread", "learned")
_COMPONENTS = 4  # of a mixture
_HIDDEN = 32  # units of each of the two hidden layers of h
_FOLDS = 5  # by which training is stopped
_FINAL = 2  # networks that are trained on all rows; their distributions are averaged
_MOST_ROWS = 20_000  # that are looked at: more say little more
_FEW_ROWS = 40  # fewer say nothing of places: h is a constant then
LEAST_ROWS = 10  # fewer say the size of errors, and nothing else
_BATCH = 256
_MOST_STEPS, _EVERY, _PATIENCE, _WARM_UP = 600, 10, 150, 30
_LEARNING_RATE, _WEIGHT_DECAY = 1e-2, 0.1
_LEAST_DF = 2.05
# Members that differ by so much of the squared errors are thrown away by a share below this.
_GOOD_PART, _NEXT_TO_NOTHING = 0.1, 0.01
_LEAST = 1e-6  # of squared scales, in mean squared residuals


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is known of n rows before their targets: all (n,), but inputs (n, d).

    Attributes:
        inputs: standardised.
        mean: of the networks.
        emergent: variances that emerge within the networks, on average.
        spread: variance of the networks' means, which estimates what another network would say.
        known: variance that is there whatever residuals say, such as that of errors of inputs.
    """

    inputs: Tensor
    mean: Tensor
    emergent: Tensor
    spread: Tensor
    known: Tensor

    def __getitem__(self, rows: Tensor) -> Evidence:
        return Evidence(*(getattr(self, name)[rows] for name in vars(self)))

    def __len__(self) -> int:
        return len(self.mean)


class Scales(NamedTuple):
    """Components (m, n, k) of the distributions of residuals, by each of m networks.

    Attributes:
        logits: logarithms of their weights, which add up to 1.
        shifts: centres, around 0.
        squared: squared scales.
        df: (m, 1, 1) degrees of freedom; infinite for normal distributions.
        parts: (m, n) each, the squared scale before it is given to components, part by part.
    """

    logits: Tensor
    shifts: Tensor
    squared: Tensor
    df: Tensor
    parts: dict[str, Tensor]

    @property
    def variance(self) -> Tensor:
        """(n,) of the distribution that is the average of all networks', whose mean is 0."""
        return self.variances.mean(0)

    @property
    def variances(self) -> Tensor:
        """(m, n) of each network's, whose means are 0."""
        spread = torch.where(torch.isinf(self.df), 1.0, self.df / (self.df - 2))
        weights = self.logits.exp().double()
        every = weights * (self.squared.double() * spread + self.shifts.double().square())
        return every.sum(-1) / weights.sum(-1)

    def log_density(self, residual: Tensor) -> Tensor:
        """(m, n) of residuals (n,) or (m, n)."""
        square = (residual[..., None] - self.shifts).square() / self.squared
        if torch.isinf(self.df).all():
            each = -0.5 * (square + math.log(2 * math.pi))
        else:
            df = self.df
            peak = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (math.pi * df).log()
            each = peak - (df + 1) / 2 * torch.log1p(square / df)
        return (self.logits + each - 0.5 * self.squared.log()).logsumexp(-1)


class ResidualModel(nn.Module):
    """Evidence -> the distribution of the residuals of one target. Made by ``fit_residuals``.

    Attributes:
        family: ``"normal"``, ``"student"`` or ``"mixture"``.
        loss: average negative log-likelihood of held-out residuals.
    """

    center: Tensor  # (f,) of the features
    width: Tensor  # (f,)
    low: Tensor  # (f,) features are clamped to what was seen
    high: Tensor
    keep: Tensor  # (m, 1, 3) which parts each network uses
    first: nn.Parameter  # (m, f, hidden) weights of h, then their biases
    first_bias: nn.Parameter
    second: nn.Parameter
    second_bias: nn.Parameter
    last: nn.Parameter
    last_bias: nn.Parameter
    globals: nn.Parameter  # (m, 1, 3) logarithms of a and b, and the degrees of freedom
    levels: Tensor  # (3,) averages of emergent variances, spreads and squared residuals

    def __init__(self, family: str, networks: int, inputs: int) -> None:
        super().__init__()
        features = inputs + 2
        self.family, self.loss = family, math.nan
        for name in ("center", "width", "low", "high"):
            self.register_buffer(name, torch.zeros(features))
        self.register_buffer("levels", torch.ones(3))
        outputs = 1 + 3 * _COMPONENTS if family == "mixture" else 1
        shapes = {
            "first": (features, _HIDDEN), "first_bias": (1, _HIDDEN),
            "second": (_HIDDEN, _HIDDEN), "second_bias": (1, _HIDDEN),
            "last": (_HIDDEN, outputs), "last_bias": (1, outputs),
            "globals": (1, 3),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(networks, *shape)))
        # Which parts a network may use; all of them, but for measuring what each is worth.
        self.register_buffer("keep", torch.ones(networks, 1, len(PARTS)))

    def features(self, known: Evidence) -> Tensor:
        """(n, f) inputs of h, within what was seen when it was fitted.

        Not the spread: of held-out rows fewer networks give it than of new ones. It is the same on
        average, but its logarithm is not.
        """
        emergent = (known.emergent / self.levels[0] + 1e-3).log()
        columns = [known.inputs, known.mean[:, None], emergent[:, None]]
        raw = torch.cat(columns, 1).to(self.center)
        return (torch.minimum(torch.maximum(raw, self.low), self.high) - self.center) / self.width

    def forward(self, known: Evidence) -> Scales:
        """The distributions of the residuals, by each of its networks."""
        every = self.features(known).expand(len(self.globals), -1, -1)
        return self.scales(every, known.emergent, known.spread, known.known)

    def scales(self, features: Tensor, emergent: Tensor, spread: Tensor, known: Tensor) -> Scales:
        """The same from features (m, n, f) and variances (n,) or (m, n)."""
        emergent, spread, known = (each.to(self.levels) for each in (emergent, spread, known))
        keep = self.keep
        # Without the emergent variance, h does not see it either.
        ones = keep.new_ones(len(keep), 1, features.shape[-1] - 1)
        features = features * torch.cat([ones, keep[..., :1]], -1)
        hidden = F.silu(torch.baddbmm(self.first_bias, features, self.first))
        hidden = F.silu(torch.baddbmm(self.second_bias, hidden, self.second))
        out = torch.baddbmm(self.last_bias, hidden * keep[..., 2:], self.last)
        a, b = (self.globals[..., 0] - 3).exp(), (self.globals[..., 1] - 1).exp()
        unit = self.levels[2]
        parts = {
            "emergent": keep[..., 0] * a * emergent * (unit / self.levels[0]),
            "spread": keep[..., 1] * b * spread,
            "learned": out[..., 0].exp() * unit,
        }
        total = (parts["emergent"] + parts["spread"] + parts["learned"] + _LEAST * unit)[..., None]
        df = torch.full_like(self.globals[..., :1], math.inf)
        if self.family != "normal":
            df = _LEAST_DF + F.softplus(3 + 3 * self.globals[..., 2:])
        # A Student's t of squared scale 1 has the variance df / (df - 2); known is a variance.
        added = known[..., None] * torch.where(torch.isinf(df), 1.0, 1 - 2 / df)
        if self.family != "mixture":
            zero = torch.zeros_like(total)
            return Scales(zero, zero, total + added, df, parts)
        logits, shifts, widths = out[..., 1:].chunk(3, -1)
        logits = logits.log_softmax(-1)
        shifts = shifts + torch.linspace(-0.5, 0.5, _COMPONENTS).to(shifts)
        shifts = (shifts - (logits.exp() * shifts).sum(-1, keepdim=True)) * total.sqrt()
        squared = total * (2 * widths).exp() / 2 + added
        return Scales(logits, shifts, squared, df, parts)


class VariancePart(NamedTuple):
    """What a part of the variance is worth.

    Attributes:
        share: of the variance, on average over held-out rows.
        gain: by how many nats a held-out row is likelier with it than without.
    """

    share: float
    gain: float


class FittedResiduals(NamedTuple):
    """A model of residuals, and what held-out rows say of it.

    Attributes:
        model: fitted to all rows.
        levels: (n,) of each row, the probability of a residual at most as large as its own, by
            networks that were fitted without the row (of fewer than 10 rows, with it); in order of
            the rows that were looked at.
        losses: average negative log-likelihood of held-out residuals, by family.
        without: the same of the model's family without each of the ``PARTS``.
        shares: of each part in the squared scale, on average over rows.
    """

    model: ResidualModel
    levels: Tensor
    losses: dict[str, float]
    without: dict[str, float]
    shares: dict[str, float]

    @property
    def worth(self) -> dict[str, VariancePart]:
        """What each part is worth; of fewer than 10 rows that is not known of any."""
        loss = self.model.loss
        return {name: VariancePart(self.shares[name], x - loss) for name, x in self.without.items()}

    @property
    def throws_spread_away(self) -> bool:
        """Whether members differ by a good part of the errors, and that counts next to nothing."""
        natural = float(self.model.levels[1] / self.model.levels[2])
        return natural > _GOOD_PART and self.shares["spread"] < _NEXT_TO_NOTHING


def fit_residuals(
    known: Evidence,
    residual: Tensor,
    *,
    parts: Sequence[str] = PARTS,
    families: Sequence[str] = FAMILIES,
    variances_count: float = 0.0,
    seed: int = 0,
) -> FittedResiduals:
    """The model under which residuals (n,) of held-out rows are most likely.

    Without ``"learned"`` among the ``parts`` there is a constant in its place.

    Training stops when residuals that are held out from it, one of five parts after another, become
    less likely; of the families the one with the likeliest is taken. How far variances are from
    squared residuals counts as well, ``variances_count`` times: a mixture can give a small weight
    to what is far from all that was seen, which costs its likelihood next to nothing and spoils its
    standard deviations. Of fewer than 40 rows the
    learned part is a constant, of fewer than 10 it is all there is.
    """
    random = np.random.default_rng(seed)
    if len(residual) > _MOST_ROWS:
        rows = torch.tensor(np.sort(random.permutation(len(residual))[:_MOST_ROWS]))
        known, residual = known[rows], residual[rows]
    if len(residual) < LEAST_ROWS:
        model = _prepared("normal", 1, known, residual).requires_grad_(False)
        model.keep.zero_()
        return FittedResiduals(model, _levels(model(known), residual)[0], {}, {}, {})
    folds = torch.tensor(random.permutation(len(residual)) % min(_FOLDS, len(residual)))
    every = torch.tensor([float(name in parts) for name in PARTS])
    if len(residual) < _FEW_ROWS:
        every[2] = 0.0
        families = [family for family in families if family != "mixture"] or ["normal"]
    found = {
        name: _trained(name, known, residual, folds, every[None], _FINAL, seed) for name in families
    }
    losses = {name: loss[0] for name, (_, loss) in found.items()}
    scores = {
        name: loss + variances_count * _error_of_variances(found[name][0], known, residual, folds)
        for name, loss in losses.items()
    }
    family = min(scores, key=scores.__getitem__)
    model = found[family][0]
    levels = _levels(model(known), residual)
    held_out = levels[_FINAL + folds, torch.arange(len(residual))]
    names = [name for name, is_there in zip(PARTS, every.tolist(), strict=True) if is_there]
    masks = torch.stack([every - F.one_hot(torch.tensor(PARTS.index(n)), 3) for n in names])
    _, without = _trained(family, known, residual, folds, masks, 0, seed)
    kept = _selected(model, slice(0, _FINAL))
    kept.loss = losses[family]
    # A target has one number of degrees of freedom.
    kept.globals[..., 2] = kept.globals[..., 2].mean()
    found_parts = {name: part.mean(0) for name, part in kept(known).parts.items()}
    total = torch.stack(list(found_parts.values())).sum(0)
    shares = {name: float((part / total).mean()) for name, part in found_parts.items()}
    return FittedResiduals(kept, held_out, losses, dict(zip(names, without, strict=True)), shares)


def _error_of_variances(
    model: ResidualModel, known: Evidence, residual: Tensor, folds: Tensor
) -> float:
    """How far variances of held-out rows are from their squared residuals, in nats: the negative
    log-likelihood of normal distributions with these variances, but for a constant."""
    with torch.no_grad():
        variance = model(known).variances[_FINAL + folds, torch.arange(len(residual))]
    return float(0.5 * (variance.log() + residual.square() / variance).mean())


def distributions(every: Sequence[Scales], correlation: np.ndarray) -> Predictive:
    """Of residuals of t targets, whose normal scores have this correlation (t, t)."""
    most = max(found.squared.shape[0] * found.squared.shape[2] for found in every)
    joined = [_components(found, most) for found in every]
    weights, shifts, scales = (np.stack(part, 1) for part in zip(*joined, strict=True))
    df = np.array([float(found.df.mean()) for found in every])
    return Predictive(weights, shifts, scales, df, correlation, False)


def _components(found: Scales, most: int) -> tuple[Floats, Floats, Floats]:
    """Weights, shifts and scales (n, most) of the m k components of all networks, and of as many
    more of weight 0 as other targets have."""
    m, n, k = found.squared.shape
    every = (found.logits.exp() / m, found.shifts, found.squared.sqrt())
    weights, shifts, scales = (
        each.expand(m, n, k).transpose(0, 1).reshape(n, m * k).double().numpy() for each in every
    )
    weights = weights / weights.sum(-1, keepdims=True)
    shifts = shifts - (weights * shifts).sum(-1, keepdims=True)  # 0 but for round-off
    more = (0, 0), (0, most - m * k)
    return np.pad(weights, more), np.pad(shifts, more, "edge"), np.pad(scales, more, "edge")


def correlation_of(levels: Tensor) -> Tensor:
    """(t, t) of the normal scores of levels (n, t)."""
    scores = torch.special.ndtri(levels.clamp(1e-6, 1 - 1e-6))
    n, t = scores.shape
    # As if t samples without correlation had been seen, too.
    matrix = (scores.mT @ scores + t * torch.eye(t)) / (n + t)
    size = matrix.diagonal().sqrt()
    found: Tensor = matrix / (size[:, None] * size)
    return found


def _prepared(family: str, networks: int, known: Evidence, residual: Tensor) -> ResidualModel:
    """A model that knows the scale of all it takes, before training."""
    model = ResidualModel(family, networks, known.inputs.shape[1])
    tiny = torch.finfo(torch.float32).tiny
    averages = [known.emergent.mean(), known.spread.mean(), residual.square().mean()]
    model.levels.copy_(torch.stack(averages).clamp(min=tiny))
    model.low.fill_(-math.inf)
    model.high.fill_(math.inf)
    model.width.fill_(1.0)
    seen = model.features(known)
    model.low.copy_(seen.min(0).values)
    model.high.copy_(seen.max(0).values)
    model.center.copy_(seen.mean(0))
    width = seen.std(0, correction=0)
    model.width.copy_(torch.where(width > 0, width, 1.0))
    return model


def _trained(
    family: str,
    known: Evidence,
    residual: Tensor,
    folds: Tensor,
    keeps: Tensor,
    final: int,
    seed: int,
) -> tuple[ResidualModel, list[float]]:
    """For each row of ``keeps`` (v, parts), networks fitted to all rows and without each fold.

    All are trained as one, the steps of each v as many as are best for its folds. Gives the model
    with v * (final + folds) networks, and the loss of each v on held-out rows.
    """
    parts, several = int(folds.max()) + 1, len(keeps)
    group = final + parts
    model = _prepared(family, several * group, known, residual)
    generator = torch.Generator().manual_seed(seed)

    def random(draw: Callable[..., Tensor], *shape: int) -> Tensor:
        """(v * group, *shape) the same for each v, and for a fold whatever ``final`` is."""
        every = draw(_FINAL + parts, *shape, generator=generator)
        return every[-group:].repeat(several, *[1] * len(shape))

    with torch.no_grad():
        for weight in (model.first, model.second):
            weight.copy_(random(torch.randn, *weight.shape[1:]) * weight.shape[1] ** -0.5)
        model.keep.copy_(keeps.repeat_interleave(group, 0)[:, None])
    taken = torch.ones(group, len(residual), dtype=torch.bool)
    taken[final:] = folds != torch.arange(parts)[:, None]
    taken = taken.repeat(several, 1)
    counts, held = taken.sum(1, keepdim=True), ~taken
    rows = torch.argsort(held, dim=1, stable=True)  # those it takes come first
    features, residual = model.features(known), residual.to(model.levels)
    variances = [each.to(model.levels) for each in (known.emergent, known.spread, known.known)]
    weights = [value for value in model.parameters() if value is not model.globals]
    groups: list[dict[str, Any]] = [
        {"params": weights},
        {"params": [model.globals], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups,
        lr=_LEARNING_RATE,
        weight_decay=_WEIGHT_DECAY,
        fused=True,
    )
    best = torch.full((several,), math.inf)
    waited = torch.zeros(several)
    kept = {name: value.detach().clone() for name, value in model.named_parameters()}
    for step in range(_MOST_STEPS + 1):
        if step % _EVERY == 0:
            with torch.no_grad():
                every = features.expand(len(model.keep), -1, -1)
                log = model.scales(every, *variances).log_density(residual)
            log = torch.where(held, log, 0.0).reshape(several, -1).sum(1)
            loss = -log / held.reshape(several, -1).sum(1)
            better = loss < best
            best, waited = torch.where(better, loss, best), torch.where(better, 0, waited + _EVERY)
            chosen = better.repeat_interleave(group)[:, None, None]
            for name, value in model.named_parameters():
                kept[name] = torch.where(chosen, value.detach(), kept[name])
            if (waited >= _PATIENCE).all():
                break
        for group_of in optimizer.param_groups:
            group_of["lr"] = _LEARNING_RATE * min(1.0, (step + 1) / _WARM_UP)
        some = (random(torch.rand, min(_BATCH, len(residual))) * counts).long()
        some = rows.gather(1, some)
        found = model.scales(features[some], *(each[some] for each in variances))
        optimizer.zero_grad()
        (-found.log_density(residual[some]).mean(1).sum()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.load_state_dict(kept, strict=False)
    return model.requires_grad_(False), best.tolist()


def _selected(model: ResidualModel, which: slice) -> ResidualModel:
    """The model with some of its networks."""
    inputs = model.first.shape[1] - 2
    chosen = ResidualModel(model.family, len(model.keep[which]), inputs)
    stacked = {"keep", *(name for name, _ in model.named_parameters())}
    state = {
        name: value[which] if name in stacked else value
        for name, value in model.state_dict().items()
    }
    chosen.load_state_dict(state)
    return chosen.requires_grad_(False)


def _levels(found: Scales, residual: Tensor) -> Tensor:
    """(m, n) probabilities of at most these residuals (n,)."""
    from scipy.special import ndtr, stdtr

    gap = ((residual[:, None] - found.shifts) / found.squared.sqrt()).double().numpy()
    df = found.df.double().expand(gap.shape).numpy()
    below = np.where(np.isinf(df), ndtr(gap), stdtr(np.where(np.isinf(df), 3.0, df), gap))
    return (found.logits.exp() * torch.tensor(below)).sum(-1)
