"""The deterministic core: identity, tree, blocks, leases, eviction, scheduler.

Standard library only. Time is an argument, chance is passed in, I/O is somebody
else's: a driver with tensors and one with a cost model can share these decisions.
"""

from stemkv.core.books.cost import CostModel, FittedCost, RooflineCost
from stemkv.core.books.entry import LedgerEntry, MissReason
from stemkv.core.books.ledger import Ledger
from stemkv.core.core import BooksConfig, Core, CoreConfig, Recorder
from stemkv.core.prefix.cache import CacheUsage, Peek, PrefixCache
from stemkv.core.prefix.config import CacheConfig
from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.holds import BlockHolds
from stemkv.core.prefix.identities import Identities
from stemkv.core.prefix.identity import PUBLIC, UNKNOWN, ComputeIdentity, Domain
from stemkv.core.prefix.room import Demand
from stemkv.core.prefix.sharing import Sharing, SharingPolicy
from stemkv.core.prefix.table import BlockCopy, BlockTable, Lease
from stemkv.core.prefix.tokens import Span, TokenIds
from stemkv.core.prefix.watcher import Watcher
from stemkv.core.retention.policies import EvictionConfig
from stemkv.core.retention.policy import EvictionPolicy, Lru, ReuseIndex
from stemkv.core.retention.quota import Quota, QuotaConfig
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.core.schedule.order import Fair, Fcfs, Order
from stemkv.core.schedule.orders import OrderConfig
from stemkv.core.schedule.plan import Chunk, Sample, StepPlan, StepResult
from stemkv.core.schedule.request import FinishReason, Request, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler

__all__ = [
    "BooksConfig",
    "Core",
    "CoreConfig",
    "Recorder",
    "PUBLIC",
    "UNKNOWN",
    "BlockCopy",
    "BlockHolds",
    "BlockTable",
    "CacheConfig",
    "CacheUsage",
    "Chunk",
    "ComputeIdentity",
    "CostModel",
    "Demand",
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
    "Retention",
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
    "Watcher",
]
