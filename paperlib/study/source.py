"""Where a notebook's numbers come from: one target, one sample of documents, one Gram pass."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from paperlib import files, paths
from paperlib.capture import TokenStates, capture_states
from paperlib.corpora import Document, load_corpus, source_fingerprint, tokenize
from paperlib.errors import InputError
from paperlib.filtering import usable_tokens
from paperlib.gram import GramStatistics, gram_statistics
from paperlib.targets import Target, load_target, target_fingerprint

# nested token masks: what is dropped by its RMS, in units of the boundary's median
FACTORS = {"above 3x dropped": 3.0, "above 8x dropped": 8.0}
MASKS = (*FACTORS, "all tokens")


class Run(Protocol):
    """The part of ``artifacts.Run`` that measuring needs."""

    parameters: Any

    def measured(
        self, name: str, key: dict[str, Any], compute: Callable[[Path], None], suffix: str = ".npz"
    ) -> Path: ...


def source_key(p: Any) -> dict[str, Any]:
    """What the states depend on; every measured result has it in its key."""
    return {
        "target": target_fingerprint(p.target),
        "corpora": [source_fingerprint(name) for name in corpus_names(p.corpus)],
        "documents": p.documents,
        "max_tokens": p.max_tokens,
        "seed": p.seed,
    }


def corpus_names(corpus: str) -> list[str]:
    return [name.strip() for name in corpus.split(",") if name.strip()]


def documents_of(p: Any) -> list[Document]:
    """``documents`` documents in all, in equal parts from each corpus, drawn with the seed."""
    names = corpus_names(p.corpus)
    if not names:
        raise InputError("corpus is empty: give one or more set names or files, comma-separated")
    target = target_of(p.target)
    chosen: list[Document] = []
    for i, name in enumerate(names):
        share = p.documents // len(names) + (i < p.documents % len(names))
        corpus = load_corpus(name, limit=share, seed=p.seed)
        chosen += tokenize(target, corpus, max_tokens=p.max_tokens)
    return chosen


@lru_cache(maxsize=1)
def target_of(name: str) -> Target:
    return load_target(name)


def states_of(p: Any) -> TokenStates:
    """The states at every boundary, from the cache or from a pass over the text."""
    folder = paths.cache() / "states" / files.key(source_key(p))
    return capture_states(target_of(p.target), documents_of(p), folder)


def mask_levels(states: TokenStates) -> np.ndarray:
    """[n] index into MASKS of the narrowest mask that holds each token."""
    level = np.full(states.tokens, len(FACTORS))
    for i, factor in reversed(list(enumerate(FACTORS.values()))):
        level[usable_tokens(states, outlier_factor=factor)] = i
    return level


def layer_gram(run: Run) -> GramStatistics:
    """The table of all boundaries for every mask, with document bootstraps."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        gram_statistics(
            states,
            mask_levels(states),
            levels=MASKS,
            resamples=p.resamples,
            seed=p.seed,
            dtype=torch.float32,
        ).save(out)

    key = {**source_key(p), "masks": FACTORS, "resamples": p.resamples}
    return GramStatistics.load(run.measured("layer-gram", key, compute))
