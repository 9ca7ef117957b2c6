"""`stemkv value` says what the numbers say, whatever they are."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest

from stemkv.cli.conclusion import headline, paragraphs
from stemkv.cli.value import page_of
from stemkv.measure.flood import FloodedTenant, FloodResult
from stemkv.measure.results import GIB, LatencySummary, Source
from stemkv.measure.value import (
    BreakEven,
    KeptPrefix,
    LoadPoint,
    MemoryPoint,
    Mix,
    ValueResult,
    ValueRun,
)
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.pricing import roofline
from stemkv.sim.value import ValueConfig, study_value
from tests.cli.traces import command, stemkv


@cache
def studied(
    *,
    share: float = 0.4,
    memory_gib: float = 6.0,
    num_requests: int = 20,
    num_tenants: int = 3,
    rates: tuple[float, ...] = (0.5, 3.0),
) -> ValueResult:
    config = ValueConfig(
        share=share,
        memory_bytes=int(memory_gib * GIB),
        num_requests=num_requests,
        num_tenants=num_tenants,
        rates=rates,
    )
    costs = roofline(model_named("llama-3.1-8b"), device_named("h100"))
    return study_value(config, costs)


def said(result: ValueResult, flood: FloodResult | None = None) -> str:
    text = "\n".join([headline(result), *paragraphs(result, flood)])
    return text.replace("\N{NO-BREAK SPACE}", " ")


def with_shared(result: ValueResult, **changes: float | None) -> ValueResult:
    """Return the result with other numbers in every shared run."""

    def changed(point: LoadPoint) -> LoadPoint:
        return dataclasses.replace(
            point, shared=dataclasses.replace(point.shared, **changes)
        )

    return dataclasses.replace(
        result,
        capacity=changed(result.capacity),
        loads=tuple(map(changed, result.loads)),
        memories=tuple(
            dataclasses.replace(
                point, shared=dataclasses.replace(point.shared, **changes)
            )
            for point in result.memories
        ),
    )


def with_break_even(result: ValueResult, **changes: float | None) -> ValueResult:
    return dataclasses.replace(
        result,
        memories=tuple(
            dataclasses.replace(
                point, break_even=dataclasses.replace(point.break_even, **changes)
            )
            for point in result.memories
        ),
    )


# Sentences


def test_the_case_as_it_is_asked() -> None:
    text = said(studied())

    assert "Keeping 12,000 tokens (1.46 GiB) that 40.0 % of requests begin with" in text
    assert "instead of" in text
    assert "the same 1.46 GiB would hold 12,000 tokens" in text
    assert "with a copy per request they would have held" in text
    assert "Break-even: at 6 GiB from" in text
    assert "so it is worth keeping" in text
    assert "are exact" in text
    assert "is estimated" in text


def test_without_a_sharing_request_there_is_nothing_to_save() -> None:
    text = said(studied(share=0.0))

    assert "saves nothing: no request begins with them" in text
    assert "one-off requests" in text
    for word in ("Break-even", "isolat", "worth", "a minute"):
        assert word not in text


def test_with_sharing_requests_only_there_are_no_one_offs() -> None:
    text = said(studied(share=1.0))

    assert "100.0 % of requests begin with" in text
    assert "one-off requests" not in text


@pytest.mark.parametrize("share, number", [(0.05, "1"), (0.01, "none")])
def test_too_few_sharing_requests_are_inconclusive(share: float, number: str) -> None:
    text = said(studied(share=share, num_requests=20))

    assert f"Inconclusive: of 20 requests {number} begins with the prefix" in text
    assert "worth keeping" not in text


def test_a_prefix_that_nobody_finds_saves_nothing() -> None:
    text = said(with_shared(studied(), saved_s=0.0, saved_joules=0.0))

    assert "saves nothing at 3 requests/s" in text
    assert "none found them" in text
    assert "of the saving" not in text


def test_a_capacity_that_does_not_grow_is_not_said_to_grow() -> None:
    off = studied().capacity.off

    same = said(with_shared(studied(), end_s=off.end_s * 1.001))
    less = said(with_shared(studied(), end_s=off.end_s * 2))

    assert "at most stays at" in same
    assert "then serve only" in less


def test_longer_waits_with_the_prefix_kept_are_named() -> None:
    worst = max(point.off.stall_s for point in studied().memories)
    text = said(
        with_shared(
            studied(),
            num_stalls=9,
            stall_s=worst + 1,
            stall_active_gib=2.0,
            stall_cached_gib=0.25,
        )
    )

    assert "With the prefix kept admissions waited longer at 6 GiB" in text
    assert "256 MiB idle" in text or "0.25 GiB idle" in text


def test_shorter_waits_are_not_called_longer() -> None:
    text = said(with_shared(studied(), num_stalls=0, stall_s=0.0))

    assert "With the prefix kept no admission waited for memory" in text
    assert "longer" not in text


def test_nobody_waiting_is_said_so() -> None:
    text = said(studied(memory_gib=60.0, num_requests=12, rates=(0.2,)))

    assert "at 60 GiB" in text
    assert "did not wait longer" not in text


def test_regret_is_told_only_where_there_was_some() -> None:
    without = said(with_shared(studied(), regret_tokens=0))
    everywhere = said(with_shared(studied(), regret_tokens=4_321))

    assert "Nothing was evicted and asked for again at 6 GiB and 3 GiB" in without
    assert "At 3 GiB 4,321 tokens were evicted and asked for again" in everywhere
    assert "none were" not in everywhere


def test_one_tenant_has_nobody_to_be_isolated_from() -> None:
    assert "There is one tenant" in said(studied(num_tenants=1))
    assert "There is one tenant" not in said(studied(num_tenants=2))


@pytest.mark.parametrize(
    "displaced, words",
    [
        (4.0, "not missed by others, so any reuse pays"),
        (3.9, "so it is worth keeping"),
        (0.1, "worth no memory of its own: leave it to eviction"),
        (None, "no share would do for memory of its own"),
    ],
)
def test_the_verdict_follows_the_break_even_share(
    displaced: float | None, words: str
) -> None:
    changes = {"one_off_rate": 4.0, "displaced_rate": displaced, "prefill_s": 0.4}
    if displaced is None:
        changes["prefill_s"] = 0.1

    assert words in said(with_break_even(studied(), **changes))


def test_a_verdict_can_differ_between_sizes() -> None:
    result = studied()
    first, last = result.memories
    hard = dataclasses.replace(
        last, break_even=dataclasses.replace(last.break_even, displaced_rate=None)
    )
    text = said(dataclasses.replace(result, memories=(first, hard)))

    assert "worth keeping at 6 GiB, and worth no memory of its own at 3 GiB" in text


def flood(
    *, alone: int = 1_000, flooded: int = 600, kept: int | None = 990, gib: float = 8.0
) -> FloodResult:
    """Return what two tenants kept, of whom one loses more than these numbers say."""
    loser = FloodedTenant(
        tenant="loser",
        working_set_gib=2.0,
        alone_tokens=alone,
        flooded_tokens=flooded,
        kept_tokens=kept,
    )
    other = dataclasses.replace(
        loser, tenant="other", kept_tokens=None if kept is None else alone
    )
    return FloodResult(
        eviction="lru", gib=gib, rate=0.5, flood_rate=2.0, tenants=(loser, other)
    )


@pytest.mark.parametrize(
    "numbers, words",
    [
        ({}, "they reuse 60.0 % of the tokens that they reuse alone; with floors that"),
        ({}, "their working sets, 4 GiB in all, the one that loses most keeps 99.0 %."),
        ({"kept": None}, "4 GiB in all, are more than this memory can promise."),
        ({"flooded": 1_000}, "they reuse no fewer tokens than alone."),
    ],
)
def test_what_a_flood_leaves_follows_from_the_numbers(
    numbers: dict[str, int | None], words: str
) -> None:
    text = said(studied(), flood(**numbers))  # type: ignore[arg-type]

    assert (
        "sends 2 one-off requests/s beside 0.5 of the 2 tenants, within 8 GiB" in text
    )
    assert words in text


def test_where_nobody_reuses_alone_a_flood_takes_nothing_and_nothing_is_said() -> None:
    nothing = flood(alone=0, flooded=0, kept=0)

    assert "one more tenant" not in said(studied(), nothing)
    assert "floods" not in page_of(studied(), nothing).render()
    assert "A tenant that floods" in page_of(studied(), flood()).render()


# Any numbers whatever

T = TypeVar("T")


class Numbers:
    """Made-up numbers with many that are nothing, everything or equal."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def count(self, *, most: int, least: int = 0) -> int:
        return self._rng.choice([least, most, self._rng.randint(least, most)])

    def number(self, *, most: float, least: float = 0.0) -> float:
        return self._rng.choice(
            [least, most, self._rng.uniform(least, most), (least + most) / 2]
        )

    def maybe(self, value: T) -> T | None:
        return self._rng.choice([value, value, None])

    def summary(self) -> LatencySummary | None:
        value = self.number(most=100)
        return self.maybe(
            LatencySummary(
                name="TTFT",
                count=1,
                mean=value,
                p50=value,
                p90=value,
                p95=value,
                p99=value,
                max=value,
            )
        )

    def run(self, reuse: str, gib: float) -> ValueRun:
        num_stalls = self.count(most=3)
        return ValueRun(
            reuse=reuse,
            gib=gib,
            num_finished=self.count(least=1, most=500),
            num_refused=0,
            end_s=self.number(least=1e-3, most=1e4),
            hit_rate=self.number(most=1),
            saved_s=self.number(most=1e4),
            saved_joules=self.number(most=1e6),
            ttft=self.summary(),
            tpot=self.summary(),
            goodput_rps=self.maybe(self.number(most=9)),
            goodput_share=self.maybe(self.number(most=1)),
            mean_running=self.number(most=99),
            mean_active_gib=self.number(most=2 * gib),
            peak_active_gib=self.number(most=gib),
            mean_copies_gib=self.number(most=9 * gib),
            peak_copies_gib=self.number(most=9 * gib),
            published_gib=self.number(most=9 * gib),
            num_evicted_blocks=self.maybe(self.count(most=99)),
            regret_tokens=self.maybe(self.count(most=99)),
            num_preemptions=0,
            num_stalls=num_stalls,
            stall_s=self.number(most=99) if num_stalls else 0.0,
            stall_active_gib=self.number(most=gib) if num_stalls else math.nan,
            stall_cached_gib=self.number(most=gib) if num_stalls else math.nan,
            idle_gib_s=self.maybe(self.number(most=99)),
            used_gib_s=self.maybe(self.number(most=99)),
        )

    def load(self, rate: float, gib: float) -> LoadPoint:
        return LoadPoint(
            rate=rate,
            load=rate / 2,
            off=self.run("off", gib),
            isolated=self.run("isolated", gib),
            shared=self.run("shared", gib),
        )

    def memory(self, gib: float, prefix: KeptPrefix) -> MemoryPoint:
        rate = self.number(least=0.1, most=9)
        point = self.load(1.0, gib)
        return MemoryPoint(
            gib=gib,
            off=point.off,
            isolated=point.isolated,
            shared=point.shared,
            break_even=BreakEven(
                gib=gib,
                one_off_rate=rate,
                displaced_rate=self.maybe(self.number(most=1.1 * rate)),
                prefix_gib=prefix.gib,
                prefill_s=prefix.prefill_s,
            ),
        )

    def result(self) -> ValueResult:
        num_requests = self.count(least=1, most=500)
        num_sharing = self.count(most=num_requests)
        prefix = KeptPrefix(
            num_tokens=1_600,
            num_bytes=2**28,
            prefill_s=self.number(least=0.01, most=9),
            prefill_joules=3.0,
        )
        gib = self.number(least=0.3, most=99)
        rates = (1.0, 2.0, 9.0)[: self.count(least=1, most=3)]
        num_memories = self.count(least=1, most=3)
        return ValueResult(
            config={
                "share": self.number(most=1) if num_sharing else 0.0,
                "slo_ttft_s": 1.0,
                "slo_tpot_s": 0.1,
            },
            cost_source="made up",
            mix_source=Source.EXACT,
            time_source=Source.ESTIMATED,
            num_tenants=self.count(least=1, most=3),
            prefix=prefix,
            mix=Mix(
                num_requests=num_requests,
                num_sharing=num_sharing,
                one_off_tokens=math.nan if num_sharing == num_requests else 100.0,
                own_tokens=100.0 if num_sharing else math.nan,
                mean_tokens=500.0,
                mean_own_tokens=100.0,
            ),
            capacity=self.load(math.inf, gib),
            loads=tuple(self.load(rate, gib) for rate in rates),
            memories=tuple(
                self.memory(gib / 2**halvings, prefix)
                for halvings in range(num_memories)
            ),
        )

    def flood(self) -> FloodResult:
        kept = self.maybe(True)
        return FloodResult(
            eviction="lru",
            gib=self.number(least=0.3, most=99),
            rate=self.number(least=0.01, most=9),
            flood_rate=self.number(least=0.01, most=99),
            tenants=tuple(
                FloodedTenant(
                    tenant=name,
                    working_set_gib=self.number(most=9),
                    alone_tokens=self.count(most=9_999),
                    flooded_tokens=self.count(most=9_999),
                    kept_tokens=self.count(most=9_999) if kept else None,
                )
                for name in "abc"[: self.count(least=1, most=3)]
            ),
        )


