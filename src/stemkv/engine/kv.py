"""The tensors behind block ids.

Owns KV memory and copies inside it. Knows nothing of requests, tokens or states: which
block means what is the core's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stemkv.core.prefix.table import BlockCopy

__all__ = ["KvMemory"]


class KvMemory:
    """Keys and values of all layers, in blocks.

    Per layer, `keys[layer]` and `values[layer]` are contiguous tensors of shape
    `[num_blocks + 1, block_size, num_kv_heads, head_dim]`. The last block is never
    written and always zero: contexts are padded with it. Starts zeroed, because
    masked slots are still multiplied and 0 x NaN is NaN.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        shape = (num_layers, 2, num_blocks + 1, block_size, num_kv_heads, head_dim)
        self._storage = torch.zeros(shape, dtype=dtype)
        self.keys = [layer[0] for layer in self._storage]
        self.values = [layer[1] for layer in self._storage]
        # The same memory by slot: [(num_blocks + 1) * block_size, kv_heads, head_dim].
        self.key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self.value_slots = [values.flatten(0, 1) for values in self.values]

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        return len(self.keys)

    @property
    def zero_block(self) -> int:
        """Id of the block that is always zero."""
        return self.num_blocks

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV per token, over all layers."""
        per_layer = 2 * self.num_kv_heads * self.head_dim
        return self.num_layers * per_layer * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of KV per block, over all layers."""
        return self.bytes_per_token * self.block_size

    def like(self, num_blocks: int) -> KvMemory:
        """Return fresh memory of the same layout with other blocks."""
        return KvMemory(
            num_layers=self.num_layers,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
        )

    def copy(self, copy: BlockCopy) -> None:
        """Copy the leading slots of a block in all layers; zero the target's rest."""
        n = copy.num_tokens
        self._storage[:, :, copy.target, :n] = self._storage[:, :, copy.source, :n]
        self._storage[:, :, copy.target, n:] = 0

    def zero(self, block_ids: Sequence[int]) -> None:
        """Clear blocks in all layers.

        Done when a block gets its first tokens and will not be full: what an earlier
        owner left there is masked, but must be finite.
        """
        if block_ids:
            self._storage.index_fill_(2, torch.tensor(block_ids), 0)

    def read(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return a copy of KV, `[layers, 2, num_tokens, kv_heads, head_dim]`."""
        blocks = self._storage.index_select(2, torch.tensor(block_ids))
        return blocks.flatten(2, 3)[:, :, :num_tokens].clone()
