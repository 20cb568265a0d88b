// `rms_norm` and `gated_rms_norm`.
#include "norms.h"

typedef struct {
  const float *x, *scale;
  int64_t num_rows, width;
  double eps;
  float *out;
} rms_norm_arguments;

int metrale_rms_norm(const rms_norm_arguments *a) {
  int64_t width = a->width;
  for (int64_t row = 0; row < a->num_rows; row++)
    rms_norm_row(a->x + row * width, a->scale, width, (float)a->eps, a->out + row * width);
  return DONE;
}

typedef struct {
  const float *x, *gate;
  int64_t gate_stride;  // floats from one row's gate to the next
  const float *weight;
  int64_t num_rows, num_heads, dim;
  double eps;
  float *out;
} gated_rms_norm_arguments;

int metrale_gated_rms_norm(const gated_rms_norm_arguments *a) {
  int64_t dim = a->dim;
  for (int64_t row = 0; row < a->num_rows; row++)
    for (int64_t head = 0; head < a->num_heads; head++) {
      const float *x = a->x + (row * a->num_heads + head) * dim,
                  *gate = a->gate + row * a->gate_stride + head * dim;
      float *out = a->out + (row * a->num_heads + head) * dim;
      float inverse = 1.0f / sqrtf(sum_squares(x, dim) / (float)dim + (float)a->eps);
      for (int64_t i = 0; i < dim; i += LANES) {
        v8 value = load_upto(x + i, dim - i) * inverse * load_upto(a->weight + i, dim - i);
        store_upto(out + i, value * silu8(load_upto(gate + i, dim - i)), dim - i);
      }
    }
  return DONE;
}
