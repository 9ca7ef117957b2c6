"""Prompts of tokens and vectors: what transformers computes, and who may share it.

The key of a span is made from its vectors, so equal ids over other vectors, equal
vectors over other places, and vectors beside the tokens they equal are told apart (I1,
I2, I20); and a match never ends where too little of a span agrees to tell it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from stemkv.core import FinishReason, TokenIds
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import MIN_SPAN_TOKENS, Span
from stemkv.engine import (
    EmbeddedPrompt,
    Engine,
    InFlight,
    LoadedModel,
    SamplingParams,
    wrap_model,
)
from stemkv.errors import EmptyPrompt, RequestError, TokenOutOfRange
from tests.engine.lora_files import Shelf, peft_logits, row_difference
from tests.engine.models import (
    TINY,
    VOCABULARY,
    build_engine,
    build_model,
    random_ids,
    randomise,
    tiny_once,
    tokens,
)
from tests.engine.serving import assert_idle
from tests.engine.states import (
    BASE,
    STATES,
    TRAINED,
    Asked,
    Outcome,
    Played,
    Revision,
    alone,
    asked,
    play,
    weights,
)

MODEL = "llama-group1"
HIDDEN = 64
DTYPES = (torch.float32, torch.bfloat16)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# See test_adapters: sums in another order, and roundings of bfloat16.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.08}

Parts = list[list[int] | torch.Tensor]


def vectors(num_positions: int, seed: int = 0, width: int = HIDDEN) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.2 * torch.randn(num_positions, width, generator=generator)


def embed(engine: Engine, parts: Parts) -> EmbeddedPrompt:
    return engine.embed(
        [p if isinstance(p, torch.Tensor) else tokens(p) for p in parts]
    )


def engine_of(**settings: Any) -> Played:
    usual: dict[str, Any] = dict(block_size=4, token_budget=64)
    return play(build_engine(tiny_once(MODEL, torch.float32), **usual | settings))


def run(played: Played, name: str, parts: Parts, **how: Any) -> Outcome:
    return played.run(name, asked(embed(played.engine, parts), **how))


def cold(parts: Parts, **how: Any) -> Outcome:
    played = engine_of(reuses_prefixes=False, block_size=2, num_blocks=200)
    return run(played, "cold", parts, **how)


def reference(model: torch.nn.Module, parts: Parts, answer: tuple[int, ...]) -> Any:
    """Transformers' logits for tokens and vectors joined by hand."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    rows = [
        p if isinstance(p, torch.Tensor) else table(torch.tensor(p, dtype=torch.long))
        for p in [*parts, list(answer)]
    ]
    joined = torch.cat([each.to(table.weight.dtype) for each in rows]).detach()
    return peft_logits(model, None, [], embeddings=joined)


def assert_agrees(
    outcome: Outcome, parts: Parts, model: torch.nn.Module, tolerance: float
) -> None:
    logits = reference(model, parts, outcome.completion.token_ids)
    num_tokens = sum(len(part) for part in parts)
    for index, row in enumerate(outcome.rows):
        assert row_difference(row, logits[num_tokens - 1 + index]) < tolerance


# As transformers computes


def layouts(width: int) -> dict[str, Parts]:
    first, second = vectors(12, 1, width), vectors(30, 2, width)
    return {
        "in the middle": [random_ids(10), first, random_ids(7, seed=1)],
        "at the start": [second, random_ids(7)],
        "at the end": [random_ids(10), second],
        "alone": [second],
        "side by side": [random_ids(3), first, second, random_ids(2)],
        "two": [random_ids(3), first, random_ids(5), second, random_ids(2)],
        "as short as can be": [random_ids(4), first[:MIN_SPAN_TOKENS], random_ids(1)],
        "none": [random_ids(4), random_ids(5)],
    }


