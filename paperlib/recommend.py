"""``paperlib select``: layer ids for a model, with the reasons and the uncertainty."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paperlib import files
from paperlib.boundaries import ENGINES, LayerSet, default_boundaries, to_engine
from paperlib.cka import compartments, linear_cka
from paperlib.errors import InputError
from paperlib.filtering import MIN_ROWS, entropy_levels, few_rows, usable_tokens
from paperlib.gram import GramStatistics, GramTable, gram_statistics
from paperlib.profiles import Sample
from paperlib.selection import (
    CRITERIA,
    METHODS,
    Constraints,
    Selection,
    landscape,
    one_per_compartment,
    s2,
    stability,
)
from paperlib.study.source import states_of, target_of

FORMAT = "paperlib-selection-1"
BY_COMPARTMENT = "one-per-compartment"


def methods() -> list[str]:
    return [*METHODS, BY_COMPARTMENT]


def recommend(
    sample: Sample,
    *,
    k: int = 3,
    method: str = "s2",
    keep: float = 0.5,
    min_gap: int = 1,
    report: Path | None = None,
) -> dict[str, Any]:
    """Choose k inner boundaries of ``sample.target`` and say how sure that is; a JSON record.

    keep: share of tokens of highest predictive entropy that the statistics use. report: a folder
    for the CKA map and the landscape of all sets. InputError for what cannot be done.
    """
    if not 1 <= k <= 6:
        raise InputError(f"k = {k} boundaries: expected 1 to 6")
    if method not in methods():
        raise InputError(f"method {method!r} is not one of {', '.join(methods())}")
    began = time.perf_counter()
    target = target_of(sample.target)
    last = target.num_layers
    if last - 1 < k:
        raise InputError(
            f"{sample.target} has {last} blocks, so {last - 1} inner boundaries: k = {k} is too "
            "many, lower it"
        )
    states = states_of(sample)
    pool = usable_tokens(states)
    if keep * pool.sum() < MIN_ROWS:
        raise InputError(
            f"{int(pool.sum())} usable tokens, of which {keep:.0%} are kept: at least {MIN_ROWS} "
            "are needed; give more or longer texts, or a larger --keep"
        )
    level, labels = entropy_levels(states, pool, (keep,))
    gram = gram_statistics(
        states,
        level,
        levels=labels,
        resamples=sample.resamples,
        seed=sample.seed,
        dtype=torch.float32,
    )
    limits = Constraints(allowed=tuple(range(1, last)), min_gap=min_gap, num_layers=last)
    table = gram.table(debiased=True)
    criterion = CRITERIA.get(method, s2)
    found = stability(
        table,
        gram.resampled(debiased=True),
        _function(method),
        k,
        constraints=limits,
        criterion=criterion,
        tolerance=1,
    )
    chosen = found.selection.layers
    remarks = [r for r in (few_rows(int(gram.tokens[0, 0]), states.hidden_size),) if r]
    try:
        default: LayerSet | None = default_boundaries(last)
    except InputError as error:
        default = None
        remarks.append(str(error))
    record = {
        "format": FORMAT,
        "target": sample.target,
        "fingerprint": target.fingerprint,
        "num_layers": last,
        "hidden_size": states.hidden_size,
        "boundaries": list(chosen),
        "method": method,
        "k": k,
        "keep": keep,
        "score": found.selection.score,
        "stability": {
            "stable": found.stable,
            "share": found.share,
            "resamples": found.resamples,
            "rule": found.rule,
            "sets": [[list(s), share] for s, share in list(found.sets.items())[:5]],
        },
        "default_rule": {
            "boundaries": list(default) if default else None,
            "rank": found.default_rank,
            "rank_interval_90": list(found.default_rank_interval or ()) or None,
            "of": found.total,
            "criterion": method if method in CRITERIA else "s2",
        },
        "engines": _engines(chosen),
        "corpus": sample.corpus,
        "documents": len(states.documents),
        "tokens": int(gram.tokens[0, 0]),
        "seed": sample.seed,
        "remarks": remarks,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if report is not None:
        _report(report, gram, table, k, limits, chosen, default)
    return record


def _function(method: str) -> Callable[..., Selection]:
    if method != BY_COMPARTMENT:
        return METHODS[method]

    def by_compartment(table: GramTable, k: int, *, constraints: Constraints) -> Selection:
        segments = compartments(linear_cka(table), segments=k).segments
        return one_per_compartment(table, segments, constraints=constraints)

    return by_compartment


def _engines(chosen: LayerSet) -> dict[str, Any]:
    """Ids of every engine, or why it has none."""
    table: dict[str, Any] = {}
    for engine in ENGINES:
        try:
            table[engine] = list(to_engine(chosen, engine))
        except InputError as error:
            table[engine] = str(error)
    return table


def summary(record: dict[str, Any], engine: str | None = None) -> str:
    """The record for a reader, or one engine's ids with what to do with them."""
    lines = [
        f"{record['target']}: boundaries {record['boundaries']} of 0..{record['num_layers']} "
        f"(method {record['method']}, k = {record['k']})",
        f"  from {record['tokens']} tokens of {record['documents']} documents "
        f"({record['corpus']}; the {record['keep']:.0%} of highest predictive entropy)",
    ]
    how = record["stability"]
    word = "stable" if how["stable"] else "NOT stable"
    lines.append(
        f"  {word}: chosen in {how['share']:.0%} of {how['resamples']} bootstrap resamples of "
        f"documents ({how['rule']})"
    )
    for boundaries, share in how["sets"]:
        if boundaries != record["boundaries"]:
            lines.append(f"    also {boundaries} in {share:.0%}")
    rule = record["default_rule"]
    if rule["rank"] is not None:
        low, high = rule["rank_interval_90"]
        lines.append(
            f"  the default rule {rule['boundaries']} ranks {rule['rank']} of {rule['of']} by "
            f"{rule['criterion']} (90 % interval {low:.0f} to {high:.0f})"
        )
    lines += [f"  note: {remark}" for remark in record["remarks"]]
    width = record["k"] * record["hidden_size"]
    lines.append(
        f"  cost to the head: {width} fused inputs, {2 * width} bytes of bf16 states a token"
    )
    lines.append("  layer ids:")
    for name, ids in record["engines"].items():
        if engine in (None, name):
            lines.append(f"    {name:<14} {ids}")
    lines.append(f"  done in {record['seconds']:.0f} s")
    return "\n".join(lines)


