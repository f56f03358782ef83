from __future__ import annotations

import functools
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hpkfs import client, control, errors, mountpoint, places
from hpkfs.client import ControlClient, all_mounts, describe_error, find_mount, rebuild_error
from hpkfs.errors import BusyError, ConflictError, HpkfsError, TransientError, UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

Progress = "Callable[[dict[str, object]], Awaitable[None]]"
PATIENCE_S = 20


class FakeDaemon:
    """Answers a few requests, each in one of the ways that there are."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.begun = trio.Event()
        self.cancelled = trio.Event()
        self.finish = trio.Event()
        self.finished = trio.Event()

    async def handle(
        self,
        op: str,
        args: dict[str, Any],
        progress: Callable[[dict[str, object]], Awaitable[None]],
    ) -> dict[str, object]:
        self.asked.append((op, args))
        match op:
            case "fetch":
                for number in range(3):
                    await progress({"bytes": number})
            case "refuse":
                raise ConflictError("It moved.", kept="All.", next_step="Choose.")
            case "break":
                raise ZeroDivisionError
            case "break-in-a-nursery":
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._refuse)
            case "too-much":
                return {"text": "x" * client.LINE_BYTES_MAX}
            case "sync" | "umount":
                self.begun.set()
                try:
                    await self.finish.wait()
                except trio.Cancelled:
                    self.cancelled.set()
                    raise
                self.finished.set()
            case _:
                pass
        return {"op": op, **args}

    async def _refuse(self) -> None:
        raise BusyError("Held.")


@pytest.fixture(autouse=True)
def runtime_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path, since a socket's path is."""
    with tempfile.TemporaryDirectory(prefix="hpkfs-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv(places.HOME_VARIABLE, f"{folder}/home")
        yield Path(folder) / "hpkfs"


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return places.socket_path(str(tmp_path))


@pytest.fixture
async def daemon(socket_path: str, nursery: trio.Nursery) -> AsyncIterator[FakeDaemon]:
    daemon = FakeDaemon()
    with trio.fail_after(PATIENCE_S):
        await nursery.start(control.serve, daemon, socket_path)
        yield daemon


async def ask(path: str, op: str, **args: Any) -> dict[str, Any]:
    request = functools.partial(ControlClient(path).request, op, timeout_s=PATIENCE_S, **args)
    return await trio.to_thread.run_sync(request, abandon_on_cancel=True)


async def test_a_request_is_answered(daemon: FakeDaemon, socket_path: str) -> None:
    assert await ask(socket_path, "status", paths=["ä", "\udcff"]) == {
        "op": "status",
        "paths": ["ä", "\udcff"],
    }
    assert daemon.asked == [("status", {"paths": ["ä", "\udcff"]})]


async def test_progress_comes_before_the_answer(daemon: FakeDaemon, socket_path: str) -> None:
    told: list[dict[str, Any]] = []
    result = await ask(socket_path, "fetch", on_progress=told.append)
    assert told == [{"bytes": 0}, {"bytes": 1}, {"bytes": 2}]
    assert result == {"op": "fetch"}


async def test_an_error_comes_back_as_the_same_class(daemon: FakeDaemon, socket_path: str) -> None:
    with pytest.raises(ConflictError) as caught:
        await ask(socket_path, "refuse")
    told = caught.value
    assert (told.happened, told.kept, told.next_step) == ("It moved.", "All.", "Choose.")


async def test_an_error_of_ours_in_a_group_is_told_as_itself(
    daemon: FakeDaemon, socket_path: str
) -> None:
    with pytest.raises(BusyError, match="Held"):
        await ask(socket_path, "break-in-a-nursery")


@pytest.mark.expects_log("a request failed")
async def test_a_bug_ends_one_request_and_not_the_daemon(
    daemon: FakeDaemon, socket_path: str
) -> None:
    with pytest.raises(HpkfsError, match="ZeroDivisionError"):
        await ask(socket_path, "break")
    assert await ask(socket_path, "history") == {"op": "history"}


async def test_an_answer_that_is_too_long_is_an_error(daemon: FakeDaemon, socket_path: str) -> None:
    with pytest.raises(UsageError, match="too long"):
        await ask(socket_path, "too-much")


async def test_a_request_that_is_too_long_is_not_sent(daemon: FakeDaemon, socket_path: str) -> None:
    with pytest.raises(UsageError, match="too long"):
        await ask(socket_path, "fetch", paths=["x" * client.LINE_BYTES_MAX])
    assert daemon.asked == []


async def test_sync_ends_when_who_asked_goes_away(daemon: FakeDaemon, socket_path: str) -> None:
    stream = await trio.open_unix_socket(socket_path)
    await stream.send_all(b'{"op": "sync"}\n')
    await daemon.begun.wait()
    await stream.aclose()
    await daemon.cancelled.wait()
    assert await ask(socket_path, "status") == {"op": "status"}


async def test_unmounting_goes_on_when_who_asked_goes_away(
    daemon: FakeDaemon, socket_path: str
) -> None:
    stream = await trio.open_unix_socket(socket_path)
    await stream.send_all(b'{"op": "umount"}\n')
    await daemon.begun.wait()
    await stream.aclose()
    assert await ask(socket_path, "status") == {"op": "status"}
    daemon.finish.set()
    await daemon.finished.wait()
    assert not daemon.cancelled.is_set()


async def test_a_connection_takes_several_requests(daemon: FakeDaemon, socket_path: str) -> None:
    async with await trio.open_unix_socket(socket_path) as stream:
        await stream.send_all(b'{"op": "log"}\n{"op": "evict"}\n')
        received = b""
        while received.count(b"\n") < 2:
            received += await stream.receive_some()
    assert [json.loads(line)["result"]["op"] for line in received.splitlines()] == ["log", "evict"]


@pytest.mark.parametrize("line", [b"nonsense\n", b"[]\n", b'{"op": 3}\n', b"\xff\n", b"{}\n"])
async def test_a_bad_request_is_refused_and_the_next_one_answered(
    daemon: FakeDaemon, socket_path: str, line: bytes
) -> None:
    async with await trio.open_unix_socket(socket_path) as stream:
        await stream.send_all(line + b'{"op": "list"}\n')
        received = b""
        while received.count(b"\n") < 2:
            received += await stream.receive_some()
    refused, answered = (json.loads(line) for line in received.splitlines())
    assert (refused["ok"], refused["error"]["class"]) == (False, "UsageError")
    assert answered["ok"]


async def test_one_connection_too_many_is_told_so(
    monkeypatch: pytest.MonkeyPatch, socket_path: str, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(control, "CONNECTIONS_MAX", 1)
    with trio.fail_after(PATIENCE_S):
        await nursery.start(control.serve, FakeDaemon(), socket_path)
        async with await trio.open_unix_socket(socket_path) as first:
            await first.send_all(b'{"op": "log"}\n')
            assert b"log" in await first.receive_some()
            with pytest.raises(BusyError, match="Too many"):
                await ask(socket_path, "status")


async def test_regression_a_refusal_is_read_although_the_request_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, socket_path: str, nursery: trio.Nursery
) -> None:
    monkeypatch.setattr(control, "CONNECTIONS_MAX", 0)
    with trio.fail_after(PATIENCE_S):
        await nursery.start(control.serve, FakeDaemon(), socket_path)
        more_than_a_socket_holds = "x" * (client.LINE_BYTES_MAX - 1000)
        with pytest.raises(BusyError, match="Too many"):
            await ask(socket_path, "status", text=more_than_a_socket_holds)


async def test_the_socket_is_private_and_goes_away(socket_path: str) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve, FakeDaemon(), socket_path)
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600
        nursery.cancel_scope.cancel()
    assert not await trio.Path(socket_path).exists()


