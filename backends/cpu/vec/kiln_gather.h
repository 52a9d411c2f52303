/* Elements at other columns: neighbours are loaded at once. */
KILN_INLINE vi vi_columns(int64_t i) { return (vi){KILN_FIRST} + (int32_t)i; }
#define KILN_GATHER(NAME, ELEMENT)                                                                 \
  KILN_INLINE vf NAME##_gather(const ELEMENT *p, vi at, int64_t k)                                 \
  {                                                                                                \
    ELEMENT part[16] = {0};                                                                        \
    if (k >= 16 && !__builtin_reduce_or(at != vi_columns(at[0]))) return NAME##_load(p + at[0], 16); \
    for (int64_t j = 0; j < 16 && j < k; ++j) part[j] = p[at[j]];                                  \
    return NAME##_load(part, 16);                                                                  \
  }
KILN_GATHER(f32, float)
KILN_GATHER(bf16, uint16_t)
