"""StemKV: prompt prefixes computed once and reused exactly.

`import stemkv` needs the standard library only. These names are what somebody needs who
puts the core into a scheduler or an engine of his own; the engine that comes with it is
`stemkv.engine` and needs the extra `engine`.
"""

from stemkv.core import (
    PUBLIC,
    UNKNOWN,
    BlockCopy,
    CacheConfig,
    Chunk,
    ComputeIdentity,
    Core,
    CoreConfig,
    Demand,
    Domain,
    EvictionConfig,
    Fcfs,
    FinishReason,
    Hints,
    Lease,
    Lru,
    OrderConfig,
    PrefixCache,
    QuotaConfig,
    RequestSpec,
    Retention,
    Sample,
    Scheduler,
    SchedulerConfig,
    SharingPolicy,
    StepPlan,
    StepResult,
    TokenIds,
)
from stemkv.errors import StemKVError

__all__ = [
    "PUBLIC",
    "UNKNOWN",
    "BlockCopy",
    "CacheConfig",
    "Chunk",
    "ComputeIdentity",
    "Core",
    "CoreConfig",
    "Demand",
    "Domain",
    "EvictionConfig",
    "Fcfs",
    "FinishReason",
    "Hints",
    "Lease",
    "Lru",
    "OrderConfig",
    "PrefixCache",
    "QuotaConfig",
    "RequestSpec",
    "Retention",
    "Sample",
    "Scheduler",
    "SchedulerConfig",
    "SharingPolicy",
    "StemKVError",
    "StepPlan",
    "StepResult",
    "TokenIds",
    "__version__",
]

__version__ = "0.1.0"
