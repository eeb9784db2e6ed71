"""Awaiting operations in trio (and in anyio on trio), which has no futures of asyncio."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from . import Operation

T = TypeVar("T")


async def wait(operation: Operation[T]) -> T:
    """Waits for an operation in trio: a thread of trio's pool blocks for it, and the GIL is free meanwhile.

    Cancelling the task cancels the operation, and returns once no byte of it can move any more.
    """
    trio: Any = sys.modules.get("trio")
    if trio is None or not _runs(trio):
        raise RuntimeError("no event loop runs here: await the operation in asyncio or trio, or call wait()")
    try:
        while not operation.done():
            await trio.to_thread.run_sync(_wait_briefly, operation)
    except trio.Cancelled:
        operation.cancel()
        with trio.CancelScope(shield=True):
            while not operation.done():
                await trio.to_thread.run_sync(_wait_briefly, operation)
        raise
    return operation.result()


def _runs(trio: Any) -> bool:
    try:
        trio.lowlevel.current_task()
    except RuntimeError:
        return False
    return True


def _wait_briefly(operation: Operation[Any]) -> None:
    """Returns when the operation is over, or soon after its task was cancelled."""
    from .errors import DeadlineExceeded

    try:
        operation.wait(0.1)
    except DeadlineExceeded:
        if not operation.done():
            return
    except Exception:
        return
