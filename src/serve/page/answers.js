// Asking the server: the request, its stream, and everything that may go wrong, in words.

const server = {
  model: null,         // the name it is served under
  context: null,       // positions
  running: new Map(),  // conversation's id → {controller, answer}
};

// ---- the key

const apiKey = {
  get() {
    try {
      return sessionStorage.getItem('fourfold.key') ?? this.memory;
    } catch {
      return this.memory;
    }
  },
  set(key) {
    this.memory = key;
    try {
      if (key)
        sessionStorage.setItem('fourfold.key', key);
      else
        sessionStorage.removeItem('fourfold.key');
    } catch {
      // It lives as long as this page.
    }
  },
  memory: null,
};

function headers(more = {}) {
  const key = apiKey.get();
  return key ? {...more, authorization: `Bearer ${key}`} : more;
}

// ---- failures

// What went wrong, in words; `kind` is key, busy, field, context, lost, cut or server.
class Failure extends Error {
  constructor(kind, words, more = {}) {
    super(words);
    Object.assign(this, {kind}, more);
  }
}

// A sentence of the server's, so that another may follow.
function sentence(text) {
  const words = text.trim().slice(0, 600);
  if (!words) return '';
  return words[0].toUpperCase() + words.slice(1) + (/[.!?]$/.test(words) ? '' : '.');
}

function failureOf(status, error, retryAfter) {
  const said = sentence(isText(error?.message) ? error.message : '');
  if (status === 401 || status === 403) return new Failure('key', 'The server wants an API key, or another one.');
  if (status === 429 || status === 503) {
    const seconds = Math.min(Math.max(parseInt(retryAfter, 10) || 1, 1), 3600);
    const why = status === 429 ? 'You have asked for more than this server gives one key' :
                                 'The server takes no more requests now';
    return new Failure('busy', `${why}. ${said} It asks to wait for ${counted(seconds, 'second')}.`, {seconds});
  }
  if (error?.code === 'context_length_exceeded') {
    const room = server.context ? ` of ${amount(server.context)} tokens` : '';
    return new Failure(
        'context',
        `The conversation does not fit into the model’s context${room} any more. ` +
            'Edit an earlier message, or begin a new conversation.');
  }
  if (status === 404 && error?.code === 'model_not_found') return new Failure('server', `${said} Load the page again.`);
  if (status >= 400 && status < 500) {
    const field = isText(error?.param) ? error.param : null;
    const why = isText(error?.message) ? error.message.trim().slice(0, 600) : `status ${status}`;
    return new Failure('field', `The server refused the request: ${why}${/[.!?]$/.test(why) ? '' : '.'}`, {field});
  }
  return new Failure('server', `The server failed (status ${status}). ${said}`);
}

async function failureOfResponse(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch {
    // Not from the server itself, but from something in front of it.
  }
  return failureOf(response.status, error, response.headers.get('retry-after'));
}

async function getJson(path) {
  let response;
  try {
    response = await fetch(path, {headers: headers(), cache: 'no-store'});
  } catch {
    throw new Failure('lost', 'The server does not answer.');
  }
  if (!response.ok) throw await failureOfResponse(response);
  return response.json();
}

// ---- settings

// Fields that are numbers: name, label, what the server takes (docs/serving.md).
const kNumbers = [
  {name: 'temperature', label: 'Temperature', min: 0, max: 10, step: 0.1, note: '0 to 10; 0 is greedy'},
  {name: 'top_p', label: 'Top p', min: 0, max: 1, step: 0.05, note: 'above 0, up to 1'},
  {name: 'top_k', label: 'Top k', min: -1, step: 1, whole: true, note: '0: all tokens'},
  {name: 'min_p', label: 'Min p', min: 0, max: 1, step: 0.01, note: '0 to below 1'},
  {name: 'presence_penalty', label: 'Presence penalty', min: -10, max: 10, step: 0.1, note: '-10 to 10'},
  {name: 'frequency_penalty', label: 'Frequency penalty', min: -10, max: 10, step: 0.1, note: '-10 to 10'},
  {name: 'repetition_penalty', label: 'Repetition penalty', min: 0, max: 10, step: 0.05, note: 'above 0, up to 10'},
  {
    name: 'max_completion_tokens',
    label: 'Longest answer',
    min: 1,
    step: 1,
    whole: true,
    note: 'tokens, thinking included'
  },
  {name: 'thinking_token_budget', label: 'Longest thinking', min: 0, step: 1, whole: true, note: 'tokens'},
  {name: 'seed', label: 'Seed', step: 1, whole: true, note: 'the same seed, the same answer'},
];

