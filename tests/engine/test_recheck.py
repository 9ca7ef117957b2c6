"""A share of the hits is computed again: nothing is found in sound traffic, and what is
wrong is found, counted and fenced.

Wrong is one flipped bit in KV memory. It is put there behind the engine's back, as a
defect of ours or of the memory would.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from stemkv.core import TokenIds
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.schedule.events import RequestAdmitted
from stemkv.core.schedule.request import RequestId
from stemkv.engine import Engine, EngineConfig, SamplingParams
from stemkv.engine.recheck import (
    RecheckCounts,
    Verdict,
    relative_difference,
    tolerance,
)
from stemkv.errors import ConfigError
from tests.engine.lora_files import Shelf
from tests.engine.models import build_engine, random_ids, tiny_once, tokens
from tests.engine.serving import assert_idle
from tests.engine.states import (
    BASE,
    PROMPT,
    TRAINED,
    Asked,
    Outcome,
    Played,
    Revision,
    alone,
    asked,
    assert_got,
    play,
    weights,
)

MODEL = ("llama-group1", torch.float32)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("adapters"))


def rechecking(
    *, share: float = 1.0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Played:
    usual: dict[str, Any] = dict(block_size=4, token_budget=64, recheck_share=share)
    return play(build_engine(tiny_once(MODEL[0], dtype), **usual | settings))


def verdicts(engine: Engine) -> list[Verdict]:
    """Compare everything that waits."""
    found = []
    while engine.num_rechecks_waiting:
        verdict = engine.recheck()
        if verdict is not None:
            found.append(verdict)
    return found


def hit(played: Played, name: str, what: Asked) -> Outcome:
    """Compute a prefix and use it again."""
    played.run(f"{name} cold", what)
    outcome = played.run(f"{name} warm", what)
    assert outcome.reused > 0
    return outcome


def flip_bit(
    engine: Engine,
    *,
    token: int = 0,
    layer: int = 0,
    part: int = 0,
    bit: int = 0,
    ids: TokenIds = PROMPT,
    adapter: str | None = None,
    tenant: str = "a",
) -> None:
    """Flip one bit of a cached token's key (part 0) or value (part 1)."""
    size = engine.config.core.cache.block_size
    namespace = engine.namespace_of(adapter)
    assert namespace is not None
    match = engine.cache.tree.match(
        namespace, Domain.private(tenant), ids.buffer, limit=len(ids)
    )
    assert match.node is not None
    blocks = [i for node in match.node.path() for i in node.block_ids]
    width = {2: torch.int16, 4: torch.int32}[engine.kv.dtype.itemsize]
    storage = engine.kv._storage.view(width)
    block, slot = blocks[token // size], token % size
    storage[layer, part, block, slot, -1, -1] ^= 1 << bit


# Sound traffic


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_sound_traffic_has_no_mismatch(
    seed: int, dtype: torch.dtype, shelf: Shelf
) -> None:
    """Adapters, positions, vectors, partial blocks, preemptions, samples: all of it."""
    draw = random.Random(seed)
    played = rechecking(dtype=dtype, num_blocks=26, token_budget=24)
    engine = played.engine
    engine.load_adapter("x", shelf.adapter(MODEL[0], dtype, seed=1))
    vectors = torch.randn(14, 64, generator=torch.Generator().manual_seed(seed))
    prompts = [
        tokens(random_ids(33, seed=1)),
        engine.embed([tokens(random_ids(6, seed=1)), vectors, tokens(random_ids(9))]),
    ]
    num_mismatching = 0
    for index in range(14):
        prompt = draw.choice(prompts)
        if isinstance(prompt, TokenIds):
            cut = list(prompt)[: draw.randint(5, 33)]
            prompt = tokens(cut + random_ids(draw.randint(1, 5), seed=index))
        played.add(
            f"r{index}",
            Asked(
                prompt=prompt,
                params=SamplingParams(
                    max_new_tokens=draw.randint(2, 9),
                    num_samples=draw.choice((1, 1, 2)),
                    temperature=1.0,
                    seed=index,
                ),
                adapter=draw.choice((None, None, "x")),
                start_position=draw.choice((0, 0, 9)),
            ),
        )
        for _ in range(draw.randint(0, 4)):
            played.step()
            num_mismatching += sum(not v.is_match for v in verdicts(engine))
    while engine.has_work:
        played.step()
        num_mismatching += sum(not v.is_match for v in verdicts(engine))
    counts = engine.recheck_counts
    assert num_mismatching == counts.num_mismatching == counts.num_skipped == 0
    assert counts.num_matching == counts.num_drawn
    hits = [c for c in played.completions.values() if c.counts.reused]
    assert len(hits) >= 3
    assert counts.num_drawn >= len(hits)
    assert_idle(engine)


def test_a_hit_that_ends_inside_a_block_is_compared_to_its_last_token() -> None:
    played = rechecking(block_size=16)
    played.run("longer", asked(tokens([*PROMPT, *random_ids(15, seed=5)])))
    played.run("warm", asked())
    assert played.completions["warm"].counts.copied == 4
    (verdict,) = verdicts(played.engine)
    assert verdict == Verdict(
        namespace=played.engine.namespace or b"",
        num_tokens=36,
        difference=0.0,
        is_match=True,
    )


def test_a_hit_after_a_preemption_is_compared_too() -> None:
    played = rechecking(num_blocks=17, token_budget=16)
    ids = tokens([(7 * i + 1) % 300 for i in range(20)])
    played.add("old", Asked(prompt=ids, params=SamplingParams(max_new_tokens=30)))
    played.step()
    played.add("young", asked())
    played.drain()
    assert played.completions["young"].num_preemptions > 0
    resumed = [
        e.num_cached_tokens
        for e in played.events
        if isinstance(e, RequestAdmitted) and e.is_resumed and e.num_cached_tokens
    ]
    assert resumed
    found = verdicts(played.engine)
    assert [v.num_tokens for v in found] == resumed
    assert all(v.is_match for v in found)


def test_samples_of_one_prompt_are_one_hit() -> None:
    played = rechecking()
    played.run("cold", asked())
    played.run("warm", asked(num_samples=4))
    assert played.engine.recheck_counts.num_drawn == 1
    assert [v.is_match for v in verdicts(played.engine)] == [True]


def test_a_miss_is_nothing_to_compare() -> None:
    played = rechecking()
    for seed in range(5):
        played.run(f"r{seed}", asked(tokens([seed, *random_ids(20, seed=seed)])))
    assert played.engine.recheck_counts == RecheckCounts()


def test_a_hit_is_compared_though_it_was_evicted_meanwhile() -> None:
    played = rechecking(num_blocks=13)
    hit(played, "r", asked())
    played.run("other", asked(tokens(random_ids(40, seed=40))))
    assert played.engine.usage().num_evicted_blocks > 0
    assert [v.is_match for v in verdicts(played.engine)] == [True]


def test_comparing_takes_one_chunk_at_a_time() -> None:
    played = rechecking(token_budget=16)
    hit(played, "r", asked())
    engine = played.engine
    answers = [engine.recheck() for _ in range(3)]
    assert answers[:2] == [None, None]
    assert answers[2] is not None
    assert answers[2].num_tokens == 36
    assert engine.recheck() is None


def test_comparing_leaves_the_engine_as_it_was() -> None:
    played = rechecking(token_budget=16)
    hit(played, "r", asked())
    engine = played.engine
    played.add("in flight", asked(tokens(random_ids(30, seed=4))))
    played.step()
    before, memory = engine.usage(), engine.kv._storage.clone()
    verdicts(engine)
    assert engine.usage() == before
    assert torch.equal(engine.kv._storage, memory)
    played.drain()
    played.outcome("in flight").assert_same_as(
        alone(Revision(), played.asked["in flight"])[0]
    )


def test_a_forward_pass_that_fails_can_be_tried_again() -> None:
    played = rechecking()
    hit(played, "r", asked())

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("the forward pass fails")

    hook = played.engine.loaded.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError):
        played.engine.recheck()
    hook.remove()
    assert [v.is_match for v in verdicts(played.engine)] == [True]
    played.run("after", asked()).assert_same_as(alone(Revision(), asked())[0])


