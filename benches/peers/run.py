#!/usr/bin/env python3
"""Measures multirail, UCX, NIXL and Mooncake side by side between two processes of this machine.

    benches/peers/run.py                  nine rounds; a table in target/peers/peers.md, a page in target/peers/peers.html
    benches/peers/run.py --rounds 3       fewer rounds
    benches/peers/run.py --self-check     draws made-up figures, and installs and measures nothing

It builds our program, installs the others from PyPI into a virtual environment under target/, and compiles the program
that calls UCX. The libraries take turns at each load: while one library's processes run, those of the others are
stopped. A library that cannot be installed or run is named with its reason.
"""

import argparse
import datetime
import json
import os
import shutil
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import page  # noqa: E402
from side_by_side import ROOT, Failed, Pair, run, run_program, versions  # noqa: E402

OURS, UCX, NIXL, MOONCAKE = "multirail", "UCX", "NIXL", "Mooncake"
#: Ours comes first. The names of the packages on PyPI; they are installed without dependencies.
PACKAGES = {
    UCX: ["libucx-cu12==1.22.0"],
    NIXL: ["nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"],
    MOONCAKE: ["mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"],
}
LIBRARIES = [OURS, *PACKAGES]
KIB = 1 << 10
PEERS = 8

#: Sections: a title, what carries the bytes of each library, and the loads: a name, and the command, with the field of
#: its answer unless that is `us`.
SECTIONS = [
    ("Writes over shared memory, until they are delivered", {OURS: "shared", UCX: "shared", NIXL: "shared", MOONCAKE: "tcp"}, [
        ("8 B", "write 8"),
        ("4 KiB", f"write {4 * KIB}"),
        ("64 KiB", f"write {64 * KIB}"),
        ("1 MiB", f"write {KIB * KIB}"),
        ("a page of 256 x 4 KiB", f"pages 256 {4 * KIB} 0"),
        ("a page of 1024 x 4 KiB", f"pages 1024 {4 * KIB} 0"),
        ("a page of 1024 x 64 KiB", f"pages 1024 {64 * KIB} 0"),
    ]),
    ("Lists of entries with gaps, over shared memory", {OURS: "shared", UCX: "shared", NIXL: "shared", MOONCAKE: "tcp"}, [
        ("an entry of 256 x 4 KiB", f"pages 256 {4 * KIB} {4 * KIB}"),
        ("an entry of 4096 x 4 KiB", f"pages 4096 {4 * KIB} {4 * KIB}"),
    ]),
    ("Messages over shared memory", {OURS: "driven", UCX: "shared", NIXL: "shared", MOONCAKE: "tcp"}, [
        ("8 B, half a round trip", "message 8"),
        ("4 KiB, half a round trip", f"message {4 * KIB}"),
        ("8 B, one of many", "messages 8"),
        ("4 KiB, one of many", f"messages {4 * KIB}"),
    ]),
    ("Many peers over shared memory", {OURS: "shared", UCX: "shared", NIXL: "shared", MOONCAKE: "tcp"}, [
        (f"8 B to each of {PEERS} in turn", f"peers {PEERS}"),
        ("connecting one of them, to its first write", (f"peers {PEERS}", "connect_us")),
    ]),
    ("Writes over TCP on 127.0.0.1, until they are delivered", dict.fromkeys(LIBRARIES, "tcp"), [
        ("8 B", "write 8"),
        ("64 KiB", f"write {64 * KIB}"),
        ("1 MiB", f"write {KIB * KIB}"),
        ("a page of 256 x 4 KiB", f"pages 256 {4 * KIB} 0"),
    ]),
]
#: What each column is, under the table.
NOTES = [
    "multirail: its own shared memory and two worker threads; over TCP, libfabric's provider `tcp`. For messages the "
    "measuring thread drives the engine.",
    "UCX: `ucp_put_nbx` and a flush of the endpoint, from C; memory that UCX allocates, `UCX_TLS=posix,self` or "
    "`tcp,self`. Messages are active messages. It has no call for pages or lists: a put for each.",
    "NIXL: its Python over UCX, the program's own memory; a prepared transfer, posted and checked until it is done. "
    "Messages are notifications.",
    "Mooncake: its Python, always over its protocol `tcp`; batches of 128.",
]
#: The rows of README's table: section, load, words.
README = [(0, "4 KiB", "4 KiB"), (0, "a page of 256 x 4 KiB", "a page of a batch of 256 x 4 KiB"), (0, "64 KiB", "64 KiB")]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="[9]")
    parser.add_argument("--binary", metavar="PATH", type=Path, help="our program [build target/dist/peers]")
    parser.add_argument("--out", metavar="FOLDER", type=Path, default=ROOT / "target/peers", help="[target/peers]")
    parser.add_argument("--self-check", action="store_true", help="draw made-up figures, and check the drawing")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds is at least 1")
    return given


