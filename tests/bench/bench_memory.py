"""Resident memory of the daemon with a large agent, and with 200,000 local files besides."""

from __future__ import annotations

import os
import stat
import time
from contextlib import closing
from typing import TYPE_CHECKING

from bench.lib import NEVER_SEAL, Table, cleaned, clock, memory_mib, wait_hydrated, work_folder
from support.big_store import big_store, copy_store
from support.databases import add_message, open_database
from support.mounts import Mount

from hpkfs.durable import RealDisk
from hpkfs.inodes import ROOT_INO, Inode
from hpkfs.journal import Journal

if TYPE_CHECKING:
    from pathlib import Path

LOCAL_FILES = 200_000
FILES_PER_FOLDER = 1_000


def main() -> None:
    table = Table("Memory of the daemon")
    with work_folder() as root:
        mount = Mount(copy_store(big_store(), root / "store"), root)
        with cleaned(mount):
            mount.mount(NEVER_SEAL)
            wait_hydrated(mount)
            look_at_all(mount.path)
            with (mount.path / "SOUL.md").open("a") as file:
                file.write("Be kind.\n")
            mount.run("sync", str(mount.path))
            now, peak = memory_mib(mount.pid())
            table.value(
                "with 1,800 files and 211 MB, fetched and looked at",
                must=80,
                got=now,
                unit="MiB",
                detail=f"{peak:.0f} MiB at the highest",
            )
            with closing(open_database(mount.path / "state.db")) as db:
                (session,) = db.execute("SELECT id FROM sessions LIMIT 1").fetchone()
                add_message(db, session, "The harbour is calm.")
            mount.run("sync", str(mount.path))
            now, peak = memory_mib(mount.pid())
            table.value(
                "the same, its conversation sealed",
                must=80,
                got=now,
                unit="MiB",
                detail=f"{peak:.0f} MiB at the highest",
            )
            mount.umount()
            add_local_files(mount)
            spent = clock(lambda: mount.mount(NEVER_SEAL))
            table.value("mounting with 200,000 local files", must=2.0, got=spent, unit="s")
            before, _ = memory_mib(mount.pid())
            started = time.perf_counter()
            seen = look_at_all(mount.path)
            table.note(
                f"`find` and `stat` of {seen:,} names: {time.perf_counter() - started:.1f} s"
            )
            now, peak = memory_mib(mount.pid())
            table.value(
                "with 200,000 local files, all looked at",
                must=150,
                got=now,
                unit="MiB",
                detail=f"{before:.0f} MiB before, {peak:.0f} at the highest",
            )
            with (mount.path / "SOUL.md").open("a") as file:
                file.write("Be brief.\n")
            spent = clock(lambda: mount.run("sync", str(mount.path)))
            table.note(f"`sync` of one small change with them: {spent:.2f} s")
    table.show()


def look_at_all(path: Path) -> int:
    """Ask for the attributes of everything, as `ls -lR` does."""
    seen = 0
    for folder, _, names in os.walk(path):
        for name in names:
            os.lstat(f"{folder}/{name}")
            seen += 1
    return seen


def add_local_files(mount: Mount) -> None:
    """Add empty files that stay on this machine, as the daemon would, while it does not run."""
    folder = mount.state / "hpkfs"
    journal = Journal(str(folder / "journal.sqlite3"), disk=RealDisk())
    top = journal.new_ino()
    inodes = [_inode(top, ROOT_INO, b"cache", stat.S_IFDIR | 0o755)]
    dentries = [(ROOT_INO, b"cache", top)]
    for number in range(LOCAL_FILES // FILES_PER_FOLDER):
        parent = journal.new_ino()
        inodes.append(_inode(parent, top, b"%d" % number, stat.S_IFDIR | 0o755))
        dentries.append((top, b"%d" % number, parent))
        for name in (b"file-%d.txt" % index for index in range(FILES_PER_FOLDER)):
            ino = journal.new_ino()
            inodes.append(_inode(ino, parent, name, stat.S_IFREG | 0o644))
            dentries.append((parent, name, ino))
            (folder / "backing" / str(ino)).touch()
    journal.bulk_insert(inodes, dentries)
    journal.close()


def _inode(ino: int, parent: int, name: bytes, mode: int) -> Inode:
    now = time.time_ns()
    links = 2 if stat.S_ISDIR(mode) else 1
    times = (now, now, now)
    owner = (os.getuid(), os.getgid())
    return Inode(
        (ino, mode, *owner, 0, links, 0, *times, None, None, None, 1, parent, name, None, None)
    )


if __name__ == "__main__":
    main()
