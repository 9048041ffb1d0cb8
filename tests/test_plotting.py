"""What a figure shows is what its table holds; two figures are compared pixel by pixel.

After a change of look that is meant, rewrite the two baseline images and look at them::

    python -m tests.test_plotting
"""

import io
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib import colors
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.testing.compare import compare_images

from paperlib import plotting

BASELINE = Path(__file__).with_name("baseline")
BOUNDARIES = np.arange(9)
MASKS = ("above 3x dropped", "above 8x dropped", "all tokens")
KEEP = (0.1, 0.3, 0.5, 1.0)


@pytest.fixture(autouse=True)
def _close():  # type: ignore[no-untyped-def]
    yield
    plt.close("all")


# small fixed tables, with the labels that the notebooks use


def tidy(columns: str, rows: Any) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=columns.split())


def entropies() -> pd.DataFrame:
    rows = []
    for i, measure in enumerate(("$S_1$, pooled", "$S_2$, pooled", "$S_1$, mean over documents")):
        for j, tokens in enumerate(MASKS):
            for b in BOUNDARIES:
                value = 5 - i - j * np.sin(b / 3) ** 2
                rows.append([measure, tokens, b, value, value - 0.3, value + 0.2])
    return tidy("measure tokens boundary value low high", rows)


def norms() -> tuple[pd.DataFrame, pd.DataFrame]:
    groups = ("all other tokens", "first position", "other massive tokens")
    depth = ([g, b, 0.1 * (i + 1) * 3.0**b] for i, g in enumerate(groups) for b in BOUNDARIES)
    kinds = [
        ["first position", 0.6, 0.02],
        ["punctuation", 0.3, 0.15],
        ["word or word piece", 0.1, 0.83],
    ]
    return tidy("group boundary rms", depth), tidy("kind share_of_outliers share_of_tokens", kinds)


def pair_table() -> pd.DataFrame:
    pairs = itertools.product((0, 3, 5, 8), repeat=2)  # ids that are not positions
    rows = ([i, j, 2.5 + 0.1 * i + 0.1 * j, abs(i - j) / 10] for i, j in pairs)
    return tidy("first second entropy complementarity", rows)


def triples() -> pd.DataFrame:
    rows = ([s, b, 2 + b / 10, 2.2 + b / 10 + s / 10] for s in (1, 2) for b in range(s, 9 - s))
    return tidy("spacing middle mean_entropy entropy", rows)


def triple_histogram() -> tuple[pd.DataFrame, pd.DataFrame]:
    edges = np.linspace(2, 4, 6)
    counts = tidy("low high sets", zip(edges[:-1], edges[1:], (3, 9, 27, 40, 5), strict=True))
    marked = [
        ["highest", "[2, 27, 29]", 3.95],
        ["default", "[2, 15, 27]", 3.5],
        ["early", "[1, 2, 3]", 2.6],
        ["late", "[28, 29, 30]", 3.1],
        ["lowest", "[3, 4, 5]", 2.05],
    ]
    return counts, tidy("name set entropy", marked)


def maps() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows, segments = [], []
    for i, tokens in enumerate(MASKS):
        for j, estimator in enumerate(("biased", "debiased")):
            for a, b in itertools.product(BOUNDARIES, repeat=2):
                inside = (a < 4) == (b < 4)
                value = (0.9 if inside else 0.4) - 0.05 * i - 0.55 * j * (not inside)
                rows.append([tokens, estimator, a, b, 1.0 if a == b else value])
            segments += [[tokens, estimator, 0, 3], [tokens, estimator, 4, 8]]
    return (
        tidy("tokens estimator first second cka", rows),
        tidy("tokens estimator start stop", segments),
    )


def changes() -> tuple[pd.DataFrame, pd.DataFrame]:
    first = ([b, 0.9 if b == 4 else 0.05 * b, b == 4] for b in range(1, 9))
    second = [[2, 0.7, True], [3, 0.25, False], [5, 0.05, False]]
    return tidy("boundary frequency chosen", first), tidy("segments frequency chosen", second)


def token_tables() -> tuple[pd.DataFrame, pd.DataFrame, dict[float, float]]:
    histogram = tidy("low high share", ([i / 2, (i + 1) / 2, 0.4 / 2**i] for i in range(8)))
    positions = tidy(
        "position low median high", ([p, 1 + p / 9, 2 + p / 5, 4 + p / 3] for p in range(6))
    )
    return histogram, positions, {0.1: 3.5, 0.3: 2.0, 0.5: 1.0, 1.0: 0.0}


