# SPDX-License-Identifier: Apache-2.0

"""Asks libvirt about servers, and begins and ends their backup jobs.

This is a program of its own, one request for each process: libvirt's client
takes 9.5 MiB of memory, and a rank has 35 in all. A job belongs to QEMU, so
nothing is lost when the process ends. The request is a JSON object on standard
input, with ``uri``, ``server``, ``do`` and its arguments, the answer one on
standard output: what the function of that name returns, or ``error`` and
``code``, the number of libvirt's error (0: of none).
"""

import contextlib
import json
import sys
import time
from typing import Any
from xml.etree import ElementTree
from xml.sax import saxutils

import libvirt

#: Seconds for a job that was ended to be gone. libvirt notices the end only
#: behind earlier events of the server; each time that the server opens or
#: closes a serial port, as its agent does, this takes 30 s more.
END_SECONDS = 150.0
_PAUSE = 0.1


class _Refused(Exception):
    """The request cannot be done, for the reason in the message."""


def _running_job(domain: Any) -> ElementTree.Element | None:
    """The backup job of a server; None: it has none."""
    try:
        return ElementTree.fromstring(domain.backupGetXMLDesc())
    except libvirt.libvirtError as e:
        if e.get_error_code() == libvirt.VIR_ERR_NO_DOMAIN_BACKUP:
            return None
        raise


def _exports(job: ElementTree.Element) -> dict[str, str]:
    return {disk.get('name', ''): disk.get('exportname', '')
            for disk in job.iterfind('disks/disk')
            if disk.get('backup') != 'no'}


def _end_job(domain: Any, prefix: str) -> None:
    """End the server's backup job, if it is ours; wait until it is gone."""
    job = _running_job(domain)
    if job is None:
        return
    if not all(name.startswith(prefix) for name in _exports(job).values()):
        raise _Refused('it has a backup job of another program. Wait until '
                       'that has ended, or end it: virsh domjobabort '
                       f'{domain.name()}')
    domain.abortJob()
    deadline = time.monotonic() + END_SECONDS
    while _running_job(domain) is not None:
        if time.monotonic() > deadline:
            raise _Refused('its last backup job does not end. See the log of '
                           'libvirt')
        time.sleep(_PAUSE)


# -- checkpoints --------------------------------------------------------------

def _define(domain: Any, checkpoint: str, targets: list[str],
            flags: int) -> Any:
    """Notify libvirt of a checkpoint whose bitmaps QEMU has."""
    name = saxutils.quoteattr(checkpoint)
    disks = ''.join(
        f'<disk name={saxutils.quoteattr(target)} checkpoint="bitmap" '
        f'bitmap={name}/>' for target in targets)
    return domain.checkpointCreateXML(
        f'<domaincheckpoint><name>{saxutils.escape(checkpoint)}</name>'
        f'<creationTime>1</creationTime><disks>{disks}</disks>'
        '</domaincheckpoint>',
        libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE | flags)


def _forget(domain: Any, checkpoint: str) -> None:
    """Have libvirt forget a checkpoint; the bitmaps stay."""
    with contextlib.suppress(libvirt.libvirtError):
        domain.checkpointLookupByName(checkpoint).delete(
            libvirt.VIR_DOMAIN_CHECKPOINT_DELETE_METADATA_ONLY)


def _is_whole(domain: Any, checkpoint: str, target: str) -> bool:
    """Return whether the bitmap is there, and has noted every write."""
    try:
        _define(domain, checkpoint, [target],
                libvirt.VIR_DOMAIN_CHECKPOINT_CREATE_REDEFINE_VALIDATE)
    except libvirt.libvirtError as e:
        if e.get_error_code() == libvirt.VIR_ERR_CHECKPOINT_INCONSISTENT:
            return False
        raise
    finally:
        _forget(domain, checkpoint)
    return True


def _remove(domain: Any, checkpoint: str, target: str) -> None:
    """Remove a bitmap, if it is there."""
    _forget(domain, checkpoint)
    try:
        _define(domain, checkpoint, [target], 0).delete(0)
    except libvirt.libvirtError:
        # A bitmap that is not there; or one that stays, and costs a bit for
        # each 64 KiB.
        _forget(domain, checkpoint)


def _size(domain: Any, target: str) -> int:
    """A disk's bytes; 0: libvirt does not know."""
    try:
        return domain.blockInfo(target)[0]
    except libvirt.libvirtError:
        return 0


# -- requests -----------------------------------------------------------------

