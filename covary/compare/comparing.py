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
from covary.compare.methods import Method
from covary.compare.metrics import (
    BATCH,
    Numbers,
    attacked_images,
    classification_rows,
    predict_all,
    regression_rows,
)
from covary.compare.workshop import KINDS, Workshop
from covary.data import Dataset, Schema
from covary.files import read_json, write_json
from covary.runs import costs
from covary.runs.config import DataConfig, RunConfig, check_covariance
from covary.runs.directory import Run, RunError, environment
from covary.runs.records import decoded, to_json
from covary.runs.samples import foreign_sets, load_data, validation_rows
from covary.runs.tracking import quietly
from covary.runs.training import resolve, train
from covary.training import Display, Silent
from covary.training.config import make_optimizer

_ROUNDS = 8
_LEAST_HELD_OUT = 10
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
    say: Say | None = None,
    display: Callable[[], Display] | None = None,
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
    settings, say = settings or CompareConfig(), say or _unsaid
    _check(seeds, data)
    store = Run(out)
    per_seed: dict[int, dict[str, GroupScores]] = {}
    notes: list[str] = []
    for seed in seeds:
        work = _prepared(data, seed, methods, covariance, ood, chosen or {}, data_dir)
        if seed == seeds[0]:
            # Not earlier: a folder begun with a wrong choice would refuse the right one.
            _make_folder(store, data, chosen or {}, settings, resume=resume, overwrite=overwrite)
        shop = _trained(work, out / f"seed-{seed}", settings, covariance, say, display or Silent)
        per_seed[seed] = {
            name: _measured(name, group, shop, work.ood, say) for name, group in work.groups.items()
        }
        notes += [note for note in (*work.notes, *shop.notes) if note not in notes]
        if seed == seeds[0]:
            first, measured = work, _costs(store, work.groups, shop, say)
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
        **environment(started),
    ).write(out / RESULT)


class _Work(NamedTuple):
    """What a seed is to train and measure."""

    config: RunConfig
    dataset: Dataset
    schema: Schema | None
    groups: Mapping[str, Group]
    ood: Mapping[str, Tensor]
    notes: tuple[str, ...]
    data_dir: str | None  # where data are looked for first


def _prepared(
    data: DataConfig,
    seed: int,
    methods: Sequence[str],
    covariance: str,
    ood: Sequence[str],
    chosen: Mapping[str, Any],
    data_dir: str | None,
) -> _Work:
    """All that can be known before hours of training; what cannot be done is said now."""
    dataset, schema = load_data(data, data_dir=data_dir, seed=seed)
    config = resolve(data, dataset, {**chosen, "seed": seed})
    wanted = groups(config.model.task, methods)
    check_covariance(covariance, None, config.model)
    others, news = foreign_sets(config.data, schema, dataset, ood, data_dir=data_dir, seed=seed)
    _check_config(config, len(dataset.x))
    return _Work(config, dataset, schema, wanted, others, (*dataset.notes, *news), data_dir)


def _trained(
    work: _Work,
    folder: Path,
    settings: CompareConfig,
    covariance: str,
    say: Say,
    display: Callable[[], Display],
) -> Workshop:
    """The workshop of a seed, beside the moment neural network that it trains first."""
    run = Run(folder / "mnn", data_dir=work.data_dir)
    if not run.model_path.exists():
        say(f"seed {work.config.training.seed}: training mnn")
    config, dataset, schema = work[:3]
    train(
        config,
        dataset,
        run,
        schema=schema,
        existing="resume" if run.exists() else "refuse",
        display=display(),
    )
    return Workshop(run, dataset, settings, covariance=covariance, say=say, display=display)


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


def _make_folder(
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
        before = read_json(path)
        different = sorted(key for key in now if now[key] != before.get(key))
        if different:
            raise RunError(
                f"{store.path} was begun with another choice of {', '.join(different)}. Resume "
                "with the command it was begun with (seeds, methods, covariance and "
                "out-of-distribution data may be others), or choose another folder (--out)."
            )
    elif path.exists():
        _clear(store.path)
    elif store.path.is_dir() and any(store.path.iterdir()):
        raise RunError(
            f"{store.path} is not empty and holds no comparison. Choose another folder (--out)."
        )
    write_json(path, now)


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
    return decoded(cls, read_json(path), str(path), _ANEW) if path.exists() else None


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
    methods = group.make(shop)
    say(f"seed {shop.config.training.seed}: measuring {name}")
    scored = tuple(
        MethodScores(name=method.name, description=method.description, scores=rows)
        for method, rows in _scored(methods, shop, ood)
    )
    content = to_json(
        GroupScores(
            ood=tuple(ood),
            methods=scored,
            notes=tuple(shop.notes[before:]),
            covariance=covariance,
            fidelity=shop.fidelity if name == "mnn" else None,
        )
    )
    write_json(path, content)
    return decoded(GroupScores, content, str(path))


def _scored(
    methods: Sequence[Method], shop: Workshop, ood: Mapping[str, Tensor]
) -> list[tuple[Method, dict[str, Numbers]]]:
    dataset = shop.dataset
    parts = {"test": dataset.x_test} | dict(ood)
    if shop.classify and dataset.is_image:
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


def _costs(store: Run, wanted: Mapping[str, Group], shop: Workshop, say: Say) -> Costs:
    """Training and inference of each group over the plain network's, all measured in turns."""
    path = store.path / COSTS
    kept = _kept(Costs, path)
    if (
        kept is not None
        and set(wanted) <= set(kept.training)
        and kept.covariance == shop.covariance
    ):
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
    write_json(path, to_json(found))
    return found


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
    for group, found in first.items():
        for method in found.methods:
            for score in method.scores:
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
                        for metric in method.scores[score]
                    },
                    by_seed=by_seed,
                )


def _unsaid(_sentence: str) -> None:
    pass
