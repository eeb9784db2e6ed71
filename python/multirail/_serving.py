"""What the interfaces of other libraries share: taking the peers that connect, and the deadline of their calls."""

from __future__ import annotations

import logging
import os
import threading
import time

from . import Listener, Peer, errors


def accept_all(listener: Listener, log: logging.Logger, name: str) -> None:
    """Starts a thread of this name that takes the peers that connect, until the fabric closes."""
    threading.Thread(target=_accept, args=(listener, log), name=name, daemon=True).start()


def _accept(listener: Listener, log: logging.Logger) -> None:
    peers: list[Peer] = []
    while True:
        try:
            peers.append(listener.accept().wait())
        except errors.Closed:
            return
        except errors.Error as error:
            log.error("%s accepts no more peers: %s", listener.address, error)
            return
        peers = [peer for peer in peers if peer.is_alive]


def deadline() -> float:
    """The seconds after which a call fails, from the environment."""
    text = os.environ.get("MULTIRAIL_COMPAT_DEADLINE") or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise errors.InvalidRequest(f"MULTIRAIL_COMPAT_DEADLINE={text!r}: give a number of seconds larger than 0")
    return seconds


def left(end: float) -> float:
    """The seconds until `end`, of `time.monotonic()`; at least a millisecond."""
    return max(end - time.monotonic(), 0.001)
