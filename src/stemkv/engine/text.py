"""Output text of one sample, token by token.

Owns incremental decoding and stop strings. Text is decoded in a sliding window: tokens
may join into one character, so a token's text is final once its successor is known.
"""

from __future__ import annotations

from typing import Any

from stemkv.core.prefix.tokens import TokenIds

__all__ = ["OutputText", "stop_near_end"]

_INCOMPLETE = "\ufffd"  # what a decoder shows for half a character

# A stop string near the end of a prompt is most likely one that its caller has
# forgotten there: a separator of the template, say, comes back with every turn.
_NUM_SEARCHED = 256  # tokens
_MAX_CHAR_BYTES = 4


def stop_near_end(
    tokenizer: Any, prompt: TokenIds, stop: tuple[str, ...]
) -> str | None:
    """Return a stop string that occurs in the text of a prompt's last tokens.

    Looks at 256 tokens, or as many as the longest stop string can have: one for each of
    its bytes. So it takes as long for a long prompt as for a short one.
    """
    num_searched = max(_NUM_SEARCHED, *(_MAX_CHAR_BYTES * len(each) for each in stop))
    last = [prompt[i] for i in range(max(0, len(prompt) - num_searched), len(prompt))]
    text = tokenizer.decode([token for token in last if token >= 0])
    return next((each for each in stop if each in text), None)


class OutputText:
    """Decodes as tokens arrive, in O(1) window length per token."""

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._window = 0  # first token of the window
        self._shown = 0  # tokens whose text is in `text`
        self._longest = max((len(each) for each in stop), default=0)
        self.text = ""

    @property
    def num_tokens(self) -> int:
        """Tokens taken so far."""
        return len(self._tokens)

    @property
    def num_final(self) -> int:
        """Leading characters that no later token can take away.

        What may be the beginning of a stop string is not among them.
        """
        end = len(self.text)
        for start in range(max(0, end - self._longest + 1), end):
            tail = self.text[start:]
            if any(each.startswith(tail) for each in self._stop):
                return start
        return end

    def append(self, token: int) -> bool:
        """Take a token; return whether a stop string ends the text.

        The text then ends just before the first stop string.
        """
        self._tokens.append(token)
        old_length = len(self.text)
        shown = self._decode(self._tokens[self._window : self._shown])
        whole = self._decode(self._tokens[self._window :])
        if len(whole) <= len(shown) or whole.endswith(_INCOMPLETE):
            return False
        self.text += whole[len(shown) :]
        self._window, self._shown = self._shown, len(self._tokens)
        return self._cut_at_stop(old_length)

    def finish(self) -> None:
        """Add what is left when no more tokens come, half characters included.

        A stop string that shows only now still cuts the text.
        """
        old_length = len(self.text)
        shown = self._decode(self._tokens[self._window : self._shown])
        whole = self._decode(self._tokens[self._window :])
        self.text += whole[len(shown) :]
        self._window, self._shown = self._shown, len(self._tokens)
        self._cut_at_stop(old_length)

    def _cut_at_stop(self, old_length: int) -> bool:
        found = []
        for stop in self._stop:
            # A stop string may begin in text that was there before.
            at = self.text.find(stop, max(0, old_length - len(stop) + 1))
            if at >= 0:
                found.append(at)
        if not found:
            return False
        self.text = self.text[: min(found)]
        return True

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
