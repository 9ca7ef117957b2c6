"""Lists of names and numbers, as people type them. Quick to import."""

from __future__ import annotations

from stemkv.errors import ConfigError

__all__ = ["pairs_listed"]


def pairs_listed(option: str, text: str | None) -> dict[str, float]:
    """Return the numbers of a list such as `acme=2,globex=0.5`, by name."""
    pairs: dict[str, float] = {}
    for word in [] if text is None else text.split(","):
        name, sign, number = word.strip().rpartition("=")
        try:
            value = float(number)
        except ValueError:
            sign = ""
            value = 0.0
        if not sign or not name:
            raise ConfigError(
                f"{option} takes names and numbers as in acme=2,globex=0.5, "
                f"got {word!r:.60}"
            )
        if name in pairs:
            raise ConfigError(f"{option} has {name!r:.60} twice")
        pairs[name] = value
    return pairs
