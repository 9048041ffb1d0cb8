"""The target answers the training prompts itself: a fast batched decoder and its files.

A head is trained on what its target says, so the training text is decoded from the target. Only
the token ids that the model produced are kept, with the ids of the records that were asked; the
prompts are rendered again from the corpora when states are captured.
"""

import hashlib
import json
import math
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paperlib import files
from paperlib.errors import InputError

FORMAT = "paperlib-responses-1"
ATTENTION = "paperlib_decode"
COMPACT_BELOW = 0.8  # finished rows leave the batch when fewer than this share of it still run


# -- decoding -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Response:
    """What the target said: token ids (with the end token, if it came) and how sure it was."""

    tokens: tuple[int, ...]
    margin: float  # smallest gap between the two largest logits on the way; inf when sampled


class _Rows(DynamicLayer):
    """Keys and values of one block in buffers of fixed capacity: a step copies one token, not all.

    transformers' own dynamic layer concatenates, which moves the whole cache at every step.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = tuple(
            x.new_empty(x.shape[0], x.shape[1], self.capacity, x.shape[3])
            for x in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.length + key_states.shape[2]
        for buffer, new in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.length : end] = new
        self.length = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def keep(self, rows: Tensor) -> None:
        """Only ``rows`` of the batch stay; the buffers shrink with it."""
        small = []
        for buffer in self.buffers:
            kept = buffer.new_empty(len(rows), *buffer.shape[1:])
            kept[:, :, : self.length] = buffer[rows, :, : self.length]
            small.append(kept)
        self.buffers = tuple(small)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' SDPA attention; for one query token, without repeating grouped keys and values.

    query [B, hq, 1, d], key and value [B, hkv, T, d]. The g = hq / hkv query heads of a group become
    rows of one matrix product, so a step reads the cache once instead of writing g copies of it.
    """
    simple = query.shape[2] == 1 and not kwargs.get("softcap") and kwargs.get("s_aux") is None
    if not simple or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    q = query.reshape(batch, groups, heads // groups, width)  # [B, hkv, g, d]
    scores = q @ key.transpose(2, 3)  # [B, hkv, g, T]
    scores *= width**-0.5 if scaling is None else scaling
    if attention_mask is not None:
        if attention_mask.dtype == torch.bool:
            scores.masked_fill_(~attention_mask, -math.inf)
        else:
            scores += attention_mask
    out = scores.softmax(dim=-1) @ value  # [B, hkv, g, d]
    return out.reshape(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def end_tokens(target: Any) -> set[int]:
    """The ids that end a response: the model's generation config, then its tokenizer."""
    ids = target.model.generation_config.eos_token_id
    if ids is None and target.tokenizer is not None:
        ids = target.tokenizer.eos_token_id
    if ids is None:
        return set()
    return {int(i) for i in (ids if isinstance(ids, list | tuple) else [ids])}


def uniforms(seed: int, name: str, count: int) -> np.ndarray:
    """[count] numbers in [0, 1) that depend on the seed and the record alone, not on the batch."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.default_rng(list(digest)).random(count)


@torch.inference_mode()
def decode(
    target: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch: int = 128,
    temperature: float = 0.0,
    draws: Sequence[np.ndarray] | None = None,
    observe: Callable[[list[int], Tensor | None], None] | None = None,
    progress: bool = False,
) -> list[Response]:
    """The target's answers to ``prompts`` (token ids), greedy or sampled, in the order given.

    Prompts are sorted by length and cut into batches that are left-padded; a row that has ended
    leaves its batch. Greedy results equal ``model.generate(do_sample=False)`` row by row in fp32,
    except where the two largest logits are closer than rounding (see ``Response.margin``).

    temperature: 0 is greedy; otherwise token = inverse cumulative distribution at ``draws[i][step]``.
    observe(rows, mask): called after each forward pass, with the prompts' indices in batch order
    and, for the first pass of a batch, the [B, T] mask of real tokens; for hooks that keep states.
    Raises InputError for an empty prompt and for sampling without draws.
    """
    if any(len(p) == 0 for p in prompts):
        raise InputError("decode: an empty prompt; give each at least one token (for example BOS)")
    if temperature > 0 and draws is None:
        raise InputError("decode: temperature > 0 needs draws, one array of uniforms a prompt")
    if batch < 1 or max_new_tokens < 1:
        raise InputError(
            f"decode: batch {batch} and max_new_tokens {max_new_tokens} must be 1 or more"
        )
    order = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    results: list[Response | None] = [None] * len(prompts)
    model = target.model
    previous = model.config._attn_implementation
    if previous == "sdpa":
        model.set_attn_implementation(ATTENTION)
    bar = tqdm(total=len(prompts), unit="prompt", disable=not progress)
    try:
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            for i, response in _decode_batch(
                target, prompts, chosen, max_new_tokens, temperature, draws, observe
            ):
                results[i] = response
                bar.update()
    finally:
        bar.close()
        if previous == "sdpa":
            model.set_attn_implementation(previous)
    return [r for r in results if r is not None]


def _decode_batch(
    target: Any,
    prompts: Sequence[Sequence[int]],
    chosen: list[int],
    max_new_tokens: int,
    temperature: float,
    draws: Sequence[np.ndarray] | None,
    observe: Callable[[list[int], Tensor | None], None] | None,
) -> Iterator[tuple[int, Response]]:
    model, device, ends = target.model, target.device, end_tokens(target)
    width = max(len(prompts[i]) for i in chosen)
    capacity = width + max_new_tokens
    ids = torch.zeros(len(chosen), width, dtype=torch.long)
    mask = torch.zeros(len(chosen), capacity, dtype=torch.long)
    for row, i in enumerate(chosen):
        ids[row, width - len(prompts[i]) :] = torch.tensor(prompts[i])
        mask[row, width - len(prompts[i]) :] = 1  # also over the tokens to come
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask[:, :width].cumsum(dim=1) - 1).clamp(min=0)  # [B, T]
    layers = [_Rows(capacity) for _ in target.blocks]
    cache = Cache(layers=layers)  # type: ignore[arg-type]
    rows = list(chosen)  # the prompt behind each row that is still in the batch
    said: dict[int, list[int]] = {i: [] for i in chosen}
    margins = dict.fromkeys(chosen, math.inf)
    finished: set[int] = set()
    for step in range(max_new_tokens):
        padded = mask[:, : width + step]
        out = model(
            input_ids=ids,
            attention_mask=padded,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if observe is not None:
            observe(rows, padded if step == 0 else None)
        logits = out.logits[:, -1].float()  # [B, V]
        if temperature > 0 and draws is not None:
            cumulative = (logits / temperature).softmax(dim=-1).double().cumsum(dim=-1)
            at = torch.tensor([[draws[i][step]] for i in rows], dtype=torch.float64, device=device)
            at = at * cumulative[:, -1:]
            best = torch.searchsorted(cumulative, at, right=True)[:, 0]
            best = best.clamp(max=logits.shape[1] - 1)
        else:
            best = logits.argmax(dim=-1)  # ties: the first, as generate does
            top = logits.topk(2, dim=-1).values
            for i, gap in zip(rows, (top[:, 0] - top[:, 1]).tolist(), strict=True):
                if i not in finished:
                    margins[i] = min(margins[i], gap)
        for i, token in zip(rows, best.tolist(), strict=True):
            if i in finished:
                continue
            said[i].append(token)
            if token in ends or len(said[i]) == max_new_tokens:
                finished.add(i)
                yield i, Response(tuple(said[i]), margins[i])
        alive = [r for r, i in enumerate(rows) if i not in finished]
        if not alive:
            return
        ids, positions = best[:, None], positions[:, -1:] + 1
        if len(alive) < COMPACT_BELOW * len(rows):
            keep = torch.tensor(alive, device=device)
            for layer in layers:
                layer.keep(keep)
            rows = [rows[r] for r in alive]
            ids, positions, mask = ids[keep], positions[keep], mask[keep]


# -- which prompts --------------------------------------------------------------------------------

SHINGLE = 4  # words in a row that are compared
NEAR = 0.5  # share of the smaller prompt's shingles that makes two prompts near-duplicates


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _shingles(text: str) -> set[tuple[str, ...]]:
    words = _words(text)
    return {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def overlapping(texts: Sequence[str], evaluation: Sequence[str]) -> list[bool]:
    """For each of ``texts``: is it an evaluation prompt, exactly or nearly?

    Exactly: the same words after case folding. Nearly: at least half of the four-word shingles of
    the shorter of the two occur in the other (containment), which also catches a prompt inside
    a longer one.
    """
    exact = {tuple(_words(t)) for t in evaluation}
    sizes = []
    where: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for e, text in enumerate(evaluation):
        shingles = _shingles(text)
        sizes.append(len(shingles))
        for shingle in shingles:
            where[shingle].append(e)
    found = []
    for text in texts:
        shingles = _shingles(text)
        shared: dict[int, int] = defaultdict(int)
        for shingle in shingles:
            for e in where.get(shingle, ()):
                shared[e] += 1
        near = any(n >= NEAR * min(sizes[e], len(shingles)) for e, n in shared.items())
        found.append(near or tuple(_words(text)) in exact)
    return found
