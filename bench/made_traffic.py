"""Traffic made to be hard on eviction policies, for `bench.eviction`.

Owns generators that users have no reason to replay: scans, popularity that moves,
documents that are used a fixed number of times, floods, timers, and mixes of those. Each
gives the same trace for the same seed. What users would replay is in
`stemkv.sim.workloads`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice

from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads.draws import Zipf
from stemkv.sim.workloads.prompts import UNIT_SIZE, Prompt, PromptWriter

__all__ = ["MADE_TRAFFIC"]

_Row = tuple[float, Prompt]  # arrival in seconds, and what is asked
_QUESTION = (16, 64)  # tokens behind a document


class _Author:
    """Writes prompts with one generator of chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._prompts = PromptWriter()

    def length(self, low: int, high: int) -> int:
        return self.chance.randint(low, high)

    def new(self, low: int = 500, high: int = 4_000) -> Prompt:
        return self._prompts.new(self.length(low, high))

    def ask(self, document: Prompt) -> Prompt:
        return self._prompts.extend(document, self.length(*_QUESTION))

    def arrivals(self, rate: float, start_s: float = 0.0) -> Iterator[float]:
        now = start_s
        while True:
            yield now
            now += self.chance.expovariate(rate)


def scan(seed: int, *, num_requests: int = 6_000, noise: float = 0.0) -> Trace:
    """The same 200 documents again and again, in order; some one-off prompts between."""
    author = _Author(seed)
    documents = [author.new(1_000, 4_000) for _ in range(200)]
    rows: list[_Row] = []
    place = 0
    for now in islice(author.arrivals(1.0), num_requests):
        if author.chance.random() < noise:
            rows.append((now, author.new(1_000, 4_000)))
            continue
        rows.append((now, author.ask(documents[place % len(documents)])))
        place += 1
    return _trace("scan", rows)


def drift(seed: int, *, every: int = 500, step: int = 50) -> Trace:
    """Documents by Zipf's law, whose ranks move on every so many requests."""
    author = _Author(seed)
    ranks = Zipf(1_000, 1.0)
    documents: dict[int, Prompt] = {}
    rows: list[_Row] = []
    for index, now in enumerate(islice(author.arrivals(2.0), 8_000)):
        rank = ranks.pick(author.chance) + index // every * step
        if rank not in documents:
            documents[rank] = author.new()
        rows.append((now, author.ask(documents[rank])))
    return _trace("drift", rows)


def counted(seed: int, *, num_uses: int, delay_s: float) -> Trace:
    """Documents that are used once, or so many times with about this delay."""
    author = _Author(seed)
    rows: list[_Row] = []
    for start in islice(author.arrivals(1.0 / (0.3 + 0.7 * num_uses)), 6_000):
        document = author.new(500, 3_000)
        now = start
        for _ in range(1 if author.chance.random() < 0.3 else num_uses):
            rows.append((now, author.ask(document)))
            now += delay_s * author.chance.lognormvariate(0.0, 0.3)
    return _trace("counted", sorted(rows, key=lambda row: row[0])[:6_000])


def flooded(seed: int) -> Trace:
    """Popular documents, and for a fifth of the time five one-off prompts for each."""
    author = _Author(seed)
    ranks = Zipf(200, 1.0)
    documents = [author.new() for _ in range(200)]
    rows = [
        (now, author.ask(documents[ranks.pick(author.chance)]))
        for now in islice(author.arrivals(2.0), 6_000)
    ]
    rows += [
        (now, author.new()) for now in islice(author.arrivals(10.0, 1_200.0), 6_000)
    ]
    return _trace("flooded", rows)


def timers(seed: int) -> Trace:
    """Forty prompts on timers of one to thirty minutes, and as many one-off ones."""
    author = _Author(seed)
    rows: list[_Row] = []
    for _ in range(40):
        period = author.chance.uniform(60.0, 1_800.0)
        document = author.new(500, 5_000)
        now = author.chance.uniform(0.0, period)
        while now < 6_000.0:
            rows.append((now, author.ask(document)))
            now += period
    rows += [
        (now, author.new(500, 5_000)) for now in islice(author.arrivals(0.5), 3_000)
    ]
    return _trace("timers", rows)


def even(seed: int) -> Trace:
    """300 documents, each as likely as the others: nothing to learn."""
    author = _Author(seed)
    documents = [author.new(1_000, 3_000) for _ in range(300)]
    return _trace(
        "even",
        [
            (now, author.ask(author.chance.choice(documents)))
            for now in islice(author.arrivals(1.0), 6_000)
        ],
    )


