"""An HTTP proxy that delays, cuts and falsifies: what a homeserver or a line may do to a client.

It runs in a thread of its own and stands before one server. All of it can be switched while
requests run. Every request is noted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

HEAD_BYTES_MAX = 64 * 1024
PIECE = 64 * 1024
NOTED_MAX = 100_000
START_TIMEOUT_S = 10
HTML = b"<html><body>502 Bad Gateway</body></html>"


@dataclass(slots=True)
class Noted:
    """One request that came by."""

    method: str
    path: str
    status: int = 0
    up: int = 0
    down: int = 0


@dataclass(slots=True)
class Fault:
    """What happens to requests that match.

    Attributes:
        action: `status`, `redirect`, `html`: answered here, without the server.
            `refuse`: the connection is closed. `hang`: never answered. `lose`: carried out, and
            the answer lost. `cut`: the answer's body breaks off in the middle. `truncate`: half
            of the body, with a length that fits. `garbage`: other bytes of the same length.
            `endless`: a body that does not end. `trickle`: one byte a second.
        method: which method; empty for any.
        path: a regular expression that is searched in the path.
        times: how often; None for ever.
        status: for `status`.
        headers: more headers, for `status` and `redirect`.
    """

    action: str
    method: str = ""
    path: str = ""
    times: int | None = None
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)

    def matches(self, method: str, path: str) -> bool:
        fits = self.method in ("", method) and re.search(self.path, path) is not None
        if not fits or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class FaultProxy:
    """The proxy before a server on a local port.

    Attributes:
        port: where it listens.
        delay_s: added to each request; requests wait side by side.
        faults: looked at in their order.
        noted: the requests, oldest first.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = 0
        self.delay_s = 0.0
        self.faults: list[Fault] = []
        self.noted: deque[Noted] = deque(maxlen=NOTED_MAX)
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault proxy", daemon=True)

    def fault(self, action: str, **settings: object) -> Fault:
        """Add a fault."""
        fault = Fault(action, **settings)  # type: ignore[arg-type]
        self.faults.append(fault)
        return fault

    def count(self, method: str = "", path: str = "") -> int:
        """How many requests there were."""
        return len(self.requests(method, path))

    def requests(self, method: str = "", path: str = "") -> list[Noted]:
        """The requests of a method and a path."""
        return [
            one
            for one in list(self.noted)
            if method in ("", one.method) and re.search(path, one.path)
        ]

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._started.wait(START_TIMEOUT_S), "the proxy does not start"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def listen() -> asyncio.Server:
            return await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=HEAD_BYTES_MAX)

        server = self._loop.run_until_complete(listen())
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _serve(self, client: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        connection = _Connection(self._target)
        try:
            while await self._exchange(client, out, connection):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # either side has gone
        finally:
            connection.close()
            out.close()

    async def _exchange(
        self, client: asyncio.StreamReader, out: asyncio.StreamWriter, server: _Connection
    ) -> bool:
        """Pass one request on, and its answer back; False ends the connection."""
        head = await client.readuntil(b"\r\n\r\n")
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        note = Noted(method, path)
        self.noted.append(note)
        body = await _read_body(client, _headers(head))
        note.up = len(body)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        fault = next((one for one in self.faults if one.matches(method, path)), None)
        action = "" if fault is None else fault.action
        if action in ("refuse", "hang"):
            await asyncio.sleep(0 if action == "refuse" else 3600)
            return False
        if fault is not None and action in ("status", "redirect", "html"):
            note.status, answer = _made(fault)
            out.write(answer)
            await out.drain()
            return True
        answer_head = await server.send(_as_plain(head, len(body), body), method)
        note.status = int(answer_head.split(b" ", 2)[1])
        if action == "lose":
            return False
        if action in ("truncate", "garbage", "endless", "trickle", "cut"):
            await self._falsify(action, answer_head, out, server, method)
            return False
        out.write(answer_head)
        async for piece in server.body(answer_head, method):
            note.down += len(piece)
            out.write(piece)
            await out.drain()
        await out.drain()
        return not server.ends(answer_head)

    async def _falsify(
        self,
        action: str,
        head: bytes,
        out: asyncio.StreamWriter,
        server: _Connection,
        method: str,
    ) -> None:
        body = b"".join([piece async for piece in server.body(head, method)])
        match action:
            case "truncate":
                half = body[: len(body) // 2]
                out.write(_plain_answer(200, half))
            case "garbage":
                out.write(_plain_answer(200, bytes(byte ^ 0x55 for byte in body)))
            case "cut":
                out.write(_plain_answer(200, body)[: -max(1, len(body) // 2)])
            case "trickle":
                out.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % max(len(body), 600))
                for byte in body or b" ":
                    out.write(bytes((byte,)))
                    await out.drain()
                    await asyncio.sleep(1)
            case _:
                out.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
                while True:
                    out.write(b"\0" * PIECE)
                    await out.drain()
        await out.drain()


class _Connection:
    """One connection to the server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, request: bytes, method: str) -> bytes:
        """Send a whole request; the head of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=HEAD_BYTES_MAX
            )
        reader, writer = self._streams
        writer.write(request)
        await writer.drain()
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 1"):
                return head

    async def body(self, head: bytes, method: str) -> AsyncIterator[bytes]:
        """The bytes of the answer's body as they come on the wire."""
        assert self._streams is not None
        reader = self._streams[0]
        headers = _headers(head)
        status = int(head.split(b" ", 2)[1])
        if method == "HEAD" or status in (204, 304):
            return
        if "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                piece = await reader.read(min(left, PIECE))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", left)
                left -= len(piece)
                yield piece
        elif "chunked" in headers.get("transfer-encoding", ""):
            while True:
                line = await reader.readuntil(b"\r\n")
                size = int(line, 16)
                yield line + await reader.readexactly(size + 2)
                if size == 0:
                    return
        else:
            while piece := await reader.read(PIECE):
                yield piece

    def ends(self, head: bytes) -> bool:
        """Whether the server ends the connection after this answer."""
        headers = _headers(head)
        length = "content-length" in headers or "transfer-encoding" in headers
        status = int(head.split(b" ", 2)[1])
        return "close" in headers.get("connection", "") or not (length or status in (204, 304))

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(OSError):
                self._streams[1].close()


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(client: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", ""):
        body = bytearray()
        while size := int(await client.readuntil(b"\r\n"), 16):
            body += await client.readexactly(size)
            await client.readexactly(2)
        await client.readexactly(2)
        return bytes(body)
    return await client.readexactly(int(headers.get("content-length", "0")))


def _as_plain(head: bytes, size: int, body: bytes) -> bytes:
    """The request with its body in one piece."""
    if b"transfer-encoding" not in head.lower():
        return head + body
    kept = [
        line
        for line in head.rstrip(b"\r\n").split(b"\r\n")
        if not line.lower().startswith(b"transfer-encoding")
    ]
    return b"\r\n".join([*kept, b"content-length: %d" % size, b"", b""]) + body


def _plain_answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status} Made", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _made(fault: Fault) -> tuple[int, bytes]:
    match fault.action:
        case "status":
            return fault.status, _plain_answer(fault.status, b"", fault.headers)
        case "redirect":
            headers = {"location": "http://127.0.0.1:9/elsewhere", **fault.headers}
            return 302, _plain_answer(302, b"", headers)
        case _:
            return 200, _plain_answer(200, HTML, {"content-type": "text/html"})
