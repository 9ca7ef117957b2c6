"""How much of the cache each domain may keep, and is sure to keep.

Owns the numbers, their checks, and the question whose blocks make room. Which block it
is, the eviction policy of that domain says. Sizes are blocks that are retained: in the
tree, and held by no lease. Knows no nodes.

A floor that its domain does not fill is lent to others, who give it back block by block
when the domain needs it. A domain at or below its floor never loses a block to another,
but for the beginning of a span whose end went: nobody could match that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from stemkv.core.prefix.identity import PUBLIC, Domain
from stemkv.errors import ConfigError, InvariantError

__all__ = ["Quota", "QuotaConfig", "Quotas"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one domain may retain."""

    floor_blocks: int = 0  # never lost to another domain
    cap_blocks: int | None = None  # never retains more; None: no cap
    # What it has beyond its floor is compared with others' over their weights: the one
    # with most gives first.
    weight: float = 1.0

    def __post_init__(self) -> None:
        _check_blocks("floor_blocks", self.floor_blocks)
        if self.cap_blocks is not None:
            _check_blocks("cap_blocks", self.cap_blocks)
            if self.cap_blocks < self.floor_blocks:
                raise ConfigError(
                    f"cap_blocks must not be below floor_blocks, got "
                    f"{self.cap_blocks} and {self.floor_blocks}"
                )
        if (
            not isinstance(self.weight, int | float)
            or isinstance(self.weight, bool)
            or not 0 < self.weight < math.inf
        ):
            raise ConfigError(
                f"weight must be a number above 0, got {self.weight!r:.80}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaConfig:
    """Quotas of a cache.

    `default` is for domains that are not named, so it has no floor: a floor is a
    promise of memory, and how many domains there will be is unknown. `public_blocks` is
    the budget of declared public prefixes: as many blocks are kept for them, and no
    more can be declared.
    """

    quotas: Mapping[Domain, Quota] = field(default_factory=dict)
    default: Quota = field(default_factory=Quota)
    public_blocks: int = 0

    def __post_init__(self) -> None:
        _check_blocks("public_blocks", self.public_blocks)
        if self.default.floor_blocks:
            raise ConfigError(
                f"the default quota must have no floor, got "
                f"{self.default.floor_blocks} blocks; name the domains that have one"
            )
        if PUBLIC in self.quotas:
            raise ConfigError("public prefixes have public_blocks, not a quota")
        # What was promised at the start must not change behind the cache's back.
        object.__setattr__(self, "quotas", dict(self.quotas))

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that floors and public prefixes may claim together."""
        floors = sum(quota.floor_blocks for quota in self.quotas.values())
        return floors + self.public_blocks

    def of(self, domain: Domain) -> Quota:
        """Return the quota of a private domain."""
        return self.quotas.get(domain, self.default)

    def check(self, num_blocks: int) -> None:
        """Refuse what a cache of `num_blocks` cannot promise."""
        promised = self.num_promised_blocks
        if promised >= num_blocks:
            raise ConfigError(
                f"floors of {promised - self.public_blocks} blocks and public_blocks "
                f"of {self.public_blocks} leave nothing of {num_blocks} blocks to run "
                f"requests in; lower them or raise num_blocks"
            )


class Quotas:
    """Who has retained how much, and who gives when memory is short.

    All calls are O(log domains), amortised.
    """

    def __init__(self, config: QuotaConfig, num_blocks: int) -> None:
        config.check(num_blocks)
        self.config = config
        self._num_blocks = num_blocks
        self._retained: dict[Domain, int] = {}
        self._lendable = 0  # blocks above floors, of private domains
        # (-excess over weight, number of the domain); what is out of date is dropped
        # when it is met.
        self._heap: list[tuple[float, int]] = []
        self._domains: dict[int, Domain] = {}  # by number, in the order they came
        self._numbers: dict[Domain, int] = {}
        self._num_seen = 0

    @property
    def num_lendable_blocks(self) -> int:
        """Retained blocks of private domains above their floors."""
        return self._lendable

    def retained(self, domain: Domain) -> int:
        """Return how many blocks a domain has retained."""
        return self._retained.get(domain, 0)

    def retained_by_domain(self) -> dict[Domain, int]:
        """Return a copy of all counts."""
        return dict(self._retained)

    def available_to(
        self, domain: Domain, *, num_used: int = 0, spares_floor: bool = False
    ) -> int:
        """Return how many retained blocks could make room for a domain.

        All of its own but for `num_used` that it uses now, and of others what is above
        their floors. Public ones never. `spares_floor`: not what its own floor covers.
        """
        own, floor = self.retained(domain), self.config.of(domain).floor_blocks
        others = self._lendable - max(0, own - floor)
        own -= num_used
        return others + (max(0, own - floor) if spares_floor else own)

    def most_blocks(self, domain: Domain) -> int:
        """Return how many blocks a request of the domain can hold, whoever has what."""
        own = self.config.of(domain).floor_blocks
        return self._num_blocks - self.config.num_promised_blocks + own

    def over_cap(self, domain: Domain) -> int:
        """Return by how many blocks a domain is over its cap."""
        if domain == PUBLIC:
            return 0
        cap = self.config.of(domain).cap_blocks
        return 0 if cap is None else max(0, self.retained(domain) - cap)

    def change(self, domain: Domain, num_blocks: int) -> None:
        """Count blocks that a domain retains from now on, or no longer."""
        before = self.retained(domain)
        now = self._retained[domain] = before + num_blocks
        if domain == PUBLIC:
            return
        floor = self.config.of(domain).floor_blocks
        self._lendable += max(0, now - floor) - max(0, before - floor)
        number = self._numbers.get(domain)
        if number is None:
            number = self._numbers[domain] = self._num_seen
            self._domains[number] = domain
            self._num_seen += 1
        if now > floor:
            heappush(self._heap, (-self._excess(domain), number))
            if len(self._heap) > 4 * len(self._domains) + 64:
                self._heap = [
                    (-self._excess(each), self._numbers[each])
                    for each in self._domains.values()
                    if self._excess(each) > 0
                ]
                heapify(self._heap)

    def forget(self, domain: Domain) -> None:
        """Forget a domain that has no block left; if it comes again it is new.

        Names come from requests, so there may be any number of them. One that was
        promised something stays.
        """
        if self.retained(domain):
            raise InvariantError(
                f"{domain} has retained {self.retained(domain)} blocks and is forgotten"
            )
        if domain not in self.config.quotas:
            self._retained.pop(domain, None)
            number = self._numbers.pop(domain, None)
            if number is not None:
                del self._domains[number]

    def giver(self, domain: Domain | None) -> tuple[Domain, int] | None:
        """Return who gives blocks to a domain, and how many at most.

        The one with most above its floor, over its weight, down to its floor; the
        domain itself where nobody is above. `None` for a domain: nobody's request, but
        the operator's.
        """
        heap = self._heap
        while heap:
            negated, number = heap[0]
            other = self._domains.get(number)
            if other is not None and negated < 0 and self._excess(other) == -negated:
                floor = self.config.of(other).floor_blocks
                return other, self.retained(other) - floor
            heappop(heap)
        if domain is not None and self.retained(domain):
            return domain, self.retained(domain)
        return None

    def _excess(self, domain: Domain) -> float:
        quota = self.config.of(domain)
        return (self.retained(domain) - quota.floor_blocks) / quota.weight


def _check_blocks(field_name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(
            f"{field_name} must be an integer of at least 0, got {value!r:.80}"
        )
