# SPDX-License-Identifier: Apache-2.0

"""One trial: hosts meet, try each property, and compare their findings.

Each host runs :class:`Trial` on the same repository at the same time. They
meet in ``locks/trial``. For each property every host acts once, while the
others observe. Each host removes its files, also when it is interrupted.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import os

from glance_dedup.base import access
from glance_dedup.base import exceptions
from glance_dedup.base import files
from glance_dedup.base import package_version
from glance_dedup.base import trialrecord
from glance_dedup.fstest import host_mailbox
from glance_dedup.fstest import properties
from glance_dedup.fstest import property_findings

_PLACE = os.path.join('locks', 'trial')
#: Names may be remembered for a minute, as NFS does by default.
STEP_LIMIT = 120.0


class Trial:
    """This host's part in it.

    :param path: the repository
    :param hosts: how many take part
    :param wait: seconds to wait for the others to come
    :param limit: seconds that another host may take for a step
    :param progress: called with the steps done, their total, and words
    """

    def __init__(self, path: str, hosts: int = 2, wait: float = 300.0,
                 limit: float = STEP_LIMIT,
                 progress: Callable[[int, int, str], None] | None = None):
        self._path = os.path.abspath(path)
        self._hosts = hosts
        self._wait = wait
        self._progress = progress or (lambda done, total, what: None)
        self._meeting = host_mailbox.Mailbox(
            self._path, os.path.join(self._path, _PLACE), limit)
        self._findings = property_findings.Findings()

    def run(self) -> list[property_findings.Finding]:
        """Try everything; the findings of all hosts together.

        :raises RepositoryNotFound: the directory is no repository
        :raises BusyError: another host did not come, or fell silent
        :raises RepositoryError: the directory is not one for this user
        :raises StorageError: the result could not be kept
        """
        if not files.is_directory(os.path.join(self._path, 'locks')):
            raise exceptions.RepositoryNotFound(
                f'{self._path} is not a repository: make it first, with '
                "'glance-dedup repository create'")
        access.require_user(self._path)
        try:
            with contextlib.suppress(FileExistsError):
                access.make_directory(
                    self._meeting.place, access.directory_mode(self._path))
            self._meeting.wait_for_all(self._hosts, self._wait, self._progress)
            self._try_all()
            self._compare()
            return list(self._findings.by_key.values())
        finally:
            self._meeting.clean()

    def _try_all(self) -> None:
        mailbox = self._meeting
        members = sorted([mailbox.me, *mailbox.others], key=lambda m: m.token)
        total = len(properties.TRIALS) * len(members) + 1
        for key, trial in properties.TRIALS.items():
            for actor in members:
                self._begin_step(total, key)
                trial(mailbox, self._findings, actor)
        self._begin_step(total, 'link')
        properties.link(mailbox, self._findings, members)

    def _begin_step(self, total: int, key: str) -> None:
        self._progress(self._meeting.step, total,
                       property_findings.PROPERTIES[key][0])
        self._meeting.step += 1

    def _compare(self) -> None:
        """Put all hosts' findings together; the first host keeps them.

        It does so before it sends its findings. So when another host has all
        findings, they are kept.
        """
        mailbox = self._meeting
        if mailbox.is_first():
            self._keep(self._hear_found())
            self._say_found()
            mailbox.receive('heard')
        else:
            self._say_found()
            self._hear_found()
            mailbox.send('heard', True)
        mailbox.over = True

    def _say_found(self) -> None:
        self._meeting.send('found', {
            'mount': dataclasses.asdict(trialrecord.mount_of(self._path)),
            'findings': {key: dataclasses.astuple(finding)[1:]
                         for key, finding in self._findings.by_key.items()}})

    def _hear_found(self) -> list[trialrecord.Mount]:
        """Take in the others' findings; return their mounts."""
        mounts = []
        for said in self._meeting.receive('found').values():
            mount = trialrecord.Mount(**said['mount'])
            for key, (verdict, seconds, detail) in said['findings'].items():
                self._findings.add(key, verdict, seconds,
                                   f'{mount.host}: {detail}')
            mounts.append(mount)
        return mounts

    def _keep(self, others: list[trialrecord.Mount]) -> None:
        found = self._findings.by_key.values()
        limited, unfit = ([f.title for f in found if f.verdict == verdict]
                          for verdict in (property_findings.LIMITED,
                                          property_findings.UNFIT))
        trialrecord.write(
            self._path, [trialrecord.mount_of(self._path), *others],
            package_version.version(), limited, unfit)
