// Formulas: the part of LaTeX that models write, as MathML, which browsers lay out themselves.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MOST = 4000; // characters of a formula; longer ones are shown as they are written
const DEEPEST = 60; // groups in each other

const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => [pair.slice(0, -1).replace(/:$/, ""), pair.at(-1)]));

const LETTERS = table(`
  alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ
  lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ
  chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω
  infty:∞ partial:∂ nabla:∇ ell:ℓ hbar:ℏ Re:ℜ Im:ℑ aleph:ℵ emptyset:∅ varnothing:∅ top:⊤ bot:⊥ angle:∠
  ldots:… dots:… cdots:⋯ vdots:⋮ ddots:⋱ prime:′ degree:°`);
const OPERATORS = table(`
  times:× cdot:⋅ div:÷ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ odot:⊙ wedge:∧ vee:∨ land:∧
  lor:∨ lnot:¬ neg:¬ cap:∩ cup:∪ setminus:∖ le:≤ leq:≤ ge:≥ geq:≥ ne:≠ neq:≠ equiv:≡ approx:≈ sim:∼
  simeq:≃ cong:≅ propto:∝ ll:≪ gg:≫ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ forall:∀
  exists:∃ nexists:∄ to:→ rightarrow:→ leftarrow:← leftrightarrow:↔ Rightarrow:⇒ implies:⇒ Leftarrow:⇐
  Leftrightarrow:⇔ iff:⇔ mapsto:↦ longrightarrow:⟶ longmapsto:⟼ uparrow:↑ downarrow:↓ perp:⊥ parallel:∥
  mid:∣ vert:| Vert:‖ langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ lbrace:{ rbrace:} colon:: therefore:∴
  because:∵ models:⊨ vdash:⊢ ltimes:⋉ rtimes:⋊ triangle:△ square:□ blacksquare:■ checkmark:✓ dagger:†`);
const LARGE = table("sum:∑ prod:∏ coprod:∐ int:∫ iint:∬ iiint:∭ oint:∮ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀");
const FUNCTIONS = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det dim ker deg gcd hom arg Pr".split(" "));
const LIMITS = new Set("lim max min sup inf limsup liminf argmax argmin".split(" "));
const ACCENTS = table("hat:^ widehat:^ bar:¯ overline:¯ vec:→ tilde:~ widetilde:~ dot:˙ ddot:¨ overrightarrow:→ overbrace:⏞");
const BELOW = table("underline:_ underbrace:⏟");
const SPACES = { ",": "0.17em", ":": "0.22em", ";": "0.28em", " ": "0.25em", "!": "-0.17em", quad: "1em", qquad: "2em" };
const IGNORED = new Set("displaystyle textstyle scriptstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr nonumber notag".split(" "));
const TEXTS = new Set("text textrm textnormal textbf textit texttt mbox operatorname mathrm mathit mathsf mathtt".split(" "));
const FENCES = { matrix: ["", ""], smallmatrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""] };
const DOUBLE = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };

const make = (tag, ...children) => {
  const node = document.createElementNS(MATHML, tag);
  node.append(...children);
  return node;
};

const set = (node, name, value) => {
  node.setAttribute(name, value);
  return node;
};

/** Return letters in another alphabet of Unicode: bold, double-struck or script. */
function lettered(text, kind) {
  const starts = { mathbf: [0x1d400, 0x1d41a], boldsymbol: [0x1d400, 0x1d41a], bm: [0x1d400, 0x1d41a], mathbb: [0x1d538, 0x1d552], mathcal: [0x1d4d0, 0x1d4ea], mathscr: [0x1d4d0, 0x1d4ea], mathfrak: [0x1d56c, 0x1d586] };
  const [upper, lower] = starts[kind];
  return text.replace(/[A-Za-z]/g, (letter) => {
    if (kind === "mathbb" && DOUBLE[letter]) return DOUBLE[letter];
    const large = letter < "a";
    return String.fromCodePoint((large ? upper : lower) + letter.charCodeAt(0) - (large ? 65 : 97));
  });
}

