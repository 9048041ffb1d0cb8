"""Centred kernel alignment between boundaries, and the compartments that it reveals.

CKA (Kornblith et al. 2019) is the cosine of two centred Gram matrices. The biased one is a
V-statistic: at n tokens and participation ratios g it does not fall below about
1 / sqrt((1 + n/g1)(1 + n/g2)) even for independent layers. The debiased one replaces each inner
product by HSIC_1 (Song et al. 2012); it may be negative and is never clamped.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paperlib.errors import InputError
from paperlib.gram import GramTable


def linear_cka(table: GramTable) -> np.ndarray:
    """[L, L] linear CKA; biased or debiased, centred or not, as the table is."""
    squared = np.diag(table.inner)
    scale = np.sqrt(np.where(squared > 0, squared, np.nan))
    return table.inner / np.outer(scale, scale)


# on features, pair by pair: for other kernels, and as references


def linear_cka_features(
    x: Tensor | np.ndarray, y: Tensor | np.ndarray, *, debiased: bool = False
) -> float:
    """Linear CKA of features [n, d_x] and [n, d_y], from n x n Grams in float64."""
    x, y = _centre(x, y)
    return gram_cka(x @ x.T, y @ y.T, debiased=debiased)


def rbf_cka(
    x: Tensor | np.ndarray,
    y: Tensor | np.ndarray,
    *,
    bandwidth: float = 1.0,
    debiased: bool = False,
) -> float:
    """CKA with Gaussian kernels exp(-|a - b|^2 / (2 s^2)).

    bandwidth: s in units of the median distance of each input's rows. Large ones approach linear
    CKA (Alvarez 2022).
    """
    if not bandwidth > 0:
        raise InputError(f"bandwidth {bandwidth} must be positive (times the median distance)")
    kernels = []
    for z in _centre(x, y):
        squared = torch.cdist(z, z).square()
        off = squared[~torch.eye(len(z), dtype=torch.bool)]
        median = off.median()
        if not median > 0:
            raise InputError("more than half of the rows are equal: the median distance is zero")
        # less the constant 1, which centring takes off: no cancellation at large bandwidths
        kernels.append(torch.expm1(-squared / (2 * bandwidth**2 * median)))
    return gram_cka(*kernels, debiased=debiased)


def minibatch_cka(
    x: Tensor | np.ndarray, y: Tensor | np.ndarray, *, batch: int, seed: int | None = None
) -> float:
    """Minibatch CKA (Nguyen et al. 2021): sums of HSIC_1 over batches, the ratio at the end.

    For comparison: it is not the debiased CKA of all rows. seed: shuffle rows first; the last
    rows that fill no batch are left out.
    """
    x, y = _centre(x, y)
    if batch < 4 or batch > len(x):
        raise InputError(f"batch {batch} must lie in 4..{len(x)} (the rows)")
    if seed is not None:
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(x)))
        x, y = x[order], y[order]
    sums = np.zeros(3)
    for start in range(0, len(x) - batch + 1, batch):
        a, b = x[start : start + batch], y[start : start + batch]
        k, m = a @ a.T, b @ b.T
        sums += [hsic1(k, m), hsic1(k, k), hsic1(m, m)]
    return float(sums[0] / np.sqrt(sums[1] * sums[2]))


def gram_cka(k: Tensor, m: Tensor, *, debiased: bool = False) -> float:
    """CKA of two n x n kernel matrices."""
    if debiased:
        return float(hsic1(k, m) / np.sqrt(hsic1(k, k) * hsic1(m, m)))
    k, m = (z - z.mean(dim=0) - z.mean(dim=1, keepdim=True) + z.mean() for z in (k, m))
    return float((k * m).sum() / (k.norm() * m.norm()))


def hsic1(k: Tensor, m: Tensor) -> float:
    """Unbiased HSIC of two kernel matrices (Song et al. 2012, eq. 5); n >= 4."""
    n = len(k)
    if n < 4:
        raise InputError(f"debiased CKA needs at least 4 rows, got {n}")
    k, m = k - torch.diag(k.diagonal()), m - torch.diag(m.diagonal())
    a, b = k.sum(dim=0), m.sum(dim=0)
    total = (k * m).sum() + a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 * (a @ b) / (n - 2)
    return float(total / (n * (n - 3)))


def _centre(x: Any, y: Any) -> tuple[Tensor, Tensor]:
    x, y = torch.as_tensor(x).double(), torch.as_tensor(y).double()
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise InputError(
            f"features have shapes {tuple(x.shape)} and {tuple(y.shape)}, expected [n, d] with "
            "the same n"
        )
    if len(x) < 4:
        raise InputError(f"CKA needs at least 4 rows, got {len(x)}")
    moved = []
    for z in (x, y):
        if not torch.isfinite(z).all():
            raise InputError("the features hold nan or inf: check the states (dtype overflow?)")
        moved.append(z - z.mean(dim=0))
        if not moved[-1].norm() > 1e-14 * z.norm():  # rounding of the mean is not variation
            raise InputError("the features do not vary: CKA with them is not defined")
    return moved[0], moved[1]


# compartments


@dataclass(frozen=True)
class Compartments:
    """A contiguous segmentation of the layer axis.

    segments: half-open ranges (start, stop) of positions. cost: within-segment scatter, the sum
    over segments of sum_i C_ii - (1/m) sum_ij C_ij. costs: the least cost for 1, 2, ... segments.
    drift: the same for the map's own stationary version (mean of each diagonal), in which CKA
    depends on distance alone and no place is a boundary. evidence: how much more of the scatter
    the chosen segmentation removes from the map than from its stationary version, in [-1, 1].
    """

    segments: tuple[tuple[int, int], ...]
    cost: float
    costs: tuple[float, ...]
    drift: tuple[float, ...]
    evidence: float

    @property
    def starts(self) -> tuple[int, ...]:
        """Positions at which a new compartment begins (not the first)."""
        return tuple(start for start, _ in self.segments[1:])


def compartments(
    cka: np.ndarray,
    *,
    segments: int | None = None,
    max_segments: int = 8,
    min_length: int = 2,
    margin: float = 0.02,
) -> Compartments:
    """The segmentation of a CKA map [L, L] into contiguous compartments, exact.

    CKA is a kernel between layers, so the cost is that of kernel change-point detection (Harchaoui
    and Cappe 2007): the scatter of the layers about their segment's mean in feature space,
    minimised by dynamic programming. ``segments`` fixes their number. Otherwise it is the number m
    at which the share of the scatter removed exceeds by most what m segments remove from the map's
    stationary version (any segmentation also cuts a smooth drift well, which should not count); if
    that excess is below ``margin``, one: no compartments. Fewer segments win ties.
    """
    cka = _map(cka)
    size = len(cka)
    if min_length < 1 or size < min_length:
        raise InputError(f"min_length {min_length} must lie in 1..{size} (the boundaries)")
    if max_segments < 1:
        raise InputError(f"max_segments {max_segments} must be at least 1")
    most = min(max_segments if segments is None else segments, size // min_length)
    if segments is not None and not 1 <= segments <= size // min_length:
        raise InputError(
            f"{segments} segments of at least {min_length} do not fit {size} boundaries"
        )
    costs, cuts = _best_segmentations(cka, most, min_length)
    drift, _ = _best_segmentations(stationary(cka), most, min_length)
    excess = [
        _removed(costs, m) - _removed(drift, m) for m in range(1, most + 1)
    ]  # excess[0] is 0: one segment removes nothing
    chosen = int(np.argmax(excess)) + 1 if segments is None else segments
    if segments is None and excess[chosen - 1] < margin:
        chosen = 1
    edges = [0, *cuts[chosen - 1], size]
    return Compartments(
        segments=tuple(itertools.pairwise(edges)),
        cost=costs[chosen - 1],
        costs=tuple(costs),
        drift=tuple(drift),
        evidence=float(excess[chosen - 1]),
    )


def stationary(cka: np.ndarray) -> np.ndarray:
    """[L, L] the map in which CKA depends on the distance between boundaries alone."""
    size = len(cka)
    means = [np.nanmean(np.diagonal(cka, lag)) for lag in range(size)]
    lags = np.abs(np.subtract.outer(np.arange(size), np.arange(size)))
    return np.array(means)[lags]


def compartment_stability(
    maps: Sequence[np.ndarray] | np.ndarray, *, tolerance: int = 1, **options: Any
) -> tuple[np.ndarray, dict[int, float]]:
    """Over CKA maps [R, L, L] of resamples: how often a compartment begins within ``tolerance`` of
    each position, [L], and how often each number of segments is chosen. options: of
    ``compartments``."""
    if not len(maps):
        raise InputError("no resampled maps: ask the Gram pass for resamples > 0")
    size = len(maps[0])
    near = np.zeros(size)
    numbers: dict[int, int] = {}
    for cka in maps:
        found = compartments(cka, **options)
        numbers[len(found.segments)] = numbers.get(len(found.segments), 0) + 1
        hit = np.zeros(size, dtype=bool)
        for start in found.starts:
            hit[max(1, start - tolerance) : start + tolerance + 1] = True
        near += hit
    return near / len(maps), {m: numbers[m] / len(maps) for m in sorted(numbers)}


def _map(cka: np.ndarray) -> np.ndarray:
    cka = np.asarray(cka, dtype=np.float64)
    if cka.ndim != 2 or cka.shape[0] != cka.shape[1] or not len(cka):
        raise InputError(f"the CKA map has shape {cka.shape}, expected [L, L]")
    if not np.isfinite(cka).all():
        raise InputError("the CKA map holds nan: some boundary's states do not vary")
    return cka


def _removed(costs: Sequence[float], segments: int) -> float:
    """Share of the one-segment scatter that the best segmentation removes."""
    return 1 - costs[segments - 1] / costs[0] if costs[0] > 0 else 0.0


def _best_segmentations(
    cka: np.ndarray, most: int, min_length: int
) -> tuple[list[float], list[list[int]]]:
    """Least cost and its cuts, for 1..most segments, by dynamic programming."""
    size = len(cka)
    integral = np.zeros((size + 1, size + 1))
    integral[1:, 1:] = cka.cumsum(axis=0).cumsum(axis=1)
    diagonal = np.concatenate([[0], np.diag(cka).cumsum()])

    def cost(a: int, b: int) -> float:
        block = integral[b, b] - integral[a, b] - integral[b, a] + integral[a, a]
        return diagonal[b] - diagonal[a] - block / (b - a)

    best = np.full((most + 1, size + 1), np.inf)
    previous = np.zeros((most + 1, size + 1), dtype=int)
    best[0, 0] = 0
    for m in range(1, most + 1):
        for stop in range(m * min_length, size + 1):
            for start in range((m - 1) * min_length, stop - min_length + 1):
                value = best[m - 1, start] + cost(start, stop)
                if value < best[m, stop] - 1e-12:
                    best[m, stop], previous[m, stop] = value, start
    costs, cuts = [], []
    for m in range(1, most + 1):
        places, stop = [], size
        for step in range(m, 1, -1):
            stop = int(previous[step, stop])
            places.append(stop)
        costs.append(float(best[m, size]))
        cuts.append(places[::-1])
    return costs, cuts
