"""A headless Chromium, driven over its debugging pipe: pages are opened, clicked and printed as people do.

The pipe (`--remote-debugging-pipe`) speaks JSON that ends in a zero byte on descriptors 3 and 4, so it
takes no library. See https://chromedevtools.github.io/devtools-protocol/.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
_LAUNCH = (
    "import os, sys; r, w = int(sys.argv[1]), int(sys.argv[2]); os.dup2(r, 3); os.dup2(w, 4); "
    "os.execv(sys.argv[3], sys.argv[3:])"
)
_TIMEOUT_S = 60.0


class Browser:
    """One tab.

    Attributes:
      requests: addresses that the page asked for, in order.
      errors: exceptions of its scripts.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu"]
        flags += [
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, *map(str, high), CHROMIUM, *flags, "about:blank"],
            pass_fds=high,
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for fd in high:
            os.close(fd)
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            if answer.get("method") == "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
            if answer.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"]))
        raise TimeoutError(method)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium has gone")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def open(self, path: Path, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        self.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.ready === 'yes'")

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def run(self, script: str) -> Any:
        """The value of an expression, promises awaited."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """A real click in the middle of the first element that a selector finds."""
        where = json.dumps(selector)
        self.run(f"document.querySelector({where}).scrollIntoView({{block: 'center'}})")
        x, y = self.run(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({where}).getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"])

    def close(self) -> None:
        try:
            self._session = None
            self.send("Browser.close")
        except (OSError, RuntimeError):
            self._process.kill()
        self._process.wait(timeout=_TIMEOUT_S)
        os.close(self._out)
        os.close(self._in)
