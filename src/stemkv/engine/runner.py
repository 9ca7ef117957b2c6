"""Executes a plan with tensors.

Owns the forward pass: flat packed tokens of all chunks in, logits of the rows to be
sampled out. Knows nothing of requests' parameters, text or time.
"""

from __future__ import annotations

import torch
from torch import nn

from stemkv.core.plan import Chunk, StepPlan
from stemkv.core.request import RequestId
from stemkv.engine.activation import slice_activations
from stemkv.engine.attention import StepLayout
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import LinearFacts, replace_linears
from stemkv.engine.numerics import Numerics, fitted
from stemkv.errors import UnsupportedModel

__all__ = ["ModelRunner", "prepare_model"]


def prepare_model(model: nn.Module, numerics: Numerics) -> LinearFacts:
    """Replace the modules that `numerics` asks for, in place; say what was found."""
    facts = replace_linears(model)
    is_float32 = next(model.parameters()).dtype == torch.float32
    if is_float32 and numerics.pads_context:
        slice_activations(model)
    return facts


class ModelRunner:
    """Runs one forward pass per plan over KV memory it shares with nobody else."""

    def __init__(
        self,
        model: nn.Module,
        kv: KvMemory,
        numerics: Numerics,
        *,
        num_query_heads: int,
    ) -> None:
        self.kv = kv
        self.numerics = fitted(
            numerics, is_float32=kv.dtype == torch.float32, head_dim=kv.head_dim
        )
        self._model = model
        self._num_query_heads = num_query_heads

    def over(self, kv: KvMemory) -> ModelRunner:
        """Return a runner of the same model over other KV memory."""
        return ModelRunner(
            self._model, kv, self.numerics, num_query_heads=self._num_query_heads
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> dict[RequestId, torch.Tensor]:
        """Run copies, then all chunks in one forward pass.

        Returns the logits row `[vocab_size]` of every chunk that samples, in the
        model's dtype. All other effects are the KV of the chunks' tokens.
        """
        # Copies first and in order: a block freed by a later decision of the same
        # plan may be the source of an earlier copy.
        for copy in plan.copies:
            self.kv.copy(copy)
        if not plan.chunks:
            return {}
        self.kv.zero([b for chunk in plan.chunks for b in self._partial_blocks(chunk)])
        layout = StepLayout(plan.chunks, self.kv, self.numerics, self._num_query_heads)
        rows, requests = _sampled_rows(plan)
        logits = self._forward(plan, layout, rows)
        return {request_id: logits[i] for i, request_id in enumerate(requests)}

    def _forward(
        self, plan: StepPlan, layout: StepLayout, rows: list[int]
    ) -> torch.Tensor:
        ids = torch.cat(
            [
                torch.frombuffer(bytearray(chunk.tokens), dtype=torch.int32)
                for chunk in plan.chunks
            ]
        ).long()
        positions = torch.cat([torch.arange(c.start, c.end) for c in plan.chunks])
        output = self._model(
            input_ids=ids[None],
            position_ids=positions[None],
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


def _sampled_rows(plan: StepPlan) -> tuple[list[int], list[RequestId]]:
    rows, requests = [], []
    end = 0
    for chunk in plan.chunks:
        end += chunk.num_tokens
        if chunk.num_samples:
            rows.append(end - 1)
            requests.append(chunk.request_id)
    return rows, requests
