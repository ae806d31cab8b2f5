/* A head that drafts, and what is asked of it; see head.c. */

#pragma once

#include "decoder.h"

typedef struct {
  const Decoder *decoder;
  const void *embeddings; /* [tokens, hidden] */
  int64_t embeddings_kind;       /* a VALUES_, but not of halves */
  const float *embedding_scales; /* [tokens], of VALUES_INT8 */
  float embedding_scale;
  const float *embedding_norm, *hidden_norm; /* [hidden] */
  Product join;                              /* of both, side by side */
  Product output;
  const int64_t *drafted; /* the token of each output, or NULL if it is the output's index */
  const float *cos, *sin; /* [positions, head_dim / 2] */
} Head;

/* `num_drafts` tokens behind those of the slots `start` to `end`, or none, where only the entries of
 * these are wanted; slots count from the first block of `table`. */
typedef struct {
  const int32_t *table;   /* [num_blocks] */
  const int64_t *tokens;  /* of slots `start` to `end` */
  const uint64_t *keys;   /* of the noise of each draft */
  int64_t num_blocks, start, end, num_drafts;
  float temperature; /* 0: the likeliest token */
} Drafting;
