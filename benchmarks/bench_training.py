"""How fast heads train on this machine: python benchmarks/bench_training.py [--rows 3000]

A head of the embedded target's size (SmolLM2-135M: H 576, 9 heads, draft vocabulary 4096, three
steps of the training-time test) on made-up states, because time does not depend on their values.
Prints, in CPU time of one thread (which other work on the machine disturbs least) and in wall time:

- token passes per second, a pass being one response row with all its steps;
- arithmetic per second as a share of what a plain matrix product of the same shapes reaches;
- where the time goes, by operator;
- one process of one thread a core against one process of all threads.

Exits with 1 when the share is below the floor.
"""

import argparse
import multiprocessing
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from paperlib.eagle3 import train
from paperlib.eagle3.draft import HeadConfig, config_for
from paperlib.eagle3.vocab import from_target_ids

FLOOR = 0.45
BOUNDARIES = (2, 15, 27)
PROMPT, RESPONSE = 60, 120  # tokens, as in the committed responses


def stand_in() -> SimpleNamespace:
    """A target's widths, final norm, LM head and embeddings, without its thirty blocks."""
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=1,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    return SimpleNamespace(
        name="stand-in",
        fingerprint="",
        model=model,
        num_layers=30,
        hidden_size=576,
        vocab_size=49152,
        device=torch.device("cpu"),
        final_norm=model.model.norm,
        lm_head=model.lm_head,
        embed_tokens=model.model.embed_tokens,
        blocks=[],
    )


def made_up(count: int, seed: int = 0) -> train.Examples:
    length = PROMPT + RESPONSE
    rng = np.random.default_rng(seed)
    states = torch.randn(4, count * length, 576, dtype=torch.bfloat16)
    tokens = [rng.integers(0, 49152, length) for _ in range(count)]
    masks = [np.arange(length) >= PROMPT] * count
    best = np.concatenate([np.r_[t[1:], 0] for t in tokens])
    ids = [str(i) for i in range(count)]
    return train.Examples(ids, tokens, masks, states, (*BOUNDARIES, 30), best)


def arithmetic(c: HeadConfig, steps: int, frozen_lm_head: bool) -> float:
    """Floating-point operations of the matrix products of one conversation, forward and backward.

    A product with a trained matrix costs 2 operations a weight forward and 4 backward, with a
    frozen one 2 and 2 (no gradient of the weight, nor of fc's input).
    """
    rows, tokens = RESPONSE - 1, PROMPT + RESPONSE
    h, q, kv = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    layer = 2 * h * q + q * h + 3 * h * c.intermediate_size
    key_value = 2 * 2 * h * kv
    total = 4.0 * tokens * len(c.boundaries) * c.target_hidden_size * h  # fc
    total += 6.0 * key_value * (tokens + rows * (steps - 1))
    total += 6.0 * layer * rows * steps
    total += (4.0 if frozen_lm_head else 6.0) * h * c.draft_vocab_size * rows * steps
    total += 2.0 * c.target_hidden_size * c.draft_vocab_size * (rows + steps)  # target's logits
    total += 12.0 * q * tokens * rows * steps  # scores and mixing
    return total


class Trainer:
    def __init__(self, batch: int) -> None:
        target = stand_in()
        vocab = from_target_ids(torch.arange(0, 49152, 12), 49152)
        config = config_for(target, BOUNDARIES, vocab.size)
        self.options = train.TrainConfig(batch=batch)
        self.examples = made_up(24)
        rms = self.examples.median_rms(BOUNDARIES)
        head = train.build_head(target, config, vocab, self.options, rms)
        self.test = train.TrainingTest(head, target, self.options.steps)
        self.trained = [p for p in head.parameters() if p.requires_grad]
        self.optimiser = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)
        self.operations = arithmetic(config, self.options.steps, frozen_lm_head=True)
        self.at = 0

    def step(self) -> int:
        """One optimiser step; response rows."""
        chosen = [(self.at + i) % len(self.examples) for i in range(self.options.batch)]
        self.at += self.options.batch
        items = [self.examples.get(i, BOUNDARIES) for i in chosen]
        out = self.test(train.collate(items, self.options.steps, torch.device("cpu")))
        (out.loss.sum() / out.rows[0]).backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 0.5)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return int(out.rows[0])


def peak(rows: int = RESPONSE, repeats: int = 30) -> float:
    """Operations per CPU second of products of the head's own shapes, the best of three rounds."""
    shapes = [(576, 1536), (1536, 576), (1152, 576), (576, 4096)]
    pairs = [(torch.randn(rows, k), torch.randn(n, k)) for k, n in shapes]
    best = 0.0
    for _ in range(3):
        start = time.process_time()
        for _ in range(repeats):
            for a, b in pairs:
                torch.nn.functional.linear(a, b)
        work = repeats * sum(2.0 * rows * k * n for k, n in shapes)
        best = max(best, work / (time.process_time() - start))
    return best


def run(threads: int, rows: int, batch: int) -> tuple[float, float]:
    """Passes per second of CPU and of wall time."""
    torch.set_num_threads(threads)
    trainer = Trainer(batch)
    trainer.step()
    cpu, wall, seen = time.process_time(), time.perf_counter(), 0
    while seen < rows:
        seen += trainer.step()
    return seen / (time.process_time() - cpu), seen / (time.perf_counter() - wall)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=3000, help="passes of each measurement")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(1)
    top, trainer = peak(), Trainer(1)
    trainer.step()
    start, steps = time.process_time(), max(5, arguments.rows // RESPONSE)
    seen = sum(trainer.step() for _ in range(steps))
    seconds = time.process_time() - start
    rate = trainer.operations * steps / seconds
    top = max(top, peak())
    share = rate / top
    print(
        f"one thread: {seen / seconds:.0f} passes per CPU second; {rate / 1e9:.1f} GFLOP/s, "
        f"{share:.0%} of the {top / 1e9:.1f} GFLOP/s of its matrix products alone "
        f"(floor {FLOOR:.0%})"
    )
    with profile() as measured:
        for _ in range(5):
            trainer.step()
    table = sorted(measured.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(e.self_cpu_time_total for e in table)
    for event in table[:12]:
        print(f"  {event.self_cpu_time_total / total:6.1%}  {event.key}")
    for batch in (1, 2, 4, 8):
        print(f"batch {batch}: {run(1, arguments.rows, batch)[0]:.0f} passes per CPU second")
    context = multiprocessing.get_context("spawn")
    with context.Pool(cores) as pool:
        several = pool.starmap(run, [(1, arguments.rows, 1)] * cores)
    print(
        f"{cores} processes of one thread: {sum(w for _, w in several):.0f} passes per second; "
        f"one process of {cores} threads: {run(cores, arguments.rows, 1)[1]:.0f}"
    )
    return int(share < FLOOR)


if __name__ == "__main__":
    sys.exit(main())
