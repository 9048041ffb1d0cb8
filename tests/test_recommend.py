"""``paperlib select`` on small models, end to end, and its errors."""

import json

import pytest
from typer.testing import CliRunner

from paperlib import cli
from paperlib.recommend import methods
from tests.tiny import tiny_target_folder

SENTENCE = "the cat sat on a mat and saw two small birds fly over an old red house"
WORDS = SENTENCE.split(" ")


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = []
    for i in range(12):
        words = [WORDS[(i * 7 + j * (i + 3)) % len(WORDS)] for j in range(40)]
        rows.append(json.dumps({"text": " ".join(words)}))
    path.write_text("\n".join(rows))
    return path


def select(*args: str):
    """Run the command as the entry point does: InputError is one line and exit code 2."""
    result = CliRunner().invoke(cli.app, ["select", *args])
    return result


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    from paperlib.study.source import target_of

    monkeypatch.setenv("PAPERLIB_CACHE", str(tmp_path / "cache"))
    target_of.cache_clear()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma3"])
def test_small_models_of_other_families(family, texts, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / family, family, layers=8)
    out = tmp_path / "record.json"
    result = select(
        str(folder),
        "--texts",
        str(texts),
        "--out",
        str(out),
        "--resamples",
        "5",
        "--documents",
        "12",
    )
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert record["format"] == "paperlib-selection-1"
    chosen = record["boundaries"]
    assert len(chosen) == 3
    assert all(1 <= b <= 7 for b in chosen)
    assert record["engines"]["vllm"] == chosen
    assert record["engines"]["specforge"] == [b - 1 for b in chosen]
    rule = record["default_rule"]
    assert rule["boundaries"] == [2, 4, 5]
    assert 1 <= rule["rank"] <= rule["of"] == 35  # 7 choose 3
    assert "the default rule [2, 4, 5] ranks" in result.output


def test_four_blocks_say_why_there_is_no_default_rule_and_still_select(texts, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=4)
    out = tmp_path / "record.json"
    result = select(str(folder), "--texts", str(texts), "--out", str(out), "-k", "2")
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert len(record["boundaries"]) == 2
    assert record["default_rule"]["boundaries"] is None
    assert "needs at least 7 blocks" in " ".join(record["remarks"])
    assert "needs at least 7 blocks" in result.output


@pytest.mark.parametrize("method", methods())
def test_every_method_runs_and_is_deterministic(method, texts, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    records = []
    for name in ("a.json", "b.json"):
        out = tmp_path / name
        result = select(
            str(folder), "--texts", str(texts), "--out", str(out), "--method", method, "--json",
            "--resamples", "3",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        record = json.loads(out.read_text())
        assert json.loads(result.output) == record
        record.pop("seconds")
        records.append(record)
    assert records[0] == records[1]


def test_one_engine_and_a_report(texts, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    report = tmp_path / "report"
    args = [str(folder), "--texts", str(texts), "--out", str(tmp_path / "r.json")]
    result = select(*args, "--engine", "sglang", "--report", str(report))
    assert result.exit_code == 0, result.output
    assert "sglang" in result.output
    assert "tensorrt-llm" not in result.output
    assert sorted(p.name for p in report.iterdir()) == [
        "cka-map.png",
        "landscape.csv",
        "landscape.png",
    ]
    again = select(*args, "--report", str(report))
    assert "name a new folder" in str(again.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-k", "7"], "expected 1 to 6"),
        (["-k", "6", "--min-gap", "3"], "6"),
        (["--method", "best"], "is not one of s2"),
        (["--keep", "0.01"], "at least 64 are needed"),
        (["--engine", "ollama"], "is not one of transformers"),
        (["--resamples", "0"], "must be at least 1"),
        (["--documents", "1"], "must be at least 2"),
    ],
)
def test_bad_options_are_one_line(options, message, texts, tmp_path, capsys, monkeypatch) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    out = tmp_path / "record.json"
    argv = ["paperlib", "select", str(folder), "--texts", str(texts), "--out", str(out), *options]
    monkeypatch.setattr("sys.argv", argv)
    capsys.readouterr()  # what building the fixtures printed
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert not out.exists()


def test_an_unknown_model_is_one_line(capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["paperlib", "select", "no such model"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "unknown target 'no such model'" in capsys.readouterr().err
