// Markdown to DOM nodes. Text from a model becomes text nodes and a fixed set of elements, never
// HTML: tags in it are shown as they are written. The dialect is CommonMark with tables, task lists
// and ~~deletions~~ of GitHub, but without HTML, reference links and indented code: models fence
// their code, and what they indent by mistake is text.

import { el } from "./dom.js";
import { codeBlock } from "./code.js";
import { mathElement } from "./math.js";

const FENCE = /^ *(`{3,}(?=[^`]*$)|~{3,})[ \t]*(\S*)/;
const HEADING = /^ *(#{1,6})(?:[ \t]+|$)/;
const RULE = /^ *(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ *> ?/;
const BULLET = /^( *)([-+*])(?:( +)|$)/;
const ORDERED = /^( *)(\d{1,9})([.)])(?:( +)|$)/;
const UNDERLINE = /^ {0,3}(=+|-+)[ \t]*$/;
const TABLE_RULE = /^ *\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^ *(?:\$\$|\\\[)/;
const MOST_NESTED = 40; // quotes and lists in each other; deeper ones are text
const MOST_INLINE = 50_000; // characters of a paragraph whose marks are read
const LONG = 100; // blocks of a text above which a browser lays out only those in sight

/* Blocks. A block is {type, start, end, ...} with its range of lines. */

/** Return the blocks of a text. */
export function parse(text) {
  return parseLines(splitLines(text), 0);
}

function splitLines(text) {
  return text.replaceAll("\0", "\uFFFD").split(/\r\n|\n|\r/).map(expandIndent);
}

/** Replace tabs in the indentation by blanks up to the next multiple of four. */
function expandIndent(line) {
  if (!line.includes("\t")) return line;
  let column = 0;
  let at = 0;
  for (; at < line.length; at += 1) {
    if (line[at] === " ") column += 1;
    else if (line[at] === "\t") column += 4 - (column % 4);
    else break;
  }
  let rest = line.slice(at);
  // A tab after the mark of a list item or a quote is indentation, too.
  const mark = /^(?:[-+*>]|\d{1,9}[.)])\t+/.exec(rest);
  if (mark) rest = mark[0].replace(/\t/g, "    ").slice(0, mark[0].indexOf("\t") + 1) + rest.slice(mark[0].length);
  return " ".repeat(column) + rest;
}

const isBlank = (line) => !/[^ \t]/.test(line);
const indentOf = (line) => /^ */.exec(line)[0].length;

/** Return whether a line begins a block that ends a paragraph before it. */
function interrupts(lines, at) {
  return indentOf(lines[at]) <= 3 && beginsBlock(lines, at);
}

function beginsBlock(lines, at) {
  return beginsMarked(lines[at]) || beginsTable(lines, at);
}

/** Return whether a line has the mark of a block that may follow text at once. */
function beginsMarked(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const bullet = BULLET.exec(line);
  if (bullet) return bullet[3] !== undefined && bullet[0].length < line.length;
  const ordered = ORDERED.exec(line);
  return ordered !== null && Number(ordered[2]) === 1 && ordered[4] !== undefined && ordered[0].length < line.length;
}

function beginsTable(lines, at) {
  const line = lines[at];
  const rule = lines[at + 1];
  if (rule === undefined || !line.includes("|") || !TABLE_RULE.test(rule)) return false;
  if (!/[|:]/.test(rule)) return false;
  return cells(line).length === cells(rule).length;
}

function parseLines(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const block = parseBlock(lines, at, depth);
    block.start = at;
    at = block.end;
    blocks.push(block);
  }
  return blocks;
}

function parseBlock(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return parseFence(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).replace(/(?:^|[ \t]+)#+[ \t]*$/, "").trim();
    return { type: "heading", level: heading[1].length, text, end: at + 1 };
  }
  if (RULE.test(line)) return { type: "rule", end: at + 1 };
  if (depth < MOST_NESTED) {
    if (QUOTE.test(line)) return parseQuote(lines, at, depth);
    const mark = listMark(line);
    if (mark) return parseList(lines, at, depth, mark);
  }
  if (MATH.test(line)) {
    const math = parseMath(lines, at);
    if (math) return math;
  }
  if (beginsTable(lines, at)) return parseTable(lines, at);
  return parseParagraph(lines, at);
}

