"""A change of weights, adapters or numerics, and requests in every state.

Later requests match nothing of before, requests in flight get what the policy says,
and either way a request's bits are those of a fresh engine on the state it ran on
(C7, I9, I32). The revisions of the weights are real ones: steps of training apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from stemkv.core import FinishReason
from stemkv.core.prefix.events import BlocksPublished
from stemkv.core.prefix.identity import Domain
from stemkv.core.schedule.events import RequestAdmitted, RequestRestarted
from stemkv.core.schedule.request import RequestId, child_id
from stemkv.engine import Engine, InFlight
from stemkv.errors import (
    BrokenAdapter,
    ConfigError,
    StemKVError,
    UnknownAdapter,
)
from tests.engine.lora_files import CONFIG, WEIGHTS, Shelf
from tests.engine.models import (
    random_ids,
    tokens,
)
from tests.engine.serving import assert_idle
from tests.engine.states import (
    BASE,
    PROMPT,
    STATES,
    TRAINED,
    TRAINED_MORE,
    Asked,
    Played,
    Revision,
    asked,
    assert_got,
    expected,
    play,
    weights,
)

POLICIES = tuple(InFlight)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("adapters"))


def namespaces(engine: Engine) -> set[bytes]:
    return set(engine._identities.namespaces())


def assert_nothing_of(engine: Engine, old: set[bytes]) -> None:
    """Nothing is matchable in these namespaces, by anybody."""
    for namespace in old:
        for tenant in ("a", "b"):
            domain = Domain.private(tenant)
            assert engine.cache.peek(namespace, domain, PROMPT.buffer).num_tokens == 0
    assert not old & set(engine.cache.tree.roots())


def assert_holds_only_current(engine: Engine) -> None:
    """At rest, every block in the tree is in a namespace that is current."""
    assert_idle(engine)
    assert set(engine.cache.tree.roots()) <= namespaces(engine)
    assert engine.cache.tree.retired_roots() == ()
    assert engine.cache.num_retired_blocks == 0


# Every mutation, every state, every policy


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A change, and who is concerned by it."""

    old: Revision
    new: Revision
    apply: Callable[[Engine, InFlight], object]
    adapter: str | None = None  # what the target asks for; others then are unharmed


def mutation_named(name: str, shelf: Shelf) -> Mutation:
    one = shelf.adapter(seed=1, target_modules=["q_proj", "down_proj"])
    two = shelf.adapter(seed=2, r=2)
    with_one = replace(BASE, adapters=(("x", one, 1.0),))
    match name:
        case "update_weights":
            return Mutation(
                old=BASE,
                new=TRAINED,
                apply=lambda e, policy: e.update_weights(weights(1), in_flight=policy),
            )
        case "update_weights below an adapter":
            return Mutation(
                old=with_one,
                new=replace(TRAINED, adapters=with_one.adapters),
                apply=lambda e, policy: e.update_weights(weights(1), in_flight=policy),
            )
        case "update_numerics":
            return Mutation(
                old=replace(BASE, numerics="tolerant"),
                new=BASE,
                apply=lambda e, policy: e.update_numerics("exact", in_flight=policy),
            )
        case "reload_adapter":
            return Mutation(
                old=with_one,
                new=replace(BASE, adapters=(("x", two, 1.0),)),
                apply=lambda e, policy: e.reload_adapter("x", two, in_flight=policy),
                adapter="x",
            )
        case "reload_adapter at another scale":
            return Mutation(
                old=with_one,
                new=replace(BASE, adapters=(("x", one, 0.5),)),
                apply=lambda e, policy: e.reload_adapter(
                    "x", scale=0.5, in_flight=policy
                ),
                adapter="x",
            )
        case "unload_adapter":
            return Mutation(
                old=with_one,
                new=BASE,
                apply=lambda e, policy: e.unload_adapter("x", in_flight=policy),
                adapter="x",
            )
    raise AssertionError(name)


MUTATIONS = {
    "update_weights": (),
    "reload_adapter": (),
    "unload_adapter": (),
    "update_numerics": pytest.mark.slow,
    "update_weights below an adapter": pytest.mark.slow,
    "reload_adapter at another scale": pytest.mark.slow,
}
CHANGES = [
    pytest.param(
        name,
        policy,
        state,
        # Half of them, in which every two of name, policy and state meet.
        marks=marks if (i + j + k) % 2 else pytest.mark.slow,
        id=f"{name}-{policy.value}-{state}",
    )
    for i, (name, marks) in enumerate(MUTATIONS.items())
    for j, policy in enumerate(POLICIES)
    for k, state in enumerate(STATES)
    # Nobody can begin again on an adapter that is gone.
    if (name, policy) != ("unload_adapter", InFlight.RESTART)
]


