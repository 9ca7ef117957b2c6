"""The audit of identity: it holds on a tiny model, and finds what is broken on purpose."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from stemkv.audit.identity.audit import IdentityOptions, audit_identity, judge_evidence
from stemkv.audit.identity.contexts import (
    ADAPTERS,
    CONTEXTS,
    TENANTS,
    make_prompts,
    separating_fields,
)
from stemkv.audit.identity.evidence import Evidence, gather_evidence
from stemkv.audit.identity.keys import FIELD_KEYS
from stemkv.audit.identity.variants import place_adapters
from stemkv.audit.verdict import AuditReport, Check, Verdict
from stemkv.core.prefix import identity as identity_module
from stemkv.core.prefix.identities import Identities
from stemkv.core.prefix.identity import FIELD_TAGS, Domain
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.engine import Engine, LoadedModel
from stemkv.errors import BrokenAdapter, ConfigError
from tests.engine.models import VOCABULARY, build_engine, build_model, tiny

NAME = "llama-group1"
FACTS = {"weights", "adapter", "tenant", "start position"}


def silent(stage: str) -> None:
    assert stage


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny(NAME)


@pytest.fixture(scope="module")
def evidence(loaded: LoadedModel) -> Evidence:
    return gather(loaded)


@pytest.fixture(scope="module")
def report(evidence: Evidence, loaded: LoadedModel) -> AuditReport:
    return judge_evidence(evidence, loaded, IdentityOptions(), silent)


def gather(loaded: LoadedModel, **options: Any) -> Evidence:
    settings: dict[str, Any] = dict(revision=None, adapters=(), seed=0, progress=silent)
    prompts = make_prompts(loaded, seed=0)
    return gather_evidence(loaded, prompts, **settings | options)


def check(report: AuditReport, claim: str) -> Check:
    (found,) = [c for c in report.checks if claim in c.claim]
    return found


def key(report: AuditReport, name: str) -> dict[str, Any]:
    (found,) = [each for each in report.data["keys"] if each["name"] == name]
    return found


# It holds


def test_no_context_shares_what_it_must_not_and_each_finds_its_own(
    report: AuditReport,
) -> None:
    assert [c for c in report.checks if c.verdict is not Verdict.HOLDS] == []
    assert report.verdict is Verdict.HOLDS
    ours = key(report, "StemKV")
    assert (ours["wrong_hits"], ours["missed_hits"]) == (0, 0)
    for rows in ours["hits"].values():
        assert rows == ["0" * i + "1" + "0" * (15 - i) for i in range(16)]


def test_the_contexts_are_all_combinations_and_two_of_them_join_to_one_text() -> None:
    assert len(set(CONTEXTS)) == 16
    assert TENANTS[0] + ADAPTERS[0] == TENANTS[1] + ADAPTERS[1]


def test_the_report_is_json_and_comes_back_equal(report: AuditReport) -> None:
    text = json.dumps(report.as_json(), allow_nan=False)

    assert json.loads(text) == json.loads(json.dumps(report.as_json()))
    assert json.loads(text)["verdict"] == "holds"


def test_one_seed_gives_one_report_and_another_seed_other_numbers(
    report: AuditReport,
) -> None:
    again, other = (
        audit_identity(tiny(NAME), IdentityOptions(seed=seed), silent)
        for seed in (0, 1)
    )

    assert again.as_json() == report.as_json()
    assert other.verdict is Verdict.HOLDS
    assert other.data["pairs"] != report.data["pairs"]


def test_the_model_has_its_weights_back_afterwards(
    evidence: Evidence, loaded: LoadedModel
) -> None:
    # A made-up revision that stayed would be another model's.
    fresh = build_engine(tiny(NAME), block_size=16)
    after = build_engine(loaded, block_size=16)

    assert evidence.world.weights_digests[1] == loaded.weights_digest
    assert after.identity == fresh.identity
    for engine in (fresh, after):
        engine.on_logits = lambda *row: rows.append(row[2].clone())
    rows: list[torch.Tensor] = []
    prompt = make_prompts(loaded, seed=0)[1].tokens
    fresh.generate([prompt])
    after.generate([prompt])
    half = len(rows) // 2
    assert all(map(torch.equal, rows[:half], rows[half:]))


# Keys from the field


@pytest.mark.parametrize("field_key", FIELD_KEYS, ids=lambda each: each.name)
def test_a_key_from_the_field_confuses_what_it_is_said_to(
    report: AuditReport, field_key: Any
) -> None:
    found = key(report, field_key.name)

    if not field_key.collides:  # else chance may confuse more, by the build's name
        assert set(found["confuses"]) == field_key.confuses
    assert set(field_key.fails) <= set(found["wrong_scenarios"])
    assert bool(found["collisions"]) == field_key.collides
    assert (found["same_in_other_processes"] is False) == field_key.is_unstable
    assert (found["missed_hits"], found["missed_scenarios"]) == (0, [])


@pytest.mark.parametrize(
    "name, num_wrong",
    [
        ("token ids only", 2 * 16 * 15),
        ("all but the weights", 2 * 16),
        ("all but the tenant", 2 * 16),
        # Eight contexts join to "team1beta", four each to two other texts.
        ("salt and adapter joined", 2 * (8 * 7 + 8 * 3)),
        ("every fact", 0),
    ],
)
def test_wrong_hits_are_counted_by_hand(
    report: AuditReport, name: str, num_wrong: int
) -> None:
    assert key(report, name)["wrong_hits"] == num_wrong


def test_only_wrong_hits_across_tenants_have_right_tensors(
    report: AuditReport,
) -> None:
    assert key(report, "all but the tenant")["worst_kv_error"] == 0
    assert key(report, "all but the weights")["worst_kv_error"] > 0.01
    assert key(report, "all but the start position")["worst_total_variation"] > 0.1


# What reuse does


def test_every_two_states_were_compared_and_all_differ(evidence: Evidence) -> None:
    apart = {pair: d for pair, d in evidence.pairs.items() if pair[0] != pair[1]}

    assert len(apart) == 2 * 8 * 7
    assert all(damage.kv_error > 0.01 for damage in apart.values())
    assert all(0 < damage.total_variation <= 1 for damage in apart.values())
    assert all(damage.kl > 0 for damage in apart.values())


def test_over_its_own_kv_a_reader_gets_its_own_bits(evidence: Evidence) -> None:
    selves = [d for (w, r), d in evidence.pairs.items() if w == r]

    assert len(selves) == 16
    assert all(damage.is_bit_equal and damage.kv_error == 0 for damage in selves)


def test_scenarios_that_change_kv_are_seen_to(evidence: Evidence) -> None:
    for name in ("adapter at another scale", "only the mask differs"):
        assert evidence.scenarios[name].total_variation > 0.01
    assert evidence.scenarios["other rope parameters"].kv_error > 0.1
    assert evidence.scenarios["salt sent by another tenant"].kv_error == 0


def test_the_engine_was_asked_across_roll_outs_and_reloads(
    evidence: Evidence,
) -> None:
    names = [each.name for each in evidence.rounds]

    assert len(names) == 8
    assert sum(each.num_requests for each in evidence.rounds) == 43
    assert any("revision 2" in name for name in names)
    assert any("half the scale" in name for name in names)


# Sabotage: what is broken on purpose must be found


def judge(evidence: Evidence, loaded: LoadedModel) -> AuditReport:
    return judge_evidence(evidence, loaded, IdentityOptions(), silent)


def forget_field(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leave a field out of the encoding; a new dict, as undoing must keep the order."""
    rest = {field: tag for field, tag in FIELD_TAGS.items() if field != name}
    monkeypatch.setattr(identity_module, "FIELD_TAGS", rest)


