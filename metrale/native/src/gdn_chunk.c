// `gdn_chunk`: the gated delta rule over prompt rows, 64 at a time, in the WY form.
#include "groups.h"
#include "product.h"

enum { CHUNK = 64 };

typedef struct {
  const float *q, *k, *v, *g, *beta;
  float *ssm;
  int32_t *num_folded;
  groups groups;
  int64_t num_slots, key_heads, key_dim, value_heads, value_dim;
  float *out;
} gdn_chunk_arguments;

typedef struct {
  float *q, *k, *state;                    // prepared rows: [CHUNK, stride], [CHUNK, stride], [dv, dk]
  float *u, *o;                            // [CHUNK, dv]
  float *kk, *qk;                          // [CHUNK, CHUNK]
  float *faded_keys, *total, *decay, *weights;  // [CHUNK, dk], [CHUNK], [CHUNK], [CHUNK]
} chunk;

// to[i] = to[i] * factor + sum over j of weights[j] * from[j][i], j ascending, with fused multiply-adds.
static void combine(float *to, float factor, const float *weights, int64_t weight_stride, const float *from,
                    int64_t count, int64_t width) {
  int64_t i = 0;
  for (; i + 8 * LANES <= width; i += 8 * LANES) {
    v8 acc[8];
    UNROLL for (int c = 0; c < 8; c++)
      acc[c] = load(to + i + c * LANES) * factor;
    for (int64_t j = 0; j < count; j++) {
      v8 w = splat(weights[j * weight_stride]);
      UNROLL for (int c = 0; c < 8; c++)
        acc[c] = fma8(w, load(from + j * width + i + c * LANES), acc[c]);
    }
    UNROLL for (int c = 0; c < 8; c++)
      store(to + i + c * LANES, acc[c]);
  }
  for (; i < width; i += LANES) {
    v8 acc = load_upto(to + i, width - i) * factor;
    for (int64_t j = 0; j < count; j++)
      acc = fma8(splat(weights[j * weight_stride]), load_upto(from + j * width + i, width - i), acc);
    store_upto(to + i, acc, width - i);
  }
}

// e^(total[i] - total[j]) for j in [0, count), times the row's products.
static void decayed(const float *total, int64_t i, const float *products, int64_t count, float factor,
                    float *weights) {
  for (int64_t j = 0; j < count; j += LANES) {
    v8 between = exp8(total[i] - load_upto(total + j, count - j));
    store_upto(weights + j, load_upto(products + j, count - j) * between * factor, count - j);
  }
}

// One chunk of one head: `c` holds its q, k, total and state; `beta` and `v` are the head's, rows apart by
// the strides.
static void run_chunk(chunk *c, int64_t rows, int64_t dk, int64_t dv, const float *v, int64_t v_stride,
                      const float *beta, int64_t beta_stride) {
  matrix state = {c->state, 0, dv, dk};
  product(c->k, rows, state, 0, c->u, dv, 1);
  product(c->q, rows, state, 0, c->o, dv, 1);
  // the rows of k stand `prepared_stride` apart, those of a matrix `inner`
  for (int64_t i = 0; i < rows; i++)
    memcpy(c->faded_keys + i * dk, c->k + i * prepared_stride(dk), (size_t)dk * sizeof(float));
  matrix keys = {c->faded_keys, 0, rows, dk};
  product(c->k, rows, keys, 0, c->kk, CHUNK, 1);
  product(c->q, rows, keys, 0, c->qk, CHUNK, 1);
  for (int64_t i = 0; i < rows; i += LANES)
    store_upto(c->decay + i, exp8(load_upto(c->total + i, rows - i)), rows - i);
  for (int64_t i = 0; i < rows; i++) {
    float *u = c->u + i * dv, b = beta[i * beta_stride];
    for (int64_t d = 0; d < dv; d++) u[d] = b * (v[i * v_stride + d] - c->decay[i] * u[d]);
    decayed(c->total, i, c->kk + i * CHUNK, i, -b, c->weights);
    combine(u, 1.0f, c->weights, 1, c->u, i, dv);
    decayed(c->total, i, c->qk + i * CHUNK, i + 1, 1.0f, c->weights);
    combine(c->o + i * dv, c->decay[i], c->weights, 1, c->u, i + 1, dv);
  }
  for (int64_t i = 0; i < rows; i++) {
    float remaining = expf(c->total[rows - 1] - c->total[i]);
    for (int64_t d = 0; d < dk; d++) c->faded_keys[i * dk + d] *= remaining;
  }
  for (int64_t d = 0; d < dv; d++)
    combine(c->state + d * dk, c->decay[rows - 1], c->u + d, dv, c->faded_keys, rows, dk);
}

static int check(const gdn_chunk_arguments *a) {
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n], start = a->groups.starts[n];
    if (slot < 0 || slot >= a->num_slots) return BAD_SLOT;
    if (start % CHUNK) return BAD_START;
    for (int64_t h = 0; start && h < a->value_heads; h++)
      if (a->num_folded[slot * a->value_heads + h] != start) return BAD_START;
  }
  return DONE;
}

int metrale_gdn_chunk(const gdn_chunk_arguments *a) {
  int64_t dk = a->key_dim, dv = a->value_dim, stride = prepared_stride(dk),
          ratio = a->value_heads / a->key_heads;
  int64_t width = a->value_heads * dv, state_floats = dv * dk;
  int status = check(a);
  if (status) return status;
  float *memory = scratch(CHUNK * (3 * stride + 2 * dv + 2 * CHUNK + 3));
  if (!memory) return NO_MEMORY;
  chunk c = {.q = memory, .k = memory + CHUNK * stride, .faded_keys = memory + 2 * CHUNK * stride};
  c.u = memory + 3 * CHUNK * stride, c.o = c.u + CHUNK * dv;
  c.kk = c.o + CHUNK * dv, c.qk = c.kk + CHUNK * CHUNK;
  c.total = c.qk + CHUNK * CHUNK, c.decay = c.total + CHUNK, c.weights = c.decay + CHUNK;
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t slot = a->groups.slots[n], start = a->groups.starts[n], end = a->groups.cu_rows[n + 1];
    for (int64_t h = 0; h < a->value_heads; h++) {
      int64_t kh = h / ratio;
      c.state = a->ssm + (slot * a->value_heads + h) * state_floats;
      if (!start) memset(c.state, 0, (size_t)state_floats * sizeof(float));
      for (int64_t first = a->groups.cu_rows[n]; first < end; first += CHUNK) {
        int64_t rows = min64(CHUNK, end - first);
        float total = 0.0f;
        for (int64_t i = 0; i < rows; i++) {
          int64_t from = ((first + i) * a->key_heads + kh) * dk;
          memcpy(c.q + i * stride, a->q + from, (size_t)dk * sizeof(float));
          memcpy(c.k + i * stride, a->k + from, (size_t)dk * sizeof(float));
          total += a->g[(first + i) * a->value_heads + h];
          c.total[i] = total;
        }
        run_chunk(&c, rows, dk, dv, a->v + first * width + h * dv, width,
                  a->beta + first * a->value_heads + h, a->value_heads);
        for (int64_t i = 0; i < rows; i++)
          memcpy(a->out + (first + i) * width + h * dv, c.o + i * dv, (size_t)dv * sizeof(float));
      }
      a->num_folded[slot * a->value_heads + h] = (int32_t)(start + group_rows(&a->groups, n));
    }
  }
  free(memory);
  return DONE;
}
