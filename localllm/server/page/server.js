// What the page asks its own server.

import { askInDialog } from "./elements.js";

const TOKEN = "localllm-token", KEY = "localllm-key";

export class Server {
  #key = sessionStorage.getItem(KEY) || "";
  #hasNoKey = false;
  token = localStorage.getItem(TOKEN) || "";

  async call(path, options = {}) {
    const headers = { ...options.headers };
    if (options.body) headers["content-type"] = "application/json";
    if (this.#key) headers.authorization = `Bearer ${this.#key}`;
    if (this.token) headers["x-localllm-token"] ??= this.token;
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      if (error.name === "AbortError") throw error;
      throw new Error("the server does not answer; is it still running?");
    });
    if (response.status === 401 && await this.#askForKey()) return this.call(path, options);
    if (!response.ok) {
      const told = await response.json().catch(() => ({}));
      const error = new Error(told.error?.message || `the server answers ${response.status}`);
      error.status = response.status;
      throw error;
    }
    return response;
  }

  async json(path, options = {}) {
    return (await this.call(path, options)).json();
  }

  post(path, body, options = {}) {
    return this.json(path, { method: "POST", body: JSON.stringify(body), ...options });
  }

  // The token that --open makes stands behind the address, in the part that no server is sent. Any
  // page can open this one with a token of its own making, so the server is asked first.
  async takeToken(given) {
    if (!given || given === this.token) return true;
    try {
      await this.call("/page/token", { headers: { "x-localllm-token": given } });
    } catch (error) {
      if (error.status === 403) return false;
      throw error;
    }
    this.token = given;
    localStorage.setItem(TOKEN, given);
    return true;
  }

  forgetToken() {
    this.token = "";
    localStorage.removeItem(TOKEN);
  }

  async #askForKey() {
    if (this.#hasNoKey) return false;
    const typed = await askInDialog("This server needs an API key.", "Use it", "API key");
    this.#hasNoKey = !typed;
    if (!typed) return false;
    this.#key = typed.trim();
    sessionStorage.setItem(KEY, this.#key);
    return true;
  }
}

export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).split("\n").find((line) => line.startsWith("data: "));
      text = text.slice(end + 2);
      if (data) yield JSON.parse(data.slice(6));
    }
  }
}
