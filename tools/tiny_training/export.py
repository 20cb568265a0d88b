"""Writing and reading the checkpoint directory."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tiny_training.config import END_OF_TEXT, SPECIAL_TOKENS, TinyConfig
from tiny_training.network import Network


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def export(network: Network, tokenizer: Tokenizer, out: Path) -> None:
    """Write config, weights in bfloat16 and tokenizer into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    config = network.config
    write_json(out / "config.json", config.to_json())
    write_json(out / "generation_config.json", {"eos_token_id": END_OF_TEXT, "do_sample": False})
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
        },
    )
    tokenizer.save(str(out / "tokenizer.json"))
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous() for name, value in network.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def load(directory: Path) -> tuple[Network, Tokenizer]:
    """The exported network, its bfloat16 weights widened to float32, and its tokenizer."""
    config = TinyConfig.from_json(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    network = Network(config)
    tensors = load_file(directory / "model.safetensors")
    network.load_state_dict({name: value.float() for name, value in tensors.items()})
    return network, Tokenizer.from_file(str(directory / "tokenizer.json"))
