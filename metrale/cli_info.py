"""`metrale info`: a checkpoint's description as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from metrale.engine.describe import Description


def table(found: Description) -> Table:
    """What the checkpoint holds, then what it costs."""
    out = Table(show_header=False)
    out.add_column("what")
    out.add_column("value")
    for what, value in (_holds(found) | {"": ""} | _costs(found)).items():
        out.add_row(what, escape(value))
    return out


def _holds(found: Description) -> dict[str, str]:
    experts = f", {found.num_experts} experts" if found.num_experts else ""
    mtp = f"yes, {found.num_mtp_parameters:,} parameters" if found.has_mtp_head else "no"
    kinds = f"{found.num_gdn_layers} Gated DeltaNet, {found.num_attention_layers} attention"
    end = ", ".join(map(str, found.eos_token_ids)) or "none"
    tokenizer = f"{found.num_tokenizer_ids:,} ids" if found.num_tokenizer_ids else "none, token ids only"
    return {
        "checkpoint": found.directory,
        "family": f"{found.family}{experts}",
        "layers": f"{found.num_layers}: {kinds}",
        "hidden size": f"{found.hidden_size:,}",
        "parameters": f"{found.num_parameters:,}",
        "MTP head": mtp,
        "stored as": ", ".join(f"{count} tensors {dtype}" for dtype, count in found.dtypes.items()),
        "tokenizer": tokenizer + (", with a chat template" if found.has_chat_template else ""),
        "vocabulary": f"{found.vocab_size:,} ids, end of text: {end}",
        "context": f"{found.context_length:,} tokens",
    }


def _costs(found: Description) -> dict[str, str]:
    drafts = f"{found.num_speculative_tokens} drafts"
    many = f"{found.max_num_seqs} x {found.max_model_len:,} tokens"
    return {
        "weights": size(found.weight_bytes),
        "state a sequence": f"{size(found.state_bytes_per_sequence)} at {drafts}",
        "keys and values a token": size(found.kv_bytes_per_token),
        "states, all sequences": f"{size(found.total_state_bytes)} at {found.max_num_seqs} sequences",
        "keys and values, all": f"{size(found.total_kv_bytes)} at {many}",
        "total": size(found.total_bytes),
    }


def size(num_bytes: int) -> str:
    """Bytes with a binary unit: 9.4 MiB."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
