# SPDX-License-Identifier: Apache-2.0

"""Bugs in features, and in copies that are meant as copies."""

from tests.crash.mutants.mutant import c_tests
from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_PACKER = 'glance_dedup/engine/write/packer.c'
_REWRITE = 'glance_dedup/engine/maintenance/grouprewrite.c'
_FEATURES = 'glance_dedup/engine/files/features.c'
_REPO = 'glance_dedup/engine/repo/repo.c'
_DAMAGED_BLOCKS = 'dedupd/tasks/damaged_blocks.py'


MUTANTS = (
    # -- features (N15) ---------------------------------------------------
    Mutant(
        'volumes-without-the-feature', 'N15.1', (
            Edit('glance_dedup/engine/volume/create.c',
                 's = gd_repo_use_feature(repo, GD_FEATURE_VOLUMES, err);',
                 's = GD_OK;'),),
        workload='volume'),
    Mutant(
        'lists-without-the-feature', 'N15.1', (
            Edit(_REWRITE,
                 'if (cold || (packing != NULL && packing->similar)) {',
                 'if (cold && (packing == NULL || packing->similar)) {'),),
        workload='ordering'),
    Mutant(
        'cold-group-without-the-feature', 'N15.1', (
            Edit(_REWRITE,
                 '? gd_repo_use_feature(repo, GD_FEATURE_COLD, err)',
                 '? GD_OK'),),
        tests=c_tests('grouprewrite_cold'),
        why_not='it was set when the repository was attached'),
    Mutant(
        'mark-without-the-feature', 'N15.1', (
            Edit(_PACKER,
                 's = gd_repo_try_feature(packer->repo, GD_FEATURE_NODEDUP,\n'
                 '                                packer->has_waited ? 0 : '
                 'MARK_WAIT_MS, err);',
                 's = err == NULL ? GD_IO : GD_OK;'),),
        workload='nodedup'),
    Mutant(
        'features-not-fsynced', 'N15.1', (
            Edit(_FEATURES,
                 's = gd_sync_dir(env, root, GD_DIR_FEATURES, err);',
                 's = GD_OK;'),),
        workload='ordering'),
    Mutant(
        'feature-of-another-not-fsynced', 'N15.1', (
            Edit(_FEATURES,
                 'if (s == GD_OK) {\n        s = gd_sync_dir',
                 'if (s == GD_OK && is_new) {\n        s = gd_sync_dir'),),
        workload='first-volume'),
    Mutant(
        'feature-beside-older-programs', 'N15.2', (
            Edit(_FEATURES,
                 's = exclude_others(env, root, locks, feature, '
                 'timeout_ms, &is_new, err);',
                 '(void)exclude_others, (void)timeout_ms, is_new = true;'),),
        tests=c_tests('features'),
        why_not='it takes an older program'),
    Mutant(
        'features-read-before-the-lock', 'N15.3', (
            Edit(_REPO,
                 '    gd_status s = '
                 'gd_locks_lock_features_shared(repo->locks, '
                 'GD_FEATURE_COUNT,\n'
                 '                                                err);\n',
                 '    GD_TRY(gd_features_require_known(repo->env, repo->root, '
                 'err));\n'
                 '    gd_status s = '
                 'gd_locks_lock_features_shared(repo->locks, '
                 'GD_FEATURE_COUNT, err);\n'),
            Edit(_REPO,
                 '    return s == GD_OK ? '
                 'gd_features_require_known(repo->env, repo->root, err)\n'
                 '                      : s;\n',
                 '    return s;\n')),
        tests=c_tests('features'),
        why_not='it takes a newer program'),
    # -- copies that are meant as copies (I14) ----------------------------
    Mutant(
        'index-has-marked-blocks', 'I14', (
            Edit('glance_dedup/engine/format/index.c',
                 'entry[GD_LISTED_NODEDUP] == 0) {',
                 'entry[GD_LISTED_NODEDUP] <= 1) {'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'mark-is-lost-by-a-move', 'I14', (
            Edit('glance_dedup/engine/maintenance/blockcopy.c',
                 '? entry.nodedup',
                 '? false'),),
        workload='nodedup'),
    Mutant(
        'mark-is-lost-by-a-rewrite', 'I14', (
            Edit(_REWRITE,
                 '    entry->plain_offset = at;\n'
                 '    memcpy(',
                 '    entry->plain_offset = at;\n'
                 '    entry->nodedup = false;\n'
                 '    memcpy('),),
        workload='nodedup'),
    Mutant(
        'mark-is-lost-by-a-copy', 'I14', (
            Edit('glance_dedup/engine/write/addruns.c',
                 'p->nodedup ? GD_DEDUP_OFF : GD_DEDUP_ALL',
                 'GD_DEDUP_ALL'),),
        tests=c_tests('addruns'),
        why_not='no crash is needed'),
    Mutant(
        'copies-stored-in-one-segment', 'I14', (
            Edit(_PACKER,
                 'fits = !gd_entry_is_copy(',
                 'fits = fits || gd_entry_is_copy('),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'copies-rewritten-into-one-segment', 'I14', (
            Edit(_REWRITE,
                 'has_copy(r, one, slots[one->count])) {',
                 '(has_copy(r, one, slots[one->count]) && false)) {'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
    Mutant(
        'healed-block-is-merged-to-the-copy', 'I14', (
            Edit(_DAMAGED_BLOCKS,
                 'apart = {address: mapping.pop(address) '
                 'for address in [*mapping]\n',
                 'apart = {address: mapping.pop(address) for address in []\n'),
        ),
        workload='nodedup-healed'),
    Mutant(
        'unknown-mark-is-lost', 'I14', (
            Edit(_DAMAGED_BLOCKS,
                 'return features.NODEDUP in '
                 'self._maintainer.repository.features',
                 'return features.NODEDUP is None'),),
        tests=('tests/damage/test_damage.py', '-k', 'healing_copies'),
        why_not='a crash damages no entry'),
    Mutant(
        'copy-is-found-at-its-address', 'I14', (
            Edit('glance_dedup/engine/write/lookup.c',
                 'gd_entry_is_shareable(entry)',
                 'entry->state == GD_ENTRY_LIVE'),),
        tests=('tests/unit/dedupd/tasks/test_nodedup.py',),
        why_not='no crash is needed'),
)
