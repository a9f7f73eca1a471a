/* mapping.c - the bytes of a file, by mmap or by read. */
#if defined(__linux__)
#define _GNU_SOURCE /* madvise, MAP_ANONYMOUS */
#endif

#include "mapping.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "error.h"

static es_status fail_io(const char *path, const char *what)
{
    return es_fail(ES_ERR_IO, "%s: cannot %s: %s", path, what, strerror(errno));
}

/* read() takes at most 2 GiB at a time on Linux. */
enum { READ_CHUNK = 1 << 30 };

static es_status read_all(int fd, const char *path, uint8_t *out, size_t n_bytes)
{
    size_t done = 0;
    while (done < n_bytes) {
        size_t want = n_bytes - done < READ_CHUNK ? n_bytes - done : READ_CHUNK;
        ssize_t got = read(fd, out + done, want);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return fail_io(path, "be read");
        }
        if (got == 0) {
            return es_fail(ES_ERR_IO, "%s: ended at byte %zu of %zu while it was read", path, done,
                           n_bytes);
        }
        done += (size_t)got;
    }
    return ES_OK;
}

static es_status fill(int fd, const char *path, bool use_mmap, es_mapping *out)
{
    struct stat info;
    if (fstat(fd, &info) != 0) {
        return fail_io(path, "be examined");
    }
    if (!S_ISREG(info.st_mode)) {
        return es_fail(ES_ERR_IO, "%s: is not a regular file", path);
    }
    if ((uintmax_t)info.st_size > (uintmax_t)(SIZE_MAX / 2)) {
        return es_fail(ES_ERR_IO, "%s: %ju bytes are more than this system addresses", path,
                       (uintmax_t)info.st_size);
    }
    es_mapping mapping = {NULL, (size_t)info.st_size,
                          use_mmap ? ES_MAPPING_MAPPED : ES_MAPPING_READ};
    if (mapping.n_bytes > 0) {
        void *data = use_mmap ? mmap(NULL, mapping.n_bytes, PROT_READ, MAP_PRIVATE, fd, 0)
                              : mmap(NULL, mapping.n_bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) {
            return errno == ENOMEM ? es_fail(ES_ERR_MEMORY, "%s: no room for %zu bytes", path,
                                             mapping.n_bytes)
                                   : fail_io(path, "be mapped");
        }
        mapping.data = data;
        es_status status = use_mmap ? ES_OK : read_all(fd, path, data, mapping.n_bytes);
        if (status != ES_OK) {
            es_mapping_close(&mapping);
            return status;
        }
    }
    *out = mapping;
    return ES_OK;
}

es_status es_mapping_open(const char *path, bool use_mmap, es_mapping *out)
{
    /* O_NONBLOCK: opening a pipe must not wait for its other end. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return fail_io(path, "be opened");
    }
    es_status status = fill(fd, path, use_mmap, out);
    close(fd);
    return status;
}

void es_mapping_close(es_mapping *mapping)
{
    if (mapping->kind != ES_MAPPING_BORROWED && mapping->data != NULL) {
        munmap(mapping->data, mapping->n_bytes);
    }
    *mapping = (es_mapping){NULL, 0, ES_MAPPING_BORROWED};
}

void es_mapping_drop(const es_mapping *mapping, size_t offset, size_t n_bytes)
{
    long size = sysconf(_SC_PAGESIZE);
    if (mapping->kind == ES_MAPPING_BORROWED || n_bytes == 0 || size <= 0) {
        return;
    }
    size_t page = (size_t)size, begin = offset, end = offset + n_bytes;
    if (mapping->kind == ES_MAPPING_MAPPED) {
        begin = begin / page * page;
    } else {
        begin = (begin + page - 1) / page * page;
        end = end == mapping->n_bytes ? end : end / page * page;
    }
    if (begin < end) {
        madvise(mapping->data + begin, end - begin, MADV_DONTNEED);
    }
}
