/*
 * head_model.c - see head_model.h.
 */
#include "head_model.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "error.h"

#define KEY_TOKENS "edgespec.draft.tokens"
#define KEY_WORDS "tokenizer.ggml.tokens"

enum { SHOWN = 40 /* bytes of a token in a message */ };

bool es_head_is_model(const es_gguf *gguf)
{
    es_gguf_string name;
    bool found;
    return es_gguf_str(gguf, "general.architecture", &name, &found) == ES_OK && found &&
           es_family_is_known(name);
}

/* ---- vocabularies ------------------------------------------------------------------------ */

/* How many tokens a file lists; 0: it lists none. */
static es_status count_words(const es_gguf *gguf, size_t *out)
{
    bool found;
    *out = 0;
    return es_gguf_array(gguf, KEY_WORDS, out, &found);
}

static int32_t shown(es_gguf_string word)
{
    return (int32_t)(word.n < SHOWN ? word.n : SHOWN);
}

static es_status compare_words(const es_gguf *ours, const es_gguf *theirs)
{
    size_t n, n_theirs;
    es_status status = count_words(ours, &n);
    if (status == ES_OK) {
        status = count_words(theirs, &n_theirs);
    }
    if (status == ES_OK && n != n_theirs) {
        return es_fail(ES_ERR_FORMAT, "%s: the draft has %zu tokens, the target %zu",
                       es_gguf_name(ours), n, n_theirs);
    }
    for (size_t i = 0; i < n && status == ES_OK; i++) {
        es_gguf_string a, b;
        if ((status = es_gguf_array_str(ours, KEY_WORDS, i, &a)) != ES_OK ||
            (status = es_gguf_array_str(theirs, KEY_WORDS, i, &b)) != ES_OK) {
            return status;
        }
        if (a.n != b.n || memcmp(a.data, b.data, a.n) != 0) {
            return es_fail(ES_ERR_FORMAT, "%s: token %zu is '%.*s' in the draft and '%.*s' in the "
                           "target: another vocabulary", es_gguf_name(ours), i, shown(a), a.data,
                           shown(b), b.data);
        }
    }
    return status;
}

/* FNV-1a (64 bits) of every token's bytes, each with 0xFF behind: no UTF-8 has it. */
static es_status hash_words(const es_gguf *gguf, uint64_t *out)
{
    static const uint64_t prime = UINT64_C(1099511628211);
    uint64_t hash = UINT64_C(14695981039346656037);
    size_t n;
    es_status status = count_words(gguf, &n);
    for (size_t i = 0; i < n && status == ES_OK; i++) {
        es_gguf_string word;
        status = es_gguf_array_str(gguf, KEY_WORDS, i, &word);
        for (size_t b = 0; b < word.n && status == ES_OK; b++) {
            hash = (hash ^ (uint8_t)word.data[b]) * prime;
        }
        hash = (hash ^ 0xFF) * prime;
    }
    *out = hash;
    return status;
}

/* A guest names its target's vocabulary by hash. */
static es_status check_hash(const es_gguf *ours, const es_gguf *theirs)
{
    es_gguf_string stated;
    uint64_t hash;
    char expected[17];
    es_status status = es_gguf_str(ours, ES_KEY_DRAFT_VOCABULARY, &stated, NULL);
    if (status == ES_OK) {
        status = hash_words(theirs, &hash);
    }
    if (status != ES_OK) {
        return status;
    }
    snprintf(expected, sizeof(expected), "%016" PRIx64, hash);
    if (stated.n != strlen(expected) || memcmp(stated.data, expected, stated.n) != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: the draft is made for vocabulary '%.*s', the target "
                       "has '%s'", es_gguf_name(ours), ES_KEY_DRAFT_VOCABULARY, shown(stated),
                       stated.data, expected);
    }
    return ES_OK;
}

static es_status check_target(const es_model *draft, const es_model *target)
{
    const es_shape *ours = &draft->network.shape, *theirs = &target->network.shape;
    const char *path = es_gguf_name(draft->gguf);
    if (ours->vocab != theirs->vocab) {
        return es_fail(ES_ERR_FORMAT, "%s: the draft has a vocabulary of %d, the target of %d",
                       path, (int)ours->vocab, (int)theirs->vocab);
    }
    if (!ours->is_guest) {
        return compare_words(draft->gguf, target->gguf);
    }
    if (ours->hidden != theirs->hidden) {
        return es_fail(ES_ERR_FORMAT, "%s: the draft has no embedding and is %d wide, that of the "
                       "target is %d wide", path, (int)ours->hidden, (int)theirs->hidden);
    }
    return check_hash(draft->gguf, target->gguf);
}

