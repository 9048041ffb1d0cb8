"""Notebook 05: what every method chooses, how sure that is, and what it is worth to a probe."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import spearmanr

from paperlib import files
from paperlib.boundaries import default_boundaries
from paperlib.cka import compartments, linear_cka
from paperlib.entropy import collision_entropy
from paperlib.errors import InputError
from paperlib.filtering import usable_tokens
from paperlib.gram import GramStatistics, GramTable, gram_statistics
from paperlib.probe import (
    ProbeScore,
    best_of,
    correlations,
    greedy_probe,
    relevance_minus_redundancy,
    ridge_probe,
)
from paperlib.selection import (
    BASELINES,
    CRITERIA,
    METHODS,
    Constraints,
    Selection,
    SetSpectra,
    exhaustive_s2,
    greedy_s1,
    landscape,
    one_per_compartment,
    random_sets,
    s2,
    screened_s1,
    shortlist,
    stability,
)
from paperlib.study.source import Run, source_key, states_of, target_of

K = 3
SIZES = range(1, 7)
SHORTLIST = 30


def limits_of(last: int) -> Constraints:
    """Inner boundaries: 0 and N are beyond the reach of several engines."""
    return Constraints(allowed=tuple(range(1, last)), num_layers=last)


def table_methods(gram: GramStatistics) -> dict[str, Callable[..., Selection]]:
    """Every method that reads one table, under one signature (table, k, constraints)."""

    def by_compartment(table: GramTable, k: int, *, constraints: Constraints) -> Selection:
        found = compartments(linear_cka(table), segments=k)
        return one_per_compartment(table, found.segments, constraints=constraints)

    return {**METHODS, "one-per-compartment": by_compartment}


def choices(run: Run, masks: dict[str, tuple[GramStatistics, int]]) -> pd.DataFrame:
    """The set of every method on the debiased table of every filter, with bootstrap stability.

    masks: filter name -> statistics and which of its masks. Columns: filter, method, boundaries,
    share (of resamples that agree within one boundary), stable, frequency (of each boundary).
    """

    def compute(out: Path) -> None:
        rows = []
        for name, (gram, q) in masks.items():
            table, resampled = gram.table(q, debiased=True), gram.resampled(q, debiased=True)
            limits = limits_of(gram.boundaries[-1])
            for method, function in table_methods(gram).items():
                found = stability(table, resampled, function, K, constraints=limits, tolerance=1)
                rows.append(
                    {
                        "filter": name,
                        "method": method,
                        "boundaries": list(found.selection.layers),
                        "share": found.share,
                        "stable": found.stable,
                        "frequency": list(found.boundaries.values()),
                    }
                )
        files.write_json(out, rows)

    p = run.parameters
    key = {
        **source_key(p),
        "resamples": p.resamples,
        "masks": {name: gram.levels[q] for name, (gram, q) in masks.items()},
        "methods": [*METHODS, "one-per-compartment"],
    }
    rows = json.loads(run.measured("choices", key, compute, suffix=".json").read_text())
    for row in rows:
        row["boundaries"] = tuple(row["boundaries"])
    return pd.DataFrame(rows)


def spectral_choices(run: Run) -> dict[str, tuple[int, ...]]:
    """Order 1: greedy S_1, and the best S_1 among the sets of largest S_2, on a token sample."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        pool = np.flatnonzero(usable_tokens(states))
        rng = np.random.default_rng(p.seed)
        rows = np.sort(rng.choice(pool, min(p.sampled_tokens, len(pool)), replace=False))
        level = np.full(states.tokens, -1)
        level[rows] = 0
        table = gram_statistics(states, level, progress=False).table()
        spectrum = SetSpectra(states.states, states.boundaries, rows=rows)
        limits = limits_of(states.num_layers)
        chosen = {
            "s1-greedy": greedy_s1(table, K, spectrum.s1, constraints=limits),
            "s1-screened": screened_s1(table, K, spectrum.s1, constraints=limits, count=SHORTLIST),
            "s2 (same tokens)": exhaustive_s2(table, K, constraints=limits),
        }
        record = {
            name: {"boundaries": list(c.layers), "s1": spectrum.s1(c.layers.boundaries)}
            for name, c in chosen.items()
        }
        files.write_json(out, record)

    key = {**source_key(p), "sampled_tokens": p.sampled_tokens, "k": K, "count": SHORTLIST}
    found = run.measured("spectral-choices", key, compute, suffix=".json")
    return {name: tuple(c["boundaries"]) for name, c in json.loads(found.read_text()).items()}


