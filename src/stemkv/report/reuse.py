"""What was reused, what was not and why, and what memory would change about it.

Owns the sections of a replay's page that follow from counted tokens. Knows nothing of
the clock (see `latency`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stemkv.core.books.entry import MissReason
from stemkv.measure.results import (
    PrefixValue,
    ReplayResult,
    SavedWork,
    TenantResult,
    TokenTotals,
)
from stemkv.report.chart import (
    Axis,
    Band,
    bar_chart,
    heat_map,
)
from stemkv.report.page import Cell, Chart, Section
from stemkv.report.wording import (
    NO_DATA,
    count,
    memory,
    name,
    number,
    per_cent,
    percent,
    seconds,
    short,
    tokens,
)

__all__ = [
    "bounds",
    "counted",
    "eviction",
    "losses",
    "prefixes",
    "reason_name",
    "tenant_bars",
    "tenant_table",
    "writers",
]

# Each miss reason's colour and meaning. Grey: no cache could have helped.
_REASONS = {
    MissReason.NEVER_SEEN: ("var(--computed)", "new: nobody had them before"),
    MissReason.BELOW_BLOCK: (
        "var(--computed-end)",
        "end of the prompt: no whole block, or the last token",
    ),
    MissReason.EVICTED: ("var(--lost-1)", "were cached, and evicted before"),
    MissReason.NOT_RETAINED: (
        "var(--lost-6)",
        "not kept after their last use, as their sender had said",
    ),
    MissReason.OTHER_DOMAIN: ("var(--lost-2)", "cached for others: isolation"),
    MissReason.IDENTITY_DIFFERS: (
        "var(--lost-3)",
        "cached for another model, adapter or salt",
    ),
    MissReason.NOT_YET_COMPUTED: (
        "var(--lost-4)",
        "somebody was computing them just then",
    ),
    MissReason.UNSHARABLE: (
        "var(--lost-5)",
        "unknown prompt, or shares with nobody",
    ),
}

_MAX_TENANTS = 20
_MAX_PREFIXES = 15
_EVERY_TENANT = "all tenants"
_OTHERS = "the other tenants"


def counted(result: ReplayResult) -> str:
    """Return the label of numbers that follow from tokens alone."""
    return "exact" if result.trace.is_exact else "estimated"


def reason_name(reason: MissReason) -> str:
    """Return a miss reason for people."""
    return reason.value.replace("_", " ")


def bounds(result: ReplayResult) -> list[Section]:
    """Return what no policy of a kind can exceed, beside what this run reached."""
    if not result.bounds:
        return []
    own: tuple[Cell, ...] = ("this run", per_cent(result.tokens.hit_rate), "")
    return [
        Section(
            title="Bounds",
            columns=("what", "hit rate %", "what it bounds"),
            rows=[
                own,
                *((b.name, per_cent(b.hit_rate), b.note) for b in result.bounds),
            ],
            label=counted(result),
        )
    ]


def tenant_bars(result: ReplayResult) -> list[Chart]:
    """Return where each tenant's prompt tokens went, as shares."""
    if not result.tokens.prompt:
        return []
    shown, others = _largest_tenants(result)
    parts = [(name(each.tenant), each.tokens) for each in shown if each.tokens.prompt]
    if len(result.tenants) > 1:
        parts.insert(0, (_EVERY_TENANT, result.tokens))
    reasons = _occurring_reasons(result.tokens)
    bands = [
        Band(
            name="reused",
            values=[t.reused / t.prompt for _, t in parts],
            color="var(--reused)",
        )
    ]
    for reason in reasons:
        values = [t.misses.get(reason.value, 0) / t.prompt for _, t in parts]
        color, _ = _REASONS[reason]
        bands.append(Band(name=reason_name(reason), values=values, color=color))
    note = (
        "All but the first colour had to be computed: grey is new text and ends of "
        "prompts, the others are tokens that another cache or policy might have reused."
    )
    if others:
        note += f" The {count(len(others), 'smallest tenant')} are not shown."
    return [
        bar_chart(
            title="Where the prompt tokens went",
            names=[f"{who} · {tokens(t.prompt)}" for who, t in parts],
            bands=bands,
            x=Axis(title="share of prompt tokens", is_share=True),
            columns=("tenant", "prompt tokens", "reused", *map(reason_name, reasons)),
            rows=[
                (who, t.prompt, t.reused, *(t.misses.get(r.value, 0) for r in reasons))
                for who, t in parts
            ],
            note=note,
            label=counted(result),
        )
    ]


def _occurring_reasons(totals: TokenTotals) -> list[MissReason]:
    """Return the reasons that occur; first those that are nobody's loss."""
    return [reason for reason in _REASONS if totals.misses.get(reason.value)]


