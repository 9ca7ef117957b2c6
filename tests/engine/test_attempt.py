"""A forward pass that fails is the fault of as few requests as possible."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from stemkv.core import FinishReason
from stemkv.core.check import check_scheduler
from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import TokenCounts
from stemkv.engine import Engine, SamplingParams
from stemkv.errors import InvariantError, UnsupportedModel
from tests.engine.models import build_engine, random_ids, tiny_once, tokens
from tests.engine.serving import (
    Ask,
    PublishedKv,
    Served,
    assert_agreement,
    assert_cached_kv_is_fresh,
    assert_idle,
)

LOADED = tiny_once("llama-group1", torch.float32)


@contextmanager
def failing(
    engine: Engine,
    guilty: Callable[[Chunk], bool],
    error: Callable[[], BaseException] = lambda: RuntimeError("no luck"),
) -> Iterator[list[StepPlan]]:
    """Let passes raise that have a guilty chunk in them, half way; give what was run.

    Half way: keys and values of the first layer are written, for everybody.
    """
    runner = engine._served.runner
    execute, seen = runner.execute, []
    layer = engine.loaded.model.model.layers[1]
    is_failing = False

    def run(plan: StepPlan, *more: Any) -> Any:
        nonlocal is_failing
        seen.append(plan)
        is_failing = any(map(guilty, plan.chunks))
        return execute(plan, *more)

    def fail(*_: Any) -> None:
        if is_failing:
            raise error()

    hook = layer.register_forward_pre_hook(fail)
    runner.execute = run  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        hook.remove()
        runner.execute = execute  # type: ignore[method-assign]


def of(request_id: str) -> Callable[[Chunk], bool]:
    return lambda chunk: chunk.request_id.partition("#")[0] == request_id


def asks_of(seed: int, num: int = 5) -> list[Ask]:
    """Some share prefixes, one inside a block; some have samples."""
    draw = random.Random(seed)
    stem = random_ids(21, seed=seed)
    return [
        Ask(
            request_id=f"r{index}",
            ids=tuple(stem[: draw.choice((0, 11, 21))])
            + tuple(random_ids(draw.randint(3, 30), seed=100 * seed + index)),
            params=SamplingParams(
                max_new_tokens=draw.randint(2, 9),
                num_samples=draw.choice((1, 1, 3)),
                temperature=1.0,
            ),
        )
        for index in range(num)
    ]


def play(
    engine: Engine, asks: list[Ask], after_step: Callable[[], None] = lambda: None
) -> Served:
    served = Served()
    engine.on_logits = served.note_logits
    published = PublishedKv(engine)
    for ask in asks:
        served.asks[ask.request_id] = ask
        engine.add(tokens(ask.ids), ask.params, request_id=ask.request_id)
    while engine.has_work:
        served.note(engine.step())
        check_scheduler(engine.scheduler)
        published.check()
        after_step()
    return served


def without(served: Served, request_id: str) -> Served:
    is_other = of(request_id)
    return Served(
        asks={n: a for n, a in served.asks.items() if n != request_id},
        completions={
            n: c for n, c in served.completions.items() if c.request_id != request_id
        },
        logits={
            key: row
            for key, row in served.logits.items()
            if not is_other(_named(key[0]))
        },
    )


def _named(request_id: str) -> Any:
    return type("Named", (), {"request_id": request_id})


@pytest.mark.parametrize("when", ["prefill", "first token", "decode"])
@pytest.mark.parametrize("seed", range(3))
def test_only_the_guilty_one_fails_and_the_others_get_their_own_bits(
    seed: int, when: str
) -> None:
    asks = asks_of(seed)
    longer = replace(asks[seed].params, max_new_tokens=6)
    asks[seed] = replace(asks[seed], params=longer)
    guilty = asks[seed].request_id
    engine = build_engine(LOADED, block_size=8, token_budget=40)
    num_prompt = len(asks[seed].ids)

    def fails(chunk: Chunk) -> bool:
        is_due = {
            "prefill": chunk.start < num_prompt,
            "first token": chunk.end == num_prompt,
            "decode": chunk.start > num_prompt,
        }[when]
        return of(guilty)(chunk) and is_due

    with failing(engine, fails) as plans:
        served = play(engine, asks)

    assert len(plans) > len(engine.steps), "chunks were run apart"
    ended = [c for c in served.completions.values() if c.request_id == guilty]
    assert {c.finish_reason for c in ended} >= {FinishReason.FAILED}
    assert_agreement(without(served, guilty), LOADED)
    assert assert_cached_kv_is_fresh(engine)
    assert_idle(engine)


def test_who_comes_again_and_again_ends_nobody_else() -> None:
    """The same bad prompt beside a long answer: the answer comes, whole."""
    engine = build_engine(LOADED)
    asks = [
        replace(ask, params=SamplingParams(max_new_tokens=25)) for ask in asks_of(7)
    ]
    num_failed = 0

    def again() -> None:
        nonlocal num_failed
        if num_failed < 10 and not engine._samples.has_request("bad"):
            num_failed += 1
            engine.add(tokens(random_ids(9, seed=5)), request_id="bad")

    with failing(engine, of("bad")):
        served = Served()
        engine.on_logits = served.note_logits
        for ask in asks:
            served.asks[ask.request_id] = ask
            engine.add(tokens(ask.ids), ask.params, request_id=ask.request_id)
        reasons = []
        while engine.has_work:
            for completion in engine.step():
                if completion.request_id == "bad":
                    reasons.append(completion.finish_reason)
                else:
                    served.note([completion])
            again()
    assert reasons == [FinishReason.FAILED] * 10
    assert_agreement(served, LOADED)
    assert_idle(engine)


def test_a_copy_is_made_once_though_the_pass_is_repeated() -> None:
    """By then its source may hold somebody else's tokens."""
    engine = build_engine(LOADED, block_size=8)
    stem = random_ids(32)
    engine.generate([tokens(stem)], SamplingParams(max_new_tokens=1))
    params = SamplingParams(max_new_tokens=6)
    copied = [*stem[:19], *random_ids(9, seed=1)]
    with failing(engine, of("bad")) as plans:
        engine.add(tokens(random_ids(12, seed=2)), params, request_id="bad")
        engine.add(tokens(copied), params, request_id="good")
        ended = {c.request_id: c for c in engine.drain()}

    assert ended["good"].counts == TokenCounts(reused=19, computed=9, copied=3)
    assert sum(len(plan.copies) for plan in plans) == 1
    assert ended["bad"].finish_reason is FinishReason.FAILED
    (alone,) = build_engine(LOADED).generate([tokens(copied)], params)
    assert ended["good"].token_ids == alone.token_ids
    assert_idle(engine)


