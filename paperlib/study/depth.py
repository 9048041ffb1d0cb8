"""Notebook 01: entropy over depth, with and without massive tokens."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from paperlib import files
from paperlib.entropy import collision_entropy, per_prompt_entropy
from paperlib.gram import GramStatistics, norm_outliers
from paperlib.spectra import Spectra, spectra
from paperlib.study.source import FACTORS, MASKS, Run, mask_levels, source_key, states_of, target_of


def layer_spectra(run: Run) -> Spectra:
    """Spectra of every boundary, for every mask, with document bootstraps of S_1."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        spectra(
            states,
            mask_levels(states),
            levels=MASKS,
            resamples=p.spectral_resamples,
            seed=p.seed,
        ).save(out)

    key = {**source_key(p), "masks": FACTORS, "resamples": p.spectral_resamples}
    return Spectra.load(run.measured("layer-spectra", key, compute))


def document_entropies(run: Run) -> np.ndarray:
    """[masks, L, documents] S_1 of each document by itself, in nats."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        values = []
        level = mask_levels(states)
        for mask in (level <= q for q in range(len(MASKS))):
            per_layer = [
                per_prompt_entropy(layer[mask].double(), states.document[mask])
                for layer in states.states
            ]
            values.append(np.stack(per_layer))
        with files.replacing(out) as temporary, open(temporary, "wb") as stream:
            np.savez_compressed(stream, entropy=np.stack(values))

    key = {**source_key(p), "masks": FACTORS}
    with np.load(run.measured("document-entropies", key, compute)) as archive:
        return archive["entropy"]


def entropy_frame(
    gram: GramStatistics, spectrum: Spectra, documents: np.ndarray, seed: int
) -> pd.DataFrame:
    """Tidy table of ``plotting.entropy_depth``; bands are 95 % intervals over documents."""
    rng = np.random.default_rng(seed)
    rows: list[pd.DataFrame] = []

    def add(
        measure: str, tokens: str, value: np.ndarray, low: np.ndarray, high: np.ndarray
    ) -> None:
        columns = {"boundary": gram.boundaries, "value": value, "low": low, "high": high}
        rows.append(pd.DataFrame({"measure": measure, "tokens": tokens, **columns}))

    for level, tokens in enumerate(MASKS):
        add("$S_1$, pooled", tokens, spectrum.s1[level, 0], *interval(spectrum.s1[level]))
    for level, tokens in enumerate(MASKS):
        draws = [collision_entropy(gram.table(level, r)) for r in range(1 + gram.resamples)]
        add("$S_2$, pooled", tokens, draws[0], *interval(np.stack(draws)))
    for level, tokens in enumerate(MASKS):
        each = documents[level]  # [L, documents]
        picks = rng.integers(each.shape[1], size=(1000, each.shape[1]))
        means = np.nanmean(each[:, picks], axis=2)  # [L, 1000]
        low, high = np.quantile(means, (0.025, 0.975), axis=1)
        add("$S_1$, mean over documents", tokens, np.nanmean(each, axis=1), low, high)
    return pd.concat(rows, ignore_index=True)


def interval(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """draws [1 + R, L], the data first -> estimate -+ 1.96 bootstrap standard errors, each [L].

    Not percentiles: a document drawn twice adds nothing new, so the plug-in entropy of a resample
    lies below that of the data, and their quantiles would miss the estimate itself.
    """
    error = np.nanstd(draws[1:], axis=0) if len(draws) > 2 else np.zeros_like(draws[0])
    return draws[0] - 1.96 * error, draws[0] + 1.96 * error


def norms(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Where massive norms sit: RMS over depth by group of tokens, and what the tokens are."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        tokenizer = target_of(p.target).tokenizer
        massive = norm_outliers(states.rms)
        pieces = np.array([tokenizer.decode([int(t)]) for t in states.token])
        kinds = np.array([_kind(piece) for piece in pieces], dtype=object)
        kinds[states.position == 0] = "first position"
        kinds[states.special & (states.position > 0)] = "special"
        groups = {
            "first position": states.position == 0,
            "other massive tokens": massive & (states.position > 0),
            "all other tokens": ~massive & (states.position > 0),
        }
        depth = {
            name: np.median(states.rms[:, chosen], axis=1)
            for name, chosen in groups.items()
            if chosen.any()
        }
        table = [
            {
                "kind": kind,
                "outliers": int((massive & (kinds == kind)).sum()),
                "tokens": int((kinds == kind).sum()),
            }
            for kind in KINDS
        ]
        files.write_json(
            out,
            {
                "boundaries": list(states.boundaries),
                "rms": {name: [float(v) for v in values] for name, values in depth.items()},
                "kinds": table,
            },
        )

    record = json.loads(run.measured("norms", source_key(p), compute, suffix=".json").read_text())
    depth = pd.concat(
        [
            pd.DataFrame({"group": name, "boundary": record["boundaries"], "rms": values})
            for name, values in record["rms"].items()
        ],
        ignore_index=True,
    )
    where = pd.DataFrame(record["kinds"])
    where["share_of_outliers"] = where["outliers"] / max(1, where["outliers"].sum())
    where["share_of_tokens"] = where["tokens"] / where["tokens"].sum()
    return depth, where


KINDS = ("first position", "line break", "punctuation", "word or word piece", "special")


def _kind(piece: str) -> str:
    if "\n" in piece and not piece.strip():
        return "line break"
    return "word or word piece" if any(c.isalnum() for c in piece) else "punctuation"
