/* The operators, which all threads of a team call together: each does its share, and all return
 * together. Shapes are given with the functions. */

#pragma once

#include "common.h"
#include "team.h"

/* SCALE_E8M0: bytes, 127 above the exponent of two; SCALE_E4M3: bytes, floats of eight bits. With
 * these, codes of 4 bits are floats (e2m1). */
enum { SCALE_FLOAT32, SCALE_BFLOAT16, SCALE_NONE, SCALE_E8M0, SCALE_E4M3 };

/* y = x · wᵀ + bias, w = (code - zero) · scale · factor with one scale and zero per group of inputs,
 * and one factor per output. */
typedef struct {
  const uint8_t *codes; /* 4 bits: [blocks][in / 8][LANES][4], low halves: inputs 0 to 3, high: 4 to 7;
                           3 bits: [blocks][LANES zeros, chunks of trellis.h];
                           8 bits: [blocks][in / 4][LANES][4], 128 above the signed code, or
                           signed ones [out][in] */
  const void *scales;   /* [blocks][groups][LANES], or NULL */
  const float *factors; /* [blocks][LANES], or NULL */
  const uint8_t *zeros; /* [blocks][groups][LANES], or NULL: all 8, or 128 */
  const float *bias;    /* [out], or NULL */
  const uint8_t *table; /* of 3 bits: the steps, see trellis.h; else NULL */
  const float *signs;   /* [in], of inputs that are rotated; else NULL */
  int64_t bits;         /* 3, 4 or 8 */
  int64_t scale_kind;   /* a SCALE_ */
  int64_t width_out, width_in, group_size; /* of the inputs' groups; a multiple of 16 */
  int64_t is_in_rows;   /* the codes are [out][in], whose rows are whole vectors */
} IntegerWeight;

/* VALUES_FP8: e4m3, with a scale for each block of outputs and inputs. */
enum { VALUES_FLOAT32, VALUES_BFLOAT16, VALUES_FLOAT16, VALUES_INT8, VALUES_FP8 };
typedef struct {
  const void *values; /* [out, in] */
  const float *bias;  /* [out], or NULL */
  int64_t width_out, width_in;
  int64_t values_kind;      /* a VALUES_ of floats */
  const float *scales;      /* [blocks of outputs, blocks of inputs], or NULL */
  int64_t block_outputs, block_inputs; /* of a block: inputs by whole vectors, or all */
} FloatWeight;

/* The functions of a gate, see gate.py. */
enum { GATE_SILU, GATE_GELU, GATE_CLAMPED, GATE_RELU2 };
/* How many rows of the inner width a gate reads. */
static inline int64_t gate_parts(int64_t kind) { return kind == GATE_RELU2 ? 1 : 2; }

/* Types of GGUF's blocks, whose layouts gguf_blocks.py tells. */
enum {
  BLOCK_Q4_0, BLOCK_Q4_1, BLOCK_Q5_0, BLOCK_Q5_1, BLOCK_Q8_0, BLOCK_Q2_K, BLOCK_Q3_K, BLOCK_Q4_K,
  BLOCK_Q5_K, BLOCK_Q6_K, BLOCK_IQ4_NL, BLOCK_IQ4_XS, BLOCK_MXFP4
};
typedef struct {
  const uint8_t *rows; /* [count][row_bytes] */
  int64_t type, count, row_bytes;
} BlockRows;
typedef struct {
  const BlockRows *parts; /* rows of one type each, one below the other */
  const int32_t *places;  /* [out], which output each row is, or NULL: they are in order */
  const float *bias;      /* [out], or NULL */
  int64_t num_parts, width_out, width_in;
} BlockWeight;

enum { FLOAT32, BFLOAT16, INTEGER, BLOCKS };
typedef struct {
  int64_t kind;
  const void *weight; /* FloatWeight, IntegerWeight or BlockWeight */
} Product;

/* Keys and values of one layer, see kv_cache.py. */
enum { KV_FLOAT32, KV_BFLOAT16, KV_INT8, KV_FP8, KV_INT4 };
#define MAX_DIM 576     /* of a head that attention takes */
#define STORED_DIM 1024 /* of one that is stored */
#define MEANS4 4    /* of a head's keys; the lowest bits of a key's scale say which one it has */
typedef struct {
  void *keys, *values;             /* [blocks, kv_heads, block_size, head_dim] */
  void *key_scales, *value_scales; /* [blocks, kv_heads, block_size], or NULL: floats, of KV_INT4 in
                                      bfloat16 */
  const float *key_means, *key_factors; /* of KV_INT4, see four_bits.py: [kv_heads, MEANS4, head_dim],
                                           [kv_heads, head_dim]; means in 8 bits: the latter, or NULL */
  const float *key_feedback;            /* [kv_heads, head_dim, head_dim] */
  int64_t kind, kv_heads, head_dim, block_size;
  int64_t is_turned; /* the keys of a block lie side by side */
} KVCache;

typedef struct {
  KVCache cache;
  int64_t heads;
  int64_t window; /* 0: none */
  float scale;
  float cap;          /* scores become cap · tanh(score / cap); 0: none */
  const float *sinks; /* [heads], scores that weigh but have no value, or NULL */
  int64_t num_hidden; /* the first keys, which no query sees; one that sees none gives zeros */
  int64_t own_keys; /* in a run that begins at a multiple: a query's own run is read from `uncoded`;
                       0: there are none */
  KVCache uncoded;
} AttentionShape;

