from __future__ import annotations

import pytest
from nixl_pairs import BACKEND


def pytest_report_header() -> str:
    return f"back end: {BACKEND}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "multirail_only: what NIXL over UCX does not promise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out the tests of promises that only this back end makes."""
    if BACKEND != "MULTIRAIL":
        items[:] = [item for item in items if item.get_closest_marker("multirail_only") is None]
