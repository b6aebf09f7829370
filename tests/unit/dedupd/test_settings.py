# SPDX-License-Identifier: Apache-2.0

"""Options that change while other threads read them."""

import os
import threading

from dedupd import settings

TEXT = '[dedupd]\ndatadir = /\ncollect_interval = %d\n'


def test_a_read_during_a_change(tmp_path):
    """It gets the old value, and the next read gets the new one."""
    path = tmp_path / 'dedupd.conf'
    path.write_text(TEXT % 0)
    conf = settings.parse(['--config-file', str(path)])
    path.unlink()
    os.mkfifo(path)
    for value in (1, 2, 3):
        change = threading.Thread(target=conf.mutate_config_files,
                                  daemon=True)
        change.start()
        # The other thread has opened the file, and waits for its content.
        with open(path, 'w', encoding='ascii') as stream:
            assert conf.dedupd.collect_interval == value - 1
            stream.write(TEXT % value)
        change.join(60)
        assert not change.is_alive()
        assert conf.dedupd.collect_interval == value
