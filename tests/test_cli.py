import sys

import pytest
from typer.testing import CliRunner

import paperlib
from paperlib import cli, published


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("PAPERLIB_ROOT", str(tmp_path))
    (tmp_path / "notebooks").mkdir()
    return tmp_path


def run(monkeypatch, *arguments):
    """The exit code of the entry point itself."""
    monkeypatch.setattr(sys, "argv", ["paperlib", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return caught.value.code or 0


def test_version(monkeypatch, capsys):
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"paperlib {paperlib.__version__}\n"


def test_every_command_has_help():
    names = {c.name or c.callback.__name__ for c in cli.app.registered_commands}
    assert {"reproduce", "verify", "why", "cite", "gallery", "crate"} <= names
    for name in names:
        shown = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        for parameter in ("--help", *(["--profile"] if name in ("why", "verify") else [])):
            assert parameter in shown.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["reproduce"], 2, "no notebooks in"),
        (["why", "fig-cka-map"], 2, "no 'fig-cka-map' in figures"),
        (["cite", "fig-cka-map", "--profile", "quick"], 2, "in build/quick/figures"),
        (["gallery"], 2, "README.md has no place for the gallery"),
        (["crate"], 2, "no artifacts of profile full"),
        (["verify"], 1, "manifest.json is missing or empty"),
    ],
)
def test_bad_input_is_one_line_and_a_nonzero_exit(monkeypatch, capsys, arguments, code, words):
    assert run(monkeypatch, *arguments) == code
    out, err = capsys.readouterr()
    assert words in out + err
    if code == 2:
        assert err.startswith("error: ")
        assert err.count("\n") == 1


def test_unknown_options_and_commands_are_refused(monkeypatch, capsys):
    assert run(monkeypatch, "reproduce", "--profil", "quick") == 2
    assert run(monkeypatch, "reprodcue") == 2


def test_reproduce_hands_its_options_on(monkeypatch):
    from paperlib import pipeline

    seen = {}

    def fake(profile, overrides, **options):
        seen.update(options, profile=profile, overrides=overrides)
        return 1

    monkeypatch.setattr(pipeline, "reproduce", fake)
    arguments = ["--profile", "smoke", "--target", "gpt2", "-p", "seed=3", "--only", "01"]
    assert run(monkeypatch, "reproduce", *arguments, "--force", "--keep-going") == 1
    assert seen["profile"] == "smoke"
    assert seen["overrides"] == ["seed=3", "target=gpt2"]
    assert seen["only"] == ["01"]
    assert (seen["force"], seen["keep_going"], seen["remeasure"]) == (True, True, False)


def test_verify_exits_by_what_it_found(monkeypatch, capsys):
    monkeypatch.setattr(published, "verify", lambda profile, against: ([], ["code changed"]))
    assert run(monkeypatch, "verify") == 0
    assert "note: code changed" in capsys.readouterr().out
    monkeypatch.setattr(published, "verify", lambda profile, against: (["x.csv differs"], []))
    assert run(monkeypatch, "verify") == 1
    assert "mismatch: x.csv differs" in capsys.readouterr().out


def test_gallery_check_fails_until_it_is_renewed(monkeypatch, root, capsys):
    readme = root / "README.md"
    readme.write_text(f"# T\n{published._START}\nold\n{published._END}\n")
    assert run(monkeypatch, "gallery", "--check") == 1
    assert "old" in readme.read_text()
    assert run(monkeypatch, "gallery") == 0
    assert "old" not in readme.read_text()
    assert run(monkeypatch, "gallery", "--check") == 0
