"""The vectors of the format: what the other v2 program computes, we compute too."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpkfs.core.canonical import encode
from hpkfs.core.chunks import build_record, parse_object_name
from hpkfs.core.documents import (
    Head,
    Reference,
    Runtime,
    Snapshot,
    encode_head,
    encode_snapshot,
    parse_head,
    parse_snapshot,
    record_to_json,
)
from hpkfs.core.ids import Digest, SnapshotId, sha256_hex
from hpkfs.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Callable

DATA = Path(__file__).parents[1] / "data"
VECTORS = DATA / "vectors"
REFUSED_BEYOND_THE_PEER = {
    "lenient/008-snapshot-agent-newline.json",
    "lenient/009-snapshot-id-newline.json",
    "lenient/010-snapshot-ext-newline.json",
    "lenient/022-snapshot-parent-self.json",
}
PARSERS: dict[str, Callable[[bytes], object]] = {
    "head": lambda data: parse_head(data, kind="agent"),
    "template-head": lambda data: parse_head(data, kind="template"),
    "snapshot": lambda data: parse_snapshot(data, kind="agent"),
    "template-snapshot": lambda data: parse_snapshot(data, kind="template"),
}


@cache
def load(name: str, root: Path = VECTORS) -> Any:
    return json.loads((root / name).read_bytes())


def content(case: dict[str, Any]) -> bytes:
    given = case["input"]
    if "text" in given:
        return str(given["text"]).encode()
    if "hex" in given:
        return bytes.fromhex(given["hex"])
    return b"".join(bytes.fromhex(part["hex"]) * part["times"] for part in given["repeat"])


def rebuild(store: Path, snapshot: Snapshot) -> dict[str, bytes]:
    """Put every file of a snapshot together, checking each digest and size on the way."""
    files = {}
    for path, record in snapshot.files.items():
        parts = [(piece, (store / piece.object).read_bytes()) for piece in record.pieces]
        assert all((sha256_hex(d), len(d)) == (piece.sha256, piece.size) for piece, d in parts)
        files[path] = b"".join(data for _, data in parts)
        assert (sha256_hex(files[path]), len(files[path])) == (record.sha256, record.size)
    return files


def chain(store: Path, owner_id: str) -> list[tuple[Snapshot, bytes]]:
    """Follow the parents from the head, newest first."""
    head = parse_head((store / "head.json").read_bytes(), owner_id=owner_id)
    found = []
    reference: Reference | None = Reference(head.snapshot_id, head.sha256)
    while reference is not None:
        data = (store / f"snapshots/{reference.snapshot_id}.json").read_bytes()
        found.append((parse_snapshot(data, owner_id=owner_id, reference=reference), data))
        reference = found[-1][0].parent
    return found


def summary(snapshot: Snapshot) -> dict[str, dict[str, object]]:
    return {
        path: {
            "sha256": record.sha256,
            "size": record.size,
            "executable": record.executable,
            "pieces": len(record.pieces),
        }
        for path, record in snapshot.files.items()
    }


def test_no_vector_is_lost() -> None:
    index = load("index.json")
    assert index["counts"] == {
        "negative": len(load("08-negative.json")),
        "lenient": len(load("08-lenient.json")),
        "objects": len(load("01-objects.json")),
    }
    for name in ("negative", "lenient"):
        listed = {case["file"] for case in load(f"08-{name}.json")}
        assert listed == {f"{name}/{path.name}" for path in (VECTORS / name).iterdir()}
    for name in ("snapshot", "head"):
        data = (VECTORS / f"02-minimal/{name}.json").read_bytes()
        assert len(data) == index["minimal"][f"{name}Bytes"]
        assert sha256_hex(data) == index["minimal"][f"{name}Sha256"]


@pytest.mark.parametrize("case", load("01-objects.json"), ids=lambda case: case["name"])
def test_files_are_cut_and_named_as_the_peer_does_it(case: dict[str, Any]) -> None:
    executable = bool(int(case.get("mode", "0"), 8) & 0o100)
    if case.get("refused"):
        with pytest.raises(FormatError):
            build_record(case["logicalPath"], content(case), executable=executable)
        return
    record, objects = build_record(case["logicalPath"], content(case), executable=executable)
    assert record_to_json(record) == case["record"]
    assert sorted(objects) == sorted(case["objects"])
    for name, data in objects.items():
        assert parse_object_name(name)[0] == sha256_hex(data)


def test_the_minimal_documents_are_built_from_their_values_to_the_byte() -> None:
    snapshot = Snapshot(
        kind="agent",
        owner_id="default",
        name="",
        snapshot_id=SnapshotId("0123456789abcdef0123456789abcdef"),
        parent=None,
        created_at="2026-01-02T03:04:05Z",
        device_id="fedcba9876543210fedcba9876543210",
        runtime=Runtime("hermes", "0.21.3", "hermes-0.21-sqlite30-v1"),
        last_session_id=None,
        template=None,
        description="",
        files={},
    )
    data = encode_snapshot(snapshot)
    assert data == (VECTORS / "02-minimal/snapshot.json").read_bytes()
    head = Head("agent", "default", snapshot.snapshot_id, sha256_hex(data))
    assert encode_head(head) == (VECTORS / "02-minimal/head.json").read_bytes()
    assert parse_snapshot(data) == snapshot
    assert parse_head(encode_head(head)) == head


def test_the_remote_folder_of_the_peer_is_read_and_every_file_rebuilt() -> None:
    expected = load("03-remote.expected.json")
    store = VECTORS / "03-remote"
    found = chain(store, expected["agentId"])
    assert len(found) == len(expected["history"]) == 2
    used = set()
    for (snapshot, data), wanted in zip(reversed(found), expected["history"], strict=True):
        assert (snapshot.snapshot_id, sha256_hex(data), len(data)) == (
            wanted["snapshotId"],
            wanted["sha256"],
            wanted["bytes"],
        )
        parent = wanted["parent"]
        assert snapshot.parent == (
            parent and Reference(SnapshotId(parent["snapshotId"]), Digest(parent["sha256"]))
        )
        assert summary(snapshot) == wanted["files"]
        assert encode_snapshot(snapshot) == data
        assert rebuild(store, snapshot).keys() == wanted["files"].keys()
        used |= {piece.object for record in snapshot.files.values() for piece in record.pieces}
    assert used == {f"objects/{path.name}" for path in (store / "objects").iterdir()}


def test_the_files_of_the_remote_folder_are_cut_as_we_would_cut_them() -> None:
    store = VECTORS / "03-remote"
    for snapshot, _ in chain(store, "demo"):
        for path, data in rebuild(store, snapshot).items():
            record = snapshot.files[path]
            assert build_record(path, data, executable=record.executable)[0] == record


def test_the_template_is_read_and_written_and_its_review_text_agrees() -> None:
    expected = load("04-template/expected.json")
    store = VECTORS / "04-template/remote"
    ((snapshot, data),) = chain(store, "demo-template")
    assert snapshot.kind == "template"
    assert encode_snapshot(snapshot) == data
    head = parse_head((store / "head.json").read_bytes(), kind="template")
    assert encode_head(head) == (store / "head.json").read_bytes()
    assert summary(snapshot) == expected["files"]
    runtime = snapshot.runtime
    lines = [
        f"templateId={snapshot.owner_id}",
        f"name={snapshot.name}",
        f"description={snapshot.description}",
        f"runtime={runtime.name}/{runtime.version}/{runtime.adapter}",
        *(
            f"{path}\t{record.sha256}\t{record.size}\t{int(record.executable)}"
            for path, record in sorted(snapshot.files.items())
        ),
    ]
    assert "\n".join(lines) == expected["reviewText"]
    assert sha256_hex("\n".join(lines).encode()) == expected["reviewDigest"]


def test_the_files_of_the_template_are_those_of_the_bundle() -> None:
    store, bundle = VECTORS / "04-template/remote", VECTORS / "04-template/bundle"
    ((snapshot, _),) = chain(store, "demo-template")
    for path, data in rebuild(store, snapshot).items():
        name = path.removeprefix("profile/").removeprefix("workspace/").removeprefix("config/")
        assert data == (bundle / name).read_bytes()


def test_the_full_snapshot_is_re_encoded_to_the_byte() -> None:
    data = (VECTORS / "05-full-snapshot.json").read_bytes()
    expected = load("05-full-snapshot.expected.json")
    assert (sha256_hex(data), len(data)) == (expected["sha256"], expected["size"])
    snapshot = parse_snapshot(data, owner_id="full_agent-1")
    assert encode_snapshot(snapshot) == data
    assert list(snapshot.files) == expected["fileOrder"]
    assert list(json.loads(encode_snapshot(snapshot))["files"]) == expected["fileOrder"]


@pytest.mark.parametrize(
    "case", load("06-canonical-json.json"), ids=lambda case: case["sha256"][:8]
)
def test_values_are_encoded_to_the_canonical_bytes(case: dict[str, Any]) -> None:
    assert encode(case["value"]).hex() == case["utf8Hex"]
    assert sha256_hex(encode(case["value"])) == case["sha256"]


@pytest.mark.parametrize("case", load("08-negative.json"), ids=lambda case: Path(case["file"]).stem)
def test_a_negative_document_is_refused(case: dict[str, Any]) -> None:
    data = (VECTORS / case["file"]).read_bytes()
    assert sha256_hex(data) == case["sha256"]
    with pytest.raises(FormatError):
        PARSERS[case["parser"]](data)


@pytest.mark.parametrize("case", load("08-lenient.json"), ids=lambda case: Path(case["file"]).stem)
def test_an_odd_document_is_read_except_where_we_refuse_more(case: dict[str, Any]) -> None:
    data = (VECTORS / case["file"]).read_bytes()
    assert sha256_hex(data) == case["sha256"]
    if case["file"] in REFUSED_BEYOND_THE_PEER:
        with pytest.raises(FormatError):
            PARSERS[case["parser"]](data)
        return
    encoded = encode_snapshot(parse_snapshot(data))
    assert (encoded == data) is case["canonical"]
    assert sha256_hex(encoded) == case["canonicalSha256"]


def test_whatever_we_refuse_beyond_the_peer_is_a_vector() -> None:
    assert {case["file"] for case in load("08-lenient.json")} >= REFUSED_BEYOND_THE_PEER


@pytest.mark.parametrize("case", load("09-references.json"), ids=lambda case: case["label"])
def test_a_snapshot_must_be_the_one_that_its_reference_names(case: dict[str, Any]) -> None:
    data = (VECTORS / case["document"]).read_bytes()
    data = data.removesuffix(b"\n") if case["dropFinalNewline"] else data
    reference = Reference(SnapshotId(case["referenceSnapshotId"]), Digest(case["referenceSha256"]))
    if case["accepted"]:
        assert parse_snapshot(data, reference=reference).snapshot_id == reference.snapshot_id
    else:
        with pytest.raises(FormatError):
            parse_snapshot(data, reference=reference)


def test_the_genuine_store_of_hermes_0_19_is_read_and_every_file_rebuilt() -> None:
    expected = load("expected.json", DATA / "hermes-0.19")
    store = DATA / "hermes-0.19/store"
    found = chain(store, "default")
    used = set()
    for (snapshot, data), wanted in zip(found, expected["checkpoints"], strict=True):
        assert encode_snapshot(snapshot) == data
        assert snapshot.snapshot_id == wanted["snapshotId"]
        assert sha256_hex(data) == wanted["sha256"]
        assert (snapshot.created_at, snapshot.last_session_id, len(snapshot.files)) == (
            wanted["createdAt"],
            wanted["lastSessionId"],
            wanted["files"],
        )
        for path, content_ in rebuild(store, snapshot).items():
            record = snapshot.files[path]
            assert build_record(path, content_, executable=record.executable)[0] == record
        used |= {piece.object for record in snapshot.files.values() for piece in record.pieces}
    assert summary(found[0][0]) == expected["files"]
    assert used == {f"objects/{path.name}" for path in (store / "objects").iterdir()}
    head = (store / "head.json").read_bytes()
    assert json.loads(head) == expected["head"]
    assert encode_head(parse_head(head)) == head