HOLES = re.compile(r"\b(nan|None|no data|inf)\b|  |\.\.|∞|: [;.]|, [;,.]|\(\)")


@pytest.mark.parametrize("start", range(0, 2_000, 500))
def test_whatever_the_numbers_the_sentences_have_no_holes(start: int) -> None:
    for seed in range(start, start + 500):
        numbers = Numbers(seed)
        page = page_of(numbers.result(), numbers.flood())

        for text in [page.headline, *page.paragraphs]:
            assert text.endswith("."), (seed, text)
            assert text[0].isupper(), (seed, text)
            assert not HOLES.search(text), (seed, text)


@pytest.mark.parametrize("start", range(0, 2_000, 500))
def test_a_conclusion_never_contradicts_its_numbers(start: int) -> None:
    seen = set()
    for seed in range(start, start + 500):
        result = Numbers(seed).result()
        text = said(result)
        capacity, points, share = result.capacity, result.memories, result.mix.share
        claims = {
            "waited longer": any(p.shared.stall_s > p.off.stall_s for p in points),
            "did not wait longer": not any(
                p.shared.stall_s > p.off.stall_s * 1.01 for p in points
            ),
            "No admission waited": not any(
                run.num_stalls for p in points for run in (p.off, p.shared)
            ),
            "so it is worth keeping.": all(share >= p.break_even.share for p in points),
            "leave it to eviction": share < points[0].break_even.share,
            " then serve up to ": (
                capacity.shared.requests_per_s > capacity.off.requests_per_s
            ),
            " then serve only ": (
                capacity.shared.requests_per_s < capacity.off.requests_per_s
            ),
            "Nothing was evicted and asked for again": not any(
                p.shared.regret_tokens for p in points
            ),
            "no request begins with them": result.mix.num_sharing == 0,
            "Inconclusive": result.mix.num_sharing < 2,
        }
        for words, is_true in claims.items():
            if words in text:
                seen.add(words)
                assert is_true, (seed, words, text)

    assert len(seen) == 10, "each of them is said of some numbers"


