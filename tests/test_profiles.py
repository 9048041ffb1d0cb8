import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paperlib import profiles
from paperlib.errors import InputError

STEM = "01_layer_entropy"


@pytest.mark.parametrize("stem", profiles.PARAMETERS)
def test_every_profile_of_every_notebook_is_complete_typed_and_in_range(stem):
    assert tuple(profiles.PARAMETERS[stem]) == profiles.NAMES
    for profile in profiles.NAMES:
        parameters = profiles.resolve(stem, profile)
        for field in dataclasses.fields(parameters):
            assert field.type in (int, float, str), "plain types only: papermill passes them"
            assert field.metadata["help"]
            assert (field.type is str) == ("low" not in field.metadata)
            assert field.metadata.get("low", 0) >= 0, "-1 must stay free for the sentinel"
            assert type(getattr(parameters, field.name)) is field.type
            assert getattr(parameters, field.name) != profiles.sentinel(field.type)
            assert field.name not in ("profile", "registry", "remeasure", "stem"), "start's own"


def test_profiles_grow_from_smoke_to_full():
    sizes = [
        (p.documents * p.max_tokens, p.resamples)
        for p in (profiles.resolve(STEM, name) for name in profiles.NAMES)
    ]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_sentinels_stand_for_the_values_of_the_profile():
    sentinels = {n: profiles.sentinel(f.type) for n, f in profiles.fields(STEM).items()}
    assert profiles.resolve(STEM, "quick", sentinels) == profiles.PARAMETERS[STEM]["quick"]


def test_an_override_changes_its_parameter_only():
    changed = profiles.resolve(STEM, "quick", {"documents": 5, "target": "gpt2"})
    plain = dataclasses.asdict(profiles.PARAMETERS[STEM]["quick"])
    assert dataclasses.asdict(changed) == {**plain, "documents": 5, "target": "gpt2"}


@pytest.mark.parametrize(
    ("stem", "profile", "overrides", "words"),
    [
        ("99_none", "quick", {}, ["99_none", STEM]),
        (STEM, "fast", {}, ["fast", "smoke, quick, full"]),
        (STEM, "quick", {"document": 3}, ["document", "documents"]),
        (STEM, "quick", {"documents": "3"}, ["'3'", "str", "int"]),
        (STEM, "quick", {"documents": 3.0}, ["3.0", "float", "int"]),
        (STEM, "quick", {"documents": True}, ["True", "bool"]),
        (STEM, "quick", {"target": 7}, ["7", "int", "str"]),
        (STEM, "quick", {"documents": 1}, ["documents = 1", "2 or more"]),
        (STEM, "quick", {"seed": -2}, ["seed = -2", "0 or more"]),
    ],
)
def test_errors_name_the_value_and_what_was_expected(stem, profile, overrides, words):
    with pytest.raises(InputError) as caught:
        profiles.resolve(stem, profile, overrides)
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)


@given(st.integers(2, 10**9))
def test_overrides_are_typed_by_the_parameters(number):
    assert profiles.parse_override(f"documents={number}", STEM) == ("documents", number)
    assert profiles.parse_override(f"target={number}", STEM) == ("target", str(number))


def test_text_may_hold_an_equals_sign_and_be_a_number():
    assert profiles.parse_override("corpus=a=b", STEM) == ("corpus", "a=b")
    assert profiles.parse_override("target=007", STEM) == ("target", "007")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("documents", ["'documents'", "name=value"]),
        ("documents=1e3", ["'1e3'", "int"]),
        ("documents=", ["''", "int"]),
        ("size=3", ["size", "documents"]),
    ],
)
def test_malformed_overrides_are_refused(text, words):
    with pytest.raises(InputError) as caught:
        profiles.parse_override(text, STEM)
    assert all(word in str(caught.value) for word in words)


def test_whole_numbers_are_taken_for_floats_and_infinities_refused(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Toy:
        rate: float = profiles.at_least(0.0, "a rate")

    monkeypatch.setitem(profiles.PARAMETERS, "00_toy", {"full": Toy(0.5)})
    assert profiles.resolve("00_toy", "full", {"rate": 2}).rate == 2.0
    assert profiles.parse_override("rate=1e-3", "00_toy") == ("rate", 0.001)
    for bad in (float("nan"), float("inf"), -0.5):
        with pytest.raises(InputError, match="out of range"):
            profiles.resolve("00_toy", "full", {"rate": bad})
