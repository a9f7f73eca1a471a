/*
 * draft_ngram.h - drafts found in the text itself: an index over everything the session has seen
 * (prompt, replies, earlier turns, text since dropped), bounded, O(1) amortised per token.
 *
 * A session keeps one, feeds it every token of the sequence in order, and asks it for a tree:
 *
 *     es_ngram_add(ngram, prompt, n);
 *     es_ngram_propose(ngram, rows, floor, &tree);    root = the last token added
 *     ... the tree, or a part of it, is verified; r = es_round ...
 *     es_ngram_learn(ngram, r.token, r.n);            plain rounds too: the proposal is judged
 *     es_ngram_add(ngram, r.token, r.n);              whether or not its rows were forwarded
 *
 * Every call is a function of the calls before it; nothing here looks at a clock.
 */
#ifndef EDGESPEC_DRAFT_NGRAM_H
#define EDGESPEC_DRAFT_NGRAM_H

#include "edgespec.h"

#define ES_NGRAM_MAX_CAPACITY ((size_t)1 << 28)

typedef struct es_ngram es_ngram;

/* capacity: tokens remembered, 1..ES_NGRAM_MAX_CAPACITY; all memory is taken here. */
es_status es_ngram_new(size_t capacity, es_ngram **out);
void es_ngram_free(es_ngram *ngram);                            /* NULL is a no-op */

/* The sequence grew by tokens (n), each >= 0. Past capacity the oldest text is forgotten. */
void es_ngram_add(es_ngram *ngram, const int32_t *tokens, size_t n);

/* The sequence was cut: it now ends with tail (n_tail; its last tokens, any number). What was cut
   stays findable; nothing is ever proposed across the cut. */
void es_ngram_break(es_ngram *ngram, const int32_t *tail, size_t n_tail);

/* A derived tree of 1..rows rows, root included: continuations of the sequence merged by common
   prefix, best score first (so the first k rows are the k best and closed under ancestors), no
   score under floor. score is the estimated chance that a greedy target accepts the row. n is 1
   when nothing matches. rows 1..ES_MAX_ROWS. */
void es_ngram_propose(es_ngram *ngram, int32_t rows, float floor, es_tree *tree);

/* Fills the static tree shape: the child of rank r gets the r-th best continuation of its parent's
   path. Rows without one are left out with their descendants; what stays keeps order and rank. */
void es_ngram_fill(es_ngram *ngram, const es_tree *shape, es_tree *tree);

/* The sequence is about to go on with tokens (n) the target generated: adjusts the estimates by how
   the last proposal or fill since an add or break compares, and marks the tokens as generated. */
void es_ngram_learn(es_ngram *ngram, const int32_t *tokens, int32_t n);

#endif
