/*
 * arch.c - the families. A family is a row of the table: which weights it has and which of a few
 * differences apply. Everything else is sizes, and these are checked against each other before
 * anything is allocated for them.
 */
#include "arch.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "error.h"
#include "packed_file.h"

/* ---- weights ----------------------------------------------------------------------------- */

typedef enum size_name { ONE, VOCAB, HIDDEN, Q, KV, HEAD, FFN } size_name;

typedef struct spec {
    const char *name;
    size_name rows, cols;   /* rows ONE: a vector of cols */
    size_t place;
} spec;

enum {
    W_ATTN_NORM, W_Q, W_K, W_V, W_Q_BIAS, W_K_BIAS, W_V_BIAS, W_Q_NORM, W_K_NORM, W_O,
    W_POST_ATTN_NORM, W_FFN_NORM, W_GATE, W_UP, W_DOWN, W_POST_FFN_NORM, W_COUNT
};

#define IN_LAYER(field) offsetof(es_layer, field)
#define IN_TOP(field) offsetof(es_top, field)

/* In the order of the forward pass. */
static const spec layer_specs[W_COUNT] = {
    [W_ATTN_NORM] = {"attn_norm.weight", ONE, HIDDEN, IN_LAYER(attn_norm)},
    [W_Q] = {"attn_q.weight", Q, HIDDEN, IN_LAYER(q)},
    [W_K] = {"attn_k.weight", KV, HIDDEN, IN_LAYER(k)},
    [W_V] = {"attn_v.weight", KV, HIDDEN, IN_LAYER(v)},
    [W_Q_BIAS] = {"attn_q.bias", ONE, Q, IN_LAYER(q_bias)},
    [W_K_BIAS] = {"attn_k.bias", ONE, KV, IN_LAYER(k_bias)},
    [W_V_BIAS] = {"attn_v.bias", ONE, KV, IN_LAYER(v_bias)},
    [W_Q_NORM] = {"attn_q_norm.weight", ONE, HEAD, IN_LAYER(q_norm)},
    [W_K_NORM] = {"attn_k_norm.weight", ONE, HEAD, IN_LAYER(k_norm)},
    [W_O] = {"attn_output.weight", HIDDEN, Q, IN_LAYER(o)},
    [W_POST_ATTN_NORM] = {"post_attention_norm.weight", ONE, HIDDEN, IN_LAYER(post_attn_norm)},
    [W_FFN_NORM] = {"ffn_norm.weight", ONE, HIDDEN, IN_LAYER(ffn_norm)},
    [W_GATE] = {"ffn_gate.weight", FFN, HIDDEN, IN_LAYER(gate)},
    [W_UP] = {"ffn_up.weight", FFN, HIDDEN, IN_LAYER(up)},
    [W_DOWN] = {"ffn_down.weight", HIDDEN, FFN, IN_LAYER(down)},
    [W_POST_FFN_NORM] = {"post_ffw_norm.weight", ONE, HIDDEN, IN_LAYER(post_ffn_norm)},
};

static const spec top_specs[] = {
    {"token_embd.weight", VOCAB, HIDDEN, IN_TOP(embedding)},
    {"output_norm.weight", ONE, HIDDEN, IN_TOP(output_norm)},
    {"output.weight", VOCAB, HIDDEN, IN_TOP(output)}, /* last: absent when tied */
};
enum { N_TOP = sizeof(top_specs) / sizeof(top_specs[0]) };

#define BIT(weight) (UINT32_C(1) << (weight))
#define PLAIN_BLOCK                                                                             \
    (BIT(W_ATTN_NORM) | BIT(W_Q) | BIT(W_K) | BIT(W_V) | BIT(W_O) | BIT(W_FFN_NORM) |           \
     BIT(W_GATE) | BIT(W_UP) | BIT(W_DOWN))

/* ---- families ---------------------------------------------------------------------------- */

