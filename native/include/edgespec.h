/*
 * edgespec.h - the whole public API of the edgespec C core. What is not in this file is not API.
 *
 * One unit of work is a ROUND: draft a small token tree, verify all of it in one forward of the
 * target, accept a path that keeps the target's distribution exactly, commit its KV rows, roll the
 * rest back. A host which owns the target (ONNX Runtime, llama.cpp, ...) drives it like this:
 *
 *     es_session *s;
 *     es_session_new(&params, &s);
 *     es_session_append(s, prompt, n_prompt);
 *     es_generation_begin(s, &sampling, max_new);
 *     es_round_begin(s, ES_ROUND_PREFILL, &tree);      one row: the last prompt token
 *     ... forward the prompt; logits = those of its last row ...
 *     es_round_finish(s, logits, vocab, NULL, 0.0, &round);
 *     while (round.finish == ES_FINISH_NONE) {
 *         es_round_begin(s, ES_ROUND_DRAFT, &tree);
 *         ... forward tree.n rows; commit rows round.path[0..n_path) of the forward afterwards ...
 *         es_round_finish(s, logits, vocab, NULL, seconds, &round);
 *     }
 *     es_session_free(s);
 *
 * Threads: one session belongs to one thread at a time; different sessions are independent. The
 * library never prints, exits or aborts on input. Every fallible call returns an es_status and
 * leaves its handle usable; es_error_message() then says what, where, expected and got.
 *
 * Sizes: token ids are int32_t, counts of rows int32_t, bytes and long counts size_t. Matrices are
 * row-major; a comment gives the shape. Pointers passed in are read during the call only.
 */
#ifndef EDGESPEC_H
#define EDGESPEC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ES_API __attribute__((visibility("default")))

#define ES_VERSION "0.1.0"
#define ES_ABI 3          /* raised whenever a struct or a signature below changes */
#define ES_MAX_ROWS 64    /* rows of one tree, root included: ancestors fit one uint64_t */

/* ---- status and errors ------------------------------------------------------------------- */

typedef enum es_status {
    ES_OK = 0,
    ES_ERR_ARGUMENT = 1,    /* a value outside its documented range */
    ES_ERR_MEMORY = 2,      /* an allocation failed */
    ES_ERR_STATE = 3,       /* a call out of order */
    ES_ERR_CONTEXT = 4,     /* no room left in the context */
    ES_ERR_NUMERIC = 5,     /* a NaN among the logits, or no token left to choose from */
    ES_ERR_UNSUPPORTED = 6, /* a combination this build or method does not do */
    ES_ERR_FORMAT = 7,      /* a file that is damaged, hostile or of another kind */
    ES_ERR_IO = 8           /* a file that cannot be opened, read or written */
} es_status;

ES_API const char *es_version(void);               /* ES_VERSION of the library, not the header */
ES_API int32_t es_abi(void);                       /* ES_ABI of the library */
ES_API const char *es_status_name(es_status status);
ES_API size_t es_struct_size(const char *name);    /* sizeof("es_tree") etc. for bindings; else 0 */
ES_API const char *es_error_message(void);         /* of this thread's last failed call */

/* ---- tree -------------------------------------------------------------------------------- */

/* Row 0 is the root: the last emitted token, not yet in KV. Rows are in topological order. n,
   token, parent and rank are the record; depth and mask are derived by es_tree_derive. */
typedef struct es_tree {
    int32_t n;                    /* rows, root included: 1..ES_MAX_ROWS */
    int32_t token[ES_MAX_ROWS];
    int32_t parent[ES_MAX_ROWS];  /* parent[0] == -1, parent[i] < i */
    int32_t rank[ES_MAX_ROWS];    /* 0-based among the parent's children, best first */
    int32_t depth[ES_MAX_ROWS];   /* root 0 */
    uint64_t mask[ES_MAX_ROWS];   /* bit j set iff row j is row i or an ancestor of it */
    float score[ES_MAX_ROWS];     /* product of draft probabilities on the path; root 1 */
} es_tree;

/* Checks n, parent and rank (distinct among siblings) and fills depth and mask. */
ES_API es_status es_tree_derive(es_tree *tree);

/* ---- sampling ---------------------------------------------------------------------------- */

/* Order of processing: logit bias, repetition penalty, frequency and presence penalty,
   temperature, top-k, top-p, min-p (the order of transformers). temperature 0 is argmax (lowest
   id among equals). */
