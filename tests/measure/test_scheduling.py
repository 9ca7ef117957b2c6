"""Who waited and was it fair: the definitions, by hand and against naive ones."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.books.share import ShareOfWork
from stemkv.core.schedule.service import Served, Service
from stemkv.errors import InvariantError
from stemkv.measure.opportunity import opportunity_of
from stemkv.measure.results import RequestResult
from stemkv.measure.scheduling import (
    STRICT,
    Slo,
    TenantGap,
    light_tenants,
    scheduling_of,
)
from tests.report.examples import make_result


def request(**changes: object) -> RequestResult:
    usual = {
        "tenant": "a",
        "arrival_s": 0.0,
        "first_token_s": 1.0,
        "end_s": 2.0,
        "output_tokens": 101,
        "reused_tokens": 0,
        "own_run_tokens": 300,
        "own_backlog_tokens": 100,
        "run_tokens": 300,
        "backlog_tokens": 200,
        "wait_s": {},
    }
    base = make_result(num_requests=1).requests[0]
    return dataclasses.replace(base, **(usual | changes))


def served(prefill: int, decode: int = 0, queued: int = 1) -> Served:
    return Served(num_prefill=prefill, num_decode=decode, num_queued=queued)


def test_a_gap_counts_while_both_are_backlogged_only() -> None:
    gap = TenantGap("ab", decode_weight=2.0)
    gap.note({"a": served(0), "b": served(0)})
    gap.note({"a": served(100), "b": served(0, decode=10)})
    assert gap.largest == 80  # 100 and 2 * 10

    gap.note({"a": served(5_000), "b": served(0, decode=10, queued=0)})
    gap.note({"a": served(5_000), "b": served(0, decode=10)})
    gap.note({"a": served(5_000), "b": served(60, decode=10)})

    assert gap.largest == 80  # the second time they got 60 apart


def test_a_gap_is_a_range_and_in_units_of_weights() -> None:
    gap = TenantGap("ab", decode_weight=0.0, weights={"a": 2.0})
    for a, b in ((0, 0), (100, 0), (100, 120)):
        gap.note({"a": served(a), "b": served(b)})

    assert gap.largest == 120  # from +50 to -70


def test_a_tenant_that_nobody_knows_has_no_gap() -> None:
    gap = TenantGap("ab", decode_weight=1.0)
    gap.note({"a": served(10_000)})

    assert gap.largest == 0


def test_light_are_all_but_the_one_with_most_requests() -> None:
    tenants = [request(tenant=each) for each in "abcbc"]

    assert light_tenants(tenants) == {"a", "c"}  # of equals the first is heavy
    assert light_tenants([]) == frozenset()


def test_the_numbers_of_a_run_by_hand() -> None:
    requests = [
        request(request_id="quick", wait_s={"queue": 0.5}),
        request(request_id="late", first_token_s=3.0, end_s=4.0, own_run_tokens=450),
        request(request_id="warm", tenant="b", reused_tokens=7, wait_s={"queue": 1.0}),
        request(request_id="refused", first_token_s=None, end_s=None),
    ]

    found = scheduling_of(
        requests, order="fair", end_s=10.0, slo=STRICT, gap_tokens=5.0
    )

    assert found.slo_share == 0.5
    assert found.goodput_rps == 0.2
    assert (found.most_wait_ratio, found.most_wait_request) == (4.5, "late")
    assert found.most_wait_ratio_of_all == 1.5
    assert found.wait_s == {"queue": 1.5}
    assert found.hit_tokens == 7
    assert found.requests_per_s == 0.3
    counts = {each.name: each.count for each in found.classes}
    assert counts == {
        "all": 3,
        "cold": 2,
        "warm": 1,
        "light tenants": 1,
        "tenant a": 2,
        "tenant b": 1,
    }


def test_a_run_in_which_nothing_finished_has_no_worst() -> None:
    found = scheduling_of(
        [request(first_token_s=None, end_s=None)],
        order="fcfs",
        end_s=1.0,
        slo=Slo(1.0, None),
        gap_tokens=None,
    )

    assert found.most_wait_ratio is None
    assert found.classes == ()
    assert found.slo_share == 0


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from(["wants", "done", "prefilled", "decoded"]),
            st.integers(0, 4),
            st.integers(0, 50),
        ),
        max_size=40,
    )
)
@settings(deadline=None)
def test_service_counts_what_a_list_of_all_acts_says(
    acts: list[tuple[str, int, int]],
) -> None:
    service = Service()
    wanted: dict[int, int] = {}
    run = {"a": [0, 0], "b": [0, 0]}
    for act, number, num_tokens in acts:
        tenant = "ab"[number % 2]
        if act == "wants":
            service.wants(f"r{number}", tenant, num_tokens)
            wanted[number] = num_tokens
        elif act == "done" and number in wanted:
            service.wants_no_more(f"r{number}")
            del wanted[number]
        elif act == "prefilled":
            service.prefilled(tenant, num_tokens)
            run[tenant][0] += num_tokens
        elif act == "decoded":
            service.decoded(tenant, num_tokens)
            run[tenant][1] += num_tokens
    assert service.backlog == sum(wanted.values())
    assert service.num_prefill == run["a"][0] + run["b"][0]
    for index, tenant in enumerate("ab"):
        own = [tokens for number, tokens in wanted.items() if number % 2 == index]
        counts = service.of(tenant)
        assert (counts.backlog, counts.num_queued) == (sum(own), len(own))
        assert [counts.num_prefill, counts.num_decode] == run[tenant]


def test_a_share_is_what_was_ahead_and_what_ran_since() -> None:
    service, share = Service(), ShareOfWork()
    service.wants("before", "a", 70)
    service.wants("other", "b", 1_000)
    service.prefilled("a", 5)
    service.wants("r", "a", 30)
    service.came(share, "a")
    service.prefilled("a", 150)
    service.prefilled("b", 1)
    service.began(share, "a")
    service.prefilled("a", 999)

    assert (share.own_backlog, share.backlog) == (100, 1_100)
    assert (share.own_run, share.run) == (150, 151)
    assert share.ratio == 1.5


def test_what_is_lost_of_the_work_ahead_counts_as_ahead() -> None:
    service = Service()
    shares = [ShareOfWork() for _ in range(4)]
    for number, share in enumerate(shares[:3]):
        service.wants(str(number), "a", 100)
        service.came(share, "a")
    service.lost(shares[0], "a", 40)
    service.lost(shares[1], "a", 5)  # its own
    service.lost(shares[2], "a", 1_000)  # came later
    service.prefilled("a", 490)
    service.began(shares[0], "a")
    service.came(shares[3], "a")
    service.lost(shares[0], "a", 20)  # preempted, and ahead of all that came
    service.lost(shares[2], "a", 500)
    service.began(shares[1], "a")

    assert (shares[0].own_lost, shares[1].own_lost) == (40, 65)
    assert shares[1].ratio_with_lost == 490 / 265
    service.waits_no_more(shares[2], "a")  # it was aborted
    service.began(shares[3], "a")
    assert shares[3].own_lost == 520
    assert not service.of("a").lost  # nothing is kept for those who are gone


def test_nobody_can_stop_to_want_who_wanted_nothing() -> None:
    with pytest.raises(InvariantError, match="wanted nothing"):
        Service().wants_no_more("r")


def test_the_last_gib_saves_what_the_curve_loses_without_it() -> None:
    points = [(1.0, 10.0), (3.0, 30.0), (5.0, 34.0)]

    found = opportunity_of(
        points, capacity_gib=4.0, memory_wait_s=6.0, retained_gib=2.0
    )

    assert found is not None
    assert found.last_gib == 1.0
    assert found.saved_s_per_gib == pytest.approx(2.0)
    assert found.wait_s_per_gib == 3.0


def test_a_curve_that_begins_above_the_memory_says_nothing() -> None:
    for points in ([], [(2.0, 1.0), (4.0, 3.0)]):
        assert (
            opportunity_of(
                points, capacity_gib=2.0, memory_wait_s=0.0, retained_gib=0.0
            )
            is None
        )
