"""Groups of peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from conftest import LIMIT, pattern

import multirail


@dataclass
class Ring:
    fabrics: list[multirail.Fabric]
    groups: list[multirail.PeerGroup]
    peers: list[multirail.Peer]
    """Those of fabric 0, in the order of the others."""
    back: list[multirail.Peer]
    """Fabric 0, as each other one sees it."""


@pytest.fixture
def ring() -> Iterator[Ring]:
    with contextlib.ExitStack() as stack:
        fabrics = [stack.enter_context(multirail.Fabric("loopback")) for _ in range(4)]
        peers: list[list[multirail.Peer]] = [[] for _ in fabrics]
        for i, first in enumerate(fabrics):
            for j in range(i + 1, len(fabrics)):
                there, here = first.connect_local(fabrics[j])
                peers[i].append(there)
                peers[j].append(here)
        groups = [multirail.PeerGroup(others) for others in peers]
        yield Ring(fabrics, groups, peers[0], [others[0] for others in peers[1:]])


def test_a_barrier_ends_when_all_have_come(ring: Ring) -> None:
    assert [len(group) for group in ring.groups] == [3] * 4
    early = [group.barrier("start", LIMIT) for group in ring.groups[:3]]
    with pytest.raises(multirail.DeadlineExceeded):
        early[0].wait(0.1)
    assert ring.groups[3].barrier("start").wait(LIMIT) is None
    assert [barrier.wait(LIMIT) for barrier in early] == [None] * 3


def test_a_barrier_that_one_does_not_reach(ring: Ring) -> None:
    start = time.monotonic()
    barriers = [group.barrier("alone", 0.2) for group in ring.groups[:2]]
    for barrier in barriers:
        with pytest.raises(multirail.DeadlineExceeded):
            barrier.wait(LIMIT)
    assert 0.2 <= time.monotonic() - start < LIMIT


def test_scatter_gives_each_peer_its_share(ring: Ring) -> None:
    src = ring.fabrics[0].alloc(3000)
    src.write_bytes(pattern(3000))
    theirs = [fabric.alloc(2000) for fabric in ring.fabrics[1:]]
    remote = [peer.import_region(region.descriptor()) for peer, region in zip(ring.peers, theirs, strict=True)]
    outcome = ring.groups[0].scatter(src, remote, 2400, 300, 50, imm=4).wait(LIMIT)
    assert outcome.bytes == 2400
    for number, (region, back) in enumerate(zip(theirs, ring.back, strict=True)):
        back.imm(4).expect(1).wait(LIMIT)
        start = 300 + 800 * number
        assert region.read_bytes() == bytes(50) + pattern(3000)[start : start + 800] + bytes(1150)
    with pytest.raises(multirail.Error):
        ring.groups[0].scatter(src, remote[:2]).wait(LIMIT)
    with pytest.raises(multirail.OutOfBounds):
        ring.groups[0].scatter(src, remote, 3001)


def test_an_imm_for_all(ring: Ring) -> None:
    ring.groups[0].write_imm(5).wait(LIMIT)
    for back in ring.back:
        back.imm(5).expect(1).wait(LIMIT)


def test_wrong_groups(ring: Ring) -> None:
    with pytest.raises(multirail.InvalidRequest):
        multirail.PeerGroup([])
    with pytest.raises(multirail.Error):
        multirail.PeerGroup([ring.peers[0], ring.back[0]])
    with pytest.raises(TypeError):
        multirail.PeerGroup([None])  # type: ignore[list-item]
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="seconds"):
            ring.groups[0].barrier("x", timeout)
    with pytest.raises(multirail.Error):
        ring.groups[0].barrier("", 1.0).wait(LIMIT)
