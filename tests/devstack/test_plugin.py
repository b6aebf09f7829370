# SPDX-License-Identifier: Apache-2.0
"""The DevStack plugin runs in every phase, in roots of its own.

Unless stated otherwise the user is stack. Packages are not fetched, no request
goes to Keystone, and Apache does not run before Glance; all else is real: pip
builds and installs the package, Glance runs under uWSGI, dedupd as a service,
and RabbitMQ if a test uses it.
"""

import importlib.util
import json
import pathlib
import subprocess
import sys
import textwrap
import time

from oslo_config import cfg
import pytest

from tests.devstack import roots
from tests.support import repositories

# Long: the first test waits for pip, which builds and installs the package;
# each other one runs stack.sh, which starts Glance and the daemons.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(1200),
    pytest.mark.needs('rabbitmq', 'shellcheck', 'sudo')]

DATADIR = '/opt/stack/data/dedup'
GLANCE_API_CONF = '/etc/glance/glance-api.conf'
DEDUPD_CONF = '/etc/dedupd/dedupd.conf'
UNIT = '/etc/systemd/system/devstack@dedupd.service'
DEDUPD = f'{roots.VENV}/bin/dedupd '
RELAY = f'{roots.VENV}/bin/dedupd-relay '
OFFLINE = 'OFFLINE=True\n'
FILTERS = '/dev/shm/glance-dedup-stack'
#: Directories of DevStack and its plugins, except for logs.
PLACES = ('/etc', '/usr/local', '/run', '/dev/shm', roots.STACK / 'data')

# Parse as glance-api does.
PARSE = """
import json, sys
from oslo_config import cfg
import glance_store
from glance.common import config
conf = cfg.CONF
conf([], default_config_files=[sys.argv[1]])
glance_store.register_store_opts(
    conf, reserved_stores={'os_glance_staging_store': 'file',
                           'os_glance_tasks_store': 'file'})
json.dump({'backends': conf.enabled_backends,
           'default': conf.glance_store.default_backend,
           **{group: dict(conf[group]) for group in (
               *conf.enabled_backends, 'os_glance_staging_store',
               'os_glance_tasks_store')}}, sys.stdout)
"""

# Glance's address is the argument; every piece is one chunk.
IMAGES = """
import json, random, sys
from tests.functional import glance_server
client = glance_server.Client(sys.argv[1])
pieces = [random.Random(number).randbytes(2 << 20) for number in range(3)]
stored = {}
for store in json.loads(sys.argv[2]):
    image = client.create(name='three pieces')
    client.upload(image['id'], iter(pieces), store=store)
    assert client.download(image['id']) == b''.join(pieces), image
    image = client.show(image['id'])
    stored[image['stores']] = image['id']
print(json.dumps(stored))
"""


def glance_conf(root):
    return json.loads(root.run(
        'sh', '-c', '"$0" -W ignore -c "$1" "$2" 2>/dev/null',
        roots.VENV / 'bin/python', PARSE, GLANCE_API_CONF, user='stack'))


def glance_url(root):
    for line in root.read('/etc/glance/glance-uwsgi.ini').splitlines():
        if line.startswith('http-socket'):
            return 'http://' + line.partition('=')[2].strip()


def store_images(root, *stores):
    """Upload to stores (None: the default), download; return ids by store."""
    return json.loads(root.run(
        sys.executable, '-c', IMAGES, glance_url(root), json.dumps(stores),
        directory=roots.TOP))


def images(root):
    """Return the ids in the repository, by the operator's command."""
    return root.run('glance-dedup', '--repository', DATADIR, 'image', 'list',
                    '-f', 'value', '-c', 'image_id', user='stack').split()


def processes(root, program):
    """Return ids and users of the processes that run a program."""
    return [line.split()[:2] for line in root.run(
        'ps', '-eww', '-o', 'pid=,user=,args=').splitlines()
        if str(program) in line]


