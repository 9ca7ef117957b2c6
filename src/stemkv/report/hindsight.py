"""What a report says where hints were made from what came later.

Owns the sentence. A replay can give its requests hints that nobody could have given in
time, and no number of it must pass for what a service can have.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["hindsight_note"]


def hindsight_note(config: Mapping[str, object]) -> list[str]:
    """Return a caution if the hints of a run, by its settings, are hindsight."""
    hints = config.get("hints")
    if not isinstance(hints, str) or "hindsight" not in hints:
        return []
    return [
        f"Hints: {hints}. They were read off what came later in the trace, so this is "
        f"what such hints are worth at best, not what anybody can have."
    ]
