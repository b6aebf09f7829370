# SPDX-License-Identifier: Apache-2.0

"""The daemon's options: complete, bounded, listed."""

import configparser
import os
import pathlib
import pwd
import subprocess
import sys

from oslo_config import cfg
import pytest

from dedupd import daemon
from dedupd import opts

TOP = pathlib.Path(__file__).resolve().parents[3]
BY_NAME = {opt.name: opt for opt in opts.dedupd_opts}
EVERY = [(group, opt) for group, options in opts.list_opts()
         for opt in options]
NAMES = {f'[{group}] {opt.name}' for group, opt in EVERY}


@pytest.mark.parametrize('group,opt', EVERY,
                         ids=[f'{group}-{opt.name}' for group, opt in EVERY])
def test_every_option(group, opt):
    assert opt.help.startswith('\n') and len(opt.help.split()) > 7
    assert max(map(len, opt.help.splitlines())) < 75
    if isinstance(opt, (cfg.IntOpt, cfg.FloatOpt)):
        assert opt.type.min is not None
    for line in opt.help.splitlines():
        if line.startswith('    * ``') and line.endswith('``'):
            name = line.strip(' *`')
            assert name in NAMES or f'[{group}] {name}' in NAMES


@pytest.mark.parametrize('name,good,bad', [
    ('listen', ['0.0.0.0:1', '[::1]:9393', 'host:80'], [':1', 'x', '1:2:3']),
    ('merge_exclude', ['a,project:b'], ['a b', 'project:', '../x']),
    ('collect_live_share', ['0', '100'], ['-1', '101', '0.5']),
    ('scrub_rate_mib', ['0', '0.5'], ['-1', 'x']),
    ('recompress_codec', ['none', 'lz4', 'zstd'], ['gzip', '']),
    ('recompress_level', ['0', '19'], ['-1', '20', 'x']),
    ('recompress_cluster_similar', ['true', 'false'], ['', 'similar']),
    ('glance_url', ['http://x:9292', 'https://x/image'], ['ftp://x', 'x']),
    ('cache_mib', ['0'], ['-1']), ('read_threads', ['1'], ['0', '257'])])
def test_bounds(tmp_path, name, good, bad):
    for value in good + bad:
        path = tmp_path / 'conf'
        path.write_text(f'[dedupd]\n{name} = {value}\n')
        if value in good:
            daemon.read_options(['--config-file', str(path)])
        else:
            with pytest.raises((ValueError, cfg.Error)):
                daemon.read_options(['--config-file', str(path)])


@pytest.mark.parametrize('group, name, bad', [
    ('dedupd', 'replicate_from', 'a*b'), ('dedupd', 'upload_from', 'x.*.org'),
    ('dedupd', 'backup_from', 'compute1.example.org'),
    ('dedupd', 'backup_from', 'compute1.example.org:a b'),
    ('dedupd', 'tier_keep', 'a b'), ('dedupd', 'merge_exclude', 'project:'),
    ('dedupd', 'listen', 'host'), ('dedupd', 'status_listen', ':1'),
    ('cache', 'listen', 'host'), ('cache', 'relay_listen', '1:2:3'),
    ('replication', 'properties', 'x')])
def test_a_wrong_value_is_answered_with_an_example(tmp_path, group, name, bad):
    path = tmp_path / 'conf'

    def read(value):
        path.write_text(f'[{group}]\n{name} = {value}\n')
        option, = [opt for known, opt in EVERY
                   if (known, opt.name) == (group, name)]
        conf = cfg.ConfigOpts()
        conf.register_opt(option, group=group)
        conf([], default_config_files=[str(path)])
        return conf[group][name]

    with pytest.raises((ValueError, cfg.Error)) as caught:
        read(bad)
    words = str(caught.value)
    assert name in words and repr(bad) in words and 'regex' not in words
    examples = words.partition('for example ')[2].replace(' or ', ', ')
    for example in examples.split(', '):
        assert read(example)


CACHE = {'glance_url': 'http://controller:9292'}, {
    'upstream_url': 'https://controller:9393'}


def cache_file(path, dedupd, cache):
    path.write_text('[DEFAULT]\nmode = cache\n' + ''.join(
        f'[{group}]\n' + ''.join(f'{name} = {value}\n'
                                 for name, value in options.items())
        for group, options in (('dedupd', dedupd), ('cache', cache))))
    return ['--config-file', str(path)]


def test_a_cache(tmp_path):
    arguments = cache_file(tmp_path / 'conf', *CACHE)
    assert daemon.read_options(arguments).mode == 'cache'
    conf = daemon.read_options([*arguments, '--mode', 'store'])
    assert conf.mode == 'store'


@pytest.mark.parametrize('dedupd,cache,words', [
    ({'glance_url': None}, {}, 'needs .dedupd. glance_url'),
    ({}, {'upstream_url': None}, 'needs .cache. upstream_url'),
    ({}, {'upstream_url': 'http://controller:9393'}, 'upstream_url'),
    ({}, {'listen': '0.0.0.0:9292'}, '0.0.0.0:9292 is not .* loopback'),
    ({}, {'listen': 'controller:9292'}, 'controller:9292 is not .* loopback'),
    ({}, {'listen': '[::]:9292'}, 'loopback'),
    ({}, {'relay_listen': '127.0.0.1:9292'}, 'the same address'),
    ({}, {'upstream_key': '/key'}, 'upstream_key needs upstream_cert'),
    ({}, {'neighbours': 'http://compute1:9393'}, 'neighbours'),
    ({}, {'neighbours': 'https://ok:1, unix:/socket'}, 'neighbours'),
    ({}, {'neighbours': 'https://compute1:9393/path'},
     'neighbours: .https://compute1:9393/path. is neither'),
    ({}, {'neighbours': 'https://compute1:port'}, 'neighbours'),
    ({}, {'neighbours': 'https://'}, 'neighbours'),
    ({}, {'neighbours': ', '.join(f'https://c{n}:1' for n in range(101))},
     'neighbours: 100 are the most'),
    ({}, {'upstream_ca': '/not/here'}, '/not/here'),
    ({}, {'upstream_cert': '/not/here'}, '/not/here')])
