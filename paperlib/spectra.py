"""Eigenvalues of the state covariances: what entropies of order other than 2 need.

Order 2 needs only the Gram table. S_1 (von Neumann) needs the spectrum of each boundary, per level
of the token mask and per bootstrap resample of documents. Boundary by boundary, the d x d scatter
of every unit of documents is formed once and resamples are sums of these.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from paperlib import files
from paperlib.capture import TokenStates
from paperlib.entropy import spectral_entropy
from paperlib.errors import InputError
from paperlib.gram import bootstrap_weights, cells_of, document_units

MAX_SCATTER_BYTES = 2**30  # of the scatters of all units of one boundary
DRAWS = 16  # resamples whose scatters are summed together


@dataclass(frozen=True)
class Spectra:
    """eigenvalues [Q, L, r] of the trace-normalised Grams of the data, descending, and S_1 in nats
    of the data and its resamples, s1 [Q, 1 + R, L]. tokens [Q]."""

    boundaries: tuple[int, ...]
    levels: tuple[str, ...]
    tokens: np.ndarray
    eigenvalues: np.ndarray
    s1: np.ndarray

    def save(self, path: Path) -> None:
        with files.replacing(Path(path)) as temporary, open(temporary, "wb") as stream:
            np.savez_compressed(
                stream,
                boundaries=np.array(self.boundaries),
                levels=np.array(self.levels),
                tokens=self.tokens,
                eigenvalues=self.eigenvalues,
                s1=self.s1,
            )

    @staticmethod
    def load(path: Path) -> "Spectra":
        try:
            with np.load(path, allow_pickle=False) as archive:
                return Spectra(
                    boundaries=tuple(archive["boundaries"].tolist()),
                    levels=tuple(archive["levels"].tolist()),
                    tokens=archive["tokens"],
                    eigenvalues=archive["eigenvalues"],
                    s1=archive["s1"],
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(f"{path}: not a file of spectra ({error})") from error


def spectra(
    states: TokenStates,
    level: np.ndarray | None = None,
    *,
    levels: Sequence[str] = ("all",),
    centred: bool = True,
    resamples: int = 0,
    seed: int = 0,
    max_units: int = 48,
    progress: bool = True,
) -> Spectra:
    """Spectra of rho_l = K_l / tr K_l for nested token masks (``level`` as in gram_statistics).

    Centring uses the (weighted) mean of the very tokens of the mask and resample. In float64.
    """
    level = np.zeros(states.tokens, dtype=int) if level is None else np.asarray(level)
    included = np.flatnonzero(level >= 0)
    if np.count_nonzero(level == 0) < 2:
        raise InputError(f"the narrowest mask {levels[0]!r} holds fewer than 2 tokens")
    d = states.hidden_size
    if resamples:
        max_units = min(max_units, max(2, MAX_SCATTER_BYTES // (8 * d * d * len(levels))))
        unit = document_units(states.document[included], max_units)
    else:
        unit = np.zeros(len(included), dtype=int)
    order = np.lexsort((included, level[included], unit))
    index, unit, shell = included[order], unit[order], level[included][order]
    weights = torch.from_numpy(bootstrap_weights(int(unit.max()) + 1, resamples, seed))
    cells = cells_of(unit, shell)
    counts = torch.zeros(len(levels), weights.shape[1], dtype=torch.float64)
    for where, u, q in cells:
        counts[q, u] += where.stop - where.start
    counts = counts.cumsum(dim=0)  # [Q, U]
    if (weights @ counts[0] < 2).any():
        raise InputError(
            f"mask {levels[0]!r}: a resample of the documents draws fewer than 2 of its tokens; "
            "use more documents, or resamples = 0"
        )
    size, rank = len(states.boundaries), min(d, len(index))
    eigenvalues = np.zeros((len(levels), size, rank))
    s1 = np.zeros((len(levels), 1 + resamples, size))
    rows = torch.from_numpy(index)
    for i in tqdm(range(size), unit="boundary", desc="spectra", disable=None if progress else True):
        x = states.states[i][rows].double()  # [n, d]
        if centred:  # the shift that remains is removed exactly below
            x -= x[torch.from_numpy(shell == 0)].mean(dim=0)
        scatter, sums = _scatters(x, cells, counts)
        for q in range(len(levels)):
            flat = scatter[q].reshape(len(counts[q]), -1)
            for r, w in enumerate(weights):
                if r % DRAWS == 0:  # several resamples at once read the scatters once
                    totals = (weights[r : r + DRAWS] @ flat).view(-1, d, d)
                total = totals[r % DRAWS]
                if centred:
                    mean = w @ sums[q]
                    total -= torch.outer(mean, mean) / (w @ counts[q])
                values = torch.linalg.eigvalsh(total).flip(0).clamp(min=0)[:rank]
                values = (values / values.sum()).numpy()
                s1[q, r, i] = spectral_entropy(values, 1.0)
                if r == 0:
                    eigenvalues[q, i] = values
    return Spectra(states.boundaries, tuple(levels), counts.sum(1).numpy(), eigenvalues, s1)


def _scatters(
    x: Tensor, cells: list[tuple[slice, int, int]], counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums of x x^T [Q, U, d, d] and of x [Q, U, d] over the tokens of each level and unit."""
    levels, units = counts.shape
    d = x.shape[1]
    scatter = torch.zeros(levels, units, d, d, dtype=torch.float64)
    sums = torch.zeros(levels, units, d, dtype=torch.float64)
    for where, u, q in cells:
        scatter[q, u].addmm_(x[where].T, x[where])
        sums[q, u] += x[where].sum(dim=0)
    return scatter.cumsum_(dim=0), sums.cumsum_(dim=0)
