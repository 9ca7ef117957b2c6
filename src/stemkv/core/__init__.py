"""The deterministic core: identity, tree, blocks, leases, eviction, scheduler.

Standard library only. Time is an argument, chance is passed in, I/O is somebody
else's: a driver with tensors and one with a cost model can share these decisions.
"""

from stemkv.core.cache import CacheUsage, Peek, PrefixCache
from stemkv.core.config import CacheConfig, SchedulerConfig
from stemkv.core.cost import CostModel, FittedCost, RooflineCost
from stemkv.core.entry import LedgerEntry, MissReason
from stemkv.core.eviction import EvictionPolicy, Lru, ReuseIndex
from stemkv.core.hints import Hints
from stemkv.core.identities import Identities
from stemkv.core.identity import PUBLIC, UNKNOWN, ComputeIdentity, Domain
from stemkv.core.ledger import Ledger
from stemkv.core.order import Fair, Fcfs, Order
from stemkv.core.orders import OrderConfig
from stemkv.core.plan import Chunk, Sample, StepPlan, StepResult
from stemkv.core.policies import EvictionConfig
from stemkv.core.quota import Quota, QuotaConfig
from stemkv.core.request import FinishReason, Request, RequestId, RequestSpec
from stemkv.core.scheduler import Scheduler
from stemkv.core.sharing import Sharing, SharingPolicy
from stemkv.core.table import BlockCopy, BlockTable, Lease
from stemkv.core.tokens import Span, TokenIds

__all__ = [
    "PUBLIC",
    "UNKNOWN",
    "BlockCopy",
    "BlockTable",
    "CacheConfig",
    "CacheUsage",
    "Chunk",
    "ComputeIdentity",
    "CostModel",
    "Domain",
    "EvictionConfig",
    "EvictionPolicy",
    "Fair",
    "Fcfs",
    "FinishReason",
    "FittedCost",
    "Hints",
    "Identities",
    "Lease",
    "Ledger",
    "LedgerEntry",
    "Lru",
    "MissReason",
    "Order",
    "OrderConfig",
    "Peek",
    "PrefixCache",
    "Quota",
    "QuotaConfig",
    "Request",
    "RequestId",
    "RequestSpec",
    "ReuseIndex",
    "RooflineCost",
    "Sample",
    "Scheduler",
    "SchedulerConfig",
    "Sharing",
    "SharingPolicy",
    "Span",
    "StepPlan",
    "StepResult",
    "TokenIds",
]
