"""Where requests come in: from what a caller says to what the core is asked for.

Owns the checks of a request's values, once per call, and the way from tenant and class
to a domain. Each refusal names the field and what to give instead. Keeps nothing of any
request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stemkv.core.prefix.hints import Hints
from stemkv.core.prefix.identities import Identities
from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.sharing import SharingPolicy
from stemkv.core.prefix.tokens import TokenIds
from stemkv.core.schedule.request import RequestId, RequestSpec
from stemkv.engine.clock import is_seconds
from stemkv.engine.config import EngineConfig
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.load import LoadedModel
from stemkv.engine.samples import LiveSample
from stemkv.engine.sampling import SamplingParams
from stemkv.engine.text import stop_near_end
from stemkv.errors import ConfigError, EmptyPrompt, RequestError, StopInPrompt

__all__ = [
    "NOBODY",
    "ONLY_TENANT",
    "CheckedIn",
    "Door",
    "check_id",
    "is_seconds",
    "listed",
]

ONLY_TENANT: Final = "default"  # whose requests are that name none, with one tenant
NOBODY: Final = "(no tenant)"  # on whose account they are otherwise

_MAX_COUNTED_TENANTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedIn:
    """A request whose own values are right; `spec` names no namespace yet."""

    spec: RequestSpec
    params: SamplingParams
    embedded: EmbeddedPrompt | None
    tenant: str | None  # None: nobody's
    shares: bool  # False: with nobody, in neither direction


class Door:
    """Checks what is asked for, once per call.

    `is_taken` says whether an id is in flight. `sharing` is the policy of now, and may
    be replaced.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        identities: Identities,
        is_taken: Callable[[RequestId], bool],
    ) -> None:
        self.sharing = config.sharing
        self._is_taken = is_taken
        self._is_single_tenant = config.single_tenant
        self._loaded = loaded
        self._identities = identities
        self._num_named: dict[str, int] = {}  # by tenant: ids tell nobody of others

    # Questions

    def tenant(self, tenant: str | None) -> str | None:
        """Return whose a request is that names this tenant; `None`: nobody's."""
        if tenant is None:
            return ONLY_TENANT if self._is_single_tenant else None
        if tenant == NOBODY:
            raise RequestError(
                f"tenant must be the authenticated principal; {NOBODY!r} stands for "
                f"requests without one",
                field="tenant",
            )
        return tenant

    def domain(self, tenant: str | None, request_class: str | None) -> Domain | None:
        """Return the domain of a tenant's request; `None`: it shares with nobody.

        So does a request of nobody: there is no telling whom it may share with.
        """
        if tenant is None:
            self.sharing.domain(NOBODY, request_class)  # says what is wrong with it
            return None
        return self.sharing.domain(tenant, request_class)

    def under(self, sharing: SharingPolicy) -> Callable[[LiveSample], Domain | None]:
        """Return what says which domain a request in flight has under a policy.

        A class that the policy does not know any more shares with nobody.
        """

        def domain_of(live: LiveSample) -> Domain | None:
            if live.tenant is None:
                return None
            try:
                return sharing.domain(live.tenant, live.request_class)
            except RequestError:
                return None

        return domain_of

    def domain_of(self, live: LiveSample) -> Domain | None:
        """Return the domain of a request in flight under the policy of now."""
        return self.under(self.sharing)(live)

    def owner(self, tenant: str | None) -> str:
        """Return whose something is that outlives a request; refuses nobody."""
        named = self.tenant(tenant)
        if named is None:
            raise RequestError(
                "tenant is missing, and what names none leaves nothing behind; name "
                "it, or set single_tenant in EngineConfig if there is only one",
                field="tenant",
            )
        return named

    def encode(
        self, prompt: str | Sequence[dict[str, str]], *, is_answer_next: bool
    ) -> TokenIds:
        """Do what `Engine.encode` says."""
        tokenizer = self._loaded.tokenizer
        if tokenizer is None:
            raise ConfigError("this engine has no tokenizer; pass TokenIds")
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise _wrong_prompt("must be text or messages", prompt)
        if not prompt:
            raise EmptyPrompt("prompt is empty; give some text", field="prompt")
        if isinstance(prompt, str):
            return TokenIds.from_ids(_encoded(lambda: tokenizer(prompt)["input_ids"]))
        for message in prompt:
            if not isinstance(message, Mapping) or "role" not in message:
                raise _wrong_prompt(
                    "must be text or messages, each a mapping with role and content",
                    message,
                )
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model {self._loaded.name} has no chat template; pass text instead"
            )
        return TokenIds.from_ids(
            _encoded(
                lambda: tokenizer.apply_chat_template(
                    list(prompt),
                    add_generation_prompt=is_answer_next,
                    return_dict=False,
                )
            )
        )

    # Verbs

    def check_in(
        self,
        prompt: TokenIds | EmbeddedPrompt,
        params: SamplingParams | None,
        *,
        request_id: str | None,
        tenant: str | None,
        request_class: str | None,
        adapter: str | None,
        start_position: int,
        arrival_s: float,
        hints: Hints,
    ) -> CheckedIn:
        """Return a request that the core can be asked about, or refuse it.

        Without an id of its own it gets one that is free.
        """
        params = SamplingParams() if params is None else params
        _check_kind("params", params, SamplingParams)
        _check_kind("hints", hints, Hints)
        if not is_seconds(arrival_s):
            raise RequestError(
                f"arrival_s must be finite seconds, got {_shown(arrival_s)}",
                field="arrival_s",
            )
        tokens, embedded = self._tokens_of(prompt)
        whose = self.tenant(tenant)
        domain = self.domain(whose, request_class)
        version = None
        if adapter is not None:
            version = self._identities.adapter(adapter).version
        tokens.check_vocabulary(self._loaded.vocab_size)
        self._check_stop(tokens, params)
        account = NOBODY if whose is None else whose
        spec = RequestSpec(
            request_id=self._id(request_id, account),
            prompt=tokens,
            max_new_tokens=params.max_new_tokens,
            arrival_s=arrival_s,
            domain=Domain.private(account) if domain is None else domain,
            namespace=None,
            num_samples=params.num_samples,
            adapter=version,
            start_position=start_position,
            tenant=account,
            request_class=request_class,
            hints=hints,
        )
        return CheckedIn(
            spec=spec,
            params=params,
            embedded=embedded,
            tenant=whose,
            shares=domain is not None,
        )

    # Private

    def _id(self, request_id: str | None, account: str) -> RequestId:
        """Return the caller's id, or one that is free and tells of nobody else."""
        if request_id is not None:
            return check_id(request_id)
        name = hashlib.sha256(account.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        number = self._num_named.pop(account, 0)  # the last of all when put back
        while self._is_taken(RequestId(f"request-{name}-{number}")):
            number += 1
        self._num_named[account] = number + 1
        if len(self._num_named) > _MAX_COUNTED_TENANTS:
            del self._num_named[next(iter(self._num_named))]
        return RequestId(f"request-{name}-{number}")

    def _tokens_of(
        self, prompt: TokenIds | EmbeddedPrompt
    ) -> tuple[TokenIds, EmbeddedPrompt | None]:
        if isinstance(prompt, EmbeddedPrompt):
            self._check_embedded(prompt)
            return prompt.tokens, prompt
        if not isinstance(prompt, TokenIds):
            raise _wrong_prompt(
                "must be TokenIds (`encode` makes them of text, `TokenIds.from_ids` of "
                "numbers), or what `embed` returns",
                prompt,
            )
        if prompt.has_spans:
            raise RequestError(
                "prompt has spans without their vectors; make it with `embed`",
                field="prompt",
            )
        return prompt, None

    def _check_embedded(self, prompt: EmbeddedPrompt) -> None:
        own = (self._loaded.embedding_size, self._loaded.dtype)
        if (prompt.embedding_size, prompt.dtype) != own:
            raise RequestError(
                f"prompt has embeddings of size {prompt.embedding_size} in "
                f"{prompt.dtype}, this model's are of size {own[0]} in {own[1]}; make "
                f"it with this engine's `embed`",
                field="prompt",
            )

    def _check_stop(self, prompt: TokenIds, params: SamplingParams) -> None:
        if not params.stop:
            return
        if self._loaded.tokenizer is None:
            raise StopInPrompt("stop strings need a tokenizer", field="stop")
        if params.allows_stop_in_prompt:
            return
        stop = stop_near_end(self._loaded.tokenizer, prompt, params.stop)
        if stop is not None:
            raise StopInPrompt(
                f"stop string {stop!r} occurs in the prompt, so it probably is not "
                f"what should end the output; choose another, or set "
                f"allows_stop_in_prompt to look for it in the output only",
                field="stop",
            )


def check_id(request_id: str) -> RequestId:
    """Refuse what is no id; whether it is one in flight is another question."""
    if not isinstance(request_id, str):
        raise RequestError(
            f"request_id must be text, got {type(request_id).__name__}",
            field="request_id",
        )
    return RequestId(request_id)


def listed(prompts: Iterable[Any]) -> list[Any]:
    """Return the prompts of one call; a single one is refused, it looks like many."""
    is_one = isinstance(prompts, str | bytes | TokenIds | EmbeddedPrompt | Mapping)
    if is_one or not isinstance(prompts, Iterable):
        raise RequestError(
            f"prompts must be a list of prompts, got {type(prompts).__name__}; for a "
            f"single one give [prompt]",
            field="prompts",
        )
    return list(prompts)


def _encoded(encode: Callable[[], Any]) -> Any:
    """Blame the prompt for what a tokenizer or a template cannot take."""
    try:
        return encode()
    except MemoryError:
        raise
    except Exception as error:
        raise RequestError(
            f"prompt cannot be made into tokens ({type(error).__name__}: "
            f"{error!s:.200})",
            field="prompt",
        ) from error


def _check_kind(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(
            f"{field} must be {kind.__name__}, got {type(value).__name__}", field=field
        )


def _shown(value: object) -> str:
    """Return a value for a message; an integer may be too long to be written."""
    is_short = not isinstance(value, int) or abs(value) < 1 << 64
    return repr(value)[:80] if is_short else "a very large integer"


def _wrong_prompt(wanted: str, got: object) -> RequestError:
    return RequestError(f"prompt {wanted}, got {type(got).__name__}", field="prompt")
