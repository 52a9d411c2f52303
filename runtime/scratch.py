"""Scratch memory: blocks that calls of one stream hand on to each other, in the order of the stream.

A call takes one block for all its scratch and temporaries, and one more for scratch that is all zeros between
launches, where its kernels ask for that; it puts them back once its work is queued; the next
call on the same stream may have it, because that work runs later. Threads that queue on one stream at once
take different blocks. A block is never given to another stream, and is freed only when its device is closed
or its stream released: a CUDA graph may still use what was outgrown.
"""

import ctypes
import threading
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from kiln.runtime.errors import ContractError, UnavailableError
from kiln.runtime.record import record
from kiln.runtime.release import every

ALIGN = 256
"""Every block, and every buffer in one, starts at a multiple of this."""
GRAIN = 2 << 20
"""Blocks grow by multiples of this many bytes."""


@record
class ScratchPolicy:
    """How a device hands out scratch memory.

    Attributes:
        pool: keep blocks for the next call; False allocates and frees at each call, in stream order.
        poison: fill each block with 0xff bytes before each call that takes it, on the call's stream; never
            while that is captured.
    """

    pool: bool = True
    poison: bool = False


class Memory(Protocol):
    """Where blocks come from.

    Attributes:
        deferred: whether work that uses a block may still be queued when its call returns.
    """

    deferred: bool

    def allocate(self, size: int, stream: int, zeroed: bool = False) -> int:
        """The address of new memory, all zeros if asked for, that work on any stream may use from now on."""

    def free(self, address: int) -> None:
        """Give memory back, after all work that is queued."""

    def allocate_ordered(self, size: int, stream: int, zeroed: bool = False) -> int:
        """The address of new memory, all zeros if asked for, for work queued on the stream from now on."""

    def free_ordered(self, address: int, stream: int) -> None:
        """Give it back after the work queued on the stream so far."""

    def fill(self, address: int, size: int, stream: int) -> None:
        """Queue filling it with 0xff bytes."""

    def capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""

    def synchronize(self, stream: int) -> None:
        """Wait for the work queued on the stream."""

    def check_shared(self, stream: int) -> None:
        """Refuse (UnavailableError) a handle that is another stream in each thread: its blocks would pass
        between streams that know nothing of each other's order."""


class Block(NamedTuple):
    """Memory of one stream.

    Attributes:
        address: a multiple of ALIGN.
        size: bytes.
        stream: the stream whose work may use it.
        owned: whether the pool frees it; False for the caller's buffer.
    """

    address: int
    size: int
    stream: int
    owned: bool = True


ABSENT = Block(0, 0, 0, False)
"""The block of a launch that needs none."""


class Counters(NamedTuple):
    """What a pool has done: calls served from a block that was there, growths, poison fills; and the blocks
    and bytes of its own that it holds."""

    hits: int
    growths: int
    fills: int
    blocks: int
    bytes: int


