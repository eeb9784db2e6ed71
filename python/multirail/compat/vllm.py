"""vLLM's plug-in: serves NIXL and Mooncake by multirail in every process of vLLM, if ``MULTIRAIL_COMPAT`` says so.

vLLM calls :func:`register` by the entry point group ``vllm.general_plugins``.
"""

from __future__ import annotations

from . import install_from_environment

__all__ = ["register"]


def register() -> None:
    """Installs what ``MULTIRAIL_COMPAT`` names; nothing without it. May be called any number of times."""
    install_from_environment()
