"""Text goes through the target once; its hidden states at block boundaries come to disk.

A capture is a folder::

    capture.json    what was asked for, by whom, and the ids of the documents
    states.bin      [L, n, d] in the dtype asked for, boundary by boundary, memory-mapped
    rms.npy         [L, n] float32, root mean square of each state
    entropy.npy     [n] float64, entropy in nats of the next-token distribution at the token
    tokens.npz      document, position, token id, special: [n] each

Documents are right-padded in batches. A causal model never looks to the right, so padding cannot
reach a real token, and its rows are never stored.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from paperlib import files
from paperlib.corpora import Document
from paperlib.errors import InputError
from paperlib.targets import Target

FORMAT = "paperlib-capture-1"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOGIT_ROWS = 128  # rows whose vocabulary-sized logits exist at one time


@dataclass(frozen=True)
class TokenStates:
    """Hidden states of n tokens at L boundaries, memory-mapped, with facts about each token."""

    path: Path
    boundaries: tuple[int, ...]
    num_layers: int
    states: Tensor  # [L, n, d], read from disk when touched
    rms: np.ndarray  # [L, n]
    entropy: np.ndarray  # [n] nats; of the distribution over the token at position + 1
    document: np.ndarray  # [n] index into documents
    position: np.ndarray  # [n]
    token: np.ndarray  # [n]
    special: np.ndarray  # [n] bool
    documents: tuple[str, ...]
    provenance: dict[str, Any]

    @property
    def tokens(self) -> int:
        return self.states.shape[1]

    @property
    def hidden_size(self) -> int:
        return self.states.shape[2]


def capture_states(
    target: Target,
    documents: Sequence[Document],
    out: Path,
    *,
    boundaries: Sequence[int] | None = None,
    dtype: str = "float32",
    batch_tokens: int = 2048,
    progress: bool = True,
) -> TokenStates:
    """Run ``documents`` through ``target`` and keep the residual stream at ``boundaries``.

    boundaries: ids in 0..N, all of them by default; N is the state before the final norm.
    dtype: of the stored states ("float32", "bfloat16", "float16").
    batch_tokens: padded tokens in a batch; affects time and memory only.

    A run that was killed is taken up where it stopped. A finished capture of the same request in
    ``out`` is opened instead; one of another request is refused (InputError).
    """
    out = Path(out)
    chosen = tuple(range(target.num_layers + 1)) if boundaries is None else tuple(boundaries)
    if sorted(set(chosen)) != list(chosen) or not chosen:
        raise InputError(
            f"boundaries {list(chosen)} must be ascending, without repeats, at least one"
        )
    if chosen[0] < 0 or chosen[-1] > target.num_layers:
        raise InputError(
            f"boundaries {list(chosen)} must lie in 0..{target.num_layers}, "
            f"the block boundaries of {target.name}"
        )
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not documents:
        raise InputError("no documents to capture: the corpus is empty after tokenisation")
    for document in documents:
        _check(document, target)
    request = {
        "format": FORMAT,
        "target": target.name,
        "fingerprint": target.fingerprint,
        "model_dtype": str(target.model.dtype),
        "boundaries": list(chosen),
        "dtype": dtype,
        "num_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "tokens": sum(len(d.input_ids) for d in documents),
        "content": files.key([[d.id, list(d.input_ids)] for d in documents]),
    }
    if out.exists():
        existing = open_states(out)
        _same_request(existing.provenance, request, out)
        return existing
    partial = out.with_name(f".{out.name}.partial")
    writer = _Writer(partial, request, documents)
    batches = _batches(documents, batch_tokens)
    pending = [batch for batch in batches if not writer.done[batch].all()]
    bar = tqdm(
        total=request["tokens"],
        initial=int(writer.lengths[writer.done].sum()),
        unit="tok",
        desc="capture",
        disable=None if progress else True,
    )
    batch: list[int] = []
    final: list[Tensor] = []
    row_of = {b: row for row, b in enumerate(chosen)}

    def receive(boundary: int, state: Tensor) -> None:
        # written at once, so that the model reuses the memory of its states
        if boundary in row_of:
            writer.put(batch, row_of[boundary], state)
        if boundary == target.num_layers:
            final[:] = [state]

    with bar, torch.inference_mode(), _Taps(target, chosen, receive):
        for batch in pending:
            rows = [documents[i].input_ids for i in batch]
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            for row, row_ids in zip(ids, rows, strict=True):
                row[: len(row_ids)] = torch.tensor(row_ids)
            # No attention mask: every real token sees exactly the tokens to its left.
            target.model.base_model(input_ids=ids.to(target.device), use_cache=False)
            real = torch.arange(width) < torch.tensor([[len(row)] for row in rows])
            rows_of_n = final.pop()
            entropy = predictive_entropy(target, rows_of_n[real.to(rows_of_n.device)])
            writer.commit(batch, entropy)
            bar.update(sum(map(len, rows)))
    writer.finish(out)
    return open_states(out)


def predictive_entropy(target: Target, prenorm: Tensor) -> Tensor:
    """Entropy in nats of the next-token distribution. [n, d] states at boundary N -> [n] float64.

    The [n, V] logits exist for ``LOGIT_ROWS`` rows at a time.
    """
    pieces = []
    size = min(LOGIT_ROWS, len(prenorm)), target.vocab_size
    memory = [prenorm.new_empty(size), torch.empty(size, device=prenorm.device)]
    for rows in prenorm.split(LOGIT_ROWS):
        logits = target.logits_from_prenorm(rows, out=memory[0][: len(rows)]).float()  # [m, V]
        logits -= logits.amax(dim=-1, keepdim=True)
        weights = torch.exp(logits, out=memory[1][: len(rows)])
        total = weights.sum(dim=-1)
        # H = log Z - E[z]; torch.linalg.vecdot reads both operands once
        mean = torch.linalg.vecdot(weights, logits) / total
        pieces.append((total.log() - mean).double().cpu())
    return torch.cat(pieces).clamp_(min=0)


def open_states(path: Path) -> TokenStates:
    """Open a finished capture; InputError if it is foreign, truncated or of another version."""
    path = Path(path)
    record = path / "capture.json"
    if not record.is_file():
        partial = path.with_name(f".{path.name}.partial")
        state = "an unfinished capture lies beside it" if partial.exists() else "no capture there"
        raise InputError(f"{path}: expected a folder with capture.json ({state})")
    try:
        provenance = json.loads(record.read_text())
    except ValueError as error:
        raise InputError(
            f"{record}: not JSON ({error}); delete the folder and capture again"
        ) from (error)
    if not isinstance(provenance, dict) or provenance.get("format") != FORMAT:
        found = provenance.get("format") if isinstance(provenance, dict) else type(provenance)
        raise InputError(f"{record}: format {found!r}, expected {FORMAT!r}; capture again")
    try:
        boundaries = tuple(provenance["boundaries"])
        documents = tuple(provenance["documents"])
        num_layers = provenance["num_layers"]
        dtype = DTYPES[provenance["dtype"]]
        shape = (len(boundaries), provenance["tokens"], provenance["hidden_size"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{record}: {error} is missing or unknown; capture again") from error
    expected = int(np.prod(shape)) * dtype.itemsize
    actual = (path / "states.bin").stat().st_size if (path / "states.bin").is_file() else -1
    if actual != expected:
        raise InputError(
            f"{path / 'states.bin'}: {max(actual, 0)} bytes, expected {expected} for "
            f"[L, n, d] = {list(shape)} {provenance['dtype']}: truncated or foreign; capture again"
        )
    states = torch.from_file(
        str(path / "states.bin"), shared=False, size=int(np.prod(shape)), dtype=dtype
    ).view(shape)
    try:
        entropy = np.load(path / "entropy.npy", allow_pickle=False)
        rms = np.load(path / "rms.npy", allow_pickle=False)
        with np.load(path / "tokens.npz", allow_pickle=False) as archive:
            facts = {name: archive[name] for name in ("document", "position", "token", "special")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: damaged capture ({error}); capture again") from error
    for name, values in {**facts, "entropy": entropy, "rms": rms.T}.items():
        if len(values) != shape[1]:
            raise InputError(f"{path}: {name} holds {len(values)} tokens, expected {shape[1]}")
    if len(rms) != shape[0] or facts["document"].max() >= len(documents):
        raise InputError(
            f"{path}: boundaries or documents are not those of capture.json; capture again"
        )
    return TokenStates(
        path=path,
        boundaries=boundaries,
        num_layers=num_layers,
        states=states,
        rms=rms,
        entropy=entropy,
        documents=documents,
        provenance=provenance,
        **facts,
    )


def _check(document: Document, target: Target) -> None:
    """Refuse what would stop the run half-way."""
    ids = document.input_ids
    if not ids or len(ids) != len(document.special):
        raise InputError(
            f"document {document.id}: {len(ids)} tokens and {len(document.special)} special marks, "
            "expected as many, and at least one"
        )
    rows = target.embed_tokens.weight.shape[0]
    if min(ids) < 0 or max(ids) >= rows:
        raise InputError(
            f"document {document.id} holds a token outside 0..{rows - 1}, the embeddings of "
            f"{target.name}: is it from another tokenizer?"
        )
    config = target.model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    if longest and len(ids) > longest:
        raise InputError(
            f"document {document.id} has {len(ids)} tokens, but {target.name} takes at most "
            f"{longest}: lower max_tokens"
        )


def _same_request(found: dict[str, Any], request: dict[str, Any], path: Path) -> None:
    """The fingerprint tells targets apart; the name may be another path to the same folder."""
    for name, value in request.items():
        if name != "target" and found.get(name) != value:
            raise InputError(
                f"{path} already holds a capture with {name} = {found.get(name)!r}, "
                f"asked for {value!r}: choose another folder or delete this one"
            )


def _batches(documents: Sequence[Document], batch_tokens: int) -> list[list[int]]:
    """Documents sorted by length, grouped so that a padded batch stays within batch_tokens."""
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].input_ids), i))
    batches: list[list[int]] = []
    for i in order:
        width = len(documents[batches[-1][0]].input_ids) if batches else 0
        if batches and width * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


class _Taps:
    """Forward hooks that hand over the residual stream at the chosen boundaries (and at N)."""

    def __init__(
        self, target: Target, boundaries: Sequence[int], receive: Callable[[int, Tensor], None]
    ) -> None:
        self.target = target
        self.boundaries = {*boundaries, target.num_layers}
        self.receive = receive

    def __enter__(self) -> "_Taps":
        def before(module: Any, args: tuple, kwargs: dict) -> None:
            self.receive(0, args[0] if args else kwargs["hidden_states"])

        def after(boundary: int) -> Any:
            def keep(module: Any, args: tuple, output: Any) -> None:
                self.receive(boundary, output[0] if isinstance(output, tuple) else output)

            return keep

        blocks = self.target.blocks
        self.handles = [
            blocks[b - 1].register_forward_hook(after(b))
            if b
            else blocks[0].register_forward_pre_hook(before, with_kwargs=True)
            for b in self.boundaries
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


class _Writer:
    """The files of an unfinished capture; ``done`` says which documents are on disk."""

    def __init__(self, partial: Path, request: dict[str, Any], documents: Sequence[Document]):
        self.partial = partial
        self.request = request
        self.documents = documents
        self.lengths = np.array([len(d.input_ids) for d in documents])
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        shape = (len(request["boundaries"]), request["tokens"], request["hidden_size"])
        done_file = partial / "done.npy"
        if done_file.is_file():
            _same_request(json.loads((partial / "request.json").read_text()), request, partial)
            self.done = np.load(done_file, allow_pickle=False)
            mode: Any = "r+"
        else:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            files.write_json(partial / "request.json", request)
            self.done = np.zeros(len(documents), dtype=bool)
            mode = "w+"
        self.dtype = DTYPES[request["dtype"]]
        self.states = open(partial / "states.bin", "r+b" if mode == "r+" else "w+b")  # noqa: SIM115
        self.states.truncate(int(np.prod(shape)) * self.dtype.itemsize)
        open_memmap = np.lib.format.open_memmap
        self.rms = open_memmap(partial / "rms.npy", mode=mode, dtype=np.float32, shape=shape[:2])
        self.entropy = open_memmap(
            partial / "entropy.npy", mode=mode, dtype=np.float64, shape=(shape[1],)
        )

    def put(self, batch: Sequence[int], b: int, state: Tensor) -> None:
        """state [rows, width, d] of the b-th boundary asked for; padding is left behind."""
        size = self.request["hidden_size"]
        rms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.float32) / size**0.5
        rms, state = rms.cpu(), state.to(self.dtype).cpu()
        for r, i in enumerate(batch):
            where = slice(self.starts[i], self.starts[i + 1])
            self._write(state[r, : self.lengths[i]], b, self.starts[i])
            self.rms[b, where] = rms[r, : self.lengths[i]].numpy()

    def _write(self, state: Tensor, b: int, start: int) -> None:
        """pwrite: an order of magnitude cheaper than page faults in a fresh memory map."""
        tokens, size = self.request["tokens"], self.request["hidden_size"]
        offset = (b * tokens + int(start)) * size * self.dtype.itemsize
        data = memoryview(state.contiguous().view(torch.uint8).numpy().data).cast("B")
        while data:
            written = os.pwrite(self.states.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def commit(self, batch: Sequence[int], entropy: Tensor) -> None:
        """Keep the entropies of the real tokens, row by row, and mark the documents as done.

        The page cache survives a killed process, so no fsync.
        """
        pieces = entropy.split(self.lengths[batch].tolist())
        for i, piece in zip(batch, pieces, strict=True):
            self.entropy[self.starts[i] : self.starts[i + 1]] = piece.numpy()
        self.done[batch] = True
        with files.replacing(self.partial / "done.npy") as temporary, open(temporary, "wb") as f:
            np.save(f, self.done)

    def finish(self, out: Path) -> None:
        self.rms.flush()
        self.entropy.flush()
        self.states.close()
        documents = self.documents
        np.savez(
            self.partial / "tokens.npz",
            document=np.repeat(np.arange(len(documents), dtype=np.int32), self.lengths),
            position=np.concatenate([np.arange(n, dtype=np.int32) for n in self.lengths]),
            token=np.array([t for d in documents for t in d.input_ids], dtype=np.int64),
            special=np.array([s for d in documents for s in d.special], dtype=bool),
        )
        record = {**self.request, "documents": [d.id for d in documents]}
        files.write_json(self.partial / "capture.json", record)
        os.replace(self.partial, out)
        for leftover in ("done.npy", "request.json"):
            (out / leftover).unlink()
