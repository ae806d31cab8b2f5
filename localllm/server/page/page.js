// The page: asks, shows the answers as they come, and keeps the conversation.

import { Answers } from "./answers.js";
import { Conversation } from "./conversation.js";
import { byId, make } from "./elements.js";
import { List } from "./list.js";
import { eventsOf, Server } from "./server.js";

const MOST_FILE_BYTES = 1 << 20, SAVE_EVERY_MS = 2000;
const COLOURS = "localllm-colours";

const server = new Server();
const answers = new Answers(byId("log"), { edit, regenerate: (place) => answer(place), goOn: (place) => answer(place, true) },
  () => running !== null);
const list = new List(server, { open, removed, tell });
let model = { id: "", most_tokens: 0, thinks: false };
let talk = new Conversation(), running = null, edited = null, files = [];

function tell(text, isBad = false) {
  byId("told").textContent = text;
  byId("told").classList.toggle("bad", isBad);
}

// What stays true until another conversation is shown.
function warn(text) {
  byId("warning").textContent = text;
  byId("warning").hidden = !text;
}

// ---- Asking ----------------------------------------------------------------------------------

function messagesBefore(place) {
  return talk.turns.slice(0, place).filter((turn) => turn.answer) // others failed, or were stopped before a word
    .flatMap(({ question, answer: said }) => [{ role: "user", content: question }, { role: "assistant", content: said }]);
}

function number(id) {
  return byId(id).value === "" ? undefined : Number(byId(id).value);
}

function bodyFor(turn, place, goesOn) {
  const messages = [...messagesBefore(place), { role: "user", content: turn.question }];
  if (goesOn) messages.push({ role: "assistant", content: turn.answer });
  return {
    model: model.id, messages, stream: true,
    system: talk.system || undefined,
    max_tokens: number("max_tokens") || model.most_tokens,
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    thinking: { type: goesOn || !model.thinks ? "disabled" : byId("thinking").value },
  };
}

async function answer(place, goesOn = false) {
  const asked = talk, turn = talk.turns[place], body = JSON.stringify(bodyFor(turn, place, goesOn));
  const stopping = running = new AbortController();
  if (!goesOn) Object.assign(turn, { answer: "", thinking: "" });
  Object.assign(turn, { finish_reason: null, model: model.id, figures: "" });
  showRunning();
  if (goesOn) answers.settle();
  else answers.show(talk.turns);
  save(asked);
  tell("Reading the question …");
  const saver = setInterval(() => save(asked), SAVE_EVERY_MS);
  try {
    const began = performance.now();
    const response = await server.call("/v1/messages", { method: "POST", signal: stopping.signal, body });
    await read(response, asked, turn, began);
    tell("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped.");
    else tell(`Error: ${error.message}`, true);
  }
  clearInterval(saver);
  if (running === stopping) running = null;
  showRunning();
  save(asked)?.then(() => list.show(talk.id));
  if (asked === talk) answers.settle();
  byId("question").focus();
}

async function read(response, asked, turn, began) {
  let first = 0;
  for await (const event of eventsOf(response)) {
    if (event.type === "error") throw new Error(event.error.message);
    if (event.type === "message_start") {
      first = performance.now();
      tell("Answering …");
    }
    if (event.type === "content_block_delta") {
      turn.answer += event.delta.text || "";
      turn.thinking += event.delta.thinking || "";
      if (asked === talk) answers.grow();
    }
    if (event.type === "message_delta") {
      turn.finish_reason = event.delta.stop_reason === "max_tokens" ? "length" : "stop";
      turn.figures = figures(event.usage, first - began, performance.now() - first);
    }
  }
}

