"""The command under test: `multirail bench`, one row of JSON per run."""

import json
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Set-up, filling, comparing and a generous wait beside the duration asked for.
LIMIT_S = 180


class Missing(Exception):
    """Something asked for is not there; the text says what would mend it."""


class Multirail:
    """The binary, and the GPU that it copies to unless told otherwise: `gpu:1`, or `gpu:0` where there is one."""

    def __init__(self, path, far):
        self.far = far
        self.path = path or os.environ.get("MULTIRAIL") or str(ROOT / "target/dist/multirail")
        if shutil.which(self.path) is None:
            raise Missing(f"{self.path} is no program: build it (cargo build --profile dist) or give --multirail PATH")

    def version(self):
        done = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def bench(self, *options, duration, **settings):
        """One measurement, by the options of `multirail bench`; its row."""
        return self.start(*options, duration=duration, **settings).row()

    def start(self, *options, duration, src="gpu:0", dst=None, in_process=False, blocks=None, size=None, pages=None):
        """A measurement that runs beside others."""
        command = [self.path, "bench", "--json", "--backend", "loopback", "--src", src, "--dst", dst or self.far]
        command += ["--duration", f"{round(duration * 1000)}ms"]
        command += ["--in-process"] if in_process else []
        command += ["--gpu-blocks", str(blocks)] if blocks else []
        command += ["--size", str(size)] if size else []
        command += ["--pages", str(pages)] if pages else []
        return Running(command + [str(option) for option in options], duration)


class Running:
    """A bench that was started."""

    def __init__(self, command, duration):
        self.command, self.duration, self.ended = command, duration, None
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def row(self):
        """Waits for it. `ended` is when its row came, which is right after its last round unless it verifies."""
        alarm = threading.Timer(LIMIT_S, self.process.kill)
        alarm.start()
        try:
            line = self.process.stdout.readline()
            self.ended = time.monotonic()
            _, errors = self.process.communicate()
        finally:
            alarm.cancel()
        if self.process.returncode != 0:
            late = f"killed after {LIMIT_S} s; " if self.process.returncode < 0 else ""
            raise RuntimeError(f"{late}{' '.join(self.command)}\n{errors.strip()}")
        row = json.loads(line)
        if not row["verified"] and "--no-verify" not in self.command:
            raise RuntimeError(f"not verified: {' '.join(self.command)}")
        return row
