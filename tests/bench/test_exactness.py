"""Twenty seeds of `bench.exactness` on the embedded model, and that it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.exactness import load_for_seeds, run_seed
from stemkv.engine import LoadedModel
from stemkv.engine.numerics import TOLERANT

pytestmark = pytest.mark.model


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=str)
def loaded(request: pytest.FixtureRequest) -> Iterator[LoadedModel]:
    threads = torch.get_num_threads()
    yield load_for_seeds(request.param)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(10))
def test_no_bit_differs_however_a_prompt_is_computed(
    loaded: LoadedModel, seed: int
) -> None:
    # The parity of the seed is the dtype's, as in the bench: twenty seeds in all.
    parity = int(loaded.dtype is torch.float32)

    result = run_seed(loaded, 2 * seed + parity)

    assert result.num_differing_bits == 0
    assert result.num_bits > 1_000_000


def test_without_the_padding_rules_bits_differ(loaded: LoadedModel) -> None:
    """The positive control: what is compared above can differ."""
    careless = replace(TOLERANT, name="careless")

    results = [run_seed(loaded, seed, careless) for seed in (0, 1)]

    assert sum(result.num_differing_bits for result in results) > 0