# A flipped bit


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "where",
    [
        dict(),
        dict(token=35, layer=1, part=1),
        dict(token=17, part=1, bit=3),
        dict(token=4, layer=1, bit=15),
    ],
    ids=str,
)
def test_one_flipped_bit_is_found_and_fenced(
    where: dict[str, int], dtype: torch.dtype
) -> None:
    played = rechecking(dtype=dtype)
    engine = played.engine
    namespace = engine.namespace
    hit(played, "r", asked())
    assert all(v.is_match for v in verdicts(engine))
    flip_bit(engine, **where)
    played.run("victim", asked())
    assert played.outcome("victim").reused == 36
    (verdict,) = verdicts(engine)
    assert not verdict.is_match
    assert verdict.namespace == namespace
    assert verdict.num_tokens == 36
    assert engine.recheck_counts == RecheckCounts(
        num_drawn=2, num_matching=1, num_mismatching=1
    )
    assert engine.usage().num_cached_blocks == 0
    truth = alone(Revision(dtype=dtype), asked())[0]
    after = played.run("after", asked())
    assert after.reused == 0
    after.assert_same_as(truth)
    assert played.run("alone", asked()).reused == 0, "closed: nobody shares in it"
    played.engine.reset()
    hit(played, "again", asked())
    assert [v.is_match for v in verdicts(engine)] == [True]
    assert_idle(engine)


