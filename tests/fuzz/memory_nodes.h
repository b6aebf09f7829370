/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_nodes.h - the files of a memory_env, and their names, sorted by path.
 */
#ifndef MEMORY_NODES_H
#define MEMORY_NODES_H

#include "tests/fuzz/memory_env.h"

enum { PAGE = 4096, ALIGNMENT = 64 };

struct memory_node {
    memory_node *next; /* of all nodes */
    uint64_t inode;
    mode_t mode;
    uint8_t *data;
    size_t length, room;
    uint64_t holes; /* bytes that were punched */
    unsigned links, opens, mappings;
};

typedef struct memory_name {
    char path[MEMORY_PATH];
    memory_node *node;
} memory_name;

void *require(void *memory);

size_t find_place(const memory_env *m, const char *path, bool *found);

memory_node *find_node(const memory_env *m, const char *path);

void release_unused(memory_env *m, memory_node *node);

void add_name(memory_env *m, const char *path, memory_node *node);

void remove_name(memory_env *m, const char *path);

memory_node *new_node(memory_env *m, mode_t mode);

void set_room(memory_node *node, size_t room);

/* Returns false if it would be too long. */
bool set_length(memory_node *node, uint64_t length);

#endif
