"""Directories in a store of torch; without torch, in a store of the same functions."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from multirail.discovery import Event, Member, StoreDirectory

LIMIT = 60.0
LEASE = 3.0
"""Seconds: long enough for a busy machine, where a member may come late to renew it."""


class FakeStore:
    """As torch's TCPStore, in this process, and it can be away."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.is_down = False
        self._lock = threading.Lock()

    def _open(self) -> threading.Lock:
        if self.is_down:
            raise RuntimeError("Connection reset by peer")
        return self._lock

    def set(self, key: str, value: str) -> None:
        with self._open():
            self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        with self._open():
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self._open():
            return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._open():
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self._open():
            if self.values.get(key, b"") == expected.encode() and (key in self.values or not expected):
                self.values[key] = desired.encode()
            # As torch's: the expected value, if there is no such key.
            return self.values.get(key, expected.encode())


@pytest.fixture(params=["fake", "torch"])
def store(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        return FakeStore()
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    from torch.distributed import TCPStore  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def told(events: Iterator[Event]) -> str:
    event = next(events)
    return event.kind + (f" {event.member.name}" if event.member else "")


def test_members_join_and_leave(store: Any) -> None:
    directory = StoreDirectory(store)
    assert directory.members() == {}
    events = directory.watch(0.05)
    assert told(events) == "synced"
    membership = directory.join("a", ["10.0.0.7:7411"], attributes={"role": "x"}, lease=LEASE)
    assert told(events) == "joined a"
    found = StoreDirectory(store).lookup("a")
    assert found == membership.member and found.addresses == ("10.0.0.7:7411",)
    # For longer than the lease.
    time.sleep(1.5 * LEASE)
    with directory.join("b", ["h:1"]):
        assert told(events) == "joined b"
    assert told(events) == "left b"
    membership.leave()
    assert told(events) == "left a"


def test_a_lease_ends_and_a_restart_takes_the_slot(store: Any) -> None:
    directory = StoreDirectory(store)
    first = directory.join("a", ["h:1"], lease=LEASE)
    events = directory.watch(0.05)
    assert [told(events), told(events)] == ["joined a", "synced"]
    second = StoreDirectory(store).join("a", ["h:2"], lease=LEASE)
    assert told(events) == "changed a"
    first._thread.join(LIMIT)
    assert first.is_replaced and not second.is_replaced
    first.leave()
    # As a process that is killed: nothing is removed.
    second._stop.set()
    second._thread.join(LIMIT)
    killed = time.monotonic()
    assert told(events) == "left a"
    assert time.monotonic() - killed < LIMIT
    assert StoreDirectory(store).lookup("b") is None
    assert store.add("multirail/slots", 0) == 1


def test_an_outage_changes_no_member() -> None:
    store = FakeStore()
    directory = StoreDirectory(store)
    events = directory.watch(0.05)
    with directory.join("a", ["h:1"], lease=LEASE):
        assert [told(events), told(events)] == ["joined a", "synced"]
        store.is_down = True
        assert told(events) == "outage"
        time.sleep(1.5 * LEASE)
        store.is_down = False
        assert told(events) == "synced"
        # It has renewed its lease since, and never left.
        time.sleep(1.5 * LEASE)
        assert directory.lookup("a") is not None
    # Within the time that members have after an outage.
    assert told(events) == "left a"


def test_a_store_that_lost_everything_is_joined_again() -> None:
    store = FakeStore()
    directory = StoreDirectory(store)
    with directory.join("a", ["h:1"], lease=1.0):
        store.values.clear()
        end = time.monotonic() + LIMIT
        while directory.lookup("a") is None and time.monotonic() < end:
            time.sleep(0.05)
        assert directory.lookup("a") is not None
    assert directory.lookup("a") is None


def test_bad_records_are_skipped(store: Any) -> None:
    directory = StoreDirectory(store)
    with directory.join("a", ["h:1"]):
        bad = ["{}", "[]", "x", '{"version": 1, "name": 7}', "[" * 50_000, '"' + "x" * 200_000 + '"']
        for record in bad:
            slot = store.add("multirail/slots", 1) - 1
            store.set(f"multirail/slot/{slot}", record)
        assert list(directory.members()) == ["a"]


@pytest.mark.parametrize(
    ("name", "addresses", "attributes", "lease"),
    [
        ("", ["h:1"], {}, 5.0),
        ("x" * 257, ["h:1"], {}, 5.0),
        ("a\n", ["h:1"], {}, 5.0),
        ("a", [], {}, 5.0),
        ("a", ["h:1"] * 17, {}, 5.0),
        ("a", [""], {}, 5.0),
        ("a", ["h:1"], {"k": "v" * 9000}, 5.0),
        ("a", ["h:1"], {}, 0.5),
    ],
)
def test_limits_hold(name: str, addresses: list[str], attributes: dict[str, str], lease: float) -> None:
    with pytest.raises(ValueError, match=r".+"):
        StoreDirectory(FakeStore()).join(name, addresses, attributes=attributes, lease=lease)
    Member("a", ("h:1",), lease=5.0).check()
