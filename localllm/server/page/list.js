// The list of conversations: search, open, rename, delete.

import { askInDialog, byId, make, tool } from "./elements.js";

const DAY_MS = 86_400_000;

export class List {
  // `acts`: open(id), removed(id), tell(text, isBad).
  constructor(server, acts) {
    this.server = server;
    this.acts = acts;
    this.round = 0;
    let timer = 0;
    byId("search").oninput = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.show(this.current), 150);
    };
  }

  async show(current) {
    this.current = current;
    const round = this.round += 1, { token } = this.server;
    byId("not-saved").hidden = Boolean(token);
    byId("search-row").hidden = !token;
    if (!token) return byId("list").replaceChildren();
    const sought = byId("search").value.trim();
    try {
      const query = sought ? `?containing=${encodeURIComponent(sought)}` : "";
      const { conversations } = await this.server.json(`/page/conversations${query}`);
      if (round !== this.round) return undefined; // a later one is under way
      byId("list").replaceChildren(...this.#rows(conversations));
      byId("none").hidden = conversations.length > 0;
      byId("none").textContent = sought ? "No conversation contains this." : "Your conversations will be here.";
    } catch (error) {
      if (error.status === 403) {
        this.server.forgetToken();
        return this.show(current);
      }
      this.acts.tell(error.message, true);
    }
    return undefined;
  }

  #rows(conversations) {
    let last = "";
    return conversations.flatMap((each) => {
      const age = ageOf(each.updated), rows = [this.#row(each)];
      if (age !== last) rows.unshift(make("li", { className: "age", textContent: age }));
      last = age;
      return rows;
    });
  }

  #row(each) {
    const title = each.title || "…";
    const open = make("button", { type: "button", className: "open", textContent: title, title });
    if (each.id === this.current) open.setAttribute("aria-current", "true");
    open.onclick = () => this.acts.open(each.id);
    const row = make("li", {}, open);
    row.append(
      tool("edit", `Rename ${title}`, () => this.#rename(row, each)),
      tool("delete", `Delete ${title}`, () => this.#remove(each)),
    );
    return row;
  }

  #rename(row, each) {
    const field = make("input", { value: each.title, maxLength: 60 });
    field.setAttribute("aria-label", "Name of the conversation; empty: its first question");
    let isOver = false;
    const end = async (isMeant) => {
      if (isOver) return;
      isOver = true;
      if (isMeant && field.value.trim() !== each.title) {
        try {
          await this.server.post(`/page/conversations/${each.id}/name`, { name: field.value });
        } catch (error) {
          this.acts.tell(error.message, true);
        }
      }
      await this.show(this.current);
    };
    field.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    };
    field.onblur = () => end(true);
    row.replaceChildren(field);
    field.select();
  }

  async #remove(each) {
    if (await askInDialog(`Delete “${each.title}” for good?`, "Delete") === null) return;
    try {
      await this.server.call(`/page/conversations/${each.id}`, { method: "DELETE" });
    } catch (error) {
      if (error.status !== 404) return this.acts.tell(error.message, true);
    }
    this.acts.removed(each.id);
    return undefined;
  }
}

function ageOf(updatedS) {
  const midnight = new Date().setHours(0, 0, 0, 0), at = updatedS * 1000;
  if (at >= midnight) return "Today";
  if (at >= midnight - DAY_MS) return "Yesterday";
  return at >= midnight - 7 * DAY_MS ? "This week" : "Older";
}
