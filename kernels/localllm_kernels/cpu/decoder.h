/* The structures of a decoder's layers, for decoder.c and head.c. */

#pragma once

#include "experts.h"
#include "recurrence.h"

/* How queries and keys are normed: each head before it is rotated, or after, or all heads of a row
 * as one. */
enum { NORM_HEADS, NORM_TURNED, NORM_ROWS };

typedef struct {
  /* Norms before and after attention, and before and after the feed-forward: [hidden], or NULL. */
  const float *input_norm, *attention_after, *mlp_norm, *mlp_after;
  const float *query_norm, *key_norm; /* [head_dim] each, all heads' with NORM_ROWS, or NULL */
  const float *sinks;                 /* [heads], or NULL */
  Product qkv, output, gate_up, down;
  const Mixture *mixture; /* in place of gate_up and down, or NULL */
  const Recurrence *recurrence; /* in place of attention, or NULL; `qkv` is its first product */
  Product factors;              /* of the recurrence, if the first product does not give them */
  int64_t inputs_at, gate_at, factors_at; /* columns of the first product; -1: `factors` gives them */
  int64_t first_width;                    /* of its outputs */
  int64_t window; /* 0: none */
  int64_t num_hidden; /* keys, see AttentionShape */
  int64_t group, place; /* of its keys and values: the cache group, and the place in it */
  int64_t rotation;     /* which of the batch's */
} Layer;

typedef struct {
  const Layer *layers;
  const float *last_norm;
  int64_t num_layers, hidden, inner, heads, kv_heads, head_dim;
  float eps, scale; /* of the norms; of the attention's scores */
  float cap;        /* of the scores; 0: none */
  float share;      /* of a block's output that joins the residual stream */
  int64_t gate;     /* a GATE_ */
  int64_t norm_kind; /* of queries and keys */
  int64_t has_gate;  /* attention's outputs have gates, the last outputs of the first product */
  /* The most of any layer: outputs of the first product, inputs of the second, and factors. */
  int64_t first_width, mixed_width, factors_width;
} Decoder;

/* Where a recurrent layer keeps what it needs; see Inputs and RecurrenceCall. */
typedef struct {
  float *kept;
  void *matrices;
  int64_t ring, has_half;
} State;

/* Angles of the batch's positions, [rows, head_dim / 2]. */
typedef struct {
  const float *cos, *sin;
} Angles;

typedef struct {
  const Angles *rotations;
  const float *growth; /* factors on the queries, [rows], or NULL */
  const int32_t *starts;
  const int64_t *lengths;
  int64_t rows, num_stored, seqs;
  const StateSlots *slots; /* NULL without recurrences */
  const State *states;     /* of each layer */
} Batch;

/* A cache group: where the batch's keys and values are in it, the cache of its first layer, and the
 * distance from one layer to the next, in bytes and in scales. */
typedef struct {
  const int64_t *slots;
  const int32_t *tables;
  int64_t max_blocks;
  KVCache first;
  int64_t layer_bytes, layer_scales; /* bytes of a layer's keys and of their scales */
  int64_t own_keys, uncoded; /* see AttentionShape; the group in which these keys are uncoded */
  int64_t is_uncoded;        /* this is such a group */
} Group;

typedef struct {
  float *normed, *qkv, *query, *mixed, *projected, *gate_up, *inner, *factors;
  char *rounded; /* inputs of a product */
  char *mixture;
} Scratch;

typedef struct {
  const Decoder *decoder;
  const Batch *batch;
  const Group *groups;
  AttentionTask **tasks; /* for each group but uncoded ones; all have `num_tasks` */
  int64_t num_tasks;
  float *const *taps;
  float *x;
  Scratch scratch;
  char *of_threads; /* scratch of the recurrences */
  int64_t only_stores; /* the last layer ends once its keys and values are stored */
} Forward;

/* Places the parts of the scratch in `memory`, unless it is NULL; returns the bytes they take. */
int64_t divide_scratch(const Decoder *d, int64_t rows, char *memory, Scratch *parts);

/* All layers and the last norm: `arguments` is a Forward, whose x it overwrites. The threads have not
 * met when it returns. */
void team_forward(const Team *team, void *arguments);
