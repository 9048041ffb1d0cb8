"""Runs one small training in its own process: ``python -m tests.eagle3.worker OUT [gloo]``."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from paperlib.eagle3 import train
from paperlib.eagle3.draft import config_for
from paperlib.eagle3.vocab import count_tokens, frequent
from tests.eagle3.tiny import cached, conversations, tiny_target

BOUNDARIES = (1, 3, 5)


def run(
    out: Path, options: train.TrainConfig, dtype: torch.dtype | None = None, **more: object
) -> train.DraftHead:
    target = tiny_target()
    if dtype is not None:
        target.model.to(dtype)
    data = cached(conversations(target, 12), BOUNDARIES)
    counts = count_tokens(
        [t[m] for t, m in zip(data.tokens, data.responses, strict=True)], target.vocab_size
    )
    vocab = frequent(counts, 40)
    config = config_for(target, BOUNDARIES, 40)
    if dtype is torch.float64:
        torch.set_default_dtype(torch.float64)
    return train.train(
        target, data, range(10), (10, 11), config, vocab, options, out, progress=False, **more
    )


RESUME = train.TrainConfig(
    passes=3000, batch=2, lr=1e-3, checkpoint_every=7, evaluate_every=25, train_lm_head=True
)
SPREAD = train.TrainConfig(passes=400, batch=2, lr=1e-3, evaluate_every=10)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[2:] == ["gloo"]:
        dist.init_process_group("gloo")
        options = train.TrainConfig(passes=400, batch=1, lr=1e-3, evaluate_every=10)
        run(Path(sys.argv[1]), options, torch.float64)
        dist.destroy_process_group()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        run(Path(sys.argv[1]), RESUME)
