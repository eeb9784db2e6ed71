"""Compares the versions that files name with those of Cargo.toml's [workspace.package]; `--self-test` checks that it finds faults."""

import re
import sys
import tomllib
from pathlib import Path


def read(path):
    return Path(path).read_text(encoding="utf-8")


def faults(files):
    """Sentences, one per fault. `files` has the texts by their paths."""
    workspace = tomllib.loads(files["Cargo.toml"])["workspace"]
    version, rust = workspace["package"]["version"], workspace["package"]["rust-version"]
    release = ".".join(version.split(".")[:2])

    def compare(where, found, wanted):
        if found != wanted:
            yield f"{where}: {found or 'nothing'}, not {wanted}"

    for path, text in files.items():
        if path.endswith("Cargo.toml"):
            manifest = tomllib.loads(text)
            package = manifest.get("package", {})
            if package:
                yield from compare(f"{path}: version", package["version"], {"workspace": True})
                yield from compare(f"{path}: rust-version", package["rust-version"], {"workspace": True})
            tables = [manifest.get("workspace", {})] + [manifest, *manifest.get("target", {}).values()]
            kinds = ("dependencies", "dev-dependencies", "build-dependencies")
            for name, dependency in ((n, d) for table in tables for kind in kinds for n, d in table.get(kind, {}).items()):
                if isinstance(dependency, dict) and "path" in dependency and "version" in dependency:
                    yield from compare(f"{path}: the version of {name}", dependency["version"], version)
        for tag in re.findall(r"^\s*newTag: *(\S+)", text, re.MULTILINE) if path.endswith(".yaml") else []:
            yield from compare(f"{path}: newTag", tag.strip("\"'"), version)
    python = tomllib.loads(files["python/pyproject.toml"])["project"]
    if "version" in python or "version" not in python["dynamic"]:
        yield "python/pyproject.toml: maturin has to take the version from Cargo.toml: dynamic = [\"version\"]"
    symbols = re.search(r"^MULTIRAIL_(\S+) \{", files["capi/libmultirail.map"], re.MULTILINE)
    abi = re.search(r"MR_ABI_VERSION \(\(uint32_t\)0x([0-9a-f]{8})\)", files["capi/include/multirail.h"])
    in_rust = re.search(r"ABI_VERSION: u32 = (\w+);", files["capi/src/abi.rs"])
    yield from compare("capi/src/abi.rs: ABI_VERSION", int(in_rust[1], 0), int(abi[1], 16))
    yield from compare("capi/libmultirail.map: the first version of its symbols", symbols[1], "0.1")
    soname = f"libmultirail.so.{int(abi[1], 16) >> 16}"
    if f"-soname,{soname} " not in files["capi/build"]:
        yield f"capi/build: the soname is not {soname}, as MR_ABI_VERSION says"
    image = re.search(r"^FROM rust:([0-9.]+)-", files["deploy/Dockerfile"], re.MULTILINE)
    yield from compare("deploy/Dockerfile: Rust", image and image[1], rust)
    for path in ("README.md", "docs/start.md", "docs/questions.md", "docs/compatibility.md"):
        if not re.search(rf"(Rust )?{re.escape(rust)} or later", files[path]):
            yield f"{path}: does not name Rust {rust}"
    headings = re.findall(r"^## \[(.+?)\]", files["CHANGELOG.md"], re.MULTILINE)
    if headings[:1] != ["Unreleased"] and headings[:1] != [version]:
        yield f"CHANGELOG.md: its first section is neither [Unreleased] nor [{version}]"
    if f"`{release}`" not in files["docs/compatibility.md"]:
        yield f"docs/compatibility.md: does not say what holds for `{release}`"


def tree():
    members = tomllib.loads(read("Cargo.toml"))["workspace"]["members"]
    paths = ["Cargo.toml", *(f"{member}/Cargo.toml" for member in members)]
    paths += map(str, Path("deploy").rglob("*.yaml"))
    paths += ["python/pyproject.toml", "capi/libmultirail.map", "capi/include/multirail.h", "capi/build", "capi/src/abi.rs"]
    paths += ["deploy/Dockerfile", "README.md", "docs/start.md", "docs/questions.md", "docs/compatibility.md", "CHANGELOG.md"]
    return {path: read(path) for path in paths}


def self_test():
    files = tree()
    assert not list(faults(files)), list(faults(files))
    for path, was, wrong in [
        ("cli/Cargo.toml", "version.workspace = true\nedition", 'version = "9.9.9"\nedition'),
        ("cli/Cargo.toml", 'path = "../multirail", version = "', 'path = "../multirail", version = "9'),
        ("Cargo.toml", 'path = "topology", version = "', 'path = "topology", version = "9'),
        ("deploy/kubernetes/p5/kustomization.yaml", "newTag: ", "newTag: 9"),
        ("python/pyproject.toml", 'dynamic = ["version"]', 'version = "9.9.9"'),
        ("capi/src/abi.rs", "ABI_VERSION: u32 = ", "ABI_VERSION: u32 = 9"),
        ("capi/build", "libmultirail.so.0", "libmultirail.so.9"),
        ("deploy/Dockerfile", "FROM rust:", "FROM rust:9"),
        ("README.md", "Rust 1", "Rust 9"),
        ("CHANGELOG.md", "## [Unreleased]", "## [9.9.9]"),
    ]:
        assert was in files[path], (path, was)
        found = list(faults(files | {path: files[path].replace(was, wrong)}))
        assert found and path in found[0], (path, was, found)
    print("versions: each fault is found")


if "--self-test" in sys.argv:
    self_test()
else:
    found = list(faults(tree()))
    for fault in found:
        print(f"versions: {fault}", file=sys.stderr)
    sys.exit(bool(found))
