#!/usr/bin/env python3
"""Draws docs/performance.svg: GB/s of a rail group over page size, for each way that pages can take.

    cargo build --profile dist -p multirail-cli
    benches/ways/plot.py [--multirail PATH] [--check]

The figures are those of `multirail simulate`: a model, with costs that were counted or measured. They are the same on
every machine. With --check the script compares its picture with the committed one, and fails if they differ.
"""

import argparse
import json
import subprocess
import sys
from math import log2, log10
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "performance.svg"

SIZES = [1 << power for power in range(10, 19)]
# Options that all machines of a panel share. fabric-lib's 11.1 million requests a second are 90 ns each.
PANELS = [
    ("p5: 4 x 100 Gbps, efa-direct", ["--profile=p5", "--provider=efa-direct"]),
    ("p5en: 2 x 200 Gbps, efa-direct", ["--profile=p5en", "--provider=efa-direct"]),
    ("ConnectX-7: 400 Gbps, 90 ns a request", ["--profile=cx7", "--post-cost-ns=90"]),
]
# The way, the legend, the options, the colour.
WAYS = [
    ("direct", "direct: a request per page", [], "#1f5fa8"),
    ("merged", "merged: runs of 8 pages", ["--run=8"], "#2f8f4e"),
    ("gathered", "gathered: 8 pages in order at the target", ["--target-run=8"], "#8a5fb5"),
    ("coalesced", "coalesced, GPU to GPU", ["--coalesce=always"], "#c8472b"),
    ("coalesced", "coalesced, host to host", ["--coalesce=always", "--memory=host"], "#d99a2b"),
]
LIMITS = [("line", "limit: the line", "6 3"), ("requests", "limit: the cards' rate of requests", "2 3")]

WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 300, 52, 34, 58
LEAST, MOST = 0.5, 80.0  # GB/s


def simulate(multirail, options):
    """The rows of all sizes."""
    sizes = [f"--size={size}" for size in SIZES]
    command = [multirail, "simulate", "--json", "--groups=1", *options, *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def x_of(size):
    return (log2(size) - log2(SIZES[0])) / (log2(SIZES[-1]) - log2(SIZES[0])) * WIDTH


def y_of(rate):
    clamped = min(max(rate, LEAST), MOST)
    return HEIGHT - (log10(clamped) - log10(LEAST)) / (log10(MOST) - log10(LEAST)) * HEIGHT


def line(points, colour, dash="", width=2.0):
    path = " ".join(f"{x_of(size):.1f},{y_of(rate):.1f}" for size, rate in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def text(x, y, words, anchor="middle", size=11, colour="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{words}</text>'


def of_bytes(size):
    return f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def panel(multirail, title, options):
    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="#999"/>', text(WIDTH / 2, -12, title, size=13)]
    for rate in (0.5, 1, 2, 5, 10, 20, 50):
        y = y_of(rate)
        out.append(f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        out.append(text(-6, y + 4, f"{rate:g}", "end"))
    for size in SIZES[::2]:
        out.append(text(x_of(size), HEIGHT + 16, of_bytes(size)))
    drawn = []
    for way, label, extra, colour in WAYS:
        rows = simulate(multirail, [*options, *extra])
        points = [(row["size"], row["gbytes_per_s"]) for row in rows if row["way"] == way]
        # Merged and gathered pages go alone once the line is full: that is the direct way's line.
        if points:
            out.append(line(points, colour))
            out += [f'<circle cx="{x_of(size):.1f}" cy="{y_of(rate):.1f}" r="2.4" fill="{colour}"/>' for size, rate in points]
            drawn.append((label, colour, ""))
    first = simulate(multirail, options)[0]
    ceiling = first["ceiling_gbps"] / 8
    # At the smallest size the cards' rate is known from how much of it was used.
    rate = first["gbytes_per_s"] / first["size"] / (first["requests_percent"] / 100)
    limits = {"line": lambda _: ceiling, "requests": lambda size: rate * size}
    for name, label, dash in LIMITS:
        points = [(size, limits[name](size)) for size in SIZES if limits[name](size) <= MOST]
        out.append(line(points, "#555", dash, 1.2))
        drawn.append((label, "#555", dash))
    chosen = simulate(multirail, [*options, "--coalesce=auto"])
    for row in chosen:
        x, y = x_of(row["size"]), y_of(row["gbytes_per_s"])
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="none" stroke="#111" stroke-width="1.4"/>')
    return out, drawn


def legend(entries, y):
    out = []
    for number, (label, colour, dash) in enumerate(entries):
        x, row = LEFT + (number % 3) * 375, y + number // 3 * 20
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        out.append(f'<line x1="{x}" x2="{x + 26}" y1="{row}" y2="{row}" stroke="{colour}" stroke-width="2"{dashes}/>')
        out.append(text(x + 34, row + 4, label, "start"))
    number = len(entries)
    x, row = LEFT + (number % 3) * 375, y + number // 3 * 20
    out.append(f'<circle cx="{x + 13}" cy="{row}" r="5.5" fill="none" stroke="#111" stroke-width="1.4"/>')
    out.append(text(x + 34, row + 4, "what auto takes, scattered pages GPU to GPU", "start"))
    return out


def picture(multirail):
    body, entries = [], []
    for number, (title, options) in enumerate(PANELS):
        shapes, drawn = panel(multirail, title, options)
        body.append(f'<g transform="translate({LEFT + number * (WIDTH + GAP)},{TOP})">' + "\n".join(shapes) + "</g>")
        entries += [entry for entry in drawn if entry not in entries]
    body.append(text(14, TOP + HEIGHT / 2, "GB/s of a rail group", size=12).replace("<text", f'<text transform="rotate(-90 14 {TOP + HEIGHT / 2:.1f})"'))
    body.append(text(LEFT + 1.5 * WIDTH + GAP, TOP + HEIGHT + 36, "page size", size=12))
    body += legend(entries, TOP + HEIGHT + 58)
    width, height = LEFT + 3 * WIDTH + 2 * GAP + 34, TOP + HEIGHT + 118
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="#fff"/>', *body, "</svg>"]) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--multirail", default=ROOT / "target/dist/multirail", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.multirail.exists():
        sys.exit(f"{arguments.multirail} is missing: cargo build --profile dist -p multirail-cli, or give --multirail PATH")
    drawn = picture(arguments.multirail)
    if not arguments.check:
        PICTURE.write_text(drawn)
        print(f"wrote {PICTURE.relative_to(ROOT)}")
    elif PICTURE.read_text() != drawn:
        sys.exit(f"{PICTURE.relative_to(ROOT)} differs from what simulate says now: run {Path(__file__).name} and look at it")


if __name__ == "__main__":
    main()
