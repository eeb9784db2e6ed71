"""Operations in asyncio: awaiting, cancelling, loops that come and go."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import weakref
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from conftest import LIMIT, Pair, connected, open_files, pattern, run_python

import multirail

BIG = 128 << 20

T = TypeVar("T")

needs_task_group = pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is of Python 3.11")


def run(main: Coroutine[Any, Any, T], debug: bool | None = None) -> T:
    """Runs a coroutine that must not hang."""

    async def limited() -> T:
        return await asyncio.wait_for(main, LIMIT)

    return asyncio.run(limited(), debug=debug)


async def awaited(operation: multirail.Operation[T]) -> T:
    """A coroutine that awaits an operation, for what takes no future."""
    return await operation


@pytest.mark.parametrize("debug", [False, True])
def test_await_returns_the_result(pair: Pair, debug: bool) -> None:
    src, dst, remote = pair.regions(5 << 20)
    src.write_bytes(pattern(5 << 20))

    async def main() -> None:
        assert (await pair.ab.write(src, remote)).bytes == 5 << 20
        operation = pair.ab.read(src, remote)
        assert (await operation).bytes == (await operation).bytes == 5 << 20
        assert await pair.ab.write_imm(1) is not None
        assert await pair.ba.imm(1).expect(1) is None

    run(main(), debug)
    assert dst.read_bytes() == pattern(5 << 20)


def test_await_raises_what_the_operation_failed_with(pair: Pair) -> None:
    src, _dst, remote = pair.regions(BIG)

    async def main() -> None:
        with pytest.raises(multirail.DeadlineExceeded):
            await pair.ab.write(src, remote, deadline=1e-6)
        with pytest.raises(multirail.NotFound):
            await pair.ab.region("nothing of this name")

    run(main())


def test_a_thousand_operations_at_once(pair: Pair) -> None:
    src, dst, remote = pair.regions(1000 * 64)
    src.write_bytes(pattern(1000 * 64))

    async def main() -> None:
        imms = [pair.ba.imm(number).expect(1) for number in range(1000)]
        writes = [pair.ab.write(src, remote, 64, at * 64, at * 64, imm=at) for at in range(1000)]
        assert [outcome.bytes for outcome in await asyncio.gather(*writes)] == [64] * 1000
        assert await asyncio.gather(*imms) == [None] * 1000

    run(main())
    assert dst.read_bytes() == pattern(1000 * 64)


def test_a_cancelled_task_ends_only_when_no_byte_can_move(pair: Pair) -> None:
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(b"\xff" * BIG)

    async def main() -> None:
        for _ in range(100):
            operation = pair.ab.write(src, remote)
            task = asyncio.create_task(awaited(operation))
            await asyncio.sleep(0)
            if task.cancel("enough"):
                break
            # This thread was held up for as long as the write took.
            await task
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled() and operation.done()
        before = dst.read_bytes()
        await pair.ab.drain()
        assert dst.read_bytes() == before

    run(main())


def test_a_task_that_was_cancelled_before_it_started(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        task = asyncio.create_task(awaited(operation))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not operation.done()

    run(main())


def test_cancelling_the_operation_cancels_the_task_that_awaits_it(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.b.recv(pair.b.alloc(64))
        task = asyncio.create_task(awaited(operation))
        await asyncio.sleep(0)
        assert operation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert operation.cancelled() and operation.cancel() is False

    run(main())


def test_a_cancelled_operation_that_nobody_awaited_raises_cancelled(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.b.recv(pair.b.alloc(64))
        assert operation.cancel()
        with pytest.raises(multirail.Cancelled):
            await operation

    run(main())


def test_wait_for_ends_in_time_and_cancels(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(operation, 0.01)
        assert operation.cancelled()
        receive = pair.b.recv(pair.b.alloc(64))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(awaited(receive), 0.01)
        assert receive.done()
        pair.ab.write_imm(1).detach()
        assert await asyncio.wait_for(pair.ba.imm(1).expect(1), LIMIT) is None

    run(main())


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.timeout is of Python 3.11")
def test_timeout_cancels(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await operation
        assert operation.cancelled()

    run(main())


def test_wait_and_as_completed_and_shield(pair: Pair) -> None:
    async def main() -> None:
        first, second = pair.ba.imm(1).expect(1), pair.ba.imm(2).expect(1)
        pair.ab.write_imm(2).detach()
        done, waiting = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        assert (done, waiting) == ({second}, {first})
        done, waiting = await asyncio.wait({first}, timeout=0.01)
        assert (done, waiting) == (set(), {first})

        shielded = asyncio.create_task(awaited(asyncio.shield(first)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        shielded.cancel()
        with pytest.raises(asyncio.CancelledError):
            await shielded
        assert not first.done()
        pair.ab.write_imm(1).detach()
        assert await first is None

        third, fourth = pair.ba.imm(3).expect(1), pair.ba.imm(4).expect(1)
        completed = iter(asyncio.as_completed([third, fourth]))
        pair.ab.write_imm(4).detach()
        await next(completed)
        assert fourth.done() and not third.done()
        pair.ab.write_imm(3).detach()
        await next(completed)
        assert third.done()

    run(main())


def test_gather_collects_failures(pair: Pair) -> None:
    async def main() -> None:
        found = pair.ab.region("nothing")
        results = await asyncio.gather(pair.ab.write_imm(1), found, return_exceptions=True)
        assert isinstance(results[1], multirail.NotFound)
        with pytest.raises(multirail.NotFound):
            await asyncio.gather(pair.ab.write_imm(1), pair.ab.region("nothing"))

    run(main())


GATHER = """
    import asyncio, sys, multirail
    a, b = multirail.Fabric("loopback"), multirail.Fabric("loopback")
    ab, ba = a.connect_local(b)
    async def main():
        first, second = ba.imm(1).expect(1), ba.imm(2).expect(1)
        gathered = asyncio.gather(first, second, return_exceptions=RETURN)
        await asyncio.sleep(0)
        CANCEL
        done, waiting = await asyncio.wait({gathered}, timeout=20)
        assert done, "gather hangs"
        try:
            results = gathered.result()
        except asyncio.CancelledError:
            print("cancelled")
        else:
            print([type(result).__name__ for result in results])
        second.cancel()
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("cancel", "return_exceptions", "output"),
    [
        ("gathered.cancel()", False, "cancelled"),
        ("gathered.cancel()", True, "cancelled"),
        ("first.cancel()", False, "cancelled"),
        ("first.cancel(); ab.write_imm(2).detach()", True, "['CancelledError', 'NoneType']"),
    ],
)
def test_gather_and_cancelled_operations(cancel: str, return_exceptions: bool, output: str) -> None:
    done = run_python(GATHER.replace("RETURN", str(return_exceptions)).replace("CANCEL", cancel))
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", output)


