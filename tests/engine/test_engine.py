"""Requests from their beginning to each of their ends, and what an engine keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stemkv.core import FinishReason, OrderConfig, SharingPolicy, TokenIds
from stemkv.core.schedule.request import RequestState, TokenCounts
from stemkv.engine import (
    Completion,
    Engine,
    EngineConfig,
    InFlight,
    SamplingParams,
    wrap_model,
)
from stemkv.errors import (
    ConfigError,
    DuplicateRequest,
    EmptyPrompt,
    InvalidLimit,
    InvariantError,
    PromptTooLong,
    RequestError,
    TokenOutOfRange,
)
from tests.engine.models import (
    VOCABULARY,
    build_engine,
    build_model,
    kv_bytes,
    random_ids,
    randomise,
    tiny,
    tiny_once,
    tokens,
)
from tests.engine.recording import record
from tests.engine.serving import assert_idle
from tests.knobs import engine_config

LOADED = ("llama-group1", torch.float32)


def engine_of(**settings: Any) -> Engine:
    return build_engine(tiny_once(*LOADED), **settings)


def prompt(num_tokens: int = 20, seed: int = 0) -> TokenIds:
    return tokens(random_ids(num_tokens, seed=seed))


def limited(max_new_tokens: int = 5, **params: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, **params)


def by_id(completions: list[Completion]) -> dict[tuple[str, int], Completion]:
    return {(c.request_id, c.sample): c for c in completions}


def alone(ids: TokenIds, params: SamplingParams) -> list[Completion]:
    return engine_of().generate([ids], params)


@contextmanager
def failing_steps(
    engine: Engine, error: BaseException, *, when: Callable[[list[int]], bool]
) -> Iterator[None]:
    """Let the forward pass raise for steps whose token ids `when` accepts."""

    def fail(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if when(kwargs["input_ids"][0].tolist()):
            raise error

    hook = engine.loaded.model.register_forward_pre_hook(fail, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


# Ends


def test_a_request_ends_at_its_limit() -> None:
    engine = engine_of()
    (completion,) = engine.generate([prompt()], limited(7))
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 7
    assert_idle(engine)


def test_a_request_may_want_one_token() -> None:
    engine = engine_of()
    completions = engine.generate([prompt()], limited(1, num_samples=3))
    assert [len(c.token_ids) for c in completions] == [1, 1, 1]
    assert_idle(engine)


def test_an_end_of_sequence_token_ends_a_request_and_is_its_last_token() -> None:
    free = alone(prompt(), limited(9))[0].token_ids
    loaded = replace(tiny_once(*LOADED), eos_token_ids=frozenset({free[4], 305}))
    end = free.index(free[4])
    engine = build_engine(loaded)

    (completion,) = engine.generate([prompt()], limited(9))

    assert completion.finish_reason is FinishReason.STOP_TOKEN
    assert completion.token_ids == free[: end + 1]
    assert_idle(engine)


def test_an_end_of_sequence_token_can_be_ignored() -> None:
    free = alone(prompt(), limited(9))[0].token_ids
    loaded = replace(tiny_once(*LOADED), eos_token_ids=frozenset(free))
    engine = build_engine(loaded)
    (completion,) = engine.generate([prompt()], limited(9, ignore_eos=True))
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.token_ids == free


def test_the_limit_and_an_end_of_sequence_at_once_is_an_end_of_sequence() -> None:
    free = alone(prompt(), limited(3))[0].token_ids
    loaded = replace(tiny_once(*LOADED), eos_token_ids=frozenset({free[2]}))
    (completion,) = build_engine(loaded).generate([prompt()], limited(3))
    assert completion.finish_reason is FinishReason.STOP_TOKEN


def end_of_one(free: list[Completion], sample: int) -> tuple[int, int]:
    """A token that only this sample generates, and where it does."""
    others = {t for c in free if c.sample != sample for t in c.token_ids}
    index, token = next(
        (i, token)
        for i, token in enumerate(free[sample].token_ids)
        if i > 0 and token not in others
    )
    return token, index


def test_samples_end_each_by_itself() -> None:
    params = limited(12, num_samples=3, temperature=3.0)
    free = alone(prompt(), params)
    end, index = end_of_one(free, 1)
    loaded = replace(tiny_once(*LOADED), eos_token_ids=frozenset({end}))
    engine = build_engine(loaded)

    completions = engine.generate([prompt()], params)

    assert [len(c.token_ids) for c in completions] == [12, index + 1, 12]
    assert completions[0].token_ids == free[0].token_ids
    assert completions[2].token_ids == free[2].token_ids
    assert_idle(engine)


# Cancelling


def state(engine: Engine, request_id: str = "r") -> tuple[str, str]:
    """What the scheduler calls it, and how far its computation is."""
    request = engine.scheduler.request(request_id)
    assert request is not None
    phase = "prefill" if request.is_prefilling else "decode"
    return request.state.value, phase


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize(
    "num_steps, expected",
    [
        (0, ("waiting", "prefill")),
        (1, ("running", "prefill")),
        (3, ("running", "decode")),
        (6, ("running", "decode")),
    ],
)
def test_cancelling_ends_every_sample_whatever_it_is_doing(
    num_samples: int, num_steps: int, expected: tuple[str, str]
) -> None:
    engine = engine_of(token_budget=20)
    params = limited(30, num_samples=num_samples, temperature=1.0)
    engine.add(prompt(50), params, request_id="r")
    for _ in range(num_steps):
        assert engine.step() == ()
    assert state(engine) == expected

    assert engine.cancel("r")
    assert not engine.cancel("r")

    ended = engine.step()
    assert [(c.request_id, c.sample) for c in ended] == [
        ("r", sample) for sample in range(num_samples)
    ]
    for completion in ended:
        assert completion.finish_reason is FinishReason.CANCELLED
        assert len(completion.token_ids) == max(0, num_steps - 2)
    assert_idle(engine)


def test_what_a_cancelled_request_computed_stays_for_others() -> None:
    engine = engine_of(block_size=8, token_budget=20)
    engine.add(prompt(50), limited(), request_id="r")
    engine.step()
    engine.cancel("r")
    (completion,) = engine.generate([prompt(50)], limited())
    assert completion.counts == TokenCounts(reused=20 // 8 * 8, computed=34)
    assert completion.token_ids == alone(prompt(50), limited())[0].token_ids


def test_cancelling_a_request_that_waits_for_a_place() -> None:
    engine = engine_of(max_num_running=1)
    engine.add(prompt(seed=1), limited(), request_id="first")
    engine.add(prompt(seed=2), limited(), request_id="r")
    engine.step()
    assert state(engine) == ("waiting", "prefill")
    assert engine.cancel("r")
    ended = by_id(engine.drain())
    assert ended["r", 0].finish_reason is FinishReason.CANCELLED
    assert ended["r", 0].timeline.first_scheduled_s is None
    assert ended["first", 0].finish_reason is FinishReason.LENGTH
    assert_idle(engine)


def test_cancelling_a_request_that_waits_for_the_prefill_of_another() -> None:
    engine = engine_of(token_budget=20)
    engine.add(prompt(60), limited(), request_id="first")
    engine.add(prompt(60), limited(num_samples=2), request_id="r")
    engine.step()
    assert engine.scheduler.num_waiting == 1
    assert engine.cancel("r")
    ended = by_id(engine.drain())
    assert ended["r", 1].finish_reason is FinishReason.CANCELLED
    assert ended["first", 0].token_ids == alone(prompt(60), limited())[0].token_ids
    assert_idle(engine)


def preempt(engine: Engine, request_id: str, max_steps: int = 60) -> None:
    """Step until the request has lost its blocks."""
    for _ in range(max_steps):
        engine.step()
        request = engine.scheduler.request(request_id)
        if request is not None and request.state is RequestState.PREEMPTED:
            return
    raise AssertionError("nobody took its blocks")


@pytest.mark.parametrize("victim, num_samples", [("r", 1), ("r#1", 2), ("r", 2)])
def test_cancelling_a_preempted_request(victim: str, num_samples: int) -> None:
    engine = engine_of(num_blocks=12, block_size=3)
    engine.add(prompt(8, seed=1), limited(26), request_id="old")
    params = limited(26, num_samples=num_samples, temperature=1.0)
    engine.add(prompt(8, seed=2), params, request_id="r")
    preempt(engine, victim)

    assert engine.cancel("r")

    ended = by_id(engine.drain())
    for sample in range(num_samples):
        completion = ended["r", sample]
        assert completion.finish_reason is FinishReason.CANCELLED
        assert completion.token_ids
    assert ended["r", num_samples - 1].num_preemptions == 1
    assert len(ended["old", 0].token_ids) == 26
    assert_idle(engine)


def test_cancelling_from_within_a_step_ends_the_request_with_that_step() -> None:
    engine = engine_of()

    def cancel(sample_id: str, index: int, row: torch.Tensor) -> None:
        if index == 2:
            assert engine.cancel("r")

    engine.on_logits = cancel
    engine.add(prompt(), limited(9), request_id="r")
    (completion,) = engine.drain()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert len(completion.token_ids) == 2
    assert_idle(engine)


def test_cancelling_the_unknown_and_the_ended_says_so() -> None:
    engine = engine_of()
    assert not engine.cancel("nobody")
    engine.add(prompt(), limited(), request_id="r")
    engine.drain()
    assert not engine.cancel("r")
    assert engine.drain() == []


def test_cancelling_does_not_touch_anybody_else() -> None:
    engine = engine_of()
    for index in range(3):
        engine.add(prompt(30), limited(9, seed=index), request_id=f"r{index}")
    engine.step()
    engine.step()
    engine.cancel("r1")
    ended = by_id(engine.drain())
    expected = alone(prompt(30), limited(9))[0].token_ids
    assert ended["r0", 0].token_ids == ended["r2", 0].token_ids == expected
    assert_idle(engine)


def test_an_id_is_free_again_when_its_request_has_ended() -> None:
    engine = engine_of()
    engine.add(prompt(), limited(), request_id="r")
    engine.cancel("r")
    engine.add(prompt(), limited(), request_id="r")
    reasons = [c.finish_reason for c in engine.drain()]
    assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH]


# Logits that are not finite

NAN_TOKEN = 7


def engine_with_a_nan_token(**settings: Any) -> Engine:
    """Its embedding of one token is NaN; everything else is as usual.

    Three layers: NaN in the last one is in nobody's KV.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        eos_token_id=None,
    )
    model = randomise(LlamaForCausalLM(config))
    with torch.no_grad():
        model.get_input_embeddings().weight[NAN_TOKEN] = torch.nan
    return build_engine(wrap_model(model, name="nan"), **settings)


