"""Training-time test: a head learns on its own drafts' states (EAGLE-3, Li et al., 2025).

Step i of the test feeds the head's output of step i - 1 back in and moves the tokens one to the
left, so that row t of step i is the i-th draft from prefix t. Its query has position t + i and sees
the step-0 keys of rows <= t and, of the steps 1..i, only the keys of its own row: exactly what a
rollout from that prefix sees. The loss is the soft cross-entropy to the target's distribution over
the draft vocabulary, in fp32, with rows left out whose target token cannot be drafted.

A row is supervised at step i when every token from x[t+1] to the predicted x[t+2+i] is part of a
response: the drafts that can happen, since the first response token always comes from the target.
"""

import contextlib
import csv
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from paperlib import files
from paperlib.eagle3 import ngram
from paperlib.eagle3.draft import DraftHead, HeadConfig, embedding_for, initialise, save_head
from paperlib.eagle3.vocab import DraftVocab
from paperlib.errors import InputError


@dataclass(frozen=True)
class TrainConfig:
    """How a head is trained. A *pass* is one response row seen once, with all its steps."""

    passes: int = 300_000
    steps: int = 3  # of the training-time test
    decay: float = 0.8  # weight of step i is decay ** i
    batch: int = 1  # conversations in a micro-batch of one process
    accumulate: int = 1  # micro-batches in an optimiser step
    lr: float = 1e-3
    final_lr: float = 0.05  # share of lr at the end of the cosine
    warmup: float = 0.03  # share of the optimiser steps
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    seed: int = 0
    train_lm_head: bool = False  # False: the target's rows, frozen
    warm_start: bool = False  # the layer from the target's last block
    norm_start: float = 0.3  # initial final norm, as a share of the target's
    whiten: float = 0.0  # shrinkage of the whitening of fc's input; 0: none
    ridge_start: float = 0.0  # fc starts at ridge regression with this penalty; 0: at random
    embedding_start: bool = False  # attention starts as the regression's map of the embedding
    evaluate_every: int = 500  # optimiser steps
    checkpoint_every: int = 200

    def __post_init__(self) -> None:
        whole = ("passes", "steps", "batch", "accumulate", "evaluate_every", "checkpoint_every")
        for name in whole:
            if getattr(self, name) < 1:
                raise InputError(f"{name} = {getattr(self, name)}: expected 1 or more")
        if not (self.lr > 0 and self.clip > 0 and 0 <= self.warmup < 1):
            raise InputError(
                f"lr {self.lr} and clip {self.clip} must be positive, "
                f"warmup {self.warmup} in [0, 1)"
            )


