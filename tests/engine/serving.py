"""Traffic for engines: what is asked, what came of it, and what must come of it.

An `Ask` is one request with the step it arrives in. `serve` plays asks on an engine and
looks at every step; `serve_alone` says what an ask must get, whoever else was there.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from stemkv.core import FinishReason, TokenIds
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.table import BlockTable
from stemkv.core.prefix.tree import Node
from stemkv.core.schedule.request import child_id
from stemkv.engine import Completion, Engine, LoadedModel, SamplingParams
from stemkv.engine.probe import Probe, ProbeSequence
from tests.engine.models import VOCABULARY, build_engine, build_runner, tokens

__all__ = [
    "Ask",
    "PublishedKv",
    "Served",
    "assert_agreement",
    "assert_cached_kv_is_fresh",
    "assert_idle",
    "prefill_alone",
    "random_traffic",
    "run_traffic",
    "serve",
    "serve_alone",
    "spelling",
]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request and when it comes."""

    request_id: str
    ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = "a"
    follows: str | None = None  # then `ids` come after that request's prompt and output
    at_step: int = 0
    cancelled_at: int | None = None  # step, not before it arrived


@dataclass
class Served:
    """What a run gave to whom."""

    asks: dict[str, Ask] = field(default_factory=dict)  # with all ids spelled out
    completions: dict[str, Completion] = field(default_factory=dict)
    logits: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def note_logits(self, sample_id: str, index: int, row: torch.Tensor) -> None:
        assert (sample_id, index) not in self.logits, "a token is sampled once"
        self.logits[sample_id, index] = row.clone()

    def note(self, completions: Iterable[Completion]) -> None:
        for completion in completions:
            sample_id = child_id(completion.request_id, completion.sample)
            assert sample_id not in self.completions, "a sample ends once"
            self.completions[sample_id] = completion


def serve(engine: Engine, asks: Sequence[Ask], *, max_steps: int = 3000) -> Served:
    """Play the asks to the end, checking everything after every step."""
    served = Served()
    engine.on_logits = served.note_logits
    published = PublishedKv(engine)
    waiting = list(asks)
    for step in range(max_steps):
        for ask in [ask for ask in waiting if _can_start(ask, served, step)]:
            waiting.remove(ask)
            ask = _spelled_out(ask, served)
            served.asks[ask.request_id] = ask
            engine.add(
                tokens(ask.ids),
                ask.params,
                tenant=ask.tenant,
                request_id=ask.request_id,
            )
        for ask in served.asks.values():
            if ask.cancelled_at is not None and ask.cancelled_at <= step:
                engine.cancel(ask.request_id)
        if not waiting and not engine.has_work:
            return served
        served.note(engine.step())
        check_scheduler(engine.scheduler)
        published.check()
    raise AssertionError(f"no end after {max_steps} steps")


def serve_alone(loaded: LoadedModel, asks: Iterable[Ask]) -> Served:
    """Each request by itself, one after the other, reusing nothing."""
    asks = list(asks)
    size = max(
        a.params.num_samples * (len(a.ids) + a.params.max_new_tokens) for a in asks
    )
    engine = build_engine(loaded, num_blocks=size, block_size=2, reuses_prefixes=False)
    served = Served()
    engine.on_logits = served.note_logits
    for ask in asks:
        engine.add(tokens(ask.ids), ask.params, request_id=ask.request_id)
        served.note(engine.drain())
    return served


def assert_agreement(served: Served, loaded: LoadedModel) -> None:
    """Every request got bit for bit what it gets alone without any reuse."""
    alone = serve_alone(loaded, served.asks.values())
    assert alone.completions.keys() == served.completions.keys()
    for sample_id, expected in alone.completions.items():
        actual = served.completions[sample_id]
        num_tokens = len(actual.token_ids)
        if actual.finish_reason is not FinishReason.CANCELLED:
            assert num_tokens == len(expected.token_ids)
            assert actual.finish_reason is expected.finish_reason
        assert actual.token_ids == expected.token_ids[:num_tokens], f"{sample_id}"
        for index in range(num_tokens):
            key = (sample_id, index)
            assert torch.equal(served.logits[key], alone.logits[key]), (
                f"logits of {sample_id} differ at output {index}"
            )


def assert_idle(engine: Engine) -> None:
    """Nobody is in flight, and nothing of anybody is left but what may be reused."""
    assert not engine.has_work
    assert len(engine._samples) == 0
    assert engine._outbox.num_ended == 0
    check_scheduler(engine.scheduler)
    usage = engine.usage()
    assert usage.num_active_blocks == 0
    assert usage.num_free_blocks + usage.num_cached_blocks == usage.num_total_blocks
    zero = engine.kv.zero_block
    for layer in range(engine.kv.num_layers):
        assert not engine.kv.keys[layer][zero].any()
        assert not engine.kv.values[layer][zero].any()


