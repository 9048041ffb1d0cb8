"""The ridge probe against least squares on explicit matrices, and on data with known answers."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from paperlib.errors import InputError
from paperlib.probe import (
    GRID,
    WIDEST,
    Folds,
    ProbeScore,
    best_of,
    correlations,
    greedy_probe,
    relevance_minus_redundancy,
    ridge_probe,
    split_documents,
    token_pairs,
)
from paperlib.selection import Constraints

L, D = 6, 5  # boundaries 0..5, hidden size


@dataclass
class Arrays:
    boundaries: tuple[int, ...]
    num_layers: int
    states: torch.Tensor
    document: np.ndarray
    position: np.ndarray
    token: np.ndarray


def arrays(states: np.ndarray, lengths: list[int], token: np.ndarray | None = None) -> Arrays:
    n = sum(lengths)
    return Arrays(
        tuple(range(len(states))),
        len(states) - 1,
        torch.from_numpy(states),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(m) for m in lengths]),
        np.zeros(n, dtype=int) if token is None else token,
    )


def make(seed: int = 0, noise: float = 0.5, winner: int = 2, documents: int = 15) -> Arrays:
    """Independent states; the final one at t + 1 is linear in boundary ``winner`` at t and in the
    embedding at t + 1, plus noise."""
    rng = np.random.default_rng(seed)
    lengths = [8 + i % 5 for i in range(documents)]
    n = sum(lengths)
    states = rng.standard_normal((L, n, D)) * np.array([0.1, 1, 3, 10, 30, 1])[:, None, None] + 2
    a, b = rng.standard_normal((2, D, D))
    states[-1, 1:] = states[winner, :-1] @ a + states[0, 1:] @ b * 10
    states[-1] = (states[-1] + noise * rng.standard_normal((n, D))) * np.array([1, 2, 3, 4, 5])
    return arrays(states, lengths)


def explicit(source: Arrays, chosen, fold, folds: Folds, embedding=None, projection=None):
    """(X, Y) of a fold, centred and scaled by training statistics, one pair at a time."""
    raw: dict[str, tuple[list, list]] = {}
    for name in ("train", fold):
        inputs, outputs = [], []
        for t in range(len(source.document) - 1):
            if source.document[t] != source.document[t + 1]:
                continue
            if source.document[t] not in getattr(folds, name):
                continue
            states = source.states.numpy()
            last = states[0, t + 1] if embedding is None else embedding[source.token[t + 1]].numpy()
            inputs.append([*(states[b, t] for b in chosen), last])
            outputs.append(states[-1, t + 1])
        raw[name] = np.array(inputs), np.array(outputs)  # [P, k + 1, d], [P, d]
    x_train, y_train = raw["train"]
    mean = x_train.mean(axis=0)
    scale = np.sqrt(((x_train - mean) ** 2).mean(axis=(0, 2)))
    x = (raw[fold][0] - mean) / scale[:, None]
    x = x if projection is None else x @ projection
    return x.reshape(len(x), -1), raw[fold][1] - y_train.mean(axis=0), y_train.var(axis=0)


def naive_r2(source, chosen, ridge, fold, folds, weighted=True, **options) -> float:
    x, y, variance = explicit(source, chosen, "train", folds, **options)
    a, b = x.T @ x / len(x), x.T @ y / len(x)
    w = np.linalg.solve(a + ridge * np.trace(a) / len(a) * np.eye(len(a)), b)
    x, y, _ = explicit(source, chosen, fold, folds, **options)
    weight = 1 / variance if weighted else np.ones(len(variance))
    return 1 - (((y - x @ w) ** 2) @ weight).sum() / ((y**2) @ weight).sum()


@pytest.mark.parametrize("chosen", [(), (2,), (1, 4), (0, 2, 5)])
@pytest.mark.parametrize("project", [None, 3])
def test_equals_ridge_by_direct_solves(chosen, project):
    source = make()
    probe = ridge_probe(source, project=project, block=7, progress=False)
    options = {"projection": None if project is None else probe.projection.numpy()}
    fit = probe.fit(chosen)
    expected = [
        naive_r2(source, chosen, ridge, "validation", probe.folds, **options) for ridge in fit.grid
    ]
    np.testing.assert_allclose(fit.path, expected, rtol=1e-9, atol=1e-9)
    assert fit.r2 == max(fit.path)
    assert fit.ridge == fit.grid[np.argmax(expected)]
    score = probe.score(chosen)
    found = [score.r2, score.r2_raw, 1 - score.errors.sum() / score.totals.sum()]
    test = [
        naive_r2(source, chosen, fit.ridge, "test", probe.folds, weighted, **options)
        for weighted in (True, False, True)
    ]
    np.testing.assert_allclose(found, test, rtol=1e-9, atol=1e-9)
    assert score.validation_r2 == fit.r2
    assert len(score.errors) == len(probe.folds.test)
    assert score.interval[0] <= score.r2 <= score.interval[1]


def test_the_projection_is_orthogonal_seeded_and_harmless_when_square():
    source = make()
    probe = ridge_probe(source, project=3, seed=4, progress=False)
    np.testing.assert_allclose(probe.projection.T @ probe.projection, np.eye(3), atol=1e-12)
    again = ridge_probe(source, project=3, seed=4, progress=False)
    torch.testing.assert_close(probe.projection, again.projection)
    square = ridge_probe(source, project=D, progress=False)
    plain = ridge_probe(source, progress=False)
    assert square.score((1, 3)).r2 == pytest.approx(plain.score((1, 3)).r2, rel=1e-9)


@pytest.mark.parametrize("winner", [1, 3, 4])
def test_the_boundary_that_holds_the_answer_wins(winner):
    source = make(winner=winner, noise=0.1, documents=40)
    probe = ridge_probe(source, progress=False)
    limits = Constraints(allowed=(0, 1, 2, 3, 4))
    assert greedy_probe(probe, 1, constraints=limits).layers.boundaries == (winner,)
    found = greedy_probe(probe, 2, constraints=limits)
    assert found.trace[0][0] == winner
    assert found.score == probe.validation_r2(found.layers.boundaries)
    scores = {b: probe.score((b,)).r2 for b in range(5)}
    assert scores[winner] > 0.95
    assert max(s for b, s in scores.items() if b != winner) < 0.8
    candidates = [(0, 1, 2), (2, 3, 4), (0, 1, 4)]
    best = best_of(probe, candidates)
    assert candidates[best] == max(candidates, key=probe.validation_r2)
    assert relevance_minus_redundancy(probe, 1, constraints=limits).layers.boundaries == (winner,)
    with pytest.raises(InputError, match="candidate"):
        best_of(probe, [])


def test_the_embedding_counts_and_may_come_from_a_matrix():
    """Final state = embedding row of its own token: the set does not matter, the matrix does."""
    rng = np.random.default_rng(3)
    lengths = [12] * 12
    token = rng.integers(0, 9, sum(lengths))
    embedding = torch.from_numpy(rng.standard_normal((9, D)))
    states = rng.standard_normal((L, sum(lengths), D))
    states[-1] = embedding[token].numpy() * 4 + 1
    source = arrays(states, lengths, token)
    given = ridge_probe(source, embedding=embedding, progress=False)
    assert given.score(()).r2 == pytest.approx(1, abs=1e-6)
    assert ridge_probe(source, progress=False).score(()).r2 < 0.2
    fit = given.fit((2,))
    assert fit.r2 == pytest.approx(
        naive_r2(source, (2,), fit.ridge, "validation", given.folds, embedding=embedding)
    )


def test_scale_of_a_boundary_does_not_matter():
    source = make()
    plain = ridge_probe(source, progress=False).score((1, 3))
    source.states[3] *= 1000
    source.states[1] -= 5
    assert ridge_probe(source, progress=False).score((1, 3)).r2 == pytest.approx(plain.r2, rel=1e-8)


def test_held_out_documents_are_never_seen():
    source = make()
    before = ridge_probe(source, progress=False)
    fits = [before.fit(s) for s in [(1,), (2, 3)]]
    coefficients, score = before.coefficients((2, 3)), before.score((2, 3)).r2
    held = np.isin(source.document, before.folds.test)
    source.states[:, held] += 100 * torch.randn(L, int(held.sum()), D, dtype=torch.float64)
    after = ridge_probe(source, folds=before.folds, progress=False)
    for fit, s in zip(fits, [(1,), (2, 3)], strict=True):
        np.testing.assert_array_equal(after.fit(s).path, fit.path)
    torch.testing.assert_close(after.coefficients((2, 3)), coefficients, rtol=0, atol=0)
    assert abs(after.score((2, 3)).r2 - score) > 0.5
    # validation documents choose the regulariser and nothing else
    held = np.isin(source.document, before.folds.validation)
    source.states[:, held] += 100
    moved = ridge_probe(source, folds=before.folds, progress=False)
    for name in ("mean", "scale", "target_mean", "target_variance"):
        torch.testing.assert_close(getattr(moved, name), getattr(after, name), rtol=0, atol=0)
    torch.testing.assert_close(moved.inputs["train"], after.inputs["train"], rtol=0, atol=0)
    assert moved.fit((2, 3)).r2 != pytest.approx(fits[1].r2)


def test_the_best_regulariser_is_inside_the_range_or_said_to_be_at_its_edge():
    noisy = ridge_probe(make(noise=30.0), progress=False).fit((1, 2, 3))
    assert not noisy.at_edge
    assert noisy.grid[0] < noisy.ridge < noisy.grid[-1]
    # nothing to predict: the more shrinkage the better, so the grid grows to its limit
    rng = np.random.default_rng(5)
    states = rng.standard_normal((L, 30, D))
    none = ridge_probe(arrays(states, [10, 10, 10]), progress=False).fit((1, 2, 3))
    assert none.grid[-1] > 10 ** GRID[-1]
    # noise-free: the less shrinkage the better
    exact = ridge_probe(make(noise=0.0), progress=False).fit((2,))
    assert exact.at_edge
    assert exact.ridge == pytest.approx(10 ** WIDEST[0])


def test_agreement_through_the_lm_head():
    rng = np.random.default_rng(6)
    head = torch.from_numpy(rng.standard_normal((40, D))).float()
    probe = ridge_probe(make(noise=0.0), progress=False)

    def logits(states):
        return (states - probe.target_mean.float()) @ head.T

    assert probe.agreement((2,), logits) == 1.0
    poor = probe.agreement((3,), logits)
    rows = probe.rows["test"]
    predicted = logits(probe.predict((3,), rows).float()).argmax(dim=1)
    true = logits(probe.source.states[-1][rows + 1].float()).argmax(dim=1)
    assert poor == pytest.approx(float((predicted == true).float().mean()))
    assert 0 < poor < 0.9
    assert probe.agreement((3,), logits, sample=1) in (0, 1)


def test_relevance_and_redundancy_are_cka_on_training_pairs():
    source = make(noise=2.0)
    probe = ridge_probe(source, progress=False)
    rows = probe.rows["train"]
    states = source.states.numpy()

    def cka(x, y):
        x, y = x - x.mean(axis=0), y - y.mean(axis=0)
        return np.linalg.norm(x.T @ y) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))

    relevance = [cka(states[b, rows], states[-1, rows + 1]) for b in range(L)]
    redundancy = [[cka(states[a, rows], states[b, rows]) for b in range(L)] for a in range(L)]
    np.testing.assert_allclose(probe.relevance(), relevance, rtol=1e-9)
    np.testing.assert_allclose(probe.redundancy(), redundancy, rtol=1e-9)

    def value(s):
        pairs = list(itertools.combinations(s, 2))
        return np.mean([relevance[b] for b in s]) - 0.7 * np.mean(
            [redundancy[a][b] for a, b in pairs]
        )

    best = max(itertools.combinations(range(L), 3), key=value)
    found = relevance_minus_redundancy(probe, 3, weight=0.7)
    assert found.layers.boundaries == best
    assert found.score == pytest.approx(value(best))


def test_blocks_and_storage_do_not_change_the_answer():
    source = make()
    one = ridge_probe(source, block=10_000, progress=False).score((1, 2)).r2
    assert ridge_probe(source, block=3, progress=False).score((1, 2)).r2 == pytest.approx(
        one, rel=1e-9
    )
    single = ridge_probe(source, storage=torch.float32, progress=False)
    assert single.inputs["train"].dtype == torch.float32
    assert single.score((1, 2)).r2 == pytest.approx(one, rel=1e-4)


def test_constant_features_of_the_target_count_for_nothing():
    source = make()
    source.states[-1, :, 0] = 7.0
    score = ridge_probe(source, progress=False).score((2,))
    assert np.isfinite([score.r2, score.r2_raw, *score.interval]).all()


def test_token_pairs():
    document = np.array([0, 0, 0, 1, 1, 1, 2])
    position = np.array([0, 1, 2, 0, 1, 3, 0])  # a gap in document 1
    np.testing.assert_array_equal(token_pairs(document, position), [0, 1, 3])
    usable = np.array([False, True, True, True, True, True, True])
    np.testing.assert_array_equal(token_pairs(document, position, usable), [1, 3])


def test_splits_are_seeded_disjoint_and_complete():
    document = np.repeat(np.arange(20), 3)
    folds = split_documents(document, seed=1)
    assert sorted(folds.train + folds.validation + folds.test) == list(range(20))
    assert (len(folds.train), len(folds.validation), len(folds.test)) == (12, 4, 4)
    assert split_documents(document, seed=1) == folds
    assert split_documents(document, seed=2) != folds
    with pytest.raises(InputError, match="at least 3 documents"):
        split_documents(np.array([0, 0, 1]))
    with pytest.raises(InputError, match="leave none"):
        split_documents(document, validation=0.6, test=0.5)
    with pytest.raises(InputError, match="disjoint"):
        Folds((0, 1), (1,), (2,))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"num_layers": 9}, {}, "predicts boundary 9"),
        ({"boundaries": (1, 2, 3, 4, 5, 6), "num_layers": 6}, {}, "capture boundary 0"),
        ({}, {"project": 6}, "project = 6"),
        ({}, {"max_bytes": 1000}, "pass project="),
        ({}, {"usable": np.zeros(150, dtype=bool)}, "0 token pairs"),
        ({}, {"usable": np.zeros(7, dtype=bool)}, "one entry per token"),
    ],
)
def test_bad_input(change, options, message):
    source = make()
    for name, value in change.items():
        setattr(source, name, value)
    with pytest.raises(InputError, match=message):
        ridge_probe(source, progress=False, **options)


def test_unknown_boundaries():
    probe = ridge_probe(make(), progress=False)
    with pytest.raises(InputError, match=r"\[7\] were not captured"):
        probe.fit((2, 7))


def fake_scores(r2: np.ndarray, documents: int = 10, noise: float = 0.0) -> list[ProbeScore]:
    rng = np.random.default_rng(0)
    scores = []
    for i, value in enumerate(r2):
        totals = np.full(documents, 10.0)
        errors = 10 * (1 - value) + noise * rng.standard_normal(documents)
        scores.append(
            ProbeScore(
                (i % 7, 7 + i % 3),
                value,
                value,
                (0, 1),
                value,
                1.0,
                False,
                errors + 0 * totals,
                totals,
            )
        )
    return scores


def test_correlations_and_the_trivial_criteria_beside_them():
    rng = np.random.default_rng(1)
    r2 = rng.uniform(0, 1, 25)
    scores = fake_scores(r2)
    other = np.round(rng.uniform(0, 1, 25), 1)  # with ties
    found = {
        c.criterion: c for c in correlations(scores, {"up": r2**3, "down": -r2, "other": other})
    }
    assert list(found) == ["up", "down", "other", "mean depth", "deepest boundary"]
    assert found["up"].rho == pytest.approx(1)
    assert found["up"].interval == pytest.approx((1, 1))
    assert found["down"].rho == pytest.approx(-1)
    depths = {
        "other": other,
        "mean depth": [(i % 7 + 7 + i % 3) / 2 for i in range(25)],
        "deepest boundary": [7 + i % 3 for i in range(25)],
    }
    for name, values in depths.items():
        assert found[name].rho == pytest.approx(spearmanr(values, r2).statistic)
        low, high = found[name].interval
        assert -1 <= low < found[name].rho < high <= 1
    noisy = correlations(fake_scores(r2, noise=3.0), {"up": r2})[0]
    assert noisy.interval[1] - noisy.interval[0] > 0.01
    assert np.isnan(correlations(scores, {"flat": np.ones(25)})[0].rho)
    with pytest.raises(InputError, match="24 values for 25 sets"):
        correlations(scores, {"short": r2[1:]})
    with pytest.raises(InputError, match="at least 3"):
        correlations(scores[:2], {})
