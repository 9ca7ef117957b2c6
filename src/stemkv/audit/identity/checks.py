"""The claims about identity, and what the findings say of each.

Owns verdicts and their words. The claims are about StemKV's own path, or about the
user's key where one is given; then ours are controls. A control shows that the attack
works: where one fails, the audit can't tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stemkv.audit.identity.attack import NUM_PROMPTS, Outcome
from stemkv.audit.identity.findings import Findings, KeyFinding, worst
from stemkv.audit.identity.scenarios import Expectation, Scenario
from stemkv.audit.identity.trial import KeyFault
from stemkv.audit.verdict import Check, Verdict

__all__ = ["falls_short", "make_checks", "make_headline"]

# Total variation distance that a wrong hit must reach to be called wrong in tensors.
_REAL_DAMAGE = 0.01


def make_checks(findings: Findings) -> tuple[Check, ...]:
    """Return all claims; those of the user's key first, if there is one."""
    ours = _of_ours(findings)
    if findings.users is None:
        return (*ours, *_controls(findings))
    controls = [replace(check, is_control=True) for check in ours]
    return (*_of_users(findings, findings.users), *controls, *_controls(findings))


def make_headline(findings: Findings) -> str:
    """Return one sentence on what shares what it must not."""
    users = findings.users
    if users is not None:
        if isinstance(users.outcome, KeyFault):
            return f"{users.key.name} is no usable key: {users.outcome.reason}"
        return f"{users.key.name}: {_summary(findings, users.outcome)}"
    tokens_only = findings.keys[0]
    rest = ""
    if isinstance(tokens_only.outcome, Outcome):
        damages = findings.damages(tokens_only.outcome)
        distance = worst([damage.total_variation for damage in damages])
        changed = sum(damage.is_top_changed for damage in damages)
        if distance is not None:
            rest = (
                f"; {tokens_only.key.name} would share {len(damages)} wrongly, change "
                f"the likeliest token in {changed}, and move up to {distance:.0%} of "
                f"the probability"
            )
    return f"StemKV: {_summary(findings, findings.ours)}{rest}"


def falls_short(findings: Findings, finding: KeyFinding) -> list[str]:
    """Return where a key from the field does not fail although it did there."""
    key, outcome = finding.key, finding.outcome
    if isinstance(outcome, KeyFault):
        return [outcome.reason]
    missing = sorted(key.confuses - set(outcome.confused()))
    wrong = outcome.wrong_scenarios(findings.arena.scenarios)
    known = {scenario.name for scenario in findings.arena.scenarios}
    missing += [name for name in key.fails if name in known and name not in wrong]
    if key.collides and not outcome.num_collisions:
        missing.append("collisions")
    if key.is_unstable and finding.elsewhere is not False:
        missing.append("other keys in another process")
    return missing


def _summary(findings: Findings, outcome: Outcome) -> str:
    must_miss = outcome.num_pairs - outcome.num_must_hit
    found = outcome.num_must_hit - outcome.num_missed
    wrong = len(outcome.wrong_scenarios(findings.arena.scenarios))
    return (
        f"{outcome.num_wrong} of {must_miss} pairs shared wrongly, {found} of "
        f"{outcome.num_must_hit} due hits found, {wrong} of "
        f"{len(_of(findings, Expectation.MISS))} scenarios wrong"
    )


def _of_outcome(findings: Findings, outcome: Outcome) -> list[Check]:
    """Return the claims that hold for any key worth having."""
    must_miss = outcome.num_pairs - outcome.num_must_hit
    confused = outcome.confused()
    damages = findings.damages(outcome)
    distance = worst([damage.total_variation for damage in damages])
    found = outcome.num_must_hit - outcome.num_missed
    scenarios = findings.arena.scenarios
    wrong = outcome.wrong_scenarios(scenarios)
    missed = outcome.missed_scenarios(scenarios)
    harm = f", confusing {', '.join(confused)}" if confused else ""
    if distance is not None:
        harm += f"; up to {distance:.2g} of the next token's probability moves"
    return [
        Check(
            claim="no context finds what another one wrote",
            verdict=_holds(outcome.num_wrong == 0),
            evidence=f"{outcome.num_wrong} of {must_miss} pairs that must miss share"
            + harm,
        ),
        Check(
            claim="every context finds what it wrote itself",
            verdict=_holds(outcome.num_missed == 0),
            evidence=f"{found} of {outcome.num_must_hit} due hits",
        ),
        Check(
            claim="requests that differ in one fact do not share",
            verdict=_holds(not wrong),
            evidence=_listed(wrong, _of(findings, Expectation.MISS), "share"),
        ),
        Check(
            claim="requests that may share do",
            verdict=_holds(not missed),
            evidence=_listed(missed, _of(findings, Expectation.HIT), "do not"),
        ),
        Check(
            claim="no prompt is taken for another",
            verdict=_holds(outcome.num_collisions == 0),
            evidence=f"{outcome.num_collisions} of {NUM_PROMPTS} different prompts "
            f"find another's first block",
        ),
    ]


