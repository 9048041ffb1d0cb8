"""The draft vocabulary: the target tokens that a head can propose, and the maps both ways.

A head scores ``Vd`` of the target's ``V`` tokens. Draft id i stands for target id ``i + d2t[i]``
(an offset, as every engine stores it); ``t2d[v]`` says whether target id v can be drafted. Our own
vocabularies are sorted by target id; others may not be, so columns are always taken through d2t and
never through the mask.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paperlib.errors import InputError


@dataclass(frozen=True)
class DraftVocab:
    d2t: Tensor  # [Vd] int64, target id - draft id
    t2d: Tensor  # [V] bool

    @property
    def size(self) -> int:
        return len(self.d2t)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] the target id of each draft id."""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def draft_ids(self) -> Tensor:
        """[V] int64: the draft id of each target id, -1 where it cannot be drafted."""
        back = torch.full((len(self.t2d),), -1, dtype=torch.long, device=self.d2t.device)
        back[self.target_ids] = torch.arange(self.size, device=self.d2t.device)
        return back


def count_tokens(responses: Iterable[np.ndarray], vocab_size: int) -> np.ndarray:
    """[V] how often each target id occurs in the responses (arrays of token ids)."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for tokens in responses:
        if len(tokens):
            counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def frequent(counts: np.ndarray, size: int) -> DraftVocab:
    """The ``size`` most frequent target ids; ties go to the smaller id, also among unseen tokens.

    Raises InputError unless 1 <= size <= V.
    """
    if not 1 <= size <= len(counts):
        raise InputError(f"draft vocabulary of {size} tokens: expected 1 to {len(counts)}")
    # a stable sort of the negated counts leaves equal counts in order of id
    ids = np.sort(np.argsort(-np.asarray(counts, dtype=np.int64), kind="stable")[:size])
    return from_target_ids(torch.from_numpy(ids), len(counts))


def from_target_ids(ids: Tensor, vocab_size: int) -> DraftVocab:
    """The vocabulary whose draft id i stands for target id ``ids[i]``, in that order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return checked(ids.long() - torch.arange(len(ids)), t2d)


def checked(d2t: Tensor, t2d: Tensor | None = None, *, vocab_size: int | None = None) -> DraftVocab:
    """A vocabulary from a checkpoint's tensors; ``t2d`` is made when it is absent.

    Unsorted d2t is accepted. Raises InputError when ids fall outside the target's vocabulary,
    repeat, or contradict the mask.
    """
    if t2d is None and vocab_size is None:
        raise InputError("d2t without t2d: give vocab_size, the target's vocabulary size")
    total = len(t2d) if t2d is not None else int(vocab_size or 0)
    ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= total:
        span = f"{int(ids.min())}..{int(ids.max())}" if len(ids) else "nothing"
        raise InputError(
            f"d2t maps to target ids {span}, expected ids within 0..{total - 1}: "
            "d2t holds offsets (target id - draft id)"
        )
    member = torch.zeros(total, dtype=torch.bool, device=d2t.device)
    member[ids] = True
    if int(member.sum()) != len(ids):
        raise InputError(f"d2t maps {len(ids)} draft ids to {int(member.sum())} target ids")
    if t2d is not None and not torch.equal(member, t2d.bool()):
        raise InputError(
            f"t2d marks {int(t2d.bool().sum())} target ids, and not those that the {len(ids)} "
            "entries of d2t name: stale or foreign files"
        )
    return DraftVocab(d2t.long(), member)


def coverage(counts: np.ndarray, vocab: DraftVocab) -> float:
    """Share of the counted tokens that the vocabulary can propose."""
    total = int(counts.sum())
    return float(counts[vocab.t2d.cpu().numpy()].sum() / total) if total else 0.0
