"""Memory that concurrent requests share: each reserves its own before it decodes anything, and waits where it must."""

import asyncio


class MemoryBudget:
    """At most `limit` bytes are reserved at once; requests get theirs in the order in which they come."""

    def __init__(self, limit: int) -> None:
        self.limit, self._used = limit, 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def reserve(self, size: int) -> None:
        """Return once `size` bytes are there, which must not be more than `limit`."""
        async with self._turn:
            while self._used + size > self.limit:
                self._freed.clear()
                await self._freed.wait()
            self._used += size

    def release(self, size: int) -> None:
        """Give `size` bytes back; on the event loop's own thread."""
        self._used -= size
        self._freed.set()
