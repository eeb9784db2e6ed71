"""Pages, lists and selections, and every kind of array that names them."""

from __future__ import annotations

import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT, Pair, pattern

import multirail

PAGE = 512
PAGES = 16


def numpy_of(kind: str) -> Callable[[list[int]], Any]:
    return lambda numbers: np.array(numbers, dtype=kind)


def torch_of(numbers: list[int]) -> Any:
    return pytest.importorskip("torch").tensor(numbers)


DTYPES = "int8 uint8 int16 uint16 int32 uint32 int64 uint64 <u4 =i8"
KINDS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "generator": iter,
    "array.array": lambda numbers: array.array("I", numbers),
    "array.array of q": lambda numbers: array.array("q", numbers),
    "bytes": bytes,
    "bytearray": bytearray,
    "memoryview": lambda numbers: memoryview(array.array("H", numbers)),
    "numpy numbers": lambda numbers: [np.int16(number) for number in numbers],
    "torch": torch_of,
    **{kind: numpy_of(kind) for kind in DTYPES.split()},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_array_names_the_same_pages(pair: Pair, kind: str) -> None:
    src, dst, remote = pair.regions(PAGE * PAGES)
    data = pattern(PAGE * PAGES)
    src.write_bytes(data)
    from_, to = [3, 1, 15, 0], [0, 7, 2, 5]
    outcome = pair.ab.write_pages(src, KINDS[kind](from_), remote, KINDS[kind](to), PAGE).wait(LIMIT)
    assert outcome.bytes == 4 * PAGE
    expected = bytearray(PAGE * PAGES)
    for here, there in zip(from_, to, strict=True):
        expected[there * PAGE : (there + 1) * PAGE] = data[here * PAGE : (here + 1) * PAGE]
    assert dst.read_bytes() == expected
    # Back again, to where they came from.
    src.write_bytes(bytes(PAGE * PAGES))
    pair.ab.read_pages(src, KINDS[kind](from_), remote, KINDS[kind](to), PAGE).wait(LIMIT)
    for here in from_:
        assert src.read_bytes(here * PAGE, PAGE) == data[here * PAGE : (here + 1) * PAGE]


def test_a_range_and_neighbours_that_merge(pair: Pair) -> None:
    src, dst, remote = pair.regions(PAGE * PAGES)
    src.write_bytes(pattern(PAGE * PAGES))
    outcome = pair.ab.write_pages(src, range(PAGES), remote, range(PAGES), PAGE).wait(LIMIT)
    assert outcome.bytes == PAGE * PAGES
    assert dst.read_bytes() == pattern(PAGE * PAGES)
    pair.ab.write_pages(src, range(0, PAGES, 2), remote, range(PAGES - 1, -1, -2), PAGE).wait(LIMIT)
    assert dst.read_bytes(PAGE * (PAGES - 1)) == pattern(PAGE)


def test_strides_and_offsets(pair: Pair) -> None:
    src, dst, remote = pair.regions(4096)
    data = pattern(4096)
    src.write_bytes(data)
    pair.ab.write_pages(
        src, [0, 2, 5], remote, [1, 0, 4], 50, src_stride=100, src_offset=13, dst_stride=64, dst_offset=7
    ).wait(LIMIT)
    expected = bytearray(4096)
    for here, there in ((0, 1), (2, 0), (5, 4)):
        expected[7 + 64 * there : 57 + 64 * there] = data[13 + 100 * here : 63 + 100 * here]
    assert dst.read_bytes() == expected
    back = pair.a.alloc(4096)
    pair.ab.read_pages(
        back, [0, 2, 5], remote, [1, 0, 4], 50, dst_stride=100, dst_offset=13, src_stride=64, src_offset=7
    ).wait(LIMIT)
    for here in (0, 2, 5):
        assert back.read_bytes(13 + 100 * here, 50) == data[13 + 100 * here : 63 + 100 * here]
    assert back.read_bytes(63, 50) == bytes(50)


def test_an_imm_with_each_request(pair: Pair) -> None:
    src, _dst, remote = pair.regions(PAGE * PAGES)
    from_, to = [0, 2, 4, 6], [9, 7, 5, 3]
    operation = pair.ab.write_pages(src, from_, remote, to, PAGE, imm=9, imm_per_request=True)
    requests = operation.wait(LIMIT).work_requests
    assert requests >= 1
    pair.ba.imm(9).expect(requests).wait(LIMIT)
    assert pair.ba.imm(9).count == requests


