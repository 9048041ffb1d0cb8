"""Notebook 04: what keeping only high-entropy tokens does to the statistics."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import spearmanr

from paperlib import files
from paperlib.boundaries import default_boundaries
from paperlib.cka import linear_cka
from paperlib.entropy import collision_entropy
from paperlib.filtering import entropy_levels, random_levels, usable_tokens
from paperlib.gram import GramStatistics, GramTable, gram_statistics, norm_outliers
from paperlib.selection import Constraints, exhaustive_s2, landscape
from paperlib.spectra import Spectra, spectra
from paperlib.study.source import Run, source_key, states_of

KEEP = (0.1, 0.25, 0.5, 0.75, 1.0)
POSITIONS = 16  # of which the entropy is shown one by one


def token_frames(run: Run) -> tuple[pd.DataFrame, pd.DataFrame, dict[float, float]]:
    """Histogram of predictive entropy over the usable tokens, entropy by position, and the entropy
    at which each kept share begins."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        pool = usable_tokens(states)
        positions = range(min(POSITIONS, int(states.position.max()) + 1))
        first = [
            np.quantile(states.entropy[states.position == i], (0.25, 0.5, 0.75)) for i in positions
        ]
        counts, edges = np.histogram(states.entropy[pool], bins=40)
        cuts = np.quantile(states.entropy[pool], [1 - share for share in KEEP])
        with files.replacing(out) as temporary, open(temporary, "wb") as stream:
            np.savez_compressed(
                stream, counts=counts, edges=edges, cuts=cuts, positions=np.array(first)
            )

    with np.load(run.measured("token-entropy", {**source_key(p), "keep": KEEP}, compute)) as a:
        histogram = pd.DataFrame(
            {
                "low": a["edges"][:-1],
                "high": a["edges"][1:],
                "share": a["counts"] / a["counts"].sum(),
            }
        )
        low, middle, high = a["positions"].T
        positions = pd.DataFrame(
            {"position": range(len(low)), "low": low, "median": middle, "high": high}
        )
        cuts = dict(zip(KEEP, a["cuts"].tolist(), strict=True))
    return histogram, positions, cuts


def filtered_gram(run: Run, shift: int) -> GramStatistics:
    """The Gram tables of all kept shares, by entropy at t + shift, with document bootstraps."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        level, labels = entropy_levels(
            states, usable_tokens(states, shift=shift), KEEP, shift=shift
        )
        gram_statistics(
            states,
            level,
            levels=labels,
            resamples=p.resamples,
            seed=p.seed,
            dtype=torch.float32,
        ).save(out)

    key = {**source_key(p), "keep": KEEP, "resamples": p.resamples, "shift": shift}
    return GramStatistics.load(run.measured(f"filtered-gram-{shift}", key, compute))


def random_gram(run: Run, draw: int, shift: int = 0) -> GramStatistics:
    """The same for the draw-th random control: nested random subsets of the same sizes."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        level, labels = random_levels(usable_tokens(states, shift=shift), KEEP, seed=p.seed + draw)
        gram_statistics(states, level, levels=labels, dtype=torch.float32).save(out)

    key = {**source_key(p), "keep": KEEP, "draw": draw, "shift": shift}
    return GramStatistics.load(run.measured(f"random-gram-{draw}", key, compute))


def filtered_spectra(run: Run, kind: str) -> Spectra:
    """Spectra (order 1) of the kept shares; kind "filtered" or "random" (the first control)."""
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        pool = usable_tokens(states)
        level, labels = (
            entropy_levels(states, pool, KEEP)
            if kind == "filtered"
            else random_levels(pool, KEEP, seed=p.seed + 1)
        )
        spectra(states, level, levels=labels).save(out)

    key = {**source_key(p), "keep": KEEP, "kind": kind}
    return Spectra.load(run.measured(f"{kind}-spectra", key, compute))


def summary(table: GramTable, unbiased: GramTable) -> dict[str, float]:
    """What the sweep follows, averaged over boundaries or pairs of them."""
    apart = ~np.eye(len(table.boundaries), dtype=bool)
    return {
        "$S_2$, plug-in": float(collision_entropy(table).mean()),
        "$S_2$, debiased": float(collision_entropy(unbiased).mean()),
        "CKA, biased": float(linear_cka(table)[apart].mean()),
        "CKA, debiased": float(linear_cka(unbiased)[apart].mean()),
    }


