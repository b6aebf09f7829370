# SPDX-License-Identifier: Apache-2.0
"""The functions that the plugin is tested with do what DevStack's do.

With the variable DEVSTACK naming a checkout of DevStack, the test checks the
expectations against DevStack's own functions.
"""

import re

import pytest

from tests.devstack import roots

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300),
              pytest.mark.needs('sudo')]

SETTING = """
set -o errexit
umask 022
DEST=/opt/stack DATA_DIR=/opt/stack/data STACK_USER=stack OFFLINE=True
SYSTEMD_DIR=/etc/systemd/system SYSTEMCTL="sudo systemctl"
RABBIT_HOST=127.0.0.1 RABBIT_USERID=guest RABBIT_PASSWORD=guest
ENABLED_SERVICES=g-api,mysql LOG_COLOR=False
GLOBAL_VENV=True DEVSTACK_VENV=/opt/stack/data/venv
source {functions}
source {messaging}
cd "$(mktemp -d)"
"""

CONF = 'printf "[a]\\nx = 1\\ny=2\\n[b]\\nx = 3\\n" >f\n'

# Scripts, and their output.
CASES = {
    'iniset-makes-a-file': (
        'iniset f a x "1  2"; cat f', '\n[a]\nx = 1 2\n'),
    'iniset-adds-a-section': (
        CONF + 'iniset f c x 9; cat f',
        '[a]\nx = 1\ny=2\n[b]\nx = 3\n\n[c]\nx = 9\n'),
    'iniset-adds-first-in-its-section': (
        CONF + 'iniset f a z 9; cat f',
        '[a]\nz = 9\nx = 1\ny=2\n[b]\nx = 3\n'),
    'iniset-replaces-in-its-section-alone': (
        CONF + 'iniset f b x 9; iniset f a y 8; cat f',
        '[a]\nx = 1\ny=8\n[b]\nx = 9\n'),
    'iniset-knows-a-name-from-its-beginning': (
        'iniset f a xy 1; iniset f a x 2; iniset f a x 3; cat f',
        '\n[a]\nx = 3\nxy = 1\n'),
    'iniset-takes-any-character': (
        r"""iniset f a x 'a&b/c|d\e'; iniset f a x 'f&g/h|i\j'; cat f""",
        '\n[a]\nx = f&g/h|i\\j\n'),
    'iniset-empties': (
        CONF + 'iniset f a x ""; iniset f b y ""; cat f',
        '[a]\nx = \ny=2\n[b]\ny = \nx = 3\n'),
    'iniset-as-root': (
        'iniset -sudo /etc/f a x 1; stat -c %U /etc/f; cat /etc/f',
        'root\n\n[a]\nx = 1\n'),
    'iniget': (
        CONF + 'iniget f a x; iniget f a y; iniget f b x; iniget f b y',
        '1\n2\n3\n\n'),
    'ini_has_option': (
        CONF + 'iniset f b empty ""\n'
        'for o in "a x" "a y" "b x" "b y" "b empty" "c x"; do\n'
        'if ini_has_option f $o; then echo yes; else echo no; fi; done',
        'yes\nyes\nyes\nno\nyes\nno\n'),
    'is_service_enabled': (
        'for s in g-api glance mysql rabbit g api "rabbit mysql"; do\n'
        'if is_service_enabled $s; then echo yes; else echo no; fi; done',
        'yes\nyes\nyes\nno\nno\nno\nyes\n'),
    'enable_service': (
        'enable_service one g-api two; echo $ENABLED_SERVICES',
        'g-api,mysql,one,two\n'),
    'disable_service': (
        'disable_service g-api three; enable_service three >/dev/null\n'
        'echo $ENABLED_SERVICES', 'mysql\n'),
    'trueorfalse': (
        'for V in True yes 1 TRUE False no 0 maybe ""; do\n'
        'echo $(trueorfalse False V) $(trueorfalse True V); done',
        'True True\n' * 4 + 'False False\n' * 3 + 'False True\n' * 2),
    'plugins': (
        'enable_plugin one file:///x\n'
        'is_plugin_enabled one && echo ${GITDIR[one]}\n'
        'is_plugin_enabled two || echo no', '/opt/stack/one\nno\n'),
    'get_transport_url': (
        'RABBIT_PASSWORD="" get_transport_url; enable_service rabbit\n'
        'get_transport_url; iniset_rpc_backend x f; cat f',
        'rabbit://guest:guest@127.0.0.1:5672/\n\n[DEFAULT]\n'
        'transport_url = rabbit://guest:guest@127.0.0.1:5672/\n'),
    'pip_install-offline': (
        'pip_install what-is-nowhere; echo $?', '0\n'),
    'test_with_retry': (
        'test_with_retry "mkdir d" words 5; ls', 'd\n'),
    'die': (
        '(die 7 some words 2>&1) | grep -o "some words"\n'
        'set +o errexit\n'
        '(false; die 7 words) 2>/dev/null >&2; echo $?\n'
        '((exit 5); die 7 words) 2>/dev/null >&2; echo $?',
        'some words\n1\n5\n'),
    'test_with_retry-ends': (
        'set +o errexit; (test_with_retry false "it is not up" 1) 2>&1 |\n'
        'grep -o "it is not up"', 'it is not up\n'),
    'run_process': (
        'run_process one "/bin/sleep 99"; ls /etc/systemd/system | grep one '
        '|| echo none\n'
        'run_process g-api "/bin/sleep 99" >/dev/null\n'
        'u=/etc/systemd/system/devstack@g-api.service\n'
        'for o in "Service User" "Service ExecStart" "Service KillMode" '
        '"Install WantedBy"; do iniget $u $o; done\n'
        '$SYSTEMCTL is-enabled devstack@g-api\n'
        'ps -C sleep -o user=,args=\n'
        'stop_process g-api; ps -C sleep -o args= || echo none',
        'none\nstack\n/bin/sleep 99\nprocess\nmulti-user.target\nenabled\n'
        'stack /bin/sleep 99\nenabled\nnone\n'),
    'run_process-uwsgi': (
        'enable_service u; run_process u "/bin/echo uwsgi" >/dev/null\n'
        'u=/etc/systemd/system/devstack@u.service\n'
        'iniget $u Service ExecStart; iniget $u Service Type',
        '/bin/echo uwsgi --venv /opt/stack/data/venv\nnotify\n'),
    'run_process-wants-a-path': (
        'set +o errexit; (run_process g-api "sleep 99") >/dev/null 2>&1\n'
        'echo $?', '1\n'),
    'merge_config_group': (
        'C=$PWD/x/conf\nprintf "[[local|localrc]]\\nA=1\\n'
        '[[post-config|\\$C]]\\n[a]\\nx = 1 2\\n# no\\n[b]\\ny=\\$DEST/z\\n'
        '[[extra|\\$C]]\\n[a]\\nx = 5\\n" >l\n'
        'merge_config_group l post-config 2>/dev/null\n'
        'iniget $C a x; iniget $C b y',
        '1 2\n/opt/stack/z\n'),
}


@pytest.fixture(scope='module')
def root(machine):
    with machine.root() as root:
        yield root


@pytest.mark.parametrize('script, expected', CASES.values(), ids=CASES)
def test_function(root, script, expected):
    place, messaging = roots.DEVSTACK, '/dev/null'
    if roots.REAL:
        place = roots.REAL_COPY
        messaging = place / 'lib/rpc_backend'
    setting = SETTING.format(functions=place / 'functions',
                             messaging=messaging)
    said = root.run('bash', '-c', setting + script, user='stack')
    # The output may align its columns with spaces.
    assert re.sub(' +', ' ', said) == expected