/* ---- tokens it drafts -------------------------------------------------------------------- */

/* draft_vocab, and ids unless it drafts the first tokens or all of them. */
static es_status read_tokens(es_head *head)
{
    const es_gguf *gguf = head->model->gguf;
    int32_t vocab = head->model->network.shape.vocab, n = 0, last = -1;
    size_t n_bytes = 0;
    bool found;
    head->info.draft_vocab = vocab;
    es_status status = es_gguf_array(gguf, KEY_TOKENS, &n_bytes, &found);
    if (status != ES_OK || !found) {
        return status;
    }
    if (n_bytes != ((size_t)vocab + 7) / 8) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected %zu bytes, a bit for each of %d tokens, "
                       "got %zu", es_gguf_name(gguf), KEY_TOKENS, ((size_t)vocab + 7) / 8,
                       (int)vocab, n_bytes);
    }
    head->ids = es_malloc((size_t)vocab * sizeof(*head->ids));
    if (head->ids == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %d ids", es_gguf_name(gguf), (int)vocab);
    }
    for (size_t i = 0; i < n_bytes; i++) {
        int64_t bits;
        status = es_gguf_array_i64(gguf, KEY_TOKENS, i, &bits);
        if (status != ES_OK) {
            return status;
        }
        for (int32_t b = 0; b < 8; b++) {
            if (bits >> b & 1) {
                last = (int32_t)(8 * i) + b;
                head->ids[n < vocab ? n : 0] = last;
                n++;
            }
        }
        if (bits < 0 || bits > 255 || last >= vocab) {
            return es_fail(ES_ERR_FORMAT, "%s: %s[%zu]: expected bits of %d tokens, got %" PRId64,
                           es_gguf_name(gguf), KEY_TOKENS, i, (int)vocab, bits);
        }
    }
    if (n == 0) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected some tokens, got none", es_gguf_name(gguf),
                       KEY_TOKENS);
    }
    head->info.draft_vocab = n;
    if (last == n - 1) {
        es_free(head->ids);
        head->ids = NULL;
    }
    return ES_OK;
}

/* The rows of the output matrix that it drafts with. */
static es_status pick_output(es_head *head)
{
    es_tensor *output = &head->model->network.top.output;
    int32_t n = head->info.draft_vocab;
    size_t n_bytes = (size_t)es_tiles(n) * output->tile_bytes;
    if (head->ids == NULL) {
        output->rows = n; /* the first ones */
        return ES_OK;
    }
    if (!es_pages_new(n_bytes, &head->pages)) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %zu bytes of an output matrix",
                       es_gguf_name(head->model->gguf), n_bytes);
    }
    es_pack_pick(output, head->ids, n, head->pages.data);
    output->data = head->pages.data;
    output->rows = n;
    head->info.weight_bytes += n_bytes;
    return ES_OK;
}

/* ---- loading ----------------------------------------------------------------------------- */

static es_status load(es_head *head)
{
    es_model *draft = head->model;
    size_t done, total;
    es_status status;
    do {
        status = es_model_load(draft, &done, &total);
    } while (status == ES_OK && !es_model_is_loaded(draft));
    if (status == ES_OK && draft->network.shape.is_guest) {
        draft->network.top.embedding = head->target->network.top.embedding;
        draft->network.top.output = head->target->network.top.output;
    }
    return status;
}

es_status es_head_read_model(es_head *head, const char *path)
{
    es_status status;
    if ((status = es_model_open_beside(head->target, path, &head->model)) != ES_OK ||
        (status = check_target(head->model, head->target)) != ES_OK ||
        (status = read_tokens(head)) != ES_OK || (status = load(head)) != ES_OK) {
        return status;
    }
    const es_shape *shape = &head->model->network.shape;
    head->info.kind = ES_HEAD_MODEL;
    head->info.hidden = shape->hidden;
    head->info.max_position = shape->max_position;
    head->info.file_bytes = es_gguf_size(head->model->gguf);
    head->info.weight_bytes = head->model->weight_bytes;
    /* Of positions it knows, so many that beginning again with them leaves room to go on. */
    head->window = shape->max_position > 1 ? shape->max_position / 2 : 1;
    head->windowed = es_malloc((size_t)shape->layers);
    if (head->windowed == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for a head", path);
    }
    for (int32_t i = 0; i < shape->layers; i++) {
        head->windowed[i] = shape->window == 0 || es_shape_is_windowed(shape, i);
    }
    return pick_output(head);
}
