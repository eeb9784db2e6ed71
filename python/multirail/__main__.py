"""The command `multirail`, for `python -m multirail` and for the script that pip installs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from . import _native

#: NIXL's plug-in, in the wheel.
PLUGIN = Path(__file__).parent / "libplugin_MULTIRAIL.so"


def run(arguments: list[str]) -> None:
    """Runs the command with these arguments, and exits with its code."""
    # Python would turn Ctrl-C into an exception that nobody here handles; the command has a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if PLUGIN.exists():
        os.environ.setdefault("MULTIRAIL_PLUGIN_FILE", str(PLUGIN))
    sys.exit(_native._run_command(["multirail", *arguments], [sys.executable, "-m", "multirail"]))


def main() -> None:
    """Runs the command with the arguments of this process."""
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
