"""Identities while models and adapters come and go: what is handed out and taken back.

The oracle keeps every namespace that was ever handed out, with the facts it stood for
then, so a namespace that comes to stand for anything else is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import stemkv.core.prefix.identities as identities_module
from stemkv.core.prefix.identities import Identities, LoadedAdapter
from stemkv.core.prefix.identity import UNKNOWN, ComputeIdentity, Unknown
from stemkv.errors import ConfigError, InvariantError, UnknownAdapter
from tests.core.builders import build_identity, count_calls


def content(name: str) -> bytes:
    return sha256(name.encode()).digest()


def build_base(**changes: Any) -> ComputeIdentity:
    facts = {"adapter_digest": None, "adapter_scale": None, "adapter_generation": None}
    return build_identity(**(facts | changes))


def build_identities(**changes: Any) -> Identities:
    return Identities(build_base(**changes))


def picture(identities: Identities) -> tuple[object, ...]:
    return (
        identities.generation,
        identities.base,
        identities.adapters(),
        identities.namespaces(),
    )


# What a request computes under


def test_without_adapter_the_identity_is_the_base() -> None:
    identities = build_identities()
    assert identities.identity() == identities.base == build_base()


def test_an_adapter_adds_its_content_scale_and_generation() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 0.5)

    assert identities.identity("french") == build_base(
        adapter_digest=content("french"), adapter_scale=0.5, adapter_generation=0
    )


def test_a_start_position_is_part_of_the_identity() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 0.5)

    assert identities.identity(start_position=7) == build_base(start_position=7)
    assert identities.identity("french", start_position=7).start_position == 7
    assert identities.identity("french", start_position=7) == replace(
        identities.identity("french"), start_position=7
    )


@pytest.mark.parametrize("start_position", [0, 1, 4096])
@pytest.mark.parametrize("adapter", [None, "french"])
def test_a_namespace_is_the_digest_of_the_identity_and_is_remembered(
    adapter: str | None, start_position: int
) -> None:
    identities = build_identities()
    identities.load("french", content("french"), 0.5)
    expected = identities.identity(adapter, start_position=start_position).namespace()

    first = identities.namespace(adapter, start_position=start_position)
    again = identities.namespace(adapter, start_position=start_position)

    assert first == expected
    assert again is first


def test_asking_again_is_one_look_up() -> None:
    identities = build_identities()
    num_first = count_calls(lambda: identities.namespace(start_position=3))
    num_again = count_calls(lambda: identities.namespace(start_position=3))
    assert num_again <= 3 < 50 < num_first


def test_all_requests_that_differ_in_a_fact_have_namespaces_of_their_own() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 0.5)
    identities.load("louder", content("french"), 1.0)
    identities.load("german", content("german"), 0.5)
    asked = [
        identities.namespace(adapter, start_position=start_position)
        for adapter in (None, "french", "louder", "german")
        for start_position in (0, 1, 2)
    ]
    assert len(set(asked)) == 12
    assert None not in asked
    assert identities.namespaces() == tuple(sorted(set(asked)))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "digest, base",
    [
        (UNKNOWN, {}),
        (content("french"), {"weights_digest": UNKNOWN}),
        (UNKNOWN, {"weights_digest": UNKNOWN}),
    ],
)
def test_what_has_an_unknown_digest_has_no_namespace(
    digest: bytes | Unknown, base: dict[str, Any]
) -> None:
    identities = build_identities(**base)
    identities.load("french", digest, 1.0)

    assert identities.namespace("french") is None
    assert identities.namespace("french", start_position=2) is None
    assert (identities.namespace() is None) == bool(base)
    assert None not in identities.namespaces()
    assert None not in identities.unload("french")


# Mutations


@pytest.mark.parametrize(
    "mutate",
    [
        lambda each: each.load("german", content("german"), 1.0),
        lambda each: each.load("french", content("french"), 1.0),
        lambda each: each.unload("french"),
        lambda each: each.replace_base(build_base()),
        lambda each: each.replace_base(build_base(weights_digest=content("new"))),
        lambda each: each.replace_base(build_base(numerics_class="tolerant")),
    ],
    ids=["load", "reload", "unload", "same base", "weights", "numerics"],
)
def test_every_mutation_advances_the_generation_by_one(mutate: Any) -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    generation = identities.generation

    mutate(identities)

    assert identities.generation == generation + 1


@pytest.mark.parametrize(
    "mutate, error",
    [
        (lambda each: each.unload("german"), UnknownAdapter),
        (lambda each: each.load("", content("x"), 1.0), ConfigError),
        (lambda each: each.load(3, content("x"), 1.0), ConfigError),
        (lambda each: each.load(None, content("x"), 1.0), ConfigError),
        (lambda each: each.load(b"french", content("x"), 1.0), ConfigError),
        (lambda each: each.load(["french"], content("x"), 1.0), ConfigError),
        (
            lambda each: each.replace_base(build_base(start_position=1)),
            InvariantError,
        ),
        (lambda each: each.replace_base(build_identity()), InvariantError),
        (
            lambda each: each.replace_base(build_base(weights_generation=UNKNOWN)),
            InvariantError,
        ),
    ],
)
def test_a_refused_mutation_changes_nothing(
    mutate: Any, error: type[Exception]
) -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    identities.namespace("french")
    identities.namespace()
    before = picture(identities)

    with pytest.raises(error):
        mutate(identities)

    assert picture(identities) == before


@pytest.mark.parametrize(
    "base",
    [
        build_base(start_position=1),
        build_identity(),
        build_base(adapter_digest=UNKNOWN),
        build_base(weights_generation=UNKNOWN),
    ],
)
def test_a_base_with_facts_of_a_request_is_refused(base: ComputeIdentity) -> None:
    with pytest.raises(InvariantError, match="a base identity has"):
        Identities(base)


def test_the_caller_cannot_forget_to_advance_the_weights() -> None:
    """Also not by handing in an older generation, or the very same identity."""
    identities = build_identities(weights_generation=7)
    seen = [identities.namespace()]
    for base in (build_base(weights_generation=7), build_base(weights_generation=0)):
        identities.replace_base(base)
        seen.append(identities.namespace())
    identities.replace_base(identities.base)
    seen.append(identities.namespace())

    assert identities.base.weights_generation == 10
    assert len(set(seen)) == 4


def test_adapters_stay_on_a_new_base_under_new_namespaces() -> None:
    identities = build_identities()
    loaded, _ = identities.load("french", content("french"), 1.0)
    old = identities.namespace("french")

    retired = identities.replace_base(build_base(weights_digest=content("new")))

    assert retired == (old,)
    assert identities.adapters() == (loaded,)
    assert identities.namespace("french") not in (old, None)


# What is taken back


def test_a_new_base_takes_back_everything_that_was_handed_out() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    handed_out = {
        identities.namespace(adapter, start_position=start_position)
        for adapter in (None, "french")
        for start_position in (0, 5)
    }

    retired = identities.replace_base(build_base())

    assert len(retired) == 4
    assert set(retired) == handed_out
    assert identities.namespaces() == ()


@pytest.mark.parametrize("verb", ["reload", "unload"])
def test_an_adapter_takes_back_its_own_namespaces_and_no_others(verb: str) -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    identities.load("german", content("german"), 1.0)
    mine = {identities.namespace("french", start_position=n) for n in range(3)}
    others = {identities.namespace(name) for name in (None, "german")}

    if verb == "reload":
        _, retired = identities.load("french", content("other"), 1.0)
    else:
        retired = identities.unload("french")

    assert set(retired) == mine
    assert len(retired) == 3
    assert set(identities.namespaces()) == others


def test_what_was_never_asked_for_need_not_be_taken_back() -> None:
    identities = build_identities()
    _, retired = identities.load("french", content("french"), 1.0)
    assert retired == ()
    assert identities.unload("french") == ()
    assert identities.replace_base(build_base()) == ()


def test_a_twin_shares_and_nothing_is_taken_back_while_it_lives() -> None:
    identities = build_identities()
    for name in ("one", "two"):
        identities.load(name, content("same"), 0.5)
    shared = identities.namespace("one")
    assert identities.namespace("two") == shared
    alone = identities.namespace("one", start_position=9)  # the twin never asked

    assert identities.unload("one") == (alone,)

    assert identities.namespace("two") == shared
    assert identities.unload("two") == (shared,)


@pytest.mark.parametrize(
    "digest, scale", [(content("other"), 0.5), (content("same"), 1.0)]
)
def test_another_content_or_scale_makes_no_twin(digest: bytes, scale: float) -> None:
    identities = build_identities()
    identities.load("one", content("same"), 0.5)
    identities.load("two", digest, scale)
    namespace = identities.namespace("one")
    assert identities.namespace("two") != namespace

    assert identities.unload("one") == (namespace,)


def test_a_reloaded_adapter_is_no_twin_of_one_that_was_loaded_once() -> None:
    identities = build_identities()
    identities.load("one", content("same"), 0.5)
    identities.load("two", content("same"), 0.5)
    shared = identities.namespace("one")
    identities.namespace("two")

    loaded, retired = identities.load("one", content("same"), 0.5)

    assert loaded.generation == 1
    assert retired == ()
    assert identities.namespace("two") == shared
    assert identities.namespace("one") != shared


@pytest.mark.parametrize("goes_between", [True, False])
def test_a_name_that_comes_again_with_equal_content_has_other_namespaces(
    goes_between: bool,
) -> None:
    """The files under a path may have changed between reading and loading."""
    identities = build_identities()
    seen: list[bytes | None] = []
    versions = []
    for _ in range(5):
        loaded, _ = identities.load("french", content("same"), 0.5)
        seen.append(identities.namespace("french"))
        versions.append(loaded.version)
        if goes_between:
            identities.unload("french")

    assert len(set(seen)) == 5
    assert len(set(versions)) == 5


def test_versions_are_never_equal_however_names_are_chosen() -> None:
    identities = build_identities()
    versions = [
        identities.load(name, content("x"), 1.0)[0].version
        for _ in range(3)
        for name in ("a", "a@1", "a@1@2", "@", "a@2", "1", "a@")
    ]
    assert len(set(versions)) == len(versions)


# Names


def test_an_unknown_adapter_is_told_and_those_of_others_are_not() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)

    for ask in (identities.adapter, identities.identity, identities.namespace):
        with pytest.raises(UnknownAdapter, match="'dutch' is not loaded") as error:
            ask("dutch")
        assert error.value.field == "adapter"
        assert "french" not in str(error.value)


@pytest.mark.parametrize("name", ["", " french", "French", "french\0", b"french", 3, 0])
def test_a_name_that_is_not_exactly_a_loaded_one_is_unknown(name: Any) -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    for ask in (identities.adapter, identities.identity, identities.namespace):
        with pytest.raises(UnknownAdapter):
            ask(name)


@pytest.mark.parametrize("name", [["french"], {}, {"french"}, bytearray(b"french")])
def test_a_name_without_a_hash_is_unknown(name: Any) -> None:
    identities = build_identities()
    for ask in (identities.adapter, identities.identity):
        with pytest.raises(UnknownAdapter):
            ask(name)


def test_a_namespace_for_a_name_without_a_hash_is_refused_like_others() -> None:
    with pytest.raises(UnknownAdapter):
        build_identities().namespace(["french"])  # type: ignore[arg-type]


def test_an_unloaded_adapter_is_unknown_and_its_namespace_not_remembered() -> None:
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    identities.namespace("french")
    identities.unload("french")

    with pytest.raises(UnknownAdapter):
        identities.namespace("french")
    with pytest.raises(UnknownAdapter):
        identities.unload("french")


def test_adapters_are_told_in_order_of_loading() -> None:
    identities = build_identities()
    for name in ("b", "a", "c"):
        identities.load(name, content(name), 1.0)
    identities.load("b", content("b2"), 2.0)

    assert [each.name for each in identities.adapters()] == ["a", "c", "b"]
    assert identities.adapter("b") == LoadedAdapter(
        name="b", version="b@3", digest=content("b2"), scale=2.0, generation=1
    )


# Memory


def test_any_number_of_start_positions_takes_bounded_memory() -> None:
    limit = identities_module._MAX_SHIFTED
    identities = build_identities()
    seen = [identities.namespace(start_position=n) for n in range(1, limit + 101)]

    assert len(identities.namespaces()) == limit
    assert None not in seen[:limit]
    assert seen[limit:] == [None] * 100, "what comes beyond shares with nobody"
    assert identities.namespace(start_position=5) == seen[4]
    assert len(identities.replace_base(build_base())) == limit
    assert identities.namespace(start_position=limit + 1) is not None


def test_one_callers_start_positions_leave_others_their_namespaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identities_module, "_MAX_SHIFTED", 10)
    identities = build_identities()
    identities.load("french", content("french"), 1.0)
    for start_position in range(1, 20):
        identities.namespace(start_position=start_position)

    assert identities.namespace() is not None
    assert identities.namespace("french") is not None


# Random histories


@dataclass(frozen=True)
class Facts:
    """What a namespace stands for; `load` is how often its name was loaded before."""

    weights: str
    numerics: str
    weights_generation: int
    digest: str | None
    scale: float | None
    load: int | None
    start_position: int


class IdentitiesMachine(RuleBasedStateMachine):
    """An operator who loads, reloads, unloads and replaces; requests that ask."""

    names = st.sampled_from(["a", "b", "c"])
    contents = st.sampled_from(["x", "y"])
    scales = st.sampled_from([0.5, 1.0])
    starts = st.sampled_from([0, 0, 0, 1, 64])

    @initialize()
    def create(self) -> None:
        self.weights, self.numerics, self.weights_generation = "w0", "exact", 7
        self.identities = Identities(self.base())
        self.generation = 0
        self.loaded: dict[str, tuple[str | None, float, int]] = {}
        self.num_loads: dict[str, int] = {}
        self.versions: set[str] = set()
        # Whatever was handed out for what, ever; and who was handed it and has it yet.
        self.stood_for: dict[bytes, Facts] = {}
        self.held: dict[tuple[str | None, int], bytes] = {}
        self.retired: set[bytes] = set()
        self.lost_by_name: dict[str, set[bytes]] = {}

    def base(self) -> ComputeIdentity:
        return build_base(
            weights_digest=content(self.weights),
            numerics_class=self.numerics,
            weights_generation=self.weights_generation,
        )

    def facts(self, adapter: str | None, start_position: int) -> Facts:
        digest, scale, load = (
            (None, None, None) if adapter is None else self.loaded[adapter]
        )
        return Facts(
            self.weights,
            self.numerics,
            self.weights_generation,
            digest,
            scale,
            load,
            start_position,
        )

    def take_back(self, retired: tuple[bytes, ...], name: str | None = None) -> None:
        """Compare with what nobody holds any more."""
        gone = {k: n for k, n in self.held.items() if name is None or k[0] == name}
        for key in gone:
            del self.held[key]
        expected = set(gone.values()) - set(self.held.values())
        assert list(retired) == sorted(expected)
        self.retired |= expected
        for (adapter, _), namespace in gone.items():
            if adapter is not None:
                self.lost_by_name.setdefault(adapter, set()).add(namespace)

    @rule(name=names, digest=contents | st.none(), scale=scales)
    def load(self, name: str, digest: str | None, scale: float) -> None:
        loaded, retired = self.identities.load(
            name, UNKNOWN if digest is None else content(digest), scale
        )
        self.take_back(retired, name)
        num_before = self.num_loads.get(name, 0)
        self.num_loads[name] = num_before + 1
        self.loaded.pop(name, None)
        self.loaded[name] = (digest, scale, num_before)
        self.generation += 1
        assert (loaded.generation, loaded.scale) == (num_before, scale)
        assert loaded.version not in self.versions
        self.versions.add(loaded.version)

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.take_back(self.identities.unload(name), name)
        del self.loaded[name]
        self.generation += 1

    @rule(
        weights=st.sampled_from(["w0", "w0", "w1"]),
        numerics=st.sampled_from(["exact", "exact", "tolerant"]),
        claimed_generation=st.integers(0, 9),
    )
    def replace_base(
        self, weights: str, numerics: str, claimed_generation: int
    ) -> None:
        self.weights, self.numerics = weights, numerics
        base = replace(self.base(), weights_generation=claimed_generation)
        self.take_back(self.identities.replace_base(base))
        self.weights_generation += 1
        self.generation += 1

    @rule(data=st.data(), start_position=starts)
    def ask(self, data: st.DataObject, start_position: int) -> None:
        adapter = data.draw(st.sampled_from([None, *sorted(self.loaded)]))
        namespace = self.identities.namespace(adapter, start_position=start_position)
        facts = self.facts(adapter, start_position)
        identity = self.identities.identity(adapter, start_position=start_position)
        assert namespace == identity.namespace()
        if adapter is not None and facts.digest is None:
            assert namespace is None
            return
        assert namespace is not None
        assert len(namespace) == 32
        assert self.stood_for.setdefault(namespace, facts) == facts, "two meanings"
        lost = self.lost_by_name.get(adapter, set()) if adapter is not None else set()
        assert namespace not in lost, "a name has a namespace of its past"
        self.held[adapter, start_position] = namespace

    @precondition(lambda self: hasattr(self, "identities"))
    @invariant()
    def agrees_with_the_model(self) -> None:
        identities = self.identities
        assert identities.generation == self.generation
        assert identities.base == self.base()
        assert [each.name for each in identities.adapters()] == list(self.loaded)
        assert identities.namespaces() == tuple(sorted(set(self.held.values())))
        # Nothing is forgotten: what was handed out is in use or was taken back.
        assert set(self.stood_for) == self.retired | set(self.held.values())
        # One set of facts, one namespace.
        assert len(set(self.stood_for.values())) == len(self.stood_for)
        current = self.weights_generation
        assert all(
            self.stood_for[each].weights_generation == current
            for each in self.held.values()
        )


def run_machine(*, max_examples: int, num_steps: int) -> None:
    run_state_machine_as_test(
        IdentitiesMachine,
        settings=settings(
            max_examples=max_examples, stateful_step_count=num_steps, deadline=None
        ),
    )


def test_no_history_gives_a_namespace_two_meanings() -> None:
    run_machine(max_examples=80, num_steps=40)


@pytest.mark.slow
def test_no_long_history_gives_a_namespace_two_meanings() -> None:
    run_machine(max_examples=400, num_steps=60)


def test_a_retired_namespace_comes_back_only_for_a_twin_of_what_it_stood_for() -> None:
    """Another name, loaded as often with equal content and scale: equal KV."""
    identities = build_identities()
    identities.load("one", content("same"), 0.5)
    namespace = identities.namespace("one")
    assert identities.unload("one") == (namespace,)

    identities.load("two", content("same"), 0.5)
    assert identities.namespace("two") == namespace

    identities.replace_base(identities.base)
    assert identities.namespace("two") != namespace
