# SPDX-License-Identifier: Apache-2.0

"""Configures and starts a Swift of two processes.

One is memcached, which has its tokens; the other has all servers of Swift
(``swift_process.py``). The caller chooses its users.
"""

import pathlib
import shutil

from tests.support import ports

TOP = pathlib.Path(__file__).resolve().parents[2]
PYTHON = TOP / '.services' / 'swift' / 'bin' / 'python'

_SWIFT = '''
[swift-hash]
swift_hash_path_prefix = cold
swift_hash_path_suffix = groups
[storage-policy:0]
name = one
default = yes
'''
_STORAGE = '''
[DEFAULT]
devices = {directory}/devices
mount_check = false
swift_dir = {directory}
fallocate_reserve = 0
log_level = WARNING
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
'''
_PROXY = '''
[DEFAULT]
swift_dir = {directory}
log_level = WARNING
[pipeline:main]
pipeline = catch_errors cache {before} copy slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
'''


def own_users():
    """Return the options for a user of Swift's own, who may also use S3."""
    return 's3api tempauth', '''
[filter:s3api]
use = egg:swift#s3api
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
'''


def users_of_keystone(options, roles):
    """Return the options for users of Keystone.

    :param options: the options of keystonemiddleware
    :param roles: their owners may use the containers of their project
    """
    lines = '\n'.join(f'{name} = {value}' for name, value in options.items())
    return 'authtoken keystoneauth', f'''
[filter:authtoken]
paste.filter_factory = keystonemiddleware.auth_token:filter_factory
{lines}
delay_auth_decision = true
[filter:keystoneauth]
use = egg:swift#keystoneauth
operator_roles = {', '.join(roles)}
'''


def commands(directory, address, port, users):
    """Write all files; return the commands to start, in this order.

    :param address: the proxy's; the rest is on loopback
    :param users: of :func:`own_users` or :func:`users_of_keystone`
    """
    (directory / 'devices' / 'one').mkdir(parents=True, exist_ok=True)
    memcached, *storage = (ports.free_port() for _ in range(4))
    before, filters = users
    proxy = directory / 'proxy.conf'
    # The file may contain a password.
    proxy.touch(0o600)
    proxy.write_text(_PROXY.format(
        directory=directory, memcached=memcached, before=before) + filters)
    (directory / 'swift.conf').write_text(_SWIFT)
    for kind in ('account', 'container', 'object'):
        (directory / f'{kind}.conf').write_text(
            _STORAGE.format(directory=directory, kind=kind))
    return (
        [shutil.which('memcached') or 'memcached', '-l', '127.0.0.1', '-p',
         memcached, '-m', 16, '-U', 0, '-u', 'root'],
        [PYTHON, TOP / 'tests' / 'support' / 'swift_process.py', directory,
         address, port, *storage])
