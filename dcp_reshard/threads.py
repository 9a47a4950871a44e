"""A function over many items on a few threads: the first error stops the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

__all__ = ["run_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items handed to the pool ahead of its threads: a bound on futures, whatever the number of items.
_AHEAD = 4


def run_threads(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    threads: int,
    on_result: Callable[[Result], None],
) -> None:
    """Call `function` for each item on some threads, and `on_result` for each result in this one.

    On an error, or an interrupt in this thread, no further item is started, those under way are
    waited for (they write to memory that the caller owns), and the error is raised.

    Args:
        function: Called once per item, by several threads at once.
        items: What to call it for, started in this order.
        threads: Number of threads. With 1, everything runs in this thread.
        on_result: Called in this thread, in the order in which results come.
    """
    if threads == 1:
        for item in items:
            on_result(function(item))
        return
    todo = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp_reshard") as pool:
        pending: set[Future[Result]] = set()
        try:
            while True:
                free = threads * _AHEAD - len(pending)
                pending |= {pool.submit(function, item) for item in itertools.islice(todo, free)}
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    on_result(future.result())
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
