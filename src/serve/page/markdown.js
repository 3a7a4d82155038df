// The part of Markdown that models write: headings, lists, tables, quotes, code, emphasis, links. Anything else is
// text. Every element is made by its name and filled with text, so that no answer can be more than text.

const kMaxDepth = 8;
const kFence = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`]*)$/;
const kHeading = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const kRule = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const kItem = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+(.*))?$/;
const kQuote = /^ {0,3}>/;
const kTableRule = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

const indentOf = (line) => line.length - line.trimStart().length;

function isTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes('|') && lines[at + 1].includes('-') &&
      kTableRule.test(lines[at + 1]);
}

function cells(line) {
  const parts = line.trim().replace(/^\|/, '').replace(/\|$/, '').split(/(?<!\\)\|/);
  return parts.map((part) => part.trim().replaceAll('\\|', '|'));
}

// The blocks of a text: {kind, raw, …}. A block's `raw` says all about it, so that equal ones need not be drawn again.
function blocksOf(lines) {
  const blocks = [];
  let at = 0;
  const add = (kind, from, more) => blocks.push({kind, raw: lines.slice(from, at).join('\n'), ...more});
  while (at < lines.length) {
    const from = at;
    const line = lines[at];
    let found;
    if (line.trim() === '') {
      ++at;
    } else if ((found = kFence.exec(line))) {
      const [, fence, info] = found;
      const closes = (text) =>
          text.trim().length >= fence.length && text.trim() === fence[0].repeat(text.trim().length);
      for (++at; at < lines.length && !closes(lines[at]); ++at)
        ;
      const text = lines.slice(from + 1, at).join('\n');
      if (at < lines.length) ++at;
      add('code', from, {text, language: info.trim().split(/\s/)[0].slice(0, 40)});
    } else if ((found = kHeading.exec(line))) {
      ++at;
      add('heading', from, {level: found[1].length, text: found[2].replace(/[ \t]+#+[ \t]*$/, '')});
    } else if (kRule.test(line)) {
      ++at;
      add('rule', from);
    } else if (kQuote.test(line)) {
      for (; at < lines.length && kQuote.test(lines[at]); ++at)
        ;
      add('quote', from, {lines: lines.slice(from, at).map((text) => text.replace(/^ {0,3}> ?/, ''))});
    } else if (isTable(lines, at)) {
      for (at += 2; at < lines.length && lines[at].includes('|'); ++at)
        ;
      add('table', from, {head: cells(line), rows: lines.slice(from + 2, at).map(cells)});
    } else if ((found = kItem.exec(line))) {
      const items = [];
      at = takeItems(lines, at, items);
      const number = parseInt(found[2], 10);
      add('list', from, {items, ordered: !Number.isNaN(number), start: number});
    } else {
      for (++at; at < lines.length && !beginsBlock(lines, at); ++at)
        ;
      add('paragraph', from, {text: lines.slice(from, at).join('\n')});
    }
  }
  return blocks;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return line.trim() === '' || kFence.test(line) || kHeading.test(line) || kRule.test(line) || kQuote.test(line) ||
      kItem.test(line) || isTable(lines, at);
}

// The items of a list that begins at `at`: each an array of lines without their indentation. Returns where it ends.
function takeItems(lines, at, items) {
  const first = kItem.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const base = first[1].length;
  while (at < lines.length) {
    const found = kItem.exec(lines[at]);
    if (!found || found[1].length > base + 3 || /\d/.test(found[2]) !== ordered || kRule.test(lines[at])) break;
    const inner = found[1].length + found[2].length + 1;
    const item = [found[3] ?? ''];
    for (++at; at < lines.length; ++at) {
      const line = lines[at];
      if (line.trim() === '') {
        // An empty line belongs to the item when what follows it does.
        const next = lines.slice(at + 1, at + 20).find((text) => text.trim() !== '');
        if (next === undefined || indentOf(next) <= base) break;
        item.push('');
      } else if (indentOf(line) > base) {
        item.push(line.slice(Math.min(indentOf(line), inner)));
      } else {
        break;
      }
    }
    items.push(item);
    // Items may stand apart.
    let next = at;
    while (next < lines.length && lines[next].trim() === '') ++next;
    if (next > at && next < lines.length && kItem.test(lines[next]) && indentOf(lines[next]) >= base) at = next;
  }
  return at;
}

// ---- inside of a block

const kWord = /[\p{L}\p{N}_]/u;
const kMarks = [['**', 'strong'], ['__', 'strong'], ['~~', 'del'], ['*', 'em'], ['_', 'em']];

// An address that a link may have, or null. Following one is up to the reader.
function safeAddress(text) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function link(address, inside) {
  return node('a', {href: address, title: address, target: '_blank', rel: 'noopener noreferrer'}, inside);
}

function inlineOf(text, depth = 0) {
  const out = document.createDocumentFragment();
  let plain = '';
  let at = 0;
  const missing = new Set();  // marks that nothing closes any more
  const flush = () => {
    if (plain) out.append(plain);
    plain = '';
  };
  const closing = (mark, from) => {
    if (missing.has(mark)) return -1;
    let found = text.indexOf(mark, from);
    // A single mark is not half of a double one.
    while (mark.length === 1 && found >= 0 && text[found + 1] === mark) found = text.indexOf(mark, found + 2);
    if (found < 0) missing.add(mark);
    // Of three in a row the first closes what is inside.
    while (mark.length === 2 && found >= 0 && text[found + 2] === mark[0]) ++found;
    return found;
  };
  const emphasis = () => {
    for (const [mark, tag] of kMarks) {
      if (!text.startsWith(mark, at)) continue;
      const begin = at + mark.length;
      if (begin >= text.length || /\s/.test(text[begin])) continue;
      const end = closing(mark, begin);
      if (end <= begin || /\s/.test(text[end - 1])) continue;
      // Single ones inside of a word are no marks: snake_case_names, 2*3*4.
      const after = text[end + mark.length] ?? ' ';
      if (mark.length === 1 && ((at > 0 && kWord.test(text[at - 1])) || kWord.test(after))) continue;
      flush();
      out.append(node(tag, {}, inlineOf(text.slice(begin, end), depth + 1)));
      at = end + mark.length;
      return true;
    }
    return false;
  };
  const code = () => {
    const run = /^`+/.exec(text.slice(at, at + 32))[0];
    let end = at + run.length;
    if (missing.has(run)) return false;
    do {
      end = text.indexOf(run, end);
      if (end < 0) {
        missing.add(run);
        return false;
      }
      const beyond = end + run.length;
      if (text[beyond] !== '`') break;
      for (end = beyond; text[end] === '`'; ++end)
        ;
    } while (true);
    flush();
    const inside = text.slice(at + run.length, end);
    out.append(node('code', {}, /^ .*\S.* $/s.test(inside) ? inside.slice(1, -1) : inside));
    at = end + run.length;
    return true;
  };
  const named = () => {
    const middle = closing('](', at + 1);
    const end = middle < 0 ? -1 : text.indexOf(')', middle);
    if (end < 0 || text.slice(at + 1, middle).includes('\n')) return false;
    const address = safeAddress(text.slice(middle + 2, end).trim());
    if (address === null) return false;
    flush();
    out.append(link(address, inlineOf(text.slice(at + 1, middle), kMaxDepth)));
    at = end + 1;
    return true;
  };
  const bare = () => {
    const found = /^https?:\/\/[^\s<>"'`]+/.exec(text.slice(at, at + 2000))[0].replace(/[.,;:!?)\]*_]+$/, '');
    const address = safeAddress(found);
    if (address === null) return false;
    flush();
    out.append(link(address, found));
    at += found.length;
    return true;
  };
  while (at < text.length) {
    const c = text[at];
    if (c === '\\' && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? '')) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (c === '`' && code()) continue;
    if (depth < kMaxDepth) {
      if ((c === '*' || c === '_' || c === '~') && emphasis()) continue;
      if (c === '[' && named()) continue;
      if (c === 'h' && /^https?:\/\/[^\s<>"'`]/.test(text.slice(at, at + 9)) && bare()) continue;
    }
    // A run of the same mark is one thing, so that a long one is not looked at from each of its places.
    let end = at + 1;
    if (c === '`')
      for (; text[end] === c; ++end)
        ;
    plain += text.slice(at, end);
    at = end;
  }
  flush();
  return out;
}

// ---- elements

function codeBlock(block) {
  const code = node('code', {}, block.text);
  const element = node(
      'div', {class: 'code'},
      node(
          'div', {class: 'code-head'}, node('span', {}, block.language || 'text'),
          copyButton('Copy the code', () => code.textContent)),
      node('pre', {tabindex: '0', 'aria-label': `Code, ${block.language || 'text'}`}, code));
  element.update = (next) => {
    // More of the same, as streams bring it, is added: what is selected or scrolled stays so.
    const old = code.textContent;
    if (next.text.startsWith(old) && code.firstChild)
      code.firstChild.appendData(next.text.slice(old.length));
    else
      code.textContent = next.text;
  };
  return element;
}

function tableElement(block) {
  const row = (tag, texts) => node('tr', {}, ...block.head.map((_, i) => node(tag, {}, inlineOf(texts[i] ?? ''))));
  return node(
      'div', {class: 'table', tabindex: '0'},
      node(
          'table', {}, node('thead', {}, row('th', block.head)),
          node('tbody', {}, ...block.rows.map((texts) => row('td', texts)))));
}

function listElement(block, depth) {
  const items = block.items.map((lines) => {
    const item = node('li');
    const inner = blocksOf(lines);
    // An item of one paragraph is that text.
    if (inner.length > 0 && inner[0].kind === 'paragraph') item.append(inlineOf(inner.shift().text));
    item.append(...inner.map((one) => blockElement(one, depth + 1)));
    return item;
  });
  return node(block.ordered ? 'ol' : 'ul', {start: block.ordered && block.start !== 1 ? block.start : null}, ...items);
}

function blockElement(block, depth) {
  if (depth > kMaxDepth) return node('p', {}, block.raw);
  switch (block.kind) {
    case 'code':
      return codeBlock(block);
    // The page has one above these.
    case 'heading':
      return node(`h${Math.min(block.level + 1, 6)}`, {}, inlineOf(block.text));
    case 'rule':
      return node('hr');
    case 'quote':
      return node('blockquote', {}, ...blocksOf(block.lines).map((one) => blockElement(one, depth + 1)));
    case 'table':
      return tableElement(block);
    case 'list':
      return listElement(block, depth);
    default:
      return node('p', {}, inlineOf(block.text));
  }
}

// Shows `text` in `container`. Called again with more text, it draws what has changed.
function showMarkdown(container, text) {
  const shown = container.blocks ?? [];
  const blocks = blocksOf(text.split(/\r?\n/));
  container.blocks = blocks.map((block, i) => {
    const old = shown[i];
    if (old && old.raw === block.raw && old.kind === block.kind) return old;
    if (old && old.kind === 'code' && block.kind === 'code' && old.language === block.language) {
      old.element.update(block);
      return {...block, element: old.element};
    }
    block.element = blockElement(block, 0);
    if (old)
      old.element.replaceWith(block.element);
    else
      container.append(block.element);
    return block;
  });
  for (const old of shown.slice(blocks.length)) old.element.remove();
}
