// The panel of settings, the dialog that asks for a key, the theme.

function changeSettings(change) {
  const {conversation} = chat;
  Object.assign(conversation.settings, change);
  for (const [name, value] of Object.entries(change)) {
    if (value === null || value === '') delete conversation.settings[name];
  }
  // New conversations begin with what was chosen last.
  kept.write('settings', conversation.settings);
  keepConversation(conversation);
}

function numberField({name, label, note, min, max, step, whole}) {
  const input = node('input', {
    id: `s-${name}`,
    type: 'number',
    inputmode: whole ? 'numeric' : 'decimal',
    min,
    max,
    step,
    placeholder: '–',
    'aria-describedby': `n-${name}`,
    input() {
      input.removeAttribute('aria-invalid');
      const value = input.valueAsNumber;
      changeSettings({[name]: Number.isNaN(value) ? null : whole ? Math.trunc(value) : value});
    }
  });
  return node('div', {class: 'number'}, node('label', {for: input.id
              }, label), input, node('span', {class: 'fine', id: `n-${name}`}, note));
}

function checkTools() {
  const area = byId('s-tools');
  const wrong = byId('tools-wrong');
  try {
    toolsOf(area.value);
    wrong.hidden = true;
    area.removeAttribute('aria-invalid');
  } catch (error) {
    wrong.textContent = error.message;
    wrong.hidden = false;
    area.setAttribute('aria-invalid', 'true');
  }
}

// Opens the panel; at the field that the server refused, if there is one.
function showSettings(field = null, words = '') {
  const {settings} = chat.conversation;
  byId('s-system').value = settings.system ?? '';
  byId('s-tools').value = settings.tools ?? '';
  for (const {name} of kNumbers) {
    byId(`s-${name}`).value = settings[name] ?? '';
    byId(`s-${name}`).removeAttribute('aria-invalid');
  }
  checkTools();
  byId('refused').textContent = words;
  byId('refused').hidden = !words;
  byId('settings').showModal();
  const refused = field && byId(`s-${field.split(/[[.]/)[0]}`);
  if (refused) {
    refused.setAttribute('aria-invalid', 'true');
    refused.focus();
  }
}

function setUpSettings() {
  const dialog = byId('settings');
  byId('numbers').append(...kNumbers.map(numberField));
  byId('open-settings').addEventListener('click', () => showSettings());
  byId('close-settings').addEventListener('click', () => dialog.close());
  dialog.addEventListener('click', (event) => {
    if (event.target === dialog) dialog.close();  // beside the panel
  });
  byId('s-system').addEventListener('input', (event) => changeSettings({system: event.target.value}));
  byId('s-tools').addEventListener('input', (event) => {
    changeSettings({tools: event.target.value});
    checkTools();
  });
  byId('thinking').addEventListener('change', (event) => changeSettings({thinking: event.target.value}));
  byId('change-key').addEventListener('click', () => {
    dialog.close();
    askForKey();
  });
  const all = byId('delete-all');
  const words = all.textContent;
  const calm = () => {
    all.textContent = words;
    delete all.dataset.sure;
  };
  all.addEventListener('blur', calm);
  all.addEventListener('click', () => {
    if (!all.dataset.sure) {
      all.dataset.sure = 'asked';
      all.textContent = 'Really delete all of them?';
      return;
    }
    calm();
    for (const {controller} of server.running.values()) controller.abort();
    forgetAll();
    dialog.close();
    newConversation();
  });
}

// ---- the key

// Asks for a key; `then` is done with it.
function askForKey(then = () => {}) {
  const dialog = byId('key');
  if (dialog.open) return;
  byId('key-words').textContent =
      apiKey.get() ? 'This server wants another key than the one it was given.' : 'This server wants a key.';
  byId('key-input').value = '';
  byId('key-form').onsubmit = (event) => {
    event.preventDefault();
    apiKey.set(byId('key-input').value.trim());
    dialog.close();
    watchHealth();
    then();
  };
  byId('key-cancel').onclick = () => dialog.close();
  dialog.showModal();
  byId('key-input').focus();
}

// ---- the theme

const kThemes = {
  system: 'as the system',
  light: 'light',
  dark: 'dark'
};

function applyTheme(theme) {
  if (theme === 'system')
    delete document.documentElement.dataset.theme;
  else
    document.documentElement.dataset.theme = theme;
  const button = byId('theme');
  button.replaceChildren(icon(theme));
  button.title = `Colours: ${kThemes[theme]}`;
  button.setAttribute('aria-label', button.title);
}

function setUpTheme() {
  const names = Object.keys(kThemes);
  let theme = kept.read('theme');
  if (!names.includes(theme)) theme = 'system';
  applyTheme(theme);
  byId('theme').addEventListener('click', () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    kept.write('theme', theme);
    applyTheme(theme);
    say(`Colours: ${kThemes[theme]}`);
  });
}
