"""A real browser, driven over its debugging pipe: no port, no driver, no package.

The protocol is documented at https://chromedevtools.github.io/devtools-protocol/;
messages are JSON that a NUL byte ends, on file descriptors 3 (to it) and 4 (from it).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run tests as root
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
# A pipe's ends can be 3 and 4 already, the other way round, so both move out of the way.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
PATIENCE_S = 60.0  # a machine with one busy core starts a browser in ten


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One browser process; leave its `with` block to end it."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCH,
                str(to_browser),
                str(from_browser),
                program,
                *FLAGS,
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received = b""
        self._num_sent = 0
        self._target: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._to)  # a browser whose pipe ends, ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._from)

    def call(self, method: str, session: str | None = None, **params: Any) -> Any:
        self._num_sent += 1
        number = self._num_sent
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._received:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(0.0, left))
            part = os.read(self._from, 1 << 20) if ready else b""
            if not part:
                raise AssertionError("the browser ended or says nothing any more")
            self._received += part
        first, self._received = self._received.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message

    def open(
        self, file: Path, *, width: int, height: int = 900, scheme: str = "light"
    ) -> Tab:
        """Load a file in a new tab, in place of the last, and wait for its charts."""
        if self._target is not None:
            self.call("Target.closeTarget", targetId=self._target)
        self.events.clear()
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call(
            "Target.attachToTarget", targetId=self._target, flatten=True
        )
        tab = Tab(self, session["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            tab.call(f"{domain}.enable")
        tab.set_scheme(scheme)
        tab.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        tab.call("Page.navigate", url=file.as_uri())
        tab.wait_for("document.readyState == 'complete'")
        tab.wait_for(
            "!document.querySelector('.chart') || document.documentElement.dataset.charts"
        )
        return tab


class Tab:
    """One page that is open."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> Any:
        return self._browser.call(method, self._session, **params)

    def set_scheme(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                raise AssertionError(f"never true: {expression}")
            time.sleep(0.02)

    def point_at(self, selector: str, x: float, y: float) -> None:
        """Move the mouse to a place in an element, given as shares of its size."""
        left, top, width, height = self.evaluate(
            f"(() => {{ const part = document.querySelector({json.dumps(selector)});"
            " part.scrollIntoView({block: 'center'});"
            " const box = part.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        self.call(
            "Input.dispatchMouseEvent",
            type="mouseMoved",
            x=left + x * width,
            y=top + y * height,
        )

    def complaints(self) -> list[str]:
        """Return what the console, the policy and scripts complained about."""
        kinds = {
            "Runtime.exceptionThrown",
            "Log.entryAdded",
            "Runtime.consoleAPICalled",
        }
        return [json.dumps(e["params"]) for e in self._events() if e["method"] in kinds]

    def requested(self) -> list[str]:
        """Return every address that was asked for."""
        return [
            event["params"]["request"]["url"]
            for event in self._events()
            if event["method"] == "Network.requestWillBeSent"
        ]

    def _events(self) -> list[dict[str, Any]]:
        events = self._browser.events
        return [event for event in events if event.get("sessionId") == self._session]

    def screenshot(self) -> bytes:
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True
        )
        return base64.b64decode(answer["data"])
