"""Selection against brute force on features, and the guarantees that are claimed for it."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paperlib.boundaries import LayerSet, default_boundaries, dflash_boundaries
from paperlib.errors import InputError
from paperlib.gram import GramTable
from paperlib.selection import (
    BASELINES,
    CRITERIA,
    METHODS,
    Constraints,
    SetSpectra,
    dpp_map,
    dpp_of,
    early,
    exhaustive_s2,
    greedy_by,
    greedy_log_det,
    greedy_s1,
    greedy_s2,
    landscape,
    last_k,
    late,
    loes,
    middle,
    min_mean_cka,
    mrmr_difference,
    mrmr_quotient,
    one_per_compartment,
    random_sets,
    s2,
    screened_s1,
    shortlist,
    stability,
    top_k_entropy,
    uniform,
)

SEEDS = st.integers(0, 10_000)


def make_features(seed: int, size: int = 7, n: int = 24, d: int = 6) -> np.ndarray:
    """[L, n, d], centred: a random walk of states with unequal spectra, as a residual stream is."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((size, n, d)) * rng.uniform(0.1, 2, (size, 1, d))
    features = np.cumsum(steps, axis=0) * rng.uniform(0.5, 2, (size, 1, 1))
    return features - features.mean(axis=1, keepdims=True)


def table_of(features: np.ndarray, boundaries: tuple[int, ...] | None = None) -> GramTable:
    grams = features @ features.transpose(0, 2, 1)
    return GramTable(
        tuple(range(len(features))) if boundaries is None else boundaries,
        np.einsum("iab,jab->ij", grams, grams),
        np.trace(grams, axis1=1, axis2=2),
        features.shape[1],
        features.shape[2],
    )


def density(features: np.ndarray, chosen) -> np.ndarray:
    """rho of the concatenation, each boundary scaled to trace 1."""
    scaled = [features[i] / np.linalg.norm(features[i]) for i in chosen]
    stacked = np.concatenate(scaled, axis=1)
    return stacked @ stacked.T / len(scaled)


def renyi(rho: np.ndarray, alpha: float) -> float:
    values = np.linalg.eigvalsh(rho)
    values = values[values > 1e-15]
    if alpha == 1:
        return float(-(values * np.log(values)).sum())
    return float(np.log((values**alpha).sum()) / (1 - alpha))


def naive_cka(x: np.ndarray, y: np.ndarray) -> float:
    return np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def naive_score(name: str, features: np.ndarray, chosen) -> float:
    """Every criterion straight from features."""
    pairs = [naive_cka(features[i], features[j]) for i, j in itertools.combinations(chosen, 2)]
    entropies = [renyi(density(features, [i]), 2) for i in chosen]
    cka = np.mean(pairs) if pairs else 0.0
    if name == "s2":
        return renyi(density(features, chosen), 2)
    if name == "entropy":
        return float(np.mean(entropies))
    if name == "cka":
        return float(-cka)
    if name == "mrmr-difference":
        return float(np.mean(entropies) - cka)
    if name == "mrmr-quotient":
        return float(np.mean(entropies) / (max(cka, 1e-3) if pairs else 1))
    q = np.exp(np.array(entropies) / 2)
    kernel = np.array([[naive_cka(features[i], features[j]) for j in chosen] for i in chosen])
    return float(np.log(np.linalg.det(q[:, None] * kernel * q)))


def brute_force(name: str, features: np.ndarray, k: int, gap: int = 1) -> tuple[tuple, float]:
    admissible = [
        s
        for s in itertools.combinations(range(len(features)), k)
        if all(b - a >= gap for a, b in itertools.pairwise(s))
    ]
    scores = [naive_score(name, features, s) for s in admissible]
    return admissible[int(np.argmax(scores))], max(scores)


# ---------------------------------------------------------------- criteria and searches


@pytest.mark.parametrize("name", sorted(CRITERIA))
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_criteria_equal_formulas_on_features(name, k):
    features = make_features(3)
    found = landscape(table_of(features), k, CRITERIA[name])
    expected = [naive_score(name, features, s) for s in found.sets]
    np.testing.assert_allclose(found.scores, expected, rtol=1e-10, atol=1e-12)
    assert [tuple(s) for s in found.sets] == list(itertools.combinations(range(7), k))