class Contestant:
    """A library over one transport: its two processes, or the reason why there are none."""

    def __init__(self, library, over, out):
        self.library, self.over, self.reason, self.pair = library, over, None, None
        self.log = out / f"{library}-{over}.log"

    def start(self, command, environment):
        with self.log.open("w") as errors:
            self.pair = Pair(f"{self.library} over {self.over}", command, {**os.environ, **environment}, errors)
        try:
            self.pair.await_ready()
        except Failed as why:
            self.fail(why)

    def fail(self, why):
        """No longer takes part. The last line of its errors says more."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        self.reason = f"{why} ({last})" if last else str(why)
        if self.pair:
            self.pair.end()
            self.pair = None

    def round(self, command):
        """The answer to a command, or the reason why there is none."""
        if self.pair is None:
            return {"missing": self.reason}
        try:
            return self.pair.round(command, kept=False)
        except (Failed, BrokenPipeError) as why:
            self.fail(why)
            return {"missing": self.reason}


def commands_of(library, over, given, environment):
    """What runs a library's initiator: the command, and its environment."""
    if library == OURS:
        binary = str(given.binary or ROOT / "target/dist/peers")
        return [binary, "--over", "tcp" if over == "tcp" else "loopback", *(["--driven"] if over == "driven" else [])], {}
    if library == UCX:
        return [str(given.out / "ucx")], {"UCX_TLS": "tcp,self" if over == "tcp" else "posix,self"}
    python = str(environment / "bin/python")
    transports = {"UCX_TLS": "tcp,self"} if (library, over) == (NIXL, "tcp") else {}
    return [python, str(HERE / "side.py"), library.lower()], {"NIXL_LOG_LEVEL": "WARN", **transports}


def prepare(library, given, environment):
    """Installs a library, or builds ours."""
    if library == OURS:
        if given.binary is None:
            run(["cargo", "build", "--locked", "--profile", "dist", "-p", "benches", "--bin", "peers"], ROOT, 3600)
        return
    mark = environment / f"has-{library}"
    if not mark.exists():
        print(f"installing {', '.join(PACKAGES[library])} into {environment}", flush=True)
        python = str(environment / "bin/python")
        run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES[library]])
        mark.touch()
    if library == UCX:
        compile_ucx(given.out, environment)


def compile_ucx(out, environment):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Failed("the program that calls UCX needs a C compiler, and there is no cc")
    wheel = next(environment.glob("lib/python*/site-packages/libucx"), None)
    if wheel is None:
        raise Failed("the package of UCX has no folder libucx")
    run([compiler, "-O2", "-o", str(out / "ucx"), str(HERE / "ucx.c"), f"-I{wheel}/include", f"-L{wheel}/lib",
         "-lucp", "-lucs", f"-Wl,-rpath,{wheel}/lib"])


def contestants(given, environment):
    """Every library over every transport that a section asks for, started or with a reason."""
    reasons = {}
    for library in LIBRARIES:
        try:
            prepare(library, given, environment)
        except (Failed, OSError) as why:
            reasons[library] = f"not installed: {why}"
    wanted = {(library, over) for _, overs, _ in SECTIONS for library, over in overs.items()}
    found = {}
    for library, over in sorted(wanted):
        contestant = found[library, over] = Contestant(library, over, given.out)
        contestant.reason = reasons.get(library)
        if contestant.reason is None:
            contestant.start(*commands_of(library, over, given, environment))
    return found


def measure(rounds, found):
    """The figures of each section, load and library: a list of microseconds, or a reason. Yields them after each round,
    with the number of rounds."""
    figures = {}
    for number in range(rounds + 1):
        for section, (_, overs, loads) in enumerate(SECTIONS):
            answers = {}
            for load, command in loads:
                command, field = command if isinstance(command, tuple) else (command, "us")
                for library, over in overs.items():
                    # One run of a command may have several figures.
                    if (command, library) not in answers:
                        answers[command, library] = found[library, over].round(command)
                    keep(figures, (section, load, library), answers[command, library], field, number > 0)
        print(f"round {number} of {rounds}" if number else "warm", file=sys.stderr, flush=True)
        if number > 0:
            yield number, figures


def keep(figures, key, answer, name, kept):
    if "missing" in answer:
        figures[key] = answer["missing"]
    elif kept and not isinstance(figures.get(key), str):
        figures.setdefault(key, []).append(answer[name])


class Row:
    """A load: the figures of each library, and the ratio to the best of the others."""

    def __init__(self, load, figures):
        self.load, self.figures = load, figures
        self.best, self.ratios = None, []
        others = {name: values for name, values in figures.items() if name != OURS and isinstance(values, list)}
        if others and isinstance(figures[OURS], list):
            self.best = min(others, key=lambda name: statistics.median(others[name]))
            # Of rounds that follow each other: both had the same neighbours on the machine.
            self.ratios = [peer / ours for peer, ours in zip(others[self.best], figures[OURS], strict=True)]


