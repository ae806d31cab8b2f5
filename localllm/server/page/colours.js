// A thread of its own: the parts of a piece of code, each with the class that colours it.

import hljs from "./vendor/highlight.js";

const CHARACTERS = { "&amp;": "&", "&lt;": "<", "&gt;": ">", "&quot;": '"', "&#x27;": "'" };

onmessage = ({ data: { language, source } }) => {
  const isKnown = hljs.getLanguage(language);
  postMessage(isKnown ? partsOf(hljs.highlight(source, { language, ignoreIllegals: true }).value) : null);
};

// The library writes HTML of spans and text alone; the innermost span counts.
function partsOf(html) {
  const open = [""], parts = [];
  for (const piece of html.split(/(<span class="[^"]*">|<\/span>)/)) {
    if (piece === "</span>") open.pop();
    else if (piece.startsWith("<span")) open.push(piece.slice(13, -2));
    else if (piece) parts.push([open.at(-1), piece.replace(/&(?:amp|lt|gt|quot|#x27);/g, (each) => CHARACTERS[each])]);
  }
  return parts;
}