def sweep() -> pd.DataFrame:
    measures = ("$S_2$, plug-in", "$S_2$, debiased", "CKA, biased", "CKA, debiased")
    rows = []
    for i, measure in enumerate(measures):
        for j, tokens in enumerate(("highest entropy", "random control")):
            for keep in KEEP:
                value = 1 + i + j + keep
                rows.append([measure, tokens, keep, value, value - 0.1 * i, value + 0.2])
    return tidy("measure tokens keep value low high", rows)


def sinks() -> pd.DataFrame:
    rows = (
        [t, k, 0.5 + k / 3 - i / 10, k**0.5 - i / 10]
        for i, t in enumerate(("entropy alone", "random"))
        for k in KEEP
    )
    return tidy("tokens keep massive_share first_kept", rows)


def every_set() -> tuple[pd.DataFrame, pd.DataFrame]:
    rows = ([3 + i / 10, 0.9 - i * j / 100, 3.2 + i / 9 + j / 50] for i in range(9) for j in (1, 5))
    marked = [
        ["best $S_2$ = LOES = probe, greedy [2, 11, 22]", 3.8, 0.5],
        ["top entropy [12, 13, 14]", 3.7, 0.85],
        ["default rule [2, 15, 27]", 3.2, 0.6],
    ]
    return tidy("mean_entropy mean_cka set_entropy", rows), tidy(
        "name mean_entropy mean_cka", marked
    )


def frequencies() -> pd.DataFrame:
    chosen = {"s2": (1, 4, 7), "mrmr-quotient, top 20%": (2, 4, 6), "cka": (1, 5, 8)}
    rows = (
        [method, b, 0.8 if b in ids else 0.02 * b, b in ids]
        for method, ids in chosen.items()
        for b in range(1, 9)
    )
    return tidy("method boundary frequency chosen", rows)


def sizes() -> pd.DataFrame:
    names = ("best set", "uniform rule", "last k", "random sets (median)")
    rows = ([k, s, 3 + k / (i + 2)] for i, s in enumerate(names) for k in range(1, 5))
    return tidy("k sets entropy", rows)


def probe_tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    kinds = ("random or chosen set", "other fixed rule", "chosen by the probe", "default rule")
    points = ([3 + i / 7, 0.4 + (i % 5) / 20, kinds[i % 4]] for i in range(14))
    frame = [
        ["S_2 of the set", 0.5, 0.2, 0.7],
        ["minus mean CKA", -0.1, -0.4, 0.3],
        ["spread of the boundaries", 0.3, 0.25, 0.5],
    ]
    return tidy("set_entropy r2 kind", points), tidy("criterion rho low high", frame)


FIGURES: dict[str, tuple[Callable[..., Figure], tuple[Any, ...]]] = {
    "entropy_depth": (plotting.entropy_depth, (entropies(),)),
    "massive_norms": (plotting.massive_norms, norms()),
    "pair_maps": (plotting.pair_maps, (pair_table(),)),
    "triple_split": (plotting.triple_split, (triples(),)),
    "triple_landscape": (plotting.triple_landscape, triple_histogram()),
    "cka_maps": (plotting.cka_maps, maps()),
    "compartment_stability": (plotting.compartment_stability, changes()),
    "token_entropy": (plotting.token_entropy, token_tables()),
    "filter_sweep": (plotting.filter_sweep, (sweep(),)),
    "filter_sinks": (plotting.filter_sinks, (sinks(),)),
    "selection_landscape": (plotting.selection_landscape, every_set()),
    "selection_stability": (plotting.selection_stability, (frequencies(),)),
    "set_sizes": (plotting.set_sizes, (sizes(),)),
    "probe_correlations": (plotting.probe_correlations, probe_tables()),
}
ONE_COLUMN = {"triple_landscape", "set_sizes"}


def drawn(name: str) -> tuple[Figure, list[Axes]]:
    function, tables = FIGURES[name]
    figure = function(*tables)
    return figure, [ax for ax in figure.axes if ax.get_label() != "<colorbar>"]


def legend_labels(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def assert_line(line: Any, x: Any, y: Any) -> None:
    np.testing.assert_allclose(np.asarray(line.get_xdata(), dtype=float), x)
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), y)


def assert_bars(patches: Any, left: Any, width: Any, height: Any) -> None:
    np.testing.assert_allclose([p.get_x() for p in patches], left)
    np.testing.assert_allclose([p.get_width() for p in patches], width)
    np.testing.assert_allclose([p.get_height() for p in patches], height)