typedef struct es_sampling {
    float temperature;          /* >= 0 */
    int32_t top_k;              /* 0 = off; more than the vocabulary = off */
    float top_p;                /* (0, 1]; 1 = off */
    float min_p;                /* [0, 1); 0 = off */
    float repetition_penalty;   /* > 0; 1 = off */
    float frequency_penalty;    /* 0 = off */
    float presence_penalty;     /* 0 = off */
    int32_t penalty_window;     /* last tokens of the sequence penalties look at; -1 = all */
    uint64_t seed;
    const int32_t *bias_token;  /* (n_bias) */
    const float *bias_value;    /* (n_bias) added to the logits; -INFINITY bans a token */
    size_t n_bias;
} es_sampling;

ES_API es_status es_sampling_default(es_sampling *out);

/* Gumbel noise of one token at one index of the sequence: a pure function (Philox4x32-10). */
ES_API double es_noise(uint64_t seed, uint64_t index, int32_t token);

/* Processes one row in place: removed tokens become -INFINITY, the rest logits / temperature (raw
   penalised logits at temperature 0). history (n_history) is the sequence up to and including the
   token this row was computed from. allowed is NULL or a bit set of (vocab) bits, bit t % 8 of byte
   t / 8, a 0 removing the token before everything else. Tokens equal to the k-th largest logit all
   stay, as in transformers; the nucleus of top-p takes the lowest id first among equals. After an
   error the row's contents are undefined. */
ES_API es_status es_sample_process(const es_sampling *sampling, const int32_t *history,
                                   size_t n_history, const uint8_t *allowed, float *logits,
                                   size_t vocab);

/* Draws from a processed row: argmax(logits + noise(seed, index, token)), argmax at temperature 0. */
ES_API es_status es_sample_draw(const es_sampling *sampling, const float *processed, size_t vocab,
                                uint64_t index, int32_t *token);

/* ---- verification ------------------------------------------------------------------------ */

typedef struct es_verdict {
    int32_t n;                        /* tokens emitted, 1..depth+1 */
    int32_t token[ES_MAX_ROWS + 1];   /* accepted tokens, then the one drawn at the last row */
    int32_t row[ES_MAX_ROWS + 1];     /* row[i]: tree row whose logits decided token[i]; row[0] == 0 */
} es_verdict;

/* One rule for every temperature: draw y at the row from the processed target row with the noise
   of its index; descend if y is a child, else emit y and stop. Lossless for children that are a
   function of the context. index is that of the first emitted token in the whole sequence;
   history ends with the root's token; logits: row i at logits + i * stride floats, not changed;
   allowed is NULL or (n, (vocab + 7) / 8) bytes. scratch (vocab) floats. */
ES_API es_status es_verify_coupled(const es_tree *tree, const float *logits, size_t stride,
                                   size_t vocab, const es_sampling *sampling,
                                   const int32_t *history, size_t n_history, uint64_t index,
                                   const uint8_t *allowed, float *scratch, es_verdict *out);

typedef enum es_rejection {
    ES_REJECT_WITHOUT_REPLACEMENT = 0, /* Sequoia, arXiv 2402.12374; a chain is Leviathan's rule */
    ES_REJECT_WITH_REPLACEMENT = 1     /* SpecInfer's multi-step rule, arXiv 2305.09781 */
} es_rejection;

/* For drafts whose children were sampled from q. p (n, vocab): processed target probabilities; q
   (n, vocab): draft probabilities (rows of leaves are not read). Children are tried in rank
   order. scratch (2 * vocab) floats. */
ES_API es_status es_verify_rejection(const es_tree *tree, const float *p, const float *q,
                                     size_t vocab, es_rejection rule, uint64_t seed,
                                     uint64_t index, float *scratch, es_verdict *out);

/* ---- KV bookkeeping ---------------------------------------------------------------------- */

/* Linear buffers: moves accepted rows forward in place. base holds n_blocks blocks (say one per
   KV head) block_stride bytes apart, each of rows of row_bytes; row first + path[i] goes to row
   first + i. path ascends and path[i] >= i. */
ES_API es_status es_kv_compact(void *base, size_t n_blocks, size_t block_stride, size_t row_bytes,
                               size_t first, const int32_t *path, int32_t n_path);

