"""Checks the layers of the workspace; prints the graph where they are broken."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The crates of this workspace that each may depend on, tests and examples apart.
ALLOWED = {
    "multirail-topology": set(),
    "multirail-libfabric-sys": set(),
    "multirail-rdma-sys": set(),
    "multirail-spi": {"multirail-topology"},
    "multirail-engine": {"multirail-spi"},
    "multirail-control": {"multirail-spi"},
    "multirail-core": {"multirail-spi", "multirail-engine", "multirail-control", "multirail-topology"},
    "multirail-cuda": {"multirail-spi", "multirail-topology"},
    "multirail-efa": {"multirail-spi", "multirail-libfabric-sys", "multirail-topology"},
    "multirail-verbs": {"multirail-spi", "multirail-rdma-sys", "multirail-topology"},
    "multirail-loopback": {"multirail-spi", "multirail-cuda", "multirail-topology"},
    "multirail-staging": {"multirail-spi", "multirail-cuda", "multirail-topology"},
    "multirail": {
        "multirail-core",
        "multirail-cuda",
        "multirail-efa",
        "multirail-loopback",
        "multirail-spi",
        "multirail-staging",
        "multirail-topology",
        "multirail-verbs",
    },
    "multirail-capi": {"multirail"},
    "multirail-discovery": {"multirail"},
    "multirail-limit": set(),
}
# What these crates are built from at most, and what must be no part of them.
MOST = {"multirail-spi": 34}
# Circles between folders that are still to be cut: they may shrink, and no other may come.
KNOWN_CIRCLES = {}
WITHOUT = {
    "multirail-spi": {"tokio", "rustls"},
    "multirail-engine": {"tokio", "rustls"},
    "multirail": {"redis", "tonic", "clap", "indicatif", "comfy-table", "ctrlc", "hdrhistogram", "tracing-subscriber", "walkdir"},
}


def metadata():
    command = ["cargo", "metadata", "--locked", "--no-deps", "--format-version", "1"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)["packages"]


def upward(edges, allowed):
    """Sentences about edges between crates that are not allowed. `edges` names the crates that each depends on."""
    for crate, uses in sorted(edges.items()):
        for used in sorted(uses - allowed.get(crate, uses)):
            yield f"{crate} depends on {used}, which lies above it or beside it"


def parts(crate):
    """Names and versions of the crates that `crate` is built from, itself included."""
    command = ["cargo", "tree", "--locked", "-e", "normal", "--prefix", "none", "-p", crate]
    lines = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.splitlines()
    return {tuple(line.split()[:2]) for line in lines if line}


def heavy(crate, found, most, without):
    if len(found) > most.get(crate, len(found)):
        yield f"{crate} is built from {len(found)} crates, {most[crate]} are allowed"
    for name in sorted({name for name, _ in found} & without.get(crate, set())):
        yield f"{crate} is built from {name}, which must stay out of it"


def without_tests(text):
    """Source text without comments, and without the module of tests that ends a file."""
    text = re.sub(r"//[^\n]*", "", text)
    return text.split("#[cfg(test)]\nmod tests {")[0]


def imports(files):
    """Folder → folders that its files name by `crate::FOLDER::`; `files` maps a path inside src to its text."""
    folders = {path.split("/")[0] for path in files if "/" in path} - {"tests", "bin"}
    graph = {folder: set() for folder in folders}
    for path, text in files.items():
        folder = path.split("/")[0].removesuffix(".rs")
        if folder not in folders or "/tests" in path:
            continue
        text = without_tests(text)
        named = set(re.findall(r"\bcrate::(\w+)\b", text))
        for group in re.findall(r"\buse crate::\{([^;]*)\};", text):
            named |= set(re.findall(r"(?:^|,)\s*(\w+)", re.sub(r"\{[^{}]*\}", "", group)))
        graph[folder] |= named & folders - {folder}
    return graph


def circles(graph):
    """The sets of nodes that reach each other."""
    def reach(start):
        seen, waiting = set(), list(graph[start])
        while waiting:
            node = waiting.pop()
            if node not in seen:
                seen.add(node)
                waiting += graph[node]
        return seen
    reached = {node: reach(node) for node in graph}
    found = {frozenset(o for o in reached[node] if node in reached[o]) for node in graph if node in reached[node]}
    return sorted(sorted(circle) for circle in found)


def check():
    packages = metadata()
    ours = {package["name"] for package in packages}
    edges = {
        package["name"]: {d["name"] for d in package["dependencies"] if d["kind"] is None and d["name"] in ours}
        for package in packages
    }
    faults = list(upward(edges, ALLOWED))
    for crate in sorted(ours & (MOST.keys() | WITHOUT.keys())):
        found = parts(crate)
        print(f"{crate}: built from {len(found)} crates")
        faults += heavy(crate, found, MOST, WITHOUT)
    graphs = {}
    for package in packages:
        source = Path(package["manifest_path"]).parent / "src"
        files = {str(path.relative_to(source)): path.read_text() for path in source.rglob("*.rs")}
        graphs[package["name"]] = graph = imports(files)
        known = KNOWN_CIRCLES.get(package["name"], set())
        for circle in circles(graph):
            if set(circle) <= known:
                print(f"{package['name']}: still a circle of folders: {', '.join(circle)}")
                continue
            faults.append(f"{package['name']}: folders import each other in a circle: {', '.join(circle)}")
    if not faults:
        print("layers: kept, and no new circle between folders of a crate")
        return 0
    print("crates:")
    for crate, uses in sorted(edges.items()):
        print(f"  {crate} -> {', '.join(sorted(uses)) or '-'}")
    for crate, graph in sorted(graphs.items()):
        if circles(graph):
            print(f"folders of {crate}:")
            for folder, uses in sorted(graph.items()):
                print(f"  {folder} -> {', '.join(sorted(uses)) or '-'}")
    for fault in faults:
        print(f"layers: {fault}", file=sys.stderr)
    return 1


def self_test():
    allowed = {"low": set(), "high": {"low"}}
    assert not list(upward({"low": set(), "high": {"low"}}, allowed))
    assert list(upward({"low": {"high"}, "high": {"low"}}, allowed)) == [
        "low depends on high, which lies above it or beside it"
    ]
    found = {("low", "v1"), ("tokio", "v1")}
    assert len(list(heavy("low", found, {"low": 1}, {"low": {"tokio"}}))) == 2
    assert not list(heavy("high", found, {"low": 1}, {"low": {"tokio"}}))
    files = {
        "lib.rs": "mod a; mod b; use crate::a::X;",
        "a/mod.rs": "use crate::{b::Y, c};",
        "b/mod.rs": "// use crate::a::X;\n#[cfg(test)]\nmod tests { use crate::a::X; }",
        "c.rs": "use crate::a::X;",
    }
    assert imports(files) == {"a": {"b"}, "b": set()}, imports(files)
    assert circles(imports(files)) == []
    injected = files | {"b/deep.rs": "fn f() { crate::a::x() }"}
    assert circles(imports(injected)) == [["a", "b"]]
    # An upward import, put into the workspace as it is.
    packages = {package["name"] for package in metadata()}
    assert "multirail-spi" in packages
    assert list(upward({"multirail-spi": {"multirail-core"}}, ALLOWED))
    print("layers: finds an upward dependency, a crate that must stay out, and a circle of folders")
    return 0


sys.exit(self_test() if "--self-test" in sys.argv else check())
