"""What adapters cost: a step with none, one and four of them in the batch.

`python -m bench.adapters [--json FILE] [--check] [--quick]`

Process CPU time, one thread, bfloat16, the embedded model, class `exact`, nothing
reused. Adapters have rank 16 on all seven linears of each layer. A decode step of eight
requests at a context of 64, and a prefill of 512 tokens. The peer, where `peft` is
importable, is transformers with peft's own mixed batches (`adapter_names`).
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from rich.progress import Progress

from bench.report import Bar, finish, parser
from stemkv.core.core import CoreConfig
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.config import SchedulerConfig
from stemkv.engine import Engine, EngineConfig, LoadedModel, SamplingParams, load_model
from stemkv.engine.linear import linear_places

__all__ = ["main"]

_RANK = 16
_BATCH = 8
_CONTEXT = 64
_PREFILL = 512
_STEPS = 16
_CASES = (0, 1, 4)  # adapters in the batch

# Seconds of CPU of a (decode step, prefill) with so many adapters.
_Measure = Callable[[int], tuple[float, float]]


def main() -> int:
    """Measure ours and the peer in turn, print ratios to no adapter."""
    options = parser(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    console = Console()
    loaded = load_model(dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / f"adapter{i}" for i in range(max(_CASES))]
        peer = _peer(Path(loaded.config._name_or_path), folders)
        engine = Engine(
            loaded,
            EngineConfig(
                core=CoreConfig(
                    scheduler=SchedulerConfig(token_budget=4096, max_num_running=_BATCH)
                ),
                reuses_prefixes=False,
                num_threads=1,
                kv_memory_bytes=1 << 28,
            ),
        )
        if peer is None:
            for seed, folder in enumerate(folders):
                _write(folder, loaded, seed)
        for folder in folders:
            engine.load_adapter(folder.name, folder)
        measures: dict[str, _Measure] = {"stemkv": _ours(engine)}
        if peer is not None:
            measures["peft"] = peer
        num_rounds = 2 if options.quick else 9
        found = _measure_all(measures, num_rounds, console)
    facts = {
        "threads": "1",
        "rounds": f"{num_rounds}, taking turns, medians of process CPU time",
        "peer": "peft, adapter_names" if peer is not None else "none: peft is missing",
    }
    return finish("bench.adapters", _bars(found), options, facts=facts)


def _ours(engine: Engine) -> _Measure:
    rng = random.Random(0)

    def run(num_adapters: int, num_prompt: int, batch: int, num_new: int) -> float:
        for index in range(batch):
            ids = [rng.randrange(engine.loaded.vocab_size) for _ in range(num_prompt)]
            name = f"adapter{index % num_adapters}" if num_adapters else None
            params = SamplingParams(max_new_tokens=num_new, ignore_eos=True)
            engine.add(TokenIds.from_ids(ids), params, adapter=name)
        start = time.process_time()
        engine.drain()
        return time.process_time() - start

    def measure(num_adapters: int) -> tuple[float, float]:
        first = run(num_adapters, _CONTEXT, _BATCH, 1)
        more = run(num_adapters, _CONTEXT, _BATCH, 1 + _STEPS)
        batch = max(1, num_adapters)
        prefill = run(num_adapters, _PREFILL // batch, batch, 1)
        return (more - first) / _STEPS, prefill

    return measure


def _peer(folder: Path, adapters: list[Path]) -> _Measure | None:
    """Return transformers with peft, which also writes the adapters; or `None`."""
    if importlib.util.find_spec("peft") is None:
        return None
    import peft
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = peft.LoraConfig(
        r=_RANK,
        lora_alpha=2 * _RANK,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config, adapter_name=adapters[0].name)
    for path in adapters[1:]:
        wrapped.add_adapter(path.name, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 0.02)
    for path in adapters:
        wrapped.save_pretrained(path.parent, selected_adapters=[path.name])
    wrapped.eval()
    vocabulary = int(model.config.vocab_size)

    @torch.inference_mode()
    def measure(num_adapters: int) -> tuple[float, float]:
        def names(batch: int) -> list[str]:
            if num_adapters == 0:
                return ["__base__"] * batch
            return [f"adapter{i % num_adapters}" for i in range(batch)]

        cache = DynamicCache(config=model.config)
        ids = torch.randint(vocabulary, (_BATCH, _CONTEXT), generator=generator)
        extra = {"adapter_names": names(_BATCH)}
        wrapped(input_ids=ids, past_key_values=cache, logits_to_keep=1, **extra)
        token = torch.randint(vocabulary, (_BATCH, 1), generator=generator)
        start = time.process_time()
        for _ in range(_STEPS):
            wrapped(input_ids=token, past_key_values=cache, logits_to_keep=1, **extra)
        decode = (time.process_time() - start) / _STEPS
        batch = max(1, num_adapters)
        ids = torch.randint(vocabulary, (batch, _PREFILL // batch), generator=generator)
        start = time.process_time()
        wrapped(input_ids=ids, logits_to_keep=1, adapter_names=names(batch))
        return decode, time.process_time() - start

    return measure


def _measure_all(
    measures: dict[str, _Measure], num_rounds: int, console: Console
) -> dict[tuple[str, int], tuple[float, float]]:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with Progress(console=console) as progress:
        task = progress.add_task("rounds", total=(1 + num_rounds) * len(_CASES))
        for number in range(1 + num_rounds):  # the first warms up
            for case in _CASES:
                for name, measure in measures.items():
                    seconds = measure(case)
                    if number:
                        found.setdefault((name, case), []).append(seconds)
                progress.advance(task)
    return {
        key: (
            statistics.median(decode for decode, _ in values),
            statistics.median(prefill for _, prefill in values),
        )
        for key, values in found.items()
    }


def _bars(found: dict[tuple[str, int], tuple[float, float]]) -> list[Bar]:
    bars = []
    for (name, case), (decode, prefill) in found.items():
        base = found[name, 0]
        for what, value, without in (
            (f"decode step, batch {_BATCH}", decode, base[0]),
            (f"prefill of {_PREFILL}", prefill, base[1]),
        ):
            title = f"{name}: {what}, {case} adapters"
            bars.append(Bar(name=title, measured=1000 * value, unit="ms"))
            if case:
                bars.append(Bar(name="  to none", measured=value / without, unit="×"))
    return bars


def _write(folder: Path, loaded: LoadedModel, seed: int) -> None:
    """Write a random adapter in PEFT's format, when peft is not there to do it."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, place in linear_places(loaded.model).items():
        if name != "lm_head":
            key = f"base_model.model.{name}"
            shapes = (
                ("A", (_RANK, place.linear.in_features)),
                ("B", (place.end - place.start, _RANK)),
            )
            for matrix, shape in shapes:
                values = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{key}.lora_{matrix}.weight"] = values
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.exit(main())
