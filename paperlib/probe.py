"""How well do chosen states predict what a draft head must predict? Ridge regression, closed form.

A draft head at row t sees the states of the chosen boundaries at t and the embedding of token
t + 1, and its task is the target's final state at t + 1. The probe fits exactly that map linearly:

    [states of S at t, embedding of token t + 1]  ->  state at boundary N (pre-norm), at t + 1

over pairs of neighbouring tokens of one document. It needs no head training and knows nothing of
entropy or CKA, so it can judge them; and it can choose sets itself.

Documents are split three ways: training documents give the fit, validation documents the
regulariser (and every choice between sets), test documents the reported score. Second moments of
all L boundaries are accumulated once, in float64, after which a set costs one eigendecomposition
of its (k + 1) p x (k + 1) p block and the whole path of regularisers is free: with A = Q diag(v) Q'
and G = Q' B the validation error at regulariser r is a quadratic form in 1 / (v + r).

Every boundary is centred by its training mean and divided by its training RMS, so that sets are
compared on information and not on scale. The moments take about (L + 1)^2 p^2 x 8 bytes, training
and validation together (L = 31, p = 576: 2.7 GB; half of it with float32 storage), so captures of
many boundaries of a wide model take ``project`` = p < d: one seeded random orthogonal map, the
same for all boundaries.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor
from tqdm import tqdm

from paperlib.capture import TokenStates
from paperlib.errors import InputError
from paperlib.selection import FREE, Constraints, Score, Selection, exhaustive, greedy_by

GRID = np.arange(-8, 5) / 2  # log10 of the regulariser in units of the mean eigenvalue
WIDEST = (-7.0, 6.0)  # how far the grid is extended when the best value lies at its edge
MAX_BYTES = 6 * 2**30
QUANTILES = (0.025, 0.975)


@dataclass(frozen=True)
class Folds:
    """Disjoint documents: to fit, to choose the regulariser and the sets, to report."""

    train: tuple[int, ...]
    validation: tuple[int, ...]
    test: tuple[int, ...]

    def __post_init__(self) -> None:
        parts = (self.train, self.validation, self.test)
        if not all(parts) or len(set().union(*parts)) != sum(map(len, parts)):
            raise InputError("folds must be three disjoint, non-empty groups of documents")


def split_documents(
    document: np.ndarray, *, seed: int = 0, validation: float = 0.2, test: float = 0.2
) -> Folds:
    """A seeded split of whole documents; InputError for fewer than three."""
    ids = np.unique(document)
    if len(ids) < 3:
        raise InputError(
            f"the probe needs at least 3 documents to hold some out, got {len(ids)}: "
            "capture more documents"
        )
    order = np.random.default_rng(seed).permutation(ids).tolist()
    v, t = (max(1, round(len(ids) * share)) for share in (validation, test))
    if v + t >= len(ids):
        raise InputError(
            f"validation {validation:g} and test {test:g} leave none of {len(ids)} documents "
            "to train on: lower them"
        )
    return Folds(
        tuple(sorted(order[v + t :])), tuple(sorted(order[:v])), tuple(sorted(order[v : v + t]))
    )


def token_pairs(
    document: np.ndarray, position: np.ndarray, usable: np.ndarray | None = None
) -> np.ndarray:
    """[P]: every t whose successor t + 1 is the next position of the same document.

    usable [n] bool: both tokens of a pair must be (leaves out position 0 and outliers).
    """
    follows = (np.diff(document) == 0) & (np.diff(position) == 1)
    if usable is not None:
        if usable.shape != document.shape:
            raise InputError(
                f"usable has shape {usable.shape}, expected {document.shape}: one entry per token"
            )
        follows &= usable[:-1] & usable[1:]
    return np.flatnonzero(follows)


@dataclass(frozen=True)
class Fit:
    """Ridge regression of one set: the regulariser chosen on validation documents.

    r2: 1 - SSE / SST on validation documents, features weighted by one over training variance.
    """

    ridge: float  # in units of the mean eigenvalue of the inputs' covariance
    r2: float
    at_edge: bool  # the best value is the end of the widest grid: not a minimum
    grid: np.ndarray  # [R] regularisers that were tried
    path: np.ndarray  # [R] their validation r2


@dataclass(frozen=True)
class ProbeScore:
    """Held-out score of one set on test documents.

    r2: 1 - SSE / SST, features weighted by one over their training variance; r2_raw: unweighted.
    SST is about the training mean, so predicting that scores 0. interval: 95 %, from resampling
    test documents. errors, totals [D]: weighted SSE and SST of each test document.
    """

    boundaries: tuple[int, ...]
    r2: float
    r2_raw: float
    interval: tuple[float, float]
    validation_r2: float
    ridge: float
    at_edge: bool
    errors: np.ndarray
    totals: np.ndarray


@dataclass
class RidgeProbe:
    """Moments of training and validation documents, and what is needed to predict on test ones.

    Input i < L is boundary i at t; input L is the embedding of token t + 1.
    """

    source: TokenStates
    folds: Folds
    rows: dict[str, np.ndarray]  # fold -> [P] t of its pairs
    mean: Tensor  # [L + 1, d]
    scale: Tensor  # [L + 1]
    projection: Tensor | None  # [d, p]
    embedding: Tensor | None  # [V, d]
    target_mean: Tensor  # [d]
    target_variance: Tensor  # [d]
    inputs: dict[str, Tensor]  # fold -> [pairs i <= j, p, p], mean over the fold's token pairs
    cross: dict[str, Tensor]  # fold -> [L + 1, p, d]
    target: dict[str, Tensor]  # fold -> [d, d]
    resamples: int = 500
    seed: int = 0
    _fits: dict[tuple[int, ...], Fit] = field(default_factory=dict, repr=False)

    @property
    def boundaries(self) -> tuple[int, ...]:
        return self.source.boundaries

    def fit(self, boundaries: Iterable[int]) -> Fit:
        """Fit on training documents, regulariser chosen on validation documents.

        boundaries: any captured ones; none at all gives the embedding-only probe.
        """
        key = tuple(int(b) for b in boundaries)
        if key not in self._fits:
            self._fits[key] = self._fit(self._index(key))
        return self._fits[key]

    def validation_r2(self, boundaries: Iterable[int]) -> float:
        """The score that selectors may look at."""
        return self.fit(boundaries).r2

    def score(self, boundaries: Iterable[int]) -> ProbeScore:
        """The score to report, on test documents."""
        boundaries = tuple(int(b) for b in boundaries)
        fit, fitted, weight = self.fit(boundaries), self.coefficients(boundaries), self._weight()
        rows = self.rows["test"]
        unit = np.unique(self.source.document[rows], return_inverse=True)[1]
        sse, sst = np.zeros(unit.max() + 1), np.zeros(unit.max() + 1)  # [D]
        raw_error = raw_total = 0.0
        for part in np.array_split(np.arange(len(rows)), -(-len(rows) // 2048)):
            true = self._target(rows[part])
            error = (true - self.predict(boundaries, rows[part], fitted)).square()  # [m, d]
            total = (true - self.target_mean).square()
            np.add.at(sse, unit[part], (error @ weight).numpy())
            np.add.at(sst, unit[part], (total @ weight).numpy())
            raw_error, raw_total = raw_error + float(error.sum()), raw_total + float(total.sum())
        draws = _document_draws(len(sse), self.resamples, self.seed)  # [R, D]
        low, high = np.quantile(1 - (draws @ sse) / (draws @ sst), QUANTILES)
        return ProbeScore(
            boundaries=boundaries,
            r2=float(1 - sse.sum() / sst.sum()),
            r2_raw=1 - raw_error / raw_total,
            interval=(float(low), float(high)),
            validation_r2=fit.r2,
            ridge=fit.ridge,
            at_edge=fit.at_edge,
            errors=sse,
            totals=sst,
        )

    def coefficients(self, boundaries: Iterable[int]) -> Tensor:
        """[(k + 1) p, d] of centred, scaled, projected inputs, at the chosen regulariser."""
        boundaries = tuple(boundaries)
        a, b = self._moments("train", self._index(boundaries))
        ridge = self.fit(boundaries).ridge * float(a.diagonal().mean())
        a.diagonal().add_(ridge)
        return torch.linalg.solve(a, b)  # not Cholesky: float32 storage may leave it indefinite

    def predict(
        self, boundaries: Iterable[int], rows: np.ndarray, coefficients: Tensor | None = None
    ) -> Tensor:
        """[P, d] predicted states at boundary N of the successors of tokens ``rows`` [P]."""
        boundaries = tuple(boundaries)
        fitted = self.coefficients(boundaries) if coefficients is None else coefficients
        inputs = [self._features(i, rows) for i in self._index(boundaries)]
        return torch.cat(inputs, dim=1) @ fitted + self.target_mean

    def agreement(
        self,
        boundaries: Iterable[int],
        logits_from_prenorm: Callable[[Tensor], Tensor],
        *,
        sample: int = 1024,
    ) -> float:
        """Share of test pairs whose predicted state has the true state's argmax token.

        logits_from_prenorm: [m, d] float32 states at boundary N -> [m, V]. sample: pairs, seeded.
        """
        boundaries = tuple(boundaries)
        rows, fitted = self.rows["test"], self.coefficients(boundaries)
        rng = np.random.default_rng(self.seed)
        chosen = np.sort(rng.choice(rows, min(sample, len(rows)), replace=False))
        equal = 0
        for part in np.array_split(chosen, max(1, len(chosen) // 64)):
            predicted = logits_from_prenorm(self.predict(boundaries, part, fitted).float())
            true = logits_from_prenorm(self._target(part).float())
            equal += int((predicted.argmax(dim=-1) == true.argmax(dim=-1)).sum())
        return equal / len(chosen)

    def relevance(self) -> np.ndarray:
        """[L] linear CKA of each boundary at t with the final state at t + 1, training documents.

        With ``project`` this is the CKA of the projected states.
        """
        cross = self.cross["train"][:-1].double().square().sum(dim=(1, 2)).numpy()
        own = np.sqrt(np.diag(self._overlap()) * float(self.target["train"].square().sum()))
        return cross / own

    def redundancy(self) -> np.ndarray:
        """[L, L] linear CKA of the boundaries at t, on training documents."""
        overlap = self._overlap()
        scale = np.sqrt(np.diag(overlap))
        return overlap / np.outer(scale, scale)

    def _overlap(self) -> np.ndarray:
        size = len(self.boundaries)
        squares = self.inputs["train"].double().square().sum(dim=(1, 2)).numpy()
        full = np.empty((size, size))
        for i in range(size):
            for j in range(i, size):
                full[i, j] = full[j, i] = squares[_pair(i, j, size + 1)]
        return full

    def _index(self, boundaries: Iterable[int]) -> list[int]:
        boundaries, position = tuple(boundaries), {b: i for i, b in enumerate(self.boundaries)}
        unknown = [b for b in boundaries if b not in position]
        if unknown:
            raise InputError(
                f"boundaries {unknown} were not captured: choose among {list(self.boundaries)}"
            )
        return [*(position[b] for b in boundaries), len(self.boundaries)]

    def _weight(self) -> Tensor:
        """[d] one over training variance; constant features count for nothing."""
        variance = self.target_variance
        return torch.where(variance > 1e-12 * variance.max(), 1 / variance, 0.0)

    def _moments(self, fold: str, index: list[int]) -> tuple[Tensor, Tensor]:
        """The set's second moments, [m, m] among inputs and [m, d] with the target."""
        size = len(self.boundaries) + 1

        def block(i: int, j: int) -> Tensor:
            packed = self.inputs[fold][_pair(min(i, j), max(i, j), size)]
            return packed if i <= j else packed.T

        rows = [torch.cat([block(i, j) for j in index], dim=1) for i in index]
        return torch.cat(rows).double(), torch.cat([self.cross[fold][i] for i in index]).double()

    def _fit(self, index: list[int]) -> Fit:
        a, b = self._moments("train", index)
        held_a, held_b = self._moments("validation", index)
        weight = self._weight()
        values, q = torch.linalg.eigh(a)
        values = values.clamp(min=0)
        mean = float(values.mean())
        g = q.T @ b  # [m, d]
        linear = ((q.T @ held_b) * g * weight).sum(dim=1)  # [m]
        quadratic = (q.T @ held_a @ q) * ((g * weight) @ g.T)  # [m, m]
        total = float(self.target["validation"].diagonal() @ weight)

        def r2(log_ridge: float) -> float:
            inverse = 1 / (values + 10.0**log_ridge * mean)
            error = total - 2 * inverse @ linear + inverse @ quadratic @ inverse
            return 1 - float(error) / total

        path = {float(x): r2(x) for x in GRID}
        best = max(path, key=path.__getitem__)
        while best in (min(path), max(path)) and WIDEST[0] < best < WIDEST[1]:
            new = best + (0.5 if best == max(path) else -0.5)
            path[new] = r2(new)
            best = max(path, key=path.__getitem__)
        tried = sorted(path)
        return Fit(
            ridge=10.0**best,
            r2=path[best],
            at_edge=best in (tried[0], tried[-1]),
            grid=10.0 ** np.array(tried),
            path=np.array([path[x] for x in tried]),
        )

    def _features(self, i: int, rows: np.ndarray) -> Tensor:
        """[P, p] input i of the pairs: centred, scaled, projected, float64."""
        raw = _raw_input(self.source, self.embedding, i, rows)
        features = (raw - self.mean[i]) / self.scale[i]
        return features if self.projection is None else features @ self.projection

    def _target(self, rows: np.ndarray) -> Tensor:
        return torch.as_tensor(self.source.states[-1][rows + 1]).double()


