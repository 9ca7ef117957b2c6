"""One trace under many configurations, several at a time.

Owns the grid and the worker processes. A cell is one replay, with a clock (`timed_cell`)
or without (`UntimedPlay`). Cells come in the order of the grid, whoever is done first.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from time import process_time

from stemkv.core.books.cost import CostModel
from stemkv.errors import ConfigError, StemKVError
from stemkv.measure.results import GIB, ReplayResult, SweepCell
from stemkv.sim.config import CLAIRVOYANT, ReplayConfig
from stemkv.sim.replay import replay
from stemkv.sim.sharing import SharingRule
from stemkv.sim.trace import Trace
from stemkv.sim.untimed import Untimed

__all__ = [
    "Grid",
    "Play",
    "UntimedPlay",
    "is_hinted",
    "measured_cell",
    "sweep",
    "timed_cell",
]

# How one configuration becomes a cell. Of a module, as workers import it.
Play = Callable[[Trace, ReplayConfig, CostModel], SweepCell]
_Done = Generator[
    tuple[int, SweepCell], None, None
]  # a configuration's place and its cell

_GONE = (EOFError, ConnectionError)  # the other end of a pipe has closed it


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What a sweep varies; every combination is a configuration."""

    num_blocks: tuple[int, ...]
    evictions: tuple[str, ...] = ("reuse_index",)
    orders: tuple[str, ...] = ("fair",)
    sharings: tuple[str, ...] = ("isolated",)

    def configs(self, base: ReplayConfig) -> tuple[ReplayConfig, ...]:
        """Return `base` with each combination, sizes changing slowest."""
        return tuple(
            replace(
                base.sized(size).evicting(eviction).ordering(order),
                sharing=replace(base.sharing, name=sharing),
            )
            for size, eviction, order, sharing in product(
                self.num_blocks, self.evictions, self.orders, self.sharings
            )
        )

    def rules(self, base: ReplayConfig) -> tuple[SharingRule, ...]:
        """Return the sharing rules of the configurations."""
        return tuple(replace(base.sharing, name=name) for name in self.sharings)


def measured_cell(trace: Trace, config: ReplayConfig, costs: CostModel) -> SweepCell:
    """Replay with the clock, and measure the CPU time of the scheduler."""
    return _cell(trace, config, replay(trace, config, costs, cpu_clock=process_time))


def timed_cell(trace: Trace, config: ReplayConfig, costs: CostModel) -> SweepCell:
    """Replay with the clock and keep the headline numbers."""
    return _cell(trace, config, replay(trace, config, costs))


def _cell(trace: Trace, config: ReplayConfig, result: ReplayResult) -> SweepCell:
    ttft = next((each for each in result.latencies if each.name == "TTFT"), None)
    return SweepCell(
        num_blocks=config.num_blocks,
        gib=result.capacity_gib,
        eviction=config.eviction,
        order=config.core.order.name,
        sharing=config.sharing.name,
        num_refused=result.num_refused,
        # Not of those that ran: memory too small for long prompts must not look better
        # for leaving them out.
        hit_rate=result.tokens.reused / result.trace.prompt_tokens,
        saved_s=result.saved.seconds,
        seconds_per_gib_s=result.saved.seconds_per_gib_s,
        ttft_p50_s=None if ttft is None else ttft.p50,
        ttft_p99_s=None if ttft is None else ttft.p99,
        goodput_rps=result.goodput_rps,
        num_evicted_blocks=result.num_evicted_blocks,
        num_refused_blocks=result.num_refused_blocks,
        regret_tokens=result.regret_tokens,
        num_preemptions=result.num_preemptions,
        is_hinted=config.hints.says_something(trace),
        worst_tenant_ttft_p99_s=max(
            (each.ttft.p99 for each in result.tenants if each.ttft is not None),
            default=None,
        ),
        scheduling=result.scheduling,
    )


def is_hinted(trace: Trace, config: ReplayConfig) -> bool:
    """Whether eviction is told anything of the future in a replay without a clock."""
    return bool(config.untimed_lookahead) or config.hints.says_something(trace)


