"""Options that are made of fields: named, typed and explained as their fields are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from stemkv.cli import replay as module
from stemkv.cli.knobs import KNOBS, Knob
from stemkv.cli.replay import ReplayOptions
from stemkv.core.core import CoreConfig
from stemkv.sim.presets import LARGE
from tests.cli.test_sweep import stemkv


def field_of(core: CoreConfig, knob: Knob) -> Any:
    part = getattr(core, knob.part)
    return None if part is None else getattr(part, knob.field)


def typed(knob: Knob) -> tuple[list[str], Any]:
    """Words that change a knob, and what it should be then."""
    value = field_of(LARGE, knob)
    option, _, negated = knob.option.partition("/")
    match value:
        case bool():
            return [negated if value else option], not value
        case Mapping():
            return [option, "a=2,b=0.5"], {"a": 2.0, "b": 0.5}
        case str():
            return [option, "seconds"], "seconds"
        case None:
            return [option, "0.5"], 0.5 / knob.per
    return [option, str(value + 1)], value + 1


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ReplayOptions]:
    """What replays were asked for; none is run."""
    found: list[ReplayOptions] = []
    monkeypatch.setattr(module, "run_replay", lambda options: found.append(options))
    return found


def test_without_options_the_core_is_that_of_the_preset(
    asked: list[ReplayOptions],
) -> None:
    assert stemkv("replay", "--demo").exit_code == 0

    assert asked[0].config.core == LARGE


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.field)
def test_an_option_changes_its_field_and_no_other(
    asked: list[ReplayOptions], knob: Knob
) -> None:
    words, value = typed(knob)

    result = stemkv("replay", "--demo", *words)

    assert result.exit_code == 0, result.stderr
    core = asked[0].config.core
    assert field_of(core, knob) == value
    for other in KNOBS:
        if other != knob:
            assert field_of(core, other) == field_of(LARGE, other)


def test_help_says_what_the_field_says() -> None:
    text = " ".join(stemkv("replay", "--help").stdout.split())

    for knob in KNOBS:
        part = getattr(LARGE, knob.part)
        kinds = {f.name: f for f in fields(part)} if part is not None else {}
        if knob.field in kinds:
            words = kinds[knob.field].metadata["help"].split()
            assert " ".join(words[:3]) in text, knob.field


@pytest.mark.parametrize("command", ["replay", "sweep"])
def test_a_bad_value_is_named_by_its_option(command: str) -> None:
    result = stemkv(command, "--workload", "worked-example", "--lane", "0")

    assert result.exit_code == 2
    assert "stemkv: ConfigError: --lane must be an integer of at least 1" in (
        result.stderr
    )


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.field)
def test_what_needs_the_clock_is_refused_without_it(knob: Knob) -> None:
    words, _ = typed(knob)

    result = stemkv("replay", "--demo", "--no-clock", *words, "--blocks", "0")

    assert (f"{words[0].replace('--no-', '--')} needs the clock" in result.stderr) == (
        knob.needs_clock
    )
    assert result.exit_code == 2