/* A windowed ring. It owns no KV memory: it says which slot each row lives in. With window W and
   S sinks the row at position p sees positions [0, S) and (p - W, p]; window 0 sees everything.
   A slot is reused only when no row of the batch can see it. */
typedef struct es_ring es_ring;

ES_API es_status es_ring_new(int32_t n_slots, int32_t sinks, int32_t window, es_ring **out);
ES_API void es_ring_free(es_ring *ring);                       /* NULL is a no-op */
ES_API int64_t es_ring_length(const es_ring *ring);            /* committed positions */
/* Places n rows behind the committed ones; slot (n) receives their slots. Depths ascend from the
   committed length as in es_tree: row i has position length + depth[i]. ES_ERR_CONTEXT when the
   ring is too small for the batch. */
ES_API es_status es_ring_append(es_ring *ring, const int32_t *depth, int32_t n, int32_t *slot);
/* Keeps rows path[0..n_path) of the last append, drops the others; path[i] has depth i. from and to
   (n_path) receive the slot moves the owner of the memory has to make, in order; n_moves how many. */
ES_API es_status es_ring_commit(es_ring *ring, const int32_t *path, int32_t n_path, int32_t *from,
                                int32_t *to, int32_t *n_moves);
ES_API es_status es_ring_rollback(es_ring *ring);              /* drops the last append */
/* Keeps the first `length` positions; ES_ERR_CONTEXT, nothing changed, when a position the next
   row must see has been overwritten. */
ES_API es_status es_ring_truncate(es_ring *ring, int64_t length);
/* Slots of the committed positions visible from `position`, in position order. slot has room for
   n_slots. ES_ERR_CONTEXT when one of them has been overwritten. */
ES_API es_status es_ring_visible(const es_ring *ring, int64_t position, int32_t *slot, int32_t *n);

/* ---- session and round ------------------------------------------------------------------- */

typedef enum es_draft_kind {
    ES_DRAFT_NONE = 0,   /* plain decoding, or trees the host proposes */
    ES_DRAFT_NGRAM = 1   /* continuations found in prompt, reply and earlier turns */
} es_draft_kind;

typedef enum es_tree_mode {
    ES_TREE_AUTO = 0,    /* rows chosen each round from scores and the measured c(n) */
    ES_TREE_BEST = 1,    /* always the best `rows` rows the draft offers */
    ES_TREE_SHAPE = 2    /* the static tree given in shape, children by rank */
} es_tree_mode;

typedef struct es_session_params {
    int32_t vocab;
    int32_t context;             /* KV rows available to the sequence */
    const int32_t *eos;          /* (n_eos) ids that end a reply */
    int32_t n_eos;
    es_draft_kind draft;
    es_tree_mode tree;
    int32_t rows;                /* AUTO, BEST: most rows of a round, root included, 1..ES_MAX_ROWS */
    const es_tree *shape;        /* SHAPE: n, parent and rank are read */
    size_t ngram_capacity;       /* tokens the n-gram index remembers */
    const double *cost;          /* NULL, or (ES_MAX_ROWS + 1): cost[n] = c(n) in any one unit, 0 =
                                    unknown; then costs stay as given and nothing is learned */
    double cost_slope;           /* prior for c(n) / c(1) = 1 + slope * (n - 1) while unmeasured */
    int32_t kv_block;            /* 0, or: no tree straddles a multiple of kv_block KV rows. For
                                    targets that sum attention in blocks of that many keys: a
                                    row's ancestors then share blocks as when decoded singly */
    int32_t blind_ranks;         /* 1: a head's children rank by probability alone also where noise
                                    decides between them: for measuring what looking at it is worth */
} es_session_params;

ES_API es_status es_session_params_default(es_session_params *out);

typedef struct es_session es_session;

ES_API es_status es_session_new(const es_session_params *params, es_session **out);
ES_API void es_session_free(es_session *session);              /* NULL is a no-op */

/* The sequence: prompt, replies, everything the KV cache mirrors. */
ES_API es_status es_session_append(es_session *session, const int32_t *tokens, size_t n);
ES_API es_status es_session_truncate(es_session *session, size_t length);
ES_API size_t es_session_length(const es_session *session);
ES_API const int32_t *es_session_tokens(const es_session *session);  /* valid until the next call */

/* Tokens dropped from the front of the conversation still count in the index of later tokens, so
   the noise of a seed does not repeat: adds n to the index offset. */
