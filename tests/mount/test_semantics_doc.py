"""One test for each numbered promise of docs/semantics.md, of the same number."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import struct
import subprocess
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from support.agents import Desk
from support.faulty_disk import FaultyDisk
from support.mounts import Mount, mounted, tree, wait_gone
from support.posix import (
    PROCESS_TIMEOUT_S,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    finish,
    refuses,
    renameat2,
    start,
)

from hpkfs.agent import Agent, AgentOptions
from hpkfs.transport.local import LocalTransport
from hpkfs.volume import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.fuse

DOCUMENT = Path(__file__).parents[2] / "docs" / "semantics.md"
PIECE = 1 << 20
TIME_NS = 1_700_000_000_123_456_789
GIB = 1 << 30
NOBODY = 0xFFFF_FFFF
CANARY = b"canary-7f3a"
PRIVATE_KEY = b"-----BEGIN OPENSSH PRIVATE KEY-----\n" + CANARY + b"\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    """A mount for the tests that do not end it."""
    root = tmp_path_factory.mktemp("semantics")
    with mounted(new_store(root), root) as mount:
        (mount.path / "plugins").mkdir()
        yield mount


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """A mount of its own."""
    with mounted(new_store(tmp_path), tmp_path) as mount:
        (mount.path / "plugins").mkdir()
        yield mount


def new_store(root: Path) -> Path:
    mount = Mount(root / "store", root)
    mount.run("init", mount.store, "--state-dir", str(mount.state))
    return root / "store"


def elsewhere(mount: Mount, root: Path, *options: str) -> Mount:
    """Another machine with the same store, not mounted yet."""
    root.mkdir()
    other = Mount(mount.store, root)
    other.mount(*options)
    return other


def sync(mount: Mount) -> None:
    mount.run("sync", str(mount.path))


def zones(mount: Mount, name: str) -> tuple[Path, Path]:
    """A new folder in each zone."""
    found = mount.path / "plugins" / name, mount.path / "workspace" / name
    for path in found:
        path.mkdir()
    return found


def stored(mount: Mount) -> bytes:
    """All bytes of the store."""
    return b"".join(p.read_bytes() for p in Path(mount.store).rglob("*") if p.is_file())


def numbers_of_tests() -> list[int]:
    names = [name for name in globals() if name.startswith("test_promise_")]
    return sorted(int(name.split("_")[2]) for name in names)


def test_each_promise_has_its_test() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    promised = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.M)]
    assert promised == list(range(1, len(promised) + 1))
    assert numbers_of_tests() == promised


# -- reading ------------------------------------------------------------------------------


def test_promise_01_names_are_there_at_once_and_bytes_on_first_read(
    mount: Mount, tmp_path: Path
) -> None:
    data = os.urandom(3 * PIECE + 5)
    (mount.path / "workspace" / "big.bin").write_bytes(data)
    os.chmod(mount.path / "workspace" / "big.bin", 0o640)
    os.utime(mount.path / "workspace" / "big.bin", ns=(1, TIME_NS))
    (mount.path / "SOUL.md").write_bytes(b"soul")
    sync(mount)
    other = elsewhere(mount, tmp_path / "2", "--lazy")
    try:
        found = (other.path / "workspace" / "big.bin").stat()
        assert (found.st_size, stat.S_IMODE(found.st_mode)) == (len(data), 0o640)
        assert found.st_mtime_ns == TIME_NS
        (states,) = other.status("workspace/big.bin")["paths"]
        assert states["state"] == "absent"
        Path(mount.store).rename(tmp_path / "away")
        assert (other.path / "SOUL.md").read_bytes() == b"soul"
        (tmp_path / "away").rename(mount.store)
        assert (other.path / "workspace" / "big.bin").read_bytes() == data
        assert other.status("workspace/big.bin")["paths"][0]["state"] != "absent"
    finally:
        other.clean()


def test_promise_02_bytes_that_cannot_be_had_are_an_error(mount: Mount, tmp_path: Path) -> None:
    data = os.urandom(PIECE + PIECE // 2)
    (mount.path / "workspace" / "f.bin").write_bytes(data)
    sync(mount)
    chunks = [p for p in Path(mount.store, "objects").iterdir() if p.stat().st_size >= PIECE // 2]
    for damage in ("damaged", "missing"):
        other = elsewhere(mount, tmp_path / damage, "--lazy")
        try:
            for chunk in chunks:
                chunk.rename(tmp_path / chunk.name)
                if damage == "damaged":
                    chunk.write_bytes(bytes(chunk.stat().st_size if chunk.exists() else PIECE))
            refuses(errno.EIO, (other.path / "workspace" / "f.bin").read_bytes)
            assert (other.path / "workspace" / "f.bin").stat().st_size == len(data)
            for chunk in chunks:
                (tmp_path / chunk.name).rename(chunk)
            assert (other.path / "workspace" / "f.bin").read_bytes() == data
        finally:
            other.clean()


def test_promise_03_every_process_sees_the_same(shared: Mount) -> None:
    for folder in zones(shared, "3"):
        (folder / "f").write_bytes(b"0")
        code = (
            "import mmap, sys\n"
            "f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 1, prot=mmap.PROT_READ)\n"
            "for _ in sys.stdin: print(f.seek(0) or f.read(), m[:], flush=True)"
        )
        reader = start(code, folder / "f")
        assert reader.stdin
        assert reader.stdout
        with open(folder / "f", "r+b", buffering=0) as file:
            for step in b"123":
                os.pwrite(file.fileno(), bytes([step]), 0)
                reader.stdin.write("\n")
                reader.stdin.flush()
                assert reader.stdout.readline() == f"{bytes([step])!r} {bytes([step])!r}\n"
        finish(reader)


def test_promise_04_reading_changes_nothing(mount: Mount) -> None:
    for folder in zones(mount, "4"):
        (folder / "f").write_bytes(b"x")
        os.utime(folder / "f", ns=(TIME_NS, TIME_NS))
    sync(mount)
    before = os.listdir(Path(mount.store, "snapshots"))
    for path in mount.path.rglob("f"):
        assert path.read_bytes() == b"x"
        assert path.stat().st_atime_ns == TIME_NS
    assert mount.status()["state"] == "clean"
    mount.umount()
    assert os.listdir(Path(mount.store, "snapshots")) == before


# -- writing ------------------------------------------------------------------------------


def test_promise_05_a_call_that_returned_is_outside_the_daemon(mount: Mount) -> None:
    local, travelling = zones(mount, "5")
    os.kill(mount.pid(), 0)
    files = [open(folder / "f", "wb", buffering=0) for folder in (local, travelling)]  # noqa: SIM115
    for file in files:
        file.write(b"written")
    (travelling / "made").mkdir()
    (local / "f").rename(local / "renamed")
    mount.kill()
    for file in files:
        with pytest.raises(OSError, match="not connected"):
            file.write(b"more")
        with contextlib.suppress(OSError):  # what close(2) says of a dead mount
            file.close()
    mount.mount()
    assert (local / "renamed").read_bytes() == b"written"
    assert (travelling / "f").read_bytes() == b"written"
    assert (travelling / "made").is_dir()


def test_promise_06_fsync_makes_the_bytes_and_then_the_journal_durable(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    disk = FaultyDisk()

    async def live() -> None:
        options = AgentOptions(
            uri=f"file://{store}", state_dir=str(tmp_path / "s"), device_id="0" * 32,
            mountpoint="/mnt/agent",
        )  # fmt: skip
        agent = Agent(options, LocalTransport(str(store)), disk=disk)
        try:
            await agent.prepare()
            inode = await Desk(agent).write("workspace/f", b"x")
            disk.passed.clear()
            await agent.volume.fsync(inode.ino, data_only=False)
            assert disk.passed == [
                "backing.file.fsync", "backing.folder.fsync", "journal.wal.fsync",
            ]  # fmt: skip
            disk.passed.clear()
            await agent.volume.setattr(inode.ino, Change(mode=0o600))
            await agent.volume.fsync(inode.ino, data_only=True)
            assert disk.passed == ["backing.data.fsync", "journal.wal.fsync"]
            disk.passed.clear()
            Desk(agent).folder("workspace/new")
            await agent.volume.sync_journal()
            assert disk.passed == ["journal.wal.fsync"]
        finally:
            await agent.close()

    trio.run(live)


def test_promise_07_appends_follow_each_other_whole(shared: Mount) -> None:
    code = (
        "import os, sys; fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "for i in range(200): os.write(fd, (sys.argv[2] * 99 + '\\n').encode())"
    )
    for folder in zones(shared, "7"):
        finish(*[start(code, folder / "log", who) for who in "abcd"])
        lines = sorted((folder / "log").read_text().splitlines())
        assert lines == sorted([who * 99 for who in "abcd"] * 200)


def test_promise_08_rename_replaces_in_one_step(shared: Mount) -> None:
    code = (
        "import select, sys; print('ready', flush=True)\n"
        "while not select.select([sys.stdin], [], [], 0)[0]:\n"
        "    found = open(sys.argv[1], 'rb').read()\n"
        "    assert len(found) == 70000 and len(set(found)) == 1, len(found)"
    )
    for folder in zones(shared, "8"):
        (folder / "f").write_bytes(b"a" * 70_000)
        reader = start(code, folder / "f")
        assert reader.stdout
        assert reader.stdout.readline() == "ready\n"
        for step in range(100):
            (folder / "new").write_bytes(bytes([step]) * 70_000)
            (folder / "new").rename(folder / "f")
        reader.communicate("stop\n", timeout=PROCESS_TIMEOUT_S)
        assert reader.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_promise_09_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    mount = Mount(new_store(tmp_path), tmp_path)
    small = tmp_path / "small"
    small.mkdir()
    mount.state = small / "state"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "t", small], check=True, timeout=20)
    try:
        mount.mount()
        folder = mount.path / "plugins"
        folder.mkdir()
        (folder / "before").write_bytes(b"kept")
        with open(folder / "big", "wb", buffering=0) as file:
            written = 0

            def write_on() -> None:
                nonlocal written
                while True:
                    written += file.write(b"x" * PIECE)

            refuses(errno.ENOSPC, write_on)
        assert (folder / "before").read_bytes() == b"kept"
        assert (folder / "big").read_bytes()[:written] == b"x" * written
        os.truncate(folder / "big", 0)
        (folder / "after").write_bytes(b"x" * PIECE)
        assert (folder / "after").read_bytes() == b"x" * PIECE
        mount.umount()
    finally:
        mount.clean()
        subprocess.run(["umount", small], check=True, timeout=20)


def test_promise_10_an_open_file_outlives_its_name(mount: Mount) -> None:
    before = set(os.listdir(mount.state / "hpkfs" / "backing"))
    for folder in zones(mount, "10"):
        with open(folder / "f", "w+b", buffering=0) as removed:
            removed.write(b"before ")
            (folder / "f").unlink()
            folder.rmdir()
            removed.write(CANARY)
            removed.seek(0)
            assert removed.read() == b"before " + CANARY
            sync(mount)
    mount.umount()
    mount.mount()
    assert set(os.listdir(mount.state / "hpkfs" / "backing")) == before
    assert not list(mount.path.rglob(".fuse_hidden*"))
    assert CANARY not in stored(mount)


# -- what survives what -------------------------------------------------------------------


def described(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that a file system knows of what is below a folder, but ctimes and link counts."""
    found: dict[str, tuple[object, ...]] = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        what: object = os.readlink(path) if path.is_symlink() else None
        if stat.S_ISREG(status.st_mode):
            what = path.read_bytes()
        found[str(path.relative_to(folder))] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, what,
        )  # fmt: skip
    return found


