"""What a release is made of, from cargo's metadata: a CycloneDX 1.5 bill of materials, or the licences of all parts.

    ci/sbom.py TARGET_TRIPLE EPOCH COMMIT     prints the bill, as JSON
    ci/sbom.py TARGET_TRIPLE --licences       prints the texts of the licences, each once, with the crates that have it

The parts are those of the command, the C library and the Python module. A crate that runs only while they are built (a
build script or a macro, with all they need) has the scope `excluded`. The output depends on the arguments and Cargo.lock alone.
"""

import datetime
import json
import subprocess
import sys
import tomllib
import uuid
from pathlib import Path

ROOTS = ("multirail-cli", "multirail-capi", "multirail-python")


def tree(triple, edges):
    """Names and versions of what the roots are made of. cargo's metadata also names what no feature asks for."""
    command = ["cargo", "tree", "--locked", "--target", triple, "--edges", edges, "--prefix", "none"]
    command += [word for root in ROOTS for word in ("--package", root)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()
    return {tuple(line.split()[:2]) for line in lines if line}


def parts(triple):
    """The packages, those that run, the packages that each needs, and the roots; by their ids."""
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", triple]
    metadata = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    named = {(package["name"], f"v{package['version']}"): package for package in metadata["packages"]}
    packages = {named[name]["id"]: named[name] for name in tree(triple, "normal,build")}
    run = {named[name]["id"] for name in tree(triple, "normal,no-proc-macro")}
    needs = {
        node["id"]: [d["pkg"] for d in node["deps"] if any(k["kind"] != "dev" for k in d["dep_kinds"]) and d["pkg"] in packages]
        for node in metadata["resolve"]["nodes"]
    }
    roots = {i for i, package in packages.items() if package["name"] in ROOTS}
    assert len(roots) == len(ROOTS) and run <= packages.keys(), "a root is missing"
    return packages, run, needs, roots


def reference(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def bill(triple, epoch, commit):
    packages, run, needs, roots = parts(triple)
    checksums = {
        (package["name"], package["version"]): package.get("checksum")
        for package in tomllib.loads(Path("Cargo.lock").read_text())["package"]
    }
    version = next(packages[root]["version"] for root in roots)
    repository = next(packages[root]["repository"] for root in roots)
    whole = f"pkg:github/{repository.split('github.com/')[1]}@{commit}"

    def component(i):
        package = packages[i]
        made = {
            "type": "library",
            "bom-ref": reference(package),
            "name": package["name"],
            "version": package["version"],
            "scope": "required" if i in run else "excluded",
            "licenses": [{"expression": package["license"].replace("/", " OR ")}],
            "purl": reference(package),
        }
        if package["description"]:
            made["description"] = " ".join(package["description"].split())
        if checksum := checksums[package["name"], package["version"]]:
            made["hashes"] = [{"alg": "SHA-256", "content": checksum}]
        if package["repository"]:
            made["externalReferences"] = [{"type": "vcs", "url": package["repository"]}]
        return made

    order = sorted(packages, key=lambda i: (packages[i]["name"], packages[i]["version"]))
    dependencies = [{"ref": whole, "dependsOn": sorted(reference(packages[root]) for root in roots)}]
    dependencies += [
        {"ref": reference(packages[i]), "dependsOn": sorted({reference(packages[n]) for n in needs[i]})} for i in order
    ]
    made = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{whole}?{triple}')}",
        "version": 1,
        "metadata": {
            "timestamp": made,
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "application",
                "bom-ref": whole,
                "name": "multirail",
                "version": version,
                "licenses": [{"expression": "MIT OR Apache-2.0"}],
                "purl": whole,
                "externalReferences": [{"type": "vcs", "url": f"{repository}/tree/{commit}"}],
            },
            "properties": [{"name": "multirail:target", "value": triple}],
        },
        "components": [component(i) for i in order],
        "dependencies": dependencies,
    }


def licences(triple):
    packages, run, _, _ = parts(triple)
    texts = {}
    for i in run:
        package = packages[i]
        if package["source"] is None:
            continue
        folder = Path(package["manifest_path"]).parent
        names = ("LICEN", "COPYING", "NOTICE", "UNLICENSE", "COPYRIGHT")
        files = sorted(f for f in folder.iterdir() if f.is_file() and f.name.upper().startswith(names))
        label = f"{package['name']} {package['version']} ({package['license']})"
        # A few packages have no file of their own; their manifest names licence and authors.
        found = [f.read_text(encoding="utf-8", errors="replace").strip() for f in files]
        for text in found or ["Authors: " + (", ".join(package["authors"]) or package["repository"] or "unnamed")]:
            texts.setdefault(text, set()).add(label)
    print("The command multirail, its C library and its Python module contain these packages.")
    for text, labels in sorted(texts.items(), key=lambda pair: sorted(pair[1])):
        print("\n" + "-" * 80 + "\n" + "\n".join(sorted(labels)) + "\n\n" + text)


if sys.argv[2] == "--licences":
    licences(sys.argv[1])
else:
    print(json.dumps(bill(sys.argv[1], int(sys.argv[2]), sys.argv[3]), indent=1))
