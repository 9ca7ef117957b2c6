"""Who gets the next chunk: one order per file, over the same queue."""

from stemkv.core.order.base import Order, Pick
from stemkv.core.order.dfs import Dfs
from stemkv.core.order.fair import Fair
from stemkv.core.order.fcfs import Fcfs
from stemkv.core.order.lpm import Lpm
from stemkv.core.order.residual import Residual

__all__ = ["Dfs", "Fair", "Fcfs", "Lpm", "Order", "Pick", "Residual"]
