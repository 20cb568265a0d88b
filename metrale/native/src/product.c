// Row-invariant products of float32 rows with a float32 or bfloat16 weight.
//
// A dot product is one eight-lane accumulator, walked from the first element to the last with a fused
// multiply-add, then `hsum`, then a scalar tail. How many rows and outputs share a register block changes
// loads alone, never a bit.
#include "product.h"

#include "team.h"

// Elements walked per round: 16 bfloat16 are one vector load, split in even and odd ones.
enum { BF16_STEP = 16, PANEL = 24, MOST_ROWS = 6 };

// What a piece of a product for another thread must cost to be worth the handing over, about 5 us: elements
// of the weight, each counted once for its load and once for every row.
enum { LEAST_PIECE = 65536, PIECES_PER_THREAD = 2 };

_Static_assert(PIECES_PER_THREAD * MOST_THREADS <= MOST_PIECES, "run_pieces takes so many");

void prepare_rows(const float *x, int64_t row_stride, int64_t num_rows, matrix w, float *prepared) {
  int64_t stride = prepared_stride(w.inner), whole = w.inner - w.inner % BF16_STEP;
  for (int64_t m = 0; m < num_rows; m++) {
    const float *from = x + m * row_stride;
    float *to = prepared + m * stride;
    if (!w.is_bf16) {
      memcpy(to, from, (size_t)w.inner * sizeof(float));
      continue;
    }
    for (int64_t k = 0; k < whole; k += BF16_STEP) {
      v8 a = load(from + k), b = load(from + k + LANES);
      store(to + k, SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14));
      store(to + k + LANES, SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15));
    }
    memcpy(to + whole, from + whole, (size_t)(w.inner - whole) * sizeof(float));
  }
}

INLINE v8 even_elements(const uint16_t *w) {
  u8 bits;
  memcpy(&bits, w, sizeof bits);
  return (v8)(bits << 16);
}

INLINE v8 odd_elements(const uint16_t *w) {
  u8 bits;
  memcpy(&bits, w, sizeof bits);
  return (v8)(bits & 0xffff0000u);
}

// What lies `bytes` on, which may be past the end of everything: a number, not a pointer, until then.
INLINE void prefetch(const void *p, int64_t bytes) {
  __builtin_prefetch((const void *)((uintptr_t)p + (uintptr_t)bytes));
}

// acc[m][n] += x[m] * w[n] for one vector of each.
INLINE void accumulate(v8 acc[MOST_ROWS][LANES], const float *x, int64_t stride, v8 w[LANES], int rows,
                       int outputs) {
  UNROLL for (int m = 0; m < rows; m++) {
    v8 a = load(x + m * stride);
    PIN(a);
    UNROLL for (int n = 0; n < outputs; n++)
      acc[m][n] = fma8(a, w[n], acc[m][n]);
  }
}

INLINE float tail(const float *x, const void *w, int is_bf16, int64_t first, int64_t inner) {
  float sum = 0.0f;
  for (int64_t k = first; k < inner; k++) {
    float a;
    if (is_bf16) {
      uint32_t bits = (uint32_t)((const uint16_t *)w)[k] << 16;
      memcpy(&a, &bits, sizeof a);
    } else {
      a = ((const float *)w)[k];
    }
    sum = fma1(x[k], a, sum);
  }
  return sum;
}

// `rows` x `outputs` results from one pass over `outputs` weight rows, the next rows prefetched meanwhile.
INLINE void block(const float *x, const void *weight, int is_bf16, int64_t inner, const float *residual,
                  float *out, int64_t out_stride, int rows, int outputs) {
  const int step = is_bf16 ? BF16_STEP : LANES;
  const int64_t stride = prepared_stride(inner), whole = inner - inner % step, ahead = outputs * inner;
  const uint16_t *half = weight;
  const float *full = weight;
  v8 acc[MOST_ROWS][LANES], w[LANES];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < LANES; n++) acc[m][n] = (v8){0};
  for (int64_t k = 0; k < whole; k += step) {
    if (is_bf16) {
      if (rows == 1) {
        v8 even = load(x + k), odd = load(x + k + LANES);
        UNROLL for (int n = 0; n < outputs; n++) {
          u8 bits;
          memcpy(&bits, half + n * inner + k, sizeof bits);
          prefetch(half + n * inner + k, 2 * ahead);
          PIN(bits);
          acc[0][n] = fma8(even, (v8)(bits << 16), acc[0][n]);
          acc[0][n] = fma8(odd, (v8)(bits & 0xffff0000u), acc[0][n]);
        }
      } else {
        UNROLL for (int n = 0; n < outputs; n++) {
          prefetch(half + n * inner + k, 2 * ahead);
          w[n] = even_elements(half + n * inner + k);
        }
        accumulate(acc, x + k, stride, w, rows, outputs);
        UNROLL for (int n = 0; n < outputs; n++)
          w[n] = odd_elements(half + n * inner + k);
        accumulate(acc, x + k + LANES, stride, w, rows, outputs);
      }
    } else {
      UNROLL for (int n = 0; n < outputs; n++) {
        prefetch(full + n * inner + k, 4 * ahead);
        w[n] = load(full + n * inner + k);
      }
      accumulate(acc, x + k, stride, w, rows, outputs);
    }
  }
  float sums[2 * LANES];
  UNROLL for (int first = 0; first < rows * outputs; first += LANES) {
    v8 each[LANES];
    UNROLL for (int i = 0; i < LANES; i++) {
      int at = first + i < rows * outputs ? first + i : first;
      each[i] = acc[at / outputs][at % outputs];
    }
    store(sums + first,
          hsum_each(each[0], each[1], each[2], each[3], each[4], each[5], each[6], each[7]));
  }
  if (whole < inner)
    for (int i = 0; i < rows * outputs; i++) {
      const char *row = (const char *)weight + i % outputs * inner * (is_bf16 ? 2 : 4);
      sums[i] += tail(x + i / outputs * stride, row, is_bf16, whole, inner);
    }
  if (residual)
    for (int i = 0; i < rows * outputs; i++)
      sums[i] = residual[i / outputs * out_stride + i % outputs] + sums[i];
  UNROLL for (int m = 0; m < rows; m++)
    memcpy(out + m * out_stride, sums + m * outputs, (size_t)outputs * sizeof(float));
}

