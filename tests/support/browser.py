"""Chromium, driven over its own debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.tools import PATIENCE

ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip

# It reads and writes descriptors 3 and 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in enumerate(ends, 3):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """``with Browser(program, folder) as page: page.open(url)``. One tab.

    ``complaints``: errors of scripts and violations of the content security policy, as they came.
    """

    def __init__(self, program: str, folder: Path) -> None:
        self._program, self._folder = program, folder
        self._last = 0
        self._buffer = b""
        self._session = ""
        self.complaints: list[str] = []

    def __enter__(self) -> Browser:
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        launcher = [sys.executable, "-c", LAUNCH, str(commands), str(answers), self._program]
        self.process = subprocess.Popen(
            [*launcher, *ARGUMENTS, f"--user-data-dir={self._folder}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=[commands, answers],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        try:
            self._attach()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _attach(self) -> None:
        targets = self.poll(lambda: self.send("Target.getTargets")["targetInfos"])
        [tab] = [target["targetId"] for target in targets if target["type"] == "page"]
        self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def forget(self) -> list[str]:
        """Cookies, and the page that is open. Returns the complaints, and forgets them, too."""
        self.open("about:blank#")
        self.send("Network.clearBrowserCookies")
        complaints, self.complaints = self.complaints, []
        return complaints

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self._to)
        os.close(self._from)

    def send(self, method: str, **parameters: Any) -> Any:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 3 * PATIENCE
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._last:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, "Chromium does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(event["params"]["exceptionDetails"]))
            case "Log.entryAdded" if (entry := event["params"]["entry"])["level"] == "error":
                if not entry.get("url", "").endswith("/favicon.ico"):  # which Chromium asks for by itself
                    self.complaints.append(json.dumps(entry))

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, script: str, patience: float = PATIENCE) -> Any:
        return self.poll(lambda: self.run(script), patience)

    @staticmethod
    def poll(condition: Callable[[], Any], patience: float = PATIENCE) -> Any:
        deadline = time.monotonic() + patience
        while True:
            try:
                value = condition()
            except AssertionError as error:  # between two pages there is nothing to ask
                value, reason = None, error
            else:
                reason = None
            if value:
                return value
            assert time.monotonic() < deadline, f"did not happen within {patience} s: {reason or value}"
            time.sleep(0.1)  # each look takes time of the browser

    def click(self, selector: str) -> None:
        """With the mouse, where the element is; a page that this opens is not waited for."""
        place = self.place_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, *place)

    def place_of(self, selector: str) -> tuple[float, float]:
        """The middle of an element, which is scrolled to."""
        self.until("document.readyState === 'complete'")  # until then, elements move
        x, y = self.run(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        return x, y

    def mouse(self, kind: str, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(
            f"Array.from(document.querySelectorAll({json.dumps(selector)}), (element) => element.innerText)"
        )
        return found

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )  # fmt: skip

    def colours(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.until("document.getAnimations().every((fading) => fading.playState === 'finished')")

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
