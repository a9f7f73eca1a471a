/* packed_file.h - a model whose matrices are stored as tiles already, so that it maps and starts at
   once. It is a GGUF: all metadata of the source byte for byte, and besides

     general.alignment         64
     edgespec.packed.version   uint32, ES_PACKED_VERSION: raised when a tile changes
     edgespec.packed.names     string per tensor, in the order of the tensors: its name
     edgespec.packed.types     int32 per tensor: es_ggml_type of its values; -1: not tiles
     edgespec.packed.rows      int32 per tensor: outputs N; 0 where there are no tiles
     edgespec.packed.cols      int32 per tensor: inputs K

   A tensor of tiles is I8 and flat: ceil(N / 16) * es_pack_tile_bytes(type, K) bytes under its own
   name. The others (norms, biases, factors) are as in the source. */
#ifndef ES_PACKED_FILE_H
#define ES_PACKED_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "edgespec.h"
#include "gguf.h"
#include "pack.h"

enum { ES_PACKED_VERSION = 1 };

/* Whether this is a packed file. ES_ERR_FORMAT when it is one and something in it is wrong (every
   tensor is checked), or its version is another. */
es_status es_packed_check(const es_gguf *gguf, bool *is_packed);

/* The tiles of a tensor, inside the file. found is false where there are none: the file is not
   packed, or it has no tensor of that name, or has it as it was in the source. */
es_status es_packed_tensor(const es_gguf *gguf, const char *name, es_tensor *out, bool *found);

typedef struct es_packed_matrix {
    const char *name;          /* of a tensor of the source */
    es_tensor tensor;
} es_packed_matrix;

/* Writes the source with these n matrices as tiles; what is not among them is copied, tiles of a
   packed source included. The file appears whole or not at all, under a temporary name beside it
   until then. ES_ERR_IO: path and reason, nothing left behind. */
es_status es_packed_save(const es_gguf *source, const es_packed_matrix *matrices, size_t n,
                         const char *path);

#endif
