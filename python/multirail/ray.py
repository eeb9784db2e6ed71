"""A tensor transport for Ray: actors read one another's tensors directly, over multirail.

Register it before the actors are created, in the process that creates them:

    import multirail.ray
    multirail.ray.register()

    @ray.remote
    class Actor:
        @ray.method(tensor_transport="MULTIRAIL")
        def weights(self): return torch.ones(1 << 20)

The source registers the memory of the tensors until Ray frees the object. The receiver connects when it first needs the
source, and reads. Environment variables of the actors:

- ``MULTIRAIL_BACKEND``: the backend, by default all that are available
- ``MULTIRAIL_COMPAT_DEADLINE``: seconds until a fetch fails, by default 30
- ``MULTIRAIL_TOKEN_FILE``: the path of a token, without which no process connects

A fetch fails with :class:`TransferFailed`, and the processes live on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import ray
import ray.util
from ray.exceptions import RayDirectTransportError, RayTaskError
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    FetchRequest,
    TensorTransportManager,
    TensorTransportMetadata,
)

from multirail import Catalogue, Fabric, LocalList, Operation, Outcome, Peer, Region, RemoteList, errors
from multirail._serving import accept_all, deadline, left

__all__ = ["MultirailTransport", "TransferFailed", "register"]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_NAME = "MULTIRAIL"
# Seconds between two looks whether a fetch was aborted.
_ABORT_CHECK = 0.02


def register(name: str = _NAME, *, devices: list[str] | None = None, data_type: type[Any] | None = None) -> None:
    """Registers the transport with Ray, as ``tensor_transport=name``.

    ``data_type`` is ``torch.Tensor`` or ``numpy.ndarray``; without one, torch's where torch is installed. ``devices``
    are device types of torch, by default "cpu", and "cuda" for torch. Raises ``ValueError`` if the name is taken.
    """
    if data_type is None:
        data_type = np.ndarray
        if importlib.util.find_spec("torch") is not None:
            import torch

            data_type = torch.Tensor
    if devices is None:
        devices = ["cpu"] if data_type is np.ndarray else ["cuda", "cpu"]
    name = name.upper()
    transport = MultirailTransport if name == _NAME else type(name, (MultirailTransport,), {"name": name})
    register_tensor_transport(name, devices, transport, data_type)


class TransferFailed(RayDirectTransportError):
    """A fetch has failed. ``kind`` is that of the ``multirail.Error``, such as "peer_died" or "deadline_exceeded"."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind

    def __reduce__(self) -> tuple[type[TransferFailed], tuple[str, str]]:
        return type(self), (self.message, self.kind)


@dataclass
class _Metadata(TensorTransportMetadata):
    """Where the tensors of an object are: the source's address, and its regions in the order of the tensors.

    Tensors without bytes have no region.
    """

    address: str = ""
    catalogue: bytes = b""


