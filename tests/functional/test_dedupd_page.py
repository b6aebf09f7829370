# SPDX-License-Identifier: Apache-2.0

"""The status page, in a real Chromium, of a real daemon.

Screenshots are kept in the directory that GLANCE_DEDUP_SCREENSHOTS names, or
beside the other files of the test.
"""

import base64
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import time

import pytest
import requests
from selenium import webdriver
from selenium.webdriver.chrome import service as chrome_service
from selenium.webdriver.common import by
from selenium.webdriver.common import keys

from dedupd.status import page
from dedupd.status import task_history
from tests.functional import dedupd_watched
from tests.support import cold_repositories
from tests.support import repositories
from tests.support import volume_tools

pytest_plugins = ['tests.support.object_fixtures']
pytestmark = [pytest.mark.slow, pytest.mark.needs('browser')]

PATIENCE = 60
CSS = by.By.CSS_SELECTOR
HOSTILE = '<img src=x onerror="window.hacked = 1">&amp;\u202e"\'</script>'
FLAGS = ('--headless=new', '--no-sandbox', '--disable-gpu', '--no-first-run',
         '--disable-background-networking', '--disable-component-update',
         '--disable-sync', '--disable-dev-shm-usage', '--lang=en')
WIDTHS = {'desktop': 1280, 'phone': 360, 'picture': 1000}

# The script finds the least contrast of all visible text, and its place:
# against the nearest background that is not transparent.
CONTRAST = """
const channel = (v) => (v /= 255) <= .03928 ? v / 12.92
  : ((v + .055) / 1.055) ** 2.4;
const light = ([r, g, b]) =>
  .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
const parse = (s) => s.match(/[\\d.]+/g).map(Number);
let worst = [21, ''];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const node = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || node.closest('script, noscript')
      || !node.getClientRects().length) {
    continue;
  }
  const style = getComputedStyle(node);
  const text = parse(node.namespaceURI.endsWith('svg') ? style.fill
    : style.color);
  let under = node;
  let ground = [255, 255, 255];
  for (; under; under = under.parentElement) {
    const c = parse(getComputedStyle(under).backgroundColor);
    if (c.length < 4 || c[3] > 0) {
      ground = c;
      break;
    }
  }
  const [a, b] = [light(text), light(ground)].sort((x, y) => y - x);
  const contrast = (a + .05) / (b + .05);
  if (contrast < worst[0]) {
    worst = [contrast, walker.currentNode.data];
  }
}
return worst;
"""


class Browser:
    """Chromium with helpers for the steps that tests repeat."""

    def __init__(self, directory):
        for program in ('chromium', 'chromedriver'):
            assert shutil.which(program), (
                f'{program} is missing; install the packages chromium and '
                'chromium-driver')
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which('chromium')
        for flag in (*FLAGS, f'--user-data-dir={directory}'):
            options.add_argument(flag)
        options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
        self.driver = webdriver.Chrome(
            options=options, service=chrome_service.Service(
                shutil.which('chromedriver'), log_output=subprocess.DEVNULL))
        self.driver.set_page_load_timeout(PATIENCE)
        self.driver.set_script_timeout(PATIENCE)

    def show(self, url, width='desktop', scheme='light', motion='reduce'):
        """Load a page, and wait until its figures are there."""
        self.driver.get('about:blank')
        self.driver.get_log('browser')
        self.driver.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', {
            'width': WIDTHS[width], 'height': 900, 'deviceScaleFactor': 1,
            'mobile': width == 'phone'})
        self.driver.execute_cdp_cmd('Emulation.setEmulatedMedia', {
            'features': [
                {'name': 'prefers-color-scheme', 'value': scheme},
                {'name': 'prefers-reduced-motion', 'value': motion}]})
        self.driver.get(url)
        self.wait_for(lambda: self.text('groups-note') != '')

    def wait_for(self, condition):
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.text_of_all()
            time.sleep(0.1)

    def text_of_all(self):
        return self.driver.find_element(CSS, 'body').text

    def element(self, id_):
        return self.driver.find_element(by.By.ID, id_)

    def all(self, selector):
        return self.driver.find_elements(CSS, selector)

    def text(self, id_):
        return self.element(id_).text.strip()

    def task(self, name):
        """Return a task's text, which is new with each status."""
        return self.script(
            f'return document.querySelector(\'[data-task="{name}"]\')'
            '.innerText')

    def value(self, id_):
        """Return the exact figure behind a shown one, or None."""
        value = self.element(id_).get_dom_attribute('value')
        return None if value is None else float(value)

    def script(self, text):
        return self.driver.execute_script(text)

    def require_silence(self):
        """The console has no errors or warnings."""
        assert self.driver.get_log('browser') == []

    def picture(self, height):
        """Return the page's upper part as a PNG."""
        width = self.script('return window.innerWidth')
        picture = self.driver.execute_cdp_cmd('Page.captureScreenshot', {
            'format': 'png', 'captureBeyondViewport': True,
            'clip': {'x': 0, 'y': 0, 'width': width, 'height': height,
                     'scale': 1}})
        return base64.b64decode(picture['data'])

    def keep(self, directory, name):
        """Save a picture of the whole page."""
        height = self.script('return document.documentElement.scrollHeight')
        directory = pathlib.Path(
            os.environ.get('GLANCE_DEDUP_SCREENSHOTS', directory))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f'{name}.png').write_bytes(self.picture(height))


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
    it = Browser(tmp_path_factory.mktemp('browser'))
    yield it
    it.driver.quit()


