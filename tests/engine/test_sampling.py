"""From logits to tokens: parameters, filters against a naive twin, and seeds."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stemkv.engine import SamplingParams
from stemkv.engine.sampling import choose_token, make_generator
from stemkv.errors import InvalidLimit
from tests.engine.models import build_engine, random_ids, tiny_once, tokens


def choose(logits: list[float] | torch.Tensor, seed: int = 0, **params: Any) -> int:
    row = torch.as_tensor(logits, dtype=torch.float32)
    return choose_token(row, SamplingParams(**params), make_generator(seed, 0))


def support(logits: list[float], num_draws: int = 300, **params: Any) -> set[int]:
    """Every token that was ever drawn."""
    generator = make_generator(0, 0)
    row = torch.tensor(logits)
    params = dict(temperature=1.0) | params
    return {
        choose_token(row, SamplingParams(**params), generator) for _ in range(num_draws)
    }


def naive_probabilities(
    logits: list[float], *, temperature: float, top_k: int | None, top_p: float
) -> dict[int, float]:
    """The distribution, spelled out: temperature, then top-k, then top-p."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[:top_k]
    highest = logits[order[0]]
    weights = [math.exp((logits[t] - highest) / temperature) for t in kept]
    total = sum(weights)
    probabilities: dict[int, float] = {}
    before = 0.0
    for token, weight in zip(kept, weights, strict=True):
        if before >= top_p:
            break
        probabilities[token] = weight / total
        before += weight / total
    rest = sum(probabilities.values())
    return {token: share / rest for token, share in probabilities.items()}


# Parameters


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 2.0),
        ("max_new_tokens", True),
        ("max_new_tokens", "5"),
        ("num_samples", 0),
        ("num_samples", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -1.0),
        ("top_p", math.nan),
        ("top_k", 0),
        ("top_k", -5),
        ("top_k", 1.5),
        ("stop", ("ok", "")),
        ("stop", "a string alone"),
    ],
)
def test_a_bad_value_is_refused_with_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidLimit, match=field) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", "hot"),
        ("temperature", None),
        ("top_p", "most"),
        ("stop", None),
        ("stop", (1,)),
        ("stop", (b"bytes",)),
        ("seed", "7"),
        ("seed", 1.5),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_field(
    field: str, value: object
) -> None:
    with pytest.raises(InvalidLimit, match=field) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0, "top_p": 1, "top_k": 1},
        {"temperature": 2.5, "top_p": 1e-9, "top_k": 10**9},
        {"stop": ()},
        {"stop": ("a", "b")},
        {"seed": -(2**80)},
    ],
)
def test_values_at_the_edge_are_taken(params: dict[str, Any]) -> None:
    assert choose([0.0, 1.0], **params) in (0, 1)


# Greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 7, 64, 307, 49_152])
def test_greedy_takes_the_likeliest_and_of_equals_the_smallest_id(
    dtype: torch.dtype, size: int
) -> None:
    generator = torch.Generator().manual_seed(size)
    for _ in range(20):
        # Few distinct values: ties everywhere, also far apart.
        row = torch.randint(0, 4, (size,), generator=generator).to(dtype)
        expected = row.tolist().index(max(row.tolist()))
        assert choose_token(row, SamplingParams(), make_generator(0, 0)) == expected


def test_greedy_draws_nothing_from_the_generator() -> None:
    generator = make_generator(3, 0)
    state = generator.get_state()
    choose_token(torch.tensor([0.0, 5.0, 5.0]), SamplingParams(), generator)
    assert torch.equal(generator.get_state(), state)


# Filters