def furnish(folder: Path) -> None:
    """A bit of everything that travels."""
    (folder / "empty").mkdir(mode=0o700)
    (folder / "deep").mkdir()
    (folder / "deep" / "f").write_bytes(b"x" * 5_000)
    (folder / "run").write_text("#!/bin/sh\n")
    (folder / "run").chmod(0o750)
    (folder / "read-only").write_text("r")
    (folder / "read-only").chmod(0o444)
    (folder / "nothing").touch(0o600)
    (folder / "link").symlink_to("deep/f")
    for number, path in enumerate(sorted(folder.rglob("*"), reverse=True)):
        if path.is_file() and not path.is_symlink():
            os.utime(path, ns=(1, TIME_NS + number))


def test_promise_11_everything_is_there_after_another_mount(mount: Mount) -> None:
    for folder in zones(mount, "11"):
        furnish(folder)
        os.mkfifo(folder / "fifo")
        with socket.socket(socket.AF_UNIX) as server:
            fd = os.open(folder, os.O_RDONLY)
            server.bind(f"/proc/self/fd/{fd}/socket")
            os.close(fd)
        os.link(folder / "run", folder / "hard")
    before = described(mount.path)
    mount.umount()
    mount.mount()
    assert described(mount.path) == before
    assert (mount.path / "workspace" / "11" / "hard").stat().st_nlink == 2


