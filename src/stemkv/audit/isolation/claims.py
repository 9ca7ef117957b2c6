"""What the outcomes of the attacks on isolation mean, claim by claim.

Owns the sentences and the verdicts. Each claim has a control, as `audit` says.
"""

from __future__ import annotations

from stemkv.audit.isolation.evictions import (
    Habits,
    Volume,
)
from stemkv.audit.isolation.probes import PROBES, Finding, Sight
from stemkv.audit.isolation.relations import (
    Ids,
    NameTrial,
    Relations,
)
from stemkv.audit.isolation.stealing import LUCK, Theft, Thefts
from stemkv.audit.isolation.timing import (
    ALPHA,
    LIMIT,
    POWER,
    Round,
    judge,
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
)
from stemkv.audit.verdict import Check, Verdict

__all__ = [
    "eviction_checks",
    "headline",
    "id_checks",
    "name_checks",
    "probe_checks",
    "relation_checks",
    "theft_checks",
    "timing_checks",
    "turn_checks",
]


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


def probe_checks(findings: list[Finding]) -> list[Check]:
    """Return the checks of what probes see."""
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


def relation_checks(relations: Relations) -> list[Check]:
    """Return the checks of who hits whose."""
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


def name_checks(
    trials: list[NameTrial], accepted: list[str], num_odd: int
) -> list[Check]:
    """Return the checks of odd names."""
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
            "A request that names no tenant shares with nobody; odd names are refused",
            not accepted,
            "accepted: " + ", ".join(accepted)
            if accepted
            else f"{num_odd} odd values tried, with nothing left in flight",
        ),
    ]


def id_checks(ids: Ids) -> list[Check]:
    """Return the checks of request ids."""
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


def theft_checks(thefts: Thefts) -> list[Check]:
    """Return the checks of secrets that were to be read."""
    count_control, last = thefts.count_control, thefts.time[-1]
    is_read_by_time = len(thefts.time) > 1 and all(
        theft.by_luck <= LUCK for theft in thefts.time
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
            thefts.time_control.by_luck <= LUCK,
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


def timing_checks(rounds: list[Round]) -> list[Check]:
    """Return the checks of times to first token."""
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


def eviction_checks(volumes: list[Volume], habits: list[Habits]) -> list[Check]:
    """Return the checks of what evictions tell."""
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


def turn_checks(turns: list[Turns]) -> list[Check]:
    """Return the checks of whose turn it is."""
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


def headline(checks: tuple[Check, ...]) -> str:
    """Return what all checks together say."""
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
