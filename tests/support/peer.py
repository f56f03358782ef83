"""The other v2 program reads a store of ours, rebuilds it and writes to it, by its own code.

Whoever calls needs the marker `peer`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from support.venvs import peer_python

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = Path(__file__).with_name("peer_script.py")
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A file as the other program put it into its working copy."""

    sha256: str
    size: int
    executable: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What the other program said of a store. It accepts it when `problems` is empty.

    After a problem the later fields may be empty: it stops where it must.
    """

    problems: tuple[str, ...]
    snapshot_id: str = ""
    chain: tuple[str, ...] = ()  # newest first
    files: Mapping[str, OnDisk] = field(default_factory=dict)  # without database and settings
    foreign: tuple[str, ...] = ()  # logical paths that it has no place for, and keeps as they are
    changes: tuple[str, ...] = ()  # what its next checkpoint would do to untouched files
    home: Path = Path()  # its working copy, to look into
    workspace: Path = Path()
    published: str = ""  # the snapshot that `publish` added


def check(store: Path, scratch: Path) -> Report:
    """Let it check every snapshot of the store and install the newest below `scratch`.

    The store is only read. `scratch` must not exist yet.
    """
    return _run(store, scratch)


def publish(store: Path, scratch: Path, edits: Mapping[str, str | None]) -> Report:
    """Check and install as `check` does, then let it publish a checkpoint with these edits.

    `edits` gives the new text of a logical path, or None to delete the file. `changes` of the
    report stays empty.
    """
    return _run(store, scratch, edits)


def _run(store: Path, scratch: Path, edits: Mapping[str, str | None] | None = None) -> Report:
    scratch.mkdir(parents=True)
    command = [str(peer_python()), "-I", str(SCRIPT), str(store), str(scratch)]
    if edits is not None:
        (scratch / "edits.json").write_text(json.dumps(edits))
        command.append(str(scratch / "edits.json"))
    env = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": str(scratch)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the script for the other program failed:\n{done.stderr}")
    return _report(json.loads((scratch / "report.json").read_text()))


def _report(value: dict[str, object]) -> Report:
    def texts(key: str) -> tuple[str, ...]:
        found = value.get(key, [])
        assert isinstance(found, list)
        return tuple(found)

    files = value.get("files", {})
    assert isinstance(files, dict)
    return Report(
        problems=texts("problems"),
        snapshot_id=str(value.get("snapshotId", "")),
        chain=texts("chain"),
        files={path: OnDisk(**found) for path, found in files.items()},
        foreign=texts("foreign"),
        changes=texts("changes"),
        home=Path(str(value.get("home", ""))),
        workspace=Path(str(value.get("workspace", ""))),
        published=str(value.get("published", "")),
    )
