/* Matrices in the tiles of AMX: C, sums of 16 rows and columns, += A · B, in the order of the words.
 *
 * A has the words of up to 16 rows, one row behind the other; B, of 16 columns, has their first words
 * side by side, then their second ones. A word is four bytes, or two numbers in bfloat16. Intel 2023,
 * "Architecture Instruction Set Extensions Programming Reference", chapter 3. */

#pragma once

#include "common.h"

#if defined(__AMX_INT8__) && defined(__AMX_BF16__) && LANES == 16
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

/* Rows of a tile, and tiles of rows that share one of columns. */
#define TILE_ROWS 16
#define TILES 4

/* Whether this process may use them: the kernel keeps their state, and has to be asked. */
int tiles_are_allowed(void);

#if HAS_TILES
/* Tiles 0 to 3 are sums, 4 has rows, 5 columns. */
typedef struct {
  uint8_t palette, first_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

/* For `rows` rows of `words` words; sums are 0 afterwards. */
INLINE void shape_tiles(int64_t rows, int64_t words) {
  TileShapes shapes = {.palette = 1};
  for (int i = 0; i < TILES; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = (uint8_t)rows;
  shapes.row_bytes[4] = (uint16_t)(4 * words), shapes.rows[4] = (uint8_t)rows;
  shapes.row_bytes[5] = 64, shapes.rows[5] = (uint8_t)words;
  _tile_loadconfig(&shapes);
}
/* Compilers may not know that these read and write memory. */
#define IN_ORDER(...) \
  do { \
    __asm__ volatile("" ::: "memory"); \
    __VA_ARGS__; \
    __asm__ volatile("" ::: "memory"); \
  } while (0)
/* Tile i += rows · columns: signed bytes by bytes without a sign, for columns that are loaded already; or
 * numbers in bfloat16, for rows that are. */
#define LOAD_COLUMNS(from) IN_ORDER(_tile_loadd(5, from, 64))
#define ADD_BYTES(i, rows, stride) IN_ORDER(_tile_loadd(4, rows, stride); _tile_dpbsud(i, 4, 5))
#define LOAD_ROWS(from, stride) IN_ORDER(_tile_loadd(4, from, stride))
#define ADD_PAIRS(i, columns) IN_ORDER(_tile_loadd(5, columns, 64); _tile_dpbf16ps(i, 4, 5))
/* To memory, and 0 again. */
#define TAKE_SUMS(i, to) IN_ORDER(_tile_stored(i, to, 64); _tile_zero(i))
#endif
