"""Move memory between processes and machines at the speed of their network cards, peer to peer.

Two fabrics of one process, a write of scattered pages, and an imm that says when they have arrived:

>>> import multirail
>>> prefill, decode = multirail.Fabric("loopback"), multirail.Fabric("loopback")
>>> to_decode, from_prefill = prefill.connect_local(decode)
>>> kv = prefill.alloc(1 << 20)
>>> kv.write_bytes(b"page three", 3 << 16)
>>> cache = decode.alloc(1 << 20, "write")
>>> remote = to_decode.import_region(cache.descriptor())
>>> to_decode.write_pages(kv, [3, 1, 2], remote, [0, 7, 5], 64 << 10, imm=42).wait().bytes
196608
>>> from_prefill.imm(42).expect(1).wait()
>>> cache.read_bytes(0, 10)
b'page three'
>>> prefill.close(), decode.close()
(None, None)

Every operation can be awaited in asyncio, or waited for: ``await operation`` or ``operation.wait(timeout)``.
"""

from __future__ import annotations

import json as _json
import os as _os
from typing import Any as _Any

from . import _native, errors
from ._native import (
    Arrivals,
    Catalogue,
    Explanation,
    Fabric,
    ImmCounter,
    Listener,
    LocalList,
    Message,
    MetricsServer,
    Notification,
    Notifications,
    Operation,
    Outcome,
    Peer,
    PeerGroup,
    PreparedTransfer,
    RailReceipt,
    Receipt,
    RecvPool,
    Region,
    RemoteCatalogue,
    RemoteList,
    RemoteRegion,
    SpanExporter,
    __version__,
    backends,
)
from .errors import (
    Busy,
    Cancelled,
    Closed,
    DeadlineExceeded,
    DeviceLost,
    Error,
    Exhausted,
    InvalidRequest,
    Io,
    LocalAccess,
    NotFound,
    OutOfBounds,
    PeerDied,
    Permission,
    Protocol,
    RemoteAccess,
    Revoked,
    TooLarge,
    Unreachable,
    Unsupported,
    Version,
)

__all__ = [
    "Arrivals",
    "Busy",
    "Cancelled",
    "Catalogue",
    "Closed",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "Exhausted",
    "Explanation",
    "Fabric",
    "ImmCounter",
    "InvalidRequest",
    "Io",
    "Listener",
    "LocalAccess",
    "LocalList",
    "Message",
    "MetricsServer",
    "NotFound",
    "Notification",
    "Notifications",
    "Operation",
    "OutOfBounds",
    "Outcome",
    "Peer",
    "PeerDied",
    "PeerGroup",
    "Permission",
    "PreparedTransfer",
    "Protocol",
    "RailReceipt",
    "Receipt",
    "RecvPool",
    "Region",
    "RemoteAccess",
    "RemoteCatalogue",
    "RemoteList",
    "RemoteRegion",
    "Revoked",
    "SpanExporter",
    "TooLarge",
    "Unreachable",
    "Unsupported",
    "Version",
    "__version__",
    "backends",
    "errors",
    "topology",
]


def topology() -> dict[str, _Any]:
    """This machine as `multirail topo --json` prints it: PCI functions, NUMA nodes and cores.

    >>> sorted(topology())
    ['allowed', 'cores', 'functions', 'nodes']
    """
    machine: dict[str, _Any] = _json.loads(_native._topology())
    return machine


_os.register_at_fork(after_in_child=_native._after_fork_in_child)
