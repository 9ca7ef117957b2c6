from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stemkv.core.prefix.identity import Domain
from stemkv.errors import ConfigError
from stemkv.sim.sharing import SHARING_RULES, SharingRule
from tests.sim.small_traces import Drawn, paths, random_traces, rules, trace

FREELY = settings(deadline=None)  # a busy machine is no failure


def test_a_namespace_is_the_digest_of_the_identity() -> None:
    (request,) = trace("xy", identities="m").requests

    for name in SHARING_RULES:
        namespace, _ = SharingRule(name=name).of(request)
        assert namespace == sha256(b"m").digest()


def test_who_is_in_one_domain() -> None:
    first, second = trace("x", "x", tenants="ab").requests

    assert SharingRule().of(first)[1] == Domain.private("a")
    assert SharingRule().of(second)[1] == Domain.private("b")
    assert SharingRule(name="public").of(first)[1] == Domain.private("a")
    shared = SharingRule(name="shared")
    assert shared.of(first) == shared.of(second)
    # A tenant may well be called what the group of all is called.
    assert shared.of(first)[1] != Domain.private(shared.of(first)[1].name)


def test_what_enough_tenants_show_is_public() -> None:
    shown = trace("pqx", "pqy", "prz", "prz", "s", "s", tenants="abcc")

    def public(min_tenants: int) -> list[list[int]]:
        rule = SharingRule(name="public", public_min_tenants=min_tenants)
        return [
            list(prefix)
            for prefixes in rule.public_prefixes(shown).values()
            for prefix in prefixes
        ]

    p, q = shown.requests[0].units[:2]
    (s,) = shown.requests[4].units
    assert public(2) == [[p, q], [s]]  # "pr" is one tenant's, however often
    assert public(3) == [[p]]
    assert public(4) == []


def test_a_partly_filled_unit_is_never_public() -> None:
    shown = trace("xy", "xy", tenants="ab", lacking=1)

    (prefixes,) = SharingRule(name="public").public_prefixes(shown).values()

    assert [len(prefix) for prefix in prefixes] == [1]


def test_tenants_of_different_identities_make_nothing_public() -> None:
    shown = trace("xy", "xy", tenants="ab", identities="mn")

    assert SharingRule(name="public").public_prefixes(shown) == {}


def test_only_the_public_rule_declares_anything() -> None:
    shown = trace("xy", "xy", tenants="ab")

    assert SharingRule().public_prefixes(shown) == {}
    assert SharingRule(name="shared").public_prefixes(shown) == {}


@FREELY
@given(drawn=random_traces(), rule=st.sampled_from(rules()[2:]))
def test_declared_prefixes_are_those_of_the_definition(
    drawn: Drawn, rule: SharingRule
) -> None:
    public = {
        (identity, head)
        for path in paths(drawn, rule)
        for identity, seen_by, head in path
        if seen_by == "public"
    }
    longest = {
        (identity, head)
        for identity, head in public
        if not any(
            i == identity and h != head and h.startswith(head) for i, h in public
        )
    }
    heads = {
        (request.identity, tuple(request.units[:end])): prompt[:end]
        for request, prompt in zip(drawn.trace.requests, drawn.prompts, strict=True)
        for end in range(1, len(prompt) + 1)
    }
    names = {sha256(name.encode()).digest(): name for name in "mn"}

    declared = [
        (names[namespace], heads[names[namespace], tuple(prefix)])
        for namespace, prefixes in rule.public_prefixes(drawn.trace).items()
        for prefix in prefixes
    ]

    assert len(declared) == len(set(declared))
    assert set(declared) == longest


@pytest.mark.parametrize("name", ["", "private", "Shared"])
def test_an_unknown_rule_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="isolated, shared, public"):
        SharingRule(name=name)


@pytest.mark.parametrize("minimum", [1, 0, True, 2.0])
def test_one_tenant_alone_makes_nothing_public(minimum: int) -> None:
    with pytest.raises(ConfigError, match="public_min_tenants .* at least 2"):
        SharingRule(name="public", public_min_tenants=minimum)
