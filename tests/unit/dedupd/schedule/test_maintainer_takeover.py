# SPDX-License-Identifier: Apache-2.0

"""A daemon's attempts to become the maintainer, and its log of these."""

from oslo_config import cfg
import pytest

from dedupd import opts
from dedupd.schedule import host_share
from dedupd.schedule import maintainer_takeover
from tests.support import maintenance

pytest_plugins = ['tests.support.maintainer_fixtures']


@pytest.fixture
def takeover(repo):
    conf = cfg.ConfigOpts()
    conf.register_opts(opts.dedupd_opts, group='dedupd')
    conf([], default_config_files=[])
    with host_share.Membership(repo, conf, ()) as membership:
        membership.join()
        yield maintainer_takeover.Takeover(repo, membership)


def test_when_to_try(takeover, repo, monkeypatch):
    assert takeover.is_due()        # there is no maintainer yet
    assert not takeover.is_due()    # the last attempt was just now
    with monkeypatch.context() as patch:
        patch.setattr(maintainer_takeover, 'TRIAL_INTERVAL', 0)
        with maintenance.maintaining(repo):
            assert not takeover.is_due()
        assert takeover.is_due()
    takeover.hurry()
    assert takeover.is_due()


def test_a_refusal_is_logged_once(takeover, repo, caplog):
    with maintenance.maintaining(repo):
        assert takeover.attempt(lambda *args: None) is None
        assert takeover.attempt(lambda *args: None) is None
    assert caplog.text.count('Only reads are served') == 1
    assert not takeover.is_due()
    takeover.attempt(lambda *args: None).close()
    with maintenance.maintaining(repo):
        assert takeover.attempt(lambda *args: None) is None
    assert caplog.text.count('Only reads are served') == 2