def fill(path):
    """Store some images with common blocks, of three projects."""
    base = repositories.mixture(3 << 20, seed=1)
    with contextlib.closing(repositories.open_repository(path)) as repo:
        for number in range(10):
            data = (base[:(1 + number % 3) << 20]
                    + repositories.noise(256 << 10, seed=100 + number)
                    + bytes(number * 100_000))
            repositories.put(repo, f'image-{number}', data, project=(
                '', HOSTILE, 'f' * 32)[number % 3])
        repo.delete('image-9')


@pytest.fixture(scope='module')
def daemon(tmp_path_factory):
    path = repositories.create(
        tmp_path_factory.mktemp('page') / 'repository', group_slots=256)
    fill(path)
    with dedupd_watched.running(path) as it:
        for task in ('collect', 'merge', 'scrub'):
            it.perform(task)
        # There is one sample a second at most.
        it.wait_for(lambda: it.perform('collect') and len(
            it.get('/v1/history')['samples']) >= 3)
        yield it
    repositories.require_clean(path)


def size_in_words(value):
    """Return bytes as the page writes them."""
    units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 0 if units[0] == 'B' or value >= 99.95 else (
        1 if value >= 9.995 else 2)
    return f'{value:.{digits}f} {units[0]}'


# -- the same figures ---------------------------------------------------------

def test_headline_is_that_of_the_api(browser, daemon):
    browser.show(daemon.url)
    space = daemon.status()['space']
    for id_, name in (('logical', 'logical_bytes'),
                      ('nonzero', 'nonzero_bytes'),
                      ('unique', 'unique_bytes'), ('disk', 'disk_bytes'),
                      ('metadata', 'metadata_bytes')):
        assert browser.value(id_) == space[name], name
        assert browser.text(id_) == size_in_words(space[name]), name
    assert browser.value('unique-blocks') == space['unique_blocks']
    assert browser.value('saved') == space['saved_percent']
    assert browser.text('saved') == f'{space["saved_percent"]:.1f} %'
    assert browser.value('saved-of-logical') == (
        space['saved_of_logical_percent'])
    assert browser.text('images-note') == '9 images'
    assert browser.text('health').startswith('Healthy')
    assert 'maintainer' in browser.text('health')
    # The parts of the bar add up to the whole.
    widths = browser.script(
        "return [...document.querySelectorAll('#split span')]"
        '.map((s) => parseFloat(s.style.width))')
    assert sum(widths) == pytest.approx(100, abs=0.01)
    assert daemon.status()['repository']['id'] in browser.text('daemon')
    browser.require_silence()


