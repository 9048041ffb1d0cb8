"""Spectra against plain eigen-decompositions of literally selected and repeated rows."""

import numpy as np
import pytest

from paperlib.errors import InputError
from paperlib.gram import bootstrap_weights
from paperlib.spectra import Spectra, spectra
from tests.states import states_from


def naive(x: np.ndarray, centred: bool) -> np.ndarray:
    x = x - x.mean(axis=0) if centred else x
    values = np.linalg.svd(x, compute_uv=False) ** 2
    return values / values.sum()


def von_neumann(values: np.ndarray) -> float:
    values = values[values > 1e-14]
    return float(-(values * np.log(values)).sum())


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("shape", [(60, 7), (20, 30)])
def test_nested_masks(centred, shape) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(2, *shape)) * np.linspace(1, 3, shape[1]) + 4
    level = rng.integers(-1, 3, shape[0])
    level[:3] = 0
    found = spectra(
        states_from(features), level, levels=("a", "b", "c"), centred=centred, progress=False
    )
    for q in range(3):
        mask = (level >= 0) & (level <= q)
        assert found.tokens[q] == mask.sum()
        for i in range(2):
            expected = naive(features[i][mask], centred)
            np.testing.assert_allclose(
                found.eigenvalues[q, i][: len(expected)], expected, atol=1e-12
            )
            assert found.s1[q, 0, i] == pytest.approx(von_neumann(expected), abs=1e-9)


def test_resamples_are_those_of_repeated_rows() -> None:
    rng = np.random.default_rng(1)
    document = np.repeat(np.arange(6), 10)
    features = rng.normal(size=(2, 60, 5)) + 2
    found = spectra(states_from(features, document), resamples=20, seed=3, progress=False)
    weights = bootstrap_weights(6, 20, 3)
    for r in range(21):
        rows = np.repeat(features, weights[r][document].astype(int), axis=1)
        for i in range(2):
            expected = von_neumann(naive(rows[i], True))
            assert found.s1[0, r, i] == pytest.approx(expected, abs=1e-9)


def test_saved_and_loaded(tmp_path) -> None:
    features = np.random.default_rng(2).normal(size=(2, 30, 4))
    found = spectra(states_from(features), progress=False)
    found.save(tmp_path / "s.npz")
    back = Spectra.load(tmp_path / "s.npz")
    assert (back.boundaries, back.levels) == (found.boundaries, found.levels)
    np.testing.assert_array_equal(back.eigenvalues, found.eigenvalues)
    np.testing.assert_array_equal(back.s1, found.s1)
    (tmp_path / "t.npz").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a file of spectra"):
        Spectra.load(tmp_path / "t.npz")


def test_too_few_tokens() -> None:
    states = states_from(np.zeros((1, 5, 2)))
    with pytest.raises(InputError, match="fewer than 2"):
        spectra(states, np.array([0, -1, -1, -1, -1]), progress=False)
