"""Targets: every family, chat rendering, and what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from paperlib import targets
from paperlib.errors import InputError
from paperlib.targets import EMBEDDED, load_target, target_fingerprint
from tests.tiny import CHATML, FAMILIES, VOCAB, tiny_model, tiny_target_folder

IDS = torch.arange(5, 25)[None]
USER = [{"role": "user", "content": "Hello?"}]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_its_parts(family, tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / family, family)
    target = load_target(str(folder))
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (4, 32, VOCAB)
    assert target.tied == (family in ("llama", "gemma2", "gemma3", "gpt2", "opt"))
    assert not any(p.requires_grad for p in target.model.parameters())
    assert not target.model.training
    last = []
    handle = target.blocks[-1].register_forward_hook(
        lambda m, a, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.inference_mode():
        logits = target.model(input_ids=IDS).logits
        again = target.logits_from_prenorm(last[0])
    handle.remove()
    torch.testing.assert_close(again, logits, rtol=1e-5, atol=1e-5)


def test_gemma_soft_cap_is_applied(tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "m", "gemma2", final_logit_softcapping=0.5)
    target = load_target(str(folder))
    states = torch.randn(3, 32)
    raw = target.lm_head(target.final_norm(states))
    torch.testing.assert_close(target.logits_from_prenorm(states), torch.tanh(raw / 0.5) * 0.5)
    assert target.logits_from_prenorm(states).abs().max() <= 0.5


def test_fingerprint_follows_the_weights(tmp_path) -> None:
    a = target_fingerprint(str(tiny_target_folder(tmp_path / "a", "llama")))
    same = target_fingerprint(str(tiny_target_folder(tmp_path / "b", "llama")))
    other = target_fingerprint(str(tiny_target_folder(tmp_path / "c", "llama", seed=1)))
    assert a == same != other
    assert load_target(str(tmp_path / "a")).fingerprint == a


def test_dtype_and_device_map(tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "m", "qwen3")
    assert load_target(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16
    mapped = load_target(str(folder), device_map="cpu")
    plain = load_target(str(folder))
    with torch.inference_mode():
        torch.testing.assert_close(mapped.model(IDS).logits, plain.model(IDS).logits)


# chat


def chat_target(tmp_path, template: str | None, **options):
    return load_target(
        str(tiny_target_folder(tmp_path / "chat", "llama", chat_template=template, **options))
    )


def test_the_templates_own_system_turn_is_cut(tmp_path) -> None:
    target = chat_target(tmp_path, CHATML)
    plain = "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"
    assert target.render_chat(USER) == plain
    assert target.render_chat(USER, system="default").startswith(
        "<|im_start|>system\nYou are a default persona<|im_end|>\n<|im_start|>user"
    )
    assert target.render_chat(USER, system="Be brief.") == (
        "<|im_start|>system\nBe brief.<|im_end|>\n" + plain
    )
    own = [{"role": "system", "content": "Mine."}, *USER]
    assert "Mine." in target.render_chat(own)
    assert target.render_chat(USER, add_generation_prompt=False) == plain.removesuffix(
        "<|im_start|>assistant\n"
    )


def test_a_bos_before_the_turns_stays(tmp_path) -> None:
    template = (
        "{{ '<bos>' }}{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    target = chat_target(tmp_path, template)
    assert target.render_chat(USER) == "<bos>[user]Hello?[assistant]"


def test_a_bos_that_opens_every_turn_is_not_doubled(tmp_path) -> None:
    """SmolLM2's BOS is <|im_start|>, which begins the system turn that is cut."""
    target = chat_target(tmp_path, CHATML)
    target.tokenizer.bos_token = "<|im_start|>"
    assert target.render_chat(USER).startswith("<|im_start|>user\n")


def test_a_template_without_system_turns(tmp_path) -> None:
    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    )
    target = chat_target(tmp_path, template)
    assert target.render_chat(USER) == "<user>Hello?"
    with pytest.raises(InputError, match="no system role"):
        target.render_chat(USER, system="Be brief.")


def test_no_template(tmp_path) -> None:
    with pytest.raises(InputError, match="has no chat template"):
        chat_target(tmp_path, None).render_chat(USER)


# what is refused (one line and exit code 2: tests/test_errors.py)


