// What happens when the page is there: the server's state, tabs, keys.

const kAgain = 1000;  // ms between two looks at a server that is not ready

let watching = false;

// Looks after the server until it takes requests, and says what it is doing meanwhile; then asks what it serves.
async function watchHealth() {
  if (watching) return;
  watching = true;
  const banner = byId('banner');
  const tell = (words) => {
    if (banner.textContent !== words) banner.textContent = words;
    banner.hidden = !words;
  };
  while (true) {
    try {
      const response = await fetch('health', {cache: 'no-store'});
      if (response.ok) break;
      const {status, phase, progress} = await response.json();
      const share = progress?.total > 0 ? `, ${percent(progress.done / progress.total)}` : '';
      tell(
          status === 'loading' ? `The model is being loaded: ${phase}${share}.` :
                                 sentence(`The server is not ready: ${phase ?? status}`));
    } catch {
      tell('The server does not answer. This page goes on trying.');
    }
    await new Promise((done) => setTimeout(done, kAgain));
  }
  tell('');
  watching = false;
  try {
    const [model] = (await getJson('v1/models')).data;
    server.model = model.id;
    server.context = model.max_model_len ?? null;
    byId('model').replaceChildren(
        model.id, server.context ? node('span', {}, ` · ${amount(server.context)} tokens of context`) : '');
    byId('model').title = byId('model').textContent;
  } catch (error) {
    if (error.kind === 'key')
      askForKey();
    else if (error.kind === 'lost')
      watchHealth();
    else
      tell(error.message);
  }
}

function showTab(name) {
  for (const tab of ['chat', 'live']) {
    const shown = tab === name;
    byId(tab).hidden = !shown;
    byId(`tab-${tab}`).setAttribute('aria-selected', String(shown));
    byId(`tab-${tab}`).tabIndex = shown ? 0 : -1;
  }
  document.body.classList.toggle('at-live', name === 'live');
  closeSide();
  kept.write('tab', name);
  watchLive();
  if (name === 'chat') followEnd();
}

function setUpTabs() {
  const tabs = ['chat', 'live'];
  for (const name of tabs) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener('click', () => showTab(name));
    tab.addEventListener('keydown', (event) => {
      const to = {ArrowLeft: tabs[0], Home: tabs[0], ArrowRight: tabs[1], End: tabs[1]}[event.key];
      if (!to) return;
      showTab(to);
      byId(`tab-${to}`).focus();
    });
  }
  document.addEventListener('visibilitychange', watchLive);
  showTab(kept.read('tab') === 'live' ? 'live' : 'chat');
}

function setUpComposer() {
  const input = byId('input');
  const resize = () => {
    grow(input);
    followEnd();
  };
  input.addEventListener('input', resize);
  const send = () => {
    const text = input.value.trim();
    if (!text || isRunning()) return;
    input.value = '';
    resize();
    askText(text);
  };
  byId('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener('keydown', (event) => {
    if (sends(event)) {
      event.preventDefault();
      send();
    }
    if (event.key === 'ArrowUp' && input.value === '') {
      const last = shownNodes(chat.conversation).findLast((one) => one.role === 'user');
      if (last) {
        event.preventDefault();
        beginEdit(last.id);
      }
    }
  });
  byId('stop').addEventListener('click', () => {
    stopAnswer(chat.conversation);
    input.focus();
  });
  const scroll = byId('scroll');
  scroll.addEventListener('scroll', () => {
    chat.follows = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 40;
    byId('to-end').hidden = chat.follows;
  });
  byId('to-end').addEventListener('click', () => {
    chat.follows = true;
    followEnd();
    input.focus();
  });
}

function setUpSide() {
  const side = byId('side');
  byId('menu').addEventListener('click', () => {
    const open = side.classList.toggle('open');
    byId('shade').hidden = !open;
    byId('menu').setAttribute('aria-expanded', String(open));
    if (open) byId('new').focus();
  });
  byId('shade').addEventListener('click', closeSide);
  byId('new').addEventListener('click', newConversation);
}

function setUpKeys() {
  document.addEventListener('keydown', (event) => {
    if (document.querySelector('dialog[open]')) return;
    const writes = /^(?:INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? '');
    if (event.key === 'Escape') {
      if (byId('side').classList.contains('open')) {
        closeSide();
        byId('menu').focus();
      } else {
        stopAnswer(chat.conversation);
      }
    } else if (event.key === '/' && !writes) {
      event.preventDefault();
      showTab('chat');
      byId('input').focus();
    } else if (event.altKey && event.code === 'KeyN') {
      event.preventDefault();
      showTab('chat');
      newConversation();
    }
  });
}

// What another tab of the same browser has changed.
function otherTabChanged(event) {
  if (event.key === 'fourfold.conversations') {
    readList();
    showList();
  }
  const [, id] = /^fourfold\.conversation\.(.*)$/.exec(event.key ?? '') ?? [];
  if (!id || server.running.has(id)) return;
  conversations.open.delete(id);
  const conversation = id === chat.conversation.id ? openConversation(id) : null;
  if (conversation) showConversation(conversation);
}

function start() {
  setUpTheme();
  readList();
  setUpSettings();
  setUpComposer();
  setUpSide();
  setUpKeys();
  const current = openConversation(kept.read('current') ?? '');
  if (current)
    showConversation(current);
  else
    newConversation();
  setUpTabs();
  window.addEventListener('storage', otherTabChanged);
  window.addEventListener('pagehide', () => {
    for (const id of server.running.keys()) {
      const conversation = conversations.open.get(id);
      if (conversation) keepConversation(conversation);
    }
  });
  watchHealth();
  if (!matchMedia('(pointer: coarse)').matches) byId('input').focus();
}

start();
