"""What NIXL's native module has and its users import: constants, exceptions, descriptor lists, telemetry.

An installed multirail (:func:`multirail.compat.install`) serves this module as ``nixl._bindings``.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
import numpy.typing as npt

from multirail import errors

Rows = npt.NDArray[np.uint64]

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = ""
HAVE_UCX_GPU_DEVICE_API = False


class nixl_mem_t(enum.IntEnum):
    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):
    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(enum.IntEnum):
    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_thread_sync_t(enum.IntEnum):
    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 0


DRAM_SEG = nixl_mem_t.DRAM_SEG
VRAM_SEG = nixl_mem_t.VRAM_SEG
BLK_SEG = nixl_mem_t.BLK_SEG
OBJ_SEG = nixl_mem_t.OBJ_SEG
FILE_SEG = nixl_mem_t.FILE_SEG
NIXL_READ = nixl_xfer_op_t.NIXL_READ
NIXL_WRITE = nixl_xfer_op_t.NIXL_WRITE
NIXL_IN_PROG = nixl_status_t.NIXL_IN_PROG
NIXL_SUCCESS = nixl_status_t.NIXL_SUCCESS
NIXL_ERR_NOT_POSTED = nixl_status_t.NIXL_ERR_NOT_POSTED
NIXL_ERR_INVALID_PARAM = nixl_status_t.NIXL_ERR_INVALID_PARAM
NIXL_ERR_BACKEND = nixl_status_t.NIXL_ERR_BACKEND
NIXL_ERR_NOT_FOUND = nixl_status_t.NIXL_ERR_NOT_FOUND
NIXL_ERR_MISMATCH = nixl_status_t.NIXL_ERR_MISMATCH
NIXL_ERR_NOT_ALLOWED = nixl_status_t.NIXL_ERR_NOT_ALLOWED
NIXL_ERR_REPOST_ACTIVE = nixl_status_t.NIXL_ERR_REPOST_ACTIVE
NIXL_ERR_UNKNOWN = nixl_status_t.NIXL_ERR_UNKNOWN
NIXL_ERR_NOT_SUPPORTED = nixl_status_t.NIXL_ERR_NOT_SUPPORTED
NIXL_THREAD_SYNC_NONE = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
NIXL_THREAD_SYNC_RW = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT


# ---- exceptions: each message starts with NIXL's name of the status, and goes on with what multirail knows ----


class _Failure(Exception):
    _status: ClassVar[str]

    def __init__(self, why: str = "") -> None:
        super().__init__(f"{self._status}: {why}" if why else self._status)


class nixlNotPostedError(_Failure):
    _status = "NIXL_ERR_NOT_POSTED"


class nixlInvalidParamError(_Failure):
    _status = "NIXL_ERR_INVALID_PARAM"


class nixlBackendError(_Failure):
    _status = "NIXL_ERR_BACKEND"


class nixlNotFoundError(_Failure):
    _status = "NIXL_ERR_NOT_FOUND"


class nixlMismatchError(_Failure):
    _status = "NIXL_ERR_MISMATCH"


class nixlNotAllowedError(_Failure):
    _status = "NIXL_ERR_NOT_ALLOWED"


class nixlRepostActiveError(_Failure):
    _status = "NIXL_ERR_REPOST_ACTIVE"


class nixlUnknownError(_Failure):
    _status = "NIXL_ERR_UNKNOWN"


class nixlNotSupportedError(_Failure):
    _status = "NIXL_ERR_NOT_SUPPORTED"


class nixlRemoteDisconnectError(_Failure):
    _status = "NIXL_ERR_REMOTE_DISCONNECT"


class nixlCancelledError(_Failure):
    _status = "NIXL_ERR_CANCELED"


class nixlNoTelemetryError(_Failure):
    _status = "NIXL_ERR_NO_TELEMETRY"


_KINDS: tuple[tuple[tuple[type[errors.Error], ...], type[_Failure]], ...] = (
    ((errors.PeerDied, errors.Closed, errors.Unreachable), nixlRemoteDisconnectError),
    ((errors.Cancelled,), nixlCancelledError),
    ((errors.Revoked, errors.NotFound), nixlNotFoundError),
    ((errors.RemoteAccess, errors.LocalAccess, errors.Permission), nixlNotAllowedError),
    ((errors.InvalidRequest, errors.OutOfBounds, errors.TooLarge), nixlInvalidParamError),
    ((errors.Unsupported,), nixlNotSupportedError),
    ((errors.Protocol, errors.Version), nixlMismatchError),
)


def fail(error: errors.Error) -> NoReturn:
    """Raises NIXL's exception for an error of multirail. Kinds that NIXL has no name for are `nixlBackendError`."""
    for kinds, failure in _KINDS:
        if isinstance(error, kinds):
            raise failure(str(error)) from error
    raise nixlBackendError(str(error)) from error


