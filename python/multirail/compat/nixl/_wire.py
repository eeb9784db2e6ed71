"""The bytes that agents exchange: metadata, serialized descriptors, notifications. Never pickle."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from . import _bindings as bind

_HEAD = struct.Struct("<4sHHIQ")  # magic, version, kind, CRC-32 of the body, length of the body
_MAGIC = b"MRNX"
_VERSION = 1
_METADATA, _XFER_DESCS, _REG_DESCS = 1, 2, 3


@dataclass(frozen=True)
class Metadata:
    """What an agent tells of itself: its name, where it listens, and memory that it lends."""

    name: str
    #: The number of the opening of its fabric: a restarted agent has another.
    incarnation: int
    #: The machine on which the addresses of the loopback interface are valid.
    machine: str
    #: Empty if the metadata was made without connection information.
    addresses: tuple[str, ...]
    #: Whether this is all of the agent's memory, and replaces what was known of it.
    is_full: bool
    #: N x 4: address, length, device, kind of memory. Row i is region i of the catalogue.
    rows: bind.Rows
    catalogue: bytes

    def to_bytes(self) -> bytes:
        fields = [
            self.name.encode(),
            self.incarnation.to_bytes(8, "little"),
            self.machine.encode(),
            "\n".join(self.addresses).encode(),
            bytes([self.is_full]),
            self.rows.astype("<u8").tobytes(),
            self.catalogue,
        ]
        return _pack(_METADATA, fields)

    @classmethod
    def of_bytes(cls, data: bytes | str) -> Metadata:
        """Raises `nixlMismatchError` for bytes that are no metadata of this version, whole and unchanged."""
        what = "metadata (the bytes of get_agent_metadata())"
        name, incarnation, machine, addresses, is_full, rows, catalogue = _unpack(_METADATA, data, 7, what)
        if not name or len(incarnation) != 8 or len(is_full) != 1 or len(rows) % 32:
            raise bind.nixlMismatchError(f"the bytes are no {what}: a field has a wrong size")
        try:
            listening = tuple(addresses.decode().split("\n")) if addresses else ()
            return cls(
                name.decode(),
                int.from_bytes(incarnation, "little"),
                machine.decode(),
                listening,
                bool(is_full[0]),
                np.frombuffer(rows, "<u8").reshape(-1, 4).astype(np.uint64, copy=False),
                catalogue,
            )
        except UnicodeDecodeError as error:
            raise bind.nixlMismatchError(f"the bytes are no {what}: a name is not UTF-8") from error


def pack_descs(descs: bind.nixlXferDList | bind.nixlRegDList) -> bytes:
    head = [bytes([descs.getType()]), descs.rows().astype("<u8").tobytes()]
    if isinstance(descs, bind.nixlRegDList):
        return _pack(_REG_DESCS, [*head, *descs.metas()])
    if isinstance(descs, bind.nixlXferDList):
        return _pack(_XFER_DESCS, head)
    raise TypeError(f"get_serialized_descs() takes a list of descriptors, not {type(descs).__name__}")


def unpack_descs(data: bytes) -> bind.nixlXferDList | bind.nixlRegDList:
    what = "descriptors (the bytes of get_serialized_descs())"
    kind = _XFER_DESCS if data[6:8] == _XFER_DESCS.to_bytes(2, "little") else _REG_DESCS
    mem, packed, *metas = _unpack(kind, data, None, what)
    rows = np.frombuffer(packed, "<u8").reshape(-1, 3) if len(packed) % 24 == 0 else None
    if rows is None or len(mem) != 1 or mem[0] > max(bind.nixl_mem_t):
        raise bind.nixlMismatchError(f"the bytes are no {what}: a field has a wrong size")
    if kind == _XFER_DESCS:
        return bind.nixlXferDList(bind.nixl_mem_t(mem[0]), rows)
    if len(metas) != len(rows):
        raise bind.nixlMismatchError(f"the bytes are no {what}: {len(rows)} descriptors have {len(metas)} infos")
    descs = [(*row, meta) for row, meta in zip(rows.tolist(), metas, strict=True)]
    return bind.nixlRegDList(bind.nixl_mem_t(mem[0]), descs)


def frame(sender: bytes, message: bytes | str) -> bytes:
    """A notification as it travels: the length of the sender's name (4 bytes), the name, the message."""
    if isinstance(message, str):
        message = message.encode()
    if not isinstance(message, bytes | bytearray | memoryview):
        raise TypeError(f"a notification is bytes, not {type(message).__name__}")
    return b"".join((len(sender).to_bytes(4, "little"), sender, message))


def unframe(data: bytes) -> tuple[str, bytes] | None:
    """The sender's name and the message; `None` if the sender was no agent."""
    end = 4 + int.from_bytes(data[:4], "little")
    if not 4 < end <= len(data):
        return None
    try:
        return data[4:end].decode(), data[end:]
    except UnicodeDecodeError:
        return None


def _pack(kind: int, fields: list[bytes]) -> bytes:
    body = b"".join(part for field in fields for part in (len(field).to_bytes(8, "little"), field))
    return _HEAD.pack(_MAGIC, _VERSION, kind, zlib.crc32(body), len(body)) + body


def _unpack(kind: int, data: bytes | str, count: int | None, what: str) -> list[bytes]:
    """The fields. `count` is how many there must be."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise bind.nixlMismatchError(f"{what} must be bytes, not {type(data).__name__}")
    data = bytes(data)
    if b"nixlSerDes" in data[:64]:
        raise bind.nixlMismatchError(
            f"the bytes are {what} of NIXL itself, whose protocol multirail does not speak: use the same library on "
            "both sides"
        )
    if len(data) < _HEAD.size or data[:4] != _MAGIC:
        raise bind.nixlMismatchError(f"the {len(data)} bytes are no {what} of multirail")
    _, version, found, checksum, length = _HEAD.unpack_from(data)
    if version != _VERSION:
        raise bind.nixlMismatchError(
            f"the {what} have version {version}, not {_VERSION}: install the same multirail on both sides"
        )
    body = data[_HEAD.size :]
    if len(body) != length or zlib.crc32(body) != checksum:
        raise bind.nixlMismatchError(
            f"the {what} are damaged or cut: the body has {len(body)} of {length} bytes; pass all bytes, unchanged"
        )
    fields, at = [], 0
    while at + 8 <= len(body):
        end = at + 8 + int.from_bytes(body[at : at + 8], "little")
        if end > len(body):
            break
        fields.append(body[at + 8 : end])
        at = end
    if found != kind or at != len(body) or len(fields) != (len(fields) if count is None else count) or len(fields) < 2:
        raise bind.nixlMismatchError(f"the bytes are no {what}")
    return fields
