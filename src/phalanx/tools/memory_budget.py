"""A memory budget for concurrent requests: each reserves memory before it decodes images, waiting if necessary."""

import asyncio


class MemoryBudget:
    """At most `limit` bytes are reserved at once; requests are served in the order of their arrival."""

    def __init__(self, limit: int) -> None:
        self.limit, self._used = limit, 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def reserve(self, size: int) -> None:
        """Wait until `size` bytes, at most `limit`, are available, and reserve them."""
        async with self._turn:
            while self._used + size > self.limit:
                self._freed.clear()
                await self._freed.wait()
            self._used += size

    def release(self, size: int) -> None:
        """Release `size` bytes; call this on the event loop's thread."""
        self._used -= size
        self._freed.set()
