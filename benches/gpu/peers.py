"""What CUDA and NCCL make of the same shuffled pages.

    python3 peers.py copies SIZE PAGES SECONDS     one copy, a loop of cuMemcpyAsync, cuMemcpyBatchAsync
    python3 peers.py nccl SIZE PAGES SECONDS       send and recv of the pages, in groups, by two processes

From GPU 0 to GPU 1; one line of JSON per way. Needs torch; `copies` needs a C compiler too, for its loop.
"""

import ctypes
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

# NCCL takes so many pages under one group at most: with more it is slower, or stops.
GROUP = 512
# Rounds that a median is taken of, at least.
ROUNDS = 5


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: the order in which the source is read, two locations (hints for managed memory, which
    this is not), flags."""

    _fields_ = [("order", ctypes.c_uint), ("from_type", ctypes.c_uint), ("from_id", ctypes.c_int),
                ("to_type", ctypes.c_uint), ("to_id", ctypes.c_int), ("flags", ctypes.c_uint)]


# CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEM_LOCATION_TYPE_DEVICE, CU_STREAM_NON_BLOCKING.
IN_STREAM_ORDER, DEVICE, NON_BLOCKING = 1, 1, 1


class Driver:
    """The CUDA driver's own functions, in the context that torch made current."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self.stream = ctypes.c_void_p()
        self.check(self.library.cuStreamCreate(ctypes.byref(self.stream), NON_BLOCKING), "a stream")
        self.copy = self.library.cuMemcpyAsync
        self.copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
        # CUDA 12.8 has the first form, which says what failed; from 13.0 on there is _v2, which does not.
        self.batch = getattr(self.library, "cuMemcpyBatchAsync_v2", None)
        self.has_fail_index = self.batch is None
        if self.batch is None:
            self.batch = getattr(self.library, "cuMemcpyBatchAsync", None)
        if self.batch is None:
            sys.exit("libcuda.so.1 has no cuMemcpyBatchAsync: install a driver of CUDA 12.8 or later")

    def check(self, status, what):
        if status != 0:
            words = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(words))
            sys.exit(f"CUDA refuses {what}: {(words.value or b'?').decode()} ({status})")

    def wait(self):
        self.check(self.library.cuStreamSynchronize(self.stream), "to wait")


def array(values, kind=ctypes.c_uint64):
    return (kind * len(values))(*values)


