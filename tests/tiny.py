"""Small random decoders of every supported family, and folders that hold them with a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral", "gpt2", "gpt_neox", "opt")
SPECIALS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIALS)

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a default persona<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_model(
    family: str,
    *,
    layers: int = 4,
    hidden: int = 32,
    vocab: int = VOCAB,
    seed: int = 0,
    **more: Any,
) -> Any:
    """A random model in eval mode, float32; weights large enough that every layer matters."""
    modern = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.25,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    heads = {k: v for k, v in modern.items() if k not in ("num_key_value_heads", "head_dim")}
    table: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, {**modern, "tie_word_embeddings": True}),
        "qwen2": (
            Qwen2ForCausalLM,
            Qwen2Config,
            {k: v for k, v in modern.items() if k != "head_dim"},
        ),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config, modern),
        "gemma2": (Gemma2ForCausalLM, Gemma2Config, modern),
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, modern),
        "mistral": (MistralForCausalLM, MistralConfig, modern),
        "gpt2": (GPT2LMHeadModel, GPT2Config, {**heads, "n_inner": 2 * hidden}),
        "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, heads),
        "opt": (
            OPTForCausalLM,
            OPTConfig,
            {
                "vocab_size": vocab,
                "hidden_size": hidden,
                "word_embed_proj_dim": hidden,
                "ffn_dim": 2 * hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": 4,
                "max_position_embeddings": 512,
                "init_std": 0.25,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
            },
        ),
    }
    model_class, config_class, values = table[family]
    torch.manual_seed(seed)
    return model_class(config_class(**{**values, **more})).eval()


def tiny_tokenizer(chat_template: str | None = None, *, add_bos: bool = False) -> Any:
    """Byte level without merges: one token a byte, and five special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if add_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = chat_template
    return fast


def tiny_target_folder(
    path: Path,
    family: str = "llama",
    *,
    layers: int = 4,
    chat_template: str | None = None,
    add_bos: bool = False,
    **more: Any,
) -> Path:
    """A folder that load_target takes."""
    tiny_model(family, layers=layers, **more).save_pretrained(path)
    tiny_tokenizer(chat_template, add_bos=add_bos).save_pretrained(path)
    return path
