r"""Digests of what was loaded, and the record that saves computing them again.

Owns how tensors, tokenizers and chat templates are hashed, how a file on disk is told
from another, and the digest record. Knows nothing of how a model is loaded, nor of what
else makes up an identity.

Digests are SHA-256 over framed bytes, integers big-endian; `framed` is a u32 length and
so many bytes:

```
leaf      "stemkv-tensor\0" · u16 scheme · framed name · framed dtype
          · u32 number of axes · u64 per axis · u64 length · the elements, row-major
weights   "stemkv-weights\0" · u16 scheme · u32 number of leaves
          · per leaf, names in order of their UTF-8: framed name · 32 bytes
tokenizer "stemkv-tokenizer\0" · u16 scheme · framed class · framed kind
          · framed form · framed special tokens
template  "stemkv-template\0" · u16 scheme · framed JSON
```

Weights are hashed in two levels so that replacing some tensors costs hashing those
alone. The record remembers digests under the identity of every file they came from;
see `DigestRecord` for when that may be believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from stemkv.errors import InvariantError

__all__ = [
    "RECORD_NAME",
    "DigestRecord",
    "Digests",
    "FileIdentity",
    "FilesSeen",
    "combine",
    "conditions",
    "digest_chat_template",
    "digest_tensors",
    "digest_tokenizer",
    "see_file",
    "see_folder",
    "tensor_digest",
]

# Advanced when a digest or what loading makes of a file changes: old records are void.
_SCHEME: Final = 1
_DIGEST_SIZE: Final = 32


# Tensors


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """Return the leaf of one tensor: its name, dtype, shape and bytes.

    Elements are hashed as they lie in this machine's memory, so machines of another
    byte order give other digests; that costs hits between them, never correctness.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype = str(plain.dtype).removeprefix("torch.")
    digest = hashlib.sha256(_header(b"tensor"))
    digest.update(_framed(name.encode("utf-8", "surrogatepass")))
    digest.update(_framed(dtype.encode()))
    num_bytes = plain.numel() * plain.element_size()
    shape = struct.pack(f">I{plain.dim()}Q", plain.dim(), *plain.shape)
    digest.update(shape + struct.pack(">Q", num_bytes))
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.digest()


def digest_tensors(named: Mapping[str, Tensor]) -> dict[str, bytes]:
    """Return the leaf of every tensor, by name.

    Leaves need nothing of each other and hashing holds no lock of Python's, so they
    are spread over as many threads as torch computes with.
    """
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        leaves = threads.map(tensor_digest, named, named.values())
        return dict(zip(named, leaves, strict=True))


def combine(leaves: Mapping[str, bytes]) -> bytes:
    """Return the digest of all weights from the leaf of each tensor."""
    digest = hashlib.sha256(_header(b"weights") + struct.pack(">I", len(leaves)))
    encoded = {name.encode("utf-8", "surrogatepass"): leaves[name] for name in leaves}
    for name, leaf in sorted(encoded.items()):
        if len(leaf) != _DIGEST_SIZE:
            raise InvariantError(f"leaf of tensor {name!r} has {len(leaf)} bytes")
        digest.update(_framed(name) + leaf)
    return digest.digest()


# Tokenizers


