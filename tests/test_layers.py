# SPDX-License-Identifier: Apache-2.0

"""Every file has a place, and every place uses only the places it may use.

:data:`ENGINE` lists the C engine's folders. A file includes files of its own
folder and of those above it in the list, and nothing else of ours.
:data:`PACKAGES` is the table of the Python packages, with the imports of each.
The design page describes each place. This counts the lines of code of each
place, without comments, docstrings and blank lines::

    python -m tests.test_layers
"""

import ast
import collections
import functools
import graphlib
import io
import pathlib
import re
import subprocess
import tokenize

import pytest

TOP = pathlib.Path(__file__).resolve().parent.parent
PACKAGE = TOP / 'glance_dedup'
TESTS = TOP / 'tests' / 'c'

#: The folders of ``glance_dedup/engine``. A folder may include itself and
#: those above it.
ENGINE = (
    'base', 'deflate', 'disk', 'format', 'files', 'kv', 'repo', 'read',
    'write', 'volume', 'maintenance', 'exchange')
#: The binding to Python includes itself and all of the engine.
BINDING = 'binding'
#: The plugin for nbdkit does, too; it does without Python.
NBDKIT = 'nbdkit'
#: The program without rights knows the formats of disks, and nothing else.
CONFINED = 'confined'
#: Folders of ``tests/c`` besides those of the engine.
TESTS_ALONE = {'support', 'whole', 'nbdkit'}