def test_promise_12_a_killed_daemon_loses_nothing_and_hides_nothing(mount: Mount) -> None:
    for folder in zones(mount, "12"):
        furnish(folder)
    before = described(mount.path)
    mount.kill()
    with contextlib.suppress(ConnectionAbortedError):  # what is under way at the kill
        refuses(errno.ENOTCONN, mount.path.stat)
    refuses(errno.ENOTCONN, lambda: os.listdir(mount.path))
    refuses(errno.ENOTCONN, (mount.path / "SOUL.md").read_bytes)
    mount.mount()
    assert described(mount.path) == before


def test_promise_13_every_way_to_end_a_mount_saves(mount: Mount, tmp_path: Path) -> None:
    def by_terminating() -> None:
        os.kill(mount.pid(), signal.SIGTERM)

    def by_fusermount() -> None:
        subprocess.run(["fusermount3", "-u", mount.path], check=True, timeout=20)

    ways: tuple[Callable[[], object], ...] = (mount.umount, by_terminating, by_fusermount)
    for number, end in enumerate(ways):
        (mount.path / "workspace" / f"f{number}").write_text("saved")
        pid = mount.pid()
        end()
        wait_gone(pid)
        other = elsewhere(mount, tmp_path / f"{number}")
        assert (other.path / "workspace" / f"f{number}").read_text() == "saved"
        other.umount()
        mount.mount()


