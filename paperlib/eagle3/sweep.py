"""Heads for several layer sets and seeds on the same data: ``paperlib train``.

States are captured once for the union of boundaries. Runs of one seed share data order,
initialisation and schedule, so that sets are compared in pairs. A finished run is never redone.
"""

import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paperlib import files, paths
from paperlib.boundaries import default_boundaries
from paperlib.capture import capture_states
from paperlib.corpora import Document
from paperlib.eagle3 import ngram
from paperlib.eagle3.draft import config_for, load_head
from paperlib.eagle3.generate import Responses, prompts_of, read_responses
from paperlib.eagle3.train import (
    Examples,
    Online,
    TrainConfig,
    TrainingTest,
    best_tokens,
    evaluate,
    evaluate_ngram,
    flat,
    train,
)
from paperlib.eagle3.vocab import DraftVocab, count_tokens, coverage, frequent
from paperlib.errors import InputError
from paperlib.targets import EMBEDDED, load_target


@dataclass(frozen=True)
class Size:
    """What a profile trains: conversations (0: all), passes, draft vocabulary."""

    conversations: int
    passes: int
    draft_vocab: int
    validation: int  # conversations held out


SIZES = {
    "smoke": Size(24, 600, 512, 4),
    "quick": Size(400, 40_000, 4096, 40),
    "full": Size(0, 900_000, 8192, 120),
}


def parse_set(text: str, num_layers: int) -> tuple[int, ...]:
    """``"default"`` or ascending boundaries such as ``"5,18,29"``."""
    if text == "default":
        return default_boundaries(num_layers).boundaries
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"layer set {text!r}: expected 'default' or boundaries such as 2,15,27"
        ) from None


def split(ids: Sequence[str], validation: int, limit: int, seed: int = 0) -> tuple[list, list]:
    """(training, validation) indices: by a hash of the record id, so that they do not depend on
    which other records there are. limit: training conversations, 0 for all."""
    order = sorted(range(len(ids)), key=lambda i: files.key([seed, ids[i]]))
    if validation >= len(ids):
        raise InputError(f"{validation} conversations to hold out of {len(ids)}: generate more")
    held, rest = order[:validation], order[validation:]
    return sorted(rest[:limit] if limit else rest), sorted(held)


def conversations(
    target: Any, responses: Responses, chosen: Sequence[int] | None = None
) -> tuple[list[str], list[np.ndarray], list[np.ndarray]]:
    """Ids, token ids and response masks: each prompt with the answer behind it."""
    prompts = prompts_of(target, responses)
    ids, tokens, masks = [], [], []
    for i in range(len(prompts)) if chosen is None else chosen:
        prompt, said = prompts[i].input_ids, responses.tokens[i]
        ids.append(prompts[i].id)
        tokens.append(np.concatenate([np.asarray(prompt, dtype=np.int64), said]))
        masks.append(np.arange(len(prompt) + len(said)) >= len(prompt))
    return ids, tokens, masks


def captured(
    target: Any,
    ids: Sequence[str],
    tokens: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    boundaries: Sequence[int],
    *,
    dtype: str = "bfloat16",
    progress: bool = True,
) -> Examples:
    """States at ``boundaries`` and N, captured once into the cache and memory-mapped."""
    union = tuple(sorted({*boundaries, target.num_layers}))
    documents = [
        Document(i, t.tolist(), [False] * len(t)) for i, t in zip(ids, tokens, strict=True)
    ]
    content = files.key([[d.id, d.input_ids] for d in documents])
    folder = (
        paths.cache() / "states" / f"{target.fingerprint}-{content}-{files.key([union, dtype])}"
    )
    states = capture_states(
        target, documents, folder, boundaries=union, dtype=dtype, progress=progress
    )
    place = folder / "best.npy"
    if not place.exists():
        best = best_tokens(target, states.states[-1]).numpy()
        with files.replacing(place) as temporary, open(temporary, "wb") as stream:
            np.save(stream, best)
    return Examples(ids, tokens, responses, states.states, union, np.load(place))


