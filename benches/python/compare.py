#!/usr/bin/env python3
"""Measures what the Python module adds to the library, and NIXL's Python beside it, on one machine.

    cargo build --profile dist -p benches --bin calls
    benches/python/compare.py --wheel FILE

Three pairs of processes take turns: the library from Rust, the module, and NIXL over UCX. While one pair measures, the
others are stopped. The table has the medians of the rounds, and the bounds that the project has set itself. The wheel
and NIXL are installed into a virtual environment under target/.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from side_by_side import ROOT, Failed, Pair, installed, measure, run_program, table, versions  # noqa: E402

PACKAGES = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
RUST, PYTHON, NIXL = "multirail, Rust", "multirail, Python", "NIXL's Python over UCX"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", metavar="PATH", default=ROOT / "target/dist/calls", help="[target/dist/calls]")
    parser.add_argument("--wheel", metavar="FILE", type=Path, required=True, help="the wheel of multirail to measure")
    parser.add_argument("--venv", metavar="FOLDER", default=ROOT / "target/python", type=Path, help="[target/python]")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the table and all rounds there, too")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    return given


def rows(pairs):
    """A row for each bound: the measured figure, the bound, and whether the figure keeps it."""
    rust, python, nixl = (pair.rounds["calls"] for pair in pairs)

    def median(rounds, name):
        return statistics.median(times[name] for times in rounds)

    def ratio(above, below):
        return statistics.median(a / b for a, b in zip(above, below, strict=True))

    def column(rounds, name):
        return [times[name] for times in rounds]

    added = median(python, "write") - median(rust, "write")
    yield row("4 KiB write, from Python, beyond Rust, µs", added, 0.8, added <= 0.8, "at most")
    faster = ratio(column(nixl, "write"), column(python, "write"))
    yield row("4 KiB write, NIXL's Python / multirail's", faster, 3, faster >= 3, "at least")
    post = ratio(column(python, "post"), column(rust, "post"))
    yield row("post of 16,384 pages, Python / Rust", post, 1.05, post <= 1.05, "at most")
    hop = [times["awaited"] - times["hop"] - waited["short"] for times, waited in zip(python, rust, strict=True)]
    hop = statistics.median(hop)
    yield row("await of an operation, beyond Rust's wait and a hop of the loop, µs", hop, 15, hop <= 15, "at most")
    rate = ratio(column(python, "awaits_per_s"), column(python, "bare_awaits_per_s"))
    yield row("10,000 concurrent awaits, rate / that of bare futures", rate, 0.7, rate >= 0.7, "at least")


def row(what, measured, bound, holds, kind):
    return {"what": what, "measured": measured, "bound": f"{kind} {bound}", "": "holds" if holds else "missed"}


def compare(given):
    if shutil.which(given.binary) is None:
        raise Failed(f"{given.binary} is no program: cargo build --profile dist -p benches --bin calls")
    python = installed(given.venv, PACKAGES)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(given.wheel)],
                   check=True)
    described = versions(python, given.venv, PACKAGES, f"{given.binary}, {given.wheel.name}")
    described.append(f"{given.rounds} rounds")
    print("\n".join(described), flush=True)
    commands = {RUST: [str(given.binary)], PYTHON: [str(python), str(HERE / "pair.py")],
                NIXL: [str(python), str(HERE / "nixl_pair.py")]}
    pairs = []
    try:
        for name, command in commands.items():
            pairs.append(Pair(name, command, {"NIXL_LOG_LEVEL": "WARN", **os.environ}))
            pairs[-1].await_ready()
        measure(pairs, ["calls"], given.rounds)
    finally:
        for pair in pairs:
            pair.end()
    found = list(rows(pairs))
    print()
    table([{"what": pair.name} | {name: statistics.median(times[name] for times in pair.rounds["calls"]) if name in
                                  pair.rounds["calls"][0] else "" for name in pairs[1].rounds["calls"][0]}
           for pair in pairs])
    print()
    table(found)
    if given.json:
        all_rounds = {pair.name: pair.rounds for pair in pairs}
        results = {"described": described, "found": found, "rounds": all_rounds}
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_program("compare.py", lambda: compare(arguments()))