function figures(usage, firstMs, restMs) {
  if (!usage.output_tokens) return "";
  const cached = usage.cache_read_input_tokens || 0;
  const parts = [
    `${usage.output_tokens.toLocaleString()} tokens`,
    `${((usage.output_tokens - 1) / Math.max(restMs, 1) * 1000).toFixed(1)}/s`,
    `first after ${(firstMs / 1000).toFixed(2)} s`,
    `prompt ${(usage.input_tokens + cached).toLocaleString()}, ${cached.toLocaleString()} cached`,
  ];
  const drafts = usage.output_tokens_details?.accepted_draft_tokens;
  if (drafts) parts.push(`${drafts.toLocaleString()} from drafts`);
  const why = usage.why;
  if (why?.tokens_computed_again) {
    const { message, role, token: at } = why.first_difference;
    const where = message ? `message ${message} (${role})` : "the template";
    parts.push(`${why.tokens_computed_again.toLocaleString()} computed again: ` +
      `${where} differs at token ${at.toLocaleString()}`);
  }
  if (why?.moved_lines) parts.push(`${why.moved_lines} lines of the system prompt moved`);
  return parts.join(" · ");
}

// ---- Conversations ---------------------------------------------------------------------------

function save(asked) {
  return asked.save(server, (saved, error) => {
    if (error) return warn(`Not saved: ${error.message}`);
    if (asked === talk) {
      setAddress(asked.id);
      if (saved.isApart) {
        warn("This conversation was continued in another window; what is said here goes on as a conversation of its own.");
      } else if (byId("warning").textContent.startsWith("Not saved")) warn("");
    }
    if (saved.isNew) list.show(talk.id);
    return undefined;
  });
}

function setAddress(id) {
  history.replaceState(null, "", id === null ? location.pathname : `#c=${id}`);
}

async function open(id) {
  stop();
  try {
    show(await Conversation.load(server, id));
    setAddress(id);
  } catch (error) {
    show(new Conversation());
    setAddress(null);
    tell(error.message, true);
  }
  await list.show(talk.id);
}

function begin() {
  stop();
  show(Object.assign(new Conversation(), { system: talk.system }));
  setAddress(null);
  list.show(null);
  byId("question").focus();
}

function removed(id) {
  if (id === talk.id) begin();
  else list.show(talk.id);
}

function show(next) {
  talk = next;
  edited = null;
  byId("system").value = talk.system;
  toggleList(false);
  warn("");
  tell("");
  answers.show(talk.turns);
}

function edit(place) {
  edited = place;
  byId("question").value = talk.turns[place].question;
  answers.show(talk.turns.slice(0, place));
  byId("question").focus();
  tell("Edit the question and send it; what came behind it is left out. Esc leaves all as it was.");
}

function leaveEdit() {
  edited = null;
  byId("question").value = "";
  answers.show(talk.turns);
  tell("");
}

// ---- Files -----------------------------------------------------------------------------------

async function attach(chosen) {
  for (const file of chosen) {
    try {
      if (file.size > MOST_FILE_BYTES) throw new Error("it is larger than 1 MiB");
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new Error("it is no text");
      files.push({ name: file.name, text });
    } catch (error) {
      tell(`${file.name} cannot be attached: ${error instanceof TypeError ? "it is no text" : error.message}`, true);
    }
  }
  showFiles();
}

function showFiles() {
  byId("files").replaceChildren(...files.map((file, place) => {
    const remove = make("button", { type: "button", textContent: `${file.name} ×` });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.onclick = () => { files.splice(place, 1); showFiles(); };
    return make("li", {}, remove);
  }));
}

// ---- What the user does ----------------------------------------------------------------------

async function send() {
  await started; // or the question would be asked in another conversation
  const text = byId("question").value.trim();
  if (running || (!text && !files.length)) return;
  if (!byId("settings").checkValidity()) {
    toggleSettings(true);
    byId("settings").reportValidity();
    return;
  }
  if (edited !== null) talk.turns.length = edited;
  edited = null;
  if (!talk.turns.length) talk.title = text || files.map((file) => file.name).join(", ");
  const parts = [text, ...files.map((file) => `${file.name}:\n\n${file.text.trim()}`)];
  talk.turns.push({ question: parts.filter(Boolean).join("\n\n"), answer: "", thinking: "" });
  byId("question").value = "";
  files = [];
  showFiles();
  answer(talk.turns.length - 1);
}

