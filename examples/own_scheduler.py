"""A scheduler of one's own over StemKV's cache, with tensors (numpy).

Run it: `python examples/own_scheduler.py`. It serves a few prompts that begin alike from
a pool that is too small for all of them, and compares every token with a model that
caches nothing. On the way it meets all that a driver of the cache must do:

* `acquire` answers `None`: there is no room now, so the request waits;
* `lease.copy`: a match that ends inside a block is copied before anything is computed,
  and `copied` says that it was;
* `publish` makes computed blocks matchable, never earlier;
* `grow` answers `False`: somebody has to give blocks back before a decode can go on;
* `prepare_write`: after a `fork` two leases share a block, and who writes first copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stemkv import (
    BlockCopy,
    CacheConfig,
    ComputeIdentity,
    Demand,
    Domain,
    Lease,
    Lru,
    PrefixCache,
    Retention,
    TokenIds,
)

VOCABULARY, WIDTH, LAYERS = 50, 16, 2
BLOCK, BLOCKS = 4, 12

Array = NDArray[np.float64]


class Model:
    """Two layers of causal attention with random weights; greedy."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        self.embedding = random.normal(size=(VOCABULARY, WIDTH))
        self.weights = random.normal(size=(LAYERS, 3, WIDTH, WIDTH)) / WIDTH**0.5
        # Keys and values: layer, key or value, slot, width. A block is BLOCK slots.
        self.kv = np.full((LAYERS, 2, BLOCKS * BLOCK, WIDTH), np.nan)

    def copy(self, copy: BlockCopy) -> None:
        """Copy leading slots of a block to another one, in all layers."""
        source, target = copy.source * BLOCK, copy.target * BLOCK
        num = copy.num_tokens
        self.kv[:, :, target : target + num] = self.kv[:, :, source : source + num]

    def compute(self, tokens: list[int], start: int, lease: Lease) -> int:
        """Write KV of positions `start …` into the lease's blocks; return a token."""
        table = np.array(lease.table.ids())
        position = np.arange(len(tokens))
        slots = table[position // BLOCK] * BLOCK + position % BLOCK
        hidden = self.embedding[tokens[start:]] + position[start:, None] * 0.1
        for layer, (q, k, v) in enumerate(self.weights):
            self.kv[layer, 0, slots[start:]] = hidden @ k
            self.kv[layer, 1, slots[start:]] = hidden @ v
            keys, values = self.kv[layer][:, slots]
            hidden = hidden + attend(hidden @ q, keys, values, start)
        return int(np.argmax(self.embedding @ hidden[-1]))

    def uncached(self, tokens: list[int]) -> int:
        """Return the next token, computed from nothing."""
        hidden = self.embedding[tokens] + np.arange(len(tokens))[:, None] * 0.1
        for q, k, v in self.weights:
            hidden = hidden + attend(hidden @ q, hidden @ k, hidden @ v, 0)
        return int(np.argmax(self.embedding @ hidden[-1]))


def attend(queries: Array, keys: Array, values: Array, start: int) -> Array:
    """Let query `i`, at position `start + i`, see all positions up to its own."""
    scores = queries @ keys.T / WIDTH**0.5
    is_later = np.arange(len(keys)) > start + np.arange(len(queries))[:, None]
    scores = np.where(is_later, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Array = weights / weights.sum(axis=1, keepdims=True) @ values
    return result


@dataclass(eq=False)
class Job:
    """A request, or one sample of it."""

    prompt: list[int]
    tenant: Domain
    num_new: int
    num_samples: int = 1
    tokens: list[int] = field(default_factory=list)  # prompt and what was sampled
    num_computed: int = 0
    lease: Lease | None = None

    @property
    def is_done(self) -> bool:
        """Whether all tokens are sampled."""
        return len(self.tokens) == len(self.prompt) + self.num_new

    @property
    def buffer(self) -> bytes:
        """The tokens as the cache takes them."""
        return TokenIds.from_ids(self.tokens).buffer


class Server:
    """First come, first served; the youngest gives way when memory is short."""

    def __init__(self, cache: PrefixCache, namespace: bytes, model: Model) -> None:
        self.cache = cache
        self.namespace = namespace
        self.model = model
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.met: dict[str, int] = {}  # what happened, and how often
        self.now = 0.0

    def add(self, job: Job) -> None:
        """Queue a job."""
        job.tokens = list(job.prompt)
        self.waiting.append(job)

    def step(self) -> None:
        """Start whoever fits, then give everybody that runs a token."""
        self.now += 1.0
        while self.waiting and self.start(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        for job in tuple(self.running):
            if job.lease is not None and self.make_room(job):
                self.advance(job)

    def start(self, job: Job) -> bool:
        """Match, pin and allocate in one step, or change nothing."""
        job.lease = self.cache.acquire(
            self.namespace,
            job.tenant,
            job.buffer,
            Demand(num_slots=len(job.tokens)),
            now=self.now,
        )
        if job.lease is None:
            self.note("waited for memory")
            return False
        job.num_computed = job.lease.num_matched_tokens
        self.note("tokens reused", job.num_computed)
        if job.lease.copy is not None:
            self.model.copy(job.lease.copy)
            self.cache.copied(job.lease, self.now)
            self.note("copied the part of a block")
        return True

    def make_room(self, job: Job) -> bool:
        """Get private slots for all tokens; `False`: the job itself had to yield."""
        assert job.lease is not None
        while True:
            if self.cache.grow(job.lease, len(job.tokens), self.now):
                is_ready, copy = self.cache.prepare_write(
                    job.lease, job.num_computed, self.now
                )
                if copy is not None:
                    self.model.copy(copy)
                    self.note("copied before writing")
                if is_ready:
                    return True
            victim = self.running.pop()
            self.stop(victim)
            self.waiting.appendleft(victim)
            self.note("gave way")
            if victim is job:
                return False

    def advance(self, job: Job) -> None:
        """Compute what is missing, publish it, and take the next token."""
        assert job.lease is not None
        token = self.model.compute(job.tokens, job.num_computed, job.lease)
        job.num_computed = len(job.tokens)
        self.cache.publish(job.lease, job.buffer, job.num_computed, self.now)
        for _ in range(job.num_samples - 1):
            sample = Job(job.prompt, job.tenant, job.num_new, tokens=[*job.tokens])
            sample.num_computed = job.num_computed
            sample.lease = self.cache.fork(job.lease, self.now)
            # Another first token, so that the samples differ from here on.
            sample.tokens.append((token + 1) % VOCABULARY)
            self.running.append(sample)
            self.note("forked")
        job.num_samples = 1
        assert token == self.model.uncached(job.tokens), "reuse must not be seen"
        job.tokens.append(token)
        if job.is_done:
            self.stop(job)
            self.running.remove(job)
            self.note("finished")

    def stop(self, job: Job) -> None:
        """Give the blocks back; the published ones stay cached while there is room."""
        assert job.lease is not None
        self.cache.release(job.lease, self.now)
        job.lease = None
        job.num_computed = 0

    def note(self, what: str, num: int = 1) -> None:
        """Count what happened."""
        self.met[what] = self.met.get(what, 0) + num


def main() -> dict[str, int]:
    """Serve, compare, and return how often each thing happened."""
    identity = ComputeIdentity.of(
        model_config={"layers": LAYERS, "width": WIDTH, "vocabulary": VOCABULARY},
        weights_digest=bytes(32),  # in earnest: SHA-256 over the weights
        engine_config={"name": "numpy example", "kv": "layer,kv,slot,width"},
        kv_dtype="float64",
        block_size=BLOCK,
        adapter_digest=None,
    )
    namespace = identity.namespace()
    assert namespace is not None, "every fact is known"
    cache = PrefixCache(
        CacheConfig(num_blocks=BLOCKS, block_size=BLOCK), Retention(Lru)
    )
    server = Server(cache, namespace, Model())
    ann, bob = Domain.private("ann"), Domain.private("bob")
    system = list(range(10, 24))  # fourteen tokens: three blocks and a half
    server.add(Job([*system, 1, 2], ann, num_new=6))
    server.add(Job([*system, 3], ann, num_new=5, num_samples=2))
    server.add(Job([*system, 4, 5, 6], bob, num_new=4))
    server.add(Job([*system, 7], ann, num_new=12))
    server.add(Job([*system, 1, 2, 8], ann, num_new=3))
    while server.waiting or server.running:
        server.step()
    assert cache.num_active_blocks == 0, "nothing is held any more"
    for what, num in sorted(server.met.items()):
        print(f"{num:4d}  {what}")
    return server.met


if __name__ == "__main__":
    main()