struct es_family {
    const char *name;
    uint32_t weights;              /* BIT() of what a layer has */
    es_activation activation;
    bool is_interleaved;
    bool has_rope_factors;         /* reads rope_freqs.weight */
    bool has_yarn;
    bool is_embedding_scaled;      /* by the root of hidden */
    int32_t window_period;         /* unless the file has one; 0: the family has no windows */
    bool has_local_rope;
    int32_t wide_scale_layers;     /* so many layers: queries / sqrt(hidden / heads) */
    const char *ignored_key;       /* without influence on the result */
};

static const es_family families[] = {
    {
        .name = "llama",
        .weights = PLAIN_BLOCK,
        .activation = ES_SILU,
        .is_interleaved = true,
        .has_rope_factors = true,
        .has_yarn = true,
        .ignored_key = "tensor_data_layout",
    },
    {
        .name = "qwen2",
        .weights = PLAIN_BLOCK | BIT(W_Q_BIAS) | BIT(W_K_BIAS) | BIT(W_V_BIAS),
        .activation = ES_SILU,
        .has_yarn = true,
    },
    {
        .name = "qwen3",
        .weights = PLAIN_BLOCK | BIT(W_Q_NORM) | BIT(W_K_NORM),
        .activation = ES_SILU,
        .has_yarn = true,
    },
    {
        .name = "gemma3",
        .weights = PLAIN_BLOCK | BIT(W_Q_NORM) | BIT(W_K_NORM) | BIT(W_POST_ATTN_NORM) |
                   BIT(W_POST_FFN_NORM),
        .activation = ES_GELU,
        .is_embedding_scaled = true,
        .window_period = 6,
        .has_local_rope = true,
        .wide_scale_layers = 62, /* the 27B; llama.cpp tells it by this too: it is no key */
        .ignored_key = "mm.tokens_per_image",
    },
};
enum { N_FAMILIES = sizeof(families) / sizeof(families[0]) };

/* Keys below "FAMILY." that are read, or must be absent or neutral. Any other is refused: it could
   change the result. */
static const char *const known_keys[] = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "attention.sliding_window_pattern", "attn_logit_softcapping", "final_logit_softcapping",
    "expert_count", "expert_used_count", "rope.dimension_count", "rope.freq_base",
    "rope.freq_base_swa", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.attn_factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
    "rope.scaling.alpha", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
};
enum { N_KEYS = sizeof(known_keys) / sizeof(known_keys[0]) };

/* ---- reading keys ------------------------------------------------------------------------ */

enum { MOST = 1 << 24 }; /* of any size: products of two fit 64 bits, sums of them 32 */

typedef struct reader {
    const es_gguf *gguf;
    const es_family *family;
} reader;

typedef char key_text[96];

static const char *key_of(const reader *r, const char *key, key_text out)
{
    snprintf(out, sizeof(key_text), "%s.%s", r->family->name, key);
    return out;
}

es_status es_key_size(const es_gguf *gguf, const char *arch, const char *key, int32_t otherwise,
                      int32_t most, int32_t *out)
{
    key_text name;
    uint32_t value = 0;
    bool found = true;
    snprintf(name, sizeof(name), "%s.%s", arch, key);
    es_status status = es_gguf_u32(gguf, name, &value, otherwise == 0 ? NULL : &found);
    if (status != ES_OK) {
        return status;
    }
    if (!found) {
        *out = otherwise;
        return ES_OK;
    }
    if (value < 1 || value > (uint32_t)most) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected 1 to %d, got %u", es_gguf_name(gguf), name,
                       (int)most, (unsigned)value);
    }
    *out = (int32_t)value;
    return ES_OK;
}

static es_status read_size(const reader *r, const char *key, int32_t otherwise, int32_t most,
                           int32_t *out)
{
    return es_key_size(r->gguf, r->family->name, key, otherwise, most, out);
}

static es_status refuse(const reader *r, const char *key, double got, const char *expected)
{
    key_text name;
    return es_fail(ES_ERR_UNSUPPORTED, "%s: %s = %g is not supported, expected %s",
                   es_gguf_name(r->gguf), key_of(r, key, name), got, expected);
}