// The tools that a text describes: an array, or null where it is empty; an Error says what is wrong with it.
function toolsOf(text) {
  if (!text.trim()) return null;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`This is no JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error('This is no JSON array.');
  return tools.length > 0 ? tools : null;
}

function requestBody(conversation, parent) {
  const {settings} = conversation;
  const body = {
    messages: messagesTo(conversation, parent),
    stream: true,
    stream_options: {include_usage: true, continuous_usage_stats: true}
  };
  if (server.model) body.model = server.model;
  for (const {name} of kNumbers) {
    if (typeof settings[name] === 'number') body[name] = settings[name];
  }
  if (settings.thinking) body.enable_thinking = settings.thinking === 'on';
  let tools;
  try {
    tools = toolsOf(settings.tools ?? '');
  } catch (error) {
    throw new Failure('field', `The tools of the settings are not sent. ${error.message}`, {field: 'tools'});
  }
  if (tools) body.tools = tools;
  return body;
}

// ---- the stream

// The data of server-sent events, one at a time. Comments keep the connection alive and say nothing.
async function* eventsOf(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  try {
    while (true) {
      const {done, value} = await reader.read();
      if (done) return;
      rest += decoder.decode(value, {stream: true});
      const lines = rest.split('\n');
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith('data: ')) yield line.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function takeDelta(answer, delta) {
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? '';
  answer.text += delta.content ?? '';
  for (const part of delta.tool_calls ?? []) {
    const call = answer.calls[part.index] ??= {id: '', name: '', arguments: ''};
    call.id ||= part.id ?? '';
    call.name += part.function?.name ?? '';
    call.arguments += part.function?.arguments ?? '';
  }
}

function takeUsage(figures, usage) {
  figures.prompt = usage.prompt_tokens;
  figures.tokens = usage.completion_tokens;
  figures.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const details = usage.completion_tokens_details ?? {};
  figures.reasoning = details.reasoning_tokens ?? 0;
  if (typeof details.accepted_prediction_tokens === 'number') {
    figures.accepted = details.accepted_prediction_tokens;
    figures.drafted = figures.accepted + (details.rejected_prediction_tokens ?? 0);
  }
}

// Tokens a second: between the first and the last; of an answer that came in one piece, since it was asked for.
function speedOf({tokens, first, whole, last}) {
  if (!tokens || !first) return null;
  return tokens > 1 && last - first > 0.001 ? (tokens - 1) / (last - first) : tokens / whole;
}

async function streamAnswer(conversation, answer, signal, changed) {
  const body = JSON.stringify(requestBody(conversation, answer.parent));
  const begun = performance.now();
  const since = () => (performance.now() - begun) / 1000;
  let response;
  try {
    response = await fetch(
        'v1/chat/completions',
        {method: 'POST', headers: headers({'content-type': 'application/json'}), body, signal, cache: 'no-store'});
  } catch (error) {
    if (signal.aborted) throw error;
    throw new Failure('lost', 'The server does not answer. Is it still running, and is the network there?');
  }
  if (!response.ok) throw await failureOfResponse(response);
  const figures = answer.figures = {};
  const cut = () => new Failure('cut', 'The connection was lost before the answer was complete.');
  let complete = false;
  try {
    for await (const data of eventsOf(response.body)) {
      if (data === '[DONE]') {
        complete = true;
        continue;
      }
      const event = JSON.parse(data);
      if (event.error)
        throw new Failure('server', `The server broke the answer off. ${sentence(event.error.message ?? '')}`);
      if (event.choices?.length > 0) {
        figures.first ??= since();
        figures.last = since();
        takeDelta(answer, event.choices[0].delta ?? {});
        answer.finish = event.choices[0].finish_reason ?? answer.finish;
      }
      if (event.usage) takeUsage(figures, event.usage);
      figures.whole = since();
      changed();
    }
  } catch (error) {
    if (signal.aborted || error instanceof Failure) throw error;
    throw cut();
  }
  if (!complete) throw cut();
}

// Asks for an answer behind the node `parent`. `changed` is called whenever there is more of it, and once at the end.
async function ask(conversation, parent, changed) {
  dropFailures(conversation, parent);
  const answer =
      addNode(conversation, parent, {role: 'assistant', text: '', reasoning: '', calls: [], state: 'running'});
  const controller = new AbortController();
  server.running.set(conversation.id, {controller, answer});
  keepConversation(conversation);
  changed(answer, true);
  // It may have been deleted meanwhile.
  const keep = () => {
    if (conversations.open.get(conversation.id) === conversation) keepConversation(conversation);
  };
  let keptAt = performance.now();
  try {
    await streamAnswer(conversation, answer, controller.signal, () => {
      changed(answer, false);
      if (performance.now() - keptAt > 2000) {
        keep();
        keptAt = performance.now();
      }
    });
    answer.state = 'done';
  } catch (error) {
    if (controller.signal.aborted) {
      answer.state = 'stopped';
    } else {
      answer.state = 'cut';
      const failure = error instanceof Failure ?
          error :
          new Failure('server', `This page failed. ${sentence(String(error?.message ?? error))}`);
      answer.error =
          {kind: failure.kind, words: failure.message, field: failure.field ?? null, seconds: failure.seconds ?? null};
    }
  }
  answer.calls = answer.calls.filter((call) => call?.id);
  server.running.delete(conversation.id);
  keep();
  changed(answer, true);
  return answer;
}

function stopAnswer(conversation) { server.running.get(conversation.id)?.controller.abort(); }
