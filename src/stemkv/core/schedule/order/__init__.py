"""Who gets the next chunk: one order per file, over the same queue."""

from stemkv.core.schedule.order.base import Order, Pick
from stemkv.core.schedule.order.dfs import Dfs
from stemkv.core.schedule.order.fair import Fair
from stemkv.core.schedule.order.fcfs import Fcfs
from stemkv.core.schedule.order.lpm import Lpm
from stemkv.core.schedule.order.residual import Residual

__all__ = ["Dfs", "Fair", "Fcfs", "Lpm", "Order", "Pick", "Residual"]