def test_the_numbers_are_copied_at_the_call(pair: Pair) -> None:
    src, dst, remote = pair.regions(PAGE * PAGES)
    src.write_bytes(pattern(PAGE * PAGES))
    numbers = np.arange(PAGES, dtype=np.uint32)
    operation = pair.ab.write_pages(src, numbers, remote, numbers, PAGE)
    numbers[:] = 2**32 - 1
    operation.wait(LIMIT)
    assert dst.read_bytes() == pattern(PAGE * PAGES)


def test_many_pages(pair: Pair) -> None:
    count = 16_384
    src, dst, remote = pair.regions(count * 64)
    data = np.arange(count * 16, dtype=np.uint32)
    src.write_bytes(data)
    order = np.random.default_rng(1).permutation(count)
    pair.ab.write_pages(src, order, remote, np.arange(count), 64).wait(LIMIT)
    assert np.array_equal(dst.as_numpy().view(np.uint32).reshape(count, 16), data.reshape(count, 16)[order])


WRONG = {
    "floats": (np.zeros(2), TypeError, "integers"),
    "bools": (np.zeros(2, bool), TypeError, "integers"),
    "big-endian": (np.zeros(2, ">u4"), TypeError, "byte order"),
    "two dimensions": (np.zeros((2, 1), "u4"), ValueError, "dimensions"),
    "a view with gaps": (np.zeros(4, "u4")[::2], ValueError, "contiguous"),
    "backwards": (np.arange(2, dtype="u4")[::-1], ValueError, "contiguous"),
    "negative": (np.array([-1, 0]), ValueError, "range"),
    "large": (np.array([2**32, 0]), ValueError, "range"),
    "negative in a list": ([-1, 0], ValueError, "range"),
    "huge in a list": ([10**30, 0], ValueError, "64 bits|out of range"),
    "a float in a list": ([1.0, 0], TypeError, "not an integer"),
    "None in a list": ([None, 0], TypeError, "not an integer"),
    "text": ("01", TypeError, "not an integer"),
    "a number": (5, TypeError, "integers"),
    "None": (None, TypeError, "integers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_refused(pair: Pair, name: str) -> None:
    src, _dst, remote = pair.regions(PAGE * PAGES)
    wrong, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        pair.ab.write_pages(src, wrong, remote, [0, 1], PAGE)
    with pytest.raises(kind, match=text):
        pair.ab.read_pages(src, [0, 1], remote, wrong, PAGE)


@pytest.mark.parametrize("name", WRONG)
def test_the_error_names_the_argument(pair: Pair, name: str) -> None:
    src, _dst, remote = pair.regions(PAGE * PAGES)
    wrong, kind, _text = WRONG[name]
    with pytest.raises(kind, match=r"^dst_pages: "):
        pair.ab.write_pages(src, [0, 1], remote, wrong, PAGE)


def test_pages_outside_of_a_region(pair: Pair) -> None:
    src, _dst, remote = pair.regions(PAGE * PAGES)
    with pytest.raises(multirail.OutOfBounds):
        pair.ab.write_pages(src, [PAGES], remote, [0], PAGE)
    with pytest.raises(multirail.OutOfBounds):
        pair.ab.write_pages(src, [0], remote, [PAGES], PAGE)
    with pytest.raises(multirail.InvalidRequest):
        pair.ab.write_pages(src, [0, 1], remote, [0], PAGE)
    with pytest.raises(multirail.InvalidRequest):
        pair.ab.write_pages(src, [], remote, [], PAGE)
    with pytest.raises(multirail.InvalidRequest):
        pair.ab.write_pages(src, [0], remote, [0], 0)


def lists(pair: Pair) -> tuple[multirail.Region, multirail.Region, multirail.LocalList, multirail.RemoteList]:
    src, dst, remote = pair.regions(4096)
    src.write_bytes(pattern(4096))
    local, there = multirail.LocalList(), multirail.RemoteList()
    local.append(src, 0, 100)
    local.append_strided(src, 200, 10, 3, 20)
    local.extend(src, np.array([1000, 2000]), [5, 6])
    there.extend(remote, [0, 500, 510, 520], np.array([100, 10, 10, 10], "u2"))
    there.append(remote, 900, 5)
    there.append(remote, 3000, 6)
    assert len(local) == len(there) == 6
    assert (repr(local), repr(there)) == ("<LocalList of 6 pieces>", "<RemoteList of 6 pieces>")
    return src, dst, local, there


PIECES = [(0, 0, 100), (200, 500, 10), (220, 510, 10), (240, 520, 10), (1000, 900, 5), (2000, 3000, 6)]


def moved(pieces: list[tuple[int, int, int]]) -> bytes:
    data, expected = pattern(4096), bytearray(4096)
    for here, there, length in pieces:
        expected[there : there + length] = data[here : here + length]
    return bytes(expected)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_lists_move_their_pieces(pair: Pair, is_prepared: bool) -> None:
    src, dst, local, there = lists(pair)
    if is_prepared:
        prepared = pair.ab.prepare_write_list(local, there, imm=1)
        assert prepared.bytes == 141
        prepared.post().wait(LIMIT)
    else:
        assert pair.ab.write_list(local, there, imm=1).wait(LIMIT).bytes == 141
    assert dst.read_bytes() == moved(PIECES)
    pair.ba.imm(1).expect(1).wait(LIMIT)
    data = src.read_bytes()
    src.write_bytes(bytes(4096))
    if is_prepared:
        pair.ab.prepare_read_list(local, there).post().wait(LIMIT)
    else:
        pair.ab.read_list(local, there).wait(LIMIT)
    for here, _there, length in PIECES:
        assert src.read_bytes(here, length) == data[here : here + length]
    assert src.read_bytes(3000) == bytes(1096)


@pytest.mark.parametrize("kind", ["list", "array.array", "int64", "uint32", "int16"])
def test_selections_choose_pieces_in_their_order(pair: Pair, kind: str) -> None:
    _src, dst, local, there = lists(pair)
    of = KINDS[kind]
    pair.ab.write_list(local, there, local_selection=of([3, 1]), remote_selection=of([1, 2])).wait(LIMIT)
    assert dst.read_bytes() == moved([(240, 500, 10), (200, 510, 10)])
    prepared = pair.ab.prepare_write_list(local, there, local_selection=of([4]), remote_selection=of([4]))
    prepared.post().wait(LIMIT)
    assert dst.read_bytes(900, 5) == pattern(4096)[1000:1005]


def test_selections_that_do_not_fit(pair: Pair) -> None:
    _src, _dst, local, there = lists(pair)
    with pytest.raises(multirail.Error):
        pair.ab.write_list(local, there, local_selection=[6], remote_selection=[0])
    with pytest.raises(multirail.InvalidRequest):
        pair.ab.write_list(local, there, local_selection=[0], remote_selection=[1])
    with pytest.raises(multirail.InvalidRequest):
        pair.ab.read_list(multirail.LocalList(), multirail.RemoteList())
    with pytest.raises(TypeError, match="local_selection"):
        pair.ab.write_list(local, there, local_selection=[0.5])
    with pytest.raises(ValueError, match="remote_selection"):
        pair.ab.read_list(local, there, remote_selection=[-1])
    with pytest.raises(ValueError, match="1 lengths for 2 pieces"):
        local.extend(pair.a.alloc(10), [0, 1], [1])
    with pytest.raises(multirail.OutOfBounds):
        local.append(pair.a.alloc(10), 5, 6)


def test_lists_of_addresses(pair: Pair) -> None:
    ours, theirs = [pair.a.alloc(4096) for _ in range(3)], [pair.b.alloc(4096) for _ in range(3)]
    for number, region in enumerate(ours):
        region.write_bytes(pattern(4096, number))
    here, there = multirail.Catalogue(ours), multirail.Catalogue(theirs)
    assert (len(here), len(there)) == (3, 3)
    remote = pair.ab.import_catalogue(there.to_bytes())
    assert len(remote) == 3
    local_list = multirail.LocalList.of_addresses(here, [region.address + 64 for region in ours], 32)
    addresses = np.array([region.address + 128 for region in reversed(theirs)], np.uint64)
    remote_list = multirail.RemoteList.of_addresses(remote, addresses, np.full(3, 32))
    assert pair.ab.write_list(local_list, remote_list).wait(LIMIT).bytes == 96
    for number, region in enumerate(reversed(theirs)):
        assert region.read_bytes(128, 32) == pattern(4096, number)[64:96]
        assert region.read_bytes(0, 128) == bytes(128)
    found, offset = remote.find(theirs[1].address + 100, 5)
    assert (len(found), offset) == (4096, 100)
    assert len(remote.region(2)) == 4096
    with pytest.raises(multirail.Error):
        remote.region(3)
    with pytest.raises(multirail.Error):
        remote.find(theirs[1].address + 4000, 97)
    with pytest.raises(multirail.Error):
        multirail.LocalList.of_addresses(here, [ours[0].address - 1], 4)
