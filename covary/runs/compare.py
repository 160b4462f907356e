"""A moment neural network beside conventional ones: same widths, same data, same budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from covary.baselines import Method
from covary.data import Dataset
from covary.runs import costs
from covary.runs.compare_methods import Group, groups
from covary.runs.compare_metrics import (
    BATCH,
    attacked_images,
    classification_rows,
    predict_all,
    regression_rows,
    summarised,
)
from covary.runs.compare_training import KINDS, CompareConfig, Workshop, described
from covary.runs.config import DataConfig, RunConfig
from covary.runs.directory import Run, RunError, environment
from covary.runs.samples import foreign_sets, load_data, validation_rows
from covary.runs.tracking import quietly
from covary.runs.training import resolve, train
from covary.training import ClassificationLoss, Display, RegressionLoss, Silent
from covary.training.config import make_optimizer
from covary.training.log import without_nan

_ROUNDS = 8
_LEAST_HELD_OUT = 10
RESULT, SETTINGS, COSTS = "compare.json", "settings.json", "costs.json"


@quietly()
def compare(
    data: DataConfig,
    *,
    out: Path,
    ood: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    methods: Sequence[str] = (),
    chosen: Mapping[str, Any] | None = None,
    settings: CompareConfig | None = None,
    data_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
    display: Callable[[], Display] | None = None,
) -> dict[str, Any]:
    """Train a moment neural network and what it is compared with, and measure them alike.

    All networks have the same widths, rows, batches, optimizer and number of epochs. What a method
    needs beyond that (a temperature, a constant variance, a prior) is fitted on the run's held-out
    rows. Results go to ``compare.json`` in the folder; each method's numbers for a seed are kept as
    soon as they are there, each network when it is trained, and go on from there with ``resume``.

    Args:
        data: which data.
        out: the folder; ``seed-S/mnn`` in it is an ordinary run.
        ood: foreign data, as in ``evaluate``.
        seeds: each trains all networks anew.
        methods: names of ``method_names``; the network that all are compared with is always there.
            None given: all.
        chosen: settings of the network and of training, as in ``covary.runs.training.resolve``.
        settings: of the methods compared with.
        data_dir: where data are looked for first.
        resume: go on with the comparison in the folder.
        overwrite: replace the comparison in the folder.
        say: told what is being done.
        display: makes what shows a training's progress.
    """
    started = datetime.now(timezone.utc)
    settings, say = settings or CompareConfig(), say or _unsaid
    _check(seeds, data)
    store = Run(out)
    per_seed: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    for seed in seeds:
        dataset, schema = load_data(data, data_dir=data_dir, seed=seed)
        config = resolve(data, dataset, {**(chosen or {}), "seed": seed})
        # Before hours of training, and not after it: what cannot be done is said now.
        wanted = _wanted(methods, config.model.task)
        foreign, news = foreign_sets(
            config.data, schema, dataset, ood, data_dir=data_dir, seed=seed
        )
        _check_config(config, len(dataset.x))
        if seed == seeds[0]:
            # Not earlier: a folder begun with a wrong choice would refuse the right one.
            _prepare(store, data, chosen or {}, settings, resume=resume, overwrite=overwrite)
        run = Run(out / f"seed-{seed}" / "mnn")
        if not run.model_path.exists():
            say(f"seed {seed}: training mnn")
        show = display or Silent
        train(config, dataset, run, schema=schema, resume=run.exists(), display=show())
        shop = Workshop(run, dataset, settings, say=say, display=show)
        per_seed[seed] = {
            name: _measured(name, group, shop, foreign, say) for name, group in wanted.items()
        }
        notes += [note for note in (*dataset.notes, *news, *shop.notes) if note not in notes]
        if seed == seeds[0]:
            measured = _costs(store, wanted, shop, say)
            described_config = described(config)
    result: dict[str, Any] = {
        "task": shop.config.model.task,
        "dataset": data.name,
        "image_shape": list(shop.config.model.input_shape) if shop.dataset.is_image else None,
        "ood": list(foreign),
        "seeds": list(seeds),
        "config": described_config,
        "settings": asdict(settings),
        "rows": _rows(per_seed, measured),
        "notes": notes,
        **environment(started),
    }
    clean: dict[str, Any] = without_nan(result)
    store.write_json(RESULT, clean)
    return clean


def method_names(task: str) -> list[str]:
    """What ``compare`` can compare with, for this task."""
    return list(groups(task))


def _check(seeds: Sequence[int], data: DataConfig) -> None:
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"A comparison needs seeds, each once; got {list(seeds)}.")
    if data.validation == 0:
        raise ValueError(
            "A comparison needs held-out rows, to fit temperatures and variances on: a validation "
            "part above 0."
        )


def _check_config(config: RunConfig, n: int) -> None:
    """Whether the network can be built, and n training rows leave enough to fit on."""
    config.model.build()  # names its activation, counts its noise
    held_out = len(validation_rows(n, config)[0])
    if held_out < _LEAST_HELD_OUT:
        raise ValueError(
            f"A comparison needs {_LEAST_HELD_OUT} held-out rows at least, to fit temperatures and "
            f"variances on; a validation part of {config.data.validation:g} makes {held_out} of "
            f"{n} training rows. Hold out more (--validation)."
        )


def _prepare(
    store: Run,
    data: DataConfig,
    chosen: Mapping[str, Any],
    settings: CompareConfig,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Make the folder, or refuse to touch the comparison that is there."""
    path = store.path / SETTINGS
    given = {key: value for key, value in chosen.items() if value is not None}
    # By way of JSON, so that what is read back is the same.
    now = json.loads(json.dumps({"data": asdict(data), "chosen": given} | asdict(settings)))
    if path.exists() and not overwrite:
        if not resume:
            raise RunError(
                f"{store.path} holds a comparison already. Go on with it (--resume), replace it "
                "(--overwrite) or choose another folder (--out)."
            )
        before = json.loads(path.read_text(encoding="utf-8"))
        different = sorted(key for key in now if now[key] != before.get(key))
        if different:
            raise RunError(
                f"{store.path} was begun with another choice of {', '.join(different)}. Resume "
                "with the command it was begun with (seeds, methods and foreign data may be "
                "others), or choose another folder (--out)."
            )
    elif path.exists():
        _clear(store.path)
    elif store.path.is_dir() and any(store.path.iterdir()):
        raise RunError(
            f"{store.path} is not empty and holds no comparison. Choose another folder (--out)."
        )
    store.write_json(SETTINGS, now)


