"""What an engine serves: a model in place, its KV memory, and its adapters.

Owns the tensors that requests run on, which digests they go by, and the check that
nobody else has changed them. What it replaces is prepared first and put in place later,
when the requests of before have ended. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stemkv.core.prefix.identities import Identities, LoadedAdapter
from stemkv.core.prefix.identity import ComputeIdentity
from stemkv.engine.adapters import Adapters
from stemkv.engine.config import EngineConfig
from stemkv.engine.digest import combine
from stemkv.engine.identity import identify
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import linear_places
from stemkv.engine.load import LoadedModel
from stemkv.engine.lora import Lora
from stemkv.engine.numerics import Numerics, numerics_named
from stemkv.engine.runner import ModelRunner, prepare_model
from stemkv.engine.selftest import check_layers, check_numerics
from stemkv.engine.weights import WeightUpdate
from stemkv.errors import InvariantError

__all__ = ["Change", "ReadAdapter", "Served"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Another state of the model, checked and ready; nothing has changed yet."""

    plan: Callable[[], ComputeIdentity]  # what requests added from now on run under
    put_in_place: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapter:
    """An adapter from its files, checked and ready."""

    digest: bytes
    lora: Lora
    path: Path
    scale: float


class Served:
    """Takes ownership of `loaded.model`: its linears are packed in place."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, *, num_blocks: int
    ) -> None:
        self.loaded = loaded
        self.adapters = Adapters(loaded)
        self._config = config
        self._planned_digests = dict(loaded.tensor_digests)  # once all is rolled out
        self._digests = dict(loaded.tensor_digests)  # what is in place now
        numerics = numerics_named(config.numerics)
        self._linears = prepare_model(loaded.model, numerics)
        self.kv = KvMemory(
            num_layers=loaded.num_layers,
            num_blocks=num_blocks,
            block_size=config.core.cache.block_size,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )
        self.runner = self._make_runner(numerics)
        if config.runs_self_test:
            check_layers(self.runner, loaded.vocab_size)
        self._check(numerics, runs_self_test=config.runs_self_test)
        self.identities = Identities(
            identify(
                loaded,
                numerics,
                block_size=config.core.cache.block_size,
                is_packed=self._linears.is_packed,
            )
        )

    def check_in_place(self) -> None:
        """Raise `InvariantError` if another engine has replaced weights of ours."""
        # Compared tensor by tensor: in every step, so without hashing anything.
        if self.loaded.tensor_digests != self._digests:
            raise InvariantError(
                "another engine replaced weights of this model; one model serves one "
                "engine at a time"
            )

    def read_adapter(self, path: Path | str, scale: float) -> ReadAdapter:
        """Read an adapter's files; nothing has changed then."""
        digest, lora = self.adapters.read(
            path,
            scale=scale,
            needs_stable_rows=self.identities.base.numerics_class == "exact",
        )
        return ReadAdapter(
            digest=digest, lora=lora, path=Path(path), scale=float(scale)
        )

    def load_adapter(
        self, name: str, read: ReadAdapter
    ) -> tuple[LoadedAdapter, tuple[bytes, ...]]:
        """Serve an adapter under a name; return the namespaces to retire."""
        loaded, retired = self.identities.load(name, read.digest, read.scale)
        self.adapters.keep(name, loaded.version, read.path, read.lora)
        return loaded, retired

    def unload_adapter(self, name: str) -> tuple[bytes, ...]:
        """Refuse an adapter from now on; return the namespaces to retire."""
        retired = self.identities.unload(name)
        self.adapters.forget(name)
        return retired

    def with_weights(self, tensors: Mapping[str, torch.Tensor]) -> Change:
        """Prepare other values for some tensors; they are copied now."""
        update = WeightUpdate(
            self.loaded.model,
            tensors,
            names=self._planned_digests,
            places=linear_places(self.loaded.model),
            tied_tensors=self.loaded.tied_tensors,
        )
        planned = self._planned_digests | update.digests

        def put_in_place() -> None:
            update.apply()
            # Whoever serves this model beside or after us must not take it for what
            # it was.
            self.loaded.tensor_digests.update(update.digests)
            self._digests = dict(self.loaded.tensor_digests)

        def plan() -> ComputeIdentity:
            self._planned_digests = planned
            return replace(self.identities.base, weights_digest=combine(planned))

        return Change(plan=plan, put_in_place=put_in_place)

    def with_numerics(self, name: str) -> Change:
        """Prepare another numerics class."""
        numerics = numerics_named(name)
        self._check(numerics, runs_self_test=False)  # before the model is touched
        prepare_model(self.loaded.model, numerics)
        self._check(numerics, runs_self_test=self._config.runs_self_test)
        if numerics.pads_context:
            self.adapters.check_stable()

        def put_in_place() -> None:
            self.runner = self._make_runner(numerics)

        def plan() -> ComputeIdentity:
            return replace(
                self.identities.base,
                numerics_class=numerics.name,
                numerics_tile=numerics.tile,
            )

        return Change(plan=plan, put_in_place=put_in_place)

    def _make_runner(self, numerics: Numerics) -> ModelRunner:
        return ModelRunner(
            self.loaded.model,
            self.kv,
            numerics,
            num_query_heads=self.loaded.num_query_heads,
            loras=self.adapters.loras,
        )

    def _check(self, numerics: Numerics, *, runs_self_test: bool) -> None:
        """Raise `NumericsError` unless this build and model keep the class's bits."""
        check_numerics(
            self.loaded,
            self._linears,
            self._make_runner(numerics),
            runs_self_test=runs_self_test,
        )
