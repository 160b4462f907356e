"""The two switches: what they hold for, and for whom."""

import asyncio
import contextvars
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import covary
from covary.settings import covariance_is_supervised, values_are_checked

SWITCHES = [
    (lambda: covary.supervise_covariance(), covariance_is_supervised, False),
    (lambda: covary.check_values(False), values_are_checked, True),
]
both = pytest.mark.parametrize(("turn", "now", "default"), SWITCHES, ids=["supervise", "check"])


@both
def test_blocks_nest_and_end_with_an_error(turn, now, default):
    with turn():
        assert now() is not default
        with pytest.raises(ZeroDivisionError), turn():
            _ = 1 / 0
        assert now() is not default
    assert now() is default


def test_the_inner_block_counts_and_switches_do_not_touch_each_other():
    with covary.supervise_covariance(), covary.check_values(False):
        with covary.supervise_covariance(False):
            assert not covariance_is_supervised()
            assert not values_are_checked()
        assert covariance_is_supervised()
    assert not covariance_is_supervised()
    assert values_are_checked()


@both
def test_asyncio_tasks_do_not_see_the_blocks_of_others(turn, now, default):
    async def inside(entered, seen):
        with turn():
            entered.set()
            await seen.wait()  # the other task runs while this block is open
            assert now() is not default
        assert now() is default

    async def outside(entered, seen):
        await entered.wait()
        found = now()
        seen.set()
        return found

    async def main():
        events = asyncio.Event(), asyncio.Event()
        _, found = await asyncio.gather(inside(*events), outside(*events))
        return found

    assert asyncio.run(main()) is default
    assert now() is default


def test_interleaved_tasks_train_each_with_its_own_switch():
    """Forward passes take turns: one task's gradients reach the covariance, the other's do not."""
    net = covary.mlp([3, 4, 2])

    async def train(enabled):
        found = []
        for _ in range(3):
            with covary.supervise_covariance(enabled):
                await asyncio.sleep(0)
                found.append(net(torch.ones(1, 3)).variance.requires_grad)
                await asyncio.sleep(0)
        return found

    async def main():
        return await asyncio.gather(train(True), train(False))

    assert asyncio.run(main()) == [[True] * 3, [False] * 3]


@both
def test_a_task_keeps_the_switch_it_was_created_with(turn, now, default):
    async def later():
        await asyncio.sleep(0)
        return now()

    async def main():
        with turn():
            task = asyncio.create_task(later())
        assert now() is default
        return await task, await asyncio.to_thread(now)

    assert asyncio.run(main()) == (not default, default)


@both
def test_a_generator_left_open_inside_a_block_leaves_nothing_behind(turn, now, default):
    def numbers():
        with turn():
            yield now()

    with turn():
        left_open = numbers()
        next(left_open)
    left_open.close()  # only now, after the block that it was opened in
    assert now() is default


@both
def test_a_generator_opened_inside_a_block_goes_on_without_it(turn, now, default):
    def found():
        while True:
            yield now()

    with turn():
        generator = found()
        assert next(generator) is not default
    assert next(generator) is default


@both
def test_a_generator_closed_in_another_context_leaves_that_alone(turn, now, default):
    def numbers():
        with turn():
            yield

    generator = numbers()
    contextvars.copy_context().run(next, generator)
    assert now() is default
    generator.close()
    assert now() is default


@both
def test_threads_start_with_the_defaults(turn, now, default):
    with turn(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(now).result() is default

        def block():
            with turn():
                return now()

        assert pool.submit(block).result() is not default
        assert pool.submit(now).result() is default


@pytest.fixture
def counted():
    """A compiled network, and how many graphs it has been compiled to."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    net = torch.compile(covary.mlp([3, 4, 2]), fullgraph=True, backend=backend)
    return lambda: net(torch.ones(2, 3)).variance.requires_grad, graphs


def test_a_compiled_network_sees_a_switch_turned_in_any_context(counted):
    supervised, graphs = counted
    assert not supervised()
    with covary.supervise_covariance():
        assert supervised()
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(supervised).result()
    assert not supervised()

    async def task(enabled):
        with covary.supervise_covariance(enabled):
            await asyncio.sleep(0)
            return supervised()

    async def main():
        return await asyncio.gather(task(True), task(False))

    assert asyncio.run(main()) == [True, False]
    with covary.check_values(False):
        assert not supervised()
    assert len(graphs) <= 3  # on, off, and off by a block; no more for every turn


def test_a_block_within_a_compiled_function():
    net, x = covary.mlp([3, 4, 2]), torch.ones(2, 3)

    def variances(x):
        with covary.supervise_covariance():
            inner = net(x).variance
            with covary.supervise_covariance(False):
                innermost = net(x).variance
        return inner, innermost, net(x).variance

    compiled = torch.compile(variances, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert [each.requires_grad for each in compiled(x)] == [True, False, False]
        with covary.supervise_covariance():
            assert [each.requires_grad for each in compiled(x)] == [True, False, True]
        assert not covariance_is_supervised()
