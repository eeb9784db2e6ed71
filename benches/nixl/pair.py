"""NIXL's transfers by one of its back ends: an initiator that measures, and a target in a process of its own.

    python3 pair.py BACKEND          memory of the host, allocated by numpy
    python3 pair.py BACKEND cuda     memory of two GPUs, allocated by torch

The initiator starts the target. It serves the names of its loads, one a line of its input, and answers each with a line
of JSON. It ends with its input. Needs NIXL, numpy, and torch for GPUs.
"""

import base64
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

KIB, MIB = 1 << 10, 1 << 20
LIMIT_S = 120


@dataclass
class Load:
    """A transfer writes `pages` pages of `page` bytes in random order. A round has `times` transfers."""

    pages: int
    page: int
    times: int
    #: Whether each transfer has a handle of its own, whose making is measured too.
    makes_handles: bool = False
    #: The bytes between two pages that are neighbours in memory. Without gaps the pages fill a range on each side.
    gap: int = 0

    @property
    def span(self):
        return self.pages * (self.page + self.gap)


HOST_LOADS = {
    "4 KiB": Load(1, 4 * KIB, 4000),
    "256 x 4 KiB": Load(256, 4 * KIB, 400),
    "256 x 64 KiB": Load(256, 64 * KIB, 60),
    "256 x 4 KiB with gaps": Load(256, 4 * KIB, 400, gap=4 * KIB),
    "112,000 x 1 KiB": Load(112_000, KIB, 1, makes_handles=True),
    "112,000 x 1 KiB with gaps": Load(112_000, KIB, 1, makes_handles=True, gap=KIB),
}
GPU_LOADS = {
    f"{256 * MIB // page} x {page // KIB} KiB": Load(256 * MIB // page, page, 3)
    for page in (64 * KIB, 16 * KIB, 4 * KIB)
}


class Side:
    """An agent, and the memory that it has registered."""

    def __init__(self, name, backend, on_gpu, gpu, length):
        self.agent = nixl_agent(name, nixl_agent_config(backends=[], capture_telemetry=False))
        self.agent.create_backend(backend, {})
        if on_gpu:
            import torch

            self.kind, self.device = "VRAM", gpu
            self.memory = torch.full((length,), 1 + gpu, dtype=torch.uint8, device=f"cuda:{gpu}")
            torch.cuda.synchronize(gpu)
            self.address = self.memory.data_ptr()
        else:
            self.kind, self.device = "DRAM", 0
            self.memory = np.full(length, 1 + gpu, np.uint8)
            self.address = self.memory.ctypes.data
        described = self.agent.get_reg_descs([(self.address, length, self.device, "")], self.kind)
        self.agent.register_memory(described, backends=[backend])

    def has(self, value, length):
        """Whether each of the first `length` bytes has this value."""
        return bool((self.memory[:length] == value).all())


def memory_of(loads):
    return max(load.span for load in loads.values())


def written_of(loads):
    """How many bytes at the start of the target's memory are written once every load has run."""
    return max(load.span for load in loads.values() if not load.gap)


def target(backend, on_gpu, loads):
    length = memory_of(loads)
    side = Side("target", backend, on_gpu, 1, length)
    metadata = base64.b64encode(side.agent.get_agent_metadata()).decode()
    print(json.dumps({"metadata": metadata, "address": side.address, "device": side.device}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"arrived": side.has(1, written_of(loads))}), flush=True)


class Initiator:
    def __init__(self, backend, on_gpu, loads):
        command = [sys.executable, __file__, backend, "cuda" if on_gpu else "host", "target"]
        pipe = subprocess.PIPE
        self.started = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.told = self.answer()
        self.backend = backend
        self.side = Side("initiator", backend, on_gpu, 0, memory_of(loads))
        self.agent = self.side.agent
        self.peer = self.agent.add_remote_agent(base64.b64decode(self.told["metadata"]))

    def answer(self):
        return json.loads(next(line for line in self.started.stdout if line.startswith("{")))

    def lists(self, load):
        """Prepared lists of all pages: this side's, and the target's."""
        offsets = np.arange(load.pages, dtype=np.uint64) * np.uint64(load.page + load.gap)

        def described(address, device):
            rows = np.empty((load.pages, 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = offsets + np.uint64(address), load.page, device
            return self.agent.get_xfer_descs(rows, self.side.kind)

        prepare, only = self.agent.prep_xfer_dlist, [self.backend]
        local = prepare("NIXL_INIT_AGENT", described(self.side.address, self.side.device), backends=only)
        remote = prepare(self.peer, described(self.told["address"], self.told["device"]), backends=only)
        return local, remote

    def write(self, handle):
        state = self.agent.transfer(handle)
        end = time.monotonic() + LIMIT_S
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
            if time.monotonic() > end:
                raise RuntimeError(f"the transfer is not done within {LIMIT_S} s")
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def round(self, load):
        """The median time of a transfer in µs, and the processor time of both processes for 1 GB."""
        random = np.random.default_rng(1)
        from_, to = (random.permutation(load.pages).astype(np.int32) for _ in range(2))
        local, remote = self.lists(load)

        def handle():
            return self.agent.make_prepped_xfer("WRITE", local, from_, remote, to, backends=[self.backend])

        kept = None if load.makes_handles else handle()
        if kept is not None:
            self.write(kept)
        measured, busy = [], self.processor_time()
        for _ in range(load.times):
            begun = time.perf_counter_ns()
            each = handle() if kept is None else kept
            self.write(each)
            measured.append(time.perf_counter_ns() - begun)
            if kept is None:
                self.agent.release_xfer_handle(each)
        busy = self.processor_time() - busy
        if kept is not None:
            self.agent.release_xfer_handle(kept)
        for prepared in (local, remote):
            self.agent.release_dlist_handle(prepared)
        moved = load.pages * load.page * load.times
        return {"us": statistics.median(measured) / 1e3, "cpu_s_per_gb": busy * 1e9 / moved}

    def processor_time(self):
        ticks = Path(f"/proc/{self.started.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")

    def arrived(self):
        """Whether the target's memory was written, as far as a load fills it."""
        self.started.stdin.write("arrived\n")
        self.started.stdin.flush()
        return self.answer()["arrived"]

    def end(self):
        self.started.stdin.close()
        self.started.wait(LIMIT_S)


def main():
    backend, where, *rest = [*sys.argv[1:], "host"][: max(2, len(sys.argv) - 1)]
    on_gpu = where == "cuda"
    loads = GPU_LOADS if on_gpu else HOST_LOADS
    if rest:
        return target(backend, on_gpu, loads)
    initiator = Initiator(backend, on_gpu, loads)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = line.strip()
        answer = {"arrived": initiator.arrived()} if command == "arrived" else initiator.round(loads[command])
        print(json.dumps(answer), flush=True)
    initiator.end()


if __name__ == "__main__":
    main()
