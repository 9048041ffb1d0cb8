"""Every guard catches the fault that it is for, and no other guard hides that it would not.

A sound notebook passes all guards. Each sabotage below changes one thing, and exactly the guard
named beside it complains: without that guard the fault would go through, and the test fails.
"""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests import guards
from tests.test_notebook_guards import ROOT, RULES

SOURCES = (
    "x = 2  # a parameter",
    "from paperlib import errors",
    "print(x + 1)",
    "import_free = [x, x]\nimport_free",
)


def sound(path: Path) -> nbformat.NotebookNode:
    """A notebook as it would be committed: executed, clean, with a figure shown."""
    v4 = nbformat.v4
    cells = [v4.new_code_cell(s, id=f"c{i}", execution_count=i + 1) for i, s in enumerate(SOURCES)]
    cells[0].metadata["tags"] = ["parameters"]
    cells[2].outputs = [v4.new_output("stream", name="stdout", text="3\n")]
    data = {"text/plain": "[2, 2]"}
    cells[3].outputs = [v4.new_output("execute_result", data=data, execution_count=4)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    notebook = v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, path)
    return notebook


def complaints(path: Path) -> set[str]:
    return {guard.__name__ for guard in guards.NOTEBOOK if guard(path)}


def strip(notebook):
    for cell in notebook.cells:
        cell.outputs, cell.execution_count = [], None


def out_of_order(notebook):
    notebook.cells[1].execution_count = 7


def error_output(notebook):
    output = nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])
    notebook.cells[2].outputs = [output]


def stderr_output(notebook):
    output = nbformat.v4.new_output("stream", name="stderr", text="Warning\n")
    notebook.cells[2].outputs.append(output)


def injected_cell(notebook):
    notebook.cells[1].metadata["tags"] = ["injected-parameters"]


def papermill_metadata(notebook):
    notebook.metadata["papermill"] = {}


def home_path(notebook):
    notebook.cells[2].outputs[0].text = "/home/someone/data\n"


def too_large(notebook):
    notebook.cells[2].outputs[0].text = "x" * guards.LARGEST


def own_kernel(notebook):
    notebook.metadata["kernelspec"]["name"] = "my-env"


def python_version(notebook):
    notebook.metadata["language_info"]["version"] = "3.11.7"


def figure_not_shown(notebook):
    notebook.cells[2].source = "run.figure('fig-x', f, data)"


def svg(notebook):
    data = {"image/svg+xml": "<svg/>"}
    notebook.cells[2].outputs.append(nbformat.v4.new_output("display_data", data=data))


def foreign_import(notebook):
    notebook.cells[1].source = "import numpy as np"


def foreign_import_from(notebook):
    notebook.cells[1].source = "from torch import nn"


def long_function(notebook):
    body = "\n".join("    y = x" for _ in range(guards.LONGEST))
    notebook.cells[1].source = f"def f(x):\n{body}"


def skipped_check(notebook):
    notebook.cells[2].source = "# NBVAL_IGNORE_OUTPUT\nprint(x + 1)"


SABOTAGE = [
    (strip, "execution_counts"),
    (out_of_order, "execution_counts"),
    (error_output, "errors"),
    (stderr_output, "stderr"),
    (injected_cell, "injected"),
    (papermill_metadata, "injected"),
    (home_path, "machine_paths"),
    (too_large, "size"),
    (own_kernel, "kernel"),
    (python_version, "kernel"),
    (figure_not_shown, "figures_shown"),
    (svg, "figures_shown"),
    (foreign_import, "imports"),
    (foreign_import_from, "imports"),
    (long_function, "functions"),
    (skipped_check, "unchecked"),
]


def test_a_sound_notebook_passes_every_guard(tmp_path):
    sound(tmp_path / "n.ipynb")
    assert complaints(tmp_path / "n.ipynb") == set()