ES_API es_status es_session_evicted(es_session *session, uint64_t n);

/* Starts a reply of at most max_new >= 1 tokens (0 is the host's business: there is no round). The
   sequence must not be empty. Copies the sampling; drops a proposal not used. */
ES_API es_status es_generation_begin(es_session *session, const es_sampling *sampling,
                                     int64_t max_new);

typedef enum es_round_kind {
    ES_ROUND_PREFILL = 0,  /* one row, the last prompt token; left out of the statistics */
    ES_ROUND_PLAIN = 1,    /* one row */
    ES_ROUND_DRAFT = 2     /* the session's draft, planned */
} es_round_kind;

typedef enum es_finish {
    ES_FINISH_NONE = 0,
    ES_FINISH_STOP = 1,    /* an EOS id, emitted as the last token */
    ES_FINISH_LENGTH = 2,  /* max_new reached */
    ES_FINISH_CONTEXT = 3  /* the next root has no KV row left */
} es_finish;

typedef struct es_round {
    int32_t n;                       /* tokens emitted == rows to commit */
    int32_t token[ES_MAX_ROWS + 1];  /* appended to the sequence */
    int32_t row[ES_MAX_ROWS + 1];    /* ascending tree rows to commit; row[i] decided token[i] */
    es_finish finish;
} es_round;

/* Proposes the tree of the next ES_ROUND_DRAFT round in place of the session's own draft: scripted
   drafts, and drafts the host runs. tree->token[0] is ignored. Clipped like any other tree. */
ES_API es_status es_round_propose(es_session *session, const es_tree *tree);

/* First half: the tree to forward. Clipped to the room left in context and in max_new. */
ES_API es_status es_round_begin(es_session *session, es_round_kind kind, es_tree *tree);

/* Second half: verifies, appends the emitted tokens to the sequence, learns. logits: row i at
   logits + i * stride floats. allowed as in es_verify_coupled. seconds: time of the forward, 0 if
   unknown. After an error the round is still open: finish again or es_round_abandon. */
ES_API es_status es_round_finish(es_session *session, const float *logits, size_t stride,
                                 const uint8_t *allowed, double seconds, es_round *out);

ES_API es_status es_round_abandon(es_session *session);   /* drops an open round; else a no-op */

#define ES_STATS_LEVELS 8

typedef struct es_stats {        /* of the generation in progress or last finished */
    int64_t rounds;              /* forwards, the prefill's excluded */
    int64_t plain_rounds;        /* of these, with one row */
    int64_t tokens;              /* emitted by these rounds */
    int64_t drafted;             /* rows forwarded less roots */
    int64_t accepted;            /* drafted rows accepted */
    int64_t depth;               /* sum over rounds of the tree's depth */
    double forward_seconds;      /* as reported by the host */
    double draft_seconds;        /* spent in es_round_begin */
    /* By depth, the root's children first: rounds whose accepted path came to a row with children
       of this depth, and those in which one of them was accepted too. */
    int64_t tried[ES_STATS_LEVELS];
    int64_t held[ES_STATS_LEVELS];
} es_stats;

ES_API es_status es_session_stats(const es_session *session, es_stats *out);

/* The learned cost: c (ES_MAX_ROWS + 1), seconds of a forward over n rows, 0 where unmeasured. */
ES_API es_status es_session_cost(const es_session *session, double *c);

/* ---- model ------------------------------------------------------------------------------- */

/* The weights of a target, packed into tiles for small batches. One model may serve several
   targets; it owns the threads, so calls that compute are serialised inside. */
typedef struct es_model es_model;

typedef struct es_model_params {
    int32_t threads;      /* members of the pool, 1..1024 */
    int32_t use_mmap;     /* 0: read the file into memory instead of mapping it */
    int32_t lock;         /* 1: lock the weights into memory; refused is ES_ERR_MEMORY */
    const char *cpu;      /* kernel variant by name; NULL: $EDGESPEC_CPU, else the best there is */
} es_model_params;

ES_API es_status es_model_params_default(es_model_params *out);