def sweep_frame(
    filtered: GramStatistics, controls: list[GramStatistics], orders: dict[str, Spectra]
) -> pd.DataFrame:
    """Tidy table: measure, tokens (by entropy, random), keep, value, low, high.

    Bands: 95 % bootstrap over documents for the filter, the range over draws for the control.
    """
    rows: list[dict[str, Any]] = []
    for q, keep in enumerate(KEEP):
        data = summary(filtered.table(q), filtered.table(q, debiased=True))
        draws = [
            summary(filtered.table(q, r), filtered.table(q, r, debiased=True))
            for r in range(1, 1 + filtered.resamples)
        ]
        random = [summary(c.table(q), c.table(q, debiased=True)) for c in controls]
        for measure, value in data.items():
            error = 1.96 * float(np.nanstd([d[measure] for d in draws])) if draws else 0.0
            band = value - error, value + error
            rows.append(_row(measure, "highest entropy", keep, value, *band))
            drawn = [c[measure] for c in random]
            rows.append(
                _row(measure, "random control", keep, float(np.mean(drawn)), min(drawn), max(drawn))
            )
        for name, kind in (("highest entropy", "filtered"), ("random control", "random")):
            value = float(orders[kind].s1[q, 0].mean())
            rows.append(_row("$S_1$, plug-in", name, keep, value, value, value))
    everything = landscape(filtered.table(-1, debiased=True), 3).scores
    for q, keep in enumerate(KEEP):
        families = {"highest entropy": [filtered], "random control": controls}
        for name, members in families.items():
            rhos = [
                float(spearmanr(everything, landscape(m.table(q, debiased=True), 3).scores)[0])
                for m in members
            ]
            band = min(rhos), max(rhos)
            rows.append(_row("rank correlation", name, keep, float(np.mean(rhos)), *band))
    return pd.DataFrame(rows)


def _row(
    measure: str, tokens: str, keep: float, value: float, low: float, high: float
) -> dict[str, Any]:
    return {
        "measure": measure,
        "tokens": tokens,
        "keep": keep,
        "value": float(value),
        "low": low,
        "high": high,
    }


def sink_frame(run: Run) -> pd.DataFrame:
    """Does an entropy filter by itself keep the sinks?

    Tokens: all of them, nothing dropped first. For each share kept by entropy alone: the part of
    the trace (mean over the inner boundaries, centred) that massive tokens hold, and how many of
    the first positions survive.
    """
    p = run.parameters

    def compute(out: Path) -> None:
        states = states_of(p)
        massive, first = norm_outliers(states.rms), states.position == 0
        inner = slice(1, len(states.boundaries) - 1)
        order = np.argsort(-states.entropy, kind="stable")
        rng = np.random.default_rng(p.seed)
        rows = []
        for name, ranked in (("entropy alone", order), ("random", rng.permutation(order))):
            for keep in KEEP:
                kept = np.zeros(states.tokens, dtype=bool)
                kept[ranked[: round(keep * states.tokens)]] = True
                energy = states.rms[inner].astype(float) ** 2
                share = energy[:, kept & massive].sum(axis=1) / energy[:, kept].sum(axis=1)
                rows.append(
                    {
                        "tokens": name,
                        "keep": keep,
                        "massive_share": float(share.mean()),
                        "first_kept": float((kept & first).sum() / first.sum()),
                    }
                )
        files.write_json(out, rows)

    found = run.measured("filter-sinks", {**source_key(p), "keep": KEEP}, compute, suffix=".json")
    return pd.read_json(found)


def sensitivity_frame(grams: dict[int, GramStatistics], k: int = 3) -> pd.DataFrame:
    """The exhaustive S_2 choice at every threshold and shift, and where the default rule ranks."""
    rows = []
    for shift, gram in grams.items():
        last = gram.boundaries[-1]
        limits = Constraints(allowed=tuple(range(1, last)), num_layers=last)
        for q, keep in enumerate(KEEP):
            table = gram.table(q, debiased=True)
            chosen = exhaustive_s2(table, k, constraints=limits)
            found = landscape(table, k, constraints=limits)
            rank = found.rank_of(default_boundaries(last)) if last >= 7 else None
            rows.append(
                {
                    "entropy at": "t" if shift == 0 else "t + 1",
                    "kept": f"{keep:.0%}",
                    "tokens": int(table.tokens),
                    "chosen set": str(chosen.layers),
                    "S_2": round(chosen.score, 3),
                    "rank of default": rank,
                    "of": len(found.scores),
                }
            )
    return pd.DataFrame(rows)
