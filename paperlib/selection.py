"""Which boundaries to feed to the draft head: criteria, searches, baselines, uncertainty.

A *criterion* turns a ``GramTable`` into a function from many sets at once to their scores (bigger
is better); a *search* (exhaustive or greedy) finds a set of k boundaries. Each method below is a
pair of both with a name. With trace-normalised Grams the collision entropy of a concatenation is

    S_2(S) = -log( (1/k^2) [ sum_i p_i + 2 sum_{i<j} sqrt(p_i p_j) CKA_ij ] ),

exact for every set from the L x L table, so nothing here touches hidden states except the
order-1 methods, which need eigenvalues.

Ties go to the lexicographically smallest set (exhaustive) or the lowest boundary (greedy); scores
within a relative 1e-12 are ties. Entropies are in nats.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paperlib.boundaries import LayerSet, default_boundaries, dflash_boundaries
from paperlib.errors import InputError
from paperlib.gram import GramTable

Score = Callable[[np.ndarray], np.ndarray]  # [M, k] ascending positions in the table -> [M]
Criterion = Callable[[GramTable], Score]
Gains = Callable[[list[int], list[int]], np.ndarray]  # chosen, candidates [C] -> [C]

TIE = 1e-12
MAX_SETS = 30_000_000  # what an exhaustive search may visit: about a minute
CHUNK = 1 << 16  # sets that are scored at once


@dataclass(frozen=True)
class Constraints:
    """What may be chosen: boundaries, their least distance, and N (default: the last boundary)."""

    allowed: tuple[int, ...] | None = None
    min_gap: int = 1
    num_layers: int | None = None


FREE = Constraints()


@dataclass(frozen=True)
class Selection:
    """A chosen set, its score (bigger is better; comparable within one method), how it came about.

    trace: for greedy searches, boundaries in the order chosen with the score after each step.
    """

    layers: LayerSet
    score: float
    method: str
    trace: tuple[tuple[int, float], ...] = ()


# ---------------------------------------------------------------- criteria


def s2(table: GramTable, *, weights: str = "equal") -> Score:
    """Collision entropy of the concatenation.

    weights: "equal": every boundary scaled to trace 1; "raw": as they are, weighted by trace.
    """
    if weights not in ("equal", "raw"):
        raise InputError(f"weights {weights!r} is neither 'equal' nor 'raw'")
    _purity(table)
    matrix = table.normalised if weights == "equal" else table.inner

    def score(sets: np.ndarray) -> np.ndarray:
        numerator = np.diag(matrix)[sets].sum(axis=1) + 2 * _pair_sum(matrix, sets)
        total = table.trace[sets].sum(axis=1) if weights == "raw" else sets.shape[1]
        # debiased sums of a noisy table can fall to zero or below: such sets are not comparable
        purity = numerator / total**2
        return -np.log(np.where(purity > 0, purity, np.inf))

    return score


def mean_entropy(table: GramTable) -> Score:
    """Mean collision entropy of the boundaries, each alone: informativeness without redundancy."""
    entropy = -np.log(_purity(table))
    return lambda sets: entropy[sets].mean(axis=1)


def negative_mean_cka(table: GramTable) -> Score:
    """Minus the mean CKA of all pairs; 0 for a single boundary."""
    cka = _cka(table)
    return lambda sets: -_pair_mean(cka, sets)


def mrmr_difference_of(table: GramTable, weight: float = 1.0) -> Score:
    """Mean S_2 of the boundaries minus ``weight`` (nats per unit of CKA) times mean pair CKA."""
    entropy, cka = -np.log(_purity(table)), _cka(table)
    return lambda sets: entropy[sets].mean(axis=1) - weight * _pair_mean(cka, sets)


def mrmr_quotient_of(table: GramTable, floor: float = 1e-3) -> Score:
    """Mean S_2 of the boundaries over mean pair CKA; a single boundary counts as redundancy 1.

    floor: least redundancy, since a debiased CKA may be zero or negative.
    """
    entropy, cka = -np.log(_purity(table)), _cka(table)

    def score(sets: np.ndarray) -> np.ndarray:
        redundancy = _pair_mean(cka, sets) if sets.shape[1] > 1 else np.ones(len(sets))
        return entropy[sets].mean(axis=1) / np.maximum(redundancy, floor)

    return score


def dpp_of(table: GramTable) -> Score:
    """log det of diag(q) CKA diag(q) on the set, with quality q_i = exp(S_2(i) / 2).

    It equals sum_i S_2(i) + log det CKA_S. CKA, debiased or not, is a Gram matrix, so the kernel
    is positive semidefinite; -inf where the determinant is not positive.
    """
    entropy, cka = -np.log(_purity(table)), _cka(table)

    def score(sets: np.ndarray) -> np.ndarray:
        sign, logarithm = np.linalg.slogdet(cka[sets[:, :, None], sets[:, None, :]])
        return np.where(sign > 0, entropy[sets].sum(axis=1) + logarithm, -np.inf)

    return score


CRITERIA: Mapping[str, Criterion] = {
    "s2": s2,
    "entropy": mean_entropy,
    "cka": negative_mean_cka,
    "mrmr-difference": mrmr_difference_of,
    "mrmr-quotient": mrmr_quotient_of,
    "dpp": dpp_of,
}


# ---------------------------------------------------------------- methods on the table


def top_k_entropy(table: GramTable, k: int, *, constraints: Constraints = FREE) -> Selection:
    """The k boundaries of largest collision entropy, redundancy ignored."""
    return exhaustive(
        mean_entropy(table), table.boundaries, k, constraints=constraints, method="entropy"
    )


def min_mean_cka(table: GramTable, k: int, *, constraints: Constraints = FREE) -> Selection:
    """The least redundant set: smallest mean CKA over its pairs, exact.

    With k = 1 there is no pair, so every boundary ties and the lowest allowed one is returned.
    """
    return exhaustive(
        negative_mean_cka(table), table.boundaries, k, constraints=constraints, method="cka"
    )


def exhaustive_s2(
    table: GramTable, k: int, *, constraints: Constraints = FREE, weights: str = "equal"
) -> Selection:
    """The set of largest concatenation entropy S_2, exact."""
    score = s2(table, weights=weights)
    return exhaustive(score, table.boundaries, k, constraints=constraints, method="s2")


def greedy_s2(
    table: GramTable, k: int, *, constraints: Constraints = FREE, weights: str = "equal"
) -> Selection:
    """Boundaries added one by one, each the best for S_2 of the concatenation."""
    return _greedy(
        _from_score(s2(table, weights=weights)), table.boundaries, k, constraints, "s2-greedy"
    )


def mrmr_difference(
    table: GramTable,
    k: int,
    *,
    constraints: Constraints = FREE,
    weight: float = 1.0,
    greedy: bool = False,
) -> Selection:
    """Mean entropy minus ``weight`` x mean CKA, over whole sets; exact unless ``greedy``."""
    score = mrmr_difference_of(table, weight)
    return _search(score, table, k, constraints, "mrmr-difference", greedy)


def mrmr_quotient(
    table: GramTable, k: int, *, constraints: Constraints = FREE, greedy: bool = False
) -> Selection:
    """Mean entropy over mean CKA, over whole sets; exact unless ``greedy``. No guarantee."""
    return _search(mrmr_quotient_of(table), table, k, constraints, "mrmr-quotient", greedy)


def dpp_map(
    table: GramTable, k: int, *, constraints: Constraints = FREE, greedy: bool = False
) -> Selection:
    """The most probable k-set of the determinantal point process of ``dpp_of``."""
    return _search(dpp_of(table), table, k, constraints, "dpp", greedy)


def one_per_compartment(
    table: GramTable,
    segments: Sequence[tuple[int, int]],
    *,
    constraints: Constraints = FREE,
    criterion: Criterion = s2,
) -> Selection:
    """One boundary from each compartment, jointly best for ``criterion``, exact.

    segments: half-open ranges (start, stop) of positions in the table, ascending and disjoint.
    """
    segments = [(int(a), int(b)) for a, b in segments]
    edges = [0, *(e for segment in segments for e in segment), len(table.boundaries)]
    if not segments or edges != sorted(edges) or any(a == b for a, b in segments):
        raise InputError(
            f"compartments {segments} must be ascending, disjoint, non-empty ranges (start, stop) "
            f"within 0..{len(table.boundaries)}"
        )
    allowed = set(_positions(table.boundaries, constraints))
    pools = [[p for p in range(a, b) if p in allowed] for a, b in segments]
    if not all(pools):
        raise InputError(
            f"compartments {segments}: at least one holds no allowed boundary; allow more"
        )
    _affordable(int(np.prod([len(pool) for pool in pools], dtype=float)))
    blocks = _blocks(itertools.product(*pools), len(pools))
    blocks = _with_gap(blocks, table.boundaries, constraints)
    return _first_best(
        criterion(table), blocks, table.boundaries, constraints, "one-per-compartment"
    )


def loes(
    table: GramTable,
    k: int,
    *,
    constraints: Constraints = FREE,
    uncentred: GramTable | None = None,
    alpha: float = 1.0,
    gamma: float = 0.5,
) -> Selection:
    """Label-free LOES (arXiv 2605.23033), from Gram tables alone, greedy.

    A step takes the boundary of largest alpha * isotropy - gamma * (largest redundancy with those
    chosen). Isotropy is mean over standard deviation of the d covariance eigenvalues,
    1 / sqrt(d p - 1); redundancy is ||X_i' X_j||_F / (||X_i||_F ||X_j||_F), the root of the
    normalised inner product. The published code takes isotropy of centred and redundancy of raw
    features: pass the uncentred table for that. Its 1e-6 regularisers are left out here, and it
    has min(n, d) eigenvalues where d > 512. The score is the sum over the steps.
    """
    spread = table.hidden_size * _purity(table) - 1
    isotropy = 1 / np.sqrt(np.maximum(spread, 1e-12))
    redundancy = np.sqrt(np.maximum((uncentred or table).normalised, 0))

    def gains(chosen: list[int], candidates: list[int]) -> np.ndarray:
        penalty = redundancy[np.ix_(candidates, chosen)].max(axis=1) if chosen else 0.0
        return alpha * isotropy[candidates] - gamma * penalty

    found = _greedy(gains, table.boundaries, k, constraints, "loes")
    return Selection(found.layers, sum(s for _, s in found.trace), found.method, found.trace)


METHODS: Mapping[str, Callable[..., Selection]] = {
    "s2": exhaustive_s2,
    "s2-greedy": greedy_s2,
    "entropy": top_k_entropy,
    "cka": min_mean_cka,
    "mrmr-difference": mrmr_difference,
    "mrmr-quotient": mrmr_quotient,
    "dpp": dpp_map,
    "loes": loes,
}


# ---------------------------------------------------------------- methods that need eigenvalues


class SetSpectra:
    """Eigenvalues of sums of trace-normalised Grams, for any set of boundaries, in float64.

    states [L, n, d]; boundaries: what to call them; rows: tokens to use (index or mask). Works on
    n x n Grams when n <= 2 d (all L of them are held: L n^2 numbers), else on d x d covariance
    blocks, made when first asked for (d^2 numbers for each pair).
    """

    def __init__(
        self,
        states: Tensor | np.ndarray,
        boundaries: Sequence[int],
        *,
        rows: np.ndarray | None = None,
        centred: bool = True,
    ) -> None:
        self.position = {int(b): i for i, b in enumerate(boundaries)}
        if len(self.position) != len(states):
            raise InputError(f"{len(states)} boundaries of states, {len(self.position)} names")
        chosen = [torch.as_tensor(s if rows is None else s[rows]).double() for s in states]
        chosen = [x - x.mean(dim=0) for x in chosen] if centred else chosen
        self.features = [x / x.norm() for x in chosen]  # [n, d] each, trace of the Gram 1
        n, d = self.features[0].shape
        self.dual = n <= 2 * d
        self._cache: dict[tuple[int, int], Tensor] = {}

    def eigenvalues(self, boundaries: Sequence[int]) -> np.ndarray:
        """Eigenvalues, ascending, of the sum of the boundaries' Grams; they sum to k."""
        index = [self.position[int(b)] for b in boundaries]
        if self.dual:
            matrix = torch.stack([self._block(i, i) for i in index]).sum(dim=0)  # [n, n]
        else:
            matrix = torch.cat([torch.cat([self._block(i, j) for j in index], 1) for i in index])
        return torch.linalg.eigvalsh(matrix).clamp(min=0).numpy()  # [n] or [k d]

    def s1(self, boundaries: Sequence[int]) -> float:
        """Von Neumann entropy, in nats, of the concatenation at equal traces."""
        values = self.eigenvalues(boundaries) / len(boundaries)
        values = values[values > 0]
        return float(-(values * np.log(values)).sum())

    def log_det(self, boundaries: Sequence[int], scale: float = 100.0) -> float:
        """log det(I + scale * sum of Grams): monotone submodular, so greedy >= (1 - 1/e) OPT."""
        return float(np.log1p(scale * self.eigenvalues(boundaries)).sum())

    def _block(self, i: int, j: int) -> Tensor:
        if i > j:
            return self._block(j, i).T
        if (i, j) not in self._cache:
            x, y = self.features[i], self.features[j]
            self._cache[i, j] = x @ x.T if self.dual else x.T @ y
        return self._cache[i, j]


