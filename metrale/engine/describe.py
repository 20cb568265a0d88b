"""What a checkpoint holds and what it costs in memory, from config.json and the tensors' headers alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

from metrale.engine.tokenizer import Tokenizer
from metrale.errors import ConfigError
from metrale.model.checkpoint import DTYPES, Checkpoint
from metrale.model.config import ModelConfig
from metrale.model.generation import GenerationDefaults
from metrale.model.layout import LM_HEAD, MTP_PREFIX, Shapes, mtp_shapes, renamer, trunk_shapes
from metrale.model.loader import is_matrix, resolve, stored_dtype
from metrale.state.pool import PAGE_SIZE

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Description:
    """A checkpoint in figures. Bytes are those of the `cpu` backend: matrices as it loads them, all else in float32.

    `state_bytes_per_sequence` and `kv_bytes_per_token` are what a running sequence holds, the MTP head's keys
    and values included; the totals are those of `max_num_seqs` sequences of `max_model_len` tokens.
    """

    directory: str
    family: str
    num_layers: int
    num_gdn_layers: int
    num_attention_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    num_parameters: int
    num_mtp_parameters: int
    num_experts: int
    dtypes: dict[str, int]
    num_tokenizer_ids: int | None
    has_chat_template: bool
    has_mtp_head: bool
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    state_bytes_per_sequence: int
    kv_bytes_per_token: int
    max_num_seqs: int
    max_model_len: int
    num_speculative_tokens: int
    total_state_bytes: int
    total_kv_bytes: int
    total_bytes: int


def describe(
    model: str, max_num_seqs: int, max_model_len: int | None, num_speculative_tokens: int, fold_threshold: int
) -> Description:
    """Reads a checkpoint's headers, checks them as loading would, and does the sums.

    Args:
        model: "tiny", a directory or a Hub id.
        max_num_seqs: sequences that run at once.
        max_model_len: tokens of a sequence; None: the model's context.
        num_speculative_tokens: drafts of a step, on which the lengths of the rings depend.
        fold_threshold: pending rows that a state may carry, on which the lengths of the rings depend too.

    Raises ConfigError where there is no such checkpoint or where it could not be loaded.
    """
    directory = resolve(model)
    config = ModelConfig.from_directory(directory)
    length = config.max_position_embeddings if max_model_len is None else max_model_len
    if max_num_seqs < 1 or num_speculative_tokens < 0:
        raise ConfigError("max_num_seqs must be at least 1, and num_speculative_tokens at least 0")
    if not 1 <= length <= config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len {length} is outside 1 to {config.max_position_embeddings}, the model's context"
        )
    with Checkpoint(directory, renamer(config)) as checkpoint:
        trunk = trunk_shapes(config, checkpoint.tensors)
        has_mtp = any(name.startswith(MTP_PREFIX) for name in checkpoint.tensors)
        head: Shapes = mtp_shapes(config, checkpoint.tensors) if has_mtp else {}
        checkpoint.check(trunk | head)
        tensors = checkpoint.tensors
        matrix_bytes = stored_dtype(checkpoint, trunk | head).itemsize
        weight_bytes = sum(
            prod(shape) * (matrix_bytes if is_matrix(name, shape) else FLOAT32_BYTES)
            for name, shape in (trunk | head).items()
            if not (config.tie_word_embeddings and name == LM_HEAD)
        )
        dtypes = Counter(t.dtype for t in tensors.values())
    has_tokenizer = (directory / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_directory(directory) if has_tokenizer else None
    state = config.state_bytes_per_slot(
        itemsize=FLOAT32_BYTES, max_rows=num_speculative_tokens + 1, fold_threshold=fold_threshold
    )
    kv = config.kv_bytes_per_token(itemsize=FLOAT32_BYTES, with_mtp=has_mtp)
    total_state = max_num_seqs * state
    total_kv = max_num_seqs * -(-length // PAGE_SIZE) * PAGE_SIZE * kv
    return Description(
        directory=str(directory),
        family=config.family,
        num_layers=config.num_hidden_layers,
        num_gdn_layers=config.num_gdn_layers,
        num_attention_layers=config.num_attention_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        num_parameters=sum(prod(shape) for shape in trunk.values()),
        num_mtp_parameters=sum(prod(shape) for shape in head.values()),
        num_experts=config.num_experts,
        dtypes={str(DTYPES[name]).removeprefix("torch."): count for name, count in dtypes.items()},
        num_tokenizer_ids=None if tokenizer is None else tokenizer.num_ids,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
        has_mtp_head=has_mtp,
        eos_token_ids=GenerationDefaults.from_directory(directory, config).eos_token_ids,
        weight_bytes=weight_bytes,
        state_bytes_per_sequence=state,
        kv_bytes_per_token=kv,
        max_num_seqs=max_num_seqs,
        max_model_len=length,
        num_speculative_tokens=num_speculative_tokens,
        total_state_bytes=total_state,
        total_kv_bytes=total_kv,
        total_bytes=weight_bytes + total_state + total_kv,
    )