typedef struct {
  const float *x, *residual;
  float *out;
  int64_t out_stride;
} target;

INLINE void outputs_of(target t, matrix w, int64_t first, int64_t last, int is_bf16, int rows, int outputs) {
  const int size = is_bf16 ? 2 : 4;
  int64_t n = first;
  for (; n + outputs <= last; n += outputs)
    block(t.x, (const char *)w.data + n * w.inner * size, is_bf16, w.inner, t.residual ? t.residual + n : 0,
          t.out + n, t.out_stride, rows, outputs);
  for (; n < last; n++)
    block(t.x, (const char *)w.data + n * w.inner * size, is_bf16, w.inner, t.residual ? t.residual + n : 0,
          t.out + n, t.out_stride, rows, 1);
}

// Outputs per register block, so that accumulators, weights and one activation fit 16 registers without a
// spill.
#define CASE(rows, outputs)                            \
  case rows:                                           \
    if (w.is_bf16)                                     \
      outputs_of(t, w, first, last, 1, rows, outputs); \
    else                                               \
      outputs_of(t, w, first, last, 0, rows, outputs); \
    break;

static void rows_of(target t, matrix w, int64_t first, int64_t last, int64_t rows) {
  switch (rows) {
    CASE(1, 8)
    CASE(2, 4)
    CASE(3, 3)
    CASE(4, 2)
    CASE(5, 2)
    CASE(6, 2)
  }
}

typedef struct {
  const float *prepared, *residual;
  float *out;
  int64_t out_stride, num_rows, outputs_per_piece;
  matrix w;
} task;

static void product_piece(const void *context, int64_t index) {
  const task *job = context;
  matrix w = job->w;
  int64_t stride = prepared_stride(w.inner), num_blocks = (job->num_rows + MOST_ROWS - 1) / MOST_ROWS;
  int64_t begin = index * job->outputs_per_piece, end = min64(begin + job->outputs_per_piece, w.num_outputs);
  int64_t panel = num_blocks > 1 ? PANEL : end - begin;
  for (int64_t first = begin; first < end; first += panel) {
    int64_t last = min64(first + panel, end);
    for (int64_t i = 0, row = 0; i < num_blocks; i++) {
      int64_t rows = (job->num_rows - row) / (num_blocks - i), at = row * job->out_stride;
      target t = {job->prepared + row * stride, job->residual ? job->residual + at : 0, job->out + at,
                  job->out_stride};
      rows_of(t, w, first, last, rows);
      row += rows;
    }
  }
}

void product(const float *prepared, int64_t num_rows, matrix w, const float *residual, float *out,
             int64_t out_stride, int64_t threads) {
  threads = min64(threads, MOST_THREADS);
  int64_t panels = (w.num_outputs + PANEL - 1) / PANEL;
  int64_t worthwhile = w.num_outputs * w.inner * (num_rows + 1) / LEAST_PIECE;
  int64_t most = max64(1, min64(min64(worthwhile, panels), threads < 2 ? 1 : PIECES_PER_THREAD * threads));
  int64_t per_piece = (panels + most - 1) / most * PANEL;
  task job = {prepared, residual, out, out_stride, num_rows, per_piece, w};
  if (num_rows && w.num_outputs)
    run_pieces(product_piece, &job, (w.num_outputs + per_piece - 1) / per_piece, threads);
}

void silu_mul(const float *y, int64_t num_rows, int64_t half, float *out) {
  for (int64_t m = 0; m < num_rows; m++)
    for (int64_t i = 0; i < half; i += LANES) {
      const float *gate = y + m * 2 * half + i;
      v8 value = silu8(load_upto(gate, half - i)) * load_upto(gate + half, half - i);
      store_upto(out + m * half + i, value, half - i);
    }
}
