"""What `prep_xfer_dlist` and `make_prepped_xfer` return."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import multirail
from multirail import errors

from . import _bindings as bind
from ._memory import Indices, Pieces, Selection, local_list
from ._remote import RemoteSide

if TYPE_CHECKING:
    from ._agent import nixl_agent

logger = logging.getLogger("multirail.compat.nixl")

#: How long a release waits for a cancelled transfer, in seconds. A cancel takes microseconds unless a device is stuck.
RELEASE_WAIT = 1.0


class LocalSide:
    """Descriptors of this agent, and the native list of them."""

    __slots__ = ("native", "pieces", "regions")

    def __init__(self, pieces: Pieces, regions: list[multirail.Region]) -> None:
        self.pieces, self.regions = pieces, regions
        self.native = local_list(pieces, regions.__getitem__)

    def uses(self, wanted: set[int]) -> bool:
        """Whether any piece lies in one of these regions, given by `id()`."""
        return any(id(self.regions[row]) in wanted for row in set(self.pieces.regions.tolist()))


class nixl_prepped_dlist_handle:
    """Descriptors that were checked once, for any number of transfers."""

    __slots__ = ("__weakref__", "_side")

    def __init__(self, side: LocalSide | RemoteSide) -> None:
        self._side: LocalSide | RemoteSide | None = side

    @property
    def _handle(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"nixl_prepped_dlist_handle({self._handle:#x}, released={self._side is None})"

    def release(self) -> None:
        """Frees the descriptors. Transfers that were made of them go on. May be called twice."""
        self._side = None


class nixl_xfer_handle:
    """A transfer that was planned once, to be posted any number of times."""

    __slots__ = (
        "__weakref__",
        "_agent",
        "_error",
        "_is_write",
        "_local",
        "_notification",
        "_op",
        "_plan",
        "_planned_notification",
        "_post_us",
        "_released",
        "_remote",
        "_selections",
        "_start_us",
        "backend",
    )

    def __init__(
        self,
        agent: nixl_agent,
        operation: bind.nixl_xfer_op_t,
        local: LocalSide,
        local_indices: Indices | None,
        remote: RemoteSide,
        remote_indices: Indices | None,
        notification: bytes | None,
        backend: str,
    ) -> None:
        self._released = True  # until it is complete
        self._agent, self._local, self._remote = agent, local, remote
        self._is_write = operation == bind.NIXL_WRITE
        self._selections: tuple[Selection, Selection] = (
            local.pieces.positions(local_indices),
            remote.pieces.positions(remote_indices),
        )
        self._notification = self._planned_notification = notification
        self._plan: multirail.PreparedTransfer | None = None
        self._op: multirail.Operation[multirail.Outcome] | None = None
        self._error: Exception | None = None
        self._start_us = self._post_us = 0
        self.backend = backend
        try:
            self._plan = self._make_plan()
        except bind.nixlRemoteDisconnectError as error:
            # As in NIXL, a transfer to an agent that is gone can be made; its post tries again, and raises this.
            logger.info("the transfer is planned when it is posted: %s", error)
        self._released = False

    @property
    def _handle(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"nixl_xfer_handle({self._handle:#x}, released={self._released})"

    def _make_plan(self) -> multirail.PreparedTransfer:
        try:
            peer = self._remote.remote.peer()
            native = self._remote.list_for(peer)
            prepare = peer.prepare_write_list if self._is_write else peer.prepare_read_list
            self._planned_notification = self._notification
            return prepare(
                self._local.native,
                native,
                local_selection=self._selections[0],
                remote_selection=self._selections[1],
                notify=self._notification,
            )
        except errors.Error as error:
            bind.fail(error)

    def post(self, notification: bytes | None) -> str:
        """Starts the transfer. A notification replaces the one before, also for later posts."""
        if self._op is not None and not self._op.done():
            raise bind.nixlRepostActiveError("the transfer is under way; wait until check_xfer_state() tells otherwise")
        self._check()
        if notification is not None:
            self._notification = notification
        start = time.monotonic_ns()
        self._op = self._error = None
        try:
            plan = self._plan
            if plan is None:
                plan = self._plan = self._make_plan()
            wanted = self._notification
            self._op = plan.post() if wanted is self._planned_notification else plan.post(notify=wanted)
        except errors.Error as error:
            return self._fail(error)
        except Exception as error:
            self._error = error
            raise
        self._start_us, self._post_us = start // 1000, (time.monotonic_ns() - start) // 1000
        return self.state()

    def state(self) -> str:
        op = self._op
        if op is None:
            if self._error is not None:
                raise self._error
            self._check()
            raise bind.nixlNotPostedError("call transfer() first")
        if self._released or self._remote.remote.removed:
            self._check()
        if not op.done():
            return "PROC"
        error = op.exception()
        return "DONE" if error is None else self._fail(error)

    def _check(self) -> None:
        if self._released:
            raise bind.nixlInvalidParamError("the transfer's handle was released; make a new one")
        if self._remote.remote.removed:
            why = f"agent {self._remote.remote.name!r} was removed, or has started anew; make a new transfer"
            raise bind.nixlNotFoundError(why)

    def _fail(self, error: BaseException) -> str:
        if isinstance(error, errors.DeadlineExceeded):
            return "ERR"  # NIXL has no deadlines, and so no exception for one
        if not isinstance(error, errors.Error):
            raise error
        if isinstance(error, errors.PeerDied | errors.Closed):
            self._plan = None  # the next post connects again
            self._remote.lose_peer()
        try:
            bind.fail(error)
        except Exception as failure:
            if self._op is None:
                self._error = failure
            raise

    def telemetry(self) -> bind.nixlXferTelemetry:
        self._check()
        if self._op is None or self._plan is None:
            raise bind.nixlNotPostedError("call transfer() first")
        receipt, pieces = self._op.receipt(), len(self._selections[0])
        if receipt is None:
            return bind.nixlXferTelemetry(self._start_us, self._post_us, 0, self._plan.bytes, pieces)
        post, transfer = round(receipt.post * 1e6), round(receipt.transfer * 1e6)
        return bind.nixlXferTelemetry(self._start_us, post, transfer, receipt.bytes, pieces - receipt.merged)

    @property
    def is_active(self) -> bool:
        return self._op is not None and not self._op.done()

    def stop(self) -> None:
        """Cancels the transfer if it is under way. Returns once no byte of it can move any more.

        Raises `nixlNotAllowedError` if the device has not stopped within a second: its memory is still in use.
        """
        op = self._op
        if op is None or op.done():
            return
        op.cancel()
        try:
            op.wait(RELEASE_WAIT)
        except errors.Error as error:
            if not op.done():
                why = f"bytes may still move {RELEASE_WAIT} s after the cancel; keep the memory, and release again"
                raise bind.nixlNotAllowedError(why) from error

    def uses(self, remote: object, regions: set[int]) -> bool:
        return self._remote.remote is remote or (bool(regions) and self._local.uses(regions))

    def release(self) -> None:
        """Frees the transfer. One that is under way is cancelled first, as `stop` does. May be called twice."""
        if self._released:
            return
        self.stop()
        self._released = True
        self._plan = None

    def __del__(self) -> None:
        if getattr(self, "_released", True):
            return
        # The fabric keeps the regions of a cancelled operation until no byte of it can move.
        if self.is_active and self._op is not None:
            self._op.cancel()