def ridge_probe(
    source: TokenStates,
    *,
    folds: Folds | None = None,
    usable: np.ndarray | None = None,
    embedding: Tensor | None = None,
    project: int | None = None,
    storage: torch.dtype = torch.float64,
    block: int = 512,
    seed: int = 0,
    max_bytes: int = MAX_BYTES,
    progress: bool = True,
) -> RidgeProbe:
    """Accumulate the moments of every boundary of ``source``, once.

    folds: by default ``split_documents(seed=seed)``. usable [n]: tokens that may take part.
    embedding [V, d]: rows for token t + 1; by default the state at boundary 0 at t + 1.
    project: dimensions that inputs are projected to (seeded, orthogonal); default: all d.
    storage: float32 halves what is kept; sums are float64 either way. block: pairs at a time.
    InputError if boundary N (or 0, without ``embedding``) was not captured, a fold has too few
    pairs, or the moments would exceed ``max_bytes``.
    """
    boundaries, d = source.boundaries, source.states.shape[2]
    if boundaries[-1] != source.num_layers:
        raise InputError(
            f"the probe predicts boundary {source.num_layers}, captured were {list(boundaries)}: "
            "capture it too"
        )
    if embedding is None and boundaries[0] != 0:
        raise InputError(
            "the probe needs the embedding of the next token: capture boundary 0 or pass embedding="
        )
    if project is not None and not 0 < project <= d:
        raise InputError(f"project = {project} must lie in 1..{d}, the hidden size")
    p, size = project or d, len(boundaries) + 1
    need = 2 * size * (size + 1) // 2 * p * p * 8
    if need > max_bytes:
        raise InputError(
            f"moments of {size} inputs of {p} dimensions take {need / 2**30:.1f} GiB, the limit is "
            f"{max_bytes / 2**30:.1f}: pass project= (fewer dimensions), capture fewer boundaries, "
            "or raise max_bytes"
        )
    folds = split_documents(source.document, seed=seed) if folds is None else folds
    pairs = token_pairs(source.document, source.position, usable)
    rows = {
        name: pairs[np.isin(source.document[pairs], getattr(folds, name))]
        for name in ("train", "validation", "test")
    }
    for name, chosen in rows.items():
        if len(chosen) < 2:
            raise InputError(
                f"the {name} documents hold {len(chosen)} token pairs, at least 2 are needed: "
                "capture more or longer documents"
            )
    mean, scale = _location(source, embedding, rows["train"], block)
    target = torch.as_tensor(source.states[-1][rows["train"] + 1]).double()
    probe = RidgeProbe(
        source=source,
        folds=folds,
        rows=rows,
        mean=mean,
        scale=scale,
        projection=None if project is None else _orthogonal(d, project, seed),
        embedding=embedding,
        target_mean=target.mean(dim=0),
        target_variance=target.var(dim=0, correction=0),
        inputs={},
        cross={},
        target={},
        seed=seed,
    )
    total = len(rows["train"]) + len(rows["validation"])
    with tqdm(total=total, unit="pair", desc="probe", disable=None if progress else True) as bar:
        for fold in ("train", "validation"):
            _accumulate(probe, fold, p, storage, block, bar)
    return probe