def losses(result: ReplayResult) -> list[Section]:
    """Return why tokens were computed, and which facts of an identity differed."""
    totals = result.tokens
    if not totals.computed:
        return []
    sections = [
        Section(
            title="Why tokens were computed",
            columns=("reason", "tokens", "% of the prompt", "meaning"),
            rows=[
                (
                    reason_name(reason),
                    totals.misses[reason.value],
                    per_cent(totals.misses[reason.value] / totals.prompt),
                    _REASONS[reason][1],
                )
                for reason in sorted(
                    _occurring_reasons(totals),
                    key=lambda reason: -totals.misses[reason.value],
                )
            ],
            label=counted(result),
        )
    ]
    by_fields: dict[tuple[str, ...], int] = {}
    for request in result.requests:
        if lost := request.misses.get(MissReason.IDENTITY_DIFFERS.value, 0):
            fields = request.differing_fields
            by_fields[fields] = by_fields.get(fields, 0) + lost
    if by_fields:
        ordered = sorted(by_fields.items(), key=lambda item: (-item[1], item[0]))
        sections.append(
            Section(
                title="What differed in the identity",
                columns=("fields", "tokens computed because of it"),
                rows=[
                    (", ".join(fields) or "unknown", n) for fields, n in ordered[:12]
                ],
                label=counted(result),
            )
        )
    return sections


def eviction(result: ReplayResult) -> list[Section]:
    """Return which policy decided what stays, on whose word, and what came of it."""
    if not result.tokens.prompt:
        return []
    config, saved = result.config, result.saved
    told: list[tuple[str, Cell]] = [
        ("policy", config.get("eviction")),
        ("what it saves", config.get("objective")),
        ("hints", config.get("hints")),
        ("waiting requests it looks at", config.get("lookahead")),
        ("quotas", config.get("quotas")),
    ]
    rows: list[Sequence[Cell]] = [
        *((what, value) for what, value in told if value is not None),
        ("evicted", memory(result.evicted_bytes)),
        ("evicted and asked for again", count(result.regret_tokens, "token")),
        ("not retained after its last use, as said", memory(result.refused_bytes)),
        ("retained", f"{number(saved.retained_gib_s)} GiB·s"),
        ("prefill saved", seconds(saved.seconds)),
        ("saved seconds per retained GiB·s", number(saved.seconds_per_gib_s)),
    ]
    return [
        Section(
            title="What eviction did",
            columns=("what", "value"),
            rows=rows,
            label=f"counts {counted(result)}, seconds {result.cost_kind.value}",
        )
    ]


def writers(result: ReplayResult) -> list[Chart]:
    """Return who reused whose tokens; nothing for a single tenant."""
    flows: dict[tuple[str, str], int] = {}
    for flow in result.writers:
        key = (flow.writer, flow.reader)
        flows[key] = flows.get(key, 0) + flow.tokens
    names = {who for key, moved in flows.items() if moved for who in key}
    if len(names) < 2:
        return []
    weights = dict.fromkeys(sorted(names), 0)
    for (writer, reader), moved in flows.items():
        for who in (writer, reader):
            if who in weights:
                weights[who] += moved
    shown = sorted(sorted(weights), key=lambda who: -weights[who])[:_MAX_TENANTS]
    others = len(weights) - len(shown)
    across = sum(n for (writer, reader), n in flows.items() if writer != reader)
    total = sum(flows.values())
    note = (
        f"{percent(across / total)} of the reused tokens were first put into the cache "
        f"by another tenant."
    )
    if others:
        note += f" The {count(others, 'smallest tenant')} are not shown."
    cells = [(w, r, flows.get((w, r), 0)) for w in shown for r in shown]
    return [
        heat_map(
            title="Who reuses whose tokens",
            names=shown,
            values=[[flows.get((w, r), 0) for r in shown] for w in shown],
            x_title="reader",
            y_title="writer",
            columns=("writer", "reader", "tokens"),
            rows=[(name(w), name(r), moved) for w, r, moved in cells if moved],
            note=note,
            label=counted(result),
        )
    ]