@needs_task_group
def test_a_task_group_cancels_the_others_when_one_fails(pair: Pair) -> None:
    src, dst, remote = pair.regions(BIG)

    async def main() -> None:
        write, never = pair.ab.write(src, remote), pair.b.recv(pair.b.alloc(64))
        with pytest.raises(ExceptionGroup) as caught:  # noqa: F821
            async with asyncio.TaskGroup() as group:
                group.create_task(awaited(write))
                group.create_task(awaited(never))
                group.create_task(awaited(pair.ab.region("nothing")))
        assert caught.group_contains(multirail.NotFound)
        assert write.done() and never.done()
        before = dst.read_bytes()
        await pair.ab.drain()
        assert dst.read_bytes() == before

    run(main())


def test_two_tasks_await_one_operation(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        tasks = [asyncio.create_task(awaited(operation)) for _ in range(5)]
        await asyncio.sleep(0)
        pair.ab.write_imm(1).detach()
        assert await asyncio.gather(*tasks) == [None] * 5

    run(main())


def test_callbacks_run_in_their_context_and_can_be_removed(pair: Pair) -> None:
    number: contextvars.ContextVar[int] = contextvars.ContextVar("number", default=0)

    async def main() -> None:
        seen: list[tuple[object, int]] = []
        all_called = asyncio.Event()
        operation = pair.ba.imm(1).expect(1)
        context = contextvars.copy_context()
        context.run(number.set, 7)

        def called(of: object) -> None:
            seen.append((of, number.get()))
            if len(seen) == 2:
                all_called.set()

        def removed(of: object) -> None:
            seen.append((of, -1))

        operation.add_done_callback(called, context=context)
        operation.add_done_callback(removed)
        operation.add_done_callback(removed)
        assert operation.remove_done_callback(removed) == 2
        assert operation.remove_done_callback(removed) == 0
        assert operation.get_loop() is asyncio.get_running_loop()
        pair.ab.write_imm(1).detach()
        await operation
        operation.add_done_callback(called)
        await all_called.wait()
        assert seen == [(operation, 7), (operation, 0)]

    run(main())


def test_wait_in_a_thread_and_await_in_the_loop(pair: Pair) -> None:
    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        task = asyncio.create_task(awaited(operation))
        waits = [asyncio.create_task(asyncio.to_thread(operation.wait, LIMIT)) for _ in range(2)]
        await asyncio.sleep(0.1)
        await pair.ab.write_imm(1)
        assert await task is None
        assert await asyncio.gather(*waits) == [None, None]

    run(main())


def test_loops_one_after_the_other(pair: Pair) -> None:
    src, _dst, remote = pair.regions(1 << 20)

    async def main() -> None:
        assert (await pair.ab.write(src, remote, imm=1)).bytes == 1 << 20
        await pair.ba.imm(1).expect(1)

    for _ in range(20):
        run(main())


def test_loops_in_several_threads(pair: Pair) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        src, dst, remote = pair.regions(64 << 10)

        async def main() -> None:
            for round_ in range(100):
                data = pattern(64 << 10, number * 100 + round_)
                src.write_bytes(data)
                await asyncio.gather(pair.ab.write(src, remote, imm=number), pair.ba.imm(number).expect(round_ + 1))
                assert dst.read_bytes() == data

        try:
            run(main())
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_an_operation_of_another_loop_that_runs_is_refused(pair: Pair) -> None:
    async def bind(operation: multirail.Operation[None]) -> asyncio.AbstractEventLoop:
        return operation.get_loop()

    async def refused(operation: multirail.Operation[None]) -> None:
        with pytest.raises(RuntimeError, match="loop"):
            await operation

    operation = pair.ba.imm(1).expect(1)
    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(bind(operation)) is loop
        run(refused(operation))
        pair.ab.write_imm(1).detach()
        assert loop.run_until_complete(awaited(operation)) is None
    finally:
        loop.close()


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_operation_of_a_closed_loop_goes_on_in_the_next(pair: Pair, is_kept: bool) -> None:
    operation = pair.ba.imm(1).expect(1)
    loops: list[asyncio.AbstractEventLoop] = []

    async def first() -> None:
        loop = operation.get_loop()
        assert loop is asyncio.get_running_loop()
        if is_kept:
            loops.append(loop)

    async def second() -> None:
        task = asyncio.create_task(awaited(operation))
        # The task waits already when the imm comes.
        await asyncio.sleep(0)
        pair.ab.write_imm(1).detach()
        assert await task is None

    run(first())
    gc.collect()
    run(second())
    assert all(loop.is_closed() for loop in loops)


def test_outside_of_a_loop_the_error_says_what_to_do(pair: Pair) -> None:
    operation = pair.ba.imm(1).expect(1)
    with pytest.raises(RuntimeError, match=r"wait\(\)"):
        operation.__await__().send(None)
    with pytest.raises(RuntimeError, match=r"wait\(\)"):
        operation.add_done_callback(print)
    with pytest.raises(RuntimeError, match=r"wait\(\)"):
        operation.get_loop()


def test_async_with_closes(pair: Pair) -> None:
    async def main() -> None:
        async with multirail.Fabric("loopback") as fabric:
            listener = await fabric.listen()
            accept = asyncio.create_task(awaited(listener.accept()))
            peer = await pair.a.connect(listener.address)
            there = await accept
            assert peer.is_alive and there.is_alive
        assert isinstance(await peer.closed(), multirail.Closed)
        with pytest.raises(multirail.Closed):
            await fabric.listen()

    run(main())


def test_async_for_accepts_peers(pair: Pair) -> None:
    async def main() -> None:
        listener = await pair.a.listen()
        connects = [pair.b.connect(listener.address) for _ in range(3)]
        for connect in connects:
            connect.add_done_callback(lambda _: None)
        accepted = 0
        async for peer in listener:
            assert peer.incarnation == pair.b.incarnation
            accepted += 1
            if accepted == 3:
                break
        assert [peer.is_alive for peer in await asyncio.gather(*connects)] == [True] * 3

    run(main())


def test_closed_loops_leave_no_file_and_no_object(pair: Pair) -> None:
    src, _dst, remote = pair.regions(BIG >> 5)
    loops: list[weakref.ref[asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await asyncio.gather(pair.ab.write(src, remote), pair.ab.write_imm(1))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pair.ba.imm(9).expect(1), 0)

    run(main())
    files = open_files()
    for _ in range(200):
        run(main())
    assert open_files() <= files + 1
    assert sum(loop() is not None for loop in loops) <= 1


def abandoned_loop(pair: Pair) -> weakref.ref[asyncio.AbstractEventLoop]:
    """A loop that is closed while a task of it awaits an operation."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(awaited(pair.ba.imm(77).expect(1)))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    return weakref.ref(loop)


def test_a_loop_that_is_closed_with_operations_under_way_is_freed(pair: Pair) -> None:
    loops = [abandoned_loop(pair) for _ in range(20)]
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1


def test_the_end_of_an_operation_of_a_closed_loop_does_no_harm(pair: Pair) -> None:
    loops = [abandoned_loop(pair) for _ in range(20)]
    gc.collect()
    pair.ab.write_imm(77).wait(LIMIT)
    pair.ba.imm(77).expect(1).wait(LIMIT)
    assert len(loops) == 20


def test_the_fabric_closes_while_tasks_wait() -> None:
    async def main() -> None:
        with connected(notifications=4 << 20) as pair:
            waits = [
                asyncio.create_task(awaited(operation))
                for operation in (
                    pair.ba.imm(1).expect(1),
                    pair.b.recv(pair.b.alloc(64)),
                    pair.b.notifications().next(),
                    pair.b.recv_pool(2, 4096).next(),
                    pair.ba.imm(2).arrivals().next(),
                )
            ]
            await asyncio.sleep(0)
            await pair.b.aclose()
            for result in await asyncio.gather(*waits, return_exceptions=True):
                assert isinstance(result, multirail.Error), result

    run(main())