def digest_tokenizer(tokenizer: Any) -> bytes | None:
    """Return a digest of everything that turns text into ids, as far as it is known.

    With a fast backend that is its whole serialised form, else the vocabulary and the
    added tokens; the special tokens and the class go with either. `None` if there is
    no tokenizer, or one of a kind that shows neither.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        kind, form = b"serialised", backend.to_str().encode("utf-8", "surrogatepass")
    elif hasattr(tokenizer, "get_vocab") and hasattr(tokenizer, "added_tokens_decoder"):
        # `repr` of an added token says its flags, `str` only its text.
        added = {str(i): repr(t) for i, t in tokenizer.added_tokens_decoder.items()}
        # Words are bytes in some vocabularies; `repr` keeps them apart from text.
        words = {repr(word): i for word, i in tokenizer.get_vocab().items()}
        kind, form = b"vocabulary", _json([words, added])
    else:
        return None
    special = getattr(tokenizer, "special_tokens_map", {})
    name = type(tokenizer).__name__.encode()
    parts = (name, kind, form, _json(special))
    return hashlib.sha256(
        _header(b"tokenizer") + b"".join(map(_framed, parts))
    ).digest()


def digest_chat_template(tokenizer: Any) -> bytes | None:
    """Return a digest of the chat template or of all named ones; `None` without any."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(_header(b"template") + _framed(_json(template))).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """Everything that is hashed about a loaded model."""

    tensors: Mapping[str, bytes]  # name in the model's state → leaf
    tokenizer: bytes | None
    chat_template: bytes | None

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            "tensors": {name: leaf.hex() for name, leaf in self.tensors.items()},
            "tokenizer": self.tokenizer.hex() if self.tokenizer else None,
            "chat_template": self.chat_template.hex() if self.chat_template else None,
        }

    @classmethod
    def from_json(cls, value: Any) -> Digests | None:
        """Read what `to_json` wrote; `None` for anything else."""
        try:
            return cls(
                tensors={
                    name: _from_hex(leaf) for name, leaf in value["tensors"].items()
                },
                tokenizer=_from_hex_or_none(value["tokenizer"]),
                chat_template=_from_hex_or_none(value["chat_template"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


# Files


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What tells one file with one content from any other, without reading it.

    The modification time alone can be set at will; the change time cannot, and a file
    put in place of another has another inode.
    """

    name: str  # relative to the folder, "/" between parts
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """Files as they were at one moment."""

    files: tuple[FileIdentity, ...]  # by name
    place: tuple[int, ...]  # the folder itself: it could be swapped there and back
    at_ns: int  # clock of the system, just before the first file was looked at

    def is_same(self, other: FilesSeen | None) -> bool:
        """Whether nothing was changed, added, removed or swapped between two looks."""
        return other is not None and (self.files, self.place) == (
            other.files,
            other.place,
        )

    @property
    def is_settled(self) -> bool:
        """Whether a change from now on is sure to give some file another identity.

        Clocks of file systems tick; git calls a file that was written within the tick
        in which it was looked at "racily clean": it can be written once more without
        its times moving. So a file must be older than any tick to be recorded.
        """
        newest = max((max(f.mtime_ns, f.ctime_ns) for f in self.files), default=0)
        return newest < self.at_ns - _SETTLING_NS


_SETTLING_NS = 2_000_000_000  # FAT ticks every two seconds, others far more often
_MAX_FILES = 1000


def see_folder(folder: Path) -> FilesSeen | None:
    """Return the identity of every file below `folder`, digest records aside.

    `None` if the files there are not the whole of what a model loaded from it depends
    on, or cannot be told: a link to another folder, shards elsewhere, an adapter,
    a quantisation whose libraries have their say. Such a model is hashed every time.
    """
    at_ns = time.time_ns()
    files: list[FileIdentity] = []
    try:
        for path in _files_below(folder):
            if len(files) == _MAX_FILES:
                return None
            files.append(_identity(path, path.relative_to(folder).as_posix()))
        place = os.stat(folder)
        if not _is_self_contained(folder, {file.name for file in files}):
            return None
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return None  # the last four: JSON of another shape than a model's
    return FilesSeen(
        files=tuple(sorted(files, key=lambda file: file.name)),
        place=(place.st_dev, place.st_ino, place.st_ctime_ns),
        at_ns=at_ns,
    )


def see_file(path: Path) -> FilesSeen | None:
    """Return the identity of one file; `None` if it cannot be told."""
    at_ns = time.time_ns()
    try:
        return FilesSeen((_identity(path, path.name),), (), at_ns)
    except (OSError, ValueError):
        return None


def _files_below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_raise):
        for name in folders:
            if (Path(parent) / name).is_symlink():
                raise ValueError("a link to a folder is not followed")
        for name in names:
            if not name.startswith(RECORD_NAME):
                yield Path(parent) / name


def _raise(error: OSError) -> None:
    raise error


def _identity(path: Path, name: str) -> FileIdentity:
    status = path.stat()  # of the target, if it is a link
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("not a plain file")
    return FileIdentity(
        name=name,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        device=status.st_dev,
    )