def test_raw_weights_are_those_of_plain_concatenation():
    features = make_features(4)
    stacked = np.concatenate([features[i] for i in (0, 2, 5)], axis=1)
    rho = stacked @ stacked.T / np.linalg.norm(stacked) ** 2
    score = s2(table_of(features), weights="raw")(np.array([[0, 2, 5]]))
    np.testing.assert_allclose(score, renyi(rho, 2), rtol=1e-12)
    with pytest.raises(InputError, match="weights"):
        s2(table_of(features), weights="norm")


@pytest.mark.parametrize("k", range(1, 7))
@pytest.mark.parametrize("gap", [1, 2])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("s2", exhaustive_s2),
        ("entropy", top_k_entropy),
        ("cka", min_mean_cka),
        ("mrmr-difference", mrmr_difference),
        ("mrmr-quotient", mrmr_quotient),
        ("dpp", dpp_map),
    ],
)
def test_exact_methods_equal_brute_force(name, method, k, gap):
    if k * gap - gap + 1 > 7:
        with pytest.raises(InputError, match="do not hold"):
            method(table_of(make_features(11)), k, constraints=Constraints(min_gap=gap))
        return
    for seed in (11, 12):
        features = make_features(seed)
        found = method(table_of(features), k, constraints=Constraints(min_gap=gap))
        chosen, score = brute_force(name, features, k, gap)
        assert found.layers.boundaries == chosen
        assert found.score == pytest.approx(score, rel=1e-9, abs=1e-12)
        assert found.method == name


def naive_greedy(value, size: int, k: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(k):
        rest = [i for i in range(size) if i not in chosen]
        chosen.append(max(rest, key=lambda i: value(sorted([*chosen, i]))))
    return chosen


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=15, deadline=None)
def test_greedy_equals_naive_greedy_and_never_beats_the_exact_search(seed, k):
    features = make_features(seed)
    table = table_of(features)
    for greedy, exact, name in [
        (greedy_s2(table, k), exhaustive_s2(table, k), "s2"),
        (dpp_map(table, k, greedy=True), dpp_map(table, k), "dpp"),
        (mrmr_difference(table, k, greedy=True), mrmr_difference(table, k), "mrmr-difference"),
    ]:
        order = [b for b, _ in greedy.trace]
        assert order == naive_greedy(lambda s, n=name: naive_score(n, features, s), 7, k)
        assert sorted(order) == list(greedy.layers)
        assert greedy.trace[-1][1] == greedy.score
        assert greedy.score <= exact.score + 1e-9


@given(SEEDS)
@settings(max_examples=20, deadline=None)
def test_collision_entropy_of_a_set_is_informativeness_plus_redundancy(seed):
    """e^{-S_2(S)} = (1/k^2) [sum p_i + 2 sum sqrt(p_i p_j) CKA_ij]."""
    features, chosen = make_features(seed), (0, 3, 4, 6)
    p = [np.exp(-renyi(density(features, [i]), 2)) for i in chosen]
    pairs = itertools.combinations(range(4), 2)
    cross = sum(
        math.sqrt(p[a] * p[b]) * naive_cka(features[chosen[a]], features[chosen[b]])
        for a, b in pairs
    )
    purity = (sum(p) + 2 * cross) / 16
    score = s2(table_of(features))(np.array([chosen]))[0]
    assert score == pytest.approx(-math.log(purity), rel=1e-12)


def test_ties_go_to_the_lexicographically_smallest_set():
    one = make_features(5, size=1)[0]
    table = table_of(np.stack([one * c for c in (1, 3, 0.1, 7, 2, 5)]))
    for name, method in METHODS.items():
        # scaled copies: every set ties (a determinant of copies is zero: no set is any better)
        assert method(table, 3).layers.boundaries == (0, 1, 2), name
    assert landscape(table, 3).rank_of((3, 4, 5)) == 1


