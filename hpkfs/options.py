"""How a mount is asked for, and how its end is told: what command line and daemon share.

It stands apart from both, so that neither has to import the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CACHE_SIZE_BYTES_DEFAULT: Final = 4 << 30
SEAL_AFTER_S_DEFAULT: Final = 30.0
# The exit code of each state of an agent.
EXIT_CODES: Final = {
    "clean": 0,
    "offline": 0,
    "dirty": 2,
    "pending": 2,
    "conflict": 3,
    "auth-required": 4,
    "quota": 5,
    "corrupt": 6,
}


@dataclass(frozen=True, slots=True)
class MountOptions:
    """One mount.

    Attributes:
        uri: the canonical address of the store.
        mountpoint: an absolute path, links resolved.
        state_dir: the state directory that the user named; None for the usual one.
        read_only: refuse every write.
        at: show this checkpoint: hex digits of its id, or a time in RFC 3339 (it has a `T`).
        offline: do not talk to the store.
        lazy: fetch bytes only when they are read.
        cache_size_bytes: bound of all clean bytes on this disk together.
        seal_after_s: quiet time after a change before it is sealed.
        allow_other: let other users in.
        uid: owner of everything in the mount; None for who made it.
        gid: group of everything in the mount; None for who made it.
        umask: permission bits taken from everything in the mount; None for none.
        showhistory: list `.hpkfs` in the root.
        xattr: offer extended attributes.
        foreground: the daemon is not detached from the terminal.
    """

    uri: str
    mountpoint: str
    state_dir: str | None = None
    read_only: bool = False
    at: str | None = None
    offline: bool = False
    lazy: bool = False
    cache_size_bytes: int = CACHE_SIZE_BYTES_DEFAULT
    seal_after_s: float = SEAL_AFTER_S_DEFAULT
    allow_other: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int | None = None
    showhistory: bool = False
    xattr: bool = False
    foreground: bool = False
