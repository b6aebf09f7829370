# SPDX-License-Identifier: Apache-2.0
"""Images taken to another site, with a real Glance at either.

The steps R1 to R5 are in ``replication.rst``, "Replication".
"""

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import threading
import time
import uuid

import pytest

from glance_dedup.cli import entry
from glance_dedup.client import glance_api
from glance_dedup.transfer import image_sending
from glance_dedup.transfer import progress_file
from tests.functional import two_sites
from tests.support import daemons
from tests.support import repositories
from tests.support.repositories import mixture
from tests.support.repositories import noise

LIMIT = two_sites.LIMIT
MIB = two_sites.MIB
_CHILDREN = multiprocessing.get_context('forkserver')
# Long: the first test waits for both sites.
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(900),
    pytest.mark.needs('keystone', 'mariadb', 'openssl')]


@pytest.fixture(scope='module')
def sites():
    with two_sites.Sites() as sites:
        yield sites


class Found:
    def __init__(self, status, out, err):
        self.status = status
        self.err = err
        self.rows = ({row['image_id']: row for row in json.loads(out)}
                     if out else None)

    def results(self, *ids):
        return [self.rows[image_id]['result'] for image_id in ids]


def command(sites, *arguments, **options):
    return ['--repository', str(sites.home.path), '--socket', '', 'image',
            'replicate',
            *sites.options(**options), *map(str, arguments), '-f', 'json']


@pytest.fixture
def run(sites, monkeypatch, capfd):
    for name in [name for name in os.environ if name.startswith('OS_')]:
        monkeypatch.delenv(name)
    for name, value in sites.environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments, **options):
        capfd.readouterr()
        status = entry.main(command(sites, *arguments, **options))
        return Found(status, *capfd.readouterr())
    return run


# Properties that no API can give an image, or that differ between sites.
OWN = ('created_at', 'updated_at', 'virtual_size', 'stores', 'direct_url')


def same(sites, image_id):
    """Both Glances show, and serve, the same image."""
    here, there = (site.record(image_id) for site in (sites.home, sites.away))
    for record in (here, there):
        for name in OWN:
            record.pop(name, None)
        record['tags'].sort()
    assert here == there
    assert sites.home.digest(image_id) == sites.away.digest(image_id)
    if here['visibility'] == 'shared':
        assert sites.home.members(image_id) == sites.away.members(image_id)


def noted(sites):
    """Return the ids that the progress file has."""
    path = pathlib.Path(sites.home.path) / progress_file.NAME
    if not path.exists():
        return set()
    return {entry.image_id
            for entry in progress_file.decode(path.read_bytes())}


# -- images and their records -------------------------------------------------

def test_metadata_and_data(sites, run):
    demo = sites.cloud.connect('demo').current_project_id
    first = noise(2 * MIB, 1)
    ids = [
        sites.home.upload(first, owner=demo, os_distro='debian',
                          **{'a b': 'x y', 'min_disk': 3, 'min_ram': 64,
                             'tags': ['one', 'two']}),
        sites.home.upload(mixture(MIB, 2) + first, visibility='public',
                          protected=True),
        sites.home.upload(mixture(MIB, 3), visibility='community'),
        sites.home.upload(mixture(MIB, 4), os_hidden=True, disk_format='ami',
                          container_format='ami'),
        sites.home.upload(b'', name=None),
        sites.home.upload(mixture(MIB, 5), owner=demo)]
    sites.home.share(ids[-1], one='accepted', two='pending', three='rejected')
    planned = run('--all', '--dry-run')
    assert planned.status == 0 and {
        row['result'] for row in planned.rows.values()} == {'to be replicated'}
    assert not any(map(sites.away.record, ids)) and not sites.away.held()
    found = run('--all')
    assert found.status == 0, found.err
    assert {(row['result'], row['verified_by'])
            for row in found.rows.values()} == {('replicated', 'sha512')}
    assert set(found.rows) == set(ids) == set(sites.away.held())
    for image_id in ids:
        same(sites, image_id)
    # Whichever of the two comes second has the blocks of the other.
    less, more = sorted(found.rows[image_id]['sent_bytes']
                        for image_id in ids[:2])
    assert less < MIB * 1.1 < 2 * MIB < more
    again = run('--all')
    assert {(row['result'], row['sent_bytes'])
            for row in again.rows.values()} == {('present', 0)}
    assert not noted(sites)