def test_constraints_hold_and_captured_boundaries_keep_their_names():
    table = table_of(make_features(6), boundaries=(0, 4, 8, 12, 16, 20, 24))
    limits = Constraints(allowed=(4, 8, 16, 20, 24), min_gap=8, num_layers=30)
    for name, method in METHODS.items():
        layers = method(table, 3, constraints=limits).layers
        assert layers.num_layers == 30
        assert set(layers) <= {4, 8, 16, 20, 24}, name
        assert min(np.diff(layers.boundaries)) >= 8, name
    with pytest.raises(InputError, match=r"\[5\] were not captured"):
        exhaustive_s2(table, 1, constraints=Constraints(allowed=(4, 5)))
    with pytest.raises(InputError, match="k = 0"):
        greedy_s2(table, 0)
    with pytest.raises(InputError, match="min_gap"):
        greedy_s2(table, 2, constraints=Constraints(min_gap=0))


@given(SEEDS, st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_greedy_does_not_run_into_a_dead_end(seed, gap):
    """With N = 6 and k boundaries at the widest gap, only a few sets exist; greedy finds one."""
    k = 6 // gap + 1
    found = greedy_s2(table_of(make_features(seed)), k, constraints=Constraints(min_gap=gap))
    assert min(np.diff(found.layers.boundaries), default=gap) >= gap
    assert len(found.layers) == k


def test_searches_that_would_take_hours_are_refused():
    table = table_of(make_features(0, size=81, n=8, d=2))
    with pytest.raises(InputError, match="too many"):
        exhaustive_s2(table, 6)
    assert len(greedy_s2(table, 6).layers) == 6


def test_debiased_tables_with_too_few_tokens_are_refused():
    table = table_of(make_features(0))
    inner = table.inner.copy()
    inner[2, 2] = -1e-3
    broken = GramTable(table.boundaries, inner, table.trace, 24, 6, debiased=True)
    for method in METHODS.values():
        with pytest.raises(InputError, match=r"purity of boundaries \[2\]"):
            method(broken, 2)


def test_one_per_compartment_equals_enumeration_of_the_product():
    features = make_features(8)
    found = one_per_compartment(table_of(features), [(0, 3), (3, 4), (4, 7)])
    options = list(itertools.product(range(3), [3], range(4, 7)))
    best = max(options, key=lambda s: naive_score("s2", features, s))
    assert found.layers.boundaries == best
    limits = Constraints(allowed=(0, 1, 3, 6), min_gap=2)
    found = one_per_compartment(table_of(features), [(0, 3), (3, 4), (4, 7)], constraints=limits)
    options = [(0, 3, 6), (1, 3, 6)]
    assert found.layers.boundaries == max(options, key=lambda s: naive_score("s2", features, s))
    for bad in ([], [(0, 3), (2, 5)], [(0, 3), (5, 9)], [(3, 3)]):
        with pytest.raises(InputError, match="compartments"):
            one_per_compartment(table_of(features), bad)


# ---------------------------------------------------------------- LOES


def naive_loes(features: np.ndarray, raw: np.ndarray, k: int) -> list[int]:
    """From features, as described: eigenvalues of covariances, norms of cross products."""
    isotropy = []
    for x in features:
        values = np.linalg.eigvalsh(x.T @ x / len(x))
        isotropy.append(values.mean() / values.std())
    overlap = [
        [np.linalg.norm(x.T @ y) / (np.linalg.norm(x) * np.linalg.norm(y)) for y in raw]
        for x in raw
    ]
    chosen: list[int] = []
    for _ in range(k):
        rest = [i for i in range(len(raw)) if i not in chosen]
        cost = [
            1 - isotropy[i] + 0.5 * max((overlap[i][j] for j in chosen), default=0) for i in rest
        ]
        chosen.append(rest[int(np.argmin(cost))])
    return chosen


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=20, deadline=None)
def test_loes_from_tables_equals_loes_from_features(seed, k):
    raw = make_features(seed) + np.random.default_rng(seed).standard_normal((7, 1, 6))
    features = raw - raw.mean(axis=1, keepdims=True)
    found = loes(table_of(features), k, uncentred=table_of(raw))
    assert [b for b, _ in found.trace] == naive_loes(features, raw, k)
    found = loes(table_of(features), k)
    assert [b for b, _ in found.trace] == naive_loes(features, features, k)


