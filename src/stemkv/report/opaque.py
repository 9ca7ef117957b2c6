"""What a report says where of prompts only the lengths are known, or nothing can hit.

Owns these sentences. A trace of lengths can be replayed, but whether two of its requests
begin alike is not in it, and a hit rate of zero would be an invention.
"""

from __future__ import annotations

from stemkv.measure.results import TraceFacts
from stemkv.report.wording import count

__all__ = ["opaque_headline", "opaque_note", "warned"]


def opaque_headline(trace: TraceFacts) -> str:
    """Return the headline of whatever replayed a trace that tells no prompt at all."""
    return (
        f"Inconclusive: only lengths are known of the prompts of "
        f"{count(trace.num_requests, 'request')}, so nothing can be said of reuse."
    )


def opaque_note(trace: TraceFacts) -> list[str]:
    """Return what unknown prompts among others mean for hit rates, if there are any."""
    if trace.is_opaque or not trace.num_opaque:
        return []
    return [
        f"Only the length of the prompt is known of {trace.num_opaque:,} of "
        f"{count(trace.num_requests, 'request')}, so hit rates are lower bounds."
    ]


def warned(trace: TraceFacts) -> list[str]:
    """Return why nothing could be reused at all, if so: zeros would hide it."""
    return [f"Warning: {text}." for text in trace.warnings]
