/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_large.c - see memory_large.h.
 */
#include "tests/fuzz/memory_large.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(at, size) ((void)(at), (void)(size))
#endif

/* Marking a large block by mapping zeros over its shadow costs more than
 * writing them, and a long quarantine more memory than the run itself. */
const char *__asan_default_options(void);

const char *
__asan_default_options(void)
{
    return "clear_shadow_mmap_threshold=1073741824:quarantine_size_mb=16:"
           "detect_stack_use_after_return=1";
}

/* Large blocks are kept for the next of the same size, even of a later run:
 * getting them from the system would be most of a run's time. The start of a
 * kept one is poisoned, so that its use is detected until it is lent again. */
enum { PAGE = 4096, KEPT = 32, POISONED = 4096 };

static struct {
    void *block; /* NULL: a free place */
    size_t size;
    bool lent;
} large_blocks[KEPT];

void *
memory_large_alloc(size_t size)
{
    size_t place = KEPT;
    for (size_t i = 0; i < KEPT; i++) {
        if (large_blocks[i].block == NULL) {
            place = i;
        } else if (!large_blocks[i].lent && large_blocks[i].size == size) {
            large_blocks[i].lent = true;
            ASAN_UNPOISON_MEMORY_REGION(large_blocks[i].block, POISONED);
            return large_blocks[i].block;
        }
    }
    void *block = malloc(size);
    if (block != NULL && place < KEPT) {
        large_blocks[place].block = block;
        large_blocks[place].size = size;
        large_blocks[place].lent = true;
    }
    return block;
}

void
memory_large_clear(uint8_t *block, size_t size)
{
    size_t head = -(uintptr_t)block % PAGE;
    size_t pages = (size - head) / PAGE * PAGE;
    memset(block, 0, head);
    memset(block + head + pages, 0, size - head - pages);
    if (madvise(block + head, pages, MADV_DONTNEED) != 0) {
        memset(block + head, 0, pages);
    }
}

void
memory_large_release(void *block)
{
    for (size_t i = 0; block != NULL && i < KEPT; i++) {
        if (large_blocks[i].block == block) {
            if (!large_blocks[i].lent) {
                fprintf(stderr, "memory_env: released twice\n");
                abort();
            }
            large_blocks[i].lent = false;
            ASAN_POISON_MEMORY_REGION(block, POISONED);
            return;
        }
    }
    free(block);
}