@given(
    logits=st.lists(
        st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 1.0, 2.0]), min_size=1, max_size=9
    ),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.none() | st.integers(1, 12),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.31, 1e-6]),
)
def test_only_tokens_of_the_naive_distribution_are_drawn(
    logits: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    expected = naive_probabilities(
        logits, temperature=temperature, top_k=top_k, top_p=top_p
    )
    drawn = support(
        logits, num_draws=40, temperature=temperature, top_k=top_k, top_p=top_p
    )
    assert drawn <= expected.keys()
    likely = {token for token, share in expected.items() if share > 0.3}
    assert likely <= drawn  # missed with a chance of 0.7 ** 40


@pytest.mark.parametrize(
    "params",
    [
        dict(temperature=1.0, top_k=None, top_p=1.0),
        dict(temperature=0.5, top_k=None, top_p=1.0),
        dict(temperature=2.0, top_k=3, top_p=1.0),
        dict(temperature=1.0, top_k=None, top_p=0.8),
        dict(temperature=1.0, top_k=4, top_p=0.6),
    ],
    ids=str,
)
def test_frequencies_follow_the_naive_distribution(params: dict[str, Any]) -> None:
    logits = [0.0, 1.0, 2.0, 1.5, -1.0, 2.0]
    expected = naive_probabilities(logits, **params)
    generator, row = make_generator(1, 0), torch.tensor(logits)
    num_draws = 3000
    drawn = Counter(
        choose_token(row, SamplingParams(**params), generator) for _ in range(num_draws)
    )
    assert drawn.keys() == expected.keys()
    for token, share in expected.items():
        error = math.sqrt(share * (1 - share) / num_draws)
        assert abs(drawn[token] / num_draws - share) < 4.5 * error + 1e-9


def test_equal_scores_at_the_edge_of_top_k_are_cut_by_id() -> None:
    assert support([1.0, 2.0, 1.0, 1.0], top_k=2) == {0, 1}


def test_equal_scores_at_the_edge_of_top_p_are_cut_by_id() -> None:
    assert support([1.0, 1.0, 1.0, 1.0], top_p=0.5) == {0, 1}


def test_the_likeliest_token_always_stays() -> None:
    assert support([0.0, 3.0, 1.0], top_p=1e-12) == {1}
    assert support([0.0, 3.0, 1.0], top_k=1) == {1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-45, 5e-324])
def test_a_temperature_close_to_zero_is_close_to_greedy(temperature: float) -> None:
    assert choose([3.0, 30.0, -40.0], temperature=temperature) == 1


@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
def test_a_huge_temperature_is_uniform(temperature: float) -> None:
    assert support([3.0, 30.0, -40.0], temperature=temperature) == {0, 1, 2}


def test_bfloat16_logits_are_sampled_in_float32() -> None:
    """The sum of 1,000 bfloat16 probabilities would be far from one."""
    row = torch.zeros(1000, dtype=torch.bfloat16)
    generator = make_generator(0, 0)
    params = SamplingParams(temperature=1.0, top_p=0.5)
    drawn = {choose_token(row, params, generator) for _ in range(3000)}
    assert max(drawn) == 499
    assert len(drawn) > 480


# Seeds


def test_draws_depend_on_seed_and_sample_and_on_nothing_else() -> None:
    def draws(seed: int, sample: int) -> list[int]:
        generator, row = make_generator(seed, sample), torch.zeros(1000)
        params = SamplingParams(temperature=1.0)
        return [choose_token(row, params, generator) for _ in range(8)]

    assert draws(0, 0) == draws(0, 0)
    distinct = [draws(s, k) for s, k in ((0, 0), (0, 1), (1, 0), (11, 0), (1, 10))]
    assert len({tuple(each) for each in distinct}) == 5


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(**(dict(max_new_tokens=6, temperature=2.0) | params))


def test_a_request_draws_the_same_whoever_is_beside_it() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    prompt = tokens(random_ids(20))
    (alone,) = build_engine(loaded).generate([prompt], sampled(seed=5))
    engine = build_engine(loaded)
    for index in range(3):
        engine.add(tokens(random_ids(9, seed=index + 1)), sampled(seed=5, top_k=4))
    engine.step()
    (beside,) = engine.generate([prompt], sampled(seed=5))
    assert beside.token_ids == alone.token_ids


def test_samples_of_one_seed_differ_and_come_again_with_the_seed() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    prompt = tokens(random_ids(20))

    def outputs(seed: int) -> list[tuple[int, ...]]:
        params = sampled(seed=seed, num_samples=4)
        completions = build_engine(loaded).generate([prompt], params)
        assert [c.sample for c in completions] == [0, 1, 2, 3]
        return [completion.token_ids for completion in completions]

    first = outputs(seed=1)
    assert len(set(first)) == 4
    assert outputs(seed=1) == first
    assert not set(outputs(seed=2)) & set(first)


def test_sample_zero_is_what_a_request_for_one_sample_gets() -> None:
    loaded = tiny_once("llama-group1", torch.float32)
    prompt = tokens(random_ids(20))
    (one,) = build_engine(loaded).generate([prompt], sampled())
    many = build_engine(loaded).generate([prompt], sampled(num_samples=3))
    assert many[0].token_ids == one.token_ids