def test_history(browser, daemon):
    browser.show(daemon.url)
    samples = daemon.get('/v1/history')['samples']
    assert len(samples) >= 2, samples
    assert len(browser.all('#history .line')) == 3
    shown = [float(d.get_dom_attribute('value'))
             for d in browser.all('#history-legend data')]
    keys_ = ('logical_bytes', 'nonzero_bytes', 'disk_bytes')
    assert shown == [samples[-1][key] for key in keys_]
    browser.element('history').send_keys(keys.Keys.HOME)
    shown = [float(d.get_dom_attribute('value'))
             for d in browser.all('#history-legend data')]
    assert shown == [samples[0][key] for key in keys_]
    rows = browser.script(
        "return document.querySelectorAll('#history-table tr').length")
    assert rows == 1 + len(samples)
    browser.all('[data-range="86400"]')[0].click()
    assert [b.get_dom_attribute('aria-pressed')
            for b in browser.all('[data-range]')] == ['true', 'false', 'false']
    browser.require_silence()


def test_savings(browser, daemon):
    browser.show(daemon.url)
    images = daemon.get('/v1/images')['images']
    assert browser.element('images-more').is_displayed()
    browser.element('images-more').click()
    saved = {i['image_id']: i['size'] - i['zero_bytes'] - i['stored_bytes']
             for i in images}
    found = {row.find_element(CSS, 'bdi').text: row
             for row in browser.all('#images > li')}
    rows = {name: float(row.find_element(CSS, 'data').get_dom_attribute(
        'value')) for name, row in found.items()}
    assert rows == saved
    # The percentage is that of ``image show``: of the bytes that are not
    # zeros.
    for image in images:
        shown = re.search(r'saved, (-?[\d.]+)\s%',
                          found[image['image_id']].text)
        percent = 100 * saved[image['image_id']] / (
            image['size'] - image['zero_bytes'])
        assert float(shown[1]) == pytest.approx(percent, abs=.06)
    # The largest comes first.
    assert list(rows.values()) == sorted(rows.values(), reverse=True)
    projects = {}
    for image in images:
        projects.setdefault(image['project'], []).append(
            saved[image['image_id']])
    shown = sorted(float(d.get_dom_attribute('value'))
                   for d in browser.all('#projects > li data'))
    assert shown == sorted(map(sum, projects.values()))
    browser.require_silence()


def test_sharing(browser, daemon):
    browser.show(daemon.url)
    sharing = daemon.get('/v1/sharing')
    number = len(sharing['images'])
    names = [bdi.text for bdi in browser.all('#sharing-names bdi')]
    assert sorted(names) == sorted(sharing['images'])
    assert len(browser.all('#sharing rect.cell-self')) == number
    matrix = browser.element('sharing')
    matrix.send_keys(keys.Keys.ARROW_RIGHT)
    for column in range(1, number):
        matrix.send_keys(keys.Keys.ARROW_RIGHT)
        a = sharing['images'].index(names[0])
        b = sharing['images'].index(names[column])
        blocks = sharing['shared'][a][b]
        assert (f'1 and {column + 1} share {blocks:,} block'
                in browser.text('sharing-readout'))
    browser.require_silence()


def test_groups(browser, daemon):
    browser.show(daemon.url)
    groups = daemon.get('/v1/groups')['groups']
    assert len(groups) > 3
    assert len(browser.all('#groups rect.cell-empty')) == len(groups)
    box = browser.element('groups')
    for group in groups:
        box.send_keys(keys.Keys.ARROW_RIGHT)
        text = browser.text('groups-readout')
        assert text.startswith(
            f'Group {group["number"]}: {group["published"]:,} of '
            f'{group["slots"]:,} slots'), text
        assert f'{size_in_words(group["disk_bytes"])} on disk' in text
    browser.require_silence()


