"""The matrix product of matmul.py, as a process whose windows are read."""

import queue
import subprocess
import sys
import threading
import time
from pathlib import Path

# torch may take long to load; a window then takes a twentieth of a second.
START_S, WINDOW_S = 120, 10


class Product:
    """The product, running on one GPU until the end of the `with`."""

    def __init__(self, gpu):
        self.command = [sys.executable, str(Path(__file__).resolve().parent / "matmul.py"), str(gpu)]

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(self.command, text=True, **pipes)
        self.windows, self.kept = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._next(START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        try:
            self.process.wait(timeout=WINDOW_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _read(self):
        for line in self.process.stdout:
            self.windows.put(tuple(float(word) for word in line.split()))
        self.windows.put(None)

    def _next(self, limit):
        """The next window: begun, ended, TFLOP/s."""
        try:
            window = self.windows.get(timeout=limit)
        except queue.Empty:
            raise RuntimeError(f"no window within {limit} s: {' '.join(self.command)}") from None
        if window is None:
            raise RuntimeError(f"ended by itself: {' '.join(self.command)}")
        self.kept.append(window)
        return window

    def for_seconds(self, seconds):
        """TFLOP/s of the windows of the next seconds."""
        begun = time.monotonic()
        while self._next(WINDOW_S)[1] < begun + seconds:
            pass
        return self._within(begun, begun + seconds)

    def between(self, begun, ended):
        """TFLOP/s of the windows between two moments, of which the later may just have passed."""
        while self._next(WINDOW_S)[1] < ended:
            pass
        return self._within(begun, ended)

    def _within(self, begun, ended):
        found = [speed for first, last, speed in self.kept if first >= begun and last <= ended]
        if not found:
            raise RuntimeError(f"no window within {ended - begun:.2f} s: measure longer (--seconds)")
        return found
