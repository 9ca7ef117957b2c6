"""What the settings file says of retained memory is understood whole or refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stemkv.cli.memory import MemorySettings
from stemkv.cli.settings import read_settings
from stemkv.core.books.cost import FittedCost
from stemkv.core.core import CoreConfig
from stemkv.core.retention.policies import EvictionConfig
from stemkv.engine import EngineConfig
from stemkv.engine.quotas import MemoryQuota, MemoryQuotas
from stemkv.errors import ConfigError
from stemkv.sim.fit import write_cost

PAGE = (Path(__file__).parents[2] / "docs" / "sharing.md").read_text(encoding="utf-8")
MIB = 1 << 20
COST = FittedCost(
    source="made up",
    bytes_per_token=1,
    step_s=0.02,
    prefill_chunk_s=0.0,
    prefill_token_s=0.003,
    prefill_pair_s=1e-6,
    decode_s=0.002,
    decode_context_s=0.0,
    flops_per_token=1.0,
    flops_per_pair=1.0,
    assumed_watts=1.0,
)


def read(folder: Path, text: str) -> MemorySettings:
    path = folder / "stemkv.toml"
    path.write_text(text, encoding="utf-8")
    return read_settings(path).memory


def test_the_documented_file_says_what_its_comments_say(tmp_path: Path) -> None:
    write_cost(COST, tmp_path / "cost.json")
    blocks = re.findall(r"^```toml\n(.*?)^```$", PAGE, flags=re.M | re.S)
    (text,) = [block for block in blocks if "[eviction]" in block]

    memory = read(tmp_path, text)

    assert memory == MemorySettings(
        core=CoreConfig(
            eviction=EvictionConfig(name="reuse_index", objective="seconds")
        ),
        quotas=MemoryQuotas(
            tenants={
                "dave": MemoryQuota(
                    floor_bytes=256 * MIB, cap_bytes=512 * MIB, weight=2
                )
            },
            groups={"research": MemoryQuota(floor_bytes=128 * MIB)},
            default=MemoryQuota(cap_bytes=128 * MIB),
            public_bytes=32 * MIB,
        ),
        costs=COST,
    )


def test_what_is_left_out_is_the_engine_s_default(tmp_path: Path) -> None:
    memory = read(tmp_path, "")

    assert memory == MemorySettings()
    assert memory.core == EngineConfig().core


def test_an_empty_table_of_quotas_gives_everybody_a_policy_of_its_own(
    tmp_path: Path,
) -> None:
    assert read(tmp_path, "[quotas]\n").quotas == MemoryQuotas()


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[eviction]\nname = 'lru'", "eviction.name is not a setting"),
        ("eviction = 'lru'", "eviction must be a table, got text"),
        ("[eviction]\npolicy = 'mru'", "eviction: eviction must be one of reuse_ind"),
        ("[eviction]\npolicy = 7", "eviction.policy must be text, got an integer"),
        ("[eviction]\nobjective = 'joules'", "eviction: objective must be one of"),
        (
            "[eviction]\nobjective = 'seconds'",
            "eviction.cost_file is missing: .*stemkv calibrate --out",
        ),
        ("[eviction]\nlookahead = 1.5", "eviction.lookahead must be an integer, got"),
        ("[eviction]\nmax_kept_share = true", "max_kept_share must be a number, got a"),
        ("[quotas]\ntenant = {}", "quotas.tenant is not a setting; did you mean tena"),
        ("[quotas.tenants]\na = 7", "quotas.tenants.a must be a table, got an integer"),
        ("[quotas.tenants]\n'a b' = {flor = 1}", 'quotas.tenants."a b".flor is not a'),
        ("[quotas.tenants]\na = {floor = 7}", "tenants.a.floor must be text such as"),
        ("[quotas.tenants]\na = {floor = 'much'}", "tenants.a.floor: memory must be a"),
        ("[quotas.tenants]\na = {weight = 'x'}", "tenants.a.weight must be a number"),
        ("[quotas.tenants]\na = {weight = 0}", "tenants.a.weight must be a number abo"),
        (
            "[quotas.tenants]\na = {floor = '2MiB', cap = '1MiB'}",
            "tenants.a.cap_bytes must not be below floor_bytes, got 1,048,576",
        ),
        ("[quotas]\ndefault = {floor = '1MiB'}", "quotas.default must have no floor"),
        ("[quotas]\npublic = true", "quotas.public must be text such as"),
        ("[quotas.groups]\ncrew = {}", "no group is called 'crew'; known: none"),
    ],
    ids=lambda text: re.sub(r"\W+", "-", text)[:30],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, text: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read(tmp_path, text)

    assert str(caught.value).startswith(f"{tmp_path / 'stemkv.toml'}: ")


def test_a_cost_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text("{}")

    with pytest.raises(ConfigError, match="cost.json: schema: must be"):
        read(tmp_path, "[eviction]\ncost_file = 'cost.json'")
