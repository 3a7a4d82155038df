// The second tab: figures of the server, drawn from its /metrics once a second while they are looked at.

const kPeriod = 1000;  // ms
const kSamples = 120;  // that a chart shows
const kWindow = 30;    // samples over which shares and percentiles are taken

const live = {
  samples: [],
  timer: 0,
  charts: [],
  asking: false
};

// Prometheus' text: name → [{labels, value}].
function parseMetrics(text) {
  const out = new Map();
  for (const line of text.split('\n')) {
    const found = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!found) continue;
    const labels = {};
    for (const [, name, value] of (found[2] ?? '').matchAll(/([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g))
      labels[name] = value;
    if (!out.has(found[1])) out.set(found[1], []);
    out.get(found[1]).push({labels, value: found[3] === '+Inf' ? Infinity : Number(found[3])});
  }
  return out;
}

// One look at the server: what the charts and tiles are made from. What it does not have is null.
function sampleOf(metrics, time) {
  const all = (name) => metrics.get(name) ?? [];
  const value = (name) => metrics.has(name) ? all(name).reduce((sum, one) => sum + one.value, 0) : null;
  const by = (name, label) => Object.fromEntries(all(name).map((one) => [one.labels[label], one.value]));
  return {
    time,
    // Every token of a running answer: the gaps between tokens, and the first ones. generation_tokens_total counts
    // answers that have ended.
    generated: value('vllm:inter_token_latency_seconds_count') + value('vllm:time_to_first_token_seconds_count'),
    prompt: value('vllm:prompt_tokens_total'),
    running: value('vllm:num_requests_running'),
    waiting: value('vllm:num_requests_waiting'),
    pages: value('vllm:kv_cache_usage_perc'),
    asked: value('vllm:prefix_cache_queries_total'),
    hits: value('vllm:prefix_cache_hits_total'),
    cacheBytes: value('fourfold_prefix_cache_bytes'),
    drafted: value('vllm:spec_decode_num_draft_tokens_total'),
    accepted: value('vllm:spec_decode_num_accepted_tokens_total'),
    draftedAt: by('fourfold_drafts_verified_per_position_total', 'position'),
    acceptedAt: by('vllm:spec_decode_num_accepted_tokens_per_pos_total', 'position'),
    preemptions: value('vllm:num_preemptions_total'),
    ended: by('vllm:request_success_total', 'finished_reason'),
    first: by('vllm:time_to_first_token_seconds_bucket', 'le'),
    gap: by('vllm:inter_token_latency_seconds_bucket', 'le'),
    connections: value('fourfold_http_connections'),
    resident: value('process_resident_memory_bytes'),
  };
}

// ---- figures over time

// Increase a second between neighbours, of a counter.
function rates(samples, name) {
  return samples.map((one, i) => {
    const before = samples[i - 1];
    if (!before || one[name] === null || before[name] === null) return null;
    return (one[name] - before[name]) / ((one.time - before.time) / 1000);
  });
}

// Share of `whole` that was `part`, over the window before each sample.
function shares(samples, part, whole) {
  return samples.map((one, i) => {
    const before = samples[Math.max(0, i - kWindow)];
    const count = one[whole] - before[whole];
    return count > 0 ? (one[part] - before[part]) / count : null;
  });
}

// A quantile of a histogram's increase between two samples, straight lines inside of a column; null without any.
function quantile(before, now, name, share) {
  const columns = Object.entries(now[name]).map(
      ([bound, count]) =>
          ({bound: bound === '+Inf' ? Infinity : Number(bound), count: count - (before?.[name][bound] ?? 0)}));
  columns.sort((a, b) => a.bound - b.bound);
  const all = columns.length > 0 ? columns[columns.length - 1].count : 0;
  if (all <= 0) return null;
  let low = 0;
  let below = 0;
  for (const {bound, count} of columns) {
    if (count >= share * all)
      return bound === Infinity ? low : low + (bound - low) * (share * all - below) / (count - below);
    [low, below] = [bound, count];
  }
  return low;
}

// ---- charts

const kWidth = 600;
const kHeight = 150;

// The end of an axis: 1, 2 or 5 times a power of ten.
function roundUp(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * unit >= value * 0.9999) * unit;
}

