"""The engine: prompts in, tokens out, prefixes computed once.

Owns the wiring of core and tensors, and the order in which a rollout does its things:
the generation first, then the fence, then the tensors. Knows nothing of HTTP, and
decides nothing: every step is the scheduler's plan.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch

from stemkv.core.books.cost import CostModel
from stemkv.core.books.entry import LedgerEntry
from stemkv.core.books.ledger import Ledger
from stemkv.core.prefix.cache import CacheUsage, DomainUsage, PrefixCache
from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.core.prefix.identities import Identities, LoadedAdapter
from stemkv.core.prefix.identity import PUBLIC, ComputeIdentity, Domain
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.retention.retention import Retention
from stemkv.core.schedule.events import Event
from stemkv.core.schedule.plan import StepPlan
from stemkv.core.schedule.request import FinishReason, RequestId, RequestSpec
from stemkv.core.schedule.scheduler import Scheduler
from stemkv.engine.adapters import Adapters
from stemkv.engine.config import EngineConfig
from stemkv.engine.core_settings import CoreSettings
from stemkv.engine.digest import combine
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.identity import identify
from stemkv.engine.kv import KvMemory
from stemkv.engine.linear import linear_places
from stemkv.engine.load import LoadedModel
from stemkv.engine.numerics import Numerics, numerics_named
from stemkv.engine.recheck import RecheckCounts, Rechecks, Verdict
from stemkv.engine.recorder import StepRecorder
from stemkv.engine.rollout import InFlight, Rollouts
from stemkv.engine.runner import ModelRunner, prepare_model
from stemkv.engine.samples import Completion, LiveSample, LiveSamples
from stemkv.engine.sampling import SamplingParams
from stemkv.engine.selftest import check_layers, check_numerics
from stemkv.engine.threads import default_num_threads
from stemkv.engine.weights import WeightUpdate
from stemkv.errors import (
    ConfigError,
    EmptyPrompt,
    InvariantError,
    RequestError,
    StemKVError,
    StopInPrompt,
)
from stemkv.measure.steps import StepRecord

__all__ = ["Engine", "ResetReport"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_STEP_RECORDS = 100_000
_HISTORY_SIZE = 8  # blocks a ledger remembers for each block there is


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
    seconds and must not go back; `on_logits(request id of the sample, output index,
    logits row)` sees every row that is sampled from, before it is, and `on_event`
    every event of the core, in order. `recorder` writes a step log. With `costs` the
    engine keeps books (`ledger`) in its prices, eviction can save seconds
    (`EngineConfig.eviction`), and `on_entry` gets the entry of every request that has
    ended.

    Not safe for use by several threads at once. The callbacks may ask, and `on_event`
    and `on_entry` may add and cancel; changes of what is served are refused in them.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        clock: Callable[[], float] = monotonic,
        on_logits: Callable[[RequestId, int, torch.Tensor], None] | None = None,
        on_event: Callable[[Event], None] | None = None,
        recorder: StepRecorder | None = None,
        costs: CostModel | None = None,
        on_entry: Callable[[LedgerEntry], None] | None = None,
    ) -> None:
        self.config = EngineConfig() if config is None else config
        settings = CoreSettings.of(self.config, loaded, costs)  # or say what is wrong
        self.loaded = loaded
        self.on_logits = on_logits
        self.on_event = on_event
        self.on_entry = on_entry
        self.steps: deque[StepRecord] = deque(maxlen=_MAX_STEP_RECORDS)  # newest last
        self._clock = clock
        self._samples = LiveSamples(loaded)
        self._ended: list[Completion] = []  # not yet returned by `step`
        self._num_added: dict[str, int] = {}  # by tenant: ids tell nobody of others
        self._broken_by: str | None = None  # what is impossible happened; see `step`
        self._is_telling = False  # whether `on_event` runs
        self._sharing = self.config.sharing
        self._public: list[TokenIds] = []
        self._declared: set[bytes] = set()  # namespaces that know `_public`
        self._adapters = Adapters(loaded)
        self._tensor_digests = dict(loaded.tensor_digests)  # once all is rolled out
        self._served_digests = dict(loaded.tensor_digests)  # what is in place now
        self._closed: set[bytes] = set()  # namespaces in which a re-check failed
        torch.set_num_threads(self.config.num_threads or default_num_threads())
        numerics = numerics_named(self.config.numerics)
        self._linears = prepare_model(loaded.model, numerics)
        self.kv = self._make_kv(settings.cache.num_blocks)
        self._runner = self._make_runner(numerics)
        if self.config.runs_self_test:
            check_layers(self._runner, loaded.vocab_size)
        self._check(numerics, runs_self_test=self.config.runs_self_test)
        self._identities = Identities(self._identify(numerics))
        self.ledger = None if costs is None else self._make_ledger(costs)
        self.cache, self.scheduler = self._make_core(settings, recorder)
        self._rollouts = Rollouts(self.scheduler)
        self._rechecks = Rechecks(
            self._runner,
            share=self.config.recheck_share,
            rng=random.Random(self.config.recheck_seed),
            token_budget=self.config.token_budget,
        )

    # Questions

    @property
    def has_work(self) -> bool:
        """Whether a request is in flight or ended unreported, or a change waits."""
        is_waiting = self._rollouts.num_waiting > 0
        return self.scheduler.has_work or bool(self._ended) or is_waiting

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
    def num_rollouts_waiting(self) -> int:
        """Changes in place that wait for requests of before them to end."""
        return self._rollouts.num_waiting

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
        if not self.config.reuses_prefixes:
            return None
        namespace = self._identities.namespace(adapter, start_position=start_position)
        if namespace is None or namespace in self._closed:
            return None
        if namespace not in self._declared:
            self._declare(namespace)
            if self.ledger is not None:
                identity = self._identities.identity(
                    adapter, start_position=start_position
                )
                facts = {f.name: getattr(identity, f.name) for f in fields(identity)}
                self.ledger.name(namespace, facts)
        return namespace

    def usage(self) -> CacheUsage:
        """Return blocks by state and totals; for the operator, not for tenants."""
        return self.cache.usage()

    def usage_of(self, tenant: str) -> DomainUsage:
        """Return what a tenant's own domain holds; tells nothing of other domains."""
        domain = self._sharing.domain(tenant)
        return self.cache.usage_of(Domain.private(tenant) if domain is None else domain)

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
        tokenizer = self.loaded.tokenizer
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer; pass TokenIds")
        if not isinstance(prompt, str | Sequence):
            raise RequestError(
                f"prompt must be text or messages, got {type(prompt).__name__}",
                field="prompt",
            )
        if not prompt:
            raise EmptyPrompt("prompt is empty; give some text", field="prompt")
        if isinstance(prompt, str):
            return TokenIds.from_ids(tokenizer(prompt)["input_ids"])
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model {self.loaded.name} has no chat template; pass text instead"
            )
        ids = tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=is_answer_next, return_dict=False
        )
        return TokenIds.from_ids(ids)

    def embed(self, parts: Sequence[TokenIds | torch.Tensor]) -> EmbeddedPrompt:
        """Return a prompt made of tokens and of vectors `[positions, hidden_size]`.

        The vectors take the place of the model's input embeddings; prefixes with equal
        ones are shared like prefixes of tokens.
        """
        return EmbeddedPrompt(
            parts,
            hidden_size=int(self.loaded.config.hidden_size),
            dtype=self.loaded.dtype,
        )

    # Verbs

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
        current, num_blocks = self.namespace, 0
        if current is not None:
            try:
                num_blocks = self.cache.declare_public(current, prefix)
            except ConfigError as error:
                raise ConfigError(
                    f"{error} (that is public_bytes of the quotas; a block takes "
                    f"{self.kv.bytes_per_block:,} bytes)"
                ) from None
        if prefix not in self._public:
            self._public.append(prefix)
        for namespace in sorted(self._declared):
            if namespace != current:
                self._declare_in(namespace, prefix)
        return num_blocks

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
        self._check_between_steps("keep")
        self._check_prefix(prefix)
        is_number = isinstance(for_s, int | float) and not isinstance(for_s, bool)
        if not is_number or not 0 <= for_s < math.inf:
            raise ConfigError(
                f"for_s must be seconds of at least 0 and finite, got {for_s!r:.80}"
            )
        domain: Domain | None = PUBLIC
        if tenant is not None:
            domain = self._sharing.domain(tenant, request_class)
        namespace = self.namespace_of(adapter, start_position=start_position)
        if domain is None or namespace is None:
            return 0  # nothing of it is ever retained
        if domain == PUBLIC and not any(
            declared.buffer.startswith(prefix.buffer) for declared in self._public
        ):
            raise ConfigError(
                f"a prefix of {len(prefix)} tokens is nobody's: no declared public one "
                f"begins with it; declare it first, or say which tenant's it is"
            )
        now = self._clock()
        return self.cache.keep(namespace, domain, prefix, until=now + for_s, now=now)

    def end_session(
        self,
        session: str,
        *,
        tenant: str = "default",
        request_class: str | None = None,
    ) -> None:
        """Say that nothing will continue a session: its blocks go before all others.

        For those who learn it between requests; `Hints.ends_session` says it with one.
        Blocks that other requests have used as well stay what they are.
        """
        Hints(session=session)  # says what is wrong with it
        domain = self._sharing.domain(tenant, request_class)
        if domain is not None:
            self.cache.end_session(domain, session, self._clock())

    def add(
        self,
        prompt: TokenIds | EmbeddedPrompt,
        params: SamplingParams | None = None,
        *,
        tenant: str = "default",
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
        `start_position` is the position of the first token. `hints` say what the caller
        knows of the prompt's future: they can cost hits, and never change an answer.
        Raises a `RequestError` for a request that can never be served; nothing else in
        flight is affected.
        """
        params = SamplingParams() if params is None else params
        embedded = prompt if isinstance(prompt, EmbeddedPrompt) else None
        tokens = embedded.tokens if embedded is not None else prompt
        if not isinstance(tokens, TokenIds) or (tokens.has_spans and embedded is None):
            raise RequestError(
                "prompt must be TokenIds of text, or what `embed` returns",
                field="prompt",
            )
        if embedded is not None:
            self._check_embedded(embedded)
        domain = self._sharing.domain(tenant, request_class)
        version = None
        if adapter is not None:
            version = self._identities.adapter(adapter).version
        tokens.check_vocabulary(self.loaded.vocab_size)
        self._check_stop(tokens, params)
        spec = RequestSpec(
            request_id=RequestId(
                self._new_id(tenant) if request_id is None else request_id
            ),
            prompt=tokens,
            max_new_tokens=params.max_new_tokens,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
            domain=Domain.private(tenant) if domain is None else domain,
            namespace=None,
            num_samples=params.num_samples,
            adapter=version,
            start_position=start_position,
            tenant=tenant,
            request_class=request_class,
            hints=hints,
        )
        # Before a namespace is named: refused requests must not use any up.
        self.scheduler.check(spec)
        if domain is not None:
            spec = replace(
                spec,
                namespace=self.namespace_of(adapter, start_position=start_position),
            )
        # Last, so that nothing can fail once the scheduler knows the request.
        samples = self._samples.make(
            spec,
            params,
            tenant=tenant,
            request_class=request_class,
            adapter=adapter,
            embedded=embedded,
            max_num_samples=self.config.max_num_running,
        )
        self.scheduler.add(spec)
        self._samples.take_in(samples)
        return spec.request_id

    def cancel(self, request_id: RequestId, *, tenant: str | None = None) -> bool:
        """End a request with all its samples; `False` if all have ended.

        With `tenant`, a request of anybody else counts as one that has ended.
        """
        now = self._clock()
        num_cancelled = sum(
            self.scheduler.cancel(live.sample_id, now)
            for live in self._samples.of_request(request_id)
            if tenant is None or live.tenant == tenant
        )
        self._take_events(self.scheduler.take_events())
        if self.scheduler.pending is None:
            self._rollouts.make_due()
        return num_cancelled > 0

    def step(self) -> tuple[Completion, ...]:
        """Run one step; return the samples that ended with it."""
        if self._broken_by is not None:
            raise InvariantError(
                f"this engine stopped at a defect ({self._broken_by}); make a new one"
            )
        try:
            self._check_weights()
            self._rollouts.make_due()
            if self.scheduler.has_work:
                self._take_events(self._run_step())
                self._rollouts.make_due()
        except InvariantError as error:
            self._broken_by = str(error)
            raise
        ended = tuple(self._ended)
        self._ended.clear()
        return ended

    def drain(self) -> list[Completion]:
        """Step until nothing is in flight; return what ended, in that order."""
        completions: list[Completion] = []
        while self.has_work:
            completions.extend(self.step())
        return completions

    def generate(
        self,
        prompts: Sequence[str | TokenIds | EmbeddedPrompt],
        params: SamplingParams | None = None,
        *,
        tenant: str = "default",
        adapter: str | None = None,
        request_class: str | None = None,
        start_position: int = 0,
        hints: Hints = NO_HINTS,
    ) -> list[Completion]:
        """Continue all prompts; return the completions in order of prompt, sample."""
        ids: list[RequestId] = []
        try:
            for prompt in prompts:
                tokens = self.encode(prompt) if isinstance(prompt, str) else prompt
                ids.append(
                    self.add(
                        tokens,
                        params,
                        tenant=tenant,
                        adapter=adapter,
                        request_class=request_class,
                        start_position=start_position,
                        hints=hints,
                    )
                )
        except BaseException:  # whatever it was, none of ours may stay behind
            for request_id in ids:
                self.cancel(request_id)
            self._ended = [c for c in self._ended if c.request_id not in ids]
            raise
        rank = {request_id: index for index, request_id in enumerate(ids)}
        completions = self.drain()
        self._ended.extend(c for c in completions if c.request_id not in rank)
        own = [c for c in completions if c.request_id in rank]
        return sorted(own, key=lambda c: (rank[c.request_id], c.sample))

    # Rollouts

    def load_adapter(
        self, name: str, path: Path, *, scale: float = 1.0
    ) -> LoadedAdapter:
        """Let requests ask for the LoRA adapter in folder `path` by `name`.

        Raises `ConfigError` for a name that is taken (see `reload_adapter`),
        `BrokenAdapter` or `UnsupportedModel` for files that cannot be served.
        """
        if any(loaded.name == name for loaded in self.adapters()):
            raise ConfigError(
                f"adapter {name!r} is loaded; use reload_adapter to replace it"
            )
        return self._load_adapter(name, path, scale, InFlight.FINISH, "load_adapter")

    def reload_adapter(
        self,
        name: str,
        path: Path | None = None,
        *,
        scale: float | None = None,
        in_flight: InFlight = InFlight.FINISH,
    ) -> LoadedAdapter:
        """Read an adapter again, from its folder or another, under the same name.

        Requests that finish keep the version they were added with; it is freed when
        the last of them ends.
        """
        current = self._identities.adapter(name)
        return self._load_adapter(
            name,
            self._adapters.source(name) if path is None else path,
            current.scale if scale is None else scale,
            in_flight,
            "reload_adapter",
        )

    def unload_adapter(
        self, name: str, *, in_flight: InFlight = InFlight.FINISH
    ) -> None:
        """Refuse requests for an adapter from now on; free it when none is left."""
        self._check_between_steps("unload_adapter", in_flight)
        if in_flight is InFlight.RESTART:
            raise ConfigError(
                "in_flight cannot be RESTART when an adapter is unloaded: there is "
                "nothing to begin again on; use FINISH or ABORT"
            )
        version = self._identities.adapter(name).version
        self._retire(self._identities.unload(name))
        self._adapters.forget(name)
        self._handle_in_flight(in_flight, version=version)
        self._drop_unused_adapters()

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
        self._check_between_steps("update_weights", in_flight)
        update = WeightUpdate(
            self.loaded.model,
            tensors,
            names=self._tensor_digests,
            places=linear_places(self.loaded.model),
            tied_tensors=self.loaded.tied_tensors,
        )
        self._tensor_digests |= update.digests
        digest = combine(self._tensor_digests)
        base = replace(self._identities.base, weights_digest=digest)

        def change() -> None:
            update.apply()
            # Whoever serves this model beside or after us must not take it for what
            # it was.
            self.loaded.tensor_digests.update(update.digests)
            self._served_digests = dict(self.loaded.tensor_digests)

        return self._roll_out(base, change, in_flight)

    def update_numerics(
        self, numerics: str, *, in_flight: InFlight = InFlight.FINISH
    ) -> int:
        """Serve in another numerics class; return the new generation.

        Raises `NumericsError` if this build does not keep it; nothing has changed then.
        """
        self._check_between_steps("update_numerics", in_flight)
        wanted = numerics_named(numerics)
        self._check(wanted, runs_self_test=False)  # before the model is touched
        prepare_model(self.loaded.model, wanted)
        self._check(wanted, runs_self_test=self.config.runs_self_test)
        if wanted.pads_context:
            self._adapters.check_stable()
        base = replace(
            self._identities.base,
            numerics_class=wanted.name,
            numerics_tile=wanted.tile,
        )

        def change() -> None:
            self._runner = self._make_runner(wanted)
            self._rechecks.runner = self._runner

        return self._roll_out(base, change, in_flight)

    def update_sharing(
        self, sharing: SharingPolicy, *, in_flight: InFlight = InFlight.FINISH
    ) -> int:
        """Let another policy decide who shares; return the new generation.

        Requests in flight whose domain changes are restarted in their new one or
        aborted; with `FINISH` they end without matching or publishing anything more.
        What is cached stays in the domain it was published in: call `reset` where a
        tenant that leaves a group must not leave anything behind.
        """
        self._check_between_steps("update_sharing", in_flight)
        if not isinstance(sharing, SharingPolicy):
            raise ConfigError(
                f"sharing must be a SharingPolicy, got {type(sharing).__name__}"
            )
        old, self._sharing = self._sharing, sharing
        self._identities.note_change()
        now = self._clock()
        for live in self._samples:
            is_same = _domain_of(old, live) == _domain_of(sharing, live)
            if is_same or not live.is_in_core:
                continue
            if in_flight is InFlight.ABORT:
                self.scheduler.cancel(live.sample_id, now, reason=FinishReason.REPLACED)
            elif in_flight is InFlight.RESTART:
                self._restart(live, now)
            else:
                self.scheduler.cut_off(live.sample_id)
        self._take_events(self.scheduler.take_events())
        self._rollouts.make_due()
        return self._identities.generation

    def reset(self) -> ResetReport:
        """Make everything cached unmatchable, also for requests in flight; say what is.

        Requests in flight go on with the blocks they hold, and publish them no more;
        those that wait share again what is computed from now on. Declared prefixes
        stay declared, orders to keep end, and namespaces that a re-check has closed are
        open again.
        Repeating it does nothing more.
        """
        self._check_between_steps("reset")
        num_free = self.cache.usage().num_free_blocks
        self._closed.clear()
        now = self._clock()
        for namespace in self._identities.namespaces():
            self.cache.retire(namespace, now)
            self._declare(namespace)
        self._take_events(self.scheduler.take_events())
        return ResetReport(
            num_freed_blocks=self.cache.usage().num_free_blocks - num_free,
            num_remaining_blocks=self.cache.num_retired_blocks,
        )

    def recheck(self) -> Verdict | None:
        """Spend idle time: compute one chunk of a drawn hit again.

        Returns the verdict when a hit has been compared. After a mismatch the
        namespace is closed: nothing that is cached in it can be matched any more, and
        its requests share with nobody until a rollout or `reset`.
        """
        self._check_between_steps("recheck")
        verdict = self._rechecks.run()
        if verdict is not None and not verdict.is_match:
            _log.error(
                "reused KV of %d tokens differs from a fresh prefill by %.3g "
                "(relative); its namespace is closed until a rollout or a reset",
                verdict.num_tokens,
                verdict.difference,
            )
            self._retire((verdict.namespace,))
            self._closed.add(verdict.namespace)
        if verdict is not None:
            self._drop_unused_adapters()
        return verdict

    # Private: requests

    def _new_id(self, tenant: str) -> str:
        """Return an id that no request in flight has and that tells of no other."""
        name = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        while True:
            number = self._num_added.get(tenant, 0)
            self._num_added[tenant] = number + 1
            request_id = f"request-{name}-{number}"
            if RequestId(request_id) not in self._samples:
                return request_id

    def _run_step(self) -> tuple[Event, ...]:
        plan = self.scheduler.schedule(self._clock())
        start = self._clock()
        try:
            logits = self._runner.execute(plan, self._samples.embedded())
            self._consider_rechecks(plan)
            result = self._samples.sample(plan, logits, self.on_logits)
        except BaseException as error:
            # Whatever it was, the next step must find no plan pending.
            events = self.scheduler.abandon(plan, self._clock())
            if isinstance(error, Exception) and not isinstance(error, StemKVError):
                # Kernels and model code fail in all ways. One failing pass must not
                # stop the engine: its requests end, others go on.
                _log.exception("step %d failed; its requests are aborted", plan.step)
                return events
            self._take_events(events)
            raise
        now = self._clock()
        self._record(plan, start, now)
        return self.scheduler.commit(plan, result, now)

    def _take_events(self, events: tuple[Event, ...]) -> None:
        """Settle what happened; what ended waits for the next `step` to return it."""
        ended = self._samples.settle(events)
        self._ended.extend(ended)
        if ended:
            self._drop_unused_adapters()
        if self.on_event is not None:
            self._tell(self.on_event, events, "on_event")
        if self.ledger is not None:
            entries = self.ledger.take_entries()
            if self.on_entry is not None:
                self._tell(self.on_entry, entries, "on_entry")

    def _tell(
        self, listener: Callable[[T], None], news: Iterable[T], name: str
    ) -> None:
        """Call a listener, between steps; its failure is logged and nobody else's."""
        was_telling, self._is_telling = self._is_telling, True
        try:
            for each in news:
                listener(each)
        except InvariantError:
            raise  # from a verb that it called: not the listener's fault
        except Exception:
            # Who only listens must not stop the engine, nor lose anybody's answer.
            _log.exception("%s failed; it misses the rest of this step's news", name)
        finally:
            self._is_telling = was_telling

    def _check_prefix(self, prefix: TokenIds) -> None:
        if not isinstance(prefix, TokenIds):
            raise ConfigError(
                f"prefix must be TokenIds (see `encode`), got {type(prefix).__name__}"
            )
        prefix.check_vocabulary(self.loaded.vocab_size)

    def _check_embedded(self, prompt: EmbeddedPrompt) -> None:
        own = (int(self.loaded.config.hidden_size), self.loaded.dtype)
        if (prompt.hidden_size, prompt.dtype) != own:
            raise RequestError(
                f"prompt has embeddings of size {prompt.hidden_size} in "
                f"{prompt.dtype}, this model's are of size {own[0]} in {own[1]}; make "
                f"it with this engine's `embed`",
                field="prompt",
            )

    def _consider_rechecks(self, plan: StepPlan) -> None:
        """Draw among the hits that this step is the first to build on."""
        if self.config.recheck_share == 0:
            return
        for chunk in plan.chunks:
            request = self.scheduler.request(chunk.request_id)
            if request is None or request.lease is None or request.namespace is None:
                continue
            if chunk.start and chunk.start == request.lease.num_matched_tokens:
                live = self._samples.get(chunk.request_id)
                self._rechecks.consider(
                    chunk,
                    request.tokens,
                    request.namespace,
                    None if live is None else live.embedded,
                )

    # Private: rollouts

    def _load_adapter(
        self, name: str, path: Path, scale: float, in_flight: InFlight, verb: str
    ) -> LoadedAdapter:
        self._check_between_steps(verb, in_flight)
        digest, lora = self._adapters.read(
            path,
            scale=scale,
            needs_stable_rows=self._identities.base.numerics_class == "exact",
        )
        old = next((a.version for a in self.adapters() if a.name == name), None)
        loaded, retired = self._identities.load(name, digest, float(scale))
        self._retire(retired)
        self._adapters.keep(name, loaded.version, path, lora)
        if old is not None:
            self._handle_in_flight(in_flight, version=old)
        self._drop_unused_adapters()
        return loaded

    def _roll_out(
        self, base: ComputeIdentity, change: Callable[[], None], in_flight: InFlight
    ) -> int:
        """Advance the generation, fence, deal with requests, then change the state."""
        self._retire(self._identities.replace_base(base))
        epoch = self.scheduler.fence()
        self._handle_in_flight(in_flight)

        def change_safely() -> None:
            self._rechecks.clear()
            self._drop_unused_adapters()
            try:
                change()
            except BaseException as error:
                self._broken_by = f"a rollout was left half made: {error}"
                raise

        self._rollouts.add(epoch, change_safely)
        self._rollouts.make_due()
        return self._identities.generation

    def _declare(self, namespace: bytes) -> None:
        """Declare the public prefixes in a namespace that does not know them."""
        self._declared.add(namespace)
        for prefix in self._public:
            self._declare_in(namespace, prefix)

    def _declare_in(self, namespace: bytes, prefix: TokenIds) -> None:
        """Declare a prefix, or leave it private there if the budget is spent.

        The caller asked for an adapter or a reset: that the public budget is too small
        for one more namespace must not fail it.
        """
        try:
            self.cache.declare_public(namespace, prefix)
        except ConfigError as error:
            _log.warning("a public prefix stays private for one adapter: %s", error)

    def _check_weights(self) -> None:
        """Raise `InvariantError` if another engine has replaced weights of ours."""
        # Compared tensor by tensor: in every step, so without hashing anything.
        if self.loaded.tensor_digests != self._served_digests:
            raise InvariantError(
                "another engine replaced weights of this model; one model serves one "
                "engine at a time"
            )

    def _retire(self, namespaces: tuple[bytes, ...]) -> None:
        now = self._clock()
        for namespace in namespaces:
            self._declared.discard(namespace)
            self._closed.discard(namespace)
            self.scheduler.retire(namespace, now)
        self._take_events(self.scheduler.take_events())

    def _handle_in_flight(
        self, in_flight: InFlight, *, version: str | None = None
    ) -> None:
        """Deal with all requests in flight, or with those of one adapter version."""
        if in_flight is InFlight.FINISH:
            return
        now = self._clock()
        for live in self._samples:
            request = self.scheduler.request(live.sample_id)
            if request is None or not live.is_in_core:
                continue
            if version is not None and request.spec.adapter != version:
                continue
            if in_flight is InFlight.ABORT:
                self.scheduler.cancel(live.sample_id, now, reason=FinishReason.REPLACED)
            else:
                self._restart(live, now)
        self._take_events(self.scheduler.take_events())
        self._rollouts.make_due()  # the last request of before may just have ended

    def _restart(self, live: LiveSample, now: float) -> None:
        """Let a sample begin again on what its adapter and tenant mean now."""
        request = self.scheduler.request(live.sample_id)
        assert request is not None, "the caller has just seen it"
        version = request.spec.adapter
        domain = _domain_of(self._sharing, live)
        namespace = None
        known = {loaded.name: loaded.version for loaded in self.adapters()}
        if live.adapter is None or live.adapter in known:
            version = known.get(live.adapter) if live.adapter else None
            if domain is not None:
                namespace = self.namespace_of(
                    live.adapter, start_position=live.start_position
                )
        # Else the adapter was unloaded meanwhile: this request stays on it, alone.
        self.scheduler.restart(live.sample_id, namespace, version, now, domain=domain)

    def _drop_unused_adapters(self) -> None:
        """Free the versions that no name, request or waiting re-check refers to."""
        if len(self._adapters.loras) == len(self.adapters()):
            return
        used = {loaded.version for loaded in self.adapters()}
        used |= self._rechecks.adapters()
        used |= {r.spec.adapter for r in self.scheduler.requests() if r.spec.adapter}
        self._adapters.drop_unused(used)

    def _check_between_steps(
        self, verb: str, in_flight: InFlight = InFlight.FINISH
    ) -> None:
        if not isinstance(in_flight, InFlight):
            raise ConfigError(
                f"in_flight must be InFlight.FINISH, RESTART or ABORT, "
                f"got {in_flight!r}"
            )
        if self._broken_by is not None:
            raise InvariantError(f"this engine stopped at a defect ({self._broken_by})")
        if self.scheduler.pending is not None or self._is_telling:
            raise ConfigError(
                f"{verb} was called inside on_logits or on_event; call it between steps"
            )

    # Private: making

    def _make_ledger(self, costs: CostModel) -> Ledger:
        return Ledger(
            self.config.block_size,
            costs,
            max_history_blocks=_HISTORY_SIZE * self.kv.num_blocks,
        )

    def _make_core(
        self, settings: CoreSettings, recorder: StepRecorder | None
    ) -> tuple[PrefixCache, Scheduler]:
        if recorder is not None:
            return recorder.make_core(settings, ledger=self.ledger)
        cache = PrefixCache(
            settings.cache,
            Retention.of(settings.make_policy, settings.cache, settings.quotas),
            watchers=() if self.ledger is None else (self.ledger,),
        )
        scheduler = Scheduler(
            settings.scheduler,
            cache,
            settings.make_order(),
            costs=settings.costs,
            ledger=self.ledger,
        )
        return cache, scheduler

    def _make_runner(self, numerics: Numerics) -> ModelRunner:
        return ModelRunner(
            self.loaded.model,
            self.kv,
            numerics,
            num_query_heads=self.loaded.num_query_heads,
            loras=self._adapters.loras,
        )

    def _check(self, numerics: Numerics, *, runs_self_test: bool) -> None:
        """Raise `NumericsError` unless this build and model keep the class's bits."""
        check_numerics(
            self.loaded,
            self._linears,
            self._make_runner(numerics),
            runs_self_test=runs_self_test,
        )

    def _identify(self, numerics: Numerics) -> ComputeIdentity:
        return identify(
            self.loaded,
            numerics,
            block_size=self.config.block_size,
            is_packed=self._linears.is_packed,
        )

    def _make_kv(self, num_blocks: int) -> KvMemory:
        loaded = self.loaded
        return KvMemory(
            num_layers=loaded.num_layers,
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            num_kv_heads=loaded.num_kv_heads,
            head_dim=loaded.head_dim,
            dtype=loaded.dtype,
        )

    def _check_stop(self, prompt: TokenIds, params: SamplingParams) -> None:
        if not params.stop:
            return
        if self.loaded.tokenizer is None:
            raise StopInPrompt("stop strings need a tokenizer", field="stop")
        if params.allows_stop_in_prompt:
            return
        text = self.loaded.tokenizer.decode([token for token in prompt if token >= 0])
        for stop in params.stop:
            if stop in text:
                raise StopInPrompt(
                    f"stop string {stop!r} occurs in the prompt, so it probably is not "
                    f"what should end the output; choose another, or set "
                    f"allows_stop_in_prompt to look for it in the output only",
                    field="stop",
                )

    def _record(self, plan: StepPlan, start: float, end: float) -> None:
        num_decode = sum(1 for c in plan.chunks if self._is_decode(c.request_id))
        self.steps.append(
            StepRecord(
                step=plan.step,
                start_s=start,
                end_s=end,
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
            )
        )

    def _is_decode(self, request_id: RequestId) -> bool:
        request = self.scheduler.request(request_id)
        return request is not None and not request.is_prefilling


def _domain_of(sharing: SharingPolicy, live: LiveSample) -> Domain | None:
    """Return the domain that a policy gives a request in flight.

    A class that the policy does not know any more shares with nobody.
    """
    try:
        return sharing.domain(live.tenant, live.request_class)
    except RequestError:
        return None
