"""The one table: Gram inner products of every pair of boundaries, in one tiled pass.

K_l = X_l X_l^T is the Gram matrix of the n token states at boundary l. Everything that entropy of
order 2, CKA and selection need is a sum over token pairs (s, t) of K_i(s,t) K_j(s,t), plus sums
over tokens of row sums and diagonals. The pass goes over tiles of tokens, holds the L Grams of one
tile at a time (L m^2 + L m d numbers), and adds up

* for every nested level of the token mask (a filter sweep costs one pass), and
* for every unit of whole documents, so that document bootstraps cost no further pass.

A resample gives token t the weight w_t (how often its unit was drawn). Debiased quantities are
weighted U-statistics over *distinct* tokens: with unit weights they are HSIC_1 of Song et al.
(2012), and a token drawn twice is never paired with itself.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from paperlib import files
from paperlib.capture import TokenStates
from paperlib.errors import InputError

FORMAT = "paperlib-gram-1"
PRODUCTS = 65536  # products summed in the dtype of the Grams before float64 takes over
VARIANTS = ("centred", "centred_debiased", "uncentred", "uncentred_debiased")


@dataclass(frozen=True)
class GramTable:
    """One L x L view of the statistics: what entropy, CKA and selection read.

    ``inner`` [L, L] holds <K_i, K_j>_F and ``trace`` [L] holds tr K_i, in float64. In a debiased
    table they hold unbiased estimates of ||Sigma_ij||_F^2 and tr Sigma_ii instead; purity,
    collision entropy and CKA are the same expressions of either.
    """

    boundaries: tuple[int, ...]
    inner: np.ndarray
    trace: np.ndarray
    tokens: float
    hidden_size: int
    centred: bool = True
    debiased: bool = False

    @property
    def purity(self) -> np.ndarray:
        """[L] tr rho_l^2, rho_l = K_l / tr K_l."""
        return np.diag(self.inner) / self.trace**2

    @property
    def normalised(self) -> np.ndarray:
        """[L, L] inner products of the trace-normalised Grams."""
        return self.inner / np.outer(self.trace, self.trace)


@dataclass(frozen=True)
class GramStatistics:
    """Gram tables of Q nested token masks, each with R bootstrap resamples of documents.

    inner[variant] [Q, 1 + R, L, L] and trace[variant] [Q, 1 + R, L]; resample 0 is the data.
    """

    boundaries: tuple[int, ...]
    hidden_size: int
    levels: tuple[str, ...]  # Q labels, from the narrowest mask to the widest
    tokens: np.ndarray  # [Q, 1 + R] summed weights
    weights: np.ndarray  # [1 + R, U] how often each unit of documents was drawn
    inner: dict[str, np.ndarray]
    trace: dict[str, np.ndarray]
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def resamples(self) -> int:
        return self.weights.shape[0] - 1

    def table(
        self,
        level: int = -1,
        resample: int = 0,
        *,
        centred: bool = True,
        debiased: bool = False,
    ) -> GramTable:
        variant = ("centred" if centred else "uncentred") + ("_debiased" if debiased else "")
        return GramTable(
            boundaries=self.boundaries,
            inner=self.inner[variant][level, resample],
            trace=self.trace[variant][level, resample],
            tokens=float(self.tokens[level, resample]),
            hidden_size=self.hidden_size,
            centred=centred,
            debiased=debiased,
        )

    def resampled(self, level: int = -1, **view: bool) -> list[GramTable]:
        """The R bootstrap tables of a level."""
        return [self.table(level, r, **view) for r in range(1, 1 + self.resamples)]

    def save(self, path: Path) -> None:
        """One npz: the data's tables in float64, the resamples' as float32 upper triangles."""
        rows, columns = np.triu_indices(len(self.boundaries))
        arrays: dict[str, np.ndarray] = {"tokens": self.tokens, "weights": self.weights}
        for variant in VARIANTS:
            inner = self.inner[variant]
            arrays[f"{variant}_inner"] = inner[:, 0][:, rows, columns]
            arrays[f"{variant}_inner_resampled"] = inner[:, 1:][..., rows, columns].astype("f4")
            arrays[f"{variant}_trace"] = self.trace[variant]
        header = {
            "format": FORMAT,
            "boundaries": list(self.boundaries),
            "hidden_size": self.hidden_size,
            "levels": list(self.levels),
            "provenance": self.provenance,
        }
        arrays["header"] = np.frombuffer(files.canonical(header).encode(), dtype=np.uint8)
        with files.replacing(Path(path)) as temporary, open(temporary, "wb") as stream:
            np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]

    @staticmethod
    def load(path: Path) -> "GramStatistics":
        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            header = json.loads(arrays.pop("header").tobytes())
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"{path}: not a file of Gram statistics ({error})") from error
        if header.get("format") != FORMAT:
            raise InputError(f"{path}: format {header.get('format')!r}, expected {FORMAT!r}")
        size = len(header["boundaries"])
        rows, columns = np.triu_indices(size)
        inner, trace = {}, {}
        for variant in VARIANTS:
            packed = np.concatenate(
                [
                    arrays[f"{variant}_inner"][:, None],
                    arrays[f"{variant}_inner_resampled"].astype(np.float64),
                ],
                axis=1,
            )
            full = np.empty((*packed.shape[:2], size, size))
            full[..., rows, columns] = packed
            full[..., columns, rows] = packed
            inner[variant], trace[variant] = full, arrays[f"{variant}_trace"]
        return GramStatistics(
            boundaries=tuple(header["boundaries"]),
            hidden_size=header["hidden_size"],
            levels=tuple(header["levels"]),
            tokens=arrays["tokens"],
            weights=arrays["weights"],
            inner=inner,
            trace=trace,
            provenance=header["provenance"],
        )


@dataclass(frozen=True)
class GramSums:
    """Additive sums of a pass, or of a share of it; shares of one pass merge by adding."""

    boundaries: tuple[int, ...]
    hidden_size: int
    levels: tuple[str, ...]
    weights: np.ndarray  # [1 + R, U]
    counts: np.ndarray  # [Q, U] tokens of each shell of levels in each unit
    sums: dict[str, np.ndarray]
    request: str  # key of everything that must agree before shares may be added
    provenance: dict[str, Any]

    def merge(self, *others: "GramSums") -> "GramSums":
        for other in others:
            if other.request != self.request:
                raise InputError("shares of different passes cannot be merged: run them alike")
        sums = {k: sum((o.sums[k] for o in others), self.sums[k]) for k in self.sums}
        return GramSums(**{**self.__dict__, "sums": sums})


def document_units(document: np.ndarray, max_units: int = 48) -> np.ndarray:
    """Group documents, in order, into at most ``max_units`` units of about equal token count.

    document [n]: the document of each token. Returns [n]: the unit of each token. Units are what a
    bootstrap resamples; documents are never split between units.
    """
    ids, inverse, counts = np.unique(document, return_inverse=True, return_counts=True)
    if len(ids) <= max_units:
        return inverse
    middle = np.cumsum(counts) - counts / 2
    unit = np.floor(middle * max_units / counts.sum()).astype(int)
    return np.unique(unit, return_inverse=True)[1][inverse]


def bootstrap_weights(units: int, resamples: int, seed: int) -> np.ndarray:
    """[1 + R, U]: ones, then multinomial counts of a bootstrap of the units."""
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(units, np.full(units, 1 / units), size=resamples)
    return np.concatenate([np.ones((1, units)), draws]).astype(np.float64)


def norm_outliers(rms: np.ndarray, factor: float = 3.0) -> np.ndarray:
    """[n] bool: tokens whose RMS exceeds ``factor`` x the median of a boundary, at any boundary.

    rms [L, n]. These are the massive activations of attention sinks and delimiters; a token that
    carries a share c of the trace alone bounds S_1 by h(c) + (1 - c) log(r - 1). On SmolLM2 the
    RMS of 95 % of the tokens lies within 1.6 x the median at every boundary, and a second mode
    reaches from 3 x to 13 x at boundaries 3 to 9: a factor of 8 would leave half of it in.
    """
    if not factor > 1:
        raise InputError(f"outlier factor {factor} must exceed 1 (times the boundary's median RMS)")
    return (rms > factor * np.median(rms, axis=1, keepdims=True)).any(axis=0)


def cells_of(unit: np.ndarray, shell: np.ndarray) -> list[tuple[slice, int, int]]:
    """(slice, unit, shell) of each run of tokens with equal unit and shell."""
    change = np.flatnonzero((np.diff(unit) != 0) | (np.diff(shell) != 0)) + 1
    edges = [0, *change.tolist(), len(unit)]
    return [(slice(a, b), int(unit[a]), int(shell[a])) for a, b in itertools.pairwise(edges)]


def gram_statistics(
    states: TokenStates,
    level: np.ndarray | None = None,
    *,
    levels: Sequence[str] = ("all",),
    resamples: int = 0,
    seed: int = 0,
    max_units: int = 48,
    tile: int = 1024,
    dtype: torch.dtype = torch.float64,
    progress: bool = True,
) -> GramStatistics:
    """Gram tables of nested token masks: level [n] holds for each token the first of the Q masks
    (index into ``levels``) that contains it, or -1 for a token that is in none.

    dtype: of the tile Grams (float64, or float32 at half the time and memory); the sums over
    tiles, row sums, diagonals and everything after are float64 either way.
    """
    return finalise(
        accumulate(
            states,
            level,
            levels=levels,
            resamples=resamples,
            seed=seed,
            max_units=max_units,
            tile=tile,
            dtype=dtype,
            progress=progress,
        )
    )


def accumulate(
    states: TokenStates,
    level: np.ndarray | None = None,
    *,
    levels: Sequence[str] = ("all",),
    resamples: int = 0,
    seed: int = 0,
    max_units: int = 48,
    tile: int = 1024,
    dtype: torch.dtype = torch.float64,
    share: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> GramSums:
    """The sums of one pass, or of share (i, k): the i-th of k disjoint shares of its tiles."""
    n, count = states.tokens, len(levels)
    level = np.zeros(n, dtype=int) if level is None else np.asarray(level)
    if level.shape != (n,):
        raise InputError(f"level has shape {level.shape}, expected ({n},): one entry per token")
    if level.min() < -1 or level.max() >= count:
        raise InputError(
            f"level entries span {level.min()}..{level.max()}, expected -1..{count - 1}: "
            f"-1 for tokens left out, then an index into the {count} levels"
        )
    included = np.flatnonzero(level >= 0)
    if np.count_nonzero(level == 0) < 4:
        raise InputError(
            f"the narrowest mask {levels[0]!r} holds {np.count_nonzero(level == 0)} tokens, "
            "at least 4 are needed: keep more tokens or capture more text"
        )
    unit = document_units(states.document[included], max_units if resamples else 1)
    if not resamples:
        unit = np.zeros_like(unit)
    order = np.lexsort((included, level[included], unit))
    index, unit, shell = included[order], unit[order], level[included][order]
    units = int(unit.max()) + 1
    weights = bootstrap_weights(units, resamples, seed)

    pass_ = _Pass(states, index, unit, shell, weights, count, tile, dtype)
    sums = pass_.run(share, progress)
    counts = np.zeros((count, units))
    np.add.at(counts, (shell, unit), 1)
    provenance = {
        **{k: states.provenance[k] for k in ("target", "fingerprint", "content", "dtype")},
        "tokens": n,
        "included": len(index),
        "documents": len(np.unique(states.document[included])),
        "units": units,
        "resamples": resamples,
        "seed": seed,
        "gram_dtype": str(dtype),
        "norm_outliers": int(norm_outliers(states.rms).sum()),
    }
    request = [provenance, list(levels), tile, files.key([index.tolist(), shell.tolist()])]
    return GramSums(
        boundaries=states.boundaries,
        hidden_size=states.hidden_size,
        levels=tuple(levels),
        weights=weights,
        counts=counts,
        sums=sums,
        request=files.key(request),
        provenance=provenance,
    )


class _Pass:
    """One pass over the tiles. Tokens are sorted by (unit, shell); a cell is a run of both.

    A shell q holds the tokens that level q adds to level q - 1. With x the features less the mean
    of the narrowest level, mu that mean, and for each boundary

        g(t) = |x_t|^2,   a(t) = x_t . mu + |mu|^2 / 2,   r(t) = sum_s w_s x_s . x_t,

    the uncentred Gram is K(s, t) + a(s) + a(t). The sums, i and j being boundaries:

        pairs [Q, U, U, L, L]        K_i(s,t) K_j(s,t), s in u, t in v, s != t, outer shell q
        gg, ag, aa [Q, U, L, L]      over the tokens of a cell
        g, a [Q, U, L]               likewise
        rr1, rr2 [Q, 1+R, L, L]      w r_i r_j and w^2 r_i r_j over the tokens of a level
        rg2, rg3, ra1 [Q, 1+R, L, L] w^2 r_i g_j, w^3 r_i g_j, w r_i a_j
        total [Q, 1+R, L]            sum of w_s w_t K(s,t) over all pairs of a level
    """

    def __init__(
        self,
        states: TokenStates,
        index: np.ndarray,
        unit: np.ndarray,
        shell: np.ndarray,
        weights: np.ndarray,
        levels: int,
        tile: int,
        dtype: torch.dtype,
    ) -> None:
        self.states, self.index = states.states, torch.from_numpy(index)
        self.unit, self.shell, self.levels = unit, shell, levels
        self.weights = torch.from_numpy(weights)
        self.tile, self.dtype = tile, dtype
        self.L, self.d = len(states.boundaries), states.hidden_size
        self.starts = list(range(0, len(index), tile))
        # fresh memory costs as much as the arithmetic: these are filled again and again
        self.buffers: dict[str, Tensor] = {}

    def run(self, share: tuple[int, int], progress: bool) -> dict[str, np.ndarray]:
        L, levels, (draws, units) = self.L, self.levels, self.weights.shape
        self.mean = torch.zeros(L, self.d, dtype=self.dtype)
        # of the narrowest level: tokens that only wider levels hold (sinks) must not offset it
        mean = self._cell_sums()[0].sum(dim=0) / int((self.shell == 0).sum())
        self.mean = mean.to(self.dtype)  # any origin will do, if it is the same everywhere
        cells = self._cell_sums().cumsum(dim=0)  # [Q, U, L, d] of centred features, by level
        shapes = {
            "pairs": (levels, units, units, L, L),
            **{name: (levels, units, L, L) for name in ("gg", "ag", "aa")},
            **{name: (levels, units, L) for name in ("g", "a")},
            **{name: (levels, draws, L, L) for name in ("rr1", "rr2", "rg2", "rg3", "ra1")},
            "total": (levels, draws, L),
        }
        sums = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
        weighted = [  # [L, d, 1+R] weighted feature sums of each level
            torch.einsum("ru,uld->ldr", self.weights, level) for level in cells
        ]
        if share[0] == 0:
            sums["total"] = torch.stack([s.square().sum(dim=1).T for s in weighted])
        for start in self.starts[share[0] :: share[1]]:
            self._vectors(sums, start, weighted)
        tiles = [(a, b) for a in self.starts for b in self.starts if a <= b]
        mine = tiles[share[0] :: share[1]]
        held, row = -1, torch.empty(0)
        for a, b in tqdm(mine, unit="tile", desc="gram", disable=None if progress else True):
            if a != held:
                held, row = a, self._features(a, self.dtype, "row")
            column = row if a == b else self._features(b, self.dtype, "column")
            self._pairs(sums["pairs"], row, column, a, b)
        self.buffers.clear()
        return {name: value.numpy() for name, value in sums.items()}

    def _features(self, start: int, dtype: torch.dtype, name: str) -> Tensor:
        """[L, m, d] features of a tile of tokens less the mean, in the named buffer."""
        rows = self.index[start : start + self.tile]
        run = bool((rows.diff() == 1).all())  # a slice of the memory map, or scattered tokens
        out = self._buffer(name, (self.L, len(rows), self.d), dtype)
        mean = self.mean.to(dtype)
        for i in range(self.L):  # boundary by boundary: one [m, d] copy besides out
            state = self.states[i]
            state = state[int(rows[0]) : int(rows[-1]) + 1] if run else state[rows]
            torch.sub(state, mean[i], out=out[i])
        return out

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(np.prod(shape))
        held = self.buffers.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self.buffers[name] = torch.empty(size, dtype=dtype)
        return held[:size].view(shape)

    def _cells(self, start: int) -> list[tuple[slice, int, int]]:
        rows = slice(start, start + self.tile)
        return cells_of(self.unit[rows], self.shell[rows])

    def _cell_sums(self) -> Tensor:
        """[Q, U, L, d] sums of the features less the present mean."""
        units = self.weights.shape[1]
        sums = torch.zeros(self.levels, units, self.L, self.d, dtype=torch.float64)
        for start in self.starts:
            x = self._features(start, torch.float64, "exact")
            for where, unit, shell in self._cells(start):
                sums[shell, unit] += x[:, where].sum(dim=1)
        return sums

    def _vectors(self, sums: dict[str, Tensor], start: int, weighted: list[Tensor]) -> None:
        x = self._features(start, torch.float64, "exact")  # [L, m, d]
        g = x.square().sum(dim=2)  # [L, m]
        mu = self.mean.double()
        a = torch.bmm(x, mu[:, :, None])[..., 0] + 0.5 * mu.square().sum(dim=1)[:, None]
        cells = self._cells(start)
        for where, unit, shell in cells:
            gc, ac = g[:, where], a[:, where]
            sums["gg"][shell, unit] += gc @ gc.T
            sums["ag"][shell, unit] += ac @ gc.T
            sums["aa"][shell, unit] += ac @ ac.T
            sums["g"][shell, unit] += gc.sum(dim=1)
            sums["a"][shell, unit] += ac.sum(dim=1)
        for level, totals in enumerate(weighted):
            r = torch.bmm(x, totals).permute(2, 0, 1)  # [1+R, L, m]
            for where, unit, shell in cells:
                if shell > level:
                    continue
                rc = r[:, :, where].contiguous()
                w = self.weights[:, unit, None, None]
                rr = torch.bmm(rc, rc.mT)
                rg = rc @ g[:, where].T
                sums["rr1"][level] += w * rr
                sums["rr2"][level] += w**2 * rr
                sums["rg2"][level] += w**2 * rg
                sums["rg3"][level] += w**3 * rg
                sums["ra1"][level] += w * (rc @ a[:, where].T)

    def _pairs(self, pairs: Tensor, row: Tensor, column: Tensor, a: int, b: int) -> None:
        shape = (self.L, row.shape[1], column.shape[1])
        grams = self._buffer("grams", shape, self.dtype)
        torch.bmm(row, column.mT, out=grams)
        if a == b:  # a token is not paired with itself; gg holds those terms
            grams.diagonal(dim1=1, dim2=2).zero_()
        for p, (rows, u, shell_u) in enumerate(self._cells(a)):
            for q, (columns, v, shell_v) in enumerate(self._cells(b)):
                if a == b and q < p:
                    continue
                block = self._inner(grams[:, rows, columns])
                level = max(shell_u, shell_v)
                pairs[level, u, v] += block
                if a != b or p != q:  # the same pairs in the other order
                    pairs[level, v, u] += block

    def _inner(self, grams: Tensor) -> Tensor:
        """[L, ma, mb] -> [L, L] float64 inner products."""
        step = max(1, PRODUCTS // grams.shape[2])
        total = torch.zeros(self.L, self.L, dtype=torch.float64)
        for rows in grams.split(step, dim=1):
            flat = rows.reshape(self.L, -1)
            total += (flat @ flat.T).double()
        return total


@np.errstate(divide="ignore", invalid="ignore")
def finalise(sums: GramSums) -> GramStatistics:
    """From the additive sums to centred and uncentred, biased and debiased tables.

    With weights w, W_p = sum w^p: the centred biased inner product is
    A - (2/W_1) sum w r_i r_j + T_i T_j / W_1^2. The debiased one is the weighted U-statistic
    N_2/Z_2 - 2 N_3/Z_3 + N_4/Z_4 over ordered pairs, triples and quadruples of distinct tokens
    (numerators by inclusion and exclusion, Z the same sums of the bare weights); at w = 1 it is
    HSIC_1. At other weights it depends, in O(1/n), on the origin, the mean of the narrowest level.
    A resample that draws too few distinct tokens of a narrow mask gives nan or inf.
    """
    w = sums.weights  # [1+R, U]
    s = {k: v if k.startswith("r") or k == "total" else v.cumsum(0) for k, v in sums.sums.items()}
    counts = sums.counts.cumsum(axis=0)  # [Q, U]
    w1, w2, w3, w4 = (np.einsum("qu,ru->qr", counts, w**p)[..., None, None] for p in (1, 2, 3, 4))

    def over_pairs(p: int, q: int) -> np.ndarray:  # [Q, 1+R, L, L]
        return np.einsum("ru,quvij,rv->qrij", w**p, s["pairs"], w**q, optimize=True)

    def over_tokens(name: str, p: int) -> np.ndarray:
        return np.einsum("ru,qu...->qr...", w**p, s[name])

    def both(matrix: np.ndarray) -> np.ndarray:
        return matrix + matrix.swapaxes(-1, -2)

    def outer(vector: np.ndarray) -> np.ndarray:
        return vector[..., :, None] * vector[..., None, :]

    inner, trace = {}, {}
    distinct = over_pairs(1, 1)
    g, total = over_tokens("g", 1), s["total"]
    gram = distinct + over_tokens("gg", 2)
    inner["centred"] = gram - 2 / w1 * s["rr1"] + outer(total) / w1**2
    trace["centred"] = g - total / w1[..., 0]

    distinct22 = over_pairs(2, 2)
    own = total - over_tokens("g", 2)  # sum over s != t of w_s w_t K(s, t)
    z2 = w1**2 - w2
    z3 = w1**3 - 3 * w1 * w2 + 2 * w3
    z4 = w1**4 - 6 * w1**2 * w2 + 3 * w2**2 + 8 * w1 * w3 - 6 * w4
    triples = s["rr1"] - both(s["rg2"]) + over_tokens("gg", 3) - over_pairs(1, 2)
    meeting = s["rr2"] - both(s["rg3"]) + over_tokens("gg", 4) - distinct22
    quadruples = outer(own) - 4 * meeting - 2 * distinct22
    inner["centred_debiased"] = distinct / z2 - 2 * triples / z3 + quadruples / z4
    trace["centred_debiased"] = g / w1[..., 0] - own / z2[..., 0]

    a, aa = over_tokens("a", 1), over_tokens("aa", 1)
    inner["uncentred"] = gram + 2 * both(s["ra1"]) + 2 * w1 * aa + 2 * outer(a)
    trace["uncentred"] = g + 2 * a
    self_terms = over_tokens("gg", 2) + 2 * both(over_tokens("ag", 2)) + 4 * over_tokens("aa", 2)
    inner["uncentred_debiased"] = (inner["uncentred"] - self_terms) / z2
    trace["uncentred_debiased"] = trace["uncentred"] / w1[..., 0]
    return GramStatistics(
        boundaries=sums.boundaries,
        hidden_size=sums.hidden_size,
        levels=sums.levels,
        tokens=w1[..., 0, 0],
        weights=w,
        inner={k: (v + v.swapaxes(-1, -2)) / 2 for k, v in inner.items()},
        trace=trace,
        provenance=sums.provenance,
    )