def clean_prompt(num_tokens: int = 20, seed: int = 0) -> TokenIds:
    return tokens((i % 290) + 10 for i in random_ids(num_tokens, seed=seed))


@pytest.mark.parametrize("num_samples", [1, 3])
def test_logits_that_are_not_finite_end_their_request_alone(num_samples: int) -> None:
    engine = engine_with_a_nan_token()
    params = limited(5, num_samples=num_samples)
    bad = tokens([*clean_prompt(9), NAN_TOKEN, 3])
    engine.add(clean_prompt(seed=1), limited(8), request_id="before")
    engine.add(bad, params, request_id="bad")
    engine.add(clean_prompt(seed=2), limited(8), request_id="after")

    ended = by_id(engine.drain())

    for sample in range(num_samples):
        assert ended["bad", sample].finish_reason is FinishReason.FAILED
        assert ended["bad", sample].token_ids == ()
    for name, seed in (("before", 1), ("after", 2)):
        assert ended[name, 0].finish_reason is FinishReason.LENGTH
        (expected,) = engine_with_a_nan_token().generate(
            [clean_prompt(seed=seed)], limited(8)
        )
        assert ended[name, 0].token_ids == expected.token_ids
    assert_idle(engine)


def test_a_request_that_becomes_not_finite_keeps_its_tokens_up_to_there() -> None:
    ids, params = clean_prompt(), limited(20)
    free = alone(ids, params)[0].token_ids
    model = build_model(*LOADED)
    with torch.no_grad():
        model.get_input_embeddings().weight[free[3]] = torch.nan
    engine = build_engine(wrap_model(model, name="nan"))
    assert free[3] not in ids

    (completion,) = engine.generate([ids], params)

    first = free.index(free[3])
    assert completion.finish_reason is FinishReason.FAILED
    assert completion.token_ids == free[: first + 1]
    assert_idle(engine)


