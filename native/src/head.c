/*
 * head.c - from a GGUF file to a draft beside its target. The keys and tensors are those of
 * llama.cpp's "eagle3", and of "edgespec-eagle" and "edgespec-medusa", which have more of the kind.
 *
 * Everything is checked against the target before memory is taken for it; then the weights are
 * packed at once, which takes milliseconds.
 */
#include "head.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "error.h"
#include "head_model.h"
#include "packed_file.h"
#include "placed.h"

enum {
    MOST = 1 << 24,         /* of any size */
    MOST_HEADS = 64,        /* of Medusa, and blocks of each */
    NEEDED = 0, OPTIONAL = 1
};

static const struct {
    const char *name;
    es_head_kind kind;
} kinds[] = {
    {"eagle3", ES_HEAD_EAGLE3},
    {"edgespec-eagle", ES_HEAD_EAGLE},
    {"edgespec-medusa", ES_HEAD_MEDUSA},
};
enum { N_KINDS = sizeof(kinds) / sizeof(kinds[0]) };

/* A tensor the file has and the struct its weight goes to. */
typedef struct entry {
    es_placed placed;
    void *owner;
} entry;

/* A head on its way in. */
typedef struct loader {
    es_head *head;
    const es_gguf *gguf;
    const es_network *target;
    const char *path, *arch;
    int32_t target_hidden;  /* that it is made for */
    entry *entry;           /* (n_entries) */
    int32_t n_entries, room;
    uint8_t *used;          /* (tensors of the file) */
    es_status status;       /* of the first want() that failed */
} loader;

static bool is_text(es_gguf_string text, const char *wanted)
{
    return text.n == strlen(wanted) && memcmp(text.data, wanted, text.n) == 0;
}

static bool has(const loader *l, const char *name)
{
    return es_gguf_find(l->gguf, name) != NULL;
}

/* ---- keys -------------------------------------------------------------------------------- */

static es_status size(const loader *l, const char *key, int32_t otherwise, int32_t *out)
{
    return es_key_size(l->gguf, l->arch, key, otherwise, MOST, out);
}

static es_status flag(const loader *l, const char *key, bool *out)
{
    bool found;
    *out = false;
    return es_gguf_bool(l->gguf, key, out, &found);
}

/* Both sides of what does not match. */
static es_status differ(const loader *l, const char *what, int64_t ours, int64_t theirs)
{
    return es_fail(ES_ERR_FORMAT, "%s: the head is made for %s %lld, the target has %lld", l->path,
                   what, (long long)ours, (long long)theirs);
}

static es_status find_kind(loader *l)
{
    es_gguf_string name;
    es_status status = es_gguf_str(l->gguf, "general.architecture", &name, NULL);
    for (int32_t i = 0; i < N_KINDS && status == ES_OK; i++) {
        if (is_text(name, kinds[i].name)) {
            l->arch = kinds[i].name;
            l->head->info.kind = kinds[i].kind;
            return ES_OK;
        }
    }
    return status != ES_OK ? status
                           : es_fail(ES_ERR_UNSUPPORTED, "%s: general.architecture '%.*s' is no "
                                     "draft head; known: eagle3, edgespec-eagle, edgespec-medusa",
                                     l->path, (int)(name.n < 64 ? name.n : 64), name.data);
}

static es_status check_target(const loader *l, int32_t vocab)
{
    const es_shape *target = &l->target->shape;
    int32_t layers = target->layers;
    bool found;
    uint32_t stated = (uint32_t)layers;
    es_status status = es_gguf_u32(l->gguf, "edgespec.head.target_layers", &stated, &found);
    if (status != ES_OK) {
        return status;
    }
    if (l->target_hidden != target->hidden) {
        return differ(l, "a target of hidden size", l->target_hidden, target->hidden);
    }
    if (vocab != target->vocab) {
        return differ(l, "a vocabulary of", vocab, target->vocab);
    }
    return stated != (uint32_t)layers ? differ(l, "layers:", stated, layers) : ES_OK;
}