def test_what_cannot_be_as_at_home(sites, run):
    owner = uuid.uuid4().hex
    image_id = sites.home.upload(
        noise(MIB, 10), owner=owner, guarded='yes', other='yes',
        cinder_encryption_key_id=str(uuid.uuid4()),
        cinder_encryption_key_deletion_policy='on_image_deletion')
    found = run(image_id)
    assert found.status == 0, found.err
    notes = ' '.join(found.rows[image_id]['notes'])
    assert 'guarded is refused' in notes and 'deletion_policy is with' in notes
    assert f'the project {owner}, whose it is, is not known' in notes
    here, there = (site.record(image_id) for site in (sites.home, sites.away))
    assert set(here) - set(there) == {
        'guarded', 'cinder_encryption_key_deletion_policy'}
    assert there['other'] == 'yes' and there['owner'] == owner
    assert there['cinder_encryption_key_id']
    # Its deletion would request a key that does not exist here.
    sites.home.glance.patch(
        f'/images/{image_id}', headers=glance_api._PATCH, json=[
            {'op': 'remove', 'path': f'/{name}'} for name in here
            if name.startswith('cinder_')])


@contextlib.contextmanager
def uploading(site):
    """An image in the middle of its upload."""
    image_id = site.create()
    end = threading.Event()

    def pieces():
        yield b'x' * MIB
        assert end.wait(LIMIT)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        upload = pool.submit(
            site.glance.put, f'/images/{image_id}/file', data=pieces(),
            headers={'Content-Type': 'application/octet-stream'})
        try:
            deadline = time.monotonic() + LIMIT
            while site.record(image_id)['status'] != 'saving':
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield image_id
        finally:
            end.set()
            upload.result(LIMIT)


def test_what_is_not_active(sites, run):
    queued = sites.home.create()
    deactivated = sites.home.upload(noise(MIB, 11))
    answer = sites.home.glance.post(
        f'/images/{deactivated}/actions/deactivate')
    assert answer.status_code == 204
    with uploading(sites.home) as saving:
        found = run(queued, deactivated, saving)
    assert found.status == 0, found.err
    assert [found.rows[image_id]['error']
            for image_id in (queued, deactivated, saving)] == [
        f'at home it is {status}'
        for status in ('queued', 'deactivated', 'saving')]
    assert set(found.results(queued, deactivated, saving)) == {'left out'}
    unknown = run(str(uuid.uuid4()))
    assert [row['error'] for row in unknown.rows.values()] == [
        'Glance at home does not know it']
    for image_id in (queued, deactivated, saving):
        assert sites.away.record(image_id) is None
        sites.home.delete(image_id)


def test_ids_that_are_taken(sites, run):
    active, queued = (sites.home.upload(noise(MIB, seed))
                      for seed in (12, 13))
    sites.away.upload(noise(MIB, 14), id=active)
    sites.away.create(id=queued, owner='another')
    found = run(active, queued)
    assert found.status == 3 and found.results(active, queued) == [
        'failed', 'failed']
    assert 'with other bytes' in found.rows[active]['error']
    assert 'to the project another at' in found.rows[queued]['error']
    assert sites.away.record(queued)['status'] == 'queued'
    sites.away.delete(queued)
    sites.home.delete(queued)
    sites.home.delete(active)
    saving = sites.home.upload(noise(MIB, 15))
    assert sites.away.create(
        id=saving, owner=sites.home.record(saving)['owner']) == saving
    assert run(saving).results(saving) == ['replicated']


