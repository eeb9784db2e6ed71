"""Another agent: where it listens, the memory that it lends, and the connection to it."""

from __future__ import annotations

import functools
import pathlib
import socket
import threading
import time

import numpy as np

import multirail
from multirail import errors

from . import _bindings as bind
from ._memory import Pieces, Ranges, remote_list
from ._wire import Metadata


@functools.cache
def this_machine() -> str:
    """Names this boot of this machine: loopback addresses are of use only there."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class Catalogue:
    """The memory of one metadata. Each region is imported when it is first used."""

    def __init__(self, metadata: Metadata) -> None:
        self.rows, self.data = metadata.rows, metadata.catalogue
        self._imported: tuple[multirail.Peer, multirail.RemoteCatalogue] | None = None

    def region(self, peer: multirail.Peer, number: int) -> multirail.RemoteRegion:
        if self._imported is None or self._imported[0] is not peer:
            self._imported = (peer, peer.import_catalogue(self.data))
        return self._imported[1].region(number)


class Remote:
    """An agent whose metadata was loaded."""

    def __init__(self, fabric: multirail.Fabric, metadata: Metadata, deadline: float) -> None:
        self.name, self.incarnation = metadata.name, metadata.incarnation
        self.removed = False
        self._fabric, self._deadline = fabric, deadline
        self._addresses, self._machine = metadata.addresses, metadata.machine
        self._lock = threading.RLock()
        self._peer: multirail.Peer | None = None
        self._lost: multirail.Peer | None = None
        self._catalogues: list[Catalogue] = []
        self._known = Known([])

    def load(self, metadata: Metadata) -> None:
        """Adds the memory of a metadata, or replaces all."""
        with self._lock:
            if metadata.addresses:
                self._addresses, self._machine = metadata.addresses, metadata.machine
            if any(known.data == metadata.catalogue for known in self._catalogues[-1:]):
                return
            new = [Catalogue(metadata)] if len(metadata.rows) else []
            self._catalogues = new if metadata.is_full else [*self._catalogues, *new]
            self._known = Known(self._catalogues)

    def knows(self, mem: int, rows: bind.Rows) -> bool:
        found = self._known.ranges.find(mem, rows[:, 0], rows[:, 1], rows[:, 2])
        return bool((found >= 0).all())

    def side(self, mem: int, rows: bind.Rows) -> RemoteSide:
        with self._lock:
            known = self._known
        return RemoteSide(self, known, Pieces(known.ranges, mem, rows, f"agent {self.name!r} lends to this one"))

    def peer(self) -> multirail.Peer:
        """The connection, made anew if there is none or it has ended.

        Raises `nixlRemoteDisconnectError` if the agent can not be reached within the deadline.
        """
        peer = self._peer
        if peer is not None and self._is_alive(peer):
            return peer
        with self._lock:
            if self.removed:
                raise bind.nixlNotFoundError(f"agent {self.name!r} was removed; add its metadata again")
            if self._peer is None or not self._is_alive(self._peer):
                self._peer = self._connect()
            return self._peer

    def lose(self, peer: multirail.Peer) -> None:
        """Connects anew at the next use: an operation has found the peer gone, which `is_alive` may tell later."""
        self._lost = peer

    def _is_alive(self, peer: multirail.Peer) -> bool:
        return peer.is_alive and peer is not self._lost

    def remove(self) -> None:
        with self._lock:
            self.removed = True
            peer, self._peer = self._peer, None
        if peer is not None:
            peer.disconnect()

    def _connect(self) -> multirail.Peer:
        end, reasons = time.monotonic() + self._deadline, []
        for address in self._addresses:
            if self._machine != this_machine() and _is_loopback(address):
                reasons.append(f"{address}: of another machine")
                continue
            try:
                peer: multirail.Peer = self._fabric.connect(address).wait(max(0.0, end - time.monotonic()))
            except errors.Error as error:
                reasons.append(f"{address}: {error}")
                continue
            if peer.incarnation == self.incarnation:
                return peer
            peer.disconnect()
            reasons.append(f"{address}: another process listens there now")
        why = "; ".join(reasons) or "its metadata has no address"
        hint = "let it listen on an address that this machine reaches (MULTIRAIL_COMPAT_LISTEN)"
        raise bind.nixlRemoteDisconnectError(f"agent {self.name!r} can not be reached ({why}); {hint}")


class Myself(Remote):
    """The agent itself, for transfers within its own memory."""

    def _connect(self) -> multirail.Peer:
        there, self._other_end = self._fabric.connect_local(self._fabric)
        return there


class Known:
    """The memory of several metadata, newest last."""

    def __init__(self, catalogues: list[Catalogue]) -> None:
        rows = [catalogue.rows for catalogue in catalogues] or [np.empty((0, 4), np.uint64)]
        self.ranges = Ranges(np.concatenate(rows))
        self._catalogues = catalogues
        self._starts = np.cumsum([0, *(len(catalogue.rows) for catalogue in catalogues)])

    def region(self, peer: multirail.Peer, row: int) -> multirail.RemoteRegion:
        which = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._catalogues[which].region(peer, row - int(self._starts[which]))


class RemoteSide:
    """Descriptors of another agent, and the native list of them for the present connection."""

    __slots__ = ("_known", "_list", "pieces", "remote")

    def __init__(self, remote: Remote, known: Known, pieces: Pieces) -> None:
        self.remote, self._known, self.pieces = remote, known, pieces
        self._list: tuple[multirail.Peer, multirail.RemoteList] | None = None

    def list_for(self, peer: multirail.Peer) -> multirail.RemoteList:
        made = self._list
        if made is None or made[0] is not peer:
            made = (peer, remote_list(self.pieces, lambda row: self._known.region(peer, row)))
            self._list = made
        return made[1]

    def lose_peer(self) -> None:
        """An operation with the list has found its peer gone."""
        if self._list is not None:
            self.remote.lose(self._list[0])


def _is_loopback(address: str) -> bool:
    return address.startswith(("127.", "[::1]", "localhost"))
