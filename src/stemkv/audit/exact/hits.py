"""The states in which a request can find KV, each reached on an engine of its own.

Owns how a state is reached and the proof that it was. What a state's requests got is
compared by the audit; a state that was not reached proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stemkv.audit.exact.bits import num_differing
from stemkv.audit.exact.prompts import passage
from stemkv.audit.exact.witness import Ask, Cold, EngineMaker, Seen, Witness
from stemkv.core.schedule.events import PrefixAwaited, RequestForked
from stemkv.engine import EngineConfig, LoadedModel

__all__ = ["STATES", "Lab", "Reached", "State"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """What states are reached with."""

    loaded: LoadedModel
    config: EngineConfig  # block size, numerics, threads
    cold: Cold
    make_engine: EngineMaker
    num_blocks: int | None  # of every engine; None: as few as each state needs
    first_passage: int  # which documentation the prompts are taken from
    adapters: Mapping[str, Path] = field(default_factory=dict)  # as `cold` has them

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.config.core.cache.block_size

    def witness(
        self, *, num_blocks: int, token_budget: int = 1024, num_running: int = 16
    ) -> Witness:
        """Return a fresh engine."""
        num_blocks = num_blocks if self.num_blocks is None else self.num_blocks
        per_block = self.block * self.loaded.kv_bytes_per_token
        limits = replace(
            self.config.core.scheduler,
            token_budget=token_budget,
            max_num_running=min(num_running, token_budget),
        )
        config = replace(
            self.config,
            core=replace(self.config.core, scheduler=limits),
            kv_memory_bytes=num_blocks * per_block,
        )
        return Witness(self.loaded, config, self.make_engine)

    def text(self, index: int, num_tokens: int) -> tuple[int, ...]:
        """Return so many tokens of documentation; another index, another text."""
        return passage(self.loaded, self.first_passage + 5 * index, num_tokens)

    def ask(self, index: int, num_tokens: int, **identity: Any) -> Ask:
        """Return a prompt of so many tokens."""
        return Ask(parts=(self.text(index, num_tokens),), **identity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """What a state's requests saw, and what proves that they were in it."""

    seen: Sequence[Seen]
    proofs: dict[str, int]  # all above 0, or the state was not reached; exact counts


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A way to come by KV."""

    name: str
    reach: Callable[[Lab], Reached]
    needs_adapters: bool = False


def _warm(lab: Lab) -> Reached:
    """The same prompt again: whole blocks, then all but its last token by a copy."""
    witness = lab.witness(num_blocks=16)
    seen = []
    for num_tokens in (5 * lab.block + 1, 5 * lab.block):
        ask = lab.ask(0, num_tokens)
        witness.serve(ask)
        again = witness.serve(ask)
        seen.append(again)
    return Reached(
        seen=seen,
        proofs={
            "tokens reused": seen[0].counts.reused,
            "tokens copied": seen[1].counts.copied,
        },
    )


def _after_traffic(lab: Lab) -> Reached:
    """Others used the engine between writer and reader."""
    witness = lab.witness(num_blocks=24)
    ask = lab.ask(0, 5 * lab.block + 6)
    witness.serve(ask)
    others = [
        witness.serve(lab.ask(index, 3 * lab.block), num_new=3) for index in (1, 2)
    ]
    again = witness.serve(ask)
    return Reached(
        seen=[*others, again],
        proofs={
            "tokens reused": again.counts.reused,
            "unrelated tokens computed": sum(o.counts.computed for o in others),
        },
    )


def _while_written(lab: Lab) -> Reached:
    """Two requests at once: the second waits for what the first computes."""
    # The writer takes two steps; the second has budget to spare for the reader.
    witness = lab.witness(num_blocks=20, token_budget=3 * lab.block)
    ask = lab.ask(0, 5 * lab.block + 1)
    witness.add(ask)
    witness.add(ask.followed_by(lab.text(1, 7)))
    first, second = witness.drain()
    waits = sum(isinstance(event, PrefixAwaited) for event in witness.events)
    return Reached(
        seen=[first, second],
        proofs={"requests that waited": waits, "tokens reused": second.counts.reused},
    )


def _partly_evicted(lab: Lab) -> Reached:
    """The tail of a cached prefix had to go."""
    witness = lab.witness(num_blocks=8)
    ask = lab.ask(0, 5 * lab.block + 6)
    witness.serve(ask)
    witness.serve(lab.ask(1, 5 * lab.block - 2))
    evicted = witness.engine.usage().num_evicted_blocks
    again = witness.serve(ask)
    return Reached(
        seen=[again],
        proofs={
            "blocks evicted": evicted,
            "tokens reused": again.counts.reused,
            "cached tokens computed again": 5 * lab.block - again.counts.reused,
        },
    )


def _evicted(lab: Lab) -> Reached:
    """The whole of a cached prefix had to go, and other KV lies in its blocks."""
    witness = lab.witness(num_blocks=8)
    ask = lab.ask(0, 5 * lab.block + 6)
    witness.serve(ask)
    witness.serve(lab.ask(1, 8 * lab.block - 2))
    evicted = witness.engine.usage().num_evicted_blocks
    again = witness.serve(ask)
    warm = witness.serve(ask)
    return Reached(
        seen=[again, warm],
        proofs={
            "blocks evicted": evicted,
            "cached tokens computed again": 5 * lab.block - again.counts.reused,
            "tokens reused after that": warm.counts.reused,
        },
    )


def _preempted(lab: Lab) -> Reached:
    """Requests lose their blocks while they decode, and come back."""
    witness = lab.witness(num_blocks=7)
    for index in range(3):
        witness.add(lab.ask(index, 2 * lab.block - 2), num_new=8)
    seen = witness.drain()
    return Reached(
        seen=seen,
        proofs={
            "preemptions": sum(s.num_preemptions for s in seen),
            "tokens found again": sum(s.num_found_again for s in seen),
            "tokens computed again": sum(s.counts.recomputed for s in seen),
        },
    )


def _forked(lab: Lab) -> Reached:
    """One prefill, several samples, which part inside a block."""
    witness = lab.witness(num_blocks=16)
    ask = lab.ask(0, 2 * lab.block + 5)
    witness.serve(ask)
    copies_before = witness.num_copies
    witness.add(ask, num_new=6, num_samples=4, temperature=1.0)
    seen = witness.drain()
    forked = [e for e in witness.events if isinstance(e, RequestForked)]
    return Reached(
        seen=seen,
        proofs={
            "tokens reused": seen[0].counts.reused,
            "samples that split off": sum(len(e.child_ids) for e in forked),
            "blocks copied on write": witness.num_copies - copies_before,
            "different continuations": len({s.outputs for s in seen}) - 1,
        },
    )


def _among_mates(lab: Lab) -> Reached:
    """A hit computed in one step with other prefills and decodes."""
    witness = lab.witness(num_blocks=40)
    ask = lab.ask(0, 5 * lab.block + 6)
    witness.serve(ask)
    witness.add(lab.ask(1, lab.block + 1), num_new=4)
    witness.engine.step()  # so that it decodes beside the others' prefills
    witness.add(ask, num_new=3)
    for index, num_tokens in ((2, 3), (3, 2 * lab.block + 2)):
        witness.add(lab.ask(index, num_tokens), num_new=3)
    seen = witness.drain()
    return Reached(
        seen=seen,
        proofs={
            "tokens reused": seen[1].counts.reused,
            "batch mates": min(s.num_mates for s in seen),
        },
    )


def _in_chunks(lab: Lab) -> Reached:
    """Writers and readers whose prefills took several steps, of several sizes."""
    seen = []
    num_steps = []
    reused = []
    for token_budget in (7, 2 * lab.block + 1, 4 * lab.block):
        witness = lab.witness(num_blocks=16, token_budget=token_budget)
        ask = lab.ask(0, 5 * lab.block + 6)
        writer = witness.serve(ask)
        longer = ask.followed_by(lab.text(1, lab.block + 3))
        reader = witness.serve(longer)
        seen += [writer, reader]
        num_steps.append(writer.num_prefill_steps)
        reused.append(reader.counts.reused)
    return Reached(
        seen=seen,
        proofs={
            "prefill steps beyond one": min(num_steps) - 1,
            "different numbers of steps": len(set(num_steps)) - 1,
            "tokens reused": min(reused),
        },
    )


def _at_boundaries(lab: Lab) -> Reached:
    """Hits that end one token before, at, one after a block's end, and inside one."""
    witness = lab.witness(num_blocks=40)
    whole = lab.text(0, 5 * lab.block + 6)
    witness.serve(Ask(parts=(whole,)))
    seen = []
    as_wanted = []
    block = lab.block
    for index, end in enumerate(
        (2 * block - 1, 2 * block, 2 * block + 1, 3 * block + block // 2)
    ):
        other = lab.text(index + 1, block + 3)
        # Another token than the cached one, or the hit would be longer.
        first = (whole[end] + 1) % lab.loaded.vocab_size
        seen.append(witness.serve(Ask(parts=(whole[:end], (first, *other)))))
        as_wanted.append(seen[-1].num_cached == end)
    return Reached(
        seen=seen,
        proofs={
            "boundaries met": sum(as_wanted) if all(as_wanted) else 0,
            "tokens copied": sum(s.counts.copied for s in seen),
        },
    )


def _second_turn(lab: Lab) -> Reached:
    """A chat goes on over tokens that were generated: their KV is from decoding."""
    witness = lab.witness(num_blocks=16)
    opening = lab.ask(0, 2 * lab.block - 2)
    first = witness.serve(opening, num_new=lab.block + 9)
    ask = opening.followed_by((*first.outputs, *lab.text(1, lab.block + 3)))
    second = witness.serve(ask, num_new=3)
    return Reached(
        seen=[first, second],
        proofs={
            "decode-written tokens reused": second.num_cached - (2 * lab.block - 2)
        },
    )


def _with_adapter(lab: Lab) -> Reached:
    """Hits under adapters, in one step with each other and with the model alone."""
    witness = lab.witness(num_blocks=40)
    for name, path in lab.adapters.items():
        witness.engine.load_adapter(name, path)
    asks = [lab.ask(0, 2 * lab.block + 6, adapter=name) for name in lab.adapters]
    for ask in asks:
        witness.add(ask)
    plain = lab.ask(0, 2 * lab.block + 6)
    witness.add(plain)
    witness.drain()
    for ask in (*asks, plain):
        witness.add(ask, num_new=3)
    seen = witness.drain()
    base = lab.cold.run(plain)[0]
    return Reached(
        seen=seen,
        proofs={
            "tokens reused": min(s.counts.reused for s in seen),
            "values an adapter changes": min(
                num_differing(base, lab.cold.run(ask)[0]) for ask in asks
            ),
        },
    )


def _at_start_position(lab: Lab) -> Reached:
    """Hits of prompts whose first token is not at position 0."""
    witness = lab.witness(num_blocks=16)
    num_tokens = 2 * lab.block + 6
    moved = lab.ask(0, num_tokens, start_position=lab.block + 3)
    plain = lab.ask(0, num_tokens)
    witness.serve(plain)
    first = witness.serve(moved)
    again = witness.serve(moved)
    return Reached(
        seen=[first, again],
        proofs={
            "tokens reused": again.counts.reused,
            "values the position changes": num_differing(
                lab.cold.run(plain)[0], lab.cold.run(moved)[0]
            ),
        },
    )


def _with_embeddings(lab: Lab) -> Reached:
    """Hits of prompts with vectors in the place of tokens."""
    witness = lab.witness(num_blocks=16)
    ask = Ask(parts=(lab.text(0, 10), _vectors(lab, 0), lab.text(1, lab.block)))
    other = Ask(parts=(ask.parts[0], _vectors(lab, 1), ask.parts[2]))
    witness.serve(other)
    first = witness.serve(ask)
    again = witness.serve(ask.followed_by(lab.text(2, 7)))
    return Reached(
        seen=[first, again],
        proofs={
            "tokens reused": again.counts.reused,
            "values other vectors change": num_differing(
                lab.cold.run(ask)[0], lab.cold.run(other)[0]
            ),
        },
    )


def _vectors(lab: Lab, index: int) -> torch.Tensor:
    """Return vectors of the size of the model's own, but none of them."""
    table: Any = lab.loaded.model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.tensor(lab.text(index + 3, lab.block + 9))
    with torch.inference_mode():
        own: torch.Tensor = table(ids)
        return (own + own.flip(0)).clone() / 2


STATES = (
    State(name="warm: the same prompt again", reach=_warm),
    State(name="warm after unrelated traffic", reach=_after_traffic),
    State(name="hit on a prefix being written", reach=_while_written),
    State(name="prefix partly evicted", reach=_partly_evicted),
    State(name="prefix evicted and computed again", reach=_evicted),
    State(name="preempted and resumed", reach=_preempted),
    State(name="forked, copied on write", reach=_forked),
    State(name="hit among batch mates", reach=_among_mates),
    State(name="prefill in chunks", reach=_in_chunks),
    State(name="hit at and beside block ends", reach=_at_boundaries),
    State(name="second turn over decode-written KV", reach=_second_turn),
    State(name="with adapters", reach=_with_adapter, needs_adapters=True),
    State(name="start position other than 0", reach=_at_start_position),
    State(name="with supplied embeddings", reach=_with_embeddings),
)
