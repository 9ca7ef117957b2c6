"""What the numbers of a value study come to, in sentences.

Owns the wording, and which sentence is true of which numbers. Every sentence is chosen
by the data; none is there whatever they are.
"""

from __future__ import annotations

import math

from stemkv.measure.flood import FloodResult
from stemkv.measure.results import GIB
from stemkv.measure.value import (
    BreakEven,
    MemoryPoint,
    ValueResult,
    ValueRun,
)
from stemkv.report.wording import count, memory, number, percent, seconds

__all__ = ["headline", "paragraphs"]

_SAME = 0.01  # relative; less is no difference between two replays
_MOST = 0.9  # of requests within the limits: "nine in ten"
_WORDS = {"off": "with reuse off", "isolated": "within tenants", "shared": "shared"}


def headline(result: ValueResult) -> str:
    """Return the one sentence that answers the question."""
    prefix, mix, pivot = result.prefix, result.mix, result.pivot()
    kept = f"{prefix.num_tokens:,} tokens ({memory(prefix.num_bytes)})"
    if not result.is_conclusive:
        return (
            f"Inconclusive: of {count(mix.num_requests, 'request')} "
            f"{mix.num_sharing or 'none'} begins with the prefix, and reuse takes two; "
            f"replay more requests."
        )
    if not mix.num_sharing:
        return f"Keeping {kept} saves nothing: no request begins with them."
    run = pivot.shared
    if not run.saved_s:
        return (
            f"Keeping {kept} saves nothing at {_rate(pivot.rate)}: "
            f"{percent(mix.share)} of requests begin with them, and none found them."
        )
    text = (
        f"Keeping {kept} that {percent(mix.share)} of requests begin with saves "
        f"{seconds(run.saved_s_per_min)} of prefill ({_joules(run)}) a minute at "
        f"{_rate(pivot.rate)}"
    )
    off, shared = (
        each.requests_per_s for each in (result.capacity.off, result.capacity.shared)
    )
    size = memory(result.capacity.off.gib * GIB)
    if shared > off * (1 + _SAME):
        return (
            f"{text}, and {size} then serve up to {_rate(shared)} instead of "
            f"{number(off)}."
        )
    if shared < off * (1 - _SAME):
        return f"{text}, yet {size} then serve only {_rate(shared)}, not {number(off)}."
    return f"{text}; what {size} serve at most stays at {_rate(off)}."


def paragraphs(result: ValueResult, flood: FloodResult | None = None) -> list[str]:
    """Return what else is true, one idea each."""
    texts = [_instead(result)]
    if result.mix.num_sharing and result.is_conclusive:
        texts += [
            _saved(result),
            _copies(result.pivot().shared, result.pivot().rate),
            _served(result),
            _isolation(result),
            _stalls(result.memories),
            _churn(result.memories),
            _break_even(result),
            "" if flood is None else _flood(flood),
        ]
    return [*filter(None, texts), _how(result)]


def _instead(result: ValueResult) -> str:
    holds = []
    if result.mix.num_sharing < result.mix.num_requests:
        holds.append(f"{number(result.active_one_offs)} one-off requests")
    if result.mix.num_sharing:
        holds.append(
            f"{number(result.active_requests)} requests of this mix with a copy of "
            f"their own, or {number(result.active_reusing_requests)} that find the "
            f"prefix elsewhere"
        )
    return (
        f"As active KV the same {memory(result.prefix.num_bytes)} would hold "
        f"{result.prefix.num_tokens:,} tokens: {'; '.join(holds)} (exact, at mean "
        f"lengths)."
    )


def _saved(result: ValueResult) -> str:
    light, heavy = result.loads[0], result.loads[-1]
    if light is heavy or not heavy.shared.saved_s:
        return ""
    text = (
        f"It saves {_per_minute(light.shared)} at {_rate(light.rate)} and "
        f"{_per_minute(heavy.shared)} at {_rate(heavy.rate)}"
    )
    if heavy.shared.saved_s_per_min > 60:
        more = heavy.shared.saved_s_per_min / 60
        text += f", the whole time of {number(more)} more such devices"
    seldom, often = light.shared.used_share, heavy.shared.used_share
    if seldom is not None and often is not None and seldom < often:
        text += (
            f". Somebody was using it for {percent(seldom)} of the time that it was "
            f"kept at the lower rate and for {percent(often)} at the higher: only the "
            f"rest is what keeping takes"
        )
    return f"{text}."