# The command


QUICK = ("value", "--requests=8", "--memory=3GiB", "--rate=1", "--rate=4")


def test_json_is_alone_on_standard_output_and_the_same_every_time(
    tmp_path: Path,
) -> None:
    page = tmp_path / "value.html"

    first = stemkv(*QUICK, "--json=-", f"--html={page}")
    second = subprocess.run(
        command(*QUICK, "--json=-"), capture_output=True, text=True, timeout=240
    )

    assert first.exit_code == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert first.stdout == second.stdout
    document = json.loads(first.stdout)
    assert document["schema"] == "stemkv.value/1"
    assert document["prefix"]["num_tokens"] == 12_000
    assert [point["rate"] for point in document["loads"]] == [1.0, 4.0]
    assert document["flood"]["eviction"] == "reuse_index"
    assert "Break-even" in first.stderr
    assert "Break-even" in page.read_text(encoding="utf-8")


def test_tables_and_sentences_are_on_standard_output_progress_is_not() -> None:
    done = stemkv(*QUICK)

    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("Keeping 12,000 tokens")
    for title in (
        "The prefix",
        "as active KV (exact)",
        "Light load to overload, 3 GiB (estimated)",
        "One chain or a copy per request",
        "Less and less memory",
        "Break-even share of requests",
    ):
        assert title in done.stdout.replace("\N{NO-BREAK SPACE}", " ")
    assert "replays" not in done.stdout
    assert "replays" in done.stderr


