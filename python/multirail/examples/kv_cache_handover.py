"""Disaggregated inference: a prefill process hands a KV cache to a decode process, layer by layer.

The decode process owns the cache. For each request it picks free pages, and notifies the prefill process of their
numbers. The prefill process writes each layer as soon as it is computed, with an imm of its own. The decode process
awaits layer after layer, and so can begin before the last one has arrived.

    python -m multirail.examples.kv_cache_handover            # numpy, float16
    python -m multirail.examples.kv_cache_handover --torch    # torch tensors, bfloat16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
from importlib import import_module
from typing import Any

import numpy as np

import multirail

LAYERS = 8
SLOTS = 48
"""Pages of each layer in the cache of the decode process."""
PROMPT = 12
"""Pages of each layer that a request needs."""
SHAPE = (16, 8, 128)
"""One page: tokens, heads, and elements of 2 bytes."""
PAGE = 16 * 8 * 128 * 2
REQUESTS = 6
LIMIT = 60.0
"""Seconds for any step."""

Octets = np.ndarray[Any, np.dtype[np.uint8]]


def zeros(pages: int, use_torch: bool) -> Any:
    """Memory for pages: an array of numpy, or a tensor of torch."""
    if use_torch:
        torch: Any = import_module("torch")
        return torch.zeros((pages, *SHAPE), dtype=torch.bfloat16)
    return np.zeros((pages, *SHAPE), np.float16)


def as_bytes(array: Any) -> Octets:
    """The bytes of an array or tensor, not copied."""
    if not isinstance(array, np.ndarray):
        array = array.view(import_module("torch").uint8).numpy()
    octets: Octets = array.view(np.uint8).reshape(len(array), PAGE)
    return octets


def computed(request: int, layer: int) -> Octets:
    """What the model computes: both processes know it, so that every byte can be compared."""
    return np.random.default_rng((request, layer)).integers(0, 256, (PROMPT, PAGE), dtype=np.uint8)


def imm_of(request: int, layer: int) -> int:
    return request * LAYERS + layer


# ---- the prefill process ----


async def prefill(address: str, use_torch: bool) -> None:
    async with multirail.Fabric(notifications=True) as fabric:
        # One buffer per layer: a layer is computed while those before it are on their way.
        layers = [zeros(PROMPT, use_torch) for _ in range(LAYERS)]
        regions = [fabric.register(layer, "local") for layer in layers]
        decode = await fabric.connect(address)
        cache = await decode.region("kv cache")
        await decode.warm_up()
        async for notification in fabric.notifications():
            request = json.loads(notification.data)
            if request is None:
                return
            writes = []
            for layer in range(LAYERS):
                as_bytes(layers[layer])[:] = computed(request["number"], layer)
                write = decode.write_pages(
                    regions[layer],
                    range(PROMPT),
                    cache,
                    np.array(request["pages"], np.uint32),
                    PAGE,
                    dst_offset=layer * SLOTS * PAGE,
                    imm=imm_of(request["number"], layer),
                )
                writes.append(write)
            # The buffers may be written again once the writes are over.
            await asyncio.gather(*writes)


def prefill_process(pipe: Any, use_torch: bool) -> None:
    asyncio.run(prefill(pipe.recv(), use_torch))


# ---- the decode process ----


async def decode(pipe: Any, use_torch: bool) -> int:
    """Returns how many bytes were compared."""
    async with multirail.Fabric(notifications=True) as fabric:
        cache = zeros(LAYERS * SLOTS, use_torch)
        fabric.publish("kv cache", fabric.register(cache, "write"))
        listener = await fabric.listen("127.0.0.1:0")
        pipe.send(listener.address)
        peer = await asyncio.wait_for(listener.accept(), LIMIT)

        free = np.random.default_rng(7).permutation(SLOTS).tolist()
        under_way: list[dict[str, Any]] = []
        compared = 0
        for number in range(REQUESTS):
            if len(free) < PROMPT:
                request = under_way.pop(0)
                compared += await receive(peer, cache, request)
                free += request["pages"]
            pages, free = free[:PROMPT], free[PROMPT:]
            under_way.append({"number": number, "pages": pages})
            await peer.notify(json.dumps(under_way[-1]).encode())
        for request in under_way:
            compared += await receive(peer, cache, request)
        await peer.notify(b"null")
        # A close may overtake a notification that the peer has not taken: so the prefill process closes first.
        await asyncio.wait_for(peer.closed(), LIMIT)
        return compared


async def receive(peer: multirail.Peer, cache: Any, request: dict[str, Any]) -> int:
    """Awaits and compares each layer of a request. Raises ``PeerDied`` if the prefill process is gone."""
    compared = 0
    for layer in range(LAYERS):
        await asyncio.wait_for(peer.imm(imm_of(request["number"], layer)).expect(1), LIMIT)
        first = layer * SLOTS
        arrived = as_bytes(cache[first : first + SLOTS])[request["pages"]]
        if not np.array_equal(arrived, computed(request["number"], layer)):
            raise SystemExit(f"request {request['number']}, layer {layer}: the bytes differ")
        compared += arrived.size
    return compared


def main() -> None:
    parser = argparse.ArgumentParser(description="Hands a KV cache from a prefill process to a decode process.")
    parser.add_argument("--torch", action="store_true", help="torch tensors instead of numpy arrays")
    use_torch: bool = parser.parse_args().torch
    context = mp.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=prefill_process, args=(theirs, use_torch), daemon=True)
    process.start()
    compared = asyncio.run(decode(pipe, use_torch))
    process.join(LIMIT)
    if process.exitcode != 0:
        raise SystemExit(f"the prefill process ended with {process.exitcode}")
    kind = "torch tensors" if use_torch else "numpy arrays"
    print(f"kv_cache_handover: {REQUESTS} requests of {LAYERS} layers, {compared} bytes of {kind}, every byte compared")


if __name__ == "__main__":
    main()
