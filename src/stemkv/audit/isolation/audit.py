"""Can one tenant learn what another one asks?

Owns the audit of isolation: which attacks are made, what their outcomes mean, and how
they are reported. The attacks themselves are in the modules it imports.

Each claim has a control: the same attack where it must work, with everybody in one
group. Where a control fails, the audit is inconclusive, since finding nothing with an
attack that finds nothing anywhere says nothing. For what evictions tell, the control is
the engine without quotas: there they tell it, and that is said. For whose turn it is
beside another tenant, it is an order made wrong for the purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import process_time

from stemkv.audit.isolation.claims import (
    eviction_checks,
    headline,
    id_checks,
    name_checks,
    probe_checks,
    relation_checks,
    theft_checks,
    timing_checks,
    turn_checks,
)
from stemkv.audit.isolation.evictions import (
    LEARNING,
    measure_beyond,
    try_habits,
    try_volume,
)
from stemkv.audit.isolation.probes import Stage, run_probes
from stemkv.audit.isolation.relations import (
    try_ids,
    try_names,
    try_relations,
)
from stemkv.audit.isolation.remaining import (
    measure_pressure,
    measure_wait,
)
from stemkv.audit.isolation.stealing import (
    LUCK,
    Theft,
    Thefts,
    steal_by_count,
    steal_by_time,
)
from stemkv.audit.isolation.tables import (
    eviction_table,
    finding_data,
    name_table,
    pressure_table,
    probe_table,
    relation_table,
    remaining_table,
    theft_data,
    theft_table,
    timing_table,
    turn_data,
    turn_table,
    volume_data,
)
from stemkv.audit.isolation.timing import (
    ALPHA,
    LIMIT,
    POWER,
    Round,
    TimingPlan,
    time_pairs,
)
from stemkv.audit.isolation.turns import (
    try_turns,
)
from stemkv.audit.isolation.worlds import (
    BLOCK_SIZE,
    PRIVATE,
    PUBLIC_HEAD,
    SHARED,
    Setting,
)
from stemkv.audit.verdict import AuditReport
from stemkv.engine import LoadedModel
from stemkv.errors import ConfigError

__all__ = ["IsolationOptions", "audit_isolation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationOptions:
    """What of the audit can be varied."""

    seed: int = 0
    numerics: str = "exact"
    num_threads: int | None = None
    min_pairs: int = 24  # of times to first token
    max_pairs: int = 40

    def __post_init__(self) -> None:
        # There are half as many control pairs, and ten are the fewest whose signs can
        # be significant.
        if not 20 <= self.min_pairs <= self.max_pairs:
            raise ConfigError(
                f"min_pairs must be from 20 to max_pairs ({self.max_pairs}), "
                f"got {self.min_pairs}"
            )


def audit_isolation(
    loaded: LoadedModel,
    options: IsolationOptions,
    progress: Callable[[str], None],
    *,
    clock: Callable[[], float] = process_time,
) -> AuditReport:
    """Attack the isolation of tenants under default settings.

    `clock` is what times to first token are read from, in seconds: by default the CPU
    time of this process. What reuse saves shows in it as it does on the wall, and what
    other processes do to the machine does not.
    """
    stage = Stage(
        loaded=loaded,
        seed=options.seed,
        numerics=options.numerics,
        num_threads=options.num_threads,
    )
    findings = run_probes(stage, progress)
    relations = try_relations(stage, progress)
    trials, accepted, num_odd = try_names(stage, progress)
    ids = try_ids(stage, progress)
    thefts = _steal(stage, progress, clock)
    rounds = _time(stage, options, progress, clock)
    volumes = try_volume(stage, progress)
    habits = try_habits(progress, seed=options.seed)
    turns = try_turns(progress)
    beyond = measure_beyond()
    pressure = measure_pressure()
    wait = measure_wait(stage, progress, clock=clock)
    checks = (
        *probe_checks(findings),
        *relation_checks(relations),
        *name_checks(trials, accepted, num_odd),
        *id_checks(ids),
        *theft_checks(thefts),
        *timing_checks(rounds),
        *eviction_checks(volumes, habits),
        *turn_checks(turns),
    )
    return AuditReport(
        name="isolation",
        headline=headline(checks),
        checks=checks,
        tables=(
            probe_table(findings),
            relation_table(relations),
            name_table(trials),
            theft_table(thefts),
            timing_table(rounds),
            pressure_table(pressure),
            eviction_table(volumes, habits, beyond),
            turn_table(turns),
            remaining_table(pressure, habits, beyond, wait, ids, findings),
        ),
        method=_method(loaded, options, rounds),
        data={
            "findings": [finding_data(finding) for finding in findings],
            "relations": [
                {"owner": owner, "asker": asker, "cached_tokens": tokens}
                for (owner, asker), tokens in relations.hits.items()
            ],
            "public_hits": relations.public_hits,
            "names": [asdict(trial) for trial in trials],
            "accepted_odd_fields": accepted,
            "ids": asdict(ids),
            "thefts": [theft_data(theft) for theft in thefts.all()],
            "rounds": [asdict(each) for each in rounds],
            "pressure": [asdict(row) for row in pressure],
            "volumes": [volume_data(volume) for volume in volumes],
            "habits": [asdict(each) for each in habits],
            "turns": [turn_data(each) for each in turns],
            "beyond_floor": asdict(beyond),
            "wait": asdict(wait),
        },
    )


def _steal(
    stage: Stage, progress: Callable[[str], None], clock: Callable[[], float]
) -> Thefts:
    seed = stage.seed

    def by_time(setting: Setting, salt: int) -> Theft:
        return steal_by_time(stage, setting, progress, seed=seed + salt, clock=clock)

    control = by_time(SHARED, 1)
    if control.by_luck > LUCK:
        control = by_time(SHARED, 2)  # something may have come between
    attempts = [by_time(PRIVATE, 3)]
    if attempts[0].by_luck <= LUCK:
        attempts.append(by_time(PRIVATE, 4))
    return Thefts(
        count_control=steal_by_count(stage, SHARED, progress, seed=seed),
        count=steal_by_count(stage, PRIVATE, progress, seed=seed),
        count_public=steal_by_count(stage, PUBLIC_HEAD, progress, seed=seed),
        time_control=control,
        time=tuple(attempts),
    )


def _time(
    stage: Stage,
    options: IsolationOptions,
    progress: Callable[[str], None],
    clock: Callable[[], float],
) -> list[Round]:
    plan = TimingPlan(min_pairs=options.min_pairs, max_pairs=options.max_pairs)
    rounds = [time_pairs(stage, plan, progress, seed=stage.seed, clock=clock)]
    if rounds[0].claim.p <= ALPHA:
        progress("a significant difference: measuring fresh pairs")
        again = time_pairs(stage, plan, progress, seed=stage.seed + 1, clock=clock)
        rounds.append(again)
    return rounds


def _method(
    loaded: LoadedModel, options: IsolationOptions, rounds: list[Round]
) -> dict[str, str]:
    return {
        "model": f"{loaded.name}, numerics {options.numerics}",
        "engine": f"sharing as by default, blocks of {BLOCK_SIZE} tokens",
        "seed": str(options.seed),
        "twin worlds": "clocks that count steps; all that the attacker may see compared "
        "byte by byte",
        "evictions": f"a floor covers what the attacker retains and its request that "
        f"runs; how soon a victim comes back is played on a cache alone, with the policy "
        f"{LEARNING.name}",
        "order of answers": "played on a scheduler alone that serves one request at a "
        "time, under every order with the numbers of the engine's default",
        "timing": f"CPU seconds of this process, which others on the machine hardly "
        f"change; prompts of 4 blocks in interleaved pairs in random order, "
        f"{rounds[-1].claim.num_pairs} of them; trimmed means (a fifth at either end); "
        f"p by flipping signs, {TimingPlan().num_draws:,} patterns",
        "when timing decides": f"broken if p is at most {ALPHA} twice, with fresh pairs "
        f"and in the same direction, which happens once in {2 / ALPHA**2:,.0f} audits "
        f"without a leak; holds if p is larger and {LIMIT:.0%} of what a hit saves "
        f"would have been found with {POWER:.0%} probability (a block of four would "
        f"save about a quarter); else inconclusive",
    }