def test_loes_identities():
    x, y = make_features(9, size=2)
    table = table_of(np.stack([x, y]))
    values = np.linalg.eigvalsh(x.T @ x)
    isotropy = 1 / math.sqrt(6 * table.purity[0] - 1)
    assert isotropy == pytest.approx(values.mean() / values.std(), rel=1e-12)
    overlap = np.linalg.norm(x.T @ y) / (np.linalg.norm(x) * np.linalg.norm(y))
    assert math.sqrt(table.normalised[0, 1]) == pytest.approx(overlap, rel=1e-12)


# ---------------------------------------------------------------- order 1


@pytest.mark.parametrize(("n", "d", "dual"), [(9, 6, True), (40, 6, False)])
def test_set_spectra_by_either_route(n, d, dual):
    features = make_features(1, n=n, d=d) + 3.0
    spectra = SetSpectra(features, range(0, 14, 2))
    assert spectra.dual is dual
    centred = features - features.mean(axis=1, keepdims=True)
    for chosen in [(0,), (1, 4), (0, 2, 6)]:
        names = [2 * i for i in chosen]
        rho = density(centred, chosen)
        assert spectra.s1(names) == pytest.approx(renyi(rho, 1), rel=1e-10)
        eye = np.eye(n)
        expected = np.linalg.slogdet(eye + 5 * len(chosen) * rho)[1]
        assert spectra.log_det(names, 5.0) == pytest.approx(expected, rel=1e-10)
    rows = np.arange(n) % 3 > 0
    part = SetSpectra(torch.from_numpy(features), range(7), rows=rows, centred=False)
    assert part.s1([1, 3]) == pytest.approx(renyi(density(features[:, rows], (1, 3)), 1), rel=1e-10)
    with pytest.raises(InputError, match="names"):
        SetSpectra(features, range(3))


def test_order_1_methods():
    features = make_features(2)
    table, spectra = table_of(features), SetSpectra(make_features(2), range(7))
    found = greedy_s1(table, 3, spectra.s1)
    assert [b for b, _ in found.trace] == naive_greedy(
        lambda s: renyi(density(features, s), 1), 7, 3
    )
    best = max(itertools.combinations(range(7), 3), key=lambda s: renyi(density(features, s), 1))
    everything = screened_s1(table, 3, spectra.s1, count=35)
    assert everything.layers.boundaries == best
    one = screened_s1(table, 3, spectra.s1, count=1)
    assert one.layers == exhaustive_s2(table, 3).layers
    assert one.score == pytest.approx(renyi(density(features, one.layers), 1), rel=1e-10)
    assert greedy_log_det(table, 3, spectra.log_det).method == "log-det"


def test_s2_and_s1_may_disagree():
    """Screening by S_2 is not the same as choosing by S_1: a pinned case."""
    disagreements = []
    for seed in range(30):
        features = make_features(seed)
        by_s1 = max(
            itertools.combinations(range(7), 3), key=lambda s: renyi(density(features, s), 1)
        )
        by_s2 = exhaustive_s2(table_of(features), 3).layers.boundaries
        loss = renyi(density(features, by_s1), 1) - renyi(density(features, by_s2), 1)
        assert 0 <= loss < 0.2
        disagreements.append(by_s1 != by_s2)
    assert 0 < sum(disagreements) < 30


# ---------------------------------------------------------------- what is claimed of greedy


def unnormalised(features: np.ndarray, chosen) -> np.ndarray:
    """M = sum of trace-1 Grams; zero for the empty set."""
    n = features.shape[1]
    return len(chosen) * density(features, chosen) if len(chosen) else np.zeros((n, n))


def trace_of(function, matrix: np.ndarray) -> float:
    values = np.linalg.eigvalsh(matrix)
    return float(function(values[values > 1e-14]).sum())


@st.composite
def chains(draw):
    """Features, A subset of B, and an element outside B."""
    seed = draw(SEEDS)
    order = draw(st.permutations(range(6)))
    small = draw(st.integers(0, 4))
    large = draw(st.integers(small, 5))
    return make_features(seed, 6, 8, 3), order[:small], order[:large], order[5]


