"""The worked example's texts, and how they become chat requests.

Owns what the requests of `stemkv demo` say, which of them begin alike, and in which
order they arrive. Knows nothing of tokenizers (lengths in tokens depend on the model)
or of engines (who runs the requests, and when).
"""

import json
import random
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRequest:
    """One request of the worked example."""

    name: str  # stable under shuffling: "shared-03", "single-11"
    tenant: str
    messages: tuple[dict[str, str], ...]  # chat messages: role and content
    max_new_tokens: int  # 16 to 32
    shares_prefix: bool  # begins with `shared_messages()`


def shared_messages() -> tuple[dict[str, str], ...]:
    """Return the messages with which ten of the requests begin."""
    tools: list[dict[str, object]] = json.loads(_read("tools.json"))
    content = "\n".join(
        [
            _read("system.md"),
            "## Tools",
            "",
            (
                "Call a tool by answering with one JSON object that has a `name` and "
                "`arguments`, and nothing else."
            ),
            "These are the tools, one a line:",
            "",
            *(json.dumps(tool, ensure_ascii=False) for tool in tools),
        ]
    )
    return (_message("system", content),)


def load_requests(rng: random.Random) -> tuple[ExampleRequest, ...]:
    """Return the 24 requests in an order of arrival that `rng` decides.

    The same state of `rng` gives the same order and the same lengths of output.
    """
    requests = [
        *_shared_requests(_read_entries("questions.json"), rng),
        *_single_requests(_read_entries("documents.json"), rng),
    ]
    rng.shuffle(requests)
    return tuple(requests)


def _shared_requests(
    entries: list[dict[str, str]], rng: random.Random
) -> list[ExampleRequest]:
    prefix = shared_messages()
    return [
        ExampleRequest(
            name=f"shared-{number:02}",
            tenant=entry["tenant"],
            messages=(*prefix, _message("user", entry["text"])),
            max_new_tokens=_draw_max_new_tokens(rng),
            shares_prefix=True,
        )
        for number, entry in enumerate(entries, start=1)
    ]


def _single_requests(
    entries: list[dict[str, str]], rng: random.Random
) -> list[ExampleRequest]:
    # Each has a system message of its own: without one, many chat templates insert
    # the same default in front of all of them, and they would share it after all.
    return [
        ExampleRequest(
            name=f"single-{number:02}",
            tenant=entry["tenant"],
            messages=(
                _message("system", entry["system"]),
                _message("user", entry["text"]),
            ),
            max_new_tokens=_draw_max_new_tokens(rng),
            shares_prefix=False,
        )
        for number, entry in enumerate(entries, start=1)
    ]


def _draw_max_new_tokens(rng: random.Random) -> int:
    return rng.randint(16, 32)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _read_entries(name: str) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads(_read(name))
    return entries


def _read(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