/* Layer ids under both of the names llama.cpp has had for them must agree. */
static es_status check_same(const loader *l, const char *key, const char *other, size_t n)
{
    size_t m = n;
    bool found;
    es_status status = es_gguf_array(l->gguf, other, &m, &found);
    bool is_same = m == n;
    for (size_t i = 0; i < n && is_same && found && status == ES_OK; i++) {
        int64_t a, b = 0;
        status = es_gguf_array_i64(l->gguf, key, i, &a);
        if (status == ES_OK) {
            status = es_gguf_array_i64(l->gguf, other, i, &b);
        }
        is_same = status != ES_OK || a == b;
    }
    return status != ES_OK || is_same
               ? status
               : es_fail(ES_ERR_FORMAT, "%s: %s and %s differ", l->path, key, other);
}

/* llama.cpp's ids are inputs of layers where they begin with 2, outputs where they begin with 1, as
   both are written for the same layers; our own key has hidden states. */
static es_status read_taps(loader *l)
{
    static const char *const keys[] = {"edgespec.head.taps", "eagle3.extract_layers",
                                       "eagle3.target_layers"};
    es_head_info *info = &l->head->info;
    size_t n = 0;
    int32_t k = 0, layers = l->target->shape.layers;
    bool found = false;
    for (; k < 3 && !found; k++) {
        es_status status = es_gguf_array(l->gguf, keys[k], &n, &found);
        if (status != ES_OK) {
            return status;
        }
    }
    if (!found) {
        return es_fail(ES_ERR_FORMAT, "%s: expected %s or %s, got neither", l->path, keys[1],
                       keys[2]);
    }
    const char *key = keys[k - 1];
    if (n < 1 || n > ES_MAX_TAPS) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected 1 to %d hidden states, got %zu", l->path,
                       key, ES_MAX_TAPS, n);
    }
    int64_t shift = 0;
    es_status status = k == 2 ? check_same(l, key, keys[2], n) : ES_OK;
    if (status != ES_OK) {
        return status;
    }
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        status = es_gguf_array_i64(l->gguf, key, i, &id);
        if (status != ES_OK) {
            return status;
        }
        if (i == 0 && k > 1) {
            if (id != 1 && id != 2) {
                return es_fail(ES_ERR_UNSUPPORTED, "%s: %s begins with %lld: inputs or outputs of "
                               "these layers? Export the head with --tap-convention", l->path, key,
                               (long long)id);
            }
            shift = id == 1;
        }
        id += shift;
        bool is_double = false;
        for (size_t j = 0; j < i; j++) {
            is_double = is_double || info->taps[j] == id;
        }
        if (id < 0 || id >= layers || is_double) {
            return es_fail(ES_ERR_FORMAT, "%s: the head taps hidden state %lld: expected distinct "
                           "ones from 0 to %d, the target has %d layers", l->path, (long long)id,
                           (int)layers - 1, (int)layers);
        }
        info->taps[i] = (int32_t)id;
    }
    info->n_taps = (int32_t)n;
    return ES_OK;
}

/* ---- tensors ----------------------------------------------------------------------------- */

