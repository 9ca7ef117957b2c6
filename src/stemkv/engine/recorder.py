"""Writing a step log while an engine runs.

Owns what of a core's verbs is written, and what happens when it cannot be. An engine
without a recorder pays nothing for it. Knows no tensors; the records are
`measure.steplog`'s, their form on disk `measure.steplog_lines`'.
"""

from __future__ import annotations

import logging
from typing import Any, TextIO

from stemkv.core.books.cost import CostModel, FittedCost, RooflineCost
from stemkv.core.core import Core
from stemkv.errors import ConfigError
from stemkv.measure.steplog import (
    CALLS,
    Abandoned,
    Call,
    Committed,
    CoreState,
    Planned,
    PlanRecord,
    StepLogHeader,
)
from stemkv.measure.steplog_lines import StepLogWriter

__all__ = ["StepRecorder"]

_log = logging.getLogger(__name__)


class StepRecorder:
    """Records one engine into a text file, which stays the caller's to close.

    The file will hold the token ids of all prompts and outputs. Hand it to `Engine`
    and to one engine only. If writing fails, the log ends there, `error` says why, and
    the engine goes on.
    """

    def __init__(self, file: TextIO, *, model: str) -> None:
        self.error: OSError | ValueError | None = None
        self._file = file
        self._model = model
        self._writer: StepLogWriter | None = None
        self._is_used = False

    def begin(self, core: Core) -> None:
        """Write the header."""
        if self._is_used:
            raise ConfigError("a recorder records one engine; make another")
        self._is_used = True
        header = StepLogHeader(
            model=self._model, core=core.config, costs=_recordable(core.costs)
        )
        try:
            self._writer = StepLogWriter(self._file, header)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def hear(self, core: Core, verb: str, answer: Any, /, **asked: Any) -> None:
        """Append a call that changed something."""
        if self._writer is None or (verb == "cancel" and not answer):
            return
        try:
            self._writer.write(_call(core, verb, answer, asked))
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: OSError | ValueError) -> None:
        if isinstance(error, ValueError) and not self._file.closed:
            raise error  # not what writing to a closed file raises
        # Who only records must not stop the engine.
        _log.exception("the step log ends here: it cannot be written")
        self.error = error
        self._writer = None


def _call(core: Core, verb: str, answer: Any, asked: dict[str, Any]) -> Call:
    """Return the record of a verb; most are their arguments under their own names."""
    match verb:
        case "schedule":
            return Planned(plan=PlanRecord.of(answer, core.scheduler))
        case "commit":
            result, state = asked["result"], CoreState.of(core.scheduler)
            return Committed(
                now=asked["now"],
                samples=result.samples,
                state=state,
                failed=result.failed,
            )
        case "abandon":
            return Abandoned(now=asked["now"], state=CoreState.of(core.scheduler))
    call: Call = CALLS[verb](**asked)
    return call


def _recordable(costs: CostModel | None) -> FittedCost | RooflineCost | None:
    if costs is None or isinstance(costs, FittedCost | RooflineCost):
        return costs
    raise ConfigError(
        f"costs of type {type(costs).__name__} cannot be written to a step log, "
        f"which could not be repeated without them; give FittedCost or "
        f"RooflineCost, or record without costs"
    )
