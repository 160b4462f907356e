"""Train a moment neural network and other methods alike: same widths, same data, same budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from covary.attacks import fgsm
from covary.compare.comparison import (
    CompareConfig,
    Comparison,
    Costs,
    GroupScores,
    MethodScores,
    Row,
    Summary,
)
from covary.compare.groups import Group, groups
from covary.compare.methods import BATCH, Method, rows_of
from covary.compare.workshop import KINDS, Workshop
from covary.data import Dataset, Schema
from covary.files import read_json, write_json
from covary.moments import mean_of
from covary.runs import costs
from covary.runs.config import DataConfig, RunConfig, check_covariance
from covary.runs.directory import Run, RunError, environment
from covary.runs.records import decoded, to_json
from covary.runs.samples import load_data, ood_sets, validation_rows
from covary.runs.tracking import quietly
from covary.runs.training import Existing, resolve, train
from covary.training import Display, Silent
from covary.training.config import make_optimizer

_ROUNDS = 8
_LEAST_HELD_OUT = 10
_PIXELS = 255.0  # the range of an image's bytes
RESULT, SETTINGS, COSTS = "compare.json", "settings.json", "costs.json"
_ANEW = "Remove the file and run covary compare again, with --resume."
Kept = TypeVar("Kept")
Say = Callable[[str], None]


@quietly()  # how good tracked covariances are is in the result
def compare(
    data: DataConfig,
    *,
    out: Path,
    ood: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    methods: Sequence[str] = (),
    covariance: str = "tracked",
    chosen: Mapping[str, Any] | None = None,
    settings: CompareConfig | None = None,
    data_dir: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = lambda _sentence: None,
    display: Callable[[], Display] = Silent,
) -> Comparison:
    """Train a moment neural network and what it is compared with, and measure them alike.

    All networks have the same widths, rows, batches, optimizer and number of epochs. What a method
    needs beyond that (a temperature, a constant variance, a prior) is fitted on the run's held-out
    rows. Results go to ``compare.json`` in the folder; each method's numbers for a seed are kept as
    soon as they are there, each network when it is trained, and go on from there with ``resume``.

    Args:
        data: which data.
        out: the folder; ``seed-S/mnn`` in it is an ordinary run.
        ood: out-of-distribution data, as in ``evaluate``.
        seeds: each trains all networks anew.
        methods: names of ``method_names``; the network that all are compared with is always there.
            None given: all.
        covariance: how the moment network holds its own where it is measured: ``"tracked"``,
            ``"full"`` (exact, and dear in wide networks) or ``"diagonal"``.
        chosen: settings of the network and of training, as in ``covary.runs.training.resolve``.
        settings: of the methods compared with.
        data_dir: where data are looked for first.
        resume: go on with the comparison in the folder.
        overwrite: replace the comparison in the folder.
        say: told what is being done.
        display: makes what shows a training's progress.
    """
    started = datetime.now(timezone.utc)
    settings, chosen = settings or CompareConfig(), chosen or {}
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"A comparison needs seeds, each once; got {list(seeds)}.")
    per_seed: dict[int, dict[str, GroupScores]] = {}
    notes: list[str] = []
    for seed in seeds:
        work = _prepared(data, {**chosen, "seed": seed}, methods, covariance, ood, data_dir)
        if seed == seeds[0]:
            # Not earlier: a folder begun with a wrong choice would refuse the right one.
            _make_folder(out, data, chosen, settings, resume=resume, overwrite=overwrite)
        run = Run(out / f"seed-{seed}" / "mnn", data_dir=data_dir)
        _train(work, run, say, display())
        shop = Workshop(
            run, work.dataset, settings, covariance=covariance, say=say, display=display
        )
        per_seed[seed] = {
            name: _measured(name, group, shop, work.ood, say) for name, group in work.groups.items()
        }
        notes += [note for note in (*work.notes, *shop.notes) if note not in notes]
        if seed == seeds[0]:
            first, measured = work, _costs(out / COSTS, work.groups, shop, say)
    fidelity = {str(seed): found["mnn"].fidelity for seed, found in per_seed.items()}
    model = first.config.model
    return Comparison(
        task="classification" if shop.classify else "regression",
        dataset=data.name,
        image_shape=model.input_shape if model.is_image else None,
        ood=tuple(first.ood),
        seeds=tuple(seeds),
        config=first.config,
        settings=settings,
        rows=tuple(_rows(per_seed, measured)),
        notes=tuple(notes),
        covariance=covariance,
        fidelity={seed: each for seed, each in fidelity.items() if each is not None},
        **environment(started, seed=seeds[0]),
    ).write(out / RESULT)


class _Work(NamedTuple):
    """What a seed is to train and measure."""

    config: RunConfig
    dataset: Dataset
    schema: Schema | None
    groups: Mapping[str, Group]
    ood: Mapping[str, Tensor]
    notes: tuple[str, ...]


def _prepared(
    data: DataConfig,
    chosen: Mapping[str, Any],
    methods: Sequence[str],
    covariance: str,
    ood: Sequence[str],
    data_dir: str | None,
) -> _Work:
    """All that can be known before hours of training; what cannot be done is said now."""
    seed = chosen["seed"]
    if data.errors:
        raise ValueError(
            "A comparison takes inputs without errors, as the other methods know of none: leave "
            f"--error {data.errors[0]} out, and the column of errors too (--drop)."
        )
    dataset, schema = load_data(data, data_dir=data_dir, seed=seed)
    config = resolve(data, dataset, dict(chosen))
    wanted = groups(config.model.task, methods)
    check_covariance(covariance)
    others, news = ood_sets(config.data, schema, dataset, ood, data_dir=data_dir, seed=seed)
    config.model.build()  # names its activation, counts its noise
    n = len(dataset.x)
    held_out = len(validation_rows(n, config)[0])
    if held_out < _LEAST_HELD_OUT:
        raise ValueError(
            f"A comparison needs {_LEAST_HELD_OUT} held-out rows at least, to fit temperatures and "
            f"variances on; a validation part of {config.data.validation:g} makes {held_out} of "
            f"{n} training rows. Hold out more (--validation)."
        )
    plain = {name: mean_of(x) for name, x in others.items()}
    return _Work(config, dataset, schema, wanted, plain, (*dataset.notes, *news))


def _train(work: _Work, run: Run, say: Say, display: Display) -> None:
    """Train the moment neural network of a seed, or what is left of its training."""
    if not run.model_path.exists():
        say(f"seed {work.config.training.seed}: training mnn")
    existing: Existing = "resume" if run.exists() else "refuse"
    train(work.config, work.dataset, run, schema=work.schema, existing=existing, display=display)


def _make_folder(
    folder: Path,
    data: DataConfig,
    chosen: Mapping[str, Any],
    settings: CompareConfig,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """Make the folder, or refuse to touch the comparison that is there."""
    path = folder / SETTINGS
    given = {key: value for key, value in chosen.items() if value is not None}
    # By way of JSON, so that what is read back is the same.
    now = json.loads(json.dumps({"data": asdict(data), "chosen": given} | asdict(settings)))
    if path.exists() and not overwrite:
        if not resume:
            raise RunError(
                f"{folder} holds a comparison already. Go on with it (--resume), replace it "
                "(--overwrite) or choose another folder (--out)."
            )
        before = read_json(path)
        different = list(_differences(before, now))
        if different:
            raise RunError(
                f"{folder} was begun with another choice of {', '.join(different)}. Resume "
                "with the command it was begun with (seeds, methods, covariance and "
                "out-of-distribution data may be others), or choose another folder (--out)."
            )
    elif path.exists():
        _clear(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise RunError(
            f"{folder} is not empty and holds no comparison. Choose another folder (--out)."
        )
    write_json(path, now)


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The names of settings that are not as before, such as ``epochs: 11, not 10``."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        if now != before:
            yield f"{name}: {now}, not {before}"
        return
    for key in sorted({*now, *(before if name else ())}):
        yield from _differences(before.get(key), now.get(key), key)


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


def _kept(cls: type[Kept], path: Path) -> Kept | None:
    """What a file holds that an earlier comparison has left; None if there is none."""
    return decoded(cls, read_json(path, _ANEW), str(path), _ANEW) if path.exists() else None


def _keep(record: Kept, path: Path) -> Kept:
    """Write a file, and give what whoever reads it will get."""
    content = to_json(record)
    write_json(path, content)
    return decoded(type(record), content, str(path))


def _measured(
    name: str, group: Group, shop: Workshop, ood: Mapping[str, Tensor], say: Say
) -> GroupScores:
    """A group's numbers for a seed, found in its file or measured and written there."""
    path = shop.run.path.parent / f"{name}.json"
    covariance = shop.covariance if name == "mnn" else None
    kept = _kept(GroupScores, path)
    if kept is not None and set(ood) <= set(kept.ood) and kept.covariance == covariance:
        for note in kept.notes:
            shop.note(note)
        return kept
    before = len(shop.notes)
    methods = list(group.make(shop))
    say(f"seed {shop.config.training.seed}: measuring {name}")
    found = GroupScores(
        ood=tuple(ood),
        methods=tuple(_scored(methods, shop, ood)),
        notes=tuple(shop.notes[before:]),
        covariance=covariance,
        fidelity=shop.fidelity if name == "mnn" else None,
    )
    return _keep(found, path)


