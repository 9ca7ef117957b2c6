"""The audit of identity: does KV reach only requests that it is right for.

Owns the order of the attack. Two revisions of a model, two adapters, two tenants and
two start positions make sixteen contexts; each writes a prompt, each looks for it, under
the real path and under keys seen in the field. What a wrong hit would do is computed
with the model; what a real engine does, on a real engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stemkv.audit.identity import keys
from stemkv.audit.identity.attack import (
    Arena,
    attack_key,
    attack_ours,
    num_foreign_hits,
)
from stemkv.audit.identity.checks import make_checks, make_headline
from stemkv.audit.identity.contexts import CONTEXTS, make_prompts, separating_fields
from stemkv.audit.identity.evidence import Evidence, gather_evidence
from stemkv.audit.identity.findings import Findings, KeyFinding
from stemkv.audit.identity.keys import FIELD_KEYS, FieldKey, KeyContext
from stemkv.audit.identity.scenarios import make_scenarios
from stemkv.audit.identity.tables import make_data, make_tables
from stemkv.audit.identity.trial import KeyFault, find_key_function, try_elsewhere
from stemkv.audit.verdict import AuditReport
from stemkv.engine.load import LoadedModel
from stemkv.errors import ConfigError

__all__ = ["IdentityOptions", "audit_identity", "judge_evidence"]

_HASH_SEEDS = (1, 2)  # of the other processes
_BUILTIN_HASH = f"{keys.__name__}:{keys.builtin_hash.__name__}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityOptions:
    """What is attacked, and with what.

    `key` is "module:function" of a key function of the user's; the verdict is about it
    then. It takes a `stemkv.audit.identity.keys.KeyContext` and returns something hashable, as

        def prefix_key(context):
            return context.tokens, context.weights_digest, context.tenant

    It is called for every whole-block prefix, must depend on nothing but its argument,
    and give equal keys in every process. Its module is found from the current directory
    and `sys.path`, and its code is run.
    """

    revision: Path | None = None  # another revision of the model; None: made up
    adapters: tuple[Path, ...] = ()  # two folders in PEFT's format; none: made up
    key: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.adapters) not in (0, 2):
            raise ConfigError(
                f"adapters must be two folders or none, got {len(self.adapters)}"
            )


def audit_identity(
    loaded: LoadedModel, options: IdentityOptions, progress: Callable[[str], None]
) -> AuditReport:
    """Attack the identity and report; takes about a minute on the embedded model.

    Takes ownership of `loaded.model`: an engine packs its linears and replaces its
    weights. They have their values again when this returns. Raises `ConfigError` for a
    key function, revision or adapters that cannot be used, and what loading raises.
    """
    # Before a minute of work, not after.
    if options.key is not None:
        find_key_function(options.key)
    evidence = gather_evidence(
        loaded,
        make_prompts(loaded, seed=options.seed),
        revision=options.revision,
        adapters=options.adapters,
        seed=options.seed,
        progress=progress,
    )
    return judge_evidence(evidence, loaded, options, progress)


def judge_evidence(
    evidence: Evidence,
    loaded: LoadedModel,
    options: IdentityOptions,
    progress: Callable[[str], None],
) -> AuditReport:
    """Attack keys and the real path with evidence of the same model and options.

    Computes nothing with the model, so several keys can be judged by one evidence.
    """
    arena = _arena(loaded, evidence, seed=options.seed)
    users = None
    if options.key is not None:
        progress(f"attacking {options.key}")
        function = find_key_function(options.key)
        own = FieldKey(name=options.key, function=function, source="yours")
        users = _try(own, arena, asked_elsewhere=options.key)
    found = []
    for index, key in enumerate(FIELD_KEYS):
        progress(f"attacking key {index + 1} of {len(FIELD_KEYS)}: {key.name}")
        found.append(
            _try(key, arena, asked_elsewhere=_BUILTIN_HASH if key.is_unstable else None)
        )
    progress("attacking the real path")
    num_foreign, num_own = num_foreign_hits(arena)
    findings = Findings(
        evidence=evidence,
        arena=arena,
        ours=attack_ours(arena),
        num_foreign_hits=num_foreign,
        num_own_hits=num_own,
        field_separates=separating_fields(evidence.world.bases[1], arena.prompts[-1]),
        keys=tuple(found),
        users=users,
    )
    return AuditReport(
        name="identity",
        headline=make_headline(findings),
        checks=make_checks(findings),
        tables=make_tables(findings, loaded.tokenizer),
        method=_method(loaded, options, evidence),
        data=make_data(findings, seed=options.seed),
    )


def _arena(loaded: LoadedModel, evidence: Evidence, *, seed: int) -> Arena:
    world = evidence.world
    return Arena.of(
        {p.name: tuple(world.case(c, p) for c in CONTEXTS) for p in evidence.prompts},
        make_scenarios(
            world,
            evidence.scenario_prompts,
            loaded=loaded,
            numerics=evidence.numerics,
            is_packed=evidence.is_packed,
        ),
        vocab_size=loaded.vocab_size,
        seed=seed,
    )


def _try(key: FieldKey, arena: Arena, *, asked_elsewhere: str | None) -> KeyFinding:
    outcome = attack_key(key.function, arena)
    elsewhere: bool | KeyFault | None = None
    if asked_elsewhere is not None and not isinstance(outcome, KeyFault):
        contexts: list[KeyContext] = []
        for case in arena.cases[arena.prompts[0].name]:
            contexts.extend(case.prefixes())
        elsewhere = _is_same_elsewhere(key, asked_elsewhere, contexts)
    return KeyFinding(key=key, outcome=outcome, elsewhere=elsewhere)


def _is_same_elsewhere(
    key: FieldKey, name: str, contexts: list[KeyContext]
) -> bool | KeyFault:
    for hash_seed in _HASH_SEEDS:
        answer = try_elsewhere(name, key.function, contexts, seed=hash_seed)
        if answer is not True:
            return answer
    return True


def _method(
    loaded: LoadedModel, options: IdentityOptions, evidence: Evidence
) -> dict[str, str]:
    given = ", ".join(path.name for path in options.adapters)
    return {
        "model": f"{loaded.name}, {str(loaded.dtype).removeprefix('torch.')}, "
        f"numerics class {evidence.numerics.name}",
        "second revision": evidence.revision,
        "adapters": f"given: {given}" if given else "synthetic: rank 8, seeded",
        "contexts": "2 revisions × 2 adapters × 2 tenants × 2 start positions",
        "prompts": " and ".join(
            f"{len(prompt.tokens)} tokens in blocks of {prompt.block_size}"
            for prompt in evidence.prompts
        ),
        "keys": "modelled on public reports; they are not the projects' code",
        "hit": "a whole-block prefix of the reader has a key of the writer's; for ours, "
        "the real cache finds at least one token",
        "seed": str(options.seed),
    }
