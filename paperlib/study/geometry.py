"""Notebook 03: CKA across boundaries and the compartments that it supports."""

import numpy as np
import pandas as pd

from paperlib.cka import compartment_stability, compartments, linear_cka
from paperlib.gram import GramStatistics

ESTIMATORS = {"biased": False, "debiased": True}


def cka_frame(gram: GramStatistics, masks: tuple[str, ...]) -> pd.DataFrame:
    """Tidy CKA maps of the data for every mask and estimator."""
    parts = []
    for level, tokens in enumerate(masks):
        for estimator, debiased in ESTIMATORS.items():
            matrix = linear_cka(gram.table(level, debiased=debiased))
            first, second = np.meshgrid(gram.boundaries, gram.boundaries, indexing="ij")
            parts.append(
                pd.DataFrame(
                    {
                        "tokens": tokens,
                        "estimator": estimator,
                        "first": first.ravel(),
                        "second": second.ravel(),
                        "cka": matrix.ravel(),
                    }
                )
            )
    return pd.concat(parts, ignore_index=True)


def resampled_maps(gram: GramStatistics, level: int, *, debiased: bool = True) -> np.ndarray:
    """[R, L, L] CKA maps of the bootstrap resamples of documents."""
    return np.stack([linear_cka(t) for t in gram.resampled(level, debiased=debiased)])


def segments(gram: GramStatistics, masks: tuple[str, ...]) -> pd.DataFrame:
    """The compartments of every map; boundaries, both ends included."""
    rows = []
    for level, tokens in enumerate(masks):
        for estimator, debiased in ESTIMATORS.items():
            found = compartments(linear_cka(gram.table(level, debiased=debiased)))
            for number, (start, stop) in enumerate(found.segments, start=1):
                ends = gram.boundaries[start], gram.boundaries[stop - 1]
                rows.append([tokens, estimator, number, *ends])
    columns = ["tokens", "estimator", "compartment", "start", "stop"]
    return pd.DataFrame(rows, columns=columns)


def segment_frames(gram: GramStatistics) -> tuple[pd.DataFrame, pd.DataFrame, float]:
    """Stability of the compartments (debiased, sinks dropped) over document resamples: how often
    one begins within one boundary of each boundary, how many there are, and the evidence."""
    found = compartments(linear_cka(gram.table(0, debiased=True)))
    near, numbers = compartment_stability(resampled_maps(gram, 0))
    changes = pd.DataFrame(
        {
            "boundary": gram.boundaries[1:],
            "frequency": near[1:],
            "chosen": [i in found.starts for i in range(1, len(gram.boundaries))],
        }
    )
    counts = pd.DataFrame(
        {
            "segments": list(numbers),
            "frequency": list(numbers.values()),
            "chosen": [m == len(found.segments) for m in numbers],
        }
    )
    return changes, counts, found.evidence


def evidence_frame(gram: GramStatistics, masks: tuple[str, ...]) -> pd.DataFrame:
    """How much more scatter the compartments remove than a drift would, debiased, for every mask,
    over all boundaries and over the inner ones: the ends are near-singletons that no segment of two
    can hold apart, so the rule is sensitive to them."""
    rows = []
    for level, tokens in enumerate(masks):
        cka = linear_cka(gram.table(level, debiased=True))
        for name, part in (("all", cka), ("inner", cka[1:-1, 1:-1])):
            found = compartments(part)
            rows.append([tokens, name, len(found.segments), found.evidence])
    return pd.DataFrame(rows, columns=["tokens", "boundaries", "compartments", "evidence"])