def test_glance_there_verifies_the_data(sites, run):
    """An image with other bytes than Glance's hash at home is refused."""
    image_id = sites.home.upload(noise(MIB, 16), store='file')
    with repositories.open_repository(sites.home.path) as repo:
        repositories.put(repo, image_id, noise(MIB, 17))
    found = run(image_id)
    assert found.status == 3 and 'did not take the data' in (
        found.rows[image_id]['error'])
    assert 'has not the hash' in found.rows[image_id]['error']
    assert sites.away.record(image_id)['status'] == 'queued'
    assert image_id not in sites.away.held() and image_id in noted(sites)
    with repositories.open_repository(sites.home.path) as repo:
        repo.delete(image_id)
        repositories.put(repo, image_id, noise(MIB, 16))
    assert run(image_id).results(image_id) == ['replicated']
    same(sites, image_id)
    assert image_id not in noted(sites)


def test_a_task_of_glance_there_that_fails(sites, run, monkeypatch):
    """Glance deletes the data there; the run has Glance add it once more."""
    image_id = sites.home.upload(noise(MIB, 18))
    real = glance_api.Glance.add_data
    values = ['0' * 128]

    def add_data(self, image_id, url, name, value):
        real(self, image_id, url, name, values.pop() if values else value)
    monkeypatch.setattr(glance_api.Glance, 'add_data', add_data)
    found = run(image_id)
    assert found.results(image_id) == ['replicated'], found.err
    # The second time the blocks were there.
    assert MIB < found.rows[image_id]['sent_bytes'] < 2 * MIB
    same(sites, image_id)
    assert image_id not in noted(sites)


# -- permissions --------------------------------------------------------------

@pytest.mark.parametrize('options, status, words', [
    ({'to-cloud': 'admin'}, 3, "has not the role 'service' (but admin"),
    ({'from-cloud': 'demo'}, 3, 'does not take us for an administrator'),
    ({'to-cloud': 'home'}, 3, 'both clouds have the same Glance'),
    ({'to-cloud': 'nobody'}, 3, 'cannot reach Glance'),
    ({'to-cloud': 'nowhere'}, 3, 'nowhere'),
    ({'to-cloud': None}, 2, '--from-cloud and --to-cloud belong together'),
    ({'cert': None, 'key': None}, 2, 'only from operators: use --cert'),
    ({'rate': '0'}, 2, 'more than 0')])
def test_refused_before_anything_is_begun(sites, run, options, status, words):
    image_id = sites.home.upload(b'x')
    found = run(image_id, **options)
    assert found.status == status and words in found.err, found.err
    assert sites.away.record(image_id) is None
    assert image_id not in noted(sites)


def test_without_a_glance(sites, run):
    """Without clouds the run sends only the data, and reports that."""
    image_id = sites.home.upload(noise(MIB, 18))
    found = run(image_id, **{'from-cloud': None, 'to-cloud': None})
    assert found.status == 0 and 'no Glance is asked or told' in found.err
    assert found.results(image_id) == ['replicated']
    assert image_id in sites.away.held()
    assert sites.away.record(image_id) is None
    # With clouds, a run that finds an image there adds no location of it.
    found = run(image_id)
    assert found.results(image_id) == ['failed']
    assert 'glance-dedup image delete' in found.rows[image_id]['error']
    with repositories.open_repository(sites.away.path) as repo:
        repo.delete(image_id)
    # No block is sent once more.
    found = run(image_id)
    assert found.results(image_id) == ['replicated']
    assert found.rows[image_id]['sent_bytes'] < MIB / 10
    same(sites, image_id)


# -- deleting -----------------------------------------------------------------

def at(monkeypatch, place, name, act):
    """Call a function right after the first call of another."""
    real = getattr(place, name)
    todo = [act]

    def wrapped(*args, **kwargs):
        result = real(*args, **kwargs)
        if todo:
            todo.pop()()
        return result
    monkeypatch.setattr(place, name, wrapped)


