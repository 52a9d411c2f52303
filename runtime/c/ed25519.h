/* Ed25519 signatures (RFC 8032), verification alone. */
#ifndef KILN_ED25519_H
#define KILN_ED25519_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether `signature` is that of `message` by the holder of `key`. Strict: refused are S of L and more, a key or R that is not the
 * one encoding of its point, and a key of small order, which would sign anything. Nothing here is secret: times depend on the data.
 */
bool kiln_ed25519_verify(const uint8_t key[32], const void *message, size_t bytes, const uint8_t signature[64]);

#endif
