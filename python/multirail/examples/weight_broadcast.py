"""Reinforcement learning: a trainer sends each version of its weights to N worker processes.

Each worker registers its tensors and publishes a catalogue of them. The trainer plans one transfer per worker, of all
tensors at once, and posts it for each version, with the version's number as imm. The workers compare every byte. A
barrier after each version says that all of them are done, so that the trainer may write the next one.

    python -m multirail.examples.weight_broadcast
    python -m multirail.examples.weight_broadcast --workers 5
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing as mp
from typing import Any

import numpy as np

import multirail

VERSIONS = 5
SHAPES = {"embedding": (512, 256), "attention": (4, 256, 256), "mlp": (2, 256, 1024), "norm": (256,)}
LIMIT = 60.0
"""Seconds for any step."""

Tensors = dict[str, "np.ndarray[Any, np.dtype[np.float32]]"]


def weights(version: int) -> Tensors:
    """The weights of a version. The trainer and the workers know them, so that every byte can be compared."""
    random = np.random.default_rng(version)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


# ---- a worker: no event loop, it waits ----


def worker(pipe: Any) -> None:
    with multirail.Fabric() as fabric:
        tensors: Tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        regions = [fabric.register(tensor, "write") for tensor in tensors.values()]
        fabric.publish_catalogue("weights", multirail.Catalogue(regions))
        trainer = fabric.connect(pipe.recv()).wait(LIMIT)
        everyone = multirail.PeerGroup([trainer])
        for version in range(1, VERSIONS + 1):
            trainer.imm(version).expect(1).wait(LIMIT)  # after the last byte of all tensors
            for name, expected in weights(version).items():
                if tensors[name].tobytes() != expected.tobytes():
                    raise SystemExit(f"version {version}, {name}: the bytes differ")
            everyone.barrier("compared", LIMIT).wait()


# ---- the trainer ----


async def train(pipes: list[Any]) -> int:
    """Returns how many bytes were sent."""
    async with multirail.Fabric() as fabric:
        tensors = weights(0)
        local = multirail.LocalList()
        for tensor in tensors.values():
            local.append(fabric.register(tensor, "local"), 0, tensor.nbytes)
        listener = await fabric.listen("127.0.0.1:0")
        for pipe in pipes:
            pipe.send(listener.address)
        workers = [await asyncio.wait_for(listener.accept(), LIMIT) for _ in pipes]
        transfers = [await plan(peer, local, tensors) for peer in workers]
        everyone = multirail.PeerGroup(workers)
        sent = 0
        for version in range(1, VERSIONS + 1):
            for name, tensor in weights(version).items():
                tensors[name][...] = tensor
            outcomes = await asyncio.gather(*(transfer.post(imm=version) for transfer in transfers))
            sent += sum(outcome.bytes for outcome in outcomes)
            await everyone.barrier("compared", LIMIT)
        return sent


async def plan(peer: multirail.Peer, local: multirail.LocalList, tensors: Tensors) -> multirail.PreparedTransfer:
    theirs = await peer.catalogue("weights")
    remote = multirail.RemoteList()
    for number, tensor in enumerate(tensors.values()):
        remote.append(theirs.region(number), 0, tensor.nbytes)
    return peer.prepare_write_list(local, remote, imm=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends versions of weights to worker processes.")
    parser.add_argument("--workers", type=int, default=3)
    count: int = parser.parse_args().workers
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for _ in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=worker, args=(theirs,), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    sent = asyncio.run(train(pipes))
    for process in processes:
        process.join(LIMIT)
        if process.exitcode != 0:
            raise SystemExit(f"a worker ended with {process.exitcode}")
    print(f"weight_broadcast: {VERSIONS} versions to {count} workers, {sent} bytes, every byte compared")


if __name__ == "__main__":
    main()
