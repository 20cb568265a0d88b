"""Held-out loss, agreement of head and trunk on real text, and acceptance of drafts in generated text."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tiny_training.chain import unroll
from tiny_training.corpus import Document, Tokens, encode, held_out_windows
from tiny_training.decode import generate
from tiny_training.export import load, write_json
from tiny_training.network import Network

WINDOW = 512
DEPTH = 4
NUM_PROMPTS, PROMPT_LENGTH, NUM_GENERATED = 48, 128, 192
AGREEMENT_EVERY = 3


@torch.no_grad()
def text_figures(network: Network, ids: np.ndarray) -> dict[str, Any]:
    """Nats per token, and the share of drafts 1 .. DEPTH whose argmax is the trunk's, over windows of real text.

    Agreement is measured on every AGREEMENT_EVERY-th batch of windows: chains cost more than the loss.
    """
    nats, late_nats, agreed, count, late_count, roots = 0.0, 0.0, np.zeros(DEPTH), 0, 0, 0
    for index, rows in enumerate(torch.from_numpy(held_out_windows(ids, WINDOW + 1)).split(8)):
        hidden = network.trunk(rows[:, :-1])
        log_probs = (hidden @ network.unembedding.T).log_softmax(-1)
        losses = -log_probs.gather(-1, rows[:, 1:, None])[..., 0]
        nats, count = nats + losses.sum().item(), count + losses.numel()
        late = losses[:, WINDOW // 2 :]
        late_nats, late_count = late_nats + late.sum().item(), late_count + late.numel()
        if index % AGREEMENT_EVERY:
            continue
        best = log_probs.argmax(-1)
        num_roots = WINDOW - DEPTH
        roots += len(rows) * num_roots
        for step, output in enumerate(unroll(network, hidden[:, :num_roots], rows, DEPTH)):
            drafts = (output @ network.unembedding.T).argmax(-1)
            agreed[step] += (drafts == best[:, 1 + step : 1 + step + num_roots]).sum().item()
    return {
        "tokens": count,
        "nats_per_token": nats / count,
        "nats_per_token_second_half_of_window": late_nats / late_count,
        "agreement": (agreed / roots).tolist(),
    }


def held_out_figures(network: Network, tokens: Tokens, documents: list[Document]) -> dict[str, Any]:
    """text_figures of the held-out library files, of the held-out tests, and of both by token count."""
    figures = {}
    for name, ids, is_test in (
        ("library", tokens.held_out_library, False),
        ("tests", tokens.held_out_tests, True),
    ):
        figures[name] = text_figures(network, ids)
        chars = sum(len(doc.text) for doc in documents if doc.is_held_out and doc.is_test == is_test)
        figures[name]["chars_per_token"] = chars / len(ids)
    shares = np.array([figures[name]["tokens"] for name in ("library", "tests")], dtype=float)
    both: dict[str, Any] = {"tokens": int(shares.sum())}
    for key in ("nats_per_token", "nats_per_token_second_half_of_window", "chars_per_token", "agreement"):
        values = np.array([figures[name][key] for name in ("library", "tests")])
        both[key] = np.average(values, axis=0, weights=shares).tolist()
    for part in (both, *figures.values()):
        part["bits_per_char"] = part["nats_per_token"] / math.log(2) / part["chars_per_token"]
    return {"all": both, **figures}


def walk(matches: np.ndarray, depth: int) -> tuple[list[int], list[int], np.ndarray]:
    """Follow the rounds of speculative decoding through matches [N, R, >= depth], whose entry (n, t, s) says whether
    draft s of root t would be accepted if its forerunners were.

    Returns how many drafts of each position were judged, how many accepted, and which (n, t) were rounds [N, R].
    """
    judged, accepted = [0] * depth, [0] * depth
    is_round = np.zeros(matches.shape[:2], dtype=bool)
    for row in range(len(matches)):
        root = 0
        while root < matches.shape[1]:
            is_round[row, root] = True
            num_accepted = 0
            while num_accepted < depth:
                judged[num_accepted] += 1
                if not matches[row, root, num_accepted]:
                    break
                accepted[num_accepted] += 1
                num_accepted += 1
            root += num_accepted + 1
    return judged, accepted, is_round


@torch.no_grad()
def generated_figures(network: Network, prompts: Tensor, temperature: float, seed: int) -> dict[str, Any]:
    """Acceptance in text that the trunk generates: a draft is accepted when it equals the trunk's pick.

    Both pick argmax(logits / T + Gumbel noise), and share the noise of a position; temperature 0 picks the argmax.
    """
    vocab = network.config.vocab_size
    generator = torch.Generator().manual_seed(seed)
    noise = None
    if temperature > 0:
        uniform = torch.rand(NUM_GENERATED, len(prompts), vocab, generator=generator).clamp_(1e-20, 1 - 6e-8)
        noise = uniform.log_().neg_().log_().neg_()

    def pick(logits: Tensor, position: int) -> Tensor:
        if noise is None:
            return logits.argmax(-1)
        return (logits / temperature + noise[position - PROMPT_LENGTH]).argmax(-1)

    ids = generate(network, prompts, NUM_GENERATED, pick)
    first = PROMPT_LENGTH - 1  # the first root: its next token is the first generated one
    num_roots = ids.shape[1] - DEPTH - 1 - first
    hidden = network.trunk(ids)
    matches = np.zeros((len(ids), num_roots, DEPTH), dtype=bool)
    overlap = np.zeros((len(ids), num_roots, DEPTH))
    for step, output in enumerate(unroll(network, hidden[:, : first + num_roots], ids, DEPTH)):
        for offset in range(num_roots):
            root = first + offset
            position = root + 2 + step
            draft_logits = output[:, root] @ network.unembedding.T
            matches[:, offset, step] = (pick(draft_logits, position) == ids[:, position]).numpy()
            if temperature > 0:
                q = (draft_logits / temperature).softmax(-1)
                p = (hidden[:, position - 1] @ network.unembedding.T / temperature).softmax(-1)
                overlap[:, offset, step] = torch.minimum(p, q).sum(-1).numpy()
    judged, accepted, _ = walk(matches, DEPTH)
    figures: dict[str, Any] = {
        "acceptance": [hits / max(tries, 1) for hits, tries in zip(accepted, judged, strict=True)],
        "tokens_per_step": [],
    }
    for depth in range(1, DEPTH + 1):
        _, accepted, is_round = walk(matches, depth)
        figures["tokens_per_step"].append(1 + sum(accepted) / int(is_round.sum()))
    if temperature > 0:
        reached = np.concatenate((np.ones_like(matches[..., :1]), matches[..., :-1].cumprod(-1)), axis=-1)
        figures["rejection_sampling_acceptance"] = (
            (overlap * reached).sum((0, 1)) / reached.sum((0, 1))
        ).tolist()
    grams = [
        len({tuple(row[i : i + 8]) for i in range(len(row) - 7)}) for row in ids[:, PROMPT_LENGTH:].tolist()
    ]
    figures["distinct_8_grams"] = float(np.mean(grams)) / (NUM_GENERATED - 7)
    return figures


def prompt_windows(tokens: Tokens) -> Tensor:
    """Evaluation prompts [NUM_PROMPTS, PROMPT_LENGTH], evenly spread over the held-out text."""
    ids = np.concatenate((tokens.held_out_library, tokens.held_out_tests)).astype(np.int64)
    starts = np.linspace(0, len(ids) - PROMPT_LENGTH, NUM_PROMPTS).astype(int)
    return torch.from_numpy(np.stack([ids[start : start + PROMPT_LENGTH] for start in starts]))


def evaluate(directory: Path, documents: list[Document]) -> dict[str, Any]:
    """Measure the exported checkpoint, so that bfloat16 rounding counts; adds evaluation.json to the directory."""
    network, tokenizer = load(directory)
    network.requires_grad_(False)
    tokens = encode([document for document in documents if document.is_held_out], tokenizer)
    prompts = prompt_windows(tokens)
    figures = {
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
        "head_parameters": sum(parameter.numel() for parameter in network.mtp.parameters()),
        "weights_bytes": (directory / "model.safetensors").stat().st_size,
        "held_out": held_out_figures(network, tokens, documents),
        "generated": {
            name: generated_figures(network, prompts, temperature, seed=7)
            for name, temperature in (("greedy", 0.0), ("T=0.7", 0.7), ("T=1.0", 1.0))
        },
    }
    write_json(directory / "evaluation.json", figures)
    return json.loads(json.dumps(figures))
