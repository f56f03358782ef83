"""File operations on the mount, against bindfs on the same disk, and against that disk itself."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import statistics
import time
from contextlib import closing
from functools import partial
from operator import truediv
from typing import TYPE_CHECKING

from bench.lib import (
    NEVER_SEAL,
    Table,
    bindfs,
    cleaned,
    drop_names,
    pin,
    rounds,
    work_folder,
)
from support.big_store import copy_store, small_store
from support.mounts import Mount

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    # Returns its seconds when only a part of it counts.
    Operation = Callable[[Path], float | None]

ROUNDS = 31
FOLDERS = 10
FILES_PER_FOLDER = 60
FILE_BYTES = 2_000
WARM_PASSES = 2
MADE = 100
PWRITES = 500
PAGE = b"x" * 4_096
COMMITS = 100
HOT_FILES = 150


def main() -> None:
    table = Table("File operations, everything on one core")
    pin()
    with work_folder() as root, contextlib.ExitStack() as stack:
        mount = Mount(copy_store(small_store(), root / "store"), root)
        stack.enter_context(cleaned(mount))
        mount.mount(NEVER_SEAL)
        native = root / "native"
        native.mkdir()
        (root / "behind").mkdir()
        through = stack.enter_context(bindfs(root / "behind", root / "bindfs"))
        places = {"ours": mount.path / "workspace" / "bench", "bindfs": through / "bench"}
        places["native"] = native / "bench"
        for place in places.values():
            fill(place)
        compare(table, places)
    table.show()


def compare(table: Table, places: dict[str, Path]) -> None:
    cold = drop_names()
    if not cold:
        table.note("Not root: the kernel's names cannot be dropped, so nothing is measured cold.")
    operations: dict[str, tuple[Operation, bool, float]] = {
        "stat, cold": (stat_all, True, 1.5),
        "open+read+close, cold": (read_all, True, 2.0),
        "open+read+close, warm": (read_some, False, 2.0),
        "create+write+rename": (make_some, False, 2.0),
        "pwrite of 4 KiB": (write_pages, False, 1.5),
        "SQLite commit, WAL NORMAL": (commit_normal, False, 1.5),
        "SQLite commit, WAL FULL": (commit_full, False, 1.5),
    }
    for name, (operation, is_cold, must) in operations.items():
        if is_cold and not cold:
            continue
        times = side_by_side(places, operation, is_cold=is_cold)
        table.ratio(f"{name}, against bindfs", must=must, ours=times["ours"], other=times["bindfs"])
        ratio = statistics.median(map(truediv, times["ours"], times["native"]))
        table.note(f"{name}: {ratio:.1f} x native")
    both = {name: places[name] for name in ("ours", "native")}
    warm: dict[str, Operation] = {"stat, warm": stat_all, "missing name, warm": stat_missing}
    for name, operation in warm.items():
        times = side_by_side(both, partial(repeat, operation), is_cold=False)
        table.ratio(f"{name}, against native", must=1.5, ours=times["ours"], other=times["native"])


def side_by_side(
    places: dict[str, Path], operation: Operation, *, is_cold: bool
) -> dict[str, list[float]]:
    """Seconds in each place, by round; warm ones are warmed first."""

    def once(place: Path) -> float:
        if is_cold:
            drop_names()
        started = time.perf_counter()
        told = operation(place)
        return time.perf_counter() - started if told is None else told

    if not is_cold:
        for place in places.values():
            operation(place)
    return rounds(ROUNDS, {name: partial(once, place) for name, place in places.items()})


def fill(place: Path) -> None:
    place.mkdir()
    for folder in range(FOLDERS):
        (place / str(folder)).mkdir()
        for name in range(FILES_PER_FOLDER):
            (place / str(folder) / str(name)).write_bytes(b"y" * FILE_BYTES)


def paths(place: Path) -> list[str]:
    return [f"{place}/{d}/{f}" for d in range(FOLDERS) for f in range(FILES_PER_FOLDER)]


def repeat(operation: Operation, place: Path) -> None:
    for _ in range(WARM_PASSES):
        operation(place)


def stat_all(place: Path) -> None:
    for path in paths(place):
        os.stat(path)


def stat_missing(place: Path) -> None:
    for path in paths(place):
        os.path.exists(path + ".none")


def read_all(place: Path) -> None:
    for path in paths(place):
        read_one(path)


def read_some(place: Path) -> None:
    chosen = paths(place)[:HOT_FILES]
    for _ in range(WARM_PASSES):
        for path in chosen:
            read_one(path)


def read_one(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, FILE_BYTES)
    os.close(fd)


def make_some(place: Path) -> None:
    for number in range(MADE):
        name = f"{place}/made-{number % 50}"
        fd = os.open(name + ".tmp", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, PAGE)
        os.close(fd)
        os.rename(name + ".tmp", name)


def write_pages(place: Path) -> None:
    fd = os.open(f"{place}/pages", os.O_RDWR | os.O_CREAT, 0o644)
    for number in range(PWRITES):
        os.pwrite(fd, PAGE, (number % 512) * len(PAGE))
    os.close(fd)


def commit_normal(place: Path) -> float:
    return commit(place, "NORMAL")


def commit_full(place: Path) -> float:
    return commit(place, "FULL")


def commit(place: Path, synchronous: str) -> float:
    """Only the commits count, not opening and closing."""
    with closing(sqlite3.connect(f"{place}/db-{synchronous}", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute(f"PRAGMA synchronous={synchronous}")
        db.execute("CREATE TABLE IF NOT EXISTS t(id INTEGER PRIMARY KEY, text TEXT)")
        started = time.perf_counter()
        for _ in range(COMMITS):
            db.execute("INSERT INTO t(text) VALUES(?)", ("some text " * 20,))
        return time.perf_counter() - started


if __name__ == "__main__":
    main()
