"""POSIX calls through a real mount, in both zones: each works or fails with the right errno."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import select
import shutil
import socket
import stat
import struct
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
from support.mounts import Mount, mounted
from support.posix import (
    NAME_BYTES_MAX,
    PROCESS_TIMEOUT_S,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    RENAME_WHITEOUT,
    finish,
    pass_a_tick,
    refuses,
    renameat2,
    start,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.fuse

APPENDS = 1_000
FALLOC_PUNCH_HOLE_KEEP_SIZE = 3
CLOCK_TICK_NS = 10_000_000
OLD_NS = -34_559_999_999_999_993  # in 1968
GIB = 1 << 30
DEPTH = 1_100
DEPTH_THAT_TRAVELS = 490
ZONES = {"local": "plugins", "travelling": "workspace"}
number = itertools.count()


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mount]:
    root = tmp_path_factory.mktemp("posix")
    new = Mount(root / "store", root)
    new.run("init", new.store, "--state-dir", str(new.state))
    others = ("-o", "allow_other") if os.geteuid() == 0 else ()
    with mounted(new.store, root, *others) as mount:
        yield mount


@pytest.fixture(params=list(ZONES.values()), ids=list(ZONES))
def folder(mount: Mount, request: pytest.FixtureRequest) -> Path:
    """A new folder in each of the zones."""
    zone: str = request.param
    made = mount.path / zone / f"{next(number)}"
    made.mkdir(parents=True)
    return made


@pytest.fixture
def pair(mount: Mount) -> tuple[Path, Path]:
    """A new folder in the local zone and one that travels."""
    found = [mount.path / zone / f"{next(number)}" for zone in ZONES.values()]
    for path in found:
        path.mkdir(parents=True)
    return found[0], found[1]


# -- opening ------------------------------------------------------------------------------


def test_exclusive_create_refuses_what_is_there(folder: Path) -> None:
    os.close(os.open(folder / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    refuses(errno.EEXIST, lambda: os.open(folder / "f", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    (folder / "dangling").symlink_to("nowhere")
    refuses(
        errno.EEXIST, lambda: os.open(folder / "dangling", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    )


def test_one_of_many_exclusive_creators_wins(folder: Path) -> None:
    code = (
        "import os, sys; sys.stdin.readline()\n"
        "try: os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)\n"
        "except FileExistsError: print('late')\n"
        "else: print('first')"
    )
    racers = [start(code, folder / "lock") for _ in range(4)]
    for racer in racers:
        assert racer.stdin
        racer.stdin.write("go\n")
        racer.stdin.flush()
    assert sorted(finish(*racers)) == ["first\n", "late\n", "late\n", "late\n"]


def test_open_fails_as_on_any_disk(folder: Path) -> None:
    (folder / "f").touch()
    (folder / "link").symlink_to("f")
    refuses(errno.ENOENT, lambda: os.open(folder / "none", os.O_RDONLY))
    refuses(errno.ENOTDIR, lambda: os.open(folder / "f" / "x", os.O_RDONLY))
    refuses(errno.ENOTDIR, lambda: os.open(folder / "f", os.O_DIRECTORY))
    refuses(errno.EISDIR, lambda: os.open(folder, os.O_WRONLY))
    refuses(errno.ELOOP, lambda: os.open(folder / "link", os.O_NOFOLLOW))
    (folder / "loop").symlink_to("loop")
    refuses(errno.ELOOP, lambda: os.open(folder / "loop", os.O_RDONLY))


def test_truncating_open_empties_and_counts_as_a_change(folder: Path) -> None:
    file = folder / "f"
    for before in (b"content", b""):
        file.write_bytes(before)
        os.utime(file, ns=(1, 1))
        os.close(os.open(file, os.O_WRONLY | os.O_TRUNC))
        assert file.stat().st_size == 0
        assert file.stat().st_mtime_ns > 1


def test_regression_truncating_open_for_reading_empties_as_linux_does(folder: Path) -> None:
    file = folder / "f"
    file.write_bytes(b"content")
    fd = os.open(file, os.O_RDONLY | os.O_TRUNC)
    assert os.fstat(fd).st_size == 0
    os.close(fd)
    assert file.read_bytes() == b""


def test_appends_of_two_processes_interleave_whole(folder: Path) -> None:
    code = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
        "for i in range(int(sys.argv[3])): os.write(fd, f'{sys.argv[2]} {i}\\n'.encode())"
    )
    finish(*[start(code, folder / "log", who, APPENDS) for who in "ab"])
    lines = (folder / "log").read_text().splitlines()
    assert len(lines) == 2 * APPENDS
    for who in "ab":
        assert [x for x in lines if x[0] == who] == [f"{who} {i}" for i in range(APPENDS)]


def test_direct_io_reads_what_was_written(folder: Path) -> None:
    fd = os.open(folder / "f", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    with mmap.mmap(-1, 4096) as page:
        page[:] = b"d" * 4096
        assert os.pwrite(fd, page, 4096) == 4096
    os.close(fd)
    assert (folder / "f").read_bytes() == bytes(4096) + b"d" * 4096


# -- reading, writing, lengths ------------------------------------------------------------


def test_write_and_read_at_any_offset(folder: Path) -> None:
    with open(folder / "f", "w+b", buffering=0) as file:
        assert file.write(b"0123456789") == 10
        assert os.pwrite(file.fileno(), b"AB", 4) == 2
        assert os.pread(file.fileno(), 100, 3) == b"3AB6789"
        assert os.pread(file.fileno(), 100, 10) == b""
        assert os.pwrite(file.fileno(), b"far", 100_000) == 3
        assert os.pread(file.fileno(), 20, 99_990) == bytes(10) + b"far"
        assert os.writev(file.fileno(), [b"ab", b"cd"]) == 4
    with open(folder / "f", "rb") as reader:
        refuses(errno.EBADF, lambda: os.write(reader.fileno(), b"x"))


def test_what_one_process_writes_another_reads_at_once(folder: Path) -> None:
    (folder / "f").write_bytes(b"old")
    code = (
        "import sys; f = open(sys.argv[1], 'rb')\n"
        "for _ in sys.stdin: print(f.seek(0) or f.read(), flush=True)"
    )
    with open(folder / "f", "r+b", buffering=0) as file:
        reader = start(code, folder / "f")
        assert reader.stdin
        assert reader.stdout
        for step in range(20):
            file.seek(0)
            file.write(b"%06d" % step)
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{b'%06d' % step!r}\n"
        finish(reader)


def test_truncate_shrinks_and_grows_with_zeros(folder: Path) -> None:
    file = folder / "f"
    file.write_bytes(b"x" * 10_000)
    os.truncate(file, 5)
    assert file.read_bytes() == b"xxxxx"
    os.truncate(file, 9_000)
    assert file.read_bytes() == b"xxxxx" + bytes(8_995)
    refuses(errno.EISDIR, lambda: os.truncate(folder, 0))
    refuses(errno.EINVAL, lambda: os.truncate(file, -1))
    refuses(errno.EFBIG, lambda: os.truncate(file, 1 << 60))
    assert file.stat().st_size == 9_000


def test_space_can_be_reserved_by_the_library_only(folder: Path) -> None:
    with open(folder / "f", "w+b", buffering=0) as file:
        file.write(b"kept")
        os.posix_fallocate(file.fileno(), 0, 50_000)
        assert os.fstat(file.fileno()).st_size == 50_000
        assert file.seek(0) == 0
        assert file.read() == b"kept" + bytes(49_996)
        libc = ctypes.CDLL(None, use_errno=True)
        offsets = ctypes.c_longlong(0), ctypes.c_longlong(4_096)
        assert libc.fallocate(file.fileno(), FALLOC_PUNCH_HOLE_KEEP_SIZE, *offsets) == -1
        assert ctypes.get_errno() == errno.EOPNOTSUPP


def test_copy_file_range_and_sendfile_copy(folder: Path) -> None:
    data = os.urandom(300_000)
    (folder / "a").write_bytes(data)
    with open(folder / "a", "rb") as source, open(folder / "b", "wb") as target:
        done = 0
        while count := os.copy_file_range(source.fileno(), target.fileno(), 1 << 20):
            done += count
        assert done == len(data)
        assert os.sendfile(target.fileno(), source.fileno(), 0, 1_000) == 1_000
    assert (folder / "b").read_bytes() == data + data[:1_000]


def test_the_whole_file_counts_as_data_when_holes_are_sought(folder: Path) -> None:
    with open(folder / "f", "w+b") as file:
        fd = file.fileno()
        os.truncate(fd, 100_000)
        assert os.lseek(fd, 5, os.SEEK_DATA) == 5
        assert os.lseek(fd, 5, os.SEEK_HOLE) == 100_000
        refuses(errno.ENXIO, lambda: os.lseek(fd, 100_000, os.SEEK_DATA))
        assert os.lseek(fd, -10, os.SEEK_END) == 99_990
        refuses(errno.EINVAL, lambda: os.lseek(fd, -1, os.SEEK_SET))


def test_a_sparse_file_passes_four_gibibytes(pair: tuple[Path, Path]) -> None:
    with open(pair[0] / "f", "w+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"end", 5 * GIB)
        os.pwrite(file.fileno(), b"mid", 4 * GIB - 1)
        assert os.fstat(file.fileno()).st_size == 5 * GIB + 3
        assert os.pread(file.fileno(), 5, 4 * GIB - 2) == b"\0mid\0"
        assert os.pread(file.fileno(), 9, 5 * GIB) == b"end"


def test_shared_maps_of_two_processes_see_each_other_and_writes(folder: Path) -> None:
    (folder / "f").write_bytes(bytes(8_192))
    code = (
        "import mmap, sys\n"
        "f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 8192)\n"
        "for line in sys.stdin: print(m[5000], flush=True); m[5001] = int(line)"
    )
    with open(folder / "f", "r+b", buffering=0) as file:
        shared = mmap.mmap(file.fileno(), 8_192)
        other = start(code, folder / "f")
        assert other.stdin
        assert other.stdout
        for step in range(1, 20):
            if step % 2:
                shared[5_000] = step
            else:
                os.pwrite(file.fileno(), bytes([step]), 5_000)
            other.stdin.write(f"{step}\n")
            other.stdin.flush()
            assert other.stdout.readline() == f"{step}\n"
        finish(other)
        assert shared[5_001] == 19
        shared.flush()
        shared.close()
    assert (folder / "f").read_bytes()[5_000:5_002] == bytes([19, 19])


# -- names --------------------------------------------------------------------------------


def test_rename_replaces_and_refuses_as_the_manual_says(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    os.rename(folder / "a", folder / "b")
    assert sorted(os.listdir(folder)) == ["b"]
    assert (folder / "b").read_text() == "a"
    (folder / "empty").mkdir()
    (folder / "full" / "inner").mkdir(parents=True)
    refuses(errno.EISDIR, lambda: os.rename(folder / "b", folder / "empty"))
    refuses(errno.ENOTDIR, lambda: os.rename(folder / "empty", folder / "b"))
    refuses(errno.ENOTEMPTY, lambda: os.rename(folder / "empty", folder / "full"))
    refuses(errno.EINVAL, lambda: os.rename(folder / "full", folder / "full" / "inner" / "x"))
    refuses(errno.ENOENT, lambda: os.rename(folder / "none", folder / "x"))
    refuses(errno.EXDEV, lambda: os.rename(folder / "b", folder.parents[2] / "outside"))
    os.rename(folder / "full", folder / "empty")
    assert os.listdir(folder / "empty") == ["inner"]


def test_rename_between_two_names_of_one_file_does_nothing(folder: Path) -> None:
    (folder / "a").write_text("x")
    os.link(folder / "a", folder / "b")
    os.rename(folder / "a", folder / "b")
    assert sorted(os.listdir(folder)) == ["a", "b"]


def test_rename_can_refuse_to_replace(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")
    refuses(errno.EEXIST, lambda: renameat2(folder / "a", folder / "b", RENAME_NOREPLACE))
    assert (folder / "b").read_text() == "b"
    renameat2(folder / "a", folder / "c", RENAME_NOREPLACE)
    assert sorted(os.listdir(folder)) == ["b", "c"]
    refuses(errno.EINVAL, lambda: renameat2(folder / "b", folder / "c", RENAME_WHITEOUT))


@pytest.mark.parametrize("crossed", [False, True])
def test_rename_can_exchange(pair: tuple[Path, Path], crossed: bool) -> None:
    here, there = pair if crossed else (pair[1], pair[1])
    (here / "file").write_text("content")
    (there / "folder" / "inner").mkdir(parents=True)
    before = here.stat().st_nlink
    refuses(errno.ENOENT, lambda: renameat2(here / "file", there / "none", RENAME_EXCHANGE))
    renameat2(here / "file", there / "folder", RENAME_EXCHANGE)
    assert (there / "folder").read_text() == "content"
    assert os.listdir(here / "file") == ["inner"]
    assert here.stat().st_nlink == before + crossed


def test_renames_across_the_zones_keep_everything(pair: tuple[Path, Path]) -> None:
    data = os.urandom(100_000)
    local, travelling = pair
    (local / "t" / "deep").mkdir(parents=True)
    (local / "t" / "deep" / "f").write_bytes(data)
    os.utime(local / "t" / "deep" / "f", ns=(1, 1_234_567_891))
    number = (local / "t" / "deep" / "f").stat().st_ino
    for target in (travelling / "t", local / "t2", travelling / "t3"):
        source = next(p for p in (*local.iterdir(), *travelling.iterdir()) if p.name[0] == "t")
        source.rename(target)
        found = target / "deep" / "f"
        assert not source.exists()
        assert found.read_bytes() == data
        assert (found.stat().st_ino, found.stat().st_mtime_ns) == (number, 1_234_567_891)


def test_hard_links_name_one_file(pair: tuple[Path, Path]) -> None:
    local, travelling = pair
    for here, there in (pair, (travelling, local), (local, local)):
        (here / "a").write_text("one")
        os.link(here / "a", there / "b")
        with open(there / "b", "a", encoding="utf-8") as file:
            file.write(" more")
        assert (here / "a").read_text() == "one more"
        assert (here / "a").stat().st_nlink == 2
        assert (here / "a").stat().st_ino == (there / "b").stat().st_ino
        (here / "a").unlink()
        assert (there / "b").stat().st_nlink == 1
        assert (there / "b").read_text() == "one more"
        (there / "b").unlink()
    refuses(errno.EPERM, lambda: os.link(local, local / "self"))


def test_regression_a_write_through_a_local_hard_link_travels(
    mount: Mount, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    local, travelling = pair
    name = travelling.relative_to(mount.path)
    for called in ("kept", "gone"):
        (travelling / called).write_text("one")
        os.link(travelling / called, local / called)
    mount.run("sync", str(mount.path))
    mount.umount()
    mount.mount("-o", "allow_other" if os.geteuid() == 0 else "rw")  # nothing is in memory
    with open(local / "kept", "a", encoding="utf-8") as file:
        file.write(" two")
    assert (local / "gone").stat().st_nlink == 2
    (travelling / "gone").unlink()
    assert mount.status()["dirty"] == [str(name / "gone"), str(name / "kept")]
    mount.run("sync", str(mount.path))
    with mounted(mount.store, tmp_path) as second:
        assert os.listdir(second.path / name) == ["kept"]
        assert (second.path / name / "kept").read_text() == "one two"


def test_regression_an_unlinked_file_is_no_change_of_what_travels(
    mount: Mount, pair: tuple[Path, Path]
) -> None:
    with open(pair[1] / "f", "wb", buffering=0) as file:
        (pair[1] / "f").unlink()
        mount.run("sync", str(mount.path))
        file.write(b"more")
        os.fchmod(file.fileno(), 0o600)
        assert mount.status()["state"] == "clean"


def test_symlinks_keep_targets_of_any_length_and_bytes(folder: Path) -> None:
    for target in (b"x", b"../a/./b//c", b"\xff\xfe", b"s" * 4_095, b"/nowhere/at/all"):
        os.symlink(target, os.fsencode(folder / "link"))
        assert os.readlink(os.fsencode(folder / "link")) == target
        assert (folder / "link").lstat().st_size == len(target)
        assert stat.S_ISLNK((folder / "link").lstat().st_mode)
        (folder / "link").unlink()
    (folder / "f").write_text("through")
    (folder / "link").symlink_to("f")
    assert (folder / "link").read_text() == "through"
    refuses(errno.EINVAL, lambda: os.readlink(folder / "f"))


def test_folders_are_made_and_removed(folder: Path) -> None:
    before = folder.stat().st_nlink
    (folder / "d").mkdir(mode=0o750)
    assert stat.S_IMODE((folder / "d").stat().st_mode) == 0o750
    assert folder.stat().st_nlink == before + 1
    refuses(errno.EEXIST, lambda: os.mkdir(folder / "d"))
    (folder / "d" / "f").touch()
    refuses(errno.ENOTEMPTY, lambda: os.rmdir(folder / "d"))
    refuses(errno.ENOTDIR, lambda: os.rmdir(folder / "d" / "f"))
    refuses(errno.EISDIR, lambda: os.unlink(folder / "d"))
    (folder / "d" / "f").unlink()
    (folder / "d").rmdir()
    assert folder.stat().st_nlink == before
    refuses(errno.ENOENT, lambda: os.rmdir(folder / "d"))


def test_names_may_have_255_bytes_and_no_more(folder: Path) -> None:
    for name in ("n" * NAME_BYTES_MAX, "é" * 127 + "n", "😀" * 63):
        (folder / name).write_text(name)
        assert (folder / name).read_text() == name
        os.rename(folder / name, folder / name[::-1])
    (folder / "f").touch()
    for name in ("n" * 256, "é" * 128, "n" * 1_000):
        too_long = folder / name
        calls: tuple[Callable[[], object], ...] = (
            too_long.touch,
            too_long.mkdir,
            partial(os.symlink, "x", too_long),
            partial(os.link, folder / "f", too_long),
            partial(os.rename, folder / "f", too_long),
            partial(os.mkfifo, too_long),
            too_long.unlink,
            too_long.rmdir,
            too_long.stat,
        )
        for call in calls:
            refuses(errno.ENAMETOOLONG, call)


def test_any_bytes_name_a_file(folder: Path) -> None:
    names = [b"\xff\xfe", b"a\nb", b"\x01", b" ", b"-rf", b"e\xcc\x81", b"\xc3\xa9", b'"*?|<>:\\']
    for name in names:
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            file.write(name)
    assert sorted(os.listdir(os.fsencode(folder))) == sorted(names)
    for name in names:
        with open(os.path.join(os.fsencode(folder), name), "rb") as file:
            assert file.read() == name


def test_an_unlinked_file_is_written_on_through_its_handle(folder: Path) -> None:
    (folder / "d").mkdir()
    with open(folder / "d" / "f", "w+b", buffering=0) as file:
        file.write(b"before ")
        os.unlink(folder / "d" / "f")
        os.rmdir(folder / "d")
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write(b"after")
        os.fchmod(file.fileno(), 0o600)
        os.ftruncate(file.fileno(), 11)
        os.fsync(file.fileno())
        file.seek(0)
        assert file.read() == b"before afte"
    assert os.listdir(folder) == []


def test_regression_a_tree_of_any_depth_works_and_travels_as_far_as_names_go(
    mount: Mount, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = pair[1]
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    for level in range(DEPTH):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
        if level == DEPTH_THAT_TRAVELS - 1:
            os.close(os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    (folder / "x").mkdir()
    (folder / "x").rename(folder / "y")  # what travels is asked anew, from the root down
    file = os.open("deepest", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    assert os.write(file, b"x") == 1
    os.close(file)
    os.close(fd)
    mount.run("sync", str(mount.path))
    deep = folder.relative_to(mount.path) / ("d/" * DEPTH_THAT_TRAVELS) / "f"
    with mounted(mount.store, tmp_path) as second:
        assert (second.path / deep).exists()
        newest = max((second.path / ".hpkfs" / "history").iterdir())
        assert (newest / deep).exists()


def test_a_removed_folder_takes_no_new_names(folder: Path) -> None:
    (folder / "d").mkdir()
    fd = os.open(folder / "d", os.O_RDONLY | os.O_DIRECTORY)
    (folder / "d").rmdir()
    assert os.listdir(fd) == []
    refuses(errno.ENOENT, lambda: os.open("f", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    refuses(errno.ENOENT, lambda: os.mkdir("f", dir_fd=fd))
    os.close(fd)


def test_fifos_carry_bytes_between_processes(folder: Path) -> None:
    os.mkfifo(folder / "fifo", 0o640)
    assert stat.S_ISFIFO((folder / "fifo").stat().st_mode)
    writer = start("import sys; open(sys.argv[1], 'w').write('through')", folder / "fifo")
    assert (folder / "fifo").read_text() == "through"
    finish(writer)
    (folder / "fifo").unlink()


def test_unix_sockets_are_bound_and_connected(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    address = f"/proc/self/fd/{fd}/s"  # a path of at most 107 bytes
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(address)
        server.listen()
        assert stat.S_ISSOCK((folder / "s").stat().st_mode)
        client.connect(address)
        with server.accept()[0] as accepted:
            accepted.sendall(b"hello")
            assert client.recv(10) == b"hello"
    with socket.socket(socket.AF_UNIX) as client:
        refuses(errno.ECONNREFUSED, lambda: client.connect(address))
        (folder / "s").unlink()
        refuses(errno.ENOENT, lambda: client.connect(address))
    os.close(fd)


# -- attributes ---------------------------------------------------------------------------


def test_modes_are_kept(folder: Path) -> None:
    (folder / "f").touch()
    for mode in (0o000, 0o400, 0o644, 0o755, 0o2755, 0o4711, 0o1777, 0o777):
        os.chmod(folder / "f", mode)
        assert stat.S_IMODE((folder / "f").stat().st_mode) == mode
    old = os.umask(0o027)
    try:
        (folder / "masked").touch(mode=0o777)
    finally:
        os.umask(old)
    assert stat.S_IMODE((folder / "masked").stat().st_mode) == 0o750


def test_times_are_kept_to_the_nanosecond(folder: Path) -> None:
    (folder / "f").write_text("x")
    (folder / "link").symlink_to("f")
    for path in (folder / "f", folder, folder / "link"):
        for times in ((1, 1_700_000_000_123_456_789), (5, OLD_NS), (0, 0)):
            before = time.time_ns()
            os.utime(path, ns=times, follow_symlinks=False)
            found = path.lstat()
            assert (found.st_atime_ns, found.st_mtime_ns) == times
            assert found.st_ctime_ns > before - CLOCK_TICK_NS
    os.utime(folder / "f")
    assert time.time_ns() - (folder / "f").stat().st_mtime_ns < 60e9


def test_regression_times_beyond_the_journals_numbers_are_cut_to_them(folder: Path) -> None:
    (folder / "f").touch()
    os.utime(folder / "f", (0, 16_725_225_600))  # the year 2500
    assert (folder / "f").stat().st_mtime_ns == (1 << 63) - 1


def test_changes_move_the_times_they_should(folder: Path) -> None:
    (folder / "f").write_text("x")
    (folder / "d").mkdir()

    def times(path: Path) -> tuple[int, int]:
        found = path.stat()
        return found.st_mtime_ns, found.st_ctime_ns

    def changed(path: Path, call: Callable[[], object]) -> tuple[bool, bool]:
        os.utime(path, ns=(1, 1))
        before = times(path)
        pass_a_tick()
        call()
        after = times(path)
        return after[0] > before[0], after[1] > before[1]

    with open(folder / "f", "r+b", buffering=0) as file:
        assert changed(folder / "f", lambda: file.write(b"y")) == (True, True)
        assert changed(folder / "f", lambda: file.truncate(9)) == (True, True)
    assert changed(folder / "f", lambda: os.chmod(folder / "f", 0o600)) == (False, True)
    assert changed(folder / "f", lambda: os.link(folder / "f", folder / "l")) == (False, True)
    assert changed(folder / "f", lambda: os.unlink(folder / "l")) == (False, True)
    assert changed(folder / "f", lambda: (folder / "f").read_bytes()) == (False, False)
    for call in (
        lambda: (folder / "d" / "new").touch(),
        lambda: os.rename(folder / "d" / "new", folder / "d" / "newer"),
        lambda: os.unlink(folder / "d" / "newer"),
        lambda: os.mkdir(folder / "d" / "inner"),
        lambda: os.rmdir(folder / "d" / "inner"),
    ):
        assert changed(folder / "d", call) == (True, True)


def test_regression_what_changes_later_is_never_older(folder: Path) -> None:
    kinds: list[Callable[[Path], object]] = [
        lambda path: path.write_text("content"),
        lambda path: path.touch(exist_ok=False),
        lambda path: os.utime(made_before(path)),
        lambda path: os.truncate(made_before(path), 3),
        lambda path: path.mkdir(),
    ]

    def made_before(path: Path) -> Path:
        path.touch()
        path.stat()  # a kernel that stamps more finely does so after it was asked
        return path

    newest = 0
    for step, change in enumerate(kinds * 60):
        change(folder / f"{step}")
        found = (folder / f"{step}").stat()
        assert found.st_mtime_ns >= newest, f"step {step}"
        assert found.st_ctime_ns >= newest
        newest = found.st_mtime_ns


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_owners_change_and_lose_setuid_as_posix_says(folder: Path) -> None:
    file = folder / "f"
    file.touch()
    file.chmod(0o6755)
    os.chown(file, 12, 34)
    found = file.stat()
    assert (found.st_uid, found.st_gid) == (12, 34)
    assert not found.st_mode & stat.S_ISUID
    os.chown(file, -1, 35)
    assert (file.stat().st_uid, file.stat().st_gid) == (12, 35)
    (folder / "link").symlink_to("f")
    os.lchown(folder / "link", 7, 8)
    assert ((folder / "link").lstat().st_uid, file.stat().st_uid) == (7, 12)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_new_names_take_the_group_of_a_setgid_folder(folder: Path) -> None:
    shared = folder / "shared"
    shared.mkdir()
    os.chown(shared, 0, 34)
    shared.chmod(0o2775)
    (shared / "f").touch()
    (shared / "d").mkdir()
    os.mkfifo(shared / "fifo")
    (shared / "link").symlink_to("f")
    assert {p.lstat().st_gid for p in shared.iterdir()} == {34}
    assert (shared / "d").stat().st_mode & stat.S_ISGID
    assert not (shared / "f").stat().st_mode & stat.S_ISGID


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_another_users_rights_are_checked_by_the_kernel(folder: Path) -> None:
    (folder / "secret").write_text("x")
    (folder / "secret").chmod(0o600)
    (folder / "open").write_text("x")
    (folder / "setuid").write_text("x")
    (folder / "setuid").chmod(0o6777)
    code = (
        "import os, sys; os.chdir(sys.argv[1]); os.setgid(65534); os.setuid(65534)\n"
        "open('setuid', 'a').write('y')\n"
        "for call in (lambda: open('secret'), lambda: open('open', 'a'), lambda: os.mkdir('d'),"
        " lambda: os.unlink('open'), lambda: os.chmod('open', 0o777)):\n"
        "    try: call()\n"
        "    except PermissionError as error: print(error.errno)\n"
        "    else: print('done')"
    )
    parts = list(folder.parents)[: len(folder.relative_to("/").parts) - 1]
    modes = {part: stat.S_IMODE(part.stat().st_mode) for part in parts}
    try:
        for part in parts:
            part.chmod(modes[part] | 0o011)
        (printed,) = finish(start(code, folder))
    finally:
        for part, mode in modes.items():
            part.chmod(mode)
    assert printed.split() == ["13", "13", "13", "13", "1"]
    assert stat.S_IMODE((folder / "setuid").stat().st_mode) == 0o777


def test_free_space_is_that_of_the_disk_below(mount: Mount, folder: Path) -> None:
    for path in (folder, mount.path):
        found, below = os.statvfs(path), os.statvfs(mount.state)
        assert found.f_blocks * found.f_frsize == below.f_blocks * below.f_frsize
        assert found.f_bavail > 0
        assert found.f_namemax == NAME_BYTES_MAX
    assert shutil.disk_usage(folder).free > 0


# -- durability calls and locks -----------------------------------------------------------


def test_files_and_folders_can_be_synced(folder: Path) -> None:
    with open(folder / "f", "wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        os.fdatasync(file.fileno())
    for path in (folder, folder / "f"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.fdatasync(fd)
        os.close(fd)


LOCKERS = {
    "flock": "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "posix": "fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, 5)",
}


@pytest.mark.parametrize("kind", LOCKERS)
def test_locks_hold_between_processes(folder: Path, kind: str) -> None:
    (folder / "f").touch()
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b')\n"
        f"try: {LOCKERS[kind]}\n"
        "except BlockingIOError: print('busy')\n"
        "else: print('locked')"
    )
    with open(folder / "f", "r+b") as file:
        if kind == "flock":
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            fcntl.lockf(file, fcntl.LOCK_EX, 3, 10)
        assert finish(start(code, folder / "f")) == ["busy\n"]
        fcntl.flock(file, fcntl.LOCK_UN)
        fcntl.lockf(file, fcntl.LOCK_UN)
        assert finish(start(code, folder / "f")) == ["locked\n"]


def test_locks_go_with_the_process_that_held_them(folder: Path) -> None:
    (folder / "f").touch()
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'r+b')\n"
        "fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print('locked', flush=True); sys.stdin.read()"
    )
    holder = start(code, folder / "f")
    assert holder.stdout
    assert holder.stdout.readline() == "locked\n"
    holder.kill()
    holder.communicate(timeout=PROCESS_TIMEOUT_S)
    with open(folder / "f", "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_open_file_description_locks_hold_between_descriptors(folder: Path) -> None:
    (folder / "f").touch()
    whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    set_lock = 37  # F_OFD_SETLK, fcntl(2); Python has no name for it
    with open(folder / "f", "r+b") as one, open(folder / "f", "r+b") as other:
        fcntl.fcntl(one, set_lock, whole)
        refuses(errno.EAGAIN, lambda: fcntl.fcntl(other, set_lock, whole))


def test_local_changes_raise_inotify_events(folder: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(fd, os.fsencode(folder), 0x100) > 0  # IN_CREATE
    (folder / "seen").touch()
    assert select.select([fd], [], [], PROCESS_TIMEOUT_S)[0]
    assert b"seen" in os.read(fd, 4_096)
    os.close(fd)


# -- what is not offered ------------------------------------------------------------------


def test_calls_that_are_not_offered_say_so(folder: Path) -> None:
    (folder / "a").write_text("x")
    refuses(errno.EOPNOTSUPP, lambda: os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))
    with open(folder / "a", "rb") as a, open(folder / "b", "wb") as b:
        ficlone = 0x40049409  # ioctl_ficlone(2)
        refuses(errno.EOPNOTSUPP, lambda: fcntl.ioctl(b, ficlone, a.fileno()))
        fs_ioc_getflags = 0x80086601  # ioctl_iflags(2)
        refuses(errno.ENOTTY, lambda: fcntl.ioctl(a, fs_ioc_getflags, bytes(8)))