function parseFence(lines, at, fence) {
  const mark = fence[1];
  const close = new RegExp(`^ *\\${mark[0]}{${mark.length},}[ \\t]*$`);
  const indent = indentOf(lines[at]);
  const code = [];
  let end = at + 1;
  let closed = false;
  for (; end < lines.length; end += 1) {
    if (close.test(lines[end])) {
      closed = true;
      end += 1;
      break;
    }
    code.push(lines[end].slice(Math.min(indent, indentOf(lines[end]))));
  }
  return { type: "code", language: unescapeText(fence[2]), text: code.join("\n"), closed, end };
}

function parseMath(lines, at) {
  const close = lines[at].trimStart().startsWith("$$") ? "$$" : "\\]";
  const text = [];
  for (let end = at; end < lines.length && !(end > at && isBlank(lines[end])); end += 1) {
    const line = end === at ? lines[at].trimStart().slice(2) : lines[end];
    const found = line.indexOf(close);
    if (found < 0) {
      text.push(line);
      continue;
    }
    if (!isBlank(line.slice(found + 2))) return null;
    text.push(line.slice(0, found));
    return { type: "math", text: text.join("\n").trim(), end: end + 1 };
  }
  return null;
}

function parseQuote(lines, at, depth) {
  const inner = [];
  let end = at;
  const paragraph = new ParagraphWatch();
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const quoted = QUOTE.exec(line);
    if (quoted) {
      inner.push(line.slice(quoted[0].length));
      paragraph.push(inner.at(-1));
    } else if (paragraph.open && !isBlank(line) && !beginsBlock(lines, end) && !listMark(line)) {
      inner.push(lazy(line));
    } else {
      break;
    }
  }
  return { type: "quote", blocks: parseLines(inner, depth + 1), end };
}

// Marks a line that continues a paragraph, whatever it looks like; texts hold no such character.
const LAZY = "\0";

function lazy(line) {
  return line.startsWith(LAZY) ? line : LAZY + line.trimStart();
}

/** Follows the lines of a quote or an item: whether the last one ends in a paragraph. */
class ParagraphWatch {
  constructor() {
    this.open = false; // a line without mark or indentation may continue the last one
    this.fence = null; // the mark of a code block that is open
    this.table = false;
    this.before = ""; // the last line, without marks of quotes and items
  }

  push(line) {
    if (line.startsWith(LAZY)) return;
    const text = withoutMarks(line);
    this.open = this.isParagraph(text);
    this.before = this.open ? text : "";
  }

  isParagraph(text) {
    const fence = FENCE.exec(text);
    if (this.fence !== null) {
      const closes = fence && fence[1].startsWith(this.fence) && isBlank(text.trimStart().slice(fence[1].length));
      if (closes) this.fence = null;
      return false;
    }
    if (isBlank(text) || HEADING.test(text) || RULE.test(text)) return (this.table = false);
    if (fence) {
      this.fence = fence[1];
      return (this.table = false);
    }
    this.table ||= beginsTable([this.before, text], 0);
    return !this.table && !(this.before && UNDERLINE.test(text));
  }
}

/** Return a line without the marks of the quotes and list items that begin in it. */
function withoutMarks(line) {
  let text = line;
  for (let depth = 0; depth < MOST_NESTED; depth += 1) {
    const quoted = QUOTE.exec(text);
    const mark = quoted || RULE.test(text) ? null : listMark(text);
    if (!quoted && !mark) break;
    text = text.slice(quoted ? quoted[0].length : mark.offset);
  }
  return text;
}

