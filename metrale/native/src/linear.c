// `linear`: products with an optional prologue and epilogue, a bounded chunk of rows at a time.
#include "norms.h"
#include "product.h"

typedef struct {
  const float *x;
  int64_t row_stride;
  matrix weight;
  int64_t num_rows;
  const float *norm;  // [norm_groups, inner / norm_groups], or 0
  int64_t norm_groups;
  double eps;
  const float *residual;
  int64_t is_silu_mul, threads;
  float *out;
} linear_arguments;

// Rows whose prepared form stays in the second-level cache while a weight streams by.
static int64_t chunk_rows(int64_t inner) { return max64(24, min64(96, 65536 / inner / 6 * 6)); }

// Rows [first, first + rows) as the product wants them; `normed` holds one row.
static void prepare(const linear_arguments *a, int64_t first, int64_t rows, float *normed, float *prepared) {
  matrix w = a->weight;
  const float *x = a->x + first * a->row_stride;
  if (!a->norm) {
    prepare_rows(x, a->row_stride, rows, w, prepared);
    return;
  }
  int64_t width = w.inner / a->norm_groups;
  for (int64_t m = 0; m < rows; m++) {
    for (int64_t i = 0; i < w.inner; i += width)
      rms_norm_row(x + m * a->row_stride + i, a->norm + i, width, (float)a->eps, normed + i);
    prepare_rows(normed, w.inner, 1, w, prepared + m * prepared_stride(w.inner));
  }
}

int metrale_linear(const linear_arguments *a) {
  matrix w = a->weight;
  int64_t most = min64(chunk_rows(w.inner), a->num_rows), stride = prepared_stride(w.inner),
          width = a->is_silu_mul ? w.num_outputs / 2 : w.num_outputs;
  float *prepared = scratch((most + 1) * stride + (a->is_silu_mul ? most * w.num_outputs : 0));
  if (!prepared) return NO_MEMORY;
  float *normed = prepared + most * stride, *both = normed + stride;
  for (int64_t row = 0; row < a->num_rows; row += most) {
    int64_t rows = min64(most, a->num_rows - row);
    float *out = a->out + row * width;
    prepare(a, row, rows, normed, prepared);
    if (a->is_silu_mul) {
      product(prepared, rows, w, 0, both, w.num_outputs, a->threads);
      silu_mul(both, rows, width, out);
    } else {
      product(prepared, rows, w, a->residual ? a->residual + row * width : 0, out, width, a->threads);
    }
  }
  free(prepared);
  return DONE;
}
