"""Peers by name in a store of torch, such as the ``TCPStore`` that a job has already.

    directory = StoreDirectory(dist.distributed_c10d._get_default_store())
    with directory.join("decode-0", [listener.address], lease=5.0):
        prefill = directory.lookup("prefill-0")
        for event in directory.watch():
            print(event.kind, event.member)

A member renews its lease by changing its record. A reader counts the lease by its own clock, from the moment at which
it saw the record change, so the clocks of the hosts need not agree. A store has no list of its keys: each name takes a
slot, and keeps it when its process is restarted.

The store must have ``set``, ``get``, ``check``, ``add`` and ``compare_set``, as torch's do. The Rust crate
``multirail-discovery`` has directories in etcd, Redis, files, DNS and Kubernetes; the formats are not the same.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

__all__ = ["Event", "Member", "Membership", "Store", "StoreDirectory"]

_log = logging.getLogger(__name__)

MAX_NAME = 256
MAX_ADDRESSES = 16
MAX_ADDRESS = 300
MAX_ATTRIBUTES = 8 << 10
MAX_LEASE = 24 * 3600.0
#: The most slots that a reader looks at.
MAX_SLOTS = 1 << 16
#: How much longer than two leases a missing member is kept after an outage.
GRACE = 5.0


class Store(Protocol):
    """What a directory needs of a store."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Member:
    """A process that a directory lists."""

    name: str
    addresses: tuple[str, ...]
    #: Another for each start of the process.
    session: str = ""
    attributes: Mapping[str, str] = field(default_factory=dict)
    lease: float = 0.0

    def check(self) -> None:
        """Raises ``ValueError`` if a limit is broken."""
        if not 1 <= len(self.name.encode()) <= MAX_NAME or not self.name.isprintable():
            raise ValueError(f"a name has 1 to {MAX_NAME} bytes without control characters: {self.name[:80]!r}")
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise ValueError(f"{len(self.addresses)} addresses; 1 to {MAX_ADDRESSES} are allowed")
        for address in self.addresses:
            if not 1 <= len(address.encode()) <= MAX_ADDRESS or not address.isprintable():
                raise ValueError(f"no address: {address[:80]!r}")
        size = sum(len(key.encode()) + len(value.encode()) for key, value in self.attributes.items())
        if size > MAX_ATTRIBUTES:
            raise ValueError(f"attributes of {size} bytes; {MAX_ATTRIBUTES} are allowed")
        if not 1.0 <= self.lease <= MAX_LEASE:
            raise ValueError(f"a lease of {self.lease} s; 1 s to {MAX_LEASE} s are allowed")


@dataclass(frozen=True)
class Event:
    """What a watch tells. After ``outage``, the members stay as they are until ``synced``."""

    kind: Literal["joined", "changed", "left", "outage", "synced"]
    member: Member | None = None
    error: Exception | None = None


class StoreDirectory:
    """A directory in a store. Any thread may use it."""

    def __init__(self, store: Store, prefix: str = "multirail") -> None:
        self._store = store
        self._prefix = prefix
        self._lock = threading.Lock()
        self._seen: dict[int, _Seen] = {}
        self._warned: set[int] = set()

    def join(
        self,
        name: str,
        addresses: Sequence[str],
        *,
        attributes: Mapping[str, str] | None = None,
        lease: float = 5.0,
    ) -> Membership:
        """Lists this process until :meth:`Membership.leave`; a thread renews it three times per lease. A member of the
        same name is replaced.

        Raises ``ValueError`` if a limit is broken, and what the store raises.
        """
        member = Member(name, tuple(addresses), secrets.token_hex(8), dict(attributes or {}), lease)
        member.check()
        return Membership(self._store, self._prefix, member)

    def members(self) -> dict[str, Member]:
        """The members by name. Raises what the store raises."""
        with self._lock:
            listed: dict[str, Member] = {}
            for slot in range(min(int(self._store.add(f"{self._prefix}/slots", 0)), MAX_SLOTS)):
                member = self._look(slot)
                if member is not None:
                    listed.setdefault(member.name, member)
            return listed

    def lookup(self, name: str) -> Member | None:
        """The member of this name, or ``None``."""
        return self.members().get(name)

    def watch(self, interval: float = 0.5) -> Iterator[Event]:
        """The changes of the members, without an end: first each member as ``joined``, then ``synced``."""
        known: dict[str, Member] = {}
        is_out, is_first, interrupted = False, True, -float("inf")
        while True:
            try:
                listed = self.members()
            except Exception as error:  # whatever the store raises
                if not is_out:
                    is_out = True
                    yield Event("outage", error=error)
                time.sleep(interval)
                continue
            now = time.monotonic()
            if is_out:
                interrupted = now
            for name, member in list(known.items()):
                if name not in listed and now >= interrupted + 2 * member.lease + GRACE:
                    yield Event("left", known.pop(name))
            for name, member in listed.items():
                if name not in known:
                    yield Event("joined", member)
                elif known[name] != member:
                    yield Event("changed", member)
                known[name] = member
            if is_out or is_first:
                is_out, is_first = False, False
                yield Event("synced")
            time.sleep(interval)

    def _look(self, slot: int) -> Member | None:
        """The member in a slot, if its lease lasts."""
        key = f"{self._prefix}/slot/{slot}"
        if not self._store.check([key]):
            return None
        record = bytes(self._store.get(key))
        if not record:
            return None
        try:
            member, written = _read(record)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if slot not in self._warned:
                self._warned.add(slot)
                _log.warning("this side skips slot %d of the directory: %s", slot, error)
            return None
        now, seen = time.monotonic(), self._seen.get(slot)
        if seen is None:
            # The clocks of the hosts may differ: a record that looks old counts once it changes.
            self._seen[slot] = seen = _Seen(record, now, time.time() - written <= member.lease)
        elif seen.record != record:
            self._seen[slot] = seen = _Seen(record, now, True)
        return member if seen.counts and now - seen.changed <= member.lease else None