@pytest.mark.parametrize("token_budget", [512, 16, 9])
def test_blocks_of_a_request_that_was_not_finite_can_be_used_again(
    token_budget: int,
) -> None:
    ids, params = clean_prompt(60), limited(6)
    engine = engine_with_a_nan_token(num_blocks=9, token_budget=token_budget)
    bad = tokens([*clean_prompt(5, seed=3), NAN_TOKEN, *clean_prompt(60, seed=4)])
    engine.generate([bad], limited(4))

    (completion,) = engine.generate([ids], params)

    assert completion.finish_reason is FinishReason.LENGTH
    (expected,) = engine_with_a_nan_token().generate([ids], params)
    assert completion.token_ids == expected.token_ids


@pytest.mark.parametrize("token_budget", [512, 16])
def test_kv_that_is_not_finite_is_not_kept_for_others(token_budget: int) -> None:
    """The next request might have had better luck: it must not inherit the NaN."""
    engine = engine_of(token_budget=token_budget)
    is_broken = True

    def break_values(module: Any, args: Any, output: torch.Tensor) -> None:
        if is_broken:
            output.fill_(torch.nan)

    embeddings = engine.loaded.model.get_input_embeddings()
    hook = embeddings.register_forward_hook(break_values)
    try:
        (first,) = engine.generate([prompt(40)], limited())
        is_broken = False
        (second,) = engine.generate([prompt(40)], limited())
    finally:
        hook.remove()
    assert first.finish_reason is FinishReason.FAILED
    assert second.finish_reason is FinishReason.LENGTH
    assert second.token_ids == alone(prompt(40), limited())[0].token_ids


# Steps that fail


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no luck"), MemoryError(), IndexError("range"), ValueError("shape")],
    ids=repr,
)
def test_a_step_that_raises_ends_its_requests_and_no_others(error: Exception) -> None:
    # A budget that the first prompt uses up, so that the other one waits.
    engine = engine_of(max_num_running=2, token_budget=20)
    engine.add(prompt(20, seed=1), limited(num_samples=2), request_id="failing")
    engine.add(prompt(30, seed=2), limited(6), request_id="waiting")

    with failing_steps(engine, error, when=lambda ids: True):
        ended = engine.step()
    assert [(c.request_id, c.sample) for c in ended] == [("failing", 0), ("failing", 1)]
    assert {c.finish_reason for c in ended} == {FinishReason.FAILED}

    (survivor,) = engine.drain()
    assert survivor.finish_reason is FinishReason.LENGTH
    assert survivor.token_ids == alone(prompt(30, seed=2), limited(6))[0].token_ids
    assert_idle(engine)


