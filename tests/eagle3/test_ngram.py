from collections import Counter

import numpy as np
import pytest

from paperlib.eagle3 import ngram, train
from paperlib.errors import InputError
from tests.eagle3.tiny import cached, conversations, tiny_target


def by_hand(conversations: list[list[int]], masks: list[list[bool]], context: list[int]) -> int:
    for k in (2, 1):
        if len(context) < k:
            continue
        following = Counter(
            t[i]
            for t, m in zip(conversations, masks, strict=True)
            for i in range(k, len(t))
            if m[i] and t[i - k : i] == context[-k:]
        )
        if following:
            return min(following, key=lambda v: (-following[v], v))
    every = Counter(
        v
        for t, m in zip(conversations, masks, strict=True)
        for v, on in zip(t, m, strict=True)
        if on
    )
    return min(every, key=lambda v: (-every[v], v))


def test_tables_equal_counting_by_hand() -> None:
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 6, n).tolist() for n in (12, 30, 3)]
    masks = [[i >= 2 for i in range(len(t))] for t in tokens]
    table = ngram.fit([np.array(t) for t in tokens], [np.array(m) for m in masks], 8)
    for context in ([a, b] for a in range(8) for b in range(8)):
        assert table.predict(np.array([context]))[0] == by_hand(tokens, masks, context), context
    assert table.predict(np.array([[-1, 3]]))[0] == by_hand(tokens, masks, [3])


def test_a_table_that_has_seen_the_text_accepts_all_of_it() -> None:
    tokens, mask = np.arange(10, 20), np.arange(10) >= 3
    table = ngram.fit([tokens], [mask], 32)
    best = np.r_[tokens[1:], 0]
    import torch

    data = train.Examples(["a"], [tokens], [mask], torch.zeros(1, 10, 2), (0,), best)
    judged = train.evaluate_ngram(table, data, [0], steps=3)
    # rows 2..7 predict tokens 4..9; the last two rows run into the end of the response
    assert judged.accuracy == (1.0, 1.0, 1.0)
    assert judged.rows == 6
    assert judged.tau == pytest.approx(1 + (3 * 4 + 2 + 1) / 6)


def test_judged_by_the_rows_of_a_head() -> None:
    target = tiny_target()
    data = cached(conversations(target, 3), (1,))
    table = ngram.fit(data.tokens, data.responses, target.vocab_size)
    judged = train.evaluate_ngram(table, data, range(3), steps=3)
    assert judged.rows == sum(data.rows(i) for i in range(3))


def test_bad_order() -> None:
    with pytest.raises(InputError, match="order"):
        ngram.fit([np.arange(3)], [np.ones(3, bool)], 8, order=1)
