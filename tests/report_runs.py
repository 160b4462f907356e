"""Run directories as `covary train` and `covary evaluate` leave them, and how to read a page.

The runs are made up, but behave as trained networks do: uncertain inputs are wrong more often,
and deeper layers tell right from wrong better. Metrics are brute force (pairs, ranks), so that they
can be compared with what the page shows.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from scipy import stats

from covary.runs import Run
from tests.report_fidelity import add_fidelity

# Letters and digits of 3 x 5 pixels, a row of each per group of three.
GLYPHS = {
    "0": "111101101101111",
    "1": "010110010010111",
    "2": "111001111100111",
    "3": "111001111001111",
    "4": "101101111001001",
    "5": "111100111001111",
    "6": "111100111101111",
    "7": "111001010010010",
    "8": "111101111101111",
    "9": "111101111001111",
    "A": "010101111101101",
    "F": "111100110100100",
    "H": "101101111101101",
    "K": "101110100110101",
    "N": "110101101101101",
    "P": "111101111100100",
    "X": "101101010101101",
}
LAYERS = ["activation1", "activation2", "activation3", "linear4"]
CONFIG = """\
precision = "32-true"

[data]
name = "{dataset}"
split = 0
validation = 0.1

[model]
hidden = {hidden}
activation = "relu"
noise = [0.2]
covariance = "shared"
task = "{task}"
input_shape = {input_shape}
outputs = {outputs}

[training]
epochs = 40
batch_size = 128
lr = 5e-4
schedule = "one-cycle"
seed = 3
"""


def images(names, rng):
    """(n, 1, 28, 28) uint8: each name's glyph, moved, blurred and with noise on it."""
    out = np.zeros((len(names), 1, 28, 28))
    for i, name in enumerate(names):
        glyph = np.array([int(c) for c in GLYPHS[name]], dtype=float).reshape(5, 3)
        big = np.kron(glyph, np.ones((4, 4)))
        top, left = rng.integers(2, 7), rng.integers(5, 12)
        out[i, 0, top : top + 20, left : left + 12] = big * rng.uniform(0.6, 1.0)
        for axis in (1, 2):
            out[i] = (np.roll(out[i], 1, axis) + 2 * out[i] + np.roll(out[i], -1, axis)) / 4
    return np.clip(255 * out + rng.normal(0, 12, out.shape), 0, 255).astype(np.uint8)


