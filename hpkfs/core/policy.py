"""What travels, what stays on this machine, and what is secret: decided by name.

`volume.py` asks for every path that changes, `sealer.py` again when it seals. The rule is an
allowlist: a name that nobody knows is local. Below `workspace/` and `skills/` everything travels
but the names that the format leaves out, and beyond them a few names of secrets that the peer
would upload. Whether the *format* can carry a name is not asked here (`paths.path_problem`), nor
is the content, except by `looks_like_private_key`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Iterator

# How many bytes of a file's beginning `looks_like_private_key` can make use of.
KEY_SEARCH_BYTES = 256
_HEADER_STARTS_WITHIN = 200


_ALWAYS_LOCAL = frozenset({"config.yaml", "state.db-wal", "state.db-shm", "state.db-journal"})
_VIRTUAL = ".hpkfs"
_SINGLE_FILES = frozenset({"SOUL.md", "memories/USER.md", "memories/MEMORY.md", "state.db"})
_BELOW_A_FILE = tuple(f"{name}/" for name in sorted(_ALWAYS_LOCAL | _SINGLE_FILES))
_TREES = ("skills", "workspace")

_LEFT_OUT_FOLDERS = frozenset(
    {".git", ".venv", "node_modules", "__pycache__", "target", "dist", "build"}
)
_SECRET_NAMES = frozenset(
    {
        ".env", "credentials.env", "secrets.env", "auth.json", "credentials.json",
        "id_rsa", "id_ed25519",
        # Not left out by the peer; the design's own.
        ".netrc", ".npmrc", ".pypirc",
    }
)  # fmt: skip
_SECRET_PREFIX = ".env."
_SECRET_FOLDER = ".ssh"
_SECRET_FILE_IN_FOLDER = (".aws", "credentials")
_LOCAL_NAMES = frozenset({".DS_Store"})
_LOCAL_SUFFIXES = (".swp", ".swo", ".tmp", "~")
_SKILLS_LOCAL = frozenset({".hub", ".curator_backups", ".usage.json.lock"})

# Credentials of Hermes outside the two trees, a path or a folder with all below it. No `travel:`
# entry makes them travel.
_SECRET_PATHS = frozenset({
    ".env", ".op.env", ".anthropic_oauth.json", "auth", "auth.json", "auth.lock", "browser_auth",
    "byterover", "cache/bws_cache.json", "hindsight/config.json", "home", "honcho.json",
    "mcp-tokens", "mem0.json", "pairing", "platforms/matrix/store", "platforms/pairing",
    "platforms/whatsapp/session", "shared/nous_auth.json", "slack_tokens.json",
    "supermemory.json", "webhook_subscriptions.json", "weixin/accounts", "whatsapp/session",
    "workspace/meetings/node_token.json",
})  # fmt: skip
_SECRET_STEM = "google_chat_user_"

# A header that ends in PRIVATE KEY, of any algorithm (RFC 7468, OpenSSH, OpenPGP), that of the
# commercial SSH2 program, and PuTTY's.
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN (?:[A-Z0-9]+ ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    rb"|---- BEGIN SSH2 ENCRYPTED PRIVATE KEY ----"
    rb"|(?:\A|\n)(?:\xef\xbb\xbf)?PuTTY-User-Key-File-[0-9]"
)


class Rule(Enum):
    """What happens to a path."""

    TRAVELLING = "travelling"
    LOCAL = "local"
    SECRET = "secret"


@dataclass(frozen=True, slots=True)
class Decision:
    """A rule and why it applies.

    Attributes:
        rule: what happens to the path.
        reason: the end of a sentence that begins with the path, for `kept_local`; empty where
            the path travels, or is local without anything to say about it.
    """

    rule: Rule
    reason: str = ""


_TRAVELLING = Decision(Rule.TRAVELLING)
_LOCAL = Decision(Rule.LOCAL)
_SECRET_ELSEWHERE = Decision(Rule.SECRET)
_NAMED_LIKE_A_SECRET = Decision(Rule.SECRET, "is named like a secret")
_IGNORED = Decision(Rule.LOCAL, "is listed in .pubkyignore")


@dataclass(frozen=True, slots=True)
class IgnoreFile:
    """The paths of a `.pubkyignore`, relative to the workspace, in NFC.

    Attributes:
        exact: paths that are left out themselves.
        prefixes: folders, with a final slash, that are left out with all below them.
    """

    exact: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()

    def covers(self, rel: str) -> bool:
        """Say whether a path relative to the workspace is left out (a folder: with a slash)."""
        if not self.exact and not self.prefixes:
            return False
        rel = unicodedata.normalize("NFC", rel)
        return rel in self.exact or rel.startswith(self.prefixes)


EMPTY_IGNORE = IgnoreFile()


def parse_ignore(data: bytes) -> IgnoreFile:
    """Parse a `.pubkyignore`.

    Raises:
        FormatError: the file is not UTF-8, or a line asks for more than a path or a folder.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _ignore_refused("it is not UTF-8 text") from error
    exact, prefixes = set(), []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = unicodedata.normalize("NFC", raw.strip())
        if not line or line.startswith("#"):
            continue
        if re.search(r"[*?\[\]!\\]", line) or line.startswith("/") or ".." in line.split("/"):
            raise _ignore_refused(f"line {number} is neither a path nor a folder with a final /")
        if line.endswith("/"):
            prefixes.append(line)
        else:
            exact.add(line)
    return IgnoreFile(frozenset(exact), tuple(prefixes))


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one mount.

    Attributes:
        ignore: the `.pubkyignore` of the workspace.
        travel: further mount-relative paths that travel, each a file, or a folder with all below
            it; what is secret or left out by name stays so.
    """

    ignore: IgnoreFile
    travel: tuple[str, ...] = ()

    def decide(self, local: str, *, is_folder: bool) -> Decision:
        """Decide what happens to a path.

        Args:
            local: the path relative to the mount, without a final slash; bytes that are not
                UTF-8 as surrogates. Empty is the root.
            is_folder: whether it is a folder; a link is none.
        """
        root = self._root_of(local)
        if local in _ALWAYS_LOCAL or local.startswith(_BELOW_A_FILE):
            return _LOCAL
        if local.partition("/")[0] == _VIRTUAL:
            return _LOCAL
        if _is_secret_path(local):
            return _SECRET_ELSEWHERE if root is None else _NAMED_LIKE_A_SECRET
        if local in _SINGLE_FILES:
            return _LOCAL if is_folder else _TRAVELLING
        if root is None:
            return _LOCAL
        if local == root:
            # `skills` and `workspace` travel as folders only, a `travel` entry as either.
            return _TRAVELLING if is_folder or root not in _TREES else _LOCAL
        rel = local[len(root) + 1 :]
        if root == "skills" and _is_local_skill_name(rel, is_folder=is_folder):
            return _LOCAL
        decision = _decide_by_names(rel.split("/"), is_folder=is_folder)
        if decision is _TRAVELLING and root == "workspace":
            return _IGNORED if self.ignore.covers(rel + "/" * is_folder) else _TRAVELLING
        return decision

    def prunes(self, local_folder: str) -> bool:
        """Say whether nothing below a folder can travel, so that a walk need not enter it."""
        if local_folder in {"", "memories"}:
            return False
        if self.decide(local_folder, is_folder=True).rule is Rule.TRAVELLING:
            return False
        return not any(entry.startswith(local_folder + "/") for entry in self._entries())

    def _root_of(self, local: str) -> str | None:
        """The tree or `travel` entry that holds a path, or is it; None where there is none."""
        top = local.partition("/")[0]
        if top in _TREES:
            return top
        for entry in self._entries():
            if local == entry or local.startswith(entry + "/"):
                return entry
        return None

    def _entries(self) -> Iterator[str]:
        return (entry.rstrip("/") for entry in self.travel)


def _is_secret_path(local: str) -> bool:
    """Say whether a path is, or lies below, one of Hermes' own credentials."""
    if local.startswith(_SECRET_STEM):
        return True
    end = local.find("/")
    while end != -1:
        if local[:end] in _SECRET_PATHS:
            return True
        end = local.find("/", end + 1)
    return local in _SECRET_PATHS