static bool is_text(es_gguf_string text, const char *wanted)
{
    return text.n == strlen(wanted) && memcmp(text.data, wanted, text.n) == 0;
}

static const es_family *family_named(es_gguf_string name)
{
    for (int32_t i = 0; i < N_FAMILIES; i++) {
        if (is_text(name, families[i].name)) {
            return &families[i];
        }
    }
    return NULL;
}

bool es_family_is_known(es_gguf_string name)
{
    return family_named(name) != NULL;
}

static es_status find_family(const es_gguf *gguf, const es_family **out)
{
    es_gguf_string name;
    es_status status = es_gguf_str(gguf, "general.architecture", &name, NULL);
    if (status != ES_OK) {
        return status;
    }
    *out = family_named(name);
    if (*out != NULL) {
        return ES_OK;
    }
    char known[128] = "";
    for (int32_t i = 0; i < N_FAMILIES; i++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof(known) - n, "%s%s", i > 0 ? ", " : "", families[i].name);
    }
    return es_fail(ES_ERR_UNSUPPORTED, "%s: general.architecture '%.*s' is not supported; known: "
                   "%s", es_gguf_name(gguf), (int)(name.n < 64 ? name.n : 64), name.data, known);
}

static es_status check_keys(const reader *r)
{
    size_t n_prefix = strlen(r->family->name) + 1;
    for (size_t i = 0; i < es_gguf_key_count(r->gguf); i++) {
        es_gguf_string name, bytes;
        es_gguf_key_at(r->gguf, i, &name, &bytes);
        if (name.n < n_prefix || name.data[n_prefix - 1] != '.' ||
            memcmp(name.data, r->family->name, n_prefix - 1) != 0) {
            continue;
        }
        es_gguf_string rest = {name.data + n_prefix, name.n - n_prefix};
        bool is_known = r->family->ignored_key != NULL && is_text(rest, r->family->ignored_key);
        for (int32_t k = 0; k < N_KEYS && !is_known; k++) {
            is_known = is_text(rest, known_keys[k]);
        }
        if (!is_known) {
            return es_fail(ES_ERR_UNSUPPORTED, "%s: %.*s: a key whose effect on %s is not known",
                           es_gguf_name(r->gguf), (int)(name.n < 96 ? name.n : 96), name.data,
                           r->family->name);
        }
    }
    return ES_OK;
}

/* ---- one model's sizes ------------------------------------------------------------------- */

es_status es_matrix_size(const es_gguf *gguf, const es_gguf_tensor *t, int64_t *rows, int64_t *cols)
{
    es_tensor tiles;
    bool found;
    es_status status = es_packed_tensor(gguf, t->name, &tiles, &found);
    if (status == ES_OK) {
        *rows = found ? tiles.rows : t->dim[1];
        *cols = found ? tiles.cols : t->dim[0];
    }
    return status;
}

/* As many tokens as the embedding has rows; a guest's file says how many its target has. */
static es_status read_vocab(const reader *r, es_shape *s)
{
    es_gguf_string vocabulary;
    int64_t rows = 0, cols = 0;
    es_status status = es_gguf_str(r->gguf, ES_KEY_DRAFT_VOCABULARY, &vocabulary, &s->is_guest);
    if (status != ES_OK || s->is_guest) {
        return status != ES_OK ? status : read_size(r, "vocab_size", 0, MOST, &s->vocab);
    }
    const es_gguf_tensor *embedding = es_gguf_find(r->gguf, "token_embd.weight");
    if (embedding != NULL &&
        (status = es_matrix_size(r->gguf, embedding, &rows, &cols)) != ES_OK) {
        return status;
    }
    if (rows < 1 || rows > MOST) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor token_embd.weight: expected 1 to %d rows, got "
                       "%lld", es_gguf_name(r->gguf), MOST, (long long)rows);
    }
    status = read_size(r, "vocab_size", (int32_t)rows, MOST, &s->vocab);
    if (status == ES_OK && s->vocab != rows) {
        return es_fail(ES_ERR_FORMAT, "%s: %s.vocab_size: expected the %d rows of "
                       "token_embd.weight, got %d", es_gguf_name(r->gguf), r->family->name,
                       (int)rows, (int)s->vocab);
    }
    return status;
}

