"""The operators as C kernels for a CPU: the `cpu` backend, compiled once by the machine's own compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from metrale.kernels.ops import Ops


def is_available() -> bool:
    """Whether this machine can compile the kernels: a C compiler, 64-bit pointers, little-endian words."""
    from metrale.native.build import is_available

    return is_available()


def ops() -> Ops:
    """The table of the `cpu` backend. Compiles the kernels at the first call; ConfigError where that fails."""
    from metrale.native.table import ops

    return ops()
