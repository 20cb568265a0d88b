// `conv_verify` and `conv_prefill`: causal convolution over a ring, SiLU, L2 norms, gates.
#include "groups.h"

enum { MOST_TAPS = 8 };

typedef struct {
  const float *projected;
  int64_t width;  // columns of `projected`
  const float *conv_weight, *neg_exp_a, *dt_bias;
  float *ring_x, *ring_k, *ring_g;
  groups groups;
  int64_t num_slots, num_channels, num_taps, ring_x_rows, ring_rows, key_heads, key_dim, value_heads;
  float *q, *k, *v, *g, *beta;  // k and g: 0 for generated rows, which go to the rings
} conv_arguments;

// The taps of (at most) eight channels, tap by tap.
INLINE void load_taps(const float *weight, int num_taps, int64_t left, v8 taps[MOST_TAPS]) {
  if (num_taps == 4 && left >= LANES) {
    v8 a = load(weight), b = load(weight + 8), c = load(weight + 16), d = load(weight + 24);
    v8 e = SHUFFLE(a, b, 0, 4, 8, 12, 1, 5, 9, 13), f = SHUFFLE(c, d, 0, 4, 8, 12, 1, 5, 9, 13);
    v8 g = SHUFFLE(a, b, 2, 6, 10, 14, 3, 7, 11, 15), h = SHUFFLE(c, d, 2, 6, 10, 14, 3, 7, 11, 15);
    taps[0] = SHUFFLE(e, f, 0, 1, 2, 3, 8, 9, 10, 11), taps[1] = SHUFFLE(e, f, 4, 5, 6, 7, 12, 13, 14, 15);
    taps[2] = SHUFFLE(g, h, 0, 1, 2, 3, 8, 9, 10, 11), taps[3] = SHUFFLE(g, h, 4, 5, 6, 7, 12, 13, 14, 15);
    return;
  }
  for (int t = 0; t < num_taps; t++)
    for (int64_t i = 0; i < min64(left, LANES); i++) taps[t][i] = weight[i * num_taps + t];
}

// Channels [first, first + count) of every row: taps from the oldest row to the newest, then SiLU.
INLINE void convolve(const float *const *rows, int64_t num_rows, const float *weight, int num_taps,
                     int64_t first, int64_t count, float *out, int64_t out_stride) {
  for (int64_t c = 0; c < count; c += LANES) {
    int64_t left = count - c;
    v8 taps[MOST_TAPS] = {{0}};
    load_taps(weight + (first + c) * num_taps, num_taps, left, taps);
    for (int64_t m = 0; m < num_rows; m++) {
      v8 sum = load_upto(rows[m] + first + c, left) * taps[0];
      UNROLL for (int t = 1; t < num_taps; t++)
        sum = fma8(load_upto(rows[m + t] + first + c, left), taps[t], sum);
      store_upto(out + m * out_stride + c, silu8(sum), left);
    }
  }
}

static void convolve_any(const float *const *rows, int64_t num_rows, const float *weight, int num_taps,
                         int64_t first, int64_t count, float *out, int64_t out_stride) {
  switch (num_taps) {
    case 3: convolve(rows, num_rows, weight, 3, first, count, out, out_stride); break;
    case 4: convolve(rows, num_rows, weight, 4, first, count, out, out_stride); break;
    default: convolve(rows, num_rows, weight, num_taps, first, count, out, out_stride);
  }
}

INLINE void scale_to_unit(const float *x, int64_t dim, float scale, float *out) {
  float factor = 1.0f / sqrtf(sum_squares(x, dim) + 1e-6f) * scale;
  for (int64_t i = 0; i < dim; i++) out[i] = x[i] * factor;
}

static void gates(const conv_arguments *a, const float *row, float *g, float *beta) {
  const float *b = row + a->width - 2 * a->value_heads, *decay = b + a->value_heads;
  for (int64_t h = 0; h < a->value_heads; h += LANES) {
    int64_t left = a->value_heads - h;
    store_upto(beta + h, sigmoid8(load_upto(b + h, left)), left);
  }
  for (int64_t h = 0; h < a->value_heads; h++) {
    float x = decay[h] + a->dt_bias[h];
    g[h] = a->neg_exp_a[h] * (log1pf(expf(-fabsf(x))) + (x > 0.0f ? x : 0.0f));
  }
}

static int check(const conv_arguments *a) {
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n], rows = group_rows(&a->groups, n);
    if (slot < 0 || slot >= a->num_slots) return BAD_SLOT;
    if (a->groups.starts[n] < 0) return BELOW_ZERO;
    if (!a->k && (rows + a->num_taps - 1 > a->ring_x_rows || rows > a->ring_rows)) return BAD_RING;
  }
  return DONE;
}

int metrale_conv(const conv_arguments *a) {
  int64_t num_keys = a->key_heads * a->key_dim, most = most_rows(&a->groups), channels = a->num_channels;
  int64_t value_width = channels - 2 * num_keys, history = a->num_taps - 1;
  int status = check(a);
  if (status || !most) return status;
  float *mixed = scratch(round_up(most * 2 * num_keys, 16) + round_up(channels, 16) + 2 * (most + history));
  if (!mixed) return NO_MEMORY;
  float *zeros = mixed + round_up(most * 2 * num_keys, 16);
  const float **rows = (const float **)(zeros + round_up(channels, 16));
  float scale = (float)(1.0 / sqrt((double)a->key_dim));
  memset(zeros, 0, (size_t)channels * sizeof(float));
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n], start = a->groups.starts[n], first = a->groups.cu_rows[n];
    int64_t num_rows = group_rows(&a->groups, n);
    float *ring = a->ring_x + slot * a->ring_x_rows * channels;
    for (int64_t i = 0; i < num_rows + history; i++) {
      int64_t position = start - history + i;
      if (position < 0)
        rows[i] = zeros;
      else if (position < start)
        rows[i] = ring + position % a->ring_x_rows * channels;
      else
        rows[i] = a->projected + (first + position - start) * a->width;
    }
    int taps = (int)a->num_taps;
    convolve_any(rows, num_rows, a->conv_weight, taps, 0, 2 * num_keys, mixed, 2 * num_keys);
    convolve_any(rows, num_rows, a->conv_weight, taps, 2 * num_keys, value_width, a->v + first * value_width,
                 value_width);
    for (int64_t i = max64(0, num_rows - a->ring_x_rows); i < num_rows; i++)
      memcpy(ring + (start + i) % a->ring_x_rows * channels, rows[i + history],
             (size_t)channels * sizeof(float));
    for (int64_t i = 0; i < num_rows; i++) {
      int64_t row = first + i, at = slot * a->ring_rows + (start + i) % a->ring_rows;
      float *k = a->k ? a->k + row * num_keys : a->ring_k + at * num_keys;
      const float *from = mixed + i * 2 * num_keys;
      for (int64_t h = 0; h < num_keys; h += a->key_dim) {
        scale_to_unit(from + h, a->key_dim, scale, a->q + row * num_keys + h);
        scale_to_unit(from + num_keys + h, a->key_dim, 1.0f, k + h);
      }
      gates(a, a->projected + row * a->width,
            a->g ? a->g + row * a->value_heads : a->ring_g + at * a->value_heads,
            a->beta + row * a->value_heads);
    }
  }
  free(mixed);
  return DONE;
}
