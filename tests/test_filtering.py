"""Token filters: order of operations, sizes, nesting, shift, and the equal-size control."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paperlib.errors import InputError
from paperlib.filtering import (
    MIN_ROWS,
    entropy_levels,
    few_rows,
    random_levels,
    shifted_entropy,
    threshold_levels,
    usable_tokens,
)
from tests.states import states_from


def make(n: int = 200, documents: int = 4, seed: int = 0):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    document = np.repeat(np.arange(documents), n // documents)
    return states_from(rng.normal(size=(2, n, 3)), document, entropy=rng.uniform(0, 6, n))


def test_sinks_leave_before_the_quantile_is_taken() -> None:
    """Position 0 has the highest entropy here; a filter on entropy alone would keep it."""
    states = make()
    states.entropy[states.position == 0] = 9.0
    states.rms[1, 7] = 1000.0
    states.special[9] = True
    pool = usable_tokens(states)
    assert pool.sum() == 200 - 4 - 1 - 1
    level, _ = entropy_levels(states, pool, (0.5, 1.0))
    kept = level == 0
    assert not kept[states.position == 0].any()
    assert not kept[[7, 9]].any()
    assert kept.sum() == round(0.5 * pool.sum())
    everything = usable_tokens(states, drop_first=False, drop_special=False, outlier_factor=0)
    assert everything.all()


def test_kept_tokens_have_the_highest_entropy() -> None:
    states = make()
    pool = usable_tokens(states)
    level, labels = entropy_levels(states, pool, (0.4, 0.7, 1.0))
    assert labels == ("top 40%", "top 70%", "top 100%")
    for q, share in enumerate((0.4, 0.7, 1.0)):
        mask = (level >= 0) & (level <= q)
        assert mask.sum() == round(share * pool.sum())
        assert not (mask & ~pool).any()
        if share < 1:
            assert states.entropy[mask].min() >= states.entropy[pool & ~mask].max()


def test_thresholds_are_strict_and_nested() -> None:
    states = make()
    pool = usable_tokens(states)
    level, _ = threshold_levels(states, pool, (3.0, 1.0))
    np.testing.assert_array_equal(level == 0, pool & (states.entropy > 3))
    np.testing.assert_array_equal(level == 1, pool & (states.entropy > 1) & (states.entropy <= 3))


def test_shift_reads_the_successor_within_the_document() -> None:
    states = make(n=8, documents=2)
    shifted = shifted_entropy(states, 1)
    np.testing.assert_array_equal(shifted[[0, 1, 2]], states.entropy[[1, 2, 3]])
    assert np.isnan(shifted[[3, 7]]).all()
    pool = usable_tokens(states, drop_first=False, shift=1)
    assert pool.tolist() == [True, True, True, False] * 2


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_random_control_has_the_sizes_of_the_filter(seed) -> None:
    states = make(n=240)
    pool = usable_tokens(states)
    keep = (0.3, 0.5, 0.9)
    filtered, _ = entropy_levels(states, pool, keep)
    control, _ = random_levels(pool, keep, seed)
    assert not (control[~pool] >= 0).any()
    for q in range(3):
        assert (control == q).sum() == (filtered == q).sum()
    again, _ = random_levels(pool, keep, seed)
    np.testing.assert_array_equal(control, again)
    other, _ = random_levels(pool, keep, seed + 1)
    assert (other != control).any()


def test_ties_go_to_the_earlier_token() -> None:
    states = make()
    states.entropy[:] = 1.0
    pool = usable_tokens(states)
    level, _ = entropy_levels(states, pool, (0.5,))
    assert (
        np.flatnonzero(level == 0).tolist() == np.flatnonzero(pool)[: (level == 0).sum()].tolist()
    )


@pytest.mark.parametrize("keep", [(), (0.5, 0.5), (0.9, 0.5), (0.0, 1.0), (0.5, 1.1)])
def test_bad_shares_are_refused(keep) -> None:
    states = make()
    with pytest.raises(InputError, match="must ascend within"):
        entropy_levels(states, usable_tokens(states), keep)


def test_too_few_rows_are_refused_or_remarked() -> None:
    states = make(n=100)
    with pytest.raises(InputError, match=f"at least {MIN_ROWS} are needed"):
        entropy_levels(states, usable_tokens(states), (0.1, 1.0))
    with pytest.raises(InputError, match="descending"):
        threshold_levels(states, usable_tokens(states), (1.0, 3.0))
    with pytest.raises(InputError, match="neither 0"):
        shifted_entropy(states, 2)
    assert "100 tokens for 576" in str(few_rows(100, 576))
    assert few_rows(600, 576) is None