async def test_a_second_daemon_is_refused(daemon: FakeDaemon, socket_path: str) -> None:
    with pytest.raises(BusyError, match="Another daemon"):
        await control.serve(FakeDaemon(), socket_path)
    assert await ask(socket_path, "status") == {"op": "status"}


def leave_a_socket(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)


async def test_a_socket_that_a_killed_daemon_left_is_replaced(
    socket_path: str, nursery: trio.Nursery
) -> None:
    leave_a_socket(socket_path)
    await nursery.start(control.serve, FakeDaemon(), socket_path)
    assert await ask(socket_path, "status") == {"op": "status"}


# -- the commands' side, without a daemon that answers


def test_no_daemon_is_no_traceback(socket_path: str) -> None:
    with pytest.raises(TransientError, match="gone"):
        ControlClient(socket_path).request("status", timeout_s=1)
    leave_a_socket(socket_path)
    with pytest.raises(TransientError, match="gone"):
        ControlClient(socket_path).request("status", timeout_s=1)


def test_a_daemon_that_is_silent_is_given_up(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(socket_path)
        listening.listen()
        with pytest.raises(TransientError, match="in time"):
            ControlClient(socket_path).request("status", timeout_s=0.05)


def all_errors(kind: type[HpkfsError] = HpkfsError) -> list[type[HpkfsError]]:
    ours = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(found for child in ours for found in all_errors(child))]


