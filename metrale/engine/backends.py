"""From a backend's name to its table of operators."""

from __future__ import annotations

from metrale.errors import ConfigError
from metrale.kernels.ops import Ops


def backend_ops(name: str) -> Ops:
    """The operators of backend `name`; "auto" is "cpu" where a C compiler is found, "torch" elsewhere."""
    from metrale import native, reference

    if name == "torch" or (name == "auto" and not native.is_available()):
        return reference.ops()
    if name not in ("auto", "cpu"):
        raise ConfigError(f"unknown backend {name!r}")
    return native.ops()
