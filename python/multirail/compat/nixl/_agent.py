"""The agent: memory, peers, transfers and notifications under NIXL's names."""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import multirail
from multirail import errors
from multirail._serving import deadline

from . import _bindings as bind
from ._handles import LocalSide, nixl_prepped_dlist_handle, nixl_xfer_handle
from ._memory import Indices, Pieces, Ranges
from ._remote import Myself, Remote, RemoteSide, this_machine
from ._wire import Metadata, frame, pack_descs, unframe, unpack_descs

logger = logging.getLogger("multirail.compat.nixl")

DEFAULT_COMM_PORT = bind.DEFAULT_COMM_PORT
nixl_backend_handle = int

#: Names that callers give the backend. All of them are the fabric, which chooses the devices itself.
_PLUGINS = ["LIBFABRIC", "MULTIRAIL", "UCX"]
_BACKEND_MEMS = ["DRAM_SEG", "VRAM_SEG"]
_MEMS = {
    "DRAM": bind.DRAM_SEG,
    "VRAM": bind.VRAM_SEG,
    "FILE": bind.FILE_SEG,
    "BLOCK": bind.BLK_SEG,
    "OBJ": bind.OBJ_SEG,
    "cpu": bind.DRAM_SEG,
    "cuda": bind.VRAM_SEG,
}
_OPERATIONS = {"WRITE": bind.NIXL_WRITE, "READ": bind.NIXL_READ}


class nixl_thread_sync_t(enum.Enum):
    """How threads may use an agent. Here every mode is safe for threads."""

    NIXL_THREAD_SYNC_NONE = bind.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = bind.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = bind.NIXL_THREAD_SYNC_RW
    NIXL_THREAD_SYNC_DEFAULT = bind.NIXL_THREAD_SYNC_DEFAULT


class nixl_agent_config:
    """Settings of an agent. Those of threads are accepted and change nothing: the fabric has threads of its own."""

    def __init__(
        self,
        enable_prog_thread: bool = True,
        enable_listen_thread: bool = False,
        listen_port: int = DEFAULT_COMM_PORT,
        capture_telemetry: bool = False,
        num_threads: int = 0,
        backends: Sequence[str] = ("UCX",),
        sync_mode: nixl_thread_sync_t | None = None,
    ) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t (got {type(sync_mode).__name__!r})")
        self.backends = list(backends)
        self.enable_pthread = enable_prog_thread
        self.enable_listen = enable_listen_thread
        self.port = listen_port
        self.capture_telemetry = capture_telemetry
        self.num_threads = num_threads
        self.sync_mode = sync_mode


class _Registration:
    """One registered range. `region` is `None` for a range without bytes."""

    def __init__(self, region: multirail.Region | None) -> None:
        self.region, self.count = region, 1


