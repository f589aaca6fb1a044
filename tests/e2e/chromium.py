"""A headless Chromium, spoken to over its debugging pipe: pages are opened, clicked, typed into and read."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PATIENCE_S = 60.0
_ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)
# Chromium takes commands from descriptor 3 and answers on 4.
_SHIM = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
_CONTROL, _SHIFT = 2, 8


def find_chromium() -> str | None:
    """The path of a Chromium; the environment variable WINGBEAT_BROWSER names another one."""
    named = os.environ.get("WINGBEAT_BROWSER")
    return next(filter(None, map(shutil.which, (named,) if named else NAMES)), None)


class Chromium:
    """A browser process with a page; `close` ends the process.

    Args:
        profile: an empty folder.
    """

    def __init__(self, path: str, profile: Path) -> None:
        ours, theirs = os.pipe(), os.pipe()
        # Above 9, so that neither is where the shim puts the other.
        inherited = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (ours[0], theirs[1])]
        sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
        command = [path, *_ARGUMENTS, *sandbox, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SHIM, *map(str, inherited), *command],
            pass_fds=inherited,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (ours[0], theirs[1], *inherited):
            os.close(fd)
        self._write_fd, self._read_fd = ours[1], theirs[0]
        self._received, self._num_sent = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        """Errors in the page's console, including exceptions and refused or failed loads."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the process."""
        for fd in (self._write_fd, self._read_fd):
            os.close(fd)
        self._process.terminate()
        self._process.wait(PATIENCE_S)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._num_sent:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False) -> None:
        """Load a page at a size in CSS pixels and a colour scheme."""
        phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=scheme)
        answer = self.send("Page.navigate", url=url)
        if "errorText" in answer:
            raise RuntimeError(f"{url}: {answer['errorText']}")
        self.until("document.readyState === 'complete' && location.protocol === 'http:'")

    def value(self, expression: str) -> Any:
        """Value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"never true: {expression}; console: {self.errors}"
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of an element, which must be in sight."""
        place = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{place}.scrollIntoView({{block: 'nearest'}})")
        x, y = self.value(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({place}.getBoundingClientRect())"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Put a text in place of an input's, as a keyboard would."""
        self.value(f"(input => {{ input.focus(); input.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, control: bool = False, shift: bool = False) -> None:
        """A key, where the focus is."""
        code, text = _KEYS[key]
        modifiers = _CONTROL * control + _SHIFT * shift
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.send("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is in sight, or of the whole page."""
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read_fd], [], [], PATIENCE_S)
            part = os.read(self._read_fd, 2**20) if ready else b""
            if not part:
                raise RuntimeError("Chromium is gone" if ready else f"Chromium said nothing for {PATIENCE_S:g} s")
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
