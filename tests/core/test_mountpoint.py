from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs import mountpoint
from hpkfs.errors import BusyError, UsageError
from hpkfs.mountpoint import Mount, parse_mountinfo

if TYPE_CHECKING:
    from collections.abc import Iterator

URI = "file:///srv/a%20b"
PATIENCE_S = 20
# A file system with one file, `f`; the arguments are the mountpoint and the source.
TINY = """
import errno, os, stat, sys
import pyfuse3, trio

class Tiny(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_uid, entry.st_gid = inode, os.getuid(), os.getgid()
        is_root = inode == pyfuse3.ROOT_INODE
        entry.st_mode = stat.S_IFDIR | 0o755 if is_root else stat.S_IFREG | 0o644
        entry.st_size = 5
        return entry

    async def lookup(self, parent, name, ctx=None):
        if name != b"f":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(2)

    async def open(self, inode, flags, ctx):
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh, offset, size):
        return b"hello"[offset:offset + size]

options = set(pyfuse3.default_options) | {f"fsname={sys.argv[2]}", "subtype=hpkfs"}
pyfuse3.init(Tiny(), sys.argv[1], options)
print("ready", flush=True)
trio.run(pyfuse3.main)
pyfuse3.close(unmount=False)
"""
MAP_THE_FILE = """
import mmap, sys
with open(sys.argv[1]) as file:
    mapped = mmap.mmap(file.fileno(), 5, prot=mmap.PROT_READ)
print("ready", flush=True)
sys.stdin.read()
"""
TABLE = b"""\
22 27 0:21 / /proc rw,relatime - proc proc rw
42 27 254:0 /lib /var/lib rw shared:1 master:2 - ext4 /dev/vda rw,discard
43 27 0:39 / /home/a\\040b\\134c\\011 rw,nosuid - fuse.hpkfs file:///srv/a%20b rw,user_id=0
nonsense
44 27 0:40 / /mnt rw - fuse.sshfs host:/\\303\\244 rw
"""


def mount(path: str, *, filesystem_type: str = "fuse.hpkfs") -> Mount:
    return Mount(1, "0:9", path, filesystem_type, URI)


# -- the table of mounts


def test_the_table_is_read_with_its_escapes() -> None:
    assert parse_mountinfo(TABLE) == [
        Mount(22, "0:21", "/proc", "proc", "proc"),
        Mount(42, "254:0", "/var/lib", "ext4", "/dev/vda"),
        Mount(43, "0:39", "/home/a b\\c\t", "fuse.hpkfs", URI),
        Mount(44, "0:40", "/mnt", "fuse.sshfs", "host:/ä"),
    ]


@given(st.binary(min_size=1, max_size=50).filter(lambda name: b"\0" not in name))
def test_every_path_survives_the_kernels_escapes(name: bytes) -> None:
    escaped = b"".join(b"\\%03o" % c if c in b" \t\n\\#" else bytes([c]) for c in name)
    line = b"1 2 0:3 / /" + escaped + b" rw - fuse.hpkfs x rw\n"
    assert [os.fsencode(found.path) for found in parse_mountinfo(line)] == [b"/" + name]


@given(st.binary())
def test_garbage_in_the_table_is_left_out(data: bytes) -> None:
    parse_mountinfo(data)


def test_the_real_table_has_the_root() -> None:
    assert mountpoint.mount_on("/") is not None
    assert mountpoint.mount_on("/no/such/mount") is None


def test_of_two_mounts_on_a_path_the_upper_one_counts() -> None:
    table = [mount("/m", filesystem_type="tmpfs"), mount("/m")]
    assert mountpoint.mount_on("/m", table) == table[1]


def test_the_mount_around_a_path_is_the_innermost_of_ours() -> None:
    table = [mount("/a"), mount("/a/b"), mount("/a/b/c", filesystem_type="tmpfs")]
    assert mountpoint.mount_around("/a/b/c/d", table) == table[1]
    assert mountpoint.mount_around("/a/bc", table) == table[0]
    assert mountpoint.mount_around("/ab", table) is None


# -- paths


def test_a_path_is_resolved_like_realpath_outside_a_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "up").symlink_to("a/b/../..")
    (tmp_path / "abs").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to("nowhere/x")
    monkeypatch.chdir(tmp_path / "a")
    for text in ["", ".", "..", "b/./..//b", "../up/a", "../abs/b/new", "../broken/y", "/"]:
        assert mountpoint.resolve(text, []) == os.path.realpath(text)


def test_nothing_inside_a_mount_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "m"
    where.mkdir()
    (tmp_path / "link").symlink_to("m/x")
    asked: list[str] = []
    readlink = os.readlink

    def watch(path: str) -> str:
        asked.append(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", watch)
    table = [mount(str(where))]
    assert mountpoint.resolve(f"{where}/a/../b/./c", table) == f"{where}/b/c"
    assert mountpoint.resolve(f"{tmp_path}/link/y", table) == f"{where}/x/y"
    assert mountpoint.resolve(str(where), table) == str(where)
    assert mountpoint.resolve(f"{where}/..", table) == str(tmp_path)
    assert asked
    assert not any(path.startswith(str(where)) for path in asked)


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UsageError, match="too many links"):
        mountpoint.resolve(str(tmp_path / "a"), [])


