"""What travels, what stays, and what is secret, by name and by a key's first bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpkfs.core.policy import (
    EMPTY_IGNORE,
    Decision,
    IgnoreFile,
    Policy,
    Rule,
    looks_like_private_key,
    parse_ignore,
)
from hpkfs.errors import FormatError

VECTORS = Path(__file__).parents[1] / "data" / "vectors"
EXCLUSIONS = json.loads((VECTORS / "10-exclusions.json").read_text())
IGNORES = json.loads((VECTORS / "10-pubkyignore.json").read_text())

# The peer uploads these; the design calls them secrets (docs/design.md, "What the mount shows").
OURS_ONLY = {".netrc", ".npmrc", ".ssh/config"}

PLAIN = Policy(EMPTY_IGNORE)


def rule(local: str, *, is_folder: bool = False, policy: Policy = PLAIN) -> Rule:
    return policy.decide(local, is_folder=is_folder).rule


@pytest.mark.parametrize("case", EXCLUSIONS, ids=lambda case: case["path"])
@pytest.mark.parametrize("tree", ["workspace", "skills"])
def test_names_are_left_out_as_by_the_peer(tree: str, case: dict[str, object]) -> None:
    captured = case["captured"] and case["path"] not in OURS_ONLY
    assert (rule(f"{tree}/{case['path']}") is Rule.TRAVELLING) == captured


@pytest.mark.parametrize("path", sorted(OURS_ONLY))
def test_more_names_are_secret_than_by_the_peer(path: str) -> None:
    vector = next(case for case in EXCLUSIONS if case["path"] == path)
    assert vector["captured"], "the vectors agree with us now; drop it from OURS_ONLY"
    assert PLAIN.decide(f"workspace/{path}", is_folder=False) == Decision(
        Rule.SECRET, "is named like a secret"
    )


@pytest.mark.parametrize(
    "path",
    ["SOUL.md", "memories/USER.md", "memories/MEMORY.md", "state.db", "skills/a/SKILL.md",
     "skills/.usage.json", "skills/.archive/x", "skills/.curator_state",
     "skills/.bundled_manifest", "workspace/AGENTS.md", "workspace/Cargo.lock",
     "workspace/x.tmpl", "workspace/notes.tmp.md", "workspace/.hub/x", "workspace/SOUL.md",
     "workspace/config.yaml", "workspace/state.db", "workspace/.aws/config",
     "workspace/credentials", "workspace/.ssh", "workspace/meetings/notes.md"],
)  # fmt: skip
def test_it_travels(path: str) -> None:
    assert PLAIN.decide(path, is_folder=False) == Decision(Rule.TRAVELLING, "")


@pytest.mark.parametrize(
    "path",
    ["", "config.yaml", "state.db-wal", "state.db-shm", "state.db-journal", "logs/agent.log",
     "plugins/x/__init__.py", "memories", "memories/OTHER.md", "memories/MEMORY.md.lock",
     "memories/.mem_1.tmp", "memories/USER.md/x", "skills", "skills/.hub/index.json",
     "skills/.curator_backups/1/x", "skills/.usage.json.lock", "skills/a/.SKILL.md.tmp.ab12",
     "skills/a/x.tmp", "workspace", "workspace/.git/config", "nobody/knows", ".hpkfs/status.json",
     "soul.md", "SOUL.md/x", "state.db/x", "workspaces/x"],
)  # fmt: skip
def test_it_stays_here_without_a_word(path: str) -> None:
    assert PLAIN.decide(path, is_folder=False) == Decision(Rule.LOCAL, "")


@pytest.mark.parametrize(
    "path",
    [".env", "auth.json", "auth/google_oauth.json", "mcp-tokens/x/y", "pairing/telegram.json",
     "google_chat_user_1.json", "platforms/matrix/store/db", "cache/bws_cache.json"],
)  # fmt: skip
def test_a_secret_outside_what_travels_is_named_nowhere(path: str) -> None:
    assert PLAIN.decide(path, is_folder=False) == Decision(Rule.SECRET, "")


@pytest.mark.parametrize(
    "path",
    ["workspace/meetings/node_token.json", "workspace/.pypirc", "skills/x/.netrc",
     "workspace/a/.ssh/known_hosts", "workspace/.aws/credentials", "skills/.aws/credentials",
     "workspace/.env", "workspace/deep/.env.production", "workspace/id_ed25519"],
)  # fmt: skip
def test_a_secret_among_what_travels_is_named_with_its_reason(path: str) -> None:
    assert PLAIN.decide(path, is_folder=False) == Decision(Rule.SECRET, "is named like a secret")


@pytest.mark.parametrize("name", [".git", ".venv", "node_modules", "__pycache__", "target"])
def test_a_folder_of_that_name_is_local_and_a_file_travels(name: str) -> None:
    assert rule(f"workspace/{name}", is_folder=True) is Rule.LOCAL
    assert rule(f"workspace/{name}") is Rule.TRAVELLING
    assert PLAIN.prunes(f"workspace/{name}")
    assert PLAIN.prunes(f"workspace/{name}/below")


@pytest.mark.parametrize("name", ["x.tmp", ".env", "auth.json", "notes~", "x.tmp.y"])
def test_a_folder_named_like_a_local_file_travels(name: str) -> None:
    assert rule(f"workspace/{name}", is_folder=True) is Rule.TRAVELLING
    assert rule(f"workspace/{name}/a.md") is Rule.TRAVELLING


@pytest.mark.parametrize("name", ["SOUL.md", "state.db", "memories/USER.md", "config.yaml"])
def test_a_folder_in_the_place_of_a_file_is_local(name: str) -> None:
    assert rule(name, is_folder=True) is Rule.LOCAL


def test_a_walk_enters_only_where_something_can_travel() -> None:
    entered = ["", "memories", "skills", "skills/a", "workspace", "workspace/a/b"]
    assert [folder for folder in entered if PLAIN.prunes(folder)] == []
    pruned = ["logs", "memories/x", "skills/.hub", "workspace/.ssh", ".hpkfs", "cache/images"]
    assert [folder for folder in pruned if not PLAIN.prunes(folder)] == []


def test_an_ignored_path_is_local_with_its_reason_and_an_ignored_folder_is_not_walked() -> None:
    policy = Policy(parse_ignore(b"data/\nnotes/draft.md\n"))
    ignored = Decision(Rule.LOCAL, "is listed in .pubkyignore")
    assert policy.decide("workspace/data/x/y", is_folder=False) == ignored
    assert policy.decide("workspace/data", is_folder=True) == ignored
    assert policy.prunes("workspace/data")
    assert policy.decide("workspace/notes/draft.md", is_folder=False) == ignored
    assert rule("workspace/data", policy=policy) is Rule.TRAVELLING  # a file of that name
    assert rule("skills/data/x", policy=policy) is Rule.TRAVELLING
    assert rule("workspace/data/.env", policy=policy) is Rule.SECRET


def test_an_ignored_name_is_compared_in_its_composed_form() -> None:
    policy = Policy(parse_ignore("cafe\u0301/\n".encode()))
    assert rule("workspace/caf\u00e9/x", policy=policy) is Rule.LOCAL
    assert rule("workspace/cafe\u0301/x", policy=policy) is Rule.LOCAL


@pytest.mark.parametrize("case", IGNORES, ids=lambda case: repr(case["text"]))
def test_ignore_files_are_read_as_by_the_peer(case: dict[str, object]) -> None:
    text = case["text"]
    assert isinstance(text, str)
    if not case["accepted"]:
        with pytest.raises(FormatError):
            parse_ignore(text.encode())
        return
    ignore, expected = parse_ignore(text.encode()), case["ignores"]
    assert isinstance(expected, dict)
    assert {path: ignore.covers(path) for path in expected} == expected


def test_an_ignore_file_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(FormatError, match="not UTF-8"):
        parse_ignore(b"caf\xe9\n")


def test_a_refused_line_is_named_by_its_number() -> None:
    with pytest.raises(FormatError, match="line 3 "):
        parse_ignore(b"# notes\na.txt\n*.log\n")


def test_travel_entries_travel_with_what_is_below_them() -> None:
    policy = Policy(EMPTY_IGNORE, ("kanban.db", "cron/jobs.json", "skins/"))
    for path in ("kanban.db", "cron/jobs.json", "skins/dark.yaml", "skins/a/b"):
        assert rule(path, policy=policy) is Rule.TRAVELLING, path
    for path in ("cron/executions.db", "kanban.db-wal", "skins/.git/config", "skinsx", "skins2/x"):
        assert rule(path, policy=policy) is Rule.LOCAL, path
    assert rule("skins", is_folder=True, policy=policy) is Rule.TRAVELLING
    assert not policy.prunes("cron")
    assert not policy.prunes("skins")
    assert policy.prunes("logs")
    assert rule("cron", is_folder=True, policy=policy) is Rule.LOCAL


@pytest.mark.parametrize("entry", [".env", "mcp-tokens/", "auth/", "config.yaml", "state.db-wal"])
def test_no_travel_entry_makes_a_secret_or_a_machine_file_travel(entry: str) -> None:
    policy = Policy(EMPTY_IGNORE, (entry,))
    for path in (entry.rstrip("/"), entry.rstrip("/") + "/x"):
        assert rule(path, policy=policy) is not Rule.TRAVELLING
    assert policy.prunes(entry.rstrip("/"))


def test_a_secret_below_a_travel_entry_stays_and_is_named() -> None:
    policy = Policy(EMPTY_IGNORE, ("platforms",))
    named = Decision(Rule.SECRET, "is named like a secret")
    assert policy.decide("platforms/pairing/x", is_folder=False) == named
    assert policy.decide("platforms/slack/.env", is_folder=False) == named
    assert rule("platforms/slack/x", policy=policy) is Rule.TRAVELLING


def test_a_name_that_is_not_utf8_is_decided_like_any_other() -> None:
    assert rule("workspace/caf\udce9") is Rule.TRAVELLING
    assert rule("workspace/.git/caf\udce9") is Rule.LOCAL
    assert rule("caf\udce9") is Rule.LOCAL


names = st.sampled_from(
    ["a", "skills", "workspace", "memories", "USER.md", ".git", ".env", ".ssh", ".aws", ".hub",
     "credentials", "x.tmp", "a.tmp.b", "build", "data", "logs", "SOUL.md", "state.db", "auth"]
)  # fmt: skip
local_paths = st.lists(names, min_size=1, max_size=5).map("/".join)
policies = st.builds(
    Policy,
    st.builds(
        IgnoreFile,
        st.frozensets(local_paths, max_size=3),
        st.lists(local_paths.map(lambda path: path + "/"), max_size=2).map(tuple),
    ),
    st.lists(local_paths, max_size=3).map(tuple),
)


@given(policies, local_paths, st.booleans())
def test_nothing_travels_below_a_folder_that_a_walk_does_not_enter(
    policy: Policy, path: str, is_folder: bool
) -> None:
    parts = path.split("/")
    folders = ["/".join(parts[:depth]) for depth in range(len(parts))]
    if any(policy.prunes(folder) for folder in folders):
        assert rule(path, is_folder=is_folder, policy=policy) is not Rule.TRAVELLING


@given(policies, local_paths, st.booleans())
def test_what_travels_has_no_reason_and_decisions_repeat(
    policy: Policy, path: str, is_folder: bool
) -> None:
    decision = policy.decide(path, is_folder=is_folder)
    assert decision == policy.decide(path, is_folder=is_folder)
    assert not (decision.rule is Rule.TRAVELLING and decision.reason)


# The words are apart here, so that no scanner takes this file for a key.
KEY = "PRIVATE" + " KEY"


@pytest.mark.parametrize(
    "kind", ["", "RSA ", "EC ", "DSA ", "OPENSSH ", "ENCRYPTED ", "ED25519 "]
)  # fmt: skip
def test_a_private_key_is_known_by_its_header(kind: str) -> None:
    header = f"-----BEGIN {kind}{KEY}-----\n".encode()
    assert looks_like_private_key(header)
    assert looks_like_private_key(b"\xef\xbb\xbfBag Attributes\n" + header)
    assert looks_like_private_key(b"x" * 199 + header)
    assert not looks_like_private_key(b"x" * 200 + header)


def test_further_kinds_of_private_keys_are_known() -> None:
    assert looks_like_private_key(f"-----BEGIN PGP {KEY} BLOCK-----\n".encode())
    assert looks_like_private_key(f"---- BEGIN SSH2 ENCRYPTED {KEY} ----\n".encode())
    assert looks_like_private_key(b"PuTTY-User-Key-File-3: ssh-ed25519\r\n")


@pytest.mark.parametrize(
    "beginning",
    [b"", b"-----BEGIN PUBLIC KEY-----\n", b"-----BEGIN RSA PUBLIC KEY-----\n",
     b"-----BEGIN CERTIFICATE-----\n", b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n",
     b"-----BEGIN PGP SIGNATURE-----\n", b"ssh-ed25519 AAAAC3Nza", b"SQLite format 3\0",
     b"---- BEGIN SSH2 PUBLIC KEY ----\n", b"about PuTTY-User-Key-File-2",
     b"-----BEGIN lower PRIVATE " + b"KEY-----"],
)  # fmt: skip
def test_public_keys_and_other_files_are_no_private_keys(beginning: bytes) -> None:
    assert not looks_like_private_key(beginning)
