"""Figures. Each function draws one tidy table, the one that is saved beside the figure as CSV."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

STYLE = Path(__file__).with_name("paper.mplstyle")
COLUMN, PAGE = 3.25, 6.75  # inches: one column, full page width
COLOURS = sns.color_palette("colorblind")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")
DASHES: tuple[Any, ...] = (
    *("-", "--", ":", "-."),
    *((0, (6, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (1, 3)), (0, (3, 3, 1, 3))),
)


@contextmanager
def paper_style() -> Iterator[None]:
    with mpl.rc_context(), plt.style.context(str(STYLE)):
        yield


def lines(
    ax: Axes, frame: pd.DataFrame, x: str, y: str, by: str, *, band: tuple[str, str] | None = None
) -> None:
    """One line for each value of ``by``, told apart by colour, marker and dash; band as shading."""
    for i, (name, part) in enumerate(frame.groupby(by, sort=False)):
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(
            part[x],
            part[y],
            color=colour,
            marker=MARKERS[i % len(MARKERS)],
            linestyle=DASHES[i % len(DASHES)],
            markevery=max(1, len(part) // 10),
            label=str(name),
        )
        if band:
            ax.fill_between(part[x], part[band[0]], part[band[1]], color=colour, alpha=0.2, lw=0)


def _legend_outside(
    figure: Figure, ax: Axes, columns: int, place: Any = "outside lower center", **text: Any
) -> None:
    """The legend of ``ax``, beside the panels: no data can lie under it."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc=place, ncols=columns, **text)


def _panel_letters(axes: Iterable[Axes]) -> None:
    for letter, ax in zip("abcdefgh", axes, strict=False):
        ax.set_title(f"({letter}) {ax.get_title()}", loc="left")
        ax.set_title("", loc="center")


def _square_map(
    ax: Axes, matrix: pd.DataFrame, *, vmin: float, vmax: float, cmap: str = "cividis"
) -> Any:
    """A boundary x boundary map with boundary 0 at the lower left."""
    ids = matrix.columns.to_numpy()
    image = ax.imshow(
        matrix.to_numpy(), origin="lower", vmin=vmin, vmax=vmax, cmap=cmap, interpolation="nearest"
    )
    step = max(1, len(ids) // 6)
    ax.set_xticks(range(0, len(ids), step), ids[::step])
    ax.set_yticks(range(0, len(ids), step), ids[::step])
    ax.grid(False)
    ax.set_xlabel("boundary")
    ax.set_ylabel("boundary")
    return image


# 01: entropy over depth


def entropy_depth(frame: pd.DataFrame) -> Figure:
    """frame: measure, tokens, boundary, value, low, high; one panel for each measure."""
    with paper_style():
        measures = list(frame["measure"].unique())
        figure, axes = plt.subplots(1, len(measures), figsize=(PAGE, 2.5), squeeze=False)
        for ax, measure in zip(axes[0], measures, strict=True):
            part = frame[frame["measure"] == measure]
            lines(ax, part, "boundary", "value", "tokens", band=("low", "high"))
            ax.set_title(measure)
            ax.set_xlabel("boundary (0: embeddings)")
            ax.set_ylabel("entropy [nats]")
            ax.set_ylim(bottom=0)
        _panel_letters(axes[0])
        _legend_outside(figure, axes[0, 0], columns=4)
    return figure


def massive_norms(depth: pd.DataFrame, where: pd.DataFrame) -> Figure:
    """depth: group, boundary, rms. where: kind, share_of_outliers, share_of_tokens."""
    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.3))
        lines(axes[0], depth, "boundary", "rms", "group")
        axes[0].set_yscale("log")
        axes[0].set_xlabel("boundary (0: embeddings)")
        axes[0].set_ylabel("RMS of the state")
        axes[0].set_title("size of the residual stream")
        axes[0].legend()
        rows = np.arange(len(where))
        bar = {"height": 0.38, "edgecolor": "black", "linewidth": 0.4}
        axes[1].barh(
            rows - 0.2, where["share_of_outliers"], color=COLOURS[1], label="massive tokens", **bar
        )
        axes[1].barh(
            rows + 0.2,
            where["share_of_tokens"],
            color=COLOURS[0],
            hatch="///",
            label="all tokens",
            **bar,
        )
        axes[1].set_yticks(rows, where["kind"])
        axes[1].invert_yaxis()
        axes[1].set_xlabel("share")
        axes[1].set_xlim(0, 1)
        axes[1].set_title("what massive tokens are")
        axes[1].legend(loc="lower right")
        _panel_letters(axes)
    return figure


