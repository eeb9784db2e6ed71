#!/usr/bin/env python3
"""Small pages with and without coalescing, over libfabric's tcp: rounds of both take turns, so that other work on the
machine meets both. Prints the medians, the rate of 64 KiB pages of the same run, and the processor time of both
processes per GB. With --nixl, NIXL over UCX's tcp takes its turns too, with transfers of 256 pages of 4 KiB.

    cargo build --release -p multirail-cli
    benches/small_pages.py target/release/multirail [--rounds 5] [--op write-pages] [--pages 4096] [--nixl]
    benches/small_pages.py target/release/multirail --soft-roce         in the virtual machine of ci/rdma-vm
"""

import argparse
import contextlib
import os
import resource
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from side_by_side import ROOT, Pair, bench_command, bench_row, installed, versions

NIXL = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
#: The load of benches/nixl/pair.py, and its bytes.
NIXL_LOAD, NIXL_BYTES = "256 x 4 KiB", 256 << 12


def processor_seconds() -> float:
    """The processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def command(arguments: argparse.Namespace, size: str, policy: str, duration: str) -> list[str]:
    """The command of one bench."""
    device = "verbs" if arguments.soft_roce else arguments.provider
    options = {"op": arguments.op, "size": size, "duration": duration, "coalesce": policy, "pages": arguments.pages}
    return bench_command(arguments.multirail, device, **options)


def parsed(line: str) -> tuple[float, int]:
    """GB/s, and bytes."""
    row = bench_row(line)
    return row["gbytes_per_s"], sum(rail["bytes"] for rail in row["rails"])


def run(arguments: argparse.Namespace, size: str, policy: str, duration: str) -> tuple[float, float, int]:
    """One bench: GB/s, seconds of processor time, bytes."""
    words = command(arguments, size, policy, duration)
    before = processor_seconds()
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    speed, moved = parsed(done.stdout.strip().splitlines()[-1])
    return speed, processor_seconds() - before, moved


def run_in_machine(arguments: argparse.Namespace, keys: list[tuple[str, str]]) -> list[tuple[float, float, int]]:
    """The benches of these sizes and policies, one after the other in one virtual machine. It tells no processor time."""
    script = "\n".join(shlex.join(command(arguments, *key, arguments.duration)) for key in keys)
    machine = [str(ROOT / "ci/rdma-vm/run"), "bash", "-euc", script]
    seconds = {**os.environ, "RDMA_VM_SECONDS": "3600"}
    done = subprocess.run(machine, env=seconds, stdout=subprocess.PIPE, text=True, timeout=3600, check=True)
    rows = [parsed(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == len(keys), done.stdout
    return [(speed, 0.0, moved) for speed, moved in rows]


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
    parser.add_argument("--soft-roce", action="store_true", help="over soft-RoCE instead of libfabric")
    parser.add_argument("--nixl", action="store_true", help="also measure NIXL over UCX's tcp, installed below target/")
    parser.add_argument("--provider", default="tcp", help="libfabric's provider: tcp or shm [default: tcp]")
    parser.add_argument("--duration", default="1s")
    arguments = parser.parse_args()
    sizes, policies = ("1KiB", "4KiB", "16KiB", "64KiB"), ("never", "always", "auto")
    rows = {(size, policy): [] for size in sizes for policy in policies}
    setup = 0.0
    if arguments.soft_roce:
        turns = [key for _ in range(arguments.rounds) for key in rows]
        for key, row in zip(turns, run_in_machine(arguments, turns), strict=True):
            rows[key].append(row)
    else:
        # What a bench takes without its transfers: starting, connecting, filling and comparing memory.
        setup = statistics.median(run(arguments, "4KiB", "never", "10ms")[1] for _ in range(3))
    with nixl_pair(arguments.nixl) as pair:
        for _ in range(0 if arguments.soft_roce else arguments.rounds):
            for key, each in rows.items():
                each.append(run(arguments, *key, arguments.duration))
            if pair:
                pair.round(NIXL_LOAD, kept=True)
        nixl = [round_["us"] for round_ in pair.rounds[NIXL_LOAD]] if pair else []
    speed = {key: statistics.median(row[0] for row in row_list) for key, row_list in rows.items()}
    cost = {
        key: statistics.median(max(row[1] - setup, 0) / row[2] * 1e9 for row in row_list)
        for key, row_list in rows.items()
    }
    device = "soft-RoCE" if arguments.soft_roce else arguments.provider
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