def status(root):
    return json.loads(root.run(
        'curl', '-sf', 'http://127.0.0.1:9394/v1/status'))


def task(root, name):
    return json.loads(root.run(
        'curl', '-sf', '--unix-socket', '/run/dedupd/dedupd.sock',
        f'http://dedupd/v1/tasks/{name}'))


def refused(root, last='pre-install'):
    """Require that stack.sh fails in a phase; return its last words."""
    with pytest.raises(roots.Failed) as caught:
        root.stack(last)
    assert f'=== {last}' in caught.value.output
    return caught.value.output.strip().splitlines()[-1]


# -- all of it ----------------------------------------------------------------

@pytest.fixture(scope='module')
def stacked(machine, installed):
    """A root with everything up."""
    with machine.root(on=installed) as root:
        root.local_conf(OFFLINE + 'API_WORKERS=2\nenable_service tempest')
        root.said = root.stack()
        yield root


def test_glance_knows_the_store(stacked):
    conf = glance_conf(stacked)
    assert conf['backends'] == {'fast': 'file', 'dedup1': 'dedup'}
    assert conf['default'] == 'dedup1'
    assert conf['dedup1']['dedup_store_datadir'] == DATADIR
    assert conf['dedup1']['dedup_store_codec'] == 'lz4'
    assert (conf['dedup1']['dedup_store_dedupd_socket']
            == '/run/dedupd/dedupd.sock')
    for store in ('fast', 'os_glance_staging_store', 'os_glance_tasks_store'):
        assert (conf[store]['filesystem_store_datadir']
                == f'/opt/stack/data/glance/{store}/')


def test_images_go_through_the_store_and_the_daemon(stacked):
    before = status(stacked)['reads']['bytes']
    stored = store_images(stacked, None, 'fast')
    assert set(stored) == {'dedup1', 'fast'}
    assert images(stacked) == [stored['dedup1']]
    assert status(stacked)['reads']['bytes'] - before >= 6 << 20
    # It is the package that the plugin has installed.
    for pid, _ in processes(stacked, 'uWSGI worker'):
        assert (f'{roots.CHECKOUT}/glance_dedup/_engine.abi3.so\n'
                in stacked.read(f'/proc/{pid}/maps'))


def test_dedupd_is_a_service(stacked):
    [[pid, user]] = processes(stacked, DEDUPD)
    assert user == 'stack'
    unit = stacked.read(UNIT)
    assert (f'ExecStart = {DEDUPD}--config-file {DEDUPD_CONF}\n' in unit)
    assert stacked.run('systemctl', 'is-enabled',
                       'devstack@dedupd') == 'enabled\n'
    # This service answers, and no other process.
    assert stacked.run('cat', '/run/units/devstack@dedupd.service') == pid
    assert status(stacked)['daemon']['role'] == 'maintainer'


def test_everybody_s_commands(stacked):
    for command in (['glance-dedup'], ['sudo', 'glance-dedup']):
        said = stacked.run(*command, 'status', user='stack')
        assert DATADIR in said and 'maintainer' in said, said


def test_what_belongs_to_whom(stacked):
    def owner(path):
        return stacked.run('stat', '-c', '%U %a', path).strip()
    assert owner(DATADIR) == 'stack 700'
    assert owner('/run/dedupd') == 'stack 755'
    assert owner('/run/dedupd/dedupd.sock') == 'stack 600'
    # The same holds after a reboot.
    stacked.run('rm', '-r', '/run/dedupd')
    stacked.run('systemd-tmpfiles', '--create')
    assert owner('/run/dedupd') == 'stack 755'
    stacked.run('systemctl', 'restart', 'devstack@dedupd')