def _is_local_skill_name(rel: str, *, is_folder: bool) -> bool:
    parts = rel.split("/")
    return parts[0] in _SKILLS_LOCAL or (not is_folder and ".tmp." in parts[-1])


def _decide_by_names(parts: list[str], *, is_folder: bool) -> Decision:
    """Apply the names that the format leaves out, and our further secrets, to a relative path."""
    name = parts[-1]
    folders = parts if is_folder else parts[:-1]
    if not _LEFT_OUT_FOLDERS.isdisjoint(folders):
        return _LOCAL
    if _SECRET_FOLDER in folders:
        return _NAMED_LIKE_A_SECRET
    if is_folder:
        return _TRAVELLING
    if name in _SECRET_NAMES or name.startswith(_SECRET_PREFIX):
        return _NAMED_LIKE_A_SECRET
    if tuple(parts[-2:]) == _SECRET_FILE_IN_FOLDER:
        return _NAMED_LIKE_A_SECRET
    if name in _LOCAL_NAMES or name.endswith(_LOCAL_SUFFIXES):
        return _LOCAL
    return _TRAVELLING


def looks_like_private_key(first_bytes: bytes) -> bool:
    """Say whether a file begins as a private key does; `KEY_SEARCH_BYTES` of it are enough.

    Public keys, certificates and signatures do not count.
    """
    found = _PRIVATE_KEY.search(first_bytes[:KEY_SEARCH_BYTES])
    return found is not None and found.start() < _HEADER_STARTS_WITHIN


def _ignore_refused(why: str) -> FormatError:
    return FormatError(
        f"The file .pubkyignore in the workspace is refused: {why}.",
        kept="Your files are unchanged.",
        next_step="Write one path a line, without wildcards; a folder ends with a slash.",
    )
