/* SHA-512, which Ed25519 is made with. */
#ifndef KILN_SHA512_H
#define KILN_SHA512_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint64_t state[8], bytes;
  uint8_t block[128];
} sha512;

void kiln_sha512_start(sha512 *h);
void kiln_sha512_add(sha512 *h, const void *data, size_t bytes);
void kiln_sha512_end(sha512 *h, uint8_t digest[64]);

#endif