def probed_sets(run: Run, gram: GramStatistics, named: list[tuple[int, ...]]) -> dict[str, Any]:
    """Held-out probe scores of random sets, baselines and ``named`` sets, and the probe's choices.

    Returns {"scores": [ProbeScore], "chosen": {method: boundaries}, "embedding_r2": float,
    "agreement": {set: share}}.
    """
    p = run.parameters
    last = gram.boundaries[-1]
    limits = limits_of(last)
    baselines = [rule(last, K).boundaries for rule in BASELINES.values() if _possible(rule, last)]
    drawn = [
        s.boundaries for s in random_sets(last, K, p.probe_sets, seed=p.seed, constraints=limits)
    ]
    sets = sorted({*baselines, *drawn, *named})

    def compute(out: Path) -> None:
        states = states_of(p)
        probe = ridge_probe(
            states, usable=usable_tokens(states), project=p.probe_dimensions, seed=p.seed
        )
        candidates = shortlist(gram.table(0, debiased=True), K, count=SHORTLIST, constraints=limits)
        listed = [c.boundaries for c in candidates]
        chosen: dict[str, tuple[int, ...]] = {
            "probe-greedy": greedy_probe(probe, K, constraints=limits).layers.boundaries,
            "probe-of-shortlist": listed[best_of(probe, listed)],
            "relevance-redundancy": relevance_minus_redundancy(
                probe, K, constraints=limits
            ).layers.boundaries,
        }
        target = target_of(p.target)
        scores = [probe.score(s) for s in sorted({*sets, *chosen.values()})]
        record = {
            "chosen": {name: list(b) for name, b in chosen.items()},
            "embedding_r2": probe.score(()).r2,
            "agreement": [
                [list(b), probe.agreement(b, target.logits_from_prenorm)]
                for b in sorted({*baselines, *chosen.values(), *named})
            ],
            "scores": [
                {
                    **{k: v for k, v in s.__dict__.items() if k not in ("errors", "totals")},
                    "errors": s.errors.tolist(),
                    "totals": s.totals.tolist(),
                }
                for s in scores
            ],
        }
        files.write_json(out, record)

    key = {
        **source_key(p),
        "dimensions": p.probe_dimensions,
        "sets": [list(s) for s in sets],
        "shortlist": SHORTLIST,
    }
    record = json.loads(run.measured("probe", key, compute, suffix=".json").read_text())
    return {
        "chosen": {name: tuple(b) for name, b in record["chosen"].items()},
        "embedding_r2": record["embedding_r2"],
        "agreement": {tuple(b): share for b, share in record["agreement"]},
        "scores": [
            ProbeScore(
                **{
                    **s,
                    "boundaries": tuple(s["boundaries"]),
                    "interval": tuple(s["interval"]),
                    "errors": np.array(s["errors"]),
                    "totals": np.array(s["totals"]),
                }
            )
            for s in record["scores"]
        ],
    }


def _possible(rule: Callable[..., Any], last: int) -> bool:
    try:
        return bool(rule(last, K))
    except InputError:
        return False


