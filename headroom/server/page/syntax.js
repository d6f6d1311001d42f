// Colours for code: comments, strings, numbers, words of the language, and names that are called.

const words = (text) => new Set(text.split(" "));

const C_WORDS =
  "abstract as async await auto bool boolean break byte case catch char class const constexpr continue " +
  "debugger default defer delete do double dyn else enum export extends extern final finally float fn for " +
  "foreach from func function get go goto if impl implements import in inline instanceof int interface is " +
  "let long match mod module move mut namespace new noexcept of operator override package private " +
  "protected pub public readonly ref return select self set short signed sizeof static struct super " +
  "switch template this throw throws trait try type typedef typename typeof union unsafe unsigned use " +
  "using val var virtual void volatile when where while with yield chan map range";
const PYTHON_WORDS =
  "and as assert async await break case class continue def del elif else except finally for from global " +
  "if import in is lambda match nonlocal not or pass raise return self try while with yield";
const SHELL_WORDS =
  "if then else elif fi for in do done while until case esac function return local export set unset " +
  "echo cd sudo exit source alias";
const SQL_WORDS =
  "select from where group by order having insert into values update set delete create table view index " +
  "drop alter add join left right inner outer full on as and or not null is in like between exists union " +
  "all distinct limit offset primary key foreign references default case when then else end with";
const LITERALS = words("true false null nil none None True False undefined NaN NULL");

const SLASHES = ["//[^\\n]*", "/\\*[^]*?(?:\\*/|$)"];
const HASH = ["#[^\\n]*"];
const QUOTES = ['"(?:[^"\\\\\\n]|\\\\[^])*"?', "'(?:[^'\\\\\\n]|\\\\[^])*'?"];
const LONG_QUOTES = ['"""[^]*?(?:"""|$)', "'''[^]*?(?:'''|$)"];
const TICKS = ["`(?:[^`\\\\]|\\\\[^])*`?"];

const C_LIKE = { comments: SLASHES, strings: [...TICKS, ...QUOTES], words: words(C_WORDS) };
const PYTHON = { comments: HASH, strings: [...LONG_QUOTES, ...QUOTES], words: words(PYTHON_WORDS) };
const SHELL = { comments: ["(?<![^\\s])#[^\\n]*"], strings: QUOTES, words: words(SHELL_WORDS) };
const SQL = { comments: ["--[^\\n]*", "/\\*[^]*?(?:\\*/|$)"], strings: QUOTES, words: words(SQL_WORDS), anyCase: true };
const DATA = { comments: HASH, strings: QUOTES, words: new Set(), keys: "[\\w.-]+(?=\\s*[:=])" };
const MARKUP = { comments: ["<!--[^]*?(?:-->|$)"], strings: QUOTES, words: new Set(), keys: "</?[\\w:-]+|/?>" };
const STYLES = { comments: ["/\\*[^]*?(?:\\*/|$)"], strings: QUOTES, words: new Set(), keys: "[\\w-]+(?=\\s*:)|@[\\w-]+" };
const LUA = { comments: ["--[^\\n]*"], strings: QUOTES, words: words("and break do else elseif end for function goto if in local not or repeat return then until while") };

const LANGUAGES = new Map();
for (const [grammar, names] of [
  [C_LIKE, "js javascript jsx mjs ts typescript tsx c h cpp c++ cc hpp cxx cu cuda java rust rs go golang cs csharp c# swift kotlin kt php scala dart zig objc glsl wgsl"],
  [{ ...C_LIKE, comments: [], words: new Set(), keys: '"(?:[^"\\\\\\n]|\\\\.)*"(?=\\s*:)' }, "json jsonc json5"],
  [PYTHON, "py python python3 ipython ruby rb r julia jl elixir ex perl"],
  [SHELL, "sh bash zsh shell fish console terminal dockerfile docker makefile make"],
  [SQL, "sql postgres postgresql mysql sqlite"],
  [DATA, "yaml yml toml ini conf properties env"],
  [MARKUP, "html xml svg vue svelte xhtml"],
  [STYLES, "css scss less"],
  [LUA, "lua haskell hs ada"],
]) {
  for (const name of names.split(" ")) LANGUAGES.set(name, grammar);
}

/** Return whether code of a language gets colours. */
export function knowsLanguage(language) {
  return LANGUAGES.has(language.toLowerCase());
}

/** Return code as a list of {kind, text}; kind is "" for plain text. Their texts join to the code. */
export function colourCode(code, language) {
  const grammar = LANGUAGES.get(language.toLowerCase());
  if (!grammar) return [{ kind: "", text: code }];
  const pieces = [];
  const plain = (text) => {
    if (!text) return;
    if (pieces.at(-1)?.kind === "") pieces.at(-1).text += text;
    else pieces.push({ kind: "", text });
  };
  let end = 0;
  for (const found of code.matchAll(pattern(grammar))) {
    plain(code.slice(end, found.index));
    end = found.index + found[0].length;
    const kind = kindOf(found.groups, grammar);
    if (kind) pieces.push({ kind, text: found[0] });
    else plain(found[0]);
  }
  plain(code.slice(end));
  return pieces;
}

const patterns = new Map();

function pattern(grammar) {
  if (!patterns.has(grammar)) {
    const kinds = [
      ["key", grammar.keys ? [grammar.keys] : []],
      ["comment", grammar.comments],
      ["string", grammar.strings],
      ["number", ["\\b(?:0[xX][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\w*"]],
      ["word", ["[A-Za-z_$][\\w$]*"]],
    ];
    const parts = kinds.filter(([, texts]) => texts.length).map(([kind, texts]) => `(?<${kind}>${texts.join("|")})`);
    patterns.set(grammar, new RegExp(parts.join("|"), "g"));
  }
  return patterns.get(grammar);
}

function kindOf(groups, grammar) {
  const { key, comment, string, number, word } = groups;
  if (comment !== undefined) return "comment";
  if (key !== undefined) return "key";
  if (string !== undefined) return "string";
  if (number !== undefined) return "number";
  if (LITERALS.has(word)) return "number";
  return grammar.words.has(grammar.anyCase ? word.toLowerCase() : word) ? "word" : "";
}
