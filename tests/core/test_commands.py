"""Each command against a daemon that answers from a table: requests, output, exit codes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio

from hpkfs import cli, control, mountpoint, places, terminal
from hpkfs.errors import BusyError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

PATIENCE_S = 20
ID = "0123456789abcdef0123456789abcdef"
STATUS: dict[str, object] = {
    "uri": "file:///x",
    "mountpoint": "/m",
    "state": "dirty",
    "detail": "Changed.",
    "exit_code": 2,
    "head": {"snapshot_id": ID, "created_at": "2026-11-30T12:00:00Z"},
    "base": {"snapshot_id": ID, "created_at": "2026-11-30T12:00:00Z"},
    "pending": {"checkpoints": 2, "objects": 3, "bytes": 2_048, "oldest": None},
    "dirty": [f"workspace/{number}" for number in range(30)],
    "files": {"total": 40, "hydrated": 39, "absent": 1},
    "bytes": {"total": 10, "hydrated": 5},
    "kept_local": [{"path": "workspace/.npmrc", "reason": "is a secret"}],
    "last_published": None,
    "last_error": "It was full.",
}
PATHS: dict[str, object] = {"paths": [{"path": "a", "state": "dirty", "sha256": None, "size": 3}]}
TRAVELS: dict[str, object] = {
    "files": [{"path": "SOUL.md", "size": 3}],
    "links": ["workspace/link"],
    "kept_local": [{"path": "workspace/.netrc", "reason": "is a secret"}],
}
SYNCED: dict[str, object] = {"state": "clean", "exit_code": 0, "detail": "", "pending": 0}
CHECKPOINTS: dict[str, object] = {
    "checkpoints": [
        {
            "snapshot_id": ID,
            "created_at": "2026-11-30T12:00:00Z",
            "device_id": None,
            "parent": None,
            "files": 1,
            "bytes": 1_536,
            "state": "published",
        }
    ],
    "unread": 0,
}
ROWS: dict[str, object] = {
    "rows": [
        {"id": 7, "time_ns": 10**18, "op": "write", "path": "a\nb", "detail": "", "checkpoint": ID}
    ],
    "last": 7,
}


class TableDaemon:
    """Keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def handle(
        self,
        op: str,
        args: dict[str, Any],
        progress: Callable[[dict[str, object]], Awaitable[None]],
    ) -> dict[str, object]:
        self.asked.append((op, args))
        if op == "status":
            kinds: dict[object, dict[str, object]] = {
                "metrics": {"operations": 5},
                "what-travels": TRAVELS,
            }
            return kinds.get(args.get("what"), PATHS if args.get("paths") else STATUS)
        if op == "umount" and not args["force"]:
            raise BusyError("/m is in use by process 7 (hermes).")
        answers: dict[str, dict[str, object]] = {
            "sync": {**SYNCED, "sealed": ID},
            "umount": {**SYNCED, "state": "pending", "pending": 1, "exit_code": 2},
            "history": CHECKPOINTS,
            "log": ROWS,
            "restore": {**SYNCED, "sealed": ID, "restored": 2, "removed": 1, "recovery": "/r"},
            "fetch": {"files": 2, "bytes": 2_048},
            "evict": {"files": 1, "bytes": 5},
        }
        return answers[op]


