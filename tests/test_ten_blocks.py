"""Executes `docs/ten-blocks.md` and compares every drawing in it with the core.

The document's python blocks run one after another in one namespace, against the real
core. A text block right behind a python block is what that block must print. To see
what a changed document would print: `python tests/test_ten_blocks.py`.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stemkv.core import Domain, PrefixCache, Scheduler, StepPlan, TokenIds
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.events import BlocksEvicted, BlocksPublished
from stemkv.core.prefix.tree import Node
from stemkv.core.schedule.events import (
    Event,
    PrefixAwaited,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    TokenSampled,
)
from stemkv.core.schedule.request import Request

DOCUMENT = Path(__file__).parent.parent / "docs" / "ten-blocks.md"


@dataclass(frozen=True)
class Moment:
    """A python block and the text block that says what it prints, if any."""

    title: str
    line: int  # of the python block's first line in the document
    code: str
    expected: str | None


# Reading the document

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def read_moments(text: str) -> Iterator[Moment]:
    fences = list(_FENCE.finditer(text))
    for fence, following in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        titles = _HEADING.findall(text, 0, fence.start())
        is_drawn = following is not None and following[1] == "text"
        yield Moment(
            title=titles[-1] if titles else "introduction",
            line=text.count("\n", 0, fence.start(2)) + 1,
            code=fence[2],
            expected=following[2] if following is not None and is_drawn else None,
        )


def run_moments(moments: Iterable[Moment]) -> Iterator[tuple[Moment, str]]:
    """Execute the document; yield what each block printed."""
    namespace: dict[str, object] = {"draw": draw}
    for moment in moments:
        printed = io.StringIO()
        # Blank lines in front, so that a traceback names the document's line.
        source = "\n" * (moment.line - 1) + moment.code
        with contextlib.redirect_stdout(printed):
            exec(compile(source, str(DOCUMENT), "exec"), namespace)
        yield moment, printed.getvalue()


# Drawing


def draw(scheduler: Scheduler, plan: StepPlan, events: Iterable[Event]) -> None:
    """Print a step and the state after it; first make sure that the state is sound."""
    check_scheduler(scheduler)
    print(f"step {plan.step}")
    chunks = [f"{c.request_id} [{c.start}, {c.end})" for c in plan.chunks]
    print(f"  compute  {', '.join(chunks) or '-'}")
    copies = [f"{c.num_tokens} of {c.source} to {c.target}" for c in plan.copies]
    print(f"  copy     {', '.join(copies) or '-'}")
    happened = ",\n           ".join(filter(None, map(say, events)))
    print(f"  events   {happened or '-'}")
    print("pool")
    for state, block_ids in block_states(scheduler.cache).items():
        print(f"  {state:8} {join(sorted(block_ids))}")
    print("tables")
    for request in scheduler.requests():
        print(f"  {request.request_id:8} {draw_table(request, scheduler.cache)}")
    if not scheduler.requests():
        print("  -")
    print("tree")
    for root in scheduler.cache.tree.roots().values():
        for line in draw_nodes(root):
            print(f"  {line}")


def block_states(cache: PrefixCache) -> dict[str, list[int]]:
    """Return the ids behind the three counts of `PrefixCache.usage`."""
    states: dict[str, list[int]] = {"free": [], "active": [], "cached": []}
    for block_id in range(cache.pool.num_total):
        match cache.pool.state(block_id):
            case BlockState.FREE:
                states["free"].append(block_id)
            case BlockState.PRIVATE:
                states["active"].append(block_id)
            case BlockState.PUBLISHED:
                pass  # the tree knows whether anybody uses it
    for node in cache.tree.nodes():
        states["active" if node.ref_count else "cached"].extend(node.block_ids)
    usage = cache.usage()
    assert len(states["free"]) == usage.num_free_blocks
    assert len(states["active"]) == usage.num_active_blocks
    assert len(states["cached"]) == usage.num_cached_blocks
    return states


def draw_table(request: Request, cache: PrefixCache) -> str:
    if request.lease is None:
        return request.state.value
    size = cache.config.block_size
    text = spell_out(request.tokens)
    blocks = "|".join(text[i : i + size] for i in range(0, len(text), size))
    progress = f"{request.num_computed} of {request.num_tokens} computed"
    return f"{join(request.lease.table.ids()):14} {blocks:26} {progress}"


def draw_nodes(node: Node, indent: str = "") -> Iterator[str]:
    for children in node.children.values():
        for child in children:
            head = f"{indent}{tenant(child.domain)} {spell_out(child.edge)}"
            yield f"{head:23} {join(child.block_ids):14} leases: {child.ref_count}"
            yield from draw_nodes(child, indent + "  ")


def say(event: Event) -> str | None:
    match event:
        case BlocksPublished():
            return f"published {event.num_blocks} for {tenant(event.domain)}"
        case BlocksEvicted():
            return f"evicted {event.num_blocks} of {tenant(event.domain)}"
        case RequestAdmitted():
            verb = "resumed" if event.is_resumed else "admitted"
            return f"{event.request_id} {verb} with {event.num_cached_tokens} cached"
        case PrefixAwaited():
            return f"{event.request_id} waits for a prefix"
        case RequestForked():
            return f"{event.request_id} forked"
        case RequestPreempted():
            return f"{event.request_id} preempted"
        case RequestFinished():
            return f"{event.request_id} finished"
        case TokenSampled():
            return None  # the tables show it
    raise AssertionError(f"the document has no word for {event}")


def tenant(domain: Domain) -> str:
    return domain.name or "public"


def spell_out(buffer: bytes) -> str:
    return "".join(chr(token) for token in TokenIds(buffer))


def join(block_ids: Iterable[int]) -> str:
    return " ".join(map(str, block_ids)) or "-"


# Tests

MOMENTS = list(read_moments(DOCUMENT.read_text(encoding="utf-8")))
DRAWN = [moment for moment in MOMENTS if moment.expected is not None]


@pytest.fixture(scope="module")
def printed() -> dict[Moment, str]:
    return dict(run_moments(MOMENTS))


@pytest.mark.parametrize("moment", DRAWN, ids=[moment.title for moment in DRAWN])
def test_the_core_does_what_the_document_draws(
    moment: Moment, printed: dict[Moment, str]
) -> None:
    assert printed[moment].splitlines() == (moment.expected or "").splitlines()


def test_nothing_is_printed_that_the_document_does_not_show(
    printed: dict[Moment, str],
) -> None:
    silent = [moment for moment in MOMENTS if moment.expected is None]

    assert [printed[moment] for moment in silent] == [""] * len(silent)


def test_the_document_shows_every_mechanism_it_promises() -> None:
    drawings = "\n".join(moment.expected or "" for moment in DRAWN)
    mechanisms = [
        "waits for a prefix",
        "published 2 for public",
        "copy     2 of",
        "forked",
        "evicted 1 of bob",
        "preempted",
        "resumed with",
        "finished",
    ]

    assert [word for word in mechanisms if word not in drawings] == []


if __name__ == "__main__":
    for moment, text in run_moments(MOMENTS):
        print(f"## {moment.title}\n{text}")
