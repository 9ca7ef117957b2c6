"""The tables of the audit of isolation, and what its JSON holds besides."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stemkv.audit.isolation.evictions import (
    NUM_OWN_PROMPTS,
    Beyond,
    Habits,
    Volume,
)
from stemkv.audit.isolation.probes import PROBES, Finding
from stemkv.audit.isolation.relations import (
    PARTIES,
    Ids,
    NameTrial,
    Relations,
)
from stemkv.audit.isolation.remaining import (
    Pressure,
    Wait,
)
from stemkv.audit.isolation.stealing import Theft, Thefts
from stemkv.audit.isolation.timing import (
    ALPHA,
    Round,
)
from stemkv.audit.isolation.turns import (
    BESIDE,
    LIKES_HITS,
    NOSY,
    OWN,
    Turns,
)
from stemkv.audit.isolation.worlds import (
    BLOCK_SIZE,
    PRIVATE,
    PUBLIC_HEAD,
    SETTINGS,
    SHARED,
)
from stemkv.audit.verdict import Table
from stemkv.core.schedule.orders import ORDERS

__all__ = [
    "eviction_table",
    "finding_data",
    "name_table",
    "pressure_table",
    "probe_table",
    "relation_table",
    "remaining_table",
    "theft_data",
    "theft_table",
    "timing_table",
    "turn_data",
    "turn_table",
    "volume_data",
]


def probe_table(findings: list[Finding]) -> Table:
    """Return the table of the probes."""
    cells = {(f.probe, f.setting.name): f.cell for f in findings}
    return Table(
        title="What an attacker sees of a victim's prompt",
        columns=("probe", *(setting.name for setting in SETTINGS)),
        rows=tuple(
            (probe, *(cells[probe, setting.name] for setting in SETTINGS))
            for probe in PROBES
        ),
        note="Cached tokens or steps when the victim used the attacker's prompt / "
        "another one; 'one group' is the control and must differ. The public head "
        f"is {BLOCK_SIZE} tokens, which everybody hits.",
    )


def relation_table(relations: Relations) -> Table:
    """Return the table of owners and askers."""
    rows: list[tuple[str | int | float | None, ...]] = [
        (owner.name, *(relations.hits[owner.name, asker.name] for asker in PARTIES))
        for owner in PARTIES
    ]
    rows.append(
        ("a public head", *(relations.public_hits[asker.name] for asker in PARTIES))
    )
    return Table(
        title="Cached tokens that the one in the column gets of the one in the row",
        columns=("KV of", *(party.name for party in PARTIES)),
        rows=tuple(rows),
        note="ann and bob are a group, carol shares with nobody, dave is not named; "
        "classes: drafts is private, confidential none, chat group.",
    )


def name_table(trials: list[NameTrial]) -> Table:
    """Return the table of odd names."""
    return Table(
        title="Crafted tenant names",
        columns=("name", "goes for", "tokens of the target", "tokens of its own"),
        rows=tuple((t.name, t.target, t.num_stolen, t.num_own) for t in trials),
        note="Names are escaped. The last column is the control.",
    )


def theft_table(thefts: Thefts) -> Table:
    """Return the table of attempts to read a secret."""
    return Table(
        title="Reading a secret out of the cache",
        columns=("oracle", "setting", "secret", "read", "right", "of", "by luck"),
        rows=tuple(
            (
                theft.oracle,
                theft.setting,
                theft.secret,
                theft.guess,
                theft.num_right,
                len(theft.secret),
                theft.by_luck,
            )
            for theft in thefts.all()
        ),
        note="'By luck' is the probability of at least so many right guesses without "
        "any oracle. Counts are exact; times are measured.",
        label="measured",
    )


def timing_table(rounds: list[Round]) -> Table:
    """Return the table of times to first token."""
    rows: list[tuple[str | int | float | None, ...]] = []
    for number, each in enumerate(rounds, start=1):
        for name, test in (("one group", each.control), (PRIVATE.name, each.claim)):
            # Of the control it does not matter: its effect is there to be seen.
            detectable = None if test is each.control else 1e3 * test.detectable
            rows.append(
                (
                    number,
                    name,
                    test.num_pairs,
                    1e3 * test.mean,
                    1e3 * test.low,
                    1e3 * test.high,
                    test.p,
                    detectable,
                )
            )
    return Table(
        title="Time to first token, the victim's prompt minus a fresh one, in ms",
        columns=(
            "round",
            "setting",
            "pairs",
            "difference",
            "from",
            "to",
            "p",
            "detectable",
        ),
        rows=tuple(rows),
        note=f"Trimmed means with their {1 - ALPHA:.0%} intervals. A fresh prompt took "
        f"{1e3 * rounds[-1].fresh_s:.0f} ms (median).",
        label="measured",
    )


def pressure_table(pressure: list[Pressure]) -> Table:
    """Return the table of memory pressure."""
    return Table(
        title="Load that can be felt: 8 blocks of the attacker in a cache of 16",
        columns=("the victim", "new blocks it takes", "attacker's blocks evicted"),
        rows=tuple((row.deed, row.num_taken, row.num_lost) for row in pressure),
        note="Where the cache is full, a tenant can see how many blocks others newly "
        "take, and so whether they repeat themselves (which takes one block for a "
        "moment); not what they say. Without quotas no tenant has a floor.",
    )


def eviction_table(
    volumes: list[Volume], habits: list[Habits], beyond: Beyond
) -> Table:
    """Return the table of evictions."""

    def volume(*, has_floor: bool) -> tuple[str, str]:
        (found,) = [each for each in volumes if each.has_floor is has_floor]
        return f"{found.busy.number} / {found.idle.number}", _seen(found.is_signal)

    def habit(*, has_floor: bool) -> tuple[str, str]:
        (found,) = [each for each in habits if each.has_floor is has_floor]
        lost = f"{found.lost_if_soon:g} / {found.lost_if_late:g}"
        return (
            lost,
            f"{_seen(found.num_told > 0)}, {found.num_told} of {found.num_plays}",
        )

    return Table(
        title="What evictions tell of others",
        columns=("of the victim", "without quotas", "", "with a floor", ""),
        rows=(
            (
                "takes new blocks / nothing",
                *volume(has_floor=False),
                *volume(has_floor=True),
            ),
            (
                "comes back soon / late, with equal load",
                *habit(has_floor=False),
                *habit(has_floor=True),
            ),
        ),
        note=f"Numbers are what the attacker lost, in the one world / the other: blocks, "
        f"and of {NUM_OWN_PROMPTS} prompts. Beyond a floor memory is lent: of "
        f"{beyond.num_retained} blocks, with a floor of {beyond.floor}, others took all "
        f"but {beyond.num_left}. A floor is about what is retained and not about room to "
        f"run: while others' requests hold the rest of the memory, a request that grows "
        f"makes room among its own tenant's blocks.",
    )


def turn_table(turns: list[Turns]) -> Table:
    """Return the table of turns."""
    cells = {
        (each.order, each.play, each.setting.name): (
            "differs" if each.is_signal else "equal"
        )
        for each in turns
    }
    settings = (SHARED.name, PRIVATE.name, PUBLIC_HEAD.name)
    columns = [(OWN, name) for name in settings]
    columns += [(BESIDE, name) for name in settings[1:]]
    return Table(
        title="Whether the order of answers tells what a victim has cached",
        columns=("order", *(f"{play}, {name}" for play, name in columns)),
        rows=tuple(
            (order, *(cells.get((order, *column)) for column in columns))
            for order in (*ORDERS, NOSY)
        ),
        note=f"Own: the attacker's guesses, one of which the victim used, or not. "
        f"Beside: the attacker's requests and the victim's, which is cached, or not. "
        f"'{SHARED.name}' and the made-up order {NOSY!r} are the controls: "
        f"{LIKES_HITS} in the one and the other must differ. Exact.",
    )


def _seen(is_signal: bool) -> str:
    return "seen" if is_signal else "not seen"


def remaining_table(
    pressure: list[Pressure],
    habits: list[Habits],
    beyond: Beyond,
    wait: Wait,
    ids: Ids,
    findings: list[Finding],
) -> Table:
    """Return the table of what remains."""
    (pooled,) = [each for each in habits if not each.has_floor]
    most = max(pressure, key=lambda row: row.num_lost)
    (public,) = [
        f.same.number
        for f in findings
        if f.probe == "cached tokens" and f.setting is PUBLIC_HEAD
    ]
    taken = "refused while it is in flight" if ids.names_taken else "served"
    return Table(
        title="What remains visible to other tenants",
        columns=("what", "how", "figure", "kind"),
        rows=(
            (
                "how much memory others newly need",
                "own blocks are evicted from a full cache, without a floor",
                f"{most.num_lost} of 8 blocks lost to {most.num_taken} new ones",
                "exact",
            ),
            (
                "how soon others come back",
                "what is evicted follows what was learnt of all, without quotas",
                f"told apart in {pooled.num_told} of {pooled.num_plays} plays",
                "exact",
            ),
            (
                "how much others have above their floors",
                "what was lent is taken back",
                f"{beyond.num_retained - beyond.num_left} of {beyond.num_retained} "
                f"blocks lost, with a floor of {beyond.floor}",
                "exact",
            ),
            (
                "that others' requests hold nearly all memory",
                "own blocks make room for an own request that grows, floor or not",
                f"{beyond.num_lost_running} blocks lost to itself",
                "exact",
            ),
            (
                "that others are being served",
                "one engine computes for all",
                f"TTFT {1e3 * wait.beside_s:.0f} ms beside a victim's prefill of 128 "
                f"tokens, {1e3 * wait.alone_s:.0f} ms alone",
                f"measured, medians of {wait.num_samples}",
            ),
            (
                "that somebody used a declared public prefix",
                "it hits",
                f"{public} cached tokens",
                "exact",
            ),
            (
                "that a request id is taken, if callers may choose ids",
                "another's id is asked for",
                taken,
                "exact",
            ),
        ),
        note="None of these tells what a private prompt says.",
        label="measured",
    )


# The rest


def finding_data(finding: Finding) -> dict[str, Any]:
    """Return what JSON holds of it."""
    idle = finding.idle
    return {
        "probe": finding.probe,
        "setting": finding.setting.name,
        "is_signal": finding.is_signal,
        "same": {"number": finding.same.number, "sha256": finding.same.digest},
        "other": {"number": finding.other.number, "sha256": finding.other.digest},
        "idle": None
        if idle is None
        else {"number": idle.number, "sha256": idle.digest},
    }


def volume_data(volume: Volume) -> dict[str, Any]:
    """Return what JSON holds of it."""
    return {
        "has_floor": volume.has_floor,
        "is_signal": volume.is_signal,
        "idle": {"number": volume.idle.number, "sha256": volume.idle.digest},
        "busy": {"number": volume.busy.number, "sha256": volume.busy.digest},
    }


def turn_data(turns: Turns) -> dict[str, Any]:
    """Return what JSON holds of it."""
    return {
        "play": turns.play,
        "order": turns.order,
        "setting": turns.setting.name,
        "is_signal": turns.is_signal,
        "warm": list(turns.warm),
        "cold": list(turns.cold),
    }


def theft_data(theft: Theft) -> dict[str, Any]:
    """Return what JSON holds of it."""
    return {**asdict(theft), "num_right": theft.num_right, "by_luck": theft.by_luck}