def assert_band(band: Any, x: Any, low: Any, high: Any) -> None:
    """A shaded area has exactly these lower and upper corners."""
    corners = {tuple(np.round(v, 9)) for v in band.get_paths()[0].vertices}
    wanted = [*zip(x, low, strict=True), *zip(x, high, strict=True)]
    assert corners == {tuple(np.round([float(v) for v in w], 9)) for w in wanted}


def segments_of(container: Any) -> np.ndarray:
    """[points, 2 ends, 2] error bars."""
    return np.array(container.lines[2][0].get_segments(), dtype=float)


# all figures


def test_every_public_figure_is_tested() -> None:
    made = {
        name
        for name, value in vars(plotting).items()
        if callable(value)
        and getattr(value, "__module__", "") == plotting.__name__
        and getattr(value, "__annotations__", {}).get("return") is Figure
    }
    assert made == set(FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_width_and_settings_and_tables(name: str) -> None:
    """A preset width; the caller's settings and tables come back as they were."""
    function, tables = FIGURES[name]
    before = {k: v for k, v in mpl.rcParams.items() if k != "backend"}
    copies = [t.copy() for t in tables]
    figure = function(*tables)
    expected = plotting.COLUMN if name in ONE_COLUMN else plotting.PAGE
    assert figure.get_figwidth() == pytest.approx(expected)
    assert {k: v for k, v in mpl.rcParams.items() if k != "backend"} == before
    for table, copy in zip(tables, copies, strict=True):
        assert table.equals(copy) if isinstance(table, pd.DataFrame) else table == copy


def test_settings_come_back_after_an_error() -> None:
    before = {k: v for k, v in mpl.rcParams.items() if k != "backend"}
    with pytest.raises(KeyError):
        plotting.set_sizes(pd.DataFrame({"k": [1]}))
    assert {k: v for k, v in mpl.rcParams.items() if k != "backend"} == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_or_under_a_legend(name: str) -> None:
    figure, axes = drawn(name)
    figure.canvas.draw()
    box = figure.get_tightbbox()  # inches, of every artist
    width, height = figure.get_size_inches()
    assert box.x0 > -0.02
    assert box.y0 > -0.02
    assert box.x1 < width + 0.02
    assert box.y1 < height + 0.02
    legends = [legend.get_window_extent() for legend in figure.legends]
    for legend, ax in itertools.product(legends, axes):
        assert not legend.overlaps(ax.get_window_extent())
    for ax in axes:  # no panel is squeezed away
        assert ax.get_window_extent().width > 0.2 * figure.dpi * width / len(axes)


@pytest.mark.parametrize("name", FIGURES)
def test_axes_are_named_and_lines_told_apart_without_colour(name: str) -> None:
    _, axes = drawn(name)
    for ax in axes:
        if not ax.axison:
            continue
        assert ax.get_xlabel()
        ticks = [t.get_text() for t in ax.get_yticklabels()]
        assert ax.get_ylabel() or any(ticks) or ax is not axes[0]
        named = [line for line in ax.lines if not line.get_label().startswith("_")]
        dashes = [str(line._dash_pattern) for line in named if line.get_linestyle() != "None"]
        markers = [line.get_marker() for line in named if line.get_marker() != "None"]
        assert len(set(dashes)) == len(dashes)
        assert len(set(markers)) == len(markers)
        assert len({colors.to_hex(line.get_color()) for line in named}) == len(named)


def test_each_of_many_lines_has_its_own_marker_and_dash() -> None:
    frame = tidy("x y by", ([x, i + x, f"line {i}"] for i in range(8) for x in range(3)))
    _, ax = plt.subplots()
    plotting.lines(ax, frame, "x", "y", "by")
    assert len({line.get_marker() for line in ax.lines}) == 8
    assert len({str(line._dash_pattern) for line in ax.lines}) == 8
    assert [line.get_label() for line in ax.lines] == [f"line {i}" for i in range(8)]


def pdf_of(figure: Figure, **settings: Any) -> bytes:
    stream = io.BytesIO()
    with plotting.paper_style(), mpl.rc_context(settings):
        figure.savefig(stream, format="pdf")
    return stream.getvalue()


def test_fonts_in_pdf_are_embedded_truetype() -> None:
    """Type 42: text stays text, and no publisher's check stumbles over Type 3."""
    figure, _ = drawn("set_sizes")
    content = pdf_of(figure)
    assert b"/FontFile2" in content
    assert b"/Type3" not in content
    assert b"/Type3" in pdf_of(figure, **{"pdf.fonttype": 3})  # the check can fail


# what a reader with deuteranopia sees


def lab(rgb: Any) -> np.ndarray:
    """CIE L*a*b* (D65) of linear RGB."""
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    t = to_xyz @ rgb / (to_xyz @ np.ones(3))
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def deuteranope(colour: Any) -> np.ndarray:
    """L*a*b* after the severe deuteranopia of Machado, Oliveira and Fernandes (2009)."""
    rgb = np.array(colors.to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.01182, 0.04294, 0.968881],
        ]
    )
    return lab((seen @ linear).clip(0, 1))


