"""StemKV: prompt prefixes computed once and reused exactly.

`import stemkv` needs the standard library only. These names are the whole public
surface of the core; the engine is `stemkv.engine` and needs the extra `engine`.
"""

from stemkv.core import (
    PUBLIC,
    BlockCopy,
    CacheConfig,
    ComputeIdentity,
    Domain,
    Fcfs,
    Lease,
    Lru,
    PrefixCache,
    RequestSpec,
    Scheduler,
    SchedulerConfig,
    SharingPolicy,
    TokenIds,
)
from stemkv.errors import StemKVError

__all__ = [
    "PUBLIC",
    "BlockCopy",
    "CacheConfig",
    "ComputeIdentity",
    "Domain",
    "Fcfs",
    "Lease",
    "Lru",
    "PrefixCache",
    "RequestSpec",
    "Scheduler",
    "SchedulerConfig",
    "SharingPolicy",
    "StemKVError",
    "TokenIds",
    "__version__",
]

__version__ = "0.1.0"
