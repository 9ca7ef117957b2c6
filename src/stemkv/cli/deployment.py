"""From the words of a command line to costs and blocks: model, device, memory.

Owns which options go together and what they mean. Figures are `sim.catalogue`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stemkv.cli.trace_options import DeploymentOptions
from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError
from stemkv.report import Page
from stemkv.report.wording import memory as spelled
from stemkv.sim.catalogue import device_named, model_named
from stemkv.sim.pricing import memory_left, num_blocks, parse_memory, roofline

__all__ = ["Deployment", "deploy"]

_MODEL, _DEVICE, _KV_DTYPE = "llama-3.1-8b", "h100", "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Prices, and how much memory there is for KV if nobody says."""

    costs: CostModel
    block_size: int
    memory_bytes: int | None  # of one replica, beside the weights; None: unknown

    def blocks_of(
        self, memory: Sequence[str] = (), blocks: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return sizes in blocks from amounts of memory or numbers of blocks."""
        if memory and blocks:
            raise ConfigError("give either --memory or --blocks, not both")
        return tuple(blocks) or tuple(
            self._blocks(parse_memory(each)) for each in memory
        )

    def blocks_left(self, *shares: float) -> tuple[int, ...]:
        """Return these shares of what the device leaves, in blocks."""
        if self.memory_bytes is None:
            raise ConfigError(
                "--cost does not say how much memory there is; give --memory or --blocks"
            )
        return tuple(self._blocks(int(self.memory_bytes * each)) for each in shares)

    def floor_of(self, memory: str, num_blocks: int) -> int:
        """Return retained memory that admission leaves, in blocks.

        Raises `ConfigError` if that is no less than all there is.
        """
        floor = self._blocks(parse_memory(memory))
        if floor >= num_blocks:
            raise ConfigError(
                f"--retained-floor {memory} is {floor:,} blocks and leaves nothing of "
                f"{num_blocks:,} to admit requests into; lower it"
            )
        return floor

    def noted(self, page: Page, sizes: Sequence[int]) -> Page:
        """Return the page with a note if a size, in blocks, is more than there is."""
        largest = max(sizes) * self.block_size * self.costs.bytes_per_token
        if self.memory_bytes is None or largest <= self.memory_bytes:
            return page
        note = (
            f"Note that {spelled(largest)} is more than the device leaves beside the "
            f"weights, {spelled(self.memory_bytes)}."
        )
        return replace(page, paragraphs=[*page.paragraphs, note])

    def _blocks(self, memory_bytes: int) -> int:
        return num_blocks(
            memory_bytes,
            bytes_per_token=self.costs.bytes_per_token,
            block_size=self.block_size,
        )


def deploy(options: DeploymentOptions, *, block_size: int = 16) -> Deployment:
    """Look up or read what the options name."""
    if options.cost is not None:
        from stemkv.sim.fit import read_cost

        return Deployment(
            costs=read_cost(options.cost),
            block_size=block_size,
            memory_bytes=None,
        )
    model = model_named(options.model or _MODEL)
    device = device_named(options.device or _DEVICE)
    return Deployment(
        costs=roofline(
            model,
            device,
            kv_dtype=options.kv_dtype or _KV_DTYPE,
            weight_dtype=options.weight_dtype,
            num_devices=options.devices,
        ),
        block_size=block_size,
        memory_bytes=memory_left(
            model,
            device,
            weight_dtype=options.weight_dtype,
            num_devices=options.devices,
        ),
    )
