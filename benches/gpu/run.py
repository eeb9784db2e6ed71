#!/usr/bin/env python3
"""Measures copies of GPU memory by loopback on a machine with two GPUs, and prints all tables; with one GPU,
those that need no second one.

    benches/gpu/run.py                  everything
    benches/gpu/run.py pages small      some parts

Needs the release binary `multirail`; the parts `matmul` and `peers` need python3 with torch too. Every byte
that multirail moves is compared, save beside a matrix product. A ratio is of two figures of one run.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from beside import Product
from ours import Missing, Multirail
from table import Report, of_ours, size

HERE = Path(__file__).resolve().parent
SIZES = [64 << 10, 16 << 10, 4 << 10]
TOTAL = 256 << 20
# For the figures that are asked for: the ends of a transfer, when the line is not full, weigh little.
WHOLE = 1 << 30
BLOCKS = [4, 8, 16, 32, 64, 132]
# The most that may be given: all of any GPU.
ALL_BLOCKS = 1024
# Two windows of the product are left out at either end of what it is measured beside.
EDGE_S = 0.15


def pages(multirail, report, seconds):
    """Shuffled pages from GPU 0 to GPU 1."""
    rows = []
    for in_process in (False, True):
        for page in SIZES:
            row = multirail.bench(duration=seconds, in_process=in_process, size=page, pages=WHOLE // page)
            rows.append(of_ours(row, processes=1 if in_process else 2))
    report.table("pages", f"{size(WHOLE)} in shuffled pages, against one copy of as many bytes", rows)


def within(multirail, report, seconds):
    """The same within GPU 0."""
    rows = []
    for in_process in (False, True):
        load = {"size": SIZES[0], "pages": WHOLE // SIZES[0], "dst": "gpu:0", "blocks": ALL_BLOCKS}
        row = multirail.bench(duration=seconds, in_process=in_process, **load)
        rows.append(of_ours(row, processes=1 if in_process else 2, blocks="all"))
    report.table("within", f"{size(WHOLE)} in shuffled pages within one GPU, against one copy", rows)


def blocks(multirail, report, seconds):
    """The curve over the blocks that copy."""
    rows = []
    for page in SIZES:
        for count in BLOCKS:
            load = {"size": page, "pages": TOTAL // page, "in_process": True, "blocks": count}
            rows.append(of_ours(multirail.bench(duration=seconds / 4, **load), blocks=count))
    report.table("blocks", "The same over the blocks that copy, in one process", rows)


def matmul(multirail, report, seconds):
    """What a bf16 matrix product loses while pages are copied, and what the copy loses."""
    rows = []
    for page in (SIZES[0], SIZES[-1]):
        load = {"size": page, "pages": TOTAL // page, "duration": max(seconds, 1.5)}
        alone = multirail.bench("--no-verify", "--no-limit", **load)["gbytes_per_s"]
        for gpu, side in ((1, "target"), (0, "source")):
            with Product(gpu) as product:
                before = product.for_seconds(seconds)
                running = multirail.start("--no-verify", "--no-limit", **load)
                speed = running.row()["gbytes_per_s"]
                beside = product.between(running.ended - running.duration + EDGE_S, running.ended - EDGE_S)
                after = product.for_seconds(seconds)
            product_alone = statistics.median(before + after)
            product_beside = statistics.median(beside)
            rows.append({"page": size(page), "product on": f"GPU {gpu} ({side})", "TFLOP/s alone": product_alone,
                         "TFLOP/s beside": product_beside, "slowdown %": 100 * (1 - product_beside / product_alone),
                         "copy alone GB/s": alone, "copy beside GB/s": speed})
    title = "A bf16 product of 8192 x 8192 beside pages from GPU 0 to GPU 1, two processes, default blocks"
    report.table("matmul", title, rows)


def peers(multirail, report, seconds):
    """CUDA's and NCCL's ways side by side with ours."""
    rows = []
    for page in SIZES:
        count = TOTAL // page
        found = {}
        for in_process in (False, True):
            ours = multirail.bench(duration=seconds, in_process=in_process, size=page, pages=count)
            found[f"multirail, {1 if in_process else 2} process{'' if in_process else 'es'}"] = ours["gbytes_per_s"]
        for way in ("copies", "nccl"):
            found.update(theirs(way, page, count, seconds))
        own = found["multirail, 2 processes"]
        rows += [{"page": size(page), "way": way, "GB/s": speed, "of one copy": speed / found["one copy"],
                  "multirail's two processes / it": own / speed} for way, speed in found.items()]
    report.table("peers", f"{size(TOTAL)} in shuffled pages from GPU 0 to GPU 1, side by side", rows)


def theirs(way, page, count, seconds):
    command = [sys.executable, str(HERE / "peers.py"), way, str(page), str(count), str(seconds / 2)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()}")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        raise RuntimeError(f"{' '.join(command)} measured nothing\n{done.stderr.strip()}")
    return {row["way"]: row["gbytes_per_s"] for row in rows}


def host(multirail, report, seconds):
    """Between host and GPU, against a plain copy of page-locked memory."""
    rows = []
    shapes = [("write-pages", SIZES[0], TOTAL // SIZES[0]), ("write", TOTAL, 1)]
    for op, page, count in shapes:
        for memory in ("host-pinned", "host", "host-pageable"):
            for src, dst in ((memory, multirail.far), (multirail.far, memory)):
                load = {"src": src, "dst": dst, "size": page, "pages": count, "in_process": True}
                rows.append(of_ours(multirail.bench("--op", op, duration=seconds / 2, **load), op=op))
    report.table("host", "Between host and GPU in one process; one copy is of page-locked memory", rows)


def small(multirail, report, seconds):
    """One small write, post to done, against one small copy and the wait for it."""
    rows = []
    for in_process in (False, True):
        for bytes_ in (8, 4096):
            options = {"size": bytes_, "pages": 1, "in_process": in_process, "duration": seconds}
            row = multirail.bench("--op", "write", **options)
            rows.append({"bytes": bytes_, "processes": 1 if in_process else 2, "p50 µs": row["p50_us"],
                         "p99 µs": row["p99_us"], "copy and wait p50 µs": row["limit_p50_us"],
                         "ratio of p50": row["p50_us"] / row["limit_p50_us"]})
    report.table("small", f"A small write from gpu:0 to {multirail.far}, one at a time", rows)


BETWEEN_TWO = {part.__name__: part for part in (pages, blocks, matmul, peers)}
PARTS = BETWEEN_TWO | {part.__name__: part for part in (within, host, small)}


def machine():
    """The GPUs, in words."""
    try:
        query = ["nvidia-smi", "--query-gpu=index,name,driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError) as why:
        raise Missing(f"nvidia-smi: {why}; this needs a machine with NVIDIA GPUs") from None


def main():
    help_of_parts = "; ".join(f"{name}: {part.__doc__.splitlines()[0].rstrip('.')}" for name, part in PARTS.items())
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("parts", nargs="*", metavar="PART", help=f"default: all. {help_of_parts}")
    arguments.add_argument("--multirail", metavar="PATH", help="the binary [$MULTIRAIL, or target/dist/multirail]")
    arguments.add_argument("--seconds", type=float, default=1.0, help="how long most measurements take [1]")
    arguments.add_argument("--json", metavar="FILE", help="keep all rows there too, one JSON object per line")
    given = arguments.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        arguments.error(f"no such part: {' '.join(unknown)}; there are {' '.join(PARTS)}")
    if not given.seconds > 0:
        arguments.error("--seconds is more than 0")
    report, failed = Report(), []
    try:
        gpus = machine()
        if not gpus:
            raise Missing("nvidia-smi lists no GPU")
        multirail = Multirail(given.multirail, far=f"gpu:{min(len(gpus), 2) - 1}")
    except Missing as why:
        sys.exit(f"run.py: {why}")
    print("\n".join([multirail.version(), *gpus]), flush=True)
    for name in given.parts or PARTS:
        try:
            if name in BETWEEN_TWO and len(gpus) < 2:
                if name in given.parts:
                    raise Missing("there is one GPU, and it needs two")
                print(f"\nskipped: {name}: there is one GPU, and it needs two", flush=True)
                continue
            PARTS[name](multirail, report, given.seconds)
        except (Missing, RuntimeError, subprocess.TimeoutExpired) as why:
            # The other parts are worth having; the exit status says that one is missing.
            print(f"\n{name}: FAILED: {why}\n", flush=True)
            failed.append(name)
    if given.json:
        Path(given.json).write_text("".join(json.dumps(row) + "\n" for row in report.rows))
    if failed:
        sys.exit(f"run.py: failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
