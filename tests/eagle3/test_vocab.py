import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paperlib.eagle3.vocab import checked, count_tokens, coverage, frequent, from_target_ids
from paperlib.errors import InputError


@given(st.lists(st.integers(0, 11), max_size=60), st.integers(1, 12))
def test_frequent_equals_a_sort_written_out(tokens: list[int], size: int) -> None:
    half = len(tokens) // 2
    counts = count_tokens([np.array(tokens[:half], int), np.array(tokens[half:], int)], 12)
    vocab = frequent(counts, size)
    expected = sorted(sorted(range(12), key=lambda i: (-tokens.count(i), i))[:size])
    assert vocab.target_ids.tolist() == expected
    assert [i + int(vocab.d2t[i]) for i in range(size)] == expected
    assert [v for v in range(12) if vocab.t2d[v]] == expected
    back = vocab.draft_ids()
    assert [int(back[v]) for v in expected] == list(range(size))
    assert int((back < 0).sum()) == 12 - size
    if tokens:
        share = sum(t in expected for t in tokens) / len(tokens)
        assert coverage(counts, vocab) == pytest.approx(share)


def test_unsorted_d2t_is_accepted_and_keeps_its_order() -> None:
    ids = torch.tensor([7, 2, 9, 0])
    made = from_target_ids(ids, 10)
    loaded = checked(made.d2t, made.t2d)
    assert loaded.target_ids.tolist() == [7, 2, 9, 0]
    assert loaded.draft_ids()[9] == 2
    assert torch.equal(checked(made.d2t, vocab_size=10).t2d, made.t2d)


@pytest.mark.parametrize(
    ("d2t", "t2d", "say"),
    [
        ([0, 0, 98], None, "0..100"),  # ids instead of offsets fall outside
        ([3, 2], None, "1 target ids"),  # two draft ids, one target id
        ([0, 0], [True, False, True, False], "stale"),
    ],
)
def test_inconsistent_maps_are_refused(d2t: list[int], t2d: list[bool] | None, say: str) -> None:
    mask = None if t2d is None else torch.tensor(t2d)
    with pytest.raises(InputError, match=say):
        checked(torch.tensor(d2t), mask, vocab_size=None if mask is not None else 64)


@pytest.mark.parametrize("size", [0, 13])
def test_size_outside_the_vocabulary(size: int) -> None:
    with pytest.raises(InputError, match="expected 1 to 12"):
        frequent(np.zeros(12, dtype=int), size)