/** Return what begins a list item: its kind, and the column of its content. */
function listMark(line) {
  const found = BULLET.exec(line) ?? ORDERED.exec(line);
  if (!found) return null;
  const ordered = found.length > 4;
  const [indent, mark] = [found[1].length, ordered ? found[2].length + 1 : 1];
  const blanks = (ordered ? found[4] : found[3])?.length ?? 0;
  const empty = found[0].length === line.length || isBlank(line.slice(found[0].length));
  return {
    kind: ordered ? found[3] : found[2],
    number: ordered ? Number(found[2]) : null,
    offset: indent + mark + (empty || blanks > 4 ? 1 : blanks),
    empty,
  };
}

function parseList(lines, at, depth, first) {
  const items = [];
  let loose = false;
  let end = at;
  let mark = first;
  while (mark && mark.kind === first.kind) {
    const item = takeItem(lines, end, mark);
    const blocks = parseLines(item.lines, depth + 1);
    // Blank lines between the blocks of an item, or before the next item, make a list loose.
    loose ||= blocks.some((block, index) => index > 0 && isBlank(item.lines[block.start - 1]));
    items.push(blocks);
    const before = item.end;
    end = before;
    while (end < lines.length && isBlank(lines[end])) end += 1;
    mark = end < lines.length && !RULE.test(lines[end]) ? listMark(lines[end]) : null;
    if (mark && mark.kind === first.kind) loose ||= end > before;
    else end = before;
  }
  return { type: "list", ordered: first.number !== null, number: first.number, loose, items, end };
}

/** Return the lines of a list item without their indentation, and the line after it. */
function takeItem(lines, at, mark) {
  const taken = [lines[at].slice(mark.offset)];
  let end = at + 1; // after the last line that is not blank
  const paragraph = new ParagraphWatch();
  paragraph.push(taken[0]);
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (isBlank(line)) {
      // An item that begins with an empty line ends at the second one.
      if (mark.empty && next === at + 1) break;
      taken.push("");
      paragraph.push("");
    } else if (indentOf(line) >= mark.offset) {
      taken.push(line.slice(mark.offset));
      paragraph.push(taken.at(-1));
      end = next + 1;
    } else if (paragraph.open && !beginsBlock(lines, next) && !listMark(line)) {
      taken.push(lazy(line));
      end = next + 1;
    } else {
      break;
    }
  }
  return { lines: taken.slice(0, end - at), end };
}

function parseTable(lines, at) {
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map((cell) => {
    const [left, right] = [cell.startsWith(":"), cell.endsWith(":")];
    return left && right ? "center" : right ? "right" : left ? "left" : "";
  });
  const rows = [];
  let end = at + 2;
  for (; end < lines.length && !isBlank(lines[end]); end += 1) {
    if (beginsMarked(lines[end])) break;
    const row = cells(lines[end]);
    rows.push(head.map((_, column) => row[column] ?? ""));
  }
  return { type: "table", head, sides, rows, end };
}

/** Return the cells of a table's row; an escaped bar belongs to its cell. */
function cells(line) {
  const text = line.trim();
  const found = [];
  let cell = "";
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      found.push(cell);
      cell = "";
    } else {
      cell += text[at];
    }
  }
  found.push(cell);
  if (found.length > 1 && isBlank(found[0])) found.shift();
  if (found.length > 1 && isBlank(found.at(-1)) && text.endsWith("|")) found.pop();
  return found.map((part) => part.trim());
}

function parseParagraph(lines, at) {
  const text = [lines[at]];
  let end = at + 1;
  for (; end < lines.length && !isBlank(lines[end]); end += 1) {
    const line = lines[end];
    if (!line.startsWith(LAZY)) {
      const underline = UNDERLINE.exec(line);
      if (underline) {
        const level = underline[1][0] === "=" ? 1 : 2;
        return { type: "heading", level, text: joined(text), end: end + 1 };
      }
      if (interrupts(lines, end)) break;
    }
    text.push(line);
  }
  return { type: "paragraph", text: joined(text), end };
}

function joined(lines) {
  return lines
    .map((line) => line.replace(LAZY, "").trimStart())
    .join("\n")
    .trimEnd();
}