def test_what_a_cache_needs(tmp_path, dedupd, cache, words):
    options = [{name: value for name, value in {**given, **changed}.items()
                if value is not None}
               for given, changed in zip(CACHE, (dedupd, cache))]
    arguments = cache_file(tmp_path / 'conf', *options)
    with pytest.raises((ValueError, cfg.Error), match=words):
        daemon.read_options(arguments)


def test_options_of_a_cache_that_is_none(tmp_path):
    """Options of a cache have no effect in a store."""
    arguments = cache_file(tmp_path / 'conf', {}, {'listen': '0.0.0.0:1'})
    daemon.read_options([*arguments, '--mode', 'store'])


def test_what_may_change_does_not_need_a_restart():
    for name, opt in BY_NAME.items():
        if name.endswith(('_interval', '_rate_mib', '_timeout', '_share')) or (
                name in ('socket_users', 'merge_exclude', 'cache_mib')):
            assert opt.mutable, name
    assert not BY_NAME['datadir'].mutable and not BY_NAME['listen'].mutable


def test_oslo_config_generator():
    sample = subprocess.run(
        [sys.executable, '-m', 'oslo_config.generator', '--namespace',
         'dedupd'], check=True, capture_output=True, text=True,
        timeout=60).stdout
    for name in BY_NAME:
        assert f'\n#{name} =' in sample
    assert 'Failed to format' not in sample


def test_tox_writes_every_sample(tmp_path):
    """The commands of tox -e genconfig write every sample."""
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(TOP / 'tox.ini')
    commands = [line.split() for line in parser[
        'testenv:genconfig']['commands'].splitlines() if line]
    assert sorted(command[-1] for command in commands) == sorted(
        str(path.relative_to(TOP)) for path in TOP.glob(
            'etc/oslo-config-generator/*.conf'))
    for number, command in enumerate(commands):
        assert command[:-1] == ['oslo-config-generator', '--config-file']
        target = tmp_path / str(number)
        subprocess.run(
            [sys.executable, '-m', 'oslo_config.generator', *command[1:],
             '--output-file', target], cwd=TOP, check=True, timeout=60)
        assert target.read_text().count('\n#') > 50


def test_users():
    own = {0, os.geteuid()}
    assert daemon.user_ids([]) == own
    assert daemon.user_ids(['123', pwd.getpwuid(0).pw_name]) == own | {123}
    with pytest.raises(ValueError):
        daemon.user_ids(['no-such-user'])


def test_what_nobody_reads_is_named(tmp_path, caplog):
    (tmp_path / 'a.conf').write_text(
        '[DEFAULT]\ndebug = true\nlogfile = /dev/null\nlog-dir = x\n'
        'debgu = true\n'
        '[dedupd]\ncollect_intervall = 5\nmerge_interval = 5\n'
        'listen_on_saturday = 5\n'
        '[dedup]\ndatadir = x\n[replication]\ninterval = 5\n'
        '[oslo_messaging_rabbit]\nssl = true\n')
    (tmp_path / 'd').mkdir()
    (tmp_path / 'd' / 'b.conf').write_text('[cache]\nupstream_ur = x\n')
    conf = daemon.read_options(['--config-file', str(tmp_path / 'a.conf'),
                                '--config-dir', str(tmp_path / 'd')])
    daemon.warn_of_unknown(conf)
    first, second = tmp_path / 'a.conf', tmp_path / 'd' / 'b.conf'
    ignored = 'and it is ignored'
    assert [record.getMessage() for record in caplog.records
            if record.name == 'dedupd.daemon'] == [
        f'{first}: there is no option debgu in [DEFAULT], {ignored}; did you '
        'mean debug?',
        f'{first}: there is no option collect_intervall in [dedupd], '
        f'{ignored}; did you mean collect_interval?',
        f'{first}: there is no option listen_on_saturday in [dedupd], '
        f'{ignored}',
        f'{first}: there is no group [dedup], {ignored}; did you mean '
        'dedupd?',
        f'{second}: there is no option upstream_ur in [cache], {ignored}; '
        'did you mean upstream_url?']


def test_options_of_messaging_pass_where_there_is_a_broker(tmp_path):
    path = tmp_path / 'conf'
    path.write_text(
        '[DEFAULT]\ntransport_url = rabbit://localhost\n'
        'rpc_response_timeout = 5\n'
        'debgu = true\n[oslo_messaging_rabbit]\nssl = true\n'
        '[oslo_messaging_notifications]\ndriver = messagingv2\n')
    conf = daemon.read_options(['--config-file', str(path)])
    [found] = opts.unknown(conf)
    assert 'did you mean debug?' in found


def test_what_the_sample_has_is_known(tmp_path):
    """Every option in the sample is known."""
    path = tmp_path / 'conf'
    path.write_text(''.join(
        f'[{group}]\n' + ''.join(
            f'{opt.name} = \n' for opt in options
            if isinstance(opt, cfg.ListOpt))
        for group, options in opts.list_opts()))
    conf = daemon.read_options(['--config-file', str(path)])
    assert list(opts.unknown(conf)) == []
