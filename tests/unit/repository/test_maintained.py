# SPDX-License-Identifier: Apache-2.0

"""Any process can query whether a repository has a maintainer."""

from tests.support import maintenance
from tests.support import repositories


def test_is_maintained(tmp_path):
    path = maintenance.create(tmp_path)
    with (repositories.open_repository(path) as repo,
          repositories.open_repository(path) as other):
        assert not repo.is_maintained       # it never was
        assert not (path / 'locks' / 'maintainer').exists()
        with maintenance.maintaining(repo):
            assert repo.is_maintained and other.is_maintained
        assert not other.is_maintained
        # The query did not keep a maintainer from starting.
        with maintenance.maintaining(other):
            assert repo.is_maintained