class PublishedKv:
    """What published blocks hold, by the tokens they stand for.

    Shared is read-only, and KV is a function of the token prefix: so a block's content
    never changes, nor does a second block of the same prefix differ, whoever computed
    it, when, beside whom and in which chunks.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen: dict[bytes, torch.Tensor] = {}

    def check(self) -> None:
        kv = self._engine.kv
        for node in self._engine.cache.tree.nodes():
            prefix = spelling(node)
            start = len(prefix) - len(node.edge)
            size = len(node.edge) // node.num_blocks
            for index, block_id in enumerate(node.block_ids):
                content = kv.read([block_id], kv.block_size)
                key = prefix[: start + (index + 1) * size]
                before = self._seen.setdefault(key, content)
                assert torch.equal(before, content), f"KV of block {block_id} differs"


def prefill_alone(
    loaded: LoadedModel, prefix: TokenIds, block_size: int = 16
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV and last logits of one prefill in one pass, with nobody else there."""
    num_blocks = -(-len(prefix) // block_size)
    probe = Probe(build_runner(loaded, num_blocks=num_blocks, block_size=block_size))
    table = BlockTable(array("i", range(num_blocks)))
    sequence = ProbeSequence("alone", prefix, table)
    probe.run([(sequence, len(prefix))])
    return probe.kv(sequence), sequence.logits[len(prefix) - 1]


def assert_cached_kv_is_fresh(engine: Engine) -> int:
    """Every cached path holds the bits of one prefill; return how many tokens."""
    num_tokens = 0
    for node in engine.cache.tree.nodes():
        if not node.is_leaf:
            continue
        prefix = TokenIds(spelling(node))
        block_ids = [i for step in node.path() for i in step.block_ids]
        cached = engine.kv.read(block_ids, len(prefix))
        assert torch.equal(cached, prefill_alone(engine.loaded, prefix)[0])
        num_tokens += len(prefix)
    return num_tokens


def spelling(node: Node) -> bytes:
    """The tokens from the root down to the end of a node."""
    return b"".join(step.edge for step in node.path())


def random_traffic(draw: random.Random) -> list[Ask]:
    """Prompts that grow out of each other, in turns, samples and tenants.

    Prompts are cut anywhere in an earlier prompt and continued, or continue what an
    earlier request was answered; some are cancelled on the way. Half of the time it
    is a crowd: all at once, short prompts, long answers, so that blocks run out.
    """
    is_crowd = draw.random() < 0.5
    asks: list[Ask] = []
    for index in range(draw.randint(4, 7)):
        num_samples = draw.choice((1, 1, 1, 2, 3))
        is_greedy = num_samples == 1 and draw.random() < 0.7
        params = SamplingParams(
            max_new_tokens=draw.randint(8, 20) if is_crowd else draw.randint(1, 10),
            num_samples=num_samples,
            temperature=0.0 if is_greedy else draw.choice((0.5, 1.0, 3.0)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((None, 20)),
            seed=draw.randrange(3),
        )
        previous = draw.choice(asks) if asks and draw.random() < 0.75 else None
        follows = None
        ids: list[int] = []
        if previous is not None and draw.random() < 0.3 and not is_crowd:
            follows = previous.request_id
        elif previous is not None:
            ids.extend(previous.ids[: draw.randint(0, len(previous.ids))])
        num_own = draw.randint(1, 8 if is_crowd else 60)
        ids.extend(draw.randrange(VOCABULARY) for _ in range(num_own))
        asks.append(
            Ask(
                request_id=f"r{index}",
                ids=tuple(ids),
                params=params,
                tenant=draw.choice("aab"),
                follows=follows,
                at_step=0 if is_crowd else draw.choice((0, draw.randint(0, 25))),
                cancelled_at=draw.randint(0, 30) if draw.random() < 0.15 else None,
            )
        )
    return asks


def run_traffic(loaded: LoadedModel, seed: int) -> Counter[str]:
    """Random traffic on a random, often too small engine; return what it met."""
    draw = random.Random(seed)
    asks = random_traffic(draw)
    block_size = draw.choice((1, 3, 8, 16, 24))
    needed = max(_max_tokens(ask, asks) for ask in asks)
    num_blocks = -(-needed // block_size)
    if draw.random() < 0.3:
        num_blocks *= 4
    engine = build_engine(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        token_budget=draw.choice((3, 7, 40, 64, 512)),
        max_num_running=draw.choice((3, 4, 8)),
        reuses_prefixes=draw.random() < 0.9,
    )
    if draw.random() < 0.5 and engine.namespace is not None:
        engine.declare_public(tokens(draw.choice(asks).ids))
    served = serve(engine, asks)
    assert_idle(engine)
    assert_agreement(served, loaded)
    met: Counter[str] = Counter()
    met["fresh tokens compared"] = assert_cached_kv_is_fresh(engine)
    met["evicted"] = engine.usage().num_evicted_blocks
    for completion in served.completions.values():
        counts = completion.counts
        met["reused"] += counts.reused
        met["copied"] += counts.copied
        met["forked"] += counts.inherited > 0
        met["preempted"] += completion.num_preemptions
        met["recomputed"] += counts.recomputed
        met["cancelled"] += completion.finish_reason is FinishReason.CANCELLED
        met["followed"] += served.asks[completion.request_id].follows is not None
    return met


def _max_tokens(ask: Ask, asks: Sequence[Ask]) -> int:
    """Slots that the longest possible form of an ask can need."""
    by_id = {each.request_id: each for each in asks}
    num_tokens = len(ask.ids) + ask.params.max_new_tokens
    while ask.follows is not None:
        ask = by_id[ask.follows]
        num_tokens += len(ask.ids) + ask.params.max_new_tokens
    return num_tokens


def _can_start(ask: Ask, served: Served, step: int) -> bool:
    if ask.follows is None:
        return ask.at_step <= step
    return ask.follows in served.completions


def _spelled_out(ask: Ask, served: Served) -> Ask:
    """The ask with the conversation before it written into its ids."""
    if ask.follows is None:
        return ask
    answer = served.completions[ask.follows].token_ids
    return replace(
        ask, ids=served.asks[ask.follows].ids + answer + ask.ids, follows=ask.follows
    )
