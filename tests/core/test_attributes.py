"""The sidecar: back and forth, and every kind of damage."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs.core.attributes import (
    EMPTY,
    MAX_TARGET_BYTES,
    MAX_XATTR_VALUE_BYTES,
    Attributes,
    Entry,
    FolderEntry,
    carried_xattrs,
    encode_attributes,
    parse_attributes,
    target_problem,
)
from hpkfs.core.ids import Digest
from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

DIGEST = Digest("ab" * 32)
SAMPLE = Attributes(
    files={"workspace/a.md": Entry(DIGEST, 1_700_000_000_123_456_789, 0o640, {"user.tag": b"x\0"})},
    links={"workspace/b": "a.md"},
    folders={"workspace/empty": FolderEntry(0o750, {}, empty=True)},
)

names = st.text(st.sampled_from("abcé 😀.-"), min_size=1, max_size=6).filter(
    lambda name: name == name.strip() and name not in {".", ".."}
)
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "workspace/" + "/".join(parts))
xattrs = st.dictionaries(
    st.text("abcé", min_size=1, max_size=4).map(lambda name: f"user.{name}"),
    st.binary(max_size=40),
    max_size=2,
)
modes = st.integers(0, 0o1777)
digests = st.binary(min_size=32, max_size=32).map(lambda raw: Digest(raw.hex()))
entries = st.builds(Entry, digests, st.integers(-(2**63), 2**63 - 1), modes, xattrs)
targets = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
attributes = st.builds(
    Attributes,
    st.dictionaries(paths, entries, max_size=4),
    st.dictionaries(paths, targets, max_size=4),
    st.dictionaries(paths, st.builds(FolderEntry, modes, xattrs, st.booleans()), max_size=4),
)


@given(attributes)
def test_what_is_written_is_read_back(sidecar: Attributes) -> None:
    data = encode_attributes(sidecar)
    assert parse_attributes(data) == sidecar
    assert encode_attributes(parse_attributes(data)) == data


def test_the_same_attributes_in_another_order_give_the_same_bytes() -> None:
    entry = Entry(DIGEST, 1, 0o600)
    one = Attributes(files={"workspace/a": entry, "workspace/b": entry})
    other = Attributes(files={"workspace/b": entry, "workspace/a": entry})
    assert encode_attributes(one) == encode_attributes(other)


def test_the_bytes_are_those_of_the_documentation() -> None:
    assert encode_attributes(SAMPLE).decode() == (
        '{"files":{"workspace/a.md":{"mode":416,"mtimeNs":1700000000123456789,"sha256":"'
        + DIGEST
        + '","xattrs":{"user.tag":"eAA="}}},"folders":{"workspace/empty":'
        '{"empty":true,"mode":488,"xattrs":{}}},"kind":"hpkfs-attributes",'
        '"links":{"workspace/b":"a.md"},"version":1}\n'
    )


def test_an_empty_sidecar_is_one_too() -> None:
    assert parse_attributes(encode_attributes(EMPTY)) == EMPTY


def changed(change: Callable[[dict[str, dict[str, object]]], object]) -> bytes:
    document = json.loads(encode_attributes(SAMPLE))
    change(document)
    return json.dumps(document).encode()


def file_entry(document: dict[str, dict[str, object]]) -> dict[str, object]:
    entry = document["files"]["workspace/a.md"]
    assert isinstance(entry, dict)
    return entry


def test_unknown_keys_at_the_top_are_ignored() -> None:
    assert parse_attributes(changed(lambda document: document.update(later={"x": 1}))) == SAMPLE


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(version=2),
        lambda d: d.update(version=True),
        lambda d: d.pop("version"),
        lambda d: d.update(kind="agent-head"),
        lambda d: d.pop("files"),
        lambda d: d.update(links=[]),
        lambda d: d.update(folders=None),
        lambda d: d["files"].update({"../x": file_entry(d)}),
        lambda d: d["links"].update({"a//b": "x"}),
        lambda d: d["links"].update({"workspace/l": 1}),
        lambda d: d["links"].update({"workspace/l": ""}),
        lambda d: d["links"].update({"workspace/l": "a\0b"}),
        lambda d: d["links"].update({"workspace/l": "a" * (MAX_TARGET_BYTES + 1)}),
        lambda d: d["files"].update({"workspace/x": None}),
        lambda d: file_entry(d).pop("sha256"),
        lambda d: file_entry(d).pop("mode"),
        lambda d: file_entry(d).pop("xattrs"),
        lambda d: file_entry(d).update(extra=1),
        lambda d: file_entry(d).update(sha256=DIGEST + "\n"),
        lambda d: file_entry(d).update(mtimeNs=True),
        lambda d: file_entry(d).update(mtimeNs=1.5),
        lambda d: file_entry(d).update(mtimeNs=2**63),
        lambda d: file_entry(d).update(mode=0o4755),
        lambda d: file_entry(d).update(mode=0o2755),
        lambda d: file_entry(d).update(mode=-1),
        lambda d: file_entry(d).update(mode="0644"),
        lambda d: file_entry(d).update(xattrs=[]),
        lambda d: file_entry(d).update(xattrs={"user.a": 1}),
        lambda d: file_entry(d).update(xattrs={"user.a": "e"}),
        lambda d: file_entry(d).update(xattrs={"user.a": "eB=="}),
        lambda d: file_entry(d).update(xattrs={"security.capability": "eAA="}),
        lambda d: file_entry(d).update(xattrs={"user.": "eAA="}),
        lambda d: d["folders"].update({"workspace/f": {"mode": 448, "xattrs": {}}}),
        lambda d: d["folders"].update({"workspace/f": {"mode": 448, "xattrs": {}, "empty": 0}}),
    ],
)
def test_a_damaged_sidecar_is_refused(
    change: Callable[[dict[str, dict[str, object]]], object],
) -> None:
    with pytest.raises(FormatError):
        parse_attributes(changed(change))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}\n{}", b'{"files":{},"files":{}}'])
def test_no_sidecar_at_all_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        parse_attributes(data)


@given(st.integers(0, 400), st.binary(max_size=3))
def test_bytes_cut_in_anywhere_give_a_sidecar_or_a_refusal(at: int, junk: bytes) -> None:
    data = encode_attributes(SAMPLE)
    damaged = data[:at] + junk + data[at + 1 :]
    try:
        sidecar = parse_attributes(damaged)
    except FormatError:
        return
    assert parse_attributes(encode_attributes(sidecar)) == sidecar


def test_privileges_never_travel() -> None:
    sidecar = Attributes(files={"workspace/x": Entry(DIGEST, 0, 0o6755)})
    assert parse_attributes(encode_attributes(sidecar)).files["workspace/x"].mode == 0o755


def test_attributes_of_the_machine_stay_on_it() -> None:
    kept = {"user.a": b"1"}
    others = {
        "security.capability": b"",
        "trusted.x": b"",
        "user.big": bytes(MAX_XATTR_VALUE_BYTES + 1),
        "user.\udce9": b"",
    }
    assert carried_xattrs({**kept, **others}) == kept
    sidecar = Attributes(folders={"skills": FolderEntry(0o700, {**kept, **others}, empty=False)})
    assert parse_attributes(encode_attributes(sidecar)).folders["skills"].xattrs == kept


def test_a_target_that_is_not_utf8_cannot_be_carried() -> None:
    assert target_problem("caf\udce9") is not None
    assert target_problem("café") is None


def test_a_path_that_the_format_refuses_is_never_written() -> None:
    with pytest.raises(AssertionError):
        encode_attributes(Attributes(links={"../etc/passwd": "x"}))