# -- making ready


def prepare(path: Path, recovery: Path | None = None) -> mountpoint.Prepared:
    return mountpoint.prepare(
        str(path), uri=URI, recovery_dir=str(recovery or path.parent / "recovery")
    )


def test_an_empty_directory_gets_the_markers(tmp_path: Path) -> None:
    where = tmp_path / "m"
    where.mkdir()
    prepared = prepare(where)
    assert prepared == mountpoint.Prepared(str(where), marked=True)
    assert sorted(os.listdir(where)) == ["NOT-MOUNTED.txt", "cron"]
    assert "hpkfs mount" in (where / "NOT-MOUNTED.txt").read_text()
    mountpoint.undo(prepared)
    assert os.listdir(where) == []


def test_a_missing_directory_is_made_private_and_taken_back(tmp_path: Path) -> None:
    prepared = prepare(tmp_path / "m")
    assert prepared.created
    assert (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    mountpoint.undo(prepared)
    assert not (tmp_path / "m").exists()


def test_the_markers_are_no_content(tmp_path: Path) -> None:
    prepare(tmp_path / "m")
    again = prepare(tmp_path / "m")
    assert again == mountpoint.Prepared(str(tmp_path / "m"))
    mountpoint.undo(again)
    assert sorted(os.listdir(tmp_path / "m")) == ["NOT-MOUNTED.txt", "cron"]


def test_the_marker_names_the_agent_that_belongs_there(tmp_path: Path) -> None:
    where = tmp_path / "m"
    assert mountpoint.bare_uri(str(where)) is None
    prepare(where)
    assert mountpoint.bare_uri(str(where)) == URI
    other = mountpoint.prepare(str(where), uri="file:///other", recovery_dir=str(tmp_path / "r"))
    assert other == mountpoint.Prepared(str(where), named_before=URI)
    assert mountpoint.bare_uri(str(where)) == "file:///other"
    mountpoint.undo(other)
    assert mountpoint.bare_uri(str(where)) == URI
    (where / "NOT-MOUNTED.txt").write_bytes(b"\xff of someone")
    assert mountpoint.bare_uri(str(where)) is None
    assert prepare(where) == mountpoint.Prepared(str(where))
    assert mountpoint.bare_uri(str(where)) == URI


def test_one_marker_alone_is_no_content_and_is_completed(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "cron").touch()
    assert prepare(tmp_path / "m").marked
    assert sorted(os.listdir(tmp_path / "m")) == ["NOT-MOUNTED.txt", "cron"]


def test_leftovers_beside_both_markers_go_to_recovery(tmp_path: Path) -> None:
    where, recovery = tmp_path / "m", tmp_path / "state" / "recovery"
    prepare(where)
    (where / "skills" / "x").mkdir(parents=True)
    (where / "SOUL.md").write_text("new")
    (where / "link").symlink_to("nowhere")
    prepared = prepare(where, recovery)
    assert prepared.moved_to
    moved = Path(prepared.moved_to)
    assert moved.parent == recovery
    assert (moved / "SOUL.md").read_text() == "new"
    assert (moved / "skills" / "x").is_dir()
    assert (moved / "link").is_symlink()
    assert sorted(os.listdir(where)) == ["NOT-MOUNTED.txt", "cron"]
    (where / "SOUL.md").write_text("newer")
    second = prepare(where, recovery)
    assert second.moved_to
    assert (moved / "SOUL.md").read_text() == "new"
    assert (Path(second.moved_to) / "SOUL.md").read_text() == "newer"


def test_leftovers_are_copied_to_another_file_system_before_they_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, target: str) -> None:
        raise OSError(18, "Invalid cross-device link")

    where = tmp_path / "m"
    prepare(where)
    (where / "a" / "b").mkdir(parents=True)
    (where / "a" / "b" / "c").write_text("c")
    (where / "link").symlink_to("nowhere")
    (where / "d").write_text("d")
    monkeypatch.setattr(os, "rename", refuse)
    moved = prepare(where).moved_to
    assert moved
    assert (Path(moved) / "a" / "b" / "c").read_text() == "c"
    assert (Path(moved) / "d").read_text() == "d"
    assert os.readlink(Path(moved) / "link") == "nowhere"
    assert sorted(os.listdir(where)) == ["NOT-MOUNTED.txt", "cron"]


@pytest.mark.parametrize("marker", [None, "cron", "NOT-MOUNTED.txt"])
def test_a_directory_with_content_is_refused_and_untouched(
    tmp_path: Path, marker: str | None
) -> None:
    (tmp_path / "SOUL.md").touch()
    if marker:
        (tmp_path / marker).touch()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(UsageError, match="not empty") as caught:
        prepare(tmp_path, tmp_path / "recovery")
    assert f"hpkfs adopt {tmp_path}" in caught.value.next_step
    assert f"--from-home {tmp_path}" in caught.value.next_step
    assert sorted(os.listdir(tmp_path)) == before


