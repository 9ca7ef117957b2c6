"""The books of an engine: its requests' tokens, in the prices it was given."""

from __future__ import annotations

from time import monotonic

import pytest

from stemkv.core.books.cost import FittedCost
from stemkv.core.books.entry import LedgerEntry, MissReason
from stemkv.engine import Engine, EngineConfig, SamplingParams
from stemkv.errors import ConfigError
from tests.engine.models import kv_bytes, random_ids, tiny, tokens

COSTS = FittedCost(
    source="made up",
    bytes_per_token=64,
    step_s=0.01,
    prefill_chunk_s=0.0,
    prefill_token_s=0.001,
    prefill_pair_s=1e-6,
    decode_s=0.001,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=10.0,
)


def build(entries: list[LedgerEntry], num_blocks: int = 64) -> Engine:
    loaded = tiny()
    config = EngineConfig(
        kv_memory_bytes=kv_bytes(loaded, num_blocks, 16),
        num_threads=1,
        runs_self_test=False,
    )
    return Engine(loaded, config, costs=COSTS, on_entry=entries.append)


def serve(engine: Engine, ids: list[int], tenant: str, new_tokens: int = 4) -> None:
    params = SamplingParams(max_new_tokens=new_tokens)
    engine.add(tokens(ids), params, tenant=tenant)
    while engine.has_work:
        engine.step()
        assert engine.ledger is not None
        engine.ledger.check(engine.cache.tree.nodes(), monotonic())


@pytest.fixture
def entries() -> list[LedgerEntry]:
    return []


def reasons(entry: LedgerEntry) -> dict[MissReason, int]:
    return {miss.reason: miss.end - miss.start for miss in entry.misses}


def test_a_second_request_is_booked_with_what_it_reused_and_why_it_missed_the_rest(
    entries: list[LedgerEntry],
) -> None:
    engine = build(entries)
    prompt = random_ids(100)
    serve(engine, prompt, "acme")
    serve(engine, prompt[:80] + random_ids(30, seed=1), "acme")

    first, second = entries
    assert first.num_reused_tokens == 0
    assert reasons(first) == {MissReason.NEVER_SEEN: 96, MissReason.BELOW_BLOCK: 4}
    assert second.num_reused_tokens == 80
    assert second.saved_s == pytest.approx(COSTS.prefill_seconds(0, 80))
    assert second.first_miss is not None
    assert second.first_miss.start == 80
    assert second.writers == {"acme": 80}
    assert second.num_reused_tokens + second.num_computed_tokens == 110


def test_another_tenants_miss_is_put_down_to_isolation(
    entries: list[LedgerEntry],
) -> None:
    engine = build(entries)
    prompt = random_ids(50)
    serve(engine, prompt, "acme")
    serve(engine, prompt, "globex")

    assert entries[1].num_reused_tokens == 0
    assert reasons(entries[1])[MissReason.OTHER_DOMAIN] == 48


def test_after_a_change_of_numerics_the_miss_names_the_fields_that_differ(
    entries: list[LedgerEntry],
) -> None:
    engine = build(entries)
    prompt = random_ids(50)
    serve(engine, prompt, "acme")
    engine.update_numerics("tolerant")
    serve(engine, prompt, "acme")

    miss = entries[1].first_miss
    assert miss is not None
    assert miss.reason is MissReason.IDENTITY_DIFFERS
    assert "numerics_class" in miss.differing_fields


def test_what_was_evicted_and_asked_for_again_is_regretted(
    entries: list[LedgerEntry],
) -> None:
    engine = build(entries, num_blocks=8)
    prompt = random_ids(60)
    serve(engine, prompt, "acme")
    serve(engine, random_ids(120, seed=2), "acme")
    serve(engine, prompt, "acme")

    assert sum(regret.num_tokens for regret in entries[2].regrets) > 0
    assert MissReason.EVICTED in reasons(entries[2])
    assert all(regret.delay_s >= 0 for regret in entries[2].regrets)


def test_who_listens_to_entries_may_fail_or_cancel_and_harms_nobody(
    entries: list[LedgerEntry],
) -> None:
    engine = build(entries)

    def listen(entry: LedgerEntry) -> None:
        entries.append(entry)
        engine.cancel(f"second-{len(entries)}")
        with pytest.raises(ConfigError, match="between steps"):
            engine.update_numerics("tolerant")
        raise RuntimeError("mine")

    engine.on_entry = listen
    params = SamplingParams(max_new_tokens=3)
    engine.add(tokens(random_ids(20)), params, request_id="first")
    engine.add(tokens(random_ids(30)), params, request_id="second-1")
    ended = []
    for _ in range(40):
        ended += engine.step()

    assert {completion.request_id for completion in ended} >= {"first"}
    assert not engine.has_work
    assert entries[0].request_id == "first"