def test_a_flipped_bit_that_was_not_reused_is_nobody_s_business() -> None:
    played = rechecking()
    hit(played, "r", asked())
    verdicts(played.engine)
    flip_bit(played.engine, token=30)
    played.run("shorter", asked(tokens(list(PROMPT)[:25])))
    assert played.outcome("shorter").reused == 24
    assert [v.is_match for v in verdicts(played.engine)] == [True]


@pytest.mark.parametrize("token, is_found", [(33, True), (35, False)])
def test_of_a_partly_copied_block_just_the_copied_tokens_count(
    token: int, is_found: bool
) -> None:
    played = rechecking(block_size=16)
    longer = tokens([*PROMPT, *random_ids(15, seed=5)])
    played.run("cold", asked(longer))
    flip_bit(played.engine, token=token, ids=longer)
    other = tokens([*list(PROMPT)[:34], *random_ids(9, seed=6)])
    played.run("warm", asked(other))
    assert played.completions["warm"].counts.copied == 2
    assert [v.is_match for v in verdicts(played.engine)] == [not is_found]


def test_a_mismatch_harms_nobody_else(shelf: Shelf) -> None:
    """Other namespaces keep what they have; requests in flight go on, unshared."""
    revision = Revision(adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16, recheck_share=1.0))
    engine = played.engine
    adapted = asked(adapter="x")
    hit(played, "x", adapted)
    hit(played, "base", asked())
    verdicts(engine)
    flip_bit(engine)
    beside = asked(tokens(random_ids(30, seed=4)), max_new_tokens=12)
    played.add("beside", beside)
    played.step()
    played.add("victim", asked())
    played.step()
    (verdict,) = verdicts(engine)
    assert not verdict.is_match
    published = engine.usage().num_published_blocks
    played.drain()
    assert engine.usage().num_published_blocks == published
    assert engine.usage_of("a").num_cached_blocks > 0, "the adapter's"
    played.outcome("beside").assert_same_as(alone(revision, beside)[0])
    assert played.run("x again", adapted).reused == 36
    assert played.run("beside again", beside).reused == 0
    assert_idle(engine)


def test_a_flipped_bit_under_an_adapter_fences_that_adapter_only(shelf: Shelf) -> None:
    revision = Revision(adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, recheck_share=1.0))
    hit(played, "base", asked())
    hit(played, "x", asked(adapter="x"))
    verdicts(played.engine)
    flip_bit(played.engine, adapter="x")
    played.run("victim", asked(adapter="x"))
    namespace = played.engine.namespace_of("x")
    (verdict,) = verdicts(played.engine)
    assert verdict.namespace == namespace
    assert played.engine.namespace_of("x") is None
    assert played.run("base again", asked()).reused == 36
    after = played.run("after", asked(adapter="x"))
    assert after.reused == 0
    after.assert_same_as(alone(revision, asked(adapter="x"))[0])


def test_a_public_prefix_stays_declared_after_its_namespace_was_fenced() -> None:
    played = rechecking()
    engine = played.engine
    engine.declare_public(PROMPT)
    played.run("a", asked())
    node = next(n for n in engine.cache.tree.nodes() if n.domain == PUBLIC)
    engine.kv._storage.view(torch.int32)[0, 0, node.block_ids[0], 0, 0, 0] ^= 1
    played.run("b", asked(tenant="b"))
    assert [v.is_match for v in verdicts(engine)] == [False]
    engine.reset()
    played.run("c", asked(tenant="c"))
    assert played.outcome("c").reused == 0
    assert played.run("d", asked(tenant="d")).reused == 36


