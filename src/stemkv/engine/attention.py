"""Paged attention behind transformers' attention interface.

Owns the layout of one step (which rows belong to whom, which blocks they read, under
which mask), built once per step, and the attention call that every layer makes with
it. Knows nothing of scheduling or sampling.

Queries are laid out as rows per KV head: the heads of a group and the tokens of a tile
share the keys, so one `scaled_dot_product_attention` call of
`[1, kv_heads, group * tokens, head_dim]` against `[1, kv_heads, context, head_dim]`
serves them without expanding anything. Prefill chunks are cut at multiples of the
tile; decoding rows of equal context length are batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from stemkv.core.schedule.plan import Chunk
from stemkv.engine.kv import KvMemory
from stemkv.engine.numerics import Numerics
from stemkv.errors import UnsupportedModel

__all__ = ["ATTENTION_NAME", "StepLayout", "attend"]

ATTENTION_NAME = "stemkv"

# Decodes batched into one call must stay in cache once gathered; beyond this many
# key positions a call per sequence is faster (docs/lab/LOG.md).
_MAX_BATCHED_POSITIONS = 8192


@dataclass(frozen=True, slots=True)
class _Tile:
    """Consecutive rows of one sequence that read the same context."""

    start: int  # first row
    end: int  # one past the last
    length: int  # key positions read
    mask: torch.Tensor  # [1, 1, rows (padded), length], added to the scores


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A prefill chunk: its tiles and the blocks of its longest context."""

    block_ids: torch.Tensor  # [num_blocks], int64
    tiles: tuple[_Tile, ...]


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Single rows of several sequences that read contexts of equal length."""

    rows: slice | torch.Tensor  # consecutive rows, or [batch] int64
    batch: int
    block_ids: torch.Tensor  # [batch * num_blocks], int64
    length: int  # key positions read
    mask: torch.Tensor  # [batch, 1, 1, length]


class StepLayout:
    """Everything attention needs to know about one step.

    Rows are the tokens of the chunks in the order given.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        kv: KvMemory,
        numerics: Numerics,
        num_query_heads: int,
    ) -> None:
        self.num_attended = 0  # layers that have used this layout
        self._kv = kv
        self._numerics = numerics
        self._group = num_query_heads // kv.num_kv_heads
        self._slots = torch.cat([self._slots_of(chunk) for chunk in chunks])
        self._sequences: list[_Sequence] = []
        self._decodes: list[_Decodes] = []
        self._decode_rows = self._padded_group()
        self._lay_out(chunks)
        # The common step of nothing but decodes needs no assembling of its output.
        self._is_one_batch = not self._sequences and len(self._decodes) == 1

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Write the rows' KV, then attend.

        `query` is `[1, heads, rows, head_dim]`, `key` and `value` have KV heads
        instead; returns `[1, rows, heads, head_dim]`.
        """
        self.num_attended += 1
        keys, values = self._kv.keys[layer], self._kv.values[layer]
        for slots, new in (
            (self._kv.key_slots[layer], key),
            (self._kv.value_slots[layer], value),
        ):
            slots.index_copy_(0, self._slots, new[0].transpose(0, 1))
        by_row = query[0].transpose(0, 1)  # [rows, heads, head_dim]
        if self._is_one_batch:
            decodes = self._decodes[0]
            return self._attend_decodes(decodes, by_row, keys, values, scaling)[None]
        output = by_row.new_zeros(by_row.shape)
        for decodes in self._decodes:
            output[decodes.rows] = self._attend_decodes(
                decodes, by_row, keys, values, scaling
            )
        for sequence in self._sequences:
            context = [
                pool.index_select(0, sequence.block_ids).flatten(0, 1).transpose(0, 1)
                for pool in (keys, values)
            ]
            for tile in sequence.tiles:
                self._attend_tile(tile, query[0], context, scaling, output)
        return output[None]

    def check_shape(
        self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Raise `UnsupportedModel` if KV is not what the config promises."""
        expected = (self._kv.num_kv_heads, self._kv.head_dim)
        for name, tensor in (("keys", key), ("values", value)):
            found = (tensor.shape[1], tensor.shape[3])
            if found != expected:
                raise UnsupportedModel(
                    f"{type(module).__name__} has {name} of {found[0]} heads of size "
                    f"{found[1]}, the config says {expected[0]} of {expected[1]}; "
                    f"models with other kinds of attention are not supported yet"
                )

    def _attend_tile(
        self,
        tile: _Tile,
        query: torch.Tensor,
        context: list[torch.Tensor],
        scaling: float,
        output: torch.Tensor,
    ) -> None:
        kv_heads, dim = self._kv.num_kv_heads, self._kv.head_dim
        num_tokens = tile.end - tile.start
        num_rows = self._group * num_tokens
        rows = query[:, tile.start : tile.end].reshape(kv_heads, num_rows, dim)
        rows = self._pad(rows)
        keys, values = context
        attended = scaled_dot_product_attention(
            rows[None],
            keys[None, :, : tile.length],
            values[None, :, : tile.length],
            attn_mask=tile.mask,
            scale=scaling,
        )
        output[tile.start : tile.end] = (
            attended[0, :, :num_rows]
            .reshape(kv_heads * self._group, num_tokens, dim)
            .transpose(0, 1)
        )

    def _attend_decodes(
        self,
        decodes: _Decodes,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return `[batch, heads, head_dim]` for the group's rows of `query`."""
        kv_heads, dim = self._kv.num_kv_heads, self._kv.head_dim
        rows = query[decodes.rows].reshape(decodes.batch, kv_heads, self._group, dim)
        if self._decode_rows is not None:
            rows = rows.index_select(2, self._decode_rows)
        own_keys, own_values = (
            pool.index_select(0, decodes.block_ids)
            .view(decodes.batch, -1, kv_heads, dim)[:, : decodes.length]
            .transpose(1, 2)
            for pool in (keys, values)
        )
        attended = scaled_dot_product_attention(
            rows, own_keys, own_values, attn_mask=decodes.mask, scale=scaling
        )
        return attended[:, :, : self._group].reshape(decodes.batch, -1, dim)

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        """Pad the second last axis with real copies of its first row (R3, R4)."""
        num_rows = rows.shape[-2]
        missing = self._numerics.num_padded_rows(num_rows) - num_rows
        if missing == 0:
            return rows
        return torch.cat([rows, *[rows[..., :1, :]] * missing], dim=-2)

    # Building

    def _lay_out(self, chunks: Sequence[Chunk]) -> None:
        single: dict[int, list[tuple[int, Chunk]]] = {}
        row = 0
        for chunk in chunks:
            if chunk.num_tokens == 1:
                length = self._numerics.context_length(chunk.end)
                single.setdefault(length, []).append((row, chunk))
            else:
                self._sequences.append(self._sequence(row, chunk))
            row += chunk.num_tokens
        for length, members in single.items():
            batch = max(1, _MAX_BATCHED_POSITIONS // length)
            for start in range(0, len(members), batch):
                self._decodes.append(
                    self._decode_batch(length, members[start : start + batch])
                )

    def _sequence(self, row: int, chunk: Chunk) -> _Sequence:
        tile = self._numerics.tile
        tiles = []
        start = chunk.start
        while start < chunk.end:
            end = min(chunk.end, (start // tile + 1) * tile)
            length = self._numerics.context_length(end)
            first = row + start - chunk.start
            mask = self._mask(start, end, length)
            tiles.append(_Tile(first, first + end - start, length, mask))
            start = end
        return _Sequence(self._padded_block_ids(chunk, length), tuple(tiles))

    def _padded_group(self) -> torch.Tensor | None:
        """Return the heads of a group with copies that pad it; `None` if it fits."""
        missing = self._numerics.num_padded_rows(self._group) - self._group
        if missing == 0:
            return None
        return torch.tensor([*range(self._group), *[0] * missing])

    def _decode_batch(self, length: int, members: list[tuple[int, Chunk]]) -> _Decodes:
        rows = [row for row, _ in members]
        is_consecutive = rows == list(range(rows[0], rows[0] + len(rows)))
        positions = torch.tensor([chunk.start for _, chunk in members])
        mask = torch.zeros(len(members), 1, 1, length, dtype=self._kv.dtype)
        beyond = torch.arange(length)[None] > positions[:, None]
        mask[:, 0, 0].masked_fill_(beyond, float("-inf"))
        return _Decodes(
            rows=(
                slice(rows[0], rows[0] + len(rows))
                if is_consecutive
                else torch.tensor(rows)
            ),
            batch=len(rows),
            block_ids=torch.cat(
                [self._padded_block_ids(chunk, length) for _, chunk in members]
            ),
            length=length,
            mask=mask,
        )

    def _mask(self, start: int, end: int, length: int) -> torch.Tensor:
        """Return the additive causal mask of query positions `start … end - 1`."""
        num_rows = self._group * (end - start)
        positions = torch.arange(start, end).repeat(self._group)
        missing = self._numerics.num_padded_rows(num_rows) - num_rows
        if missing:
            positions = torch.cat([positions, positions[:1].repeat(missing)])
        mask = torch.zeros(1, 1, len(positions), length, dtype=self._kv.dtype)
        # Only the columns from `start` on can lie beyond a query.
        beyond = torch.arange(start, length)[None] > positions[:, None]
        mask[0, 0, :, start:].masked_fill_(beyond, float("-inf"))
        return mask

    def _padded_block_ids(self, chunk: Chunk, length: int) -> torch.Tensor:
        """Return the blocks of the context, padded with the zero block."""
        num_blocks = -(-length // self._kv.block_size)
        ids = torch.full((num_blocks,), self._kv.zero_block)
        # Only blocks with KV: what an earlier owner left in later ones of the table is
        # masked too, but need not be finite.
        own = _block_ids(chunk)[: min(num_blocks, -(-chunk.end // self._kv.block_size))]
        ids[: len(own)] = own
        return ids

    def _slots_of(self, chunk: Chunk) -> torch.Tensor:
        positions = torch.arange(chunk.start, chunk.end)
        size = self._kv.block_size
        return _block_ids(chunk)[positions // size] * size + positions % size


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    *,
    stemkv_layout: StepLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,  # transformers passes what any of its attention functions may want
) -> tuple[torch.Tensor, None]:
    """Attention function registered with transformers under `ATTENTION_NAME`."""
    unsupported = {
        "sliding_window": sliding_window,
        "softcap": softcap,
        "s_aux": s_aux,
        "position_bias": position_bias,
        "attention_mask": attention_mask,
    }
    for name, given in unsupported.items():
        if given is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} attends with {name}, which is not supported "
                f"yet; use a decoder model with plain causal attention"
            )
    if stemkv_layout is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass keyword arguments on to its "
            f"attention, so the paged KV cannot reach it"
        )
    stemkv_layout.check_shape(module, key, value)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]  # set by transformers
    return stemkv_layout.attend(layer, query, key, value, scaling), None


def _block_ids(chunk: Chunk) -> torch.Tensor:
    """Return the chunk's block ids as int64, which indexing needs."""
    # `bytearray`: torch wants a writable buffer even where it only reads.
    return torch.frombuffer(bytearray(chunk.block_ids), dtype=torch.int32).long()
