"""News of a request come in the order it happened in, whoever calls what meanwhile."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stemkv.core import FinishReason
from stemkv.core.books.entry import LedgerEntry
from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestFinished,
    TokenSampled,
)
from stemkv.core.schedule.request import RequestId, child_id
from stemkv.engine import Completion, Engine, InFlight, LoadedModel, SamplingParams
from stemkv.engine.delta import Delta, TextDelta, TextEnded, TextTakenBack
from tests.engine.lives import SECONDS
from tests.engine.models import (
    ByteTokenizer,
    build_engine,
    random_ids,
    tiny,
    tiny_once,
    tokens,
)
from tests.engine.serving import assert_idle

PROMPT = tokens([*b"a prompt of bytes"])


def bytewise() -> LoadedModel:
    loaded = tiny_once("llama-group1", torch.float32)
    return replace(loaded, tokenizer=ByteTokenizer())


class Ear:
    """Hears everything of one engine, in one list."""

    def __init__(self, engine: Engine) -> None:
        self.news: list[Event | Delta | LedgerEntry] = []
        engine.on_event = self.news.append
        engine.on_delta = self.news.append
        engine.on_entry = self.news.append

    def deltas(self, request_id: str = "r", sample: int = 0) -> list[Delta]:
        return [
            each
            for each in self.news
            if isinstance(each, Delta)
            and (each.request_id, each.sample) == (request_id, sample)
        ]

    def text(self, request_id: str = "r", sample: int = 0) -> str:
        """What a client has on its screen."""
        shown = ""
        for each in self.deltas(request_id, sample):
            shown = "" if isinstance(each, TextTakenBack) else shown + each.text
        return shown


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**dict(max_new_tokens=20, temperature=1.0) | values)


# Text


def test_each_token_has_its_delta_and_the_end_has_one() -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)
    engine.add(PROMPT, params(num_samples=2), request_id="r")

    for completion in engine.drain():
        *given_out, end = ear.deltas("r", completion.sample)
        assert [d.index for d in given_out] == list(range(20))  # type: ignore[union-attr]
        told = tuple(d.token for d in given_out)  # type: ignore[union-attr]
        assert told == completion.token_ids
        assert isinstance(end, TextEnded)
        assert end.finish_reason is completion.finish_reason
        assert ear.text("r", completion.sample) == completion.text != ""


@pytest.mark.parametrize("seed", range(4))
def test_texts_told_are_the_text_of_the_completion_and_hold_no_stop_string(
    seed: int,
) -> None:
    """One that begins and goes on otherwise, and one that comes."""
    free = build_engine(bytewise()).generate([PROMPT], params(seed=seed))[0].text
    stop = (free[1:3] + "never", free[5:8])
    engine = build_engine(bytewise())
    ear = Ear(engine)
    wanted = params(seed=seed, stop=stop, allows_stop_in_prompt=True)
    engine.add(PROMPT, wanted, request_id="r")

    shown = ""
    (completion,) = engine.drain()
    for delta in ear.deltas():
        assert not isinstance(delta, TextTakenBack)
        shown += delta.text
        assert completion.text.startswith(shown)
    assert shown == completion.text
    assert not any(each in shown for each in stop)


def say(patched: pytest.MonkeyPatch, ids: Iterable[int]) -> None:
    """Let the one sample in flight say this."""
    order = iter(ids)
    monkey = "stemkv.engine.samples.choose_token"
    patched.setattr(monkey, lambda logits, params, generator: next(order))


def test_what_may_become_a_stop_string_is_held_back_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spelled(ByteTokenizer):
        letters = "abSTxSTOPyz"

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            return "".join(self.letters[i % 11] for i in ids)

    loaded = replace(bytewise(), tokenizer=Spelled())
    engine = build_engine(loaded)
    ear = Ear(engine)
    say(monkeypatch, range(11))
    engine.add(
        PROMPT,
        SamplingParams(stop=("STOP",), allows_stop_in_prompt=True),
        request_id="r",
    )
    (completion,) = engine.drain()
    texts = [each.text for each in ear.deltas()]
    assert texts == ["a", "b", "", "", "STx", "", "", "", "", ""]
    assert completion.text == "abSTx"


def test_half_a_character_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)
    say(monkeypatch, "\N{EURO SIGN}!".encode())
    engine.add(PROMPT, SamplingParams(max_new_tokens=4), request_id="r")
    engine.drain()
    assert [each.text for each in ear.deltas()] == ["", "", "\N{EURO SIGN}", "!", ""]


def test_a_restart_takes_back_what_was_told() -> None:
    engine = build_engine(replace(tiny("llama-group1"), tokenizer=ByteTokenizer()))
    ear = Ear(engine)
    engine.add(PROMPT, params(), request_id="r")
    for _ in range(5):
        engine.step()
    name = "model.norm.weight"
    weight = engine.loaded.model.get_parameter(name).detach() * 1.1

    engine.update_weights({name: weight}, in_flight=InFlight.RESTART)
    (completion,) = engine.drain()

    kinds = [type(each) for each in ear.deltas()]
    assert kinds.index(TextTakenBack) == 5
    assert kinds.count(TextDelta) == 5 + 20
    assert ear.text() == completion.text


def test_a_cancelled_step_s_last_token_is_in_neither_tokens_nor_text() -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)

    def cancel(sample_id: RequestId, index: int, row: torch.Tensor) -> None:
        if index == 6:
            engine.cancel("r")

    engine.on_logits = cancel
    engine.add(PROMPT, params(), request_id="r")
    (completion,) = engine.drain()
    assert len(completion.token_ids) == 6
    spelled = ByteTokenizer().decode(completion.token_ids, skip_special_tokens=True)
    assert ear.text() == completion.text == spelled


# Log-probabilities


@pytest.mark.parametrize("num_top", [0, 1, 5, 1000])
def test_log_probabilities_are_of_the_model_s_own_distribution(num_top: int) -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)
    rows: list[torch.Tensor] = []
    engine.on_logits = lambda sample_id, index, row: rows.append(row.clone())
    engine.add(
        PROMPT, params(top_k=3, temperature=0.3, num_logprobs=num_top), request_id="r"
    )
    engine.drain()

    given_out = [d for d in ear.deltas() if isinstance(d, TextDelta)]
    assert len(given_out) == len(rows) == 20
    for delta, row in zip(given_out, rows, strict=True):
        wanted = row.double().log_softmax(dim=0)
        assert delta.logprob == pytest.approx(float(wanted[delta.token]), abs=1e-4)
        values = [value for _, value in delta.top_logprobs]
        assert len(values) == min(num_top, len(row))
        assert values == pytest.approx(
            wanted.topk(len(values)).values.tolist(), abs=1e-4
        )
        for token, value in delta.top_logprobs:
            assert value == pytest.approx(float(wanted[token]), abs=1e-4)


def test_nobody_gets_log_probabilities_without_asking() -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)
    engine.add(PROMPT, params(), request_id="r")
    engine.drain()
    for delta in ear.deltas():
        if isinstance(delta, TextDelta):
            assert (delta.logprob, delta.top_logprobs) == (None, ())


# Order


def assert_in_order(ear: Ear, completions: list[Completion]) -> None:
    """Of each sample: its tokens by index, each with its delta at once, then its end."""
    events: dict[str, list[Any]] = defaultdict(list)
    for each in ear.news:
        if isinstance(each, TokenSampled | RequestFinished | RequestAborted):
            events[each.request_id].append(each)
        elif isinstance(each, Delta):
            events[child_id(each.request_id, each.sample)].append(each)
    for completion in completions:
        name = child_id(completion.request_id, completion.sample)
        if completion.sample and not completion.token_ids and len(events[name]) == 1:
            assert isinstance(events[name][0], TextEnded)
            continue  # it had not split off: the end of its request was its own
        *sampled, end, text_end = events[name]
        assert isinstance(end, RequestFinished | RequestAborted)
        assert isinstance(text_end, TextEnded)
        assert len(sampled) == 2 * len(completion.token_ids)
        for index in range(len(completion.token_ids)):
            event, delta = sampled[2 * index : 2 * index + 2]
            assert isinstance(event, TokenSampled)
            assert isinstance(delta, TextDelta)
            assert event.index == delta.index == index
            assert event.token == delta.token == completion.token_ids[index]


@pytest.mark.parametrize("when", [TokenSampled, TextDelta])
def test_a_listener_that_cancels_hears_the_end_after_all_that_was_before(
    when: type,
) -> None:
    engine = build_engine(bytewise(), costs=SECONDS)
    ear = Ear(engine)

    def cancel(each: Any) -> None:
        ear.news.append(each)
        # All others, on the first piece of news of the first of them.
        if isinstance(each, when) and each.index == 3:
            for name in "abc":
                engine.cancel(name)

    engine.on_event = engine.on_delta = cancel
    for name in "abc":
        own = tokens(random_ids(9, seed=ord(name)))  # nobody waits for another
        engine.add(own, params(seed=ord(name)), request_id=name)

    completions = engine.drain()

    assert {c.finish_reason for c in completions} == {FinishReason.CANCELLED}
    assert [len(c.token_ids) for c in completions] == [4, 4, 4]
    assert_in_order(ear, completions)
    entries = [each for each in ear.news if isinstance(each, LedgerEntry)]
    assert len(entries) == 3
    assert_idle(engine)


@pytest.mark.parametrize("seed", range(6))
def test_listeners_that_add_and_cancel_at_random_hear_everything_in_order(
    seed: int,
) -> None:
    draw = random.Random(seed)
    engine = build_engine(bytewise(), num_blocks=24, block_size=4, costs=SECONDS)
    ear = Ear(engine)
    num_added = 0

    def add() -> None:
        nonlocal num_added
        num_added += 1
        engine.add(
            tokens(random_ids(draw.randint(2, 20), seed=draw.randrange(3))),
            params(max_new_tokens=draw.randint(1, 9), num_samples=draw.randint(1, 2)),
            request_id=f"r{num_added}",
        )

    def meddle(each: Any) -> None:
        ear.news.append(each)
        if draw.random() < 0.1 and num_added < 25:
            add()
        if draw.random() < 0.1:
            engine.cancel(f"r{draw.randint(1, num_added)}")

    engine.on_event = engine.on_delta = engine.on_entry = meddle
    for _ in range(6):
        add()
    completions = engine.drain()
    assert any(c.finish_reason is FinishReason.CANCELLED for c in completions)
    assert_in_order(ear, completions)
    assert_idle(engine)


def test_news_of_a_cancel_within_a_step_wait_for_its_end() -> None:
    engine = build_engine(bytewise(), max_num_running=1)
    ear = Ear(engine)
    heard: list[int] = []

    def cancel_the_other(sample_id: RequestId, index: int, row: torch.Tensor) -> None:
        if index == 1:
            num_before = len(ear.news)
            engine.cancel("other")
            heard.append(len(ear.news) - num_before)

    engine.on_logits = cancel_the_other
    engine.add(PROMPT, params(), request_id="r")
    engine.add(PROMPT, params(), request_id="other")
    completions = engine.drain()
    assert heard == [0]
    assert_in_order(ear, completions)


@pytest.mark.parametrize("listener", ["on_event", "on_delta", "on_entry"])
def test_a_listener_that_fails_harms_no_other(listener: str) -> None:
    engine = build_engine(bytewise(), costs=SECONDS)
    ear = Ear(engine)

    def fail(each: Any) -> None:
        raise ValueError("a defect of the caller")

    setattr(engine, listener, fail)
    engine.add(PROMPT, params(), request_id="r")
    (completion,) = engine.drain()
    assert len(completion.token_ids) == 20
    kinds: dict[str, Callable[[Any], bool]] = {
        "on_event": lambda e: isinstance(e, RequestFinished),
        "on_delta": lambda e: isinstance(e, TextEnded),
        "on_entry": lambda e: isinstance(e, LedgerEntry),
    }
    for name, is_kind in kinds.items():
        assert sum(map(is_kind, ear.news)) == (name != listener)


def test_a_listener_that_is_interrupted_misses_one_piece_of_news() -> None:
    engine = build_engine(bytewise())
    ear = Ear(engine)

    def interrupt(each: Any) -> None:
        if isinstance(each, TokenSampled) and each.index == 4:
            engine.on_event = ear.news.append
            raise KeyboardInterrupt
        ear.news.append(each)

    engine.on_event = interrupt
    engine.add(PROMPT, params(), request_id="r")
    with pytest.raises(KeyboardInterrupt):
        engine.drain()
    engine.drain()
    heard = [each.index for each in ear.news if isinstance(each, TokenSampled)]
    assert heard == [i for i in range(20) if i != 4]
    assert [type(each) for each in ear.deltas()] == [TextDelta] * 20 + [TextEnded]
