"""The head against a rollout written out row by row from the formulas."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

from paperlib.eagle3 import train
from paperlib.eagle3.draft import DraftHead, load_head, rope_of, save_head
from paperlib.errors import InputError
from tests.eagle3.tiny import conversations, random_head, tiny_target, wrap

OPTIONS: list[dict] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
    {"qk_norm": True, "head_dim": 12},
    {"hidden_size": 24, "head_dim": 6, "attention_bias": True},
]


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def naive_turn(x: Tensor, position: int, theta: float) -> Tensor:
    """RoPE of one vector: pair (j, j + d/2) turned by position / theta^(2j/d)."""
    half = len(x) // 2
    out = x.clone()
    for j in range(half):
        angle = position * theta ** (-2 * j / len(x))
        out[j] = x[j] * math.cos(angle) - x[j + half] * math.sin(angle)
        out[j + half] = x[j + half] * math.cos(angle) + x[j] * math.sin(angle)
    return out


class Naive:
    """One row at a time: keys and values in lists, loops over heads. Weights by published names."""

    def __init__(self, head: DraftHead) -> None:
        self.w = {**head.tensors(), "embed": head.embed_tokens.weight.detach()}
        self.c, self.scale = head.config, head.scale

    def fuse(self, states: Tensor) -> Tensor:  # [A, Ht]
        c, w = self.c, self.w
        parts = [s * states[i] for i, s in enumerate(self.scale)]
        if c.fc_norm:
            eps = c.rms_norm_eps
            parts = [naive_norm(p, w[f"fc_norm.{i}.weight"], eps) for i, p in enumerate(parts)]
        flat = torch.cat(parts)
        if c.norm_before_fc:
            flat = naive_norm(flat, w["input_norm.weight"], c.rms_norm_eps)
        return w["fc.weight"] @ flat

    def row(
        self, hidden: Tensor, token: int, position: int, past: list
    ) -> tuple[Tensor, Tensor, list]:
        """-> logits, what is fed back, and the past with this row."""
        c, w, eps = self.c, self.w, self.c.rms_norm_eps
        m = "midlayer."
        e = naive_norm(w["embed"][token], w[m + "input_layernorm.weight"], eps)
        g = naive_norm(hidden, w[m + "hidden_norm.weight"], eps)
        a = torch.cat([e, g])

        def project(name: str, count: int) -> list[Tensor]:
            out = w[f"{m}self_attn.{name}_proj.weight"] @ a
            if c.attention_bias:
                out = out + w[f"{m}self_attn.{name}_proj.bias"]
            parts = list(out.split(c.head_dim))
            assert len(parts) == count
            if c.qk_norm and name != "v":
                norm = w[f"{m}self_attn.{name}_norm.weight"]
                parts = [naive_norm(p, norm, eps) for p in parts]
            if name == "v":
                return parts
            return [naive_turn(p, position, c.rope["rope_theta"]) for p in parts]

        q = project("q", c.num_attention_heads)
        past = [*past, (project("k", c.num_key_value_heads), project("v", c.num_key_value_heads))]
        group = c.num_attention_heads // c.num_key_value_heads
        mixed = []
        for j, query in enumerate(q):
            scores = torch.stack([k[j // group] @ query for k, _ in past]) / math.sqrt(c.head_dim)
            weights = torch.softmax(scores, dim=0)
            mixed.append(sum(p * v[j // group] for p, (_, v) in zip(weights, past, strict=True)))
        residual = g if c.norm_before_residual else hidden
        h1 = residual + w[m + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        x = naive_norm(h1, w[m + "post_attention_layernorm.weight"], eps)
        gate = w[m + "mlp.gate_proj.weight"] @ x
        up = w[m + "mlp.up_proj.weight"] @ x
        h2 = h1 + w[m + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        normed = naive_norm(h2, w["norm.weight"], eps)
        return w["lm_head.weight"] @ normed, normed if c.norm_output else h2, past


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_training_time_test_equals_the_autoregressive_rollout(options: dict) -> None:
    """The decisive test: step i, row t is draft i from prefix t, for every i and t."""
    target, steps = tiny_target(), 4
    head = random_head(target, **options)
    if not ("fc_norm" in options or "norm_before_fc" in options):
        head.scale.copy_(torch.tensor([0.5, 2.0, 1.5]))
    data = conversations(target, 2, prompt=4, response=7)
    items = [data.get(i, head.config.boundaries) for i in range(2)]
    batch = train.collate(items, steps, torch.device("cpu"))
    outputs = train.rollout_states(head, batch, steps)
    logits = [head.logits(h) for h in outputs]
    naive = Naive(head)
    compared = 0
    for b, item in enumerate(items):
        tokens, n = item.tokens.tolist(), len(item.tokens)
        fused = [naive.fuse(item.states[:, t].double()) for t in range(n)]
        prefix: list = []
        pasts = []
        for t in range(n - 1):
            out = naive.row(fused[t], tokens[t + 1], t, prefix)
            prefix = out[2]
            pasts.append(out)
        for r, t in enumerate(batch.rows[b].tolist()):
            for i in range(steps):
                if not batch.supervised[i, b, r]:
                    continue
                # from prefix t: the real states up to t, then the head's own output i times
                expected, back, past = pasts[t]
                for j in range(1, i + 1):
                    expected, back, past = naive.row(back, tokens[t + 1 + j], t + j, past)
                torch.testing.assert_close(logits[i][b, r], expected, atol=1e-5, rtol=0)
                compared += 1
    assert compared == int(batch.supervised.sum()) > 20


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_extend_equals_the_rollout(options: dict) -> None:
    """Drafting in pieces (prefill, then one token at a time, then a tree) equals row by row."""
    target = tiny_target()
    head, naive = random_head(target, **options), None
    naive = Naive(head)
    states = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(3)).double()
    tokens = [5, 9, 12, 3, 44, 8, 17, 30]
    past_naive: list = []
    for t in range(6):
        expected, back, past_naive = naive.row(naive.fuse(states[t]), tokens[t], t, past_naive)
    with torch.no_grad():
        fused = head.fuse(states)[None]
        _, _, past = head.extend(torch.tensor([tokens[:4]]), fused[:, :4], torch.arange(4)[None])
        h, fed, past = head.extend(
            torch.tensor([tokens[4:6]]), fused[:, 4:], torch.arange(4, 6)[None], past
        )
        torch.testing.assert_close(head.logits(h)[0, -1], expected, atol=1e-6, rtol=0)
        # two siblings that see the prefix and themselves
        mask = torch.tensor([[[True] * 6 + [True, False], [True] * 6 + [False, True]]])
        h, _, _ = head.extend(
            torch.tensor([tokens[6:]]),
            fed[:, -1:].expand(-1, 2, -1),
            torch.tensor([[6, 6]]),
            past,
            mask,
        )
    for j in range(2):
        expected, _, _ = naive.row(back, tokens[6 + j], 6, past_naive)
        torch.testing.assert_close(head.logits(h)[0, j], expected, atol=1e-6, rtol=0)


def test_folded_scale_gives_equal_outputs(tmp_path: Path) -> None:
    target = tiny_target()
    head = random_head(target)
    head.scale.copy_(torch.tensor([0.01, 3.0, 40.0]))
    mixing = torch.randn(96, 96).double()
    head.whitening = mixing + mixing.T
    states = torch.randn(5, 3, 32).double()
    before = head.fuse(states)
    with pytest.raises(InputError, match="fold_scale"):
        save_head(head, tmp_path / "head", {})
    head.fold_scale()
    assert torch.equal(head.scale, torch.ones(3))
    assert head.whitening is None
    torch.testing.assert_close(head.fuse(states), before, atol=1e-9, rtol=1e-12)
    head = head.float()
    save_head(head, tmp_path / "head", {"note": 1})
    again = load_head(tmp_path / "head", target.embed_tokens.weight)
    assert all(torch.equal(a, again.tensors()[n]) for n, a in head.tensors().items())
    assert again.config == head.config


def test_scale_before_a_norm_is_not_folded() -> None:
    head = random_head(tiny_target(), norm_before_fc=True)
    head.scale.mul_(2)
    with pytest.raises(InputError, match="cannot be folded"):
        head.fold_scale()


@pytest.mark.parametrize("boundaries", [(3,), (0, 7), (0, 1, 2, 3, 5, 7)])
def test_any_number_of_boundaries(boundaries: tuple[int, ...]) -> None:
    target = tiny_target()
    head = random_head(target, boundaries)
    data = conversations(target, 1)
    batch = train.collate([data.get(0, boundaries)], 2, torch.device("cpu"))
    outputs = train.rollout_states(head, batch, 2)
    assert head.fc.weight.shape == (32, 32 * len(boundaries))
    assert all(torch.isfinite(h).all() for h in outputs)


@pytest.mark.parametrize(
    ("changes", "say"),
    [
        ({"boundaries": (3, 1)}, "ascending"),
        ({"boundaries": (1, 1)}, "different"),
        ({"boundaries": (1, 9)}, "0..7"),
        ({"boundaries": (0, 1, 2, 3, 4, 5, 6)}, "1 to 6"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude"),
        ({"no_such": 1}, "unknown head options"),
    ],
)
def test_bad_configs(changes: dict, say: str) -> None:
    with pytest.raises(InputError, match=say):
        random_head(tiny_target(), **changes)


def test_wrong_number_of_states() -> None:
    with pytest.raises(InputError, match="boundaries"):
        random_head(tiny_target()).fuse(torch.zeros(4, 2, 32).double())


def test_rope_is_read_in_both_schemas() -> None:
    new = LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    assert rope_of(new)["rope_theta"] == 500000.0

    class Old:
        rope_theta = 250000.0
        rope_scaling = {"type": "linear", "factor": 4.0}  # noqa: RUF012

    assert rope_of(Old()) == {"rope_theta": 250000.0, "factor": 4.0, "rope_type": "linear"}

    class Without:
        pass

    assert rope_of(Without()) == {"rope_theta": 10000.0, "rope_type": "default"}


def test_qwen3_targets_get_query_and_key_norms_and_their_head_dim() -> None:
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=61,
    )
    torch.manual_seed(0)
    head = random_head(wrap(Qwen3ForCausalLM(config)))
    assert head.config.qk_norm
    assert head.midlayer.self_attn.q_proj.weight.shape == (64, 64)
    assert head.midlayer.self_attn.q_norm.weight.shape == (16,)


def test_same_seed_shares_all_that_has_the_same_shape() -> None:
    target = tiny_target()
    one, two = random_head(target, (1, 3, 5)), random_head(target, (0, 3))
    for name, tensor in one.tensors().items():
        other = two.tensors()[name]
        if name == "fc.weight":
            assert torch.equal(tensor[:, :64], other)
        elif tensor.ndim > 1:
            assert torch.equal(tensor, other), name


def test_a_head_of_another_width_keeps_angles_of_the_embeddings() -> None:
    target = tiny_target()
    wide = random_head(target, hidden_size=48, head_dim=12)
    table = target.embed_tokens.weight.double()
    np.testing.assert_allclose(
        wide.embed_tokens.weight @ wide.embed_tokens.weight.T, table @ table.T, atol=1e-4
    )
