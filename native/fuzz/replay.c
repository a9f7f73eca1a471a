/* replay.c - runs a fuzz target over files and directories of files, without a fuzzer. */
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int fail(const char *path)
{
    perror(path);
    return 1;
}

static int replay_file(const char *path, int *count)
{
    FILE *file = fopen(path, "rb");
    struct stat info;
    if (file == NULL || fstat(fileno(file), &info) != 0) {
        return fail(path);
    }
    size_t size = (size_t)info.st_size;
    uint8_t *data = malloc(size + 1);
    if (data == NULL || fread(data, 1, size, file) != size) {
        return fail(path);
    }
    fclose(file);
    LLVMFuzzerTestOneInput(data, size);
    free(data);
    ++*count;
    return 0;
}

static int replay(const char *path, int *count)
{
    struct stat info;
    if (stat(path, &info) != 0) {
        return fail(path);
    }
    if (!S_ISDIR(info.st_mode)) {
        return replay_file(path, count);
    }
    DIR *directory = opendir(path);
    if (directory == NULL) {
        return fail(path);
    }
    int failed = 0;
    for (struct dirent *entry; !failed && (entry = readdir(directory)) != NULL;) {
        char below[4096];
        if (entry->d_name[0] != '.') {
            snprintf(below, sizeof(below), "%s/%s", path, entry->d_name);
            failed = replay(below, count);
        }
    }
    closedir(directory);
    return failed;
}

int main(int argc, char **argv)
{
    int count = 0;
    for (int i = 1; i < argc; i++) {
        if (replay(argv[i], &count) != 0) {
            return 1;
        }
    }
    printf("%d inputs\n", count);
    return count > 0 ? 0 : 1;
}
