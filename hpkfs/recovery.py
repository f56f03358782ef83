"""What a start does after any end: clean, killed, or a power cut.

Called once by `agent.py`, before anything else touches the state directory. No content is
scanned: the journal names every inode that needs attention.

    died here                         on disk                      done here
    after a create's backing file     a file that no inode names   replaced when its number comes
    between unlink and last close     an inode without a name      inode dropped, file deleted
    after dropping an inode           a row in `dropped`           journal synced, file deleted
    while emptying a file             a row `emptied:<ino>`        file emptied, row deleted
    during a seal                     `pending/.new`               deleted; everything still dirty
    after the rename, before the row  a pending folder, no row     deleted; everything still dirty
    power cut                         another boot id              clean chunks verified when read
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import TYPE_CHECKING

from hpkfs.errors import JournalError, QuotaError
from hpkfs.inodes import HYDRATED, UNVERIFIED

if TYPE_CHECKING:
    from hpkfs.content import Content
    from hpkfs.journal import Journal

log = logging.getLogger(__name__)

BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
META_BOOT = "boot_id"
META_RUNNING = "running"


def recover(journal: Journal, content: Content, *, pending_folder: str) -> bool:
    """Bring the state directory back to one consistent state.

    Returns:
        Whether the last daemon ended without closing the journal.
    """
    unclean = journal.get_meta(META_RUNNING) is not None
    boot_id = _boot_id()
    if unclean and journal.get_meta(META_BOOT) != boot_id:
        _distrust(journal)
    for key in journal.meta_keys("emptied:"):
        ino = int(key.partition(":")[2])
        try:
            os.truncate(content.path(ino), 0)
        except FileNotFoundError:
            log.debug("inode %d had no backing file to empty", ino)
        journal.set_meta(key, None)
    for ino in journal.orphans():
        journal.drop_inode(ino)
    remove_dropped(journal, content)
    _remove_unfinished(journal, pending_folder)
    with journal.transaction():
        journal.set_meta(META_RUNNING, str(os.getpid()))
        journal.set_meta(META_BOOT, boot_id)
    return unclean


def remove_dropped(journal: Journal, content: Content) -> None:
    """Delete backing files whose inodes are gone, after the journal is durable. Blocking."""
    dropped = journal.dropped()
    if not dropped:
        return
    journal.sync()
    for ino in dropped:
        content.remove(ino)
    journal.forget_dropped(dropped)


def close(journal: Journal) -> None:
    """Note that this end is clean, and close the journal."""
    try:
        journal.set_meta(META_RUNNING, None)
    except (JournalError, QuotaError) as error:
        log.info("the next start takes this end for a kill, which costs nothing: %s", error)
    finally:
        journal.close()


def _distrust(journal: Journal) -> None:
    """After a power cut a clean chunk may not be what the journal says: verify it when read."""
    table = bytes.maketrans(bytes([HYDRATED]), bytes([UNVERIFIED]))
    changed = [
        (bytes(states).translate(table), ino)
        for ino, states in journal.with_states()
        if HYDRATED in bytes(states)
    ]
    journal.set_states(changed)
    if changed:
        log.info("the machine went down unclean: %d files are verified when read", len(changed))


def _remove_unfinished(journal: Journal, pending_folder: str) -> None:
    known = {row.snapshot_id for row in journal.checkpoints(state="pending")}
    for name in os.listdir(pending_folder):
        if name not in known:
            shutil.rmtree(os.path.join(pending_folder, name), ignore_errors=True)


def _boot_id() -> str:
    try:
        with open(BOOT_ID_FILE, encoding="ascii") as source:
            return source.read().strip()
    except OSError:
        return "unknown"