def recent(seed: int, *, depth: float = 50.0) -> Trace:
    """What was used last is likeliest next, by an exponential law: LRU is right."""
    author = _Author(seed)
    stack: list[Prompt] = []
    rows: list[_Row] = []
    for now in islice(author.arrivals(2.0), 8_000):
        place = int(author.chance.expovariate(1.0 / depth))
        is_known = author.chance.random() < 0.85 and place < len(stack)
        document = stack.pop(place) if is_known else author.new(500, 3_000)
        stack.insert(0, document)
        rows.append((now, author.ask(document)))
    return _trace("recent", rows)


def regimes(seed: int, *, block_s: float = 600.0) -> Trace:
    """Two kinds of traffic in turn, in which uses and pauses mean the opposite."""
    author = _Author(seed)
    ranks = Zipf(100, 1.0)
    documents = [author.new() for _ in range(100)]
    rows: list[_Row] = []
    for now in islice(author.arrivals(2.0), 9_000):
        if int(now // block_s) % 2 == 0:
            is_popular = author.chance.random() < 0.6
            document = documents[ranks.pick(author.chance)]
            rows.append((now, author.ask(document) if is_popular else author.new()))
        elif author.chance.random() < 0.5:
            document = author.new()
            rows.append((now, document))
            later = now + author.chance.uniform(40.0, 80.0)
            rows.append((later, author.ask(document)))
        else:
            document = author.new()
            rows += [(now + 2.0 * use, author.ask(document)) for use in range(4)]
    return _trace("regimes", rows)


def ramp(seed: int) -> Trace:
    """Sessions of one to eight turns, whose arrivals become thirty times as many."""
    author = _Author(seed)
    rows: list[_Row] = []
    now = 0.0
    for index in range(2_000):
        now += author.chance.expovariate(0.05 * 30 ** (index / 2_000))
        prompt, at = author.new(), now
        for _ in range(author.length(1, 8)):
            rows.append((at, prompt))
            at += 30.0 * author.chance.lognormvariate(0.0, 0.5)
            prompt = author.ask(prompt)
    return _trace("ramp", rows)


def loop_then_stack(seed: int) -> Trace:
    """A loop over 200 documents; then what was used last is likeliest next."""
    author = _Author(seed)
    documents = [author.new(1_000, 4_000) for _ in range(200)]
    rows: list[_Row] = []
    for index, now in enumerate(islice(author.arrivals(1.0), 6_000)):
        if index < 3_000:
            rows.append((now, author.ask(documents[index % 200])))
            continue
        place = min(199, int(author.chance.expovariate(1.0 / 40.0)))
        documents.insert(0, documents.pop(place))
        rows.append((now, author.ask(documents[0])))
    return _trace("loop, then stack", rows)


def short(seed: int) -> Trace:
    """Many short prompts behind fifty short instructions."""
    author = _Author(seed)
    ranks = Zipf(50, 1.0)
    instructions = [author.new(16, 128) for _ in range(50)]
    return _trace(
        "short",
        [
            (now, author.ask(instructions[ranks.pick(author.chance)]))
            for now in islice(author.arrivals(20.0), 20_000)
        ],
    )


MADE_TRAFFIC: dict[str, Callable[[int], Trace]] = {
    "scan": scan,
    "scan with one-off prompts": lambda seed: scan(seed, noise=0.4),
    "drift": drift,
    "fast drift": lambda seed: drift(seed, every=100, step=20),
    "used twice, a minute apart": lambda seed: counted(seed, num_uses=2, delay_s=60.0),
    "used 8 times, a minute apart": lambda seed: counted(
        seed, num_uses=8, delay_s=60.0
    ),
    "used 3 times, 400 s apart": lambda seed: counted(seed, num_uses=3, delay_s=400.0),
    "flooded": flooded,
    "timers": timers,
    "even": even,
    "recent": recent,
    "regimes": regimes,
    "fast regimes": lambda seed: regimes(seed, block_s=120.0),
    "ramp": ramp,
    "loop, then stack": loop_then_stack,
    "short prompts": short,
}


def _trace(name: str, rows: list[_Row]) -> Trace:
    rows = sorted(rows, key=lambda row: row[0])
    start_s = rows[0][0]
    return Trace(
        name=name,
        format="generated",
        unit_size=UNIT_SIZE,
        requests=[
            TraceRequest(
                request_id=str(index),
                input_length=prompt.length,
                output_length=1,
                units=prompt.units,
                arrival_s=now - start_s,
            )
            for index, (now, prompt) in enumerate(rows)
        ],
    )
