// Eight-lane vectors for every operator: GCC and clang vector extensions, no intrinsics.
//
// Every function here gives an element the same bits in any lane, so that a padded tail equals a full vector.
#ifndef METRALE_VEC_H
#define METRALE_VEC_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef float v8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

enum { LANES = 8 };

#define INLINE static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

// Holds a value in a register: GCC otherwise folds one load into each of its uses, and the loads become the
// bound.
#if defined(__x86_64__) && defined(__AVX__)
#define PIN(v) __asm__("" : "+x"(v))
#else
#define PIN(v) (void)(v)
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i8){__VA_ARGS__})
#endif

#ifndef __has_builtin
#define __has_builtin(x) 0
#endif

INLINE v8 splat(float a) { return (v8){a, a, a, a, a, a, a, a}; }

INLINE v8 load(const float *p) {
  v8 a;
  memcpy(&a, p, sizeof a);
  return a;
}

INLINE void store(float *p, v8 a) { memcpy(p, &a, sizeof a); }

// The first `count` (0 to 8) floats, zeros after them.
INLINE v8 load_part(const float *p, int64_t count) {
  v8 a = {0};
  for (int64_t i = 0; i < count; i++) a[i] = p[i];
  return a;
}

INLINE void store_part(float *p, v8 a, int64_t count) {
  for (int64_t i = 0; i < count; i++) p[i] = a[i];
}

// `load` and `store` where at least 8 floats are left, the partial forms elsewhere.
INLINE v8 load_upto(const float *p, int64_t left) { return left >= LANES ? load(p) : load_part(p, left); }

INLINE void store_upto(float *p, v8 a, int64_t left) {
  if (left >= LANES)
    store(p, a);
  else
    store_part(p, a, left);
}

// a * b + c, rounded once where the machine has the instruction. Files are compiled with -ffp-contract=off,
// so that every other product and sum is rounded by itself.
INLINE v8 fma8(v8 a, v8 b, v8 c) {
#if __has_builtin(__builtin_elementwise_fma)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__FMA__)
  return (v8)__builtin_ia32_vfmaddps256(a, b, c);
#elif defined(__FP_FAST_FMAF)
  v8 r;
  UNROLL for (int i = 0; i < LANES; i++)
    r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

INLINE float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE v8 select8(i8 mask, v8 a, v8 b) { return (v8)(((i8)a & mask) | ((i8)b & ~mask)); }

INLINE v8 max8(v8 a, v8 b) { return select8(a > b, a, b); }

// The one horizontal sum: ((0+4) + (2+6)) + ((1+5) + (3+7)).
INLINE float hsum(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

INLINE v8 hsum_halves(v8 a, v8 b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE v8 hsum_pairs(v8 a, v8 b) {
  return SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}

// `hsum` of eight vectors at once, the same tree for each.
INLINE v8 hsum_each(v8 a, v8 b, v8 c, v8 d, v8 e, v8 f, v8 g, v8 h) {
  v8 s = hsum_pairs(hsum_halves(a, b), hsum_halves(c, d)),
     t = hsum_pairs(hsum_halves(e, f), hsum_halves(g, h));
  v8 r = SHUFFLE(s, t, 0, 2, 8, 10, 4, 6, 12, 14) + SHUFFLE(s, t, 1, 3, 9, 11, 5, 7, 13, 15);
  return SHUFFLE(r, r, 0, 4, 1, 5, 2, 6, 3, 7);
}

// e^x within 2 ulp; overflows to infinity, underflows gradually, keeps NaN. Cody-Waite reduction and the
// polynomial of Cephes' expf (Moshier).
INLINE v8 exp8(v8 x) {
  x = select8(x > 89.0f, splat(89.0f), x);
  x = select8(x < -104.0f, splat(-104.0f), x);
  v8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  v8 shifted = fma8(x, splat(1.44269504088896341f), magic);
  v8 n = shifted - magic;
  v8 r = fma8(n, splat(-0.693359375f), x);
  r = fma8(n, splat(2.12194440e-4f), r);
  v8 p = splat(1.9875691500e-4f);
  p = fma8(p, r, splat(1.3981999507e-3f));
  p = fma8(p, r, splat(8.3334519073e-3f));
  p = fma8(p, r, splat(4.1665795894e-2f));
  p = fma8(p, r, splat(1.6666665459e-1f));
  p = fma8(p, r, splat(5.0000001201e-1f));
  p = fma8(p, r * r, r) + 1.0f;
  i8 e = (i8)shifted - (i8)magic, half = e >> 1;  // two factors: 2^e alone may be no normal number
  return p * (v8)((u8)(half + 127) << 23) * (v8)((u8)(e - half + 127) << 23);
}

// Natural logarithm of a positive normal number within 2 ulp. The polynomial of Cephes' logf (Moshier).
INLINE v8 log8(v8 x) {
  i8 bits = (i8)x - 0x3f3504f3;  // sqrt(1/2): mantissas fall in [sqrt(1/2), sqrt(2))
  v8 e = __builtin_convertvector(bits >> 23, v8);
  v8 m = (v8)((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  v8 p = splat(7.0376836292e-2f);
  p = fma8(p, m, splat(-1.1514610310e-1f));
  p = fma8(p, m, splat(1.1676998740e-1f));
  p = fma8(p, m, splat(-1.2420140846e-1f));
  p = fma8(p, m, splat(1.4249322787e-1f));
  p = fma8(p, m, splat(-1.6668057665e-1f));
  p = fma8(p, m, splat(2.0000714765e-1f));
  p = fma8(p, m, splat(-2.4999993993e-1f));
  p = fma8(p, m, splat(3.3333331174e-1f));
  v8 z = m * m;
  p = fma8(e, splat(-2.12194440e-4f), m * z * p);
  p = fma8(z, splat(-0.5f), p);
  return fma8(e, splat(0.693359375f), m + p);
}

INLINE v8 sigmoid8(v8 x) { return 1.0f / (1.0f + exp8(-x)); }

INLINE v8 silu8(v8 x) { return x / (1.0f + exp8(-x)); }

// sum of x^2 over `count` floats, in one fixed order.
INLINE float sum_squares(const float *x, int64_t count) {
  v8 acc[4] = {{0}, {0}, {0}, {0}};
  int64_t i = 0;
  for (; i + 4 * LANES <= count; i += 4 * LANES)
    UNROLL for (int j = 0; j < 4; j++) {
      v8 a = load(x + i + j * LANES);
      acc[j] = fma8(a, a, acc[j]);
    }
  for (; i < count; i += LANES) {
    v8 a = load_upto(x + i, count - i);
    acc[0] = fma8(a, a, acc[0]);
  }
  return hsum((acc[0] + acc[2]) + (acc[1] + acc[3]));
}

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

// Scratch of one call, 64-byte aligned; NULL when memory is short.
INLINE float *scratch(int64_t floats) { return aligned_alloc(64, (size_t)round_up(floats * 4 + 64, 64)); }

// Results of every entry point; `build.py` turns those below zero into exceptions.
enum { DONE = 0, NO_MEMORY = -1, BAD_SLOT = -2, BAD_RING = -3 };
enum { BAD_PAGE = -4, BAD_POSITION = -5, BAD_START = -6, BELOW_ZERO = -7 };

#endif
