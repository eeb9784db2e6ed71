"""Two fabrics of one process, a write of scattered pages, and an imm that says when they have arrived."""

from __future__ import annotations

import numpy as np

import multirail

PAGE = 64 << 10
FROM, TO = [3, 1, 2], [0, 7, 5]


def main() -> None:
    with multirail.Fabric("loopback") as prefill, multirail.Fabric("loopback") as decode:
        to_decode, from_prefill = prefill.connect_local(decode)
        source = np.random.default_rng(1).integers(0, 256, (16, PAGE), dtype=np.uint8)
        target = np.zeros_like(source)
        kv, cache = prefill.register(source, "local"), decode.register(target, "write")
        remote = to_decode.import_region(cache.descriptor())
        written = to_decode.write_pages(kv, FROM, remote, TO, PAGE, imm=42)
        from_prefill.imm(42).expect(1).wait()  # after the last byte
        expected = np.zeros_like(source)
        expected[TO] = source[FROM]
        if not np.array_equal(target, expected):
            raise SystemExit("the pages differ")
        print(f"hello: {written.wait().bytes} bytes in {len(TO)} scattered pages, every byte compared")


if __name__ == "__main__":
    main()
