"""News is heard in the order it happened, whatever its listeners do."""

from __future__ import annotations

import pytest

from stemkv.core import FinishReason
from stemkv.core.schedule.events import Event, RequestAborted, TokenSampled
from stemkv.core.schedule.outbox import Outbox
from tests.core.scheduling import Driver, of_type


def test_what_a_listener_causes_comes_after_what_it_has_not_heard() -> None:
    outbox: Outbox[str] = Outbox()
    heard: list[str] = []

    def listen(news: str) -> None:
        heard.append(news)
        if news == "a":
            outbox.put("caused by a")
            outbox.deliver(listen)  # as a verb would that the listener calls

    outbox.extend(["a", "b", "c"])
    outbox.deliver(listen)

    assert heard == ["a", "b", "c", "caused by a"]
    assert len(outbox) == 0


def test_nothing_is_told_twice_or_lost_when_a_listener_raises() -> None:
    outbox: Outbox[int] = Outbox()
    heard: list[int] = []

    def listen(news: int) -> None:
        heard.append(news)
        if news == 2:
            raise ValueError("tired")

    outbox.extend([1, 2, 3])
    with pytest.raises(ValueError, match="tired"):
        outbox.deliver(listen)
    outbox.deliver(listen)

    assert heard == [1, 2, 3]


def test_a_cancel_in_a_delivery_does_not_overtake_a_token() -> None:
    """Of two requests that sample, the first one's news cancels the second."""
    driver = Driver()
    driver.add("first", "abc")
    driver.add("second", "cab")
    outbox: Outbox[Event] = Outbox()
    heard: list[Event] = []

    def listen(event: Event) -> None:
        heard.append(event)
        if isinstance(event, TokenSampled) and event.request_id == "first":
            assert driver.scheduler.cancel("second", driver.now)
            outbox.extend(driver.scheduler.take_events())
            outbox.deliver(listen)

    plan = driver.schedule()
    outbox.extend(
        driver.scheduler.commit(plan, driver.runner.execute(plan), driver.now)
    )
    outbox.deliver(listen)

    of_second = [e for e in heard if getattr(e, "request_id", "") == "second"]
    (token,) = of_type(of_second, TokenSampled)
    (end,) = of_type(of_second, RequestAborted)
    assert end.reason is FinishReason.CANCELLED
    assert of_second.index(token) < of_second.index(end)