/* Inline marks. */

const ESCAPED = /[!-/:-@[-`{-~]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BARE_LINK = /^https?:\/\/[^\s<]+/i;
const AUTOLINK = /^<([a-z][a-z0-9+.-]{1,31}:[^\s<>]*)>/i;
const MAIL = /^<([a-z0-9.!#$%&'*+/=?^_`{|}~-]+@[a-z0-9](?:[a-z0-9.-]*[a-z0-9])?)>/i;
const ENTITY = /^&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|([a-z]\w{1,31}));/i;
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00A0", copy: "©", reg: "®", trade: "™",
  hellip: "…", mdash: "—", ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", laquo: "«",
  raquo: "»", bull: "•", middot: "·", times: "×", divide: "÷", plusmn: "±", deg: "°", micro: "µ",
  le: "≤", ge: "≥", ne: "≠", larr: "←", rarr: "→", uarr: "↑", darr: "↓", harr: "↔", infin: "∞",
  sum: "∑", minus: "−", radic: "√", asymp: "≈", alpha: "α", beta: "β", gamma: "γ", delta: "δ",
  lambda: "λ", mu: "μ", pi: "π", sigma: "σ", omega: "ω", euro: "€", pound: "£", sect: "§",
  auml: "ä", ouml: "ö", uuml: "ü", Auml: "Ä", Ouml: "Ö", Uuml: "Ü", szlig: "ß", eacute: "é",
};

function decodeEntity(found) {
  if (found[3] !== undefined) return ENTITIES[found[3]] ?? found[0];
  const code = found[1] !== undefined ? Number(found[1]) : parseInt(found[2], 16);
  const allowed = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000);
  return allowed ? String.fromCodePoint(code) : "\uFFFD";
}

