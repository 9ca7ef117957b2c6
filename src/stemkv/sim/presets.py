"""Settings of a core as deployments of some size have them. Quick to import."""

from __future__ import annotations

from typing import Final

from stemkv.core.core import BooksConfig, CoreConfig
from stemkv.core.schedule.config import SchedulerConfig

__all__ = ["LARGE"]

# A large GPU with a mid-sized model; its books remember everything.
LARGE: Final = CoreConfig(
    scheduler=SchedulerConfig(token_budget=8192, max_num_running=256),
    books=BooksConfig(history=None, idle_accounts=None),
)