DELETING = {
    'recorded': (progress_file.Underway, 'recorded'),
    'sent': (image_sending._Sender, '_send_lots'),
    'located': (glance_api.Glance, 'add_data')}


@pytest.mark.parametrize('moment', DELETING)
def test_deleted_at_home_in_the_middle(sites, run, monkeypatch, moment):
    image_id = sites.home.upload(noise(MIB, 20), protected=True)
    at(monkeypatch, *DELETING[moment], lambda: sites.home.delete(image_id))
    found = run(image_id)
    assert found.status == 0, found.err
    assert found.results(image_id) == ['deleted']
    assert sites.away.record(image_id) is None
    assert image_id not in sites.away.held()
    assert image_id not in noted(sites)


@pytest.mark.parametrize('moment', DELETING)
def test_deleted_there_in_the_middle(sites, run, monkeypatch, moment):
    image_id = sites.home.upload(noise(MIB, 21))
    at(monkeypatch, *DELETING[moment], lambda: sites.away.delete(image_id))
    found = run(image_id)
    assert found.status == 0, found.err
    assert found.results(image_id) == ['left out']
    assert 'it was deleted at the other site' in found.rows[image_id]['error']
    assert sites.away.record(image_id) is None
    assert image_id not in noted(sites)
    # It is left out: a user there has deleted it on purpose.
    again = run(image_id)
    assert again.results(image_id) == ['left out'] and 'was deleted there' in (
        again.rows[image_id]['error'])
    assert sites.home.digest(image_id)
    assert image_id not in noted(sites)


def test_deleted_at_both_at_once(sites, run, monkeypatch):
    image_id = sites.home.upload(noise(MIB, 22))

    def delete():
        sites.home.delete(image_id)
        sites.away.delete(image_id)
    at(monkeypatch, *DELETING['sent'], delete)
    assert run(image_id).results(image_id) == ['deleted']
    assert image_id not in sites.away.held()
    assert image_id not in noted(sites)


def test_two_ways(sites, run):
    """A replica that is deleted at home stays where it was stored first."""
    image_id = sites.home.upload(noise(MIB, 23))
    sites.away.upload(noise(MIB, 23), id=image_id)
    assert run(image_id).results(image_id) == ['present']
    sites.home.delete(image_id)
    assert run(image_id).results(image_id) == ['left out']
    assert sites.away.digest(image_id)


# -- killed -------------------------------------------------------------------

#: The calls that change something, at home or there; each may be the last.
STEPS = [
    (progress_file.Underway, 'begin'), (glance_api.Glance, 'create'),
    (progress_file.Underway, 'recorded'), (glance_api.Glance, 'add_member'),
    (image_sending._Sender, '_begin'), (image_sending._Sender, '_send_lots'),
    (progress_file.Underway, 'located'), (image_sending._Sender, 'run'),
    (glance_api.Glance, 'add_data'), (glance_api.Glance, 'wait_for_data'),
    (glance_api.Glance, 'set'), (progress_file.Underway, 'end')]