def _scored(
    methods: Sequence[Method], shop: Workshop, ood: Mapping[str, Tensor]
) -> Iterator[MethodScores]:
    dataset = shop.dataset
    parts = {"test": dataset.x_test} | dict(ood)
    if shop.classify and dataset.is_image:
        # One attack for all methods of a group: what they predict comes from the same networks.
        count, size = shop.settings.attacked, shop.settings.epsilon * _PIXELS
        x, y = dataset.x_test[:count].to(shop.device), dataset.y_test[:count].to(shop.device)
        attack = partial(fgsm, methods[0].logits, bounds=(0.0, _PIXELS), batch_size=BATCH)
        parts["attacked"] = attack(x.float(), y, size).cpu()
    for method in methods:
        made = {name: method.predict(x) for name, x in parts.items()}
        test, attacked = made.pop("test"), made.pop("attacked", None)
        rows = rows_of(test, dataset.y_test, made, attacked)
        yield MethodScores(name=method.name, description=method.description, scores=rows)


def _costs(path: Path, wanted: Mapping[str, Group], shop: Workshop, say: Say) -> Costs:
    """Training and inference of each group over the plain network's, all measured in turns."""
    kept = _kept(Costs, path)
    if kept and set(wanted) <= set(kept.training) and kept.covariance == shop.covariance:
        return kept
    say("measuring what they cost")
    batch = shop.dataset.x_test[:BATCH].to(shop.device)
    passes: dict[str, Callable[[], object]] = {
        method.name: partial(method.infer, batch)
        for group in wanted.values()
        for method in group.make(shop)
    }
    # The bare network, without even a softmax: what everything is a multiple of.
    passes["bare"] = partial(shop.network("plain"), batch)
    with torch.no_grad():
        inference = costs.fastest(passes, range(_ROUNDS))
    kinds = {group.trains for group in wanted.values()} | {"plain"}
    steps = costs.fastest({kind: _step(kind, shop) for kind in sorted(kinds)}, range(_ROUNDS))
    found = Costs(
        batch=len(batch),
        threads=torch.get_num_threads(),
        training={
            name: group.networks(shop) * steps[group.trains] / steps["plain"]
            for name, group in wanted.items()
        },
        inference={name: seconds / inference["bare"] for name, seconds in inference.items()},
        covariance=shop.covariance,
    )
    return _keep(found, path)