#: The packages, and the modules of dedupd that are in none, with the places
#: that each may import besides itself. Only those above it, so no two import
#: each other. A module's full name means that module alone.
PACKAGES = {
    'glance_dedup._engine': '',
    'glance_dedup.base': '',
    'glance_dedup.check':
        'base.access base.closing base.exceptions base.hashes base.leveldb '
        'base.scratch base.sorting',
    'glance_dedup.objects': 'base',
    'glance_dedup.repository': '_engine base objects',
    'glance_dedup.maintenance': '_engine base repository',
    'glance_dedup.metadata_backup':
        '_engine base objects repository maintenance',
    'glance_dedup.client': 'base',
    'glance_dedup.transfer': '_engine base repository client',
    'glance_dedup.adoption': '_engine base repository client',
    'glance_dedup.driver': 'base repository client',
    'glance_dedup.fuse_operations': 'base repository client',
    'glance_dedup.fstest': 'base',
    'glance_dedup.backup': '_engine base repository client',
    'dedupd.options': 'base',
    'dedupd.opts': 'options',
    'dedupd.settings': 'base opts',
    'dedupd.process': 'base',
    'dedupd.http': 'base',
    'dedupd.serve': '_engine base objects repository client transfer http',
    'dedupd.compute': '',
    'dedupd.compute.cache':
        'base repository maintenance client transfer http serve',
    'dedupd.tasks':
        '_engine base objects repository maintenance metadata_backup opts '
        'compute.cache.cache_catalog',
    'dedupd.status': 'repository base _engine maintenance client',
    'dedupd.schedule':
        '_engine base repository tasks maintenance status '
        'compute.cache.cache_catalog process',
    'dedupd.sync': 'base repository client transfer status schedule process',
    'dedupd.endpoints.operations': 'base repository status tasks schedule',
    'dedupd.rpc': 'base tasks endpoints.operations schedule',
    'dedupd.endpoints':
        'tasks endpoints.operations schedule rpc base client http serve '
        'compute.cache status',
    'dedupd.daemon':
        'base repository http serve compute.cache tasks schedule '
        'endpoints.operations sync endpoints opts settings process status',
    'dedupd.compute.novabase':
        'base repository client fuse_operations compute.cache process daemon',
    'dedupd.compute.relay': 'http settings process',
    'glance_dedup.cli':
        '_engine base check objects repository maintenance metadata_backup '
        'client transfer adoption fuse_operations fstest backup '
        'driver.store_opts opts status tasks daemon',
}
#: Modules without a test file of their own, and the files that test them.
TESTED_BY = {
    'glance_dedup.repository.features': 'unit/repository/test_versions.py',
    'dedupd.tasks.tierer': 'functional/test_tierer.py',
    'dedupd.tasks.objectscrub': 'functional/test_cold_maintenance.py',
    'glance_dedup.repository.prefix_owners': 'functional/test_cold.py',
    'glance_dedup.repository.cold_settings': 'functional/test_cold.py',
    'glance_dedup.base.closing':
        'unit/repository/test_image_repository_open.py',
    'glance_dedup.base.exceptions':
        'unit/repository/test_image_repository_open.py',
    'glance_dedup.base.files': 'unit/base/test_access.py',
    'glance_dedup.base.hexids':
        'unit/repository/test_image_repository_images.py',
    'glance_dedup.base.imageids':
        'unit/repository/test_image_repository_images.py',
    'glance_dedup.base.imagelist':
        'unit/dedupd/compute/cache/test_cache_catalog.py',
    'glance_dedup.base.forks': 'unit/repository/test_image_repository_fork.py',
    'glance_dedup.base.leveldb': 'unit/check/test_catalog_check.py',
    'glance_dedup.base.locations': 'unit/driver/test_dedup_store_locations.py',
    'glance_dedup.base.pacing': 'unit/dedupd/tasks/test_collector.py',
    'glance_dedup.backup.diskfiles': 'unit/backup/test_images.py',
    'glance_dedup.backup.exports': 'functional/test_running_servers.py',
    'glance_dedup.backup.backup_job': 'functional/test_batch.py',
    'glance_dedup.backup.libvirt_jobs': 'functional/test_running_servers.py',
    'glance_dedup.backup.mpi_link': 'functional/test_batch_hosts.py',
    'glance_dedup.backup.rank': 'functional/test_batch.py',
    'glance_dedup.backup.rank_exchange': 'functional/test_batch.py',
    'glance_dedup.backup.servers': 'functional/test_running_servers.py',
    'glance_dedup.backup.views': 'unit/backup/test_images.py',
    'glance_dedup.backup.volume_backups': 'functional/test_volume_backups.py',
    'glance_dedup.cli.batch': 'functional/test_batch.py',
    'glance_dedup.cli.glanceoptions': 'unit/cli/test_upgradecheck.py',
    'glance_dedup.adoption.signing': 'functional/test_sign_locations.py',
    'glance_dedup.objects.backend_base': 'functional/test_objects.py',
    'glance_dedup.objects.slicefiles': 'functional/test_cold.py',
    'glance_dedup.objects.slice_cache': 'functional/test_cold.py',
    'glance_dedup.objects.object_store': 'functional/test_objects.py',
    'glance_dedup.metadata_backup.fetching': 'functional/test_restore.py',
    'glance_dedup.metadata_backup.restoring': 'functional/test_restore.py',
    'dedupd.tasks.metadata_backups': 'functional/test_metadata_backups.py',
    'dedupd.tasks.objectscrub': 'functional/test_cold_maintenance.py',
    'dedupd.tasks.tierer': 'functional/test_tierer.py',
    'dedupd.tasks.sweeper': 'functional/test_metadata_backups.py',
    'glance_dedup.repository.cold_settings': 'functional/test_cold.py',
    'glance_dedup.repository.prefix_owners': 'functional/test_cold.py',
    'glance_dedup.check.catalog_copy': 'unit/check/test_catalog_check.py',
    'glance_dedup.check.cold_group': 'unit/check/test_cold.py',
    'glance_dedup.check.repo_directories': 'unit/check/test_checker_notes.py',
    'glance_dedup.check.fence': 'unit/check/test_catalog_check.py',
    'glance_dedup.check.files': 'unit/check/test_checker_in_use.py',
    'glance_dedup.check.helpers': 'unit/maintenance/test_host_notes.py',
    'glance_dedup.check.ondisk': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.group_reader': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.group_check': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.hashes': 'unit/check/test_checker_notes.py',
    'glance_dedup.check.json_objects': 'unit/check/test_checker_structures.py',
    'glance_dedup.check.lists': 'unit/check/test_checker_structures.py',
    'glance_dedup.check.locks': 'unit/check/test_checker_in_use.py',
    'glance_dedup.check.parameters': 'unit/check/test_checker_parameters.py',
    'glance_dedup.base.sorting': 'unit/check/test_exact_index.py',
    'glance_dedup.check.recipe_reader': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.recipe_table': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.check_report': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.space': 'unit/check/test_checker_notes.py',
    'glance_dedup.check.spare_files': 'unit/check/test_checker_damage.py',
    'glance_dedup.check.spool': 'unit/check/test_checker_in_use.py',
    'glance_dedup.check.volume_reader': 'unit/check/test_volume_check.py',
    'glance_dedup.repository.hostfilter':
        'unit/repository/test_image_repository_filter.py',
    'glance_dedup.repository.layout':
        'unit/repository/test_image_repository_open.py',
    'glance_dedup.repository.openimages':
        'unit/repository/test_image_repository_images.py',
    'glance_dedup.repository.repo_parameters': 'unit/binding/test_gear.py',
    'glance_dedup.maintenance.refcounts':
        'unit/maintenance/test_catalog_db.py',
    'glance_dedup.maintenance.comparison':
        'unit/dedupd/tasks/test_collector_partitions.py',
    'glance_dedup.maintenance.rebuild_worker':
        'unit/maintenance/test_refcount_rebuild.py',
    'glance_dedup.maintenance.database': 'unit/maintenance/test_catalog_db.py',
    'glance_dedup.maintenance.catalog_fence':
        'unit/maintenance/test_maintainer_role.py',
    'glance_dedup.maintenance.recipes':
        'unit/maintenance/test_maintainer_role.py',
    'glance_dedup.maintenance.unreadable_recipes':
        'unit/maintenance/test_maintainer_role.py',
    'glance_dedup.maintenance.records': 'unit/maintenance/test_catalog_db.py',
    'glance_dedup.maintenance.reserve':
        'unit/maintenance/test_maintainer_role.py',
    'glance_dedup.client.channels': 'unit/client/test_daemon_client.py',
    'glance_dedup.client.daemon_connection':
        'unit/client/test_daemon_client.py',
    'glance_dedup.client.client_errors': 'unit/client/test_daemon_client.py',
    'glance_dedup.client.replica_upload':
        'unit/transfer/test_image_sending.py',
    'glance_dedup.client.slice_client': 'functional/test_cold_daemon.py',
    'glance_dedup.client.streams': 'unit/client/test_daemon_client.py',
    'glance_dedup.client.glance_api': 'functional/test_sites.py',
    'glance_dedup.client.nbd_protocol': 'unit/client/test_nbd_client.py',
    'glance_dedup.transfer.image_description': 'unit/transfer/test_pull.py',
    'glance_dedup.transfer.site_replication': 'functional/test_sites.py',
    'glance_dedup.transfer.source_peer': (
        'unit/dedupd/compute/cache/test_arrival_list.py'),
    'glance_dedup.adoption.filestore': 'unit/adoption/test_estimate.py',
    'glance_dedup.adoption.importing': 'functional/test_adoption.py',
    'glance_dedup.adoption.registering': 'functional/test_register.py',
    'glance_dedup.cli.common': 'unit/cli/test_entry.py',
    'glance_dedup.cli.help': 'unit/cli/test_entry.py',
    'glance_dedup.cli.command': 'unit/cli/test_host_settings.py',
    'glance_dedup.cli.upgrade_check': 'unit/cli/test_upgradecheck.py',
    'glance_dedup.cli.glance_access': 'unit/cli/test_adoption.py',
    'glance_dedup.cli.image_facts': 'unit/cli/test_image_commands.py',
    'glance_dedup.cli.mount': 'functional/test_mount.py',
    'glance_dedup.cli.replication': 'functional/test_sites.py',
    'glance_dedup.cli.sharing': 'functional/test_trial.py',
    'glance_dedup.cli.usage_commands': 'unit/cli/test_maintenance.py',
    'dedupd.tasks.disk_conversion': 'unit/dedupd/tasks/test_converter.py',
    'glance_dedup.repository.format_verdicts':
        'unit/dedupd/tasks/test_converter.py',
    'glance_dedup.cli.diff_command': 'unit/cli/test_volume_commands.py',
    'glance_dedup.cli.volumeserve': 'functional/test_volume_nbd.py',
    'glance_dedup.client.volume_control': 'functional/test_volume_control.py',
    'glance_dedup.fuse_operations': 'functional/test_mount.py',
    'glance_dedup.fstest.files': 'functional/test_trial.py',
    'glance_dedup.fstest.property_findings': 'functional/test_trial.py',
    'glance_dedup.fstest.host_mailbox': 'functional/test_trial.py',
    'glance_dedup.fstest.properties': 'functional/test_trial.py',
    'glance_dedup.fstest.trial': 'functional/test_trial.py',
    'dedupd.status.page': 'functional/test_dedupd_page.py',
    'dedupd.http.body_memory': 'unit/dedupd/http/test_http_server.py',
    'dedupd.http.tls_context': 'functional/test_dedupd_http.py',
    'dedupd.http.http_connection': 'unit/dedupd/http/test_http_server.py',
    'dedupd.http.glance': 'functional/test_cache_proxy.py',
    'dedupd.http.listeners': 'unit/base/test_access.py',
    'dedupd.http.passing': 'functional/test_cache_relay.py',
    'dedupd.http.messages': 'unit/dedupd/serve/test_image_handlers.py',
    'dedupd.http.routing': 'unit/dedupd/http/test_http_server.py',
    'dedupd.http.streams': 'functional/test_floods.py',
    'dedupd.http.glance_tokens': 'unit/dedupd/serve/test_image_handlers.py',
    'dedupd.http.upstream_client': 'functional/test_cache_relay.py',
    'dedupd.serve.image_source':
        'unit/dedupd/compute/cache/test_arrival_list.py',
    'dedupd.serve.slice_fetching': 'functional/test_cold_daemon.py',
    'dedupd.compute.cache.image_pull':
        'unit/dedupd/compute/cache/test_arrival_list.py',
    'dedupd.compute.cache.lot_pieces':
        'unit/dedupd/compute/cache/test_arrival_list.py',
    'dedupd.compute.cache.cache_service': 'functional/test_cache_proxy.py',
    'dedupd.compute.relay.main': 'functional/test_relay.py',
    'dedupd.process.systemd': 'functional/test_relay.py',
    'dedupd.compute.novabase.link_sync': 'functional/test_nova_base.py',
    'dedupd.compute.novabase.main': 'functional/test_nova_base.py',
    'dedupd.compute.novabase.mounting': 'functional/test_nova_base.py',
    'dedupd.compute.novabase.file_attributes': 'functional/test_nova_base.py',
    'dedupd.tasks.damaged_blocks': 'unit/dedupd/tasks/test_scrubber.py',
    'dedupd.schedule.task_records':
        'unit/dedupd/schedule/test_task_scheduler.py',
    **{f'dedupd.options.{name}': 'unit/dedupd/test_opts.py' for name in (
        'cache_options', 'index_options', 'kinds', 'replication_options',
        'serving_options', 'task_options')},
    'dedupd.tasks.run_partitions': 'unit/dedupd/tasks/test_project_usage.py',
    'dedupd.tasks.findings': 'unit/dedupd/tasks/test_helping.py',
    'dedupd.tasks.sharescrub': 'unit/dedupd/tasks/test_helping.py',
    'glance_dedup.maintenance.helper_daemon':
        'unit/dedupd/tasks/test_helping.py',
    'dedupd.tasks.spare_copies': 'unit/dedupd/tasks/test_scrubber.py',
    'dedupd.endpoints.operations': 'unit/dedupd/status/test_metrics.py',
    'dedupd.endpoints.messaging': 'functional/test_dedupd_rpc.py',
    'dedupd.rpc.notifications': 'functional/test_dedupd_rpc.py',
    'dedupd.daemon': 'functional/test_dedupd_process.py',
    'glance_dedup.repository.cold_settings': 'functional/test_cold.py',
    'glance_dedup.repository.prefix_owners': 'functional/test_cold.py',
    'dedupd.tasks.tierer': 'functional/test_tierer.py',
}

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">\n]*)[">]',
                      re.MULTILINE)


