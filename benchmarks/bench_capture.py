"""Capture, predictive entropies included, against a bare forward pass with logits.

    python benchmarks/bench_capture.py [--documents 24] [--runs 5] [--threads 2]

Both see the same token batches of the embedded target, in turn; the ratio is taken pair by pair and
its median printed. The bare pass computes all logits, as a plain forward does. The second line is
the overhead of the parts that are not the forward: hooks, entropy, files.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from paperlib.capture import _batches, capture_states
from paperlib.corpora import load_corpus, tokenize
from paperlib.targets import EMBEDDED, load_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = load_target(args.target)
    corpus = load_corpus("openwebtext", limit=args.documents, seed=0)
    documents = tokenize(target, corpus, max_tokens=args.max_tokens)
    tokens = sum(len(d.input_ids) for d in documents)
    batches = []
    for batch in _batches(documents, args.batch_tokens):
        rows = [documents[i].input_ids for i in batch]
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
        for row, row_ids in zip(ids, rows, strict=True):
            row[: len(row_ids)] = torch.tensor(row_ids)
        batches.append(ids)

    def bare() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            for ids in batches:
                target.model(input_ids=ids, use_cache=False)
        return time.perf_counter() - start

    def capture() -> float:
        folder = Path(tempfile.mkdtemp())
        start = time.perf_counter()
        capture_states(
            target,
            documents,
            folder / "states",
            batch_tokens=args.batch_tokens,
            progress=False,
        )
        seconds = time.perf_counter() - start
        shutil.rmtree(folder)
        return seconds

    bare(), capture()
    pairs = [(capture(), bare()) for _ in range(args.runs)]
    ratios = sorted(c / b for c, b in pairs)
    print(
        f"{tokens} tokens, {args.threads} threads, all {target.num_layers + 1} boundaries, float32"
    )
    print(
        f"bare forward with logits: {tokens / statistics.median(b for _, b in pairs):.0f} tokens/s"
    )
    print(f"capture: {tokens / statistics.median(c for c, _ in pairs):.0f} tokens/s")
    print(
        f"capture / bare: median {statistics.median(ratios):.2f}, "
        f"range {ratios[0]:.2f} to {ratios[-1]:.2f} over {args.runs} pairs"
    )


if __name__ == "__main__":
    main()