def test_a_step_that_raises_loses_nothing_of_the_steps_before_it() -> None:
    engine = engine_of(token_budget=24)
    engine.add(prompt(60), limited(), request_id="r")
    engine.step()
    with failing_steps(engine, RuntimeError("no luck"), when=lambda ids: True):
        engine.step()

    (again,) = engine.generate([prompt(60)], limited())

    assert again.counts == TokenCounts(reused=24, computed=36)
    assert again.token_ids == alone(prompt(60), limited())[0].token_ids
    assert_idle(engine)


def test_samples_that_have_split_fail_with_their_step() -> None:
    engine = engine_of()
    engine.add(prompt(), limited(9, num_samples=3, temperature=1.0), request_id="r")
    engine.step()
    engine.step()
    with failing_steps(engine, RuntimeError("no luck"), when=lambda ids: True):
        ended = engine.step()
    assert [(c.sample, len(c.token_ids)) for c in ended] == [(0, 2), (1, 2), (2, 2)]
    assert_idle(engine)


def test_a_cancelled_request_whose_step_fails_counts_as_cancelled() -> None:
    engine = engine_of()
    engine.add(prompt(), limited(), request_id="r")

    def cancel_then_fail(ids: list[int]) -> bool:
        return engine.cancel("r")

    with failing_steps(engine, RuntimeError("no luck"), when=cancel_then_fail):
        (completion,) = engine.drain()
    assert completion.finish_reason is FinishReason.CANCELLED
    assert_idle(engine)


def test_an_interrupted_step_can_be_followed_by_others() -> None:
    """Whoever presses Ctrl-C gets the interruption, and may go on."""
    engine = engine_of(max_num_running=1)
    engine.add(prompt(20, seed=1), limited(), request_id="interrupted")
    engine.add(prompt(30, seed=2), limited(), request_id="other")
    interruption = KeyboardInterrupt()

    with (
        failing_steps(engine, interruption, when=lambda ids: True),
        pytest.raises(KeyboardInterrupt),
    ):
        engine.step()

    ended = by_id(engine.drain())
    assert ended["other", 0].finish_reason is FinishReason.LENGTH
    assert ended["interrupted", 0].finish_reason is FinishReason.FAILED
    assert_idle(engine)


def test_a_step_that_fails_while_sampling_harms_only_its_request() -> None:
    """Extreme parameters are one caller's; the others in the step are not his."""
    engine = engine_of()
    engine.add(prompt(seed=1), limited(), request_id="usual")
    engine.add(prompt(seed=2), limited(temperature=1e-40), request_id="cold")

    ended = by_id(engine.drain())

    assert ended["usual", 0].finish_reason is FinishReason.LENGTH
    assert ended["usual", 0].token_ids == alone(prompt(seed=1), limited())[0].token_ids
    assert_idle(engine)


# Bad input


def big(num_tokens: int) -> TokenIds:
    return tokens([1] * num_tokens)


@pytest.mark.parametrize(
    "ids, params, error, field",
    [
        ([], limited(), EmptyPrompt, "prompt"),
        ([1, VOCABULARY], limited(), TokenOutOfRange, "tokens"),
        ([2**31 - 1], limited(), TokenOutOfRange, "tokens"),
        ([1] * 1024, limited(1), PromptTooLong, "prompt"),
        ([1] * 1000, limited(25), PromptTooLong, "prompt"),
        ([1] * 401, limited(1), PromptTooLong, "prompt"),
        ([1], limited(500), PromptTooLong, "prompt"),
        ([1], limited(num_samples=9), InvalidLimit, "num_samples"),
    ],
    ids=str,
)
def test_a_request_that_can_never_be_served_is_refused_and_harms_nobody(
    ids: list[int], params: SamplingParams, error: type[RequestError], field: str
) -> None:
    engine = engine_of(num_blocks=50, block_size=8)
    engine.add(prompt(), limited(), request_id="r")
    engine.step()
    usage = engine.usage()

    with pytest.raises(error) as refusal:
        engine.add(tokens(ids), params, request_id="bad")

    assert refusal.value.field == field
    assert engine.usage() == usage
    (completion,) = engine.drain()
    assert completion.token_ids == alone(prompt(), limited())[0].token_ids
    assert_idle(engine)


@pytest.mark.parametrize("ids", [[-1], [1, -5], [2**31], ["a"], [1.5], [None]])
def test_what_is_no_token_is_refused_by_the_token_type(ids: list[Any]) -> None:
    with pytest.raises(TokenOutOfRange) as refusal:
        tokens(ids)
    assert refusal.value.field == "tokens"


@pytest.mark.parametrize("field", ["max_new_tokens", "num_samples", "top_k"])
@pytest.mark.parametrize("value", [0, -1])
def test_limits_below_one_are_refused(field: str, value: int) -> None:
    with pytest.raises(InvalidLimit) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


def test_requests_that_exactly_fill_context_and_cache_are_served() -> None:
    engine = engine_of(num_blocks=128, block_size=8)
    (completion,) = engine.generate([big(1019)], limited(5))
    assert len(completion.token_ids) == 5
    # The last token gets no KV, so 8 blocks of 8 are enough for 60 + 5.
    engine = engine_of(num_blocks=8, block_size=8)
    (completion,) = engine.generate([prompt(60)], limited(5))
    assert len(completion.token_ids) == 5
    assert_idle(engine)