typedef struct es_model_info {
    char architecture[32];     /* general.architecture */
    char cpu[32];              /* kernel variant */
    int32_t vocab, layers, hidden, heads, kv_heads, head_dim, ffn;
    int32_t max_position;      /* the model's context limit */
    int32_t window;            /* of its sliding layers; 0: it has none */
    int32_t windowed_layers;
    int32_t threads;
    int32_t is_packed;         /* 1: mapped from a packed file */
    size_t file_bytes;
    size_t weight_bytes;       /* packed */
    size_t token_bytes;        /* weights read for one token: the denominator of GB/s */
} es_model_info;

/* Names of the kernel variants this processor runs, best first, "generic" last; NULL past the end. */
ES_API const char *es_cpu_variant(int32_t index);

/* Opens a GGUF file, plain or packed: everything is checked, nothing is packed yet. */
ES_API es_status es_model_open(const char *path, const es_model_params *params, es_model **out);
/* Packs for a fraction of a second; call until *done == *total (bytes), which a packed file is at
   once. Between calls the host may show progress or give up. */
ES_API es_status es_model_load(es_model *model, size_t *done, size_t *total);
ES_API es_status es_model_describe(const es_model *model, es_model_info *out);
/* Writes the loaded model as a packed file (a temporary name beside it, renamed at the end). */
ES_API es_status es_model_save(es_model *model, const char *path);
ES_API void es_model_free(es_model *model);              /* NULL is a no-op; after its targets */

/* ---- target ------------------------------------------------------------------------------ */

/* One conversation's KV cache over a model. Rows are forwarded behind the committed ones and stay
   open until es_target_commit or the next forward, which drops them. */
typedef struct es_target es_target;

typedef enum es_kv_type { ES_KV_F16 = 0, ES_KV_INT8 = 1 } es_kv_type;

typedef struct es_target_params {
    int32_t context;      /* positions, 1..max_position */
    int32_t window;       /* 0: none; else position p sees sinks and (p - window, p] in every layer */
    int32_t sinks;        /* positions that stay visible beside the window */
    es_kv_type kv;
} es_target_params;

ES_API es_status es_target_params_default(es_target_params *out);
/* Bytes es_target_new would need for KV and scratch. */
ES_API es_status es_target_memory(const es_model *model, const es_target_params *params,
                                  size_t *bytes);
ES_API es_status es_target_new(es_model *model, const es_target_params *params, es_target **out);
ES_API void es_target_free(es_target *target);           /* NULL is a no-op */
ES_API int64_t es_target_length(const es_target *target);

/* Forwards a tree. logits (n_rows, vocab) receives the rows named in `rows` (ascending; NULL: all
   tree->n, n_rows ignored). ES_ERR_CONTEXT when length + n exceeds the context; a windowed target
   wants the deepest position below max_position instead. */
ES_API es_status es_target_forward(es_target *target, const es_tree *tree, const int32_t *rows,
                                   int32_t n_rows, float *logits);
/* The same for trees of several targets of one model in one pass, at most ES_MAX_ROWS rows in all.
   logits: all rows of tree[0], then of tree[1], ... */
ES_API es_status es_target_forward_many(es_target *const *target, const es_tree *const *tree,
                                        int32_t n_targets, float *logits);
/* Forwards a chain of any n >= 1 and commits it; logits (vocab) of the last row, or NULL. */
ES_API es_status es_target_prefill(es_target *target, const int32_t *tokens, size_t n,
                                   float *logits);
ES_API es_status es_target_commit(es_target *target, const int32_t *rows, int32_t n_rows);
ES_API es_status es_target_truncate(es_target *target, int64_t length);

/* Hidden states kept of every forward from now on, as drafts want them: ids (n_ids, 0 of them: no
   more) from 0, the embedded rows, over i, what layer i - 1 hands on, to `layers`, after the final
   norm. */
ES_API es_status es_target_set_taps(es_target *target, const int32_t *ids, int32_t n_ids);
/* out (n_rows, n_ids, hidden). n_rows: all rows of the last forward of this target, in a pass of
   its own or of many; after a prefill of n tokens the last (n - 1) % ES_MAX_ROWS + 1. */
ES_API es_status es_target_read_taps(const es_target *target, int32_t n_rows, float *out);

/* A whole round: begin, forward, finish, commit. logits NULL, or (ES_MAX_ROWS, vocab): receives the
   rows of the tree, whose shape `tree` (may be NULL) receives. The target must hold the session's
   sequence less its last token. */
ES_API es_status es_round_run(es_session *session, es_target *target, es_round_kind kind,
                              es_tree *tree, float *logits, es_round *out);

