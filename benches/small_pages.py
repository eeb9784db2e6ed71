#!/usr/bin/env python3
"""Small pages with and without coalescing, over libfabric's tcp: rounds of both take turns, so that other work on the
machine meets both. Prints the medians, the rate of 64 KiB pages of the same run, and the processor time of both
processes per GB. With --nixl, NIXL over UCX's tcp takes its turns too, with transfers of 256 pages of 4 KiB.

    cargo build --release -p multirail-cli
    benches/small_pages.py target/release/multirail [--rounds 5] [--op write-pages] [--pages 4096] [--nixl]
    ci/rdma-vm/run benches/small_pages.py target/release/multirail --backend verbs          # soft-RoCE
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from side_by_side import ROOT, Pair, installed, versions  # noqa: E402

NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
#: The load of benches/nixl/pair.py, and its bytes.
NIXL_LOAD, NIXL_BYTES = "256 x 4 KiB", 256 << 12


def processor_seconds() -> float:
    """The processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(arguments: argparse.Namespace, size: str, policy: str, duration: str) -> tuple[float, float, int]:
    """One bench: GB/s, seconds of processor time, bytes."""
    command = [arguments.multirail, "bench", "--backend", arguments.backend]
    if arguments.backend == "efa":
        command += ["--provider", arguments.provider]
        command += ["--node", "127.0.0.1"] if arguments.provider == "tcp" else []
    command += ["--op", arguments.op, "--size", size, "--duration", duration, "--no-limit", "--json"]
    command += ["--coalesce", policy] + (["--pages", str(arguments.pages)] if arguments.pages else [])
    before = processor_seconds()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    row = json.loads(done.stdout.strip().splitlines()[-1])
    assert row["verified"], row
    return row["gbytes_per_s"], processor_seconds() - before, sum(rail["bytes"] for rail in row["rails"])


@contextlib.contextmanager
def nixl_pair(is_wanted: bool):
    """A pair of processes that write by NIXL over UCX's tcp, or None."""
    if not is_wanted:
        yield None
        return
    folder = ROOT / "target/small-pages"
    python = installed(folder, NIXL)
    print(*versions(python, folder, NIXL, "the command"), sep="\n")
    environment = {"NIXL_LOG_LEVEL": "WARN", **os.environ, "UCX_TLS": "tcp"}
    pair = Pair("NIXL", [str(python), str(HERE / "nixl/pair.py"), "UCX", "host"], environment)
    try:
        pair.await_ready()
        pair.round(NIXL_LOAD, kept=False)
        yield pair
    finally:
        pair.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("multirail", help="the command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--op", default="write-pages")
    parser.add_argument("--pages", type=int, help="pages of an operation [default: bench's]")
    parser.add_argument("--backend", default="efa", help="efa or verbs [default: efa]")
    parser.add_argument("--nixl", action="store_true", help="also measure NIXL over UCX's tcp, installed below target/")
    parser.add_argument("--provider", default="tcp", help="libfabric's provider: tcp or shm [default: tcp]")
    parser.add_argument("--duration", default="1s")
    arguments = parser.parse_args()
    # What a bench takes without its transfers: starting, connecting, filling and comparing memory.
    setup = statistics.median(run(arguments, "4KiB", "never", "10ms")[1] for _ in range(3))
    sizes, policies = ("1KiB", "4KiB", "16KiB", "64KiB"), ("never", "always", "auto")
    rows = {(size, policy): [] for size in sizes for policy in policies}
    with nixl_pair(arguments.nixl) as pair:
        for _ in range(arguments.rounds):
            for size, policy in rows:
                rows[size, policy].append(run(arguments, size, policy, arguments.duration))
            if pair:
                pair.round(NIXL_LOAD, kept=True)
        nixl = [round_["us"] for round_ in pair.rounds[NIXL_LOAD]] if pair else []
    speed = {key: statistics.median(row[0] for row in row_list) for key, row_list in rows.items()}
    cost = {
        key: statistics.median(max(row[1] - setup, 0) / row[2] * 1e9 for row in row_list)
        for key, row_list in rows.items()
    }
    device = arguments.provider if arguments.backend == "efa" else arguments.backend
    print(f"{arguments.op}, {device}, medians of {arguments.rounds} rounds; processor seconds per GB in brackets")
    print("| page | never, GB/s | always, GB/s | auto, GB/s | always / never | always / 64 KiB never | auto / best |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        never, always, auto = (speed[size, policy] for policy in policies)
        cells = [f"{speed[size, policy]:.3f} ({cost[size, policy]:.2f})" for policy in policies]
        cells += [
            f"{always / never:.2f}",
            f"{always / speed['64KiB', 'never']:.2f}",
            f"{auto / max(never, always):.2f}",
        ]
        print(f"| {size} | {' | '.join(cells)} |")
    if nixl:
        rate = NIXL_BYTES / statistics.median(nixl) / 1e3
        best = speed["4KiB", "always"]
        print(
            f"NIXL over UCX's tcp, transfers of {NIXL_LOAD}: {rate:.3f} GB/s; ours coalesced is {best / rate:.2f} times as fast"
        )


if __name__ == "__main__":
    main()
