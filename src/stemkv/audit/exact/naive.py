"""What reuse at any boundary would have done, with and without the padding rules.

Owns one procedure, run with the rules of a numerics class of choice: a prompt's KV
prefilled cold in one chunk, against a prefix that an earlier request left behind and
the rest computed upon it. In class `tolerant` that is what a cache without rules does
with ordinary kernels. Tensors only: no scheduler takes part.

Linears stay padded (rule R2 of `numerics`) even in class `tolerant`, so a cache over
plain linears would differ at least as much.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stemkv.audit.exact.bits import Tally
from stemkv.audit.exact.prompts import Chat
from stemkv.core.prefix.table import BlockTable
from stemkv.core.prefix.tokens import TokenIds
from stemkv.engine import LoadedModel
from stemkv.engine.kv import KvMemory
from stemkv.engine.numerics import Numerics
from stemkv.engine.probe import Probe, ProbeSequence
from stemkv.engine.runner import ModelRunner

__all__ = ["Reuse", "reuse_by_hand"]

_BLOCK_SIZE = 16
_GROUP = 25  # chats at once: decoding them side by side costs little more than one
_MAX_PASS = 256  # tokens of one forward pass, roughly
_MAX_CHUNK = 40  # of the earlier requests


@dataclass(slots=True, kw_only=True)
class Reuse:
    """What came of one chat."""

    chat: Chat
    prompt: tuple[int, ...]
    num_reused: int  # leading tokens whose KV the earlier request left behind
    answer: tuple[int, ...]  # to a first turn; empty for other chats
    tally: Tally = field(default_factory=Tally)


def reuse_by_hand(
    loaded: LoadedModel,
    chats: Sequence[Chat],
    numerics: Numerics,
    *,
    answers: Sequence[tuple[int, ...]] | None = None,
    num_tokens: int,
    seed: int,
    progress: Callable[[str], None],
) -> list[Reuse]:
    """Compute every chat's prompt both ways and compare.

    `num_tokens` greedy tokens of the cold run are compared with what the other run
    would have chosen, fed with the same tokens; first turns are answered with as many,
    or with `answers` if given. The linears of `loaded.model` must be replaced already.
    """
    results: list[Reuse] = []
    for start in range(0, len(chats), _GROUP):
        end = min(start + _GROUP, len(chats))
        group = _Group(
            loaded,
            chats[start:end],
            numerics,
            num_tokens=num_tokens,
            draw=random.Random(f"reuse/{seed}/{start}"),
            label=f"{numerics.name}, prompts {start + 1} to {end} of {len(chats)}",
            progress=progress,
        )
        results.extend(group.run(None if answers is None else answers[start:end]))
    return results


class _Group:
    """Chats that are computed side by side, in KV memory of their own."""

    def __init__(
        self,
        loaded: LoadedModel,
        chats: Sequence[Chat],
        numerics: Numerics,
        *,
        num_tokens: int,
        draw: random.Random,
        label: str,
        progress: Callable[[str], None],
    ) -> None:
        self._chats = chats
        self._label = label
        self._progress = progress
        self._num_tokens = num_tokens
        self._draw = draw
        # An answer before the last turn, and what is compared after it.
        longest = max(chat.num_tokens for chat in chats) + 2 * num_tokens
        self._blocks_each = -(-longest // _BLOCK_SIZE)
        self._num_handed_out = 0
        kv = KvMemory(
            num_layers=loaded.num_layers,
            num_blocks=2 * len(chats) * self._blocks_each,
            block_size=_BLOCK_SIZE,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )
        runner = ModelRunner(
            loaded.model, kv, numerics, num_query_heads=loaded.num_query_heads
        )
        self._probe = Probe(runner)

    def run(self, answers: Sequence[tuple[int, ...]] | None) -> list[Reuse]:
        warm = self._earlier_requests(answers)
        prompts, reused = self._turn_to_prompts(warm)
        self._prefill(warm, "the rest upon that", whole=True)
        cold = [self._sequence(f"cold-{i}", ids) for i, ids in enumerate(prompts)]
        self._prefill(cold, "cold", whole=True)
        results = [
            Reuse(
                chat=chat,
                prompt=ids,
                num_reused=n,
                answer=_answer(chat, ids),
            )
            for chat, ids, n in zip(self._chats, prompts, reused, strict=True)
        ]
        for result, truth, other in zip(results, cold, warm, strict=True):
            result.tally.add_kv(self._probe.kv(truth), self._probe.kv(other))
            _compare_last_row(result.tally, truth, other)
        for index in range(1, self._num_tokens):
            self._say(f"greedy token {index + 1} of {self._num_tokens}")
            for truth, other in zip(cold, warm, strict=True):
                # Teacher-forced: both get what the cold run has chosen.
                token = _greedy(truth)
                _append(truth, token)
                _append(other, token)
            self._probe.run([(sequence, 1) for sequence in (*cold, *warm)])
            for result, truth, other in zip(results, cold, warm, strict=True):
                _compare_last_row(result.tally, truth, other)
        return results

    def _earlier_requests(
        self, answers: Sequence[tuple[int, ...]] | None
    ) -> list[ProbeSequence]:
        """Compute what comes before: prefixes in ragged chunks, first turns whole."""
        earlier = []
        for index, chat in enumerate(self._chats):
            ids = chat.earlier
            if not chat.is_second_turn:
                ids = ids[: _num_common(ids, chat.prompt)]
            earlier.append(self._sequence(f"warm-{index}", ids))
        turns = [
            sequence
            for sequence, chat in zip(earlier, self._chats, strict=True)
            if chat.is_second_turn
        ]
        chunked = [e for e in earlier if e not in turns]
        self._prefill(chunked, "prefixes in chunks", whole=False)
        self._prefill(turns, "first turns", whole=True)
        forced = [
            answer
            for answer, chat in zip(answers or (), self._chats, strict=bool(answers))
            if chat.is_second_turn
        ]
        for step in range(self._num_tokens):
            for index, sequence in enumerate(turns):
                token = forced[index][step] if forced else _greedy(sequence)
                _append(sequence, token)
            self._say(f"answers, token {step + 1} of {self._num_tokens}")
            # The last token of an answer has no KV when the next turn comes.
            if step < self._num_tokens - 1 and turns:
                self._probe.run([(sequence, 1) for sequence in turns])
        return earlier

    def _turn_to_prompts(
        self, warm: list[ProbeSequence]
    ) -> tuple[list[tuple[int, ...]], list[int]]:
        """Let the earlier sequences go on as the prompts; return those and the reuse."""
        prompts, reused = [], []
        for sequence, chat in zip(warm, self._chats, strict=True):
            ids = chat.prompt
            if chat.is_second_turn:
                ids = (*sequence.tokens, *chat.follow_up)
            sequence.tokens = TokenIds.from_ids(ids)
            prompts.append(ids)
            reused.append(sequence.num_computed)
        return prompts, reused

    def _prefill(
        self, sequences: list[ProbeSequence], what: str, *, whole: bool
    ) -> None:
        """Compute all that remains: each in one chunk, or in ragged ones."""
        waiting = list(sequences)
        while waiting:
            self._say(f"{what}, {len(waiting)} left")
            work: list[tuple[ProbeSequence, int]] = []
            for sequence in waiting:
                size = sequence.num_remaining
                if not whole:
                    size = min(size, self._draw.randint(1, _MAX_CHUNK))
                if work and sum(n for _, n in work) + size > _MAX_PASS:
                    break
                work.append((sequence, size))
            self._probe.run(work)
            waiting = [s for s in waiting if s.num_remaining]

    def _say(self, text: str) -> None:
        self._progress(f"{self._label}: {text}")

    def _sequence(self, name: str, ids: Sequence[int]) -> ProbeSequence:
        first = self._num_handed_out
        self._num_handed_out += self._blocks_each
        table = BlockTable(array("i", range(first, self._num_handed_out)))
        return ProbeSequence(name, TokenIds.from_ids(ids), table)


def _answer(chat: Chat, prompt: tuple[int, ...]) -> tuple[int, ...]:
    if not chat.is_second_turn:
        return ()
    return prompt[len(chat.earlier) : -len(chat.follow_up)]


def _compare_last_row(tally: Tally, truth: ProbeSequence, other: ProbeSequence) -> None:
    last = truth.num_computed - 1
    tally.add_logits(truth.logits[last], other.logits[last])


def _greedy(sequence: ProbeSequence) -> int:
    return int(sequence.logits[sequence.num_computed - 1].argmax())


def _append(sequence: ProbeSequence, token: int) -> None:
    sequence.tokens = TokenIds.from_ids((*sequence.tokens, token))


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many leading tokens agree, one token of `right` left over."""
    pairs = zip(left, right[:-1], strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right) - 1)
    )
