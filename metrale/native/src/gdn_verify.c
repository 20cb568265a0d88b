// `gdn_verify`: replay pending rows, fold when due, run new rows; one pass over the state.
//
// A state row (one value dimension, dk floats) is independent of the others: it is loaded once, and everything of the step
// happens while it is in registers. Updates are a product, then a sum, each rounded, so that a replayed row has the
// bits of its first run.
#include "groups.h"

enum { MOST_VECTORS = 32 };

typedef struct {
  const float *q, *v, *beta, *ring_k;
  float *ring_u;
  const float *ring_g;
  float *ssm;
  int32_t *num_folded;
  groups groups;
  int64_t num_slots, ring_rows, key_heads, key_dim, value_heads, value_dim, fold_threshold;
  float *out;
} gdn_verify_arguments;

// One group and key head: pending rows, then new rows. Keys and queries are padded with zeros to whole vectors.
typedef struct {
  int64_t num_pending, num_new;
  const float *keys, *queries;  // [pending + new, dim], [new, dim]
  float *decays;                // [pending + new]
  float **deltas;               // [pending + new], one value head's
} rows;

static int check(const gdn_verify_arguments *a) {
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n];
    if (slot < 0 || slot >= a->num_slots) return BAD_SLOT;
    for (int64_t h = 0; h < a->value_heads; h++) {
      int64_t pending = a->groups.starts[n] - a->num_folded[slot * a->value_heads + h];
      if (pending < 0 || pending + group_rows(&a->groups, n) > a->ring_rows) return BAD_RING;
    }
  }
  return DONE;
}

// All value dimensions of one value head. `state` is its [dv, dk]; not loaded when `is_zero`, stored when `is_due`.
INLINE void run_head(const rows *r, int vectors, float *state, int64_t key_dim, int64_t value_dim, int is_zero,
                     int is_due, const float *v, const float *beta, float *out, int64_t value_stride,
                     int64_t beta_stride) {
  const int64_t dim = (int64_t)vectors * LANES;
  for (int64_t d = 0; d < value_dim; d++) {
    float *row = state + d * key_dim;
    v8 s[MOST_VECTORS];
    UNROLL for (int i = 0; i < vectors; i++)
      s[i] = is_zero ? (v8){0} : load_upto(row + i * LANES, key_dim - i * LANES);
    for (int64_t j = 0; j < r->num_pending; j++) {
      const float *key = r->keys + j * dim;
      v8 decay = splat(r->decays[j]), delta = splat(r->deltas[j][d]);
      UNROLL for (int i = 0; i < vectors; i++) s[i] = s[i] * decay + delta * load(key + i * LANES);
    }
    if (is_due)
      UNROLL for (int i = 0; i < vectors; i++) store_upto(row + i * LANES, s[i], key_dim - i * LANES);
    for (int64_t j = 0; j < r->num_new; j++) {
      const float *key = r->keys + (r->num_pending + j) * dim, *query = r->queries + j * dim;
      v8 decay = splat(r->decays[r->num_pending + j]), read[2] = {{0}, {0}}, seen[2] = {{0}, {0}};
      UNROLL for (int i = 0; i < vectors; i++) {
        s[i] = s[i] * decay;
        read[i % 2] = fma8(s[i], load(key + i * LANES), read[i % 2]);
      }
      float u = beta[j * beta_stride] * (v[j * value_stride + d] - hsum(read[0] + read[1]));
      r->deltas[r->num_pending + j][d] = u;
      v8 delta = splat(u);
      UNROLL for (int i = 0; i < vectors; i++) {
        s[i] = s[i] + delta * load(key + i * LANES);
        seen[i % 2] = fma8(s[i], load(query + i * LANES), seen[i % 2]);
      }
      out[j * value_stride + d] = hsum(seen[0] + seen[1]);
    }
  }
}

#define ARGUMENTS state, key_dim, value_dim, is_zero, is_due, v, beta, out, value_stride, beta_stride

static void run_head_any(const rows *r, int vectors, float *state, int64_t key_dim, int64_t value_dim, int is_zero,
                         int is_due, const float *v, const float *beta, float *out, int64_t value_stride,
                         int64_t beta_stride) {
  if (key_dim == 64)
    run_head(r, 8, ARGUMENTS);
  else if (key_dim == 128)
    run_head(r, 16, ARGUMENTS);
  else
    run_head(r, vectors, ARGUMENTS);
}

static void pad(const float *from, int64_t count, float *to, int64_t dim) {
  memcpy(to, from, (size_t)count * sizeof(float));
  memset(to + count, 0, (size_t)(dim - count) * sizeof(float));
}

int metrale_gdn_verify(const gdn_verify_arguments *a) {
  int64_t dim = round_up(a->key_dim, LANES), ratio = a->value_heads / a->key_heads, width = a->value_heads * a->value_dim;
  int status = check(a);
  if (status) return status;
  float *keys = scratch(2 * a->ring_rows * (dim + LANES));
  if (!keys) return NO_MEMORY;
  float *queries = keys + a->ring_rows * dim, *decays = queries + a->ring_rows * dim;
  float **deltas = (float **)(decays + a->ring_rows * LANES);
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n], start = a->groups.starts[n], first = a->groups.cu_rows[n];
    int64_t num_new = group_rows(&a->groups, n);
    for (int64_t h = 0; h < a->value_heads; h++) {
      int64_t kh = h / ratio;
      int32_t *folded = a->num_folded + slot * a->value_heads + h;
      rows r = {start - *folded, num_new, keys, queries, decays, deltas};
      int is_zero = *folded == 0, is_due = r.num_pending && r.num_pending + num_new > a->fold_threshold;
      for (int64_t j = 0; j < r.num_pending + num_new; j++) {
        int64_t at = slot * a->ring_rows + (*folded + j) % a->ring_rows;
        pad(a->ring_k + (at * a->key_heads + kh) * a->key_dim, a->key_dim, keys + j * dim, dim);
        decays[j] = expf(a->ring_g[at * a->value_heads + h]);
        deltas[j] = a->ring_u + at * width + h * a->value_dim;
      }
      for (int64_t j = 0; j < num_new; j++)
        pad(a->q + ((first + j) * a->key_heads + kh) * a->key_dim, a->key_dim, queries + j * dim, dim);
      run_head_any(&r, (int)(dim / LANES), a->ssm + (slot * a->value_heads + h) * a->value_dim * a->key_dim, a->key_dim,
                   a->value_dim, is_zero, is_due, a->v + first * width + h * a->value_dim,
                   a->beta + first * a->value_heads + h, a->out + first * width + h * a->value_dim, width,
                   a->value_heads);
      if (is_due) *folded = (int32_t)start;
    }
  }
  free(keys);
  return DONE;
}
