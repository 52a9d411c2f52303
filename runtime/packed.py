"""Launches as plain numbers, for callers in C."""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, Protocol, runtime_checkable


class Packed(NamedTuple):
    """A launch with everything of one call's shape fixed; the fields of `native.Launch`, in order.

    Attributes:
        code: address of the driver's cuLaunchKernelEx, or of a CPU kernel's entry.
        function: the driver's handle of the kernel.
        config: grid, block and bytes of shared memory, as in CUlaunchConfig.
        attributes: CUlaunchAttribute records.
        template: eight bytes a parameter.
        addresses: (parameter, index among the call's addresses) of each pointer that is put in per call.
        scalars: (parameter, scalar, format) of each value that is.
        integers, floats: the parameters, on the CPU, with which integers and floats begin.
        rows: the CPU's work; -1 for launches of the driver.
    """

    code: int
    function: int = 0
    config: bytes = bytes(28)
    attributes: bytes = b""
    template: bytes = b""
    addresses: bytes = b""
    scalars: bytes = b""
    integers: int = 0
    floats: int = 0
    rows: int = -1

    @staticmethod
    def patches(rows: Iterable[tuple[int, ...]]) -> bytes:
        """Rows of small integers as C reads them."""
        return b"".join(struct.pack(f"={len(row)}i", *row) for row in rows)


@runtime_checkable
class Packs(Protocol):
    """A launcher that C may do the work of."""

    def packed(
        self,
        order: Sequence[int],
        pointers: Sequence[int] | None,
        args: tuple[int | float, ...] | None,
    ) -> Packed | None:
        """The launch as numbers, or None where only `run` will do.

        Args:
            order: of the call's addresses: the launcher's i-th is the `order[i]`-th of those.
            pointers: the launcher's addresses, where they are the same at every launch.
            args: scalar values, where they are.
        """

    def refuse(self, status: int) -> NoReturn:
        """Raise what a status other than success means."""
