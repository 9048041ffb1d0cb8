"""Notebook 02: entropy of concatenated boundaries, and its split into mean and complementarity."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from paperlib import files
from paperlib.entropy import collision_entropy, set_collision_entropy, spectral_entropy
from paperlib.filtering import usable_tokens
from paperlib.gram import GramStatistics, GramTable, gram_statistics
from paperlib.study.source import Run, source_key, states_of


def sampled_grams(run: Run, tokens: int) -> np.ndarray:
    """[L, n, n] trace-normalised centred Grams of n usable tokens, drawn with the run's seed."""
    states = states_of(run.parameters)
    pool = np.flatnonzero(usable_tokens(states))
    rng = np.random.default_rng(run.parameters.seed)
    chosen = torch.from_numpy(np.sort(rng.choice(pool, min(tokens, len(pool)), replace=False)))
    grams = []
    for layer in states.states:
        x = layer[chosen].double()
        x -= x.mean(dim=0)
        gram = x @ x.T
        grams.append((gram / gram.trace()).numpy())
    return np.stack(grams)


def spacings(last: int) -> tuple[int, ...]:
    """Distances between the members of the triples that are followed over depth."""
    return tuple(sorted({1, max(1, last // 6), max(1, last // 3)}))


def set_entropies(run: Run, spacings: Sequence[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """S_1 of all pairs, and of triples b - g, b, b + g for each spacing g, on a token sample.

    By the sum identity the Gram of a concatenation is the mean of its trace-normalised Grams, so
    one n x n eigenproblem serves a set of any size. Returns the pairs (first, second, entropy,
    complementarity) and the triples (spacing, middle, mean_entropy, entropy); complementarity is
    QJSD / log 2.
    """
    p = run.parameters

    def compute(out: Path) -> None:
        grams = sampled_grams(run, p.sampled_tokens)
        count = len(grams)

        def s1(members: tuple[int, ...]) -> float:
            values = np.linalg.eigvalsh(grams[list(members)].mean(axis=0))
            return float(spectral_entropy(np.clip(values, 0, None), 1.0))

        single = [s1((i,)) for i in range(count)]
        pairs = [[i, j, s1((i, j))] for i, j in itertools.combinations(range(count), 2)]
        triples = [[g, b, s1((b - g, b, b + g))] for g in spacings for b in range(g, count - g)]
        record = {"tokens": grams.shape[1], "single": single, "pairs": pairs, "triples": triples}
        files.write_json(out, record)

    key = {**source_key(p), "sampled_tokens": p.sampled_tokens, "spacings": list(spacings)}
    record = json.loads(run.measured("set-entropies", key, compute, suffix=".json").read_text())
    single = np.array(record["single"])
    rows = []
    for i, j, entropy in record["pairs"]:
        gain = (entropy - (single[i] + single[j]) / 2) / np.log(2)
        rows += [[i, j, entropy, gain], [j, i, entropy, gain]]
    rows += [[i, i, entropy, 0.0] for i, entropy in enumerate(single)]
    pairs = pd.DataFrame(rows, columns=["first", "second", "entropy", "complementarity"])
    triples = pd.DataFrame(
        [[g, b, single[[b - g, b, b + g]].mean(), entropy] for g, b, entropy in record["triples"]],
        columns=["spacing", "middle", "mean_entropy", "entropy"],
    ).astype({"spacing": int, "middle": int})
    return pairs.sort_values(["first", "second"], ignore_index=True), triples


def identity_error(run: Run, tokens: int = 128) -> float:
    """Largest relative error, over all triples, of
    exp(-S_2(S)) = (1/9) [sum p_i + 2 sum sqrt(p_i p_j) CKA_ij]
    against the purity of the features really concatenated; ``tokens`` states, in float64."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        pool = np.flatnonzero(usable_tokens(states))
        level = np.full(states.tokens, -1)
        level[pool[:: max(1, len(pool) // tokens)][:tokens]] = 0
        table = gram_statistics(states, level, progress=False).table()
        x = states.states[:, torch.from_numpy(np.flatnonzero(level == 0))].double()
        x -= x.mean(dim=1, keepdim=True)
        x /= x.square().sum(dim=(1, 2), keepdim=True).sqrt()  # equal traces
        worst = 0.0
        for members in itertools.combinations(range(len(x)), 3):
            joined = torch.cat([x[i] for i in members], dim=1)  # [n, 3 d]
            gram = joined @ joined.T
            direct = float(gram.square().sum() / gram.trace() ** 2)
            worst = max(worst, abs(unified_purity(table, members) / direct - 1))
        files.write_json(out, {"worst": worst})

    key = {**source_key(p), "identity_tokens": tokens}
    return json.loads(run.measured("identity", key, compute, suffix=".json").read_text())["worst"]


def unified_purity(table: GramTable, members: Sequence[int]) -> float:
    """(1/k^2) [sum p_i + 2 sum_{i<j} sqrt(p_i p_j) CKA_ij]; members are positions in the table."""
    p = table.purity
    scale = np.sqrt(np.diag(table.inner))
    cka = table.inner / np.outer(scale, scale)
    total = sum(p[i] for i in members)
    for i, j in itertools.combinations(members, 2):
        total += 2 * np.sqrt(p[i] * p[j]) * cka[i, j]
    return float(total / len(members) ** 2)


def triple_sets(
    gram: GramStatistics, named: dict[str, tuple[int, ...]], bins: int = 60
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Histogram of debiased S_2 over all triples of boundaries, and the place of named sets."""
    table = gram.table(level=0, debiased=True)
    sets = np.array(list(itertools.combinations(range(len(table.boundaries)), 3)))
    entropy = set_collision_entropy(table, sets)
    counts, edges = np.histogram(entropy, bins=bins)
    histogram = pd.DataFrame({"low": edges[:-1], "high": edges[1:], "sets": counts})
    ids = np.array(table.boundaries)
    best, worst = sets[entropy.argmax()], sets[entropy.argmin()]
    marked = {"highest": tuple(ids[best]), **named, "lowest": tuple(ids[worst])}
    rows = []
    for name, boundaries in marked.items():
        positions = [table.boundaries.index(int(b)) for b in boundaries]
        value = float(set_collision_entropy(table, np.array([positions]))[0])
        rank = 1 + int((entropy > value).sum())
        rows.append([name, str([int(b) for b in boundaries]), value, rank, len(sets)])
    columns = ["name", "set", "entropy", "rank", "of"]
    return histogram, pd.DataFrame(rows, columns=columns)


def best_boundary(gram: GramStatistics) -> int:
    """The boundary with the highest debiased S_2."""
    table = gram.table(level=0, debiased=True)
    return int(table.boundaries[int(np.nanargmax(collision_entropy(table)))])