@pytest.mark.parametrize("name, policy, state", CHANGES)
def test_a_change_divides_requests_into_those_of_before_and_after(
    name: str, policy: InFlight, state: str, shelf: Shelf
) -> None:
    mutation = mutation_named(name, shelf)
    adapter = "x" if mutation.old.adapters else None
    target = asked(num_samples=STATES[state].num_samples, adapter=adapter)
    played = play(mutation.old.engine(**STATES[state].settings()))
    engine = played.engine
    # Something cached that the target reuses and nobody may later.
    warm = asked(tokens(list(PROMPT)[:9]), max_new_tokens=1, adapter=adapter)
    played.run("warm", warm)
    STATES[state].bring(played, target)
    played.add("bystander", asked())  # without adapter
    early = [r for r in played.asked if r != "warm"]
    concerned = {
        r
        for r in early
        if mutation.adapter is None or played.asked[r].adapter == mutation.adapter
    }
    old = namespaces(engine)
    generation = engine.generation

    mutation.apply(engine, policy)

    assert engine.generation == generation + 1, "before anything of it can serve"
    current = namespaces(engine)
    retired = old - current
    assert engine.namespace_of() in current | {engine.namespace}
    assert_nothing_of(engine, retired)
    played.after_step = lambda: assert_nothing_of(engine, retired)
    num_events = len(played.events)
    is_gone = name == "unload_adapter"
    if is_gone:
        with pytest.raises(UnknownAdapter):
            played.add("refused", target)
    else:
        played.add("late", target)
    played.drain()

    for request_id in sorted(early):
        for sample_id in played.sample_ids(request_id):
            outcome = played.outcome(sample_id)
            is_concerned = request_id in concerned
            is_restarted = is_concerned and policy is InFlight.RESTART
            assert outcome.completion.num_restarts == int(is_restarted)
            if is_concerned and policy is InFlight.ABORT:
                assert outcome.completion.finish_reason is FinishReason.REPLACED
        if request_id in concerned and policy is InFlight.ABORT:
            continue
        is_new = request_id in concerned and policy is InFlight.RESTART
        assert_got(played, request_id, mutation.new if is_new else mutation.old)
    if not is_gone:
        assert_got(played, "late", mutation.new)
        if policy is not InFlight.RESTART:
            # Else those that began again have computed it already, on the new state.
            assert played.outcome("late").reused == 0
        assert_reused_what_was_published_after(played, num_events)
        played.add("again", target)
        played.drain()
        assert played.outcome("again").reused > 0
        assert_got(played, "again", mutation.new)
    published = {
        e.namespace
        for e in played.events[num_events:]
        if isinstance(e, BlocksPublished)
    }
    assert not published & retired
    assert_holds_only_current(engine)


def assert_reused_what_was_published_after(played: Played, start: int) -> None:
    """Whoever first runs in a namespace made after event `start` finds it empty."""
    filled: set[bytes] = set()
    for event in played.events[start:]:
        if isinstance(event, BlocksPublished):
            filled.add(event.namespace)
        elif isinstance(event, RequestAdmitted) and event.request_id == "late":
            namespace = played.engine.namespace_of(played.asked["late"].adapter)
            assert namespace in filled or event.num_cached_tokens == 0


def test_the_revisions_can_be_told_apart(shelf: Shelf) -> None:
    """Else everything above could pass on the wrong weights."""
    for num_samples in (1, 3):
        for name in ("update_weights", "update_numerics", "reload_adapter"):
            mutation = mutation_named(name, shelf)
            adapter = "x" if mutation.new.adapters else None
            what = asked(num_samples=num_samples, adapter=adapter)
            pairs = zip(
                expected(mutation.old, what), expected(mutation.new, what), strict=True
            )
            for old, new in pairs:
                assert old.differs_from(new)
    first, last = expected(TRAINED, asked()), expected(TRAINED_MORE, asked())
    assert first[0].differs_from(last[0])


