/* Scales of NVFP4 blocks: byte (row m, group k) of 128 x 4 tiles; padding is 0. */
KILN_INLINE uint8_t *nvfp4_quad(uint8_t *scales, int64_t m, int64_t quad, int64_t groups)
{
  const int64_t quads = (groups + 3) / 4;
  return scales + ((m / 128 * quads + quad) * 32 + m % 32) * 16 + m % 128 / 32 * 4;
}

/* `live` scales of row m from group g (a multiple of 16). */
KILN_INLINE void nvfp4_store(uint8_t *scales, int64_t m, int64_t g, int64_t groups, vi codes, int64_t live)
{
  uint8_t bytes[16] = {0};
  u8_store(bytes, codes, live);
  for (int64_t j = 0; j < live; j += 4) __builtin_memcpy(nvfp4_quad(scales, m, (g + j) / 4, groups), bytes + j, 4);
}

KILN_INLINE void nvfp4_clear(uint8_t *scales, int64_t m, int64_t groups)
{
  const int32_t zero = 0;
  for (int64_t quad = 0; quad < (groups + 3) / 4; ++quad) __builtin_memcpy(nvfp4_quad(scales, m, quad, groups), &zero, 4);
}