def describe(domain: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Its name and UUID, whether it runs, and the disks that it writes to."""
    root = ElementTree.fromstring(domain.XMLDesc(
        0 if domain.isActive() else libvirt.VIR_DOMAIN_XML_INACTIVE))
    disks = []
    for disk in root.iterfind('devices/disk'):
        target, source = disk.find('target'), disk.find('source')
        driver = disk.find('driver')
        if (disk.get('device', 'disk') != 'disk' or target is None
                or disk.find('readonly') is not None):
            continue
        disks.append({
            'target': target.get('dev', ''),
            'size': _size(domain, target.get('dev', '')),
            'format': (driver.get('type', 'raw') if driver is not None
                       else 'raw'),
            'path': '' if source is None else (
                source.get('file') or source.get('dev') or '')})
    return {'name': domain.name(), 'uuid': domain.UUIDString(),
            'running': bool(domain.isActive()), 'disks': disks}


def find(domain: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return its backup job's exports, and their checkpoints, by target."""
    job = _running_job(domain)
    if job is None:
        return {'exports': {}, 'since': {}}
    return {'exports': _exports(job),
            'since': {disk.get('name', ''): disk.get('incremental')
                      for disk in job.iterfind('disks/disk')}}


def end(domain: Any, request: dict[str, Any]) -> dict[str, Any]:
    """End our job, and remove the checkpoints that are not needed.

    `done` is false if the server is shut off, so that they stay.
    """
    try:
        if domain.isActive():
            _end_job(domain, request['prefix'])
            for disk in request['disks']:
                for checkpoint in disk['others']:
                    _remove(domain, checkpoint, disk['target'])
            return {'done': True}
    except libvirt.libvirtError:
        if domain.isActive():
            raise
        # It was shut off in the middle, and its job has ended with it.
    return {'done': False}


def begin(domain: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Begin a job, with a new checkpoint.

    Gives the targets whose bitmaps since the checkpoint before are exported.
    """
    bases: dict[str, list[str]] = {}
    for disk in request['disks']:
        base = disk['checkpoint']
        if base and _is_whole(domain, base, disk['target']):
            bases.setdefault(base, []).append(disk['target'])
        elif base:
            _remove(domain, base, disk['target'])
    try:
        for base, targets in bases.items():
            _define(domain, base, targets, 0)
        known = {target: base for base, targets in bases.items()
                 for target in targets}
        checkpoint = any(disk['bitmap'] for disk in request['disks'])
        domain.backupBegin(
            _backup_xml(request, known, _all_targets(domain)),
            _checkpoint_xml(request, _all_targets(domain))
            if checkpoint else None)
    finally:
        for name in [*bases, request['checkpoint']]:
            _forget(domain, name)
    return {'incremental': sorted(known)}


def _all_targets(domain: Any) -> list[str]:
    root = ElementTree.fromstring(domain.XMLDesc(0))
    return [target.get('dev', '')
            for target in root.iterfind('devices/disk/target')]


def _backup_xml(request: dict[str, Any], known: dict[str, str],
                targets: list[str]) -> str:
    root = ElementTree.Element('domainbackup', mode='pull')
    ElementTree.SubElement(root, 'server', transport='unix',
                           socket=request['socket'])
    disks = ElementTree.SubElement(root, 'disks')
    wanted = {disk['target']: disk for disk in request['disks']}
    for target in targets:
        if target not in wanted:
            ElementTree.SubElement(disks, 'disk', name=target, backup='no')
            continue
        disk = wanted[target]
        fields = {'backupmode': 'full'}
        if target in known:
            fields = {'backupmode': 'incremental',
                      'incremental': known[target],
                      'exportbitmap': request['bitmap']}
        element = ElementTree.SubElement(
            disks, 'disk', name=target, backup='yes', type='file',
            exportname=disk['export'])
        element.attrib.update(fields)
        ElementTree.SubElement(element, 'scratch', file=disk['scratch'])
    return ElementTree.tostring(root, encoding='unicode')


def _checkpoint_xml(request: dict[str, Any], targets: list[str]) -> str:
    root = ElementTree.Element('domaincheckpoint')
    ElementTree.SubElement(root, 'name').text = request['checkpoint']
    disks = ElementTree.SubElement(root, 'disks')
    wanted = {disk['target'] for disk in request['disks'] if disk['bitmap']}
    for target in targets:
        ElementTree.SubElement(
            disks, 'disk', name=target,
            checkpoint='bitmap' if target in wanted else 'no')
    return ElementTree.tostring(root, encoding='unicode')


_REQUESTS = {'describe': describe, 'find': find, 'begin': begin, 'end': end}


def _lookup(connection: Any, server: str) -> Any:
    """A server by its UUID or its name."""
    try:
        return connection.lookupByUUIDString(server)
    except libvirt.libvirtError:
        return connection.lookupByName(server)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    # Errors are in the answer; libvirt would print them, too.
    libvirt.registerErrorHandler(lambda context, error: None, None)
    try:
        connection = libvirt.open(request['uri'])
        try:
            return _REQUESTS[request['do']](
                _lookup(connection, request['server']), request)
        finally:
            connection.close()
    except libvirt.libvirtError as e:
        return {'error': str(e), 'code': e.get_error_code()}
    except _Refused as e:
        return {'error': str(e), 'code': 0}


if __name__ == '__main__':
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