def selection_table(
    chosen: pd.DataFrame, others: dict[str, tuple[int, ...]], gram: GramStatistics, probe: dict
) -> pd.DataFrame:
    """One row for each (filter, method): its set and what every criterion says of it."""
    table = gram.table(0, debiased=True)
    last = gram.boundaries[-1]
    entropy, cka = collision_entropy(table), linear_cka(table)
    joint = s2(table)
    scores = {s.boundaries: s for s in probe["scores"]}
    rows = []
    entries = [(r.filter, r.method, r.boundaries, r.share) for r in chosen.itertuples()]
    entries += [("none", name, b, np.nan) for name, b in {**others, **probe["chosen"]}.items()]
    entries += [
        ("none", f"rule: {name}", rule(last, K).boundaries, np.nan)
        for name, rule in BASELINES.items()
        if _possible(rule, last)
    ]
    for name, method, boundaries, share in entries:
        at = [table.boundaries.index(b) for b in boundaries]
        pairs = cka[np.ix_(at, at)][np.triu_indices(len(at), 1)]
        score = scores.get(boundaries)
        rows.append(
            {
                "filter": name,
                "method": method,
                "set": str(list(boundaries)),
                "same set in resamples": share,
                "S_2 of the set": float(joint(np.array([at]))[0]),
                "mean S_2": float(entropy[at].mean()),
                "mean CKA": float(pairs.mean()),
                "probe R2": score.r2 if score else np.nan,
                "probe low": score.interval[0] if score else np.nan,
                "probe high": score.interval[1] if score else np.nan,
                "argmax agreement": probe["agreement"].get(boundaries, np.nan),
            }
        )
    return pd.DataFrame(rows)


def landscape_frame(gram: GramStatistics) -> pd.DataFrame:
    """All triples: mean entropy, mean CKA, and S_2 of the set, on the debiased table."""
    table = gram.table(0, debiased=True)
    limits = limits_of(gram.boundaries[-1])
    joint = landscape(table, K, constraints=limits)
    informative = landscape(table, K, CRITERIA["entropy"], constraints=limits)
    diverse = landscape(table, K, CRITERIA["cka"], constraints=limits)
    return pd.DataFrame(
        {
            **{f"b{i + 1}": joint.sets[:, i] for i in range(K)},
            "mean_entropy": informative.scores,
            "mean_cka": -diverse.scores,
            "set_entropy": joint.scores,
        }
    )


def default_ranks(gram: GramStatistics) -> pd.DataFrame:
    """Where the default rule stands among all triples, by each criterion, with 90 % intervals."""
    last = gram.boundaries[-1]
    limits = limits_of(last)
    rule = default_boundaries(last)
    rows = []
    for name, criterion in CRITERIA.items():
        found = landscape(gram.table(0, debiased=True), K, criterion, constraints=limits)
        draws = [
            landscape(t, K, criterion, constraints=limits).rank_of(rule)
            for t in gram.resampled(0, debiased=True)
        ]
        low, high = np.quantile(draws, (0.05, 0.95)) if draws else (np.nan, np.nan)
        rows.append(
            {
                "criterion": name,
                "rank": found.rank_of(rule),
                "of": len(found.scores),
                "low": low,
                "high": high,
                "beaten": 1 - (found.rank_of(rule) - 1) / len(found.scores),
            }
        )
    return pd.DataFrame(rows)


def size_frame(gram: GramStatistics, seed: int) -> pd.DataFrame:
    """S_2 of the best set of each size, of the uniform rule, and of random sets."""
    table = gram.table(0, debiased=True)
    last = gram.boundaries[-1]
    limits = limits_of(last)
    score = s2(table)

    def value(boundaries: tuple[int, ...]) -> float:
        return float(score(np.array([[table.boundaries.index(b) for b in boundaries]]))[0])

    rows: list[list[Any]] = []
    for k in SIZES:
        if k > last - 1:
            break
        rows.append([k, "best set", exhaustive_s2(table, k, constraints=limits).score])
        rows.append([k, "uniform rule", value(BASELINES["uniform"](last, k).boundaries)])
        rows.append([k, "last k", value(tuple(range(last - k, last)))])
        drawn = random_sets(last, k, 200, seed=seed, constraints=limits)
        rows.append(
            [k, "random sets (median)", float(np.median([value(s.boundaries) for s in drawn]))]
        )
    return pd.DataFrame(rows, columns=["k", "sets", "entropy"])


