"""What may come in: types and ranges of arguments, checked once per call.

Owns the checks of `PrefixCache`'s public verbs. All are O(1); what a token buffer holds
is checked where `TokenIds` are made.
"""

from __future__ import annotations

import math
from typing import cast

from stemkv.core.prefix.identity import Domain
from stemkv.core.prefix.tokens import TOKEN_BYTES, TokenBuffer, TokenIds
from stemkv.errors import RequestError, TokenOutOfRange

__all__ = ["check_domain", "check_namespace", "check_now", "token_buffer"]

_NAMESPACE_BYTES = 32  # SHA-256
_INF = math.inf


def token_buffer(tokens: bytes | TokenBuffer | TokenIds) -> bytes:
    """Return the buffer of token ids, 4 bytes each."""
    if not isinstance(tokens, bytes):
        if isinstance(tokens, TokenIds):
            return tokens.buffer
        if isinstance(tokens, TokenBuffer):
            return cast(bytes, tokens)  # it reads as bytes do
        raise TokenOutOfRange(
            f"tokens must be TokenIds or their bytes, got {type(tokens).__name__}; "
            f"TokenIds.from_ids and from_buffer convert",
            field="tokens",
        )
    if len(tokens) % TOKEN_BYTES:
        raise TokenOutOfRange(
            f"a token buffer holds 4 bytes per token, got {len(tokens)} bytes",
            field="tokens",
        )
    return tokens


def check_namespace(namespace: object) -> None:
    """Refuse what no identity can have made; `None` shares with nobody."""
    if namespace is None:
        return
    if not isinstance(namespace, bytes) or len(namespace) != _NAMESPACE_BYTES:
        raise RequestError(
            f"a namespace must be the {_NAMESPACE_BYTES} bytes that "
            f"ComputeIdentity.namespace returns, or None, got {namespace!r:.80}",
            field="namespace",
        )


def check_domain(domain: object) -> None:
    """Refuse what is no domain: a bare name could be a tenant's or a group's."""
    if not isinstance(domain, Domain):
        raise RequestError(
            f"a domain must be a Domain, such as Domain.private('ann'), "
            f"got {domain!r:.80}",
            field="domain",
        )


def check_now(now: object) -> None:
    """Refuse a time that is no finite number: all order in time would be lost."""
    if type(now) is float and -_INF < now < _INF:
        return  # nearly always
    if (
        not isinstance(now, int | float)
        or isinstance(now, bool)
        or not -_INF < now < _INF
    ):
        raise RequestError(
            f"now must be finite seconds on your clock, got {now!r:.80}", field="now"
        )