# ---- descriptor lists ----


def _integer(number: object) -> int:
    try:
        value = operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        raise RuntimeError(f"a descriptor needs integers, not {type(number).__name__}") from None
    if not 0 <= value < 1 << 64:
        raise RuntimeError(f"a descriptor needs numbers from 0 to 2^64 - 1, not {value}")
    return value


def _rows_of_array(array: npt.NDArray[Any]) -> Rows:
    if array.ndim != 2 or array.shape[1] != 3 or array.dtype not in (np.uint64, np.int64):
        raise ValueError("descs must be a Nx3 numpy array of uint64 or int64")
    if not array.flags.c_contiguous:
        raise ValueError("descs must be a C-contiguous numpy array")
    return array.astype(np.uint64)  # a copy: the caller may change its array


def _rows_of_tuples(tuples: Sequence[Sequence[Any]]) -> Rows:
    if not tuples:
        return np.empty((0, 3), np.uint64)
    if any(len(row) != 3 for row in tuples):
        raise ValueError("Each descriptor tuple must have exactly 3 elements")
    array = np.array(tuples)
    if array.dtype.kind not in "iu" or (array.dtype.kind == "i" and (array < 0).any()):
        array = np.array([[_integer(number) for number in row] for row in tuples], np.uint64)
    return array.astype(np.uint64, copy=False)


class _List:
    """Descriptors of one kind of memory: rows of address, length in bytes, and device number."""

    __hash__ = None  # type: ignore[assignment]
    __slots__ = ("_mem", "_rows")
    _rows: Rows

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:
        self._mem = nixl_mem_t(type)
        self._rows = np.zeros((0, 3), np.uint64)
        if isinstance(descs, np.ndarray):
            self._rows = _rows_of_array(descs)
        elif isinstance(descs, list):
            self._fill(descs)
        else:
            self._rows = np.zeros((_integer(descs), 3), np.uint64)

    def _fill(self, tuples: list[Any]) -> None:
        raise NotImplementedError

    def rows(self) -> Rows:
        """The descriptors as an array of N x 3, not copied."""
        return self._rows

    def getType(self) -> nixl_mem_t:
        return self._mem

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return not len(self._rows)

    def print(self) -> None:
        print(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._rows)} descriptors, {self._mem.name}>"

    def _position(self, index: int) -> int:
        position = operator.index(index)
        if position < 0:
            raise TypeError(f"a descriptor's index is a number from 0 on, not {position}")
        if position >= len(self._rows):
            raise IndexError(f"there are {len(self._rows)} descriptors, and none has index {position}")
        return position

    def _find(self, row: Iterable[int]) -> int:
        wanted = np.array([_integer(number) for number in row], np.uint64)
        hits = np.flatnonzero((self._rows == wanted).all(axis=1))
        if not len(hits):
            raise nixlNotFoundError("the list has no such descriptor")
        return int(hits[0])