/* Expects a tensor, a vector where rows is 0, and notes where in `owner` it goes. */
static void want(loader *l, int optional, int32_t rows, int32_t cols, void *owner, size_t place,
                 const char *format, ...)
{
    es_slot slot = {.rows = rows > 0 ? rows : 1, .cols = cols, .is_matrix = rows > 0, .layer = -1,
                    .place = place};
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(slot.name, sizeof(slot.name), format, arguments);
    va_end(arguments);
    const es_gguf_tensor *t = es_gguf_find(l->gguf, slot.name);
    if (l->status != ES_OK || (t == NULL && optional)) {
        return;
    }
    if (t == NULL) {
        l->status = es_fail(ES_ERR_FORMAT, "%s: tensor %s: missing, expected %d rows of %d",
                            l->path, slot.name, (int)slot.rows, (int)slot.cols);
        return;
    }
    if (l->n_entries == l->room) {
        int32_t room = 2 * l->room + 32;
        entry *more = es_calloc((size_t)room, sizeof(*more));
        if (more == NULL) {
            l->status = es_fail(ES_ERR_MEMORY, "%s: no memory for a list of tensors", l->path);
            return;
        }
        if (l->n_entries > 0) {
            memcpy(more, l->entry, (size_t)l->n_entries * sizeof(*more));
        }
        es_free(l->entry);
        l->entry = more;
        l->room = room;
    }
    entry *e = &l->entry[l->n_entries];
    *e = (entry){.placed = {.slot = slot, .source = t}, .owner = owner};
    l->status = es_slot_check(l->gguf, t, &slot);
    if (l->status == ES_OK) {
        l->status = es_placed_measure(l->gguf, &e->placed);
    }
    if (l->status == ES_OK) {
        l->used[t - es_gguf_tensor_at(l->gguf, 0)] = 1;
        l->n_entries++;
    }
}

/* Ids of the target, when the head names them. */
static es_status read_ids(loader *l)
{
    es_head *head = l->head;
    int32_t n = head->info.draft_vocab, vocab = l->target->shape.vocab;
    const es_gguf_tensor *t = es_gguf_find(l->gguf, "d2t");
    if (t == NULL) {
        return ES_OK;
    }
    if (t->type != ES_GGML_I64 || t->n_dims != 1 || t->dim[0] != n) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor d2t: expected %d values of I64, one for each row "
                       "of the output, got %lld of type %d", l->path, (int)n,
                       (long long)t->dim[0], (int)t->type);
    }
    head->ids = es_malloc((size_t)n * sizeof(*head->ids));
    if (head->ids == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %d ids", l->path, (int)n);
    }
    const uint8_t *data = es_gguf_data(l->gguf, t);
    int64_t before = -1;
    for (int32_t i = 0; i < n; i++) {
        uint64_t bits = 0;
        for (int32_t b = 0; b < 8; b++) {
            bits |= (uint64_t)data[(size_t)i * 8 + (size_t)b] << 8 * b;
        }
        int64_t id = (int64_t)bits;
        if (id <= before || id >= vocab) {
            return es_fail(ES_ERR_FORMAT, "%s: tensor d2t[%d]: expected rising ids of the target's "
                           "%d tokens, got %lld behind %lld", l->path, (int)i, (int)vocab,
                           (long long)id, (long long)before);
        }
        head->ids[i] = (int32_t)id;
        before = id;
    }
    l->used[t - es_gguf_tensor_at(l->gguf, 0)] = 1;
    if (before == n - 1) { /* as many ids as the last says: each is its own */
        es_free(head->ids);
        head->ids = NULL;
    }
    return ES_OK;
}

/* The first rows of the target's output matrix. */
static es_status borrow_output(const loader *l, es_tensor *out)
{
    if (l->head->ids != NULL) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: tensor output.weight: missing, expected the %d "
                       "rows of the target's that d2t names: export the head again", l->path,
                       (int)l->head->info.draft_vocab);
    }
    if (l->head->info.hidden != l->target->shape.hidden) {
        return es_fail(ES_ERR_FORMAT, "%s: the head has no output matrix and is %d wide, that of "
                       "the target is %d wide", l->path, (int)l->head->info.hidden,
                       (int)l->target->shape.hidden);
    }
    *out = l->target->top.output;
    out->rows = l->head->info.draft_vocab;
    return ES_OK;
}

/* ---- EAGLE ------------------------------------------------------------------------------- */

