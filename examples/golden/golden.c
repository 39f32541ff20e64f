#include "golden.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Word i of a stream: splitmix64 as a counter-based generator.
static uint64_t word(uint64_t seed, uint64_t stream, uint64_t i) {
  uint64_t z = (i + (seed << 40) + (stream << 34) + 1) * UINT64_C(0x9E3779B97F4A7C15);
  z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
  return z ^ (z >> 31);
}

// In [0, 1), a multiple of 2^-24.
static double uniform(uint64_t seed, uint64_t stream, uint64_t i) { return (double)(word(seed, stream, i) >> 40) * 0x1p-24; }

static int8_t code(uint64_t seed, uint64_t stream, uint64_t i) { return (int8_t)((int)((word(seed, stream, i) >> 33) % 255) - 127); }

// To binary16, to nearest even. Only numbers from 2^-14 to 2 come here.
static uint16_t half(double x) {
  int exponent;
  double fraction = frexp(x, &exponent);  // [0.5, 1)
  return (uint16_t)(((exponent + 13) << 10) + (int)nearbyint(fraction * 2048));
}

typedef struct {
  uint64_t key;
  int32_t index;
} keyed;

static int by_key(const void* a, const void* b) {
  const keyed *x = a, *y = b;
  if (x->key != y->key) return x->key < y->key ? -1 : 1;
  return x->index < y->index ? -1 : 1;
}

static int ascending(const void* a, const void* b) {
  int32_t x = *(const int32_t*)a, y = *(const int32_t*)b;
  return (x > y) - (x < y);
}

// The first `wanted` of the permutation that sorts n words, in `order`; the words are in `keys`, which it reorders.
static void permutation(keyed* keys, int64_t n, int64_t wanted, int32_t* order) {
  int64_t low = 0, high = n;  // the border of the first `wanted` lies in [low, high)
  while (wanted < n && high - low > 64) {
    keyed pivot = keys[low + (high - low) / 2];
    int64_t i = low, j = high - 1;
    while (i <= j) {
      while (by_key(&keys[i], &pivot) < 0) ++i;
      while (by_key(&pivot, &keys[j]) < 0) --j;
      if (i <= j) {
        keyed x = keys[i];
        keys[i++] = keys[j], keys[j--] = x;
      }
    }
    if (wanted <= j)
      high = j + 1;
    else if (wanted >= i)
      low = i;
    else
      break;
  }
  if (wanted < n) qsort(keys + low, (size_t)(high - low), sizeof *keys, by_key);
  qsort(keys, (size_t)wanted, sizeof *keys, by_key);
  for (int64_t i = 0; i < wanted; ++i) order[i] = keys[i].index;
}

static void fill(keyed* keys, uint64_t seed, uint64_t stream, int64_t n) {
  for (int64_t i = 0; i < n; ++i) keys[i] = (keyed){word(seed, stream, (uint64_t)i), (int32_t)i};
}

