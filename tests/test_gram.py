"""Gram statistics against naive float64 formulas and against enumeration of token tuples."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paperlib.errors import InputError
from paperlib.gram import (
    GramStatistics,
    accumulate,
    bootstrap_weights,
    document_units,
    finalise,
    gram_statistics,
    norm_outliers,
)
from tests.states import states_from


def naive_tables(features: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Textbook formulas on [L, n, d]: n x n Grams, centring matrices, HSIC_1 as printed."""
    size, n, _ = features.shape
    grams = [x @ x.T for x in features]
    hollow = [k - np.diag(np.diag(k)) for k in grams]
    # HSIC does not see the mean; in floating point its textbook form loses digits to it
    moved = [x - x.mean(axis=0) for x in features]
    h = np.eye(n) - 1 / n
    centred = [h @ (x @ x.T) @ h for x in moved]
    moved_hollow = [x @ x.T - np.diag((x**2).sum(axis=1)) for x in moved]
    one = np.ones(n)

    def hsic1(k: np.ndarray, m: np.ndarray) -> float:
        first = np.trace(k @ m)
        second = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        third = 2 / (n - 2) * (one @ k @ m @ one)
        return (first + second - third) / (n * (n - 3))

    def table(function) -> np.ndarray:  # type: ignore[no-untyped-def]
        return np.array([[function(i, j) for j in range(size)] for i in range(size)])

    covariance_trace = np.array([np.trace(k) / (n - 1) for k in centred])
    return {
        "centred": (
            table(lambda i, j: (centred[i] * centred[j]).sum()),
            np.array([np.trace(k) for k in centred]),
        ),
        "centred_debiased": (
            table(lambda i, j: hsic1(moved_hollow[i], moved_hollow[j])),
            covariance_trace,
        ),
        "uncentred": (
            table(lambda i, j: (grams[i] * grams[j]).sum()),
            np.array([np.trace(k) for k in grams]),
        ),
        "uncentred_debiased": (
            table(lambda i, j: (hollow[i] * hollow[j]).sum() / (n * (n - 1))),
            np.array([np.trace(k) / n for k in grams]),
        ),
    }


def assert_tables(stats: GramStatistics, level: int, features: np.ndarray, rtol: float) -> None:
    for variant, (inner, trace) in naive_tables(features).items():
        scale = np.sqrt(np.outer(np.diag(inner), np.diag(inner)))
        np.testing.assert_allclose(
            stats.inner[variant][level, 0] / scale,
            inner / scale,
            rtol=0,
            atol=rtol,
            err_msg=variant,
        )
        np.testing.assert_allclose(stats.trace[variant][level, 0], trace, rtol=rtol)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(12, 40),
    d=st.integers(1, 12),
    size=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    offset=st.sampled_from([0.0, 3.0, 50.0]),
    sinks=st.integers(0, 3),
    tile=st.sampled_from([3, 8, 64]),
    data=st.data(),
)
def test_tables_equal_naive_formulas(n, d, size, seed, offset, sinks, tile, data) -> None:
    """Masks, mean offsets and massive tokens included, to 1e-9 relative."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(size, n, d)) + offset
    features[:, :sinks] *= 30
    level = data.draw(hnp.arrays(int, n, elements=st.integers(-1, 2)))
    level[rng.permutation(n)[:8]] = 0
    stats = gram_statistics(
        states_from(features), level, levels=("a", "b", "c"), tile=tile, progress=False
    )
    for q in range(3):
        kept = features[:, (level >= 0) & (level <= q)]
        assert stats.tokens[q, 0] == kept.shape[1]
        assert_tables(stats, q, kept, 1e-9)


def test_offset_of_a_thousand_does_not_cancel() -> None:
    """An uncentred fp32 implementation of HSIC_1 gives a negative self-similarity here."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2, 60, 20))
    stats = gram_statistics(states_from(features + 1000.0), progress=False)
    plain = gram_statistics(states_from(features), progress=False)
    np.testing.assert_allclose(
        stats.table(debiased=True).inner, plain.table(debiased=True).inner, rtol=1e-9
    )


