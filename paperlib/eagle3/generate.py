"""The target answers the training prompts itself: a fast batched decoder and its files.

A head is trained on what its target says, so the training text is decoded from the target. Only
the token ids that the model produced are kept, with the ids of the records that were asked; the
prompts are rendered again from the corpora when states are captured.
"""

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save as save_safetensors
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from paperlib import files
from paperlib.corpora import Corpus, Document, Record, load_corpus, overlaps, tokenize
from paperlib.errors import InputError
from paperlib.targets import load_target

FORMAT = "paperlib-responses-1"
ATTENTION = "paperlib_decode"
PREFILL_TOKENS = 2048  # padded prompt tokens in one forward pass: its activations stay in cache
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

    def __init__(self, batch: int, capacity: int) -> None:
        super().__init__()
        self.batch, self.capacity = batch, capacity
        self.length = 0
        self.window = slice(0, batch)  # the rows that the next forward pass works on

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.buffers = tuple(
            x.new_empty(self.batch, x.shape[1], self.capacity, x.shape[3])
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
            buffer[self.window, :, self.length : end] = new
        self.length = end
        self.keys, self.values = (buffer[self.window, :, :end] for buffer in self.buffers)
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
        self.window = slice(0, len(rows))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' SDPA attention; for one query token, without repeating keys and values.

    query [B, hq, 1, d], key and value [B, hkv, T, d]. The g = hq / hkv query heads of a group are
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

    temperature: 0 is greedy; otherwise the inverse cumulative distribution at ``draws[i][step]``.
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
    layers = [_Rows(len(chosen), capacity) for _ in target.blocks]
    cache = Cache(layers=layers)  # type: ignore[arg-type]
    rows = list(chosen)  # the prompt behind each row that is still in the batch
    said: dict[int, list[int]] = {i: [] for i in chosen}
    margins = dict.fromkeys(chosen, math.inf)
    finished: set[int] = set()

    def forward(part: slice, length: int) -> Tensor:
        for layer in layers:
            layer.window, layer.length = part, length
        padded = mask[part, : length + ids.shape[1]]
        out = model(
            input_ids=ids[part],
            attention_mask=padded,
            position_ids=positions[part],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if observe is not None:
            observe(rows[part], padded if length == 0 else None)
        return out.logits[:, -1].float()

    for step in range(max_new_tokens):
        if step == 0:
            size = max(1, PREFILL_TOKENS // width)
            parts = [slice(r, min(r + size, len(rows))) for r in range(0, len(rows), size)]
            logits = torch.cat([forward(part, 0) for part in parts])  # [B, V]
        else:
            logits = forward(slice(0, len(rows)), width + step - 1)
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


# -- which prompts, and the files ------------------------------------------------------------------

# Training prompts for the embedded target: records per named set.
RECIPE = {
    "questions": 900,
    "code-tasks": 800,
    "code-completions": 550,
    "about-openwebtext": 475,
    "about-wikipedia": 475,
    "evals-prompts": 1000,
}
EVALUATION = ("mt-bench", "humaneval", "gsm8k", "instructions", "web-summaries", "news-summaries")


@dataclass(frozen=True)
class Responses:
    """Answers of one target: record ids, the token ids it produced, and how they were made."""

    ids: tuple[str, ...]
    tokens: tuple[np.ndarray, ...]
    margins: np.ndarray  # [records] smallest top-two logit gap of each answer
    about: dict[str, Any]


def write_responses(
    path: Path,
    ids: Sequence[str],
    tokens: Sequence[Sequence[int] | np.ndarray],
    margins: Sequence[float] | np.ndarray,
    about: dict[str, Any],
) -> None:
    """One columnar file: all token ids end to end, their offsets, record ids as JSON metadata."""
    lengths = np.array([len(t) for t in tokens], dtype=np.int32)
    flat = np.concatenate([np.asarray(t, dtype=np.int64) for t in tokens])
    kind = np.uint16 if flat.max(initial=0) < 2**16 else np.int32
    columns = {
        "tokens": flat.astype(kind),
        "lengths": lengths,
        "margins": np.asarray(margins, dtype=np.float32),
    }
    # one metadata entry: the library writes several in no fixed order, and the file has a hash
    record = files.canonical({"format": FORMAT, "ids": list(ids), "about": about})
    with files.replacing(path) as temporary:
        temporary.write_bytes(save_safetensors(columns, {"paperlib": record}))


def read_responses(path: Path) -> Responses:
    """InputError for a file that is missing, foreign or damaged."""
    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as f:
            record = json.loads((f.metadata() or {}).get("paperlib", "{}"))
            if record.get("format") != FORMAT:
                raise ValueError(f"format {record.get('format')!r}, expected {FORMAT!r}")
            columns = {n: f.get_tensor(n) for n in ("tokens", "lengths", "margins")}
        ids, about = record["ids"], record["about"]
        lengths = columns["lengths"].astype(np.int64)
        if lengths.sum() != len(columns["tokens"]) or len(lengths) != len(ids):
            raise ValueError("lengths do not add up")
    except Exception as error:
        raise InputError(
            f"{path}: expected responses written by paperlib generate ({error})"
        ) from error
    tokens = np.split(columns["tokens"].astype(np.int64), np.cumsum(lengths)[:-1])
    return Responses(tuple(ids), tuple(tokens), columns["margins"], about)


def records_of(ids: Sequence[str]) -> Corpus:
    """The records behind ids such as ``questions/0042``, in that order.

    InputError names the first id that no named set holds.
    """
    found: dict[str, Record] = {}
    for name in sorted({i.split("/")[0] for i in ids}):
        found |= {r.id: r for r in load_corpus(name).records}
    for i in ids:
        if i not in found:
            raise InputError(f"record {i!r} is in no named set")
    chosen = tuple(found[i] for i in ids)
    return Corpus("records", chosen, "see each set", "named sets", files.key(list(ids)))


def choose(
    target: Any,
    recipe: Mapping[str, int],
    *,
    seed: int,
    max_prompt_tokens: int,
    evaluation: Sequence[str] = EVALUATION,
) -> list[Document]:
    """Prompts by a recipe of records per set, seeded, clear of the evaluation prompts.

    An evaluation prompt is left out exactly and nearly (``corpora.overlaps``), and so are repeats.
    InputError when a set cannot give as many as the recipe asks for.
    """
    judged = [load_corpus(name) for name in evaluation]
    chosen: list[Document] = []
    seen: set[tuple[int, ...]] = set()
    for name, count in recipe.items():
        corpus = load_corpus(name, seed=seed)
        near = {a for e in judged for a, _, _ in overlaps(corpus, e)}
        taken = 0
        for document in tokenize(target, corpus, max_tokens=max_prompt_tokens + 1):
            ids = tuple(document.input_ids)
            if document.id in near or len(ids) > max_prompt_tokens or ids in seen:
                continue
            seen.add(ids)
            chosen.append(document)
            taken += 1
            if taken == count:
                break
        if taken < count:
            raise InputError(
                f"recipe asks for {count} prompts of {name!r}, but only {taken} are left of at "
                f"most {max_prompt_tokens} tokens and clear of the evaluation prompts"
            )
    return chosen


def answer(
    target: Any,
    documents: Sequence[Document],
    out: Path,
    *,
    max_new_tokens: int,
    batch: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    about: dict[str, Any] | None = None,
    progress: bool = True,
) -> Responses:
    """Decode every document and write ``out``, by shards of one batch that survive a killed run.

    Shards hold prompts of like length and are decoded in seeded order, so that a part of the work
    is a fair sample of it. Several processes may work on the same ``out``: each takes shards that
    are not there yet.
    """
    if not documents:
        raise InputError("no prompts to answer")
    request = {
        "target": target.name,
        "fingerprint": target.fingerprint,
        "prompts": prompt_key(documents),
        "records": len(documents),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
        "model_dtype": str(target.model.dtype),
    }
    parts = out.with_name(f".{out.name}.{files.key([request, batch])}.parts")
    order = sorted(range(len(documents)), key=lambda i: (len(documents[i].input_ids), i))
    shards = [order[i : i + batch] for i in range(0, len(order), batch)]
    sequence = np.random.default_rng(seed).permutation(len(shards)).tolist()
    produced, began = 0, time.perf_counter()
    bar = tqdm(total=len(documents), unit="prompt", desc="generate", disable=not progress)
    for s in sequence:
        place, shard = parts / f"{s:04d}.safetensors", shards[s]
        if not place.exists():
            draws = [uniforms(seed, documents[i].id, max_new_tokens) for i in shard]
            found = decode(
                target,
                [documents[i].input_ids for i in shard],
                max_new_tokens=max_new_tokens,
                batch=batch,
                temperature=temperature,
                draws=draws,
            )
            ids = [documents[i].id for i in shard]
            write_responses(place, ids, [r.tokens for r in found], [r.margin for r in found], {})
            produced += sum(len(r.tokens) for r in found)
            bar.set_postfix_str(f"{produced / (time.perf_counter() - began):.0f} tokens/s")
        bar.update(len(shard))
    bar.close()
    tokens: list[np.ndarray] = [np.zeros(0)] * len(documents)
    margins = np.zeros(len(documents))
    for s, shard in enumerate(shards):
        part = read_responses(parts / f"{s:04d}.safetensors")
        for i, t, m in zip(shard, part.tokens, part.margins, strict=True):
            tokens[i], margins[i] = t, m
    names = [d.id for d in documents]
    write_responses(out, names, tokens, margins, {**(about or {}), **request})
    shutil.rmtree(parts)
    return read_responses(out)


def prompt_key(documents: Sequence[Document]) -> str:
    """Identifies prompts by record id and token ids: a changed template or tokenizer changes it."""
    return files.key([[d.id, list(d.input_ids)] for d in documents])


def prompts_of(target: Any, responses: Responses) -> list[Document]:
    """The prompts behind ``responses``, rendered and tokenised again.

    InputError when they differ from those that were answered.
    """
    documents = tokenize(target, records_of(responses.ids), max_tokens=10**6)
    found = prompt_key(documents)
    if found != responses.about["prompts"]:
        raise InputError(
            f"the prompts of these responses come out as {found}, expected "
            f"{responses.about['prompts']}: another tokenizer, chat template or version of the sets"
        )
    return documents


def regenerate(target: Any, responses: Responses, ids: Sequence[str]) -> dict[str, bool]:
    """Decode some records again: for each id, are the token ids the same?

    A greedy answer may differ from a batch of other sizes only after a near-tie; ``margins`` says
    where one is.
    """
    chosen = [responses.ids.index(i) for i in ids]
    documents = prompts_of(target, responses)
    found = decode(
        target,
        [documents[i].input_ids for i in chosen],
        max_new_tokens=responses.about["max_new_tokens"],
        temperature=responses.about["temperature"],
        draws=[
            uniforms(responses.about["seed"], responses.ids[i], responses.about["max_new_tokens"])
            for i in chosen
        ],
    )
    return {
        responses.ids[i]: list(r.tokens) == responses.tokens[i].tolist()
        for i, r in zip(chosen, found, strict=True)
    }


def generate(
    target: str = "smollm2-135m",
    *,
    out: Path,
    sets: Mapping[str, int] | None = None,
    records: Path | None = None,
    max_new_tokens: int = 192,
    max_prompt_tokens: int = 160,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    progress: bool = True,
) -> Responses:
    """``paperlib generate``: the target answers prompts of named sets; writes ``out``.

    sets: records per set (default RECIPE). records: answer exactly the records of another responses
    file instead, in its order.
    """
    loaded = load_target(target, dtype=dtype, device=device)
    if records is not None:
        documents = tokenize(loaded, records_of(read_responses(records).ids), max_tokens=10**6)
        recipe = read_responses(records).about.get("recipe", {})
    else:
        recipe = dict(sets or RECIPE)
        documents = choose(loaded, recipe, seed=seed, max_prompt_tokens=max_prompt_tokens)
    about = {"recipe": recipe, "max_prompt_tokens": max_prompt_tokens}
    return answer(
        loaded,
        documents,
        out,
        max_new_tokens=max_new_tokens,
        batch=batch,
        temperature=temperature,
        seed=seed,
        about=about,
        progress=progress,
    )