static es_status read_attention(const loader *l, es_shape *s)
{
    es_status status;
    if ((status = size(l, "attention.head_count", 0, &s->heads)) != ES_OK ||
        (status = size(l, "attention.head_count_kv", s->heads, &s->kv_heads)) != ES_OK) {
        return status;
    }
    int32_t split = s->hidden / s->heads > 0 ? s->hidden / s->heads : 1, same = 0;
    if ((status = size(l, "attention.key_length", split, &s->head_dim)) != ES_OK ||
        (status = size(l, "attention.value_length", s->head_dim, &same)) != ES_OK) {
        return status;
    }
    if (s->heads % s->kv_heads != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: %s.attention.head_count_kv: expected a divisor of the "
                       "%d heads, got %d", l->path, l->arch, (int)s->heads, (int)s->kv_heads);
    }
    if (s->head_dim % 2 != 0 || (int64_t)s->heads * s->head_dim > MOST) {
        return es_fail(ES_ERR_FORMAT, "%s: %s.attention.key_length: expected an even size, %d of "
                       "which are at most %d, got %d", l->path, l->arch, (int)s->heads, (int)MOST,
                       (int)s->head_dim);
    }
    int32_t turned = s->head_dim;
    status = size(l, "rope.dimension_count", s->head_dim, &turned);
    if (status == ES_OK && (same != s->head_dim || turned != s->head_dim)) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: %s: values of %d and %d rotated, expected the "
                       "keys' size %d", l->path, l->arch, (int)same, (int)turned,
                       (int)s->head_dim);
    }
    return status;
}

static es_status read_shape(loader *l)
{
    es_head *head = l->head;
    es_shape *s = &head->network.shape;
    char eps_key[64];
    uint32_t window = 0;
    int32_t layers;
    bool found;
    es_status status;
    snprintf(eps_key, sizeof(eps_key), "%s.attention.layer_norm_rms_epsilon", l->arch);
    *s = (es_shape){.layers = 1, .embedding_scale = 1.0f, .activation = ES_SILU,
                    .is_interleaved = true, .vocab = l->target->shape.vocab};
    if ((status = size(l, "block_count", 0, &layers)) != ES_OK ||
        (status = size(l, "embedding_length", 0, &s->hidden)) != ES_OK ||
        (status = size(l, "feed_forward_length", 0, &s->ffn)) != ES_OK ||
        (status = es_key_size(l->gguf, l->arch, "context_length", 0, INT32_MAX / 2,
                              &s->max_position)) != ES_OK ||
        (status = read_attention(l, s)) != ES_OK ||
        (status = es_gguf_f32(l->gguf, eps_key, &s->eps, NULL)) != ES_OK) {
        return status;
    }
    if (layers != 1) {
        return es_fail(ES_ERR_UNSUPPORTED, "%s: %s.block_count: expected 1, got %d", l->path,
                       l->arch, (int)layers);
    }
    if (!(s->eps > 0.0f && s->eps < 1.0f)) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected a number between 0 and 1, got %g", l->path,
                       eps_key, (double)s->eps);
    }
    char key[64];
    snprintf(key, sizeof(key), "%s.attention.sliding_window", l->arch);
    status = es_gguf_u32(l->gguf, key, &window, &found);
    if (status != ES_OK) {
        return status;
    }
    s->attention_scale = (float)(1.0 / sqrt((double)s->head_dim));
    head->info.hidden = s->hidden;
    head->info.max_position = s->max_position;
    head->window = window > 0 && window < (uint32_t)s->max_position ? (int32_t)window
                                                                    : s->max_position;
    return es_rope_from_gguf(l->gguf, l->arch, s->head_dim, s->max_position, &s->rope);
}

