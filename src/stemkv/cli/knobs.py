"""Which settings of the core are options, and what they are called there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["KNOBS", "Knob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting of the core that people may type; its help text is the field's."""

    part: str  # of a `CoreConfig`
    field: str
    option: str
    per: float = 1.0  # what is typed, over this, is the setting
    unit: str = ""  # of what is typed, for the help
    needs_clock: bool = True

    @property
    def parameter(self) -> str:
        """Its name in a command."""
        return self.option.partition("/")[0].strip("-").replace("-", "_")


# A new knob of the core is one line here.
KNOBS: Final = (
    Knob(part="cache", field="block_size", option="--block-size", needs_clock=False),
    Knob(part="scheduler", field="token_budget", option="--budget"),
    Knob(part="scheduler", field="max_num_running", option="--max-running"),
    Knob(part="eviction", field="objective", option="--objective", needs_clock=False),
    Knob(part="order", field="lane", option="--lane"),
    Knob(part="order", field="quantum", option="--quantum"),
    Knob(part="order", field="decode_weight", option="--decode-weight"),
    Knob(
        part="order",
        field="pauses_prefills",
        option="--pause-prefills/--no-pause-prefills",
    ),
    Knob(part="order", field="weights", option="--weights"),
    Knob(part="order", field="slo_ttft_s", option="--slo-class"),
    Knob(
        part="scheduler",
        field="step_time_s",
        option="--step-time",
        per=1e3,
        unit="Milliseconds",
    ),
    Knob(part="sessions", field="share", option="--session-share"),
)
