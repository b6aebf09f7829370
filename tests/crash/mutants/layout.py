# SPDX-License-Identifier: Apache-2.0

"""Bugs in the layout of groups and shards.

Segments with lists of slots, packed shards of the exact index, placeholders.
Their bytes are checked whenever they are read, so the readers' tests find
these bugs.
"""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_SEGMENT = 'glance_dedup/engine/format/segment.c'
_SIMILAR = 'glance_dedup/engine/format/similar.c'
_DURABLE = 'it is synced before it counts, so that only damage shows it'
_COMPARED = 'the new file is compared with the old one before the exchange'
_OLDER = 'it takes an older program'


MUTANTS = (
    Mutant(
        'list-without-its-checksum', 'I8', (
            Edit(_SEGMENT,
                 '        gd_get32(in + LIST_CHECKSUM) !=\n'
                 '            list_checksum(in,',
                 '        gd_get32(in + LIST_CHECKSUM) ==\n'
                 '            1 + (uint64_t)list_checksum(in,'),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'slot-twice-in-a-list', 'I8', (
            Edit(_SEGMENT,
                 'good &= gd_get16(at) > ',
                 'good &= gd_get16(at) >= '),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'list-beyond-the-group', 'I8', (
            Edit(_SEGMENT,
                 'gd_get16(last) < group_slots;',
                 'gd_get16(last) <= group_slots;'),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'list-of-another-first-slot', 'I8', (
            Edit(_SEGMENT,
                 'bool good = gd_get16(slots) == header->first_slot;',
                 'bool good = (void *)header != (void *)slots;'),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'list-longer-than-its-segment', 'I8', (
            Edit(_SEGMENT,
                 ' || size >= header->stored_length) {',
                 ') {'),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'list-longer-than-what-was-read', 'I8', (
            Edit(_SEGMENT,
                 'if (size > length - GD_SEGMENT_HEADER || ',
                 'if (size > length || '),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'list-in-an-older-group', 'I8', (
            Edit(_SEGMENT,
                 'bounds->has_lists ? in[5] : CONSECUTIVE;',
                 'in[5];'),),
        tests=c_tests('segment'),
        why_not=_DURABLE),
    Mutant(
        'segment-without-the-slot', 'I2', (
            Edit('glance_dedup/engine/files/group.c',
                 '        !gd_segment_has_slot(header, slot) ||\n',
                 '        slot == UINT32_MAX ||\n'),),
        tests=c_tests('group'),
        why_not=_DURABLE),
    Mutant(
        'order-without-some-blocks', 'I2', (
            Edit(_SIMILAR,
                 'continue; /* it was',
                 'break; /* it was'),),
        tests=c_tests('similar'),
        why_not=_COMPARED),
    Mutant(
        'order-with-blocks-twice', 'I2', (
            Edit(_SIMILAR,
                 'c->last[block] = UINT32_MAX;',
                 'c->last[first] = UINT32_MAX;'),),
        tests=c_tests('similar'),
        why_not=_COMPARED),
    Mutant(
        'list-not-sorted', 'I8', (
            Edit('glance_dedup/engine/maintenance/grouprewrite.c',
                 '    qsort(slots, one->count, sizeof *slots, ascending);\n',
                 '    (void)ascending;\n'),),
        tests=c_tests('grouprewrite_similar'),
        why_not=_COMPARED),
    Mutant(
        'lists-under-the-older-version', 'I8', (
            Edit('glance_dedup/engine/format/grouphead.c',
                 'value->major = major;\n',
                 ''),),
        tests=c_tests('grouprewrite_similar'),
        why_not=_OLDER),
    Mutant(
        'packed-frame-beyond-its-end', 'I8', (
            Edit('glance_dedup/engine/format/packedframe.c',
                 'length_of(*count, key_width, address_width) > length) {',
                 'length_of(*count, key_width, address_width) > 32768) {'),),
        tests=c_tests('packedframe'),
        why_not=_DURABLE),
    Mutant(
        'packed-frame-of-another-place', 'I8', (
            Edit('glance_dedup/engine/format/indexhead.c',
                 'length, head->seed + frame, out,\n'
                 '                                  count)',
                 'length, head->seed + (0 & frame), out, count)'),),
        tests=c_tests('duplicate_search'),
        why_not=_DURABLE),
    Mutant(
        'placeholder-not-poisoned', 'I4', (
            Edit('glance_dedup/engine/maintenance/placeholder.c',
                 '.flags = GD_GROUP_POISONED | GD_GROUP_UNSETTLED,',
                 '.flags = GD_GROUP_UNSETTLED,'),),
        tests=c_tests('placeholder'),
        why_not='a writer would append to it, and lose nothing by that'),
)
