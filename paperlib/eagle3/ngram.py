"""Bigram and trigram tables of the training responses: what a head must leave behind.

A table drafts greedily from the last tokens of the text and knows nothing of the target. It is
judged by the same rows as a head (see ``train.accepted``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paperlib.errors import InputError


@dataclass(frozen=True)
class NGram:
    """The most frequent successor of every context that occurred, with back-off to shorter ones.

    contexts[k - 1] [M_k] sorted codes of contexts of k tokens, best[k - 1] [M_k] their successor;
    unigram: the most frequent token, when no context is known.
    """

    vocab_size: int
    contexts: tuple[np.ndarray, ...]
    best: tuple[np.ndarray, ...]
    unigram: int

    @property
    def order(self) -> int:
        return len(self.contexts) + 1

    def predict(self, context: np.ndarray) -> np.ndarray:
        """context [n, c] token ids, oldest first -> [n] next token ids. Longest known suffix wins;
        a negative id stands for *no token* and matches nothing."""
        guess = np.full(len(context), self.unigram)
        for k in range(1, min(len(self.contexts), context.shape[1]) + 1):
            suffix = context[:, context.shape[1] - k :]
            codes = _codes(suffix, self.vocab_size)
            table = self.contexts[k - 1]
            at = np.minimum(np.searchsorted(table, codes), len(table) - 1)
            known = (table[at] == codes) & (suffix >= 0).all(axis=1)
            guess[known] = self.best[k - 1][at[known]]
        return guess


def fit(
    conversations: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    vocab_size: int,
    order: int = 3,
) -> NGram:
    """Count successors that are response tokens; contexts may reach into the prompt.

    conversations: token ids; responses: for each, a bool array, True on tokens the model produced.
    order: 2 bigram, 3 trigram with back-off. Ties go to the smaller id.
    """
    if order < 2 or vocab_size ** (order - 1) >= 2**63:
        raise InputError(f"n-gram order {order}: expected 2 or 3")
    tables, best = [], []
    produced = np.concatenate(
        [c[np.asarray(m, dtype=bool)] for c, m in zip(conversations, responses, strict=True)]
    )
    if len(produced) == 0:
        raise InputError("n-gram tables need at least one response token")
    for k in range(1, order):
        contexts, nexts = [], []
        for tokens, mask in zip(conversations, responses, strict=True):
            where = np.flatnonzero(mask)
            where = where[where >= k]
            contexts.append(np.stack([tokens[where - k + j] for j in range(k)], axis=1))
            nexts.append(tokens[where])
        codes = _codes(np.concatenate(contexts), vocab_size)
        following = np.concatenate(nexts)
        pairs, counts = np.unique(np.stack([codes, following], axis=1), axis=0, return_counts=True)
        # by context, then frequency, then the smaller id: the first of a context is its best
        pairs = pairs[np.lexsort((pairs[:, 1], -counts, pairs[:, 0]))]
        first = np.r_[True, pairs[1:, 0] != pairs[:-1, 0]] if len(pairs) else np.zeros(0, bool)
        tables.append(pairs[first, 0])
        best.append(pairs[first, 1])
    tables = [t if len(t) else np.array([-1]) for t in tables]
    best = [b if len(b) else np.array([0]) for b in best]
    return NGram(vocab_size, tuple(tables), tuple(best), int(np.bincount(produced).argmax()))


def _codes(context: np.ndarray, vocab_size: int) -> np.ndarray:
    codes = np.zeros(len(context), dtype=np.int64)
    for column in np.asarray(context, dtype=np.int64).T:
        codes = codes * vocab_size + column
    return codes
