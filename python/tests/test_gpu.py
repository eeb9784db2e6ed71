"""Memory of GPUs: torch, CuPy and our own. Needs torch with CUDA; two GPUs for some."""

from __future__ import annotations

from typing import Any

import pytest

import multirail

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("torch reaches no GPU", allow_module_level=True)

LENGTH = 4 << 20
PAGE = 64 << 10


def other() -> int:
    """A second GPU if there is one."""
    return 1 if torch.cuda.device_count() > 1 else 0


def test_tensors_are_registered_where_they_are() -> None:
    source = torch.randint(0, 256, (LENGTH,), dtype=torch.uint8, device="cuda:0")
    target = torch.zeros(LENGTH // 2, dtype=torch.int16, device=f"cuda:{other()}")
    with multirail.Fabric("loopback") as here, multirail.Fabric("loopback") as there:
        peer, _ = here.connect_local(there)
        local, region = here.register(source), there.register(target, "write")
        assert local.address == source.data_ptr() and local.device == "cuda:0"
        assert region.device == f"cuda:{other()}" and len(region) == LENGTH
        torch.cuda.synchronize()
        remote = peer.import_region(region.descriptor())
        pages = torch.randperm(LENGTH // PAGE)
        assert peer.write_pages(local, pages, remote, range(len(pages)), PAGE).wait(30).bytes == LENGTH
        got = target.view(torch.uint8).cpu().view(-1, PAGE)
        assert torch.equal(got, source.cpu().view(-1, PAGE)[pages])


def test_reads_and_writes_between_gpu_and_host() -> None:
    tensor = torch.arange(LENGTH // 4, dtype=torch.int32, device="cuda:0")
    with multirail.Fabric("loopback") as here, multirail.Fabric("loopback") as there:
        peer, _ = here.connect_local(there)
        host, region = here.alloc(LENGTH), there.register(tensor)
        torch.cuda.synchronize()
        remote = peer.import_region(region.descriptor())
        peer.read(host, remote).wait(30)
        assert host.read_bytes() == tensor.cpu().numpy().tobytes()
        host.write_bytes(b"\x01" * LENGTH)
        peer.write(host, remote).wait(30)
        assert bool((tensor == 0x01010101).all())


def test_our_memory_is_a_tensor_and_a_cupy_array() -> None:
    with multirail.Fabric("loopback") as fabric:
        region = fabric.alloc(LENGTH, device=f"cuda:{other()}")
        tensor = region.as_torch()
        assert tensor.data_ptr() == region.address and tensor.get_device() == other() and len(tensor) == LENGTH
        tensor.fill_(7)
        torch.cuda.synchronize(other())
        assert region.read_bytes(5, 3) == b"\x07\x07\x07"
        with pytest.raises(TypeError, match="GPU"):
            region.as_numpy()
        with pytest.raises(TypeError, match="GPU"):
            region.as_buffer()


def test_cupy_arrays_and_dlpack() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    array = cupy.zeros(LENGTH, dtype=cupy.uint8)
    with multirail.Fabric("loopback") as here, multirail.Fabric("loopback") as there:
        peer, _ = here.connect_local(there)
        local, region = here.alloc(LENGTH), there.register(array)
        assert region.device == "cuda:0" and region.address == array.data.ptr
        local.write_bytes(bytes(range(256)) * (LENGTH // 256))
        peer.write(local, peer.import_region(region.descriptor())).wait(30)
        assert array.get().tobytes() == bytes(range(256)) * (LENGTH // 256)


def test_what_is_refused() -> None:
    with multirail.Fabric("loopback") as fabric:
        tensor = torch.zeros(1024, 1024, device="cuda:0")
        with pytest.raises(ValueError, match="contiguous"):
            fabric.register(tensor.t())
        with pytest.raises(TypeError, match="on a GPU"):
            peer, _ = fabric.connect_local(fabric)
            region = fabric.alloc(1 << 20)
            peer.write_pages(
                region,
                torch.zeros(4, dtype=torch.int64, device="cuda:0"),
                peer.import_region(region.descriptor()),
                [0] * 4,
                8,
            )
        with pytest.raises(multirail.Error):
            fabric.register((tensor.data_ptr(), 1 << 50, "cuda:0"))
        with pytest.raises((multirail.Error, ValueError)):
            fabric.alloc(1 << 20, device="cuda:99")
        assert fabric.register((tensor.data_ptr(), tensor.nbytes, "cuda:0"), owner=tensor).device == "cuda:0"
        # A tensor that requires a gradient has no array interface; detach() gives one.
        grad = torch.zeros(1024, device="cuda:0", requires_grad=True)
        with pytest.raises((RuntimeError, BufferError, TypeError)):
            fabric.register(grad)
        assert len(fabric.register(grad.detach())) == 4096