def test_bad_arguments(tmp_path) -> None:
    with pytest.raises(InputError, match="dtype 'int8' is not one of float32"):
        load_target("x", dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no GPU"):
            load_target("x", device="cuda")
    with pytest.raises(InputError, match=r"no file .*\.gguf"):
        load_target(str(tmp_path / "none.gguf"))
    (tmp_path / "model.bin").write_bytes(b"1")
    with pytest.raises(InputError, match="is a file: expected a model folder"):
        load_target(str(tmp_path / "model.bin"))


def test_a_file_that_is_not_gguf(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAPERLIB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "fake.gguf").write_bytes(b"GGUF?" * 100)
    with pytest.raises(InputError, match=r"fake\.gguf cannot be converted"):
        load_target(str(tmp_path / "fake.gguf"))
    assert not list((tmp_path / "cache").rglob("config.json"))
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_encoder_decoder(tmp_path) -> None:
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(InputError, match="encoder-decoder"):
        load_target(str(tmp_path / "t5"))


def test_damaged_config_and_missing_weights(tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "m", "llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="cannot be loaded"):
        load_target(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        load_target(str(folder))


def test_projected_embeddings_are_refused(tmp_path) -> None:
    folder = tiny_target_folder(tmp_path / "m", "opt", word_embed_proj_dim=16)
    with pytest.raises(InputError, match="projects its embeddings"):
        load_target(str(folder))


def test_transformers_36636_zeros_are_noticed(tmp_path) -> None:
    """With device_map="auto", some versions gave zeros for the states of later layers."""
    target = load_target(str(tiny_target_folder(tmp_path / "m", "llama")))
    target.blocks[-1].register_forward_hook(lambda m, a, out: torch.zeros_like(out))
    with pytest.raises(InputError, match="come back as zeros"):
        targets._try_out(target)


def test_a_model_that_sees_the_future_is_refused(tmp_path) -> None:
    target = load_target(str(tiny_target_folder(tmp_path / "m", "llama")))
    target.blocks[1].register_forward_hook(
        lambda m, a, out: out + out.mean(dim=1, keepdim=True)  # leaks later tokens
    )
    with pytest.raises(InputError, match="is not causal"):
        targets._try_out(target)


def test_an_unknown_head_is_refused(tmp_path) -> None:
    target = load_target(str(tiny_target_folder(tmp_path / "m", "llama")))
    target.lm_head.register_forward_hook(lambda m, a, out: out if out.dim() < 3 else out * 2)
    target.final_norm.weight.data.mul_(1.0)
    original = targets.Target.logits_from_prenorm
    try:
        targets.Target.logits_from_prenorm = lambda self, s: original(self, s) * 2
        with pytest.raises(InputError, match="does not give the model's logits"):
            targets._try_out(target)
    finally:
        targets.Target.logits_from_prenorm = original


# the embedded model


@pytest.mark.real
def test_smollm2_is_converted_once_and_answers(tmp_path, monkeypatch) -> None:
    target = load_target(EMBEDDED)
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.tied
    assert target.fingerprint == target_fingerprint(EMBEDDED)
    prompt = target.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    assert "system" not in prompt
    ids = target.tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    with torch.inference_mode():
        out = target.model.generate(ids, max_new_tokens=10, do_sample=False)
    answer = target.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.strip() == "The capital of France is Paris."

    def never(*args, **kwargs):
        raise AssertionError("converted again")

    monkeypatch.setattr(targets, "_embedded_gguf", never)
    folder = targets._converted(never, targets.GGUF_SHA256)
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(
        plain.model.layers[3].mlp.up_proj.weight,
        target.model.model.layers[3].mlp.up_proj.weight,
        rtol=0,
        atol=0,
    )


@pytest.mark.real
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PAPERLIB_CACHE", str(tmp_path))

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(targets.AutoModelForCausalLM, "from_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        load_target(EMBEDDED)
    assert not list(tmp_path.rglob("config.json"))


def test_two_models_differ_between_seeds() -> None:
    """The random models of these tests are not degenerate."""
    with torch.inference_mode():
        a, b = (tiny_model("llama", seed=s)(IDS).logits for s in (0, 1))
    assert (a - b).abs().max() > 0.1
