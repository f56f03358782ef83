"""The chain of checkpoints, newest first: from the journal where known, else from the store.

A new machine knows only the head; the rest is walked by parents and remembered. Called for
`.hpkfs/history`, `hpkfs history` and `restore`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpkfs.core.documents import Reference, Snapshot, parse_snapshot
from hpkfs.core.ids import timestamp_ns
from hpkfs.errors import HpkfsError, UsageError
from hpkfs.refresher import Loaded, checkpoint_row, load, load_documents

if TYPE_CHECKING:
    from hpkfs.journal import Checkpoint, Journal
    from hpkfs.objects import ObjectStore

log = logging.getLogger(__name__)

SHORT_ID_MIN = 6


@dataclass(slots=True)
class Chain:
    """Checkpoints by parents, newest first; `unread` says whether older ones are not known."""

    rows: list[Checkpoint]
    complete: bool


class History:
    """The chain of one agent. Without a journal it is only remembered while it is open."""

    def __init__(self, objects: ObjectStore, journal: Journal | None) -> None:
        self._objects = objects
        self._journal = journal
        self._memory: dict[str, Checkpoint] = {}

    def _known(self) -> dict[str, Checkpoint]:
        if self._journal is None:
            return self._memory
        return {row.snapshot_id: row for row in self._journal.checkpoints()}

    def _remember(self, snapshot: Snapshot, digest: str) -> Checkpoint:
        row = checkpoint_row(snapshot, digest, snapshot.parent, "published")
        if self._journal is None:
            self._memory[snapshot.snapshot_id] = row
        else:
            self._journal.add_checkpoint(row, None)
        return row

    async def chain(self, newest: Reference, *, limit: int | None = None) -> Chain:
        """Follow the parents from `newest`.

        A checkpoint that cannot be read ends the list; it is tried again at the next call.

        Raises:
            HpkfsError: the newest one cannot be read.
        """
        known = self._known()
        rows: list[Checkpoint] = []
        seen: set[str] = set()
        reference: Reference | None = newest
        while reference is not None and reference.snapshot_id not in seen:
            if limit is not None and len(rows) >= limit:
                return Chain(rows, complete=False)
            seen.add(reference.snapshot_id)
            row = known.get(reference.snapshot_id)
            if row is None:
                try:
                    snapshot, _ = await self._objects.get_snapshot(reference, owner_id=None)
                except HpkfsError as error:
                    if not rows:
                        raise
                    log.info("history ends before %s: %s", reference.snapshot_id, error)
                    return Chain(rows, complete=False)
                row = self._remember(snapshot, reference.sha256)
            rows.append(row)
            reference = row.parent
        return Chain(rows, complete=True)

    async def load(self, row: Checkpoint) -> Loaded:
        """A checkpoint with its small documents."""
        document = self._journal.document(row.snapshot_id) if self._journal else None
        if document is not None:
            return await load_documents(self._objects, parse_snapshot(document), document)
        return await load(self._objects, row.reference, owner_id=None)

    async def find(self, newest: Reference, wanted: str, *, before_ns: int | None) -> Checkpoint:
        """The checkpoint that a person names by id, by the start of an id, or by time.

        Args:
            newest: where the chain starts.
            wanted: the id or its first digits, for messages also when `before_ns` is given.
            before_ns: the newest checkpoint made at or before this time is meant.

        Raises:
            UsageError: none or several fit.
        """
        chain = await self.chain(newest)
        if before_ns is not None:
            fitting = [r for r in chain.rows if timestamp_ns(r.created_at) <= before_ns][:1]
        else:
            fitting = [row for row in chain.rows if row.snapshot_id.startswith(wanted)]
            if len(wanted) < SHORT_ID_MIN:
                fitting = []
        if len(fitting) != 1:
            how = "Several checkpoints fit" if fitting else "No checkpoint fits"
            raise UsageError(
                f"{how} {wanted!r}.",
                kept="Nothing was changed.",
                next_step="`hpkfs history` lists them; name at least six digits of the id.",
            )
        return fitting[0]


def listed(chain: Chain) -> dict[str, object]:
    """A chain as `history --json` shows it, with a daemon and without."""
    rows = [
        {
            "snapshot_id": row.snapshot_id,
            "created_at": row.created_at,
            "device_id": row.device_id,
            "parent": row.parent_id,
            "files": row.files,
            "bytes": row.bytes,
            "state": row.state,
        }
        for row in chain.rows
    ]
    return {"checkpoints": rows, "unread": 0 if chain.complete else None}


def entry_name(row: Checkpoint) -> str:
    """The name of a checkpoint's folder: its time, so that a listing is sorted, and its id."""
    return f"{row.created_at.replace(':', '-')}-{row.snapshot_id}"
