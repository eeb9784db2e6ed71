"""The native part of multirail. The docstrings of its classes have the details: `help(multirail.Peer)`."""

from collections.abc import Callable, Generator, Iterable
from contextvars import Context
from os import PathLike
from types import GenericAlias, TracebackType
from typing import Any, Generic, Literal, Protocol, SupportsIndex, TypeAlias, TypedDict, TypeVar, final, type_check_only

from typing_extensions import Buffer, NotRequired, Self

from .errors import Error

__all__ = [
    "Arrivals",
    "Catalogue",
    "Explanation",
    "Fabric",
    "ImmCounter",
    "Listener",
    "LocalList",
    "Message",
    "MetricsServer",
    "Notification",
    "Notifications",
    "Operation",
    "Outcome",
    "Peer",
    "PeerGroup",
    "PreparedTransfer",
    "RailReceipt",
    "Receipt",
    "RecvPool",
    "Region",
    "RemoteCatalogue",
    "RemoteList",
    "RemoteRegion",
    "SpanExporter",
    "__version__",
    "_after_fork_in_child",
    "_run_command",
    "_topology",
    "backends",
]

_T_co = TypeVar("_T_co", covariant=True)

# ---- what the calls take ----

@type_check_only
class _ArrayInterface(Protocol):
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@type_check_only
class _CudaArrayInterface(Protocol):
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

@type_check_only
class _DLPack(Protocol):
    @property
    def __dlpack__(self) -> Callable[..., Any]: ...
    @property
    def __dlpack_device__(self) -> Callable[[], tuple[Any, Any]]: ...

_Int: TypeAlias = SupportsIndex
# Bytes on the host.
_Bytes: TypeAlias = Buffer | _ArrayInterface | _DLPack
# Memory on the host or on a GPU: an array, (address, length in bytes), or (address, length in bytes, device).
_Memory: TypeAlias = _Bytes | _CudaArrayInterface | tuple[_Int, _Int] | tuple[_Int, _Int, str]
# Integers on the host, in one dimension.
_Integers: TypeAlias = Buffer | _ArrayInterface | _DLPack | Iterable[_Int]
_Access: TypeAlias = Literal["local", "read", "write", "all"]
# One name of a path, several with commas between them, or a list of names.
_Paths: TypeAlias = str | list[str] | tuple[str, ...]
_Coalesce: TypeAlias = Literal["never", "auto", "always"]
_Path: TypeAlias = str | PathLike[str]

# ---- what the calls return ----

@type_check_only
class _Transport(TypedDict):
    label: str
    backend: str
    devices: list[str]

@type_check_only
class _RailCounters(TypedDict):
    transport: str
    backend: str
    rail: int
    device: str
    posts: int
    doorbells: int
    bytes: int
    completions: int
    errors: int
    queue_full: int
    retries: int
    grant_waits: int
    direct: int
    direct_bytes: int
    taken_over: int
    replayed: int
    replayed_bytes: int
    paths_broken: int
    paths_mended: int

@type_check_only
class _Backend(TypedDict):
    backend: str
    available: bool
    devices: NotRequired[list[str]]
    reason: NotRequired[str]
    remedy: NotRequired[str]