/* Tokens of the target, and how many of them the head says. */
static es_status read_vocabulary(loader *l)
{
    size_t words = (size_t)l->target->shape.vocab;
    int32_t vocab;
    int64_t rows, cols;
    bool found;
    es_status status = es_gguf_array(l->gguf, "tokenizer.ggml.tokens", &words, &found);
    if (status == ES_OK) {
        status = size(l, "vocab_size", words < MOST ? (int32_t)words : MOST, &vocab);
    }
    if (status == ES_OK) {
        status = check_target(l, vocab);
    }
    if (status != ES_OK) {
        return status;
    }
    const es_gguf_tensor *output = es_gguf_find(l->gguf, "output.weight");
    const es_gguf_tensor *d2t = es_gguf_find(l->gguf, "d2t");
    rows = d2t != NULL ? d2t->dim[0] : vocab;
    if (output != NULL && (status = es_matrix_size(l->gguf, output, &rows, &cols)) != ES_OK) {
        return status;
    }
    if (rows < 1 || rows > vocab || (rows < vocab && d2t == NULL)) {
        return es_fail(ES_ERR_FORMAT, "%s: the head's output has %lld rows%s, the target %d tokens",
                       l->path, (long long)rows, d2t == NULL ? " and no d2t" : "", (int)vocab);
    }
    l->head->info.draft_vocab = (int32_t)rows;
    return ES_OK;
}

#define IN_LAYER(field) &head->layer, offsetof(es_layer, field)
#define IN_TOP(field) &head->network.top, offsetof(es_top, field)
#define IN_PAIR(field) &head->network.pair, offsetof(es_pair, field)

static void want_layer(loader *l)
{
    es_head *head = l->head;
    const es_shape *s = &head->network.shape;
    int32_t q = s->heads * s->head_dim, kv = s->kv_heads * s->head_dim, hidden = s->hidden;
    int32_t inputs = head->info.kind == ES_HEAD_EAGLE3 ? 2 * hidden : hidden;
    want(l, NEEDED, q, inputs, IN_LAYER(q), "blk.0.attn_q.weight");
    want(l, NEEDED, kv, inputs, IN_LAYER(k), "blk.0.attn_k.weight");
    want(l, NEEDED, kv, inputs, IN_LAYER(v), "blk.0.attn_v.weight");
    bool normed = has(l, "blk.0.attn_q_norm.weight") || has(l, "blk.0.attn_k_norm.weight");
    int norms = normed ? NEEDED : OPTIONAL;
    want(l, norms, 0, s->head_dim, IN_LAYER(q_norm), "blk.0.attn_q_norm.weight");
    want(l, norms, 0, s->head_dim, IN_LAYER(k_norm), "blk.0.attn_k_norm.weight");
    want(l, NEEDED, hidden, q, IN_LAYER(o), "blk.0.attn_output.weight");
    want(l, NEEDED, 0, hidden, IN_LAYER(ffn_norm), "blk.0.ffn_norm.weight");
    want(l, NEEDED, s->ffn, hidden, IN_LAYER(gate), "blk.0.ffn_gate.weight");
    want(l, NEEDED, s->ffn, hidden, IN_LAYER(up), "blk.0.ffn_up.weight");
    want(l, NEEDED, hidden, s->ffn, IN_LAYER(down), "blk.0.ffn_down.weight");
    want(l, OPTIONAL, s->vocab, hidden, IN_TOP(embedding), "token_embd.weight");
    want(l, OPTIONAL, head->info.draft_vocab, hidden, IN_TOP(output), "output.weight");
}

