"""What the tests share: two connected fabrics, bytes that differ from each other, and programs of their own."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import multirail

LIMIT = 30.0
"""Seconds after which a wait that should have ended is a failure."""

SCALE = int(os.environ.get("MULTIRAIL_TEST_SCALE", "1"))
"""Multiplies the rounds of the tests that look for leaks, and the examples of hypothesis."""


@dataclass
class Pair:
    """Two fabrics of this process, and each one's handle of the other."""

    a: multirail.Fabric
    b: multirail.Fabric
    ab: multirail.Peer
    ba: multirail.Peer

    def remote(self, region: multirail.Region) -> multirail.RemoteRegion:
        """A region of `b`, for use by `a`."""
        return self.ab.import_region(region.descriptor())

    def regions(self, length: int) -> tuple[multirail.Region, multirail.Region, multirail.RemoteRegion]:
        """A region of `a`, one of `b`, and `a`'s handle of the latter."""
        there = self.b.alloc(length)
        return self.a.alloc(length), there, self.remote(there)


@contextlib.contextmanager
def connected(**options: Any) -> Iterator[Pair]:
    """Two connected fabrics over loopback."""
    with multirail.Fabric("loopback", **options) as a, multirail.Fabric("loopback", **options) as b:
        yield Pair(a, b, *a.connect_local(b))


@pytest.fixture
def pair() -> Iterator[Pair]:
    # The least that is allowed: a fabric opens in a few milliseconds with so little.
    with connected(notifications=4 << 20) as made:
        yield made


def pattern(length: int, seed: int = 0) -> bytes:
    """Bytes in which no two neighbouring pages are equal."""
    # 251 is prime, so the bytes of two pages differ at the same offset.
    period = bytes((seed + step * 7) % 251 for step in range(251))
    return (period * (length // 251 + 1))[:length]


def run_python(
    code: str, *arguments: str, limit: float = LIMIT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program. A hang is a `subprocess.TimeoutExpired`; the output is text."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def check_clean(done: subprocess.CompletedProcess[str], output: str = "") -> None:
    """The program has ended with exit code 0, has printed this, and nothing on stderr."""
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", output)


@contextlib.contextmanager
def child(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A program that runs beside the test. It is killed at the end, if it has not ended before."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a program prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], line: str) -> None:
    """Writes a line to the program's input."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def open_files() -> int:
    """The number of this process's file descriptors."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def resident() -> int:
    """The bytes of this process that are in memory and belong to no file."""
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
