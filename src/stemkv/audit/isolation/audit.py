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
from typing import Any

from stemkv.audit.isolation.evictions import (
    LEARNING,
    NUM_OWN_PROMPTS,
    Beyond,
    Habits,
    Volume,
    measure_beyond,
    try_habits,
    try_volume,
)
from stemkv.audit.isolation.probes import PROBES, Finding, Sight, Stage, run_probes
from stemkv.audit.isolation.relations import (
    PARTIES,
    Ids,
    NameTrial,
    Relations,
    try_ids,
    try_names,
    try_relations,
)
from stemkv.audit.isolation.remaining import (
    Pressure,
    Wait,
    measure_pressure,
    measure_wait,
)
from stemkv.audit.isolation.stealing import Theft, steal_by_count, steal_by_time
from stemkv.audit.isolation.timing import (
    ALPHA,
    LIMIT,
    POWER,
    Round,
    TimingPlan,
    judge,
    time_pairs,
)
from stemkv.audit.isolation.turns import (
    BESIDE,
    LIKES_HITS,
    NOSY,
    OWN,
    Turns,
    try_turns,
)
from stemkv.audit.isolation.worlds import (
    BLOCK_SIZE,
    PRIVATE,
    PUBLIC_HEAD,
    SETTINGS,
    SHARED,
    Setting,
)
from stemkv.audit.verdict import AuditReport, Check, Table, Verdict
from stemkv.core.schedule.orders import ORDERS
from stemkv.engine import LoadedModel
from stemkv.errors import ConfigError

__all__ = ["IsolationOptions", "audit_isolation"]

_LUCK = 0.01  # more guesses right than luck gives once in so many tries


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Thefts:
    """All attempts to read a secret."""

    count_control: Theft
    count: Theft
    count_public: Theft
    time_control: Theft
    time: tuple[Theft, ...]  # the second only if the first looked like success


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
        *_probe_checks(findings),
        *_relation_checks(relations),
        *_name_checks(trials, accepted, num_odd),
        *_id_checks(ids),
        *_theft_checks(thefts),
        *_timing_checks(rounds),
        *_eviction_checks(volumes, habits),
        *_turn_checks(turns),
    )
    return AuditReport(
        name="isolation",
        headline=_headline(checks),
        checks=checks,
        tables=(
            _probe_table(findings),
            _relation_table(relations),
            _name_table(trials),
            _theft_table(thefts),
            _timing_table(rounds),
            _pressure_table(pressure),
            _eviction_table(volumes, habits, beyond),
            _turn_table(turns),
            _remaining_table(pressure, habits, beyond, wait, ids, findings),
        ),
        method=_method(loaded, options, rounds),
        data={
            "findings": [_finding_data(finding) for finding in findings],
            "relations": [
                {"owner": owner, "asker": asker, "cached_tokens": tokens}
                for (owner, asker), tokens in relations.hits.items()
            ],
            "public_hits": relations.public_hits,
            "names": [asdict(trial) for trial in trials],
            "accepted_odd_fields": accepted,
            "ids": asdict(ids),
            "thefts": [_theft_data(theft) for theft in _all(thefts)],
            "rounds": [asdict(each) for each in rounds],
            "pressure": [asdict(row) for row in pressure],
            "volumes": [_volume_data(volume) for volume in volumes],
            "habits": [asdict(each) for each in habits],
            "turns": [_turn_data(each) for each in turns],
            "beyond_floor": asdict(beyond),
            "wait": asdict(wait),
        },
    )