def test_promise_14_another_machine_shows_the_same(tmp_path: Path) -> None:
    with mounted(new_store(tmp_path), tmp_path, "-o", "xattr") as mount:
        folder = mount.path / "workspace" / "14"
        folder.mkdir()
        furnish(folder)
        os.setxattr(folder / "run", "user.note", b"\0\xff")
        sync(mount)
        other = elsewhere(mount, tmp_path / "2", "-o", "xattr")
        try:
            there = described(other.path / "workspace" / "14")
            here = described(folder)
            folders = {path for path, (mode, *_) in here.items() if stat.S_ISDIR(int(str(mode)))}
            for found in (here, there):
                for path in (*folders, "link"):  # their times do not travel
                    found[path] = (*found[path][:3], found[path][4])
            assert there == here
            moved = other.path / "workspace" / "14" / "run"
            assert os.getxattr(moved, "user.note") == b"\0\xff"
        finally:
            other.clean()


# -- zones --------------------------------------------------------------------------------


def test_promise_15_only_what_is_named_travels(mount: Mount, tmp_path: Path) -> None:
    travelling = {"SOUL.md", "memories/USER.md", "skills/s/SKILL.md", "workspace/a/b.txt"}
    local = {"logs/x.log", "plugins/p.py", "cron/jobs.json", "unknown", "workspace/.git/config"}
    for path in travelling | local:
        (mount.path / path).parent.mkdir(parents=True, exist_ok=True)
        (mount.path / path).write_text(path)
    sync(mount)
    listed = json.loads(mount.run("status", str(mount.path), "--what-travels", "--json").stdout)
    listed_paths = {one["path"] for one in listed["files"]}
    assert travelling <= listed_paths
    assert not local & listed_paths
    other = elsewhere(mount, tmp_path / "2")
    try:
        for path in travelling:
            assert (other.path / path).read_text() == path
        for path in local:
            assert not (other.path / path).exists()
    finally:
        other.clean()


def test_promise_16_the_zones_are_one_file_system(mount: Mount, tmp_path: Path) -> None:
    local, travelling = zones(mount, "16")
    (local / "tree").mkdir()
    (local / "tree" / "f").write_text("content")
    number = (local / "tree" / "f").stat().st_ino
    (local / "tree").rename(travelling / "tree")
    assert (travelling / "tree" / "f").stat().st_ino == number
    os.link(travelling / "tree" / "f", local / "linked")
    assert (local / "linked").stat().st_ino == number
    (travelling / "deleted").write_text("content")
    sync(mount)
    (travelling / "tree").rename(local / "back")
    (travelling / "deleted").unlink()
    assert (local / "back" / "f").read_text() == "content"
    sync(mount)
    other = elsewhere(mount, tmp_path / "2")
    try:
        there = other.path / "workspace" / "16"
        assert not there.exists() or os.listdir(there) == []
        shown = [p.name for p in (other.path / ".hpkfs" / "history").rglob("workspace/16/**/*")]
        assert {"f", "deleted"} <= set(shown)
    finally:
        other.clean()


def test_promise_17_what_cannot_travel_is_named_and_holds_nothing_up(
    mount: Mount, tmp_path: Path
) -> None:
    folder = mount.path / "workspace"
    (folder / "good").write_text("travels")
    (folder / "ends with a space ").write_text("stays")
    (folder / "Name").write_text("one")
    (folder / "name").write_text("two")
    (folder / "id_test").write_bytes(PRIVATE_KEY)
    sync(mount)
    kept = {one["path"]: one["reason"] for one in mount.status()["kept_local"]}
    assert {"workspace/ends with a space ", "workspace/id_test"} <= kept.keys()
    assert len({"workspace/Name", "workspace/name"} & kept.keys()) == 1
    assert all(kept.values())
    other = elsewhere(mount, tmp_path / "2")
    try:
        assert (other.path / "workspace" / "good").read_text() == "travels"
    finally:
        other.clean()


