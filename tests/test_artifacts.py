import dataclasses
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg

from paperlib import artifacts, files, paths, profiles
from paperlib.artifacts import Artifact
from paperlib.errors import InputError

STEM = "01_layer_entropy"
REGISTRY = {
    "fig-x": Artifact("fig-x", "figure", STEM, "Title", "Caption, 95 % of $x_1$.", "alt", "none"),
    "tab-x": Artifact("tab-x", "table", STEM, "Title", "Caption, 95 % of $x_1$.", "alt", "none"),
    "fig-y": Artifact("fig-y", "figure", "03_cka_geometry", "Other", "Other.", "alt", "none"),
}
FRAME = pd.DataFrame({"x": [1, 2], "y_1": [0.1 + 0.2, 1 / 3], "name": ["a&b", "c"]})


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    for name in ("PAPERLIB_FIGURES", "PAPERLIB_PENDING", "PAPERLIB_REMEASURE", "PAPERLIB_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    monkeypatch.setenv("PAPERLIB_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def drawn():
    figure, ax = plt.subplots(figsize=(2, 2), layout="constrained")
    ax.plot(FRAME["x"], FRAME["y_1"])
    return figure


def finished(profile="full", **overrides):
    run = artifacts.start(STEM, profile=profile, registry=REGISTRY, **overrides)
    run.figure("fig-x", drawn(), FRAME)
    run.table("tab-x", FRAME)
    run.finish()
    return run


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_files_appear_only_at_the_end_and_match_the_manifest(root):
    run = artifacts.start(STEM, profile="full", registry=REGISTRY)
    run.figure("fig-x", drawn(), FRAME)
    run.table("tab-x", FRAME)
    assert not (root / "figures").exists()
    run.finish()
    assert set(contents(root / "figures")) == {
        *("fig-x.pdf", "fig-x.png", "fig-x.csv", "tab-x.csv", "tab-x.md", "tab-x.tex"),
        "manifest.json",
    }
    entries = json.loads((root / "figures" / "manifest.json").read_text())["artifacts"]
    assert list(entries) == ["fig-x", "tab-x"]
    for entry in entries.values():
        for record in entry["files"]:
            content = (root / "figures" / record["path"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == record["sha256"]
            assert len(content) == record["bytes"]
        assert entry["parameters"] == dataclasses.asdict(profiles.PARAMETERS[STEM]["full"])


def test_csv_holds_every_digit_and_unix_line_ends(root):
    finished()
    raw = (root / "figures" / "fig-x.csv").read_bytes()
    assert b"\r" not in raw
    back = pd.read_csv(root / "figures" / "fig-x.csv", float_precision="round_trip")
    assert back["y_1"].tolist() == FRAME["y_1"].tolist()
    assert raw == (root / "figures" / "tab-x.csv").read_bytes()


def test_several_frames_of_one_figure_get_a_file_each(root):
    run = artifacts.start("03_cka_geometry", profile="full", registry=REGISTRY)
    run.figure("fig-y", drawn(), {"map": FRAME, "parts": FRAME[["x"]]})
    run.finish()
    assert {"fig-y.map.csv", "fig-y.parts.csv"} < set(contents(root / "figures"))


def test_table_in_markdown_and_latex(root):
    finished()
    assert (root / "figures" / "tab-x.md").read_text().splitlines() == [
        "| x   | y_1   | name   |",
        "|:----|:------|:-------|",
        "| 1   | 0.3   | a&b    |",
        "| 2   | 0.333 | c      |",
        "",
        "Caption, 95 % of $x_1$.",
    ]
    latex = (root / "figures" / "tab-x.tex").read_text()
    for part in (
        *(r"\toprule", r"\midrule", r"\bottomrule", r"\label{tab-x}", r"a\&b & ", r"y\_1"),
        r"\caption{Caption, 95 \% of $x_1$.}",
    ):
        assert part in latex or part.strip(" &") in latex
    assert r"a\&b" in latex


def test_a_second_run_changes_no_byte(root):
    finished()
    first = contents(root / "figures")
    time.sleep(1.1)  # PDF dates have seconds
    finished()
    assert contents(root / "figures") == first


def test_pdf_embeds_truetype_and_says_what_it_is(root):
    finished()
    pdf = (root / "figures" / "fig-x.pdf").read_bytes()
    assert b"/CIDFontType2" in pdf or b"/TrueType" in pdf
    assert b"/Type3" not in pdf
    assert b"(Title)" in pdf
    assert b"(fig-x)" in pdf
    assert b"CreationDate" not in pdf


def test_what_is_not_to_be_cited_is_marked_and_stays_out_of_figures(root):
    for profile, overrides, mark in (
        ("smoke", {}, "smoke profile - not for citing"),
        ("quick", {}, "quick profile - not for citing"),
        ("full", {"documents": 5}, "full profile with changed parameters - not for citing"),
    ):
        run = artifacts.start(STEM, profile=profile, registry=REGISTRY, **overrides)
        figure = drawn()
        run.figure("fig-x", figure, FRAME)
        (text,) = figure.findobj(lambda a: a.get_gid() == "profile-mark")
        assert text.get_text() == mark
        run.table("tab-x", FRAME)
        run.finish()
        assert not (root / "figures").exists()
        folder = root / "build" / profile / "figures"
        entry = artifacts.read_manifest(folder)["fig-x"]
        assert entry["caption"] == f"Caption, 95 % of $x_1$. [{mark}]"
    figure = drawn()
    run = artifacts.start(STEM, profile="full", registry=REGISTRY, documents=-1)
    run.figure("fig-x", figure, FRAME)
    assert not figure.findobj(lambda a: a.get_gid() == "profile-mark")


@pytest.mark.parametrize("id", ["fig-none", "fig-y", "tab-x"])
def test_undeclared_artifacts_are_refused(id):
    run = artifacts.start(STEM, profile="full", registry=REGISTRY)
    with pytest.raises(InputError, match=f"'{id}' is not a figure of notebook {STEM}.*fig-x"):
        run.figure(id, drawn(), FRAME)


def test_a_declared_artifact_that_was_not_made_is_an_error_and_nothing_is_written(root):
    run = artifacts.start(STEM, profile="full", registry=REGISTRY)
    run.figure("fig-x", drawn(), FRAME)
    with pytest.raises(InputError, match="did not make tab-x"):
        run.finish()
    assert not (root / "figures").exists()


def test_unknown_and_mistyped_parameters_are_refused():
    with pytest.raises(InputError, match="no parameter 'document'"):
        artifacts.start(STEM, profile="full", registry=REGISTRY, document=3)
    with pytest.raises(InputError, match="expects int"):
        artifacts.start(STEM, profile="full", registry=REGISTRY, documents="3")


def test_a_kernel_of_another_environment_is_refused(monkeypatch):
    monkeypatch.setenv("PAPERLIB_PREFIX", "/nowhere")
    with pytest.raises(InputError, match="kernel"):
        artifacts.start(STEM, profile="full", registry=REGISTRY)


def test_start_prints_the_resolved_parameters_and_seeds(capsys):
    artifacts.start(STEM, profile="smoke", registry=REGISTRY, documents=-1, target="")
    first = np.random.random()  # noqa: NPY002
    documents = profiles.PARAMETERS[STEM]["smoke"].documents
    assert f"  documents = {documents}\n" in capsys.readouterr().out
    artifacts.start(STEM, profile="smoke", registry=REGISTRY)
    assert np.random.random() == first  # noqa: NPY002
    artifacts.start(STEM, profile="smoke", registry=REGISTRY, seed=1)
    assert np.random.random() != first  # noqa: NPY002


def test_finish_prints_where_files_are_without_machine_paths(root, capsys):
    finished("smoke")
    out = capsys.readouterr().out
    assert "build/smoke/figures/fig-x  .csv .pdf .png\n" in out
    assert str(root) not in out


def test_figures_of_other_notebooks_stay_and_dropped_ids_go(root):
    other = artifacts.start("03_cka_geometry", profile="full", registry=REGISTRY)
    other.figure("fig-y", drawn(), FRAME)
    other.finish()
    finished()
    fewer = {k: v for k, v in REGISTRY.items() if k != "tab-x"}
    run = artifacts.start(STEM, profile="full", registry=fewer)
    run.figure("fig-x", drawn(), FRAME)
    run.finish()
    names = {f"{i}{s}" for i in ("fig-x", "fig-y") for s in (".pdf", ".png", ".csv")}
    assert set(contents(root / "figures")) == {*names, "manifest.json"}
    assert set(artifacts.read_manifest(root / "figures")) == {"fig-x", "fig-y"}


# measured results


@pytest.fixture
def counted():
    calls = []

    def compute(out: Path) -> None:
        calls.append(out)
        np.savez(out, value=np.array(len(calls)))

    compute.calls = calls
    return compute


def value(path):
    with np.load(path) as archive:
        return int(archive["value"])


def begin(profile="quick", remeasure=False, **overrides):
    return artifacts.start(
        STEM, profile=profile, registry=REGISTRY, remeasure=remeasure, **overrides
    )


def test_measured_once_for_each_key(root, counted):
    first = begin().measured("m", {"a": (1, 2)}, counted)
    again = begin().measured("m", {"a": [1, 2]}, counted)
    assert first == again
    assert first.parent == root / "build" / "quick" / "cache"
    assert len(counted.calls) == 1
    other = begin().measured("m", {"a": [1, 3]}, counted)
    assert value(other) == 2
    assert value(first) == 1


def test_a_damaged_or_half_written_measurement_is_made_again(counted):
    path = begin().measured("m", {}, counted)
    path.write_bytes(path.read_bytes()[:-1])
    assert value(begin().measured("m", {}, counted)) == 2
    artifacts.record_path(path).unlink()
    assert value(begin().measured("m", {}, counted)) == 3


def test_a_failed_measurement_leaves_nothing_that_counts(root, counted):
    def broken(out):
        out.write_text("half")
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        begin().measured("m", {}, broken)
    assert not [p for p in (root / "build").rglob("*") if p.is_file() and p.suffix != ".lock"]
    with pytest.raises(InputError, match="wrote no file"):
        begin().measured("m", {}, lambda out: None)
    assert value(begin().measured("m", {}, counted)) == 1


def test_remeasuring_full_publishes_what_later_runs_read(root, counted):
    published = begin("full", remeasure=True).measured("m", {"a": 1}, counted)
    assert published == root / "data" / "full" / "m.npz"
    record = json.loads((root / "data" / "full" / "m.record.json").read_text())
    assert record["key"] == {"a": 1}
    assert record["sha256"] == files.sha256(published)
    assert begin("full").measured("m", {"a": 1}, counted) == published
    assert len(counted.calls) == 1
    # another key, another profile, changed parameters: never data/full
    assert begin("full").measured("m", {"a": 2}, counted).is_relative_to(root / "build")
    assert begin("quick").measured("m", {"a": 1}, counted).is_relative_to(root / "build")
    changed = begin("full", remeasure=True, documents=5).measured("m", {"a": 3}, counted)
    assert changed.is_relative_to(root / "build")
    assert value(published) == 1


def test_a_damaged_committed_result_is_an_error(counted):
    published = begin("full", remeasure=True).measured("m", {}, counted)
    published.write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"data/full/m\.npz is missing or damaged"):
        begin("full").measured("m", {}, counted)


def test_remeasure_from_the_environment_measures_once_for_each_invocation(monkeypatch, counted):
    begin().measured("m", {}, counted)
    monkeypatch.setenv("PAPERLIB_REMEASURE", repr(time.time()))
    for _ in range(2):  # two notebooks of one invocation share the new result
        path = begin(remeasure=None).measured("m", {}, counted)
    assert value(path) == 2
    monkeypatch.setenv("PAPERLIB_REMEASURE", "1")
    for _ in range(2):
        path = begin(remeasure=None).measured("m", {}, counted)
    assert value(path) == 4


def test_json_results_do_not_collide_with_their_record(counted):
    path = begin().measured("m", {}, lambda out: out.write_text("[1]"), suffix=".json")
    assert json.loads(path.read_text()) == [1]
    assert artifacts.read_record(path)["sha256"] == files.sha256(path)


def test_used_files_are_recorded_without_machine_paths(root, tmp_path_factory, counted):
    inside = begin().measured("m", {}, counted)
    outside = tmp_path_factory.mktemp("elsewhere") / "prompts.jsonl"
    outside.write_text("{}")
    run = begin("full")
    assert run.uses(inside) == inside
    run.uses(outside)
    run.figure("fig-x", drawn(), FRAME)
    run.table("tab-x", FRAME)
    run.finish()
    text = (root / "figures" / "manifest.json").read_text()
    assert str(tmp_path_factory.getbasetemp()) not in text
    used = artifacts.read_manifest(root / "figures")["fig-x"]["data"]
    assert [(u["path"], u["outside"], u["sha256"]) for u in used] == [
        (inside.relative_to(root).as_posix(), False, files.sha256(inside)),
        ("prompts.jsonl", True, files.sha256(outside)),
    ]
    with pytest.raises(InputError, match="no file"):
        run.uses(root / "none")


# what changes need a new run


def reasons(profile="quick", **overrides):
    parameters = profiles.resolve(STEM, profile, overrides)
    return artifacts.outdated(STEM, profile, parameters, REGISTRY)


def test_current_after_a_run_and_outdated_by_each_cause(root, counted):
    assert reasons() == ["fig-x is not made yet", "tab-x is not made yet"]
    run = begin()
    measured = run.measured("m", {}, counted)
    run.figure("fig-x", drawn(), FRAME)
    run.table("tab-x", FRAME)
    run.finish()
    assert reasons() == []
    assert reasons(documents=5) == ["parameters changed: documents"]
    figure = root / "build" / "quick" / "figures" / "fig-x.png"
    whole = figure.read_bytes()
    figure.write_bytes(whole[:-1])
    assert reasons() == ["fig-x.png differs from its record"]
    figure.write_bytes(whole)
    measured.touch()
    assert reasons() == []
    (root / "constraints.txt").write_text("numpy==1\n")
    assert reasons() == ["constraints.txt changed"]
    (root / "constraints.txt").unlink()
    cell = {"cell_type": "code", "source": "1", "outputs": []}
    notebook = root / "notebooks" / f"{STEM}.ipynb"
    notebook.write_text(json.dumps({"cells": [cell]}))
    assert reasons() == [f"code cells of notebooks/{STEM}.ipynb changed"]
    notebook.unlink()
    measured.write_bytes(b"other")
    assert reasons() == [f"{artifacts.relative(measured)} changed"]
    measured.unlink()
    assert reasons() == [f"{artifacts.relative(measured)} is gone"]


def test_a_changed_caption_or_title_needs_a_new_run():
    finished("quick")
    parameters = profiles.resolve(STEM, "quick")
    for changed in ({"caption": "Caption"}, {"title": "Another"}):
        registry = {**REGISTRY, "fig-x": dataclasses.replace(REGISTRY["fig-x"], **changed)}
        assert artifacts.outdated(STEM, "quick", parameters, registry) == [
            "fig-x: title or caption changed"
        ]
    assert reasons() == []


# a folder never holds a mixture


CRASHES = """
import hashlib, json, os, shutil, sys
from pathlib import Path
from paperlib import artifacts

folder = Path(sys.argv[1]) / "figures"

CHANGES = {"open", "write", "close", "replace", "rename", "mkdir", "rmdir", "unlink", "remove"}

def commit(letter, names):
    contents = {n: (letter * 1000).encode() for n in names}
    records = [artifacts._file_record(n, c) for n, c in contents.items()]
    entries = {"fig": {"files": records, "notebook": {"stem": "s"}, "letter": letter,
                       "volatile": {}}}
    artifacts._commit(folder, "s", contents, entries)

OLD, NEW = ("a.pdf", "b.pdf", "gone.pdf"), ("a.pdf", "b.pdf", "more.pdf")

def state():
    entry = artifacts.read_manifest(folder)["fig"]
    present = {p.name for p in folder.iterdir()}
    assert present == {"manifest.json", *(f["path"] for f in entry["files"])}, present
    for f in entry["files"]:
        content = (folder / f["path"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == f["sha256"], f["path"]
        assert content == (entry["letter"] * 1000).encode()
    return entry["letter"]

seen, k = [], 0
while True:
    k += 1
    shutil.rmtree(folder, ignore_errors=True)
    commit("o", OLD)
    child = os.fork()
    if child == 0:
        count = 0

        def kill(frame, event, arg):
            global count
            if event == "c_call" and arg.__name__ in CHANGES:
                count += 1
                if count == k:
                    os.kill(os.getpid(), 9)

        sys.setprofile(kill)
        commit("n", NEW)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    seen.append(state())
    commit("x", NEW)  # and the next run completes
    assert state() == "x"
    if status == 0:
        break
print("".join(seen))
"""


def test_a_commit_killed_before_any_of_its_system_calls_is_all_or_nothing(root):
    done = subprocess.run(
        [sys.executable, "-c", CRASHES, str(root)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = done.stdout.strip()
    assert len(seen) > 20, "the enumeration must have visited the steps of a commit"
    # old up to the one deciding rename, new from there on
    assert seen == "o" * seen.count("o") + "n" * seen.count("n")
    assert seen.count("o") > 5
    assert seen.count("n") > 5


WRITER = """
import sys
from pathlib import Path
from paperlib import artifacts
folder, stem = Path(sys.argv[1]) / "figures", sys.argv[2]
for i in range(40):
    content = f"{stem} {i}".encode()
    entry = {"files": [artifacts._file_record(f"{stem}.pdf", content)],
             "notebook": {"stem": stem}, "i": i, "volatile": {}}
    artifacts._commit(folder, stem, {f"{stem}.pdf": content}, {stem: entry})
"""


def test_notebooks_that_finish_at_the_same_time_lose_nothing(root):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(root), stem]) for stem in ("a", "b")
    ]
    assert [w.wait(60) for w in writers] == [0, 0]
    entries = artifacts.read_manifest(root / "figures")
    assert {name: entry["i"] for name, entry in entries.items()} == {"a": 39, "b": 39}
    for name, entry in entries.items():
        assert files.sha256(root / "figures" / f"{name}.pdf") == entry["files"][0]["sha256"]


# the declared artifacts of this repository


@pytest.mark.parametrize("id", artifacts.REGISTRY)
def test_declared_artifacts_are_complete(id):
    artifact = artifacts.REGISTRY[id]
    assert artifact.id == id
    assert id.startswith({"figure": "fig-", "table": "tab-"}[artifact.kind])
    assert artifact.notebook in profiles.PARAMETERS
    assert id == id.lower().replace("_", "-")
    for text in (artifact.title, artifact.caption, artifact.alt, artifact.refuted_by):
        assert text.strip() == text
        assert text
    assert artifact.caption.endswith(".")
    assert artifact.caption.count("$") % 2 == 0


def test_paths_of_profiles_do_not_overlap():
    folders = [paths.figures(p) for p in profiles.NAMES] + [paths.build("full") / "figures"]
    assert len(set(folders)) == 4


def test_the_mark_lies_below_everything_else():
    run = artifacts.start(STEM, profile="smoke", registry=REGISTRY)
    figure = drawn()
    figure.axes[0].set_xlabel("a label")
    run.figure("fig-x", figure, FRAME)
    (mark,) = figure.findobj(lambda a: a.get_gid() == "profile-mark")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    assert mark.get_window_extent(renderer).y1 <= figure.axes[0].get_tightbbox(renderer).y0
