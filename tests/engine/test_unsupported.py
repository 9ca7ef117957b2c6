"""Models the engine would compute wrongly are refused, and told why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from stemkv.engine import Engine, SamplingParams, wrap_model
from stemkv.engine.attention import ATTENTION_NAME, attend
from stemkv.errors import NumericsError, UnsupportedModel
from tests.engine.models import build_engine, build_model, random_ids, randomise, tokens

SHAPE: dict[str, Any] = dict(
    vocab_size=307,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
GROUPED: dict[str, Any] = SHAPE | dict(num_key_value_heads=2)
FULL: dict[str, Any] = dict(layer_types=["full_attention"] * 2)


def start(model: torch.nn.Module) -> Engine:
    """An engine as it starts by default, self-test included."""
    return build_engine(
        wrap_model(randomise(model), name="the-model"), runs_self_test=True
    )


class ForgetsArguments(LlamaForCausalLM):
    def forward(self, *args: Any, stemkv_layout: Any = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_one_layer_gone() -> torch.nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    del model.model.layers[1]
    return model


def small_mpt() -> torch.nn.Module:
    return MptForCausalLM(MptConfig(vocab_size=307, d_model=64, n_heads=4, n_layers=2))


def small_t5() -> torch.nn.Module:
    config = T5Config(vocab_size=307, d_model=64, d_kv=16, num_heads=4, num_layers=2)
    return T5ForConditionalGeneration(config)


def small_bart() -> torch.nn.Module:
    config = BartConfig(
        vocab_size=307, d_model=64, encoder_layers=1, decoder_layers=1, pad_token_id=1
    )
    return BartForConditionalGeneration(config)


@pytest.mark.parametrize(
    "make, because",
    [
        pytest.param(
            lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=16)),
            "sliding window of 16 tokens",
            id="mistral",
        ),
        pytest.param(
            lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, sliding_window=99)),
            "sliding window of 99 tokens",
            id="phi3",
        ),
        pytest.param(
            lambda: Qwen2ForCausalLM(
                Qwen2Config(
                    **GROUPED,
                    use_sliding_window=True,
                    sliding_window=32,
                    max_window_layers=1,
                )
            ),
            "sliding",
            id="qwen2",
        ),
        pytest.param(
            lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED)),
            "layers of type sliding_attention",
            id="gemma3",
        ),
        pytest.param(
            lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, **FULL)),
            "softcap",
            id="gemma2",
        ),
        pytest.param(
            lambda: GptOssForCausalLM(
                GptOssConfig(**GROUPED, **FULL, num_local_experts=2)
            ),
            "s_aux",
            id="gpt-oss",
            marks=pytest.mark.filterwarnings("ignore"),
        ),
        pytest.param(
            lambda: Lfm2ForCausalLM(
                Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"])
            ),
            "layers of type conv",
            id="lfm2",
        ),
        pytest.param(small_t5, "encoder-decoder", id="t5"),
        pytest.param(small_bart, "encoder-decoder", id="bart"),
        pytest.param(
            lambda: BertLMHeadModel(BertConfig(**SHAPE)), "non-causal", id="bert"
        ),
        pytest.param(
            lambda: BloomForCausalLM(
                BloomConfig(vocab_size=307, hidden_size=64, n_layer=2, n_head=4)
            ),
            "BloomForCausalLM. does not use transformers' attention interface",
            id="bloom",
        ),
        pytest.param(
            small_mpt, "does not use transformers' attention interface", id="mpt"
        ),
        pytest.param(
            lambda: NemotronForCausalLM(NemotronConfig(**GROUPED)),
            "does not pass keyword arguments on",
            id="nemotron",
        ),
        pytest.param(
            lambda: ForgetsArguments(LlamaConfig(**SHAPE)),
            "does not pass keyword arguments on",
            id="forgets-arguments",
        ),
        pytest.param(
            with_one_layer_gone,
            "1 attention calls in one pass, expected one in each of its 2 layers",
            id="layer-gone",
        ),
        pytest.param(
            lambda: DeepseekV3ForCausalLM(
                DeepseekV3Config(**SHAPE, first_k_dense_replace=2)
            ),
            "the-model|Deepseek",  # its keys and values are of several widths
            id="deepseek",
        ),
    ],
)
def test_a_model_with_another_kind_of_attention_is_refused(
    make: Callable[[], torch.nn.Module], because: str
) -> None:
    with pytest.raises(UnsupportedModel, match=because):
        start(make())


def test_a_refusal_at_wrapping_names_the_model() -> None:
    model = MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=16))
    with pytest.raises(UnsupportedModel, match="the-model"):
        wrap_model(model, name="the-model")


@pytest.mark.parametrize("original", [64, 256])
def test_positions_that_depend_on_the_longest_request_are_refused(
    original: int,
) -> None:
    """With longrope, a position's angle depends on the longest sequence of a step."""
    rope = dict(
        rope_type="longrope",
        rope_theta=10_000.0,
        original_max_position_embeddings=original,
        short_factor=[1.0] * 8,
        long_factor=[4.0] * 8,
        factor=4.0,
    )
    config = LlamaConfig(**SHAPE, max_position_embeddings=1024, rope_parameters=rope)
    try:
        engine = start(LlamaForCausalLM(config))
    except (UnsupportedModel, NumericsError):
        return
    ids = tokens(random_ids(40))
    params = SamplingParams(max_new_tokens=6)
    (alone,) = engine.generate([ids], params)
    engine.add(tokens(random_ids(300, seed=1)), params)
    (beside,) = engine.generate([ids], params, tenant="another")
    assert beside.token_ids == alone.token_ids, "depends on who is beside it"


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
            id="mistral",
        ),
        pytest.param(
            lambda: Qwen2ForCausalLM(
                Qwen2Config(**GROUPED, use_sliding_window=False, sliding_window=32)
            ),
            id="qwen2",
        ),
        pytest.param(
            lambda: Phi3ForCausalLM(Phi3Config(**GROUPED, sliding_window=None)),
            id="phi3",
        ),
    ],
)
def test_the_same_models_without_a_window_are_served(
    model: Callable[[], torch.nn.Module],
) -> None:
    params = SamplingParams(max_new_tokens=3)
    (completion,) = start(model()).generate([tokens(random_ids(70))], params)
    assert len(completion.token_ids) == 3