def place_of(path):
    """Return the engine's folder, or the binding; None: it has no place.

    :param path: of a C file, from ``glance_dedup``
    """
    match path.split('/'):
        case ['engine', folder, _] if folder in ENGINE:
            return folder
        case ['binding' | 'nbdkit' | 'confined' as folder, _]:
            return folder
    return None


def may_include(folder):
    if folder in (BINDING, NBDKIT):
        return {folder, *ENGINE}
    if folder == CONFINED:
        return {folder, 'base', 'disk'}
    order = list(ENGINE)
    return set(order[:order.index(folder) + 1])


def wrong_includes(path, text, paths):
    """Yield a sentence for each wrong include of a file."""
    allowed = may_include(place_of(path))
    for quote, name in _INCLUDE.findall(text):
        ours = name in paths
        if quote == '<' and not ours:
            if name == 'Python.h' and place_of(path) != BINDING:
                yield f'{path} includes Python.h, which the binding alone may'
        elif quote == '<' or not ours:
            yield (f'{path} includes {name}: write "engine/FOLDER/FILE.h", '
                   'in double quotes')
        elif place_of(name) not in allowed:
            yield (f'{path} includes {name}, but {place_of(path)} may include '
                   f'only {", ".join(sorted(allowed))}')


def complaints(files):
    """Return all errors of the C files of ``glance_dedup``.

    :param files: the text of each by its path from ``glance_dedup``
    """
    found = []
    for path, text in sorted(files.items()):
        if place_of(path) is None:
            found.append(f'{path} has no place: see ENGINE in test_layers.py')
        else:
            found.extend(wrong_includes(path, text, files))
    return found