class Membership:
    """This process as a member, also as a context manager."""

    def __init__(self, store: Store, prefix: str, member: Member) -> None:
        self.member = member
        self._store = store
        self._prefix = prefix
        self._key = self._find_slot()
        self._record = _write(member, 0)
        self._stop = threading.Event()
        self._is_replaced = False
        store.set(self._key, self._record)
        self._thread = threading.Thread(target=self._renew, name="mr-directory", daemon=True)
        self._thread.start()

    @property
    def is_replaced(self) -> bool:
        """Whether another process has joined with the name. Then nothing is renewed any more."""
        return self._is_replaced

    def leave(self) -> None:
        """Removes the entry. If the store does not answer, the lease ends it."""
        self._stop.set()
        self._thread.join()
        if not self._is_replaced and self._record:
            try:
                self._store.compare_set(self._key, self._record, "")
            except Exception as error:  # whatever the store raises
                _log.warning("this process could not leave the directory: %s", error)
            self._record = ""

    def __enter__(self) -> Membership:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _find_slot(self) -> str:
        """The key of the name's slot. Takes a slot for a new name."""
        owner = f"{self._prefix}/slot-of/{self.member.name}"
        if self._store.check([owner]):
            slot = int(self._store.get(owner))
        else:
            fresh = self._store.add(f"{self._prefix}/slots", 1) - 1
            # Another process of the name may have been faster. Then the fresh slot stays empty.
            slot = int(self._store.compare_set(owner, "", str(fresh)))
        return f"{self._prefix}/slot/{slot}"

    def _renew(self) -> None:
        beat = 0
        while not self._stop.wait(self.member.lease / 3):
            beat += 1
            fresh = _write(self.member, beat)
            try:
                found = self._exchange(fresh)
                if found == self._record:
                    # What torch's store answers if it has no such key: it was started anew.
                    self._key, self._record = self._find_slot(), ""
                    found = self._exchange(fresh)
            except Exception as error:  # whatever the store raises
                _log.info("the store did not renew the lease: %s", error)
                continue
            if found == fresh:
                self._record = fresh
            elif found and _session(found) == self.member.session:
                # A renewal whose answer was lost.
                self._record = found
            else:
                self._is_replaced = True
                return

    def _exchange(self, fresh: str) -> str:
        """Replaces this process's record. Returns the record that the store has now."""
        return bytes(self._store.compare_set(self._key, self._record, fresh)).decode(errors="replace")


@dataclass
class _Seen:
    record: bytes
    #: When this process saw the record change.
    changed: float
    #: Whether a change was seen, or the record looked young at first.
    counts: bool


def _write(member: Member, beat: int) -> str:
    record = {
        "version": 1,
        "name": member.name,
        "addresses": list(member.addresses),
        "session": member.session,
        "attributes": dict(member.attributes),
        "lease": member.lease,
        "beat": beat,
        "time": time.time(),
    }
    return json.dumps(record)


def _read(record: bytes) -> tuple[Member, float]:
    """The member of a record, and when it was written by the writer's clock."""
    if len(record) > 6 * (MAX_NAME + MAX_ADDRESSES * MAX_ADDRESS + MAX_ATTRIBUTES):
        raise ValueError(f"a record of {len(record)} bytes")
    value = json.loads(record)
    if value["version"] != 1:
        raise ValueError("the record has another version")
    texts = [value["name"], value["session"], *value["addresses"], *value["attributes"], *value["attributes"].values()]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("the record has something else than texts")
    addresses = tuple(value["addresses"])
    member = Member(value["name"], addresses, value["session"], value["attributes"], float(value["lease"]))
    member.check()
    return member, float(value["time"])


def _session(record: str) -> str | None:
    try:
        session = json.loads(record)["session"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return session if isinstance(session, str) else None
