"""The command `multirail`, for `python -m multirail` and for the script that pip installs."""

from __future__ import annotations

import signal
import sys

from . import _native


def main() -> None:
    """Runs the command with the arguments of this process, and exits with its code."""
    # Python would turn Ctrl-C into an exception that nobody here handles; the command has a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native._run_command(["multirail", *sys.argv[1:]], [sys.executable, "-m", "multirail"]))


if __name__ == "__main__":
    main()
