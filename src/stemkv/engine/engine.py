"""The engine: prompts in, tokens out, prefixes computed once.

Owns the wiring of core and tensors, and the order in which things are done: a step is
schedule, compute, commit; a rollout is the generation first, then the fence, then the
tensors. Knows nothing of HTTP, and decides nothing: every step is the scheduler's plan.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import torch

from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import LedgerEntry
from stemkv.core.core import Core, Recorder
from stemkv.core.prefix.cache import CacheUsage, DomainUsage
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identities import LoadedAdapter
from stemkv.core.prefix.identity import PUBLIC, ComputeIdentity, Domain
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.request import RequestId
from stemkv.engine.changes import Changes
from stemkv.engine.clock import Clock, is_seconds
from stemkv.engine.config import EngineConfig
from stemkv.engine.delta import Delta
from stemkv.engine.door import Door, check_id, listed
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.load import LoadedModel
from stemkv.engine.loop import StepLoop
from stemkv.engine.namespaces import Namespaces
from stemkv.engine.outbox import Outbox
from stemkv.engine.recheck import RecheckCounts, Rechecks, Verdict
from stemkv.engine.rollout import InFlight, RequestsInFlight
from stemkv.engine.samples import Completion, LiveSamples, Progress
from stemkv.engine.sampling import SamplingParams
from stemkv.engine.served import Served
from stemkv.engine.threads import default_num_threads
from stemkv.errors import ConfigError
from stemkv.measure.steps import StepRecord

__all__ = ["Engine", "ResetReport"]

_log = logging.getLogger(__name__)

_MAX_STEP_RECORDS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """What `Engine.reset` did. Exact counts.

    `num_remaining_blocks` cannot be matched any more either: requests in flight hold
    them, and they are freed as those end.
    """

    num_freed_blocks: int
    num_remaining_blocks: int


class Engine:
    """Serves one model, with any number of adapters.

    Takes ownership of `loaded.model`: its linears are packed in place. `clock` gives
    seconds and must not go back. With `costs` the engine keeps books (`ledger`) in its
    prices, and eviction can save seconds (`EngineConfig.eviction`). `recorder`
    hears every verb of the core: `StepRecorder` writes a step log.

    Who listens: `on_logits(request id of the sample, output index, logits row)` sees
    every row that is sampled from, before it is. `on_event` gets every event of the
    core, `on_delta` what each sample's text gains, and with `costs` `on_entry` the entry
    of every request that has ended; they are called between steps, and all that is said
    of one request comes in the order it happened in.

    Not safe for use by several threads at once. The listeners may ask, and all but
    `on_logits` may add and cancel; changes of what is served are refused in them.

    A verb that raises has changed nothing, with two exceptions that it leaves in a sound
    state: what a listener was told stays told, and a step that was interrupted has ended
    its requests, whose completions the next `step` returns. If it is interrupted at a
    point where that cannot be had, the engine refuses every further step.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        on_logits: Callable[[RequestId, int, torch.Tensor], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        on_delta: Callable[[Delta], None] | None = None,
        recorder: Recorder | None = None,
        costs: CostModel | None = None,
        on_entry: Callable[[LedgerEntry], None] | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        _check_kind("loaded", loaded, LoadedModel, "`load_model` makes one")
        _check_kind("config", self.config, EngineConfig, "give its fields by name")
        core = self.config.core_of(loaded)
        core.check(costs)  # or say what is wrong
        self.loaded = loaded
        self.on_logits = on_logits
        self.on_event = on_event
        self.on_delta = on_delta
        self.on_entry = on_entry
        self._clock = Clock(clock)
        torch.set_num_threads(self.config.num_threads or default_num_threads())
        self._served = Served(loaded, self.config, num_blocks=core.cache.num_blocks)
        self.kv = self._served.kv
        self.core = Core(core, costs, recorder=recorder)
        self.cache, self.scheduler = self.core.cache, self.core.scheduler
        self.ledger = self.core.ledger
        self._identities = self._served.identities
        self._samples = LiveSamples(loaded)
        self._outbox = Outbox(self, self._samples, self.ledger)
        self._namespaces = Namespaces(
            self._identities,
            self.core,
            ledger=self.ledger,
            reuses_prefixes=self.config.reuses_prefixes,
        )
        self._door = Door(
            loaded, self.config, self._identities, self._samples.has_request
        )
        self._rechecks = Rechecks(
            self._served.runner,
            share=self.config.recheck_share,
            rng=random.Random(self.config.recheck_seed),
            token_budget=core.scheduler.token_budget,
        )
        self._loop = StepLoop(
            self,
            self.core,
            self._served,
            self._samples,
            self._outbox,
            self._rechecks,
            self._clock,
        )
        self._changes = Changes(
            self._loop,
            self.core,
            self._served,
            self._namespaces,
            self._door,
            RequestsInFlight(
                self.core, self._samples, self._namespaces, self._door.domain_of
            ),
            self._rechecks,
            self._clock,
        )

    # Questions

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight or ended unreported, or a change waits."""
        return self._loop.is_busy or self._outbox.num_ended > 0

    @property
    def generation(self) -> int:
        """How many times weights, adapters or configuration were changed."""
        return self._identities.generation

    @property
    def identity(self) -> ComputeIdentity:
        """The identity under which requests without adapter compute now."""
        return self._identities.base

    @property
    def namespace(self) -> bytes | None:
        """The namespace of that identity; `None` if nothing is reused."""
        return self.namespace_of()

    @property
    def steps(self) -> deque[StepRecord]:
        """What the latest steps computed and when, newest last; clear it if you like."""
        return self._loop.steps

    @property
    def num_rollouts_waiting(self) -> int:
        """Changes in place that wait for requests of before them to end."""
        return self._loop.rollouts.num_waiting

    @property
    def recheck_counts(self) -> RecheckCounts:
        """What became of the hits that were drawn to be computed again."""
        return self._rechecks.counts

    @property
    def num_rechecks_waiting(self) -> int:
        """Hits drawn and not compared yet; see `recheck`."""
        return self._rechecks.num_waiting

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that requests may ask for."""
        return self._identities.adapters()

    def identity_of(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> ComputeIdentity:
        """Return the identity under which such a request computes now."""
        return self._identities.identity(adapter, start_position=start_position)

    def namespace_of(
        self, adapter: str | None = None, *, start_position: int = 0
    ) -> bytes | None:
        """Return the namespace in which such a request shares; `None`: in none."""
        return self._namespaces.peek(adapter, start_position=start_position)

    def progress(
        self, request_id: str, *, tenant: str | None = None
    ) -> tuple[Progress, ...]:
        """Return where each sample of a request stands; nothing if all have ended.

        With `tenant`, a request of anybody else counts as one that has ended.
        """
        return tuple(
            live.progress(self.scheduler.request(live.id_in_core))
            for live in self._samples.of_request(check_id(request_id))
            if tenant is None or live.tenant == tenant
        )

    def usage(self) -> CacheUsage:
        """Return blocks by state and totals; for the operator, not for tenants."""
        return self.cache.usage()

    def usage_of(self, tenant: str) -> DomainUsage:
        """Return what a tenant's own domain holds; tells nothing of other domains."""
        owner = self._door.owner(tenant)
        domain = self._door.domain(owner, None)
        return self.cache.usage_of(Domain.private(owner) if domain is None else domain)

    def encode(
        self,
        prompt: str | Sequence[dict[str, str]],
        *,
        is_answer_next: bool = True,
    ) -> TokenIds:
        """Return the token ids of a text, or of chat messages by the chat template.

        With `is_answer_next` the template opens the assistant's turn. Raises
        `EmptyPrompt` for nothing, `ConfigError` if the engine lacks what it takes.
        """
        return self._door.encode(prompt, is_answer_next=is_answer_next)

    def embed(self, parts: Sequence[TokenIds | torch.Tensor]) -> EmbeddedPrompt:
        """Return a prompt of tokens and of vectors `[positions, embedding_size]`.

        The vectors take the place of the model's input embeddings; prefixes with equal
        ones are shared like prefixes of tokens.
        """
        return EmbeddedPrompt(
            parts,
            embedding_size=self.loaded.embedding_size,
            dtype=self.loaded.dtype,
        )

    # Verbs: what is kept

    def declare_public(self, prefix: TokenIds) -> int:
        """Let all tenants share the whole blocks of a prefix; return how many.

        It holds for the model, every adapter, and whatever is rolled out later. With
        quotas all that is declared together must fit `public_bytes`, else this raises
        `ConfigError`; each adapter has its own copy, and one whose copy does not fit
        goes without.
        """
        self._check_prefix(prefix)
        if not self.config.reuses_prefixes:
            return 0
        try:
            return self._namespaces.declare_public(prefix)
        except ConfigError as error:
            raise ConfigError(
                f"{error} (that is public_bytes of the quotas; a block takes "
                f"{self.kv.bytes_per_block:,} bytes)"
            ) from None

    def keep(
        self,
        prefix: TokenIds,
        *,
        for_s: float,
        tenant: str | None = None,
        request_class: str | None = None,
        adapter: str | None = None,
        start_position: int = 0,
    ) -> int:
        """Keep the whole blocks of a prefix for some seconds; return how many.

        An operator's act. They go when nothing else can, whether they are resident or
        come to be. 0 seconds take an earlier order back. `tenant` is whose prefix it
        is, `None` everybody's: one that is declared public. The order is for one
        adapter, and ends with a rollout or a reset.

        Raises `ConfigError` where all that is kept together would exceed
        `max_kept_share`, and for a public prefix that is not declared.
        """
        self._loop.check_between_steps("keep")
        self._check_prefix(prefix)
        if not is_seconds(for_s) or for_s < 0:
            raise ConfigError(
                f"for_s must be seconds of at least 0 and finite, got {for_s!r:.80}"
            )
        domain: Domain | None = PUBLIC
        if tenant is not None:
            domain = self._door.domain(tenant, request_class)
        namespace = self._namespaces.enter(adapter, start_position=start_position)
        if domain is None or namespace is None:
            return 0  # nothing of it is ever retained
        if domain == PUBLIC and not self._namespaces.is_public(prefix):
            raise ConfigError(
                f"a prefix of {len(prefix)} tokens is nobody's: no declared public one "
                f"begins with it; declare it first, or say which tenant's it is"
            )
        now = self._clock.now()
        return self.core.keep(namespace, domain, prefix, until=now + for_s, now=now)

    def end_session(
        self,
        session: str,
        *,
        tenant: str | None = None,
        request_class: str | None = None,
    ) -> None:
        """Say that nothing will continue a session: its blocks go before all others.

        For those who learn it between requests; `Hints.ends_session` says it with one.
        Blocks that other requests have used as well stay what they are.
        """
        Hints(session=session)  # says what is wrong with it
        domain = self._door.domain(self._door.owner(tenant), request_class)
        if domain is not None:
            self.core.end_session(domain, session, self._clock.now())

    # Verbs: requests

    def add(
        self,
        prompt: TokenIds | EmbeddedPrompt,
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        request_id: str | None = None,
        arrival_s: float | None = None,
        adapter: str | None = None,
        request_class: str | None = None,
        start_position: int = 0,
        hints: Hints = NO_HINTS,
    ) -> RequestId:
        """Queue a request; return its id.

        `tenant` is the authenticated principal and `request_class` what the operator
        calls this kind of requests; the sharing policy turns both into a domain.
        Without a tenant it shares with nobody, unless `EngineConfig.single_tenant` says
        that there is only one. `start_position` is the position of the first token.
        `hints` say what the caller knows of the prompt's future: they can cost hits,
        and never change an answer. Raises a `RequestError` for a request that can never
        be served; nothing else in flight is affected.
        """
        asked = self._door.check_in(
            prompt,
            params,
            request_id=request_id,
            tenant=tenant,
            request_class=request_class,
            adapter=adapter,
            start_position=start_position,
            arrival_s=self._clock.now() if arrival_s is None else arrival_s,
            hints=hints,
        )
        spec = asked.spec
        # Before a namespace is entered: refused requests must not use any up.
        self.scheduler.check(spec)
        if asked.shares:
            namespace = self._namespaces.enter(adapter, start_position=start_position)
            spec = replace(spec, namespace=namespace)
        samples = self._samples.take_in(
            spec,
            asked.params,
            tenant=asked.tenant,
            adapter=adapter,
            embedded=asked.embedded,
            num_samples=spec.num_samples,
        )
        try:
            self.core.add(spec)
        except BaseException:  # an interruption, as all that can be refused was checked
            if self.scheduler.request(spec.request_id) is None:
                self._samples.drop(samples)
            else:
                self.cancel(spec.request_id)
            raise
        return spec.request_id

    def cancel(self, request_id: str, *, tenant: str | None = None) -> bool:
        """End a request with all its samples; `False` if all have ended.

        With `tenant`, a request of anybody else counts as one that has ended.
        """
        now = self._clock.now()
        num_cancelled = sum(
            self.core.cancel(live.sample_id, now)
            for live in self._samples.of_request(check_id(request_id))
            if live.is_in_core and (tenant is None or live.tenant == tenant)
        )
        self._loop.catch_up()
        return num_cancelled > 0

    def step(self) -> tuple[Completion, ...]:
        """Run one step; return the samples that ended with it."""
        self._loop.advance()
        return tuple(self._outbox.take_ended())

    def drain(self) -> list[Completion]:
        """Step until nothing is in flight; return what ended, in that order.

        What ended before an exception comes with the next `step` or `drain`.
        """
        completions: list[Completion] = []
        try:
            while self.has_work:
                completions.extend(self.step())
        except BaseException:
            self._outbox.put_back(completions)
            raise
        return completions

    def generate(
        self,
        prompts: Sequence[str | TokenIds | EmbeddedPrompt],
        params: SamplingParams | None = None,
        *,
        tenant: str | None = None,
        adapter: str | None = None,
        request_class: str | None = None,
        start_position: int = 0,
        hints: Hints = NO_HINTS,
    ) -> list[Completion]:
        """Continue all prompts; return the completions in order of prompt, sample.

        Others in flight are served as well, and their completions left to `step`. On an
        exception of any kind nothing of these prompts stays behind.
        """
        rank: dict[RequestId, int] = {}
        try:
            for index, prompt in enumerate(listed(prompts)):
                tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
                request_id = self.add(
                    tokens,
                    params,
                    tenant=tenant,
                    adapter=adapter,
                    request_class=request_class,
                    start_position=start_position,
                    hints=hints,
                )
                rank[request_id] = index
            self._outbox.put_back(self.drain())
        except BaseException:
            if self._loop.broken_by is None:
                for request_id in rank:
                    self.cancel(request_id)
            self._outbox.take_ended(rank)
            raise
        return sorted(
            self._outbox.take_ended(rank), key=lambda c: (rank[c.request_id], c.sample)
        )

    # Verbs: what is served

    def load_adapter(
        self, name: str, path: Path | str, *, scale: float = 1.0
    ) -> LoadedAdapter:
        """Let requests ask for the LoRA adapter in folder `path` by `name`.

        Raises `ConfigError` for a name that is taken (see `reload_adapter`),
        `BrokenAdapter` or `UnsupportedModel` for files that cannot be served.
        """
        return self._changes.load_adapter(name, path, scale=scale)

    def reload_adapter(
        self,
        name: str,
        path: Path | str | None = None,
        *,
        scale: float | None = None,
        in_flight: InFlight = InFlight.FINISH,
    ) -> LoadedAdapter:
        """Read an adapter again, from its folder or another, under the same name.

        Requests that finish keep the version they were added with; it is freed when
        the last of them ends.
        """
        return self._changes.reload_adapter(
            name, path, scale=scale, in_flight=in_flight
        )

    def unload_adapter(
        self, name: str, *, in_flight: InFlight = InFlight.FINISH
    ) -> None:
        """Refuse requests for an adapter from now on; free it when none is left."""
        self._changes.unload_adapter(name, in_flight=in_flight)

    def update_weights(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        in_flight: InFlight = InFlight.FINISH,
    ) -> int:
        """Replace tensors of the model in place; return the new generation.

        `tensors` by their names in the model's `state_dict` as loaded; they are copied
        now. The new identity holds from this call on: with `FINISH` requests added
        later wait until the earlier ones have ended and the tensors are in place.
        Adapters stay, on top of the new weights. Raises `ConfigError` if something
        does not fit; nothing has changed then.
        """
        return self._changes.update_weights(tensors, in_flight=in_flight)

    def update_numerics(
        self, numerics: str, *, in_flight: InFlight = InFlight.FINISH
    ) -> int:
        """Serve in another numerics class; return the new generation.

        Raises `NumericsError` if this build does not keep it; nothing has changed then.
        """
        return self._changes.update_numerics(numerics, in_flight=in_flight)

    def update_sharing(
        self, sharing: SharingPolicy, *, in_flight: InFlight = InFlight.FINISH
    ) -> int:
        """Let another policy decide who shares; return the new generation.

        Requests in flight whose domain changes are restarted in their new one or
        aborted; with `FINISH` they end without matching or publishing anything more.
        What is cached stays in the domain it was published in: call `reset` where a
        tenant that leaves a group must not leave anything behind.
        """
        return self._changes.update_sharing(sharing, in_flight=in_flight)

    def reset(self) -> ResetReport:
        """Make everything cached unmatchable, also for requests in flight; say what is.

        Requests in flight go on with the blocks they hold, and publish them no more;
        those that wait share again what is computed from now on. Declared prefixes
        stay declared, orders to keep end, and namespaces that a re-check has closed are
        open again.
        Repeating it does nothing more.
        """
        return ResetReport(
            num_freed_blocks=self._changes.reset(self.cache),
            num_remaining_blocks=self.cache.num_retired_blocks,
        )

    def recheck(self) -> Verdict | None:
        """Spend idle time: compute one chunk of a drawn hit again.

        Returns the verdict when a hit has been compared. After a mismatch the
        namespace is closed: nothing that is cached in it can be matched any more, and
        its requests share with nobody until a rollout or `reset`. A hit whose pass
        fails is not lost: it is tried again with the next call.
        """
        self._loop.check_between_steps("recheck")
        verdict = self._rechecks.run()
        if verdict is None:
            return None
        if not verdict.is_match:
            _log.error(
                "reused KV of %d tokens differs from a fresh prefill by %.3g "
                "(relative); its namespace is closed until a rollout or a reset",
                verdict.num_tokens,
                verdict.difference,
            )
            self._changes.close(verdict.namespace)
        self._loop.catch_up()
        return verdict

    # Private

    def _check_prefix(self, prefix: TokenIds) -> None:
        _check_kind("prefix", prefix, TokenIds, "`encode` makes one")
        prefix.check_vocabulary(self.loaded.vocab_size)


def _check_kind(field: str, value: object, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ConfigError(
            f"{field} must be {article} {kind.__name__}, got {type(value).__name__}; "
            f"{remedy}"
        )