def test_all_nested_levels_equal_separate_passes() -> None:
    rng = np.random.default_rng(1)
    features = rng.normal(size=(3, 90, 8)) * np.array([1, 3, 9])[:, None, None] + 2
    document = np.repeat(np.arange(9), 10)
    level = rng.integers(-1, 5, 90)
    labels = tuple("abcde")
    states = states_from(features, document)
    together = gram_statistics(states, level, levels=labels, resamples=3, tile=16, progress=False)
    for q, label in enumerate(labels):
        only = np.where((level >= 0) & (level <= q), 0, -1)
        alone = gram_statistics(states, only, levels=(label,), tile=50, progress=False)
        for variant in together.inner:
            np.testing.assert_allclose(
                together.inner[variant][q, 0], alone.inner[variant][0, 0], rtol=1e-10, atol=1e-10
            )
            np.testing.assert_allclose(
                together.trace[variant][q, 0], alone.trace[variant][0, 0], rtol=1e-10
            )


def test_biased_resamples_equal_statistics_of_the_repeated_tokens() -> None:
    rng = np.random.default_rng(2)
    features = rng.normal(size=(2, 24, 5)) + 1
    document = np.repeat(np.arange(6), 4)
    stats = gram_statistics(states_from(features, document), resamples=4, tile=7, progress=False)
    for r in range(1, 5):
        repeats = stats.weights[r][document].astype(int)
        drawn = np.repeat(features, repeats, axis=1)
        expected = naive_tables(drawn)
        for variant in ("centred", "uncentred"):
            np.testing.assert_allclose(
                stats.inner[variant][0, r], expected[variant][0], rtol=1e-10, atol=1e-9
            )
            np.testing.assert_allclose(stats.trace[variant][0, r], expected[variant][1])


def weighted_terms(k: np.ndarray, m: np.ndarray, w: np.ndarray) -> list[float]:
    """Weighted means over ordered pairs, triples and quadruples of distinct tokens."""
    terms = [
        lambda t: k[t[0], t[1]] * m[t[0], t[1]],
        lambda t: k[t[0], t[1]] * m[t[0], t[2]],
        lambda t: k[t[0], t[1]] * m[t[2], t[3]],
    ]
    means = []
    for order, term in zip((2, 3, 4), terms, strict=True):
        tuples = list(itertools.permutations(range(len(w)), order))
        weights = np.array([np.prod(w[list(t)]) for t in tuples])
        means.append(float(weights @ [term(t) for t in tuples] / weights.sum()))
    return means


def test_debiased_resamples_equal_enumeration_over_distinct_tokens() -> None:
    """The weighted U-statistic, term by term, over all tuples of distinct tokens."""
    rng = np.random.default_rng(3)
    n = 8
    features = rng.normal(size=(2, n, 3)) + 0.5
    document = np.array([0, 0, 1, 1, 2, 2, 3, 4])
    stats = gram_statistics(states_from(features, document), resamples=4, tile=3, progress=False)
    grams = [x @ x.T for x in features - features.mean(axis=1, keepdims=True)]
    compared = 0
    for r in range(5):
        w = stats.weights[r][document]
        if (w > 0).sum() < 4:  # no quadruple of distinct tokens
            continue
        for i, j in [(0, 0), (0, 1), (1, 1)]:
            two, three, four = weighted_terms(grams[i], grams[j], w)
            np.testing.assert_allclose(
                stats.inner["centred_debiased"][0, r, i, j], two - 2 * three + four, rtol=1e-9
            )
            raw, _, _ = weighted_terms(*(features[x] @ features[x].T for x in (i, j)), w)
            np.testing.assert_allclose(stats.inner["uncentred_debiased"][0, r, i, j], raw)
            compared += r > 0
    assert compared >= 3


def test_debiased_estimates_do_not_drift_with_n() -> None:
    """Averaged over small samples they give the population's ||Sigma||_F^2 and trace."""
    rng = np.random.default_rng(4)
    scales = np.array([3.0, 1.0, 0.5, 0.2])
    estimates, traces = [], []
    for _ in range(1500):
        x = rng.normal(size=(1, 6, 4)) * scales + 2
        table = gram_statistics(states_from(x), progress=False).table(debiased=True)
        estimates.append(table.inner[0, 0])
        traces.append(table.trace[0])
    error = np.std(estimates) / np.sqrt(len(estimates))
    assert abs(np.mean(estimates) - (scales**4).sum()) < 4 * error
    assert np.mean(traces) == pytest.approx((scales**2).sum(), rel=0.05)


