// The conversation as it is shown: turns, what can be done with them, the list at the side.

const chat = {
  conversation: null,
  views: new Map(),  // node's id → its view: {element, update()}
  editing: null,     // the id of the question that is being edited
  follows: true,     // the end stays in sight while an answer grows
};

// ---- answers

function thinkingWords(one) {
  const {reasoning: tokens} = one.figures ?? {};
  if (one.state === 'running' && !one.text && one.calls.length === 0) return 'Thinking…';
  return tokens ? `Thought for ${counted(tokens, 'token')}` : 'Thought';
}

// Speed and drafts of an answer, each with what it means.
function figuresOf(one) {
  const figures = one.figures ?? {};
  const out = [];
  const add = (text, title) => out.push(node('span', {title}, text));
  const speed = speedOf(figures);
  if (speed !== null)
    add(`${amount(speed < 100 ? Math.round(speed * 10) / 10 : Math.round(speed))} tokens/s`,
        'From the first token to the last, as this browser saw them');
  if (figures.tokens)
    add(counted(figures.tokens, 'token'),
        `${counted(figures.prompt, 'token')} of prompt, ${amount(figures.cached)} of them from the cache`);
  if (figures.first) add(`first after ${duration(figures.first)}`, 'From the request to the first token');
  if (figures.drafted > 0) {
    add(`${amount(figures.accepted)} of ${amount(figures.drafted)} drafts accepted`,
        'Tokens that were guessed ahead, and turned out to be what the model chose');
  }
  return out;
}

// What is to be said about how an answer ended; null when it simply ended.
function endOf(one) {
  if (one.error) return one.error.words;
  if (one.state === 'stopped') return 'You stopped this answer.';
  if (one.state === 'cut') return 'This answer was cut off: the page was closed.';
  if (one.state === 'done' && one.finish === 'length') {
    return one.text || one.calls.length > 0 ? 'The answer reached the limit of tokens.' :
                                              'The thinking reached the limit of tokens before an answer began.';
  }
  if (one.state === 'done' && !one.text && one.calls.length === 0) return 'The answer is empty.';
  return null;
}

function versionPicker(one) {
  const {at, count} = versionsOf(chat.conversation, one);
  if (count < 2) return null;
  const step = (by) => {
    chooseVersion(chat.conversation, one, at + by);
    keepConversation(chat.conversation);
    showTurns();
    // The button that was pressed is another one now.
    const shown = chat.conversation.nodes[chat.conversation.nodes[one.parent].children[at + by]];
    const buttons = chat.views.get(shown.id).element.querySelectorAll('.versions button');
    (buttons[by < 0 ? 0 : 1].disabled ? buttons[by < 0 ? 1 : 0] : buttons[by < 0 ? 0 : 1]).focus();
    say(`Version ${at + by + 1} of ${count}`);
  };
  const previous = iconButton('previous', 'Previous version', () => step(-1));
  const next = iconButton('next', 'Next version', () => step(1));
  previous.disabled = at === 0 || isRunning();
  next.disabled = at + 1 === count || isRunning();
  return node('span', {class: 'versions'}, previous, node('span', {}, `${at + 1} / ${count}`), next);
}

function prettyArguments(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;  // still on its way, or cut
  }
}