@pytest.mark.parametrize("state", STATES)
def test_loading_an_adapter_disturbs_nobody(state: str, shelf: Shelf) -> None:
    """Nothing of the base model is fenced for it, unlike for a change of weights."""
    target = asked(num_samples=STATES[state].num_samples)
    played = play(BASE.engine(**STATES[state].settings()))
    STATES[state].bring(played, target)
    generation, namespace = played.engine.generation, played.engine.namespace
    folder = shelf.adapter(seed=1)

    played.engine.load_adapter("x", folder)

    assert played.engine.generation == generation + 1
    assert played.engine.namespace == namespace
    adapted = replace(target, adapter="x")
    played.add("adapted", adapted)
    played.drain()
    for request_id in set(played.asked) - {"adapted"}:
        assert_got(played, request_id, BASE)
    revision = replace(BASE, adapters=(("x", folder, 1.0),))
    assert_got(played, "adapted", revision)
    assert played.outcome("adapted").reused == 0
    played.add("again", target)
    played.add("adapted again", adapted)
    played.drain()
    for request_id in ("again", "adapted again"):
        assert played.outcome(request_id).reused > 0
        assert_got(played, request_id, revision)


@pytest.mark.parametrize("state", STATES)
def test_a_reset_disturbs_nobody_and_leaves_nothing(state: str) -> None:
    target = asked(num_samples=STATES[state].num_samples)
    played = play(BASE.engine(**STATES[state].settings()))
    engine = played.engine
    played.run("warm", asked(tokens(list(PROMPT)[:9]), max_new_tokens=1))
    STATES[state].bring(played, target)
    namespace = engine.namespace
    assert namespace is not None
    held = {i for node in engine.cache.tree.nodes() for i in node.block_ids}
    before = engine.usage()
    generation = engine.generation

    report = engine.reset()

    after = engine.usage()
    assert report.num_freed_blocks == after.num_free_blocks - before.num_free_blocks
    assert report.num_freed_blocks == before.num_cached_blocks
    left = {i for node in engine.cache.tree.nodes() for i in node.block_ids}
    assert report.num_remaining_blocks == len(left)
    assert report.num_freed_blocks == len(held - left)
    assert engine.generation == generation
    assert_nothing_of(engine, {namespace})
    again = engine.reset()
    assert again.num_freed_blocks == 0
    assert again.num_remaining_blocks == report.num_remaining_blocks
    played.add("late", target)
    played.drain()
    for request_id in set(played.asked) - {"warm"}:
        assert_got(played, request_id, BASE)
    assert_holds_only_current(engine)
    assert played.run("again", asked()).reused > 0
    assert engine.reset().num_remaining_blocks == 0
    assert engine.usage().num_free_blocks == engine.usage().num_total_blocks


# Public prefixes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_declared_prefixes_stay_public_over_changes(
    policy: InFlight, shelf: Shelf
) -> None:
    one, two = shelf.adapter(seed=1), shelf.adapter(seed=2, r=2)
    played = play(
        replace(BASE, adapters=(("x", one, 1.0),)).engine(block_size=4, token_budget=16)
    )
    engine = played.engine
    public = tokens(list(PROMPT)[:18])
    assert engine.declare_public(public) == 4

    def both_share(suffix: str, revision: Revision) -> None:
        """Two tenants meet in the public prefix and only there, base and adapted."""
        for adapter in (None, "x"):
            first = asked(tenant="a", adapter=adapter)
            name = f"{suffix} {adapter}"
            assert played.run(f"a {name}", first).reused == 0
            assert played.run(f"b {name}", replace(first, tenant="b")).reused == 16
            for tenant in "ab":
                assert_got(played, f"{tenant} {name}", revision)

    both_share("before", replace(BASE, adapters=(("x", one, 1.0),)))
    played.add("in flight", asked(tenant="c"))
    played.step()
    engine.update_weights(weights(1), in_flight=policy)
    played.drain()
    assert engine.usage().num_cached_blocks == 0 or policy is InFlight.RESTART
    engine.reset()
    both_share("trained", replace(TRAINED, adapters=(("x", one, 1.0),)))
    engine.reset()
    both_share("reset", replace(TRAINED, adapters=(("x", one, 1.0),)))
    engine.reload_adapter("x", two)
    engine.reset()
    both_share("reloaded", replace(TRAINED, adapters=(("x", two, 1.0),)))
    assert_holds_only_current(engine)


def test_a_public_prefix_being_computed_is_fenced_like_any_other() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.engine.declare_public(PROMPT)
    played.add("early", asked(tenant="a"))
    played.step()
    played.add("follower", asked(tenant="b"))
    played.step()
    played.engine.update_weights(weights(1))
    played.add("late", asked(tenant="c"))
    played.add("late too", asked(tenant="d"))
    played.drain()
    for request_id in ("early", "follower"):
        assert_got(played, request_id, BASE)
    for request_id in ("late", "late too"):
        assert_got(played, request_id, TRAINED)
    assert played.outcome("late").reused == 0
    assert played.outcome("late too").reused == 36
    assert_holds_only_current(played.engine)


# Several changes