def _copies(run: ValueRun, rate: float) -> str:
    text = (
        f"At {_rate(rate)} {number(run.mean_running)} requests ran at a time and held "
        f"{memory(run.mean_active_gib * GIB)}, at most "
        f"{memory(run.peak_active_gib * GIB)}"
    )
    if run.peak_copies_gib <= run.peak_active_gib * (1 + _SAME):
        return f"{text}; a copy per request would have taken as much."
    return (
        f"{text}; with a copy per request they would have held "
        f"{memory(run.mean_copies_gib * GIB)}, at most "
        f"{memory(run.peak_copies_gib * GIB)}, of {memory(run.gib * GIB)}."
    )


def _served(result: ValueResult) -> str:
    """Say up to which of the rates each way of reuse keeps the limits."""
    parts = []
    for index, words in enumerate(_WORDS.values()):
        served = [
            point.rate
            for point in result.loads
            if (point.runs()[index].goodput_share or 0.0) >= _MOST
        ]
        parts.append(
            f"{words} up to {_rate(max(served))}"
            if served
            else f"{words} at no rate tried"
        )
    ttft, tpot = (result.config[name] for name in ("slo_ttft_s", "slo_tpot_s"))
    text = (
        f"Nine in ten requests or more keep TTFT within {ttft:g} s and TPOT "
        f"within {tpot:g} s {_joined(parts)}"
    )
    off, shared = result.pivot().off.ttft, result.pivot().shared.ttft
    if off is not None and shared is not None:
        text += (
            f"; at {_rate(result.pivot().rate)} TTFT p95 is {seconds(off.p95)} with "
            f"reuse off and {seconds(shared.p95)} shared"
        )
    return f"{text}."


def _isolation(result: ValueResult) -> str:
    if result.num_tenants == 1:
        return "There is one tenant, so isolation takes nothing away."
    isolated, shared = result.pivot().isolated, result.pivot().shared
    tightest = result.memories[-1]
    copies = memory(result.num_tenants * result.prefix.num_bytes)
    text = f"Within {result.num_tenants} tenants there are up to {copies} of copies: "
    if not shared.saved_s:
        return ""
    text += (
        f"{percent(isolated.saved_s / shared.saved_s)} of the saving is left at "
        f"{_rate(result.pivot().rate)}"
    )
    less = tightest.isolated, tightest.shared
    if len(result.memories) > 1 and less[1].saved_s:
        text += (
            f", and {percent(less[0].saved_s / less[1].saved_s)} through "
            f"{memory(tightest.gib * GIB)}"
        )
    return f"{text}."


def _stalls(points: tuple[MemoryPoint, ...]) -> str:
    """Say whether keeping made admissions wait, and what held the memory."""
    worse = [p for p in points if p.shared.stall_s > p.off.stall_s * (1 + _SAME)]
    stalled = [p for p in points if p.shared.num_stalls]
    if not stalled:
        if not any(p.off.num_stalls for p in points):
            return "No admission waited for memory, with or without the prefix kept."
        most = max(points, key=lambda p: p.off.stall_s)
        return (
            f"With the prefix kept no admission waited for memory; with reuse off they "
            f"waited {seconds(most.off.stall_s)} in all at {memory(most.gib * GIB)}."
        )
    if worse:
        sizes = _joined([memory(p.gib * GIB) for p in worse])
        text = f"With the prefix kept admissions waited longer at {sizes}: "
    else:
        text = "Admissions did not wait longer for the prefix being kept: "
    point = (worse or stalled)[-1]
    run = point.shared
    text += (
        f"at {memory(point.gib * GIB)} they waited {seconds(run.stall_s)} in all, "
        f"{seconds(point.off.stall_s)} with reuse off. When they had to, "
        f"{memory(run.stall_active_gib * GIB)} were in use"
    )
    return (
        f"{text} and {memory(run.stall_cached_gib * GIB)} idle, which can be evicted at "
        f"once and was still not enough."
    )


