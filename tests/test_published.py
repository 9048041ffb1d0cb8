import builtins
import json
import re
import shutil
import subprocess

import pandas as pd
import pytest
import yaml
from matplotlib import pyplot as plt

import paperlib
from paperlib import artifacts, published
from paperlib.artifacts import Artifact
from paperlib.errors import InputError

STEM = "01_layer_entropy"
REGISTRY = {
    "fig-x": Artifact("fig-x", "figure", STEM, "A & B", "Caption $x_1$.", 'alt "x"', "Nothing."),
    "tab-x": Artifact("tab-x", "table", STEM, "Table", "Caption 5 %.", "alt", "Nothing."),
}
FRAME = pd.DataFrame({"x": [1, 2], "y": [0.1 + 0.2, 1 / 3], "name": ["a", "b"]})


@pytest.fixture
def root(tmp_path, monkeypatch):
    for name in ("PAPERLIB_FIGURES", "PAPERLIB_PENDING", "PAPERLIB_REMEASURE", "PAPERLIB_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PAPERLIB_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    source = ["from paperlib import artifacts"]
    cell = {"cell_type": "code", "source": source, "outputs": [], "metadata": {}}
    text = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (tmp_path / "notebooks" / f"{STEM}.ipynb").write_text(text)
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "CITATION.cff").write_text(
        "title: T & U\nrepository-code: https://example.org/x\nlicense: Apache-2.0\n"
        "authors:\n  - name: The Authors\n  - given-names: Ada\n    family-names: B_C\n"
    )
    make()
    return tmp_path


def make(profile="full"):
    run = artifacts.start(STEM, profile=profile, registry=REGISTRY, remeasure=True)
    figure, ax = plt.subplots(figsize=(2, 2))
    ax.plot(FRAME["x"], FRAME["y"])
    run.measured("numbers", {"n": 2}, lambda out: FRAME.to_csv(out), suffix=".csv")
    run.figure("fig-x", figure, FRAME)
    run.table("tab-x", FRAME)
    run.finish()


def problems(against=None, registry=REGISTRY):
    return published.verify("full", against, registry)[0]


def test_what_was_just_made_is_intact(root):
    assert published.verify("full", None, REGISTRY) == ([], [])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "name", ["fig-x.pdf", "fig-x.png", "fig-x.csv", "tab-x.csv", "tab-x.md", "tab-x.tex"]
)
def test_one_changed_byte_is_found_and_named(root, name):
    flip(root / "figures" / name)
    assert problems() == [f"figures/{name} differs from its record (sha256)"]


def test_changed_measured_numbers_are_found(root):
    flip(root / "data" / "full" / "numbers.csv")
    assert problems() == ["data/full/numbers.csv differs from its record (sha256)"]


def test_missing_stray_undeclared_and_unmade_are_found(root):
    (root / "figures" / "fig-x.png").unlink()
    assert problems() == ["figures/fig-x.png is missing"]
    make()
    (root / "figures" / "fig-old.png").write_bytes(b"")
    assert problems() == ["figures/fig-old.png is in no record of the manifest"]
    (root / "figures" / "fig-old.png").unlink()
    fewer = {"fig-x": REGISTRY["fig-x"]}
    assert problems(registry=fewer) == ["tab-x is in the manifest, but not declared"]
    more = {**REGISTRY, "fig-z": Artifact("fig-z", "figure", STEM, "Z", "Z.", "z", "z")}
    assert problems(registry=more) == ["fig-z is declared, but not in the manifest"]
    shutil.rmtree(root / "figures")
    assert "paperlib reproduce --profile full" in problems()[0]


def test_an_interrupted_commit_is_finished_before_the_check(root):
    figures = root / "figures"
    (figures / ".commit").mkdir()
    for name in ("fig-x.png", "manifest.json"):
        (figures / name).rename(figures / ".commit" / name)
    assert problems() == []
    assert not (figures / ".commit").exists()


def test_changes_since_are_notes(root):
    (root / "constraints.txt").write_text("numpy==1\n")
    found, notes = published.verify("full", None, REGISTRY)
    assert found == []
    assert "fig-x: constraints.txt changed" in notes


# against another folder