def test_every_hit_on_the_block_before_the_verdict_is_found() -> None:
    played = rechecking()
    played.run("cold", asked())
    flip_bit(played.engine)
    for index in range(3):
        played.run(f"victim{index}", asked())
    assert [v.is_match for v in verdicts(played.engine)] == [False] * 3
    assert played.run("after", asked()).reused == 0


# The class tolerant


def test_tolerant_hits_match_within_the_bound() -> None:
    played = play(
        Revision(numerics="tolerant").engine(
            block_size=4, token_budget=9, recheck_share=1.0
        )
    )
    hit(played, "r", asked())
    flip_bit(played.engine, bit=0)
    played.run("warm", asked())
    first, second = verdicts(played.engine)
    assert first.is_match
    assert second.is_match
    assert 0 < second.difference <= tolerance(torch.float32)


@pytest.mark.parametrize("value", [50.0, float("nan"), float("inf")], ids=str)
def test_tolerant_hits_beyond_the_bound_do_not_match(value: float) -> None:
    played = play(
        Revision(numerics="tolerant").engine(
            block_size=4, num_blocks=40, recheck_share=1.0
        )
    )
    engine = played.engine
    hit(played, "r", asked())
    verdicts(engine)
    (block, *_) = next(n for n in engine.cache.tree.nodes()).block_ids
    engine.kv.keys[0][block, 0, 0, 0] = value
    played.run("victim", asked())
    (verdict,) = verdicts(engine)
    assert not verdict.is_match
    assert played.run("after", asked()).reused == 0


def test_the_relative_difference_is_that_of_the_worst_layer() -> None:
    truth = torch.ones(2, 2, 3, 1, 4)
    other = truth.clone()
    other[1, 0] *= 1.5
    assert relative_difference(truth, other) == pytest.approx(0.5)
    assert relative_difference(truth, truth) == 0.0
    assert relative_difference(torch.zeros_like(truth), other) > 1


# The share


def test_a_share_of_nothing_copies_nothing() -> None:
    played = rechecking(share=0.0)
    engine = played.engine
    read, calls = engine.kv.read, []

    def counting(*args: Any) -> torch.Tensor:
        calls.append(args)
        return read(*args)

    engine.kv.read = counting  # type: ignore[method-assign]
    hit(played, "r", asked())
    assert calls == []
    assert engine.recheck_counts == RecheckCounts()
    assert engine.recheck() is None


def drawn(share: float, seed: int, num_hits: int = 120) -> list[bool]:
    """Which of many hits are drawn."""
    played = rechecking(share=share, recheck_seed=seed, block_size=2)
    what = asked(tokens(random_ids(5)), max_new_tokens=1)
    played.run("cold", what)
    answers = []
    for index in range(num_hits):
        before = played.engine.recheck_counts.num_drawn
        played.run(f"r{index}", what)
        answers.append(played.engine.recheck_counts.num_drawn > before)
        verdicts(played.engine)
    assert played.engine.recheck_counts.num_mismatching == 0
    return answers


def test_a_share_is_drawn_by_its_seed() -> None:
    first = drawn(0.3, seed=1)
    assert first == drawn(0.3, seed=1)
    assert first != drawn(0.3, seed=2)
    assert 20 <= sum(first) <= 55
    assert all(drawn(1.0, seed=1, num_hits=20))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "0.5", True, None])
def test_a_share_must_be_one(share: Any) -> None:
    with pytest.raises(ConfigError, match="recheck_share"):
        EngineConfig(recheck_share=share)


def test_what_waits_is_bounded_and_what_is_dropped_is_counted() -> None:
    played = rechecking()
    played.run("cold", asked())
    for index in range(12):
        played.run(f"r{index}", asked())
    engine = played.engine
    assert engine.num_rechecks_waiting == 8
    assert engine.recheck_counts == RecheckCounts(num_drawn=12, num_skipped=4)
    assert len(verdicts(engine)) == 8
    assert engine.recheck_counts == RecheckCounts(
        num_drawn=12, num_matching=8, num_skipped=4
    )


# Over a change


