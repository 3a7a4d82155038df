// What all of the page uses: elements, storage, words for numbers.

const byId = (id) => document.getElementById(id);

// An element. Attributes that are functions are listeners of the event; null and false are left out. Text is only ever
// put in as text: nothing in this page makes markup out of a string.
function node(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === 'function')
      element.addEventListener(name, value);
    else
      element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const kSvg = 'http://www.w3.org/2000/svg';

function svg(tag, attributes = {}) {
  const element = document.createElementNS(kSvg, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function icon(name) {
  const element = svg('svg', {'aria-hidden': 'true'});
  element.append(svg('use', {href: `#i-${name}`}));
  return element;
}

function iconButton(name, label, click) {
  return node('button', {type: 'button', class: 'icon small', 'aria-label': label, title: label, click}, icon(name));
}

// What is kept in this browser. Where it keeps nothing (a private window, storage switched off), this page's memory.
const kept = {
  memory: new Map(),
  read(key) {
    let text = this.memory.get(key) ?? null;
    try {
      text = localStorage.getItem(`fourfold.${key}`) ?? text;
      return text === null ? null : JSON.parse(text);
    } catch {
      return null;
    }
  },
  // False when it will not be there after a reload.
  write(key, value) {
    const text = JSON.stringify(value);
    try {
      localStorage.setItem(`fourfold.${key}`, text);
      this.memory.delete(key);
      return true;
    } catch {
      this.memory.set(key, text);
      return false;
    }
  },
  remove(key) {
    this.memory.delete(key);
    try {
      localStorage.removeItem(`fourfold.${key}`);
    } catch {
      // There is nothing to remove.
    }
  },
};

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, '0')).join('');
}

// Three digits are enough to read.
function amount(value) {
  if (value === null || !Number.isFinite(value)) return '–';
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString('en', {minimumFractionDigits: digits, maximumFractionDigits: digits});
}

// One digit behind the point, where there is something to say with it.
const tenths = (value) =>
    (value >= 100 || Number.isInteger(Math.round(value * 10) / 10) ? Math.round(value) : value.toFixed(1));

function percent(share) { return share === null || !Number.isFinite(share) ? '–' : `${tenths(share * 100)} %`; }

function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return '–';
  if (seconds < 1) return `${tenths(seconds * 1000)} ms`;
  if (seconds < 100) return `${tenths(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

function bytes(count) {
  if (count === null || !Number.isFinite(count)) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  for (; count >= 1024 && unit + 1 < units.length; ++unit) count /= 1024;
  return `${tenths(count)} ${units[unit]}`;
}

function counted(count, one, many = `${one}s`) { return `${amount(count)} ${count === 1 ? one : many}`; }

// For those who do not see the page change.
function say(words) { byId('said').textContent = words; }

// A line at the bottom, for some seconds; with something to undo, as a button.
let toastTimer = 0;
function toast(words, undo = null) {
  const box = byId('toast');
  const hide = () => {
    box.hidden = true;
  };
  box.replaceChildren(words);
  if (undo)
    box.append(
        ' ',
        node(
            'button', {
              type: 'button',
              class: 'link',
              click() {
                hide();
                undo();
              }
            },
            'Undo'));
  box.hidden = false;
  clearTimeout(toastTimer);
  toastTimer = setTimeout(hide, undo ? 10000 : 5000);
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Pages that did not come over TLS or from this machine have no clipboard but this one.
    const area = node('textarea', {class: 'unseen', 'aria-hidden': 'true'});
    area.value = text;
    const before = document.activeElement;
    document.body.append(area);
    area.select();
    const done = document.execCommand('copy');
    area.remove();
    before?.focus();
    return done;
  }
}

// A button that copies what `text` gives, and says so.
function copyButton(label, text) {
  const button = iconButton('copy', label, async () => {
    const done = await copyText(text());
    button.replaceChildren(icon(done ? 'done' : 'copy'));
    say(done ? 'Copied' : 'The browser does not let this page copy');
    setTimeout(() => button.replaceChildren(icon('copy')), 1500);
  });
  return button;
}
