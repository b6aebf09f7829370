# SPDX-License-Identifier: Apache-2.0

"""The networks of hosts; test_batch_hosts.py has real hosts."""

import pytest

from glance_dedup.batch import hosts

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
    assert hosts.network_of(address, tmp_path / 'route') == network


def test_networks_for_open_mpi(monkeypatch):
    found = [hosts.Host(name, name, frozenset(networks))
             for name, networks in (
                 ('one', {'10.0.0.0/8'}), ('two', ()),
                 ('three', {'192.0.2.0/24', '10.0.0.0/8'}))]
    name = 'OMPI_MCA_btl_tcp_if_'
    for end in ('include', 'exclude'):
        monkeypatch.delenv(name + end, raising=False)
    assert hosts.environment(found)[f'{name}include'] == (
        '10.0.0.0/8,192.0.2.0/24')
    assert f'{name}include' not in hosts.environment(found[1:2])
    assert hosts.environment([]) == {}
    # What the operator says comes first.
    for end in ('include', 'exclude'):
        with monkeypatch.context() as patched:
            patched.setenv(name + end, 'eth7')
            assert f'{name}include' not in hosts.environment(found)
