"""A language model that answers from a list: an OpenAI-compatible server on 127.0.0.1.

An answer is chosen by the conversation alone: by the text of the last user message, then by how
many answers it has had already. So resumed, repeated and interleaved conversations need no reset.
Requests without tools are Hermes' own side questions (a title for the conversation) and get TITLE.

It runs in the test's process (`with FakeModel(script) as model`) or as a program of its own:
`python -m support.fake_model SCRIPT.json` prints one JSON object a line: first the port, then
every request as it comes. It ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self, cast

MODEL = "fake-model"
TITLE = "A title from the list"
UNSCRIPTED = "I have no answer for that."
CONTEXT_TOKENS = 131_072
HOLD_LIMIT_S = 300  # a held answer goes on by itself after this long
EVENT_LIMIT_S = 60

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call."""

    name: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the model: text, tool calls or both.

    A held answer sends its first word and then waits for `release()` or for the client to go,
    so that a test can end the program in the middle of a turn.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    held: bool = False


Script = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came; `body` is empty for GET."""

    method: str
    path: str
    body: Json = field(default_factory=dict)

    @property
    def is_turn(self) -> bool:
        return self.path.endswith("/chat/completions") and bool(self.body.get("tools"))

    @property
    def messages(self) -> list[tuple[str, str]]:
        """Role and text of each message; tool calls are in `body` alone."""
        return [(str(m["role"]), _text(m.get("content"))) for m in _messages(self.body)]

    @property
    def tools(self) -> dict[str, Json]:
        """The JSON schema of the arguments of each tool that was offered."""
        functions = [cast(Json, t["function"]) for t in cast(list[Json], self.body["tools"])]
        return {str(f["name"]): cast(Json, f["parameters"]) for f in functions}


class FakeModel:
    """The server; use it as a context manager. `port` is free and chosen by the system."""

    def __init__(
        self, script: Script, *, on_request: Callable[[Request], None] | None = None
    ) -> None:
        self._script = script
        self._on_request = on_request
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._held = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self.port = int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._woken.close()

    @property
    def requests(self) -> list[Request]:
        with self._lock:
            return list(self._requests)

    @property
    def turns(self) -> list[Request]:
        """The requests of conversations, without the side questions and probes."""
        return [request for request in self.requests if request.is_turn]

    def wait_until_held(self) -> None:
        """Return once a held answer has sent its first word."""
        if not self._held.wait(EVENT_LIMIT_S):
            raise TimeoutError(f"no held answer was asked for within {EVENT_LIMIT_S} s")

    def release(self) -> None:
        """Let every held answer, now and later, go on."""
        self._wake.close()

    def answer(self, request: Request) -> Answer:
        """Choose the answer to a request by what the conversation holds."""
        if not request.is_turn:
            return Answer(TITLE)
        messages = request.messages
        asked = max((i for i, (role, _) in enumerate(messages) if role == "user"), default=-1)
        if asked < 0:
            return Answer(UNSCRIPTED)
        given = sum(role == "assistant" for role, _ in messages[asked:])
        # Hermes joins a question that was never answered with the next: the last one counts.
        said = messages[asked][1]
        text = max(self._script, key=said.rfind, default="")
        if text not in said or text not in self._script:
            return Answer(UNSCRIPTED)
        return self._script[text][min(given, len(self._script[text]) - 1)]

    def record(self, request: Request) -> None:
        with self._lock:
            self._requests.append(request)
            if self._on_request:
                self._on_request(request)

    def hold(self, connection: socket.socket) -> None:
        """Wait for `release()` or for the client to close its end."""
        self._held.set()
        select.select((connection, self._woken), (), (), HOLD_LIMIT_S)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        model = self

        class Handler(_Handler):
            fake = model

        return Handler


class _Handler(BaseHTTPRequestHandler):
    fake: FakeModel

    def do_GET(self) -> None:
        self.fake.record(Request("GET", self.path))
        about = {"id": MODEL, "object": "model", "context_length": CONTEXT_TOKENS}
        if self.path == "/v1/models":
            self._send_json({"object": "list", "data": [about]})
        elif self.path == f"/v1/models/{MODEL}":
            self._send_json(about)
        else:
            self._send_json({"error": "not found"}, status=404)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        try:
            request = Request("POST", self.path, json.loads(data or b"{}"))
        except ValueError:
            self._send_json({"error": "the body is not JSON"}, status=400)
            return
        self.fake.record(request)
        if not self.path.endswith("/chat/completions"):
            self._send_json({"error": "not found"}, status=404)
            return
        answer = self.fake.answer(request)
        calls = _tool_calls(answer, f"call_{len(request.messages)}")
        if not request.body.get("stream"):
            self._send_json(_completion(answer, calls))
            return
        # A client that was killed on purpose is no error of this server.
        with contextlib.suppress(ConnectionError):
            self._stream(answer, calls)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing; what came is in `requests`."""

    def _stream(self, answer: Answer, calls: Sequence[Json]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(_events(answer, calls)):
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            self.wfile.flush()
            if answer.held and number == 1:
                self.fake.hold(self.connection)
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_json(self, value: Json, *, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)


def _events(answer: Answer, calls: Sequence[Json]) -> Iterator[Json]:
    """Yield the chunks of a streamed completion: role, text word by word, calls, end, usage."""

    def chunk(delta: Json, finish: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return _envelope("chat.completion.chunk") | {"choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for part in re.findall(r"\s*\S+\s*", answer.text):
        yield chunk({"content": part})
    for index, call in enumerate(calls):
        yield chunk({"tool_calls": [call | {"index": index}]})
    yield chunk({}, _finish(answer))
    yield _envelope("chat.completion.chunk") | {"choices": [], "usage": _usage()}


def _completion(answer: Answer, calls: Sequence[Json]) -> Json:
    message: Json = {"role": "assistant", "content": answer.text or None}
    if calls:
        message["tool_calls"] = calls
    choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
    return _envelope("chat.completion") | {"choices": [choice], "usage": _usage()}


def _tool_calls(answer: Answer, prefix: str) -> list[Json]:
    """Return the calls as the protocol has them; an id comes once in a conversation."""
    return [
        {
            "id": f"{prefix}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
        }
        for number, call in enumerate(answer.calls)
    ]


def _envelope(kind: str) -> Json:
    return {"id": "chatcmpl-fake", "object": kind, "created": 1_780_000_000, "model": MODEL}


def _usage() -> Json:
    return {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.calls else "stop"


def _messages(body: Json) -> list[Json]:
    return cast(list[Json], body.get("messages") or [])


def _text(content: object) -> str:
    """Return the text of a message's content: a string, null, or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def read_script(text: str) -> dict[str, list[Answer]]:
    """Read a script from JSON, as `write_script` makes it; an answer's fields may be left out."""
    value = cast(dict[str, list[Json]], json.loads(text))
    return {asked: [_answer(item) for item in answers] for asked, answers in value.items()}


def write_script(script: Script) -> str:
    """Return a script as `read_script` takes it."""
    return json.dumps({asked: [asdict(a) for a in answers] for asked, answers in script.items()})


def _answer(item: Json) -> Answer:
    calls = cast(list[Json], item.get("calls", []))
    return Answer(
        str(item.get("text", "")),
        tuple(Call(str(c["name"]), cast(Json, c["arguments"])) for c in calls),
        bool(item.get("held")),
    )


def main() -> None:
    script = read_script(Path(sys.argv[1]).read_text())

    def tell(event: Json) -> None:
        print(json.dumps(event), flush=True)

    with FakeModel(script, on_request=lambda request: tell(asdict(request))) as model:
        tell({"port": model.port})
        sys.stdin.read()


if __name__ == "__main__":
    main()
