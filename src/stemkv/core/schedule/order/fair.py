"""Least work first, with a bound on everybody's wait and on the gap between tenants.

Owns two accounts for each tenant. Its *deficit* is what it may still be served before
others must be (deficit round robin: Shreedhar and Varghese, SIGCOMM 1995), in weighted
tokens: one for a prefill token, `decode_weight` for a decoded one. Its *lane credit* is
the share 1/k of its prefill tokens that goes to its oldest unfinished request, whatever
the keys say.

So when a request arrives behind a backlog of B uncached tokens of its own tenant, itself
included, its tenant runs at most about k * B prefill tokens before its first token, as
long as memory is not short: 1/k of them went down the lane, which is first come, first
served. And between two backlogged tenants of equal weight the difference of what they
were served stays near two quanta. Both bounds are in work, so they scale with the
backlog by themselves, need no clock, and the keys never change with time. Tokens that
are cached cost nobody anything: a shared prefix is paid by whoever computes it.

Short memory costs nobody its turn. Who is picked and does not fit is passed over, while
rounds go on and its tenant saves, until what its tenant is owed, or its lane's credit,
reaches its work. Then it is *due*: nobody else starts until it fits, and no new round
begins. Unfinished prefills go on meanwhile, on debt. And if a tenant that runs is then
still ahead by `_MOST_AHEAD` quanta more than that work, it gives back a request's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stemkv.core.schedule.order.base import C, Candidate, Pick
from stemkv.core.schedule.order.keys import KeyOf
from stemkv.core.schedule.order.queue import RequestQueue
from stemkv.core.schedule.order.ranking import Ranking, Row, request_of
from stemkv.core.schedule.request import RequestId, RequestState
from stemkv.core.schedule.waiting import WaitingMatches

__all__ = ["Fair"]

_MILLI = 1000  # deficits are in thousandths of a token, so that sums are exact
_LEAST_LANE_CHUNK = 128  # tokens; less is not worth a chunk
_MOST_CREDIT = 200_000  # tokens; a long idle time must not buy more than a long prompt
_MOST_AHEAD = 3  # quanta, beside the work of who is due


class Fair:
    """Requests by key, within lanes and rounds.

    `lane` is k, `quantum` what a tenant of weight 1 gets in a round, in tokens. With
    `lapses` keys that begin with 0 are times, and a request whose time is over is late.
    """

    is_timeless = False  # deficits fall with every token that is decoded

    def __init__(
        self,
        key: KeyOf,
        *,
        lane: int,
        quantum: int,
        decode_weight: float,
        pauses_prefills: bool,
        weights: Mapping[str, float],
        lapses: bool = False,
    ) -> None:
        self._queue = RequestQueue(key, pauses=pauses_prefills)
        self._lane = lane
        self._quantum = quantum * _MILLI
        self._decode_price = round(decode_weight * _MILLI)
        self._weights = weights
        self._lapses = lapses
        self._tenants: dict[str, _Tenant] = {}
        self._leaders: dict[RequestId, Candidate | None] = {}  # of those on hold
        self._in_lane: dict[RequestId, str] = {}  # unfinished, begun in a lane
        # In this step: tenants whose lane has to wait, and whether one is due.
        self._lanes_off: set[str] = set()
        self._someone_is_due = False

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._queue)

    def deficit(self, tenant: str) -> float:
        """Return how many weighted tokens a tenant may be served before others."""
        account = self._tenants.get(tenant)
        return 0.0 if account is None else account.deficit / _MILLI

    def lane_credit(self, tenant: str) -> float:
        """Return how many tokens a tenant's oldest request is owed."""
        account = self._tenants.get(tenant)
        return 0.0 if account is None else account.credit / self._lane

    def watch(self, matches: WaitingMatches) -> None:
        """Take what knows where requests match; keys need to know how much only."""

    # Requests

    def add(self, request: Candidate) -> None:
        """Take a request that waits."""
        self._account(request.spec.owner).oldest.put(request, ())
        self._queue.add(request)

    def start(self, request: Candidate) -> None:
        """Rank its prefill among all that want chunks."""
        self._queue.start(request)

    def moved(self, request: Candidate) -> None:
        """Rank it anew."""
        self._queue.moved(request)

    def remove(self, request: Candidate) -> None:
        """Forget it; a tenant with nothing left keeps its debt but no savings."""
        self._queue.remove(request)
        self._leaders.pop(request.request_id, None)
        self._in_lane.pop(request.request_id, None)
        name = request.spec.owner
        tenant = self._tenants[name]
        tenant.oldest.remove(request)
        if not tenant.oldest:
            tenant.deficit = min(tenant.deficit, 0)
            tenant.credit = 0
            if not tenant.deficit:
                del self._tenants[name]

    def hold(self, request: Candidate, leader: Candidate | None) -> None:
        """Leave it out until `release`; its lane serves its leader meanwhile."""
        self._queue.hold(request)
        self._leaders[request.request_id] = leader

    def release(self, request: Candidate) -> None:
        """Rank it again."""
        del self._leaders[request.request_id]
        self._queue.release(request)

    # A step

    def begin(self, now: float, *, admits: bool) -> None:
        """Begin a step."""
        self._queue.begin(admits=admits)
        self._lanes_off.clear()
        self._someone_is_due = False
        if self._lapses:
            for request in self._queue.pop_while(lambda row: _is_over(row, now)):
                request.is_late = True
                self._queue.moved(request)

    def pick(self) -> Pick | None:
        """Return whose chunk is next: an eligible tenant's best, or its oldest."""
        unpaused = self._queue.to_go_on()
        if unpaused is not None:
            lane = self._in_lane.get(unpaused.request_id)
            return Pick(unpaused, lane=lane)
        groups = self._queue.candidates()
        if not groups:
            return None
        tenants = self._tenants
        eligible = [each for each in groups if tenants[each.tenant].deficit > 0]
        if not eligible:
            if self._someone_is_due:
                # Its turn is not over: what others have begun they finish on debt.
                most = max(tenants[each.tenant].deficit for each in groups)
                eligible = [e for e in groups if tenants[e.tenant].deficit == most]
            else:
                self._grant({each.tenant: None for each in groups})
                eligible = [e for e in groups if tenants[e.tenant].deficit > 0]
        best = self._queue.best(eligible)
        return self._lane_pick(best.spec.owner) or Pick(best)

    def ran(self, pick: Pick, num_tokens: int, *, is_last: bool) -> None:
        """Let the tenant pay, and the lane if it went down one."""
        request = pick.request
        tenant = self._tenants[request.spec.owner]
        tenant.deficit -= num_tokens * _MILLI
        self._give_credit(tenant, num_tokens)
        if pick.lane is not None:
            # Its tenant may be another one than that of the lane, whose oldest waits
            # for it, or has ended meanwhile.
            payer = self._tenants.get(pick.lane)
            if payer is not None:
                payer.credit -= num_tokens * self._lane
            self._in_lane[request.request_id] = pick.lane
        if is_last or pick.most_tokens is None or num_tokens < pick.most_tokens:
            self._queue.pass_over(request)

    def cannot_start(self, pick: Pick) -> bool:
        """Pass it over until it is due; then keep what becomes free for it."""
        name = pick.request.spec.owner
        if not self._is_due(pick):
            if pick.lane is not None:
                self._lanes_off.add(pick.lane)
            else:
                # Its others want more memory still.
                self._queue.pass_tenant(name)
            return False
        self._queue.stop_admitting()
        self._someone_is_due = True
        return True

    def yields_to(self, pick: Pick, running: Sequence[C]) -> C | None:
        """Return the newest of who is too far ahead of a pick that is due."""
        if len(running) < 2:
            return None
        victim = self.victim(running)
        tenant = self._tenants[pick.request.spec.owner]
        ahead = self._account(victim.spec.owner)
        # In rounds, times both quanta: what weights make of it.
        gap = tenant.deficit * ahead.quantum - ahead.deficit * tenant.quantum
        most = _MOST_AHEAD * tenant.quantum + _work_of(pick.request)
        return victim if gap > most * ahead.quantum else None

    def decoded(self, tenant: str, num_tokens: int) -> None:
        """Let a tenant pay for what it decodes."""
        self._account(tenant).deficit -= num_tokens * self._decode_price

    # Questions

    def first(self, num: int, now: float) -> Iterator[Candidate]:
        """Yield the first ones by their keys."""
        return self._queue.first(num)

    def victim(self, running: Sequence[C]) -> C:
        """Return the newest of the tenant that was served most, but not the oldest."""
        return min(
            running[1:] or running,
            key=lambda r: (self.deficit(r.spec.owner), [-each for each in r.order_key]),
        )

    # Private

    def _account(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            weight = self._weights.get(name, 1.0)
            tenant = _Tenant(max(1, round(self._quantum * weight)))
            self._tenants[name] = tenant
        return tenant

    def _is_due(self, pick: Pick) -> bool:
        work = _work_of(pick.request)
        tenant = self._tenants[pick.request.spec.owner]
        if tenant.deficit >= min(work, _MOST_CREDIT * _MILLI):
            return True
        return (
            pick.lane is not None
            and self._tenants[pick.lane].credit * _MILLI >= work * self._lane
        )

    def _grant(self, names: Mapping[str, None]) -> None:
        """Begin as many rounds as it takes until one of some tenants is eligible.

        They are everybody's. Who wants something and cannot have it now saves them; who
        wants nothing only pays its debt with them.
        """
        num_rounds = min(
            -tenant.deficit // tenant.quantum + 1
            for tenant in map(self._tenants.__getitem__, names)
        )
        savers = self._queue.tenants()
        has_paid = []
        for name, tenant in self._tenants.items():
            most = 0
            if tenant.oldest:
                most = tenant.quantum
                if name in savers:
                    most = max(most, _MOST_CREDIT * _MILLI)
            granted = tenant.deficit + num_rounds * tenant.quantum
            tenant.deficit = min(most, granted)
            if not tenant.oldest and not tenant.deficit:
                has_paid.append(name)
        for name in has_paid:
            del self._tenants[name]

    def _lane_pick(self, name: str) -> Pick | None:
        tenant = self._tenants[name]
        if name in self._lanes_off or tenant.credit <= 0:
            return None
        request = self._oldest(tenant)
        if request is None or not self._queue.is_candidate(request):
            return None
        most = max(tenant.credit // self._lane, _LEAST_LANE_CHUNK)
        if not self._queue.pauses and request.state is not RequestState.RUNNING:
            # It will not be paused, so the whole of it goes down the lane.
            return Pick(request, lane=name)
        return Pick(request, most, name)

    def _oldest(self, tenant: _Tenant) -> Candidate | None:
        """Return whom a lane serves: the oldest, or the leader that it waits for."""
        for row in tenant.oldest.rows():
            request = request_of(row)
            if request.request_id not in self._leaders:
                return request
            leader = self._leaders[request.request_id]
            if leader is not None:
                return leader
        return None

    def _give_credit(self, tenant: _Tenant, num_tokens: int) -> None:
        tenant.credit += num_tokens
        if tenant.credit <= _MOST_CREDIT * self._lane:
            return
        row = tenant.oldest.first()
        most = (
            _MOST_CREDIT
            if row is None
            else max(_MOST_CREDIT, request_of(row).num_tokens)
        )
        tenant.credit = min(tenant.credit, most * self._lane)


class _Tenant:
    """What a tenant is owed."""

    __slots__ = ("credit", "deficit", "oldest", "quantum")

    def __init__(self, quantum: int) -> None:
        self.quantum = quantum  # thousandths of a token
        self.deficit = 0  # thousandths of a weighted token
        self.credit = 0  # of the lane, in tokens times k
        self.oldest = Ranking()  # all that wait or are unfinished, by arrival


def _work_of(request: Candidate) -> int:
    """Return what is left of its prefill, in thousandths of a token."""
    return (request.num_tokens - request.num_ready) * _MILLI


def _is_over(row: Row, now: float) -> bool:
    rank, latest_start_s = row[:2]
    return bool(rank == 0 and latest_start_s < now)