def child(arguments, environment, step, log):
    """Replicate in a process that is killed after a step."""
    os.environ.update(environment)
    with open(log, 'w') as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    if step is not None:
        place, name = STEPS[step]
        real = getattr(place, name)

        def killed(*args, **kwargs):
            real(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(place, name, killed)
    sys.exit(entry.main(arguments))


def start(sites, step, log, *arguments, **options):
    process = _CHILDREN.Process(target=child, args=(
        command(sites, *arguments, **options), sites.environment, step,
        str(log)))
    process.start()
    return process


# Long: a process for each step replicates, and waits for Glance.
def test_killed_after_any_step(sites, run, tmp_path):
    _CHILDREN.set_forkserver_preload([__name__, 'openstack'])
    data = noise(MIB, 30)
    ids = []
    for number in range(len(STEPS)):
        ids.append(sites.home.upload(
            data + noise(65536, 31 + number), protected=True))
        sites.home.share(ids[-1], one='accepted')

    def kill(number):
        process = start(sites, number, tmp_path / str(number), ids[number])
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL, (
            (tmp_path / str(number)).read_text())

    for number in range(len(STEPS)):
        kill(number)
    # Each run also completes images that have progressed as far as Glance
    # there.
    under_way = noted(sites) & set(ids)
    assert set(ids[:8]) <= under_way <= set(ids[:-1])
    # Images that are committed and unknown to Glance are for the command
    # orphans.
    gone = [image_id for image_id, (place, name) in zip(ids, STEPS)
            if name in ('begin', 'create', '_send_lots', 'wait_for_data',
                        'set')
            and image_id in under_way]
    kept = [image_id for image_id in ids if image_id not in gone]
    # Images that are deleted at home now are deleted there, although not
    # named.
    for image_id in gone:
        sites.home.delete(image_id)
    found = run(*kept)
    assert found.status == 0, found.err
    assert set(found.results(*gone)) == {'deleted'}
    assert set(found.results(*kept)) <= {'replicated', 'present'}
    assert not noted(sites) & set(ids)
    for image_id in gone:
        assert sites.away.record(image_id) is None
    for image_id in kept:
        same(sites, image_id)
    held = sites.away.held()
    assert not set(gone) & set(held) and set(kept) <= set(held)


def taken(site):
    """Return the bytes that a site takes on the disk."""
    return sum(found.stat().st_blocks * 512
               for found in pathlib.Path(site.path, 'groups').iterdir())


# Long: a process replicates, slowly, until it is interrupted.
def test_interrupted(sites, run, tmp_path):
    # The rest takes longer than this process may have to wait for its turn.
    image_id = sites.home.upload(noise(32 * MIB, 50))
    log = tmp_path / 'log'
    process = start(sites, None, log, image_id, rate='1M')
    deadline = time.monotonic() + LIMIT
    before = taken(sites.away)
    while taken(sites.away) < before + MIB:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    process.join(LIMIT)
    assert process.exitcode == 130, log.read_text()
    assert 'start the command again to go on' in log.read_text()
    found = run(image_id)
    # Glance there may have got the location at the last moment.
    assert found.results(image_id)[0] in ('replicated', 'present')
    assert found.rows[image_id]['sent_bytes'] < 32 * MIB
    same(sites, image_id)


# -- a site that is away ------------------------------------------------------

def test_the_receiver_is_away(sites, run):
    ids = [sites.home.upload(noise(MIB, seed)) for seed in (60, 61, 62)]
    sites.daemon.stop()
    try:
        found = run(*ids)
    finally:
        sites.daemon.start()
    assert found.status == 3 and list(found.rows) == ids[:1]
    assert '2 more images were not tried' in found.err
    assert sites.url in found.rows[ids[0]]['error']
    found = run(*ids)
    assert found.results(*ids) == ['replicated'] * 3


def test_one_that_is_damaged_does_not_stop_the_others(sites, run):
    lost, good = (sites.home.upload(noise(MIB, seed)) for seed in (64, 65))
    with repositories.open_repository(sites.home.path) as repo:
        repo.delete(lost)
    found = run(lost, good)
    assert found.status == 3
    assert found.results(lost, good) == ['failed', 'replicated']
    assert lost in found.rows[lost]['error']
    assert sites.away.record(lost) is None
    sites.home.delete(lost)


# -- continuous ---------------------------------------------------------------

@pytest.fixture
def daemon(sites):
    """The daemon at home."""
    with daemons.Daemon(sites.home.path) as daemon:
        daemon.environment = sites.environment
        yield daemon


def configure(sites, daemon, **options):
    options = {'target_url': sites.url, 'cert': sites.cert, 'key': sites.key,
               'ca_file': sites.ca_file, 'from_cloud': 'home',
               'to_cloud': 'away', 'interval': 1, **options}
    daemon.write_config()
    with open(daemon.config, 'a') as f:
        f.write('[replication]\n' + ''.join(
            f'{name} = {value}\n' for name, value in options.items()))


def wait_for(daemon, condition):
    daemon.wait_for(condition, LIMIT)


# Long: a daemon starts, finds images each second, and waits for Glance.
def test_continuous(sites, run, daemon):
    project = uuid.uuid4().hex
    wanted = [sites.home.upload(noise(MIB, seed), replicate='yes',
                                owner=project) for seed in (70, 71)]
    others = [sites.home.upload(noise(MIB, 72), owner=project),
              sites.home.upload(noise(MIB, 73), replicate='yes')]
    configure(sites, daemon, projects=project, properties='replicate=yes')
    daemon.start().wait_for_catalog()
    wait_for(daemon, lambda: all(map(sites.away.record, wanted)) and
             daemon.status()['replication']['pending'] == 0)
    for image_id in wanted:
        same(sites, image_id)
    # A new image is picked up, and so is an image that gets the property.
    wanted.append(sites.home.upload(noise(MIB, 74), replicate='yes',
                                    owner=project))
    sites.home.change(others[0], replicate='yes')
    wanted.append(others.pop(0))
    wait_for(daemon, lambda: all(
        (sites.away.record(image_id) or {}).get('status') == 'active'
        for image_id in wanted))
    assert not any(map(sites.away.record, others))
    daemon.run('replicate')
    status = daemon.status()
    assert status['replication']['replicated'] == 4
    assert status['replication']['sent_bytes'] > 3 * MIB
    assert status['replication']['failed'] == {}
    task = status['tasks']['replicate']
    assert task['last']['error'] is None and task['last_success']
    metrics = daemon.request('GET', '/metrics').body.decode()
    assert 'dedupd_replication_images_total 4.0' in metrics
    assert 'dedupd_task_runs_total{task="replicate"}' in metrics
    # The command finds all of it there.
    assert set(run(*wanted).results(*wanted)) == {'present'}
    assert daemon.stop() == 0


# Long: a daemon replicates at 1 MiB a second, is killed, and starts again.
def test_continuous_that_fails_and_is_killed(sites, run, daemon):
    project = uuid.uuid4().hex
    # At its rate this image would take much longer than the test.
    size = 24 * MIB
    image_id = sites.home.upload(noise(size, 80), owner=project)
    bad = sites.home.upload(noise(MIB, 81), owner=project)
    with repositories.open_repository(sites.home.path) as repo:
        upload_id = repo.stat(bad).upload_id
        repo.delete(bad, upload_id)
        repositories.put(repo, bad, noise(MIB, 82))
    configure(sites, daemon, projects=project, rate_mib=1)
    before = taken(sites.away)
    daemon.start().wait_for_catalog()
    # The bad one may have had its turn before.
    wait_for(daemon, lambda: image_id in noted(sites) and
             taken(sites.away) > before + 2 * MIB)
    running = daemon.status()['tasks']['replicate']
    assert running['state'] == 'running' and running['total'] == size + MIB
    # Others take their turns meanwhile.
    assert daemon.run('collect')['last']['error'] is None
    daemon.kill()
    assert image_id in noted(sites)
    configure(sites, daemon, projects=project)
    daemon.start().wait_for_catalog()
    wait_for(daemon, lambda: daemon.status()['tasks']['replicate']['runs'])
    same(sites, image_id)
    found = daemon.status()['replication']
    assert list(found['failed']) == [bad] and found['pending'] == 1
    assert 'has not the hash' in found['failed'][bad]['error']
    assert 0 < found['failed'][bad]['seconds_left'] <= 60
    assert found['sent_bytes'] < size
    # The bad image is not repeated at once.
    again = daemon.run('replicate')
    assert again['last']['result']['failed'] == {}
    sites.home.delete(bad)
    wait_for(daemon, lambda: sites.away.record(bad) is None)
    assert daemon.stop() == 0
    assert not noted(sites) & {image_id, bad}