def diminishing(value, chain) -> float:
    """Gain at the small set minus gain at the large one: >= 0 where submodular."""
    features, small, large, extra = chain

    def gain(chosen):
        return value(features, [*chosen, extra]) - value(features, chosen)

    return gain(small) - gain(large)


@given(chains())
@settings(max_examples=60, deadline=None)
def test_log_det_is_monotone_submodular(chain):
    def value(features, chosen):
        return np.linalg.slogdet(np.eye(8) + 10 * unnormalised(features, chosen))[1]

    assert diminishing(value, chain) >= -1e-9
    features, small, _, extra = chain
    assert value(features, [*small, extra]) >= value(features, small) - 1e-9


@given(chains())
@settings(max_examples=60, deadline=None)
def test_unnormalised_entropy_is_submodular(chain):
    def value(features, chosen):
        return trace_of(lambda v: -v * np.log(v), unnormalised(features, chosen))

    assert diminishing(value, chain) >= -1e-9


@given(chains(), st.sampled_from([1.3, 2.0]))
@settings(max_examples=60, deadline=None)
def test_trace_powers_up_to_two_are_supermodular(chain, power):
    def value(features, chosen):
        return trace_of(lambda v: v**power, unnormalised(features, chosen))

    assert diminishing(value, chain) <= 1e-9


@given(chains())
@settings(max_examples=60, deadline=None)
def test_trace_of_the_square_root_is_submodular(chain):
    def value(features, chosen):
        return trace_of(np.sqrt, unnormalised(features, chosen))

    assert diminishing(value, chain) >= -1e-6  # roots of rounding errors


@given(SEEDS, st.floats(0, 3))
@settings(max_examples=30, deadline=None)
def test_sum_of_scores_minus_sum_of_cka_is_submodular(seed, weight):
    features = make_features(seed, 6, 8, 3)

    def value(_, chosen):
        pairs = itertools.combinations(sorted(chosen), 2)
        redundancy = sum(naive_cka(features[i], features[j]) for i, j in pairs)
        return sum(renyi(density(features, [i]), 2) for i in chosen) - weight * redundancy

    assert diminishing(value, (features, [0], [0, 1, 2], 5)) >= -1e-9


# One-dimensional boundaries: rho_0 is spread over two directions, the others lie in one of them.
SPREAD = np.array([[[1.0, 0], [0, 1]], [[1, 0], [0, 0]], [[1, 0], [0, 0]]])


def test_normalised_entropy_is_not_monotone():
    """Adding a pure boundary to an evenly spread one: log 2 falls to h(1/4)."""
    before, after = renyi(density(SPREAD, [0]), 1), renyi(density(SPREAD, [0, 1]), 1)
    assert before == pytest.approx(math.log(2))
    assert after == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert after < before - 0.1


def test_normalised_entropy_is_not_submodular():
    """A loss shrinks as the set grows: -0.13 onto {0}, -0.11 onto {0, 1}."""
    small = renyi(density(SPREAD, [0, 2]), 1) - renyi(density(SPREAD, [0]), 1)
    large = renyi(density(SPREAD, [0, 1, 2]), 1) - renyi(density(SPREAD, [0, 1]), 1)
    assert small == pytest.approx(math.log(2) * -1 + 0.5623351446)
    assert large == pytest.approx(0.4505612088 - 0.5623351446)
    assert small < large


def test_trace_cube_is_not_supermodular_in_general():
    def value(features, chosen):
        return trace_of(lambda v: v**3, unnormalised(features, chosen))

    rng = np.random.default_rng(0)
    worst = min(
        -diminishing(value, (rng.standard_normal((3, 2, 1)), [0], [0, 1], 2)) for _ in range(2000)
    )
    assert worst < -0.05


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_greedy_bound_of_order_1(seed, k):
    features = make_features(seed, 6, 8, 3)
    s1 = SetSpectra(features, range(6)).s1
    greedy = greedy_by(s1, range(6), k).score
    best = max(renyi(density(features, s), 1) for s in itertools.combinations(range(6), k))
    top = np.linalg.eigvalsh(unnormalised(features, range(6)))[-1]
    shift = 1 + math.log(top / k)
    assert greedy <= best + 1e-9
    assert greedy + shift >= (1 - 1 / math.e) * (best + shift) - 1e-9


