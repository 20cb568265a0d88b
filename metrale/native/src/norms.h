// RMSNorm of one row, shared by `rms_norm` and the prologue of `linear`.
#ifndef METRALE_NORMS_H
#define METRALE_NORMS_H

#include "vec.h"

INLINE void rms_norm_row(const float *x, const float *scale, int64_t width, float eps, float *out) {
  float inverse = 1.0f / sqrtf(sum_squares(x, width) / (float)width + eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * inverse * scale[i];
}

#endif
