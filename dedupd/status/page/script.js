
'use strict';

// Asks the daemon for its figures and draws them. Names of images and projects
// come from users: they are only ever put into text nodes.

(() => {
  const STATUS_EVERY = 3000;        // milliseconds
  const DETAILS_EVERY = 20000;
  const DETAILS_SHARE = 20;         // they are asked for 1/20 of the time
  const MAX_PAUSE = 15000;      // between attempts while there is no answer
  const TIMEOUT = 10000;
  const ROWS = 8;                   // of images and projects, at first
  const MORE_ROWS = 100;
  const MAX_CELLS = 2500;
  const MIN_SPAN = 3600;       // of the plot over time, seconds
  const NAMED = { account: 'Accounting', collect: 'Collection',
                  merge: 'Merging', scrub: 'Scrub', recompress: 'Recompression',
                  convert: 'Conversion',
                  tier: 'Tiering', projects: 'Counting by project',
                  usage: 'Measuring images',
                  'rebuild-catalog': 'Rebuilding the catalog',
                  replicate: 'Replication', evict: 'Eviction' };
  // Not shown before they run.
  const ON_REQUEST = ['convert', 'tier', 'usage', 'rebuild-catalog'];
  const SERIES = [['logical', 'logical_bytes', 'Logical'],
                  ['nonzero', 'nonzero_bytes', 'Non-zero'],
                  ['disk', 'disk_bytes', 'Stored on disk']];
  const PARTS = [['disk', 'stored on disk'],
                 ['objects', 'in the object store'],
                 ['packed', 'saved by compression'],
                 ['shared', 'duplicates'], ['zeros', 'zeros']];

  const state = {
    status: null, history: null, images: null, volumes: null, groups: null,
    sharing: null,
    answered: null,       // when the daemon answered last, ms since the epoch
    awaySince: null, skew: 0, range: 0, moment: null, rates: null,
    allImages: false, allProjects: false, allVolumes: false, drawn: {},
  };

  // -- elements ---------------------------------------------------------------

  const $ = (id) => document.getElementById(id);

  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value !== null && value !== undefined) {
        node.setAttribute(name, value);
      }
    }
    node.append(...children.filter((c) => c !== null && c !== undefined));
    return node;
  }

  const el = (tag, attributes, ...children) =>
    fill(document.createElement(tag), attributes, children);

  const svg = (tag, attributes, ...children) =>
    fill(document.createElementNS('http://www.w3.org/2000/svg', tag),
         attributes, children);

  // A name as users wrote it, which cannot disturb the text around it.
  const name = (text) => el('bdi', { class: 'name' }, String(text));

  // An image's name in Glance, if it is known, and its id.
  const imageLabel = (id, called) => called
    ? el('span', null, name(called), ' ',
         el('bdi', { class: 'id muted small' }, String(id)))
    : name(id);

  function setText(node, text) {
    if (node.textContent !== text) {
      node.textContent = text;
    }
  }

  function setFigure(id, value, text) {
    const node = $(id);
    setText(node, text);
    if (value === null) {
      node.removeAttribute('value');
    } else {
      node.value = String(value);
    }
  }

  // -- words ------------------------------------------------------------------

  const isNumber = (value) =>
    typeof value === 'number' && Number.isFinite(value);
  const number = (value) => isNumber(value) ? value : null;
  const NONE = '–';

  function count(value) {
    return isNumber(value) ? Math.round(value).toLocaleString('en') : NONE;
  }

  const plural = (n, one, many) =>
    `${count(n)} ${n === 1 ? one : many || one + 's'}`;

  function bytes(value) {
    if (!isNumber(value)) {
      return NONE;
    }
    const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB', 'EiB'];
    let unit = 0;
    let left = Math.abs(value);
    while (left >= 999.5 && unit < units.length - 1) {
      left /= 1024;
      unit += 1;
    }
    const digits = unit === 0 || left >= 99.95 ? 0 : left >= 9.995 ? 1 : 2;
    return `${value < 0 ? '−' : ''}${left.toFixed(digits)} ${units[unit]}`;
  }

  const percent = (value) => isNumber(value)
    ? `${value < 0 ? '−' : ''}${Math.abs(value).toFixed(1)} %` : NONE;

  // Never "100 %" of what is not whole.
  function share(part, whole) {
    if (!isNumber(part) || !(whole > 0)) {
      return NONE;
    }
    const value = 100 * part / whole;
    return part < whole && value > 99.9 ? '99.9 %' : percent(value);
  }

  function duration(seconds) {
    if (!isNumber(seconds)) {
      return NONE;
    }
    if (seconds < 1) {
      return 'less than 1 s';
    }
    for (const [size, unit] of [[86400, 'days'], [3600, 'h'], [60, 'min']]) {
      if (seconds >= 2 * size) {
        return `${Math.round(seconds / size)} ${unit}`;
      }
    }
    return `${Math.round(seconds)} s`;
  }

  const two = (n) => String(n).padStart(2, '0');

  function day(seconds) {
    const d = new Date(seconds * 1000);
    return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
  }

  function clock(seconds, fine) {
    const d = new Date(seconds * 1000);
    return `${two(d.getHours())}:${two(d.getMinutes())}`
      + (fine ? `:${two(d.getSeconds())}` : '');
  }

  const now = () => (Date.now() + state.skew) / 1000;

  function moment(seconds) {
    return day(seconds) === day(now()) ? clock(seconds, true)
      : `${day(seconds)} ${clock(seconds)}`;
  }

  const ago = (seconds) =>
    now() - seconds < 5 ? 'just now' : `${duration(now() - seconds)} ago`;

  // -- asking -----------------------------------------------------------------

  class Refused extends Error {}

  async function ask(path) {
    const response = await fetch(path, {
      cache: 'no-store', signal: AbortSignal.timeout(TIMEOUT),
      headers: { Accept: 'application/json' } });
    const date = Date.parse(response.headers.get('Date') || '');
    if (Number.isFinite(date) && Math.abs(date - Date.now()) > 5000) {
      state.skew = date - Date.now();
    }
    const answer = await response.json();
    if (!response.ok) {
      const error = answer && answer.error || {};
      throw new Refused(error.message || `HTTP ${response.status}`);
    }
    return answer;
  }

  // One part of the details; where the daemon refuses, its words are kept.
  async function askDetail(key, path) {
    let answer;
    try {
      answer = await ask(path);
    } catch (error) {
      if (!(error instanceof Refused)) {
        throw error;
      }
      answer = { refused: error.message };
    }
    state[key] = answer;
  }

  let pause = STATUS_EVERY;
  let detailsAt = 0;
  let detailsOf = null;
  let detailsTook = 0;
  let timer = null;

  async function poll() {
    clearTimeout(timer);
    try {
      state.status = await ask('v1/status');
      state.answered = Date.now();
      state.awaySince = null;
      pause = STATUS_EVERY;
      rate(state.status);
      draw('status', drawStatus);
      const version = JSON.stringify([
        state.status.catalog && state.status.catalog.sequence,
        state.status.space && state.status.space.images]);
      const age = Date.now() - detailsAt;
      if (age > detailsTook * DETAILS_SHARE
          && (age > DETAILS_EVERY || version !== detailsOf)) {
        const begin = Date.now();
        await Promise.all([
          askDetail('history', 'v1/history?since=0'),
          askDetail('images', 'v1/images'),
          askDetail('volumes', 'v1/volumes'),
          askDetail('groups', 'v1/groups'),
          askDetail('sharing', 'v1/sharing')]);
        detailsAt = Date.now();
        detailsTook = detailsAt - begin;
        detailsOf = version;
        drawDetails();
      }
    } catch (error) {
      if (error instanceof Refused) {
        state.answered = Date.now();
      }
      state.awaySince = state.awaySince || Date.now();
      state.awayWhy = error instanceof Refused ? error.message : null;
      pause = Math.min(MAX_PAUSE, pause * 1.5);
    }
    draw('health', drawHealth);
    if (!document.hidden) {
      timer = setTimeout(poll, pause);
    }
  }

  document.addEventListener('visibilitychange', () => {
    if (!document.hidden) {
      poll();
    }
  });

  // A part that cannot be drawn must not take the others with it.
  function draw(part, function_) {
    try {
      function_();
    } catch (error) {
      console.error(`The page could not draw its part '${part}'.`, error);
    }
  }

  // Bytes and requests a second, from two statuses.
  function rate(status) {
    const reads = status.reads || {};
    const before = state.rates;
    const at = performance.now() / 1000;
    const seconds = before ? at - before.at : 0;
    state.rates = { at, bytes: number(reads.bytes),
                    requests: number(reads.requests) };
    if (seconds > 0 && reads.bytes >= before.bytes) {
      state.rates.bytesPerSecond = (reads.bytes - before.bytes) / seconds;
      state.rates.requestsPerSecond =
        Math.max(0, reads.requests - before.requests) / seconds;
    }
  }

  // -- head, notices ----------------------------------------------------------

  const KINDS = { critical: 'bad', warning: 'warn' };

  const problems = (status) => (status.problems || []).map(
    ({ code, severity, text }) => [
      KINDS[severity] || 'bad', `${code}: ${text}`]);

  function drawHealth() {
    const status = state.status;
    const away = state.awaySince !== null;
    const found = status ? problems(status) : [];
    let level = 'good';
    let words = 'Healthy';
    if (away) {
      [level, words] = ['bad', status ? 'No answer' : 'Not reachable'];
      const since = state.answered && !state.awayWhy
        ? state.answered : state.awaySince;
      found.unshift(['bad', state.awayWhy
        ? `The daemon refuses: ${state.awayWhy}`
        : `The daemon has not answered since ${moment(
          (since + state.skew) / 1000)}.`
          + (status ? ' What is shown is from then.' : '')]);
    } else if (found.some(([kind]) => kind === 'bad')) {
      [level, words] = ['bad', 'Trouble'];
    } else if (!status.daemon.ready) {
      [level, words] = ['warn', 'Starting'];
    } else if (found.length) {
      [level, words] = ['warn', 'Attention'];
    }
    if (status && !away) {
      words += status.daemon.role === 'maintainer' ? ' · maintainer'
        : ' · reader and helper: another daemon is the maintainer';
    }
    document.body.classList.toggle('away', away);
    const pill = $('health');
    setText(pill, words);
    pill.className = `pill ${level}`;
    setText($('updated'), state.answered
      ? `as of ${clock((state.answered + state.skew) / 1000, true)}` : '');
    const key = JSON.stringify(found.map((notice) => notice.map(
      (part) => typeof part === 'string' ? part : part.textContent)));
    if (key !== state.drawn.notices) {
      state.drawn.notices = key;
      $('notices').replaceChildren(...found.map(([kind, ...parts]) =>
        el('li', { class: `notice ${kind}` }, ...parts)));
    }
  }

  // -- figures ----------------------------------------------------------------

  // What became of the bytes of images: [part, bytes], in the order of PARTS.
  // Each takes what is left, so that they add up whatever rounding to disk
  // blocks or metadata add.
  function parts(logical, zeros, plain, disk, objects = 0) {
    let left = logical;
    const take = (wanted) => {
      const taken = Math.max(0, Math.min(left, wanted || 0));
      left -= taken;
      return taken;
    };
    const stored = take(disk);
    const away = take(objects);
    const zero = take(zeros);
    const packed = take(plain === null ? 0 : plain - disk - objects);
    return [['disk', stored], ['objects', away], ['packed', packed],
            ['shared', left], ['zeros', zero]];
  }

  function splitBar(node, split, scale) {
    node.replaceChildren(...split.filter(([, size]) => size > 0).map(
      ([part, size]) => {
        const span = el('span', { class: `part-${part}` });
        span.style.width = `${100 * size / scale}%`;
        return span;
      }));
  }

  const partsWithout = (hidden) => PARTS.filter(([part]) => part !== hidden);

  const legend = (shown, more) => shown.map(([part, words]) =>
    el('li', null, el('i', { class: `part-${part}` }), words + more(part)));

  function drawStatus() {
    const { repository = {}, space = {}, daemon = {} } = state.status;
    document.title = `dedupd ${daemon.host || ''}`.trim();
    setText($('path'), repository.path || '');
    $('path').title = `Repository ${repository.id || ''}`;
    setFigure('saved', number(space.saved_percent),
              space.images > 0 ? percent(space.saved_percent) : NONE);
    setFigure('saved-of-logical', number(space.saved_of_logical_percent),
              space.images > 0 ? percent(space.saved_of_logical_percent)
                : NONE);
    setFigure('logical', number(space.logical_bytes),
              bytes(space.logical_bytes));
    setFigure('nonzero', number(space.nonzero_bytes),
              bytes(space.nonzero_bytes));
    setFigure('unique', number(space.unique_bytes), bytes(space.unique_bytes));
    setFigure('unique-blocks', number(space.unique_blocks),
              count(space.unique_blocks));
    setFigure('disk', number(space.disk_bytes), bytes(space.disk_bytes));
    setFigure('metadata', number(space.metadata_bytes),
              bytes(space.metadata_bytes));
    $('objects-figure').hidden = !space.object_bytes;
    setFigure('objects', number(space.object_bytes),
              bytes(space.object_bytes));
    $('derived-figure').hidden = !space.disks;
    setFigure('derived', number(space.derived_bytes),
              bytes(space.derived_bytes));
    setText($('images-note'), plural(space.images, 'image')
            + (space.backups ? ', ' + plural(space.backups, 'backup') : '')
            + (space.volumes ? ', ' + plural(space.volumes, 'volume') : ''));
    drawSplit(space);
    setText($('filesystem'),
      `${bytes(space.filesystem_free_bytes)} of `
      + `${bytes(space.filesystem_bytes)} are free on the file system.`
      + (space.full_in_seconds > 0
        ? ' If it goes on as in the last days, storing stops in about '
          + `${duration(space.full_in_seconds)}.` : ''));
    drawTasks(state.status.tasks || {});
    drawReads(state.status.reads || {}, state.status.cold);
    drawFilter(state.status.filter || {});
    drawElsewhere(state.status);
    drawDamage(state.status);
    drawErrors(state.status.errors || []);
    setText($('daemon'),
      `dedupd ${daemon.version} on ${daemon.host}, process ${daemon.pid}, `
      + `up for ${duration(now() - daemon.started)}${hostWords(state.status)}. `
      + 'Repository '
      + `${repository.id}: blocks of ${blockWords(repository)}, `
      + `${repository.fingerprint}, compared by ${repository.verify}.`);
  }

  // The daemons with which this one shares the work.
  function hostWords(status) {
    const others = Object.entries(status.hosts || {})
      .filter(([number]) => Number(number) !== status.daemon.number)
      .map(([number, { host, tasks }]) => `${host || `number ${number}`}`
        + (tasks.length ? ` (${tasks.join(', ')})` : ''));
    return others.length ? `, beside ${others.join(', ')}` : '';
  }

  // With content-defined chunking, the last word of "content-defined MINIMUM
  // AVERAGE"; else all blocks have one size.
  function averageBlock(repository) {
    return Number(repository.chunking.split(' ')[2]) || repository.block_size;
  }

  function blockWords(repository) {
    return repository.chunking === 'fixed' ? bytes(repository.block_size)
      : `about ${bytes(averageBlock(repository))}`;
  }

  // The sums know an image when it was counted; the list has all there are.
  const anyImages = () =>
    state.images && state.images.images && state.images.images.length > 0;

  function drawEmpty() {
    const { space = {} } = state.status;
    $('empty').hidden = space.images !== 0 || anyImages() !== false;
  }

  function drawSplit(space) {
    const logical = number(space.logical_bytes);
    const known = logical > 0 && number(space.disk_bytes) !== null;
    drawEmpty();
    $('split').hidden = !known;
    $('split-legend').hidden = !known;
    if (!known) {
      return;
    }
    const split = parts(logical, space.zero_bytes, number(space.unique_bytes),
                        space.disk_bytes, space.object_bytes);
    const shown = partsWithout(space.object_bytes ? '' : 'objects');
    splitBar($('split'), split, logical);
    const size = Object.fromEntries(split);
    $('split').setAttribute('aria-label', shown.map(([part, words]) =>
      `${words}: ${share(size[part], logical)}`).join(', '));
    $('split-legend').replaceChildren(...legend(shown, (part) =>
      ` ${share(size[part], logical)}`));
  }

  // -- tasks ------------------------------------------------------------------

  // What a task's last run found or did, in a sentence.
  const PLANNED = {
    collect: (r) => `${plural(r.blocks, 'block')} (${bytes(r.bytes)}) could `
      + 'be freed',
    merge: (r) => `${plural(r.duplicates, 'block')} (${bytes(r.bytes)}) could `
      + 'be merged',
    tier: (r) => `${plural((r.groups || []).filter(
      ({ action }) => action === 'move').length, 'group')} `
      + `(${bytes(r.bytes)}) could move`,
  };

  const DID = {
    account: (r) => `${count(r.counted)} counted, `
      + `${count(r.uncounted)} un-counted`,
    collect: (r) => r.refused ? `nothing freed: ${r.refused}`
      : `${bytes(r.disk_bytes)} given back, `
        + `${plural(r.freed_blocks, 'block')} freed`
        + (r.busy > 0 ? `, ${plural(r.busy, 'group')} put off` : ''),
    merge: (r) => `${plural(r.merged_blocks, 'block')} merged `
      + `(${bytes(r.merged_bytes)}) of ${count(r.scanned)} looked at`,
    evict: (r) => `${plural((r.evicted || []).length, 'image')} evicted, `
      + `${bytes(r.disk_bytes)} given back`
      + (r.short ? `; ${r.short}` : ''),
    scrub: (r) => `${bytes(r.bytes)} verified, ${damageWords(r)}`,
    tier: (r) => `${plural(r.groups, 'group')} moved, `
      + `${bytes(r.disk_bytes)} given back, ${bytes(r.sent_bytes)} sent`
      + (r.busy > 0 ? `, ${plural(r.busy, 'group')} put off` : ''),
    projects: (r) => `${plural(r.projects, 'project')} counted`,
  };

  // Of a scrub. It does not deny what is known from elsewhere.
  function damageWords(result) {
    const { blocks, images = [] } = state.status.damage || {};
    const unreadable = Object.keys(result.unreadable || {}).length;
    const words = [
      result.damaged > 0 ? `${plural(result.damaged, 'block')} damaged` : '',
      result.healed > 0 ? `${count(result.healed)} healed` : '',
      unreadable > 0 ? `${plural(unreadable, 'file')} unreadable` : '',
    ].filter(Boolean);
    return words.join(', ') || (blocks > 0 || images.length > 0
      ? 'nothing beside the known damage' : 'no damage');
  }

  // What a good run did, as a sentence; null: nothing is known.
  function deed(task, run) {
    const dry = run.arguments && run.arguments.dry_run;
    const tell = (dry ? PLANNED : DID)[task];
    if (!tell || !run.result) {
      return null;
    }
    const words = tell(run.result);
    return `${words.charAt(0).toUpperCase()}${words.slice(1)}.`;
  }

  function lastRun(task, last) {
    if (!last) {
      return [el('p', { class: 'muted' },
                 state.status.daemon.role === 'maintainer'
                   ? 'Has not run yet.' : 'Has not run in this daemon.')];
    }
    const took = duration(last.finished - last.started);
    const lines = [el('p', { class: 'muted' },
                      `Ended ${ago(last.finished)}, took ${took}.`)];
    if (last.error) {
      lines.push(el('p', { class: 'error' }, `Failed: ${last.error}`));
    } else {
      const words = deed(task, last);
      lines.push(words && el('p', null, words));
    }
    return lines.filter(Boolean);
  }

  // The last success, where the last run is none or another one runs.
  function lastSuccess(task, { last_success_run: run }) {
    const words = deed(task, run);
    return [el('p', { class: 'muted' }, task === 'scrub'
              ? `The last whole pass ended ${ago(run.finished)}.`
              : `The last success was ${ago(run.finished)}.`),
            ...words ? [el('p', null, words)] : []];
  }

  function drawTasks(tasks) {
    const shown = Object.entries(tasks).filter(([task, facts]) =>
      !ON_REQUEST.includes(task) || facts.state !== 'idle' || facts.last
      || facts.next);
    $('tasks').replaceChildren(...shown.map(([task, facts]) => {
      const running = facts.state === 'running';
      const failed = facts.last && facts.last.error;
      const box = el('div', {
        class: `task ${running ? 'running' : failed ? 'failed' : ''}`,
        'data-task': task }, el('h3', null, NAMED[task] || task));
      if (running) {
        box.append(...progress(NAMED[task] || task, facts));
      } else if (facts.state === 'waiting') {
        box.append(el('p', null, 'Waits for its turn.'));
      } else {
        box.append(...lastRun(task, facts.last));
        if (facts.next > 0) {
          const left = facts.next - now();
          box.append(el('p', { class: 'muted' }, left > 1
            ? `Next in ${duration(left)}.` : 'Next now.'));
        }
      }
      const success = facts.last_success_run;
      if (success && (facts.state !== 'idle'
          || success.finished !== facts.last.finished)) {
        box.append(...lastSuccess(task, facts));
      }
      return box;
    }));
  }

  function progress(label, facts) {
    const known = facts.total > 0;
    const done = known
      ? Math.max(0, Math.min(100, 100 * facts.done / facts.total)) : 0;
    const bar = el('div', {
      class: 'progress', role: 'progressbar', 'aria-label': label,
      'aria-valuemin': 0, 'aria-valuemax': 100,
      'aria-valuenow': known ? Math.floor(done) : null }, el('span'));
    bar.firstChild.style.width = `${done}%`;
    const left = isNumber(facts.seconds_left)
      ? `, ${duration(facts.seconds_left)} left` : '';
    return [bar,
            el('p', null, known ? `${Math.floor(done)} %${left}` : 'Running'),
            el('p', { class: 'muted' }, facts.what || '')];
  }

  // -- history ----------------------------------------------------------------

  function niceBytes(most) {
    for (let unit = 1; unit < 2 ** 80; unit *= 1024) {
      for (const factor of [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]) {
        if (4 * unit * factor >= most) {
          return unit * factor;
        }
      }
    }
    return most;
  }

  function timeTicks(from, to, most) {
    const steps = [60, 300, 900, 3600, 10800, 21600, 43200, 86400, 172800,
                   345600, 604800, 2592000, 7776000, 31536000];
    const step = steps.find((s) => (to - from) / s <= most) || to - from;
    // Local midnight is a tick.
    const offset = new Date(from * 1000).getTimezoneOffset() * 60;
    const ticks = [];
    for (let t = Math.ceil((from - offset) / step) * step + offset; t <= to;
         t += step) {
      ticks.push([t, step < 86400 ? clock(t) : day(t).slice(5)]);
    }
    return ticks;
  }

  function samplesShown() {
    const all = state.history && state.history.samples || [];
    const shown = state.range
      ? all.filter((s) => s.time >= now() - state.range) : all;
    return shown.filter((s) => isNumber(s.time));
  }

  function drawHistory() {
    const box = $('history');
    const samples = samplesShown();
    box.hidden = samples.length === 0;
    $('history-legend').hidden = box.hidden;
    drawHistoryTable(samples);
    if (box.hidden) {
      setText($('history-time'), state.history && state.history.refused
        || 'Nothing was recorded in this time yet.');
      return;
    }
    const width = Math.max(box.clientWidth, 200);
    const height = width < 500 ? 200 : 270;
    const left = 62;
    const bottom = 24;
    const top = 8;
    const right = 10;
    const most = Math.max(1, ...samples.flatMap((s) =>
      SERIES.map(([, key]) => s[key] || 0)));
    const step = niceBytes(most);
    const ceiling = Math.ceil(most / step) * step;
    const to = samples[samples.length - 1].time;
    const from = Math.min(samples[0].time, to - MIN_SPAN);
    const x = (t) => left + (t - from) / (to - from) * (width - left - right);
    const y = (v) => top + (1 - v / ceiling) * (height - top - bottom);
    const drawing = svg('svg', { viewBox: `0 0 ${width} ${height}`, height,
                                 'aria-hidden': 'true' });
    for (let v = 0; v <= ceiling; v += step) {
      drawing.append(
        svg('line', { class: v ? 'grid' : 'axis', x1: left,
                      x2: width - right, y1: y(v), y2: y(v) }),
        svg('text', { x: left - 8, y: y(v) + 4, 'text-anchor': 'end' },
            bytes(v)));
    }
    for (const [t, words] of timeTicks(from, to, (width - left) / 80)) {
      drawing.append(
        svg('line', { class: 'axis', x1: x(t), x2: x(t),
                      y1: height - bottom, y2: height - bottom + 4 }),
        svg('text', { x: Math.min(x(t), width - right - 14),
                      y: height - 6, 'text-anchor': 'middle' }, words));
    }
    for (const [kind, key] of SERIES) {
      const points = thin(samples.filter((s) => isNumber(s[key])), x)
        .map((s) => `${x(s.time).toFixed(1)},${y(s[key]).toFixed(1)}`);
      if (kind === 'disk' && points.length > 1) {
        const end = points[points.length - 1].split(',')[0];
        const begin = points[0].split(',')[0];
        drawing.append(svg('path', {
          class: 'area',
          d: `M${begin},${y(0)}L${points.join('L')}L${end},${y(0)}Z` }));
      }
      if (points.length > 1) {
        drawing.append(svg('path', { class: `line ${kind}`,
                                     d: `M${points.join('L')}` }));
      }
    }
    const cursor = svg('g');
    drawing.append(cursor);
    box.replaceChildren(drawing);
    state.plot = { samples, x, y, cursor, top, foot: height - bottom,
                   width };
    pickSample(state.moment);
  }

  // At most one sample a pixel, the last of each.
  function thin(samples, x) {
    return samples.filter((s, i) => i + 1 === samples.length || i === 0
      || Math.floor(x(s.time)) !== Math.floor(x(samples[i + 1].time)));
  }

  // Show the sample next to a time; null: the last one.
  function pickSample(time) {
    const { samples, x, y, cursor, top, foot } = state.plot;
    state.moment = time;
    let at = samples.length - 1;
    if (time !== null) {
      for (let i = 0; i < samples.length; i += 1) {
        if (Math.abs(samples[i].time - time)
            < Math.abs(samples[at].time - time)) {
          at = i;
        }
      }
    }
    const sample = samples[at];
    cursor.replaceChildren();
    if (time !== null) {
      cursor.append(svg('line', { class: 'cursor', x1: x(sample.time),
                                  x2: x(sample.time), y1: top, y2: foot }));
    }
    for (const [kind, key] of SERIES) {
      if (isNumber(sample[key])) {
        cursor.append(svg('circle', { class: `dot ${kind}`, r: 5,
                                      cx: x(sample.time),
                                      cy: y(sample[key]) }));
      }
    }
    setText($('history-time'), `${day(sample.time)} ${clock(sample.time)}, `
      + plural(sample.images, 'image'));
    $('history-legend').replaceChildren(...SERIES.map(([kind, key, words]) =>
      el('li', null,
         svg('svg', { viewBox: '0 0 24 8', 'aria-hidden': 'true' },
             svg('path', { class: `line ${kind}`, d: 'M0,4L24,4' })),
         `${words} `,
         el('data', { value: isNumber(sample[key]) ? sample[key] : '' },
            bytes(sample[key])))));
    return at;
  }

  function drawHistoryTable(samples) {
    const few = samples.slice(-200).reverse();
    $('history-table').replaceChildren(
      el('tr', null, el('th', { scope: 'col' }, 'Time'),
         ...SERIES.map(([, , words]) => el('th', { scope: 'col' }, words))),
      ...few.map((s) => el('tr', null,
        el('td', null, `${day(s.time)} ${clock(s.time)}`),
        ...SERIES.map(([, key]) => el('td', null, bytes(s[key]))))));
  }

  function listenToHistory() {
    const box = $('history');
    const follow = (event) => {
      if (!state.plot) {
        return;
      }
      const { samples, x, width } = state.plot;
      const r = box.getBoundingClientRect();
      const at = (event.clientX - r.left) * width / r.width;
      let best = samples[0];
      for (const sample of samples) {
        if (Math.abs(x(sample.time) - at) < Math.abs(x(best.time) - at)) {
          best = sample;
        }
      }
      pickSample(best.time);
    };
    box.addEventListener('pointermove', follow);
    box.addEventListener('pointerdown', follow);
    box.addEventListener('pointerleave', (event) => {
      if (event.pointerType === 'mouse' && state.plot) {
        pickSample(null);
      }
    });
    box.addEventListener('keydown', (event) => {
      if (!state.plot) {
        return;
      }
      const { samples } = state.plot;
      const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10,
                      Home: -Infinity, End: Infinity };
      if (event.key === 'Escape') {
        pickSample(null);
      } else if (event.key in moves) {
        event.preventDefault();
        const at = pickSample(state.moment) + moves[event.key];
        pickSample(samples[Math.max(0, Math.min(samples.length - 1, at))]
          .time);
      }
    });
    for (const button of document.querySelectorAll('[data-range]')) {
      button.addEventListener('click', () => {
        state.range = Number(button.dataset.range);
        state.moment = null;
        for (const other of document.querySelectorAll('[data-range]')) {
          other.setAttribute('aria-pressed', String(other === button));
        }
        draw('history', drawHistory);
      });
    }
  }

  // -- savings ----------------------------------------------------------------

  // Rows {label, size, zeros, fresh, stored, images}, most saved first. As in
  // all figures, what is saved is a share of the bytes that are not zeros.
  function bars(list, button, rows, all, nothing) {
    const plain = (row) => row.size - row.zeros;
    const saving = (row) => plain(row) - row.stored;
    rows.sort((a, b) => saving(b) - saving(a) || b.size - a.size);
    const shown = rows.slice(0, all ? MORE_ROWS : ROWS);
    button.hidden = rows.length <= ROWS;
    setText(button, all ? 'Show less' : 'Show more');
    const scale = Math.max(1, ...shown.map((row) => row.size));
    list.replaceChildren(...shown.map((row) => {
      const bar = el('div', { class: 'split', 'aria-hidden': 'true' });
      splitBar(bar, parts(row.size, row.zeros, row.fresh, row.stored), scale);
      const saved = saving(row);
      return el('li', null,
        el('div', { class: 'row' }, row.label,
           el('span', null, el('strong', null,
                               el('data', { value: saved }, bytes(saved))),
              ` of ${bytes(plain(row))} saved, ${share(saved, plain(row))}`)),
        bar);
    }));
    if (rows.length > shown.length && all) {
      list.append(el('li', { class: 'muted' },
                     `and ${count(rows.length - shown.length)} more`));
    } else if (!rows.length) {
      list.append(el('li', { class: 'empty' }, nothing));
    }
  }

  function drawSavings() {
    const images = state.images && state.images.images || [];
    const nothing = state.images && state.images.refused || 'No images yet.';
    const projects = new Map();
    const rows = images.flatMap((image) => {
      const row = { size: image.size || 0, zeros: image.zero_bytes || 0,
                    fresh: image.new_bytes || 0,
                    stored: image.stored_bytes || 0 };
      const project = image.project || '';
      const sum = projects.get(project)
        || { size: 0, zeros: 0, fresh: 0, stored: 0, images: 0 };
      for (const key of Object.keys(row)) {
        sum[key] += row[key];
      }
      projects.set(project, sum);
      if (image.backup) {
        return [];              // they would fill the list
      }
      sum.images += 1;
      row.label = imageLabel(image.image_id, image.name);
      if (image.damaged) {
        row.label.append(' (damaged)');
      }
      return [row];
    });
    for (const node of document.querySelectorAll('.bars-legend')) {
      node.hidden = !images.length;
      node.replaceChildren(...legend(partsWithout('objects'), () => ''));
    }
    bars($('images'), $('images-more'), rows, state.allImages, nothing);
    bars($('projects'), $('projects-more'),
         [...projects].map(([project, sum]) => ({
           ...sum, label: el('span', { class: 'name' },
             project ? name(project) : 'no project',
             ` (${plural(sum.images, 'image')})`) })),
         state.allProjects, nothing);
  }

  // -- volumes ----------------------------------------------------------------

  const counterWords = (counters) => Object.entries(counters).map(
    ([key, value]) => key.endsWith('_bytes')
      ? `${key.slice(0, -6).replaceAll('_', ' ')} ${bytes(value)}`
      : `${key.replaceAll('_', ' ')} ${count(value)}`).join(', ');

  const duplicateWords = (value) => isNumber(value)
    ? `${percent(value)} of what was stored was stored already` : '';

  // No bound: the time is longer than those of the server's histogram.
  const bound = (seconds) => !isNumber(seconds) ? 'more than 8 s'
    : seconds < 1e-3 ? `${Math.round(seconds * 1e6)} µs`
      : seconds < 1 ? `${Math.round(seconds * 1e3)} ms`
        : `${Math.round(seconds)} s`;

  const latencyWords = (latency) => Object.entries(latency).filter(
    ([, times]) => times.counts.some((n) => n > 0)).map(
    ([operation, times]) => `${operation} ${bound(times.median)} (99 %: `
      + `${bound(times.p99)})`).join(', ');

  function volumeRow(volume) {
    const use = !volume.in_use ? 'not in use'
      : volume.is_live ? 'served on this host'
        : 'in use; figures as of its last checkpoint';
    return el('li', null,
      el('div', { class: 'row' }, name(volume.name),
         el('span', null, volume.state === null ? 'cannot be read'
           : [bytes(volume.size), ...volume.state === 'ready' ? []
             : [volume.state], use].join(', '))),
      volume.broken ? el('p', { class: 'error' }, `Broken: ${volume.broken}`)
        : null,
      latencyWords(volume.latency) ? el('p', { class: 'small muted' },
        `time of a request, median: ${latencyWords(volume.latency)}`) : null,
      el('p', { class: 'small muted' }, [
        `journal ${bytes(volume.journal_bytes)}`,
        counterWords(volume.counters),
        duplicateWords(volume.duplicate_percent)].filter(Boolean).join(', ')));
  }

  // Broken ones come first, then those with most traffic.
  function drawVolumes() {
    const { volumes = [], refused } = state.volumes || {};
    const list = $('volumes');
    list.parentElement.hidden = !volumes.length && !refused;
    const traffic = ({ counters }) =>
      (counters.read_bytes || 0) + (counters.written_bytes || 0);
    volumes.sort((a, b) => Boolean(b.broken) - Boolean(a.broken)
      || b.in_use - a.in_use || traffic(b) - traffic(a));
    const shown = volumes.slice(0, state.allVolumes ? MORE_ROWS : ROWS);
    const button = $('volumes-more');
    button.hidden = volumes.length <= ROWS;
    setText(button, state.allVolumes ? 'Show less' : 'Show more');
    setText($('volumes-note'), refused
      || `${plural(volumes.length, 'volume')}, `
        + `${count(volumes.filter((v) => v.in_use).length)} in use. The `
        + 'counters begin when a volume is made.'
        + (volumes.length > shown.length
          ? ` ${count(shown.length)} are shown.` : ''));
    list.replaceChildren(...shown.map(volumeRow));
  }

  // -- maps that one can walk through -----------------------------------------

  // Pointer, touch and arrow keys choose one of the cells of `box`. A drawing
  // leaves box.map = {count, columns, at(x, y), pick(index)} there.
  function listenToMap(box) {
    const pick = (index) => {
      const map = box.map;
      if (map && index >= 0 && index < map.count) {
        box.picked = index;
        map.pick(index);
      }
    };
    const follow = (event) => {
      const drawing = box.querySelector('svg');
      if (!drawing || !box.map) {
        return;
      }
      const r = drawing.getBoundingClientRect();
      const zoom = drawing.viewBox.baseVal.width / r.width;
      pick(box.map.at((event.clientX - r.left) * zoom,
                      (event.clientY - r.top) * zoom));
    };
    box.addEventListener('pointermove', follow);
    box.addEventListener('pointerdown', follow);
    box.addEventListener('keydown', (event) => {
      if (!box.map) {
        return;
      }
      const { columns, count: cells } = box.map;
      const at = box.picked === undefined ? -1 : box.picked;
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1,
                   ArrowUp: at - columns, ArrowDown: at + columns,
                   Home: 0, End: cells - 1 }[event.key];
      if (to !== undefined) {
        event.preventDefault();
        pick(at < 0 ? 0 : to);
      }
    });
  }

  function showMap(box, scale, readout) {
    box.hidden = false;
    scale.hidden = false;
    readout.hidden = false;
    if (box.picked === undefined) {
      setText(readout,
              'Point at a cell or tap it, or go there by the arrow keys.');
    }
  }

  // Nothing to draw: say why, or that there is nothing.
  function clearMap(box, scale, readout, note, words) {
    box.map = null;
    box.picked = undefined;
    box.replaceChildren();
    box.hidden = true;
    scale.hidden = true;
    readout.hidden = true;
    setText(note, words);
  }

  // -- sharing ----------------------------------------------------------------

  // Alike images next to each other: each follows the one it shares most with.
  function alike(shared) {
    const left = shared.map((_, i) => i);
    const order = left.splice(0, 1);
    while (left.length) {
      const last = order[order.length - 1];
      let best = 0;
      left.forEach((candidate, i) => {
        if (overlap(shared, last, candidate)
            > overlap(shared, last, left[best])) {
          best = i;
        }
      });
      order.push(...left.splice(best, 1));
    }
    return order;
  }

  // The share of the smaller image's blocks that both have.
  function overlap(shared, a, b) {
    const smaller = Math.min(shared[a][a], shared[b][b]);
    return smaller > 0 ? Math.min(1, shared[a][b] / smaller) : 0;
  }

  function drawSharing() {
    const box = $('sharing');
    const { images = [], shared = [], refused } = state.sharing || {};
    const names = $('sharing-names');
    if (!images.length) {
      names.replaceChildren();
      clearMap(box, $('sharing-scale'), $('sharing-readout'),
               $('sharing-note'), refused || (anyImages()
                 ? 'No images that can be compared.' : 'No images yet.'));
      return;
    }
    showMap(box, $('sharing-scale'), $('sharing-readout'));
    const total = state.status && state.status.space.images;
    setText($('sharing-note'), (total > images.length
      ? `${count(images.length)} of ${plural(total, 'image')}, the largest. `
      : '') + 'Alike images are next to each other.');
    const order = alike(shared);
    const size = images.length;
    const called = new Map((state.images && state.images.images || []).map(
      (image) => [image.image_id, image.name]));
    const margin = 20;
    const width = Math.min(Math.max(box.clientWidth, 240), margin + size * 64);
    const step = (width - margin) / size;
    const drawing = svg('svg', { viewBox: `0 0 ${width} ${width}`,
                                 'aria-hidden': 'true' });
    drawing.style.maxWidth = `${width}px`;
    const small = step < 16 ? 9 : 12;
    order.forEach((_, i) => {
      const middle = margin + (i + .5) * step;
      const label = { 'text-anchor': 'middle', 'font-size': small };
      const words = [svg('text', { ...label, x: middle, y: 13 }, `${i + 1}`),
                     svg('text', { ...label, x: 9, y: middle + 4 },
                         `${i + 1}`)];
      words.forEach((w) => { w.style.fontSize = `${small}px`; });
      drawing.append(...words);
    });
    const cell = Math.max(1, step - (step > 12 ? 2 : 1));
    order.forEach((a, row) => order.forEach((b, column) => {
      const place = { x: margin + column * step, y: margin + row * step,
                      width: cell, height: cell,
                      rx: Math.min(3, cell / 5) };
      drawing.append(svg('rect', { ...place, class: a === b ? 'cell-self'
        : 'cell-empty' }));
      if (a !== b && overlap(shared, a, b) > 0) {
        // Even a little is to be seen.
        drawing.append(svg('rect', {
          ...place, class: 'cell-shared',
          'fill-opacity': .1 + .9 * overlap(shared, a, b) }));
      }
    }));
    const mark = svg('rect', { class: 'picked', visibility: 'hidden',
                               width: cell, height: cell, rx: 2 });
    drawing.append(mark);
    box.replaceChildren(drawing);
    names.replaceChildren(...order.map((image, i) =>
      el('li', null, el('span', { class: 'number' }, `${i + 1}`),
         imageLabel(images[image], called.get(images[image])))));
    const blockSize = state.status ? averageBlock(state.status.repository) : 0;
    box.map = {
      count: size * size, columns: size,
      at(x, y) {
        const column = Math.floor((x - margin) / step);
        const row = Math.floor((y - margin) / step);
        return column >= 0 && column < size && row >= 0 && row < size
          ? row * size + column : -1;
      },
      pick(index) {
        const row = Math.floor(index / size);
        const column = index % size;
        const [a, b] = [order[row], order[column]];
        mark.setAttribute('x', margin + column * step);
        mark.setAttribute('y', margin + row * step);
        mark.setAttribute('visibility', 'visible');
        [...names.children].forEach((li, i) =>
          li.classList.toggle('on', i === row || i === column));
        setText($('sharing-readout'), a === b
          ? `Image ${row + 1} has ${plural(shared[a][a], 'distinct block')}.`
          : `${row + 1} and ${column + 1} share `
            + `${plural(shared[a][b], 'block')}, about `
            + `${bytes(shared[a][b] * blockSize)}: `
            + `${share(shared[a][b], shared[a][a])} of ${row + 1}, `
            + `${share(shared[a][b], shared[b][b])} of ${column + 1}.`);
      },
    };
    if (box.picked !== undefined && box.picked < size * size) {
      box.map.pick(box.picked);
    }
  }

  // -- groups -----------------------------------------------------------------

  // By way of a pale middle: orange and green mixed are just dark.
  function colourOf(live) {
    const [from, to, part] = live < .5 ? ['low', 'middle', 2 * live]
      : ['middle', 'high', 2 * live - 1];
    return `color-mix(in srgb, var(--live-${to}) ${(100 * part).toFixed(0)}%, `
      + `var(--live-${from}))`;
  }

  // Where there are more groups than can be told apart, each cell is several.
  function cellsOf(groups) {
    const each = Math.ceil(groups.length / MAX_CELLS);
    const cells = [];
    for (let i = 0; i < groups.length; i += each) {
      const some = groups.slice(i, i + each);
      const sum = (key) => some.reduce((s, g) => s + (g[key] || 0), 0);
      cells.push({ first: some[0].number, last: some[some.length - 1].number,
                   slots: sum('slots'), published: sum('published'),
                   live: sum('live'), disk: sum('disk_bytes'),
                   known: some.every((g) => isNumber(g.live)) });
    }
    return [cells, each];
  }

  function drawGroups() {
    const box = $('groups');
    const { groups = [], refused } = state.groups || {};
    if (!groups.length) {
      clearMap(box, $('groups-scale'), $('groups-readout'), $('groups-note'),
               refused || 'No block groups yet.');
      return;
    }
    showMap(box, $('groups-scale'), $('groups-readout'));
    const [cells, each] = cellsOf(groups);
    setText($('groups-note'), `${plural(groups.length, 'group')}. Height: how `
      + 'much of the group was ever used; colour: how much of that still is.'
      + (each > 1 ? ` Each cell is ${each} groups.` : ''));
    const available = Math.max(box.clientWidth, 240);
    const step = cells.length > 600 ? 13 : cells.length > 120 ? 18 : 26;
    const tall = Math.round(step * 1.4);
    const gap = step > 13 ? 3 : 2;
    const columns = Math.max(1, Math.floor(available / step));
    const height = Math.ceil(cells.length / columns) * tall;
    const width = columns * step;
    const drawing = svg('svg', { viewBox: `0 0 ${width} ${height}`,
                                 'aria-hidden': 'true' });
    drawing.style.maxWidth = `${width}px`;
    const place = (i) => [i % columns * step,
                          Math.floor(i / columns) * tall];
    cells.forEach((cell, i) => {
      const [x, y] = place(i);
      const full = cell.slots > 0
        ? Math.min(1, cell.published / cell.slots) : 0;
      const filled = full > 0 ? Math.max(2, full * (tall - gap)) : 0;
      drawing.append(svg('rect', {
        class: 'cell-empty', x, y, width: step - gap, height: tall - gap,
        rx: 2 }));
      const used = svg('rect', {
        x, y: y + tall - gap - filled, width: step - gap, height: filled,
        rx: 2 });
      used.style.fill = cell.known
        ? colourOf(cell.published ? Math.min(1, cell.live / cell.published)
          : 0) : 'var(--muted)';
      drawing.append(used);
    });
    const mark = svg('rect', { class: 'picked', visibility: 'hidden',
                               width: step - gap, height: tall - gap,
                               rx: 2 });
    drawing.append(mark);
    box.replaceChildren(drawing);
    box.map = {
      count: cells.length, columns,
      at(x, y) {
        const column = Math.floor(x / step);
        const index = Math.floor(y / tall) * columns + column;
        return column >= 0 && column < columns && y >= 0
          && index < cells.length ? index : -1;
      },
      pick(index) {
        const cell = cells[index];
        const [x, y] = place(index);
        mark.setAttribute('x', x);
        mark.setAttribute('y', y);
        mark.setAttribute('visibility', 'visible');
        setText($('groups-readout'), (cell.first === cell.last
          ? `Group ${cell.first}` : `Groups ${cell.first} to ${cell.last}`)
          + `: ${count(cell.published)} of ${count(cell.slots)} slots were `
          + `used${cell.known ? `, ${share(cell.live, cell.published)} of `
            + 'them still are' : ''}; ${bytes(cell.disk)} on disk.`);
      },
    };
    if (box.picked !== undefined && box.picked < cells.length) {
      box.map.pick(box.picked);
    }
  }

  // -- reads, filter, damage, errors ------------------------------------------

  function facts(node, rows) {
    node.replaceChildren(...rows.flatMap(([label, text]) =>
      [el('dt', null, label), el('dd', null, text)]));
  }

  function drawReads(reads, cold) {
    const asked = reads.cache_hits + reads.cache_misses;
    const { bytesPerSecond, requestsPerSecond } = state.rates || {};
    facts($('reads'), [
      ['Connections', count(reads.connections)],
      ['Requests', count(reads.requests)
        + (requestsPerSecond >= .05
          ? `, ${requestsPerSecond.toFixed(1)} a second` : '')],
      ['Sent', bytes(reads.bytes)
        + (bytesPerSecond >= 1 ? `, ${bytes(bytesPerSecond)} a second` : '')],
      ['Found in the cache', asked > 0
        ? `${share(reads.cache_hits, asked)} of ${count(asked)} segments`
        : NONE],
      ['Size of the cache', bytes(reads.cache_bytes)],
      ...cold ? [
        ['From the object store', `${plural(cold.gets, 'request')}, `
          + bytes(cold.received)],
        ['Slices it did not give', count(cold.unavailable)]] : [],
    ]);
  }

  // When the filter last had all that other hosts had stored.
  function followed(filter) {
    const behind = filter.filter_behind > 0
      ? `, ${plural(filter.filter_behind, 'group')} to read` : '';
    return isNumber(filter.filter_refresh_age_seconds)
      ? `followed ${duration(filter.filter_refresh_age_seconds)} ago${behind}`
      : `not followed yet${behind}`;
  }

  function drawFilter(filter) {
    const level = filter.filter_level;
    if (filter.filter_error) {
      facts($('filter'), [['Not available', filter.filter_error]]);
      return;
    }
    if (!(filter.filter_places > 0)) {
      facts($('filter'), [['Hints', 'none on this host yet']]);
      return;
    }
    facts($('filter'), [
      ['Hints', `${count(filter.filter_hints)}, `
        + `${share(filter.filter_hints, filter.filter_places)} full`],
      ['Memory', bytes(filter.filter_bytes)],
      ['Keeps', level > 0 ? `1 in ${count(2 ** level)} fingerprints`
        : 'every fingerprint'],
      ['Rebuilt', filter.filter_complete ? 'completely'
        : `up to group ${count(filter.filter_rebuilt)}`],
      ['Other hosts', followed(filter)],
    ]);
  }

  // What comes from other hosts, and goes there; only where something does.
  function drawElsewhere(status) {
    const { cache, replication, receiving = {} } = status;
    const received = receiving.images > 0 || receiving.under_way > 0;
    $('held').parentElement.hidden = !cache;
    $('sites').parentElement.hidden = !replication && !received;
    $('elsewhere').hidden = !cache && !replication && !received;
    if (cache) {
      drawHeld(cache);
    }
    facts($('sites'), [
      ...(replication ? [
        ['Replicated to', replication.target_url],
        ['Replicated', `${plural(replication.replicated, 'image')}, `
          + `${bytes(replication.sent_bytes)} sent`],
        ['To be replicated', plural(replication.pending, 'image')],
        ['Failed', count(Object.keys(replication.failed || {}).length)],
      ] : []),
      ...(received ? [
        ['Received', `${plural(receiving.images, 'image')}, `
          + `${bytes(receiving.bytes)}`],
      ] : []),
    ]);
  }

  function drawHeld(cache) {
    const { held = {}, arrivals = {} } = cache;
    const failure = cache.last_failure;
    facts($('held'), [
      ['Storing host', cache.upstream_url],
      ['Held', `${plural(held.images, 'image')}, ${bytes(held.disk_bytes)}`
        + (held.limit_bytes > 0 ? ` of ${bytes(held.limit_bytes)}` : '')],
      ['Evicted', plural(held.evictions, 'image')],
      ['Given from here', `${bytes(cache.bytes_here)} in `
        + `${plural(cache.here + cache.arriving, 'download')}`],
      ['Received for that', bytes(arrivals.received_bytes)],
      ['On their way', plural((arrivals.images || []).length, 'image')],
      ['Ended by Glance', plural(cache.fallbacks, 'download')],
      ...(held.wrong_images > 0 ? [['Wrong on the storing host',
        plural(held.wrong_images, 'image')]] : []),
      ...(failure ? [['Last failure',
        `${moment(failure.time)}: ${failure.text}`]] : []),
    ]);
  }

  function drawDamage(status) {
    const { blocks, images = [] } = status.damage || {};
    const called = new Map(Object.entries(status.names || {}));
    const unreadable = Object.keys(
      status.catalog && status.catalog.unreadable || {});
    setText($('damage-text'), blocks > 0
      ? `${plural(blocks, 'damaged block')}. Images that need them:`
      : images.length ? 'Images that cannot be read as a whole:'
        : unreadable.length ? 'Images whose recipe cannot be read:'
          : blocks === 0 ? 'No damaged blocks are known.'
            : 'Unknown: this daemon has not maintained the repository '
            + 'yet.');
    $('damaged').replaceChildren(
      ...[...new Set([...images, ...unreadable])].slice(0, MORE_ROWS).map(
        (image) => el('li', null, imageLabel(image,
                                               called.get(image)))));
  }

  function drawErrors(errors) {
    const rows = errors.slice().sort((a, b) => b.time - a.time).map((error) =>
      el('li', null, el('span', { class: 'muted' },
                        `${moment(error.time)} `
                        + `${NAMED[error.task] || error.task || ''}: `),
         String(error.text)));
    $('errors').replaceChildren(...rows.length ? rows
      : [el('li', { class: 'muted' }, 'None is known.')]);
  }

  // -- all of it --------------------------------------------------------------

  function drawDetails() {
    for (const [part, keys, function_] of [
      ['history', ['history'], drawHistory],
      ['empty', ['images'], drawEmpty],
      ['savings', ['images'], drawSavings],
      ['volumes', ['volumes'], drawVolumes],
      ['sharing', ['sharing', 'images'], drawSharing],
      ['groups', ['groups'], drawGroups]]) {
      const content = JSON.stringify(keys.map((key) => state[key]));
      if (content !== state.drawn[part]) {
        state.drawn[part] = content;
        draw(part, function_);
      }
    }
  }

  function start() {
    listenToHistory();
    listenToMap($('sharing'));
    listenToMap($('groups'));
    for (const [id, key, part, function_] of [
      ['images-more', 'allImages', 'savings', drawSavings],
      ['projects-more', 'allProjects', 'savings', drawSavings],
      ['volumes-more', 'allVolumes', 'volumes', drawVolumes]]) {
      $(id).addEventListener('click', () => {
        state[key] = !state[key];
        draw(part, function_);
      });
    }
    let width = window.innerWidth;
    window.addEventListener('resize', () => {
      if (window.innerWidth !== width) {
        width = window.innerWidth;
        draw('history', drawHistory);
        draw('sharing', drawSharing);
        draw('groups', drawGroups);
      }
    });
    poll();
  }

  start();
})();
