"""The loads of `bench.scheduling`: who arrives when, and on what they are served.

Owns workloads and the one replica that all of them run on. Each gives the same trace for
the same seed. Lengths, tenants and loads follow the study that the bars come from
(docs/orders.md); where it leaves a shape open, the one here reproduces its rate.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from stemkv.core.books.cost import RooflineCost
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.sessions import SessionConfig
from stemkv.sim.arrivals import LoadConfig
from stemkv.sim.config import ReplayConfig
from stemkv.sim.formats import read_trace
from stemkv.sim.presets import LARGE
from stemkv.sim.sharing import SharingRule
from stemkv.sim.timelines import in_units_of
from stemkv.sim.trace import Trace, TraceRequest
from stemkv.sim.workloads.arrivals import poisson
from stemkv.sim.workloads.draft import Draft, trace_of
from stemkv.sim.workloads.draws import Zipf
from stemkv.sim.workloads.prompts import Prompt, PromptWriter

__all__ = [
    "COST",
    "HEAVY",
    "config",
    "conversation",
    "copies",
    "groups",
    "of_one_tenant",
    "users",
    "worked",
]

TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
HEAVY = "heavy"  # the tenant that sends most
PREFIX = 12_000  # tokens
EVERYBODY = 1e6  # requests per second: all are there at once

# An 8B model in bfloat16 on one H100: a step takes the longer of its operations at half
# the peak and its bytes at the full bandwidth, and one millisecond.
COST = RooflineCost(
    source="8B model, one H100 at 50 % of its peak, estimated",
    bytes_per_token=128 * 1024,
    flops_per_token=16e9,
    flops_per_pair=524_288,
    weight_bytes=16e9,
    flops_per_s=989e12,
    bytes_per_s=3.35e12,
    watts=700.0,
    mfu=0.5,
    bandwidth_efficiency=1.0,
    step_overhead_s=0.001,
)


def config(
    order: OrderConfig,
    *,
    num_tokens: int = 420_000,
    block_size: int = 32,
    step_time_s: float | None = None,
    load: LoadConfig | None = None,
    retained_floor_blocks: int = 0,
    lookahead: int | None = None,
    sessions: SessionConfig | None = None,
) -> ReplayConfig:
    """Return the replica: LRU, 256 requests at once, steps of 1,024 tokens or a time."""
    return ReplayConfig(
        core=replace(
            LARGE.sized(num_tokens // block_size, block_size=block_size),
            scheduler=SchedulerConfig(
                token_budget=1_024 if step_time_s is None else 8_192,
                max_num_running=256,
                step_time_s=step_time_s,
                retained_floor_blocks=retained_floor_blocks,
                lookahead=SchedulerConfig().lookahead
                if lookahead is None
                else lookahead,
            ),
            eviction=EvictionConfig(name="lru"),
            order=order,
            sessions=sessions,
        ),
        sharing=SharingRule(name="shared"),
        load=LoadConfig() if load is None else load,
    )


def worked(
    seed: int, rate: float, *, num_requests: int = 4_000, num_light: int = 3
) -> Trace:
    """40 % begin with one long prefix, the others share nothing; one tenant sends 60 %."""
    author = _Author(seed, num_light=num_light)
    prefix = author.prompts.new(PREFIX)
    return author.poisson(
        rate,
        num_requests,
        lambda: author.extend(prefix) if author.chance.random() < 0.4 else author.own(),
    )


def groups(seed: int, rate: float, *, num_requests: int = 4_000) -> Trace:
    """70 % begin with one of 24 such prefixes, by Zipf's law."""
    author = _Author(seed, num_light=3)
    prefixes = [author.prompts.new(PREFIX) for _ in range(24)]
    ranks = Zipf(len(prefixes), 1.0)

    def draw() -> Prompt:
        if author.chance.random() < 0.7:
            return author.extend(prefixes[ranks.pick(author.chance)])
        return author.own()

    return author.poisson(rate, num_requests, draw)


def conversation(*, limit: int | None = None) -> Trace:
    """The Mooncake conversation hour; tenants made up from the second block of a prompt."""
    path = TRACES / "mooncake" / "conversation_trace.jsonl.gz"
    trace = read_trace(path, limit=limit)
    return replace(
        trace,
        requests=[
            replace(request, tenant=_tenant_of(request.units[1:2], share=0.55))
            for request in trace.requests
        ],
    )