@final
class Operation(Generic[_T_co]):
    """An operation under way. ``await`` it, or call ``wait``; both return the result, or raise an ``Error``."""

    def __class_getitem__(cls, key: Any) -> GenericAlias: ...
    def __await__(self) -> Generator[Any, None, _T_co]: ...
    def __next__(self) -> Self: ...
    def wait(self, timeout: float | None = None) -> _T_co:
        """Blocks for at most ``timeout`` seconds; then raises ``DeadlineExceeded``, and the operation goes on."""

    def done(self) -> bool: ...
    def result(self) -> _T_co:
        """Raises ``asyncio.InvalidStateError`` if the operation is not over."""

    def exception(self) -> Error | None:
        """Raises ``asyncio.InvalidStateError`` if the operation is not over."""

    def cancel(self, msg: object = None) -> bool:
        """Requests a cancel. The operation is over once no byte of it can move any more."""

    def cancelled(self) -> bool: ...
    def detach(self) -> None: ...
    def receipt(self) -> Receipt | None: ...
    def add_done_callback(self, callback: Callable[[Self], object], *, context: Context | None = None) -> None: ...
    def remove_done_callback(self, callback: Callable[[Self], object]) -> int: ...
    def get_loop(self) -> Any: ...
    @property
    def _asyncio_future_blocking(self) -> bool: ...
    @_asyncio_future_blocking.setter
    def _asyncio_future_blocking(self, value: bool) -> None: ...

@final
class Fabric:
    """Opened transports. All spans of time are seconds, all sizes bytes. Raises an ``Error`` if it cannot open."""

    def __new__(
        cls,
        backend: str | None = None,
        *,
        token: bytes | _Path | None = None,
        tls: tuple[_Path, _Path, _Path] | None = None,
        notifications: bool | int | None = None,
        deadline: float | None = None,
        heartbeat: float | None = None,
        peer_timeout: float | None = None,
        paths: _Paths | None = None,
        max_operations: _Int | None = None,
    ) -> Self: ...
    @property
    def incarnation(self) -> int: ...
    def alloc(self, length: _Int, access: _Access = "all", *, device: str = "cpu") -> Region:
        """``length`` is in bytes, ``device`` "cpu" or "cuda:N"."""

    def register(self, object: _Memory, access: _Access = "all", *, owner: object = None) -> Region:
        """Raises ``TypeError`` if the object has no memory, ``ValueError`` if that is not contiguous or read-only."""

    def publish(self, name: str, region: Region) -> None: ...
    def publish_catalogue(self, name: str, catalogue: Catalogue) -> None: ...
    def unpublish(self, name: str) -> None: ...
    def listen(self, address: str = "127.0.0.1:0") -> Operation[Listener]: ...
    def connect(self, address: str) -> Operation[Peer]: ...
    def connect_local(self, other: Fabric) -> tuple[Peer, Peer]: ...
    def tenant(self, name: str, token: bytes | _Path) -> Fabric: ...
    def recv(self, region: Region, length: _Int | None = None, offset: _Int = 0) -> Operation[Outcome]: ...
    def recv_pool(self, count: _Int, size: _Int) -> RecvPool:
        """``count`` receives of ``size`` bytes each, on every transport."""

    def peer(self, number: int) -> Peer: ...
    def notifications(self) -> Notifications: ...
    def transports(self) -> list[_Transport]: ...
    def counters(self) -> list[_RailCounters]: ...
    def drain_device(self, device: str) -> Operation[None]:
        """``device`` is a name of ``transports()``. Raises ``InvalidRequest`` if there is none of this name."""

    def restore_device(self, device: str) -> None:
        """Raises ``InvalidRequest`` if there is no device of this name."""

    def serve_metrics(self, address: str, *, peers: _Int = 0) -> MetricsServer:
        """``address`` is HOST:PORT. Raises ``Busy`` if somebody listens there."""

    def close(self) -> None: ...
    def aclose(self) -> Operation[None]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None = ...,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
        /,
    ) -> None: ...
    def __aenter__(self) -> Operation[Self]: ...
    def __aexit__(
        self,
        exception_type: type[BaseException] | None = ...,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
        /,
    ) -> Operation[None]: ...

@final
class Listener:
    @property
    def address(self) -> str:
        """HOST:PORT, for ``Fabric.connect``."""

    def accept(self) -> Operation[Peer]: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Operation[Peer]: ...

@final
class MetricsServer:
    @property
    def address(self) -> str:
        """HOST:PORT."""

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None = ...,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
        /,
    ) -> None: ...

