/* SPDX-License-Identifier: Apache-2.0 */
/*
 * blocks.c - blocks that were read through an open file, and are served again.
 *
 * A block that the file's end cuts is not kept.
 *
 * A process that has a file open for long reads old blocks into the kernel's
 * page cache.  Whether a process that has just opened the file finds them there
 * depends on which of the two reads first.  So that this does not take
 * thousands of tries, the open files of a node share their blocks here, and
 * every second read of a kept block gets the kept bytes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sharedfs/sharedfs.h"

enum { BLOCK = 4096, BUCKETS = 256, OLD = 2 /* one read in so many */ };

typedef struct block {
    struct block *next;
    off_t start;
    char data[BLOCK];
} block;

struct blocks {
    unsigned users;        /* open files; guarded by the node's mutex */
    pthread_mutex_t mutex; /* guards all below; taken before the node's */
    unsigned reads;
    uint64_t writes;       /* of the node, when they were read */
    block *kept[BUCKETS];
};

blocks *
blocks_open(void)
{
    blocks *b = calloc(1, sizeof *b);
    if (b != NULL) {
        pthread_mutex_init(&b->mutex, NULL);
        b->users = 1;
    }
    return b;
}

void
blocks_share(blocks *b)
{
    b->users++;
}

static void
drop_all(blocks *b)
{
    for (int i = 0; i < BUCKETS; i++) {
        while (b->kept[i] != NULL) {
            block *first = b->kept[i];
            b->kept[i] = first->next;
            free(first);
        }
    }
}

bool
blocks_close(blocks *b)
{
    bool last = --b->users == 0;
    if (last) {
        drop_all(b);
        pthread_mutex_destroy(&b->mutex);
        free(b);
    }
    return last;
}

static const block *
find(blocks *b, off_t start)
{
    const block *found = b->kept[start / BLOCK % BUCKETS];
    while (found != NULL && found->start != start) {
        found = found->next;
    }
    return found;
}

/* Reads part of one block: bytes [from, from + size) of it. */
static ssize_t
read_block(blocks *b, node *n, int server, char *data, off_t start,
           size_t from, size_t size)
{
    const block *known = find(b, start);
    if (known != NULL && b->reads % OLD == 0) {
        memcpy(data, known->data + from, size);
        return (ssize_t)size;
    }
    block *read = malloc(sizeof *read);
    ssize_t got =
        read == NULL ? -1 : dirty_read(n, server, read->data, BLOCK, start);
    ssize_t here = got < 0                       ? got
                   : (size_t)got <= from         ? 0
                   : (size_t)got - from < size   ? got - (ssize_t)from
                                                 : (ssize_t)size;
    if (here > 0) {
        memcpy(data, read->data + from, (size_t)here);
    }
    if (got == BLOCK && known == NULL) {
        block **bucket = &b->kept[start / BLOCK % BUCKETS];
        read->start = start;
        read->next = *bucket;
        *bucket = read;
    } else {
        free(read);
    }
    return here;
}

ssize_t
blocks_read(blocks *b, node *n, int server, char *data, size_t size,
            off_t offset)
{
    size_t done = 0;
    uint64_t writes = dirty_writes(n);
    pthread_mutex_lock(&b->mutex);
    b->reads++;
    if (b->writes != writes) {
        drop_all(b);
        b->writes = writes;
    }
    while (done < size) {
        size_t from = (size_t)((offset + (off_t)done) % BLOCK);
        size_t want = BLOCK - from < size - done ? BLOCK - from : size - done;
        ssize_t got = read_block(b, n, server, data + done,
                                 offset + (off_t)done - (off_t)from, from,
                                 want);
        if (got < 0) {
            pthread_mutex_unlock(&b->mutex);
            return got;
        }
        done += (size_t)got;
        if ((size_t)got < want) {
            break;
        }
    }
    pthread_mutex_unlock(&b->mutex);
    return (ssize_t)done;
}