# -- data -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """One conversation with the states that a head reads and is trained on.

    states [A, n, Ht] at the head's boundaries; final [n, Ht] at boundary N (before the final norm);
    best [n] the target's most likely next token over its whole vocabulary, at each position.
    """

    id: str
    tokens: Tensor  # [n] int64
    response: Tensor  # [n] bool
    states: Tensor
    final: Tensor
    best: Tensor


class Examples:
    """Conversations whose states were captured once, memory-mapped, for a union of boundaries.

    states [L, n, d]: of all conversations one after the other, as ``paperlib.capture`` writes them
    (``TokenStates.states``); boundaries: which, the last must be the target's N.
    """

    def __init__(
        self,
        ids: Sequence[str],
        tokens: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
        states: Tensor,
        boundaries: Sequence[int],
        best: np.ndarray,
    ) -> None:
        self.ids, self.tokens, self.responses = list(ids), list(tokens), list(responses)
        self.states, self.boundaries, self.best = states, tuple(boundaries), best
        self.starts = np.concatenate([[0], np.cumsum([len(t) for t in tokens])])
        if self.starts[-1] != states.shape[1] or len(best) != states.shape[1]:
            raise InputError(
                f"{self.starts[-1]} tokens in {len(ids)} conversations, but states of "
                f"{states.shape[1]} and best tokens of {len(best)}"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, i: int) -> int:
        """Rows that conversation i supervises: its passes."""
        return max(0, int(self.responses[i].sum()) - 1)

    def get(self, i: int, boundaries: Sequence[int]) -> Example:
        missing = set(boundaries) - set(self.boundaries)
        if missing:
            raise InputError(
                f"boundaries {sorted(missing)} were not captured: {list(self.boundaries)} were"
            )
        where = slice(int(self.starts[i]), int(self.starts[i + 1]))
        rows = [self.boundaries.index(b) for b in boundaries]
        return Example(
            self.ids[i],
            torch.from_numpy(np.asarray(self.tokens[i], dtype=np.int64)),
            torch.from_numpy(np.asarray(self.responses[i], dtype=bool)),
            torch.stack([self.states[r, where] for r in rows]),
            self.states[-1, where],
            torch.from_numpy(np.asarray(self.best[where], dtype=np.int64)),
        )

    def median_rms(self, boundaries: Sequence[int], limit: int = 20_000) -> Tensor:
        """[A] median over tokens of the root mean square of the states at each boundary."""
        stride = max(1, self.states.shape[1] // limit)
        rms = [
            self.states[self.boundaries.index(b), ::stride].float().square().mean(-1).sqrt()
            for b in boundaries
        ]
        return torch.stack([r[r > 0].median() for r in rms])


class Online(Examples):
    """The same without a cache: states come from the target each time a conversation is used."""

    def __init__(
        self,
        target: Any,
        ids: Sequence[str],
        tokens: Sequence[np.ndarray],
        responses: Sequence[np.ndarray],
    ) -> None:
        self.target = target
        self.ids, self.tokens, self.responses = list(ids), list(tokens), list(responses)
        self.boundaries = tuple(range(target.num_layers + 1))

    def get(self, i: int, boundaries: Sequence[int]) -> Example:
        states = target_states(self.target, self.tokens[i], (*boundaries, self.target.num_layers))
        return Example(
            self.ids[i],
            torch.from_numpy(np.asarray(self.tokens[i], dtype=np.int64)),
            torch.from_numpy(np.asarray(self.responses[i], dtype=bool)),
            states[:-1],
            states[-1],
            best_tokens(self.target, states[-1]),
        )

    def median_rms(self, boundaries: Sequence[int], limit: int = 20_000) -> Tensor:
        seen, rms = 0, []
        for i in range(len(self)):
            rms.append(self.get(i, boundaries).states.float().square().mean(-1).sqrt())
            seen += rms[-1].shape[1]
            if seen >= limit:
                break
        return torch.cat(rms, dim=1).median(dim=1).values


@torch.no_grad()
def target_states(target: Any, tokens: np.ndarray, boundaries: Sequence[int]) -> Tensor:
    """[len(boundaries), n, d] the residual stream of one sequence at ``boundaries``."""
    kept: dict[int, Tensor] = {}

    def before(module: Any, args: tuple, kwargs: dict) -> None:
        kept[0] = args[0] if args else kwargs["hidden_states"]

    def after(b: int) -> Callable[..., None]:
        def keep(module: Any, args: tuple, output: Any) -> None:
            kept[b] = output[0] if isinstance(output, tuple) else output

        return keep

    blocks = list(target.blocks)
    handles = [
        blocks[b - 1].register_forward_hook(after(b))
        if b
        else blocks[0].register_forward_pre_hook(before, with_kwargs=True)
        for b in set(boundaries)
    ]
    try:
        ids = torch.from_numpy(np.asarray(tokens, dtype=np.int64))[None].to(target.device)
        target.model.base_model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([kept[b][0] for b in boundaries])


@torch.no_grad()
def best_tokens(target: Any, final: Tensor, rows: int = 256) -> Tensor:
    """[n] argmax of the target's logits; final [n, d] at boundary N. [rows, V] at a time."""
    weight = next(target.model.parameters())
    parts = [
        target.logits_from_prenorm(part.to(weight.device, weight.dtype)).argmax(dim=-1)
        for part in final.split(rows)
    ]
    return torch.cat(parts).cpu()


@dataclass(frozen=True)
class Batch:
    """Padded conversations: T tokens, R query rows, K steps. Everything a forward needs."""

    ids: tuple[str, ...]
    tokens: Tensor  # [B, T]
    states: Tensor  # [B, T, A, Ht]
    final: Tensor  # [B, R + K, Ht]: at positions row + 1, ..., so that step i takes [i : i + R]
    best: Tensor  # [B, R + K] the target's token there, over its whole vocabulary
    rows: Tensor  # [B, R] position of each query row
    supervised: Tensor  # [K, B, R] bool


def collate(examples: Sequence[Example], steps: int, device: torch.device) -> Batch:
    """Right-padded; query rows run from the first to the last that any step supervises."""
    size = len(examples)
    longest = max(len(e.tokens) for e in examples)
    spans = []
    for e in examples:
        where = torch.nonzero(e.response)[:, 0]
        if len(where) < 2:
            raise InputError(f"record {e.id}: fewer than two response tokens, nothing to supervise")
        # a conversation that starts with a response has no state before its first token
        spans.append((max(0, int(where[0]) - 1), int(where[-1]) - 1))
    width = max(end - start for start, end in spans)
    first = examples[0]
    tokens = torch.zeros(size, longest, dtype=torch.long)
    states = first.states.new_zeros(size, longest, first.states.shape[0], first.states.shape[2])
    final = first.final.new_zeros(size, width + steps, first.final.shape[1])
    best = torch.zeros(size, width + steps, dtype=torch.long)
    rows = torch.zeros(size, width, dtype=torch.long)
    supervised = torch.zeros(steps, size, width, dtype=torch.bool)
    for b, (e, (start, end)) in enumerate(zip(examples, spans, strict=True)):
        n = len(e.tokens)
        tokens[b, :n] = e.tokens
        states[b, :n] = e.states.transpose(0, 1)
        ahead = min(n, start + 1 + width + steps) - (start + 1)
        final[b, :ahead] = e.final[start + 1 : start + 1 + ahead]
        best[b, :ahead] = e.best[start + 1 : start + 1 + ahead]
        rows[b] = torch.arange(start, start + width).clamp(max=longest - 1)
        # run[t] = response tokens in a row from t on: step i needs i + 2 of them from t + 1
        run = torch.zeros(n + 1, dtype=torch.long)
        for t in range(n - 1, -1, -1):
            run[t] = run[t + 1] + 1 if e.response[t] else 0
        for i in range(steps):
            supervised[i, b, : end - start] = run[start + 1 : end + 1] >= i + 2
    batch = Batch(tuple(e.id for e in examples), tokens, states, final, best, rows, supervised)
    if device.type == "cpu":
        return batch
    names = ("tokens", "states", "final", "best", "rows", "supervised")
    return Batch(batch.ids, *(getattr(batch, name).to(device) for name in names))