// The calls of an answer, and a field for what each gave: this page runs no tools.
function callsView(one) {
  const element = node('div', {class: 'calls', hidden: true});
  let built = '';
  const results = () => {
    const below = chat.conversation.nodes[one.children[one.chosen]];
    return below?.role === 'tools' ? below.results : null;
  };
  const send = (inputs) => {
    const found = inputs.map((input, i) => ({id: one.calls[i].id, text: input.value}));
    const child = addNode(chat.conversation, one.id, {role: 'tools', results: found});
    askBehind(child.id);
  };
  const update = () => {
    const given = results();
    const asks = one.state === 'done' && given === null && one.calls.every(isWhole) && isLast(one);
    const key = JSON.stringify([one.calls, given, asks]);
    if (key === built || one.calls.length === 0) return;
    built = key;
    element.hidden = false;
    const inputs = [];
    element.replaceChildren(...one.calls.filter((call) => call).map((call, i) => {
      const card = node(
          'section', {class: 'call', 'aria-label': `Call of ${call.name}`},
          node('h3', {}, icon('tool'), node('code', {}, call.name), node('span', {class: 'fine'}, 'tool call')),
          node('pre', {tabindex: '0', 'aria-label': 'Arguments'}, node('code', {}, prettyArguments(call.arguments))));
      const result = given?.find((entry) => entry.id === call.id);
      if (result)
        card.append(
            node('p', {class: 'result-label'}, 'Result'),
            node('pre', {tabindex: '0', 'aria-label': 'Result'}, result.text));
      if (asks) {
        const input = node(
            'textarea',
            {rows: '1', class: 'mono', placeholder: '{"status": "ok"}', 'aria-label': `Result of ${call.name}`});
        inputs[i] = input;
        card.append(node('label', {class: 'field'}, 'Its result, for the model', input));
      }
      return card;
    }));
    if (asks)
      element.append(node(
          'div', {class: 'row end'},
          node(
              'button', {type: 'button', class: 'primary', click: () => send(inputs)},
              inputs.length > 1 ? 'Send the results' : 'Send the result')));
  };
  return {element, update};
}

function answerView(one) {
  const thought = node('div', {class: 'markdown'});
  const summary = node('summary');
  const thinking = node('details', {class: 'thinking', hidden: true}, summary, thought);
  const text = node('div', {class: 'markdown'});
  const calls = callsView(one);
  const end = node('div', {class: 'end-note', hidden: true});
  const wait = node(
      'p', {class: 'wait'}, node('span', {class: 'dots', 'aria-hidden': 'true'}, node('i'), node('i'), node('i')),
      node('span', {class: 'unseen'}, 'The answer is on its way'));
  const footer = node('footer', {class: 'turn-foot'});
  const element =
      node('article', {class: 'turn answer', 'aria-label': 'Answer'}, thinking, text, calls.element, wait, end, footer);
  // Folded thoughts are not drawn, so that they cost nothing while they stream.
  const drawThought = () => {
    if (thinking.open) showMarkdown(thought, one.reasoning.trim());
  };
  thinking.addEventListener('toggle', drawThought);
  let footed = '';
  const update = () => {
    const running = one.state === 'running';
    thinking.hidden = !one.reasoning;
    thinking.classList.toggle('busy', running && !one.text && one.calls.length === 0);
    summary.textContent = thinkingWords(one);
    drawThought();
    showMarkdown(text, one.text.trim());
    calls.update();
    wait.hidden = !running || one.reasoning !== '' || one.text !== '' || one.calls.length > 0;
    element.setAttribute('aria-busy', String(running));
    const words = running ? null : endOf(one);
    end.hidden = words === null;
    if (words !== null) {
      end.replaceChildren(node('p', {}, words));
      end.classList.toggle('wrong', Boolean(one.error));
      if (one.error && isLast(one)) end.append(...remedies(one));
    }
    const parts = running ? [] : [one.text ? copyButton('Copy the answer', () => one.text) : '', againButton(one)];
    const key = JSON.stringify([one.figures, one.state, versionsOf(chat.conversation, one), isRunning()]);
    if (key === footed) return;
    footed = key;
    footer.replaceChildren(
        node('span', {class: 'actions'}, ...parts), versionPicker(one) ?? '',
        node('span', {class: 'figures'}, ...figuresOf(one)));
  };
  return {element, update};
}

function againButton(one) {
  const button = iconButton('again', 'Answer again', () => askBehind(one.parent));
  button.disabled = isRunning();
  return button;
}

// What may help against a failure.
function remedies(one) {
  const retry = node('button', {type: 'button', class: 'plain', click: () => askBehind(one.parent)}, 'Try again');
  const {kind, field} = one.error;
  if (kind === 'key')
    return [node('button', {type: 'button', class: 'plain', click: () => askForKey()}, 'API key…'), retry];
  if (kind === 'field')
    return [
      node('button', {type: 'button', class: 'plain', click: () => showSettings(field, one.error.words)}, 'Settings…'),
      retry
    ];
  return kind === 'context' ? [] : [retry];
}

// ---- questions

