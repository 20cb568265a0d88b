// `masked_argmax` and `gumbel`.
#include "vec.h"

typedef struct {
  const float *logits;
  int64_t num_rows, width, num_valid;
  int64_t *out;
} masked_argmax_arguments;

int metrale_masked_argmax(const masked_argmax_arguments *a) {
  for (int64_t row = 0; row < a->num_rows; row++) {
    const float *x = a->logits + row * a->width;
    v8 best[4];
    i8 ordered = (i8){-1, -1, -1, -1, -1, -1, -1, -1};
    UNROLL for (int j = 0; j < 4; j++)
      best[j] = splat(-INFINITY);
    int64_t i = 0, whole = a->num_valid - a->num_valid % (4 * LANES);
    for (; i < whole; i += 4 * LANES)
      UNROLL for (int j = 0; j < 4; j++) {
        v8 value = load(x + i + j * LANES);
        ordered &= value == value;
        best[j] = max8(value, best[j]);
      }
    v8 lanes = max8(max8(best[0], best[1]), max8(best[2], best[3]));
    float highest = -INFINITY;
    int has_nan = 0;
    for (int j = 0; j < LANES; j++) {
      has_nan |= !ordered[j];
      highest = lanes[j] > highest ? lanes[j] : highest;
    }
    for (; i < a->num_valid; i++) {
      has_nan |= x[i] != x[i];
      highest = x[i] > highest ? x[i] : highest;
    }
    int64_t index = -1;
    if (!has_nan && highest > -INFINITY)
      for (index = 0; x[index] != highest; index++) continue;
    a->out[row] = index;
  }
  return DONE;
}

typedef struct {
  uint64_t seed, sample, position;
} stream;

typedef struct {
  const stream *streams;
  int64_t num_rows, num_ids;
  float *out;
} gumbel_arguments;

// Philox4x32-10: counter block of eight lanes to four words each.
INLINE void philox(u8 c[4], uint32_t key_low, uint32_t key_high) {
  UNROLL for (int round = 0; round < 10; round++) {
    u8 high0, low0, high1, low1;
    UNROLL for (int i = 0; i < LANES; i++) {
      uint64_t a = (uint64_t)c[0][i] * 0xD2511F53u, b = (uint64_t)c[2][i] * 0xCD9E8D57u;
      high0[i] = (uint32_t)(a >> 32), low0[i] = (uint32_t)a;
      high1[i] = (uint32_t)(b >> 32), low1[i] = (uint32_t)b;
    }
    u8 c1 = c[1], c3 = c[3];
    c[0] = high1 ^ c1 ^ key_low, c[1] = low1, c[2] = high0 ^ c3 ^ key_high, c[3] = low0;
    key_low += 0x9E3779B9u, key_high += 0xBB67AE85u;
  }
}

// -log(-log1p(-u)); log1p by Kahan's correction of log(1 - u), exact where 1 - u rounds to 1.
INLINE v8 noise(v8 u) {
  v8 rest = 1.0f - u, lost = 1.0f - rest;
  i8 is_one = rest == 1.0f;
  v8 ratio = u / select8(is_one, splat(1.0f), lost);
  v8 exponential = select8(is_one, u, -log8(rest) * ratio);
  return -log8(exponential);
}

int metrale_gumbel(const gumbel_arguments *a) {
  float uniform[4 * LANES];
  for (int64_t row = 0; row < a->num_rows; row++) {
    stream s = a->streams[row];
    float *out = a->out + row * a->num_ids;
    for (int64_t id = 0; id < a->num_ids; id += 4 * LANES) {
      u8 c[4];
      UNROLL for (int i = 0; i < LANES; i++)
        c[0][i] = (uint32_t)(id / 4 + i);
      c[1] = (u8){0} + (uint32_t)s.position, c[2] = (u8){0} + (uint32_t)s.sample, c[3] = (u8){0};
      philox(c, (uint32_t)s.seed, (uint32_t)(s.seed >> 32));
      for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) {
          float u = (float)(((double)c[j][i] + 0.5) * 0x1p-32);
          uniform[4 * i + j] = u > 0x1.fffffep-1f ? 0x1.fffffep-1f : u;
        }
      for (int j = 0; j < 4 * LANES && id + j < a->num_ids; j += LANES)
        store_upto(out + id + j, noise(load(uniform + j)), a->num_ids - id - j);
    }
  }
  return DONE;
}
