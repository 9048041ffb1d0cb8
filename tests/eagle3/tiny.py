"""A target small enough for tests: random weights, no tokenizer, the attributes that heads use."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paperlib.eagle3 import train
from paperlib.eagle3.draft import DraftHead, config_for, embedding_for, initialise
from paperlib.eagle3.vocab import DraftVocab, from_target_ids


def tiny_target(
    layers: int = 7, hidden: int = 32, vocab: int = 61, seed: int = 0, **changes: Any
) -> SimpleNamespace:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **changes,
    )
    return wrap(LlamaForCausalLM(config))


def wrap(model: Any) -> SimpleNamespace:
    model = model.eval().requires_grad_(False)
    base = model.base_model
    blocks = getattr(base, "layers", None) or getattr(base, "h", None)
    norm = getattr(base, "norm", None) or getattr(base, "ln_f", None)
    head = model.get_output_embeddings()
    return SimpleNamespace(
        name="tiny",
        model=model,
        tokenizer=None,
        fingerprint="tiny",
        num_layers=len(blocks),
        hidden_size=model.config.hidden_size,
        vocab_size=head.weight.shape[0],
        device=torch.device("cpu"),
        blocks=blocks,
        final_norm=norm,
        lm_head=head,
        embed_tokens=model.get_input_embeddings(),
        logits_from_prenorm=lambda h: head(norm(h)),
    )


def random_head(
    target: Any,
    boundaries: tuple[int, ...] = (1, 3, 5),
    draft: int = 23,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    **options: Any,
) -> DraftHead:
    """All parameters random, norms too, so that nothing cancels."""
    ids = np.sort(np.random.default_rng(seed).permutation(target.vocab_size)[:draft])
    vocab: DraftVocab = from_target_ids(torch.from_numpy(ids), target.vocab_size)
    config = config_for(target, boundaries, draft, **options)
    head = DraftHead(config, vocab, embedding_for(target, config.hidden_size))
    initialise(head, seed, std=0.3)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return head.to(dtype)


def conversations(
    target: Any, count: int, seed: int = 0, prompt: int = 4, response: int = 9, fixed: bool = False
) -> train.Online:
    """Random prompts with the target's own greedy answers; states come from the target."""
    rng = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(count):
        p = prompt if fixed else int(rng.integers(2, prompt + 3))
        r = response if fixed else int(rng.integers(5, response + 3))
        ids = torch.from_numpy(rng.integers(3, target.vocab_size, (1, p)))
        with torch.no_grad():
            for _ in range(r):
                following = target.model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1)
                ids = torch.cat([ids, following[:, None]], dim=1)
        tokens.append(ids[0].numpy())
        masks.append(np.arange(p + r) >= p)
    return train.Online(target, [f"c{i}" for i in range(count)], tokens, masks)


def cached(online: train.Online, boundaries: tuple[int, ...]) -> train.Examples:
    """The same conversations with their states kept, as a capture would."""
    boundaries = (*boundaries, online.target.num_layers)
    states = [train.target_states(online.target, t, boundaries) for t in online.tokens]
    best = [train.best_tokens(online.target, s[-1]).numpy() for s in states]
    return train.Examples(
        online.ids,
        online.tokens,
        online.responses,
        torch.cat(states, dim=1),
        boundaries,
        np.concatenate(best),
    )
