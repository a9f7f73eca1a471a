/* head_model.h - a small language model as a draft: a GGUF of its own family with the target's
   vocabulary, which may use the target's embedding and output matrix (export/draft_model.py). */
#ifndef ES_HEAD_MODEL_H
#define ES_HEAD_MODEL_H

#include <stdbool.h>

#include "edgespec.h"
#include "gguf.h"
#include "head.h"

/* Whether a file holds a model, not a head. */
bool es_head_is_model(const es_gguf *gguf);

/* Loads the model into a head whose target is set and locked. ES_ERR_FORMAT names both sides where
   vocabulary or width are not the target's. */
es_status es_head_read_model(es_head *head, const char *path);

#endif
