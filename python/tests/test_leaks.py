"""Many operations and many peers leave nothing behind.

`MULTIRAIL_TEST_SCALE=10` runs 1,000,000 operations, `MULTIRAIL_TEST_SCALE=20` 10,000 connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
from conftest import LIMIT, SCALE, Pair, connected, open_files, pattern, resident

import multirail

MIB = 1 << 20


def check_steady(
    rounds: int, work: Callable[[], None], most_resident: int = 8 * MIB, most_traced: int = 64 << 10
) -> None:
    """Runs `work` until all pools are filled, then `rounds` times: files, objects and memory must not grow."""
    for _ in range(max(rounds // 10, 2)):
        work()
    files, before = open_files(), resident()
    tracemalloc.start()
    try:
        work()
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0]
        # Tracing slows Python down, so half of the rounds go without it.
        for _ in range(rounds // 2):
            work()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    for _ in range(rounds - rounds // 2):
        work()
    assert grown < most_traced, f"Python's objects have grown by {grown} bytes"
    assert open_files() <= files + 2
    assert resident() - before < most_resident, f"the process has grown by {resident() - before} bytes"


def test_operations_that_are_waited_for(pair: Pair) -> None:
    src, dst, remote = pair.regions(1 << 16)
    src.write_bytes(pattern(1 << 16))

    def work() -> None:
        for _ in range(1000):
            pair.ab.write(src, remote, 64).wait(LIMIT)
            pair.ab.read(src, remote, 40_000).wait(LIMIT)

    check_steady(50 * SCALE, work)
    assert dst.read_bytes(0, 64) == pattern(64)


def test_operations_that_are_awaited(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 16)
    counter = pair.ba.imm(1)

    async def main() -> None:
        for _ in range(4):
            writes = [pair.ab.write(src, remote, imm=1) for _ in range(250)]
            await asyncio.gather(counter.expect(250), *writes)
            assert counter.try_take(250)

    check_steady(30 * SCALE, lambda: asyncio.run(main()), most_traced=128 << 10)


def test_operations_of_every_other_kind(pair: Pair) -> None:
    src, dst, remote = pair.regions(1 << 16)
    numbers = np.arange(16)
    arrivals, notifications = pair.ba.imm(2).arrivals(), pair.b.notifications()
    pool = pair.b.recv_pool(4, 64)
    dst_publish = pair.b.alloc(64)
    pair.b.publish("name", dst_publish)

    def work() -> None:
        for _ in range(50):
            pair.ab.write_pages(src, numbers, remote, numbers, 4096, imm=2, notify=b"pages").wait(LIMIT)
            arrivals.next().wait(LIMIT)
            assert notifications.next().wait(LIMIT).data == b"pages"
            prepared = pair.ab.prepare_read_pages(src, [0], remote, [1], 4096)
            prepared.post().wait(LIMIT)
            local, there = multirail.LocalList(), multirail.RemoteList()
            local.extend(src, numbers, 1)
            there.extend(remote, numbers, 1)
            operation = pair.ab.write_list(local, there)
            operation.wait(LIMIT)
            assert operation.receipt() is not None
            send = pair.ab.send(src, 32)
            assert len(pool.next().wait(LIMIT)) == 32
            send.wait(LIMIT)
            len(pair.ab.region("name").wait(LIMIT))
            receive = pair.b.recv(dst)
            receive.cancel()
            assert isinstance(receive.exception() if receive.done() else None, (multirail.Cancelled, type(None)))
            with contextlib.suppress(multirail.Cancelled):
                receive.wait(LIMIT)
            with contextlib.suppress(multirail.OutOfBounds):
                pair.ab.write(src, remote, 1 << 20)

    check_steady(20 * SCALE, work)


def test_regions(pair: Pair) -> None:
    def work() -> None:
        for _ in range(5):
            owner = np.zeros(4096, np.uint8)
            gone = weakref.ref(owner)
            region, allocated = pair.b.register(owner), pair.b.alloc(64 << 10)
            view = allocated.as_numpy()
            view[:] = 1
            pair.remote(region), pair.remote(allocated)
            memoryview(allocated.as_buffer())
            region.revoke().wait(LIMIT)
            del owner, region, allocated, view
            gc.collect()
            assert gone() is None

    check_steady(10 * SCALE, work, most_resident=16 * MIB)


def test_connects_over_a_listener() -> None:
    with connected() as pair:
        listener = pair.a.listen().wait(LIMIT)

        def work() -> None:
            for _ in range(10):
                accept, connect = listener.accept(), pair.b.connect(listener.address)
                there, here = connect.wait(LIMIT), accept.wait(LIMIT)
                there.write_imm(1).wait(LIMIT)
                here.imm(1).expect(1).wait(LIMIT)
                there.disconnect()
                here.closed().wait(LIMIT)

        check_steady(25 * SCALE, work, most_resident=16 * MIB)


def test_connects_within_the_process() -> None:
    with connected() as pair:

        def work() -> None:
            for _ in range(10):
                there, here = pair.a.connect_local(pair.b)
                there.write_imm(1).wait(LIMIT)
                here.imm(1).expect(1).wait(LIMIT)
                there.disconnect()
                here.closed().wait(LIMIT)

        check_steady(25 * SCALE, work, most_resident=16 * MIB)


def test_fabrics() -> None:
    def work() -> None:
        with multirail.Fabric("loopback", notifications=4 << 20) as fabric:
            there, here = fabric.connect_local(fabric)
            there.write_imm(1).wait(LIMIT)
            here.imm(1).expect(1).wait(LIMIT)

    check_steady(30 * SCALE, work, most_resident=16 * MIB)
