# SPDX-License-Identifier: Apache-2.0

"""The networks of hosts; test_batch_hosts.py has real hosts."""

import json
import os

import pytest

from glance_dedup.backup import reachable_hosts
from glance_dedup.base import package_version

ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU W IRTT
eth0 00000000 010200C0 0003 0 0 0 00000000 0 0 0
eth0 0000000A 00000000 0001 0 0 0 000000FF 0 0 0
eth1 00004D0A 00000000 0001 0 0 0 0000FFFF 0 0 0
"""


@pytest.mark.parametrize('address, network', [
    ('10.77.3.1', '10.77.0.0/16'), ('10.78.0.1', '10.0.0.0/8'),
    ('192.0.2.1', None), ('127.0.0.1', None), ('fd00::2', None)])
def test_network(tmp_path, address, network):
    (tmp_path / 'route').write_text(ROUTES)
    assert reachable_hosts.network_of(address, tmp_path / 'route') == network


def test_networks_for_open_mpi(monkeypatch):
    found = [reachable_hosts.Host(name, name, frozenset(networks))
             for name, networks in (
                 ('one', {'10.0.0.0/8'}), ('two', ()),
                 ('three', {'192.0.2.0/24', '10.0.0.0/8'}))]
    name = 'OMPI_MCA_btl_tcp_if_'
    for end in ('include', 'exclude'):
        monkeypatch.delenv(name + end, raising=False)
    assert reachable_hosts.environment(found)[f'{name}include'] == (
        '10.0.0.0/8,192.0.2.0/24')
    assert f'{name}include' not in reachable_hosts.environment(found[1:2])
    assert reachable_hosts.environment([]) == {}
    # The operator's own setting comes first.
    for end in ('include', 'exclude'):
        with monkeypatch.context() as patched:
            patched.setenv(name + end, 'eth7')
            assert f'{name}include' not in reachable_hosts.environment(found)


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Return a function that sets the answer that ssh brings from a host."""
    ssh = tmp_path / 'ssh'
    ssh.write_text('#!/bin/sh\nwhile [ $# -gt 2 ]; do shift; done\n'
                   f'cat "{tmp_path}/$1"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')

    def answer(name, **changed):
        facts = {'nodename': name, 'version': package_version.version(),
                 'mpi': True,
                 'client': '192.0.2.1', 'server': '192.0.2.0/24', **changed}
        (tmp_path / name).write_text(json.dumps(
            {key: value for key, value in facts.items() if value != 'left out'}
        ) + '\n')
    return answer


@pytest.mark.parametrize('field, value', [
    ('nodename', 'left out'), ('nodename', None), ('nodename', 7),
    ('nodename', ''), ('nodename', 'a\0b'), ('nodename', 'a b'),
    ('nodename', 'x' * 256), ('nodename', ['a']), ('mpi', 'left out'),
    ('mpi', 'yes'), ('mpi', 1), ('client', 'left out'), ('client', 5),
    ('server', 'left out' * 2), ('server', 7), ('server', '192.0.2.0/24,x'),
    ('server', {'a': 1}), ('version', None), ('version', {'\x1b[2J': 1}),
    ('version', 'x' * 10000)])
def test_a_host_that_lies_is_left_out_alone(answer, field, value):
    answer('good')
    answer('bad', **{field: value})
    found, lost = reachable_hosts.reach(['bad', 'good'])
    assert [host.name for host in found] == ['good']
    assert list(lost) == ['bad'] and field in lost['bad']
    assert len(lost['bad']) < 600 and lost['bad'].isprintable()


@pytest.mark.parametrize('true, name', [
    ('good', 'good'), ('good.example', 'good'), ('root@good', 'good'),
    ('good', 'good.example')])
def test_a_host_that_takes_the_name_of_another(answer, true, name):
    """A host with another host's name is lost; the real host is reached."""
    answer(true, nodename=name)
    answer('bad', nodename=name)
    found, lost = reachable_hosts.reach(['bad', true])
    assert [host.name for host in found] == [true]
    assert list(lost) == ['bad']
    assert f'its hostname is {name}, which is that of {true}:' in lost['bad']


def test_hosts_with_a_name_that_is_neithers(answer):
    for name in 'one', 'two':
        answer(name, nodename='other')
    found, lost = reachable_hosts.reach(['one', 'two'])
    assert found == [] and set(lost) == {'one', 'two'}
    assert 'one and two both have the hostname other' in lost['one']


@pytest.mark.parametrize('text', [
    '', '[]', '7', '"a"', 'null', '{', '[' * 60000, '{}'])
def test_what_is_no_answer(answer, tmp_path, text):
    answer('good')
    (tmp_path / 'bad').write_text(text + '\n')
    found, lost = reachable_hosts.reach(['good', 'bad'])
    assert [host.name for host in found] == ['good']
    assert 'does not run there' in lost['bad']


@pytest.mark.parametrize('script, words', [
    ('exec yes', 'printed more than 64 KiB'),
    ('exec yes >&2', 'printed more than 64 KiB'),
    ('exec sleep 60', 'did not answer'),
    ('exec 1>&- 2>&-; exec sleep 60', 'did not answer'),
    ('while echo; do sleep 0.1; done', 'did not answer'),
    ('echo why >&2; exit 255', 'cannot log in: why'),
    ('echo why >&2; exit 1', 'does not run there with this software: why')])
def test_a_host_that_gives_no_answer(tmp_path, monkeypatch, script, words):
    ssh = tmp_path / 'ssh'
    ssh.write_text(f'#!/bin/sh\n{script}\n')
    ssh.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setattr(reachable_hosts, '_ASK', 2)
    found, lost = reachable_hosts.reach(['bad'])
    assert found == [] and words in lost['bad']