def _clear(path: Path) -> None:
    """Remove all that a comparison has made here, and nothing else."""
    for name in (RESULT, SETTINGS, COSTS):
        (path / name).unlink(missing_ok=True)
    for seed in path.glob("seed-*"):
        Run(seed / "mnn").clear()
        for kind in KINDS:
            for folder in seed.glob(f"{kind}-*"):
                shutil.rmtree(folder)
        for found in seed.glob("*.json"):
            found.unlink()


def _wanted(methods: Sequence[str], task: str) -> dict[str, Group]:
    known = groups(task)
    unknown = [name for name in methods if name not in known]
    if unknown:
        raise ValueError(f"Unknown method {unknown[0]!r}; for {task} there are {', '.join(known)}.")
    return {
        name: group for name, group in known.items() if not methods or name in ("mnn", *methods)
    }


def _measured(
    name: str,
    group: Group,
    shop: Workshop,
    foreign: Mapping[str, torch.Tensor],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """A group's numbers for a seed, found in its file or measured and written there."""
    seed_folder = Run(shop.run.path.parent)
    path = seed_folder.path / f"{name}.json"
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if set(foreign) <= set(kept["ood"]):
            for note in kept.get("notes", ()):
                shop.note(note)
            return kept
    before = len(shop.notes)
    methods = group.make(shop)
    say(f"seed {shop.config.training.seed}: measuring {name}")
    found = {
        "ood": list(foreign),
        "notes": shop.notes[before:],
        "methods": [
            {
                "name": method.name,
                "description": method.description,
                "scores": rows,
            }
            for method, rows in _scored(methods, shop, foreign)
        ],
    }
    clean: dict[str, Any] = without_nan(found)
    seed_folder.write_json(path.name, clean)
    return clean


def _scored(
    methods: Sequence[Method], shop: Workshop, foreign: Mapping[str, torch.Tensor]
) -> list[tuple[Method, dict[str, Any]]]:
    dataset: Dataset = shop.dataset
    parts = {"test": dataset.x_test} | dict(foreign)
    attack = shop.classify and dataset.is_image
    if attack:
        # One attack for all methods of a group: what they predict comes from the same networks.
        count, epsilon = shop.settings.attacked, shop.settings.epsilon
        x, y = dataset.x_test[:count], dataset.y_test[:count]
        parts["attacked"] = attacked_images(methods[0], x, y, epsilon)
    found = []
    for method in methods:
        made = predict_all(method, parts)
        test, others = made.pop("test"), made.pop("attacked", None)
        if shop.classify:
            rows = classification_rows(test, dataset.y_test, made, others)
        else:
            rows = regression_rows(test, dataset.y_test, made)
        found.append((method, rows))
    return found


def _costs(
    store: Run, wanted: Mapping[str, Group], shop: Workshop, say: Callable[[str], None]
) -> dict[str, Any]:
    """Training and inference of each group over the plain network's, all measured in turns."""
    path = store.path / COSTS
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if set(wanted) <= set(kept["training"]):
            return kept
    say("measuring what they cost")
    made = {name: group.make(shop) for name, group in wanted.items()}
    batch = shop.dataset.x_test[:BATCH].to(shop.device)
    passes: dict[str, Callable[[], object]] = {
        method.name: partial(method.infer, batch) for methods in made.values() for method in methods
    }
    # The bare network, without even a softmax: what everything is a multiple of.
    passes["bare"] = partial(shop.network("plain"), batch)
    with torch.no_grad():
        inference = costs.fastest(passes, range(_ROUNDS))
    kinds = {group.trains for group in wanted.values()} | {"plain"}
    steps = costs.fastest({kind: _step(kind, shop) for kind in sorted(kinds)}, range(_ROUNDS))
    found = {
        "batch": len(batch),
        "threads": torch.get_num_threads(),
        "training": {
            name: group.networks(shop) * steps[group.trains] / steps["plain"]
            for name, group in wanted.items()
        },
        "inference": {name: seconds / inference["bare"] for name, seconds in inference.items()},
    }
    store.write_json(COSTS, found)
    return found


def _step(kind: str, shop: Workshop) -> Callable[[], object]:
    """A training step of a kind of network, on one batch."""
    config = shop.config
    objective: nn.Module
    if kind == "mnn":
        net = config.model.build()
        objective = ClassificationLoss(net) if shop.classify else RegressionLoss(net)
    else:
        objective = shop.objective(kind, shop.build(kind))
    objective.to(shop.device).train()
    optimizer = make_optimizer(config.training, objective)
    size = config.training.batch_size
    x, y = shop.x[:size].to(shop.device), shop.y[:size].to(shop.device)

    def step() -> None:
        loss, _ = objective(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rows(per_seed: Mapping[int, Mapping[str, Any]], measured: Mapping[str, Any]) -> list[Any]:
    """A row for each method and score: its numbers by seed, their summary, and its costs."""
    first = next(iter(per_seed.values()))
    rows = []
    for group, found in first.items():
        for method in found["methods"]:
            for score in method["scores"]:
                by_seed = {
                    str(seed): other["scores"][score]
                    for seed, others in per_seed.items()
                    for other in others[group]["methods"]
                    if other["name"] == method["name"]
                }
                rows.append(
                    {
                        "group": group,
                        "method": method["name"],
                        "score": score,
                        "description": method["description"],
                        "training_cost": measured["training"][group],
                        "inference_cost": measured["inference"].get(method["name"]),
                        "summary": summarised(list(by_seed.values())),
                        "by_seed": by_seed,
                    }
                )
    return rows


def _unsaid(_sentence: str) -> None:
    pass