def test_shares_merge_to_the_whole_and_refuse_strangers() -> None:
    rng = np.random.default_rng(5)
    features = rng.normal(size=(2, 50, 4))
    states = states_from(features, np.repeat(np.arange(5), 10))
    settings_ = {"resamples": 2, "tile": 12, "progress": False}
    whole = gram_statistics(states, **settings_)
    shares = [accumulate(states, share=(i, 3), **settings_) for i in range(3)]
    merged = finalise(shares[0].merge(*shares[1:]))
    for variant in whole.inner:
        np.testing.assert_allclose(merged.inner[variant], whole.inner[variant], rtol=1e-12)
    with pytest.raises(InputError, match="different passes"):
        shares[0].merge(accumulate(states, resamples=2, tile=13, progress=False))


def test_float32_grams_agree_with_float64() -> None:
    rng = np.random.default_rng(6)
    states = states_from(rng.normal(size=(3, 300, 40)) + 5, np.repeat(np.arange(10), 30))
    exact = gram_statistics(states, progress=False)
    fast = gram_statistics(states, dtype=torch.float32, progress=False)
    for variant in exact.inner:
        scale = np.diagonal(exact.inner[variant], axis1=-2, axis2=-1).max()
        np.testing.assert_allclose(
            fast.inner[variant] / scale, exact.inner[variant] / scale, atol=1e-7
        )


def test_saved_statistics_come_back(tmp_path) -> None:
    rng = np.random.default_rng(7)
    states = states_from(rng.normal(size=(3, 40, 6)), np.repeat(np.arange(8), 5))
    level = np.repeat([0, 1, 1, -1], 10)
    stats = gram_statistics(states, level, levels=("x", "y"), resamples=5, progress=False)
    stats.save(tmp_path / "gram.npz")
    back = GramStatistics.load(tmp_path / "gram.npz")
    assert back.levels == ("x", "y")
    assert back.provenance == stats.provenance
    for variant in stats.inner:
        np.testing.assert_array_equal(back.inner[variant][:, 0], stats.inner[variant][:, 0])
        np.testing.assert_allclose(back.inner[variant], stats.inner[variant], rtol=1e-6)
        np.testing.assert_array_equal(back.trace[variant], stats.trace[variant])
    assert [t.tokens for t in back.resampled(0)] == stats.tokens[0, 1:].tolist()
    (tmp_path / "other.npz").write_bytes(b"not an archive")
    with pytest.raises(InputError, match="not a file of Gram statistics"):
        GramStatistics.load(tmp_path / "other.npz")


def test_units_never_split_a_document() -> None:
    document = np.repeat(np.arange(30), np.random.default_rng(8).integers(1, 40, 30))
    unit = document_units(document, max_units=7)
    assert unit.max() + 1 <= 7
    assert np.unique(unit).tolist() == list(range(unit.max() + 1))
    for i in range(30):
        assert len(np.unique(unit[document == i])) == 1
    np.testing.assert_array_equal(document_units(np.array([5, 5, 9])), [0, 0, 1])


def test_bootstrap_weights_draw_as_many_units_as_there_are() -> None:
    weights = bootstrap_weights(9, 50, seed=3)
    assert (weights[0] == 1).all()
    assert (weights.sum(axis=1) == 9).all()
    np.testing.assert_array_equal(weights, bootstrap_weights(9, 50, seed=3))


def test_norm_outliers_are_found_at_any_boundary() -> None:
    rms = np.ones((3, 10))
    rms[1, 4] = 9.0
    assert norm_outliers(rms).nonzero()[0].tolist() == [4]
    with pytest.raises(InputError, match="must exceed 1"):
        norm_outliers(rms, factor=0.5)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (np.zeros(3, dtype=int), "expected \\(20,\\)"),
        (np.full(20, 2), "expected -1..0"),
        (np.array([0, 0, 0] + [-1] * 17), "at least 4 are needed"),
    ],
)
def test_bad_masks_are_refused(level, message) -> None:
    states = states_from(np.random.default_rng(0).normal(size=(1, 20, 2)))
    with pytest.raises(InputError, match=message):
        gram_statistics(states, level, progress=False)