def softmax(logits):
    e = np.exp(logits.astype(float) - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def doubt(logits):
    """1 - max-softmax as the sum of the other classes, which does not cancel."""
    return np.sort(softmax(logits), axis=1)[:, :-1].sum(axis=1)


def auroc(high, low):
    """The share of pairs that are ordered as they should be; ties count half."""
    if not len(high) or not len(low):
        return None
    return float(stats.mannwhitneyu(high, low).statistic / (len(high) * len(low)))


def separability(high, low):
    if not len(high) or not len(low):
        return None
    return float((high.mean() - low.mean()) / math.sqrt(high.var() + low.var()))


def aurc(score, wrong):
    return float(np.mean(np.cumsum(wrong[np.argsort(score)]) / np.arange(1, len(wrong) + 1)))


def ece(confidence, right, bins=15):
    which = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [abs(confidence[which == b].sum() - right[which == b].sum()) for b in range(bins)]
    return float(sum(gaps) / len(right))


def extremes(score, groups, each=12):
    """The most and the least certain of each group of samples."""
    chosen: list[int] = []
    for group in groups:
        ordered = np.flatnonzero(group)[np.argsort(score[group])]
        chosen += [*ordered[:each], *ordered[-each:]]
    return np.array(sorted(set(map(int, chosen))), dtype=np.int64)


def uncertain(difficulty, layers, rng, width=10.0):
    """Entropies of the output and of each layer that follow the difficulty, deeper ones more so."""
    columns = [
        -width * (len(layers) - depth) * 6
        + (1.0 + depth) * difficulty * 0.8
        + rng.normal(0, 1.6, len(difficulty))
        for depth in range(len(layers))
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def logits_of(label, difficulty, classes, rng, scale=11.5):
    logits = rng.normal(0, 1.5, (len(label), classes))
    logits[np.arange(len(label)), label] += scale - 2.6 * difficulty
    return logits.astype(np.float32)


def history(task, epochs, rng):
    rows = [{"kind": "step", "step": 10, "loss": 2.0}]
    for epoch in range(1, epochs + 1):
        progress = 1 - math.exp(-epoch / 5)
        row = {
            "kind": "epoch",
            "epoch": epoch,
            "step": 469 * epoch,
            "loss": 1.6 - 1.5 * progress + rng.normal(0, 0.01),
            "validation_loss": 1.6 - 1.4 * progress + rng.normal(0, 0.02),
            "samples_per_second": 9000.0,
            "seconds": 6.6,
        }
        if task == "classification":
            row |= {
                "accuracy": 0.80 + 0.19 * progress + rng.normal(0, 0.002),
                "validation_accuracy": 0.80 + 0.17 * progress + rng.normal(0, 0.003),
                "entropy_right": -12 - 2 * progress,
                "entropy_wrong": -12 - 0.6 * progress if epoch > 1 else None,
            }
        else:
            row |= {
                "mae": 9 - 6.2 * progress + rng.normal(0, 0.03),
                "validation_mae": 9 - 5.8 * progress + rng.normal(0, 0.08),
            }
        rows.append(row)
    return rows


def some_layers(layer_entropy, rng, count=1000):
    """Entropies of hidden layers are dear and taken of so many samples; NaN elsewhere."""
    kept = rng.permutation(len(layer_entropy))[:count]
    sparse = np.full_like(layer_entropy, np.nan)
    sparse[kept] = layer_entropy[kept]
    return sparse


def store(run, evaluation, arrays, rows, hidden):
    run.mkdir(parents=True, exist_ok=True)
    versions = {"python": "3.11.7", "torch": "2.13.0", "covary": "0.2.0", "numpy": "2.4.6"}
    name = evaluation["dataset"]
    evaluation |= {
        "covariance": "full",
        "weights": "5f3a" * 16,
        "versions": versions,
        "seed": 0,
        "command": f"covary evaluate runs/{run.name}",
        "git_commit": None,
        "platform": "Linux x86_64",
        "started": "2026-11-15T21:00:00+00:00",
        "seconds": 3.2,
    }
    environment = {
        "versions": versions,
        "git_commit": "a496e06c0ffee0123456789abcdef0123456789ab",
        "command": f"covary train '{name}' --out runs/{run.name}",
        "platform": "Linux x86_64",
        "started": "2026-11-15T20:14:05+00:00",
        "seconds": 132.4,
        "seed": 3,
        "notes": ["made up, not measured"],
        "device": "cpu",
    }
    config = CONFIG.format(
        dataset=name,
        hidden=hidden,
        task=evaluation["task"],
        input_shape=list(arrays["test/input"].shape[1:]),
        outputs=arrays["test/mean"].shape[1],
    )
    (run / "config.toml").write_text(config, encoding="utf-8")
    (run / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    (run / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    if rows:
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    np.savez(run / "predictions.npz", **arrays)
    return run


def classification_metrics(mean, entropy, label):
    probability, right = softmax(mean), mean.argmax(1) == label
    confidence, score = probability.max(1), doubt(mean)
    onehot = np.eye(mean.shape[1])[label]
    return {
        "samples": len(label),
        "accuracy": float(right.mean()),
        "nll": float(-np.log(probability[np.arange(len(label)), label]).mean()),
        "brier": float(((probability - onehot) ** 2).sum(1).mean()),
        "ece": ece(confidence, right),
        "entropy_right": float(entropy[right].mean()),
        "entropy_wrong": float(entropy[~right].mean()) if (~right).any() else None,
        "auroc_entropy": auroc(entropy[~right], entropy[right]),
        "auroc_max_softmax": auroc(score[~right], score[right]),
        "aurc_entropy": aurc(entropy, ~right),
        "aurc_max_softmax": aurc(score, ~right),
    }


def classification(run, *, classes, samples, rng, inputs, ood=None, rows=None, wrong=True):
    """A classification run; ``inputs(label)`` makes what the gallery shows."""
    difficulty = rng.gamma(1.6, 0.75, samples)
    label = rng.integers(0, len(classes), samples)
    mean = logits_of(label, difficulty, len(classes), rng)
    if not wrong:
        mean[np.arange(samples), label] = mean.max(axis=1) + 1
    layer_entropy = uncertain(difficulty, LAYERS, rng)
    entropy = layer_entropy[:, -1]
    right = mean.argmax(1) == label
    index = extremes(entropy, [right, ~right])
    x = inputs(label[index])
    arrays = {
        "test/mean": mean,
        "test/variance": rng.gamma(2.0, 0.1, mean.shape).astype(np.float32),
        "test/entropy": entropy,
        "test/layer_entropy": some_layers(layer_entropy, rng),
        "test/label": label.astype(np.int64),
        "test/input": x,
        "test/input_index": index,
    }
    parts = {"test": classification_metrics(mean, entropy, label)}
    separate = [separability(c[~right], c[right]) for c in layer_entropy.T]
    separabilities = {"test": separate}
    if ood is not None:
        name, number = ood
        hard = rng.gamma(4.0, 1.0, number)
        strange = logits_of(rng.integers(0, len(classes), number), hard, len(classes), rng)
        strange_layers = uncertain(hard, LAYERS, rng)
        shown = extremes(strange_layers[:, -1], [np.ones(number, bool)])
        letters = np.array([c for c in GLYPHS if c.isalpha()])
        arrays |= {
            f"{name}/mean": strange,
            f"{name}/variance": rng.gamma(2.0, 0.2, strange.shape).astype(np.float32),
            f"{name}/entropy": strange_layers[:, -1],
            f"{name}/layer_entropy": some_layers(strange_layers, rng),
            f"{name}/input": images(rng.choice(letters, len(shown)), rng),
            f"{name}/input_index": shown,
        }
        parts[name] = {
            "samples": number,
            "entropy": float(strange_layers[:, -1].mean()),
            "auroc_entropy": auroc(strange_layers[:, -1], entropy),
            "auroc_max_softmax": auroc(doubt(strange), doubt(mean)),
        }
        separabilities[name] = [
            separability(strange_layers[:, i], layer_entropy[right, i]) for i in range(len(LAYERS))
        ]
    evaluation = {
        "task": "classification",
        "dataset": run.name,
        "layers": LAYERS,
        "classes": list(classes),
        "features": [],
        "targets": [],
        "image_shape": [1, 28, 28] if x.ndim == 4 else None,
        "parts": parts,
        "separability": separabilities,
    }
    if x.ndim == 2:
        evaluation["features"] = [f"{name} (cm)" for name in "abcdefghijklmnop"[: x.shape[1]]]
    return store(run, evaluation, arrays, rows, [392, 196, 98])


def digits(run: Path, samples: int, rng, **more) -> Path:
    """A classifier of images of digits."""
    return classification(
        run,
        classes=tuple("0123456789"),
        samples=samples,
        rng=rng,
        inputs=lambda label: images([str(i) for i in label], rng),
        **more,
    )


def mnist(root: Path, samples=3000) -> Path:
    """Images, letters as the OOD set, and cheaper covariances beside the exact one."""
    rng = np.random.default_rng(1)
    rows = history("classification", 20, rng)
    run = digits(root / "mnist", samples, rng, ood=("notmnist", samples), rows=rows)
    return add_fidelity(run)


def table(root: Path) -> Path:
    """Rows of numbers, three classes, one of which wants to break the page."""
    rng = np.random.default_rng(2)
    return classification(
        root / "iris & <friends>",
        classes=("setosa", "</script><b>$x", "virginica"),
        samples=150,
        rng=rng,
        inputs=lambda label: rng.normal(5 + label[:, None], 1.0, (len(label), 13)),
        rows=history("classification", 8, rng),
    )


def flawless(root: Path) -> Path:
    """Nothing is wrong, so half of the comparisons do not exist."""
    rng = np.random.default_rng(3)
    rows = history("classification", 3, rng)[:2]
    return digits(root / "flawless", 200, rng, rows=rows, wrong=False)


def without_history(root: Path) -> Path:
    """Trained elsewhere: there is no metrics.jsonl."""
    return digits(root / "imported", 400, np.random.default_rng(4))


def regression(run, targets, samples, seed):
    rng = np.random.default_rng(seed)
    t = len(targets)
    stddev = rng.gamma(3.0, 0.9, (samples, t)) + 0.4
    target = rng.gamma(6.0, 4.0, (samples, t)) * np.array([1.0, 0.02])[:t]
    stddev = stddev * np.array([1.0, 0.02])[:t]
    error = rng.normal(0, 1.2, (samples, t)) * stddev
    mean = (target + error).astype(np.float32)
    variance = (stddev**2).astype(np.float32)
    error = mean - target
    # As if targets were independent: half the log-determinant of a diagonal covariance.
    entropy = 0.5 * np.log(2 * np.pi * np.e * variance.astype(float)).sum(axis=1)
    layers = ["activation1", "linear2"]
    index = extremes(entropy, [np.ones(samples, bool)])
    scaled = np.abs(error) / np.sqrt(variance)
    arrays = {
        "test/mean": mean,
        "test/variance": variance,
        "test/entropy": entropy,
        "test/layer_entropy": np.stack([entropy - 60 + rng.normal(0, 1, samples), entropy], 1),
        "test/target": target,
        "test/input": rng.normal(0, 1, (len(index), 8)) * 10.0 ** rng.integers(-2, 4, 8),
        "test/input_index": index,
    }
    metrics = {
        "samples": samples,
        "rmse": float(np.sqrt((error**2).mean())),
        "mae": float(np.abs(error).mean()),
        "log_likelihood": float(stats.norm.logpdf(error, 0, np.sqrt(variance)).sum(1).mean()),
        **{
            f"coverage_{level}": float((scaled <= stats.norm.ppf(0.5 + level / 200)).mean())
            for level in (50, 90, 95)
        },
        "width_90": float((2 * stats.norm.ppf(0.95) * np.sqrt(variance)).mean()),
        "spearman_error": float(
            stats.spearmanr(np.abs(error[:, 0]), np.sqrt(variance[:, 0])).statistic
        ),
    }
    evaluation = {
        "task": "regression",
        "dataset": run.name,
        "layers": layers,
        "classes": [],
        "features": ["cement", "slag", "ash", "water", "plasticizer", "coarse", "fine", "age"],
        "targets": list(targets),
        "image_shape": None,
        "parts": {"test": metrics},
        "separability": {"test": [None, None]},
    }
    return store(run, evaluation, arrays, history("regression", 40, rng), [50])


def concrete(root: Path) -> Path:
    return regression(root / "concrete", ["strength (MPa)"], 103, 5)


def concrete_with(root: Path, result: Path) -> Run:
    """That run with the result of another, JSON and arrays, as if it were of its own weights."""
    run = Run(concrete(root))
    weights = json.loads(run.evaluation_path.read_text())["weights"]
    content = json.loads(result.read_text()) | {"weights": weights}
    (run.path / result.name).write_text(json.dumps(content))
    shutil.copy(result.with_suffix(".npz"), run.path)
    return run


def two_targets(root: Path) -> Path:
    run = regression(root / "energy", ["heating load", "cooling load <kWh>"], 700, 6)
    return add_fidelity(run)


RUNS: dict[str, Callable[[Path], Path]] = {
    "images": mnist,
    "table": table,
    "flawless": flawless,
    "without history": without_history,
    "one target": concrete,
    "two targets": two_targets,
}


VOID = {"meta", "link", "img", "input", "br"}


class Page(HTMLParser):
    """A page as a flat list of (tag, attributes, text right within it)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.open: list[int] = []
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.elements[self.open.pop()][0] == tag, f"{tag} closes what it did not open"

    def handle_data(self, data):
        if self.open:
            self.elements[self.open[-1]][2].append(data)

    def all(self, *tags):
        return [element for element in self.elements if element[0] in tags]

    def texts(self, tag):
        return ["".join(text).strip() for _, _, text in self.all(tag)]

    def data(self):
        (found,) = [
            text for tag, attributes, text in self.elements if attributes.get("id") == "curves"
        ]
        return json.loads("".join(found))


def predictions(page):
    with np.load(page.path.parent / "predictions.npz", allow_pickle=False) as stored:
        return dict(stored)


def evaluation(page):
    return json.loads((page.path.parent / "evaluation.json").read_text(encoding="utf-8"))