function questionView(one) {
  const element = node('article', {class: 'turn question', 'aria-label': 'Your message'});
  let built = null;
  const update = () => {
    const editing = chat.editing === one.id;
    const key = JSON.stringify([editing, isRunning(), versionsOf(chat.conversation, one)]);
    if (key === built) return;
    built = key;
    if (editing) return element.replaceChildren(editor(one));
    const edit = iconButton('edit', 'Edit the message', () => beginEdit(one.id));
    edit.disabled = isRunning();
    element.replaceChildren(
        node('div', {class: 'bubble'}, one.text),
        node(
            'footer', {class: 'turn-foot'}, versionPicker(one) ?? '',
            node('span', {class: 'actions'}, edit, copyButton('Copy the message', () => one.text))));
  };
  return {element, update};
}

function editor(one) {
  const area = node('textarea', {class: 'edit', 'aria-label': 'Edit the message'});
  area.value = one.text;
  const finish = () => {
    chat.editing = null;
    chat.views.get(one.id)?.update();
  };
  const save = () => {
    if (!area.value.trim()) return;
    chat.editing = null;
    const sibling = addNode(chat.conversation, one.parent, {role: 'user', text: area.value.trim()});
    askBehind(sibling.id);
    byId('input').focus();
  };
  area.addEventListener('input', () => grow(area));
  area.addEventListener('keydown', (event) => {
    if (event.key === 'Escape') {
      event.stopPropagation();
      finish();
      byId('input').focus();
    }
    if (sends(event)) {
      event.preventDefault();
      save();
    }
  });
  requestAnimationFrame(() => {
    grow(area);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  });
  return node(
      'div', {class: 'editor'}, area,
      node(
          'div', {class: 'row end'}, node('button', {type: 'button', class: 'plain', click: finish}, 'Cancel'),
          node('button', {type: 'button', class: 'primary', click: save}, 'Send')));
}

function beginEdit(id) {
  if (isRunning()) return;
  const before = chat.editing;
  chat.editing = id;
  if (before) chat.views.get(before)?.update();
  chat.views.get(id)?.update();
}

// ---- the whole

const isRunning = () => server.running.has(chat.conversation.id);

function isLast(one) {
  const shown = shownNodes(chat.conversation);
  return shown[shown.length - 1] === one;
}

function grow(area) {
  area.style.height = 'auto';
  area.style.height = `${area.scrollHeight + 2}px`;
}

// Whether a key means "send": not where it ends a composition, nor on keyboards that have no Shift+Enter.
function sends(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing && !matchMedia('(pointer: coarse)').matches;
}

function toEnd() {
  const area = byId('scroll');
  area.scrollTop = area.scrollHeight;
}

function followEnd() {
  if (chat.follows) toEnd();
  byId('to-end').hidden = chat.follows;
}

function greeting() {
  const examples = [
    'What is 17 + 25?', 'A bus has 12 seats and 5 are taken. How many are free?',
    'Answer in JSON with name Ada and age 36.'
  ];
  return node(
      'div', {class: 'greeting'}, node('h2', {}, 'What would you like to know?'),
      node(
          'ul', {},
          ...examples.map(
              (text) =>
                  node('li', {}, node('button', {type: 'button', class: 'plain', click: () => askText(text)}, text)))));
}

// Shows the conversation anew; views of nodes that are still there stay.
function showTurns() {
  const shown = shownNodes(chat.conversation).filter((one) => one.role !== 'tools');
  const views = shown.map((one) => {
    const view = chat.views.get(one.id) ?? (one.role === 'user' ? questionView(one) : answerView(one));
    chat.views.set(one.id, view);
    view.update();
    return view.element;
  });
  byId('turns').replaceChildren(...(views.length > 0 ? views : [greeting()]));
  byId('stop').hidden = !isRunning();
  byId('send').hidden = isRunning();
  document.title = chat.conversation.title ? `${chat.conversation.title} · fourfold` : 'fourfold';
  followEnd();
}

function showConversation(conversation) {
  chat.conversation = conversation;
  chat.views.clear();
  chat.editing = null;
  chat.follows = true;
  kept.write('current', conversation.id);
  byId('thinking').value = conversation.settings.thinking ?? '';
  showTurns();
  showList();
  closeSide();
}

