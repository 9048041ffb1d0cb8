"""Decoding against transformers' own generate, row by row."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paperlib.corpora import Document
from paperlib.eagle3 import generate
from paperlib.errors import InputError
from tests.eagle3.tiny import tiny_target, wrap


def models() -> dict[str, Any]:
    common = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3}
    return {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**common, **sizes, **heads)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**common, **sizes, **heads, head_dim=16)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**common, n_embd=32, n_layer=3, n_head=4, initializer_range=0.3)
        ),
    }


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 61, int(rng.integers(1, 12))).tolist() for _ in range(count)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_greedy_equals_transformers(family: str, batch: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 40)  # several pieces of a prefill
    torch.manual_seed(1)
    target = wrap(models()[family]())
    asked = prompts(18)
    free = generate.decode(target, asked, max_new_tokens=24)
    said = np.concatenate([r.tokens for r in free])
    end = int(np.bincount(said).argsort()[-4])  # a token that ends some answers and not all
    target.model.generation_config.eos_token_id = [end, 2]
    found = generate.decode(target, asked, max_new_tokens=24, batch=batch)
    ended = 0
    for prompt, response in zip(asked, found, strict=True):
        expected = target.model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert list(response.tokens) == expected[0, len(prompt) :].tolist()
        assert response.margin > 1e-4  # no near-tie: the equality means something
        ended += response.tokens[-1] in (end, 2)
    assert all(len(r.tokens) <= 24 for r in found)
    assert 0 < ended < len(asked)  # both ways to end occur, so rows left the batch
    assert target.model.config._attn_implementation == "sdpa"


def test_margin_is_the_smallest_gap() -> None:
    target = tiny_target()
    (response,) = generate.decode(target, [[5, 6, 7]], max_new_tokens=6)
    ids = torch.tensor([[5, 6, 7, *response.tokens]])
    top = target.model(input_ids=ids, use_cache=False).logits[0, 2:-1].topk(2).values
    assert response.margin == pytest.approx(float((top[:, 0] - top[:, 1]).min()), rel=1e-3)


def test_sampling_follows_the_distribution_and_ignores_the_batch() -> None:
    target = tiny_target(layers=2, vocab=11)
    count = 3000
    draws = [generate.uniforms(0, f"r{i}", 1) for i in range(count)]
    found = generate.decode(
        target, [[5, 6]] * count, max_new_tokens=1, temperature=1.5, draws=draws, batch=500
    )
    p = (target.model(input_ids=torch.tensor([[5, 6]])).logits[0, -1] / 1.5).softmax(-1).numpy()
    counts = np.bincount([r.tokens[0] for r in found], minlength=11)
    statistic = ((counts - count * p) ** 2 / (count * p)).sum()
    assert statistic < 35  # chi-square, 10 degrees of freedom: p = 1e-4
    texts = [[3 + i, 4] for i in range(6)]
    each = [generate.uniforms(7, str(i), 8) for i in range(6)]
    one, many = (
        generate.decode(target, texts, max_new_tokens=8, temperature=1.0, batch=b, draws=each)
        for b in (1, 6)
    )
    assert [r.tokens for r in one] == [r.tokens for r in many]
    assert math.isinf(one[0].margin)


def test_observed_states_are_those_of_the_sequence() -> None:
    target = tiny_target()
    asked, kept = prompts(5), {i: [] for i in range(5)}
    last: dict[str, torch.Tensor] = {}
    handle = target.blocks[3].register_forward_hook(lambda m, a, o: last.update(x=o))

    def observe(rows: list[int], mask: torch.Tensor | None) -> None:
        for r, i in enumerate(rows):
            state = last["x"][r]
            kept[i].append(state if mask is None else state[mask[r].bool()])

    found = generate.decode(target, asked, max_new_tokens=7, batch=3, observe=observe)
    handle.remove()
    from paperlib.eagle3.train import target_states

    for i, (prompt, response) in enumerate(zip(asked, found, strict=True)):
        ids = np.array([*prompt, *response.tokens])
        expected = target_states(target, ids, (4,))[0][:-1]
        torch.testing.assert_close(torch.cat(kept[i])[: len(ids) - 1], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("asked", "options", "say"),
    [
        ([[]], {}, "empty prompt"),
        ([[1]], {"temperature": 1.0}, "draws"),
        ([[1]], {"batch": 0}, "batch 0"),
    ],
)
def test_bad_requests(asked: list, options: dict, say: str) -> None:
    with pytest.raises(InputError, match=say):
        generate.decode(tiny_target(), asked, max_new_tokens=2, **options)


def documents(count: int) -> list[Document]:
    return [Document(f"set/{i:02d}", p, [False] * len(p)) for i, p in enumerate(prompts(count))]


def test_shards_survive_a_stop_and_give_the_same_file(tmp_path: Path, monkeypatch: Any) -> None:
    target, asked = tiny_target(), documents(11)
    whole = generate.answer(
        target, asked, tmp_path / "a", max_new_tokens=9, batch=4, progress=False
    )
    assert whole.ids == tuple(d.id for d in asked)
    decode, calls = generate.decode, []

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    monkeypatch.setattr(generate, "decode", breaks)
    again = {"max_new_tokens": 9, "batch": 4, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        generate.answer(target, asked, tmp_path / "b", **again)
    assert not (tmp_path / "b").exists()
    parts = generate.answer(target, asked, tmp_path / "b", **again)
    assert len(calls) == 2 + 2  # three shards: one was kept, one broke, two were decoded after
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [t.tolist() for t in parts.tokens] == [t.tolist() for t in whole.tokens]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_files_that_are_not_responses(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(InputError, match="expected responses"):
        generate.read_responses(path)
    generate.write_responses(path, ["a/1", "a/2"], [[1, 2], [70000]], [0.5, 0.25], {"k": 1})
    read = generate.read_responses(path)
    assert [t.tolist() for t in read.tokens] == [[1, 2], [70000]]
    assert read.about == {"k": 1}
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InputError, match="expected responses"):
        generate.read_responses(path)


def test_regeneration_finds_a_changed_answer(monkeypatch: Any) -> None:
    target, asked = tiny_target(), documents(6)
    found = generate.decode(target, [d.input_ids for d in asked], max_new_tokens=6)
    tokens = [np.array(r.tokens) for r in found]
    tokens[4] = tokens[4].copy()
    tokens[4][0] += 1
    about = {
        "prompts": generate.prompt_key(asked),
        "max_new_tokens": 6,
        "temperature": 0.0,
        "seed": 0,
    }
    stored = generate.Responses(tuple(d.id for d in asked), tuple(tokens), np.ones(6), about)
    monkeypatch.setattr(generate, "records_of", lambda ids: None)
    monkeypatch.setattr(generate, "tokenize", lambda target, corpus, max_tokens: asked)
    same = generate.regenerate(target, stored, ["set/01", "set/04"])
    assert same == {"set/01": True, "set/04": False}
    changed = [*asked[:-1], Document("set/05", [3], [False])]
    monkeypatch.setattr(generate, "tokenize", lambda target, corpus, max_tokens: changed)
    with pytest.raises(InputError, match="chat template"):
        generate.prompts_of(target, stored)


def test_choice_keeps_evaluation_prompts_out(tmp_path: Path) -> None:
    import json

    def write(name: str, texts: list[str]) -> str:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"prompt": t}) + "\n" for t in texts))
        return str(path)

    judged = "Write a short story about a fox who learns to play the violin in winter"
    train = [
        judged,
        "Please: " + judged.lower() + "!",
        "How do magnets work?",
        "How do magnets work?",
        "What is rain?",
        "Why is " + "so " * 60 + "long?",
    ]

    class Words:
        is_fast = True
        all_special_ids = ()
        unk_token_id = bos_token_id = None

        def __call__(self, text: str, **_: Any) -> Any:
            spans, ids, at = [], [], 0
            for word in text.split(" "):
                spans.append((at, at + len(word)))
                ids.append(3 + hash(word) % 1000)
                at += len(word) + 1
            return {"input_ids": ids, "offset_mapping": spans}

    target = SimpleNamespace(
        name="words",
        tokenizer=Words(),
        render_chat=lambda messages, add_generation_prompt: (
            "<u> " + messages[0]["content"] + " <a>"
        ),
    )
    recipe, evaluation = {write("train", train): 2}, (write("judged", [judged]),)
    chosen = generate.choose(target, recipe, seed=0, max_prompt_tokens=30, evaluation=evaluation)
    assert sorted(d.id for d in chosen) in (
        ["train/00003", "train/00005"],
        ["train/00004", "train/00005"],
    )
    with pytest.raises(InputError, match="only 2 are left"):
        generate.choose(
            target,
            {next(iter(recipe)): 3},
            seed=0,
            max_prompt_tokens=30,
            evaluation=evaluation,
        )
