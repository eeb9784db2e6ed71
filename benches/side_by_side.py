"""What the side-by-side measurements share: pairs of processes that take turns, commands of `multirail bench`, packages
from PyPI, tables."""

import contextlib
import importlib.metadata
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INSTALL_LIMIT_S, ROUND_LIMIT_S, END_LIMIT_S = 600, 300, 10


class Failed(Exception):
    """A step that did not succeed; the text says why, or what to do."""


class Pair:
    """The two processes of a library, in a process group of their own. They are stopped outside of a round."""

    def __init__(self, name, command, environment, errors=None):
        """`errors` is a file for what the processes write to their error output; by default it is this program's."""
        self.name, self.rounds, self.lines = name, {}, queue.Queue()
        # The child stays in this terminal session: if this program is killed, Linux ends the stopped processes of
        # the group.
        settings = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors, "process_group": 0}
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
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def await_ready(self):
        self._next()
        self._signal(signal.SIGSTOP)

    def round(self, command, kept):
        """Measures one round of a command."""
        self._signal(signal.SIGCONT)
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        times = self._next()
        self._signal(signal.SIGSTOP)
        if kept:
            self.rounds.setdefault(command, []).append(times)
        return times

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


def measure(pairs, commands, rounds):
    """Lets the pairs take turns at each command, one round more than is kept: the first warms up."""
    for number in range(rounds + 1):
        for command in commands:
            for pair in pairs:
                pair.round(command, kept=number > 0)
        print(f"round {number} of {rounds}" if number else "warm", file=sys.stderr, flush=True)


def run_program(name, program):
    """Runs a measurement. What fails it becomes one sentence."""
    # Python runs `finally` then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(f"{name}: terminated"))
    try:
        program()
    except (Failed, BrokenPipeError, subprocess.CalledProcessError) as why:
        sys.exit(f"{name}: {why}")


def installed(directory, packages):
    """The Python of a virtual environment that has these packages. Makes it if it is not there."""
    python = directory / "bin/python"
    if not (directory / "complete").exists():
        print(f"installing {', '.join(packages)} into {directory}", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(directory)])
        # Without dependencies: torch is one, and is not needed here.
        run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *packages])
        (directory / "complete").touch()
    return python


def run(command, folder=None, limit_s=INSTALL_LIMIT_S):
    try:
        subprocess.run(command, check=True, timeout=limit_s, cwd=folder)
    except (OSError, subprocess.SubprocessError) as why:
        raise Failed(str(why)) from None


def versions(python, directory, packages, ours):
    """The versions of the programs, and the machine. `ours` names what of multirail is measured."""
    known = {}
    for where in directory.glob("lib/python*/site-packages"):
        known |= {found.name: found.version for found in importlib.metadata.distributions(path=[str(where)])}
    described = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True,
                               text=True, check=False).stdout.strip()
    names = [package.split("==")[0] for package in packages]
    found = ", ".join(f"{name} {known.get(name, 'is missing')}" for name in names)
    kernel = os.uname()
    return [f"multirail {described or '(no git)'}: {ours}", f"{found}: {python}",
            f"{os.cpu_count()} cores, {processor()}, {kernel.sysname} {kernel.release}"]


def processor():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown processor"
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")


def bench_command(multirail, device, **options):
    """The command of one `multirail bench` over a device: a provider of libfabric, or `verbs`. Options without a value are
    left out."""
    words = [str(multirail), "bench", "--backend", "verbs" if device == "verbs" else "efa"]
    words += [] if device == "verbs" else ["--provider", device]
    # Sockets stay on this host.
    words += ["--node", "127.0.0.1"] if device == "tcp" else []
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return [*words, "--no-limit", "--json"]


def bench_row(line):
    """The row of a bench whose bytes were right."""
    row = json.loads(line)
    if not row["verified"]:
        raise Failed(f"wrong bytes: {line}")
    return row


def table(rows):
    """Prints rows, dicts with the same keys."""
    header = list(rows[0])
    cells = [header] + [[text(row[key]) for key in header] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for number, line in enumerate(cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")
        if number == 0:
            print("|" + "|".join("-" * (width + 2) for width in widths) + "|")


def text(value):
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return value
