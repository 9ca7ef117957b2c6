"""The contexts served by a real engine, end to end, through rollouts.

Owns what is asked of the engine and what it reported. Judges nothing: how many tokens
should have been reused is in `Round.expects_reuse`.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stemkv.audit.identity.contexts import ADAPTERS, Context
from stemkv.audit.identity.scenarios import HOME
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.request import RequestId
from stemkv.engine.engine import Engine
from stemkv.engine.sampling import SamplingParams
from stemkv.errors import InvariantError

__all__ = ["EngineTrial", "Round"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Some requests, served one after another, all of which should do the same."""

    name: str
    expects_reuse: bool
    num_requests: int
    reused: tuple[int, ...]  # tokens, by request

    @property
    def num_right(self) -> int:
        """Requests that did what they should."""
        return sum((tokens > 0) == self.expects_reuse for tokens in self.reused)


class EngineTrial:
    """Serves contexts on one engine, and keeps what it said."""

    def __init__(
        self, engine: Engine, prompt: TokenIds, progress: Callable[[str], None]
    ) -> None:
        self.rounds: list[Round] = []
        self.num_equal_bits = 0  # answers to a reuse that are those of the cold run
        self.num_compared = 0
        self.num_equal_across_tenants = 0  # cold runs of two tenants
        self.num_tenant_pairs = 0
        self._engine = engine
        self._prompt = prompt
        self._progress = progress
        self._logits: list[torch.Tensor] = []
        self._cold: dict[Context, torch.Tensor] = {}
        engine.on_logits = self._keep

    def serve_twice(self, name: str, contexts: Sequence[Context]) -> None:
        """Serve each context once, which must reuse nothing, and then once more."""
        self._cold.clear()
        self._serve(f"{name}, first", contexts, expects_reuse=False)
        self._compare_tenants(contexts)
        self._serve(f"{name}, again", contexts, expects_reuse=True)

    def serve_once(self, name: str, contexts: Sequence[Context]) -> None:
        """Serve contexts that must find nothing, as all they could find is fenced."""
        self._cold.clear()
        self._serve(name, contexts, expects_reuse=False)

    def reload_adapters(self, folder: Path) -> None:
        """Replace an adapter's files, then its scale, under its name and path.

        `folder` has the files that the engine serves, by adapter name; those of the
        first are overwritten with those of the second.
        """
        name, other = ADAPTERS
        for file in (folder / other).iterdir():
            shutil.copyfile(file, folder / name / file.name)
        self._engine.reload_adapter(name)
        self.serve_twice("adapter reloaded with other weights", [HOME])
        self._engine.reload_adapter(name, scale=0.5)
        self.serve_once("adapter reloaded at half the scale", [HOME])

    # Private

    def _serve(
        self, name: str, contexts: Sequence[Context], *, expects_reuse: bool
    ) -> None:
        reused = []
        for index, context in enumerate(contexts):
            self._progress(f"engine: {name}, {index + 1} of {len(contexts)}")
            tokens, logits = self._ask(context)
            reused.append(tokens)
            if context in self._cold:
                self.num_compared += 1
                self.num_equal_bits += torch.equal(self._cold[context], logits)
            else:
                self._cold[context] = logits
        self.rounds.append(
            Round(
                name=name,
                expects_reuse=expects_reuse,
                num_requests=len(contexts),
                reused=tuple(reused),
            )
        )

    def _ask(self, context: Context) -> tuple[int, torch.Tensor]:
        self._logits.clear()
        request_id = self._engine.add(
            self._prompt,
            SamplingParams(max_new_tokens=1),
            tenant=context.tenant,
            adapter=context.adapter,
            start_position=context.start_position,
        )
        completions = self._engine.drain()
        if [c.request_id for c in completions] != [request_id] or not self._logits:
            raise InvariantError(f"one request gave {len(completions)} completions")
        return completions[0].counts.reused, self._logits[0]

    def _compare_tenants(self, contexts: Sequence[Context]) -> None:
        for one, other in itertools.combinations(contexts, 2):
            if one.differing(other) == ("tenant",):
                self.num_tenant_pairs += 1
                equal = torch.equal(self._cold[one], self._cold[other])
                self.num_equal_across_tenants += equal

    def _keep(
        self, request_id: RequestId, output_index: int, logits: torch.Tensor
    ) -> None:
        self._logits.append(logits.clone())