def _churn(points: tuple[MemoryPoint, ...]) -> str:
    hurt = [p for p in points if p.shared.regret_tokens]
    if not hurt:
        sizes = _joined([memory(p.gib * GIB) for p in points])
        return f"Nothing was evicted and asked for again at {sizes}."
    point = hurt[-1]
    tokens = point.shared.regret_tokens or 0
    text = (
        f"At {memory(point.gib * GIB)} {tokens:,} tokens were evicted and asked for "
        f"again, and the hit rate was {percent(point.shared.hit_rate)}"
    )
    if len(hurt) < len(points):
        largest = next(p for p in points if not p.shared.regret_tokens)
        text += (
            f"; at {memory(largest.gib * GIB)} none were, and it was "
            f"{percent(largest.shared.hit_rate)}"
        )
    return f"{text}."


def _break_even(result: ValueResult) -> str:
    mine, tightest = result.memories[0], result.memories[-1]
    text = f"Break-even: {_share_needed(mine.break_even)}"
    if tightest is not mine:
        text += f"; {_share_needed(tightest.break_even)}"
    run = result.pivot().shared
    text += ". That is if it is never evicted. The core keeps it in idle memory only"
    if 0 < run.retention_s < math.inf:
        text += (
            f", where a block that was used once lives {seconds(run.retention_s)}: long "
            f"enough for the next request from a share of "
            f"{percent(run.retention_share)} on"
        )
    return f"{text}. {_verdict(result)}"


def _share_needed(found: BreakEven) -> str:
    size = memory(found.gib * GIB)
    if not found.lost_share:
        return f"at {size} the memory is not missed by others, so any reuse pays"
    if found.share > 1:
        return f"at {size} no share would do for memory of its own"
    return (
        f"at {size} from {percent(found.share)} of requests on, at the latest, it saves "
        f"more than its memory carries as active KV "
        f"({percent(found.lost_share)} of the one-off rate)"
    )


def _flood(flood: FloodResult) -> str:
    """Say what one tenant's one-off requests leave of the others' reuse."""
    if not flood.is_conclusive:
        return ""
    others = count(len(flood.tenants), "tenant")
    left = flood.flooded_share
    text = (
        f"Where one more tenant sends {number(flood.flood_rate)} one-off requests/s "
        f"beside {number(flood.rate)} of the {others}, within {memory(flood.gib * GIB)}"
    )
    if left >= 1:
        return f"{text}, they reuse no fewer tokens than alone."
    text += f", they reuse {percent(left)} of the tokens that they reuse alone"
    needs = f"their working sets, {memory(flood.floors_gib * GIB)} in all"
    least = flood.least_kept_share
    if least is None:
        return f"{text}; floors for {needs}, are more than this memory can promise."
    return (
        f"{text}; with floors that cover {needs}, the one that loses most keeps "
        f"{percent(least)}."
    )


def _how(result: ValueResult) -> str:
    return (
        f"Tokens and bytes of the prefix and of the mix are {result.mix_source.value}; "
        f"what depends on when things happen is {result.time_source.value}, with the "
        f"costs of {result.cost_source}."
    )


def _verdict(result: ValueResult) -> str:
    mine = result.memories[0].break_even
    hardest = max((p.break_even for p in result.memories), key=lambda each: each.share)
    share = result.mix.share
    has = f"This mix has {percent(share)}"
    if not result.pivot().shared.saved_s:
        return f"{has}, but as nobody found it, it was not worth keeping."
    if share >= hardest.share:
        return f"{has}, so it is worth keeping."
    if share >= mine.share:
        return (
            f"{has}, so it is worth keeping at {memory(mine.gib * GIB)}, and worth no "
            f"memory of its own at {memory(hardest.gib * GIB)}."
        )
    return f"{has}, so it is worth no memory of its own: leave it to eviction."


def _per_minute(run: ValueRun) -> str:
    return f"{seconds(run.saved_s_per_min)} ({_joules(run)}) a minute"


def _joules(run: ValueRun) -> str:
    return f"{number(run.saved_joules_per_min / 1000)} kJ"


def _rate(rate: float) -> str:
    return f"{number(rate)} requests/s"


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) < 2 else f"{', '.join(parts[:-1])} and {parts[-1]}"
