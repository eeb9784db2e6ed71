"""Mooncake's ``TransferEngine``, over multirail: the calls that SGLang, vLLM, checkpoint-engine and verl make.

Arguments and return codes are those of ``mooncake.engine``. Two engines of one process, and a write:

>>> import ctypes
>>> source, target = TransferEngine(), TransferEngine()
>>> source.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), target.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
(0, 0)
>>> data, into = ctypes.create_string_buffer(b"page", 4), ctypes.create_string_buffer(4)
>>> source.register_memory(ctypes.addressof(data), 4), target.register_memory(ctypes.addressof(into), 4)
(0, 0)
>>> session = f"127.0.0.1:{target.get_rpc_port()}"
>>> source.transfer_sync_write(session, ctypes.addressof(data), ctypes.addressof(into), 4)
0
>>> into.raw
b'page'

Differences to Mooncake:

- The environment variable ``MULTIRAIL_BACKEND`` chooses the backend, by default all that are available. ``protocol``
  and ``device_name`` choose nothing. Mooncake's engines and these do not reach one another.
- If ``MULTIRAIL_TOKEN_FILE`` is the path of a token, only engines with the same token connect.
- Local buffers must be registered. Mooncake asks for that on RDMA only.
- Every failure is logged, by the logger ``multirail.compat.mooncake``, with the reason and what to do.
- A transfer fails after ``MULTIRAIL_COMPAT_DEADLINE`` seconds (environment, default 30). No call hangs.
- Two registered buffers, one behind the other, are not one: no piece may span them.
- ``get_engine`` and ``get_engine_ptr`` are missing: there is no C++ object.

Register many buffers by one ``batch_register_memory``: each call publishes the list of all buffers anew.

An engine may be used by several threads at once. All waits release the GIL.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.machinery
import json
import logging
import operator
import os
import sys
import threading
import time
import types
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

from multirail import (
    Catalogue,
    Fabric,
    LocalList,
    Notifications,
    Operation,
    Outcome,
    Peer,
    Region,
    RemoteCatalogue,
    RemoteList,
    errors,
)
from multirail import _serving as serving

__all__ = ["Read", "TransferEngine", "TransferNotify", "TransferOpcode", "Write", "install_modules"]

_log = logging.getLogger(__name__)

# Mooncake's codes.
_OK = 0
_FAILED = -1
_NOT_REGISTERED = -3
_OVERLAPPED = -7
_BAD_ADDRESS = -101
_NO_CONNECTION = -102

_CATALOGUE = "mooncake"
_FIRST = "mooncake/first"
# The least that a fabric takes, in bytes.
_NOTIFICATION_MEMORY = 4 << 20
# Seconds that a transfer which is late waits for its last bytes to stop.
_DRAIN = 1.0
# How often a catalogue is fetched that its owner replaces meanwhile.
_FETCHES = 8

# The remote region is gone, or was registered anew: a newer catalogue may have it.
_STALE = (errors.NotFound, errors.Revoked, errors.RemoteAccess)
_GONE = (errors.PeerDied, errors.Closed)


class TransferOpcode(enum.IntEnum):
    """The direction of a transfer."""

    Read = 0
    Write = 1

    def __str__(self) -> str:
        return f"TransferOpcode.{self.name}"


Read = TransferOpcode.Read
Write = TransferOpcode.Write
# Within the engine, the name is that of its attribute.
_Opcode = TransferOpcode


class TransferNotify:
    """What the target's ``get_notifies`` returns once a transfer has ended: two strings."""

    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name = name
        self.msg = msg


