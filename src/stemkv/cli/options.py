"""Options and errors that commands have in common.

Owns their words, and the mapping of errors to exit codes: 2 for what the caller can
mend, 70 for our own defects (EX_SOFTWARE of sysexits.h), which end with a traceback.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from stemkv.cli.knobs import KNOBS
from stemkv.errors import InvariantError, StemKVError
from stemkv.report.wording import visible

__all__ = [
    "DtypeOption",
    "JsonOption",
    "ModelOption",
    "NumericsOption",
    "ThreadsOption",
    "errors_explained",
    "remedy_as_typed",
]

ModelOption = Annotated[
    Path | None,
    typer.Option("--model", help="Model folder or .gguf file [default: embedded]."),
]
DtypeOption = Annotated[str, typer.Option(help="auto, bfloat16 or float32.")]
NumericsOption = Annotated[str, typer.Option(help="exact or tolerant.")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Tensor threads [default: usable cores - 1].")
]
JsonOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write JSON to this file; - is standard output."),
]

# What a message of the library begins with, and how it is typed here.
_OPTIONS: Final = {
    **{knob.field: knob.option.partition("/")[0] for knob in KNOBS},
    "assumed_watts": "--watts",
    "eviction": "--eviction",
    "fields": "--map",
    "format": "--format",
    "hints": "--hints",
    "kv_dtype": "--kv-dtype",
    "kv_tokens": "--kv-tokens",
    "lookahead": "--lookahead",
    "max_new_tokens": "--max-tokens",
    "num_blocks": "--blocks",
    "num_prompts": "--num-prompts",
    "num_replicas": "--replicas",
    "num_requests": "--requests",
    "num_samples": "--n",
    "num_tenants": "--tenants",
    "num_threads": "--threads",
    "prefix_tokens": "--prefix-tokens",
    "quotas": "--quotas",
    "slo_tpot_s": "--slo-tpot",
    "slo_ttft_s": "--slo-ttft",
    "spread_s": "--spread",
    "weight_dtype": "--weight-dtype",
    "wrong_share": "--wrong-hints",
}
# Remedies that are for callers of the library, and what to do instead.
_REMEDIES: Final = {
    "fields={role: path}": "--map ROLE=PATH",
    "describe it with a `Device`": "bring measured costs with --cost",
    "replay without a clock": "replay with --no-clock",
    "read fewer requests (limit) or a larger unit_size": "read fewer with --limit",
    "a smaller block_size": "a smaller --block-size",
    "the sharing rule": "--sharing",
    "estimate with tokens='chars4'": "estimate with --tokens chars4",
}
_FIELD = re.compile(r"fields=\{'(\w+)': '([^']+)'\}")
_DEFECT = 70


@contextmanager
def errors_explained(extras: str = "cli,engine") -> Iterator[None]:
    """Print what StemKV or a missing extra says, without a traceback.

    What nobody expected is shown with one: it is a defect, and looks like no finding.
    `extras` are those that the command needs.
    """
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except InvariantError as error:
        _report(error)
    except StemKVError as error:
        _fail(f"{type(error).__name__}: {_as_typed(str(error))}")
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename or ''}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("stemkv"):
            _report(error)
        _fail(f"{error.name} is missing; install: pip install 'stemkv[{extras}]'")
    except Exception as error:
        _report(error)


def remedy_as_typed(text: str) -> str:
    """Return a text of the library with its remedies as options of ours."""
    for ours, typed in _REMEDIES.items():
        text = text.replace(ours, typed)
    return _FIELD.sub(r"--map \1=\2", text)


def _as_typed(message: str) -> str:
    """Return what the library says in the words of the command line."""
    message = remedy_as_typed(message)
    word = re.match(r"\w+", message)
    if word is None or word[0] not in _OPTIONS:
        return message
    return _OPTIONS[word[0]] + message[word.end() :]


def _fail(message: str) -> NoReturn:
    # What names a file or a field comes from outside, and must not steer a terminal.
    lines = [visible(line) for line in message.split("\n")]
    print("stemkv: " + "\n".join(lines), file=sys.stderr)
    raise typer.Exit(2)


def _report(error: Exception) -> NoReturn:
    """Show a defect of ours as what it is: the caller can mend nothing."""
    traceback.print_exception(error, file=sys.stderr)
    print(
        f"stemkv: internal error: {visible(str(error) or type(error).__name__)}; this is "
        f"a defect of StemKV, please report it with the lines above",
        file=sys.stderr,
    )
    raise typer.Exit(_DEFECT) from None
