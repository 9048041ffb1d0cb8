"""Matrix entropy: how many directions the states of a layer, or of a set of layers, spread over.

For features X [n, d], K = X X^T and rho = K / tr K (the d x d covariance has the same nonzero
spectrum). Renyi's matrix entropy of order alpha (Giraldo et al. 2015) is
S_alpha = log(tr rho^alpha) / (1 - alpha); S_1 = -tr rho log rho (von Neumann), S_2 = -log tr rho^2
(collision). Everything is in nats and float64.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paperlib.errors import InputError
from paperlib.gram import GramTable

# from eigenvalues


def spectral_entropy(eigenvalues: np.ndarray, alpha: float = 1.0) -> np.ndarray:
    """S_alpha of spectra [..., r]; each is normalised to sum 1, tiny negatives count as zero.

    alpha > 0; 1 is the von Neumann limit. InputError for nan, a zero spectrum, or alpha <= 0.
    """
    if not 0 < alpha < np.inf:
        raise InputError(f"entropy order alpha = {alpha} must be positive and finite")
    values = np.asarray(eigenvalues, dtype=np.float64)
    if not np.isfinite(values).all():
        raise InputError("the spectrum holds nan or inf: check the states (dtype overflow?)")
    values = np.clip(values, 0, None)
    total = values.sum(axis=-1, keepdims=True)
    if (total <= 0).any():
        raise InputError("the spectrum is zero: the states do not vary (constant features?)")
    p = values / total
    if alpha == 1:
        safe = np.where(p > 0, p, 1)
        return -(p * np.log(safe)).sum(axis=-1)
    return np.log((p**alpha).sum(axis=-1)) / (1 - alpha)


def effective_rank(entropy: np.ndarray | float) -> np.ndarray:
    """exp(S_1): the number of equally used directions. Of eigenvalues, not singular values."""
    return np.exp(entropy)


def largest_entropy(tokens: float, hidden_size: int, *, k: int = 1, centred: bool = True) -> float:
    """log of the largest possible rank of k concatenated layers: min(n - 1 if centred, k d)."""
    rank = min(tokens - 1 if centred else tokens, k * hidden_size)
    if rank < 1:
        raise InputError(f"{tokens:g} tokens are too few: no rank is left after centring")
    return float(np.log(rank))


def normalised(
    entropy: np.ndarray | float,
    tokens: float,
    hidden_size: int,
    *,
    k: int = 1,
    centred: bool = True,
) -> np.ndarray:
    """Entropy over its largest possible value, in [0, 1]; nan where that is log 1."""
    bound = largest_entropy(tokens, hidden_size, k=k, centred=centred)
    return np.asarray(entropy) / bound if bound > 0 else np.full_like(np.asarray(entropy), np.nan)


# from features


def eigenvalues(features: Tensor | np.ndarray, *, centred: bool = True) -> np.ndarray:
    """[min(n, d)] eigenvalues of rho, ascending, of features [n, d]: the smaller Gram's."""
    x = _features(features, centred)
    gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
    values = _spectrum(gram)
    return values / values.sum()


def matrix_entropy(
    features: Tensor | np.ndarray,
    alpha: float = 1.0,
    *,
    centred: bool = True,
    compat: str | None = None,
) -> float:
    """S_alpha of features [n, d].

    compat: "information_flow" repeats that code's choices, for comparison only: the token mean is
    taken off, then rows are scaled to unit length, and *matrix entries* (not eigenvalues) below
    zero are set to zero, so that the result depends on which of the two Grams is smaller.
    """
    if compat is None:
        return float(spectral_entropy(eigenvalues(features, centred=centred), alpha))
    if compat != "information_flow":
        raise InputError(f"compat {compat!r} is not known: expected 'information_flow' or None")
    x = _features(features, centred=True)
    x = torch.nn.functional.normalize(x, dim=1)  # a token at the mean stays zero
    gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
    gram = gram.clamp(min=0)
    return float(spectral_entropy(torch.linalg.eigvalsh(gram / gram.trace()).numpy(), alpha))


def per_prompt_entropy(
    features: Tensor | np.ndarray,
    document: np.ndarray,
    alpha: float = 1.0,
    *,
    centred: bool = True,
) -> np.ndarray:
    """[documents] S_alpha of each document's tokens alone; document [n] labels the rows.

    Centring is per document. A document whose rows do not vary (a single one, or one token
    repeated) gives nan.
    """
    x, document = _as_double(features), np.asarray(document)
    if document.shape != (len(x),):
        raise InputError(f"document has shape {document.shape}, expected ({len(x)},): one per row")
    found = []
    for label in np.unique(document):
        rows = x[torch.from_numpy(document == label)]
        varies = len(rows) > 1 and not torch.equal(rows, rows[:1].expand_as(rows))
        found.append(matrix_entropy(rows, alpha, centred=centred) if varies else np.nan)
    return np.array(found)


# concatenation


