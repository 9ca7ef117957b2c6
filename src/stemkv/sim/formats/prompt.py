"""Prompts as text or token ids, cut into the contents of units.

Owns how text becomes tokens, and how chat messages become text. Keeps none of it: what
leaves this module are lengths and bytes that are hashed at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import msgspec

from ...errors import ConfigError

__all__ = ["TextCut", "cut_tokens", "render_chat", "text_cut"]

# Control characters that mark the structure of a rendered chat. Content that holds one
# is escaped, so it can forge no structure. None is white space to `str.split`.
_MARK = "\x02"
_ESCAPE = "\x10"


class TextCut(Protocol):
    """Turns text into tokens, `unit_size` of them a unit."""

    @property
    def name(self) -> str:
        """What a token is taken to be, for people."""

    @property
    def is_exact(self) -> bool:
        """Whether these are a model's tokens, for text that is the whole prompt."""

    @property
    def needs_template(self) -> bool:
        """Whether the tokens of a chat depend on a template, which nobody applies."""

    def cut(self, text: str, unit_size: int) -> tuple[int, Iterator[bytes]]:
        """Return the number of tokens and the contents of the units, in order."""


def text_cut(tokens: str | None) -> TextCut:
    """Return the cut that a `tokens` setting names.

    `words`, `chars4` (also for `None`), or the path of a tokenizer.json.
    """
    if tokens is None or tokens == "chars4":
        return _Characters()
    if tokens == "words":
        return _Words()
    if tokens.endswith(".json") or Path(tokens).exists():
        return _Tokenizer(tokens)
    raise ConfigError(
        f"tokens must be words, chars4 or the path of a tokenizer.json, got {tokens!r}"
    )


def cut_tokens(tokens: Sequence[int], unit_size: int) -> Iterator[bytes]:
    """Yield the contents of the units of token ids, each in [0, 2**31)."""
    ids = array("i", tokens)
    for start in range(0, len(ids), unit_size):
        yield ids[start : start + unit_size].tobytes()


class _Words:
    name = "words between white space"
    is_exact = True  # of text that was made of one word per token
    needs_template = False  # the marks of our rendering cling to words

    def cut(self, text: str, unit_size: int) -> tuple[int, Iterator[bytes]]:
        words = text.split()
        contents = (
            " ".join(words[start : start + unit_size]).encode()
            for start in range(0, len(words), unit_size)
        )
        return len(words), contents


class _Characters:
    name = "4 characters each"
    is_exact = False
    needs_template = True

    def cut(self, text: str, unit_size: int) -> tuple[int, Iterator[bytes]]:
        size = 4 * unit_size
        contents = (
            text[start : start + size].encode() for start in range(0, len(text), size)
        )
        return -(-len(text) // 4), contents


class _Tokenizer:
    is_exact = True
    needs_template = True

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ConfigError(
                f"tokens={path!r} needs the package tokenizers; install it, "
                f"or estimate with tokens='chars4'"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # it raises nothing more specific
            raise ConfigError(f"tokens: {path} cannot be read: {error}") from None
        self.name = f"those of {Path(path).name}"

    def cut(self, text: str, unit_size: int) -> tuple[int, Iterator[bytes]]:
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        return len(encoded.ids), cut_tokens(encoded.ids, unit_size)


def render_chat(
    messages: Sequence[Mapping[str, object]], *, tools: object = None
) -> tuple[str, int]:
    """Return a chat as one text, and how many parts of it are not text.

    Different chats give different texts, and a chat that goes on gives a longer text
    with the same beginning. It is not what a model's chat template makes of it, so
    token counts of it are estimates. Parts that are not text (images, audio, files)
    stand there as a digest. A key that is null counts as absent, and absent content
    as empty. Every message needs a `role`.

    ```
    chat    := [tools] message*
    tools   := MARK "tools" MARK json " "
    message := MARK "role:" role MARK [MARK "name" MARK name MARK "content" MARK]
               text-or-parts field* " "
    part, field := MARK kind MARK value
    ```
    """
    pieces: list[str] = []
    num_other = 0
    if tools:
        pieces.append(f"{_MARK}tools{_MARK}{_escaped(_canonical(tools))} ")
    for message in messages:
        fields = {key: value for key, value in message.items() if value is not None}
        pieces.append(f"{_MARK}role:{_escaped(str(fields.pop('role')))}{_MARK}")
        # First what stands in front of the words in every template.
        name = fields.get("name")
        if isinstance(name, str):
            del fields["name"]
            pieces.append(f"{_MARK}name{_MARK}{_escaped(name)}{_MARK}content{_MARK}")
        content = fields.pop("content", "")
        if isinstance(content, str):
            pieces.append(_escaped(content))
        else:
            for part in content if isinstance(content, list) else [content]:
                kind, value, is_text = _part(part)
                num_other += not is_text
                pieces.append(_field(kind, value))
        for key in sorted(fields):
            pieces.append(_field(f"key:{key}", _canonical(fields[key])))
        pieces.append(" ")
    return "".join(pieces), num_other


def _part(part: object) -> tuple[str, str, bool]:
    if isinstance(part, dict) and set(part) == {"type", "text"}:
        kind, text = part["type"], part["text"]
        if isinstance(kind, str) and isinstance(text, str):
            return f"part:{kind}", text, True
    digest = blake2b(_canonical(part).encode(), digest_size=16)
    return "digest", digest.hexdigest(), False


def _field(key: str, value: str) -> str:
    return f"{_MARK}{_escaped(key)}{_MARK}{_escaped(value)}"


def _canonical(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def _escaped(text: str) -> str:
    if _MARK not in text and _ESCAPE not in text:
        return text
    return text.replace(_ESCAPE, _ESCAPE * 2).replace(_MARK, f"{_ESCAPE}m")