@pytest.fixture(autouse=True)
def _own_places(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="hpkfs-", dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        monkeypatch.setenv(places.HOME_VARIABLE, f"{folder}/home")
        yield


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that counts as a mountpoint, with a file and a folder in it."""
    (tmp_path / "m" / "workspace").mkdir(parents=True)
    (tmp_path / "m" / "SOUL.md").touch()
    table = [mountpoint.Mount(1, "0:99", str(tmp_path / "m"), "fuse.hpkfs", "file:///x")]
    monkeypatch.setattr(mountpoint, "mounts", lambda: table)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path / "m")


@pytest.fixture
async def daemon(where: str, nursery: trio.Nursery) -> AsyncIterator[TableDaemon]:
    daemon = TableDaemon()
    state_dir = os.path.join(os.path.dirname(where), "state")
    path = places.socket_path(state_dir)
    record: dict[str, object] = {"uri": "file:///x", "mountpoint": where, "state_dir": state_dir}
    with trio.fail_after(PATIENCE_S):
        await nursery.start(control.serve, daemon, path)
        places.register(path, {**record, "pid": os.getpid(), "read_only": False, "started_at": 1})
        yield daemon


async def run(*arguments: str) -> int:
    return await trio.to_thread.run_sync(cli.main, arguments, abandon_on_cancel=True)


@pytest.mark.parametrize(
    ("arguments", "request_", "code", "shown"),
    [
        (["status", "M"], ("status", {}), 2, "workspace/19\n  and 10 more\nStays on this"),
        (["status"], ("status", {}), 2, "Waiting: 2 checkpoints, 2.0 KiB"),
        (["status", "file:///x"], ("status", {}), 2, "State:   dirty, Changed."),
        (["status", "M", "SOUL.md"], ("status", {"paths": ["SOUL.md"]}), 0, "dirty  3 bytes  -  a"),
        (["status", "M/SOUL.md"], ("status", {"paths": ["SOUL.md"]}), 0, "dirty"),
        (["status", "M/workspace"], ("status", {}), 2, "State:"),
        (["status", "M", "--metrics"], ("status", {"what": "metrics"}), 0, "operations  5"),
        (["status", "M", "--what-travels"], ("status", {"what": "what-travels"}), 0, "SOUL.md  3"),
        (["sync", "M"], ("sync", {"wait": False, "prefer": None}), 0, "Everything is on the store"),
        (["sync", "M", "--wait"], ("sync", {"wait": True, "prefer": None}), 0, f"Checkpoint {ID}."),
        (
            ["history", "M", "--limit", "3"],
            ("history", {"limit": 3}),
            0,
            f"{ID}  published  1 file",
        ),
        (
            ["restore", "M", ID[:8], "workspace"],
            ("restore", {"snapshot": ID[:8], "paths": ["workspace"]}),
            0,
            "2 files restored, 1 removed",
        ),
        (
            ["restore", "M", "2026-11-30T12:00:00Z"],
            ("restore", {"snapshot": "2026-11-30T12:00:00Z", "paths": []}),
            0,
            "What was replaced is in /r.",
        ),
        (
            ["log", "M"],
            ("log", {"since": None, "limit": 1_000}),
            0,
            "write  a\\nb  in 0123456789ab",
        ),
        (["fetch", "M", "--all"], ("fetch", {"paths": [], "all": True}), 0, "2 files, 2.0 KiB"),
        (
            ["fetch", "M/workspace"],
            ("fetch", {"paths": ["workspace"], "all": False}),
            0,
            "Fetched",
        ),
        (["evict", "M", "M/SOUL.md"], ("evict", {"paths": ["SOUL.md"]}), 0, "Freed 5 bytes"),
        (
            ["umount", "M", "--force", "--no-publish"],
            ("umount", {"wait": False, "publish": False, "force": True}),
            2,
            "1 checkpoint waits on this machine",
        ),
    ],
)
async def test_a_command_asks_and_shows(
    arguments: list[str],
    request_: tuple[str, dict[str, object]],
    code: int,
    shown: str,
    daemon: TableDaemon,
    where: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hpkfs.mounting.END_TIMEOUT_S", 0)  # the daemon is this process
    given = [where + word[1:] if word[:2] in {"M", "M/"} else word for word in arguments]
    assert await run(*given) == code
    out, err = capsys.readouterr()
    assert daemon.asked == [request_]
    assert shown in out
    assert err == ""
    assert await run(*given, "--json") == code
    out, err = capsys.readouterr()
    assert isinstance(json.loads(out), dict)
    assert err == ""


async def test_a_busy_mount_is_a_refusal_with_its_holder(
    daemon: TableDaemon, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("umount", where) == 1
    assert "process 7 (hermes)" in capsys.readouterr().err


async def test_paths_are_taken_from_a_current_folder_inside_the_mount(
    daemon: TableDaemon, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(where) / "workspace")
    assert await run("evict", ".", "a", "../SOUL.md", f"{where}/b") == 0
    assert await run("evict", where, "a") == 0
    assert [args["paths"] for _, args in daemon.asked] == [
        ["workspace/a", "SOUL.md", "b"],
        ["workspace/a"],
    ]


@pytest.mark.parametrize("path", ["..", "/etc", "../m2/x"])
async def test_a_path_outside_the_mount_is_refused(
    path: str, daemon: TableDaemon, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await run("evict", where, path) == 1
    assert "is not in the mount" in capsys.readouterr().err
    assert daemon.asked == []


@pytest.mark.parametrize("extra", [[], ["--all", "SOUL.md"]])
async def test_fetch_wants_paths_or_all(extra: list[str], daemon: TableDaemon, where: str) -> None:
    assert await run("fetch", where, *extra) == 1
    assert daemon.asked == []


@pytest.mark.fuse
async def test_a_writable_mount_of_the_same_agent_is_refused_and_named(
    daemon: TableDaemon, where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, target, state = str(tmp_path / "store"), tmp_path / "other", str(tmp_path / "state")
    assert await run("mount", store, str(target), "--state-dir", state) == 1
    assert f"mounted on {where} already" in capsys.readouterr().err
    assert not await trio.Path(target).exists()


async def test_list_names_the_mount(
    daemon: TableDaemon, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places.note_store(places.state_dir(places.resolve_uri("/elsewhere")[0]), "file:///elsewhere")
    assert await run("list") == 0
    assert f"{where}  file:///x" in capsys.readouterr().out
    assert await run("list", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [mount["mountpoint"] for mount in result["mounts"]] == [where]
    assert [agent["uri"] for agent in result["agents"]] == ["file:///elsewhere"]
    assert daemon.asked == []


@pytest.mark.parametrize("name", ["log", "fetch", "evict", "umount"])
def test_a_bare_directory_says_how_to_mount_it_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "m"
    mountpoint.prepare(str(where), uri="file:///x%20y", recovery_dir=str(tmp_path / "r"))
    assert cli.main([name, str(where)]) == 1
    assert f"hpkfs mount file:///x%20y {where}" in capsys.readouterr().err


def test_progress_waits_a_second_and_then_tells_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = terminal.Progress("Fetching")
    for at, done in [(100.5, 1), (106.0, 1 << 20), (106.5, 2), (111.5, 3 << 20)]:
        now[0] = at
        progress({"bytes": done, "total": 4 << 20, "files": 2})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "Fetching: 1.0 MiB of 4.0 MiB, about 18 s left, 2 files",
        "Fetching: 3.0 MiB of 4.0 MiB, about 4 s left, 2 files",
    ]
