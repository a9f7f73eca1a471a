/* error.c - version, status names, the last message of each thread. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[512];

const char *es_version(void)
{
    return ES_VERSION;
}

int32_t es_abi(void)
{
    return ES_ABI;
}

size_t es_struct_size(const char *name)
{
    static const struct {
        const char *name;
        size_t size;
    } sizes[] = {
        {"es_tree", sizeof(es_tree)},
        {"es_sampling", sizeof(es_sampling)},
        {"es_verdict", sizeof(es_verdict)},
        {"es_session_params", sizeof(es_session_params)},
        {"es_round", sizeof(es_round)},
        {"es_stats", sizeof(es_stats)},
        {"es_model_params", sizeof(es_model_params)},
        {"es_model_info", sizeof(es_model_info)},
        {"es_target_params", sizeof(es_target_params)},
        {"es_head_info", sizeof(es_head_info)},
        {"es_drafter_params", sizeof(es_drafter_params)},
    };
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        if (strcmp(sizes[i].name, name) == 0) {
            return sizes[i].size;
        }
    }
    return 0;
}

const char *es_status_name(es_status status)
{
    switch (status) {
    case ES_OK: return "ok";
    case ES_ERR_ARGUMENT: return "argument";
    case ES_ERR_MEMORY: return "memory";
    case ES_ERR_STATE: return "state";
    case ES_ERR_CONTEXT: return "context";
    case ES_ERR_NUMERIC: return "numeric";
    case ES_ERR_UNSUPPORTED: return "unsupported";
    case ES_ERR_FORMAT: return "format";
    case ES_ERR_IO: return "io";
    }
    return "unknown";
}

const char *es_error_message(void)
{
    return message;
}

es_status es_fail(es_status status, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof(message), format, args);
    va_end(args);
    return status;
}
