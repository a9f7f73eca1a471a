/* ring.h - what edgespec.h does not say of a ring: the place of one index. */
#ifndef ES_RING_H
#define ES_RING_H

#include "edgespec.h"

/* Slot of a committed position, or of row i of an open append at length + i. Slots follow each
   other with the index up to the last one; behind it comes the first that is no sink. */
int32_t es_ring_slot(const es_ring *ring, int64_t index);

/* Places n more rows behind those of the open append, or opens one, without a word to the caller
   about slots. Several rows may have depth 0. */
es_status es_ring_extend(es_ring *ring, const int32_t *depth, int32_t n);

#endif
