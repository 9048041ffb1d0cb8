"""Which tokens enter the statistics.

Structure first, entropy second: the first position, special tokens and massive-norm tokens
(attention sinks) are dropped *before* the entropy quantile is taken, because the first position
has high predictive entropy and an entropy filter alone would keep it.

Every filter is a sequence of nested masks, written as one integer per token (the first mask that
contains it, -1 for none), so that one pass of ``gram_statistics`` measures all of them. Beside each
stands ``random_levels``: subsets of equal sizes drawn at random from the same pool, since fewer
tokens alone lower a plug-in entropy and raise a biased CKA.
"""

from collections.abc import Sequence

import numpy as np

from paperlib.capture import TokenStates
from paperlib.errors import InputError
from paperlib.gram import norm_outliers

MIN_ROWS = 64  # a mask with fewer tokens is refused


def usable_tokens(
    states: TokenStates,
    *,
    drop_first: bool = True,
    drop_special: bool = True,
    outlier_factor: float = 3.0,
    shift: int = 0,
) -> np.ndarray:
    """[n] bool: the pool that a filter draws from.

    drop_first: position 0. drop_special: BOS, EOS and chat-template tokens.
    outlier_factor: drop tokens whose RMS exceeds this times the median of any boundary; 0 keeps
    them. shift: 1 also drops each document's last token, which has no successor to be scored by.
    """
    pool = np.ones(states.tokens, dtype=bool)
    if drop_first:
        pool &= states.position > 0
    if drop_special:
        pool &= ~states.special
    if outlier_factor:
        pool &= ~norm_outliers(states.rms, outlier_factor)
    if shift:
        pool &= np.isfinite(shifted_entropy(states, shift))
    return pool


def shifted_entropy(states: TokenStates, shift: int = 0) -> np.ndarray:
    """[n] nats: predictive entropy at position t + shift of the same document; nan past its end.

    shift 0 scores a state by the distribution it predicts (the token at t + 1). A draft head that
    reads the state at t proposes the token at t + 2: that is shift 1.
    """
    if shift not in (0, 1):
        raise InputError(f"shift {shift} is neither 0 (entropy at t) nor 1 (entropy at t + 1)")
    if not shift:
        return states.entropy
    scores = np.full(states.tokens, np.nan)
    follows = states.document[:-1] == states.document[1:]
    scores[:-1][follows] = states.entropy[1:][follows]
    return scores


def entropy_levels(
    states: TokenStates, pool: np.ndarray, keep: Sequence[float], *, shift: int = 0
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Keep the shares ``keep`` of the pool with the highest predictive entropy.

    keep: ascending shares in (0, 1], e.g. (0.25, 0.5, 1.0). Ties go to the earlier token.
    Returns the level [n] of each token and the labels of the masks.
    """
    sizes = _sizes(keep, pool)
    scores = shifted_entropy(states, shift)
    ranked = np.flatnonzero(pool)[np.argsort(-scores[pool], kind="stable")]
    return _levels(ranked, sizes, states.tokens), tuple(f"top {share:.0%}" for share in keep)


def threshold_levels(
    states: TokenStates, pool: np.ndarray, nats: Sequence[float], *, shift: int = 0
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Keep the tokens of the pool with predictive entropy above each of ``nats``, descending."""
    if not nats or list(nats) != sorted(set(nats), reverse=True):
        raise InputError(f"entropy thresholds {list(nats)} must be descending, without repeats")
    scores = shifted_entropy(states, shift)
    ranked = np.flatnonzero(pool)[np.argsort(-scores[pool], kind="stable")]
    sizes = [int((scores[pool] > limit).sum()) for limit in nats]
    _check(sizes, [f"> {limit:g} nats" for limit in nats])
    return _levels(ranked, sizes, states.tokens), tuple(f"> {limit:g} nats" for limit in nats)


def random_levels(
    pool: np.ndarray, keep: Sequence[float], seed: int
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Nested random subsets of the pool with the sizes that ``entropy_levels`` gives."""
    sizes = _sizes(keep, pool)
    ranked = np.random.default_rng(seed).permutation(np.flatnonzero(pool))
    return _levels(ranked, sizes, len(pool)), tuple(f"random {share:.0%}" for share in keep)


def _sizes(keep: Sequence[float], pool: np.ndarray) -> list[int]:
    shares = list(keep)
    if not shares or shares != sorted(set(shares)) or shares[0] <= 0 or shares[-1] > 1:
        raise InputError(f"shares to keep {shares} must ascend within (0, 1], without repeats")
    sizes = [round(share * int(pool.sum())) for share in shares]
    _check(sizes, [f"{share:.0%}" for share in shares])
    return sizes


def _check(sizes: Sequence[int], labels: Sequence[str]) -> None:
    for size, label in zip(sizes, labels, strict=True):
        if size < MIN_ROWS:
            raise InputError(
                f"the filter {label} leaves {size} tokens, at least {MIN_ROWS} are needed: "
                "keep a larger share or capture more text"
            )


def _levels(ranked: np.ndarray, sizes: Sequence[int], tokens: int) -> np.ndarray:
    level = np.full(tokens, -1)
    for q in reversed(range(len(sizes))):
        level[ranked[: sizes[q]]] = q
    return level


def few_rows(size: int, hidden_size: int) -> str | None:
    """A remark when a mask has fewer tokens than dimensions, else None."""
    if size >= hidden_size:
        return None
    return (
        f"{size} tokens for {hidden_size} dimensions: biased CKA and plug-in entropy say more "
        "about the sample size than about the layers; read the debiased ones"
    )
