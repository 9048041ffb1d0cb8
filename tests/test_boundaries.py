import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paperlib
from paperlib.boundaries import (
    ENGINES,
    KEY,
    NESTED,
    LayerSet,
    default_boundaries,
    dflash_boundaries,
    engine_ids,
    from_engine,
    read_config,
    require_width,
    to_engine,
    write_config,
)
from paperlib.errors import InputError

# Worked out by hand: N, boundaries of the default rule, the same as outputs of blocks.
DEFAULTS = [
    (24, (2, 12, 21), (1, 11, 20)),
    (28, (2, 14, 25), (1, 13, 24)),
    (30, (2, 15, 27), (1, 14, 26)),
    (32, (2, 16, 29), (1, 15, 28)),
    (36, (2, 18, 33), (1, 17, 32)),
]
BOUNDARY_ENGINES = ("transformers", "vllm", "speculators", "eagle", "llama.cpp")
BLOCK_ENGINES = ("sglang", "specforge", "modelopt", "tensorrt-llm")
# DFlash ids of block outputs, by hand from round(1 + i (N - 4)/(k - 1)), plus one.
DFLASH = [
    (24, 1, (13,)),
    (28, 2, (2, 26)),
    (30, 3, (2, 15, 28)),
    (36, 3, (2, 18, 34)),
    (36, 5, (2, 10, 18, 26, 34)),  # Qwen3-8B: target_layer_ids [1, 9, 17, 25, 33]
    (32, 4, (2, 11, 21, 30)),
    (29, 3, (2, 15, 27)),  # 1 + 12.5 = 13.5 rounds to the even 14
]


@pytest.mark.parametrize(("n", "boundaries", "blocks"), DEFAULTS)
def test_default_ids_of_every_engine_equal_the_hand_computed_ones(n, boundaries, blocks):
    layers = default_boundaries(n)
    assert layers.boundaries == boundaries
    expected = {e: boundaries for e in BOUNDARY_ENGINES} | {e: blocks for e in BLOCK_ENGINES}
    assert engine_ids(layers) == expected
    assert set(expected) == set(ENGINES)


@pytest.mark.parametrize(("n", "k", "boundaries"), DFLASH)
def test_dflash_spacing(n, k, boundaries):
    assert dflash_boundaries(n, k).boundaries == boundaries


@pytest.mark.parametrize(("n", "k"), [(6, 4), (3, 1), (30, 0)])
def test_dflash_spacing_refuses_what_would_collide(n, k):
    with pytest.raises(InputError, match="DFlash"):
        dflash_boundaries(n, k)


@st.composite
def layer_sets(draw):
    n = draw(st.integers(2, 90))
    chosen = draw(st.sets(st.integers(0, n), min_size=1, max_size=min(6, n + 1)))
    return LayerSet(tuple(sorted(chosen)), n)


@pytest.mark.filterwarnings("ignore:.*first id of 1.*")
@given(layer_sets(), st.sampled_from(sorted(ENGINES)), st.randoms())
def test_round_trip_through_every_engine(layers, engine, random):
    try:
        ids = list(to_engine(layers, engine))
    except InputError:
        assert (
            layers.boundaries[0] == 0
            or layers.boundaries[-1] == layers.num_layers
            or (engine == "specforge" and len(layers) != 3)
        )
        return
    assert [b - i for b, i in zip(layers, ids, strict=True)] == (
        [engine in BLOCK_ENGINES] * len(layers)
    )
    random.shuffle(ids)
    assert from_engine(ids, engine, layers.num_layers, convention=ENGINES[engine]) == layers
    if engine != "sglang":
        assert from_engine(ids, engine, layers.num_layers) == layers


@given(layer_sets())
def test_sglang_never_guesses_wrong_in_silence(layers):
    """Without a convention, what we write is read back, or refused with both readings named."""
    try:
        ids = to_engine(layers, "sglang")
    except InputError:
        return
    if ids[0] == 1:
        assert from_engine(ids, "sglang", layers.num_layers) == layers
    else:
        both = f"{re.escape(str(list(ids)))}.*{re.escape(str(list(layers)))}.*convention="
        with pytest.raises(InputError, match=both):
            from_engine(ids, "sglang", layers.num_layers)


@pytest.mark.filterwarnings("ignore:.*first id of 1.*")
@given(layer_sets(), st.sampled_from(["block-output", "boundary"]))
def test_config_round_trip(layers, nested):
    if nested == "block-output" and layers.boundaries[0] == 0:
        with pytest.raises(InputError, match="boundary 0"):
            write_config(layers, nested=nested)
        return
    reading = read_config(write_config(layers, nested=nested), layers.num_layers)
    assert reading.layers == layers
    assert reading.certain


