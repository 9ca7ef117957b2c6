"""Tries a key function: what it returns, twice, and in another process.

Owns finding a user's function, and containing whatever it does: one that raises, or
answers differently when asked again, is a finding and not a crash. Knows nothing of
what the keys are for. Standard library only, like `keys`.

Run as a module it is the other process: see `keys_elsewhere`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from stemkv.audit.identity.keys import KeyContext, KeyFunction
from stemkv.errors import ConfigError

__all__ = ["KeyFault", "find_key_function", "number_keys", "try_elsewhere"]

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class KeyFault:
    """Why a key function's answers can't be used."""

    reason: str


def find_key_function(name: str) -> KeyFunction:
    """Import "module:function" from the current directory or `sys.path`.

    Raises `ConfigError` naming what is missing. Importing runs the module's code.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ConfigError(f"key must be MODULE:FUNCTION, got {name!r}")
    with _running_their_code():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise ConfigError(
                    f"key: module {module_name} cannot be imported ({error})"
                ) from error
            raise ConfigError(
                f"key: there is no module {module_name} in the current directory or "
                f"on sys.path"
            ) from None
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"key: module {module_name} cannot be imported ({_named(error)})"
            ) from error
    function: Any = module  # whatever the user's module holds
    for part in function_name.split("."):
        found = getattr(function, part, None)
        if found is None:
            close = difflib.get_close_matches(part, dir(function), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"key: {module_name} has no function {part}{hint}")
        function = found
    if not callable(function):
        raise ConfigError(
            f"key: {name} must be a function of a KeyContext, got "
            f"{type(function).__name__}"
        )
    checked: KeyFunction = function
    return checked


def number_keys(
    function: KeyFunction,
    contexts: Sequence[KeyContext],
    copies: Sequence[KeyContext],
) -> list[int] | KeyFault:
    """Return a number for each context's key; equal keys have equal numbers.

    The function is asked again, in reverse order and with equal contexts that are
    other objects (`copies`), so that one that depends on anything else is found out.
    """
    with _running_their_code():
        numbers: dict[Hashable, int] = {}
        answers: list[int] = []
        try:
            for context in contexts:
                answers.append(numbers.setdefault(function(context), len(numbers)))
            for index in range(len(copies) - 1, -1, -1):
                if numbers.get(function(copies[index])) != answers[index]:
                    return KeyFault(
                        "it is not deterministic: asked twice for equal contexts, it "
                        "gave different keys"
                    )
        except (Exception, SystemExit) as error:
            return KeyFault(_explained(error))
    return answers


def try_elsewhere(
    name: str, function: KeyFunction, contexts: Sequence[KeyContext], *, seed: int
) -> bool | KeyFault:
    """Return whether a process with hash seed `seed` gives the same keys.

    `name` is the function's "module:function", which must mean the same there. A
    `KeyFault` says why it could not be told.
    """
    with tempfile.TemporaryDirectory(prefix="stemkv-keys-") as folder:
        asked, answered = Path(folder, "asked"), Path(folder, "answered")
        asked.write_bytes(pickle.dumps((name, tuple(contexts))))
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path])),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(asked), str(answered)],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return KeyFault(f"another process did not answer in {_TIMEOUT_S:.0f} s")
        if done.returncode != 0 or not answered.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return KeyFault(f"another process could not compute the keys: {last:.200}")
        with _running_their_code():
            try:
                # Written a moment ago by code that this process runs as well.
                keys = pickle.loads(answered.read_bytes())
                return bool([function(context) for context in contexts] == keys)
            except (Exception, SystemExit) as error:
                return KeyFault(_explained(error))


@contextlib.contextmanager
def _running_their_code() -> Iterator[None]:
    """Let modules of the current directory be found, as `python -m` does.

    What they print goes to standard error: standard output may be a report.
    """
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(here)


def _explained(error: BaseException) -> str:
    if isinstance(error, AttributeError) and isinstance(error.obj, KeyContext):
        known = [field.name for field in fields(KeyContext)]
        close = difflib.get_close_matches(str(error.name), known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        return f"it reads {error.name}, which a KeyContext has not; {hint}"
    if isinstance(error, TypeError) and "unhashable" in str(error):
        return f"its key cannot be hashed ({error}); return a tuple, text or bytes"
    return f"it raised {_named(error)}"


def _named(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__


def _answer(asked: str, answered: str) -> None:
    name, contexts = pickle.loads(Path(asked).read_bytes())
    function = find_key_function(name)
    keys = [function(context) for context in contexts]
    Path(answered).write_bytes(pickle.dumps(keys))


if __name__ == "__main__":
    _answer(*sys.argv[1:])
