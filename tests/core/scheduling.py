"""Builders and fakes for tests of the scheduler.

Tokens are written as letters: `"abca"` is a prompt of four tokens, and outputs come
back as letters too. A capital stands for a span of ten positions: `"abX"` has twelve. `FakeRunner` executes plans on virtual KV and objects to
everything a tensor would silently get wrong; `Driver` is the loop around a scheduler
that an engine would be, checking each step and remembering what happened;
`generate_alone` says what a request must get, whoever else was there.

What a request computes with besides its tokens is a `Model`: another adapter, start
position or generation of weights gives other KV and other tokens.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, NamedTuple, TypeVar

from stemkv.core import (
    CacheConfig,
    Chunk,
    Domain,
    FinishReason,
    FittedCost,
    Lru,
    OrderConfig,
    PrefixCache,
    Request,
    RequestId,
    RequestSpec,
    Sample,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
    TokenIds,
)
from stemkv.core.check import check_scheduler
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.table import BlockCopy
from stemkv.core.prefix.tokens import TOKEN_BYTES, Span
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import (
    Event,
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestForked,
    RequestRestarted,
    TokenSampled,
)
from stemkv.core.schedule.request import RequestState, TokenCounts, child_id

__all__ = [
    "BASE",
    "COSTS",
    "FCFS",
    "NAMESPACE",
    "Driver",
    "FakeRunner",
    "Model",
    "build_spec",
    "generate_alone",
    "namespace_of",
    "of_type",
    "tokens",
]

NAMESPACE = b"n" * 32
SPAN_TOKENS = 10  # one more than a span needs
OWN = b""  # the namespace that belongs to a request's model
VOCABULARY = 4  # small, so that what is generated meets what others ask for
_FIRST = ord("a")

_ENDED_WELL = {
    FinishReason.LENGTH,
    FinishReason.STOP_TOKEN,
    FinishReason.STOP_STRING,
}

E = TypeVar("E")

FCFS = OrderConfig(name="fcfs")
# A token behind p others takes 1 + p / 8 ms, a step 4 ms more.
COSTS = FittedCost(
    source="made up",
    bytes_per_token=1,
    step_s=0.004,
    prefill_chunk_s=0.0,
    prefill_token_s=0.001,
    prefill_pair_s=0.000125,
    decode_s=0.0005,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=0.0,
    assumed_watts=1.0,
)


class Model(NamedTuple):
    """What KV depends on besides the tokens."""

    adapter: str | None = None  # a version, as in `Chunk`
    start_position: int = 0
    weights: int = 0  # how many replacements in place there were


BASE = Model()


def namespace_of(model: Model) -> bytes:
    return NAMESPACE if model == BASE else sha256(repr(model).encode()).digest()


def tokens(text: str) -> TokenIds:
    """One token per letter, one span per capital."""
    if not any(map(str.isupper, text)):
        return TokenIds.from_ids([ord(letter) - _FIRST for letter in text])
    return TokenIds.from_parts(
        Span(digest=sha256(letter.encode()).digest(), num_tokens=SPAN_TOKENS)
        if letter.isupper()
        else tokens(letter)
        for letter in text
    )


def text_of(buffer: bytes) -> str:
    """One letter per token, a dot per position of a span."""
    ids = struct.unpack(f"<{len(buffer) // TOKEN_BYTES}i", buffer)
    return "".join("·" if token < 0 else chr(_FIRST + token) for token in ids)


def build_spec(
    request_id: str = "r",
    prompt: str = "abc",
    *,
    max_new_tokens: int = 4,
    arrival_s: float = 0.0,
    tenant: str = "a",
    namespace: bytes | None = NAMESPACE,
    num_samples: int = 1,
    adapter: str | None = None,
    start_position: int = 0,
    hints: Hints = NO_HINTS,
) -> RequestSpec:
    return RequestSpec(
        request_id=RequestId(request_id),
        prompt=tokens(prompt),
        max_new_tokens=max_new_tokens,
        arrival_s=arrival_s,
        domain=Domain.private(tenant),
        namespace=namespace,
        num_samples=num_samples,
        adapter=adapter,
        start_position=start_position,
        hints=hints,
    )


def of_type(events: Iterable[object], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


# What is generated: a function of the whole prefix, the model and which sample it is.


@lru_cache(maxsize=100_000)
def next_token(prefix: bytes, sample: int, model: Model = BASE) -> int:
    person = b"" if model == BASE else namespace_of(model)[:16]
    digest = blake2b(
        prefix, digest_size=4, salt=sample.to_bytes(8, "big"), person=person
    ).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def generate_alone(
    prompt: str | TokenIds,
    max_new_tokens: int,
    *,
    sample: int = 0,
    stops: Iterable[str] = (),
    model: Model = BASE,
) -> str:
    """The transparency oracle: no cache, no batch, no schedule."""
    prefix = (tokens(prompt) if isinstance(prompt, str) else prompt).buffer
    output = ""
    last = tuple(stops)
    while len(output) < max_new_tokens and not output.endswith(last):
        token = next_token(prefix, sample, model)
        prefix += token.to_bytes(TOKEN_BYTES, "little")
        output += chr(_FIRST + token)
    return output


def family_of(request_id: str) -> str:
    """The request a sample was forked from; any other request is its own family."""
    return request_id.partition("#")[0]


def sample_of(request_id: str) -> int:
    return int(request_id.partition("#")[2] or 0)


class Owner(NamedTuple):
    """For whom a slot was computed."""

    root_id: int | None  # of the namespace's tree, a new one after `retire`
    namespace: bytes | None
    tenant: str
    family: str
    model: Model


class Kv(NamedTuple):
    """What one slot holds: KV is a function of every token up to its position."""

    prefix: bytes
    owner: Owner


GARBAGE = Kv(b"\xff" * TOKEN_BYTES, Owner(None, None, "", "", BASE))


class FakeRunner:
    """Executes plans on virtual KV and refuses every unsound access.

    - It reads a slot only if that holds KV of exactly the reader's prefix and model,
      computed under the same namespace by the same tenant, or inside a public prefix.
    - It writes a slot only if its block is in no table but the writer's, and is not
      published.
    """

    def __init__(
        self, scheduler: Scheduler, stops: Mapping[str, FinishReason] | None = None
    ) -> None:
        self.kv: dict[tuple[int, int], Kv] = {}
        self.weights = 0  # generation that is in place
        self.public: dict[bytes, list[bytes]] = defaultdict(list)  # by namespace
        self._public_before: dict[int, list[bytes]] = {}  # by root, once it is retired
        self._scheduler = scheduler
        self._block_size = scheduler.cache.config.block_size
        self._stops = {
            ord(letter) - _FIRST: reason for letter, reason in (stops or {}).items()
        }

    def execute(self, plan: StepPlan, *, failed: Collection[str] = ()) -> StepResult:
        """Run the copies, then the chunks, but for those that fail."""
        self._run(plan.copies, [c for c in plan.chunks if c.request_id not in failed])
        self._spoil((), [c for c in plan.chunks if c.request_id in failed])
        return StepResult(
            {
                c.request_id: self._sample(c)
                for c in plan.chunks
                if c.num_samples and c.request_id not in failed
            },
            failed=frozenset(map(RequestId, failed)),
        )

    def fail(self, plan: StepPlan, num_done: int) -> None:
        """Run only the first so many copies and chunks; leave garbage for the rest."""
        num_chunks = max(0, num_done - len(plan.copies))
        self._run(plan.copies[:num_done], plan.chunks[:num_chunks])
        self._spoil(plan.copies[num_done:], plan.chunks[num_chunks:])

    def _run(self, copies: Sequence[BlockCopy], chunks: Sequence[Chunk]) -> None:
        holders = self._holders()
        for copy in copies:
            self._require_private(copy.target, holders, f"copy to {copy.target}")
            assert 1 <= copy.num_tokens <= self._block_size
            for offset in range(copy.num_tokens):
                self.kv[copy.target, offset] = self.kv[copy.source, offset]
        for chunk in chunks:
            self._read_prefix(chunk)
        for chunk in chunks:
            self._write(chunk, holders)

    def _spoil(self, copies: Sequence[BlockCopy], chunks: Sequence[Chunk]) -> None:
        """Leave what no request may read in the slots that should have been written."""
        for copy in copies:
            for offset in range(copy.num_tokens):
                self.kv[copy.target, offset] = GARBAGE
        for chunk in chunks:
            for position in range(chunk.start, chunk.end):
                index, offset = divmod(position, self._block_size)
                self.kv[chunk.block_ids[index], offset] = GARBAGE

    def retire(self, namespace: bytes) -> None:
        """Take back declarations for those who come later."""
        declared = self.public.pop(namespace, [])
        root = self._scheduler.cache.tree.roots().get(namespace)
        if root is not None:
            self._public_before[root.id] = declared

    def forget(self, block_ids: Iterable[int]) -> None:
        """Scrub blocks that nobody owns, so that reading one cannot go unnoticed."""
        for block_id in block_ids:
            for offset in range(self._block_size):
                self.kv.pop((block_id, offset), None)

    def check(self) -> None:
        """Whatever can be matched, and whatever requests count as computed, is there.

        True between steps only: a plan's copies are promises until it has run.
        """
        block_size = self._block_size
        for node in self._scheduler.cache.tree.nodes():
            path = node.path()
            prefix = b"".join(step.edge for step in path)
            start = sum(step.num_blocks for step in path[:-1]) * block_size
            for position in range(start, start + node.num_blocks * block_size):
                index, offset = divmod(position - start, block_size)
                kv = self.kv.get((node.block_ids[index], offset))
                assert kv is not None, "a published slot was never computed"
                assert kv.prefix == prefix[: (position + 1) * TOKEN_BYTES]
        for request in self._scheduler.requests():
            if request.lease is not None:
                table, copy = request.lease.table.snapshot(), request.lease.copy
                num_promised = 0 if copy is None else copy.num_tokens
                end = request.num_computed - num_promised
                self._check_prefix(request, table, end)
                if copy is not None:
                    self._check_source(request, copy, end)

    def _check_source(self, request: Request, copy: BlockCopy, start: int) -> None:
        """What is to be copied for a request is still there."""
        for offset in range(copy.num_tokens):
            kv = self.kv.get((copy.source, offset))
            assert kv is not None, "the source of a copy was never computed"
            end = (start + offset + 1) * TOKEN_BYTES
            assert kv.prefix == request.tokens[:end], "the source of a copy changed"

    def _holders(self) -> dict[int, list[RequestId]]:
        holders = defaultdict(list)
        for request in self._scheduler.requests():
            if request.lease is not None:
                for block_id in request.lease.table.ids():
                    holders[block_id].append(request.request_id)
        return holders

    def _require_private(
        self, block_id: int, holders: Mapping[int, list[RequestId]], what: str
    ) -> RequestId:
        state = self._scheduler.cache.pool.state(block_id)
        assert state is BlockState.PRIVATE, f"{what}, which is {state.value}"
        held_by = holders[block_id]
        assert len(held_by) == 1, f"{what}, which {held_by} hold"
        return held_by[0]

    def _read_prefix(self, chunk: Chunk) -> None:
        request = self._scheduler.request(chunk.request_id)
        assert request is not None, "a planned request ends at commit, not before"
        assert request.lease is not None
        assert chunk.block_ids.tolist() == list(request.lease.table.ids())
        self._check_prefix(request, chunk.block_ids, chunk.start)

    def _check_prefix(self, request: Request, table: memoryview, end: int) -> None:
        reader = self._owner(request)
        for position in range(end):
            index, offset = divmod(position, self._block_size)
            kv = self.kv.get((table[index], offset))
            what = f"position {position} of {request.request_id}"
            assert kv is not None, f"{what} was never computed"
            assert kv.prefix == request.tokens[: (position + 1) * TOKEN_BYTES], (
                f"{what} holds KV of {text_of(kv.prefix)!r}, "
                f"should be of {text_of(request.tokens)[: position + 1]!r}"
            )
            if kv.owner != reader:
                self._check_sharing(kv, reader, what)

    def _check_sharing(self, kv: Kv, reader: Owner, what: str) -> None:
        writer = kv.owner
        assert writer.root_id == reader.root_id, f"{what} is of another namespace"
        if reader.root_id is None:
            assert writer.family == reader.family, f"{what} is of an unsharable request"
        assert writer.model == reader.model, f"{what} is of another model"
        if writer.tenant != reader.tenant:
            declared = self._declared(reader)
            is_public = any(prefix.startswith(kv.prefix) for prefix in declared)
            assert is_public, f"{what} is private"

    def _declared(self, reader: Owner) -> list[bytes]:
        if reader.root_id in self._public_before:
            return self._public_before[reader.root_id]
        return self.public[reader.namespace] if reader.namespace else []

    def _write(self, chunk: Chunk, holders: Mapping[int, list[RequestId]]) -> None:
        request = self._scheduler.request(chunk.request_id)
        assert request is not None
        owner = self._owner(request)
        for position in range(chunk.start, chunk.end):
            index, offset = divmod(position, self._block_size)
            block_id = chunk.block_ids[index]
            what = f"write of {chunk.request_id} to block {block_id}"
            assert self._require_private(block_id, holders, what) == chunk.request_id
            prefix = request.tokens[: (position + 1) * TOKEN_BYTES]
            self.kv[block_id, offset] = Kv(prefix, owner)

    def _owner(self, request: Request) -> Owner:
        lease = request.lease
        assert lease is not None
        root_id = None if lease.node is None else lease.node.root().id
        spec = request.spec
        return Owner(
            root_id,
            lease.namespace,
            lease.domain.name,
            family_of(request.request_id),
            Model(spec.adapter, spec.start_position, self.weights),
        )

    def _sample(self, chunk: Chunk) -> tuple[Sample, ...]:
        request = self._scheduler.request(chunk.request_id)
        assert request is not None
        prefix = request.tokens[: chunk.end * TOKEN_BYTES]
        first = sample_of(chunk.request_id)
        model = Model(chunk.adapter, chunk.start_position, self.weights)
        drawn = [next_token(prefix, first + k, model) for k in range(chunk.num_samples)]
        return tuple(Sample(token, self._stops.get(token)) for token in drawn)


class Driver:
    """Alternates `schedule` and `commit`, checks every step, remembers everything.

    Time passes by one second with every call. Request ids are used once.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        stops: Mapping[str, FinishReason] | None = None,
        token_budget: int = 512,
        max_num_running: int = 8,
        max_request_tokens: int | None = None,
        max_steps_awaiting: int = 256,
        watermark: float = 0.0,
        lookahead: int = 32,
        make_cache: Callable[[CacheConfig], PrefixCache] | None = None,
        order: OrderConfig = FCFS,
        step_time_s: float | None = None,
        retained_floor_blocks: int = 0,
        costs: FittedCost = COSTS,
    ) -> None:
        self.now = 0.0
        cache_config = CacheConfig(num_blocks=num_blocks, block_size=block_size)
        if make_cache is None:
            self.cache = PrefixCache(cache_config, Retention(Lru))
        else:
            self.cache = make_cache(cache_config)
        self.config = SchedulerConfig(
            token_budget=token_budget,
            max_num_running=min(max_num_running, token_budget),
            max_request_tokens=max_request_tokens,
            max_steps_awaiting=max_steps_awaiting,
            watermark=watermark,
            lookahead=lookahead,
            step_time_s=step_time_s,
            retained_floor_blocks=retained_floor_blocks,
        )
        self.scheduler = Scheduler(
            self.config, self.cache, order.make(costs), costs=costs
        )
        self.youngest_yields = order.name not in ("fair", "deadline")
        self.runner = FakeRunner(self.scheduler, stops)
        self.stops = stops or {}
        self.requests: dict[str, Request] = {}  # all that were ever added or forked
        self.plans: list[StepPlan] = []
        self.events: list[Event] = []
        self.outputs: defaultdict[str, str] = defaultdict(str)  # what a client saw
        self.ends: dict[str, RequestFinished | RequestAborted] = {}
        # Tokens of committed chunks, since the request began (again).
        self.num_executed: Counter[str] = Counter()
        self.num_prefilled = 0  # of them, those of chunks that are no decodes
        self.models: dict[str, Model] = {}  # what each sample must be computed with
        self.restarted: set[str] = set()
        self.num_fences = 0

    # Acts

    def add(
        self,
        request_id: str,
        prompt: str,
        *,
        max_new_tokens: int = 4,
        tenant: str = "a",
        namespace: bytes | None = OWN,
        num_samples: int = 1,
        arrival_s: float | None = None,
        adapter: str | None = None,
        start_position: int = 0,
        hints: Hints = NO_HINTS,
    ) -> Request:
        now = self._tick()
        model = Model(adapter, start_position, self.num_fences)
        request = self.scheduler.add(
            build_spec(
                request_id,
                prompt,
                max_new_tokens=max_new_tokens,
                arrival_s=now if arrival_s is None else arrival_s,
                tenant=tenant,
                namespace=namespace_of(model) if namespace == OWN else namespace,
                num_samples=num_samples,
                adapter=adapter,
                start_position=start_position,
                hints=hints,
            )
        )
        self.requests[request_id] = request
        self.models[request_id] = model
        return request

    def declare_public(self, prefix: str, namespace: bytes = NAMESPACE) -> int:
        num_blocks = self.cache.declare_public(namespace, tokens(prefix))
        num_bytes = num_blocks * self.cache.config.block_size * TOKEN_BYTES
        self.runner.public[namespace].append(tokens(prefix).buffer[:num_bytes])
        return num_blocks

    def cancel(self, request_id: str) -> bool:
        return self.scheduler.cancel(RequestId(request_id), self._tick())

    def retire(self, namespace: bytes = NAMESPACE) -> int:
        """Fence a namespace in the cache only, which may be done at any time."""
        self.runner.retire(namespace)
        return self.cache.retire(namespace, self._tick())

    def retire_for_all(self, namespace: bytes = NAMESPACE) -> int:
        """Fence a namespace for requests in flight as well."""
        self.runner.retire(namespace)
        num_blocks = self.scheduler.retire(namespace, self._tick())
        self._note(self.scheduler.take_events())
        return num_blocks

    def restart(
        self, request_id: str, adapter: str | None = None, *, shares: bool = True
    ) -> None:
        """Let a request begin again on the newest weights."""
        request = self.scheduler.request(RequestId(request_id))
        assert request is not None
        model = Model(adapter, request.spec.start_position, self.num_fences)
        counts = replace(request.counts)
        num_output = request.num_output_tokens
        namespace = namespace_of(model) if shares else None

        self.scheduler.restart(request.request_id, namespace, adapter, self._tick())

        discarded = counts.discarded + counts.reused + counts.computed
        assert request.counts == TokenCounts(discarded=discarded + counts.recomputed)
        events = self.scheduler.take_events()
        assert RequestRestarted(
            now=self.now, request_id=request.request_id, num_discarded_tokens=num_output
        ) in of_type(events, RequestRestarted)
        self.models[request_id] = model
        self.restarted.add(request_id)
        self._note(events)

    def fence(self) -> int:
        self.num_fences += 1
        assert self.scheduler.fence() == self.num_fences
        return self.num_fences

    def lift_fence(self, epoch: int) -> None:
        self.scheduler.lift_fence(epoch)
        self.runner.weights = max(self.runner.weights, epoch)

    def lift_due(self) -> int:
        """Make all replacements whose turn has come, as a driver does between steps."""
        while self.runner.weights < self.num_fences:
            if self.scheduler.num_before(self.runner.weights + 1):
                break
            self.lift_fence(self.runner.weights + 1)
        return self.runner.weights

    def schedule(self) -> StepPlan:
        running = [
            r for r in self.scheduler.requests() if r.state is RequestState.RUNNING
        ]
        decoding = {r.request_id for r in self._decoding()}
        plan = self.scheduler.schedule(self._tick())
        self._check_plan(plan, decoding)
        self._check_victims(running)
        self.plans.append(plan)
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> tuple[Event, ...]:
        events = self.scheduler.commit(plan, result, self._tick())
        for chunk in plan.chunks:
            if chunk.request_id not in result.failed:
                self.num_executed[chunk.request_id] += chunk.num_tokens
                self.num_prefilled += 0 if chunk.is_decode else chunk.num_tokens
        assert self.scheduler.service.num_prefill == self.num_prefilled
        self._note(events)
        return events

    def execute_and_commit(self, plan: StepPlan) -> tuple[Event, ...]:
        return self.commit(plan, self.runner.execute(plan))

    def abandon(self, plan: StepPlan) -> tuple[Event, ...]:
        events = self.scheduler.abandon(plan, self._tick())
        self._note(events)
        return events

    def step(self) -> StepPlan:
        """One whole step; returns its plan, the events are in `events`."""
        plan = self.schedule()
        self.execute_and_commit(plan)
        check_scheduler(self.scheduler)
        return plan

    def run(self, max_steps: int = 5_000) -> None:
        """Step until nobody is left."""
        for _ in range(max_steps):
            self.lift_due()
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.describe()}")

    def run_until(self, kind: type[Event], max_steps: int = 1_000) -> StepPlan:
        """Step until such an event happens; return the plan of that step."""
        for _ in range(max_steps):
            num_before = len(self.events)
            plan = self.step()
            if of_type(self.events[num_before:], kind):
                return plan
        raise AssertionError(f"no {kind.__name__} in {max_steps} steps")

    def serve(self, request_id: str, prompt: str, **spec: Any) -> Request:
        """Add one request and run to the end."""
        request = self.add(request_id, prompt, **spec)
        self.run()
        return request

    # Facts

    def reason(self, request_id: str) -> FinishReason | None:
        """Why the request ended; `None` if it has not."""
        end = self.ends.get(request_id)
        return None if end is None else end.reason

    def reasons(self) -> dict[str, FinishReason]:
        return {request_id: end.reason for request_id, end in self.ends.items()}

    def events_of(self, request_id: str) -> list[Event]:
        return [e for e in self.events if getattr(e, "request_id", None) == request_id]

    def num_cached(self, request_id: str) -> int:
        """Tokens the request did not need to compute when it was first admitted."""
        return of_type(self.events_of(request_id), RequestAdmitted)[0].num_cached_tokens

    def resident(self) -> set[tuple[str, str]]:
        """Every published block: who may see it, and the text up to its end."""
        block_size = self.cache.config.block_size
        blocks = set()
        for node in self.cache.tree.nodes():
            text = text_of(b"".join(step.edge for step in node.path()))
            for index in range(node.num_blocks):
                end = len(text) - index * block_size
                blocks.add((node.domain.name, text[:end]))
        return blocks

    def num_findable(
        self, prompt: str, *, tenant: str = "a", namespace: bytes = NAMESPACE
    ) -> int:
        """How many tokens of the text a request of the tenant would find."""
        # One token is always computed, so ask with one more.
        asked = tokens(prompt + "z").buffer
        return self.cache.peek(namespace, Domain.private(tenant), asked).num_tokens

    def expected(self, request_id: str) -> str:
        spec = self.requests[family_of(request_id)].spec
        return generate_alone(
            spec.prompt,
            spec.max_new_tokens,
            sample=sample_of(request_id),
            stops=self.stops,
            model=self.models[request_id],
        )

    def describe(self) -> str:
        return ", ".join(
            f"{r.request_id} {r.state.value} {r.num_computed}/{r.num_tokens}"
            for r in self.scheduler.requests()
        )

    # Checks

    def check(self) -> None:
        """What is true after every call."""
        check_scheduler(self.scheduler)
        weights = [self.models[r.request_id].weights for r in self.scheduler.requests()]
        for epoch in range(self.num_fences + 2):
            num_before = sum(each < epoch for each in weights)
            assert self.scheduler.num_before(epoch) == num_before
        if self.scheduler.pending is None:
            self.runner.check()

    def check_outputs(self) -> None:
        """Everybody got what he would have got alone, as far as he got."""
        for request_id, request in self.requests.items():
            output = text_of(request.tokens[len(request.spec.prompt.buffer) :])
            assert self.outputs[request_id] == output
        for request_id, output in self.outputs.items():
            expected = self.expected(request_id)
            if self.reason(request_id) in _ENDED_WELL:
                assert output == expected, f"{request_id} differs"
            else:
                assert expected.startswith(output), f"{request_id} differs"

    def check_counts(self) -> None:
        """Every token of whoever finished is counted, and once."""
        for request_id, end in self.ends.items():
            counts = end.counts
            assert 0 <= counts.copied <= counts.reused
            if end.num_preemptions == 0:
                assert counts.recomputed == 0
            num_prompt = len(self.requests[family_of(request_id)].spec.prompt)
            if isinstance(end, RequestAborted):
                counted = counts.reused + counts.computed + counts.inherited
                assert counted <= num_prompt
                continue
            if request_id not in self.restarted:
                assert counts.discarded == 0
            if sample_of(request_id) and request_id not in self.restarted:
                assert counts.inherited == num_prompt
                assert (counts.reused, counts.computed) == (0, 0)
            else:
                assert counts.inherited == 0
                assert counts.reused + counts.computed == num_prompt
                assert counts.reused <= num_prompt - 1
            decoded = len(self.outputs[request_id]) - 1  # the last token gets no KV
            assert (
                self.num_executed[request_id]
                == counts.computed + counts.recomputed + decoded
            )

    def check_baseline(self) -> None:
        """Nobody is left and nothing is lost."""
        assert not self.scheduler.has_work
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        usage = self.cache.usage()
        assert usage.num_active_blocks == 0
        assert usage.num_free_blocks + usage.num_cached_blocks == usage.num_total_blocks
        self.cache.evict(usage.num_total_blocks, self._tick())
        assert self.cache.pool.num_free == self.cache.pool.num_total
        assert self.cache.tree.num_nodes == 0
        check_scheduler(self.scheduler)

    def finish(self) -> None:
        """Run to the end; then every promise about ends must have been kept."""
        self.run()
        self.check()
        self.check_outputs()
        self.check_counts()
        self.check_baseline()

    # Private

    def _tick(self) -> float:
        self.now += 1.0
        return self.now

    def _decoding(self) -> list[Request]:
        return [
            request
            for request in self.scheduler.requests()
            if request.state is RequestState.RUNNING and not request.is_prefilling
        ]

    def _check_plan(self, plan: StepPlan, decoding: set[RequestId]) -> None:
        """What a driver may rely on in every plan."""
        assert plan.num_tokens <= self.config.token_budget
        by_id = {chunk.request_id: chunk for chunk in plan.chunks}
        assert len(by_id) == len(plan.chunks), "a request has two chunks in a step"
        for chunk in plan.chunks:
            request = self.scheduler.request(chunk.request_id)
            assert request is not None
            assert chunk.start == request.num_computed < chunk.end
            model = Model(chunk.adapter, chunk.start_position, self.runner.weights)
            assert model == self.models[chunk.request_id], "computed with another model"
            assert chunk.end <= request.num_tokens
            assert chunk.is_decode is (chunk.request_id in decoding)
            span = slice(chunk.start * TOKEN_BYTES, chunk.end * TOKEN_BYTES)
            assert chunk.tokens == request.tokens[span]
            assert len(chunk.block_ids) * self.cache.config.block_size >= chunk.end
            is_last = chunk.end == request.num_tokens
            is_forking = request.num_output_tokens == 0
            wanted = request.spec.num_samples if is_forking else 1
            assert chunk.num_samples == (wanted if is_last else 0)
        for request in self._decoding():
            assert by_id[request.request_id].num_tokens == 1, "a decode gets one token"
        order = [chunk.request_id in decoding for chunk in plan.chunks]
        assert order == sorted(order, reverse=True), "a decode is behind a prefill"

    def _check_victims(self, were_running: list[Request]) -> None:
        """The oldest never goes while anybody else runs; where no tenant is, the youngest."""
        lost = [r for r in were_running if r.state is RequestState.PREEMPTED]
        kept = [r for r in were_running if r.state is RequestState.RUNNING]
        assert kept or not lost, "the oldest was preempted"
        if lost and len(were_running) > 1:
            assert min(were_running, key=lambda r: r.order_key) not in lost
        for victim in lost if self.youngest_yields else ():
            assert all(request.order_key < victim.order_key for request in kept)

    def _note(self, events: Iterable[Event]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case RequestForked(request_id=parent_id):
                    # A sample that ends with its first token is gone already.
                    self._note_children(event, self.requests[parent_id])
                case RequestRestarted(request_id=request_id):
                    num_discarded = len(self.outputs[request_id])
                    assert event.num_discarded_tokens == num_discarded
                    self.outputs[request_id] = ""
                    self.num_executed[request_id] = 0
                case TokenSampled(request_id=request_id, token=token, index=index):
                    assert index == len(self.outputs[request_id])
                    self.outputs[request_id] += chr(_FIRST + token)
                case RequestFinished() | RequestAborted():
                    assert event.request_id not in self.ends, "a request ends once"
                    self.ends[event.request_id] = event
        if self.scheduler.pending is None:
            self.runner.forget(self.cache.pool.free_block_ids())

    def _note_children(self, event: RequestForked, parent: Request) -> None:
        for sample in range(1, parent.spec.num_samples):
            request_id = child_id(parent.request_id, sample)
            assert event.child_ids[sample - 1] == request_id
            self.models[request_id] = self.models[parent.request_id]
            child = self.scheduler.request(request_id)
            if child is not None:
                self.requests[request_id] = child
