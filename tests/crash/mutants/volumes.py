# SPDX-License-Identifier: Apache-2.0

"""Bugs in volumes (V1 to V11)."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_JOURNAL = 'glance_dedup/engine/volume/journal.c'
_VOLUME_STATE = 'glance_dedup/engine/volume/state.c'
_CHECKPOINT = 'glance_dedup/engine/volume/checkpoint.c'
_VOLUME_DELETE = 'glance_dedup/engine/volume/delete.c'
_RECOVERY = 'glance_dedup/engine/volume/recovery.c'
_EDITION = 'glance_dedup/engine/volume/edition.c'
_RESIZE = 'glance_dedup/engine/volume/resize.c'
_VOLUME_DIRECTORY = 'glance_dedup/engine/volume/directory.c'
_MOMENTS = ('tests/functional/test_volume_moments.py::'
            'test_snapshots[library-50]',)
_CUT_OFF = 'it takes an owner that was cut off'


MUTANTS = (
    Mutant(
        'journal-named-before-its-head', 'V2', (
            Edit(_JOURNAL,
                 'gd_status s = gd_journal_sync(journal, err);',
                 'gd_status s = GD_OK;'),),
        workload='volume'),
    Mutant(
        'journal-written-before-its-name', 'V2', (
            Edit(_JOURNAL,
                 '    return gd_sync_dir(env, journal->root, directory, '
                 'err);\n',
                 '    return GD_OK;\n'),),
        workload='volume'),
    Mutant(
        'flush-without-a-sync', 'V3', (
            Edit(_VOLUME_STATE,
                 'gd_status s = gd_journal_sync(journal, err);',
                 'gd_status s = GD_OK;'),),
        workload='volume'),
    Mutant(
        'recovered-records-not-copied', 'V4', (
            Edit(_RECOVERY,
                 'GD_TRY(gd_journal_tail_copy(&tail, to, enter_copy, copies, '
                 'err));',
                 '(void)tail, (void)to, (void)enter_copy, (void)copies;'),),
        workload='volume'),
    Mutant(
        'copies-behind-the-name', 'V4', (
            Edit(_RECOVERY,
                 '    gd_status s =\n'
                 '        copy ? copy_tails(volume, *made, copies, err) : '
                 'GD_OK;\n'
                 '    if (s != GD_OK) {\n'
                 '        gd_journal_abandon(*made);\n'
                 '        return s;\n'
                 '    }\n'
                 '    return gd_journal_publish(*made, volume->name, named, '
                 'err);\n',
                 '    GD_TRY(gd_journal_publish(*made, volume->name, named, '
                 'err));\n'
                 '    return copy ? copy_tails(volume, *made, copies, err) : '
                 'GD_OK;\n'),),
        workload='volume'),
    Mutant(
        'frozen-journal-not-synced', 'V11', (
            Edit(_VOLUME_STATE,
                 'gd_volume_unsynced_bytes(active) > 0 ? active : NULL;',
                 'NULL;'),),
        workload='volume-unsynced', quick=True),
    Mutant(
        'records-behind-a-torn-journal', 'V11', (
            Edit(_RECOVERY,
                 '    gd_journal_forget(journal);\n',
                 ''),),
        workload='volume-unsynced'),
    Mutant(
        'records-behind-a-torn-journal-read', 'V11', (
            Edit(_RECOVERY,
                 '        gd_overlay_clear(&volume->fresh);\n'
                 '        r->count = 0;\n',
                 '        r->count = 0;\n'),),
        tests=c_tests('state_unsynced'), why_not='the disk must be full'),
    Mutant(
        'marks-behind-a-torn-journal', 'V11', (
            Edit(_RECOVERY,
                 '        gd_overlay_clear(&volume->fresh);\n'
                 '        r->count = 0;\n',
                 '        gd_overlay_clear(&volume->fresh);\n'),),
        workload='volume-unsynced'),
    Mutant(
        'unproven-journal-not-copied', 'V4', (
            Edit(_RECOVERY,
                 '(reaches[i].durable == reaches[i].end ||\n'
                 '                                   proves_earlier(next));',
                 'next != NULL;'),),
        tests=c_tests('state_unsynced'),
        why_not='a process must be killed, and then the machine crash'),
    Mutant(
        'active-journal-synced-first', 'V11', (
            Edit(_VOLUME_STATE,
                 'volume->unsynced != NULL ? volume->unsynced : '
                 'volume->active;',
                 'volume->unsynced != NULL &&\n'
                 '                    volume->active->durable == '
                 'volume->active->end\n'
                 '                ? volume->unsynced : volume->active;'),),
        tests=c_tests('state_unsynced'),
        why_not='another thread must write meanwhile'),
    Mutant(
        'flush-before-the-record-of-the-end', 'V11', (
            Edit(_CHECKPOINT,
                 '        s = gd_volume_sync_stored(volume, err);\n',
                 '        volume->unsynced = NULL;\n'
                 '        s = gd_volume_sync_stored(volume, err);\n'),),
        tests=c_tests('state_unsynced'),
        why_not='a thread must have waited since before the checkpoint'),
    Mutant(
        'loss-behind-a-proof-not-noticed', 'V5', (
            Edit(_RECOVERY,
                 '    if (proves_earlier(journal)) {\n'
                 '        return gd_journal_lost(torn, err);\n'
                 '    }\n',
                 '    (void)torn, (void)err;\n'),),
        tests=c_tests('state_unsynced'),
        why_not='a disk must lose what was synced'),
    Mutant(
        'frozen-journal-dropped-before-the-marks', 'V6', (
            Edit(_VOLUME_STATE,
                 '    GD_TRY(make_next(volume, change, needed, &head, &made, '
                 'err));\n'
                 '    volume->head = head;\n'
                 '    if (fate == GD_REPLACE) {\n'
                 '        gd_volume_drop_frozen(volume);\n'
                 '    }\n',
                 '    if (fate == GD_REPLACE) {\n'
                 '        gd_volume_drop_frozen(volume);\n'
                 '    }\n'
                 '    GD_TRY(make_next(volume, change, needed, &head, &made, '
                 'err));\n'
                 '    volume->head = head;\n'),),
        workload='volume-unsynced'),
    Mutant(
        'larger-before-its-writes', 'V11', (
            Edit(_RESIZE,
                 '    gd_status s = gd_volume_sync(volume, err);\n',
                 '    gd_status s = GD_OK;\n'),),
        workload='volume-resized'),
    Mutant(
        'marks-not-synced', 'V6', (
            Edit(_CHECKPOINT,
                 '        s = gd_volume_sync_stored(volume, err);\n',
                 ''),),
        workload='volume'),
    Mutant(
        'editions-deleted-before-the-marks', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(replace_frozen(volume, go_on, err));\n',
                 '    size_t made = volume->made_count;\n'
                 '    delete_old(volume);\n'
                 '    volume->made_count = made;\n'
                 '    GD_TRY(replace_frozen(volume, go_on, err));\n'),),
        workload='volume'),
    Mutant(
        'journals-unlinked-before-they-are-stored', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(append_marks(volume, err));\n',
                 '    for (size_t i = 0; i < volume->frozen_count; i++) {\n'
                 '        GD_TRY(gd_volume_unlink_journal(\n'
                 '            volume->repo->env, volume->repo->root, '
                 'volume->name,\n'
                 '            volume->frozen[i]->number, err));\n'
                 '    }\n'
                 '    GD_TRY(append_marks(volume, err));\n'),),
        workload='volume'),
    Mutant(
        'editions-kept-without-marks', 'V7', (
            Edit(_RECOVERY,
                 '    (void)gd_volume_delete_recipes(volume->repo, head, '
                 'marks, head->marks,\n'
                 '                                   NULL);\n',
                 '    (void)marks;\n'),),
        workload='volume'),
    Mutant(
        'clone-ready-before-its-base', 'V9', (
            Edit('glance_dedup/engine/volume/create.c',
                 '.state = plan->base == NULL ? GD_VOLUME_READY : '
                 'GD_VOLUME_MAKING,',
                 '.state = GD_VOLUME_READY,'),),
        workload='volume-cloned'),
    Mutant(
        'deleted-while-ready', 'V9', (
            Edit(_VOLUME_DELETE,
                 '    if (head->state != GD_VOLUME_READY) {\n'
                 '        /* It is',
                 '    if (head->state == GD_VOLUME_READY) {\n'
                 '        return GD_OK;\n'
                 '    }\n'
                 '    if (head->state != GD_VOLUME_READY) {\n'
                 '        /* It is'),),
        workload='volume-deleted'),
    Mutant(
        'newest-journal-removed-first', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 '        if (i + 1 == count) {\n'
                 '            s = gd_sync_dir(env, root, directory, err);\n'
                 '        }\n',
                 '        (void)directory;\n'),),
        workload='volume-deleted'),
    Mutant(
        'lock-not-the-first-name', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 'return gd_sync_dir(env, root, directory, err);\n'
                 '}\n\nstatic gd_status\nlock_file(',
                 'return GD_OK;\n'
                 '}\n\nstatic gd_status\nlock_file('),),
        workload='volume-deleted'),
    Mutant(
        'lock-not-the-last-name', 'V9', (
            Edit(_VOLUME_DIRECTORY,
                 '        if (i + 1 == sizeof files / sizeof *files) {\n'
                 '            s = gd_sync_dir(env, root, directory, err);\n'
                 '        }\n',
                 ''),),
        workload='volume-deleted'),
    Mutant(
        'cut-part-not-zeroed', 'volumes.rst, "Operations"', (
            Edit(_RESIZE,
                 '    if (end == size) {\n',
                 '    if (end >= size) {\n'),),
        workload='volume-resized'),
    Mutant(
        'checkpoint-amid-a-snapshot', 'volumes.rst, "Operations"', (
            Edit(_CHECKPOINT,
                 '    if (s == GD_OK) {\n'
                 '        gd_volume_copy_head(volume, &head);\n'
                 '        s = gd_edition_snapshot(',
                 '    pthread_mutex_unlock(&volume->checkpointing);\n'
                 '    if (s == GD_OK) {\n'
                 '        gd_volume_copy_head(volume, &head);\n'
                 '        s = gd_edition_snapshot('),
            Edit(_CHECKPOINT,
                 '                                header, err);\n'
                 '    }\n'
                 '    pthread_mutex_unlock(&volume->checkpointing);\n',
                 '                                header, err);\n'
                 '    }\n')),
        tests=_MOMENTS, why_not='another thread must do something meanwhile'),
    Mutant(
        'failed-append-left', 'V3', (
            Edit(_JOURNAL,
                 '    if (journal->reached > journal->end) {\n',
                 '    if (journal->reached > UINT64_MAX - 1) {\n'),),
        tests=c_tests('journal_ahead'), why_not='a write must fail'),
    Mutant(
        'durable-behind-the-sync', 'V3', (
            Edit(_VOLUME_STATE,
                 'journal->durable < end ? end : journal->durable;',
                 'journal->durable < end ? journal->end : end;'),),
        tests=c_tests('state'),
        why_not='another thread must write during a sync'),
    Mutant(
        'end-that-is-not-proven', 'V4', (
            Edit(_RECOVERY,
                 ': last             ? journal->durable',
                 ': last             ? journal->end'),),
        workload='volume'),
    Mutant(
        'chain-without-ends-kept', 'V4', (
            Edit(_RECOVERY,
                 'return reaches[i].end != 0 && (',
                 'return reaches[i].end == 0 || ('),),
        tests=c_tests('recovery'), why_not='it takes an older program'),
    Mutant(
        'lost-records-not-noticed', 'V5', (
            Edit(_JOURNAL,
                 '               : look_behind(scan, err);\n',
                 '               : (void)look_behind, GD_OK;\n'),),
        tests=c_tests('journal'), why_not='a disk must lose what was synced'),
    Mutant(
        'needed-journal-forgotten', 'V8', (
            Edit(_VOLUME_STATE,
                 'head->needed = needed ? active->number : head->journal;',
                 'head->needed = head->journal;'),),
        workload='volume'),
    Mutant(
        'deleting-not-durable', 'V9', (
            Edit(_VOLUME_DELETE,
                 '        return gd_sync_dir(repo->env, repo->root, '
                 'directory, err);\n',
                 '        return GD_OK;\n'),),
        tests=c_tests('volume_faults'),
        why_not='a process must be killed, and then the machine crash'),
    Mutant(
        'recycled-with-the-old-seed', 'V10', (
            Edit(_JOURNAL,
                 '    GD_TRY(gd_random(env, &head->seed, sizeof head->seed, '
                 'err));\n',
                 '    if (head->seed == 0) {\n'
                 '        GD_TRY(gd_random(env, &head->seed, '
                 'sizeof head->seed, err));\n'
                 '    }\n'),),
        workload='volume-recycled'),
    Mutant(
        'recycled-before-it-is-stored', 'V10', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(append_marks(volume, err));\n',
                 '    for (size_t i = 0; i < volume->frozen_count; i++) {\n'
                 '        gd_journal *frozen = volume->frozen[i];\n'
                 '        if (volume->spare == NULL &&\n'
                 '            gd_journal_retire(frozen, volume->name)) {\n'
                 '            frozen->users++;\n'
                 '            volume->spare = frozen;\n'
                 '        }\n'
                 '    }\n'
                 '    GD_TRY(append_marks(volume, err));\n'),),
        workload='volume-recycled'),
    Mutant(
        'recycled-while-it-is-read', 'V10', (
            Edit(_VOLUME_STATE,
                 '!journal->made || journal->users > 1 || volume->spare',
                 '!journal->made || volume->spare'),),
        tests=c_tests('volume_recycling'),
        why_not='another thread must read meanwhile'),
    Mutant(
        'recycled-without-a-sync', 'V10', (
            Edit(_VOLUME_STATE,
                 '        gd_volume_unsynced_bytes(journal) > '
                 'GD_VOLUME_LITTLE ||\n',
                 ''),),
        tests=c_tests('state_unsynced'), why_not='it costs time only'),
    Mutant(
        'head-of-a-recycled-journal-believed', 'V10', (
            Edit('glance_dedup/engine/volume/newest.c',
                 'if (s != GD_NOTFOUND && s != GD_CORRUPT) {',
                 'if (s != GD_NOTFOUND) {'),),
        tests=c_tests('volume_recycling'),
        why_not='another process must read meanwhile'),
    Mutant(
        'one-name-for-all-new-journals', 'V2', (
            Edit('glance_dedup/engine/volume/volumenames.c',
                 '    GD_TRY(gd_random(env, &number, sizeof number, err));\n',
                 '    number = env == NULL && err == NULL;\n'),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
    Mutant(
        'copies-beyond-the-size', 'V4', (
            Edit('glance_dedup/engine/volume/journaltail.c',
                 '    if (record.offset >= c->to->size) {\n',
                 '    if (record.offset >= UINT64_MAX - 1) {\n'),),
        tests=c_tests('journaltail'),
        why_not='no program shrinks a volume so'),
    Mutant(
        'former-owner-stores', 'V6', (
            Edit(_CHECKPOINT,
                 '    GD_TRY(gd_volume_confirm_owner(volume, err));\n'
                 '    gd_edition_hints *hints',
                 '    gd_edition_hints *hints'),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
    Mutant(
        'edition-of-the-next-owner-deleted', 'V6', (
            Edit(_EDITION,
                 '    GD_TRY(owner->confirm(owner->volume, err));\n',
                 '    (void)owner;\n'),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
    Mutant(
        'former-owner-commits', 'V6', (
            Edit(_EDITION,
                 '    GD_TRY(batch->owner.confirm(batch->owner.volume, '
                 'err));\n',
                 ''),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
    Mutant(
        'first-head-without-the-marks', 'V4', (
            Edit(_RECOVERY,
                 'stored && i < volume->made_count; i++) {',
                 'stored && i > volume->made_count; i++) {'),),
        workload='volume-without-room'),
    Mutant(
        'journals-removed-before-the-first-head', 'V4', (
            Edit(_RECOVERY,
                 '    gd_status s = gd_parts_marks(&volume->parts, ',
                 '    if (stored) {\n'
                 '        volume->head.needed = head.journal;\n'
                 '        remove_unneeded(volume);\n'
                 '    }\n'
                 '    gd_status s = gd_parts_marks(&volume->parts, '),),
        workload='volume-without-room'),
    Mutant(
        'former-owner-opens', 'V4', (
            Edit('glance_dedup/engine/volume/open.c',
                 '    bool lost = volume->broken.status != GD_OK && '
                 '!volume->waiting;\n',
                 '    bool lost = false;\n'),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
    Mutant(
        'former-owner-takes-writes', 'V4', (
            Edit(_RECOVERY,
                 'gd_status s = gd_volume_revalidate(volume, made, err);',
                 'gd_status s = err == NULL ? GD_BUSY : GD_OK;'),),
        tests=c_tests('volume_owner'), why_not=_CUT_OFF),
)
