// Problems that are the same bytes everywhere, as tests/golden/inputs.py makes them, and the SHA-256 of an answer. C99, for C++ too.
#ifndef GOLDEN_H
#define GOLDEN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { GOLDEN_HEADS = 24, GOLDEN_KV_HEADS = 2, GOLDEN_DIM = 256, GOLDEN_GROUP = 64, GOLDEN_MAX_WIDTH = 2051 };

// Arrays in C order. The queries are the last n_q of the context; ids are ascending, entries past a query's width are 0.
typedef struct golden {
  int64_t context, n_q, page_size, pages, cap;
  float* q;                             // [n_q, heads, dim]
  int8_t *k, *v;                        // [pages, kv_heads, page_size, dim]
  uint16_t *k_scale, *v_scale;          // binary16 [pages, kv_heads, page_size, dim / group]
  int32_t *page_table, *ids, *widths;   // [pages], [n_q, cap], [n_q]
} golden;

// 0: not enough memory. The case `tiny` is golden_make(&g, 96, 8, 4, 1).
int golden_make(golden* g, int64_t context, int64_t n_q, int64_t page_size, uint64_t seed);
void golden_free(golden* g);

// 64 hexadecimal digits and a zero.
void golden_sha256(const void* data, size_t bytes, char digest[65]);

// What a portable kernel answers to `tiny` (float32 [8, 24, 256] in C order); NULL for other kernels.
const char* golden_tiny(const char* kernel);

#ifdef __cplusplus
}
#endif

#endif