class nixlXferDList(_List):
    """Descriptors for transfers."""

    __slots__ = ()

    def _fill(self, tuples: list[Any]) -> None:
        self._rows = _rows_of_tuples(tuples)

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        address, length, device = self._rows[self._position(index)].tolist()
        return address, length, device

    def __setitem__(self, index: int, desc: tuple[int, int, int]) -> None:
        self._rows[self._position(index)] = _rows_of_tuples([desc])[0]

    def addDesc(self, desc: tuple[int, int, int]) -> None:
        self._rows = np.concatenate([self._rows, _rows_of_tuples([desc])])

    append = addDesc

    def remDesc(self, index: int) -> None:
        self._rows = np.delete(self._rows, self._position(index), axis=0)

    def clear(self) -> None:
        self._rows = self._rows[:0]

    def index(self, desc: tuple[int, int, int]) -> int:
        return self._find(desc)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, nixlXferDList):
            return NotImplemented
        return self._mem == other._mem and np.array_equal(self._rows, other._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        return nixlXferDList, (self._mem, self._rows)


class nixlRegDList(_List):
    """Descriptors for registration: each also has bytes that the caller chooses."""

    __slots__ = ("_metas", "owner")

    def __init__(self, type: nixl_mem_t, descs: Any = 0, *, owner: object = None) -> None:
        self._metas: list[bytes] = []
        super().__init__(type, descs)
        self._metas = self._metas or [b""] * len(self._rows)
        #: Keeps the memory while it is registered, if the list was made of tensors.
        self.owner = owner

    def _fill(self, tuples: list[Any]) -> None:
        if any(len(row) != 4 for row in tuples):
            raise ValueError("Each descriptor tuple must have exactly 4 elements")
        self._rows = _rows_of_tuples([row[:3] for row in tuples])
        self._metas = [_meta(row[3]) for row in tuples]

    def __getitem__(self, index: int) -> tuple[int, int, int, bytes]:
        position = self._position(index)
        address, length, device = self._rows[position].tolist()
        return address, length, device, self._metas[position]

    def __setitem__(self, index: int, desc: tuple[int, int, int, bytes | str]) -> None:
        position = self._position(index)
        self._rows[position] = _rows_of_tuples([desc[:3]])[0]
        self._metas[position] = _meta(desc[3])

    def addDesc(self, desc: tuple[int, int, int, bytes | str]) -> None:
        self._rows = np.concatenate([self._rows, _rows_of_tuples([desc[:3]])])
        self._metas.append(_meta(desc[3]))

    append = addDesc

    def remDesc(self, index: int) -> None:
        position = self._position(index)
        self._rows = np.delete(self._rows, position, axis=0)
        del self._metas[position]

    def clear(self) -> None:
        self._rows, self._metas = self._rows[:0], []

    def index(self, desc: tuple[int, int, int, bytes | str]) -> int:
        return self._find(desc[:3])

    def trim(self) -> nixlXferDList:
        """The descriptors without the caller's bytes."""
        return nixlXferDList(self._mem, self._rows)

    def metas(self) -> list[bytes]:
        return self._metas

    def tuples(self) -> list[tuple[int, int, int, bytes]]:
        return [(*row, meta) for row, meta in zip(self._rows.tolist(), self._metas, strict=True)]

    def __reduce__(self) -> tuple[Any, ...]:
        return nixlRegDList, (self._mem, self.tuples())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, nixlRegDList):
            return NotImplemented
        return self._mem == other._mem and np.array_equal(self._rows, other._rows) and self._metas == other._metas


def _meta(given: bytes | str) -> bytes:
    return given.encode() if isinstance(given, str) else bytes(given)


@dataclass(frozen=True)
class nixlXferTelemetry:
    """How a transfer went."""

    #: Microseconds of the machine's monotonic clock.
    startTime: int
    #: Microseconds until the devices had accepted the last work request.
    postDuration: int
    #: Microseconds until all bytes were delivered.
    xferDuration: int
    totalBytes: int
    #: Descriptors after neighbours were merged.
    descCount: int