@dataclass(eq=False)
class _Fetch(FetchRequest):
    """A fetch under way."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    operation: Operation[Outcome] | None = None
    end: float = 0.0
    aborted: threading.Event = field(default_factory=threading.Event)

    def __del__(self) -> None:
        if self.operation is not None and not self.operation.done():
            self.operation.cancel()


class MultirailTransport(TensorTransportManager):
    """Ray's interface of transports. Ray makes one object of it in each process; several threads use it."""

    name = _NAME

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: _Process | None = None
        self._able: set[str] = set()
        self._fetches: weakref.WeakSet[_Fetch] = weakref.WeakSet()

    def tensor_transport_backend(self) -> str:
        return self.name

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        # Ray asks before each call of the actor; the answer stays.
        number = actor._actor_id.hex()
        if number not in self._able:
            try:
                call = actor.__ray_call__.options(concurrency_group="_ray_system").remote(_opens, self.name)
                ray.get(call)
            except RayTaskError as error:
                _log.error("the actor %s cannot use multirail: %s", number, error)
                return False
            self._able.add(number)
        return True

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> _Metadata:
        process = self.process()
        described = [(tensor.shape, tensor.dtype) for tensor in rdt_object]
        device = _device_type(rdt_object[0]) if rdt_object else None
        regions = process.hold(obj_id, rdt_object)
        catalogue = Catalogue(regions).to_bytes()
        return _Metadata(described, device, process.address, catalogue)

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def fetch_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> _Fetch:
        process, metadata = self.process(), tensor_transport_metadata
        tensors = target_buffers or [
            _empty(shape, dtype, metadata.tensor_device) for shape, dtype in metadata.tensor_meta
        ]
        fetch = _Fetch(obj_id, tensors, end=time.monotonic() + process.limit)
        with self._lock:
            self._fetches.add(fetch)
        try:
            fetch.operation = process.read(metadata, tensors, fetch)
        except errors.Error as error:
            raise _failed(obj_id, metadata.address, error) from error
        return fetch

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        fetch: _Fetch = fetch_request
        end = None if timeout < 0 else time.monotonic() + timeout
        if fetch.operation is None:
            return list(fetch.tensors)
        try:
            _wait(fetch.operation, fetch, end)
        except errors.Error as error:
            if not fetch.operation.done():
                # The caller's timeout, not the deadline of the fetch.
                raise TimeoutError(f"the fetch of {fetch.obj_id} is not over after {timeout} s; it goes on") from None
            raise _failed(fetch.obj_id, "its source", error) from error
        return list(fetch.tensors)

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Any,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[Any]:
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch)

    def send_multiple_tensors(
        self, tensors: list[Any], tensor_transport_metadata: Any, communicator_metadata: CommunicatorMetadata
    ) -> None:
        raise NotImplementedError("the receiver reads: the transport is one-sided")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        self.process().release(obj_id)

    def abort_transport(self, obj_id: str, communicator_metadata: CommunicatorMetadata) -> None:
        with self._lock:
            for fetch in self._fetches:
                if fetch.obj_id == obj_id:
                    fetch.aborted.set()

    def process(self) -> _Process:
        """What this process has opened; opens it first if need be."""
        with self._lock:
            if self._opened is None:
                self._opened = _Process()
            return self._opened


class _Process:
    """The fabric of this process, the memory that others may read, and the peers."""

    def __init__(self) -> None:
        self.limit = deadline()
        self.fabric = Fabric(None, deadline=self.limit, token=os.environ.get("MULTIRAIL_TOKEN_FILE") or None)
        host = ray.util.get_node_ip_address()
        listener = self.fabric.listen(f"[{host}]:0" if ":" in host else f"{host}:0").wait(self.limit)
        self.address = listener.address
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        # The regions of each object, and in how many objects each region is.
        self._objects: dict[str, list[Region]] = {}
        self._regions: dict[tuple[int, int], Region] = {}
        self._uses: dict[tuple[int, int], int] = {}
        accept_all(listener, _log, "multirail-ray")

    def hold(self, number: str, tensors: list[Any]) -> list[Region]:
        """Registers the tensors of an object, and keeps them until ``release``."""
        _synchronize(tensors)
        with self._lock:
            # A task that Ray runs once more has the same object.
            if number in self._objects:
                return self._objects[number]
            held: list[Region] = []
            for tensor in tensors:
                tensor = _readable(tensor)
                if (key := _range(tensor))[1] == 0:
                    continue
                # Objects often share tensors, such as weights.
                if key not in self._regions:
                    self._regions[key] = self._register(tensor, "read")
                self._uses[key] = self._uses.get(key, 0) + 1
                held.append(self._regions[key])
            self._objects[number] = held
            return held

    def release(self, number: str) -> None:
        unused = []
        with self._lock:
            for region in self._objects.pop(number, []):
                key = (region.address, len(region))
                self._uses[key] -= 1
                if self._uses[key] == 0:
                    del self._uses[key]
                    unused.append(self._regions.pop(key))
        # Afterwards nobody reads the memory, which its owner may use again.
        for revocation in [region.revoke() for region in unused]:
            revocation.wait()

    def read(self, metadata: _Metadata, tensors: list[Any], fetch: _Fetch) -> Operation[Outcome] | None:
        """Starts to read the tensors. Returns ``None`` if they have no bytes."""
        into = [tensor for tensor in tensors if _range(tensor)[1] > 0]
        if not into:
            return None
        _synchronize(into)
        peer = self._peer(metadata.address, fetch)
        theirs = peer.import_catalogue(metadata.catalogue)
        local, remote = LocalList(), RemoteList()
        for number, tensor in enumerate(into):
            length = _range(tensor)[1]
            local.append(self._register(tensor, "local"), 0, length)
            remote.append(theirs.region(number), 0, length)
        return peer.read_list(local, remote, deadline=left(fetch.end))

    def _peer(self, address: str, fetch: _Fetch) -> Peer:
        with self._lock:
            peer = self._peers.get(address)
        if peer is None or not peer.is_alive:
            peer = _wait(self.fabric.connect(address), fetch)
            with self._lock:
                self._peers = {known: other for known, other in self._peers.items() if other.is_alive}
                self._peers[address] = peer
        return peer

    def _register(self, tensor: Any, access: Literal["local", "read"]) -> Region:
        device = "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)
        return self.fabric.register((*_range(tensor), device), access, owner=tensor)


