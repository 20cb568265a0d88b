// `moe`: top-k routed experts and a shared expert, summed in expert order.
#include "product.h"

typedef struct {
  const float *x;
  int64_t num_rows, num_experts, dim, inner, shared_inner, is_bf16;
  const char *router, *gate_up, *down, *shared_gate_up, *shared_down, *shared_gate;
  int64_t top_k, norm_topk, threads;
  const float *residual;
  float *out;
} moe_arguments;

typedef struct {
  float *logits;     // [rows, E]
  float *weights;    // [rows, E]: -1 where not chosen
  float *x;          // [rows, prepared]
  float *picked;     // [rows, prepared] of one expert's rows
  float *both;       // [rows, 2 * widest inner]
  float *hidden;     // [rows, prepared widest inner]
  float *activated;  // [rows, widest inner]
  float *y;          // [rows, D]
} buffers;

// Softmax over all experts, the top_k largest kept (lowest id on a tie), as weights: -1 where not
// chosen.
static void route(float *row, int64_t num_experts, int64_t top_k, int norm_topk, float *weights) {
  float highest = -INFINITY, kept = 0.0f;
  for (int64_t e = 0; e < num_experts; e++) highest = row[e] > highest ? row[e] : highest;
  v8 sums = {0};
  for (int64_t e = 0; e < num_experts; e += LANES) {
    int64_t left = num_experts - e;
    v8 p = exp8(load_upto(row + e, left) - highest);
    store_upto(row + e, p, left);
    sums += load_upto(row + e, left);
  }
  float total = hsum(sums);
  for (int64_t e = 0; e < num_experts; e++) row[e] /= total, weights[e] = -1.0f;
  for (int64_t i = 0; i < top_k; i++) {
    int64_t best = -1;
    for (int64_t e = 0; e < num_experts; e++)
      if (weights[e] < 0.0f && (best < 0 || row[e] > row[best])) best = e;
    weights[best] = row[best];
    kept += row[best];
  }
  if (norm_topk)
    for (int64_t e = 0; e < num_experts; e++)
      if (!(weights[e] < 0.0f)) weights[e] /= kept;
}

// y = expert(x) for prepared rows.
static void run_expert(const buffers *b, const float *x, int64_t rows, matrix gate_up, matrix down,
                       int64_t threads) {
  product(x, rows, gate_up, 0, b->both, gate_up.num_outputs, threads);
  silu_mul(b->both, rows, down.inner, b->activated);
  prepare_rows(b->activated, down.inner, rows, down, b->hidden);
  product(b->hidden, rows, down, 0, b->y, down.num_outputs, threads);
}

static void run(const moe_arguments *a, const buffers *b, const float *x, int64_t rows, float *out) {
  int64_t dim = a->dim, experts = a->num_experts, stride = prepared_stride(dim), size = a->is_bf16 ? 2 : 4;
  matrix router = {a->router, a->is_bf16, experts, dim}, gate = {a->shared_gate, a->is_bf16, 1, dim};
  prepare_rows(x, dim, rows, router, b->x);
  product(b->x, rows, router, 0, b->logits, experts, a->threads);
  for (int64_t m = 0; m < rows; m++)
    route(b->logits + m * experts, experts, a->top_k, (int)a->norm_topk, b->weights + m * experts);
  memset(out, 0, (size_t)(rows * dim) * sizeof(float));
  for (int64_t e = 0; e < experts; e++) {
    int64_t count = 0;
    for (int64_t m = 0; m < rows; m++)
      if (!(b->weights[m * experts + e] < 0.0f))
        memcpy(b->picked + count++ * stride, b->x + m * stride, (size_t)stride * sizeof(float));
    if (!count) continue;
    matrix gate_up = {a->gate_up + e * 2 * a->inner * dim * size, a->is_bf16, 2 * a->inner, dim};
    matrix down = {a->down + e * dim * a->inner * size, a->is_bf16, dim, a->inner};
    run_expert(b, b->picked, count, gate_up, down, a->threads);
    for (int64_t m = 0, i = 0; m < rows; m++) {
      float weight = b->weights[m * experts + e];
      if (weight < 0.0f) continue;
      for (int64_t d = 0; d < dim; d++) out[m * dim + d] += b->y[i * dim + d] * weight;
      i++;
    }
  }
  matrix gate_up = {a->shared_gate_up, a->is_bf16, 2 * a->shared_inner, dim};
  matrix down = {a->shared_down, a->is_bf16, dim, a->shared_inner};
  run_expert(b, b->x, rows, gate_up, down, a->threads);
  product(b->x, rows, gate, 0, b->logits, 1, a->threads);
  for (int64_t m = 0; m < rows; m++) {
    float opening = sigmoid8(splat(b->logits[m]))[0];
    for (int64_t d = 0; d < dim; d++) out[m * dim + d] += opening * b->y[m * dim + d];
  }
}

int metrale_moe(const moe_arguments *a) {
  int64_t most = min64(64, a->num_rows), dim = a->dim, widest = max64(a->inner, a->shared_inner);
  int64_t stride = prepared_stride(dim), experts = a->num_experts;
  int64_t sizes[] = {experts, experts, stride, stride, 2 * widest, prepared_stride(widest), widest, dim};
  float *at[8], *memory;
  int64_t floats = 0;
  for (int i = 0; i < 8; i++) floats += round_up(most * sizes[i], 16);
  if (!(memory = scratch(floats))) return NO_MEMORY;
  float *next = memory;
  for (int i = 0; i < 8; i++) at[i] = next, next += round_up(most * sizes[i], 16);
  buffers b = {at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
  for (int64_t row = 0; row < a->num_rows; row += most) {
    int64_t rows = min64(most, a->num_rows - row);
    float *out = a->out + row * dim;
    run(a, &b, a->x + row * dim, rows, out);
    if (a->residual)
      for (int64_t i = 0; i < rows * dim; i++) out[i] = a->residual[row * dim + i] + out[i];
  }
  free(memory);
  return DONE;
}
