"""The guards on what is committed, and every notebook strictly under nbval."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paperlib import artifacts, pipeline, profiles, published
from tests import guards

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RULES = ROOT / "tests" / "nbval_sanitize.cfg"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks_and_each_has_a_numbered_name_and_parameters():
    assert NOTEBOOKS
    for path in NOTEBOOKS:
        assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
        assert path.stem in profiles.PARAMETERS
    assert set(profiles.PARAMETERS) == {path.stem for path in NOTEBOOKS}
    numbers = [path.stem[:2] for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers)


@each_notebook
@pytest.mark.parametrize("guard", guards.NOTEBOOK, ids=lambda guard: guard.__name__)
def test_notebook_guard(path, guard):
    assert guard(path) == []


@each_notebook
def test_parameters_cell_is_the_default_profile_and_every_name_is_read(path):
    pipeline.check_notebook(path.stem)


def test_every_sanitize_rule_is_read_by_nbval():
    assert guards.sanitize_rules(RULES.read_text()) == []


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("<object at 0x7f3c2a1b9d30>", "<object at ADDRESS>"),
        ("took 3.25 s", "took DURATION"),
        ("about 2 min left", "about DURATION left"),
        ("S_2 = 3.141 nats at b = 12", "S_2 = 3.141 nats at b = 12"),
        ("layers [2, 15, 27]", "layers [2, 15, 27]"),
    ],
)
def test_sanitize_rules_hide_what_they_are_for_and_nothing_else(text, clean):
    from nbval.plugin import get_sanitize_patterns

    for regex, replace in get_sanitize_patterns(RULES.read_text()):
        text = re.sub(regex, replace, text)
    assert text == clean


def test_committed_figures_and_manifest_agree():
    assert guards.manifest(ROOT / "figures", set(artifacts.REGISTRY)) == []


def test_committed_figures_and_measured_numbers_are_intact():
    problems, _ = published.verify("full")
    assert problems == []


def test_gallery_in_the_readme_is_current():
    readme = ROOT / "README.md"
    assert published.readme_with_gallery(readme) == readme.read_text(encoding="utf-8")


@pytest.mark.slow
@each_notebook
def test_committed_outputs_are_what_the_notebook_gives(path, tmp_path):
    """Strict nbval, and the figures of that very execution against the committed ones."""
    figures = tmp_path / "figures"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--nbval", "--nbval-current-env"),
            *("--nbval-sanitize-with", str(RULES), "-p", "no:cacheprovider", str(path)),
        ],
        cwd=ROOT,
        env={**os.environ, "PAPERLIB_FIGURES": str(figures), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"{len(guards.code_cells(path))} passed" in done.stdout
    ours = artifacts.read_manifest(figures)
    committed = artifacts.read_manifest(ROOT / "figures")
    for id in artifacts.declared(path.stem, artifacts.REGISTRY):
        same = published.is_same_environment(ours[id], committed[id])
        for record in ours[id]["files"]:
            new = (figures / record["path"]).read_bytes()
            old = (ROOT / "figures" / record["path"]).read_bytes()
            if same:
                assert new == old, record["path"]
            elif record["path"].endswith(".csv"):
                assert published.is_close(new, old), record["path"]
