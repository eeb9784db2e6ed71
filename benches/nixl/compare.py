#!/usr/bin/env python3
"""Measures NIXL over multirail beside NIXL over UCX, and NIXL's own cost, with the same script and wheel.

    integrations/nixl/build
    benches/nixl/compare.py                        memory of the host
    benches/nixl/compare.py --cuda --python PATH   memory of two GPUs, by a Python that has torch, NIXL and numpy

Pairs of processes take turns: the back ends UCX and MULTIRAIL, and one that moves nothing. While one pair measures, the
others are stopped. The memory is the program's own, so that the kernel copies it between processes. The table has the
medians of the rounds, and the bounds that the project has set itself. NIXL is installed below target/ unless --python
names one that has it.
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
HOST = ["4 KiB", "256 x 4 KiB", "256 x 4 KiB with gaps", "256 x 64 KiB", "112,000 x 1 KiB", "112,000 x 1 KiB with gaps"]
GPU = ["4096 x 64 KiB", "16384 x 16 KiB", "65536 x 4 KiB"]
#: At least how many times faster than UCX.
BOUNDS = {
    "4 KiB": 1,
    "256 x 4 KiB": 2.5,
    "256 x 4 KiB with gaps": 2.5,
    "256 x 64 KiB": 2,
    "112,000 x 1 KiB": 5,
    "112,000 x 1 KiB with gaps": 5,
    "4096 x 64 KiB": 30,
    "16384 x 16 KiB": 80,
    "65536 x 4 KiB": 300,
}
#: At most this part of UCX's processor time for a byte, over all loads of pages.
PROCESSOR_BOUND, PROCESSOR_LOAD = 0.5, "256 x 64 KiB"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--plugins",
        metavar="FOLDER",
        type=Path,
        default=ROOT / "target/nixl",
        help="what integrations/nixl/build has made [target/nixl]",
    )
    parser.add_argument("--python", metavar="PATH", type=Path, help="a Python that has NIXL and numpy")
    parser.add_argument("--cuda", action="store_true", help="memory of two GPUs")
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--json", metavar="FILE", type=Path, help="keep the table and all rounds there, too")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    return given


def folder_of_plugins(given):
    """A folder with the plug-ins of the project. NIXL looks into it alone: UCX's, in the wheel, must not move."""
    made = ROOT / "target/nixl/compared"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for plugin in (given.plugins / "libplugin_MULTIRAIL.so", given.plugins / "tests/libplugin_MULTIRAIL_NULL.so"):
        if not plugin.exists():
            raise Failed(f"{plugin} is missing: integrations/nixl/build")
        (made / plugin.name).symlink_to(plugin.resolve())
    return made


def compare(given):
    environment = given.plugins / "compare"
    python = given.python or installed(environment, PACKAGES)
    plugins = folder_of_plugins(given)
    described = versions(python, python.parent.parent, PACKAGES, str(given.plugins / "libplugin_MULTIRAIL.so"))
    described.append(f"{given.rounds} rounds")
    print("\n".join(described), flush=True)
    loads = GPU if given.cuda else HOST
    # Memory of GPUs means nothing to a back end that moves nothing: its cost is that of the host's.
    backends = ["UCX", "MULTIRAIL", "MULTIRAIL_NULL"]
    settings = {"NIXL_LOG_LEVEL": "WARN", **os.environ}
    settings.pop("NIXL_PLUGIN_DIR", None)
    pairs = []
    try:
        for backend in backends:
            command = [str(python), str(HERE / "pair.py"), backend, "cuda" if given.cuda else "host"]
            only = {} if backend == "UCX" else {"NIXL_PLUGIN_DIR": str(plugins)}
            pairs.append(Pair(backend, command, settings | only))
            pairs[-1].await_ready()
        measure(pairs, loads, given.rounds)
        for pair in pairs[:2]:
            pair.round("arrived", kept=True)
            if not pair.rounds["arrived"][0]["arrived"]:
                raise Failed(f"{pair.name}: not every byte has arrived")
    finally:
        for pair in pairs:
            pair.end()
    found = [row(load, pairs) for load in loads]
    print()
    table(found)
    missed = [each["NIXL over multirail"] for each in found if each["bound"].startswith("missed")]
    if given.json:
        kept = {pair.name: pair.rounds for pair in pairs}
        given.json.write_text(json.dumps({"described": described, "found": found, "rounds": kept}, indent=1) + "\n")
    print(f"\nbounds missed: {', '.join(missed)}" if missed else "\nevery bound holds")


def row(load, pairs):
    def median(pair, what):
        return statistics.median(times[what] for times in pair.rounds[load])

    def ratio(what):
        ucx, ours = (pair.rounds[load] for pair in pairs[:2])
        return statistics.median(u[what] / o[what] for u, o in zip(ucx, ours, strict=True) if o[what] > 0)

    ucx, ours, null = pairs
    faster, busy = ratio("us"), 1 / ratio("cpu_s_per_gb")
    holds = faster >= BOUNDS[load]
    bound = f"{BOUNDS[load]}x"
    if load == PROCESSOR_LOAD:
        bound, holds = f"{bound}, CPU {PROCESSOR_BOUND}", holds and busy <= PROCESSOR_BOUND
    return {
        "NIXL over multirail": load,
        "UCX, µs": median(ucx, "us"),
        "multirail, µs": median(ours, "us"),
        "nothing, µs": median(null, "us"),
        "times faster": faster,
        "UCX, CPU s/GB": median(ucx, "cpu_s_per_gb"),
        "multirail, CPU s/GB": median(ours, "cpu_s_per_gb"),
        "CPU ratio": busy,
        "bound": f"{'holds' if holds else 'missed'}: {bound}",
    }


if __name__ == "__main__":
    run_program("compare.py", lambda: compare(arguments()))