def other(root, *, pinned, change):
    folder = root / "other"
    shutil.copytree(root / "figures", folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["artifacts"].values():
        entry["volatile"]["environment"]["pinned"] = pinned
    (folder / "manifest.json").write_text(json.dumps(manifest))
    text = (folder / "fig-x.csv").read_text()
    assert "0.3333333333333333" in text
    (folder / "fig-x.csv").write_text(text.replace("0.3333333333333333", change))
    flip(folder / "fig-x.png")
    return str(folder)


def test_in_the_pinned_environment_every_byte_counts(root):
    folder = other(root, pinned=True, change="0.3333333333333334")
    assert problems(folder) == [
        f"fig-x.csv differs from {folder} in the same environment",
        f"fig-x.png differs from {folder} in the same environment",
    ]


@pytest.mark.parametrize(
    ("change", "close"), [("0.3333333", True), ("0.33334", False), ("", False), ("x", False)]
)
def test_elsewhere_numbers_count_to_a_relative_millionth(root, change, close):
    folder = other(root, pinned=False, change=change)
    expected = [] if close else [f"fig-x.csv differs from {folder} by more than 1e-06 relative"]
    assert problems(folder) == expected


def test_columns_rows_and_text_must_agree():
    ours = b"a,b\n1,x\n2,y\n"
    assert published.is_close(ours, b"a,b\n1.0000000001,x\n2,y\n")
    for theirs in (b"a,c\n1,x\n2,y\n", b"a,b\n1,x\n", b"a,b\n1,x\n2,z\n", b""):
        assert not published.is_close(ours, theirs)


def test_against_a_git_revision(root):
    def git(*words):
        name = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        subprocess.run(["git", *name, *words], cwd=root, check=True, capture_output=True)

    git("init")
    git("add", "figures")
    git("commit", "-m", "figures")
    assert problems("HEAD") == []
    with pytest.raises(InputError, match="none"):
        problems("none")
    subprocess.run(["git", "rm", "--cached", "figures/fig-x.csv"], cwd=root, capture_output=True)
    git("commit", "-m", "one less")
    assert problems("HEAD") == ["fig-x.csv is not in HEAD"]


# why, cite, gallery, crate


def test_why_tells_the_whole_chain(root):
    text = published.why("fig-x", registry=REGISTRY)
    entry = json.loads((root / "figures" / "manifest.json").read_text())["artifacts"]["fig-x"]
    for part in (
        *("A & B", "refuted by: Nothing.", "paperlib reproduce --profile full --only 01 --force"),
        *(f"notebooks/{STEM}.ipynb", entry["notebook"]["sha256"], "seed = 0"),
        *("data/full/numbers.csv", entry["data"][0]["sha256"], 'key {"n":2}', "paperlib.artifacts"),
        *(f["sha256"] for f in entry["files"]),
        *(entry["constraints"], "nothing changed since", "today's code is the code"),
    ):
        assert part in text, part
    with pytest.raises(InputError, match=r"fig-none.*fig-x, tab-x"):
        published.why("fig-none")


def test_the_command_of_changed_parameters_repeats_them(root):
    entry = artifacts.read_manifest(root / "figures")["fig-x"]
    entry["parameters"]["documents"] = 5
    assert published.command(entry).endswith("--only 01 -p documents=5 --force")


def parse_bibtex(text):
    """A BibTeX entry read by counting braces: (type, key, {field: value})."""
    match = re.match(r"@(\w+)\{([^,\s{}]+),", text)
    assert match
    fields, at = {}, match.end()
    while True:
        name = re.compile(r"\s*(\w+)\s*=\s*\{").match(text, at)
        if name is None:
            assert re.fullmatch(r"\s*\}\s*", text[at:])
            return match[1], match[2], fields
        depth, end = 1, name.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        fields[name[1]] = text[name.end() : end - 1]
        at = end + 1 if text[end] == "," else end


def test_citing(root):
    line, bibtex = published.cite("fig-x").split("\n\n")
    kind, key, fields = parse_bibtex(bibtex)
    assert (kind, key) == ("misc", "paperlib-fig-x")
    assert fields["author"] == r"{The Authors} and {Ada B\_C}"
    assert fields["title"] == r"{A \& B}"
    assert fields["version"] == paperlib.__version__
    assert fields["url"] == "https://example.org/x"
    sha256 = re.fullmatch(r"sha256:([0-9a-f]{64})", fields["note"])[1]
    assert "The Authors, Ada B_C" in line
    assert sha256 in line
    flip(root / "figures" / "fig-x.csv")  # the hash is of the record, and the record's check fails
    assert sha256 in published.cite("fig-x")
    assert problems()


def test_the_content_hash_depends_on_every_file(root):
    entry = artifacts.read_manifest(root / "figures")["fig-x"]
    before = published.content_hash(entry)
    for record in entry["files"]:
        kept, record["sha256"] = record["sha256"], "0" * 64
        assert published.content_hash(entry) != before
        record["sha256"] = kept
    assert published.content_hash(entry) == before


def test_citing_a_profile_that_is_not_to_be_cited_says_so(root):
    make("quick")
    assert published.cite("fig-x", "quick").count("quick profile, not for citing") == 2


def test_gallery_lies_between_its_markers_and_stays_there(root):
    readme = root / "README.md"
    readme.write_text(f"# T\n{published._START}\nold\n{published._END}\nend\n")
    text = published.readme_with_gallery(readme, REGISTRY)
    assert text.startswith(f"# T\n{published._START}\n")
    assert text.endswith(f"\n{published._END}\nend\n")
    assert "old" not in text
    for part in ("[fig-x](figures/fig-x.pdf)", "alt=\"alt 'x'\"", "figures/tab-x.md", "Nothing."):
        assert part in text
    readme.write_text(text)
    assert published.readme_with_gallery(readme, REGISTRY) == text
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len(rows) == 2 + len(REGISTRY)
    assert {row.count("|") for row in rows} == {5}
    readme.write_text("# T\n")
    with pytest.raises(InputError, match="gallery: start"):
        published.readme_with_gallery(readme, REGISTRY)


def test_crate_says_which_action_made_each_file(root, tmp_path):
    pytest.importorskip("rocrate")
    published.crate(tmp_path / "crate")
    described = json.loads((tmp_path / "crate" / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {e["@id"]: e for e in described}
    action = entities["#make-fig-x"]
    assert "CreateAction" in action["@type"]
    assert action["instrument"]["@id"] == f"notebooks/{STEM}.ipynb"
    assert {r["@id"] for r in action["result"]} == {
        f"figures/fig-x.{suffix}" for suffix in ("pdf", "png", "csv")
    }
    used = action["object"]
    assert [u["@id"] for u in (used if isinstance(used, list) else [used])] == [
        "data/full/numbers.csv"
    ]
    for name in ("figures/fig-x.png", f"notebooks/{STEM}.ipynb", "data/full/numbers.csv"):
        assert (tmp_path / "crate" / name).read_bytes() == (root / name).read_bytes()
    assert entities["figures/fig-x.csv"]["sha256"] in published.why("fig-x", registry=REGISTRY)


def test_crate_without_its_package_says_what_to_install(root, tmp_path, monkeypatch):
    plain = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("rocrate"):
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"pip install 'paperlib\[crate\]'"):
        published.crate(tmp_path / "crate")


# CITATION.cff of this repository, by the rules of the Citation File Format 1.2.0


def test_citation_file():
    from pathlib import Path

    path = Path(__file__).parent.parent / "CITATION.cff"
    citation = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation), "required keys"
    assert set(citation) <= {
        *("cff-version", "message", "title", "authors", "abstract", "commit", "contact"),
        *("date-released", "doi", "identifiers", "keywords", "license", "license-url"),
        *("preferred-citation", "references", "repository", "repository-artifact"),
        *("repository-code", "type", "url", "version"),
    }
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == paperlib.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["type"] in ("software", "dataset")
    assert citation["authors"]
    for author in citation["authors"]:
        assert "name" in author or {"family-names", "given-names"} <= set(author)
    for name in ("message", "title", "abstract", "version"):
        assert isinstance(citation[name], str)
        assert citation[name]
    assert len(set(citation["keywords"])) == len(citation["keywords"])
