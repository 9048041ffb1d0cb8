import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paperlib.eagle3 import generate, sweep
from paperlib.errors import InputError
from tests.eagle3.tiny import conversations, tiny_target


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Any) -> Path:
    """A model folder, and responses whose prompts need no tokenizer."""
    target = tiny_target()
    target.model.save_pretrained(tmp_path / "model")
    data = conversations(target, 12)
    said = [t[m] for t, m in zip(data.tokens, data.responses, strict=True)]
    path = tmp_path / "responses.safetensors"
    generate.write_responses(path, data.ids, said, np.ones(12), {"prompts": "x"})

    def joined(target: Any, responses: Any, chosen: Any = None) -> Any:
        which = range(12) if chosen is None else chosen
        parts = (data.ids, data.tokens, data.responses)
        return tuple([part[i] for i in which] for part in parts)

    monkeypatch.setattr(sweep, "conversations", joined)
    monkeypatch.setenv("PAPERLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sweep.SIZES, "smoke", sweep.Size(9, 300, 40, 3))
    return tmp_path


def heads(place: Path, **changes: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        "sets": ["default", "1,2"],
        "seeds": [0, 1],
        "target": str(place / "model"),
        "responses": place / "responses.safetensors",
        "held_out": [place / "responses.safetensors"],
        "profile": "smoke",
        "out": place / "heads",
        "workers": 1,
        "progress": False,
    }
    return sweep.train_heads(**{**given, **changes})


def test_runs_are_paired_scored_and_never_redone(place: Path) -> None:
    results = heads(place)
    assert [(r["boundaries"], r["seed"]) for r in results] == [
        ([2, 3, 4], 0),
        ([2, 3, 4], 1),
        ([1, 2], 0),
        ([1, 2], 1),
    ]
    metrics = {
        name: (place / "heads" / name / "metrics.csv").read_text().splitlines()
        for name in ("2-3-4-s0", "1-2-s0", "1-2-s1")
    }
    passes = {n: [line.split(",")[1] for line in m[1:]] for n, m in metrics.items()}
    assert passes["2-3-4-s0"] == passes["1-2-s0"] != passes["1-2-s1"]
    for r in results:
        for part in ("validation", "responses"):
            scores = r["scores"][part]
            assert 1 <= scores["head"]["tau"] <= 4
            assert scores["head"]["rows"] == scores["trigram"]["rows"] > 0
    before = {p: p.stat().st_mtime_ns for p in (place / "heads").rglob("*") if p.is_file()}
    shutil.rmtree(place / "cache")  # a finished run needs its states no more
    again = heads(place)
    assert again == results
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert not (place / "cache").exists()
    lines = sweep.summary(results)
    assert len(lines) == 8
    assert all("trigram" in line for line in lines)


def test_another_request_in_the_same_folder_is_refused(place: Path) -> None:
    heads(place, sets=["1,2"], seeds=[0])
    with pytest.raises(InputError, match="another run"):
        heads(place, sets=["1,2"], seeds=[0], lr=1e-4)


def test_online_gives_the_scores_of_the_cache(place: Path) -> None:
    """Stored in bf16, the states differ a little, so the scores need not be the same digits."""
    (kept,) = heads(place, sets=["1,2"], seeds=[0])
    (online,) = heads(place, sets=["1,2"], seeds=[0], online=True, out=place / "other")
    a, b = (r["scores"]["validation"]["head"] for r in (kept, online))
    assert a["rows"] == b["rows"]
    assert abs(a["loss_1"] - b["loss_1"]) < 0.05
    folder = json.loads((place / "other" / "1-2-s0" / "head" / "paperlib.json").read_text())
    assert folder["head"]["boundaries"] == [1, 2]


def test_a_head_worse_than_the_tables_is_said_to_be(place: Path) -> None:
    result = {
        "boundaries": [1],
        "seed": 0,
        "scores": {"v": {"head": {"tau": 1.2}, "bigram": {"tau": 1.1}, "trigram": {"tau": 1.3}}},
    }
    assert "NOT better" in sweep.summary([result])[0]
    result["scores"]["v"]["head"]["tau"] = 1.31
    assert "NOT" not in sweep.summary([result])[0]


def test_split_depends_on_ids_alone() -> None:
    ids = [f"a/{i}" for i in range(50)]
    fit, judge = sweep.split(ids, 10, 0)
    assert not set(fit) & set(judge)
    assert len(judge) == 10
    assert len(fit) == 40
    turned = ids[::-1]
    _, other = sweep.split(turned, 10, 0)
    assert {turned[i] for i in other} == {ids[i] for i in judge}


@pytest.mark.parametrize(
    ("changes", "say"),
    [
        ({"profile": "huge"}, "profile"),
        ({"no_such": 1}, "unknown training options"),
        ({"sets": ["one"]}, "layer set"),
        ({"sets": ["3,1"]}, "ascending"),
    ],
)
def test_bad_requests(place: Path, changes: dict, say: str) -> None:
    with pytest.raises(InputError, match=say):
        heads(place, **changes)
