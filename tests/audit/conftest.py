"""Audits build engines by the dozen; what their kernels do is tried once for all."""

from tests.engine.conftest import _kernels_are_tried_once

__all__ = ["_kernels_are_tried_once"]
