# SPDX-License-Identifier: Apache-2.0

"""Bugs in images that are kept as their disks."""

from tests.crash.mutants.mutant import Edit
from tests.crash.mutants.mutant import Mutant

_MERGE = 'glance_dedup/engine/maintenance/merge.c'
_TRANSACTION = 'glance_dedup/engine/write/transaction.c'
_IMAGE = 'glance_dedup/engine/read/image.c'
_DERIVE = 'glance_dedup/engine/read/derive.c'
_CONVERSION_TESTS = ('tests/unit/repository/test_conversion.py',)
_PARSE = 'glance_dedup/engine/deflate/parse.c'
_DISK_CONVERSION = 'dedupd/tasks/disk_conversion.py'
_CONVERTER_TESTS = 'tests/unit/dedupd/tasks/test_converter.py'
_CONVERTER = 'dedupd/tasks/converter.py'

MUTANTS = (
    Mutant(
        'derived-bytes-not-compared', 'F1', (
            Edit(_DERIVE,
                 'length != extent->length ||\n'
                 '        gd_checksum(deriver->out, length, 0) != '
                 'extent->digest',
                 'length == 0'),),
        tests=_CONVERSION_TESTS,
        why_not='it takes a wrong encoder'),
    Mutant(
        'table-is-lost-by-a-merge', 'F2', (
            Edit(_MERGE,
                 '    GD_TRY(copy_table(merge, err));\n',
                 '    (void)copy_table;\n'),),
        tests=_CONVERSION_TESTS,
        why_not='no crash is needed'),
    Mutant(
        'converted-recipe-not-fsynced', 'F2', (
            Edit(_TRANSACTION,
                 '    GD_TRY(gd_fsync(repo->env, image->spool.fd, '
                 'image->spool.name, err));\n',
                 ''),),
        workload='converting'),
    Mutant(
        'encoder-makes-other-bytes', 'F3', (
            Edit(_PARSE,
                 '             --left != 0);', '             left-- != 0);'),),
        tests=('tests/unit/binding/test_deflate.py::'
               'test_the_encoder_makes_known_bytes',),
        why_not='no crash is needed'),
    Mutant(
        'converted-file-not-compared', 'F4', (
            Edit(_DISK_CONVERSION,
                 'if made.read(_PIECE, at) != content:',
                 'if made.size < 0:'),),
        tests=(f'{_CONVERTER_TESTS}::test_bytes_that_come_out_otherwise',),
        why_not='it takes a wrong encoder'),
    Mutant(
        'disk-that-is-not-proven-is-read', 'F5', (
            Edit(_IMAGE,
                 '(disk->flags & GD_RECIPE_PROVEN) == 0', 'disk->size == 0'),),
        tests=('tests/unit/repository/test_conversion.py::'
               'test_without_the_proof',),
        why_not='no crash is needed'),
    Mutant(
        'pieces-out-of-order-are-taken', 'F6', (
            Edit('glance_dedup/base/confined.py',
                 'piece.offset == mapped', 'piece.offset >= 0'),),
        tests=('tests/unit/base/test_confined.py',),
        why_not='it takes a process that an image has taken over'),
    Mutant(
        'damaged-stream-is-in-the-rest', 'F7', (
            Edit('glance_dedup/base/confined.py',
                 "            raise RefusedError('a compressed cluster of it "
                 "is damaged')\n",
                 '            return room, bytes(least)\n'),),
        tests=(f'{_CONVERTER_TESTS}::test_hostile_files',),
        why_not='no crash is needed'),
    Mutant(
        'block-has-any-number-of-names', 'F8', (
            Edit('glance_dedup/repository/disk_survey.py',
                 'if plain > self._file_size:', 'if plain < 0:'),),
        tests=('tests/unit/repository/test_disk_survey.py::'
               'test_a_block_with_many_names',),
        why_not='no crash is needed'),
    Mutant(
        'waits-are-work', 'F8', (
            Edit(_DISK_CONVERSION,
                 '            yield step\n'
                 '            self._since = time.monotonic()\n',
                 '            yield step\n'),),
        tests=(f'{_CONVERTER_TESTS}::test_waits_do_not_count',),
        why_not='no crash is needed'),
    Mutant(
        'backups-are-converted', 'F1', (
            Edit(_CONVERTER,
                 "and imageids.of_backup(facts['image_id']) is None", ''),
            Edit(_CONVERTER,
                 'if imageids.of_backup(image_id) is not None:',
                 'if not imageids.is_valid(image_id):')),
        tests=(f'{_CONVERTER_TESTS}::test_backups_are_left_alone',),
        why_not='no crash is needed'),
    Mutant(
        'another-upload-gets-the-disk', 'F1', (
            Edit(_DISK_CONVERSION,
                 "if self.header['upload_id'].hex() != self.upload_id:",
                 'if not self.header:'),),
        tests=(f'{_CONVERTER_TESTS}::test_uploaded_again_while_it_begins',),
        why_not='no crash is needed'),
    Mutant(
        'copies-become-ordinary-blocks', 'F9', (
            Edit(_CONVERTER,
                 'if any(block_addresses.has_copies(',
                 'if False and any(block_addresses.has_copies('),),
        tests=(f'{_CONVERTER_TESTS}::test_copies_stay_apart',),
        why_not='no crash is needed'),
    Mutant(
        'verdict-of-another-upload', 'F11', (
            Edit('glance_dedup/repository/format_verdicts.py',
                 "fields['upload_id'] == upload_id", 'upload_id'),),
        tests=(f'{_CONVERTER_TESTS}::test_a_verdict_on_another_upload',),
        why_not='no crash is needed'),
    Mutant(
        'table-without-the-feature', 'F10', (
            Edit(_TRANSACTION,
                 '    GD_TRY(gd_repo_use_feature(transaction->repo, '
                 'GD_FEATURE_DISKS, err));\n',
                 ''),),
        workload='converting'),
)
