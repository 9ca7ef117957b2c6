"""A driver that keeps books, and a keeper who knows only what everybody can see.

`BookedDriver` gives the cache a ledger. `Keeper` looks at every block after every act,
notes whose it is, and adds up seconds from scratch; `check_entry` does the same for one
request. Neither asks the ledger how it arrived at anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

from stemkv.core import Domain, Request, RequestId
from stemkv.core.books.account import Account
from stemkv.core.books.entry import LedgerEntry, Miss, MissReason
from stemkv.core.books.ledger import PUBLIC_ACCOUNT, Ledger
from stemkv.core.prefix.blocks import BlockState
from stemkv.core.prefix.cache import PrefixCache
from stemkv.core.prefix.events import BlocksEvicted
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identity import PUBLIC
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.schedule.events import (
    RequestAborted,
    RequestAdmitted,
    RequestFinished,
    RequestRestarted,
)
from stemkv.core.schedule.scheduler import Scheduler
from tests.core.scheduling import OWN, Driver, Model, build_spec, namespace_of, of_type
from tests.sim.depth_cost import DepthCost

__all__ = ["BookedDriver", "Keeper", "check_entry", "spans"]

Block = tuple[bytes, Domain, bytes]  # namespace, who may see it, all tokens up to it


class BookedDriver(Driver):
    """A driver whose cache has a ledger, with a keeper at its side."""

    def __init__(
        self,
        *,
        is_booked: bool = True,
        max_history_blocks: int | None = None,
        **kw: Any,
    ) -> None:
        super().__init__(**kw)
        self._entries: list[LedgerEntry] = []
        self.ledger = Ledger(
            self.cache.config.block_size,
            DepthCost(),
            max_history_blocks=max_history_blocks,
        )
        self.keeper = Keeper(self.scheduler)
        if is_booked:
            self.cache.watch(self.ledger)
            self.scheduler._lives.journal.ledger = self.ledger

    @property
    def entries(self) -> list[LedgerEntry]:
        """Of all requests that have ended."""
        self._entries.extend(self.ledger.take_entries())
        return self._entries

    def add_in(
        self,
        request_id: str,
        prompt: str,
        domain: Domain,
        *,
        tenant: str | None = None,
        namespace: bytes | None = OWN,
        max_new_tokens: int = 4,
        num_samples: int = 1,
        hints: Hints = NO_HINTS,
    ) -> Request:
        """Add a request of a tenant in some domain, a group's for instance."""
        now = self._tick()
        model = Model(weights=self.num_fences)
        spec = build_spec(
            request_id,
            prompt,
            max_new_tokens=max_new_tokens,
            arrival_s=now,
            namespace=namespace_of(model) if namespace == OWN else namespace,
            num_samples=num_samples,
            hints=hints,
        )
        request = self.scheduler.add(replace(spec, domain=domain, tenant=tenant))
        self.requests[request_id] = request
        self.models[request_id] = model
        return request

    def cut_off(self, request_id: str) -> None:
        self.scheduler.cut_off(RequestId(request_id))

    def entry(self, request_id: str) -> LedgerEntry:
        """The one entry of a request that has ended."""
        (entry,) = [e for e in self.entries if e.request_id == request_id]
        return entry

    def misses(self, request_id: str) -> list[tuple[int, int, MissReason]]:
        return spans(self.entry(request_id).misses)

    def check_books(self) -> None:
        """The ledger agrees with itself and with the keeper, at this moment."""
        self.ledger.check(self.cache.tree.nodes(), self.now)
        self.keeper.check_accounts(self.ledger.accounts(self.now))
        blamed = sum(a.stalling_blocks for a in self._accounts().values())
        assert blamed == self.ledger.stalls.active_blocks
        prefixes = self.ledger.prefixes(self.cache.tree.nodes(), self.now)
        held = self.keeper.published
        # A split divides by blocks, so these are sums of fractions.
        runs = [*prefixes.values(), self.ledger.forgotten]
        active_s = math.fsum(run.active_block_s for run in runs)
        assert math.isclose(active_s, held.active_block_s, abs_tol=1e-9)
        assert all(p.start < p.end for p in prefixes.values())
        num_evicted = sum(a.num_evicted_blocks for a in self._accounts().values())
        assert num_evicted == self.cache.usage().num_evicted_blocks
        num_published = sum(a.num_published_blocks for a in self._accounts().values())
        assert num_published == self.cache.usage().num_published_blocks

    def check_entries(self) -> None:
        """Everybody who was admitted has one entry, and it is right."""
        admitted: set[str] = set()
        for event in self.events:
            match event:
                case RequestAdmitted():
                    admitted.add(event.request_id)
                case RequestRestarted():
                    admitted.discard(event.request_id)
        ended = [r for r in self.ends if r in admitted and "#" not in r]
        assert sorted(e.request_id for e in self.entries) == sorted(ended)
        for entry in self.entries:
            check_entry(entry, self.requests[entry.request_id])
            self._check_end(entry, self.ends[entry.request_id])
        sums: Counter[MissReason] = Counter()
        for entry in self.entries:
            for miss in entry.misses:
                sums[miss.reason] += miss.end - miss.start
        assert self.ledger.misses == {reason: sums[reason] for reason in MissReason}
        reused = sum(e.num_reused_tokens for e in self.entries)
        assert self.ledger.num_reused_tokens == reused
        # Every figure is a multiple of 1/64 second, so these sums are exact.
        assert self.ledger.saved_s == sum(e.saved_s for e in self.entries)
        evicted = sum(e.num_blocks for e in of_type(self.events, BlocksEvicted))
        assert evicted == self.cache.usage().num_evicted_blocks

    def finish(self) -> None:
        """Everything a driver promises at its end, and the books too."""
        self.run()
        self._note(self.scheduler.take_events())
        self.check_books()
        self.check_entries()
        super().finish()

    def _accounts(self) -> dict[str, Account]:
        return self.ledger.accounts(self.now)

    def _check_end(
        self, entry: LedgerEntry, end: RequestFinished | RequestAborted
    ) -> None:
        counts = end.counts
        assert entry.finish_reason == end.reason.value
        assert entry.ended_s == end.now
        assert entry.num_reused_tokens == counts.reused
        assert entry.num_copied_tokens == counts.copied
        assert entry.num_computed_tokens == counts.computed
        assert entry.num_recomputed_tokens == counts.recomputed
        assert entry.num_preemptions == end.num_preemptions
        assert entry.num_output_tokens == len(self.outputs[entry.request_id])
        if isinstance(end, RequestFinished):
            total = entry.num_reused_tokens + entry.num_computed_tokens
            assert total == entry.num_prompt_tokens

    def _tick(self) -> float:
        self.keeper.pass_time(1.0)
        return super()._tick()


