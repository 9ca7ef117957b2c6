"""Who shares with whom: by principal, exactly as declared, and never by accident."""

from __future__ import annotations

import pickle
from copy import deepcopy
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.errors import ConfigError, RequestError

POLICY = SharingPolicy(
    groups={"research": frozenset({"ann", "bob"}), "sales": frozenset({"eve"})},
    tenants={"carol": Sharing.NONE, "frank": Sharing.PRIVATE},
    classes={
        "confidential": Sharing.NONE,
        "drafts": Sharing.PRIVATE,
        "chat": Sharing.GROUP,
    },
)

# Legal for a principal, and each looks like, contains or means something else.
HOSTILE_NAMES = [
    "public",
    "none",
    "group:research",
    "research",
    "private:ann",
    "ann\0",
    "\0",
    "ann\n",
    "\n",
    " ann",
    "Ann",
    "\u0430nn",  # a Cyrillic first letter
    "ann\u200b",  # an invisible last one
    "\u00e9",
    "e\u0301",  # looks like the one before
    "ann" * 100_000,
]

# Few, so that tenants meet in groups, and hostile, so that none is taken for another.
names = st.sampled_from(["ann", "bob", *HOSTILE_NAMES[:-1]]) | st.text(min_size=1)


@st.composite
def policies(draw: st.DrawFn) -> SharingPolicy:
    tenants = draw(st.lists(names, unique=True, max_size=8))
    group_names = draw(st.lists(names, unique=True, min_size=1, max_size=3))
    groups: dict[str, set[str]] = {}
    settings: dict[str, Sharing] = {}
    for tenant in tenants:
        places: list[str | Sharing] = [*group_names, Sharing.PRIVATE, Sharing.NONE]
        place = draw(st.sampled_from(places))
        if isinstance(place, Sharing):
            settings[tenant] = place
        else:
            groups.setdefault(place, set()).add(tenant)
    return SharingPolicy(
        groups=groups,
        tenants=settings,
        classes=draw(st.dictionaries(names, st.sampled_from(Sharing), max_size=3)),
        default=draw(st.sampled_from([Sharing.PRIVATE, Sharing.NONE])),
    )


def group_of(policy: SharingPolicy, tenant: str) -> str | None:
    found = [group for group, members in policy.groups.items() if tenant in members]
    return found[0] if found else None


def is_isolated(policy: SharingPolicy, tenant: str) -> bool:
    if group_of(policy, tenant) is not None:
        return False
    return policy.tenants.get(tenant, policy.default) is Sharing.NONE


# What a policy promises


@given(policies(), names, names)
@example(POLICY, "ann", "bob")
@example(POLICY, "ann", "eve")
@example(POLICY, "ann", "research")
@example(POLICY, "carol", "carol")
@example(SharingPolicy(groups={"x": {"ann"}}), "ann", "x")
def test_two_tenants_share_iff_they_are_one_or_in_one_group_and_isolated_ones_never(
    policy: SharingPolicy, one: str, other: str
) -> None:
    first, second = policy.domain(one), policy.domain(other)

    assert (first is None) == is_isolated(policy, one)
    assert (second is None) == is_isolated(policy, other)
    if first is not None and second is not None:
        group = group_of(policy, one)
        are_together = group is not None and group == group_of(policy, other)
        assert (first == second) == (one == other or are_together)


@given(policies(), names, st.data())
def test_a_class_only_ever_narrows_what_its_tenant_has(
    policy: SharingPolicy, tenant: str, data: st.DataObject
) -> None:
    whole = policy.domain(tenant)
    for name, reach in policy.classes.items():
        domain = policy.domain(tenant, name)
        if domain is not None:
            assert domain in (whole, Domain.private(tenant))
            assert whole is not None
            assert reach is not Sharing.NONE
        if reach is Sharing.PRIVATE:
            assert domain in (None, Domain.private(tenant))


