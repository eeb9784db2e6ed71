"""Several threads use the same objects."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from conftest import LIMIT, Pair, check_clean, pattern, run_python

import multirail


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work` in threads, and raises the first failure."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def test_threads_share_a_peer(pair: Pair) -> None:
    src, dst, remote = pair.regions(8 << 16)

    def work(number: int) -> None:
        at = number << 16
        for round_ in range(100):
            data = pattern(1 << 16, number * 31 + round_)
            src.write_bytes(data, at)
            pair.ab.write(src, remote, 1 << 16, at, at).wait(LIMIT)
            assert dst.read_bytes(at, 1 << 16) == data

    in_threads(8, work)


def test_threads_wait_for_one_operation(pair: Pair) -> None:
    operation = pair.ba.imm(1).expect(1)
    ready = threading.Barrier(5)

    def work(number: int) -> None:
        ready.wait(LIMIT)
        if number == 4:
            pair.ab.write_imm(1).wait(LIMIT)
        assert operation.wait(LIMIT) is None and operation.done()

    in_threads(5, work)


def test_another_thread_asks_and_cancels_while_one_waits(pair: Pair) -> None:
    for make in (lambda: pair.ba.imm(1).expect(1), lambda: pair.b.recv(pair.b.alloc(64))):
        operation = make()
        started = threading.Event()

        def work(
            number: int, operation: multirail.Operation[object] = operation, started: threading.Event = started
        ) -> None:
            if number == 0:
                started.set()
                with pytest.raises(multirail.Cancelled):
                    operation.wait(LIMIT)
                return
            started.wait(LIMIT)
            start = time.monotonic()
            for _ in range(5):
                assert not operation.done()
                repr(operation)
            assert operation.cancel()
            # One look may last as long as the waiter looks for signals: 50 ms.
            assert time.monotonic() - start < 5

        in_threads(2, work)


def test_the_gil_is_free_during_waits_and_copies(pair: Pair) -> None:
    length = 64 << 20
    region = pair.a.alloc(length)
    data = bytes(length)
    stop = threading.Event()
    turns = 0

    def work(number: int) -> None:
        nonlocal turns
        if number == 0:
            try:
                with pytest.raises(multirail.DeadlineExceeded):
                    waiting = pair.ba.imm(1).expect(1)
                    waiting.wait(0.2)
                region.write_bytes(data)
                region.read_bytes()
            finally:
                stop.set()
        while not stop.is_set():
            turns += 1

    in_threads(2, work)
    assert turns > 1000


def test_threads_take_from_one_stream(pair: Pair) -> None:
    counter = pair.ba.imm(1)
    taken = [0] * 4

    def work(number: int) -> None:
        if number == 4:
            for _ in range(400):
                pair.ab.write_imm(1).wait(LIMIT)
            return
        end = time.monotonic() + LIMIT
        while sum(taken) < 400 and time.monotonic() < end:
            taken[number] += counter.try_take()

    in_threads(5, work)
    assert sum(taken) == 400 and counter.count == 0


def test_threads_open_connect_and_close() -> None:
    def work(_number: int) -> None:
        for _ in range(10):
            with multirail.Fabric("loopback") as a, multirail.Fabric("loopback") as b:
                ab, ba = a.connect_local(b)
                ab.write_imm(1).wait(LIMIT)
                ba.imm(1).expect(1).wait(LIMIT)

    in_threads(4, work)


def test_a_fabric_closes_while_threads_use_it(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 20)
    under_way = threading.Barrier(4)

    def work(number: int) -> None:
        under_way.wait(LIMIT)
        if number == 3:
            pair.a.close()
            return
        with pytest.raises(multirail.Closed):
            while True:
                pair.ab.write(src, remote).wait(LIMIT)

    in_threads(4, work)


def test_threads_share_a_list() -> None:
    program = """
        import threading
        import numpy as np
        import multirail
        with multirail.Fabric("loopback") as fabric:
            region, pieces = fabric.alloc(4096), multirail.LocalList()
            offsets = np.zeros(20_000, np.uint32)
            def extend():
                for _ in range(20):
                    pieces.extend(region, offsets, 8)
            thread = threading.Thread(target=extend, daemon=True)
            thread.start()
            appended = 0
            while thread.is_alive():
                pieces.append(region, 0, 8)
                appended += len(pieces) > 0
            assert len(pieces) == 400_000 + appended
    """
    check_clean(run_python(program))


def test_the_pages_of_an_array_that_changes_are_checked(pair: Pair) -> None:
    src, dst, remote = pair.regions(1 << 16)
    numbers = np.zeros(256, np.uint32)
    stop = threading.Event()

    def work(number: int) -> None:
        if number == 0:
            while not stop.is_set():
                numbers[:] = 2**32 - 1
                numbers[:] = 0
            return
        try:
            for _ in range(300):
                try:
                    pair.ab.write_pages(src, numbers, remote, numbers, 256).wait(LIMIT)
                except multirail.OutOfBounds:
                    continue
        finally:
            stop.set()

    in_threads(2, work)
    assert dst.read_bytes() == bytes(1 << 16)
