"""One message more in a conversation of 211 MB: what a seal adds, and how long it takes."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from bench.lib import NEVER_SEAL, Table, call, cleaned, clock, work_folder
from support.big_store import big_store, copy_store
from support.databases import add_message, open_database
from support.mounts import Mount

from hpkfs.core.limits import PIECE_SIZE

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 5


def main() -> None:
    table = Table("A seal after one message more (211 MB)")
    with work_folder() as root:
        mount = Mount(copy_store(big_store(), root / "store"), root)
        with cleaned(mount):
            mount.mount("--lazy", NEVER_SEAL)
            # With --lazy only the profile and the database come by themselves.
            (mount.path / "state.db").read_bytes()
            mount.umount()
            # Offline, so that nothing but the seal is timed.
            mount.mount("--offline", NEVER_SEAL)
            measure(table, mount, root)
    table.show()


def measure(table: Table, mount: Mount, root: Path) -> None:
    ours, reference, ratios = [], [], []
    for number in range(ROUNDS + 1):
        before = (mount.path / "state.db").read_bytes()
        say(mount, number)
        after = (mount.path / "state.db").read_bytes()
        spent = clock(lambda: mount.run("sync", str(mount.path), check=2))
        beside = clock(lambda: back_up(mount, root / "backup.db"))
        if number == 0:
            continue  # the first seal on a machine compares with the store's database
        changed = changed_chunks(before, after)
        new = new_objects(mount)
        table.note(f"{changed} chunks changed, {new} objects new")
        ours.append(spent)
        reference.append(beside)
        ratios.append(new / changed)
    table.value(
        "new objects against chunks that changed", must=1.3, got=max(ratios), unit="x",
        detail="the worst round",
    )  # fmt: skip
    table.ratio("time against `.backup` and `sha256sum`", must=2.5, ours=ours, other=reference)


def say(mount: Mount, number: int) -> None:
    with closing(open_database(mount.path / "state.db")) as db:
        (session,) = db.execute("SELECT id FROM sessions ORDER BY id DESC LIMIT 1").fetchone()
        db.execute("BEGIN IMMEDIATE")
        add_message(db, session, f"This is what I say in round {number}: the harbour is calm.")
        db.execute("COMMIT")


def back_up(mount: Mount, target: Path) -> None:
    target.unlink(missing_ok=True)
    call("sqlite3", str(mount.path / "state.db"), f".backup {target}")
    call("sha256sum", str(target))


def changed_chunks(before: bytes, after: bytes) -> int:
    count = max(len(before), len(after))
    return sum(
        before[start : start + PIECE_SIZE] != after[start : start + PIECE_SIZE]
        for start in range(0, count, PIECE_SIZE)
    )


def new_objects(mount: Mount) -> int:
    """Objects of the newest checkpoint, which nothing has sent away."""
    pending = mount.state / "hpkfs" / "pending"
    with closing(
        sqlite3.connect(f"file:{mount.state}/hpkfs/journal.sqlite3?mode=ro", uri=True)
    ) as db:
        (newest,) = db.execute("SELECT value FROM meta WHERE key='base'").fetchone()
    assert json.loads((pending / newest / "snapshot.json").read_bytes())["snapshotId"] == newest
    return len(list((pending / newest / "objects").iterdir()))


if __name__ == "__main__":
    main()
