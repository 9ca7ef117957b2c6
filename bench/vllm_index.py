"""The scenario of `bench.index`, done by vLLM's own cache manager.

Runs under the interpreter that STEMKV_VLLM_PYTHON names and prints one line of JSON
with the CPU microseconds of every repeat: a call of milliseconds is interrupted too
often for the wall clock. Imports nothing of StemKV. vLLM publishes inside
`allocate_slots`, so its steps do the work of acquire, publish and release.

Arguments: prefix tokens, new tokens, block size, cached sequences, repeats.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request

VOCABULARY = 131_072


def main() -> None:
    """Fill the cache, admit never-seen requests behind the prefix, print times."""
    num_prefix, num_new, block_size, num_sequences, num_repeats = map(int, sys.argv[1:])
    manager = build_manager(num_prefix, num_new, block_size, num_sequences)
    hash_name = "sha256"  # vLLM's default
    hash_block = get_hash_fn_by_name(hash_name)
    init_none_hash(hash_block)
    hasher = get_request_block_hasher(block_size, hash_block)
    rng = random.Random(1)
    prefix = random_ids(rng, num_prefix)
    rows = []
    for index in range(num_sequences + num_repeats):
        prompt = prefix + random_ids(rng, num_new)
        row = admit(manager, hasher, str(index), prompt)
        if index >= num_sequences:
            rows.append(row)
    result = {"version": vllm.__version__, "hash": hash_name, "rows": rows}
    print(json.dumps(result))


def build_manager(
    num_prefix: int, num_new: int, block_size: int, num_sequences: int
) -> KVCacheManager:
    """Return a manager that holds the prefix and the last `num_sequences` suffixes."""
    num_suffix_blocks = (num_prefix + num_new) // block_size - num_prefix // block_size
    num_blocks = num_prefix // block_size + num_sequences * num_suffix_blocks + 33
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=2 * (num_prefix + num_new),
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def admit(
    manager: KVCacheManager, hasher: Callable, request_id: str, prompt: list[int]
) -> dict[str, float]:
    """Make, match, allocate (which publishes) and free one request."""
    params = SamplingParams(max_tokens=1)
    start = time.thread_time_ns()
    request = Request(request_id, prompt, params, None, block_hasher=hasher)
    made = time.thread_time_ns()
    blocks, num_cached, _ = manager.get_computed_blocks(request)
    matched = time.thread_time_ns()
    allocated = manager.allocate_slots(
        request, len(prompt) - num_cached, num_cached, blocks
    )
    manager.free(request)
    end = time.thread_time_ns()
    if allocated is None:
        raise SystemExit("vLLM found no blocks: the scenario is not the same")
    return {
        "request": (made - start) / 1000,
        "match": (matched - made) / 1000,
        "pool": (end - matched) / 1000,
        "cached": num_cached,
    }


def random_ids(rng: random.Random, num_tokens: int) -> list[int]:
    """Return seeded token ids."""
    return [rng.randrange(VOCABULARY) for _ in range(num_tokens)]


if __name__ == "__main__":
    main()