def _of_ours(findings: Findings) -> list[Check]:
    ours, evidence = findings.ours, findings.evidence
    checks = _of_outcome(findings, ours)
    checks.append(
        Check(
            claim="no more is reused than is common",
            verdict=_holds(not ours.overlong),
            evidence=f"{len(ours.overlong)} matches are longer than the common prefix",
        )
    )
    readers = len(ours.hits) * len(next(iter(ours.hits.values())))
    checks.append(
        Check(
            claim="with all writers in one cache each reader finds its own only",
            verdict=_holds(
                findings.num_foreign_hits == 0 and findings.num_own_hits == readers
            ),
            evidence=f"{findings.num_foreign_hits} of {readers} readers find something "
            f"among the others, {findings.num_own_hits} their own",
        )
    )
    blind = [n for n, separates in findings.field_separates.items() if not separates]
    checks.append(
        Check(
            claim="each field of the identity alone keeps prefixes apart",
            verdict=_holds(not blind),
            evidence=f"{len(findings.field_separates) - len(blind)} of "
            f"{len(findings.field_separates)} fields do"
            + (f", not {', '.join(blind)}" if blind else ""),
        )
    )
    for expects_reuse, claim in (
        (False, "the engine never reuses across contexts, roll-outs or reloads"),
        (True, "the engine does reuse within a context"),
    ):
        rounds = [r for r in evidence.rounds if r.expects_reuse is expects_reuse]
        num_right = sum(r.num_right for r in rounds)
        total = sum(r.num_requests for r in rounds)
        bad = [r.name for r in rounds if r.num_right < r.num_requests]
        checks.append(
            Check(
                claim=claim,
                verdict=_holds(num_right == total),
                evidence=f"{num_right} of {total} requests in {len(rounds)} rounds"
                + (f"; not in: {', '.join(bad)}" if bad else ""),
            )
        )
    if evidence.numerics.pads_context:
        checks.append(
            Check(
                claim="what the engine computes after a hit has the cold run's bits",
                verdict=_holds(evidence.num_equal_bits == evidence.num_compared),
                evidence=f"logits of {evidence.num_equal_bits} of "
                f"{evidence.num_compared} requests",
            )
        )
    return checks


def _of_users(findings: Findings, users: KeyFinding) -> list[Check]:
    name, outcome = users.key.name, users.outcome
    claim = f"{name} is a function of its context alone"
    if isinstance(outcome, KeyFault):
        return [Check(claim=claim, verdict=Verdict.BROKEN, evidence=outcome.reason)]
    checks = [
        Check(
            claim=claim,
            verdict=Verdict.HOLDS,
            evidence="asked twice for every prefix, it gave equal keys",
        )
    ]
    if isinstance(users.elsewhere, KeyFault):
        verdict, evidence = Verdict.INCONCLUSIVE, users.elsewhere.reason
    else:
        same = users.elsewhere is True
        verdict = _holds(same)
        evidence = (
            "two processes with other hash seeds agree"
            if same
            else (
                "a process with another hash seed gives other keys: nothing that is "
                "stored is found after a restart"
            )
        )
    checks.append(
        Check(
            claim=f"{name} gives equal keys in every process",
            verdict=verdict,
            evidence=evidence,
        )
    )
    for check in _of_outcome(findings, outcome):
        checks.append(replace(check, claim=f"{name}: {check.claim}"))
    return checks