# 02: concatenation


def pair_maps(frame: pd.DataFrame) -> Figure:
    """frame: first, second, entropy, complementarity (both orders of each pair, and i = i)."""
    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.9))
        panels = [
            ("entropy", "$S_1$ of the pair [nats]", "cividis"),
            ("complementarity", "QJSD / log 2", "magma"),
        ]
        for ax, (column, label, cmap) in zip(axes, panels, strict=True):
            matrix = frame.pivot(index="first", columns="second", values=column)
            low = 0.0 if column == "complementarity" else float(np.nanmin(matrix.to_numpy()))
            image = _square_map(ax, matrix, vmin=low, vmax=float(matrix.max().max()), cmap=cmap)
            figure.colorbar(image, ax=ax, label=label, shrink=0.9)
            ax.set_title("aggregate entropy" if column == "entropy" else "complementarity")
        _panel_letters(axes)
    return figure


def triple_split(frame: pd.DataFrame) -> Figure:
    """frame: spacing, middle, mean_entropy, entropy; the gap between the two is the QJSD."""
    with paper_style():
        spacings = list(frame["spacing"].unique())
        figure, axes = plt.subplots(
            1, len(spacings), figsize=(PAGE, 2.4), sharey=True, squeeze=False
        )
        for ax, spacing in zip(axes[0], spacings, strict=True):
            part = frame[frame["spacing"] == spacing]
            ax.plot(
                part["middle"],
                part["entropy"],
                color=COLOURS[0],
                marker="o",
                label="$S_1$ of the triple",
            )
            ax.plot(
                part["middle"],
                part["mean_entropy"],
                color=COLOURS[1],
                marker="s",
                linestyle="--",
                label="mean $S_1$ of its layers",
            )
            ax.fill_between(
                part["middle"],
                part["mean_entropy"],
                part["entropy"],
                color=COLOURS[0],
                alpha=0.2,
                lw=0,
                label="QJSD",
            )
            ax.set_title(f"$b-{spacing},\\ b,\\ b+{spacing}$")
            ax.set_xlabel("middle boundary $b$")
            ax.set_xlim(frame["middle"].min() - 1, frame["middle"].max() + 1)
        axes[0, 0].set_ylabel("entropy [nats]")
        _panel_letters(axes[0])
        _legend_outside(figure, axes[0, 0], columns=3)
    return figure


def triple_landscape(counts: pd.DataFrame, marked: pd.DataFrame) -> Figure:
    """counts: low, high, sets (a histogram of S_2 over all triples). marked: name, set, entropy."""
    with paper_style():
        figure, ax = plt.subplots(figsize=(COLUMN, 2.6))
        ax.bar(
            counts["low"],
            counts["sets"],
            width=counts["high"] - counts["low"],
            align="edge",
            color="0.75",
            edgecolor="0.55",
            linewidth=0.3,
        )
        for i, row in enumerate(marked.itertuples()):
            ax.axvline(
                row.entropy,
                color=COLOURS[i % len(COLOURS)],
                linestyle=DASHES[i % len(DASHES)],
                label=f"{row.name} {row.set}",
            )
        ax.set_xlabel("collision entropy $S_2$ of the triple [nats]")
        ax.set_ylabel("triples")
        _legend_outside(figure, ax, columns=2, place="outside upper center", fontsize=6)
    return figure


# 03: geometry


def cka_maps(frame: pd.DataFrame, compartments: pd.DataFrame) -> Figure:
    """frame: tokens, estimator, first, second, cka. compartments: tokens, estimator, start, stop
    (boundaries, both ends included). One map for each (tokens, estimator), on a fixed [0, 1]."""
    with paper_style():
        rows, columns = list(frame["estimator"].unique()), list(frame["tokens"].unique())
        figure, axes = plt.subplots(
            len(rows),
            len(columns),
            figsize=(PAGE, 0.3 + 6.0 / len(columns) * len(rows)),
            squeeze=False,
        )
        image: Any = None
        for r, estimator in enumerate(rows):
            for c, tokens in enumerate(columns):
                ax = axes[r, c]
                part = frame[(frame["tokens"] == tokens) & (frame["estimator"] == estimator)]
                matrix = part.pivot(index="first", columns="second", values="cka")
                image = _square_map(ax, matrix, vmin=0.0, vmax=1.0)
                ax.set_title(f"{estimator}, {tokens}")
                place = {b: i for i, b in enumerate(matrix.columns)}
                chosen = compartments[
                    (compartments["tokens"] == tokens) & (compartments["estimator"] == estimator)
                ]
                for start, stop in zip(chosen["start"], chosen["stop"], strict=True):
                    low, side = place[start] - 0.5, place[stop] - place[start] + 1
                    ax.add_patch(
                        Rectangle((low, low), side, side, fill=False, edgecolor="white", lw=1.4)
                    )
        _panel_letters(axes.ravel())
        figure.colorbar(image, ax=axes, label="linear CKA", shrink=0.7)
    return figure


