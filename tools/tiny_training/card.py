"""The model card, written from the measured figures."""

import math
from pathlib import Path
from typing import Any

from tiny_training.config import TinyConfig

CARD = """---
license: psf-2.0
language: code
library_name: metrale
pipeline_tag: text-generation
tags: [gated-deltanet, multi-token-prediction, speculative-decoding]
---

# tiny

The checkpoint that ships inside metrale: {parameters:.2f} million parameters, {megabytes:.1f} MB in bfloat16. It exists
so that the package can be tried, tested and measured without a download. It is a real trained model of the layout that
metrale runs (gated delta rule and full attention, tied embeddings, an MTP head that drafts), and a very small one.

| | |
|---|---|
| Layout | `qwen3_5_text`, {num_layers} layers: {num_linear} gated delta rule, {num_full} full attention; hidden {hidden_size}, MLP {intermediate_size} |
| Head | `mtp.*`: one full-attention layer, {head_parameters:.2f} million parameters, shared embedding |
| Tokenizer | byte-level BPE of {vocab_size} tokens; `<|endoftext|>` (id 0) ends a document and is the EOS token |
| Context | trained on windows of {sequence_length} tokens; the position limit is {max_positions} |

## Data

The source text of the standard library of Python {python}: {files} files, {million_chars:.1f} million characters,
{million_tokens:.2f} million tokens. Tables of numbers or of strings and files above 300,000 characters are left out, and so is half of the
test files. One file in fifty, chosen by a hash of its relative path, is held out of training and of the tokenizer's
training; the figures below are measured on these files.

## Training

    python tools/train_tiny.py --out DIR

trains such a checkpoint from nothing, by default within an hour on two idle CPU cores (`--seconds` sets the time). This
one took {minutes:.0f} minutes, with its evaluation.

1. A shallow trunk of {shallow_layers} layers, {shallow_minutes:.0f} minutes, {shallow_steps} steps, {shallow_tokens:.1f} million
   tokens: next-token loss; Muon for matrices, AdamW for the rest. Half of its linear heads start out recalling, from their
   state, what followed the current token before. In the first part of this phase and the next, a second loss shows
   attention where the current token stood before.
2. The whole trunk, grown from it by repeating its layers, and the head, {trunk_minutes:.0f} minutes, {trunk_steps} steps,
   {trunk_tokens:.1f} million tokens: next-token loss plus {head_weight} of the head's loss on half of the rows; the learning
   rate falls linearly to zero over the last {decay_percent:.0f} percent of the time.
3. The head alone behind the frozen trunk, {chain_minutes:.0f} minutes, {chain_steps} steps: its first {chain_depth} drafts,
   each learning the trunk's whole distribution, with the attention that drafting has.

A re-run does not give the same weights: the standard library differs between Python versions, and the schedule follows
the clock.

## Figures

All are measured on the bfloat16 weights.

| held-out text | nats/token | perplexity | bits/char | tokens |
|---|---|---|---|---|
{loss_rows}

Agreement: how often the head's most likely token is the trunk's, on held-out text (drafts 2 to {depth} given the text's
own tokens before them).

| | draft 1 | draft 2 | draft 3 | draft 4 |
|---|---|---|---|---|
{agreement_rows}

Acceptance in generated text: 48 held-out prompts of 128 tokens, 192 new tokens each. Trunk and head pick
argmax(logits / T + Gumbel noise) with the same noise per position, and a draft is accepted when it equals the trunk's
pick; each column counts drafts whose forerunners were accepted. Tokens per step counts the trunk's forwards, with 1 to 4
drafts a step. `rejection` is the expected acceptance of rejection sampling, the sum of min(p, q).

| | draft 1 | draft 2 | draft 3 | draft 4 | tokens per step, 1 / 2 / 3 / 4 drafts |
|---|---|---|---|---|---|
{acceptance_rows}

## Limits

It writes text that looks like Python and seldom runs. It has read nothing but source code, follows no instructions and
knows no facts. Greedy text falls into loops, and loops are easy to draft: the share of distinct 8-token sequences in the
greedy samples is {greedy_distinct:.2f} ({sampled_distinct:.2f} at T=0.7), so greedy acceptance flatters. Quote T=0.7 and
T=1.0, and expect other figures from large models.

## Licence

The training text is the Python standard library, copyright Python Software Foundation and its contributors, under the
PSF License Agreement version 2, which asks that this notice is kept. The weights are distributed under the same terms.
"""


def cells(values: list[float]) -> str:
    return " | ".join(f"{value:.3f}" for value in values)


def write_card(out: Path, config: TinyConfig, run: dict[str, Any], figures: dict[str, Any]) -> None:
    """Write MODEL_CARD.md into `out` from the record of the run and the measured figures."""
    recipe, held_out, generated = run["recipe"], figures["held_out"], figures["generated"]
    names = {"all": "all", "library": "library files", "tests": "test files"}
    loss_rows = [
        f"| {label} | {part['nats_per_token']:.3f} | {math.exp(part['nats_per_token']):.2f} "
        f"| {part['bits_per_char']:.3f} | {part['tokens']} |"
        for name, label in names.items()
        for part in [held_out[name]]
    ]
    agreement_rows = [f"| {label} | {cells(held_out[name]['agreement'])} |" for name, label in names.items()]
    acceptance_rows = []
    for name, part in generated.items():
        tokens = " / ".join(f"{value:.2f}" for value in part["tokens_per_step"])
        acceptance_rows.append(f"| {name} | {cells(part['acceptance'])} | {tokens} |")
        if "rejection_sampling_acceptance" in part:
            acceptance_rows.append(
                f"| {name}, rejection | {cells(part['rejection_sampling_acceptance'])} | |"
            )
    tokens_per_batch = recipe["rows"] * recipe["sequence_length"] / 1e6
    card = CARD.format(
        parameters=figures["parameters"] / 1e6,
        megabytes=figures["weights_bytes"] / 1e6,
        num_layers=config.num_hidden_layers,
        num_linear=config.layer_types.count("linear_attention"),
        num_full=config.layer_types.count("full_attention"),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        head_parameters=figures["head_parameters"] / 1e6,
        vocab_size=config.vocab_size,
        sequence_length=recipe["sequence_length"],
        max_positions=config.max_position_embeddings,
        python=run["python"],
        files=run["files"],
        million_chars=run["characters"] / 1e6,
        million_tokens=sum(run["tokens"].values()) / 1e6,
        minutes=run["seconds"] / 60,
        shallow_layers=config.shallow.num_hidden_layers,
        shallow_minutes=run["shallow"]["seconds"] / 60,
        shallow_steps=run["shallow"]["steps"],
        shallow_tokens=run["shallow"]["batches"] * tokens_per_batch,
        trunk_minutes=run["trunk"]["seconds"] / 60,
        trunk_steps=run["trunk"]["steps"],
        trunk_tokens=run["trunk"]["batches"] * tokens_per_batch,
        head_weight=recipe["head_weight"],
        decay_percent=100 * (1 - recipe["trunk_hold_until"]),
        chain_minutes=run["chain"]["seconds"] / 60,
        chain_steps=run["chain"]["steps"],
        chain_depth=recipe["chain_depth"],
        depth=len(held_out["all"]["agreement"]),
        loss_rows="\n".join(loss_rows),
        agreement_rows="\n".join(agreement_rows),
        acceptance_rows="\n".join(acceptance_rows),
        greedy_distinct=generated["greedy"]["distinct_8_grams"],
        sampled_distinct=generated["T=0.7"]["distinct_8_grams"],
    )
    (out / "MODEL_CARD.md").write_text(card, encoding="utf-8")