/** Return a formula as a MathML element; null if it cannot be read. */
export function mathElement(source, display) {
  if (source.length > MOST) return null;
  try {
    const parser = new MathParser(source, display);
    const row = parser.row(() => false);
    if (parser.at < parser.tokens.length) return null;
    const formula = set(make("math", row), "display", display ? "block" : "inline");
    return set(formula, "alttext", source);
  } catch (error) {
    if (error instanceof MathError) return null;
    throw error;
  }
}

class MathError extends Error {}

class MathParser {
  constructor(source, display) {
    this.tokens = source.match(/\\[A-Za-z]+\*?|\\[^]|\d+(?:[.,]\d+)*|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.display = display;
    this.depth = 0;
  }

  peek() {
    while (this.at < this.tokens.length && /^\s+$/.test(this.tokens[this.at])) this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new MathError("the formula ends too early");
    this.at += 1;
    return token;
  }

  expect(wanted) {
    if (this.next() !== wanted) throw new MathError(`${wanted} is missing`);
  }

  /** Read atoms until a token for which `ends` is true, which is left. */
  row(ends) {
    this.depth += 1;
    if (this.depth > DEEPEST) throw new MathError("too many groups");
    const nodes = [];
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
      if (token === "}" || token === "&" || token === "\\\\" || token === "\\right" || token === "\\end") throw new MathError(`${token} has no begin`);
      const node = this.scripted();
      if (node) nodes.push(node);
    }
    this.depth -= 1;
    return nodes.length === 1 ? nodes[0] : make("mrow", ...nodes);
  }

  /** Read an atom with what stands above and below it. */
  scripted() {
    const begin = this.peek();
    const base = begin === "^" || begin === "_" ? make("mrow") : this.atom();
    if (base === null) return null;
    let [low, high] = [null, null];
    for (let token = this.peek(); token === "^" || token === "_" || token === "'"; token = this.peek()) {
      if (token === "'") {
        let primes = "";
        while (this.peek() === "'") primes += this.next() && "′";
        if (high) throw new MathError("two exponents");
        high = make("mo", primes);
        continue;
      }
      this.next();
      const script = this.argument();
      if (token === "_" ? low : high) throw new MathError("two scripts");
      if (token === "_") low = script;
      else high = script;
    }
    if (!low && !high) return base;
    const around = base.limits && this.display;
    if (low && high) return make(around ? "munderover" : "msubsup", base, low, high);
    return low ? make(around ? "munder" : "msub", base, low) : make(around ? "mover" : "msup", base, high);
  }

  argument() {
    if (this.peek() === "{") return this.group();
    return this.atom() ?? make("mrow");
  }

  group() {
    this.expect("{");
    const row = this.row((token) => token === "}");
    this.expect("}");
    return row;
  }

