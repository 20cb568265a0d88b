// `linear`: products with an optional epilogue, a bounded chunk of rows at a time.
#include "product.h"

typedef struct {
  const float *x;
  int64_t row_stride;
  matrix weight;
  int64_t num_rows;
  const float *residual;
  int64_t is_silu_mul;
  float *out;
} linear_arguments;

// Rows whose prepared form stays in the second-level cache while a weight streams by.
static int64_t chunk_rows(int64_t inner) { return max64(24, min64(96, 65536 / inner / 6 * 6)); }

int metrale_linear(const linear_arguments *a) {
  matrix w = a->weight;
  int64_t most = min64(chunk_rows(w.inner), a->num_rows),
          width = a->is_silu_mul ? w.num_outputs / 2 : w.num_outputs;
  int64_t prepared_floats = round_up(most * prepared_stride(w.inner), 16);
  float *prepared = scratch(prepared_floats + (a->is_silu_mul ? most * w.num_outputs : 0));
  float *both = prepared + prepared_floats;
  if (!prepared) return NO_MEMORY;
  for (int64_t row = 0; row < a->num_rows; row += most) {
    int64_t rows = min64(most, a->num_rows - row);
    prepare_rows(a->x + row * a->row_stride, a->row_stride, rows, w, prepared);
    if (a->is_silu_mul) {
      product(prepared, rows, w, 0, both, w.num_outputs);
      silu_mul(both, rows, width, a->out + row * width);
    } else {
      product(prepared, rows, w, a->residual ? a->residual + row * width : 0, a->out + row * width, width);
    }
  }
  free(prepared);
  return DONE;
}