def test_tasks_reads_and_filter(browser, daemon):
    browser.show(daemon.url)
    tasks = daemon.status()['tasks']
    collect = browser.task('collect')
    result = tasks['collect']['last']['result']
    assert f'{result["freed_blocks"]:,} blocks freed' in collect
    scrub = browser.task('scrub')
    assert 'no damage' in scrub
    for task in ('tier', 'rebuild-catalog'):
        assert browser.all(f'[data-task="{task}"]') == [] or (
            tasks[task]['last'])
    filter_ = daemon.status()['filter']
    assert (f'{filter_["filter_hints"]:,}' if filter_['filter_places']
            else 'none on this host') in browser.text('filter')
    assert ('followed' in browser.text('filter')
            if filter_['filter_places'] else not filter_[
                'filter_refresh_age_seconds'])
    assert 'Requests' in browser.text('reads')
    assert browser.text('damage-text') == 'No damaged blocks are known.'
    browser.require_silence()


def test_it_polls(browser, daemon):
    browser.show(daemon.url)
    # The second run must find other figures than the first.
    daemon.perform('collect', dry_run=True)
    browser.wait_for(lambda: 'could be freed' in browser.task('collect'))
    freed = daemon.perform('collect')['freed_blocks']
    browser.wait_for(lambda: 'could be' not in browser.task('collect'))
    assert f'{freed} block' in browser.task('collect')
    browser.require_silence()


# -- hostile names ------------------------------------------------------------

def test_names_are_only_text(browser, daemon):
    browser.show(daemon.url)
    projects = [bdi.text for bdi in browser.all('#projects bdi')]
    assert HOSTILE in projects
    assert browser.script('return window.hacked') is None
    assert browser.all('img') == []
    assert len(browser.all('script')) == 1
    browser.require_silence()


def test_policy_stops_what_is_injected(browser, daemon):
    """The policy, the second line of defence, also works without the first."""
    browser.show(daemon.url)
    browser.script("""
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 1';
        document.body.append(script);
        document.body.insertAdjacentHTML(
            'beforeend', '<img src="x" onerror="window.hacked = 2">');
        setTimeout('window.hacked = 3');
        """)
    messages = []

    def refused():
        messages.extend(entry['message'] for entry in
                        browser.driver.get_log('browser'))
        return sum('Content Security Policy' in m for m in messages) >= 3

    browser.wait_for(refused)
    assert browser.script('return window.hacked') is None


def test_nothing_comes_from_elsewhere(browser, daemon):
    browser.show(daemon.url)
    urls = browser.script(
        "return performance.getEntriesByType('resource').map((e) => e.name)")
    assert urls and all(url.startswith(daemon.url) for url in urls), urls
    response = requests.get(daemon.url, timeout=PATIENCE)
    assert response.headers['Content-Type'] == 'text/html; charset=utf-8'
    assert "default-src 'none'" in response.headers['Content-Security-Policy']
    assert 'unsafe' not in response.headers['Content-Security-Policy']
    assert response.content == page.content()
    # The namespace of SVG is a name, not an address.
    assert set(re.findall(r'https?://[^\s\'"]*', response.text)) <= {
        'http://www.w3.org/2000/svg'}


# -- readable -----------------------------------------------------------------

@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('width', ['desktop', 'phone'])
def test_readable(browser, daemon, tmp_path, width, scheme):
    browser.show(daemon.url, width, scheme)
    browser.keep(tmp_path, f'page-{width}-{scheme}')
    assert browser.script(
        'return document.documentElement.scrollWidth') <= WIDTHS[width]
    # Nor is any text cut off at the side.
    beyond = browser.script("""
        return [...document.querySelectorAll('body *:not(.skip)')]
          .filter((e) => !e.closest('details') && e.getClientRects().length
            && e.getBoundingClientRect().right > window.innerWidth + 1)
          .map((e) => e.outerHTML.slice(0, 100));""")
    assert beyond == []
    contrast, text = browser.script(CONTRAST)
    assert contrast >= 4.5, text
    small = browser.script("""
        return [...document.querySelectorAll('button')]
          .filter((b) => b.getClientRects().length
            && b.getBoundingClientRect().height < 24).length;""")
    assert small == 0
    notes = browser.script("""
        return [...document.querySelectorAll('.figures .note')]
          .map((n) => getComputedStyle(n).fontSize);""")
    assert len(set(notes)) == 1, notes
    browser.require_silence()


