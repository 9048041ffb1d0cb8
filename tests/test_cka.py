"""CKA against enumeration, centring matrices and other packages; compartments against brute force.

Packages that compute CKA too (cka, ckatorch, torch_cka, repsim) are compared with if they are
installed; nothing depends on them.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles
from scipy.spatial.distance import pdist, squareform

from paperlib.cka import (
    compartment_stability,
    compartments,
    gram_cka,
    hsic1,
    linear_cka,
    linear_cka_features,
    minibatch_cka,
    rbf_cka,
    stationary,
)
from paperlib.errors import InputError
from paperlib.gram import GramTable, gram_statistics
from tests.states import states_from


def table_of(features: np.ndarray, level: np.ndarray | None = None, **view: bool) -> GramTable:
    return gram_statistics(states_from(features), level, progress=False).table(**view)


def biased_by_covariance(x: np.ndarray, y: np.ndarray) -> float:
    """The feature-space form: squared norms of the d x d cross-covariances."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    cross, own = np.linalg.norm(x.T @ y) ** 2, np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(cross / own)


def debiased_by_centring(x: np.ndarray, y: np.ndarray) -> float:
    """Cosine of the U-centred Grams (Szekely and Rizzo), entry by entry."""

    def u_centred(z: np.ndarray) -> np.ndarray:
        z = z - z.mean(axis=0)
        k = z @ z.T
        np.fill_diagonal(k, 0)
        n, rows = len(k), k.sum(axis=1)
        u = k - np.add.outer(rows, rows) / (n - 2) + k.sum() / ((n - 1) * (n - 2))
        np.fill_diagonal(u, 0)
        return u

    a, b = u_centred(x), u_centred(y)
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


def related_layers(seed: int, count: int = 4, n: int = 30, d: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = [rng.normal(size=(n, d))]
    for _ in range(count - 1):
        x.append(0.7 * x[-1] @ rng.normal(size=(d, d)) / np.sqrt(d) + 0.7 * rng.normal(size=(n, d)))
    return np.stack(x) * 5.0 ** np.arange(count)[:, None, None] + rng.normal(size=d)


def pairs_of(function, features: np.ndarray) -> np.ndarray:  # type: ignore[no-untyped-def]
    return np.array([[function(x, y) for y in features] for x in features])


# the estimators


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("n", "d"), [(30, 8), (12, 20)])
def test_table_features_and_naive_forms_agree(n: int, d: int, masked: bool) -> None:
    features = related_layers(n, n=n, d=d)
    level = np.where(np.arange(n) % 4 == 1, -1, 0) if masked else None
    kept = features if level is None else features[:, level == 0]
    for debiased, naive in ((False, biased_by_covariance), (True, debiased_by_centring)):
        found = linear_cka(table_of(features, level, debiased=debiased))
        np.testing.assert_allclose(found, pairs_of(naive, kept), atol=1e-10)
        by_pair = pairs_of(lambda x, y, d=debiased: linear_cka_features(x, y, debiased=d), kept)
        np.testing.assert_allclose(found, by_pair, atol=1e-10)
        np.testing.assert_allclose(np.diag(found), 1, atol=1e-12)
        assert np.linalg.eigvalsh(found).min() > -1e-12  # a Gram matrix of the layers


def test_table_uncentred_is_the_cosine_of_plain_grams() -> None:
    features = related_layers(3)
    grams = [(x @ x.T).ravel() for x in features]
    cosine = pairs_of(lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b), np.array(grams))
    np.testing.assert_allclose(linear_cka(table_of(features, centred=False)), cosine, atol=1e-12)