def test_nobody_takes_the_filter_s_directory(root):
    """The filter's directory exists before Glance starts, at each boot."""
    for services in '', 'disable_service dedupd':
        root.local_conf(OFFLINE + services)
        root.stack('post-config')
        # Simulate a reboot, with another user's directory before systemd's.
        for boot in 'rm -r {}', 'rm -r {}; install -d -o nobody -m 0777 {}':
            assert root.run('stat', '-c', '%U %G %a', FILTERS
                            ) == 'stack stack 700\n', (services, boot)
            root.run('sh', '-c', boot.format(FILTERS, FILTERS))
            root.run('systemd-tmpfiles', '--create')
        assert root.run('stat', '-c', '%U %G %a', FILTERS
                        ) == 'stack stack 700\n', services


def test_tempest_is_configured(stacked, tmp_path):
    """The options are those of our tests, whose distribution is installed."""
    module = load_tempest_options()
    path = tmp_path / 'tempest.conf'
    path.write_text(stacked.read('/opt/stack/tempest/etc/tempest.conf'))
    conf = cfg.ConfigOpts()
    conf.register_opts(module.DEDUP_OPTS, group=module.dedup_group)
    conf([], default_config_files=[str(path)])
    assert conf.dedup.store == 'dedup1'
    assert conf.dedup.daemon_url == 'http://127.0.0.1:9394'
    for name in ('daemon_stop_command', 'daemon_start_command',
                 'collect_command'):
        stacked.run(*conf.dedup[name].split(), user='stack')
        if name == 'daemon_start_command':
            # The tests wait, too: systemd does not.
            repositories.eventually(lambda: is_ready(
                stacked, conf.dedup.daemon_url), roots.START_TIMEOUT)
    given = {line.split()[0] for line in
             path.read_text().partition('[dedup]\n')[2].splitlines() if line}
    assert given <= {option.name for option in module.DEDUP_OPTS}
    plugins = stacked.said.partition('TEMPEST_PLUGINS=')[2].splitlines()[0]
    assert plugins.split() == [f'{roots.CHECKOUT}/tests/tempest']
    assert stacked.exists(f'{roots.CHECKOUT}/tests/tempest/pyproject.toml')


def is_ready(root, daemon_url):
    try:
        root.run('curl', '--silent', '--fail', '--output', '/dev/null',
                 f'{daemon_url}/healthcheck/ready')
    except roots.Failed:
        return False
    return True