def least_distance(palette: Any) -> float:
    seen = [deuteranope(c) for c in palette]
    return min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2))


def test_palette_under_simulated_deuteranopia() -> None:
    """The colours of up to five lines stay 10 units of L*a*b* apart; a red and a green do not."""
    assert least_distance(["#808080", "#ffffff"]) > 40
    assert least_distance(["#a86500", "#5f8a00"]) < 10
    assert least_distance(plotting.COLOURS[:5]) > 10


@pytest.mark.parametrize("cmap", ["cividis", "magma"])
def test_maps_grow_lighter_all_the_way(cmap: str) -> None:
    """Larger values are lighter, also under deuteranopia and in greyscale."""
    lightness = [deuteranope(c)[0] for c in mpl.colormaps[cmap](np.linspace(0, 1, 20))]
    assert (np.diff(lightness) > 0).all()


# each figure against its table


def test_entropy_depth() -> None:
    frame = entropies()
    figure, axes = drawn("entropy_depth")
    for ax, (measure, part) in zip(axes, frame.groupby("measure", sort=False), strict=True):
        assert measure in ax.get_title(loc="left")
        assert ax.get_ylim()[0] == 0
        groups = part.groupby("tokens", sort=False)
        for line, band, (tokens, rows) in zip(ax.lines, ax.collections, groups, strict=True):
            assert line.get_label() == tokens
            assert_line(line, rows["boundary"], rows["value"])
            assert_band(band, rows["boundary"], rows["low"], rows["high"])
    assert [ax.get_title(loc="left")[:3] for ax in axes] == ["(a)", "(b)", "(c)"]
    assert legend_labels(figure) == list(MASKS)


def test_massive_norms() -> None:
    depth, where = norms()
    _, (left, right) = drawn("massive_norms")
    for line, (group, rows) in zip(left.lines, depth.groupby("group", sort=False), strict=True):
        assert line.get_label() == group
        assert_line(line, rows["boundary"], rows["rms"])
    assert left.get_yscale() == "log"
    massive, everything = right.containers
    assert [b.get_width() for b in massive] == list(where["share_of_outliers"])
    assert [b.get_width() for b in everything] == list(where["share_of_tokens"])
    assert [massive.get_label(), everything.get_label()] == ["massive tokens", "all tokens"]
    assert [t.get_text() for t in right.get_yticklabels()] == list(where["kind"])
    assert right.get_xlim() == (0, 1)
    assert right.yaxis_inverted()  # the first row of the table on top