/* ---- draft heads ------------------------------------------------------------------------- */

/* Weights that guess what a target says next. A head uses its target's embedding and output matrix
   where it has none of its own, and the target's threads and kernels always. */
typedef struct es_head es_head;

typedef enum es_head_kind {
    ES_HEAD_MEDUSA = 0,
    ES_HEAD_EAGLE = 1,     /* EAGLE-1 and 2 */
    ES_HEAD_EAGLE3 = 2,
    ES_HEAD_MODEL = 3      /* a small model of its own */
} es_head_kind;

#define ES_MAX_TAPS 8

typedef struct es_head_info {
    es_head_kind kind;
    int32_t hidden;
    int32_t draft_vocab;       /* tokens it can say */
    int32_t max_position;      /* distance its positions span; 0: it has none */
    int32_t depth;             /* most levels it can draft (Medusa: its heads); 0: any */
    int32_t n_taps;            /* hidden states of the target it reads ... */
    int32_t taps[ES_MAX_TAPS]; /* ... and which, numbered as in es_target_set_taps */
    size_t file_bytes;
    size_t weight_bytes;       /* its own weights, packed */
} es_head_info;

/* Loads a head whole. The target's model is loaded and outlives it. ES_ERR_FORMAT names both sides
   when the head is made for another target. */
ES_API es_status es_head_open(es_model *target, const char *path, es_head **out);
ES_API es_status es_head_describe(const es_head *head, es_head_info *out);
ES_API void es_head_free(es_head *head);                 /* NULL is a no-op; after its drafters */

/* One conversation's draft state over a head: which tokens were committed, what the target thought
   at each of them, and what the head keeps of that. */
typedef struct es_drafter es_drafter;

typedef struct es_drafter_params {
    int32_t window;       /* positions the head looks back; 0: 1024, or the head's limit if less */
} es_drafter_params;

ES_API es_status es_drafter_params_default(es_drafter_params *out);
/* Bytes es_drafter_new would need: KV, kept hidden states, scratch. */
ES_API es_status es_drafter_memory(const es_head *head, const es_drafter_params *params,
                                   size_t *bytes);
ES_API es_status es_drafter_new(es_head *head, const es_drafter_params *params, es_drafter **out);
ES_API void es_drafter_free(es_drafter *drafter);        /* NULL is a no-op */
ES_API int64_t es_drafter_length(const es_drafter *drafter);   /* positions it was told of */

/* The target committed these: tokens (n) and their hidden states taps (n, n_taps, target's hidden),
   kept as halves until a draft reads them. For targets that are not the core's own; an attached
   es_target does it. */
ES_API es_status es_drafter_append(es_drafter *drafter, const int32_t *tokens, const float *taps,
                                   size_t n);
ES_API es_status es_drafter_truncate(es_drafter *drafter, int64_t length);

/* From now on the target's prefills, commits and truncations keep the drafter in step, and its taps
   are those the head wants. ES_ERR_STATE unless their lengths are equal. NULL: no more. */
ES_API es_status es_target_attach(es_target *target, es_drafter *drafter);
/* The session's ES_ROUND_DRAFT rounds draft with it, beside n-grams where it has them. NULL: no
   more. */
ES_API es_status es_session_attach(es_session *session, es_drafter *drafter);

/* ---- machine ------------------------------------------------------------------------------ */

/* What the processor can do at best. Measuring calls run on the calling thread for about `seconds`
   (0 < seconds <= 60): a host starts one per core and adds the rates. */

/* Vector features present, names separated by single spaces; size 256 is always enough. */
ES_API es_status es_cpu_features(char *out, size_t size);

/* Reads n_bytes (>= 8, aligned to 8) again and again. checksum is the XOR of the 64-bit words, a
   remainder below 8 bytes not read. Much more than the last cache level measures memory. */
ES_API es_status es_measure_read(const void *data, size_t n_bytes, double seconds,
                                 double *bytes_per_second, uint64_t *checksum);

/* Names of the int8 kernels this processor runs, best first, "portable" last; NULL past the end. */
ES_API const char *es_int8_kernel(int32_t index);

/* u8 x s8 multiply-accumulates into int32 from L1. checksum is the same for every kernel. */
ES_API es_status es_measure_int8(int32_t index, double seconds, double *macs_per_second,
                                 int32_t *checksum);

#ifdef __cplusplus
}
#endif
#endif
