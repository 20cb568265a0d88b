// `gdn_verify`: replay pending rows, fold when due, run new rows; one pass over the state.
//
// A state row (one value dimension, dk floats) is independent of the others. Eight of them are loaded at
// once, and everything of the step happens while they are in the first-level cache. Updates are a product,
// then a sum, each rounded, so that a replayed row has the bits of its first run.
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

// One group and key head: pending rows, then new rows. Keys and queries are padded with zeros to whole
// vectors.
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

// One block of value dimensions: `count` (1 to 8) rows of the state, the first at `state`. Their sums are
// taken together.
typedef struct {
  float *state;
  int64_t key_dim, first, count;  // `first`: the block's first value dimension
  int is_zero, is_due;
  float s[LANES * MOST_VECTORS * LANES];
} block;

// One value head's inputs and outputs of the new rows, each row `stride` floats after the one before.
typedef struct {
  const float *v, *beta;
  float *out;
  int64_t stride, beta_stride;
} head;

// Vectors [first, first + vectors) of one state row: load, replay, fold, decay for the first new row (if any)
// and read.
INLINE void begin(const rows *r, block *b, int64_t row, int64_t dim, int first, int vectors, v8 reads[2]) {
  float *state = b->state + row * b->key_dim, *kept = b->s + row * dim;
  v8 s[8];
  UNROLL for (int i = 0; i < vectors; i++)
    s[i] = b->is_zero ? (v8){0} : load_upto(state + (first + i) * LANES, b->key_dim - (first + i) * LANES);
  for (int64_t j = 0; j < r->num_pending; j++) {
    const float *key = r->keys + j * dim + first * LANES;
    v8 decay = splat(r->decays[j]), delta = splat(r->deltas[j][b->first + row]);
    UNROLL for (int i = 0; i < vectors; i++)
      s[i] = s[i] * decay + delta * load(key + i * LANES);
  }
  if (b->is_due)
    UNROLL for (int i = 0; i < vectors; i++)
      store_upto(state + (first + i) * LANES, s[i], b->key_dim - (first + i) * LANES);
  if (!r->num_new) return;
  const float *key = r->keys + r->num_pending * dim;
  v8 decay = splat(r->decays[r->num_pending]);
  UNROLL for (int i = 0; i < vectors; i++) {
    v8 a = s[i] * decay;
    store(kept + (first + i) * LANES, a);
    reads[(first + i) % 2] = fma8(a, load(key + (first + i) * LANES), reads[(first + i) % 2]);
  }
}

// One state row from a new row's update and read-out to the next row's decay and read (unless it is the
// last).
INLINE void advance(float *s, v8 u, const float *key, const float *query, v8 decay, int vectors, int is_last,
                    v8 *seen, v8 *read) {
  const float *next = key + vectors * LANES;
  v8 outs[2] = {{0}, {0}}, reads[2] = {{0}, {0}};
  UNROLL for (int i = 0; i < vectors; i++) {
    v8 a = load(s + i * LANES) + u * load(key + i * LANES);
    outs[i % 2] = fma8(a, load(query + i * LANES), outs[i % 2]);
    if (is_last) continue;
    a = a * decay;
    store(s + i * LANES, a);
    reads[i % 2] = fma8(a, load(next + i * LANES), reads[i % 2]);
  }
  *seen = outs[0] + outs[1];
  *read = reads[0] + reads[1];
}

INLINE v8 hsum_rows(const v8 a[LANES]) { return hsum_each(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]); }

INLINE void run_block(const rows *r, block *b, head h, int vectors) {
  const int64_t dim = (int64_t)vectors * LANES;
  v8 read[LANES] = {{0}}, seen[LANES] = {{0}};
  for (int64_t row = 0; row < b->count; row++) {
    v8 reads[2] = {{0}, {0}};
    int first = 0;
    for (; first + 8 <= vectors; first += 8) begin(r, b, row, dim, first, 8, reads);
    for (; first < vectors; first++) begin(r, b, row, dim, first, 1, reads);
    read[row] = reads[0] + reads[1];
  }
  for (int64_t j = 0; j < r->num_new; j++) {
    const float *key = r->keys + (r->num_pending + j) * dim, *query = r->queries + j * dim;
    float u[LANES];
    store(u,
          h.beta[j * h.beta_stride] * (load_upto(h.v + j * h.stride + b->first, b->count) - hsum_rows(read)));
    store_upto(r->deltas[r->num_pending + j] + b->first, load(u), b->count);
    if (j + 1 < r->num_new) {
      v8 decay = splat(r->decays[r->num_pending + j + 1]);
      for (int64_t row = 0; row < b->count; row++)
        advance(b->s + row * dim, splat(u[row]), key, query, decay, vectors, 0, seen + row, read + row);
    } else {
      for (int64_t row = 0; row < b->count; row++)
        advance(b->s + row * dim, splat(u[row]), key, query, (v8){0}, vectors, 1, seen + row, read + row);
    }
    store_upto(h.out + j * h.stride + b->first, hsum_rows(seen), b->count);
  }
}

// All value dimensions of one value head; the common key dimensions have code of their own, with unrolled
// loops.
static void run_head(const rows *r, block *b, head h, int64_t value_dim) {
  float *state = b->state;
  int vectors = (int)(round_up(b->key_dim, LANES) / LANES);
  for (b->first = 0; b->first < value_dim; b->first += LANES) {
    b->state = state + b->first * b->key_dim;
    b->count = min64(LANES, value_dim - b->first);
    switch (vectors) {
      case 8: run_block(r, b, h, 8); break;
      case 16: run_block(r, b, h, 16); break;
      default: run_block(r, b, h, vectors);
    }
  }
}

static void pad(const float *from, int64_t count, float *to, int64_t dim) {
  memcpy(to, from, (size_t)count * sizeof(float));
  memset(to + count, 0, (size_t)(dim - count) * sizeof(float));
}

int metrale_gdn_verify(const gdn_verify_arguments *a) {
  int64_t dim = round_up(a->key_dim, LANES), ratio = a->value_heads / a->key_heads,
          width = a->value_heads * a->value_dim;
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
      for (int64_t j = 0; j < r.num_pending + num_new; j++) {
        int64_t at = slot * a->ring_rows + (*folded + j) % a->ring_rows;
        pad(a->ring_k + (at * a->key_heads + kh) * a->key_dim, a->key_dim, keys + j * dim, dim);
        decays[j] = expf(a->ring_g[at * a->value_heads + h]);
        deltas[j] = a->ring_u + at * width + h * a->value_dim;
      }
      for (int64_t j = 0; j < num_new; j++)
        pad(a->q + ((first + j) * a->key_heads + kh) * a->key_dim, a->key_dim, queries + j * dim, dim);
      block b = {.state = a->ssm + (slot * a->value_heads + h) * a->value_dim * a->key_dim,
                 .key_dim = a->key_dim,
                 .is_zero = *folded == 0,
                 .is_due = r.num_pending && r.num_pending + num_new > a->fold_threshold};
      head io = {a->v + first * width + h * a->value_dim, a->beta + first * a->value_heads + h,
                 a->out + first * width + h * a->value_dim, width, a->value_heads};
      run_head(&r, &b, io, a->value_dim);
      if (b.is_due) *folded = (int32_t)start;
    }
  }
  free(keys);
  return DONE;
}
