"""Finds the regions of descriptors, with arrays alone: no Python object per descriptor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import multirail

from . import _bindings as bind

Indices = npt.NDArray[np.int64]
Selection = npt.NDArray[np.uint32]


class Ranges:
    """Ranges of memory, to be found by address. `rows` is N x 4: address, length, device, kind of memory.

    If ranges overlap, a piece is found if any one of them holds it. Of equal ranges, the last is found.
    """

    def __init__(self, rows: bind.Rows) -> None:
        self.rows = rows
        self._groups: dict[tuple[int, int], tuple[bind.Rows, bind.Rows, Indices]] = {}
        for device, mem in np.unique(rows[:, 2:], axis=0).tolist():
            members = np.flatnonzero((rows[:, 2] == device) & (rows[:, 3] == mem))
            starts, lengths = rows[members, 0], rows[members, 1]
            order = np.lexsort((-members, ~lengths, starts))
            starts, ends, members = starts[order], (starts + lengths)[order], members[order]
            # A range that lies inside another is never needed; without such ranges, both starts and ends ascend, so
            # the last range that starts before a piece is the one that reaches furthest.
            outer = np.ones(len(starts), bool)
            outer[1:] = ends[1:] > np.maximum.accumulate(ends)[:-1]
            self._groups[device, mem] = (starts[outer], ends[outer], members[outer])

    def find(self, mem: int, addresses: bind.Rows, lengths: bind.Rows, devices: bind.Rows) -> Indices:
        """The row that holds each piece, or -1."""
        found = np.full(len(addresses), -1, np.int64)
        for device in _distinct(devices):
            group = self._groups.get((device, mem))
            if group is None:
                continue
            starts, ends, members = group
            at = np.searchsorted(starts, addresses, side="right") - 1
            last = np.maximum(at, 0)
            end = ends[last]
            holds = (at >= 0) & (devices == device) & (addresses <= end) & (lengths <= end - addresses)
            found[holds] = members[last[holds]]
        return found


def _distinct(devices: bind.Rows) -> list[int]:
    if not len(devices):
        return []
    first: int = devices[0].item()
    return [first] if (devices == first).all() else np.unique(devices).tolist()


class Pieces:
    """Checked descriptors: where each lies."""

    __slots__ = ("_base", "_in_region", "_order", "_place", "addresses", "lengths", "regions")

    def __init__(self, ranges: Ranges, mem: int, rows: bind.Rows, whose: str) -> None:
        """`rows` is N x 3: address, length, device; or N x 5: address, length, device, stride, count.

        Raises `nixlNotFoundError` if a piece does not lie in a registered range.
        """
        if rows.shape[1] == 5:
            checked = _spans(rows)
            _found(ranges, mem, checked, whose)
            rows = _expand(rows)
        self.regions = _found(ranges, mem, rows, whose)
        self.addresses, self.lengths = rows[:, 0], rows[:, 1]
        # A native list takes the pieces of one region at once. So the list is in the order of regions, if that differs.
        is_sorted = bool((self.regions[1:] >= self.regions[:-1]).all())
        self._order = None if is_sorted else np.argsort(self.regions, kind="stable")
        self._in_region = self.regions if self._order is None else self.regions[self._order]
        self._place = np.arange(len(rows), dtype=np.uint32)
        if self._order is not None:
            self._place[self._order] = np.arange(len(rows), dtype=np.uint32)
        self._base = ranges.rows[:, 0]

    def __len__(self) -> int:
        return len(self.addresses)

    def fill(self, pieces: Any, region_of: Callable[[int], Any]) -> None:
        """Appends all pieces to a native list, in its own order."""
        order, in_region = self._order, self._in_region
        addresses = self.addresses if order is None else self.addresses[order]
        lengths = self.lengths if order is None else self.lengths[order]
        cuts = np.flatnonzero(in_region[1:] != in_region[:-1]) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(in_region)], strict=True):
            number = int(in_region[start])
            offsets = addresses[start:stop] - self._base[number]
            pieces.extend(region_of(number), offsets, np.ascontiguousarray(lengths[start:stop]))

    def positions(self, indices: Indices | None) -> Selection:
        """Where the native list has the pieces with these indices; `None` takes all."""
        return self._place if indices is None else self._place[indices]

    def chosen_lengths(self, indices: Indices | None) -> bind.Rows:
        return self.lengths if indices is None else self.lengths[indices]


def _found(ranges: Ranges, mem: int, rows: bind.Rows, whose: str) -> Indices:
    if not len(rows):
        raise bind.nixlNotFoundError("the list of descriptors is empty")
    regions = ranges.find(mem, rows[:, 0], rows[:, 1], rows[:, 2])
    missing = np.flatnonzero(regions < 0)
    if len(missing):
        address, length, device = rows[missing[0], :3].tolist()
        raise bind.nixlNotFoundError(
            f"{len(missing)} of {len(rows)} descriptors lie in no memory that {whose}; the first is number "
            f"{missing[0]}: {length} bytes at {address:#x}, device {device}, {bind.nixl_mem_t(mem).name}"
        )
    return regions


def _spans(rows: bind.Rows) -> bind.Rows:
    """The range that each strided row covers, N x 3."""
    address, length, device, stride, count = rows.T
    # In numbers of any size: a product of two fields may exceed 64 bits, and rows are few.
    for row in rows.tolist():
        if not (row[1] and row[4] and row[3] >= row[1] and row[0] + row[3] * (row[4] - 1) + row[1] < 1 << 64):
            raise bind.nixlNotFoundError(
                f"a strided descriptor is no memory: {row[4]} blocks of {row[1]} bytes, {row[3]} bytes apart, from "
                f"{row[0]:#x} on; the stride must be at least the length, and both and the count at least 1"
            )
    return np.stack([address, stride * (count - np.uint64(1)) + length, device], axis=1)


def _expand(rows: bind.Rows) -> bind.Rows:
    address, length, device, stride, count = rows.T
    counts = count.astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    step = (np.arange(len(first)) - first).astype(np.uint64)
    start = np.repeat(address, counts) + step * np.repeat(stride, counts)
    return np.stack([start, np.repeat(length, counts), np.repeat(device, counts)], axis=1)


def local_list(pieces: Pieces, region_of: Callable[[int], multirail.Region]) -> multirail.LocalList:
    native = multirail.LocalList()
    pieces.fill(native, region_of)
    return native


def remote_list(pieces: Pieces, region_of: Callable[[int], multirail.RemoteRegion]) -> multirail.RemoteList:
    native = multirail.RemoteList()
    pieces.fill(native, region_of)
    return native