def c_files(top):
    return {str(path.relative_to(top)): path.read_text()
            for path in sorted(top.rglob('*.[ch]'))}


def test_engine():
    files = c_files(PACKAGE)
    assert not (found := complaints(files)), '\n'.join(found)
    assert {place_of(path) for path in files} == {
        *ENGINE, BINDING, NBDKIT, CONFINED}


#: Calls of backends.
KEY_VALUE = {(f'engine/kv/{backend}.c', 'engine/kv/kv.c')
             for backend in ('dtb', 'inram', 'leveldb', 'lmdb')}


def calls(files):
    """Return the engine's C files whose functions each C file names.

    A store of keys opens its backends, which call its helpers: these calls of
    theirs are left out.
    """
    texts = {path: re.sub(r'/\*.*?\*/', '', text, flags=re.DOTALL)
             for path, text in files.items()
             if path.startswith('engine/') and path.endswith('.c')}
    makers = {name: path for path, text in texts.items()
              for name in re.findall(r'^(gd_\w+)\(', text, re.MULTILINE)}
    return {path: {makers[name] for name in re.findall(r'\bgd_\w+', text)
                   if makers.get(name, path) != path
                   and (path, makers[name]) not in KEY_VALUE}
            for path, text in texts.items()}


def test_engine_has_no_circle():
    """Files of one folder may call each other, but in one direction."""
    graphlib.TopologicalSorter(calls(c_files(PACKAGE))).prepare()


