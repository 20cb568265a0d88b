"""Loading is strict: each tensor is used once or it is an error that names it; the head never touches the trunk."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from metrale.errors import ConfigError
from metrale.kernels.ops import Ops
from metrale.model import loader
from metrale.model.loader import load_model, resolve
from tests.model.checkpoints import copy_with_mtp, digest, edit_config, edit_tensors, tensors_of
from tests.model.conftest import Saved

NORM = "model.layers.1.input_layernorm.weight"
FC = "mtp.fc.weight"


@pytest.fixture
def dense(tmp_path: Path, saved: Callable[..., Saved]) -> Path:
    """A copy of an untied dense checkpoint, free to edit."""
    return shutil.copytree(saved("qwen3_5_text").directory, tmp_path / "dense")


def trunk_digest(directory: Path, ops: Ops, **options: Any) -> str:
    return digest(load_model(directory, ops, **options).model.weights)


# Every tensor is accounted for


@pytest.mark.parametrize("name", [NORM, "lm_head.weight", "model.layers.3.self_attn.k_proj.weight"])
def test_missing(dense: Path, ops: Ops, name: str) -> None:
    edit_tensors(dense, drop=(name,))
    with pytest.raises(ConfigError, match=f"missing {name}"):
        load_model(dense, ops)


def test_unexpected(dense: Path, ops: Ops) -> None:
    edit_tensors(dense, add={"model.layers.4.extra": torch.zeros(1)})
    with pytest.raises(ConfigError, match=r"unexpected model\.layers\.4\.extra"):
        load_model(dense, ops)


def test_renamed(dense: Path, ops: Ops) -> None:
    edit_tensors(dense, add={"model.layers.1.in_norm.weight": torch.zeros(40)}, drop=(NORM,))
    with pytest.raises(ConfigError, match=rf"missing {NORM}; unexpected model\.layers\.1\.in_norm\.weight"):
        load_model(dense, ops)


def test_wrong_shape(dense: Path, ops: Ops) -> None:
    edit_tensors(dense, add={NORM: torch.zeros(41)})
    with pytest.raises(ConfigError, match=rf"{NORM} has the wrong shape: expected \[40\], got \[41\]"):
        load_model(dense, ops)


def test_duplicate(dense: Path, ops: Ops) -> None:
    twin = NORM.replace("model.", "model.language_model.")
    edit_tensors(dense, add={twin: torch.zeros(40)})
    with pytest.raises(ConfigError, match=rf"{NORM} stands twice"):
        load_model(dense, ops)


def test_quantised_tensor(dense: Path, ops: Ops) -> None:
    edit_tensors(dense, add={NORM: torch.zeros(40, dtype=torch.int8)})
    with pytest.raises(ConfigError, match=f"{NORM} is stored as I8"):
        load_model(dense, ops)


def test_ignore_list(dense: Path, ops: Ops) -> None:
    """Rotary buffers are dropped; a vision tower is, but only where config.json has one."""
    expected = trunk_digest(dense, ops)
    edit_tensors(dense, add={"model.rotary_emb.inv_freq": torch.zeros(6)})
    assert trunk_digest(dense, ops) == expected
    edit_tensors(dense, add={"model.visual.merger.weight": torch.zeros(6)})
    with pytest.raises(ConfigError, match=r"unexpected model\.visual\.merger\.weight"):
        load_model(dense, ops)
    raw = json.loads((dense / "config.json").read_text())
    (dense / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": raw}))
    assert trunk_digest(dense, ops) == expected


# The head


def test_trunk_is_the_same_with_and_without_head(
    dense_with_mtp: Path, saved: Callable[..., Saved], ops: Ops
) -> None:
    bare = trunk_digest(saved("qwen3_5_text", tie_word_embeddings=True).directory, ops)
    assert trunk_digest(dense_with_mtp, ops) == bare
    assert trunk_digest(dense_with_mtp, ops, with_mtp=True) == bare
    assert load_model(dense_with_mtp, ops).head is None


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_next"])
def test_broken_head(
    model_type: str, with_mtp: bool, tmp_path: Path, saved: Callable[..., Saved], ops: Ops
) -> None:
    """A dropped, renamed or added `mtp.*` tensor is an error, whether the head is wanted or not."""
    directory = copy_with_mtp(saved(model_type).directory, tmp_path / "mtp")
    tensors = load_file(directory / "model.safetensors")
    for name in [FC, "mtp.layers.0.self_attn.q_norm.weight"]:
        edit_tensors(directory, drop=(name,))
        with pytest.raises(ConfigError, match=f"missing {name}"):
            load_model(directory, ops, with_mtp=with_mtp)
        edit_tensors(directory, add={f"{name}s": tensors[name]})
        with pytest.raises(ConfigError, match=f"missing {name}; unexpected {name}s"):
            load_model(directory, ops, with_mtp=with_mtp)
        edit_tensors(directory, add={name: tensors[name]})
        with pytest.raises(ConfigError, match=f"unexpected {name}s"):
            load_model(directory, ops, with_mtp=with_mtp)
        edit_tensors(directory, drop=(f"{name}s",))
    edit_tensors(directory, add={FC: torch.zeros(40, 40)})
    with pytest.raises(ConfigError, match=rf"{FC} has the wrong shape: expected \[40, 80\], got \[40, 40\]"):
        load_model(directory, ops, with_mtp=with_mtp)


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_announced_but_absent(dense: Path, ops: Ops, key: str) -> None:
    expected = trunk_digest(dense, ops)
    edit_config(dense, **{key: 1})
    assert trunk_digest(dense, ops) == expected
    with pytest.raises(
        ConfigError, match=r"holds no mtp\.\* tensor \(its config\.json announces an MTP head\)"
    ):
        load_model(dense, ops, with_mtp=True)


def test_asked_for_but_not_announced(dense: Path, ops: Ops) -> None:
    with pytest.raises(
        ConfigError, match=r"holds no mtp\.\* tensor \(its config\.json announces no MTP head\)"
    ):
        load_model(dense, ops, with_mtp=True)


def test_present_but_unsaid_or_denied(dense_with_mtp: Path, ops: Ops) -> None:
    edit_config(dense_with_mtp, mtp_num_hidden_layers=None)
    assert load_model(dense_with_mtp, ops, with_mtp=True).head is not None
    edit_config(dense_with_mtp, mtp_num_hidden_layers=0)
    with pytest.raises(
        ConfigError, match=r"holds mtp\..*, but config\.json announces an MTP head of 0 layers"
    ):
        load_model(dense_with_mtp, ops)


# Layouts


def test_tied_head_may_be_stored(dense_with_mtp: Path, ops: Ops) -> None:
    expected = trunk_digest(dense_with_mtp, ops)
    embed = load_file(dense_with_mtp / "model.safetensors")["model.embed_tokens.weight"]
    edit_tensors(dense_with_mtp, add={"lm_head.weight": embed.clone()})
    weights = load_model(dense_with_mtp, ops).model.weights
    assert weights.lm_head is weights.embed
    assert digest(weights) == expected
    edit_tensors(dense_with_mtp, add={"lm_head.weight": embed + 1})
    with pytest.raises(ConfigError, match=r"ties the output head.*lm_head\.weight differs"):
        load_model(dense_with_mtp, ops)


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_next"])
def test_fused_experts(model_type: str, tmp_path: Path, saved: Callable[..., Saved], ops: Ops) -> None:
    source = saved(model_type).directory
    directory = shutil.copytree(source, tmp_path / "fused")
    tensors = load_file(directory / "model.safetensors")
    alone = [name for name in tensors if ".experts." in name]
    assert len(alone) == 4 * 6 * 3
    fused = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{n}.{part}_proj.weight"] for n in range(6)])
            for part in ("gate", "up", "down")
        )
        fused[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"{prefix}.down_proj"] = down
    edit_tensors(directory, add=fused, drop=tuple(alone))
    assert trunk_digest(directory, ops) == trunk_digest(source, ops)
    # In the other orientation, as some earlier families store them, they are refused and not guessed at.
    edit_tensors(directory, add={k: v.transpose(1, 2).contiguous() for k, v in fused.items()})
    with pytest.raises(
        ConfigError, match=r"gate_up_proj has the wrong shape: expected \[6, 48, 40\], got \[6, 40, 48\]"
    ):
        load_model(directory, ops)


def test_shards(tmp_path: Path, saved: Callable[..., Saved], ops: Ops) -> None:
    source = saved("qwen3_next")
    source.oracle.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert trunk_digest(tmp_path, ops) == trunk_digest(source.directory, ops)

    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = tmp_path / index["weight_map"][NORM]
    tensors = load_file(shard)
    save_file({**tensors, "model.embed_tokens.weight": torch.zeros(101, 40)}, shard)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight stands twice"):
        load_model(tmp_path, ops)
    save_file({**tensors, "model.stray": torch.zeros(1)}, shard)
    with pytest.raises(ConfigError, match=r"holds tensor model\.stray, which .* does not list"):
        load_model(tmp_path, ops)
    save_file({k: v for k, v in tensors.items() if k != NORM}, shard)
    with pytest.raises(ConfigError, match=f"lists tensors that no shard holds: {NORM}"):
        load_model(tmp_path, ops)
    shard.unlink()
    with pytest.raises(ConfigError, match=f"{shard.name} cannot be read as safetensors"):
        load_model(tmp_path, ops)
    index["weight_map"][NORM] = "../elsewhere.safetensors"
    index_path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="is not a file name"):
        load_model(tmp_path, ops)


def test_no_tensors(dense: Path, ops: Ops) -> None:
    (dense / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        load_model(dense, ops)
    (dense / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        load_model(dense, ops)


# Dtypes, limits


@pytest.mark.parametrize(
    ("stored", "keeps", "expected"),
    [
        (torch.bfloat16, True, torch.bfloat16),
        (torch.bfloat16, False, torch.float32),
        (torch.float16, True, torch.float32),
        (torch.float32, True, torch.float32),
    ],
)
def test_weight_dtype(dense: Path, ops: Ops, stored: torch.dtype, keeps: bool, expected: torch.dtype) -> None:
    path = dense / "model.safetensors"
    tensors = {name: tensor.to(stored) for name, tensor in load_file(path).items()}
    save_file(tensors, path)
    weights = load_model(dense, dataclasses.replace(ops, keeps_weight_dtype=keeps)).model.weights
    for tensor in tensors_of(weights):
        # The convolution's taps are float32 like every other small tensor.
        small = tensor.ndim == 1 or tensor.shape[1] == 4
        assert tensor.dtype == (torch.float32 if small else expected)
        assert tensor.is_contiguous()
    assert torch.equal(weights.embed, tensors["model.embed_tokens.weight"].to(expected))
    assert torch.equal(weights.norm, 1 + tensors["model.norm.weight"].float())


def test_bad_arguments(dense: Path, ops: Ops) -> None:
    with pytest.raises(
        ConfigError, match="dtype float16: the torch backend computes activations in float32, bfloat16"
    ):
        load_model(dense, ops, dtype=torch.float16)
    with pytest.raises(ConfigError, match="max_positions 513 is outside 1 to 512"):
        load_model(dense, ops, max_positions=513)
    assert load_model(dense, ops, max_positions=70).model.rotary.cos.shape == (70, 6)


# Names of models


def test_resolve_directory(dense: Path, tmp_path: Path) -> None:
    assert resolve(str(dense)) == dense
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="no such model: there is no directory '/no/such/place'"):
        resolve("/no/such/place")


def test_resolve_tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "__file__", str(tmp_path / "loader.py"))
    with pytest.raises(ConfigError, match="carries no 'tiny' checkpoint"):
        resolve("tiny")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve("tiny") == tmp_path / "tiny"


def test_resolve_hub(monkeypatch: pytest.MonkeyPatch, dense: Path, tmp_path: Path) -> None:
    asked = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options["allow_patterns"]))
        if repository == "someone/absent":
            raise OSError("404 not found\nmore lines")
        return str(dense if repository == "someone/model" else tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("someone/model") == dense
    assert asked[0][0] == "someone/model"
    assert "*.safetensors" in asked[0][1]
    with pytest.raises(ConfigError, match=r"'someone/absent' is neither.*\(404 not found\)$"):
        resolve("someone/absent")
    with pytest.raises(ConfigError, match=r"repository 'someone/empty' holds no config\.json"):
        resolve("someone/empty")
