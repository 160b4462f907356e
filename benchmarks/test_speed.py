"""What moments cost, as ratios; `make bench` runs this and prints and stores the ratios."""

from __future__ import annotations

import pytest

from benchmarks.steps import BATCH, WIDTHS, batch_of, build, training_step

KINDS = ["plain", "diagonal", "shared", "tracked", "full"]


def run(benchmark, kind: str, widths: list[int], batch: int, rounds: int) -> None:
    x, y = batch_of(batch, widths[0])
    step = training_step(build(kind, widths), x, y)
    benchmark.pedantic(step, rounds=rounds, iterations=1, warmup_rounds=2)


@pytest.mark.benchmark(group="training step")
@pytest.mark.parametrize("kind", ["literal", *KINDS])
def test_training_step(benchmark, kind):
    benchmark.extra_info.update(row=kind)
    run(benchmark, kind, WIDTHS, BATCH, rounds={"literal": 5, "full": 20}.get(kind, 100))


@pytest.mark.benchmark(group="width")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 128, 256, 512, 1024])
def test_width(benchmark, width, kind):
    benchmark.extra_info.update(row=width, column=kind)
    rounds = 3 if kind == "full" and width > 256 else 20
    run(benchmark, kind, [width, width, width, 10], 32, rounds)


@pytest.mark.benchmark(group="batch")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [8, 32, 128, 512])
def test_batch(benchmark, batch, kind):
    benchmark.extra_info.update(row=batch, column=kind)
    run(benchmark, kind, WIDTHS, batch, rounds=5 if kind == "full" else 20)
