"""May a waiting request start now, and if not, why not?

Owns what is asked before a start, in its order: fence, session, places, leader, time,
memory. Knows no order beyond telling it the answer.
"""

from __future__ import annotations

from stemkv.core.books.waits import WaitReason
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import PrefixAwaited
from stemkv.core.schedule.lives import Lives
from stemkv.core.schedule.order.base import Pick
from stemkv.core.schedule.request import Request
from stemkv.core.schedule.step import Step

__all__ = ["Admission"]


class Admission:
    """Starts requests, or says what they wait for."""

    def __init__(self, config: SchedulerConfig, lives: Lives) -> None:
        self._config = config
        self._lives = lives
        # The state in which the next one was found to have no place or no memory:
        # while it lasts, asking again gives the same.
        self._blocked_at: tuple[int, ...] | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether it is known that nobody who waits can start now."""
        if self._blocked_at is None:
            return False
        return self._blocked_at == self._state()

    def forget(self) -> None:
        """Forget that nobody could start."""
        self._blocked_at = None

    def try_to_start(
        self, request: Request, pick: Pick, step: Step, now: float
    ) -> bool:
        """Start a waiting request if nothing is against it; else the order hears why."""
        lives = self._lives
        if not lives.epochs.is_open_to(request):
            # What it shall run on is not in place yet.
            lives.epochs.hold(request)
            lives.hold(request, WaitReason.ROLLOUT, now)
            return False
        is_alone = not len(lives.running) and not step.chunks
        if not lives.sessions.admits(request, now, is_alone=is_alone):
            lives.sessions.hold(request)
            lives.hold(request, WaitReason.SESSION, now)
            return False
        if len(lives.running) >= lives.max_num_running:
            self._cannot_start(request, pick, WaitReason.PLACES, step, now)
            return False
        if self._hold_for_leader(request, step, now):
            return False
        if step.num_in_time(request.num_ready, 1) == 0:
            step.is_full = True
            return False
        demand = self._demand(request)
        lease = lives.cache.acquire(
            request.namespace,
            request.spec.domain,
            request.tokens,
            demand,
            owner=request.spec.owner,
            hints=request.spec.hints,
            now=now,
        )
        if lease is None:
            self._note_stall(request, demand, now)
            self._cannot_start(request, pick, WaitReason.MEMORY, step, now)
            return False
        lives.start(request, lease, now)
        return True

    # Private

    def _cannot_start(
        self,
        request: Request,
        pick: Pick,
        reason: WaitReason,
        step: Step,
        now: float,
    ) -> None:
        lives, order = self._lives, self._lives.line.order
        lives.journal.waits(request, reason, now)
        if not order.cannot_start(pick):
            return
        victim = order.yields_to(pick, lives.running.all)
        if victim is not None:
            lives.take_back(victim, step, now)
        elif not lives.followers.holds and not lives.sessions.has_limits:
            # Who is held may go on for reasons that are no part of this state.
            self._blocked_at = self._state()

    def _hold_for_leader(self, request: Request, step: Step, now: float) -> bool:
        """Hold a request for a block that an unfinished prefill will publish."""
        lives = self._lives
        leader = lives.followers.find_leader(request, lives.running.prefills.values())
        if leader is None:
            return False
        lives.followers.hold(request, leader, step.number)
        lives.hold(request, WaitReason.PREFIX, now, leader=leader)
        if request.num_steps_awaiting == 0:
            lives.outbox.put(PrefixAwaited(now=now, request_id=request.request_id))
        return True

    def _note_stall(self, request: Request, demand: Demand, now: float) -> None:
        lives = self._lives

        def num_missing() -> int:
            return lives.cache.num_missing_blocks(
                request.namespace, request.spec.domain, request.tokens, demand
            )

        lives.journal.stalled(request, lives.cache, lives.running.all, num_missing, now)

    def _demand(self, request: Request) -> Demand:
        """What a start takes, and what it leaves to those who run already.

        Alone, a request may use everything.
        """
        config, domain = self._config, request.spec.domain
        running = self._lives.running.all
        spare = int(config.watermark * self._lives.cache.pool.num_total)
        return Demand(
            num_slots=request.num_tokens,
            # So that running requests can grow a while.
            num_spare=max(1, spare) if running else 0,
            num_retained=config.retained_floor_blocks if running else 0,
            spares_floor=_is_beside_others(running, domain),
        )

    def _state(self) -> tuple[int, ...] | None:
        """What admission depends on besides time; `None` if it depends on that too."""
        lives = self._lives
        if not lives.line.order.is_timeless:
            return None
        cache = lives.cache
        return (
            lives.num_added,
            len(lives.line),
            lives.running.num_moves,
            cache.num_available_blocks,
            cache.num_lendable_blocks,
            cache.tree.num_nodes,
            cache.tree.num_blocks,  # a match can be longer where a node has grown
        )


def _is_beside_others(running: list[Request], domain: Domain) -> bool:
    """Whether admission leaves what a domain has retained up to its floor.

    Else the running requests of others, whose blocks cannot be evicted, would squeeze
    it out of its floor. They end, and then there is room; beside requests of its own it
    may use everything.
    """
    return any(each.spec.domain != domain for each in running)