// A chart of lines over time. `series`: {name, values(samples)}; the first is filled. `top`: the end of the axis, where
// it is fixed.
function lineChart(title, series, format, top = null) {
  const picture = svg('svg', {viewBox: `0 0 ${kWidth} ${kHeight}`, preserveAspectRatio: 'none', role: 'img'});
  for (const share of [0.25, 0.5, 0.75])
    picture.append(svg('line', {class: 'grid', x1: 0, x2: kWidth, y1: kHeight * share, y2: kHeight * share}));
  const area = svg('path', {class: 'area'});
  const lines = series.map((_, i) => svg('path', {class: `line line-${i}`}));
  const cursor = svg('line', {class: 'cursor', y1: 0, y2: kHeight, visibility: 'hidden'});
  picture.append(area, ...lines, cursor);
  const values = series.map(() => node('b', {}, '–'));
  const end = node('span', {class: 'axis-top'});
  const when = node('span', {class: 'when'}, 'now');
  const element = node(
      'section', {class: 'chart'}, node('div', {class: 'chart-head'}, node('h2', {}, title), when),
      node(
          'ul', {class: 'legend'},
          ...series.map(
              ({name}, i) =>
                  node('li', {}, node('i', {class: `key key-${i}`, 'aria-hidden': 'true'}), `${name} `, values[i]))),
      node('div', {class: 'plot'}, picture, end, node('span', {class: 'axis-bottom'}, '0')),
      node(
          'div', {class: 'axis-time', 'aria-hidden': 'true'}, node('span', {}, `${kSamples * kPeriod / 60000} min ago`),
          node('span', {}, 'now')));
  let held = [];
  let looked = null;  // how many samples before the last one the pointer is
  const tell = () => {
    const count = held[0]?.length ?? 0;
    const at = count - 1 - (looked ?? 0);
    when.textContent = looked ? `${looked * kPeriod / 1000} s ago` : 'now';
    held.forEach((column, i) => {
      values[i].textContent = at >= 0 && column[at] !== null ? format(column[at]) : '–';
    });
    const x = kWidth - (looked ?? 0) * kWidth / (kSamples - 1);
    cursor.setAttribute('x1', x);
    cursor.setAttribute('x2', x);
    cursor.setAttribute('visibility', looked === null || at < 0 ? 'hidden' : 'visible');
  };
  picture.addEventListener('pointermove', (event) => {
    const box = picture.getBoundingClientRect();
    looked = Math.round((1 - (event.clientX - box.left) / box.width) * (kSamples - 1));
    tell();
  });
  picture.addEventListener('pointerleave', () => {
    looked = null;
    tell();
  });
  const update = (samples) => {
    held = series.map((one) => one.values(samples));
    const highest = top ?? roundUp(Math.max(1, ...held.flat().filter((value) => value !== null)));
    end.textContent = format(highest);
    const x = (i) => kWidth - (samples.length - 1 - i) * kWidth / (kSamples - 1);
    const y = (value) => kHeight - 1 - Math.min(value / highest, 1) * (kHeight - 3);
    held.forEach((column, i) => {
      let line = '';
      let fill = '';
      column.forEach((value, at) => {
        if (value === null) return;
        const begins = at === 0 || column[at - 1] === null;
        const place = `${x(at).toFixed(1)} ${y(value).toFixed(1)}`;
        line += `${begins ? 'M' : 'L'}${place}`;
        fill += begins ? `M${x(at).toFixed(1)} ${kHeight}L${place}` : `L${place}`;
        if (at + 1 === column.length || column[at + 1] === null) fill += `L${x(at).toFixed(1)} ${kHeight}Z`;
      });
      lines[i].setAttribute('d', line);
      if (i === 0) area.setAttribute('d', fill);
    });
    tell();
    picture.setAttribute(
        'aria-label', `${title}: ${series.map(({name}, i) => `${name} ${values[i].textContent}`).join(', ')}`);
  };
  return {element, update};
}

// The share of drafts that were accepted, at each position that had any.
function draftBars() {
  const bars = node('ul', {class: 'bars'});
  const nothing = node('p', {class: 'fine'}, 'Nothing was drafted yet. --speculative-config switches drafts on.');
  const element = node(
      'section', {class: 'chart'},
      node(
          'div', {class: 'chart-head'}, node('h2', {}, 'Drafts accepted by position'),
          node('span', {class: 'when'}, 'since the start')),
      bars, nothing);
  const update = (samples) => {
    const {draftedAt, acceptedAt} = samples[samples.length - 1];
    const positions = Object.keys(draftedAt).filter((position) => draftedAt[position] > 0);
    nothing.hidden = positions.length > 0;
    bars.replaceChildren(...positions.map((position) => {
      const share = acceptedAt[position] / draftedAt[position];
      const bar = node('span', {class: 'bar-fill'});
      bar.style.width = `${100 * share}%`;
      return node(
          'li', {}, node('span', {}, `${Number(position) + 1}`),
          node('span', {class: 'bar-track', 'aria-hidden': 'true'}, bar), node('b', {}, percent(share)));
    }));
  };
  return {element, update};
}