@pytest.mark.parametrize(
    "boundaries", [(), (2, 2, 5), (5, 2), (-1, 3), (2, 31)], ids=lambda b: str(list(b))
)
def test_layer_sets_are_validated(boundaries):
    with pytest.raises(InputError):
        LayerSet(boundaries, 30)


@pytest.mark.parametrize(
    ("ids", "engine"),
    [
        ([2, 2, 5], "vllm"),
        ([], "vllm"),
        ([-1, 3], "modelopt"),
        ([1, 14, 30], "modelopt"),  # output of block 30 of 30: blocks end at 29
        ([1, 2.5], "vllm"),
        ([True, 3], "vllm"),
        ([30], "transformers"),  # hidden_states[N] is post-norm
    ],
)
def test_bad_ids_are_refused(ids, engine):
    with pytest.raises(InputError):
        from_engine(ids, engine, 30)


def test_what_an_engine_cannot_express_is_refused():
    first, last = LayerSet((0, 5, 9), 12), LayerSet((2, 5, 12), 12)
    assert {e for e, ids in engine_ids(first).items() if ids is None} == set(BLOCK_ENGINES)
    assert {e for e, ids in engine_ids(last).items() if ids is None} == {
        "transformers",
        "eagle",
        "specforge",
        "sglang",
    }
    assert to_engine(last, "tensorrt-llm") == (1, 4, 11)
    with pytest.raises(InputError, match="three layers"):
        to_engine(LayerSet((2, 5), 12), "specforge")
    with pytest.raises(InputError, match="boundary ids only"):
        to_engine(first, "vllm", convention="block-output")
    with pytest.raises(InputError, match="misread"):
        to_engine(LayerSet((1, 5, 9), 12), "sglang", convention="boundary")
    with pytest.raises(InputError, match="not one of"):
        to_engine(first, "exllama")
    with pytest.raises(InputError, match="neither"):
        from_engine([3], "vllm", 12, convention="hf")


READER = [  # config, N -> boundaries, certain; by hand from the stated rules
    ({NESTED: {KEY: [24, 30, 36]}}, 36, (24, 30, 36), True),
    ({NESTED: {KEY: [1, 17, 32]}}, 36, (2, 18, 33), False),
    ({NESTED: {KEY: [2, 18, 33]}}, 36, (2, 18, 33), False),
    ({KEY: [2, 18, 33], "speculators_model_type": "eagle3"}, 36, (2, 18, 33), True),
    ({KEY: [3, 19, 34]}, 36, (3, 19, 34), True),
    ({KEY: [3, 19, 34], NESTED: {KEY: [2, 18, 33]}}, 36, (3, 19, 34), True),
    ({KEY: [24, 30, 36], NESTED: {KEY: [24, 30, 36]}}, 36, (24, 30, 36), True),
    ({KEY: None, NESTED: {KEY: [1, 2]}}, 6, (2, 3), False),
]


@pytest.mark.parametrize(("config", "n", "boundaries", "certain"), READER)
def test_reader_rule(config, n, boundaries, certain):
    reading = read_config(config, n)
    assert (reading.layers.boundaries, reading.certain) == (boundaries, certain)


@pytest.mark.parametrize(
    "config", [{NESTED: {KEY: [5, 18, 29]}}, {KEY: [1, 18, 29]}], ids=["nested", "top-level"]
)
def test_reader_asks_for_the_convention(config):
    ids = config.get(KEY) or config[NESTED][KEY]
    shifted = [x + 1 for x in ids]
    with pytest.raises(InputError) as caught:
        read_config(config, 36)
    assert f"{ids}" in str(caught.value)
    assert f"{shifted}" in str(caught.value)
    assert read_config(config, 36, convention="boundary").layers.boundaries == tuple(ids)
    assert read_config(config, 36, convention="block-output").layers.boundaries == tuple(shifted)


def test_reader_refuses_a_config_that_contradicts_itself():
    with pytest.raises(InputError, match="contradicts"):
        read_config({KEY: [2, 18, 33], NESTED: {KEY: [4, 17, 32]}}, 36)


# Public reports of heads that were served with the wrong layers, one test each.