def test_promise_18_secrets_are_not_in_the_store(mount: Mount) -> None:
    secrets = (
        ".env", "auth.json", "mcp-tokens/t.json", "home/.ssh/id_ed25519", "workspace/.env",
        "workspace/.netrc", "workspace/.npmrc", "workspace/.ssh/config",
        "skills/s/.env", "workspace/.aws/credentials", "workspace/meetings/node_token.json",
    )  # fmt: skip
    for path in secrets:
        (mount.path / path).parent.mkdir(parents=True, exist_ok=True)
        (mount.path / path).write_bytes(CANARY)
    (mount.path / "workspace" / "harmless-name").write_bytes(PRIVATE_KEY)
    with open(mount.path / "config.yaml", "ab") as file:
        file.write(b"\nmcp_servers:\n  x:\n    key: " + CANARY + b"\n")
    sync(mount)
    assert CANARY not in stored(mount)
    assert (mount.path / ".env").read_bytes() == CANARY


def test_promise_19_only_portable_settings_travel(mount: Mount, tmp_path: Path) -> None:
    other = elsewhere(mount, tmp_path / "2")
    try:
        other.umount()
        settings = mount.path / "config.yaml"
        settings.write_text("# mine\nmodel: a/b\nmcp_servers: {x: {command: y}}\n")
        sync(mount)
        other.mount()
        theirs = other.path / "config.yaml"
        assert "model: a/b" in theirs.read_text()
        assert "mcp_servers" not in theirs.read_text()
        theirs.write_text(theirs.read_text() + "# theirs\n")
        other.umount()
        settings.write_text(settings.read_text().replace("a/b", "c/d"))
        sync(mount)
        other.mount()
        assert "model: c/d" in theirs.read_text()
        assert "# theirs" in theirs.read_text()
        assert "# mine" in settings.read_text()
    finally:
        other.clean()


def test_promise_20_a_database_is_saved_while_it_is_written(mount: Mount, tmp_path: Path) -> None:
    path = mount.path / "workspace" / "notes.db"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA wal_autocheckpoint=0")
    db.execute("CREATE TABLE t(n)")
    db.executemany("INSERT INTO t VALUES(?)", [(n,) for n in range(100)])
    assert path.with_name("notes.db-wal").stat().st_size > 0
    sync(mount)
    other = elsewhere(mount, tmp_path / "2")
    try:
        assert not list((other.path / "workspace").glob("notes.db-*"))
        there = sqlite3.connect(other.path / "workspace" / "notes.db")
        assert there.execute("SELECT count(*) FROM t").fetchone() == (100,)
        assert there.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        there.close()
    finally:
        other.clean()
    db.close()


def test_promise_21_links_owners_and_special_files_stay_here(mount: Mount, tmp_path: Path) -> None:
    folder = mount.path / "workspace" / "21"
    folder.mkdir()
    (folder / "a").write_text("one")
    os.link(folder / "a", folder / "b")
    (folder / "s").write_text("setuid")
    (folder / "s").chmod(0o6755)
    os.mkfifo(folder / "fifo")
    if os.geteuid() == 0:
        os.chown(folder / "s", 12, 34)
        (folder / "s").chmod(0o6755)
    assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o6755
    sync(mount)
    other = elsewhere(mount, tmp_path / "2")
    try:
        there = other.path / "workspace" / "21"
        assert sorted(os.listdir(there)) == ["a", "b", "s"]
        assert (there / "a").stat().st_nlink == 1
        (there / "a").write_text("changed")
        assert (there / "b").read_text() == "one"
        found = (there / "s").stat()
        assert stat.S_IMODE(found.st_mode) == 0o755
        assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    finally:
        other.clean()


# -- names --------------------------------------------------------------------------------


def test_promise_22_names_are_bytes(mount: Mount, tmp_path: Path) -> None:
    composed = unicodedata.normalize("NFC", "é").encode()
    decomposed = unicodedata.normalize("NFD", "é").encode()
    names = [b"\xff\xfe", b"a\nb", b"n" * 255, composed, decomposed, b"Case", b"case"]
    for folder in zones(mount, "22"):
        for name in names:
            with open(os.path.join(os.fsencode(folder), name), "wb") as file:
                file.write(name)
        assert sorted(os.listdir(os.fsencode(folder))) == sorted(names)
        refuses(errno.ENAMETOOLONG, (folder / ("n" * 256)).touch)
    sync(mount)
    other = elsewhere(mount, tmp_path / "2")
    try:
        there = os.listdir(os.fsencode(other.path / "workspace" / "22"))
        assert set(there) <= set(names)
        assert composed in there
        assert decomposed not in there
        assert len({b"Case", b"case"} & set(there)) == 1
    finally:
        other.clean()