def test_circle_is_found():
    files = {'engine/base/a.c': 'void\ngd_a(void)\n{\n    gd_b();\n}\n',
             'engine/base/b.c': 'void\ngd_b(void)\n{\n    gd_a();\n}\n'}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(calls(files)).prepare()


def prefixes(path, text):
    """Return the prefixes of the functions that a header declares.

    After ``gd_``, a name begins with the file's name, with that of a type
    that the header defines, or with that of a folder whose files are all parts
    of one thing. Underscores do not count, since files go without most.
    """
    pure = pathlib.PurePath(path)
    types = re.findall(r'typedef (?:struct|union|enum) gd_(\w+)', text)
    types += re.findall(r'^\} gd_(\w+);', text, re.MULTILINE)
    return {name.replace('_', '') for name in [
        pure.stem, pure.parent.name, *types] if name != 'status'}


def stray_functions(path, text):
    """Return a header's functions that have another file's prefix."""
    text = re.sub(r'/\*.*?\*/', '', text, flags=re.DOTALL)
    text = re.sub(r'^[ \t]*#(?:.*\\\n)*.*$', '', text, flags=re.MULTILINE)
    text = re.sub(r'typedef[^;{]*\([^;]*;', '', text)
    for name in dict.fromkeys(re.findall(
            r'^(?:\w[\w *]*[ *\n])(gd_\w+)\((?!\*)', text, re.MULTILINE)):
        plain = name.removeprefix('gd_').replace('_', '')
        if not plain.startswith(tuple(prefixes(path, text))):
            yield name