def test_a_copy_that_fails_ends_the_step_s_requests_and_publishes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build_engine(LOADED, block_size=8)
    stem = random_ids(32)
    engine.generate([tokens(stem)], SamplingParams(max_new_tokens=1))
    usage = engine.usage()

    def fail(copy: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(engine.kv, "copy", fail)
        engine.add(tokens([*stem[:19], 5, 6]), request_id="copies")
        ended = engine.drain()
    assert [c.finish_reason for c in ended] == [FinishReason.FAILED]
    assert engine.usage().num_cached_blocks == usage.num_cached_blocks
    assert_idle(engine)


def test_memory_that_suffices_for_each_alone_ends_nobody() -> None:
    engine = build_engine(LOADED)
    asks = asks_of(3)

    def too_many(plan_size: list[int]) -> Callable[[Chunk], bool]:
        return lambda chunk: plan_size[0] > 1

    sizes = [0]
    runner = engine._served.runner
    with failing(engine, too_many(sizes), MemoryError):
        run = runner.execute

        def measured(plan: StepPlan, *more: Any) -> Any:
            sizes[0] = len(plan.chunks)
            return run(plan, *more)

        runner.execute = measured  # type: ignore[method-assign]
        served = play(engine, asks)
    assert_agreement(served, LOADED)
    assert_idle(engine)


def test_when_every_chunk_fails_all_end_and_nothing_is_published() -> None:
    engine = build_engine(LOADED)
    with failing(engine, lambda chunk: True):
        served = play(engine, asks_of(1))
    reasons = {c.finish_reason for c in served.completions.values()}
    assert reasons == {FinishReason.FAILED}
    assert engine.usage().num_cached_blocks == 0
    assert_idle(engine)


def test_nobody_goes_on_from_what_only_the_guilty_one_computed() -> None:
    """What its blocks hold may be the cause."""
    engine = build_engine(LOADED, block_size=8, token_budget=24)
    params = SamplingParams(max_new_tokens=30)
    engine.add(tokens(random_ids(5, seed=1)), params, request_id="other")
    engine.step()
    long = random_ids(60, seed=2)
    engine.add(tokens(long), params, request_id="r")
    engine.step()
    with failing(engine, of("r")):
        engine.step()
    engine.drain()
    (again,) = engine.generate([tokens(long)], SamplingParams(max_new_tokens=3))
    assert again.counts.reused == 0
    (alone,) = build_engine(LOADED).generate(
        [tokens(long)], SamplingParams(max_new_tokens=3)
    )
    assert again.token_ids == alone.token_ids


def test_a_cancelled_request_that_fails_alone_counts_as_cancelled() -> None:
    engine = build_engine(LOADED)
    engine.add(tokens(random_ids(9, seed=1)), request_id="other")

    def cancel(chunk: Chunk) -> bool:
        if of("r")(chunk):
            engine.cancel("r")
            return True
        return False

    engine.add(tokens(random_ids(9, seed=2)), request_id="r")
    with failing(engine, cancel):
        ended = {c.request_id: c.finish_reason for c in engine.drain()}
    assert ended == {"r": FinishReason.CANCELLED, "other": FinishReason.LENGTH}
    assert_idle(engine)


@pytest.mark.parametrize(
    "error", [InvariantError("impossible"), UnsupportedModel("no")]
)
def test_what_no_request_can_be_blamed_for_is_raised_at_once(error: Exception) -> None:
    engine = build_engine(LOADED)
    for index in range(3):
        engine.add(tokens(random_ids(9, seed=index)))
    with (
        failing(engine, lambda chunk: True, lambda: error) as plans,
        pytest.raises(type(error)),
    ):
        engine.step()
    assert len(plans) == 1
