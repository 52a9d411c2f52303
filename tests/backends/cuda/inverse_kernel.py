"""A Triton kernel for tests: the inverse inside the chunked delta rule, of one matrix."""

import triton
import triton.language as tl

from kiln.backends.cuda.kernels.gdn_chunk import CHUNK, _unit_lower_inverse


@triton.jit
def inverse(a, out):
    """(I + a)^-1 of a strictly lower a [CHUNK, CHUNK] f32."""
    at = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    tl.store(out + at, _unit_lower_inverse(tl.load(a + at).to(tl.float16)).to(tl.float32))
