"""Brings a request into a chosen state, and says what bits it must get.

A `Played` engine keeps every row of logits that was sampled from, and checks scheduler
and cache after every step. `alone` says what a request must get on a model of given
weights with given adapters: on an engine of its own that reuses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stemkv.core import TokenIds
from stemkv.core.check import check_scheduler
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.request import Request, RequestId, RequestState, child_id
from stemkv.engine import (
    Completion,
    EmbeddedPrompt,
    Engine,
    LoadedModel,
    SamplingParams,
    wrap_model,
)
from tests.engine.lora_files import row_difference
from tests.engine.models import build_engine, build_model, random_ids, tokens

__all__ = [
    "BASE",
    "MODEL",
    "PROMPT",
    "STATES",
    "TRAINED",
    "TRAINED_MORE",
    "Asked",
    "Outcome",
    "Played",
    "Revision",
    "alone",
    "asked",
    "assert_got",
    "expected",
    "play",
    "revisions",
    "weights",
]

MODEL = "llama-group1"
PROMPT = tokens(random_ids(37, seed=1))

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Revision:
    """What a request runs on: weights, and the adapters by name."""

    weights: Weights | None = None  # None: as `build_model` makes them
    adapters: tuple[tuple[str, Path, float], ...] = ()  # name, folder, scale
    numerics: str = "exact"
    model: str = MODEL
    dtype: torch.dtype = torch.float32

    def load(self) -> LoadedModel:
        """Wrap a model of this revision that no engine has seen."""
        module = build_model(self.model, self.dtype)
        if self.weights is not None:
            module.load_state_dict(dict(self.weights))
        return wrap_model(module, name=self.model)

    def engine(self, **settings: Any) -> Engine:
        engine = build_engine(self.load(), numerics=self.numerics, **settings)
        for name, folder, scale in self.adapters:
            engine.load_adapter(name, folder, scale=scale)
        return engine


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What one request asks for."""

    prompt: TokenIds | EmbeddedPrompt
    params: SamplingParams
    adapter: str | None = None
    start_position: int = 0
    tenant: str = "a"


@dataclass(frozen=True)
class Outcome:
    """What one sample got: its end, and the rows it was sampled from."""

    completion: Completion
    rows: tuple[torch.Tensor, ...]

    @property
    def reused(self) -> int:
        return self.completion.counts.reused

    def assert_same_as(self, other: Outcome) -> None:
        """Equal tokens from equal rows, bit for bit, to the end."""
        self.assert_begins(other)
        assert self.completion.finish_reason is other.completion.finish_reason
        assert len(self.rows) == len(other.rows)

    def assert_begins(self, other: Outcome) -> None:
        """As far as it came, it is what the other got, bit for bit."""
        own = self.completion.token_ids
        assert own == other.completion.token_ids[: len(own)]
        assert len(self.rows) <= len(other.rows)
        for index, (left, right) in enumerate(zip(self.rows, other.rows, strict=False)):
            assert torch.equal(left, right), f"logits differ at output {index}"

    def differs_from(self, other: Outcome) -> bool:
        """Whether any row differs: what shows that a comparison could have failed."""
        return any(
            not torch.equal(left, right)
            for left, right in zip(self.rows, other.rows, strict=False)
        )


