"""Prompts whose inputs are partly vectors instead of vocabulary tokens.

Owns the pairing of supplied embeddings with the virtual ids that name them: images
behind a vision model, soft prompts, retrieved vectors. The digest is taken from the
vectors as the model will read them, so nothing about how they were made can be missing
from the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stemkv.core.prefix.tokens import Span, TokenIds
from stemkv.engine.digest import tensor_digest
from stemkv.errors import RequestError

__all__ = ["EmbeddedPrompt"]


class EmbeddedPrompt:
    """Token ids with spans, and the vectors the spans stand for.

    `parts` are joined in order: token ids as they are, tensors `[positions,
    embedding_size]` as spans. Tensors are copied and cast to `dtype`. Raises
    `RequestError` for another shape, a value that is not finite, or a span too short
    to be told from others.
    """

    def __init__(
        self,
        parts: Sequence[TokenIds | torch.Tensor],
        *,
        embedding_size: int,
        dtype: torch.dtype,
    ) -> None:
        self.embedding_size = embedding_size
        self.dtype = dtype
        joined: list[TokenIds | Span] = []
        vectors = []
        positions: list[int] = []
        end = 0
        for index, part in enumerate(parts):
            if isinstance(part, torch.Tensor):
                own = _checked(part, index, embedding_size, dtype)
                joined.append(
                    Span(digest=tensor_digest("span", own), num_tokens=len(own))
                )
                vectors.append(own)
                positions.extend(range(end, end + len(own)))
                end += len(own)
            elif isinstance(part, TokenIds) and not part.has_spans:
                joined.append(part)
                end += len(part)
            else:
                raise RequestError(
                    f"part {index} must be TokenIds of text or a tensor of embeddings, "
                    f"got {type(part).__name__}",
                    field="prompt",
                )
        self.tokens = TokenIds.from_parts(joined)
        self._vectors = torch.cat(vectors) if vectors else None
        self._positions = torch.tensor(positions, dtype=torch.long)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return the vectors of the span positions in `start … end - 1`, in order."""
        if self._vectors is None:
            raise RequestError("this prompt has no spans", field="prompt")
        first, last = torch.searchsorted(self._positions, torch.tensor([start, end]))
        return self._vectors[int(first) : int(last)]


def _checked(
    part: torch.Tensor, index: int, embedding_size: int, dtype: torch.dtype
) -> torch.Tensor:
    if (
        part.dim() != 2
        or part.shape[1] != embedding_size
        or not part.is_floating_point()
    ):
        raise RequestError(
            f"part {index} must be embeddings of shape [positions, {embedding_size}], got "
            f"{list(part.shape)} of {part.dtype}",
            field="prompt",
        )
    own = part.detach().to(dtype, copy=True).contiguous()
    if not bool(own.isfinite().all()):
        raise RequestError(
            f"part {index} has embeddings that are not finite in {dtype}",
            field="prompt",
        )
    return own
