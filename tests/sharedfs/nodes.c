/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.c - the files that a client has looked up, their names and versions.
 */
#include "tests/sharedfs/sharedfs.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* As many versions as an ordinary file system has inodes, in a sparse file. */
enum { BUCKETS = 1 << 12, VERSIONS = 1 << 24 };

struct name {
    name *next;
    ino_t child; /* 0: it is missing */
    dev_t dev;
    char text[];
};

node root;
pthread_mutex_t nodes_mutex = PTHREAD_MUTEX_INITIALIZER;

static node *buckets[BUCKETS];
static atomic_ullong *versions;

double
seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* ---- versions ---- */

int
versions_open(const char *path)
{
    size_t length = (size_t)VERSIONS * sizeof *versions;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)length) < 0) {
        return -1;
    }
    versions = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return versions == MAP_FAILED ? -1 : 0;
}

/* Two files may share one: then a change of either counts for both. */
static atomic_ullong *
version_place(const node *n)
{
    return &versions[n->ino % VERSIONS];
}

uint64_t
version_of(const node *n)
{
    return atomic_load(version_place(n));
}

void
version_bump(node *n, uint64_t *seen)
{
    uint64_t before = atomic_fetch_add(version_place(n), 1);
    if (*seen == before) {
        *seen = before + 1;
    }
}

/* ---- nodes ---- */

static node **
bucket_of(dev_t dev, ino_t ino)
{
    return &buckets[(ino * 31 + dev) % BUCKETS];
}

static node *
find_node(dev_t dev, ino_t ino)
{
    if (ino == root.ino && dev == root.dev) {
        return &root;
    }
    node *n = *bucket_of(dev, ino);
    while (n != NULL && (n->ino != ino || n->dev != dev)) {
        n = n->next;
    }
    return n;
}

node *
node_of(int fd, const struct stat *st)
{
    pthread_mutex_lock(&nodes_mutex);
    node *n = find_node(st->st_dev, st->st_ino);
    if (n != NULL) {
        close(fd);
    } else if ((n = calloc(1, sizeof *n)) != NULL) {
        n->dev = st->st_dev;
        n->ino = st->st_ino;
        n->fd = fd;
        n->memory = n->server = -1;
        pthread_mutex_init(&n->mutex, NULL);
        n->next = *bucket_of(n->dev, n->ino);
        *bucket_of(n->dev, n->ino) = n;
    } else {
        close(fd);
    }
    if (n != NULL) {
        n->lookups++;
    }
    pthread_mutex_unlock(&nodes_mutex);
    return n;
}

static void
free_names(node *dir)
{
    while (dir->names != NULL) {
        name *first = dir->names;
        dir->names = first->next;
        free(first);
    }
}

void
node_forget(node *n, uint64_t lookups)
{
    if (n == &root) {
        return;
    }
    pthread_mutex_lock(&nodes_mutex);
    n->lookups -= lookups;
    bool last = n->lookups == 0;
    if (last) {
        node **at = bucket_of(n->dev, n->ino);
        while (*at != n) {
            at = &(*at)->next;
        }
        *at = n->next;
        free_names(n);
    }
    pthread_mutex_unlock(&nodes_mutex);
    if (last) {
        dirty_free(n);
        close(n->fd);
        pthread_mutex_destroy(&n->mutex);
        free(n);
    }
}

/* ---- names ---- */

static name **
find_name(node *dir, const char *text)
{
    name **at = &dir->names;
    while (*at != NULL && strcmp((*at)->text, text) != 0) {
        at = &(*at)->next;
    }
    return at;
}

static void
drop_name(name **at)
{
    name *n = *at;
    if (n != NULL) {
        *at = n->next;
        free(n);
    }
}

/* Forgets the names of a directory that has changed. */
static void
ask_for_names(node *dir, double lifetime)
{
    double now = seconds();
    if (now - dir->names_asked < lifetime) {
        return;
    }
    uint64_t version = version_of(dir);
    if (version != dir->names_seen) {
        free_names(dir);
    }
    dir->names_asked = now;
    dir->names_seen = version;
}

int
name_recall(node *dir, const char *text, double lifetime, node **child)
{
    int known = -1;
    pthread_mutex_lock(&nodes_mutex);
    ask_for_names(dir, lifetime);
    const name *n = *find_name(dir, text);
    if (n != NULL && n->child == 0) {
        known = 0;
    } else if (n != NULL) {
        *child = find_node(n->dev, n->child);
        if (*child != NULL) {
            (*child)->lookups++;
            known = 1;
        }
    }
    pthread_mutex_unlock(&nodes_mutex);
    return known;
}

void
name_remember(node *dir, const char *text, const node *child)
{
    size_t length = strlen(text) + 1;
    pthread_mutex_lock(&nodes_mutex);
    drop_name(find_name(dir, text));
    name *n = malloc(sizeof *n + length);
    if (n != NULL) {
        n->child = child == NULL ? 0 : child->ino;
        n->dev = child == NULL ? 0 : child->dev;
        memcpy(n->text, text, length);
        n->next = dir->names;
        dir->names = n;
    }
    pthread_mutex_unlock(&nodes_mutex);
}

void
name_forget(node *dir, const char *text)
{
    pthread_mutex_lock(&nodes_mutex);
    drop_name(find_name(dir, text));
    pthread_mutex_unlock(&nodes_mutex);
}

static void
forget_names_of(node *dir, const node *child)
{
    for (name **at = &dir->names; *at != NULL;) {
        if ((*at)->child == child->ino && (*at)->dev == child->dev) {
            drop_name(at);
        } else {
            at = &(*at)->next;
        }
    }
}

void
name_forget_all(const node *child)
{
    pthread_mutex_lock(&nodes_mutex);
    forget_names_of(&root, child);
    for (int i = 0; i < BUCKETS; i++) {
        for (node *n = buckets[i]; n != NULL; n = n->next) {
            forget_names_of(n, child);
        }
    }
    pthread_mutex_unlock(&nodes_mutex);
}

void
names_expire(node *dir)
{
    pthread_mutex_lock(&nodes_mutex);
    ask_for_names(dir, 0);
    pthread_mutex_unlock(&nodes_mutex);
}