@EVERY_DTYPE
@pytest.mark.parametrize("model", TINY)
def test_logits_are_those_of_transformers_on_every_model(
    model: str, dtype: torch.dtype
) -> None:
    loaded = tiny_once(model, dtype)
    width = int(loaded.config.hidden_size)
    for name in ("in the middle", "two"):
        parts = layouts(width)[name]
        played = play(build_engine(loaded, block_size=4, token_budget=9))
        outcome = run(played, "r", parts)
        assert_agrees(outcome, parts, build_model(model, dtype), TOLERANCE[dtype])


@pytest.mark.parametrize("name", layouts(HIDDEN))
def test_logits_are_those_of_transformers_wherever_the_span_is(name: str) -> None:
    parts = layouts(HIDDEN)[name]
    played = engine_of()
    outcome = run(played, "r", parts)
    assert_agrees(outcome, parts, build_model(MODEL), TOLERANCE[torch.float32])


@EVERY_DTYPE
@pytest.mark.parametrize("name", layouts(HIDDEN))
def test_warm_is_cold_to_the_bit(name: str, dtype: torch.dtype) -> None:
    parts = layouts(HIDDEN)[name]
    played = play(build_engine(tiny_once(MODEL, dtype), block_size=4, token_budget=9))
    first = run(played, "first", parts)
    assert first.reused == 0
    warm = run(played, "warm", parts)
    assert warm.reused > 0
    warm.assert_same_as(first)
    unshared = play(
        build_engine(tiny_once(MODEL, dtype), block_size=2, reuses_prefixes=False)
    )
    run(unshared, "cold", parts).assert_same_as(first)


def small_opt() -> torch.nn.Module:
    """Its input vectors are projected to twice their width."""
    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN // 2,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return randomise(OPTForCausalLM(config)).eval()