/* What feeds attention in EAGLE-3. */
static es_status want_fusion(loader *l)
{
    es_head *head = l->head;
    es_pair *pair = &head->network.pair;
    int32_t hidden = head->info.hidden;
    bool before_fc, each;
    es_status status;
    if ((status = flag(l, "eagle3.norm_before_residual", &pair->adds_normed)) != ES_OK ||
        (status = flag(l, "edgespec.head.norm_output", &pair->hands_normed)) != ES_OK ||
        (status = flag(l, "eagle3.norm_before_fc", &before_fc)) != ES_OK ||
        (status = flag(l, "edgespec.head.fc_norm", &each)) != ES_OK) {
        return status;
    }
    want(l, NEEDED, hidden, pair->taps, IN_PAIR(fc), "fc.weight");
    want(l, NEEDED, 0, hidden, IN_LAYER(attn_norm), "blk.0.attn_norm.weight");
    want(l, NEEDED, 0, hidden, IN_PAIR(feature_norm), "blk.0.attn_norm_2.weight");
    want(l, NEEDED, 0, hidden, IN_TOP(output_norm), "output_norm.weight");
    if (before_fc || has(l, "enc.output_norm.weight")) {
        pair->n_norms = 1;
        want(l, NEEDED, 0, pair->taps, IN_PAIR(taps_norm), "enc.output_norm.weight");
        return l->status;
    }
    pair->n_norms = each || has(l, "fc_norm.0.weight") ? head->info.n_taps : 0;
    for (int32_t i = 0; i < pair->n_norms; i++) {
        size_t place = offsetof(es_pair, taps_norm) + (size_t)i * sizeof(pair->taps_norm[0]);
        want(l, NEEDED, 0, l->target_hidden, pair, place, "fc_norm.%d.weight", (int)i);
    }
    return l->status;
}

static es_status want_eagle(loader *l)
{
    es_head *head = l->head;
    es_pair *pair = &head->network.pair;
    bool is_third = head->info.kind == ES_HEAD_EAGLE3;
    es_status status = read_shape(l);
    if (status != ES_OK) {
        return status;
    }
    l->target_hidden = head->info.hidden;
    if (is_third && (status = size(l, "target_hidden_size", 0, &l->target_hidden)) != ES_OK) {
        return status;
    }
    if ((status = read_vocabulary(l)) != ES_OK) {
        return status;
    }
    head->info.taps[0] = l->target->shape.layers;
    head->info.n_taps = 1;
    if (is_third && (status = read_taps(l)) != ES_OK) {
        return status;
    }
    if (!has(l, "token_embd.weight") && head->info.hidden != l->target->shape.hidden) {
        return es_fail(ES_ERR_FORMAT, "%s: the head has no embeddings and is %d wide, those of the "
                       "target are %d wide", l->path, (int)head->info.hidden,
                       (int)l->target->shape.hidden);
    }
    pair->taps = head->info.n_taps * l->target_hidden;
    want_layer(l);
    if (is_third) {
        return want_fusion(l);
    }
    want(l, NEEDED, head->info.hidden, 2 * head->info.hidden, IN_PAIR(fc), "fc.weight");
    want(l, OPTIONAL, 0, head->info.hidden, IN_PAIR(fc_bias), "fc.bias");
    return l->status;
}

/* ---- Medusa ------------------------------------------------------------------------------ */

