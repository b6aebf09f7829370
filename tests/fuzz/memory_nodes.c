/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory_nodes.c - see memory_nodes.h.
 */
#include "tests/fuzz/memory_nodes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *
require(void *memory)
{
    if (memory == NULL) {
        fprintf(stderr, "memory_env: out of memory\n");
        abort();
    }
    return memory;
}

/* ---- names and nodes, sorted by path ---- */

size_t
find_place(const memory_env *m, const char *path, bool *found)
{
    size_t low = 0, high = m->name_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(m->names[middle].path, path) < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *found = low < m->name_count && strcmp(m->names[low].path, path) == 0;
    return low;
}

memory_node *
find_node(const memory_env *m, const char *path)
{
    bool found;
    size_t at = find_place(m, path, &found);
    return found ? m->names[at].node : NULL;
}

void
release_unused(memory_env *m, memory_node *node)
{
    if (node->links > 0 || node->opens > 0 || node->mappings > 0) {
        return;
    }
    for (memory_node **at = &m->nodes; *at != NULL; at = &(*at)->next) {
        if (*at == node) {
            *at = node->next;
            break;
        }
    }
    free(node->data);
    free(node);
}

void
add_name(memory_env *m, const char *path, memory_node *node)
{
    bool found;
    size_t at = find_place(m, path, &found);
    if (m->name_count == m->name_room) {
        m->name_room = m->name_room == 0 ? 32 : m->name_room * 2;
        m->names =
            require(realloc(m->names, m->name_room * sizeof *m->names));
    }
    memmove(m->names + at + 1, m->names + at,
            (m->name_count - at) * sizeof *m->names);
    m->name_count++;
    snprintf(m->names[at].path, MEMORY_PATH, "%s", path);
    m->names[at].node = node;
    node->links++;
}

void
remove_name(memory_env *m, const char *path)
{
    bool found;
    size_t at = find_place(m, path, &found);
    memory_node *node = m->names[at].node;
    m->name_count--;
    memmove(m->names + at, m->names + at + 1,
            (m->name_count - at) * sizeof *m->names);
    node->links--;
    release_unused(m, node);
}

memory_node *
new_node(memory_env *m, mode_t mode)
{
    memory_node *node = require(calloc(1, sizeof *node));
    node->inode = ++m->next_inode;
    node->mode = mode;
    node->next = m->nodes;
    m->nodes = node;
    return node;
}

void
set_room(memory_node *node, size_t room)
{
    size_t rounded = (room + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    uint8_t *data = require(aligned_alloc(ALIGNMENT, rounded));
    memset(data, 0, rounded);
    if (node->length > 0) {
        memcpy(data, node->data, node->length);
    }
    free(node->data);
    node->data = data;
    node->room = room;
}

bool
set_length(memory_node *node, uint64_t length)
{
    if (length == node->length) {
        return true;
    }
    if (length > MEMORY_FILE_MAX || node->mappings > 0) {
        return false;
    }
    if (length > node->room) {
        size_t room = node->room * 2 > PAGE ? node->room * 2 : PAGE;
        set_room(node, room > length ? room : length);
    }
    if (length < node->length) {
        memset(node->data + length, 0, node->length - length);
    }
    node->length = length;
    return true;
}