SetFunction = Callable[[Sequence[int]], float]  # of boundaries


def greedy_by(
    value: SetFunction,
    boundaries: Sequence[int],
    k: int,
    *,
    constraints: Constraints = FREE,
    method: str = "greedy",
) -> Selection:
    """Greedy for any function of a set of boundaries."""

    def gains(chosen: list[int], candidates: list[int]) -> np.ndarray:
        sets = [sorted([*chosen, c]) for c in candidates]
        return np.array([value([boundaries[p] for p in s]) for s in sets])

    return _greedy(gains, boundaries, k, constraints, method)


def greedy_s1(
    table: GramTable, k: int, s1: SetFunction, *, constraints: Constraints = FREE
) -> Selection:
    """Greedy von Neumann entropy of the concatenation, about k L eigenvalue problems.

    With B = 1 + log(Lambda / k), Lambda the largest eigenvalue of the sum of all L Grams,
    S_1(greedy) + B >= (1 - 1/e) (S_1(best) + B).
    """
    return greedy_by(s1, table.boundaries, k, constraints=constraints, method="s1-greedy")


def greedy_log_det(
    table: GramTable, k: int, log_det: SetFunction, *, constraints: Constraints = FREE
) -> Selection:
    """Greedy log det(I + c sum K): monotone submodular, at least 1 - 1/e of the best set."""
    return greedy_by(log_det, table.boundaries, k, constraints=constraints, method="log-det")


