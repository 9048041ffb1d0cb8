"""Matrix entropy against singular values, plain matrix powers, closed forms and enumeration."""

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paperlib.cka import linear_cka
from paperlib.entropy import (
    collision_entropy,
    concatenation_entropy,
    effective_rank,
    eigenvalues,
    largest_entropy,
    matrix_entropy,
    normalised,
    per_prompt_entropy,
    qjsd,
    set_collision_entropy,
    set_purity,
    sink_bound,
    spectral_entropy,
)
from paperlib.errors import InputError
from paperlib.gram import GramTable, gram_statistics
from tests.states import states_from

SHAPES = [(40, 12), (12, 40), (15, 15), (2, 5), (30, 1)]


def table_of(features: np.ndarray, **view: bool) -> GramTable:
    return gram_statistics(states_from(features), progress=False).table(**view)


def density(x: np.ndarray, centred: bool = True) -> np.ndarray:
    """[n, n] rho, centred by the centring matrix."""
    n = len(x)
    h = np.eye(n) - 1 / n if centred else np.eye(n)
    k = h @ (x @ x.T) @ h
    return k / np.trace(k)


def singular(x: np.ndarray, centred: bool = True) -> np.ndarray:
    """Singular values from the features themselves: no Gram matrix is formed."""
    x = x - x.mean(axis=0) if centred else x
    return np.linalg.svd(x, compute_uv=False)


def shannon(p: np.ndarray) -> float:
    return -sum(v * math.log(v) for v in p if v > 0)


def purity_of(x: np.ndarray, centred: bool = True) -> float:
    rho = density(x, centred)
    return float((rho * rho).sum())


def unit_trace(x: np.ndarray) -> np.ndarray:
    x = x - x.mean(axis=0)
    return x / np.linalg.norm(x)


def layers(rng: np.random.Generator, count: int, n: int, d: int) -> np.ndarray:
    """[L, n, d] related layers of unequal scale, with a mean."""
    base = rng.normal(size=(n, d)) * np.linspace(3, 0.3, d)
    mixed = [base @ rng.normal(size=(d, d)) + 2 * i * rng.normal(size=(n, d)) for i in range(count)]
    return np.stack(mixed) * 4.0 ** np.arange(count)[:, None, None] + rng.normal(size=d)


# one layer


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_orders_one_half_two_three(n: int, d: int, centred: bool) -> None:
    """1 by singular values, 1/2 by the nuclear norm, 2 and 3 by powers of rho, no eigenvalues."""
    x = np.random.default_rng(n + d).normal(size=(n, d)) + 1.5
    rho, s = density(x, centred), singular(x, centred)
    expected = {
        1.0: shannon(s**2 / (s**2).sum()),
        0.5: 2 * np.log(s.sum() / np.linalg.norm(s)),
        2.0: -np.log(np.trace(rho @ rho)),
        3.0: -np.log(np.trace(rho @ rho @ rho)) / 2,
    }
    for alpha, value in expected.items():
        assert matrix_entropy(x, alpha, centred=centred) == pytest.approx(value, abs=1e-7), alpha
    assert matrix_entropy(torch.from_numpy(x), centred=centred) == pytest.approx(
        expected[1.0], abs=1e-10
    )


@pytest.mark.parametrize(("n", "d"), SHAPES)
def test_eigenvalues_are_squared_singular_values(n: int, d: int) -> None:
    x = np.random.default_rng(7).normal(size=(n, d)) + 3
    found, s = eigenvalues(x), singular(x)
    assert found.shape == (min(n, d),)
    np.testing.assert_allclose(found, np.sort(s**2 / (s**2).sum()), atol=1e-12)
    assert found.sum() == pytest.approx(1, abs=1e-14)


@pytest.mark.parametrize("alpha", [0.1, 0.5, 1, 1.5, 2, 3])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("shape", [(9, 30), (30, 9)])
def test_k_equal_orthogonal_directions(alpha: float, k: int, shape: tuple[int, int]) -> None:
    """log k for every order; for small orders this fails if rounding counts as directions."""
    rng = np.random.default_rng(k)
    left = np.linalg.qr(rng.normal(size=(shape[0], k)))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], k)))[0]
    x = 17.0 * left @ right.T
    assert matrix_entropy(x, alpha, centred=False) == pytest.approx(math.log(k), abs=1e-10)
    assert effective_rank(math.log(k)) == pytest.approx(k)