def test_sglang_25454_both_conventions_give_the_same_states():
    """N = 61: ids from 2 on were shifted once too often."""
    expected = LayerSet((2, 30, 58), 61)
    assert from_engine([1, 29, 57], "sglang", 61) == expected
    assert from_engine([2, 30, 58], "sglang", 61, convention="boundary") == expected
    with pytest.raises(InputError, match="convention"):
        from_engine([2, 30, 58], "sglang", 61)
    with pytest.raises(InputError, match=r"\[4, 30, 58\].*\[5, 31, 59\]"):
        from_engine([4, 30, 58], "sglang", 61)
    # an explicit default is not the absent default
    assert from_engine(None, "sglang", 61) == expected
    assert from_engine([2, 30, 58], "sglang", 61, convention="block-output") != expected


def test_sglang_32334_the_state_before_the_final_norm_can_be_chosen():
    """gpt-oss, N = 36: [24, 30, 36] was shifted to [25, 31, 37] and one state went missing."""
    layers = from_engine([24, 30, 36], "sglang", 36)
    assert layers.boundaries == (24, 30, 36)
    assert to_engine(layers, "sglang", convention="boundary") == (24, 30, 36)
    require_width(layers, 8640, 2880)
    with pytest.raises(InputError, match=r"2 x 2880.*3 x 2880 = 8640"):
        require_width(layers, 5760, 2880)


def test_vllm_43671_ids_for_vllm_are_boundaries():
    layers = from_engine([1, 17, 32], "specforge", 36)
    assert to_engine(layers, "vllm") == (2, 18, 33)
    assert write_config(layers)[KEY] == [2, 18, 33]
    assert write_config(layers)[NESTED][KEY] == [1, 17, 32]


def test_vllm_46788_the_last_boundary_survives_the_way_to_vllm_and_back():
    layers = LayerSet((2, 30, 61), 61)
    assert to_engine(layers, "vllm") == (2, 30, 61)
    assert from_engine((2, 30, 61), "vllm", 61) == layers


def test_vllm_50170_missing_ids_are_guessed_aloud_and_never_written():
    with pytest.warns(UserWarning, match=r"\[2, 40, 77\]"):
        reading = read_config({"architectures": ["LlamaForCausalLMEagle3"]}, 80)
    assert (reading.layers.boundaries, reading.certain) == ((2, 40, 77), False)
    assert write_config(default_boundaries(80))[KEY] == [2, 40, 77]


def test_vllm_40727_dflash_ids_are_outputs_of_blocks():
    """Qwen3-8B's published ids 1, 9, 17, 25, 33 are boundaries 2, 10, 18, 26, 34, by value."""
    assert dflash_boundaries(36, 5).boundaries == tuple(x + 1 for x in (1, 9, 17, 25, 33))


@pytest.mark.parametrize("n", range(1, 7))
def test_modelopt_300_vllm_48259_shallow_models_have_no_default(n):
    with pytest.raises(InputError, match=f"at least 7 blocks.*has {n}"):
        default_boundaries(n)
    for engine in ENGINES:
        with pytest.raises(InputError, match="at least 7"):
            from_engine(None, engine, n)
    assert default_boundaries(7).boundaries == (2, 3, 4)


def test_eagle_239_213_261_its_three_states_are_not_layers_0_1_2():
    assert from_engine(None, "eagle", 32).boundaries == (2, 16, 29)


def test_modelopt_2410_the_rule_is_written_once():
    for engine in ENGINES:
        assert from_engine(None, engine, 48) == default_boundaries(48)
    rule = re.compile(r"2, \w+ // 2, \w+ - 3\b")
    found = {
        path.name
        for path in Path(paperlib.__file__).parent.rglob("*.py")
        if rule.search(path.read_text())
    }
    assert found == {"boundaries.py"}


def test_speculators_maverick_ids_that_start_with_one_are_warned_about():
    config = {KEY: [1, 23, 44], "speculators_model_type": "eagle3"}
    with pytest.warns(UserWarning, match="block-output"):
        assert read_config(config, 48).layers.boundaries == (1, 23, 44)
    with pytest.warns(UserWarning, match="block-output"):
        from_engine([1, 23, 44], "speculators", 48)
    assert from_engine([1, 23, 44], "speculators", 48, convention="block-output") == (
        default_boundaries(48)
    )


def test_specforge_gpt_oss_config_differs_from_the_rule():
    """Its config for N = 24 has 21 where the rule gives 20."""
    assert to_engine(default_boundaries(24), "specforge") == (1, 11, 20)
    assert from_engine([1, 11, 21], "specforge", 24).boundaries == (2, 12, 22)
