"""The table of Gram inner products."""

from dataclasses import dataclass

import numpy as np


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
