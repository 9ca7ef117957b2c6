"""Is reused KV what a fresh prefill gives? Tried in every state that can be reached.

Owns the verdicts: what must be equal or close, which states must have been reached,
and the controls without which a zero means nothing. The engine under attack is the one
that serves; only `naive` drives tensors by hand.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import torch

from stemkv.audit.adapters import make_up_adapter
from stemkv.audit.exact.bits import Tally
from stemkv.audit.exact.branches import Branching, branch_out
from stemkv.audit.exact.hits import STATES, Lab, State
from stemkv.audit.exact.naive import Reuse, reuse_by_hand
from stemkv.audit.exact.prompts import Chat, chats
from stemkv.audit.exact.tables import (
    Found,
    branch_data,
    branch_tables,
    num_changed,
    proof,
    reuse_data,
    reuse_table,
    state_data,
    state_table,
    total,
)
from stemkv.audit.exact.witness import Cold, EngineMaker, compare
from stemkv.audit.verdict import AuditReport, Check, Verdict
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.config import CacheConfig
from stemkv.engine import Engine, EngineConfig, LoadedModel
from stemkv.engine.numerics import EXACT, TOLERANT, numerics_named
from stemkv.engine.recheck import tolerance
from stemkv.errors import (
    ConfigError,
    InvariantError,
    NumericsError,
    StemKVError,
)

__all__ = ["LOGITS_TOLERANCE", "ExactOptions", "audit_exact"]

# Largest `logits_difference` in class `tolerant`. Measured in bfloat16: at most 0.043
# between two ways to compute the same prefix (docs/audit.md).
LOGITS_TOLERANCE = 0.1

_MAX_PROMPT_BLOCKS = 9  # of any state's prompts
_NUM_GREEDY = 16  # tokens per prompt whose choice is compared
_NUM_ADAPTERS = 2

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactOptions:
    """What is attacked, and how much of it."""

    numerics: str = "exact"
    num_prompts: int = 50
    seed: int = 0
    block_size: int = 16  # tokens
    num_blocks: int | None = None  # of each engine; None: as few as its state needs
    adapters: tuple[Path, ...] = ()  # folders; none: made up

    def __post_init__(self) -> None:
        numerics_named(self.numerics)
        if self.num_prompts < 1:
            raise ConfigError(f"num_prompts must be at least 1, got {self.num_prompts}")
        if self.block_size < 4:
            raise ConfigError(
                f"block_size must be at least 4, so that hits can end inside a block, "
                f"got {self.block_size}"
            )


def audit_exact(
    loaded: LoadedModel,
    options: ExactOptions,
    progress: Progress,
    *,
    make_engine: EngineMaker = Engine,
) -> AuditReport:
    """Compare KV and logits of every kind of hit with cold runs; count what differs.

    Replaces the linears of `loaded.model`, as an engine does. Raises `NumericsError`
    if the build does not keep the class that is asked for: then there is no engine to
    attack. `make_engine` is called for every engine under attack, so that a broken one
    can be shown to be found.
    """
    start = monotonic()
    prompts = chats(loaded, options.num_prompts, options.seed)
    needed = max(
        _MAX_PROMPT_BLOCKS * options.block_size,
        *(chat.num_tokens + 2 * _NUM_GREEDY for chat in prompts),
    )
    if loaded.context_length < needed:
        raise ConfigError(
            f"the audit needs a context of {needed} tokens, {loaded.name} has "
            f"{loaded.context_length}; use another model or a smaller block_size"
        )
    with tempfile.TemporaryDirectory(prefix="stemkv-audit-") as folder:
        progress("self-test of the engine")
        lab = _lab(loaded, options, make_engine)
        adapters = _place_adapters(lab, options, Path(folder))
        lab = replace(lab, adapters=adapters.paths)
        found = _try_states(lab, adapters, progress)
        progress("branches of one prefix")
        branching = _branch(lab)
        progress("controls")
        control = _control(lab, options)
    by_hand = _by_hand(loaded, prompts, options, progress)
    kv_bound = tolerance(loaded.dtype)
    judge = _Judge(options, kv_bound)
    checks = (
        *(judge.state(each) for each in found),
        *judge.branches(branching),
        *judge.by_hand(by_hand),
        control,
    )
    return AuditReport(
        name="exact",
        headline=_headline(options, found, by_hand, checks),
        checks=checks,
        tables=(
            state_table(found),
            reuse_table(by_hand, num_greedy=_NUM_GREEDY),
            *branch_tables(branching),
        ),
        method=_method(loaded, options, adapters.words, seconds=monotonic() - start),
        data={
            "bounds": {"kv": kv_bound, "logits": LOGITS_TOLERANCE},
            "options": _option_data(options),
            "states": state_data(found),
            "branches": branch_data(branching),
            "reuse": reuse_data(by_hand),
        },
    )


# Running


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adapters:
    """The adapters of an audit."""

    paths: dict[str, Path]  # by name
    words: str  # what they are
    problem: str = ""  # why there are none, if there should be


def _lab(loaded: LoadedModel, options: ExactOptions, make_engine: EngineMaker) -> Lab:
    config = EngineConfig(
        numerics=options.numerics,
        core=CoreConfig(cache=CacheConfig(block_size=options.block_size)),
        num_threads=torch.get_num_threads(),
        runs_self_test=False,
        single_tenant=True,  # about bits, not about whose they are
    )
    # The only engine with a self-test: where it refuses to start, nothing is served.
    cold = Cold(
        loaded,
        replace(config, runs_self_test=True),
        max_tokens=_MAX_PROMPT_BLOCKS * options.block_size,
    )
    return Lab(
        loaded=loaded,
        config=config,
        cold=cold,
        make_engine=make_engine,
        num_blocks=options.num_blocks,
        first_passage=random.Random(f"passages/{options.seed}").randrange(75),
    )


def _place_adapters(lab: Lab, options: ExactOptions, folder: Path) -> _Adapters:
    """Load the adapters into the engine of the cold runs; make them up if need be."""
    engine = lab.cold.engine
    given = {f"adapter-{i}": path for i, path in enumerate(options.adapters)}
    for name, path in given.items():
        engine.load_adapter(name, path)
    if given:
        return _Adapters(paths=given, words=f"{len(given)} given")
    made_up = {f"adapter-{i}": folder / f"{i}" for i in range(_NUM_ADAPTERS)}
    for seed, (name, path) in enumerate(made_up.items(), options.seed):
        if not make_up_adapter(lab.loaded, path, seed=seed):
            return _Adapters(paths={}, words="none: the model has no linear for one")
        try:
            engine.load_adapter(name, path)
        except NumericsError as error:
            return _Adapters(paths={}, words="refused", problem=str(error))
    return _Adapters(paths=made_up, words=f"{len(made_up)} made up, over all linears")


def _try_states(lab: Lab, adapters: _Adapters, progress: Progress) -> list[Found]:
    found = []
    for state in STATES:
        progress(f"state: {state.name}")
        if not state.needs_adapters or adapters.paths:
            found.append(_try_state(lab, state))
        elif adapters.problem:
            # Where no adapter can be served at all there is nothing to claim.
            found.append(
                Found(
                    state=state.name,
                    verdict=Verdict.INCONCLUSIVE,
                    reached=None,
                    tally=Tally(),
                    problem=adapters.problem,
                )
            )
    return found


def _try_state(lab: Lab, state: State) -> Found:
    tally = Tally()
    try:
        reached = state.reach(lab)
        for seen in reached.seen:
            tally.add(compare(seen, lab.cold))
    except StemKVError as error:
        is_ours = isinstance(error, InvariantError)
        return Found(
            state=state.name,
            verdict=Verdict.BROKEN if is_ours else Verdict.INCONCLUSIVE,
            reached=None,
            tally=tally,
            problem=f"{type(error).__name__}: {error}",
        )
    verdict = _verdict(lab.config.numerics, tally, tolerance(lab.loaded.dtype))
    if verdict is Verdict.HOLDS and min(reached.proofs.values()) < 1:
        verdict = Verdict.INCONCLUSIVE
    return Found(state=state.name, verdict=verdict, reached=reached, tally=tally)


def _verdict(numerics: str, tally: Tally, kv_bound: float) -> Verdict:
    """Judge a comparison; one of nothing proves nothing."""
    if tally.num_values == 0:
        return Verdict.INCONCLUSIVE
    if numerics == EXACT.name:
        return Verdict.BROKEN if tally.num_differing else Verdict.HOLDS
    # `not <=`: NaN is no small difference.
    is_close = tally.worst_kv <= kv_bound and tally.worst_logits <= LOGITS_TOLERANCE
    return Verdict.HOLDS if is_close else Verdict.BROKEN


def _branch(lab: Lab) -> Branching | str:
    try:
        return branch_out(lab)
    except StemKVError as error:
        return f"{type(error).__name__}: {error}"


def _control(lab: Lab, options: ExactOptions) -> Check:
    """Damage a cached block between writer and reader: the comparison must see it."""
    claim = "Damage in a cached block is found"
    try:
        return _damage(lab, options, claim)
    except StemKVError as error:
        return Check(
            claim=claim,
            verdict=Verdict.INCONCLUSIVE,
            evidence=f"could not be tried: {type(error).__name__}: {error}",
            is_control=True,
        )


def _damage(lab: Lab, options: ExactOptions, claim: str) -> Check:
    witness = lab.witness(num_blocks=16)
    ask = lab.ask(0, 5 * lab.block + 1)
    writer = witness.serve(ask)
    kv = witness.engine.kv
    damaged = writer.block_ids[1]
    if options.numerics == EXACT.name:
        what = "one bit of one value in a cached block was flipped"
        word = {2: torch.int16, 4: torch.int32}[lab.loaded.dtype.itemsize]
        kv.values[-1][damaged].view(word)[3, 0, 1] ^= 1
    else:
        what = "one slot of a cached block got the KV of its neighbour"
        for memory in (*kv.keys, *kv.values):
            memory[damaged, 3] = memory[damaged, 4]
    reader = witness.serve(ask)
    tally = compare(reader, lab.cold)
    is_seen = (
        _verdict(options.numerics, tally, tolerance(lab.loaded.dtype)) is Verdict.BROKEN
    )
    verdict = Verdict.HOLDS if is_seen else Verdict.BROKEN
    if not reader.counts.reused:
        verdict = Verdict.INCONCLUSIVE
    return Check(
        claim=claim,
        verdict=verdict,
        evidence=(
            f"{what}; the reader reused {reader.counts.reused} tokens and "
            f"{tally.num_differing:,} of {tally.num_values:,} values differ (worst "
            f"relative difference of KV {tally.worst_kv:.3g})"
        ),
        is_control=True,
    )


def _by_hand(
    loaded: LoadedModel,
    prompts: Sequence[Chat],
    options: ExactOptions,
    progress: Progress,
) -> dict[str, list[Reuse]]:
    """Return reuse without the padding rules and, in class `exact`, with them."""
    naive = reuse_by_hand(
        loaded,
        prompts,
        TOLERANT,
        num_tokens=_NUM_GREEDY,
        seed=options.seed,
        progress=progress,
    )
    if options.numerics != EXACT.name:
        return {TOLERANT.name: naive}
    ours = reuse_by_hand(
        loaded,
        prompts,
        EXACT,
        num_tokens=_NUM_GREEDY,
        answers=[result.answer for result in naive],
        seed=options.seed,
        progress=progress,
    )
    return {TOLERANT.name: naive, EXACT.name: ours}


# Judging


class _Judge:
    """Turns what was found into checks."""

    def __init__(self, options: ExactOptions, kv_bound: float) -> None:
        self._kv_bound = kv_bound
        self._numerics = options.numerics
        self._is_exact = options.numerics == EXACT.name
        self._wanted = (
            "the bits of a cold run"
            if self._is_exact
            else f"a cold run's values within {self._kv_bound:g}"
        )

    def state(self, found: Found) -> Check:
        claim = f"KV and logits are {self._wanted}: {found.state}"
        if found.reached is None:
            evidence = f"could not be tried: {found.problem}"
        else:
            evidence = f"{self._numbers(found.tally)}; {proof(found.reached)}"
        return Check(claim=claim, verdict=found.verdict, evidence=evidence)

    def branches(self, branching: Branching | str) -> list[Check]:
        claim = "No branch writes to a shared block"
        if isinstance(branching, str):
            verdict = Verdict.INCONCLUSIVE
            if branching.startswith(InvariantError.__name__):
                verdict = Verdict.BROKEN
            evidence = f"could not be tried: {branching}"
            return [Check(claim=claim, verdict=verdict, evidence=evidence)]
        is_clean = not (
            branching.changed_blocks
            or branching.num_blocks_owned_twice
            or branching.num_prompt_values_changed
        )
        is_tried = branching.num_copies > 1 and all(
            branch.shared_blocks for branch in branching.branches
        )
        if not is_clean:
            verdict = Verdict.BROKEN
        else:
            verdict = Verdict.HOLDS if is_tried else Verdict.INCONCLUSIVE
        control = branching.seen_after_altering == {branching.altered}
        return [
            Check(
                claim=claim,
                verdict=verdict,
                evidence=(
                    f"{len(branching.before)} shared blocks, "
                    f"{len(branching.changed_blocks)} with another checksum after "
                    f"{len(branching.branches)} branches; "
                    f"{branching.num_blocks_owned_twice} blocks owned by two branches; "
                    f"{branching.num_copies} copies on write"
                ),
            ),
            Check(
                claim=f"KV and logits of every branch are {self._wanted}",
                verdict=_verdict(self._numerics, branching.tally, self._kv_bound),
                evidence=self._numbers(branching.tally),
            ),
            Check(
                claim="A write to a shared block is found",
                verdict=Verdict.HOLDS if control else Verdict.BROKEN,
                evidence=(
                    f"one value of block {branching.altered} was overwritten; "
                    f"checksums changed in blocks "
                    f"{sorted(branching.seen_after_altering)}"
                ),
                is_control=True,
            ),
        ]

    def by_hand(self, by_hand: dict[str, list[Reuse]]) -> list[Check]:
        results = by_hand[self._numerics]
        tally = total(results)
        num_prompts = num_changed(results)
        checks = [
            Check(
                claim=(
                    f"Reuse in {len(results)} realistic prompts gives {self._wanted}"
                ),
                verdict=_verdict(self._numerics, tally, self._kv_bound),
                evidence=(
                    f"{self._numbers(tally)}; a greedy token changes in {num_prompts} "
                    f"of {len(results)} prompts, {tally.num_changed_tokens} of "
                    f"{tally.num_rows:,} tokens"
                ),
            )
        ]
        if self._is_exact:
            naive = total(by_hand[TOLERANT.name])
            checks.append(
                Check(
                    claim="Without the padding rules, the same comparison finds bits",
                    verdict=(
                        Verdict.HOLDS if naive.num_differing else Verdict.INCONCLUSIVE
                    ),
                    evidence=(
                        f"{naive.num_differing:,} of {naive.num_values:,} values "
                        f"differ, worst relative difference of KV {naive.worst_kv:.3g}"
                    ),
                    is_control=True,
                )
            )
        return checks

    def _numbers(self, tally: Tally) -> str:
        text = f"{tally.num_differing:,} of {tally.num_values:,} values differ"
        if self._is_exact and not tally.num_differing:
            return text
        return (
            f"{text}, worst relative difference {tally.worst_kv:.3g} of KV (bound "
            f"{self._kv_bound:g}) and {tally.worst_logits:.3g} of logits (bound "
            f"{LOGITS_TOLERANCE:g})"
        )


# Reporting


def _headline(
    options: ExactOptions,
    found: Sequence[Found],
    by_hand: dict[str, list[Reuse]],
    checks: Sequence[Check],
) -> str:
    num_good = sum(each.verdict is Verdict.HOLDS for each in found)
    naive = by_hand[TOLERANT.name]
    states = f"{num_good} of {len(found)} states"
    changed = f"{num_changed(naive)} of {len(naive)} prompts"
    if any(check.verdict is Verdict.BROKEN for check in checks):
        return f"something broke: {states} give what a cold run gives"
    if options.numerics == EXACT.name:
        return (
            f"hits give the bits of a cold run in {states}; without the padding rules "
            f"a greedy token changes in {changed}, with them in "
            f"{num_changed(by_hand[EXACT.name])}"
        )
    return (
        f"hits stay within the bounds in {states}; a greedy token changes in {changed}"
    )


def _method(
    loaded: LoadedModel, options: ExactOptions, adapters: str, *, seconds: float
) -> dict[str, str]:
    prompts = "documentation of Python's standard library"
    if loaded.tokenizer is None:
        prompts += ", its bytes as token ids, as the model has no tokenizer"
    return {
        "model": f"{loaded.name}, {loaded.dtype}, torch {torch.__version__}",
        "numerics": options.numerics,
        "engine": f"blocks of {options.block_size} tokens, pools as small as needed",
        "cold run": "an engine that reuses nothing: one prefill in one chunk, alone",
        "adapters": adapters,
        "prompts": prompts,
        "seed": str(options.seed),
        "time": f"{seconds:.0f} s",
    }


def _option_data(options: ExactOptions) -> dict[str, str | int | None]:
    return {
        "numerics": options.numerics,
        "num_prompts": options.num_prompts,
        "seed": options.seed,
        "block_size": options.block_size,
        "num_blocks": options.num_blocks,
        "num_adapters_given": len(options.adapters),
    }
