"""A bf16 matrix product that never ends, on one GPU, for what runs beside it to disturb.

    python3 matmul.py GPU [N]

Prints a line per window: when it began and ended (time.monotonic, which processes of one host share) and
its TFLOP/s. It ends with its standard input.
"""

import sys
import threading
import time

WINDOW_S = 0.05


def main():
    import torch

    gpu, n = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8192
    torch.cuda.set_device(gpu)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def products(count):
        """Milliseconds of the GPU."""
        first.record()
        for _ in range(count):
            torch.matmul(a, b, out=out)
        last.record()
        last.synchronize()
        return first.elapsed_time(last)

    # The library chooses its kernel, and the clocks rise.
    until = time.monotonic() + 1
    while time.monotonic() < until:
        each_ms = products(8) / 8
    count = max(1, round(WINDOW_S * 1e3 / each_ms))

    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        begun = time.monotonic()
        took_ms = products(count)
        print(begun, time.monotonic(), count * 2 * n**3 / took_ms / 1e9, flush=True)


if __name__ == "__main__":
    main()