def _steal(
    stage: Stage, progress: Callable[[str], None], clock: Callable[[], float]
) -> _Thefts:
    seed = stage.seed

    def by_time(setting: Setting, salt: int) -> Theft:
        return steal_by_time(stage, setting, progress, seed=seed + salt, clock=clock)

    control = by_time(SHARED, 1)
    if control.by_luck > _LUCK:
        control = by_time(SHARED, 2)  # something may have come between
    attempts = [by_time(PRIVATE, 3)]
    if attempts[0].by_luck <= _LUCK:
        attempts.append(by_time(PRIVATE, 4))
    return _Thefts(
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


# Checks


def _control(claim: str, works: bool, evidence: str) -> Check:
    """Return a control; one that fails leaves the audit without an answer."""
    verdict = Verdict.HOLDS if works else Verdict.INCONCLUSIVE
    return Check(claim=claim, verdict=verdict, evidence=evidence, is_control=True)


def _claim(claim: str, holds: bool, evidence: str) -> Check:
    verdict = Verdict.HOLDS if holds else Verdict.BROKEN
    return Check(claim=claim, verdict=verdict, evidence=evidence)


_PROBE_CLAIMS = {
    "match": "A tenant's prompt matches nothing that another tenant computed",
    "cached tokens": "The token counts of an answer do not depend on other tenants' "
    "prompts",
    "events": "Every event that a tenant may see is the same whatever others ask",
    "usage": "The usage a tenant can read does not depend on other tenants",
    "eviction": "Which of a tenant's blocks are evicted does not depend on what "
    "others' prompts say",
    "waiting": "A tenant never waits for another tenant's private prefix",
}


def _probe_checks(findings: list[Finding]) -> list[Check]:
    checks = []
    for probe, what in PROBES.items():
        of_probe = [finding for finding in findings if finding.probe == probe]
        (control,) = [f for f in of_probe if f.setting.is_control]
        others = [f for f in of_probe if not f.setting.is_control]
        leaks = [finding for finding in others if finding.is_signal]
        num_lines = sum(len(finding.same.lines) for finding in others)
        evidence = (
            f"the victim used the same prompt or another one, and {what} stayed the "
            f"same in all of {len(others)} settings ({num_lines} lines compared)"
        )
        if leaks:
            names = ", ".join(finding.setting.name for finding in leaks)
            evidence = f"{what} gave the victim's prompt away in: {names}"
        checks += [
            _control(
                f"In one group the attack on {probe!r} works",
                control.is_signal,
                f"{what}: {_both(control)}",
            ),
            _claim(_PROBE_CLAIMS[probe], not leaks, evidence),
        ]
    return checks


def _both(finding: Finding) -> str:
    same, other = finding.same, finding.other
    if same.number is not None and other.number is not None:
        return f"{same.number} if the victim used the same prompt, else {other.number}"
    return (
        f"SHA-256 {same.digest[:12]} if the victim used the same prompt, else "
        f"{other.digest[:12]}"
    )


def _relation_checks(relations: Relations) -> list[Check]:
    leaks, misses = relations.leaks(), relations.misses()
    num_pairs = len(relations.hits)
    retained, expected = relations.num_retained, relations.num_retained_expected
    return [
        _control(
            "Requests of one scope hit each other's prompts, and the public head",
            not misses,
            "missed: " + "; ".join(misses)
            if misses
            else f"{relations.num_expected_hits} pairs of {num_pairs} share a scope and "
            f"hit a whole block each",
        ),
        _claim(
            "Groups, classes and tenants that share nothing reach as far as declared "
            "and no further",
            not leaks,
            "hit: " + "; ".join(leaks)
            if leaks
            else f"no hit in the other {num_pairs - relations.num_expected_hits} pairs",
        ),
        _claim(
            "A request that shares with nobody leaves nothing behind",
            retained <= expected,
            f"{retained} blocks were retained of {num_pairs} prompts, of which "
            f"{num_pairs - expected} were of such requests",
        ),
    ]


def _name_checks(
    trials: list[NameTrial], accepted: list[str], num_odd: int
) -> list[Check]:
    stolen = [trial for trial in trials if trial.num_stolen]
    idle = [trial for trial in trials if trial.num_own != BLOCK_SIZE]
    return [
        _control(
            "A tenant with a crafted name hits its own prompt",
            not idle,
            f"{len(trials) - len(idle)} of {len(trials)} names do",
        ),
        _claim(
            "A tenant name cannot be crafted to reach another scope",
            not stolen,
            "reached: " + ", ".join(trial.name for trial in stolen)
            if stolen
            else f"{len(trials)} names that look like a tenant, a group or the public "
            f"hit nothing but what is their own",
        ),
        _claim(
            "A request without a tenant, or of an undeclared class, is refused",
            not accepted,
            "accepted: " + ", ".join(accepted)
            if accepted
            else f"{num_odd} odd values refused, with nothing left in flight",
        ),
    ]


def _id_checks(ids: Ids) -> list[Check]:
    return [
        _control(
            "A tenant can cancel its own request",
            ids.cancels_own,
            "the victim cancelled its second request",
        ),
        _claim(
            "A tenant can neither cancel another's request nor learn from trying "
            "whether there is one",
            not ids.cancels_others
            and ids.victim_finished
            and ids.answer_live == ids.answer_unknown,
            f"told {ids.answer_live} of a live request of another and "
            f"{ids.answer_unknown} of none; the victim's request "
            f"{'went on to its end' if ids.victim_finished else 'ended early'}",
        ),
        _claim(
            "The ids a tenant is given tell nothing of other tenants",
            ids.ids_alone == ids.ids_beside,
            f"{', '.join(ids.ids_beside)} beside a victim, and "
            f"{', '.join(ids.ids_alone)} without one",
        ),
    ]


def _theft_checks(thefts: _Thefts) -> list[Check]:
    count_control, last = thefts.count_control, thefts.time[-1]
    is_read_by_time = len(thefts.time) > 1 and all(
        theft.by_luck <= _LUCK for theft in thefts.time
    )
    return [
        _control(
            "In one group a secret is read token by token from cached tokens",
            count_control.guess == count_control.secret,
            _theft_evidence(count_control),
        ),
        _claim(
            "Cached tokens tell nothing of a secret behind a known beginning",
            thefts.count.num_telling == 0,
            _theft_evidence(thefts.count),
        ),
        _claim(
            "Nor of one behind a beginning that is declared public",
            thefts.count_public.num_telling == 0,
            _theft_evidence(thefts.count_public),
        ),
        _control(
            "In one group a secret is read field by field from times to first token",
            thefts.time_control.by_luck <= _LUCK,
            _theft_evidence(thefts.time_control),
        ),
        _claim(
            "Times to first token give no more of a secret than guessing does",
            not is_read_by_time,
            _theft_evidence(last)
            + (", at the second attempt" if len(thefts.time) > 1 else ""),
        ),
    ]


def _theft_evidence(theft: Theft) -> str:
    expected = len(theft.secret) / theft.num_candidates
    text = (
        f"{theft.num_right} of {len(theft.secret)} positions right in "
        f"{theft.num_probes} probes (luck alone: {expected:.1f} on average, as many or "
        f"more with probability {theft.by_luck:.2g})"
    )
    if theft.num_telling is not None:
        text += f", candidates answered differently at {theft.num_telling} positions"
    return text


def _timing_checks(rounds: list[Round]) -> list[Check]:
    first, last = rounds[0], rounds[-1]
    second = rounds[1] if len(rounds) > 1 else None
    control, claim = last.control, last.claim
    verdict = judge(first, second)
    smallest = f"{1e3 * claim.detectable:.1f} ms"
    share = claim.detectable / last.effect if last.effect else float("inf")
    evidence = (
        f"{1e3 * claim.mean:+.1f} ms ({1 - ALPHA:.0%} interval {1e3 * claim.low:+.1f} "
        f"to {1e3 * claim.high:+.1f}) over {claim.num_pairs} pairs, p = {claim.p:.3f}; "
        f"{smallest} would have been found with {POWER:.0%} probability, "
        f"{share:.0%} of what a hit saves"
    )
    if second is not None:
        evidence += f" (fresh pairs, since the first gave p = {first.claim.p:.4f})"
    if verdict is Verdict.INCONCLUSIVE and claim.p > ALPHA and not last.is_powered:
        evidence += (
            f"; more than {LIMIT:.0%}, so nothing follows: times scatter too much for "
            f"this model, try again on a machine that is less busy"
        )
    return [
        _control(
            "In one group a prompt that the victim used is answered sooner",
            all(each.has_control for each in rounds),
            f"{1e3 * control.mean:+.1f} ms over {control.num_pairs} pairs, "
            f"p = {control.p:.4f}",
        ),
        Check(
            claim="Time to first token does not depend on whether another tenant used "
            "the prompt",
            verdict=verdict,
            evidence=evidence,
        ),
    ]


def _eviction_checks(volumes: list[Volume], habits: list[Habits]) -> list[Check]:
    (volume,) = [each for each in volumes if each.has_floor]
    (no_floor,) = [each for each in volumes if not each.has_floor]
    (habit,) = [each for each in habits if each.has_floor]
    (pooled,) = [each for each in habits if not each.has_floor]
    return [
        _control(
            "Without quotas a tenant's evictions tell how much others take",
            no_floor.is_signal,
            f"{_lost(no_floor.busy)} by the victim's load, {_lost(no_floor.idle)} "
            f"without",
        ),
        _claim(
            "With a floor that covers what it uses, nothing that a tenant sees tells how "
            "much others take",
            not volume.is_signal,
            f"{_lost(volume.busy)} by the victim's load, {_lost(volume.idle)} without; "
            + (
                "what it sees differs"
                if volume.is_signal
                else f"all of {len(volume.busy.lines)} lines equal"
            ),
        ),
        _control(
            "Without quotas a policy that learns lets evictions tell how soon others "
            "come back",
            pooled.num_told > 0,
            _habit_evidence(pooled),
        ),
        _claim(
            "With a floor, which of its blocks a tenant loses, to itself as well, does "
            "not tell that",
            habit.num_told == 0,
            _habit_evidence(habit),
        ),
    ]


def _lost(sight: Sight) -> str:
    return f"{sight.number} of its blocks lost"


def _habit_evidence(habits: Habits) -> str:
    return (
        f"the two habits looked different in {habits.num_told} of {habits.num_plays} "
        f"plays with equal load"
    )


def _turn_checks(turns: list[Turns]) -> list[Check]:
    (shared,) = [
        each
        for each in turns
        if each.play == OWN and each.setting.is_control and each.order == LIKES_HITS
    ]
    (nosy,) = [each for each in turns if each.order == NOSY]
    return [
        _control(
            f"In one group {LIKES_HITS} answers the guess first that another used",
            shared.is_signal and shared.warm[0] != shared.cold[0],
            _turn_evidence([shared]),
        ),
        _claim(
            "In which order a tenant's own requests start does not depend on what "
            "others have cached",
            not any(each.is_signal for each in _turns_of(OWN, turns)),
            _turn_evidence(_turns_of(OWN, turns)),
        ),
        _control(
            "An order that ranks all tenants by all that is cached gives it away",
            nosy.is_signal,
            _turn_evidence([nosy]),
        ),
        _claim(
            "Nor does it tell what another has cached whether its request of equal "
            "length starts before or after",
            not any(each.is_signal for each in _turns_of(BESIDE, turns)),
            _turn_evidence(_turns_of(BESIDE, turns)),
        ),
    ]


def _turns_of(play: str, turns: list[Turns]) -> list[Turns]:
    """Return those of a play that must not tell anything."""
    return [
        each
        for each in turns
        if each.play == play and not each.setting.is_control and each.order != NOSY
    ]


def _turn_evidence(turns: list[Turns]) -> str:
    telling = [each for each in turns if each.is_signal]
    if not telling:
        names = ", ".join(dict.fromkeys(each.order for each in turns))
        return f"all started alike, cached or not, in {len(turns)} plays under {names}"
    first = telling[0]
    return (
        f"told apart in {len(telling)} of {len(turns)} plays; under {first.order}, "
        f"{first.setting.name}: {', '.join(first.warm)} if it is cached, else "
        f"{', '.join(first.cold)}"
    )


def _headline(checks: tuple[Check, ...]) -> str:
    claims = [check for check in checks if not check.is_control]
    broken = [check for check in claims if check.verdict is Verdict.BROKEN]
    undecided = [check for check in checks if check.verdict is Verdict.INCONCLUSIVE]
    if broken:
        return f"{len(broken)} of {len(claims)} claims broken: {broken[0].claim}."
    if undecided:
        return (
            f"No leak found, but {len(undecided)} of {len(checks)} checks could not be "
            f"decided: {undecided[0].claim}."
        )
    return (
        f"Nothing that a tenant sees told what another's prompts say, in {len(claims)} "
        f"claims with {len(checks) - len(claims)} controls; that others are busy can be "
        f"felt, and without quotas evictions tell how much they take and how soon they "
        f"come back."
    )


# Tables


def _probe_table(findings: list[Finding]) -> Table:
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


def _relation_table(relations: Relations) -> Table:
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


def _name_table(trials: list[NameTrial]) -> Table:
    return Table(
        title="Crafted tenant names",
        columns=("name", "goes for", "tokens of the target", "tokens of its own"),
        rows=tuple((t.name, t.target, t.num_stolen, t.num_own) for t in trials),
        note="Names are escaped. The last column is the control.",
    )


def _theft_table(thefts: _Thefts) -> Table:
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
            for theft in _all(thefts)
        ),
        note="'By luck' is the probability of at least so many right guesses without "
        "any oracle. Counts are exact; times are measured.",
        label="measured",
    )


