"""Which hints requests come with, and whose words they are."""

from __future__ import annotations

import math
from array import array

import pytest

from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.errors import ConfigError
from stemkv.sim.hinting import HINTS, HintRule
from stemkv.sim.reuse import find_reuses
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest

RULE = SharingRule()


def request(units: list[int], **told: object) -> TraceRequest:
    values: dict[str, object] = {
        "request_id": "r",
        "input_length": 8 * len(units),
        "output_length": 1,
        "units": array("i", units),
        "arrival_s": 0.0,
    }
    return TraceRequest(**(values | told))  # type: ignore[arg-type]


def trace(*requests: TraceRequest) -> Trace:
    return Trace(name="t", format="f", unit_size=8, requests=list(requests))


def test_a_trace_that_says_nothing_gives_no_hints() -> None:
    silent = trace(request([1, 2]), request([1, 2, 3]))

    assert list(HintRule().of(silent, RULE)) == [NO_HINTS, NO_HINTS]


def test_what_a_request_says_is_what_the_core_is_told() -> None:
    told = trace(
        request([1, 2], next_use_s=7.5),
        request([1, 2], next_use_s=math.inf, ephemeral_from=9),
    )

    assert list(HintRule().of(told, RULE)) == [
        Hints(next_use_s=7.5),
        Hints(next_use_s=math.inf, ephemeral_from=9),
    ]
    assert list(HintRule(name="none").of(told, RULE)) == [NO_HINTS, NO_HINTS]


def test_a_session_is_a_tenants_own() -> None:
    names = [
        each.session
        for each in HintRule().of(
            trace(
                request([1], tenant="a", session="bc"),
                request([1], tenant="ab", session="c"),
                request([1], tenant="a", session="bc", ends_session=True),
            ),
            RULE,
        )
    ]

    assert names[0] == names[2] != names[1]


def test_who_ends_a_session_without_a_name_ends_its_own() -> None:
    (hints,) = HintRule().of(trace(request([1], ends_session=True)), RULE)

    assert hints.ends_session
    assert hints.session == "7:defaultr"


def conversation() -> Trace:
    """Two sessions; the first goes on ten seconds later, the second never does."""
    return trace(
        request([1, 2, 3], session="s"),
        request([7, 8, 9], session="t", arrival_s=5.0),
        request([1, 2, 3, 4], session="s", arrival_s=10.0),
    )


@pytest.mark.parametrize("knows", [True, False])
def test_an_oracle_says_which_request_is_its_sessions_last(knows: bool) -> None:
    reuses = find_reuses(conversation(), RULE) if knows else None
    hints = HintRule(name="session_end").of(conversation(), RULE, reuses=reuses)

    assert [each.ends_session for each in hints] == [False, True, True]


def test_an_oracle_says_when_a_prompt_is_used_again() -> None:
    hints = HintRule(name="next_use").of(conversation(), RULE)

    assert [each.next_use_s for each in hints] == [10.0, math.inf, math.inf]


def test_wrong_answers_are_drawn_with_the_seed() -> None:
    many = trace(*(request([1, 2, n], arrival_s=float(n)) for n in range(3, 60)))

    def answers(share: float, seed: int) -> list[float | None]:
        rule = HintRule(name="next_use", wrong_share=share, seed=seed)
        return [each.next_use_s for each in rule.of(many, RULE)]

    assert answers(0.5, 1) == answers(0.5, 1) != answers(0.5, 2)
    wrong = sum(a != b for a, b in zip(answers(0.0, 1), answers(0.5, 1), strict=True))
    assert 10 < wrong < 50


@pytest.mark.parametrize(
    "rule, told, says",
    [
        (HintRule(), {}, False),
        (HintRule(), {"session": "s"}, False),  # which one is nothing of the future
        (HintRule(), {"session": "s", "ends_session": True}, True),
        (HintRule(), {"next_use_s": 1.0}, True),
        (HintRule(), {"ephemeral_from": 0}, True),
        (HintRule(name="none"), {"next_use_s": 1.0}, False),
        (HintRule(name="next_use"), {}, True),
    ],
)
def test_whether_anything_is_said_of_the_future(
    rule: HintRule, told: dict[str, object], says: bool
) -> None:
    assert rule.says_something(trace(request([1, 2], **told))) is says


def test_hindsight_is_called_so() -> None:
    assert [str(HintRule(name=name)) for name in HINTS] == [
        "trace",
        "none",
        "session_end, from hindsight",
        "next_use, from hindsight",
    ]
    assert str(HintRule(name="next_use", wrong_share=0.2, seed=7)).endswith(
        "0.2 of them at random, seed 7"
    )


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"name": "luck"}, "hints must be one of trace, none, session_end, next_use"),
        ({"wrong_share": 0.1}, "wrong_share is of the answers of hints next_use"),
        ({"name": "next_use", "wrong_share": 1.1}, "wrong_share must be from 0 to 1"),
        ({"name": "next_use", "wrong_share": math.nan}, "wrong_share must be from"),
    ],
)
def test_what_makes_no_sense_is_refused(
    settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        HintRule(**settings)  # type: ignore[arg-type]