/* Queries of one request, with the heads that share one key/value head; over all keys, or over one
 * stretch of them, or over the queries' own keys. */
typedef struct {
  const int32_t *table;
  int64_t kv_head, first_query; /* row of the first query in the batch */
  int64_t num_queries, first_position;
  int64_t stretch;    /* or -1 */
  int64_t is_uncoded; /* over the queries' own keys, see AttentionShape */
  int64_t num_joined; /* parts of the same queries, this one's and those of the tasks after it; or 0 */
  float *part;        /* where the part goes, or NULL if there is only one */
} AttentionTask;

/* Block tables of a batch, of `max_blocks` each. */
typedef struct {
  const int32_t *blocks;
  int64_t max_blocks;
} Tables;

/* The cache is written, if it has heads; query: [rows, heads, head_dim]. */
typedef struct {
  const float *cos, *sin; /* [rows, head_dim / 2]; NULL: the heads are rotated already */
  const float *query_norm, *key_norm; /* [head_dim] each, or NULL */
  float eps;
  const int64_t *slots; /* [num_stored]; rows with slot -1 and rows past the end are not stored */
  KVCache cache;
  const int64_t *uncoded_slots; /* as slots */
  KVCache uncoded;              /* where keys and values are written too, if it has heads */
  int64_t rows, num_stored, heads;
  int64_t has_values, norms_values; /* else keys are values; values are normed, without a weight */
  int64_t stride; /* between rows of queries, keys and values */
} Rotation;

void team_rms_norm(const Team *team, const float *x, const float *weight, float eps, float *y,
                   int64_t rows, int64_t width);
/* total may alias residual. */
void team_add_rms_norm(const Team *team, const float *x, const float *residual, const float *weight,
                       float eps, float *total, float *y, int64_t rows, int64_t width);
/* x += y; y *= factor; all [rows, width]. */
void team_add(const Team *team, const float *y, float *x, int64_t rows, int64_t width);
void team_scale(const Team *team, float *y, float factor, int64_t rows, int64_t width);
/* kind: a GATE_; gate_up: [rows, gate_parts(kind) * width]. */
void team_gate(const Team *team, const float *gate_up, float *y, int64_t rows, int64_t width,
               int64_t kind);
/* x · sigmoid(gate), x and y: [rows, width], y may be x; rows of the gate are `stride` apart. */
void team_sigmoid_gate(const Team *team, const float *x, const float *gate, int64_t stride, float *y,
                       int64_t rows, int64_t width);
/* The first heads of each row of x, in place; rows are `stride` apart. */
void team_rotate(const Team *team, const Rotation *r, float *x, int64_t stride, int64_t heads);
/* The first `count` stretches of `width` of each row of x, each by itself, in place. */
void team_norm_stretches(const Team *team, float *x, const float *weight, float eps, int64_t rows,
                         int64_t stride, int64_t count, int64_t width);
/* Each row of x by its own factor. */
void team_scale_rows(const Team *team, float *x, const float *factors, int64_t rows, int64_t width);
void team_rotate_and_store(const Team *team, const Rotation *r, const float *qkv, float *query);
void team_attention(const Team *team, const AttentionShape *s, const AttentionTask *tasks,
                    int64_t count, const float *query, float *out);
/* scratch: integer_scratch_bytes(w, rows). */
void team_integer_linear(const Team *team, const IntegerWeight *w, const float *x, float *y,
                         int64_t rows, char *scratch);
void team_float32_linear(const Team *team, const FloatWeight *w, const float *x, float *y,
                         int64_t rows);
/* Of weights in bfloat16 or e4m3; scratch: bfloat16_scratch_bytes(w, rows). */
void team_bfloat16_linear(const Team *team, const FloatWeight *w, const float *x, float *y,
                          int64_t rows, char *scratch);

int64_t integer_scratch_bytes(const IntegerWeight *w, int64_t rows);
/* The parts of an integer product, for callers that share out several products at once: row `row` of
 * `rows` is quantized into `memory`, `rows` times integer_row_bytes(w); then any thread multiplies
 * any block of LANES outputs. */
int64_t integer_row_bytes(const IntegerWeight *w);
void integer_quantize_row(const IntegerWeight *w, const float *x, int64_t row, int64_t rows,
                          char *memory);
int64_t integer_blocks(const IntegerWeight *w);
void integer_multiply_block(const IntegerWeight *w, int64_t block, char *memory, float *y,
                            int64_t rows);
int64_t bfloat16_scratch_bytes(const FloatWeight *w, int64_t rows);

/* The same of a weight in blocks. */
void team_blocks_linear(const Team *team, const BlockWeight *w, const float *x, float *y,
                        int64_t rows, char *scratch);
int64_t blocks_scratch_bytes(const BlockWeight *w, int64_t rows);
int64_t blocks_row_bytes(const BlockWeight *w);
void blocks_quantize_row(const BlockWeight *w, const float *x, int64_t row, int64_t rows,
                         char *memory);
int64_t blocks_panels(const BlockWeight *w);
void blocks_multiply_panel(const BlockWeight *w, int64_t number, char *memory, float *y,
                           int64_t rows);
/* The tasks of a batch, which the caller frees; NULL if memory runs out, or if the shape of the
 * heads is not supported. starts: [seqs + 1]; lengths: [seqs]; tables: [seqs, max_blocks]. */
AttentionTask *attention_tasks(Tables tables, Tables uncoded, const int32_t *starts,
                               const int64_t *lengths, int64_t seqs, const AttentionShape *s,
                               int64_t *count);