class UntimedPlay:
    """Replays one request after another; what needs a clock is missing.

    Admission order means nothing here. With `measures` the cells say how long their
    policies thought. Each process has its own.
    """

    def __init__(self, *, measures: bool = False) -> None:
        self._untimed = Untimed(measures=measures)

    def __call__(
        self, trace: Trace, config: ReplayConfig, costs: CostModel
    ) -> SweepCell:
        """Return the cell of one configuration; units count as the blocks they fill."""
        run = self._untimed.replay(trace, config, costs)
        found, unit_size = run.found, trace.unit_size
        assert found.hits.saved_s is not None, "a cost model was given"
        block_bytes = config.block_size * costs.bytes_per_token
        return SweepCell(
            num_blocks=config.num_blocks,
            gib=config.num_blocks * block_bytes / GIB,
            eviction=config.eviction,
            order=config.core.order.name,
            sharing=config.sharing.name,
            num_refused=found.num_too_long,
            hit_rate=found.hits.hit_rate,
            saved_s=found.hits.saved_s,
            seconds_per_gib_s=math.nan,
            ttft_p50_s=None,
            ttft_p99_s=None,
            goodput_rps=None,
            num_evicted_blocks=found.num_evicted_units * unit_size // config.block_size,
            num_refused_blocks=None,
            regret_tokens=found.regret_tokens,
            num_preemptions=0,
            worst_tenant_ttft_p99_s=None,
            is_hinted=config.eviction != CLAIRVOYANT and is_hinted(trace, config),
            policy_cpu_s=run.policy_cpu_s,
        )


def sweep(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    costs: CostModel,
    play: Play,
    *,
    num_jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[SweepCell, ...]:
    """Return the cells of all configurations, in their order.

    With more than one job, processes of their own play them; each is sent the trace
    once. However this ends, by Ctrl-C as well, they have ended too.
    """
    if num_jobs < 1:
        raise ConfigError(f"num_jobs must be at least 1, got {num_jobs}")
    cells: dict[int, SweepCell] = {}
    done = _one_by_one if min(num_jobs, len(configs)) < 2 else _in_parallel
    with closing(done(trace, configs, costs, play, num_jobs)) as pairs:
        for index, cell in pairs:
            cells[index] = cell
            if progress is not None:
                progress(len(cells), len(configs))
    return tuple(cells[index] for index in range(len(configs)))


def _one_by_one(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    costs: CostModel,
    play: Play,
    num_jobs: int,
) -> _Done:
    for index, config in enumerate(configs):
        yield index, play(trace, config, costs)


def _in_parallel(
    trace: Trace,
    configs: Sequence[ReplayConfig],
    costs: CostModel,
    play: Play,
    num_jobs: int,
) -> _Done:
    waiting = list(enumerate(configs))[::-1]
    with _workers(trace, costs, play, min(num_jobs, len(configs))) as workers:
        playing: dict[Connection, int] = {}
        for pipe in workers:
            _send_next(pipe, waiting, playing)
        while playing:
            for ready in wait(list(playing)):
                assert isinstance(ready, Connection), "only pipes are waited for"
                index = playing.pop(ready)
                cell = _received(ready, workers[ready], configs[index])
                _send_next(ready, waiting, playing)
                yield index, cell


def _send_next(
    pipe: Connection,
    waiting: list[tuple[int, ReplayConfig]],
    playing: dict[Connection, int],
) -> None:
    if waiting:
        index, config = waiting.pop()
        playing[pipe] = index
        # One that has died is found when its answer is waited for.
        with suppress(*_GONE):
            pipe.send(config)


def _received(
    pipe: Connection, worker: SpawnProcess, config: ReplayConfig
) -> SweepCell:
    try:
        answer = pipe.recv()
    except _GONE:
        worker.join()
        raise StemKVError(
            f"a worker ended with code {worker.exitcode} while it replayed "
            f"{config.num_blocks} blocks, {config.eviction}, {config.core.order.name}, "
            f"{config.sharing.name}; if memory is short, take fewer jobs"
        ) from None
    if isinstance(answer, StemKVError):
        raise answer
    assert isinstance(answer, SweepCell), "a worker answers with a cell or an error"
    return answer


@contextmanager
def _workers(
    trace: Trace, costs: CostModel, play: Play, num_workers: int
) -> Iterator[dict[Connection, SpawnProcess]]:
    # Started afresh and not forked: forking a process with threads, as a progress bar
    # is, can leave locks in the child that nobody will open.
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, SpawnProcess] = {}
    try:
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            worker = context.Process(
                target=_work, args=(theirs, trace, costs, play), daemon=True
            )
            worker.start()
            theirs.close()  # else its end is not seen here
            workers[ours] = worker
        yield workers
    finally:
        for pipe, worker in workers.items():
            pipe.close()
            worker.terminate()
        for worker in workers.values():
            worker.join()


def _work(pipe: Connection, trace: Trace, costs: CostModel, play: Play) -> None:
    """Play what comes through the pipe until it is closed."""
    # Ctrl-C reaches all processes of a terminal; the one that started this one decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(*_GONE):
        while True:
            config = pipe.recv()
            try:
                pipe.send(play(trace, config, costs))
            except StemKVError as error:
                pipe.send(error)
