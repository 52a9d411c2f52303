"""The calls that hand-scheduled candidates of an op are tuned on: model shapes of the specifications. No target is
named in this file."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Space:
    """The calls of an op: every combination of `sizes` with every extent of the ranged dimension."""

    dims: tuple[str, ...] = ()
    """What `sizes` are of."""
    sizes: tuple[tuple[int, ...], ...] = ()
    along: str = "M"
    """The ranged dimension: dispatch has ranges of it, and takes the next measured extent above."""
    extents: tuple[int, ...] = ()

    def shapes(self) -> tuple[dict[str, int], ...]:
        """Every call, small extents first."""
        return self._of(self.extents, self.sizes)

    def outline(self) -> tuple[dict[str, int], ...]:
        """Every fourth size with every other extent: what a cost model averages over, at each build."""
        return self._of(self.extents[::2], self.sizes[::4])

    def _of(self, extents: tuple[int, ...], sizes: tuple[tuple[int, ...], ...]) -> tuple[dict[str, int], ...]:
        pairs = product(extents, sizes)
        return tuple({self.along: m, **dict(zip(self.dims, size, strict=True))} for m, size in pairs)


ROWS = tuple(1 << n for n in range(14))
"""1, 2, 4 … 8192: decode batches and prefill chunks."""

LINEAR = (
    (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096),  # Qwen3-8B
    (28672, 4096), (4096, 14336), (128256, 4096),  # Llama-3.1-8B
    (10240, 8192), (57344, 8192), (8192, 28672),  # Llama-3.1-70B
    (34816, 5120), (5120, 17408), (5120, 5120),  # Qwen3.5-27B
    (256, 2048), (64, 2048), (2560, 2560),  # Qwen3.5-35B-A3B router and gates, Qwen3.5-4B
    (2112, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048),
    (256, 7168), (129280, 7168),  # DeepSeek-V3
    (8192, 8192),
)  # fmt: skip
"""(N, K) of dense layers, by model."""

SPACES: Mapping[str, Space] = {
    "matmul_bt": Space(("N", "K"), LINEAR, "M", ROWS),
}
"""By op. An op without a row has no measured dispatch: only its defaults."""
