/* model.h - a loaded model: what its targets share. */
#ifndef ES_MODEL_H
#define ES_MODEL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "alloc.h"
#include "arch.h"
#include "edgespec.h"
#include "forward.h"
#include "gguf.h"
#include "placed.h"

struct es_model {
    es_network network;
    es_workspace *work;
    pthread_mutex_t lock;          /* of everything that computes */
    es_gguf *gguf;
    es_placed *placed;             /* (n_placed), the embedding first where there is one */
    int32_t n_placed;
    es_pages pages;                /* weights packed here; none before loading began */
    size_t page_bytes;             /* what they will take */
    size_t weight_bytes;           /* of all weights, packed */
    bool is_packed;                /* the file holds tiles */
    bool is_beside;                /* its threads are another's */
    bool use_mmap, wants_lock;

    /* how far loading came */
    int32_t next;                  /* placed weight */
    int32_t next_tile;
    size_t done;                   /* bytes */
};

/* A model on the threads, and with the kernels, of another that outlives it; to be loaded. Whoever
   computes with it holds the other's lock. A guest has to be given its matrices then. */
es_status es_model_open_beside(const es_model *host, const char *path, es_model **out);

static inline bool es_model_is_loaded(const es_model *model)
{
    return model->next == model->n_placed;
}

#endif