def test_without_a_self_test_a_bypassing_model_is_refused_as_well() -> None:
    model = ForgetsArguments(LlamaConfig(**SHAPE))
    with pytest.raises(UnsupportedModel, match="does not pass keyword arguments"):
        wrap_model(randomise(model), name="x")


# One short call, compared with the model's own


class CountsInChunks(LlamaForCausalLM):
    """Numbers positions from the start of what it is given."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        kwargs["position_ids"] = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids, **kwargs)


class CountsFromTwo(LlamaForCausalLM):
    """Absolute positions, where a rotation would not tell."""

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(2, 2 + input_ids.shape[1])[None]
        embeds = self.model.embed_tokens(input_ids)
        embeds = embeds + position_ids[..., None].sin().to(embeds.dtype)
        return super().forward(
            inputs_embeds=embeds, position_ids=position_ids, **kwargs
        )


class ScalesByLength(LlamaForCausalLM):
    """Scales by the longest position of a step."""

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        embeds = self.model.embed_tokens(input_ids) * (1 + position_ids.max())
        return super().forward(
            inputs_embeds=embeds, position_ids=position_ids, **kwargs
        )


def small_roberta() -> torch.nn.Module:
    shape = SHAPE | dict(pad_token_id=1, max_position_embeddings=514)
    return RobertaForCausalLM(RobertaConfig(**shape, is_decoder=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        small_roberta,
        lambda: CountsFromTwo(LlamaConfig(**SHAPE)),
        lambda: CountsInChunks(LlamaConfig(**SHAPE)),
        lambda: ScalesByLength(LlamaConfig(**SHAPE)),
    ],
    ids=["roberta", "counts-from-two", "counts-in-chunks", "scales-by-length"],
)
def test_a_model_that_would_be_served_wrongly_is_refused(
    make: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> None:
    model = randomise(make()).to(dtype)
    with pytest.raises(UnsupportedModel, match="the-model would be served wrongly"):
        wrap_model(model, name="the-model")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_many_layers_of_rounding_are_no_reason_to_refuse(
    seed: int, dtype: torch.dtype
) -> None:
    shape = SHAPE | dict(num_hidden_layers=24)
    model = randomise(LlamaForCausalLM(LlamaConfig(**shape)), seed)
    wrap_model(model.to(dtype), name="deep")


@pytest.mark.parametrize("context_length", [1, 2, 7, 8, 13])
def test_a_model_of_any_context_length_can_be_compared(context_length: int) -> None:
    config = LlamaConfig(**SHAPE, max_position_embeddings=context_length)
    loaded = wrap_model(randomise(LlamaForCausalLM(config)), name="short")
    assert loaded.context_length == context_length


def test_the_comparison_leaves_the_model_on_paged_attention() -> None:
    loaded = wrap_model(build_model("llama-group1"), name="x")
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


# Refusals for the right reason


def test_norms_of_heads_are_no_matrices() -> None:
    config = CohereConfig(**GROUPED, use_qk_norm=True)
    engine = start(CohereForCausalLM(config))
    params = SamplingParams(max_new_tokens=4)
    ids = tokens(random_ids(70))
    (cold,) = engine.generate([ids], params)
    (warm,) = engine.generate([ids], params)
    assert warm.counts.reused == 69
    assert warm.token_ids == cold.token_ids


def test_a_matrix_outside_a_linear_is_still_refused() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=307, n_embd=64, n_layer=2, n_head=4))
    with pytest.raises(NumericsError, match="c_attn multiplies by a matrix"):
        start(gpt2)


class HasNoConfig(torch.nn.Module):
    config: Any = None


def without_heads() -> torch.nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    del model.config.__dict__["num_attention_heads"]
    return model


class WantsMore(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise KeyError("something else")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(3, 3),
        HasNoConfig,
        without_heads,
        lambda: WantsMore(LlamaConfig(**SHAPE)),
        lambda: None,
    ],
    ids=["linear", "no-config", "no-heads", "own-error", "nothing"],
)
def test_whatever_is_odd_about_a_model_is_an_unsupported_model(
    make: Callable[[], Any],
) -> None:
    with pytest.raises(UnsupportedModel, match="the-model"):
        wrap_model(make(), name="the-model")


# The attention function itself


@pytest.mark.parametrize(
    "argument", ["sliding_window", "softcap", "s_aux", "position_bias"]
)
def test_attention_with_an_extra_term_is_refused(argument: str) -> None:
    module = build_model("llama-group1").model.layers[0].self_attn
    x = torch.zeros(1, 4, 3, 16)
    extra = {argument: torch.tensor(1.0)}
    with pytest.raises(
        UnsupportedModel, match=f"LlamaAttention attends with {argument}"
    ):
        attend(module, x, x, x, None, **extra)


def test_attention_with_a_mask_of_its_own_is_refused() -> None:
    module = build_model("llama-group1").model.layers[0].self_attn
    x = torch.zeros(1, 4, 3, 16)
    with pytest.raises(UnsupportedModel, match="attends with attention_mask"):
        attend(module, x, x, x, torch.zeros(1, 1, 3, 3))


def test_attention_without_a_layout_is_refused() -> None:
    module = build_model("llama-group1").model.layers[0].self_attn
    x = torch.zeros(1, 4, 3, 16)
    with pytest.raises(UnsupportedModel, match="LlamaAttention does not pass keyword"):
        attend(module, x, x, x, None)
