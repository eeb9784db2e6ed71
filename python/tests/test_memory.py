"""Memory: allocated and registered, views of it, descriptors, revocation."""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import weakref
from typing import Any

import numpy as np
import pytest
from conftest import LIMIT, Pair, pattern, run_python

import multirail


def test_allocated_memory_is_zeroed_and_copied_in_and_out(pair: Pair) -> None:
    region = pair.a.alloc(100_000)
    assert len(region) == 100_000 and region.access == "all" and region.device == "cpu"
    assert region.read_bytes() == bytes(100_000)
    region.write_bytes(pattern(50_000), 20_000)
    assert region.read_bytes() == bytes(20_000) + pattern(50_000) + bytes(30_000)
    assert region.read_bytes(20_001, 2) == pattern(3)[1:]
    assert region.read_bytes(100_000) == b""
    assert ctypes.string_at(region.address + 20_000, 10) == pattern(10)
    assert "100000 bytes" in repr(region) and "cpu" in repr(region)


@pytest.mark.parametrize(
    "data",
    [
        b"12345678",
        bytearray(b"12345678"),
        memoryview(b"12345678"),
        memoryview(b"0012345678")[2:],
        array.array("H", [0x3231, 0x3433, 0x3635, 0x3837]),
        np.frombuffer(b"12345678", np.float64),
        np.frombuffer(b"12345678", np.uint8).reshape(2, 4),
    ],
    ids=lambda data: type(data).__name__,
)
def test_write_bytes_takes_any_buffer(pair: Pair, data: Any) -> None:
    region = pair.a.alloc(10)
    region.write_bytes(data, 1)
    assert region.read_bytes() == b"\x0012345678\x00"


@pytest.mark.parametrize("access", ["local", "read", "write", "all"])
def test_access_decides_what_a_peer_may_do(pair: Pair, access: str) -> None:
    there = pair.b.alloc(4096, access)
    assert there.access == access
    src = pair.a.alloc(4096)
    if access == "local":
        with pytest.raises(multirail.Error):
            pair.ab.write(src, pair.remote(there)).wait(LIMIT)
        return
    remote = pair.remote(there)
    assert remote.access == access and len(remote) == 4096 and remote.path and "4096" in repr(remote)
    for may, operate in (("write", pair.ab.write), ("read", pair.ab.read)):
        if access in (may, "all"):
            assert operate(src, remote).wait(LIMIT).bytes == 4096
        else:
            with pytest.raises(multirail.RemoteAccess) as caught:
                operate(src, remote).wait(LIMIT)
            assert isinstance(caught.value, PermissionError)


