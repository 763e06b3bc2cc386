// Moving rows of a key-value cache to where they belong, in place.
#include <cstdint>
#include <cstring>

extern "C" {

// In each of `num_planes` x `num_heads` runs of rows: row path[i] becomes row i + 1, counted from `first`, the row
// of a tree's root. Paths ascend, so a row is read before anything is written over it.
void paceline_compact(char* first, int64_t num_planes, int64_t plane_stride, int64_t num_heads,
                      int64_t head_stride, int64_t row_bytes, const int64_t* path, int64_t num_rows) {
  for (int64_t plane = 0; plane < num_planes; plane++)
    for (int64_t head = 0; head < num_heads; head++) {
      char* rows = first + plane * plane_stride + head * head_stride;
      for (int64_t i = 0; i < num_rows; i++)
        if (path[i] != i + 1) std::memcpy(rows + (i + 1) * row_bytes, rows + path[i] * row_bytes, row_bytes);
    }
}

}  // extern "C"
