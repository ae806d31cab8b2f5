// Blocks of code, with colours that a thread of its own finds: no code holds up the page.

import { copy, icon, make } from "./elements.js";

const MOST_COLOURED = 50_000, PATIENCE_MS = 2000;

export function codeBlock(language, source) {
  const text = source.replace(/\n$/, "");
  const button = make("button", { type: "button", className: "tool" }, icon("copy"));
  const name = language ? `Copy ${language} code` : "Copy code";
  button.setAttribute("aria-label", name);
  button.title = name;
  const pre = make("pre", { tabIndex: 0 }, make("code", { textContent: text }));
  const bar = make("div", { className: "bar" }, make("span", { textContent: language }), button);
  const block = Object.assign(make("div", { className: "code" }, bar, pre), { language, source: text });
  button.onclick = () => copy(block.source, button);
  return block;
}

// A block on the page becomes what `now`, made of more of the answer, is.
export function growCode(block, now) {
  if (block.language !== now.language) return block.replaceWith(now);
  if (block.source === now.source) return;
  const code = block.querySelector("code"), last = code.lastChild;
  if (!now.source.startsWith(block.source)) code.textContent = now.source;
  else if (last?.nodeType === Node.TEXT_NODE) last.appendData(now.source.slice(block.source.length));
  else code.append(now.source.slice(block.source.length));
  block.source = now.source;
}

// Colour the blocks in an element that have grown since they were coloured.
export function colourIn(element) {
  const found = element.matches(".code") ? [element] : element.querySelectorAll(".code");
  for (const block of found) colour(block);
}

async function colour(block) {
  const asked = block.source;
  if (!block.language || asked.length > MOST_COLOURED || block.coloured === asked || block.isAsked) return;
  block.isAsked = true;
  const parts = await painter.ask(block.language, asked);
  block.isAsked = false;
  block.coloured = asked;
  if (!parts || !block.source.startsWith(asked)) return;
  const spans = parts.map(([className, text]) => className ? make("span", { className, textContent: text }) : text);
  block.querySelector("code").replaceChildren(...spans, block.source.slice(asked.length));
  if (block.source !== asked) colour(block);
}

// One question at a time; a worker that does not answer in time is ended, and its code stays plain.
class Painter {
  #worker = null;
  #before = Promise.resolve();

  ask(language, source) {
    const answer = this.#before.then(() => this.#askNow(language, source));
    this.#before = answer;
    return answer;
  }

  #askNow(language, source) {
    this.#worker ??= new Worker(ownWorker, { type: "module" });
    return new Promise((resolve) => {
      const end = () => {
        this.#worker.terminate();
        this.#worker = null;
        resolve(null);
      };
      const timer = setTimeout(end, PATIENCE_MS);
      this.#worker.onerror = () => { clearTimeout(timer); end(); };
      this.#worker.onmessage = ({ data }) => { clearTimeout(timer); resolve(data); };
      this.#worker.postMessage({ language, source });
    });
  }
}

const PATH = "/page/colours.js";
// The page's policy starts no worker but by this one name of a policy.
const ownWorker = window.trustedTypes
  ? window.trustedTypes.createPolicy("own-worker", { createScriptURL: () => PATH }).createScriptURL("")
  : PATH;
const painter = new Painter();
