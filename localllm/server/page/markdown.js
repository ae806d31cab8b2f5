// Markdown, drawn as it comes: blocks that are finished stay, and the last one is drawn again.
//
// markdown-it reads it, and elements are made from its tokens, never from HTML. Limits keep the
// time of a drawing short whatever the text is; what exceeds one is shown as it was written.

import MarkdownIt from "./vendor/markdown-it.js";
import { codeBlock, colourIn, growCode } from "./code.js";
import { make } from "./elements.js";

const MOST_CHARS = 1 << 17; // of a whole answer
const MOST_INLINE = 10_000; // of one paragraph, heading or cell
const MOST_TOKENS = 16_000; // of a list, a quote or a table: some 5,000 cells
const MOST_LEVELS = 60; // of lists and quotes, which are read by recursion
const MOST_OPEN = 80; // of elements within elements
const LINKS = ["http:", "https:", "mailto:"];

const parser = new MarkdownIt({ html: false, linkify: true, maxNesting: MOST_LEVELS });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
parser.validateLink = () => true; // `link` decides
parser.core.ruler.before("inline", "long-text", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type === "inline" && token.content.length > MOST_INLINE) token.type = "long_text";
  }
});

export class MarkdownView {
  #element;
  #text = "";
  #from = 0; // where the block begins that may still change
  #open = null; // its element
  #numDrawn = 0;
  #hasAddresses = false; // of links, by name

  constructor(element) {
    this.#element = element;
  }

  // Show a text, which may have grown. `isWhole`: it grows no more.
  show(text, isWhole) {
    const now = text.replace(/\r\n?/g, "\n");
    if (!now.startsWith(this.#text)) this.#begin();
    this.#text = now;
    try {
      if (now.length > MOST_CHARS) this.#showPlain();
      else this.#draw(isWhole);
    } catch (error) { // a text must not cost the conversation
      console.error(error);
      this.#showPlain();
    }
  }

  #begin() {
    this.#element.replaceChildren();
    this.#from = this.#numDrawn = 0;
    this.#open = null;
    this.#hasAddresses = false;
  }

  #showPlain() {
    this.#begin();
    this.#element.append(plain(this.#text));
  }

  #draw(isWhole) {
    const tail = this.#text.slice(this.#from);
    if (!isWhole && this.#open?.className === "plain") { // too much already; read again once it ends
      this.#open.firstChild.appendData(tail.slice(this.#open.firstChild.length));
      return;
    }
    const env = {}, groups = groupsOf(parser.parse(tail, env));
    const nodes = groups.map((tokens) => elementOf(tokens, tail));
    const settled = this.#open ? this.#open.previousElementSibling : this.#element.lastElementChild;
    if (this.#open && nodes.length) patch(this.#open, nodes.shift());
    else this.#open?.remove();
    this.#element.append(...nodes);
    this.#numDrawn += 1;
    if (groups.length) this.#from += offsetOf(tail, groups.at(-1)[0].map[0]);
    this.#open = groups.length ? this.#element.lastElementChild : null;
    let drawn = settled ? settled.nextElementSibling : this.#element.firstElementChild;
    for (; drawn; drawn = drawn.nextElementSibling) colourIn(drawn);
    // Addresses may stand far from the links that use them, and while they come they are not whole.
    this.#hasAddresses ||= Object.keys(env.references ?? {}).length > 0;
    if (isWhole && this.#hasAddresses && this.#numDrawn > 1) {
      this.#begin();
      this.#draw(true);
    }
  }
}

// The tokens of each block that stands in no other one.
function groupsOf(tokens) {
  const groups = [];
  for (const token of tokens) {
    if (token.level === 0 && token.nesting >= 0) groups.push([]);
    groups.at(-1).push(token);
  }
  return groups;
}

function offsetOf(text, line) {
  let at = 0;
  for (let each = 0; each < line; each += 1) at = text.indexOf("\n", at) + 1;
  return at;
}

function elementOf(tokens, text) {
  const isDeep = tokens.some((token) => token.level >= MOST_LEVELS - 2);
  if (!isDeep && tokens.length <= MOST_TOKENS) return build(tokens);
  const [from, to] = tokens[0].map, begin = offsetOf(text, from);
  const lines = text.slice(begin).split("\n", to - from);
  return plain(lines.join("\n"));
}

function plain(text) {
  return make("div", { className: "plain", textContent: text });
}

function build(tokens) {
  const open = [document.createDocumentFragment()];
  const add = (...nodes) => open.at(-1).append(...nodes);
  const draw = (token) => {
    if (token.type === "inline") token.children.forEach(draw);
    else if (token.nesting < 0) open.pop();
    else if (token.nesting === 0) add(leaf(token));
    else if (token.hidden || open.length > MOST_OPEN) open.push(open.at(-1));
    else {
      const element = opened(token);
      add(token.type === "table_open" ? make("div", { className: "table", tabIndex: 0 }, element) : element);
      open.push(element);
    }
  };
  tokens.forEach(draw);
  return open[0].firstElementChild;
}

function opened(token) {
  if (token.type === "link_open") return link(token.attrGet("href"));
  const element = document.createElement(token.tag);
  const side = /text-align:(center|right)/.exec(token.attrGet("style") ?? "");
  if (side) element.className = `to-${side[1]}`;
  if (token.attrGet("start")) element.start = Number(token.attrGet("start"));
  return element;
}

function link(target) {
  const isSafe = URL.canParse(target) && LINKS.includes(new URL(target).protocol);
  if (!isSafe) return make("span", { title: target });
  return make("a", { href: target, target: "_blank", rel: "noopener noreferrer" });
}

function leaf(token) {
  switch (token.type) {
    case "code_inline": return make("code", { textContent: token.content });
    case "fence": return codeBlock(/^[\w+#.-]*/.exec(token.info.trim())[0], token.content);
    case "code_block": return codeBlock("", token.content);
    case "hr": case "hardbreak": return document.createElement(token.tag);
    case "softbreak": return "\n";
    case "image": // named, not fetched: its address would tell others what is read here
      return `[image: ${token.content || token.attrGet("src")}]`;
    default: return token.content;
  }
}

// An element on the page becomes `now`; what is the same in both stays, selected or scrolled as it is.
function patch(old, now) {
  if (old.nodeName !== now.nodeName || old.className !== now.className || old.href !== now.href ||
    old.start !== now.start) return old.replaceWith(now);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== now.data) old.data = now.data;
    return undefined;
  }
  if (old.className === "code") return growCode(old, now);
  const kept = [...old.childNodes], wanted = [...now.childNodes];
  wanted.forEach((node, place) => place < kept.length ? patch(kept[place], node) : old.append(node));
  for (const node of kept.slice(wanted.length)) node.remove();
  return undefined;
}
