#!/usr/bin/env python3
"""Measures pages between torch tensors of two GPUs: the Python module, the command, and NIXL, on one machine.

    benches/python/gpu.py

Needs torch with two GPUs, the module multirail and its command, and NIXL (where it is missing, its row says so). Every
page is compared after the last round. The rounds alternate.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time

import torch

import multirail

TOTAL = 1 << 30
LIMIT_S = 60
BOUND = 0.98


class Ours:
    """Torch tensors of GPU 0 and GPU 1, registered in two fabrics of this process."""

    def __init__(self, page):
        self.page, self.pages = page, TOTAL // page
        self.source = torch.randint(0, 256, (TOTAL,), dtype=torch.uint8, device="cuda:0")
        self.target = torch.zeros(TOTAL, dtype=torch.uint8, device="cuda:1")
        self.fabrics = multirail.Fabric("loopback"), multirail.Fabric("loopback")
        self.peer, _ = self.fabrics[0].connect_local(self.fabrics[1])
        self.from_, self.to = (torch.randperm(self.pages).to(torch.int32) for _ in range(2))
        self.local = self.fabrics[0].register(self.source)
        self.there = self.fabrics[1].register(self.target)
        self.remote = self.peer.import_region(self.there.descriptor())
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize("cuda:1")
        self.prepared = self.peer.prepare_write_pages(self.local, self.from_, self.remote, self.to, page)

    def round(self, seconds):
        """Bytes per second, in GB/s."""
        begun, moved = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds:
            moved += self.prepared.post().wait(LIMIT_S).bytes
        return moved / (time.perf_counter() - begun) / 1e9

    def check(self):
        source = self.source.view(self.pages, self.page).cpu()
        target = self.target.view(self.pages, self.page).cpu()
        if not torch.equal(source[self.from_.long()], target[self.to.long()]):
            sys.exit("gpu.py: the pages differ")


class Nixl:
    """The same tensors by NIXL over UCX, two agents of this process."""

    def __init__(self, ours, pages):
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError:
            # What the package nixl chooses where CUDA is 13.
            from nixl_cu13._api import nixl_agent, nixl_agent_config

        # NIXL moves fewer pages than multirail: with all of them, a round would take minutes.
        self.bytes = pages * ours.page
        agents = [nixl_agent(name, nixl_agent_config(backends=["UCX"])) for name in ("source", "target")]
        for agent, tensor in zip(agents, (ours.source, ours.target), strict=True):
            descriptors = [(tensor.data_ptr(), tensor.numel(), tensor.get_device(), "")]
            agent.register_memory(agent.get_reg_descs(descriptors, "VRAM"), backends=["UCX"])
        self.agent = agents[0]
        self.agents = agents
        peer = self.agent.add_remote_agent(agents[1].get_agent_metadata())

        def pages_of(tensor, indices):
            return [(tensor.data_ptr() + int(index) * ours.page, ours.page, tensor.get_device()) for index in indices]

        local = self.agent.get_xfer_descs(pages_of(ours.source, ours.from_[:pages]), "VRAM")
        remote = self.agent.get_xfer_descs(pages_of(ours.target, ours.to[:pages]), "VRAM")
        self.handle = self.agent.initialize_xfer("WRITE", local, remote, peer)

    def round(self, seconds):
        begun, moved = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds or moved == 0:
            state = self.agent.transfer(self.handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(self.handle)
            if state != "DONE":
                sys.exit(f"gpu.py: NIXL's transfer ended as {state}")
            moved += self.bytes
        return moved / (time.perf_counter() - begun) / 1e9


def command(page, seconds):
    """What the command measures, in GB/s."""
    words = [shutil.which("multirail") or sys.exit("gpu.py: the command multirail is not installed"), "bench", "--json"]
    words += ["--in-process", "--src", "gpu:0", "--dst", "gpu:1", "--size", str(page), "--pages", str(TOTAL // page)]
    words += ["--duration", f"{seconds}s"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"gpu.py: {done.stderr}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return next(row["gbytes_per_s"] for row in rows if "gbytes_per_s" in row)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=int, default=64 << 10, help="bytes of a page [65536]")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a round [1]")
    given = parser.parse_args()
    if torch.cuda.device_count() < 2:
        print("skipped: this machine has no two GPUs that torch reaches")
        return
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, multirail {multirail.__version__}", flush=True)
    ours = Ours(given.page)
    try:
        nixl = Nixl(ours, 1024)
    except ImportError as why:
        print(f"skipped: NIXL: {why}")
        nixl = None
    found = {"module": [], "command": [], "NIXL": []}
    ours.round(0.1)
    for _ in range(given.rounds):
        found["module"].append(ours.round(given.seconds))
        found["command"].append(command(given.page, given.seconds))
        if nixl:
            found["NIXL"].append(nixl.round(given.seconds))
    ours.check()
    for name, rounds in found.items():
        if rounds:
            print(f"{name:8} {statistics.median(rounds):8.1f} GB/s, pages of {given.page} bytes")
    ratio = statistics.median(a / b for a, b in zip(found["module"], found["command"], strict=True))
    print(f"module / command: {ratio:.3f} (bound: at least {BOUND})")


if __name__ == "__main__":
    main()