@dataclass(frozen=True)
class Run:
    """One head to train. Everything that a worker process needs, as plain values."""

    target: str
    responses: Path
    boundaries: tuple[int, ...]
    union: tuple[int, ...]
    size: Size
    options: TrainConfig
    head: tuple[tuple[str, Any], ...]  # options of the head
    held_out: tuple[Path, ...]  # further responses to judge on
    online: bool
    device: str
    dtype: str
    out: Path
    progress: bool

    @property
    def key(self) -> str:
        """Of all that the result depends on."""
        about = asdict(self)
        for name in ("out", "progress", "union", "device"):
            del about[name]
        about["responses"] = files.sha256(self.responses)
        about["held_out"] = [files.sha256(p) for p in self.held_out]
        about["options"] = {
            **asdict(self.options),
            "checkpoint_every": 0,
            "evaluate_every": 0,
        }
        return files.key(about)


def perform(run: Run) -> dict[str, Any]:
    """Train, judge on validation and on the held-out files, and write ``result.json``."""
    done = run.out / "result.json"
    if done.exists():
        result = json.loads(done.read_text())
        if result["key"] == run.key:
            return result
        raise InputError(
            f"{run.out} holds another run (key {result['key']}, asked for {run.key}): choose "
            "another folder or delete it"
        )
    began = time.perf_counter()
    target = load_target(run.target, dtype=run.dtype, device=run.device)
    responses = read_responses(run.responses)
    training, held = split(responses.ids, run.size.validation, run.size.conversations)
    examples = _examples(target, responses, [*training, *held], run)
    fit, judge = range(len(training)), range(len(training), len(training) + len(held))
    counts = count_tokens(
        [examples.tokens[i][examples.responses[i]] for i in fit], target.vocab_size
    )
    vocab = frequent(counts, min(run.size.draft_vocab, target.vocab_size))
    config = config_for(target, run.boundaries, vocab.size, **dict(run.head))
    ready = time.perf_counter()
    train(target, examples, fit, judge, config, vocab, run.options, run.out, progress=run.progress)
    trained = time.perf_counter()
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:
        return {}
    head = load_head(run.out / "head", target.embed_tokens.weight.detach())
    test = TrainingTest(head.to(target.device), target, run.options.steps)
    tables = {
        name: ngram.fit(
            [examples.tokens[i] for i in fit],
            [examples.responses[i] for i in fit],
            target.vocab_size,
            order,
        )
        for name, order in (("bigram", 2), ("trigram", 3))
    }
    judged = {"validation": (examples, judge)}
    for path in run.held_out:
        other = _examples(target, read_responses(path), None, run)
        judged[path.stem] = (other, range(len(other)))
    scores: dict[str, Any] = {}
    for name, (data, which) in judged.items():
        found = {"head": evaluate(test, data, which)}
        found |= {k: evaluate_ngram(t, data, which, run.options.steps) for k, t in tables.items()}
        scores[name] = {k: flat(e) for k, e in found.items()}
        scores[name]["coverage"] = _coverage(data, which, vocab)
    result = {
        "key": run.key,
        "boundaries": list(run.boundaries),
        "seed": run.options.seed,
        "passes": run.options.passes,
        "draft_vocab": vocab.size,
        "coverage": coverage(counts, vocab),
        "seconds": {"data": ready - began, "training": trained - ready},
        "scores": scores,
    }
    files.write_json(done, result)
    return result


def _examples(
    target: Any, responses: Responses, chosen: Sequence[int] | None, run: Run
) -> Examples:
    data = conversations(target, responses, chosen)
    if run.online:
        return Online(target, *data)
    return captured(target, *data, run.union, progress=run.progress)


def _coverage(data: Examples, which: Sequence[int], vocab: DraftVocab) -> float:
    counts = count_tokens([data.tokens[i][data.responses[i]] for i in which], len(vocab.t2d))
    return coverage(counts, vocab)


