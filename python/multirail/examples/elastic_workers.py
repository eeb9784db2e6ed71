"""Workers come and go, and one of them is killed; the others go on.

The coordinator writes tasks into each worker's inbox, and each worker writes its answers back. One worker gets SIGKILL
while it works on a task: its operations end with ``PeerDied``, and nobody else's do. Another worker gets the task. A
new one then joins, and takes its share. At the end all leave in order, which the coordinator sees as ``Closed``.

    python -m multirail.examples.elastic_workers
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

import multirail
from multirail.errors import Closed, Error, PeerDied

SIZE = 256 << 10
"""The bytes of a task, and of its answer."""
TASKS = 30
"""Tasks before the new worker joins, and as many after."""
WORKERS = 3
KILL_AFTER = 4
"""The number of answers after which the first worker is killed."""
TASK, ANSWER = 1, 2
"""The imms that say that a task or an answer has arrived."""
LIMIT = 60.0
"""Seconds for any step."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def task(number: int) -> Bytes:
    """A task: its number in the first 8 bytes, and bytes that follow from it."""
    data = np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)
    data[:8].view(np.uint64)[0] = number
    return data


def answer(data: Bytes) -> Bytes:
    return np.bitwise_not(data)


# ---- a worker: no event loop, it waits ----


def worker(pipe: Any) -> None:
    with multirail.Fabric() as fabric:
        inbox, outbox = np.zeros(SIZE, np.uint8), np.zeros(SIZE, np.uint8)
        fabric.publish("inbox", fabric.register(inbox, "write"))
        source = fabric.register(outbox, "local")
        address, name = pipe.recv()
        coordinator = fabric.connect(address).wait(LIMIT)
        target = coordinator.region(name).wait(LIMIT)
        tasks = coordinator.imm(TASK).arrivals()
        while True:
            tasks.next().wait(LIMIT)
            number = int(inbox[:8].view(np.uint64)[0])
            if number == 0:
                return
            if not np.array_equal(inbox, task(number)):
                raise SystemExit(f"task {number}: the bytes differ")
            outbox[:] = answer(inbox)
            coordinator.write(source, target, imm=ANSWER).wait(LIMIT)


# ---- the coordinator ----


@dataclass
class Worker:
    process: BaseProcess
    peer: multirail.Peer
    answers: Bytes
    """The worker writes its answers here."""
    is_victim: bool
    answered: set[int] = field(default_factory=set)


Tasks = asyncio.Queue[int]


async def join(fabric: multirail.Fabric, listener: multirail.Listener, name: str, is_victim: bool = False) -> Worker:
    """Starts a worker, and waits until it has connected."""
    answers = np.zeros(SIZE, np.uint8)
    fabric.publish(name, fabric.register(answers, "write"))
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=worker, args=(theirs,), daemon=True)
    process.start()
    pipe.send((listener.address, name))
    peer = await asyncio.wait_for(listener.accept(), LIMIT)
    return Worker(process, peer, answers, is_victim)


async def feed(fabric: multirail.Fabric, worker: Worker, tasks: Tasks) -> Error:
    """Gives a worker task after task; 0 is the last one. Returns how the worker has left."""
    outbox = np.zeros(SIZE, np.uint8)
    source = fabric.register(outbox, "local")
    arrivals = worker.peer.imm(ANSWER).arrivals()
    target = await asyncio.wait_for(worker.peer.region("inbox"), LIMIT)
    while number := await tasks.get():
        try:
            outbox[:] = task(number)
            await worker.peer.write(source, target, imm=TASK)
            if worker.is_victim and len(worker.answered) >= KILL_AFTER:
                worker.process.kill()
            await asyncio.wait_for(arrivals.next(), LIMIT)
        except PeerDied as died:
            tasks.put_nowait(number)
            return died
        finally:
            tasks.task_done()
        if not np.array_equal(worker.answers, answer(task(number))):
            raise SystemExit(f"answer {number}: the bytes differ")
        worker.answered.add(number)
    outbox[:8] = 0
    await worker.peer.write(source, target, length=8, imm=TASK)
    return await asyncio.wait_for(worker.peer.closed(), LIMIT)


async def all_answered(tasks: Tasks, fed: list[asyncio.Task[Error]]) -> None:
    """Waits until every task has its answer. Raises what the feed of a worker has failed with, if one has."""
    joined = asyncio.create_task(tasks.join())
    while not joined.done():
        waiting = [joined, *(feeding for feeding in fed if not feeding.done())]
        done, _ = await asyncio.wait(waiting, timeout=LIMIT, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise SystemExit(f"nothing has happened for {LIMIT} s; {tasks.qsize()} tasks wait")
        for feeding in fed:
            if feeding.done():
                feeding.result()


async def coordinate() -> str:
    async with multirail.Fabric() as fabric:
        listener = await fabric.listen("127.0.0.1:0")
        tasks = Tasks()
        workers = [await join(fabric, listener, f"answers {n}", is_victim=n == 0) for n in range(WORKERS)]
        fed = [asyncio.create_task(feed(fabric, worker, tasks)) for worker in workers]
        for number in range(1, TASKS + 1):
            tasks.put_nowait(number)
        await all_answered(tasks, fed)
        died = await asyncio.wait_for(fed[0], LIMIT)

        workers.append(await join(fabric, listener, "answers of the new one"))
        fed.append(asyncio.create_task(feed(fabric, workers[-1], tasks)))
        for number in range(TASKS + 1, 2 * TASKS + 1):
            tasks.put_nowait(number)
        await all_answered(tasks, fed)
        for _ in fed[1:]:
            tasks.put_nowait(0)
        left = await asyncio.gather(*fed[1:])

    for worker in workers[1:]:
        worker.process.join(LIMIT)
        if worker.process.exitcode != 0:
            raise SystemExit(f"a worker ended with {worker.process.exitcode}")
    if not isinstance(died, PeerDied) or not all(isinstance(why, Closed) for why in left):
        raise SystemExit(f"the workers have left by {died!r} and {left!r}")
    answered = [number for worker in workers for number in worker.answered]
    if sorted(answered) != list(range(1, 2 * TASKS + 1)) or not workers[-1].answered:
        raise SystemExit(f"the tasks were answered {answered}, the last {len(workers[-1].answered)} by the new worker")
    return f"{len(answered)} tasks answered, one worker killed ({died.kind}), one joined, {len(left)} left in order"


def main() -> None:
    print(f"elastic_workers: {asyncio.run(coordinate())}, every byte compared")


if __name__ == "__main__":
    main()