@settings(deadline=None)
@given(
    p=st.lists(st.floats(1e-3, 1), min_size=1, max_size=8),
    alpha=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
    scale=st.floats(1e-6, 1e6),
)
def test_spectral_entropy_formula(p: list[float], alpha: float, scale: float) -> None:
    q = [v / sum(p) for v in p]
    expected = (
        shannon(np.array(q)) if alpha == 1 else math.log(sum(v**alpha for v in q)) / (1 - alpha)
    )
    given_spectrum = np.array([[*p, 0.0, -1e-12 * max(p)]]) * scale
    np.testing.assert_allclose(spectral_entropy(given_spectrum, alpha), [expected], atol=1e-9)


def test_order_one_is_the_limit_of_its_neighbours() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(6))
    below, at, above = (float(spectral_entropy(p, a)) for a in (1 - 1e-6, 1, 1 + 1e-6))
    assert below > at > above
    assert (below + above) / 2 == pytest.approx(at, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(3, 20),
    d=st.integers(1, 20),
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-4, 1e4),
    alpha=st.sampled_from([0.5, 1.0, 2.0, 3.0]),
)
def test_scale_rotation_offset_and_order_of_tokens(n, d, seed, scale, alpha) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    moved = scale * x[rng.permutation(n)] @ rotation + scale * rng.normal(size=d)
    assert matrix_entropy(moved, alpha) == pytest.approx(matrix_entropy(x, alpha), abs=1e-6)
    assert matrix_entropy(x, alpha) <= largest_entropy(n, d) + 1e-9


def test_centring_takes_a_shared_direction_off() -> None:
    x = np.random.default_rng(0).normal(size=(200, 20))
    far = x + 100
    assert matrix_entropy(far, centred=False) < 0.05
    assert matrix_entropy(far) == pytest.approx(matrix_entropy(x), abs=1e-8)


def test_normalised_by_the_largest_rank() -> None:
    """Centring costs one direction, and k layers of width d have at most k d."""
    assert largest_entropy(10, 50) == pytest.approx(math.log(9))
    assert largest_entropy(10, 50, centred=False) == pytest.approx(math.log(10))
    assert largest_entropy(100, 5, k=3) == pytest.approx(math.log(15))
    assert largest_entropy(12, 5, k=3) == pytest.approx(math.log(11))
    simplex = np.eye(10)  # centred: nine equal directions, the most that ten tokens have
    assert normalised(matrix_entropy(simplex), 10, 10) == pytest.approx(1, abs=1e-12)
    assert normalised(np.array([0.0, math.log(3)]), 10, 50) == pytest.approx([0, 0.5])
    assert np.isnan(normalised(0.0, 2, 5))
    with pytest.raises(InputError, match="too few"):
        largest_entropy(1, 5)


def test_effective_rank_is_of_eigenvalues_not_singular_values() -> None:
    s = np.array([4.0, 2.0, 1.0])
    x = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 3)))[0] * s
    of_eigenvalues = math.exp(shannon(s**2 / (s**2).sum()))
    of_singular_values = math.exp(shannon(s / s.sum()))
    assert effective_rank(matrix_entropy(x, centred=False)) == pytest.approx(of_eigenvalues)
    assert of_singular_values > of_eigenvalues + 0.5


# the compatibility option


def clamped_by_hand(x: np.ndarray) -> float:
    x = x - x.mean(axis=0)
    x = x / np.sqrt((x**2).sum(axis=1))[:, None]
    n, d = x.shape
    gram = np.array(x.T @ x if n > d else x @ x.T)
    gram[gram < 0] = 0
    values = np.linalg.eigvals(gram / np.trace(gram)).real
    values = values[values > 0]
    return shannon(values / values.sum())