def test_cka_of_subspaces_is_the_mean_squared_cosine_of_their_angles() -> None:
    """An oracle from scipy: for orthonormal columns CKA is sum cos^2(angles) / k."""
    rng = np.random.default_rng(0)
    moved = rng.normal(size=(40, 6))
    basis = np.linalg.qr(moved - moved.mean(axis=0))[0]
    x, y = basis[:, :3], np.linalg.qr(basis @ rng.normal(size=(6, 3)))[0]
    expected = (np.cos(subspace_angles(x, y)) ** 2).sum() / 3
    assert linear_cka_features(x, y) == pytest.approx(expected, abs=1e-12)
    assert linear_cka(table_of(np.stack([x, y])))[0, 1] == pytest.approx(expected, abs=1e-12)


def test_hsic1_is_the_mean_over_distinct_tuples() -> None:
    """n = 6: every ordered pair, triple and quadruple of different rows."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(6, 3)) + 1, rng.normal(size=(6, 2))
    k, m = x @ x.T, y @ y.T
    index = range(6)
    pairs = np.mean([k[i, j] * m[i, j] for i, j in itertools.permutations(index, 2)])
    triples = np.mean([k[i, j] * m[i, q] for i, j, q in itertools.permutations(index, 3)])
    fours = np.mean([k[i, j] * m[q, r] for i, j, q, r in itertools.permutations(index, 4)])
    found = hsic1(torch.from_numpy(k), torch.from_numpy(m))
    assert found == pytest.approx(pairs - 2 * triples + fours, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(4, 25), d=st.integers(1, 12), seed=st.integers(0, 10**6))
def test_hsic1_is_the_debiased_form_of_kornblith(n: int, d: int, seed: int) -> None:
    """With K, L centred, n (n - 3) HSIC_1 is
    <K, L> - n/(n-2) sum k_ii l_ii + tr K tr L / ((n-1)(n-2))."""
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(n, d + 1))
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    k, m = x @ x.T, y @ y.T
    a, b = np.diag(k), np.diag(m)
    expected = (k * m).sum() - n / (n - 2) * a @ b + a.sum() * b.sum() / ((n - 1) * (n - 2))
    found = n * (n - 3) * hsic1(torch.from_numpy(k), torch.from_numpy(m))
    assert found == pytest.approx(expected, abs=1e-10 * np.linalg.norm(k) * np.linalg.norm(m))
    itself = hsic1(torch.from_numpy(k), torch.from_numpy(k))
    assert itself >= -1e-12 * np.linalg.norm(k) ** 2  # a squared norm: no negative self-similarity


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(1e-3, 1e3),
    debiased=st.booleans(),
)
def test_invariances(seed: int, scale: float, debiased: bool) -> None:
    """Orthogonal maps, isotropic scale and offsets change nothing; other maps do."""
    x, y = related_layers(seed, count=2, n=20, d=6)
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    value = linear_cka_features(x, y, debiased=debiased)
    moved = scale * (x @ rotation + rng.normal(size=6))
    assert linear_cka_features(moved, y, debiased=debiased) == pytest.approx(value, abs=1e-9)
    assert linear_cka_features(y, x, debiased=debiased) == pytest.approx(value, abs=1e-12)
    stretched = x * np.array([100, 1, 1, 1, 1, 1])
    assert abs(linear_cka_features(stretched, y, debiased=debiased) - value) > 1e-4


@pytest.mark.parametrize(("n", "d1", "d2"), [(60, 60, 60), (100, 25, 100)])
def test_independent_layers(n: int, d1: int, d2: int) -> None:
    """Biased: about 1 / sqrt((1 + n/g1)(1 + n/g2)), g the participation ratios. Debiased: 0."""
    rng = np.random.default_rng(0)
    biased, debiased = [], []
    scale = np.linspace(1, 3, d1)
    for _ in range(25):
        x, y = rng.normal(size=(n, d1)) * scale, rng.normal(size=(n, d2))
        biased.append(linear_cka_features(x, y))
        debiased.append(linear_cka_features(x, y, debiased=True))
    g1 = (scale**2).sum() ** 2 / (scale**4).sum()
    expected = 1 / np.sqrt((1 + n / g1) * (1 + n / d2))
    assert np.mean(biased) == pytest.approx(expected, abs=0.02)
    assert np.mean(debiased) == pytest.approx(0, abs=0.02)


def test_massive_tokens_make_independent_layers_alike() -> None:
    """One is undone by debiasing; two that share a direction, as sinks do, are not: only dropping
    them works."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2, 256, 128))
    assert abs(linear_cka(table_of(features, debiased=True))[0, 1]) < 0.05
    one, two = features.copy(), features.copy()
    one[:, :1] *= 100
    two[:, :2] = 100 * two[:, :1] + two[:, :2]
    assert linear_cka(table_of(one))[0, 1] > 0.95
    assert abs(linear_cka(table_of(one, debiased=True))[0, 1]) < 0.2
    assert linear_cka(table_of(two, debiased=True))[0, 1] > 0.95
    dropped = np.where(np.arange(256) < 2, -1, 0)
    assert abs(linear_cka(table_of(two, dropped, debiased=True))[0, 1]) < 0.05


