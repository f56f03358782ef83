"""Addresses of stores: `file://` folders, bare paths, agents and templates on Pubky.

`cli.py` and the launcher parse what a person typed. `str()` of a store is its canonical text:
parsed again it gives the same store, and its digest names the state directory. Links in a path
are resolved by the caller, since this module looks at no disk; for the same reason `..` is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import quote, unquote_to_bytes

from hpkfs.core.ids import AgentId, SnapshotId
from hpkfs.errors import UsageError

# A public key in z-base-32, in the one way it is stored; a person may write it with a prefix.
_OWNER = r"(?:pk:|pubky|_pubky\.)?(?P<owner>[ybndrfg8ejkmcpqxot1uwisza345h769]{52})"
_ID = r"(?P<id>[a-z0-9][a-z0-9_-]{0,63})"
_AGENT = re.compile(rf"pubky://{_OWNER}/priv/hermes\.pubky\.app/v2/agents/{_ID}/head\.json")
_TEMPLATE = re.compile(rf"pubky://{_OWNER}/pub/hermes\.pubky\.app/v2/templates/{_ID}/head\.json")
_SNAPSHOT_SUFFIX = re.compile(r"@([0-9a-f]{32})\Z")
# What must not be taken for a path: a scheme, and blanks before one.
_LOOKS_LIKE_URI = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|(?:file|pubky):)", re.IGNORECASE)
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class FileStore:
    """A store in a folder.

    Attributes:
        path: absolute, without a final slash; bytes that are not UTF-8 as surrogates.
    """

    path: str

    def __str__(self) -> str:
        return "file://" + quote(self.path.encode("utf-8", "surrogateescape"), safe="/")


@dataclass(frozen=True, slots=True)
class PubkyAgent:
    """An agent's private folder on its owner's homeserver.

    Attributes:
        owner: the public key, z-base-32, without a prefix.
        agent_id: the agent's id.
        uri: the canonical address of its head.
    """

    owner: str
    agent_id: AgentId
    uri: str

    def __str__(self) -> str:
        return self.uri

    @property
    def folder(self) -> str:
        """The path of the store on the owner's homeserver, with a final slash."""
        return _folder(self.owner, self.uri)

    @property
    def capability(self) -> str:
        """The one capability that a grant for it has."""
        return f"{self.folder}:rw"


@dataclass(frozen=True, slots=True)
class PubkyTemplate:
    """A public template.

    Attributes:
        owner: the public key, z-base-32, without a prefix.
        template_id: the template's id.
        uri: the canonical address of its head.
    """

    owner: str
    template_id: AgentId
    uri: str

    def __str__(self) -> str:
        return self.uri

    @property
    def folder(self) -> str:
        """The path of the store on the owner's homeserver, with a final slash."""
        return _folder(self.owner, self.uri)


def _folder(owner: str, uri: str) -> str:
    return uri.removeprefix(f"pubky://{owner}").removesuffix("head.json")


StoreUri: TypeAlias = FileStore | PubkyAgent | PubkyTemplate


@dataclass(frozen=True, slots=True)
class ParsedUri:
    """A store, and the one checkpoint of it that the address names, if it does."""

    store: StoreUri
    at: SnapshotId | None = None


def parse_uri(text: str, *, cwd: str) -> ParsedUri:
    """Parse an address.

    Args:
        text: what a person typed.
        cwd: the absolute folder that a bare path is relative to.

    Raises:
        UsageError: the address is not one of the three forms.
    """
    at = None
    rest = text
    suffix = _SNAPSHOT_SUFFIX.search(text)
    if suffix is not None:
        at, rest = SnapshotId(suffix[1]), text[: suffix.start()]
    return ParsedUri(_parse_store(rest, text=text, cwd=cwd), at)


def _parse_store(rest: str, *, text: str, cwd: str) -> StoreUri:
    if "\0" in rest or not rest.strip():
        raise _refused(text, "It is empty, or holds a zero byte")
    if rest.startswith("file:"):
        return _parse_file(rest, text=text)
    if rest.startswith("pubky:"):
        return _parse_pubky(rest, text=text)
    if _LOOKS_LIKE_URI.match(rest):
        raise _refused(text, "Its scheme is neither file nor pubky, in small letters")
    return FileStore(_absolute(rest if rest.startswith("/") else f"{cwd}/{rest}"))


def _parse_file(rest: str, *, text: str) -> FileStore:
    found = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^?#]*)", rest, re.DOTALL)
    if found is None or found[1].startswith("//"):
        raise _refused(text, "A file address is file:// and an absolute path, ? and # escaped")
    if _BAD_ESCAPE.search(found[1]):
        raise _refused(text, "A percent sign in it must be written %25")
    raw = unquote_to_bytes(found[1].encode("utf-8", "surrogateescape"))
    if b"\0" in raw:
        raise _refused(text, "It holds a zero byte")
    return FileStore(_absolute(raw.decode("utf-8", "surrogateescape")))


def _parse_pubky(rest: str, *, text: str) -> PubkyAgent | PubkyTemplate:
    if found := _AGENT.fullmatch(rest):
        return agent(found["owner"], found["id"])
    if found := _TEMPLATE.fullmatch(rest):
        return template(found["owner"], found["id"])
    raise _refused(
        text,
        "An agent is pubky://OWNER/priv/hermes.pubky.app/v2/agents/ID/head.json, "
        "a template pubky://OWNER/pub/hermes.pubky.app/v2/templates/ID/head.json",
    )


def agent(owner: str, agent_id: str) -> PubkyAgent:
    """Make the address of an agent from its parts, which must be well formed."""
    uri = f"pubky://{owner}/priv/hermes.pubky.app/v2/agents/{agent_id}/head.json"
    assert _AGENT.fullmatch(uri), uri
    return PubkyAgent(owner, AgentId(agent_id), uri)


def template(owner: str, template_id: str) -> PubkyTemplate:
    """Make the address of a template from its parts, which must be well formed."""
    uri = f"pubky://{owner}/pub/hermes.pubky.app/v2/templates/{template_id}/head.json"
    assert _TEMPLATE.fullmatch(uri), uri
    return PubkyTemplate(owner, AgentId(template_id), uri)


def _absolute(path: str) -> str:
    """Drop what never changes a path: empty and `.` segments, the final slash."""
    return "/" + "/".join(part for part in path.split("/") if part not in {"", "."})


def _refused(text: str, why: str) -> UsageError:
    return UsageError(
        f"The address {text!r} is refused. {why}.",
        kept="Nothing was changed.",
        next_step="Give file:///some/folder, a path, or a pubky:// address.",
    )