static es_status read_sizes(const reader *r, es_shape *s)
{
    const char *path = es_gguf_name(r->gguf);
    es_status status;
    size_t n_tensors = es_gguf_tensor_count(r->gguf);
    int32_t most_layers = n_tensors < MOST ? (int32_t)n_tensors : MOST;
    if ((status = read_vocab(r, s)) != ES_OK ||
        (status = read_size(r, "block_count", 0, most_layers, &s->layers)) != ES_OK ||
        (status = read_size(r, "context_length", 0, INT32_MAX / 2, &s->max_position)) != ES_OK ||
        (status = read_size(r, "embedding_length", 0, MOST, &s->hidden)) != ES_OK ||
        (status = read_size(r, "feed_forward_length", 0, MOST, &s->ffn)) != ES_OK ||
        (status = read_size(r, "attention.head_count", 0, MOST, &s->heads)) != ES_OK ||
        (status = read_size(r, "attention.head_count_kv", s->heads, s->heads, &s->kv_heads)) !=
            ES_OK) {
        return status;
    }
    int32_t split = s->hidden / s->heads > 0 ? s->hidden / s->heads : 1;
    if ((status = read_size(r, "attention.key_length", split, MOST, &s->head_dim)) != ES_OK) {
        return status;
    }
    if (s->heads % s->kv_heads != 0) {
        return es_fail(ES_ERR_FORMAT, "%s: %s.attention.head_count_kv: expected a divisor of the "
                       "%d heads, got %d", path, r->family->name, (int)s->heads,
                       (int)s->kv_heads);
    }
    if (s->head_dim % 2 != 0 || (int64_t)s->heads * s->head_dim > MOST) {
        return es_fail(ES_ERR_FORMAT, "%s: %s.attention.key_length: expected an even size, %d of "
                       "which are at most %d, got %d", path, r->family->name, (int)s->heads, MOST,
                       (int)s->head_dim);
    }
    const char *const same[] = {"attention.value_length", "rope.dimension_count"};
    for (int32_t i = 0; i < 2; i++) {
        int32_t size;
        if ((status = read_size(r, same[i], s->head_dim, MOST, &size)) != ES_OK) {
            return status;
        }
        if (size != s->head_dim) {
            char expected[48];
            snprintf(expected, sizeof(expected), "the head's size %d", (int)s->head_dim);
            return refuse(r, same[i], size, expected);
        }
    }
    return ES_OK;
}

static es_status read_arithmetic(const reader *r, es_shape *s)
{
    const es_family *family = r->family;
    key_text name;
    float eps;
    es_status status = es_gguf_f32(
        r->gguf, key_of(r, "attention.layer_norm_rms_epsilon", name), &eps, NULL);
    if (status != ES_OK) {
        return status;
    }
    if (!(eps > 0.0f && eps < 1.0f)) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected a number between 0 and 1, got %g",
                       es_gguf_name(r->gguf), name, (double)eps);
    }
    const char *const none[] = {"attn_logit_softcapping", "final_logit_softcapping"};
    for (int32_t i = 0; i < 2; i++) {
        float softcap = 0.0f;
        bool found;
        status = es_gguf_f32(r->gguf, key_of(r, none[i], name), &softcap, &found);
        if (status == ES_OK && softcap != 0.0f) {
            status = refuse(r, none[i], (double)softcap, "none");
        }
        if (status != ES_OK) {
            return status;
        }
    }
    uint32_t experts = 0;
    bool found;
    status = es_gguf_u32(r->gguf, key_of(r, "expert_count", name), &experts, &found);
    if (status == ES_OK && experts != 0) {
        status = refuse(r, "expert_count", experts, "a dense model");
    }
    if (status != ES_OK) {
        return status;
    }
    s->eps = eps;
    s->activation = family->activation;
    s->is_interleaved = family->is_interleaved;
    s->has_post_norms = (family->weights & BIT(W_POST_ATTN_NORM)) != 0;
    s->is_tied = s->is_guest || es_gguf_find(r->gguf, "output.weight") == NULL;
    s->embedding_scale = family->is_embedding_scaled ? (float)sqrt((double)s->hidden) : 1.0f;
    int32_t per_head = s->layers == family->wide_scale_layers ? s->hidden / s->heads : s->head_dim;
    s->attention_scale = (float)(1.0 / sqrt((double)per_head));
    return ES_OK;
}