def test_accessible(browser, daemon):
    browser.show(daemon.url)
    assert browser.script('return document.documentElement.lang') == 'en'
    nameless = browser.script("""
        return [...document.querySelectorAll(
          'button, a, [tabindex], [role], section, svg')]
          .filter((e) => e.getClientRects().length && !(
            e.getAttribute('aria-label') || e.textContent.trim()
            || e.getAttribute('aria-hidden') === 'true'
            || e.getAttribute('aria-labelledby')))
          .map((e) => e.outerHTML.slice(0, 100));""")
    assert nameless == []
    # Every element that reacts to the pointer can be reached by the keyboard,
    # in the order in which it is shown, and shows its focus.
    body = browser.driver.switch_to.active_element
    reached = []
    for _ in range(12):
        body.send_keys(keys.Keys.TAB)
        body = browser.driver.switch_to.active_element
        reached.append(browser.script(
            'const e = document.activeElement;'
            "return [e.id || e.className || e.textContent, "
            "getComputedStyle(e).outlineStyle, "
            'e.getBoundingClientRect().top + scrollY]'))
    names = [name for name, _, _ in reached]
    assert {'skip', 'history', 'images-more', 'sharing',
            'groups'} <= set(names), names
    assert all(outline != 'none' for _, outline, _ in reached)
    headings = browser.script("""
        return [...document.querySelectorAll('h1, h2, h3')]
          .map((h) => Number(h.tagName[1]));""")
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(headings, headings[1:]))


@pytest.mark.parametrize('motion, moves', [('reduce', False),
                                           ('no-preference', True)])
def test_motion_only_where_it_is_liked(browser, daemon, motion, moves):
    browser.show(daemon.url, motion=motion)
    seconds = browser.script("""
        document.body.classList.add('away');
        return parseFloat(getComputedStyle(
          document.querySelector('main')).transitionDuration);""")
    assert (seconds > 0) is moves


# -- other states -------------------------------------------------------------

def test_empty_repository(browser, tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=64)
    with dedupd_watched.running(path) as it:
        browser.show(it.url)
        browser.keep(tmp_path, 'page-empty')
        assert 'There are no images yet' in browser.text('empty')
        assert browser.text('saved') == '–'
        assert browser.text('groups-note') == 'No block groups yet.'
        assert browser.text('images') == 'No images yet.'
        assert browser.text('health').startswith('Healthy')
        assert 'NaN' not in browser.text_of_all()
        assert 'undefined' not in browser.text_of_all()
        browser.show(it.url, 'phone')
        assert browser.script(
            'return document.documentElement.scrollWidth') <= 360
        browser.require_silence()


def test_other_hosts(browser, tmp_path):
    """A cache's page shows the images that it holds, and its storing host."""
    path = repositories.create(tmp_path / 'repository', group_slots=64)
    with dedupd_watched.running(
            path, default='mode = cache',
            sections='[cache]\nlisten = 127.0.0.1:0\nlimit_mib = 4096\n'
            'upstream_url = https://storing.example:9393\n',
            glance_url='http://127.0.0.1:9') as it:
        browser.show(it.url)
        held = browser.text('held')
        assert 'https://storing.example:9393' in held
        assert '0 images' in held and 'of 4.00 GiB' in held
        assert 'Eviction' in browser.text('tasks')
        assert browser.script(
            'return document.getElementById("sites").parentElement.hidden')
        assert 'NaN' not in browser.text_of_all()
        assert 'undefined' not in browser.text_of_all()
        browser.require_silence()