def tables(figures):
    """The title and the rows of each section."""
    for section, (title, overs, loads) in enumerate(SECTIONS):
        yield title, [Row(load, {library: figures[section, load, library] for library in overs}) for load, _ in loads]


def of(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def markdown(sections, described):
    """The table, with a number at each figure that is missing, and the reasons."""
    reasons, lines = [], [f"- {line}" for line in described]

    def cell(figure):
        if isinstance(figure, list):
            return f"{of(statistics.median(figure))} ({of(min(figure))} to {of(max(figure))})"
        if figure not in reasons:
            reasons.append(figure)
        return f"none [{reasons.index(figure) + 1}]"

    for title, rows in sections:
        lines += ["", f"**{title}**", "", "| µs | " + " | ".join(LIBRARIES) + " | best other / multirail |",
                  "|---" * (len(LIBRARIES) + 2) + "|"]
        for row in rows:
            ratio = f"{of(statistics.median(row.ratios))} ({row.best})" if row.ratios else "none"
            lines.append(f"| {row.load} | " + " | ".join(cell(row.figures[name]) for name in LIBRARIES) + f" | {ratio} |")
    lines += ["", *(f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)), "", *(f"- {note}" for note in NOTES)]
    return "\n".join(lines) + "\n"


def readme(sections):
    """The rows of README's table: medians, and the best rounds in brackets."""
    for section, load, words in README:
        row = next(row for row in sections[section][1] if row.load == load)
        cells = [f"{of(statistics.median(figure))} ({of(min(figure))})" if isinstance(figure, list) else "none"
                 for figure in (row.figures[name] for name in LIBRARIES)]
        yield f"| {words} | " + " | ".join(cells) + " |"


def machine(given, environment, load_before, rounds):
    packages = [name for names in PACKAGES.values() for name in names if name != "numpy"]
    now = datetime.datetime.now(datetime.UTC).strftime("%d %B %Y, %H:%M UTC")
    busy = f"load average {load_before} before and {os.getloadavg()[0]:.1f} after, on {os.cpu_count()} cores"
    binary = str(given.binary or "target/dist/peers")
    return [*versions(environment / "bin/python", environment, packages, binary), f"{now}; {busy}",
            f"medians of {rounds} rounds, in µs; the shortest and the longest round in brackets"]


def write_out(given, figures, described):
    sections = list(tables(figures))
    given.out.mkdir(parents=True, exist_ok=True)
    text = markdown(sections, described)
    (given.out / "peers.md").write_text(text)
    drawn = page.html(sections, described, NOTES, LIBRARIES)
    page.check(drawn)
    (given.out / "peers.html").write_text(drawn)
    kept = {" / ".join([SECTIONS[section][0], load, library]): values for (section, load, library), values in figures.items()}
    (given.out / "peers.json").write_text(json.dumps({"described": described, "figures": kept}, indent=1) + "\n")
    return text, sections


def self_check(given):
    """Writes the table and the page of made-up figures, of which some are missing, and reads them back."""
    given.out = given.out / "self-check"
    reason, figures = "not installed: <made up> & nothing else", {}
    for section, (_, overs, loads) in enumerate(SECTIONS):
        for at, (load, _) in enumerate(loads):
            for number, library in enumerate(overs):
                missing = library == MOONCAKE and at == 0
                rounds = [(1 + number) * 10**at * (1 + 0.1 * each) for each in range(given.rounds)]
                figures[section, load, library] = reason if missing else rounds
    write_out(given, figures, ["made-up figures"])
    table, drawn = ((given.out / name).read_text() for name in ("peers.md", "peers.html"))
    for load in (load for _, _, loads in SECTIONS for load, _ in loads):
        assert f"| {load} |" in table and load in drawn, load
    assert "none [1]" in table and f"[1] {reason}" in table and "made up" in drawn and "<made up>" not in drawn
    assert "2 (UCX)" in table, "the ratio of UCX, which takes twice the time"
    print("self-check: the table and the page have every load, and every reason")


def measure_all(given):
    if given.self_check:
        return self_check(given)
    given.out.mkdir(parents=True, exist_ok=True)
    environment = given.out / "python"
    if not (environment / "bin/python").exists():
        run([sys.executable, "-m", "venv", str(environment)])
    load_before, found = f"{os.getloadavg()[0]:.1f}", {}
    try:
        found = contestants(given, environment)
        # Written anew after each round, so that a run that is ended early is not lost.
        for rounds, figures in measure(given.rounds, found):
            text, sections = write_out(given, figures, machine(given, environment, load_before, rounds))
    finally:
        for contestant in found.values():
            if contestant.pair:
                contestant.pair.end()
    print(text)
    print("README's rows:", *readme(sections), sep="\n")
    print(f"\n{given.out}/peers.html has the plots")


if __name__ == "__main__":
    run_program("run.py", lambda: measure_all(arguments()))