@given(SEEDS, st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_greedy_bound_of_log_det(seed, k):
    features = make_features(seed, 6, 8, 3)
    log_det = SetSpectra(features, range(6)).log_det
    greedy = greedy_by(log_det, range(6), k).score
    best = max(log_det(s) for s in itertools.combinations(range(6), k))
    assert best + 1e-9 >= greedy >= (1 - 1 / math.e) * best


@given(SEEDS)
@settings(max_examples=25, deadline=None)
def test_entropy_bounds_of_a_concatenation(seed):
    features, chosen = make_features(seed), (1, 2, 6)
    rho = density(features, chosen)
    alone = [renyi(density(features, [i]), 1) for i in chosen]
    assert renyi(rho, 2) <= renyi(rho, 1) + 1e-9
    assert np.mean(alone) - 1e-9 <= renyi(rho, 1) <= np.mean(alone) + math.log(3) + 1e-9
    p = np.mean([np.exp(-renyi(density(features, [i]), 2)) for i in chosen])
    assert -math.log(p) - 1e-9 <= renyi(rho, 2) <= -math.log(p) + math.log(3) + 1e-9


def test_dpp_score_is_entropy_plus_log_det_of_cka_and_copies_are_impossible():
    features = make_features(10)
    features[4] = 2 * features[1]
    scores = dpp_of(table_of(features))(np.array([[1, 4], [1, 5]]))
    assert scores[0] < scores[1] - 20
    assert set(dpp_map(table_of(features), 6).layers) >= {0, 2, 3, 5, 6}


# ---------------------------------------------------------------- baselines


def test_baselines_of_30_blocks():
    expected = {
        "default": (2, 15, 27),
        "uniform": (8, 15, 23),
        "dflash": (2, 15, 28),
        "early": (1, 2, 3),
        "middle": (14, 15, 16),
        "late": (27, 28, 29),
        "last-k": (28, 29, 30),
    }
    assert {name: rule(30, 3).boundaries for name, rule in BASELINES.items()} == expected
    assert BASELINES["default"](30, 3) == default_boundaries(30)
    assert BASELINES["dflash"] is dflash_boundaries


@given(st.integers(2, 90), st.integers(1, 6))
def test_baselines_are_sets_of_k_inner_boundaries(num_layers, k):
    for rule in (uniform, early, middle, late):
        if k >= num_layers:
            with pytest.raises(InputError, match=f"k = {k}"):
                rule(num_layers, k)
        else:
            layers = rule(num_layers, k)
            assert len(layers) == k
            assert layers.boundaries[0] >= 1
            assert layers.boundaries[-1] < num_layers
    if k <= num_layers:
        assert last_k(num_layers, k).boundaries[-1] == num_layers


@pytest.mark.parametrize("n", [4, 6])
def test_shallow_models_have_no_default_but_can_be_selected_for(n):
    with pytest.raises(InputError, match="at least 7 blocks"):
        BASELINES["default"](n, 3)
    assert len(exhaustive_s2(table_of(make_features(0, size=n + 1)), 3).layers) == 3
    with pytest.raises(InputError, match="3 boundaries"):
        BASELINES["default"](30, 4)


def test_random_sets_are_seeded_and_uniform_over_what_is_admitted():
    limits = Constraints(allowed=(0, 1, 3, 4, 6), min_gap=2)
    draws = random_sets(8, 2, 4000, seed=1, constraints=limits)
    admitted = [(a, b) for a, b in itertools.combinations((0, 1, 3, 4, 6), 2) if b - a >= 2]
    counts = [sum(d.boundaries == s for d in draws) for s in admitted]
    assert sum(counts) == 4000
    expected = 4000 / len(admitted)
    assert sum((c - expected) ** 2 / expected for c in counts) < 26  # chi2, 7 dof, p = 0.0005
    assert draws == random_sets(8, 2, 4000, seed=1, constraints=limits)
    assert draws != random_sets(8, 2, 4000, seed=2, constraints=limits)


# ---------------------------------------------------------------- landscape and stability


def test_landscape_ranks():
    features = make_features(13)
    found = landscape(table_of(features), 3)
    scores = {s: naive_score("s2", features, s) for s in itertools.combinations(range(7), 3)}
    order = sorted(scores, key=scores.__getitem__, reverse=True)
    assert [found.rank_of(s) for s in order] == list(range(1, 36))
    assert found.score_of(order[4]) == pytest.approx(scores[order[4]])
    assert found.share_below(order[0]) == 1
    assert found.rank_of(LayerSet(order[2], 6)) == 3
    assert [s.boundaries for s in shortlist(table_of(features), 3, count=5)] == order[:5]
    with pytest.raises(InputError, match="not among"):
        found.rank_of((0, 1))
    with pytest.raises(InputError, match="not among"):
        landscape(table_of(features), 3, constraints=Constraints(min_gap=2)).rank_of((0, 1, 4))


def test_chunks_do_not_change_the_answer(monkeypatch):
    table = table_of(make_features(14, size=9))
    whole = exhaustive_s2(table, 4), shortlist(table, 4, count=7), landscape(table, 4).scores
    monkeypatch.setattr("paperlib.selection.CHUNK", 5)
    assert exhaustive_s2(table, 4) == whole[0]
    assert shortlist(table, 4, count=7) == whole[1]
    np.testing.assert_array_equal(landscape(table, 4).scores, whole[2])


def test_a_clear_winner_is_stable_and_noise_is_not():
    rng = np.random.default_rng(0)
    features = make_features(15, size=9, n=400, d=6)
    rows = [rng.integers(0, 400, 400) for _ in range(20)]

    def resampled(x):
        draws = [x[:, r] - x[:, r].mean(axis=1, keepdims=True) for r in rows]
        return [table_of(draw) for draw in draws]

    clear = stability(table_of(features), resampled(features), exhaustive_s2, 3)
    assert clear.stable
    assert clear.share > 0.5
    assert next(iter(clear.sets)) == clear.selection.layers.boundaries
    assert sum(clear.sets.values()) == pytest.approx(1)
    assert sum(clear.boundaries.values()) == pytest.approx(3)
    assert "NOT" not in clear.verdict
    noise = rng.standard_normal((9, 400, 6))
    noise -= noise.mean(axis=1, keepdims=True)
    unclear = stability(table_of(noise), resampled(noise), exhaustive_s2, 3)
    assert not unclear.stable
    assert "NOT stable" in unclear.verdict
    # every set is within 8 boundaries of every other
    assert stability(
        table_of(noise), resampled(noise), exhaustive_s2, 3, tolerance=8
    ).share == pytest.approx(1)


def test_rank_of_the_default_rule_and_its_interval():
    features = make_features(16, size=9, n=60)
    rng = np.random.default_rng(1)
    tables = [table_of(features[:, rng.integers(0, 60, 60)]) for _ in range(9)]
    found = stability(table_of(features), tables, greedy_s2, 3)
    rule = (2, 4, 5)  # N = 8
    assert found.default_rank == landscape(table_of(features), 3).rank_of(rule)
    ranks = [landscape(t, 3).rank_of(rule) for t in tables]
    assert found.default_rank_interval == pytest.approx(np.quantile(ranks, [0.05, 0.95]))
    assert found.total == math.comb(9, 3)
    for k, limits in [(2, Constraints()), (3, Constraints(min_gap=2))]:
        without = stability(table_of(features), tables, greedy_s2, k, constraints=limits)
        assert without.default_rank is without.default_rank_interval is without.total is None
    with pytest.raises(InputError, match="resamples"):
        stability(table_of(features), [], greedy_s2, 3)


@given(SEEDS)
@settings(max_examples=10, deadline=None)
def test_scale_of_a_boundary_does_not_matter(seed):
    features = make_features(seed)
    scaled = features * np.random.default_rng(seed).uniform(0.01, 100, (7, 1, 1))
    for method in METHODS.values():
        assert method(table_of(features), 3).layers == method(table_of(scaled), 3).layers