@pytest.mark.parametrize("kind", all_errors())
def test_every_error_survives_the_way(kind: type[HpkfsError]) -> None:
    sent = json.dumps(describe_error(kind("a", kept="b", next_step="c")))
    told = rebuild_error(json.loads(sent))
    assert type(told) is kind
    assert str(told) == "a b c"


def test_an_unknown_error_keeps_its_exit_code() -> None:
    for code in range(1, 7):
        told = rebuild_error({"class": "FromTheFuture", "exit_code": code, "happened": "x"})
        assert told.exit_code == code


def test_the_client_imports_nothing_heavy() -> None:
    program = (
        "import sys, hpkfs.cli\n"
        "print(sorted({'trio', 'pyfuse3', 'sqlite3', 'ruamel', 'asyncio', 'logging'}"
        " & set(sys.modules)))"
    )
    done = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


# -- which mounts there are


@pytest.fixture
def listening() -> Iterator[Callable[..., str]]:
    """Registers a mount, with a socket that takes connections, in a state directory."""
    sockets: list[socket.socket] = []

    def register(state_dir: Path, *, own: bool = False, **fields: object) -> str:
        where = str(fields["mountpoint"])
        path = places.socket_path(str(state_dir), mountpoint=where if own else None)
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(path)
        sockets[-1].listen()
        record: dict[str, object] = {"state_dir": str(state_dir), "pid": os.getpid()}
        record |= {"read_only": own, "started_at": 1, **fields}
        places.register(path, record)
        return path

    yield register
    for one in sockets:
        one.close()


def pretend_mounted(monkeypatch: pytest.MonkeyPatch, *paths: str) -> None:
    table = [
        mountpoint.Mount(number, "0:99", path, "fuse.hpkfs", "file:///x")
        for number, path in enumerate(paths)
    ]
    monkeypatch.setattr(mountpoint, "mounts", lambda: table)


def test_a_mount_is_found_by_whatever_names_it(
    tmp_path: Path, listening: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, where, state = tmp_path / "store", tmp_path / "mnt", tmp_path / "state"
    for folder in (store, where, state):
        folder.mkdir()
    (tmp_path / "link").symlink_to("mnt")
    listening(state, mountpoint=str(where), uri=f"file://{store}")
    pretend_mounted(monkeypatch, str(where))
    monkeypatch.chdir(where)
    names = [where, where / "workspace" / "x", "workspace", ".", tmp_path / "link" / "SOUL.md"]
    names += [store, f"file://{store}", state, f"file://{tmp_path}/./store/"]
    found = [find_mount(str(name)) for name in names]
    assert [record and record.mountpoint for record in found] == [str(where)] * len(names)
    assert find_mount(str(tmp_path)) is None
    assert find_mount("file:///elsewhere") is None
    record = found[0]
    assert record
    assert record.inside(f"{where}/a/b") == "a/b"
    assert record.inside(str(where)) == ""
    assert record.inside(f"{where}2") is None


def test_of_two_mounts_of_a_store_the_writable_one_is_meant(
    tmp_path: Path, listening: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"file://{tmp_path}/store"
    reading, writing = f"{tmp_path}/a", f"{tmp_path}/b"
    listening(tmp_path, own=True, mountpoint=reading, uri=uri)
    listening(tmp_path, mountpoint=writing, uri=uri)
    pretend_mounted(monkeypatch, reading, writing)
    assert [record.mountpoint for record in all_mounts()] == [reading, writing]
    for text, expected in [(uri, writing), (reading, reading), (str(tmp_path), writing)]:
        record = find_mount(text)
        assert record
        assert record.mountpoint == expected


def test_records_of_dead_daemons_are_removed(
    tmp_path: Path, listening: Callable[..., str], runtime_folder: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with subprocess.Popen(("true",)) as ended:
        pass
    uri = "file:///x"
    listening(tmp_path / "a", mountpoint="/a", uri=uri, pid=ended.pid)
    refusing = places.socket_path(str(tmp_path / "b"))
    leave_a_socket(refusing)
    record: dict[str, object] = {"uri": uri, "mountpoint": "/b", "state_dir": str(tmp_path / "b")}
    places.register(refusing, {**record, "pid": os.getpid(), "read_only": False, "started_at": 1})
    places.register(places.socket_path(str(tmp_path)), {"of": "another shape"})
    assert all_mounts() == []
    assert list(runtime_folder.iterdir()) == []
