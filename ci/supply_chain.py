"""Checks the dependencies that cargo-metadata tells against deny.toml; `--self-test` checks that it finds faults."""

import json
import re
import subprocess
import sys
import tomllib


def satisfies(expression, allowed):
    """Whether an SPDX expression can be met with the allowed licences alone."""
    tokens = re.findall(r"\(|\)|[^\s()/]+", expression.replace("/", " OR "))

    def parse_any():
        met = parse_all()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            met = parse_all() | met
        return met

    def parse_all():
        met = parse_one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            met = parse_one() & met
        return met

    def parse_one():
        token = tokens.pop(0)
        if token == "(":
            met = parse_any()
            tokens.pop(0)
            return met
        if tokens and tokens[0] == "WITH":
            token = f"{token} WITH {tokens[1]}"
            del tokens[:2]
        return token in allowed

    return parse_any() and not tokens


def faults(packages, rules):
    """Sentences, one per fault."""
    allowed = set(rules["licenses"]["allow"])
    banned = {ban["crate"] for ban in rules["bans"]["deny"]}
    registries = {f"registry+{url}" for url in rules["sources"]["allow-registry"]}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        licence = package["license"]
        if not licence or not satisfies(licence, allowed):
            yield f"{name}: licence {licence!r} is not met by those that deny.toml allows"
        if package["name"] in banned:
            yield f"{name}: banned by deny.toml"
        if package["source"] is not None and package["source"] not in registries:
            yield f"{name}: comes from {package['source']}, which deny.toml does not name"
        for dependency in package["dependencies"]:
            if package["source"] is None and dependency["req"] == "*" and not dependency.get("path"):
                yield f"{name}: asks for any version of {dependency['name']}"


def used():
    """Names and versions of what the workspace is built from. cargo-metadata also names what no feature asks for."""
    command = ["cargo", "tree", "--locked", "--workspace", "--all-features", "--target", "all", "--prefix", "none"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {tuple(line.split()[:2]) for line in lines if line}


def self_test(rules):
    registry = "registry+" + rules["sources"]["allow-registry"][0]

    def package(**changes):
        return {"name": "a", "version": "1.0.0", "license": "MIT OR GPL-3.0-only", "source": registry,
                "dependencies": []} | changes

    good = [package(), package(license="(MIT OR Apache-2.0) AND Unicode-3.0"), package(source=None)]
    assert not list(faults(good, rules)), list(faults(good, rules))
    bad = [
        package(license=None),
        package(license="MIT AND GPL-3.0-only"),
        package(license="Apache-2.0 WITH GCC-exception-3.1"),
        package(name="ring"),
        package(source="git+https://example.org/a"),
        package(source=None, dependencies=[{"name": "b", "req": "*"}]),
    ]
    for one in bad:
        assert len(list(faults([one], rules))) == 1, one


def main():
    with open(sys.argv[1], "rb") as file:
        rules = tomllib.load(file)
    known = used()
    packages = [
        package for package in json.load(sys.stdin)["packages"] if (package["name"], f"v{package['version']}") in known
    ]
    if "--self-test" in sys.argv:
        self_test(rules)
        print("supply-chain: finds what it looks for")
        return
    found = sorted(faults(packages, rules))
    for fault in found:
        print(f"supply-chain: {fault}", file=sys.stderr)
    if found:
        sys.exit(1)
    print(f"supply-chain: {len(packages)} packages, licences, bans and sources as deny.toml says")


main()