def _opens(actor: Any, name: str) -> None:
    """Runs in an actor: opens its fabric, or raises why not."""
    from ray.experimental.rdt.util import get_tensor_transport_manager

    transport: Any = get_tensor_transport_manager(name)
    transport.process()


def _wait(operation: Operation[_T], fetch: _Fetch, end: float | None = None) -> _T:
    """Waits for an operation of a fetch, and cancels it if Ray aborts the fetch. ``end`` is the time to return at."""
    while True:
        last = fetch.end if end is None else end
        limit = min(_ABORT_CHECK, max(last - time.monotonic(), 0.0))
        try:
            return operation.wait(limit)
        except errors.DeadlineExceeded:
            if operation.done():
                raise
            if fetch.aborted.is_set():
                operation.cancel()
                return operation.wait()
            if time.monotonic() < last:
                continue
            if end is not None:
                raise
            operation.cancel()
            with contextlib.suppress(errors.Cancelled):
                return operation.wait()
            raise errors.DeadlineExceeded("the source has not answered before the deadline of the fetch") from None


def _failed(number: str, source: str, error: errors.Error) -> TransferFailed:
    return TransferFailed(f"the fetch of object {number} from {source} has failed: {error} ({error.hint})", error.kind)


def _range(tensor: Any) -> tuple[int, int]:
    """The first address of a tensor, and its bytes."""
    if isinstance(tensor, np.ndarray):
        return tensor.ctypes.data, tensor.nbytes
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _readable(tensor: Any) -> Any:
    """The tensor, or for read-only memory a copy: cards register no memory that they may not write."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise TypeError(f"an array of {tensor.dtype} has Python objects, which stay in their process")
        if not tensor.flags.c_contiguous:
            raise ValueError("the array is not contiguous: return numpy.ascontiguousarray(array)")
        return tensor if tensor.flags.writeable else tensor.copy()
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: return tensor.contiguous()")
    return tensor


def _device_type(tensor: Any) -> str:
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device.type)


def _empty(shape: Any, dtype: Any, device: str | None) -> Any:
    if isinstance(dtype, np.dtype):
        return np.empty(shape, dtype)
    import torch

    return torch.empty(shape, dtype=dtype, device=device)


def _synchronize(tensors: list[Any]) -> None:
    """Waits for the kernels that may still write the tensors, or use the memory that they had before."""
    for device in {tensor.device for tensor in tensors if not isinstance(tensor, np.ndarray)}:
        if device.type == "cuda":
            import torch

            torch.cuda.synchronize(device)
