// Rows sorted by expert, for steps in which an expert has few of them.
//
// A pick is one expert chosen by one row, a place one of the eight of a group, in which all rows chose the
// same expert. A tile of rows is up to four groups: an expert's bytes are read once for each.
#include "types.cuh"

#define ROWS 32   // most of a tile
#define LANES 32  // of a piece

struct RowTile {
    const u8* matrices[3];  // of the expert: gate, up, down
    int first, rows;        // place of its first row, and how many they are; 0: there is no such tile
};