def test_two_updates_in_a_row_are_made_in_order_between_their_requests() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.add("first", asked())
    played.step()
    engine.update_weights(weights(1))
    played.add("second", asked())
    played.step()
    engine.update_weights(weights(2))
    played.add("third", asked())
    assert engine.num_rollouts_waiting == 2
    assert engine.generation == 2
    assert len({engine.namespace, *engine.cache.tree.roots()}) >= 1
    played.drain()
    assert engine.num_rollouts_waiting == 0
    for request_id, revision in zip(
        ("first", "second", "third"), (BASE, TRAINED, TRAINED_MORE), strict=True
    ):
        assert_got(played, request_id, revision)
        assert played.outcome(request_id).reused == 0
    assert_holds_only_current(engine)


def test_of_two_updates_in_a_row_with_nobody_between_both_are_made() -> None:
    """The second names fewer tensors: what the first changed must be there below."""
    name = "model.layers.1.mlp.down_proj.weight"
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.add("early", asked())
    played.step()
    played.engine.update_weights({n: t for n, t in weights(1).items() if n != name})
    played.engine.update_weights({name: weights(1)[name]})
    played.add("late", asked())
    played.drain()
    assert_got(played, "early", BASE)
    assert_got(played, "late", TRAINED)


@pytest.mark.parametrize("second", [InFlight.RESTART, InFlight.ABORT], ids=str)
def test_a_second_update_may_hurry_the_first(second: InFlight) -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.add("early", asked())
    played.step()
    engine.update_weights(weights(1))
    played.add("fenced", asked())
    played.step()
    engine.update_weights(weights(2), in_flight=second)
    assert engine.num_rollouts_waiting == 0, "nobody of before is left"
    played.add("late", asked())
    played.drain()
    assert_got(played, "late", TRAINED_MORE)
    for request_id in ("early", "fenced"):
        if second is InFlight.ABORT:
            reason = played.completions[request_id].finish_reason
            assert reason is FinishReason.REPLACED
        else:
            assert_got(played, request_id, TRAINED_MORE)
            assert played.completions[request_id].num_restarts == 1
    assert_holds_only_current(engine)


def test_going_back_to_old_weights_does_not_bring_old_kv_back() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    seen = {played.engine.namespace}
    played.run("0", asked())
    for round_, index in enumerate((1, 0, 1, 0), start=1):
        played.engine.update_weights(weights(index))
        assert played.engine.namespace not in seen
        seen.add(played.engine.namespace)
        assert played.run(str(round_), asked()).reused == 0
        assert_got(played, str(round_), (BASE, TRAINED)[index])
        assert played.run(f"{round_} again", asked()).reused > 0