@dataclass
class Played:
    """An engine at which somebody looks after every step."""

    engine: Engine
    asked: dict[str, Asked] = field(default_factory=dict)  # by request id
    completions: dict[str, Completion] = field(default_factory=dict)  # by sample id
    events: list[Event] = field(default_factory=list)
    after_step: Callable[[], None] = lambda: None
    _rows: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine.on_logits = self._note_row
        self.engine.on_event = self.events.append

    def add(self, request_id: str, asked: Asked) -> None:
        self.engine.add(
            asked.prompt,
            asked.params,
            request_id=request_id,
            tenant=asked.tenant,
            adapter=asked.adapter,
            start_position=asked.start_position,
        )
        self.asked[request_id] = asked

    def step(self) -> None:
        self.note(self.engine.step())
        check_scheduler(self.engine.scheduler)
        self.after_step()

    def note(self, completions: tuple[Completion, ...] | list[Completion]) -> None:
        for completion in completions:
            sample_id = child_id(completion.request_id, completion.sample)
            assert sample_id not in self.completions, "a sample ends once"
            self.completions[sample_id] = completion

    def drain(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps")

    def run(self, request_id: str, asked: Asked) -> Outcome:
        """Ask and wait for the end of everything."""
        self.add(request_id, asked)
        self.drain()
        return self.outcome(request_id)

    def outcome(self, sample_id: str) -> Outcome:
        completion = self.completions[sample_id]
        rows = self._rows.get(sample_id, {})
        # A restart or a failure may have left rows that count no more.
        kept = tuple(rows[index] for index in range(len(completion.token_ids)))
        return Outcome(completion, kept)

    def sample_ids(self, request_id: str) -> list[str]:
        num_samples = self.asked[request_id].params.num_samples
        return [child_id(RequestId(request_id), k) for k in range(num_samples)]

    def request(self, request_id: str) -> Request:
        found = self.engine.scheduler.request(RequestId(request_id))
        assert found is not None, f"{request_id} is not in flight"
        return found

    def _note_row(self, sample_id: str, index: int, row: torch.Tensor) -> None:
        self._rows.setdefault(sample_id, {})[index] = row.clone()


def play(engine: Engine) -> Played:
    return Played(engine)


def alone(revision: Revision, asked: Asked) -> list[Outcome]:
    """Return what each sample gets with nobody else there and nothing reused."""
    prompt = asked.prompt
    num_tokens = len(prompt if isinstance(prompt, TokenIds) else prompt.tokens)
    params = asked.params
    played = play(
        revision.engine(
            num_blocks=params.num_samples * (num_tokens + params.max_new_tokens),
            block_size=2,
            reuses_prefixes=False,
        )
    )
    played.run("alone", asked)
    return [played.outcome(sample_id) for sample_id in played.sample_ids("alone")]


# Revisions, and what a request must get on them


@cache
def revisions(model: str = MODEL) -> tuple[dict[str, torch.Tensor], ...]:
    """Weights before, between and after some steps of training on a text of their own."""
    module = build_model(model).requires_grad_(True)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    ids = torch.tensor([random_ids(64, seed=99)])
    kept = []
    for step in range(7):
        if step % 3 == 0:
            state = module.state_dict()
            kept.append({name: each.detach().clone() for name, each in state.items()})
        optimiser.zero_grad()
        module(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
    return tuple(kept)


def weights(index: int, model: str = MODEL) -> dict[str, torch.Tensor]:
    return dict(revisions(model)[index])


def asked(
    prompt: Any = PROMPT,
    *,
    num_samples: int = 1,
    max_new_tokens: int = 8,
    **kwargs: Any,
) -> Asked:
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        num_samples=num_samples,
        temperature=1.0 if num_samples > 1 else 0.0,
    )
    return Asked(prompt=prompt, params=params, **kwargs)


_ALONE: dict[Any, list[Outcome]] = {}


def expected(revision: Revision, what: Asked) -> list[Outcome]:
    weights_key = None if revision.weights is None else id(revision.weights)
    key = (
        weights_key,
        revision.adapters,
        revision.numerics,
        revision.model,
        revision.dtype,
        what.prompt,
        what.params,
        what.adapter,
        what.start_position,
    )
    if key not in _ALONE:
        _ALONE[key] = alone(revision, what)
    return _ALONE[key]


BASE = Revision(weights=revisions()[0])
TRAINED = replace(BASE, weights=revisions()[1])
TRAINED_MORE = replace(BASE, weights=revisions()[2])


def assert_got(played: Played, request_id: str, revision: Revision) -> None:
    """Every sample got the bits of a fresh engine on `revision`."""
    wanted = expected(revision, played.asked[request_id])
    for sample_id, each in zip(played.sample_ids(request_id), wanted, strict=True):
        actual = played.outcome(sample_id)
        if revision.numerics == "exact":
            actual.assert_same_as(each)
        else:  # rows are sums in another order there
            assert actual.completion.token_ids == each.completion.token_ids
            for left, right in zip(actual.rows, each.rows, strict=True):
                assert row_difference(left, right) < 1e-4


# States


@dataclass(frozen=True, kw_only=True)
class State:
    """Settings under which a request gets into a state, and the way there.

    `bring` adds the request called "target" and others it needs beside it.
    """

    bring: Callable[[Played, Asked], None]
    num_blocks: int = 120
    max_num_running: int = 8
    num_samples: int = 1

    def settings(self) -> dict[str, Any]:
        return dict(
            num_blocks=self.num_blocks,
            max_num_running=self.max_num_running,
            block_size=4,
            token_budget=16,
        )


def _bring_waiting(played: Played, asked: Asked) -> None:
    _add_beside(played, asked, num_tokens=9, max_new_tokens=6)
    played.step()
    played.add("target", asked)
    played.step()
    assert played.request("target").state is RequestState.WAITING


def _bring_unseen(played: Played, asked: Asked) -> None:
    """Added just now: no step has seen it."""
    played.add("target", asked)


def _bring_awaiting(played: Played, asked: Asked) -> None:
    played.add("leader", asked)
    played.add("target", asked)
    for _ in range(5):
        played.step()
        target = played.request("target")
        assert target.state is RequestState.WAITING
        if target.num_steps_awaiting:
            return
    raise AssertionError("nobody had to await a prefix")


def _bring_prefilling(played: Played, asked: Asked) -> None:
    played.add("target", asked)
    played.step()
    target = played.request("target")
    assert target.state is RequestState.RUNNING
    assert 0 < target.num_computed < target.num_prompt_tokens


def _bring_decoding(played: Played, asked: Asked) -> None:
    played.add("target", asked)
    while (request := played.request("target")).num_output_tokens < 3:
        played.step()
    assert request.state is RequestState.RUNNING


def _bring_preempted(played: Played, asked: Asked) -> None:
    _add_beside(played, asked, num_tokens=20, max_new_tokens=30)
    played.step()
    played.add("target", asked)
    for _ in range(40):
        played.step()
        if played.request("target").state is RequestState.PREEMPTED:
            return
    raise AssertionError("nobody was preempted")


def _bring_forked(played: Played, asked: Asked) -> None:
    played.add("target", asked)
    while played.engine.scheduler.num_running < asked.params.num_samples:
        played.step()
    played.step()


def _bring_unforked(played: Played, asked: Asked) -> None:
    """Several samples that have not split off yet."""
    _bring_prefilling(played, asked)
    assert played.engine.scheduler.num_running == 1


def _add_beside(
    played: Played, asked: Asked, *, num_tokens: int, max_new_tokens: int
) -> None:
    ids = TokenIds.from_ids([(7 * i + 1) % 300 for i in range(num_tokens)])
    params = SamplingParams(max_new_tokens=max_new_tokens)
    played.add("beside", Asked(prompt=ids, params=params, adapter=asked.adapter))


STATES: dict[str, State] = {
    "unseen": State(bring=_bring_unseen),
    "waiting": State(bring=_bring_waiting, max_num_running=1),
    "awaiting": State(bring=_bring_awaiting),
    "prefilling": State(bring=_bring_prefilling),
    "decoding": State(bring=_bring_decoding),
    "preempted": State(bring=_bring_preempted, num_blocks=17),
    "unforked": State(bring=_bring_unforked, num_samples=3),
    "forked": State(bring=_bring_forked, num_samples=3),
}
