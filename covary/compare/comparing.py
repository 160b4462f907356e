"""Train a moment neural network and other methods alike: same widths, same data, same budget."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from covary.attacks import fgsm
from covary.compare.comparison import (
    Begun,
    CompareConfig,
    Comparison,
    Costs,
    GroupScores,
    MethodRow,
    MethodScores,
    Summary,
)
from covary.compare.groups import Group, TableGroup, groups, missing
from covary.compare.methods import BATCH, CLASSIFICATION, REGRESSION, Method, TableMethod, rows_of
from covary.compare.trained_networks import KINDS, TrainedNetworks, train_run
from covary.data import Dataset, Schema
from covary.moments import mean_of
from covary.runs import costs
from covary.runs.config import Choices, DataConfig, RunConfig, check_covariance
from covary.runs.directory import Run, RunError, environment
from covary.runs.records import Stored
from covary.runs.samples import load_data, ood_sets, validation_rows
from covary.runs.tracking import quietly
from covary.runs.training import Existing, resolve
from covary.training import Display, Silent
from covary.training.config import make_optimizer

_ROUNDS = 8
_LEAST_HELD_OUT = 10
_PIXELS = 255.0  # the range of an image's bytes
RESULT, SETTINGS, COSTS = "compare.json", "settings.json", "costs.json"
_ANEW = "Remove the file and run covary compare again, with --resume."
Kept = TypeVar("Kept", bound=Stored)
Say = Callable[[str], None]
Groups = Mapping[str, Group | TableGroup]


@quietly()  # how good tracked covariances are is in the result
def compare(
    data: DataConfig,
    *,
    out: Path,
    ood: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    methods: Sequence[str] = (),
    covariance: str = "tracked",
    chosen: Choices | None = None,
    settings: CompareConfig | None = None,
    data_dir: str | None = None,
    existing: Existing = "refuse",
    say: Say = lambda _sentence: None,
    display: Callable[[], Display] = Silent,
) -> Comparison:
    """Train a moment neural network and what it is compared with, and measure them alike.

    All networks have the same widths, rows, batches, optimizer and number of epochs, but for that
    of ``covary train --loss likelihood``. What a method needs beyond that (a temperature, a
    constant variance, a prior) is fitted on the run's held-out rows. Results go to ``compare.json``
    in the folder; each method's numbers for a seed are kept as soon as they are there, each network
    when it is trained, and ``"resume"`` goes on from there.

    Args:
        data: which data.
        out: the folder; ``seed-S/mnn`` in it is an ordinary run.
        ood: out-of-distribution data, as in ``evaluate``.
        seeds: each trains all networks anew.
        methods: names of ``method_names``; the network that all are compared with is always there.
            None given: all.
        covariance: how the moment network stores its own where it is measured: ``"tracked"``,
            ``"full"`` (exact, and dear in wide networks) or ``"diagonal"``.
        chosen: settings of the network and of training; those of the data's preset for the rest.
        settings: of the methods compared with.
        data_dir: where data are looked for first.
        existing: what to do with a comparison that is in the folder: ``"refuse"`` to touch it,
            ``"resume"`` it where it stopped, or ``"overwrite"`` it.
        say: told what is being done.
        display: makes what shows a training's progress.
    """
    started = datetime.now(timezone.utc)
    settings, chosen = settings or CompareConfig(), chosen or Choices()
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValueError(f"A comparison needs seeds, each once; got {list(seeds)}.")
    per_seed: dict[int, dict[str, GroupScores]] = {}
    notes: list[str] = []
    for seed in seeds:
        work = _prepared(data, replace(chosen, seed=seed), methods, covariance, ood, data_dir)
        if seed == seeds[0]:
            # Not earlier: a folder begun with a wrong choice would refuse the right one.
            begun = Begun(data=data, chosen=chosen, **vars(settings))
            _make_folder(out, begun, existing)
        run = Run(out / f"seed-{seed}" / "mnn", data_dir=data_dir)
        train_run(work.config, work.dataset, run, say, display(), work.schema)
        beside = partial(TrainedNetworks, covariance=covariance, chosen=chosen)
        nets = beside(run, work.dataset, settings, say=say, display=display)
        per_seed[seed] = {
            name: _measured(name, group, nets, work.ood, say) for name, group in work.groups.items()
        }
        notes += [note for note in (*work.notes, *nets.notes) if note not in notes]
        if seed == seeds[0]:
            first, measured = work, _costs(out / COSTS, work.groups, nets, say)
    fidelity = {str(seed): found["mnn"].fidelity for seed, found in per_seed.items()}
    model = first.config.model
    return Comparison(
        task="classification" if nets.classify else "regression",
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
        seed=seeds[0],
        **vars(environment(started)),
    ).write(out / RESULT)


class _Work(NamedTuple):
    """What a seed is to train and measure."""

    config: RunConfig
    dataset: Dataset
    schema: Schema | None
    groups: Groups
    ood: Mapping[str, Tensor]
    notes: tuple[str, ...]


def _prepared(
    data: DataConfig,
    chosen: Choices,
    methods: Sequence[str],
    covariance: str,
    ood: Sequence[str],
    data_dir: str | None,
) -> _Work:
    """All that can be known before hours of training; what cannot be done is said now."""
    seed = chosen.seed or 0
    if data.errors:
        raise ValueError(
            "A comparison takes inputs without errors, as the other methods know of none: leave "
            f"--error {data.errors[0]} out, and the column of errors too (--drop)."
        )
    dataset, schema = load_data(data, data_dir=data_dir, seed=seed)
    config = resolve(data, dataset, chosen)
    wanted = groups(config.model.task, methods, is_table=not config.model.is_image)
    lacking = missing(wanted)
    wanted = {name: group for name, group in wanted.items() if name not in lacking}
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
    return _Work(config, dataset, schema, wanted, plain, (*dataset.notes, *news, *lacking.values()))


def _make_folder(folder: Path, begun: Begun, existing: Existing) -> None:
    """Make the folder, or refuse to touch the comparison that is there."""
    path = folder / SETTINGS
    if path.exists() and existing == "refuse":
        raise RunError(
            f"{folder} holds a comparison already. Go on with it (--resume), replace it "
            "(--overwrite) or choose another folder (--out)."
        )
    if path.exists() and existing == "resume":
        different = begun.differences(Begun.read(path, "Replace all of it (--overwrite)."))
        if different:
            raise RunError(
                f"{folder} was begun with another choice of {', '.join(different)}. Resume "
                "with the command it was begun with (seeds, methods, covariance and "
                "out-of-distribution data may be others), or choose another folder (--out)."
            )
        Run(folder).check_replaceable(folder / RESULT)
        return
    if path.exists():
        _clear(folder)
    elif folder.is_dir() and any(folder.iterdir()):
        raise RunError(
            f"{folder} is not empty and holds no comparison. Choose another folder (--out)."
        )
    begun.write(path)


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
    """The content of a file that an earlier comparison has left; None if there is none."""
    return cls.read(path, _ANEW) if path.exists() else None


def _measured(
    name: str, group: Group | TableGroup, nets: TrainedNetworks, ood: Mapping[str, Tensor], say: Say
) -> GroupScores:
    """A group's numbers for a seed, found in its file or measured and written there."""
    path = nets.run.path.parent / f"{name}.json"
    covariance = nets.covariance if name == "mnn" else None
    kept = _kept(GroupScores, path)
    known = {"fit_seconds", *(CLASSIFICATION if nets.classify else REGRESSION)}
    if (
        kept is not None
        and set(ood) <= set(kept.ood)
        and kept.covariance == covariance
        and all(known <= set(row) for each in kept.methods for row in each.scores.values())
    ):
        for note in kept.notes:
            nets.note(note)
        return kept
    before = len(nets.notes)
    methods: list[Method | TableMethod] = [*group.make(nets)]
    say(f"seed {nets.config.training.seed}: measuring {name}")
    return GroupScores(
        ood=tuple(ood),
        methods=tuple(_scored(methods, group.seconds(nets), nets, ood)),
        notes=tuple(nets.notes[before:]),
        covariance=covariance,
        fidelity=nets.fidelity if name == "mnn" else None,
    ).write(path)