@given(policies(), names)
def test_nobody_is_ever_in_the_public_domain(
    policy: SharingPolicy, tenant: str
) -> None:
    assert policy.domain(tenant) != PUBLIC


def test_members_of_a_group_have_its_domain_and_everybody_else_his_own() -> None:
    assert POLICY.domain("ann") == POLICY.domain("bob") == Domain.group("research")
    assert POLICY.domain("eve") == Domain.group("sales")
    assert POLICY.domain("frank") == Domain.private("frank")
    assert POLICY.domain("dave") == Domain.private("dave")
    assert POLICY.domain("carol") is None


def test_without_a_word_from_the_operator_every_tenant_is_alone() -> None:
    assert SharingPolicy().domain("ann") == Domain.private("ann")


def test_by_default_none_a_tenant_shares_only_if_it_is_named() -> None:
    policy = SharingPolicy(
        groups={"research": {"ann"}},
        tenants={"frank": Sharing.PRIVATE},
        default=Sharing.NONE,
    )

    assert policy.domain("dave") is None
    assert policy.domain("ann") == Domain.group("research")
    assert policy.domain("frank") == Domain.private("frank")


@pytest.mark.parametrize(
    "tenant, request_class, expected",
    [
        ("ann", "chat", Domain.group("research")),
        ("ann", "drafts", Domain.private("ann")),
        ("ann", "confidential", None),
        ("dave", "chat", Domain.private("dave")),
        ("dave", "drafts", Domain.private("dave")),
        ("dave", "confidential", None),
        ("carol", "chat", None),
        ("carol", "drafts", None),
    ],
)
def test_a_request_reaches_as_far_as_both_its_tenant_and_its_class_may(
    tenant: str, request_class: str, expected: Domain | None
) -> None:
    assert POLICY.domain(tenant, request_class) == expected


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: repr(name[:20]))
def test_a_hostile_name_is_just_another_tenant(name: str) -> None:
    assert POLICY.domain(name) == Domain.private(name)
    assert POLICY.domain(name) != POLICY.domain("ann")
    assert SharingPolicy(tenants={name: Sharing.NONE}).domain(name) is None
    policy = SharingPolicy(groups={name: {"ann"}, "g": {name}})
    assert policy.domain("ann") == Domain.group(name)
    assert policy.domain(name) == Domain.group("g")


def test_a_group_and_a_tenant_of_one_name_do_not_meet() -> None:
    policy = SharingPolicy(groups={"ann": {"bob"}})

    assert policy.domain("bob") != policy.domain("ann")


# What a request cannot do


@pytest.mark.parametrize("tenant", ["", None, 0, False, b"ann", ["ann"]])
def test_a_request_without_a_principal_has_no_scope_not_even_its_own(
    tenant: Any,
) -> None:
    for policy in (POLICY, SharingPolicy(), SharingPolicy(default=Sharing.NONE)):
        with pytest.raises(RequestError, match="authenticated principal") as caught:
            policy.domain(tenant)
        assert caught.value.field == "tenant"


@pytest.mark.parametrize(
    "request_class", ["confidental", "Chat", "", "none", "chat\0", 0, ["chat"], b"chat"]
)
@pytest.mark.parametrize("tenant", ["ann", "carol", "dave"])
def test_a_class_that_is_not_declared_is_refused_for_it_may_be_a_misspelt_one(
    tenant: str, request_class: Any
) -> None:
    with pytest.raises(
        RequestError, match="is not declared.*'chat', 'confidential', 'drafts'"
    ) as caught:
        POLICY.domain(tenant, request_class)

    assert caught.value.field == "request_class"


def test_what_a_client_sends_does_not_flood_the_message() -> None:
    with pytest.raises(RequestError) as caught:
        POLICY.domain("ann", "x" * 1_000_000)

    assert len(str(caught.value)) < 300


def test_strangers_leave_nothing_behind() -> None:
    policy = SharingPolicy(groups={"research": {"ann"}})
    for number in range(1000):
        policy.domain(f"stranger {number}")

    assert set(policy._domains) == {"ann"}


