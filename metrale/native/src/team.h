// Several threads for one operator call.
#ifndef METRALE_TEAM_H
#define METRALE_TEAM_H

#include <stdint.h>

typedef void (*piece)(const void *context, int64_t index);

enum { MOST_PIECES = 4095, MOST_THREADS = 256 };

// Runs work(context, 0) .. work(context, count - 1) on up to `threads` threads, the caller among them, and
// returns when all are done. Pieces must not depend on one another: which thread takes which is chance.
// count <= MOST_PIECES.
void run_pieces(piece work, const void *context, int64_t count, int64_t threads);

#endif
