"""From a backend's name to its table of operators."""

from __future__ import annotations

from metrale.config import c_compiler
from metrale.errors import ConfigError
from metrale.kernels.ops import Ops


def backend_ops(name: str) -> Ops:
    """The operators of backend `name`; "auto" is "cpu" where a C compiler is found or CC names one, "torch"
    elsewhere."""
    from metrale import native, reference

    if name == "torch" or (name == "auto" and not native.is_available() and c_compiler() is None):
        return reference.ops()
    if name not in ("auto", "cpu"):
        raise ConfigError(f"unknown backend {name!r}")
    return native.ops()