def _timing_table(rounds: list[Round]) -> Table:
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


def _pressure_table(pressure: list[Pressure]) -> Table:
    return Table(
        title="Load that can be felt: 8 blocks of the attacker in a cache of 16",
        columns=("the victim", "new blocks it takes", "attacker's blocks evicted"),
        rows=tuple((row.deed, row.num_taken, row.num_lost) for row in pressure),
        note="Where the cache is full, a tenant can see how many blocks others newly "
        "take, and so whether they repeat themselves (which takes one block for a "
        "moment); not what they say. Without quotas no tenant has a floor.",
    )


def _eviction_table(
    volumes: list[Volume], habits: list[Habits], beyond: Beyond
) -> Table:
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


def _turn_table(turns: list[Turns]) -> Table:
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


def _remaining_table(
    pressure: list[Pressure],
    habits: list[Habits],
    beyond: Beyond,
    wait: Wait,
    ids: Ids,
    findings: list[Finding],
) -> Table:
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


def _all(thefts: _Thefts) -> list[Theft]:
    return [
        thefts.count_control,
        thefts.count,
        thefts.count_public,
        thefts.time_control,
        *thefts.time,
    ]


def _finding_data(finding: Finding) -> dict[str, Any]:
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


def _volume_data(volume: Volume) -> dict[str, Any]:
    return {
        "has_floor": volume.has_floor,
        "is_signal": volume.is_signal,
        "idle": {"number": volume.idle.number, "sha256": volume.idle.digest},
        "busy": {"number": volume.busy.number, "sha256": volume.busy.digest},
    }


def _turn_data(turns: Turns) -> dict[str, Any]:
    return {
        "play": turns.play,
        "order": turns.order,
        "setting": turns.setting.name,
        "is_signal": turns.is_signal,
        "warm": list(turns.warm),
        "cold": list(turns.cold),
    }


def _theft_data(theft: Theft) -> dict[str, Any]:
    return {**asdict(theft), "num_right": theft.num_right, "by_luck": theft.by_luck}
