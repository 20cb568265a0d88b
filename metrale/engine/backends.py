"""From a backend's name to its table of operators."""

from __future__ import annotations

import torch

from metrale.config import c_compiler
from metrale.errors import ConfigError
from metrale.kernels.ops import Ops


def backend_ops(name: str, device: str = "auto") -> Ops:
    """The operators of backend `name` for `device`.

    "auto" is "triton" where there is a GPU (and `device` is not "cpu"), "cpu" where a C compiler is found or CC names one,
    "torch" elsewhere. Raises ConfigError where the backend does not run on the device, or not at all.
    """
    if name == "auto":
        name = _best(device)
    ops = _table(name)
    if device not in ("auto", ops.device_type):
        raise ConfigError(f"backend {name!r} runs on device {ops.device_type!r}, not on {device!r}")
    return ops


def _best(device: str) -> str:
    from metrale import native

    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return "triton"
    return "cpu" if native.is_available() or c_compiler() is not None else "torch"


def _table(name: str) -> Ops:
    if name == "torch":
        from metrale import reference

        return reference.ops()
    if name == "cpu":
        from metrale import native

        return native.ops()
    if name in ("triton", "interpret"):
        try:
            from metrale.kernels.table import ops
        except ImportError as error:
            raise ConfigError(f"backend {name!r} needs the package triton ({error})") from error

        return ops(name)
    raise ConfigError(f"unknown backend {name!r}")