def test_what_waits_over_an_update_is_skipped_and_counted() -> None:
    played = play(BASE.engine(block_size=4, recheck_share=1.0))
    engine = played.engine
    hit(played, "r", asked())
    assert engine.num_rechecks_waiting == 1
    engine.update_weights(weights(1))
    assert engine.num_rechecks_waiting == 0
    assert engine.recheck() is None
    assert engine.recheck_counts == RecheckCounts(num_drawn=1, num_skipped=1)
    hit(played, "new", asked())
    assert [v.is_match for v in verdicts(engine)] == [True]
    assert_got(played, "new warm", TRAINED)


def test_what_is_half_compared_is_not_finished_on_new_weights() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16, recheck_share=1.0))
    engine = played.engine
    hit(played, "r", asked())
    assert engine.recheck() is None, "a chunk of it"
    engine.update_weights(weights(1))
    hit(played, "new", asked())
    assert [v.is_match for v in verdicts(engine)] == [True]
    assert engine.recheck_counts.num_skipped == 1


def test_while_an_update_waits_the_old_state_can_still_be_compared() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16, recheck_share=1.0))
    engine = played.engine
    hit(played, "r", asked())
    played.add("early", asked(tokens(random_ids(30, seed=4))))
    played.step()
    engine.update_weights(weights(1))
    assert engine.num_rollouts_waiting == 1
    assert [v.is_match for v in verdicts(engine)] == [True]
    played.add("late", asked())
    played.drain()
    assert_got(played, "late", TRAINED)
    assert engine.recheck_counts == RecheckCounts(num_drawn=1, num_matching=1)


def test_a_hit_is_compared_on_the_adapter_version_it_ran_on(shelf: Shelf) -> None:
    played = play(Revision().engine(block_size=4, recheck_share=1.0))
    engine = played.engine
    engine.load_adapter("x", shelf.adapter(seed=1))
    hit(played, "one", asked(adapter="x"))
    engine.reload_adapter("x", shelf.adapter(seed=2))
    hit(played, "two", asked(adapter="x"))
    engine.unload_adapter("x")
    assert len(engine._served.adapters.loras) == 2, "both are needed to compare"
    assert [v.is_match for v in verdicts(engine)] == [True, True]
    assert engine._served.adapters.loras == {}, "and nobody needs them now"


def test_a_version_that_only_a_dropped_comparison_needed_is_freed(
    shelf: Shelf,
) -> None:
    played = play(BASE.engine(block_size=4, recheck_share=1.0))
    engine = played.engine
    engine.load_adapter("x", shelf.adapter(seed=1))
    hit(played, "one", asked(adapter="x"))
    engine.unload_adapter("x")
    engine.update_weights(weights(1))
    assert engine.num_rechecks_waiting == 0
    played.run("another", asked())
    assert engine._served.adapters.loras == {}


def test_what_waits_over_a_change_of_numerics_is_skipped() -> None:
    played = play(BASE.engine(block_size=4, recheck_share=1.0))
    hit(played, "r", asked())
    played.engine.update_numerics("tolerant")
    assert played.engine.recheck() is None
    assert played.engine.recheck_counts.num_skipped == 1
    hit(played, "tolerant", asked())
    played.engine.update_numerics("exact")
    hit(played, "exact", asked())
    assert [v.is_match for v in verdicts(played.engine)] == [True]
    assert played.engine.recheck_counts.num_skipped == 2


def test_what_waits_over_a_reset_is_compared() -> None:
    played = rechecking()
    hit(played, "r", asked())
    played.engine.reset()
    assert [v.is_match for v in verdicts(played.engine)] == [True]


def test_cancelled_hits_are_compared_all_the_same() -> None:
    played = rechecking()
    played.run("cold", asked())
    played.add("warm", asked())
    played.step()
    played.engine.cancel(RequestId("warm"))
    played.drain()
    assert [v.is_match for v in verdicts(played.engine)] == [True]


# The embedded model


@pytest.mark.model
def test_hits_of_the_real_model_match_and_a_flipped_bit_does_not(smol: Any) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 8
    prompt = TokenIds.from_ids(smol.tokenizer(text)["input_ids"])
    played = play(build_engine(smol, block_size=16, num_blocks=64, recheck_share=1.0))
    what = asked(prompt, max_new_tokens=3)
    hit(played, "r", what)
    assert [v.is_match for v in verdicts(played.engine)] == [True]
    flip_bit(played.engine, ids=prompt, token=40, layer=20)
    played.run("victim", what)
    assert [v.is_match for v in verdicts(played.engine)] == [False]
    assert played.run("after", what).reused == 0
