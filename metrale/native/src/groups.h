// The row groups of one class, as `metrale.kernels.groups.Groups` has them.
#ifndef METRALE_GROUPS_H
#define METRALE_GROUPS_H

#include "vec.h"

typedef struct {
  int64_t count;
  const int32_t *slots, *starts, *cu_rows;
} groups;

INLINE int64_t group_rows(const groups *g, int64_t n) { return g->cu_rows[n + 1] - g->cu_rows[n]; }

INLINE int64_t most_rows(const groups *g) {
  int64_t most = 0;
  for (int64_t n = 0; n < g->count; n++) most = max64(most, group_rows(g, n));
  return most;
}

#endif