@final
class SpanExporter:
    def __new__(cls, endpoint: str, service: str) -> Self:
        """Sends the spans of transfers to a collector of OpenTelemetry, by OTLP over HTTP."""

    def flush(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exception_type: type[BaseException] | None = ...,
        exception: BaseException | None = ...,
        traceback: TracebackType | None = ...,
        /,
    ) -> None: ...

@final
class Region:
    """Registered memory of this process. Offsets and lengths are in bytes."""

    def __len__(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def access(self) -> _Access: ...
    @property
    def device(self) -> str: ...
    def descriptor(self) -> bytes: ...
    def revoke(self) -> Operation[Outcome]: ...
    def write_bytes(self, data: _Bytes, offset: _Int = 0) -> None: ...
    def read_bytes(self, offset: _Int = 0, length: _Int | None = None) -> bytes: ...
    def as_numpy(self) -> Any:
        """A ``numpy.ndarray`` of uint8, shape ``(len(self),)``. Raises ``TypeError`` for memory of a GPU."""

    def as_torch(self) -> Any:
        """A ``torch.Tensor`` of uint8, shape ``(len(self),)``, on the region's device."""

    def as_buffer(self) -> Buffer:
        """For ``memoryview``. Raises ``TypeError`` for memory of a GPU."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...

@final
class RemoteRegion:
    def __len__(self) -> int: ...
    @property
    def access(self) -> _Access: ...
    @property
    def path(self) -> str: ...

@final
class Catalogue:
    def __new__(cls, regions: list[Region] | tuple[Region, ...]) -> Self: ...
    def __len__(self) -> int: ...
    def to_bytes(self) -> bytes: ...

@final
class RemoteCatalogue:
    def __len__(self) -> int: ...
    def find(self, address: _Int, length: _Int) -> tuple[RemoteRegion, int]:
        """The region, and the offset of ``address`` in it, in bytes. Raises ``NotFound``."""

    def region(self, number: _Int) -> RemoteRegion: ...

@final
class LocalList:
    """Pieces of regions of this process. Offsets, lengths and strides are in bytes."""

    def __new__(cls) -> Self: ...
    @staticmethod
    def of_addresses(catalogue: Catalogue, addresses: _Integers, lengths: _Integers | _Int) -> LocalList: ...
    def append(self, region: Region, offset: _Int, length: _Int) -> None: ...
    def append_strided(self, region: Region, offset: _Int, length: _Int, count: _Int, stride: _Int) -> None: ...
    def extend(self, region: Region, offsets: _Integers, lengths: _Integers | _Int) -> None: ...
    def __len__(self) -> int: ...

@final
class RemoteList:
    """Pieces of regions of one peer. Offsets, lengths and strides are in bytes."""

    def __new__(cls) -> Self: ...
    @staticmethod
    def of_addresses(catalogue: RemoteCatalogue, addresses: _Integers, lengths: _Integers | _Int) -> RemoteList: ...
    def append(self, region: RemoteRegion, offset: _Int, length: _Int) -> None: ...
    def append_strided(self, region: RemoteRegion, offset: _Int, length: _Int, count: _Int, stride: _Int) -> None: ...
    def extend(self, region: RemoteRegion, offsets: _Integers, lengths: _Integers | _Int) -> None: ...
    def __len__(self) -> int: ...

@final
class Peer:
    """A connected peer. Offsets, lengths, pages and strides are in bytes, deadlines in seconds."""

    @property
    def id(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def tenant(self) -> str: ...
    @property
    def is_alive(self) -> bool: ...
    @property
    def max_message(self) -> int: ...
    def set_paths(self, paths: _Paths) -> None: ...
    def import_region(self, descriptor: _Bytes) -> RemoteRegion: ...
    def region(self, name: str) -> Operation[RemoteRegion]: ...
    def import_catalogue(self, catalogue: _Bytes) -> RemoteCatalogue: ...
    def catalogue(self, name: str) -> Operation[RemoteCatalogue]: ...
    def write(
        self,
        src: Region,
        dst: RemoteRegion,
        length: _Int | None = None,
        src_offset: _Int = 0,
        dst_offset: _Int = 0,
        *,
        imm: _Int | None = None,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def read(
        self,
        dst: Region,
        src: RemoteRegion,
        length: _Int | None = None,
        dst_offset: _Int = 0,
        src_offset: _Int = 0,
        *,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def write_pages(
        self,
        src: Region,
        src_pages: _Integers,
        dst: RemoteRegion,
        dst_pages: _Integers,
        page: _Int,
        *,
        src_stride: _Int | None = None,
        src_offset: _Int = 0,
        dst_stride: _Int | None = None,
        dst_offset: _Int = 0,
        imm: _Int | None = None,
        imm_per_request: bool = False,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]:
        """``src_pages`` and ``dst_pages``: integers from 0 to 2^32 - 1, one dimension, equal lengths."""

    def read_pages(
        self,
        dst: Region,
        dst_pages: _Integers,
        src: RemoteRegion,
        src_pages: _Integers,
        page: _Int,
        *,
        dst_stride: _Int | None = None,
        dst_offset: _Int = 0,
        src_stride: _Int | None = None,
        src_offset: _Int = 0,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def prepare_write_pages(
        self,
        src: Region,
        src_pages: _Integers,
        dst: RemoteRegion,
        dst_pages: _Integers,
        page: _Int,
        *,
        src_stride: _Int | None = None,
        src_offset: _Int = 0,
        dst_stride: _Int | None = None,
        dst_offset: _Int = 0,
        imm: _Int | None = None,
        imm_per_request: bool = False,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> PreparedTransfer: ...
    def prepare_read_pages(
        self,
        dst: Region,
        dst_pages: _Integers,
        src: RemoteRegion,
        src_pages: _Integers,
        page: _Int,
        *,
        dst_stride: _Int | None = None,
        dst_offset: _Int = 0,
        src_stride: _Int | None = None,
        src_offset: _Int = 0,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> PreparedTransfer: ...
    def write_list(
        self,
        local: LocalList,
        remote: RemoteList,
        *,
        local_selection: _Integers | None = None,
        remote_selection: _Integers | None = None,
        imm: _Int | None = None,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def read_list(
        self,
        local: LocalList,
        remote: RemoteList,
        *,
        local_selection: _Integers | None = None,
        remote_selection: _Integers | None = None,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def prepare_write_list(
        self,
        local: LocalList,
        remote: RemoteList,
        *,
        local_selection: _Integers | None = None,
        remote_selection: _Integers | None = None,
        imm: _Int | None = None,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> PreparedTransfer: ...
    def prepare_read_list(
        self,
        local: LocalList,
        remote: RemoteList,
        *,
        local_selection: _Integers | None = None,
        remote_selection: _Integers | None = None,
        notify: _Bytes | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
        cold: bool = False,
        coalesce: _Coalesce | None = None,
        trace: str | None = None,
    ) -> PreparedTransfer: ...
    def write_imm(self, imm: _Int) -> Operation[Outcome]: ...
    def send(
        self,
        src: Region,
        length: _Int | None = None,
        offset: _Int = 0,
        *,
        imm: _Int | None = None,
        deadline: float | None = None,
        paths: _Paths | None = None,
    ) -> Operation[Outcome]: ...
    def notify(
        self,
        data: _Bytes,
        *,
        deadline: float | None = None,
        paths: _Paths | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def imm(self, imm: _Int) -> ImmCounter: ...
    def warm_up(self) -> Operation[Outcome]: ...
    def drain(self) -> Operation[None]: ...
    def closed(self) -> Operation[Error]: ...
    def disconnect(self) -> None: ...
    def explain(self) -> str: ...
    def explain_write(
        self,
        src: Region,
        dst: RemoteRegion,
        length: _Int | None = None,
        src_offset: _Int = 0,
        dst_offset: _Int = 0,
        *,
        imm: _Int | None = None,
        paths: _Paths | None = None,
    ) -> Explanation: ...
    def explain_read(
        self,
        dst: Region,
        src: RemoteRegion,
        length: _Int | None = None,
        dst_offset: _Int = 0,
        src_offset: _Int = 0,
        *,
        paths: _Paths | None = None,
    ) -> Explanation: ...
    def explain_write_pages(
        self,
        src: Region,
        src_pages: _Integers,
        dst: RemoteRegion,
        dst_pages: _Integers,
        page: _Int,
        *,
        imm: _Int | None = None,
        paths: _Paths | None = None,
    ) -> Explanation: ...

@final
class PreparedTransfer:
    @property
    def bytes(self) -> int: ...
    def post(self, *, imm: _Int | None = None, notify: _Bytes | None = None) -> Operation[Outcome]:
        """Raises ``ValueError`` if both ``imm`` and ``notify`` are given."""

    def explain(self) -> list[Explanation]: ...

@final
class PeerGroup:
    def __new__(cls, peers: list[Peer] | tuple[Peer, ...]) -> Self: ...
    def __len__(self) -> int: ...
    def barrier(self, name: str, timeout: float = 60.0) -> Operation[None]:
        """``timeout`` is in seconds."""

    def scatter(
        self,
        src: Region,
        dst: list[RemoteRegion] | tuple[RemoteRegion, ...],
        length: _Int | None = None,
        src_offset: _Int = 0,
        dst_offset: _Int = 0,
        *,
        imm: _Int | None = None,
        deadline: float | None = None,
        trace: str | None = None,
    ) -> Operation[Outcome]: ...
    def write_imm(self, imm: _Int) -> Operation[Outcome]: ...

@final
class ImmCounter:
    @property
    def count(self) -> int: ...
    def expect(self, count: _Int = 1) -> Operation[None]: ...
    def try_take(self, count: _Int = 1) -> bool: ...
    def arrivals(self) -> Arrivals: ...

@final
class Arrivals:
    def next(self) -> Operation[int]: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Operation[int]: ...

@final
class RecvPool:
    def next(self) -> Operation[Message]: ...
    def try_next(self) -> Message | None: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Operation[Message]: ...

@final
class Message:
    @property
    def peer(self) -> int: ...
    @property
    def imm(self) -> int | None: ...
    def __len__(self) -> int: ...
    def __bytes__(self) -> bytes: ...

@final
class Notifications:
    def next(self) -> Operation[Notification]: ...
    def try_next(self) -> Notification | None: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Operation[Notification]: ...

@final
class Notification:
    @property
    def peer(self) -> int: ...
    @property
    def data(self) -> bytes: ...
    @property
    def trace(self) -> str | None: ...

@final
class Outcome:
    @property
    def bytes(self) -> int: ...
    @property
    def work_requests(self) -> int: ...
    @property
    def merged(self) -> int: ...
    @property
    def peer(self) -> int | None: ...
    @property
    def imm(self) -> int | None: ...

@final
class Receipt:
    @property
    def bytes(self) -> int: ...
    @property
    def work_requests(self) -> int: ...
    @property
    def merged(self) -> int: ...
    @property
    def post(self) -> float:
        """Seconds."""

    @property
    def transfer(self) -> float:
        """Seconds."""

    @property
    def rails(self) -> list[RailReceipt]: ...

@final
class RailReceipt:
    @property
    def transport(self) -> str | None: ...
    @property
    def rail(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def path(self) -> str: ...

@final
class Explanation:
    def to_json(self) -> str: ...

__version__: str

def backends() -> list[_Backend]: ...
def _topology() -> str: ...
def _run_command(arguments: list[str], program: list[str]) -> int: ...
def _after_fork_in_child() -> None: ...
