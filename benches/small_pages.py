#!/usr/bin/env python3
"""Small pages with and without coalescing, over libfabric's tcp: rounds of both take turns, so that other work on the
machine meets both. Prints the medians, the rate of 64 KiB pages of the same run, and the processor time of both
processes per GB.

    cargo build --release -p multirail-cli
    benches/small_pages.py target/release/multirail [--rounds 5] [--op write-pages] [--pages 4096]
"""

import argparse
import json
import resource
import statistics
import subprocess


def processor_seconds() -> float:
    """The processor time of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(arguments: argparse.Namespace, size: str, policy: str, duration: str) -> tuple[float, float, int]:
    """One bench: GB/s, seconds of processor time, bytes."""
    command = [arguments.multirail, "bench", "--backend", "efa", "--provider", arguments.provider]
    command += ["--node", "127.0.0.1"] if arguments.provider == "tcp" else []
    command += ["--op", arguments.op, "--size", size, "--duration", duration, "--no-limit", "--json"]
    command += ["--coalesce", policy] + (["--pages", str(arguments.pages)] if arguments.pages else [])
    before = processor_seconds()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    row = json.loads(done.stdout.strip().splitlines()[-1])
    assert row["verified"], row
    return row["gbytes_per_s"], processor_seconds() - before, sum(rail["bytes"] for rail in row["rails"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("multirail", help="the command")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--op", default="write-pages")
    parser.add_argument("--pages", type=int, help="pages of an operation [default: bench's]")
    parser.add_argument("--provider", default="tcp", help="libfabric's provider: tcp or shm [default: tcp]")
    parser.add_argument("--duration", default="1s")
    arguments = parser.parse_args()
    # What a bench takes without its transfers: starting, connecting, filling and comparing memory.
    setup = statistics.median(run(arguments, "4KiB", "never", "10ms")[1] for _ in range(3))
    sizes, policies = ("1KiB", "4KiB", "16KiB", "64KiB"), ("never", "always", "auto")
    rows = {(size, policy): [] for size in sizes for policy in policies}
    for _ in range(arguments.rounds):
        for size, policy in rows:
            rows[size, policy].append(run(arguments, size, policy, arguments.duration))
    speed = {key: statistics.median(row[0] for row in row_list) for key, row_list in rows.items()}
    cost = {
        key: statistics.median(max(row[1] - setup, 0) / row[2] * 1e9 for row in row_list)
        for key, row_list in rows.items()
    }
    print(f"{arguments.op}, {arguments.provider}, medians of {arguments.rounds} rounds; processor seconds per GB in brackets")
    print("| page | never, GB/s | always, GB/s | auto, GB/s | always / never | always / 64 KiB never | auto / best |")
    print("|---|---|---|---|---|---|---|")
    for size in sizes:
        never, always, auto = (speed[size, policy] for policy in policies)
        cells = [f"{speed[size, policy]:.3f} ({cost[size, policy]:.2f})" for policy in policies]
        cells += [f"{always / never:.2f}", f"{always / speed['64KiB', 'never']:.2f}", f"{auto / max(never, always):.2f}"]
        print(f"| {size} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