def copies(
    name: str, num_copies: int, *, spread_s: float = 60.0, seed: int = 0
) -> Trace:
    """So many users for each recorded agent session, who share nothing with each other.

    For closed loops: a session's next request comes as long after the end of the one
    before as it was recorded after its arrival. Sessions start within `spread_s`
    seconds. Half of the copies are the heavy tenant's.
    """
    path = TRACES / "lmcache-agent" / f"{name}_cl100k_blk16.jsonl.gz"
    recorded = _in_turns(in_units_of(read_trace(path), 64))
    chance = random.Random(seed)
    largest = 1 + max(max(request.units, default=0) for request in recorded.requests)
    rows: list[tuple[float, int, int, TraceRequest]] = []
    for copy in range(num_copies):
        starts: dict[str | None, float] = {}
        tenant = HEAVY if copy < (num_copies + 1) // 2 else f"light-{copy % 3}"
        for index, request in enumerate(recorded.requests):
            if request.parent is None:
                starts[request.session] = chance.uniform(0, spread_s)
            row = replace(
                request,
                request_id=f"{request.request_id}/{copy}",
                units=array("i", [largest * copy + unit for unit in request.units]),
                # Later turns come when their parent has ended; here only their order.
                arrival_s=starts[request.session] + request.arrival_s * 1e-6,
                session=f"{request.session}/{copy}",
                tenant=tenant,
            )
            rows.append((row.arrival_s, copy, index, row))
    rows.sort(key=lambda row: row[:3])
    places = {(copy, index): at for at, (_, copy, index, _) in enumerate(rows)}
    start_s = rows[0][0]
    return replace(
        recorded,
        name=f"{name} x {num_copies}",
        requests=[
            replace(
                row,
                arrival_s=arrival_s - start_s,
                parent=None if row.parent is None else places[copy, row.parent],
            )
            for arrival_s, copy, _, row in rows
        ],
    )


def of_one_tenant(trace: Trace) -> Trace:
    """Return the same requests, all of one tenant: for orders without turns."""
    return replace(
        trace,
        requests=[replace(request, tenant=HEAVY) for request in trace.requests],
    )


def users(num_users: int, *, num_requests: int = 6_000, think_s: float = 1.0) -> Trace:
    """So many users of a support desk, who go through recorded dialogues for ever.

    A closed loop with the recorded dialogues in turn, each user's first at another one.
    """
    path = TRACES / "tau-bench" / "gpt-4o-airline_cl100k_blk16.jsonl.gz"
    recorded = in_units_of(read_trace(path), 64)
    by_session: dict[str | None, list[TraceRequest]] = {}
    for request in recorded.requests:
        by_session.setdefault(request.session, []).append(request)
    dialogues = list(by_session.values())
    requests: list[TraceRequest] = []
    lines = [iter(_endless(dialogues, user)) for user in range(num_users)]
    last: list[int | None] = [None] * num_users
    while len(requests) < num_requests:
        for user, line in enumerate(lines):
            session, request = next(line)
            requests.append(
                replace(
                    request,
                    request_id=f"{user}/{len(requests)}",
                    arrival_s=0.0 if last[user] is None else len(requests) * 1e-6,
                    session=f"{user}/{session}",
                    parent=last[user],
                    think_s=think_s,
                    tenant=HEAVY if user < num_users // 2 else f"light-{user % 3}",
                )
            )
            last[user] = len(requests) - 1
    return replace(recorded, name=f"tau, {num_users} users", requests=requests)


class _Author:
    """Writes prompts with one generator of chance."""

    def __init__(self, seed: int, *, num_light: int) -> None:
        self.chance = random.Random(seed)
        self.prompts = PromptWriter()
        self._num_light = num_light

    def length(self, median: float, sigma: float, most: int) -> int:
        drawn = self.chance.lognormvariate(math.log(median), sigma)
        return max(1, min(most, round(drawn)))

    def extend(self, prefix: Prompt) -> Prompt:
        return self.prompts.extend(prefix, self.length(400, 0.5, 4_000))

    def own(self) -> Prompt:
        return self.prompts.new(self.length(4_000, 0.9, 40_000))

    def poisson(
        self, rate: float, num_requests: int, draw: Callable[[], Prompt]
    ) -> Trace:
        rows = []
        for arrival_s in islice(poisson(self.chance, rate), num_requests):
            is_heavy = self.chance.random() < 0.6
            light = f"light-{self.chance.randrange(self._num_light)}"
            rows.append(
                Draft(
                    prompt=draw(),
                    output_length=self.length(150, 0.7, 1_000),
                    arrival_s=arrival_s,
                    tenant=HEAVY if is_heavy else light,
                )
            )
        return trace_of(rows, name="made")


def _in_turns(trace: Trace) -> Trace:
    """Return the trace with each request of a session waiting for the one before.

    The recordings name sessions and no parents: without this all turns of a session are
    there at once, in a closed loop as well.
    """
    last: dict[str | None, int] = {}
    requests: list[TraceRequest] = []
    for index, request in enumerate(trace.requests):
        before = last.get(request.session)
        last[request.session] = index
        if before is not None:
            gap_s = request.arrival_s - requests[before].arrival_s
            request = replace(request, parent=before, think_s=gap_s)
        requests.append(request)
    return replace(trace, requests=requests)


def _endless(
    dialogues: list[list[TraceRequest]], user: int
) -> Iterator[tuple[int, TraceRequest]]:
    turn = user * 7  # so that users are not all at the same dialogue
    while True:
        for request in dialogues[turn % len(dialogues)]:
            yield turn, request
        turn += 1


def _tenant_of(units: array[int], *, share: float) -> str:
    digest = hashlib.blake2b(units.tobytes(), digest_size=8).digest()
    place = int.from_bytes(digest, "big") / 2**64
    if place < share:
        return HEAVY
    return f"light-{int((place - share) / (1 - share) * 3)}"