def test_an_identity_without_the_adapters_scale_is_found(
    evidence: Evidence, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_field(monkeypatch, "adapter_scale")

    broken = judge(evidence, loaded)

    assert broken.verdict is Verdict.BROKEN
    one_fact = check(broken, "differ in one fact")
    assert one_fact.verdict is Verdict.BROKEN
    assert "adapter at another scale" in one_fact.evidence
    assert "not adapter_scale" in check(broken, "each field of the identity").evidence


@pytest.mark.parametrize("name", sorted(FIELD_TAGS))
def test_an_identity_without_any_one_field_is_found(
    evidence: Evidence,
    loaded: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    forget_field(monkeypatch, name)
    base, prompt = evidence.world.bases[1], evidence.prompts[1]

    separates = separating_fields(base, prompt)

    assert [field for field, does in separates.items() if not does] == [name]


def test_adapters_that_are_told_apart_by_nothing_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = Identities.identity

    def blind(self: Identities, adapter: str | None = None, **where: Any) -> Any:
        return real(self, None, **where)

    monkeypatch.setattr(Identities, "identity", blind)
    broken = audit_identity(tiny(NAME), IdentityOptions(), silent)

    assert check(broken, "no context finds").verdict is Verdict.BROKEN
    assert "adapter" in check(broken, "no context finds").evidence
    assert check(broken, "the engine never reuses").verdict is Verdict.BROKEN
    assert "adapter" in key(broken, "StemKV")["confuses"]
    # What is true of the requests was looked up elsewhere, so the controls still work.
    assert check(broken, "a key of every fact").verdict is Verdict.HOLDS


def test_tenants_that_share_one_domain_are_found(
    evidence: Evidence, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SharingPolicy, "domain", lambda *ignored: Domain.private("everybody")
    )

    broken = judge(evidence, loaded)

    assert "confusing tenant" in check(broken, "no context finds").evidence
    assert "salt sent by another" in check(broken, "differ in one fact").evidence
    assert check(broken, "with all writers in one cache").verdict is Verdict.BROKEN
    assert key(broken, "StemKV")["worst_kv_error"] == 0


def test_weights_that_change_under_one_identity_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Identities, "replace_base", lambda self, base: ())

    broken = audit_identity(tiny(NAME), IdentityOptions(), silent)

    assert check(broken, "the engine never reuses").verdict is Verdict.BROKEN
    assert "weights" in check(broken, "no context finds").evidence


def test_a_cache_that_never_hits_is_not_called_safe(
    evidence: Evidence, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Identities, "namespace", lambda *ignored, **also: None)

    broken = judge(evidence, loaded)

    assert check(broken, "no context finds").verdict is Verdict.HOLDS
    assert check(broken, "every context finds").verdict is Verdict.BROKEN
    assert broken.verdict is Verdict.BROKEN


def test_an_attack_that_does_no_damage_is_inconclusive(
    evidence: Evidence, loaded: LoadedModel
) -> None:
    # As if revisions, adapters and positions computed the same: nothing is shown.
    none = next(d for (w, r), d in evidence.pairs.items() if w == r)
    harmless = replace(evidence, pairs=dict.fromkeys(evidence.pairs, none))

    report = judge(harmless, loaded)

    assert check(report, "wrong in tensors").verdict is Verdict.INCONCLUSIVE
    assert report.verdict is Verdict.INCONCLUSIVE


def test_the_weights_come_back_though_the_attack_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = tiny(NAME)
    real = Engine.update_weights
    updates = []

    def failing(name: str) -> None:
        if name.startswith("4 tokens: revision 2"):
            raise RuntimeError("on purpose")

    def noted(self: Engine, tensors: Any, **options: Any) -> int:
        updates.append(len(tensors))
        return real(self, tensors, **options)

    monkeypatch.setattr(Engine, "update_weights", noted)
    with pytest.raises(RuntimeError, match="on purpose"):
        gather(loaded, progress=failing)

    assert len(updates) == 2
    assert loaded.weights_digest == tiny(NAME).weights_digest


# What users give


def judge_key(
    evidence: Evidence, loaded: LoadedModel, folder: Path, name: str, body: str
) -> AuditReport:
    (folder / f"{name}.py").write_text(dedent(body))
    options = IdentityOptions(key=f"{name}:key")
    return judge_evidence(evidence, loaded, options, silent)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_users_key_of_every_fact_holds(
    evidence: Evidence, loaded: LoadedModel, here: Path
) -> None:
    body = """\
        from dataclasses import astuple

        def key(context):
            return astuple(context)
        """
    report = judge_key(evidence, loaded, here, "keys_good", body)

    assert report.verdict is Verdict.HOLDS
    assert report.headline.startswith("keys_good:key: 0 of 480")
    own = [c for c in report.checks if not c.is_control]
    assert own
    assert all(c.claim.startswith("keys_good:key") for c in own)


def test_a_users_key_without_the_tenant_is_broken_and_ours_is_a_control(
    evidence: Evidence, loaded: LoadedModel, here: Path
) -> None:
    body = """\
        def key(context):
            return (
                context.tokens, context.weights_digest, context.adapter_digest,
                context.start_position,
            )
        """
    report = judge_key(evidence, loaded, here, "keys_blind", body)

    assert report.verdict is Verdict.BROKEN
    broken = check(report, "keys_blind:key: no context finds")
    assert "32 of 480" in broken.evidence
    assert "confusing tenant" in broken.evidence
    assert (
        "adapter at another scale"
        in check(report, "keys_blind:key: requests that differ").evidence
    )
    assert all(
        c.is_control and c.verdict is Verdict.HOLDS
        for c in report.checks
        if "keys_blind" not in c.claim
    )


@pytest.mark.parametrize(
    "name, body, reason",
    [
        ("keys_raising", "def key(c):\n    return c.tokens / 2\n", "TypeError"),
        ("keys_list", "def key(c):\n    return list(c.tokens)\n", "hashed"),
        ("keys_typo", "def key(c):\n    return c.tenants\n", "did you mean tenant"),
        (
            "keys_random",
            "import random\ndef key(c):\n    return random.random()\n",
            "not deterministic",
        ),
    ],
)
def test_a_users_key_that_cannot_be_used_is_a_finding(
    evidence: Evidence,
    loaded: LoadedModel,
    here: Path,
    name: str,
    body: str,
    reason: str,
) -> None:
    report = judge_key(evidence, loaded, here, name, body)

    own = check(report, "is a function of its context alone")
    assert own.verdict is Verdict.BROKEN
    assert reason in own.evidence
    json.dumps(report.as_json(), allow_nan=False)


def test_a_users_key_with_pythons_hash_is_broken_between_processes(
    evidence: Evidence, loaded: LoadedModel, here: Path
) -> None:
    body = """\
        from dataclasses import astuple

        def key(context):
            return hash(astuple(context))
        """
    report = judge_key(evidence, loaded, here, "keys_hash", body)

    assert check(report, "equal keys in every process").verdict is Verdict.BROKEN
    assert check(report, "keys_hash:key: no context").verdict is Verdict.HOLDS


def test_an_unknown_key_is_refused_before_any_work(here: Path) -> None:
    stages: list[str] = []

    with pytest.raises(ConfigError, match="there is no module keys_missing"):
        audit_identity(
            tiny(NAME), IdentityOptions(key="keys_missing:key"), stages.append
        )

    assert stages == []


def save(folder: Path, model: torch.nn.Module) -> Path:
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def test_a_given_revision_is_what_is_rolled_out(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    other = save(tmp_path / "other", build_model(NAME, seed=1))

    evidence = gather(loaded, revision=other)

    assert evidence.revision.startswith("given")
    assert evidence.world.weights_digests[2] == tiny(NAME, seed=1).weights_digest
    assert loaded.weights_digest == tiny(NAME).weights_digest


def test_a_revision_of_another_model_is_refused_by_name(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    other = save(tmp_path / "other", build_model("llama-group3-tied"))
    same = save(tmp_path / "same", build_model(NAME))

    with pytest.raises(ConfigError, match="differs in.*hidden_size"):
        gather(loaded, revision=other)
    with pytest.raises(ConfigError, match="has the very weights"):
        gather(loaded, revision=same)


def test_given_adapters_must_be_two_that_differ(
    loaded: LoadedModel, tmp_path: Path
) -> None:
    place_adapters((), loaded, tmp_path, seed=1)
    one, other = (tmp_path / name for name in ADAPTERS)

    with pytest.raises(ConfigError, match="two folders or none, got 1"):
        IdentityOptions(adapters=(one,))
    with pytest.raises(ConfigError, match="the same"):
        gather(loaded, adapters=(one, one))
    with pytest.raises(BrokenAdapter, match="nowhere"):
        gather(loaded, adapters=(one, tmp_path / "nowhere"))
    evidence = gather(loaded, adapters=(one, other))
    assert all(
        math.isfinite(damage.total_variation) for damage in evidence.pairs.values()
    )
    # Neither was touched, though one is overwritten under the name it is served by.
    assert {path.name for path in one.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
