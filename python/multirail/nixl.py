"""`python -m multirail.nixl install | uninstall | status`: NIXL's plug-in, as `multirail nixl` does it."""

from __future__ import annotations

import sys

from .__main__ import run


def main() -> None:
    """Runs `multirail nixl` with the arguments of this process."""
    run(["nixl", *sys.argv[1:]])


if __name__ == "__main__":
    main()
