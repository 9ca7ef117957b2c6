"""Executes a plan with tensors.

Owns the forward pass: flat packed tokens of all chunks in, logits of the rows to be
sampled out. Knows nothing of requests' parameters, text or time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stemkv.core.schedule.plan import Chunk, StepPlan
from stemkv.core.schedule.request import RequestId
from stemkv.engine.activation import slice_activations
from stemkv.engine.attention import StepLayout
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import (
    AdapterRows,
    LinearFacts,
    StableLinear,
    replace_linears,
)
from stemkv.engine.lora import Lora
from stemkv.engine.numerics import Numerics, fitted
from stemkv.errors import InvariantError, UnsupportedModel

__all__ = ["ModelRunner", "prepare_model"]


def prepare_model(model: nn.Module, numerics: Numerics) -> LinearFacts:
    """Replace the modules that `numerics` asks for, in place; say what was found."""
    facts = replace_linears(model)
    is_float32 = next(model.parameters()).dtype == torch.float32
    if is_float32 and numerics.pads_context:
        slice_activations(model)
    return facts


class ModelRunner:
    """Runs one forward pass per plan over KV memory it shares with nobody else.

    `loras` are the adapters that plans may name; whoever loads them changes the dict.
    """

    def __init__(
        self,
        model: nn.Module,
        kv: KvMemory,
        numerics: Numerics,
        *,
        num_query_heads: int,
        loras: dict[str, Lora] | None = None,
    ) -> None:
        self.kv = kv
        self.loras = {} if loras is None else loras
        self.numerics = fitted(
            numerics, is_float32=kv.dtype == torch.float32, head_dim=kv.head_dim
        )
        self._model = model
        self._num_query_heads = num_query_heads
        self._adapter_rows = next(
            (m.adapter_rows for m in model.modules() if isinstance(m, StableLinear)),
            AdapterRows(),
        )

    def over(self, kv: KvMemory) -> ModelRunner:
        """Return a runner of the same model and adapters over other KV memory."""
        return ModelRunner(
            self._model,
            kv,
            self.numerics,
            num_query_heads=self._num_query_heads,
            loras=self.loras,
        )

    @torch.inference_mode()
    def execute(
        self,
        plan: StepPlan,
        embedded: Mapping[RequestId, EmbeddedPrompt] | None = None,
    ) -> dict[RequestId, torch.Tensor]:
        """Run copies, then all chunks in one forward pass.

        `embedded` has the prompts of those requests whose tokens contain spans.
        Returns the logits row `[vocab_size]` of every chunk that samples, in the
        model's dtype. All other effects are the KV of the chunks' tokens.
        """
        # Copies first and in order: a block freed by a later decision of the same
        # plan may be the source of an earlier copy.
        for copy in plan.copies:
            self.kv.copy(copy)
        if not plan.chunks:
            return {}
        # Requests of one adapter side by side: one product for all their rows.
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.adapter or "")
        self.kv.zero([b for chunk in chunks for b in self._partial_blocks(chunk)])
        layout = StepLayout(chunks, self.kv, self.numerics, self._num_query_heads)
        rows, requests = _sampled_rows(chunks)
        inputs = self._inputs(chunks, {} if embedded is None else embedded)
        self._adapter_rows.ranges = self._ranges(chunks)
        try:
            logits = self._forward(inputs, layout, rows)
        finally:
            self._adapter_rows.ranges = ()
        return {request_id: logits[i] for i, request_id in enumerate(requests)}

    def _inputs(
        self, chunks: Sequence[Chunk], embedded: Mapping[RequestId, EmbeddedPrompt]
    ) -> dict[str, torch.Tensor]:
        """Return what the model calls its inputs: ids, or vectors if there are spans."""
        ids = torch.cat(
            [
                torch.frombuffer(bytearray(chunk.tokens), dtype=torch.int32)
                for chunk in chunks
            ]
        ).long()
        positions = torch.cat(
            [
                torch.arange(c.start_position + c.start, c.start_position + c.end)
                for c in chunks
            ]
        )
        inputs = {"position_ids": positions[None]}
        if bool((ids >= 0).all()):
            return inputs | {"input_ids": ids[None]}
        table: Any = self._model.get_input_embeddings()  # type: ignore[operator]
        vectors = table(ids.clamp_min(0))
        row = 0
        for chunk in chunks:
            is_span = ids[row : row + chunk.num_tokens] < 0
            if bool(is_span.any()):
                prompt = embedded.get(chunk.request_id)
                if prompt is None:
                    raise InvariantError(
                        f"request {chunk.request_id} has spans but no embeddings"
                    )
                own = vectors[row : row + chunk.num_tokens]
                own[is_span] = prompt.rows(chunk.start, chunk.end)
            row += chunk.num_tokens
        return inputs | {"inputs_embeds": vectors[None]}

    def _ranges(
        self, chunks: Sequence[Chunk]
    ) -> tuple[tuple[int, int, Mapping[int, Any]], ...]:
        """Return the rows of each adapter in the step."""
        ranges: list[tuple[int, int, Mapping[int, Any]]] = []
        start = 0
        previous: str | None = None
        for chunk in chunks:
            end = start + chunk.num_tokens
            if chunk.adapter is not None:
                lora = self.loras.get(chunk.adapter)
                if lora is None:
                    raise InvariantError(f"adapter {chunk.adapter} is not loaded")
                if chunk.adapter == previous:
                    ranges[-1] = (ranges[-1][0], end, lora.deltas)
                else:
                    ranges.append((start, end, lora.deltas))
            previous = chunk.adapter
            start = end
        return tuple(ranges)

    def _forward(
        self, inputs: dict[str, torch.Tensor], layout: StepLayout, rows: list[int]
    ) -> torch.Tensor:
        output = self._model(
            **inputs,
            use_cache=False,
            logits_to_keep=torch.tensor(rows or [0]),
            stemkv_layout=layout,
        )
        if layout.num_attended != self.kv.num_layers:
            raise UnsupportedModel(
                f"the model made {layout.num_attended} attention calls in one pass, "
                f"expected one in each of its {self.kv.num_layers} layers; models "
                f"with other kinds of layers are not supported yet"
            )
        logits: torch.Tensor = output.logits[0]
        if len(logits) != len(rows or [0]):
            raise UnsupportedModel(
                f"{type(self._model).__name__} returns {len(logits)} rows of logits "
                f"where {len(rows or [0])} were asked for (`logits_to_keep`)"
            )
        return logits

    def _partial_blocks(self, chunk: Chunk) -> list[int]:
        """Return the block that gets its first tokens here and stays partly empty."""
        index, used = divmod(chunk.end, self.kv.block_size)
        if used == 0 or index * self.kv.block_size < chunk.start:
            return []
        return [chunk.block_ids[index]]


def _sampled_rows(chunks: Sequence[Chunk]) -> tuple[list[int], list[RequestId]]:
    rows, requests = [], []
    end = 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.num_samples:
            rows.append(end - 1)
            requests.append(chunk.request_id)
    return rows, requests
