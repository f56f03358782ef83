"""The network of the tests itself: what other tests rely on."""

from __future__ import annotations

import contextlib
import signal
import time
from typing import TYPE_CHECKING, Any

import hpkfs_native
import pytest

if TYPE_CHECKING:
    from support.homeserver import Testnet, User

pytestmark = pytest.mark.pubky
FOLDER = "/priv/hermes.pubky.app/v2/agents/default/"
WAIT_S = 20
ATTEMPTS = 5


@pytest.fixture
def client() -> hpkfs_native.Client:
    return hpkfs_native.Client(network="testnet", request_timeout_s=5, read_timeout_s=4)


@pytest.fixture
def user(testnet: Testnet) -> User:
    return testnet.new_user()


@pytest.fixture
def session(client: hpkfs_native.Client, user: User) -> hpkfs_native.Session:
    return client.restore(user.agent_grant()).wait(WAIT_S)


def error_of(call: hpkfs_native.Call[Any]) -> tuple[str, int | None]:
    with pytest.raises(hpkfs_native.NativeError) as failed:
        call.wait(WAIT_S)
    return failed.value.kind, failed.value.status


def test_what_is_put_is_a_file_of_the_homeserver(
    testnet: Testnet, user: User, session: hpkfs_native.Session
) -> None:
    session.put(f"{FOLDER}head.json", b"bytes").wait(WAIT_S)
    assert session.get(f"{FOLDER}head.json", limit=10).wait(WAIT_S) == b"bytes"
    files = [path for path in testnet.owner_folder(user).rglob("*") if path.is_file()]
    assert [path.name for path in files] == ["head.json"]


def test_a_paused_homeserver_answers_nothing(
    testnet: Testnet, session: hpkfs_native.Session
) -> None:
    session.put(f"{FOLDER}head.json", b"bytes").wait(WAIT_S)
    testnet.homeserver.pause()
    try:
        assert error_of(session.get(f"{FOLDER}head.json", limit=10)) == ("timeout", None)
    finally:
        testnet.homeserver.resume()
        testnet.homeserver.kill()  # the tests that follow want one that has not been stopped
    testnet.homeserver.start()
    assert in_the_end(session) == b"bytes"


def test_a_killed_homeserver_comes_back_with_its_data(
    testnet: Testnet, session: hpkfs_native.Session
) -> None:
    session.put(f"{FOLDER}head.json", b"bytes").wait(WAIT_S)
    testnet.homeserver.kill()
    kind, _ = error_of(session.get(f"{FOLDER}head.json", limit=10))
    assert kind in {"connection", "other", "timeout", "body"}
    testnet.homeserver.start()
    assert in_the_end(session) == b"bytes"


def test_a_quota_refuses_what_exceeds_it(user: User, session: hpkfs_native.Session) -> None:
    user.set_quota(1)
    # It answers and closes before it has read all; now and then that cuts its answer off.
    answers = {error_of(session.put(f"{FOLDER}big", bytes(2 << 20))) for _ in range(ATTEMPTS)}
    assert ("http", 507) in answers
    user.set_quota(None)
    session.put(f"{FOLDER}big", bytes(2 << 20)).wait(WAIT_S)


def test_revoked_grants_are_refused(
    client: hpkfs_native.Client, user: User, session: hpkfs_native.Session
) -> None:
    grant = session.export_grant()
    user.revoke_all()
    assert error_of(session.get(f"{FOLDER}head.json", limit=10)) == ("http", 401)
    kind, status = error_of(client.restore(grant))
    assert (kind, status) in {("refresh", 401), ("http", 401), ("auth", None)}


@pytest.fixture
def requests(session: hpkfs_native.Session) -> hpkfs_native.Session:
    session.put(f"{FOLDER}head.json", b"0123456789").wait(WAIT_S)
    return session


def in_the_end(session: hpkfs_native.Session) -> bytes:
    """Read the head; whoever was away may need a moment."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(hpkfs_native.NativeError):
            return session.get(f"{FOLDER}head.json", limit=10).wait(WAIT_S)
        time.sleep(0.5)
    return session.get(f"{FOLDER}head.json", limit=10).wait(WAIT_S)


def reconnect(session: hpkfs_native.Session) -> None:
    """Spend the connections that another way to the homeserver has ended."""
    for _ in range(2):
        with contextlib.suppress(hpkfs_native.NativeError):
            session.get(f"{FOLDER}head.json", limit=10).wait(WAIT_S)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("refuse", {"other", "connection"}),
        ("cut", {"body", "other", "decode"}),
        ("lose", {"other", "connection"}),
        ("endless", {"too-long"}),
        ("redirect", {"connection", "decode", "invalid", "http", "other"}),
        ("trickle", {"timeout"}),
        ("hang", {"timeout"}),
    ],
)
def test_each_fault_reaches_the_client(
    testnet: Testnet, requests: hpkfs_native.Session, action: str, expected: set[str]
) -> None:
    with testnet.proxy() as proxy:
        reconnect(requests)
        proxy.fault(action, path="head.json")
        kind, _ = error_of(requests.get(f"{FOLDER}head.json", limit=1_000))
        assert kind in expected
        assert proxy.count("GET", "head.json") >= 1


def test_false_answers_look_like_answers(testnet: Testnet, requests: hpkfs_native.Session) -> None:
    read = requests.get
    with testnet.proxy() as proxy:
        reconnect(requests)
        proxy.fault("truncate", path="head.json", times=1)
        assert read(f"{FOLDER}head.json", limit=100).wait(WAIT_S) == b"01234"
        reconnect(requests)
        proxy.fault("garbage", path="head.json", times=1)
        assert len(read(f"{FOLDER}head.json", limit=100).wait(WAIT_S)) == 10
        reconnect(requests)  # the proxy may have closed behind its last answer
        proxy.fault("html", path="head.json", times=1)
        assert read(f"{FOLDER}head.json", limit=100).wait(WAIT_S).startswith(b"<html>")
        proxy.fault("status", path="head.json", times=1, status=429)
        assert error_of(read(f"{FOLDER}head.json", limit=100)) == ("http", 429)
        assert read(f"{FOLDER}head.json", limit=100).wait(WAIT_S) == b"0123456789"
    assert [one.status for one in proxy.requests("GET", "head.json")][-1] == 200


def test_a_network_that_was_killed_is_started_again(testnet: Testnet) -> None:
    testnet._network.signal(signal.SIGKILL)
    user = testnet.new_user()
    assert user.agent_grant()