def test_the_cron_folder_of_hermes_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / "cron").mkdir()
    (tmp_path / "NOT-MOUNTED.txt").touch()
    with pytest.raises(UsageError, match="not empty: it holds cron"):
        prepare(tmp_path)


def test_a_file_cannot_be_mounted_on(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(UsageError, match="not a directory"):
        prepare(tmp_path / "f")


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist") as caught:
        prepare(tmp_path / "a b" / "m")
    assert f"mkdir -p '{tmp_path}/a b'" in caught.value.next_step


def test_nothing_mounted_can_neither_be_unmounted_nor_detached(tmp_path: Path) -> None:
    for take_away in (mountpoint.unmount, mountpoint.detach):
        with pytest.raises(UsageError, match="No agent is mounted"):
            take_away(str(tmp_path))
    assert mountpoint.holders(str(tmp_path)) == []
    assert not mountpoint.is_dead(str(tmp_path))
    assert mountpoint.device_of(str(tmp_path)) is None


def test_a_mount_of_another_kind_is_left_alone() -> None:
    with pytest.raises(UsageError, match="No agent is mounted"):
        mountpoint.unmount("/proc")


# -- with a real mount


@contextlib.contextmanager
def mounted(where: Path) -> Iterator[subprocess.Popen[bytes]]:
    where.mkdir(exist_ok=True)
    command = (sys.executable, "-c", TINY, str(where), URI)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout
            assert daemon.stdout.readline() == b"ready\n"
            yield daemon
        finally:
            daemon.kill()
            daemon.wait(PATIENCE_S)
            if mountpoint.mount_on(str(where)) is not None:
                mountpoint.detach(str(where))


@contextlib.contextmanager
def running(*command: str, **options: object) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, **options) as process:  # type: ignore[call-overload]  # as given
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.fuse
def test_a_dead_mount_is_cleared_and_the_directory_made_ready(tmp_path: Path) -> None:
    where = tmp_path / "a b,c"
    with mounted(where) as daemon:
        os.stat(where)  # the kernel knows the attributes now
        assert not mountpoint.is_dead(str(where))
        daemon.kill()
        daemon.wait(PATIENCE_S)
        assert mountpoint.is_dead(str(where))
        prepared = prepare(where)
        assert prepared == mountpoint.Prepared(str(where), cleared=True, marked=True)
        assert mountpoint.mount_on(str(where)) is None


@pytest.mark.fuse
def test_a_live_mount_is_named_and_kept(tmp_path: Path) -> None:
    where = tmp_path / "m"
    with mounted(where):
        with pytest.raises(BusyError, match="This agent is mounted"):
            prepare(where)
        with pytest.raises(BusyError, match=f"Another agent, {URI},"):
            mountpoint.prepare(str(where), uri="file:///other", recovery_dir=str(tmp_path))
        found = mountpoint.mount_on(str(where))
        assert found
        assert (found.is_ours, found.source) == (True, URI)
        assert mountpoint.device_of(str(where)) == found.device


@pytest.mark.fuse
def test_a_stopped_daemon_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = tmp_path / "m"
    with mounted(where) as daemon:
        monkeypatch.setattr(mountpoint.probe, "__kwdefaults__", {"timeout_s": 0.1})
        daemon.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        assert mountpoint.resolve(f"{where}/x/y") == f"{where}/x/y"
        assert mountpoint.holders(str(where)) == []
        with pytest.raises(BusyError, match="does not answer") as caught:
            prepare(where)
        assert "--force" in caught.value.next_step
        mountpoint.detach(str(where))
        assert time.monotonic() - begun < PATIENCE_S


@pytest.mark.fuse
def test_a_busy_mount_names_every_way_of_holding_it(tmp_path: Path) -> None:
    where = tmp_path / "m"
    held = str(where / "f")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(mounted(where))
        inside = stack.enter_context(running("sleep", "60", cwd=where))
        with open(held, "rb") as file:
            reading = stack.enter_context(running("sleep", "60", stdin=file))
        mapping = stack.enter_context(running(sys.executable, "-c", MAP_THE_FILE, held, **pipes))
        assert mapping.stdout
        assert mapping.stdout.readline() == b"ready\n"
        expected = {(inside.pid, str(where)), (reading.pid, held), (mapping.pid, held)}
        found = mountpoint.holders(str(where))
        assert {(holder.pid, holder.path) for holder in found} == expected
        with pytest.raises(BusyError, match=f"process {reading.pid} \\(sleep\\) by {held}"):
            mountpoint.unmount(str(where))
        for process in (inside, reading, mapping):
            process.kill()
            process.wait(PATIENCE_S)
        mountpoint.unmount(str(where))
        assert mountpoint.mount_on(str(where)) is None
        assert daemon.wait(PATIENCE_S) == 0