def test_promise_23_links_keep_their_targets(mount: Mount, tmp_path: Path) -> None:
    for folder in zones(mount, "23"):
        (folder / "target").write_text("x")
        for name, target in (("in", "target"), ("out", "/etc/hostname"), ("long", "s" * 4_095)):
            (folder / name).symlink_to(target)
            assert os.readlink(folder / name) == target
        os.symlink(b"\xff", os.fsencode(folder / "bytes"))
        assert os.readlink(os.fsencode(folder / "bytes")) == b"\xff"
    sync(mount)
    other = elsewhere(mount, tmp_path / "2")
    try:
        there = other.path / "workspace" / "23"
        assert os.readlink(there / "in") == "target"
        assert not (there / "out").is_symlink()
    finally:
        other.clean()


def test_promise_24_one_pass_empties_a_folder(shared: Mount) -> None:
    for folder in zones(shared, "24"):
        names = {f"{number:04}" for number in range(400)}
        for name in names:
            os.mknod(folder / name)
        seen = []
        with os.scandir(folder) as entries:
            for entry in entries:
                seen.append(entry.name)
                os.unlink(entry.path)
                if len(seen) % 3 == 0:
                    os.mknod(folder / f"new-{entry.name}")
                    os.unlink(folder / f"new-{entry.name}")
        assert sorted(seen) == sorted(names)
        folder.rmdir()


def test_promise_25_rename_refuses_and_exchanges(shared: Mount) -> None:
    local, travelling = zones(shared, "25")
    for one, other in ((local / "a", local / "b"), (local / "c", travelling / "c")):
        one.write_text("one")
        other.write_text("other")
        refuses(errno.EEXIST, lambda: renameat2(one, other, RENAME_NOREPLACE))  # noqa: B023
        renameat2(one, other, RENAME_EXCHANGE)
        assert (one.read_text(), other.read_text()) == ("other", "one")


# -- times and attributes -----------------------------------------------------------------


def test_promise_26_times_are_kept_to_the_nanosecond(mount: Mount, tmp_path: Path) -> None:
    times = {"new": TIME_NS, "old": -1, "first": -(1 << 31) * 10**9, "last": (1 << 63) - 1}
    for folder in zones(mount, "26"):
        for name, time_ns in times.items():
            (folder / name).write_text(name)
            os.utime(folder / name, ns=(time_ns, time_ns))
        os.utime(folder / "first", (0, -(1 << 35)))
        os.utime(folder / "last", (0, 1 << 35))
    mount.umount()
    mount.mount()
    other = elsewhere(mount, tmp_path / "2")
    try:
        for root in (mount.path / "plugins", mount.path / "workspace", other.path / "workspace"):
            found = {name: (root / "26" / name).stat().st_mtime_ns for name in times}
            assert found == times
    finally:
        other.clean()


def test_promise_27_what_changed_later_is_never_older(shared: Mount) -> None:
    local, travelling = zones(shared, "27")
    newest = 0
    for step in range(100):
        for folder in (local, travelling):
            (folder / f"{step}").touch()
            (folder / f"{step}").stat()
            (folder / f"{step}").write_text("x")
            found = (folder / f"{step}").stat().st_mtime_ns
            assert found >= newest
            os.utime(folder / f"{step}")
            newest = (folder / f"{step}").stat().st_mtime_ns
            assert newest >= found


def test_promise_28_modes_and_owners_are_kept(shared: Mount) -> None:
    for folder in zones(shared, "28"):
        (folder / "f").touch()
        for mode in (0o400, 0o751, 0o4755, 0o1777):
            (folder / "f").chmod(mode)
            assert stat.S_IMODE((folder / "f").stat().st_mode) == mode
        if os.geteuid() == 0:
            (folder / "f").chmod(0o4755)
            os.chown(folder / "f", 12, 34)
            found = (folder / "f").stat()
            assert (found.st_uid, found.st_gid) == (12, 34)
            assert stat.S_IMODE(found.st_mode) == 0o755
            os.chown(folder, -1, 34)
        folder.chmod(0o2775)
        (folder / "new").mkdir()
        assert (folder / "new").stat().st_gid == folder.stat().st_gid
        assert (folder / "new").stat().st_mode & stat.S_ISGID