class TransferEngine:
    """Registers memory, and moves bytes between it and the registered memory of other engines.

    Peers have names ``"host:port"``, with the port of their ``get_rpc_port()``. Memory has its address in the process
    that owns it. Calls return 0, or a negative code. Sizes are in bytes.
    """

    TransferOpcode = TransferOpcode

    def __init__(self) -> None:
        self._opened: _Opened | None = None

    @property
    def _engine(self) -> _Opened:
        if self._opened is None:
            raise RuntimeError("the engine is not open: call initialize() first, and check that it returns 0")
        return self._opened

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:
        """Opens the engine. It listens at ``local_hostname``, a name or an address of this host, on a free port.

        ``metadata_server`` must be ``"P2PHANDSHAKE"``. A second call opens the engine anew, without memory.
        """
        return self.initialize_ext(local_hostname, metadata_server, protocol, device_name, "")

    def initialize_ext(
        self, local_hostname: str, metadata_server: str, protocol: str, device_name: str, metadata_type: str
    ) -> int:
        """As ``initialize``. ``metadata_type`` is ignored."""
        if metadata_server != "P2PHANDSHAKE":
            _log.error("initialize: metadata server %r: only P2PHANDSHAKE is there, use it", metadata_server)
            return _FAILED

        def opened() -> int:
            self._opened = _Opened(_host_of(local_hostname))
            weakref.finalize(self._opened, self._opened.fabric.close)
            return _OK

        return _code("initialize", opened)

    def get_rpc_port(self) -> int:
        """The port of this engine, for the peers' ``"host:port"``."""
        return self._engine.port

    def get_local_topology(self, device_name: str | None = None) -> str:
        """The devices of the engine, as Mooncake's JSON: per location the preferred ones, and the others."""
        devices = [device for transport in self._engine.fabric.transports() for device in transport["devices"]]
        return json.dumps({"cpu:0": [devices, []]})

    # ---- memory ----

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:
        """Registers ``capacity`` bytes. The caller keeps them until ``unregister_memory``.

        ``location`` is "cpu:N", "cuda:N", or "*" to ask the driver. Returns -7 if registered memory overlaps.
        """
        return self.batch_register_memory([buffer_addr], [capacity], location)

    def unregister_memory(self, buffer_addr: int) -> int:
        """Takes back memory by its first address. Afterwards no byte of a peer lands in it. Returns -3 if unknown."""
        return self.batch_unregister_memory([buffer_addr])

    def batch_register_memory(
        self, buffer_addresses: Sequence[int], capacities: Sequence[int], location: str = "*"
    ) -> int:
        """As ``register_memory``, for all or none of several buffers."""
        memory = self._engine.memory
        starts, lengths = _numbers(buffer_addresses), _numbers(capacities)
        if len(starts) != len(lengths):
            _log.error("batch_register_memory: %d addresses, but %d capacities", len(starts), len(lengths))
            return _FAILED
        return _code("register_memory", lambda: memory.add(zip(starts, lengths, strict=True), location))

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """As ``unregister_memory``. If some are unknown, takes back the others, and returns -3."""
        memory, starts = self._engine.memory, _numbers(buffer_addresses)
        return _code("unregister_memory", lambda: memory.remove(starts))

    def allocate_managed_buffer(self, length: int) -> int:
        """Allocates and registers ``length`` bytes. Returns their address, 0 on failure."""
        memory, length = self._engine.memory, _number(length)
        return max(_code("allocate_managed_buffer", lambda: memory.allocate(length)), 0)

    def free_managed_buffer(self, buffer_addr: int, length: int) -> int:
        """Takes back a buffer of ``allocate_managed_buffer``."""
        return self.unregister_memory(buffer_addr)

    def write_bytes_to_buffer(self, dest_address: int, src: str | bytes, length: int) -> int:
        """Copies the first ``length`` bytes of ``src`` to registered memory."""
        data = src.encode() if isinstance(src, str) else src
        if length > len(data):
            _log.error("write_bytes_to_buffer: %d bytes of %d; give a smaller length", length, len(data))
            return _FAILED
        address, length = _number(dest_address), _number(length)

        def write() -> int:
            region, offset = self._engine.memory.find(address, length)
            region.write_bytes(data[:length], offset)
            return _OK

        return _code("write_bytes_to_buffer", write)

    def read_bytes_from_buffer(self, source_address: int, length: int) -> bytes:
        """A copy of ``length`` bytes of registered memory. Raises ``multirail.NotFound`` if it is not registered."""
        address, length = _number(source_address), _number(length)
        region, offset = self._engine.memory.find(address, length)
        return region.read_bytes(offset, length)

    def get_first_buffer_address(self, segment_name: str) -> int:
        """The address of the buffer that the peer has registered first; 0 if it has none, or is not reached."""
        engine = self._engine
        return max(_code("get_first_buffer_address", lambda: engine.first_address(segment_name)), 0)

    # ---- transfers that wait ----

    def transfer_sync_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Writes ``length`` bytes from ``buffer`` to the peer's address. ``transport_hint`` is always ignored."""
        return self._sync("transfer_sync_write", target_hostname, Write, [buffer], [peer_buffer_address], [length])

    def transfer_sync_read(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Reads ``length`` bytes from the peer's address into ``buffer``."""
        return self._sync("transfer_sync_read", target_hostname, Read, [buffer], [peer_buffer_address], [length])

    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Writes or reads. Then the peer's ``get_notifies`` returns ``notify``."""
        what = "transfer_sync"
        return self._sync(what, target_hostname, opcode, [buffer], [peer_buffer_address], [length], notify)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Writes many pieces, as one operation."""
        what = "batch_transfer_sync_write"
        return self._sync(what, target_hostname, Write, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Reads many pieces, as one operation."""
        what = "batch_transfer_sync_read"
        return self._sync(what, target_hostname, Read, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Writes or reads many pieces. Then the peer's ``get_notifies`` returns ``notify``."""
        what = "batch_transfer_sync"
        return self._sync(what, target_hostname, opcode, buffers, peer_buffer_addresses, lengths, notify)

    def _sync(
        self,
        what: str,
        session: str,
        opcode: _Opcode,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None = None,
    ) -> int:
        transfer = self._engine.transfer(session, opcode, buffers, addresses, lengths, notify)

        def moved() -> int:
            transfer.start()
            transfer.finish()
            return _OK

        return _code(what, moved, session)

    # ---- transfers under way ----

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts a write. Returns a number for ``get_batch_transfer_status``, 0 on failure."""
        what = "batch_transfer_async_write"
        return self._async(what, target_hostname, Write, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Starts a read. Returns a number for ``get_batch_transfer_status``, 0 on failure."""
        what = "batch_transfer_async_read"
        return self._async(what, target_hostname, Read, buffers, peer_buffer_addresses, lengths)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: _Opcode,
        transport_hint: str = "",
    ) -> int:
        """Starts a write or a read. Returns a number for ``get_batch_transfer_status``, 0 on failure."""
        what = "batch_transfer_async"
        return self._async(what, target_hostname, opcode, buffers, peer_buffer_addresses, lengths)

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Waits for transfers. Returns 0 if all have succeeded. Their numbers end with the call."""
        code, engine = _OK, self._engine
        for number in batch_ids:
            if _code("get_batch_transfer_status", functools.partial(engine.finish, number)) != _OK:
                code = _FAILED
        return code

    def transfer_submit_write(
        self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int, transport_hint: str = ""
    ) -> int:
        """Starts a write. Returns a number for ``transfer_check_status``, 0 on failure."""
        return self._async("transfer_submit_write", target_hostname, Write, [buffer], [peer_buffer_address], [length])

    def transfer_check_status(self, batch_id: int) -> int:
        """Returns 0 if the transfer is under way, 1 if it has succeeded, -1 if it has failed. Then its number ends."""
        engine = self._engine
        return _code("transfer_check_status", lambda: engine.check(batch_id))

    def _async(
        self,
        what: str,
        session: str,
        opcode: _Opcode,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        engine = self._engine
        transfer = engine.transfer(session, opcode, buffers, addresses, lengths, None)
        return max(_code(what, lambda: engine.keep(transfer), session), 0)

    # ---- peers ----

    def send_probe(self, peer_server_name: str) -> int:
        """Asks a peer for a sign of life. Returns -101 if the name is no address, -102 if the peer is silent."""
        engine = self._engine
        return _code("send_probe", lambda: engine.probe(peer_server_name), peer_server_name)

    def get_notifies(self) -> list[TransferNotify]:
        """The notifications that have arrived since the last call."""
        return self._engine.notifies()

    def warmup_efa_segment(self, segment_name: str) -> int:
        """Connects to a peer, and does the work of the first transfer in advance."""
        engine = self._engine
        return _code("warmup_efa_segment", lambda: engine.warm_up(segment_name), segment_name)


class _Opened:
    """An engine that is open: its fabric, memory, peers, and the transfers under way."""

    def __init__(self, host: str) -> None:
        self.limit = serving.deadline()
        self.fabric = Fabric(
            None,
            deadline=self.limit,
            notifications=_NOTIFICATION_MEMORY,
            token=os.environ.get("MULTIRAIL_TOKEN_FILE") or None,
        )
        self.memory = _Memory(self.fabric)
        listener = self.fabric.listen(f"{host}:0").wait(self.limit)
        self.port = int(listener.address.rpartition(":")[2])
        self._notifications: Notifications = self.fabric.notifications()
        self._lock = threading.Lock()
        self._links: dict[str, _Link] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._next = 1
        serving.accept_all(listener, _log, "multirail-mooncake")

    def link(self, session: str) -> _Link:
        with self._lock:
            link = self._links.get(session)
            if link is None:
                link = self._links[session] = _Link(self.fabric, session)
            return link

    def transfer(
        self,
        session: str,
        opcode: _Opcode,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None,
    ) -> _Transfer:
        if not isinstance(opcode, TransferOpcode):
            raise TypeError("opcode: give TransferOpcode.Read or TransferOpcode.Write")
        if not isinstance(session, str):
            raise TypeError("target_hostname: give the string 'host:port'")
        return _Transfer(self, session, opcode is Write, buffers, addresses, lengths, notify)

    def keep(self, transfer: _Transfer) -> int:
        """Starts a transfer, and returns its number."""
        transfer.start()
        with self._lock:
            number = self._next
            self._next += 1
            self._transfers[number] = transfer
        return number

    def finish(self, number: int) -> int:
        with self._lock:
            transfer = self._transfers.pop(number, None)
        if transfer is None:
            raise _no_transfer(number)
        transfer.finish()
        return _OK

    def check(self, number: int) -> int:
        with self._lock:
            transfer = self._transfers.get(number)
        if transfer is None:
            raise _no_transfer(number)
        if not transfer.is_over():
            return 0
        self.finish(number)
        return 1

    def probe(self, session: str) -> int:
        # The owner must answer for its catalogue.
        self.link(session).ready(time.monotonic() + self.limit, ask=True)
        return _OK

    def warm_up(self, session: str) -> int:
        end = time.monotonic() + self.limit
        peer, _ = self.link(session).ready(end)
        peer.warm_up().wait(serving.left(end))
        return _OK

    def first_address(self, session: str) -> int:
        end = time.monotonic() + self.limit
        peer, _ = self.link(session).ready(end)
        theirs = peer.region(_FIRST).wait(serving.left(end))
        into = self.fabric.alloc(8, "local")
        peer.read(into, theirs, 8, deadline=serving.left(end)).wait()
        return int.from_bytes(into.read_bytes(), "little")

    def notifies(self) -> list[TransferNotify]:
        arrived = []
        while (notification := self._notifications.try_next()) is not None:
            try:
                name, msg = json.loads(notification.data)
                arrived.append(TransferNotify(str(name), str(msg)))
            except ValueError:
                _log.error("get_notifies: %r is no notification of an engine", notification)
        return arrived


class _Memory:
    """The registered memory of an engine, and its catalogue for the peers."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        # For changes. Readers take what they need in one step: changes replace it.
        self._lock = threading.Lock()
        self._starts: list[int] = []
        # In the order of their registration.
        self._regions: dict[int, Region] = {}
        self._first = fabric.alloc(8, "read")
        fabric.publish(_FIRST, self._first)
        self._replace([], {})

    def add(self, ranges: Iterable[tuple[int, int]], location: str) -> int:
        with self._lock:
            starts, regions = self._starts.copy(), self._regions.copy()
            for start, length in ranges:
                if length == 0:
                    _log.error("register_memory: no bytes to register at %#x: give a length above 0", start)
                    return _FAILED
                at = bisect_right(starts, start)
                before, after = regions[starts[at - 1]] if at else None, starts[at : at + 1]
                if (before and start < before.address + len(before)) or (after and after[0] < start + length):
                    _log.error("register_memory: %d bytes from %#x on overlap registered memory", length, start)
                    return _OVERLAPPED
                regions[start] = self._fabric.register((start, length, _device(start, location)))
                starts.insert(at, start)
            self._replace(starts, regions)
            return _OK

    def allocate(self, length: int) -> int:
        region = self._fabric.alloc(length)
        with self._lock:
            starts, regions = self._starts.copy(), self._regions | {region.address: region}
            starts.insert(bisect_right(starts, region.address), region.address)
            self._replace(starts, regions)
        return region.address

    def remove(self, starts: Iterable[int]) -> int:
        code, gone = _OK, []
        with self._lock:
            regions = self._regions.copy()
            for start in starts:
                region = regions.pop(start, None)
                if region is None:
                    _log.error("unregister_memory: no registered memory begins at %#x", start)
                    code = _NOT_REGISTERED
                else:
                    gone.append(region)
            if gone:
                self._replace(sorted(regions), regions)
        revocations = [region.revoke() for region in gone]
        for revocation in revocations:
            revocation.wait()
        return code

    def find(self, start: int, length: int) -> tuple[Region, int]:
        """The region of this memory, and the offset in it."""
        starts, regions = self._starts, self._regions
        at = bisect_right(starts, start)
        region = regions.get(starts[at - 1]) if at else None
        if region is None or start + length > region.address + len(region):
            why = f"no registered memory holds the {length} bytes from {start:#x} on: register_memory() them first"
            raise errors.NotFound(why)
        return region, start - region.address

    def _replace(self, starts: list[int], regions: dict[int, Region]) -> None:
        catalogue = Catalogue(list(regions.values()))
        self._fabric.publish_catalogue(_CATALOGUE, catalogue)
        self._first.write_bytes(next(iter(regions), 0).to_bytes(8, "little"))
        self._starts, self._regions, self.catalogue = starts, regions, catalogue


class _Link:
    """The way to one peer: connects when it is first used, and again once the peer has died and come back."""

    def __init__(self, fabric: Fabric, session: str) -> None:
        self._fabric = fabric
        self._session = session
        self._lock = threading.Lock()
        self._peer: Peer | None = None
        self._catalogue: RemoteCatalogue | None = None

    def ready(
        self, end: float, *, stale: RemoteCatalogue | None = None, dead: Peer | None = None, ask: bool = False
    ) -> tuple[Peer, RemoteCatalogue]:
        """The peer, and a catalogue of its memory other than ``stale``. ``dead`` was found dead.

        With ``ask``, the peer must answer. ``end`` is the time of the deadline.
        """
        peer, catalogue = self._peer, self._catalogue
        if peer and catalogue and peer.is_alive and catalogue is not stale and peer is not dead and not ask:
            return peer, catalogue
        if not self._lock.acquire(timeout=serving.left(end)):
            raise errors.DeadlineExceeded(f"other threads still connect to {self._session}; try again")
        try:
            peer, catalogue = self._peer, self._catalogue
            if peer is None or not peer.is_alive or peer is dead:
                self._peer = self._catalogue = catalogue = None
                peer = self._fabric.connect(self._session).wait(serving.left(end))
            if catalogue is None or catalogue is stale or ask:
                try:
                    catalogue = _fetch(peer, end)
                except _GONE:
                    # The peer has died since it was last used.
                    peer = self._fabric.connect(self._session).wait(serving.left(end))
                    catalogue = _fetch(peer, end)
            self._peer, self._catalogue = peer, catalogue
            return peer, catalogue
        finally:
            self._lock.release()

    def break_off(self, peer: Peer) -> None:
        """Ends a connection whose operations are late, so that their bytes stop."""
        peer.disconnect()
        try:
            peer.drain().wait(_DRAIN)
        except errors.Error as error:
            _log.warning("%s: bytes of the late transfer may still move: %s", self._session, error)


class _Transfer:
    """One transfer, of one piece or many."""

    def __init__(
        self,
        engine: _Opened,
        session: str,
        is_write: bool,
        buffers: Sequence[int],
        addresses: Sequence[int],
        lengths: Sequence[int],
        notify: TransferNotify | None,
    ) -> None:
        self._engine = engine
        self._link = engine.link(session)
        self._is_write = is_write
        self._pieces = _packed(buffers), _packed(addresses), _packed(lengths)
        self._notify = json.dumps([notify.name, notify.msg]).encode() if notify is not None else None
        self._end = time.monotonic() + engine.limit
        self._peer: Peer | None = None
        self._catalogue: RemoteCatalogue | None = None
        self._operation: Operation[Outcome] | None = None

    def start(self) -> None:
        buffers, addresses, lengths = self._pieces
        if not len(buffers) == len(addresses) == len(lengths):
            counts = f"{len(buffers)} buffers, {len(addresses)} addresses, {len(lengths)} lengths"
            raise errors.InvalidRequest(f"{counts}: give as many of each")
        if 0 in lengths:
            kept = [number for number, length in enumerate(lengths) if length]
            buffers, addresses, lengths = (_packed(column[number] for number in kept) for column in self._pieces)
            self._pieces = buffers, addresses, lengths
        self._post()

    def is_over(self) -> bool:
        return self._operation is None or self._operation.done()

    def finish(self) -> None:
        if self._operation is None or self._peer is None:
            return
        try:
            self._operation.wait()
        except _STALE:
            self._post(self._catalogue)
            self._operation.wait()
        except errors.DeadlineExceeded:
            self._link.break_off(self._peer)
            raise

    def _post(self, stale: RemoteCatalogue | None = None) -> None:
        """Posts the operation, with another catalogue than ``stale``."""
        peer, catalogue = self._link.ready(self._end, stale=stale)
        try:
            self._submit(peer, catalogue)
        except _STALE:
            if stale is not None:
                raise
            self._submit(*self._link.ready(self._end, stale=catalogue))
        except _GONE:
            self._submit(*self._link.ready(self._end, dead=peer))

    def _submit(self, peer: Peer, catalogue: RemoteCatalogue) -> None:
        buffers, addresses, lengths = self._pieces
        memory = self._engine.memory
        self._peer, self._catalogue = peer, catalogue
        deadline = serving.left(self._end)
        if len(buffers) == 1:
            length = lengths[0]
            region, offset = memory.find(buffers[0], length)
            theirs, at = catalogue.find(addresses[0], length)
            if self._is_write:
                self._operation = peer.write(region, theirs, length, offset, at, notify=self._notify, deadline=deadline)
            else:
                self._operation = peer.read(region, theirs, length, offset, at, notify=self._notify, deadline=deadline)
        elif len(buffers):
            local = LocalList.of_addresses(memory.catalogue, buffers, lengths)
            remote = RemoteList.of_addresses(catalogue, addresses, lengths)
            move = peer.write_list if self._is_write else peer.read_list
            self._operation = move(local, remote, notify=self._notify, deadline=deadline)
        elif self._notify is not None:
            self._operation = peer.notify(self._notify, deadline=deadline)


def install_modules(*, force: bool = False) -> None:
    """Puts this module where ``from mooncake.engine import TransferEngine`` finds it.

    Raises ``RuntimeError`` if another ``mooncake`` is imported already; ``force`` replaces it for later imports.
    """
    engine = sys.modules[__name__]
    package = sys.modules.get("mooncake")
    if package is not None and getattr(package, "engine", None) is not engine and not force:
        raise RuntimeError(
            f"mooncake is imported already, from {getattr(package, '__file__', None)}: call install_modules() before "
            "any import of mooncake, or give force=True, which changes later imports alone"
        )
    package = types.ModuleType("mooncake", "multirail.compat.mooncake, where Mooncake is expected.")
    # A package without files: other modules of Mooncake are not found.
    package.__path__ = []
    package.__spec__ = importlib.machinery.ModuleSpec("mooncake", None, is_package=True)
    package.engine = engine  # type: ignore[attr-defined]
    sys.modules["mooncake"] = package
    sys.modules["mooncake.engine"] = engine


def _fetch(peer: Peer, end: float) -> RemoteCatalogue:
    for _ in range(_FETCHES):
        try:
            return peer.catalogue(_CATALOGUE).wait(serving.left(end))
        except (errors.Revoked, errors.RemoteAccess):
            # The owner has replaced it between the look-up and the read.
            continue
    return peer.catalogue(_CATALOGUE).wait(serving.left(end))


def _code(what: str, call: Callable[[], int], session: str = "") -> int:
    """What ``call`` returns; if it fails, logs why and returns the code."""
    try:
        return call()
    except errors.Error as error:
        where = f"{what} {session}" if session else what
        _log.error("%s: %s", where, error)
        if what != "send_probe":
            return _FAILED
        return _BAD_ADDRESS if isinstance(error, (errors.InvalidRequest, errors.NotFound)) else _NO_CONNECTION


def _no_transfer(number: int) -> errors.NotFound:
    return errors.NotFound(
        f"no transfer has the number {number}; each number ends with the call that returns its result"
    )


def _number(value: SupportsIndex) -> int:
    number = operator.index(value)
    if not 0 <= number < 1 << 64:
        raise TypeError(f"{number} is no address or length: give an integer from 0 to 2**64 - 1")
    return number


def _numbers(values: Iterable[SupportsIndex]) -> list[int]:
    return [_number(value) for value in values]


def _packed(values: Iterable[SupportsIndex]) -> array[int]:
    """Addresses or lengths as machine words, which the native lists take at once."""
    try:
        return array("Q", values)  # type: ignore[arg-type]
    except OverflowError as error:
        raise TypeError(f"an address or length is out of range ({error}): give integers from 0 to 2**64 - 1") from None


def _host_of(hostname: str) -> str:
    """The host of "host" or "host:port". IPv6 addresses get brackets."""
    if hostname.startswith("["):
        return hostname[: hostname.index("]") + 1] if "]" in hostname else hostname
    match hostname.count(":"):
        case 0:
            return hostname
        case 1:
            return hostname.partition(":")[0]
        case _:
            return f"[{hostname}]"


def _device(address: int, location: str) -> str:
    """Where memory is: "cpu", or "cuda:N"."""
    if location.startswith("cuda"):
        return location
    if location.startswith("cpu"):
        return "cpu"
    driver = _cuda()
    # CU_POINTER_ATTRIBUTE_MEMORY_TYPE and _DEVICE_ORDINAL; CU_MEMORYTYPE_DEVICE.
    kind, ordinal, pointer = ctypes.c_uint(), ctypes.c_int(), ctypes.c_uint64(address)
    if driver is None or driver.cuPointerGetAttribute(ctypes.byref(kind), 2, pointer) != 0 or kind.value != 2:
        return "cpu"
    if driver.cuPointerGetAttribute(ctypes.byref(ordinal), 9, pointer) != 0:
        raise errors.DeviceLost(f"CUDA does not tell the GPU of address {address:#x}: give its location, as cuda:0")
    return f"cuda:{ordinal.value}"


@functools.cache
def _cuda() -> Any:
    """CUDA's driver; ``None`` on machines without."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