class Keeper:
    """Whose every block was, second by second."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.accounts: dict[str, Account] = {}
        self.published = Account()  # what is in the tree, whosever
        self.ever: set[Block] = set()
        self._scheduler = scheduler
        self._owners: dict[int, str] = {}

    def pass_time(self, seconds: float) -> None:
        """Note how things stand, and that they stay so for a while."""
        cache = self._scheduler.cache
        domains = self._domains(cache)
        active = self._active(cache)
        for account in (*self.accounts.values(), self.published):
            account.num_active_blocks = account.num_cached_blocks = 0
        for block_id, owner in self._owners_now(cache).items():
            is_public = domains.get(block_id) == PUBLIC
            name = PUBLIC_ACCOUNT if is_public else owner
            accounts = [self.accounts.setdefault(name, Account())]
            if cache.pool.state(block_id) is BlockState.PUBLISHED:
                accounts.append(self.published)
            for account in accounts:
                if block_id in active:
                    account.num_active_blocks += 1
                    account.active_block_s += seconds
                else:
                    account.num_cached_blocks += 1
                    account.retained_block_s += seconds

    def check_accounts(self, accounts: dict[str, Account]) -> None:
        self.pass_time(0.0)
        names = {n for n, a in accounts.items() if _picture(a) != _picture(Account())}
        assert names <= self.accounts.keys()
        for name, own in self.accounts.items():
            assert _picture(accounts[name]) == _picture(own), name

    def _owners_now(self, cache: PrefixCache) -> dict[int, str]:
        """Who holds a private block, or did when it was published."""
        for request in self._scheduler.requests():
            if request.lease is not None:
                for block_id in request.lease.table.ids():
                    if cache.pool.state(block_id) is BlockState.PRIVATE:
                        self._owners[block_id] = request.spec.owner
        for block_id in cache.pool.free_block_ids():
            self._owners.pop(block_id, None)
        return self._owners

    def _domains(self, cache: PrefixCache) -> dict[int, Domain]:
        size = cache.config.block_size * TOKEN_BYTES
        domains = {}
        for node in cache.tree.nodes():
            path = node.path()
            prefix = b"".join(step.edge for step in path)
            start = len(prefix) - len(node.edge)
            for index, block_id in enumerate(node.block_ids, 1):
                domains[block_id] = node.domain
                block = prefix[: start + index * size]
                self.ever.add((node.root().namespace, node.domain, block))
        return domains

    def _active(self, cache: PrefixCache) -> set[int]:
        held: set[int] = set()
        for request in self._scheduler.requests():
            lease = request.lease
            if lease is None:
                continue
            held.update(lease.table.ids())
            if lease.copy_source is not None:
                for node in lease.copy_source.path():
                    held.update(node.block_ids)
        return held


def _picture(account: Account) -> tuple[float, ...]:
    return (
        account.num_active_blocks,
        account.num_cached_blocks,
        account.active_block_s,
        account.retained_block_s,
    )


def spans(misses: Iterable[Miss]) -> list[tuple[int, int, MissReason]]:
    """Misses with equal neighbours joined: they may differ in when they left."""
    joined: list[tuple[int, int, MissReason]] = []
    for miss in misses:
        start = miss.start
        if joined and joined[-1][1:] == (miss.start, miss.reason):
            start = joined.pop()[0]
        joined.append((start, miss.end, miss.reason))
    return joined


def check_entry(entry: LedgerEntry, request: Request) -> None:
    """What holds for any entry of a request that has ended."""
    prompt = entry.num_prompt_tokens
    assert prompt == len(request.spec.prompt)
    assert entry.tenant == request.spec.owner
    assert entry.domain == request.spec.domain
    assert entry.arrival_s == request.spec.arrival_s
    assert entry.ended_s is not None
    assert entry.arrival_s <= entry.admitted_s <= entry.ended_s
    assert 0 <= entry.stall_s <= entry.ended_s - entry.arrival_s
    assert entry.num_reused_tokens <= prompt - 1
    position = 0
    for miss in entry.misses:
        assert position <= miss.start < miss.end <= prompt
        position = miss.end
    num_missed = sum(miss.end - miss.start for miss in entry.misses)
    assert num_missed == entry.num_computed_tokens
    assert sum(entry.writers.values()) == entry.num_reused_tokens
    assert all(entry.writers.values())
    if entry.namespace is None:
        reasons = {miss.reason for miss in entry.misses}
        assert reasons <= {MissReason.UNSHARABLE}
        assert entry.num_reused_tokens == 0
    reused = [token for low, high in entry.reused for token in range(low, high)]
    assert len(reused) == entry.num_reused_tokens
    missed = [t for miss in entry.misses for t in range(miss.start, miss.end)]
    assert not set(reused) & set(missed)
    assert all(end < low for (_, end), (low, _) in pairwise(entry.reused))
    if num_missed + entry.num_reused_tokens == prompt:
        # What was not missed was reused, and saved what it would have cost.
        assert entry.saved_s == _saved(entry)
    if entry.num_preemptions == 0:
        check_lookup(entry, request)


def check_lookup(entry: LedgerEntry, request: Request) -> None:
    """What a lookup found is the beginning of the prompt, and nothing else."""
    first = entry.num_reused_tokens
    assert math.isclose(entry.saved_s, DepthCost().prefill_seconds(0, first))
    if entry.first_miss is not None:
        assert entry.first_miss.start == first
    if first == 0:
        assert entry.prefix_digest is None
        return
    assert entry.namespace is not None
    digest = sha256(entry.namespace + request.spec.prompt.buffer[: 4 * first])
    assert entry.prefix_digest == digest.digest()


def _saved(entry: LedgerEntry) -> float:
    cost, saved, position = DepthCost(), 0.0, 0
    for miss in entry.misses:
        saved += cost.prefill_seconds(position, miss.start)
        position = miss.end
    return saved + cost.prefill_seconds(position, entry.num_prompt_tokens)
