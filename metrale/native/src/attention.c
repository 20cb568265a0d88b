// `attention_verify` and `attention_prefill`: gated attention over paged keys and values.
//
// Keys are walked in blocks of 64 from position 0 with an online softmax. A (row, head) pair has chains of
// its own; rows share only the loads of a block, so both row classes run this one form.
#include "groups.h"

enum { BLOCK = 64, MOST_QUERIES = 4 };

typedef struct {
  const float *q, *projected;
  int64_t width, num_heads, num_kv_heads, dim;
  const float *k_cache, *v_cache;
  int64_t num_pages, page_size;
  groups groups;
  const int32_t *page_table;
  int64_t max_pages;
  float *out;
} attention_arguments;

INLINE void add_products(v8 acc[MOST_QUERIES][LANES], const float *queries, int64_t stride, const v8 k[LANES],
                         int num_queries, int num_keys) {
  UNROLL for (int q = 0; q < num_queries; q++) {
    v8 a = load(queries + q * stride);
    PIN(a);
    UNROLL for (int j = 0; j < num_keys; j++)
      acc[q][j] = fma8(a, k[j], acc[q][j]);
  }
}

// scores[q][j] = dot(queries[q], key[j]) for `num_keys` keys of `dim` floats; queries are padded with zeros
// to `stride`.
INLINE void score(const float *queries, int64_t stride, const float *const *key, int64_t dim, float *scores,
                  int num_queries, int num_keys) {
  v8 acc[MOST_QUERIES][LANES], k[LANES];
  UNROLL for (int q = 0; q < num_queries; q++)
    UNROLL for (int j = 0; j < LANES; j++) acc[q][j] = (v8){0};
  int64_t d = 0;
  for (; d + LANES <= dim; d += LANES) {
    UNROLL for (int j = 0; j < num_keys; j++)
      k[j] = load(key[j] + d);
    add_products(acc, queries + d, stride, k, num_queries, num_keys);
  }
  if (d < dim) {
    UNROLL for (int j = 0; j < num_keys; j++)
      k[j] = load_part(key[j] + d, dim - d);
    add_products(acc, queries + d, stride, k, num_queries, num_keys);
  }
  UNROLL for (int q = 0; q < num_queries; q++) {
    v8 *a = acc[q], sums = hsum_each(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    memcpy(scores + q * BLOCK, &sums, (size_t)num_keys * sizeof(float));
  }
}

INLINE void score_block(const float *queries, int64_t stride, const float *const *key, int64_t num_keys,
                        int64_t dim, float *scores, int num_queries, int at_once) {
  int64_t j = 0;
  for (; j + at_once <= num_keys; j += at_once)
    score(queries, stride, key + j, dim, scores + j, num_queries, at_once);
  for (; j < num_keys; j++) score(queries, stride, key + j, dim, scores + j, num_queries, 1);
}

// acc[q] += sum over j of weights[q][j] * value[j], j ascending, `vectors` vectors of acc from float d on.
INLINE void weigh(float *acc, int64_t stride, const float *weights, const float *const *value,
                  int64_t num_keys, int64_t d, int64_t left, int num_queries, int vectors) {
  v8 sum[MOST_QUERIES][LANES];
  UNROLL for (int q = 0; q < num_queries; q++)
    UNROLL for (int c = 0; c < vectors; c++) sum[q][c] = load(acc + q * stride + d + c * LANES);
  for (int64_t j = 0; j < num_keys; j++) {
    v8 v[LANES];
    UNROLL for (int c = 0; c < vectors; c++) {
      v[c] = vectors > 1 ? load(value[j] + d + c * LANES) : load_upto(value[j] + d, left);
      PIN(v[c]);
    }
    UNROLL for (int q = 0; q < num_queries; q++) {
      v8 w = splat(weights[q * BLOCK + j]);
      UNROLL for (int c = 0; c < vectors; c++)
        sum[q][c] = fma8(w, v[c], sum[q][c]);
    }
  }
  UNROLL for (int q = 0; q < num_queries; q++)
    UNROLL for (int c = 0; c < vectors; c++) store(acc + q * stride + d + c * LANES, sum[q][c]);
}

INLINE void weigh_block(float *acc, int64_t stride, const float *weights, const float *const *value,
                        int64_t num_keys, int64_t dim, int num_queries, int vectors) {
  int64_t d = 0;
  for (; d + vectors * LANES <= dim; d += vectors * LANES)
    weigh(acc, stride, weights, value, num_keys, d, dim - d, num_queries, vectors);
  for (; d < dim; d += LANES) weigh(acc, stride, weights, value, num_keys, d, dim - d, num_queries, 1);
}

// Scores to softmax weights under the running maximum; returns the factor by which older sums shrink.
static float soften(float *scores, int64_t num_keys, float scale, float *highest, float *total) {
  v8 top = splat(-INFINITY), sum = {0};
  for (int64_t j = num_keys; j < round_up(num_keys, LANES); j++) scores[j] = -INFINITY;
  for (int64_t j = 0; j < num_keys; j += LANES) {
    v8 s = load(scores + j) * scale;
    top = max8(s, top);
    store(scores + j, s);
  }
  float now = *highest;
  for (int j = 0; j < LANES; j++) now = top[j] > now ? top[j] : now;
  for (int64_t j = 0; j < num_keys; j += LANES) {
    v8 weight = exp8(load(scores + j) - now);
    sum += weight;
    store(scores + j, weight);
  }
  float shrink = exp8(splat(*highest - now))[0];
  *total = *total * shrink + hsum(sum);
  *highest = now;
  return shrink;
}

// One row's queries of one key head (at most MOST_QUERIES) against one block.
static void attend(const float *queries, int64_t stride, int64_t count, const float *const *key,
                   const float *const *value, int64_t num_keys, int64_t dim, float scale, float *acc,
                   float *highest, float *total) {
  float scores[MOST_QUERIES * BLOCK];
  switch (count) {
    case 1: score_block(queries, stride, key, num_keys, dim, scores, 1, 8); break;
    case 2: score_block(queries, stride, key, num_keys, dim, scores, 2, 4); break;
    case 3: score_block(queries, stride, key, num_keys, dim, scores, 3, 2); break;
    default: score_block(queries, stride, key, num_keys, dim, scores, 4, 2); break;
  }
  for (int64_t q = 0; q < count; q++) {
    float shrink = soften(scores + q * BLOCK, num_keys, scale, highest + q, total + q);
    for (int64_t d = 0; d < stride; d += LANES)
      store(acc + q * stride + d, load(acc + q * stride + d) * shrink);
  }
  switch (count) {
    case 1: weigh_block(acc, stride, scores, value, num_keys, dim, 1, 8); break;
    case 2: weigh_block(acc, stride, scores, value, num_keys, dim, 2, 4); break;
    case 3: weigh_block(acc, stride, scores, value, num_keys, dim, 3, 2); break;
    default: weigh_block(acc, stride, scores, value, num_keys, dim, 4, 2); break;
  }
}

static int check(const attention_arguments *a) {
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t rows = group_rows(&a->groups, n), num_keys = a->groups.starts[n] + rows;
    int64_t pages = rows ? (num_keys + a->page_size - 1) / a->page_size : 0;
    if (pages > a->max_pages) return BAD_PAGE;
    for (int64_t p = 0; p < pages; p++) {
      int64_t page = a->page_table[n * a->max_pages + p];
      if (page < 0 || page >= a->num_pages) return BAD_PAGE;
    }
  }
  return DONE;
}

