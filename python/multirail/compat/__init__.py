"""Other libraries' interfaces on multirail: :mod:`multirail.compat.nixl` and :mod:`multirail.compat.mooncake`.

A program that imports them under their own names runs unchanged after :func:`install`. vLLM and SGLang call it by
themselves if the environment variable ``MULTIRAIL_COMPAT`` names the interfaces: ``nixl``, or ``nixl,mooncake``.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import sys
import types

__all__ = ["VARIABLE", "install", "install_from_environment"]

#: Names the interfaces that `install_from_environment` installs, with commas between them.
VARIABLE = "MULTIRAIL_COMPAT"

_NIXL_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_MARK = "__multirail_compat__"

logger = logging.getLogger("multirail.compat")


def install(nixl: bool = True, mooncake: bool = False, *, force: bool = False) -> None:
    """Puts the interfaces where ``nixl._api`` and ``mooncake.engine`` are imported from, for the rest of the process.

    Call it before anything imports the real packages. Raises `RuntimeError` if one of them is imported already; `force`
    replaces it, but modules that hold the real one keep it.
    """
    real = [name for name in _NIXL_PACKAGES if nixl and not _is_ours_or_absent(name)]
    if mooncake and not _is_ours_or_absent("mooncake"):
        real.append("mooncake")
    if real and not force:
        raise RuntimeError(
            f"the real {' and '.join(real)} is imported already: call multirail.compat.install() before its first "
            "import, or pass force=True to replace it for imports from now on"
        )
    if nixl:
        _install_nixl()
    if mooncake:
        _remove("mooncake")
        from . import mooncake as engine

        engine.install_modules()
        if "mooncake" in sys.modules:
            setattr(sys.modules["mooncake"], _MARK, True)


def install_from_environment() -> None:
    """Installs the interfaces that ``MULTIRAIL_COMPAT`` names, and says so once in the log. Does nothing without it.

    Raises `ValueError` for a name that is unknown.
    """
    wanted = set(os.environ.get(VARIABLE, "").replace(",", " ").split())
    unknown = wanted - {"nixl", "mooncake"}
    if unknown:
        raise ValueError(f"{VARIABLE}: {', '.join(sorted(unknown))} is unknown; give nixl, mooncake, or both")
    missing = {name for name in wanted if not getattr(sys.modules.get(name), _MARK, False)}
    if not missing:
        return
    install(nixl="nixl" in missing, mooncake="mooncake" in missing)
    text = f"multirail serves {' and '.join(sorted(missing))} in process {os.getpid()} ({VARIABLE})"
    logger.warning(text)


def _is_ours_or_absent(package: str) -> bool:
    module = sys.modules.get(package)
    return module is None or getattr(module, _MARK, False)


def _remove(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _install_nixl() -> None:
    from . import nixl as api
    from .nixl import _bindings as bindings

    for package in _NIXL_PACKAGES:
        _remove(package)
        parent = _module(package, api, is_package=True)
        for name, content in (("_api", api), ("_bindings", bindings)):
            child = _module(f"{package}.{name}", content, is_package=False)
            setattr(parent, name, child)


def _module(name: str, content: types.ModuleType, *, is_package: bool) -> types.ModuleType:
    """A module under a foreign name. The spec lets `importlib.util.find_spec` find it."""
    module = types.ModuleType(name, content.__doc__)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
    if is_package:
        module.__path__ = []
    module.__dict__.update({key: value for key, value in vars(content).items() if not key.startswith("_")})
    setattr(module, _MARK, True)
    sys.modules[name] = module
    return module