class BlockPool:
    """One kind of scratch memory of a device. Taking a block that is there costs no lock and no driver call.

    Zeroed blocks are filled with zeros when they are allocated and never again: each kernel leaves them so.
    """

    def __init__(self, memory: Memory, policy: ScratchPolicy, zeroed: bool = False) -> None:
        self.policy = policy
        self.kind = "zeroed scratch" if zeroed else "scratch"
        """How messages call its memory."""
        self._zeroed = zeroed
        self._memory = memory
        self._lock = threading.Lock()
        self._free: dict[int, list[Block]] = {}
        self._given: set[int] = set()
        self._retired: list[Block] = []
        self._hits = self._growths = self._fills = 0
        self._held = (0, 0)

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        return Counters(self._hits, self._growths, self._fills, *self._held)

    def take(self, size: int, stream: int) -> Block | None:
        """A block of at least `size` bytes that is there; None where the pool would have to grow."""
        try:
            block = self._free[stream].pop()
        except (KeyError, IndexError):
            return None
        if block.size < size:
            self._free[stream].append(block)
            return None
        self._hits += 1
        return self._poisoned(block)

    def grow(self, size: int, stream: int, label: str) -> Block:
        """A new block of at least `size` bytes; one that it outgrows is retired, not freed.

        Args:
            size: bytes.
            stream: the stream whose calls will use it.
            label: who asks, as messages call it.

        Raises:
            UnavailableError: the stream is being captured or each thread's own, or its memory is the
                caller's.
            DriverError: there is no more memory.
        """
        if self.policy.pool:
            self._memory.check_shared(stream)
        with self._lock:
            have = self._outgrown(stream)
            if stream in self._given:
                self._refuse_given(size, have, label)
            try:
                if self.policy.pool and self._memory.capturing(stream):
                    raise UnavailableError(
                        f"{label}: {self.kind} growth during graph capture: need {size} bytes, have "
                        f"{have.size if have else 0}; reserve() the call on this stream before capturing."
                    )
                block = self._allocate(size, stream)
            except BaseException:
                self._restore(have)
                raise
            self._hold(1, block)
            self._retire(have)
            self._growths += 1
        return self._poisoned(block)

    def put(self, block: Block) -> None:
        """Hand a block on to the next call of its stream."""
        if not self.policy.pool and block.owned:
            with self._lock:
                self._hold(-1, block)
            self._memory.free_ordered(block.address, block.stream)
        elif block.owned and block.stream in self._given:
            with self._lock:
                self._retire(block)
        else:
            self._free.setdefault(block.stream, []).append(block)

    def reserve(self, size: int, stream: int, label: str = "reserve", threads: int = 1) -> None:
        """Make sure that calls of so many threads on the stream find `size` bytes each.

        Raises:
            UnavailableError, DriverError: as `grow`.
        """
        blocks: list[Block] = []
        try:
            while size and self.policy.pool and len(blocks) < threads:
                blocks.append(self.take(size, stream) or self.grow(size, stream, label))
        finally:
            for block in blocks:
                self.put(block)

    def give(self, address: int, size: int, stream: int) -> None:
        """Let calls on a stream use the caller's memory, and nothing else; it must live as long as they do.

        Raises:
            ContractError: it does not start at a multiple of 256.
            UnavailableError: the stream is each thread's own.
        """
        self._memory.check_shared(stream)
        if address % ALIGN or not address:
            raise ContractError(f"found {self.kind} at {address:#x}, expected a multiple of {ALIGN}.")
        with self._lock:
            self._retired += (b for b in self._free.get(stream, ()) if b.owned)
            self._given.add(stream)
            self._free[stream] = [Block(address, size, stream, False)]

    def release(self, stream: int) -> None:
        """Wait for a stream and free its blocks: before it is destroyed. No graph may use them any more."""
        with self._lock:
            blocks = self._free.get(stream, []) + [b for b in self._retired if b.stream == stream]
            if any(b.owned for b in blocks):
                self._memory.synchronize(stream)
            self._given.discard(stream)
            self._free.pop(stream, None)
            self._retired = [b for b in self._retired if b.stream != stream]
            self._free_all(blocks)

    def poison(self, stream: int) -> None:
        """Fill the blocks of a stream that no call holds with 0xff, on that stream: between replays of a
        graph."""
        for block in self.idle(stream):
            self._fill(block)

    def idle(self, stream: int) -> tuple[Block, ...]:
        """The blocks of a stream that no call holds."""
        return tuple(self._free.get(stream, ()))

    def close(self) -> None:
        """Free every block."""
        with self._lock:
            blocks = [*self._retired, *(b for free in self._free.values() for b in free)]
            self._retired, self._free = [], {}
            self._free_all(blocks)

    def _free_all(self, blocks: list[Block]) -> None:
        every(partial(self._free_one, b) for b in blocks if b.owned)

    def _free_one(self, block: Block) -> None:
        self._hold(-1, block)
        self._memory.free(block.address)

    def _hold(self, count: int, block: Block) -> None:
        """Count a block that was allocated (1) or is freed (-1); with the lock held."""
        blocks, size = self._held
        self._held = (blocks + count, size + count * block.size)

    def _outgrown(self, stream: int) -> Block | None:
        try:
            return self._free[stream].pop()
        except (KeyError, IndexError):
            return None

    def _retire(self, block: Block | None) -> None:
        if block is not None and self._memory.deferred:
            self._retired.append(block)
        elif block is not None and block.owned:
            self._free_one(block)

    def _restore(self, block: Block | None) -> None:
        if block is not None:
            self._free[block.stream].append(block)

    def _refuse_given(self, size: int, have: Block | None, label: str) -> None:
        self._restore(have)
        if have is None:
            raise UnavailableError(
                f"{label}: the {self.kind} given for this stream is in use by another thread; give each "
                "thread a stream of its own."
            )
        raise UnavailableError(
            f"{label}: needs {size} bytes of {self.kind}, the buffer given for this stream has {have.size}; "
            "give a larger one."
        )

    def _allocate(self, size: int, stream: int) -> Block:
        if not self.policy.pool:
            return Block(self._memory.allocate_ordered(size, stream, self._zeroed), size, stream)
        size = -(-size // GRAIN) * GRAIN
        return Block(self._memory.allocate(size, stream, self._zeroed), size, stream)

    def _poisoned(self, block: Block) -> Block:
        if self.policy.poison:
            try:
                self._fill(block)
            except BaseException:
                self.put(block)
                raise
        return block

    def _fill(self, block: Block) -> None:
        if not self._memory.capturing(block.stream):
            self._memory.fill(block.address, block.size, block.stream)
            self._fills += 1


class ScratchPool(BlockPool):
    """The scratch memory of one device: what this pool hands out has arbitrary content.

    Attributes:
        zeroed: the pool of memory that is all zeros between launches; it is never poisoned.
    """

    def __init__(self, memory: Memory, policy: ScratchPolicy) -> None:
        super().__init__(memory, policy)
        self.zeroed = BlockPool(memory, replace(policy, poison=False), zeroed=True)

    def end(self, scratch: Block, zeroed: Block) -> None:
        """Hand a launch's blocks on to the next one of their stream."""
        try:
            if scratch is not ABSENT:
                self.put(scratch)
        finally:
            if zeroed is not ABSENT:
                self.zeroed.put(zeroed)

    def release(self, stream: int) -> None:
        """Wait for a stream and free its blocks of both kinds: before it is destroyed, and after a kernel was
        aborted, which may leave zeroed scratch dirty. No graph may use them any more."""
        every((partial(super().release, stream), partial(self.zeroed.release, stream)))

    def close(self) -> None:
        """Free every block."""
        every((super().close, self.zeroed.close))


class HostMemory:
    """CPU memory; every call is done when it returns, so there is no order to keep."""

    deferred = False

    def __init__(self) -> None:
        self._held: dict[int, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def allocate(self, size: int, stream: int, zeroed: bool = False) -> int:
        """See Memory."""
        raw = (np.zeros if zeroed else np.empty)(size + ALIGN, np.uint8)
        address: int = -(-raw.__array_interface__["data"][0] // ALIGN) * ALIGN
        self._held[address] = raw
        return address

    def free(self, address: int) -> None:
        """See Memory."""
        del self._held[address]

    def allocate_ordered(self, size: int, stream: int, zeroed: bool = False) -> int:
        """See Memory."""
        return self.allocate(size, stream, zeroed)

    def free_ordered(self, address: int, stream: int) -> None:
        """See Memory."""
        self.free(address)

    def fill(self, address: int, size: int, stream: int) -> None:
        """See Memory."""
        ctypes.memset(address, 0xFF, size)

    def capturing(self, stream: int) -> bool:
        """Never."""
        return False

    def synchronize(self, stream: int) -> None:
        """Nothing is ever queued."""

    def check_shared(self, stream: int) -> None:
        """See Memory."""


def laid_out(sizes: list[int]) -> tuple[list[int], int]:
    """(offset of each buffer in one block, bytes of the block)."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-max(size, 1) // ALIGN) * ALIGN
    return offsets, end