def test_negative_values_are_kept() -> None:
    """Debiased CKA of independent layers is below zero about half of the time."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(12, 10, 4))
    found = linear_cka(table_of(features, debiased=True))
    off = found[np.triu_indices(12, 1)]
    assert 0.25 < (off < 0).mean() < 0.75
    i, j = np.unravel_index(found.argmin(), found.shape)
    assert found[i, j] < -0.2
    by_pair = linear_cka_features(features[i], features[j], debiased=True)
    assert by_pair == pytest.approx(found[i, j], abs=1e-12)


@pytest.mark.parametrize("offset", [50.0, 1000.0])
def test_a_mean_offset_does_not_cancel(offset: float) -> None:
    features = related_layers(5, count=3).astype(np.float32).astype(np.float64)
    far = features + offset
    for debiased in (False, True):
        np.testing.assert_allclose(
            linear_cka(table_of(far, debiased=debiased)),
            linear_cka(table_of(features, debiased=debiased)),
            atol=1e-8,
        )
        pair = linear_cka_features(far[0], far[1], debiased=debiased)
        plain = linear_cka_features(features[0], features[1], debiased=debiased)
        assert pair == pytest.approx(plain, abs=1e-8)


def test_a_boundary_without_positive_self_similarity_gives_nan() -> None:
    table = GramTable((0, 1), np.array([[-0.1, 0.2], [0.2, 0.5]]), np.ones(2), 4.0, 8)
    found = linear_cka(table)
    assert np.isnan(found[0]).all()
    assert found[1, 1] == pytest.approx(1)


# other kernels, minibatches


def test_rbf_by_hand() -> None:
    x, y = related_layers(1, count=2, n=15, d=5)
    grams = []
    for z in (x, y):
        distance = pdist(z)
        ranked = np.sort(distance)
        median = ranked[(len(ranked) - 1) // 2]
        grams.append(np.exp(-(squareform(distance) ** 2) / (2 * (0.7 * median) ** 2)))
    h = np.eye(15) - 1 / 15
    a, b = (h @ k @ h for k in grams)
    expected = (a * b).sum() / (np.linalg.norm(a) * np.linalg.norm(b))
    assert rbf_cka(x, y, bandwidth=0.7) == pytest.approx(expected, abs=1e-10)
    expected = gram_cka(*map(torch.from_numpy, grams), debiased=True)
    assert rbf_cka(x, y, bandwidth=0.7, debiased=True) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("debiased", [False, True])
def test_rbf_becomes_linear_at_large_bandwidth(debiased: bool) -> None:
    x, y = related_layers(2, count=2)
    linear = linear_cka_features(x, y, debiased=debiased)
    gaps = [abs(rbf_cka(x, y, bandwidth=s, debiased=debiased) - linear) for s in (0.3, 3, 30, 300)]
    assert gaps[0] > 0.03
    assert gaps[2] < 1e-3
    assert gaps[1] > 10 * gaps[2] > 100 * gaps[3]


def test_minibatch_by_hand() -> None:
    """Sums over batches before the ratio; rows that fill no batch are left out."""
    x, y = related_layers(4, count=2, n=23)
    sums = np.zeros(3)
    for rows in (slice(0, 10), slice(10, 20)):
        a, b = (z[rows] - z[rows].mean(axis=0) for z in (x, y))
        k, m = a @ a.T, b @ b.T

        def term(p: np.ndarray, q: np.ndarray) -> float:
            n, c, e = len(p), np.diag(p), np.diag(q)
            return (p * q).sum() - n / (n - 2) * c @ e + c.sum() * e.sum() / ((n - 1) * (n - 2))

        sums += [term(k, m), term(k, k), term(m, m)]
    expected = sums[0] / np.sqrt(sums[1] * sums[2])
    assert minibatch_cka(x, y, batch=10) == pytest.approx(expected, abs=1e-10)
    full = linear_cka_features(x, y, debiased=True)
    assert minibatch_cka(x, y, batch=23) == pytest.approx(full, abs=1e-12)
    assert minibatch_cka(x, y, batch=23, seed=1) == pytest.approx(full, abs=1e-12)
    shuffled = minibatch_cka(x, y, batch=10, seed=1)
    assert abs(shuffled - expected) > 1e-4
    assert minibatch_cka(x, y, batch=10, seed=1) == shuffled


def test_errors_of_estimators() -> None:
    x = np.random.default_rng(0).normal(size=(8, 3))
    for bad in (x[:6], x[0], x[None]):
        with pytest.raises(InputError, match="the same n"):
            linear_cka_features(x, bad)
    with pytest.raises(InputError, match="at least 4"):
        linear_cka_features(x[:3], x[:3])
    with pytest.raises(InputError, match="at least 4"):
        hsic1(torch.eye(3), torch.eye(3))
    for constant in (np.zeros((8, 3)), np.full((8, 3), 0.1)):
        for call in (linear_cka_features, rbf_cka):
            with pytest.raises(InputError, match="do not vary"):
                call(x, constant)
    unfit = x.copy()
    unfit[1, 1] = np.inf
    with pytest.raises(InputError, match="nan or inf"):
        linear_cka_features(unfit, x)
    for batch in (3, 9):
        with pytest.raises(InputError, match="batch"):
            minibatch_cka(x, x, batch=batch)
    with pytest.raises(InputError, match="bandwidth"):
        rbf_cka(x, x, bandwidth=0)
    mostly_one = np.concatenate([np.ones((7, 3)), np.zeros((1, 3))])
    with pytest.raises(InputError, match="median"):
        rbf_cka(x, mostly_one)


# other packages


@pytest.fixture(scope="module")
def shared() -> torch.Tensor:
    """[L, n, d] centred: two of the packages leave centring to their kernels in the input dtype."""
    features = torch.from_numpy(related_layers(8, count=5, n=60, d=16))
    return features - features.mean(dim=1, keepdim=True)


def test_peer_cka(shared: torch.Tensor) -> None:
    import cka as peer

    theirs = peer.cka_from_features(shared, shared).numpy()
    ours = linear_cka(table_of(shared.numpy(), debiased=True))
    np.testing.assert_allclose(ours.clip(0, 1), theirs, atol=1e-9)  # theirs are clamped


def test_peer_ckatorch(shared: torch.Tensor) -> None:
    peer = pytest.importorskip("ckatorch.core")
    ours = linear_cka(table_of(shared.numpy()))
    np.testing.assert_allclose(ours, pairs_of(peer.cka_base, shared), atol=1e-9)
    x, y = shared[0], shared[3]
    batches = peer.cka_batch(x.view(3, 20, 16), y.view(3, 20, 16))
    assert minibatch_cka(x, y, batch=20) == pytest.approx(float(batches), abs=1e-9)


def test_peer_torch_cka(shared: torch.Tensor) -> None:
    peer = pytest.importorskip("torch_cka")
    size = len(shared)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.ModuleList(torch.nn.Identity() for _ in range(size))

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return [layer(shared[i, index].float()) for i, layer in enumerate(self.layer)][-1]

    names = [f"layer.{i}" for i in range(size)]
    rows = torch.utils.data.TensorDataset(torch.arange(shared.shape[1]))
    loader = torch.utils.data.DataLoader(rows, batch_size=shared.shape[1])
    compared = peer.CKA(Layers(), Layers(), "a", "b", names, names, device="cpu")
    compared.compare(loader)
    ours = linear_cka(table_of(shared.numpy(), debiased=True))
    np.testing.assert_allclose(ours, compared.hsic_matrix.numpy(), atol=1e-5)  # float32 there


def test_peer_repsim(shared: torch.Tensor) -> None:
    peer = pytest.importorskip("repsim")
    features = list(shared.numpy())
    theirs = peer.cka(features, kernel_type="linear", estimator="gretton")
    np.testing.assert_allclose(linear_cka(table_of(shared.numpy())), theirs, atol=1e-8)


# compartments


def blocks(lengths: list[int], inside: float = 0.95, outside: float = 0.3) -> np.ndarray:
    label = np.repeat(np.arange(len(lengths)), lengths)
    cka = np.where(label[:, None] == label, inside, outside)
    np.fill_diagonal(cka, 1)
    return cka


def random_psd(size: int, seed: int) -> np.ndarray:
    """A correlation-like map of random layers."""
    x = np.random.default_rng(seed).normal(size=(size, 1 + seed % 5))
    gram = x @ x.T
    scale = np.sqrt(np.diag(gram))
    return gram / np.outer(scale, scale)


def scatter(cka: np.ndarray, start: int, stop: int) -> float:
    """Squared distances of a segment's layers to their mean, in the map's own feature space."""
    values, vectors = np.linalg.eigh(cka)
    points = (vectors * np.sqrt(values.clip(0)))[start:stop]
    return float(((points - points.mean(axis=0)) ** 2).sum())


def enumerate_segmentations(cka: np.ndarray, segments: int, min_length: int) -> float:
    """Least cost over every way to cut."""
    size, best = len(cka), np.inf
    for cuts in itertools.combinations(range(1, size), segments - 1):
        edges = [0, *cuts, size]
        if min(np.diff(edges)) >= min_length:
            best = min(best, sum(scatter(cka, a, b) for a, b in itertools.pairwise(edges)))
    return best


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 9), seed=st.integers(0, 10**6), min_length=st.integers(1, 3))
def test_dynamic_programme_equals_brute_force(size: int, seed: int, min_length: int) -> None:
    min_length = min(min_length, size)
    cka = random_psd(size, seed)
    found = compartments(cka, min_length=min_length, max_segments=size)
    assert len(found.costs) == size // min_length
    for m, cost in enumerate(found.costs, start=1):
        best = enumerate_segmentations(cka, m, min_length)
        assert cost == pytest.approx(best, abs=1e-9)
        fixed = compartments(cka, segments=m, min_length=min_length)
        assert fixed.cost == pytest.approx(best, abs=1e-9)
        lengths = [b - a for a, b in fixed.segments]
        assert len(lengths) == m
        assert sum(lengths) == size
        assert min(lengths) >= min_length
        assert [a for a, _ in fixed.segments[1:]] == [b for _, b in fixed.segments[:-1]]
        assert fixed.starts == tuple(a for a, _ in fixed.segments[1:])
        direct = sum(scatter(cka, a, b) for a, b in fixed.segments)
        assert direct == pytest.approx(best, abs=1e-9)
    if min_length == 1:
        assert (np.diff(found.costs) <= 1e-9).all()  # a cut never adds scatter
        assert found.costs[-1] == pytest.approx(0, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(size=st.integers(4, 9), seed=st.integers(0, 10**6))
def test_number_is_where_most_is_removed_beyond_the_stationary_map(size: int, seed: int) -> None:
    cka = random_psd(size, seed)
    found = compartments(cka, margin=0.02)
    drift = np.array([[np.diag(cka, abs(i - j)).mean() for j in range(size)] for i in range(size)])
    np.testing.assert_allclose(stationary(cka), drift, atol=1e-12)
    again = compartments(stationary(cka))
    np.testing.assert_allclose(found.drift, again.costs, atol=1e-12)

    def removed(costs: tuple[float, ...], m: int) -> float:  # 0 where there is no scatter at all
        return 1 - costs[m] / costs[0] if costs[0] > 0 else 0.0

    excess = [removed(found.costs, m) - removed(found.drift, m) for m in range(len(found.costs))]
    best = max(excess)
    assert found.evidence == pytest.approx(best if best >= 0.02 else 0, abs=1e-9)
    if best >= 0.02:
        assert excess[len(found.segments) - 1] == pytest.approx(best, abs=1e-9)
    else:
        assert len(found.segments) == 1


@pytest.mark.parametrize("lengths", [[5, 8], [4, 9, 6], [3, 3, 3, 3], [12, 2, 10, 7]])
def test_planted_blocks_are_found(lengths: list[int]) -> None:
    found = compartments(blocks(lengths))
    edges = np.cumsum([0, *lengths])
    assert found.segments == tuple(itertools.pairwise(edges.tolist()))
    assert found.evidence > 0.1
    noisy = blocks(lengths) + 0.02 * random_psd(sum(lengths), 3)
    assert compartments(noisy).segments == found.segments


@pytest.mark.parametrize("size", [6, 13, 31])
@pytest.mark.parametrize("decay", [3.0, 8.0, 40.0])
def test_a_smooth_drift_has_no_compartments(size: int, decay: float) -> None:
    lag = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    for cka in (np.exp(-lag / decay), np.exp(-((lag / decay) ** 2))):
        found = compartments(cka)
        assert found.segments == ((0, size),)
        assert found.evidence == 0
        assert found.starts == ()
        cut = compartments(cka, segments=3)  # and yet cutting it removes much scatter
        assert cut.cost < 0.7 * found.cost
        assert cut.evidence == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kernel", ["exponential", "gaussian", "linear"])
def test_a_drift_at_uneven_speed_has_little_evidence(kernel: str) -> None:
    """The stationary version is a null of one speed: a smooth path that speeds up or slows down
    may be cut, but with far less evidence than weak steps of the same map size have."""
    depth = np.arange(31.0)
    shape = {
        "exponential": lambda lag: np.exp(-lag / 8),
        "gaussian": lambda lag: np.exp(-((lag / 8) ** 2)),
        "linear": lambda lag: 1 - lag / 40,
    }[kernel]
    paths = {
        "accelerating": depth**2 / 30,
        "decelerating": np.sqrt(30 * depth),
        "slow at both ends": 15 * (1 - np.cos(np.pi * depth / 30)),
        "slow in the middle": 15 + (depth - 15) ** 3 / 225,
    }
    steps = compartments(blocks([3, 7, 13, 8], inside=0.95, outside=0.85))
    assert steps.starts == (3, 10, 23)
    found = {
        name: compartments(shape(np.abs(np.subtract.outer(at, at)))) for name, at in paths.items()
    }
    assert max(f.evidence for f in found.values()) < steps.evidence / 2
    assert len(found["slow at both ends"].segments) > 1  # so segments alone are no proof of steps


def test_two_drifting_parts_are_still_two() -> None:
    lag = np.abs(np.subtract.outer(np.arange(20), np.arange(20)))
    cka = np.exp(-lag / 20.0) * blocks([8, 12], inside=1, outside=0.4)
    assert compartments(cka).segments == ((0, 8), (8, 20))


def test_options_and_ties() -> None:
    cka = blocks([1, 5, 6])  # a first compartment of one layer
    assert compartments(cka, min_length=1, segments=3).starts == (1, 6)
    assert compartments(cka, min_length=2, segments=3).starts[0] == 2
    assert compartments(cka, max_segments=2).segments == ((0, 6), (6, 12))
    assert len(compartments(blocks([4, 9, 6]), margin=2).segments) == 1
    flat = compartments(np.ones((7, 7)))  # nothing to remove: fewer segments win the tie
    assert flat.segments == ((0, 7),)
    assert flat.evidence == 0
    assert compartments(np.ones((7, 7)), segments=3).starts == (2, 4)  # the earliest cuts
    assert compartments(np.ones((1, 1)), min_length=1).segments == ((0, 1),)


def test_more_segments_may_cost_more_where_they_must_be_long() -> None:
    costs = compartments(blocks([3, 3, 3], inside=1)).costs
    assert costs[2] == pytest.approx(0, abs=1e-12)
    assert costs[3] > 0.1  # four segments of two layers or more cut through a block


def test_errors_of_compartments() -> None:
    cka = blocks([3, 4])
    missing = cka.copy()
    missing[1, 2] = np.nan
    with pytest.raises(InputError, match="nan"):
        compartments(missing)
    for bad in (cka[:3], cka[0], np.empty((0, 0))):
        with pytest.raises(InputError, match=r"\[L, L\]"):
            compartments(bad)
    for segments in (0, 4):
        with pytest.raises(InputError, match="do not fit"):
            compartments(cka, segments=segments)
    for length in (0, 8):
        with pytest.raises(InputError, match="min_length"):
            compartments(cka, min_length=length)
    with pytest.raises(InputError, match="max_segments"):
        compartments(cka, max_segments=0)
    with pytest.raises(InputError, match="resamples"):
        compartment_stability([])


def test_stability_over_resampled_maps() -> None:
    """One clear change at 5 in all maps, and one at 11 in a quarter of them."""
    rng = np.random.default_rng(0)
    maps = []
    for r in range(20):
        planted = blocks([5, 6, 5]) if r % 4 == 0 else blocks([5, 11])
        noise = rng.normal(size=(16, 16)) * 0.01
        maps.append(planted + noise + noise.T)
    near, numbers = compartment_stability(maps)
    assert near.shape == (16,)
    np.testing.assert_allclose(near[[4, 5, 6]], 1)
    np.testing.assert_allclose(near[[10, 11, 12]], 0.25)
    np.testing.assert_allclose(near[[0, 1, 2, 3, 7, 8, 9, 13, 14, 15]], 0)
    assert numbers == {2: 0.75, 3: 0.25}
    exact, _ = compartment_stability(np.stack(maps), tolerance=0)
    np.testing.assert_allclose(exact, np.isin(np.arange(16), [5]) + 0.25 * (np.arange(16) == 11))
    _, fixed = compartment_stability(maps, segments=4)
    assert fixed == {4: 1.0}


def test_no_compartment_begins_at_the_first_position() -> None:
    """A change at 1 is near 2 and 3 at a tolerance of 2, and near no position before 1."""
    near, numbers = compartment_stability(
        [blocks([1, 7], outside=0.1)], tolerance=2, min_length=1, segments=2
    )
    np.testing.assert_array_equal(near, [0, 1, 1, 1, 0, 0, 0, 0])
    assert numbers == {2: 1.0}


def test_stability_tells_a_drift_from_compartments() -> None:
    rng = np.random.default_rng(1)
    lag = np.abs(np.subtract.outer(np.arange(16), np.arange(16)))
    maps = [np.exp(-lag / 10) + 0.002 * rng.normal(size=(16, 16)) for _ in range(12)]
    near, numbers = compartment_stability([(m + m.T) / 2 for m in maps])
    assert numbers.get(1, 0) > 0.8
    assert near.max() < 0.2
