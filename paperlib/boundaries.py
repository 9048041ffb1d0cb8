"""Which layer is meant: boundary indices, the default rule, and every engine's ids.

Boundary b in 0..N is the residual stream before block b of a model with N blocks: b = 0 is the
embedding output as it enters block 0, b = N the output of the last block *before* the final norm.
Everything in this package stores boundaries; ids of other tools exist here and in checkpoints.

Two conventions are in use elsewhere:

* ``"boundary"``: id b is boundary b (transformers, vLLM, speculators, SafeAILab/EAGLE, llama.cpp);
* ``"block-output"``: id x is the output of block x, boundary x + 1 (SpecForge, Model-Optimizer,
  TensorRT-LLM, and SGLang for Llama, Qwen and most other models).

SGLang is ambiguous: DeepSeek models take ids as block outputs only if the first one is 1, gpt-oss
models always take boundaries.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from paperlib.errors import InputError

KEY = "eagle_aux_hidden_state_layer_ids"
NESTED = "eagle_config"
SHIFT = {"boundary": 0, "block-output": 1}  # boundary = id + shift
ENGINES = {
    "transformers": "boundary",
    "vllm": "boundary",
    "sglang": "block-output",  # of most models; see the module docstring
    "specforge": "block-output",
    "speculators": "boundary",
    "eagle": "boundary",
    "modelopt": "block-output",
    "tensorrt-llm": "block-output",
    "llama.cpp": "boundary",
}


@dataclass(frozen=True)
class LayerSet:
    """Boundaries of a model with ``num_layers`` blocks: ascending, without repeats, in 0..N.

    The order is that of the column blocks of the head's fusion matrix. InputError otherwise.
    """

    boundaries: tuple[int, ...]
    num_layers: int

    def __post_init__(self) -> None:
        _check_whole(self.boundaries)
        object.__setattr__(self, "boundaries", tuple(int(b) for b in self.boundaries))
        shown, n = list(self.boundaries), self.num_layers
        if not shown:
            raise InputError("a layer set needs at least one boundary, none was given")
        if sorted(set(shown)) != shown:
            raise InputError(f"boundaries {shown} must be ascending, without repeats")
        if shown[0] < 0 or shown[-1] > n:
            raise InputError(
                f"boundaries {shown} must lie in 0..{n}: the model has {n} blocks, 0 is the "
                f"embedding output and {n} the state before the final norm"
            )

    def __len__(self) -> int:
        return len(self.boundaries)

    def __iter__(self) -> Iterator[int]:
        return iter(self.boundaries)

    def __str__(self) -> str:
        return str(list(self.boundaries))


@dataclass(frozen=True)
class Reading:
    """What a published config was taken to mean, and by which rule."""

    layers: LayerSet
    how: str
    certain: bool  # False: ids were absent, or another reading is plausible


def default_boundaries(num_layers: int) -> LayerSet:
    """[2, N//2, N-3], the rule of public EAGLE-3 code. InputError if N < 7 (ids would collide)."""
    if num_layers < 7:
        raise InputError(
            f"the default rule [2, N//2, N-3] needs at least 7 blocks for three ascending "
            f"boundaries, the model has {num_layers}: choose boundaries in 0..{num_layers} yourself"
        )
    return LayerSet((2, num_layers // 2, num_layers - 3), num_layers)


def dflash_boundaries(num_layers: int, k: int) -> LayerSet:
    """DFlash's k evenly spaced boundaries.

    Its block-output ids are [N//2] for k = 1, else round(1 + i (N - 4)/(k - 1)), i = 0..k-1, with
    Python's rounding of halves to even; boundaries are one more. InputError if they collide.
    """
    if k < 1:
        raise InputError(f"k = {k}: DFlash spacing needs k >= 1")
    span = num_layers - 4
    if span < k - 1:
        raise InputError(
            f"DFlash spacing of k = {k} boundaries needs at least {k + 3} blocks, "
            f"the model has {num_layers}"
        )
    ids = [round(1 + i * span / (k - 1)) for i in range(k)] if k > 1 else [num_layers // 2]
    return LayerSet(tuple(x + 1 for x in ids), num_layers)


def to_engine(layers: LayerSet, engine: str, *, convention: str | None = None) -> tuple[int, ...]:
    """The ids that ``engine`` takes for these boundaries.

    convention: for "sglang" only: "block-output" (default: Llama, Qwen and most models) or
    "boundary" (gpt-oss; DeepSeek when the first boundary is not 1).
    InputError where the engine cannot express a boundary, or the ids would be misread.
    "eagle" has its ids in code (the default rule): another set means editing its model file.
    """
    own = _convention(engine)
    chosen = convention or own
    _check_convention(chosen)
    if chosen != own and engine != "sglang":
        raise InputError(f"{engine} takes {own} ids only: leave out convention={convention!r}")
    shown, n = str(layers), layers.num_layers
    ids = tuple(b - SHIFT[chosen] for b in layers)
    if ids[0] < 0:
        raise InputError(
            f"{engine} takes outputs of blocks and cannot express boundary 0 (the embeddings) "
            f"of {shown}: choose boundaries in 1..{n}"
        )
    if layers.boundaries[-1] == n:
        if engine == "transformers":
            raise InputError(
                f"hidden_states[{n}] is taken after the final norm, boundary {n} of {shown} is "
                f"before it: hook the output of block {n - 1} instead"
            )
        if engine in ("eagle", "specforge") or (engine, chosen) == ("sglang", "block-output"):
            raise InputError(
                f"{engine} captures before blocks 0..{n - 1} and never reaches boundary {n} "
                f"of {shown}: choose boundaries below {n}"
            )
    if engine == "specforge" and len(layers) != 3:
        raise InputError(f"specforge takes exactly three layers, {shown} has {len(layers)}")
    if (engine, chosen) == ("sglang", "boundary") and ids[0] == 1:
        raise InputError(
            f"sglang takes ids that start with 1 as block outputs in some models, so boundaries "
            f"{shown} would be misread: choose a first boundary other than 1"
        )
    return ids


def from_engine(
    ids: Sequence[int] | None, engine: str, num_layers: int, *, convention: str | None = None
) -> LayerSet:
    """The boundaries that ``engine`` means by ``ids``, in any order; None: its default.

    convention overrides the engine's own, for heads that were written by another tool.
    InputError for repeated ids, ids out of range, and SGLang ids that can mean either thing.
    """
    own = _convention(engine)
    if ids is None:
        return default_boundaries(num_layers)
    ids = _clean(ids)
    if convention is None and engine == "sglang":
        convention = _sglang_convention(ids, num_layers)
    if convention is None and own == "boundary" and ids[0] == 1 and engine != "transformers":
        _warn_of_one(ids, engine)
    layers = _read(ids, convention or own, num_layers, engine)
    if engine == "transformers" and layers.boundaries[-1] == num_layers:
        raise InputError(
            f"hidden_states[{num_layers}] is taken after the final norm: it is no boundary"
        )
    return layers


def engine_ids(layers: LayerSet) -> dict[str, tuple[int, ...] | None]:
    """Every engine's ids; None where it cannot express the set (``to_engine`` says why)."""
    table: dict[str, tuple[int, ...] | None] = {}
    for engine in ENGINES:
        try:
            table[engine] = to_engine(layers, engine)
        except InputError:
            table[engine] = None
    return table


def write_config(layers: LayerSet, *, nested: str | None = "block-output") -> dict[str, Any]:
    """The entries of a head's config.json: boundaries at top level for vLLM (which reads that
    first), and ``nested`` ids in eagle_config for SGLang, SpecForge and Model-Optimizer.

    nested: "block-output"; "boundary" for SGLang's gpt-oss and DeepSeek models; None to leave
    eagle_config out. Ids are always explicit, also those of the default rule.
    """
    entries: dict[str, Any] = {KEY: list(layers)}
    if nested is not None:
        _check_convention(nested)
        ids = [b - SHIFT[nested] for b in layers]
        if ids[0] < 0:
            raise InputError(
                f"block-output ids cannot express boundary 0 of {layers}: write the config with "
                "nested=None, for vLLM alone, or choose boundaries from 1 on"
            )
        entries[NESTED] = {KEY: ids, "use_aux_hidden_state": True}
    return entries


def read_config(
    config: Mapping[str, Any], num_layers: int, *, convention: str | None = None
) -> Reading:
    """The boundaries that the config.json of a published head means.

    In this order: an explicit ``convention``; no ids: the default rule; top-level and nested ids
    that agree; an id equal to N: boundaries (no block has that index); a speculators head:
    boundaries; nested ids that start with 1: block outputs; the default rule's own ids:
    boundaries; top-level ids that do not start with 1: boundaries, as vLLM and llama.cpp read
    them. Anything else is an InputError that names both readings. Guesses are warned about.
    """
    top = config.get(KEY)
    inner = (config.get(NESTED) or {}).get(KEY)
    if top is None and inner is None:
        layers = default_boundaries(num_layers)
        _warn(f"the head's config names no layers: taking boundaries {layers} by the default rule")
        return Reading(layers, "no ids: the default rule [2, N//2, N-3]", certain=False)
    if top is not None and inner is not None:
        return _read_both(_clean(top), _clean(inner), num_layers, convention)
    ids = _clean(top or inner or ())
    if convention is not None:
        return Reading(
            _read(ids, convention, num_layers, "config"), f"{convention}, as asked for", True
        )

    def reading(chosen: str, how: str, certain: bool = True) -> Reading:
        layers = _read(ids, chosen, num_layers, "config")
        return Reading(layers, f"ids {list(ids)} taken as {chosen}: {how}", certain)

    if ids[-1] == num_layers:
        return reading("boundary", f"no block has the index {num_layers}")
    if "speculators_model_type" in config:
        if ids[0] == 1:
            _warn_of_one(ids, "speculators")
        return reading("boundary", "a speculators head", certain=ids[0] != 1)
    if top is None and ids[0] == 1:
        return reading("block-output", "nested ids that start with 1", certain=False)
    if num_layers >= 7 and ids == default_boundaries(num_layers).boundaries:
        return reading("boundary", "they are the default rule's boundaries", certain=False)
    if top is not None and ids[0] != 1:
        return reading("boundary", "top-level ids, as vLLM and llama.cpp read them")
    raise _ambiguous(ids, num_layers, "the head's config")


def require_width(layers: LayerSet, width: int, hidden_size: int) -> None:
    """InputError unless a fusion matrix with ``width`` inputs fits these boundaries' states."""
    if width != len(layers) * hidden_size:
        raise InputError(
            f"the head's fc takes {width} inputs = {width / hidden_size:g} x {hidden_size}, but "
            f"boundaries {layers} give {len(layers)} x {hidden_size} = {len(layers) * hidden_size}"
        )


def _read_both(
    top: tuple[int, ...], inner: tuple[int, ...], num_layers: int, convention: str | None
) -> Reading:
    if tuple(x + 1 for x in inner) == top or inner == top:
        layers = _read(top, convention or "boundary", num_layers, "config")
        how = f"top-level ids {list(top)} are boundaries, nested ids {list(inner)} agree"
        return Reading(layers, how, certain=True)
    raise InputError(
        f"the head's config contradicts itself: top-level ids {list(top)} against nested ids "
        f"{list(inner)}, which should be equal or one less; remove the wrong one"
    )


def _convention(engine: str) -> str:
    if engine not in ENGINES:
        raise InputError(f"engine {engine!r} is not one of {', '.join(ENGINES)}")
    return ENGINES[engine]


def _check_convention(convention: str) -> None:
    if convention not in SHIFT:
        raise InputError(f"convention {convention!r} is neither 'boundary' nor 'block-output'")


def _clean(ids: Sequence[int]) -> tuple[int, ...]:
    """Ascending ids. Engines capture in layer order, and a repeated id yields one tensor only."""
    _check_whole(ids)
    if not len(ids) or len(set(ids)) != len(ids):
        raise InputError(f"layer ids {list(ids)} must be at least one, without repeats")
    return tuple(sorted(int(x) for x in ids))


def _check_whole(ids: Sequence[int]) -> None:
    if not all(isinstance(x, Integral) and not isinstance(x, bool) for x in ids):
        raise InputError(f"layer ids {list(ids)} must be whole numbers")


def _read(ids: tuple[int, ...], convention: str, num_layers: int, engine: str) -> LayerSet:
    _check_convention(convention)
    shift = SHIFT[convention]
    if ids[0] < 0 or ids[-1] + shift > num_layers:
        raise InputError(
            f"{engine} ids {list(ids)}, taken as {convention} ids, must lie in "
            f"0..{num_layers - shift} for a model of {num_layers} blocks"
        )
    return LayerSet(tuple(x + shift for x in ids), num_layers)


def _sglang_convention(ids: tuple[int, ...], num_layers: int) -> str:
    if ids[-1] == num_layers:
        return "boundary"  # only gpt-oss takes that id
    if ids[0] == 1:
        return "block-output"  # for Llama-like and DeepSeek models alike
    raise _ambiguous(ids, num_layers, "sglang")


def _ambiguous(ids: tuple[int, ...], num_layers: int, source: str) -> InputError:
    shown = list(ids)
    return InputError(
        f"layer ids {shown} of {source} (N = {num_layers}) can mean boundaries {shown} or outputs "
        f"of blocks, boundaries {[x + 1 for x in ids]}: say which with convention='boundary' or "
        "convention='block-output'"
    )


def _warn_of_one(ids: tuple[int, ...], engine: str) -> None:
    _warn(
        f"{engine} ids {list(ids)} are read as boundaries, but a first id of 1 is the mark of "
        "block outputs: if acceptance is low, read them with convention='block-output'"
    )


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)
