"""The books: what each hit saved, what each retained byte-second cost, why tokens missed.

Owns the lookup record of every request, the accounts of tenants and of prefixes, and
the equations between them (`check`). It watches the cache, and `Scheduler` tells it of
requests; it decides nothing, and nothing it says may reach another tenant: it is the
operator's.

Two kinds of account. A tenant's account integrates blocks over time: active ones (held
by a lease) and retained ones (cached, held by nobody). What is public belongs to nobody
in particular and has an account of its own, `PUBLIC_ACCOUNT`. A prefix's account does
the same for one node of the tree, and is credited with the hits on it; what is evicted
is booked where the history remembers its tokens, so that a prefix that comes and goes
has one line. Both kinds add up to the same totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from stemkv.core.books.account import Account, Accounts, PrefixAccount, RunTotals
from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import (
    LedgerEntry,
    Miss,
    MissReason,
    Stall,
    StepSavings,
    first,
    without,
)
from stemkv.core.books.history import History
from stemkv.core.books.reasons import Reasons
from stemkv.core.books.runs import Runs
from stemkv.core.books.share import ShareOfWork
from stemkv.core.books.stalls import Stalls, StallTotals
from stemkv.core.books.totals import Totals
from stemkv.core.books.waits import Waits
from stemkv.core.prefix.events import DropReason
from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES
from stemkv.core.prefix.tree import Node
from stemkv.core.prefix.watcher import LeaseWatcher, Publication
from stemkv.errors import InvariantError

__all__ = [
    "PUBLIC_ACCOUNT",
    "Ledger",
    "StallTotals",
]

# What the operator declared public; no tenant pays for it, and none has an empty name.
PUBLIC_ACCOUNT = ""


class Ledger(LeaseWatcher):
    """Keeps the books of one cache.

    Entries of requests that have ended wait for `take_entries`. Costs O(nodes on the
    path) per request and O(1) per event, at any depth. `max_history_blocks` bounds what
    is remembered for the reasons of misses (see `History`), `max_idle_accounts` how many
    tenants that hold nothing keep an account (see `Accounts`); `None` remembers all.
    """

    def __init__(
        self,
        block_size: int,
        cost: CostModel,
        *,
        max_history_blocks: int | None = None,
        max_idle_accounts: int | None = None,
    ) -> None:
        self.cost = cost
        self.block_size = block_size
        self._ended: list[LedgerEntry] = []  # not yet taken
        self._history = History(block_size, max_blocks=max_history_blocks)
        self._accounts = Accounts(max_idle_accounts)
        self._runs = Runs(block_size, self._history)
        self._reasons = Reasons(block_size, self._history)
        self._open: dict[str, LedgerEntry] = {}
        self._stalls = Stalls()
        self._step = StepSavings()  # since `take_step`
        self._totals = Totals()

    # Questions

    @property
    def misses(self) -> Mapping[MissReason, int]:
        """Tokens missed by requests that have ended, by reason; zeros included."""
        return dict(self._totals.num_missed)

    @property
    def num_reused_tokens(self) -> int:
        """Prompt tokens that ended requests reused."""
        return self._totals.num_reused

    @property
    def saved_s(self) -> float:
        """Prefill seconds that ended requests were saved."""
        return self._totals.saved_s

    @property
    def stalls(self) -> StallTotals:
        """All stalls so far."""
        return self._stalls.totals

    def accounts(self, now: float) -> dict[str, Account]:
        """Return copies of the accounts of tenants, with integrals up to `now`."""
        return self._accounts.copies(now)

    @property
    def departed(self) -> Account:
        """What those held whose accounts were closed, all together."""
        return self._accounts.departed.copy()

    @property
    def forgotten(self) -> RunTotals:
        """What runs earned and cost that the history has forgotten, all together."""
        return replace(
            self._history.forgotten, changes={**self._history.forgotten.changes}
        )

    def prefixes(self, nodes: Iterable[Node], now: float) -> dict[bytes, PrefixAccount]:
        """Return the accounts of all runs by digest, with integrals up to `now`.

        A run is what no branch divides in all that is remembered, so it stays the same
        through evictions. The digest is SHA-256 over namespace, domain and all tokens
        up to its end. `nodes` are the resident ones, as `PrefixTree.nodes` gives them.
        """
        return self._history.accounts(self._runs.accounts(nodes, now))

    def entry(self, request_id: str) -> LedgerEntry | None:
        """Return the entry of a running request; `None` before admission and after."""
        return self._open.get(request_id)

    @property
    def num_stalled(self) -> int:
        """Requests whose admission waits for memory now."""
        return len(self._stalls)

    def is_stalled(self, request_id: str) -> bool:
        """Whether its admission waits for memory."""
        return request_id in self._stalls

    def check(self, nodes: Iterable[Node], now: float) -> None:
        """Raise `InvariantError` unless all sums agree.

        Prefixes and tenants hold the same blocks for the same time; hits credited to
        prefixes are the tokens that requests reused; what requests reused and missed is
        their prompts, and what they missed is what they computed.
        """
        runs = [*self.prefixes(nodes, now).values(), self.forgotten]
        accounts = [*self.accounts(now).values(), self.departed]
        self._totals.check(runs, accounts, self._open.values(), self.cost)

    # Identities

    def name(self, namespace: bytes, facts: Mapping[str, object]) -> None:
        """Tell what a namespace stands for, so that a miss can name what differs.

        `facts` are the fields of its `ComputeIdentity`, or what a trace tells of one.
        """
        self._reasons.name(namespace, facts)

    def facts(self, namespace: bytes) -> Mapping[str, object] | None:
        """Return what a namespace stands for; `None` if nobody told."""
        return self._reasons.facts(namespace)

    # What requests do

    def admitted(
        self,
        request_id: str,
        *,
        tenant: str,
        domain: Domain,
        namespace: bytes | None,
        prompt: bytes,
        path: list[Node],
        copied: tuple[Node, int] | None,
        num_awaitable: int,
        arrival_s: float,
        now: float,
    ) -> None:
        """Book a request's lookup, before it computes or publishes anything.

        `path` are the nodes it reuses as a whole, `copied` the node and how many tokens
        are copied out of its block, `num_awaitable` up to where some running request is
        computing the same tokens for it to see.
        """
        num_prompt = len(prompt) // TOKEN_BYTES
        entry = LedgerEntry(
            request_id=request_id,
            tenant=tenant,
            domain=domain,
            namespace=namespace,
            prefix_digest=None,
            arrival_s=arrival_s,
            admitted_s=now,
            num_prompt_tokens=num_prompt,
            num_reused_tokens=0,
            num_reused_blocks=0,
            num_copied_tokens=0,
            saved_s=0.0,
            misses=[Miss(0, num_prompt, MissReason.UNSHARABLE)],
            reused=[],
            writers={},
            regrets=(),
        )
        self._open[request_id] = entry
        self._end_stall(request_id, now)
        if namespace is None:
            return
        reused = self._credit(entry, path, copied, 0, num_prompt)
        if reused:
            entry.prefix_digest = self._digest(namespace, path, prompt, reused)
        after = self._runs.place(path[-1]) if path else None
        self._reasons.explain(
            entry, prompt, reused, num_awaitable, after=after, now=now
        )

    def resumed(
        self,
        request_id: str,
        *,
        path: list[Node],
        copied: tuple[Node, int] | None,
        num_known: int,
        now: float,
    ) -> None:
        """Book what a preempted request finds beyond `num_known` tokens.

        What it had reused or computed before is recomputed or found again, and counts
        once; what others have computed meanwhile is reused now. A sample that was forked
        has no entry, so only its stall is booked.
        """
        self._end_stall(request_id, now)
        entry = self._open.get(request_id)
        if entry is not None and entry.namespace is not None:
            end = self._credit(entry, path, copied, num_known, entry.num_prompt_tokens)
            entry.misses = without(entry.misses, num_known, end)

    def restarted(self, request_id: str) -> None:
        """Book that a request begins again: what it reused so far was in vain."""
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._totals.waste(entry)

    def stalled(
        self,
        request_id: str,
        *,
        tenant: str,
        num_missing: int,
        num_active: int,
        num_shared: int,
        num_cached: int,
        holders: tuple[tuple[str, int], ...],
        now: float,
    ) -> None:
        """Book that admission has to wait for memory, once for each stall.

        `holders` are running requests and their blocks, those that hold most.
        """
        self._accounts.of(tenant, now).num_stalls += 1
        self._accounts.blame()
        stall = Stall(
            start_s=now,
            end_s=now,
            num_missing_blocks=num_missing,
            active=holders,
            retained=self._accounts.retained(),
        )
        self._stalls.begin(
            request_id,
            tenant,
            stall,
            num_active=num_active,
            num_shared=num_shared,
            num_cached=num_cached,
        )

    def left_blocks(self, request_id: str, num_blocks: int) -> None:
        """Book blocks that a request published."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.num_retained_blocks += num_blocks

    def ended(
        self,
        request_id: str,
        *,
        reason: str,
        num_reused: int,
        num_computed: int,
        num_recomputed: int,
        num_output: int,
        num_preemptions: int,
        share: ShareOfWork | None = None,
        waits: Waits | None = None,
        now: float,
    ) -> None:
        """Close a request's entry; one that was never admitted has none."""
        self._end_stall(request_id, now)
        entry = self._open.pop(request_id, None)
        if entry is None:
            return
        if num_reused != entry.num_reused_tokens:
            raise InvariantError(
                f"request {request_id} reused {num_reused} tokens, the ledger has "
                f"{entry.num_reused_tokens}"
            )
        num_missed = sum(miss.end - miss.start for miss in entry.misses)
        if num_output and num_computed != num_missed:
            raise InvariantError(
                f"request {request_id} computed {num_computed} tokens of its prompt, "
                f"the ledger has {num_missed} that it missed"
            )
        # One that was aborted has not computed all it missed.
        entry.misses = first(entry.misses, num_computed)
        entry.ended_s = now
        entry.finish_reason = reason
        entry.num_computed_tokens = num_computed
        entry.num_recomputed_tokens = num_recomputed
        entry.num_output_tokens = num_output
        entry.num_preemptions = num_preemptions
        entry.share = share
        if waits is not None:
            entry.waits = tuple(waits.spans)
            entry.wait_s = dict(waits.seconds)
        self._totals.add(entry, num_unreached=num_missed - num_computed)
        self._ended.append(entry)

    def take_entries(self) -> tuple[LedgerEntry, ...]:
        """Return and forget the entries of requests that ended since the last call."""
        entries = tuple(self._ended)
        self._ended.clear()
        return entries

    def take_step(self) -> StepSavings:
        """Return and forget what hits have saved since the last call."""
        savings, self._step = self._step, StepSavings()
        return savings

    # What blocks do

    def allocated(self, owner: str, num_blocks: int, now: float) -> None:
        """Book blocks that became private to a lease of the owner."""
        self._accounts.move(owner, now, active=num_blocks)

    def freed(self, owner: str, num_blocks: int, now: float) -> None:
        """Book private blocks that nobody holds any more."""
        self._accounts.move(owner, now, active=-num_blocks)

    def added(self, node: Node, publication: Publication) -> None:
        """Book that private blocks are in a new node now; a lease pins it."""
        self._published(node, publication)
        self._runs.added(node, publication)

    def extended(self, node: Node, publication: Publication) -> None:
        """Book that a node was lengthened by private blocks of its lease."""
        self._published(node, publication)
        self._runs.extended(node, publication)

    def pinned(self, node: Node, now: float) -> None:
        """Book that a lease begins to hold a node that none held."""
        self._change(node, now, is_pinned=True)

    def unpinned(self, node: Node, tick: int, now: float) -> None:
        """Book that no lease holds a node any more: from now on it is retained."""
        self._change(node, now, is_pinned=False)

    def split(self, upper: Node, lower: Node, now: float) -> None:
        """Divide an account as its node was divided."""
        self._runs.split(upper, lower, now)

    def merged(self, upper: Node, lower: Node, now: float) -> None:
        """Join two accounts as their nodes were joined."""
        self._runs.merged(upper, lower, now)

    def trimming(
        self, node: Node, num_kept: int, reason: DropReason, now: float
    ) -> None:
        """Book that a node is about to lose all but its first `num_kept` blocks."""
        num_dropped = node.num_blocks - num_kept
        name = account_of(node.domain, node.owner)
        self._accounts.move(name, now, cached=-num_dropped)
        account = self._accounts.of(name, now)
        if reason is DropReason.EVICTED:
            account.num_evicted_blocks += num_dropped
        elif reason is DropReason.REFUSED:
            account.num_refused_blocks += num_dropped
        self._runs.trimming(node, num_kept, reason, now)

    # Private

    def _published(self, node: Node, publication: Publication) -> None:
        num_blocks, now = len(publication.block_ids), publication.now
        name = account_of(node.domain, node.owner)
        self._accounts.move(publication.caller.owner, now, active=-num_blocks)
        self._accounts.move(name, now, active=num_blocks)
        self._accounts.of(name, now).num_published_blocks += num_blocks

    def _credit(
        self,
        entry: LedgerEntry,
        path: list[Node],
        copied: tuple[Node, int] | None,
        start: int,
        limit: int,
    ) -> int:
        """Credit the nodes for tokens `[start, …)` of the prompt; return up to where.

        At most `limit` tokens: a resumed request may find its own output as well.
        """
        found = [(node, node.num_blocks * self.block_size, False) for node in path]
        if copied is not None:
            found.append((copied[0], copied[1], True))
        position = 0
        for node, num_tokens, is_copied in found:
            low, high = max(position, start), min(position + num_tokens, limit)
            position += num_tokens
            if low >= high:
                continue
            seconds = self.cost.prefill_seconds(low, high)
            self._runs.hit(node, low, high)
            entry.saved_s += seconds
            self._step.num_tokens += high - low
            self._step.seconds += seconds
            self._step.joules += self.cost.prefill_joules(low, high)
            entry.num_reused_tokens += high - low
            if entry.reused and entry.reused[-1][1] == low:
                low_before, _ = entry.reused.pop()
                entry.reused.append((low_before, high))
            else:
                entry.reused.append((low, high))
            if is_copied:
                entry.num_copied_tokens += high - low
            else:
                entry.num_reused_blocks += (high - low) // self.block_size
            # Of a public run too: who brought it in, not whose account it is on.
            entry.writers[node.owner] = entry.writers.get(node.owner, 0) + high - low
            self._totals.credit(high - low, seconds)
        return max(start, min(position, limit))

    def _digest(
        self, namespace: bytes, path: list[Node], prompt: bytes, reused: int
    ) -> bytes:
        """Return SHA-256 over a namespace and the leading `reused` tokens."""
        whole: list[Node] = []
        end = 0
        for node in path:
            num_tokens = node.num_blocks * self.block_size
            if end + num_tokens > reused:
                break
            whole.append(node)
            end += num_tokens
        tail = prompt[end * TOKEN_BYTES : reused * TOKEN_BYTES]
        return self._runs.digest(namespace, whole, tail)

    def _end_stall(self, request_id: str, now: float) -> None:
        ended = self._stalls.end(request_id, now)
        if ended is None:
            return
        tenant, stall = ended
        self._accounts.of(tenant, now).stall_s += now - stall.start_s
        entry = self._open.get(request_id)
        if entry is not None:
            entry.stall_s += now - stall.start_s
            entry.stalls += (stall,)

    def _change(self, node: Node, now: float, *, is_pinned: bool) -> None:
        self._runs.change(node, now, is_pinned=is_pinned)
        num_blocks = node.num_blocks if is_pinned else -node.num_blocks
        name = account_of(node.domain, node.owner)
        self._accounts.move(name, now, active=num_blocks, cached=-num_blocks)


def account_of(domain: Domain, owner: str) -> str:
    """Return whose account a block is on: nobody's in particular if it is public."""
    return PUBLIC_ACCOUNT if domain == PUBLIC else owner
