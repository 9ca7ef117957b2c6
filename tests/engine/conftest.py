"""Fixtures of the engine's tests: one thread, and the embedded model, loaded once."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from stemkv.engine import LoadedModel, linear, load_model, wrap_model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tests that want more threads say so; nobody inherits them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(autouse=True, scope="session")
def _kernels_are_tried_once() -> Iterator[None]:
    """What a shape's kernel does is found out by trial, by every engine; once will do."""
    trial = linear._min_stable_rows

    @cache
    def tried(_num_threads: int, *how: Any) -> int | None:
        return trial(*how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            linear,
            "_min_stable_rows",
            lambda *how: tried(torch.get_num_threads(), *how),
        )
        yield


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
