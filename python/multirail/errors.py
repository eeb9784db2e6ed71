"""What operations of multirail fail with: one class per kind, all of them :class:`Error`.

>>> issubclass(PeerDied, Error) and issubclass(PeerDied, ConnectionError)
True
>>> DeadlineExceeded.kind
'deadline_exceeded'
"""

from __future__ import annotations

from typing import ClassVar


class Error(Exception):
    """A failure of multirail. ``str()`` of it says what has failed, why, and what to do.

    ``kind`` is a stable name of what went wrong, ``hint`` what usually helps, and ``operation`` the name of the
    call that has failed, or ``None``.
    """

    kind: ClassVar[str] = "error"
    hint: ClassVar[str] = ""
    operation: str | None = None


class InvalidRequest(Error, ValueError):
    """A request that can never succeed as given: an empty list, a page size of zero."""

    kind = "invalid_request"
    hint = "change the arguments as the message says"


class OutOfBounds(Error, ValueError):
    """A range that does not lie inside its region."""

    kind = "out_of_bounds"
    hint = "compare offset and length with len(region)"


class LocalAccess(Error, PermissionError):
    """The local region was not registered for this use."""

    kind = "local_access"
    hint = "register the region again, with the access that the message names"


class RemoteAccess(Error, PermissionError):
    """The target refused: a wrong key, out of bounds there, or no such right."""

    kind = "remote_access"
    hint = "the owner must register the region with this access; import its new descriptor"


class Revoked(Error):
    """The target has revoked the region, or registered it anew."""

    kind = "revoked"
    hint = "ask the owner for a new descriptor"


class TooLarge(Error, ValueError):
    """Larger than the backend can carry in one piece."""

    kind = "too_large"
    hint = "split the transfer, or the message"


class Unsupported(Error):
    """The backend, or this platform, cannot do this."""

    kind = "unsupported"
    hint = "`multirail info` lists what each backend can do here"


class Busy(Error):
    """Something is in use, or a queue or table is full. A later call may succeed."""

    kind = "busy"
    hint = "await some operations that are under way, then try again"


class Exhausted(Error):
    """No more of something can be made: peers, registrations, memory, file descriptors."""

    kind = "exhausted"
    hint = "drop what is not used, or raise the limit that the message names"


class DeadlineExceeded(Error, TimeoutError):
    """The deadline passed first. The memory stays in use until the device has released it."""

    kind = "deadline_exceeded"
    hint = "raise the deadline, or look at fabric.counters() and peer.is_alive"


class Cancelled(Error):
    """Cancelled by the caller, or by dropping the operation. No byte of it moves any more."""

    kind = "cancelled"
    hint = "nothing is wrong"


class PeerDied(Error, ConnectionError):
    """The peer's process, host or connection is gone."""

    kind = "peer_died"
    hint = "connect again once the peer is back"


class DeviceLost(Error):
    """The local device is gone or no longer usable."""

    kind = "device_lost"
    hint = "other rails go on; open a new Fabric once the device is back"


class Closed(Error):
    """This fabric, listener or peer was closed on this side, or by the peer in order."""

    kind = "closed"
    hint = "open or connect again"


class NotFound(Error, LookupError):
    """Nothing has this name."""

    kind = "not_found"
    hint = "compare the name with what the owner has published"


class Unreachable(Error, ConnectionError):
    """No transport of ours reaches that peer."""

    kind = "unreachable"
    hint = "`multirail doctor --peer HOST:PORT` looks for the reason"


class Version(Error):
    """The peer speaks another version of the protocol."""

    kind = "version"
    hint = "install the same version on both sides"


class Protocol(Error):
    """The peer sent bytes that do not parse or that break the protocol."""

    kind = "protocol"
    hint = "check that the peer is multirail, and its version"


class Permission(Error, PermissionError):
    """The system refused, because a right or a setting is missing; or a peer did, for want of a token."""

    kind = "permission"
    hint = "give both sides the same token; `multirail doctor` names missing rights"


class Io(Error, OSError):
    """Any other failure of the operating system."""

    kind = "io"
    hint = "the message has the system's reason"


__all__ = [
    "Busy",
    "Cancelled",
    "Closed",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "Exhausted",
    "InvalidRequest",
    "Io",
    "LocalAccess",
    "NotFound",
    "OutOfBounds",
    "PeerDied",
    "Permission",
    "Protocol",
    "RemoteAccess",
    "Revoked",
    "TooLarge",
    "Unreachable",
    "Unsupported",
    "Version",
]
