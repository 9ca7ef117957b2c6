"""The audit of exactness holds where the engine is sound, and finds the ones that aren't.

Each broken engine here makes one mistake that caches are known for. An audit that lets
one pass would be worth nothing, whatever it says about ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from stemkv.audit.exact.audit import ExactOptions, audit_exact
from stemkv.audit.exact.bits import Tally, checksum, num_differing
from stemkv.audit.exact.naive import reuse_by_hand
from stemkv.audit.exact.prompts import chats, passage
from stemkv.audit.verdict import AuditReport, Check, Verdict
from stemkv.engine import Engine, EngineConfig, LoadedModel, load_model
from stemkv.engine.numerics import EXACT, TOLERANT, Numerics
from stemkv.errors import ConfigError, InvariantError
from tests.engine.lora_files import make_adapter
from tests.engine.models import kv_bytes, tiny, tiny_once

WARM = "warm: the same prompt again"
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def model(dtype: torch.dtype = torch.float32) -> LoadedModel:
    return tiny_once("llama-group3-tied", dtype)


def run(
    loaded: LoadedModel, make_engine: Callable[..., Engine] = Engine, **options: Any
) -> AuditReport:
    return audit_exact(
        loaded,
        ExactOptions(**{"num_prompts": 2, **options}),
        lambda text: None,
        make_engine=make_engine,
    )


@cache
def audit(
    make_engine: Callable[..., Engine] = Engine,
    *,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> AuditReport:
    """Audit a tiny model; equal audits are run once for all tests."""
    return run(model(dtype), make_engine, **options)


def check(report: AuditReport, words: str) -> Check:
    (found,) = [c for c in report.checks if words in c.claim]
    return found


def verdicts(report: AuditReport) -> dict[str, Verdict]:
    """By state, where the claim names one."""
    return {c.claim.partition(": ")[2]: c.verdict for c in report.checks}


def comparable(report: AuditReport) -> dict[str, Any]:
    document = report.as_json()
    del document["method"]["time"]
    return document


# Sound engines


@pytest.mark.parametrize("numerics", ["exact", "tolerant"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_audit_holds_for_the_engine(dtype: torch.dtype, numerics: str) -> None:
    report = audit(dtype=dtype, numerics=numerics)

    assert [c for c in report.checks if c.verdict is not Verdict.HOLDS] == []
    assert report.verdict is Verdict.HOLDS
    assert len(report.data["states"]) == 14
    for state in report.data["states"]:
        assert state["num_values"] > 0
        assert min(state["proofs"].values()) > 0


def test_every_zero_stands_beside_a_control_that_is_none() -> None:
    report = audit(num_prompts=4)

    assert sum(c.is_control for c in report.checks) == 3
    naive, ours = (report.data["reuse"][name] for name in ("tolerant", "exact"))
    assert all(chat["num_differing_values"] > 0 for chat in naive)
    assert all(chat["num_differing_values"] == 0 for chat in ours)
    assert [c["num_prompt_tokens"] for c in naive] == [
        c["num_prompt_tokens"] for c in ours
    ]
    assert sum(chat["is_second_turn"] for chat in naive) == 2


def test_the_same_seed_gives_the_same_report() -> None:
    # Models of their own: an engine replaces the linears of the one it gets.
    first, second = (run(tiny(dtype=torch.bfloat16), seed=3) for _ in range(2))

    assert json.dumps(comparable(first)) == json.dumps(comparable(second))
    other = audit(dtype=torch.bfloat16, seed=4)
    assert other.verdict is Verdict.HOLDS
    assert other.data["reuse"] != first.data["reuse"]


@pytest.mark.parametrize("block_size", [4, 24])
def test_blocks_of_another_size_hold_as_well(block_size: int) -> None:
    report = audit(block_size=block_size)

    assert [c for c in report.checks if c.verdict is not Verdict.HOLDS] == []


def test_progress_tells_of_every_state() -> None:
    told: list[str] = []
    audit_exact(model(), ExactOptions(num_prompts=1), told.append)

    assert sum(text.startswith("state: ") for text in told) == 14


def test_adapters_of_the_user_are_attacked(tmp_path: Path) -> None:
    make_adapter(tmp_path / "own", seed=7)

    report = run(model(), adapters=(tmp_path / "own",))

    assert verdicts(report)["with adapters"] is Verdict.HOLDS
    assert report.method["adapters"] == "1 given"


def test_a_model_without_room_for_the_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="context of 1152 tokens"):
        run(model(), block_size=128)


# States that are not reached


def test_without_a_lack_of_blocks_the_states_that_need_it_are_inconclusive() -> None:
    report = audit(num_blocks=64)

    by_state = verdicts(report)
    short = {
        "prefix partly evicted",
        "prefix evicted and computed again",
        "preempted and resumed",
    }
    for state, verdict in by_state.items():
        wanted = Verdict.INCONCLUSIVE if state in short else Verdict.HOLDS
        assert verdict is wanted, state
    assert "not reached (preemptions" in check(report, "preempted").evidence
    assert report.verdict is Verdict.INCONCLUSIVE


def test_an_engine_without_reuse_proves_nothing() -> None:
    def without_reuse(
        loaded: LoadedModel, config: EngineConfig, **callbacks: Any
    ) -> Engine:
        settings = {name: getattr(config, name) for name in config.__slots__}
        settings["reuses_prefixes"] = False
        return Engine(loaded, EngineConfig(**settings), **callbacks)

    report = audit(without_reuse)

    assert verdicts(report)[WARM] is Verdict.INCONCLUSIVE
    assert check(report, "Damage").verdict is Verdict.INCONCLUSIVE
    assert report.verdict is Verdict.INCONCLUSIVE


def test_too_few_blocks_for_a_state_are_said_and_not_passed_over() -> None:
    report = audit(num_blocks=3)

    assert report.verdict is Verdict.INCONCLUSIVE
    assert "could not be tried: PromptTooLong" in check(report, WARM).evidence


# Engines that are broken


class Flipping(Engine):
    """A bit of the first block that is cached flips, once."""

    has_flipped = False

    def add(self, *arguments: Any, **keywords: Any) -> Any:
        word = {2: torch.int16, 4: torch.int32}[self.loaded.dtype.itemsize]
        for node in self.cache.tree.nodes():
            if node.num_blocks and not self.has_flipped:
                self.kv.keys[-1][node.block_ids[0]].view(word)[1, 0, 0] ^= 1
                self.has_flipped = True
        return super().add(*arguments, **keywords)


class NeverCopying(Engine):
    """Blocks that should be copied before they are written to are not."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.kv.copy = lambda copy: None  # type: ignore[method-assign]


