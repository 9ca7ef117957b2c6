"""Tenants who come back, on a cache that is far too small: what policies differ about.

Time is a number that the driver moves on, so that there are short and long times until
reuse, and the same in every run.
"""

from __future__ import annotations

import io
import random
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from stemkv.core import TokenIds
from stemkv.core.books.cost import FittedCost
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.hints import Hints
from stemkv.core.retention.policies import EVICTIONS, EvictionConfig
from stemkv.engine import Engine, LoadedModel, SamplingParams
from stemkv.engine.quotas import MemoryQuota, MemoryQuotas
from stemkv.engine.recorder import StepRecorder
from stemkv.errors import ConfigError
from stemkv.measure.steplog import StepLog
from stemkv.measure.steplog_lines import read_step_log
from tests.engine.models import VOCABULARY, kv_bytes, tokens
from tests.engine.serving import Ask, PublishedKv, Served
from tests.knobs import engine_config

__all__ = ["EVERY_POLICY", "POLICIES", "SECONDS", "Life", "name_of", "small_quotas"]

POLICIES = [
    EvictionConfig(name=name, objective=objective)
    for name in EVICTIONS
    for objective in ("tokens", "seconds")
    if objective == "tokens" or name in ("reuse_index", "gdsf")
]


def name_of(eviction: EvictionConfig) -> str:
    return f"{eviction.name}-{eviction.objective}"


EVERY_POLICY = pytest.mark.parametrize("eviction", POLICIES, ids=name_of)

# Attention weighs so much that a block behind 30 others costs several times as much.
SECONDS = FittedCost(
    source="made up",
    bytes_per_token=64,
    step_s=0.01,
    prefill_chunk_s=0.0,
    prefill_token_s=1e-3,
    prefill_pair_s=1e-4,
    decode_s=0.001,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=10.0,
)

_TENANTS = ("a", "b", "c")
_BLOCK_SIZE = 2
_NUM_BLOCKS = 70


def small_quotas(loaded: LoadedModel) -> MemoryQuotas:
    """A floor, a cap, a weight and a public budget, in a cache of `_NUM_BLOCKS`."""
    block = loaded.kv_bytes_per_token * _BLOCK_SIZE
    return MemoryQuotas(
        tenants={
            "a": MemoryQuota(floor_bytes=16 * block),
            "b": MemoryQuota(cap_bytes=24 * block, weight=2.0),
        },
        public_bytes=6 * block,
    )


@dataclass
class Life:
    """An engine, a clock, and three tenants with some sessions each."""

    loaded: LoadedModel
    eviction: EvictionConfig
    seed: int = 0
    has_hints: bool = True
    quotas: MemoryQuotas | None = None
    config: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0
    served: Served = field(default_factory=Served)
    num_preempted: int = 0
    file: io.StringIO = field(default_factory=io.StringIO)
    engine: Engine = field(init=False)

    def __post_init__(self) -> None:
        settings: dict[str, Any] = dict(
            kv_memory_bytes=kv_bytes(self.loaded, _NUM_BLOCKS, _BLOCK_SIZE),
            block_size=_BLOCK_SIZE,
            token_budget=48,
            max_num_running=5,
            num_threads=1,
            runs_self_test=False,
            eviction=self.eviction,
            quotas=self.quotas,
        )
        self.engine = Engine(
            self.loaded,
            engine_config(**settings | self.config),
            clock=lambda: self.now,
            on_logits=self.served.note_logits,
            recorder=StepRecorder(self.file, model=self.loaded.name),
            costs=SECONDS if self.eviction.objective == "seconds" else None,
        )
        self._draw = random.Random(self.seed)
        # Of its own, so that all policies are asked the same.
        self._pace = random.Random(self.seed)
        self._published = PublishedKv(self.engine)
        vocabulary = min(VOCABULARY, self.loaded.vocab_size)
        self._public = [self._draw.randrange(vocabulary) for _ in range(12)]
        self._sessions = {
            (tenant, f"s{number}"): [
                *self._public,
                *[self._draw.randrange(vocabulary) for _ in range(16 + 4 * number)],
            ]
            for tenant in _TENANTS
            for number in range(4)
        }
        self._vocabulary = vocabulary

    @property
    def log(self) -> StepLog:
        return read_step_log(self.file.getvalue().splitlines(), file="log")

    def live(self, num_rounds: int, *, checks_kv: bool = False) -> None:
        """Let tenants ask for a while, some at once, with pauses, and all end."""
        if self._draw.random() < 0.7:
            self.engine.declare_public(tokens(self._public))
        for round_number in range(num_rounds):
            self.now += self._draw.choice((0.5, 3.0, 20.0, 100.0))
            for number in range(self._draw.choice((1, 1, 2, 5))):
                self._ask(f"r{round_number}.{number}")
            if self.has_hints:
                self._speak()
            while self.engine.has_work:
                self.now += 0.25
                self._note(checks_kv=checks_kv)
                if self._pace.random() < 0.1:
                    break  # the next ones arrive meanwhile
        while self.engine.has_work:
            self.now += 0.25
            self._note(checks_kv=checks_kv)

    def _ask(self, request_id: str) -> None:
        draw = self._draw
        tenant = draw.choice(_TENANTS)
        # Some sessions are used much, and some hardly ever.
        session = f"s{min(draw.randrange(4), draw.randrange(4))}"
        ids = self._sessions[tenant, session]
        if draw.random() < 0.3 and len(ids) < 44:
            ids.extend(draw.randrange(self._vocabulary) for _ in range(3))
        prompt = (*ids, draw.randrange(self._vocabulary))
        params = SamplingParams(max_new_tokens=draw.choice((1, 2, 20)))
        self.served.asks[request_id] = Ask(
            request_id=request_id, ids=prompt, params=params, tenant=tenant
        )
        hints = Hints()
        if self.has_hints and draw.random() < 0.6:
            hints = Hints(
                session=session,
                ends_session=draw.random() < 0.2,
                next_use_s=draw.choice((None, 5.0, 100.0, float("inf"))),
                ephemeral_from=draw.choice((None, None, len(ids))),
            )
        self.engine.add(
            tokens(prompt),
            params,
            tenant=tenant,
            request_id=request_id,
            arrival_s=self.now,
            hints=hints,
        )

    def _speak(self) -> None:
        """Say something between requests, as a tenant or as the operator."""
        draw = self._draw
        tenant, session = draw.choice([*self._sessions])
        if draw.random() < 0.15:
            self.engine.end_session(session, tenant=tenant)
        if draw.random() < 0.4:
            prefix = TokenIds.from_ids(self._sessions[tenant, session][:20])
            for_s = draw.choice((0.0, 60.0, 60.0, 60.0))
            with suppress(ConfigError):  # more than may be kept
                self.engine.keep(prefix, for_s=for_s, tenant=tenant)

    def _note(self, *, checks_kv: bool) -> None:
        ended = self.engine.step()
        self.served.note(ended)
        self.num_preempted += sum(each.num_preemptions for each in ended)
        check_scheduler(self.engine.scheduler)
        if checks_kv:
            self._published.check()
