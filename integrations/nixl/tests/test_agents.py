"""Many agents, one after the other: nothing is left of them."""

from __future__ import annotations

import gc
import os
import pathlib

import pytest
from nixl_pairs import PAGE, finish, make_agent, next_name, pair, pattern, register

pytestmark = pytest.mark.multirail_only

#: Of agents. `MULTIRAIL_TEST_SCALE=40` makes it 10,000.
HUNDREDS = int(2.5 * float(os.environ.get("MULTIRAIL_TEST_SCALE", "1")))
MIB = 1 << 20


def held() -> tuple[int, int, int]:
    """The bytes in memory, the open descriptors and the threads of this process."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    threads = pathlib.Path("/proc/self/task")
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")), len(list(threads.iterdir()))


def a_hundred() -> None:
    memory = pattern(4 * PAGE, 1)
    for _ in range(98):
        agent = make_agent(next_name("lone"))
        registered = register(agent, memory)
        agent.deregister_memory(registered)
        del agent, registered
    with pair(4 * PAGE) as it:
        handle = it.whole("WRITE", b"note")
        finish(it.a, handle)
        it.a.release_xfer_handle(handle)
        del handle
    del it


def test_nothing_is_left_of_agents() -> None:
    a_hundred()
    memory, descriptors, threads = held()
    for _ in range(HUNDREDS - 1):
        a_hundred()
    later = held()
    assert later[1:] == (descriptors, threads), (later, descriptors, threads)
    # The allocator keeps freed memory of the threads that have ended: what it keeps varies by 14 MiB between two looks.
    assert later[0] <= memory + 32 * MIB, (later[0] / MIB, memory / MIB)
