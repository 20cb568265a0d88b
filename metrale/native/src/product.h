// Row-invariant products, shared by `linear` and `moe`.
#ifndef METRALE_PRODUCT_H
#define METRALE_PRODUCT_H

#include "vec.h"

// One weight matrix, [num_outputs, inner], rows contiguous.
typedef struct {
  const void *data;
  int64_t is_bf16, num_outputs, inner;
} matrix;

// Floats of one prepared row.
INLINE int64_t prepared_stride(int64_t inner) { return round_up(inner, 16); }

// Rows in the lane order that the weight's dtype wants, [num_rows, prepared_stride(inner)].
void prepare_rows(const float *x, int64_t row_stride, int64_t num_rows, matrix w, float *prepared);

// out[m, n] = dot(prepared[m], w[n]) (+ residual[m, n]); rows of out and residual are `out_stride` floats
// apart. Outputs are shared out over up to `threads` threads.
void product(const float *prepared, int64_t num_rows, matrix w, const float *residual, float *out,
             int64_t out_stride, int64_t threads);

// out[m, i] = silu(y[m, i]) * y[m, half + i].
void silu_mul(const float *y, int64_t num_rows, int64_t half, float *out);

#endif
