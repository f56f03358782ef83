"""The files of a new snapshot: what is carried from the base, what was captured, what does not fit.

Called by `sealer.py` after the capture. It decides, and stages the sidecar and the start profile;
every limit of the format is kept here, by name and before anything is sealed.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

from hpkfs.core import attributes as sidecar
from hpkfs.core.canonical import encode
from hpkfs.core.documents import FileRecord, record_to_json
from hpkfs.core.limits import MAX_FILES, MAX_SNAPSHOT, MAX_TOTAL
from hpkfs.core.paths import DATABASE, PORTABLE, SIDECAR, START
from hpkfs.core.start import encode_start
from hpkfs.refresher import META_START, default_mode, visible_files

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpkfs.capture import Capture
    from hpkfs.sealer import Sealer
    from hpkfs.survey import Found

SNAPSHOT_HEADROOM_BYTES = 2_048


class Assembly:
    """Puts one snapshot's files together."""

    def __init__(self, sealer: Sealer, capture: Capture) -> None:
        self._sealer = sealer
        self._capture = capture
        self._journal = sealer.volume.journal

    def assemble(self) -> tuple[dict[str, FileRecord], sidecar.Attributes]:
        """The files of the new snapshot, its sidecar among them."""
        files = self._carried()
        total = sum(record.size for record in files.values())
        length = self._length(files)
        for logical, entry in sorted(
            self._capture.survey.files.items(), key=lambda item: (item[0] not in files, item[0])
        ):
            record = self._record_of(entry)
            if record is None:
                continue
            old = files.get(logical)
            grows = _json_length(logical, record) - (_json_length(logical, old) if old else 0)
            more = record.size - (old.size if old else 0)
            if old is None and len(files) >= MAX_FILES - 1:
                self._overflow(entry, f"there are more than {MAX_FILES} files")
            elif total + more > MAX_TOTAL:
                self._overflow(entry, "all files together exceed what a checkpoint holds")
            elif length + grows > MAX_SNAPSHOT - SNAPSHOT_HEADROOM_BYTES:
                self._overflow(entry, "the list of files is full")
            else:
                files[logical] = record
                total += more
                length += grows
        if PORTABLE in self._capture.new:
            files[PORTABLE] = self._capture.new[PORTABLE]
        attributes = self._attributes(files)
        if attributes != self._capture.attributes:
            self._store_attributes(files, attributes)
        if self._capture.base is None or files != self._capture.base.files:
            self._store_start(files)
        self._capture.files = files
        return files, attributes

    def _overflow(self, entry: Found, reason: str) -> None:
        self._capture.keep_local(entry.path, f"does not fit: {reason}")
        self._capture.survey.files.pop(entry.logical)

    def _carried(self) -> dict[str, FileRecord]:
        """Records of the base that stay as they are unless a local file replaces them."""
        if self._capture.base is None:
            return {}
        local = {logical: path for path, (logical, _) in visible_files(self._capture.base).items()}
        carried: dict[str, FileRecord] = {}
        for logical, record in self._capture.base.files.items():
            path = local.get(logical)
            if logical in self._capture.survey.beside:
                continue
            if path is None or logical == DATABASE or self._sealer.holds(path):
                carried[logical] = record
        return carried

    def _record_of(self, entry: Found) -> FileRecord | None:
        """The record that a local file gets; None: what is carried stays."""
        logical = entry.logical
        stored = self._capture.base.files.get(logical) if self._capture.base else None
        record = self._capture.new.get(logical)
        if record is None:
            if logical == DATABASE or entry.path in self._capture.waiting:
                return None
            record = entry.inode.record
            if record is None:
                return None
        executable = bool(entry.mode & 0o100) if logical != DATABASE else False
        if stored is not None and stored.sha256 == record.sha256:
            record = stored
        if record.executable != executable:
            record = replace(record, executable=executable)
        return record

    def _length(self, files: Mapping[str, FileRecord]) -> int:
        return sum(_json_length(path, record) for path, record in files.items())

    def _attributes(self, files: Mapping[str, FileRecord]) -> sidecar.Attributes:
        entries: dict[str, sidecar.Entry] = {}
        for logical, entry in self._capture.survey.files.items():
            record = files.get(logical)
            if record is not None and logical != DATABASE:
                made = self._entry(logical, entry, record)
                if made is not None:
                    entries[logical] = made
        for logical, old in self._capture.attributes.files.items():
            kept = files.get(logical)
            if logical not in self._capture.survey.files and kept is not None:
                entries[logical] = old  # carried forward: a failure, or a name not shown here
        folders = {}
        for logical, entry in self._capture.survey.folders.items():
            mode = stat.S_IMODE(entry.mode) & 0o777
            empty = logical not in self._capture.survey.filled
            if empty or entry.xattrs or mode != default_mode(entry.path, folder=True):
                folders[logical] = sidecar.FolderEntry(mode, _texts(entry.xattrs), empty)
        return sidecar.Attributes(entries, dict(self._capture.survey.links), folders)

    def _entry(self, logical: str, entry: Found, record: FileRecord) -> sidecar.Entry | None:
        """What the sidecar says of a file; None where a reader would guess it right."""
        inode = entry.inode
        mode = stat.S_IMODE(entry.mode) & 0o777
        old = self._capture.attributes.files.get(logical)
        stored = self._capture.base.files.get(logical) if self._capture.base else None
        unchanged = (
            stored is not None
            and stored.sha256 == record.sha256  # else it was moved here, or linked
            and logical not in self._capture.new
            and inode.base_mtime_ns == entry.mtime_ns
            and inode.base_mode == mode
            and not entry.xattrs
        )
        if unchanged and (old is None or old.sha256 == record.sha256):
            return old
        return sidecar.Entry(record.sha256, entry.mtime_ns, mode, _texts(entry.xattrs))

    def _store_attributes(
        self, files: dict[str, FileRecord], attributes: sidecar.Attributes
    ) -> None:
        if not (attributes.files or attributes.links or attributes.folders):
            files.pop(SIDECAR, None)
            return
        data = sidecar.encode_attributes(attributes)
        path = os.path.join(self._capture.staging, "attributes")
        with open(path, "wb") as out:
            out.write(data)
        files[SIDECAR] = self._capture.split(SIDECAR, path, executable=False)
        os.unlink(path)

    def _store_start(self, files: dict[str, FileRecord]) -> None:
        """Take the newest start profile along; it makes no checkpoint by itself."""
        profile = self._journal.get_json(META_START, {})
        known = {path: ranges for path, ranges in profile.items() if path in files}
        if known:
            files[START] = self._capture.store_bytes(START, encode_start(known), executable=False)


def _json_length(path: str, record: FileRecord) -> int:
    return len(encode(path)) + len(encode(record_to_json(record)))


def _texts(xattrs: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return sidecar.carried_xattrs({os.fsdecode(name): value for name, value in xattrs.items()})
