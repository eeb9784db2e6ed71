"""The examples, and the code blocks of the guide, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from multirail import errors

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"
LIMIT = 120
"""Seconds for one program. Each takes some seconds on two busy cores."""

LAST_LINES = {
    "hello": r"196608 bytes in 3 scattered pages, every byte compared",
    "kv_cache_handover": r"6 requests of 8 layers, 18874368 bytes of numpy arrays, every byte compared",
    "weight_broadcast": r"5 versions to 3 workers, 55065600 bytes, every byte compared",
    "elastic_workers": r"60 tasks answered, one worker killed \(peer_died\), one joined, 3 left in order, .* compared",
    "gpu_tensors": r"skipped: no CUDA .*|67108864 bytes from cuda:0 to cuda:\d in 1024 shuffled pages, by .* compared",
}


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with its checks for developers; a dropped operation or a leaked file is a warning in stderr."""
    environment = {**os.environ, "MULTIRAIL_BACKEND": "loopback", "PYTHONDEVMODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
    )


def check(done: subprocess.CompletedProcess[str]) -> str:
    """The last line that a program has printed, if it has ended well and without warnings."""
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    return done.stdout.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", LAST_LINES)
def test_example_compares_every_byte(name: str) -> None:
    pytest.importorskip("numpy")
    assert re.fullmatch(f"{name}: ({LAST_LINES[name]})", check(run("-m", f"multirail.examples.{name}")))


def test_no_example_is_forgotten() -> None:
    from multirail import examples

    modules = {path.stem for path in Path(str(examples.__file__)).parent.glob("*.py")} - {"__init__"}
    assert modules == set(LAST_LINES)
    assert all(f"``{name}``" in str(examples.__doc__) for name in modules)


def test_kv_cache_handover_with_torch() -> None:
    pytest.importorskip("torch")
    last = check(run("-m", "multirail.examples.kv_cache_handover", "--torch"))
    assert last.endswith("18874368 bytes of torch tensors, every byte compared")


def test_weight_broadcast_to_more_workers() -> None:
    pytest.importorskip("numpy")
    last = check(run("-m", "multirail.examples.weight_broadcast", "--workers", "5"))
    assert last == "weight_broadcast: 5 versions to 5 workers, 91776000 bytes, every byte compared"


# ---- the guide ----


def code_of_guide() -> tuple[str, int]:
    """The blocks of the guide that run, each on its own lines, so that a traceback has the guide's line numbers."""
    lines, blocks, inside = [], 0, False
    for line in GUIDE.read_text().splitlines():
        if line.startswith("```"):
            inside = line == "```python"
            blocks += inside
            lines.append("")
        else:
            lines.append(line if inside else "")
    return "\n".join(lines) + "\n", blocks


@pytest.fixture
def guide() -> str:
    if not GUIDE.exists():
        pytest.skip("the guide is not part of the wheel")
    return GUIDE.read_text()


def test_blocks_of_the_guide_run(guide: str, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    code, blocks = code_of_guide()
    assert blocks >= guide.count("```python") - guide.count("```python no-run") > 10
    script = tmp_path / "guide.py"
    script.write_text(code)
    check(run(script))


def test_example_of_the_package_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    page = (GUIDE.parents[1] / "python" / "README.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "page.py"
    script.write_text(block)
    check(run(script))


def test_guide_has_every_error(guide: str) -> None:
    for name in errors.__all__:
        if name == "Error":
            continue
        kind = getattr(errors, name)
        also = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if base is not errors.Error) or "-"
        meaning = " ".join(kind.__doc__.split())
        assert f"| `{name}` | {also} | `{kind.kind}` | {meaning} | {kind.hint} |\n" in guide


def test_links_of_the_guide_lead_somewhere(guide: str) -> None:
    links = re.findall(r"\]\(([^)]+)\)", guide)
    assert links
    for link in links:
        path, _, heading = link.partition("#")
        target = GUIDE.parent / path if path else GUIDE
        assert target.is_file(), link
        slugs = {
            re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            for line in target.read_text().splitlines()
            if line.startswith("#")
        }
        assert not heading or heading in slugs, link
