"""Every error StemKV raises, in one tree.

Owns the types and their meaning. "Not now" is never an error here: a full pool
answers `None`. "Never" is a `RequestError` or `ConfigError` with the numbers and
the remedy. "Impossible" is an `InvariantError`, which nobody may swallow.

```
StemKVError
├── ConfigError(ValueError)        bad settings, before anything starts
├── RequestError(ValueError)       the caller's fault, one request (HTTP 4xx)
│   ├── EmptyPrompt
│   ├── TokenOutOfRange
│   ├── PromptTooLong
│   ├── InvalidLimit
│   ├── StopInPrompt
│   ├── DuplicateRequest
│   └── UnknownAdapter
├── ModelError                     a model that cannot be loaded or served
│   ├── ModelNotFound
│   ├── BrokenModel
│   ├── UnsupportedModel
│   └── BrokenAdapter
├── StepLogError(ValueError)       a step log that is broken or cannot be repeated
├── TraceError(ValueError)         a trace that cannot be read; knows file, line, field
├── NumericsError                  the running build cannot keep the promised bits
└── InvariantError                 our fault: crash loudly, never swallow
    └── DoubleRelease
```
"""

from __future__ import annotations

__all__ = [
    "BrokenAdapter",
    "BrokenModel",
    "ConfigError",
    "DoubleRelease",
    "DuplicateRequest",
    "EmptyPrompt",
    "InvalidLimit",
    "InvariantError",
    "ModelError",
    "ModelNotFound",
    "NumericsError",
    "PromptTooLong",
    "RequestError",
    "StemKVError",
    "StepLogError",
    "StopInPrompt",
    "TokenOutOfRange",
    "TraceError",
    "UnknownAdapter",
    "UnsupportedModel",
]


class StemKVError(Exception):
    """Root of everything StemKV raises on purpose."""


class ConfigError(StemKVError, ValueError):
    """A setting is invalid; the message names the field, its value and the remedy."""


class RequestError(StemKVError, ValueError):
    """One request is invalid; other requests are unharmed.

    `field` names the part of the request at fault, so that a server can point at it.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class EmptyPrompt(RequestError):
    """The prompt has no tokens, so there is nothing to predict from."""


class TokenOutOfRange(RequestError):
    """A token id is negative, too large for int32, or outside the vocabulary."""


class PromptTooLong(RequestError):
    """The request can never fit the cache or the model's context."""


class InvalidLimit(RequestError):
    """A limit or sampling value of the request is outside its range."""


class StopInPrompt(RequestError):
    """A stop string already occurs in the prompt."""


class DuplicateRequest(RequestError):
    """Another request in flight has the same id."""


class UnknownAdapter(RequestError):
    """The request asks for an adapter that is not loaded."""


class ModelError(StemKVError):
    """A model cannot be loaded or served."""


class ModelNotFound(ModelError):
    """The model path does not exist or holds no model."""


class BrokenModel(ModelError):
    """The model's files are damaged or do not fit together."""


class UnsupportedModel(ModelError):
    """The model has a property the engine would compute wrongly, so it refuses."""


class BrokenAdapter(ModelError):
    """An adapter's files are missing, damaged, or do not fit the model."""


class StepLogError(StemKVError, ValueError):
    """A step log is broken or cannot be repeated; names file, line and field."""


class TraceError(StemKVError, ValueError):
    """A trace, or one line of it, cannot be read.

    `line` is 0 when the file as a whole is meant, `field` is "" when the line is.
    """

    def __init__(
        self, message: str, *, file: str, line: int = 0, field: str = ""
    ) -> None:
        where = f"{file}:{line}" if line else file
        super().__init__(": ".join(filter(None, [where, field, message])))
        self.message = message
        self.file = file
        self.line = line
        self.field = field


class NumericsError(StemKVError):
    """The running build does not keep the bits that numerics class `exact` promises."""


class InvariantError(StemKVError):
    """Something impossible happened: a defect of StemKV, never of its caller."""


class DoubleRelease(InvariantError):
    """A lease or block was released twice."""