def prefixes(result: ReplayResult) -> list[Chart]:
    """Return the prefixes worth most per byte and second kept."""
    shown = result.prefixes[:_MAX_PREFIXES]
    if not shown:
        return []
    left = len(result.prefixes) - len(shown)
    has_text = any(prefix.text is not None for prefix in shown)
    idle = [prefix for prefix in shown if not prefix.retained_gib_s]
    note = "Seconds of prefill saved for each GiB-second that the prefix was kept idle."
    if idle:
        note += f" {count(len(idle), 'prefix was', plural='prefixes were')} never idle."
    if left:
        note += f" {left:,} more in the JSON."
    columns = ["domain", "tokens", "hits", "hit tokens", "saved s", "retained GiB·s"]
    columns += ["saved s per GiB·s", "evicted blocks", "digest"]
    if has_text:
        columns.append("text")
    return [
        bar_chart(
            title="Prefixes worth most per byte",
            names=[_prefix_name(prefix) for prefix in shown],
            bands=[
                Band(
                    name="saved s per retained GiB·s",
                    values=[prefix.seconds_per_gib_s for prefix in shown],
                    color="var(--reused)",
                )
            ],
            x=Axis(title="seconds saved per retained GiB·s"),
            columns=columns,
            rows=[_prefix_row(prefix, has_text=has_text) for prefix in shown],
            note=note,
            label=result.cost_kind.value,
        )
    ]


def _prefix_name(prefix: PrefixValue) -> str:
    owner = short(prefix.domain.removeprefix("private:"), 12)
    return f"{owner} {tokens(prefix.start)}–{tokens(prefix.end)}"


def _prefix_row(prefix: PrefixValue, *, has_text: bool) -> list[Cell]:
    row: list[Cell] = [
        name(prefix.domain),
        f"{prefix.start:,} to {prefix.end:,}",
        prefix.num_hits,
        prefix.hit_tokens,
        prefix.saved_s,
        prefix.retained_gib_s,
        prefix.seconds_per_gib_s,
        prefix.num_evicted_blocks,
        prefix.digest[:12],
    ]
    return [*row, prefix.text] if has_text else row


def tenant_table(result: ReplayResult) -> list[Section]:
    """Return what reuse saved and what keeping KV took, by tenant."""
    if not result.tenants:
        return []
    shown, others = _largest_tenants(result)
    rows: list[Sequence[Cell]] = [_tenant_row(tenant) for tenant in shown]
    if others:
        rows.append(_sum_row(_OTHERS, others))
    if len(result.tenants) > 1:
        rows.append(_sum_row(_EVERY_TENANT, result.tenants))
    return [
        Section(
            title="What reuse saved",
            columns=(
                "tenant",
                "requests",
                "hit rate %",
                "saved s",
                "retained GiB·s",
                "active GiB·s",
                "saved s per retained GiB·s",
                "evicted blocks",
                "regret tokens",
                "stalls",
                "stalled s",
            ),
            rows=rows,
            note=(
                "Retained: kept for reuse, in use by nobody. Regret: tokens that were "
                "evicted and asked for again."
            ),
            label=f"tokens {counted(result)}, seconds {result.cost_kind.value}",
        )
    ]


def _tenant_row(tenant: TenantResult) -> list[Cell]:
    saved = tenant.saved
    return [
        name(tenant.tenant),
        tenant.num_requests,
        per_cent(tenant.tokens.hit_rate),
        saved.seconds,
        saved.retained_gib_s,
        saved.active_gib_s,
        saved.seconds_per_gib_s,
        tenant.num_evicted_blocks,
        tenant.regret_tokens,
        tenant.num_stalls,
        tenant.stall_s,
    ]


def _sum_row(title: str, tenants: Sequence[TenantResult]) -> list[Cell]:
    prompt = sum(tenant.tokens.prompt for tenant in tenants)
    saved = SavedWork(
        seconds=math.fsum(tenant.saved.seconds for tenant in tenants),
        joules=0.0,
        flops=0.0,
        retained_gib_s=math.fsum(tenant.saved.retained_gib_s for tenant in tenants),
        active_gib_s=math.fsum(tenant.saved.active_gib_s for tenant in tenants),
    )
    return [
        title,
        sum(tenant.num_requests for tenant in tenants),
        per_cent(sum(t.tokens.reused for t in tenants) / prompt) if prompt else NO_DATA,
        saved.seconds,
        saved.retained_gib_s,
        saved.active_gib_s,
        saved.seconds_per_gib_s,
        sum(tenant.num_evicted_blocks for tenant in tenants),
        sum(tenant.regret_tokens for tenant in tenants),
        sum(tenant.num_stalls for tenant in tenants),
        math.fsum(tenant.stall_s for tenant in tenants),
    ]


def _largest_tenants(
    result: ReplayResult,
) -> tuple[list[TenantResult], list[TenantResult]]:
    """Return the tenants with most prompt tokens, and those for which there is no room."""
    ordered = sorted(result.tenants, key=lambda t: (-t.tokens.prompt, t.tenant))
    return ordered[:_MAX_TENANTS], ordered[_MAX_TENANTS:]
