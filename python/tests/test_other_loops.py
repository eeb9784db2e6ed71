"""Operations under uvloop, anyio and trio."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from conftest import LIMIT, Pair, pattern

import multirail

BIG = 128 << 20


async def awaited(operation: multirail.Operation[Any]) -> Any:
    return await operation


def test_uvloop(pair: Pair) -> None:
    uvloop = pytest.importorskip("uvloop")
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(pattern(BIG))

    async def main() -> None:
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        outcomes = await asyncio.gather(*(pair.ab.write(src, remote, 4096, at << 12, at << 12) for at in range(500)))
        assert sum(outcome.bytes for outcome in outcomes) == 500 * 4096
        await asyncio.gather(pair.ab.write_imm(1), pair.ba.imm(1).expect(1))
        for _ in range(100):
            task = asyncio.create_task(awaited(pair.ab.write(src, remote)))
            await asyncio.sleep(0)
            if task.cancel():
                break
            # This thread was held up for as long as the write took.
            await task
        with pytest.raises(asyncio.CancelledError):
            await task
        before = dst.read_bytes()
        await pair.ab.drain()
        assert dst.read_bytes() == before
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pair.ba.imm(2).expect(1), 0.01)
        with pytest.raises(multirail.NotFound):
            await pair.ab.region("nothing")

    for _ in range(3):
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(asyncio.wait_for(main(), LIMIT))
        finally:
            loop.close()


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_anyio(pair: Pair, backend: str) -> None:
    anyio = pytest.importorskip("anyio")
    if backend == "trio":
        pytest.importorskip("trio")
    src, dst, remote = pair.regions(BIG)
    src.write_bytes(pattern(BIG))

    async def main() -> None:
        with anyio.fail_after(LIMIT):
            assert (await pair.ab.write(src, remote)).bytes == BIG
            assert dst.read_bytes() == pattern(BIG)
            async with anyio.create_task_group() as group:
                for number in range(20):
                    group.start_soon(awaited, pair.ba.imm(number).expect(1))
                for number in range(20):
                    await pair.ab.write_imm(number)
            never = pair.ba.imm(99).expect(1)
            with anyio.move_on_after(0.05) as scope:
                await never
            assert scope.cancelled_caught and never.cancelled()
            operation = pair.ab.write(src, remote)
            async with anyio.create_task_group() as group:
                group.start_soon(awaited, operation)
                await anyio.sleep(0)
                group.cancel_scope.cancel()
            assert operation.done()
            before = dst.read_bytes()
            await pair.ab.drain()
            assert dst.read_bytes() == before
            with pytest.raises(multirail.NotFound):
                await pair.ab.region("nothing")
            async with multirail.Fabric("loopback") as fabric:
                assert (await fabric.listen()).address

    anyio.run(main, backend=backend)


def test_trio(pair: Pair) -> None:
    trio = pytest.importorskip("trio")

    async def main() -> None:
        operation = pair.ba.imm(1).expect(1)
        start = time.monotonic()
        with trio.move_on_after(0.05):
            await operation
        assert operation.done() and time.monotonic() - start < LIMIT
        async with trio.open_nursery() as nursery:
            nursery.start_soon(awaited, pair.ba.imm(2).expect(1))
            await pair.ab.write_imm(2)
        with pytest.raises(multirail.NotFound):
            await pair.ab.region("nothing")

    trio.run(main)
