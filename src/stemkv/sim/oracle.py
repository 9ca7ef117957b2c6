"""Hints from hindsight: what callers could have said, had they known.

Owns two oracles, each with a share of the answers missing or wrong, so that a hint can
be priced before anybody implements it. All of it is read off what came later in the
trace, and no service knows that much: results say what a hint is worth at best.
"""

from __future__ import annotations

import math
import random

from stemkv.core.prefix.hints import NO_HINTS, Hints
from stemkv.errors import ConfigError
from stemkv.sim.bounds import next_uses
from stemkv.sim.reuse import Reuses

__all__ = ["declared_next_uses", "session_ends"]

# A time from each stretch that the core tells apart; the last one is never.
_ANSWERS_S = (5.0, 30.0, 150.0, 1_000.0, math.inf)


def declared_next_uses(
    reuses: Reuses, *, wrong_share: float = 0.0, seed: int = 0
) -> list[Hints]:
    """Return for each request when its prompt is used again, of some at random.

    A prompt is used again when its last unit but one is: the last one is often partly
    filled and so never shared. `wrong_share` of the requests answer at random.
    """
    _check_share("wrong_share", wrong_share)
    rng = random.Random(seed)
    arrivals = [request.arrival_s for request in reuses.trace.requests]
    result = []
    for index, following in enumerate(_following(reuses)):
        # Drawn for each request, so that two shares differ in the share only.
        is_wrong, answer_s = rng.random() < wrong_share, rng.choice(_ANSWERS_S)
        if not is_wrong:
            answer_s = math.inf
            if following is not None:
                answer_s = max(0.0, arrivals[following] - arrivals[index])
        result.append(Hints(next_use_s=answer_s))
    return result


def session_ends(reuses: Reuses, *, share: float = 1.0, seed: int = 0) -> list[Hints]:
    """Return for each request its session and whether it is the last, for some sessions.

    Where the trace has no sessions they are inferred: whoever uses a prompt next, as
    `declared_next_uses` means it, continues it. `share` of the sessions say so.
    """
    _check_share("share", share)
    rng = random.Random(seed)
    requests = reuses.trace.requests
    if any(request.session is not None for request in requests):
        names = [
            None
            if request.session is None
            else f"{len(request.tenant)}:{request.tenant}{request.session}"
            for request in requests
        ]
    else:
        names = _inferred(reuses)
    last = {name: index for index, name in enumerate(names)}
    tells: dict[str, bool] = {}
    result = []
    for index, name in enumerate(names):
        if name is None:
            result.append(NO_HINTS)
            continue
        if name not in tells:
            tells[name] = rng.random() < share
        if tells[name]:
            result.append(Hints(session=name, ends_session=last[name] == index))
        else:
            result.append(NO_HINTS)
    return result


def _inferred(reuses: Reuses) -> list[str | None]:
    names: list[str | None] = [None] * len(reuses.trace.requests)
    for index, following in enumerate(_following(reuses)):
        own = names[index]
        if own is None:
            own = names[index] = f"session {index}"
        if following is not None:
            names[following] = own  # of several, the latest
    return names


def _following(reuses: Reuses) -> list[int | None]:
    """Return for each request who uses its prompt next."""
    never = len(reuses.trace.requests)
    result: list[int | None] = []
    for request, segments in zip(reuses.trace.requests, next_uses(reuses), strict=True):
        depth = max(0, len(request.units) - 2)
        following = next(
            (use for use, start, end in segments if start <= depth < end), never
        )
        result.append(None if following == never else following)
    return result


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a share from 0 to 1, got {value}")
