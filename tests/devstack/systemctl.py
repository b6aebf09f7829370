# SPDX-License-Identifier: Apache-2.0
"""The part of ``systemctl`` that DevStack uses, for a host without systemd.

It is in the roots of ``roots.py`` under that name, and supports the commands
and the settings of units that DevStack uses, for services of the types simple
and notify: a process in the background, as a user, in an environment, stopped
by SIGTERM. It ignores sockets, so their services listen by themselves. It
records the id of a service's process in ``/run/units``, and the output of the
process in ``/var/log/units``, which a real host has in its journal.
"""

import os
import pathlib
import pwd
import shlex
import signal
import sys
import time

UNITS = pathlib.Path('/etc/systemd/system')
WANTED = UNITS / 'multi-user.target.wants'
STATE = pathlib.Path('/run/units')
LOGS = pathlib.Path('/var/log/units')
KILL_AFTER = 30   # seconds


def read_unit(name):
    """Return a unit's [Service]; of an option, all values."""
    options = {}
    section = None
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith('['):
            section = line
        elif '=' in line and section == '[Service]':
            option, _, value = line.partition('=')
            options.setdefault(option.strip(), []).append(value.strip())
    return options


def main_pid(name):
    """Return the process that runs, or None."""
    try:
        pid = int((STATE / name).read_text())
        state = pathlib.Path(f'/proc/{pid}/stat').read_text()
    except (OSError, ValueError):
        return None
    return None if state.rpartition(')')[2].split()[0] == 'Z' else pid


def make_directories(options):
    """Make the unit's directories in /run, for its user."""
    user = pwd.getpwnam(options.get('User', ['root'])[-1])
    for name in options.get('RuntimeDirectory', []):
        path = pathlib.Path('/run') / name
        path.mkdir(exist_ok=True)
        path.chmod(int(options.get('RuntimeDirectoryMode', ['755'])[-1], 8))
        os.chown(path, user.pw_uid, user.pw_gid)


def become(options):
    """Take on a unit's user, group and environment."""
    user = pwd.getpwnam(options.get('User', ['root'])[-1])
    os.initgroups(user.pw_name, user.pw_gid)
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    environment = {'HOME': user.pw_dir, 'USER': user.pw_name,
                   'PATH': '/usr/bin:/bin', 'LANG': 'C.UTF-8'}
    for values in options.get('Environment', []):
        for assignment in shlex.split(values):
            variable, _, value = assignment.partition('=')
            environment[variable] = value
    return environment


def start(name):
    if main_pid(name) is not None:
        return
    options = read_unit(name)
    STATE.mkdir(exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    make_directories(options)
    command = shlex.split(options['ExecStart'][-1])
    log = os.open(LOGS / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    executed, not_yet = os.pipe()   # exec closes both
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.chdir('/')
        os.umask(int(options.get('UMask', ['022'])[-1], 8))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            os.execve(command[0], command, become(options))
        except OSError as e:
            print(f'{command[0]}: {e}', file=sys.stderr, flush=True)
            os._exit(203)
    (STATE / name).write_text(str(pid))
    os.close(not_yet)
    os.read(executed, 1)


def stop(name):
    pid = main_pid(name)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER
    while main_pid(name) is not None:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    (STATE / name).unlink()


def enable(name):
    WANTED.mkdir(parents=True, exist_ok=True)
    if not (WANTED / name).is_symlink():
        (WANTED / name).symlink_to(UNITS / name)


def enable_now(name):
    enable(name)
    start(name)


def is_enabled(name):
    enabled = (WANTED / name).is_symlink()
    print('enabled' if enabled else 'disabled')
    return 0 if enabled else 1


def is_active(name):
    active = main_pid(name) is not None
    print('active' if active else 'inactive')
    return 0 if active else 3


COMMANDS = {
    'start': start,
    'stop': stop,
    'restart': lambda name: (stop(name), start(name))[0],
    'enable': enable,
    'enable --now': enable_now,
    'disable': lambda name: (WANTED / name).unlink(missing_ok=True),
    'is-enabled': is_enabled,
    'is-active': is_active,
    'daemon-reload': lambda name=None: None,
}


def main(arguments):
    command, *names = arguments
    if names[:1] == ['--now']:
        command += ' ' + names.pop(0)
    if os.geteuid() != 0 and command not in ('is-enabled', 'is-active'):
        sys.exit('systemctl: Access denied')
    names = [name if name.endswith('.service') else f'{name}.service'
             for name in names if not name.endswith('.socket')]
    if not names and command != 'daemon-reload':
        return 0
    return COMMANDS[command](*names) or 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