const kLive = [
  () => lineChart('Throughput, tokens a second', [
    {name: 'generated', values: (samples) => rates(samples, 'generated')},
    {name: 'of prompts', values: (samples) => rates(samples, 'prompt')}], (value) => amount(Math.round(value))),
  () => lineChart('Queue, requests', [
    {name: 'running', values: (samples) => samples.map((one) => one.running)},
    {name: 'waiting', values: (samples) => samples.map((one) => one.waiting)}], (value) => amount(value)),
  () => lineChart('Cache', [
    {name: 'in use by running requests', values: (samples) => samples.map((one) => one.pages)},
    {name: 'prompts found in it', values: (samples) => shares(samples, 'hits', 'asked')}], percent, 1),
  () => lineChart('Drafts', [
    {name: 'accepted', values: (samples) => shares(samples, 'accepted', 'drafted')}], percent, 1),
  draftBars,
];

function tilesOf(samples) {
  const now = samples[samples.length - 1];
  const before = samples.length > 1 ? samples[Math.max(0, samples.length - 1 - kWindow)] : null;
  const speed = rates(samples, 'generated').at(-1);
  const times = (name) => {
    const [half, most] = [0.5, 0.99].map((share) => quantile(before, now, name, share));
    return half === null ? ['–', 'none lately'] : [duration(half), `99 %: ${duration(most)}`];
  };
  const ended = Object.values(now.ended).reduce((sum, count) => sum + count, 0);
  const bad = (now.ended.error ?? 0) + (now.ended.abort ?? 0);
  return [
    ['Tokens a second', speed === null ? '–' : amount(Math.round(speed)), `${amount(now.generated)} in all`],
    [
      'Requests', now.running === null ? '–' : `${amount(now.running)} running`,
      now.waiting === null ? '' : `${amount(now.waiting)} waiting`
    ],
    ['First token', ...times('first')],
    ['Between tokens', ...times('gap')],
    ['Answers', amount(ended), bad > 0 ? `${amount(bad)} stopped or failed` : 'none failed'],
    [
      'Prefix cache', now.cacheBytes === null ? '–' : bytes(now.cacheBytes),
      now.asked > 0 ? `${percent(now.hits / now.asked)} of prompts` : 'not asked yet'
    ],
    [
      'Drafts accepted', now.drafted > 0 ? percent(now.accepted / now.drafted) : '–',
      now.drafted > 0 ? `${amount(now.accepted)} of ${amount(now.drafted)}` : 'none drafted'
    ],
    [
      'Server', now.resident === null ? '–' : bytes(now.resident),
      now.connections === null ? '' : counted(now.connections, 'connection')
    ],
  ];
}

function showLive() {
  const {samples} = live;
  byId('tiles').replaceChildren(...tilesOf(samples).map(
      ([name, value, more]) => node(
          'div', {class: 'tile'}, node('dt', {}, name),
          node('dd', {}, node('b', {}, value), node('span', {class: 'fine'}, more)))));
  for (const chart of live.charts) chart.update(samples);
}

async function lookAtMetrics() {
  if (live.asking) return;
  live.asking = true;
  const state = byId('live-state');
  const tell = (words) => {
    if (state.textContent !== words) state.textContent = words;
  };
  try {
    const response = await fetch('metrics', {headers: headers(), cache: 'no-store'});
    if (!response.ok) throw await failureOfResponse(response);
    const sample = sampleOf(parseMetrics(await response.text()), performance.now());
    const last = live.samples.at(-1);
    // Counters that fall, or a long pause: these figures have nothing to do with those before.
    if (last && (sample.generated < last.generated || sample.time - last.time > 10 * kPeriod)) live.samples = [];
    live.samples.push(sample);
    live.samples.splice(0, live.samples.length - kSamples);
    showLive();
    tell('');
  } catch (error) {
    tell(error instanceof Failure ? error.message : 'The server does not answer; these are the last figures it gave.');
  } finally {
    live.asking = false;
  }
}

function watchLive() {
  const watched = !byId('live').hidden && document.visibilityState === 'visible';
  clearInterval(live.timer);
  if (!watched) return;
  if (live.charts.length === 0) {
    live.charts = kLive.map((make) => make());
    byId('charts').append(...live.charts.map(({element}) => element));
  }
  live.timer = setInterval(lookAtMetrics, kPeriod);
  lookAtMetrics();
}
