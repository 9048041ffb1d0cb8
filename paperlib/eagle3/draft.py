"""The EAGLE-3 draft head (Li et al., 2025): one Llama layer that reads several target layers.

Row t holds the target's states at the chosen boundaries at token t, fused to one vector, beside
the embedding of token t + 1, and predicts token t + 2::

    g  = fc(concat(h_b1[t], ..., h_bA[t]))                     # [H]
    a  = concat(input_layernorm(e(x[t+1])), hidden_norm(g))    # [2H]
    h1 = g + attention(a)          (hidden_norm(g) + ... with norm_before_residual)
    h2 = h1 + mlp(post_attention_layernorm(h1))
    logits = lm_head(norm(h2))                                 # over the draft vocabulary

A further step takes h2 (norm(h2) with norm_output) in place of g, and the next token. Names and
shapes of the parameters are those of published heads.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paperlib import files
from paperlib.eagle3.vocab import DraftVocab, checked
from paperlib.errors import InputError

FORMAT = "paperlib-head-1"
MAX_BOUNDARIES = 6

Past = tuple[Tensor, Tensor]  # keys and values, [B, kv heads, S, head dim] each


@dataclass(frozen=True)
class HeadConfig:
    """Everything that fixes a head's shapes and its arithmetic."""

    boundaries: tuple[int, ...]  # ascending; the column blocks of fc in this order
    num_layers: int  # of the target
    target_hidden_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int  # the target's
    draft_vocab_size: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_type, rope_theta and what else the type needs
    max_position_embeddings: int
    attention_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head's query and key (Qwen3)
    norm_before_residual: bool = False  # the residual is hidden_norm(g), not g
    norm_before_fc: bool = False  # one RMSNorm over the concatenated states
    fc_norm: bool = False  # one RMSNorm for each boundary's states
    norm_output: bool = False  # feed back norm(h2) instead of h2

    def __post_init__(self) -> None:
        b = tuple(self.boundaries)
        if not 1 <= len(b) <= MAX_BOUNDARIES or list(b) != sorted(set(b)):
            raise InputError(
                f"boundaries {list(b)}: a head reads 1 to {MAX_BOUNDARIES} different boundaries, "
                "in ascending order"
            )
        if b[0] < 0 or b[-1] > self.num_layers:
            raise InputError(f"boundaries {list(b)} must lie in 0..{self.num_layers}")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc and fc_norm exclude each other: choose one")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"{self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim {self.head_dim} must be even for RoPE")


def rope_of(config: Any) -> dict[str, Any]:
    """RoPE parameters of a target's config: ``rope_parameters``, or ``rope_theta`` and
    ``rope_scaling`` of older files. Targets without RoPE get the default base of 10,000."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, dict) and "full_attention" in found:  # one set for each layer type
        found = found["full_attention"]
    if not found:
        found = dict(getattr(config, "rope_scaling", None) or {})
        theta = getattr(config, "rope_theta", None) or getattr(config, "rotary_emb_base", None)
        found.setdefault("rope_theta", theta or 10000.0)
    rope = dict(found)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("rope_theta", 10000.0)
    rope.pop("partial_rotary_factor", None)  # engines rotate the whole head of a draft layer
    return rope


def config_for(
    target: Any, boundaries: Sequence[int], draft_vocab_size: int, **options: Any
) -> HeadConfig:
    """The head that fits ``target``: its widths, heads, RoPE and epsilon unless ``options`` differ.

    options: any field of HeadConfig, for example ``hidden_size=256`` or ``fc_norm=True``.
    """
    stack = target.model.config.get_text_config()
    hidden = int(options.get("hidden_size", target.hidden_size))
    heads = int(options.get("num_attention_heads", stack.num_attention_heads))
    kv = getattr(stack, "num_key_value_heads", None) or heads
    same = hidden == target.hidden_size
    width = getattr(stack, "intermediate_size", None) or getattr(stack, "ffn_dim", None)
    fields: dict[str, Any] = {
        "boundaries": tuple(boundaries),
        "num_layers": target.num_layers,
        "target_hidden_size": target.hidden_size,
        "hidden_size": hidden,
        "intermediate_size": int(width or 4 * hidden) if same else 4 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": int(kv) if heads % int(kv) == 0 else heads,
        "head_dim": (getattr(stack, "head_dim", None) if same else None) or hidden // heads,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "rms_norm_eps": float(getattr(stack, "rms_norm_eps", None) or 1e-5),
        "rope": rope_of(stack),
        "max_position_embeddings": int(stack.max_position_embeddings),
        "qk_norm": stack.model_type in ("qwen3", "qwen3_moe"),
    }
    unknown = set(options) - {f for f in HeadConfig.__dataclass_fields__}
    if unknown:
        raise InputError(f"unknown head options {sorted(unknown)}")
    return HeadConfig(**{**fields, **options})


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Llama attention with a 2H-wide input; grouped queries; optional query and key norms."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.heads, self.kv, self.width = (
            c.num_attention_heads,
            c.num_key_value_heads,
            c.head_dim,
        )
        bias = c.attention_bias
        self.q_proj = nn.Linear(2 * c.hidden_size, self.heads * self.width, bias=bias)
        self.k_proj = nn.Linear(2 * c.hidden_size, self.kv * self.width, bias=bias)
        self.v_proj = nn.Linear(2 * c.hidden_size, self.kv * self.width, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.width, c.hidden_size, bias=False)
        if c.qk_norm:
            self.q_norm = RMSNorm(self.width, c.rms_norm_eps)
            self.k_norm = RMSNorm(self.width, c.rms_norm_eps)
        self.qk_norm = c.qk_norm

    def queries(self, a: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """a [B, S, 2H] -> [B, kv heads, group, S, head dim], rotated."""
        q = self.q_proj(a).unflatten(-1, (self.heads, self.width))
        q = self.q_norm(q) if self.qk_norm else q
        q = rotate(q.transpose(1, 2), *rope)  # [B, heads, S, d]
        return q.unflatten(1, (self.kv, self.heads // self.kv))

    def keys_values(self, a: Tensor, rope: tuple[Tensor, Tensor]) -> Past:
        """a [B, S, 2H] -> keys (rotated) and values, [B, kv heads, S, head dim]."""
        k = self.k_proj(a).unflatten(-1, (self.kv, self.width))
        k = self.k_norm(k) if self.qk_norm else k
        v = self.v_proj(a).unflatten(-1, (self.kv, self.width))
        return rotate(k.transpose(1, 2), *rope), v.transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, kv heads, group, S, head dim] -> [B, S, H]."""
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer but for its input: token embedding and fused state side by side."""

    def __init__(self, c: HeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)
        self.norm_before_residual = c.norm_before_residual

    def inputs(self, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, H] each -> what attention reads [B, S, 2H], and the residual [B, S, H]."""
        normed = self.hidden_norm(hidden)
        a = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        return a, normed if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        h = residual + self.self_attn.output(mixed)
        return h + self.mlp(self.post_attention_layernorm(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, halves convention. x [B, heads, S, d]; cos, sin [B, S, d]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)


class DraftHead(nn.Module):
    """The head with its frozen embedding table and its draft vocabulary.

    scale [A]: what each boundary's states are multiplied with before fc. Training sets it to
    1 / (median RMS of the boundary). whitening [A Ht, A Ht] (or none): a further symmetric map of
    the scaled states, which makes their directions equally large. ``fold_scale`` moves both into
    fc, so that exported heads need nothing that engines do not have.
    """

    scale: Tensor
    whitening: Tensor | None

    def __init__(self, config: HeadConfig, vocab: DraftVocab, embedding: Tensor) -> None:
        super().__init__()
        c = config
        if vocab.size != c.draft_vocab_size or len(vocab.t2d) != c.vocab_size:
            raise InputError(
                f"draft vocabulary of {vocab.size} out of {len(vocab.t2d)} tokens, expected "
                f"{c.draft_vocab_size} out of {c.vocab_size}"
            )
        if embedding.shape != (c.vocab_size, c.hidden_size):
            raise InputError(
                f"embedding table {list(embedding.shape)}, expected {[c.vocab_size, c.hidden_size]}"
            )
        self.config, self.vocab = config, vocab
        states = len(c.boundaries) * c.target_hidden_size
        self.fc = nn.Linear(states, c.hidden_size, bias=False)
        if c.norm_before_fc:
            self.input_norm = RMSNorm(states, c.rms_norm_eps)
        if c.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(c.target_hidden_size, c.rms_norm_eps) for _ in c.boundaries
            )
        self.midlayer = Layer(c)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding.from_pretrained(embedding, freeze=True)
        self.register_buffer("scale", torch.ones(len(c.boundaries)), persistent=False)
        self.register_buffer("whitening", None, persistent=False)
        llama = LlamaConfig(
            hidden_size=c.hidden_size,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            max_position_embeddings=c.max_position_embeddings,
            rope_parameters=dict(c.rope),
        )
        self.rotary = LlamaRotaryEmbedding(llama)

    def fuse(self, states: Tensor) -> Tensor:
        """[..., A, Ht] states at the boundaries -> [..., H]."""
        if states.shape[-2:] != (len(self.config.boundaries), self.config.target_hidden_size):
            raise InputError(
                f"states [..., {states.shape[-2]}, {states.shape[-1]}]: expected "
                f"[..., {len(self.config.boundaries)}, {self.config.target_hidden_size}] for "
                f"boundaries {list(self.config.boundaries)}"
            )
        dtype = self.fc.weight.dtype
        states = states.to(dtype) * self.scale[:, None].to(dtype)
        if self.config.fc_norm:
            parts = [norm(states[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            return self.fc(torch.cat(parts, dim=-1))
        flat = states.flatten(-2)
        if self.whitening is not None:
            flat = flat @ self.whitening.to(dtype)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [B, S] -> cos, sin [B, S, head dim]."""
        return self.rotary(self.fc.weight, positions)

    def feedback(self, h: Tensor) -> Tensor:
        """What the next draft step takes in place of the fused states."""
        return self.norm(h) if self.config.norm_output else h

    def logits(self, h: Tensor) -> Tensor:
        """[..., H] -> [..., Vd]."""
        return self.lm_head(self.norm(h))

    def extend(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        past: Past | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Past]:
        """Drafting: new rows after those in ``past``.

        tokens [B, S]: the token that follows each row's state. hidden [B, S, H]: fused states, or
        the feedback of the previous draft step. positions [B, S]: the position of each row's state
        (t, not t + 1). mask [B or 1, S, S_past + S] bool, True = may look; None: causal.
        Returns h2 [B, S, H] (for ``logits`` and ``feedback``), the feedback [B, S, H] and the
        longer past.
        """
        rope = self.rope(positions)
        a, residual = self.midlayer.inputs(self.embed_tokens(tokens).to(hidden.dtype), hidden)
        attention = self.midlayer.self_attn
        q = attention.queries(a, rope)  # [B, kv, g, S, d]
        k, v = attention.keys_values(a, rope)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        size, total = tokens.shape[1], k.shape[2]
        if mask is None:
            mask = torch.ones(size, total, dtype=torch.bool, device=k.device)
            mask = mask.tril(total - size)[None]
        scores = q @ k[:, :, None].transpose(-1, -2) * self.config.head_dim**-0.5
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        h = self.midlayer.finish(residual, scores.softmax(dim=-1) @ v[:, :, None])
        return h, self.feedback(h), (k, v)

    @torch.no_grad()
    def fold_scale(self) -> None:
        """Move ``scale`` and ``whitening`` into fc's columns; outputs stay as they are."""
        if self.config.fc_norm or self.config.norm_before_fc:
            if not self.folded:
                raise InputError("a scale before a norm cannot be folded into fc: keep it at 1")
            return
        if self.whitening is not None:
            folded = self.fc.weight.double() @ self.whitening.double().T
            self.fc.weight.copy_(folded)
            self.whitening = None
        columns = self.scale.repeat_interleave(self.config.target_hidden_size)
        self.fc.weight *= columns.to(self.fc.weight.dtype)
        self.scale.fill_(1)

    @property
    def folded(self) -> bool:
        return self.whitening is None and torch.equal(self.scale, torch.ones_like(self.scale))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by their published names, without the frozen embedding table."""
        return {n: p.detach() for n, p in self.named_parameters() if n != "embed_tokens.weight"}


def embedding_for(target: Any, hidden_size: int, seed: int = 0) -> Tensor:
    """[V, H] the head's token embeddings: the target's own when H equals its width.

    For another H, the target's rows under one seeded map with orthonormal rows or columns: frozen
    like the original, and written with the head because no engine can share it.
    """
    table = target.embed_tokens.weight.detach()
    width = table.shape[1]
    if width == hidden_size:
        return table
    generator = torch.Generator().manual_seed(seed)
    square = torch.randn(max(width, hidden_size), min(width, hidden_size), generator=generator)
    basis = torch.linalg.qr(square.double()).Q.to(table.dtype).to(table.device)
    return table @ (basis if width > hidden_size else basis.T)


@torch.no_grad()
def initialise(head: DraftHead, seed: int, *, std: float = 0.02) -> None:
    """Seeded start: every matrix from its own generator, so that heads of different boundaries
    share all but the shapes that differ, and fc block i of one equals fc block i of the other."""
    for name, parameter in head.tensors().items():
        if parameter.ndim == 1:
            parameter.fill_(0 if name.endswith("bias") else 1)
        elif name == "fc.weight":
            width = head.config.target_hidden_size
            for i in range(len(head.config.boundaries)):
                block = parameter[:, i * width : (i + 1) * width]
                block.copy_(_normal(block.shape, std, seed, f"{name}.{i}"))
        else:
            parameter.copy_(_normal(parameter.shape, std, seed, name))


def _normal(shape: torch.Size, std: float, seed: int, name: str) -> Tensor:
    number = int(files.key([seed, name]), 16) % 2**63
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)) * std


def save_head(head: DraftHead, folder: Path, record: dict[str, Any]) -> None:
    """head.safetensors and paperlib.json (config and ``record``); the scale must be folded."""
    if not head.folded:
        raise InputError("fold_scale() before saving a head")
    tensors = {n: t.cpu().contiguous() for n, t in head.tensors().items()}
    tensors |= {"d2t": head.vocab.d2t.cpu(), "t2d": head.vocab.t2d.cpu()}
    if head.config.hidden_size != head.config.target_hidden_size:
        tensors["embed_tokens.weight"] = head.embed_tokens.weight.detach().cpu().contiguous()
    about = {"format": FORMAT, "head": asdict(head.config), "record": record}
    with files.replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        save_file(tensors, temporary / "head.safetensors")
        files.write_json(temporary / "paperlib.json", about)


def load_head(folder: Path, embedding: Tensor | None = None) -> DraftHead:
    """A head written by ``save_head``; ``embedding``: the target's table, where the head shares it.

    Raises InputError for foreign, incomplete or surplus content.
    """
    folder = Path(folder)
    try:
        about = json.loads((folder / "paperlib.json").read_text())
        config = dict(about["head"])
        config["boundaries"] = tuple(config["boundaries"])
        if about["format"] != FORMAT:
            raise KeyError(about["format"])
        with safe_open(folder / "head.safetensors", framework="pt") as f:
            tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder}: expected a head written by paperlib train ({type(error).__name__}: {error})"
        ) from error
    own = tensors.pop("embed_tokens.weight", embedding)
    if own is None:
        raise InputError(f"{folder}: the head shares its target's embeddings: give that table")
    vocab = checked(tensors.pop("d2t"), tensors.pop("t2d"))
    head = DraftHead(HeadConfig(**config), vocab, own)
    expected = {n: t.shape for n, t in head.tensors().items()}
    found = {n: t.shape for n, t in tensors.items()}
    if expected != found:
        wrong = sorted(n for n in expected | found if expected.get(n) != found.get(n))
        raise InputError(f"{folder}/head.safetensors: missing, surplus or misshapen: {wrong}")
    with torch.no_grad():
        for name, parameter in head.tensors().items():
            parameter.copy_(tensors[name])
    return head


def with_boundaries(config: HeadConfig, boundaries: Sequence[int]) -> HeadConfig:
    return replace(config, boundaries=tuple(boundaries))