def test_pair_maps() -> None:
    frame = pair_table()
    figure, axes = drawn("pair_maps")
    for ax, column in zip(axes, ("entropy", "complementarity"), strict=True):
        (image,) = ax.images
        expected = frame[column].to_numpy().reshape(4, 4)
        np.testing.assert_allclose(image.get_array(), expected)
        assert image.origin == "lower"
        assert image.norm.vmax == expected.max()
        assert [t.get_text() for t in ax.get_xticklabels()] == ["0", "3", "5", "8"]
        assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "3", "5", "8"]
    assert axes[0].images[0].norm.vmin == frame["entropy"].min()
    assert axes[1].images[0].norm.vmin == 0
    labels = [ax.get_ylabel() for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert labels == ["$S_1$ of the pair [nats]", "QJSD / log 2"]


def test_triple_split() -> None:
    figure, axes = drawn("triple_split")
    for ax, (spacing, rows) in zip(axes, triples().groupby("spacing"), strict=True):
        assert_line(ax.lines[0], rows["middle"], rows["entropy"])
        assert_line(ax.lines[1], rows["middle"], rows["mean_entropy"])
        assert_band(ax.collections[0], rows["middle"], rows["mean_entropy"], rows["entropy"])
        assert f"b-{spacing}" in ax.get_title(loc="left")
        assert f"b+{spacing}" in ax.get_title(loc="left")
    assert axes[0].get_ylim() == axes[1].get_ylim()
    assert axes[0].get_xlim() == axes[1].get_xlim() == (0, 8)
    assert legend_labels(figure) == ["$S_1$ of the triple", "mean $S_1$ of its layers", "QJSD"]


def test_triple_landscape() -> None:
    counts, marked = triple_histogram()
    figure, (ax,) = drawn("triple_landscape")
    assert_bars(ax.patches, counts["low"], counts["high"] - counts["low"], counts["sets"])
    for line, row in zip(ax.lines, marked.itertuples(), strict=True):
        np.testing.assert_allclose(line.get_xdata(), row.entropy)
    assert legend_labels(figure) == [f"{r.name} {r.set}" for r in marked.itertuples()]


def test_cka_maps() -> None:
    frame, compartments = maps()
    figure, axes = drawn("cka_maps")
    panels = itertools.product(("biased", "debiased"), MASKS)  # a row for each estimator
    for ax, (estimator, tokens) in zip(axes, panels, strict=True):
        (image,) = ax.images
        rows = frame[(frame["tokens"] == tokens) & (frame["estimator"] == estimator)]
        np.testing.assert_allclose(image.get_array(), rows["cka"].to_numpy().reshape(9, 9))
        assert (image.norm.vmin, image.norm.vmax) == (0, 1)  # fixed, whatever the data
        assert ax.get_title(loc="left").endswith(f"{estimator}, {tokens}")
        squares = [p for p in ax.patches if isinstance(p, Rectangle)]
        found = [
            (p.get_x() + 0.5, p.get_x() + p.get_width() - 0.5, p.get_y() + 0.5) for p in squares
        ]
        chosen = compartments.query("tokens == @tokens and estimator == @estimator")
        assert found == [(r.start, r.stop, r.start) for r in chosen.itertuples()]
        assert all(p.get_width() == p.get_height() for p in squares)
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert [ax.get_ylabel() for ax in bars] == ["linear CKA"]


def test_cka_maps_of_some_boundaries_only() -> None:
    """Squares are placed by the ids, not by their numbers."""
    ids = (2, 5, 9, 14)
    rows = (["all", "biased", a, b, 1.0 - abs(a - b) / 20] for a in ids for b in ids)
    squares = tidy(
        "tokens estimator start stop", [["all", "biased", 2, 5], ["all", "biased", 9, 14]]
    )
    figure = plotting.cka_maps(tidy("tokens estimator first second cka", rows), squares)
    boxes = [p.get_bbox().extents.tolist() for p in figure.axes[0].patches]
    assert boxes == [[-0.5, -0.5, 1.5, 1.5], [1.5, 1.5, 3.5, 3.5]]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["2", "5", "9", "14"]


def test_compartment_stability() -> None:
    figure, axes = drawn("compartment_stability")
    for ax, table, x in zip(axes, changes(), ("boundary", "segments"), strict=True):
        for bars, flag in zip(ax.containers, (True, False), strict=True):
            part = table[table["chosen"] == flag]
            np.testing.assert_allclose([b.get_center()[0] for b in bars], part[x])
            np.testing.assert_allclose([b.get_height() for b in bars], part["frequency"])
        assert ax.get_ylim() == (0, 1)
    assert legend_labels(figure) == ["found on all documents", "other"]
    assert list(axes[1].get_xticks()) == [2, 3, 5]


def test_token_entropy() -> None:
    histogram, positions, cuts = token_tables()
    _, (left, right) = drawn("token_entropy")
    assert_bars(left.patches, histogram["low"], 0.5, histogram["share"])
    lines = {line.get_label(): float(np.unique(line.get_xdata())[0]) for line in left.lines}
    assert lines == {"top 10%": cuts[0.1], "top 30%": cuts[0.3], "top 50%": cuts[0.5]}
    (points,) = right.containers
    assert_line(points.lines[0], positions["position"], positions["median"])
    bars = segments_of(points)
    np.testing.assert_allclose(bars[:, 0, 1], positions["low"])
    np.testing.assert_allclose(bars[:, 1, 1], positions["high"])
    assert right.get_ylim()[0] == 0


def test_filter_sweep() -> None:
    frame = sweep()
    figure, axes = drawn("filter_sweep")
    assert [ax.axison for ax in axes] == [True] * 4 + [False] * 2
    for ax, (measure, part) in zip(axes[:4], frame.groupby("measure", sort=False), strict=True):
        assert measure in ax.get_title(loc="left")
        assert ax.get_ylabel() == ("nats" if measure.startswith("$S") else "")
        groups = part.groupby("tokens", sort=False)
        for line, band, (_, rows) in zip(ax.lines, ax.collections, groups, strict=True):
            assert_line(line, rows["keep"], rows["value"])
            assert_band(band, rows["keep"], rows["low"], rows["high"])
    assert legend_labels(figure) == ["highest entropy", "random control"]


def test_filter_sinks() -> None:
    figure, axes = drawn("filter_sinks")
    for ax, column in zip(axes, ("massive_share", "first_kept"), strict=True):
        for line, (_, rows) in zip(ax.lines, sinks().groupby("tokens", sort=False), strict=True):
            assert_line(line, rows["keep"], rows[column])
        assert ax.get_ylim() == (0, 1.05)
    assert [ax.get_title(loc="left") for ax in axes] == [
        "(a) energy held by massive tokens",
        "(b) first positions that are kept",
    ]
    assert legend_labels(figure) == ["entropy alone", "random"]


def test_selection_landscape() -> None:
    frame, marked = every_set()
    figure, (ax,) = drawn("selection_landscape")
    (points,) = ax.collections
    np.testing.assert_allclose(points.get_offsets(), frame[["mean_entropy", "mean_cka"]])
    np.testing.assert_allclose(points.get_array(), frame["set_entropy"])
    for line, row in zip(ax.lines, marked.itertuples(), strict=True):
        assert_line(line, [row.mean_entropy], [row.mean_cka])
    labels = [label.replace("\n", " ") for label in legend_labels(figure)]
    assert labels == list(marked["name"])


def test_selection_stability() -> None:
    frame = frequencies()
    _, (ax,) = drawn("selection_stability")
    (image,) = ax.images
    np.testing.assert_allclose(image.get_array(), frame["frequency"].to_numpy().reshape(3, 8))
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)
    methods = list(frame["method"].unique())
    assert [t.get_text() for t in ax.get_yticklabels()] == methods
    (squares,) = ax.lines
    chosen = frame[frame["chosen"]]
    assert_line(squares, chosen["boundary"] - 1, [methods.index(m) for m in chosen["method"]])
    ticks = dict(zip(ax.get_xticks(), (t.get_text() for t in ax.get_xticklabels()), strict=True))
    assert ticks == {0: "1", 2: "3", 4: "5", 6: "7"}