#: The folder of functions that the language itself could have: ``gd_fail``,
#: ``gd_put32``, ``gd_read_full``.
_LIKE_THE_LANGUAGE = 'engine/base/'


def test_functions_begin_with_their_files_prefix():
    wrong = [f'{path}: {name}' for path, text in c_files(PACKAGE).items()
             if path.endswith('.h') and not path.startswith(
                 _LIKE_THE_LANGUAGE)
             and place_of(path) != BINDING
             for name in stray_functions(path, text)]
    assert not wrong, '\n'.join(wrong)


@pytest.mark.parametrize('path, text, wrong', [
    ('engine/files/spool.h', 'int gd_spool_open(int fd);\n', []),
    ('engine/files/spool.h', 'int gd_open(int fd);\n', ['gd_open']),
    ('engine/files/spool.h', 'gd_status gd_image_lock(\n    int fd);\n',
     ['gd_image_lock']),
    ('engine/files/spool.h',
     'typedef struct gd_lot {\n    int n;\n} gd_lot;\n'
     'void gd_lot_close(gd_lot *lot);\n', []),
    ('engine/files/leasedgroup.h', 'void gd_leased_group_close(int fd);\n',
     []),
    ('engine/volume/state.h', 'void gd_volume_sync(int fd);\n', []),
])
def test_prefixes(path, text, wrong):
    assert list(stray_functions(path, text)) == wrong


GOOD = {
    'engine/base/env.h': '#include <stdint.h>\n',
    'engine/base/pool.h': '#include "engine/base/env.h"\n',
    'engine/files/spool.c': '#include "engine/base/pool.h"\n',
    'nbdkit/plugin.c': '#include <nbdkit-plugin.h>\n'
                       '#include "engine/files/spool.c"\n',
    'binding/module.c': '#include <Python.h>\n'
                        '#include "engine/files/spool.c"\n',
}


def test_engine_that_keeps_the_order():
    assert complaints(GOOD) == []


@pytest.mark.parametrize('path, text, words', [
    ('engine/base/pool.h', '#include "engine/files/spool.c"\n',
     'base may include only base'),
    ('engine/base/pool.h', '#ifdef X\n # include "binding/module.c"\n#endif\n',
     'base may include only base'),
    ('nbdkit/plugin.c', '#include "binding/module.c"\n',
     'nbdkit may include only base'),
    ('nbdkit/plugin.c', '#include <Python.h>\n', 'the binding alone'),
    ('engine/files/spool.c', '#include "env.h"\n', 'write "engine/'),
    ('engine/files/spool.c', '#include "../base/env.h"\n', 'write "engine/'),
    ('engine/files/spool.c', '#include <engine/base/env.h>\n',
     'write "engine/'),
    ('engine/files/spool.c', '#include "engine/base/gone.h"\n',
     'write "engine/'),
    ('engine/files/spool.c', '#include <Python.h>\n', 'the binding alone'),
    ('engine/loose.c', '', 'has no place'),
    ('engine/other/loose.c', '', 'has no place'),
    ('engine/base/deep/loose.c', '', 'has no place'),
    ('loose.h', '', 'has no place'),
])
def test_engine_that_does_not(path, text, words):
    found = complaints({**GOOD, path: text})
    assert len(found) == 1 and found[0].startswith(path), found
    assert words in found[0]


def test_includes_of_others():
    """Tests and benchmarks name their headers in the same way."""
    roots = (PACKAGE, TOP)
    wrong = [f'{path.relative_to(TOP)} includes "{name}"'
             for directory in ('tests', 'benchmarks')
             for path in sorted((TOP / directory).rglob('*.[ch]'))
             for quote, name in _INCLUDE.findall(path.read_text())
             if quote == '"' and not any(
                 (root / name).is_file() and '..' not in name
                 for root in roots)]
    assert not wrong, '\n'.join(wrong)


def concepts():
    """Return the engine's files without their ending, by folder."""
    found = {folder: set() for folder in ENGINE}
    for path in c_files(PACKAGE):
        folder = place_of(path)
        if folder in ENGINE:
            found[folder].add(pathlib.PurePath(path).stem)
    return found


