"""TokenStates made from arrays, for tests that need no model."""

from pathlib import Path

import numpy as np
import torch

from paperlib.capture import TokenStates


def states_from(
    features: np.ndarray, document: np.ndarray | None = None, **facts: np.ndarray
) -> TokenStates:
    """features [L, n, d] float64; one document unless ``document`` [n] says otherwise."""
    size, n, _ = features.shape
    document = np.zeros(n, dtype=int) if document is None else np.asarray(document)
    position = np.zeros(n, dtype=int)
    for i in np.unique(document):
        position[document == i] = np.arange((document == i).sum())
    values = {
        "rms": np.sqrt((features**2).mean(axis=2)),
        "entropy": np.linspace(0, 5, n),
        "position": position,
        "token": np.arange(n),
        "special": np.zeros(n, dtype=bool),
    }
    return TokenStates(
        path=Path("memory"),
        boundaries=tuple(range(size)),
        num_layers=size - 1,
        states=torch.from_numpy(features),
        document=document,
        documents=tuple(f"doc{i}" for i in np.unique(document)),
        provenance={"target": "arrays", "fingerprint": "0", "content": "0", "dtype": "float64"},
        **{**values, **facts},
    )
