"""Quotas as an operator writes them, and what they come to for a core."""

from __future__ import annotations

import pickle
from array import array

import pytest

from stemkv.core.prefix.identity import Domain
from stemkv.core.retention.memory import MemoryQuota
from stemkv.core.retention.quota import Quota
from stemkv.errors import ConfigError
from stemkv.measure.results import GIB
from stemkv.sim.quotas import TenantQuotas
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace, TraceRequest

BLOCK = 1_000  # bytes


def trace_of(*tenants: str) -> Trace:
    """Return a trace of one request of two units for each of the tenants."""
    requests = [
        TraceRequest(
            request_id=str(number),
            input_length=16,
            output_length=1,
            units=array("i", [1, 2]),
            arrival_s=float(number),
            tenant=tenant,
        )
        for number, tenant in enumerate(tenants)
    ]
    return Trace(name="t", format="f", unit_size=8, requests=requests)


@pytest.mark.parametrize("rule", ["isolated", "public"])
def test_a_quota_of_a_tenant_is_that_of_its_domain(rule: str) -> None:
    quotas = TenantQuotas(
        tenants={"a": MemoryQuota(floor_bytes=5_999, cap_bytes=9_999, weight=2.0)},
        default=MemoryQuota(cap_bytes=0),
        public_bytes=3_500,
    )

    blocks = quotas.in_blocks(SharingRule(name=rule), BLOCK)

    own = Quota(floor_blocks=5, cap_blocks=9, weight=2.0)
    assert blocks.of(Domain.private("a")) == own, "in whole blocks, rounded down"
    assert blocks.of(Domain.private("b")) == Quota(cap_blocks=0)
    assert blocks.public_blocks == 3


def test_where_all_tenants_share_a_domain_quotas_are_refused() -> None:
    with pytest.raises(ConfigError, match="all tenants have one domain"):
        TenantQuotas().in_blocks(SharingRule(name="shared"), BLOCK)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        ({"floor_bytes": -1}, "floor_bytes must be a number of bytes of at least 0"),
        ({"cap_bytes": True}, "cap_bytes must be a number of bytes"),
        ({"floor_bytes": 5, "cap_bytes": 4}, "cap_bytes must not be below floor_bytes"),
        ({"weight": 0}, "weight must be a number above 0"),
    ],
)
def test_a_quota_that_makes_no_sense_is_refused(
    settings: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        MemoryQuota(**settings)


def test_who_is_not_named_has_no_floor() -> None:
    with pytest.raises(ConfigError, match="default must have no floor"):
        TenantQuotas(default=MemoryQuota(floor_bytes=1))
    with pytest.raises(ConfigError, match="public_bytes must be a number of bytes"):
        TenantQuotas(public_bytes=-1)


@pytest.mark.parametrize("num_blocks, is_kept", [(8, True), (7, False)])
def test_promises_must_leave_memory_to_run_in(num_blocks: int, is_kept: bool) -> None:
    quotas = TenantQuotas(
        tenants={"a": MemoryQuota(floor_bytes=4 * BLOCK)}, public_bytes=3 * BLOCK
    )

    def check() -> None:
        quotas.check(
            trace_of("a"),
            SharingRule(),
            num_blocks=num_blocks,
            block_size=8,
            block_bytes=BLOCK,
        )

    if is_kept:
        check()
        return
    with pytest.raises(ConfigError, match="lower them or give more memory"):
        check()


@pytest.mark.parametrize("num_public, is_kept", [(4, True), (3, False)])
def test_the_budget_must_hold_what_the_rule_declares_public(
    num_public: int, is_kept: bool
) -> None:
    """Two units of 8 tokens are four blocks of 4."""
    quotas = TenantQuotas(public_bytes=num_public * BLOCK)

    def check() -> None:
        quotas.check(
            trace_of("a", "b"),
            SharingRule(name="public"),
            num_blocks=99,
            block_size=4,
            block_bytes=BLOCK,
        )

    if is_kept:
        check()
        return
    with pytest.raises(ConfigError, match="declares public takes"):
        check()


def test_tenants_with_a_quota_who_send_nothing_are_named() -> None:
    quotas = TenantQuotas(tenants={name: MemoryQuota() for name in "cab"})

    assert quotas.absent(trace_of("b", "x")) == ["a", "c"]


def test_quotas_can_be_read_in_one_line_and_sent_to_a_worker() -> None:
    quotas = TenantQuotas(
        tenants={
            "b": MemoryQuota(),
            "a": MemoryQuota(floor_bytes=2 * GIB, cap_bytes=8 * GIB, weight=2.5),
        },
        default=MemoryQuota(cap_bytes=GIB // 2),
        public_bytes=GIB,
    )

    assert str(quotas) == (
        "a: floor 2 GiB cap 8 GiB weight 2.5; b: no limit; others: cap 0.5 GiB; "
        "public: 1 GiB"
    )
    assert str(TenantQuotas()) == "none named"
    assert pickle.loads(pickle.dumps(quotas)) == quotas
