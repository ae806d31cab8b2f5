// The questions and answers on the page.

import { copy, make, tool } from "./elements.js";
import { MarkdownView } from "./markdown.js";

const SLICE_MS = 12; // of drawing, until the page may do something else
const LEAST_PAUSE_MS = 40;
const PAUSES = 3; // how much longer than a drawing the pause behind it is
const LONG_CHARS = 1500, LONG_LINES = 20;

export class Answers {
  #turns = [];
  #last = null; // the parts of the last answer
  #round = 0;
  #timer = 0;
  #pauseMs = LEAST_PAUSE_MS;

  // `acts`: edit(place), regenerate(place), goOn(place); `isRunning()`: whether an answer comes.
  constructor(element, acts, isRunning) {
    this.element = element;
    this.acts = acts;
    this.isRunning = isRunning;
  }

  // Draw a conversation from its end on, in slices.
  async show(turns) {
    const round = this.#round += 1;
    clearTimeout(this.#timer);
    this.#timer = 0;
    this.#turns = turns;
    this.#last = null;
    this.element.replaceChildren();
    let began = performance.now();
    for (let place = turns.length - 1; place >= 0; place -= 1) {
      const stays = !this.#isAtEnd();
      this.element.prepend(this.#question(turns[place], place), this.#answer(turns[place], place));
      if (!stays) this.#scrollToEnd();
      if (performance.now() - began < SLICE_MS) continue;
      await new Promise((resolve) => setTimeout(resolve));
      if (round !== this.#round) return;
      began = performance.now();
    }
  }

  // The last answer has grown.
  grow() {
    this.#timer ||= setTimeout(() => this.#drawLast(), this.#pauseMs);
  }

  // A drawing that took long is followed by a longer pause, whatever made it long.
  #drawLast() {
    this.#timer = 0;
    if (!this.#last) return;
    const began = performance.now(), stays = !this.#isAtEnd();
    this.#last.draw();
    if (!stays) this.#scrollToEnd();
    this.#pauseMs = Math.max(LEAST_PAUSE_MS, PAUSES * (performance.now() - began));
  }

  // The last answer has begun or ended: its buttons change, and those of its question.
  settle() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (!this.#last) return;
    const stays = !this.#isAtEnd(), questions = this.element.querySelectorAll("article.question");
    this.#last.draw();
    questions.forEach((question, place) => question.querySelector(".tools").replaceWith(this.#questionTools(place)));
    if (!stays) this.#scrollToEnd();
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < 80;
  }

  #scrollToEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  #question(turn, place) {
    const text = make("div", { className: "text", textContent: turn.question });
    const article = make("article", { className: "question" }, make("h2", { className: "seen-only", textContent: "You" }), text);
    if (turn.question.length > LONG_CHARS || turn.question.split("\n", LONG_LINES + 1).length > LONG_LINES) {
      text.classList.add("long");
      const more = make("button", { type: "button", className: "more", textContent: "Show all" });
      more.setAttribute("aria-expanded", "false");
      more.onclick = () => {
        const isLong = text.classList.toggle("long");
        more.textContent = isLong ? "Show all" : "Show less";
        more.setAttribute("aria-expanded", String(!isLong));
      };
      article.append(more);
    }
    article.append(this.#questionTools(place));
    return article;
  }

  #questionTools(place) {
    const tools = make("div", { className: "tools" });
    if (!this.isRunning()) {
      tools.append(
        tool("copy", "Copy", (button) => copy(this.#turns[place].question, button)),
        tool("edit", "Edit", () => this.acts.edit(place)),
      );
    }
    return tools;
  }

  #answer(turn, place) {
    const thought = document.createTextNode(""), summary = make("summary");
    const thoughts = make("details", { className: "thoughts", hidden: true }, summary, make("div", {}, thought));
    const text = make("div", { className: "markdown" }), view = new MarkdownView(text);
    const waiting = make("div", { className: "waiting", hidden: true });
    const tools = make("div", { className: "tools" });
    const name = make("h2", { textContent: turn.model });
    const article = make("article", { className: "answer" }, name, thoughts, text, waiting, tools);
    const isLast = place === this.#turns.length - 1;
    const draw = () => {
      const isComing = isLast && this.isRunning();
      name.textContent = turn.model;
      thoughts.hidden = !turn.thinking;
      if (turn.thinking.startsWith(thought.data)) thought.appendData(turn.thinking.slice(thought.data.length));
      else thought.data = turn.thinking;
      const verb = isComing && !turn.answer ? "Thinking" : "Thoughts";
      summary.textContent = `${verb} · ${turn.thinking.length.toLocaleString()} characters`;
      waiting.hidden = !isComing || Boolean(turn.answer);
      view.show(turn.answer, !isComing);
      tools.replaceChildren(...(isComing ? [] : this.#answerTools(turn, place, isLast)));
    };
    draw();
    if (isLast) this.#last = { draw };
    return article;
  }

  #answerTools(turn, place, isLast) {
    const shown = [];
    if (turn.answer) shown.push(tool("copy", "Copy", (button) => copy(turn.answer, button)));
    if (isLast) shown.push(tool("again", "Regenerate", () => this.acts.regenerate(place)));
    if (isLast && turn.answer && turn.finish_reason !== "stop") {
      const goOn = make("button", { type: "button", textContent: "Continue" });
      goOn.onclick = () => this.acts.goOn(place);
      shown.push(goOn);
    }
    if (turn.figures) shown.push(make("small", { textContent: turn.figures }));
    return shown;
  }
}