def compartment_stability(changes: pd.DataFrame, numbers: pd.DataFrame) -> Figure:
    """changes: boundary, frequency, chosen (bool). numbers: segments, frequency, chosen."""
    with paper_style():
        figure, axes = plt.subplots(
            1, 2, figsize=(PAGE, 2.4), gridspec_kw={"width_ratios": [2.2, 1]}
        )
        for ax, frame, x, label in (
            (axes[0], changes, "boundary", "a compartment begins at boundary"),
            (axes[1], numbers, "segments", "number of compartments"),
        ):
            for flag, colour, hatch, name in (
                (True, COLOURS[1], "", "found on all documents"),
                (False, COLOURS[0], "///", "other"),
            ):
                part = frame[frame["chosen"] == flag]
                ax.bar(
                    part[x],
                    part["frequency"],
                    color=colour,
                    hatch=hatch,
                    edgecolor="black",
                    linewidth=0.4,
                    label=name,
                )
            ax.set_xlabel(label)
            ax.set_ylabel("share of resamples")
            ax.set_ylim(0, 1)
        axes[1].set_xticks(numbers["segments"])
        _panel_letters(axes)
        _legend_outside(figure, axes[0], columns=2)
    return figure


# 04: token entropy


def token_entropy(
    histogram: pd.DataFrame, positions: pd.DataFrame, cuts: dict[float, float]
) -> Figure:
    """histogram: low, high, share. positions: position, low, median, high. cuts: share -> nats."""
    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.2))
        axes[0].bar(
            histogram["low"],
            histogram["share"],
            width=histogram["high"] - histogram["low"],
            align="edge",
            color="0.75",
            edgecolor="0.55",
            linewidth=0.3,
        )
        inner = {share: cut for share, cut in cuts.items() if share < 1}
        for i, (share, cut) in enumerate(inner.items()):
            axes[0].axvline(
                cut,
                color=COLOURS[i],
                linestyle=DASHES[i % len(DASHES)],
                label=f"top {share:.0%}",
            )
        axes[0].set_xlabel("predictive entropy [nats]")
        axes[0].set_ylabel("share of tokens")
        axes[0].set_title("distribution, and where shares begin")
        axes[0].legend()
        axes[1].errorbar(
            positions["position"],
            positions["median"],
            yerr=[positions["median"] - positions["low"], positions["high"] - positions["median"]],
            fmt="o",
            color=COLOURS[0],
            ecolor="0.6",
            elinewidth=1,
        )
        axes[1].set_xlabel("position in the document")
        axes[1].set_ylabel("predictive entropy [nats]")
        axes[1].set_title("median and quartiles by position")
        axes[1].set_ylim(bottom=0)
        _panel_letters(axes)
    return figure


def filter_sweep(frame: pd.DataFrame) -> Figure:
    """frame: measure, tokens, keep, value, low, high; one panel for each measure."""
    with paper_style():
        measures = list(frame["measure"].unique())
        rows = -(-len(measures) // 3)
        figure, axes = plt.subplots(rows, 3, figsize=(PAGE, 0.3 + 2.0 * rows), squeeze=False)
        for ax, measure in zip(axes.ravel(), measures, strict=False):
            part = frame[frame["measure"] == measure]
            lines(ax, part, "keep", "value", "tokens", band=("low", "high"))
            ax.set_title(measure)
            ax.set_xlabel("share of tokens kept")
            if measure.startswith("$S"):
                ax.set_ylabel("nats")
        for ax in axes.ravel()[len(measures) :]:
            ax.set_axis_off()
        _panel_letters(axes.ravel()[: len(measures)])
        _legend_outside(figure, axes[0, 0], columns=4)
    return figure


def filter_sinks(frame: pd.DataFrame) -> Figure:
    """frame: tokens, keep, massive_share, first_kept."""
    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.3))
        for ax, column, label in (
            (axes[0], "massive_share", "energy held by massive tokens"),
            (axes[1], "first_kept", "first positions that are kept"),
        ):
            lines(ax, frame, "keep", column, "tokens")
            ax.set_xlabel("share of tokens kept, nothing dropped first")
            ax.set_ylabel("share")
            ax.set_ylim(0, 1.05)
            ax.set_title(label)
        _panel_letters(axes)
        _legend_outside(figure, axes[0], columns=2)
    return figure