def load_tempest_options():
    """Load the options without tempest, which has its own environment."""
    spec = importlib.util.spec_from_file_location(
        'dedup_tempest_options', roots.TOP / 'tests/tempest'
        / 'glance_dedup_tempest_plugin/config.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_again_and_away(root):
    """Stacking again doubles nothing, and cleaning leaves nothing."""
    before = root.files(*PLACES)
    root.local_conf(OFFLINE)
    root.stack()
    first = glance_conf(root)
    store_images(root, None)
    [[pid, _]] = processes(root, DEDUPD)

    root.unstack()
    assert processes(root, DEDUPD) == []
    assert not root.exists(f'/proc/{pid}')
    assert root.run('systemctl', 'is-enabled', 'devstack@dedupd',
                    check=False) == 'disabled\n'
    assert root.exists(f'{DATADIR}/repository.json')

    # Glance's database is a new one, and so is the repository.
    root.stack()
    assert glance_conf(root) == first
    assert images(root) == []
    stored = store_images(root, None)
    assert images(root) == [stored['dedup1']]
    [found] = root.run('find', '/dev/shm', '-type', 'f').split()
    assert found.startswith(f'{FILTERS}/')

    # Some users restack without unstack.sh.
    [[pid, _]] = processes(root, DEDUPD)
    root.stack('post-config')
    assert processes(root, DEDUPD) == []
    assert images_on_disk(root) == []

    root.clean()
    assert processes(root, roots.VENV) == []
    left = root.files(*PLACES) - before
    # These belong to systemctl, to sudo, to Python, and to Glance.
    left -= {path for path in left if path.startswith((
        '/etc/systemd', '/run/units', '/run/sudo',
        '/opt/stack/data/glance.sqlite')) or '__pycache__' in path}
    assert left == set()
    assert before - root.files(*PLACES) == {'/usr/local/bin/glance-dedup'}


def images_on_disk(root):
    return root.run('sh', '-c', f'ls {DATADIR}/images', check=False
                    ).split() if root.exists(f'{DATADIR}/images') else []


# -- settings -----------------------------------------------------------------

def test_local_conf_has_the_last_word(root):
    root.local_conf(
        OFFLINE + 'DEDUP_STORE_NAME=golden\n'
        'DEDUP_DATA_DIR=/srv/images/golden\nDEDUP_CODEC=zstd\n',
        textwrap.dedent("""\
            [[post-config|$GLANCE_API_CONF]]
            [DEFAULT]
            enabled_backends = golden:dedup,web:http
            [golden]
            dedup_store_scope = project

            [[post-config|$DEDUPD_CONF]]
            [dedupd]
            collect_interval = 7
            """))
    root.stack('extra')
    conf = glance_conf(root)
    assert conf['backends'] == {'golden': 'dedup', 'web': 'http'}
    assert conf['default'] == 'golden'
    assert conf['golden']['dedup_store_scope'] == 'project'
    assert conf['golden']['dedup_store_codec'] == 'zstd'
    assert status(root)['repository']['path'] == '/srv/images/golden'
    assert 'collect_interval = 7\n' in root.read(DEDUPD_CONF)
    root.clean()
    assert not root.exists('/srv/images/golden')


def test_without_the_daemon(root):
    root.local_conf(OFFLINE + 'disable_service dedupd\n'
                    'enable_service tempest')
    root.stack()
    assert processes(root, DEDUPD) == []
    assert not root.exists(DEDUPD_CONF) and not root.exists(UNIT)
    assert glance_conf(root)['dedup1']['dedup_store_dedupd_socket'] == ''
    stored = store_images(root, None)
    assert images(root) == [stored['dedup1']]
    assert 'daemon_' not in root.read('/opt/stack/tempest/etc/tempest.conf')


def test_other_stores_are_kept(root):
    root.local_conf(OFFLINE + 'GLANCE_MULTIPLE_FILE_STORES=cheap,costly\n'
                    'GLANCE_DEFAULT_BACKEND=cheap\n')
    root.stack('post-config')
    conf = glance_conf(root)
    assert conf['backends'] == {'cheap': 'file', 'costly': 'file',
                                'dedup1': 'dedup'}
    assert conf['default'] == 'dedup1'
    assert (conf['costly']['filesystem_store_datadir']
            == '/opt/stack/data/glance/costly/')


def test_one_store_alone(root):
    root.local_conf(OFFLINE + 'GLANCE_ENABLE_MULTIPLE_STORES=False\n')
    root.stack('post-config')
    conf = glance_conf(root)
    assert conf['backends'] == {'dedup1': 'dedup'}
    assert (conf['os_glance_staging_store']['filesystem_store_datadir']
            == '/opt/stack/data/glance/os_glance_staging_store/')


def test_another_name_replaces_the_former(root):
    root.local_conf(OFFLINE + 'GLANCE_ENABLE_MULTIPLE_STORES=False\n')
    root.stack('post-config')
    root.local_conf(OFFLINE + 'GLANCE_ENABLE_MULTIPLE_STORES=False\n'
                    'DEDUP_STORE_NAME=golden')
    root.stack('post-config')
    assert glance_conf(root)['backends'] == {'golden': 'dedup'}


def test_a_host_without_the_api(machine):
    with machine.root() as root:
        before = root.files(*PLACES)
        root.local_conf('ENABLED_SERVICES=n-cpu,mysql')
        root.stack()
        root.unstack()
        root.clean()
        assert root.files(*PLACES) - before <= {
            '/run/sudo', '/run/sudo/ts'}


# Glance does not check tokens here, so any will do.
FETCH = ['curl', '-sf', '-H', 'X-Auth-Token: any']


def cache_status(root):
    return json.loads(root.run(
        'curl', '-sf', '--unix-socket', '/run/dedupd/cache.sock',
        'http://dedupd/v1/status'))


def test_the_cache_beside_all_else(root):
    """Nova gets images from the cache, which pulls them from the daemon."""
    root.local_conf(OFFLINE + 'enable_service dedup-cache n-cpu\n'
                    'DEDUP_CACHE_LIMIT_MIB=500\n')
    root.stack()
    assert ('[glance]\nendpoint_override = http://127.0.0.1:9295\n'
            in root.read('/etc/nova/nova.conf'))
    assert root.run('systemctl', 'is-enabled',
                    'devstack@dedup-cache') == 'enabled\n'
    assert [user for _, user in processes(root, DEDUPD)] == ['stack'] * 2
    stored = store_images(root, None)['dedup1']
    path = f'/v2/images/{stored}/file'
    for place in ('http://127.0.0.1:9295', glance_url(root)):
        root.run(*FETCH, '-o', '/tmp/got', place + path)
        root.run('sh', '-c', 'mv /tmp/got /tmp/was; test -s /tmp/was')
    root.run(*FETCH, '-o', '/tmp/got', 'http://127.0.0.1:9295' + path)
    root.run('cmp', '/tmp/got', '/tmp/was')
    held = cache_status(root)['cache']['held']
    assert (held['images'], held['limit_bytes']) == (1, 500 << 20)
    assert root.run('stat', '-c', '%U %a', '/etc/dedupd/tls-key.pem'
                    ) == 'stack 600\n'

    # Without the cache the relay sends requests to Glance.
    root.run('systemctl', 'stop', 'devstack@dedup-cache')
    root.run(*FETCH, '-o', '/tmp/got', 'http://127.0.0.1:9295' + path)
    root.run('cmp', '/tmp/got', '/tmp/was')
    root.run('systemctl', 'start', 'devstack@dedup-cache')

    certificate = root.read('/etc/dedupd/tls-cert.pem')
    root.unstack()
    assert processes(root, DEDUPD) == processes(root, RELAY) == []
    root.stack()
    assert cache_status(root)['cache']['held']['images'] == 0
    # Other hosts have a copy of it.
    assert root.read('/etc/dedupd/tls-cert.pem') == certificate
    root.clean()
    for left in ('/opt/stack/data/dedup-cache', '/etc/dedupd', '/run/dedupd'):
        assert not root.exists(left)
    assert root.run('find', '/dev/shm', '-type', 'f') == ''


def test_the_cache_of_a_compute_host(root):
    """A compute host's cache uses another host's controller.

    Its certificate was copied.
    """
    root.local_conf(OFFLINE + 'ENABLED_SERVICES=n-cpu,dedup-cache\n'
                    'SERVICE_HOST=192.0.2.1\n')
    assert refused(root).endswith(
        'DEDUP_CACHE_UPSTREAM_CA=/etc/dedupd/tls-cert.pem is not there. Copy '
        'that file from the host of https://192.0.2.1:9393.')
    root.run('openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes',
             '-subj', '/CN=other', '-keyout', '/dev/null', '-out',
             '/tmp/other.pem')
    root.run('chmod', '0644', '/tmp/other.pem')
    root.local_conf(OFFLINE + 'ENABLED_SERVICES=n-cpu,dedup-cache\n'
                    'SERVICE_HOST=192.0.2.1\n'
                    'DEDUP_CACHE_UPSTREAM_CA=/tmp/other.pem\n')
    root.stack()
    assert len(processes(root, DEDUPD)) == 1
    assert not root.exists(DEDUPD_CONF) and not root.exists(UNIT)
    assert cache_status(root)['daemon']['role'] == 'maintainer'
    conf = root.read('/etc/dedupd/dedup-cache.conf')
    assert 'upstream_url = https://192.0.2.1:9393\n' in conf
    assert 'upstream_ca = /tmp/other.pem\n' in conf
    root.clean()
    assert not root.exists('/etc/dedupd')
    assert root.exists('/tmp/other.pem')


def test_a_host_without_the_database_keeps_the_images(root):
    """Images stay if another host's database has them."""
    root.local_conf(OFFLINE)
    root.run('glance-dedup', '--repository', DATADIR, 'repository', 'create',
             user='stack')
    root.run('glance-dedup', '--repository', DATADIR, 'image', 'put', 'one',
             '/etc/passwd', user='stack')
    root.local_conf(OFFLINE + 'disable_service mysql')
    root.stack('post-config')
    assert images_on_disk(root) == ['one']
    root.local_conf(OFFLINE)
    root.stack('post-config')
    assert images_on_disk(root) == []


BROKER = """
import sys
from tests.functional import rabbitmq
broker = rabbitmq.RabbitMQ('/tmp/rabbitmq', (5672, 25672, 4369))
broker.start()
print('ready', flush=True)
sys.stdin.read()
broker.stop()
"""


@pytest.mark.long
def test_messages(root):
    """With a broker, deleting an image is enough to get its space back."""
    with subprocess.Popen(
            root.command(sys.executable, '-c', BROKER, directory=roots.TOP),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdout.readline() == b'ready\n'
        root.local_conf(
            OFFLINE + 'enable_service rabbit',
            '[[post-config|$DEDUPD_CONF]]\n[dedupd]\ncollect_interval = 0\n')
        root.stack('extra')
        assert ('transport_url = rabbit://guest:guest@127.0.0.1:5672/'
                in root.read(DEDUPD_CONF))
        stored = store_images(root, None)
        root.run('curl', '-sf', '-X', 'DELETE',
                 f'{glance_url(root)}/v2/images/{stored["dedup1"]}')
        deadline = time.monotonic() + 120
        while not task(root, 'collect')['runs']:
            assert time.monotonic() < deadline, task(root, 'collect')
            time.sleep(0.5)
        broker.stdin.close()


# -- invalid settings ---------------------------------------------------------

@pytest.mark.parametrize('localrc, words', [
    ('DEDUP_CODEC=gzip',
     'DEDUP_CODEC=gzip is unknown. Use none, lz4 or zstd.'),
    ('DEDUP_CODEC="lz4 zstd"', 'DEDUP_CODEC=lz4 zstd is unknown.'),
    ('DEDUP_DATA_DIR=dedup',
     'DEDUP_DATA_DIR=dedup must be an absolute path without spaces.'),
    ('DEDUP_DATA_DIR="/srv/my images"', 'absolute path without spaces'),
    ('DEDUP_DATA_DIR=/', 'absolute path'),
    ('DEDUP_DATA_DIR=/etc', 'DEDUP_DATA_DIR=/etc is neither empty nor a '
     'repository of glance-dedup, and would be emptied.'),
    ('DEDUP_DATA_DIR=/etc/passwd', 'is neither empty nor a repository'),
    ('DEDUP_STORE_NAME=a:b', "DEDUP_STORE_NAME=a:b cannot be a store's name."),
    ('DEDUP_STORE_NAME="a b"', "cannot be a store's name."),
    ('DEDUP_STORE_NAME=os_glance_dedup', "cannot be a store's name."),
    ('enable_service dedup-cache\nDEDUP_CACHE_DATA_DIR=/etc',
     'DEDUP_CACHE_DATA_DIR=/etc is neither empty nor a repository'),
    ('enable_service dedup-cache\nDEDUP_CACHE_DATA_DIR=/srv/one\n'
     'DEDUP_DATA_DIR=/srv/one', 'is the directory of the store. Name another '
     'one: a cache deletes what it holds.'),
    ('enable_service dedup-cache\nDEDUP_CACHE_LIMIT_MIB=1GiB',
     'DEDUP_CACHE_LIMIT_MIB=1GiB is not a number of MiB.'),
    ('enable_service dedup-cache\nDEDUP_CACHE_UPSTREAM_URL=http://x:1',
     'DEDUP_CACHE_UPSTREAM_URL=http://x:1 is not like https://HOST:PORT'),
    ('DEVSTACK_PLUGINS=""\nenable_plugin dedup x\n'
     f'ln -sfn {roots.CHECKOUT} /opt/stack/dedup',
     'The plugin must be enabled by the name glance-dedup'),
])
def test_bad_settings(machine, localrc, words):
    """A bad setting is refused before anything is installed or written."""
    with machine.root() as root:
        before = root.files(*PLACES)
        root.local_conf(localrc)
        assert words in refused(root)
        # Cleaning up still works.
        root.clean()
        assert root.exists('/etc/passwd')
        assert before <= root.files(*PLACES)


def test_a_name_that_is_taken(root):
    root.local_conf(OFFLINE + 'DEDUP_STORE_NAME=fast')
    assert refused(root, 'post-config').endswith(
        'DEDUP_STORE_NAME=fast is the name of another store, fast:file. '
        'Choose another name.')


def test_a_foreign_repository_json(root):
    """Cleaning only empties a directory that the store has made."""
    root.run('mkdir', '-p', '/srv/other')
    root.write('/srv/other/repository.json', '{"kind": "something else"}')
    root.local_conf(OFFLINE + 'DEDUP_DATA_DIR=/srv/other')
    assert 'is neither empty nor a repository' in refused(root)
    root.clean()
    assert root.exists('/srv/other/repository.json')


@pytest.mark.long
def test_a_daemon_that_does_not_start(root):
    root.local_conf(
        OFFLINE + 'SERVICE_TIMEOUT=3',
        '[[post-config|$DEDUPD_CONF]]\n[dedupd]\nread_threads = 0\n')
    assert ('dedupd did not start: see journalctl --unit devstack@dedupd'
            in refused(root, 'extra'))


# -- the files themselves -----------------------------------------------------

SCRIPTS = sorted([
    *(roots.TOP / 'devstack' / name
      for name in ('plugin.sh', 'settings', 'override-defaults')),
    *(roots.HERE / 'devstack').iterdir()])


@pytest.mark.parametrize('path', SCRIPTS, ids=lambda path: path.name)
def test_shell_style(path):
    """The shell scripts pass bashate as DevStack runs it, and shellcheck."""
    bashate = pathlib.Path(sys.executable).parent / 'bashate'
    for command in ([bashate, '-iE006', '-eE005,E042'],
                    ['shellcheck', '--external-sources']):
        done = subprocess.run([*command, path], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=60)
        assert done.returncode == 0, f'\n{done.stdout}'


@pytest.mark.parametrize('directory, platform', [('debs', 'dpkg'),
                                                 ('rpms', 'rpm')])
def test_package_lists(directory, platform):
    """DevStack installs the packages that bindep.txt names for building."""
    wanted = []
    for line in (roots.TOP / 'bindep.txt').read_text().splitlines():
        name, _, profiles = line.partition(' [')
        if {'compile', f'platform:{platform}'} <= set(
                profiles.rstrip(']').split()):
            wanted.append(name)
    listed = roots.TOP / 'devstack/files' / directory / 'glance-dedup'
    assert sorted(listed.read_text().split()) == sorted(wanted)


def test_settings_are_documented():
    """The README documents each setting with its default."""
    settings = (roots.TOP / 'devstack/settings').read_text()
    readme = (roots.TOP / 'devstack/README.rst').read_text()
    for line in settings.splitlines():
        name, _, value = line.partition('=')
        if value.startswith(f'${{{name}:-'):
            default = value.removeprefix(f'${{{name}:-').removesuffix('}')
            assert f'``{name}={default}``' in readme, name
