"""Realistic prompts that every machine has: chats about Python's own documentation.

Owns which texts, which questions and how they become token ids. Deterministic for a
Python version, a model and a seed. Texts are read from the standard library's source,
which is not run for it.
"""

from __future__ import annotations

import ast
import importlib.util
import io
import random
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from itertools import chain

from stemkv.engine import LoadedModel

__all__ = ["Chat", "chats", "passage"]

# Modules with more than 200 characters of documentation, in Python 3.11 to 3.14.
_MODULES = [
    "argparse",
    "ast",
    "calendar",
    "cmd",
    "codeop",
    "collections",
    "colorsys",
    "compileall",
    "configparser",
    "copy",
    "difflib",
    "doctest",
    "encodings",
    "fileinput",
    "fnmatch",
    "ftplib",
    "getopt",
    "getpass",
    "gettext",
    "heapq",
    "http.client",
    "http.cookiejar",
    "http.cookies",
    "http.server",
    "inspect",
    "json",
    "keyword",
    "locale",
    "logging.config",
    "lzma",
    "mimetypes",
    "operator",
    "optparse",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "plistlib",
    "pprint",
    "pyclbr",
    "pydoc",
    "random",
    "re",
    "rlcompleter",
    "sched",
    "secrets",
    "shelve",
    "smtplib",
    "socket",
    "socketserver",
    "sqlite3",
    "ssl",
    "statistics",
    "string",
    "subprocess",
    "tabnanny",
    "tempfile",
    "timeit",
    "tokenize",
    "trace",
    "typing",
    "unittest",
    "urllib.error",
    "urllib.parse",
    "urllib.request",
    "urllib.robotparser",
    "uuid",
    "wave",
    "wsgiref.validate",
    "xml.dom",
    "xml.dom.minidom",
    "xml.etree.ElementTree",
    "xml.sax",
    "xmlrpc.client",
    "xmlrpc.server",
]

_QUESTIONS = (
    "What is this module for? Answer in one sentence.",
    "Give a short example of its use.",
    "Name one thing that beginners get wrong with it.",
    "Which of its names would I need most often?",
    "When should I use something else instead?",
)
_FOLLOW_UPS = (
    "Can you say that in simpler words?",
    "Show me that in code, please.",
    "And what happens if it fails?",
)
_ANSWER = "ANSWERSTANDSHERE"  # where a chat template is cut
_MIN_CHARACTERS, _MAX_CHARACTERS = 200, 230  # of documentation in a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A prompt, and the request before it that has a prefix in common.

    With `follow_up` that is the chat's first turn: the prompt is `earlier`, then what
    was answered, then `follow_up`. Otherwise `earlier` is somebody else's question
    about the same text, and the prompt is `prompt`.
    """

    topic: str
    earlier: tuple[int, ...]
    prompt: tuple[int, ...] = ()
    follow_up: tuple[int, ...] = ()

    @property
    def is_second_turn(self) -> bool:
        """Whether the prompt continues over generated tokens."""
        return bool(self.follow_up)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, without those of an answer."""
        return len(self.prompt) or len(self.earlier) + len(self.follow_up)


def chats(loaded: LoadedModel, num_chats: int, seed: int) -> list[Chat]:
    """Return so many chats; every other one is a second turn."""
    texts = [(name, _documentation(name)) for name in _MODULES]
    known = [(name, text) for name, text in texts if len(text) > _MIN_CHARACTERS]
    draw = random.Random(f"chats/{seed}")
    draw.shuffle(known)
    return [_chat(loaded, *known[i % len(known)], i, draw) for i in range(num_chats)]


def passage(loaded: LoadedModel, index: int, num_tokens: int) -> tuple[int, ...]:
    """Return so many tokens of documentation; every index starts elsewhere."""
    ids: list[int] = []
    for name in chain(_MODULES[index % len(_MODULES) :], _MODULES * num_tokens):
        if len(ids) >= num_tokens:
            break
        ids.extend(_ids(loaded, _documentation(name)))
    return tuple(ids[:num_tokens])


def _chat(
    loaded: LoadedModel, name: str, text: str, index: int, draw: random.Random
) -> Chat:
    size = draw.randint(_MIN_CHARACTERS, _MAX_CHARACTERS)
    if loaded.tokenizer is None:
        size //= 4  # a byte is a token then
    about = f"The documentation of Python's {name} begins:\n\n{text[:size]}\n\n"
    other, own = draw.sample(_QUESTIONS, 2)
    topic = f"{name}, {'second' if index % 2 else 'first'} turn"
    earlier = _turn(loaded, about + other)
    if index % 2:
        follow_up = _next_turn(loaded, about + other, draw.choice(_FOLLOW_UPS))
        return Chat(topic=topic, earlier=earlier, follow_up=follow_up)
    return Chat(topic=topic, earlier=earlier, prompt=_turn(loaded, about + own))


def _turn(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    """Return the ids of a chat's first turn, up to where the answer begins."""
    if not _has_template(loaded):
        return _ids(loaded, f"User: {text}\nAssistant:")
    return tuple(
        loaded.tokenizer.apply_chat_template(
            [_message("user", text)], add_generation_prompt=True, return_dict=False
        )
    )


def _next_turn(loaded: LoadedModel, text: str, follow_up: str) -> tuple[int, ...]:
    """Return the ids between the first answer and the second.

    Tokens of an answer are kept as generated: tokenized anew, its text could become
    others.
    """
    if not _has_template(loaded):
        return _ids(loaded, f"\nUser: {follow_up}\nAssistant:")
    rendered: str = loaded.tokenizer.apply_chat_template(
        [
            _message("user", text),
            _message("assistant", _ANSWER),
            _message("user", follow_up),
        ],
        add_generation_prompt=True,
        tokenize=False,
    )
    after = rendered.rpartition(_ANSWER)[2]
    return tuple(loaded.tokenizer(after, add_special_tokens=False)["input_ids"])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _has_template(loaded: LoadedModel) -> bool:
    return getattr(loaded.tokenizer, "chat_template", None) is not None


def _ids(loaded: LoadedModel, text: str) -> tuple[int, ...]:
    if loaded.tokenizer is None:
        return tuple(byte % loaded.vocab_size for byte in text.encode())
    ids: Sequence[int] = loaded.tokenizer(text)["input_ids"]
    return tuple(ids)


@cache
def _documentation(name: str) -> str:
    """Return a module's docstring from its source; "" where there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return ""
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return ""
    source = spec.loader.get_source(name) or ""
    # Only its first words: parsing whole modules would take seconds.
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            return " ".join(str(ast.literal_eval(token.string)).split())
        if token.type in (tokenize.NAME, tokenize.OP):
            break
    return ""