class Interface:
    """Has memory by `__array_interface__` alone."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.__array_interface__ = dict(of.__array_interface__)


class Dlpack:
    """Has memory by DLPack alone."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.of.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.of.__dlpack_device__()


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        lambda length: array.array("b", bytes(length)),
        lambda length: (ctypes.c_ubyte * length)(),
        lambda length: mmap.mmap(-1, length),
        lambda length: memoryview(bytearray(length)),
        lambda length: np.zeros(length, np.uint8),
        lambda length: np.zeros((2, length // 16), np.float64),
        lambda length: np.zeros((4, length), np.uint8)[2],
        lambda length: Interface(np.zeros(length, np.uint8)),
        lambda length: Dlpack(np.zeros(length // 2, np.int16)),
        lambda length: pytest.importorskip("torch").zeros(length // 4),
    ],
    ids=["bytearray", "array", "ctypes", "mmap", "memoryview", "numpy", "2-d", "row", "interface", "dlpack", "torch"],
)
def test_registered_memory_is_that_of_the_object(pair: Pair, make: Any) -> None:
    owner = make(4096)
    region = pair.b.register(owner)
    assert len(region) == 4096
    src = pair.a.alloc(4096)
    src.write_bytes(pattern(4096))
    pair.ab.write(src, pair.remote(region)).wait(LIMIT)
    assert region.read_bytes() == pattern(4096)
    if not isinstance(owner, (Interface, Dlpack)):
        flat = owner.numpy() if hasattr(owner, "numpy") else owner
        assert memoryview(flat).tobytes() == pattern(4096)
    else:
        assert owner.of.tobytes() == pattern(4096)


def test_an_address_with_an_owner(pair: Pair) -> None:
    owner = np.zeros(4096, np.uint8)
    address = owner.__array_interface__["data"][0]
    gone = weakref.ref(owner)
    regions = [pair.b.register((address, 4096), owner=owner), pair.b.register((address, 4096, "cpu"), owner=owner)]
    del owner
    gc.collect()
    assert gone() is not None
    src = pair.a.alloc(4096)
    src.write_bytes(pattern(4096))
    pair.ab.write(src, pair.remote(regions[0])).wait(LIMIT)
    assert regions[1].read_bytes() == pattern(4096)
    regions.clear()
    pair.a.close()
    pair.b.close()
    gc.collect()
    assert gone() is None


def test_a_region_keeps_its_object_and_frees_it(pair: Pair) -> None:
    owner = np.zeros(4096, np.uint8)
    gone = weakref.ref(owner)
    region = pair.b.register(owner)
    del owner
    gc.collect()
    assert gone() is not None
    region.revoke().wait(LIMIT)
    del region
    gc.collect()
    assert gone() is None


def test_a_bytearray_that_is_registered_cannot_be_resized(pair: Pair) -> None:
    owner = bytearray(4096)
    region = pair.b.register(owner)
    with pytest.raises(BufferError):
        owner.extend(b"more")
    region.revoke().wait(LIMIT)
    del region
    gc.collect()
    owner.extend(b"more")
    assert len(owner) == 4100


WRONG = {
    "bytes": (b"read-only", ValueError, "read-only"),
    "a read-only view": (memoryview(bytearray(8)).toreadonly(), ValueError, "read-only"),
    "empty": (bytearray(), ValueError, "no bytes"),
    "an empty array": (np.zeros((0, 4)), ValueError, "no bytes"),
    "a view with gaps": (np.zeros(8)[::2], ValueError, "contiguous"),
    "columns": (np.zeros((4, 4))[:, 1], ValueError, "contiguous"),
    "Fortran's order": (np.zeros((4, 5), order="F"), ValueError, "contiguous"),
    "text": ("text", TypeError, "no memory"),
    "None": (None, TypeError, "no memory"),
    "a list": ([1, 2], TypeError, "no memory"),
    "a type": (bytearray, TypeError, "no memory"),
    "one number": ((1,), TypeError, "tuple"),
    "four numbers": ((1, 2, 3, 4), TypeError, "tuple"),
    "address 0": ((0, 8), multirail.InvalidRequest, "address 0x0"),
    "no length": ((4096, 0), ValueError, "no bytes"),
    "a negative length": ((4096, -1), ValueError, "range"),
    "the end of all addresses": ((2**64 - 8, 4096), multirail.InvalidRequest, "address"),
    "a huge address": ((10**30, 8), ValueError, "64 bits|out of range"),
    "a float": ((4096.0, 8), TypeError, "integer"),
    "an unknown device": ((4096, 8, "tpu:0"), ValueError, "device"),
    "a huge device": ((4096, 8, "cuda:99999999999"), ValueError, "device"),
    "interface at 0": (
        type("Lie", (), {"__array_interface__": {"shape": (4,), "typestr": "<u4", "data": (0, False)}})(),
        ValueError,
        "at address 0",
    ),
    "interface without a shape": (
        type("Lie", (), {"__array_interface__": {"typestr": "<u4", "data": (0, False)}})(),
        TypeError,
        "shape",
    ),
    "interface without an address": (
        type("Lie", (), {"__array_interface__": {"shape": (4,), "typestr": "<u4", "data": None}})(),
        TypeError,
        "address",
    ),
    "interface larger than memory": (
        type("Lie", (), {"__array_interface__": {"shape": (2**40, 2**40), "typestr": "<u4", "data": (0, False)}})(),
        ValueError,
        "address space",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_registered(pair: Pair, name: str) -> None:
    wrong, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        pair.a.register(wrong)


def test_an_array_without_dimensions_is_one_element(pair: Pair) -> None:
    owner = np.zeros((), np.float64)
    region = pair.a.register(owner)
    region.write_bytes(np.float64(1.5).tobytes())
    assert owner == 1.5


def test_a_buffer_of_pointers_is_refused(pair: Pair) -> None:
    testbuffer = pytest.importorskip("_testbuffer")
    rows = testbuffer.ndarray(
        list(range(24)), shape=[3, 8], format="B", flags=testbuffer.ND_PIL | testbuffer.ND_WRITABLE
    )
    with pytest.raises(ValueError, match="suboffsets"):
        pair.a.register(rows)


@pytest.mark.parametrize(
    "use",
    ["region.write_bytes(Lie())", "ab.notify(Lie())", "ab.write_pages(region, Lie(), remote, [0] * 4, 8)"],
)
def test_an_array_at_address_0_is_refused(use: str) -> None:
    program = f"""
        import multirail
        class Lie:
            __array_interface__ = dict(shape=(4,), typestr="<u4", data=(0, False), version=3)
        a, b = multirail.Fabric("loopback"), multirail.Fabric("loopback")
        ab, ba = a.connect_local(b)
        region, there = a.alloc(4096), b.alloc(4096)
        remote = ab.import_region(there.descriptor())
        try:
            {use}
        except (TypeError, ValueError, multirail.Error) as error:
            print(bool(str(error)))
    """
    done = run_python(program)
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_strides_that_do_not_match_the_shape_are_refused(pair: Pair) -> None:
    memory = np.zeros((4, 4), np.uint8)
    lie = Interface(memory)
    lie.__array_interface__["strides"] = (4,)
    with pytest.raises(ValueError, match="strides"):
        pair.a.register(lie)


def test_views_share_the_bytes_and_keep_the_region(pair: Pair) -> None:
    region = pair.a.alloc(4096)
    views = [region.as_numpy(), np.asarray(region), np.frombuffer(region.as_buffer(), np.uint8), np.from_dlpack(region)]
    region.write_bytes(pattern(4096))
    gone = weakref.ref(region)
    del region
    gc.collect()
    assert gone() is not None
    for view in views:
        assert view.dtype == np.uint8 and view.tobytes() == pattern(4096)
    views[0][5] = 255
    assert [int(view[5]) for view in views] == [255] * 4
    del view
    views.clear()
    gc.collect()
    assert gone() is None


def test_a_buffer_is_writable_and_outlives_the_fabric() -> None:
    with multirail.Fabric("loopback") as fabric:
        view = memoryview(fabric.alloc(4096).as_buffer()).cast("B")
        view[10:14] = b"four"
    gc.collect()
    assert bytes(view[8:16]) == b"\0\0four\0\0"


def test_torch_views(pair: Pair) -> None:
    torch = pytest.importorskip("torch")
    region = pair.a.alloc(4096)
    tensor = region.as_torch()
    tensor.fill_(7)
    assert tensor.dtype == torch.uint8 and region.read_bytes() == b"\x07" * 4096


def test_interfaces_are_those_of_the_host(pair: Pair) -> None:
    region = pair.a.alloc(100)
    assert region.__array_interface__ == {
        "shape": (100,),
        "typestr": "|u1",
        "data": (region.address, False),
        "version": 3,
    }
    assert not hasattr(region, "__cuda_array_interface__")
    assert region.__dlpack_device__() == (1, 0)
    del region
    capsule = pair.a.alloc(10).__dlpack__()
    del capsule
    gc.collect()


def test_bytes_outside_of_a_region(pair: Pair) -> None:
    region = pair.a.alloc(100)
    for wrong in (
        lambda: region.write_bytes(b"12", 99),
        lambda: region.read_bytes(99, 2),
        lambda: region.read_bytes(101),
        lambda: region.read_bytes(0, 2**62),
    ):
        with pytest.raises(multirail.OutOfBounds) as caught:
            wrong()
        assert isinstance(caught.value, ValueError)
    for length in (0, 2**62, 2**64 - 1):
        with pytest.raises(multirail.Error):
            pair.a.alloc(length)


def test_gpu_memory_where_there_is_none_or_some(pair: Pair) -> None:
    try:
        region = pair.a.alloc(4096, device="cuda:0")
    except multirail.Error as error:
        assert str(error)
        return
    assert region.device == "cuda:0"
    region.write_bytes(pattern(4096))
    assert region.read_bytes() == pattern(4096)


def test_after_a_revoke_the_peer_gets_revoked(pair: Pair) -> None:
    src, dst, remote = pair.regions(4096)
    prepared = pair.ab.prepare_write_pages(src, [0], remote, [0], 4096)
    prepared.post().wait(LIMIT)
    dst.revoke().wait(LIMIT)
    dst.write_bytes(pattern(4096))
    for use in (lambda: pair.ab.write(src, remote), lambda: pair.ab.read(src, remote), prepared.post):
        with pytest.raises(multirail.Revoked) as caught:
            use().wait(LIMIT)
        assert caught.value.kind == "revoked"
    assert dst.read_bytes() == pattern(4096)
    with pytest.raises(multirail.Revoked):
        pair.remote(dst)


def test_a_region_that_is_dropped_counts_as_revoked(pair: Pair) -> None:
    src, dst, remote = pair.regions(4096)
    del dst
    gc.collect()
    with pytest.raises(multirail.Revoked):
        pair.ab.write(src, remote).wait(LIMIT)


def test_a_region_that_is_dropped_with_writes_under_way(pair: Pair) -> None:
    length = 64 << 20
    src, dst, remote = pair.regions(length)
    src.write_bytes(pattern(length))
    operation = pair.ab.write(src, remote)
    del src
    gc.collect()
    # If the bytes were freed, the allocator might hand them to these arrays.
    others = [np.full(length // 8, 0xEE, np.uint8) for _ in range(8)]
    assert operation.wait(LIMIT).bytes == length
    assert dst.read_bytes() == pattern(length)
    assert all(bool((other == 0xEE).all()) for other in others)


def test_memory_that_is_dropped_with_reads_of_the_peer_under_way(pair: Pair) -> None:
    length = 64 << 20
    owner = np.frombuffer(bytearray(pattern(length)), np.uint8)
    there = pair.b.register(owner)
    remote, here = pair.remote(there), pair.a.alloc(length)
    del owner
    operation = pair.ab.read(here, remote)
    del there
    gc.collect()
    others = [np.full(length, 0xEE, np.uint8) for _ in range(2)]
    try:
        operation.wait(LIMIT)
    except multirail.Revoked:
        pass
    else:
        assert here.read_bytes() == pattern(length)
    assert all(bool((other == 0xEE).all()) for other in others)


def test_wrong_descriptors(pair: Pair) -> None:
    descriptor = pair.b.alloc(4096).descriptor()
    for wrong in (b"", b"x", descriptor[:-1], descriptor + b"x", bytes(len(descriptor)), b"\xff" * len(descriptor)):
        with pytest.raises(multirail.Error):
            pair.ab.import_region(wrong)
        with pytest.raises(multirail.Error):
            pair.ab.import_catalogue(wrong)
    for kind in (None, 5, "text"):
        with pytest.raises(TypeError):
            pair.ab.import_region(kind)
    ours = pair.a.alloc(4096)
    with pytest.raises(multirail.Error):
        pair.ab.import_region(ours.descriptor())


def test_a_region_of_another_fabric_is_refused(pair: Pair) -> None:
    _src, dst, remote = pair.regions(4096)
    with pytest.raises(multirail.Error):
        pair.ab.write(dst, remote)
    with pytest.raises(multirail.Error):
        pair.ba.write(dst, remote)


def test_a_region_of_another_fabric_cannot_be_published(pair: Pair) -> None:
    with pytest.raises(multirail.Error):
        pair.b.publish("of another", pair.a.alloc(4096))


def test_published_names(pair: Pair) -> None:
    there = pair.b.alloc(4096)
    there.write_bytes(pattern(4096))
    pair.b.publish("cache é", there)
    found = pair.ab.region("cache é").wait(LIMIT)
    here = pair.a.alloc(4096)
    pair.ab.read(here, found).wait(LIMIT)
    assert here.read_bytes() == pattern(4096)
    pair.b.unpublish("cache é")
    with pytest.raises(multirail.NotFound) as caught:
        pair.ab.region("cache é").wait(LIMIT)
    assert isinstance(caught.value, LookupError)
    pair.ab.write(here, found).wait(LIMIT)
    pair.b.publish_catalogue("all", multirail.Catalogue([there]))
    catalogue = pair.ab.catalogue("all").wait(LIMIT)
    region, offset = catalogue.find(there.address + 10, 20)
    assert (len(region), offset, len(catalogue)) == (4096, 10, 1)
    for name in ("", "x" * 256):
        with pytest.raises(multirail.InvalidRequest):
            pair.b.publish(name, there)
