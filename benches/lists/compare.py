#!/usr/bin/env python3
"""Measures transfers of long lists over many regions by multirail and by NIXL over UCX, side by side on one machine.

    cargo build --profile dist -p benches --bin lists
    benches/lists/compare.py

Each library moves the list between two processes of its own, from scattered entries to scattered entries of 4 KiB, in
both directions. The rounds alternate: while one library's processes run, those of the others are stopped. All bytes
are compared after each transfer. The table has medians. NIXL is installed from PyPI into a virtual environment under
target/, if it is not there.

multirail is measured with the memory that it allocates, which the other process maps, and with private memory, which
the kernel copies. NIXL has private memory.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from side_by_side import ROOT, Failed, Pair, installed, measure, run_program, table, versions  # noqa: E402

PACKAGES = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
OURS, PRIVATE, NIXL = "multirail", "multirail, private memory", "NIXL over UCX"
# What a round answers, and in the words of the table.
TIMES = {
    "prepare": "prepare (make_prepped_xfer)",
    "post": "post (transfer)",
    "together": "one call (make_prepped_xfer and transfer)",
    "whole": "one call, until done",
    "post_again": "post again (transfer again)",
    "whole_again": "post again, until done",
}


def rows(pairs, direction):
    """The medians of each library in ms, and the ratios to NIXL's."""
    theirs = pairs[-1].rounds[direction]
    for name, words in TIMES.items():
        row = {"direction": direction, "what": words}
        for pair in pairs:
            row[f"{pair.name}, ms"] = statistics.median(times[name] for times in pair.rounds[direction]) / 1e3
        for pair in pairs[:-1]:
            # Of the rounds that follow each other: both had the same neighbours on the machine.
            ratios = [b[name] / a[name] for a, b in zip(pair.rounds[direction], theirs)]
            row[f"NIXL / {pair.name}"] = statistics.median(ratios)
        yield row


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", metavar="PATH", default=ROOT / "target/dist/lists", help="[target/dist/lists]")
    parser.add_argument("--nixl", metavar="FOLDER", default=ROOT / "target/nixl", type=Path,
                        help="the virtual environment of NIXL [target/nixl]")
    parser.add_argument("--regions", type=int, default=80, help="of each process [80]")
    parser.add_argument("--entries", type=int, default=112_000, help="of 4 KiB each, over all regions [112000]")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--threads", type=int, help="threads that copy in multirail [two, or one on a single core]")
    parser.add_argument("--no-progress-thread", action="store_true",
                        help="NIXL's initiator has no progress thread; NIXL's default is one")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the table and all rounds there, too")
    given = parser.parse_args()
    if given.rounds < 1 or given.regions < 1 or given.entries < 1 or given.entries % given.regions:
        parser.error("--rounds is at least 1, and --entries is a multiple of --regions")
    return given


def compare(given):
    if shutil.which(given.binary) is None:
        raise Failed(f"{given.binary} is no program: cargo build --profile dist -p benches --bin lists")
    python = installed(given.nixl, PACKAGES)
    described = versions(python, given.nixl, PACKAGES, given.binary)
    described.append(f"{given.entries} entries of 4 KiB over {given.regions} regions, {given.rounds} rounds; "
                     f"multirail: {given.threads or 'default'} threads; "
                     f"NIXL's initiator: {'no' if given.no_progress_thread else 'a'} progress thread")
    print("\n".join(described), flush=True)
    ours = [str(given.binary), "initiator", "--regions", str(given.regions), "--entries", str(given.entries)]
    ours += ["--threads", str(given.threads)] if given.threads else []
    theirs = [str(python), str(HERE / "nixl_pair.py"), "initiator", str(given.regions), str(given.entries)]
    theirs += ["--no-progress-thread"] if given.no_progress_thread else []
    commands = {OURS: ours, PRIVATE: [*ours, "--private"], NIXL: theirs}
    pairs = []
    try:
        for name, command in commands.items():
            pairs.append(Pair(name, command, {"NIXL_LOG_LEVEL": "WARN", **os.environ}))
            pairs[-1].await_ready()
        measure(pairs, ("write", "read"), given.rounds)
    finally:
        for pair in pairs:
            pair.end()
    found = [row for direction in ("write", "read") for row in rows(pairs, direction)]
    print()
    table(found)
    if given.json:
        all_rounds = {pair.name: pair.rounds for pair in pairs}
        kept = {"described": described, "medians": found, "rounds_us": all_rounds}
        given.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    run_program("compare.py", lambda: compare(arguments()))