def greedy_probe(probe: RidgeProbe, k: int, *, constraints: Constraints = FREE) -> Selection:
    """Boundaries added one by one, each the best for the validation score."""
    return greedy_by(
        probe.validation_r2, probe.boundaries, k, constraints=constraints, method="probe-greedy"
    )


def best_of(probe: RidgeProbe, candidates: Sequence[Iterable[int]]) -> int:
    """Index of the candidate set with the best validation score; the first of ties."""
    if not candidates:
        raise InputError("no candidate sets to choose from")
    return int(np.argmax([probe.validation_r2(c) for c in candidates]))


def relevance_minus_redundancy(
    probe: RidgeProbe, k: int, *, weight: float = 1.0, constraints: Constraints = FREE
) -> Selection:
    """The set of largest mean CKA with the final state at t + 1, minus ``weight`` x mean CKA
    within the set; exact. It looks at no validation or test document."""
    relevance, redundancy = probe.relevance(), probe.redundancy()

    def score(sets: np.ndarray) -> np.ndarray:
        size = sets.shape[1]
        within = redundancy[sets[:, :, None], sets[:, None, :]].sum(axis=(1, 2)) - size
        return relevance[sets].mean(axis=1) - weight * within / max(1, size * (size - 1))

    chosen: Score = score
    return exhaustive(
        chosen, probe.boundaries, k, constraints=constraints, method="relevance-redundancy"
    )