class WritingInPlace(Engine):
    """Samples write into the block they share."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.cache.prepare_write = lambda *_: (True, None)  # type: ignore[method-assign]


class Ignoring(Engine):
    """One thing that a request says has no effect, not even on its key."""

    ignored = ""

    def add(self, *arguments: Any, **keywords: Any) -> Any:
        del keywords[self.ignored]
        return super().add(*arguments, **keywords)


class IgnoringStart(Ignoring):
    ignored = "start_position"


class IgnoringAdapter(Ignoring):
    ignored = "adapter"


class Failing(Engine):
    """What must never happen happens as soon as something could be reused."""

    def step(self) -> Any:
        if self.usage().num_cached_blocks:
            raise InvariantError("a block is lost")
        return super().step()


@pytest.mark.parametrize(
    "broken, states",
    [
        (Flipping, {WARM, "warm after unrelated traffic", "prefix partly evicted"}),
        (
            NeverCopying,
            {WARM, "hit at and beside block ends", "forked, copied on write"},
        ),
        (WritingInPlace, {"forked, copied on write"}),
        (IgnoringStart, {"start position other than 0"}),
        (IgnoringAdapter, {"with adapters"}),
        (Failing, {WARM}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_engine_is_found_where_it_is_broken(
    broken: type[Engine], states: set[str]
) -> None:
    report = audit(broken)

    by_state = verdicts(report)
    assert {by_state[state] for state in states} == {Verdict.BROKEN}
    assert report.verdict is Verdict.BROKEN


@pytest.mark.parametrize("broken", [NeverCopying, IgnoringStart])
def test_a_broken_engine_is_found_in_class_tolerant(broken: type[Engine]) -> None:
    report = audit(broken, numerics="tolerant", dtype=torch.bfloat16)

    assert report.verdict is Verdict.BROKEN


def test_what_does_not_depend_on_the_mistake_still_holds() -> None:
    by_state = verdicts(audit(IgnoringStart))

    assert by_state[WARM] is Verdict.HOLDS
    assert by_state["preempted and resumed"] is Verdict.HOLDS


def test_a_write_to_a_shared_block_is_found_by_its_checksum() -> None:
    report = audit(Flipping)

    found = check(report, "No branch writes to a shared block")
    assert found.verdict is Verdict.BROKEN
    data = report.data["branches"]
    changed = [b for b in data["before"] if data["before"][b] != data["after"][b]]
    assert len(changed) == 1


def test_a_last_bit_is_below_what_class_tolerant_can_tell() -> None:
    """Documented, so that nobody reads more into the class than it promises."""
    report = audit(Flipping, numerics="tolerant")

    assert verdicts(report)[WARM] is Verdict.HOLDS
    warm = next(s for s in report.data["states"] if s["state"] == WARM)
    assert warm["num_differing_values"] > 0


# Branches


def test_branches_share_the_prefix_and_own_the_rest() -> None:
    branches = audit().data["branches"]["branches"]

    stem = branches[0]["shared_blocks"]
    assert len(branches) == 6
    owned = [block for branch in branches for block in branch["own_blocks"]]
    assert len(owned) == len(set(owned))
    for branch in branches:
        assert branch["shared_blocks"] == stem[: len(branch["shared_blocks"])]
        num_blocks = len(branch["shared_blocks"]) + len(branch["own_blocks"])
        assert num_blocks == -(-branch["num_tokens"] // 16)
    # Two of three samples copied; the third keeps what nobody else holds any more.
    assert [len(branch["copies"]) for branch in branches] == [1, 1, 0, 0, 1, 1]
    (kept,) = {branch["copies"][0]["source"] for branch in branches[:2]}
    assert kept in branches[2]["own_blocks"]


# Reuse by hand


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reuse_differs_without_the_padding_rules_and_not_with_them(
    dtype: torch.dtype,
) -> None:
    loaded = model(dtype)
    Engine(loaded, EngineConfig(kv_memory_bytes=kv_bytes(loaded, 8, 16)))
    some = chats(loaded, 4, 0)

    def num_differing_values(numerics: Numerics) -> int:
        results = reuse_by_hand(
            loaded, some, numerics, num_tokens=4, seed=0, progress=lambda text: None
        )
        assert all(result.num_reused > 0 for result in results)
        assert all(result.tally.num_rows == 4 for result in results)
        return sum(result.tally.num_differing for result in results)

    assert num_differing_values(TOLERANT) > 0
    assert num_differing_values(EXACT) == 0


# Measures


def test_bits_are_compared_and_not_values() -> None:
    zero, minus = torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])
    nan = torch.tensor([float("nan"), 1.0])

    assert num_differing(zero, minus) == 1
    assert num_differing(nan, nan.clone()) == 0
    assert checksum(zero) != checksum(minus)


@pytest.mark.parametrize("nan_first", [True, False])
def test_nothing_is_worse_than_nan(nan_first: bool) -> None:
    truth = torch.ones(1, 2, 1, 1, 4)
    other = truth.clone()
    other[0, 0, 0, 0, 0] = float("nan")
    close = truth * 1.01
    tally = Tally()
    for each in (other, close) if nan_first else (close, other):
        tally.add_kv(truth, each)

    assert tally.worst_kv != tally.worst_kv
    total = Tally()
    total.add(tally)
    total.add(Tally())
    assert total.worst_kv != total.worst_kv


def test_a_changed_token_is_counted_with_the_lead_it_lost() -> None:
    tally = Tally()
    truth = torch.tensor([1.0, 0.75, 0.0])

    assert tally.add_logits(truth, torch.tensor([0.5, 0.75, 0.0]))
    assert not tally.add_logits(truth, torch.tensor([0.9, 0.75, 0.0]))
    assert (tally.num_rows, tally.num_changed_tokens) == (2, 1)
    assert tally.worst_gap == 0.25


# Prompts


def test_prompts_follow_from_the_seed() -> None:
    loaded = model()

    assert chats(loaded, 6, 1) == chats(loaded, 6, 1)
    assert chats(loaded, 6, 1) != chats(loaded, 6, 2)
    assert len({chat.topic for chat in chats(loaded, 50, 0)}) == 50


def test_passages_of_the_documentation_start_differently() -> None:
    starts = {passage(model(), index, 30) for index in range(20)}

    assert len(starts) == 20
    assert all(len(start) == 30 for start in starts)


# Options


@pytest.mark.parametrize(
    "option", [{"numerics": "fast"}, {"num_prompts": 0}, {"block_size": 2}], ids=str
)
def test_options_that_make_no_sense_are_refused(option: dict[str, Any]) -> None:
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        ExactOptions(**option)


# The embedded model


@pytest.mark.model
@pytest.mark.slow
def test_the_audit_holds_for_the_embedded_model() -> None:
    report = run(load_model(), num_prompts=4)

    assert report.verdict is Verdict.HOLDS


@pytest.mark.model
def test_realistic_prompts_have_80_to_160_tokens() -> None:
    for chat in chats(load_model(), 50, 0):
        num_answered = 16 if chat.is_second_turn else 0
        assert 80 <= chat.num_tokens + num_answered <= 160
