"""The claim: a hit changes nothing. Cached runs equal uncached ones, bit for bit."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from stemkv.core import OrderConfig, TokenIds
from stemkv.core.schedule.orders import ORDERS
from stemkv.engine import LoadedModel, SamplingParams
from tests.engine.lives import SECONDS
from tests.engine.models import (
    TINY,
    build_engine,
    random_ids,
    tiny,
    tiny_once,
    tokens,
)
from tests.engine.serving import (
    Ask,
    Served,
    assert_agreement,
    assert_cached_kv_is_fresh,
    assert_idle,
    prefill_alone,
    run_traffic,
    serve,
)
from tests.seeds import slow

DTYPES = (torch.bfloat16, torch.float32)
EVERY_MODEL = pytest.mark.parametrize("name", sorted(TINY))
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)

GREEDY = SamplingParams(max_new_tokens=8)


def assert_logits_are_of_one_prefill(loaded: LoadedModel, served: Served) -> None:
    """Every fourth row sampled from is the last row of one prefill up to there."""
    for (sample_id, index), row in [*served.logits.items()][::4]:
        completion = served.completions[sample_id]
        prompt = served.asks[completion.request_id].ids
        prefix = tokens(prompt + completion.token_ids[:index])
        assert torch.equal(row, prefill_alone(loaded, prefix)[1]), (
            f"{sample_id} differs from one prefill at output {index}"
        )


# Random traffic


@EVERY_DTYPE
def test_random_traffic_gets_what_each_request_gets_alone(dtype: torch.dtype) -> None:
    met: Counter[str] = Counter()
    for index in range(4):
        name = sorted(TINY)[index]
        seed = 2 * index + DTYPES.index(dtype)
        print(f"run_traffic(tiny_once({name!r}, {dtype}), {seed})")
        met += run_traffic(tiny_once(name, dtype), seed)
    # A traffic that meets none of this would agree with anything.
    for what in ("fresh tokens compared", "evicted", "forked", "preempted", "reused"):
        assert met[what], f"no {what}: {met}"


@pytest.mark.parametrize("dtype", [torch.float32, *slow([torch.bfloat16])], ids=str)
def test_what_is_answered_is_the_same_in_every_order(dtype: torch.dtype) -> None:
    """A backlog with forks and aborts in a pool that is too small for it."""
    loaded = tiny_once("llama-group1", dtype)
    heads = [random_ids(30, seed=seed) for seed in range(3)]
    asks = [
        Ask(
            request_id=f"r{index}",
            ids=(*heads[index % 3], *random_ids(1 + 5 * (index % 4), seed=10 + index)),
            params=SamplingParams(
                max_new_tokens=9,
                num_samples=1 + index % 2,
                temperature=float(index % 2),
                seed=index,
            ),
            tenant="ab"[index % 2],
            cancelled_at=index if index in (5, 8) else None,
        )
        for index in range(10)
    ]
    first_to_last = set()
    for order in (
        *(OrderConfig(name=name, slo_ttft_s={"chat": 1.0}) for name in ORDERS),
        OrderConfig(lane=1, quantum=16, pauses_prefills=False),
    ):
        engine = build_engine(
            loaded,
            costs=SECONDS,
            num_blocks=26,
            block_size=4,
            token_budget=24,
            max_num_running=4,
            order=order,
        )

        served = serve(engine, asks)

        assert_agreement(served, loaded)
        assert_idle(engine)
        ended = [c for c in served.completions.values() if c.timeline.token_times_s]
        assert len({c.request_id for c in ended}) >= 8
        assert engine.usage().num_evicted_blocks > 0
        first_to_last.add(tuple(c.request_id for c in ended))
    assert len(first_to_last) > 2, "the orders decided something"


@pytest.mark.slow
@EVERY_MODEL
@EVERY_DTYPE
def test_long_random_traffic_gets_what_each_request_gets_alone(
    name: str, dtype: torch.dtype
) -> None:
    for seed in range(100, 125):
        print(f"run_traffic(tiny_once({name!r}, {dtype}), {seed})")
        run_traffic(tiny_once(name, dtype), seed)


# One situation each


@EVERY_MODEL
@EVERY_DTYPE
def test_an_answer_written_token_by_token_is_reused_as_if_it_had_been_prefilled(
    name: str, dtype: torch.dtype
) -> None:
    loaded = tiny_once(name, dtype)
    engine = build_engine(loaded, block_size=8)
    first = Ask(
        request_id="turn1",
        ids=tuple(random_ids(45)),
        params=SamplingParams(max_new_tokens=14),
    )
    second = Ask(request_id="turn2", ids=(1, 2, 3), params=GREEDY, follows="turn1")

    served = serve(engine, [first, second])

    counts = served.completions["turn2"].counts
    # The last token of the answer was never fed back, so it has no KV.
    assert counts.reused == 58 // 8 * 8
    assert counts.computed == 45 + 14 + 3 - counts.reused
    assert_agreement(served, loaded)
    assert_logits_are_of_one_prefill(loaded, served)
    assert assert_cached_kv_is_fresh(engine) == (45 + 14 + 3 + 7) // 8 * 8
    assert_idle(engine)


@EVERY_DTYPE
@pytest.mark.parametrize(
    "block_size, num_shared", [(8, 13), (3, 64), (24, 47), (16, 1)]
)
def test_a_partly_matching_block_is_copied_and_changes_nothing(
    dtype: torch.dtype, block_size: int, num_shared: int
) -> None:
    loaded = tiny_once("llama-group3-tied", dtype)
    engine = build_engine(loaded, block_size=block_size)
    shared = random_ids(num_shared, seed=1)
    asks = [
        Ask(request_id="a", ids=(*shared, *random_ids(30, seed=2)), params=GREEDY),
        Ask(
            request_id="b",
            ids=(*shared, *random_ids(9, seed=3)),
            params=GREEDY,
            at_step=5,
        ),
    ]

    served = serve(engine, asks)

    counts = served.completions["b"].counts
    assert (counts.reused, counts.copied) == (num_shared, num_shared % block_size)
    assert_agreement(served, loaded)
    assert_cached_kv_is_fresh(engine)


@EVERY_DTYPE
@pytest.mark.parametrize("reuses_prefixes", [True, False])
def test_samples_of_one_prompt_share_its_blocks_and_write_into_copies(
    dtype: torch.dtype, reuses_prefixes: bool
) -> None:
    loaded = tiny_once("qwen3-group2-normed", dtype)
    engine = build_engine(loaded, block_size=8, reuses_prefixes=reuses_prefixes)
    params = SamplingParams(max_new_tokens=14, num_samples=4, temperature=2.0)
    ask = Ask(request_id="r", ids=tuple(random_ids(21)), params=params)

    served = serve(engine, [ask])

    outputs = {completion.token_ids for completion in served.completions.values()}
    assert len(outputs) == 4
    assert_agreement(served, loaded)
    assert_logits_are_of_one_prefill(loaded, served)
    assert_cached_kv_is_fresh(engine)
    assert_idle(engine)


@EVERY_DTYPE
def test_tenants_share_a_public_prefix_and_nothing_else(dtype: torch.dtype) -> None:
    loaded = tiny_once("qwen2-group7-biased", dtype)
    engine = build_engine(loaded, block_size=8)
    public = random_ids(37, seed=1)
    private = random_ids(20, seed=2)
    assert engine.declare_public(tokens(public)) == 4
    asks = [
        Ask(
            request_id=f"r{index}",
            ids=(*public, *private),
            params=GREEDY,
            tenant=tenant,
            at_step=12 * index,
        )
        for index, tenant in enumerate(("a", "b", "a", "b"))
    ]

    served = serve(engine, asks)

    reused = [served.completions[f"r{i}"].counts.reused for i in range(4)]
    assert reused == [0, 32, 56, 56]
    assert_agreement(served, loaded)
    assert_cached_kv_is_fresh(engine)


@pytest.mark.parametrize("num_blocks", [10, 13])
def test_preempted_requests_continue_with_the_same_bits(num_blocks: int) -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    engine = build_engine(loaded, num_blocks=num_blocks, block_size=3, token_budget=9)
    asks = [
        Ask(
            request_id=f"r{index}",
            ids=tuple(random_ids(7, seed=index)),
            params=SamplingParams(max_new_tokens=24, seed=index, temperature=index / 2),
        )
        for index in range(4)
    ]

    served = serve(engine, asks)

    assert sum(c.num_preemptions for c in served.completions.values()) >= 3
    assert_agreement(served, loaded)
    assert_logits_are_of_one_prefill(loaded, served)
    assert_idle(engine)


def test_a_request_that_lost_all_its_blocks_to_eviction_is_computed_anew() -> None:
    loaded = tiny_once("llama-group3-tied", torch.bfloat16)
    engine = build_engine(loaded, num_blocks=9, block_size=8)
    prompts = [tuple(random_ids(50, seed=seed)) for seed in (1, 2, 1)]
    asks = [
        Ask(request_id=f"r{i}", ids=ids, params=GREEDY, at_step=12 * i)
        for i, ids in enumerate(prompts)
    ]

    served = serve(engine, asks)

    assert engine.usage().num_evicted_blocks > 0
    assert_agreement(served, loaded)
    assert_cached_kv_is_fresh(engine)


def test_the_weights_make_the_output_depend_on_every_prompt_token() -> None:
    """A control for the tests above: they would see a wrong token anywhere."""
    loaded = tiny("llama-group1", torch.bfloat16)
    ids = random_ids(40)
    _, row = prefill_alone(loaded, tokens(ids))
    for position in range(40):
        changed = [*ids]
        changed[position] = (changed[position] + 1) % 300
        _, other = prefill_alone(loaded, tokens(changed))
        assert not torch.equal(row, other), f"position {position} does not matter"


# The real model


@pytest.mark.model
@pytest.mark.parametrize("fixture", ["smol", *slow(["smol32"])])
def test_two_turns_on_the_real_model_equal_fresh_ones(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    loaded: LoadedModel = request.getfixturevalue(fixture)
    ids = tuple(
        TokenIds.from_ids(
            loaded.tokenizer(
                "A prefix cache keeps the keys and values of prompts that were computed "
                "before. Whoever asks with the same beginning continues where it ends."
            )["input_ids"]
        )
    )
    # In the order of arrival: the second would go first, as it has less work.
    order = OrderConfig(name="fcfs")
    engine = build_engine(loaded, block_size=8, num_blocks=32, order=order)
    asks = [
        Ask(request_id="one", ids=ids, params=SamplingParams(max_new_tokens=6)),
        Ask(
            request_id="two",
            ids=(*ids[:20], 500, 600, 700),
            params=SamplingParams(max_new_tokens=2, temperature=1.0, num_samples=2),
        ),
        Ask(
            request_id="next",
            ids=(198, 198, 198),
            params=SamplingParams(max_new_tokens=2),
            follows="one",
        ),
    ]

    served = serve(engine, asks)

    reused = {name: c.counts.reused for name, c in served.completions.items()}
    assert reused["two"] == 20  # four tokens of them copied
    assert reused["next"] == (len(ids) + 5) // 8 * 8
    assert_agreement(served, loaded)
    assert_cached_kv_is_fresh(engine)
    assert_idle(engine)
