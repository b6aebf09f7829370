# SPDX-License-Identifier: Apache-2.0

"""The options are complete, bounded and listed for Glance."""

import subprocess
import sys

from glance_store import multi_backend
from oslo_config import cfg
from oslo_config import types
import pytest

from glance_dedup.driver import dedup_store
from glance_dedup.driver import store_opts

BY_NAME = {opt.name: opt for opt in store_opts.dedup_opts}


@pytest.mark.parametrize('opt', store_opts.dedup_opts,
                         ids=lambda opt: opt.name)
def test_every_option(opt):
    assert opt.name.startswith('dedup_store_')
    assert opt.help.startswith('\n') and len(opt.help.split()) > 10
    assert max(map(len, opt.help.splitlines())) < 72
    if isinstance(opt, cfg.IntOpt):
        assert opt.type.min is not None


def test_names_are_unique_and_the_store_has_them():
    assert len(BY_NAME) == len(store_opts.dedup_opts)
    assert dedup_store.Store.OPTIONS is store_opts.dedup_opts


@pytest.mark.parametrize('name,good,bad', [
    ('codec', ['none', 'lz4', 'zstd'], ['', 'LZ5', 'gzip']),
    ('codec_level', ['0', '19'], ['-1', '20', 'x']),
    ('index', ['filter', 'lmdb', 'dtb'], ['', 'inram', 'leveldb']),
    ('filter_mib', ['1', '4096'], ['0', '-1', '1.5']),
    ('threads', ['1', '64'], ['0', '-1', '65', '100000']),
    ('timeout', ['0', '3600'], ['-1', '1.5', '30s'])])
def test_bounds(tmp_path, name, good, bad):
    for value in good + bad:
        path = tmp_path / 'conf'
        path.write_text(f'[one]\ndedup_store_{name} = {value}\n')
        conf = cfg.ConfigOpts()
        conf.register_opts(store_opts.dedup_opts, group='one')
        conf([], default_config_files=[str(path)])
        if value in good:
            assert str(conf.one[f'dedup_store_{name}']) == value
        else:
            with pytest.raises((ValueError, cfg.Error)):
                conf.one[f'dedup_store_{name}']


def test_no_option_is_given_twice_by_list_opts():
    (group, listed), = store_opts.list_opts()
    assert group == 'dedup'
    assert listed == store_opts.dedup_opts
    assert listed is not store_opts.dedup_opts


def test_glance_lists_them():
    assert multi_backend._list_driver_opts()['dedup'] is store_opts.dedup_opts


@pytest.mark.parametrize('namespace', ['glance_dedup', 'glance.multi_store'])
def test_oslo_config_generator(namespace):
    sample = subprocess.run(
        [sys.executable, '-m', 'oslo_config.generator',
         '--namespace', namespace], check=True, capture_output=True,
        text=True, timeout=60).stdout
    assert '[dedup]' in sample
    for name, opt in BY_NAME.items():
        default = opt.default if opt.default is not None else (
            opt.sample_default)
        if isinstance(opt, cfg.BoolOpt):
            default = str(default).lower()
        elif isinstance(opt, cfg.ListOpt):
            default = ','.join(default)
        elif isinstance(opt.type, types.Dict):
            default = ','.join(f'{key}:{n}' for key, n in default.items())
        line = f'#{name} = {default}'.rstrip()
        assert f'\n{line}\n' in sample
    assert 'Failed to format' not in sample


def test_importing_opens_and_creates_nothing():
    """Importing the store opens no file and starts no thread.

    The generator and glance-api import it, so that must cost little.
    """
    code = ('import os, threading; before = os.listdir("/proc/self/fd"); '
            'import glance_dedup.driver.dedup_store; '
            'assert threading.active_count() == 1; '
            'assert len(os.listdir("/proc/self/fd")) == len(before)')
    subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