static es_status want_medusa(loader *l)
{
    es_head *head = l->head;
    es_head_info *info = &head->info;
    int32_t vocab = 0, heads = 0, rows = 0;
    uint32_t blocks = 0;
    es_status status;
    if ((status = size(l, "embedding_length", 0, &info->hidden)) != ES_OK ||
        (status = es_key_size(l->gguf, l->arch, "head_count", 0, MOST_HEADS, &heads)) != ES_OK ||
        (status = es_gguf_u32(l->gguf, "edgespec-medusa.block_count", &blocks, NULL)) != ES_OK ||
        (status = size(l, "vocab_size", 0, &vocab)) != ES_OK ||
        (status = size(l, "output_rows", 0, &rows)) != ES_OK) {
        return status;
    }
    l->target_hidden = info->hidden;
    if ((status = check_target(l, vocab)) != ES_OK) {
        return status;
    }
    if (blocks > MOST_HEADS || rows > vocab) {
        return es_fail(ES_ERR_FORMAT, "%s: expected at most %d blocks and an output row for each "
                       "of the target's %d tokens at most, got %u and %d", l->path,
                       (int)MOST_HEADS, (int)vocab, (unsigned)blocks, (int)rows);
    }
    info->draft_vocab = rows;
    info->depth = heads;
    info->n_taps = 1;
    info->taps[0] = l->target->shape.layers;
    head->n_blocks = (int32_t)blocks;
    head->block = es_calloc((size_t)heads * (blocks > 0 ? blocks : 1), sizeof(*head->block));
    head->output = es_calloc((size_t)heads, sizeof(*head->output));
    if (head->block == NULL || head->output == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %d heads", l->path, (int)heads);
    }
    want(l, OPTIONAL, rows, info->hidden, IN_TOP(output), "output.weight");
    int projections = OPTIONAL; /* of all heads or of none */
    for (int32_t h = 0; h < heads; h++) {
        char name[40];
        snprintf(name, sizeof(name), "medusa.%d.output.weight", (int)h);
        projections = has(l, name) ? NEEDED : projections;
    }
    for (int32_t h = 0; h < heads; h++) {
        for (int32_t b = 0; b < (int32_t)blocks; b++) {
            es_block *block = &head->block[h * (int32_t)blocks + b];
            want(l, NEEDED, info->hidden, info->hidden, block, offsetof(es_block, weight),
                 "medusa.%d.%d.weight", (int)h, (int)b);
            want(l, NEEDED, 0, info->hidden, block, offsetof(es_block, bias), "medusa.%d.%d.bias",
                 (int)h, (int)b);
        }
        want(l, projections, rows, info->hidden, &head->output[h], 0, "medusa.%d.output.weight",
             (int)h);
    }
    return l->status;
}

/* ---- loading ----------------------------------------------------------------------------- */

static es_status check_unused(loader *l)
{
    const es_gguf_tensor *factors = es_gguf_find(l->gguf, "rope_freqs.weight");
    if (factors != NULL && l->head->info.kind != ES_HEAD_MEDUSA) {
        l->used[factors - es_gguf_tensor_at(l->gguf, 0)] = 1;
    }
    for (size_t i = 0; i < es_gguf_tensor_count(l->gguf); i++) {
        if (!l->used[i]) {
            return es_fail(ES_ERR_FORMAT, "%s: tensor %s: not one %s has", l->path,
                           es_gguf_tensor_at(l->gguf, i)->name, l->arch);
        }
    }
    return ES_OK;
}

/* q and k come with the halves of each head interleaved; the norms' weights do not. */
static es_status interleave(const loader *l, float *weight, int32_t n)
{
    float *halves = es_malloc((size_t)n * sizeof(*halves));
    if (halves == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for a norm of %d values", l->path, (int)n);
    }
    memcpy(halves, weight, (size_t)n * sizeof(*halves));
    for (int32_t i = 0; i < n / 2; i++) {
        weight[2 * i] = halves[i];
        weight[2 * i + 1] = halves[n / 2 + i];
    }
    es_free(halves);
    return ES_OK;
}

static es_status load(loader *l)
{
    es_head *head = l->head;
    size_t pages = 0;
    for (int32_t i = 0; i < l->n_entries; i++) {
        es_placed *p = &l->entry[i].placed;
        p->offset = pages;
        pages += p->is_in_file ? 0 : p->n_bytes;
        head->info.weight_bytes += p->n_bytes;
    }
    if (pages > 0 && !es_pages_new(pages, &head->pages)) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for %zu bytes of weights", l->path, pages);
    }
    for (int32_t i = 0; i < l->n_entries; i++) {
        entry *e = &l->entry[i];
        es_placed *p = &e->placed;
        if (!p->slot.is_matrix) {
            es_placed_floats(l->gguf, p, head->pages.data);
        } else if (!p->is_in_file) {
            es_placed_pack(l->gguf, p, l->target->pool, 0, es_tiles(p->slot.rows),
                           head->pages.data);
            p->tensor.data = head->pages.data + p->offset;
            es_gguf_drop(l->gguf, p->source);
        }
        if (e->owner == &head->layer && (p->slot.place == offsetof(es_layer, q_norm) ||
                                         p->slot.place == offsetof(es_layer, k_norm))) {
            es_status status = interleave(
                l, (float *)(void *)(head->pages.data + p->offset), p->slot.cols);
            if (status != ES_OK) {
                return status;
            }
        }
        es_placed_publish(p, head->pages.data, e->owner);
    }
    return ES_OK;
}