def _report(
    folder: Path,
    gram: GramStatistics,
    table: GramTable,
    k: int,
    limits: Constraints,
    chosen: LayerSet,
    default: LayerSet | None,
) -> None:
    import pandas as pd
    from matplotlib import pyplot as plt

    from paperlib import plotting
    from paperlib.study.geometry import cka_frame, segments

    masks = gram.levels
    informative = landscape(table, k, CRITERIA["entropy"], constraints=limits)
    diverse = landscape(table, k, CRITERIA["cka"], constraints=limits)
    joint = landscape(table, k, constraints=limits)
    frame = pd.DataFrame(
        {
            "mean_entropy": informative.scores,
            "mean_cka": -diverse.scores,
            "set_entropy": joint.scores,
        }
    )
    named = {"chosen": chosen}
    if default is not None and len(default) == k:
        named["default rule"] = default
    marked = pd.DataFrame(
        [
            [f"{name} {s}", informative.score_of(s), -diverse.score_of(s)]
            for name, s in named.items()
            if np.isfinite(joint.score_of(s))
        ],
        columns=["name", "mean_entropy", "mean_cka"],
    )
    maps = plotting.cka_maps(cka_frame(gram, masks), segments(gram, masks))
    cloud = plotting.selection_landscape(frame, marked)
    with files.replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        maps.savefig(temporary / "cka-map.png")
        cloud.savefig(temporary / "landscape.png")
        frame.to_csv(temporary / "landscape.csv", index=False)
    plt.close(maps)
    plt.close(cloud)
