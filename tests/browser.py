"""A real browser for tests: headless Chromium, driven over the DevTools protocol.

Whatever the page writes to its console as a warning or an error, and every error that it
does not catch, is kept: a test is to look at that.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import websockets

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-proxy-server",
    "--remote-debugging-port=0",
)


def find() -> str:
    """The browser's program; without one the test is skipped, and in CI it fails."""
    for name in NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    if "CI" in os.environ:
        pytest.fail(f"no browser is installed: none of {', '.join(NAMES)}")
    pytest.skip(f"no browser is installed: none of {', '.join(NAMES)}")


class Page:
    """One tab."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._session = ""
        self.trouble: list[str] = []
        """Errors and warnings, as the console shows them."""
        self.requests: list[str] = []
        """Every address that was asked for."""

    async def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol; returns its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps(message))
        async with asyncio.timeout(30):
            return await answer

    async def listen(self) -> None:
        """Take what the browser says, until it is closed."""
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                answer = self._waiting.pop(message["id"])
                if answer.done():
                    continue
                if "error" in message:
                    answer.set_exception(RuntimeError(f"{message['error']}"))
                else:
                    answer.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: Any) -> None:
        if method == "Runtime.exceptionThrown":
            self.trouble.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.trouble.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.trouble.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def open(self, url: str, *, dark: bool = False, width: int = 1180, height: int = 900) -> None:
        """Go to an address."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            await self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def look(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise AssertionError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 20) -> None:
        """Wait until an expression is true in the page."""
        try:
            async with asyncio.timeout(seconds):
                while not await self.look(f"Boolean({expression})"):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.look("document.body ? document.body.innerText : ''")
            raise AssertionError(f"never: {expression}\n{text}\n{self.trouble}") from None

    async def picture(self, path: Path) -> None:
        """What it looks like, whole, as a PNG."""
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """A browser of its own; `folder` is new, and holds everything it writes."""
    program = find()
    folder.mkdir()
    quiet = asyncio.subprocess.DEVNULL
    environment = {**os.environ, "HOME": str(folder)}
    process = await asyncio.create_subprocess_exec(
        program, *FLAGS, f"--user-data-dir={folder}", stdout=quiet, stderr=quiet, env=environment
    )
    try:
        socket = await _connect(folder / "DevToolsActivePort", process)
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            yield page
        finally:
            await page._socket.send(json.dumps({"id": 0, "method": "Browser.close"}))
            listening.cancel()
            await asyncio.wait([listening])
            await socket.close()
    finally:
        try:
            async with asyncio.timeout(10):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _connect(port_file: Path, process: asyncio.subprocess.Process) -> websockets.ClientConnection:
    async with asyncio.timeout(40):
        while not (port_file.exists() and len(port_file.read_text().split()) == 2):
            assert process.returncode is None, f"the browser ended with status {process.returncode}"
            await asyncio.sleep(0.05)
    port, path = port_file.read_text().split()
    return await websockets.connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