def _is_self_contained(folder: Path, names: set[str]) -> bool:
    """Whether loading reads nothing but the named files below `folder`."""
    if "adapter_config.json" in names:  # would be merged in, and may name another base
        return False
    if b'"quantization_config"' in (folder / "config.json").read_bytes():
        return False
    if "tokenizer_config.json" in names:
        config = json.loads((folder / "tokenizer_config.json").read_bytes())
        if any(key.endswith("_file") and config[key] for key in config):
            return False
    for name in names:
        if name.endswith(".index.json"):
            shards = json.loads((folder / name).read_bytes()).get("weight_map", {})
            if not set(shards.values()) <= names:
                return False
    return True


# The record

RECORD_NAME: Final = ".stemkv-digests.json"
_FORMAT: Final = 1
_MAX_KEPT: Final = 4  # of one state of the files: dtypes, versions of libraries
_MAX_RECORD_BYTES: Final = 1 << 26


class DigestRecord:
    """Digests by the identity of the files they were computed from.

    Sound under two rules, which are its callers': look at the files before and after
    loading, and neither believe nor write a record unless both looks are the same; and
    write only what `is_settled`. Then a digest found here is of the bytes that were
    loaded, not of what lay there at another time.

    Kept in the first of `places` that can be written. Whatever is damaged, of another
    format or writable by others is no record, and is replaced. Nothing here raises
    because of a file: at worst, something is hashed again.
    """

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)

    def find(self, seen: FilesSeen, key: str) -> Any:
        """Return what was kept under `key` for exactly these files, or `None`."""
        for place in self._places:
            found = _read(place, seen)
            if key in found:
                return found[key]
        return None

    def keep(self, seen: FilesSeen, key: str, value: Any) -> None:
        """Keep a JSON value for these files, with others kept for them before."""
        for place in self._places:
            kept = _read(place, seen)
            kept.pop(key, None)  # the newest goes last
            newest = list({**kept, key: value}.items())[-_MAX_KEPT:]
            content = {
                "format": _FORMAT,
                "files": [list(astuple(file)) for file in seen.files],
                "digests": dict(newest),
            }
            try:
                _write(place, {**content, "checksum": _checksum(content)})
            except OSError:
                continue
            if _read(place, seen):  # some file systems cannot keep others from writing
                return


def conditions(dtype: torch.dtype) -> str:
    """Return all but the files that decides which tensors a load gives, as a key."""
    facts = {
        "scheme": str(_SCHEME),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
    }
    for library in ("transformers", "tokenizers", "safetensors"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts[library] = importlib.metadata.version(library)
    return ";".join(f"{name}={fact}" for name, fact in facts.items())


def _read(place: Path, seen: FilesSeen) -> dict[str, Any]:
    """Return what is kept for exactly these files."""
    try:
        status = os.lstat(place)
        if not _is_only_ours(status) or status.st_size > _MAX_RECORD_BYTES:
            return {}
        content = json.loads(place.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        return {}
    if content.pop("checksum", None) != _checksum(content):
        return {}
    digests = content.get("digests")
    if content.get("files") != [list(astuple(file)) for file in seen.files]:
        return {}
    return digests if isinstance(digests, dict) else {}


def _is_only_ours(status: os.stat_result) -> bool:
    """Whether only this user, or root, can have written the file."""
    if not stat.S_ISREG(status.st_mode):
        return False
    if not hasattr(os, "geteuid"):
        return True
    is_owned = status.st_uid in (os.geteuid(), 0)
    return is_owned and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _write(place: Path, content: dict[str, Any]) -> None:
    """Write aside and rename, so that a reader sees one state or the other."""
    place.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(prefix=f"{RECORD_NAME}.", dir=place.parent)
    try:
        with open(handle, "wb") as file:
            file.write(json.dumps(content, separators=(",", ":")).encode())
        os.chmod(aside, 0o644)  # others may read it; `_is_only_ours` is about writing
        os.replace(aside, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def _checksum(content: Mapping[str, Any]) -> str:
    """Guard against damage; whoever can write the record can write this, too."""
    return hashlib.sha256(_json(content)).hexdigest()


# Bytes


def _header(what: bytes) -> bytes:
    return b"stemkv-" + what + b"\0" + struct.pack(">H", _SCHEME)


def _framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def _json(value: Any) -> bytes:
    """Return canonical JSON; what JSON does not know is named by its text."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return text.encode()


def _from_hex(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != _DIGEST_SIZE:
        raise ValueError("not a SHA-256")
    return digest


def _from_hex_or_none(text: str | None) -> bytes | None:
    return None if text is None else _from_hex(text)