function stop() {
  running?.abort();
  running = null;
  showRunning();
}

function showRunning() {
  byId("stop").hidden = running === null;
  byId("send").hidden = running !== null;
}

function toggleList(isOpen) {
  byId("list-of-all").classList.toggle("open", isOpen);
  byId("show-list").setAttribute("aria-expanded", String(isOpen));
}

function toggleSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  byId("show-settings").setAttribute("aria-expanded", String(isOpen));
}

function colour() {
  byId("colours").value = localStorage.getItem(COLOURS) || "";
  document.documentElement.className = byId("colours").value;
}

function onKey(event) {
  if (byId("dialog").open) return;
  if (event.key === "Escape") {
    if (byId("list-of-all").classList.contains("open")) toggleList(false);
    else if (running) stop();
    else if (edited !== null) leaveEdit();
  }
  if (event.altKey && event.key.toLowerCase() === "n") { event.preventDefault(); begin(); }
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k" && server.token) {
    event.preventDefault();
    toggleList(true);
    byId("search").focus();
  }
}

function listen() {
  byId("ask").onsubmit = (event) => { event.preventDefault(); send(); };
  byId("settings").onsubmit = (event) => event.preventDefault();
  byId("question").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  document.onkeydown = onKey;
  window.onpagehide = () => talk.leave(server);
  window.onhashchange = takeAddress;
  byId("stop").onclick = stop;
  byId("new").onclick = begin;
  byId("attach").onclick = () => byId("chosen").click();
  byId("chosen").onchange = (event) => { attach([...event.target.files]); event.target.value = ""; };
  document.ondragover = (event) => event.preventDefault();
  document.ondrop = (event) => { event.preventDefault(); attach([...event.dataTransfer.files]); };
  byId("show-settings").onclick = () => toggleSettings(byId("settings").hidden);
  byId("show-list").onclick = () => toggleList(!byId("list-of-all").classList.contains("open"));
  byId("log").addEventListener("click", () => toggleList(false));
  byId("system").onchange = () => {
    talk.system = byId("system").value;
    if (talk.id !== null) save(talk);
  };
  byId("colours").onchange = () => {
    localStorage.setItem(COLOURS, byId("colours").value);
    colour();
  };
}

// The token that stands behind the address, and the conversation.
async function takeAddress() {
  const given = new URLSearchParams(location.hash.slice(1)), id = Number(given.get("c")) || null;
  if (given.has("token")) setAddress(id);
  try {
    if (!await server.takeToken(given.get("token"))) {
      warn("The token in the address is not this server's, so it was not kept. localllm serve --open prints the right one.");
    }
  } catch (error) {
    tell(error.message, true);
  }
  if (id !== null && id !== talk.id && server.token) await open(id);
  else await list.show(talk.id);
}

async function showModel() {
  model = await server.json("/page/model");
  byId("model").textContent = model.id;
  document.title = `localllm · ${model.id}`;
  byId("max_tokens").placeholder = model.most_tokens.toLocaleString();
  byId("max_tokens").max = model.context_length;
  byId("thinks").hidden = !model.thinks;
}

function isReload() {
  return performance.getEntriesByType("navigation")[0]?.type === "reload";
}

async function start() {
  colour();
  listen();
  const left = Conversation.takeLeft();
  if (left?.turns.length) show(left);
  // It may have been saved after the reload had begun, which goes to the address from before.
  else if (left?.id && !location.hash && isReload()) setAddress(left.id);
  await showModel().catch((error) => tell(error.message, true));
  await takeAddress();
  if (left?.turns.length) save(left);
  byId("question").focus();
}

const started = start();