def test_promise_29_extended_attributes_need_the_option(shared: Mount, tmp_path: Path) -> None:
    (plain,) = {zones(shared, "29")[1]}
    refuses(errno.EOPNOTSUPP, lambda: os.setxattr(plain, "user.x", b""))
    refuses(errno.EOPNOTSUPP, lambda: os.getxattr(plain, "user.hpkfs.state"))
    with mounted(new_store(tmp_path), tmp_path, "-o", "xattr") as mount:
        (mount.path / "workspace" / "f").write_text("x")
        sync(mount)
        (mount.path / "local").write_text("x")
        for path, state in (("workspace/f", b"hydrated"), ("local", b"local")):
            file = mount.path / path
            assert os.getxattr(file, "user.hpkfs.state") == state
            for name in ("user.hpkfs.state", "user.hpkfs.mine"):
                refuses(errno.EPERM, lambda: os.setxattr(file, name, b""))  # noqa: B023
                refuses(errno.EPERM, lambda: os.removexattr(file, name))  # noqa: B023
            os.setxattr(file, "user.note", b"kept", os.XATTR_CREATE)
            refuses(errno.EEXIST, lambda: os.setxattr(file, "user.note", b"", os.XATTR_CREATE))  # noqa: B023
            assert os.listxattr(file) == ["user.note"]
            assert os.getxattr(file, "user.note") == b"kept"
            os.removexattr(file, "user.note")
            refuses(errno.ENODATA, lambda: os.getxattr(file, "user.note"))  # noqa: B023
        sync(mount)
        file = mount.path / "workspace" / "f"
        assert os.getxattr(file, "user.hpkfs.logical") == b"workspace/f"
        digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
        assert os.getxattr(file, "user.hpkfs.sha256") == digest.encode()
        assert os.getxattr(mount.path / "workspace", "user.hpkfs.state")


def test_promise_30_free_space_is_that_of_the_disk(shared: Mount) -> None:
    found, below = shutil.disk_usage(shared.path), shutil.disk_usage(shared.state)
    assert found.total == below.total
    assert found.free > 0


# -- locks and databases ------------------------------------------------------------------


def test_promise_31_locks_hold_between_processes(shared: Mount) -> None:
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b')\n"
        "fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    for folder in zones(shared, "31"):
        (folder / "f").touch()
        holder = start(code, folder / "f")
        assert holder.stdout
        assert holder.stdout.readline() == "locked\n"
        with open(folder / "f", "r+b") as file:
            for lock in (fcntl.flock, fcntl.lockf):
                with pytest.raises(BlockingIOError):
                    lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder.kill()
            holder.communicate(timeout=PROCESS_TIMEOUT_S)
            for lock in (fcntl.flock, fcntl.lockf):
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_promise_32_shared_maps_agree_with_read_and_write(shared: Mount) -> None:
    code = (
        "import mmap, sys\n"
        "f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 4096); m[0] = 7; m.flush()"
    )
    for folder in zones(shared, "32"):
        with open(folder / "f", "w+b", buffering=0) as file:
            file.write(bytes(4_096))
            shared_map = mmap.mmap(file.fileno(), 4_096)
            finish(start(code, folder / "f"))
            assert shared_map[0] == os.pread(file.fileno(), 1, 0)[0] == 7
            os.pwrite(file.fileno(), b"\x09", 0)
            assert shared_map[0] == 9
            shared_map.close()


def test_promise_33_sqlite_works_in_every_journal_mode(shared: Mount) -> None:
    code = (
        "import sqlite3, sys; db = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)\n"
        "for n in range(20): db.execute('INSERT INTO t VALUES(?)', (n,))"
    )
    for folder in zones(shared, "33"):
        for mode in ("delete", "truncate", "persist", "wal"):
            path = folder / f"{mode}.db"
            db = sqlite3.connect(path, isolation_level=None)
            assert db.execute(f"PRAGMA journal_mode={mode}").fetchone() == (mode,)
            db.execute("CREATE TABLE t(n)")
            finish(start(code, path), start(code, path))
            assert db.execute("SELECT count(*) FROM t").fetchone() == (40,)
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            db.close()


# -- history ------------------------------------------------------------------------------


def test_promise_34_the_history_is_reachable_and_not_listed(mount: Mount) -> None:
    control = mount.path / ".hpkfs"
    assert ".hpkfs" not in os.listdir(mount.path)
    assert sorted(os.listdir(control)) == ["history", "status.json"]
    (mount.path / "folder").mkdir()
    refuses(errno.EPERM, control.rmdir)
    refuses(errno.EPERM, lambda: control.rename(mount.path / "moved"))
    refuses(errno.EEXIST, control.mkdir)
    refuses(errno.EPERM, (control / "new").touch)
    refuses(errno.EROFS, lambda: (control / "status.json").write_text("x"))
    mount.umount()
    mount.mount("-o", "showhistory")
    assert ".hpkfs" in os.listdir(mount.path)