class nixl_agent:
    """An agent of NIXL's interface on a fabric of multirail.

    It listens on 127.0.0.1 and on the addresses of `MULTIRAIL_COMPAT_LISTEN`, and its metadata names them. So an
    initiator connects when it first needs to, and the target needs nothing of the initiator.
    """

    def __init__(
        self, agent_name: str, nixl_conf: nixl_agent_config | None = None, instantiate_all: bool = False
    ) -> None:
        if not isinstance(agent_name, str):
            raise TypeError(f"the agent's name must be a str, not {type(agent_name).__name__}")
        if not agent_name:
            raise ValueError("Agent needs a non-empty name")
        wanted = nixl_conf.backends if nixl_conf else list(_PLUGINS) if instantiate_all else ["UCX"]
        self.name = agent_name
        self.notifs: dict[str, list[bytes]] = {}
        self.backends: dict[str, int] = {}
        self.plugin_list = list(_PLUGINS)
        self.nixl_mems, self.nixl_ops = _MEMS, _OPERATIONS
        self._sender = agent_name.encode()
        self._captures = bool(nixl_conf and nixl_conf.capture_telemetry)
        self._deadline = deadline()
        self._lock = threading.RLock()
        self._registered: dict[tuple[int, int, int, int], _Registration] = {}
        self._memory: tuple[Ranges, list[multirail.Region]] | None = None
        self._remotes: dict[str, Remote] = {}
        self._transfers: weakref.WeakSet[nixl_xfer_handle] = weakref.WeakSet()
        self._notifying: list[tuple[str, multirail.Operation[Any]]] = []
        self._fabric = multirail.Fabric(notifications=True, deadline=self._deadline)
        weakref.finalize(self, _close, self._fabric, os.getpid())
        self._arriving = self._fabric.notifications()
        self._listeners = _listen(self._fabric, self._deadline)
        self._accepts = [listener.accept() for listener in self._listeners]
        for backend in wanted:
            if backend in self.plugin_list:
                self.create_backend(backend)
            else:
                logger.warning("there is no backend %s here, and it is left out; there are %s", backend, _PLUGINS)

    # ---- backends ----

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        return list(_BACKEND_MEMS) if backend in self.plugin_list else []

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        return list(_BACKEND_MEMS) if backend in self.backends else []

    def get_backend_params(self, backend: str) -> dict[str, str]:
        return {}

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:
        """Makes the fabric known under this name. The parameters of NIXL's plug-ins have no meaning here."""
        if backend not in self.plugin_list:
            raise bind.nixlNotFoundError(f"there is no backend {backend}; there are {', '.join(_PLUGINS)}")
        if backend in self.backends:
            raise bind.nixlInvalidParamError(f"backend {backend} exists")
        if initParams:
            logger.warning("parameters of backend %s have no meaning to multirail: %s", backend, sorted(initParams))
        self.backends[backend] = 1 + len(self.backends)

    def _backend(self, backends: Sequence[str]) -> str:
        """The name to report. Raises `KeyError` for a backend that was not created."""
        for backend in backends:
            self.backends[backend]
        return next(iter(backends or self.backends), "")

    # ---- memory ----

    def register_memory(
        self, reg_list: Any, mem_type: str | None = None, backends: Sequence[str] = ()
    ) -> bind.nixlRegDList:
        """Registers memory for transfers, all of it or none. Peers that load later metadata may read and write it."""
        descs = _is_reg(self.get_reg_descs(reg_list, mem_type), "register_memory")
        self._backend(backends)
        mem = descs.getType()
        if not self.backends or mem not in (bind.DRAM_SEG, bind.VRAM_SEG):
            raise bind.nixlNotFoundError(f"no backend of this agent registers memory of kind {mem.name}")
        done: list[tuple[int, int, int, int]] = []
        with self._lock:
            try:
                for address, length, device in descs.rows().tolist():
                    key: tuple[int, int, int, int] = (mem, device, address, length)
                    known = self._registered.get(key)
                    if known is not None:
                        known.count += 1
                    else:
                        self._registered[key] = _Registration(self._register(mem, *key[1:], descs.owner))
                    done.append(key)
            except errors.Error as error:
                for key in done:
                    self._forget(key)
                bind.fail(error)
            self._memory = None
        return descs

    def _register(self, mem: int, device: int, address: int, length: int, owner: object) -> multirail.Region | None:
        if not length:
            return None
        place = f"cuda:{device}" if mem == bind.VRAM_SEG else "cpu"
        return self._fabric.register((address, length, place), owner=owner)

    def _forget(self, key: tuple[int, int, int, int]) -> None:
        known = self._registered[key]
        known.count -= 1
        if not known.count:
            del self._registered[key]

    def deregister_memory(self, dereg_list: bind.nixlRegDList, backends: Sequence[str] = ()) -> None:
        """Takes memory back. Transfers of this agent that use it are cancelled, and peers can not use it any more.
        Returns once no byte of it can move.

        Raises `nixlNotFoundError` for ranges that are not registered, and `nixlNotAllowedError` if bytes may still move
        at the deadline: keep the memory, and deregister it again.
        """
        descs = _is_reg(dereg_list, "deregister_memory")
        self._backend(backends)
        mem = descs.getType()
        with self._lock:
            keys = [(mem, device, address, length) for address, length, device in descs.rows().tolist()]
            for key in keys:
                if key not in self._registered:
                    raise bind.nixlNotFoundError(f"{key[3]} bytes at {key[2]:#x}, device {key[1]}, are not registered")
            leaving = [self._registered[key] for key in keys]
            last = [known.region for known in leaving if known.count == 1 and known.region is not None]
            self._stop_transfers(None, {id(region) for region in last})
            try:
                for revoking in [region.revoke() for region in last]:
                    revoking.wait(self._deadline)
            except errors.Error as error:
                why = f"bytes may still move: {error}; keep the memory, and deregister it again"
                raise bind.nixlNotAllowedError(why) from error
            self._memory = None
            for key in keys:
                self._forget(key)

    def query_memory(self, reg_list: Any, backend: str, mem_type: str | None = None) -> list[dict[str, str] | None]:
        self.get_reg_descs(reg_list, mem_type)
        if backend not in self.backends:
            raise ValueError(f"Backend '{backend}' not found. Available backends: {list(self.backends)}")
        raise bind.nixlNotSupportedError("backends of memory have nothing to query")

    def _own_memory(self) -> tuple[Ranges, list[multirail.Region]]:
        with self._lock:
            if self._memory is None:
                found = [
                    (address, length, device, mem, known.region)
                    for (mem, device, address, length), known in self._registered.items()
                    if known.region is not None
                ]
                rows = np.array([row[:4] for row in found], np.uint64).reshape(-1, 4)
                self._memory = (Ranges(rows), [row[4] for row in found])
            return self._memory

    def _stop_transfers(self, remote: Remote | None, regions: set[int]) -> None:
        for handle in list(self._transfers):
            if handle.is_active and handle.uses(remote, regions):
                handle.stop()

    # ---- descriptors ----

    def get_reg_descs(self, descs: Any, mem_type: str | None = None) -> bind.nixlRegDList | None:
        """Descriptors for registration, of a list of (address, length, device, info), an N x 3 array, or tensors.

        As in NIXL, `None` for anything else, with a line in the log.
        """
        if isinstance(descs, bind.nixlRegDList):
            return descs
        found = self._rows_of(descs, mem_type, 4)
        return None if found is None else bind.nixlRegDList(found[0], found[1], owner=found[2])

    def get_xfer_descs(self, descs: Any, mem_type: str | None = None) -> bind.nixlXferDList | None:
        """Descriptors for transfers, of a list of (address, length, device), an N x 3 array, or tensors.

        As in NIXL, `None` for anything else, with a line in the log.
        """
        if isinstance(descs, bind.nixlXferDList):
            return descs
        found = self._rows_of(descs, mem_type, 3)
        return None if found is None else bind.nixlXferDList(found[0], found[1])

    def _rows_of(self, descs: Any, mem_type: str | None, width: int) -> tuple[bind.nixl_mem_t, Any, object] | None:
        """The kind of memory, the tuples or the array, and what keeps the memory."""
        if isinstance(descs, bind.nixlRegDList | bind.nixlXferDList):
            logger.error("these descriptors are a %s; the other kind is needed", type(descs).__name__)
            return None
        if _is_tensor(descs):
            return _of_tensors([descs])
        first = descs[0]
        if _is_tensor(first):
            return _of_tensors(list(descs))
        is_array = isinstance(descs, np.ndarray)
        if not is_array and not isinstance(first, tuple):
            return None
        if mem_type is None:
            logger.error('tell the kind of memory of the descriptors: "DRAM" or "VRAM"')
            return None
        fits = descs.ndim == 2 and descs.shape[1] == 3 if is_array else len(first) == width
        if not fits:
            logger.error("descriptors are tuples of %d numbers, or an array of N x 3", width)
            return None
        return self.nixl_mems[mem_type], descs if is_array else list(descs), None

    def get_serialized_descs(self, descs: bind.nixlXferDList | bind.nixlRegDList) -> bytes:
        return pack_descs(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> bind.nixlXferDList | bind.nixlRegDList:
        return unpack_descs(serialized_descs)

    # ---- metadata ----

    def get_agent_metadata(self) -> bytes:
        """All that a peer needs to use this agent: give it to the peer's `add_remote_agent`, by any means."""
        if not self.backends:
            raise bind.nixlInvalidParamError("the agent has no backend; create one first")
        ranges, regions = self._own_memory()
        return self._metadata(ranges.rows, regions, True, True).to_bytes()

    def get_partial_agent_metadata(
        self, descs: bind.nixlRegDList, inc_conn_info: bool = False, backends: Sequence[str] = ()
    ) -> bytes:
        """The same for some registered ranges; with `inc_conn_info`, also how to connect."""
        _is_reg(descs, "get_partial_agent_metadata")
        self._backend(backends)
        mem, rows, regions = descs.getType(), [], []
        with self._lock:
            for address, length, device in descs.rows().tolist():
                known = self._registered.get((mem, device, address, length))
                if known is None:
                    raise bind.nixlNotFoundError(f"{length} bytes at {address:#x}, device {device}, are not registered")
                if known.region is not None:
                    rows.append((address, length, device, mem))
                    regions.append(known.region)
        table = np.array(rows, np.uint64).reshape(-1, 4)
        return self._metadata(table, regions, inc_conn_info, False).to_bytes()

    def _metadata(
        self, rows: bind.Rows, regions: list[multirail.Region], has_addresses: bool, is_full: bool
    ) -> Metadata:
        addresses = tuple(listener.address for listener in reversed(self._listeners)) if has_addresses else ()
        catalogue = multirail.Catalogue(regions).to_bytes()
        incarnation = self._fabric.incarnation
        return Metadata(self.name, incarnation, this_machine(), addresses, is_full, rows, catalogue)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Makes an agent known, and returns its name. Connects later, when it is first needed.

        Metadata of an agent that has started anew under the same name replaces the old one.
        """
        loaded = Metadata.of_bytes(metadata)
        if loaded.name == self.name:
            raise bind.nixlInvalidParamError(f"the metadata is of an agent with this one's name, {self.name!r}")
        with self._lock:
            known = self._remotes.get(loaded.name)
            if known is not None and known.incarnation != loaded.incarnation:
                self._remove(known)
                known = None
            if known is None:
                if not loaded.addresses:
                    raise bind.nixlNotFoundError(
                        f"agent {loaded.name!r} is unknown, and this metadata has no connection information"
                    )
                known = self._remotes[loaded.name] = Remote(self._fabric, loaded, self._deadline)
            known.load(loaded)
        return loaded.name.encode()

    def remove_remote_agent(self, agent: str | bytes) -> None:
        """Disconnects from an agent, and forgets it. Transfers with it that are under way are cancelled."""
        with self._lock:
            known = self._remotes.get(_text(agent))
            if known is not None:
                self._remove(known)

    def _remove(self, remote: Remote) -> None:
        self._stop_transfers(remote, set())
        del self._remotes[remote.name]
        remote.remove()

    def check_remote_metadata(self, agent: str | bytes, descs: bind.nixlXferDList | None = None) -> bool:
        """Whether the agent is known, and lends all of these descriptors."""
        if descs is not None and not isinstance(descs, bind.nixlXferDList):
            raise TypeError(f"descs must be a nixlXferDList, not {type(descs).__name__}")
        name = _text(agent)
        if descs is None or descs.isEmpty():
            return name == self.name or name in self._remotes
        with contextlib.suppress(bind.nixlNotFoundError):
            return self._remote(name).knows(descs.getType(), descs.rows())
        return False

    def make_connection(self, remote_agent: str | bytes, backends: Sequence[str] = ()) -> None:
        """Connects now, so that the first transfer need not."""
        self._backend(backends)
        self._remote(remote_agent).peer()

    def _remote(self, agent: str | bytes) -> Remote:
        name = _text(agent)
        with self._lock:
            known = self._remotes.get(name)
            if name == self.name:
                ranges, regions = self._own_memory()
                own = self._metadata(ranges.rows, regions, True, True)
                if known is None:
                    known = self._remotes[name] = Myself(self._fabric, own, self._deadline)
                known.load(own)
        if known is None:
            raise bind.nixlNotFoundError(f"agent {name!r} is unknown; give its metadata to add_remote_agent() first")
        return known

    # ---- transfers ----

    def prep_xfer_dlist(
        self,
        agent_name: str | bytes,
        xfer_list: Any,
        mem_type: str | None = None,
        backends: Sequence[str] = (),
    ) -> nixl_prepped_dlist_handle:
        """Checks descriptors once, for any number of transfers. `agent_name` is "NIXL_INIT_AGENT" for the local side.

        An array of N x 5 has rows of address, length, device, stride, count: blocks of `length` bytes, `stride` apart.
        """
        self._backend(backends)
        if isinstance(xfer_list, np.ndarray) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("Please specify a mem type for strided descriptors")
            if xfer_list.dtype not in (np.uint64, np.int64):
                raise ValueError("descs must be a Nx5 numpy array of uint64 or int64")
            mem, rows = self.nixl_mems[mem_type], xfer_list.astype(np.uint64)
        else:
            descs = _is_xfer(self.get_xfer_descs(xfer_list, mem_type), "prep_xfer_dlist")
            mem, rows = descs.getType(), descs.rows()
        name = _text(agent_name)
        if name in ("", "NIXL_INIT_AGENT"):
            return nixl_prepped_dlist_handle(self._local_side(mem, rows))
        return nixl_prepped_dlist_handle(self._remote(name).side(mem, rows))

    def _local_side(self, mem: int, rows: bind.Rows) -> LocalSide:
        ranges, regions = self._own_memory()
        pieces = Pieces(ranges, mem, rows, "this agent has registered")
        try:
            return LocalSide(pieces, regions)
        except errors.Error as error:
            bind.fail(error)

    def make_prepped_xfer(
        self,
        operation: str,
        local_xfer_side: nixl_prepped_dlist_handle,
        local_indices: Sequence[int] | npt.NDArray[Any],
        remote_xfer_side: nixl_prepped_dlist_handle,
        remote_indices: Sequence[int] | npt.NDArray[Any],
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
        skip_desc_merge: bool = False,
    ) -> nixl_xfer_handle:
        """Plans a transfer between descriptors `local_indices[i]` and `remote_indices[i]`. Connects if needed."""
        local, remote = local_xfer_side._side, remote_xfer_side._side
        if not isinstance(local, LocalSide) or not isinstance(remote, RemoteSide):
            is_released = local is None or remote is None
            why = "was released" if is_released else "is of the wrong side: the first is local, the second remote"
            raise bind.nixlInvalidParamError(f"a descriptors' handle {why}")
        return self._transfer(
            self.nixl_ops[operation],
            local,
            _indices(local_indices, len(local.pieces), "local"),
            remote,
            _indices(remote_indices, len(remote.pieces), "remote"),
            notif_msg,
            backends,
        )

    def initialize_xfer(
        self,
        operation: str,
        local_descs: bind.nixlXferDList,
        remote_descs: bind.nixlXferDList,
        remote_agent: str | bytes,
        notif_msg: bytes | str = b"",
        backends: Sequence[str] = (),
    ) -> nixl_xfer_handle:
        """Plans a transfer of all descriptors of two lists, pair by pair. Connects if needed."""
        kind = self.nixl_ops[operation]
        local_descs = _is_xfer(local_descs, "initialize_xfer")
        remote_descs = _is_xfer(remote_descs, "initialize_xfer")
        remote = self._remote(remote_agent).side(remote_descs.getType(), remote_descs.rows())
        local = self._local_side(local_descs.getType(), local_descs.rows())
        return self._transfer(kind, local, None, remote, None, notif_msg, backends)

    def _transfer(
        self,
        operation: bind.nixl_xfer_op_t,
        local: LocalSide,
        local_indices: Indices | None,
        remote: RemoteSide,
        remote_indices: Indices | None,
        message: bytes | str,
        backends: Sequence[str],
    ) -> nixl_xfer_handle:
        here, there = local.pieces.chosen_lengths(local_indices), remote.pieces.chosen_lengths(remote_indices)
        if len(here) != len(there) or not len(here):
            why = f"{len(here)} local and {len(there)} remote descriptors; give the same number, at least one"
            raise bind.nixlInvalidParamError(why)
        differing = np.flatnonzero(here != there)
        if len(differing):
            at = differing[0]
            why = f"pair {at} has {here[at]} local and {there[at]} remote bytes; a pair must have equal lengths"
            raise bind.nixlInvalidParamError(why)
        notification = frame(self._sender, message) if message else None
        handle = nixl_xfer_handle(
            self, operation, local, local_indices, remote, remote_indices, notification, self._backend(backends)
        )
        self._transfers.add(handle)
        return handle

    def transfer(self, handle: nixl_xfer_handle, notif_msg: bytes | str = b"") -> str:
        """Starts the transfer: "DONE" if it is over, "PROC" if it is under way, "ERR" if it ran into the deadline.

        Other failures raise, as in NIXL: `nixlRemoteDisconnectError` for an agent that is gone.
        """
        return handle.post(frame(self._sender, notif_msg) if notif_msg else None)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        """How the transfer stands. Results and exceptions are those of `transfer`."""
        return handle.state()

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return handle.backend

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> tuple[int, int, str]:
        return 0, 0, "UNKNOWN"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> bind.nixlXferTelemetry:
        """Times in microseconds, and bytes, if the agent was made with `capture_telemetry`."""
        if not self._captures:
            raise bind.nixlNoTelemetryError("make the agent with nixl_agent_config(capture_telemetry=True)")
        return handle.telemetry()

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        """Frees the transfer. One under way is cancelled, and no byte of it can move afterwards.

        Raises `nixlNotAllowedError` if bytes may still move: keep the memory, and release again.
        """
        handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # ---- notifications ----

    def send_notif(self, remote_agent_name: str | bytes, notif_msg: bytes | str, backend: str | None = None) -> None:
        """Delivers bytes to an agent's `get_new_notifs`, at most 1 MiB. Connects if needed."""
        data = frame(self._sender, notif_msg)
        if backend is not None:
            self._backend([backend])
        remote = self._remote(remote_agent_name)
        try:
            sending = remote.peer().notify(data)
            if sending.done():
                sending.result()
                return
        except errors.Error as error:
            bind.fail(error)
        with self._lock:
            self._notifying.append((remote.name, sending))
            self._reap()

    def _reap(self) -> None:
        """Drops notifications that are over. An operation that is dropped earlier is cancelled."""
        under_way = []
        for name, sending in self._notifying:
            if not sending.done():
                under_way.append((name, sending))
            elif (error := sending.exception()) is not None:
                logger.error("a notification to agent %s was not delivered: %s", name, error)
        self._notifying = under_way

    def get_new_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """The notifications that have arrived, by the sender's name."""
        self._backend(backends)
        arrived: dict[str, list[bytes]] = {}
        self._collect(arrived)
        return arrived

    def update_notifs(self, backends: Sequence[str] = ()) -> dict[str, list[bytes]]:
        """Adds the notifications that have arrived to those of the calls before, and returns all."""
        self._backend(backends)
        self._collect(self.notifs)
        return self.notifs

    def check_remote_xfer_done(
        self,
        remote_agent_name: str | bytes,
        lookup_tag: bytes,
        backends: Sequence[str] = (),
        tag_is_prefix: bool = True,
    ) -> bool:
        """Whether a notification of this agent starts with the tag, or contains it. Takes one that does."""
        held = self.update_notifs(backends).get(_text(remote_agent_name), [])
        for position, message in enumerate(held):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del held[position]
                return True
        return False

    def _collect(self, into: dict[str, list[bytes]]) -> None:
        try:
            while (notification := self._arriving.try_next()) is not None:
                framed = unframe(notification.data)
                if framed is None:
                    logger.error("a peer that is no agent has sent a notification, which is dropped")
                else:
                    into.setdefault(framed[0], []).append(framed[1])
        except errors.Error as error:
            bind.fail(error)
        self._accept()
        if self._notifying:
            with self._lock:
                self._reap()

    def _accept(self) -> None:
        """Takes the peers that have connected off the listeners' queues. The fabric keeps them."""
        for number, accept in enumerate(self._accepts):
            while accept.done():
                try:
                    # A peer that is not taken goes back to its listener.
                    accept.result()
                except errors.Closed:
                    break
                except errors.Error as error:
                    logger.debug("a peer did not connect: %s", error)
                accept = self._accepts[number] = self._listeners[number].accept()


# ---- helpers ----


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


def _is_reg(descs: object, where: str) -> bind.nixlRegDList:
    if not isinstance(descs, bind.nixlRegDList):
        raise TypeError(f"{where}() takes a nixlRegDList (get_reg_descs), not {type(descs).__name__}")
    return descs


def _is_xfer(descs: object, where: str) -> bind.nixlXferDList:
    if not isinstance(descs, bind.nixlXferDList):
        raise TypeError(f"{where}() takes a nixlXferDList (get_xfer_descs), not {type(descs).__name__}")
    return descs


def _indices(given: Sequence[int] | npt.NDArray[Any], count: int, side: str) -> Indices:
    if isinstance(given, np.ndarray) and given.ndim != 1:
        raise ValueError("indices numpy array must be 1D")
    indices = np.asarray(given)
    indices = indices.astype(np.int64, copy=False)
    if len(indices) and (indices.min() < 0 or indices.max() >= count):
        why = f"the {side} indices go from {indices.min()} to {indices.max()}, and there are {count} descriptors"
        raise bind.nixlInvalidParamError(why)
    return indices


def _is_tensor(thing: object) -> bool:
    torch = sys.modules.get("torch")  # nothing is a tensor before torch was imported
    return torch is not None and isinstance(thing, torch.Tensor)


def _of_tensors(tensors: list[Any]) -> tuple[bind.nixl_mem_t, bind.Rows, object] | None:
    device = tensors[0].device
    if any(not tensor.is_contiguous() or tensor.device != device for tensor in tensors):
        logger.error("tensors must be contiguous, and on one device")
        return None
    number = max(device.index or 0, 0)
    rows = [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), number) for tensor in tensors]
    mem = bind.DRAM_SEG if device.type == "cpu" else bind.VRAM_SEG
    return mem, np.array(rows, np.uint64), tensors


def _listen(fabric: multirail.Fabric, deadline: float) -> list[multirail.Listener]:
    addresses = ["127.0.0.1:0"]
    for given in os.environ.get("MULTIRAIL_COMPAT_LISTEN", "").replace(",", " ").split():
        has_port = "]:" in given if given.startswith("[") else given.count(":") == 1
        address = given if has_port else f"{given}:0"
        if address.startswith(("0.0.0.0:", "[::]:")):
            raise ValueError(
                f"MULTIRAIL_COMPAT_LISTEN={given}: peers need an address to connect to; name this machine's, as in "
                "10.0.0.5 or 10.0.0.5:7000"
            )
        addresses.append(address)
    try:
        return [fabric.listen(address).wait(deadline) for address in addresses]
    except errors.Error as error:
        bind.fail(error)


def _close(fabric: multirail.Fabric, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has none of the fabric's threads
        with contextlib.suppress(errors.Error):
            fabric.close()
