"""Addresses: the peer's vectors, file stores in every spelling, and the canonical text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs.core.uris import (
    FileStore,
    ParsedUri,
    PubkyAgent,
    PubkyTemplate,
    agent,
    parse_uri,
    template,
)
from hpkfs.errors import UsageError

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
CASES = json.loads((VECTORS / "10-agent-uris.json").read_text())
OWNER = "8um71us3fyw6h8wbcxb5ar3rwusy1a6u49956ikzojg3gcwd1dty"
SNAPSHOT = "0123456789abcdef" * 2
CWD = "/home/ada"


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["uri"]))
def test_agent_addresses_are_read_as_by_the_peer(case: dict[str, object]) -> None:
    uri, expected = case["uri"], case["agent"]
    assert isinstance(uri, str)
    if expected is None:
        with pytest.raises(UsageError):
            parse_uri(uri, cwd=CWD)
        return
    store = parse_uri(uri, cwd=CWD).store
    assert isinstance(store, PubkyAgent)
    assert [store.owner, store.agent_id] == expected
    assert str(store) == agent(store.owner, store.agent_id).uri
    assert parse_uri(str(store), cwd=CWD) == ParsedUri(store)


def test_a_template_address_is_a_template() -> None:
    uri = f"pubky://{OWNER}/pub/hermes.pubky.app/v2/templates/scribe/head.json"
    store = parse_uri(uri, cwd=CWD).store
    assert isinstance(store, PubkyTemplate)
    assert (store.owner, store.template_id, str(store)) == (OWNER, "scribe", uri)
    assert store == template(OWNER, "scribe")


def test_a_template_in_a_private_folder_is_refused() -> None:
    with pytest.raises(UsageError):
        parse_uri(f"pubky://{OWNER}/priv/hermes.pubky.app/v2/templates/x/head.json", cwd=CWD)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("file:///srv/agent", "/srv/agent"),
        ("file:///srv/agent/", "/srv/agent"),
        ("file://localhost/srv/agent", "/srv/agent"),
        ("file:/srv/agent", "/srv/agent"),
        ("file:///srv/my%20agent", "/srv/my agent"),
        ("file:///srv/my agent", "/srv/my agent"),
        ("file:///srv/caf%C3%A9", "/srv/café"),
        ("file:///srv/café", "/srv/café"),
        ("file:///srv/%FF", "/srv/\udcff"),
        ("file:///srv/a%3Fb%23c%25", "/srv/a?b#c%"),
        ("file:///", "/"),
        ("/srv/agent", "/srv/agent"),
        ("/srv//agent/./", "/srv/agent"),
        ("/srv/../agent", "/srv/../agent"),
        ("/srv/50%25", "/srv/50%25"),
        ("/srv/a?b#c", "/srv/a?b#c"),
        ("agent", "/home/ada/agent"),
        ("./agent", "/home/ada/agent"),
        (".", "/home/ada"),
        ("../agent", "/home/ada/../agent"),
        ("./file:x", "/home/ada/file:x"),
        ("a:b", "/home/ada/a:b"),
        (" agent ", "/home/ada/ agent "),
        ("~/agent", "/home/ada/~/agent"),
    ],
)
def test_a_folder_is_a_store(text: str, path: str) -> None:
    assert parse_uri(text, cwd=CWD) == ParsedUri(FileStore(path))


@pytest.mark.parametrize(
    "text",
    ["", " ", "a\0b", "file:///a%00b", "file://", "file:", "file:relative", "file://host/a",
     "file:////a", "file:///a?b", "file:///a#b", "file:///100%", "file:///a%zz", "FILE:///a",
     "http://example.org/a", "s3://bucket/a", " file:///a", "pubky:x", "@" + SNAPSHOT],
)  # fmt: skip
def test_an_address_of_no_form_is_refused_in_three_sentences(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_uri(text, cwd=CWD)
    assert caught.value.kept
    assert caught.value.next_step


@pytest.mark.parametrize(
    "text", ["/srv/a", "a", "file:///srv/a", agent(OWNER, "default").uri, template(OWNER, "t").uri]
)
def test_an_address_may_end_with_a_checkpoint(text: str) -> None:
    parsed = parse_uri(f"{text}@{SNAPSHOT}", cwd=CWD)
    assert parsed == ParsedUri(parse_uri(text, cwd=CWD).store, SNAPSHOT)  # type: ignore[arg-type]  # an id


@pytest.mark.parametrize(
    "end", ["@", "@latest", f"@{SNAPSHOT[:-1]}", f"@{SNAPSHOT}0", f"@{SNAPSHOT.upper()}", "@\n"]
)
def test_another_end_is_a_part_of_the_name(end: str) -> None:
    assert parse_uri(f"/srv/a{end}", cwd=CWD) == ParsedUri(FileStore(f"/srv/a{end}"))


def test_a_folder_named_like_a_checkpoint_can_be_written_with_an_escape() -> None:
    parsed = parse_uri(f"file:///srv/a%40{SNAPSHOT}", cwd=CWD)
    assert parsed == ParsedUri(FileStore(f"/srv/a@{SNAPSHOT}"))


segments = st.one_of(
    st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1),
    st.sampled_from([f"a@{SNAPSHOT}", "file:", "%41", "\udcff", "pubky:", "?", "#", " "]),
).filter(lambda segment: segment not in {".", ".."})


@given(st.lists(segments, max_size=4))
def test_the_canonical_text_gives_the_same_store(parts: list[str]) -> None:
    store = FileStore("/" + "/".join(parts))
    text = str(store)
    assert text.isascii()
    assert parse_uri(text, cwd=CWD) == ParsedUri(store)


@given(st.text())
def test_any_text_gives_an_absolute_store_or_a_refusal(text: str) -> None:
    try:
        store = parse_uri(text, cwd=CWD).store
    except UsageError:
        return
    assert not isinstance(store, FileStore) or store.path.startswith("/")