def test_set_sizes() -> None:
    figure, (ax,) = drawn("set_sizes")
    for line, (_, rows) in zip(ax.lines, sizes().groupby("sets", sort=False), strict=True):
        assert_line(line, rows["k"], rows["entropy"])
    assert legend_labels(figure) == list(sizes()["sets"].unique())


def test_probe_correlations() -> None:
    points, frame = probe_tables()
    figure, (left, right) = drawn("probe_correlations")
    for line, (kind, rows) in zip(left.lines, points.groupby("kind", sort=False), strict=True):
        assert line.get_label() == kind
        assert line.get_linestyle() == "None"
        assert_line(line, rows["set_entropy"], rows["r2"])
    (bars,) = right.containers
    assert_line(bars.lines[0], frame["rho"], range(3))
    np.testing.assert_allclose(segments_of(bars)[:, 0, 0], frame["low"])
    np.testing.assert_allclose(segments_of(bars)[:, 1, 0], frame["high"])
    assert [t.get_text() for t in right.get_yticklabels()] == list(frame["criterion"])
    assert right.get_xlim() == (-1, 1)
    assert right.yaxis_inverted()
    assert legend_labels(figure) == list(points["kind"].unique())


# pixels

PIXELS = ("entropy_depth", "cka_maps")


def render(name: str, path: Path) -> None:
    figure, _ = drawn(name)
    with plotting.paper_style():
        figure.savefig(path, dpi=60, metadata={"Software": None})


@pytest.mark.parametrize("name", PIXELS)
def test_pixels(name: str, tmp_path: Path) -> None:
    """Tolerant of how versions place text by a pixel, not of another colour map or layout."""
    made = tmp_path / f"{name}.png"
    render(name, made)
    assert compare_images(str(BASELINE / f"{name}.png"), str(made), tol=12) is None


if __name__ == "__main__":
    BASELINE.mkdir(exist_ok=True)
    for each in PIXELS:
        render(each, BASELINE / f"{each}.png")
