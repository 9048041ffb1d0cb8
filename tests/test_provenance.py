import ast
import json

import pytest

from paperlib import provenance


def test_imports_are_found_at_any_depth_and_in_every_form():
    tree = ast.parse(
        "import paperlib.gram as g\nimport numpy\nfrom paperlib import files, paths\n"
        "from paperlib.errors import InputError\n"
        "def f():\n    from paperlib.study import depth\n    from . import boundaries\n"
    )
    found = provenance.imported(tree, "paperlib.entropy")
    assert {
        *("paperlib.gram", "paperlib.files", "paperlib.paths", "paperlib.errors"),
        *("paperlib.study.depth", "paperlib.boundaries"),
    } <= found
    assert not any("numpy" in name for name in found)


@pytest.fixture
def package(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGE", tmp_path)

    def write(name, source):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
        provenance._parsed.cache_clear()

    write("__init__.py", "")
    write("a.py", "from paperlib import b\nX = 1\n")
    write("b.py", "def f():\n    from paperlib.sub.c import Y\n    return Y\n")
    write("sub/__init__.py", "")
    write("sub/c.py", "Y = 2\n")
    write("d.py", "Z = 3\n")
    return write


def test_modules_follow_imports_and_leave_out_the_rest(package):
    found = provenance.modules(["paperlib.a"])
    assert {n for n in found if n.startswith("paperlib")} == {
        *("paperlib", "paperlib.a", "paperlib.b", "paperlib.sub", "paperlib.sub.c"),
    }


@pytest.mark.parametrize(
    ("source", "same"),
    [
        ('"""Said."""\n\n# why\nY  =  2  # two\n', True),
        ("Y = 3\n", False),
        ('Y = 2\n\ndef f():\n    "only a docstring"\n', False),
    ],
)
def test_the_hash_sees_code_and_not_comments_docstrings_or_layout(package, source, same):
    before = provenance.modules(["paperlib.a"])
    package("sub/c.py", source)
    after = provenance.modules(["paperlib.a"])
    assert (before == after) is same
    assert before["paperlib.a"] == after["paperlib.a"]


def test_a_string_that_is_a_value_counts(package):
    package("d.py", "def f():\n    'doc'\n    return 'x'\n")
    before = provenance.modules(["paperlib.d"])
    package("d.py", "def f():\n    'other doc'\n    return 'x'\n")
    assert provenance.modules(["paperlib.d"]) == before
    package("d.py", "def f():\n    'doc'\n    return 'y'\n")
    assert provenance.modules(["paperlib.d"]) != before


def test_profiles_and_registry_are_compared_by_value_instead(package):
    package("profiles.py", "X = 1\n")
    package("artifacts.py", "from paperlib import profiles\nREGISTRY: dict = {1: 2}\nY = 1\n")
    before = provenance.modules(["paperlib.artifacts"])
    assert set(before) == {"paperlib", "paperlib.artifacts", provenance._STYLE}
    package("profiles.py", "X = 2\n")
    package("artifacts.py", "from paperlib import profiles\nREGISTRY: dict = {3: 4}\nY = 1\n")
    assert provenance.modules(["paperlib.artifacts"]) == before
    package("artifacts.py", "from paperlib import profiles\nREGISTRY: dict = {3: 4}\nY = 2\n")
    assert provenance.modules(["paperlib.artifacts"]) != before


def test_first_notebook_does_not_depend_on_cka():
    """Changing cka.py must leave the entropy notebook current."""
    found = provenance.modules(["paperlib.artifacts", "paperlib.plotting", "paperlib.gram"])
    assert "paperlib.gram" in found
    assert "paperlib.cka" not in found


def test_notebook_hash_sees_code_cells_only(tmp_path):
    path = tmp_path / "n.ipynb"

    def hashed(code, text, outputs):
        cells = [
            {"cell_type": "markdown", "source": [text]},
            {"cell_type": "code", "source": code, "outputs": outputs},
        ]
        path.write_text(json.dumps({"cells": cells, "metadata": {"x": text}}))
        return provenance.notebook_hash(path)

    assert hashed(["a\n", "b"], "t", []) == hashed("a\nb", "u", ["o"])
    assert hashed("a", "t", []) != hashed("b", "t", [])
    assert provenance.notebook_hash(tmp_path / "none.ipynb") == ""


def test_magics_do_not_stop_the_parser():
    tree = provenance.parse_cell("%matplotlib inline\n!ls\nfrom paperlib import gram\n")
    assert "paperlib.gram" in provenance.imported(tree)


@pytest.mark.parametrize(
    ("lines", "pinned"),
    [
        ("numpy=={numpy}\n# a remark\nnot-installed-anywhere==1\n", True),
        ("numpy==0.0.1\n", False),
    ],
)
def test_pinned_means_that_installed_versions_are_those_of_the_constraints(
    tmp_path, monkeypatch, lines, pinned
):
    import numpy as np

    monkeypatch.setenv("PAPERLIB_ROOT", str(tmp_path))
    assert not provenance.is_pinned()  # no constraints.txt
    (tmp_path / "constraints.txt").write_text(lines.format(numpy=np.__version__))
    assert provenance.is_pinned() is pinned


def test_environment_names_no_machine():
    import getpass
    import socket

    text = json.dumps(provenance.environment())
    assert socket.gethostname() not in text
    assert f'"{getpass.getuser()}"' not in text
    assert "/" not in text
