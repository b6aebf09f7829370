# SPDX-License-Identifier: Apache-2.0
"""Options of the group ``[dedup]`` in tempest.conf."""

from oslo_config import cfg

dedup_group = cfg.OptGroup(
    name='dedup', title='A Glance store of the type dedup, and its daemon')

DEDUP_OPTS = [
    cfg.StrOpt('store',
               default='dedup1',
               help='Name of the store of the type dedup in glance-api.conf. '
                    'It has to be the default store.'),
    cfg.URIOpt('daemon_url',
               schemes=['http'],
               help='Where dedupd shows its status page (option '
                    'status_listen in dedupd.conf), as in '
                    'http://127.0.0.1:9394. Tests that look at how much is '
                    'stored are skipped without it.'),
    cfg.StrOpt('daemon_stop_command',
               help='Command that stops dedupd on the host of Glance, as in '
                    '"sudo systemctl stop devstack@dedupd". It is run '
                    'without a shell. Tests without a daemon are skipped '
                    'unless this and daemon_start_command are given.'),
    cfg.StrOpt('daemon_start_command',
               help='Command that starts dedupd again.'),
    cfg.StrOpt('collect_command',
               help='Command that gives back the space of deleted images and '
                    'returns when that is done, as in "sudo glance-dedup '
                    'task collect". Without it the test waits for the '
                    'collection that dedupd makes by itself.'),
    cfg.IntOpt('timeout',
               default=300,
               min=1,
               help='Seconds that a command, and a collection that is waited '
                    'for, may take.'),
    cfg.StrOpt('console_marker',
               default='login:',
               help='What the serial console of a server shows when the '
                    'image of [scenario] img_file is up.'),
]
