"""The findings on identity as tables, and as values for JSON.

Owns what is shown and how it is named. Judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stemkv.audit.identity.attack import NUM_PROMPTS, Outcome
from stemkv.audit.identity.contexts import CONTEXTS
from stemkv.audit.identity.damage import Damage, StateKey
from stemkv.audit.identity.findings import Findings, KeyFinding, worst
from stemkv.audit.identity.scenarios import Expectation
from stemkv.audit.identity.trial import KeyFault
from stemkv.audit.verdict import Table

__all__ = ["make_data", "make_tables"]

_OURS = "StemKV"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_tables(findings: Findings, tokenizer: Any) -> tuple[Table, ...]:
    """Return the tables; `tokenizer` turns ids into text, `None` leaves them."""
    prompt = findings.arena.prompts[0].name
    first = findings.keys[0]
    pictures = [_picture(findings.ours, _OURS, prompt)]
    if isinstance(first.outcome, Outcome):
        pictures.insert(0, _picture(first.outcome, first.key.name, prompt))
    if findings.users and isinstance(findings.users.outcome, Outcome):
        users = findings.users
        pictures.append(_picture(findings.users.outcome, users.key.name, prompt))
    return (
        _keys(findings),
        _damage_by_key(findings),
        _sources(findings),
        _contexts(),
        *pictures,
        _scenarios(findings),
        _damage_by_facts(findings),
        _examples(findings, tokenizer),
        _scenario_damage(findings),
        _rounds(findings),
        _collisions(findings),
    )


def make_data(findings: Findings, *, seed: int) -> dict[str, Any]:
    """Return everything that was found as values that `json` can write."""
    evidence = findings.evidence
    prompts = findings.arena.prompts
    return {
        "seed": seed,
        "contexts": [str(context) for context in CONTEXTS],
        "keys": [
            _key_data(findings, name, source, outcome, finding)
            for name, source, outcome, finding in _all_outcomes(findings)
        ],
        "scenarios": [
            {
                "name": scenario.name,
                "expectation": scenario.expectation.value,
                "source": scenario.source,
                "why": scenario.why,
                "damage": _damage_data(evidence.scenarios.get(scenario.name)),
            }
            for scenario in findings.arena.scenarios
        ],
        "pairs": [
            {
                "writer": _state_name(writer),
                "reader": _state_name(reader),
                "prompt": reader.prompt,
                **(_damage_data(damage) or {}),
            }
            for (writer, reader), damage in evidence.pairs.items()
            if writer != reader
        ],
        "engine": [
            {
                "round": each.name,
                "expects_reuse": each.expects_reuse,
                "reused_tokens": list(each.reused),
            }
            for each in evidence.rounds
        ],
        "identity_fields": dict(findings.field_separates),
        "prompts": {p.name: {"num_tokens": len(p.tokens)} for p in prompts},
    }


def _all_outcomes(
    findings: Findings,
) -> list[tuple[str, str, Outcome | KeyFault, KeyFinding | None]]:
    """Return (name, source, outcome, finding) of every key, the judged one last."""
    rows: list[tuple[str, str, Outcome | KeyFault, KeyFinding | None]] = [
        (each.key.name, each.key.source, each.outcome, each) for each in findings.keys
    ]
    rows.append((_OURS, "the real cache", findings.ours, None))
    if findings.users is not None:
        users = findings.users
        rows.append((users.key.name, "yours", users.outcome, users))
    return rows


def _keys(findings: Findings) -> Table:
    must_hit = findings.ours.num_must_hit
    rows: list[tuple[str | int | float | None, ...]] = []
    for name, _, outcome, finding in _all_outcomes(findings):
        if isinstance(outcome, KeyFault):
            rows.append((name, None, None, None, None, outcome.reason))
            continue
        confused = list(outcome.confused())
        if finding is not None and finding.elsewhere is False:
            confused.append("(other keys in another process)")
        rows.append(
            (
                name,
                outcome.num_wrong,
                outcome.num_missed,
                len(outcome.wrong_scenarios(findings.arena.scenarios)),
                outcome.num_collisions,
                ", ".join(confused),
            )
        )
    num_pairs = findings.ours.num_pairs
    return Table(
        title=f"Keys under attack: {num_pairs} pairs, {must_hit} of them due hits",
        columns=("key", "wrong", "missed", "scenarios", "collisions", "confuses"),
        rows=tuple(rows),
        note="Wrong: pairs that share and must not. Missed: pairs that should share and "
        "do not. Scenarios: those in which it shares wrongly. Collisions: among "
        f"{NUM_PROMPTS} prompts. Confuses: facts that it cannot tell apart.",
    )


def _damage_by_key(findings: Findings) -> Table:
    rows: list[tuple[str | int | float | None, ...]] = []
    for name, _, outcome, _ in _all_outcomes(findings):
        damages = [] if isinstance(outcome, KeyFault) else findings.damages(outcome)
        if damages:
            rows.append(
                (
                    name,
                    len(damages),
                    _shown(worst([d.kv_error for d in damages])),
                    _shown(worst([d.total_variation for d in damages])),
                    sum(d.is_top_changed for d in damages),
                )
            )
    return Table(
        title="What the wrong hits of each key do",
        columns=("key", "wrong", "worst KV error", "worst TV", "top-1 flips"),
        rows=tuple(rows),
        note="KV error: relative, largest over layers. TV: total variation distance of "
        "the next token's distribution from the true one, in [0, 1]. Flips: wrong hits "
        "after which the likeliest token is another. Where only the tenant is confused "
        "KV is right, and the hit tells that somebody else used the prompt.",
        label="measured",
    )


def _sources(findings: Findings) -> Table:
    return Table(
        title="Where the keys come from",
        columns=("", "key", "modelled on"),
        rows=tuple(
            (letter, finding.key.name, finding.key.source)
            for letter, finding in zip(_LETTERS, findings.keys, strict=False)
        ),
        note="Each is the key as reported, not the project's code. Most are right in "
        "an engine that holds one model and drops its cache at every change.",
    )


def _contexts() -> Table:
    return Table(
        title="The contexts",
        columns=("", "weights", "adapter", "tenant", "from position"),
        rows=tuple(
            (
                str(index),
                f"revision {context.revision}",
                context.adapter,
                context.tenant,
                context.start_position,
            )
            for index, context in enumerate(CONTEXTS)
        ),
        note="Each writes every prompt, and each looks for it.",
    )


def _picture(outcome: Outcome, name: str, prompt: str) -> Table:
    return Table(
        title=f"Who finds what whom wrote under {name!r}, prompt of {prompt}",
        columns=("", *(str(index) for index in range(len(CONTEXTS)))),
        rows=tuple(
            (
                str(reader),
                *(
                    _cell(outcome.hits[prompt][writer][reader], writer == reader)
                    for writer in range(len(CONTEXTS))
                ),
            )
            for reader in range(len(CONTEXTS))
        ),
        note="A column for each context that writes, a row for each that reads. H right "
        "hit, X wrong hit, · right miss, ! missed hit.",
    )


def _cell(is_hit: bool, is_due: bool) -> str:
    if is_due:
        return "H" if is_hit else "!"
    return "X" if is_hit else "·"


def _scenarios(findings: Findings) -> Table:
    judged = {_OURS: findings.ours}
    if findings.users and isinstance(findings.users.outcome, Outcome):
        judged["yours"] = findings.users.outcome
    return Table(
        title="Requests that differ in one fact",
        columns=("scenario", "because", "should", *judged, "keys that share"),
        rows=tuple(
            (
                scenario.name,
                scenario.why,
                scenario.expectation.value,
                *(
                    _scenario_cell(outcome, scenario.name, scenario.expectation)
                    for outcome in judged.values()
                ),
                " ".join(
                    letter
                    for letter, finding in zip(_LETTERS, findings.keys, strict=False)
                    if isinstance(finding.outcome, Outcome)
                    and finding.outcome.scenario_hits[scenario.name]
                ),
            )
            for scenario in findings.arena.scenarios
        ),
        note="H right hit, X wrong hit, · right miss, ! missed hit. 'either': a hit is "
        "allowed and not required. Letters: see where the keys come from.",
    )


def _scenario_cell(outcome: Outcome, name: str, expectation: Expectation) -> str:
    is_hit = outcome.scenario_hits[name]
    if expectation is Expectation.EITHER:
        return "H" if is_hit else "·"
    return _cell(is_hit, expectation is Expectation.HIT)


def _damage_by_facts(findings: Findings) -> Table:
    groups: dict[tuple[str, str], list[Damage]] = {}
    for (writer, reader), damage in findings.evidence.pairs.items():
        if writer != reader:
            facts = " + ".join(_differing(writer, reader))
            groups.setdefault((reader.prompt, facts), []).append(damage)
    rows = tuple(
        (
            prompt,
            facts,
            len(damages),
            _shown(min(d.kv_error for d in damages)),
            _shown(worst([d.kv_error for d in damages])),
            _shown(worst([d.kv_max_abs for d in damages])),
            _shown(sum(d.total_variation for d in damages) / len(damages)),
            _shown(worst([d.total_variation for d in damages])),
            _shown(worst([d.kl for d in damages])),
            sum(d.is_top_changed for d in damages),
        )
        for (prompt, facts), damages in groups.items()
    )
    return Table(
        title="What a wrong hit does, by what differs",
        columns=(
            "prompt",
            "differs",
            "pairs",
            "least KV error",
            "worst KV error",
            "worst KV |Δ|",
            "mean TV",
            "worst TV",
            "worst KL",
            "top-1 flips",
        ),
        rows=rows,
        note="Every ordered pair of compute states: the reader decodes its last prompt "
        "token over the writer's KV, against what it computes alone. KL in nats.",
        label="measured",
    )


def _examples(findings: Findings, tokenizer: Any) -> Table:
    rows = []
    seen = set()
    for (writer, reader), damage in findings.evidence.pairs.items():
        facts = _differing(writer, reader)
        if len(facts) != 1 or (reader.prompt, facts) in seen:
            continue
        seen.add((reader.prompt, facts))
        rows.append(
            (
                reader.prompt,
                facts[0],
                _texts(damage.top_true, tokenizer),
                _texts(damage.top_reused, tokenizer),
                _shown(damage.total_variation),
            )
        )
    return Table(
        title="The likeliest next tokens, true and over a writer's KV",
        columns=("prompt", "differs", "true", "reused", "TV"),
        rows=tuple(rows),
        note="The first pair of each kind, not the worst.",
        label="measured",
    )


def _scenario_damage(findings: Findings) -> Table:
    rows = []
    for scenario in findings.arena.scenarios:
        damage = findings.evidence.scenarios.get(scenario.name)
        if scenario.expectation is not Expectation.MISS:
            continue
        rows.append(
            (
                scenario.name,
                scenario.source,
                *(
                    (None, None, None, "not computed")
                    if damage is None
                    else (
                        _shown(damage.kv_error),
                        _shown(damage.total_variation),
                        _shown(damage.kl),
                        _harm(damage),
                    )
                ),
            )
        )
    return Table(
        title="What a wrong hit does in scenarios",
        columns=("scenario", "reported in", "KV error", "TV", "KL", "harm"),
        rows=tuple(rows),
        note="Not computed: KV of another dtype, block size or build cannot be read as "
        "tensors of this one.",
        label="measured",
    )


def _harm(damage: Damage) -> str:
    if damage.is_top_changed:
        return "another token"
    if damage.is_bit_equal and damage.kv_error == 0:
        return "disclosure: right KV, of somebody else"
    return "another distribution" if damage.total_variation > 1e-3 else "other bits"


def _rounds(findings: Findings) -> Table:
    return Table(
        title="The contexts on a real engine",
        columns=("round", "requests", "should reuse", "least reused", "most reused"),
        rows=tuple(
            (
                each.name,
                each.num_requests,
                "yes" if each.expects_reuse else "nothing",
                min(each.reused),
                max(each.reused),
            )
            for each in findings.evidence.rounds
        ),
        note="Prompt tokens reused, by request, one after another on one engine.",
    )


def _collisions(findings: Findings) -> Table:
    rows = []
    pairs = NUM_PROMPTS * (NUM_PROMPTS - 1) / 2
    for bits in (16, 64, 256):
        # Half of the time after about 1.18 · sqrt(2^bits) entries (birthday bound).
        half = math.sqrt(2 * math.log(2) * 2.0**bits)
        rows.append((f"{bits} bits", pairs / 2.0**bits, half))
    return Table(
        title="Collisions that chance alone gives a digest",
        columns=(
            "digest cut to",
            f"expected among {NUM_PROMPTS}",
            "prompts for one in two",
        ),
        rows=tuple(rows),
        note="By the birthday bound. Somebody who searches needs no more than that for "
        "a pair of their own; StemKV compares token ids and has no digest of them.",
        label="estimated",
    )


def _differing(writer: StateKey, reader: StateKey) -> tuple[str, ...]:
    names = {
        "weights": writer.revision != reader.revision,
        "adapter": writer.adapter != reader.adapter,
        "start position": writer.start_position != reader.start_position,
    }
    return tuple(name for name, differs in names.items() if differs)


def _texts(ids: Sequence[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids))
    return " ".join(repr(tokenizer.decode([token])) for token in ids)


def _state_name(key: StateKey) -> str:
    return f"revision {key.revision}, {key.adapter}, from {key.start_position}"


def _shown(value: float | None) -> float | str | None:
    """Return a number that JSON has; what is none by name."""
    if value is None or math.isfinite(value):
        return value
    return str(value)


def _key_data(
    findings: Findings,
    name: str,
    source: str,
    outcome: Outcome | KeyFault,
    finding: KeyFinding | None,
) -> dict[str, Any]:
    data: dict[str, Any] = {"name": name, "source": source}
    elsewhere = None if finding is None else finding.elsewhere
    data["same_in_other_processes"] = (
        elsewhere.reason if isinstance(elsewhere, KeyFault) else elsewhere
    )
    if isinstance(outcome, KeyFault):
        return data | {"fault": outcome.reason}
    damages = findings.damages(outcome)
    scenarios = findings.arena.scenarios
    return data | {
        "wrong_hits": outcome.num_wrong,
        "missed_hits": outcome.num_missed,
        "confuses": list(outcome.confused()),
        "worst_kv_error": _shown(worst([d.kv_error for d in damages])),
        "worst_total_variation": _shown(worst([d.total_variation for d in damages])),
        "top_1_flips": sum(d.is_top_changed for d in damages),
        "collisions": outcome.num_collisions,
        "wrong_scenarios": outcome.wrong_scenarios(scenarios),
        "missed_scenarios": outcome.missed_scenarios(scenarios),
        "scenario_hits": dict(outcome.scenario_hits),
        "hits": {
            prompt: ["".join("1" if hit else "0" for hit in row) for row in rows]
            for prompt, rows in outcome.hits.items()
        },
    }


def _damage_data(damage: Damage | None) -> Mapping[str, Any] | None:
    if damage is None:
        return None
    return {
        name: _shown(value) if isinstance(value, float) else value
        for name, value in asdict(damage).items()
    }
