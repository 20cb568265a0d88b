// `rotary_store`: query and key norms, rotary embedding, keys and values into their pages.
#include "vec.h"

typedef struct {
  const float *projected;
  int64_t num_rows, num_heads, num_kv_heads, dim, half;  // half: rotary dimensions / 2
  const float *q_norm, *k_norm, *cos, *sin;
  int64_t num_positions;
  const int64_t *positions, *kv_index;
  float *k_cache, *v_cache;
  int64_t num_cache_rows;
  double eps;
  float *q;
} rotary_store_arguments;

static void norm_and_turn(const float *x, const float *scale, const float *cos, const float *sin, int64_t dim,
                          int64_t half, float eps, float *out) {
  float inverse = 1.0f / sqrtf(sum_squares(x, dim) / (float)dim + eps);
  for (int64_t i = 0; i < half; i++) {
    float first = x[i] * inverse * scale[i], second = x[i + half] * inverse * scale[i + half];
    out[i] = first * cos[i] - second * sin[i];
    out[i + half] = second * cos[i] + first * sin[i];
  }
  for (int64_t i = 2 * half; i < dim; i++) out[i] = x[i] * inverse * scale[i];
}

int metrale_rotary_store(const rotary_store_arguments *a) {
  int64_t dim = a->dim, kv_width = a->num_kv_heads * dim, width = 2 * a->num_heads * dim + 2 * kv_width;
  for (int64_t row = 0; row < a->num_rows; row++) {
    if (a->positions[row] < 0 || a->positions[row] >= a->num_positions) return BAD_POSITION;
    if (a->kv_index[row] < 0 || a->kv_index[row] >= a->num_cache_rows) return BAD_PAGE;
  }
  for (int64_t row = 0; row < a->num_rows; row++) {
    const float *x = a->projected + row * width, *keys = x + 2 * a->num_heads * dim;
    const float *cos = a->cos + a->positions[row] * a->half, *sin = a->sin + a->positions[row] * a->half;
    float *k = a->k_cache + a->kv_index[row] * kv_width, *v = a->v_cache + a->kv_index[row] * kv_width;
    for (int64_t h = 0; h < a->num_heads; h++)
      norm_and_turn(x + 2 * h * dim, a->q_norm, cos, sin, dim, a->half, (float)a->eps,
                    a->q + (row * a->num_heads + h) * dim);
    for (int64_t h = 0; h < a->num_kv_heads; h++)
      norm_and_turn(keys + h * dim, a->k_norm, cos, sin, dim, a->half, (float)a->eps, k + h * dim);
    memcpy(v, keys + kv_width, (size_t)kv_width * sizeof(float));
  }
  return DONE;
}
