"""A real Chromium, driven over the Chrome DevTools Protocol."""

import asyncio
import base64
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.gateway.http_bench import HttpBench

START_S: Final = 120.0
WAIT_S: Final = 60.0
ANSWER_S: Final = 240.0
PROGRAMS: Final = ("chromium", "chromium-browser", "google-chrome")
FLAGS: Final = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--autoplay-policy=user-gesture-required",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    "--remote-debugging-port=0",
)
ANSWER: Final = "document.querySelector('.assistant:last-of-type')"
STATE: Final = f"{ANSWER}?.dataset.state"
DONE: Final = f"{STATE} === 'done'"
IDLE: Final = "document.getElementById('stop').hidden"
READY: Final = "document.getElementById('stack').dataset.state === 'ready'"
TEXT_ONLY: Final = "document.getElementById('voice').value = '(text only)'"
KEYS: Final = {"Enter": 13, "Escape": 27, "Tab": 9, " ": 32, "F2": 113}


def program() -> str | None:
    """Where Chromium is; none if it is not installed."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One page, and what happened in it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.problems: list[str] = []
        """Errors of scripts, of loading, of the Content-Security-Policy."""
        self.requests: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(WAIT_S):
            return await self._answers[number]

    async def js(self, expression: str) -> Any:
        """The value of an expression; promises are waited for."""
        answer = await self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            userGesture=False,
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {json.dumps(answer['exceptionDetails'])[:500]}")
        return answer["result"].get("value")

    async def until(self, expression: str, seconds: float = WAIT_S) -> Any:
        """Wait until an expression is true, and give its value."""
        try:
            async with asyncio.timeout(seconds):
                while not (value := await self.js(expression)):
                    await asyncio.sleep(0.05)
                return value
        except TimeoutError:
            seen = await self.js("document.body.innerText")
            raise AssertionError(f"never true: {expression}\n{self.problems}\n{seen}") from None

    async def open(self, url: str, then: str = "true") -> None:
        """Load a page, and wait until an expression is true in it."""
        await self.call("Page.navigate", url=url)
        await self.until(f"document.readyState === 'complete' && {then}")

    async def begin_anew(self) -> None:
        await self.click("#reset")
        await self.until("document.querySelectorAll('.turn').length === 0")

    async def click(self, selector: str) -> None:
        x, y = await self.place(selector)
        # At once: a press that a busy machine makes long is another gesture.
        await asyncio.gather(*(self.pointer(kind, x, y) for kind in ("mousePressed", "mouseReleased")))

    async def place(self, selector: str) -> tuple[float, float]:
        found = await self.js(
            f"(() => {{ const e = document.querySelector({selector!r}); if (!e) return null;"
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        assert found, selector
        return found[0], found[1]

    async def pointer(self, kind: str, x: float, y: float) -> None:
        await self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def write(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def ask(self, words: str) -> None:
        """Write a message, and send it."""
        await self.click("#text")
        await self.write(words)
        await self.press("Enter")

    async def press(self, key: str, modifiers: int = 0) -> None:
        await self.key("keyDown", key, modifiers)
        await self.key("keyUp", key, modifiers)

    async def key(self, kind: str, key: str, modifiers: int = 0) -> None:
        text = {"text": {"Enter": "\r"}.get(key, key)} if kind == "keyDown" and key in {"Enter", " "} else {}
        code = {" ": "Space"}.get(key, key)
        number = KEYS[key]
        await self.call(
            "Input.dispatchKeyEvent",
            type=kind,
            key=key,
            code=code,
            windowsVirtualKeyCode=number,
            modifiers=modifiers,
            **text,
        )

    async def offer(self, path: Path) -> None:
        """Drop a file that need not be taken."""
        x, y = await self.place("main")
        data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            await self.call("Input.dispatchDragEvent", type=kind, x=x, y=y, data=data)

    async def drop(self, path: Path) -> None:
        await self.offer(path)
        await self.until("document.querySelector('#files li') !== null")

    async def said(self) -> dict[str, Any]:
        """Wait until the last answer was made and played; gives what the page knows of it."""
        await self.until(f"{ANSWER}?.dataset.state && {IDLE}", ANSWER_S)
        facts: dict[str, Any] = json.loads(await self.js(f"JSON.stringify({ANSWER}.dataset)"))
        facts["text"] = await self.js(f"{ANSWER}.querySelector('.words').textContent")
        return facts

    async def resize(self, width: int, height: int, phone: bool = False, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def picture(self, path: Path) -> None:
        shot = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        try:
            await self._take()
        except ConnectionClosed:
            # Chromium ends so too; whoever still waits for an answer runs out of time.
            return

    async def _take(self) -> None:
        async for text in self._socket:
            message = json.loads(text)
            if (number := message.get("id")) is not None:
                waiting = self._answers.pop(number)
                if "error" in message and not waiting.done():
                    waiting.set_exception(AssertionError(message["error"]))
                elif not waiting.done():
                    waiting.set_result(message["result"])
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        elif event == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.problems.append(json.dumps(params["args"])[:2000])
        elif event == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
            self.problems.append(json.dumps(params["entry"])[:2000])


Before = Callable[..., AbstractAsyncContextManager[tuple[HttpBench, Page]]]


@asynccontextmanager
async def browser(folder: Path, microphone: Path) -> AsyncIterator[Page]:
    """Run Chromium with a new profile; the microphone hears a WAV file."""
    found = program()
    assert found, "Chromium is not installed: apt-get install chromium"
    # Only what a browser needs: proxies of the environment are none of its business.
    environment = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        found,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--use-file-for-fake-audio-capture={microphone}",
        "about:blank",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environment, "HOME": str(folder)},
    )
    try:
        async with asyncio.timeout(START_S):
            address = await _address(process)
        async with httpx.AsyncClient(trust_env=False) as http:
            targets = (await http.get(f"http://{address}/json/list")).json()
        target = next(each for each in targets if each["type"] == "page")
        async with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            page = Page(socket)
            for domain in ("Page", "Runtime", "Network", "Log"):
                await page.call(f"{domain}.enable")
            yield page
            await page.close()
    finally:
        if process.returncode is None:
            process.terminate()
        drain = asyncio.create_task(process.communicate())
        try:
            await asyncio.wait_for(asyncio.shield(drain), 10)
        except TimeoutError:
            process.kill()
            await drain


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where Chromium listens: HOST:PORT."""
    assert process.stderr is not None
    said = b""
    while line := await process.stderr.readline():
        said += line
        if found := re.search(rb"DevTools listening on ws://([^/]+)", line):
            return found[1].decode()
    raise AssertionError(f"Chromium does not start:\n{said.decode(errors='replace')}")
