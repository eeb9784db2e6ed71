"""What calls of the library cost from Python: an initiator that measures, and a target in a process of its own.

    python3 pair.py

The initiator starts the target. It serves the command `calls`, one a line of its input, and answers each with a line
of JSON: medians in microseconds, and rates of awaits. It ends with its input. Needs numpy and multirail.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time

import numpy as np

import multirail

# As in `calls.rs`.
PAGE = 4096
PAGES = 16_384
WRITES = 20_000
POSTS = 40
SHORT_PAGES = 64
AWAITS = 10_000
# compare.py stops the processes while another program runs.
PAUSE_S = 600
LIMIT_S = 60


def opened():
    fabric = multirail.Fabric("loopback", peer_timeout=PAUSE_S)
    return fabric, fabric.alloc(PAGE * PAGES)


def target():
    """Prints its address, and serves its region until its input ends."""
    fabric, region = opened()
    fabric.publish("region", region)
    listener = fabric.listen().wait(LIMIT_S)
    print(listener.address, flush=True)
    sys.stdin.read()
    fabric.close()


def median(times, call):
    """The median time of a call, in microseconds."""
    clock, measured = time.perf_counter_ns, []
    for _ in range(times):
        begun = clock()
        call()
        measured.append(clock() - begun)
    return statistics.median(measured) / 1e3


def round_of_calls(peer, region, remote, loopback):
    write = median(WRITES, lambda: peer.write(region, remote, PAGE).wait())
    # The call of a lambda, and the clock, which the Rust program does not have.
    empty = median(WRITES, lambda: None)
    random = np.random.default_rng(1)
    from_, to = (random.permutation(PAGES).astype(np.uint32) for _ in range(2))
    posts = []
    for _ in range(POSTS):
        begun = time.perf_counter_ns()
        operation = peer.write_pages(region, from_, remote, to, PAGE)
        posts.append(time.perf_counter_ns() - begun)
        operation.wait(LIMIT_S)
    short = peer.prepare_write_pages(region, from_[:SHORT_PAGES], remote, to[:SHORT_PAGES], PAGE)
    waited = median(WRITES // 10, lambda: short.post().wait())
    awaited, hop = asyncio.run(awaits(short))
    rate, bare = asyncio.run(rates(loopback))
    return {
        "write": write - empty,
        "post": statistics.median(posts) / 1e3,
        "short": waited,
        "awaited": awaited,
        "hop": hop,
        "awaits_per_s": rate,
        "bare_awaits_per_s": bare,
    }


async def awaits(short):
    """The median time of an awaited operation, and of a hop of the loop: `call_soon`, and the task that wakes."""
    clock, measured, hops = time.perf_counter_ns, [], []
    loop = asyncio.get_running_loop()
    for _ in range(WRITES // 10):
        begun = clock()
        await short.post()
        measured.append(clock() - begun)
    for _ in range(WRITES // 10):
        future = loop.create_future()
        begun = clock()
        loop.call_soon(future.set_result, None)
        await future
        hops.append(clock() - begun)
    return statistics.median(measured) / 1e3, statistics.median(hops) / 1e3


async def rates(loopback):
    """Awaits per second of 10,000 tasks: of operations, which one arrival resolves, and of futures, which one call
    resolves."""
    loop = asyncio.get_running_loop()
    there, here = loopback

    async def one(future):
        await future

    async def until_all(futures, resolve):
        tasks = [asyncio.ensure_future(one(future)) for future in futures]
        # Until all of them wait.
        await asyncio.sleep(0)
        begun = time.perf_counter()
        resolve()
        await asyncio.gather(*tasks)
        return time.perf_counter() - begun

    measured = []
    for _ in range(5):
        counter = here.imm(1)
        expected = [counter.expect() for _ in range(AWAITS)]
        operations = await until_all(expected, lambda: there.write_imm(1).wait(LIMIT_S))
        counter.try_take()
        futures = [loop.create_future() for _ in range(AWAITS)]
        bare = await until_all(futures, lambda futures=futures: [future.set_result(None) for future in futures])
        measured.append((operations, bare))
    return tuple(AWAITS / statistics.median(column) for column in zip(*measured, strict=True))


def initiator():
    command, pipe = [sys.executable, __file__, "target"], subprocess.PIPE
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    fabric, region = opened()
    peer = fabric.connect(started.stdout.readline().strip()).wait(LIMIT_S)
    remote = peer.region("region").wait(LIMIT_S)
    loopback = fabric.connect_local(fabric)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(round_of_calls(peer, region, remote, loopback)), flush=True)
    fabric.close()
    started.stdin.close()
    started.wait(LIMIT_S)


if __name__ == "__main__":
    target() if sys.argv[1:] == ["target"] else initiator()