@pytest.mark.parametrize("request_id", ["", "a#1", "#"])
def test_an_id_that_could_be_taken_for_a_sample_is_refused(request_id: str) -> None:
    engine = engine_of()
    with pytest.raises(RequestError) as refusal:
        engine.add(prompt(), limited(), request_id=request_id)
    assert refusal.value.field == "request_id"
    assert_idle(engine)


def test_an_id_in_flight_is_refused_and_its_request_goes_on() -> None:
    engine = engine_of()
    engine.add(prompt(), limited(num_samples=2), request_id="r")
    for _ in range(2):
        with pytest.raises(DuplicateRequest, match="'r' is in flight") as refusal:
            engine.add(prompt(seed=1), limited(), request_id="r")
        assert refusal.value.field == "request_id"
        engine.step()
    assert len(engine.drain()) == 2
    assert_idle(engine)


def test_an_id_is_in_flight_as_long_as_any_of_its_samples_is() -> None:
    params = limited(12, num_samples=2, temperature=3.0)
    end, _ = end_of_one(alone(prompt(), params), 0)
    loaded = replace(tiny_once(*LOADED), eos_token_ids=frozenset({end}))
    engine = build_engine(loaded)
    engine.add(prompt(), params, request_id="r")
    while not engine.step():
        pass  # until sample 0 has ended; sample 1 goes on

    with pytest.raises(DuplicateRequest):
        engine.add(prompt(seed=1), limited(), request_id="r")


def test_ids_that_the_engine_makes_avoid_those_in_flight() -> None:
    engine = engine_of()
    for name in ("request-0", "request-2"):
        engine.add(prompt(), limited(), request_id=name)
    made = {engine.add(prompt(), limited()) for _ in range(3)}
    assert len(made) == 3
    assert len(engine.drain()) == 5


def test_a_prefix_outside_the_vocabulary_is_not_made_public() -> None:
    with pytest.raises(TokenOutOfRange):
        engine_of().declare_public(tokens([VOCABULARY]))


# Settings