def test_compat_clamps_entries_and_depends_on_the_branch() -> None:
    """Zero columns change nothing but which Gram is the smaller one."""
    x = np.random.default_rng(3).normal(size=(60, 50))
    wide = np.concatenate([x, np.zeros((60, 30))], axis=1)
    assert matrix_entropy(x) == pytest.approx(matrix_entropy(wide), abs=1e-9)
    narrow, broad = (matrix_entropy(z, compat="information_flow") for z in (x, wide))
    assert narrow == pytest.approx(clamped_by_hand(x), abs=1e-9)
    assert broad == pytest.approx(clamped_by_hand(wide), abs=1e-9)
    assert abs(narrow - broad) > 0.05
    moved = x - x.mean(axis=0)
    honest = matrix_entropy(moved / np.linalg.norm(moved, axis=1, keepdims=True), centred=False)
    assert abs(narrow - honest) > 0.05
    assert abs(broad - honest) > 0.05


def test_compat_is_an_option_only() -> None:
    assert inspect.signature(matrix_entropy).parameters["compat"].default is None
    x = np.random.default_rng(0).normal(size=(8, 3))
    with pytest.raises(InputError, match="information_flow"):
        matrix_entropy(x, compat="other")
    x[0] = x[1:].mean(axis=0)  # a token at the mean has no direction to be scaled to
    assert np.isfinite(matrix_entropy(x, compat="information_flow"))


# documents