def correlation_frame(
    probe: dict, gram: GramStatistics, filtered: GramTable, seed: int
) -> pd.DataFrame:
    """Spearman correlation of every criterion with the held-out probe, trivial ones included."""
    table = gram.table(0, debiased=True)
    scores = probe["scores"]
    at = np.array([[table.boundaries.index(b) for b in s.boundaries] for s in scores])
    criteria = {
        "$S_2$ of the set": s2(table)(at),
        "$S_2$, filtered tokens": s2(filtered)(at),
        "mean $S_2$": CRITERIA["entropy"](table)(at),
        "minus mean CKA": CRITERIA["cka"](table)(at),
        "mRMR difference": CRITERIA["mrmr-difference"](table)(at),
        "DPP": CRITERIA["dpp"](table)(at),
    }
    found = correlations(scores, criteria, seed=seed)
    rows = [[c.criterion, c.rho, *c.interval] for c in found]
    return pd.DataFrame(rows, columns=["criterion", "rho", "low", "high"])


def agreement_of_orders(frame: pd.DataFrame, gram: GramStatistics) -> float:
    """Spearman correlation between S_2 of all triples, debiased and plug-in."""
    limits = limits_of(gram.boundaries[-1])
    plug_in = landscape(gram.table(0), K, constraints=limits).scores
    return float(spearmanr(frame["set_entropy"], plug_in)[0])


def frequency_frame(chosen: pd.DataFrame) -> pd.DataFrame:
    """Tidy table: method (with its filter), boundary, frequency, chosen."""
    rows = []
    for row in chosen.itertuples():
        name = str(row.method) if row.filter == "none" else f"{row.method}, {row.filter}"
        for boundary, frequency in enumerate(row.frequency):
            rows.append([name, boundary, frequency, boundary in row.boundaries])
    return pd.DataFrame(rows, columns=["method", "boundary", "frequency", "chosen"])


def marked_sets(table: pd.DataFrame) -> pd.DataFrame:
    """The sets worth a marker in the landscape, one for each distinct set, names joined."""
    wanted = {
        "s2": "best $S_2$",
        "entropy": "top entropy",
        "cka": "least CKA",
        "loes": "LOES",
        "one-per-compartment": "one per compartment",
        "rule: default": "default rule",
        "rule: late": "late",
        "relevance-redundancy": "relevance - redundancy",
        "probe-greedy": "probe, greedy",
    }
    part = table[(table["filter"] == "none") & table["method"].isin(wanted)]
    rows = []
    for chosen, same in part.groupby("set", sort=False):
        names = " = ".join(wanted[m] for m in same["method"])
        first = same.iloc[0]
        rows.append([f"{names} {chosen}", first["mean S_2"], first["mean CKA"]])
    return pd.DataFrame(rows, columns=["name", "mean_entropy", "mean_cka"])


def probe_points(probe: dict, gram: GramStatistics) -> pd.DataFrame:
    """S_2 and held-out probe score of every probed set, told apart by how it came about."""
    table = gram.table(0, debiased=True)
    joint, last = s2(table), gram.boundaries[-1]
    rules = {rule(last, K).boundaries for rule in BASELINES.values() if _possible(rule, last)}
    default = default_boundaries(last).boundaries if last >= 7 else None
    rows = []
    for score in probe["scores"]:
        at = np.array([[table.boundaries.index(b) for b in score.boundaries]])
        kind = "random or chosen set"
        if score.boundaries == default:
            kind = "default rule"
        elif score.boundaries in rules:
            kind = "other fixed rule"
        elif score.boundaries in probe["chosen"].values():
            kind = "chosen by the probe"
        rows.append([str(list(score.boundaries)), float(joint(at)[0]), score.r2, kind])
    points = pd.DataFrame(rows, columns=["set", "set_entropy", "r2", "kind"])
    order = ["random or chosen set", "other fixed rule", "chosen by the probe", "default rule"]
    return points.sort_values(
        "kind", key=lambda c: c.map(order.index), kind="stable", ignore_index=True
    )
