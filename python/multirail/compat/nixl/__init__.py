"""NIXL's Python interface on multirail: the part that vLLM, SGLang, Ray, LMCache and checkpoint-engine call.

Use it under its own name, or let :func:`multirail.compat.install` put it where ``nixl._api`` is imported from. It needs
numpy. Both agents of a pair must use it: it does not speak NIXL's protocol.

An agent and a peer in the same process, and a write with a notification:

>>> import numpy as np
>>> initiator, target = nixl_agent("initiator"), nixl_agent("target")
>>> source, sink = np.arange(256, dtype=np.uint8), np.zeros(256, np.uint8)
>>> memory = initiator.register_memory([(source.ctypes.data, 256, 0, "")], "DRAM")
>>> lent = target.register_memory([(sink.ctypes.data, 256, 0, "")], "DRAM")
>>> initiator.add_remote_agent(target.get_agent_metadata())
b'target'
>>> handle = initiator.initialize_xfer("WRITE", memory.trim(), lent.trim(), "target", b"all there")
>>> state = initiator.transfer(handle)
>>> while state == "PROC":
...     state = initiator.check_xfer_state(handle)
>>> while not (arrived := target.get_new_notifs()):
...     pass
>>> arrived, bool((sink == source).all())
({'initiator': [b'all there']}, True)

Environment:

- ``MULTIRAIL_COMPAT_LISTEN``: addresses of this machine to listen on and to announce, besides 127.0.0.1, with commas
  between them: ``10.0.0.5`` or ``10.0.0.5:7000``. Agents of other machines need one.
- ``MULTIRAIL_COMPAT_DEADLINE``: seconds until a transfer, or a connect, fails; 30 unless told.
- ``MULTIRAIL_BACKEND``: the backend, as for ``multirail.Fabric``.

What differs from NIXL, on purpose: a transfer that runs into the deadline has the state ``"ERR"``; agents connect when
a transfer is first made, so ``add_remote_agent`` does not fail for a dead one; ``release_xfer_handle`` and
``deregister_memory`` return once no byte can move any more; serialized descriptors are no pickle. The calls for etcd
and for the listener thread (``send_local_metadata``, ``fetch_remote_metadata``), for memory views and for storage are
absent.
"""

from __future__ import annotations

from . import _bindings as nixlBind
from ._agent import (
    DEFAULT_COMM_PORT,
    nixl_agent,
    nixl_agent_config,
    nixl_backend_handle,
    nixl_thread_sync_t,
)
from ._bindings import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRegDList,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
    nixlXferDList,
    nixlXferTelemetry,
)
from ._handles import nixl_prepped_dlist_handle, nixl_xfer_handle

__all__ = [
    "DEFAULT_COMM_PORT",
    "nixlBackendError",
    "nixlBind",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_agent",
    "nixl_agent_config",
    "nixl_backend_handle",
    "nixl_prepped_dlist_handle",
    "nixl_thread_sync_t",
    "nixl_xfer_handle",
]