@dataclass(frozen=True)
class Correlation:
    """Spearman correlation of a criterion with the probe over a list of sets, and its interval."""

    criterion: str
    rho: float
    interval: tuple[float, float]


def correlations(
    scores: Sequence[ProbeScore],
    criteria: Mapping[str, Sequence[float] | np.ndarray],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> list[Correlation]:
    """Spearman correlation of each criterion (one value for each of ``scores``) with test r2.

    Always beside them: mean depth and the depth of the deepest boundary, which know nothing of
    the data. Intervals (95 %) resample test documents and sets together.
    """
    count = len(scores)
    if count < 3:
        raise InputError(f"{count} sets are too few for a rank correlation: score at least 3")
    for name, given in criteria.items():
        if len(given) != count:
            raise InputError(f"criterion {name!r} has {len(given)} values for {count} sets")
    table: dict[str, np.ndarray] = {
        **{name: np.asarray(values, dtype=float) for name, values in criteria.items()},
        "mean depth": np.array([np.mean(s.boundaries) for s in scores]),
        "deepest boundary": np.array([max(s.boundaries) for s in scores], dtype=float),
    }
    errors = np.stack([s.errors for s in scores])  # [M, D]
    totals = np.stack([s.totals for s in scores])
    r2 = 1 - errors.sum(axis=1) / totals.sum(axis=1)
    draws = _document_draws(errors.shape[1], resamples, seed)  # [R, D]
    resampled = 1 - (draws @ errors.T) / (draws @ totals.T)  # [R, M]
    picks = np.random.default_rng([seed, 1]).integers(0, count, (resamples, count))
    found = []
    for name, values in table.items():
        rhos = [_spearman(values[pick], r[pick]) for pick, r in zip(picks, resampled, strict=True)]
        kept = np.array(rhos)[~np.isnan(rhos)]
        low, high = np.quantile(kept, QUANTILES) if len(kept) else (np.nan, np.nan)
        found.append(Correlation(name, _spearman(values, r2), (float(low), float(high))))
    return found


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation, average ranks for ties; NaN where one side is constant."""
    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    norm = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / norm) if norm > 0 else float("nan")


def _document_draws(documents: int, resamples: int, seed: int) -> np.ndarray:
    """[R, D] how often each document is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples)