# -- the training-time test -----------------------------------------------------------------------


def rollout_states(head: DraftHead, batch: Batch, steps: int) -> list[Tensor]:
    """h2 [B, R, H] of every query row at each step of the training-time test.

    Step 0 needs keys and values of all T rows, but queries only of the R rows that are supervised.
    """
    layer, attention = head.midlayer, head.midlayer.self_attn
    length, count = batch.tokens.shape[1], batch.rows.shape[1]
    device = batch.tokens.device
    pick = batch.rows[..., None]  # [B, R, 1]
    following = torch.cat([batch.tokens[:, 1:], batch.tokens[:, -1:]], dim=1)
    fused = head.fuse(batch.states)  # [B, T, H]
    a, residual = layer.inputs(head.embed_tokens(following).to(fused.dtype), fused)
    everywhere = torch.arange(length, device=device)[None]
    keys, values = attention.keys_values(a, head.rope(everywhere))  # [B, kv, T, d]
    a = a.gather(1, pick.expand(-1, -1, a.shape[2]))  # [B, R, 2H]
    residual = residual.gather(1, pick.expand(-1, -1, residual.shape[2]))
    ahead = everywhere[:, None] > pick  # [B, R, T]: may not be seen
    blocked = torch.zeros(ahead.shape, dtype=fused.dtype, device=device)
    blocked = blocked.masked_fill_(ahead, float("-inf"))[:, None, None]  # [B, 1, 1, R, T]
    own: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1.., own row only
    outputs: list[Tensor] = []
    scale = head.config.head_dim**-0.5
    for i in range(steps):
        rope = head.rope(batch.rows + i)
        if i > 0:
            at = (batch.rows + 1 + i).clamp(max=length - 1)
            embeds = head.embed_tokens(batch.tokens.gather(1, at)).to(fused.dtype)
            a, residual = layer.inputs(embeds, head.feedback(outputs[-1]))
            own.append(attention.keys_values(a, rope))  # [B, kv, R, d] each
        q = attention.queries(a, rope) * scale  # [B, kv, g, R, d]
        group = q.shape[2]
        scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).unflatten(2, (group, count))
        parts = [scores + blocked]  # [B, kv, g, R, T]
        parts += [(q * k[:, :, None]).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat(parts, dim=-1).softmax(dim=-1)
        mixed = weights[..., :length].flatten(2, 3) @ values
        mixed = mixed.unflatten(2, (group, count))  # [B, kv, g, R, d]
        for j, (_, v) in enumerate(own):
            mixed = mixed + weights[..., length + j, None] * v[:, :, None]
        outputs.append(layer.finish(residual, mixed))
    return outputs


class SoftCrossEntropy(torch.autograd.Function):
    """Sum over rows of weight * (logsumexp(z) - p . z), the gradient made on the way.

    z [m, Vd] logits, p [m, Vd] a distribution, weight [m]. One exponential of the logits instead of
    the several passes of log_softmax and its backward. First derivatives only.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, p: Tensor, weight: Tensor) -> Tensor:
        top = z.amax(dim=-1, keepdim=True)
        shifted = z - top
        dot = torch.linalg.vecdot(p, shifted)
        grad = shifted.exp_()
        total = grad.sum(dim=-1, keepdim=True)
        loss = (weight * (total[:, 0].log() - dot)).sum()
        grad.mul_(weight[:, None] / total).addcmul_(p, weight[:, None], value=-1)
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * upstream, None, None


@dataclass(frozen=True)
class StepOutcome:
    """Sums over supervised rows, one entry for each step of the test."""

    loss: Tensor  # [K] nats, with gradient; rows whose target token cannot be drafted count 0
    correct: Tensor  # [K] rows whose draft is the target's token
    rows: Tensor  # [K] supervised rows
    accepted: Tensor  # [B, R] drafts in a row that are right, from each row
    valid: Tensor  # [B, R] rows that step 0 supervises


class TrainingTest(nn.Module):
    """The head, and what its loss needs of the target: final norm and LM head, draft columns."""

    target: Any
    columns: Tensor
    bias: Tensor | None
    draft_ids: Tensor

    def __init__(self, head: DraftHead, target: Any, steps: int) -> None:
        super().__init__()
        self.head, self.steps = head, steps
        self.__dict__["target"] = target  # not a submodule: never trained, never saved
        weight = target.lm_head.weight.detach()
        columns = head.vocab.target_ids.to(weight.device)
        self.register_buffer("columns", weight[columns].clone(), persistent=False)  # [Vd, Ht]
        bias = getattr(target.lm_head, "bias", None)
        self.register_buffer(
            "bias", None if bias is None else bias.detach()[columns].clone(), persistent=False
        )
        stack = target.model.config.get_text_config()
        self.softcap = getattr(stack, "final_logit_softcapping", None)
        self.register_buffer("draft_ids", head.vocab.draft_ids(), persistent=False)  # [V]

    @torch.no_grad()
    def target_probabilities(self, final: Tensor) -> Tensor:
        """[..., Ht] at boundary N -> [..., Vd] fp32: softmax of the target's logits over the draft
        vocabulary alone, renormalised."""
        norm = self.target.final_norm
        dtype = next(norm.parameters(), self.columns).dtype
        normed = norm(final.to(dtype)).to(self.columns.dtype)
        logits = nn.functional.linear(normed, self.columns, self.bias)
        if self.softcap:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)

    def forward(self, batch: Batch) -> StepOutcome:
        count = batch.rows.shape[1]
        p = self.target_probabilities(batch.final)  # [B, R + K, Vd]
        wanted = self.draft_ids[batch.best]  # [B, R + K]; -1: cannot be drafted
        losses, correct, rows = [], [], []
        going = batch.supervised[0]
        accepted = torch.zeros_like(batch.rows)
        for i, h in enumerate(rollout_states(self.head, batch, self.steps)):
            mask = batch.supervised[i]
            want = wanted[:, i : i + count]
            logits = self.head.logits(h)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            weight = (mask & (want >= 0)).to(logits.dtype)
            with torch.autocast(logits.device.type, enabled=False):
                losses.append(
                    SoftCrossEntropy.apply(
                        logits.flatten(0, 1),
                        p[:, i : i + count].flatten(0, 1).to(logits.dtype),
                        weight.flatten(),
                    )
                )
            hit = (logits.detach().argmax(dim=-1) == want) & mask
            going = going & hit
            accepted += going
            correct.append(hit.sum())
            rows.append(mask.sum())
        return StepOutcome(
            torch.stack(losses), torch.stack(correct), torch.stack(rows), accepted,
            batch.supervised[0],
        )  # fmt: skip


# -- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Evaluation:
    """How a drafter does on held-out conversations, k = steps drafts a round, chain, greedy.

    loss, accuracy [K]: per draft position, over the rows it supervises (teacher-forced); a table
    has no loss.
    tau: 1 + accepted drafts, averaged over every row as the start of a round.
    tau_walk: the same over the rounds of an actual decode, which jump over what they accept.
    """

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]
    tau: float
    tau_walk: float
    rows: int


def evaluate(
    test: TrainingTest, examples: Examples, chosen: Sequence[int], *, batch: int = 4
) -> Evaluation:
    """Teacher-forced over ``chosen`` conversations. Where all earlier drafts of a row are right,
    the forced tokens are the drafted ones: accepted lengths are those of real chain drafting."""
    device = next(test.parameters()).device
    test.eval()
    sums = torch.zeros(3, test.steps, dtype=torch.float64)
    lengths: list[np.ndarray] = []
    order = sorted(chosen, key=lambda i: len(examples.tokens[i]))
    with torch.no_grad():
        for at in range(0, len(order), batch):
            items = [examples.get(i, test.head.config.boundaries) for i in order[at : at + batch]]
            out = test(collate(items, test.steps, device))
            sums += torch.stack([out.loss.double(), out.correct, out.rows]).cpu()
            lengths += [a[v].cpu().numpy() for a, v in zip(out.accepted, out.valid, strict=True)]
    test.train()
    loss, accuracy = (sums[0] / sums[2]).tolist(), (sums[1] / sums[2]).tolist()
    return Evaluation(tuple(loss), tuple(accuracy), *taus(lengths))


def taus(accepted: Sequence[np.ndarray]) -> tuple[float, float, int]:
    """(tau over every row, tau over the rounds of a decode, rows) from accepted lengths by row."""
    rows = np.concatenate(accepted) if accepted else np.zeros(0)
    if len(rows) == 0:
        return math.nan, math.nan, 0
    rounds = taken = 0
    for lengths in accepted:
        t = 0
        while t < len(lengths):
            rounds += 1
            taken += int(lengths[t])
            t += int(lengths[t]) + 1
    return 1 + float(rows.mean()), 1 + taken / rounds, len(rows)


def evaluate_ngram(
    table: ngram.NGram, examples: Examples, chosen: Sequence[int], steps: int
) -> Evaluation:
    """The same rows and the same question as ``evaluate``, asked of an n-gram table."""
    correct, rows = np.zeros(steps), np.zeros(steps)
    lengths = []
    for i in chosen:
        tokens, mask = np.asarray(examples.tokens[i]), np.asarray(examples.responses[i], dtype=bool)
        best = _best_of(examples, i)
        n, reach = len(tokens), table.order - 1
        padded = np.concatenate([np.full(reach, -1), tokens])
        # guess[t]: the token after t, from the last tokens up to t
        context = np.stack([padded[j + 1 : j + 1 + n] for j in range(reach)], axis=1)
        hit = table.predict(context) == best
        run = np.zeros(n + 1, dtype=int)
        for t in range(n - 1, -1, -1):
            run[t] = run[t + 1] + 1 if mask[t] else 0
        starts = np.flatnonzero(run[1:] >= 2)  # rows t with x[t+1], x[t+2] in the response
        going = np.ones(len(starts), dtype=bool)
        accepted = np.zeros(len(starts), dtype=int)
        for k in range(steps):
            on = run[starts + 1] >= k + 2
            right = on & hit[np.minimum(starts + 1 + k, n - 1)]
            going &= right
            accepted += going
            correct[k] += right.sum()
            rows[k] += on.sum()
        lengths.append(accepted)
    accuracy = tuple((correct / np.maximum(rows, 1)).tolist())
    return Evaluation((), accuracy, *taus(lengths))


def _best_of(examples: Examples, i: int) -> np.ndarray:
    if isinstance(examples, Online):
        return examples.get(i, (0,)).best.numpy()
    return np.asarray(examples.best[examples.starts[i] : examples.starts[i + 1]])


# -- one run --------------------------------------------------------------------------------------


def build_head(
    target: Any, config: HeadConfig, vocab: DraftVocab, options: TrainConfig, rms: Tensor | None
) -> DraftHead:
    """A seeded head whose LM head and final norm start as the target's.

    rms [A]: median RMS of the states at each boundary; the head divides by it (where no norm
    before fc does the same already).
    """
    head = DraftHead(config, vocab, embedding_for(target, config.hidden_size))
    initialise(head, options.seed)
    weight = target.lm_head.weight.detach()[vocab.target_ids].float()  # [Vd, Ht]
    with torch.no_grad():
        if config.hidden_size == config.target_hidden_size:
            head.lm_head.weight.copy_(weight)
            # on the random features of a new head the target's own norm starts the loss far
            # above that of a uniform guess: begin smaller
            head.norm.weight.copy_(options.norm_start * _norm_gain(target).float())
        if rms is not None and not (config.fc_norm or config.norm_before_fc):
            head.scale.copy_(1 / rms)
        if options.warm_start:
            _warm_start(head, target)
    frozen = not options.train_lm_head and config.hidden_size == config.target_hidden_size
    head.lm_head.weight.requires_grad_(not frozen)
    return head


def _norm_gain(target: Any) -> Tensor:
    """[Ht] what the final norm multiplies a vector of RMS 1 with (Gemma stores it minus one)."""
    norm = target.final_norm
    if isinstance(norm, nn.LayerNorm):
        return norm.weight.detach()
    parameter = next(norm.parameters())
    with torch.no_grad():
        return norm(torch.ones_like(parameter))


def _warm_start(head: DraftHead, target: Any) -> None:
    """Copy the target's last block where shapes agree; attention reads it from the fused half."""
    block = target.blocks[-1]
    own = dict(head.midlayer.named_parameters())
    width = head.config.hidden_size
    copied = 0
    for name, value in block.named_parameters():
        place = own.get(name)
        if place is None or name.endswith("layernorm.weight"):
            continue
        if place.shape == value.shape:
            place.copy_(value)
            copied += 1
        elif place.shape == (value.shape[0], 2 * width) and value.shape[1] == width:
            place[:, width:] = value.to(place.dtype)
            copied += 1
    if copied == 0:
        raise InputError(f"warm start: no parameter of {target.name}'s last block fits the head")


@torch.no_grad()
def condition(
    head: DraftHead,
    examples: Examples,
    chosen: Sequence[int],
    options: TrainConfig,
    limit: int = 40_000,
) -> None:
    """Whiten fc's input, and start fc at the linear prediction of what the head must come to.

    A gradient step learns directions of large variance first, and states of neighbouring
    boundaries are almost the same in those. With C the second moment of the scaled states, the
    input is multiplied by (C + whiten * mean eigenvalue)^(-1/2). The start of fc is the ridge
    regression from whitened states at t to the target's final state at t + 1, brought to RMS 1.
    Both use the first ``limit`` response rows of ``chosen`` and are folded away in the end.
    """
    if options.embedding_start and not options.ridge_start:
        raise InputError("embedding_start is a part of the regression: set ridge_start, too")
    if options.ridge_start and head.config.hidden_size != head.config.target_hidden_size:
        raise InputError("ridge_start needs a head of the target's width")
    inputs, outputs, embeds, seen = [], [], [], 0
    for i in chosen:
        e = examples.get(i, head.config.boundaries)
        rows = torch.nonzero(e.response)[:, 0][:-1]  # t + 1 in the response
        rows = rows[rows > 0] - 1
        x = e.states[:, rows].float() * head.scale.cpu()[:, None, None]
        inputs.append(x.transpose(0, 1).flatten(1))  # [r, A Ht]
        y = e.final[rows + 1].float()
        outputs.append(y / y.square().mean(-1, keepdim=True).sqrt())
        known = head.embed_tokens(e.tokens[rows + 1].to(head.scale.device)).cpu().float()
        embeds.append(nn.functional.rms_norm(known, known.shape[-1:], eps=1e-5))
        seen += len(rows)
        if seen >= limit:
            break
    x, y = torch.cat(inputs), torch.cat(outputs)
    moment = (x.T @ x).double() / len(x)
    values, vectors = torch.linalg.eigh(moment)
    if options.whiten:
        gain = (values.clamp(min=0) + options.whiten * values.mean()).rsqrt()
        # whitened inputs keep the mean square of plain ones: 1 in each scaled boundary
        gain /= (values.clamp(min=0) * gain.square()).mean().sqrt()
        head.whitening = ((vectors * gain) @ vectors.T).to(head.fc.weight)
    else:
        gain = torch.ones_like(values)
    if not options.ridge_start:
        return
    width = x.shape[1]
    x = x @ ((vectors * gain) @ vectors.T).float()
    if options.embedding_start:
        known = torch.cat(embeds)
        solution = _ridge(torch.cat([x, known], dim=1), y, options.ridge_start)  # [A Ht + H, Ht]
        _attend_to_self(head, known, solution[width:].T)
    else:
        solution = _ridge(x, y, options.ridge_start)
    head.fc.weight.copy_(solution[:width].T)


def _ridge(x: Tensor, y: Tensor, penalty: float) -> Tensor:
    """[p, q] argmin |x w - y|^2 / n + penalty * (mean square of x) * |w|^2."""
    moment = (x.T @ x).double() / len(x)
    moment.diagonal().add_(penalty * moment.diagonal().mean())
    return torch.linalg.solve(moment, (x.T @ y).double() / len(x)).float()


SELF_SCORE = 40.0  # attention score of a row with itself at the start
SELF_PAIRS = 4  # fastest RoPE pairs that carry it: the score falls off within a token or two


@torch.no_grad()
def _attend_to_self(head: DraftHead, embeds: Tensor, linear: Tensor) -> None:
    """Start attention as ``linear`` [H, H] of a row's own normalised token embedding.

    The embedding reaches the output through attention alone. A direction w with w . e = 1 for
    almost every token gives queries and keys a constant part; in the fastest RoPE pairs its score
    is largest at distance 0. Values and output then hold the best map of the rank that the value
    heads allow. The MLP starts at nothing.
    """
    attention, c = head.midlayer.self_attn, head.config
    if c.qk_norm:
        raise InputError("embedding_start: query and key norms bound the scores; leave it off")
    h, d = c.hidden_size, c.head_dim
    constant = _ridge(embeds, embeds.new_ones(len(embeds), 1), 1e-3)[:, 0]
    size = math.sqrt(SELF_SCORE * math.sqrt(d) / SELF_PAIRS)
    for weight in (attention.q_proj.weight, attention.k_proj.weight):
        for rows in weight.split(d):
            rows[:SELF_PAIRS] = 0
            rows[:SELF_PAIRS, :h] = size * constant.to(weight)
    left, scale, right = torch.linalg.svd(linear)
    rank, group = c.num_key_value_heads * d, c.num_attention_heads // c.num_key_value_heads
    rank = min(rank, h)
    root = scale[:rank].sqrt()
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:rank, :h] = (root[:, None] * right[:rank]).to(head.fc.weight)
    attention.o_proj.weight.zero_()
    columns = (left[:, :rank] * root / group).to(head.fc.weight)  # one head of each group's
    for j, part in enumerate(columns.split(d, dim=1)):
        for m in range(group):
            at = (j * group + m) * d
            attention.o_proj.weight[:, at : at + part.shape[1]] = part
    head.midlayer.mlp.down_proj.weight.zero_()