@pytest.mark.needs('nbdkit')
def test_volumes(browser, tmp_path):
    """The page shows a volume in use, an idle one, and a broken one."""
    path = volume_tools.create_repository(tmp_path / 'repository')
    for name in ('disk', 'idle', 'bad'):
        volume_tools.create(path, name, 4 << 20)
    (path / 'volumes/bad/journal-00000001').write_bytes(bytes(4096))
    with dedupd_watched.running(path) as it, (
            volume_tools.Server(path, tmp_path)) as server:
        with server.start().session() as session:
            volume_tools.write(session, 0, repositories.noise(64 << 10, 1))
            session.read(0, 3 << 20)
            it.wait_for(lambda: it.status()['volumes']['in_use'])
            browser.show(it.url)
            bad, disk, idle = (row.text for row in browser.all('#volumes li'))
            assert bad.startswith('bad') and 'cannot be read' in bad
            assert 'Broken: ' in bad and 'journal-00000001' in bad
            assert disk.startswith('disk')
            assert '4.00 MiB, served on this host' in disk
            assert 'read 3.00 MiB, written 64.0 KiB' in disk
            assert re.search(
                r'median: read \d+ .?s \(99 %: \d+ .?s\), write \d+ .?s ',
                disk), disk
            assert '4.00 MiB, not in use' in idle and 'median' not in idle
            assert browser.text('volumes-note').startswith(
                '3 volumes, 1 in use.')
            assert not browser.element('volumes-more').is_displayed()
            assert '1 volume broken' in browser.text('notices')
            assert browser.text('health').startswith('Trouble')
            assert 'NaN' not in browser.text_of_all()
            assert 'undefined' not in browser.text_of_all()
            browser.keep(tmp_path, 'page-volumes')
            contrast, text = browser.script(CONTRAST)
            assert contrast >= 4.5, text
            browser.show(it.url, 'phone')
            assert browser.script(
                'return document.documentElement.scrollWidth') <= 360
            browser.require_silence()


def test_cold_groups(browser, tmp_path, server, faults, proxy):
    """The page shows moved groups, reads, and the object store's failures."""
    cold = cold_repositories.ColdRepository(
        tmp_path / 'repository', server, proxy.url)
    cold.put('image', repositories.noise(cold_repositories.GROUP + 5000, 1))
    with dedupd_watched.running(cold.path, recompress_codec='none') as it:
        it.perform('tier', dry_run=True, everything=True)
        browser.show(it.url)
        assert '1 group (4.' in browser.task('tier')
        assert 'could move' in browser.task('tier')
        it.perform('tier', everything=True)
        it.request('GET', '/v1/images/image')
        cold.forget()
        browser.show(it.url)
        assert re.search(r'1 group moved, 4\.\d+ MiB given back, 4\.\d+ MiB '
                         'sent', browser.task('tier')), browser.task('tier')
        figures = it.status()['cold']
        assert figures['gets'] and (
            f'{figures["gets"]} requests, 4.' in browser.text('reads'))
        assert 'did not give\n0' in browser.text('reads')
        # There are no savings: bytes that are not on the disk are in an
        # object.
        space = it.status()['space']
        assert space['object_bytes'] > cold_repositories.GROUP
        assert space['saved_percent'] <= 0
        assert browser.text('objects').startswith('4.0')
        assert 'in the object store 9' in browser.text('split-legend')
        assert 'by compression 0.0 %' in browser.text('split-legend')
        assert 'undefined' not in browser.text_of_all()
        browser.keep(tmp_path, 'page-cold')
        browser.require_silence()


def test_without_volumes_nothing_is_shown_of_them(browser, daemon):
    browser.show(daemon.url)
    assert not browser.element('volumes-title').is_displayed()


