"""What only a homeserver can suffer: other sessions, races for the head, lost and false answers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import hpkfs_native
import pytest
import trio

from hpkfs.core.uris import agent, template
from hpkfs.errors import (
    AuthorisationError,
    ConflictError,
    HpkfsError,
    IntegrityError,
    MissingObjectError,
    TransientError,
)
from hpkfs.transport.base import HEAD_NAME
from hpkfs.transport.pubky import PubkyTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.homeserver import Testnet, User

pytestmark = pytest.mark.pubky
LIMIT = 1 << 20
ROUNDS = 200


@pytest.fixture
def user(testnet: Testnet) -> User:
    return testnet.new_user()


def transport_of(user: User, grant: str | None = None) -> PubkyTransport:
    text = user.agent_grant() if grant is None else grant
    return PubkyTransport(agent(user.owner, "default"), network="testnet", grant=lambda: text)


def given(grant: str | None) -> Callable[[], str | None]:
    return lambda: grant


async def swapped(transport: PubkyTransport, expected: bytes | None, new: bytes) -> bool:
    try:
        await transport.swap_head(expected, new)
    except ConflictError:
        return False
    return True


async def test_of_two_writers_who_race_for_the_head_one_wins_each_round(user: User) -> None:
    writers = [transport_of(user), transport_of(user)]
    head: bytes | None = None
    for number in range(ROUNDS):
        won: dict[bytes, bool] = {}

        async def race(who: int, head: bytes | None, new: bytes, won: dict[bytes, bool]) -> None:
            won[new] = await swapped(writers[who], head, new)

        async with trio.open_nursery() as nursery:
            for who in range(2):
                nursery.start_soon(race, who, head, b"%d by %d" % (number, who), won)
        (winner,) = [new for new, did in won.items() if did]
        head = await writers[number % 2].get(HEAD_NAME, limit=LIMIT)
        assert head == winner


async def test_without_locks_the_head_is_put_and_read_back(testnet: Testnet, user: User) -> None:
    with testnet.proxy() as proxy:
        transport = transport_of(user)
        proxy.fault("status", method="LOCK", status=405)
        await transport.swap_head(None, b"one")
        await transport.swap_head(b"one", b"two")
        assert not await swapped(transport, b"one", b"three")
        assert await transport.get(HEAD_NAME, limit=LIMIT) == b"two"
        assert proxy.count("LOCK") == 2


async def test_a_server_that_had_locks_is_not_written_to_without_one(
    testnet: Testnet, user: User
) -> None:
    with testnet.proxy() as proxy:
        transport = transport_of(user)
        await transport.swap_head(None, b"one")
        proxy.fault("status", method="LOCK", status=405)
        with pytest.raises(TransientError):
            await transport.swap_head(b"one", b"two")
        assert await transport.get(HEAD_NAME, limit=LIMIT) == b"one"


async def test_a_head_whose_answer_was_lost_is_looked_up(testnet: Testnet, user: User) -> None:
    with testnet.proxy() as proxy:
        transport = transport_of(user)
        await transport.swap_head(None, b"one")
        proxy.fault("lose", method="PUT", path="head.json")
        await transport.swap_head(b"one", b"two")
        assert await transport.get(HEAD_NAME, limit=LIMIT) == b"two"


async def test_a_session_that_another_process_has_ended_is_opened_again(user: User) -> None:
    grant = user.agent_grant()
    one, other = transport_of(user, grant), transport_of(user, grant)
    for number in range(3):
        await one.swap_head(b"%d" % number if number else None, b"other %d" % number)
        await other.swap_head(b"other %d" % number, b"%d" % (number + 1))


async def test_a_revoked_grant_needs_a_login_and_a_new_one_heals(user: User) -> None:
    grants = [user.agent_grant()]
    store = agent(user.owner, "default")
    transport = PubkyTransport(store, network="testnet", grant=lambda: grants[-1])
    await transport.swap_head(None, b"one")
    user.revoke_all()
    for _ in range(2):
        with pytest.raises(AuthorisationError) as caught:
            await transport.get(HEAD_NAME, limit=LIMIT)
        assert "hpkfs login" in str(caught.value)
        assert grants[0] not in str(caught.value)
    grants.append(user.agent_grant())
    assert await transport.get(HEAD_NAME, limit=LIMIT) == b"one"


async def test_no_grant_and_a_grant_of_another_owner_need_a_login(
    testnet: Testnet, user: User
) -> None:
    store = agent(user.owner, "default")
    stranger = testnet.new_user().agent_grant()
    for grant in (None, "", "no grant", stranger):
        transport = PubkyTransport(store, network="testnet", grant=given(grant))
        with pytest.raises(AuthorisationError):
            await transport.get(HEAD_NAME, limit=LIMIT)


async def test_a_signed_out_grant_is_worth_nothing(user: User) -> None:
    grant = user.agent_grant()
    transport = transport_of(user, grant)
    await transport.swap_head(None, b"one")
    await transport.sign_out()
    with pytest.raises(AuthorisationError):
        await transport_of(user, grant).get(HEAD_NAME, limit=LIMIT)


async def test_a_template_is_read_without_a_login(testnet: Testnet, user: User) -> None:
    client = hpkfs_native.Client(network="testnet", request_timeout_s=20, read_timeout_s=10)
    folder = "/pub/hermes.pubky.app/v2/templates/shared/"
    session = client.restore(user.grant(f"{folder}:rw")).wait()
    session.put(f"{folder}head.json", b"public").wait()
    transport = PubkyTransport(template(user.owner, "shared"), network="testnet")
    assert await transport.get(HEAD_NAME, limit=LIMIT) == b"public"
    assert not transport.capabilities.writable


async def test_more_than_a_thousand_snapshots_are_listed(user: User) -> None:
    transport = transport_of(user)
    ids = [f"{number:032x}" for number in range(1_005)]
    async with trio.open_nursery() as nursery:
        for snapshot_id in ids:
            nursery.start_soon(transport.put, f"snapshots/{snapshot_id}.json", b"{}")
    assert await transport.list_snapshots() == ids


async def test_requests_on_dead_connections_are_sent_again_by_reconnect(
    testnet: Testnet, user: User
) -> None:
    with testnet.proxy() as proxy:
        transport = transport_of(user)
        await transport.swap_head(None, b"one")
        hang = proxy.fault("hang", method="GET")
        found: list[bytes] = []

        async def read() -> None:
            found.append(await transport.get(HEAD_NAME, limit=LIMIT))

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                while not proxy.count("GET"):  # noqa: ASYNC110 - the proxy runs on threads
                    await trio.sleep(0.01)
                proxy.faults.remove(hang)
                transport.reconnect()
        assert found == [b"one"]


@pytest.mark.parametrize(
    ("action", "error"),
    [
        ("endless", IntegrityError),
        ("redirect", TransientError),
        ("refuse", TransientError),
        ("cut", TransientError),
    ],
)
async def test_a_hostile_answer_is_an_error_of_ours(
    testnet: Testnet, user: User, action: str, error: type[HpkfsError]
) -> None:
    name = f"objects/{hashlib.sha256(b'0123456789').hexdigest()}.bin"
    with testnet.proxy() as proxy:
        transport = transport_of(user)
        await transport.put(name, b"0123456789")
        proxy.fault(action, method="GET")
        with pytest.raises(error) as caught:
            await transport.get(name, limit=10)
        assert not isinstance(caught.value, MissingObjectError)
        proxy.faults.clear()
        assert await transport.get(name, limit=10) == b"0123456789"


async def test_a_homeserver_that_was_killed_is_waited_for(testnet: Testnet, user: User) -> None:
    transport = transport_of(user)
    await transport.swap_head(None, b"one")
    testnet.homeserver.kill()
    with pytest.raises(TransientError):
        await transport.get(HEAD_NAME, limit=LIMIT)
    testnet.homeserver.start()
    await transport.swap_head(b"one", b"two")
    assert await transport.get(HEAD_NAME, limit=LIMIT) == b"two"