@dataclass(frozen=True)
class Plan:
    """Which conversations each optimiser step takes: fixed by seed, lengths and budget alone."""

    groups: tuple[tuple[int, ...], ...]
    passes: tuple[int, ...]  # response rows seen up to and with each step


def plan(rows: Sequence[int], chosen: Sequence[int], options: TrainConfig, world: int = 1) -> Plan:
    """Epoch after epoch in seeded order until ``options.passes`` rows are reached.

    rows: supervised rows of every conversation. The same for every layer set, so that runs of one
    seed are paired.
    """
    usable = [i for i in chosen if rows[i] > 0]
    size = options.batch * options.accumulate * world
    if len(usable) < size:
        raise InputError(
            f"{len(usable)} conversations with two or more response tokens, but one optimiser step "
            f"takes {size}: give more data or a smaller batch"
        )
    groups, passes, seen, epoch = [], [], 0, 0
    pending: list[int] = []
    while seen < options.passes:
        rng = np.random.default_rng([options.seed, epoch])
        pending += [usable[j] for j in rng.permutation(len(usable))]
        epoch += 1
        while len(pending) >= size and seen < options.passes:
            group, pending = pending[:size], pending[size:]
            seen += sum(rows[i] for i in group)
            groups.append(tuple(group))
            passes.append(seen)
    return Plan(tuple(groups), tuple(passes))


