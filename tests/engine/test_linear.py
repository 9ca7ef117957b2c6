"""Linears whose rows do not depend on how many others there are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stemkv.engine.linear import StableLinear, can_pack, replace_linears
from tests.engine.models import TINY, build_model, tiny

DTYPES = (torch.bfloat16, torch.float32)
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# Inputs and outputs: small, odd, and wide enough for other paths of the kernels.
SHAPES = [(64, 64), (96, 33), (112, 16), (576, 192), (1536, 576), (2048, 65)]


def random_linear(
    shape: tuple[int, int], dtype: torch.dtype, *, bias: bool = False, seed: int = 0
) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    made = nn.Linear(*shape, bias=bias)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return made.to(dtype)


def random_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, width, generator=generator).to(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@EVERY_DTYPE
@torch.inference_mode()
def test_rows_are_the_same_among_any_others(
    shape: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    linear = StableLinear(
        [random_linear(shape, dtype, bias=bias)],
        is_packed=can_pack(dtype),
        verdicts={},
    )
    assert linear.is_stable
    x = random_rows(160, shape[0], dtype)
    whole = linear(x)
    for num_rows in (1, 1, 1, 2, 3, 4, 5, 7, 8, 15, 31, 33, 63, 100, 159):
        for start in (0, 57, 160 - num_rows):
            part = linear(x[start : start + num_rows].clone())
            expected = whole[start : start + num_rows]
            assert torch.equal(part, expected), f"{num_rows} rows from {start}"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@EVERY_DTYPE
@torch.inference_mode()
def test_it_computes_what_the_linear_does(
    bias: bool, is_packed: bool, dtype: torch.dtype
) -> None:
    plain = random_linear((96, 33), dtype, bias=bias)
    stable = StableLinear([plain], is_packed=is_packed, verdicts={})
    for x in (random_rows(7, 96, dtype), random_rows(1, 96, dtype)[None]):
        torch.testing.assert_close(stable(x), plain(x), rtol=0.02, atol=0.02)
        assert stable(x).shape == plain(x).shape


class Attention(nn.Module):
    def __init__(self, *, bias: tuple[bool, bool, bool] = (True, True, True)) -> None:
        super().__init__()
        self.q_proj = random_linear((32, 48), torch.float32, bias=bias[0], seed=1)
        self.k_proj = random_linear((32, 16), torch.float32, bias=bias[1], seed=2)
        self.v_proj = random_linear((32, 16), torch.float32, bias=bias[2], seed=3)


@pytest.mark.parametrize("bias", [(True,) * 3, (False,) * 3, (True, False, True)])
@pytest.mark.parametrize("order", ["qkv", "vqk", "kq", "v", "qqkkvv"])
@torch.inference_mode()
def test_projections_of_one_input_may_be_asked_in_any_order(
    bias: tuple[bool, bool, bool], order: str
) -> None:
    plain, replaced = Attention(bias=bias), Attention(bias=bias)
    replace_linears(replaced)
    for seed in range(3):
        x = random_rows(5 + seed, 32, torch.float32)
        for letter in order:
            expected = getattr(plain, f"{letter}_proj")(x)
            actual = getattr(replaced, f"{letter}_proj")(x)
            torch.testing.assert_close(actual, expected)


@torch.inference_mode()
def test_projections_of_several_inputs_are_not_mixed_up() -> None:
    plain, replaced = Attention(), Attention()
    replace_linears(replaced)
    x, y = (random_rows(4, 32, torch.float32), random_rows(4, 32, torch.float32) + 1)
    for name, rows in (("q", x), ("k", y), ("v", x), ("q", y), ("v", y), ("k", x)):
        expected = getattr(plain, f"{name}_proj")(rows)
        torch.testing.assert_close(getattr(replaced, f"{name}_proj")(rows), expected)


@torch.inference_mode()
def test_an_input_that_was_changed_in_place_is_computed_anew() -> None:
    plain, replaced = Attention(), Attention()
    replace_linears(replaced)
    x = random_rows(4, 32, torch.float32)
    replaced.q_proj(x)
    x += 1
    torch.testing.assert_close(replaced.q_proj(x), plain.q_proj(x))


@pytest.mark.parametrize("name", sorted(TINY))
@EVERY_DTYPE
def test_every_linear_of_a_model_is_replaced_and_stable(
    name: str, dtype: torch.dtype
) -> None:
    model = build_model(name, dtype)
    facts = replace_linears(model)
    assert facts.is_stable
    assert facts.is_packed == can_pack(dtype)
    assert not [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert replace_linears(model) == facts  # nothing is left to do


def test_what_only_looks_like_a_linear_is_left_alone() -> None:
    class Doubling(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Doubling(8, 8), nn.Linear(8, 8))
    replace_linears(model)
    assert type(model[0]) is Doubling
    assert type(model[1]) is StableLinear


def test_a_tied_embedding_keeps_its_weight() -> None:
    loaded = tiny("llama-group3-tied")
    weight = loaded.model.get_input_embeddings().weight
    before = weight.clone()
    replace_linears(loaded.model)
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)


def test_only_dtypes_with_a_kernel_are_packed() -> None:
    assert not can_pack(torch.float64)
    assert not can_pack(torch.float16)