def test_who_only_reads_does_not_deny_damage(browser, tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    fill(path)
    with dedupd_watched.Daemon(path) as first, (
            dedupd_watched.Daemon(path)) as other:
        first.start().wait_for_catalog()
        other.start().wait_for_catalog('reader')
        browser.show(other.url)
        assert browser.text('damage-text') == (
            'Unknown: this daemon has not maintained the repository yet.')
        assert 'damaged' not in browser.text('images')
        assert 'null' not in browser.text_of_all()
        browser.require_silence()


def test_of_no_other_hosts_nothing_is_shown(browser, daemon):
    browser.show(daemon.url)
    assert browser.script('return document.getElementById("elsewhere").hidden')


def test_daemon_goes_and_comes_back(browser, tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    fill(path)
    with dedupd_watched.running(path) as it:
        it.perform('account')
        browser.show(it.url)
        browser.require_silence()
        logical = browser.value('logical')
        it.stop()
        browser.wait_for(lambda: browser.text('health') == 'No answer')
        notice = browser.text('notices')
        assert re.search(r'has not answered since \d\d:\d\d:\d\d', notice)
        assert browser.value('logical') == logical
        browser.keep(tmp_path, 'page-away')
        contrast, text = browser.script(CONTRAST)
        assert contrast >= 4.5, text
        it.start()
        browser.wait_for(
            lambda: browser.text('health').startswith('Healthy'))
        assert browser.text('notices') == ''
        # The console has only the errors of the time without a daemon.
        assert all('ERR_CONNECTION_REFUSED' in entry['message']
                   for entry in browser.driver.get_log('browser'))


# Long: a browser starts, and the page is as new as its last request.
def test_progress_and_damage(browser, tmp_path):
    path = repositories.create(tmp_path / 'repository', group_slots=256,
                               segment_size=4096)
    with contextlib.closing(repositories.open_repository(path)) as repo:
        repositories.put(repo, 'whole', repositories.noise(4 << 20, 1))
        repositories.put(repo, 'broken', repositories.noise(1 << 20, 2))
    number = len(os.listdir(path / 'groups'))
    group = repositories.Group(path, number)
    group.data[group.data_start() + 8000] ^= 1
    group.save()
    with dedupd_watched.running(path, scrub_rate_mib=0.2) as it:
        browser.show(it.url)
        assert it.request('POST', '/v1/tasks/scrub', b'{}').status == 202
        browser.wait_for(lambda: ' left' in browser.task('scrub'))
        assert 0 <= int(browser.script('''
            return document.querySelector('[role="progressbar"]')
              .getAttribute('aria-valuenow')''')) <= 100
        browser.keep(tmp_path, 'page-progress')
        it.write_config(scrub_rate_mib=0)
        it.process.send_signal(1)
        it.wait_for(lambda: it.status()['damage']['blocks'])
        browser.wait_for(lambda: 'need them' in browser.text('damage-text'))
        damage = it.status()['damage']
        assert damage['blocks'] >= 1
        assert browser.text('damage-text').startswith(
            f'{damage["blocks"]} damaged block')
        assert damage['images'] == ['broken']
        assert [li.text for li in browser.all('#damaged li')] == ['broken']
        assert browser.text('health').startswith('Trouble')
        browser.wait_for(
            lambda: '(damaged)' in browser.text('images'))
        browser.keep(tmp_path, 'page-damage')
        # A scrub that finds no new damage does not report that all is well.
        for full in (False, True):
            assert it.perform('scrub', full=full)['damaged'] == (
                damage['blocks'])
            browser.show(it.url)
            browser.wait_for(lambda: 'damaged' in browser.task('scrub'))
            assert 'no damage' not in browser.task('scrub').lower()
        contrast, text = browser.script(CONTRAST)
        assert contrast >= 4.5, text
        browser.require_silence()


def test_the_last_whole_pass_is_shown_across_restarts(browser, tmp_path):
    """The last whole pass stays shown while the next runs, after restarts."""
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    with contextlib.closing(repositories.open_repository(path)) as repo:
        repositories.put(repo, 'image', repositories.noise(4 << 20, 1))
    with dedupd_watched.running(path) as it:
        verified = size_in_words(it.perform('scrub', full=True)['bytes'])
        it.stop()
        it.write_config(scrub_rate_mib=0.01, scrub_interval=86400)
        it.start()
        it.wait_for_catalog()
        browser.show(it.url)
        shown = browser.task('scrub')
        assert shown.count(f'{verified} verified, no damage.') == 1
        assert 'Ended ' in shown and 'whole pass' not in shown
        assert it.request('POST', '/v1/tasks/scrub',
                          b'{"full": true}').status == 202
        # The end of the daemon interrupts the pass, which is later continued.
        for restart in (False, True):
            if restart:
                it.stop()
                it.start()
                it.wait_for_catalog()
                browser.show(it.url)
            browser.wait_for(lambda: '%' in browser.task('scrub'))
            assert re.search(
                f'The last whole pass ended .+\n+{verified} verified, '
                'no damage', browser.task('scrub'))
        browser.require_silence()
        it.stop()
        (path / task_history.NAME).write_bytes(b'\xff{"kind": ' * 100)
        it.start()
        it.wait_for_catalog()
        browser.show(it.url)
        browser.wait_for(lambda: '%' in browser.task('scrub'))
        assert 'whole pass' not in browser.task('scrub')
        browser.require_silence()


@pytest.mark.parametrize('result', [
    {}, {'bytes': HOSTILE, 'damaged': HOSTILE, 'unreadable': HOSTILE},
    {'bytes': -1, 'damaged': [], 'unreadable': 5, 'healed': {}}],
    ids=['empty', 'hostile', 'wrong'])
def test_a_whole_pass_that_is_none(browser, tmp_path, result):
    """The page survives a history file that another program wrote."""
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    run = {'number': 0, 'started': 1e9, 'finished': 1e9, 'seconds': 1,
           'arguments': {}, 'result': result, 'error': None}
    (path / task_history.NAME).write_bytes(task_history.encode({'scrub': {
        'last': {**run, 'finished': 1e9 + 1, 'error': HOSTILE},
        'last_error': None, 'last_success': 1e9, 'last_success_run': run}}))
    with dedupd_watched.running(path, scrub_interval=0) as it:
        browser.show(it.url)
        browser.wait_for(lambda: 'whole pass' in browser.task('scrub'))
        assert f'Failed: {HOSTILE}' in browser.task('scrub')
        assert browser.script('return window.hacked') is None
        assert 'NaN' not in browser.text_of_all()
        assert 'undefined' not in browser.text_of_all()
        browser.require_silence()


def test_unreadable_group(browser, tmp_path):
    """The images of an unreadable group are shown as damaged.

    No block of the group is known to be damaged.
    """
    path = repositories.create(tmp_path / 'repository', group_slots=256)
    with contextlib.closing(repositories.open_repository(path)) as repo:
        repositories.put(repo, 'broken', repositories.noise(1 << 20, 2))
    with dedupd_watched.running(path) as it:
        it.perform('account')
        file = repositories.group_path(path, 1)
        content = bytearray(file.read_bytes())
        content[20] ^= 1
        file.write_bytes(content)
        it.perform('scrub', full=True)
        browser.show(it.url)
        assert 'unreadable' in browser.task('scrub')
        # The page shows an image, and an error.
        assert browser.text('sharing-note') != 'No images yet.'
        assert browser.text('images') != 'No images yet.'
        assert 'cannot be read' in browser.text('errors')
        assert 'no damage' not in browser.task('scrub').lower()
        assert 'broken' in browser.text('damaged')
        assert 'No damaged blocks' not in browser.text('damage-text')
        assert browser.text('health').startswith('Trouble')
        browser.require_silence()


def test_no_filter(browser, tmp_path):
    """The page shows that the filter's directory is taken by a file."""
    path = repositories.create(tmp_path / 'repository')
    place = tmp_path / 'shm'
    place.write_text('no directory')
    with dedupd_watched.running(path, filter_dir=place) as it:
        error = it.status()['filter']['filter_error']
        assert str(place) in error
        assert b'dedupd_filter_available 0.0' in it.request(
            'GET', '/metrics').body
        browser.show(it.url)
        assert browser.text('health').startswith('Attention')
        assert error in browser.text('notices')
        assert error in browser.text('filter')
        browser.require_silence()


def test_an_image_that_is_not_counted_yet(browser, tmp_path):
    """An image that is not counted yet is shown."""
    path = repositories.create(tmp_path / 'repository')
    with dedupd_watched.running(path) as it:
        it.perform('account')
        with contextlib.closing(repositories.open_repository(path)) as repo:
            repositories.put(repo, 'new', repositories.noise(1 << 16, 2))
        browser.show(it.url)
        if it.status()['space']['images'] == 0:     # not counted meanwhile
            assert 'new' in browser.text('images')
            assert browser.text('empty') == ''
