"""One plan carried out; if its forward pass fails, whose fault that was.

Owns the search for the chunks that cannot be computed. Kernels and model code fail in
all ways, and what makes them fail is mostly one request: an odd adapter, an odd vector.
It alone must end.

Copies run first and are done once: by the time a pass has failed, a copy's source may
have been overwritten. So a plan whose copies fail is given up as a whole. A chunk can be
computed again: it writes its own slots only, and reads nothing that others of the step
write. Run alone, in class `exact`, it gives the bits that it would have given among the
others.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from stemkv.core.schedule.plan import StepPlan
from stemkv.core.schedule.request import RequestId
from stemkv.engine.embedding import EmbeddedPrompt
from stemkv.engine.runner import ModelRunner
from stemkv.errors import InvariantError, ModelError

__all__ = ["Computed", "compute"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What came of a plan's chunks."""

    logits: Mapping[RequestId, torch.Tensor]  # of chunks that sample and are computed
    failed: frozenset[RequestId] = frozenset()


def compute(
    runner: ModelRunner, plan: StepPlan, embedded: Mapping[RequestId, EmbeddedPrompt]
) -> Computed | None:
    """Run a plan; `None` if nothing of it can be had.

    That is if a copy fails or every chunk does: then it is nobody's fault in
    particular. Memory that runs out is no different: apart, the chunks take less of it.
    `InvariantError` and `ModelError`, a model that cannot be served at all, pass
    through.
    """
    try:
        if plan.copies:
            runner.execute(replace(plan, chunks=()))
            plan = replace(plan, copies=())
    except (InvariantError, ModelError):
        raise
    except Exception:
        _log.exception("step %d: a copy failed; its requests end", plan.step)
        return None
    try:
        return Computed(logits=runner.execute(plan, embedded))
    except (InvariantError, ModelError):
        raise
    except Exception:
        _log.exception(
            "step %d failed with %d chunks in it", plan.step, len(plan.chunks)
        )
    return _compute_apart(runner, plan, embedded)


def _compute_apart(
    runner: ModelRunner, plan: StepPlan, embedded: Mapping[RequestId, EmbeddedPrompt]
) -> Computed | None:
    if len(plan.chunks) <= 1:
        return None  # it was alone already
    logits: dict[RequestId, torch.Tensor] = {}
    failed: set[RequestId] = set()
    for chunk in plan.chunks:
        try:
            logits |= runner.execute(replace(plan, chunks=(chunk,)), embedded)
        except (InvariantError, ModelError):
            raise
        except Exception as error:
            failed.add(chunk.request_id)
            _log.error(
                "request %s fails a forward pass of its own as well (%s); it ends",
                chunk.request_id,
                type(error).__name__,
            )
    if len(failed) == len(plan.chunks):
        return None
    return Computed(logits=logits, failed=frozenset(failed))
