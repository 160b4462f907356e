"""Predictions of many files on a cluster of Ray: one actor for each slot but one."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from covary.data.dataset import needed
from covary.serving.predictor import Predictor
from covary.serving.tables import FileOptions, PredictedTable, Work

Batch = dict[str, Any]
_TRIES = 4  # of a file whose worker ends in its middle: it may be the file that ends them


class Worker:
    """What an actor keeps, a predictor, and what it does with a file. For ``map_batches``.

    Takes and gives batches of one row: the file and where its predictions go; then what came of it,
    or, as ``problem``, why nothing did.

    Args:
        kept: the folder of a saved predictor. An actor that takes the place of one that was killed
            reads it again.
        how: files are read and written.
    """

    def __init__(self, kept: str, how: FileOptions) -> None:
        self.predictor, self.how = Predictor.restored(kept), how

    def __call__(self, batch: Batch) -> Batch:
        """Predict the file."""
        work, summary, problem = Work(*(Path(str(batch[x][0])) for x in ("source", "out"))), "", ""
        try:
            summary = json.dumps(asdict(work.done(self.predictor, self.how)))
        except (ValueError, OSError) as error:  # another try would end alike
            problem = str(error)
        return {"summary": np.array([summary]), "problem": np.array([problem])}


def require() -> None:
    """Raise an error with the remedy unless Ray is there; nothing is sent home by it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # both are read when Ray starts
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    with needed("Ray", "predicting with --engine ray", "ray"):
        import ray.data  # noqa: F401


def predicted(
    kept: Path, work: Sequence[Work], how: FileOptions
) -> Generator[PredictedTable | str, None, None]:
    """What came of each file, in the order in which they are done; a problem as a text.

    Args:
        kept: the folder of a saved predictor, which all machines see.
        work: the files.
        how: they are read and written.
    """
    require()
    import ray

    if is_own := not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        files = [{"source": str(x.source.resolve()), "out": str(x.out.resolve())} for x in work]
        with warnings.catch_warnings():
            # Ray names no other way yet to say how often a file is tried.
            warnings.filterwarnings("ignore", message="`ray_remote_args` is deprecated")
            done = ray.data.from_items(files, override_num_blocks=len(files)).map_batches(
                Worker,
                fn_constructor_args=(str(kept.resolve()), how),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(size=actors(len(files))),
                max_task_retries=_TRIES - 1,
            )
        for row in done.iter_rows():
            yield row["problem"] or PredictedTable(**json.loads(row["summary"]))
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1].strip()
        raise RuntimeError(
            f"Ray gave the work up: {why} (All machines have to have this covary, and to see "
            f"{kept.resolve().parent} and the files under the same paths; a file whose worker ends "
            f"{_TRIES} times is not tried again.) --resume goes on with what is left."
        ) from error
    finally:
        if is_own:
            ray.shutdown()


def actors(files: int) -> int:
    """How many actors there are: as many as slots of CPUs but one, or as files if they are fewer.

    One slot is left for what Ray itself runs: a pool of actors that has all of them waits for ever
    as soon as anything else, such as reading, needs one. Where there is just one slot, one actor
    takes it: it reads its files itself.
    """
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    slots = int(resources.get("CPU", 0))
    if not slots:
        raise RuntimeError(
            "The cluster of Ray has no CPU to predict with. Start it with some: ray start --head "
            "--num-cpus 4."
        )
    return max(1, min(slots - 1, files))
