"""Items on threads: each once, the results here, the first error ends it, and nothing is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from dcp_reshard.threads import run_threads

THREADS = [1, 2, 5]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Every thread has ended when a call returns or raises."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_each_item_is_done_once(threads: int, count: int) -> None:
    """Results come to the calling thread; items are started in their order."""
    started: list[int] = []
    results: list[int] = []
    here = threading.current_thread()

    def square(item: int) -> int:
        started.append(item)
        assert threads == 1 or threading.current_thread() is not here
        return item * item

    def take(result: int) -> None:
        assert threading.current_thread() is here
        results.append(result)

    run_threads(square, iter(range(count)), threads=threads, on_result=take)
    assert sorted(results) == [i * i for i in range(count)]
    assert sorted(started) == list(range(count))
    if threads == 1:
        assert started == list(range(count))


@pytest.mark.parametrize("threads", [2, 5])
def test_all_threads_work_at_the_same_time(threads: int) -> None:
    """Items that wait for each other go on as soon as there are as many as threads."""
    barrier = threading.Barrier(threads)
    run_threads(
        lambda _: barrier.wait(20), range(3 * threads), threads=threads, on_result=lambda _: None
    )


@pytest.mark.parametrize("threads", THREADS)
def test_items_are_taken_when_they_are_needed(threads: int) -> None:
    """An endless supply of items is drawn from no further than a few items per thread ahead."""
    drawn = itertools.count()
    last = 0
    done = 0

    def items() -> Iterator[int]:
        nonlocal last
        for last in drawn:
            assert last - done <= 4 * threads
            yield last

    def take(item: int) -> None:
        nonlocal done
        done += 1
        if done == 100:
            raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration):
        run_threads(lambda item: item, items(), threads=threads, on_result=take)


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_of_an_item_ends_it(threads: int, error: type[BaseException]) -> None:
    """The error is raised, hardly an item more is started, and those under way have ended."""
    running: set[int] = set()
    started: list[int] = []

    def work(item: int) -> int:
        started.append(item)
        running.add(item)
        try:
            if item == 7:
                raise error("item 7")
        finally:
            running.discard(item)
        return item

    with pytest.raises(error, match="item 7"):
        run_threads(work, range(10_000), threads=threads, on_result=lambda _: None)
    assert not running
    assert 7 in started
    assert max(started) <= 7 + 5 * threads


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_here_waits_for_what_is_under_way(
    threads: int, error: type[BaseException]
) -> None:
    """An interrupt leaves no thread that writes into memory which the caller may free."""
    running: set[int] = set()
    go = threading.Event()

    def work(item: int) -> int:
        running.add(item)
        if item:
            assert threads == 1 or go.wait(20)
        running.discard(item)
        return item

    def take(item: int) -> None:
        go.set()
        raise error

    with pytest.raises(error):
        run_threads(work, range(100), threads=threads, on_result=take)
    assert not running


@pytest.mark.parametrize("threads", THREADS)
def test_an_error_of_the_items_ends_it(threads: int) -> None:
    """What goes wrong while the next item is made is raised like any other error."""

    def items() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no fourth item")

    with pytest.raises(LookupError, match="no fourth item"):
        run_threads(lambda item: item, items(), threads=threads, on_result=lambda _: None)
