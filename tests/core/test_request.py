"""What a caller may ask for, and how a request counts its tokens."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stemkv.core import PUBLIC, Request, RequestId
from stemkv.core.schedule.request import RequestState, TokenCounts, child_id
from stemkv.errors import EmptyPrompt, InvalidLimit, InvariantError, RequestError
from tests.core.scheduling import build_spec, tokens


def build_request(prompt: str = "abc", *, max_new_tokens: int = 4) -> Request:
    return Request(build_spec("r", prompt, max_new_tokens=max_new_tokens), 7)


# What is asked for


@pytest.mark.parametrize("request_id", ["", "#", "r#1", "#r", "r#"])
def test_an_id_that_could_be_taken_for_a_sample_is_refused(request_id: str) -> None:
    with pytest.raises(RequestError, match="request_id must be non-empty and free of"):
        build_spec(request_id)


@pytest.mark.parametrize("request_id", ["r", "0", "a b", "ü/7", "chatcmpl-1"])
def test_any_other_id_is_accepted(request_id: str) -> None:
    assert build_spec(request_id).request_id == request_id


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EmptyPrompt, match="prompt has no tokens") as caught:
        build_spec("r", "")

    assert caught.value.field == "prompt"


def test_a_prompt_of_one_token_is_accepted() -> None:
    assert len(build_spec("r", "a").prompt) == 1


@pytest.mark.parametrize("value", [0, -1, -(10**12)])
@pytest.mark.parametrize("field", ["max_new_tokens", "num_samples"])
def test_a_limit_below_one_is_refused_and_not_clamped(field: str, value: int) -> None:
    with pytest.raises(
        InvalidLimit, match=f"{field} must be an integer of at least 1, got {value}"
    ) as caught:
        build_spec("r", **{field: value})  # type: ignore[arg-type]

    assert caught.value.field == field


@pytest.mark.parametrize("value", [1.5, float("nan"), True, "3", None])
@pytest.mark.parametrize("field", ["max_new_tokens", "num_samples"])
def test_a_limit_that_is_no_integer_is_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidLimit, match=f"{field} must be an integer") as caught:
        build_spec("r", **{field: value})

    assert caught.value.field == field


def test_an_arrival_that_has_no_place_in_an_order_is_refused() -> None:
    # A single NaN makes a sorted queue lose other people's requests.
    with pytest.raises(RequestError, match="arrival_s") as caught:
        build_spec("r", arrival_s=float("nan"))

    assert caught.value.field == "arrival_s"


def test_nobody_can_ask_in_the_name_of_the_public() -> None:
    # Public are the prefixes that an operator declared, never what a request brings.
    with pytest.raises(RequestError, match="domain") as caught:
        replace(build_spec("r"), domain=PUBLIC)

    assert caught.value.field == "domain"


def test_a_bad_request_is_also_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        build_spec("r", max_new_tokens=0)


def test_what_was_asked_for_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        build_spec("r").max_new_tokens = 9  # type: ignore[misc]


def test_a_request_shows_no_tokens_in_its_representation() -> None:
    spec = build_spec("r", "secret")

    assert "TokenIds(<6 tokens>)" in repr(spec)
    assert repr(spec.prompt.buffer) not in repr(spec)


# Names of samples


def test_the_first_sample_is_the_request_itself() -> None:
    assert child_id(RequestId("r"), 0) == "r"
    assert child_id(RequestId("r"), 3) == "r#3"


@given(
    first=st.tuples(st.text("r1", min_size=1), st.integers(0, 200)),
    second=st.tuples(st.text("r1", min_size=1), st.integers(0, 200)),
)
def test_samples_of_different_requests_never_share_a_name(
    first: tuple[str, int], second: tuple[str, int]
) -> None:
    names = {child_id(RequestId(name), sample) for name, sample in (first, second)}

    assert len(names) == len({first, second})


# Progress


def test_a_new_request_waits_and_has_nothing() -> None:
    request = build_request()

    assert request.state is RequestState.WAITING
    assert request.lease is None
    assert request.num_computed == 0
    assert request.counts == TokenCounts(0, 0, 0, 0, 0)
    assert request.finish_reason is None
    assert request.first_scheduled_s is None


def test_tokens_are_the_prompt_followed_by_the_output() -> None:
    request = build_request("abc")

    request.append(3)
    request.append(2**31 - 1)

    assert request.tokens == tokens("abcd").buffer + b"\xff\xff\xff\x7f"
    assert request.num_tokens == 5
    assert request.num_prompt_tokens == 3
    assert request.num_output_tokens == 2
    assert request.spec.prompt == tokens("abc")  # the prompt itself is never touched


def test_what_remains_is_what_lacks_kv() -> None:
    request = build_request("abc")
    assert request.num_remaining == 3

    request.num_computed = 3
    request.append(0)
    assert request.num_remaining == 1

    request.num_computed = 0  # as after a preemption
    assert request.num_remaining == 4


@pytest.mark.parametrize("max_new_tokens, num_slots", [(1, 3), (2, 4), (10, 12)])
def test_the_last_output_token_needs_no_slot(
    max_new_tokens: int, num_slots: int
) -> None:
    request = build_request("abc", max_new_tokens=max_new_tokens)

    assert request.max_tokens == num_slots


def test_requests_are_ordered_by_arrival_then_by_add_then_by_sample() -> None:
    parent = Request(build_spec("r", arrival_s=2.0), 5)
    child = Request(build_spec("r", arrival_s=2.0), 5)
    child.become_sample(parent, 1)
    added_later = Request(build_spec("a", arrival_s=2.0), 6)
    arrived_before = Request(build_spec("z", arrival_s=1.0), 9)

    ordered = sorted(
        [added_later, child, arrived_before, parent], key=lambda r: r.order_key
    )

    assert ordered == [arrived_before, parent, child, added_later]


# Samples


def test_a_sample_takes_over_the_progress_of_the_prefill() -> None:
    parent = build_request("abc")
    parent.num_computed = 3
    parent.first_scheduled_s = 4.0
    child = build_request("abc")

    child.become_sample(parent, 2)

    assert child.request_id == "r#2"
    assert child.sample == 2
    assert child.state is RequestState.RUNNING
    assert child.num_computed == 3
    assert child.first_scheduled_s == 4.0
    # What the parent computed is not counted a second time.
    assert child.counts == TokenCounts(inherited=3)


def test_a_request_forks_before_its_first_output_token_only() -> None:
    parent = build_request("abc")
    parent.append(0)

    with pytest.raises(InvariantError, match="forks once, before its first output"):
        build_request("abc").become_sample(parent, 1)


def test_the_request_itself_is_no_child_of_its_own() -> None:
    with pytest.raises(InvariantError, match="forks once"):
        build_request("abc").become_sample(build_request("abc"), 0)


def test_output_does_not_reach_the_other_samples() -> None:
    parent, child = build_request("abc"), build_request("abc")
    child.become_sample(parent, 1)

    child.append(3)

    assert parent.tokens == tokens("abc").buffer
    assert child.tokens == tokens("abcd").buffer