def _pair(i: int, j: int, size: int) -> int:
    """Place of (i, j), i <= j, in the packed upper triangle."""
    return i * size - i * (i - 1) // 2 + j - i


def _raw_input(source: TokenStates, embedding: Tensor | None, i: int, rows: np.ndarray) -> Tensor:
    if i < len(source.boundaries):
        return torch.as_tensor(source.states[i][rows]).double()
    if embedding is None:
        return torch.as_tensor(source.states[0][rows + 1]).double()
    return embedding[torch.as_tensor(source.token[rows + 1])].double()


def _location(
    source: TokenStates, embedding: Tensor | None, rows: np.ndarray, block: int
) -> tuple[Tensor, Tensor]:
    """Training means [L + 1, d] and RMS about them [L + 1] of every input."""
    means, scales = [], []
    parts = np.array_split(rows, -(-len(rows) // block))
    for i in range(len(source.boundaries) + 1):
        mean = torch.zeros(source.states.shape[2], dtype=torch.float64)
        for part in parts:
            mean += _raw_input(source, embedding, i, part).sum(dim=0) / len(rows)
        square = 0.0
        for part in parts:
            square += float(
                (_raw_input(source, embedding, i, part) - mean).square().mean(dim=1).sum()
            )
        means.append(mean)
        scales.append((square / len(rows)) ** 0.5 or 1.0)  # a constant input stays zero
    return torch.stack(means), torch.tensor(scales, dtype=torch.float64)


def _orthogonal(d: int, p: int, seed: int) -> Tensor:
    """[d, p] with orthonormal columns, uniform over all such."""
    gaussian = np.random.default_rng(seed).standard_normal((d, p))
    q, r = np.linalg.qr(gaussian)
    return torch.from_numpy(q * np.sign(np.diag(r)))


def _accumulate(
    probe: RidgeProbe, fold: str, p: int, storage: torch.dtype, block: int, bar: tqdm
) -> None:
    """Fill a fold's moments, block of pairs by block of pairs, in float64."""
    size, d = len(probe.boundaries) + 1, len(probe.target_mean)
    inputs = torch.zeros(size * (size + 1) // 2, p, p, dtype=torch.float64)
    cross = torch.zeros(size, p, d, dtype=torch.float64)
    target = torch.zeros(d, d, dtype=torch.float64)
    rows = probe.rows[fold]
    for part in np.array_split(rows, -(-len(rows) // block)):
        x = torch.stack([probe._features(i, part) for i in range(size)])  # [L + 1, b, p]
        y = probe._target(part) - probe.target_mean  # [b, d]
        for i in range(size):
            first = _pair(i, i, size)
            inputs[first : first + size - i] += x[i].T @ x[i:]
        cross += x.transpose(1, 2) @ y
        target += y.T @ y
        bar.update(len(part))
    probe.inputs[fold] = inputs.div_(len(rows)).to(storage)
    probe.cross[fold] = cross.div_(len(rows)).to(storage)
    probe.target[fold] = target.div_(len(rows))
