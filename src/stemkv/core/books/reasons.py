"""Why prompt tokens were not reused.

Owns what namespaces stand for, and how a reason is found in the history. A reason is
the operator's to read and never decides a hit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from stemkv.core.books.entry import LedgerEntry, Miss, MissReason, Regret
from stemkv.core.books.history import History, Place
from stemkv.core.books.past import Past
from stemkv.core.prefix.tokens import end_outside_span

__all__ = ["Reasons"]

_MAX_NAMED = 4096  # namespaces; of one named before, a miss tells no fields


class Reasons:
    """Explains what a lookup did not find."""

    def __init__(self, block_size: int, history: History) -> None:
        self._block_size = block_size
        self._history = history
        self._facts: dict[bytes, Mapping[str, object]] = {}  # by namespace

    def name(self, namespace: bytes, facts: Mapping[str, object]) -> None:
        """Tell what a namespace stands for."""
        self._facts.pop(namespace, None)
        self._facts[namespace] = facts
        if len(self._facts) > _MAX_NAMED:
            del self._facts[next(iter(self._facts))]

    def facts(self, namespace: bytes) -> Mapping[str, object] | None:
        """Return what a namespace stands for; `None` if nobody told."""
        return self._facts.get(namespace)

    def explain(
        self,
        entry: LedgerEntry,
        prompt: bytes,
        reused: int,
        num_awaitable: int,
        *,
        after: Place | None,
        now: float,
    ) -> None:
        """Write down a reason for each token of the prompt behind the reused ones.

        `after` is where the whole blocks end that were reused.
        """
        size = self._block_size
        num_prompt = entry.num_prompt_tokens
        misses: list[Miss] = []
        regrets: list[Regret] = []
        # Of a prompt of whole blocks the last token is computed in any case, and with
        # it its block, unless the leading tokens of that are copied; and a span that
        # this cuts too short to tell.
        whole_end = end_outside_span(prompt, num_prompt - 1) // size * size
        position = reused
        awaitable = min(num_awaitable, whole_end)
        if position < awaitable:
            misses.append(Miss(position, awaitable, MissReason.NOT_YET_COMPUTED))
            position = awaitable
        if position < whole_end:
            assert entry.namespace is not None, "what has no namespace is not explained"
            first = position // size
            runs = self._history.past(
                entry.namespace,
                entry.domain,
                prompt,
                first,
                whole_end // size,
                after=after,
            )
            end = first * size
            for run in runs:
                start, end = max(position, end), end + run.num_blocks * size
                if start >= end:
                    continue
                left_s = run.past.left_s
                if left_s is not None and math.isfinite(left_s):
                    regrets.append(Regret(end - start, now - left_s))
                misses.append(Miss(start, end, *self._reason(entry, run.past)))
        tail = max(reused, whole_end)
        if tail < num_prompt:
            misses.append(Miss(tail, num_prompt, MissReason.BELOW_BLOCK))
        entry.misses = misses
        entry.regrets = tuple(regrets)

    def _reason(
        self, entry: LedgerEntry, past: Past
    ) -> tuple[MissReason, tuple[str, ...]]:
        if past.is_refused:
            return MissReason.NOT_RETAINED, ()
        if past.left_s is not None:
            return MissReason.EVICTED, ()
        if past.is_other_domain:
            return MissReason.OTHER_DOMAIN, ()
        if past.other_namespace is None:
            return MissReason.NEVER_SEEN, ()
        left = None if entry.namespace is None else self.facts(entry.namespace)
        return MissReason.IDENTITY_DIFFERS, _differing(
            left, self.facts(past.other_namespace)
        )


def _differing(
    left: Mapping[str, object] | None, right: Mapping[str, object] | None
) -> tuple[str, ...]:
    """Return the names of facts that differ, where both are known."""
    if left is None or right is None:
        return ()
    return tuple(
        name
        for name in dict.fromkeys((*left, *right))
        if name not in left or name not in right or left[name] != right[name]
    )