def _controls(findings: Findings) -> list[Check]:
    evidence = findings.evidence
    num_contexts = len(next(iter(findings.ours.hits.values())))
    checks = [
        _control(
            "the identities under attack are those of the engine",
            evidence.num_own_namespaces == num_contexts,
            f"{evidence.num_own_namespaces} of {num_contexts} namespaces are the "
            f"engine's own",
        ),
        _control_of_damage(findings),
    ]
    selves = [d for (w, r), d in evidence.pairs.items() if w == r]
    equal = sum(damage.is_bit_equal for damage in selves)
    distance = worst([damage.total_variation for damage in selves])
    checks.append(
        _control(
            "a reader over its own KV gets its own next token",
            equal == len(selves)
            or (not evidence.numerics.pads_context and (distance or 0.0) < 0.5),
            f"{equal} of {len(selves)} states bit for bit, worst distance "
            f"{distance or 0.0:.2g}",
        )
    )
    checks.append(
        _control(
            "KV does not depend on the tenant: there a wrong hit discloses, and "
            "computes nothing wrong",
            evidence.num_equal_tenants == evidence.num_tenant_pairs
            or not evidence.numerics.pads_context,
            f"{evidence.num_equal_tenants} of {evidence.num_tenant_pairs} cold runs of "
            f"two tenants have equal logits",
        )
    )
    short = {
        finding.key.name: missing
        for finding in findings.keys
        if (missing := falls_short(findings, finding))
    }
    failing = [f for f in findings.keys if _has_to_fail(f)]
    checks.append(
        _control(
            "keys from the field fail here where they failed there",
            not short,
            f"{len(failing) - len(short)} of {len(failing)} do"
            + "".join(f"; {n}: not in {', '.join(m)}" for n, m in short.items()),
        )
    )
    reference = findings.keys[-1].outcome
    is_right = isinstance(reference, Outcome) and _is_right(findings, reference)
    checks.append(
        _control(
            "a key of every fact makes no mistake, so not everything fails here",
            is_right,
            _summary(findings, reference)
            if isinstance(reference, Outcome)
            else reference.reason,
        )
    )
    return checks


def _control_of_damage(findings: Findings) -> Check:
    tokens_only = findings.keys[0]
    claim = f"{tokens_only.key.name}: its wrong hits are wrong in tensors"
    if isinstance(tokens_only.outcome, KeyFault):
        return _control(claim, False, tokens_only.outcome.reason)
    damages = findings.damages(tokens_only.outcome)
    distance = worst([d.total_variation for d in damages]) or 0.0
    num_kv = sum(damage.kv_error > 0 for damage in damages)
    num_top = sum(damage.is_top_changed for damage in damages)
    return _control(
        claim,
        distance > _REAL_DAMAGE,
        f"{len(damages)} wrong hits, KV differs in {num_kv}, the likeliest token in "
        f"{num_top}, worst distance {distance:.2g} (at least {_REAL_DAMAGE} wanted)",
    )


def _has_to_fail(finding: KeyFinding) -> bool:
    key = finding.key
    return bool(key.confuses or key.fails or key.collides or key.is_unstable)


def _is_right(findings: Findings, outcome: Outcome) -> bool:
    scenarios = findings.arena.scenarios
    return not (
        outcome.num_wrong
        or outcome.num_missed
        or outcome.num_collisions
        or outcome.wrong_scenarios(scenarios)
        or outcome.missed_scenarios(scenarios)
    )


def _of(findings: Findings, expectation: Expectation) -> list[Scenario]:
    return [s for s in findings.arena.scenarios if s.expectation is expectation]


def _listed(names: Sequence[str], among: Sequence[Scenario], verb: str) -> str:
    listed = f": {', '.join(names)}" if names else ""
    return f"{len(names)} of {len(among)} scenarios {verb}{listed}"


def _holds(is_true: bool) -> Verdict:
    return Verdict.HOLDS if is_true else Verdict.BROKEN


def _control(claim: str, works: bool, evidence: str) -> Check:
    return Check(
        claim=claim,
        verdict=Verdict.HOLDS if works else Verdict.INCONCLUSIVE,
        evidence=evidence,
        is_control=True,
    )
