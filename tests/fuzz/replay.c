/* SPDX-License-Identifier: Apache-2.0 */
/*
 * replay.c - a main for fuzz targets where there is no fuzzer: runs each file
 * that is named, and each file of a directory that is named, once.
 */
#include <dirent.h>
#include <sys/stat.h>

#include "tests/fuzz/fuzz.h"

enum { INPUT_MAX = 1 << 20 };

#pragma weak LLVMFuzzerInitialize

static unsigned executed;

static void
run_file(const char *path)
{
    static uint8_t room[INPUT_MAX];
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        perror(path);
        exit(2);
    }
    size_t length = fread(room, 1, sizeof room, file);
    fclose(file);
    uint8_t *data = malloc(length + 1); /* so that an overrun is seen */
    MUST(data != NULL);
    memcpy(data, room, length);
    fprintf(stderr, "running %s\n", path);
    LLVMFuzzerTestOneInput(data, length);
    free(data);
    executed++;
}

static void
run_directory(const char *path)
{
    DIR *stream = opendir(path);
    const struct dirent *entry;
    if (stream == NULL) {
        perror(path);
        exit(2);
    }
    while ((entry = readdir(stream)) != NULL) {
        char name[4096];
        if (entry->d_name[0] != '.') {
            snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
            run_file(name);
        }
    }
    closedir(stream);
}

int
main(int argc, char **argv)
{
    if (LLVMFuzzerInitialize != NULL) {
        LLVMFuzzerInitialize(&argc, &argv);
    }
    for (int i = 1; i < argc; i++) {
        struct stat st;
        if (stat(argv[i], &st) == 0 && S_ISDIR(st.st_mode)) {
            run_directory(argv[i]);
        } else {
            run_file(argv[i]);
        }
    }
    printf("%u executed\n", executed);
    return executed > 0 ? 0 : 1;
}