# What an operator cannot say


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (
            {"groups": {"a": {"ann"}, "b": {"bob", "ann"}}},
            "groups: tenant 'ann' is in 'a' and 'b'; a request has one domain",
        ),
        (
            {"groups": {"a": {"ann"}}, "tenants": {"ann": Sharing.NONE}},
            "tenants: 'ann' is 'none' here and a member of group 'a'",
        ),
        (
            {"groups": {"a": {"ann"}}, "tenants": {"ann": Sharing.PRIVATE}},
            "tenants: 'ann' is 'private' here and a member of group 'a'",
        ),
        ({"groups": {"a": set()}}, "groups: group 'a' has no members"),
        ({"groups": {"": {"ann"}}}, "groups: the name of a group must not be empty"),
        ({"groups": {"a": {""}}}, "groups: a tenant in group 'a' must not be empty"),
        ({"groups": {"a": {1}}}, "groups: a tenant in group 'a' must be text, got int"),
        ({"groups": {1: {"ann"}}}, "groups: the name of a group must be text, got int"),
        ({"groups": {"a": "ann"}}, "groups: group 'a' must be a set .* got str"),
        ({"groups": {"a": ["ann"]}}, "groups: group 'a' must be a set .* got list"),
        ({"groups": [("a", {"ann"})]}, "groups must be a mapping, got list"),
        ({"groups": None}, "groups must be a mapping, got NoneType"),
        ({"tenants": {"": Sharing.NONE}}, "tenants: a name must not be empty"),
        ({"tenants": {None: Sharing.NONE}}, "tenants: a name must be text"),
        ({"tenants": {"ann"}}, "tenants must be a mapping, got set"),
        ({"tenants": {"ann": "none"}}, "tenants: 'ann' must be .*, got 'none'"),
        (
            {"tenants": {"ann": Sharing.GROUP}},
            "tenants: 'ann' must be Sharing.PRIVATE or Sharing.NONE, got .*GROUP",
        ),
        ({"classes": {"": Sharing.NONE}}, "classes: a name must not be empty"),
        ({"classes": {1: Sharing.NONE}}, "classes: a name must be text, got int"),
        ({"classes": {"chat": True}}, "classes: 'chat' must be .*, got True"),
        ({"classes": {"chat": None}}, "classes: 'chat' must be .*, got None"),
        ({"default": "private"}, "default must be .*, got 'private'"),
        ({"default": None}, "default must be .*, got None"),
        (
            {"default": Sharing.GROUP},
            "default must be Sharing.PRIVATE or Sharing.NONE, got .*GROUP",
        ),
    ],
)
def test_a_policy_that_could_mean_two_things_is_refused(
    settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        SharingPolicy(**settings)


def test_a_policy_does_not_change_after_it_was_checked() -> None:
    members = {"ann"}
    groups = {"research": members}
    classes = {"chat": Sharing.NONE}
    policy = SharingPolicy(groups=groups, classes=classes)

    members.add("dave")
    groups["sales"] = {"eve"}
    classes["chat"] = Sharing.GROUP

    assert policy == SharingPolicy(
        groups={"research": {"ann"}}, classes={"chat": Sharing.NONE}
    )
    assert policy.domain("dave") == Domain.private("dave")
    assert policy.domain("ann", "chat") is None
    with pytest.raises(FrozenInstanceError):
        policy.default = Sharing.NONE  # type: ignore[misc]


def test_a_policy_can_be_stored_and_copied() -> None:
    policy = SharingPolicy(groups={"research": {"ann"}}, tenants={"bob": Sharing.NONE})
    for copy in (pickle.loads(pickle.dumps(policy)), deepcopy(policy)):
        assert copy == policy
        assert copy.domain("ann") == Domain.group("research")
        assert copy.domain("bob") is None


def test_a_policy_is_given_by_name() -> None:
    with pytest.raises(TypeError):
        SharingPolicy({}, {})  # type: ignore[call-arg, misc, unused-ignore]
