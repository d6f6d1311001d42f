// Rows sorted by expert, for steps in which each expert has few rows.
//
// A pick is one expert chosen by one row. Sorted picks lie in groups of eight places; all rows of a group
// chose the same expert, and places without a row are padding. A row tile is up to four groups (32 rows) of
// one expert: the expert's weights are read once per row tile.
#include "types.cuh"

#define ROWS 32   // most rows of a row tile
#define LANES 32  // lanes of a piece (halves.cuh)

struct RowTile {
    const u8* matrices[3];  // the expert's gate, up and down matrices
    int first, rows;        // place of the first row, and number of rows; 0 rows: the tile is unused
};