def test_promise_35_each_checkpoint_is_a_tree(mount: Mount) -> None:
    file = mount.path / "workspace" / "f"
    for text in ("one", "two"):
        file.write_text(text)
        os.utime(file, ns=(1, TIME_NS))
        sync(mount)
    folders = sorted((mount.path / ".hpkfs" / "history").iterdir(), key=lambda p: p.name)
    assert len(folders) == 3
    found = {p.name: (p / "workspace" / "f") for p in folders if (p / "workspace" / "f").exists()}
    assert sorted(path.read_text() for path in found.values()) == ["one", "two"]
    assert {path.stat().st_mtime_ns for path in found.values()} == {TIME_NS}
    status = json.loads((mount.path / ".hpkfs" / "status.json").read_text())
    assert status["state"] == "clean"
    file.write_text("three")
    status = json.loads((mount.path / ".hpkfs" / "status.json").read_text())
    assert status["state"] == "dirty"


def test_promise_36_earlier_checkpoints_are_read_only_mounts(mount: Mount, tmp_path: Path) -> None:
    file = mount.path / "workspace" / "f"
    ids = []
    for text in ("one", "two"):
        file.write_text(text)
        file.chmod(0o755)
        done = mount.run("sync", str(mount.path), "--json")
        ids.append(json.loads(done.stdout)["sealed"])
    for number, (options, text) in enumerate(
        ((("--at", ids[0]), "one"), (("--read-only",), "two"))
    ):
        other = elsewhere(mount, tmp_path / f"{number}", *options)
        try:
            there = other.path / "workspace" / "f"
            assert there.read_text() == text
            assert tree(other.path)["workspace/f"]
            changes: tuple[Callable[[], object], ...] = (
                lambda: there.write_text("x"),  # noqa: B023
                there.unlink,
                lambda: there.chmod(0o600),  # noqa: B023
                lambda: os.utime(there),  # noqa: B023
                lambda: os.truncate(there, 0),  # noqa: B023
                lambda: there.rename(there.with_name("g")),  # noqa: B023
                lambda: os.link(there, there.with_name("g")),  # noqa: B023
                there.with_name("g").mkdir,
                there.with_name("g").touch,
                lambda: there.with_name("g").symlink_to("f"),  # noqa: B023
                there.parent.rmdir,
            )
            for change in changes:
                refuses(errno.EROFS, change)
        finally:
            other.clean()


# -- not offered --------------------------------------------------------------------------


def test_promise_37_what_is_not_offered_fails_and_changes_nothing(
    shared: Mount, tmp_path: Path
) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for folder in zones(shared, "37"):
        (folder / "a").write_bytes(b"content")
        (folder / "b").write_bytes(b"other")
        refuses(errno.EOPNOTSUPP, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR))  # noqa: B023
        refuses(
            errno.EINVAL,
            lambda: renameat2(folder / "a", folder / "b", RENAME_WHITEOUT),  # noqa: B023
        )
        with open(folder / "a", "r+b") as a, open(folder / "b", "r+b") as b:
            for mode in (0, 3):
                offset, length = ctypes.c_longlong(0), ctypes.c_longlong(4_096)
                assert libc.fallocate(a.fileno(), mode, offset, length) == -1
                assert ctypes.get_errno() == errno.EOPNOTSUPP
            refuses(errno.EOPNOTSUPP, lambda: fcntl.ioctl(b, 0x40049409, a.fileno()))
            refuses(errno.ENOTTY, lambda: fcntl.ioctl(a, 0x80086601, bytes(8)))
        assert tree(folder) == {
            "a": "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73",
            "b": "d9298a10d1b0735837dc4bd85dac641b0f3cef27a47e5d53a54f2f3f5b2fcffa",
        }
    with mounted(new_store(tmp_path), tmp_path, "-o", "xattr") as mount:
        acl = struct.pack("<I" + "HHI" * 3, 2, 1, 6, NOBODY, 4, 4, NOBODY, 32, 4, NOBODY)  # acl(5)
        refuses(errno.EOPNOTSUPP, lambda: os.setxattr(mount.path, "system.posix_acl_access", acl))


def test_promise_38_holes_take_no_space_and_are_not_reported(shared: Mount) -> None:
    folder = zones(shared, "38")[0]
    before = os.statvfs(shared.state).f_bavail
    with open(folder / "f", "w+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"end", 5 * GIB)
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == 0
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 5 * GIB + 3
        assert os.pread(file.fileno(), 10, 5 * GIB - 2) == b"\0\0end"
        used = (before - os.statvfs(shared.state).f_bavail) * os.statvfs(shared.state).f_frsize
        assert used < GIB
