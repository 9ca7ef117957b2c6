"""Paged attention is attention: the same logits as transformers' own forward pass.

Tolerance in float32: 1e-4 of the largest logit. Sums run in another order, nothing
else may differ; a wrong mask, position or block is off by orders of magnitude.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from stemkv.core import TokenIds
from stemkv.engine import LoadedModel, SamplingParams, wrap_model
from tests.engine.models import TINY, build_engine, build_model, random_ids
from tests.engine.serving import Ask, Served, serve

TOLERANCE = 1e-4


@torch.inference_mode()
def dense_logits(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """Logits `[tokens, vocabulary]` of one plain forward pass."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_dense(served: Served, model: torch.nn.Module) -> None:
    for sample_id, completion in served.completions.items():
        prompt = served.asks[completion.request_id].ids
        rows = dense_logits(model, [*prompt, *completion.token_ids[:-1]])
        for index in range(len(completion.token_ids)):
            expected = rows[len(prompt) - 1 + index]
            difference = (served.logits[sample_id, index] - expected).abs().max()
            assert difference <= TOLERANCE * rows.abs().max(), f"{sample_id} {index}"


@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tiny_models_give_the_logits_of_a_plain_forward_pass(
    name: str, attention: str
) -> None:
    model = build_model(name)
    plain = deepcopy(model)
    plain.set_attn_implementation(attention)
    engine = build_engine(
        wrap_model(model, name=name), block_size=8, token_budget=50, num_blocks=80
    )
    params = SamplingParams(max_new_tokens=10)
    shared = random_ids(70)
    asks = [
        Ask(request_id="long", ids=(*shared, *random_ids(83, seed=1)), params=params),
        Ask(request_id="short", ids=(5,), params=params),
        Ask(request_id="hit", ids=(*shared, 1, 2, 3), params=params, at_step=6),
        Ask(request_id="turn", ids=(7, 7), params=params, follows="long"),
        Ask(
            request_id="samples",
            ids=tuple(shared[:30]),
            params=SamplingParams(max_new_tokens=10, num_samples=2, temperature=2.0),
            at_step=8,
        ),
    ]

    served = serve(engine, asks)

    assert served.completions["hit"].counts.reused == 70
    assert_dense(served, plain)


def test_the_tolerance_would_notice_one_token_too_much_or_too_little() -> None:
    plain = build_model("llama-group3-tied")
    ids = random_ids(40)
    with_all = dense_logits(plain, ids)[-1]
    without_first = dense_logits(plain, ids[1:])[-1]
    assert (with_all - without_first).abs().max() > 100 * TOLERANCE * with_all.max()


@pytest.mark.model
def test_the_real_model_gives_the_logits_of_a_plain_forward_pass(
    plain_smol: LoadedModel, smol32: LoadedModel
) -> None:
    plain = deepcopy(plain_smol.model).float()
    plain.set_attn_implementation("sdpa")
    text = "The capital of France is Paris. The capital of Italy is"
    ids = tuple(TokenIds.from_ids(smol32.tokenizer(text)["input_ids"]))
    engine = build_engine(smol32, block_size=4, token_budget=8)
    params = SamplingParams(max_new_tokens=4)

    served = serve(
        engine,
        [
            Ask(request_id="first", ids=ids, params=params),
            Ask(request_id="turn", ids=(30, 31), params=params, follows="first"),
        ],
    )

    assert " Rome" in served.completions["first"].text
    assert_dense(served, plain)
