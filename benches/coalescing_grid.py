#!/usr/bin/env python3
"""Whether `auto` coalesces where that is faster: over sizes, counts and contiguity of pages, the rate of `auto` as a share
of the better of `never` and `always`, over libfabric's providers that need no card. Rounds of the three policies take
turns. Prints a table for each provider; a cell has the shares for pages of which 0, 50 and 100 % are neighbours.

    cargo build --release -p multirail-cli
    benches/coalescing_grid.py target/release/multirail [--providers tcp,shm] [--rounds 3] [--duration 300ms]
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from side_by_side import bench_command, bench_row

SIZES = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20]
COUNTS = [1, 16, 256, 4096, 65536]
CONTIGUOUS = ["0", "0.5", "1"]
POLICIES = ["never", "always", "auto"]
MOST_BYTES = 256 << 20


def name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"


def rate(arguments: argparse.Namespace, provider: str, cell: tuple[int, int, str], policy: str) -> float:
    """The GB/s of one bench."""
    size, count, contiguous = cell
    options = {"op": arguments.op, "size": size, "pages": count, "contiguous": contiguous, "coalesce": policy}
    command = bench_command(arguments.multirail, provider, **options, duration=arguments.duration)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return bench_row(done.stdout.strip().splitlines()[-1])["gbytes_per_s"]


def measured(arguments: argparse.Namespace, provider: str, cell: tuple[int, int, str]) -> dict[str, float]:
    """The medians of the three policies."""
    rates: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for turn in range(arguments.rounds):
        # Each policy is the first one in turn.
        for policy in POLICIES[turn % 3 :] + POLICIES[: turn % 3]:
            rates[policy].append(rate(arguments, provider, cell, policy))
    return {policy: statistics.median(each) for policy, each in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("multirail", help="the command")
    parser.add_argument("--providers", default="tcp,shm", help="libfabric's providers [default: tcp,shm]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--op", default="write-pages", help="write-pages or read-pages [default: write-pages]")
    parser.add_argument("--duration", default="300ms")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of a page")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="pages of an operation")
    parser.add_argument("--json", help="also keep the rates in this file, a line each")
    arguments = parser.parse_args()
    sizes, counts = ([int(each) for each in text.split(",")] for text in (arguments.sizes, arguments.counts))
    kept: list[str] = []
    worst: tuple[float, str] = (2.0, "")
    for provider in arguments.providers.split(","):
        print(
            f"{arguments.op}, {provider}: auto / the better of never and always, medians of {arguments.rounds} rounds"
        )
        print(f"| page | {' | '.join(f'{count} pages' for count in counts)} |")
        print(f"|---{'|---' * len(counts)}|")
        for size in sizes:
            cells = []
            for count in counts:
                shares = []
                for contiguous in CONTIGUOUS:
                    cell = (size, count, contiguous)
                    # A single page has no neighbour, and bench has less memory.
                    if size * count > MOST_BYTES or (count == 1 and contiguous != "0"):
                        continue
                    rates = measured(arguments, provider, cell)
                    share = rates["auto"] / max(rates["never"], rates["always"])
                    shares.append(f"{share:.2f}")
                    worst = min(worst, (share, f"{provider}, {count} x {name(size)}, contiguous {contiguous}"))
                    row = {"provider": provider, "op": arguments.op, "size": size, "pages": count}
                    kept.append(json.dumps({**row, "contiguous": float(contiguous), **rates}) + "\n")
                cells.append(" ".join(shares) or "-")
            print(f"| {name(size)} | {' | '.join(cells)} |", flush=True)
        print()
    if arguments.json:
        Path(arguments.json).write_text("".join(kept))
    print(f"the smallest share: {worst[0]:.2f} ({worst[1]})")
    sys.exit(worst[0] < 0.95)


if __name__ == "__main__":
    main()
