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
import importlib.metadata
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGES = ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"]
INSTALL_LIMIT_S, ROUND_LIMIT_S, END_LIMIT_S = 600, 300, 10
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


class Failed(Exception):
    """A step that did not succeed; the text says why, or what to do."""


class Pair:
    """The two processes of a library, in a process group of their own. They are stopped outside of a round."""

    def __init__(self, name, command, environment):
        self.name, self.rounds, self.lines = name, {"write": [], "read": []}, queue.Queue()
        # The child stays in this terminal session: if this program is killed, Linux ends the stopped processes of the group.
        settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "process_group": 0}
        self.process = subprocess.Popen(command, text=True, env=environment, **settings)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            # A library may write other lines, for example its log.
            if line.startswith("{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _next(self):
        try:
            answer = self.lines.get(timeout=ROUND_LIMIT_S)
        except queue.Empty:
            raise Failed(f"{self.name}: no answer within {ROUND_LIMIT_S} s") from None
        if answer is None:
            raise Failed(f"{self.name}: its initiator has ended; its error is above")
        return answer

    def _signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def await_ready(self):
        self._next()
        self._signal(signal.SIGSTOP)

    def round(self, direction, kept):
        """Measures one round."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(direction + "\n")
        self.process.stdin.flush()
        times = self._next()
        self._signal(signal.SIGSTOP)
        if kept:
            self.rounds[direction].append(times)

    def end(self):
        """Ends both processes."""
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.close()
            self.process.wait(timeout=END_LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        # Also a target that its initiator has left behind.
        self._signal(signal.SIGKILL)
        self.process.wait()


def installed(directory):
    """The Python of a virtual environment that has NIXL. Makes it if it is not there."""
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        print(f"installing {', '.join(PACKAGES)} into {directory}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(directory)])
        # Without dependencies: torch is one, and is not needed here.
        run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES])
        (directory / "complete").touch()
    return python


def run(command):
    try:
        subprocess.run(command, check=True, timeout=INSTALL_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as why:
        raise Failed(str(why)) from None


def versions(python, directory, binary):
    """The versions of the programs, and the machine."""
    packages = {}
    for where in directory.glob("lib/python*/site-packages"):
        packages |= {found.name: found.version for found in importlib.metadata.distributions(path=[str(where)])}
    described = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True,
                               text=True, check=False).stdout.strip()
    names = [package.split("==")[0] for package in PACKAGES]
    found = ", ".join(f"{name} {packages.get(name, 'is missing')}" for name in names)
    kernel = os.uname()
    return [f"multirail {described or '(no git)'}: {binary}", f"{found}: {python}",
            f"{os.cpu_count()} cores, {processor()}, {kernel.sysname} {kernel.release}"]


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def rows(pairs, direction):
    """The medians of each library in ms, and the ratios to NIXL's."""
    theirs = pairs[-1].rounds[direction]
    for name, words in TIMES.items():
        row = {"direction": direction, "what": words}
        for pair in pairs:
            row[f"{pair.name}, ms"] = median(pair.rounds[direction], name) / 1e3
        for pair in pairs[:-1]:
            # Of the rounds that follow each other: both had the same neighbours on the machine.
            ratios = [b[name] / a[name] for a, b in zip(pair.rounds[direction], theirs)]
            row[f"NIXL / {pair.name}"] = statistics.median(ratios)
        yield row


def median(rounds, name):
    return statistics.median(times[name] for times in rounds)


def table(rows):
    """Prints rows, dicts with the same keys."""
    header = list(rows[0])
    cells = [header] + [[text(row[key]) for key in header] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for number, line in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def text(value):
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return value


def measured(pairs, rounds):
    """Runs the rounds: ours, theirs, ours, theirs. The first one brings connections and mappings up."""
    for number in range(rounds + 1):
        for direction in ("write", "read"):
            for pair in pairs:
                pair.round(direction, kept=number > 0)
        print(f"round {number} of {rounds}" if number else "warm", file=sys.stderr, flush=True)


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
    python = installed(given.nixl)
    described = versions(python, given.nixl, given.binary)
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
        measured(pairs, given.rounds)
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


def main():
    # Python runs `finally` then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("compare.py: terminated"))
    try:
        compare(arguments())
    except (Failed, BrokenPipeError) as why:
        sys.exit(f"compare.py: {why}")


if __name__ == "__main__":
    main()
