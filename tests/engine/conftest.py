"""Fixtures of the engine's tests: one thread, and the embedded model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from stemkv.engine import LoadedModel, load_model, wrap_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests that want more threads say so; nobody inherits them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def plain_smol() -> LoadedModel:
    """The embedded model as loaded. Engines pack their models: give them a copy."""
    return load_model()


@pytest.fixture(scope="session")
def smol(plain_smol: LoadedModel) -> LoadedModel:
    """The embedded model in its default dtype, for engines."""
    return replace(plain_smol, model=deepcopy(plain_smol.model))


@pytest.fixture(scope="session")
def smol32(plain_smol: LoadedModel) -> LoadedModel:
    """The embedded model in float32, for engines."""
    model = deepcopy(plain_smol.model).float()
    return wrap_model(model, name="smol32", tokenizer=plain_smol.tokenizer)