def test_per_prompt_entropy() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(21, 6)) + 5 * np.repeat(np.arange(3), 7)[:, None]
    document = np.repeat([4, 0, 2], 7)
    shuffle = rng.permutation(21)
    found = per_prompt_entropy(x[shuffle], document[shuffle])
    expected = [
        shannon(singular(x[document == i]) ** 2 / (singular(x[document == i]) ** 2).sum())
        for i in (0, 2, 4)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    two = per_prompt_entropy(x, document, alpha=2, centred=False)
    np.testing.assert_allclose(
        two, [-np.log(purity_of(x[document == i], centred=False)) for i in (0, 2, 4)], atol=1e-9
    )


def test_per_prompt_entropy_of_documents_that_do_not_vary() -> None:
    """A single row, and one token repeated (the embeddings of "ha ha ha"), have no entropy."""
    x = np.concatenate([np.eye(3), [[1, 2, 3]], np.full((4, 3), 0.1)])
    found = per_prompt_entropy(x, np.array([0, 0, 0, 1, 2, 2, 2, 2]))
    np.testing.assert_allclose(found, [math.log(2), np.nan, np.nan], atol=1e-12)
    with pytest.raises(InputError, match="one per row"):
        per_prompt_entropy(x, np.zeros(3))


# concatenation


@pytest.mark.parametrize("weights", ["equal", "raw"])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("n", [10, 60])  # narrower and wider than the 3 + 7 + 12 columns
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_concatenation_entropy_is_that_of_the_concatenation(
    weights: str, centred: bool, n: int, alpha: float
) -> None:
    rng = np.random.default_rng(n)
    parts = [rng.normal(size=(n, d)) * scale + 1 for d, scale in ((3, 1), (7, 20), (12, 0.1))]
    found = concatenation_entropy(parts, alpha, weights=weights, centred=centred)
    moved = [x - x.mean(axis=0) if centred else x for x in parts]
    if weights == "equal":
        moved = [x / np.sqrt((x**2).sum()) for x in moved]
    s = np.linalg.svd(np.concatenate(moved, axis=1), compute_uv=False)
    p = s**2 / (s**2).sum()
    assert found == pytest.approx(shannon(p) if alpha == 1 else -np.log((p**2).sum()), abs=1e-9)


def test_raw_weights_let_the_largest_layer_win() -> None:
    rng = np.random.default_rng(0)
    small, large = rng.normal(size=(50, 20)), 1e4 * rng.normal(size=(50, 2))
    raw = concatenation_entropy([small, large], weights="raw")
    assert raw == pytest.approx(matrix_entropy(large), abs=1e-4)
    assert concatenation_entropy([small, large]) > raw + 1


@settings(max_examples=25, deadline=None)
@given(k=st.integers(1, 4), n=st.integers(3, 15), d=st.integers(1, 15), seed=st.integers(0, 10**6))
def test_bounds(k: int, n: int, d: int, seed: int) -> None:
    """S_2 <= S_1 <= log rank; a set lies between the mean of its layers and log k above."""
    parts = list(layers(np.random.default_rng(seed), k, n, d))
    one = [matrix_entropy(x) for x in parts]
    two = [matrix_entropy(x, 2) for x in parts]
    for x, s1, s2 in zip(parts, one, two, strict=True):
        rank = np.linalg.matrix_rank(x - x.mean(axis=0))
        assert s2 <= s1 + 1e-9
        assert s1 <= np.log(rank) + 1e-9
    joint1, joint2 = concatenation_entropy(parts), concatenation_entropy(parts, 2)
    assert np.mean(one) - 1e-9 <= joint1 <= np.mean(one) + np.log(k) + 1e-9
    mean_purity = -np.log(np.mean(np.exp(-np.array(two))))
    assert mean_purity - 1e-9 <= joint2 <= mean_purity + np.log(k) + 1e-9
    assert joint1 <= largest_entropy(n, d, k=k) + 1e-9
    assert qjsd(parts) == pytest.approx(joint1 - np.mean(one), abs=1e-9)
    assert -1e-9 <= qjsd(parts) <= np.log(k) + 1e-9


def test_qjsd_at_its_ends() -> None:
    """Equal Grams: 0, whatever the scale and the rotation. No shared direction: log k."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 6))
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    assert qjsd([x, 5 * x @ rotation, -x]) == pytest.approx(0, abs=1e-9)
    moved = rng.normal(size=(30, 9))
    basis = np.linalg.qr(moved - moved.mean(axis=0))[0]  # nine directions orthogonal to the ones
    parts = [basis[:, 3 * i : 3 * i + 3] @ rng.normal(size=(3, 5)) for i in range(3)]
    assert qjsd(parts) == pytest.approx(math.log(3), abs=1e-9)


def test_normalised_order_one_is_not_monotone() -> None:
    """Adding a layer that repeats one direction of four lowers S_1: 1.386 to 1.074 nats."""
    isotropic = np.eye(8)[:, :4]
    repeated = np.eye(8)[:, :1]
    alone = concatenation_entropy([isotropic], centred=False)
    joined = concatenation_entropy([isotropic, repeated], centred=False)
    assert alone == pytest.approx(math.log(4), abs=1e-12)
    closed_form = -(5 / 8) * math.log(5 / 8) - 3 * (1 / 8) * math.log(1 / 8)
    assert joined == pytest.approx(closed_form, abs=1e-12)
    assert joined < alone - 0.3


# order 2 from the table


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("n", [12, 50])
def test_set_purity_equals_direct_concatenation(n: int, centred: bool) -> None:
    """Every subset of five layers, both weights; and the identity that joins entropy and CKA."""
    features = layers(np.random.default_rng(n), 5, n, 7)
    table = table_of(features, centred=centred)
    moved = features - features.mean(axis=1, keepdims=True) if centred else features
    p, cka = np.exp(-collision_entropy(table)), linear_cka(table)
    for k in range(1, 6):
        sets = np.array(list(itertools.combinations(range(5), k)))
        equal, raw = set_purity(table, sets), set_purity(table, sets, weights="raw")
        for chosen, found_equal, found_raw in zip(sets, equal, raw, strict=True):
            scaled = [moved[i] / np.linalg.norm(moved[i]) for i in chosen]
            direct = purity_of(np.concatenate(scaled, axis=1), centred)
            assert found_equal == pytest.approx(direct, abs=1e-9)
            unscaled = np.concatenate(features[chosen], axis=1)
            assert found_raw == pytest.approx(purity_of(unscaled, centred), abs=1e-9)
            pairs = sum(
                np.sqrt(p[i] * p[j]) * cka[i, j] for i, j in itertools.combinations(chosen, 2)
            )
            assert found_equal == pytest.approx((p[chosen].sum() + 2 * pairs) / k**2, abs=1e-12)
        np.testing.assert_allclose(set_collision_entropy(table, sets), -np.log(equal))
    np.testing.assert_allclose(p, [purity_of(x, centred) for x in features], rtol=0, atol=1e-9)


def test_debiased_set_purity_is_that_of_the_concatenation() -> None:
    """The U-statistics are bilinear too: one debiased table of concatenated features each."""
    features = layers(np.random.default_rng(0), 4, 30, 5)
    table = table_of(features, debiased=True)
    sets = np.array(list(itertools.combinations(range(4), 3)))
    for weights in ("equal", "raw"):
        scale = np.sqrt(table.trace) if weights == "equal" else np.ones(4)
        direct = [
            table_of(
                np.concatenate([features[i] / scale[i] for i in s], axis=1)[None], debiased=True
            )
            for s in sets
        ]
        np.testing.assert_allclose(
            set_purity(table, sets, weights=weights), [t.purity[0] for t in direct], rtol=1e-9
        )


def test_sets_may_be_one_set_or_repeat_a_layer() -> None:
    table = table_of(layers(np.random.default_rng(0), 3, 20, 4))
    assert set_purity(table, np.array([0, 2])).shape == (1,)
    repeated = set_purity(table, np.array([[1, 1]]))
    np.testing.assert_allclose(repeated, table.purity[1:2], rtol=1e-12)


def test_a_debiased_purity_that_is_not_positive_gives_nan() -> None:
    table = GramTable((0, 1), np.diag([-0.1, 0.5]), np.ones(2), 4.0, 8, debiased=True)
    np.testing.assert_allclose(collision_entropy(table), [np.nan, np.log(2)])
    assert np.isnan(set_collision_entropy(table, np.array([[0]])))


# what goes wrong with real states


def test_one_massive_token_lowers_entropy_to_its_bound() -> None:
    """A 30-fold token halves S_1 of 512 Gaussian tokens; a 100-fold one leaves a tenth."""
    x = np.random.default_rng(0).normal(size=(512, 256))
    clean = matrix_entropy(x)
    previous = clean
    for factor, ceiling in ((30, 0.6), (100, 0.15)):
        sunk = x.copy()
        sunk[0] *= factor
        found = matrix_entropy(sunk)
        assert found < ceiling * clean
        assert found < previous
        share = eigenvalues(sunk)[-1]
        assert found <= sink_bound(share, 256)
        previous = found


@settings(deadline=None)
@given(
    rest=st.lists(st.floats(0, 1), min_size=1, max_size=12),
    share=st.floats(0, 1),
)
def test_sink_bound_holds(rest: list[float], share: float) -> None:
    rank = len(rest) + 1
    share = max(share, 1 / rank)
    total = sum(rest)
    others = [(1 - share) * v / total if total > 0 else (1 - share) / len(rest) for v in rest]
    assert shannon(np.array([share, *others])) <= sink_bound(share, rank) + 1e-9
    flat = np.array([share, *[(1 - share) / len(rest)] * len(rest)])
    assert shannon(flat) == pytest.approx(sink_bound(share, rank), abs=1e-9)  # attained


@pytest.mark.parametrize(("share", "rank"), [(0.1, 5), (1.1, 5), (0.5, 1)])
def test_sink_bound_refuses(share: float, rank: int) -> None:
    with pytest.raises(InputError, match="share"):
        sink_bound(share, rank)


def test_plug_in_collision_entropy_is_low_and_debiased_is_not() -> None:
    """Purity is high by about 1/n: at 48 tokens S_2 loses half a nat, the U-statistic nothing."""
    rng = np.random.default_rng(0)
    scale = 1 / np.sqrt(1 + np.arange(60) / 10)
    true = -np.log((scale**4).sum() / (scale**2).sum() ** 2)
    plain, debiased = [], []
    for n in (48, 192):
        draws = rng.normal(size=(30, n, 60)) * scale
        tables = [(table_of(x[None]), table_of(x[None], debiased=True)) for x in draws]
        plain.append(np.mean([collision_entropy(t)[0] for t, _ in tables]))
        debiased.append(-np.log(np.mean([t.purity[0] for _, t in tables])))
    assert plain[0] < true - 0.3
    assert plain[0] < plain[1] - 0.2  # and so every filter that drops tokens lowers it
    np.testing.assert_allclose(debiased, true, atol=0.05)


# bad input


def test_errors() -> None:
    x = np.random.default_rng(0).normal(size=(6, 3))
    bad = x.copy()
    bad[2, 1] = np.nan
    for call in (matrix_entropy, eigenvalues):
        with pytest.raises(InputError, match="nan"):
            call(bad)
    for alpha in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="alpha"):
            matrix_entropy(x, alpha)
    for constant in (np.zeros((6, 3)), np.full((6, 3), 0.1), np.full((6, 3), 1e6)):
        with pytest.raises(InputError, match="do not vary"):
            matrix_entropy(constant)
        for weights in ("equal", "raw"):
            with pytest.raises(InputError, match="do not vary"):
                concatenation_entropy([x, constant], weights=weights)
        with pytest.raises(InputError, match="do not vary"):
            matrix_entropy(constant, compat="information_flow")
    with pytest.raises(InputError, match="do not vary"):
        matrix_entropy(np.zeros((6, 3)), centred=False)
    with pytest.raises(InputError, match="too few"):
        matrix_entropy(x[:1])
    assert matrix_entropy(x[:1], centred=False) == pytest.approx(0)
    with pytest.raises(InputError, match=r"\[n, d\]"):
        matrix_entropy(x[0])
    with pytest.raises(InputError, match="zero"):
        spectral_entropy(np.zeros((2, 4)))
    with pytest.raises(InputError, match="nan"):
        spectral_entropy(np.array([1, np.inf]))
    with pytest.raises(InputError, match="weights"):
        concatenation_entropy([x], weights="rms")
    with pytest.raises(InputError, match="no layers"):
        concatenation_entropy([])
    with pytest.raises(InputError, match="tokens"):
        concatenation_entropy([x, x[:4]])


def test_errors_of_sets() -> None:
    table = table_of(layers(np.random.default_rng(0), 3, 20, 4))
    for sets in ([[0, 3]], [[-1, 1]], np.empty((0, 2), dtype=int)):
        with pytest.raises(InputError, match=r"positions 0\.\.2"):
            set_purity(table, np.array(sets))
    with pytest.raises(InputError, match="float64"):
        set_purity(table, np.array([[0.0, 1.0]]))
    with pytest.raises(InputError, match="weights"):
        set_purity(table, np.array([[0, 1]]), weights="loud")


# real states


@pytest.mark.slow
@pytest.mark.real
def test_identity_on_all_triples_of_real_boundaries(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """SmolLM2-135M, 128 tokens, 31 boundaries: all 4 495 triples, features really concatenated."""
    from paperlib.capture import capture_states
    from paperlib.corpora import load_corpus, tokenize
    from paperlib.filtering import usable_tokens
    from paperlib.targets import load_target

    target = load_target("smollm2-135m")
    documents = tokenize(target, load_corpus("openwebtext", limit=4), max_tokens=64)
    states = capture_states(target, documents, tmp_path / "states", progress=False)
    usable = np.flatnonzero(usable_tokens(states))
    rows = usable[np.linspace(0, len(usable) - 1, 128).astype(int)]
    assert len(np.unique(rows)) == 128
    level = np.full(states.tokens, -1)
    level[rows] = 0
    table = gram_statistics(states, level, progress=False).table()
    p, cka = np.exp(-collision_entropy(table)), linear_cka(table)

    features = states.states[:, torch.from_numpy(rows)].double().numpy()  # [31, 128, 576]
    scaled = np.stack([unit_trace(x) for x in features])
    triples = np.array(list(itertools.combinations(range(31), 3)))
    assert len(triples) == 4495
    direct = np.empty(len(triples))
    for m, (i, j, l) in enumerate(triples):  # noqa: E741
        joined = np.concatenate([scaled[i], scaled[j], scaled[l]], axis=1)  # [128, 1728]
        gram = joined @ joined.T
        direct[m] = (gram * gram).sum() / np.trace(gram) ** 2
    i, j, l = triples.T  # noqa: E741
    pairs = sum(np.sqrt(p[a] * p[b]) * cka[a, b] for a, b in ((i, j), (i, l), (j, l)))
    identity = (p[i] + p[j] + p[l] + 2 * pairs) / 9
    np.testing.assert_allclose(identity, direct, rtol=0, atol=1e-12)
    np.testing.assert_allclose(set_purity(table, triples), direct, rtol=0, atol=1e-12)
    assert direct.max() / direct.min() > 1.2  # the triples do differ