def test_a_restart_while_everybody_waits_for_an_update_runs_on_the_newest(
    shelf: Shelf,
) -> None:
    """An adapter is reloaded for requests that are behind a fence, and before it."""
    one, two = shelf.adapter(seed=1), shelf.adapter(seed=2, r=2)
    revision = replace(BASE, adapters=(("x", one, 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.add("base", asked())
    played.add("adapted", asked(adapter="x"))
    played.step()
    engine.update_weights(weights(1))
    played.add("behind", asked(adapter="x"))
    engine.reload_adapter("x", two, in_flight=InFlight.RESTART)
    played.drain()
    new = replace(TRAINED, adapters=(("x", two, 1.0),))
    assert_got(played, "base", BASE)
    for request_id in ("adapted", "behind"):
        assert_got(played, request_id, new)
    assert_holds_only_current(engine)


def test_a_request_of_an_unloaded_adapter_restarts_on_what_it_had(shelf: Shelf) -> None:
    """Its adapter is nobody's any more, but the weights below it are new."""
    one = shelf.adapter(seed=1)
    revision = replace(BASE, adapters=(("x", one, 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    played.add("early", asked(adapter="x", num_samples=2))
    while played.engine.scheduler.num_running < 2:
        played.step()
    played.engine.unload_adapter("x")
    played.engine.update_weights(weights(1), in_flight=InFlight.RESTART)
    played.drain()
    assert_got(played, "early", replace(TRAINED, adapters=revision.adapters))
    assert played.engine._served.adapters.loras == {}
    assert_holds_only_current(played.engine)


def test_every_sample_may_be_restarted_again_and_again() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.add("r", asked(num_samples=3))
    for index in (1, 2, 1):
        for _ in range(5):
            played.step()
        played.engine.update_weights(weights(index), in_flight=InFlight.RESTART)
    played.drain()
    assert_got(played, "r", TRAINED)
    for sample_id in played.sample_ids("r"):
        completion = played.completions[sample_id]
        assert completion.num_restarts == 3
        counts = completion.counts
        assert counts.reused + counts.computed + counts.inherited == len(PROMPT)
    restarts = [e for e in played.events if isinstance(e, RequestRestarted)]
    assert len(restarts) >= 3


def test_those_that_begin_again_share_what_they_compute() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.add("early", asked(num_samples=2))
    while played.engine.scheduler.num_running < 2:
        played.step()
    played.engine.update_weights(weights(1), in_flight=InFlight.RESTART)
    played.drain()
    reused = [played.outcome(s).reused for s in played.sample_ids("early")]
    assert sorted(reused) == [0, 36], "they are two requests from now on"
    assert played.run("late", asked()).reused == 36
    assert_got(played, "late", TRAINED)


def test_cancelled_while_it_waits_behind_a_fence() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    played.add("early", asked())
    played.step()
    played.engine.update_weights(weights(1))
    played.add("fenced", asked())
    played.add("late", asked())
    played.step()
    assert played.engine.cancel(RequestId("fenced"))
    assert played.engine.cancel(RequestId("early"))
    assert played.engine.num_rollouts_waiting == 0, "nobody of before is left"
    played.drain()
    assert_got(played, "late", TRAINED)


def test_the_last_request_of_before_may_end_by_another_change(shelf: Shelf) -> None:
    """Then the change it held up is due, whoever asks next."""
    revision = replace(BASE, adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    played.add("early", asked(adapter="x"))
    played.step()
    played.engine.update_weights(weights(1))
    played.engine.unload_adapter("x", in_flight=InFlight.ABORT)
    played.drain()
    assert played.engine.num_rollouts_waiting == 0
    played.run("late", asked())
    assert_got(played, "late", TRAINED)


def test_a_step_that_fails_lets_the_waiting_update_through() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.add("early", asked())
    played.step()
    engine.update_weights(weights(1))

    def fail(module: torch.nn.Module, args: Any) -> None:
        raise RuntimeError("the forward pass fails")

    hook = engine.loaded.model.register_forward_pre_hook(fail)
    played.step()
    hook.remove()
    assert played.completions["early"].finish_reason is FinishReason.FAILED
    assert engine.num_rollouts_waiting == 0
    played.run("late", asked())
    assert_got(played, "late", TRAINED)
    assert_holds_only_current(engine)


# Changes while a step runs


def refused_changes(shelf: Shelf) -> dict[str, Callable[[Engine], object]]:
    folder = shelf.adapter(seed=1)
    return {
        "update_weights": lambda e: e.update_weights(weights(1)),
        "load_adapter": lambda e: e.load_adapter("y", folder),
        "reload_adapter": lambda e: e.reload_adapter("x"),
        "unload_adapter": lambda e: e.unload_adapter("x"),
        "update_numerics": lambda e: e.update_numerics("tolerant"),
        "reset": lambda e: e.reset(),
        "recheck": lambda e: e.recheck(),
    }


CHANGES = (
    "update_weights",
    "load_adapter",
    "reload_adapter",
    "unload_adapter",
    "update_numerics",
    "reset",
    "recheck",
)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_on_logits_is_refused_and_harms_nobody(
    name: str, shelf: Shelf
) -> None:
    revision = replace(BASE, adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16, recheck_share=1.0))
    engine = played.engine
    change = refused_changes(shelf)[name]
    note, refused = engine.on_logits, []
    assert note is not None

    def meddle(sample_id: RequestId, index: int, row: torch.Tensor) -> None:
        note(sample_id, index, row)
        with pytest.raises(ConfigError, match="was called inside on_logits"):
            change(engine)
        refused.append(sample_id)

    engine.on_logits = meddle
    before = (engine.generation, engine.identity)
    played.add("one", asked())
    played.add("two", asked(tokens(random_ids(11, seed=3)), adapter="x"))
    played.drain()
    assert len(refused) == 16
    assert before == (engine.generation, engine.identity)
    for request_id in ("one", "two"):
        assert_got(played, request_id, revision)
    assert_idle(engine)


def test_a_change_refused_in_on_logits_costs_its_sample_at_most() -> None:
    """The error is raised to whoever made the call; batch mates know nothing of it."""
    played = play(BASE.engine(block_size=4, token_budget=64))
    engine = played.engine
    note = engine.on_logits
    assert note is not None

    def meddle(sample_id: RequestId, index: int, row: torch.Tensor) -> None:
        note(sample_id, index, row)
        if sample_id == "meddler":
            engine.update_weights(weights(1))

    engine.on_logits = meddle
    played.add("meddler", asked(tokens(random_ids(11, seed=3))))
    played.add("mate", asked(tokens(random_ids(12, seed=4))))
    for _ in range(50):
        try:
            played.drain()
        except StemKVError:
            continue
        break
    assert_got(played, "mate", BASE)
    assert_idle(engine)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_inside_on_event_is_refused_or_made_and_harms_nobody(
    name: str, shelf: Shelf
) -> None:
    revision = replace(BASE, adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    engine = played.engine
    change = refused_changes(shelf)[name]
    num_calls = 0

    def meddle(event: Any) -> None:
        nonlocal num_calls
        played.events.append(event)
        num_calls += 1
        if num_calls == 5:
            try:
                change(engine)
            except ConfigError:
                return

    engine.on_event = meddle
    played.add("one", asked(num_samples=2))
    played.add("two", asked(tokens(random_ids(11, seed=3)), adapter="x"))
    played.drain()
    assert num_calls > 5
    assert_got(played, "one", revision)
    assert_got(played, "two", revision)
    assert_idle(engine)


@pytest.mark.parametrize("policy", [InFlight.RESTART, InFlight.ABORT], ids=str)
def test_an_update_inside_on_event_leaves_a_sound_engine(policy: InFlight) -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    num_calls = 0

    def meddle(event: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            try:
                engine.update_weights(weights(1), in_flight=policy)
            except ConfigError:
                return

    engine.on_event = meddle
    played.add("one", asked(num_samples=2))
    played.add("two", asked(tokens(random_ids(11, seed=3))))
    played.drain()
    assert set(played.completions) == {"one", "one#1", "two"}
    engine.on_event = None
    is_new = engine.generation == 1
    played.run("late", asked())
    assert_got(played, "late", TRAINED if is_new else BASE)
    assert_idle(engine)


def test_an_error_in_on_event_loses_no_completion() -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine

    def fail(event: Any) -> None:
        if type(event).__name__ == "RequestFinished":
            engine.on_event = None
            raise ValueError("a defect of the caller")

    engine.on_event = fail
    played.add("one", asked())
    for _ in range(60):
        try:
            played.drain()
        except ValueError:
            continue
        break
    assert_got(played, "one", BASE)
    assert_idle(engine)


# Failed changes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_a_reload_of_broken_files_leaves_the_old_version_in_service(
    policy: InFlight, shelf: Shelf, tmp_path: Path
) -> None:
    one = shelf.adapter(seed=1)
    revision = replace(BASE, adapters=(("x", one, 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.run("warm", asked(adapter="x"))
    played.add("in flight", asked(tokens(random_ids(30, seed=4)), adapter="x"))
    played.step()
    (tmp_path / CONFIG).write_bytes((one / CONFIG).read_bytes())
    (tmp_path / WEIGHTS).write_bytes((one / WEIGHTS).read_bytes()[:-10])
    before = (engine.generation, engine.adapters(), engine.namespace_of("x"))
    for broken in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BrokenAdapter):
            engine.reload_adapter("x", broken, in_flight=policy)
    with pytest.raises(ConfigError, match="scale"):
        engine.reload_adapter("x", scale=-1.0, in_flight=policy)
    assert before == (engine.generation, engine.adapters(), engine.namespace_of("x"))
    played.drain()
    assert_got(played, "in flight", revision)
    assert played.run("again", asked(adapter="x")).reused > 0
    # The folder it was read from is still the one that a bare reload reads.
    engine.reload_adapter("x")
    played.run("reloaded", asked(adapter="x"))
    assert_got(played, "reloaded", revision)


def test_numerics_that_are_unknown_change_nothing() -> None:
    played = play(BASE.engine(block_size=4))
    engine = played.engine
    played.run("warm", asked())
    before = (engine.generation, engine.identity)
    with pytest.raises(ConfigError, match="numerics"):
        engine.update_numerics("fast")
    assert before == (engine.generation, engine.identity)
    assert played.run("again", asked()).reused > 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.value)
def test_to_tolerant_and_back_the_exact_ones_are_exact(policy: InFlight) -> None:
    played = play(BASE.engine(block_size=4, token_budget=16))
    engine = played.engine
    played.add("early", asked())
    played.step()
    played.step()
    engine.update_numerics("tolerant", in_flight=policy)
    tolerant = replace(BASE, numerics="tolerant")
    assert engine.identity.numerics_class == "tolerant"
    played.add("between", asked())
    played.step()
    engine.update_numerics("exact", in_flight=policy)
    played.add("late", asked())
    played.drain()
    assert_got(played, "late", BASE)
    if policy is InFlight.FINISH:
        assert_got(played, "early", BASE)
        assert_got(played, "between", tolerant)
        assert played.outcome("late").reused == 0
    elif policy is InFlight.RESTART:
        assert_got(played, "early", BASE)
        assert_got(played, "between", BASE)
        assert played.completions["early"].num_restarts == 2
    assert_holds_only_current(engine)


def test_unloading_cannot_restart_anybody(shelf: Shelf) -> None:
    revision = replace(BASE, adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4, token_budget=16))
    played.add("r", asked(adapter="x"))
    played.step()
    with pytest.raises(ConfigError, match="FINISH or ABORT"):
        played.engine.unload_adapter("x", in_flight=InFlight.RESTART)
    played.drain()
    assert_got(played, "r", revision)


# A machine


PREFIXES = [random_ids(24, seed=s) for s in (11, 12)]
ADAPTED = (None, None, "x", "y")


class Rollout(RuleBasedStateMachine):
    """Requests and changes in any order; `state` is what a request of now runs on."""

    shelf: Shelf  # set by the test

    def __init__(self) -> None:
        super().__init__()
        self.index = 0
        self.contents: dict[str, tuple[int, float]] = {}
        self.num_added = 0
        # What each request in flight or ended must have run on, and whether it may
        # have been cut short.
        self.runs_on: dict[str, tuple[int, tuple[int, float] | None]] = {}
        self.is_cut: set[str] = set()
        self.old: set[bytes] = set()
        self.checked: set[str] = set()

    @initialize(
        num_blocks=st.integers(14, 40), token_budget=st.sampled_from((9, 16, 64))
    )
    def start(self, num_blocks: int, token_budget: int) -> None:
        self.played = play(
            BASE.engine(num_blocks=num_blocks, block_size=4, token_budget=token_budget)
        )
        self.engine = self.played.engine
        self.engine.declare_public(tokens(PREFIXES[0][:10]))

    @rule(
        stem=st.integers(0, 1),
        cut=st.integers(0, 24),
        tail=st.integers(1, 9),
        name=st.sampled_from(ADAPTED),
        tenant=st.sampled_from("aab"),
        num_samples=st.sampled_from((1, 1, 1, 2)),
        start_position=st.sampled_from((0, 0, 0, 5)),
    )
    def add(
        self,
        stem: int,
        cut: int,
        tail: int,
        name: str | None,
        tenant: str,
        num_samples: int,
        start_position: int,
    ) -> None:
        ids = PREFIXES[stem][:cut] + random_ids(tail, seed=tail)
        what = asked(
            tokens(ids),
            num_samples=num_samples,
            max_new_tokens=4,
            adapter=name,
            tenant=tenant,
            start_position=start_position,
        )
        request_id = f"r{self.num_added}"
        if name is not None and name not in self.contents:
            with pytest.raises(UnknownAdapter):
                self.played.add(request_id, what)
            return
        self.num_added += 1
        self.played.add(request_id, what)
        content = None if name is None else self.contents[name]
        for sample_id in self.played.sample_ids(request_id):
            self.runs_on[sample_id] = (self.index, content)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.played.step()

    @precondition(lambda self: self.num_added)
    @rule(pick=st.integers(0, 50))
    def cancel(self, pick: int) -> None:
        request_id = f"r{pick % self.num_added}"
        self.engine.cancel(RequestId(request_id))
        self.is_cut.update(self.played.sample_ids(request_id))

    @rule(
        name=st.sampled_from("xy"),
        content=st.integers(1, 2),
        scale=st.sampled_from((1.0, 0.5)),
        policy=st.sampled_from(POLICIES),
    )
    def load(self, name: str, content: int, scale: float, policy: InFlight) -> None:
        folder = self.folder(content)
        in_flight = self.in_flight(name)
        before = namespaces(self.engine)
        if name in self.contents:
            self.engine.reload_adapter(name, folder, scale=scale, in_flight=policy)
        else:
            self.engine.load_adapter(name, folder, scale=scale)
            policy = InFlight.FINISH
        old = self.contents.get(name)
        self.contents[name] = (content, scale)
        self.retired(before)
        for sample_id in in_flight:
            # Those of versions before the last one were left to finish.
            if self.runs_on[sample_id][1] is not old or old is None:
                continue
            self.apply(policy, sample_id)

    @precondition(lambda self: self.contents)
    @rule(name=st.sampled_from("xy"), aborts=st.booleans())
    def unload(self, name: str, aborts: bool) -> None:
        if name not in self.contents:
            return
        before = namespaces(self.engine)
        in_flight = self.in_flight(name)
        policy = InFlight.ABORT if aborts else InFlight.FINISH
        self.engine.unload_adapter(name, in_flight=policy)
        old = self.contents.pop(name)
        self.retired(before)
        for sample_id in in_flight:
            if self.runs_on[sample_id][1] is old:
                self.apply(policy, sample_id)

    @rule(index=st.integers(0, 2), policy=st.sampled_from(POLICIES))
    def update_weights(self, index: int, policy: InFlight) -> None:
        before = namespaces(self.engine)
        in_flight = self.in_flight()
        generation = self.engine.generation
        self.engine.update_weights(weights(index), in_flight=policy)
        assert self.engine.generation == generation + 1
        self.index = index
        self.retired(before)
        for sample_id in in_flight:
            self.apply(policy, sample_id)

    @rule()
    def reset(self) -> None:
        before = self.engine.usage()
        report = self.engine.reset()
        assert report.num_freed_blocks == before.num_cached_blocks
        assert self.engine.usage().num_cached_blocks == 0

    @invariant()
    def nothing_of_the_old_is_left(self) -> None:
        if not hasattr(self, "engine"):
            return
        assert not self.old & set(self.engine.cache.tree.roots())
        for sample_id in sorted(set(self.played.completions) - self.checked):
            self.check(sample_id)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.played.drain()
        self.nothing_of_the_old_is_left()
        assert self.checked == set(self.runs_on)
        assert_holds_only_current(self.engine)
        assert set(self.engine._served.adapters.loras) == {
            a.version for a in self.engine.adapters()
        }
        self.add(0, 5, 3, None, "b", 1, 0)  # whatever waits is made before this one
        self.played.drain()
        assert self.engine.num_rollouts_waiting == 0
        self.nothing_of_the_old_is_left()

    # What must be

    def folder(self, content: int) -> Path:
        return (
            self.shelf.adapter(seed=1, target_modules=["q_proj", "down_proj"])
            if content == 1
            else self.shelf.adapter(seed=2, r=2)
        )

    def retired(self, before: set[bytes]) -> None:
        self.old |= before - namespaces(self.engine)
        self.old -= namespaces(self.engine)

    def in_flight(self, adapter: str | None = None) -> list[str]:
        ended = {child_id(c.request_id, c.sample) for c in self.engine._outbox._ended}
        return [
            sample_id
            for sample_id in self.runs_on
            if sample_id not in self.played.completions
            and sample_id not in ended
            and (adapter is None or self.asked(sample_id).adapter == adapter)
        ]

    def asked(self, sample_id: str) -> Asked:
        return self.played.asked[sample_id.partition("#")[0]]

    def apply(self, policy: InFlight, sample_id: str) -> None:
        if policy is InFlight.ABORT:
            self.is_cut.add(sample_id)
        elif policy is InFlight.RESTART:
            name = self.asked(sample_id).adapter
            content = self.runs_on[sample_id][1]
            if name is not None:
                content = self.contents.get(name, content)
            self.runs_on[sample_id] = (self.index, content)

    def check(self, sample_id: str) -> None:
        self.checked.add(sample_id)
        index, content = self.runs_on[sample_id]
        what = self.asked(sample_id)
        adapters: tuple[tuple[str, Path, float], ...] = ()
        if content is not None:
            adapters = (("z", self.folder(content[0]), content[1]),)
            what = replace(what, adapter="z")
        revision = replace((BASE, TRAINED, TRAINED_MORE)[index], adapters=adapters)
        sample = int(sample_id.partition("#")[2] or 0)
        wanted = expected(revision, replace(what, tenant="a"))[sample]
        actual = self.played.outcome(sample_id)
        if actual.completion.finish_reason is FinishReason.LENGTH:
            actual.assert_same_as(wanted)
        else:
            assert sample_id in self.is_cut
            actual.assert_begins(wanted)


def run_machine(shelf: Shelf, *, seed: int, max_examples: int, num_steps: int) -> None:
    machine = type("SeededRollout", (Rollout,), {"shelf": shelf})
    run_state_machine_as_test(
        hypothesis.seed(seed)(machine),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
            phases=set(Phase) - {Phase.explain},  # tracing every line costs minutes
            print_blob=True,
        ),
    )


def test_no_sequence_of_changes_serves_anything_of_before(shelf: Shelf) -> None:
    run_machine(shelf, seed=0, max_examples=10, num_steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 4))
def test_no_long_sequence_of_changes_serves_anything_of_before(
    shelf: Shelf, seed: int
) -> None:
    run_machine(shelf, seed=seed, max_examples=100, num_steps=60)
