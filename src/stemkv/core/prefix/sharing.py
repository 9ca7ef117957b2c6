"""Who shares KV with whom, as the operator decides it.

Owns the choice of a request's domain. Knows nothing of how a tenant was authenticated,
of settings files, or of public prefixes: those are declared to the cache. A tenant is
always the authenticated principal; nothing here is ever read from a prompt.

Names are compared exactly, code point by code point. Folding case or look-alikes would
give two principals one domain; taking them for two costs only reuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from stemkv.core.prefix.identity import Domain
from stemkv.errors import ConfigError, RequestError

__all__ = ["Sharing", "SharingPolicy"]


class Sharing(Enum):
    """How far KV may reach."""

    GROUP = "group"  # the tenant's group; the tenant alone if it is in none
    PRIVATE = "private"  # the tenant alone, though it be in a group
    NONE = "none"  # nobody: not the same tenant's next request, not public prefixes


_OF_TENANTS: Final = (Sharing.PRIVATE, Sharing.NONE)  # a group is joined by its name


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPolicy:
    """Which domain a tenant's request belongs to.

    A tenant is in one group, or set in `tenants`, or gets `default`. A class of
    requests can only narrow what its tenant has, so it does no harm that clients may
    choose it. Mappings are copied: changing what was passed changes no policy.
    """

    groups: Mapping[str, Set[str]] = field(default_factory=dict)  # name → its tenants
    tenants: Mapping[str, Sharing] = field(default_factory=dict)  # PRIVATE or NONE
    classes: Mapping[str, Sharing] = field(default_factory=dict)  # at most this far
    default: Sharing = Sharing.PRIVATE  # of tenants not named: PRIVATE or NONE
    # Of every tenant that is named; so deciding is one look-up, and strangers, of whom
    # there is no end, leave nothing behind.
    _domains: Mapping[str, Domain | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        groups = _checked_groups(self.groups)
        tenants = _checked_choices("tenants", self.tenants, _OF_TENANTS)
        classes = _checked_choices("classes", self.classes, tuple(Sharing))
        _check_choice("default", self.default, _OF_TENANTS)
        domains: dict[str, Domain | None] = {}
        group_of: dict[str, str] = {}
        for group, members in groups.items():
            domain = Domain.group(group)
            for tenant in sorted(members):
                if tenant in group_of:
                    raise ConfigError(
                        f"groups: tenant {tenant!r:.80} is in {group_of[tenant]!r:.80} "
                        f"and {group!r:.80}; a request has one domain, so name it in one "
                        f"group"
                    )
                group_of[tenant] = group
                domains[tenant] = domain
        for tenant, sharing in tenants.items():
            if tenant in group_of:
                raise ConfigError(
                    f"tenants: {tenant!r:.80} is {sharing.value!r} here and a member "
                    f"of group {group_of[tenant]!r:.80}; take it out of one"
                )
            domains[tenant] = _alone(tenant, sharing)
        # Frozen: the only way to set a field.
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "tenants", tenants)
        object.__setattr__(self, "classes", classes)
        object.__setattr__(self, "_domains", domains)

    def domain(self, tenant: str, request_class: str | None = None) -> Domain | None:
        """Return the domain of a tenant's request; `None` if it shares with nobody.

        `None` goes both ways: nothing is matched, public prefixes included, and nothing
        is published. Raises `RequestError` for a missing tenant, which must not land
        in a scope that others share, and for a class that is not declared: it may be a
        misspelt one that was to share nothing.
        """
        if not isinstance(tenant, str) or not tenant:
            got = repr(tenant) if isinstance(tenant, str) else type(tenant).__name__
            raise RequestError(
                f"tenant must be the name of the authenticated principal, got {got}",
                field="tenant",
            )
        reach = Sharing.GROUP
        if request_class is not None:
            reach = self._reach(request_class)
        if reach is Sharing.NONE:
            return None
        if tenant in self._domains:
            domain = self._domains[tenant]
        else:
            domain = _alone(tenant, self.default)
        if domain is None or reach is Sharing.GROUP:
            return domain
        return Domain.private(tenant)

    def _reach(self, request_class: str) -> Sharing:
        found = None
        if isinstance(request_class, str):  # else it might have no hash
            found = self.classes.get(request_class)
        if found is None:
            declared = ", ".join(repr(name) for name in sorted(self.classes)) or "none"
            raise RequestError(
                f"request_class {request_class!r:.80} is not declared, so how far it "
                f"may share is not known; declared are: {declared}",
                field="request_class",
            )
        return found


def _alone(tenant: str, sharing: Sharing) -> Domain | None:
    return None if sharing is Sharing.NONE else Domain.private(tenant)


def _checked_groups(groups: Mapping[str, Set[str]]) -> dict[str, frozenset[str]]:
    _check_mapping("groups", groups)
    for group, members in groups.items():
        _check_name("groups", "the name of a group", group)
        # A text is a collection as well, of its letters.
        if not isinstance(members, Set):
            raise ConfigError(
                f"groups: group {group!r:.80} must be a set of tenant names, "
                f"got {type(members).__name__}"
            )
        if not members:
            raise ConfigError(
                f"groups: group {group!r:.80} has no members; name some or leave it out"
            )
        for tenant in members:
            _check_name("groups", f"a tenant in group {group!r:.80}", tenant)
    return {group: frozenset(members) for group, members in groups.items()}


def _checked_choices(
    where: str, choices: Mapping[str, Sharing], allowed: tuple[Sharing, ...]
) -> dict[str, Sharing]:
    _check_mapping(where, choices)
    for name, sharing in choices.items():
        _check_name(where, "a name", name)
        _check_choice(f"{where}: {name!r:.80}", sharing, allowed)
    return dict(choices)


def _check_mapping(where: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping, got {type(value).__name__}")


def _check_name(where: str, what: str, name: object) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{where}: {what} must be text, got {type(name).__name__}")
    if not name:
        raise ConfigError(f"{where}: {what} must not be empty")


def _check_choice(where: str, value: object, allowed: tuple[Sharing, ...]) -> None:
    if value not in allowed:
        names = " or ".join(str(sharing) for sharing in allowed)
        raise ConfigError(f"{where} must be {names}, got {value!r:.80}")