// Where positions [begin, begin + count) of a sequence have their keys and values.
static void find_keys(const attention_arguments *a, const int32_t *pages, int64_t begin, int64_t count,
                      int64_t kv, const float **key, const float **value) {
  int64_t size = a->page_size, page = begin / size, offset = begin % size, width = a->num_kv_heads * a->dim;
  for (int64_t j = 0; j < count; page++, offset = 0)
    for (int64_t at = (pages[page] * size + offset) * width + kv * a->dim; offset < size && j < count;
         offset++, j++, at += width)
      key[j] = a->k_cache + at, value[j] = a->v_cache + at;
}

// A tile of one group's rows [first, first + rows), the first at `position`; memory holds query, acc,
// highest, total.
static void attend_tile(const attention_arguments *a, int64_t group, int64_t first, int64_t rows,
                        int64_t position, float *memory) {
  int64_t dim = a->dim, stride = round_up(dim, LANES), ratio = a->num_heads / a->num_kv_heads,
          count = rows * ratio;
  const int32_t *pages = a->page_table + group * a->max_pages;
  float *query = memory, *acc = query + count * stride, *highest = acc + count * stride,
        *total = highest + count;
  float scale = (float)(1.0 / sqrt((double)dim));
  for (int64_t kv = 0; kv < a->num_kv_heads; kv++) {
    memset(memory, 0, (size_t)(2 * count * stride) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
      int64_t head = (first + i / ratio) * a->num_heads + kv * ratio + i % ratio;
      memcpy(query + i * stride, a->q + head * dim, (size_t)dim * sizeof(float));
      highest[i] = -INFINITY, total[i] = 0.0f;
    }
    for (int64_t begin = 0; begin < position + rows; begin += BLOCK) {
      const float *key[BLOCK], *value[BLOCK];
      find_keys(a, pages, begin, min64(BLOCK, position + rows - begin), kv, key, value);
      for (int64_t i = max64(0, begin - position); i < rows; i++)
        for (int64_t r = i * ratio; r < (i + 1) * ratio; r += MOST_QUERIES)
          attend(query + r * stride, stride, min64(MOST_QUERIES, (i + 1) * ratio - r), key, value,
                 min64(BLOCK, position + i + 1 - begin), dim, scale, acc + r * stride, highest + r,
                 total + r);
    }
    for (int64_t i = 0; i < count; i++) {
      int64_t row = first + i / ratio, head = kv * ratio + i % ratio;
      const float *gate = a->projected + row * a->width + (2 * head + 1) * dim;
      float *out = a->out + (row * a->num_heads + head) * dim;
      for (int64_t d = 0; d < dim; d += LANES) {
        v8 mean = load(acc + i * stride + d) / total[i];
        store_upto(out + d, mean * sigmoid8(load_upto(gate + d, dim - d)), dim - d);
      }
    }
  }
}

int metrale_attention(const attention_arguments *a) {
  int64_t tile = min64(BLOCK, most_rows(&a->groups)), stride = round_up(a->dim, LANES);
  int status = check(a);
  if (status || !tile) return status;
  float *memory = scratch(tile * a->num_heads / a->num_kv_heads * (2 * stride + 2));
  if (!memory) return NO_MEMORY;
  for (int64_t n = 0; n < a->groups.count; n++) {
    int64_t rows = group_rows(&a->groups, n);
    for (int64_t i = 0; i < rows; i += tile)
      attend_tile(a, n, a->groups.cu_rows[n] + i, min64(tile, rows - i), a->groups.starts[n] + i, memory);
  }
  free(memory);
  return DONE;
}