def concatenation_entropy(
    layers: Sequence[Tensor | np.ndarray],
    alpha: float = 1.0,
    *,
    weights: str = "equal",
    centred: bool = True,
) -> float:
    """S_alpha of the concatenation of k layers' features [n, d_i] along the feature axis.

    weights: "equal" scales every layer to the same trace first; "raw" leaves them as they are, so
    that the largest-norm layer dominates. Uses the mean of the n x n Grams or the covariance of the
    concatenation, whichever is smaller.
    """
    if weights not in ("equal", "raw"):
        raise InputError(f"weights {weights!r} is neither 'equal' nor 'raw'")
    if not len(layers):
        raise InputError("no layers to concatenate")
    parts = [_features(layer, centred) for layer in layers]
    if len({len(x) for x in parts}) > 1:
        raise InputError(f"layers hold {[len(x) for x in parts]} tokens: expected equal numbers")
    if weights == "equal":
        parts = [x / x.norm() for x in parts]
    width = sum(x.shape[1] for x in parts)
    if len(parts[0]) <= width:
        gram = torch.stack([x @ x.T for x in parts]).sum(dim=0)
    else:
        joined = torch.cat(parts, dim=1)
        gram = joined.T @ joined
    return float(spectral_entropy(_spectrum(gram), alpha))


def qjsd(layers: Sequence[Tensor | np.ndarray], *, centred: bool = True) -> float:
    """Quantum Jensen-Shannon divergence of k layers: S_1(mean rho) - mean S_1(rho), in
    [0, log k]. Zero when all layers have the same Gram, log k when they share no direction."""
    single = [matrix_entropy(layer, centred=centred) for layer in layers]
    return concatenation_entropy(layers, centred=centred) - float(np.mean(single))


# from the table: order 2


def collision_entropy(table: GramTable) -> np.ndarray:
    """[L] S_2 of each boundary; nan where a debiased purity is not positive."""
    return _negative_log(table.purity)


def set_purity(table: GramTable, sets: np.ndarray, *, weights: str = "equal") -> np.ndarray:
    """[M] tr rho_S^2 of the concatenated sets [M, k] (positions in the table).

    With trace weights w (1/k each, or t_i / sum t): sum_ij w_i w_j <rho_i, rho_j>, exact.
    """
    sets = np.atleast_2d(np.asarray(sets))
    if not np.issubdtype(sets.dtype, np.integer):
        raise InputError(f"sets hold {sets.dtype}, expected positions in the table")
    size = len(table.boundaries)
    if sets.size == 0 or sets.min() < 0 or sets.max() >= size:
        raise InputError(f"sets must hold positions 0..{size - 1} of the table's boundaries")
    if weights == "equal":
        matrix, total = table.normalised, np.full(len(sets), float(sets.shape[1]))
    elif weights == "raw":
        matrix, total = table.inner, table.trace[sets].sum(axis=1)
    else:
        raise InputError(f"weights {weights!r} is neither 'equal' nor 'raw'")
    return matrix[sets[:, :, None], sets[:, None, :]].sum(axis=(1, 2)) / total**2


def set_collision_entropy(
    table: GramTable, sets: np.ndarray, *, weights: str = "equal"
) -> np.ndarray:
    """[M] S_2 of the concatenated sets; nan where a debiased purity is not positive."""
    return _negative_log(set_purity(table, sets, weights=weights))


# bounds that the text relies on


def sink_bound(share: float, rank: int) -> float:
    """Largest S_1 when one token holds ``share`` >= 1/rank of the trace (Fano):
    h(c) + (1 - c) log(r - 1)."""
    if not (rank > 1 and 1 / rank <= share <= 1):
        raise InputError(f"share {share} must lie in [1/rank, 1] with rank {rank} > 1")
    binary = -share * np.log(share)
    if share < 1:
        binary -= (1 - share) * np.log(1 - share)
    return float(binary + (1 - share) * np.log(rank - 1))


def _negative_log(purity: np.ndarray) -> np.ndarray:
    return -np.log(np.where(purity > 0, purity, np.nan))


def _features(features: Tensor | np.ndarray, centred: bool) -> Tensor:
    x = _as_double(features)
    if x.ndim != 2:
        raise InputError(f"features have shape {tuple(x.shape)}, expected [n, d]")
    if len(x) < (2 if centred else 1):
        raise InputError(f"{len(x)} tokens are too few: at least 2 are needed")
    if not torch.isfinite(x).all():
        raise InputError("the features hold nan or inf: check the states (dtype overflow?)")
    moved = x - x.mean(dim=0) if centred else x
    if not moved.norm() > 1e-14 * x.norm():  # rounding of the mean is not variation
        raise InputError("the features do not vary: their Gram matrix is zero")
    return moved


def _spectrum(gram: Tensor) -> np.ndarray:
    """Eigenvalues, ascending, without the rounding noise that orders below 1 would blow up."""
    values = torch.linalg.eigvalsh(gram).numpy()
    noise = len(values) * np.finfo(np.float64).eps * values[-1]
    return np.where(values > noise, values, 0)


def _as_double(features: Any) -> Tensor:
    return torch.as_tensor(features).double()
