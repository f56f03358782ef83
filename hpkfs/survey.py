"""What the tree holds for the next snapshot: a walk of what can travel, reading no byte of a file.

Called by `sealer.py` and for status; synchronous, so it sees one instant of the tree.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hpkfs.core.attributes import target_problem
from hpkfs.core.limits import cap_for
from hpkfs.core.paths import MAX_PATH_BYTES, fold, path_problem, to_logical
from hpkfs.core.policy import Rule
from hpkfs.inodes import ROOT_INO, Inode

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from hpkfs.volume import Volume


@dataclass(frozen=True, slots=True)
class Kept:
    """Something among what travels that stays on this machine, and why."""

    path: str
    reason: str


@dataclass(slots=True)
class Found:
    """One entry of the walk."""

    path: str
    logical: str
    inode: Inode
    generation: int
    mode: int
    mtime_ns: int
    xattrs: dict[bytes, bytes]
    sidecars: list[Inode] = field(default_factory=list)

    @property
    def dirty(self) -> bool:
        """Whether its bytes, or those of a log beside it, changed since the last seal."""
        return bool(self.inode.dirty) or any(inode.dirty for inode in self.sidecars)


@dataclass(slots=True)
class Survey:
    """What the tree holds for the next snapshot, before any byte is read."""

    files: dict[str, Found] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    folders: dict[str, Found] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    kept: list[Kept] = field(default_factory=list)
    # Logical paths of files that are a part of the database beside them, and do not travel.
    beside: set[str] = field(default_factory=set)


def survey(volume: Volume, *, stored: Collection[str], mountpoints: tuple[str, ...]) -> Survey:
    """Walk what can travel.

    Args:
        volume: the tree.
        stored: logical paths of the base; of two colliding names the stored one travels.
        mountpoints: where the tree is and was mounted, for links with an absolute target.
    """
    walk = _Walk(volume, mountpoints)
    walk.everything()
    walk.check_names(stored)
    return walk.found


class _Walk:
    def __init__(self, volume: Volume, mountpoints: tuple[str, ...]) -> None:
        self._volume = volume
        self._policy = volume.policy
        self._mountpoints = mountpoints
        self._xattrs = volume.journal.all_xattrs()
        self.found = Survey()
        # Folders to enter: number, path with a slash, whether what is in it travels. No recursion:
        # a tree may be deeper than Python's stack (test_regression_a_tree_of_any_depth).
        self._waiting: deque[tuple[int, str, bool]] = deque([(ROOT_INO, "", False)])

    def everything(self) -> None:
        """Walk the whole tree but what cannot travel."""
        while self._waiting:
            ino, prefix, travelling = self._waiting.popleft()
            self._entries(ino, prefix, travelling=travelling)

    def _entries(self, ino: int, prefix: str, *, travelling: bool) -> None:
        for name, inode in self._volume.walk_folder(ino):
            path = prefix + os.fsdecode(name)
            xattrs: Mapping[bytes, bytes] = self._xattrs.get(inode.ino, {})
            entry = Found(
                path=path,
                logical=to_logical(path) or "",
                inode=inode,
                generation=inode.generation,
                mode=inode.mode,
                mtime_ns=inode.mtime_ns,
                xattrs=dict(xattrs),
            )
            if inode.is_folder:
                self._folder(entry, prefix, travelling=travelling)
            else:
                self._other(entry, travelling=travelling)

    def _folder(self, entry: Found, prefix: str, *, travelling: bool) -> None:
        decision = self._policy.decide(entry.path, is_folder=True)
        if self._policy.prunes(entry.path):
            if travelling:
                self._keep(entry, decision.reason or "is left out by its name")
            return
        inside = travelling or decision.rule is Rule.TRAVELLING
        logical = (to_logical(entry.path + "/x") or "")[:-2]
        if len(os.fsencode(logical)) > MAX_PATH_BYTES:
            self._keep(entry, f"its name {path_problem(logical)}")
            return
        if inside and logical and path_problem(logical) is None:
            self.found.folders[logical] = entry
            self.found.filled.add(logical.rpartition("/")[0])
        self._waiting.append((entry.inode.ino, entry.path + "/", inside))

    def _other(self, entry: Found, *, travelling: bool) -> None:
        decision = self._policy.decide(entry.path, is_folder=False)
        logical, inode = entry.logical, entry.inode
        if decision.rule is not Rule.TRAVELLING:
            if travelling and (decision.reason or decision.rule is Rule.SECRET):
                self._keep(entry, decision.reason or "is secret")
            return
        if not logical:
            return
        problem = path_problem(logical)
        if problem is not None:
            self._keep(entry, f"its name {problem}")
        elif stat.S_ISLNK(inode.mode):
            self._link(entry)
        elif not inode.is_file:
            self._keep(entry, f"is {_kind(inode.mode)}")
        elif inode.size > cap_for(logical):
            self._keep(entry, f"is larger than the {cap_for(logical)} bytes allowed")
        else:
            self._file(entry)

    def _file(self, entry: Found) -> None:
        known = self.found.files.get(entry.logical)
        if known is not None:  # two local names with one composed form: the composed one travels
            if unicodedata.is_normalized("NFC", entry.path):
                entry, known = known, entry
                self.found.files[known.logical] = known
            self._keep(entry, "its composed name is taken")
            return
        self.found.files[entry.logical] = entry
        self.found.filled.add(entry.logical.rpartition("/")[0])

    def _link(self, entry: Found) -> None:
        """A link travels when what it names does, whether that exists or not."""
        target = os.fsdecode(entry.inode.target or b"")
        inside = _link_inside(entry.path, target, self._mountpoints)
        if inside is None or self._policy.decide(inside, is_folder=False).rule is not (
            Rule.TRAVELLING
        ):
            self._keep(entry, "is a link that leads out of what travels")
        elif (problem := target_problem(target)) is not None:
            self._keep(entry, problem)
        else:
            if target.startswith("/"):
                target = os.path.relpath(inside, os.path.dirname(entry.path) or ".")
            self.found.links[entry.logical] = target
            self.found.filled.add(entry.logical.rpartition("/")[0])

    def _keep(self, entry: Found, reason: str) -> None:
        self.found.kept.append(Kept(shown(entry.path), reason))

    def check_names(self, stored: Collection[str]) -> None:
        """Names that are one name elsewhere: the stored one, else the first, travels."""
        taken: dict[str, str] = {}
        for logical in sorted(self.found.files, key=lambda path: (path not in stored, path)):
            other = taken.setdefault(fold(logical), logical)
            if other != logical:
                entry = self.found.files.pop(logical)
                place = shown(self.found.files[other].path)
                self._keep(entry, f"differs only in case from {place}")


def shown(path: str) -> str:
    """A path as text for people: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _kind(mode: int) -> str:
    if stat.S_ISFIFO(mode):
        return "a fifo"
    if stat.S_ISSOCK(mode):
        return "a socket"
    return "a device node"


def _link_inside(path: str, target: str, mountpoints: tuple[str, ...]) -> str | None:
    """The mount-relative path that a link leads to, or None where that is outside."""
    if target.startswith("/"):
        above = next((path for path in mountpoints if target.startswith(path + "/")), None)
        if above is None:
            return None
        joined = target[len(above) + 1 :]
    else:
        joined = os.path.join(os.path.dirname(path), target)
    normal = os.path.normpath(joined)
    if normal.startswith("../") or normal in ("..", "."):
        return None
    return normal
