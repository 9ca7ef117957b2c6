"""Does whose turn it is tell what others have cached?

Owns the attacks on the order of answers. An order that likes what is cached answers it
first, so whoever sees an order change learns what is cached; between tenants that share
nothing it must not. All answers are exact: twin worlds differ in what the victim asked
before, the prompt in question or another one of equal length, and the order in which
requests start is compared.

*Own*: the attacker asks several guesses at once, one of which the victim may have used.

*Beside*: attacker and victim ask prompts of equal length at once, and the victim's own is
cached, or not.

On a scheduler alone: one request is served at a time, so an order is all there is to
see. That a request which hits is done sooner is load, and shows elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from stemkv.audit.isolation.scene import made_up_prompt
from stemkv.audit.isolation.worlds import (
    ATTACKER,
    BLOCK_SIZE,
    PRIVATE,
    PUBLIC_HEAD,
    SHARED,
    VICTIM,
    Setting,
)
from stemkv.core.books.cost import RooflineCost
from stemkv.core.core import Core, CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.events import RequestAdmitted
from stemkv.core.schedule.order.ranked import Ranked
from stemkv.core.schedule.orders import ORDERS
from stemkv.core.schedule.plan import Sample, StepResult
from stemkv.core.schedule.request import RequestId, RequestSpec

__all__ = ["BESIDE", "LIKES_HITS", "NOSY", "OWN", "Turns", "try_turns"]

OWN, BESIDE = "own", "beside"
LIKES_HITS = "lpm"  # the order that shows most plainly what is cached
NOSY = "nosy"  # a wrong order, to be caught

_NAMESPACE = bytes(32)
_CLASS = "chat"
_NUM_GUESSES = 4
_CACHED = 2  # the guess that the victim may have used: neither first nor last
_NUM_BLOCKS = 3  # of a prompt, besides a public head
_MOST_STEPS = 100
# For the order that needs seconds; any prices do.
_COSTS = RooflineCost(
    source="made up",
    bytes_per_token=1000,
    flops_per_token=1e9,
    flops_per_pair=1000.0,
    weight_bytes=1e9,
    flops_per_s=1e13,
    bytes_per_s=1e11,
    watts=100.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The order of starts in twin worlds."""

    play: str  # `OWN` or `BESIDE`
    order: str
    setting: Setting
    warm: tuple[str, ...]  # the victim had used the prompt in question
    cold: tuple[str, ...]  # it had used another one of equal length

    @property
    def is_signal(self) -> bool:
        """Whether the order told the worlds apart."""
        return self.warm != self.cold


def try_turns(progress: Callable[[str], None]) -> list[Turns]:
    """Play under every order, and *beside* under a wrong one, too."""
    found = []
    for name in ORDERS:
        progress(f"order of answers: {name}")
        for setting in (SHARED, PRIVATE, PUBLIC_HEAD):
            found.append(_twins(OWN, name, setting))
        for setting in (PRIVATE, PUBLIC_HEAD):
            found.append(_twins(BESIDE, name, setting))
    progress("order of answers: one that is wrong")
    found.append(_twins(BESIDE, NOSY, PRIVATE))
    return found


def _twins(play: str, name: str, setting: Setting) -> Turns:
    warm, cold = (_starts(play, name, setting, is_warm=w) for w in (True, False))
    return Turns(play=play, order=name, setting=setting, warm=warm, cold=cold)


def _starts(
    play: str, name: str, setting: Setting, *, is_warm: bool
) -> tuple[str, ...]:
    """Return the ids of the requests that were asked at once, as they started."""
    line = _Line(name, setting)
    guesses = [line.prompt(f"guess {index}") for index in range(_NUM_GUESSES)]
    if setting.has_public_head:
        line.add("stranger", "head", line.prompt("any"))
        line.drain()  # so that the head is resident in both worlds
    if play == OWN:
        asked = [(ATTACKER, f"guess {i}", guess) for i, guess in enumerate(guesses)]
        secret = guesses[_CACHED]
    else:
        secret = line.prompt("secret")
        asked = [(ATTACKER, f"own {i}", guess) for i, guess in enumerate(guesses)]
        # Last, so that there is somebody to overtake.
        asked.append((VICTIM, "victim's", secret))
    line.add(VICTIM, "before", secret if is_warm else line.prompt("unrelated"))
    line.drain()
    for tenant, request_id, prompt in asked:
        line.add(tenant, request_id, prompt)
    return line.drain()


class _Line:
    """A scheduler that serves one request at a time; a step takes a second."""

    def __init__(self, name: str, setting: Setting) -> None:
        self._setting = setting
        self._core = _make(name)
        self._head = b""
        if setting.has_public_head:
            head = made_up_prompt("head", 1, num_more=0)
            self._head = head.buffer
            self._core.declare(_NAMESPACE, head)
        self._now = 0.0

    def prompt(self, name: str) -> TokenIds:
        """Return a prompt like no other behind the public head, if there is one."""
        return TokenIds(self._head + made_up_prompt(name, _NUM_BLOCKS).buffer)

    def add(self, tenant: str, request_id: str, prompt: TokenIds) -> None:
        """Queue a request."""
        domain = self._setting.sharing.domain(tenant)
        assert domain is not None, "everybody shares at least with itself here"
        self._core.add(
            RequestSpec(
                request_id=RequestId(request_id),
                prompt=prompt,
                max_new_tokens=1,
                arrival_s=self._now,
                domain=domain,
                namespace=_NAMESPACE,
                tenant=tenant,
                request_class=_CLASS,
            )
        )

    def drain(self) -> tuple[str, ...]:
        """Step until nothing is in flight; return the ids in the order of starts."""
        started: list[str] = []
        for _ in range(_MOST_STEPS):
            if not self._core.scheduler.has_work:
                return tuple(started)
            self._now += 1
            plan = self._core.schedule(self._now)
            samples = {
                chunk.request_id: (Sample(0),) * chunk.num_samples
                for chunk in plan.chunks
                if chunk.num_samples
            }
            events = self._core.commit(plan, StepResult(samples), self._now)
            started += [e.request_id for e in events if isinstance(e, RequestAdmitted)]
        raise AssertionError("a few small requests are done in a few steps")


def _make(name: str) -> Core:
    """Return a core with an order as an engine makes it by default."""
    config = CoreConfig(
        cache=CacheConfig(num_blocks=64, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(max_num_running=1),
    )
    if name == NOSY:
        # By all that is cached, whoever may know of it: what `RequestQueue` is to prevent
        # by asking for the key a second time, with what is public only.
        return Core(config, order=Ranked(lambda request, _: (-request.num_ready,)))
    slo = {_CLASS: 60.0} if name == "deadline" else {}
    order = replace(config.order, name=name, slo_ttft_s=slo)
    return Core(replace(config, order=order, books=None), _COSTS if slo else None)