def _step(kind: str, shop: Workshop) -> Callable[[], object]:
    """A training step of a kind of network, on one batch."""
    config = shop.config
    net = config.model.build() if kind == "mnn" else shop.build(kind)
    objective = shop.objective(kind, net).to(shop.device).train()
    optimizer = make_optimizer(config.training, objective)
    size = config.training.batch_size
    x, y = shop.x[:size].to(shop.device), shop.y[:size].to(shop.device)

    def step() -> None:
        loss, _ = objective(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rows(per_seed: Mapping[int, Mapping[str, GroupScores]], measured: Costs) -> Iterator[Row]:
    """A row for each method and score: its numbers by seed, their summary, and its costs."""
    first = next(iter(per_seed.values()))
    methods = [(group, method) for group, found in first.items() for method in found.methods]
    for group, method in methods:
        for score, metrics in method.scores.items():
            by_seed = {
                str(seed): other.scores[score]
                for seed, others in per_seed.items()
                for other in others[group].methods
                if other.name == method.name
            }
            yield Row(
                group=group,
                method=method.name,
                score=score,
                description=method.description,
                training_cost=measured.training[group],
                inference_cost=measured.inference.get(method.name),
                summary={
                    metric: Summary.of([numbers.get(metric) for numbers in by_seed.values()])
                    for metric in metrics
                },
                by_seed=by_seed,
            )