int golden_make(golden* g, int64_t context, int64_t n_q, int64_t page_size, uint64_t seed) {
  memset(g, 0, sizeof *g);
  g->context = context, g->n_q = n_q, g->page_size = page_size;
  g->pages = (context + page_size - 1) / page_size;
  g->cap = context < GOLDEN_MAX_WIDTH ? context : GOLDEN_MAX_WIDTH;
  const int64_t cells = g->pages * GOLDEN_KV_HEADS * page_size, codes = cells * GOLDEN_DIM, scales = cells * (GOLDEN_DIM / GOLDEN_GROUP);
  const int64_t values = n_q * GOLDEN_HEADS * GOLDEN_DIM, most = g->pages > context ? g->pages : context;
  g->q = malloc((size_t)values * sizeof *g->q);
  g->k = malloc((size_t)codes), g->v = malloc((size_t)codes);
  g->k_scale = malloc((size_t)scales * sizeof *g->k_scale), g->v_scale = malloc((size_t)scales * sizeof *g->v_scale);
  g->page_table = malloc((size_t)g->pages * sizeof *g->page_table);
  g->ids = calloc((size_t)(n_q * g->cap), sizeof *g->ids), g->widths = malloc((size_t)n_q * sizeof *g->widths);
  keyed* keys = malloc((size_t)most * sizeof *keys);
  if (!g->q || !g->k || !g->v || !g->k_scale || !g->v_scale || !g->page_table || !g->ids || !g->widths || !keys) {
    free(keys);
    golden_free(g);
    return 0;
  }
  for (int64_t i = 0; i < codes; ++i) g->k[i] = code(seed, 1, (uint64_t)i), g->v[i] = code(seed, 2, (uint64_t)i);
  for (int64_t i = 0; i < scales; ++i) {
    g->k_scale[i] = half(0.005 + 0.025 * uniform(seed, 3, (uint64_t)i));
    g->v_scale[i] = half(0.005 + 0.025 * uniform(seed, 4, (uint64_t)i));
  }
  for (int64_t i = 0; i < values; ++i) {  // a sum of 12 uniform numbers: exact
    double sum = 0;
    for (uint64_t j = 0; j < 12; ++j) sum += uniform(seed, 8 + j, (uint64_t)i);
    g->q[i] = (float)((sum - 6) * 2);
  }
  fill(keys, seed, 5, g->pages);
  permutation(keys, g->pages, g->pages, g->page_table);
  for (int64_t i = 0; i < n_q; ++i) {
    const int64_t visible = context - n_q + i + 1, width = visible < GOLDEN_MAX_WIDTH ? visible : GOLDEN_MAX_WIDTH;
    const int64_t recent = width == visible ? width : 512, older = width - recent;
    int32_t* ids = g->ids + i * g->cap;
    g->widths[i] = (int32_t)width;
    if (older) {
      fill(keys, seed, (uint64_t)(32 + i / 8), visible - recent);
      permutation(keys, visible - recent, older, ids);
      qsort(ids, (size_t)older, sizeof *ids, ascending);
    }
    for (int64_t j = older; j < width; ++j) ids[j] = (int32_t)(visible - width + j);
  }
  free(keys);
  return 1;
}

void golden_free(golden* g) {
  void* arrays[] = {g->q, g->k, g->v, g->k_scale, g->v_scale, g->page_table, g->ids, g->widths};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; ++i) free(arrays[i]);
  memset(g, 0, sizeof *g);
}

const char* golden_tiny(const char* kernel) {
  static const char* const digests[][2] = {
      {"fp32", "e3022291512d26e8a810808a5f8735a55a9f7795082981154006d9d54638ed80"},
      {"imma", "9383f56db070d50346652f7899b6dc698c8c0a37f3d422baa28eadd00f103508"},
      {"exact", "78d6b76a899afea0c0a649682a8877b7d7e256f197c3cffb44875abeb37faf04"},
  };
  for (size_t i = 0; i < sizeof digests / sizeof *digests; ++i)
    if (strcmp(kernel, digests[i][0]) == 0) return digests[i][1];
  return NULL;
}

// --- SHA-256 (FIPS 180-4)

static uint32_t rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

static void compress(uint32_t state[8], const unsigned char* block) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
      0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
      0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
      0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
      0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
      0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  uint32_t w[64], s[8];
  for (int i = 0; i < 16; ++i)
    w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 | (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
  for (int i = 16; i < 64; ++i) {
    uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
  }
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    uint32_t e = s[4], a = s[0];
    uint32_t t = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + k[i] + w[i];
    uint32_t u = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof *s);
    s[4] += t, s[0] = t + u;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

void golden_sha256(const void* data, size_t bytes, char digest[65]) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const unsigned char* p = data;
  size_t left = bytes;
  for (; left >= 64; left -= 64, p += 64) compress(state, p);
  unsigned char last[128] = {0};
  if (left) memcpy(last, p, left);
  last[left] = 0x80;
  const size_t end = left < 56 ? 64 : 128;
  for (size_t i = 0; i < 8; ++i) last[end - 1 - i] = (unsigned char)((uint64_t)bytes * 8 >> 8 * i);
  for (size_t i = 0; i < end; i += 64) compress(state, last + i);
  for (int i = 0; i < 32; ++i) {
    unsigned byte = state[i / 4] >> (24 - i % 4 * 8) & 0xff;
    digest[2 * i] = "0123456789abcdef"[byte >> 4], digest[2 * i + 1] = "0123456789abcdef"[byte & 15];
  }
  digest[64] = 0;
}