# 05: selection


def selection_landscape(frame: pd.DataFrame, marked: pd.DataFrame) -> Figure:
    """frame: mean_entropy, mean_cka, set_entropy of all sets. marked: name and the first two."""
    with paper_style():
        figure, ax = plt.subplots(figsize=(PAGE, 3.1))
        points = ax.scatter(
            frame["mean_entropy"],
            frame["mean_cka"],
            c=frame["set_entropy"],
            s=3,
            cmap="cividis",
            linewidths=0,
            rasterized=True,
        )
        figure.colorbar(points, ax=ax, label="$S_2$ of the set [nats]")
        for i, row in enumerate(marked.itertuples()):
            ax.plot(
                row.mean_entropy,
                row.mean_cka,
                marker=MARKERS[i % len(MARKERS)],
                color=COLOURS[(i + 1) % len(COLOURS)],
                markeredgecolor="black",
                markersize=7,
                linestyle="none",
                label=str(row.name).replace(" = ", "\n= "),
            )
        ax.set_xlabel("informativeness: mean $S_2$ of the boundaries [nats]")
        ax.set_ylabel("redundancy: mean pair CKA")
        _legend_outside(figure, ax, columns=1, place="outside right upper", fontsize=6)
    return figure


def selection_stability(frame: pd.DataFrame) -> Figure:
    """frame: method, boundary, frequency, chosen; how often each boundary is chosen."""
    with paper_style():
        matrix = frame.pivot(index="method", columns="boundary", values="frequency")
        matrix = matrix.loc[list(frame["method"].unique())]
        figure, ax = plt.subplots(figsize=(PAGE, max(1.6, 0.6 + 0.19 * len(matrix))))
        image = ax.imshow(matrix.to_numpy(), vmin=0, vmax=1, cmap="cividis", aspect="auto")
        ids = list(matrix.columns)
        ax.set_xticks(range(0, len(ids), 2), ids[::2])
        ax.set_yticks(range(len(matrix)), matrix.index)
        ax.grid(False)
        ax.set_xlabel("boundary")
        place = {b: i for i, b in enumerate(ids)}
        rows = {m: i for i, m in enumerate(matrix.index)}
        chosen = frame[frame["chosen"]]
        ax.plot(
            [place[b] for b in chosen["boundary"]],
            [rows[m] for m in chosen["method"]],
            "s",
            color="white",
            markersize=3,
            markeredgecolor="black",
            markeredgewidth=0.4,
        )
        figure.colorbar(image, ax=ax, label="share of resamples")
    return figure


def set_sizes(frame: pd.DataFrame) -> Figure:
    """frame: k, sets, entropy."""
    with paper_style():
        figure, ax = plt.subplots(figsize=(COLUMN, 2.5))
        lines(ax, frame, "k", "entropy", "sets")
        ax.set_xlabel("boundaries in the set, $k$")
        ax.set_ylabel("$S_2$ of the set [nats]")
        _legend_outside(figure, ax, columns=2, place="outside upper center")
    return figure


def probe_correlations(points: pd.DataFrame, frame: pd.DataFrame) -> Figure:
    """points: set_entropy, r2, kind. frame: criterion, rho, low, high."""
    with paper_style():
        figure, axes = plt.subplots(1, 2, figsize=(PAGE, 2.7))
        for i, (kind, part) in enumerate(points.groupby("kind", sort=False)):
            axes[0].plot(
                part["set_entropy"],
                part["r2"],
                linestyle="none",
                marker=MARKERS[i],
                color=COLOURS[i],
                alpha=0.8,
                label=str(kind),
            )
        axes[0].set_xlabel("$S_2$ of the set [nats]")
        axes[0].set_ylabel("held-out $R^2$ of the probe")
        axes[0].set_title("each point a set")
        rows = np.arange(len(frame))
        axes[1].errorbar(
            frame["rho"],
            rows,
            xerr=[frame["rho"] - frame["low"], frame["high"] - frame["rho"]],
            fmt="o",
            color=COLOURS[0],
            ecolor="0.5",
        )
        axes[1].axvline(0, color="black", lw=0.6)
        axes[1].set_yticks(rows, frame["criterion"])
        axes[1].invert_yaxis()
        axes[1].set_xlim(-1, 1)
        axes[1].set_xlabel("Spearman correlation with the probe")
        axes[1].set_title("criteria, 95 % intervals")
        _panel_letters(axes)
        _legend_outside(figure, axes[0], columns=4)
    return figure
