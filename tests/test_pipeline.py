"""The pipeline on a toy repository: real kernels, no model."""

import dataclasses
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from paperlib import paths, pipeline, profiles
from paperlib.artifacts import Artifact
from paperlib.errors import InputError
from tests import toy_paper
from tests.toy_paper import contents, paper


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A toy repository whose quick and full profiles have run once; tests work on copies."""
    root = toy_paper.make(tmp_path_factory.mktemp("made"))
    for arguments in (["--profile", "quick"], ["--profile", "full", "--remeasure"]):
        done = paper(root, "reproduce", *arguments, "--save-outputs")
        assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.fixture
def toy(made, tmp_path):
    root = tmp_path / "toy"
    shutil.copytree(made, root, symlinks=True)
    return root


def states(done):
    """stem -> made | up to date | failed | not run, from the printed summary."""
    lines = [line.split(": ") for line in done.stdout.splitlines() if not line.startswith(" ")]
    known = ("made", "up to date", "failed", "not run")
    return {x[0]: x[1] for x in lines if len(x) == 2 and x[1] in known}


def assert_whole(folder):
    """The oracle: nothing but json and hashlib."""
    if not (folder / "manifest.json").exists():
        assert not folder.exists() or not [p for p in folder.iterdir() if p.name[0] != "."]
        return
    entries = json.loads((folder / "manifest.json").read_text())["artifacts"]
    recorded = {f["path"]: f["sha256"] for e in entries.values() for f in e["files"]}
    present = {p.name for p in folder.iterdir() if p.name[0] != "."} - {"manifest.json"}
    assert present == set(recorded)
    for name, sha256 in recorded.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256, name


def test_second_run_does_nothing_and_says_so(toy):
    before = contents(toy / "build" / "quick" / "figures")
    done = paper(toy, "reproduce", "--profile", "quick")
    assert done.returncode == 0
    assert states(done) == {"01_alpha": "up to date", "02_beta": "up to date"}
    assert "nothing to do: all 3 figures and tables are current" in done.stdout
    assert contents(toy / "build" / "quick" / "figures") == before


def test_touching_and_commenting_rerun_nothing(toy):
    for path in [*toy.glob("notebooks/*"), *toy.glob("paperlib/*.py"), toy / "constraints.txt"]:
        os.utime(path)
    with open(toy / "paperlib" / "alpha.py", "a") as stream:
        stream.write("\n# a remark\n")
    path = toy / "notebooks" / "01_alpha.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[0].source = "# Another title"
    nbformat.write(notebook, path)
    assert "nothing to do" in paper(toy, "reproduce", "--profile", "quick").stdout


def test_a_changed_constant_reruns_only_what_imports_it(toy):
    path = toy / "paperlib" / "beta.py"
    path.write_text(path.read_text().replace("SLOPE = 2.0", "SLOPE = 3.0"))
    before = contents(toy / "build" / "quick" / "figures")
    done = paper(toy, "reproduce", "--profile", "quick")
    assert states(done) == {"01_alpha": "up to date", "02_beta": "made"}
    assert "code changed: paperlib.beta" in done.stdout
    after = contents(toy / "build" / "quick" / "figures")
    assert after["fig-beta.csv"] != before["fig-beta.csv"], "the measurement was made again"
    assert after["fig-alpha.csv"] == before["fig-alpha.csv"]


def test_full_keeps_the_committed_numbers_whatever_the_code_and_why_says_so(toy):
    path = toy / "paperlib" / "beta.py"
    path.write_text(path.read_text().replace("SLOPE = 2.0", "SLOPE = 3.0"))
    before = contents(toy / "figures")
    done = paper(toy, "reproduce", "--profile", "full")
    assert states(done)["02_beta"] == "made"
    assert contents(toy / "figures")["fig-beta.csv"] == before["fig-beta.csv"]
    assert "today's code differs: paperlib.beta" in paper(toy, "why", "fig-beta").stdout
    done = paper(toy, "reproduce", "--profile", "full", "--only", "02", "--remeasure")
    assert done.returncode == 0
    assert contents(toy / "figures")["fig-beta.csv"] != before["fig-beta.csv"]
    assert "today's code differs" not in paper(toy, "why", "fig-beta").stdout


def test_two_clean_runs_give_identical_bytes(toy):
    before = contents(toy / "figures")
    assert len(before) == 10
    first_data = contents(toy / "data" / "full")
    done = paper(toy, "reproduce", "--profile", "full", "--force")
    assert states(done) == {"01_alpha": "made", "02_beta": "made"}
    assert contents(toy / "figures") == before
    assert contents(toy / "data" / "full") == first_data
    (toy / "figures").rename(toy / "first")
    shutil.rmtree(toy / "build")
    assert paper(toy, "reproduce", "--profile", "full").returncode == 0
    now = contents(toy / "figures")
    del before["manifest.json"], now["manifest.json"]  # holds the time of making
    assert now == before
    assert paper(toy, "verify", "--against", "first").returncode == 0


def test_only_runs_one_and_overrides_are_parameters(toy):
    done = paper(toy, "reproduce", "--profile", "quick", "-p", "points=3", "--only", "02_beta")
    assert states(done) == {"02_beta": "made"}
    assert "parameters changed: points" in done.stdout
    assert len((toy / "build/quick/figures/fig-beta.csv").read_text().splitlines()) == 4
    assert len((toy / "build/quick/figures/fig-alpha.csv").read_text().splitlines()) == 7


def test_changed_parameters_of_full_leave_figures_alone(toy):
    before = contents(toy / "figures")
    done = paper(toy, "reproduce", "--profile", "full", "-p", "gain=1", "--only", "02")
    assert done.returncode == 0
    assert contents(toy / "figures") == before
    assert (toy / "build" / "full" / "figures" / "fig-beta.png").is_file()
    assert "build/full/figures/fig-beta" in done.stdout


def test_plain_papermill_works_from_any_folder(toy, tmp_path):
    out = tmp_path / "elsewhere" / "out.ipynb"
    out.parent.mkdir()
    command = [sys.executable, "-m", "papermill", str(toy / "notebooks" / "02_beta.ipynb"), out]
    subprocess.run(
        [*command, "-p", "profile", "smoke", "-p", "points", "5", "--no-progress-bar"],
        cwd=out.parent,
        env=toy_paper.environment(toy),
        check=True,
        capture_output=True,
        timeout=100,
    )
    assert len((toy / "build/smoke/figures/fig-beta.csv").read_text().splitlines()) == 6
    assert os.listdir(out.parent) == ["out.ipynb"]


def test_saved_outputs_hold_no_trace_of_the_run(toy):
    path = toy / "notebooks" / "01_alpha.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = [c for c in notebook.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == list(range(1, 1 + len(code)))
    text = path.read_text()
    assert "papermill" not in text
    assert "injected" not in text
    assert str(toy) not in text
    assert "figures/fig-alpha  .csv .pdf .png" in text
    images = [o for c in code for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(images) == 1


BROKEN = {
    "1 / 0": ("ZeroDivisionError: division by zero", "    1 / 0"),
    "raise SystemExit(0)": ("stopped early: SystemExit", "    raise SystemExit(0)"),
    "import sys\nprint('odd', file=sys.stderr)": ("wrote to stderr: odd", "    import sys"),
    "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)": ("Kernel died", "    import os"),
    "from paperlib import nothing": ("cannot import name 'nothing'", "    from paperlib"),
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_run_that_did_not_succeed_fails_and_writes_no_figure(toy, code):
    cells = toy_paper.cells("alpha", "01_alpha", table=True)
    at = len(cells) if "stderr" in code else 3  # stderr also after everything was made
    toy_paper.write_notebook(toy / "notebooks" / "01_alpha.ipynb", [*cells[:at], code, *cells[at:]])
    before = contents(toy / "build" / "quick" / "figures")
    done = paper(toy, "reproduce", "--profile", "quick", "--only", "01")
    assert done.returncode == 1, done.stdout
    for part in (*BROKEN[code], "executed notebook: build/quick/notebooks/01_alpha.ipynb"):
        assert part in done.stdout
    assert (toy / "build" / "quick" / "notebooks" / "01_alpha.ipynb").is_file()
    assert contents(toy / "build" / "quick" / "figures") == before
    if "stderr" in code:  # and it is not taken for current afterwards
        again = paper(toy, "reproduce", "--profile", "quick", "--only", "01")
        assert again.returncode == 1


def test_a_missing_artifact_fails_the_run(toy):
    cells = toy_paper.cells("alpha", "01_alpha", table=True)
    toy_paper.write_notebook(toy / "notebooks" / "01_alpha.ipynb", cells[:3] + cells[4:])
    done = paper(toy, "reproduce", "--profile", "quick", "--only", "01")
    assert done.returncode == 1
    assert "did not make tab-alpha" in done.stdout
    toy_paper.write_notebook(toy / "notebooks" / "01_alpha.ipynb", cells[:4])
    done = paper(toy, "reproduce", "--profile", "quick", "--only", "01")
    assert done.returncode == 1
    assert "did not call run.finish()" in done.stdout


def test_keep_going_goes_on_after_a_failure(toy):
    cells = [*toy_paper.cells("alpha", "01_alpha", table=True), "1 / 0"]
    toy_paper.write_notebook(toy / "notebooks" / "01_alpha.ipynb", cells)
    beta = toy / "paperlib" / "beta.py"
    beta.write_text(beta.read_text().replace("SLOPE = 2.0", "SLOPE = 3.0"))
    done = paper(toy, "reproduce", "--profile", "quick")
    assert done.returncode == 1
    assert states(done) == {"01_alpha": "failed", "02_beta": "not run"}
    done = paper(toy, "reproduce", "--profile", "quick", "--keep-going")
    assert done.returncode == 1
    assert states(done) == {"01_alpha": "failed", "02_beta": "made"}


def test_a_timeout_ends_a_cell_that_hangs(toy):
    cells = toy_paper.cells("alpha", "01_alpha", table=True)
    cells.insert(1, "import time\ntime.sleep(60)")
    toy_paper.write_notebook(toy / "notebooks" / "01_alpha.ipynb", cells)
    began = time.time()
    done = paper(toy, "reproduce", "--profile", "quick", "--only", "01", "--timeout", "3")
    assert done.returncode == 1
    assert "time.sleep(60)" in done.stdout
    assert time.time() - began < 50


def test_bad_input_is_an_error_before_any_kernel_starts(toy):
    for arguments, words in (
        (["--profile", "fast"], "no profile 'fast'"),
        (["-p", "pints=3"], "no parameter 'pints'"),
        (["-p", "points=3.5"], "points = '3.5' is not an int"),
        (["-p", "points=1"], "points = 1 is out of range"),
        (["--only", "07"], "no notebook '07'"),
        (["--target", "gpt2"], "no parameter 'target'"),
    ):
        done = paper(toy, "reproduce", *arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_two_runs_of_one_profile_do_not_mix(toy):
    from filelock import FileLock

    with FileLock(toy / "build" / "quick" / "reproduce.lock"):
        done = paper(toy, "reproduce", "--profile", "quick")
    assert done.returncode == 2
    assert "another run of profile quick is in progress" in done.stderr


# killed at a random moment


def kernels_of(parent):
    return [p for p in psutil.Process(parent).children(recursive=True) if p.is_running()]


@pytest.mark.slow
def test_killing_kernel_or_parent_leaves_whole_figures_and_the_next_run_completes(tmp_path):
    root = toy_paper.make(tmp_path / "toy")
    folder = root / "build" / "smoke" / "figures"
    moments = random.Random(0)
    command = [sys.executable, "-m", "paperlib.cli", "reproduce", "--profile", "smoke", "--force"]
    killed = 0
    for attempt in range(10):
        run = subprocess.Popen(
            command,
            cwd=root,
            env=toy_paper.environment(root),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.3, 5.0))
        if run.poll() is None:
            children = kernels_of(run.pid)
            if attempt % 2 and children:
                children[0].send_signal(signal.SIGKILL)
                assert run.wait(30) in (0, 1)  # 0: the last cell had already been through
            else:
                run.kill()
                run.wait(30)
                # no kernel goes on computing for a parent that is gone
                assert psutil.wait_procs(children, timeout=10)[1] == []
            killed += 1
        assert_whole(folder)
    assert killed >= 5
    done = paper(root, "reproduce", "--profile", "smoke")
    assert done.returncode == 0, done.stdout
    assert_whole(folder)
    assert paper(root, "verify", "--profile", "smoke").returncode == 0
    assert "nothing to do" in paper(root, "reproduce", "--profile", "smoke").stdout


# the check of a notebook, without a kernel


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """check(cells, parameters) -> runs check_notebook on a toy notebook in this process."""
    monkeypatch.setenv("PAPERLIB_ROOT", str(tmp_path))

    @dataclasses.dataclass(frozen=True)
    class Toy:
        points: int = profiles.at_least(2, "points")
        gain: float = profiles.at_least(0.0, "gain")
        label: str = profiles.text("label")
        seed: int = profiles.at_least(0, "seed")

    monkeypatch.setitem(profiles.PARAMETERS, "01_alpha", {"full": Toy(4, 0.5, "toy", 0)})
    registry = {"fig-a": Artifact("fig-a", "figure", "01_alpha", "T", "C.", "A", "R")}

    def check(cells=None, parameters=toy_paper.PARAMETERS_CELL, registry=registry):
        path = paths.notebooks() / "01_alpha.ipynb"
        default = toy_paper.cells("alpha", "01_alpha", table=False)
        default[1] = "p = run.parameters\nframe = (p.points, p.gain, p.label)"
        toy_paper.write_notebook(path, cells(default) if cells else default, parameters)
        pipeline.check_notebook("01_alpha", registry)

    return check


def test_a_sound_notebook_passes(checked):
    checked()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('profile = "full"', 'profile = "quick"', "profile = 'quick'"),
        ("points = -1", "points = 64", "points = 64"),
        ("points = -1", "points = -1.0", "points = -1.0"),
        ("points = -1  # how many points\n", "", "lacks parameter 'points'"),
        ("points", "pints", "'p"),
        ("  # how many points", "", "'points' has no comment"),
        ("seed = -1", "import os  # x\nseed = -1", "holds 'import os'"),
    ],
)
def test_a_parameters_cell_that_is_not_the_default_profile_is_refused(checked, old, new, words):
    assert old in toy_paper.PARAMETERS_CELL
    with pytest.raises(InputError, match=words):
        checked(parameters=toy_paper.PARAMETERS_CELL.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (", p.gain", "", "'gain' is not read"),
        ("gain=gain", "gain=0.5", "'gain' is not given to start"),
        (", gain=gain", "", "'gain' is not given to start"),
        ('start("01_alpha"', 'start("01_beta"', r"start\('01_alpha'"),
        ("run.finish()", "exit()\nrun.finish()", "exit ends the kernel"),
        ("run.finish()", "import os\nos._exit(0)", "os._exit ends the kernel"),
        ("run.finish()", "import sys\nsys.exit()", "sys.exit ends the kernel"),
    ],
)
def test_a_notebook_that_would_mislead_is_refused(checked, old, new, words):
    def change(cells):
        assert any(old in c for c in cells)
        return [c.replace(old, new) for c in cells]

    with pytest.raises(InputError, match=words):
        checked(change)


def test_a_parameter_read_only_by_an_imported_module_counts_as_read(checked, monkeypatch):
    def change(cells):
        return [c.replace(", p.gain", "") for c in cells]

    with pytest.raises(InputError, match="'gain' is not read"):
        checked(change)
    monkeypatch.setattr(pipeline, "_attributes_of_modules", lambda notebook: {"gain"})
    checked(change)


def test_a_notebook_needs_exactly_one_tagged_cell_and_an_artifact(checked, tmp_path):
    with pytest.raises(InputError, match="declares no artifact"):
        checked(registry={})
    path = tmp_path / "notebooks" / "01_alpha.ipynb"
    notebook = nbformat.read(path, as_version=4)
    del notebook.cells[1].metadata["tags"]
    nbformat.write(notebook, path)
    registry = {"fig-a": Artifact("fig-a", "figure", "01_alpha", "T", "C.", "A", "R")}
    with pytest.raises(InputError, match="0 cells tagged parameters"):
        pipeline.check_notebook("01_alpha", registry)


def test_notebooks_run_in_the_order_of_what_they_read(monkeypatch):
    monkeypatch.setattr(pipeline, "AFTER", {"03_c": ("01_a", "02_b"), "02_b": ("00_z",)})
    assert pipeline._with_inputs(["03_c"]) == ["00_z", "01_a", "02_b", "03_c"]
    assert pipeline._with_inputs(["01_a"]) == ["01_a"]


def test_every_declared_order_names_notebooks():
    for stem, before in pipeline.AFTER.items():
        assert {stem, *before} <= set(profiles.PARAMETERS)
        assert all(b < stem for b in before), "numbers follow the order"


def test_time_left_counts_what_is_still_to_run():
    report = pipeline._Report(None, {"a": 600.0, "b": 300.0})
    assert report.left() == "about 15 min left"
    report.done["a"] = "made"
    assert report.left() == "about 5 min left"
    report.current, report.began = "b", time.time() - 240
    assert report.left() == "less than 2 min left"
    report.began = time.time() - 1000
    assert report.left() == "nearly done"