@pytest.mark.parametrize(
    "field, value",
    [
        ("numerics", "fast"),
        ("kv_memory_bytes", 0),
        ("block_size", 0),
        ("block_size", -16),
        ("num_threads", 0),
        ("token_budget", 0),
        ("max_num_running", 0),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Engine(tiny_once(*LOADED), engine_config(**{field: value}))


def test_memory_that_holds_no_block_is_refused_with_the_numbers() -> None:
    loaded = tiny_once(*LOADED)
    needed = kv_bytes(loaded, 1, 16)
    config = EngineConfig(kv_memory_bytes=needed - 1, num_threads=1)
    with pytest.raises(ConfigError, match=f"kv_memory_bytes {needed - 1}.* {needed} "):
        Engine(loaded, config)


def test_engines_over_one_loaded_model_do_not_share_anything_else() -> None:
    first, second = engine_of(), engine_of()
    first.generate([prompt(40)], limited())
    (completion,) = second.generate([prompt(40)], limited())
    assert completion.counts == TokenCounts(computed=40)


# Counting


def test_every_prompt_token_is_reused_or_computed() -> None:
    engine = engine_of(block_size=8, token_budget=30)
    prompts = [prompt(n, seed=seed) for n, seed in ((50, 1), (50, 1), (20, 1), (9, 2))]
    for ids in prompts:
        engine.generate([ids], limited())
    completions = engine.generate(prompts, limited(num_samples=2))
    for completion in completions:
        counts = completion.counts
        ids = prompts[completions.index(completion) // 2]
        if completion.sample == 0:
            assert counts.reused + counts.computed == len(ids)
            assert counts.inherited == 0
        else:
            assert counts == TokenCounts(inherited=len(ids))
        assert counts.recomputed == 0


def test_nothing_is_reused_when_reuse_is_off() -> None:
    engine = engine_of(reuses_prefixes=False)
    for _ in range(2):
        (completion,) = engine.generate([prompt(40)], limited())
        assert completion.counts == TokenCounts(computed=40)
    assert engine.usage().num_cached_blocks == 0
    assert engine.declare_public(prompt(40)) == 0
    assert_idle(engine)


def test_usage_goes_up_while_serving_and_back_to_what_is_cached() -> None:
    engine = engine_of(num_blocks=64, block_size=8)
    before = engine.usage()
    assert before.num_free_blocks == before.num_total_blocks == 64
    engine.add(prompt(50), limited())
    engine.step()
    assert engine.usage().num_active_blocks == 7
    engine.drain()
    after = engine.usage()
    assert (after.num_active_blocks, after.num_cached_blocks) == (0, 54 // 8)
    assert after.num_free_blocks == 64 - 54 // 8
    assert after.peak_active_blocks == 7
    assert_idle(engine)


def test_steps_are_recorded_with_what_they_computed() -> None:
    seconds = count()
    loaded = tiny_once(*LOADED)
    config = engine_config(
        kv_memory_bytes=kv_bytes(loaded, 64, 16),
        token_budget=30,
        max_num_running=8,
        order=OrderConfig(name="fcfs"),
        num_threads=1,
        runs_self_test=False,
    )
    engine = Engine(loaded, config, clock=lambda: float(next(seconds)))
    engine.add(prompt(40, seed=1), limited(4))
    engine.add(prompt(5, seed=2), limited(4))
    engine.drain()
    steps = engine.steps
    assert [step.step for step in steps] == list(range(len(steps)))
    assert all(step.seconds > 0 for step in steps)
    assert all(a.end_s <= b.start_s for a, b in pairwise(steps))
    work = [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps]
    assert work == [(30, 0), (15, 0), (0, 2), (0, 2), (0, 2)]


def test_a_prefill_of_one_token_is_no_decode() -> None:
    engine = engine_of()
    engine.generate([tokens([5])], limited(3))
    work = [(step.num_prefill_tokens, step.num_decode_tokens) for step in engine.steps]
    assert work == [(1, 0), (0, 1), (0, 1)]


def test_the_last_prompt_token_is_no_decode_when_a_preemption_lost_it() -> None:
    """One answer everywhere: the plan's."""
    plans = []
    engine = engine_of(num_blocks=9, block_size=3)
    schedule = engine.scheduler.schedule
    engine.scheduler.schedule = lambda now: plans.append(schedule(now)) or plans[-1]  # type: ignore[method-assign, func-returns-value]
    for index in range(3):
        engine.add(prompt(7, seed=index), limited(12), request_id=f"r{index}")
    completions = engine.drain()
    assert any(c.num_preemptions for c in completions)
    for plan, step in zip(plans, engine.steps, strict=True):
        assert step.num_decode_tokens == sum(c.is_decode for c in plan.chunks)
        assert step.num_prefill_tokens == plan.num_tokens - step.num_decode_tokens


def test_timelines_are_in_order() -> None:
    engine = engine_of(max_num_running=1)
    arrival_s = engine._clock.now()
    for index in range(2):
        engine.add(prompt(seed=index), limited(4), arrival_s=arrival_s)
    for completion in engine.drain():
        timeline = completion.timeline
        assert timeline.arrival_s == arrival_s
        assert timeline.first_scheduled_s is not None
        times = [timeline.first_scheduled_s, *timeline.token_times_s]
        assert len(timeline.token_times_s) == len(completion.token_ids)
        assert arrival_s <= times[0]
        assert all(earlier <= later for earlier, later in pairwise(times))


# Generating for one caller while others are served


def test_generate_returns_its_own_in_order_and_leaves_the_others_to_step() -> None:
    engine = engine_of()
    engine.add(prompt(30, seed=1), limited(4), request_id="short")
    engine.add(prompt(30, seed=2), limited(40), request_id="long")
    engine.step()
    prompts = [prompt(10, seed=3), prompt(40, seed=4), prompt(10, seed=3)]

    own = engine.generate(prompts, limited(num_samples=2, temperature=1.0))

    assert [c.sample for c in own] == [0, 1] * 3
    assert len({c.request_id for c in own}) == 3
    assert own[0].token_ids == own[4].token_ids
    assert own[2].counts.computed == 40
    assert engine.has_work
    others = by_id(engine.drain())
    assert others.keys() == {("short", 0), ("long", 0)}
    expected = alone(prompt(30, seed=2), limited(40))[0].token_ids
    assert others["long", 0].token_ids == expected
    assert_idle(engine)


def test_generating_nothing_is_nothing() -> None:
    engine = engine_of()
    assert engine.generate([], limited()) == []


def test_generate_that_is_refused_leaves_nothing_behind() -> None:
    engine = engine_of()
    engine.add(prompt(seed=1), limited(), request_id="other")

    with pytest.raises(TokenOutOfRange):
        engine.generate([prompt(), tokens([VOCABULARY])], limited())

    # Nobody knows the ids of the first prompt's request, so nobody waits for it.
    assert [c.request_id for c in engine.drain()] == ["other"]
    assert_idle(engine)


@contextmanager
def interrupted_step(engine: Engine, number: int) -> Iterator[None]:
    """Interrupt the forward pass of this step, counted from now."""
    passes = count()
    with failing_steps(
        engine, KeyboardInterrupt(), when=lambda ids: next(passes) == number
    ):
        yield


@pytest.mark.parametrize("number", range(0, 12, 2))
def test_generate_that_is_interrupted_leaves_nothing_behind(number: int) -> None:
    """Not in flight, not as a completion, and nobody else's is lost."""
    engine = engine_of(token_budget=30, max_num_running=3)
    engine.add(prompt(10, seed=1), limited(3), request_id="short")
    engine.add(prompt(10, seed=2), limited(30), request_id="long")
    engine.step()

    with interrupted_step(engine, number), pytest.raises(KeyboardInterrupt):
        engine.generate([prompt(40, seed=3), prompt(20, seed=4)] * 2, limited(20))

    in_flight = {request.request_id for request in engine.scheduler.requests()}
    assert in_flight <= {"short", "long"}
    ended = by_id(engine.drain())
    assert ended.keys() == {("short", 0), ("long", 0)}
    assert_idle(engine)


def test_drain_that_is_interrupted_loses_no_completion() -> None:
    engine = engine_of()
    for index in range(3):
        engine.add(prompt(seed=index), limited(2 + index), request_id=f"r{index}")
    with interrupted_step(engine, 3), pytest.raises(KeyboardInterrupt):
        engine.drain()
    assert [c.request_id for c in engine.drain()] == ["r0", "r1", "r2"]
    assert_idle(engine)


def test_an_interrupted_commit_is_not_gone_on_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half of a result may be taken over: nothing right can come after that."""
    engine = engine_of()
    engine.add(prompt(), limited())

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, "commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(InvariantError, match="was interrupted.*make a new one"):
        engine.step()


def test_an_interrupted_add_leaves_no_half_of_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of()
    add = engine.scheduler.add

    def interrupt_after(*arguments: Any) -> Any:
        add(*arguments)
        raise KeyboardInterrupt

    def interrupt_before(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    for interrupt in (interrupt_before, interrupt_after):
        with monkeypatch.context() as patched:
            patched.setattr(engine.scheduler, "add", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.add(prompt(), limited(num_samples=2), request_id="r")
        assert not engine.scheduler.requests()
        assert not engine.progress("r")
    engine.add(prompt(), limited(num_samples=2), request_id="r")
    engine.drain()
    assert_idle(engine)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()], ids=repr)
def test_a_change_is_whole_though_a_listener_is_interrupted(
    error: BaseException,
) -> None:
    engine = build_engine(tiny("llama-group1"))
    engine.add(prompt(30), limited(9), request_id="r")
    engine.step()

    def interrupt(event: Any) -> None:
        raise error

    name = "model.norm.weight"
    weight = engine.loaded.model.get_parameter(name).detach() * 1.5
    engine.on_event = interrupt
    with pytest.raises(type(error)):
        engine.update_weights({name: weight}, in_flight=InFlight.RESTART)
    engine.on_event = None

    assert (engine.generation, engine.num_rollouts_waiting) == (1, 0)
    (completion,) = engine.drain()
    fresh = build_engine(tiny("llama-group1"))
    fresh.update_weights({name: weight})
    (expected,) = fresh.generate([prompt(30)], limited(9))
    assert completion.token_ids == expected.token_ids
    assert_idle(engine)


@pytest.mark.parametrize("verb", ["fence", "retire"])
def test_a_change_that_is_interrupted_half_way_is_not_gone_on_from(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(tiny("llama-group1"))
    engine.generate([prompt(30)], limited())

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.scheduler, verb, interrupt)
    name = "model.norm.weight"
    weight = engine.loaded.model.get_parameter(name).detach() * 1.5
    with pytest.raises(KeyboardInterrupt):
        engine.update_weights({name: weight})
    for go_on in (engine.step, engine.reset, engine.recheck):
        with pytest.raises(InvariantError, match="a change was interrupted"):
            go_on()


def test_a_clock_that_fails_a_change_has_changed_nothing() -> None:
    readings: list[float] = []
    times = count()
    engine = Engine(
        tiny("llama-group1"),
        EngineConfig(num_threads=1, runs_self_test=False, kv_memory_bytes=1 << 20),
        clock=lambda: readings.pop() if readings else float(next(times)),
    )
    before = engine.generate([prompt(30)], limited(), tenant="ann")
    identity = engine.identity
    name = "model.norm.weight"
    weight = engine.loaded.model.get_parameter(name).detach() * 1.5
    changes: list[Callable[[], object]] = [
        lambda: engine.update_weights({name: weight}),
        lambda: engine.update_numerics("tolerant"),
        lambda: engine.update_sharing(SharingPolicy()),
        engine.reset,
    ]
    for change in changes:
        readings.append(float("nan"))
        with pytest.raises(ConfigError, match="clock"):
            change()
        assert (engine.generation, engine.identity) == (0, identity)
    (after,) = engine.generate([prompt(30)], limited(), tenant="ann")
    assert after.counts.reused == 29
    assert after.token_ids == before[0].token_ids
    other = engine.loaded.model.get_parameter(name).detach() * 0.5
    assert engine.update_weights({name: other}) == 1
    fresh = build_engine(tiny("llama-group1"))
    fresh.update_weights({name: other})
    assert engine.identity.weights_digest == fresh.identity.weights_digest


# What is asked about one request


class Counted(dict[Any, Any]):
    """Refuses to be gone through from end to end."""

    def __iter__(self) -> Any:
        raise AssertionError("looks at every sample in flight")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_what_is_done_for_one_request_looks_at_no_other() -> None:
    engine = engine_of(max_num_running=4)
    for index in range(6):
        engine.add(
            prompt(seed=index), limited(9, num_samples=2), request_id=f"r{index}"
        )
    for name in ("_live", "_of_request", "_embedded"):
        samples = engine._samples
        setattr(samples, name, Counted(getattr(samples, name)))

    engine.step()
    assert [p.sample for p in engine.progress("r0")] == [0, 1]
    assert engine.cancel("r0")
    engine.cancel("r5")
    engine.add(prompt(seed=7), limited(), request_id="new")
    assert len(engine.drain()) == 13


def test_progress_says_where_each_sample_stands() -> None:
    engine = engine_of(token_budget=16)
    engine.add(prompt(30), limited(9, num_samples=2), request_id="r", tenant="ann")
    (first, second) = engine.progress("r")
    assert (first.sample, second.sample) == (0, 1)
    assert first.state is second.state is RequestState.WAITING
    engine.step()
    assert [p.num_ready_tokens for p in engine.progress("r")] == [16, 16]
    for _ in range(3):
        engine.step()
    for each in engine.progress("r", tenant="ann"):
        assert len(each.token_ids) == 3
        assert (each.num_prompt_tokens, each.num_ready_tokens) == (30, 32)
    assert engine.progress("r", tenant="bob") == ()
    assert engine.progress("nobody") == ()
    engine.drain()
    assert engine.progress("r") == ()


def test_questions_change_nothing() -> None:
    recording = record(tiny_once(*LOADED))
    engine = recording.engine
    engine.declare_public(prompt(24))
    before = recording.file.getvalue()
    namespaces = engine._identities.namespaces()
    usage = engine.usage()

    asked = [engine.namespace_of(start_position=position) for position in range(5)]
    assert len({*asked, engine.namespace}) == 5
    engine.identity_of(start_position=9)
    engine.usage_of("ann")
    engine.progress("r")
    engine.adapters()

    assert recording.file.getvalue() == before
    assert engine._identities.namespaces() == namespaces
    assert engine.usage() == usage
    # And they were true: what is public is found at a position nobody had used.
    for _ in range(2):
        (completion,) = engine.generate([prompt(30)], limited(), start_position=3)
        assert engine.namespace_of(start_position=3) == asked[3]
    assert completion.counts.reused == 29


# Whose a request is


def test_without_a_tenant_a_request_shares_with_nobody() -> None:
    engine = engine_of(single_tenant=False)
    engine.declare_public(prompt(16))
    for _ in range(2):
        first, second = engine.generate([prompt(40), prompt(40)], limited())
        assert first.counts == second.counts == TokenCounts(computed=40)
        assert first.token_ids == second.token_ids
    assert engine.usage().num_cached_blocks == 0
    for reused in (0, 39):
        (named,) = engine.generate([prompt(40)], limited(), tenant="ann")
        assert named.counts.reused == reused
    assert_idle(engine)


def test_the_samples_of_a_request_of_nobody_share_their_prompt() -> None:
    engine = engine_of(single_tenant=False)
    engine.generate([prompt(40)], limited(num_samples=3))
    assert sum(step.num_prefill_tokens for step in engine.steps) == 40


def test_a_single_tenant_is_said_once_and_named_ones_stay_apart() -> None:
    engine = engine_of(single_tenant=True)
    for tenant, reused in ((None, 0), (None, 39), ("ann", 0), (None, 39)):
        (completion,) = engine.generate([prompt(40)], limited(), tenant=tenant)
        assert completion.counts.reused == reused, tenant
    assert engine.usage_of("default").num_cached_blocks == 5


@pytest.mark.parametrize("single_tenant", [False, True])
def test_a_class_that_is_not_declared_is_refused_from_nobody_too(
    single_tenant: bool,
) -> None:
    engine = engine_of(single_tenant=single_tenant)
    with pytest.raises(RequestError) as refusal:
        engine.add(prompt(), limited(), request_class="undeclared")
    assert refusal.value.field == "request_class"


def test_requests_of_nobody_stay_alone_whatever_policy_comes() -> None:
    engine = engine_of(single_tenant=False)
    engine.add(prompt(40), limited(30), request_id="r")
    engine.step()
    engine.update_sharing(SharingPolicy(), in_flight=InFlight.RESTART)
    assert engine.progress("r")[0].num_ready_tokens == 40, "it goes on"
    engine.drain()
    assert engine.usage().num_cached_blocks == 0


def test_a_session_of_nobody_is_not_there_to_be_ended() -> None:
    with pytest.raises(RequestError, match="single_tenant") as refusal:
        engine_of(single_tenant=False).end_session("s")
    assert refusal.value.field == "tenant"
    engine_of(single_tenant=True).end_session("s")


def test_a_tenant_does_not_reuse_what_another_computed() -> None:
    engine = engine_of()
    for tenant, reused in (("a", 0), ("b", 0), ("a", 39), ("b", 39)):
        (completion,) = engine.generate([prompt(40)], limited(), tenant=tenant)
        assert completion.counts.reused == reused, tenant


def test_an_idle_step_is_nothing() -> None:
    engine = engine_of()
    assert engine.step() == ()
    assert engine.drain() == []
    assert list(engine.steps) == []


def test_every_row_that_is_sampled_from_is_seen_once() -> None:
    seen: list[tuple[str, int]] = []
    engine = build_engine(
        tiny(), on_logits=lambda sample_id, index, row: seen.append((sample_id, index))
    )
    engine.add(prompt(), limited(3, num_samples=2), request_id="r")
    engine.drain()
    assert sorted(seen) == [(name, i) for name in ("r", "r#1") for i in range(3)]
