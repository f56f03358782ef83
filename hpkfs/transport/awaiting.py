"""A call of the Pubky module, awaited from trio: no thread waits, a cancelled one is aborted."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import trio

if TYPE_CHECKING:
    from hpkfs_native import Call

_T = TypeVar("_T")


async def finished(call: Call[_T]) -> _T:
    """Wait for the end of a call.

    When the caller is cancelled, so is the request; a write may have been carried out all the same.

    Raises:
        NativeError: it failed.
    """
    token = trio.lowlevel.current_trio_token()
    ended = trio.Event()

    def tell() -> None:
        with contextlib.suppress(trio.RunFinishedError):  # nobody waits any more
            token.run_sync_soon(ended.set)

    call.on_done(tell)
    try:
        await ended.wait()
    except BaseException:
        call.cancel()
        raise
    return call.result()
