"""SGLang's plug-in: serves NIXL and Mooncake by multirail in every process of SGLang, if ``MULTIRAIL_COMPAT`` says so.

SGLang calls :func:`register` by the entry point group ``sglang.srt.plugins``.
"""

from __future__ import annotations

from . import install_from_environment

__all__ = ["register"]


def register() -> None:
    """Installs what ``MULTIRAIL_COMPAT`` names; nothing without it. May be called any number of times."""
    install_from_environment()
