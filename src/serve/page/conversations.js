// Conversations and how they are kept. A conversation is a tree: an edited question and another answer to the same
// question are further children of one node, and each node remembers which of its children is shown.
//
//   {id, title, named, updated, settings, nodes: {ID: {id, parent, children, chosen, role, …}}}
//   role 'root'; 'user' {text}; 'assistant' {text, reasoning, calls: [{id, name, arguments}], state, finish, figures,
//   error}; 'tools' {results: [{id, text}]}
//   state: 'running', 'done', 'stopped' (by the reader), 'cut' (by something else)

const conversations = {
  open: new Map(),  // those that were read; an answer may run in one that is not shown
  list: [],         // [{id, title, updated}], the newest first
};

const kTitle = 60;

function freshConversation(settings) {
  const root = {id: 'root', parent: null, children: [], chosen: 0, role: 'root'};
  return {id: newId(), title: '', named: false, updated: Date.now(), settings: {...settings}, nodes: {root}};
}

const isText = (value) => typeof value === 'string';

// What was kept may come from another version of this page: nodes that are not as above make it unreadable.
function isConversation(value) {
  if (typeof value !== 'object' || value === null || !isText(value.id) || !isText(value.title)) return false;
  if (typeof value.settings !== 'object' || value.settings === null || !value.nodes?.root) return false;
  return Object.values(value.nodes)
      .every(
          (one) => Array.isArray(one.children) && one.children.every((id) => value.nodes[id]) &&
              (one.id === 'root' || value.nodes[one.parent]) &&
              (one.role === 'root' || (one.role === 'tools' && Array.isArray(one.results)) ||
               (isText(one.text) &&
                (one.role === 'user' ||
                 (one.role === 'assistant' && isText(one.reasoning) && Array.isArray(one.calls))))));
}

function readList() {
  const list = kept.read('conversations');
  conversations.list = Array.isArray(list) ? list.filter((one) => one && isText(one.id) && isText(one.title)) : [];
}

function openConversation(id) {
  if (conversations.open.has(id)) return conversations.open.get(id);
  const found = kept.read(`conversation.${id}`);
  if (!isConversation(found)) return null;
  for (const one of Object.values(found.nodes)) {
    if (one.state === 'running') one.state = 'cut';  // the page was closed meanwhile
  }
  conversations.open.set(id, found);
  return found;
}

let storageIsFull = false;

// Keeps a conversation. One in which nothing was said yet is not worth a place.
function keepConversation(conversation) {
  conversation.updated = Date.now();
  if (conversation.nodes.root.children.length === 0) return;
  readList();  // another tab may have changed it
  const entry = {id: conversation.id, title: conversation.title, updated: conversation.updated};
  const at = conversations.list.findIndex((one) => one.id === conversation.id);
  if (at >= 0)
    conversations.list[at] = entry;
  else
    conversations.list.unshift(entry);
  const done =
      kept.write(`conversation.${conversation.id}`, conversation) && kept.write('conversations', conversations.list);
  if (!done && !storageIsFull) {
    toast(
        'The browser’s storage is full or switched off: what is said now is gone when this tab is closed. ' +
        'Deleting conversations makes room.');
  }
  storageIsFull = !done;
}

// Removes it; what is returned brings it back.
function forgetConversation(id) {
  const conversation = openConversation(id);
  readList();
  const at = conversations.list.findIndex((one) => one.id === id);
  const [entry] = at >= 0 ? conversations.list.splice(at, 1) : [];
  kept.write('conversations', conversations.list);
  kept.remove(`conversation.${id}`);
  conversations.open.delete(id);
  return () => {
    readList();
    if (entry) conversations.list.splice(at, 0, entry);
    kept.write('conversations', conversations.list);
    if (conversation) {
      kept.write(`conversation.${id}`, conversation);
      conversations.open.set(id, conversation);
    }
  };
}

function forgetAll() {
  readList();
  for (const {id} of conversations.list) kept.remove(`conversation.${id}`);
  kept.remove('conversations');
  conversations.list = [];
  conversations.open.clear();
}

// ---- the tree

function addNode(conversation, parent, fields) {
  const one = {id: newId(), parent, children: [], chosen: 0, ...fields};
  conversation.nodes[one.id] = one;
  const above = conversation.nodes[parent];
  above.chosen = above.children.push(one.id) - 1;
  if (one.role === 'user' && !conversation.named && !conversation.title) conversation.title = titleOf(one.text);
  return one;
}

// Takes away answers behind `parent` that failed before there was anything of them.
function dropFailures(conversation, parent) {
  const above = conversation.nodes[parent];
  const failed = (id) => {
    const one = conversation.nodes[id];
    return one.error && !one.text && !one.reasoning && one.calls.length === 0 && one.children.length === 0;
  };
  for (const id of above.children.filter(failed)) delete conversation.nodes[id];
  above.children = above.children.filter((id) => conversation.nodes[id]);
}

function titleOf(text) {
  const line = text.trim().split('\n')[0].trim();
  return line.length > kTitle ? `${line.slice(0, kTitle - 1).trimEnd()}…` : line;
}

// The nodes that are shown, from the first question down.
function shownNodes(conversation) {
  const out = [];
  let one = conversation.nodes.root;
  while ((one = conversation.nodes[one.children[one.chosen]])) out.push(one);
  return out;
}

// Those above a node and itself, from the first question down.
function pathTo(conversation, id) {
  const out = [];
  for (let one = conversation.nodes[id]; one.role !== 'root'; one = conversation.nodes[one.parent]) out.unshift(one);
  return out;
}

// Where a node stands among the versions of its turn.
function versionsOf(conversation, one) {
  const {children} = conversation.nodes[one.parent];
  return {at: children.indexOf(one.id), count: children.length};
}

function chooseVersion(conversation, one, at) { conversation.nodes[one.parent].chosen = at; }

// ---- what the server is sent

// Whether a call came to its end: its arguments are an object of JSON.
function isWhole(call) {
  try {
    return typeof JSON.parse(call.arguments || '{}') === 'object';
  } catch {
    return false;
  }
}

// The conversation as messages: up to and with the node `id`.
function messagesTo(conversation, id) {
  const out = [];
  if (conversation.settings.system) out.push({role: 'system', content: conversation.settings.system});
  for (const one of pathTo(conversation, id)) {
    if (one.role === 'user') {
      out.push({role: 'user', content: one.text});
    } else if (one.role === 'tools') {
      for (const result of one.results) out.push({role: 'tool', tool_call_id: result.id, content: result.text});
    } else {
      const message = {role: 'assistant', content: one.text};
      if (one.reasoning) message.reasoning_content = one.reasoning;
      const calls = one.calls.filter(isWhole);
      if (calls.length > 0) {
        message.tool_calls = calls.map(
            (call) =>
                ({id: call.id, type: 'function', function: {name: call.name, arguments: call.arguments || '{}'}}));
      }
      out.push(message);
    }
  }
  return out;
}