@pytest.mark.parametrize(("change", "guard"), SABOTAGE, ids=lambda x: getattr(x, "__name__", x))
def test_only_the_guard_of_this_fault_complains(tmp_path, change, guard):
    path = tmp_path / "n.ipynb"
    notebook = sound(path)
    change(notebook)
    nbformat.write(notebook, path)
    assert complaints(path) == {guard}


def test_every_guard_has_its_sabotage():
    assert {guard for _, guard in SABOTAGE} == {g.__name__ for g in guards.NOTEBOOK}


# sanitize rules


@pytest.mark.parametrize(
    "text",
    [
        "regex: a+\nreplace:\n",  # nothing after the colon, not even a space
        "regex: a+\n\nreplace: A\n",
        "regex: a+\n",
        "replace: A\n",
        "regex:a+\nreplace: A\n",
        " regex: a+\nreplace: A\n",
        "Regex: a+\nreplace: A\n",
        "regex: (a+\nreplace: A\n",
        "regex: a*\nreplace: A\n",
    ],
)
def test_malformed_sanitize_rules_are_refused(text):
    good = "regex: b+\nreplace: B\n"
    assert guards.sanitize_rules(good) == []
    assert guards.sanitize_rules(good + text) != []


# figures and manifest


@pytest.fixture
def figures(tmp_path):
    folder = tmp_path / "figures"
    folder.mkdir()
    (folder / "fig-a.png").write_bytes(b"a")
    record = {"path": "fig-a.png", "sha256": hashlib.sha256(b"a").hexdigest(), "bytes": 1}
    entries = {"fig-a": {"files": [record], "profile": "full"}}
    (folder / "manifest.json").write_text(json.dumps({"artifacts": entries}))
    assert guards.manifest(folder, {"fig-a"}) == []
    return folder


def test_figures_that_do_not_match_the_manifest_are_found(figures):
    (figures / "fig-b.png").write_bytes(b"b")
    assert guards.manifest(figures, {"fig-a"}) == ["fig-b.png is not in the manifest"]
    (figures / "fig-b.png").unlink()
    (figures / "fig-a.png").write_bytes(b"b")
    assert guards.manifest(figures, {"fig-a"}) == ["fig-a.png differs from the manifest"]
    (figures / "fig-a.png").unlink()
    assert guards.manifest(figures, {"fig-a"}) == ["fig-a.png is missing"]


def test_undeclared_unmade_and_marked_artifacts_are_found(figures):
    assert guards.manifest(figures, set()) == ["fig-a is made and not declared"]
    assert guards.manifest(figures, {"fig-a", "tab-b"}) == ["tab-b is declared and not made"]
    text = (figures / "manifest.json").read_text()
    (figures / "manifest.json").write_text(text.replace('"full"', '"smoke"'))
    assert guards.manifest(figures, {"fig-a"}) == ["fig-a is of profile smoke"]


# nbval itself, with the options that the notebooks are tested with


def nbval(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env"),
            *("--nbval-sanitize-with", str(RULES), "-p", "no:cacheprovider"),
            *("--rootdir", str(path.parent), "-c", str(ROOT / "pyproject.toml"), str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PAPERLIB_FIGURES": str(path.parent / "figures")},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_nbval_passes_what_is_right_and_fails_a_wrong_output(tmp_path):
    path = tmp_path / "n.ipynb"
    notebook = sound(path)
    right = nbval(path)
    assert right.returncode == 0, right.stdout
    assert "4 passed" in right.stdout
    notebook.cells[2].outputs[0].text = "4\n"
    nbformat.write(notebook, path)
    wrong = nbval(path)
    assert wrong.returncode == 1
    assert "1 failed, 3 passed" in wrong.stdout


def test_nbval_alone_passes_a_stripped_notebook_so_the_guard_is_needed(tmp_path):
    path = tmp_path / "n.ipynb"
    notebook = sound(path)
    strip(notebook)
    notebook.cells[2].source = "print('anything')"
    nbformat.write(notebook, path)
    assert nbval(path).returncode == 0
    assert complaints(path) == {"execution_counts"}
