"""Runs inside the other program's venv: its own code reads, rebuilds and continues a store.

`python -I peer_script.py STORE SCRATCH [EDITS.json]` writes SCRATCH/report.json. Nothing here
judges a byte: only the other program's parsers, installer, database checks and sealing do. The
store is reached through a small transport that stands where its network layer stands.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hermes_pubky.database as peer_database  # type: ignore[import-not-found]
import hermes_pubky.models as peer_models  # type: ignore[import-not-found]
import hermes_pubky.objects as peer_objects  # type: ignore[import-not-found]
from hermes_pubky.paths import layout_for  # type: ignore[import-not-found]
from hermes_pubky.storage import AgentRemote  # type: ignore[import-not-found]
from hermes_pubky.supervisor import Supervisor  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OWNER = "y" * 52  # shaped like a public key; it only names folders here
NETWORK = "testnet"
MAX_CHAIN = 1000

Json = dict[str, object]


class FolderTransport:
    """The methods of the native transport, on a store folder. It verifies nothing on purpose."""

    def __init__(self, store: Path, agent_id: str) -> None:
        self.store = store
        self.agent_id = agent_id
        self.owner = OWNER

    def head_get(self, _timeout_s: float) -> bytes | None:
        return self._get("head.json")

    def head_put(self, data: bytes, _timeout_s: float) -> None:
        self._put("head.json", data)

    def snapshot_get(self, snapshot_id: str, _timeout_s: float) -> bytes | None:
        return self._get(f"snapshots/{snapshot_id}.json")

    def snapshot_put(self, snapshot_id: str, data: bytes, _timeout_s: float) -> None:
        self._put(f"snapshots/{snapshot_id}.json", data)

    def object_get(self, name: str, destination: str, _timeout_s: float) -> int:
        shutil.copyfile(self.store / name, destination)
        return Path(destination).stat().st_size

    def object_put(self, name: str, source: str, _timeout_s: float) -> int:
        data = Path(source).read_bytes()
        self._put(name, data)
        return len(data)

    def _get(self, name: str) -> bytes | None:
        try:
            return (self.store / name).read_bytes()
        except FileNotFoundError:
            return None

    def _put(self, name: str, data: bytes) -> None:
        target = self.store / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.partial")
        partial.write_bytes(data)
        partial.replace(target)


class Check:
    """One check of one store; what went wrong gathers in `problems`."""

    def __init__(self, store: Path, scratch: Path) -> None:
        self.store = store
        self.scratch = scratch
        self.problems: list[str] = []
        self.report: Json = {"problems": self.problems}

    def step(self, name: str, action: Callable[[], None]) -> None:
        """Run one step; an error of the other program is a problem, not the end of the check."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it raises is its verdict
            traceback.print_exc()
            self.problems.append(f"{name}: {type(error).__name__}: {error}")

    def run(self, edits: Mapping[str, str | None] | None) -> None:
        self.step("head", self.read_head)
        if self.problems:
            return
        self.step("chain", self.read_chain)
        self.step("install", self.install)
        if self.problems:
            return
        if edits is None:
            self.step("next checkpoint", self.seal)
        else:
            self.step("publish", partial(self.publish, edits))

    def read_head(self) -> None:
        data = (self.store / "head.json").read_bytes()
        self.head = peer_models.Head.parse(data)
        self.same_bytes("head.json", data, self.head.to_bytes())
        self.report["snapshotId"] = self.head.snapshot_id
        layout = layout_for(OWNER, self.head.id, network=NETWORK, root=self.scratch / "root")
        self.remote = AgentRemote(FolderTransport(self.store, self.head.id))
        self.supervisor = Supervisor(layout, network=NETWORK, remote_factory=lambda: self.remote)
        self.layout = layout.ensure()
        self.report["home"] = str(layout.hermes_home)
        self.report["workspace"] = str(layout.workspace)

    def read_chain(self) -> None:
        """Read every snapshot from the head back, and rebuild every file that one of them names."""
        chain: list[str] = []
        self.report["chain"] = chain
        rebuilt: set[tuple[str, str, tuple[str, ...]]] = set()
        reference = self.head
        while reference is not None and len(chain) < MAX_CHAIN:
            snapshot = self.remote.read_snapshot(reference)
            name = f"snapshots/{snapshot.snapshot_id}.json"
            self.same_bytes(name, (self.store / name).read_bytes(), snapshot.to_bytes())
            chain.append(snapshot.snapshot_id)
            for logical, record in snapshot.files.items():
                key = (logical, record.sha256, tuple(piece.object for piece in record.pieces))
                if key not in rebuilt:
                    rebuilt.add(key)
                    self.step(f"{name} {logical}", partial(self.rebuild, logical, record))
            reference = snapshot.parent

    def rebuild(self, logical: str, record: peer_models.FileRecord) -> None:
        if record.size == 0:
            return  # it writes an empty file without asking for an object
        pieces = {piece.object: piece for piece in record.pieces}

        def fetch(name: str) -> Path:
            target = self.scratch / "objects" / Path(name).name
            target.parent.mkdir(exist_ok=True)
            self.remote.read_object_to_path(pieces[name], target)
            return target

        if logical == peer_models.DATABASE_PATH:
            peer_database.stage_database(record, fetch, self.layout)
            return
        target = self.scratch / "rebuilt"
        peer_objects.assemble(record, fetch, target)
        if logical == peer_models.PORTABLE_CONFIG_PATH:
            data = target.read_bytes()
            self.same_bytes(logical, data, peer_models.PortableConfig.parse(data).to_bytes())

    def install(self) -> None:
        """Let it take over the newest snapshot; report what is on disk then."""
        with self.supervisor.session() as running:
            prepared = running.prepare(offline=False)
            if prepared.status != "fast-forwarded":
                raise RuntimeError(f"{prepared.status}: {prepared.detail}")
            snapshot = prepared.snapshot
            projection = running._projection()
            foreign = [path for path in snapshot.files if not has_place(projection, path)]
            self.report["foreign"] = foreign
            projection.materialize(
                snapshot,
                running._resolve_object(snapshot),
                extra_paths=[path for path in snapshot.files if path not in foreign],
            )
            self.report["files"] = {
                logical: self.on_disk(projection.local_path(logical))
                for logical in snapshot.files
                if logical not in foreign
                and logical not in (peer_models.DATABASE_PATH, peer_models.PORTABLE_CONFIG_PATH)
            }

    def seal(self) -> None:
        """Let it capture the untouched working copy; what it would change, it cannot keep.

        Only files count: with a new working copy it forgets the last session's id by itself.
        """
        with self.supervisor.session() as running:
            base = running._base()
            if peer_models.DATABASE_PATH in base.files:
                self.recapture(running)
            candidate = running.seal()
            new = base.files if candidate is None else candidate.snapshot.files
            self.report["changes"] = differences(base.files, new)

    def recapture(self, running: Supervisor) -> None:
        """Let it capture the installed database: the conversation must be the one it installed."""
        installed = running.journal.get_setting("base_db_digest")
        captured = peer_database.capture_database(self.layout, running.cache)
        if captured.digest != installed:
            self.problems.append("its next capture finds another conversation than was installed")

    def publish(self, edits: Mapping[str, str | None]) -> None:
        """Let it change files in its working copy and publish a checkpoint into the store."""
        with self.supervisor.session() as running:
            projection = running._projection()
            for logical, text in edits.items():
                local = projection.local_path(logical)
                if text is None:
                    local.unlink()
                else:
                    local.parent.mkdir(parents=True, exist_ok=True)
                    local.write_text(text)
            result = running.sync()
            if result.status != "synced":
                raise RuntimeError(f"{result.status}: {result.detail}")
        self.report["published"] = self.remote.read_head().snapshot_id

    def same_bytes(self, name: str, stored: bytes, encoded: bytes) -> None:
        if stored != encoded:
            self.problems.append(f"{name}: it would write other bytes than are stored")

    def on_disk(self, path: Path) -> Json:
        data = path.read_bytes()
        executable = bool(path.stat().st_mode & 0o100)
        digest = hashlib.sha256(data).hexdigest()
        return {"sha256": digest, "size": len(data), "executable": executable}


def has_place(projection: object, logical: str) -> bool:
    try:
        projection.local_path(logical)  # type: ignore[attr-defined]
    except peer_models.SchemaError:
        return False
    return True


def differences(
    old: Mapping[str, peer_models.FileRecord], new: Mapping[str, peer_models.FileRecord]
) -> list[str]:
    return [
        *(f"removed {path}" for path in sorted(old.keys() - new.keys())),
        *(f"added {path}" for path in sorted(new.keys() - old.keys())),
        *(f"changed {path}" for path in sorted(old.keys() & new.keys()) if old[path] != new[path]),
    ]


def main() -> None:
    store, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    edits = json.loads(Path(sys.argv[3]).read_text()) if len(sys.argv) > 3 else None
    check = Check(store, scratch)
    check.run(edits)
    (scratch / "report.json").write_text(json.dumps(check.report))


if __name__ == "__main__":
    main()