def screened_s1(
    table: GramTable,
    k: int,
    s1: SetFunction,
    *,
    constraints: Constraints = FREE,
    count: int = 50,
) -> Selection:
    """The best S_1 among the ``count`` sets of largest S_2."""
    screened = shortlist(table, k, count=count, constraints=constraints)
    candidates = sorted(screened, key=lambda layers: layers.boundaries)
    values = np.array([s1(c.boundaries) for c in candidates])
    i = _first_of_best(values)
    return Selection(candidates[i], float(values[i]), "s1-screened")


# ---------------------------------------------------------------- baselines


def uniform(num_layers: int, k: int) -> LayerSet:
    """k boundaries that cut 0..N into k + 1 equal parts, halves rounded up."""
    _enough(num_layers, k, num_layers - 1)
    parts = k + 1
    return LayerSet(
        tuple((2 * i * num_layers + parts) // (2 * parts) for i in range(1, parts)), num_layers
    )


def early(num_layers: int, k: int) -> LayerSet:
    """Boundaries 1..k: the outputs of the first k blocks."""
    _enough(num_layers, k, num_layers - 1)
    return LayerSet(tuple(range(1, k + 1)), num_layers)


def middle(num_layers: int, k: int) -> LayerSet:
    """k neighbouring boundaries around N // 2."""
    _enough(num_layers, k, num_layers - 1)
    start = num_layers // 2 - (k - 1) // 2
    start = min(max(start, 1), num_layers - k)
    return LayerSet(tuple(range(start, start + k)), num_layers)


def late(num_layers: int, k: int) -> LayerSet:
    """The last k boundaries that every engine can capture: N-k..N-1."""
    _enough(num_layers, k, num_layers - 1)
    return LayerSet(tuple(range(num_layers - k, num_layers)), num_layers)


def last_k(num_layers: int, k: int) -> LayerSet:
    """The last k boundaries, N (before the final norm) among them."""
    _enough(num_layers, k, num_layers)
    return LayerSet(tuple(range(num_layers - k + 1, num_layers + 1)), num_layers)


def default(num_layers: int, k: int) -> LayerSet:
    """[2, N//2, N-3]; InputError unless k = 3."""
    if k != 3:
        raise InputError(f"the default rule has 3 boundaries, k = {k} was asked for")
    return default_boundaries(num_layers)


BASELINES: Mapping[str, Callable[[int, int], LayerSet]] = {
    "default": default,
    "uniform": uniform,
    "dflash": dflash_boundaries,
    "early": early,
    "middle": middle,
    "late": late,
    "last-k": last_k,
}


def random_sets(
    num_layers: int, k: int, count: int, *, seed: int, constraints: Constraints = FREE
) -> list[LayerSet]:
    """``count`` independent draws, each uniform over the sets that the constraints admit."""
    boundaries = range(num_layers + 1)
    pool = _positions(boundaries, constraints)
    _room_for(pool, boundaries, k, constraints)
    ways = _ways(pool, k, constraints.min_gap)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(count):
        chosen: list[int] = []
        i = 0
        while len(chosen) < k:
            left, after = k - len(chosen), _after(pool, i, constraints.min_gap)
            # sets that take pool[i], out of those that take nothing before it
            if rng.random() * ways[left][i] < ways[left - 1][after]:
                chosen.append(pool[i])
                i = after
            else:
                i += 1
        draws.append(LayerSet(tuple(chosen), num_layers))
    return draws


# ---------------------------------------------------------------- all sets, and their uncertainty


@dataclass(frozen=True)
class Landscape:
    """Every admissible set with its score, in lexicographic order."""

    sets: np.ndarray  # [M, k] boundaries
    scores: np.ndarray  # [M]

    def score_of(self, layers: Iterable[int]) -> float:
        return float(self.scores[self._index(layers)])

    def rank_of(self, layers: Iterable[int]) -> int:
        """1 + the number of sets that score higher (by more than a tie)."""
        score = self.scores[self._index(layers)]
        return 1 + int((self.scores > score + TIE * max(1.0, abs(score))).sum())

    def share_below(self, layers: Iterable[int]) -> float:
        """Share of all sets that rank behind: 1 is best."""
        return 1 - (self.rank_of(layers) - 1) / len(self.scores)

    def _index(self, layers: Iterable[int]) -> int:
        wanted = tuple(layers)
        if len(wanted) == self.sets.shape[1]:
            found = np.flatnonzero((self.sets == np.array(wanted)).all(axis=1))
            if len(found):
                return int(found[0])
        raise InputError(
            f"set {list(wanted)} is not among the {len(self.scores)} sets of "
            f"{self.sets.shape[1]} boundaries that the constraints admit"
        )


def landscape(
    table: GramTable, k: int, criterion: Criterion = s2, *, constraints: Constraints = FREE
) -> Landscape:
    """Scores of all admissible sets of k boundaries; M (2 k + 8) bytes."""
    score, boundaries = criterion(table), np.array(table.boundaries, dtype=np.int16)
    blocks = list(_all_sets(table.boundaries, k, constraints))
    return Landscape(
        np.concatenate([boundaries[b] for b in blocks]), np.concatenate([score(b) for b in blocks])
    )


def shortlist(
    table: GramTable,
    k: int,
    criterion: Criterion = s2,
    *,
    count: int = 50,
    constraints: Constraints = FREE,
) -> list[LayerSet]:
    """The ``count`` best sets, best first; memory bounded."""
    score = criterion(table)
    sets, scores = np.empty((0, k), dtype=np.int64), np.empty(0)
    for block in _all_sets(table.boundaries, k, constraints):
        sets, scores = np.concatenate([sets, block]), np.concatenate([scores, score(block)])
        best = np.argsort(-scores, kind="stable")[:count]  # equal scores stay lexicographic
        sets, scores = sets[best], scores[best]
    return [_layer_set(s, table.boundaries, constraints) for s in sets]


@dataclass(frozen=True)
class Stability:
    """What document resampling does to a selection.

    stable: the set chosen from the data (up to ``tolerance``, in boundaries, for each member) is
    chosen in at least ``threshold`` of the resamples.
    """

    selection: Selection  # of the data
    resamples: int
    share: float  # of resamples that agree with the data's choice
    sets: dict[tuple[int, ...], float]  # share of resamples, most frequent first
    boundaries: dict[int, float]  # share of resamples whose set has this boundary
    default_rank: int | None  # of the default rule among all sets, in the data
    default_rank_interval: tuple[float, float] | None  # 5 % and 95 % quantiles over resamples
    total: int | None  # number of sets it is ranked among
    stable: bool
    rule: str

    @property
    def verdict(self) -> str:
        word = "stable" if self.stable else "NOT stable"
        return f"{word}: chosen in {self.share:.0%} of {self.resamples} resamples ({self.rule})"


def stability(
    data: GramTable,
    resampled: Sequence[GramTable],
    method: Callable[..., Selection],
    k: int,
    *,
    constraints: Constraints = FREE,
    criterion: Criterion = s2,
    threshold: float = 0.5,
    tolerance: int = 0,
) -> Stability:
    """Repeat ``method(table, k, constraints=...)`` on bootstrap tables.

    The default rule's rank by ``criterion`` is None where k is not 3, N < 7 or the constraints
    exclude it.
    """
    if not resampled:
        raise InputError("stability needs bootstrap tables: ask the Gram pass for resamples > 0")
    chosen = method(data, k, constraints=constraints)
    draws = [method(table, k, constraints=constraints).layers.boundaries for table in resampled]
    count = len(draws)
    agree = [
        all(abs(a - b) <= tolerance for a, b in zip(d, chosen.layers, strict=True)) for d in draws
    ]
    share = sum(agree) / count
    sets = sorted(Counter(draws).items(), key=lambda item: (-item[1], item[0]))
    members = Counter(b for d in draws for b in d)
    within = f" up to {tolerance} per boundary" if tolerance else ""
    rank, interval, total = _default_ranks(data, resampled, k, constraints, criterion)
    return Stability(
        selection=chosen,
        resamples=count,
        share=share,
        sets={s: c / count for s, c in sets},
        boundaries={b: members[b] / count for b in data.boundaries},
        default_rank=rank,
        default_rank_interval=interval,
        total=total,
        stable=share >= threshold,
        rule=f"stable means the same set{within} in at least {threshold:.0%}",
    )


def _default_ranks(
    data: GramTable,
    resampled: Sequence[GramTable],
    k: int,
    constraints: Constraints,
    criterion: Criterion,
) -> tuple[int | None, tuple[float, float] | None, int | None]:
    try:
        rule = default(_num_layers(data.boundaries, constraints), k)
        found = landscape(data, k, criterion, constraints=constraints)
        rank = found.rank_of(rule)
    except InputError:
        return None, None, None
    ranks = [landscape(t, k, criterion, constraints=constraints).rank_of(rule) for t in resampled]
    low, high = np.quantile(ranks, [0.05, 0.95])
    return rank, (float(low), float(high)), len(found.scores)


# ---------------------------------------------------------------- searches


def _search(
    score: Score, table: GramTable, k: int, constraints: Constraints, method: str, greedy: bool
) -> Selection:
    if greedy:
        name = f"{method}-greedy"
        return _greedy(_from_score(score), table.boundaries, k, constraints, name)
    return exhaustive(score, table.boundaries, k, constraints=constraints, method=method)


def exhaustive(
    score: Score,
    boundaries: Sequence[int],
    k: int,
    *,
    constraints: Constraints = FREE,
    method: str = "exhaustive",
) -> Selection:
    """The best of all admissible sets by ``score``, which takes positions in ``boundaries``."""
    blocks = _all_sets(boundaries, k, constraints)
    return _first_best(score, blocks, boundaries, constraints, method)


def _first_best(
    score: Score,
    blocks: Iterator[np.ndarray],
    boundaries: Sequence[int],
    constraints: Constraints,
    method: str,
) -> Selection:
    best, found = -np.inf, None
    for block in blocks:
        values = score(block)
        i = _first_of_best(values)
        if found is None or values[i] > best + TIE * max(1.0, abs(best)):
            best, found = float(values[i]), block[i]
    if found is None:
        raise InputError(f"no set has a gap of at least {constraints.min_gap}: lower min_gap")
    return Selection(_layer_set(found, boundaries, constraints), best, method)


def _greedy(
    gains: Gains, boundaries: Sequence[int], k: int, constraints: Constraints, method: str
) -> Selection:
    pool = _positions(boundaries, constraints)
    _room_for(pool, boundaries, k, constraints)
    chosen: list[int] = []
    trace: list[tuple[int, float]] = []
    for _ in range(k):
        # a step must not make it impossible to reach k boundaries at this gap
        candidates = [p for p in pool if _fits([*chosen, p], pool, boundaries, k, constraints)]
        values = gains(chosen, candidates)
        i = _first_of_best(values)
        chosen.append(candidates[i])
        trace.append((int(boundaries[candidates[i]]), float(values[i])))
    layers = _layer_set(sorted(chosen), boundaries, constraints)
    return Selection(layers, trace[-1][1], method, tuple(trace))


def _from_score(score: Score) -> Gains:
    return lambda chosen, candidates: score(np.array([sorted([*chosen, c]) for c in candidates]))


def _first_of_best(values: np.ndarray) -> int:
    """Index of the first value within a tie of the largest."""
    best = values.max()
    if np.isnan(best):
        raise InputError("a criterion gave NaN: the table holds NaN or too few tokens")
    if np.isinf(best):
        return int(np.argmax(values))
    return int(np.flatnonzero(values >= best - TIE * max(1.0, abs(best)))[0])


def _all_sets(boundaries: Sequence[int], k: int, constraints: Constraints) -> Iterator[np.ndarray]:
    """[m, k] ascending positions of all admissible sets, in lexicographic order, by chunks."""
    pool = _positions(boundaries, constraints)
    _room_for(pool, boundaries, k, constraints)
    values = [int(boundaries[p]) for p in pool]
    _affordable(_ways(values, k, constraints.min_gap)[k][0])
    blocks = _blocks(itertools.combinations(pool, k), k)
    return _with_gap(blocks, boundaries, constraints)


def _blocks(sets: Iterator[tuple[int, ...]], k: int) -> Iterator[np.ndarray]:
    while True:
        flat = itertools.chain.from_iterable(itertools.islice(sets, CHUNK))
        block = np.fromiter(flat, dtype=np.int64).reshape(-1, k)
        if not len(block):
            return
        yield block


def _with_gap(
    blocks: Iterator[np.ndarray], boundaries: Sequence[int], constraints: Constraints
) -> Iterator[np.ndarray]:
    values = np.array(boundaries)
    for block in blocks:
        if constraints.min_gap > 1:
            block = block[(np.diff(values[block], axis=1) >= constraints.min_gap).all(axis=1)]
        if len(block):
            yield block


# ---------------------------------------------------------------- constraints


def _num_layers(boundaries: Sequence[int], constraints: Constraints) -> int:
    return int(boundaries[-1]) if constraints.num_layers is None else constraints.num_layers


def _layer_set(
    positions: Sequence[int] | np.ndarray, boundaries: Sequence[int], constraints: Constraints
) -> LayerSet:
    chosen = tuple(int(boundaries[p]) for p in positions)
    return LayerSet(chosen, _num_layers(boundaries, constraints))


def _positions(boundaries: Sequence[int], constraints: Constraints) -> list[int]:
    if constraints.allowed is None:
        return list(range(len(boundaries)))
    position = {int(b): i for i, b in enumerate(boundaries)}
    unknown = sorted(set(constraints.allowed) - set(position))
    if unknown:
        raise InputError(
            f"allowed boundaries {unknown} were not captured: choose among {list(position)}"
        )
    return sorted(position[b] for b in constraints.allowed)


def _room_for(
    pool: Sequence[int], boundaries: Sequence[int], k: int, constraints: Constraints
) -> None:
    if k < 1:
        raise InputError(f"k = {k}: choose at least one boundary")
    if constraints.min_gap < 1:
        raise InputError(f"min_gap = {constraints.min_gap} must be at least 1")
    if _packed([boundaries[p] for p in pool], constraints.min_gap) < k:
        raise InputError(
            f"{len(pool)} allowed boundaries do not hold k = {k} at a gap of "
            f"{constraints.min_gap}: lower k or min_gap, or allow more boundaries"
        )


def _fits(
    chosen: Sequence[int],
    pool: Sequence[int],
    boundaries: Sequence[int],
    k: int,
    constraints: Constraints,
) -> bool:
    """Whether ``chosen`` keeps the gap and can still grow to k boundaries."""
    gap, taken = constraints.min_gap, sorted(boundaries[p] for p in chosen)
    if any(b - a < gap for a, b in itertools.pairwise(taken)):
        return False
    free = [
        boundaries[p]
        for p in pool
        if all(abs(boundaries[p] - boundaries[c]) >= gap for c in chosen)
    ]
    return len(chosen) + _packed(free, gap) >= k


def _packed(values: Sequence[int], gap: int) -> int:
    """The most of these ascending values that keep the gap, taken from the left."""
    count, last = 0, None
    for value in values:
        if last is None or value - last >= gap:
            count, last = count + 1, value
    return count


def _after(pool: Sequence[int], i: int, gap: int) -> int:
    """First index whose value is at least ``gap`` above pool[i]."""
    return next((j for j in range(i + 1, len(pool)) if pool[j] - pool[i] >= gap), len(pool))


def _ways(pool: Sequence[int], k: int, gap: int) -> list[list[int]]:
    """ways[m][i]: number of sets of m values of pool[i:] that keep the gap."""
    size = len(pool)
    ways = [[1] * (size + 1)] + [[0] * (size + 1) for _ in range(k)]
    for m in range(1, k + 1):
        for i in reversed(range(size)):
            ways[m][i] = ways[m][i + 1] + ways[m - 1][_after(pool, i, gap)]
    return ways


def _affordable(count: int) -> None:
    if count > MAX_SETS:
        raise InputError(
            f"{count:,} sets are too many to visit (limit {MAX_SETS:,}): use a greedy method, "
            "a smaller k, a larger gap or fewer allowed boundaries"
        )


def _enough(num_layers: int, k: int, available: int) -> None:
    if k < 1 or k > available:
        raise InputError(
            f"k = {k}: this baseline has {max(available, 0)} boundaries to choose from in a model "
            f"of {num_layers} blocks"
        )


# ---------------------------------------------------------------- the table


def _purity(table: GramTable) -> np.ndarray:
    """[L]; InputError where a debiased estimate is not positive."""
    purity = table.purity
    if not (purity > 0).all():
        bad = [b for b, p in zip(table.boundaries, purity, strict=True) if not p > 0]
        raise InputError(
            f"purity of boundaries {bad} is not positive: too few tokens for the debiased table, "
            "or constant states; capture more text or take the biased table"
        )
    return purity


def _cka(table: GramTable) -> np.ndarray:
    """[L, L] linear CKA: the table scaled to a unit diagonal."""
    _purity(table)
    scale = np.sqrt(np.diag(table.inner))
    return table.inner / np.outer(scale, scale)


def _pair_sum(matrix: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """[M]: sum of matrix[i, j] over the pairs i < j of each set."""
    flat, size = np.ascontiguousarray(matrix).ravel(), matrix.shape[1]
    total = np.zeros(len(sets))
    for a, b in itertools.combinations(range(sets.shape[1]), 2):
        total += flat[sets[:, a] * size + sets[:, b]]
    return total


def _pair_mean(matrix: np.ndarray, sets: np.ndarray) -> np.ndarray:
    k = sets.shape[1]
    return _pair_sum(matrix, sets) / max(1, k * (k - 1) // 2)