static es_status read_window(const reader *r, es_shape *s)
{
    key_text name;
    uint32_t window = 0;
    bool found;
    es_status status = es_gguf_u32(r->gguf, key_of(r, "attention.sliding_window", name), &window,
                                   &found);
    if (status != ES_OK) {
        return status;
    }
    int32_t period = r->family->window_period;
    if (window == 0 || (period == 0 && window >= (uint32_t)s->max_position)) {
        return ES_OK; /* none, or one that never hides anything */
    }
    if (period == 0) {
        return refuse(r, "attention.sliding_window", window, "none in this family");
    }
    if (window > INT32_MAX / 4) {
        return es_fail(ES_ERR_FORMAT, "%s: %s: expected at most %d, got %u", es_gguf_name(r->gguf),
                       name, INT32_MAX / 4, (unsigned)window);
    }
    s->window = (int32_t)window;
    return read_size(r, "attention.sliding_window_pattern", period, MOST, &s->window_period);
}

static es_status read_ropes(const reader *r, es_shape *s)
{
    key_text name;
    es_gguf_string kind;
    bool found;
    es_status status = es_gguf_str(r->gguf, key_of(r, "rope.scaling.type", name), &kind, &found);
    if (status == ES_OK && found && is_text(kind, "yarn") && !r->family->has_yarn) {
        status = es_fail(ES_ERR_UNSUPPORTED, "%s: %s: 'yarn' is not supported in %s",
                         es_gguf_name(r->gguf), name, r->family->name);
    }
    if (status == ES_OK) {
        status = es_rope_from_gguf(r->gguf, r->family->name, s->head_dim, s->max_position,
                                   &s->rope);
    }
    if (status == ES_OK && r->family->has_local_rope) {
        status = es_rope_local_from_gguf(r->gguf, r->family->name, s->head_dim, &s->local_rope);
    }
    return status;
}

es_status es_shape_read(const es_gguf *gguf, es_shape *out)
{
    reader r = {.gguf = gguf};
    es_shape shape = {0};
    es_status status;
    if ((status = find_family(gguf, &r.family)) != ES_OK || (status = check_keys(&r)) != ES_OK ||
        (status = read_sizes(&r, &shape)) != ES_OK ||
        (status = read_arithmetic(&r, &shape)) != ES_OK ||
        (status = read_window(&r, &shape)) != ES_OK || (status = read_ropes(&r, &shape)) != ES_OK) {
        es_shape_clear(&shape);
        return status;
    }
    shape.family = r.family;
    *out = shape;
    return ES_OK;
}

void es_shape_clear(es_shape *shape)
{
    es_rope_clear(&shape->rope);
    es_rope_clear(&shape->local_rope);
}

const char *es_shape_name(const es_shape *shape)
{
    return shape->family->name;
}

bool es_shape_is_windowed(const es_shape *shape, int32_t layer)
{
    return shape->window > 0 && (layer + 1) % shape->window_period != 0;
}

/* ---- where the weights are --------------------------------------------------------------- */

static int32_t weights_per_layer(const es_family *family)
{
    int32_t n = 0;
    for (int32_t w = 0; w < W_COUNT; w++) {
        n += (family->weights >> w & 1) != 0;
    }
    return n;
}

/* Of top_specs, those from is_guest on. */
static int32_t n_top(const es_shape *shape)
{
    return N_TOP - shape->is_tied - shape->is_guest;
}

int32_t es_slot_count(const es_shape *shape)
{
    return n_top(shape) + shape->layers * weights_per_layer(shape->family);
}