def built(directory):
    """copies.c, as a library."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        sys.exit("the loop of cuMemcpyAsync is in C: install cc, or say by CC where it is")
    library = Path(directory) / "copies.so"
    source = Path(__file__).resolve().parent / "copies.c"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


def order(pages, seed):
    indices = list(range(pages))
    random.Random(seed).shuffle(indices)
    return indices


def copies(size, pages, seconds):
    import torch

    torch.cuda.set_device(0)
    source = torch.randint(0, 256, (pages, size), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros((pages, size), dtype=torch.uint8, device="cuda:1")
    target.copy_(source)  # Turns peer access on, here in one direction, below in the other.
    torch.empty_like(source).copy_(target)
    for gpu in (0, 1):
        torch.cuda.synchronize(gpu)
    torch.cuda.set_device(0)
    driver = Driver()
    froms, tos = order(pages, 1), order(pages, 2)
    from_addresses = array([source.data_ptr() + page * size for page in froms])
    to_addresses = array([target.data_ptr() + page * size for page in tos])
    sizes, index = array([size] * pages, ctypes.c_size_t), array([0], ctypes.c_size_t)
    attributes = Attributes(IN_STREAM_ORDER, DEVICE, 0, DEVICE, 1, 0)
    count, one = ctypes.c_size_t(pages), ctypes.c_size_t(1)
    failed = ctypes.c_size_t()
    batch_tail = ([ctypes.byref(failed)] if driver.has_fail_index else []) + [driver.stream]

    def contiguous():
        status = driver.copy(target.data_ptr(), source.data_ptr(), size * pages, driver.stream)
        driver.check(status, "one copy")

    def batch():
        head = [to_addresses, from_addresses, sizes, count, ctypes.byref(attributes), index, one]
        driver.check(driver.batch(*head, *batch_tail), "a batch of copies")

    with tempfile.TemporaryDirectory() as directory:
        in_c = built(directory).copy_pages
        in_c.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 2 + [ctypes.c_void_p]
        copy = ctypes.cast(driver.copy, ctypes.c_void_p)

        def loop():
            driver.check(in_c(copy, to_addresses, from_addresses, pages, size, driver.stream), "a copy of the loop")

        ways = {"one copy": contiguous, "loop of cuMemcpyAsync": loop, "cuMemcpyBatchAsync": batch}
        speeds = in_turn(ways, driver.wait, size * pages, seconds)
        wanted = torch.empty_like(source)
        wanted[tos] = source[froms]
        wanted = wanted.to("cuda:1")
        for name in ("loop of cuMemcpyAsync", "cuMemcpyBatchAsync"):
            target.zero_()
            torch.cuda.synchronize(1)
            ways[name]()
            driver.wait()
            if not torch.equal(target, wanted):
                sys.exit(f"{name}: the bytes that arrived are others")
        torch.cuda.synchronize(1)
    for name, speed in speeds.items():
        print(json.dumps({"way": name, "gbytes_per_s": speed}), flush=True)


def in_turn(ways, wait, total, seconds):
    """Decimal GB/s of each, a median of rounds that alternate."""
    taken = {name: [] for name in ways}
    for way in ways.values():
        way()
        wait()
    until = time.monotonic() + seconds * len(ways)
    while time.monotonic() < until or len(taken["one copy"]) < ROUNDS:
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            wait()
            taken[name].append(time.perf_counter() - begun)
    return {name: total / statistics.median(times) / 1e9 for name, times in taken.items()}


def nccl(size, pages, seconds):
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        sys.exit("this torch has no NCCL: install one that has")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    torch.multiprocessing.spawn(nccl_rank, args=(size, pages, seconds), nprocs=2)


def nccl_rank(rank, size, pages, seconds):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    limit = timedelta(seconds=120)
    dist.init_process_group("nccl", rank=rank, world_size=2, timeout=limit, device_id=torch.device("cuda", rank))
    froms, tos = order(pages, 1), order(pages, 2)
    if rank == 0:
        mine = (torch.arange(pages, device="cuda") % 251).to(torch.uint8).repeat_interleave(size).view(pages, size)
    else:
        mine = torch.zeros((pages, size), dtype=torch.uint8, device="cuda")
    kind, indices = (dist.isend, froms) if rank == 0 else (dist.irecv, tos)
    ops = [dist.P2POp(kind, mine[page], 1 - rank) for page in indices]
    groups = [ops[at:at + GROUP] for at in range(0, pages, GROUP)]
    ready = torch.zeros(1, device="cuda")

    def together():
        """When both are here and nothing is under way; rank 0 decides whether there is time for more."""
        dist.broadcast(ready, 0)
        torch.cuda.synchronize()
        return ready.item() == 0

    def once():
        works = [work for group in groups for work in dist.batch_isend_irecv(group)]
        for work in works:
            work.wait()
        torch.cuda.synchronize()

    once()  # NCCL connects at the first transfer.
    times, until = [], time.monotonic() + seconds
    while True:
        if rank == 0 and time.monotonic() > until and len(times) >= ROUNDS:
            ready.fill_(1)
        if not together():
            break
        begun = time.perf_counter()
        once()
        times.append(time.perf_counter() - begun)
    if rank == 1:
        wanted = torch.empty(pages, dtype=torch.int64)
        wanted[torch.tensor(tos)] = torch.tensor(froms) % 251
        wanted = wanted.to(torch.uint8).cuda().repeat_interleave(size).view(pages, size)
        if not torch.equal(mine, wanted):
            sys.exit("NCCL: the bytes that arrived are others")
        speed = size * pages / statistics.median(times) / 1e9
        print(json.dumps({"way": f"NCCL send/recv, groups of {GROUP}", "gbytes_per_s": speed}), flush=True)
    dist.destroy_process_group()


def main():
    ways = {"copies": copies, "nccl": nccl}
    if len(sys.argv) != 5 or sys.argv[1] not in ways:
        sys.exit(__doc__)
    try:
        import torch
    except ImportError as why:
        sys.exit(f"{why}: the peers are measured through torch; install it, or leave the part `peers` out")
    if torch.cuda.device_count() < 2:
        sys.exit(f"torch sees {torch.cuda.device_count()} GPUs, and the pages go from GPU 0 to GPU 1")
    ways[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))


if __name__ == "__main__":
    main()
