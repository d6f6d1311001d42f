// A block of code with its language and a copy button; it may grow while an answer comes.

import { copyButton, el } from "./dom.js";
import { colourCode, knowsLanguage } from "./syntax.js";

const MOST_COLOURED = 40_000; // characters; longer code stays plain
const CHUNK = 6_000; // characters after which a new part begins, so that a browser lays out few

/** Return the element of a code block; `closed` says that no more code follows. */
export function codeBlock(text, language, closed) {
  const code = el("code");
  const name = language.slice(0, 40) || "text";
  const block = el(
    "div",
    { class: "code-block" },
    el("div", { class: "code-head" }, el("span", { class: "code-language" }, name), copyButton("Copy code", () => shown)),
    el("pre", { tabindex: "0", role: "region", "aria-label": `Code, ${name}` }, code),
  );
  let shown = "";
  block.grow = (longer) => {
    if (!longer.startsWith(shown)) {
      code.replaceChildren();
      shown = "";
    }
    append(code, longer.slice(shown.length));
    shown = longer;
  };
  if (closed && text.length <= MOST_COLOURED && knowsLanguage(language)) {
    shown = text;
    for (const piece of colourCode(text, language)) {
      code.append(piece.kind ? el("span", { class: `code-${piece.kind}` }, piece.text) : piece.text);
    }
  } else {
    block.grow(text);
  }
  return block;
}

/** Add text to code in parts of whole lines. */
function append(code, text) {
  let part = code.lastElementChild?.firstChild;
  while (text) {
    if (!part || (part.length >= CHUNK && part.data.endsWith("\n"))) {
      part = document.createTextNode("");
      code.append(el("span", { class: "code-part" }, part));
    }
    const lineEnd = text.indexOf("\n", Math.max(0, CHUNK - part.length));
    const end = lineEnd < 0 ? text.length : lineEnd + 1;
    part.appendData(text.slice(0, end));
    text = text.slice(end);
  }
}
