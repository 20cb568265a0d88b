"""From what a user calls a model to a model in memory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import torch

from metrale.errors import ConfigError
from metrale.kernels.ops import Ops
from metrale.model.checkpoint import Checkpoint
from metrale.model.config import ModelConfig
from metrale.model.decoder import HybridModel
from metrale.model.layout import MTP_PREFIX, Shapes, mtp_shapes, renamer, trunk_shapes
from metrale.model.mtp import MtpHead
from metrale.model.weights import WeightReader

TINY = "tiny"
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "*.txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class LoadedModel(NamedTuple):
    """A target and its MTP head, None where the head was not asked for; `has_mtp_tensors` whether it could have been."""

    model: HybridModel
    head: MtpHead | None
    has_mtp_tensors: bool


def resolve(model: str) -> Path:
    """The checkpoint directory that `model` names.

    "tiny" is the checkpoint in the package; a directory is itself; anything else is asked of the Hub.
    ConfigError, in one sentence, where none of these has a checkpoint.
    """
    if model == TINY:
        directory = Path(__file__).parent / TINY
        if not (directory / "config.json").is_file():
            raise ConfigError("this installation carries no 'tiny' checkpoint; name a directory or a Hub id")
        return directory
    directory = Path(model).expanduser()
    if directory.exists():
        if not (directory / "config.json").is_file():
            raise ConfigError(f"{directory} holds no config.json, so it is not a checkpoint directory")
        return directory
    if not _HUB_ID.fullmatch(model):
        raise ConfigError(f"no such model: there is no directory '{model}', and it cannot be a Hub id")
    return _download(model)


def _download(repository: str) -> Path:
    # Imported late: the Hub client is slow to import, and a local model never needs it.
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(repository, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"])
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ConfigError(
            f"no such model: '{repository}' is neither a local directory nor a Hub repository within reach "
            f"({reason})"
        ) from error
    directory = Path(snapshot)
    if not (directory / "config.json").is_file():
        raise ConfigError(f"the Hub repository '{repository}' holds no config.json")
    return directory


def load_model(
    directory: Path,
    ops: Ops,
    *,
    dtype: torch.dtype | None = None,
    weight_dtype: torch.dtype | None = None,
    with_mtp: bool = False,
    max_positions: int | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """The model in a checkpoint directory, each parameter filled once and each tensor accounted for.

    Args:
        directory: from `resolve`.
        ops: the backend's operators.
        dtype: activation dtype, one that the operators list; None: the first.
        weight_dtype: dtype of the big matrices; None: as stored where the operators keep it (float16 becomes
            float32, which holds it exactly), the activation dtype elsewhere.
        with_mtp: load the MTP head too. Its tensors are checked by name and shape in any case.
        max_positions: the longest sequence in tokens; None: what config.json says.
        device: where the tensors go.

    Raises ConfigError that names the field or the tensor at fault.
    """
    config = ModelConfig.from_directory(directory)
    _check_limits(config, ops)
    dtype = _activation_dtype(ops, dtype)
    max_positions = config.max_position_embeddings if max_positions is None else max_positions
    if not 1 <= max_positions <= config.max_position_embeddings:
        raise ConfigError(
            f"max_positions {max_positions} is outside 1 to {config.max_position_embeddings}, "
            "the max_position_embeddings of config.json"
        )
    with Checkpoint(directory, renamer(config)) as checkpoint:
        trunk, head = _expected_shapes(config, checkpoint, with_mtp)
        checkpoint.check(trunk | head)
        if weight_dtype is None:
            weight_dtype = stored_dtype(checkpoint, trunk | head) if ops.keeps_weight_dtype else dtype
        reader = WeightReader(checkpoint, config, weight_dtype, torch.device(device))
        model = HybridModel(config, reader.trunk(), ops, max_positions, dtype)
        mtp = MtpHead(config, reader.mtp(), model) if with_mtp else None
        unread = [name for name in checkpoint.untaken if with_mtp or name not in head]
        if unread:
            raise AssertionError(f"tensors expected but never read: {unread}")
    return LoadedModel(model, mtp, has_mtp_tensors=bool(head))


def _expected_shapes(config: ModelConfig, checkpoint: Checkpoint, with_mtp: bool) -> tuple[Shapes, Shapes]:
    """(trunk, head) shapes; the head's are empty where the checkpoint has none and none is asked for."""
    trunk = trunk_shapes(config, checkpoint.tensors)
    has_mtp = any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)
    if with_mtp and not has_mtp:
        says = "announces an MTP head" if config.num_mtp_layers else "announces no MTP head"
        raise ConfigError(
            f"the MTP head was asked for, but the checkpoint in {checkpoint.directory} holds no "
            f"{MTP_PREFIX}* tensor (its config.json {says}); use another drafter or none"
        )
    if has_mtp and config.num_mtp_layers == 0:
        name = next(name for name in checkpoint.tensors if name.startswith(MTP_PREFIX))
        raise ConfigError(f"the checkpoint holds {name}, but config.json announces an MTP head of 0 layers")
    return trunk, mtp_shapes(config, checkpoint.tensors) if has_mtp else {}


def _check_limits(config: ModelConfig, ops: Ops) -> None:
    if not config.num_gdn_layers:
        return
    for name, size, most in (
        ("linear_key_head_dim", config.linear_key_head_dim, ops.max_key_dim),
        ("linear_conv_kernel_dim", config.linear_conv_kernel_dim, ops.max_conv_width),
    ):
        if most is not None and size > most:
            raise ConfigError(
                f"config.json: {name} {size} is above {most}, the most that the {ops.name} backend can run; "
                "use another backend"
            )


def _activation_dtype(ops: Ops, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return ops.activation_dtypes[0]
    if dtype not in ops.activation_dtypes:
        asked, *known = (str(d).removeprefix("torch.") for d in (dtype, *ops.activation_dtypes))
        raise ConfigError(
            f"dtype {asked}: the {ops.name} backend computes activations in {', '.join(known)}; "
            "use one of these, or another backend"
        )
    return dtype


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one of the big matrices, which alone may be kept in bfloat16."""
    return len(shape) > 1 and not name.endswith("conv1d.weight")


def stored_dtype(checkpoint: Checkpoint, shapes: Shapes) -> torch.dtype:
    """bfloat16 where every matrix is stored so, float32 (which holds all three dtypes exactly) elsewhere."""
    dtypes = {checkpoint.dtype(name) for name, shape in shapes.items() if is_matrix(name, shape)}
    return torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
