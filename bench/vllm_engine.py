"""Answers `bench.engine` with vLLM's CPU seconds. Run by an interpreter that has vLLM.

`PYTHON -m bench.vllm_engine MODEL_FOLDER eager|compiled`, then one JSON list
`[num_prompt_tokens, batch, num_new_tokens]` per line on standard input; each is
answered with one line of process CPU seconds. Needs neither torch settings nor
environment from the caller, and nothing of StemKV.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time

# Before vLLM is imported: one process, one thread, no reporting.
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_TARGET_DEVICE="cpu",
)


def main() -> None:
    """Start vLLM, say so, and answer until standard input ends."""
    # vLLM prints to standard output at will; the answers get it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import vllm

    torch.set_num_threads(1)
    folder, mode = sys.argv[1:]
    llm = vllm.LLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=mode == "eager",
        max_model_len=4096,
        block_size=32,
        enable_prefix_caching=False,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
    )
    rng = random.Random(0)
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        num_prompt, batch, num_new = json.loads(line)
        prompts = [
            {"prompt_token_ids": [rng.randrange(3, 49000) for _ in range(num_prompt)]}
            for _ in range(batch)
        ]
        params = vllm.SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        start = time.process_time()
        llm.generate(prompts, params, use_tqdm=False)
        print(time.process_time() - start, file=answers, flush=True)


if __name__ == "__main__":
    main()
