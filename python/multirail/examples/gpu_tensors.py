"""torch tensors from one GPU to another: `gpu:0` to `gpu:1` if there are two, otherwise within the only one.

Pages of a KV cache move in a shuffled order. torch compares every byte, on the GPU. Without CUDA, or without torch, it
prints ``skipped: no CUDA`` and exits with 0.

    python -m multirail.examples.gpu_tensors
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

import multirail

PAGE = 64 << 10
PAGES = 1024
SEED = 1


def main() -> None:
    try:
        torch: Any = import_module("torch")
    except ImportError:
        return print("gpu_tensors: skipped: no CUDA (torch is not installed)")
    if not torch.cuda.is_available():
        return print("gpu_tensors: skipped: no CUDA (torch finds no GPU)")

    here, there = torch.device("cuda:0"), torch.device(f"cuda:{min(1, torch.cuda.device_count() - 1)}")
    generator = torch.Generator(here).manual_seed(SEED)
    source = torch.randint(0, 256, (PAGES, PAGE), dtype=torch.uint8, device=here, generator=generator)
    target = torch.zeros((PAGES, PAGE), dtype=torch.uint8, device=there)
    order = np.random.default_rng(SEED).permutation(PAGES).astype(np.uint32)

    with multirail.Fabric("loopback") as prefill, multirail.Fabric("loopback") as decode:
        to_decode, from_prefill = prefill.connect_local(decode)
        kv, cache = prefill.register(source, "local"), decode.register(target, "write")
        remote = to_decode.import_region(cache.descriptor())
        # multirail knows nothing of torch's streams: the kernels that fill the tensors must be over first.
        torch.cuda.synchronize(here)
        torch.cuda.synchronize(there)
        write = to_decode.write_pages(kv, range(PAGES), remote, order, PAGE, imm=1)
        from_prefill.imm(1).expect(1).wait()
        outcome = write.wait()
        arrived = target[torch.from_numpy(order.astype(np.int64)).to(there)]
        if not torch.equal(arrived, source.to(there)):
            raise SystemExit("gpu_tensors: the bytes differ")
        print(
            f"gpu_tensors: {outcome.bytes} bytes from {kv.device} to {cache.device} in {PAGES} shuffled pages, by "
            f"{remote.path}, every byte compared"
        )


if __name__ == "__main__":
    main()