def _perform_alone(run: Run) -> dict[str, Any]:
    torch.set_num_threads(1)
    return perform(run)


def train_heads(
    sets: Sequence[str] = ("default",),
    *,
    target: str = EMBEDDED,
    responses: Path | None = None,
    seeds: Sequence[int] = (0,),
    profile: str = "full",
    out: Path | None = None,
    options: TrainConfig | None = None,
    head: dict[str, Any] | None = None,
    held_out: Sequence[Path] = (),
    online: bool = False,
    device: str = "cpu",
    dtype: str = "float32",
    workers: int = 0,
    progress: bool = True,
    **changes: Any,
) -> list[dict[str, Any]]:
    """``paperlib train``: a head for every layer set and seed; one result for each, in that order.

    workers: processes of one thread each (0: one a core), which trains more heads an hour than
    one process of many threads; 1 trains one after the other here. Under torchrun all processes
    share every run. changes: fields of TrainConfig, for example ``lr=5e-4``.
    """
    if profile not in SIZES:
        raise InputError(f"profile {profile!r}: expected one of {', '.join(SIZES)}")
    size = SIZES[profile]
    unknown = set(changes) - set(TrainConfig.__dataclass_fields__)
    if unknown:
        raise InputError(f"unknown training options {sorted(unknown)}")
    base = replace(options or TrainConfig(passes=size.passes), **changes)
    distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if distributed and not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda" and distributed:
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    place = responses or paths.root() / "data" / "responses" / f"{target}.safetensors"
    loaded = load_target(target, dtype=dtype, device=device)
    wanted = [parse_set(text, loaded.num_layers) for text in sets]
    union = tuple(sorted({b for s in wanted for b in s}))
    folder = out or paths.build(profile) / "heads"
    runs = [
        Run(
            target=target,
            responses=place,
            boundaries=boundaries,
            union=union,
            size=size,
            options=replace(base, seed=seed),
            head=tuple(sorted((head or {}).items())),
            held_out=tuple(held_out),
            online=online,
            device=device,
            dtype=dtype,
            out=folder / f"{'-'.join(map(str, boundaries))}-s{seed}",
            progress=progress,
        )
        for boundaries in wanted
        for seed in seeds
    ]
    if not online and not all(
        (run.out / "result.json").exists() for run in runs
    ):  # once, before workers would all do it
        _warm_cache(loaded, runs[0])
    count = workers or len(os.sched_getaffinity(0))
    if distributed or count == 1 or len(runs) == 1 or device != "cpu":
        return [perform(run) for run in runs]
    results: dict[int, dict[str, Any]] = {}
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_perform_alone, run): i for i, run in enumerate(runs)}
        for future in as_completed(futures):
            results[futures[future]] = future.result()
    return [results[i] for i in range(len(runs))]


def _warm_cache(target: Any, run: Run) -> None:
    responses = read_responses(run.responses)
    training, held = split(responses.ids, run.size.validation, run.size.conversations)
    if dist.is_initialized() and dist.get_rank():
        dist.barrier()
    _examples(target, responses, [*training, *held], run)
    for path in run.held_out:
        _examples(target, read_responses(path), None, run)
    if dist.is_initialized() and not dist.get_rank():
        dist.barrier()


def summary(results: Sequence[dict[str, Any]]) -> list[str]:
    """Lines to print: tau of every head beside the n-gram tables of the same responses."""
    lines = []
    for r in results:
        name = f"{r['boundaries']} seed {r['seed']}"
        for where, s in r["scores"].items():
            tau, bi, tri = (s[k]["tau"] for k in ("head", "bigram", "trigram"))
            verdict = "" if tau > tri else "  NOT better than the trigram table"
            lines.append(
                f"{name}  {where}: tau {tau:.3f} (bigram {bi:.3f}, trigram {tri:.3f}){verdict}"
            )
    return lines
