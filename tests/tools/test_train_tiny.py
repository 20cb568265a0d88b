"""The trainer of `tiny`: its operators against plain loops, its corpus split, and the files that it writes."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from tiny_training import corpus, decode, evaluate, export, gated_delta, losses, optim, team
from tiny_training.chain import unroll
from tiny_training.circuits import start_as_copier
from tiny_training.config import TinyConfig
from tiny_training.grow import grow
from tiny_training.network import Network, attention_inputs, mlp_block, rms_norm
from tiny_training.recall import recall_loss

SMALL = TinyConfig(
    vocab_size=320,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    partial_rotary_factor=0.5,
    max_position_embeddings=64,
)


@pytest.fixture
def network() -> Network:
    """A small network whose weights are large enough that every part matters."""
    network = Network(SMALL, chunk=8)
    network.initialise(seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network.requires_grad_(False)


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, shape, generator=torch.Generator().manual_seed(5))


def gdn_loop(q, k, v, log_decay, beta):
    """The operator token by token: the definition of what the chunks compute."""
    state = q.new_zeros(*q.shape[:1], *q.shape[2:], v.shape[-1])
    outputs = []
    for t in range(q.shape[1]):
        out, state = gated_delta.gated_delta_step(
            state, q[:, t], k[:, t], v[:, t], log_decay[:, t], beta[:, t]
        )
        outputs.append(out)
    return torch.stack(outputs, dim=1)


def test_chunked_gated_delta_rule_and_its_gradients_equal_the_loop():
    generator = torch.Generator().manual_seed(0)
    batch, length, heads, dk, dv, chunk = 2, 24, 3, 5, 7, 8

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(batch, length, heads, dk), dim=-1) for _ in range(2))
    inputs = [
        q,
        k,
        draw(batch, length, heads, dv),
        -F.softplus(draw(batch, length, heads)),
        draw(batch, length, heads),
    ]
    inputs[4] = inputs[4].sigmoid()
    inputs = [x.requires_grad_() for x in inputs]
    weights = draw(batch, length, heads, dv)

    expected = gdn_loop(*inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), inputs)
    got = gated_delta.chunk_outputs(batch, gated_delta.chunk_inputs(*inputs, chunk))
    grads = torch.autograd.grad((got * weights).sum(), inputs)

    torch.testing.assert_close(got, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_generation_token_by_token_follows_the_whole_sequence_forward(network):
    prompts = random_ids(3, 11)
    ids = decode.generate(network, prompts, 10, lambda logits, position: logits.argmax(-1))
    logits = network.trunk(ids) @ network.unembedding.T
    assert torch.equal(ids[:, :11], prompts)
    assert torch.equal(logits.argmax(-1)[:, 10:-1], ids[:, 11:])


def test_unrolled_chains_equal_drafting_with_a_cache(network):
    depth, num_roots = 4, 9
    ids = random_ids(2, num_roots + depth)
    hidden = network.trunk(ids)[:, :num_roots]
    outputs = unroll(network, hidden, ids, depth)
    layer, eps = network.mtp.layers[0], network.sizes.eps

    def draft_step(cache, hidden, next_ids):
        x = cache.step(layer, network.head_input(hidden, next_ids))
        x = mlp_block(x, *layer.mlp_weights(), network.sizes)
        return rms_norm(x, network.mtp.norm.weight, eps)

    for root in range(num_roots):
        cache = decode.AttentionState(network, batch=2, length=num_roots + depth)
        for t in range(root + 1):
            out = draft_step(cache, hidden[:, t, None], ids[:, t + 1, None])
        torch.testing.assert_close(outputs[0][:, root], out[:, 0], rtol=1e-4, atol=1e-5)
        for step in range(1, depth):
            out = draft_step(cache, out, ids[:, root + 1 + step, None])
            torch.testing.assert_close(outputs[step][:, root], out[:, 0], rtol=1e-4, atol=1e-5)


def test_the_heads_first_step_is_the_same_in_the_last_two_phases(network):
    ids = random_ids(2, 20)
    hidden = network.trunk(ids)[:, :17]
    first = unroll(network, hidden, ids, depth=1)[0]
    torch.testing.assert_close(network.head(hidden, ids[:, 1:18]), first)


@pytest.mark.parametrize("is_distribution", [False, True])
def test_output_loss_and_gradients_equal_cross_entropy(is_distribution, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK_ROWS", 4)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 6, generator=generator, requires_grad=True)
    weight = torch.randn(9, 6, generator=generator, requires_grad=True)
    target = torch.randint(9, (2, 5), generator=generator)
    if is_distribution:
        target = torch.randn(2, 5, 9, generator=generator).softmax(-1)
    flat = target.flatten(0, 1) if is_distribution else target.flatten()
    expected = F.cross_entropy((hidden @ weight.T).flatten(0, 1), flat)
    got = losses.output_loss(hidden, weight, target)
    torch.testing.assert_close(got, expected)
    pairs = (torch.autograd.grad(loss * 3, (hidden, weight)) for loss in (got, expected))
    for grad, expected_grad in zip(*pairs, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def write_tree(root: Path) -> None:
    for folder in ("pkg", "pkg/test", "site-packages"):
        (root / folder).mkdir(parents=True)
        for index in range(150):
            text = f"def function_{index}():\n    return 'a text that is long beside its digits'\n"
            (root / folder / f"m{index}.py").write_text(text, encoding="utf-8")
    (root / "table.py").write_text("x = [" + "12345, " * 500 + "]\n", encoding="utf-8")
    (root / "bad.py").write_bytes(b"x = '\xff'\n")


def test_corpus_split_is_deterministic_disjoint_and_independent_of_the_place(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    write_tree(first)
    write_tree(second)
    documents = corpus.read_documents(first)
    assert documents == corpus.read_documents(second)
    assert not any(
        name in document.path for document in documents for name in ("table", "bad", "site-packages")
    )
    library = [document for document in documents if not document.is_test]
    assert len(library) == 150
    assert 40 < sum(document.is_test for document in documents) < 110
    held_out = {document.path for document in documents if document.is_held_out}
    assert 0 < len(held_out) < len(documents) / 10


def test_tokens_of_the_groups_cover_every_document_once(tmp_path):
    write_tree(tmp_path / "a")
    documents = corpus.read_documents(tmp_path / "a")
    tokenizer = corpus.train_tokenizer((document.text for document in documents), vocab_size=300)
    assert [tokenizer.id_to_token(index) for index in range(3)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    tokens = corpus.encode(documents, tokenizer)
    assert sum(int((ids == 0).sum()) for ids in tokens) == len(documents)
    held_out = [document.text for document in documents if document.is_held_out and not document.is_test]
    decoded = tokenizer.decode(tokens.held_out_library.tolist(), skip_special_tokens=False)
    assert decoded == "".join(text + "<|endoftext|>" for text in held_out)


def test_training_batches_are_seeded_and_held_out_windows_score_each_token_once():
    tokens = corpus.Tokens(*(np.arange(100 * n, 100 * n + 90, dtype=np.uint16) for n in range(4)))
    batches = [corpus.training_batches(tokens, 3, 10, 0.5, seed) for seed in (1, 1, 2)]
    drawn = [np.stack([next(batch) for _ in range(30)]) for batch in batches]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert drawn[0].max() < 190  # held-out ids begin at 200
    windows = corpus.held_out_windows(tokens.held_out_tests, 10)
    assert windows[:, 1:].flatten().tolist() == list(range(301, 301 + windows[:, 1:].size))


def layout(config: TinyConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, written out from the published layout."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads, values = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.linear_num_value_heads,
    )
    mixed = 2 * config.key_dim + config.value_dim
    attention = {
        "self_attn.q_proj.weight": (2 * heads * size, hidden),
        "self_attn.k_proj.weight": (kv_heads * size, hidden),
        "self_attn.v_proj.weight": (kv_heads * size, hidden),
        "self_attn.o_proj.weight": (hidden, heads * size),
        "self_attn.q_norm.weight": (size,),
        "self_attn.k_norm.weight": (size,),
    }
    linear = {
        "linear_attn.in_proj_qkv.weight": (mixed, hidden),
        "linear_attn.in_proj_z.weight": (config.value_dim, hidden),
        "linear_attn.in_proj_b.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (values, hidden),
        "linear_attn.conv1d.weight": (mixed, 1, 4),
        "linear_attn.A_log": (values,),
        "linear_attn.dt_bias": (values,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, config.value_dim),
    }
    common = {
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    names = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for index, kind in enumerate(("linear", "linear", "linear", "attention")):
        mixer = linear if kind == "linear" else attention
        names |= {f"model.layers.{index}.{name}": shape for name, shape in {**mixer, **common}.items()}
    names |= {f"mtp.layers.0.{name}": shape for name, shape in {**attention, **common}.items()}
    names |= {
        f"mtp.{name}.weight": (hidden,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    }
    return names | {"mtp.fc.weight": (hidden, 2 * hidden)}


def test_export_round_trips_names_shapes_and_values(network, tmp_path):
    tokenizer = corpus.train_tokenizer(["x = 1\n"], vocab_size=300)
    export.export(network, tokenizer, tmp_path)
    loaded, loaded_tokenizer = export.load(tmp_path)
    state = loaded.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == layout(SMALL)
    for name, value in network.state_dict().items():
        assert torch.equal(state[name], value.bfloat16().float()), name
    assert loaded.config == SMALL
    assert loaded_tokenizer.to_str() == tokenizer.to_str()
    content = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert content["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert json.loads((tmp_path / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 0


def test_transformers_loads_the_export_and_computes_the_same_logits(network, tmp_path, monkeypatch):
    for name in ("fla", "causal_conv1d"):  # their kernels need a GPU
        monkeypatch.setitem(sys.modules, name, None)
    transformers = pytest.importorskip("transformers")
    export.export(network, corpus.train_tokenizer(["x = 1\n"], vocab_size=300), tmp_path)
    loaded, _ = export.load(tmp_path)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    ids = random_ids(2, 21)
    with torch.no_grad():
        expected = model(ids).logits
        got = loaded.trunk(ids) @ loaded.unembedding.T
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_orthogonalise_flattens_the_singular_values():
    for shape in ((24, 40), (40, 24)):
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        singular = torch.linalg.svdvals(optim.orthogonalise(matrix))
        assert singular.min() > 0.6
        assert singular.max() < 1.25


@pytest.mark.parametrize("steps_done, elapsed", [(1000, 1.0), (3, 60.0)])
def test_learning_rate_reaches_zero_by_steps_or_by_time(steps_done, elapsed):
    done = optim.progress(steps_done, 1000, elapsed, 60.0)
    assert optim.learning_rate_factor(done, warmup=0.02, hold_until=0.3) == 0.0
    assert optim.learning_rate_factor(0.01, warmup=0.02, hold_until=0.3) == pytest.approx(0.5)
    assert optim.learning_rate_factor(0.2, warmup=0.02, hold_until=0.3) == 1.0


def add_gradient(rank: int, group: team.Team, seen: torch.Tensor) -> None:
    torch.set_num_threads(1)
    group.attach(rank)
    for name, parameter in group.parameters.items():
        (parameter.sum() * (rank + 1) * (1 if name == "a" else 2)).backward()
    seen[rank] = group.combine(rank, scale=0.5, max_norm=1.0)
    for parameter in group.owned(rank).values():
        parameter.data.sub_(parameter.grad)
    group.clear(rank)


def test_workers_update_shared_parameters_with_the_clipped_mean_gradient():
    parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in ("a", "b")}
    group = team.Team(2, parameters)
    seen = torch.zeros(2).share_memory_()
    group.run(add_gradient, (group, seen))
    norm = (4 * 1.5**2 + 4 * 3.0**2) ** 0.5
    torch.testing.assert_close(seen, torch.full((2,), norm))
    torch.testing.assert_close(parameters["a"].data, torch.full((2, 2), -1.5 / norm))
    torch.testing.assert_close(parameters["b"].data, torch.full((2, 2), -3.0 / norm))
    assert set(group.owners.values()) == {0, 1}


def test_rounds_skip_what_was_accepted():
    matches = np.array([[[1, 1], [0, 0], [0, 1], [0, 0], [1, 0], [1, 1]]], dtype=bool)
    judged, accepted, is_round = evaluate.walk(matches, depth=2)
    # root 0 accepts both and its bonus leads to root 3, which accepts none; root 4 accepts one and ends the text
    assert is_round[0].tolist() == [True, False, False, True, True, False]
    assert judged == [3, 2]
    assert accepted == [2, 1]


def test_a_grown_network_computes_what_the_shallow_one_did():
    shallow, deep = Network(SMALL, chunk=8), Network(replace(SMALL, num_hidden_layers=8), chunk=8)
    shallow.initialise(seed=3)
    start_as_copier(shallow, seed=3)
    grow(shallow, deep)
    ids = random_ids(2, 21)
    assert torch.equal(deep.trunk(ids), shallow.trunk(ids))
    with torch.no_grad():
        deep.model.layers[5].mlp.down_proj.weight.add_(0.1)
    assert not torch.allclose(deep.trunk(ids), shallow.trunk(ids))


def test_recall_loss_equals_a_loop_over_places(network):
    ids = torch.randint(5, (2, 20), generator=torch.Generator().manual_seed(5))
    layer, rope, sizes = network.model.layers[3], network.rope.at(0, 20), network.sizes
    x = network.model.embed_tokens(ids)
    q, k, _, _ = attention_inputs(x, *layer.attention_weights(), rope, sizes)
    missed = []
    for text in range(2):
        for head in range(4):
            reach = 1 if head < 2 else 2  # single tokens, then pairs
            for i in range(20):
                weights = (k[text, head // 2, : i + 1] @ q[text, head, i] * SMALL.head_dim**-0.5).softmax(-1)
                right = [
                    j
                    for j in range(reach, i + 1)
                    if i >= reach - 1 and all(ids[text, j - 1 - n] == ids[text, i - n] for n in range(reach))
                ]
                if right:
                    missed.append(-weights[right].sum().log())
    assert len(missed) > 40
    torch.testing.assert_close(recall_loss(layer, x, ids, rope, sizes), torch.stack(missed).mean())


def test_an_untrained_network_expects_repeats():
    """Noise twice over: the second time, each token is the likelier for having followed its forerunner before."""
    network = Network(
        replace(SMALL, hidden_size=128, linear_key_head_dim=32, linear_value_head_dim=64), chunk=8
    )
    network.initialise(seed=3)
    once = random_ids(4, 24)
    twice = torch.cat((once, once), dim=1)

    def loss_of_second_half() -> float:
        logits = network.trunk(twice[:, :-1]) @ network.unembedding.T
        return F.cross_entropy(logits[:, 24:].flatten(0, 1), twice[:, 25:].flatten()).item()

    with torch.no_grad():
        random_weights = loss_of_second_half()
        start_as_copier(network, seed=3)
        assert loss_of_second_half() < random_weights - 0.2


def test_tables_are_left_out_and_code_is_not():
    entries = "".join(f"    '\\x{code:02x}'  #  0x{code:02x} -> LETTER\n" for code in range(100))
    assert corpus.is_table(f'"""A codec."""\nimport codecs\ndecoding_table = (\n{entries})\n')
    assert not corpus.is_table('"""Doc."""\nNAMES = [\n    "a",\n    "b",\n]\n\n\ndef f(x):\n    return x\n')
