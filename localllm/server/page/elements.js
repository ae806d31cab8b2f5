// Elements, made from text alone: nothing is ever read as HTML.

export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function icon(name) {
  const of = (tag) => document.createElementNS("http://www.w3.org/2000/svg", tag);
  const svg = of("svg"), use = of("use");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  use.setAttribute("href", `#icon-${name}`);
  svg.append(use);
  return svg;
}

// A button with a picture; `label` is what it is called.
export function tool(name, label, act) {
  const button = make("button", { type: "button", className: "tool", title: label }, icon(name));
  button.setAttribute("aria-label", label);
  button.onclick = () => act(button);
  return button;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // not allowed here: the old way
    const area = make("textarea", { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}

// Asks in a dialog; answers with what was typed ("" without an input), or null.
export function askInDialog(title, action, input = null) {
  const dialog = byId("dialog"), field = byId("dialog-input");
  byId("dialog-title").textContent = title;
  byId("dialog-yes").textContent = action;
  field.hidden = input === null;
  field.value = "";
  field.placeholder = input ?? "";
  return new Promise((resolve) => {
    let answer = null;
    byId("dialog-form").onsubmit = (event) => {
      event.preventDefault();
      answer = field.value;
      dialog.close();
    };
    byId("dialog-no").onclick = () => dialog.close();
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    if (input === null) byId("dialog-no").focus();
  });
}