def test_tests_mirror_the_engine():
    """The engine's file has ``tests/c/FOLDER/test_FILE.c`` or the like.

    A longer name is ``test_FILE_more.c``.
    """
    lost = []
    for path in sorted(TESTS.rglob('*.[ch]')):
        folder = path.parent.name
        if path.parent.parent != TESTS or (
                folder not in TESTS_ALONE and not any(
                    re.fullmatch(rf'test_{concept}(_\w+)?', path.stem)
                    for concept in concepts().get(folder, ()))):
            lost.append(str(path.relative_to(TOP)))
    assert not lost, f'no file of the engine belongs to {", ".join(lost)}'


# -- Python -------------------------------------------------------------------

def package_of(module):
    """Return the row of :data:`PACKAGES` of a module, or None."""
    parts = module.split('.')
    for length in (3, 2):
        if '.'.join(parts[:length]) in PACKAGES:
            return '.'.join(parts[:length])
    return None


def may_import(package):
    """Return full names of packages, and of modules with their own row."""
    found = set()
    for name in PACKAGES[package].split():
        top = name.partition('.')[0]
        found |= {f'{root}.{name}' for root in ('glance_dedup', 'dedupd')
                  if f'{root}.{top}' in PACKAGES}
    return found


def imports_of(module, text):
    """Yield a module's imports of ours, also within functions."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f'{module} imports relatively'
            names = [f'{node.module}.{alias.name}' for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names
                    if name.split('.')[0] in ('glance_dedup', 'dedupd'))


def wrong_imports(files):
    """Yield a sentence for each wrong import of the modules.

    :param files: the text of each module by its full name
    """
    for module, text in sorted(files.items()):
        package = package_of(module)
        if package is None:
            yield f'{module} has no place: see PACKAGES in test_layers.py'
            continue
        allowed = may_import(package)
        for name in imports_of(module, text):
            target = package_of(name)
            if target != package and target not in allowed and not any(
                    name == one or name.startswith(one + '.')
                    for one in allowed if one not in PACKAGES):
                yield (f'{module} imports {name}, but {package} may import '
                       f'only {", ".join(sorted(allowed)) or "nothing"}')


@functools.cache
def modules():
    """Yield the text of each module of ours; of packages, unless empty."""
    found = {}
    for root in ('glance_dedup', 'dedupd'):
        for path in sorted((TOP / root).rglob('*.py')):
            name = '.'.join(path.relative_to(TOP).with_suffix('').parts)
            name = name.removesuffix('.__init__')
            if name != root:
                found[name] = path.read_text()
    return found


def test_packages():
    found = list(wrong_imports(modules()))
    assert not found, '\n'.join(found)


def test_packages_are_in_order():
    """Each package imports only those above it, so there is no cycle."""
    order = list(PACKAGES)
    for number, package in enumerate(order):
        above = {*order[:number], package}
        wrong = [name for name in may_import(package)
                 if package_of(name) not in above]
        assert not wrong, (package, wrong)


@pytest.mark.parametrize('module, text, words', [
    ('glance_dedup.base.x',
     'from glance_dedup.repository import image_repository',
     'may import only nothing'),
    ('glance_dedup.base.x', 'def f():\n    from dedupd import daemon',
     'imports dedupd.daemon'),
    ('glance_dedup.check.x', 'from glance_dedup.base import imagelist',
     'imports glance_dedup.base.imagelist'),
    ('dedupd.tasks.x', 'from dedupd.compute.cache import glance_proxy',
     'imports dedupd.compute.cache.glance_proxy'),
    ('dedupd.tasks.x', 'import dedupd.compute.cache.glance_proxy',
     'dedupd.compute.cache.glance_proxy'),
    ('glance_dedup.driver.x', 'from dedupd import opts', 'dedupd.opts'),
    ('glance_dedup.loose', '', 'has no place'),
    ('dedupd.loose', '', 'has no place'),
])
def test_packages_that_do_not_keep_the_order(module, text, words):
    found, = wrong_imports({module: text})
    assert found.startswith(module) and words in found


@pytest.mark.parametrize('module, text', [
    ('glance_dedup.check.x', 'from glance_dedup.base import exceptions'),
    ('dedupd.tasks.x', 'from dedupd.compute.cache import cache_catalog'),
    ('dedupd.tasks.x', 'from dedupd.tasks import collector'),
    ('glance_dedup.cli.x', 'def f():\n    from dedupd.tasks import scrubber'),
    ('dedupd.compute.cache', 'import json'),
])
def test_packages_that_keep_the_order(module, text):
    assert not list(wrong_imports({module: text}))


def whose(stem, module, siblings):
    """Return whether a file of tests is a module's, and not a sibling's."""
    return stem == f'test_{module}' or (
        stem.startswith(f'test_{module}_') and not any(
            len(other) > len(module) and stem.startswith(f'test_{other}')
            for other in siblings))


def test_tests_mirror_the_packages():
    """Each module has a test file of its name, or one that is named here."""
    unit = TOP / 'tests' / 'unit'
    siblings: dict = {}
    for module in modules():
        siblings.setdefault(package_of(module), set()).add(
            module.rpartition('.')[2])
    for module in modules():
        parts = module.removeprefix('glance_dedup.').split('.')
        if module in PACKAGES and (TOP / module.replace('.', '/')).is_dir():
            continue
        files = unit.joinpath(*parts[:-1]).glob(f'test_{parts[-1]}*.py')
        own = [path for path in files if whose(
            path.stem, parts[-1], siblings[package_of(module)])]
        named = TESTED_BY.get(module)
        assert own or named, f'{module} has no test'
        assert not (own and named), f'{module} has a test of its own'
        assert own or (TOP / 'tests' / named).is_file(), named
    assert not set(TESTED_BY) - set(modules())


# -- lines of code ------------------------------------------------------------

def python_lines(text):
    """Return the number of lines that have code."""
    words = {
        line for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, node.end_lineno + 1)}
    code = {
        line for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.string.strip() and token.type != tokenize.COMMENT
        for line in range(token.start[0], token.end[0] + 1)}
    return len(code - words)


def c_lines(text):
    text = re.sub(r'/\*.*?\*/|//[^\n]*', '', text, flags=re.DOTALL)
    return sum(map(bool, map(str.strip, text.split('\n'))))


def other_lines(text):
    return sum(not line.lstrip().startswith('#')
               for line in text.split('\n') if line.strip())


COUNTERS = {'.py': python_lines, '.c': c_lines, '.h': c_lines} | dict.fromkeys(
    ('.js', '.css', '.html', '.sh', '.pyi'), other_lines)


def lines_by_folder():
    """Return the lines of code of each folder that git tracks."""
    found = collections.Counter()
    for name in subprocess.run(
            ['git', 'ls-files'], cwd=TOP, check=True, capture_output=True,
            text=True, timeout=60).stdout.splitlines():
        path = TOP / name
        script = not path.suffix and path.is_file() and (
            path.read_bytes()[:2] == b'#!')
        if count := COUNTERS.get(path.suffix, other_lines if script else None):
            parts = path.relative_to(TOP).parts[:-1]
            depth = {'tests': 1, 'benchmarks': 1}.get(
                name.partition('/')[0], 3 if 'engine' in parts else 2)
            found['/'.join(parts[:depth]) or '.'] += count(path.read_text())
    return found


@pytest.mark.parametrize('count, text, lines', [
    (python_lines, '"""Doc."""\n\n# no\nx = """a\nb"""  # no\n', 2),
    (python_lines, 'def f():\n    """Doc,\n    of two."""\n    return 1\n', 2),
    (c_lines, '/* no\n * no */\nint x; /* no */\n\n// no\nint y;\n', 2),
    (other_lines, '#!/bin/sh\n# no\n\n  true\n', 1),
])
def test_lines_of_code(count, text, lines):
    assert count(text) == lines


def main():
    """Print the lines of each folder, and of the product and the tests."""
    found = lines_by_folder()
    for folder, lines in found.most_common():
        print(f'{lines:8,} {folder}')
    for what, tops in (('product', ('glance_dedup', 'dedupd', 'devstack')),
                       ('tests', ('tests',))):
        lines = sum(count for folder, count in found.items()
                    if folder.partition('/')[0] in tops)
        print(f'{lines:8,} {what}')


if __name__ == '__main__':
    main()