static int32_t size_of(const es_shape *shape, size_name name)
{
    switch (name) {
    case ONE: return 1;
    case VOCAB: return shape->vocab;
    case HIDDEN: return shape->hidden;
    case Q: return shape->heads * shape->head_dim;
    case KV: return shape->kv_heads * shape->head_dim;
    case HEAD: return shape->head_dim;
    case FFN: return shape->ffn;
    }
    return 0;
}

void es_slot_at(const es_shape *shape, int32_t index, es_slot *out)
{
    int32_t below = index - n_top(shape), per_layer = weights_per_layer(shape->family);
    const spec *found = &top_specs[below < 0 ? index + shape->is_guest : 0];
    out->layer = -1;
    if (below >= 0) {
        out->layer = below / per_layer;
        int32_t left = below % per_layer;
        int32_t w = 0;
        while ((shape->family->weights >> w & 1) == 0 || left-- > 0) {
            w++;
        }
        found = &layer_specs[w];
        snprintf(out->name, sizeof(out->name), "blk.%d.%s", (int)out->layer, found->name);
    } else {
        snprintf(out->name, sizeof(out->name), "%s", found->name);
    }
    out->rows = size_of(shape, found->rows);
    out->cols = size_of(shape, found->cols);
    out->is_matrix = found->rows != ONE;
    out->place = found->place;
}

es_status es_slot_check(const es_gguf *gguf, const es_gguf_tensor *t, const es_slot *slot)
{
    int64_t rows, cols;
    es_status status = es_matrix_size(gguf, t, &rows, &cols);
    if (status == ES_OK && (t->dim[2] != 1 || t->dim[3] != 1)) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor %s: expected one matrix, got %d dimensions",
                       es_gguf_name(gguf), slot->name, (int)t->n_dims);
    }
    if (status == ES_OK && (rows != slot->rows || cols != slot->cols)) {
        return es_fail(ES_ERR_FORMAT, "%s: tensor %s: expected %d rows of %d, got %lld rows of "
                       "%lld", es_gguf_name(gguf), slot->name, (int)slot->rows, (int)slot->cols,
                       (long long)rows, (long long)cols);
    }
    return status;
}

/* used (tensors of the file) receives 1 for each that has a slot. */
static es_status match_slots(const es_gguf *gguf, const es_shape *shape, uint8_t *used)
{
    const es_gguf_tensor *first = es_gguf_tensor_at(gguf, 0);
    int32_t n = es_slot_count(shape);
    for (int32_t i = 0; i < n; i++) {
        es_slot slot;
        es_slot_at(shape, i, &slot);
        const es_gguf_tensor *t = es_gguf_find(gguf, slot.name);
        if (t == NULL) {
            return es_fail(ES_ERR_FORMAT, "%s: tensor %s: missing, expected %d rows of %d",
                           es_gguf_name(gguf), slot.name, (int)slot.rows, (int)slot.cols);
        }
        es_status status = es_slot_check(gguf, t, &slot);
        if (status != ES_OK) {
            return status;
        }
        used[t - first] = 1;
    }
    const es_gguf_tensor *factors = es_gguf_find(gguf, "rope_freqs.weight");
    if (factors != NULL && shape->family->has_rope_factors) {
        used[factors - first] = 1;
    }
    return ES_OK;
}

es_status es_slots_check(const es_gguf *gguf, const es_shape *shape)
{
    size_t n = es_gguf_tensor_count(gguf);
    uint8_t *used = es_calloc(n + 1, 1);
    if (used == NULL) {
        return es_fail(ES_ERR_MEMORY, "%s: no memory to check %zu tensors", es_gguf_name(gguf), n);
    }
    es_status status = match_slots(gguf, shape, used);
    for (size_t i = 0; i < n && status == ES_OK; i++) {
        if (!used[i]) {
            status = es_fail(ES_ERR_FORMAT, "%s: tensor %s: not one %s has",
                             es_gguf_name(gguf), es_gguf_tensor_at(gguf, i)->name,
                             es_shape_name(shape));
        }
    }
    es_free(used);
    return status;
}