  /** Read the plain text of a group. */
  rawGroup() {
    this.expect("{");
    let text = "";
    for (let open = 1; ; ) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new MathError("} is missing");
      this.at += 1;
      if (token === "{") open += 1;
      if (token === "}") open -= 1;
      if (!open) return text;
      if (token !== "{" && token !== "}") text += token;
    }
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      this.at -= 1;
      return this.group();
    }
    if (token.startsWith("\\") && token.length > 1) return this.command(token.slice(1));
    if (/^\d/.test(token)) return make("mn", token);
    if (/^\p{L}$/u.test(token)) return make("mi", token);
    if (token === "~") return set(make("mspace"), "width", "0.25em");
    return set(make("mo", token === "-" ? "−" : token), "stretchy", "false");
  }

  command(name) {
    if (LETTERS.has(name)) return make("mi", LETTERS.get(name));
    if (OPERATORS.has(name)) return set(make("mo", OPERATORS.get(name)), "stretchy", "false");
    if (LARGE.has(name)) return limited(make("mo", LARGE.get(name)), !name.includes("int"));
    if (FUNCTIONS.has(name)) return make("mi", name);
    if (LIMITS.has(name)) return limited(make("mi", name.replace(/^(lim|arg)(?=.)/, "$1 ")), true);
    if (ACCENTS.has(name)) return set(make("mover", this.argument(), make("mo", ACCENTS.get(name))), "accent", "true");
    if (BELOW.has(name)) return make("munder", this.argument(), make("mo", BELOW.get(name)));
    if (Object.hasOwn(SPACES, name)) return set(make("mspace"), "width", SPACES[name]);
    if (IGNORED.has(name)) return null;
    if (TEXTS.has(name)) return this.words(name);
    if (/^(?:mathbf|boldsymbol|bm|mathbb|mathcal|mathscr|mathfrak)$/.test(name)) return this.alphabet(name);
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return make("mfrac", this.argument(), this.argument());
      case "binom":
        return fenced("(", set(make("mfrac", this.argument(), this.argument()), "linethickness", "0"), ")");
      case "sqrt":
        return this.root();
      case "left":
        return this.fence();
      case "begin":
        return this.environment();
      case "overset":
      case "stackrel":
      case "underset": {
        const script = this.argument();
        return make(name === "underset" ? "munder" : "mover", this.argument(), script);
      }
      case "boxed":
        return this.argument();
      case "tag":
        return make("mtext", `\u2003(${this.rawGroup()})`);
      case "pmod":
        return make("mrow", make("mtext", "\u2002(mod "), this.argument(), make("mtext", ")"));
      case "bmod":
      case "mod":
        return make("mo", "mod");
      case "not":
        return make("mo", `${this.atom()?.textContent ?? ""}\u0338`);
      case "|":
        return make("mo", "‖");
      default:
        if (/^[{}$%&#_]$/.test(name)) return set(make("mo", name), "stretchy", "false");
        throw new MathError(`\\${name} is not known`);
    }
  }

  words(name) {
    const text = this.rawGroup().replaceAll("\\", "");
    return name.startsWith("text") || name === "mbox" ? make("mtext", text.replace(/^\s|\s$/g, "\u00a0")) : set(make("mi", text), "mathvariant", "normal");
  }

  alphabet(name) {
    const text = this.peek() === "{" ? this.rawGroup() : this.next();
    if (text.includes("\\")) throw new MathError("a command in an alphabet");
    return make("mi", lettered(text, name));
  }

  root() {
    if (this.peek() !== "[") return make("msqrt", this.argument());
    this.next();
    const degree = this.row((token) => token === "]");
    this.expect("]");
    return make("mroot", this.argument(), degree);
  }

  /** Read what \left and \right enclose. */
  fence() {
    const open = this.delimiter();
    const inner = this.row((token) => token === "\\right");
    this.expect("\\right");
    return fenced(open, inner, this.delimiter());
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (token === "\\|") return "‖";
    if (!token.startsWith("\\")) return token;
    const name = token.slice(1);
    if (/^[{}]$/.test(name)) return name;
    if (!OPERATORS.has(name)) throw new MathError(`${token} is no bracket`);
    return OPERATORS.get(name);
  }

  environment() {
    const name = this.rawGroup();
    const kind = name.replace("*", "");
    const aligned = /^(?:align|aligned|split|gather|gathered|equation|multline)$/.test(kind);
    if (!aligned && !FENCES[kind]) throw new MathError(`${name} is not known`);
    if (kind === "array" && this.peek() === "{") this.rawGroup();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row((token) => token === "&" || token === "\\\\" || token === "\\end"));
      const token = this.next();
      if (token === "\\end") break;
      if (token === "\\\\") rows.push([]);
    }
    if (this.rawGroup() !== name) throw new MathError(`${name} has another end`);
    const inner = make("mtable", ...rows.map((cells) => make("mtr", ...cells.map((cell) => make("mtd", cell)))));
    if (aligned) return set(inner, "class", "aligned");
    if (kind === "cases") inner.setAttribute("class", "cases");
    return fenced(FENCES[kind][0], inner, FENCES[kind][1]);
  }
}

function limited(node, limits) {
  node.limits = limits; // what stands above and below goes there, not beside
  return node;
}

function fenced(open, inner, close) {
  const sign = (text) => (text ? [set(make("mo", text), "stretchy", "true")] : []);
  return make("mrow", ...sign(open), inner, ...sign(close));
}
