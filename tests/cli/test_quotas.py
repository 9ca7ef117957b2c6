"""`--quotas FILE`: what an operator writes, and what is said of what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stemkv.cli.quotas import read_quotas
from stemkv.core.retention.memory import MemoryQuota
from stemkv.errors import ConfigError
from stemkv.measure.results import GIB
from stemkv.sim.quotas import TenantQuotas
from tests.cli.traces import QUICK, small_trace, stemkv


def written(folder: Path, document: Any) -> Path:
    path = folder / "quotas.json"
    is_text = isinstance(document, str)
    path.write_text(document if is_text else json.dumps(document))
    return path


def test_a_file_says_who_may_keep_how_much(tmp_path: Path) -> None:
    document = {
        "tenants": {
            "acme": {"floor": "2GiB", "cap": "8GiB", "weight": 2},
            "two words": {"floor": "512MiB"},
            "guest": {"cap": 0},
        },
        "default": {"cap": "4GiB"},
        "public": "1GiB",
    }

    assert read_quotas(written(tmp_path, document)) == TenantQuotas(
        tenants={
            "acme": MemoryQuota(floor_bytes=2 * GIB, cap_bytes=8 * GIB, weight=2.0),
            "two words": MemoryQuota(floor_bytes=GIB // 2),
            "guest": MemoryQuota(cap_bytes=0),
        },
        default=MemoryQuota(cap_bytes=4 * GIB),
        public_bytes=GIB,
    )
    assert read_quotas(written(tmp_path, {})) == TenantQuotas()


@pytest.mark.parametrize(
    "document, sentence",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
        ([], "the file must be an object, got an array"),
        ({"tenant": {}}, "tenant is not a setting; did you mean tenants?"),
        ({"tenants": []}, "tenants must be an object, got an array"),
        ({"tenants": {"": {}}}, "a tenant must have a name"),
        ({"tenants": {"a": 3}}, "tenants.a must be an object, got an integer"),
        (
            {"tenants": {"a b": {"flor": 0}}},
            'tenants."a b".flor is not a setting; did you mean floor?',
        ),
        (
            {"tenants": {"a": {"floor": "many"}}},
            "tenants.a.floor: memory must be a number and a unit",
        ),
        ({"tenants": {"a": {"cap": 7}}}, 'tenants.a.cap must be text such as "2GiB"'),
        ({"tenants": {"a": {"cap": True}}}, "cap must be text such as"),
        (
            {"tenants": {"a": {"floor": "2GiB", "cap": "1GiB"}}},
            "tenants.a.cap_bytes must not be below floor_bytes",
        ),
        (
            {"tenants": {"a": {"weight": "2"}}},
            "weight must be a number, got te",
        ),
        ({"tenants": {"a": {"weight": -1}}}, "tenants.a.weight must be a number above"),
        ({"tenants": {"a": {"weight": 10**400}}}, "weight must be a number that is"),
        ({"default": {"floor": "1GiB"}}, "default must have no floor"),
        ({"public": None}, 'public must be text such as "2GiB", or 0, got null'),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 99 else "",
)
def test_what_is_wrong_is_named_by_file_and_field(
    document: Any, sentence: str, tmp_path: Path
) -> None:
    path = written(tmp_path, document)

    with pytest.raises(ConfigError) as caught:
        read_quotas(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert sentence in str(caught.value)


def replayed(*arguments: str | Path) -> dict[str, Any]:
    result = stemkv("replay", *arguments, "--no-curves", "--json", "-")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_quotas_are_in_the_document_and_at_work(tmp_path: Path) -> None:
    path = written(tmp_path, {"default": {"cap": "512MiB"}})

    capped, free = replayed(*QUICK, "--quotas", path), replayed(*QUICK)

    assert capped["config"]["quotas"] == "others: cap 0.5 GiB"
    assert capped["tokens"]["reused"] < free["tokens"]["reused"]
    assert max(sample["cached"] for sample in capped["memory"]) <= 2 * 256


def test_a_tenant_who_sends_nothing_is_noted(tmp_path: Path) -> None:
    path = written(tmp_path, {"tenants": {"acme": {"floor": "1GiB"}, "amce": {}}})

    result = stemkv(
        *("replay", small_trace(tmp_path), "--memory", "8GiB"), "--quotas", path
    )

    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "has quotas of amce, who send nothing here" in text


@pytest.mark.parametrize(
    "document, arguments, sentence",
    [
        (
            {"tenants": {"a": {"floor": "3GiB"}}, "public": "1GiB"},
            [],
            "quotas.json: floors of 3 GiB and public of 1 GiB leave nothing of 4 GiB",
        ),
        ({}, ["--sharing", "shared"], "under --sharing shared all tenants have one"),
        (
            {"public": "1MiB"},
            ["--sharing", "public"],
            "quotas.json: public is 0.000977 GiB, but what the rule declares public "
            "takes 1.46 GiB",
        ),
        ({}, ["--no-clock"], "--quotas needs the clock; drop --no-clock"),
    ],
)
def test_what_cannot_be_promised_is_refused_before_anything_runs(
    document: Any, arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    path = written(tmp_path, document)

    result = stemkv("replay", *QUICK, *arguments, "--quotas", path)

    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_a_report_is_not_written_over_the_quotas(tmp_path: Path) -> None:
    path = written(tmp_path, {})

    result = stemkv("replay", *QUICK, "--quotas", path, "--html", path)

    assert result.exit_code == 2
    assert "which is read" in " ".join(result.stderr.split())
    assert path.read_text() == "{}"