/** Return a text without backslashes before punctuation, and with its entities decoded. */
function unescapeText(text) {
  return text.replace(/\\([!-/:-@[-`{-~])|&(?:#\d{1,7}|#x[0-9a-f]{1,6}|[a-z]\w{1,31});/gi, (whole, mark) =>
    mark === undefined ? decodeEntity(ENTITY.exec(whole)) : mark,
  );
}

/** Return the marks of a text as a list of {type, text or children, ...}. */
export function parseInline(text) {
  return text.length > MOST_INLINE ? [{ type: "text", text }] : new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.nodes = []; // texts, elements and delimiters, as they come
    this.brackets = []; // openings of links: indexes into nodes
    this.noCloser = new Map(); // by length: no run of backticks follows from here on
  }

  parse() {
    const { text } = this;
    while (this.at < text.length) {
      const before = this.at;
      if (!this.take(text[before])) {
        this.at = before;
        this.takeText();
      }
    }
    resolveEmphasis(this.nodes, 0);
    return merged(this.nodes);
  }

  push(node) {
    this.nodes.push(node);
    return true;
  }

  pushText(text) {
    const last = this.nodes.at(-1);
    if (last && last.type === "text" && !last.bracket) last.text += text;
    else this.nodes.push({ type: "text", text });
    return true;
  }

  takeText() {
    // Everything up to the next character that may begin a mark is text.
    const rest = /[\\`*_~[\]!<&\nhH$]/g;
    rest.lastIndex = this.at + 1;
    const found = rest.exec(this.text);
    const end = found ? found.index : this.text.length;
    this.pushText(this.text.slice(this.at, end));
    this.at = end;
  }

  take(character) {
    switch (character) {
      case "\\":
        return this.takeEscape();
      case "`":
        return this.takeCode();
      case "*":
      case "_":
      case "~":
        return this.takeDelimiters(character);
      case "!":
        if (this.text[this.at + 1] !== "[") return false;
        this.at += 2;
        return this.openBracket("![");
      case "[":
        this.at += 1;
        return this.openBracket("[");
      case "]":
        return this.closeBracket();
      case "<":
        return this.takeAutolink();
      case "&":
        return this.takeEntity();
      case "\n":
        return this.takeBreak();
      case "$":
        return this.takeMath("$");
      case "h":
      case "H":
        return this.takeBareLink();
      default:
        return false;
    }
  }

  takeEscape() {
    const next = this.text[this.at + 1];
    if (next === "\n") {
      this.at += 2;
      return this.push({ type: "break" });
    }
    if (next === "(") {
      const end = this.text.indexOf("\\)", this.at + 2);
      if (end > 0) return this.pushMath(this.at + 2, end, end + 2);
    }
    if (next === undefined || !ESCAPED.test(next)) return false;
    this.at += 2;
    return this.pushText(next);
  }

  takeCode() {
    const opening = /^`+/.exec(this.text.slice(this.at, this.at + 1000))[0];
    const start = this.at + opening.length;
    if (!(this.noCloser.get(opening.length) <= start)) {
      const runs = /`+/g;
      runs.lastIndex = start;
      for (let run = runs.exec(this.text); run; run = runs.exec(this.text)) {
        if (run[0].length !== opening.length) continue;
        let code = this.text.slice(start, run.index).replaceAll("\n", " ");
        if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
        this.at = run.index + run[0].length;
        return this.push({ type: "code", text: code });
      }
      this.noCloser.set(opening.length, start);
    }
    this.at = start;
    return this.pushText(opening);
  }

  takeDelimiters(character) {
    let end = this.at;
    while (this.text[end] === character) end += 1;
    const length = end - this.at;
    const before = previousCharacter(this.text, this.at);
    const after = nextCharacter(this.text, end);
    const [spaceBefore, spaceAfter] = [/^\s?$/u.test(before), /^\s?$/u.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    this.at = end;
    if (character === "~" && length !== 2) return this.pushText("~".repeat(length));
    const inner = character === "_"; // must not mark parts of a word
    return this.push({
      type: "delimiter",
      character,
      length,
      original: length,
      opens: left && (!inner || !right || markBefore),
      closes: right && (!inner || !left || markAfter),
    });
  }

  openBracket(text) {
    this.brackets.push(this.nodes.length);
    return this.push({ type: "text", text, bracket: true, active: true });
  }

  closeBracket() {
    this.at += 1;
    const opening = this.brackets.pop();
    if (opening === undefined) return this.pushText("]");
    const bracket = this.nodes[opening];
    bracket.bracket = false;
    const target = bracket.active ? linkTarget(this.text, this.at) : null;
    if (!target) return this.pushText("]");
    this.at = target.end;
    const children = this.nodes.splice(opening + 1);
    this.nodes.pop();
    resolveEmphasis(children, 0);
    const image = bracket.text === "![";
    // A link holds no other link; the brackets around it are text.
    if (!image) for (const index of this.brackets) if (this.nodes[index].text === "[") this.nodes[index].active = false;
    return this.push({ type: image ? "image" : "link", address: target.address, title: target.title, children: merged(children) });
  }

  takeAutolink() {
    const rest = this.text.slice(this.at, this.at + 2100);
    const found = AUTOLINK.exec(rest) ?? MAIL.exec(rest);
    if (!found) return false;
    this.at += found[0].length;
    const address = found[1].includes(":") ? found[1] : `mailto:${found[1]}`;
    return this.push({ type: "link", address, title: "", children: [{ type: "text", text: found[1] }] });
  }

  takeBareLink() {
    if (this.at > 0 && /[\p{L}\p{N}_]/u.test(previousCharacter(this.text, this.at))) return false;
    if (this.brackets.some((index) => this.nodes[index].text === "[" && this.nodes[index].active)) return false;
    const found = BARE_LINK.exec(this.text.slice(this.at, this.at + 2100));
    if (!found) return false;
    const address = trimLink(found[0]);
    if (!/^https?:\/\/[^/?#]/i.test(address)) return false;
    this.at += address.length;
    return this.push({ type: "link", address, title: "", children: [{ type: "text", text: address }] });
  }

  takeEntity() {
    const found = ENTITY.exec(this.text.slice(this.at, this.at + 40));
    if (!found) return false;
    this.at += found[0].length;
    return this.pushText(decodeEntity(found));
  }

  takeBreak() {
    const last = this.nodes.at(-1);
    this.at += 1;
    const hard = last?.type === "text" && / {2}$/.test(last.text);
    if (last?.type === "text") last.text = last.text.replace(/ +$/, "");
    while (this.text[this.at] === " ") this.at += 1;
    return hard ? this.push({ type: "break" }) : this.pushText("\n");
  }

  takeMath() {
    // As Pandoc has it: no blank inside the marks, and no digit after them, so that prices are text.
    const { text, at } = this;
    const double = text[at + 1] === "$";
    const start = at + (double ? 2 : 1);
    if (start >= text.length || /\s/.test(text[start])) return false;
    const mark = double ? "$$" : "$";
    const end = text.indexOf(mark, start);
    const after = end + mark.length;
    if (end <= start || end - start > 1000 || /\s/.test(text[end - 1]) || /\d/.test(text[after] ?? "")) return false;
    const formula = text.slice(start, end);
    const signs = /^\d/.test(formula) ? /[\\^_=]/ : /[\\^_={}()+*/<>-]|^[a-zA-Z]$/;
    if (!signs.test(formula)) return false;
    return this.pushMath(start, end, after);
  }

  pushMath(start, end, after) {
    this.at = after;
    return this.push({ type: "math", text: this.text.slice(start, end).trim() });
  }
}

function previousCharacter(text, at) {
  if (at === 0) return "";
  const low = text.charCodeAt(at - 1);
  return low >= 0xdc00 && low < 0xe000 && at > 1 ? text.slice(at - 2, at) : text[at - 1];
}

function nextCharacter(text, at) {
  return at < text.length ? String.fromCodePoint(text.codePointAt(at)) : "";
}

/** Cut punctuation that belongs to the sentence around a bare link. */
function trimLink(address) {
  let end = address.length;
  for (;;) {
    const last = address[end - 1];
    if (/[?!.,:;*_~'"\]]/.test(last)) end -= 1;
    else if (last === ")" && count(address, ")", end) > count(address, "(", end)) end -= 1;
    else return address.slice(0, end);
  }
}

function count(text, character, end) {
  let found = 0;
  for (let at = 0; at < end; at += 1) if (text[at] === character) found += 1;
  return found;
}

/** Return address, title and end of "(address "title")" at a place of a text; null if it is none. */
function linkTarget(text, start) {
  if (text[start] !== "(") return null;
  let at = skipBlanks(text, start + 1);
  let address = "";
  if (text[at] === "<") {
    const found = /^<((?:[^<>\n\\]|\\.)*)>/.exec(text.slice(at, at + 4100));
    if (!found) return null;
    address = found[1];
    at += found[0].length;
  } else {
    let open = 0;
    const begin = at;
    for (; at < text.length; at += 1) {
      const character = text[at];
      if (character === "\\" && ESCAPED.test(text[at + 1] ?? "")) at += 1;
      else if (/[\s\x00-\x1f]/.test(character)) break;
      else if (character === "(") open += 1;
      else if (character === ")") {
        if (open === 0) break;
        open -= 1;
      }
      if (open > 32) return null;
    }
    if (open) return null;
    address = text.slice(begin, at);
  }
  const afterAddress = at;
  at = skipBlanks(text, at);
  let title = "";
  if (at > afterAddress && /["'(]/.test(text[at] ?? "")) {
    const close = text[at] === "(" ? ")" : text[at];
    let end = at + 1;
    while (end < text.length && text[end] !== close) end += text[end] === "\\" ? 2 : 1;
    if (end >= text.length) return null;
    title = text.slice(at + 1, end);
    at = skipBlanks(text, end + 1);
  }
  if (text[at] !== ")") return null;
  return { address: unescapeText(address), title: unescapeText(title), end: at + 1 };
}

function skipBlanks(text, at) {
  while (/[ \t\n]/.test(text[at] ?? "")) at += 1;
  return at;
}

/** Turn pairs of delimiters into emphasis, by CommonMark's rules. */
function resolveEmphasis(nodes, from) {
  // Below these places no opener fits a closer of the same kind, so that the time stays linear.
  const bottoms = new Map();
  for (let closer = from; closer < nodes.length; closer += 1) {
    const end = nodes[closer];
    if (end.type !== "delimiter" || !end.closes) continue;
    const key = `${end.character}${end.opens}${end.original % 3}`;
    let opener = closer - 1;
    const bottom = bottoms.get(key) ?? from;
    for (; opener >= bottom; opener -= 1) if (fits(nodes[opener], end)) break;
    if (opener < bottom) {
      bottoms.set(key, closer);
      if (!end.opens) end.closes = false;
      continue;
    }
    const begin = nodes[opener];
    const both = begin.length >= 2 && end.length >= 2 ? 2 : 1;
    const type = end.character === "~" ? "deleted" : both === 2 ? "strong" : "emphasis";
    const children = merged(nodes.slice(opener + 1, closer));
    begin.length -= both;
    end.length -= both;
    const replaced = [{ type, children }];
    if (begin.length) replaced.unshift(begin);
    if (end.length) replaced.push(end);
    nodes.splice(opener, closer - opener + 1, ...replaced);
    // The remaining closer is looked at again; what lies before the opener stays where it is.
    closer = opener + (begin.length ? 1 : 0);
    for (const [kind, place] of bottoms) if (place > closer) bottoms.set(kind, closer);
  }
}

function fits(begin, end) {
  if (begin.type !== "delimiter" || !begin.opens || begin.character !== end.character || !begin.length) return false;
  if (begin.character === "~") return true;
  const odd = (begin.closes || end.opens) && (begin.original + end.original) % 3 === 0;
  return !odd || (begin.original % 3 === 0 && end.original % 3 === 0);
}

/** Turn delimiters that found no partner into text, and join neighbouring texts. */
function merged(nodes) {
  const joinedNodes = [];
  for (const node of nodes) {
    const text = node.type === "delimiter" ? node.character.repeat(node.length) : node.type === "text" ? node.text : null;
    if (text === null) joinedNodes.push(node);
    else if (joinedNodes.at(-1)?.type === "text") joinedNodes.at(-1).text += text;
    else if (text) joinedNodes.push({ type: "text", text });
  }
  return joinedNodes;
}

/* Elements. */

/** Return an address if a browser may open it from a model's text; null otherwise. */
export function safeAddress(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    const parsed = new URL(address);
    return ["http:", "https:", "mailto:"].includes(parsed.protocol) ? parsed.href : null;
  } catch {
    return null;
  }
}

function inlineNodes(text) {
  return parseInline(text).map(inlineNode);
}

function inlineNode(node) {
  const children = () => node.children.map(inlineNode);
  switch (node.type) {
    case "text":
      return document.createTextNode(node.text);
    case "code":
      return el("code", {}, node.text);
    case "math":
      return mathElement(node.text, false) ?? el("span", { class: "math" }, node.text);
    case "break":
      return el("br");
    case "strong":
      return el("strong", {}, ...children());
    case "emphasis":
      return el("em", {}, ...children());
    case "deleted":
      return el("del", {}, ...children());
    default:
      return linkNode(node);
  }
}

/** Return a link; a picture becomes a link, since the page loads nothing from other hosts. */
function linkNode(node) {
  const children = node.children.map(inlineNode);
  if (node.type === "image" && !children.length) children.push(document.createTextNode("picture"));
  const address = safeAddress(node.address);
  if (address === null) return el("span", { class: "unsafe-link", title: "This link is not followed." }, ...children);
  const title = node.title || (node.children[0]?.text === node.address ? null : address);
  return el("a", { href: address, title, target: "_blank", rel: "noopener noreferrer nofollow" }, ...children);
}

/** Return the element of one block. */
export function blockElement(block) {
  switch (block.type) {
    case "heading":
      // The page's own headings come first: a model's heading is at most the third level.
      return el(`h${Math.min(6, block.level + 2)}`, { "data-level": block.level }, ...inlineNodes(block.text));
    case "rule":
      return el("hr");
    case "code":
      return codeBlock(block.text, block.language, block.closed);
    case "math":
      return el("div", { class: "math block", tabindex: "0", role: "region", "aria-label": "Formula" }, mathElement(block.text, true) ?? block.text);
    case "quote":
      return el("blockquote", {}, ...block.blocks.map(blockElement));
    case "list":
      return listElement(block);
    case "table":
      return tableElement(block);
    default:
      return el("p", {}, ...inlineNodes(block.text));
  }
}

function listElement(list) {
  const items = list.items.map((blocks) => {
    const item = el("li");
    const task = /^\[([ xX])\](?= )/.exec(blocks[0]?.type === "paragraph" ? blocks[0].text : "");
    if (task) {
      item.className = "task";
      const checked = task[1] !== " ";
      item.append(el("input", { type: "checkbox", checked, disabled: true, "aria-label": checked ? "done" : "to do" }));
      blocks = [{ ...blocks[0], text: blocks[0].text.slice(3) }, ...blocks.slice(1)];
    }
    for (const block of blocks) {
      if (block.type === "paragraph" && !list.loose) item.append(...inlineNodes(block.text));
      else item.append(blockElement(block));
    }
    return item;
  });
  const start = list.ordered && list.number !== 1 ? String(list.number) : null;
  return el(list.ordered ? "ol" : "ul", { start }, ...items);
}

function tableElement(table) {
  const row = (texts, tag) =>
    el("tr", {}, ...texts.map((text, column) => el(tag, { class: table.sides[column] || null }, ...inlineNodes(text))));
  const head = el("thead", {}, row(table.head, "th"));
  const body = table.rows.length ? el("tbody", {}, ...table.rows.map((texts) => row(texts, "td"))) : null;
  return el("div", { class: "table-box", tabindex: "0", role: "region", "aria-label": "Table" }, el("table", {}, head, body));
}

/** Return a text as a list of elements. */
export function renderMarkdown(text) {
  return parse(text).map(blockElement);
}

/** A text that grows, shown as Markdown: only its last block is made again. */
export class MarkdownView {
  constructor(target) {
    this.target = target;
    this.text = "";
    this.base = 0; // where the last block begins in the text
    this.tail = []; // the elements of the blocks that may still change
    this.code = null; // the element of an open code block, which only grows
  }

  /** Show a longer text; one that does not continue the last is shown anew. */
  update(text) {
    if (!text.startsWith(this.text)) this.clear();
    this.text = text;
    const rest = text.slice(this.base);
    const blocks = parse(rest);
    const last = blocks.at(-1);
    if (this.code && blocks.length === 1 && last.type === "code" && !last.closed && last.language === this.language) {
      this.code.grow(last.text);
      return;
    }
    const elements = blocks.map(blockElement);
    for (const element of this.tail) element.remove();
    this.target.append(...elements);
    this.target.classList.toggle("long", this.target.childElementCount > LONG);
    this.code = last?.type === "code" && !last.closed ? elements.at(-1) : null;
    this.language = last?.language;
    this.tail = elements;
    this.settle(rest, blocks);
  }

  /** Keep what can no longer change: a block is over when the first line of the next is complete. */
  settle(rest, blocks) {
    let open = blocks.length - 1;
    if (open > 0 && !/[\r\n]/.test(rest.slice(lineOffset(rest, blocks[open].start), -1))) open -= 1;
    if (open <= 0) return;
    this.base += lineOffset(rest, blocks[open].start);
    this.tail = this.tail.slice(open);
  }

  clear() {
    this.target.replaceChildren();
    this.text = "";
    this.base = 0;
    this.tail = [];
    this.code = null;
  }
}

function lineOffset(text, line) {
  const ends = /\r\n|\n|\r/g;
  for (let index = 0; index < line; index += 1) ends.exec(text);
  return ends.lastIndex;
}