@pytest.mark.parametrize(
    "arguments, code, sentence",
    [
        (["--memory=1GiB"], 2, "give more memory or a shorter prefix"),
        (["--prefix-tokens=100000000"], 2, "can have 100,000,700"),
        (["--prefix-tokens=3"], 2, "at least one block of 16 tokens"),
        (["--share=1.5"], 2, "share must be from 0 to 1"),
        (["--memory=much"], 2, "memory must be a number and a unit"),
        (["--model=gpt-9"], 2, "gpt-9"),
        (["--rate=0"], 2, "rate must be above 0"),
        (["--html=/no/such/folder/x.html"], 2, "cannot be written"),
        (["--share=0.1"], 3, "Inconclusive: of 8 requests 1 begins"),
        (["--share=0"], 0, "saves nothing: no request begins with them"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes(arguments: list[str], code: int, sentence: str) -> None:
    done = stemkv(*QUICK, *arguments)

    assert done.exit_code == code, done.stderr
    assert sentence in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_may_leave_early() -> None:
    done = subprocess.run(
        f"set -o pipefail; {shlex.join(command(*QUICK))} | head -1",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        timeout=240,
    )

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


DOCUMENT = Path(__file__).parents[2] / "docs" / "worked-example.md"


@pytest.mark.slow
def test_the_document_shows_what_the_command_prints() -> None:
    done = subprocess.run(
        command("value"),
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "COLUMNS": "100"},
    )
    printed = plain(done.stdout)
    blocks = re.findall(
        r"^```text\n(.*?)^```$", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S
    )

    assert done.returncode == 0, done.stderr
    assert len(blocks) == 8
    for block in blocks:
        assert plain(block) in printed, f"{block}\nis not in\n{printed}"
    # All of it but the last line, which names the costs.
    num_shown = sum(len(block.splitlines()) for block in blocks)
    assert num_shown == len(printed.splitlines()) - 1


def plain(text: str) -> str:
    """Return text without what no editor shows."""
    lines = text.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
