"""The timed replay of `bench.replay`, done by AISimulate.

Runs under the interpreter that STEMKV_AISIMULATE_PYTHON names and prints one line of
JSON. Imports nothing of StemKV. Written against 0.13.0.dev202610270000000085, the last
of 0.13 whose wheel PyPI has: what PyPI calls 0.13.0 fetches its wheel from elsewhere.

The deployment is one aggregated vLLM worker per replica, Qwen3-32B-FP8 on one H200
each, requests dealt round robin as they arrive. The blocks are what its memory estimate
leaves; `settings` in the output names all that a like replay needs. Two rules differ
from ours: a prompt longer than the model's context is counted but never run, and an
output is cut at that context. `hit_rate` is of first admissions, as ours is;
`hit_rate_with_returns` also counts what a preempted request finds of its own.

Arguments: trace (Mooncake's JSONL, not compressed), replicas (1), block size (64, its
default for vLLM).
"""

from __future__ import annotations

import json
import sys
import time

from aisimulate import CorePredictionConfig, EngineReplayRunnerFactory, __version__
from aisimulate import ReplayOutputRequirements as Outputs
from aisimulate import _runtime as native
from aisimulate.predict import PredictionResult, run_prediction

UNIT_SIZE = 512  # tokens per hash id of the trace
TOKEN_BUDGET = 8192
MAX_NUM_RUNNING = 256


def main() -> None:
    """Replay the trace once and print what it took and what came out."""
    if not 2 <= len(sys.argv) <= 4:
        raise SystemExit("arguments: trace [replicas [block size]]")
    path, *numbers = sys.argv[1:]
    num_replicas, block_size = [*map(int, numbers), *(1, 64)[len(numbers) :]]
    runtime = TimedRuntime()
    done = run_prediction(
        config(path, num_replicas, block_size),
        stack="engine",
        runner_factory=EngineReplayRunnerFactory(runtime=runtime),
        output_requirements=Outputs(
            include_raw_report=True, capture_memory_diagnostics=True
        ),
    )
    print(json.dumps(result(done, runtime.seconds)))


class TimedRuntime:
    """AISimulate's compiled replay, and the CPU seconds its one thread took."""

    seconds = 0.0

    def run_replay_json(self, spec: str) -> str:
        """Replay; reading the trace and the tables of kernel times included."""
        start = time.process_time()
        report = native.run_replay_json(spec)
        self.seconds = time.process_time() - start
        return report


def config(path: str, num_replicas: int, block_size: int) -> CorePredictionConfig:
    """Return the deployment, with arrivals at the trace's own times."""
    worker = {
        "parallelism": {"replicas": num_replicas},
        "scheduler": {
            "max_batched_tokens": TOKEN_BUDGET,
            "max_sequences": MAX_NUM_RUNNING,
        },
        "kv_cache": {"block_size": block_size},
    }
    return CorePredictionConfig.model_validate(
        {
            "traffic": {
                "source": {
                    "type": "trace",
                    "paths": [path],
                    "format": "mooncake",
                    "block_size": UNIT_SIZE,
                },
                "load": {"type": "trace_timestamps"},
            },
            "engine": {
                "mode": "aggregated",
                "model": "Qwen/Qwen3-32B-FP8",
                "hardware": "h200_sxm",
                "backend": "vllm",
                "workers": {"aggregated": worker},
            },
        }
    )


def result(done: PredictionResult, simulation_s: float) -> dict[str, object]:
    """Return times (CPU seconds unless named wall), the settings and the summary."""
    summary = done.summary
    memory = done.native["memory_diagnostics"]["aggregated"]
    worker = done.replay_spec.backend_deployment.agg_engine_args
    if not summary["completed_requests"]:
        raise SystemExit("AISimulate completed no request: there is nothing to compare")
    return {
        "version": __version__,
        "simulation_s": simulation_s,
        "simulation_wall_s": summary["wall_time_ms"] / 1000,  # without the reading
        "process_s": time.process_time(),  # imports and its memory estimate included
        "requests": summary["num_requests"],
        "completed": summary["completed_requests"],
        "prompt_tokens": summary["total_input_tokens"],  # of completed requests
        "output_tokens": summary["total_output_tokens"],
        "settings": {
            "model": "qwen3-32b",
            "weight_dtype": "fp8",
            "kv_dtype": memory["kvcache_quant_mode"],
            "device": "h200",
            "num_replicas": done.replay_spec.backend_deployment.num_workers,
            "block_size": worker["block_size"],
            "num_blocks": memory["estimated_num_gpu_blocks"],  # of one replica
            "kv_bytes_per_token": memory["kv_size_per_token_bytes"],
            "token_budget": worker["max_num_batched_tokens"],
            "max_num_running": worker["max_num_seqs"],
            "max_request_tokens": worker["max_model_len"],
        },
        "end_s": summary["duration_ms"] / 1000,
        "hit_rate": summary["first_admission_prefix_cache_reused_ratio"],
        "hit_rate_with_returns": summary["prefix_cache_reused_ratio"],
        "ttft_p50_s": summary["median_ttft_ms"] / 1000,
        "ttft_mean_s": summary["mean_ttft_ms"] / 1000,
        "ttft_p99_s": summary["p99_ttft_ms"] / 1000,
        "tpot_p50_s": summary["median_tpot_ms"] / 1000,
    }


if __name__ == "__main__":
    main()