def test_vectors_are_as_wide_as_the_input_embedding_wherever_that_is_not_hidden() -> (
    None
):
    loaded = wrap_model(deepcopy(small_opt()), name="opt")
    assert (loaded.embedding_size, loaded.config.hidden_size) == (HIDDEN // 2, HIDDEN)
    played = play(build_engine(loaded, block_size=4))
    parts: Parts = [
        random_ids(6, seed=1),
        vectors(17, width=HIDDEN // 2),
        random_ids(5, seed=2),
    ]

    outcome = run(played, "r", parts)

    assert_agrees(outcome, parts, small_opt(), 1e-4)
    warm = run(played, "again", parts)
    assert warm.reused > 0
    warm.assert_same_as(outcome)
    with pytest.raises(RequestError, match="shape .positions, 32."):
        embed(played.engine, [vectors(17)])
    other = embed(engine_of().engine, [vectors(17)])
    with pytest.raises(RequestError, match="embeddings of size 64"):
        played.engine.add(other)


def test_what_is_vectors_matters() -> None:
    """Else agreement with a reference that ignores them would prove nothing."""
    ids = random_ids(10)
    outcomes = [cold([ids, vectors(12, seed), random_ids(3)]) for seed in (1, 2)]
    assert outcomes[0].differs_from(outcomes[1])


# Who may share


def test_equal_ids_over_other_vectors_miss_from_the_span_on() -> None:
    played = engine_of()
    before, after = random_ids(10), random_ids(7, seed=1)
    first: Parts = [before, vectors(20, 1), after]
    second: Parts = [before, vectors(20, 2), after]
    assert run(played, "first", first).reused == 0
    other = run(played, "second", second)
    assert other.reused == 10
    other.assert_same_as(cold(second))
    for name, parts in (("first again", first), ("second again", second)):
        again = run(played, name, parts)
        assert again.reused == 36, "the positive control"
        again.assert_same_as(cold(parts))


@pytest.mark.parametrize("row, column", [(0, 0), (8, 63), (19, 5)])
def test_one_bit_of_one_vector_is_another_span(row: int, column: int) -> None:
    played = engine_of()
    before = random_ids(10)
    span = vectors(20, 1)
    other = span.clone()
    other.view(torch.int32)[row, column] ^= 1
    run(played, "first", [before, span, random_ids(3)])
    assert run(played, "second", [before, other, random_ids(3)]).reused == 10


def test_vectors_that_equal_tokens_are_not_those_tokens() -> None:
    """Only the mask differs: the inputs of both prompts are bit for bit the same."""
    played = engine_of()
    table: Any = build_model(MODEL).get_input_embeddings()  # type: ignore[operator]
    rows = table.weight[0].detach().expand(32, -1)
    tail = random_ids(6, seed=3)
    plain: Parts = [[0] * 32, tail]
    embedded: Parts = [rows, tail]
    truth = run(played, "plain", plain)
    other = run(played, "embedded", embedded)
    assert other.reused == 0
    other.assert_same_as(truth)  # and indeed they are the same
    assert run(played, "plain again", plain).reused == 37
    assert run(played, "embedded again", embedded).reused == 37
    mixed: Parts = [[0] * 16, rows[:16], tail]
    third = run(played, "mixed", mixed)
    assert third.reused == 16
    third.assert_same_as(truth)


def test_a_span_is_not_its_two_halves() -> None:
    """Equal vectors at equal places, cut otherwise: told apart, which costs a miss."""
    played = engine_of()
    span = vectors(24, 1)
    one = run(played, "one", [span, random_ids(3)])
    two = run(played, "two", [span[:12], span[12:], random_ids(3)])
    assert two.reused == 0
    two.assert_same_as(one)


def test_a_longer_span_shares_nothing_with_its_beginning() -> None:
    """Its digest is over all of it: nobody knows that the beginning is the same."""
    played = engine_of()
    run(played, "one", [vectors(24, 1), random_ids(3)])
    longer = torch.cat([vectors(24, 1), vectors(6, 2)])
    assert run(played, "two", [longer, random_ids(3)]).reused == 0


def test_the_form_of_equal_vectors_is_of_no_consequence() -> None:
    played = engine_of()
    span = vectors(20, 1)
    forms = {
        "plain": span,
        "double": span.double(),
        "transposed": span.t().contiguous().t(),
        "a part of more": torch.cat([span, span], dim=1)[:, :HIDDEN],
        "a parameter": torch.nn.Parameter(span.clone()),
    }
    truth = cold([span, random_ids(5)])
    for index, (name, form) in enumerate(forms.items()):
        outcome = run(played, name, [form, random_ids(5)])
        outcome.assert_same_as(truth)
        assert outcome.reused == (24 if index else 0)


def test_spans_are_private_to_their_tenant() -> None:
    played = engine_of()
    parts = layouts(HIDDEN)["in the middle"]
    run(played, "a", parts)
    assert run(played, "b", parts, tenant="b").reused == 0
    assert run(played, "a again", parts).reused > 0


def test_a_declared_prefix_may_contain_a_span() -> None:
    played = engine_of()
    parts: Parts = [random_ids(6), vectors(14, 1)]
    assert played.engine.declare_public(embed(played.engine, parts).tokens) == 5
    run(played, "a", [*parts, random_ids(9)])
    assert run(played, "b", [*parts, random_ids(9)], tenant="b").reused == 20
    other: Parts = [random_ids(6), vectors(14, 2), random_ids(9)]
    assert run(played, "c", other, tenant="c").reused in (4, 6)


def test_adapters_start_positions_and_spans_are_told_apart_together(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    shelf = Shelf(tmp_path_factory.mktemp("adapters"))
    revision = Revision(adapters=(("x", shelf.adapter(seed=1), 1.0),))
    played = play(revision.engine(block_size=4))
    prompt = embed(played.engine, layouts(HIDDEN)["in the middle"])
    for adapter in (None, "x"):
        for start in (0, 5):
            what = asked(prompt, adapter=adapter, start_position=start)
            truth = alone(revision, what)[0]
            name = f"{adapter} {start}"
            assert played.run(name, what).reused == 0
            assert played.run(f"{name} again", what).reused > 0
            for each in (name, f"{name} again"):
                played.outcome(each).assert_same_as(truth)


# Where a match may end


def cached(engine: Engine, prompt: EmbeddedPrompt) -> int:
    """Tokens that a longer prompt with this beginning would find."""
    longer = TokenIds.from_parts([prompt.tokens, tokens([1])])
    namespace = engine.namespace
    return engine.cache.peek(namespace, Domain.private("a"), longer.buffer).num_tokens


@pytest.mark.parametrize("num_positions", [9, 10, 11, 12, 13, 17, 24])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_match_that_would_end_inside_a_span_ends_before_it_or_is_sure(
    num_positions: int, block_size: int
) -> None:
    """The last token of a prompt is always computed, so a match may end in its span."""
    played = engine_of(block_size=block_size, num_blocks=300)
    parts: Parts = [random_ids(6), vectors(num_positions, 1)]
    longer: Parts = [*parts, random_ids(40, seed=2)]
    run(played, "longer", longer)
    outcome = run(played, "r", parts)
    inside = num_positions - 1
    assert outcome.reused == (6 + inside if inside >= MIN_SPAN_TOKENS else 6)
    outcome.assert_same_as(cold(parts))


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
def test_spans_that_begin_alike_share_up_to_their_start(block_size: int) -> None:
    played = engine_of(block_size=block_size, num_blocks=300)
    for seed in range(6):
        parts: Parts = [random_ids(7), vectors(11, seed), random_ids(3)]
        outcome = run(played, f"r{seed}", parts)
        assert outcome.reused == (7 if seed else 0)
        outcome.assert_same_as(cold(parts))


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("token_budget", [8, 9, 11, 13, 64])
def test_nothing_is_matchable_that_ends_early_in_a_span(
    block_size: int, token_budget: int
) -> None:
    """Not even while the span is being computed, chunk by chunk."""
    played = engine_of(block_size=block_size, token_budget=token_budget, num_blocks=300)
    prompt = embed(played.engine, [random_ids(5), vectors(14, 1), random_ids(6)])

    def look() -> None:
        found = cached(played.engine, prompt)
        assert found <= 5 or found >= 5 + MIN_SPAN_TOKENS
        for node in played.engine.cache.tree.nodes():
            end = sum(n.num_blocks for n in node.path()) * block_size
            assert end <= 5 or end >= 5 + MIN_SPAN_TOKENS

    played.after_step = look
    played.run("r", asked(prompt))
    assert cached(played.engine, prompt) >= 19 // block_size * block_size


def test_followers_wait_for_a_span_that_is_being_computed() -> None:
    played = engine_of(token_budget=16)
    parts: Parts = [random_ids(6), vectors(40, 1), random_ids(5)]
    for name in ("leader", "follower", "late"):
        played.add(name, asked(embed(played.engine, parts)))
    played.drain()
    for name in ("leader", "follower", "late"):
        played.outcome(name).assert_same_as(cold(parts))
    assert played.outcome("follower").reused >= 44
    assert played.outcome("late").reused >= 44


# In every state


@pytest.mark.parametrize(
    "state, policy",
    [
        *[(state, policy) for state in STATES for policy in (None, InFlight.RESTART)],
        # The others do nothing with tokens that they would not do with spans.
        ("prefilling", InFlight.FINISH),
        ("prefilling", InFlight.ABORT),
    ],
    ids=str,
)
def test_a_span_survives_every_state_and_every_rollout(
    state: str, policy: InFlight | None
) -> None:
    """Chunks, samples, preemption; and a restart computes it again from its vectors."""
    played = play(BASE.engine(**STATES[state].settings()))
    prompt = embed(
        played.engine, [random_ids(10, seed=1), vectors(20, 1), random_ids(7, seed=2)]
    )
    target = asked(prompt, num_samples=STATES[state].num_samples)
    STATES[state].bring(played, target)
    if policy is not None:
        played.engine.update_weights(weights(1), in_flight=policy)
        played.add("late", target)
    played.drain()
    if policy is InFlight.ABORT:
        reason = played.completions["target"].finish_reason
        assert reason is FinishReason.REPLACED
    is_new = policy is InFlight.RESTART
    for request_id, what in played.asked.items():
        if request_id == "target" and policy is InFlight.ABORT:
            continue
        revision = TRAINED if is_new or request_id == "late" else BASE
        wanted = alone(revision, what)
        for sample_id, each in zip(played.sample_ids(request_id), wanted, strict=True):
            played.outcome(sample_id).assert_same_as(each)
    assert_idle(played.engine)


def test_prompts_with_and_without_spans_share_a_step() -> None:
    played = engine_of(token_budget=17, block_size=3)
    prompts: dict[str, Parts] = {
        "plain": [random_ids(20, seed=5)],
        "spanned": layouts(HIDDEN)["two"],
        "other": layouts(HIDDEN)["at the start"],
        "plain too": [random_ids(11, seed=6)],
    }
    for name, parts in prompts.items():
        played.add(name, asked(embed(played.engine, parts)))
    played.drain()
    for name, parts in prompts.items():
        played.outcome(name).assert_same_as(cold(parts))


def test_generate_takes_them_and_text_alike() -> None:
    engine = engine_of().engine
    parts = layouts(HIDDEN)["two"]
    params = SamplingParams(max_new_tokens=8)
    completions = engine.generate(
        [embed(engine, parts), tokens(random_ids(9)), embed(engine, [random_ids(9)])],
        params,
    )
    assert completions[0].token_ids == cold(parts).completion.token_ids
    assert completions[1].token_ids == completions[2].token_ids


def test_the_caller_may_do_what_it_likes_with_its_vectors() -> None:
    played = engine_of(token_budget=9)
    span = vectors(20, 1)
    parts: Parts = [random_ids(6), span, random_ids(5)]
    truth = cold([random_ids(6), span.clone(), random_ids(5)])
    prompt = embed(played.engine, parts)
    span.fill_(float("nan"))
    played.add("r", asked(prompt))
    played.step()
    span.zero_()
    played.drain()
    played.outcome("r").assert_same_as(truth)


# Refusals


@pytest.mark.parametrize(
    "part, message",
    [
        (vectors(8), "at least 9 positions"),
        (vectors(1), "at least 9 positions"),
        (vectors(0), "at least 9 positions"),
        (vectors(12, width=63), r"\[positions, 64\], got \[12, 63\]"),
        (vectors(12).t(), r"\[positions, 64\]"),
        (vectors(12)[0], r"\[positions, 64\], got \[64\]"),
        (vectors(12)[None], r"\[positions, 64\]"),
        (torch.tensor(1.0), r"\[positions, 64\]"),
        (torch.zeros(12, HIDDEN, dtype=torch.int64), "int64"),
        (torch.zeros(12, HIDDEN, dtype=torch.bool), "bool"),
        (torch.zeros(12, HIDDEN, dtype=torch.complex64), "complex64"),
        (vectors(12) * float("nan"), "not finite"),
        (vectors(12) / 0, "not finite"),
        (vectors(12).double() * 1e300, "not finite in torch.float32"),
        ([1, 2, 3], "got list"),
        ("text", "got str"),
        (None, "got NoneType"),
        (
            TokenIds.from_parts([Span(digest=bytes(32), num_tokens=9)]),
            "must be TokenIds of text",
        ),
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, str) else value[:30],
)
def test_vectors_that_cannot_be_are_refused(part: Any, message: str) -> None:
    engine = engine_of().engine
    with pytest.raises(RequestError, match=message) as caught:
        engine.embed([tokens(random_ids(3)), part])
    assert caught.value.field in ("prompt", "spans")
    assert not engine.has_work


def test_a_prompt_of_nothing_is_refused() -> None:
    engine = engine_of().engine
    for parts in ([], [tokens([])]):
        with pytest.raises(EmptyPrompt):
            engine.add(engine.embed(parts))


def test_ids_between_spans_are_checked_like_any_others() -> None:
    engine = engine_of().engine
    prompt = engine.embed([vectors(12), tokens([307])])
    with pytest.raises(TokenOutOfRange, match="position 12"):
        engine.add(prompt)


def test_ids_of_spans_without_their_vectors_are_refused() -> None:
    """Nobody can compute them; and they must not stand for somebody's vectors."""
    played = engine_of()
    parts = layouts(HIDDEN)["in the middle"]
    run(played, "r", parts)
    prompt = embed(played.engine, parts)
    for wrong in (prompt.tokens, list(prompt.tokens), b"", "text", None):
        with pytest.raises(RequestError):
            played.engine.add(wrong)  # type: ignore[arg-type]
    with pytest.raises(TokenOutOfRange):
        TokenIds(prompt.tokens.buffer)


FOREIGN: dict[str, Callable[[], LoadedModel]] = {
    "another width": lambda: tiny_once("llama-group3-tied", torch.float32),
    "another dtype": lambda: tiny_once(MODEL, torch.bfloat16),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_prompt_made_by_another_engine_harms_nobody(kind: str) -> None:
    """Its vectors are of another width or dtype; batch mates must not pay for that."""
    other = build_engine(FOREIGN[kind]())
    width = int(other.loaded.config.hidden_size)
    foreign = other.embed([tokens(random_ids(4)), vectors(12, 1, width)])
    played = engine_of()
    beside = layouts(HIDDEN)["two"]
    played.add("beside", asked(embed(played.engine, beside)))
    played.add("plain", asked(tokens(random_ids(9))))
    with contextlib.suppress(RequestError):
        played.add("foreign", asked(foreign))
    played.drain()
    played.outcome("beside").assert_same_as(cold(beside))
    played.outcome("plain").assert_same_as(cold([random_ids(9)]))
    assert_idle(played.engine)


def test_a_prompt_may_be_asked_for_many_times() -> None:
    played = engine_of()
    prompt = embed(played.engine, layouts(HIDDEN)["two"])
    truth = cold(layouts(HIDDEN)["two"])
    for index in range(3):
        played.add(f"r{index}", Asked(prompt=prompt, params=asked().params))
    played.drain()
    for index in range(3):
        played.outcome(f"r{index}").assert_same_as(truth)


# The embedded model


@pytest.mark.model
def test_the_real_model_takes_vectors_as_transformers_does(
    smol: LoadedModel, plain_smol: LoadedModel
) -> None:
    """The embedding rows of a text, slightly moved, inside that text."""
    ids = smol.tokenizer("The quick brown fox jumps over the lazy dog. " * 6)[
        "input_ids"
    ]
    table: Any = plain_smol.model.get_input_embeddings()  # type: ignore[operator]
    moved = table.weight[torch.tensor(ids[20:40])].detach() * 1.25
    parts: Parts = [ids[:20], moved, ids[40:]]
    played = play(build_engine(smol, block_size=16, num_blocks=40))
    first = run(played, "first", parts, max_new_tokens=4)
    warm = run(played, "warm", parts, max_new_tokens=4)
    assert warm.reused > 40
    warm.assert_same_as(first)
    rows = [
        p if isinstance(p, torch.Tensor) else table(torch.tensor(p))
        for p in [*parts, list(first.completion.token_ids)]
    ]
    joined = torch.cat(rows).detach()
    model: Any = deepcopy(plain_smol.model)
    model.set_attn_implementation("sdpa")
    logits = peft_logits(model, None, [], embeddings=joined)
    for index, row in enumerate(first.rows):
        assert row_difference(row, logits[len(ids) - 1 + index]) < 0.05
