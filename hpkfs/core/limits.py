"""The sizes of the storage format (section 8): what a reader refuses and a writer must not make."""

from __future__ import annotations

from typing import Final

from hpkfs.core.paths import AGENTS, DATABASE, MEMORY, PORTABLE, SOUL, USER

MAX_HEAD: Final = 4_096
MAX_SNAPSHOT: Final = 1_048_576
MAX_PORTABLE: Final = 65_536
PIECE_SIZE: Final = 1_048_576
MAX_FILES: Final = 5_000
MAX_TOTAL: Final = 2_147_483_648
MAX_CORE_FILE: Final = 65_536
MAX_DATABASE: Final = 268_435_456
MAX_OTHER_FILE: Final = 67_108_864

MAX_NAME_CHARACTERS: Final = 200
MAX_DESCRIPTION_CHARACTERS: Final = 1_000
MAX_SESSION_CHARACTERS: Final = 128
MAX_RUNTIME_CHARACTERS: Final = 64
MAX_ADAPTER_CHARACTERS: Final = 128
MAX_URL_CHARACTERS: Final = 2_048

_CAPS: Final = (
    (DATABASE, MAX_DATABASE),
    (PORTABLE, MAX_PORTABLE),
    *((path, MAX_CORE_FILE) for path in (SOUL, USER, MEMORY, AGENTS)),
)


def cap_for(logical: str) -> int:
    """Give the greatest size in bytes that the file at a logical path may have."""
    for path, cap in _CAPS:
        if logical == path:
            return cap
    return MAX_OTHER_FILE


def max_pieces(cap: int) -> int:
    """Give the most pieces that a file with this cap may have, however it was cut."""
    return cap // PIECE_SIZE + 2