def learning_rate(options: TrainConfig, step: int, total: int) -> float:
    """Linear warm-up, then a cosine from lr to final_lr * lr at the last of ``total`` steps."""
    warm = max(1, round(options.warmup * total))
    if step < warm:
        return options.lr * (step + 1) / warm
    share = (step - warm) / max(1, total - 1 - warm)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return options.lr * (options.final_lr + (1 - options.final_lr) * cosine)


def step_rows(response: np.ndarray, steps: int) -> np.ndarray:
    """[K] rows that each step of the test supervises in one conversation."""
    mask = np.asarray(response, dtype=np.int64)
    counts = []
    for i in range(steps):
        window = np.convolve(mask, np.ones(i + 2, dtype=np.int64), mode="valid")
        # windows that start at position 0 have no row before them
        counts.append(int((window[1:] == i + 2).sum()) + int(i + 2 <= 0))
    return np.array(counts)


def train(
    target: Any,
    examples: Examples,
    training: Sequence[int],
    validation: Sequence[int],
    head_config: HeadConfig,
    vocab: DraftVocab,
    options: TrainConfig,
    out: Path,
    *,
    progress: bool = True,
    stop_after: int | None = None,
) -> DraftHead:
    """Train one head into ``out``: metrics.csv, validation.csv, checkpoint, and at last the head.

    Taken up where it stopped when ``out`` holds a checkpoint of the same request, with the result
    of an uninterrupted run (bitwise on CPU). Under torchrun every process takes its share of each
    step. A loss or gradient that is not finite stops the run, naming the step and the records.
    """
    out = Path(out)
    distributed = dist.is_available() and dist.is_initialized()
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)
    device = torch.device("cpu")
    if torch.cuda.is_available() and target.device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    rows = [examples.rows(i) for i in range(len(examples))]
    schedule = plan(rows, training, options, world)
    total = len(schedule.groups)
    needs_rms = not (head_config.fc_norm or head_config.norm_before_fc)
    rms = examples.median_rms(head_config.boundaries) if needs_rms else None
    head = build_head(target, head_config, vocab, options, rms).to(device)
    if needs_rms and (options.whiten or options.ridge_start):
        condition(head, examples, training, options)
    test = TrainingTest(head, target, options.steps).to(device)
    trained = [p for p in head.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(
        trained,
        lr=options.lr,
        betas=options.betas,
        weight_decay=options.weight_decay,
        fused=True,
    )
    request = {
        "head": files.key(asdict(head_config)),
        "options": files.key({**asdict(options), "checkpoint_every": 0, "evaluate_every": 0}),
        "vocabulary": files.key(vocab.target_ids.tolist()),
        "data": files.key([[examples.ids[i], rows[i]] for i in training]),
        "target": target.fingerprint,
        "world": world,
    }
    out.mkdir(parents=True, exist_ok=True)
    start = _resume(out, request, head, optimiser)
    if rank == 0:
        _cut(out / "metrics.csv", start)
        _cut(out / "validation.csv", start)
    model: Any = test
    if distributed:
        ids = [device.index] if device.type == "cuda" else None
        model = DistributedDataParallel(test, device_ids=ids, broadcast_buffers=False)
    bar = tqdm(
        total=schedule.passes[-1],
        initial=schedule.passes[start - 1] if start else 0,
        unit="pass",
        desc=out.name,
        disable=not (progress and rank == 0),
    )
    decay = torch.tensor([options.decay**i for i in range(options.steps)], device=device)
    began = time.perf_counter()
    metrics = _Table(out / "metrics.csv") if rank == 0 else None
    validations = _Table(out / "validation.csv") if rank == 0 else None
    for step in range(start, total):
        group = schedule.groups[step]
        for place in optimiser.param_groups:
            place["lr"] = learning_rate(options, step, total)
        counts = sum(step_rows(examples.responses[i], options.steps) for i in group)
        share = decay * world / torch.from_numpy(np.maximum(counts, 1)).to(device)
        sums = torch.zeros(3, options.steps, dtype=torch.float64, device=device)
        accepted = started = 0.0
        for micro in range(options.accumulate):
            first = (micro * world + rank) * options.batch
            items = [
                examples.get(i, head_config.boundaries)
                for i in group[first : first + options.batch]
            ]
            batch = collate(items, options.steps, device)
            last = micro == options.accumulate - 1
            waiting = model.no_sync() if distributed and not last else contextlib.nullcontext()
            with waiting:
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    outcome = model(batch)
                (outcome.loss * share.to(outcome.loss.dtype)).sum().backward()
            sums += torch.stack([outcome.loss.detach().double(), outcome.correct, outcome.rows])
            accepted += float(outcome.accepted.sum())
            started += float(outcome.valid.sum())
        norm = nn.utils.clip_grad_norm_(trained, options.clip)
        if distributed:
            dist.all_reduce(sums)
        if not (torch.isfinite(norm) and torch.isfinite(sums).all()):
            names = ", ".join(examples.ids[i] for i in group[:4])
            raise InputError(
                f"{out.name}: loss {sums[0].sum():.4g} and gradient norm {float(norm):.4g} at "
                f"optimiser step {step}, records {names}: not finite; lower lr or look at these"
            )
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        bar.update(schedule.passes[step] - (schedule.passes[step - 1] if step else 0))
        done = step + 1
        if metrics is not None and validations is not None:
            means = (sums[:2] / sums[2].clamp(min=1)).tolist()
            tau = 1 + accepted / max(started, 1)
            metrics.add(
                {
                    "step": done,
                    "passes": schedule.passes[step],
                    "lr": optimiser.param_groups[0]["lr"],
                    "gradient_norm": float(norm),
                    "tau": tau,
                    **{f"loss_{i + 1}": v for i, v in enumerate(means[0])},
                    **{f"accuracy_{i + 1}": v for i, v in enumerate(means[1])},
                    "seconds": time.perf_counter() - began,
                }
            )
            if done % 20 == 0:
                bar.set_postfix(loss=f"{means[0][0]:.3f}", tau=f"{tau:.3f}")
            if validation and (done % options.evaluate_every == 0 or done == total):
                judged = evaluate(test, examples, validation)
                validations.add({"step": done, "passes": schedule.passes[step], **flat(judged)})
            if done % options.checkpoint_every == 0 and done < total:
                _checkpoint(out, request, head, optimiser, done)
        if stop_after is not None and done >= stop_after:
            bar.close()
            return head
    bar.close()
    if rank == 0:
        head.fold_scale()
        record = {
            "training": asdict(options),
            "request": request,
            "steps": total,
            "passes": schedule.passes[-1],
            "conversations": len(training),
        }
        save_head(head, out / "head", record)
        (out / "checkpoint.safetensors").unlink(missing_ok=True)
    return head


def flat(e: Evaluation) -> dict[str, float]:
    """One row of a table."""
    row: dict[str, float] = {"tau": e.tau, "tau_walk": e.tau_walk, "rows": e.rows}
    row |= {f"loss_{i + 1}": v for i, v in enumerate(e.loss)}
    return row | {f"accuracy_{i + 1}": v for i, v in enumerate(e.accuracy)}


class _Table:
    """A CSV that grows by one flushed line at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, row: dict[str, float]) -> None:
        new = not self.path.exists()
        with open(self.path, "a", newline="") as stream:
            writer = csv.DictWriter(stream, list(row))
            if new:
                writer.writeheader()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def _cut(path: Path, step: int) -> None:
    """Drop lines after ``step``, which a resumed run writes again (and a torn last line)."""
    if not path.exists():
        return
    lines = path.read_text().splitlines()
    kept = [
        line
        for line in lines[1:]
        if line.count(",") == lines[0].count(",") and int(line.split(",")[0]) <= step
    ]
    if not kept:
        path.unlink()
        return
    with files.replacing(path) as temporary:
        temporary.write_text("\n".join([lines[0], *kept]) + "\n")


def _checkpoint(
    out: Path, request: dict[str, Any], head: DraftHead, optimiser: torch.optim.Optimizer, step: int
) -> None:
    """Weights and optimiser state in one file, which appears whole or not at all."""
    tensors = {f"head.{n}": p for n, p in head.tensors().items()}
    names = [n for n, p in head.named_parameters() if p.requires_grad]
    for name, state in zip(names, optimiser.state_dict()["state"].values(), strict=True):
        tensors |= {f"{key}.{name}": value for key, value in state.items()}
    about = {"step": str(step), "request": json.dumps(request)}
    with files.replacing(out / "checkpoint.safetensors") as temporary:
        save_file({n: t.detach().cpu().contiguous() for n, t in tensors.items()}, temporary, about)


def _resume(
    out: Path, request: dict[str, Any], head: DraftHead, optimiser: torch.optim.Optimizer
) -> int:
    """Load the checkpoint in ``out``, if any; the number of optimiser steps that it has done."""
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return 0
    with safe_open(path, framework="pt") as f:
        about = f.metadata()
        tensors = {n: f.get_tensor(n) for n in f.keys()}  # noqa: SIM118 (not a dict)
    found = json.loads(about["request"])
    different = sorted(k for k in request if found.get(k) != request[k])
    if different:
        raise InputError(
            f"{path} belongs to another run (different: {', '.join(different)}): choose another "
            "folder or delete it"
        )
    with torch.no_grad():
        for name, parameter in head.tensors().items():
            parameter.copy_(tensors[f"head.{name}"])
    names = [n for n, p in head.named_parameters() if p.requires_grad]
    state = optimiser.state_dict()
    state["state"] = {
        i: {key: tensors[f"{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
        for i, name in enumerate(names)
    }
    optimiser.load_state_dict(state)
    return int(about["step"])
