"""Parameters of the notebooks: typed, checked, and with three sets of values.

``smoke`` is for tests, ``quick`` for a first look on a small machine, ``full`` for the published
numbers. In a notebook the one ``parameters`` cell holds ``profile = "full"`` and every other
parameter with a sentinel that means *the profile's value*: -1 for numbers, "" for text. So
``papermill notebooks/01_layer_entropy.ipynb out.ipynb -p profile quick -p documents 64`` does what
it says, from any folder.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from paperlib.errors import InputError

NAMES = ("smoke", "quick", "full")


def at_least(low: float, text: str) -> Any:
    """A required number that is ``low`` or more; ``text`` is its one-line help."""
    return field(metadata={"low": low, "help": text})


def text(help: str) -> Any:
    return field(metadata={"help": help})


# One class for each notebook. Every field is int, float or str.


@dataclass(frozen=True)
class Sample:
    """What every notebook measures on: a target, documents, and resamples of them."""

    target: str = text("smollm2-135m, a hub id, a model folder or a .gguf file")
    corpus: str = text("named sets or files, comma-separated")
    documents: int = at_least(2, "documents in all, in equal parts from each set")
    max_tokens: int = at_least(2, "tokens kept of each document")
    resamples: int = at_least(1, "bootstrap resamples of documents")
    seed: int = at_least(0, "seed of every draw")


@dataclass(frozen=True)
class LayerEntropy(Sample):
    """01_layer_entropy"""

    spectral_resamples: int = at_least(0, "the same for order 1, which needs eigenvalues")


@dataclass(frozen=True)
class ConcatenationEntropy(Sample):
    """02_concatenation_entropy"""

    sampled_tokens: int = at_least(8, "tokens of the order-1 estimates, which need eigenvalues")


@dataclass(frozen=True)
class CkaGeometry(Sample):
    """03_cka_geometry"""


@dataclass(frozen=True)
class TokenEntropyFiltering(Sample):
    """04_token_entropy_filtering"""

    controls: int = at_least(2, "random control draws of the same sizes")


@dataclass(frozen=True)
class LayerSelection(Sample):
    """05_layer_selection"""

    sampled_tokens: int = at_least(8, "tokens of the order-1 methods, which need eigenvalues")
    probe_sets: int = at_least(3, "random sets that the probe scores")
    probe_dimensions: int = at_least(1, "dimensions that each input of the probe is projected to")


_SAMPLE: dict[str, dict[str, Any]] = {
    "smoke": {"documents": 16, "max_tokens": 64, "resamples": 10},
    "quick": {"documents": 48, "max_tokens": 128, "resamples": 50},
    "full": {"documents": 96, "max_tokens": 128, "resamples": 200},
}
for _values in _SAMPLE.values():
    _values |= {"target": "smollm2-135m", "corpus": "openwebtext,wikipedia", "seed": 0}

# what each notebook has besides the sample: smoke, quick, full
_NOTEBOOKS: dict[str, tuple[Any, dict[str, tuple[int, int, int]]]] = {
    "01_layer_entropy": (LayerEntropy, {"spectral_resamples": (2, 10, 20)}),
    "02_concatenation_entropy": (ConcatenationEntropy, {"sampled_tokens": (64, 384, 1024)}),
    "03_cka_geometry": (CkaGeometry, {}),
    "04_token_entropy_filtering": (TokenEntropyFiltering, {"controls": (2, 3, 4)}),
    "05_layer_selection": (
        LayerSelection,
        {
            "sampled_tokens": (64, 384, 1024),
            "probe_sets": (6, 60, 150),
            "probe_dimensions": (16, 96, 192),
        },
    ),
}

PARAMETERS: dict[str, dict[str, Any]] = {
    stem: {
        profile: kind(**_SAMPLE[profile], **{name: v[i] for name, v in own.items()})
        for i, profile in enumerate(NAMES)
    }
    for stem, (kind, own) in _NOTEBOOKS.items()
}


def _profiles_of(stem: str) -> dict[str, Any]:
    if stem not in PARAMETERS:
        raise InputError(f"no notebook {stem!r}: choose one of {', '.join(PARAMETERS)}")
    return PARAMETERS[stem]


def fields(stem: str) -> dict[str, dataclasses.Field[Any]]:
    """The parameters of a notebook by name, in order."""
    return {f.name: f for f in dataclasses.fields(_profiles_of(stem)["full"])}


def sentinel(kind: Any) -> Any:
    """The value in the notebook's cell that stands for the profile's value."""
    return "" if kind is str else -1


def resolve(stem: str, profile: str, overrides: dict[str, Any] | None = None) -> Any:
    """The parameters of notebook ``stem``: the profile's values with ``overrides`` in place.

    An override that equals its sentinel leaves the profile's value. Raises InputError for an
    unknown notebook, profile or name, for a value of the wrong type and for one out of range.
    """
    base = _profiles_of(stem)
    if profile not in base:
        raise InputError(f"no profile {profile!r}: choose one of {', '.join(base)}")
    known, changed = fields(stem), {}
    for name, value in (overrides or {}).items():
        _known(stem, name)
        kind: Any = known[name].type
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise InputError(
                f"{name} = {value!r} is of type {type(value).__name__}: "
                f"notebook {stem} expects {kind.__name__} ({known[name].metadata['help']})"
            )
        if value != sentinel(kind):
            changed[name] = value
    parameters = dataclasses.replace(base[profile], **changed)
    for name, field_ in known.items():
        value, low = getattr(parameters, name), field_.metadata.get("low")
        if low is not None and not (math.isfinite(value) and value >= low):
            raise InputError(
                f"{name} = {value} is out of range: notebook {stem} expects {low} or more "
                f"({field_.metadata['help']})"
            )
    return parameters


def _known(stem: str, name: str) -> None:
    known = fields(stem)
    if name not in known:
        raise InputError(f"notebook {stem} has no parameter {name!r}: it has {', '.join(known)}")


def parse_override(text: str, stem: str) -> tuple[str, Any]:
    """``"documents=64"`` -> ("documents", 64), typed by the notebook's parameters."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"{text!r} is not of the form name=value, for example documents=64")
    _known(stem, name)
    kind: Any = fields(stem)[name].type
    try:
        return name, kind(value)
    except ValueError:
        raise InputError(
            f"{name} = {value!r} is not {'an' if kind is int else 'a'} {kind.__name__}: notebook "
            f"{stem} expects {fields(stem)[name].metadata['help']}"
        ) from None