def _scored(
    methods: Sequence[Method | TableMethod],
    seconds: float,
    nets: TrainedNetworks,
    ood: Mapping[str, Tensor],
) -> Iterator[MethodScores]:
    dataset = nets.dataset
    parts = {"test": dataset.x_test} | dict(ood)
    if nets.classify and dataset.is_image:
        # One attack for all methods of a group: what they predict comes from the same networks.
        assert isinstance(methods[0], Method)  # models of tables see no images
        count, size = nets.settings.attacked, nets.settings.epsilon * _PIXELS
        x, y = dataset.x_test[:count].to(nets.device), dataset.y_test[:count].to(nets.device)
        attack = partial(fgsm, methods[0].logits, bounds=(0.0, _PIXELS), batch_size=BATCH)
        parts["attacked"] = attack(x.float(), y, size).cpu()
    for method in methods:
        made = {name: method.predict(x) for name, x in parts.items()}
        test, attacked = made.pop("test"), made.pop("attacked", None)
        found = rows_of(test, dataset.y_test, made, attacked)
        took = seconds + method.extra_seconds
        rows = {score: {**row, "fit_seconds": took} for score, row in found.items()}
        yield MethodScores(name=method.name, description=method.description, scores=rows)


def _costs(path: Path, wanted: Groups, nets: TrainedNetworks, say: Say) -> Costs:
    """Training and inference of each group over the plain network's, all measured in turns.

    Of models of tables, what fitting took over what training the plain network did.
    """
    kept = _kept(Costs, path)
    if kept and set(wanted) <= set(kept.training) and kept.covariance == nets.covariance:
        return kept
    say("measuring what they cost")
    batch = nets.dataset.x_test[:BATCH].to(nets.device)
    passes: dict[str, Callable[[], object]] = {
        method.name: partial(method.infer, batch)
        for group in wanted.values()
        for method in group.make(nets)
    }
    # The bare network, without even a softmax: what everything is a multiple of.
    passes["bare"] = partial(nets.network("plain"), batch)
    with torch.no_grad():
        inference = costs.fastest(passes, range(_ROUNDS))
    kinds = {group.trains for group in wanted.values() if isinstance(group, Group)} | {"plain"}
    steps = costs.fastest({kind: _step(kind, nets) for kind in sorted(kinds)}, range(_ROUNDS))
    seconds = {kind: each * nets.steps(kind) for kind, each in steps.items()}
    return Costs(
        batch=len(batch),
        threads=torch.get_num_threads(),
        training={
            name: group.networks(nets) * seconds[group.trains] / seconds["plain"]
            if isinstance(group, Group)
            else group.seconds(nets) / nets.seconds("plain")
            for name, group in wanted.items()
        },
        inference={name: seconds / inference["bare"] for name, seconds in inference.items()},
        covariance=nets.covariance,
    ).write(path)


def _step(kind: str, nets: TrainedNetworks) -> Callable[[], object]:
    """A training step of a kind of network, on one batch."""
    how = nets.config_of(kind).training
    objective = nets.objective(kind, nets.build(kind)).to(nets.device).train()
    optimizer = make_optimizer(how, objective)
    size = how.batch_size
    x, y = nets.x[:size].to(nets.device), nets.y[:size].to(nets.device)

    def step() -> None:
        loss, _ = objective(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _rows(
    per_seed: Mapping[int, Mapping[str, GroupScores]], measured: Costs
) -> Iterator[MethodRow]:
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
            yield MethodRow(
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