let drawing = 0;

// More of an answer: what is not yet drawn is drawn with the next frame, however many pieces come before it.
function answerChanged(conversation, answer, whole) {
  if (conversation !== chat.conversation) return whole ? showList() : undefined;
  if (whole) {
    showTurns();
    showList();
    return;
  }
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    chat.views.get(answer.id)?.update();
    followEnd();
  });
}

async function askBehind(parent) {
  const {conversation} = chat;
  if (isRunning()) return;
  chat.follows = true;
  say('The answer is on its way');
  const answer = await ask(conversation, parent, (one, whole) => answerChanged(conversation, one, whole));
  if (answer.error?.kind === 'key') askForKey(() => askBehind(parent));
  if (answer.error?.kind === 'lost' || answer.error?.kind === 'cut') watchHealth();
  if (conversation !== chat.conversation) return;
  const [speed] = figuresOf(answer);
  say(endOf(answer) ?? `The answer is complete${speed ? `, ${speed.textContent}` : ''}`);
}

function askText(text) {
  const shown = shownNodes(chat.conversation);
  const parent = shown.length > 0 ? shown[shown.length - 1].id : 'root';
  askBehind(addNode(chat.conversation, parent, {role: 'user', text}).id);
}

// ---- the list

function showList() {
  const rows = conversations.list.map((entry) => {
    const current = entry.id === chat.conversation?.id;
    const title = entry.title || 'Untitled';
    const open = node(
        'button', {
          type: 'button',
          class: 'open',
          'aria-current': current ? 'true' : null,
          title,
          click: () => selectConversation(entry.id)
        },
        title);
    if (server.running.has(entry.id))
      open.prepend(node(
          'span',
          {class: 'busy-dot', title: 'An answer is running', role: 'img', 'aria-label': 'An answer is running'}));
    open.addEventListener('keydown', (event) => {
      if (event.key === 'F2') renameConversation(entry.id);
      if (event.key === 'Delete') removeConversation(entry.id);
    });
    return node(
        'li', {class: current ? 'current' : null, 'data-id': entry.id}, open,
        iconButton('edit', `Rename “${title}”`, () => renameConversation(entry.id)),
        iconButton('delete', `Delete “${title}”`, () => removeConversation(entry.id)));
  });
  byId('conversations').replaceChildren(...rows);
}

function selectConversation(id) {
  const conversation = openConversation(id);
  if (!conversation) {
    toast('This conversation cannot be read; it is taken off the list.');
    forgetConversation(id);
    return showList();
  }
  showConversation(conversation);
  byId('input').focus();
}

function newConversation() {
  const conversation = freshConversation(kept.read('settings') ?? {});
  conversations.open.set(conversation.id, conversation);
  showConversation(conversation);
  byId('input').focus();
}

function removeConversation(id) {
  server.running.get(id)?.controller.abort();
  const undo = forgetConversation(id);
  if (chat.conversation.id === id) newConversation();
  showList();
  toast('The conversation is deleted.', () => {
    undo();
    showList();
  });
}

function renameConversation(id) {
  const row = byId('conversations').querySelector(`[data-id="${CSS.escape(id)}"]`);
  const conversation = openConversation(id);
  if (!row || !conversation) return;
  const input = node('input', {class: 'rename', 'aria-label': 'Title', maxlength: '200'});
  input.value = conversation.title;
  let over = false;
  const finish = (keep) => {
    if (over) return;
    over = true;
    if (keep && input.value.trim()) {
      conversation.title = input.value.trim();
      conversation.named = true;
      keepConversation(conversation);
    }
    showList();
    byId('conversations').querySelector(`[data-id="${CSS.escape(id)}"] .open`)?.focus();
  };
  input.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' && event.key !== 'Escape') return;
    event.preventDefault();
    event.stopPropagation();
    finish(event.key === 'Enter');
  });
  input.addEventListener('blur', () => finish(true));
  row.replaceChildren(input);
  input.select();
}

function closeSide() {
  byId('side').classList.remove('open');
  byId('shade').hidden = true;
  byId('menu').setAttribute('aria-expanded', 'false');
}