/* What it has not is the target's. */
static es_status finish(loader *l)
{
    es_head *head = l->head;
    es_network *net = &head->network;
    es_status status = ES_OK;
    net->kernels = l->target->kernels;
    net->pool = l->target->pool;
    net->layer = &head->layer;
    head->taps_width = head->info.n_taps * l->target_hidden;
    head->info.file_bytes = es_gguf_size(l->gguf);
    if (net->top.embedding.rows == 0) {
        net->top.embedding = l->target->top.embedding;
    }
    bool is_medusa = head->info.kind == ES_HEAD_MEDUSA, is_wanted = !is_medusa;
    for (int32_t h = 0; h < head->info.depth; h++) {
        is_wanted = is_wanted || head->output[h].rows == 0;
    }
    if (net->top.output.rows == 0 && is_wanted) {
        status = borrow_output(l, &net->top.output);
    }
    head->is_output_shared = is_medusa;
    for (int32_t h = 0; h < head->info.depth; h++) {
        if (head->output[h].rows == 0) {
            head->output[h] = net->top.output;
        } else {
            head->is_output_shared = false;
        }
    }
    if (status == ES_OK && !is_medusa) {
        status = es_workspace_new(net, es_pool_size(net->pool), &head->work);
    }
    return status;
}

static es_status read_head(loader *l)
{
    bool is_packed;
    es_status status;
    if ((status = es_packed_check(l->gguf, &is_packed)) != ES_OK ||
        (status = find_kind(l)) != ES_OK) {
        return status;
    }
    l->used = es_calloc(es_gguf_tensor_count(l->gguf) + 1, 1);
    if (l->used == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory to check its tensors", l->path);
    }
    status = l->head->info.kind == ES_HEAD_MEDUSA ? want_medusa(l) : want_eagle(l);
    if (status == ES_OK && (status = read_ids(l)) == ES_OK &&
        (status = check_unused(l)) == ES_OK && (status = load(l)) == ES_OK) {
        status = finish(l);
    }
    return status;
}

es_status es_head_open(es_model *target, const char *path, es_head **out)
{
    es_head *head = es_calloc(1, sizeof(*head));
    if (head == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory for a head", path);
    }
    loader l = {.head = head, .target = &target->network, .path = path};
    head->target = target;
    pthread_mutex_lock(&target->lock);
    es_status status = es_model_is_loaded(target)
                           ? es_gguf_open(path, target->use_mmap, &head->gguf)
                           : es_fail(ES_ERR_STATE, "head: the target's model is not loaded yet");
    if (status == ES_OK && es_head_is_model(head->gguf)) {
        es_gguf_free(head->gguf);
        head->gguf = NULL;
        status = es_head_read_model(head, path);
    } else if (status == ES_OK) {
        l.gguf = head->gguf;
        l.path = es_gguf_name(head->gguf);
        status = read_head(&l);
    }
    pthread_mutex_unlock(&target->lock);
    es_free(l.entry);
    es_free(l.used);
    if (status != ES_OK) {
        es_head_free(head);
        return status;
    }
    *out = head;
    return ES_OK;
}

es_status es_head_describe(const es_head *head, es_head_info *out)
{
    *out = head->info;
    return ES_OK;
}

void es_head_free(es_head *head)
{
    if (head != NULL) {
        es_model_free(head->model);
        es_free(head->windowed);
        es_workspace_free(head->work);
        es_shape_clear(&head->network.shape);
        es_pages_free(&head->pages);
        es_free(head->ids);
        es_free(head->block);
        es_free(head->output);
        es_gguf_free(head->gguf);
        es_free(head);
    }
}
